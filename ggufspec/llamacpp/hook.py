"""llama-cpp-python's ``Llama``, as far as a draft model for it has to know it.

Source: llama_cpp/llama.py of 0.3.36.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.library import complaints, forget_complaints, imported, load
from ggufspec.llamacpp.model import Model, check_gguf
from ggufspec.llamacpp.options import ContextOptions, Placement, context_hint
from ggufspec.llamacpp.params import kv_type

imported()  # first: it says what to do where llama_cpp cannot be imported
from llama_cpp import Llama  # noqa: E402
from llama_cpp.llama_speculative import LlamaDraftModel  # noqa: E402

__all__ = [
    "Borrowed",
    "Llama",
    "LlamaDraftModel",
    "close_with",
    "forget_scores",
    "make_llama",
    "scores_bytes",
]


class Borrowed(Model):
    """The model of a ``Llama``, which loaded it and frees it: to look at, not to decode.

    Args:
        llama: whose it is; it must stay open for as long as this is used.

    Attributes:
        can_forget: whether its memory can take tokens back; ``Llama`` does not look whether that worked.

    Raises:
        UsageError: the ``Llama`` is closed.
    """

    def __init__(self, llama: Any) -> None:
        self._lib = lib = load()
        self._handle = llama.model
        if not self._handle:
            raise UsageError("this Llama is closed", "make another Llama")
        self._vocab = lib.llama_model_get_vocab(self._handle)
        self._piece_buffer = ctypes.create_string_buffer(256)
        self.path = Path(llama.model_path)
        self.vocab_size = lib.llama_vocab_n_tokens(self._vocab)
        self.layers = lib.llama_model_n_layer(self._handle) + lib.llama_model_n_layer_nextn(self._handle)
        self.size_bytes = lib.llama_model_size(self._handle)
        self.can_forget = not (lib.llama_model_is_recurrent(self._handle) or lib.llama_model_is_hybrid(self._handle))

    def close(self) -> None:
        """Nothing: it is not ours."""


def scores_bytes(ctx_size: int, n_vocab: int) -> int:
    """Host memory that ``Llama(logits_all=True)`` sets aside for the logits of every token of its context."""
    return ctx_size * n_vocab * np.dtype(np.single).itemsize


def forget_scores(llama: Any) -> int:
    """Let a ``Llama`` with a draft keep no logits where it has no room for those of a whole context.

    With a draft ``Llama.eval`` copies the logits of every token into ``scores``. These have a row for each token of the
    context if ``logits_all=True`` was asked for; else they have ``n_batch`` rows, and more text than that is NumPy's
    ValueError. Only logprobs, stopping criteria and saved states read them: tokens are sampled from llama.cpp's own.

    Args:
        llama: scores that hold its whole context stay as they are.

    Returns:
        bytes that its scores may take from now on.
    """
    llama._logits_all = True  # where the draft came later: every drafted token's logits are needed
    rows = len(llama.input_ids)
    if len(llama.scores) < rows:
        llama.scores = np.broadcast_to(np.float32(np.nan), (rows, llama.n_vocab())).view(Unkept)
    return 0 if isinstance(llama.scores, Unkept) else int(llama.scores.nbytes)


class Unkept(np.ndarray[Any, np.dtype[np.float32]]):
    """Scores that are not kept: what is written is gone, and to read them is an error. They take no memory.

    Raises:
        UsageError: they are read.
    """

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if ufunc is np.greater:  # Llama.load_state clears what is above 0 of the rest
            return np.False_
        raise UsageError(
            "this Llama keeps no logits: with a draft they would take ctx_size × n_vocab × 4 bytes",
            "Llama(…, logits_all=True) keeps them, for logprobs and for stopping criteria that read them",
        )

    def copy(self, order: Any = "C") -> Unkept:  # noqa: ARG002
        """Itself, for ``Llama.save_state``."""
        return self


def close_with(llama: Any, release: Callable[[], object]) -> None:
    """Call ``release`` when a ``Llama`` is closed, before its own model is freed."""
    llama._stack.callback(release)


def make_llama(path: Path, placement: Placement, options: ContextOptions) -> Any:
    """A quiet ``Llama``, placed and decoding like a context of ours, as far as it can.

    It knows flash attention on or off: ``auto`` is on. It has no room for padding, and nowhere to put experts.

    Raises:
        ModelError: the file is missing, damaged, or does not fit.
    """
    check_gguf(path)
    lib = load()
    forget_complaints()
    try:
        return Llama(
            str(path),
            n_ctx=options.ctx_size,
            n_batch=options.n_batch,
            n_ubatch=options.ubatch_size or options.n_batch,
            n_gpu_layers=placement.gpu_layers,
            tensor_split=list(placement.split) or None,
            n_threads=options.threads,
            n_threads_batch=options.threads,
            type_k=kv_type(lib, options.cache_type_k),
            type_v=kv_type(lib, options.cache_type_v),
            flash_attn=options.flash_attn != "off",
            op_offload=options.op_offload,
            verbose=False,
        )
    except ValueError as error:
        reason = complaints() or str(error)
        raise ModelError(f"Llama cannot load {path}: {reason}", context_hint(reason)) from None
