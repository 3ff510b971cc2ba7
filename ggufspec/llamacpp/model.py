"""A GGUF model and its decoding context on llama.cpp's low-level API."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ggufspec import child
from ggufspec.errors import ModelError, UsageError
from ggufspec.files import untrusted
from ggufspec.hardware.backends import backend_of
from ggufspec.hardware.host import obtainable_memory_bytes
from ggufspec.llamacpp import gguf
from ggufspec.llamacpp.devices import devices, offloading
from ggufspec.llamacpp.hidden import HiddenRows, hidden_rows
from ggufspec.llamacpp.library import complaints, forget_complaints, load_library, unpinned
from ggufspec.llamacpp.options import ContextOptions, Placement, context_hint, load_hint
from ggufspec.llamacpp.params import context_params, load_model, model_params
from ggufspec.llamacpp.rewind import (
    CheckpointRollback,
    ExactRollback,
    NoRollback,
    SnapshotRollback,
    WindowedRollback,
    architecture_of,
    choose_rollback,
)

Logits = npt.NDArray[np.float32]

EAGLE3 = "eagle3"  # architecture of EAGLE-3 heads, whose "encoder" only projects a target's hidden states

_GGUF_MAGIC = b"GGUF"
_MOST_LABEL = 24  # maximum length of general.size_label in bytes


def check_gguf(path: Path) -> None:
    """Raise ModelError for a file that cannot be GGUF, before llama.cpp opens it."""
    gguf.check_file(path)
    magic = untrusted.read_bytes(path, len(_GGUF_MAGIC), hint=f"ls -l {path.parent}", failure=ModelError, cut=True)
    if magic != _GGUF_MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it begins with {magic!r}, not {_GGUF_MAGIC!r}", gguf.NOT_GGUF)


_ON_CPU = Placement()


def size_label(parameters: int) -> str:
    """Return a model's size as written in model names: ``135M``, ``0.5B``, ``70B``."""
    if parameters < 4e8:
        return f"{parameters / 1e6:.0f}M"
    return f"{parameters / 1e9:.{int(parameters < 9.95e9)}f}B"


