"""Report of a bench: its tables, and remarks on texts and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ggufspec.reports import table
from ggufspec.reports.table import Column, Table
from ggufspec.reports.words import (
    accepted,
    layers,
    milliseconds,
    mode_name,
    prompt_figures,
    ratio,
    times,
    tokens_per_round,
    with_spread,
)
from ggufspec.schema.base import Portion, Run, SpeculativeRun
from ggufspec.schema.bench import BenchDocument
from ggufspec.schema.text import counted

_POSITIONS = 8  # draft positions shown; later ones are reached too rarely for their rates to say much (JSON has all)


def results(document: BenchDocument) -> Table:
    """Return one row per measured run; tokens/s covers decoding, the speedup whole answers."""
    speedups = {"speculative": document.speedup, "llama_hook": document.hook.speedup if document.hook else None}
    whole = next((one for one in document.by_length if one.tokens == document.answer_tokens), None)
    seconds = {"target_only": whole.target_only_s, "speculative": whole.speculative_s} if whole else {}
    runs = {mode: run for mode, run in document.runs.items() if run is not None}
    on_gpu = any(run.gpu_layers or getattr(run, "gpu_layers_draft", 0) for run in runs.values())
    # With layers and a lossy row the terminal's columns take 79 of 80; the others are in files only.
    columns = (
        table.word("Run"),
        Column("GPU layers", layers, only="" if on_gpu else "file"),
        Column("Tokens/s", with_spread),
        *([Column(counted(document.answer_tokens, "token"), _seconds)] if whole else []),
        Column("Speedup", ratio),
        Column("Accepted", accepted),
        Column("Tokens/round", tokens_per_round, only="file"),  # on the terminal the verdict has them
        Column("Accepted by position", _by_position, only="file"),
    )
    rows: list[tuple[Any, ...]] = []
    for mode, run in runs.items():
        name = mode_name(mode) + (" (lossy)" if getattr(run, "lossy", False) else "")
        answer_s = [seconds.get(mode)] if whole else []
        rows.append((name, run, run.tokens_per_s, *answer_s, speedups.get(mode), run, run, run))
    return Table("Results", columns, rows, leading=[n for n, mode in enumerate(runs) if mode == "speculative"])


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else milliseconds(value)


def portions(by_kind: Sequence[Portion], by_part: Sequence[Portion]) -> Table | None:
    """Return acceptance and speedup by kind of prompt, and of thinking and answers; None if neither was measured."""
    if not (by_kind or by_part):
        return None
    columns = (
        table.word("Kind" if by_kind else "Part"),
        Column("Accepted", lambda one: f"{one.accepted / one.drafted:.0%}" if one.drafted else "–"),
        Column("Speedup", times),
    )
    rows = [(one.name, one, one.speedup) for one in (*by_kind, *by_part)]
    groups = [len(by_kind)] if by_kind and by_part else []
    return Table("By kind of prompt" if by_kind else "By part of the answer", columns, rows, groups=groups)


def _by_position(run: Run) -> str:
    rates = run.accepted_by_position if isinstance(run, SpeculativeRun) else ()
    return " ".join([*(f"{rate:.0%}" for rate in rates[:_POSITIONS]), *(["…"] if len(rates) > _POSITIONS else [])])


def markdown(document: BenchDocument) -> str:
    """Return the pair's note, the results, the verdict, crashed runs and the table by portion as Markdown."""
    note = f"{table.escaped(document.pair['note'])}\n\n" if document.pair.get("note") else ""
    parts = (document.verdict.text, document.verdict.why, by_length(document), rests_on(document))
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
    lines = (line for mode, run in document.runs.items() for line in table.trials(run, run=mode))
    return table.comma_separated(heads, lines)


def remarks(document: BenchDocument, *, everything: bool = True) -> tuple[str, ...]:
    """Return sentences on failures, lengths, texts and the hook; with ``everything`` on times and prompts too."""
    lines = failures(document)
    lines += [by_length(document), rests_on(document), same_text(document)]
    lines += [answer_times(document), prompts(document)] if everything else []
    if (hook := document.hook) is not None:
        if hook.identical_output is not None:
            same = "the same text with and without the hook" if hook.identical_output else "NOT the same text"
            lines.append(f"Hook check: {same} ({hook.identity_check.get('note', '')}).")
        if hook.divergences:
            explained = sum(one.explained for one in hook.divergences)
            answers = counted(len(hook.divergences), "answer")
            lines.append(f"With the hook {answers} left the text of Llama alone, {explained} of them at a near tie.")
    return tuple(filter(None, lines))


def failures(document: BenchDocument) -> list[str]:
    return [f"{mode_name(mode)} was not measured: {one.error}" for mode, one in document.failures.items()]


def rests_on(document: BenchDocument) -> str:
    """Return how many prompts, tokens and repetitions each row is based on; empty for an old document."""
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
    """Return the speedup of the shortest and the longest answer, and the longest length measured; empty without any."""
    found = [one for one in document.by_length if one.tokens != document.answer_tokens]
    ends = found[:1] + found[1:][-1:]  # the shortest and the longest
    if not ends:
        return ""
    line = f"Speedup by length: {', '.join(f'{one.tokens} tokens {times(one.speedup)}' for one in ends)}"
    measured = document.measured_tokens
    return line + (f"; extrapolated beyond {measured}." if document.by_length[-1].tokens > measured else ".")


def answer_times(document: BenchDocument) -> str:
    """Return an answer's fixed and per-token time; empty for an old document."""
    parts = [
        f"{mode_name(mode)} {one.once_s:.2f} s once and {milliseconds(one.token_s)} for each token"
        for mode, one in document.answer_times.items()
    ]
    return f"An answer takes: {'; '.join(parts)}." if parts else ""


def prompts(document: BenchDocument) -> str:
    """Return prompt speed and time to first token, target-only and speculative (whose draft reads prompts too)."""
    found = [(mode_name(mode), document.runs.get(mode)) for mode in ("target_only", "speculative")]
    parts = [f"{name} {figures}" for name, run in found if run and (figures := prompt_figures(run))]
    return f"Prompts: {'; '.join(parts)}." if parts else ""


def same_text(document: BenchDocument) -> str:
    """Return whether the draft changed the text, or why that was not checked; empty if unknown."""
    note = document.identity_check.get("note", "")
    if document.identical_output is None:
        return f"Whether a draft changes the text was not checked: {note}." if note else ""
    same = "The same text" if document.identical_output else "NOT the same text"
    line = f"{same} with and without a draft: {note}."
    if document.divergences:
        explained = sum(one.explained for one in document.divergences)
        answers = counted(document.settings.get("prompts", 0), "answer")
        line += (
            f" Without --strict {len(document.divergences)} of {answers} differ, "
            f"{explained} of them at a near tie that rounding decides."
        )
    return line
