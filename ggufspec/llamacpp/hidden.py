"""The target's hidden states, stored for the drafters that read them: MTP and EAGLE-3 heads.

llama.cpp returns the hidden states of one batch and overwrites them in the next. A head may need them many batches
later, because it decodes new text only when that pays off. So the newest states are copied into a ring buffer.

Source: ``extract_layer_inputs`` and ``embd_nextn`` in src/llama-context.cpp.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ggufspec.errors import ModelError
from ggufspec.llamacpp import staging
from ggufspec.llamacpp.options import HIDDEN_RING, LAST_HIDDEN

Rows = npt.NDArray[np.float32]


def rows_at(address: int, count: int, size: int) -> Rows:
    """Return a (count, size) view of llama.cpp's own buffer, valid until the next call to llama.cpp."""
    buffer: Any = (ctypes.c_float * (count * size)).from_address(address)
    return np.frombuffer(buffer, np.float32).reshape(count, size)


class HiddenRows:
    """Ring buffer of the newest hidden states of ``context``, a llama.cpp handle that has not decoded a batch yet.

    ``sources`` lists the layers whose inputs are stored, or ``LAST_HIDDEN`` for the output of the last block; ``size``
    is the number of floats per hidden state, and ``capacity`` the context size in tokens.
    """

    def __init__(self, context: Any, sources: Sequence[int], size: int, capacity: int) -> None:
        self.sources = tuple(sources)
        self.size = size
        self.first = 0  # earliest position whose hidden states are stored
        self._context = context
        self._rows: Rows = np.zeros((min(capacity, HIDDEN_RING), len(sources), size), np.float32)
        for source in sources:
            if source == LAST_HIDDEN:
                staging.function("llama_set_embeddings_nextn")(context, True, False)
            else:
                staging.function("llama_set_embeddings_layer_inp")(context, source, True)

    def take(self, count: int, first: int) -> None:
        """Store the hidden states of the last batch's first ``count`` tokens, which begin at position ``first``."""
        reach = len(self._rows)
        skipped = max(0, count - reach)
        start = (first + skipped) % reach
        before = min(count - skipped, reach - start)  # rows that fit before the ring's end; the rest go to its start
        self.first = max(min(self.first, first), first + count - reach)
        for index, source in enumerate(self.sources):
            if source == LAST_HIDDEN:
                address = staging.function("llama_get_embeddings_nextn")(self._context)
            else:
                address = staging.function("llama_get_embeddings_layer_inp")(self._context, source)
            new = rows_at(address, count, self.size)[skipped:]
            self._rows[start : start + before, index] = new[:before]
            self._rows[: len(new) - before, index] = new[before:]

    def read(self, first: int, last: int) -> Rows:
        """Copy the hidden states at positions ``first`` to ``last`` - 1, as (tokens, sources × size).

        The caller ensures that these positions were decoded, and that ``first`` is not before :attr:`first`.
        """
        slots = np.arange(first, last) % len(self._rows)
        return self._rows[slots].reshape(last - first, len(self.sources) * self.size)


def hidden_rows(model: Any, context: Any, sources: Sequence[int], capacity: int) -> HiddenRows:
    """Create the :class:`HiddenRows` for a context of a :class:`~ggufspec.llamacpp.model.Model`.

    Raises:
        ModelError: the architecture's hidden states are unavailable, a layer does not exist, or a function is missing.
    """
    for source in sources:
        last = source == LAST_HIDDEN
        staging.require_functions("mtp" if last else "eagle3")
        if model.architecture not in (staging.LAST_ROWS if last else staging.LAYER_INPUTS):
            raise ModelError(
                f"llama.cpp returns no hidden rows for the architecture {model.architecture!r}",
                "--drafter draft and --drafter lookup need none",
            )
        if not last and not 0 <= source < model.blocks:
            raise ModelError(
                f"{model.path.name} has {model.blocks} blocks: there is no block {source} to read",
                "choose a head that was made for this target",
            )
    return HiddenRows(context, sources, model.hidden_size, capacity)
