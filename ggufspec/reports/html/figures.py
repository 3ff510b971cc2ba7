"""Figures of a page as data, for speeds, acceptance, memory, quality, plans, sweeps and searches. Pure.

:mod:`ggufspec.reports.html.charts` draws these figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal

from ggufspec.llamacpp.options import HOST
from ggufspec.reports import compare, plan, sweep, tune
from ggufspec.reports.table import ReportTable, columns
from ggufspec.reports.words import accepted_text, cards_of, layers, mode_name, over, with_spread
from ggufspec.schema.base import SpeculativeRun, Spread
from ggufspec.schema.bench import BenchDocument
from ggufspec.schema.compare import CompareCell, CompareDocument, cell_name
from ggufspec.schema.plan import PlanDocument
from ggufspec.schema.sweep import SweepDocument
from ggufspec.schema.text import number, of_memory
from ggufspec.schema.tune import TuneDocument, TuneTrial

TARGET_ONLY = "target-only"
# Parts of a device's memory in stacking order
_KINDS = ("weights", "kv", "compute")
PARTS = (*(f"{role} {kind}" for role in ("target", "draft") for kind in _KINDS), "overhead")
_POSITIONS = 8  # number of draft positions shown in a table; plots show all
_FEWEST_DRAFTED = 10  # minimum number of tokens drafted at a position for its acceptance rate to be shown


@dataclass(frozen=True, slots=True)
class FigureMark:
    """Point or bar in a figure, for a measured or predicted value."""

    series: str  # name of the series, which decides colour and shape
    x: float | str  # number or name on the horizontal axis; for a bar, its name
    y: float  # value in the unit of its axis
    description: str  # tooltip and text for screen readers
    low: float | None = None  # lower end of the 95 % interval, if there is one; ``high`` is the upper end
    high: float | None = None
    panel: str = ""  # name of the facet, if the figure has several
    label: str = ""  # text next to the mark
    kind: Literal["measured", "line", "failed", "limit"] = "measured"  # line: no points; limit: a line across bars


@dataclass(frozen=True, slots=True)
class Figure:
    """Plot of measured or predicted values."""

    name: str  # ``speed``, ``acceptance``, ``memory``, ``quality``, ``plan``, ``sweep`` or ``search``
    title: str
    caption: str  # explanation of how to read the figure
    form: Literal["points", "lines", "bars"]  # ``bars`` are horizontal, one for each x
    x: str  # title of the horizontal axis; empty for bars
    y: str  # title of the vertical axis; for bars, title of the horizontal axis
    series: Sequence[str]  # names of the series in the order of their colours
    marks: Sequence[FigureMark]
    table: ReportTable | None = None  # table of the numbers, unless another table in the section has them


def drawable(figures: Iterable[Figure]) -> tuple[Figure, ...]:
    """Return the figures with bars or several positions, without infinite marks (from an overflowed divergence)."""

    def has_position(mark: FigureMark) -> bool:
        return isfinite(mark.y) and (isinstance(mark.x, str) or isfinite(mark.x))

    found = [replace(figure, marks=list(filter(has_position, figure.marks))) for figure in figures]
    return tuple(
        figure
        for figure in found
        if len({mark.x for mark in figure.marks}) > 1 or (figure.form == "bars" and figure.marks)
    )


def _measured(
    series: str, x: float | str, speed: Spread, name: str, gain: Spread | None = None, label: str = ""
) -> FigureMark:
    description = f"{name}: {with_spread(speed)} tokens/s"
    description += f", {over(gain, TARGET_ONLY)}" if gain else ""
    low, high = speed.ci95 if len(speed.samples) > 1 else (None, None)
    return FigureMark(series, x, speed.median, description, low, high, label=label)


def _speeds(title: str, caption: str, series: Sequence[str], marks: Sequence[FigureMark]) -> Figure:
    caption += " The lines are 95% intervals: where two overlap, their order is uncertain."
    return Figure("speed", title, caption, "bars", "", "tokens/s", series, marks)


def _acceptance(series: Sequence[str], lines: Sequence[tuple[str, str, str, SpeculativeRun]]) -> Figure:
    """Return a figure of accepted ÷ drafted tokens by position; ``lines`` are (pairing, series, panel, run)."""
    lines = [line for line in lines if line[-1].accepted_by_position]
    marks = [
        FigureMark(name, position, share, f"{pairing}: {share:.0%} accepted at position {position}", panel=panel)
        for pairing, name, panel, run in lines
        for position, share in enumerate(run.accepted_by_position, 1)
        if _is_telling(run, position)
    ]
    rows = [
        (
            pairing,
            accepted_text(run),
            *(
                f"{share:.0%}" if _is_telling(run, position) else "–"
                for position, share in enumerate(run.accepted_by_position[:_POSITIONS], 1)
            ),
        )
        for pairing, _, _, run in lines
    ]
    heads = columns("Pairing", "Acceptance rate", *map(str, range(1, _POSITIONS + 1)))
    return Figure(
        "acceptance",
        "Acceptance rate by position",
        "Accepted ÷ drafted tokens at each position of the draft. Positions drafted fewer than "
        f"{_FEWEST_DRAFTED} times are left out.",
        "lines",
        "position in the draft",
        "acceptance rate",
        series,
        marks,
        ReportTable("Acceptance rate by position", heads, rows).filled(least=2),
    )


def _is_telling(run: SpeculativeRun, position: int) -> bool:
    """Return whether enough tokens were drafted at a position; True for old results, which lack these counts."""
    return not run.drafted_by_position or run.drafted_by_position[position - 1] >= _FEWEST_DRAFTED


def _memory(where: str, bars: Sequence[tuple[str, dict[str, int]]], limit: str = "", limit_bytes: int = 0) -> Figure:
    """Return a figure of planned memory, stacked by part; ``bars`` are (name, bytes by part)."""
    marks = [
        FigureMark(part, name, parts[part] / 2**30, f"{name}: {part} {of_memory(parts[part])}")
        for name, parts in bars
        for part in PARTS
        if parts.get(part)
    ]
    drawn = {mark.series for mark in marks}
    caption = "What each pairing needs according to its plan."
    if limit_bytes:
        caption += f" The vertical line is {limit}."
        marks.append(FigureMark(limit, "", limit_bytes / 2**30, f"{limit}: {of_memory(limit_bytes)}", kind="limit"))
    rows = []
    for name, parts in bars:
        target, draft = (sum(parts.get(f"{role} {kind}", 0) for kind in _KINDS) for role in ("target", "draft"))
        sizes = (sum(parts.values()), target, draft, parts.get("overhead", 0))
        rows.append((name, *(of_memory(size) if size >= 2**19 else "–" for size in sizes)))
    title = f"{where} by part, as planned"
    table = ReportTable(title, columns("Pairing", "Total", "Target's", "Draft's", "Overhead"), rows)
    series = [part for part in PARTS if part in drawn]
    return Figure("memory", title, caption, "bars", "", "GiB", series, marks, table)


# ---- the documents --------------------------------------------------------------------------------------------------


def of_bench(document: BenchDocument) -> Iterator[Figure]:
    """Yield figures of speed and acceptance, without draft-only, whose speed says nothing about the target's."""
    runs = {mode_name(mode): run for mode, run in document.runs.items() if run is not None and mode != "draft_only"}
    yield _speeds(
        "Tokens/s",
        "Target-only at its best placement on this machine, and with the draft.",
        [*runs],
        [_measured(name, name, run.tokens_per_s, f"{name}, GPU layers {layers(run)}") for name, run in runs.items()],
    )
    drafted = [(name, name, "", run) for name, run in runs.items() if isinstance(run, SpeculativeRun)]
    yield _acceptance([*runs], drafted)


