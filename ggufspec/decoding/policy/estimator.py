"""Online estimation of the probability that a drafted token is accepted, from earlier tokens of similar confidence.

Pure: no model, clock or I/O.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ggufspec.decoding.policy.constants import CONSTANTS
from ggufspec.planning.history import EstimatorState

# Confidences cluster near 1, where the difference between .95 and .99 decides whether long drafts pay off.
EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.99, 0.997)
_MIDDLES = [(low + high) / 2 for low, high in pairwise((0.0, *EDGES, 1.0))]
_POSITIONS = 3  # the first, the second and all later positions of a draft are counted separately


@dataclass(frozen=True, slots=True)
class DrafterPrior:
    """Assumptions about a drafter before any observation."""

    usual: tuple[float, ...]  # frequency of each confidence bin
    mean: float  # acceptance probability of a candidate, over all confidences
    run: float  # acceptance probability of a candidate after an accepted one


# Mean and run are slightly below those of Qwen2.5-Coder's answers in tests/evidence/traces, which repeat more than most
# texts: 0.87 and 0.92 for the draft model, 0.51 and 0.85 for the lookup.
MODEL = DrafterPrior((0.01, 0.02, 0.04, 0.07, 0.06, 0.08, 0.07, 0.06, 0.07, 0.05, 0.07, 0.4), 0.7, 0.8)
LOOKUP = DrafterPrior((0.05, 0.15, 0.25, 0.2, 0.1, 0.1, 0.1, 0.05, 0.0, 0.0, 0.0, 0.0), 0.3, 0.6)
# This prior was measured on the edited files described in drafters/prediction.py
PREDICTION = DrafterPrior((0.01, 0.03, 0.0, 0.03, 0.02, 0.02, 0.02, 0.02, 0.03, 0.01, 0.01, 0.8), 0.9, 0.95)


class AcceptanceEstimator:
    """Estimate of the probability that a drafter's candidate is accepted, given its confidence.

    It keeps decayed counts in confidence bins, for each draft position and pooled over all positions. A position's bin
    with few counts relies on the pooled bin, and a pooled bin with few counts on two forecasts: the confidence itself
    and the mean over all bins, weighted by their past accuracy.
    """

    def __init__(self, prior: DrafterPrior = MODEL) -> None:
        bins = len(_MIDDLES)
        self._seen = [[0.0] * bins for _ in range(_POSITIONS + 1)]  # the last row pools all positions
        self._accepted = [[0.0] * bins for _ in range(_POSITIONS + 1)]
        self._usual = [list(prior.usual) for _ in range(2)]  # frequency of each bin at the first and later positions
        self._usual_seen = [0, 0]
        self._run = [prior.run * 4, 4.0]  # accepted and observed candidates after the first position
        self._all = [prior.mean * 4, 4.0]  # accepted and observed candidates in total
        self._level, self._variance = 0.0, CONSTANTS.level_spread**2
        self._losses = [0.0, 1.0]  # decayed losses of both forecasts, the confidence and the mean, in nats
        self._outlooks: dict[int, list[tuple[float, float]]] = {}  # results of `outlook` since the last observation

    @staticmethod
    def fits(state: EstimatorState) -> bool:
        """Return True if a saved state has the same bins; another version may have saved it."""
        rows = (*state.seen, *state.accepted, *state.usual)
        pairs = [len(pair) for pair in (state.run, state.mean, state.losses)]
        return [len(row) for row in rows] == [len(_MIDDLES)] * 2 * (_POSITIONS + 2) and pairs == [2, 2, 2]

    @classmethod
    def restored(cls, state: EstimatorState) -> AcceptanceEstimator:
        """Return an estimator that continues from a saved state."""
        estimator = cls()
        estimator._seen, estimator._accepted, estimator._usual = state.seen, state.accepted, state.usual
        estimator._run, estimator._all, estimator._losses = state.run, state.mean, state.losses
        estimator._usual_seen = [round(sum(state.seen[-1]))] * 2
        return estimator

    def state(self) -> EstimatorState:
        return EstimatorState(self._seen, self._accepted, self._usual, self._run, self._all, self._losses)

    def chance(self, confidence: float, position: int) -> float:
        """Return the probability that a candidate at this position (from 0) is accepted if all before it are."""
        return self._chance(bisect_right(EDGES, confidence), position)

    def outlook(self, position: int) -> list[tuple[float, float]]:
        """Return (frequency, acceptance probability) of each bin at this position; the frequencies sum to 1."""
        position = min(position, _POSITIONS - 1)
        known = self._outlooks.get(position)
        if known is None:
            usual = enumerate(self._usual[min(position, 1)])
            known = self._outlooks[position] = [(share, self._chance(bin_, position)) for bin_, share in usual]
        return known

    @property
    def known(self) -> float:
        """Share of the estimate that comes from observations rather than from the forecasts; 0 to 1."""
        seen = sum(self._seen[_POSITIONS])
        return seen / (seen + CONSTANTS.prior)

    @property
    def spread(self) -> float:
        """Standard deviation of the drafter's level (how much better or worse it is than it seems), in nats."""
        return math.sqrt(self._variance)

    @property
    def run(self) -> float:
        """Probability that a token after an accepted one is accepted too."""
        return min(self._run[0] / self._run[1], CONSTANTS.longest_run)

    def fade(self) -> None:
        """Reduce the weight of earlier observations, because the next answer may be a different kind of text."""
        self._outlooks.clear()
        for counts in (self._seen, self._accepted):
            counts[:] = [[CONSTANTS.carried * count for count in row] for row in counts]
        self._level *= CONSTANTS.level_carried
        self._variance = CONSTANTS.level_spread**2
        for pair in (self._run, self._all):
            share = min(1.0, CONSTANTS.carried_means / pair[1])
            pair[:] = [share * count for count in pair]

    def observe_candidate(self, confidence: float, position: int) -> None:
        """Count a proposed candidate, verified or not."""
        self._outlooks.clear()
        row = min(position, 1)
        usual, seen = self._usual[row], self._usual_seen
        seen[row] += 1
        weight = max(1 - CONSTANTS.usual_decay, 1 / (CONSTANTS.usual_prior + seen[row]))
        usual[:] = [(1 - weight) * share for share in usual]
        usual[bisect_right(EDGES, confidence)] += weight

    def observe(self, confidence: float, position: int, accepted: float) -> None:
        """Observe the result of a candidate: ``accepted`` is 1 or 0, or a probability."""
        self._outlooks.clear()
        bin_ = bisect_right(EDGES, confidence)
        # Kalman filter for the level, linearised at the expected value
        expected = self._chance(bin_, position)
        self._variance = 1 / (1 / (self._variance + CONSTANTS.level_drift**2) + expected * (1 - expected))
        self._level += self._variance * (accepted - expected)
        mean = self._all[0] / self._all[1]
        for forecast, chance in enumerate((_MIDDLES[bin_], mean)):
            loss = -accepted * math.log(chance) - (1 - accepted) * math.log(1 - chance)
            self._losses[forecast] = CONSTANTS.loss_decay * self._losses[forecast] + loss
        decay = CONSTANTS.bin_decay
        for row in (min(position, _POSITIONS - 1), _POSITIONS):
            self._seen[row][bin_] = self._seen[row][bin_] * decay + 1
            self._accepted[row][bin_] = self._accepted[row][bin_] * decay + accepted
        decay = CONSTANTS.mean_decay
        self._all = [decay * self._all[0] + 0.03 * 0.5 + accepted, decay * self._all[1] + 0.03 + 1]  # never 0 or 1
        if position:
            decay = CONSTANTS.run_decay
            self._run = [decay * self._run[0] + accepted, decay * self._run[1] + 1]

    def observe_shadow_run(self, agreements: Sequence[float]) -> None:
        """Count shadow evaluations at consecutive positions as runs too, with less weight.

        Without this, long chains from a draft that is switched off would never look worthwhile.
        """
        for before, now in pairwise(agreements):
            weight = before * CONSTANTS.shadow_weight
            accepted, seen = self._run
            decay = 1 - 0.05 * weight
            self._run = [decay * accepted + weight * now, decay * seen + weight]

    def _chance(self, bin_: int, position: int) -> float:
        doubt = 1 / (1 + math.exp(min(self._losses[1] - self._losses[0], 50.0)))
        believed = (1 - doubt) * _MIDDLES[bin_] + doubt * self._all[0] / self._all[1]
        prior = CONSTANTS.prior
        for row in (_POSITIONS, min(position, _POSITIONS - 1)):
            believed = (self._accepted[row][bin_] + prior * believed) / (self._seen[row][bin_] + prior)
        return shifted(believed, self._level)


def shifted(chance: float, shift: float) -> float:
    """Return the probability whose log-odds are ``shift`` nats higher."""
    odds = chance / (1 - chance) * math.exp(shift)
    return odds / (1 + odds)
