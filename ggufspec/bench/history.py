"""Measured target speeds and GPU driver overheads, saved for later plans; the decoder saves acceptance itself."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from ggufspec.api.resolve import Resolved
from ggufspec.bench.summary import speed
from ggufspec.bench.trial import Result, Spec
from ggufspec.errors import GgufspecError
from ggufspec.files.cache import cache_folder
from ggufspec.hardware.gpus import survey
from ggufspec.hardware.host import physical_cores
from ggufspec.models.headers import read_headers
from ggufspec.planning import history, rehearsed
from ggufspec.schema.plan import PlannedOption
from ggufspec.schema.text import of_memory

_ENOUGH_TOKENS = 32  # minimum over all trials for a speed
_SPILLED, _SPILLED_BYTES = 0.05, 256 * 2**20  # share of the plan, and bytes: an ended program may explain less
_FAR_SLOWER = 2.0  # times the planned seconds: no plan is so wrong, and the link is ten times slower than VRAM
_ROOM = 1.1
_SHORT_CONTEXT = 2048


def learn(
    resolved: Resolved, spec: Spec, results: Mapping[str, Sequence[Result]], *, is_quiet: bool
) -> tuple[str, ...]:
    """Save a bench's results by mode for later plans, speeds only from a quiet machine; return notes for the user."""
    record_overhead(resolved, results["speculative"])
    if is_quiet:
        record_speed(resolved, spec, results["target_only"])
    return spilled(resolved, "speculative", results["speculative"])


def record_overhead(resolved: Resolved, results: Sequence[Result]) -> None:
    """Save the VRAM used beyond the plan if there is a single GPU; nothing if the driver reports no more."""
    option = resolved.plan.options["speculative"] if resolved.plan else None
    if option is None or option.draft is None or not results or len(resolved.cards) != 1 or len(survey().cards) > 1:
        return
    assert resolved.plan is not None
    name, result = resolved.cards[0], results[0]
    card = next(device.description for device in resolved.plan.devices if device.name == name)
    known = sum(_planned_bytes(option, resolved.cards).values())
    if _ran_as_planned(option, result) and result.vram_bytes > known:
        history.record_overhead(cache_folder(), card, result.vram_bytes - known)


def spilled(resolved: Resolved, name: str, results: Sequence[Result]) -> tuple[str, ...]:
    """Return a note if a driver seems to keep part of the VRAM allocations in host memory, as Windows' and AMD's
    drivers do when VRAM is full: the GPUs' use rose by far less than planned, and tokens take at least twice as long.

    ``name`` is the plan's option, ``results`` its results, long prompts included.
    """
    plan = resolved.plan
    option = plan.options[name] if plan else None
    if plan is None or option is None or not all(_ran_as_planned(option, one) and one.vram_bytes for one in results):
        return ()
    known = _planned_bytes(option, resolved.cards)
    missing = sum(known.values()) - max((one.vram_bytes for one in results), default=math.inf)
    slow = all(speed(one) < option.tokens_per_s / _FAR_SLOWER for one in results)
    if not slow or missing < max(_SPILLED_BYTES, _SPILLED * sum(known.values())):
        return ()
    ctx_size, room = plan.settings["ctx_size"], known["kv"] - _ROOM * missing
    fits = int(ctx_size * room / known["kv"]) // 256 * 256 if known["kv"] else 0
    kept = max(one.free_bytes - one.budget_bytes for one in plan.devices if one.name in resolved.cards)
    less = f"-c {fits}" if fits >= _SHORT_CONTEXT else f"--headroom {math.ceil((kept + _ROOM * missing) / 2**20)}MiB"
    where = f"{of_memory(missing)} of {of_memory(sum(known.values()))} seem not to be on {' and '.join(resolved.cards)}"
    return (f"{where}, where a driver moves them to the host and every token takes far longer: {less} fits",)


def _planned_bytes(option: PlannedOption, cards: Sequence[str]) -> dict[str, int]:
    """Return llama.cpp's planned bytes on the GPUs, by purpose."""
    models = [model.bytes.get(card, {}) for model in (option.target, option.draft) if model for card in cards]
    return {kind: sum(one.get(kind, 0) for one in models) for kind in ("weights", "kv", "compute", "overhead")}


def _ran_as_planned(option: PlannedOption, result: Result) -> bool:
    ran = [model.gpu_layers for model in (result.target, result.draft) if model is not None]
    return ran == [model.gpu_layers for model in (option.target, option.draft) if model is not None]


def record_speed(resolved: Resolved, spec: Spec, results: Sequence[Result]) -> None:
    """Save the target-only speed at its placement, unless the run was short.

    Nothing is saved if GPU layers were given without a plan, because only a plan has the GPUs' descriptions.
    """
    results = [one for one in results if speed(one)]  # a disturbed pass may have no segment that counts
    answers = [answer.statistics for result in results for answer in result.answers if answer.statistics.tokens]
    tokens = sum(one.tokens for one in answers)
    if tokens < _ENOUGH_TOKENS or (resolved.cards and resolved.plan is None):
        return
    cards = [one for one in resolved.plan.devices if one.name in resolved.cards] if resolved.plan else []
    options, placement = resolved.alone, resolved.alone.target
    with contextlib.suppress(GgufspecError):
        header = read_headers([spec.target])[0].header
        point = rehearsed.Point(
            placement=replace(placement, gpu_layers=placement.offloaded(header.blocks)),
            threads=options.threads or physical_cores(),
            depth=round(median(one.prompt_tokens + one.tokens / 2 for one in answers)),
            cache_type_k=options.cache_type_k,
            cache_type_v=options.cache_type_v,
            batch_s={1: median(1 / speed(result) for result in results)},
            machine=rehearsed.identity(cards),
            op_offload_min_batch=options.op_offload_min_batch,
        )
        rehearsed.record(cache_folder(), header, point)
