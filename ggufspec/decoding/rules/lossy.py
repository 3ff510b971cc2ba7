"""Lossy acceptance: drafted tokens that the target finds good enough. The text depends on what was drafted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ggufspec.decoding.grammar import Path
from ggufspec.decoding.rules.base import Recorder, log_probabilities
from ggufspec.decoding.rules.coupled import CoupledRule
from ggufspec.decoding.sampling import Logits, Sampling
from ggufspec.schema.rounds import Judged, Rank, Typical


class TopKRule(CoupledRule):
    """A drafted token is also accepted if it is among the target's ``count`` likeliest; ties go to the lower id.

    Temperature and truncation have no part in that, nor has the grammar, which must permit the token.
    """

    kind = "top-k"

    def __init__(self, sampling: Sampling, count: int, path: Path | None = None) -> None:
        super().__init__(sampling, path)
        self.count = count

    @property
    def name(self) -> str:
        return f"top-k:{self.count}"

    @property
    def description(self) -> str:
        return super().description.replace("N likeliest", f"{self.count} likeliest")

    def _accepts(self, row: Logits, token: int, position: int) -> bool:
        return bool(self.rank(row, token) <= self.count and row[token] > -np.inf) and self.permits(token, position)

    def rank(self, row: Logits, token: int) -> int:
        """The rank of a token among the target's likeliest, from 1."""
        return int(np.count_nonzero(row > row[token]) + np.count_nonzero(row[:token] == row[token])) + 1

    def _judged(self, recorder: Recorder, index: int, q: float) -> Judged:
        judged = super()._judged(recorder, index, q)
        if judged.own is None:
            return judged
        return replace(judged, rank=Rank(self.rank(recorder.row(index), recorder.drafted[index].token), self.count))


class TypicalRule(CoupledRule):
    """A drafted token is also accepted if its probability is above ``min(epsilon, sqrt(epsilon) * exp(-entropy))``.

    Both are of the target's distribution over the whole vocabulary at the sampling temperature, at 1 if that is 0: a
    one-hot row would accept nothing but the target's own choice. The grammar must permit the token.

    Source: Cai et al. 2024, section 3.3.1 (arXiv:2401.10774), with delta = sqrt(epsilon) as in its experiments.
    """

    kind = "typical"

    def __init__(self, sampling: Sampling, epsilon: float, path: Path | None = None) -> None:
        super().__init__(sampling, path)
        self.epsilon = epsilon

    @property
    def name(self) -> str:
        return f"typical:{self.epsilon}"

    @property
    def description(self) -> str:
        return super().description.replace("EPS", str(self.epsilon))

    def _accepts(self, row: Logits, token: int, position: int) -> bool:
        weighed = self.weigh(row, token)
        return weighed.probability > weighed.bar and self.permits(token, position)

    def weigh(self, row: Logits, token: int) -> Typical:
        """A token's probability, the distribution's entropy in nats, and the bar that it sets."""
        log_p = log_probabilities(row, self.sampling.temperature or 1.0)
        possible = log_p[log_p > -np.inf]
        entropy = -(np.exp(possible) * possible).sum()
        bar = min(self.epsilon, self.epsilon**0.5 * np.exp(-entropy))
        return Typical(float(np.exp(log_p[token])), float(entropy), self.epsilon, float(bar))

    def _judged(self, recorder: Recorder, index: int, q: float) -> Judged:
        judged = super()._judged(recorder, index, q)
        if judged.own is None:
            return judged
        return replace(judged, typical=self.weigh(recorder.row(index), recorder.drafted[index].token))
