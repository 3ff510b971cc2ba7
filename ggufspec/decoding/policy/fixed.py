"""Drafts of one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ggufspec.decoding.drafters.base import Hindsight
from ggufspec.decoding.policy.base import Outcome


class Fixed:
    """Always a draft of the same length; a lookup goes first where it has a token."""

    def resting(self) -> bool:
        return False

    def begin(self, limit: int, *, may_trim: bool) -> None:  # noqa: ARG002 - nothing is trimmed
        self._length = 0

    def choose(self, offers: Mapping[str, float], pending: Mapping[str, int]) -> str | None:
        return next(iter((*offers, *pending)), None)

    def asked(self, name: str, pending: int, seconds: float) -> None: ...

    def take(self, name: str, confidence: float) -> bool:  # noqa: ARG002 - everything is taken
        self._length += 1
        return True

    def verified(self) -> int:
        return self._length

    def learn(self, outcome: Outcome) -> None: ...

    def reading(self, name: str, pending: int) -> int:  # noqa: ARG002
        return 0

    def reviewed(self, name: str, seen: Sequence[Hindsight], seconds: float = 0.0) -> None: ...
