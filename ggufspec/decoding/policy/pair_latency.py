"""Latency models of a pair, and what depends on them: batch sizes, and the policy for an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

from ggufspec.decoding.options import STRICT_IMPOSSIBLE, DecoderOptions
from ggufspec.decoding.policy import latency_cache
from ggufspec.decoding.policy.adaptive import AdaptivePolicy, target_only_s
from ggufspec.decoding.policy.backoff import BackOff
from ggufspec.decoding.policy.base import DraftPolicy, Load
from ggufspec.decoding.policy.draft_latency import DraftLatency
from ggufspec.decoding.policy.experience import PairExperience
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.errors import ModelError
from ggufspec.llamacpp.head import Head
from ggufspec.llamacpp.model import Context

DRAFT_BUDGET_S = 0.2  # seconds to spend on timing a draft
REFRESH_WAIT_S, REFRESH_WAITS = (
    10.0,
    4,
)  # seconds before measuring may be retried, and the factor by which they grow each time


class PairLatency:
    """Latency models of a pair: measured at first use, refreshed while it runs, cached.

    Target-only and drafts of fixed length need no latency model outside strict mode. :meth:`configure` measures models,
    and :meth:`refresh` repeats disturbed measurements. ``quiet`` returns True if the machine is idle now.

    Attributes:
        notes: sentences for the user.
        refusal: why nothing is drafted although a drafter is available; else empty.
        draft_max: maximum draft length in a round.

    Raises:
        ModelError: strict mode is impossible with this pair.
    """

    def __init__(
        self,
        target: Context,
        draft: Context | Head | None,
        options: DecoderOptions,
        cache: Path | None,
        experience: PairExperience,
        quiet: Callable[[], bool] = lambda: True,
    ) -> None:
        self.notes: list[str] = []
        self.refusal = ""
        self.draft_max = options.draft_max
        self._contexts = target, draft
        self._experience, self._quiet = experience, quiet
        self._refresh_at, self._refresh_wait_s = 0.0, REFRESH_WAIT_S
        self._loaded, self._cache = options, cache
        self._options, self._back_off = options, BackOff()
        self._models: list[
            tuple[Context | Head, latency_cache.LatencyKey, LatencyModel, float]
        ] = []  # the last is the time budget in seconds
        self._target: LatencyModel | None = None
        self._draft: DraftLatency | None = None
        if options.strict and target.rewind_kind != "exact":
            raise ModelError(
                f"{STRICT_IMPOSSIBLE} with {target.model.path.name}: what is accepted of a draft is decoded "
                "again, in batches of other sizes (recurrent memory)",
                "run without --strict; divergences are then counted and explained",
            )

    def configure(self, options: DecoderOptions) -> None:
        """Switch to these options, and measure the latency models that they need and that are not yet measured.

        The KV caches stay as they are, with two exceptions: the first use of strict mode empties the target's cache,
        and a cache without room for the batches to time is emptied.
        """
        loaded, (target, draft) = self._loaded, self._contexts
        adaptive = options.drafts(with_draft=draft is not None) and options.draft_policy == "adaptive"
        in_use = adaptive or options.strict
        if in_use and self._target is None:
            context = loaded.context(with_draft=draft is not None)
            key = latency_cache.latency_key(target.model.path, loaded.target, context, strict=options.strict)
            self._target = self._measured(target, key, report=adaptive)
        if adaptive and options.needs_draft and draft is not None and self._draft is None:
            key = latency_cache.latency_key(draft.model.path, loaded.draft_placement, loaded.draft_context(), outputs=1)
            assert self._target is not None
            own = self._measured(draft, key, budget_s=DRAFT_BUDGET_S)
            self._draft = DraftLatency(own, self._target, same_device=self._same_device(draft))
        # Only the code above can fail.
        if options != self._options:
            self._options, self._back_off = options, BackOff()
        self._in_use, self.draft_max, self.refusal = in_use, options.draft_max, ""
        if target.rewind_kind in ("snapshots", "checkpoint"):
            self.draft_max = min(self.draft_max, loaded.context(with_draft=draft is not None).rewind)
        if in_use and self._target is not None:
            self.draft_max = min(self.draft_max, self._target.limit - 1)
            if adaptive and target.rewind_kind != "exact":
                draft_s = self._draft.seconds(1) if self._draft else 0.0
                again = target.rewind_kind == "checkpoint"
                self.refusal = refusal(self._target, draft_s, self.draft_max, again=again)

    def _same_device(self, draft: Context | Head) -> bool:
        """Return True if both models compute only on the CPU, or only on GPUs."""
        target, draft_model = self._contexts[0].model, draft.model
        if not target.gpu_layers or not draft_model.gpu_layers:
            return not target.gpu_layers and not draft_model.gpu_layers
        return all(one.gpu_layers > one.layers for one in (target, draft_model))

    def _measured(
        self, context: Context | Head, key: latency_cache.LatencyKey, budget_s: float = 0.5, *, report: bool = True
    ) -> LatencyModel:
        if context.capacity - context.length < key.limit:
            context.rewind(0)
        latency, notes = latency_cache.load_or_measure(
            context, key, self._cache, time.perf_counter, budget_s=budget_s, quiet=self._quiet()
        )
        self.notes += notes if report else ()  # for batch sizes alone a rough guess is good enough
        self._models.append((context, key, latency, budget_s))
        return latency

    @property
    def is_stale(self) -> bool:
        """True if the measurement of a latency model was disturbed."""
        return any(not latency.trusted for _, _, latency, _ in self._models)

    def refresh(self, goes_on: Callable[[], bool]) -> None:
        """Repeat disturbed measurements, while no answer is being generated and the machine is idle.

        The KV caches stay as they are. ``goes_on`` is called before every batch; if it returns False, measuring stops
        without effect. After a disturbed attempt the next must wait some seconds, longer each time.
        """
        if (now := time.monotonic()) < self._refresh_at:
            return
        self._refresh_at = now + self._refresh_wait_s
        self._refresh_wait_s *= REFRESH_WAITS
        for context, key, latency, budget_s in self._models:
            if latency.trusted or context.capacity - context.length < key.limit:
                continue
            fresh = latency_cache.measure_latency(
                context, key, time.perf_counter, latency.batch_sizes, budget_s, goes_on
            )
            if fresh is None or not fresh[0].trusted:
                return
            latency.become(fresh[0])
            if self._draft is not None:
                self._draft.timed(self._experience.trials.elapsed_s)

    def policy(self, *, apart: bool = False) -> DraftPolicy:
        """Return the policy for a new answer. With ``apart`` it learns on a copy of what earlier answers taught,
        because an unfinished answer is using the original.
        """
        if self._options.draft_policy == "fixed":
            return DraftPolicy()
        assert self._target is not None
        drafts = {self._options.head or "draft": self._draft} if self._draft and self._options.needs_draft else {}
        experience = self._experience
        lasting = experience.estimators, self._back_off, experience.trials
        if apart:
            estimators, back_off = deepcopy(lasting[:2])
            back_off.target_only.clear()  # the original policy state will observe them
            lasting = estimators, back_off, experience.trials
        return AdaptivePolicy(self._target, drafts, *lasting, self._quiet)

    def target_only_s(self, load: Load = Load()) -> float | None:
        """Return the seconds of a round without a draft, given the load from other answers; None if not measured."""
        if not self._target:
            return None
        return target_only_s(self._target, load) + self._back_off.overhead_s

    @property
    def is_backing_off(self) -> bool:
        return self._back_off.cooldown > 0

    @property
    def batch_size(self) -> Callable[[int], int]:
        """Function from a number of tokens to the target's batch size."""
        return self._target.batch_size if self._target and self._in_use else lambda count: count

    def observe(self, batch_size: int, seconds: float) -> None:
        """Observe the seconds of a target batch with tokens of several answers."""
        if self._target is not None and self._in_use:
            self._target.observe(batch_size, seconds)

    def observe_draft(self, batch_size: int, seconds: float) -> None:
        """Observe the seconds of a batch of the draft model with tokens of several answers."""
        if self._draft is not None and self._in_use and batch_size <= self._draft.limit:
            self._draft.observe(batch_size, seconds, self._experience.trials.elapsed_s)

    def padded(self, count: int, most: int, *, of_draft: bool = False) -> int:
        """Return the fastest batch size for ``count`` tokens of several answers, with at most ``most`` of padding."""
        model = self._target if not of_draft else self._draft.model if self._draft else None
        if not (model and self._in_use) or count > model.limit:
            return count
        size = model.batch_size(count)
        return size if size <= count + most else count

    @property
    def draft_batch_size(self) -> Callable[[int], int]:
        return self._draft.model.batch_size if self._draft and self._in_use else lambda count: count

    def save(self) -> None:
        """Cache the models, as updated by the batches that ran, unless the machine is busy now."""
        if self._cache is not None and self._quiet():
            for _, key, latency, _ in self._models:
                latency_cache.save_latency(self._cache, key, latency)


def refusal(target: LatencyModel, draft_s: float, draft_max: int, *, again: bool) -> str:
    """Return why drafting cannot win even if all tokens are accepted; empty if it can.

    ``draft_s``: seconds per drafted token; ``again``: True if tokens accepted before a rejection are decoded twice.
    Called only for targets whose rollback is not free.
    """
    one_s = target.seconds(1)

    def speedup(count: int) -> float:
        return (count + 1) * one_s / (target.seconds(count + 1) + count * draft_s)

    count = max(range(1, draft_max + 1), key=speedup)
    if speedup(count) > 1:
        return ""
    return (
        f"drafting cannot win here, even if every drafted token is accepted ({speedup(count):.2f} times target-only): "
        f"a batch of {count + 1} takes {target.seconds(count + 1) / one_s:.1f} times as long as one token"
        + (", and what is accepted before a rejection is decoded again" if again else "")
    )
