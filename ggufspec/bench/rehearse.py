"""Stages of a plan's rehearsal, and the speed to expect of the pair from their timings. Measuring is done elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ggufspec.bench import batch_timing
from ggufspec.bench.statistics import spread
from ggufspec.bench.summary import machine
from ggufspec.errors import ModelError
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.planning.memory import HOST, Bytes, DryRun
from ggufspec.planning.plan import ModelRequest, Plan, PlannedRun
from ggufspec.planning.speed import accepted_share, best_length, break_even_acceptance, interpolate
from ggufspec.schema.rehearse import Expected, RehearsedModel, RehearseDocument, RehearsedRun
from ggufspec.schema.text import counted, number, of_memory

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
_WIDTHS = (*range(1, 9), 12, 16)
_FEWEST_BITS = 1.6  # bits per weight of the smallest published quantisation
_PROCESS_BYTES = 256 << 20  # Python and llama.cpp themselves


@dataclass(frozen=True, slots=True)
class Stage:
    """Models to load together: the target and, in the stage ``pair``, the draft; ``used`` is their memory by device."""

    name: str
    target: Placement
    context: ContextOptions
    draft: Placement | None
    used: dict[str, Bytes]


def stages(plan: Plan, dry_run: DryRun) -> list[Stage]:
    """Return what to rehearse: the pair as planned, target-only at its best, with half its GPU layers, and with none.

    A stage with another's placement is left out; without a GPU there is only one.
    """
    alone, pair, found = plan.target_only, plan.pair, list[Stage]()
    if pair is not None:
        found.append(Stage("pair", pair.target, pair.context, pair.draft, _used(pair)))
    if pair is None or pair.target != alone.target:
        found.append(Stage("target_only", alone.target, alone.context, None, _used(alone)))
    if plan.machine.cards:
        most = alone.target.offloaded(plan.request.target.header.blocks)
        had = {stage.target.offloaded(plan.request.target.header.blocks) for stage in found}
        for name, count in (("half", most // 2), ("none", 0)):
            if count not in had:
                had.add(count)
                placement = replace(alone.target, gpu_layers=count, split=alone.target.split if count else ())
                (answer,) = dry_run([plan.request.target_only.at(placement)])
                if not isinstance(answer, str):
                    found.append(Stage(name, placement, alone.context, None, answer))
    return found


def _used(option: PlannedRun) -> dict[str, Bytes]:
    return {name: option.used(name) for name in {*option.target_bytes, *option.draft_bytes}}


def lacking(plan: Plan, stage: Stage) -> ModelError | None:
    """Return an error with what would fit if the stage does not fit in RAM, else None."""
    need, free = stage.used.get(HOST, Bytes()), plan.machine.memory_bytes
    short = need.total + _PROCESS_BYTES - free
    if short <= 0:
        return None
    header, draft = plan.request.target.header, plan.request.draft if stage.draft is not None else None
    what = f"{header.name} with {draft.header.name}" if draft else header.name
    bits = 8 * header.weight_bytes() / sum(math.prod(tensor.shape) for tensor in header.tensors)
    fitting = bits * (1 - short / header.weight_bytes())
    message = (
        f"{what} needs {of_memory(need.total)} of host memory with "
        f"{stage.target.offloaded(header.blocks)}/{header.layers} target layers on a card "
        f"(weights {of_memory(need.weights)}, KV {of_memory(need.kv)}, compute {of_memory(need.compute)}), "
        f"and {of_memory(max(free, 0))} are free: {of_memory(short)} too few. "
        "More layers on cards, or smaller files, would help"
    )
    ways = [f"{of_memory(short)} more on cards (--rpc HOST:PORT adds another machine's)"]
    if fitting >= _FEWEST_BITS:
        ways.append(f"a target file of at most {fitting:.1f} bits a weight instead of {bits:.1f}")
    if draft and plan.target_only.used(HOST).total + _PROCESS_BYTES <= free:
        ways.append("the target without a draft")
    if need.kv > short:
        ways.append("a smaller -c, or -ctk q8_0 -ctv q8_0")
    return ModelError(message, "what would fit: " + "; ".join(ways))


def spec(
    plan: Plan, stage: Stage, target: Path, draft: Path | None, *, depth: int, rounds: int, rpc: Sequence[str]
) -> batch_timing.Spec:
    """Return a stage's job: the main stage's target is timed at all batch sizes, the others' at one token."""
    widest = min(stage.context.width, stage.context.ctx_size // 2)  # leaves room for tokens before the batch
    is_main = stage.name == "pair" or (plan.pair is None and stage.name == "target_only")
    widths = tuple(n for n in sorted({*_WIDTHS, widest}) if n <= widest) if is_main else (1,)
    subject, request = plan.request.draft, plan.request.target
    beside = subject if stage.draft is not None and draft is not None else None
    placement = replace(stage.target, mtp=beside is not None and request.mtp)
    parts = [batch_timing.Part(target, placement, stage.context, widths)]
    if beside is not None and draft is not None and stage.draft is not None:
        is_head = beside.as_read is not None
        placement = replace(stage.draft, mtp=beside.mtp)
        parts.append(batch_timing.Part(draft, placement, beside.context, (1, 2), is_head))
    return batch_timing.Spec(tuple(parts), depth, rounds, rpc=tuple(rpc))


# ---- results --------------------------------------------------------------------------------------------------------


def run_of(stage: Stage, result: batch_timing.Result, plan: Plan) -> RehearsedRun:
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


def _model(timed: batch_timing.Timed, subject: ModelRequest) -> RehearsedModel:
    return RehearsedModel(
        file=subject.header.name,
        layers=timed.layers,
        gpu_layers=timed.gpu_layers,
        tokens_per_s=spread([1 / seconds for seconds in timed.seconds[1]]),
        batch_s={width: spread(samples) for width, samples in sorted(timed.seconds.items())},
        prompt_tokens_per_s=timed.prompt_tokens_per_s,
        depth=timed.depth,
        load_s=timed.load_s,
        bytes=timed.bytes,
    )


def document(
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
    alone = [run.target for run in runs if run.target is not None and run.name != "pair"]
    best = max([main, *alone], key=lambda model: model.tokens_per_s.median)
    rival = best.tokens_per_s
    rows: tuple[Expected, ...] = ()
    even, share, length = None, 0.0, 0
    if draft is not None:
        latencies = {width: seconds.median for width, seconds in main.batch_s.items()}
        draft_s, most = draft.batch_s[1].median, min(plan.request.draft_max, max(latencies) - 1)
        rows = tuple(expectations(latencies, draft_s, rival.median, most))
        even = break_even_acceptance(lambda n: interpolate(latencies, n), draft_s, rival.median, most)
        if even is not None:
            length = best_length(lambda n: interpolate(latencies, n), draft_s, even, most, least=1).length
            share = accepted_share(even, length)
    return RehearseDocument(
        pair=pair,
        machine=machine(),
        settings=settings,
        dummy_weights=dummy_weights,
        runs=tuple(runs),
        rival_tokens_per_s=rival,
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
    return (f"{counted(found, 'sample')} left out: other programs used up to {most:.1f} CPUs meanwhile",)


def expectations(latencies: dict[int, float], draft_s: float, rival: float, most: int) -> Iterator[Expected]:
    """Yield the pair's expected speed at each of ``ACCEPTANCES``, at the best draft length of at most ``most``.

    ``latencies`` are a target batch's seconds by batch size, ``draft_s`` those of a drafted token, ``rival`` the
    target-only tokens/s.
    """
    for acceptance in ACCEPTANCES:
        best = best_length(lambda n: interpolate(latencies, n), draft_s, acceptance, most, least=1)
        yield Expected(acceptance, best.length, best.tokens_per_s, best.tokens_per_s / rival)


def _why(best: RehearsedModel, rows: Sequence[Expected], share: float, length: int) -> str:
    """Return the result in words: the draft pays above a ``share`` accepted at draft ``length``; 0 means never."""
    rival = best.tokens_per_s.median
    layers = f"{best.gpu_layers}/{best.layers + 1}"
    text = f"Target-only at {layers} layers reaches {number(rival)} tokens/s here"
    if not rows:
        return f"{text}."
    if not length:
        return f"{text}; no acceptance rate would make this draft worth it."
    return f"{text}; the draft pays above {share:.0%} accepted at draft length {length}."