class Model:
    """Weights and vocabulary of one GGUF file, or of a split model, given by its first part.

    By default all layers are on the CPU; ``vocab_only`` loads only the vocabulary and the chat template.

    Raises:
        ModelError: the file is missing, damaged, or does not fit; the message includes llama.cpp's reason.
    """

    def __init__(self, path: Path, placement: Placement = _ON_CPU, *, vocab_only: bool = False) -> None:
        self._handle: Any = None
        check_gguf(path)
        lib = load_library()
        self.path = path
        if not vocab_only and placement.is_mapped and gguf.alignment(path) % gguf.ALIGNMENT:
            placement = replace(placement, load_mode="none")  # a mapped file would fail a TENSOR_ALIGNMENT assertion
        params, _alive = model_params(lib, placement)
        params.vocab_only = vocab_only
        cards = offloading(devices()) if placement.gpu_layers else []
        for device in cards:
            if not device.is_remote:  # a remote driver's crash ends the worker, not this process
                hint = backend_of(device.name).driver_hint
                child.note_on_card(path.name, f"{device.name} ({device.description})", hint)
        forget_complaints()
        self._handle = load_model(lib, path, params)
        if not self._handle:
            reason = complaints()
            raise ModelError(f"{path} cannot be loaded: {reason}", load_hint(reason))
        self.unpinned = unpinned()
        self._lib = lib
        self._vocab = lib.llama_model_get_vocab(self._handle)
        decodes = lib.llama_model_has_decoder(self._handle) and not lib.llama_model_has_encoder(self._handle)
        if not decodes and self.architecture != EAGLE3:
            raise ModelError(f"{path} is not a decoder-only language model", "choose a causal language model")
        self.vocab_size: int = lib.llama_vocab_n_tokens(self._vocab)
        self.blocks: int = lib.llama_model_n_layer(self._handle)  # number of blocks, excluding MTP blocks
        self.head_blocks: int = lib.llama_model_n_layer_nextn(self._handle)
        self.layers = self.blocks + self.head_blocks
        self.parameters: int = lib.llama_model_n_params(self._handle)
        self.hidden_size: int = lib.llama_model_n_embd(self._handle)
        self.gpu_layers = placement.offloaded(self.layers) if cards else 0
        self.context_train: int = lib.llama_model_n_ctx_train(self._handle)
        self.size_bytes: int = lib.llama_model_size(self._handle)
        self._piece_buffer = ctypes.create_string_buffer(256)

    @functools.cached_property
    def _assumed_eos(self) -> int | None:
        """Ordinary token that llama.cpp assumes as EOS if the header names none (src/llama-vocab.cpp), or None."""
        lib, eos = self._lib, self._lib.llama_vocab_eos(self._vocab)
        if eos < 0 or lib.llama_model_meta_val_str(self._handle, b"tokenizer.ggml.eos_token_id", None, 0) >= 0:
            return None
        return None if lib.llama_vocab_get_attr(self._vocab, eos) & lib.LLAMA_TOKEN_ATTR_CONTROL else int(eos)

    @property
    def has_end(self) -> bool:
        """True if the vocabulary has a token that ends a text."""
        return self._assumed_eos is None or any(map(self.is_end, range(self.vocab_size)))

    @property
    def architecture(self) -> str:
        return architecture_of(self._lib, self._handle)

    @property
    def description(self) -> str:
        """Architecture, size and quantisation: ``qwen2 0.5B Q4_K - Medium``.

        The size comes from the file's label or, without one, the parameter count; llama.cpp guesses it from the layers.
        """
        buffer = ctypes.create_string_buffer(128)
        self._lib.llama_model_desc(self._handle, buffer, len(buffer))
        architecture, _, quantisation = buffer.value.decode("utf-8", "replace").split(" ", 2)
        label = ctypes.create_string_buffer(_MOST_LABEL)
        self._lib.llama_model_meta_val_str(self._handle, b"general.size_label", label, len(label))
        size = label.value.decode("utf-8", "replace") or size_label(self._lib.llama_model_n_params(self._handle))
        return f"{architecture} {size} {quantisation.replace(' (guessed)', '')}"

    def tokenize(self, text: str, *, special: bool = False, start: bool = True) -> list[int]:
        """Return the token ids of ``text``, after one BOS token if a prompt begins (``start``) and the model uses BOS.

        With ``special``, ``<|…|>`` means the special token of that name. No EOS is added, because the text continues.
        """
        data = text.encode()
        room = len(data) + 8
        while True:
            buffer = (ctypes.c_int32 * room)()
            count = self._lib.llama_tokenize(self._vocab, data, len(data), buffer, room, start, special)
            if count >= 0:
                break
            room = -count
        ids: list[int] = buffer[:count]
        if start and self.vocabulary_kind in ("SPM", "BPE", "UGM") and self._lib.llama_vocab_get_add_eos(self._vocab):
            ids.pop()
        return ids[1:] if start and ids[:2] == [self.first_token] * 2 else ids

    def sample_tokens(self, text: str) -> list[int]:
        """Return tokens to time decoding with: those of ``text``, or arbitrary ids if the model has no vocabulary."""
        if self.vocabulary_kind == "none":  # llama_tokenize would abort the process
            return [(7919 * place + 1) % self.vocab_size for place in range(256)]
        return self.tokenize(text, start=False)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of one token; a character may span several tokens. A control token has no bytes; with
        ``special`` it has those of its name.
        """
        self.check_tokens((token,))  # llama.cpp aborts the process otherwise
        while True:
            buffer = self._piece_buffer
            count = self._lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
            if count >= 0:
                return buffer.raw[:count]
            self._piece_buffer = ctypes.create_string_buffer(-count)

    @property
    def chat_template(self) -> str:
        """Jinja template that turns messages into a prompt (``tokenizer.chat_template``); empty without one."""
        return self._template(None)

    @property
    def tool_template(self) -> str:
        """Template to use if there are tools, ``tokenizer.chat_template.tool_use``; empty without one."""
        return self._template(b"tool_use")

    def _template(self, name: bytes | None) -> str:
        return (self._lib.llama_model_chat_template(self._handle, name) or b"").decode("utf-8", "replace")

    @property
    def first_token(self) -> int | None:
        """BOS token that begins every text; None if the model uses none."""
        wanted = self._lib.llama_vocab_get_add_bos(self._vocab)
        return self._lib.llama_vocab_bos(self._vocab) if wanted else None

    @property
    def token_texts(self) -> tuple[str, str]:
        """Texts of the BOS and EOS tokens for a chat template; empty if there is no such token."""
        bos, eos = self._lib.llama_vocab_bos(self._vocab), self._lib.llama_vocab_eos(self._vocab)
        return self._token_text(bos), "" if eos == self._assumed_eos else self._token_text(eos)

    def _token_text(self, token: int) -> str:
        text: bytes | None = self._lib.llama_vocab_get_text(self._vocab, token) if token >= 0 else None
        return (text or b"").decode("utf-8", "replace")

    def special_texts(self) -> tuple[str, ...]:
        """Return the texts that only ``tokenize(special=True)`` turns into single tokens.

        Source: ``llama_vocab::impl::tokenizer_st_partition`` in src/llama-vocab.cpp.
        """
        lib, kinds = self._lib, self._lib.LLAMA_TOKEN_ATTR_CONTROL | self._lib.LLAMA_TOKEN_ATTR_UNKNOWN
        special = (token for token in range(self.vocab_size) if lib.llama_vocab_get_attr(self._vocab, token) & kinds)
        return tuple(text for token in special if (text := self._token_text(token)))

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise a UsageError that names the first id outside the vocabulary, if there is one."""
        if wrong := [one for one in tokens if not 0 <= one < self.vocab_size]:
            raise UsageError(f"token {wrong[0]} is not one of the model's {self.vocab_size:,}", "send text")

    def is_end(self, token: int, *, of_grammar: bool = False) -> bool:
        """Return True if a token ends a text or, with ``of_grammar``, if llama.cpp ends a grammar with it."""
        if token < 0 or (token == self._assumed_eos and not of_grammar):
            return False
        return bool(self._lib.llama_vocab_is_eog(self._vocab, token))

    def vocabulary(self) -> list[bytes]:
        """Return the text of every token, by id."""
        text = self._lib.llama_vocab_get_text
        return [text(self._vocab, token) or b"" for token in range(self.vocab_size)]

    @property
    def vocabulary_kind(self) -> str:
        """Family of the tokenizer: SPM, BPE, …; ``none`` without one."""
        families = {0: "none", 1: "SPM", 2: "BPE", 3: "WPM", 4: "UGM", 5: "RWKV", 6: "PLAMO2"}  # llama_vocab_type
        kind = self._lib.llama_vocab_type(self._vocab)
        return families.get(kind, str(kind))

    def close(self) -> None:
        """Free the weights; the model's contexts must already be closed."""
        if self._handle:
            load_library().llama_model_free(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class SequencePart:
    """Part of a batch: tokens to append to one sequence, the last ``outputs`` of which need logits."""

    sequence: int
    tokens: Sequence[int]
    outputs: int


@dataclass(slots=True)
class _Sequence:
    memory: ExactRollback
    hidden: HiddenRows | None
    length: int = 0


class Context:
    """One or more token sequences (``options.sequences``) in a model's memory, one of which is in use.

    The sequence in use has ``length`` tokens; :meth:`decode` appends tokens, :meth:`rewind` removes the newest.

    An attention cache can be rewound to any length or, with a sliding window, down to :attr:`floor`. A recurrent or
    hybrid memory can be rewound only if ``options.rewind`` requests it, and only back to the unverified tokens: see
    :mod:`ggufspec.llamacpp.rewind`.

    Attributes:
        can_rewind: True if tokens can be rolled back, so that the model can be part of a pair.
        rewind_kind: ``exact`` (free), ``snapshots``, ``checkpoint``, or ``none``.
        forgets: True if the memory cannot be rewound to every length, so that saved states are useful.
        checkpoint_bytes: additional bytes that rewinding needs.
        can_pad: True if a batch can be padded; otherwise ``batch_size`` has no effect.
        can_share: True if one batch can hold tokens of several sequences (:meth:`decode_together`).

    Raises:
        ModelError: llama.cpp cannot create the context, e.g. for lack of memory.
        UsageError: an option has an unknown value.
    """

    def __init__(self, model: Model, options: ContextOptions) -> None:
        self._handle: Any = None
        lib = model._lib
        if model.architecture == EAGLE3:
            raise ModelError(f"{model.path.name} is a head: it writes nothing of its own", "give its target with -m")
        self.model = model
        self.vocab_size = model.vocab_size
        self.capacity = options.ctx_size
        self.max_outputs = options.max_outputs
        self.length = 0
        params = context_params(lib, options, model._handle)
        forget_complaints()
        # Allow only free memory, because llama.cpp writes to all of it; with GPUs, driver reservations would count
        limit = nullcontext() if model.gpu_layers else child.limited_memory(obtainable_memory_bytes(), only_data=True)
        with limit:
            self._handle = lib.llama_init_from_model(model._handle, params)
        if not self._handle:
            reason = complaints()
            raise ModelError(
                f"no context of {options.ctx_size} tokens for {model.path.name}: {reason}", context_hint(reason)
            )
        self._lib = lib
        hidden = [
            hidden_rows(model, self._handle, options.hidden, self.capacity) if options.hidden else None
            for _ in range(options.sequences)
        ]
        self._hidden = hidden[0]
        self._n_batch: int = params.n_batch
        self._batch = lib.llama_batch_init(self._n_batch, 0, 1)
        for i in range(self._n_batch):
            self._batch.n_seq_id[i] = 1
        self._sequence = 0
        self._rows: Logits = np.empty((0, self.vocab_size), np.float32)
        self._rows_address = 0
        memories = self._probe_memory(options)
        self._sequences = list(map(_Sequence, memories, hidden))
        self._memory = memories[0]
        self.rewind_kind = self._memory.kind
        self.can_rewind = self.rewind_kind != NoRollback.kind
        self.can_pad = self._memory.can_pad
        self.forgets = self._memory.forgets
        self.can_share = bool(params.kv_unified) and options.shared_cells and not self.forgets
        self.checkpoint_bytes = options.sequences * self._memory.states * self._state_bytes

    def use(self, sequence: int) -> None:
        """Decode this sequence from now on; other sequences stay unchanged."""
        if sequence != self._sequence:
            self._sequences[self._sequence].length = self.length
            self._sequence, now = sequence, self._sequences[sequence]
            self._memory, self._hidden, self.length = now.memory, now.hidden, now.length

    def copy(self, sequence: int) -> None:
        """Replace the text of the sequence in use with a copy of another's, without hidden states; raise ModelError if
        the memory :attr:`forgets`.
        """
        if self.forgets:
            raise ModelError(f"{self.model.path.name} cannot copy a text (recurrent memory, or a sliding window)", "")
        other = self._sequences[sequence]
        self._memory.copy(other.memory)
        self.length = other.length
        if self._hidden:
            self._hidden.first = self.length

    def save(self) -> tuple[int, Any]:
        """Return (length, bytes), the state of a memory that :attr:`forgets`, for :meth:`restore`."""
        self._memory.settle(self.length, 0, 0)
        return self.length, self._memory.save()

    def restore(self, saved: tuple[int, Any]) -> None:
        """Return to a saved length; the text must still begin with the tokens it had when saved."""
        self._memory.restore(*saved)
        self.length = saved[0]

    def decode(self, tokens: Sequence[int], outputs: int, batch_size: int = 0) -> Logits:
        """Append ``tokens``, at least one, and return the logits of the last ``outputs`` of them.

        If ``can_pad``, the batch is padded to ``batch_size`` tokens; the padding is removed again and affects only
        which kernels run.

        Returns:
            (outputs, vocab) float32, a view into llama.cpp's own buffer, valid until the next call.

        Raises:
            ModelError: the cache is full, or llama.cpp failed.
        """
        padding = self._memory.padding(len(tokens), batch_size)
        if outputs + padding > self.max_outputs or (padding and batch_size > self._n_batch):
            raise ValueError(
                f"{outputs} rows and {padding} padding tokens wanted of a context for {self.max_outputs} rows"
            )
        if self.length + len(tokens) > self.capacity:
            raise ModelError(f"the context of {self.capacity} tokens is full", "a larger -c gives room")
        again, apart = self._memory.settle(self.length, len(tokens), outputs)
        if apart:
            self._submit(again, 0, 0)
            again, _ = self._memory.settle(self.length, len(tokens), outputs)
        tokens = [*again, *tokens] if again else tokens
        start, last = 0, max(outputs, 1)  # the last batch has at least ``last`` tokens
        while len(tokens) - start > self._n_batch:  # all but the last batch of a prompt
            count = min(self._n_batch, len(tokens) - start - last)
            self._submit(tokens[start : start + count], 0, 0)
            start += count
        self._submit(tokens[start:], outputs, padding)
        if padding:
            self._memory.cut(self.length)
        return self._logits(outputs + padding)[:outputs] if outputs else self._rows[:0]

    def decode_together(self, parts: Sequence[SequencePart], batch_size: int = 0) -> list[Logits]:
        """Append tokens to several sequences in one batch, if :attr:`can_share`; return the logits of each part.

        The batch is padded to ``batch_size`` tokens if it has fewer. The sequence in use remains in use.

        Returns:
            for each part (outputs, vocab) float32, a view into llama.cpp's own buffer, valid until the next call.

        Raises:
            ModelError: a cache is full, or llama.cpp failed.
        """
        self._sequences[self._sequence].length = self.length
        count, outputs = sum(len(one.tokens) for one in parts), sum(one.outputs for one in parts)
        padding = max(0, batch_size - count)
        if outputs + padding > self.max_outputs or count + padding > self._n_batch:
            raise ValueError(f"{outputs} rows of {count} tokens wanted of a context for {self.max_outputs} rows")
        start = 0
        for one in parts:
            sequence = self._sequences[one.sequence]
            if sequence.length + len(one.tokens) > self.capacity:
                raise ModelError(f"the context of {self.capacity} tokens is full", "a larger -c gives room")
            is_last = one is parts[-1]
            self._fill(start, one.sequence, sequence.memory.held, one.tokens, one.outputs, padding if is_last else 0)
            start += len(one.tokens)
        self._run(count + padding, f"{count} tokens of {len(parts)} texts")
        for one in parts:
            sequence, is_last = self._sequences[one.sequence], one is parts[-1]
            sequence.memory.added(one.tokens, padding if is_last else 0, one.outputs)
            sequence.length += len(one.tokens)
            if padding and is_last:
                sequence.memory.cut(sequence.length)
        self.length = self._sequences[self._sequence].length
        rows, found, start = self._logits(outputs + padding), [], 0
        for one in parts:
            found.append(rows[start : start + one.outputs])
            start += one.outputs
        return found

    def _submit(self, tokens: Sequence[int], outputs: int, padding: int) -> None:
        count, held = len(tokens), self._memory.held
        self._fill(0, self._sequence, held, tokens, outputs, padding)
        self._run(count + padding, f"{count} tokens at {held}")
        if self._hidden:
            self._hidden.take(count, held)
        self._memory.added(tokens, padding, outputs)
        self.length = held + count

    def _fill(self, start: int, sequence: int, held: int, tokens: Sequence[int], outputs: int, padding: int) -> None:
        """Write the tokens of a sequence into the batch, beginning at index ``start``."""
        batch = self._batch
        ids, positions, flags, sequences = batch.token, batch.pos, batch.logits, batch.seq_id
        end = start + len(tokens)
        first_output = end - outputs
        for i, token in enumerate(tokens, start):
            ids[i] = token
            positions[i] = held + i - start
            flags[i] = i >= first_output
            sequences[i][0] = sequence
        for i in range(end, end + padding):
            ids[i] = tokens[-1]
            positions[i] = held + i - start
            flags[i] = 1
            sequences[i][0] = sequence

    def _run(self, count: int, described: str) -> None:
        """Decode the first ``count`` tokens of the batch."""
        self._batch.n_tokens = count
        status = self._lib.llama_decode(self._handle, self._batch)
        if status != 0:
            raise ModelError(
                f"llama.cpp could not decode {described} (status {status}): {complaints()}",
                "lower -c or -ngl if memory is short; -v shows llama.cpp's log",
            )

    def synchronize(self) -> None:
        """Wait until the last batch is computed; without outputs, a GPU may still be at work when decoding returns."""
        self._lib.llama_synchronize(self._handle)

    @property
    def batch(self) -> int:
        """Maximum number of prompt tokens decoded in one call."""
        return self._n_batch

    @property
    def hidden_first(self) -> int:
        """Earliest position whose hidden states are stored; ``length`` if the context stores none."""
        return min(self._hidden.first, self.length) if self._hidden else self.length

    def hidden(self, first: int, last: int) -> Logits:
        """Return the hidden states of the tokens at positions ``first`` to ``last`` - 1, as computed in their batches.

        Returns:
            (tokens, sources × size) float32, a copy.

        Raises:
            ModelError: the context stores no hidden states (``ContextOptions.hidden``), or no longer has these.
        """
        if not self._hidden or first < self.hidden_first or last > self.length:
            raise ModelError(
                f"{self.model.path.name} has no hidden rows of the tokens {first} to {last}",
                "--drafter draft or --drafter lookup needs none",
            )
        return self._hidden.read(first, last)

    def _logits(self, rows: int) -> Logits:
        pointer = self._lib.llama_get_logits(self._handle)  # this call waits for the device
        address = ctypes.cast(pointer, ctypes.c_void_p).value or 0
        if address != self._rows_address or rows > len(self._rows):
            self._rows = np.ctypeslib.as_array(pointer, shape=(max(rows, len(self._rows)), self.vocab_size))
            self._rows_address = address
        return self._rows[:rows]

    def rewind(self, length: int) -> None:
        """Keep only the first ``length`` tokens, which then count as accepted; 0 is always possible.

        A recurrent memory with a checkpoint can go back to its length at the last rewind or, if later, to before the
        unverified batches (:class:`~ggufspec.llamacpp.rewind.CheckpointRollback`). A memory with snapshots keeps at
        least the first token of the last batch.

        Raises:
            ModelError: the model's memory cannot be rewound that far.
        """
        if length > self.length:
            raise ValueError(f"rewind to {length} of {self.length} tokens")
        if length == 0:
            self._memory.clear()
        elif not self._memory.cut(length):
            name = self.model.path.name
            if not self.can_rewind:
                raise ModelError(f"{name} cannot take tokens back (recurrent memory)", "run it with --no-draft")
            raise ModelError(f"{name} cannot go back to token {length}, only to {self.floor}", "run it with --no-draft")
        self.length = length

    def use_threads(self, count: int) -> None:
        self._lib.llama_set_n_threads(self._handle, count, count)

    @property
    def floor(self) -> int:
        """Lowest length, other than 0, that :meth:`rewind` can go back to now."""
        return self._memory.floor()

    def mark(self) -> None:
        """Allow one rollback to the current length, for measurements; otherwise a single token would count as accepted.

        This is free, except with snapshots, which copy the state to host memory.
        """
        self._memory.mark(self.length)

    def _probe_memory(self, options: ContextOptions) -> list[ExactRollback]:
        """Return the memory of each sequence, after testing whether one of two decoded tokens can be rolled back.

        llama.cpp cannot roll back tokens in a recurrent memory.
        """
        lib, handle, texts = self._lib, self._handle, range(options.sequences)
        self._memory = ExactRollback(lib, handle)
        self.decode([0, 0], outputs=min(2, self.max_outputs))
        self._state_bytes: int = lib.llama_state_seq_get_size_ext(handle, 0, lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        possible = self._memory.cut(1)
        self.rewind(0)
        match choose_rollback(lib, self.model._handle, options):
            case "snapshots" if count := lib.llama_n_rs_seq(self._handle):
                return [SnapshotRollback(lib, handle, count, text) for text in texts]
            case "checkpoint":
                spare = options.sequences
                return [CheckpointRollback(lib, handle, options.rewind, options.again_max, i, spare + i) for i in texts]
        window = 0 if options.swa_full else lib.llama_model_n_swa(self.model._handle)
        if possible and window:
            return [WindowedRollback(lib, handle, window, text) for text in texts]
        return [(ExactRollback if possible else NoRollback)(lib, handle, text) for text in texts]

    def close(self) -> None:
        if self._handle:
            self._lib.llama_batch_free(self._batch)
            self._lib.llama_free(self._handle)
            self._handle = None
