"""What the loop and the policy of drafting tell each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ggufspec.decoding.drafters.base import Hindsight


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a round went.

    Args:
        width: tokens in the target's batch, padding included.
        accepted: verified tokens that were kept, from the first on.
        emitted: tokens that the round gave.
        verify_s: seconds in the target.
        total_s: seconds of the round.
        learning_s: seconds that learning from the round before took.
    """

    width: int
    accepted: int
    emitted: int
    verify_s: float
    total_s: float
    learning_s: float = 0.0


class Policy(Protocol):
    """What the loop asks in a round, in this order."""

    def resting(self) -> bool:
        """Whether this round goes without a draft, unasked: it is only told how it went."""
        ...

    def begin(self, limit: int, *, may_trim: bool) -> None:
        """A round starts, of at most ``limit`` drafted tokens; ``may_trim``: drawn tokens may be left unverified."""
        ...

    def choose(self, offers: Mapping[str, float], pending: Mapping[str, int]) -> str | None:
        """The drafter of the next token, or None to draft no more.

        Args:
            offers: confidences of the tokens that cost nothing more, by drafter.
            pending: tokens that each other drafter would have to read for its offer.
        """
        ...

    def asked(self, name: str, pending: int, seconds: float) -> None:
        """A drafter took so long for an offer."""
        ...

    def take(self, name: str, confidence: float) -> bool:
        """Whether the token offered joins the chain."""
        ...

    def verified(self) -> int:
        """How many tokens of the chain the target shall see."""
        ...

    def learn(self, outcome: Outcome) -> None:
        """The round's end."""
        ...

    def reading(self, name: str, pending: int) -> int:
        """How many of the ``pending`` tokens that a drafter has not read it shall read now, the last ones; or 0."""
        ...

    def reviewed(self, name: str, seen: Sequence[Hindsight], seconds: float = 0.0) -> None:
        """What a drafter would have offered at places that were decided without it."""
        ...
