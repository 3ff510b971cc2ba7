"""How wide a pair's batches are and how far it drafts: measured when it is loaded, refreshed while it runs, kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ggufspec.decoding import kept
from ggufspec.decoding.controller import Adaptive, Calibration, Fixed, Policy
from ggufspec.decoding.curve import Curve
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.rewind import Costs, refusal
from ggufspec.errors import ModelError
from ggufspec.llamacpp.model import Context

_DRAFT_BUDGET_S = 0.2


class Pace:
    """The verify curves of a pair, and what follows from them.

    Nothing is measured for what needs no curve: a target alone, or a draft of fixed length, outside strict mode.

    Args:
        target: the target's context; its cache is empty afterwards.
        draft: the draft's, or None.
        options: how the pair is decoded.
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
        self._options, self._cache = options, cache
        self._curves: list[tuple[kept.Key, Curve]] = []
        self._target = self._draft = None
        self._calibrations: dict[str, Calibration] = {}
        if options.strict and target.rewind_kind != "exact":
            raise ModelError(
                f"strict mode cannot be kept with {target.model.path.name}: what is kept of a draft is decoded again, "
                "in batches of other widths (recurrent memory)",
                "run without --strict; divergences are then counted and explained",
            )
        adaptive = options.drafts(with_draft=draft is not None) and options.draft_policy == "adaptive"
        if adaptive or options.strict:
            context = options.context(with_draft=draft is not None)
            key = kept.key(target.model.path, options.placement, context, strict=options.strict)
            self._target = self._curve(target, key)
            self.draft_max = min(self.draft_max, self._target.limit - 1)
        if adaptive and draft is not None:
            key = kept.key(draft.model.path, options.draft_placement, options.draft_context(), outputs=1)
            self._draft = self._curve(draft, key, budget_s=_DRAFT_BUDGET_S)
        if adaptive and target.rewind_kind != "exact":
            self.refusal = self._refusal(target.rewind_kind)

    def _curve(self, context: Context, key: kept.Key, budget_s: float = 0.5) -> Curve:
        curve, notes = kept.known_or_measured(context, key, self._cache, time.perf_counter, budget_s=budget_s)
        context.rewind(0)
        self.notes += notes
        self._curves.append((key, curve))
        return curve

    def _refusal(self, rewind_kind: str) -> str:
        """Why drafting cannot win on a memory that does not forget for nothing; empty where it can."""
        target = self._target
        assert target is not None
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
        return Adaptive(self._target, self._draft, self._calibrations)

    @property
    def width(self) -> Callable[[int], int]:
        """The width of a target batch of so many tokens."""
        return _width(self._target, pad=self._options.pad)

    @property
    def draft_width(self) -> Callable[[int], int]:
        """The same of the draft."""
        return _width(self._draft, pad=self._options.pad)

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
