"""A GGUF model and its decoding context on llama.cpp's low-level API."""

from __future__ import annotations

import ctypes
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
from ggufspec.llamacpp.library import complaints, forget_complaints, load, unpinned
from ggufspec.llamacpp.options import ContextOptions, Placement, context_hint, load_hint
from ggufspec.llamacpp.params import context_params, load_model, model_params
from ggufspec.llamacpp.rewind import Checkpoint, Exact, Impossible, Snapshots, Windowed, architecture_of, choose

Logits = npt.NDArray[np.float32]

EAGLE3 = "eagle3"  # architecture of heads whose "encoder" only joins rows

_GGUF_MAGIC = b"GGUF"
_MOST_LABEL = 24  # bytes of general.size_label


def check_gguf(path: Path) -> None:
    """Refuse with a ModelError what cannot be a GGUF file, before llama.cpp sees it."""
    gguf.check_file(path)
    magic = untrusted.read_bytes(path, len(_GGUF_MAGIC), hint=f"ls -l {path.parent}", failure=ModelError, cut=True)
    if magic != _GGUF_MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it begins with {magic!r}, not {_GGUF_MAGIC!r}", gguf.NOT_GGUF)


_ON_CPU = Placement()


def size_label(parameters: int) -> str:
    """A model's size as in its name: ``135M``, ``0.5B``, ``70B``."""
    if parameters < 4e8:
        return f"{parameters / 1e6:.0f}M"
    return f"{parameters / 1e9:.{int(parameters < 9.95e9)}f}B"


