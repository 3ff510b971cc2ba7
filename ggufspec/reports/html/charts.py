"""Figures as SVG: Vega-Lite draws them; the only importer of vl_convert.

A figure is drawn once for a wide page and once for a phone. Colours are CSS variables of the page, so that one drawing
serves light, dark and paper. Nothing is loaded: the data is in the drawing, and every mark has its words as a title.

Source: the Vega-Lite 5 documentation (https://vega.github.io/vega-lite/docs/), which vl-convert brings with it.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

from ggufspec.errors import GgufspecError
from ggufspec.reports.html.figures import Figure
from ggufspec.reports.html.vega import SHAPES, colours_of, cycle, specification

WIDE, NARROW = 660, 330  # CSS pixels of a drawing
_VEGA_LITE = "5.21"
_SVG = "http://www.w3.org/2000/svg"
_PATHS = {  # the shapes of d3-shape, 12 units wide
    "circle": "M5,0A5,5,0,1,1,-5,0A5,5,0,1,1,5,0",
    "square": "M-4.5,-4.5h9v9h-9Z",
    "diamond": "M0,-6L6,0L0,6L-6,0Z",
    "triangle-up": "M0,-5L5.5,4.5H-5.5Z",
    "triangle-down": "M0,5L-5.5,-4.5H5.5Z",
    "triangle-right": "M5,0L-4.5,5.5V-5.5Z",
    "triangle-left": "M-5,0L4.5,5.5V-5.5Z",
    "cross": "M-5,-2H-2V-5H2V-2H5V2H2V5H-2V2H-5Z",
    "bar": "M-5.5,-4h11v8h-11Z",
    "line": "M-6,-1h12v2h-12Z",
    "failed": "M-5,-3.6L-3.6,-5L0,-1.4L3.6,-5L5,-3.6L1.4,0L5,3.6L3.6,5L0,1.4L-3.6,5L-5,3.6L-1.4,0Z",
}


def draw(figure: Figure, width: int) -> str:
    """The figure as one ``<svg>`` element of at most ``width`` CSS pixels.

    Raises:
        GgufspecError: vl-convert is not installed, or cannot draw it.
    """
    try:
        import vl_convert
    except ImportError:
        raise GgufspecError("the page's plots need vl-convert-python", "pip install vl-convert-python") from None

    try:
        svg = vl_convert.vegalite_to_svg(specification(figure, width), vl_version=_VEGA_LITE, allowed_base_urls=[])
    except ValueError as error:
        raise GgufspecError(
            f"the plot {figure.title!r} cannot be drawn: {error}", "the results are complete: leave --html out"
        ) from None
    return _described(svg, figure)


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of a legend: a path around (0, 0), 12 units wide, and its colour."""

    name: str
    path: str
    colour: str


def legend(figure: Figure) -> tuple[Key, ...]:
    """What colours and shapes stand for; empty where there is but one."""
    drawn = {mark.series for mark in figure.marks if mark.kind in ("measured", "best")}
    lines = {mark.series for mark in figure.marks if mark.kind == "predicted"} - drawn
    colours = dict(zip(figure.series, colours_of(figure.series), strict=True))
    shapes = dict(zip(figure.series, cycle(SHAPES, len(figure.series)), strict=True))
    found = []
    for name in figure.series:
        if name in drawn:
            found.append(Key(name, _PATHS["bar" if figure.form == "bars" else shapes[name]], colours[name]))
        elif name in lines:
            found.append(Key(name, _PATHS["line"], colours[name]))
    if figure.form == "bars" and {key.name for key in found} == {mark.x for mark in figure.marks}:
        found = []  # every bar has its name beside it
    failed = [Key("failed", _PATHS["failed"], "var(--bad)")] if any(m.kind == "failed" for m in figure.marks) else []
    limits = dict.fromkeys(mark.series for mark in figure.marks if mark.kind == "limit")
    failed += [Key(name, "M-1,-6h2v3h-2ZM-1,-1.5h2v3h-2ZM-1,3h2v3h-2Z", "var(--bad)") for name in limits]
    return (*found, *failed) if len(found) + len(failed) > 1 else ()


def _described(svg: str, figure: Figure) -> str:
    """The drawing as an image with the figure's title as its name; each mark's words become a title, which is shown."""
    ElementTree.register_namespace("", _SVG)
    root = ElementTree.fromstring(svg)
    root.set("role", "group")
    root.set("aria-label", figure.title)
    root.set("class", "plot")
    for element in root.iter():
        kind = element.get("aria-roledescription")
        words = element.get("aria-label")
        if words and kind in ("point", "bar", "rule mark") and element.get("role") == "graphics-symbol":
            title = ElementTree.SubElement(element, f"{{{_SVG}}}title")
            title.text = words
            element.set("class", "mark")
            element.set("role", "img")
        elif kind in ("axis", "legend"):
            element.attrib.pop("aria-label", None)
            element.set("aria-hidden", "true")
            element.attrib.pop("role", None)
        element.attrib.pop("aria-roledescription", None)
        if element.get("role", "").startswith("graphics-"):
            del element.attrib["role"]
    return ElementTree.tostring(root, encoding="unicode")
