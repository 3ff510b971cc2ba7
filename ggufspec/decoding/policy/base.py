"""Interface between the loop and a policy, and the policy with a fixed draft length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ggufspec.decoding.drafters.base import ShadowEvaluation


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    batch_size: int  # target batch size, padding included
    accepted: int  # accepted drafted tokens
    emitted: int  # tokens that the round added to the text
    verify_s: float  # seconds that the target took to decode the batch
    total_s: float
    learning_s: float = 0.0  # seconds of updating the policy after the previous round
    shared: int = 0  # batch size with other answers' tokens, or ``WITH_PROMPT``; 0 if the batch was not shared


@dataclass(frozen=True, slots=True)
class Load:
    """Load that the other answers put on shared batches, as of the last round."""

    tokens: float = 0.0  # the other answers' tokens in a batch
    gained: float = 0.0  # tokens that a round adds to the other answers
    seconds: float = 0.0  # seconds per round that the other answers spend outside the target, e.g. drafting
    prompt: int = 0  # tokens of a prompt in the same batch; their time is not charged to drafts
    drafting: float = 0.0  # number of other answers in a batch of the draft model
    answers: int = 0  # number of other answers in a batch of the target


class DraftPolicy:
    """Policy that decides which drafter drafts the next token and when to stop; its methods are called in this order.

    This base class is the policy ``fixed``: it drafts as far as allowed in every round, with free drafters first.
    """

    expected_gain: Mapping[str, float] = {}  # by drafter, tokens that its last reading is expected to gain
    load = Load()  # set before each round
    # Number of rounds without drafts or policy calls, from `observe_round` to `observe_cooldown`
    cooldown = 0

    def prompt_read(self, tokens: int, seconds: float) -> None:
        """Observe that the target has prefilled ``tokens`` of the prompt in ``seconds``."""

    def begin(self, limit: int, remaining: int, *, may_trim: bool) -> None:  # noqa: ARG002 - nothing is trimmed
        """Begin a round of at most ``limit`` drafted tokens, with at most ``remaining`` tokens left to
        generate; with ``may_trim``, drawn tokens may be left unverified.
        """
        self._length = 0

    def choose(self, confidences: Mapping[str, float], pending: Mapping[str, int]) -> str | None:
        """Return the drafter for the next token, or None to stop drafting.

        Args:
            confidences: candidates' confidences by drafter, if known.
            pending: for each other drafter, the number of tokens to decode before it can propose a candidate.
        """
        return next(iter((*confidences, *pending)), None)

    def proposed(self, name: str, pending: int, seconds: float) -> None:
        """Observe that the chosen drafter decoded ``pending`` tokens and proposed a candidate in ``seconds``.

        ``pending`` is 0 if the batch also held tokens of other answers: its time says little about a batch of one.
        """

    def extend(self, name: str, confidence: float) -> bool:  # noqa: ARG002 - every candidate does
        """Return True if the candidate is to extend the chain."""
        self._length += 1
        return True

    def verify_count(self) -> int:
        """Return how many tokens of the chain the target verifies."""
        return self._length

    def target_only_batch_size(self, batch_size: int) -> int:
        """Return the batch size for a round without a draft: ``batch_size``, or a larger one (padded) to be timed."""
        return batch_size

    def observe_round(self, outcome: RoundOutcome) -> None:
        """Observe the end of a round."""

    def observe_cooldown(self, batch_size: int, idle: Sequence[tuple[float, float]]) -> None:
        """Observe the end of a cooldown, possibly early; ``idle`` holds the (target, total) seconds per round."""

    def probe(self, name: str, pending: int) -> str:  # noqa: ARG002
        """Return the reason to time one token of a drafter with ``pending`` tokens to decode, or an empty string.

        It is timed if its latency is stale and the gain, should it be faster than expected, is worth the time.
        """
        return ""

    def probed(self, name: str, seconds: float | None) -> None:
        """Record the drafter's measured seconds per token; None if it could not be timed."""

    def catch_up_count(self, name: str, pending: int) -> int:  # noqa: ARG002
        """Return how many of its ``pending`` tokens, counted from the end, a drafter should decode now; 0 for none."""
        return 0

    def shadow_evaluated(self, name: str, seen: Sequence[ShadowEvaluation], seconds: float = 0.0) -> None:
        """Observe what a drafter would have proposed at positions that were decided without it."""
