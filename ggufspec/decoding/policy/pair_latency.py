"""How wide a pair's batches are and how far it drafts: measured when it is loaded, refreshed while it runs, kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.policy import latency_cache as kept
from ggufspec.decoding.policy.adaptive import Adaptive
from ggufspec.decoding.policy.backoff import Weariness
from ggufspec.decoding.policy.base import Policy
from ggufspec.decoding.policy.estimator import Calibration
from ggufspec.decoding.policy.fixed import Fixed
from ggufspec.decoding.policy.latency import Curve
from ggufspec.decoding.policy.rollback import Costs, refusal
from ggufspec.errors import ModelError
from ggufspec.llamacpp.model import Context

_DRAFT_BUDGET_S = 0.2


class Pace:
    """The verify curves of a pair, and what follows from them.

    Nothing is measured for what needs no curve: a target alone, or a draft of fixed length, outside strict mode. What
    is needed is measured by :meth:`follow`.

    Args:
        target: the target's context.
        draft: the draft's, or None.
        options: how the pair is loaded and decoded.
        cache: folder in which curves are kept, or None.

    Attributes:
        notes: sentences for the user.
        refusal: why nobody drafts although somebody could, or empty.
        draft_max: drafted tokens a round at most.

    Raises:
        ModelError: strict mode cannot be kept here.
    """

    def __init__(self, target: Context, draft: Context | None, options: DecoderOptions, cache: Path | None) -> None:
        self.notes: list[str] = []
        self.refusal = ""
        self.draft_max = options.draft_max
        self._contexts = target, draft
        self._loaded, self._cache = options, cache
        self._options, self._weariness = options, Weariness()
        self._curves: list[tuple[kept.Key, Curve]] = []
        self._target: Curve | None = None
        self._draft: Curve | None = None
        self._calibrations: dict[str, Calibration] = {}
        if options.strict and target.rewind_kind != "exact":
            raise ModelError(
                f"strict mode cannot be kept with {target.model.path.name}: what is kept of a draft is decoded again, "
                "in batches of other widths (recurrent memory)",
                "run without --strict; divergences are then counted and explained",
            )

    def follow(self, options: DecoderOptions) -> None:
        """Answers are decoded like this from now on; curves that this is the first to need are measured.

        The caches stay as they are, but for the first time in strict mode, which empties the target's, and where a
        text leaves no room behind it for the batches that are timed.
        """
        if options != self._options:
            self._options, self._weariness = options, Weariness()
        self.draft_max, self.refusal = options.draft_max, ""
        loaded, (target, draft) = self._loaded, self._contexts
        adaptive = options.drafts(with_draft=draft is not None) and options.draft_policy == "adaptive"
        self._uses_curves = adaptive or options.strict
        if not self._uses_curves:
            return
        if self._target is None:
            context = loaded.context(with_draft=draft is not None)
            key = kept.key(target.model.path, loaded.placement, context, strict=options.strict)
            self._target = self._curve(target, key, say=adaptive)
        self.draft_max = min(self.draft_max, self._target.limit - 1)
        if adaptive and options.needs_draft and draft is not None and self._draft is None:
            key = kept.key(draft.model.path, loaded.draft_placement, loaded.draft_context(), outputs=1)
            self._draft = self._curve(draft, key, budget_s=_DRAFT_BUDGET_S)
        if adaptive and target.rewind_kind != "exact":
            self.refusal = self._refusal(self._target, target.rewind_kind)

    def _curve(self, context: Context, key: kept.Key, budget_s: float = 0.5, *, say: bool = True) -> Curve:
        if context.capacity - context.length < key.limit:
            context.rewind(0)
        curve, notes = kept.known_or_measured(context, key, self._cache, time.perf_counter, budget_s=budget_s)
        self.notes += notes if say else ()  # for widths alone a rough guess is good enough
        self._curves.append((key, curve))
        return curve

    def _refusal(self, target: Curve, rewind_kind: str) -> str:
        """Why drafting cannot win on a memory that does not forget for nothing; empty where it can."""
        costs = Costs(
            batch_s=lambda count: target.seconds(min(count, target.limit)) * max(1.0, count / target.limit),
            draft_s=self._draft.seconds(1) if self._draft else 0.0,
            again=rewind_kind == "checkpoint",
        )
        return refusal(costs, self.draft_max)

    def policy(self) -> Policy:
        """Who decides how far to draft in one answer."""
        if self._options.draft_policy == "fixed":
            return Fixed()
        assert self._target is not None
        draft = self._draft if self._options.needs_draft else None
        return Adaptive(self._target, draft, self._calibrations, self._weariness)

    @property
    def width(self) -> Callable[[int], int]:
        """The width of a target batch of so many tokens."""
        return _width(self._target if self._uses_curves else None, pad=self._options.pad)

    @property
    def draft_width(self) -> Callable[[int], int]:
        """The same of the draft."""
        return _width(self._draft if self._uses_curves else None, pad=self._options.pad)

    def keep(self) -> None:
        """Keep the curves as the batches that ran have left them."""
        if self._cache is not None:
            for key, curve in self._curves:
                kept.keep(self._cache, key, curve)


def _width(curve: Curve | None, *, pad: bool) -> Callable[[int], int]:
    if curve is None:
        return lambda count: count
    if pad:
        return curve.width
    allowed = curve.widths or range(1, curve.limit + 1)
    return lambda count: next(width for width in allowed if width >= count)
