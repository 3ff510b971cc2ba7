"""Drawing of figures as SVG with Vega-Lite; only this module imports vl_convert.

Colours are CSS variables of the page, so that a drawing works in light and dark mode and on paper. Drawings contain
their data and load nothing, and every mark has a title. Untrusted names are only data, never expressions.

Source: documentation of Vega-Lite 5 (https://vega.github.io/vega-lite/docs/), which vl-convert bundles.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ggufspec.errors import GgufspecError
from ggufspec.reports.html.figures import PARTS, Figure

WIDTH = 500  # width of a figure in CSS pixels
_VEGA_LITE = "5.21"
_SVG = "http://www.w3.org/2000/svg"
_FEW = 12  # maximum number of integers on an axis that are all labelled
_CROSS = "M-1,-1L1,1M1,-1L-1,1"

Spec = dict[str, Any]


def draw(figure: Figure) -> str:
    """Return a figure as one ``<svg>`` element.

    Raises:
        GgufspecError: vl-convert is not installed, or cannot draw the figure.
    """
    try:
        import vl_convert
    except ImportError:
        raise GgufspecError("the page's plots need vl-convert-python", "pip install vl-convert-python") from None

    try:
        svg = vl_convert.vegalite_to_svg(specification(figure), vl_version=_VEGA_LITE, allowed_base_urls=[])
    except ValueError as error:
        message = f"the plot {figure.title!r} cannot be drawn: {error}"
        raise GgufspecError(message, "the results are complete without it: leave --html out") from None
    ElementTree.register_namespace("", _SVG)
    root = ElementTree.fromstring(svg)
    root.attrib |= {"class": "plot", "role": "group", "aria-label": figure.title}
    for element in root.iter():
        words = element.get("aria-label")
        if words and element.get("role") == "graphics-symbol" and not element.tag.endswith("}g"):  # groups are axes
            ElementTree.SubElement(element, f"{{{_SVG}}}title").text = words
    return ElementTree.tostring(root, encoding="unicode")


def specification(figure: Figure) -> Spec:
    panels = {mark.panel for mark in figure.marks}
    plot: Spec = {"layer": _bars(figure) if figure.form == "bars" else _points(figure)}
    if len(panels) > 1:
        plot |= {"width": WIDTH // 2 - 50, "height": 150}
        header = {"title": None, "labelAnchor": "start"}
        plot = {"facet": {"field": "panel", "header": header, "sort": None}, "columns": 2, "spec": plot}
    else:
        rows = len({mark.x for mark in figure.marks if mark.kind != "limit"})
        height = 40 * rows + 10 * len(figure.series) + 60 if figure.form == "bars" else 290
        plot |= {"width": WIDTH, "height": height, "autosize": {"type": "fit", "contains": "padding"}}
    values = [asdict(mark) | {"order": number} for number, mark in enumerate(figure.marks)]
    return {"background": None, "config": _CONFIG, "data": {"values": values}, **plot}


def _points(figure: Figure) -> list[Spec]:
    """Return layers for points with intervals, connected within each series if the figure's form is ``lines``."""
    x: Spec = {"field": "x", "title": figure.x}
    if any(isinstance(mark.x, str) for mark in figure.marks):
        x |= {"type": "ordinal", "sort": None, "axis": {"labelAngle": 0}}
    else:
        values = sorted({float(mark.x) for mark in figure.marks})
        axis: Spec = {"tickCount": 5}
        if all(value.is_integer() for value in values):
            axis = {"format": "d"} | ({"values": values} if len(values) <= _FEW else {"tickMinStep": 1})
        x |= {"type": "quantitative", "axis": axis}
        scale = "sqrt" if figure.name == "quality" else "linear"
        x["scale"] = {"type": scale, "zero": False, "nice": False, "padding": 12}
    y: Spec = {"field": "y", "type": "quantitative", "title": figure.y, "scale": {"zero": True}}
    if figure.name == "acceptance":
        y |= {"axis": {"format": ".0%", "values": [0, 0.25, 0.5, 0.75, 1]}, "scale": {"domain": [0, 1.06]}}
    place = {"x": x, "y": y, "color": _colour(figure)}
    shape = {"field": "series", "scale": {"domain": list(figure.series)}, "legend": place["color"]["legend"]}
    order = {"order": {"field": "order"}}
    cross = {"type": "point", "shape": _CROSS, "size": 70, "strokeWidth": 2, "stroke": "var(--bad)"}
    layers = [("line", {"type": "line", "strokeWidth": 1.5}, place | order)]
    if figure.form == "lines":
        layers.append(("measured", {"type": "line", "strokeWidth": 1.75}, place | order))
    ends = {"y": y | {"field": "low"}, "y2": {"field": "high"}}
    layers += [
        ("measured", {"type": "rule", "strokeWidth": 1.5}, place | ends),
        ("measured", {"type": "point", "filled": True, "size": 75}, place | {"shape": shape} | _WORDS),
        ("failed", cross, {"x": x, "y": y} | _WORDS),
        ("measured", {"type": "text", "dy": -15}, {"x": x, "y": y, "text": {"field": "label"}}),
    ]
    return _drawn(figure, layers)


