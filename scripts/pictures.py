"""Draw the pictures of README.md and docs/gpu.md from docs/evidence, light and dark: docs/*.svg.

.venv/bin/python scripts/pictures.py
"""

from __future__ import annotations

import json
import math
from itertools import groupby
from pathlib import Path
from typing import Any

import vl_convert

ROOT = Path(__file__).resolve().parents[1]
LIGHT = {
    "ink": "#1f2328",
    "muted": "#59636e",
    "line": "#d1d9e0",
    "plain": "#75808d",
    "pair": "#0b63c5",
    "best": "#11804a",
}
DARK = {
    "ink": "#f0f6fc",
    "muted": "#9198a1",
    "line": "#3d444d",
    "plain": "#8b96a3",
    "pair": "#6cb0ff",
    "best": "#5fd08f",
}
LABELS, BARS = 270, 330  # pixels of the names at the left and of the longest bar

THEIRS, OURS = "llama-speculative-simple, best draft length of each case", "ggufspec, default settings"

Spec = dict[str, Any]
Colours = dict[str, str]


def evidence(name: str) -> Any:
    """A file of docs/evidence."""
    return json.loads((ROOT / "docs" / "evidence" / f"{name}.json").read_text(encoding="utf-8"))


# ---- the honest rival -----------------------------------------------------------------------------------------------


def honest_rival(colours: Colours) -> Spec:
    """Bars: both at the same layers, published; target-only at its best and the pair, predicted."""
    found = evidence("honest-rival")
    published, layers = found["published"], found["published"]["gpu_layers"]
    measured = published["target_only_tokens_per_s"], published["speculative_tokens_per_s"]
    usual, planned = (found["plans"][name]["options"] for name in ("fastest as usual", "fastest"))
    best = planned["target_only"]
    alone, *pairs = (one["tokens_per_s"] for one in (best, usual["speculative"], planned["speculative"]))
    panels = {
        f"The usual comparison: the same {layers} layers (measured, a published notebook)": [
            (f"target-only, {layers} layers", measured[0], "plain", ""),
            (f"with a draft, {layers} layers", measured[1], "pair", f" ({measured[1] / measured[0]:.2f}×)"),
        ],
        f"The same memory: all of the card (predicted by ggufspec plan, {found['card']})": [
            (f"target-only at its best, {_where(best['target'])}", alone, "plain", ""),
            ("with a draft, verified as usual", pairs[0], "pair", f" ({pairs[0] / alone:.2f}×)"),
            ("with a draft, verified on the card", pairs[1], "best", f" ({pairs[1] / alone:.2f}×)"),
        ],
    }
    highest = max(bar[1] for bars in panels.values() for bar in bars)
    return {
        "vconcat": [_bars(title, bars, highest, colours) for title, bars in panels.items()],
        "spacing": 18,
        "title": _title("Llama-3-70B Q3_K_S on one 24 GB card, draft Llama-3-8B: tokens per second", colours),
    }


def _where(target: dict[str, Any]) -> str:
    """A placement in few words."""
    return f"{target['n_cpu_ffn']} FFN on CPU" if target["n_cpu_ffn"] else f"{target['gpu_layers']} layers"


def _bars(title: str, bars: list[tuple[str, float, str, str]], highest: float, colours: Colours) -> Spec:
    predicted = "predicted" in title
    values = [
        {"name": name, "value": value, "colour": colours[colour], "text": f"{value:.2f}{note}"}
        for name, value, colour, note in bars
    ]
    y = {"field": "name", "type": "nominal", "sort": None, "title": None, "axis": _names(colours)}
    x = {"field": "value", "type": "quantitative", "axis": None, "scale": {"domain": [0, highest]}}
    colour = {"field": "colour", "type": "nominal", "scale": None, "legend": None}
    bar = {"type": "bar", "height": {"band": 0.7}, "strokeWidth": 1.5, "fillOpacity": 0.3 if predicted else 1}
    text = {"type": "text", "align": "left", "dx": 6, "fontSize": 13, "fontWeight": 600, "color": colours["ink"]}
    return {
        "title": {"text": title, "anchor": "start", "frame": "bounds", "fontSize": 12.5, "color": colours["muted"]},
        "width": BARS,
        "height": {"step": 27},
        "data": {"values": values},
        "encoding": {"x": x, "y": y},
        "layer": [
            {"mark": bar, "encoding": {"fill": colour, "stroke": colour}},
            {"mark": text, "encoding": {"text": {"field": "text"}}},
        ],
    }


# ---- how fast -------------------------------------------------------------------------------------------------------


def speeds() -> list[tuple[str, str, float, float, float]]:
    """(case, program, mean over the kinds of text of speed ÷ target-only, lowest, highest), a row for each program."""
    grid = [
        case for case in evidence("decoder")["cases"] if case["group"] == "grid" and "both" in case["repetitions"][0]
    ]
    rows = []
    grid.sort(key=lambda case: (case["target"] != "F16", case["target"] != "Q8_0", len(case["draft"])))
    for (target, draft), cases in groupby(grid, key=lambda case: (case["target"], case["draft"])):
        pairs = [_over_target_only(case) for case in cases]
        for mode, ratios in zip((THEIRS, OURS), zip(*pairs, strict=True), strict=True):
            rows.append(
                (
                    f"{target}, {draft.upper()} draft",
                    mode,
                    math.prod(ratios) ** (1 / len(ratios)),
                    min(ratios),
                    max(ratios),
                )
            )
    return rows


