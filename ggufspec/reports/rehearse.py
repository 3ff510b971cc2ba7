"""A rehearsal as a document, and for people: what the pair reaches by acceptance, and what was measured for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggufspec.display import of_memory
from ggufspec.reports.plan import rate
from ggufspec.schema.base import Spread
from ggufspec.schema.rehearse import RehearseDocument

if TYPE_CHECKING:
    from rich.table import Table


def expected(document: RehearseDocument) -> Table:
    """Tokens/s by acceptance; rows that beat target-only are bold."""
    made = _table(("Acceptance", "Draft length", "Tokens/s", "Against target-only"))
    for row in document.expected:
        cells = (f"{row.acceptance:.0%}", str(row.draft_length), rate(row.tokens_per_s), f"{row.gain:.2f}×")
        made.add_row(*cells, style="bold" if row.gain > 1 else None)
    return made


def runs(document: RehearseDocument) -> Table:
    """What was measured: each model where it was, alone or beside the other."""
    made = _table(("Run", "Model", "GPU layers", "Tokens/s", "Load", "RAM", "VRAM"))
    for run in document.runs:
        memory = (of_memory(run.ram_bytes), of_memory(run.vram_bytes) if run.vram_bytes else "–")
        for role, model in (("target", run.target), ("draft", run.draft)):
            if model is not None:
                layers = f"{model.gpu_layers}/{model.layers + 1}"
                shown = memory if role == "target" else ("", "")
                name = run.name.replace("_", "-") if role == "target" else ""
                made.add_row(name, role, layers, with_spread(model.tokens_per_s), f"{model.load_s:.1f} s", *shown)
    return made


def curve(document: RehearseDocument) -> Table:
    """T(n) of the target: milliseconds of a batch of n tokens, and how many times those of one."""
    made = _table(("Batch of", "Milliseconds", "T(n) / T(1)"))
    target = next(run.target for run in document.runs if run.target is not None)
    for width, seconds in target.batch_s.items():
        ratio = seconds.median / target.batch_s[1].median
        made.add_row(str(width), with_spread(seconds, 1e3), f"{ratio:.2f}")
    return made


def with_spread(value: Spread, scale: float = 1.0) -> str:
    """Median and the larger half of its interval, in ``scale`` of its unit."""
    median, half = scale * value.median, scale * max(value.median - value.ci95[0], value.ci95[1] - value.median)
    digits = 0 if median >= 100 else 1 if median >= 10 else 2
    return f"{median:.{digits}f}" if len(value.samples) < 2 else f"{median:.{digits}f} ± {half:.{digits}f}"


def _table(columns: tuple[str, ...]) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return made
