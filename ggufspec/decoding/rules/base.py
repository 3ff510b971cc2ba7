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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from ggufspec.decoding.grammar import Path
from ggufspec.decoding.penalties import Penalties
from ggufspec.decoding.sampling import Candidates, Floats, Ids, Logits, Sampling
from ggufspec.schema.rounds import Added, Drafted, Judged, Likely, Seen
from ggufspec.settings.registry import RULES

LIKELIEST = 10  # tokens of a row that a record has


@dataclass(frozen=True, slots=True, eq=False)
class DraftToken:
    """A drafted token."""

    token: int
    # What it was drawn from, after the draft's truncation and temperature; None if it was not drawn (a lookup), or,
    # under the exact rule, where that would be the whole vocabulary.
    q: Candidates | None = None
    row: Logits | None = None  # (vocab,) a copy of the draft's penalised logits, if the rule records


@dataclass(frozen=True, slots=True)
class AcceptanceResult:
    """What a round emits: the first ``accepted`` drafted tokens, then ``token``."""

    accepted: int  # 0..k
    token: int | None  # the target's own after them; None if the grammar permits none: the text ends

    def emitted(self, drafted: Sequence[int]) -> tuple[int, ...]:
        accepted = tuple(drafted[: self.accepted])
        return accepted if self.token is None else (*accepted, self.token)


@dataclass(slots=True)
class Recorder:
    """What a rule had before it in its last verification, weighed when the round is over."""

    spell: Callable[[int], str]  # the text of a token
    uniforms: list[float] = field(default_factory=list)  # variables drawn
    drafted: tuple[DraftToken, ...] = ()
    proposed: tuple[Drafted, ...] | None = None  # before they were judged, if a grammar has a part in it
    position: int = 0  # of the first drafted token
    rows: Logits = field(default_factory=lambda: np.empty((0, 0), np.float32))  # (accepted + 1, vocab) penalised
    result: AcceptanceResult = AcceptanceResult(0, None)


