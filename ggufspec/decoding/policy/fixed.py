"""Drafts of one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ggufspec.decoding.drafters.base import ShadowEvaluation
from ggufspec.decoding.policy.base import Outcome


class Fixed:
    """Drafts as far as it may in every round; a drafter that costs nothing goes first."""

    def is_backing_off(self) -> bool:
        return False

    def begin(self, limit: int, *, may_trim: bool) -> None:  # noqa: ARG002 - nothing is trimmed
        self._length = 0

    def choose(self, confidences: Mapping[str, float], pending: Mapping[str, int]) -> str | None:
        return next(iter((*confidences, *pending)), None)

    def proposed(self, name: str, pending: int, seconds: float) -> None: ...

    def extend(self, name: str, confidence: float) -> bool:  # noqa: ARG002 - every candidate joins
        self._length += 1
        return True

    def verify_count(self) -> int:
        return self._length

    def observe_round(self, outcome: Outcome) -> None: ...

    def catch_up_count(self, name: str, pending: int) -> int:  # noqa: ARG002
        return 0

    def shadow_evaluated(self, name: str, seen: Sequence[ShadowEvaluation], seconds: float = 0.0) -> None: ...