class Model:
    """Weights and vocabulary of one GGUF file, or of a split model given its first part.

    The CPU has all layers by default; ``vocab_only`` loads no weights, for tokens and the chat template.

    Raises:
        ModelError: the file is missing, damaged, or does not fit; the message has llama.cpp's own.
    """

    def __init__(self, path: Path, placement: Placement = _ON_CPU, *, vocab_only: bool = False) -> None:
        self._handle: Any = None
        check_gguf(path)
        lib = load()
        self.path = path
        if not vocab_only and placement.is_mapped and gguf.alignment(path) % gguf.ALIGNMENT:
            placement = replace(placement, load_mode="none")  # or ggml-backend.cpp asserts: TENSOR_ALIGNMENT
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
        self.blocks: int = lib.llama_model_n_layer(self._handle)  # without those of MTP heads
        self.head_blocks: int = lib.llama_model_n_layer_nextn(self._handle)
        self.layers = self.blocks + self.head_blocks
        self.parameters: int = lib.llama_model_n_params(self._handle)
        self.hidden_size: int = lib.llama_model_n_embd(self._handle)
        self.gpu_layers = placement.offloaded(self.layers) if cards else 0
        self.context_train: int = lib.llama_model_n_ctx_train(self._handle)
        self.size_bytes: int = lib.llama_model_size(self._handle)
        self._piece_buffer = ctypes.create_string_buffer(256)

    @property
    def architecture(self) -> str:
        return architecture_of(self._lib, self._handle)

    @property
    def description(self) -> str:
        """Architecture, size and quantisation: ``qwen2 0.5B Q4_K - Medium``.

        llama.cpp's own size is that of a known model of as many layers (``1B``), or unknown.
        """
        buffer = ctypes.create_string_buffer(128)
        self._lib.llama_model_desc(self._handle, buffer, len(buffer))
        architecture, _, quantisation = buffer.value.decode("utf-8", "replace").split(" ", 2)
        label = ctypes.create_string_buffer(_MOST_LABEL)
        self._lib.llama_model_meta_val_str(self._handle, b"general.size_label", label, len(label))
        size = label.value.decode("utf-8", "replace") or size_label(self._lib.llama_model_n_params(self._handle))
        return f"{architecture} {size} {quantisation.replace(' (guessed)', '')}"

    def tokenize(self, text: str, *, special: bool = False, start: bool = True) -> list[int]:
        """Return the token ids of ``text``, with a BOS token if the model wants one and a text begins here (``start``).

        With ``special``, ``<|…|>`` means the special token of that name.
        """
        data = text.encode()
        room = len(data) + 8
        while True:
            buffer = (ctypes.c_int32 * room)()
            count = self._lib.llama_tokenize(self._vocab, data, len(data), buffer, room, start, special)
            if count >= 0:
                return buffer[:count]
            room = -count

    def sample_tokens(self, text: str) -> list[int]:
        """Return tokens for timing: those of ``text``, or different ones without a vocabulary."""
        if self.vocabulary_kind[0] == "none":  # llama_tokenize would abort
            return [(7919 * place + 1) % self.vocab_size for place in range(256)]
        return self.tokenize(text, start=False)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of one token; a character may span several tokens. Control tokens give none, or their names
        with ``special``.
        """
        while True:
            buffer = self._piece_buffer
            count = self._lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
            if count >= 0:
                return buffer.raw[:count]
            self._piece_buffer = ctypes.create_string_buffer(-count)

    @property
    def chat_template(self) -> str:
        """Jinja that turns messages into a prompt, the file's ``tokenizer.chat_template``; empty without one."""
        return self._template(None)

    @property
    def tool_template(self) -> str:
        """Template to use if there are tools, ``tokenizer.chat_template.tool_use``; empty without one."""
        return self._template(b"tool_use")

    def _template(self, name: bytes | None) -> str:
        return (self._lib.llama_model_chat_template(self._handle, name) or b"").decode("utf-8", "replace")

    @property
    def first_token(self) -> int | None:
        """BOS token that every text begins with, if the model wants one."""
        wanted = self._lib.llama_vocab_get_add_bos(self._vocab)
        return self._lib.llama_vocab_bos(self._vocab) if wanted else None

    @property
    def token_texts(self) -> tuple[str, str]:
        """Texts of the BOS and the EOS token for a chat template; empty without one."""
        bos, eos = self._lib.llama_vocab_bos(self._vocab), self._lib.llama_vocab_eos(self._vocab)
        return self._token_text(bos), self._token_text(eos)

    def _token_text(self, token: int) -> str:
        text: bytes | None = self._lib.llama_vocab_get_text(self._vocab, token) if token >= 0 else None
        return (text or b"").decode("utf-8", "replace")

    def special_texts(self) -> tuple[str, ...]:
        """Return the texts that ``tokenize(special=True)`` takes for a token and plain ``tokenize`` does not.

        Source: ``llama_vocab::impl::tokenizer_st_partition`` in src/llama-vocab.cpp.
        """
        lib, kinds = self._lib, self._lib.LLAMA_TOKEN_ATTR_CONTROL | self._lib.LLAMA_TOKEN_ATTR_UNKNOWN
        special = (token for token in range(self.vocab_size) if lib.llama_vocab_get_attr(self._vocab, token) & kinds)
        return tuple(text for token in special if (text := self._token_text(token)))

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Refuse ids outside the vocabulary, with a UsageError that names the first."""
        if wrong := [one for one in tokens if not 0 <= one < self.vocab_size]:
            raise UsageError(f"token {wrong[0]} is not one of the model's {self.vocab_size:,}", "send text")

    def is_end(self, token: int) -> bool:
        return bool(self._lib.llama_vocab_is_eog(self._vocab, token))

    def vocabulary(self) -> list[bytes]:
        """Return the text of every token, by id."""
        text = self._lib.llama_vocab_get_text
        return [text(self._vocab, token) or b"" for token in range(self.vocab_size)]

    @property
    def vocabulary_kind(self) -> tuple[str, bool]:
        """(tokenizer family, True if a BOS token is put before a prompt)."""
        families = {0: "none", 1: "SPM", 2: "BPE", 3: "WPM", 4: "UGM", 5: "RWKV", 6: "PLAMO2"}  # llama_vocab_type
        kind = self._lib.llama_vocab_type(self._vocab)
        return families.get(kind, str(kind)), bool(self._lib.llama_vocab_get_add_bos(self._vocab))

    def close(self) -> None:
        """Free the weights; close contexts of the model first."""
        if self._handle:
            load().llama_model_free(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class _Sequence:
    memory: Exact
    hidden: HiddenRows | None
    length: int = 0


class Context:
    """A sequence of tokens in one model's memory, or ``options.sequences`` of them, one of which is in use.

    It holds ``length`` tokens; :meth:`decode` appends, :meth:`rewind` removes the newest.

    An attention cache can be rewound to any length, one with a sliding window to :attr:`floor`. A recurrent or hybrid
    memory can be rewound if ``options.rewind`` asks for it, and only to before the tokens in doubt: see
    :mod:`ggufspec.llamacpp.rewind`.

    Attributes:
        can_rewind: True if tokens can be taken back, so that the model may be in a pair.
        rewind_kind: ``exact`` (free), ``snapshots``, ``checkpoint``, or ``none``.
        forgets: True if it cannot be rewound to any length, so that saved states are useful.
        checkpoint_bytes: memory that rewinding needs.
        can_pad: True if a batch can be padded; otherwise ``width`` has no effect.

    Raises:
        ModelError: llama.cpp cannot make the context, e.g. for lack of memory.
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
        self.width = options.width
        self.length = 0
        params = context_params(lib, options, model._handle)
        forget_complaints()
        # Limit memory to what is free, because llama.cpp writes to all of it. A driver's reservations would count, too.
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
            self._batch.seq_id[i][0] = 0
        self._rows: Logits = np.empty((0, self.vocab_size), np.float32)
        self._rows_address = 0
        memories = self._probe_memory(options)
        self._sequences = list(map(_Sequence, memories, hidden))
        self._sequence = 0
        self._memory = memories[0]
        self.rewind_kind = self._memory.kind
        self.can_rewind = self.rewind_kind != Impossible.kind
        self.can_pad = self._memory.can_pad
        self.forgets = self._memory.forgets
        self.checkpoint_bytes = options.sequences * self._memory.states * self._state_bytes

    def use(self, sequence: int) -> None:
        """Decode this sequence from now on; the others stay as they are."""
        if sequence != self._sequence:
            self._sequences[self._sequence].length = self.length
            self._sequence, now = sequence, self._sequences[sequence]
            self._memory, self._hidden, self.length = now.memory, now.hidden, now.length
            for i in range(self._n_batch):
                self._batch.seq_id[i][0] = sequence

    def copy(self, sequence: int) -> None:
        """Replace this sequence's text by a copy of another one's, without its hidden rows; ModelError if the memory
        :attr:`forgets`.
        """
        if self.forgets:
            raise ModelError(f"{self.model.path.name} cannot copy a text (recurrent memory, or a sliding window)", "")
        other = self._sequences[sequence]
        self._memory.copy(other.memory)
        self.length = other.length
        if self._hidden:
            self._hidden.first = self.length

    def save(self) -> tuple[int, Any]:
        """Return a state of a memory that :attr:`forgets`, for :meth:`restore`: (length, bytes)."""
        self._memory.settle(self.length, 0, 0)
        return self.length, self._memory.save()

    def restore(self, saved: tuple[int, Any]) -> None:
        """Return to a saved length; the text must still begin with the tokens that it had then."""
        self._memory.restore(*saved)
        self.length = saved[0]

    def decode(self, tokens: Sequence[int], outputs: int, width: int = 0) -> Logits:
        """Append ``tokens``, at least one, and return the logits of the last ``outputs`` of them.

        If ``can_pad``, the batch is padded to ``width`` tokens; the padding is removed again and affects only which
        kernels run.

        Returns:
            (outputs, vocab) float32, a view into llama.cpp's own buffer: valid until the next call.

        Raises:
            ModelError: the cache is full, or llama.cpp failed.
        """
        padding = self._memory.padding(len(tokens), width)
        if outputs + padding > self.width or (padding and width > self._n_batch):
            raise ValueError(f"{outputs} rows and {padding} padding tokens wanted of a context of width {self.width}")
        if self.length + len(tokens) > self.capacity:
            raise ModelError(f"the context of {self.capacity} tokens is full", "a larger -c gives room")
        again, apart = self._memory.settle(self.length, len(tokens), outputs)
        if apart:
            self._submit(again, 0, 0)
            again, _ = self._memory.settle(self.length, len(tokens), outputs)
        tokens = [*again, *tokens] if again else tokens
        start, last = 0, max(outputs, 1)  # minimum tokens of the last batch
        while len(tokens) - start > self._n_batch:  # all but the last batch of a prompt
            count = min(self._n_batch, len(tokens) - start - last)
            self._submit(tokens[start : start + count], 0, 0)
            start += count
        self._submit(tokens[start:], outputs, padding)
        if padding:
            self._memory.cut(self.length)
        return self._logits(outputs + padding)[:outputs] if outputs else self._rows[:0]

    def _submit(self, tokens: Sequence[int], outputs: int, padding: int) -> None:
        batch = self._batch
        count, held = len(tokens), self._memory.held
        ids, positions, flags = batch.token, batch.pos, batch.logits
        first_output = count - outputs
        for i in range(count):
            ids[i] = tokens[i]
            positions[i] = held + i
            flags[i] = i >= first_output
        for i in range(count, count + padding):
            ids[i] = tokens[-1]
            positions[i] = held + i
            flags[i] = 1
        batch.n_tokens = count + padding
        status = self._lib.llama_decode(self._handle, batch)
        if status != 0:
            raise ModelError(
                f"llama.cpp could not decode {count} tokens at {held} (status {status}): {complaints()}",
                "lower -c or -ngl if memory is short; -v shows llama.cpp's log",
            )
        if self._hidden:
            self._hidden.take(count, held)
        self._memory.added(tokens, padding, outputs)
        self.length = held + count

    @property
    def batch(self) -> int:
        """Maximum tokens of a prompt that are decoded in one call."""
        return self._n_batch

    @property
    def hidden_first(self) -> int:
        """Earliest position that :meth:`hidden` has a row of; ``length`` if the context has none."""
        return min(self._hidden.first, self.length) if self._hidden else self.length

    def hidden(self, first: int, last: int) -> Logits:
        """Return the hidden rows of the tokens at the positions ``first`` … ``last`` - 1, as they were decoded.

        Returns:
            (tokens, sources × size) float32, a copy.

        Raises:
            ModelError: the context was made without them (``ContextOptions.hidden``), or no longer has these.
        """
        if not self._hidden or first < self.hidden_first or last > self.length:
            raise ModelError(
                f"{self.model.path.name} has no hidden rows of the tokens {first} to {last}",
                "--drafter draft or --drafter lookup needs none",
            )
        return self._hidden.read(first, last)

    def _logits(self, rows: int) -> Logits:
        pointer = self._lib.llama_get_logits(self._handle)  # waits for the device
        address = ctypes.cast(pointer, ctypes.c_void_p).value or 0
        if address != self._rows_address or rows > len(self._rows):
            self._rows = np.ctypeslib.as_array(pointer, shape=(max(rows, len(self._rows)), self.vocab_size))
            self._rows_address = address
        return self._rows[:rows]

    def rewind(self, length: int) -> None:
        """Keep only the first ``length`` tokens, which are certain from now on; 0 is always possible.

        A recurrent memory with a checkpoint goes back to its length at the last rewind, or later, before the batches in
        doubt (:class:`~ggufspec.llamacpp.rewind.Checkpoint`); with snapshots, to the first token of the last batch.

        Raises:
            ModelError: the model's memory cannot be rewound to there.
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
        """Lowest length, besides 0, that :meth:`rewind` can go back to now."""
        return self._memory.floor()

    def mark(self) -> None:
        """Allow one rollback to here, for measurements: a single token would otherwise be certain.

        Free, except for snapshots, which copy the state to host memory.
        """
        self._memory.mark(self.length)

    def _probe_memory(self, options: ContextOptions) -> list[Exact]:
        """Return the memory of each sequence, after testing whether one of two decoded tokens can be taken back.

        With recurrent memory llama.cpp cannot.
        """
        lib, handle, texts = self._lib, self._handle, range(options.sequences)
        self._memory = Exact(lib, handle)
        self.decode([0, 0], outputs=min(2, self.width))
        self._state_bytes: int = lib.llama_state_seq_get_size_ext(handle, 0, lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        possible = self._memory.cut(1)
        self.rewind(0)
        match choose(lib, self.model._handle, options):
            case "snapshots" if count := lib.llama_n_rs_seq(self._handle):
                return [Snapshots(lib, handle, count, text) for text in texts]
            case "checkpoint":
                spare = options.sequences
                return [Checkpoint(lib, handle, options.rewind, options.again_max, i, spare + i) for i in texts]
        window = 0 if options.swa_full else lib.llama_model_n_swa(self.model._handle)
        if possible and window:
            return [Windowed(lib, handle, window, text) for text in texts]
        return [(Exact if possible else Impossible)(lib, handle, text) for text in texts]

    def close(self) -> None:
        if self._handle:
            self._lib.llama_batch_free(self._batch)
            self._lib.llama_free(self._handle)
            self._handle = None
