"""A trace of an answer: for every drafted token who offered it, what both models thought of it, and what the rule did.

Pure NumPy. It listens and changes nothing: the rule decides before its numbers are looked at, from the same generator.
Rows are copied while a round runs and weighed when it is over, so that its times stay nearly what they are without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ggufspec.decoding.loop import Round
from ggufspec.decoding.noise import gumbel
from ggufspec.decoding.rules.base import AcceptanceResult, DraftToken, Rule
from ggufspec.decoding.rules.coupled import CoupledRule
from ggufspec.decoding.rules.lossy import TopKRule, TypicalRule, log_probabilities
from ggufspec.decoding.rules.speculative import Distribution, SpeculativeRule, residual
from ggufspec.decoding.sampling import Candidates, Ids, Logits, candidates
from ggufspec.schema.rounds import (
    Added,
    Drawn,
    Judged,
    Likely,
    Own,
    Place,
    Rank,
    Seen,
    Sum,
    TracedRound,
    Typical,
)

LIKELIEST = 10  # tokens of a row that are told


def spelled(piece: bytes) -> str:
    r"""A token's bytes as text; those that are no whole character as ``\xNN``."""
    return piece.decode("utf-8", "backslashreplace")


class Trace:
    """What an answer's rounds were made of. Given to :meth:`SpeculativeDecoder.generate`, for one answer at a time.

    Args:
        spell: the text of a token; without it texts are empty.
        on_round: called with every round when it is over, before its tokens are yielded.

    Attributes:
        rounds: of the last answer, as far as it came.
    """

    def __init__(
        self,
        spell: Callable[[int], str] | None = None,
        on_round: Callable[[TracedRound], None] | None = None,
    ) -> None:
        self.rounds: list[TracedRound] = []
        self._spell = spell or (lambda _: "")
        self._on_round = on_round
        self._watched: _Watched | None = None

    def watch(self, rule: Rule) -> Rule:
        """An answer begins: the same rule, watched from now on.

        Raises:
            TypeError: the rule is none of :func:`acceptance.make_rule`.
        """
        self.rounds = []
        if isinstance(rule, CoupledRule):
            self._watched = _Exact(rule, self._spell)
        elif isinstance(rule, SpeculativeRule):
            self._watched = _Residual(rule, self._spell)
        else:
            raise TypeError(f"no trace is known of the rule {rule.name!r}")
        return self._watched

    def add(self, round_: Round) -> None:
        """A round of the watched rule is over."""
        assert self._watched is not None
        traced = self._watched.told(round_, len(self.rounds) + 1)
        self.rounds.append(traced)
        if self._on_round is not None:
            self._on_round(traced)


@dataclass(slots=True)
class _Offer:
    """A token that a model offered, and the row that it comes from."""

    proposal: DraftToken
    row: Logits
    position: int
    told: tuple[Seen, float] | None = None  # the row as it was seen, and q


