"""What later plans use of measured runs: a pair's acceptance, and the memory that a card's driver takes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from importlib.metadata import version

from ggufspec.api import Resolved
from ggufspec.bench.summary import by_position
from ggufspec.bench.trial import Result
from ggufspec.cache import cache_folder
from ggufspec.errors import GgufspecError
from ggufspec.hardware.gpus import survey
from ggufspec.models.profile import PairSpec
from ggufspec.models.source import read_headers
from ggufspec.planning import machine_profile
from ggufspec.planning.history import record_acceptance
from ggufspec.settings import is_lossy


def record_results(pair: PairSpec, resolved: Resolved, results: Sequence[Result]) -> None:
    """Write the acceptance of speculative runs, and a driver's overhead, to the user's cache.

    Args:
        pair: what was measured.
        resolved: where it ran.
        results: what was measured.
    """
    every = [answer.statistics for result in results for answer in result.answers]
    if not every or not pair.draft or not resolved.pair.needs_draft or is_lossy(resolved.pair.accept):
        return  # the lookup's acceptance says nothing about the pair
    accepted = by_position(s.accepted_by_position for s in every)
    drafted = by_position(s.drafted_by_position for s in every)
    with contextlib.suppress(GgufspecError):  # a cache that cannot be written is skipped
        target, draft = (known.header.fingerprint for known in read_headers([pair.target, pair.draft]))
        record_acceptance(cache_folder(), target, draft, accepted, drafted)
    _record_overhead(resolved, results[0])


def _record_overhead(resolved: Resolved, result: Result) -> None:

    seen, option = survey(), resolved.plan.options["speculative"] if resolved.plan else None
    if resolved.plan is None or option is None or option.draft is None or result.draft is None:
        return
    if len(seen.cards) != 1 or len(resolved.cards) != 1:
        return  # the overhead cannot be attributed to a card
    ran_as_planned = (option.target.gpu_layers, option.draft.gpu_layers) == (
        result.target.gpu_layers,
        result.draft.gpu_layers,
    )
    known = sum(sum(model.bytes[resolved.cards[0]].values()) for model in (option.target, option.draft))
    if ran_as_planned and result.vram_bytes > known:
        machine_profile.record_overhead(
            cache_folder(),
            seen.cards[0].name,
            seen.driver or "",
            version("llama-cpp-python"),
            result.vram_bytes - known,
        )
