"""The chance that a drafted token is accepted, estimated from what happened to tokens like it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

# Confidences crowd near 1, where the difference between .95 and .99 decides about long drafts.
EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.99, 0.997)
_MIDDLES = [(low + high) / 2 for low, high in pairwise((0.0, *EDGES, 1.0))]
_PLACES = 3  # the first, the second and all later places of a draft are told apart


class Calibration:
    """The chance that an offer of some confidence is kept, learned from what happened to offers like it.

    Decayed counts in bins of confidence, for all places of the draft together and for each apart. A place's bin that
    has seen little leans on the pooled bin, and that one on a forecast: the confidence itself where it foretells well,
    and the mean over all bins where it does not, weighted by how well each did so far.
    """

    PRIOR = 6.0  # observations that the forecast counts as, and the pooled bin
    DECAY = 0.98  # of a bin's counts at each of its observations: some fifty count
    CARRIED = 0.2  # of a bin's counts, from one answer to the next
    CARRIED_RUN = 6.0  # observations of runs, at most

    def __init__(self) -> None:
        bins = len(_MIDDLES)
        self._seen = [[0.0] * bins for _ in range(_PLACES + 1)]  # the last row pools all places
        self._kept = [[0.0] * bins for _ in range(_PLACES + 1)]
        self._usual = [[1 / bins] * bins for _ in range(2)]  # how often each bin was offered: first place, later places
        self._run = [0.6 * 4, 4.0]  # kept and seen beyond the first place
        self._all = [0.5 * 4, 4.0]  # kept and seen at all
        self._losses = [0.0, 1.0]  # of both forecasts, the confidence and the mean: nats, decayed
        self._outlooks: dict[int, list[tuple[float, float]]] = {}  # what was asked since the last change

    def chance(self, confidence: float, place: int) -> float:
        """That an offer at this place of a draft (0 first) is kept, if all before it are."""
        return self._chance(bisect_right(EDGES, confidence), place)

    def outlook(self, place: int) -> list[tuple[float, float]]:
        """Of each bin: how often it is offered at this place, and the chance to be kept; the first sum to 1."""
        place = min(place, _PLACES - 1)
        known = self._outlooks.get(place)
        if known is None:
            usual = enumerate(self._usual[min(place, 1)])
            known = self._outlooks[place] = [(share, self._chance(bin_, place)) for bin_, share in usual]
        return known

    @property
    def run(self) -> float:
        """The chance that a token behind a kept one is kept too."""
        return min(self._run[0] / self._run[1], 0.98)

    def fade(self) -> None:
        """Another answer begins, which may be another kind of text: what was seen so far counts for less."""
        self._outlooks.clear()
        for counts in (self._seen, self._kept):
            counts[:] = [[self.CARRIED * count for count in row] for row in counts]
        share = min(1.0, self.CARRIED_RUN / self._run[1])
        self._run = [share * count for count in self._run]

    def offered(self, confidence: float, place: int) -> None:
        """An offer was seen, whatever became of it."""
        self._outlooks.clear()
        usual = self._usual[min(place, 1)]
        usual[:] = [0.95 * share for share in usual]
        usual[bisect_right(EDGES, confidence)] += 0.05

    def observe(self, confidence: float, place: int, kept: float) -> None:
        """An offer was judged: ``kept`` is 1 or 0, or a chance between."""
        self._outlooks.clear()
        bin_ = bisect_right(EDGES, confidence)
        mean = self._all[0] / self._all[1]
        for forecast, chance in enumerate((_MIDDLES[bin_], mean)):
            loss = -kept * math.log(chance) - (1 - kept) * math.log(1 - chance)
            self._losses[forecast] = 0.98 * self._losses[forecast] + loss
        for row in (min(place, _PLACES - 1), _PLACES):
            self._seen[row][bin_] = self._seen[row][bin_] * self.DECAY + 1
            self._kept[row][bin_] = self._kept[row][bin_] * self.DECAY + kept
        self._all = [0.97 * self._all[0] + 0.03 * 0.5 + kept, 0.97 * self._all[1] + 0.03 + 1]  # never 0, never 1
        if place:
            self._run = [0.95 * self._run[0] + kept, 0.95 * self._run[1] + 1]

    def followed(self, agreements: Sequence[float]) -> None:
        """Offers at places one behind the other, judged and not drafted: they tell of runs too, half as much.

        Without that a draft that is off never looks as if a long chain of it could pay.
        """
        for before, now in pairwise(agreements):
            weight = before / 2
            kept, seen = self._run
            self._run = [(1 - 0.05 * weight) * kept + weight * now, (1 - 0.05 * weight) * seen + weight]

    def _chance(self, bin_: int, place: int) -> float:
        doubt = 1 / (1 + math.exp(min(self._losses[1] - self._losses[0], 50.0)))
        believed = (1 - doubt) * _MIDDLES[bin_] + doubt * self._all[0] / self._all[1]
        for row in (_PLACES, min(place, _PLACES - 1)):
            believed = (self._kept[row][bin_] + self.PRIOR * believed) / (self._seen[row][bin_] + self.PRIOR)
        return believed