def _over_target_only(case: Any) -> tuple[float, float]:
    """llama-speculative-simple at its best length, and our default, each ÷ target-only."""
    modes = {mode for repetition in case["repetitions"] for mode in repetition}

    def speed(mode: str) -> float:
        runs = [repetition[mode] for repetition in case["repetitions"] if mode in repetition]
        return float(sum(run["tokens"] for run in runs) / sum(run["seconds"] for run in runs))

    theirs = max(speed(mode) for mode in modes if mode.startswith("theirs"))
    return theirs / speed("target-only"), speed("both") / speed("target-only")


def how_fast(colours: Colours) -> Spec:
    """Points: speed ÷ target-only of llama-speculative-simple and of ggufspec, with the range over kinds of text."""
    colour = {THEIRS: colours["plain"], OURS: colours["pair"]}
    values = [
        {"name": name, "mode": mode, "mean": mean, "low": low, "high": high, "text": f"{mean:.2f}×"}
        for name, mode, mean, low, high in speeds()
    ]
    y = {"field": "name", "type": "nominal", "sort": None, "title": None, "axis": _names(colours, 120)}
    offset = {"field": "mode", "type": "nominal", "sort": list(colour)}
    axis = {"grid": False, "tickCount": 6, "format": ".1f", "labelColor": colours["muted"], "labelFontSize": 12}
    axis |= {"domainColor": colours["line"], "tickColor": colours["line"], "titleColor": colours["muted"]}
    axis |= {
        "titleFontWeight": "normal",
        "titleFontSize": 12,
        "title": "times target-only: mean of six kinds of text; the line goes from the worst kind to the best",
    }
    scale = {"domain": [0.4, math.ceil(max(row[-1] for row in speeds()) * 10) / 10], "nice": False}
    x = {"type": "quantitative", "axis": axis, "scale": scale}
    of_mode = {
        "field": "mode",
        "type": "nominal",
        "scale": {"domain": list(colour), "range": list(colour.values())},
        "legend": {
            "title": None,
            "orient": "top",
            "labelColor": colours["ink"],
            "labelFontSize": 13,
            "labelLimit": 400,
        },
    }
    text = {"type": "text", "dy": -8, "fontSize": 11.5, "fontWeight": 600}
    even = {"type": "rule", "strokeDash": [4, 4], "color": colours["muted"]}
    range_ = {"type": "rule", "strokeWidth": 2, "opacity": 0.45}
    return {
        "title": _title("Speed of greedy decoding, target of 1B parameters on two CPU cores", colours),
        "width": BARS + LABELS - 120,
        "height": {"step": 20},
        "data": {"values": values},
        "layer": [
            {"data": {"values": [{"even": 1}]}, "mark": even, "encoding": {"x": x | {"field": "even"}}},
            {
                "mark": range_,
                "encoding": {
                    "x": x | {"field": "low"},
                    "x2": {"field": "high"},
                    "y": y,
                    "yOffset": offset,
                    "color": of_mode,
                },
            },
            {
                "mark": {"type": "point", "filled": True, "size": 85, "opacity": 1},
                "encoding": {"x": x | {"field": "mean"}, "y": y, "yOffset": offset, "color": of_mode},
            },
            {
                "mark": text,
                "encoding": {
                    "x": x | {"field": "mean"},
                    "y": y,
                    "yOffset": offset,
                    "color": of_mode,
                    "text": {"field": "text"},
                },
            },
        ],
    }


# ---- what both have in common ---------------------------------------------------------------------------------------


def _title(text: str, colours: Colours) -> Spec:
    return {"text": text, "anchor": "start", "fontSize": 15, "color": colours["ink"], "offset": 14, "frame": "bounds"}


def _names(colours: Colours, width: int = LABELS - 60) -> Spec:
    """An axis of names, of one width in every panel."""
    axis = {"domain": False, "ticks": False, "labelFontSize": 13, "labelColor": colours["ink"], "labelPadding": 8}
    return axis | {"labelLimit": width, "minExtent": width, "maxExtent": width}


def draw(spec: Spec) -> str:
    """The picture as SVG."""
    config = {"font": "-apple-system, Segoe UI, Helvetica, Arial, sans-serif", "view": {"stroke": None}}
    whole = {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "background": None,
        "config": config,
        "padding": 6,
    }
    return str(vl_convert.vegalite_to_svg(whole | spec, vl_version="5.21", allowed_base_urls=[])) + "\n"


def pictures() -> dict[str, str]:
    """Name of each file in docs and what belongs in it."""
    drawn = {"honest-rival": honest_rival, "how-fast": how_fast}
    schemes = {"light": LIGHT, "dark": DARK}
    return {
        f"{name}-{scheme}.svg": draw(make(colours))
        for name, make in drawn.items()
        for scheme, colours in schemes.items()
    }


def main() -> None:
    """Write the pictures."""
    for name, svg in pictures().items():
        (ROOT / "docs" / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
