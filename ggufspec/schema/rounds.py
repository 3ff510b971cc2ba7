"""Rounds of a trace, which say where each drafted token came from and why it was accepted or not.

Each round is one JSON line printed by ``ggufspec trace --json``. Numbers are written with full precision, so the
acceptance rule's decision can be reproduced from the line alone:

``exact``
    The target's own choice is the token with the highest ``score + noise`` (the lowest id if several are equal); a
    drafted token is accepted if it is that choice. At temperature 0, the score is the logit minus the choice's logit,
    and there is no noise. Otherwise, the score is the log-probability up to a constant, and the noise is a function of
    seed, position and token (``ggufspec.decoding.noise``).
``residual``
    A token is accepted if ``uniform < min(1, p / q)``.
``top-k:N``
    A token is accepted as under ``exact``, or if ``rank <= most``.
``typical:EPS``
    A token is accepted as under ``exact``, or if ``probability > bar = min(epsilon, sqrt(epsilon) * exp(-entropy))``.

A token sampled with a uniform variate satisfies ``before < (1 - uniform) * total <= reached``, where ``before`` and
``reached`` are cumulative probabilities in the order of token ids, excluding and including the token itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ROUND = "ggufspec/trace-round@2"


@dataclass(frozen=True, slots=True)
class LikelyToken:
    """Candidate among the most likely tokens at a position."""

    token: int
    text: str  # text of the token, with incomplete characters written as ``\\xNN``
    probability: float  # softmax of the logits after penalties, before temperature, truncation and grammar
    permitted: bool = True  # True if the grammar permits it


@dataclass(frozen=True, slots=True)
class SeenToken:
    """Token with a model's logit for it, after penalties but before temperature, truncation and grammar."""

    logit: float | None  # absent if the logit is not finite, which makes the token impossible
    probability: float
    likeliest: tuple[LikelyToken, ...]  # the ten most likely tokens at this position


@dataclass(frozen=True, slots=True)
class NoisyScore:
    """Value that the exact rule compares, which is ``score + noise``."""

    score: float
    noise: float

    @property
    def total(self) -> float:
        return self.score + self.noise


@dataclass(frozen=True, slots=True)
class OwnChoice:
    """Token that the target itself chooses at a position."""

    token: int
    text: str
    p: float  # target's probability of the token under the sampling settings
    sum: NoisyScore


@dataclass(frozen=True, slots=True)
class TokenRank:
    """Rank that the rule ``top-k:N`` compares."""

    rank: int  # number of more likely tokens, plus 1
    most: int  # the rule's N


@dataclass(frozen=True, slots=True)
class TypicalValues:
    """Values that the rule ``typical:EPS`` compares, at the sampling temperature (at temperature 1 if that is 0)."""

    probability: float
    entropy: float  # entropy in nats
    epsilon: float
    bar: float  # threshold, which depends on the entropy


@dataclass(frozen=True, slots=True)
class JudgedToken:
    """Verdict on a drafted token, with reasons. ``own`` and ``uniform`` are absent if the grammar permits no token."""

    target: SeenToken  # the target's logit for the drafted token
    p: float  # target's probability of the token under the sampling settings, and under the grammar if ``masked``
    ratio: float  # target's probability ÷ drafter's probability, p / q
    masked: bool  # True if the grammar restricted the target's choice
    sum: NoisyScore | None = None  # the token's score, except under ``residual`` or if sampling or grammar forbids it
    own: OwnChoice | None = None  # the target's own choice, except under ``residual``
    uniform: float | None = None  # uniform random number, only under ``residual``
    rank: TokenRank | None = None
    typical: TypicalValues | None = None


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """Token that a drafter proposed for a position in the sequence."""

    position: int
    drafter: str
    token: int
    text: str
    q: float  # drafter's probability of the token under the sampling settings; 1 for a lookup, which has no logits
    draft: SeenToken | None
    result: Literal["accepted", "rejected", "unread"] = "unread"  # ``unread``: after the first rejected token
    judged: JudgedToken | None = None


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """Token sampled with a uniform variate; the module's docstring explains the values."""

    uniform: float
    before: float
    reached: float
    total: float


@dataclass(frozen=True, slots=True)
class AddedToken:
    """Target's token that ends a round; for ``p``, ``masked``, ``target`` and ``sum``, see :class:`JudgedToken`."""

    position: int
    token: int
    text: str
    source: Literal["bonus", "target"]  # ``bonus``: the token follows a fully accepted draft
    distribution: Literal["p", "residual"]  # ``p``: the target's; ``residual``: normalised ``max(p - q, 0)``
    probability: float  # the token's probability in that distribution
    p: float
    masked: bool
    target: SeenToken
    sum: NoisyScore | None = None
    drawn: DrawnToken | None = None  # sampling of the token, only under the residual rule
    emitted: bool = True  # False if the text ended before this token


@dataclass(frozen=True, slots=True)
class DrafterReading:
    """Work of a drafter's model between drafts: decoding text that it has not decoded yet, or only being timed."""

    drafter: str
    tokens: int  # number of tokens that the drafter decoded at the end of the text; 0 if the drafter was only timed
    seconds: float
    hoped: float  # expected gain in this answer, in target-only token times, averaged over possible drafter qualities
    why: str = ""  # reason for timing the drafter; empty if it decoded tokens


@dataclass(frozen=True, slots=True)
class TracedRound:
    """Document ``ggufspec/trace-round@2``: a draft and its verification, or the first token (of the prompt's batch)."""

    number: int  # number of the round, starting at 1; 0 for the first token
    rule: str
    description: str  # condition under which the rule accepts a drafted token
    lossless: bool  # True if the rule preserves the target's distribution
    temperature: float
    seed: int
    grammar: bool
    drafted: tuple[DraftedToken, ...]
    added: AddedToken | None  # the target's token after the accepted ones; absent if the grammar permits no token
    accepted: int
    emitted: tuple[int, ...]  # ids of the tokens that the round added to the text
    width: int  # target's batch size, including padding; 0 for the first token
    draft_s: float  # seconds for drafting, including ``readings``
    verify_s: float
    total_s: float
    penalised: bool = False  # True if there are penalties, which all recorded logits include
    readings: tuple[DrafterReading, ...] = ()  # drafters' work between drafts
    schema: str = field(default=ROUND)