class _Watched:
    """A rule that is listened to: it does what it would do."""

    def __init__(self, rule: CoupledRule | SpeculativeRule, spell: Callable[[int], str]) -> None:
        self.name, self.lossless, self.may_trim = rule.name, rule.lossless, rule.may_trim
        self._rule, self._spell = rule, spell
        self._offers: dict[int, _Offer] = {}  # of this round, by the proposal's id()
        self._coins: list[float] = []  # uniform variables of this round's verification
        self._chain: tuple[DraftToken, ...] = ()
        self._verdict = AcceptanceResult(0, None)
        self._position = 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._rule.begin(prompt)

    def follow(self, text: Sequence[int]) -> None:
        self._rule.follow(text)

    def permits(self, token: int, position: int) -> bool:
        return self._rule.permits(token, position)

    def penalised(self, row: Logits, position: int) -> Logits:
        return self._rule.penalised(row, position)

    def agreement(self, logits: Logits, position: int, token: int) -> float:
        return self._rule.agreement(logits, position, token)

    def draft_token(self, logits: Logits, position: int) -> DraftToken:
        proposal = self._rule.draft_token(logits, position)
        offer = self._offers[id(proposal)] = _Offer(proposal, logits.copy(), position)
        if self._grammar:  # what is permitted here is not known any more when the round is over
            self._weigh(offer)
        return proposal

    def verify(self, rows: npt.NDArray[np.float32], proposals: Sequence[DraftToken], position: int) -> AcceptanceResult:
        self._coins.clear()
        self._verdict = verdict = self._rule.verify(rows, proposals, position)
        self._rows = rows[: verdict.accepted + 1].copy()
        self._chain, self._position = tuple(proposals), position
        return verdict

    def told(self, round_: Round, number: int) -> TracedRound:
        """What is told of the round that was just verified."""
        accepted, sampling = self._verdict.accepted, self._rule.sampling
        places: list[Place] = []
        for i, (proposal, drafter) in enumerate(zip(self._chain, round_.drafters, strict=True)):
            offer = self._offers.get(id(proposal))
            draft, q = self._weigh(offer) if offer else (None, 1.0)
            places.append(
                Place(
                    position=self._position + i,
                    drafter=drafter,
                    token=proposal.token,
                    text=self._spell(proposal.token),
                    q=q,
                    draft=draft,
                    verdict="kept" if i < accepted else "refused" if i == accepted else "behind",
                    judged=self._judge(self._rows[i], i, q) if i <= accepted else None,
                )
            )
        self._offers.clear()
        return TracedRound(
            number=number,
            rule=self.name,
            temperature=sampling.temperature,
            seed=sampling.seed,
            grammar=self._grammar,
            places=tuple(places),
            added=self._add(self._rows[accepted], emitted=len(round_.emitted) > accepted),
            accepted=accepted,
            emitted=round_.emitted,
            width=round_.width,
            draft_s=round_.draft_s,
            verify_s=round_.verify_s,
            total_s=round_.total_s,
            penalised=sampling.penalises,
        )

    @property
    def _grammar(self) -> bool:
        return self._rule._path is not None

    def _weigh(self, offer: _Offer) -> tuple[Seen, float]:
        """The draft's row as it was seen, and the probability with which it gave its token."""
        if offer.told is None:
            token, q = offer.proposal.token, offer.proposal.q
            seen = self._see(offer.row, token, offer.position)
            offer.told = seen, self._q(offer) if q is None else _at(q, token)
        return offer.told

    def _see(self, row: Logits, token: int, position: int) -> Seen:
        log_p = log_probabilities(row, 1.0)

        def likely(one: int) -> Likely:
            return Likely(one, self._spell(one), float(np.exp(log_p[one])), self.permits(one, position))

        logit = float(row[token])
        return Seen(
            logit if np.isfinite(logit) else None,
            float(np.exp(log_p[token])),
            tuple(likely(one) for one in likeliest_ids(row).tolist()),
        )

    @property
    def _source(self) -> Literal["bonus", "target"]:
        """Whose the added token is."""
        return "bonus" if self._verdict.accepted == len(self._chain) > 0 else "target"

    def _q(self, offer: _Offer) -> float:
        """The probability of an offered token whose row was not truncated."""
        raise NotImplementedError

    def _judge(self, row: Logits, place: int, q: float) -> Judged:
        raise NotImplementedError

    def _add(self, row: Logits, *, emitted: bool) -> Added | None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _Choice:
    """The target's own choice, the row that it was made from, and what truncation left of that, if there was any."""

    token: int
    row: Logits
    left: Candidates | None
    masked: bool


class _Exact(_Watched):
    """The exact rule, and the lossy ones, which keep more."""

    _rule: CoupledRule

    def _q(self, offer: _Offer) -> float:
        choice = self._choice(offer.row, offer.position)
        return self._p(choice, offer.proposal.token) if choice else 1.0

    def _judge(self, row: Logits, place: int, q: float) -> Judged:
        rule, token, position = self._rule, self._chain[place].token, self._position + place
        target = self._see(row, token, position)
        choice = self._choice(row, position)
        if choice is None:
            return Judged(target, p=0.0, ratio=0.0, masked=True)
        p, sum_ = self._p(choice, choice.token), self._sum(choice, row, choice.token, position)
        assert sum_ is not None
        own = Own(choice.token, self._spell(choice.token), p, sum_)
        p = self._p(choice, token)
        return Judged(
            target,
            p=p,
            ratio=p / q,
            masked=choice.masked,
            sum=self._sum(choice, row, token, position),
            own=own,
            rank=Rank(rule.rank(row, token), rule.count) if isinstance(rule, TopKRule) else None,
            typical=_typical(rule, row, token) if isinstance(rule, TypicalRule) else None,
        )

    def _add(self, row: Logits, *, emitted: bool) -> Added | None:
        token, position = self._verdict.token, self._position + self._verdict.accepted
        choice = self._choice(row, position)
        if token is None or choice is None:
            return None
        p = self._p(choice, token)
        return Added(
            position,
            token,
            self._spell(token),
            self._source,
            law="p",
            probability=p,
            p=p,
            masked=choice.masked,
            target=self._see(row, token, position),
            sum=self._sum(choice, row, token, position),
            emitted=emitted,
        )

    def _choice(self, row: Logits, position: int) -> _Choice | None:
        """As the rule makes it; None if nothing is permitted."""
        token, left = self._rule._choose_freely(row, position)
        if self.permits(token, position):
            return _Choice(token, row, left, masked=False)
        masked = self._rule._masked(row, position)
        if masked is None:
            return None
        token, left = self._rule._choose_freely(masked, position)
        return _Choice(token, masked, left, masked=True)

    def _p(self, choice: _Choice, token: int) -> float:
        if choice.left is not None:
            return _at(choice.left, token)
        return float(np.exp(log_probabilities(choice.row, self._rule.sampling.temperature)[token]))

    def _sum(self, choice: _Choice, row: Logits, token: int, position: int) -> Sum | None:
        """What the rule compares; None for a token that it leaves out."""
        sampling, score = self._rule.sampling, -np.inf
        if sampling.temperature == 0:
            if token == choice.token or self.permits(token, position):
                score = float(row[token]) - float(row[choice.token])
        elif choice.left is None:
            score = (float(choice.row[token]) - float(choice.row.max())) / sampling.temperature
        else:
            score = choice.left.scores[choice.left.ids == token].max(initial=-np.inf)
        if not np.isfinite(score):
            return None
        noise = gumbel(sampling.seed, position, np.array([token]))[0] if sampling.temperature else 0.0
        return Sum(float(score), float(noise))


