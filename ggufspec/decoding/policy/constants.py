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

    # ---- catching up of a drafter that is switched off
    catch_up_share: float = 0.004  # 011 and replay: 0.006 found nothing more and cost hopeless drafts half a per cent
    catch_up_credit: float = 0.5  # target-only tokens' time beyond that: 011, a dear draft never got to show its worth
    catch_up_window: int = 4 * ROWS  # tokens that are read where all that were missed would take too long
    amortised_rounds: int = 8  # that pay for catching up, as far as it is wanted: 011, else 3 to 8 % is lost

    # ---- the first reading of a prompt, behind the first token: 029
    first_share: float = 0.01  # of the time of the prompt and of `horizon` tokens, for a drafter that is not known
    first_gain: float = 0.25  # of what a drafter that is known is expected to gain in them
    horizon: int = 64  # tokens that an answer is expected to go on for

    # ---- back-off
    back_off_share: float = 0.01  # for deciding without a gain: 011, 0.005 misses where the text begins to repeat
    trial_rounds: int = 16  # in which drafts may show a gain; a quarter, if the last answer ended without one
    overhead_step: float = 1 / 8  # of the mean of a round's seconds outside the target while backing off
    joint_batches: int = 4  # without a draft that the latency model observes as one: 011, "Small numbers are lists"

    # ---- acceptance estimator: 011, "Confidence is calibrated online"
    prior: float = 6.0  # observations that a forecast counts as, and the pooled bin
    bin_decay: float = 0.98  # some fifty observations of a bin count: 011, 0.95 or 0.9 cost as much as they gain
    carried: float = 0.2  # of a bin's counts, to the next answer: 011 and replay, prose after an edited file
    carried_runs: float = 6.0  # observations of runs, to the next answer: the same
    loss_decay: float = 0.98  # of both forecasts: 011, with the mean as a second one 2 % below the best, not 10 %
    mean_decay: float = 0.97
    usual_decay: float = 0.95  # of how often each confidence comes
    run_decay: float = 0.95
    shadow_weight: float = 0.5  # of a shadow evaluation for runs: 011, edited text at Q8_0 from 0.73 to 1.09
    longest_run: float = 0.98  # chance that one accepted token follows another


CONSTANTS = Constants()
