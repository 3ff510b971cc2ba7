"""When drafting backs off because deciding about it costs more than it brings.

Deciding takes a tenth of a millisecond a round. Where that counts next to a token of the target's, and the rounds since
the last cooldown gained fewer tokens than target-only decoding would have in their time, the policy backs off for so
many rounds that deciding takes a hundredth of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ggufspec.decoding.policy.base import Outcome
from ggufspec.decoding.policy.constants import CONSTANTS


@dataclass(slots=True)
class BackOff:
    """What deciding costs and brings; it lives as long as the pair."""

    cooldown: int = 0  # rounds to come in which nothing is decided
    # Width and seconds of the target's batches without a draft that its latency model has yet to observe.
    undrafted: list[tuple[int, float]] = field(default_factory=list)
    overhead_s: float = 0.0  # of a round outside the target if nothing is decided
    learning_s: float = 0.0  # of updating the policy after a round
    active: int = 0  # rounds since the last cooldown
    gain: float = 0.0  # tokens that these brought more than target-only would have in their time; decayed
    deciding_s: float = 0.0  # of one of them, for deciding
    patience: float = CONSTANTS.least_patience  # of the cooldown to come: doubled by each that ends without a gain
    trial: int = CONSTANTS.trial_rounds  # rounds that drafts have to show a gain

    def begin_answer(self) -> None:
        """An answer begins without a cooldown; after one without a gain it has to show one sooner."""
        self.trial = CONSTANTS.trial_rounds // 4 if self.gain < 0 else CONSTANTS.trial_rounds
        self.cooldown = self.active = 0
        self.patience = CONSTANTS.least_patience

    def begin_round(self) -> bool:
        """Whether nothing is decided in the round that begins."""
        backing_off = self.cooldown > 0
        self.cooldown -= backing_off
        return backing_off

    def observe_idle(self, outcome: Outcome) -> None:
        self.active = 0
        self.overhead_s += (outcome.total_s - outcome.verify_s - self.overhead_s) * CONSTANTS.overhead_step

    def observe_active(self, outcome: Outcome, target_only_s: float, drafting_s: float, *, drafted: bool) -> None:
        """A round has ended in which drafting was decided about; a cooldown may begin.

        ``target_only_s`` are seconds of a batch of one token, ``drafting_s`` those in draft models; ``drafted`` says
        whether anything was verified.
        """
        target_only_s += self.overhead_s
        deciding_s = outcome.total_s - outcome.verify_s - drafting_s - self.overhead_s + self.learning_s
        if not self.active:
            self.gain = 0.0
        self.active += 1
        if drafted:
            brought = outcome.emitted - (outcome.total_s + self.learning_s) / target_only_s
        else:  # its one batch was target-only's, whatever the clock says of it
            brought = -(max(0.0, deciding_s) + drafting_s) / target_only_s
        self.gain = CONSTANTS.rate_decay * self.gain + brought
        self.deciding_s += (deciding_s - self.deciding_s) * (CONSTANTS.overhead_step if self.deciding_s else 1.0)
        if drafted and self.active >= self.trial and self.gain > 0:
            self.patience = CONSTANTS.least_patience
        if self.gain < 0 and (not drafted or self.active >= self.trial):
            self.trial = CONSTANTS.trial_rounds
            for_one = max(0.0, self.deciding_s / (CONSTANTS.back_off_share * target_only_s) - 1)
            self.cooldown = int(for_one * self.patience)
            self.patience = min(2 * self.patience, CONSTANTS.most_patience)
