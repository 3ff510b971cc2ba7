"""A figure in Vega-Lite's words. Pure: :mod:`ggufspec.reports.html.charts` has it drawn.

Names from outside are data, never expressions.

Source: the Vega-Lite 5 documentation (https://vega.github.io/vega-lite/docs/).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ggufspec.reports.html.figures import EXPECTED, PARTS, Figure, Mark

SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "triangle-right", "triangle-left", "cross")
_LETTER = 7.2  # CSS pixels of an average letter of 12, in a wide font
_COLOURS = tuple(f"var(--c{n})" for n in range(1, 9))
_PART_COLOURS = {part: f"var(--p{n})" for n, part in enumerate(PARTS, 1)}
_FAILED = "M-1,-1L1,1M1,-1L-1,1"

Spec = dict[str, Any]


def specification(figure: Figure, width: int) -> Spec:
    """The figure, at most ``width`` CSS pixels wide."""
    make = _bars if figure.form == "bars" else _points
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "background": None,
        "config": _CONFIG,
        "padding": {"left": 2, "right": 8, "top": 4, "bottom": 2},
        **make(figure, width),
    }


# ---- points and lines -----------------------------------------------------------------------------------------------


def _points(figure: Figure, width: int) -> Spec:
    """Points with their intervals; lines through those of one series where the figure's form says so."""
    panels = list(dict.fromkeys(mark.panel for mark in figure.marks))
    named = any(isinstance(mark.x, str) for mark in figure.marks)
    highest = max((max(mark.y, mark.high or 0.0) for mark in figure.marks), default=1.0)
    y_axis = {"format": ".0%", "tickCount": 5} if figure.percent else {"tickCount": 6}
    labelled = [mark for mark in figure.marks if mark.label]
    top = 1.0 if figure.percent else highest * (1.12 if labelled else 1.05) or 1.0
    y = {
        "field": "y",
        "type": "quantitative",
        "title": figure.y,
        "axis": y_axis,
        "scale": {"domain": [0, top], "nice": not figure.percent},
    }
    x = _across(figure, named, width)
    color = _color(figure)
    drawn = [mark for mark in figure.marks if mark.kind in ("measured", "best")]
    layers: list[Spec] = []
    predicted = [mark for mark in figure.marks if mark.kind == "predicted"]
    if predicted:
        line = {"type": "line", "strokeWidth": 1.5, "opacity": 0.75, "aria": False, "strokeCap": "round"}
        layers.append(_layer(predicted, line, {"x": x, "y": y, "color": color, "order": {"field": "order"}}))
        if len(predicted) == 1 or (len(predicted) <= 60 and not drawn):
            dot = {"type": "point", "filled": True, "size": 14, "opacity": 1}
            layers.append(_layer(predicted, dot, {"x": x, "y": y, "color": color, **_WORDS}))
    if figure.frontier:
        values = [{"x": a, "y": b, "order": n} for n, (a, b) in enumerate(figure.frontier)]
        shape = "step-after" if figure.name == "search" else "linear"
        line = {"type": "line", "strokeDash": [5, 4], "stroke": "var(--muted)", "strokeWidth": 1.25, "aria": False}
        encoding = {"x": x, "y": y, "order": {"field": "order"}}
        layers.append({"data": {"values": values}, "mark": line | {"interpolate": shape}, "encoding": encoding})
    if figure.form == "lines" and drawn:
        line = {"type": "line", "strokeWidth": 1.75, "aria": False}
        layers.append(_layer(drawn, line, {"x": x, "y": y, "color": color, "order": {"field": "order"}}))
    rule = {"type": "rule", "strokeWidth": 1.5, "opacity": 0.7, "aria": False}
    upright = [mark for mark in drawn if mark.low is not None]
    if upright:
        ends = {"y": y | {"field": "low"}, "y2": {"field": "high"}}
        layers.append(_layer(upright, rule, {"x": x, **ends, "color": color}))
    lying = [mark for mark in drawn if mark.x_low is not None]
    if lying:
        ends = {"x": x | {"field": "x_low"}, "x2": {"field": "x_high"}}
        layers.append(_layer(lying, rule, {"y": y, **ends, "color": color}))
    best = [mark for mark in drawn if mark.kind == "best"]
    if best and len(best) < len(drawn):
        ring = {
            "type": "point",
            "filled": False,
            "size": 230,
            "strokeWidth": 1.5,
            "stroke": "var(--ink)",
            "aria": False,
        }
        layers.append(_layer(best, ring, {"x": x, "y": y}))
    if drawn:
        point = {"type": "point", "filled": True, "size": 75, "opacity": 1, "stroke": "var(--paper)", "strokeWidth": 1}
        shape_scale = {"domain": list(figure.series), "range": cycle(SHAPES, len(figure.series))}
        shape_of = {"field": "series", "type": "nominal", "legend": None, "scale": shape_scale}
        layers.append(_layer(drawn, point, {"x": x, "y": y, "color": color, "shape": shape_of, **_WORDS}))
    failed = [mark for mark in figure.marks if mark.kind == "failed"]
    if failed:
        cross = {"type": "point", "shape": _FAILED, "size": 70, "strokeWidth": 2, "stroke": "var(--bad)", "opacity": 1}
        layers.append(_layer(failed, cross, {"x": x, "y": y, **_WORDS}))
    if labelled:
        text = {"type": "text", "dy": -17, "fontSize": 12, "fontWeight": 600, "color": "var(--ink)", "aria": False}
        layers.append(_layer(labelled, text, {"x": x, "y": y, "text": {"field": "label"}}))
    if len(panels) > 1:
        return _panels(layers, panels, width)
    height = 290 if width > 500 else 240
    return {
        "width": width - 12,
        "height": height,
        "autosize": {"type": "fit", "contains": "padding"},
        "layer": layers,
    }


