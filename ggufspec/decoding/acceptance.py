"""Which drafted tokens stay, and which token follows them. Pure NumPy: no model, clock or I/O.

Two lossless rules. Under ``exact`` every emitted token is the target's own sample for (seed, position), so any drafter
and any stopping rule give the text of target-only. Under ``residual`` the text has the target's distribution if every
drafted token was drawn from the ``q`` that comes with it and is verified whatever it turned out to be: drafting may
stop because of what was known before a token was drawn, never because of that token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ggufspec.decoding.noise import choose, choose_full
from ggufspec.decoding.options import check_rule
from ggufspec.decoding.sampling import Candidates, Ids, Logits, Sampling, candidates

Numbers = npt.NDArray[Any]  # float64; the tests' exact enumeration has Fractions


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A drafted token.

    Args:
        token: its id.
        q: what it was drawn from, after the draft's truncation and temperature; None if it was not drawn (a lookup),
            or, under the exact rule, where that would be the whole vocabulary.
    """

    token: int
    q: Candidates | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round emits: the first ``accepted`` drafted tokens, then ``token``."""

    accepted: int  # draft tokens kept, 0..k
    token: int  # the token that the target adds after them


class Rule(Protocol):
    """How drafted tokens are chosen and judged."""

    name: str
    lossless: bool  # whether the text has the target's distribution

    def propose(self, logits: Logits, position: int) -> Proposal:
        """The draft's token for ``position`` (index in the sequence) from the draft's logits (vocab,)."""
        ...

    def verify(self, rows: npt.NDArray[np.float32], proposals: Sequence[Proposal], position: int) -> Verdict:
        """Keep a prefix of ``proposals`` and choose the token that follows it.

        Args:
            rows: (k + 1, vocab) logits of the target; row i is conditioned on the first i drafted tokens. Rows behind
                the first rejection are not read, and none is kept.
            proposals: k drafted tokens; none is target-only sampling.
            position: index in the sequence of the first drafted token.
        """
        ...


class ExactRule:
    """Greedy at temperature 0, keyed noise above: accept while the draft is the target's own choice.

    Source: Daliri et al. 2024, arXiv:2408.07978.
    """

    name = "exact"
    lossless = True

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling

    def propose(self, logits: Logits, position: int) -> Proposal:
        return Proposal(*self._choose(logits, position))

    def verify(self, rows: npt.NDArray[np.float32], proposals: Sequence[Proposal], position: int) -> Verdict:
        for i, proposal in enumerate(proposals):
            token, _ = self._choose(rows[i], position + i)
            if token != proposal.token:
                return Verdict(i, token)
        token, _ = self._choose(rows[len(proposals)], position + len(proposals))
        return Verdict(len(proposals), token)

    def _choose(self, logits: Logits, position: int) -> tuple[int, Candidates | None]:
        if not self.sampling.truncates:
            return choose_full(logits, self.sampling.temperature, self.sampling.seed, position), None
        q = candidates(logits, self.sampling)
        return choose(q.ids, q.scores, self.sampling.seed, position), q


class ResidualRule:
    """Accept x with probability min(1, p(x) / q(x)); after a rejection sample from max(p - q, 0).

    Uniform variables are taken from ``rng`` in this order: one for each proposed token; then, in a verification, one
    for each drafted token up to the first rejection, and one for the token that follows.

    Source: Leviathan et al. 2023, Algorithm 1 (arXiv:2211.17192).
    """

    name = "residual"
    lossless = True

    def __init__(self, sampling: Sampling, rng: np.random.Generator) -> None:
        self.sampling = sampling
        self._chance = UniformChance(rng)

    def propose(self, logits: Logits, position: int) -> Proposal:  # noqa: ARG002 - the rule has no positions
        q = candidates(logits, self.sampling)
        return Proposal(int(q.ids[self._chance.draw(q.probabilities())]), q)

    def verify(self, rows: npt.NDArray[np.float32], proposals: Sequence[Proposal], position: int) -> Verdict:  # noqa: ARG002
        return verify_residual(
            lambda i: Law.of(candidates(rows[i], self.sampling)),
            [(x.token, Law.point(x.token) if x.q is None else Law.of(x.q)) for x in proposals],
            self._chance,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """A distribution over the vocabulary; ids that are not listed have probability 0.

    Args:
        ids: (n,) token ids, ascending.
        probabilities: (n,) their sum is 1.
    """

    ids: Ids
    probabilities: Numbers

    @classmethod
    def of(cls, drawn_from: Candidates) -> Law:
        """The distribution of a token drawn from candidates."""
        return cls(drawn_from.ids, drawn_from.probabilities())

    @classmethod
    def point(cls, token: int) -> Law:
        """The distribution of a token that was not drawn."""
        one = np.ones(1, dtype=np.int64)  # a number that is exact with fractions too
        return cls(token * one, one)

    def at(self, ids: Ids) -> Numbers:
        """(n,) probabilities of ``ids``."""
        index = np.minimum(np.searchsorted(self.ids, ids), self.ids.size - 1)
        return np.where(self.ids[index] == ids, self.probabilities[index], 0)


class Chance(Protocol):
    """The decisions that are left to chance; an enumeration takes every one."""

    def accept(self, probability: Any) -> bool:
        """True with this probability."""
        ...

    def draw(self, probabilities: Numbers) -> int:
        """An index into (n,) probabilities."""
        ...


class UniformChance:
    """Decisions by a generator, one uniform variable each."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def accept(self, probability: Any) -> bool:
        return bool(self._rng.random() < probability)

    def draw(self, probabilities: Numbers) -> int:
        return int(pick(probabilities, self._rng.random()))


