"""Choice of the drafter and the draft length by expected tokens per second. Pure: times and outcomes are passed in.

Let rho be the rate to beat, T(n) the seconds to verify n tokens, and c the seconds to draft one. A chain whose first i
tokens are all accepted with probability S_i gains

    1 + S_1 + ... + S_k - rho * (k * c + T(k + 1))

tokens over the same time at rate rho (Dinkelbach's form of a ratio). A token is drafted while its contribution is
positive at the usual confidences, and verified if it still is once its confidence is known. rho is the rate of the last
rounds, but never below target-only's, which is how speculation switches itself off. A drafter that is off still reads
new tokens now and then, in a small share of the time, and drafts again if its shadow evaluation is good.

If other answers share the batches (:class:`~ggufspec.decoding.policy.base.Load`), rho is the rate of all of them
together, and T(k + 1) becomes T(their tokens + k + 1): a draft must pay for the time that it costs everyone. Because
all decide at once, none knows the final batch size. T is therefore replaced by its least concave majorant, so that each
answer expects the steepest step ahead. The draft model decodes for all of them at once, so c is a share of its batch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median

import numpy as np

from ggufspec.decoding.drafters.base import ShadowEvaluation
from ggufspec.decoding.options import ROWS
from ggufspec.decoding.policy.backoff import BackOff
from ggufspec.decoding.policy.base import DraftPolicy, Load, RoundOutcome
from ggufspec.decoding.policy.constants import CONSTANTS
from ggufspec.decoding.policy.draft_latency import DraftLatency
from ggufspec.decoding.policy.estimator import LOOKUP, MODEL, PREDICTION, AcceptanceEstimator, shifted
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.decoding.policy.timing import CHECKED

_AHEAD = 16  # number of tokens that a decision looks ahead
# How much better or worse than expected a drafter may be, in standard deviations, and the weight of each case: the
# three-point Gauss-Hermite rule, exact for polynomials of a normal variable up to degree five.
_LEVELS = ((-math.sqrt(3), 1 / 6), (0.0, 2 / 3), (math.sqrt(3), 1 / 6))


@dataclass(slots=True)
class ExplorationCosts:
    """Cost of exploring drafters; lives as long as the pair."""

    answers: int = 0
    elapsed_s: float = 0.0  # seconds spent on all answers
    spent_s: float = 0.0  # seconds spent on drafters not known to pay off, except on the first prompt


class AdaptivePolicy(DraftPolicy):
    """Policy that drafts only as long as drafting pays off.

    Args:
        target: the target's latency model.
        drafts: latencies of drafters with a model, by name; a drafter without an entry costs nothing.
        estimators: acceptance learned from earlier answers, by drafter; it fades, and this answer adds to it.
        back_off: costs and gains of drafting decisions, from earlier answers.
        trials: cost of exploration so far.
        quiet: returns True if no other programs load the machine now.
    """

    def __init__(
        self,
        target: LatencyModel,
        drafts: Mapping[str, DraftLatency] | None = None,
        estimators: dict[str, AcceptanceEstimator] | None = None,
        back_off: BackOff | None = None,
        trials: ExplorationCosts | None = None,
        quiet: Callable[[], bool] = lambda: True,
    ) -> None:
        self._quiet, self._load = quiet, Load()  # the load of the current round
        self._target_only = 0  # number of rounds without a draft
        self.target, self.drafts = target, drafts or {}
        self._trials = trials or ExplorationCosts()
        self._trials.answers += 1
        self._estimators = {} if estimators is None else estimators
        for estimator in self._estimators.values():
            estimator.fade()
        self._back_off = back_off or BackOff()
        self._back_off.begin_answer()
        # Decayed sums over rounds: tokens, and the tokens that target-only would have generated in the same time
        self._tokens = self._worth = float(CONSTANTS.initial_rounds)
        self._begun: set[str] = set()  # drafters that have prefilled as much of the prompt as is worth the time
        self._looked: dict[str, int] = {}  # by drafter: unread tokens when reading them was last considered
        self.expected_gain: dict[str, float] = {}
        self._refused: dict[str, tuple[float, float]] = {}  # by drafter: spread or time at which to reconsider probing
        self._charged = 0.0  # share of the current reading's cost that counts as exploration
        self._in_large = 1.0  # cost of a token beyond the largest verification batch, relative to one within it
        self._wanted = 1.0  # share of the last rounds that used a draft model, or verified no draft
        self._last_batch_size: int | None = None
        self._checks_target_only = False  # True if this round times target-only decoding
        self._checks = CONSTANTS.most_checks  # rounds that may still re-time a single target token
        self._proposed: dict[
            tuple[str, int], list[float]
        ] = {}  # seconds per proposal, keyed by drafter and number of pending tokens
        self._verified = 0

    def estimator(self, name: str) -> AcceptanceEstimator:
        known = self._estimators.get(name)
        if known is None:
            prior = MODEL if name in self.drafts else PREDICTION if name == "prediction" else LOOKUP
            known = self._estimators[name] = AcceptanceEstimator(prior)
        return known

    @property
    def rate(self) -> float:
        """Tokens per second to beat: the last rounds' gain at the target's current speed, at least target-only's."""
        load, target = self.load, self.target
        rate = max(1.0, self._tokens / self._worth) * (1 + load.gained) / target_only_s(target, load)
        # If all draft because the others do, all may be slower than if none did
        answers = min(1 + load.answers, target.limit)
        return max(rate, answers / target.seconds(answers)) if load.answers else rate

    @property
    def cooldown(self) -> int:  # type: ignore[override]
        return self._back_off.cooldown

    def prompt_read(self, tokens: int, seconds: float) -> None:
        self._trials.elapsed_s += min(seconds, CONSTANTS.longest_s)
        largest = self.target.limit
        if tokens > largest:
            more = seconds / self.target.seconds(largest) - 1
            self._in_large = min(1.0, max(0.0, more / (tokens / largest - 1)))

    def begin(self, limit: int, remaining: int, *, may_trim: bool) -> None:
        if len(self._back_off.target_only) >= CONSTANTS.joint_batches:
            self._observe_target_only()
        load = self._load = self.load
        others = min(round(load.tokens), self.target.limit - 1)
        self._limit, self._may_trim = min(limit, self.target.limit - 1 - others), may_trim
        others += min(load.prompt, self.target.limit - 1 - others - self._limit)
        self._horizon = min(remaining, CONSTANTS.horizon)
        self._rate = self.rate
        self._runs: dict[str, list[float]] = {}
        self._proposed.clear()
        first = min(load.answers, others)  # the others' drafts may be no longer than this one's, so none is sunk cost
        seconds = self.target.up_to(first + self._limit + 1, self._last_batch_size)[first:]
        if others:
            seconds = _majorant(seconds)
        # (limit + 1,) time to verify i drafted tokens and one more, converted to tokens
        self._price = [self._rate * one for one in seconds]
        self._seconds = seconds
        self._checks_target_only = self._doubts_target_only(seconds)
        self._chain: list[tuple[str, float, float]] = []  # drafter, confidence, probability of full acceptance so far
        self._verified = 0

    def _doubts_target_only(self, seconds: Sequence[float]) -> bool:
        """Return True if this round must draft nothing in order to time target-only decoding.

        Either no single token has been decoded since the machine changed, or one seems to take longer than a larger
        batch according to the expected ``seconds`` (limit + 1,). If it really does, a few rounds confirm it.
        """
        if self._load != Load():
            return False
        single, least_s = self.target.batch_size(1), CONSTANTS.impossible * seconds[0]
        self._checks = min(self._checks + CONSTANTS.checks, CONSTANTS.most_checks)
        if self.target.doubt(single) > CONSTANTS.stale:
            return True
        if min(seconds) > least_s or self._checks < 1:
            return False
        self._checks -= 1
        self.target.loosen(single, math.log(seconds[0] / min(seconds)))
        return True

    def choose(self, confidences: Mapping[str, float], pending: Mapping[str, int]) -> str | None:
        position = len(self._chain)
        if position >= self._limit or self._checks_target_only:
            return None
        self._begun.update(name for name, unread in pending.items() if unread <= ROWS)
        values = {name: self._value_of(name, confidence, position) for name, confidence in confidences.items()}
        values |= {
            name: self._value_of_proposing(name, unread, position)
            for name, unread in pending.items()
            if name in self._begun
        }
        best = max(values, key=lambda name: values[name], default=None)
        return best if best is not None and values[best] > 0 else None

    def proposed(self, name: str, pending: int, seconds: float) -> None:
        if name in self.drafts:
            self._proposed.setdefault((name, pending), []).append(seconds)

    def extend(self, name: str, confidence: float) -> bool:
        position = len(self._chain)
        estimator = self.estimator(name)
        estimator.observe_candidate(confidence, position)
        if self._value_of(name, confidence, position) <= 0:
            return False
        self._chain.append((name, confidence, self._survival * estimator.chance(confidence, position)))
        return True

    def verify_count(self) -> int:
        self._verified = len(self._chain)
        if self._may_trim and self._chain:
            accepted = accumulate((survival for _, _, survival in self._chain), initial=0.0)
            values = [tokens - price for tokens, price in zip(accepted, self._price, strict=False)]
            self._verified = values.index(max(values))
        return self._verified

    def target_only_batch_size(self, batch_size: int) -> int:
        target = self.target
        if target.trusted or not target.can_pad or self._load != Load() or not self._quiet():
            return batch_size
        self._target_only += 1
        if self._target_only % CONSTANTS.retimed_every:
            return batch_size
        stale = (wide for wide in CONSTANTS.retimed if target.doubt(wide) > CONSTANTS.stale and target.allows(wide))
        return next((wide for wide in stale if wide > batch_size), batch_size)

    def observe_round(self, outcome: RoundOutcome) -> None:
        back_off, decay, load = self._back_off, CONSTANTS.rate_decay, self._load
        batch_size = outcome.shared or outcome.batch_size
        switched = self._last_batch_size != batch_size
        self._last_batch_size = batch_size
        total_s = outcome.total_s + outcome.learning_s
        self._trials.elapsed_s += min(total_s, CONSTANTS.longest_s) / (1 + load.answers)  # the others count it, too
        if back_off.active:  # the previous round was active too, and ``learning_s`` belongs to it
            back_off.learning_s = outcome.learning_s
        expected_s = self.target.seconds(1)
        changed = not expected_s / CONSTANTS.changed < outcome.verify_s < expected_s * CONSTANTS.changed
        if outcome.shared:  # the batch is observed once for all answers
            self._observe_target_only()
        elif switched or self._verified or changed:
            self._observe_target_only()
            self.target.observe(batch_size, outcome.verify_s)
        else:
            back_off.target_only.append((batch_size, outcome.verify_s))
        only_s = target_only_s(self.target, load)
        if (
            load.prompt or outcome.shared < 0
        ):  # prompt tokens took most of the time, so count the expected time of the draft's tokens
            expected_s = only_s - load.seconds + self._seconds[self._verified] - self._seconds[0]
            total_s += expected_s - outcome.verify_s
            outcome = replace(outcome, verify_s=expected_s, total_s=total_s - outcome.learning_s)
        self._tokens = decay * self._tokens + (outcome.emitted + load.gained) / (1 + load.gained)
        # A round takes at most as long as decoding and drafting its tokens singly, unless the machine was suspended
        rounds = (total_s + load.seconds) / only_s
        self._worth = decay * self._worth + min(rounds, 2 * outcome.batch_size + 2)
        drafting_s = sum(map(sum, self._proposed.values()))
        back_off.observe_active(outcome, only_s - load.seconds, drafting_s, drafted=self._verified > 0)
        judged = self._chain[: min(outcome.accepted + 1, self._verified)]
        for position, (name, confidence, _) in enumerate(judged):
            self.estimator(name).observe(confidence, position, float(position < outcome.accepted))
        wanted = bool(self._proposed or not self._verified)
        self._wanted = decay * self._wanted + (1 - decay) * wanted
        for (name, count), spent in self._proposed.items():
            draft = self.drafts[name]
            if 0 < count <= draft.limit:
                draft.observe(count, sum(spent) / len(spent), self._trials.elapsed_s)

    def probe(self, name: str, pending: int) -> str:
        draft, now_s = self.drafts.get(name), self._trials.elapsed_s
        if draft is None or self._checks_target_only or (spread := draft.spread(now_s)) < CONSTANTS.stale:
            return ""
        doubt, again_s = self._refused.get(name, (0.0, 0.0))
        if spread < doubt and now_s < again_s:
            return ""
        cheaper = draft.cheaper(now_s)
        cost_s = CHECKED * draft.seconds(1) * math.sqrt(cheaper)  # between the expected and the most optimistic cost
        if cost_s > self._allowance_s(first=False):
            return ""
        estimator, stale = self.estimator(name), 1 - math.exp(-pending / CONSTANTS.forgotten)
        expected_gain = self._mean_gain(estimator, name, stale, cheaper)
        if expected_gain * self._horizon * CONSTANTS.reading_share < self._rate * cost_s:
            self._refused[name] = spread + CONSTANTS.stale / 2, now_s + ROWS / self._rate
            return ""
        self.expected_gain[name] = expected_gain * self._horizon
        since = "the draft was last timed"
        change = draft.target_change
        if CONSTANTS.unshared_change * abs(math.log(change)) > CONSTANTS.stale / 2:
            return f"a target token takes {change:.2g} times as long as when {since}"
        return f"{draft.age_s(now_s):.0f} s of decoding have passed since {since}"

    def probed(self, name: str, seconds: float | None) -> None:
        if seconds is None:
            self._refused[name] = math.inf, math.inf
            return
        trials = self._trials
        trials.spent_s += CHECKED * seconds
        trials.elapsed_s += CHECKED * seconds
        self.drafts[name].observe(1, seconds, trials.elapsed_s)
        self._refused.pop(name, None)
        self._looked.pop(name, None)  # decide again whether to read unread tokens

    def observe_cooldown(self, batch_size: int, idle: Sequence[tuple[float, float]]) -> None:
        count, (verify_s, total_s) = len(idle), zip(*idle, strict=True)
        elapsed_s = sum(total_s)
        self._trials.elapsed_s += elapsed_s
        before = CONSTANTS.rate_decay**count
        recent = (1 - before) / (1 - CONSTANTS.rate_decay)  # weight of the cooldown's rounds
        self._tokens = before * self._tokens + recent
        self._worth = before * self._worth + recent
        if self._last_batch_size != batch_size:
            self._observe_target_only()
            self.target.observe(batch_size, verify_s[0])
            self._last_batch_size, verify_s = batch_size, verify_s[1:]
        if verify_s:  # the cooldown's batches count as one observation
            self._back_off.target_only.append((batch_size, median(verify_s)))
        self._back_off.observe_idle(idle)

    def catch_up_count(self, name: str, pending: int) -> int:
        if name not in self.drafts or pending <= ROWS or self._checks_target_only:
            return 0
        if self.load.prompt:  # other answers wait for their first token, and the load is not known before they decode
            return 0
        first = name not in self._begun
        if 0 <= pending - self._looked.get(name, -ROWS) < ROWS:
            return 0  # once per sixteen tokens is enough
        self._looked[name] = pending
        count = self._worth_reading(name, pending, first=first)
        if count and first:
            self._begun.add(name)
            self._back_off.cooldown = 0
        return count

    def _worth_reading(self, name: str, pending: int, *, first: bool) -> int:
        """Return how many of the last tokens are worth decoding; 0 if too few are.

        The drafter's known gain must cover the cost. For exploration, within its share of the time, it is enough that
        the gain would cover the cost if the drafter were better than it seems.
        """
        estimator = self.estimator(name)
        stale = 0.0 if first else 1 - math.exp(-pending / CONSTANTS.forgotten)
        known = estimator.known * (1 - stale)
        worth_s = CONSTANTS.reading_share * self._horizon / self._rate
        expected_s = known * worth_s * max(0.0, self._gain(estimator, name, 0.0))
        allowance_s = self._allowance_s(first=first)
        if allowance_s > expected_s:
            mean_gain_s = worth_s * self._mean_gain(estimator, name, stale)
            most_s = max(expected_s, min(allowance_s, mean_gain_s))
        else:
            most_s = mean_gain_s = expected_s
        self.expected_gain[name] = max(expected_s, mean_gain_s) / CONSTANTS.reading_share * self._rate
        if first:
            count = bisect_right(range(1, pending + 1), most_s, key=lambda count: self._reading_s(name, count))
            count = count if count >= ROWS else 0
        else:
            counts = (pending, CONSTANTS.catch_up_window)
            count = next((count for count in counts if self._reading_s(name, count) <= most_s), 0)
        if first and self._trials.answers == 1:
            self._charged = 0.0
        else:
            self._charged = max(0.0, 1 - expected_s / self._reading_s(name, count)) if count else 0.0
        return count

    def _mean_gain(self, estimator: AcceptanceEstimator, name: str, stale: float, cheaper: float = 1.0) -> float:
        """Return the tokens gained per token of text, averaged over how good the drafter might be.

        ``stale`` is the share of knowledge about the drafter that may no longer hold; drafting takes ``cheaper`` times
        the expected time.
        """
        cost_s = self._cost_s(name, 1) * cheaper
        expected_gain = sum(
            weight * max(0.0, self._gain(estimator, name, level * estimator.spread, cost_s))
            for level, weight in _LEVELS
        )
        if stale:
            expected_gain = (1 - stale) * expected_gain + stale * max(
                0.0, self._gain(AcceptanceEstimator(), name, 0.0, cost_s)
            )
        return expected_gain

    def _allowance_s(self, *, first: bool) -> float:
        trials, horizon_s = self._trials, self._horizon * (1 + self.load.gained) / self._rate
        if first and trials.answers == 1:
            return CONSTANTS.first_share * (trials.elapsed_s + horizon_s)
        token_s = self.target.seconds(1)
        return CONSTANTS.later_share * (trials.elapsed_s + horizon_s) + CONSTANTS.credit * token_s - trials.spent_s

    def _gain(self, estimator: AcceptanceEstimator, name: str, shift: float, cost_s: float | None = None) -> float:
        """Return the tokens gained per token of text by always drafting with a drafter that is ``shift`` nats better.

        ``cost_s`` is the time per drafted token; None: the expected time.
        """
        run = shifted(estimator.run, shift)
        runs = list(accumulate(run**number for number in range(_AHEAD)))
        drafting = self._rate * (self._cost_s(name, 1) if cost_s is None else cost_s)
        ways = [(runs[i], price - self._price[0] + drafting * i) for i, price in enumerate(self._price[1 : 1 + _AHEAD])]
        gain, tokens = -drafting, 1.0
        for usual, chance in estimator.outlook(0):
            better = shifted(chance, shift)
            best, longer = max(((better * reach - price, reach) for reach, price in ways), default=(-math.inf, 0.0))
            if best > 0:
                gain += usual * best
                tokens += usual * better * longer
        return gain / tokens

    def shadow_evaluated(self, name: str, seen: Sequence[ShadowEvaluation], seconds: float = 0.0) -> None:
        if name in self.drafts:
            self._trials.spent_s += self._charged * seconds
            self._charged = 0.0
        self._trials.elapsed_s += seconds
        estimator = self.estimator(name)
        for one in seen:
            estimator.observe_candidate(one.confidence, 0)
            estimator.observe(one.confidence, 0, one.agreement)
        if name in self.drafts:  # a lookup's evaluations are not at consecutive positions
            estimator.observe_shadow_run([one.agreement for one in seen])

    def _observe_target_only(self) -> None:
        """Let the target's latency model observe the pending batches without a draft as one, with their mean time.

        Each of these follows a batch of the same size; a change of size would cost more.
        """
        if batches := self._back_off.target_only:
            self.target.observe(batches[0][0], sum(seconds for _, seconds in batches) / len(batches))
            batches.clear()

    @property
    def _survival(self) -> float:
        return self._chain[-1][2] if self._chain else 1.0

    def _cost_s(self, name: str, pending: int) -> float:
        """Return the seconds for a candidate from a drafter that has ``pending`` tokens to decode."""
        draft = self.drafts.get(name)
        if draft is None:
            return 0.0
        others = min(round(self.load.drafting), draft.limit - 1)
        one = draft.seconds(1)
        shared = draft.seconds(1 + others) / (1 + others) if others else one
        rounds = 1 + (CONSTANTS.amortised_rounds - 1) * self._wanted if pending > ROWS else 1
        return shared + (self._reading_s(name, pending) - one) / rounds

    def _reading_s(self, name: str, count: int) -> float:
        draft = self.drafts[name]
        more = max(0.0, count / draft.limit - 1)
        return draft.seconds(min(count, draft.limit)) * (1 + more * self._in_large)

    def _value_of(self, name: str, confidence: float, position: int) -> float:
        """Return the tokens gained by a candidate with this confidence and the best number of candidates after it."""
        chance = self._survival * self.estimator(name).chance(confidence, position)
        return self._best(self._continuations(name, position), chance)

    def _value_of_proposing(self, name: str, pending: int, position: int) -> float:
        """Return the tokens gained by requesting a candidate, which extends the chain only if that then pays off."""
        ways, survival = self._continuations(name, position), self._survival
        price = self._rate * self._cost_s(name, pending)
        outlook = self.estimator(name).outlook(position)
        most = self._best(ways, survival * max(chance for _, chance in outlook))
        if most <= price:  # cannot pay off at any confidence
            return most - price
        return sum(usual * max(0.0, self._best(ways, survival * chance)) for usual, chance in outlook) - price

    def _continuations(self, name: str, position: int) -> list[tuple[float, float]]:
        """Return the gain and cost of m = 1, 2, … candidates in a row from this position on.

        Returns:
            expected tokens ÷ the first candidate's acceptance probability, and the time to draft the m - 1 others and
            to verify all m, converted to tokens.
        """
        runs = self._runs.get(name)
        if runs is None:
            run = self.estimator(name).run
            runs = self._runs[name] = list(accumulate(run**number for number in range(_AHEAD)))
        drafting, before = self._rate * self._cost_s(name, 1), self._price[position]
        prices = enumerate(self._price[position + 1 : position + 1 + _AHEAD])
        return [(runs[number], price - before + drafting * number) for number, price in prices]

    @staticmethod
    def _best(ways: Sequence[tuple[float, float]], chance: float) -> float:
        return max((chance * run - price for run, price in ways), default=-math.inf)


def target_only_s(target: LatencyModel, load: Load) -> float:
    """Return the seconds of a round in which an answer next to this load drafts nothing, without those of a prompt."""
    return target.seconds(min(1 + round(load.tokens), target.limit)) + load.seconds


def _majorant(seconds: Sequence[float]) -> list[float]:
    """Return the least concave function that is nowhere below ``seconds``."""
    hull: list[tuple[int, float]] = []
    for index, value in enumerate(seconds):
        while len(hull) > 1:
            (first, low), (middle, high) = hull[-2:]
            if (high - low) * (index - first) > (value - low) * (middle - first):
                break
            hull.pop()
        hull.append((index, value))
    indices, values = zip(*hull, strict=True)
    found: list[float] = np.interp(range(len(seconds)), indices, values).tolist()
    return found
