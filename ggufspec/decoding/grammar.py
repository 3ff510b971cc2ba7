"""Grammar states along a text, which determine the tokens permitted at each position. Pure NumPy.

The state before a position is a function of the text before it. A path of states therefore simply follows the text:
drafting extends it, a rejection truncates it, and no other part of the decoder holds grammar states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ggufspec.decoding.sampling import Logits, _class_maxima
from ggufspec.decoding.text import common
from ggufspec.llamacpp.grammar import Grammar, GrammarState

RECENT = 64  # number of states retained before the end of the emitted text, for a draft model that decodes it later


class GrammarPath:
    """States of a grammar along one text.

    Positions are indices in the whole sequence. The first ``settled`` tokens do not change; the drafted tokens after
    them may change with every call. The path ends at a drafted token that is not permitted; nothing may follow it.

    Args:
        grammar: grammar of the text after the prompt.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self.begin(0)

    def begin(self, length: int) -> None:
        """Start a new text whose first ``length`` tokens, the prompt, are unconstrained."""
        self._first = self.settled = length  # position of the first retained state, and number of settled tokens
        self._tokens: list[int] = []  # tokens after the first retained state
        self._states: list[GrammarState | None] = [self._grammar.start()]  # state before each token, as far as computed

    def follow(self, tokens: Sequence[int]) -> None:
        """Replace the text after the settled tokens with ``tokens``, e.g. drafted ones."""
        settled = self.settled - self._first
        same = common(self._tokens[settled:], tokens)
        del self._states[settled + same + 1 :]
        self._tokens[settled + same :] = tokens[same:]

    def settle(self, position: int, tokens: Sequence[int]) -> None:
        """Append ``tokens`` to the settled text. Their states are retained at least until the next call.

        Raises:
            ValueError: ``position``, where the tokens begin, is not the end of the settled text.
        """
        if position != self.settled:
            raise ValueError(f"tokens cannot begin at {position}: the settled text ends at {self.settled}")
        self.follow(tokens)
        self.settled += len(tokens)
        old = min(self.settled - RECENT, position) - self._first
        if old > 0:
            self.state(self._first + old)
            del self._states[:old], self._tokens[:old]
            self._first += old

    def state(self, position: int) -> GrammarState | None:
        """Return the state before ``position``; None after a token that is not permitted, or if the state was dropped.

        Raises:
            ValueError: the text ends before ``position``.
        """
        place = position - self._first
        if place > len(self._tokens):
            raise ValueError(f"the text ends at {self._first + len(self._tokens)}, before position {position}")
        if place < 0:
            return None
        for token in self._tokens[len(self._states) - 1 : place]:
            before = self._states[-1]
            self._states.append(None if before is None else self._grammar.advance(before, token))
        return self._states[place]

    def permits(self, token: int, position: int) -> bool:
        """Return True if ``token`` is permitted at ``position``."""
        state = self.state(position)
        return state is not None and self._grammar.permits(state, token)

    def masked(self, logits: Logits, position: int, best: int = 0) -> Logits | None:
        """Return the logits with -inf for tokens not permitted at ``position``: a copy, unless all are permitted.

        Masking the whole vocabulary takes milliseconds. The few likeliest permitted tokens are found without it, unless
        nearly all likely tokens are forbidden.

        Args:
            logits: (n,) logits of the first n ids of the vocabulary.
            position: index in the sequence of the token to choose.
            best: number of likeliest permitted tokens that are needed (ties are included); 0: all.

        Returns:
            (n,) float32; None if no token with a finite logit is permitted.
        """
        state = self.state(position)
        if state is None:
            return None
        if self._grammar.is_free(state):
            return logits
        result = np.full_like(logits, -np.inf)
        likely = 4 * best + 64
        if best and likely < logits.size:
            maxima = _class_maxima(logits, 4 * likely)  # at least ``likely`` tokens reach the floor
            floor = np.partition(maxima, -likely)[-likely]
            ids = np.flatnonzero(logits >= floor)  # including ties
            ids = ids[self._grammar.permitted(state, ids)]
            if ids.size >= best and floor > -np.inf:
                result[ids] = logits[ids]
                return result
        mask = self._grammar.mask(state)[: logits.size]
        np.copyto(result, logits, where=mask)
        return result if (result > -np.inf).any() else None
