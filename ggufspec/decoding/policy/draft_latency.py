"""Latency of a draft model by batch size, kept up to date while the draft is unused. Pure: no model, clock or I/O.

The target decodes in every round and its latency is observed there. A draft model is timed only when it drafts, so its
latency goes stale when the machine changes: a draft that was timed while other programs ran would look too slow
forever. Its latency therefore follows the target's if both compute on the same device, and its uncertainty grows with
every change of the target's and with time. If the uncertainty can change a decision, the policy has the draft timed for
one token (``Adaptive.probe``).
"""

from __future__ import annotations

from math import exp, log, sqrt

from ggufspec.decoding.policy.constants import CONSTANTS
from ggufspec.decoding.policy.latency import LatencyModel


class DraftLatency:
    """Latency of a draft, as far as it is known now.

    Args:
        model: the draft's latency by batch size.
        target: the target's.
        same_device: True if both compute on the same device, so that they get slower and faster together.
    """

    def __init__(self, model: LatencyModel, target: LatencyModel, *, same_device: bool = True) -> None:
        self.model, self._target = model, target
        self._same_device = same_device
        self._target_token_s = target.seconds(1)  # when the draft was last timed
        self._timed_at_s = 0.0

    @property
    def limit(self) -> int:
        """The largest batch size."""
        return self.model.limit

    @property
    def target_change(self) -> float:
        """The target's seconds per token now, relative to those when the draft was last timed."""
        return self._target.seconds(1) / self._target_token_s

    def age_s(self, now_s: float) -> float:
        """Seconds of decoding since the draft was last timed."""
        return max(0.0, now_s - self._timed_at_s)

    def seconds(self, count: int) -> float:
        """Expected seconds of a batch of ``count`` tokens."""
        seconds = self.model.seconds(count)
        return seconds * self.target_change if self._same_device else seconds

    def spread(self, now_s: float) -> float:
        """Return the standard deviation of log seconds, in nats, at ``now_s`` seconds of decoding."""
        change = CONSTANTS.unshared_change * log(self.target_change)
        return sqrt(change**2 + CONSTANTS.drift_per_s * self.age_s(now_s))

    def observe(self, count: int, seconds: float, now_s: float) -> None:
        """Observe that a batch of ``count`` tokens took so long, at ``now_s`` seconds of decoding."""
        moved = log(self.target_change) if self._same_device else 0.0
        self.model.move(moved, self.spread(now_s))
        self.timed(now_s)
        self.model.observe(self.model.width(count), seconds)

    def timed(self, now_s: float) -> None:
        """Mark the model as up to date at ``now_s`` seconds of decoding."""
        self._target_token_s, self._timed_at_s = self._target.seconds(1), now_s

    def cheaper(self, now_s: float) -> float:
        """Return the factor by which the draft may well be faster than expected, at most 1."""
        return exp(-CONSTANTS.hopeful * self.spread(now_s))
