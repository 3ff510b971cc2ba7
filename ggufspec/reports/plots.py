"""Figures for the terminal, drawn with characters: bars that lie, and points and lines in a frame.

Every series has a mark of its own, so that a plot can be read without colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import log2, sqrt
from typing import TYPE_CHECKING

from ggufspec.reports.figures import Figure, Mark, number
from ggufspec.reports.plan import PARTS

if TYPE_CHECKING:
    from rich.text import Text

_STYLES = ("bright_black", "blue", "yellow", "green", "magenta", "red", "cyan", "bright_yellow")
_POINTS = ("●", "■", "◆", "▲", "▼", "○", "□", "◇")
_PARTS = {word: (mark, style) for _, word, mark, style in PARTS}
_PREDICTED = ("·", "+", "∘", "~")
_FAILED = "×"
_HEIGHT, _LOW = 12, 8  # lines of a plot, and of each of several panels
_NARROW = 24  # columns below which nothing can be seen


def plot(figure: Figure, width: int) -> list[Text]:
    """The figure as lines of at most ``width`` columns, its title first."""
    from rich.text import Text

    lines = [Text(figure.title, style="bold")]
    figure = _merged(figure) if figure.name == "memory" else figure
    if width < _NARROW:
        return lines
    panels = list(dict.fromkeys(mark.panel for mark in figure.marks))
    for panel in panels:
        if panel and figure.form != "bars":
            lines.append(Text(f"  {panel}", style="bold dim"))
        own = [mark for mark in figure.marks if mark.panel in (panel, "")]
        lines += (
            _bars(figure, own, width)
            if figure.form == "bars"
            else _frame(figure, own, width, _LOW if len(panels) > 1 else _HEIGHT)
        )
    legend = _legend(figure, width)
    return lines + legend


def _merged(figure: Figure) -> Figure:
    """Memory by the parts that a plan's bars have: weights by model, the rest by kind."""
    marks: dict[tuple[object, str, str], Mark] = {}
    for mark in figure.marks:
        role, _, kind = mark.series.partition(" ")
        series = {"weights": role, "kv": "KV", "compute": "compute"}.get(kind, mark.series)
        key = (mark.x, mark.panel, mark.series if mark.kind == "limit" else series)
        before = marks.get(key)
        marks[key] = replace(mark, series=series, y=mark.y + (before.y if before else 0.0))
    used = {mark.series for mark in marks.values() if mark.kind != "limit"}
    series_ = tuple(name for name in _PARTS if name in used) + tuple(sorted(used - set(_PARTS)))
    ordered = sorted(marks.values(), key=lambda mark: series_.index(mark.series) if mark.series in series_ else 0)
    names = list(dict.fromkeys((mark.x, mark.panel) for mark in figure.marks))
    ordered.sort(key=lambda mark: names.index((mark.x, mark.panel)))
    return replace(figure, marks=tuple(ordered), series=series_)


def _legend(figure: Figure, width: int) -> list[Text]:
    """What the marks stand for, in as many lines as it needs."""
    from rich.text import Text

    drawn = {mark.series for mark in figure.marks if mark.kind in ("measured", "best")}
    predicted = {mark.series for mark in figure.marks if mark.kind == "predicted"}
    named = {mark.x for mark in figure.marks} == drawn  # a bar for each series, with its name beside it
    items = []
    for index, name in enumerate(figure.series):
        if figure.form == "bars":
            if name in drawn and len(drawn) > 1 and not named:
                items.append(Text.assemble((_fill(figure, index), _style(figure, index)), f" {name}"))
        elif name in drawn:
            items.append(Text.assemble((_POINTS[index % len(_POINTS)], _style(figure, index)), f" {name}"))
        if name in predicted and name not in drawn:
            items.append(Text.assemble((_expected(index), _style(figure, index)), f" {name}"))
    both = [_expected(index) for index, name in enumerate(figure.series) if name in predicted & drawn]
    if both:
        items.append(Text(f"{' '.join(both)} predicted"))
    if any(mark.kind == "failed" for mark in figure.marks):
        items.append(Text.assemble((_FAILED, "red"), " failed"))
    items += [
        Text.assemble(("┊", "red"), f" {name}")
        for name in dict.fromkeys(mark.series for mark in figure.marks if mark.kind == "limit")
    ]
    if len(items) < 2:
        return []
    lines = [Text("  ")]
    for item in items:
        if len(lines[-1]) > 2 and len(lines[-1]) + 3 + len(item) > width:
            lines.append(Text("  "))
        lines[-1] += (Text("   ") if len(lines[-1]) > 2 else Text()) + item
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _style(figure: Figure, index: int) -> str:
    if figure.name == "memory" and figure.series[index] in _PARTS:
        return _PARTS[figure.series[index]][1]
    return _STYLES[index % len(_STYLES)]


def _expected(index: int) -> str:
    return _PREDICTED[index % len(_PREDICTED)]


def _fill(figure: Figure, index: int) -> str:
    if figure.name == "memory" and figure.series[index] in _PARTS:
        return _PARTS[figure.series[index]][0]
    return "█▓▒░▞◼▤▦"[index % 8]


# ---- bars -----------------------------------------------------------------------------------------------------------


