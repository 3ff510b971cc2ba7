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
    r"""One of the likeliest tokens of a row; ``permitted`` by the grammar or not.

    Bytes of ``text`` that are no whole character are ``\xNN``. ``probability`` is the softmax of the row after
    penalties, before temperature, truncation and grammar.
    """

    token: int
    text: str
    probability: float
    permitted: bool = True


@dataclass(frozen=True, slots=True)
class Seen:
    """A token in a model's row: after penalties, before temperature, truncation and grammar.

    ``likeliest`` are its ten likeliest tokens. ``logit`` is absent where it is not finite: the token is impossible.
    """

    logit: float | None
    probability: float
    likeliest: tuple[Likely, ...]


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
    """The target's own choice at a position; ``p`` is its probability under the sampling settings."""

    token: int
    text: str
    p: float
    sum: Sum


@dataclass(frozen=True, slots=True)
class Rank:
    """What ``top-k:N`` compares: how many tokens are likelier, plus 1, and N."""

    rank: int
    most: int


@dataclass(frozen=True, slots=True)
class Typical:
    """What ``typical:EPS`` compares: a probability over the whole vocabulary at the sampling temperature, or at 1 if
    that is 0, and the bar that the distribution's entropy (in nats) sets.
    """

    probability: float
    entropy: float
    epsilon: float
    bar: float


@dataclass(frozen=True, slots=True)
class Judged:
    """Why a drafted token was accepted or not.

    Args:
        target: the target's row, and the drafted token in it.
        p: the target's probability of the token under the sampling settings, and the grammar's where it ``masked``.
        ratio: p / q.
        masked: the grammar changed what the target chose from.
        sum: of the drafted token, except under ``residual``; absent if sampling or grammar leaves it out.
        own: the target's own choice, except under ``residual``; absent if the grammar permits nothing.
        uniform: under ``residual``; absent if the grammar permits nothing.
    """

    target: Seen
    p: float
    ratio: float
    masked: bool
    sum: Sum | None = None
    own: Own | None = None
    uniform: float | None = None
    rank: Rank | None = None
    typical: Typical | None = None


@dataclass(frozen=True, slots=True)
class Drafted:
    """A token that ``draft`` or ``lookup`` drafted for a position of the sequence.

    ``q`` is the probability with which it was drawn, under the sampling settings; 1 for a lookup, which has no row.
    Behind the first rejection it is ``unread``: nothing was ``judged``.
    """

    position: int
    drafter: str
    token: int
    text: str
    q: float
    draft: Seen | None
    result: Literal["accepted", "rejected", "unread"] = "unread"
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
    """The target's own token at the end of a round.

    Args:
        source: ``bonus`` behind a draft that was accepted whole, ``target`` otherwise.
        distribution: what it is from: ``p``, the target's, or ``residual``, which is ``max(p - q, 0)`` with sum 1.
        probability: in that distribution; ``p``, ``masked``, ``target`` and ``sum`` are as in :class:`Judged`.
        drawn: under the residual rule.
        emitted: False if the text ended before it.
    """

    position: int
    token: int
    text: str
    source: Literal["bonus", "target"]
    distribution: Literal["p", "residual"]
    probability: float
    p: float
    masked: bool
    target: Seen
    sum: Sum | None = None
    drawn: Drawn | None = None
    emitted: bool = True


@dataclass(frozen=True, slots=True)
class Reading:
    """A drafter that decodes read what it had not, before it was asked.

    Args:
        tokens: of the text, the last ones.
        hoped: target-only tokens whose time this may save in the answer: a mean over how good the drafter may be.
    """

    drafter: str
    tokens: int
    seconds: float
    hoped: float


@dataclass(frozen=True, slots=True)
class TracedRound:
    """``ggufspec/trace-round@2``: one draft and one verification, or the first token, which the prompt's batch gave.

    Args:
        number: from 1; the first token's is 0.
        description: when the rule accepts a drafted token.
        lossless: whether the text has the target's distribution under the rule.
        added: the token that follows those that were accepted; absent if the grammar permits none.
        emitted: ids of the tokens that the round added to the text.
        width: tokens in the target's batch, padding included; 0 of the first token.
        draft_s: drafters catching up included.
        penalised: whether there are penalties; all rows are recorded as these leave them.
        readings: of drafters that caught up.
    """

    number: int
    rule: str
    description: str
    lossless: bool
    temperature: float
    seed: int
    grammar: bool
    drafted: tuple[Drafted, ...]
    added: Added | None
    accepted: int
    emitted: tuple[int, ...]
    width: int
    draft_s: float
    verify_s: float
    total_s: float
    penalised: bool = False
    readings: tuple[Reading, ...] = ()
    schema: str = field(default=ROUND)
