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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ggufspec.decoding.grammar import Path
from ggufspec.decoding.penalties import Penalties
from ggufspec.decoding.sampling import Candidates, Logits, Sampling

Numbers = npt.NDArray[Any]  # float64; the tests' exact enumeration has Fractions


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

    def draft_token(self, logits: Logits, position: int) -> DraftToken:
        """The draft's token for ``position`` (index in the sequence) from the draft's penalised logits (vocab,).

        It is permitted, unless the draft has no permitted token: then verification will refuse it.
        """
        ...

    def verify(self, rows: npt.NDArray[np.float32], proposals: Sequence[DraftToken], position: int) -> AcceptanceResult:
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


class TextRule:
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

    def verify(self, rows: npt.NDArray[np.float32], proposals: Sequence[DraftToken], position: int) -> AcceptanceResult:
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

    def _judge(self, rows: npt.NDArray[np.float32], proposals: Sequence[DraftToken], position: int) -> AcceptanceResult:
        raise NotImplementedError

    def _masked(self, logits: Logits, position: int) -> Logits | None:
        """The row with what the grammar permits; None if that is nothing."""
        return logits if self._path is None else self._path.masked(logits, position, self._best)
