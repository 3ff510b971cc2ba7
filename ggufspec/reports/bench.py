"""Report of a bench, with its tables and remarks on texts and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ggufspec.reports import table
from ggufspec.reports.table import ReportColumn, ReportTable
from ggufspec.reports.words import (
    accepted_text,
    by_drafter,
    layers,
    milliseconds,
    mode_name,
    prompt_figures,
    ratio,
    ratio_text,
    share,
    tokens_per_round,
    with_spread,
)
from ggufspec.schema.base import MeasuredRun, Portion, SpeculativeRun
from ggufspec.schema.bench import BenchDocument, LengthSpeedup
from ggufspec.schema.text import counted

_POSITIONS = 8  # number of draft positions shown; later ones are reached too rarely for a useful rate (JSON has all)


def results(document: BenchDocument) -> ReportTable:
    """Return a table with a row per measured run; tokens/s covers decoding only, the speedup covers whole answers."""
    speedups = {"speculative": document.speedup, "llama_hook": document.hook.speedup if document.hook else None}
    whole = _whole(document)
    seconds = {"target_only": whole.target_only_s, "speculative": whole.speculative_s} if whole else {}
    runs = {mode: run for mode, run in document.runs.items() if run is not None}
    on_gpu = any(run.gpu_layers or getattr(run, "gpu_layers_draft", 0) for run in runs.values())
    # With GPU layers and a lossy row, the table is 79 of 80 columns wide, so the other columns appear only in files
    columns = (
        table.word("Run"),
        ReportColumn("GPU layers", layers, only="" if on_gpu else "file"),
        ReportColumn("Tokens/s", with_spread),
        *([ReportColumn(counted(document.answer_tokens, "token"), _seconds)] if whole else []),
        ReportColumn("Speedup", ratio),
        ReportColumn("Accepted", accepted_text),
        ReportColumn("Tokens/round", tokens_per_round, only="file"),  # on the terminal, the verdict states them
        ReportColumn("Accepted by position", _by_position, only="file"),
    )
    rows: list[tuple[Any, ...]] = []
    for mode, run in runs.items():
        name = mode_name(mode) + (" (lossy)" if getattr(run, "lossy", False) else "")
        answer_s = [seconds.get(mode)] if whole else []
        rows.append((name, run, run.tokens_per_s, *answer_s, speedups.get(mode), run, run, run))
    return ReportTable("Results", columns, rows, leading=[n for n, mode in enumerate(runs) if mode == "speculative"])


def _whole(document: BenchDocument) -> LengthSpeedup | None:
    return next((one for one in document.by_length if one.tokens == document.answer_tokens), None)


def footnote(document: BenchDocument) -> str:
    """Return a note on what the columns of :func:`results` cover; "" for an old document."""
    if _whole(document) is None:
        return ""
    tokens = counted(document.answer_tokens, "token")
    text = f"Tokens/s covers generation only; {tokens} and Speedup cover whole answers of that length, prompt included"
    return f"{text}{' (extrapolated)' if document.answer_tokens > document.measured_tokens else ''}."


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else milliseconds(value)


def portions(by_kind: Sequence[Portion], by_part: Sequence[Portion]) -> ReportTable | None:
    """Return a table of acceptance and speedup by kind of prompt and part of the answer; None if not measured."""
    if not (by_kind or by_part):
        return None
    columns = (
        table.word("Kind" if by_kind else "Part"),
        ReportColumn("Accepted", lambda one: share(one.accepted, one.drafted)),
        ReportColumn("Speedup", ratio_text),
    )
    rows = [(one.name, one, one.speedup) for one in (*by_kind, *by_part)]
    groups = [len(by_kind)] if by_kind and by_part else []
    return ReportTable("By kind of prompt" if by_kind else "By part of the answer", columns, rows, groups=groups)


def _by_position(run: MeasuredRun) -> str:
    rates = run.accepted_by_position if isinstance(run, SpeculativeRun) else ()
    return " ".join([*(f"{rate:.0%}" for rate in rates[:_POSITIONS]), *(["…"] if len(rates) > _POSITIONS else [])])


def markdown(document: BenchDocument) -> str:
    """Return Markdown with the pair's note, the results, the verdict, crashed runs and the table of portions."""
    note = f"{table.escaped(document.pair['note'])}\n\n" if document.pair.get("note") else ""
    parts = (document.verdict.text, document.verdict.why, footnote(document), *_basis(document))
    verdict = table.escaped(" ".join(filter(None, parts)))
    crashed = "".join(f"\n- {table.escaped(line)}" for line in failures(document))
    text = f"{note}{table.markdown(results(document))}\n\n{verdict}\n" + (f"{crashed}\n" if crashed else "")
    found = portions(document.by_kind, document.by_part)
    return f"{text}\n{table.markdown(found)}\n" if found else text


