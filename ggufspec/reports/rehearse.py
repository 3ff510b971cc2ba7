"""Report of a rehearsal, with the expected speed by acceptance and the underlying measurements."""

from __future__ import annotations

from ggufspec.planning.speed import accepted_share
from ggufspec.reports import table
from ggufspec.reports.table import ReportTable
from ggufspec.reports.words import with_spread
from ggufspec.schema.rehearse import RehearseDocument
from ggufspec.schema.text import number, of_memory


def expected_rows(document: RehearseDocument) -> ReportTable:
    """Return a table of expected tokens/s by acceptance probability per token; rows that beat target-only are bold."""
    rows = [
        (
            f"{row.acceptance:.0%}",
            f"{accepted_share(row.acceptance, row.draft_length):.0%}",
            str(row.draft_length),
            number(row.tokens_per_s),
            f"{row.gain:.2f}×",
        )
        for row in document.expected
    ]
    gains = [index for index, row in enumerate(document.expected) if row.gain > 1]
    columns = table.columns("Chance per token", "Accepted", "Draft length", "Tokens/s", "Against target-only")
    return ReportTable("Expected", columns, rows, leading=gains)


def runs(document: RehearseDocument) -> ReportTable:
    """Return a table of measured runs with a row per model: its layers, speed and load time, and the run's memory."""
    rows = []
    for run in document.runs:
        memory = (of_memory(run.ram_bytes), of_memory(run.vram_bytes) if run.vram_bytes else "–")
        for role, model in (("target", run.target), ("draft", run.draft)):
            if model is not None:
                first = role == "target"
                layers = f"{model.gpu_layers}/{model.layers + 1}"
                speeds = (with_spread(model.tokens_per_s), f"{model.load_s:.1f} s")
                name = run.name.replace("_", "-") if first else ""
                rows.append((name, role, layers, *speeds, *(memory if first else ("", ""))))
    columns = table.columns("Run", "Model", "GPU layers", "Tokens/s", "Load", "RAM", "VRAM")
    return ReportTable("Runs", columns, rows)


def batches(document: RehearseDocument) -> ReportTable:
    """Return a table of the target's latency by batch size, in milliseconds and as a multiple of one token's."""
    target = next(run.target for run in document.runs if run.target is not None)
    rows = [
        (str(width), with_spread(seconds, 1e3), f"{seconds.median / target.batch_s[1].median:.2f}")
        for width, seconds in target.batch_s.items()
    ]
    return ReportTable("Batch latency", table.columns("Batch of", "Milliseconds", "T(n) / T(1)"), rows)
