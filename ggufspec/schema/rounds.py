"""The rounds of a trace: how each drafted token came about and why it was accepted or not.

One round is one JSON line of ``ggufspec trace --json``. All numbers are written so that they read back the same, and
the rule's decision can be repeated from the line alone:

``exact``
    The target's own choice has the highest ``score + noise``, of equal ones the lowest id; a drafted token is accepted
    if it is that choice. At temperature 0 the score is the logit less the choice's, and there is no noise. Above it the
    score is the logarithm of the probability up to a constant, and the noise is a function of seed, position and token
    (``ggufspec.decoding.noise``).
``residual``
    A token is accepted if ``uniform < min(1, p / q)``.
``top-k:N``
    As ``exact``, or if ``rank <= most``.
``typical:EPS``
    As ``exact``, or if ``probability > bar``, where the bar is ``min(epsilon, sqrt(epsilon) * exp(-entropy))``.

A token drawn with a uniform variable satisfies ``before < (1 - uniform) * total <= reached``, the sums of the
probabilities of tokens with lower ids, without and with its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ROUND = "ggufspec/trace-round@2"


@dataclass(frozen=True, slots=True)
class Likely:
    """One of the likeliest tokens of a row."""

    token: int
    text: str  # incomplete characters are written as ``\\xNN``
    probability: float  # softmax of the row after penalties, before temperature, truncation and grammar
    permitted: bool = True  # by the grammar


@dataclass(frozen=True, slots=True)
class Seen:
    """A token in a model's row: after penalties, before temperature, truncation and grammar."""

    logit: float | None  # absent if it is not finite: the token is impossible
    probability: float
    likeliest: tuple[Likely, ...]  # the row's ten


@dataclass(frozen=True, slots=True)
class Sum:
    """The value that the exact rule compares: ``score + noise``."""

    score: float
    noise: float

    @property
    def total(self) -> float:
        return self.score + self.noise


@dataclass(frozen=True, slots=True)
class Own:
    """The target's own choice at a position."""

    token: int
    text: str
    p: float  # under the sampling settings
    sum: Sum


@dataclass(frozen=True, slots=True)
class Rank:
    """Rank that ``top-k:N`` compares."""

    rank: int  # number of likelier tokens, plus 1
    most: int  # N


@dataclass(frozen=True, slots=True)
class Typical:
    """Values that ``typical:EPS`` compares, over the vocabulary at the sampling temperature, or 1 if that is 0."""

    probability: float
    entropy: float  # nats
    epsilon: float
    bar: float  # set by the entropy


@dataclass(frozen=True, slots=True)
class Judged:
    """Verdict on a drafted token, with reasons. ``own`` and ``uniform`` are absent if the grammar permits nothing."""

    target: Seen  # target's row, and the drafted token in it
    p: float  # target's probability of the token under the sampling settings, and the grammar if it ``masked``
    ratio: float  # p / q
    masked: bool  # the grammar changed what the target chose from
    sum: Sum | None = None  # drafted token's, except under ``residual``; absent if sampling or grammar excludes it
    own: Own | None = None  # the target's own choice, except under ``residual``
    uniform: float | None = None  # under ``residual``
    rank: Rank | None = None
    typical: Typical | None = None


@dataclass(frozen=True, slots=True)
class Drafted:
    """A token proposed by a drafter for a position of the sequence."""

    position: int
    drafter: str
    token: int
    text: str
    q: float  # probability of its draw under the sampling settings; 1 for a lookup, which has no row
    draft: Seen | None
    result: Literal["accepted", "rejected", "unread"] = "unread"  # tokens after the first rejection are not judged
    judged: Judged | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token drawn with a uniform variable: see the module's docstring."""

    uniform: float
    before: float
    reached: float
    total: float


@dataclass(frozen=True, slots=True)
class Added:
    """The target's own token at the end of a round; ``p``, ``masked``, ``target``, ``sum`` as in :class:`Judged`."""

    position: int
    token: int
    text: str
    source: Literal["bonus", "target"]  # bonus: after a fully accepted draft
    distribution: Literal["p", "residual"]  # the target's, or ``max(p - q, 0)`` normalised
    probability: float  # in that distribution
    p: float
    masked: bool
    target: Seen
    sum: Sum | None = None
    drawn: Drawn | None = None  # under the residual rule
    emitted: bool = True  # False if the text ended before it


@dataclass(frozen=True, slots=True)
class Reading:
    """Catch-up of a drafter with a model before it was asked; or its timing, which reads nothing."""

    drafter: str
    tokens: int  # last tokens of the text; 0 if it was timed
    seconds: float
    hoped: float  # expected gain in target-only tokens for the answer, averaged over how good the drafter may be
    why: str = ""  # reason for timing it


@dataclass(frozen=True, slots=True)
class TracedRound:
    """``ggufspec/trace-round@2``: one draft and its verification, or the first token, from the prompt's batch."""

    number: int  # from 1; 0 for the first token
    rule: str
    description: str  # when the rule accepts a drafted token
    lossless: bool  # the text has the target's distribution under the rule
    temperature: float
    seed: int
    grammar: bool
    drafted: tuple[Drafted, ...]
    added: Added | None  # token after the accepted ones; absent if the grammar permits none
    accepted: int
    emitted: tuple[int, ...]  # ids of the tokens that the round added to the text
    width: int  # target batch size, padding included; 0 for the first token
    draft_s: float  # including drafters' catch-up
    verify_s: float
    total_s: float
    penalised: bool = False  # there are penalties; all rows are recorded after them
    readings: tuple[Reading, ...] = ()  # catch-up of drafters
    schema: str = field(default=ROUND)
