"""Who drafts, how far, and how much of it is verified: the policies. Pure: times and outcomes are told.

The adaptive policy maximises tokens per second. With rho the rate to beat, T(n) the seconds to verify n tokens and c
those of a drafted token, a chain whose first i tokens are all kept with probability S_i is worth

    1 + S_1 + ... + S_k - rho * (k * c + T(k + 1))

tokens more than the same time at rate rho (Dinkelbach's form of a ratio). A token is drafted while its part of this is
positive, judged by what the next confidence usually is, and verified if it still is once the confidence is known.
rho is the rate of the last rounds, and never less than the target's alone: that is what makes speculation switch
itself off. A draft that is off still reads along now and then, for a small share of the time, and sees what it would
have drafted; that is how it comes back.

Deciding costs time too, a tenth of a millisecond a round. Where that is not nothing beside a token of the target's, and
rounds with it have brought less than the target alone would have in their time, it rests for so many rounds that it
takes a hundredth of the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from ggufspec.decoding.drafters.base import Hindsight
from ggufspec.decoding.options import ROWS
from ggufspec.decoding.policy.backoff import Weariness
from ggufspec.decoding.policy.base import Outcome
from ggufspec.decoding.policy.estimator import Calibration
from ggufspec.decoding.policy.latency import Curve


class Adaptive:
    """The draft's length and drafter by expected tokens per second.

    Args:
        target: the target's verify curve.
        draft: the draft's seconds by tokens read, or None without one.
        calibrations: what earlier answers taught about the drafters; it fades, and this one adds to it.
        weariness: what they taught about deciding. An answer begins awake; where the one before ended without a gain,
            it has to show one sooner.
    """

    REVIEW_SHARE = 0.004  # of the time for a draft that is off and reads along
    AMORTISED = 8  # rounds over which a draft that lags behind pays for catching up, if it is wanted in all of them
    MEMORY = 0.93  # of the rate, per round
    WINDOW = 4 * ROWS  # tokens that a draft reads along where all that it missed would cost too much
    REST_SHARE = 0.01  # of the time for deciding where that brings nothing
    TRIAL = 16  # rounds in which drafts may show that they bring more than deciding costs
    TOGETHER = 4  # batches without a draft that the target's curve is told of at once
    CREDIT = 0.5  # target-only tokens' time that it may read along beyond its share, to learn what it is worth

    def __init__(
        self,
        target: Curve,
        draft: Curve | None = None,
        calibrations: dict[str, Calibration] | None = None,
        weariness: Weariness | None = None,
    ) -> None:
        self.target, self.draft = target, draft
        self._calibrations = {} if calibrations is None else calibrations
        for calibration in self._calibrations.values():
            calibration.fade()
        self._weary = weariness or Weariness()
        self._trial = self.TRIAL // 4 if self._weary.gain < 0 else self.TRIAL
        self._weary.rest = self._weary.awake = 0
        self._tokens, self._seconds = 3.0, 3 * target.seconds(1)  # as if some rounds had gone without a draft
        self._elapsed_s = self._reviewed_s = 0.0
        self._wanted = 1.0  # share of the last rounds in which the draft was asked, or nobody had anything
        self._last_width: int | None = None
        self._resting = False  # this round
        self._asked: dict[int, list[float]] = {}  # seconds of the round's offers by the tokens that were read

    def calibration(self, name: str) -> Calibration:
        """What has been learned of a drafter's offers."""
        known = self._calibrations.get(name)
        if known is None:
            known = self._calibrations[name] = Calibration()
        return known

    @property
    def rate(self) -> float:
        """Tokens per second to beat."""
        alone = 1 / self.target.seconds(1)
        return max(alone, self._tokens / self._seconds)

    def resting(self) -> bool:
        self._resting = self._weary.rest > 0
        self._weary.rest -= self._resting
        return self._resting

    def begin(self, limit: int, *, may_trim: bool) -> None:
        if len(self._weary.plain) >= self.TOGETHER:
            self._tell_plain()
        self._limit, self._may_trim = min(limit, self.target.limit - 1), may_trim
        self._rate = self.rate
        self._runs: dict[str, list[float]] = {}
        self._asked.clear()
        # (limit + 1,) tokens that the time to verify i drafted tokens and one more is worth
        self._price = [self._rate * seconds for seconds in self.target.up_to(self._limit + 1, self._last_width)]
        self._chain: list[tuple[str, float, float]] = []  # drafter, confidence, chance that all up to here are kept
        self._verified = 0

    def choose(self, offers: Mapping[str, float], pending: Mapping[str, int]) -> str | None:
        place = len(self._chain)
        if place >= self._limit:
            return None
        values = {name: self._worth_taking(name, confidence, place) for name, confidence in offers.items()}
        values |= {name: self._worth_asking(name, unread, place) for name, unread in pending.items()}
        best = max(values, key=lambda name: values[name], default=None)
        return best if best is not None and values[best] > 0 else None

    def asked(self, name: str, pending: int, seconds: float) -> None:
        if name != "lookup":
            self._asked.setdefault(pending, []).append(seconds)

    def take(self, name: str, confidence: float) -> bool:
        place = len(self._chain)
        calibration = self.calibration(name)
        calibration.offered(confidence, place)
        if self._worth_taking(name, confidence, place) <= 0:
            return False
        self._chain.append((name, confidence, self._survival * calibration.chance(confidence, place)))
        return True

    def verified(self) -> int:
        self._verified = len(self._chain)
        if self._may_trim and self._chain:
            kept = accumulate((survival for _, _, survival in self._chain), initial=0.0)
            values = [tokens - price for tokens, price in zip(kept, self._price, strict=False)]
            self._verified = values.index(max(values))
        return self._verified

    def learn(self, outcome: Outcome) -> None:
        switched = self._last_width != outcome.width
        self._last_width = outcome.width
        total_s = outcome.total_s + outcome.learning_s
        self._elapsed_s += total_s
        self._tokens = self.MEMORY * self._tokens + outcome.emitted
        self._seconds = self.MEMORY * self._seconds + total_s
        weary = self._weary
        if weary.awake:  # the round before was
            weary.learning_s = outcome.learning_s
        if switched or (self._verified and not self._resting):
            self._tell_plain()
            self.target.observe(outcome.width, outcome.verify_s)
        else:
            weary.plain.append((outcome.width, outcome.verify_s))
        if self._resting:
            weary.awake = 0
            weary.plain_s += (outcome.total_s - outcome.verify_s - weary.plain_s) / 8
            return
        self._tire(outcome)
        judged = self._chain[: min(outcome.accepted + 1, self._verified)]
        for place, (name, confidence, _) in enumerate(judged):
            self.calibration(name).observe(confidence, place, float(place < outcome.accepted))
        wanted = bool(self._asked or not self._verified)
        self._wanted = self.MEMORY * self._wanted + (1 - self.MEMORY) * wanted
        if self.draft is not None:
            for count, spent in self._asked.items():
                if count <= self.draft.limit:
                    self.draft.observe(self.draft.width(count), sum(spent) / len(spent))

    def reading(self, name: str, pending: int) -> int:
        if self.draft is None or name == "lookup" or pending <= ROWS:
            return 0
        allowance = self.REVIEW_SHARE * self._elapsed_s + self.CREDIT * self.target.seconds(1) - self._reviewed_s
        return next((count for count in (pending, self.WINDOW) if self._reading_s(count) <= allowance), 0)

    def reviewed(self, name: str, seen: Sequence[Hindsight], seconds: float = 0.0) -> None:
        self._reviewed_s += seconds
        self._elapsed_s += seconds
        calibration = self.calibration(name)
        for one in seen:
            calibration.offered(one.confidence, 0)
            calibration.observe(one.confidence, 0, one.agreement)
        if name != "lookup":  # which had no offer at some places
            calibration.followed([one.agreement for one in seen])

    def _tell_plain(self) -> None:
        """Tell the target's curve of batches without a draft, together: that takes as long as telling of one.

        None of them was of another width than the batch before it, which costs more.
        """
        if plain := self._weary.plain:
            self.target.observe(plain[0][0], sum(seconds for _, seconds in plain) / len(plain))
            plain.clear()

    def _tire(self, outcome: Outcome) -> None:
        """Rest if the rounds since the last rest brought less than the target alone would have in their time."""
        weary = self._weary
        alone_s = self.target.seconds(1) + weary.plain_s
        drafting_s = sum(map(sum, self._asked.values()))
        deciding_s = outcome.total_s - outcome.verify_s - drafting_s - weary.plain_s + weary.learning_s
        if not weary.awake:
            weary.gain = weary.deciding_s = 0.0
        weary.awake += 1
        weary.gain = self.MEMORY * weary.gain + outcome.emitted - (outcome.total_s + weary.learning_s) / alone_s
        weary.deciding_s += max(0.0, deciding_s)
        if weary.gain < 0 and (not self._verified or weary.awake >= self._trial):
            self._trial = self.TRIAL
            weary.rest = max(0, int(weary.deciding_s / (self.REST_SHARE * alone_s)) - weary.awake)

    @property
    def _survival(self) -> float:
        return self._chain[-1][2] if self._chain else 1.0

    def _cost(self, name: str, pending: int) -> float:
        """Seconds for an offer of a drafter that lags behind by ``pending`` tokens."""
        if name == "lookup" or self.draft is None:
            return 0.0
        one = self.draft.seconds(1)
        rounds = 1 + (self.AMORTISED - 1) * self._wanted if pending > ROWS else 1
        return one + (self._reading_s(pending) - one) / rounds

    def _reading_s(self, count: int) -> float:
        """Seconds in which the draft reads so many tokens."""
        assert self.draft is not None
        widest = self.draft.limit
        return self.draft.seconds(count) if count <= widest else self.draft.seconds(widest) * count / widest

    def _worth_taking(self, name: str, confidence: float, place: int) -> float:
        """Tokens gained by a token of this confidence and the best number of further ones behind it."""
        return self._best(self._further(name, place), self._survival * self.calibration(name).chance(confidence, place))

    def _worth_asking(self, name: str, pending: int, place: int) -> float:
        """Tokens gained by asking for an offer, which is taken only where that pays then."""
        further, survival, price = self._further(name, place), self._survival, self._rate * self._cost(name, pending)
        outlook = self.calibration(name).outlook(place)
        most = self._best(further, survival * max(chance for _, chance in outlook))
        if most <= price:  # it cannot pay, whatever the confidence
            return most - price
        return sum(usual * max(0.0, self._best(further, survival * chance)) for usual, chance in outlook) - price

    def _further(self, name: str, place: int) -> list[tuple[float, float]]:
        """What m offers in a row from this place on bring and cost, m from 1.

        Returns:
            tokens expected, in units of the first one's chance, and tokens that the time is worth to draft m - 1 more
            behind the place's own offer and verify them all.
        """
        runs = self._runs.get(name)
        if runs is None:
            run = self.calibration(name).run
            runs = self._runs[name] = list(accumulate(run**number for number in range(self._limit)))
        drafting, before = self._rate * self._cost(name, 1), self._price[place]
        prices = enumerate(self._price[place + 1 :])
        return [(runs[number], price - before + drafting * number) for number, price in prices]

    @staticmethod
    def _best(further: Sequence[tuple[float, float]], chance: float) -> float:
        """Of the ways to go on: tokens gained if the first one's chance is this."""
        return max((chance * run - price for run, price in further), default=-math.inf)
