"""What results look like as figures: marks with their words, apart from how they are drawn. Pure.

:mod:`ggufspec.reports.html.charts` draws them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isfinite
from typing import Any, Literal

from ggufspec.display import number, of_memory
from ggufspec.reports.table import Column, Table, columns, word
from ggufspec.reports.values import accepted, base_name
from ggufspec.schema.base import SpeculativeRun, Spread
from ggufspec.schema.plan import PlanDocument

TARGET_ONLY = "target-only"
EXPECTED = "expected before it"
FIRST = "the planner's first choice"
HOST = "CPU"
GIB = 2**30
PLACES = 8  # of a draft, in a table; a figure has them all

# Parts of a device's memory, in the order in which they are stacked.
PARTS = (
    "target weights",
    "target kv",
    "target compute",
    "draft weights",
    "draft kv",
    "draft compute",
    "overhead",
)

Row = tuple[str, ...]
Heads = tuple[str | Column, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """One thing that was measured, or predicted.

    Args:
        series: what it belongs to; a colour and a shape.
        x: the place across, a number, or a name where the axis has names.
        y: the height, in the axis's unit.
        description: what it is, in words: shown when it is pointed at, and read aloud.
        low: end of its 95 % interval, if it has one.
        high: the other end.
        x_low: the same across.
        x_high: the same across.
        panel: the panel that it is in, where a figure has several.
        label: a name that is written beside it.
        kind: ``measured``, ``predicted``, ``failed``, ``best`` or ``limit``.
    """

    series: str
    x: float | str
    y: float
    description: str
    low: float | None = None
    high: float | None = None
    x_low: float | None = None
    x_high: float | None = None
    panel: str = ""
    label: str = ""
    kind: Literal["measured", "predicted", "failed", "best", "limit"] = "measured"


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot, and the table that says the same.

    Args:
        name: ``speed``, ``quality``, ``memory``, ``acceptance``, ``layers``, ``length``, ``search`` or ``option``.
        title: of the plot.
        caption: how it is read.
        form: ``points``, ``lines``, or ``bars`` that lie, stacked by series, one for every x.
        x: the axis across.
        y: the axis up.
        marks: what is drawn.
        columns: of the table.
        rows: of the table.
        series: in the order of their colours.
        frontier: corners of a line that joins the best marks.
        percent: whether y is a share.
        whole: whether x counts something.
        scale: of x: ``linear``; ``log``, where it doubles from one tick to the next; ``sqrt``, which is wider near 0.
    """

    name: str
    title: str
    caption: str
    form: Literal["points", "lines", "bars"]
    x: str
    y: str
    marks: tuple[Mark, ...]
    columns: Heads
    rows: tuple[Row, ...]
    series: tuple[str, ...]
    frontier: tuple[tuple[float, float], ...] = field(default=())
    percent: bool = False
    whole: bool = False
    scale: Literal["linear", "log", "sqrt"] = "linear"

    @property
    def table(self) -> Table:
        """What it shows, as texts."""
        return Table(self.title, columns(*self.columns), self.rows)


def interval(value: Spread) -> tuple[float | None, float | None]:
    """The ends to draw; none of a single sample."""
    return value.ci95 if len(value.samples) > 1 else (None, None)


def drawable(figure: Figure) -> Figure | None:
    """The figure without marks that have no place, a divergence that overflowed say; None where no other is left."""
    marks = tuple(mark for mark in figure.marks if _has_place(mark))
    frontier = tuple(point for point in figure.frontier if all(map(isfinite, point)))
    return replace(figure, marks=marks, frontier=frontier) if marks else None


def _has_place(mark: Mark) -> bool:
    places = (mark.x, mark.y, mark.low, mark.high, mark.x_low, mark.x_high)
    return all(place is None or isinstance(place, str) or isfinite(place) for place in places)


def cards_of(machine: dict[str, Any]) -> list[tuple[str, int]]:
    """(name, bytes) of each of a document's cards; 0 bytes where they are not known."""
    found = machine.get("gpus")
    cards = [card for card in found if isinstance(card, dict)] if isinstance(found, (list, tuple)) else []
    sizes = [card.get("total_bytes") for card in cards]
    return [
        (str(card.get("name", "card")), size if isinstance(size, int) else 0)
        for card, size in zip(cards, sizes, strict=True)
    ]


def at(mark: Mark, x: float | str, **changes: object) -> Mark:
    """The mark at another place across."""
    return replace(mark, x=x, **changes)  # type: ignore[arg-type]


def scale_of(values: Sequence[float]) -> Literal["linear", "log"]:
    """``log`` where values grow by factors, 1, 2, 4, 8 say."""
    ordered = sorted(values)
    doubling = len(ordered) > 2 and ordered[0] > 0 and all(b / a >= 1.5 for a, b in pairwise(ordered))
    return "log" if doubling else "linear"


