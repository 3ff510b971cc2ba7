"""The drafter and the length of a draft by expected tokens per second. Pure: times and outcomes are passed in.

With rho the rate to beat, T(n) the seconds to verify n tokens and c those of a drafted token, a chain whose first i
tokens are all accepted with probability S_i is worth

    1 + S_1 + ... + S_k - rho * (k * c + T(k + 1))

tokens more than the same time at rate rho (Dinkelbach's form of a ratio). A token is drafted while its part of this is
positive, judged by what the next confidence usually is, and verified if it still is once the confidence is known.
rho is the rate of the last rounds, and never less than that of target-only: that is how speculation switches itself
off. A drafter that is off catches up now and then, for a small share of the time, and its shadow evaluation is how it
comes back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from ggufspec.decoding.drafters.base import ShadowEvaluation
from ggufspec.decoding.options import ROWS
from ggufspec.decoding.policy.backoff import BackOff
from ggufspec.decoding.policy.base import Outcome, Policy
from ggufspec.decoding.policy.constants import CONSTANTS
from ggufspec.decoding.policy.estimator import AcceptanceEstimator
from ggufspec.decoding.policy.latency import LatencyModel


class Adaptive(Policy):
    """Drafts as far as it pays, which may be not at all.

    Args:
        target: the target's latency model.
        drafts: the latency models of drafters that decode, by name; a drafter that is not among them costs nothing.
        estimators: what earlier answers taught about each drafter; it fades, and this answer adds to it.
        back_off: what they taught about deciding.
    """

    def __init__(
        self,
        target: LatencyModel,
        drafts: Mapping[str, LatencyModel] | None = None,
        estimators: dict[str, AcceptanceEstimator] | None = None,
        back_off: BackOff | None = None,
    ) -> None:
        self.target, self.drafts = target, drafts or {}
        self._estimators = {} if estimators is None else estimators
        for estimator in self._estimators.values():
            estimator.fade()
        self._back_off = back_off or BackOff()
        self._back_off.begin_answer()
        rounds = CONSTANTS.initial_rounds
        self._tokens, self._seconds = float(rounds), rounds * target.seconds(1)
        self._elapsed_s = self._catch_up_s = 0.0
        self._unread: set[str] | None = None  # drafters that have the prompt to read; None before the first round
        self._reads_first = ""  # who reads it now
        self._in_large = 1.0  # seconds for a token in a batch as large as a prompt, of those in the widest of a round
        self._wanted = 1.0  # share of the last rounds in which a draft model was asked, or nobody had a candidate
        self._last_width: int | None = None
        self._backing_off = False  # in this round
        self._proposed: dict[tuple[str, int], list[float]] = {}  # seconds of proposals by drafter and tokens read
        self._verified = 0

    def estimator(self, name: str) -> AcceptanceEstimator:
        """What has been observed of a drafter's candidates."""
        known = self._estimators.get(name)
        if known is None:
            known = self._estimators[name] = AcceptanceEstimator()
        return known

    @property
    def rate(self) -> float:
        """Tokens per second to beat."""
        target_only = 1 / self.target.seconds(1)
        return max(target_only, self._tokens / self._seconds)

    def is_backing_off(self) -> bool:
        self._backing_off = self._back_off.begin_round()
        return self._backing_off

    def prompt_read(self, tokens: int, seconds: float) -> None:
        self._elapsed_s += seconds
        widest = self.target.limit
        if tokens >= widest:
            self._in_large = min(1.0, seconds / tokens / (self.target.seconds(widest) / widest))

    def begin(self, limit: int, remaining: int, *, may_trim: bool) -> None:
        if len(self._back_off.undrafted) >= CONSTANTS.joint_batches:
            self._observe_undrafted()
        self._limit, self._may_trim = min(limit, self.target.limit - 1), may_trim
        self._horizon = min(remaining, CONSTANTS.horizon)
        self._rate = self.rate
        self._runs: dict[str, list[float]] = {}
        self._proposed.clear()
        # (limit + 1,) tokens that the time to verify i drafted tokens and one more is worth
        self._price = [self._rate * seconds for seconds in self.target.up_to(self._limit + 1, self._last_width)]
        self._chain: list[tuple[str, float, float]] = []  # drafter, confidence, chance that all up to here are accepted
        self._verified = 0

    def choose(self, confidences: Mapping[str, float], pending: Mapping[str, int]) -> str | None:
        position = len(self._chain)
        if position >= self._limit:
            return None
        if self._unread is None:
            self._unread = {name for name, unread in pending.items() if unread > ROWS}
        values = {name: self._value_of(name, confidence, position) for name, confidence in confidences.items()}
        values |= {
            name: self._value_of_proposing(name, unread, position)
            for name, unread in pending.items()
            if name not in self._unread
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

    def observe_round(self, outcome: Outcome) -> None:
        back_off, decay = self._back_off, CONSTANTS.rate_decay
        switched = self._last_width != outcome.width
        self._last_width = outcome.width
        total_s = outcome.total_s + outcome.learning_s
        self._elapsed_s += total_s
        self._tokens = decay * self._tokens + outcome.emitted
        self._seconds = decay * self._seconds + total_s
        if back_off.active:  # the round before was
            back_off.learning_s = outcome.learning_s
        if switched or (self._verified and not self._backing_off):
            self._observe_undrafted()
            self.target.observe(outcome.width, outcome.verify_s)
        else:
            back_off.undrafted.append((outcome.width, outcome.verify_s))
        if self._backing_off:
            back_off.observe_idle(outcome)
            return
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
                draft.observe(draft.width(count), sum(spent) / len(spent))

    def catch_up_count(self, name: str, pending: int) -> int:
        if name not in self.drafts or pending <= ROWS:
            return 0
        if self._unread and name in self._unread:
            count = self._first_count(name, pending)
            if count:
                self._unread.discard(name)
                self._reads_first = name
                self._back_off.cooldown = 0
            return count
        credit_s = CONSTANTS.catch_up_credit * self.target.seconds(1)
        allowance_s = CONSTANTS.catch_up_share * self._elapsed_s + credit_s - self._catch_up_s
        counts = (pending, CONSTANTS.catch_up_window)
        return next((count for count in counts if self._reading_s(name, count) <= allowance_s), 0)

    def _first_count(self, name: str, pending: int) -> int:
        """How many tokens of the prompt, the last ones, are worth reading; 0 where these would be few."""
        known, elapsed_s = self.estimator(name).known, self._elapsed_s + self._horizon * self.target.seconds(1)
        gain_s = max(0.0, self._value_of_proposing(name, 1, 0)) * self._horizon / self._rate
        most_s = max((1 - known) * CONSTANTS.first_share * elapsed_s, known * CONSTANTS.first_gain * gain_s)
        count = min(pending, int(pending * most_s / self._reading_s(name, pending)))
        return count if count >= min(pending, 2 * ROWS) else 0

    def shadow_evaluated(self, name: str, seen: Sequence[ShadowEvaluation], seconds: float = 0.0) -> None:
        if name == self._reads_first:  # what it may take is its own matter; the credit was for finding out
            self._reads_first = ""
            self._catch_up_s += CONSTANTS.catch_up_credit * self.target.seconds(1)
        else:
            self._catch_up_s += seconds
        self._elapsed_s += seconds
        estimator = self.estimator(name)
        for one in seen:
            estimator.observe_candidate(one.confidence, 0)
            estimator.observe(one.confidence, 0, one.agreement)
        if name in self.drafts:  # a lookup has no candidate at some positions
            estimator.observe_shadow_run([one.agreement for one in seen])

    def _observe_undrafted(self) -> None:
        """The target's latency model observes batches without a draft as one: that takes as long as one of them.

        None of them was of another width than the batch before it, which costs more.
        """
        if batches := self._back_off.undrafted:
            self.target.observe(batches[0][0], sum(seconds for _, seconds in batches) / len(batches))
            batches.clear()

    @property
    def _survival(self) -> float:
        return self._chain[-1][2] if self._chain else 1.0

    def _cost_s(self, name: str, pending: int) -> float:
        """Seconds for a candidate of a drafter that has ``pending`` tokens to read."""
        draft = self.drafts.get(name)
        if draft is None:
            return 0.0
        one = draft.seconds(1)
        rounds = 1 + (CONSTANTS.amortised_rounds - 1) * self._wanted if pending > ROWS else 1
        return one + (self._reading_s(name, pending) - one) / rounds

    def _reading_s(self, name: str, count: int) -> float:
        """Seconds in which a drafter reads so many tokens."""
        draft = self.drafts[name]
        widest = draft.limit
        return draft.seconds(count) if count <= widest else draft.seconds(widest) * count / widest * self._in_large

    def _value_of(self, name: str, confidence: float, position: int) -> float:
        """Tokens gained by a candidate of this confidence and the best number of further ones behind it."""
        chance = self._survival * self.estimator(name).chance(confidence, position)
        return self._best(self._continuations(name, position), chance)

    def _value_of_proposing(self, name: str, pending: int, position: int) -> float:
        """Tokens gained by asking for a candidate, which joins the chain only where that pays then."""
        ways, survival = self._continuations(name, position), self._survival
        price = self._rate * self._cost_s(name, pending)
        outlook = self.estimator(name).outlook(position)
        most = self._best(ways, survival * max(chance for _, chance in outlook))
        if most <= price:  # it cannot pay, whatever the confidence
            return most - price
        return sum(usual * max(0.0, self._best(ways, survival * chance)) for usual, chance in outlook) - price

    def _continuations(self, name: str, position: int) -> list[tuple[float, float]]:
        """What m candidates in a row from this position on bring and cost, m from 1.

        Returns:
            tokens expected, in units of the first one's chance, and tokens that the time is worth to draft m - 1 more
            behind the position's own candidate and verify them all.
        """
        runs = self._runs.get(name)
        if runs is None:
            run = self.estimator(name).run
            runs = self._runs[name] = list(accumulate(run**number for number in range(self._limit)))
        drafting, before = self._rate * self._cost_s(name, 1), self._price[position]
        prices = enumerate(self._price[position + 1 :])
        return [(runs[number], price - before + drafting * number) for number, price in prices]

    @staticmethod
    def _best(ways: Sequence[tuple[float, float]], chance: float) -> float:
        """Of the ways to go on: tokens gained if the first one's chance is this."""
        return max((chance * run - price for run, price in ways), default=-math.inf)
