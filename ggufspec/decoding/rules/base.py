"""Base of all acceptance rules: the text they follow, and the record of their decisions.

Pure NumPy: no model, clock or I/O.

With a grammar, drafts follow it and only permitted tokens are emitted. The target's own choice, greedy or by shared
noise, is first made without the grammar, and made again among the permitted tokens if it is not permitted (as in
common/sampling.cpp, ``common_sampler_sample``), so it depends only on the text, the row and the seed. Speculative
sampling uses p and q over the permitted tokens. If no token is permitted, the text ends.

With penalties, both the target's and the draft's rows are penalised first. A row is penalised for the text before its
own position, including drafted tokens, as if they had been accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from ggufspec.decoding.grammar import GrammarPath
from ggufspec.decoding.penalties import Penalties
from ggufspec.decoding.sampling import Floats, Ids, Logits, Sampling, TokenCandidates
from ggufspec.schema.rounds import AddedToken, DraftedToken, JudgedToken, LikelyToken, SeenToken
from ggufspec.settings.registry import RULES

LIKELIEST = 10  # number of likeliest tokens to record for each row


@dataclass(frozen=True, slots=True, eq=False)
class DraftToken:
    """A drafted token."""

    token: int
    # Distribution that it was drawn from, after the draft's truncation and temperature. None if it was not drawn (e.g.
    # by the lookup), and under the exact rule without truncation, where it would span the whole vocabulary.
    q: TokenCandidates | None = None
    row: Logits | None = None  # (vocab,) a copy of the draft's penalised logits, if decisions are recorded


@dataclass(frozen=True, slots=True)
class AcceptanceResult:
    """Tokens that a round emits: the first ``accepted`` drafted tokens, then ``token``."""

    accepted: int  # number of accepted drafted tokens, 0..k
    token: int | None  # the token that the target adds; None if the grammar permits no token, which ends the text

    def emitted(self, drafted: Sequence[int]) -> tuple[int, ...]:
        accepted = tuple(drafted[: self.accepted])
        return accepted if self.token is None else (*accepted, self.token)


@dataclass(slots=True)
class RuleRecorder:
    """Inputs and result of a rule's last verification, from which the round's record is made afterwards."""

    spell: Callable[[int], str]  # returns the text of a token
    uniforms: list[float] = field(default_factory=list)  # uniform variables drawn
    drafted: tuple[DraftToken, ...] = ()
    proposed: tuple[DraftedToken, ...] | None = None  # recorded before verification if there is a grammar
    position: int = 0  # position of the first drafted token
    rows: Logits = field(default_factory=lambda: np.empty((0, 0), np.float32))  # (accepted + 1, vocab), penalised
    result: AcceptanceResult = AcceptanceResult(0, None)


class AcceptanceRule:
    """Base class of the rules that accept and choose tokens; it follows the text and keeps the record.

    ``number`` is, for example, the 3 in ``--accept top-k:3``; 0 for a rule without a number.
    """

    kind: ClassVar[str]  # name in ``settings.RULES``
    may_trim: ClassVar[bool]  # True if a drafted token may be dropped unverified because of which token it is
    recorder: RuleRecorder | None = None
    bias: Mapping[int, float] = MappingProxyType({})  # logit offsets by token, applied first

    def __init__(self, sampling: Sampling, path: GrammarPath | None = None, number: float = 0) -> None:
        self.sampling = sampling
        self.number = number
        self._path = path
        self._penalties = Penalties(sampling) if sampling.penalises else None
        self._settled = 0
        self._best = 1 if sampling.temperature == 0 else sampling.top_k  # number of likeliest tokens needed; 0: all

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
        """Start a new text with ``prompt``; a grammar applies after it."""
        if self._path is not None:
            self._path.begin(len(prompt))
        if self._penalties is not None:
            self._penalties.follow(0, prompt)
            self._settled = len(prompt)

    def follow(self, text: Sequence[int]) -> None:
        """Set the text that the next drafted token follows: the prompt, the emitted tokens, and the chain so far."""
        if self._path is not None:
            self._path.follow(text[self._path.settled :])
        if self._penalties is not None:
            self._penalties.follow(self._settled, text[self._settled :])

    def penalised(self, row: Logits, position: int) -> Logits:
        """Apply bias and penalties to a row of logits (vocab,) for ``position``, in place.

        Call it once for each row, before any other use.
        """
        for token, bias in self.bias.items():
            if token < row.size:
                row[token] += np.float32(bias)
        if self._penalties is not None:
            self._penalties.apply(row, position)
        return row

    def permits(self, token: int, position: int) -> bool:
        """Return True if the grammar permits ``token`` at ``position`` of the text set by :meth:`follow`."""
        return self._path is None or self._path.permits(token, position)

    def verify(self, rows: Logits, drafted: Sequence[DraftToken], position: int) -> AcceptanceResult:
        """Accept a prefix of ``drafted`` and choose the next token. The emitted tokens become part of the text.

        Args:
            rows: (k + 1, vocab) logits of the target; row i is conditioned on the first i drafted tokens. Rows up to
                the first rejection are penalised in place, for the text and the first i drafted tokens; later rows are
                not used. No row is retained.
            drafted: k drafted tokens; without any, this is target-only sampling.
            position: index of the first drafted token in the sequence.
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
            # After the round, the grammar's states at the positions of rejected tokens are gone.
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
        """Return the draft's token for ``position`` (index in the sequence) from the draft's penalised logits (vocab,).

        The token is permitted unless the draft has no permitted token, in which case verification will reject it.
        """
        raise NotImplementedError

    def agreement(self, logits: Logits, position: int, token: int) -> float:
        """Return the probability that a token drafted from the draft's penalised logits (vocab,) would be ``token``.

        The grammar applies to the last ``grammar.RECENT`` tokens of the text and is ignored before them.
        """
        raise NotImplementedError

    def _judge(self, rows: Logits, drafted: Sequence[DraftToken], position: int) -> AcceptanceResult:
        raise NotImplementedError

    def _masked(self, logits: Logits, position: int) -> Logits | None:
        return logits if self._path is None else self._path.masked(logits, position, self._best)

    # ---- the record

    def record(self, spell: Callable[[int], str]) -> None:
        """Record every decision from now on; ``spell`` returns the text of a token id."""
        self.recorder = RuleRecorder(spell)

    def decisions(self, drafters: Sequence[str]) -> tuple[tuple[DraftedToken, ...], AddedToken | None]:
        """Return the recorded decisions of the last verification: the drafted tokens, and the target's token, assumed
        to be emitted (None if the grammar permits no token). ``drafters`` names each drafted token's drafter.
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
    def _recording(self) -> RuleRecorder:
        assert self.recorder is not None
        return self.recorder

    def _recorded(self, row: Logits) -> Logits | None:
        return None if self.recorder is None else row.copy()

    def _proposed(self, recorder: RuleRecorder) -> tuple[DraftedToken, ...]:
        return tuple(
            DraftedToken(
                position,
                drafter="",
                token=one.token,
                text=recorder.spell(one.token),
                q=1.0 if one.row is None else self._q_of(one, one.row, position),
                draft=None if one.row is None else self._seen(one.row, one.token, position),
            )
            for position, one in enumerate(recorder.drafted, recorder.position)
        )

    def _seen(self, row: Logits, token: int, position: int) -> SeenToken:
        log_p, logit = log_probabilities(row, 1.0), float(row[token])
        likeliest = tuple(
            LikelyToken(one, self._recording.spell(one), float(np.exp(log_p[one])), self.permits(one, position))
            for one in likeliest_ids(row).tolist()
        )
        return SeenToken(logit if np.isfinite(logit) else None, float(np.exp(log_p[token])), likeliest)

    def _q_of(self, drafted: DraftToken, row: Logits, position: int) -> float:
        raise NotImplementedError

    def _judged(self, row: Logits, token: int, position: int, q: float) -> JudgedToken:
        raise NotImplementedError

    def _added(self, row: Logits, token: int, position: int) -> AddedToken:
        recorder, chosen = self._recording, self._judged(row, token, position, 1.0)
        return AddedToken(
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
    """Return (vocab,) log-probabilities at a temperature above 0."""
    scores: Floats = (logits.astype(np.float64) - logits.max()) / temperature
    scores -= np.log(np.exp(scores).sum())
    return scores


def likeliest_ids(row: Logits, count: int = LIKELIEST) -> Ids:
    """Return the ids of the ``count`` highest logits above -inf, highest first; in a tie, the lower id comes first."""
    count = min(count, row.size)
    ids = np.flatnonzero(row >= np.partition(row, -count)[-count])  # including ties
    ids = ids[row[ids] > -np.inf]
    return ids[np.lexsort((ids, -row[ids]))][:count]
