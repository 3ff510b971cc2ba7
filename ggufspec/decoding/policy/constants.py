"""Constants of the adaptive policy, each with its evidence.

"011" is docs/decisions/011, "replay" is docs/evidence/replay.json (tests/evidence/replay.py): the real loop and policy
on collected texts, in virtual time. Values without a source were set once, and no measurement has contradicted them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ggufspec.decoding.options import ROWS


@dataclass(frozen=True, slots=True)
class PolicyConstants:
    """Constants of the policy. Shares are of time unless stated; each observation multiplies old weights by a decay."""

    # ---- the rate to beat
    rate_decay: float = 0.93  # decay per round
    initial_rounds: int = 3  # target-only rounds to start the mean from (011: else a lucky round sets it for ten more)

    # ---- exploring a drafter's gain (038)
    first_share: float = 0.025  # maximum share of the first prompt's and answer's time for prefill by drafters
    later_share: float = 0.006  # maximum share of all time in which drafters decode later prompts and pending tokens
    credit: float = 0.5  # extra time beyond the ``later_share`` limit, as a multiple of one target-only token's time
    longest_s: float = 60.0  # maximum seconds to count for a round or prompt, as the machine may have been suspended
    forgotten: int = 256  # pending (undecoded) tokens after which most statistics of a drafter may no longer hold
    horizon: int = 128  # maximum number of further tokens to expect in an answer
    reading_share: float = 0.5  # maximum time to decode pending tokens, as a share of the gain within the horizon
    catch_up_window: int = 4 * ROWS  # number of last tokens to decode if decoding all pending tokens takes too long
    amortised_rounds: int = 8  # rounds that share the cost of pending tokens, if all draft (011: else 3 to 8 % is lost)

    # ---- staleness of a latency (048 and lived-in.json, from tests/evidence/lived_in.py)
    unshared_change: float = 0.7  # standard deviation of the draft's change in speed, as a share of the target's change
    drift_per_s: float = 1 / 800  # growth in the variance of an untimed draft's latency, in squared nats per second
    hopeful: float = 1.3  # a probe assumes a draft to be faster by this many standard deviations (probability 0.1)
    stale: float = 0.25  # standard deviation of a latency, in nats, below which it is not timed again
    impossible: float = 0.8  # a single token was mistimed if a larger batch takes less than this share of its time
    retimed: tuple[int, ...] = (4, 2, 8, 3, 6)  # batch sizes to time again if their first timing was disturbed
    retimed_every: int = 3  # number of rounds without a draft per repeated timing of a batch size
    most_checks: float = 3  # maximum consecutive rounds in which nothing is drafted in order to re-time a single token
    checks: float = 1 / 64  # maximum long-run share of rounds in which nothing is drafted in order to re-time a token

    # ---- back-off
    back_off_share: float = 0.01  # maximum share of time for fruitless decisions (011: 0.005 misses repetitive text)
    least_patience: float = 0.25  # multiplier for the length of the first and shortest cooldown
    most_patience: float = 2.0  # maximum multiplier for the length of a cooldown
    fruitless_answers: int = 2  # consecutive answers without a gain after which the first cooldown has full length
    longest_cooldown: int = 64  # maximum rounds in a cooldown at multiplier 1 (011: it delays drafting repetitive text)
    trial_rounds: int = 16  # rounds within which drafts must show a gain; a quarter of this after an answer without one
    overhead_step: float = 1 / 8  # weight of one cooldown round in the mean seconds spent outside the target
    joint_batches: int = 4  # batches without a draft that are observed as one (011, "Small numbers are lists")
    changed: float = 1.5  # a batch off its expected time by this factor is not joined: the machine may have changed

    # ---- level of a drafter: how much better or worse it is now than its confidence suggests, in nats of log-odds
    level_spread: float = 1.2  # standard deviation of the level before any observation
    level_drift: float = 0.05  # standard deviation of the level's change between observations
    level_carried: float = 0.3  # share of the level that carries over to the next answer

    # ---- acceptance estimator (011, "Confidence is calibrated online")
    prior: float = 6.0  # weight of a forecast, or of the pooled bin, in observations
    bin_decay: float = 0.98  # a bin averages over about fifty observations (011: 0.95 or 0.9 cost as much as they gain)
    carried: float = 0.2  # share of bin counts carried over to the next answer (011, replay: prose after edited files)
    carried_means: float = 6.0  # maximum observations of mean and runs carried over to the next answer (011 and replay)
    loss_decay: float = 0.98  # decay of both forecasts' losses; the forecast by the mean cuts a 10 % loss to 2 % (011)
    mean_decay: float = 0.97
    usual_decay: float = 0.95  # decay of the frequency of each confidence
    usual_prior: float = 2.0  # weight of the prior for this frequency, in observations
    run_decay: float = 0.95
    # Weight of a shadow evaluation for runs (011: 0 slows edits at Q8_0 from 1.09 to 0.73 times the best fixed length)
    shadow_weight: float = 0.5
    longest_run: float = 0.98  # maximum probability that one accepted token follows another


CONSTANTS = PolicyConstants()
