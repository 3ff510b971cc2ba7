"""Choose the drafter and the draft length by expected tokens per second. Pure: times and outcomes are passed in.

With rho the rate to beat, T(n) the seconds to verify n tokens and c those of a drafted token, a chain whose first i
tokens are all accepted with probability S_i gains

    1 + S_1 + ... + S_k - rho * (k * c + T(k + 1))

tokens over the same time at rate rho (Dinkelbach's form of a ratio). A token is drafted while its part of this is
positive, judged by the usual confidences, and verified if it still is once its confidence is known. rho is the rate of
the last rounds, and never less than target-only's: that is how speculation switches itself off. A drafter that is off
catches up now and then, for a small share of the time, and its shadow evaluation is how it comes back.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from ggufspec.decoding.drafters.base import ShadowEvaluation
from ggufspec.decoding.options import ROWS
from ggufspec.decoding.policy.backoff import BackOff
from ggufspec.decoding.policy.base import Outcome, Policy
from ggufspec.decoding.policy.constants import CONSTANTS
from ggufspec.decoding.policy.draft_latency import DraftLatency
from ggufspec.decoding.policy.estimator import LOOKUP, MODEL, AcceptanceEstimator, shifted
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.decoding.policy.timing import CHECKED

_AHEAD = 16  # tokens that a decision looks ahead
# How much better or worse than expected a drafter may be, in standard deviations, and the weight of each case. With
# these three, a normal distribution's mean is exact up to the fifth power (Gauss and Hermite).
_LEVELS = ((-math.sqrt(3), 1 / 6), (0.0, 2 / 3), (math.sqrt(3), 1 / 6))


@dataclass(slots=True)
class Trials:
    """Cost of exploring drafters; lives as long as the pair."""

    answers: int = 0
    elapsed_s: float = 0.0  # seconds of all answers
    spent_s: float = 0.0  # seconds spent on drafters not known to pay, except on the first prompt


class Adaptive(Policy):
    """Policy that drafts while it pays, which may be not at all.

    Args:
        target: the target's latency model.
        drafts: latencies of drafters with a model, by name; drafters that are missing here cost nothing.
        estimators: acceptance learned from earlier answers, by drafter; it fades, and this answer adds to it.
        back_off: what earlier answers taught about the cost of deciding.
        trials: cost of exploration so far.
        quiet: returns True if other programs leave the machine alone now.
    """

    def __init__(
        self,
        target: LatencyModel,
        drafts: Mapping[str, DraftLatency] | None = None,
        estimators: dict[str, AcceptanceEstimator] | None = None,
        back_off: BackOff | None = None,
        trials: Trials | None = None,
        quiet: Callable[[], bool] = lambda: True,
    ) -> None:
        self._quiet = quiet
        self._undrafted = 0  # rounds without a draft
        self.target, self.drafts = target, drafts or {}
        self._trials = trials or Trials()
        self._trials.answers += 1
        self._estimators = {} if estimators is None else estimators
        for estimator in self._estimators.values():
            estimator.fade()
        self._back_off = back_off or BackOff()
        self._back_off.begin_answer()
        # Decayed over the last rounds: tokens, and how many target-only tokens their time was worth at the speed then
        self._tokens = self._worth = float(CONSTANTS.initial_rounds)
        self._begun: set[str] = set()  # drafters that have read the prompt, or as much of it as is worth it
        self._looked: dict[str, int] = {}  # unread tokens when catching up was last considered
        self.hoped: dict[str, float] = {}
        self._refused: dict[
            str, tuple[float, float]
        ] = {}  # by drafter: spread and time from which a probe is considered again
        self._charged = 0.0  # share of the current reading that counts as exploration
        self._in_large = 1.0  # seconds per token beyond the largest batch of a round, relative to those within it
        self._wanted = 1.0  # share of the last rounds that used a draft model, or had no candidate
        self._last_width: int | None = None
        self._checks_target_only = False  # in this round
        self._checks = CONSTANTS.most_checks  # rounds that may still re-time a single target token
        self._proposed: dict[tuple[str, int], list[float]] = {}  # seconds of proposals by drafter and tokens read
        self._verified = 0

    def estimator(self, name: str) -> AcceptanceEstimator:
        known = self._estimators.get(name)
        if known is None:
            known = self._estimators[name] = AcceptanceEstimator(MODEL if name in self.drafts else LOOKUP)
        return known

    @property
    def rate(self) -> float:
        """Tokens per second to beat: the last rounds' gain at the target's present speed, but at least target-only."""
        return max(1.0, self._tokens / self._worth) / self.target.seconds(1)

    @property
    def cooldown(self) -> int:  # type: ignore[override]
        return self._back_off.cooldown

    def prompt_read(self, tokens: int, seconds: float) -> None:
        self._trials.elapsed_s += min(seconds, CONSTANTS.longest_s)
        widest = self.target.limit
        if tokens > widest:
            more = seconds / self.target.seconds(widest) - 1
            self._in_large = min(1.0, max(0.0, more / (tokens / widest - 1)))

    def begin(self, limit: int, remaining: int, *, may_trim: bool) -> None:
        if len(self._back_off.undrafted) >= CONSTANTS.joint_batches:
            self._observe_undrafted()
        self._limit, self._may_trim = min(limit, self.target.limit - 1), may_trim
        self._horizon = min(remaining, CONSTANTS.horizon)
        self._rate = self.rate
        self._runs: dict[str, list[float]] = {}
        self._proposed.clear()
        seconds = self.target.up_to(self._limit + 1, self._last_width)
        # (limit + 1,) value in tokens of the time to verify i drafted tokens and one more
        self._price = [self._rate * one for one in seconds]
        self._checks_target_only = self._doubts_target_only(seconds)
        self._chain: list[tuple[str, float, float]] = []  # drafter, confidence, chance that all so far are accepted
        self._verified = 0

    def _doubts_target_only(self, seconds: Sequence[float]) -> bool:
        """Return True if this round shall draft nothing, to time target-only decoding.

        Either no single token was decoded since the machine changed, or one seems to take longer than larger batches,
        whose expected seconds are (limit + 1,) ``seconds``. If it really does, a few rounds show it.
        """
        single, least_s = self.target.width(1), CONSTANTS.impossible * seconds[0]
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

    def undrafted_width(self, width: int) -> int:
        target = self.target
        if target.trusted or not target.can_pad or not self._quiet():
            return width
        self._undrafted += 1
        if self._undrafted % CONSTANTS.retimed_every:
            return width
        stale = (wide for wide in CONSTANTS.retimed if target.doubt(wide) > CONSTANTS.stale and target.allows(wide))
        return next((wide for wide in stale if wide > width), width)

    def observe_round(self, outcome: Outcome) -> None:
        back_off, decay = self._back_off, CONSTANTS.rate_decay
        switched = self._last_width != outcome.width
        self._last_width = outcome.width
        total_s = outcome.total_s + outcome.learning_s
        self._trials.elapsed_s += min(total_s, CONSTANTS.longest_s)
        if back_off.active:  # true for the previous round
            back_off.learning_s = outcome.learning_s
        expected_s = self.target.seconds(1)
        changed = not expected_s / CONSTANTS.changed < outcome.verify_s < expected_s * CONSTANTS.changed
        if switched or self._verified or changed:
            self._observe_undrafted()
            self.target.observe(outcome.width, outcome.verify_s)
        else:
            back_off.undrafted.append((outcome.width, outcome.verify_s))
        self._tokens = decay * self._tokens + outcome.emitted
        # A round costs at most its tokens one by one plus as many of a draft: beyond that the machine was suspended
        self._worth = decay * self._worth + min(total_s / self.target.seconds(1), 2 * outcome.width + 2)
        drafting_s = sum(map(sum, self._proposed.values()))
        back_off.observe_active(outcome, self.target.seconds(1), drafting_s, drafted=self._verified > 0)
        judged = self._chain[: min(outcome.accepted + 1, self._verified)]
        for position, (name, confidence, _) in enumerate(judged):
            self.estimator(name).observe(confidence, position, float(position < outcome.accepted))
        wanted = bool(self._proposed or not self._verified)
        self._wanted = decay * self._wanted + (1 - decay) * wanted
        for (name, count), spent in self._proposed.items():
            draft = self.drafts[name]
            if count <= draft.limit:
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
        hoped = self._mean_gain(estimator, name, stale, cheaper)
        if hoped * self._horizon * CONSTANTS.reading_share < self._rate * cost_s:
            self._refused[name] = spread + CONSTANTS.stale / 2, now_s + ROWS / self._rate
            return ""
        self.hoped[name] = hoped * self._horizon
        since = "since the draft was last timed"
        change = draft.target_change
        if CONSTANTS.unshared_change * abs(math.log(change)) > CONSTANTS.stale / 2:
            return f"a token of the target takes {change:.2g} times as long {since}"
        return f"it has been {draft.age_s(now_s):.0f} s of decoding {since}"

    def probed(self, name: str, seconds: float | None) -> None:
        if seconds is None:
            self._refused[name] = math.inf, math.inf
            return
        trials = self._trials
        trials.spent_s += CHECKED * seconds
        trials.elapsed_s += CHECKED * seconds
        self.drafts[name].observe(1, seconds, trials.elapsed_s)
        self._refused.pop(name, None)
        self._looked.pop(name, None)  # catching up is decided anew

    def observe_cooldown(self, width: int, idle: Sequence[tuple[float, float]]) -> None:
        count, (verify_s, total_s) = len(idle), zip(*idle, strict=True)
        elapsed_s = sum(total_s)
        self._trials.elapsed_s += elapsed_s
        before = CONSTANTS.rate_decay**count
        recent = (1 - before) / (1 - CONSTANTS.rate_decay)  # weight of these rounds
        self._tokens = before * self._tokens + recent
        self._worth = before * self._worth + recent
        if self._last_width != width:
            self._observe_undrafted()
            self.target.observe(width, verify_s[0])
            self._last_width, verify_s = width, verify_s[1:]
        if verify_s:  # together they count as one batch
            self._back_off.undrafted.append((width, median(verify_s)))
        self._back_off.observe_idle(idle)

    def catch_up_count(self, name: str, pending: int) -> int:
        if name not in self.drafts or pending <= ROWS or self._checks_target_only:
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
        """Return how many of the last tokens are worth reading; 0 if these would be few.

        Reading is paid for by the drafter's known gain, or, as exploration, by its gain if it is better than it seems,
        within the share of time that trials may take.
        """
        estimator = self.estimator(name)
        stale = 0.0 if first else 1 - math.exp(-pending / CONSTANTS.forgotten)
        known = estimator.known * (1 - stale)
        worth_s = CONSTANTS.reading_share * self._horizon / self._rate
        expected_s = known * worth_s * max(0.0, self._gain(estimator, name, 0.0))
        allowance_s = self._allowance_s(first=first)
        if allowance_s > expected_s:
            hoped_s = worth_s * self._mean_gain(estimator, name, stale)
            most_s = max(expected_s, min(allowance_s, hoped_s))
        else:
            most_s = hoped_s = expected_s
        self.hoped[name] = max(expected_s, hoped_s) / CONSTANTS.reading_share * self._rate
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
        """Return the tokens gained per token of text, averaged over how good the drafter may be.

        ``stale`` is the share of the knowledge about it that may no longer hold; the draft takes ``cheaper`` times the
        expected time.
        """
        cost_s = self._cost_s(name, 1) * cheaper
        hoped = sum(
            weight * max(0.0, self._gain(estimator, name, level * estimator.spread, cost_s))
            for level, weight in _LEVELS
        )
        if stale:
            hoped = (1 - stale) * hoped + stale * max(0.0, self._gain(AcceptanceEstimator(), name, 0.0, cost_s))
        return hoped

    def _allowance_s(self, *, first: bool) -> float:
        trials, horizon_s = self._trials, self._horizon / self._rate
        if first and trials.answers == 1:
            return CONSTANTS.first_share * (trials.elapsed_s + horizon_s)
        token_s = self.target.seconds(1)
        return CONSTANTS.later_share * (trials.elapsed_s + horizon_s) + CONSTANTS.credit * token_s - trials.spent_s

    def _gain(self, estimator: AcceptanceEstimator, name: str, shift: float, cost_s: float | None = None) -> float:
        """Return the tokens gained per token of text by drafting in every round with a drafter ``shift`` nats better.

        ``cost_s`` are the seconds per drafted token; None: as expected.
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
        if name in self.drafts:  # a lookup has no candidate at some positions
            estimator.observe_shadow_run([one.agreement for one in seen])

    def _observe_undrafted(self) -> None:
        """Let the target's latency model observe the pending batches without a draft as one, by their mean.

        None of them follows a batch of another size, which would cost more.
        """
        if batches := self._back_off.undrafted:
            self.target.observe(batches[0][0], sum(seconds for _, seconds in batches) / len(batches))
            batches.clear()

    @property
    def _survival(self) -> float:
        return self._chain[-1][2] if self._chain else 1.0

    def _cost_s(self, name: str, pending: int) -> float:
        """Return the seconds for a candidate of a drafter that has ``pending`` tokens to read."""
        draft = self.drafts.get(name)
        if draft is None:
            return 0.0
        one = draft.seconds(1)
        rounds = 1 + (CONSTANTS.amortised_rounds - 1) * self._wanted if pending > ROWS else 1
        return one + (self._reading_s(name, pending) - one) / rounds

    def _reading_s(self, name: str, count: int) -> float:
        draft = self.drafts[name]
        more = max(0.0, count / draft.limit - 1)
        return draft.seconds(min(count, draft.limit)) * (1 + more * self._in_large)

    def _value_of(self, name: str, confidence: float, position: int) -> float:
        """Return the tokens gained by a candidate of this confidence and the best number of further ones after it."""
        chance = self._survival * self.estimator(name).chance(confidence, position)
        return self._best(self._continuations(name, position), chance)

    def _value_of_proposing(self, name: str, pending: int, position: int) -> float:
        """Return the tokens gained by asking for a candidate, which joins the chain only if that pays then."""
        ways, survival = self._continuations(name, position), self._survival
        price = self._rate * self._cost_s(name, pending)
        outlook = self.estimator(name).outlook(position)
        most = self._best(ways, survival * max(chance for _, chance in outlook))
        if most <= price:  # cannot pay at any confidence
            return most - price
        return sum(usual * max(0.0, self._best(ways, survival * chance)) for usual, chance in outlook) - price

    def _continuations(self, name: str, position: int) -> list[tuple[float, float]]:
        """Return gain and cost of m candidates in a row from this position on, for m from 1.

        Returns:
            expected tokens, in units of the first one's chance, and the value in tokens of the time to draft m - 1 more
            after the position's own candidate and to verify them all.
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
