"""Seconds per batch by batch size, T(n), updated with every batch that runs. Pure: no model, clock or I/O.

T(n) is neither flat nor monotonic: three tokens may be faster padded to four. It also changes: a busy machine or a deep
context affects all batch sizes alike, and individual sizes may have been mistimed. T(n) is therefore the product of a
point for each batch size and a factor shared by all sizes, both estimated from the batches as they run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, inf, log, sqrt

import numpy as np

from ggufspec.llamacpp.options import SLACK

_CLEARLY = 0.97  # a larger batch size is chosen if it takes less than this share of the time; smaller gains are noise
_FINE, _STEP = 16, 8  # batches above 16 are padded to multiples of 8: fewer graphs, and fewer sizes to learn
_MOVED = 0.02  # change of a batch size's point, in nats, that triggers a new search for the best sizes

# Standard deviations of the filter in `observe`, in nats
_NOISE = 0.1  # noise in the time of a single batch
_SHARED, _SHARED_STEP = 0.2, 0.03  # the shared factor's initial value and its drift per batch
_MEASURED, _GUESSED, _OWN_STEP = 0.05, 0.3, 0.003  # a batch size's own point, measured or not, and its drift per batch
_RESHAPED = 0.3  # deviation of a single token's own point when all sizes change, as a share of the change
_SURPRISE = 2.0  # standard deviations beyond which a time is clipped
_CUT = log(2)  # minimum clipping threshold for a repeated surprise, in nats


class LatencyModel:
    """Seconds per batch by batch size, updated with every batch that runs.

    Asking for more tokens than the largest batch holds raises IndexError.

    Args:
        points: measured seconds by batch size, at least one. Sizes between them are interpolated. Beyond the largest,
            the last segment's slope continues, or the overall slope if that is steeper (the last point may be a dip).
        batch_sizes: allowed sizes (strict mode: one class); None: all up to ``limit``, in steps of 8 beyond 16.
        switch_s: extra seconds when the batch size changes, for a new graph.
        trusted: True if the measurement was undisturbed.
        limit: the largest batch that the context allows; None: the last of ``points``. ``batch_sizes`` takes
            precedence.
        can_pad: True if the model can decode padding; otherwise a batch holds exactly its tokens.

    Raises:
        ValueError: points or batch sizes are missing or not positive, or padding is needed but impossible.
    """

    def __init__(
        self,
        points: Mapping[int, float],
        *,
        batch_sizes: Sequence[int] | None = None,
        switch_s: float = 0.0,
        trusted: bool = True,
        limit: int | None = None,
        can_pad: bool = True,
    ) -> None:
        if not points or min(points) < 1 or not all(0 < seconds < inf for seconds in points.values()):
            raise ValueError("a latency model is seconds by batch size, all positive")
        self.limit = max(batch_sizes) if batch_sizes else limit or max(points)
        self.switch_s = switch_s
        self.trusted = trusted
        self.can_pad = can_pad
        self.batch_sizes = None if batch_sizes is None else tuple(sorted(batch_sizes))
        every = (
            batch_size
            for batch_size in range(1, self.limit + 1)
            if batch_size <= _FINE or batch_size % _STEP == 0 or not can_pad
        )
        self._allowed = frozenset((*every, self.limit) if batch_sizes is None else batch_sizes)
        if not self._allowed or min(self._allowed) < 1:
            raise ValueError("a latency model needs a batch size that may be used")
        if not can_pad and len(self._allowed) != self.limit:
            raise ValueError("only some batch sizes may be used, and the model cannot pad")

        # State of the filter: index 0 is the shared factor; `_index` gives the index of each batch size's point. With
        # so few numbers, lists take half as long as arrays when every batch evicts the CPU caches.
        self._batch_sizes = sorted(points)
        self._index = {batch_size: index for index, batch_size in enumerate(self._batch_sizes, 1)}
        self._state = [0.0, *(log(points[batch_size]) for batch_size in self._batch_sizes)]
        self._covariance = [[0.0] * len(self._state) for _ in self._state]
        for index in range(len(self._state)):
            spread = (_MEASURED if trusted else _GUESSED) if index else _SHARED
            self._covariance[index][index] = spread**2
        self._last_batch_size = 0
        self._surprises = [0.0] * len(self._state)  # errors in nats: of the last batch, then of each size's last batch

        self._factor = 1.0
        self._best = [0] * (self.limit + 1)
        self._by_batch_size: list[float] = []
        self._build()

    def batch_size(self, count: int) -> int:
        """Return the fastest allowed batch size that holds ``count`` tokens, 0 … ``limit``.

        It is the smallest one unless a larger one is clearly faster, and changes only to a clearly faster one. A single
        token is padded only if size 1 is not allowed: a point that suggests padding is wrong, and if size 1 were not
        used, it would never be corrected.
        """
        return self._best[count]

    def seconds(self, count: int) -> float:
        return self._seconds[count] * self._factor

    def up_to(self, most: int, last: int | None = None) -> list[float]:
        """Return the seconds for 1 … ``most`` tokens at their batch sizes, if the previous batch had size ``last``."""
        if most > self.limit:
            raise IndexError(most)
        factor, switch_s = self._factor, 0.0 if last is None else self.switch_s
        batch_sizes = zip(self._seconds[1 : most + 1], self._best[1 : most + 1], strict=True)
        return [seconds * factor + (switch_s if batch_size != last else 0.0) for seconds, batch_size in batch_sizes]

    def observe(self, batch_size: int, seconds: float) -> None:
        """Update the model with the seconds of a batch of this size; call in the order in which batches ran.

        This is a Kalman filter on log seconds = shared factor + the size's own point; the times of other sizes separate
        the two. A single outlier has little effect. If the next batch deviates in the same direction, the shared factor
        has changed, at least by the smaller of both deviations. If instead the next batch of this size deviates again,
        the size's own point has changed. Sizes beyond the limit and times of zero are ignored.
        """
        if seconds <= 0 or not 1 <= batch_size <= self.limit:
            return
        if self._last_batch_size not in (0, batch_size):
            seconds = max(seconds - self.switch_s, seconds / 2)
        self._last_batch_size = batch_size
        index = self._index.get(batch_size) or self._add(batch_size)

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
        single = self._index.get(self._best[1], index)  # a size that drafts must beat, but keep from being timed
        if single != index:
            covariance[single][single] += (_RESHAPED * believed * with_all[0] / variance) ** 2

        self._factor = exp(state[0])
        if any(abs(now - built) > _MOVED for now, built in zip(state[1:], self._built, strict=True)):
            self._build()

    def doubt(self, batch_size: int) -> float:
        """Return the standard deviation, in nats, of the expected log seconds of a batch of this size."""
        index, covariance = self._index.get(batch_size), self._covariance
        if index is None:  # neither measured nor run
            return sqrt(covariance[0][0] + _GUESSED**2)
        return sqrt(covariance[0][0] + 2 * covariance[0][index] + covariance[index][index])

    def allows(self, batch_size: int) -> bool:
        """Return True if batches may have this size."""
        return batch_size in self._allowed

    def loosen(self, batch_size: int, spread: float) -> None:
        """Increase the uncertainty of a batch size by ``spread`` nats."""
        if index := self._index.get(batch_size):
            self._covariance[index][index] += spread**2

    def move(self, nats: float, spread: float) -> None:
        """Scale all seconds by exp(``nats``) on outside evidence, whose uncertainty is ``spread`` nats."""
        self._state[0] += nats
        self._covariance[0][0] += spread**2
        self._factor = exp(self._state[0])

    def become(self, measured: LatencyModel) -> None:
        """Take over the state of another measurement of the same model."""
        vars(self).update(vars(measured))

    def points(self) -> dict[int, float]:
        """Return the current seconds by batch size, for sizes that were measured or have run."""
        return {batch_size: seconds * self._factor for batch_size, seconds in self.own_points().items()}

    def own_points(self) -> dict[int, float]:
        """Return the seconds by batch size without the shared factor: the values to cache."""
        return {batch_size: exp(self._state[index]) for batch_size, index in sorted(self._index.items())}

    def _add(self, batch_size: int) -> int:
        """Give an interpolated batch size its own point; return its index."""
        index = self._index[batch_size] = len(self._state)
        self._batch_sizes = sorted(self._index)
        self._state.append(log(self._by_batch_size[batch_size]))
        self._surprises.append(0.0)
        for row in self._covariance:
            row.append(0.0)
        self._covariance.append([0.0] * index + [_GUESSED**2])
        self._built = self._state[1:]
        return index

    def _build(self) -> None:
        """Compute the seconds and best batch size for every count, without the shared factor."""
        self._built = self._state[1:]
        known = [exp(self._state[self._index[batch_size]]) for batch_size in self._batch_sizes]
        first, last = self._batch_sizes[0], self._batch_sizes[-1]
        by_batch_size = self._by_batch_size = np.interp(np.arange(self.limit + 1), self._batch_sizes, known).tolist()
        if last > first:
            whole, end = ((known[-1] - known[i]) / (last - self._batch_sizes[i]) for i in (0, -2))
            slope = max(whole, end, 0.0)
            for batch_size in range(last + 1, self.limit + 1):
                by_batch_size[batch_size] = known[-1] + slope * (batch_size - last)

        own = fastest = self.limit
        for count in range(self.limit, 0, -1):
            if count in self._allowed:
                own = count
                if by_batch_size[count] <= by_batch_size[fastest]:
                    fastest = count
            best = self._best[count] or own
            if (
                self.can_pad
                and own > 1
                and fastest - count <= SLACK
                and by_batch_size[fastest] < _CLEARLY * by_batch_size[best]
            ):
                best = fastest
            self._best[count] = best
        self._seconds = [0.0, *(by_batch_size[batch_size] for batch_size in self._best[1:])]