def memory(
    what: str,
    bars: Sequence[tuple[str, str, dict[str, int]]],
    limits: Sequence[int] = (),
    limit: str = "the card's memory",
) -> Figure | None:
    """Planned parts, stacked; ``bars`` are (pairing, device, bytes by part), ``limits`` bytes drawn as lines."""
    if not bars:
        return None
    devices = {device for _, device, _ in bars}
    marks, rows = [], []
    for pairing, device, parts in bars:
        for part in (*PARTS, *(part for part in parts if part not in PARTS)):
            if parts.get(part):
                description = f"{pairing}, {device}: {part} {of_memory(parts[part])}"
                panel = device if len(devices) > 1 else ""
                marks.append(Mark(part, pairing, parts[part] / GIB, description, panel=panel))
        by_role = [
            sum(parts.get(f"{role} {kind}", 0) for kind in ("weights", "kv", "compute")) for role in ("target", "draft")
        ]
        sizes = (sum(parts.values()), *by_role, parts.get("overhead", 0))
        where = (device,) if len(devices) > 1 else ()
        rows.append((pairing, *where, *(of_memory(size) if size >= 2**19 else "–" for size in sizes)))
    marks += [Mark(limit, "", size / GIB, f"{limit}: {of_memory(size)}", kind="limit") for size in limits]
    series = tuple(part for part in PARTS if any(mark.series == part for mark in marks))
    others = tuple(dict.fromkeys(m.series for m in marks if m.series not in series and m.kind != "limit"))
    return Figure(
        "memory",
        f"{what} by part, as planned",
        "What each pairing needs according to its plan: the target's parts in one colour, the draft's in another."
        + (f" The upright line is {limit}." if limits else ""),
        "bars",
        "",
        "GiB",
        tuple(marks),
        ("Pairing", *((word("Device"),) if len(devices) > 1 else ()), "Total", "Target's", "Draft's", "Overhead"),
        tuple(rows),
        series + others,
    )


def acceptance(lines: Sequence[tuple[str, str, str, SpeculativeRun]], series: tuple[str, ...]) -> Figure | None:
    """Accepted ÷ drafted by place; ``lines`` are (pairing, series, panel, run), ``series`` all that have a colour."""
    lines = [line for line in lines if line[3].accepted_by_position]
    if not lines:
        return None
    marks = [
        Mark(name, place, share, f"{pairing}: {share:.0%} accepted at position {place}", panel=panel)
        for pairing, name, panel, run in lines
        for place, share in enumerate(run.accepted_by_position, 1)
    ]
    longest = min(PLACES, max(len(run.accepted_by_position) for *_, run in lines))
    rows = []
    for pairing, _, _, run in lines:
        shares = [f"{share:.0%}" for share in run.accepted_by_position[:longest]]
        rows.append((pairing, accepted(run), f"{run.tokens_per_round:.2f}", *shares, *[""] * (longest - len(shares))))
    return Figure(
        "acceptance",
        "Acceptance by position",
        "The share of drafted tokens that the target accepted, by position in the draft.",
        "lines",
        "position in the draft",
        "accepted",
        tuple(marks),
        ("Pairing", "Accepted", "Tokens/round", *(str(place) for place in range(1, longest + 1))),
        tuple(rows),
        series,
        percent=True,
        whole=True,
    )


def swept(plan: PlanDocument, draft: str | None, panel: str = "", target_only: str = TARGET_ONLY) -> list[Mark]:
    """The plan's sweep: marks of target-only, and of ``draft`` if there is one; both name their series."""
    found = []
    for row in plan.sweep:
        for series, speed in ((target_only, row.target_only_tokens_per_s), (draft, row.speculative_tokens_per_s)):
            if speed is not None and series is not None:
                description = f"{series}, {row.gpu_layers} layers on the GPU: ≈ {number(speed)} tokens/s predicted"
                found.append(Mark(series, row.gpu_layers, speed, description, panel=panel, kind="predicted"))
    return found


def matching(pair: dict[str, object], plans: Sequence[PlanDocument]) -> Iterator[PlanDocument]:
    """Plans with a sweep of the same target file, and of the same draft if they have one."""
    for plan in plans:
        option = plan.options.get("speculative")
        draft = plan.draft or (option.draft if option else None)
        same = draft is None or not pair.get("draft") or base_name(draft.file) == base_name(pair.get("draft"))
        if plan.sweep and same and base_name(plan.target.file) == base_name(pair.get("target")):
            yield plan


def layers(
    marks: Sequence[Mark], lines: Sequence[Mark], rows: Sequence[Row], series: tuple[str, ...], first: str = "Pairing"
) -> Figure | None:
    """Tokens/s over GPU layers: measured points, and predictions as lines."""
    if not marks and not lines:
        return None
    predicted = [
        (f"{line.panel + ', ' if line.panel else ''}{line.series}, predicted", f"{line.x:g}", f"≈ {number(line.y)}")
        for line in lines
        if isinstance(line.x, (int, float))
    ]
    return Figure(
        "layers",
        "Tokens/s over GPU layers",
        "Points were measured, with their 95 % intervals." + (" The lines are what the plan predicts." if lines else "")
        if marks
        else "What the plan predicts for each number of target layers on the GPU.",
        "points",
        "target layers on the GPU",
        "tokens/s",
        (*lines, *marks),
        (first, "GPU layers", "Tokens/s"),
        (*rows, *predicted),
        series,
        whole=True,
    )
