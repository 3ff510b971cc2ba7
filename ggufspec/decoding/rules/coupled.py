"""Coupled sampling (shared-seed Gumbel-max): a drafted token is accepted where it is the target's own choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ggufspec.decoding.grammar import Path
from ggufspec.decoding.noise import choose, choose_full
from ggufspec.decoding.rules.base import AcceptanceResult, DraftToken, TextRule
from ggufspec.decoding.sampling import Candidates, Logits, Sampling, candidates, likeliest

Numbers = npt.NDArray[Any]  # float64; the tests' exact enumeration has Fractions


class CoupledRule(TextRule):
    """Greedy at temperature 0, keyed noise above: accept while the draft is the target's own choice.

    Source: Daliri et al. 2024, arXiv:2408.07978.
    """

    name = "exact"
    lossless = True
    may_trim = True

    def __init__(self, sampling: Sampling, path: Path | None = None) -> None:
        super().__init__(sampling, path)

    def draft_token(self, logits: Logits, position: int) -> DraftToken:
        if self._path is None and self.sampling.truncates:
            return DraftToken(*self._drawn(likeliest(logits, self.sampling), position))
        return DraftToken(*(self._choose(logits, position) or self._choose_freely(logits, position)))

    def agreement(self, logits: Logits, position: int, token: int) -> float:
        return float(self.draft_token(logits, position).token == token)

    def _judge(self, rows: npt.NDArray[np.float32], proposals: Sequence[DraftToken], position: int) -> AcceptanceResult:
        for i, proposal in enumerate(proposals):
            row = self.penalised(rows[i], position + i)
            own = self._choose(row, position + i)
            if own is None:
                return AcceptanceResult(i, None)
            if proposal.token != own[0] and not self._keeps(row, proposal.token, position + i):
                return AcceptanceResult(i, own[0])
        last = position + len(proposals)
        own = self._choose(self.penalised(rows[len(proposals)], last), last)
        return AcceptanceResult(len(proposals), None if own is None else own[0])

    def _keeps(self, row: Logits, token: int, position: int) -> bool:  # noqa: ARG002 - for the lossy rules
        """Whether a drafted token stays though the target's own choice is another."""
        return False

    def _choose(self, logits: Logits, position: int) -> tuple[int, Candidates | None] | None:
        chosen = self._choose_freely(logits, position)
        if self.permits(chosen[0], position):
            return chosen
        masked = self._masked(logits, position)
        return None if masked is None else self._choose_freely(masked, position)

    def _choose_freely(self, logits: Logits, position: int) -> tuple[int, Candidates | None]:
        if not self.sampling.truncates:
            return choose_full(logits, self.sampling.temperature, self.sampling.seed, position), None
        return self._drawn(candidates(logits, self.sampling), position)

    def _drawn(self, q: Candidates, position: int) -> tuple[int, Candidates]:
        return choose(q.ids, q.scores, self.sampling.seed, position), q
