"""Stages of a plan's rehearsal, and the pair's expected speed, computed from timings that other modules measure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ggufspec.bench import batch_timing
from ggufspec.bench.statistics import spread
from ggufspec.bench.summary import machine_and_versions
from ggufspec.errors import ModelError
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.planning.memory import HOST, DeviceBytes, DryRun
from ggufspec.planning.plan import ModelRequest, Plan, PlannedRun
from ggufspec.planning.speed import accepted_share, best_length, break_even_acceptance, interpolate
from ggufspec.schema.rehearse import ExpectedSpeed, RehearsedModel, RehearseDocument, RehearsedRun
from ggufspec.schema.text import counted, number, of_memory

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
_BATCH_SIZES = (*range(1, 9), 12, 16)
_FEWEST_BITS = 1.6  # bits per weight of the smallest published quantisation
_PROCESS_BYTES = 256 << 20  # memory that Python and llama.cpp themselves take


@dataclass(frozen=True, slots=True)
class RehearsalStage:
    """Models to load together: the target and, in the stage ``pair``, the draft; ``used`` is their memory by device."""

    name: str
    target: Placement
    context: ContextOptions
    draft: Placement | None
    used: dict[str, DeviceBytes]


def stages(plan: Plan, dry_run: DryRun) -> list[RehearsalStage]:
    """Return stages: the pair as planned; target-only at its best placement, with half its GPU layers and with none.

    A stage with the same placement as an earlier one is left out; without a GPU there is only one stage.
    """
    target_only, pair, found = plan.target_only, plan.pair, list[RehearsalStage]()
    if pair is not None:
        found.append(RehearsalStage("pair", pair.target, pair.context, pair.draft, _used(pair)))
    if pair is None or pair.target != target_only.target:
        found.append(RehearsalStage("target_only", target_only.target, target_only.context, None, _used(target_only)))
    if plan.machine.cards:
        most = target_only.target.offloaded(plan.request.target.header.blocks)
        had = {stage.target.offloaded(plan.request.target.header.blocks) for stage in found}
        for name, count in (("half", most // 2), ("none", 0)):
            if count not in had:
                had.add(count)
                placement = replace(
                    target_only.target, gpu_layers=count, split=target_only.target.split if count else ()
                )
                (answer,) = dry_run([plan.request.target_only.at(placement)])
                if not isinstance(answer, str):
                    found.append(RehearsalStage(name, placement, target_only.context, None, answer))
    return found


def _used(option: PlannedRun) -> dict[str, DeviceBytes]:
    return {name: option.used(name) for name in {*option.target_bytes, *option.draft_bytes}}


def lacking(plan: Plan, stage: RehearsalStage) -> ModelError | None:
    """Return an error that says what would fit if the stage does not fit in RAM; otherwise None."""
    need, free = stage.used.get(HOST, DeviceBytes()), plan.machine.memory_bytes
    short = need.total + _PROCESS_BYTES - free
    if short <= 0:
        return None
    header, draft = plan.request.target.header, plan.request.draft if stage.draft is not None else None
    what = f"{header.name} with {draft.header.name}" if draft else header.name
    bits = 8 * header.weight_bytes() / sum(math.prod(tensor.shape) for tensor in header.tensors)
    fitting = bits * (1 - short / header.weight_bytes())
    message = (
        f"{what} needs {of_memory(need.total)} of host memory with "
        f"{stage.target.offloaded(header.blocks)}/{header.layers} target layers on GPUs "
        f"(weights {of_memory(need.weights)}, KV {of_memory(need.kv)}, compute {of_memory(need.compute)}), "
        f"but only {of_memory(max(free, 0))} are free, which is {of_memory(short)} too little. "
        "More layers on GPUs or smaller files would help"
    )
    ways = [f"{of_memory(short)} more on GPUs (--rpc HOST:PORT adds another machine's)"]
    if fitting >= _FEWEST_BITS:
        ways.append(f"a target file of at most {fitting:.1f} bits per weight instead of {bits:.1f}")
    if draft and plan.target_only.used(HOST).total + _PROCESS_BYTES <= free:
        ways.append("the target without a draft")
    if need.kv > short:
        ways.append("a smaller -c, or -ctk q8_0 -ctv q8_0")
    return ModelError(message, "what would fit: " + "; ".join(ways))


def spec(
    plan: Plan, stage: RehearsalStage, target: Path, draft: Path | None, *, depth: int, rounds: int, rpc: Sequence[str]
) -> batch_timing.BatchTimingJob:
    """Return a stage's job: the main stage times its target at all batch sizes, other stages at size 1 only."""
    largest = min(stage.context.max_outputs, stage.context.ctx_size // 2)  # leaves room for cached tokens
    is_main = stage.name == "pair" or (plan.pair is None and stage.name == "target_only")
    batch_sizes = tuple(n for n in sorted({*_BATCH_SIZES, largest}) if n <= largest) if is_main else (1,)
    subject, request = plan.request.draft, plan.request.target
    draft_request = subject if stage.draft is not None and draft is not None else None
    placement = replace(stage.target, mtp=draft_request is not None and request.mtp)
    parts = [batch_timing.ModelToTime(target, placement, stage.context, batch_sizes)]
    if draft_request is not None and draft is not None and stage.draft is not None:
        is_head = draft_request.as_read is not None
        placement = replace(stage.draft, mtp=draft_request.mtp)
        parts.append(batch_timing.ModelToTime(draft, placement, draft_request.context, (1, 2), is_head))
    return batch_timing.BatchTimingJob(tuple(parts), depth, rounds, rpc=tuple(rpc))


# ---- results --------------------------------------------------------------------------------------------------------


def run_of(stage: RehearsalStage, result: batch_timing.BatchTimingResult, plan: Plan) -> RehearsedRun:
    subjects: tuple[ModelRequest | None, ...] = (plan.request.target, plan.request.draft)
    models = [_model(timed, subject) for timed, subject in zip(result.parts, subjects, strict=False) if subject]
    return RehearsedRun(
        stage.name,
        models[0],
        models[1] if len(models) > 1 else None,
        result.ram_bytes,
        result.vram_bytes,
        disturbed=result.disturbed,
        others_cpus=result.others_cpus,
    )


def _model(timed: batch_timing.ModelTimings, subject: ModelRequest) -> RehearsedModel:
    return RehearsedModel(
        file=subject.header.name,
        layers=timed.layers,
        gpu_layers=timed.gpu_layers,
        tokens_per_s=spread([1 / seconds for seconds in timed.seconds[1]]),
        batch_s={batch_size: spread(samples) for batch_size, samples in sorted(timed.seconds.items())},
        prompt_tokens_per_s=timed.prompt_tokens_per_s,
        depth=timed.depth,
        load_s=timed.load_s,
        bytes=timed.bytes,
    )


def rehearse_document(
    plan: Plan,
    runs: Sequence[RehearsedRun],
    *,
    pair: dict[str, Any],
    settings: dict[str, Any],
    dummy_weights: dict[str, Any],
    notes: Sequence[str] = (),
) -> RehearseDocument:
    """Return the measurements with the expected speeds; the first of ``runs`` has the target's batch latencies."""
    main = runs[0].target
    assert main is not None
    draft = runs[0].draft
    target_only = [run.target for run in runs if run.target is not None and run.name != "pair"]
    best = max([main, *target_only], key=lambda model: model.tokens_per_s.median)
    best_target_only = best.tokens_per_s
    rows: tuple[ExpectedSpeed, ...] = ()
    even, share, length = None, 0.0, 0
    if draft is not None:
        latencies = {batch_size: seconds.median for batch_size, seconds in main.batch_s.items()}
        draft_s, most = draft.batch_s[1].median, min(plan.request.draft_max, max(latencies) - 1)
        rows = tuple(expectations(latencies, draft_s, best_target_only.median, most))
        even = break_even_acceptance(lambda n: interpolate(latencies, n), draft_s, best_target_only.median, most)
        if even is not None:
            length = best_length(lambda n: interpolate(latencies, n), draft_s, even, most, least=1).length
            share = accepted_share(even, length)
    return RehearseDocument(
        pair=pair,
        machine=machine_and_versions(),
        settings=settings,
        dummy_weights=dummy_weights,
        runs=tuple(runs),
        rival_tokens_per_s=best_target_only,
        expected=rows,
        break_even_acceptance=even,
        why=_why(best, rows, share, length),
        notes=(*notes, *_disturbed(runs)),
    )


def _disturbed(runs: Sequence[RehearsedRun]) -> tuple[str, ...]:
    found = sum(run.disturbed for run in runs)
    if not found:
        return ()
    most = max(run.others_cpus for run in runs)
    return (f"{counted(found, 'sample')} left out because other programs used up to {most:.1f} CPUs",)


def expectations(
    latencies: dict[int, float], draft_s: float, best_target_only: float, most: int
) -> Iterator[ExpectedSpeed]:
    """Yield the pair's expected speed at each of ``ACCEPTANCES``, with the best draft length up to ``most``.

    ``latencies`` are the target's seconds per batch by batch size, ``draft_s`` the seconds per drafted token, and
    ``best_target_only`` the target-only tokens/s.
    """
    for acceptance in ACCEPTANCES:
        best = best_length(lambda n: interpolate(latencies, n), draft_s, acceptance, most, least=1)
        yield ExpectedSpeed(acceptance, best.length, best.tokens_per_s, best.tokens_per_s / best_target_only)


def _why(best: RehearsedModel, rows: Sequence[ExpectedSpeed], share: float, length: int) -> str:
    """Return the result in words: the draft pays off above an acceptance of ``share``, or never if ``length`` is 0."""
    best_target_only = best.tokens_per_s.median
    layers = f"{best.gpu_layers}/{best.layers + 1}"
    text = f"Target-only at {layers} layers reaches {number(best_target_only)} tokens/s here"
    if not rows:
        return f"{text}."
    if not length:
        return f"{text}; no acceptance rate would make this draft worth it."
    return f"{text}; the draft pays above {share:.0%} acceptance at draft length {length}."
