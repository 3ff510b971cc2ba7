"""What the loop asks of a policy in a round, and what it reports; and the policy of drafts of one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ggufspec.decoding.drafters.base import ShadowEvaluation


@dataclass(frozen=True, slots=True)
class Outcome:
    width: int  # tokens in the target's batch, padding included
    accepted: int  # drafted tokens
    emitted: int  # tokens that the round added to the text
    verify_s: float  # in the target
    total_s: float
    learning_s: float = 0.0  # of updating the policy after the round before


class Policy:
    """Decides who drafts the next token and how far; the loop calls its methods in this order.

    This one, ``fixed``, drafts as far as it may in every round; a drafter that costs nothing goes first.
    """

    hoped: Mapping[str, float] = {}  # by drafter, tokens that what it read last may save
    # After `observe_round`: rounds to come that go without a draft and without a call, until `observe_cooldown`
    cooldown = 0

    def prompt_read(self, tokens: int, seconds: float) -> None:
        """The target has read so many tokens of the prompt in so many seconds."""

    def begin(self, limit: int, remaining: int, *, may_trim: bool) -> None:  # noqa: ARG002 - nothing is trimmed
        """A round of at most ``limit`` drafted tokens, of at most ``remaining`` of the answer; with ``may_trim``, drawn
        tokens may be left unverified.
        """
        self._length = 0

    def choose(self, confidences: Mapping[str, float], pending: Mapping[str, int]) -> str | None:
        """The drafter of the next token, or None to draft no more.

        Args:
            confidences: of the draft candidates that are known already, by drafter.
            pending: by each other drafter, the tokens that it would have to read to propose one.
        """
        return next(iter((*confidences, *pending)), None)

    def proposed(self, name: str, pending: int, seconds: float) -> None:
        """The chosen drafter read ``pending`` tokens and proposed a candidate in so many seconds."""

    def extend(self, name: str, confidence: float) -> bool:  # noqa: ARG002 - every candidate joins
        """Whether the candidate joins the chain."""
        self._length += 1
        return True

    def verify_count(self) -> int:
        """How many tokens of the chain the target verifies."""
        return self._length

    def undrafted_width(self, width: int) -> int:
        """The batch size of a round that drafts nothing; ``width`` unless a larger one is to be timed, padded."""
        return width

    def observe_round(self, outcome: Outcome) -> None:
        """The round has ended."""

    def observe_cooldown(self, width: int, idle: Sequence[tuple[float, float]]) -> None:
        """A cooldown has ended, perhaps early: seconds in the target and in all of its rounds, of this batch size."""

    def probe(self, name: str, pending: int) -> str:  # noqa: ARG002
        """Why a drafter with ``pending`` tokens to read is timed for one token now; empty: it is not.

        Its latency is stale, and what it may save if it is faster than expected is worth the time.
        """
        return ""

    def probed(self, name: str, seconds: float | None) -> None:
        """What a token of the draft takes; None if it cannot be timed now."""

    def catch_up_count(self, name: str, pending: int) -> int:  # noqa: ARG002
        """How many of the last ``pending`` tokens a drafter that has not read them reads now; 0 for none."""
        return 0

    def shadow_evaluated(self, name: str, seen: Sequence[ShadowEvaluation], seconds: float = 0.0) -> None:
        """What a drafter would have proposed at positions that were decided without it."""