def of_compare(document: CompareDocument) -> Iterator[Figure]:
    """Yield figures of speed, quality (if measured), memory and acceptance for all cells."""
    targets, drafts = compare.names_of(document)
    series = [TARGET_ONLY, *(f"with {name}" for name in drafts.values())]
    quality = {model.name: model.quality for model in document.targets if model.quality is not None}

    def name_of(cell: CompareCell) -> str:
        return cell_name(targets[cell.target], drafts[cell.draft] if cell.draft else None)

    def series_of(cell: CompareCell) -> str:
        return f"with {drafts[cell.draft]}" if cell.draft else TARGET_ONLY

    speeds, points, accepted_shares, labelled = [], [], [], set()
    for cell in compare.ordered(document, compare.CompareSort.SPEED):
        if cell.run is None:
            continue
        gain = cell.speedup if cell.draft else None
        mark = _measured(series_of(cell), name_of(cell), cell.run.tokens_per_s, name_of(cell), gain)
        speeds.append(mark)
        if isinstance(cell.run, SpeculativeRun) and cell.draft:
            panel = targets[cell.target] if len(targets) > 1 else ""
            accepted_shares.append((name_of(cell), mark.series, panel, cell.run))
        if found := quality.get(cell.target):
            about = f"mean KL {found.mean_kl:.4f}, the same likeliest token at {found.top1_agreement:.1%} of positions"
            label = "" if cell.target in labelled else targets[cell.target]
            labelled.add(cell.target)
            about = f"{mark.description}; {about}"
            points.append(replace(mark, x=found.mean_kl, label=label, description=about))
    yield _speeds("Tokens/s of every pairing", "Fastest first, each at its own best placement.", series, speeds)
    if len(quality) > 1:
        reference = next(iter(quality.values())).reference
        yield Figure(
            "quality",
            "Tokens/s against quality",
            f"Further left is closer to {targets.get(reference, reference)}, higher is faster: the best are at the "
            "upper left. A draft does not change the text; it only moves a target up or down.",
            "points",
            "mean KL divergence, nats a token",
            "tokens/s",
            series,
            points,
        )
    yield _planned_memory(document, {id(cell): name_of(cell) for cell in document.cells})
    yield _acceptance(series, accepted_shares)