def _bars(figure: Figure, marks: Sequence[Mark], width: int) -> Iterator[Text]:
    """One line for every x: its name, its parts, and the sum."""
    from rich.text import Text

    rows: dict[str, list[Mark]] = {}
    for mark in marks:
        if mark.kind != "limit":
            rows.setdefault(f"{mark.x}, {mark.panel}" if mark.panel else str(mark.x), []).append(mark)
    limits = [mark.y for mark in marks if mark.kind == "limit"]
    sums = {name: sum(mark.y for mark in parts) for name, parts in rows.items()}
    reach = max([*sums.values(), *limits, *(mark.high or 0.0 for mark in marks)], default=0.0)
    if not reach:
        return
    column = min(max(map(len, rows)), width // 3)
    ends = {name: _sum(parts, sums[name]) for name, parts in rows.items()}
    room = max(4, width - column - max(map(len, ends.values())) - 5)
    for name, parts in rows.items():
        shown = name if len(name) <= column else name[: column - 1] + "…"
        line = Text(f"  {shown:>{column}} ")
        done = total = 0.0
        for mark in parts:
            index = figure.series.index(mark.series)
            total += mark.y
            cells = round(total / reach * room) - round(done / reach * room)
            line.append(_fill(figure, index) * cells, style=_style(figure, index))
            done = total
        used = round(done / reach * room)
        gap = [" "] * (room - used)
        for limit in limits:
            place = min(room - 1, round(limit / reach * room)) - used
            if 0 <= place < len(gap):
                gap[place] = "┊"
        for cell in gap:
            line.append(cell, style="red" if cell == "┊" else "")
        best = any(mark.kind == "best" for mark in parts)
        line.append(f" {ends[name]}", style="bold" if best else "")
        yield line


def _sum(parts: Sequence[Mark], total: float) -> str:
    """What is written behind a bar: a speed with its interval, or the sum of the parts."""
    first = parts[0]
    if len(parts) == 1 and first.low is not None and first.high is not None:
        half = max(first.high - first.y, first.y - first.low)
        digits = 0 if first.y >= 100 else 1 if first.y >= 10 else 2
        return f"{first.y:.{digits}f} ± {half:.{digits}f}"
    return number(total)


# ---- points and lines -----------------------------------------------------------------------------------------------


def _frame(figure: Figure, marks: Sequence[Mark], width: int, lines: int) -> Iterator[Text]:
    """Points in a grid of characters, with what both axes reach from and to."""
    from rich.text import Text

    names = list(dict.fromkeys(str(mark.x) for mark in marks))
    named = any(isinstance(mark.x, str) for mark in marks)

    def across(x: float | str) -> float:
        if named:
            return float(names.index(str(x)))
        return _scaled(figure, float(x))

    places = [across(mark.x) for mark in marks]
    left, right = min(places), max(places)
    top = 1.0 if figure.percent else max(max(mark.y, mark.high or 0.0) for mark in marks) or 1.0
    label = (lambda y: f"{y:.0%}") if figure.percent else number
    edge = max(len(label(top)), len(label(top / 2))) + 2
    columns = width - edge - 3
    grid: list[list[tuple[str, str]]] = [[(" ", "")] * columns for _ in range(lines)]

    def put(x: float, y: float, mark: str, style: str) -> None:
        column = round((x - left) / (right - left) * (columns - 3)) + 1 if right > left else columns // 2
        row = lines - 1 - round(min(1.0, max(0.0, y / top)) * (lines - 1))
        grid[row][column] = (mark, style)

    for mark in sorted(marks, key=lambda mark: ("predicted", "failed", "measured", "best").index(mark.kind)):
        index = figure.series.index(mark.series) if mark.series in figure.series else 0
        style = _style(figure, index)
        if mark.kind == "predicted":
            put(across(mark.x), mark.y, _expected(index), style)
        elif mark.kind == "failed":
            put(across(mark.x), mark.y, _FAILED, "red")
        else:
            bold = "bold " if mark.kind == "best" else ""
            put(across(mark.x), mark.y, _POINTS[index % len(_POINTS)], bold + style)
    for number_, row in enumerate(grid):
        height = top * (1 - number_ / (lines - 1))
        tick = label(height) if number_ in (0, lines - 1) or number_ == lines // 2 else ""
        line = Text(f"{tick:>{edge}} ", style="dim")
        line.append("┤" if tick else "│", style="dim")
        for cell, style in row:
            line.append(cell, style=style)
        line.rstrip()
        yield line
    yield Text(" " * (edge + 1) + "└" + "─" * columns, style="dim")
    yield from _ticks(figure, marks, named, names, edge, columns)


def _scaled(figure: Figure, x: float) -> float:
    return log2(x) if figure.scale == "log" else sqrt(max(0.0, x)) if figure.scale == "sqrt" else x


def _ticks(
    figure: Figure, marks: Sequence[Mark], named: bool, names: Sequence[str], edge: int, columns: int
) -> Iterator[Text]:
    """The axis across: as many of its values as there is room for, and its name."""
    from rich.text import Text

    if named:
        ticks = [(float(index), name) for index, name in enumerate(names)]
    else:
        values = sorted({float(mark.x) for mark in marks if not isinstance(mark.x, str)})
        ticks = [(_scaled(figure, v), f"{v:g}" if figure.whole else f"{v:.3g}") for v in values]
    left, right = ticks[0][0], ticks[-1][0]
    line = [" "] * (columns + edge + 4)
    ends = (ticks[0], ticks[-1])
    for place, name in sorted(ticks, key=lambda tick: tick not in ends):  # they are named whatever else is not
        column = round((place - left) / (right - left) * (columns - 3)) + 1 if right > left else columns // 2
        start = max(0, min(edge + 2 + column - len(name) // 2, len(line) - len(name)))
        if all(cell == " " for cell in line[max(0, start - 2) : start + len(name) + 2]):
            line[start : start + len(name)] = name
    yield Text("".join(line).rstrip(), style="dim")
    if figure.x:
        title = figure.x if len(figure.x) <= columns else figure.x[: columns - 1] + "…"
        yield Text(" " * (edge + 2) + title.center(columns).rstrip(), style="dim")
