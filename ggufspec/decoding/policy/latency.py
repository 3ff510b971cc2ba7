"""Seconds of one batch by its width, T(n), refreshed by every batch that runs. Pure: no model, clock or I/O.

It is neither flat nor monotonic, so that three tokens may be faster padded to four. It also moves: the machine gets
busy, a context gets deep, which all widths feel alike; and single widths may have been measured wrongly. The seconds of
a width are therefore (its own point) × (a factor shared by all), and both are estimated from the batches as they run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, inf, log, sqrt

import numpy as np

from ggufspec.llamacpp.options import SLACK

_CLEARLY = 0.97  # another width is taken if it needs less than this share; smaller gains are within the noise
_FINE, _STEP = 16, 8  # wider batches have a multiple's width: fewer graphs, and fewer widths to learn
_MOVED = 0.02  # nats that a width must have moved before the best widths are looked for again

# Of the filter in `observe`: standard deviations in nats
_NOISE = 0.1  # of one batch's time
_SHARED, _SHARED_STEP = 0.2, 0.03  # of the shared factor: at first, and its drift from batch to batch
_MEASURED, _GUESSED, _OWN_STEP = 0.05, 0.3, 0.003  # of a width's own point, measured or not; its drift
_RESHAPED = 0.3  # of what all widths feel alike: by how much a single token's own point may differ from that
_SURPRISE = 2.0  # standard deviations beyond which a time is cut off
_CUT = log(2)  # what is believed of a surprise that is not the first


class LatencyModel:
    """Seconds of one batch by its width; refreshed by every batch that runs.

    What is asked of more tokens than the widest batch holds is an IndexError.

    Args:
        points: measured seconds by width, at least one. Widths between them are interpolated. Beyond the last, the
            slope of the last segment goes on, but not less than that of all points: they may end in a dip.
        widths: the widths that may be used (strict mode: one class); None: up to ``limit``, beyond 16 by 8.
        switch_s: what a batch costs more whose width is not the last one's, for a new graph.
        trusted: whether the measurement was undisturbed.
        limit: the widest batch that the context allows; None: the last of ``points``. ``widths`` goes before it.
        can_pad: whether the model can decode padding; without it a batch is as wide as its tokens.

    Raises:
        ValueError: there is no point or no width, one of them is not positive, or padding is needed but impossible.
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

        # State of the filter: index 0 is the shared factor, the others are the widths that are known, by `_index`.
        # Lists, and not arrays: for so few numbers, between two batches that empty the caches, they take half as long.
        self._widths = sorted(points)
        self._index = {width: index for index, width in enumerate(self._widths, 1)}
        self._state = [0.0, *(log(points[width]) for width in self._widths)]
        self._covariance = [[0.0] * len(self._state) for _ in self._state]
        for index in range(len(self._state)):
            spread = (_MEASURED if trusted else _GUESSED) if index else _SHARED
            self._covariance[index][index] = spread**2
        self._last_width = 0
        self._surprises = [0.0] * len(self._state)  # nats by which the last batch was off, and that of each width

        self._factor = 1.0
        self._best = [0] * (self.limit + 1)
        self._by_width: list[float] = []
        self._build()

    def width(self, count: int) -> int:
        """The fastest width that may be used and holds ``count`` tokens, 0 … ``limit``.

        It is the smallest one unless a wider one is clearly faster, and it stays until another one is. A single token
        is never padded: points that suggest it are wrong, and would never be corrected.
        """
        return self._best[count]

    def seconds(self, count: int) -> float:
        return self._seconds[count] * self._factor

    def up_to(self, most: int, last: int | None = None) -> list[float]:
        """Seconds of batches of 1 … ``most`` tokens at their widths, after one of width ``last`` if that is given."""
        if most > self.limit:
            raise IndexError(most)
        factor, switch_s = self._factor, 0.0 if last is None else self.switch_s
        widths = zip(self._seconds[1 : most + 1], self._best[1 : most + 1], strict=True)
        return [seconds * factor + (switch_s if width != last else 0.0) for seconds, width in widths]

    def observe(self, width: int, seconds: float) -> None:
        """A batch of this width took so long; to be called in the order in which batches ran.

        A Kalman filter of log seconds = shared factor + the width's own, which separates one from the other by what the
        other widths do. A time out of line moves it little. If the next batch is out of line the same way, the load
        has changed; if only the next one of this width is, the width has. Widths beyond the limit and times that no
        clock saw are left out.
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
        # of this batch's log seconds with every part of the state
        with_all = [shared + own for shared, own in zip(covariance[0], covariance[index], strict=True)]
        variance = with_all[0] + with_all[index] + _NOISE**2
        cut = _SURPRISE * sqrt(variance)
        surprise = off if abs(off) > cut else 0.0
        changed = next((part for part in (0, index) if surprise * surprises[part] > 0), None)
        surprises[0] = surprises[index] = surprise
        if changed is not None:
            cut = max(cut, _CUT)
            more = min(abs(off), cut) ** 2
            covariance[changed][changed] += more
            with_all[changed] += more
            variance += more
        believed = min(max(off, -cut), cut)
        for part, (row, common) in enumerate(zip(covariance, with_all, strict=True)):
            gain = common / variance
            state[part] += gain * believed
            row[:] = [known - gain * other for known, other in zip(row, with_all, strict=True)]
        single = self._index.get(self._best[1], index)  # what drafts must beat, and what they keep from being timed
        if single != index:
            covariance[single][single] += (_RESHAPED * believed * with_all[0] / variance) ** 2

        self._factor = exp(state[0])
        if any(abs(now - built) > _MOVED for now, built in zip(state[1:], self._built, strict=True)):
            self._build()

    def doubt(self, width: int) -> float:
        """Standard deviation, in nats, of a batch of this width."""
        index, covariance = self._index.get(width), self._covariance
        if index is None:  # neither measured nor run
            return sqrt(covariance[0][0] + _GUESSED**2)
        return sqrt(covariance[0][0] + 2 * covariance[0][index] + covariance[index][index])

    def allows(self, width: int) -> bool:
        """Whether batches may have this width."""
        return width in self._allowed

    def loosen(self, width: int, spread: float) -> None:
        """What a width takes differs from what was known by ``spread`` nats, up or down."""
        if index := self._index.get(width):
            self._covariance[index][index] += spread**2

    def move(self, nats: float, spread: float) -> None:
        """All widths take exp(``nats``) times as long, give or take ``spread`` nats: known from something else."""
        self._state[0] += nats
        self._covariance[0][0] += spread**2
        self._factor = exp(self._state[0])

    def become(self, measured: LatencyModel) -> None:
        """Go on from another measurement of the same model."""
        vars(self).update(vars(measured))

    def points(self) -> dict[int, float]:
        """Seconds by width as they are now, of the widths that were measured or have run."""
        return {width: seconds * self._factor for width, seconds in self.own_points().items()}

    def own_points(self) -> dict[int, float]:
        """The same without what all widths have in common now: what to cache."""
        return {width: exp(self._state[index]) for width, index in sorted(self._index.items())}

    def _add(self, width: int) -> int:
        """Make a width that was interpolated one of its own; its index."""
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
        """Seconds and best width of every count, the shared factor aside."""
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
