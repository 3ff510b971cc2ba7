"""Report of a tuning run, with a table of its trials and settings in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ggufspec.reports import table
from ggufspec.reports.table import ReportColumn, ReportTable
from ggufspec.reports.words import with_spread
from ggufspec.schema.text import counted, number
from ggufspec.schema.tune import TuneDocument, TunedSetting, TuneTrial
from ggufspec.settings.registry import drafters_label, drafts_with_file

# Settings that are named only if they are unusual: (llama.cpp flag, usual value)
_OTHER = {"n_cpu_moe": ("ncmoe", 0), "flash_attn": ("fa", "auto"), "ubatch_size": ("ub", 512)}


def setting_name(document: TuneDocument, setting: TunedSetting) -> str:
    """Return one line that describes a setting, without usual values."""
    parts = [f"ngl {setting.gpu_layers}"]
    if not setting.drafted:
        parts.append("no draft")
    else:
        if _places_draft(document, setting):
            parts.append(f"ngld {setting.gpu_layers_draft}")
        parts.append(drafters_label(setting.drafter))
        most = "up to " if setting.draft_policy == "adaptive" else ""
        parts.append(f"{setting.draft_policy} {most}{setting.draft_max}")
    parts.append(counted(setting.threads, "thread"))
    return ", ".join(filter(None, (*parts, _other(setting))))


def varied(document: TuneDocument) -> frozenset[str]:
    """Return the keys of settings that differ between trials."""
    settings = [asdict(trial.setting) for trial in document.trials]
    return frozenset(key for key in (settings or [{}])[0] if len({str(each[key]) for each in settings}) > 1)


def _places_draft(document: TuneDocument, setting: TunedSetting) -> bool:
    """Return whether the draft is placed separately; a head in the target's file is placed with the target."""
    return bool(document.pair.get("draft")) and drafts_with_file(setting.drafter)


def _layers(document: TuneDocument, setting: TunedSetting) -> str:
    own = _places_draft(document, setting)
    return f"{setting.gpu_layers} + {setting.gpu_layers_draft}" if own else str(setting.gpu_layers)


def _length(setting: TunedSetting) -> str:
    if not setting.drafted:
        return "–"
    return f"{'≤ ' if setting.draft_policy == 'adaptive' else ''}{setting.draft_max}"


def _other(setting: TunedSetting) -> str:
    values = [(flag, getattr(setting, key), usual) for key, (flag, usual) in _OTHER.items()]
    found = [f"{flag} {value}" for flag, value, usual in values if value != usual]
    types = [*dict.fromkeys((setting.cache_type_k, setting.cache_type_v))]
    return " ".join(found if types == ["f16"] else [*found, f"kv {'/'.join(types)}"])


COLUMNS = (
    ReportColumn("#"),
    ReportColumn("Layers"),
    ReportColumn("Drafter", lambda setting: setting.drafter if setting.drafted else "–", "left"),
    ReportColumn("Draft", _length),
    ReportColumn("Threads", lambda setting: str(setting.threads)),
    ReportColumn("Other", _other, "left", wraps=True),
    ReportColumn("Predicted", number),
    ReportColumn("Tokens/s", lambda spread: with_spread(spread) if spread else "failed"),
    table.word(""),
)


def trials(document: TuneDocument, *, best: int | None = None) -> ReportTable:
    """Return a table with a row per trial in order, or only ``best`` trials plus the winner and the planned setting.

    With ``best``, the winner is first, followed by finalists and then by single trials, each group fastest first.
    """
    shown, named = list(document.trials), (document.winner, document.baseline)
    if best is not None:  # finalists first, because half of a fast single trial's lead is luck
        shown = sorted(shown, key=lambda t: (t.index == document.winner, bool(t.searched), _median(t)), reverse=True)
        shown = [t for place, t in enumerate(shown) if place < best or t.index in named]
    rows = []
    for trial in shown:
        mark = _mark(document, trial, is_short=best is not None)
        setting = (_layers(document, trial.setting), *(trial.setting,) * 4)
        rows.append((trial.index + 1, *setting, trial.predicted_tokens_per_s, trial.tokens_per_s or False, mark))
    failed = {n: "failed" for n, trial in enumerate(shown) if trial.tokens_per_s is None}
    return ReportTable(
        "Trials", COLUMNS, rows, failed, [n for n, one in enumerate(shown) if one.index == document.winner]
    )


def _mark(document: TuneDocument, trial: TuneTrial, *, is_short: bool) -> str:
    """Return the text in a trial's last column; documents from older versions have no verdict."""
    if trial.index == document.winner and (document.decided or not document.verdict):
        return "best"
    if trial.index == document.baseline:
        return "planned"
    if trial.index == document.winner or trial.index in document.close:
        return "close"
    if not is_short or trial.tokens_per_s is None:
        return ""
    return "final" if trial.searched else "1 trial" if len(trial.tokens_per_s.samples) == 1 else ""


def _median(trial: TuneTrial) -> float:
    return trial.tokens_per_s.median if trial.tokens_per_s else 0.0


def failures(document: TuneDocument) -> list[str]:
    reasons: dict[str, list[int]] = {}
    for trial in document.trials:
        if trial.failure:
            reasons.setdefault(trial.failure.error, []).append(trial.index + 1)
    return [f"{'#' + ', #'.join(map(str, numbers))} failed: {reason}" for reason, numbers in reasons.items()]


def markdown(document: TuneDocument) -> str:
    sentences = (f"- {table.escaped(one)}" for one in (*document.explanation, *failures(document)))
    return "\n".join([table.markdown(trials(document)), "", *sentences]) + "\n"


def comma_separated(document: TuneDocument) -> str:
    """Return CSV with a line per measurement, marked as search or final; only finals are comparable with each other."""
    names = [*asdict(document.trials[0].setting)] if document.trials else []
    heads = ("trial", *names, "predicted_tokens_per_s", "tokens_per_s", "part", "failure")
    return table.comma_separated(heads, _lines(document))


def _lines(document: TuneDocument) -> Iterator[dict[str, Any]]:
    for trial in document.trials:
        line = asdict(trial.setting) | {
            "trial": trial.index + 1,
            "predicted_tokens_per_s": f"{trial.predicted_tokens_per_s:.4f}",
            "failure": trial.failure.error if trial.failure else "",
        }
        for sample in trial.searched:
            yield line | {"tokens_per_s": sample, "part": "search"}
        part = "final" if trial.searched else "search"
        for last in trial.tokens_per_s.samples if trial.tokens_per_s else (None,):
            yield line | {"tokens_per_s": last, "part": part}