class Rule:
    """How drafted tokens are chosen and judged: what all rules share, the text and the record.

    ``number`` is that of ``--accept top-k:3``, say; 0 for a rule that takes none.
    """

    kind: ClassVar[str]  # of ``settings.RULES``
    may_trim: ClassVar[bool]  # whether a drafted token may be dropped unverified because of what it turned out to be
    recorder: Recorder | None = None
    bias: Mapping[int, float] = MappingProxyType({})  # added to the logits of tokens, before all else

    def __init__(self, sampling: Sampling, path: Path | None = None, number: float = 0) -> None:
        self.sampling = sampling
        self.number = number
        self._path = path
        self._penalties = Penalties(sampling) if sampling.penalises else None
        self._settled = 0
        self._best = 1 if sampling.temperature == 0 else sampling.top_k  # tokens of a row that can matter; 0: all

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.number}" if self.number else self.kind

    @property
    def description(self) -> str:
        row = RULES[self.kind]
        return row.description.replace(row.form.partition(":")[2], str(self.number)) if self.number else row.description

    @property
    def lossless(self) -> bool:
        return RULES[self.kind].lossless

    @property
    def has_grammar(self) -> bool:
        return self._path is not None

    def begin(self, prompt: Sequence[int]) -> None:
        """A new text begins with ``prompt``; a grammar holds after it."""
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
        """A row of logits (vocab,) for ``position``, changed in place by the bias, and where the text is penalised.

        To be called once for each row, before anything else is made of it.
        """
        for token, bias in self.bias.items():
            if token < row.size:
                row[token] += np.float32(bias)
        if self._penalties is not None:
            self._penalties.apply(row, position)
        return row

    def permits(self, token: int, position: int) -> bool:
        """Whether the grammar lets ``token`` stand at ``position`` of the text that was followed."""
        return self._path is None or self._path.permits(token, position)

    def verify(self, rows: Logits, drafted: Sequence[DraftToken], position: int) -> AcceptanceResult:
        """Accept a prefix of ``drafted`` and choose the token that follows it. What the result emits is final.

        Args:
            rows: (k + 1, vocab) logits of the target; row i is conditioned on the first i drafted tokens. Rows after
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
        if (recorder := self.recorder) is not None:
            recorder.uniforms.clear()
            recorder.drafted, recorder.position = tuple(drafted), position
            # What is permitted at a rejected token's position is not known any more when the round is over.
            recorder.proposed = None if self._path is None else self._proposed(recorder)
        result = self._judge(rows, drafted, position)
        emitted = result.emitted(tokens)
        if self._path is not None:
            self._path.settle(position, emitted)
        if self._penalties is not None:
            self._penalties.follow(position, emitted)
            self._settled = position + len(emitted)
        if recorder is not None:
            recorder.rows, recorder.result = rows[: result.accepted + 1].copy(), result
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

    def _judge(self, rows: Logits, drafted: Sequence[DraftToken], position: int) -> AcceptanceResult:
        raise NotImplementedError

    def _masked(self, logits: Logits, position: int) -> Logits | None:
        return logits if self._path is None else self._path.masked(logits, position, self._best)

    # ---- the record

    def record(self, spell: Callable[[int], str]) -> None:
        """Record every decision from now on; texts of tokens are what ``spell`` makes of their ids."""
        self.recorder = Recorder(spell)

    def decisions(self, drafters: Sequence[str]) -> tuple[tuple[Drafted, ...], Added | None]:
        """What was decided in the last verification, of a rule that records: the drafted tokens, and the one that
        follows, as if it was emitted; None if the grammar permits none. ``drafters`` names who drafted each.
        """
        recorder = self._recording
        proposed = self._proposed(recorder) if recorder.proposed is None else recorder.proposed
        accepted, token = recorder.result.accepted, recorder.result.token
        drafted = [replace(one, drafter=drafter) for one, drafter in zip(proposed, drafters, strict=True)]
        for i, (row, one) in enumerate(zip(recorder.rows, drafted, strict=False)):
            judged = self._judged(row, one.token, one.position, one.q)
            drafted[i] = replace(one, result="accepted" if i < accepted else "rejected", judged=judged)
        added = None if token is None else self._added(recorder.rows[accepted], token, recorder.position + accepted)
        return tuple(drafted), added

    @property
    def _recording(self) -> Recorder:
        assert self.recorder is not None
        return self.recorder

    def _recorded(self, row: Logits) -> Logits | None:
        return None if self.recorder is None else row.copy()

    def _proposed(self, recorder: Recorder) -> tuple[Drafted, ...]:
        return tuple(
            Drafted(
                position,
                drafter="",
                token=one.token,
                text=recorder.spell(one.token),
                q=1.0 if one.row is None else self._q_of(one, one.row, position),
                draft=None if one.row is None else self._seen(one.row, one.token, position),
            )
            for position, one in enumerate(recorder.drafted, recorder.position)
        )

    def _seen(self, row: Logits, token: int, position: int) -> Seen:
        log_p, logit = log_probabilities(row, 1.0), float(row[token])
        likeliest = tuple(
            Likely(one, self._recording.spell(one), float(np.exp(log_p[one])), self.permits(one, position))
            for one in likeliest_ids(row).tolist()
        )
        return Seen(logit if np.isfinite(logit) else None, float(np.exp(log_p[token])), likeliest)

    def _q_of(self, drafted: DraftToken, row: Logits, position: int) -> float:
        raise NotImplementedError

    def _judged(self, row: Logits, token: int, position: int, q: float) -> Judged:
        raise NotImplementedError

    def _added(self, row: Logits, token: int, position: int) -> Added:
        recorder, chosen = self._recording, self._judged(row, token, position, 1.0)
        return Added(
            position,
            token,
            recorder.spell(token),
            source="bonus" if recorder.result.accepted == len(recorder.drafted) > 0 else "target",
            distribution="p",
            probability=chosen.p,
            p=chosen.p,
            masked=chosen.masked,
            target=chosen.target,
            sum=chosen.sum,
        )


def log_probabilities(logits: Logits, temperature: float) -> Floats:
    """(vocab,) logarithms of the probabilities at a temperature above 0."""
    scores: Floats = (logits.astype(np.float64) - logits.max()) / temperature
    scores -= np.log(np.exp(scores).sum())
    return scores


def likeliest_ids(row: Logits, count: int = LIKELIEST) -> Ids:
    """The ids of the highest logits, highest first, ties by the lower id; none with a logit of -inf."""
    count = min(count, row.size)
    ids = np.flatnonzero(row >= np.partition(row, -count)[-count])  # with all ties
    ids = ids[row[ids] > -np.inf]
    return ids[np.lexsort((ids, -row[ids]))][:count]