def verify_residual(target: Callable[[int], Law], drafted: Sequence[tuple[int, Law]], chance: Chance) -> Verdict:
    """The residual rule's verdict on drafted tokens.

    Args:
        target: the target's distribution after the first i drafted tokens; called for i = 0, 1, … as far as needed.
        drafted: the tokens, each with the distribution that it was drawn from.
        chance: the source of randomness.
    """
    for i, (token, q) in enumerate(drafted):
        p, x = target(i), np.array([token])
        if not chance.accept(acceptance_probability(p.at(x), q.at(x))[0]):
            return Verdict(i, int(p.ids[chance.draw(residual(p.probabilities, q.at(p.ids)))]))
    p = target(len(drafted))
    return Verdict(len(drafted), int(p.ids[chance.draw(p.probabilities)]))


def acceptance_probability(p: Numbers, q: Numbers) -> Numbers:
    """min(1, p / q) of tokens with target probabilities ``p`` and draft probabilities ``q`` > 0."""
    return np.minimum(1, p / q)


def residual(p: Numbers, q: Numbers) -> Numbers:
    """max(p - q, 0) with sum 1 on the last axis; both over the same ids, the target's.

    Where it is 0 everywhere a rejection is due to rounding alone, and the result is ``p``.
    """
    excess = np.maximum(p - q, 0)
    total = excess.sum(axis=-1, keepdims=True)
    return np.where(total > 0, excess / np.where(total > 0, total, 1), p)


def pick(probabilities: Numbers, uniform: Any) -> Numbers:
    """The index that a uniform variable in [0, 1) draws from (…, n) probabilities; never one with probability 0."""
    reached = np.cumsum(probabilities, axis=-1)
    wanted = (1 - np.asarray(uniform)[..., None]) * reached[..., -1:]  # in (0, total]
    return np.count_nonzero(reached < wanted, axis=-1)  # type: ignore[no-any-return]


_RULES: dict[str, Callable[[Sampling], Rule]] = {
    ExactRule.name: ExactRule,
    ResidualRule.name: lambda sampling: ResidualRule(sampling, np.random.default_rng(sampling.seed)),
}


def make_rule(name: str, sampling: Sampling) -> Rule:
    """The rule of this name.

    Raises:
        UsageError: there is none.
    """
    check_rule(name)
    return _RULES[name](sampling)