def comma_separated(document: BenchDocument) -> str:
    heads = (
        *("run", "trial", "gpu_layers", "tokens_per_s", "tokens", "acceptance_rate", "tokens_per_round"),
        *("peak_rss_bytes", "lossy", "prompt_tokens_per_s", "time_to_first_token_s"),
    )
    lines = (line for mode, run in document.runs.items() for line in table.trial_rows(run, run=mode))
    return table.comma_separated(heads, lines)


def remarks(document: BenchDocument, *, everything: bool = True) -> tuple[str, ...]:
    """Return sentences about failures, lengths, texts and the hook; with ``everything``, also times and prompts."""
    lines = failures(document)
    lines += [*_basis(document), same_text(document)]
    lines += [answer_times(document), prompts(document)] if everything else []
    if (hook := document.hook) is not None:
        if hook.identical_output is not None:
            same = "the same text with and without the hook" if hook.identical_output else "NOT the same text"
            lines.append(f"Hook check: {same} ({hook.identity_check.get('note', '')}).")
        if hook.divergences:
            explained = sum(one.explained for one in hook.divergences)
            answers = counted(len(hook.divergences), "answer")
            lines.append(f"With the hook {answers} diverged from Llama's own text, {explained} of them at a near tie.")
    return tuple(filter(None, lines))


def _basis(document: BenchDocument) -> tuple[str, ...]:
    drafted = by_drafter(document.runs.get("speculative"), document.settings.get("drafter", ""))
    return drafted, by_length(document), rests_on(document)


def failures(document: BenchDocument) -> list[str]:
    return [f"{mode_name(mode)} was not measured: {one.error}" for mode, one in document.failures.items()]


def rests_on(document: BenchDocument) -> str:
    """State how many prompts, tokens and repetitions each row is based on; return "" for an old document."""
    how = f" ({form})" if (form := document.settings.get("prompt_format")) else ""
    names: dict[str, list[str]] = {}
    for mode, run in document.runs.items():
        if run is not None and run.prompts:
            least, more = divmod(run.answers, run.prompts)
            times = f"{least} to {least + 1} times" if more else "once" if least == 1 else f"{least} times"
            tokens = counted(round(run.tokens / run.prompts), "token")
            extent = f"{counted(run.prompts, 'prompt')} × {tokens}, {times}"
            names.setdefault(extent, []).append(mode_name(mode))
    parts = [f"{', '.join(found)} on {extent}" for extent, found in names.items()]
    return f"Measured{how}: {'; '.join(parts)}." if parts else ""


def by_length(document: BenchDocument) -> str:
    """State the speedups of the shortest and the longest answer, and any extrapolation; "" if only one was measured."""
    found = [one for one in document.by_length if one.tokens != document.answer_tokens]
    ends = found[:1] + found[1:][-1:]  # the shortest and the longest length
    if not ends:
        return ""
    line = f"Speedup by length: {', '.join(f'{one.tokens} tokens {ratio_text(one.speedup)}' for one in ends)}"
    measured = document.measured_tokens
    return line + (f"; extrapolated beyond {measured}." if document.by_length[-1].tokens > measured else ".")


def answer_times(document: BenchDocument) -> str:
    """State an answer's fixed time and time per token; return "" for an old document."""
    parts = [
        f"{mode_name(mode)} {one.once_s:.2f} s plus {milliseconds(one.token_s)} per token"
        for mode, one in document.answer_times.items()
    ]
    return f"An answer takes: {'; '.join(parts)}." if parts else ""


def prompts(document: BenchDocument) -> str:
    """State prompt speed and time to first token without and with a draft, which also decodes the prompts."""
    found = [(mode_name(mode), document.runs.get(mode)) for mode in ("target_only", "speculative")]
    parts = [f"{name} {figures}" for name, run in found if run and (figures := prompt_figures(run))]
    return f"Prompts: {'; '.join(parts)}." if parts else ""


def same_text(document: BenchDocument) -> str:
    """State whether the draft changed the text, in strict mode and in the measured answers; return "" if unknown."""
    check, found = document.identity_check, document.divergences
    note, compared = check.get("note", ""), check.get("compared", document.settings.get("prompts", 0))
    different = check.get("different", len(found))
    answers = f"{different} of {counted(compared, 'answer')} {'differs' if compared == 1 else 'differ'}"
    answers += f", {sum(one.explained for one in found)} of them at a near tie that rounding decides" if found else ""
    if document.identical_output is not None:
        same = "The same text" if document.identical_output else "NOT the same text"
        line = f"{same} with and without a draft: {note}."
        return f"{line} Without --strict {answers}." if different else line
    if not note:
        return ""
    if different:
        return f"With a draft {answers}; strict mode was not checked: {note}."
    if "compared" not in check:
        return f"Whether a draft changes the text was not checked: {note}."
    measured = counted(compared, "measured answer")
    return f"The same text with and without a draft in {measured}; strict mode was not checked: {note}."
