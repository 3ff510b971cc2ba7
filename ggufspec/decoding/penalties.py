"""Penalties for tokens that are already in the text, with llama.cpp's arithmetic. Pure NumPy.

They are applied before truncation and temperature (common/common.h, ``common_params_sampling::samplers``;
src/llama-sampler.cpp, ``llama_sampler_penalties_apply``). Prompt tokens count too, as in llama-server and llama-cli,
which feed them to the sampler before drawing the first token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ggufspec.decoding.sampling import Logits, Sampling


class Penalties:
    """Token counts of one text, and the penalties that follow from them.

    A row is penalised for the ``repeat_last_n`` tokens before its position, whether emitted or only drafted, just as if
    the text had been decoded one token at a time.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._last = sampling.repeat_last_n
        self._repeat = np.float32(sampling.repeat_penalty)
        self._presence = np.float32(sampling.presence_penalty)
        self._frequency = np.float32(sampling.frequency_penalty)
        self._text: list[int] = []
        self._first = self._end = 0  # bounds of the counted window
        self._counts: Counter[int] = Counter()

    def follow(self, position: int, tokens: Sequence[int]) -> None:
        """Replace the text from ``position`` on with ``tokens``.

        Raises:
            ValueError: the text ends before ``position``.
        """
        if position > len(self._text):
            raise ValueError(f"the text ends at {len(self._text)}, before position {position}")
        if position < self._end:
            self._count(position)
        self._text[position:] = tokens

    def apply(self, row: Logits, position: int) -> None:
        """Penalise the logits (vocab,) for ``position`` in place; the cost grows with the window, not the vocabulary.

        Ids beyond the row (a draft may lack them) are ignored. ValueError: the text ends before ``position``.
        """
        if position > len(self._text):
            raise ValueError(f"the text ends at {len(self._text)}, before position {position}")
        self._count(position)
        ids = np.fromiter(self._counts, np.int64, len(self._counts))
        times = np.fromiter(self._counts.values(), np.float32, len(self._counts))
        known = ids < row.size
        if not known.all():
            ids, times = ids[known], times[known]
        logits = row[ids]
        logits = np.where(logits <= 0, logits * self._repeat, logits / self._repeat)
        row[ids] = logits - (times * self._frequency + self._presence)

    def _count(self, end: int) -> None:
        """Move the end of the window to ``end``, counting the tokens that enter and leave it."""
        first = 0 if self._last < 0 else max(0, end - self._last)
        text, counts = self._text, self._counts
        for token in (*text[self._end : end], *text[first : self._first]):
            counts[token] += 1
        for token in (*text[self._first : first], *text[end : self._end]):
            counts[token] -= 1
            if not counts[token]:
                del counts[token]
        self._first, self._end = first, end