def _panels(layers: list[Spec], panels: Sequence[str], width: int) -> Spec:
    """One small plot per panel, side by side on a wide page and below each other on a phone."""
    columns = 1 if width <= 500 else min(len(panels), 3)
    child = (width - 16) // columns - (62 if columns == 1 else 52)
    made = []
    for number, panel in enumerate(panels):
        own = []
        for layer in layers:
            values = [value for value in layer["data"]["values"] if value.get("panel", panel) == panel]
            encoding = dict(layer["encoding"])
            if number % columns:  # the axis is named at the left
                encoding["y"] = encoding["y"] | {"title": None}
            if number + columns < len(panels):  # and below the last
                encoding["x"] = encoding["x"] | {"title": None}
            own.append(layer | {"data": {"values": values}, "encoding": encoding})
        title = {"text": panel, "anchor": "start", "limit": child, "offset": 12, "frame": "group"}
        made.append({"title": title, "width": child, "height": 190, "layer": own})
    return {"concat": made, "columns": columns, "spacing": 14}


def _across(figure: Figure, named: bool, width: int) -> Spec:
    """The axis across: names, numbers that count something, or numbers."""
    title = _wrapped(figure.x, 90 if width > 500 else 42)
    if named:
        order = list(dict.fromkeys(str(mark.x) for mark in figure.marks))
        return {"field": "x", "type": "ordinal", "sort": order, "title": title, "axis": {"labelAngle": 0}}
    values = [float(mark.x) for mark in figure.marks if not isinstance(mark.x, str)]
    values += [end for mark in figure.marks for end in (mark.x_low, mark.x_high) if end is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    axis: Spec = {"tickCount": 8 if width > 500 else 5, "labelFlush": False}
    if figure.whole:
        axis["format"] = "d"
        axis["tickMinStep"] = 1
        ticks = _ticks(sorted(set(values)), high - low)
        if figure.scale == "log" or (len(ticks) <= 10 and not any(mark.kind == "predicted" for mark in figure.marks)):
            axis["values"] = ticks
    if figure.scale == "log":
        return {
            "field": "x",
            "type": "quantitative",
            "title": title,
            "axis": axis,
            "scale": {"type": "log", "base": 2, "domain": [low / 1.15, high * 1.15], "nice": False},
        }
    margin = 0.04 * (high - low) or 0.5
    if figure.scale == "sqrt":
        scale: Spec = {"type": "sqrt", "domain": [-0.002 * high or -0.01, high * 1.06 or 1.0], "nice": False}
    else:
        scale = {"domain": [low - margin, high + margin], "nice": False, "zero": False}
    return {"field": "x", "type": "quantitative", "title": title, "axis": axis, "scale": scale}


def _ticks(values: Sequence[float], span: float) -> list[float]:
    """The values, less those too near to the one before to be written beside it."""
    found: list[float] = []
    for value in values:
        if not found or value - found[-1] >= 0.05 * span:
            found.append(value)
    return found


def _color(figure: Figure) -> Spec:
    """Colour by series; the legend is the page's."""
    scale = {"domain": list(figure.series), "range": colours_of(figure.series)}
    return {"field": "series", "type": "nominal", "legend": None, "scale": scale}


def colours_of(names: Sequence[str]) -> list[str]:
    """CSS variables of the page, one for each series."""
    if any(name in _PART_COLOURS for name in names):
        rest = iter(cycle(_COLOURS, len(names)))
        return [_PART_COLOURS.get(name) or next(rest) for name in names]
    return [
        "var(--muted)" if name == EXPECTED else colour
        for name, colour in zip(names, cycle(_COLOURS, len(names)), strict=True)
    ]


# ---- bars -----------------------------------------------------------------------------------------------------------


def _bars(figure: Figure, width: int) -> Spec:
    """Bars that lie: one for every name, its parts behind each other. On a phone the names stand above their bars."""
    wide = width > 500
    drawn = [mark for mark in figure.marks if mark.kind != "limit"]
    limits = [mark for mark in figure.marks if mark.kind == "limit"]
    names = list(dict.fromkeys((str(mark.x), mark.panel) for mark in drawn))
    rows = [f"{name}, {panel}" if panel else name for name, panel in names]
    stacked = len({(mark.x, mark.panel) for mark in drawn}) < len(drawn)
    reach = max((max(_total(drawn, name, panel), *(m.high or 0 for m in drawn)) for name, panel in names), default=1.0)
    reach = max([reach, *(mark.y for mark in limits)])
    x = {
        "field": "y",
        "type": "quantitative",
        "title": figure.y,
        "axis": {"tickCount": 7 if wide else 4},
        "scale": {"domain": [0, reach * 1.04], "nice": False},
    }
    extent = min(240, max(len(row) for row in rows) * _LETTER + 10) if wide else 0
    label = {"labelLimit": 230, "labels": wide, "ticks": False, "domain": False, "labelPadding": 8, "minExtent": extent}
    y = {"field": "row", "type": "nominal", "sort": rows, "title": None, "axis": label | {"grid": False}}
    color = _color(figure)
    values = []
    for mark in drawn:
        row = f"{mark.x}, {mark.panel}" if mark.panel else str(mark.x)
        values.append(_value(mark) | {"row": row, "order": list(figure.series).index(mark.series)})
    step = 26 if wide else 40
    bar = {"type": "bar", "height": 15, "yOffset": 0 if wide else 9, "stroke": "var(--paper)", "strokeWidth": 0.75}
    data = {"values": values}
    place = x | ({"stack": "zero"} if stacked else {"stack": None})
    layers: list[Spec] = [
        {
            "data": data,
            "mark": bar,
            "encoding": {"x": place, "y": y, "color": color, "order": {"field": "order"}, **_WORDS},
        }
    ]
    upright = [value for value in values if value["low"] is not None]
    if upright and not stacked:
        ends = {"x": x | {"field": "low"}, "x2": {"field": "high"}}
        rule = {"type": "rule", "strokeWidth": 2, "stroke": "var(--ink)", "yOffset": bar["yOffset"], "aria": False}
        layers.append({"data": {"values": upright}, "mark": rule, "encoding": {"y": y, **ends}})
    if not wide:
        text = {"type": "text", "align": "left", "x": 0, "dy": -8, "fontSize": 12, "color": "var(--ink)", "aria": False}
        heads = [{"row": row, "text": row} for row in rows]
        text["limit"] = width - 30
        layers.append({"data": {"values": heads}, "mark": text, "encoding": {"y": y, "text": {"field": "text"}}})
    for mark in limits:
        rule = {"type": "rule", "strokeDash": [4, 3], "strokeWidth": 1.5, "stroke": "var(--bad)"}
        layers.append({"data": {"values": [_value(mark)]}, "mark": rule, "encoding": {"x": x, **_WORDS}})
    return {
        "width": width - 12,
        "height": step * len(rows) + 56,
        "autosize": {"type": "fit", "contains": "padding"},
        "layer": layers,
    }


def _total(marks: Iterable[Mark], name: str, panel: str) -> float:
    return sum(mark.y for mark in marks if mark.x == name and mark.panel == panel)


# ---- the parts of a specification -----------------------------------------------------------------------------------

_WORDS: Spec = {"description": {"field": "description", "type": "nominal"}}


def _layer(marks: Sequence[Mark], mark: Spec, encoding: Spec) -> Spec:
    values = [_value(each) | {"order": n} for n, each in enumerate(marks)]
    return {"data": {"values": values}, "mark": mark, "encoding": encoding}


def _value(mark: Mark) -> Spec:
    return {
        "series": mark.series,
        "x": mark.x,
        "y": mark.y,
        "low": mark.low,
        "high": mark.high,
        "x_low": mark.x_low,
        "x_high": mark.x_high,
        "panel": mark.panel,
        "label": mark.label,
        "description": mark.description,
    }


def cycle(values: Sequence[str], count: int) -> list[str]:
    """The first ``count`` of the values, from the start again after the last."""
    return [values[n % len(values)] for n in range(count)]


def _wrapped(text: str, width: int) -> str | list[str]:
    """An axis title in lines of at most ``width`` characters."""
    import textwrap

    lines = textwrap.wrap(text, width)
    return lines if len(lines) > 1 else text


_CONFIG: Spec = {
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "titleFontWeight": "normal",
        "titleFontSize": 12,
        "labelFontSize": 12,
        "titlePadding": 8,
        "gridColor": "var(--grid)",
        "domainColor": "var(--axis)",
        "tickColor": "var(--axis)",
    },
    "axisX": {"grid": False},
    "axisY": {"domain": False, "ticks": False, "labelPadding": 6},
    "title": {"color": "var(--ink)", "fontSize": 12.5, "fontWeight": 600},
}
