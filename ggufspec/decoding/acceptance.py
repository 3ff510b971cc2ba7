"""Which drafted tokens stay, and which token follows them. Pure NumPy: no model, clock or I/O.

Two lossless rules. Under ``exact`` every emitted token is the target's own sample for (seed, position), so any drafter
and any stopping rule give the text of target-only. Under ``residual`` the text has the target's distribution if every
drafted token was drawn from the ``q`` that comes with it and is verified whatever it turned out to be: drafting may
stop because of what was known before a token was drawn, never because of that token.

Two lossy ones, ``top-k:N`` and ``typical:EPS``, keep drafted tokens that the target finds good enough: the text depends
on what was drafted.

With a grammar every emitted token is permitted by it, and drafts follow it. The target's own choice, greedy or by keyed
noise, is its choice without the grammar where that is permitted, and its choice among the permitted tokens where it is
not (as common/sampling.cpp, ``common_sampler_sample``): a function of the text, the row and the seed. The residual rule
takes p and q from what is permitted. Where nothing is, the text ends.

With penalties all of this is made of penalised rows, the draft's too: each for the text before its own position, in
which the drafted tokens before it stand as if they had been kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ggufspec.decoding.grammar import Constraint, Path
from ggufspec.decoding.noise import choose, choose_full
from ggufspec.decoding.options import check_rule
from ggufspec.decoding.penalties import Penalties
from ggufspec.decoding.sampling import Candidates, Floats, Ids, Logits, Sampling, candidates, likeliest

Numbers = npt.NDArray[Any]  # float64; the tests' exact enumeration has Fractions


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A drafted token.

    Args:
        token: its id.
        q: what it was drawn from, after the draft's truncation and temperature; None if it was not drawn (a lookup),
            or, under the exact rule, where that would be the whole vocabulary.
    """

    token: int
    q: Candidates | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round emits: the first ``accepted`` drafted tokens, then ``token``."""

    accepted: int  # draft tokens kept, 0..k
    token: int | None  # the token that the target adds after them; None if the grammar permits none: the text ends

    def emitted(self, drafted: Sequence[int]) -> tuple[int, ...]:
        """The tokens that stay of a round that drafted these."""
        kept = tuple(drafted[: self.accepted])
        return kept if self.token is None else (*kept, self.token)


class Rule(Protocol):
    """How drafted tokens are chosen and judged."""

    name: str
    lossless: bool  # whether the text has the target's distribution
    may_trim: bool  # whether a drafted token may be dropped unverified because of what it turned out to be

    def begin(self, prompt: Sequence[int]) -> None:
        """A new text begins with ``prompt``; a grammar holds behind it."""
        ...

    def follow(self, text: Sequence[int]) -> None:
        """What is proposed next follows ``text``: the prompt, what was emitted, and the chain so far."""
        ...

    def permits(self, token: int, position: int) -> bool:
        """Whether the grammar lets ``token`` stand at ``position`` of the text that was followed."""
        ...

    def penalised(self, row: Logits, position: int) -> Logits:
        """The draft's logits (vocab,) for ``position``, changed in place where the text before it is penalised.

        To be asked once for each row, before anything else is made of it.
        """
        ...

    def propose(self, logits: Logits, position: int) -> Proposal:
        """The draft's token for ``position`` (index in the sequence) from the draft's penalised logits (vocab,).

        It is permitted, unless the draft has no permitted token: then verification will refuse it.
        """
        ...

    def verify(self, rows: npt.NDArray[np.float32], proposals: Sequence[Proposal], position: int) -> Verdict:
        """Keep a prefix of ``proposals`` and choose the token that follows it. What the verdict emits is settled.

        Args:
            rows: (k + 1, vocab) logits of the target; row i is conditioned on the first i drafted tokens. Rows behind
                the first rejection are not read, and none is kept. Those that are read are penalised in place, for
                the text and the first i drafted tokens.
            proposals: k drafted tokens; none is target-only sampling.
            position: index in the sequence of the first drafted token.
        """
        ...

    def agreement(self, logits: Logits, position: int, token: int) -> float:
        """The chance that a proposal from the draft's penalised logits (vocab,) would have been ``token``, which came.

        The grammar is known ``grammar.RECENT`` tokens back from the end of the text, and has no part in this before.
        """
        ...


class _Textual:
    """The part of a rule that knows the text: for the grammar and the penalties, if there are any."""

    def __init__(self, sampling: Sampling, path: Path | None) -> None:
        self.sampling = sampling
        self._path = path
        self._penalties = Penalties(sampling) if sampling.penalises else None
        self._settled = 0
        self._best = 1 if sampling.temperature == 0 else sampling.top_k  # tokens of a row that can matter; 0: all

    def begin(self, prompt: Sequence[int]) -> None:
        if self._path is not None:
            self._path.begin(len(prompt))
        if self._penalties is not None:
            self._penalties.follow(0, prompt)
            self._settled = len(prompt)

    def follow(self, text: Sequence[int]) -> None:
        if self._path is not None:
            self._path.follow(text[self._path.settled :])
        if self._penalties is not None:
            self._penalties.follow(self._settled, text[self._settled :])

    def penalised(self, row: Logits, position: int) -> Logits:
        if self._penalties is not None:
            self._penalties.apply(row, position)
        return row

    def permits(self, token: int, position: int) -> bool:
        return self._path is None or self._path.permits(token, position)

    def verify(self, rows: npt.NDArray[np.float32], proposals: Sequence[Proposal], position: int) -> Verdict:
        if self._path is None and self._penalties is None:
            return self._judge(rows, proposals, position)
        drafted = [proposal.token for proposal in proposals]
        if self._path is not None:
            self._path.follow(drafted)
        if self._penalties is not None:
            self._penalties.follow(position, drafted)
        verdict = self._judge(rows, proposals, position)
        emitted = verdict.emitted(drafted)
        if self._path is not None:
            self._path.settle(position, emitted)
        if self._penalties is not None:
            self._penalties.follow(position, emitted)
            self._settled = position + len(emitted)
        return verdict

    def _judge(self, rows: npt.NDArray[np.float32], proposals: Sequence[Proposal], position: int) -> Verdict:
        raise NotImplementedError

    def _masked(self, logits: Logits, position: int) -> Logits | None:
        """The row with what the grammar permits; None if that is nothing."""
        return logits if self._path is None else self._path.masked(logits, position, self._best)


class ExactRule(_Textual):
    """Greedy at temperature 0, keyed noise above: accept while the draft is the target's own choice.

    Source: Daliri et al. 2024, arXiv:2408.07978.
    """

    name = "exact"
    lossless = True
    may_trim = True

    def __init__(self, sampling: Sampling, path: Path | None = None) -> None:
        super().__init__(sampling, path)

    def propose(self, logits: Logits, position: int) -> Proposal:
        if self._path is None and self.sampling.truncates:
            return Proposal(*self._drawn(likeliest(logits, self.sampling), position))
        return Proposal(*(self._choose(logits, position) or self._choose_freely(logits, position)))

    def agreement(self, logits: Logits, position: int, token: int) -> float:
        return float(self.propose(logits, position).token == token)

    def _judge(self, rows: npt.NDArray[np.float32], proposals: Sequence[Proposal], position: int) -> Verdict:
        for i, proposal in enumerate(proposals):
            row = self.penalised(rows[i], position + i)
            own = self._choose(row, position + i)
            if own is None:
                return Verdict(i, None)
            if proposal.token != own[0] and not self._keeps(row, proposal.token, position + i):
                return Verdict(i, own[0])
        last = position + len(proposals)
        own = self._choose(self.penalised(rows[len(proposals)], last), last)
        return Verdict(len(proposals), None if own is None else own[0])

    def _keeps(self, row: Logits, token: int, position: int) -> bool:  # noqa: ARG002 - for the lossy rules
        """Whether a drafted token stays though the target's own choice is another."""
        return False

    def _choose(self, logits: Logits, position: int) -> tuple[int, Candidates | None] | None:
        chosen = self._choose_freely(logits, position)
        if self.permits(chosen[0], position):
            return chosen
        masked = self._masked(logits, position)
        return None if masked is None else self._choose_freely(masked, position)

    def _choose_freely(self, logits: Logits, position: int) -> tuple[int, Candidates | None]:
        if not self.sampling.truncates:
            return choose_full(logits, self.sampling.temperature, self.sampling.seed, position), None
        return self._drawn(candidates(logits, self.sampling), position)

    def _drawn(self, q: Candidates, position: int) -> tuple[int, Candidates]:
        return choose(q.ids, q.scores, self.sampling.seed, position), q


