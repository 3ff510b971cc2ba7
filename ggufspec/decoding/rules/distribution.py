"""Probability distribution over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ggufspec.decoding.sampling import Ids, TokenCandidates

Numbers = npt.NDArray[Any]  # float64; the tests' exact enumeration uses Fractions


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Probabilities of tokens; ids that are not listed have probability 0."""

    ids: Ids  # (n,) ascending
    probabilities: Numbers  # (n,) summing to 1

    @classmethod
    def of(cls, drawn_from: TokenCandidates) -> Distribution:
        return cls(drawn_from.ids, drawn_from.probabilities())

    @classmethod
    def point(cls, token: int) -> Distribution:
        one = np.ones(1, dtype=np.int64)  # an integer, so that it is exact with Fractions too
        return cls(token * one, one)

    def at(self, ids: Ids) -> Numbers:
        """Return (n,) probabilities of ``ids``."""
        index = np.minimum(np.searchsorted(self.ids, ids), self.ids.size - 1)
        return np.where(self.ids[index] == ids, self.probabilities[index], 0)

    def probability(self, token: int) -> float:
        return float(self.at(np.array([token]))[0])
