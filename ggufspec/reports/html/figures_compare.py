"""Figures of a comparison: speeds, quality, memory, acceptance, layers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ggufspec.reports.compare import names_of
from ggufspec.reports.html.figures import (
    HOST,
    TARGET_ONLY,
    Figure,
    Mark,
    acceptance,
    at,
    cards_of,
    interval,
    layers,
    memory,
    swept,
)
from ggufspec.reports.values import base_name, over, times, with_spread
from ggufspec.reports.values import layers as layers_of
from ggufspec.schema.base import Run, SpeculativeRun
from ggufspec.schema.compare import Cell, CompareDocument, Quality, cell_name
from ggufspec.schema.plan import PlanDocument


@dataclass(frozen=True, slots=True)
class Names:
    """Short names of a comparison's targets and drafts, by their own."""

    targets: dict[str, str]
    drafts: dict[str, str]

    def cell(self, cell: Cell) -> str:
        """The cell in a table or as a bar."""
        return cell_name(self.targets[cell.target], self.drafts[cell.draft] if cell.draft else None)

    def series(self, draft: str | None) -> str:
        """The draft as a series of a plot."""
        return f"with {self.drafts[draft]}" if draft else TARGET_ONLY


def _names(document: CompareDocument) -> Names:
    return Names(*names_of(document))


def on_cards(document: CompareDocument) -> bool:
    """Whether any cell has something on a card."""
    return any(
        size for cell in document.cells for name, parts in cell.bytes.items() if name != HOST for size in parts.values()
    )


def of_compare(document: CompareDocument, plans: Sequence[PlanDocument] = ()) -> Iterator[Figure]:
    """All figures of a comparison that it has something for."""
    made = (
        _cell_speeds(document),
        _quality(document),
        _cell_memory(document),
        _cell_acceptance(document),
        _cell_layers(document, plans),
    )
    yield from (figure for figure in made if figure is not None)


def _drafts(document: CompareDocument) -> tuple[str, ...]:
    """Names of series: target-only, then the drafts in the order in which they were given."""
    names = _names(document)
    return (TARGET_ONLY, *(names.series(draft) for draft in names.drafts))


def _measured(document: CompareDocument) -> Iterator[tuple[Cell, Run, Mark]]:
    """Cells that were measured, as marks at x = 0."""
    names = _names(document)
    several = len({cell.target for cell in document.cells}) > 1
    for cell in document.cells:
        if cell.run is not None:
            low, high = interval(cell.run.tokens_per_s)
            description = f"{names.cell(cell)}: {with_spread(cell.run.tokens_per_s)} tokens/s"
            if cell.speedup is not None and cell.draft:
                description += f", {over(cell.speedup, 'target-only')}"
            kind: Literal["best", "measured"] = "best" if cell.leads else "measured"
            panel = names.targets[cell.target] if several else ""
            series = names.series(cell.draft)
            yield (
                cell,
                cell.run,
                Mark(series, 0.0, cell.run.tokens_per_s.median, description, low, high, panel=panel, kind=kind),
            )


def _cell_speeds(document: CompareDocument) -> Figure | None:
    found = sorted(_measured(document), key=lambda item: -item[2].y)
    if not found:
        return None
    names = _names(document)
    marks = [at(mark, names.cell(cell), panel="") for cell, _, mark in found]
    rows = tuple(
        (names.cell(cell), with_spread(run.tokens_per_s), times(cell.speedup) if cell.draft else "")
        for cell, run, _ in found
    )
    return Figure(
        "speed",
        "Tokens/s of every pairing",
        "Fastest first, each at its own best placement. The lines are 95 % intervals; where two overlap, "
        "their order is uncertain.",
        "bars",
        "",
        "tokens/s",
        tuple(marks),
        ("Pairing", "Tokens/s", "Speedup"),
        rows,
        _drafts(document),
    )


