"""Prediction heads: blocks that draft from a target's hidden states and have their own cache.

There are two kinds. **MTP** (NextN) blocks are in the target's file or in a separate one; at position p they take token
p and the target's hidden state of token p - 1. An **EAGLE-3** head takes the hidden states of three target layers,
concatenated and projected by its ``fc`` (:meth:`Head.encode`); its pair for token p is at position p - 1. Both return
logits and a hidden state of their own, which replaces the target's until the target has decoded that token.

Some models have several MTP blocks, one for each drafted token (``chained``). Gemma 4's assistant reads the target's
cache and has none of its own (``shares_cache``), so all its pairs are at the position after the target's text.

Source: common/speculative.cpp (``draft_mtp``, ``draft_eagle3``), src/models/eagle3.cpp, src/llama-context.cpp. A batch
requests logits for all tokens or for none, because model graphs differ in which rows they return for a mixture.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from ggufspec.errors import ModelError
from ggufspec.llamacpp import staging
from ggufspec.llamacpp.hidden import Rows, rows_at
from ggufspec.llamacpp.library import complaints, forget_complaints
from ggufspec.llamacpp.model import EAGLE3, Context, Model
from ggufspec.llamacpp.options import LAST_HIDDEN, ContextOptions, context_hint
from ggufspec.llamacpp.params import head_params


def head_sources(model: Model) -> tuple[int, ...]:
    """Return the target layers whose hidden states a head reads, for ``ContextOptions.hidden``."""
    kind = EAGLE3 if model.architecture == EAGLE3 else "mtp"
    staging.require_functions(kind)
    if kind == "mtp":
        return (LAST_HIDDEN,)
    count = staging.function("llama_model_target_layer_ids_n")(model._handle)
    return tuple(staging.function("llama_model_target_layer_ids")(model._handle)[:count])


class Head:
    """A prediction head on a target that must outlive it. Both have the same sequences, one of which is in use.

    ``model`` is loaded from the head's own file, or from the target's file including its MTP blocks.

    Attributes:
        vocab_size: number of logits per token; -inf for tokens that the head lacks.
        chained: number of blocks that draft one token each; 1 if one block drafts all tokens.
        shares_cache: True if the head reads the target's cache and has no cache of its own.
        shift: number of positions by which a token comes after its pair.

    Raises:
        ModelError: llama.cpp cannot create a context, or the target's hidden states have a different size.
    """

    can_pad = False
    rewind_kind = "exact"
    floor = 0

    def __init__(self, model: Model, target: Context, options: ContextOptions) -> None:
        self._handle: Any = None
        lib = model._lib
        self.model = model
        self.is_eagle3 = model.architecture == EAGLE3
        self.shift = int(self.is_eagle3)
        self.vocab_size = model.vocab_size
        self.capacity = options.ctx_size
        self.max_outputs = options.max_outputs
        self._target = target
        self._lengths = [0] * options.sequences
        self._sequence = 0
        params = head_params(lib, options, target._handle, mtp=not self.is_eagle3)
        forget_complaints()
        self._handle = lib.llama_init_from_model(model._handle, params)
        if not self._handle:
            reason = complaints()
            raise ModelError(f"no context for the head {model.path.name}: {reason}", context_hint(reason))
        self._lib = lib
        self.row_size: int = lib.llama_model_n_embd_out(model._handle)  # floats per hidden state
        if not self.is_eagle3 and self.row_size != target.model.hidden_size:
            raise ModelError(
                f"{model.path.name} reads rows of {self.row_size} numbers, but {target.model.path.name} has rows of "
                f"{target.model.hidden_size}",
                "choose a head that was made for this target",
            )
        staging.function("llama_set_embeddings_nextn")(self._handle, True, True)
        self.shares_cache = (
            not self.is_eagle3 and staging.function("llama_get_ctx_other")(self._handle) == target._handle
        )
        self.chained = 1 if self.is_eagle3 or self.shares_cache else max(1, model.head_blocks)
        self._memory = lib.llama_get_memory(self._handle)
        self._most: int = params.n_batch
        self._input: Rows = np.zeros((self._most, self.row_size), np.float32)
        self._batch = lib.llama_batch_init(self._most, 0, 1)
        self._batch.embd = self._input.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        self._encoded = target.model.hidden_size * len(head_sources(model))
        self._features = lib.llama_batch_init(self._most, self._encoded, 1) if self.is_eagle3 else None
        for batch in filter(None, (self._batch, self._features)):
            for i in range(self._most):
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0

    @property
    def length(self) -> int:
        """Position after the last pair in the cache."""
        return self._target.length if self.shares_cache else self._lengths[self._sequence]

    def use(self, sequence: int) -> None:
        """Switch to another sequence, as the target does; all others stay unchanged."""
        if sequence != self._sequence:
            self._sequence = sequence
            for batch in filter(None, (self._batch, self._features)):
                for i in range(self._most):
                    batch.seq_id[i][0] = sequence

    def encode(self, hidden: Rows) -> Rows:
        """Return the target's hidden states for :meth:`read`: projected by an EAGLE-3 head's ``fc``, else unchanged.

        ``hidden`` is (tokens, sources × size), from :meth:`Context.hidden`. Raises ModelError if llama.cpp fails.
        """
        if self._features is None or not len(hidden):
            return hidden
        batch, parts = self._features, []
        for start in range(0, len(hidden), self._most):
            part = np.ascontiguousarray(hidden[start : start + self._most], np.float32)
            ctypes.memmove(batch.embd, part.ctypes.data, part.nbytes)
            batch.n_tokens = len(part)
            # The encoder ignores positions, but llama.cpp checks them
            free = self._lib.llama_memory_seq_pos_max(self._memory, self._sequence) + 1
            for i in range(len(part)):
                batch.pos[i] = free + i
                batch.logits[i] = 1
            self._check(self._lib.llama_encode(self._handle, batch), len(part))
            parts.append(self._own_rows(len(part)))
        return np.concatenate(parts)

    def read(
        self, tokens: Sequence[int], rows: Rows, position: int, *, outputs: bool, block: int = 0
    ) -> tuple[Rows, Rows]:
        """Decode (token, hidden state) pairs, and append them to the cache unless it is the target's.

        Args:
            tokens: (n,) ids; n is at most ``max_outputs`` if ``outputs``. Tokens that the head lacks are decoded as
                token 0.
            rows: (n, row_size), the encoded hidden state before each token.
            position: position of the first pair, after the last one in the cache.
            outputs: True to return logits and hidden states for all pairs.
            block: index of the block among chained ones.

        Returns:
            logits (n, vocab), a view that is valid until the next call, and the head's hidden states (n, row_size);
            both are empty without ``outputs``.

        Raises:
            ModelError: llama.cpp failed.
        """
        if self.chained > 1:
            staging.function("llama_set_nextn_layer_offset")(self._handle, block)
        batch, step = self._batch, self._most
        for start in range(0, len(tokens), step):
            part = tokens[start : start + step]
            self._input[: len(part)] = rows[start : start + step]
            for i, token in enumerate(part):
                batch.token[i] = token if token < self.vocab_size else 0
                batch.pos[i] = position + start + i
                batch.logits[i] = outputs
            batch.n_tokens = len(part)
            self._check(self._lib.llama_decode(self._handle, batch), len(part))
        self._lengths[self._sequence] = position + len(tokens)
        if not outputs:
            return np.empty((0, self.vocab_size), np.float32), self._input[:0]
        logits = self._lib.llama_get_logits(self._handle)
        return np.ctypeslib.as_array(logits, shape=(len(tokens), self.vocab_size)), self._own_rows(len(tokens))

    def rewind(self, position: int) -> None:
        """Remove the pairs at ``position`` and beyond."""
        self._lengths[self._sequence] = min(self._lengths[self._sequence], position)
        if not self.shares_cache:
            self._lib.llama_memory_seq_rm(self._memory, self._sequence, position, -1)

    def decode(self, tokens: Sequence[int], outputs: int) -> Rows:
        """Decode tokens after the last pair with zeros as hidden states, for timing; real states take equally long."""
        rows = self.encode(np.zeros((len(tokens), self._encoded), np.float32))
        return self.read(tokens, rows, self.length, outputs=outputs > 0)[0][-outputs:]

    def mark(self) -> None:
        """Do nothing, because a head can always roll back to its current length, unlike a :class:`Context`."""

    def use_threads(self, count: int) -> None:
        self._lib.llama_set_n_threads(self._handle, count, count)

    def _own_rows(self, count: int) -> Rows:
        return rows_at(staging.function("llama_get_embeddings_nextn")(self._handle), count, self.row_size).copy()

    def _check(self, status: int, count: int) -> None:
        if status != 0:
            what = f"{count} tokens in {self.model.path.name} (status {status}): {complaints()}"
            raise ModelError(f"llama.cpp could not decode {what}", "-v shows llama.cpp's log")

    def close(self) -> None:
        if self._handle:
            self._batch.embd = None  # NumPy owns this memory
            for batch in filter(None, (self._batch, self._features)):
                self._lib.llama_batch_free(batch)
            self._lib.llama_free(self._handle)
            self._handle = None