class TopKRule(ExactRule):
    """Lossy: a drafted token also stays if it is among the target's ``count`` most likely; ties go to the lower id.

    Temperature and truncation have no part in that, nor has the grammar, which must permit the token.
    """

    lossless = False

    def __init__(self, name: str, sampling: Sampling, path: Path | None = None) -> None:
        super().__init__(sampling, path)
        self.name = name
        self.count = int(name.removeprefix("top-k:"))

    def _keeps(self, row: Logits, token: int, position: int) -> bool:
        return bool(self.rank(row, token) <= self.count and row[token] > -np.inf) and self.permits(token, position)

    def rank(self, row: Logits, token: int) -> int:
        """The place of a token among the target's most likely, from 1."""
        return int(np.count_nonzero(row > row[token]) + np.count_nonzero(row[:token] == row[token])) + 1


class TypicalRule(ExactRule):
    """Lossy: a drafted token also stays if its probability is above ``min(epsilon, sqrt(epsilon) * exp(-entropy))``.

    Both are of the target's distribution over the whole vocabulary at the sampling temperature, at 1 if that is 0: a
    one-hot row would keep nothing but the target's own choice. The grammar must permit the token.

    Source: Cai et al. 2024, section 3.3.1 (arXiv:2401.10774), with delta = sqrt(epsilon) as in its experiments.
    """

    lossless = False

    def __init__(self, name: str, sampling: Sampling, path: Path | None = None) -> None:
        super().__init__(sampling, path)
        self.name = name
        self.epsilon = float(name.removeprefix("typical:"))

    def _keeps(self, row: Logits, token: int, position: int) -> bool:
        probability, _, bar = self.weigh(row, token)
        return probability > bar and self.permits(token, position)

    def weigh(self, row: Logits, token: int) -> tuple[float, float, float]:
        """A token's probability, the distribution's entropy in nats, and the bar that it sets."""
        log_p = log_probabilities(row, self.sampling.temperature or 1.0)
        possible = log_p[log_p > -np.inf]
        entropy = -(np.exp(possible) * possible).sum()
        bar = min(self.epsilon, self.epsilon**0.5 * np.exp(-entropy))
        return float(np.exp(log_p[token])), float(entropy), float(bar)


