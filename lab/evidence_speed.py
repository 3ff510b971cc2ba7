"""Evidence, parts c and g: T(n), and predicted speeds compared with those that the other parts measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ggufspec import child
from ggufspec.bench import batch_timing
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.planning import machine_profile
from ggufspec.planning.speed import MachineProfile, pass_s
from ggufspec.schema import codec
from lab.evidence_documents import (
    BytesFound,
    CalibrationFound,
    Part,
    PlacedModel,
    SpeedFound,
    WaysFound,
    WidthsFound,
)
from lab.evidence_lab import Lab, Task
from lab.evidence_models import File
from lab.evidence_ways import TARGET_ONLY
from lab.expansion import Model

_CALIBRATION_S = 10.0  # per device, for loading and uncounted work


# ---- part c ----------------------------------------------------------------------------------------------------------


def width_tasks(lab: Lab) -> Iterator[Task]:
    """Yield tasks for T(n) by file type, wholly and half offloaded."""
    scale = lab.scale
    shape = scale.offloaded[-1].target.model.shape
    for number, kind in enumerate(scale.types):
        file = File(Model(shape, kind))
        for share, words in ((1.0, "all layers"), (0.5, "half of the layers")):
            yield _width_task(lab, file, share, f"{kind}, {words}", scale.widths, min(number + (share < 1), 1))
    if scale.wide:
        first = File(Model(shape, scale.types[0]))
        yield _width_task(lab, first, 1.0, f"{scale.types[0]}, all layers, further widths", (1, *scale.wide), 2)


def _width_task(lab: Lab, file: File, share: float, name: str, widths: tuple[int, ...], rank: int) -> Task:
    scale = lab.scale

    def run(lab: Lab) -> WidthsFound:
        known = lab.shelf.known(file)
        placement = Placement(round(share * known.header.layers))
        context = ContextOptions(
            ctx_size=max(scale.ctx_size, scale.depth + max(widths)), max_outputs=max(widths), threads=lab.threads
        )
        lab.check_room(file, placement, context)
        part = batch_timing.ModelToTime(lab.shelf.path(file), placement, context, widths)
        spec = batch_timing.BatchTimingJob((part,), scale.depth, scale.rounds, rpc=lab.site.endpoints())

        def report(event: child.Event) -> None:
            lab.say(f"{name}: {event['event']} {event.get('number', '')}".strip())

        with lab.watch():
            result = batch_timing.time_batches(spec, on_event=report, verbose=lab.verbose)
        timed = result.parts[0]
        one_s = median(timed.seconds[1])
        return WidthsFound(
            model=lab.placed(file, placement),
            file_type=file.model.type,
            ctx_size=context.ctx_size,
            depth=timed.depth,
            threads=lab.threads,
            load_s=timed.load_s,
            prompt_tokens_per_s=timed.prompt_tokens_per_s,
            seconds={width: tuple(samples) for width, samples in timed.seconds.items()},
            relative={width: median(samples) / one_s for width, samples in timed.seconds.items()},
        )

    rounds = 2 + 3 * scale.rounds  # a short batch is timed three times
    batches_s = rounds * lab.rates.token_s(file, share) * sum(1 + 0.2 * width for width in widths)
    return Task("c", name, rank, lab.rates.load_s(file) + batches_s, run, (file,), (share, widths))


# ---- part g ----------------------------------------------------------------------------------------------------------


def speed_tasks(lab: Lab) -> Iterator[Task]:
    """Yield the calibration, which plans use too; :func:`predictions` compares its predictions with the other parts."""
    options = dict(lab.scale.calibration)

    def run(lab: Lab) -> CalibrationFound:
        spec = machine_profile.MachineProfileJob(lab.threads, lab.site.endpoints(), **options)  # type: ignore[arg-type]

        def report(event: child.Event) -> None:
            lab.say(f"{event['type']} on {event['device']}")

        with lab.watch():
            speed = machine_profile.measure_machine(lab.cache, spec, on_event=report, verbose=lab.verbose)
        return CalibrationFound(codec.dump(speed))

    asked = machine_profile.MachineProfileJob(lab.threads, **options)  # type: ignore[arg-type]
    seconds = 2 * (asked.device_s + min(_CALIBRATION_S, 4 * asked.device_s))
    yield Task("g", "calibration", -1, seconds, run, (), tuple(options.items()))


@dataclass(frozen=True, slots=True)
class _Point:
    """A measured speed: target-only, or a pair with ``drafted`` tokens per round."""

    part: str
    what: str
    models: tuple[PlacedModel, ...]
    context: tuple[int, str, str]  # tokens of context, types of the cache
    depth: int
    measured: float
    drafted: int = 0
    tokens_per_round: float = 1.0


def predictions(
    parts: Iterable[Part[Any]], speed: MachineProfile, card: str, header: Callable[[str], Any]
) -> list[SpeedFound]:
    """Predict the speed of every placement that was run, with the planner's model.

    Args:
        parts: the documents of the other parts.
        speed: this machine, calibrated.
        card: the device's name.
        header: returns the header of a file by its name; None if it no longer exists.
    """
    found = []
    for point in (point for part in parts for point in _points(part)):
        headers = [header(model.file) for model in point.models]
        if None in headers:
            continue

        def seconds(index: int, tokens: int, point: _Point = point, headers: Sequence[Any] = headers) -> float:
            model = point.models[index]
            ctx_size, cache_type_k, cache_type_v = point.context if index == 0 else (point.context[0], "f16", "f16")
            context = ContextOptions(ctx_size, tokens, 1, cache_type_k=cache_type_k, cache_type_v=cache_type_v)
            placement = Placement(model.gpu_layers, (), model.n_cpu_moe)
            return pass_s(headers[index], placement, speed, (card,), tokens=tokens, depth=point.depth, context=context)

        round_s = seconds(0, point.drafted + 1)
        if len(point.models) > 1:
            round_s += point.drafted * seconds(1, 1)
        predicted = point.tokens_per_round / round_s
        found.append(SpeedFound(point.part, point.what, point.models, point.measured, predicted))
    return found


def _points(part: Part[Any]) -> Iterator[_Point]:
    for row in part.rows:
        found = row.found
        if row.state != "done" or found is None:
            continue
        if isinstance(found, BytesFound):
            context = (found.ctx_size, found.cache_type_k, found.cache_type_v)
            for number, (model, rate) in enumerate(zip(found.models, found.tokens_per_s, strict=True)):
                what = f"{row.name}: {'draft' if number else 'target'}"
                yield _Point(part.part, what, (model,), context, found.depth, rate)
        elif isinstance(found, WidthsFound):
            rate = 1 / median(found.seconds[1])
            yield _Point(part.part, row.name, (found.model,), (found.ctx_size, "f16", "f16"), found.depth, rate)
        elif isinstance(found, WaysFound) and found.repetition == 0:
            yield from _points_of_ways(part.part, found)


def _points_of_ways(part: str, found: WaysFound) -> Iterator[_Point]:
    """Yield target-only runs, and runs of fixed draft length; the others change it as they go."""
    context = (found.ctx_size, "f16", "f16")
    for name, result in found.results.items():
        if not result.drafted and name.startswith(TARGET_ONLY):
            yield _Point(part, f"{found.pair}: {name}", (found.target,), context, found.depth, result.tokens_per_s)
        elif found.draft and result.rounds and not result.plain_rounds and name.endswith(" drafted"):
            drafted = round(result.drafted / result.rounds)
            per_round = result.tokens / result.rounds
            yield _Point(
                part,
                f"{found.pair}: {name}",
                (found.target, found.draft),
                context,
                found.depth,
                result.tokens_per_s,
                drafted,
                per_round,
            )
