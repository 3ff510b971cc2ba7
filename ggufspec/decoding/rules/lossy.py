"""Lossy acceptance: drafted tokens that the target finds good enough, top-k and typical."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ggufspec.decoding.grammar import Path
from ggufspec.decoding.rules.coupled import CoupledRule
from ggufspec.decoding.sampling import Floats, Logits, Sampling

Numbers = npt.NDArray[Any]  # float64; the tests' exact enumeration has Fractions


class TopKRule(CoupledRule):
    """Lossy: a drafted token also stays if it is among the target's ``count`` most likely; ties go to the lower id.

    Temperature and truncation have no part in that, nor has the grammar, which must permit the token.
    """

    lossless = False

    def __init__(self, name: str, sampling: Sampling, path: Path | None = None) -> None:
        super().__init__(sampling, path)
        self.name = name
        self.count = int(name.removeprefix("top-k:"))

    def _keeps(self, row: Logits, token: int, position: int) -> bool:
        return bool(self.rank(row, token) <= self.count and row[token] > -np.inf) and self.permits(token, position)

    def rank(self, row: Logits, token: int) -> int:
        """The place of a token among the target's most likely, from 1."""
        return int(np.count_nonzero(row > row[token]) + np.count_nonzero(row[:token] == row[token])) + 1


class TypicalRule(CoupledRule):
    """Lossy: a drafted token also stays if its probability is above ``min(epsilon, sqrt(epsilon) * exp(-entropy))``.

    Both are of the target's distribution over the whole vocabulary at the sampling temperature, at 1 if that is 0: a
    one-hot row would keep nothing but the target's own choice. The grammar must permit the token.

    Source: Cai et al. 2024, section 3.3.1 (arXiv:2401.10774), with delta = sqrt(epsilon) as in its experiments.
    """

    lossless = False

    def __init__(self, name: str, sampling: Sampling, path: Path | None = None) -> None:
        super().__init__(sampling, path)
        self.name = name
        self.epsilon = float(name.removeprefix("typical:"))

    def _keeps(self, row: Logits, token: int, position: int) -> bool:
        probability, _, bar = self.weigh(row, token)
        return probability > bar and self.permits(token, position)

    def weigh(self, row: Logits, token: int) -> tuple[float, float, float]:
        """A token's probability, the distribution's entropy in nats, and the bar that it sets."""
        log_p = log_probabilities(row, self.sampling.temperature or 1.0)
        possible = log_p[log_p > -np.inf]
        entropy = -(np.exp(possible) * possible).sum()
        bar = min(self.epsilon, self.epsilon**0.5 * np.exp(-entropy))
        return float(np.exp(log_p[token])), float(entropy), float(bar)


def log_probabilities(logits: Logits, temperature: float) -> Floats:
    """(vocab,) logarithms of the probabilities at a temperature above 0."""
    scores: Floats = (logits.astype(np.float64) - logits.max()) / temperature
    scores -= np.log(np.exp(scores).sum())
    return scores
