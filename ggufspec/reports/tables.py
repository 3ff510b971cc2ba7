"""The bench as a table: for the terminal, as Markdown, as CSV. One function makes the cells for all three."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ggufspec.display import counted, visible
from ggufspec.schema.base import Run, SpeculativeRun, Spread
from ggufspec.schema.bench import BenchDocument

if TYPE_CHECKING:
    from rich.table import Table

LABELS = {
    "target_only_at_pair": "target at pair",  # target-only, its layers as few as the pair's
    "llama_target_only": "Llama alone",
    "llama_hook": "Llama + hook",
}

_MARKS = re.compile(r"[\\`*~|\[\]]|(?<![^\W_])_|_(?![^\W_])")  # within a word an underscore is a letter
_BEGINS = re.compile(r"^(\s*)(?=[#>+=-](?!\d))|^(\s*\d+)(?=[.)](?:\s|$))")  # a heading, a quotation, an item
_PLACES = 8  # of a draft that are shown; documents have all of them

COLUMNS = ("Run", "GPU layers", "Tokens/s", "Gain", "Accepted", "Tokens/round", "Accepted by position")


_WHO = {
    "draft": "draft model",
    "lookup": "n-gram lookup",
    "both": "draft model and n-gram lookup",
    "none": "no draft",
}


def conditions(settings: dict[str, Any], swept: str = "") -> str:
    """Under what a bench was made, in a line; what was swept is left out.

    Args:
        settings: a document's.
        swept: a key of them, which has a list.
    """
    parts = [f"{counted(settings['prompts'], 'prompt')} × {counted(settings['max_tokens'], 'token')}"]
    if swept != "drafter":
        parts.append(_WHO[settings["drafter"]])
    if swept not in ("draft_policy", "draft_max"):
        most = "at most " if settings["draft_policy"] == "adaptive" else ""
        how_far = f"{most}{counted(settings['draft_max'], 'token')} a round"
        parts[-1:] = [f"{parts[-1]} ({how_far})"] if swept != "drafter" else [parts[-1], how_far]
    parts.append("greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']}")
    parts += filter(None, [penalties(settings)])
    if swept != "accept":
        parts.append(f"{settings['accept']}{' (lossy)' if settings['lossy'] else ''}")
    parts += ["strict"] * settings["strict"]
    if swept != "threads":
        parts.append(counted(settings["threads"], "thread"))
    return ", ".join([*parts, f"{counted(settings['repetitions'], 'trial')} each"])


def penalties(settings: dict[str, Any]) -> str:
    """The penalties of a document's settings in words; empty where there are none."""
    off = {"repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    found = [f"{key.replace('_', ' ')} {settings[key]}" for key, none in off.items() if settings.get(key, none) != none]
    last = settings.get("repeat_last_n", 0)
    if not found or not last:
        return ""
    return f"{', '.join(found)} over {'the context' if last == -1 else counted(last, 'token')}"


def shown_speed(tokens_per_s: float) -> str:
    """Tokens/s with three digits or so."""
    return f"{tokens_per_s:.{0 if tokens_per_s >= 100 else 1 if tokens_per_s >= 10 else 2}f}"


def first_token(seconds: float) -> str:
    """How long one waits for an answer to begin."""
    shown = f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"
    return f"first token after {shown}"


def prompt_figures(run: Run) -> str:
    """How fast prompts were read, and how long one waited; empty where an old result does not have it."""
    if run.time_to_first_token_s is None:
        return ""
    read = [f"{counted(run.prompt_tokens, 'token')} at {shown_speed(run.prompt_tokens_per_s)}/s"]
    return ", ".join([*(read if run.prompt_tokens else []), first_token(run.time_to_first_token_s)])


def shortened(text: str, most: int) -> str:
    """The text without its middle, where it is longer: a file's name says the most at its ends."""
    tail = most * 3 // 5
    return text if len(text) <= most else f"{text[: max(0, most - tail - 1)]}…{text[-tail:]}"


def escaped(text: str) -> str:
    """A text in one line of Markdown that is nothing but text there: names are a stranger's."""
    line = visible(text.strip().replace("\n", " ")).replace("&", "&amp;").replace("<", "&lt;")
    return _BEGINS.sub(r"\g<0>\\", _MARKS.sub(r"\\\g<0>", line))


def rows(document: BenchDocument) -> list[tuple[str, ...]]:
    """One row of cells per run that has been measured, in :data:`COLUMNS`."""
    gains = {"speculative": document.speedup, "llama_hook": document.hook.speedup if document.hook else None}
    return [
        _row(LABELS.get(mode, mode.replace("_", "-")), run, gains.get(mode))
        for mode, run in document.runs.items()
        if run is not None
    ]


def _row(name: str, run: Run, speedup: Spread | None) -> tuple[str, ...]:
    base = (name, layers(run), with_spread(run.tokens_per_s))
    if not isinstance(run, SpeculativeRun):
        return (*base, "", "", "", "")
    return (
        f"{base[0]} (lossy)" if run.lossy else base[0],
        *base[1:],
        f"{speedup.median:.2f}×" if speedup else "",
        f"{run.acceptance_rate:.0%}" if run.drafted else "–",  # none was drafted, which is not none accepted
        f"{run.tokens_per_round:.2f}",
        _by_position(run),
    )


def layers(run: Run) -> str:
    """Layers on the GPU of how many: the target's, and the draft's if there is one."""
    text = f"{run.gpu_layers}/{run.layers + 1}"
    if isinstance(run, SpeculativeRun) and run.draft_layers:
        text += f" + {run.gpu_layers_draft}/{run.draft_layers + 1}"
    return text


def _by_position(run: SpeculativeRun) -> str:
    """A long draft's last places are reached so seldom that their rates say little."""
    rates = run.accepted_by_position
    return " ".join([*(f"{rate:.0%}" for rate in rates[:_PLACES]), *(["…"] if len(rates) > _PLACES else [])])


def with_spread(value: Spread) -> str:
    """A median and the larger half of its interval."""
    half = max(value.median - value.ci95[0], value.ci95[1] - value.median)
    digits = 0 if value.median >= 100 else 1 if value.median >= 10 else 2
    if len(value.samples) < 2:  # one trial tells nothing of the spread
        return f"{value.median:.{digits}f}"
    return f"{value.median:.{digits}f} ± {half:.{digits}f}"


def speed(run: Run) -> str:
    """Tokens per second of a run with their spread; told where its rule may change the text."""
    lossy = isinstance(run, SpeculativeRun) and run.lossy
    return with_spread(run.tokens_per_s) + (" (lossy)" if lossy else "")


def terminal(document: BenchDocument) -> Table:
    """A rich table, 80 columns wide at most: without acceptance by position, nor layers where there is no GPU."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    on_gpu = any(run.gpu_layers or getattr(run, "gpu_layers_draft", 0) for run in document.runs.values() if run)
    shown = [index for index, column in enumerate(COLUMNS[:-1]) if on_gpu or column != "GPU layers"]
    for index in shown:
        table.add_column(COLUMNS[index], justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows(document):
        table.add_row(*(row[index] for index in shown), style="bold" if row[0].startswith("speculative") else None)
    return table


def markdown(document: BenchDocument) -> str:
    """A Markdown table and the verdict, and what it must be read with before them."""
    note = f"{escaped(document.pair['note'])}\n\n" if document.pair.get("note") else ""
    verdict = escaped(f"{document.verdict.text} {document.verdict.why}".strip())
    return f"{note}{markdown_table(COLUMNS, rows(document))}\n\n{verdict}\n"


def prompts(document: BenchDocument) -> str:
    """What :func:`prompt_figures` says of target-only and of the pair, whose draft reads the prompts too, in a line."""
    found = [(mode.replace("_", "-"), document.runs.get(mode)) for mode in ("target_only", "speculative")]
    words = [f"{name} {figures}" for name, run in found if run and (figures := prompt_figures(run))]
    return f"Prompts: {'; '.join(words)}." if words else ""


def same_text(document: BenchDocument) -> str:
    """Whether the draft changed the text, in a line; empty where it was not compared."""
    if document.identical_output is None:
        why = document.identity_check.get("note")
        return f"Whether a draft changes the text was not checked: {why}." if why else ""
    same = "The same text" if document.identical_output else "NOT the same text"
    line = f"{same} with and without a draft: {document.identity_check['note']}."
    if document.divergences:
        explained = sum(one.explained for one in document.divergences)
        answers = counted(document.settings["prompts"], "answer")
        line += (
            f" Without --strict {len(document.divergences)} of {answers} differ, "
            f"{explained} of them at a near tie that rounding decides."
        )
    return line


def markdown_table(heads: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    """Rows under their heads, all columns but the first to the right."""
    lines = [
        "| " + " | ".join(heads) + " |",
        "| --- |" + " ---: |" * (len(heads) - 1),
        *("| " + " | ".join(map(escaped, row)) + " |" for row in cells),
    ]
    return "\n".join(lines)


def comma_separated(document: BenchDocument) -> str:
    """One line per trial, numbers unrounded, for spreadsheets."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        (
            "run",
            "trial",
            "gpu_layers",
            "tokens_per_s",
            "tokens",
            "acceptance_rate",
            "tokens_per_round",
            "peak_rss_bytes",
            "lossy",
            "prompt_tokens_per_s",
            "time_to_first_token_s",
        )
    )
    for mode, run in document.runs.items():
        if run is None:
            continue
        lossy = isinstance(run, SpeculativeRun) and run.lossy
        extra = (run.acceptance_rate, run.tokens_per_round) if isinstance(run, SpeculativeRun) else ("", "")
        for trial, sample in enumerate(run.tokens_per_s.samples, 1):
            rest = (run.peak_rss_bytes, lossy, run.prompt_tokens_per_s, run.time_to_first_token_s)
            writer.writerow((mode, trial, run.gpu_layers, sample, run.tokens, *extra, *rest))
    return text.getvalue()
