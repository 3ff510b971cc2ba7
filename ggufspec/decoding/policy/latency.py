"""Seconds of one batch by its size, T(n), refreshed by every batch that runs. Pure: no model, clock or I/O.

T(n) is neither flat nor monotonic: three tokens may be faster padded to four. It also moves: a busy machine or a deep
context affects all batch sizes alike, and single sizes may have been measured wrongly. The seconds of a batch size are
therefore (its own point) × (a factor shared by all), and both are estimated from the batches as they run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, inf, log, sqrt

import numpy as np

from ggufspec.llamacpp.options import SLACK

_CLEARLY = 0.97  # another batch size is chosen if it needs less than this share; smaller gains are noise
_FINE, _STEP = 16, 8  # larger batches are padded to multiples: fewer graphs, and fewer sizes to learn
_MOVED = 0.02  # nats that a batch size must have moved before the best ones are searched again

# Standard deviations of the filter in `observe`, in nats
_NOISE = 0.1  # one batch's time
_SHARED, _SHARED_STEP = 0.2, 0.03  # shared factor: at first, and its drift from batch to batch
_MEASURED, _GUESSED, _OWN_STEP = 0.05, 0.3, 0.003  # a batch size's own point, measured or not; its drift
_RESHAPED = 0.3  # how much a single token's own point may differ from what all sizes share
_SURPRISE = 2.0  # standard deviations beyond which a time is cut off
_CUT = log(2)  # how much of a repeated surprise is believed


class LatencyModel:
    """Seconds of one batch by its size; refreshed by every batch that runs.

    Asking for more tokens than the largest batch holds is an IndexError.

    Args:
        points: measured seconds by batch size, at least one. Sizes between them are interpolated. Beyond the last, the
            slope of the last segment goes on, but at least that of all points: they may end in a dip.
        widths: allowed batch sizes (strict mode: one class); None: up to ``limit``, beyond 16 in steps of 8.
        switch_s: extra seconds when the batch size changes, for a new graph.
        trusted: True if the measurement was undisturbed.
        limit: the largest batch that the context allows; None: the last of ``points``. ``widths`` takes precedence.
        can_pad: True if the model can decode padding; otherwise a batch has exactly its tokens.

    Raises:
        ValueError: there is no point or no batch size, one of them is not positive, or padding is needed but
            impossible.
    """

    def __init__(
        self,
        points: Mapping[int, float],
        *,
        widths: Sequence[int] | None = None,
        switch_s: float = 0.0,
        trusted: bool = True,
        limit: int | None = None,
        can_pad: bool = True,
    ) -> None:
        if not points or min(points) < 1 or not all(0 < seconds < inf for seconds in points.values()):
            raise ValueError("a latency model is seconds by width, all positive")
        self.limit = max(widths) if widths else limit or max(points)
        self.switch_s = switch_s
        self.trusted = trusted
        self.can_pad = can_pad
        self.widths = None if widths is None else tuple(sorted(widths))
        every = (width for width in range(1, self.limit + 1) if width <= _FINE or width % _STEP == 0 or not can_pad)
        self._allowed = frozenset((*every, self.limit) if widths is None else widths)
        if not self._allowed or min(self._allowed) < 1:
            raise ValueError("a latency model needs a width that may be used")
        if not can_pad and len(self._allowed) != self.limit:
            raise ValueError("only some widths may be used, and the model cannot pad")

        # State of the filter: index 0 is the shared factor, the others are the known batch sizes, by `_index`. Lists,
        # not arrays: for so few numbers, between two batches that empty the CPU caches, they take half as long.
        self._widths = sorted(points)
        self._index = {width: index for index, width in enumerate(self._widths, 1)}
        self._state = [0.0, *(log(points[width]) for width in self._widths)]
        self._covariance = [[0.0] * len(self._state) for _ in self._state]
        for index in range(len(self._state)):
            spread = (_MEASURED if trusted else _GUESSED) if index else _SHARED
            self._covariance[index][index] = spread**2
        self._last_width = 0
        self._surprises = [0.0] * len(self._state)  # nats by which the last batch was off, and each size's last one

        self._factor = 1.0
        self._best = [0] * (self.limit + 1)
        self._by_width: list[float] = []
        self._build()

    def width(self, count: int) -> int:
        """Return the fastest allowed batch size that holds ``count`` tokens, 0 … ``limit``.

        It is the smallest one unless a larger one is clearly faster, and it stays until another one is. A single token
        is never padded: points that suggest it are wrong, and would never be corrected.
        """
        return self._best[count]

    def seconds(self, count: int) -> float:
        return self._seconds[count] * self._factor

    def up_to(self, most: int, last: int | None = None) -> list[float]:
        """Return the seconds of batches of 1 … ``most`` tokens at their batch sizes, after one of size ``last``."""
        if most > self.limit:
            raise IndexError(most)
        factor, switch_s = self._factor, 0.0 if last is None else self.switch_s
        widths = zip(self._seconds[1 : most + 1], self._best[1 : most + 1], strict=True)
        return [seconds * factor + (switch_s if width != last else 0.0) for seconds, width in widths]

    def observe(self, width: int, seconds: float) -> None:
        """Observe the seconds of a batch of this size; call in the order in which batches ran.

        A Kalman filter of log seconds = shared factor + the size's own, which tells the two apart by what other sizes
        do. A time out of line moves it little. If the next batch is out of line the same way, the load has changed, by
        as much as both agree on; if only the next one of this size is, the size has. Sizes beyond the limit and times
        of zero are ignored.
        """
        if seconds <= 0 or not 1 <= width <= self.limit:
            return
        if self._last_width not in (0, width):
            seconds = max(seconds - self.switch_s, seconds / 2)
        self._last_width = width
        index = self._index.get(width) or self._add(width)

        state, covariance, surprises = self._state, self._covariance, self._surprises
        for part, row in enumerate(covariance):
            row[part] += _OWN_STEP**2
        covariance[0][0] += _SHARED_STEP**2
        off = log(seconds) - state[0] - state[index]
        # covariance of this batch's log seconds with every part of the state
        with_all = [shared + own for shared, own in zip(covariance[0], covariance[index], strict=True)]
        variance = with_all[0] + with_all[index] + _NOISE**2
        cut = _SURPRISE * sqrt(variance)
        surprise = off if abs(off) > cut else 0.0
        changed = next((part for part in (0, index) if surprise * surprises[part] > 0), None)
        agreed = 0.0 if changed is None else min(abs(surprise), abs(surprises[changed]))
        surprises[0] = surprises[index] = surprise
        if changed is not None:
            cut = max(cut, _CUT, agreed)
            more = min(abs(off), cut) ** 2
            covariance[changed][changed] += more
            with_all[changed] += more
            variance += more
        believed = min(max(off, -cut), cut)
        for part, (row, common) in enumerate(zip(covariance, with_all, strict=True)):
            gain = common / variance
            state[part] += gain * believed
            row[:] = [known - gain * other for known, other in zip(row, with_all, strict=True)]
        single = self._index.get(self._best[1], index)  # drafts must beat it, and keep it from being timed
        if single != index:
            covariance[single][single] += (_RESHAPED * believed * with_all[0] / variance) ** 2

        self._factor = exp(state[0])
        if any(abs(now - built) > _MOVED for now, built in zip(state[1:], self._built, strict=True)):
            self._build()

    def doubt(self, width: int) -> float:
        """Return the standard deviation, in nats, of a batch of this size."""
        index, covariance = self._index.get(width), self._covariance
        if index is None:  # neither measured nor run
            return sqrt(covariance[0][0] + _GUESSED**2)
        return sqrt(covariance[0][0] + 2 * covariance[0][index] + covariance[index][index])

    def allows(self, width: int) -> bool:
        """Return True if batches may have this size."""
        return width in self._allowed

    def loosen(self, width: int, spread: float) -> None:
        """Widen the uncertainty of a batch size by ``spread`` nats, up or down."""
        if index := self._index.get(width):
            self._covariance[index][index] += spread**2

    def move(self, nats: float, spread: float) -> None:
        """Scale all seconds by exp(``nats``), give or take ``spread`` nats, on outside knowledge."""
        self._state[0] += nats
        self._covariance[0][0] += spread**2
        self._factor = exp(self._state[0])

    def become(self, measured: LatencyModel) -> None:
        """Continue from another measurement of the same model."""
        vars(self).update(vars(measured))

    def points(self) -> dict[int, float]:
        """Return the present seconds by batch size, for sizes that were measured or have run."""
        return {width: seconds * self._factor for width, seconds in self.own_points().items()}

    def own_points(self) -> dict[int, float]:
        """Return the seconds by batch size without the shared factor: the values to cache."""
        return {width: exp(self._state[index]) for width, index in sorted(self._index.items())}

    def _add(self, width: int) -> int:
        """Give an interpolated batch size its own point; return its index."""
        index = self._index[width] = len(self._state)
        self._widths = sorted(self._index)
        self._state.append(log(self._by_width[width]))
        self._surprises.append(0.0)
        for row in self._covariance:
            row.append(0.0)
        self._covariance.append([0.0] * index + [_GUESSED**2])
        self._built = self._state[1:]
        return index

    def _build(self) -> None:
        """Compute seconds and best batch size of every count, without the shared factor."""
        self._built = self._state[1:]
        known = [exp(self._state[self._index[width]]) for width in self._widths]
        first, last = self._widths[0], self._widths[-1]
        by_width = self._by_width = np.interp(np.arange(self.limit + 1), self._widths, known).tolist()
        if last > first:
            whole, end = ((known[-1] - known[i]) / (last - self._widths[i]) for i in (0, -2))
            slope = max(whole, end, 0.0)
            for width in range(last + 1, self.limit + 1):
                by_width[width] = known[-1] + slope * (width - last)

        own = fastest = self.limit
        for count in range(self.limit, 0, -1):
            if count in self._allowed:
                own = count
                if by_width[count] <= by_width[fastest]:
                    fastest = count
            best = self._best[count] or own
            if self.can_pad and own > 1 and fastest - count <= SLACK and by_width[fastest] < _CLEARLY * by_width[best]:
                best = fastest
            self._best[count] = best
        self._seconds = [0.0, *(by_width[width] for width in self._best[1:])]
