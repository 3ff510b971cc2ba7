"""Search for the fastest setting, choosing each trial from the planner's predictions and earlier measurements.

Pure: no model, clock or I/O. Simulators and real runs drive the same :class:`TuneSearch` through suggest and observe.

It learns the planner's errors. The logarithm of measured ÷ predicted is modelled as a sum of unknown errors, each with
a prior and a weight: an error in a device's speed is weighted by its share of the time, one in the acceptance by how
much drafting contributes, and one in a thread count by the CPU's share of the time. A Gaussian process over the layers
and a term per setting explain the rest. So each trial is evidence about all settings, especially similar ones.

Sources: for the acquisition, Jones, Schonlau and Welch 1998, equation 15 (expected improvement); for its product with
the probability of fitting, Gardner et al. 2014, equation 5; for the model, Rasmussen and Williams 2006, 2.23 and 2.24.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ggufspec.tune.space import TuneCandidate, difference

Array = npt.NDArray[np.float64]

_LAYERS_SPREAD, _LAYERS_NEAR = 0.06, 0.12  # unexplained errors: standard deviation, length scale (in offloaded share)
_ALONE_SPREAD = 0.025  # standard deviation of errors specific to one setting
_NOISES = (0.01, 0.02, 0.04, 0.08, 0.16)  # possible noise levels of a measurement; the most likely one is used
_SCALES = (1.0, 2.0)  # possible factors on all prediction errors; the most likely one is used
_USUAL_NOISE, _NOISE_SPREAD = 0.02, 0.7
_EDGE, _EDGE_SPREAD = 1.0, 0.04  # used share of a GPU's memory above which trials fail: mean and standard deviation
_HOPELESS = 1e-3  # smaller probabilities of fitting count as 0
_FEWEST = 6  # minimum trials before the search may stop
_SAME_FAILED = 2  # failures after which a value that never succeeded is excluded
_CLEARLY = 5  # a difference of this many times a trial's noise is not due to chance


@dataclass(frozen=True, slots=True)
class NextTrial:
    """Next trial to make, and the reason for it."""

    index: int
    predicted_tokens_per_s: float
    why: str


@dataclass(frozen=True, slots=True)
class SearchEnd:
    """End of the search and its reason."""

    why: str


@dataclass
class TuneSearch:
    """Search for the fastest of ``candidates``, which must not be empty."""

    candidates: Sequence[TuneCandidate]
    first: Sequence[int] = ()  # indices of the planner's choices, which are measured first
    threshold: float = 0.001  # relative expected gain above which a trial is made
    most: int = 60  # maximum number of settings to measure; repetitions do not count
    _measured: list[tuple[int, float]] = field(default_factory=list, init=False)
    _failed: dict[int, bool] = field(default_factory=dict, init=False)
    trials: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._features = np.array([candidate.features for candidate in self.candidates], np.float64)
        self._prior = np.log([candidate.predicted for candidate in self.candidates])
        self._layers = np.array([candidate.offloaded for candidate in self.candidates])
        self._drafted = np.array([candidate.setting.drafted for candidate in self.candidates])
        self._use = np.array([candidate.memory for candidate in self.candidates])  # shape (candidates, devices)
        self.noise = _USUAL_NOISE
        self._out = np.zeros(len(self.candidates), bool)
        self._mean, self._sd = self._prior.copy(), np.sqrt(self._variance(np.arange(len(self.candidates))))

    # ---- suggesting and observing

    def suggest(self) -> NextTrial | SearchEnd:
        """Return the next trial, or the reason to stop; the result is the same until :meth:`observe` is called."""
        tried = self._tried
        if first := self._first_left:
            return self._next(first[0], "the planner's other choice" if tried else "the planner's choice")
        if len(tried) >= self.most:
            made = f"{len(tried)} trials were" if len(tried) != 1 else "1 trial was"
            return SearchEnd(f"{made} made, the maximum")
        gains = self._gains()
        gains[list(tried)] = 0.0
        index = int(gains.argmax())
        if not self._measured and self.trials:  # everything failed so far, so try the smallest setting
            left = [i for i in range(len(self.candidates)) if i not in tried and not self._out[i]]
            if not left or self.trials >= _FEWEST:
                return SearchEnd(f"none of {self.trials} settings succeeded, not even the smallest")
            index = min(left, key=lambda i: (float(self._use[i].max()), -self._mean[i]))
            return self._next(index, "the smallest setting, because all earlier trials failed")
        gain = float(gains[index])
        if gain <= 0:
            return SearchEnd("every setting that can fit has been measured")
        if gain < self.threshold and self.trials >= _FEWEST:
            return SearchEnd(f"no other setting promises a gain of {self.threshold:.1%} or more")
        return self._next(index, self._why(index))

    def observe(self, index: int, tokens_per_s: float | None, *, of_memory: bool | None = None) -> None:
        """Record the outcome of a trial.

        Args:
            index: index of the setting.
            tokens_per_s: the measured speed; None if the trial failed.
            of_memory: True if it failed for lack of memory, which excludes settings that need as much or more. None
                means that it probably did, unless a larger setting succeeded. Two failures of another kind exclude a
                value (such as a KV type) that never succeeded.
        """
        self.trials += 1
        if tokens_per_s is not None and tokens_per_s > 0:
            self._measured.append((index, math.log(tokens_per_s)))
            self._learn()
            return
        fitted = [i for i, _ in self._measured]
        if of_memory is None:
            of_memory = not any((self._use[i] >= self._use[index]).all() for i in fitted)
        of_memory = of_memory and bool(self._use[index].any())  # if nothing was on a GPU, none was full
        self._failed[index] = of_memory
        if of_memory:
            self._out |= (self._use >= self._use[index]).all(axis=1)
        self._out[index] = True
        self._give_up_values()

    @property
    def tried_first(self) -> bool:
        """True once the planner's choices have been tried, except those that cannot fit."""
        return not self._first_left

    @property
    def _first_left(self) -> list[int]:
        tried = self._tried
        return [index for index in self.first if index not in tried and not self._out[index]]

    @property
    def _tried(self) -> set[int]:
        return {index for index, _ in self._measured} | set(self._failed)

    def forget(self, index: int) -> None:
        """Discard the first outcome of a setting whose trial was repeated."""
        self._measured = [one for one in self._measured if one[0] != index]

    def _next(self, index: int, why: str) -> NextTrial:
        return NextTrial(index, self.expected(index), why)

    def _give_up_values(self) -> None:
        """Exclude values of flash attention, KV type and drafter that this machine cannot run."""
        for of in (
            lambda s: ("flash", s.flash_attn),
            lambda s: ("kv", s.cache_type_k, s.cache_type_v),
            lambda s: ("drafter", s.drafter),
        ):
            good = {of(self.candidates[i].setting) for i, _ in self._measured}
            bad = [of(self.candidates[i].setting) for i, of_memory in self._failed.items() if not of_memory]
            for value in set(bad) - good:
                if good and bad.count(value) >= _SAME_FAILED:
                    self._out |= np.array([of(candidate.setting) == value for candidate in self.candidates])

    # ---- the posterior

    def best(self) -> int | None:
        """Return the measured setting that is expected to be the fastest; None if all failed."""
        tried = {index for index, _ in self._measured}
        return max(tried, key=lambda index: self._mean[index], default=None)

    def leaders(self, most: int = 3) -> list[int]:
        """Return measured settings that may be the fastest: the best, and those within a trial's noise of it."""
        tried = sorted({index for index, _ in self._measured}, key=lambda index: -self._mean[index])
        within = max(_USUAL_NOISE, self.noise)
        return [index for index in tried if self._mean[index] >= self._mean[tried[0]] - within][:most]

    def finalists(self, planned: Sequence[int]) -> list[int]:
        """Return measured settings to measure again side by side, the most important first.

        They are the best; the fastest measured target-only setting, unless clearly slower; planned ones that succeeded;
        the target-only setting that is expected to be the fastest; the other leaders.
        """
        seen: dict[int, list[float]] = {}
        for index, value in self._measured:
            seen.setdefault(index, []).append(value)
        leaders = self.leaders()
        if not leaders:
            return []
        target_only = [index for index in seen if not self._drafted[index]]
        believed = sorted(target_only, key=lambda index: -self._mean[index])[:1]
        fastest = sorted(target_only, key=lambda index: -float(np.median(seen[index])))[:1]
        least = self._mean[leaders[0]] - self._clear_gap
        close = [index for index in fastest if float(np.median(seen[index])) >= least]
        chosen = [leaders[0], *close, *(index for index in planned if index in seen), *believed, *leaders]
        return list(dict.fromkeys(chosen))

    def is_clearly_slower(self, index: int, than: int) -> bool:
        """Return whether a setting is expected to be slower by more than trial noise explains."""
        return bool(self._mean[index] < self._mean[than] - self._clear_gap)

    @property
    def _clear_gap(self) -> float:
        return _CLEARLY * max(_USUAL_NOISE, self.noise)

    def expected(self, index: int) -> float:
        """Return the tokens/s that a setting is expected to reach."""
        return float(np.exp(self._mean[index]))

    def error(self) -> float:
        """Return the median error of the planner's predictions: |log(measured ÷ predicted)|."""
        return float(np.median([abs(value - self._prior[index]) for index, value in self._measured]))

    def _covariance(self, left: npt.NDArray[np.int_], right: npt.NDArray[np.int_]) -> Array:
        linear: Array = self._features[left] @ self._features[right].T
        apart = self._layers[left][:, None] - self._layers[right][None, :]
        same = self._drafted[left][:, None] == self._drafted[right][None, :]
        smooth = _LAYERS_SPREAD**2 * np.exp(-0.5 * (apart / _LAYERS_NEAR) ** 2) * (0.3 + 0.7 * same)
        whole: Array = linear + smooth + _ALONE_SPREAD**2 * (left[:, None] == right[None, :])
        return whole

    def _variance(self, of: npt.NDArray[np.int_]) -> Array:
        squares: Array = (self._features[of] ** 2).sum(axis=1)
        whole: Array = squares + _LAYERS_SPREAD**2 + _ALONE_SPREAD**2
        return whole

    def _learn(self) -> None:
        """Refit the model to all measurements, with the most likely noise and error scale."""
        seen = np.array([index for index, _ in self._measured])
        every = np.arange(len(self.candidates))
        off = np.array([value for _, value in self._measured]) - self._prior[seen]
        known = self._covariance(seen, seen)
        self.noise, scale = max(
            ((noise, scale) for noise in _NOISES for scale in _SCALES),
            key=lambda one: _likelihood(one[1] ** 2 * known + one[0] ** 2 * np.eye(len(seen)), off, one[0]),
        )
        inner = scale**2 * known + self.noise**2 * np.eye(len(seen))
        outer = scale**2 * self._covariance(every, seen)
        solved = np.linalg.solve(inner, np.column_stack([off, outer.T]))
        self._mean = self._prior + outer @ solved[:, 0]
        self._sd = np.sqrt(np.maximum(scale**2 * self._variance(every) - (outer * solved[:, 1:].T).sum(axis=1), 1e-8))

    def _gains(self) -> Array:
        """Return each setting's expected gain over the best so far, times its probability of fitting."""
        best = self.best()
        top = self._mean[best] if best is not None else float(self._mean.max())
        z = (self._mean - top) / self._sd
        density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        gains: Array = self._sd * (z * _below(z) + density) * self._chance()
        return gains

    def _chance(self) -> Array:
        """Return each setting's probability of fitting in memory, given which settings succeeded and failed."""
        chance = np.ones(len(self.candidates))
        for device in range(self._use.shape[1]):
            use = self._use[:, device]
            low = max((use[i] for i, _ in self._measured), default=0.0)
            at_low, at_use = (_below((_EDGE - np.asarray(value)) / _EDGE_SPREAD) for value in (low, use))
            chance *= np.where(use <= low, 1.0, at_use / np.maximum(at_low, 1e-12))
        chance[(chance < _HOPELESS) | self._out] = 0.0
        return chance

    def _why(self, index: int) -> str:
        best = self.best()
        assert best is not None
        changed = difference(self.candidates[best].setting, self.candidates[index].setting)
        promise = math.exp(float(self._mean[index] - self._mean[best])) - 1
        kind = "may be faster" if promise > 0 else "is uncertain"
        return f"{', '.join(changed) or 'the same'}: {kind} ({promise:+.0%} ± {float(self._sd[index]):.0%})"


def _likelihood(covariance: Array, off: Array, noise: float) -> float:
    """Return the log likelihood of ``off`` up to a constant; with few trials, the noise's prior dominates.

    Source: Rasmussen and Williams 2006, equation 2.30; the noise has a log-normal prior.
    """
    lower = np.linalg.cholesky(covariance)
    half = np.linalg.solve(lower, off)
    fit = -0.5 * float(half @ half) - float(np.log(np.diag(lower)).sum())
    return fit - 0.5 * (math.log(noise / _USUAL_NOISE) / _NOISE_SPREAD) ** 2


def _below(z: Array) -> Array:
    """Return the standard normal distribution function at ``z``."""
    below: Array = np.vectorize(lambda value: 0.5 * (1 + math.erf(value / math.sqrt(2))), otypes=[np.float64])(z)
    return below
