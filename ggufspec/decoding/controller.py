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
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

from ggufspec.decoding.curve import Curve
from ggufspec.decoding.drafters import Hindsight
from ggufspec.decoding.options import LOOKUP, ROWS


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a round went.

    Args:
        width: tokens in the target's batch, padding included.
        accepted: verified tokens that were kept, from the first on.
        emitted: tokens that the round gave.
        verify_s: seconds in the target.
        total_s: seconds of the round.
        learning_s: seconds that learning from the round before took.
    """

    width: int
    accepted: int
    emitted: int
    verify_s: float
    total_s: float
    learning_s: float = 0.0


class Policy(Protocol):
    """What the loop asks in a round, in this order."""

    def resting(self) -> bool:
        """Whether this round goes without a draft, unasked: it is only told how it went."""
        ...

    def begin(self, limit: int, *, may_trim: bool) -> None:
        """A round starts, of at most ``limit`` drafted tokens; ``may_trim``: drawn tokens may be left unverified."""
        ...

    def choose(self, offers: Mapping[str, float], pending: Mapping[str, int]) -> str | None:
        """The drafter of the next token, or None to draft no more.

        Args:
            offers: confidences of the tokens that cost nothing more, by drafter.
            pending: tokens that each other drafter would have to read for its offer.
        """
        ...

    def asked(self, name: str, pending: int, seconds: float) -> None:
        """A drafter took so long for an offer."""
        ...

    def take(self, name: str, confidence: float) -> bool:
        """Whether the token offered joins the chain."""
        ...

    def verified(self) -> int:
        """How many tokens of the chain the target shall see."""
        ...

    def learn(self, outcome: Outcome) -> None:
        """The round's end."""
        ...

    def reading(self, name: str, pending: int) -> int:
        """How many of the ``pending`` tokens that a drafter has not read it shall read now, the last ones; or 0."""
        ...

    def reviewed(self, name: str, seen: Sequence[Hindsight], seconds: float = 0.0) -> None:
        """What a drafter would have offered at places that were decided without it."""
        ...


class Fixed:
    """Always a draft of the same length; a lookup goes first where it has a token."""

    def resting(self) -> bool:
        return False

    def begin(self, limit: int, *, may_trim: bool) -> None:  # noqa: ARG002 - nothing is trimmed
        self._length = 0

    def choose(self, offers: Mapping[str, float], pending: Mapping[str, int]) -> str | None:
        return next(iter((*offers, *pending)), None)

    def asked(self, name: str, pending: int, seconds: float) -> None: ...

    def take(self, name: str, confidence: float) -> bool:  # noqa: ARG002 - everything is taken
        self._length += 1
        return True

    def verified(self) -> int:
        return self._length

    def learn(self, outcome: Outcome) -> None: ...

    def reading(self, name: str, pending: int) -> int:  # noqa: ARG002
        return 0

    def reviewed(self, name: str, seen: Sequence[Hindsight], seconds: float = 0.0) -> None: ...


# Confidences crowd near 1, where the difference between .95 and .99 decides about long drafts.
EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.99, 0.997)
_MIDDLES = [(low + high) / 2 for low, high in pairwise((0.0, *EDGES, 1.0))]
_PLACES = 3  # the first, the second and all later places of a draft are told apart


