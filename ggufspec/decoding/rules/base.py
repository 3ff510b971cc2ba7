"""What every acceptance rule shares: the text that it follows, and the record of its decisions.

Pure NumPy: no model, clock or I/O.

With a grammar every emitted token is permitted by it, and drafts follow it. The target's own choice, greedy or by
shared noise, is its choice without the grammar where that is permitted, and its choice among the permitted tokens where
it is not (as common/sampling.cpp, ``common_sampler_sample``): a function of the text, the row and the seed. Speculative
sampling takes p and q from what is permitted. Where nothing is, the text ends.

With penalties all of this is made of penalised rows, the draft's too: each for the text before its own position, in
which the drafted tokens before it stand as if they had been accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from ggufspec.decoding.grammar import Path
from ggufspec.decoding.penalties import Penalties
from ggufspec.decoding.sampling import Candidates, Floats, Ids, Logits, Sampling
from ggufspec.schema.rounds import Added, Judged, Likely, Seen
from ggufspec.settings import RULES

Rows = npt.NDArray[np.float32]

LIKELIEST = 10  # tokens of a row that a record has


@dataclass(frozen=True, slots=True, eq=False)
class DraftToken:
    """A drafted token.

    Args:
        token: its id.
        q: what it was drawn from, after the draft's truncation and temperature; None if it was not drawn (a lookup),
            or, under the exact rule, where that would be the whole vocabulary.
    """

    token: int
    q: Candidates | None = None


@dataclass(frozen=True, slots=True)
class AcceptanceResult:
    """What a round emits: the first ``accepted`` drafted tokens, then ``token``."""

    accepted: int  # 0..k
    token: int | None  # the target's own behind them; None if the grammar permits none: the text ends

    def emitted(self, drafted: Sequence[int]) -> tuple[int, ...]:
        """The tokens that a round emits that drafted these."""
        accepted = tuple(drafted[: self.accepted])
        return accepted if self.token is None else (*accepted, self.token)


@dataclass(frozen=True, slots=True)
class Decisions:
    """The record of one verification.

    Args:
        position: index in the sequence of the first drafted token.
        proposed: of each drafted token the draft's row, if it has one, and the probability with which it was drawn.
        judged: why each drafted token was accepted or not, up to the first rejection.
        added: the token that follows, as if it was emitted; None if the grammar permits none.
        grammar: whether the text has one.
    """

    position: int
    proposed: tuple[tuple[Seen | None, float], ...]
    judged: tuple[Judged, ...]
    added: Added | None
    grammar: bool


@dataclass(slots=True)
class _Proposal:
    """A token that the draft model drafted, and the row that it comes from."""

    drafted: DraftToken
    row: Logits
    position: int
    basis: Any
    record: tuple[Seen, float] | None = None


@dataclass(slots=True)
class Recorder:
    """What a rule had before it when it decided; rows are copied then, and weighed when the round is over.

    Args:
        spell: the text of a token.
        proposals: of this round, by the drafted token's id().
        basis: what the rule chose from, for each row that it read.
        uniforms: variables drawn in this verification.
        rows: (accepted + 1, vocab) the target's penalised rows.
    """

    spell: Callable[[int], str]
    proposals: dict[int, _Proposal] = field(default_factory=dict)
    basis: list[Any] = field(default_factory=list)
    uniforms: list[float] = field(default_factory=list)
    rows: Rows | None = None
    drafted: tuple[DraftToken, ...] = ()
    position: int = 0
    result: AcceptanceResult = AcceptanceResult(0, None)

    def row(self, index: int) -> Logits:
        """The target's row after so many drafted tokens."""
        assert self.rows is not None
        row: Logits = self.rows[index]
        return row

    @property
    def source(self) -> Literal["bonus", "target"]:
        """Whose the added token is: a bonus behind a draft that was accepted whole."""
        return "bonus" if self.result.accepted == len(self.drafted) > 0 else "target"


