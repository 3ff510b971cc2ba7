"""The interface between loop and policy in a round, and the policy of fixed draft length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ggufspec.decoding.drafters.base import ShadowEvaluation


@dataclass(frozen=True, slots=True)
class Outcome:
    width: int  # target batch size, padding included
    accepted: int  # accepted drafted tokens
    emitted: int  # tokens that the round added to the text
    verify_s: float  # seconds in the target
    total_s: float
    learning_s: float = 0.0  # seconds of updating the policy after the previous round


class Policy:
    """Decides who drafts the next token and how far; the loop calls its methods in this order.

    This one, ``fixed``, drafts as far as it may in every round; a drafter that costs nothing goes first.
    """

    hoped: Mapping[str, float] = {}  # by drafter, tokens that its last reading may save
    # After `observe_round`: rounds without a draft and without a call, until `observe_cooldown`
    cooldown = 0

    def prompt_read(self, tokens: int, seconds: float) -> None:
        """Observe that the target has read so many tokens of the prompt in so many seconds."""

    def begin(self, limit: int, remaining: int, *, may_trim: bool) -> None:  # noqa: ARG002 - nothing is trimmed
        """Begin a round of at most ``limit`` drafted tokens, with at most ``remaining`` left in the answer; with
        ``may_trim``, drawn tokens may be left unverified.
        """
        self._length = 0

    def choose(self, confidences: Mapping[str, float], pending: Mapping[str, int]) -> str | None:
        """Return the drafter of the next token, or None to draft no more.

        Args:
            confidences: confidences of candidates that are known already, by drafter.
            pending: by each other drafter, the tokens that it would have to read to propose one.
        """
        return next(iter((*confidences, *pending)), None)

    def proposed(self, name: str, pending: int, seconds: float) -> None:
        """Observe that the chosen drafter read ``pending`` tokens and proposed a candidate in so many seconds."""

    def extend(self, name: str, confidence: float) -> bool:  # noqa: ARG002 - every candidate joins
        """Return True if the candidate joins the chain."""
        self._length += 1
        return True

    def verify_count(self) -> int:
        """Return how many tokens of the chain the target verifies."""
        return self._length

    def undrafted_width(self, width: int) -> int:
        """Return the batch size of a round that drafts nothing: ``width``, or a larger one to time it, padded."""
        return width

    def observe_round(self, outcome: Outcome) -> None:
        """Observe the end of a round."""

    def observe_cooldown(self, width: int, idle: Sequence[tuple[float, float]]) -> None:
        """Observe the end of a cooldown, perhaps early: seconds in the target and in total, by round."""

    def probe(self, name: str, pending: int) -> str:  # noqa: ARG002
        """Return why a drafter with ``pending`` tokens to read is timed for one token now; empty: it is not.

        The reason is that its latency is stale and that its gain, if it is faster than expected, is worth the time.
        """
        return ""

    def probed(self, name: str, seconds: float | None) -> None:
        """Observe the seconds per token of the draft; None if it cannot be timed now."""

    def catch_up_count(self, name: str, pending: int) -> int:  # noqa: ARG002
        """Return how many of the last ``pending`` tokens a drafter that has not read them reads now; 0 for none."""
        return 0

    def shadow_evaluated(self, name: str, seen: Sequence[ShadowEvaluation], seconds: float = 0.0) -> None:
        """Observe what a drafter would have proposed at positions that were decided without it."""
