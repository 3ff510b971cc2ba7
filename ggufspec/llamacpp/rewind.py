"""Rollback: removes the newest tokens from llama.cpp's memory, for every kind of memory.

An attention cache forgets any token at no cost. A recurrent state (Mamba, RWKV, the recurrent blocks of a hybrid) is
overwritten by every token. There are two ways to roll it back; both give the logits of a text that was never wrong, to
the bit if kernels do not depend on the batch size:

- **snapshots**: llama.cpp stores the state after each of the last tokens of a batch (``n_rs_seq``). Some architectures
  have it. It takes the memory of one state for every token that can be taken back, and no time.
- **checkpoint**: a second sequence holds on to the state before the tokens that are in doubt. It is a reference: the
  next batch reads the state there and writes its own elsewhere, so that neither saving nor restoring copies anything.
  It takes the memory of one more state; accepted tokens of the batch have to be decoded again, in front of the next.

Source: src/llama-memory-recurrent.cpp (``seq_rm``, ``seq_cp``, ``find_slot``) and src/llama-memory-hybrid.cpp.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from ggufspec.llamacpp.options import ContextOptions

# llm_arch_supports_rs_rollback, src/llama-arch.cpp
_SNAPSHOTS = {"qwen35", "qwen35moe", "qwen4exp", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"}
_SNAPSHOTS |= {"kimi-k3", "glm5-next", "bailingmoe3", "deepseek4"}
_NO_CHECKPOINT = {"deepseek4"}  # it has its own kind of cache: src/llama-kv-cache-dsv4.cpp


def way_back(architecture: str, rewind_by: str = "auto") -> str:
    """Return how a recurrent or hybrid architecture takes tokens back: ``snapshots``, ``checkpoint``, or ``none``.

    This is the only place that decides it: for making contexts, planning memory, and judging pairs before a download.
    ``rewind_by`` is one of :data:`ggufspec.llamacpp.options.REWINDS`.
    """
    if architecture in _SNAPSHOTS and rewind_by != "checkpoint":
        return "snapshots"
    return "none" if architecture in _NO_CHECKPOINT else "checkpoint"


def choose(lib: Any, model: Any, options: ContextOptions) -> str:
    """Return how tokens of a model are taken back: ``exact`` (llama.cpp's own), or as :func:`way_back` returns."""
    if not options.rewind or not (lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)):
        return "exact"
    return way_back(architecture_of(lib, model), options.rewind_by)


