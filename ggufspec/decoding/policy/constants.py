"""The numbers of the adaptive policy, each with its evidence.

"011" is docs/decisions/011, "replay" is docs/evidence/replay.json (tests/evidence/replay.py): the real loop and policy
on collected texts, in virtual time. Numbers without a source were set once, and no measurement has contradicted them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ggufspec.decoding.options import ROWS


@dataclass(frozen=True, slots=True)
class Constants:
    """Numbers of the policy. A share is of the time; a decay is the weight left after one observation."""

    # ---- the rate to beat
    rate_decay: float = 0.93  # per round
    initial_rounds: int = 3  # rounds without a draft, counted at first: 011, a lucky round set the bar for the next ten

    # ---- exploring what a drafter is worth: 038
    first_share: float = 0.025  # most time for reading the first prompt, of the first answer's time with its prompt
    later_share: float = 0.006  # most time for catching up and reading later prompts, of all time,
    credit: float = 0.5  # plus the time of so many target-only tokens
    longest_s: float = 60.0  # most seconds that count for a round or prompt: a machine may be suspended meanwhile
    forgotten: int = 256  # unread tokens after which most of what is known about a drafter may no longer hold
    horizon: int = 128  # maximum number of tokens that an answer is expected to go on for
    reading_share: float = 0.5  # most time for reading, of the gain expected within the horizon
    catch_up_window: int = 4 * ROWS  # tokens to read if reading all missed ones would take too long
    amortised_rounds: int = 8  # rounds that pay for catching up, as far as it is wanted: 011, else 3 to 8 % is lost

    # ---- staleness of a latency: 048, lived-in.json (tests/evidence/lived_in.py)
    unshared_change: float = 0.7  # standard deviation of a draft's change in speed, relative to the target's, in nats
    drift_per_s: float = 1 / 800  # squared nats a second, for a draft that is not timed
    hopeful: float = 1.3  # standard deviations by which a draft may be faster than expected: one in ten
    stale: float = 0.25  # nats; a draft that is known better is not timed just to know it
    impossible: float = 0.8  # share of a single token's time: a larger batch that takes less shows that it was mistimed
    retimed: tuple[int, ...] = (4, 2, 8, 3, 6)  # batch sizes to time again if the first timing was disturbed,
    retimed_every: int = 3  # one every so many rounds without a draft
    most_checks: float = 3  # rounds without a draft in a row that may re-time a single token,
    checks: float = 1 / 64  # and their share of all rounds in the long run

    # ---- back-off
    back_off_share: float = 0.01  # share of time for deciding without a gain: 011, 0.005 misses where text repeats
    least_patience: float = 0.25  # shortest cooldown, the first one, as a factor,
    most_patience: float = 2.0  # and the longest
    fruitless_answers: int = 2  # answers without a gain, after which an answer's first cooldown has full length
    longest_cooldown: int = 64  # rounds, times patience, whatever deciding takes: 011, repeating text waits for its end
    trial_rounds: int = 16  # rounds in which drafts may show a gain; a quarter after an answer that ended without one
    overhead_step: float = 1 / 8  # weight of one round in the mean seconds outside the target while backing off
    joint_batches: int = 4  # batches without a draft that are observed as one: 011, "Small numbers are lists",
    changed: float = 1.5  # unless one takes so many times longer or shorter than expected: the machine may have changed

    # ---- level of a drafter, in nats of log-odds: how much better or worse it is now than its confidence says
    level_spread: float = 1.2  # standard deviation before any observation
    level_drift: float = 0.05  # standard deviation of its change from one observation to the next
    level_carried: float = 0.3  # share of the level that carries over to the next answer

    # ---- acceptance estimator: 011, "Confidence is calibrated online"
    prior: float = 6.0  # observations that a forecast, or the pooled bin, counts as
    bin_decay: float = 0.98  # some fifty observations of a bin count: 011, 0.95 or 0.9 cost as much as they gain
    carried: float = 0.2  # share of a bin's counts for the next answer: 011 and replay, prose after an edited file
    carried_means: float = 6.0  # observations of the mean and of runs for the next answer: same evidence
    loss_decay: float = 0.98  # both forecasts: 011, with the mean as the second one 2 % below the best, not 10 %
    mean_decay: float = 0.97
    usual_decay: float = 0.95  # how often each confidence occurs,
    usual_prior: float = 2.0  # and observations that the prior of that counts as
    run_decay: float = 0.95
    shadow_weight: float = 0.5  # weight of a shadow evaluation for runs: 011, edited text at Q8_0 from 0.73 to 1.09
    longest_run: float = 0.98  # maximum probability that one accepted token follows another


CONSTANTS = Constants()
