"""The numbers of the adaptive policy, each with its evidence.

"011" is docs/decisions/011, "replay" is docs/evidence/replay.json (tests/evidence/replay.py): the real loop and policy
on collected texts, in virtual time. Those without a source were set once, and no measurement has asked for another.
"""

from __future__ import annotations

from dataclasses import dataclass

from ggufspec.decoding.options import ROWS


@dataclass(frozen=True, slots=True)
class Constants:
    """See the module. A share is of the time; a decay is the weight that is left after one observation."""

    # ---- the rate to beat
    rate_decay: float = 0.93  # per round
    initial_rounds: int = 3  # without a draft, counted in at first: 011, one lucky round set the bar for the next ten

    # ---- finding out what a drafter is worth: 038
    first_share: float = 0.025  # of the first answer's time, prompt included: what reading its prompt may take
    later_share: float = 0.006  # of all time: what catching up and reading later prompts may take,
    credit: float = 0.5  # and target-only tokens' time beyond that
    longest_s: float = 60.0  # of a round or a prompt that count in all time: a machine may be suspended meanwhile
    forgotten: int = 256  # unread tokens after which most of what is known of a drafter may hold no more
    horizon: int = 128  # tokens that an answer is expected to go on for, at most
    reading_share: float = 0.5  # of the gain that is expected in them: what reading may take
    catch_up_window: int = 4 * ROWS  # tokens that are read where all that were missed would take too long
    amortised_rounds: int = 8  # that pay for catching up, as far as it is wanted: 011, else 3 to 8 % is lost

    # ---- how stale a latency is: 048, lived-in.json (tests/evidence/lived_in.py)
    unshared_change: float = 0.7  # standard deviation of a draft's change in speed, relative to the target's, in nats
    drift_per_s: float = 1 / 800  # squared nats a second, of a draft that is not timed
    hopeful: float = 1.3  # standard deviations by which a draft may be faster than expected: one in ten
    stale: float = 0.25  # nats: a draft that is known better is not timed for its own sake
    impossible: float = 0.8  # of a single token's time: a wider batch that takes less shows that it was mistimed
    retimed: tuple[int, ...] = (4, 2, 8, 3, 6)  # batch sizes that are timed again if something disturbed them at first,
    retimed_every: int = 3  # rounds without a draft
    most_checks: float = 3  # rounds without a draft that may look at it in a row,
    checks: float = 1 / 64  # and in the long run, of all

    # ---- back-off
    back_off_share: float = 0.01  # for deciding without a gain: 011, 0.005 misses where the text begins to repeat
    least_patience: float = 0.25  # of the cooldown that this makes, the first one,
    most_patience: float = 2.0  # and the longest,
    fruitless_answers: int = 2  # without a gain, after which the first one of an answer is a whole one
    longest_cooldown: int = 64  # rounds, times patience, whatever deciding takes: 011, repeating text waits for its end
    trial_rounds: int = 16  # in which drafts may show a gain; a quarter, if the last answer ended without one
    overhead_step: float = 1 / 8  # of the mean of a round's seconds outside the target while backing off
    joint_batches: int = 4  # without a draft that the latency model observes as one: 011, "Small numbers are lists",
    changed: float = (
        1.5  # unless one takes so many times as long as expected, or as short: the machine may have changed
    )

    # ---- a drafter's level, in nats of log-odds: how much better or worse it is now than its confidence tells
    level_spread: float = 1.2  # standard deviation before anything was seen
    level_drift: float = 0.05  # from one observation to the next
    level_carried: float = 0.3  # of the level, to the next answer

    # ---- acceptance estimator: 011, "Confidence is calibrated online"
    prior: float = 6.0  # observations that a forecast counts as, and the pooled bin
    bin_decay: float = 0.98  # some fifty observations of a bin count: 011, 0.95 or 0.9 cost as much as they gain
    carried: float = 0.2  # of a bin's counts, to the next answer: 011 and replay, prose after an edited file
    carried_means: float = 6.0  # observations of the mean and of runs, to the next answer: the same
    loss_decay: float = 0.98  # of both forecasts: 011, with the mean as a second one 2 % below the best, not 10 %
    mean_decay: float = 0.97
    usual_decay: float = 0.95  # of how often each confidence comes,
    usual_prior: float = 2.0  # and observations that what is usual at first counts as
    run_decay: float = 0.95
    shadow_weight: float = 0.5  # of a shadow evaluation for runs: 011, edited text at Q8_0 from 0.73 to 1.09
    longest_run: float = 0.98  # chance that one accepted token follows another


CONSTANTS = Constants()