def _quality(document: CompareDocument) -> Figure | None:
    """Tokens/s against mean KL; targets whose quality is not known are left to the table."""
    known: dict[str, Quality] = {m.name: m.quality for m in document.targets if m.quality is not None}
    found = [(cell, run, mark) for cell, run, mark in _measured(document) if cell.target in known]
    if not found or len(known) < 2:
        return None
    names = _names(document)
    marks, rows = [], []
    best = {name: max((mark.y for cell, _, mark in found if cell.target == name), default=0.0) for name in known}
    for cell, run, mark in found:
        quality = known[cell.target]
        error = 1.96 * quality.mean_kl_error
        marks.append(
            at(
                mark,
                quality.mean_kl,
                description=f"{mark.description}; mean KL {quality.mean_kl:.4f} ± {error:.4f}, "
                f"{quality.top1_agreement:.1%} of the likeliest tokens the same",
                x_low=max(0.0, quality.mean_kl - error) if error else None,
                x_high=quality.mean_kl + error if error else None,
                panel="",
                label=names.targets[cell.target] if mark.y == best[cell.target] else "",
            )
        )
        rows.append(
            (
                names.cell(cell),
                with_spread(run.tokens_per_s),
                f"{quality.mean_kl:.4f} ± {error:.4f}",
                f"{quality.top1_agreement:.1%}",
                f"{quality.perplexity:.2f}",
            )
        )
    reference = next(iter(known.values())).reference
    reference = names.targets.get(reference, base_name(reference))
    return Figure(
        "quality",
        "Tokens/s against quality",
        f"Left is nearer to {reference}, up is faster: the best are at the upper left. The dashed line joins the "
        "pairings that no other beats in both. A draft does not change the text: it moves a target up or down.",
        "points",
        f"mean KL divergence from {reference}, nats a token",
        "tokens/s",
        tuple(marks),
        ("Pairing", "Tokens/s", "Mean KL", "Same top token", "Perplexity"),
        tuple(rows),
        _drafts(document),
        frontier=_frontier([(float(mark.x), mark.y) for mark in marks]),
        scale="sqrt",
    )


def _frontier(points: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Points that no other beats in both: to the left and up is better."""
    found: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not found or y > found[-1][1]:
            found.append((x, y))
    return tuple(found) if len(found) > 1 else ()


def _cell_memory(document: CompareDocument) -> Figure | None:
    cards, names = on_cards(document), _names(document)
    bars = [
        (names.cell(cell), device, parts)
        for cell in document.cells
        for device, parts in cell.bytes.items()
        if (device != HOST) == cards and any(parts.values())
    ]
    limits: list[int] = []
    if cards and len({device for _, device, _ in bars}) == 1:
        totals = [size for _, size in cards_of(document.machine)]
        limits = totals if len(totals) == 1 and totals[0] else []
    return memory("VRAM" if cards else "Memory", bars, limits)


def _cell_acceptance(document: CompareDocument) -> Figure | None:
    names = _names(document)
    several = len({cell.target for cell in document.cells}) > 1
    lines = []
    for cell in document.cells:
        if isinstance(cell.run, SpeculativeRun) and cell.draft:
            panel = names.targets[cell.target] if several else ""
            lines.append((names.cell(cell), names.series(cell.draft), panel, cell.run))
    return acceptance(lines, _drafts(document))


def _cell_layers(document: CompareDocument, plans: Sequence[PlanDocument]) -> Figure | None:
    names = _names(document)
    marks, rows = [], []
    for cell, run, mark in _measured(document):
        marks.append(at(mark, run.gpu_layers, description=f"{mark.description}, {layers_of(run)} layers on the GPU"))
        rows.append((names.cell(cell), layers_of(run), with_spread(run.tokens_per_s)))
    lines: list[Mark] = []
    for model in document.targets:
        for plan in plans:
            if base_name(plan.target.file) == base_name(model.file):
                panel = names.targets[model.name] if len(document.targets) > 1 else ""
                lines += swept(plan, next(_series_of(plan, document), None), panel)
    if not lines and len({mark.x for mark in marks}) < 2:
        return None
    return layers(marks, lines, rows, _drafts(document))


def _series_of(plan: PlanDocument, document: CompareDocument) -> Iterator[str]:
    """The series of the comparison's draft that the plan is for."""
    names = _names(document)
    for draft in document.drafts:
        if plan.draft is not None and base_name(draft.file) == base_name(plan.draft.file):
            yield names.series(draft.name)