def log_probabilities(logits: Logits, temperature: float) -> Floats:
    """(vocab,) logarithms of the probabilities at a temperature above 0."""
    scores: Floats = (logits.astype(np.float64) - logits.max()) / temperature
    scores -= np.log(np.exp(scores).sum())
    return scores


class ResidualRule(_Textual):
    """Accept x with probability min(1, p(x) / q(x)); after a rejection sample from max(p - q, 0).

    Uniform variables are taken from ``rng`` in this order: one for each proposed token; then, in a verification, one
    for each drafted token up to the first rejection, and one for the token that follows.

    Source: Leviathan et al. 2023, Algorithm 1 (arXiv:2211.17192).
    """

    name = "residual"
    lossless = True
    may_trim = False

    def __init__(self, sampling: Sampling, rng: np.random.Generator, path: Path | None = None) -> None:
        super().__init__(sampling, path)
        self._chance = UniformChance(rng)

    def listen(self, heard: Callable[[float], None]) -> None:
        """Tell every uniform variable that is taken from now on."""
        self._chance.heard = heard

    def propose(self, logits: Logits, position: int) -> Proposal:
        q = self._q(logits, position)
        return Proposal(int(q.ids[self._chance.draw(q.probabilities())]), q)

    def agreement(self, logits: Logits, position: int, token: int) -> float:
        return float(Law.of(self._q(logits, position)).at(np.array([token]))[0])

    def _q(self, logits: Logits, position: int) -> Candidates:
        masked = self._masked(logits, position)
        return candidates(logits if masked is None else masked, self.sampling)

    def _judge(self, rows: npt.NDArray[np.float32], proposals: Sequence[Proposal], position: int) -> Verdict:
        def target(i: int) -> Law | None:
            masked = self._masked(self.penalised(rows[i], position + i), position + i)
            return None if masked is None else Law.of(candidates(masked, self.sampling))

        drafted = [(x.token, Law.point(x.token) if x.q is None else Law.of(x.q)) for x in proposals]
        return verify_residual(target, drafted, self._chance)


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """A distribution over the vocabulary; ids that are not listed have probability 0.

    Args:
        ids: (n,) token ids, ascending.
        probabilities: (n,) their sum is 1.
    """

    ids: Ids
    probabilities: Numbers

    @classmethod
    def of(cls, drawn_from: Candidates) -> Law:
        """The distribution of a token drawn from candidates."""
        return cls(drawn_from.ids, drawn_from.probabilities())

    @classmethod
    def point(cls, token: int) -> Law:
        """The distribution of a token that was not drawn."""
        one = np.ones(1, dtype=np.int64)  # a number that is exact with fractions too
        return cls(token * one, one)

    def at(self, ids: Ids) -> Numbers:
        """(n,) probabilities of ``ids``."""
        index = np.minimum(np.searchsorted(self.ids, ids), self.ids.size - 1)
        return np.where(self.ids[index] == ids, self.probabilities[index], 0)


