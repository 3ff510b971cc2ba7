"""Speculative sampling (rejection): accept by p / q, and draw from the residual distribution after a rejection.

The text has the target's distribution if every drafted token was drawn from the ``q`` that comes with it, and is
verified whatever token it is. Drafting may stop for reasons known before a draw, but never because of the drawn token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ggufspec.decoding.grammar import GrammarPath
from ggufspec.decoding.rules.base import AcceptanceResult, AcceptanceRule, DraftToken
from ggufspec.decoding.rules.distribution import Distribution, Numbers
from ggufspec.decoding.sampling import Logits, Sampling, TokenCandidates, token_candidates
from ggufspec.schema.rounds import AddedToken, DrawnToken, JudgedToken


class SpeculativeRule(AcceptanceRule):
    """Rule that accepts x with probability min(1, p(x) / q(x)) and samples from max(p - q, 0) after a rejection.

    Uniform variables are taken from ``rng`` (seeded by ``sampling`` by default) in this order: one for each drafted
    token; then, in a verification, one for each drafted token up to the first rejection, and one for the added token.

    Source: Leviathan et al. 2023, Algorithm 1 (arXiv:2211.17192).
    """

    kind = "residual"
    may_trim = False

    def __init__(
        self, sampling: Sampling, rng: np.random.Generator | None = None, path: GrammarPath | None = None
    ) -> None:
        super().__init__(sampling, path)
        self._draws = Draws(rng or np.random.default_rng(sampling.seed))

    def draft_token(self, logits: Logits, position: int) -> DraftToken:
        q = self._q(logits, position)
        return DraftToken(int(q.ids[self._draws.draw(q.probabilities())]), q, self._recorded(logits))

    def agreement(self, logits: Logits, position: int, token: int) -> float:
        return Distribution.of(self._q(logits, position)).probability(token)

    def _q(self, logits: Logits, position: int) -> TokenCandidates:
        left = self._left(logits, position)
        return token_candidates(logits, self.sampling) if left is None else left

    def _left(self, row: Logits, position: int) -> TokenCandidates | None:
        """Return the candidates in a row that grammar and sampling permit, or None if they permit no token."""
        masked = self._masked(row, position)
        return None if masked is None else token_candidates(masked, self.sampling)

    def _judge(self, rows: Logits, drafted: Sequence[DraftToken], position: int) -> AcceptanceResult:
        def target(i: int) -> Distribution | None:
            left = self._left(self.penalised(rows[i], position + i), position + i)
            return None if left is None else Distribution.of(left)

        return verify_residual(target, [(one.token, _drawn_from(one)) for one in drafted], self._draws)

    # ---- the record

    def record(self, spell: Callable[[int], str]) -> None:
        super().record(spell)
        self._draws.drawn = self._recording.uniforms

    def _q_of(self, drafted: DraftToken, row: Logits, position: int) -> float:  # noqa: ARG002
        return _drawn_from(drafted).probability(drafted.token)

    def _judged(self, row: Logits, token: int, position: int, q: float) -> JudgedToken:
        seen, left = self._seen(row, token, position), self._left(row, position)
        if left is None:
            return JudgedToken(seen, p=0.0, ratio=0.0, masked=True)
        p, recorder = Distribution.of(left).probability(token), self._recording
        uniform = recorder.uniforms[position - recorder.position]
        return JudgedToken(seen, p, p / q, masked=self._masks(row, left), uniform=uniform)

    def _added(self, row: Logits, token: int, position: int) -> AddedToken:
        recorder, left = self._recording, self._left(row, position)
        assert left is not None
        p = Distribution.of(left)
        probabilities, of_residual = p.probabilities, False
        if rejected := recorder.drafted[position - recorder.position :]:
            q = _drawn_from(rejected[0]).at(p.ids)
            probabilities, of_residual = residual(p.probabilities, q), bool((p.probabilities > q).any())
        index, reached = int(p.ids.searchsorted(token)), probabilities.cumsum()
        before = float(reached[index - 1]) if index else 0.0
        return replace(
            super()._added(row, token, position),
            distribution="residual" if of_residual else "p",
            probability=float(probabilities[index]),
            drawn=DrawnToken(recorder.uniforms[-1], before, float(reached[index]), float(reached[-1])),
        )

    def _masks(self, row: Logits, left: TokenCandidates) -> bool:
        return self._path is not None and not np.array_equal(token_candidates(row, self.sampling).ids, left.ids)


def _drawn_from(drafted: DraftToken) -> Distribution:
    return Distribution.point(drafted.token) if drafted.q is None else Distribution.of(drafted.q)


class Draws:
    """Random decisions, each from one uniform variable. If ``drawn`` is a list, the variables are appended to it."""

    drawn: list[float] | None = None

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def accept(self, probability: Any) -> bool:
        return bool(self._uniform() < probability)

    def draw(self, probabilities: Numbers) -> int:
        return int(pick(probabilities, self._uniform()))

    def _uniform(self) -> float:
        uniform = self._rng.random()
        if self.drawn is not None:
            self.drawn.append(uniform)
        return uniform


def verify_residual(
    target: Callable[[int], Distribution | None], drafted: Sequence[tuple[int, Distribution]], draws: Draws
) -> AcceptanceResult:
    """Accept drafted tokens by speculative sampling, each with the distribution that it was drawn from.

    ``target(i)`` is the target's distribution after the first i drafted tokens, None if nothing may follow them; it is
    called for i = 0, 1, … as far as needed.
    """
    for i, (token, q) in enumerate(drafted):
        p, x = target(i), np.array([token])
        if p is None:
            return AcceptanceResult(i, None)
        if not draws.accept(acceptance_probability(p.at(x), q.at(x))[0]):
            return AcceptanceResult(i, int(p.ids[draws.draw(residual(p.probabilities, q.at(p.ids)))]))
    p = target(len(drafted))
    return AcceptanceResult(len(drafted), None if p is None else int(p.ids[draws.draw(p.probabilities)]))


def acceptance_probability(p: Numbers, q: Numbers) -> Numbers:
    """Return min(1, p / q) for tokens with target probabilities ``p`` and draft probabilities ``q`` > 0."""
    return np.minimum(1, p / q)


def residual(p: Numbers, q: Numbers) -> Numbers:
    """Return max(p - q, 0), normalised on the last axis; ``p`` and ``q`` are the probabilities of the same ids.

    If the difference is 0 everywhere, only rounding can have caused the rejection, and the result is ``p``.
    """
    excess = np.maximum(p - q, 0)
    total = excess.sum(axis=-1, keepdims=True)
    return np.where(total > 0, excess / np.where(total > 0, total, 1), p)


def pick(probabilities: Numbers, uniform: Any) -> Numbers:
    """Return the index that ``uniform`` in [0, 1) draws from (…, n) probabilities; never an index of probability 0."""
    reached = np.cumsum(probabilities, axis=-1)
    wanted = (1 - np.asarray(uniform)[..., None]) * reached[..., -1:]  # in (0, total]
    return np.count_nonzero(reached < wanted, axis=-1)  # type: ignore[no-any-return]
