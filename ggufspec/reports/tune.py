"""A tuning as a table: for the terminal while it runs and after, as Markdown, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ggufspec.display import counted
from ggufspec.reports.tables import escaped, with_spread
from ggufspec.schema.tune import TuneDocument, TunedSetting, TuneTrial

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("#", "Layers", "Drafter", "Draft", "Threads", "Other", "Predicted", "Tokens/s")
_WHO = {"draft": "model", "lookup": "lookup", "both": "both", "none": "–"}
_USUAL = (512, "auto", "f16")  # micro-batch, flash attention, cache


def layers(setting: TunedSetting) -> str:
    """Target layers, draft layers behind a plus."""
    own = setting.drafted and setting.drafter != "lookup"
    return f"{setting.gpu_layers} + {setting.gpu_layers_draft}" if own else str(setting.gpu_layers)


def length(setting: TunedSetting) -> str:
    """How far is drafted."""
    if not setting.drafted:
        return "–"
    return f"{'≤ ' if setting.draft_policy == 'adaptive' else ''}{setting.draft_max}"


def other(setting: TunedSetting) -> str:
    """What is not as usual."""
    said = []
    if setting.n_cpu_moe:
        said.append(f"ncmoe {setting.n_cpu_moe}")
    if setting.flash_attn != _USUAL[1]:
        said.append(f"fa {setting.flash_attn}")
    if setting.cache_type_k != _USUAL[2] or setting.cache_type_v != _USUAL[2]:
        said.append(f"kv {setting.cache_type_k}")
    if setting.ubatch_size != _USUAL[0]:
        said.append(f"ub {setting.ubatch_size}")
    return " ".join(said)


def words(setting: TunedSetting) -> str:
    """A setting in one line."""
    own = setting.drafted and setting.drafter != "lookup"
    who = {"draft": "the draft model", "lookup": "the n-gram lookup", "both": "draft model and lookup"}
    parts = [f"{setting.gpu_layers} target layers on the card" if setting.gpu_layers else "the target on the CPU"]
    if own and setting.gpu_layers + setting.gpu_layers_draft:
        parts.append(f"{setting.gpu_layers_draft} of the draft")
    if setting.drafted:
        far = "as far as it pays, at most" if setting.draft_policy == "adaptive" else "always"
        parts.append(f"{who[setting.drafter]} drafting {far} {setting.draft_max}")
    else:
        parts.append("no draft")
    parts.append(counted(setting.threads, "thread"))
    rest = other(setting)
    return ", ".join([*parts, rest] if rest else parts)


def row(trial: TuneTrial) -> tuple[str, ...]:
    """The cells of a trial, in :data:`COLUMNS`."""
    setting = trial.setting
    measured = "failed" if trial.tokens_per_s is None else with_spread(trial.tokens_per_s)
    return (
        str(trial.index + 1),
        layers(setting),
        _WHO[setting.drafter],
        length(setting),
        str(setting.threads),
        other(setting),
        _digits(trial.predicted_tokens_per_s),
        measured,
    )


def _digits(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def terminal(
    trials: Sequence[TuneTrial],
    *,
    winner: int | None = None,
    baseline: int | None = None,
    last: int | None = None,
    best: int | None = None,
) -> Table:
    """A rich table of trials, 80 columns wide at most.

    Args:
        trials: in the order in which they were made.
        winner: index of the one that won, or leads.
        baseline: index of what was planned.
        last: show only the last so many, with the winner and what was planned.
        best: show only so many, with the same two: the winner, then those of the final, the fastest first.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index in (2, 5) else "right", no_wrap=index != 5)
    table.add_column("", no_wrap=True)
    shown = [t for t in trials if last is None or t.index in (winner, baseline) or t.index >= len(trials) - last]
    if best is not None:
        shown = sorted(trials, key=lambda t: (t.index == winner, _repeated(t), _median(t)), reverse=True)
        shown = [t for place, t in enumerate(shown) if place < best or t.index in (winner, baseline)]
    for trial in shown:
        mark = "best" if trial.index == winner else "planned" if trial.index == baseline else ""
        mark = mark or ("final" if best is not None and _repeated(trial) else "")
        style = "bold green" if trial.index == winner else "" if trial.tokens_per_s else "red"
        table.add_row(*(Text(cell) for cell in row(trial)), mark, style=style)
    return table


def _median(trial: TuneTrial) -> float:
    return trial.tokens_per_s.median if trial.tokens_per_s else 0.0


def _repeated(trial: TuneTrial) -> bool:
    """Whether it was in the final: of a single trial that looks fast the half is luck."""
    return bool(trial.searched)


def failures(document: TuneDocument) -> list[str]:
    """A line for each reason why trials failed, with their numbers."""
    reasons: dict[str, list[int]] = {}
    for trial in document.trials:
        if trial.failure:
            reasons.setdefault(trial.failure.error, []).append(trial.index + 1)
    return [f"{'#' + ', #'.join(map(str, numbers))} failed: {reason}" for reason, numbers in reasons.items()]


def markdown(document: TuneDocument) -> str:
    """A Markdown table and why."""
    lines = ["| " + " | ".join((*COLUMNS, "")) + " |", "|" + " --- |" * (len(COLUMNS) + 1)]
    for trial in document.trials:
        mark = "**best**" if trial.index == document.winner else "planned" if trial.index == document.baseline else ""
        lines.append("| " + " | ".join((*map(escaped, row(trial)), mark)) + " |")
    lines += ["", *(f"- {escaped(sentence)}" for sentence in (*document.explanation, *failures(document)))]
    return "\n".join(lines) + "\n"


def comma_separated(document: TuneDocument) -> str:
    """One line for each measurement; those of the final, which are held against each other, say so."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [*asdict(document.trials[0].setting)] if document.trials else []
    writer.writerow(("trial", *names, "predicted_tokens_per_s", "tokens_per_s", "part", "failure"))
    for trial in document.trials:
        setting = asdict(trial.setting).values()
        last = "final" if trial.searched else "search"
        measured: Sequence[float | str] = trial.tokens_per_s.samples if trial.tokens_per_s else [""]
        samples = [*((sample, "search") for sample in trial.searched), *((sample, last) for sample in measured)]
        why = trial.failure.error if trial.failure else ""
        for sample, part in samples:
            writer.writerow((trial.index + 1, *setting, f"{trial.predicted_tokens_per_s:.4f}", sample, part, why))
    return text.getvalue()
