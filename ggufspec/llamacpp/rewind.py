"""Rollback: removal of the newest tokens from llama.cpp's memory, whatever its kind.

An attention cache can drop any token at no cost. A recurrent state (Mamba, RWKV, the recurrent blocks of a hybrid) is
overwritten by every token. There are two ways to roll it back; both give the same logits as if the removed tokens had
never been decoded, bit for bit if kernels do not depend on the batch size:

- **snapshots**: llama.cpp stores the state after each of the last tokens of a batch (``n_rs_seq``). Only some
  architectures support this. It takes the memory of one state per token that can be rolled back, and no time.
- **checkpoint**: a second sequence references the state before the unverified tokens. The next batch reads that state
  and writes its own elsewhere, so neither saving nor restoring copies anything. This takes the memory of one more
  state, and after a rollback the batch's accepted tokens are decoded again, at the start of the next batch.

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
_NO_CHECKPOINT = {"deepseek4"}  # uses a different kind of cache: src/llama-kv-cache-dsv4.cpp


def rollback_kind(architecture: str, rewind_by: str = "auto") -> str:
    """Return how a recurrent or hybrid architecture rolls back tokens: ``snapshots``, ``checkpoint``, or ``none``.

    Only this function decides it, for creating contexts, planning memory, and judging pairs before a download.
    ``rewind_by`` is one of :data:`ggufspec.llamacpp.options.REWINDS`.
    """
    if architecture in _SNAPSHOTS and rewind_by != "checkpoint":
        return "snapshots"
    return "none" if architecture in _NO_CHECKPOINT else "checkpoint"


def choose_rollback(lib: Any, model: Any, options: ContextOptions) -> str:
    """Return how a model rolls back tokens: ``exact`` (llama.cpp's own rollback), or a :func:`rollback_kind`."""
    if not options.rewind or not (lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)):
        return "exact"
    return rollback_kind(architecture_of(lib, model), options.rewind_by)


