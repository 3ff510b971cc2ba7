"""Lossy acceptance of drafted tokens that are likely enough for the target. The text depends on the draft."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ggufspec.decoding.rules.base import log_probabilities
from ggufspec.decoding.rules.coupled import CoupledRule
from ggufspec.decoding.sampling import Logits
from ggufspec.schema.rounds import JudgedToken, TokenRank, TypicalValues


class TopKRule(CoupledRule):
    """Rule that also accepts drafted tokens among the target's ``number`` likeliest; ties go to the lower id.

    Temperature, truncation and grammar do not affect this rank, but the grammar must permit the token.
    """

    kind = "top-k"

    def _accepts(self, row: Logits, token: int, position: int) -> bool:
        return bool(self.rank(row, token) <= self.number and row[token] > -np.inf) and self.permits(token, position)

    def rank(self, row: Logits, token: int) -> int:
        return int(np.count_nonzero(row > row[token]) + np.count_nonzero(row[:token] == row[token])) + 1

    def _judged(self, row: Logits, token: int, position: int, q: float) -> JudgedToken:
        judged = super()._judged(row, token, position, q)
        return (
            judged if judged.own is None else replace(judged, rank=TokenRank(self.rank(row, token), int(self.number)))
        )


class TypicalRule(CoupledRule):
    """Rule that also accepts drafted tokens with probability above ``min(epsilon, sqrt(epsilon) * exp(-entropy))``.

    Probability and entropy are the target's over the whole vocabulary at the sampling temperature. Temperature 0 counts
    as 1, because a one-hot row would accept only the target's own choice. The grammar must permit the token.

    Source: Cai et al. 2024, section 3.3.1 (arXiv:2401.10774), with delta = sqrt(epsilon) as in its experiments.
    """

    kind = "typical"

    def _accepts(self, row: Logits, token: int, position: int) -> bool:
        weighed = self.weigh(row, token)
        return weighed.probability > weighed.bar and self.permits(token, position)

    def weigh(self, row: Logits, token: int) -> TypicalValues:
        """Return a token's probability, the distribution's entropy in nats, and the acceptance threshold."""
        log_p = log_probabilities(row, self.sampling.temperature or 1.0)
        possible = log_p[log_p > -np.inf]
        entropy = -(np.exp(possible) * possible).sum()
        bar = min(self.number, self.number**0.5 * np.exp(-entropy))
        return TypicalValues(float(np.exp(log_p[token])), float(entropy), self.number, float(bar))

    def _judged(self, row: Logits, token: int, position: int, q: float) -> JudgedToken:
        judged = super()._judged(row, token, position, q)
        return judged if judged.own is None else replace(judged, typical=self.weigh(row, token))
