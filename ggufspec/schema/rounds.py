"""The rounds of a trace: how each drafted token came about and why it was accepted or not.

One round is one JSON line of ``ggufspec trace --json``. All numbers are written so that they read back the same, and
the rule's decision can be made again from the line alone:

``exact``
    The target's own choice has the highest ``score + noise``, of equal ones the lowest id; a drafted token is accepted
    if it is that choice. At temperature 0 the score is the logit less the choice's, and there is no noise. Above it the
    score is the logarithm of the probability up to a constant, and the noise is a function of seed, position and token
    (``ggufspec.decoding.noise``).
``residual``
    It is accepted if ``uniform < min(1, p / q)``.
``top-k:N``
    As ``exact``, or if ``rank <= most``.
``typical:EPS``
    As ``exact``, or if ``probability > bar``, where the bar is ``min(epsilon, sqrt(epsilon) * exp(-entropy))``.

What was drawn with a uniform variable lies where ``before < (1 - uniform) * total <= reached``, sums of the
probabilities of the tokens with lower ids, and with its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ROUND = "ggufspec/trace-round@2"


@dataclass(frozen=True, slots=True)
class Likely:
    """One of the likeliest tokens of a row."""

    token: int
    text: str  # bytes that are not a whole character are written as ``\\xNN``
    probability: float  # the softmax of the row after penalties, before temperature, truncation and grammar
    permitted: bool = True  # by the grammar


@dataclass(frozen=True, slots=True)
class Seen:
    """A token in a model's row: after penalties, before temperature, truncation and grammar."""

    logit: float | None  # absent if it is not finite: the token is impossible
    probability: float
    likeliest: tuple[Likely, ...]  # the row's ten


@dataclass(frozen=True, slots=True)
class Sum:
    """What the exact rule compares: ``score + noise``."""

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
    """What ``top-k:N`` compares."""

    rank: int  # how many tokens are likelier, plus 1
    most: int  # N


@dataclass(frozen=True, slots=True)
class Typical:
    """What ``typical:EPS`` compares, over the whole vocabulary at the sampling temperature, or at 1 if that is 0."""

    probability: float
    entropy: float  # nats
    epsilon: float
    bar: float  # that the entropy sets


@dataclass(frozen=True, slots=True)
class Judged:
    """Why a drafted token was accepted or not. ``own`` and ``uniform`` are absent if the grammar permits nothing."""

    target: Seen  # the target's row, and the drafted token in it
    p: float  # the target's probability of the token under the sampling settings, and the grammar if it ``masked``
    ratio: float  # p / q
    masked: bool  # the grammar changed what the target chose from
    sum: Sum | None = None  # of the drafted token, except under ``residual``; absent if sampling or grammar excludes it
    own: Own | None = None  # the target's own choice, except under ``residual``
    uniform: float | None = None  # under ``residual``
    rank: Rank | None = None
    typical: Typical | None = None


@dataclass(frozen=True, slots=True)
class Drafted:
    """A token that a drafter had for a position of the sequence."""

    position: int
    drafter: str
    token: int
    text: str
    q: float  # the probability with which it was drawn, under the sampling settings; 1 for a lookup, which has no row
    draft: Seen | None
    result: Literal["accepted", "rejected", "unread"] = "unread"  # after the first rejection nothing is judged
    judged: Judged | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token drawn with a uniform variable: see the module."""

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
    source: Literal["bonus", "target"]  # bonus: after a draft that was accepted whole
    distribution: Literal["p", "residual"]  # what it is from: the target's, or ``max(p - q, 0)`` with sum 1
    probability: float  # in that distribution
    p: float
    masked: bool
    target: Seen
    sum: Sum | None = None
    drawn: Drawn | None = None  # under the residual rule
    emitted: bool = True  # False if the text ended before it


@dataclass(frozen=True, slots=True)
class Reading:
    """A drafter that decodes read what it had not, before it was asked; or it was timed, and read nothing."""

    drafter: str
    tokens: int  # the last ones of the text; 0 if it was timed
    seconds: float
    hoped: float  # target-only tokens whose time this may save in the answer: a mean over how good the drafter may be
    why: str = ""  # it was timed


@dataclass(frozen=True, slots=True)
class TracedRound:
    """``ggufspec/trace-round@2``: one draft and one verification, or the first token, which the prompt's batch gave."""

    number: int  # from 1; the first token's is 0
    rule: str
    description: str  # when the rule accepts a drafted token
    lossless: bool  # the text has the target's distribution under the rule
    temperature: float
    seed: int
    grammar: bool
    drafted: tuple[Drafted, ...]
    added: Added | None  # the token that follows those that were accepted; absent if the grammar permits none
    accepted: int
    emitted: tuple[int, ...]  # ids of the tokens that the round added to the text
    width: int  # tokens in the target's batch, padding included; 0 of the first token
    draft_s: float  # drafters catching up included
    verify_s: float
    total_s: float
    penalised: bool = False  # there are penalties; all rows are recorded as these leave them
    readings: tuple[Reading, ...] = ()  # of drafters that caught up
    schema: str = field(default=ROUND)