class _Residual(_Watched):
    """The residual rule, and its coins."""

    _rule: SpeculativeRule

    def __init__(self, rule: SpeculativeRule, spell: Callable[[int], str]) -> None:
        super().__init__(rule, spell)
        rule.listen(self._coins.append)

    def _judge(self, row: Logits, place: int, q: float) -> Judged:
        token, position = self._chain[place].token, self._position + place
        target, left = self._see(row, token, position), self._left(row, position)
        if left is None:
            return Judged(target, p=0.0, ratio=0.0, masked=True)
        p = _at(left, token)
        return Judged(target, p, p / q, masked=self._masks(row, left), coin=self._coins[place])

    def _add(self, row: Logits, *, emitted: bool) -> Added | None:
        token, place = self._verdict.token, self._verdict.accepted
        position = self._position + place
        left = self._left(row, position)
        if token is None or left is None:
            return None
        p = Distribution.of(left)
        law, of_residual = p.probabilities, False
        if place < len(self._chain):
            refused = self._chain[place]
            q = (Distribution.point(refused.token) if refused.q is None else Distribution.of(refused.q)).at(p.ids)
            law, of_residual = residual(p.probabilities, q), bool((p.probabilities > q).any())
        index, reached = int(p.ids.searchsorted(token)), law.cumsum()
        return Added(
            position,
            token,
            self._spell(token),
            self._source,
            law="residual" if of_residual else "p",
            probability=float(law[index]),
            p=float(p.probabilities[index]),
            masked=self._masks(row, left),
            target=self._see(row, token, position),
            drawn=Drawn(
                self._coins[-1], float(reached[index - 1]) if index else 0.0, float(reached[index]), float(reached[-1])
            ),
            emitted=emitted,
        )

    def _left(self, row: Logits, position: int) -> Candidates | None:
        """What sampling and grammar leave of a row; None if that is nothing."""
        masked = self._rule._masked(row, position)
        return None if masked is None else candidates(masked, self._rule.sampling)

    def _masks(self, row: Logits, left: Candidates) -> bool:
        return self._grammar and not np.array_equal(candidates(row, self._rule.sampling).ids, left.ids)


def _typical(rule: TypicalRule, row: Logits, token: int) -> Typical:
    probability, entropy, bar = rule.weigh(row, token)
    return Typical(probability, entropy, rule.epsilon, bar)


def _at(left: Candidates, token: int) -> float:
    """The probability of a token drawn from candidates; 0 of one that is not among them."""
    return float(Distribution.of(left).at(np.array([token]))[0])


def likeliest_ids(row: Logits, count: int = LIKELIEST) -> Ids:
    """The ids of the highest logits, highest first, ties by the lower id; none with a logit of -inf.

    Args:
        row: (vocab,) as the model gives it.
        count: so many at most.
    """
    count = min(count, row.size)
    ids = np.flatnonzero(row >= np.partition(row, -count)[-count])  # with all ties
    ids = ids[row[ids] > -np.inf]
    return ids[np.lexsort((ids, -row[ids]))][:count]
