"""Measured target speeds and GPU driver overheads, saved for later plans; the decoder saves acceptance itself."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from ggufspec.api.resolve import ResolvedOptions
from ggufspec.bench.summary import trial_speed
from ggufspec.bench.trial import TrialJob, TrialResult
from ggufspec.errors import GgufspecError
from ggufspec.files.cache import cache_folder
from ggufspec.hardware.gpus import survey
from ggufspec.hardware.host import physical_cores
from ggufspec.models.headers import read_headers
from ggufspec.planning import history, rehearsed
from ggufspec.schema.plan import PlannedOption
from ggufspec.schema.text import of_memory

_ENOUGH_TOKENS = 32  # minimum tokens over all trials for a speed to be saved
# Smallest VRAM shortfall to report, as a share of the plan and in bytes; other programs' exits may cause smaller ones
_SPILLED, _SPILLED_BYTES = 0.05, 256 * 2**20
_FAR_SLOWER = 2.0  # slowdown that indicates spilling: no plan is that far off, and a GPU's link is 10× slower than VRAM
_ROOM = 1.1
_SHORT_CONTEXT = 2048


def learn(
    resolved: ResolvedOptions, spec: TrialJob, results: Mapping[str, Sequence[TrialResult]], *, is_quiet: bool
) -> tuple[str, ...]:
    """Save a bench's results by mode for later plans, but speeds only if the machine was quiet; return notes."""
    record_run_overhead(resolved, results["speculative"])
    if is_quiet:
        record_speed(resolved, spec, results["target_only"])
    return spilled(resolved, "speculative", results["speculative"])


def record_run_overhead(resolved: ResolvedOptions, results: Sequence[TrialResult]) -> None:
    """Save the VRAM used beyond the plan if there is a single GPU and its driver reports more than planned."""
    option = resolved.plan.options["speculative"] if resolved.plan else None
    if option is None or option.draft is None or not results or len(resolved.cards) != 1 or len(survey().cards) > 1:
        return
    assert resolved.plan is not None
    name, result = resolved.cards[0], results[0]
    card = next(device.description for device in resolved.plan.devices if device.name == name)
    known = sum(_planned_bytes(option, resolved.cards).values())
    if _ran_as_planned(option, result) and result.vram_bytes > known:
        history.record_overhead(cache_folder(), card, result.vram_bytes - known)


def spilled(resolved: ResolvedOptions, name: str, results: Sequence[TrialResult]) -> tuple[str, ...]:
    """Return a note if a driver seems to keep part of the VRAM allocations in host memory, as Windows' and AMD's
    drivers do when VRAM is full. The signs: VRAM use is clearly below plan, and tokens take over twice as long.

    ``name`` is one of the plan's options; ``results`` are its trials, including answers to long prompts.
    """
    plan = resolved.plan
    option = plan.options[name] if plan else None
    if plan is None or option is None or not all(_ran_as_planned(option, one) and one.vram_bytes for one in results):
        return ()
    known = _planned_bytes(option, resolved.cards)
    missing = sum(known.values()) - max((one.vram_bytes for one in results), default=math.inf)
    slow = all(trial_speed(one) < option.tokens_per_s / _FAR_SLOWER for one in results)
    if not slow or missing < max(_SPILLED_BYTES, _SPILLED * sum(known.values())):
        return ()
    ctx_size, room = plan.settings["ctx_size"], known["kv"] - _ROOM * missing
    fits = int(ctx_size * room / known["kv"]) // 256 * 256 if known["kv"] else 0
    kept = max(one.free_bytes - one.budget_bytes for one in plan.devices if one.name in resolved.cards)
    less = f"-c {fits}" if fits >= _SHORT_CONTEXT else f"--headroom {math.ceil((kept + _ROOM * missing) / 2**20)}MiB"
    where = f"{of_memory(missing)} of {of_memory(sum(known.values()))} seem not to be on {' and '.join(resolved.cards)}"
    return (f"{where}: the driver may have moved them to host memory, which makes every token far slower; {less} fits",)


def _planned_bytes(option: PlannedOption, cards: Sequence[str]) -> dict[str, int]:
    """Return the bytes that llama.cpp is planned to use on the GPUs, by purpose."""
    models = [model.bytes.get(card, {}) for model in (option.target, option.draft) if model for card in cards]
    return {kind: sum(one.get(kind, 0) for one in models) for kind in ("weights", "kv", "compute", "overhead")}


def _ran_as_planned(option: PlannedOption, result: TrialResult) -> bool:
    ran = [model.gpu_layers for model in (result.target, result.draft) if model is not None]
    return ran == [model.gpu_layers for model in (option.target, option.draft) if model is not None]


def record_speed(resolved: ResolvedOptions, spec: TrialJob, results: Sequence[TrialResult]) -> None:
    """Save the target-only speed at its placement, unless the run was short.

    Nothing is saved if GPU layers were given without a plan, because only a plan has the GPUs' descriptions.
    """
    results = [one for one in results if trial_speed(one)]  # a disturbed pass may have no segment that counts
    answers = [answer.statistics for result in results for answer in result.answers if answer.statistics.tokens]
    tokens = sum(one.tokens for one in answers)
    if tokens < _ENOUGH_TOKENS or (resolved.cards and resolved.plan is None):
        return
    cards = [one for one in resolved.plan.devices if one.name in resolved.cards] if resolved.plan else []
    options, placement = resolved.target_only, resolved.target_only.target
    with contextlib.suppress(GgufspecError):
        header = read_headers([spec.target])[0].header
        point = rehearsed.RehearsedSpeed(
            placement=replace(placement, gpu_layers=placement.offloaded(header.blocks)),
            threads=options.threads or physical_cores(),
            depth=round(median(one.prompt_tokens + one.tokens / 2 for one in answers)),
            cache_type_k=options.cache_type_k,
            cache_type_v=options.cache_type_v,
            batch_s={1: median(1 / trial_speed(result) for result in results)},
            machine=rehearsed.devices_identity(cards),
            op_offload_min_batch=options.op_offload_min_batch,
        )
        rehearsed.record(cache_folder(), header, point)