class Rule:
    """How drafted tokens are chosen and judged: what all rules share, the text and the record.

    Args:
        sampling: how the target chooses.
        path: of the grammar, if there is one.
    """

    kind: ClassVar[str]  # of ``settings.RULES``
    may_trim: ClassVar[bool]  # whether a drafted token may be dropped unverified because of what it turned out to be
    recorder: Recorder | None = None

    def __init__(self, sampling: Sampling, path: Path | None = None) -> None:
        self.sampling = sampling
        self._path = path
        self._penalties = Penalties(sampling) if sampling.penalises else None
        self._settled = 0
        self._best = 1 if sampling.temperature == 0 else sampling.top_k  # tokens of a row that can matter; 0: all

    @property
    def name(self) -> str:
        """As ``--accept`` has it."""
        return self.kind

    @property
    def description(self) -> str:
        """When a drafted token is accepted."""
        return RULES[self.kind].description

    @property
    def lossless(self) -> bool:
        """Whether the text has the target's distribution."""
        return RULES[self.kind].lossless

    def begin(self, prompt: Sequence[int]) -> None:
        """A new text begins with ``prompt``; a grammar holds behind it."""
        if self._path is not None:
            self._path.begin(len(prompt))
        if self._penalties is not None:
            self._penalties.follow(0, prompt)
            self._settled = len(prompt)

    def follow(self, text: Sequence[int]) -> None:
        """What is drafted next follows ``text``: the prompt, what was emitted, and the chain so far."""
        if self._path is not None:
            self._path.follow(text[self._path.settled :])
        if self._penalties is not None:
            self._penalties.follow(self._settled, text[self._settled :])

    def penalised(self, row: Logits, position: int) -> Logits:
        """A row of logits (vocab,) for ``position``, changed in place where the text before it is penalised.

        To be called once for each row, before anything else is made of it.
        """
        if self._penalties is not None:
            self._penalties.apply(row, position)
        return row

    def permits(self, token: int, position: int) -> bool:
        """Whether the grammar lets ``token`` stand at ``position`` of the text that was followed."""
        return self._path is None or self._path.permits(token, position)

    def verify(self, rows: Rows, drafted: Sequence[DraftToken], position: int) -> AcceptanceResult:
        """Accept a prefix of ``drafted`` and choose the token that follows it. What the result emits is final.

        Args:
            rows: (k + 1, vocab) logits of the target; row i is conditioned on the first i drafted tokens. Rows behind
                the first rejection are not read, and none is kept. Those that are read are penalised in place, for
                the text and the first i drafted tokens.
            drafted: k drafted tokens; none is target-only sampling.
            position: index in the sequence of the first drafted token.
        """
        if self._path is None and self._penalties is None and self.recorder is None:
            return self._judge(rows, drafted, position)
        tokens = [one.token for one in drafted]
        if self._path is not None:
            self._path.follow(tokens)
        if self._penalties is not None:
            self._penalties.follow(position, tokens)
        if self.recorder is not None:
            self.recorder.basis.clear()
            self.recorder.uniforms.clear()
        result = self._judge(rows, drafted, position)
        emitted = result.emitted(tokens)
        if self._path is not None:
            self._path.settle(position, emitted)
        if self._penalties is not None:
            self._penalties.follow(position, emitted)
            self._settled = position + len(emitted)
        if (recorder := self.recorder) is not None:
            recorder.rows = rows[: result.accepted + 1].copy()
            recorder.drafted, recorder.position, recorder.result = tuple(drafted), position, result
        return result

    def draft_token(self, logits: Logits, position: int) -> DraftToken:
        """The draft's token for ``position`` (index in the sequence) from the draft's penalised logits (vocab,).

        It is permitted, unless the draft has no permitted token: then verification will reject it.
        """
        raise NotImplementedError

    def agreement(self, logits: Logits, position: int, token: int) -> float:
        """The chance that a token drafted from the draft's penalised logits (vocab,) would have been ``token``.

        The grammar is known ``grammar.RECENT`` tokens back from the end of the text, and has no part in this before.
        """
        raise NotImplementedError

    def _judge(self, rows: Rows, drafted: Sequence[DraftToken], position: int) -> AcceptanceResult:
        raise NotImplementedError

    def _masked(self, logits: Logits, position: int) -> Logits | None:
        """The row with what the grammar permits; None if that is nothing."""
        return logits if self._path is None else self._path.masked(logits, position, self._best)

    # ---- the record

    def record(self, spell: Callable[[int], str]) -> None:
        """Record every decision from now on; texts of tokens are what ``spell`` makes of their ids."""
        self.recorder = Recorder(spell)

    def decisions(self) -> Decisions:
        """What was decided in the last verification; to be asked once, and only of a rule that records."""
        recorder = self.recorder
        assert recorder is not None
        assert recorder.rows is not None
        proposed = tuple(self._proposed(recorder.proposals.get(id(one))) for one in recorder.drafted)
        recorder.proposals.clear()
        result, count = recorder.result, len(recorder.drafted)
        judged = tuple(self._judged(recorder, i, proposed[i][1]) for i in range(min(result.accepted + 1, count)))
        added = None if result.token is None else self._added(recorder, result.token)
        recorder.basis.clear()
        return Decisions(recorder.position, proposed, judged, added, self._path is not None)

    def _record_proposal(self, drafted: DraftToken, row: Logits, position: int, basis: Any = None) -> None:
        assert self.recorder is not None
        proposal = self.recorder.proposals[id(drafted)] = _Proposal(drafted, row.copy(), position, basis)
        if self._path is not None:  # what is permitted here is not known any more when the round is over
            self._proposed(proposal)

    def _proposed(self, proposal: _Proposal | None) -> tuple[Seen | None, float]:
        """The draft's row, and the probability with which it gave its token; 1 for a token that was not drawn."""
        if proposal is None:
            return None, 1.0
        if proposal.record is None:
            token = proposal.drafted.token
            seen = self._seen(proposal.row, token, proposal.position)
            proposal.record = seen, self._q_of(proposal.drafted, proposal.row, proposal.basis)
        return proposal.record

    def _seen(self, row: Logits, token: int, position: int) -> Seen:
        assert self.recorder is not None
        spell, log_p = self.recorder.spell, log_probabilities(row, 1.0)
        logit = float(row[token])
        likeliest = tuple(
            Likely(one, spell(one), float(np.exp(log_p[one])), self.permits(one, position))
            for one in likeliest_ids(row).tolist()
        )
        return Seen(logit if np.isfinite(logit) else None, float(np.exp(log_p[token])), likeliest)

    def _q_of(self, drafted: DraftToken, row: Logits, basis: Any) -> float:
        raise NotImplementedError

    def _judged(self, recorder: Recorder, index: int, q: float) -> Judged:
        raise NotImplementedError

    def _added(self, recorder: Recorder, token: int) -> Added | None:
        raise NotImplementedError


def log_probabilities(logits: Logits, temperature: float) -> Floats:
    """(vocab,) logarithms of the probabilities at a temperature above 0."""
    scores: Floats = (logits.astype(np.float64) - logits.max()) / temperature
    scores -= np.log(np.exp(scores).sum())
    return scores


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