def _bars(figure: Figure) -> list[Spec]:
    """Return layers for horizontal bars below their names; memory bars are stacked."""
    names = list(dict.fromkeys(mark.x for mark in figure.marks if mark.kind != "limit"))
    stacked = figure.name == "memory"
    x: Spec = {"field": "y", "type": "quantitative", "title": figure.y, "axis": {"tickCount": 6}}
    x["stack"] = "zero" if stacked else None
    y = {"field": "x", "type": "nominal", "sort": names, "axis": None}
    place = {"x": x, "y": y, "color": _colour(figure), "order": {"field": "order"}}
    layers: list[tuple[str, Spec, Spec]] = [("measured", {"type": "bar", "height": 15, "yOffset": 9}, place | _WORDS)]
    if not stacked:
        ends = {"x": x | {"field": "low"}, "x2": {"field": "high"}, "y": y}
        layers.append(("measured", {"type": "rule", "yOffset": 9, "strokeWidth": 2, "stroke": "var(--ink)"}, ends))
    rule = {"type": "rule", "aria": True, "strokeDash": [4, 3], "strokeWidth": 1.5, "stroke": "var(--bad)"}
    layers.append(("limit", rule, {"x": {"field": "y", "type": "quantitative"}} | _WORDS))
    head = {"type": "text", "align": "left", "x": 0, "dy": -9, "limit": WIDTH - 20}
    data = {"values": [{"x": name} for name in names]}
    heads = {"data": data, "mark": head, "encoding": {"y": y, "text": {"field": "x"}}}
    return [*_drawn(figure, layers), heads]


def _drawn(figure: Figure, layers: Sequence[tuple[str, Spec, Spec]]) -> list[Spec]:
    """Return specifications for those ``layers`` (kind of mark, drawing, encoding) for which the figure has marks."""
    kinds = {mark.kind for mark in figure.marks}
    return [
        {
            # Omit empty labels, which would take up space above their panel and move the panel's title up
            "transform": [{"filter": f"datum.kind === '{kind}'" + " && datum.label" * ("text" in encoding)}],
            "mark": mark,
            "encoding": encoding,
        }
        for kind, mark, encoding in layers
        if kind in kinds
    ]


def _colour(figure: Figure) -> Spec:
    """Return the colours by series, with a legend unless there is only one series or each is a single named bar."""
    if figure.name == "memory":
        colours = [f"var(--p{PARTS.index(name) + 1})" for name in figure.series]
    else:
        colours = [f"var(--c{number % 8 + 1})" for number in range(len(figure.series))]
    drawn = {mark.series for mark in figure.marks}
    named = len(drawn) < 2 or all(mark.series == mark.x for mark in figure.marks)
    scale = {"domain": list(figure.series), "range": colours}
    legend = {"title": None, "orient": "top", "columns": 2, "values": [name for name in figure.series if name in drawn]}
    return {"field": "series", "type": "nominal", "scale": scale, "legend": None if named else legend}


_WORDS: Spec = {"description": {"field": "description"}}
_CONFIG: Spec = {
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "titleFontWeight": "normal",
        "titleFontSize": 13,
        "labelFontSize": 13,
        "labelOverlap": True,
        "gridColor": "var(--grid)",
        "domainColor": "var(--axis)",
        "tickColor": "var(--axis)",
    },
    "axisX": {"grid": False},
    "axisY": {"domain": False, "ticks": False, "labelPadding": 6},
    "legend": {"labelColor": "var(--ink)", "labelFontSize": 13, "labelLimit": 210},
    "header": {"labelColor": "var(--ink)", "labelFontSize": 13, "labelFontWeight": 600},
    "bar": {"stroke": "var(--paper)", "strokeWidth": 0.75},
    "line": {"aria": False},
    "point": {"opacity": 1},
    "rule": {"aria": False},
    "text": {"aria": False, "color": "var(--ink)", "fontSize": 13},
}
