"""Figures of a tuning: the search, tokens/s over layers and over draft length. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ggufspec.display import number
from ggufspec.reports.html.figures import (
    EXPECTED,
    TARGET_ONLY,
    Figure,
    Mark,
    Row,
    interval,
    layers,
    matching,
    scale_of,
    swept,
)
from ggufspec.reports.table import word, words
from ggufspec.reports.tune import roles, setting_name, varied
from ggufspec.reports.values import with_spread
from ggufspec.schema.plan import PlanDocument
from ggufspec.schema.tune import TuneDocument, TuneTrial


def _number(trial: TuneTrial) -> int:
    """As tune's own table counts, from 1."""
    return trial.index + 1


def trial_row(trial: TuneTrial, document: TuneDocument) -> Row:
    """One measurement as cells: number, setting, predicted, measured, what became of it."""
    remark = ", ".join(role for role, index in roles(document) if index == trial.index) or trial.why
    if trial.failure is not None:
        remark = trial.failure.error if trial.tokens_per_s is None else f"{remark}; once: {trial.failure.error}"
    return (
        str(_number(trial)),
        setting_name(trial.setting, varied(document)),
        f"≈ {number(trial.predicted_tokens_per_s)}",
        with_spread(trial.tokens_per_s) if trial.tokens_per_s else "–",
        remark,
    )


TRIAL_COLUMNS = ("Trial", words("Setting"), "Predicted", "Tokens/s", words("Remarks"))


def of_tune(document: TuneDocument, plans: Sequence[PlanDocument] = ()) -> Iterator[Figure]:
    """The search, tokens/s over layers, and over draft length."""
    if not document.trials:
        return
    yield _search(document)
    marks = []
    for trial in document.trials:
        mark = _trial_mark(trial, document, trial.setting.gpu_layers)
        marks.append(mark)
    lines = [line for plan in matching(document.pair, plans) for line in swept(plan, "with draft")]
    rows = [
        (str(_number(t)), str(t.setting.gpu_layers), with_spread(t.tokens_per_s) if t.tokens_per_s else "failed")
        for t in document.trials
    ]
    if lines or len({mark.x for mark in marks}) > 1:
        figure = layers(marks, lines, rows, (TARGET_ONLY, "with draft"), "Trial")
        if figure is not None:
            yield figure
    yield from _lengths(document)


def _trial_mark(trial: TuneTrial, document: TuneDocument, x: float, series: str = "") -> Mark:
    series = series or ("with draft" if trial.setting.drafted else TARGET_ONLY)
    what = f"Trial {_number(trial)}, {setting_name(trial.setting, varied(document))}"
    if trial.tokens_per_s is None:
        why = trial.failure.error if trial.failure else "not measured"
        return Mark(series, x, 0.0, f"{what}: {why}", kind="failed")
    low, high = interval(trial.tokens_per_s)
    best = trial.index == document.winner
    description = f"{what}: {with_spread(trial.tokens_per_s)} tokens/s" + (", the winner" if best else "")
    return Mark(
        series,
        x,
        trial.tokens_per_s.median,
        description,
        low,
        high,
        label="winner" if best else "",
        kind="best" if best else "measured",
    )


def _search(document: TuneDocument) -> Figure:
    marks = [_trial_mark(trial, document, _number(trial)) for trial in document.trials]
    reached, frontier = 0.0, []
    for mark in marks:
        if mark.y > reached:
            frontier.append((float(mark.x), mark.y))
            reached = mark.y
    last = float(_number(document.trials[-1]))
    if frontier and frontier[-1][0] < last:
        frontier.append((last, reached))
    predicted = [
        Mark(
            EXPECTED,
            _number(trial),
            trial.predicted_tokens_per_s,
            f"Trial {_number(trial)}: ≈ {number(trial.predicted_tokens_per_s)} tokens/s were expected",
            kind="predicted",
        )
        for trial in document.trials
    ]
    return Figure(
        "search",
        "The search",
        "Every setting, in the order in which they were tried. The dashed line is the best so far, the thin one what "
        "was expected before each."
        + (
            " Those with an interval were measured again in the end, side by side: the winner is one of them."
            if any(trial.searched for trial in document.trials)
            else ""
        )
        + (" A cross is a trial that failed." if any(m.kind == "failed" for m in marks) else ""),
        "points",
        "trial",
        "tokens/s",
        (*predicted, *marks),
        TRIAL_COLUMNS,
        tuple(trial_row(trial, document) for trial in document.trials),
        (TARGET_ONLY, "with draft", EXPECTED),
        frontier=tuple(frontier),
        whole=True,
    )


def _lengths(document: TuneDocument) -> Iterator[Figure]:
    drafted = [trial for trial in document.trials if trial.setting.drafted]
    policies = tuple(dict.fromkeys(trial.setting.draft_policy for trial in drafted))
    lengths = sorted({float(trial.setting.draft_max) for trial in drafted})
    if len(lengths) < 2:
        return
    marks = [_trial_mark(trial, document, trial.setting.draft_max, trial.setting.draft_policy) for trial in drafted]
    yield Figure(
        "length",
        "Draft length against tokens/s",
        "Trials with a draft, by how many tokens a round may draft. Other settings differ from point to point.",
        "points",
        "drafted tokens a round, at most",
        "tokens/s",
        tuple(marks),
        ("Trial", word("Policy"), "Draft length", "Tokens/s"),
        tuple(
            (
                str(_number(t)),
                t.setting.draft_policy,
                str(t.setting.draft_max),
                with_spread(t.tokens_per_s) if t.tokens_per_s else "failed",
            )
            for t in drafted
        ),
        policies,
        whole=True,
        scale=scale_of(lengths),
    )
