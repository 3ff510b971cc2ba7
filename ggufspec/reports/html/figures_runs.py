"""Figures of a bench, a plan and a sweep. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ggufspec.reports.html.figures import (
    HOST,
    Figure,
    Mark,
    acceptance,
    interval,
    layers,
    matching,
    memory,
    scale_of,
    swept,
)
from ggufspec.reports.table import words
from ggufspec.reports.values import accepted, mode_name, over, times, with_spread
from ggufspec.reports.values import layers as layers_of
from ggufspec.schema.base import Run, SpeculativeRun
from ggufspec.schema.bench import BenchDocument
from ggufspec.schema.plan import PlanDocument, PlannedModel
from ggufspec.schema.sweep import SweepDocument
from ggufspec.settings import OPTIONS


def of_bench(document: BenchDocument, plans: Sequence[PlanDocument] = ()) -> Iterator[Figure]:
    """Figures of one bench. Draft-only is left out: its speed says nothing of the target's."""
    runs = {mode_name(mode): run for mode, run in document.runs.items() if run is not None and mode != "draft_only"}
    series = tuple(runs)
    marks = [_run_mark(mode, run, mode) for mode, run in runs.items()]
    if marks:
        yield Figure(
            "speed",
            "Tokens/s",
            "Target-only at the best placement of this machine, and with the draft. The lines are 95 % intervals.",
            "bars",
            "",
            "tokens/s",
            tuple(marks),
            ("Run", "GPU layers", "Tokens/s"),
            tuple((mode, layers_of(run), with_spread(run.tokens_per_s)) for mode, run in runs.items()),
            series,
        )
    by_position = [(mode, mode, "", run) for mode, run in runs.items() if isinstance(run, SpeculativeRun)]
    figure = acceptance(by_position, series)
    if figure is not None:
        yield figure
    lines = [line for plan in matching(document.pair, plans) for line in swept(plan, "speculative")]
    points = [_run_mark(mode, run, run.gpu_layers) for mode, run in runs.items()]
    if lines or len({mark.x for mark in points}) > 1:
        rows = [(mode, layers_of(run), with_spread(run.tokens_per_s)) for mode, run in runs.items()]
        figure = layers(points, lines, rows, series, "Run")
        if figure is not None:
            yield figure


def _run_mark(name: str, run: Run, x: float | str) -> Mark:
    low, high = interval(run.tokens_per_s)
    description = f"{name}: {with_spread(run.tokens_per_s)} tokens/s, {layers_of(run)} layers on the GPU"
    return Mark(name, x, run.tokens_per_s.median, description, low, high)


def of_plan(document: PlanDocument) -> Iterator[Figure]:
    """What fits where, and tokens/s over the layers."""
    options = [(name.replace("_", "-"), option) for name, option in document.options.items() if option is not None]
    cards = any(device.name != HOST for device in document.devices)
    bars, limits = [], []
    for device in document.devices:
        if (device.name != HOST) != cards:
            continue
        limits.append(device.budget_bytes)
        for name, option in options:
            parts = _parts("target", option.target, device.name) | _parts("draft", option.draft, device.name)
            parts["overhead"] = device.overhead_bytes + sum(
                model.bytes.get(device.name, {}).get("overhead", 0) for model in (option.target, option.draft) if model
            )
            bars.append((name, device.name, parts))
    figure = memory("VRAM" if cards else "Memory", bars, limits if len(limits) == 1 else (), "the budget")
    if figure is not None:
        yield figure
    lines = swept(document, "speculative")
    figure = layers([], lines, [], ("target-only", "speculative"), "Option")
    if figure is not None:
        yield figure


def _parts(role: str, model: PlannedModel | None, device: str) -> dict[str, int]:
    used = model.bytes.get(device, {}) if model else {}
    return {f"{role} {kind}": used.get(kind, 0) for kind in ("weights", "kv", "compute")}


def option_name(option: str) -> str:
    """An option's name for people."""
    return OPTIONS[option].label if option in OPTIONS else option.replace("_", "-")


def of_sweep(document: SweepDocument, plans: Sequence[PlanDocument] = ()) -> Iterator[Figure]:
    """Tokens/s over the option's values; acceptance by position for each of them."""
    option, word = document.option, option_name(document.option)
    names = ("target-only", "speculative")
    numbers = all(_number(point.value) is not None for point in document.points)
    marks, rows, by_position = [], [], []
    for point in document.points:
        x: float | str = _number(point.value) if numbers else point.value  # type: ignore[assignment]
        cells = []
        for name, run in zip(names, (point.target_only, point.speculative), strict=True):
            if run is not None:
                low, high = interval(run.tokens_per_s)
                description = f"{word} {point.value}, {name}: {with_spread(run.tokens_per_s)} tokens/s"
                if name == "speculative" and point.speedup is not None:
                    description += f", {over(point.speedup, 'target-only')}"
                marks.append(Mark(name, x, run.tokens_per_s.median, description, low, high))
            cells.append(with_spread(run.tokens_per_s) if run is not None else "")
        if isinstance(point.speculative, SpeculativeRun):
            by_position.append((f"{word} {point.value}", f"{word} {point.value}", "", point.speculative))
        why = point.failure.error if point.failure else ""
        if why:
            marks.append(Mark("failed", x, 0.0, f"{word} {point.value}: {why}", kind="failed"))
        rows.append((point.value, *cells, times(point.speedup), accepted(point.speculative), why))
    lines = []
    if option == "gpu_layers" and numbers:
        for plan in matching(document.pair, plans):
            lines += swept(plan, "speculative")
    title = {"draft_max": "Draft length against tokens/s", "gpu_layers": "Tokens/s over GPU layers"}
    if marks:
        yield Figure(
            {"draft_max": "length", "gpu_layers": "layers"}.get(option, "option"),
            title.get(option, f"Tokens/s over {word}"),
            "Measured in turns, one value after another, with 95 % intervals."
            + (" The thin lines are what the plan predicts." if lines else "")
            + (" A cross is a value that failed." if any(mark.kind == "failed" for mark in marks) else ""),
            "lines",
            "drafted tokens a round, at most" if option == "draft_max" else word,
            "tokens/s",
            (*lines, *marks),
            (word[0].upper() + word[1:], "Target-only", "Speculative", "Speedup", "Accepted", words("Failure")),
            tuple(rows),
            names,
            whole=numbers,
            scale=scale_of([float(point.value) for point in document.points]) if numbers else "linear",
        )
    figure = acceptance(by_position[:8], tuple(series for _, series, _, _ in by_position[:8]))
    if figure is not None:
        yield figure


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