def architecture_of(lib: Any, model: Any) -> str:
    """Return a model's architecture as its file names it: ``general.architecture``."""
    buffer = ctypes.create_string_buffer(64)
    lib.llama_model_meta_val_str(model, b"general.architecture", buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace")


class Exact:
    """llama.cpp's own rollback: free for an attention cache, impossible for a recurrent state.

    llama.cpp's memory has ``held`` tokens; the text, llama.cpp's sequence ``text``, may be shorter until the next
    batch.
    """

    kind = "exact"
    can_pad = True
    forgets = False  # True if a text cannot be cut to any length, so that its states are worth saving
    states = 0  # additional recurrent states

    def __init__(self, lib: Any, handle: Any, text: int = 0) -> None:
        self._lib = lib
        self._handle = handle
        self._memory = lib.llama_get_memory(handle)
        self._text = text
        self.held = 0

    def padding(self, count: int, width: int) -> int:
        """Return the number of padding tokens, removed later, to fill a batch of ``count`` up to ``width``."""
        return max(0, width - count) if self.can_pad else 0

    def floor(self) -> int:
        """Return the lowest length, besides 0, that the text can be cut to now."""
        return 0

    def cut(self, length: int) -> bool:
        """Keep ``length`` tokens, at least one; return False if that is impossible."""
        if length < self.held:
            if not self._lib.llama_memory_seq_rm(self._memory, self._text, length, -1):
                return False
            self.held = length
        return True

    def clear(self) -> None:
        self._lib.llama_memory_seq_rm(self._memory, self._text, -1, -1)
        self.held = 0

    def save(self) -> Any:
        """Return the memory that does not exist for every length: recurrent states, the cells of a sliding window."""
        partial = self._lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        state = (ctypes.c_uint8 * self._lib.llama_state_seq_get_size_ext(self._handle, self._text, partial))()
        self._lib.llama_state_seq_get_data_ext(self._handle, state, len(state), self._text, partial)
        return state

    def restore(self, length: int, state: Any) -> None:
        """Go back to ``length`` tokens, at which :meth:`save` gave ``state``; the text still begins with them."""
        partial = self._lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        done = self._lib.llama_state_seq_set_data_ext(self._handle, state, len(state), self._text, partial)
        done = done and self._lib.llama_memory_seq_rm(self._memory, self._text, length, -1)  # attention cells
        assert done, "llama.cpp does not take its own state"
        self.held = length

    def copy(self, other: Exact) -> None:
        """Copy the text of ``other`` in the same context: llama.cpp copies its cells before the next batch."""
        self.clear()
        self._lib.llama_memory_seq_cp(self._memory, other._text, self._text, -1, -1)
        self.held = other.held

    def mark(self, length: int) -> None:
        """Allow a rollback to ``length`` tokens."""

    def settle(self, length: int, count: int, outputs: int) -> tuple[Sequence[int], bool]:
        """Prepare memory for ``count`` tokens after ``length``, with ``outputs`` rows of logits.

        Returns the tokens that must be decoded again first, and True if in a batch of their own (then settle again).
        """
        del length, count, outputs
        return (), False

    def added(self, tokens: Sequence[int], padding: int, rows: int) -> None:
        """Note that a batch is in memory now, with ``rows`` of logits."""
        del rows
        self.held += len(tokens) + padding


class Windowed(Exact):
    """A cache whose sliding-window layers retain only the window and a micro-batch of cells.

    llama.cpp overwrites a cell only if it is outside the window of the next token, as it was before the batch, the
    oldest first. So the last batch can be taken back, and as many tokens of several batches as a micro-batch has.
    Further back, cells of the window are gone, and llama.cpp would go there without an error.

    Source: ``find_slot`` and ``apply_ubatch`` in src/llama-kv-cache.cpp; the cells are those of
    src/llama-kv-cache-iswa.cpp.
    """

    forgets = True

    def __init__(self, lib: Any, handle: Any, window: int, text: int = 0) -> None:
        super().__init__(lib, handle, text)
        self._window = window

    def floor(self) -> int:
        first = self._lib.llama_memory_seq_pos_min(self._memory, self._text)  # in the windowed layers
        return first + self._window - 1 if first > 0 else 0

    def cut(self, length: int) -> bool:
        return length >= min(self.floor(), self.held) and super().cut(length)


class Impossible(Exact):
    """A recurrent state without rollback: the text grows, or starts again."""

    kind = "none"
    can_pad = False
    forgets = True

    def floor(self) -> int:
        return self.held

    def cut(self, length: int) -> bool:
        return length == self.held


class Snapshots(Exact):
    """llama.cpp's states after each of a batch's last tokens; a batch's first token cannot be taken back.

    llama.cpp itself goes back as far as requested and may read a state that no token has written, so this class tracks
    which ones are. It also goes back only once between two batches, so the cut waits for the next one. For measurements
    :meth:`mark` copies the state to host memory, which takes milliseconds: too slow for decoding.
    """

    kind = "snapshots"
    forgets = True

    def __init__(self, lib: Any, handle: Any, count: int, text: int = 0) -> None:
        super().__init__(lib, handle, text)
        self.count = self.states = count
        self._floor = 0
        self._copy: tuple[int, Any] | None = None  # (length, state) from mark to the next cut

    def padding(self, count: int, width: int) -> int:
        return max(0, width - count) if width <= self.count + 1 else 0

    def floor(self) -> int:
        return self._floor

    def cut(self, length: int) -> bool:
        if length < self._floor:
            if self._copy is None or self._copy[0] != length:
                return False
            self.restore(*self._copy)
        self._copy = None
        return True

    def restore(self, length: int, state: Any) -> None:
        super().restore(length, state)
        self._floor = length

    def clear(self) -> None:
        super().clear()
        self._floor, self._copy = 0, None

    def mark(self, length: int) -> None:
        self.settle(length, 0, 0)
        self._floor = length
        self._copy = length, self.save()

    def settle(self, length: int, count: int, outputs: int) -> tuple[Sequence[int], bool]:
        del count, outputs
        if length < self.held:
            done = super().cut(length)
            assert done, "llama.cpp kept fewer states than it was asked to"
        return (), False

    def added(self, tokens: Sequence[int], padding: int, rows: int) -> None:
        super().added(tokens, padding, rows)
        self._floor = self.held - min(self.count, len(tokens) + padding - 1)


class Checkpoint(Exact):
    """The state before the tokens in doubt, held by a second sequence; the attention cells of a hybrid are not shared.

    In doubt are the tokens of a batch with several rows (a verification), and those of consecutive batches with rows (a
    chain, whose first batch reads certain text). The checkpoint is taken before the first of these. The tokens that
    :meth:`cut` leaves are certain, even if it removes none, and so is a batch of more than ``count`` + 1 tokens (a
    prompt). So a text that grows by one token at a time, and is cut to its length after each, takes no checkpoint.
    """

    kind = "checkpoint"
    can_pad = False
    forgets = True
    states = 1

    def __init__(self, lib: Any, handle: Any, count: int, again_max: int, text: int = 0, spare: int = 1) -> None:
        super().__init__(lib, handle, text)
        self._spare = spare  # sequence that holds the checkpoint
        self.count = count
        self.again_max = again_max
        self._place = 0  # position of the checkpoint
        self._since: list[int] = []  # tokens in memory after it
        self._taken = False  # it covers all tokens in doubt
        self._doubt = False  # the next tokens are in doubt

    def floor(self) -> int:
        return self._place if self._since else self.held

    def cut(self, length: int) -> bool:
        if length < self.floor():
            return False
        self._taken = self._doubt = False
        return True

    def clear(self) -> None:
        super().clear()
        self._lib.llama_memory_seq_rm(self._memory, self._spare, -1, -1)
        self._begin_at(0)

    def restore(self, length: int, state: Any) -> None:
        super().restore(length, state)
        self._begin_at(length)

    def _begin_at(self, length: int) -> None:
        self._place, self._since, self._taken, self._doubt = length, [], False, False

    def mark(self, length: int) -> None:
        del length
        self._doubt = True

    def settle(self, length: int, count: int, outputs: int) -> tuple[Sequence[int], bool]:
        again: list[int] = []
        if length < self.held:
            again = self._since[: length - self._place]
            self._go_back()
        if count > self.count + 1:
            self._taken = False
        elif (outputs > 1 or self._doubt) and not self._taken:
            if len(again) > self.again_max:
                return again, True
            if not again:
                # copies the state, no attention cells
                self._lib.llama_memory_seq_cp(self._memory, self._text, self._spare, 0, 0)
                self._place, self._since = self.held, []
            self._taken = True
        return again, False

    def _go_back(self) -> None:
        # src/llama-memory-hybrid.cpp removes attention cells only if the state agrees: the state comes first
        self._lib.llama_memory_seq_cp(self._memory, self._spare, self._text, 0, 0)
        done = self._lib.llama_memory_seq_rm(self._memory, self._text, self._place, -1)
        assert done, "the checkpoint is not where it was taken"
        self.held, self._since = self._place, []

    def added(self, tokens: Sequence[int], padding: int, rows: int) -> None:
        super().added(tokens, padding, rows)
        self._since = [*self._since, *tokens] if self._taken else []
        self._doubt = self._doubt or rows > 0
