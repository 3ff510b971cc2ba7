"""Coupled sampling (shared-seed Gumbel-max): a drafted token is accepted if it is the target's own choice.

Every emitted token is the target's own sample for (seed, position), so any drafter and any stopping rule give the same
text as target-only. At temperature 0 this sample is the greedy choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ggufspec.decoding.noise import choose_full, choose_with_noise, gumbel
from ggufspec.decoding.rules.base import AcceptanceResult, AcceptanceRule, DraftToken, log_probabilities
from ggufspec.decoding.rules.distribution import Distribution
from ggufspec.decoding.sampling import Logits, TokenCandidates, likeliest, token_candidates
from ggufspec.schema.rounds import JudgedToken, NoisyScore, OwnChoice

# (token, candidates left by truncation or None without truncation, masked row if the grammar forced another choice)
Choice = tuple[int, TokenCandidates | None, Logits | None]


class CoupledRule(AcceptanceRule):
    """Rule that accepts drafted tokens while they are the target's own choice.

    Source: Daliri et al. 2024, arXiv:2408.07978.
    """

    kind = "exact"
    may_trim = True

    def draft_token(self, logits: Logits, position: int) -> DraftToken:
        token, q, _ = self._draft(logits, position)
        return DraftToken(token, q, self._recorded(logits))

    def agreement(self, logits: Logits, position: int, token: int) -> float:
        return float(self._draft(logits, position)[0] == token)

    def _draft(self, logits: Logits, position: int) -> Choice:
        if self._path is None and self.sampling.truncates:
            return self._drawn(likeliest(logits, self.sampling), position)
        return self._choose(logits, position) or self._choose_freely(logits, position)

    def _judge(self, rows: Logits, drafted: Sequence[DraftToken], position: int) -> AcceptanceResult:
        for i, one in enumerate(drafted):
            row = self.penalised(rows[i], position + i)
            own = self._choose(row, position + i)
            if own is None:
                return AcceptanceResult(i, None)
            if one.token != own[0] and not self._accepts(row, one.token, position + i):
                return AcceptanceResult(i, own[0])
        last = position + len(drafted)
        own = self._choose(self.penalised(rows[len(drafted)], last), last)
        return AcceptanceResult(len(drafted), None if own is None else own[0])

    def _accepts(self, row: Logits, token: int, position: int) -> bool:  # noqa: ARG002 - for the lossy rules
        """Return True if a drafted token is accepted although it is not the target's own choice."""
        return False

    def _choose(self, logits: Logits, position: int) -> Choice | None:
        """Return the target's own choice; None if nothing is permitted."""
        chosen = self._choose_freely(logits, position)
        if self.permits(chosen[0], position):
            return chosen
        masked = self._masked(logits, position)
        return None if masked is None else (*self._choose_freely(masked, position)[:2], masked)

    def _choose_freely(self, logits: Logits, position: int) -> Choice:
        if not self.sampling.truncates:
            return choose_full(logits, self.sampling.temperature, self.sampling.seed, position), None, None
        return self._drawn(token_candidates(logits, self.sampling), position)

    def _drawn(self, q: TokenCandidates, position: int) -> Choice:
        return choose_with_noise(q.ids, q.scores, self.sampling.seed, position), q, None

    # ---- the record

    def _q_of(self, drafted: DraftToken, row: Logits, position: int) -> float:
        return self._p(self._draft(row, position), row, drafted.token)

    def _judged(self, row: Logits, token: int, position: int, q: float) -> JudgedToken:
        seen, choice = self._seen(row, token, position), self._choose(row, position)
        if choice is None:
            return JudgedToken(seen, p=0.0, ratio=0.0, masked=True)
        own, p, of_own = choice[0], self._p(choice, row, token), self._sum(choice, row, choice[0], position)
        assert of_own is not None
        return JudgedToken(
            seen,
            p=p,
            ratio=p / q,
            masked=choice[2] is not None,
            sum=self._sum(choice, row, token, position),
            own=OwnChoice(own, self._recording.spell(own), self._p(choice, row, own), of_own),
        )

    def _p(self, choice: Choice, row: Logits, token: int) -> float:
        _, left, masked = choice
        if left is not None:
            return Distribution.of(left).probability(token)
        log_p = log_probabilities(row if masked is None else masked, self.sampling.temperature)
        return float(np.exp(log_p[token]))

    def _sum(self, choice: Choice, row: Logits, token: int, position: int) -> NoisyScore | None:
        """Return the score and noise that the rule compares; None for an excluded token."""
        (own, left, masked), sampling, score = choice, self.sampling, -np.inf
        if sampling.temperature == 0:
            if token == own or self.permits(token, position):
                score = float(row[token]) - float(row[own])
        elif left is None:
            chosen_from = row if masked is None else masked
            score = (float(chosen_from[token]) - float(chosen_from.max())) / sampling.temperature
        else:
            score = left.scores[left.ids == token].max(initial=-np.inf)
        if not np.isfinite(score):
            return None
        noise = gumbel(sampling.seed, position, np.array([token]))[0] if sampling.temperature else 0.0
        return NoisyScore(float(score), float(noise))