class Calibration:
    """The chance that an offer of some confidence is kept, learned from what happened to offers like it.

    Decayed counts in bins of confidence, for all places of the draft together and for each apart. A place's bin that
    has seen little leans on the pooled bin, and that one on a forecast: the confidence itself where it foretells well,
    and the mean over all bins where it does not, weighted by how well each did so far.
    """

    PRIOR = 6.0  # observations that the forecast counts as, and the pooled bin
    DECAY = 0.98  # of a bin's counts at each of its observations: some fifty count
    CARRIED = 0.2  # of a bin's counts, from one answer to the next
    CARRIED_RUN = 6.0  # observations of runs, at most

    def __init__(self) -> None:
        bins = len(_MIDDLES)
        self._seen = [[0.0] * bins for _ in range(_PLACES + 1)]  # the last row pools all places
        self._kept = [[0.0] * bins for _ in range(_PLACES + 1)]
        self._usual = [[1 / bins] * bins for _ in range(2)]  # how often each bin was offered: first place, later places
        self._run = [0.6 * 4, 4.0]  # kept and seen beyond the first place
        self._all = [0.5 * 4, 4.0]  # kept and seen at all
        self._losses = [0.0, 1.0]  # of both forecasts, the confidence and the mean: nats, decayed
        self._outlooks: dict[int, list[tuple[float, float]]] = {}  # what was asked since the last change

    def chance(self, confidence: float, place: int) -> float:
        """That an offer at this place of a draft (0 first) is kept, if all before it are."""
        return self._chance(bisect_right(EDGES, confidence), place)

    def outlook(self, place: int) -> list[tuple[float, float]]:
        """Of each bin: how often it is offered at this place, and the chance to be kept; the first sum to 1."""
        place = min(place, _PLACES - 1)
        known = self._outlooks.get(place)
        if known is None:
            usual = enumerate(self._usual[min(place, 1)])
            known = self._outlooks[place] = [(share, self._chance(bin_, place)) for bin_, share in usual]
        return known

    @property
    def run(self) -> float:
        """The chance that a token behind a kept one is kept too."""
        return min(self._run[0] / self._run[1], 0.98)

    def fade(self) -> None:
        """Another answer begins, which may be another kind of text: what was seen so far counts for less."""
        self._outlooks.clear()
        for counts in (self._seen, self._kept):
            counts[:] = [[self.CARRIED * count for count in row] for row in counts]
        share = min(1.0, self.CARRIED_RUN / self._run[1])
        self._run = [share * count for count in self._run]

    def offered(self, confidence: float, place: int) -> None:
        """An offer was seen, whatever became of it."""
        self._outlooks.clear()
        usual = self._usual[min(place, 1)]
        usual[:] = [0.95 * share for share in usual]
        usual[bisect_right(EDGES, confidence)] += 0.05

    def observe(self, confidence: float, place: int, kept: float) -> None:
        """An offer was judged: ``kept`` is 1 or 0, or a chance between."""
        self._outlooks.clear()
        bin_ = bisect_right(EDGES, confidence)
        mean = self._all[0] / self._all[1]
        for forecast, chance in enumerate((_MIDDLES[bin_], mean)):
            loss = -kept * math.log(chance) - (1 - kept) * math.log(1 - chance)
            self._losses[forecast] = 0.98 * self._losses[forecast] + loss
        for row in (min(place, _PLACES - 1), _PLACES):
            self._seen[row][bin_] = self._seen[row][bin_] * self.DECAY + 1
            self._kept[row][bin_] = self._kept[row][bin_] * self.DECAY + kept
        self._all = [0.97 * self._all[0] + 0.03 * 0.5 + kept, 0.97 * self._all[1] + 0.03 + 1]  # never 0, never 1
        if place:
            self._run = [0.95 * self._run[0] + kept, 0.95 * self._run[1] + 1]

    def followed(self, agreements: Sequence[float]) -> None:
        """Offers at places one behind the other, judged and not drafted: they tell of runs too, half as much.

        Without that a draft that is off never looks as if a long chain of it could pay.
        """
        for before, now in pairwise(agreements):
            weight = before / 2
            kept, seen = self._run
            self._run = [(1 - 0.05 * weight) * kept + weight * now, (1 - 0.05 * weight) * seen + weight]

    def _chance(self, bin_: int, place: int) -> float:
        doubt = 1 / (1 + math.exp(min(self._losses[1] - self._losses[0], 50.0)))
        believed = (1 - doubt) * _MIDDLES[bin_] + doubt * self._all[0] / self._all[1]
        for row in (_PLACES, min(place, _PLACES - 1)):
            believed = (self._kept[row][bin_] + self.PRIOR * believed) / (self._seen[row][bin_] + self.PRIOR)
        return believed


@dataclass(slots=True)
class Weariness:
    """What deciding costs, and for how long it is left off.

    Args:
        rest: rounds to come in which nobody is asked.
        plain: width and seconds of the target's batches without a draft, not told to its curve yet.
        plain_s: seconds of a round outside the target if nobody decides.
        learning_s: seconds behind a round otherwise.
        awake: rounds since the last rest.
        gain: tokens that these brought more than the target alone would have in their time; decayed.
        deciding_s: seconds that these took for deciding.
    """

    rest: int = 0
    plain: list[tuple[int, float]] = field(default_factory=list)
    plain_s: float = 0.0
    learning_s: float = 0.0
    awake: int = 0
    gain: float = 0.0
    deciding_s: float = 0.0


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
        if name != LOOKUP:
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
        if self.draft is None or name == LOOKUP or pending <= ROWS:
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
        if name != LOOKUP:  # which had no offer at some places
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
        if name == LOOKUP or self.draft is None:
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
