"""Taking the newest tokens back out of llama.cpp's memory, whatever kind of memory a model has.

An attention cache forgets any token for nothing. A recurrent state (Mamba, RWKV, the recurrent blocks of a hybrid) is
overwritten by every token. Two ways back are built here; both give the logits of a text that was never wrong, to the
bit where kernels do not depend on the width of a batch:

- **snapshots**: llama.cpp keeps the state after each of the last tokens of a batch (``n_rs_seq``). Some architectures
  have it. It takes one state of memory for every token that can be taken back, and no time.
- **checkpoint**: a second sequence holds on to the state before the tokens that are in doubt. It is a reference:
  the next batch reads the state there and writes its own elsewhere, so that neither keeping nor restoring copies
  anything. It takes one more state of memory; what is kept of the batch has to be decoded again, in front of the next.

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
_NO_CHECKPOINT = {"deepseek4"}  # its cache is of a kind of its own: src/llama-kv-cache-dsv4.cpp


def way_back(architecture: str, rewind_by: str = "auto") -> str:
    """How a recurrent or hybrid architecture takes tokens back: ``snapshots``, ``checkpoint``, or ``none``.

    The one place that says so: contexts are made by it, memory is planned by it, and pairs are judged by it before
    anything is downloaded. ``rewind_by`` is one of :data:`ggufspec.llamacpp.options.REWINDS`.
    """
    if architecture in _SNAPSHOTS and rewind_by != "checkpoint":
        return "snapshots"
    return "none" if architecture in _NO_CHECKPOINT else "checkpoint"


def choose(lib: Any, model: Any, options: ContextOptions) -> str:
    """How tokens of a model's handle are taken back: ``exact`` (llama.cpp's own), or as :func:`way_back` says."""
    if not options.rewind or not (lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)):
        return "exact"
    return way_back(architecture_of(lib, model), options.rewind_by)


def architecture_of(lib: Any, model: Any) -> str:
    """As the file of a model's handle names it: ``general.architecture``."""
    buffer = ctypes.create_string_buffer(64)
    lib.llama_model_meta_val_str(model, b"general.architecture", buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace")


class Exact:
    """llama.cpp's own way: free for an attention cache, impossible for a recurrent state.

    ``held`` tokens are in llama.cpp's memory; the text, llama.cpp's sequence ``text``, may be shorter until the next
    batch.
    """

    kind = "exact"
    can_pad = True
    forgets = False  # whether a text cannot be cut to any length, so that its states are worth saving
    states = 0  # recurrent states kept besides the one that every memory has

    def __init__(self, lib: Any, handle: Any, text: int = 0) -> None:
        self._lib = lib
        self._handle = handle
        self._memory = lib.llama_get_memory(handle)
        self._text = text
        self.held = 0

    def padding(self, count: int, width: int) -> int:
        """Tokens that may fill a batch of ``count`` up to ``width``, and are taken back."""
        return max(0, width - count) if self.can_pad else 0

    def floor(self) -> int:
        """The least length, besides 0, that the text can be cut to now."""
        return 0

    def cut(self, length: int) -> bool:
        """Keep ``length`` tokens, at least one; False if that cannot be."""
        if length < self.held:
            if not self._lib.llama_memory_seq_rm(self._memory, self._text, length, -1):
                return False
            self.held = length
        return True

    def clear(self) -> None:
        self._lib.llama_memory_seq_rm(self._memory, self._text, -1, -1)
        self.held = 0

    def save(self) -> Any:
        """What of the text's memory is not kept for every length: recurrent states, the cells of a sliding window."""
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
        """Hold what ``other``, of the same context, holds: llama.cpp copies its cells before the next batch."""
        self.clear()
        self._lib.llama_memory_seq_cp(self._memory, other._text, self._text, -1, -1)
        self.held = other.held

    def mark(self, length: int) -> None:
        """What comes after ``length`` tokens may be taken back, all of it."""

    def settle(self, length: int, count: int, outputs: int) -> tuple[Sequence[int], bool]:
        """Make memory ready for ``count`` tokens after ``length``, with ``outputs`` rows of logits.

        Returns the tokens that must be decoded again first, and whether in a batch of their own (then settle again).
        """
        del length, count, outputs
        return (), False

    def added(self, tokens: Sequence[int], padding: int, rows: int) -> None:
        """A batch is in memory now, with ``rows`` of logits."""
        del rows
        self.held += len(tokens) + padding


class Windowed(Exact):
    """A cache whose sliding-window layers keep the window and a micro-batch of cells, not the whole context.

    llama.cpp overwrites a cell only if it is outside the window of the next token, as it stood before the batch, the
    oldest first. So the last batch can be taken back, and as many tokens of several batches as a micro-batch has.
    Further back cells of the window are gone, and llama.cpp would go there without a word.

    Source: ``find_slot`` and ``apply_ubatch`` in src/llama-kv-cache.cpp; the cells are those of
    src/llama-kv-cache-iswa.cpp.
    """

    forgets = True

    def __init__(self, lib: Any, handle: Any, window: int, text: int = 0) -> None:
        super().__init__(lib, handle, text)
        self._window = window

    def floor(self) -> int:
        first = self._lib.llama_memory_seq_pos_min(self._memory, self._text)  # of the windowed layers
        return first + self._window - 1 if first > 0 else 0

    def cut(self, length: int) -> bool:
        return length >= min(self.floor(), self.held) and super().cut(length)


class Impossible(Exact):
    """A recurrent state for which nothing is kept: the text grows, or starts again."""

    kind = "none"
    can_pad = False
    forgets = True

    def floor(self) -> int:
        return self.held

    def cut(self, length: int) -> bool:
        return length == self.held


class Snapshots(Exact):
    """llama.cpp's states after each of a batch's last tokens; a batch's first token cannot be taken back.

    llama.cpp itself goes back as far as it is told and then reads a state that no token has written: what was written
    is known here. It also goes back only once between two batches, so the cut waits for the next one. For measurements
    :meth:`mark` copies the state to host memory, which takes milliseconds: too slow to decode by.
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

    In doubt is what a batch with several rows adds (a verification), and what batches with rows add one after the
    other (a chain, whose first batch reads text that is certain). The checkpoint is taken before the first of these.
    What :meth:`cut` leaves is certain, even if it cuts nothing off, and so is a batch of more than ``count`` + 1
    tokens (a prompt). So a text that grows by one token at a time, and is cut to its length after each, takes none.
    """

    kind = "checkpoint"
    can_pad = False
    forgets = True
    states = 1

    def __init__(self, lib: Any, handle: Any, count: int, again_max: int, text: int = 0, spare: int = 1) -> None:
        super().__init__(lib, handle, text)
        self._spare = spare  # the sequence that holds the checkpoint
        self.count = count
        self.again_max = again_max
        self._place = 0  # where the checkpoint is
        self._since: list[int] = []  # the tokens in memory after it
        self._taken = False  # it covers all that is in doubt
        self._doubt = False  # so is what comes next

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
                # the state, no attention cells
                self._lib.llama_memory_seq_cp(self._memory, self._text, self._spare, 0, 0)
                self._place, self._since = self.held, []
            self._taken = True
        return again, False

    def _go_back(self) -> None:
        # src/llama-memory-hybrid.cpp cuts attention cells off only if the state agrees: the state comes first
        self._lib.llama_memory_seq_cp(self._memory, self._spare, self._text, 0, 0)
        done = self._lib.llama_memory_seq_rm(self._memory, self._text, self._place, -1)
        assert done, "the checkpoint is not where it was taken"
        self.held, self._since = self._place, []

    def added(self, tokens: Sequence[int], padding: int, rows: int) -> None:
        super().added(tokens, padding, rows)
        self._since = [*self._since, *tokens] if self._taken else []
        self._doubt = self._doubt or rows > 0
