"""Latency of a draft model by batch size, kept up to date while the draft is unused. Pure: no model, clock or I/O.

The target's latency is observed in every round. A draft model is timed only when it drafts, so its latency goes stale
when the machine changes: a draft that was timed while other programs ran would look too slow forever. The draft's
latency therefore follows the target's if both compute on the same device, and its uncertainty grows with time and with
the change in the target's latency. If the uncertainty can change a decision, the policy has the draft timed for one
token (``AdaptivePolicy.probe``).
"""

from __future__ import annotations

from math import exp, log, sqrt

from ggufspec.decoding.policy.constants import CONSTANTS
from ggufspec.decoding.policy.latency import LatencyModel


class DraftLatency:
    """Current estimate of a draft's latency.

    Args:
        model: the draft's latency by batch size.
        target: the target's latency by batch size.
        same_device: True if both compute on the same device, so that they slow down and speed up together.
    """

    def __init__(self, model: LatencyModel, target: LatencyModel, *, same_device: bool = True) -> None:
        self.model, self._target = model, target
        self._same_device = same_device
        self._target_token_s = target.seconds(1)  # target's seconds per token when the draft was last timed
        self._timed_at_s = 0.0

    @property
    def limit(self) -> int:
        """Largest batch size."""
        return self.model.limit

    @property
    def target_change(self) -> float:
        """Target's seconds per token now, divided by those when the draft was last timed."""
        return self._target.seconds(1) / self._target_token_s

    def age_s(self, now_s: float) -> float:
        """Return the seconds of decoding since the draft was last timed."""
        return max(0.0, now_s - self._timed_at_s)

    def seconds(self, count: int) -> float:
        """Return the expected seconds for a batch of ``count`` tokens."""
        seconds = self.model.seconds(count)
        return seconds * self.target_change if self._same_device else seconds

    def spread(self, now_s: float) -> float:
        """Return the standard deviation, in nats, of the draft's log seconds at ``now_s`` seconds of decoding."""
        change = CONSTANTS.unshared_change * log(self.target_change)
        return sqrt(change**2 + CONSTANTS.drift_per_s * self.age_s(now_s))

    def observe(self, count: int, seconds: float, now_s: float) -> None:
        """Observe that a batch of ``count`` tokens took ``seconds``, at ``now_s`` seconds of decoding."""
        moved = log(self.target_change) if self._same_device else 0.0
        self.model.move(moved, self.spread(now_s))
        self.timed(now_s)
        self.model.observe(self.model.batch_size(count), seconds)

    def timed(self, now_s: float) -> None:
        """Mark the model as up to date at ``now_s`` seconds of decoding."""
        self._target_token_s, self._timed_at_s = self._target.seconds(1), now_s

    def cheaper(self, now_s: float) -> float:
        """Return an optimistic estimate of the draft's time, as a fraction of the expected time."""
        return exp(-CONSTANTS.hopeful * self.spread(now_s))