class Chance(Protocol):
    """The decisions that are left to chance; an enumeration takes every one."""

    def accept(self, probability: Any) -> bool:
        """True with this probability."""
        ...

    def draw(self, probabilities: Numbers) -> int:
        """An index into (n,) probabilities."""
        ...


class UniformChance:
    """Decisions by a generator, one uniform variable each; ``heard`` is told of it."""

    heard: Callable[[float], None] | None = None

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def accept(self, probability: Any) -> bool:
        return bool(self._uniform() < probability)

    def draw(self, probabilities: Numbers) -> int:
        return int(pick(probabilities, self._uniform()))

    def _uniform(self) -> float:
        uniform = self._rng.random()
        if self.heard is not None:
            self.heard(uniform)
        return uniform


def verify_residual(target: Callable[[int], Law | None], drafted: Sequence[tuple[int, Law]], chance: Chance) -> Verdict:
    """The residual rule's verdict on drafted tokens.

    Args:
        target: the target's distribution after the first i drafted tokens, None if nothing may follow them; called for
            i = 0, 1, … as far as needed.
        drafted: the tokens, each with the distribution that it was drawn from.
        chance: the source of randomness.
    """
    for i, (token, q) in enumerate(drafted):
        p, x = target(i), np.array([token])
        if p is None:
            return Verdict(i, None)
        if not chance.accept(acceptance_probability(p.at(x), q.at(x))[0]):
            return Verdict(i, int(p.ids[chance.draw(residual(p.probabilities, q.at(p.ids)))]))
    p = target(len(drafted))
    return Verdict(len(drafted), None if p is None else int(p.ids[chance.draw(p.probabilities)]))


def acceptance_probability(p: Numbers, q: Numbers) -> Numbers:
    """min(1, p / q) of tokens with target probabilities ``p`` and draft probabilities ``q`` > 0."""
    return np.minimum(1, p / q)


def residual(p: Numbers, q: Numbers) -> Numbers:
    """max(p - q, 0) with sum 1 on the last axis; both over the same ids, the target's.

    Where it is 0 everywhere a rejection is due to rounding alone, and the result is ``p``.
    """
    excess = np.maximum(p - q, 0)
    total = excess.sum(axis=-1, keepdims=True)
    return np.where(total > 0, excess / np.where(total > 0, total, 1), p)


def pick(probabilities: Numbers, uniform: Any) -> Numbers:
    """The index that a uniform variable in [0, 1) draws from (…, n) probabilities; never one with probability 0."""
    reached = np.cumsum(probabilities, axis=-1)
    wanted = (1 - np.asarray(uniform)[..., None]) * reached[..., -1:]  # in (0, total]
    return np.count_nonzero(reached < wanted, axis=-1)  # type: ignore[no-any-return]


def make_rule(name: str, sampling: Sampling, constraint: Constraint | None = None) -> Rule:
    """The rule of this name.

    Args:
        name: one of ``options.RULES``, with a number where it has one.
        sampling: how the target chooses.
        constraint: the grammar of the text, if it has one; ``begin`` and ``follow`` must be called then.

    Raises:
        UsageError: there is no such rule.
    """
    check_rule(name)
    path = None if constraint is None else Path(constraint)
    match name.partition(":")[0]:
        case "top-k":
            return TopKRule(name, sampling, path)
        case "typical":
            return TypicalRule(name, sampling, path)
        case "residual":
            return ResidualRule(sampling, np.random.default_rng(sampling.seed), path)
        case _:
            return ExactRule(sampling, path)
