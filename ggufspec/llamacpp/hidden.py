"""The target's hidden rows, stored next to its logits for the drafters that read them: MTP heads and EAGLE-3.

llama.cpp hands out the rows of one batch and overwrites them with the next. A head may read many batches later (it
catches up when it is worth it), so the newest rows are copied into a ring by position.

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
    """Return a (count, size) view of llama.cpp's own buffer, valid until its next call."""
    buffer: Any = (ctypes.c_float * (count * size)).from_address(address)
    return np.frombuffer(buffer, np.float32).reshape(count, size)


class HiddenRows:
    """A ring of the newest tokens' hidden rows of one context (llama.cpp's handle) that has not decoded a batch yet.

    ``sources`` are layers whose input rows are stored, or ``LAST_HIDDEN`` for the rows after the last block; ``size``
    is the floats in a row, ``capacity`` the tokens that the context holds.
    """

    def __init__(self, context: Any, sources: Sequence[int], size: int, capacity: int) -> None:
        self.sources = tuple(sources)
        self.size = size
        self.first = 0  # earliest position whose row is stored
        self._context = context
        self._rows: Rows = np.zeros((min(capacity, HIDDEN_RING), len(sources), size), np.float32)
        for source in sources:
            if source == LAST_HIDDEN:
                staging.function("llama_set_embeddings_nextn")(context, True, False)
            else:
                staging.function("llama_set_embeddings_layer_inp")(context, source, True)

    def take(self, count: int, first: int) -> None:
        """Store the rows of the batch just decoded, whose first ``count`` tokens begin at position ``first``."""
        reach = len(self._rows)
        skipped = max(0, count - reach)
        start = (first + skipped) % reach
        before = min(count - skipped, reach - start)  # rows for the end of the ring; the others go to its beginning
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
        """Copy the rows (tokens, sources × size) of the positions ``first`` … ``last`` - 1.

        The caller ensures that they were decoded, and that ``first`` is not before :attr:`first`.
        """
        slots = np.arange(first, last) % len(self._rows)
        return self._rows[slots].reshape(last - first, len(self.sources) * self.size)


def hidden_rows(model: Any, context: Any, sources: Sequence[int], capacity: int) -> HiddenRows:
    """Make the ring (:class:`HiddenRows`) for a context of a :class:`~ggufspec.llamacpp.model.Model`.

    Raises:
        ModelError: its architecture does not compute such rows, it has no such layer, or this build lacks a function.
    """
    for source in sources:
        last = source == LAST_HIDDEN
        staging.require("mtp" if last else "eagle3")
        if model.architecture not in (staging.LAST_ROWS if last else staging.LAYER_INPUTS):
            raise ModelError(
                f"llama.cpp hands out no hidden rows of the architecture {model.architecture!r}",
                "--drafter draft or --drafter lookup needs none",
            )
        if not last and not 0 <= source < model.blocks:
            raise ModelError(
                f"{model.path.name} has {model.blocks} blocks: there is no input of block {source}",
                "choose a head that was made for this target",
            )
    return HiddenRows(context, sources, model.hidden_size, capacity)
