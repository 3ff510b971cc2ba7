"""Back-off: rounds without drafts (a cooldown) when deciding about drafts costs more than drafts gain.

A decision takes about 0.1 ms. If that is more than 1 % of a target token's time, the policy pauses when the rounds
since the last cooldown produced fewer tokens than target-only decoding would have in the same time. The pause lasts
about as many rounds as it takes to bring deciding down to 1 % of the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ggufspec.decoding.policy.base import RoundOutcome
from ggufspec.decoding.policy.constants import CONSTANTS


@dataclass(slots=True)
class BackOff:
    """Costs and gains of drafting decisions; lives as long as the pair."""

    cooldown: int = 0  # remaining rounds without a decision or a draft
    # (batch size, seconds) of target batches without a draft that the target's latency model has not yet observed
    target_only: list[tuple[int, float]] = field(default_factory=list)
    overhead_s: float = 0.0  # seconds that a cooldown round spends outside the target
    learning_s: float = 0.0  # seconds of updating the policy after a round
    active: int = 0  # rounds since the last cooldown
    gain: float = 0.0  # decayed sum of tokens gained in these rounds, compared with target-only for the same time
    deciding: deque[float] = field(default_factory=lambda: deque(maxlen=5))  # seconds of the last decisions
    earned: float = 0.0  # sum of tokens gained in this answer, not decayed
    fruitless: int = 0  # consecutive answers that ended without a gain
    patience: float = CONSTANTS.least_patience  # multiplier for the next cooldown; doubles with each until drafts gain
    trial: int = CONSTANTS.trial_rounds  # number of rounds within which drafts must show a gain

    def begin_answer(self) -> None:
        """Begin an answer without a cooldown; after an answer without a gain, drafts must show a gain sooner.

        After several answers without a gain, the first cooldown has full length.
        """
        self.trial = CONSTANTS.trial_rounds // 4 if self.gain < 0 else CONSTANTS.trial_rounds
        self.cooldown = self.active = 0
        self.fruitless = self.fruitless + 1 if self.earned < 0 else 0
        self.earned = 0.0
        self.patience = 1.0 if self.fruitless >= CONSTANTS.fruitless_answers else CONSTANTS.least_patience

    def observe_idle(self, idle: Sequence[tuple[float, float]]) -> None:
        """End a cooldown; ``idle`` holds the (target, total) seconds of each of its rounds."""
        self.cooldown = self.active = 0
        overhead_s = median(total_s - verify_s for verify_s, total_s in idle)
        self.overhead_s += (overhead_s - self.overhead_s) * min(1.0, CONSTANTS.overhead_step * len(idle))

    def observe_active(self, outcome: RoundOutcome, target_only_s: float, drafting_s: float, *, drafted: bool) -> None:
        """Account for a round in which the policy decided about drafts; may begin a cooldown.

        ``target_only_s`` is the time of a target batch without a draft, ``drafting_s`` the time spent in draft models;
        ``drafted`` is True if any drafted token was verified.
        """
        target_only_s += self.overhead_s
        spent_s = outcome.total_s - outcome.verify_s - drafting_s - self.overhead_s + self.learning_s
        self.deciding.append(max(0.0, spent_s))
        deciding_s = median(self.deciding)  # robust to a single preemption of the process
        if not self.active:
            self.gain = 0.0
        self.active += 1
        if drafted:  # a batch takes at most as long as its tokens one by one; more means that it was preempted
            worst = outcome.emitted - outcome.batch_size - deciding_s / target_only_s
            brought = max(worst, outcome.emitted - (outcome.total_s + self.learning_s) / target_only_s)
        else:  # the batch was target-only, whatever time it took
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