def architecture_of(lib: Any, model: Any) -> str:
    """Return a model's architecture as its file names it: ``general.architecture``."""
    buffer = ctypes.create_string_buffer(64)
    lib.llama_model_meta_val_str(model, b"general.architecture", buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace")


class ExactRollback:
    """llama.cpp's own rollback: free for an attention cache, impossible for a recurrent state.

    llama.cpp's memory holds ``held`` tokens; the text, llama.cpp's sequence ``text``, may be shorter until the next
    batch.
    """

    kind = "exact"
    can_pad = True
    forgets = False  # True if a text cannot be cut to every length, so that states are worth saving
    states = 0  # number of additional recurrent states

    def __init__(self, lib: Any, handle: Any, text: int = 0) -> None:
        self._lib = lib
        self._handle = handle
        self._memory = lib.llama_get_memory(handle)
        self._text = text
        self.held = 0

    def padding(self, count: int, batch_size: int) -> int:
        """Return how many padding tokens, removed later, fill a batch of ``count`` tokens up to ``batch_size``."""
        return max(0, batch_size - count) if self.can_pad else 0

    def floor(self) -> int:
        """Return the lowest length, other than 0, that the text can be cut to now."""
        return 0

    def cut(self, length: int) -> bool:
        """Keep the first ``length`` tokens, at least one; return False if that is impossible."""
        if length < self.held:
            if not self._lib.llama_memory_seq_rm(self._memory, self._text, length, -1):
                return False
            self.held = length
        return True

    def clear(self) -> None:
        self._lib.llama_memory_seq_rm(self._memory, self._text, -1, -1)
        self.held = 0

    def save(self) -> Any:
        """Return a copy of memory that exists only for the current length: recurrent states, sliding-window cells."""
        partial = self._lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        state = (ctypes.c_uint8 * self._lib.llama_state_seq_get_size_ext(self._handle, self._text, partial))()
        self._lib.llama_state_seq_get_data_ext(self._handle, state, len(state), self._text, partial)
        return state

    def restore(self, length: int, state: Any) -> None:
        """Roll back to the first ``length`` tokens, which must be the same as when :meth:`save` returned ``state``."""
        partial = self._lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        done = self._lib.llama_state_seq_set_data_ext(self._handle, state, len(state), self._text, partial)
        done = done and self._lib.llama_memory_seq_rm(self._memory, self._text, length, -1)  # attention cells
        assert done, "llama.cpp does not take its own state"
        self.held = length

    def copy(self, other: ExactRollback) -> None:
        """Replace this text with ``other``'s in the same context; llama.cpp copies the cells before the next batch."""
        self.clear()
        self._lib.llama_memory_seq_cp(self._memory, other._text, self._text, -1, -1)
        self.held = other.held

    def mark(self, length: int) -> None:
        """Allow a rollback to ``length`` tokens."""

    def settle(self, length: int, count: int, outputs: int) -> tuple[Sequence[int], bool]:
        """Prepare memory to decode ``count`` tokens after the first ``length``, with logits for ``outputs`` of them.

        Return (tokens to decode again first, True if they need a batch of their own and then another ``settle``).
        """
        del length, count, outputs
        return (), False

    def added(self, tokens: Sequence[int], padding: int, rows: int) -> None:
        """Record that a batch with ``rows`` rows of logits is now in memory."""
        del rows
        self.held += len(tokens) + padding


class WindowedRollback(ExactRollback):
    """A cache whose sliding-window layers retain only the window and a micro-batch of cells.

    A batch overwrites only cells outside the window of its first token, the oldest first. So the last batch can be
    rolled back or, over several batches, as many tokens as a micro-batch holds. Beyond that, cells of the window have
    been overwritten, but llama.cpp would still rewind without reporting an error.

    Source: ``find_slot`` and ``apply_ubatch`` in src/llama-kv-cache.cpp; src/llama-kv-cache-iswa.cpp for the number of
    cells.
    """

    forgets = True

    def __init__(self, lib: Any, handle: Any, window: int, text: int = 0) -> None:
        super().__init__(lib, handle, text)
        self._window = window

    def floor(self) -> int:
        first = self._lib.llama_memory_seq_pos_min(self._memory, self._text)  # first position in sliding-window layers
        return first + self._window - 1 if first > 0 else 0

    def cut(self, length: int) -> bool:
        return length >= min(self.floor(), self.held) and super().cut(length)


class NoRollback(ExactRollback):
    """A recurrent state without rollback: the text can only grow or be cleared."""

    kind = "none"
    can_pad = False
    forgets = True

    def floor(self) -> int:
        return self.held

    def cut(self, length: int) -> bool:
        return length == self.held


class SnapshotRollback(ExactRollback):
    """Snapshots of llama.cpp's state after each of a batch's last tokens; its first token cannot be rolled back.

    llama.cpp itself goes back as far as requested, even to a state that no token has written, so this class tracks
    which states are valid. It also goes back only once between two batches, so a cut waits for the next batch. For
    measurements, :meth:`mark` copies the state to host memory, which takes milliseconds: too slow for decoding.
    """

    kind = "snapshots"
    forgets = True

    def __init__(self, lib: Any, handle: Any, count: int, text: int = 0) -> None:
        super().__init__(lib, handle, text)
        self.count = self.states = count
        self._floor = 0
        self._copy: tuple[int, Any] | None = None  # (length, state) of the last mark(), retained until the next cut()

    def padding(self, count: int, batch_size: int) -> int:
        return max(0, batch_size - count) if batch_size <= self.count + 1 else 0

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


class CheckpointRollback(ExactRollback):
    """Checkpoint of the state before the unverified tokens, in a second sequence; omits a hybrid's attention cells.

    Tokens are unverified in a batch with several rows of logits (a verification), and in consecutive batches with
    logits (a drafted chain, whose first batch decodes accepted text). The checkpoint precedes the first such token.
    Tokens that :meth:`cut` leaves count as accepted, even if it removes none, and so do batches of more than ``count``
    + 1 tokens (prompts). A text that grows by one token at a time, with a cut after each, thus needs no checkpoint.
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
        self._since: list[int] = []  # tokens in memory after the checkpoint
        self._taken = False  # True if the checkpoint covers all unverified tokens
        self._doubt = False  # True if the next tokens are unverified

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
                # This call references the state, but no attention cells
                self._lib.llama_memory_seq_cp(self._memory, self._text, self._spare, 0, 0)
                self._place, self._since = self.held, []
            self._taken = True
        return again, False

    def _go_back(self) -> None:
        # Restore the state first: src/llama-memory-hybrid.cpp removes attention cells only if the state agrees
        self._lib.llama_memory_seq_cp(self._memory, self._spare, self._text, 0, 0)
        done = self._lib.llama_memory_seq_rm(self._memory, self._text, self._place, -1)
        assert done, "the checkpoint is not where it was taken"
        self.held, self._since = self._place, []

    def added(self, tokens: Sequence[int], padding: int, rows: int) -> None:
        super().added(tokens, padding, rows)
        self._since = [*self._since, *tokens] if self._taken else []
        self._doubt = self._doubt or rows > 0
