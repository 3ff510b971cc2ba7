"""A rehearsal as a document, and for people: what the pair reaches by acceptance, and what was measured for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ggufspec.display import of_memory
from ggufspec.reports.plan import rate
from ggufspec.schema.document import Spread

if TYPE_CHECKING:
    from rich.table import Table

LABEL = "measured on stand-in weights; acceptance assumed"


@dataclass(frozen=True, slots=True)
class RehearsedModel:
    """One model as it ran. ``batch_s`` is by width, T(n); ``layers`` are blocks, the output is one more.

    ``bytes`` has, by device, ``weights``, ``kv`` and ``compute`` as llama.cpp counts them; the host is ``CPU``.
    """

    file: str
    layers: int
    gpu_layers: int
    tokens_per_s: Spread
    batch_s: dict[int, Spread]
    prompt_tokens_per_s: float
    depth: int
    load_s: float
    bytes: dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class RehearsedRun:
    """Models loaded together: ``pair``, ``target_only``, ``half`` of its layers or ``none``; or why it was left out."""

    name: str
    target: RehearsedModel | None
    draft: RehearsedModel | None
    ram_bytes: int
    vram_bytes: int
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the pair reaches if drafted tokens are kept with chance ``acceptance``; ``gain`` is over the rival."""

    acceptance: float
    draft_length: int
    tokens_per_s: float
    gain: float


@dataclass(frozen=True, slots=True)
class RehearseDocument:
    """``ggufspec/rehearse@1``. ``rival_tokens_per_s`` is target-only where it is fastest."""

    pair: dict[str, Any]
    machine: dict[str, Any]
    settings: dict[str, Any]
    standins: dict[str, Any]
    runs: tuple[RehearsedRun, ...]
    rival_tokens_per_s: Spread
    expected: tuple[Expected, ...]
    break_even_acceptance: float | None
    why: str
    notes: tuple[str, ...] = ()
    label: str = LABEL
    schema: str = field(default="ggufspec/rehearse@1")


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
