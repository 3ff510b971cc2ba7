"""When drafting backs off because deciding about it costs more than it brings.

Deciding takes a tenth of a millisecond a round. If that counts next to a target token's time, and the rounds since the
last cooldown gained fewer tokens than target-only decoding would have in their time, the policy backs off for so many
rounds that deciding takes a hundredth of the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ggufspec.decoding.policy.base import Outcome
from ggufspec.decoding.policy.constants import CONSTANTS


@dataclass(slots=True)
class BackOff:
    """Costs and gains of deciding; lives as long as the pair."""

    cooldown: int = 0  # rounds left in which nothing is decided
    # Sizes and seconds of target batches without a draft that its latency model has yet to observe.
    undrafted: list[tuple[int, float]] = field(default_factory=list)
    overhead_s: float = 0.0  # seconds of a round outside the target if nothing is decided
    learning_s: float = 0.0  # seconds of updating the policy after a round
    active: int = 0  # rounds since the last cooldown
    gain: float = 0.0  # decayed tokens that these gained over target-only in their time
    deciding: deque[float] = field(default_factory=lambda: deque(maxlen=5))  # seconds of the last decisions
    earned: float = 0.0  # gain of all rounds of this answer
    fruitless: int = 0  # consecutive answers that ended without a gain
    patience: float = CONSTANTS.least_patience  # factor of the next cooldown; doubles with each one without a gain
    trial: int = CONSTANTS.trial_rounds  # rounds that drafts have to show a gain

    def begin_answer(self) -> None:
        """Begin an answer without a cooldown; after one without a gain it has to show one sooner.

        After several answers without a gain its first cooldown has full length.
        """
        self.trial = CONSTANTS.trial_rounds // 4 if self.gain < 0 else CONSTANTS.trial_rounds
        self.cooldown = self.active = 0
        self.fruitless = self.fruitless + 1 if self.earned < 0 else 0
        self.earned = 0.0
        self.patience = 1.0 if self.fruitless >= CONSTANTS.fruitless_answers else CONSTANTS.least_patience

    def observe_idle(self, idle: Sequence[tuple[float, float]]) -> None:
        """End a cooldown; ``idle`` has seconds in the target and in total, for each of its rounds."""
        self.cooldown = self.active = 0
        overhead_s = median(total_s - verify_s for verify_s, total_s in idle)
        self.overhead_s += (overhead_s - self.overhead_s) * min(1.0, CONSTANTS.overhead_step * len(idle))

    def observe_active(self, outcome: Outcome, target_only_s: float, drafting_s: float, *, drafted: bool) -> None:
        """Account for a round in which drafting was decided about; may begin a cooldown.

        ``target_only_s`` are the seconds of a batch of one token, ``drafting_s`` those in draft models; ``drafted`` is
        True if anything was verified.
        """
        target_only_s += self.overhead_s
        spent_s = outcome.total_s - outcome.verify_s - drafting_s - self.overhead_s + self.learning_s
        self.deciding.append(max(0.0, spent_s))
        deciding_s = median(self.deciding)  # robust to a single preemption of the process
        if not self.active:
            self.gain = 0.0
        self.active += 1
        if drafted:  # a batch takes at most as long as its tokens one by one: more is a preemption
            worst = outcome.emitted - outcome.width - deciding_s / target_only_s
            brought = max(worst, outcome.emitted - (outcome.total_s + self.learning_s) / target_only_s)
        else:  # its one batch was target-only's, whatever the clock says
            brought = -(deciding_s + drafting_s) / target_only_s
        self.gain = CONSTANTS.rate_decay * self.gain + brought
        self.earned += brought
        if drafted and self.active >= self.trial and self.gain > 0:
            self.patience = CONSTANTS.least_patience
        if self.gain < 0 and (not drafted or self.active >= self.trial):
            self.trial = CONSTANTS.trial_rounds
            for_one = max(0.0, deciding_s / (CONSTANTS.back_off_share * target_only_s) - 1)
            self.cooldown = int(min(for_one, CONSTANTS.longest_cooldown) * self.patience)
            self.patience = min(2 * self.patience, CONSTANTS.most_patience)
