"""Speculative sampling (rejection): accept by p / q, and draw from the residual after a rejection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ggufspec.decoding.grammar import Path
from ggufspec.decoding.rules.base import AcceptanceResult, DraftToken, TextRule
from ggufspec.decoding.sampling import Candidates, Ids, Logits, Sampling, candidates

Numbers = npt.NDArray[Any]  # float64; the tests' exact enumeration has Fractions


class SpeculativeRule(TextRule):
    """Accept x with probability min(1, p(x) / q(x)); after a rejection sample from max(p - q, 0).

    Uniform variables are taken from ``rng`` in this order: one for each proposed token; then, in a verification, one
    for each drafted token up to the first rejection, and one for the token that follows.

    Source: Leviathan et al. 2023, Algorithm 1 (arXiv:2211.17192).
    """

    name = "residual"
    lossless = True
    may_trim = False

    def __init__(self, sampling: Sampling, rng: np.random.Generator, path: Path | None = None) -> None:
        super().__init__(sampling, path)
        self._chance = UniformDraws(rng)

    def listen(self, heard: Callable[[float], None]) -> None:
        """Tell every uniform variable that is taken from now on."""
        self._chance.heard = heard

    def draft_token(self, logits: Logits, position: int) -> DraftToken:
        q = self._q(logits, position)
        return DraftToken(int(q.ids[self._chance.draw(q.probabilities())]), q)

    def agreement(self, logits: Logits, position: int, token: int) -> float:
        return float(Distribution.of(self._q(logits, position)).at(np.array([token]))[0])

    def _q(self, logits: Logits, position: int) -> Candidates:
        masked = self._masked(logits, position)
        return candidates(logits if masked is None else masked, self.sampling)

    def _judge(self, rows: npt.NDArray[np.float32], proposals: Sequence[DraftToken], position: int) -> AcceptanceResult:
        def target(i: int) -> Distribution | None:
            masked = self._masked(self.penalised(rows[i], position + i), position + i)
            return None if masked is None else Distribution.of(candidates(masked, self.sampling))

        drafted = [(x.token, Distribution.point(x.token) if x.q is None else Distribution.of(x.q)) for x in proposals]
        return verify_residual(target, drafted, self._chance)


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """A distribution over the vocabulary; ids that are not listed have probability 0.

    Args:
        ids: (n,) token ids, ascending.
        probabilities: (n,) their sum is 1.
    """

    ids: Ids
    probabilities: Numbers

    @classmethod
    def of(cls, drawn_from: Candidates) -> Distribution:
        """The distribution of a token drawn from candidates."""
        return cls(drawn_from.ids, drawn_from.probabilities())

    @classmethod
    def point(cls, token: int) -> Distribution:
        """The distribution of a token that was not drawn."""
        one = np.ones(1, dtype=np.int64)  # a number that is exact with fractions too
        return cls(token * one, one)

    def at(self, ids: Ids) -> Numbers:
        """(n,) probabilities of ``ids``."""
        index = np.minimum(np.searchsorted(self.ids, ids), self.ids.size - 1)
        return np.where(self.ids[index] == ids, self.probabilities[index], 0)


class Draws(Protocol):
    """The decisions that are left to chance; an enumeration takes every one."""

    def accept(self, probability: Any) -> bool:
        """True with this probability."""
        ...

    def draw(self, probabilities: Numbers) -> int:
        """An index into (n,) probabilities."""
        ...


class UniformDraws:
    """Decisions by a generator, one uniform variable each; ``heard`` is told of it."""

    heard: Callable[[float], None] | None = None

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def accept(self, probability: Any) -> bool:
        return bool(self._uniform() < probability)

    def draw(self, probabilities: Numbers) -> int:
        return int(pick(probabilities, self._uniform()))

    def _uniform(self) -> float:
        uniform = self._rng.random()
        if self.heard is not None:
            self.heard(uniform)
        return uniform


def verify_residual(
    target: Callable[[int], Distribution | None], drafted: Sequence[tuple[int, Distribution]], chance: Draws
) -> AcceptanceResult:
    """The residual rule's verdict on drafted tokens.

    Args:
        target: the target's distribution after the first i drafted tokens, None if nothing may follow them; called for
            i = 0, 1, … as far as needed.
        drafted: the tokens, each with the distribution that it was drawn from.
        chance: the source of randomness.
    """
    for i, (token, q) in enumerate(drafted):
        p, x = target(i), np.array([token])
        if p is None:
            return AcceptanceResult(i, None)
        if not chance.accept(acceptance_probability(p.at(x), q.at(x))[0]):
            return AcceptanceResult(i, int(p.ids[chance.draw(residual(p.probabilities, q.at(p.ids)))]))
    p = target(len(drafted))
    return AcceptanceResult(len(drafted), None if p is None else int(p.ids[chance.draw(p.probabilities)]))


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
