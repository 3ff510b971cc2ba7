"""The bench as a table: for the terminal, as Markdown, as CSV. One function makes the cells for all three."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from ggufspec.reports.document import BenchDocument, Run, SpeculativeRun, Spread

if TYPE_CHECKING:
    from rich.table import Table

LABELS = {"target_only_at_pair": "target at pair"}  # target-only, its layers as few as the pair's

COLUMNS = ("Run", "GPU layers", "Tokens/s", "Gain", "Accepted", "Tokens/round", "Accepted by position")


def rows(document: BenchDocument) -> list[tuple[str, ...]]:
    """One row of cells per run that has been measured, in :data:`COLUMNS`."""
    return [
        _row(LABELS.get(mode, mode.replace("_", "-")), run, document.speedup if mode == "speculative" else None)
        for mode, run in document.runs.items()
        if run is not None
    ]


def _row(name: str, run: Run, speedup: Spread | None) -> tuple[str, ...]:
    layers = f"{run.gpu_layers}/{run.layers + 1}"
    base = (name, layers, _with_spread(run.tokens_per_s))
    if not isinstance(run, SpeculativeRun):
        return (*base, "", "", "", "")
    return (
        f"{base[0]} (lossy)" if run.lossy else base[0],
        f"{layers} + {run.draft_gpu_layers}/{run.draft_layers + 1}" if run.draft_layers else layers,
        base[2],
        f"{speedup.median:.2f}×" if speedup else "",
        f"{run.acceptance_rate:.0%}" if run.drafted else "–",  # none was drafted, which is not none accepted
        f"{run.tokens_per_round:.2f}",
        _by_position(run),
    )


def by_position(document: BenchDocument) -> str:
    """Acceptance at each place of the draft, for the line under the table: it would be the table's widest column."""
    run = document.runs.get("speculative")
    return _by_position(run) if isinstance(run, SpeculativeRun) else ""


def _by_position(run: SpeculativeRun) -> str:
    return " ".join(f"{rate:.0%}" for rate in run.accepted_by_position)


def _with_spread(value: Spread) -> str:
    half = max(value.median - value.ci95[0], value.ci95[1] - value.median)
    digits = 0 if value.median >= 100 else 1 if value.median >= 10 else 2
    if len(value.samples) < 2:  # one trial tells nothing of the spread
        return f"{value.median:.{digits}f}"
    return f"{value.median:.{digits}f} ± {half:.{digits}f}"


def terminal(document: BenchDocument) -> Table:
    """A rich table, 80 columns wide at most; acceptance by position is left to a line of its own."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for index, column in enumerate(COLUMNS[:-1]):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows(document):
        table.add_row(*row[:-1], style="bold" if row[0].startswith("speculative") else None)
    return table


def markdown(document: BenchDocument) -> str:
    """A Markdown table and the verdict."""
    lines = [
        "| " + " | ".join(COLUMNS) + " |",
        "| --- |" + " ---: |" * (len(COLUMNS) - 1),
        *("| " + " | ".join(row) + " |" for row in rows(document)),
    ]
    return "\n".join(lines) + f"\n\n{document.verdict.text}\n"


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
        )
    )
    for mode, run in document.runs.items():
        if run is None:
            continue
        lossy = isinstance(run, SpeculativeRun) and run.lossy
        extra = (run.acceptance_rate, run.tokens_per_round) if isinstance(run, SpeculativeRun) else ("", "")
        for trial, sample in enumerate(run.tokens_per_s.samples, 1):
            writer.writerow((mode, trial, run.gpu_layers, sample, run.tokens, *extra, run.peak_rss_bytes, lossy))
    return text.getvalue()
