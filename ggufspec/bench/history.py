"""What later plans use of measured runs: a target's speed, and what a card's driver takes.

What became of drafted tokens the decoder itself writes down.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from ggufspec.api.resolve import Resolved
from ggufspec.bench.summary import busy_notes, speed
from ggufspec.bench.trial import Result, Spec
from ggufspec.errors import GgufspecError
from ggufspec.files.cache import cache_folder
from ggufspec.hardware.gpus import survey
from ggufspec.hardware.host import physical_cores
from ggufspec.models.headers import read_headers
from ggufspec.planning import history, rehearsed

_ENOUGH_TOKENS = 32  # of all trials, for a speed


def record_overhead(resolved: Resolved, results: Sequence[Result]) -> None:
    """Write what the driver of the only card took beyond the plan's bytes; nothing if the driver counts nothing."""
    option = resolved.plan.options["speculative"] if resolved.plan else None
    if option is None or option.draft is None or not results or len(resolved.cards) != 1 or len(survey().cards) > 1:
        return
    assert resolved.plan is not None
    name, result, planned = resolved.cards[0], results[0], (option.target, option.draft)
    card = next(device.description for device in resolved.plan.devices if device.name == name)
    ran = [model.gpu_layers for model in (result.target, result.draft) if model is not None]
    known = sum(sum(model.bytes[name].values()) for model in planned)
    if ran == [model.gpu_layers for model in planned] and result.vram_bytes > known:
        history.record_overhead(cache_folder(), card, result.vram_bytes - known)


def record_speed(resolved: Resolved, spec: Spec, results: Sequence[Result]) -> None:
    """Write how fast target-only was at its placement; nothing of a short run, or next to other programs.

    A plan knows the cards by their descriptions: if layers were given and nothing was planned, nothing is written.
    """
    answers = [answer.statistics for result in results for answer in result.answers if answer.statistics.tokens]
    tokens = sum(one.tokens for one in answers)
    if tokens < _ENOUGH_TOKENS or busy_notes(results) or (resolved.cards and resolved.plan is None):
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