def _planned_memory(document: CompareDocument, names: dict[int, str]) -> Figure:
    """Return the planned GPU memory, or host memory if no GPU is used; ``names`` is keyed by ``id(cell)``."""
    devices = {device for cell in document.cells for device, parts in cell.bytes.items() if any(parts.values())}
    shown = sorted(devices - {HOST}) or sorted(devices)
    bars = [
        (f"{names[id(cell)]}, {device}" if len(shown) > 1 else names[id(cell)], cell.bytes[device])
        for cell in document.cells
        for device in shown
        if cell.bytes.get(device)
    ]
    cards = cards_of(document.machine)
    limit = cards[0][1] if HOST not in shown and len(shown) == len(cards) == 1 else 0
    return _memory("Memory" if HOST in shown else "VRAM", bars, "the card's memory", limit)


def of_plan(document: PlanDocument) -> Iterator[Figure]:
    cards = [device for device in document.devices if device.name != HOST]
    shown = cards or document.devices
    bars = []
    for device in shown:
        for name, option in plan.placed(document).items():
            label = name + (f", {device.name}" if len(shown) > 1 else "")
            bars.append((label, plan.bytes_by_part(option, device)))
    limit = shown[0].budget_bytes if len(shown) == 1 else 0
    yield _memory("VRAM" if cards else "Memory", bars, "the budget", limit)
    marks = []
    for row in document.sweep:
        speeds = ((TARGET_ONLY, row.target_only_tokens_per_s), ("speculative", row.speculative_tokens_per_s))
        for name, speed in speeds:
            if speed is not None:
                about = f"{name}, GPU layers {row.gpu_layers}: ≈ {number(speed)} tokens/s"
                marks.append(FigureMark(name, row.gpu_layers, speed, about, kind="line"))
    yield Figure(
        "plan",
        "Predicted tokens/s over GPU layers",
        "For each number of target layers on the GPU; a line ends where the memory is full.",
        "lines",
        "target layers on the GPU",
        "tokens/s",
        (TARGET_ONLY, "speculative"),
        marks,
        plan.sweep(document),
    )


def of_sweep(document: SweepDocument) -> Iterator[Figure]:
    word = sweep.label(document)
    marks = []
    for point in document.points:
        for name, run in ((TARGET_ONLY, point.target_only), ("speculative", point.speculative)):
            if run is not None:
                gain = point.speedup if run is point.speculative else None
                marks.append(_measured(name, point.value, run.tokens_per_s, f"{word} {point.value}, {name}", gain))
        if point.failure:
            description = f"{word} {point.value}: {point.failure.error}"
            marks.append(FigureMark("speculative", point.value, 0.0, description, kind="failed"))
    yield Figure(
        "sweep",
        f"Tokens/s over {word}",
        "Values were measured in turn, with 95% intervals. A cross marks a value that failed.",
        "lines",
        word,
        "tokens/s",
        (TARGET_ONLY, "speculative"),
        marks,
    )


def of_tune(document: TuneDocument) -> Iterator[Figure]:
    yield Figure(
        "search",
        "The search",
        "Every setting, in the order in which it was tried. Those with an interval were measured again at the end, "
        "side by side, and the winner is one of them; a point without one is a single trial and may be luck. "
        "A cross marks a trial that failed.",
        "points",
        "trial",
        "tokens/s",
        (TARGET_ONLY, "with draft"),
        [_trial(document, trial) for trial in document.trials],
    )


def _trial(document: TuneDocument, trial: TuneTrial) -> FigureMark:
    series, number = "with draft" if trial.setting.drafted else TARGET_ONLY, trial.index + 1  # as in tune's table
    name = f"Trial {number}, {tune.setting_name(document, trial.setting)}"
    if trial.tokens_per_s is None:
        why = trial.failure.error if trial.failure else "not measured"
        return FigureMark(series, number, 0.0, f"{name}: {why}", kind="failed")
    found = "winner" if document.decided or not document.verdict else "leading"
    label = found if trial.index == document.winner else ""
    return _measured(series, number, trial.tokens_per_s, name, label=label)
