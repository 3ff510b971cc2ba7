"""llama.cpp's parameters, made from this package's options for both dry and real runs."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from ggufspec.llamacpp.devices import buffer_type, chosen_over_others, handle_of
from ggufspec.llamacpp.options import (
    HEAD_BATCH,
    KV_TYPES,
    SLACK,
    ContextOptions,
    Placement,
    check_rewind,
)
from ggufspec.llamacpp.rewind import architecture_of, choose_rollback

# The number of outputs is a multiple of this, because a graph's first tensor has four bytes per output, and the next
# ones must start on CPU cache lines; otherwise prefill on AMX takes 1.5 times as long: docs/evidence/output-rows.json
_OUTPUTS = 16


def context_params(lib: Any, options: ContextOptions, model: Any = None) -> Any:
    """Make llama.cpp's parameters for a context.

    Args:
        lib: llama.cpp.
        options: options for decoding the model.
        model: the model's handle; if it is missing, nothing is reserved for ``options.rewind``.

    Raises:
        UsageError: an option has an unknown value.
    """
    params = lib.llama_context_default_params()
    params.n_ctx = options.ctx_size + SLACK if options.sequences == 1 else options.sequences * options.cells
    # By default each sequence has its own cells, so that its rounding does not depend on other sequences
    params.n_seq_max = options.sequences
    params.n_batch, params.n_ubatch = options.batch, options.computed
    params.n_threads = params.n_threads_batch = options.threads
    params.type_k, params.type_v = (kv_type(lib, name) for name in (options.cache_type_k, options.cache_type_v))
    params.flash_attn_type = _FLASH_ATTENTION[options.flash_attn]
    params.swa_full = options.swa_full
    params.op_offload = options.op_offload
    check_rewind(options.rewind_by)
    match choose_rollback(lib, model, options) if model else "":
        case "snapshots":
            params.n_rs_seq = min(options.rewind, params.n_ubatch - 2)  # a larger number aborts: src/llama-batch.cpp
        case "checkpoint":
            params.n_seq_max = 2 * options.sequences
            params.kv_unified = True  # each text's second sequence has a state but no cells of its own
        case "exact" if options.shared_cells and options.sequences > 1 and _can_share_cells(lib, model, options):
            params.kv_unified = True
    params.n_outputs_max = -(-max(options.max_outputs, params.n_seq_max) // _OUTPUTS) * _OUTPUTS
    return params


def _can_share_cells(lib: Any, model: Any, options: ContextOptions) -> bool:
    """Return True if a model's memory is an attention cache without a sliding window, and a larger context keeps its
    RoPE factors: llama.cpp chooses long or short ones by context size (``get_rope_factors``, src/llama-model.cpp).
    """
    if lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model) or lib.llama_model_n_swa(model):
        return False
    key = f"{architecture_of(lib, model)}.rope.scaling.original_context_length".encode()
    found = ctypes.create_string_buffer(16)
    if lib.llama_model_meta_val_str(model, key, found, len(found)) < 0:
        return True
    return options.keeps_rope_factors(int(found.value))


_CONTEXT_TYPE_MTP = 1  # enum llama_context_type, include/llama.h


def head_params(lib: Any, options: ContextOptions, target: Any, *, mtp: bool) -> Any:
    """Make llama.cpp's parameters for a head's context.

    Args:
        lib: llama.cpp.
        options: context size, types, threads and ``max_outputs``.
        target: handle of the target's context.
        mtp: True if the head consists of MTP blocks.
    """
    params = context_params(lib, options)
    params.n_batch = params.n_ubatch = max(HEAD_BATCH, options.max_outputs)
    params.ctx_other = target
    if mtp:
        params.ctx_type = _CONTEXT_TYPE_MTP
    return params


_INT32_MAX = 2**31 - 1
_BF16 = 30  # enum ggml_type; the only type in KV_TYPES that llama-cpp-python does not name


class _TensorOverride(ctypes.Structure):
    """struct llama_model_tensor_buft_override, include/llama.h."""

    _fields_: ClassVar = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


def model_params(lib: Any, placement: Placement, names: Sequence[str] = ()) -> tuple[Any, list[Any]]:
    """Return (llama.cpp's parameters for ``placement``, objects that must stay alive until the model is loaded).

    Args:
        lib: llama.cpp.
        placement: where the layers and tensors go.
        names: devices to offload to; default: :func:`ggufspec.llamacpp.devices.offloading`.

    Raises:
        UsageError: a tensor is assigned to a device that does not exist.
    """
    params = lib.llama_model_default_params()
    params.load_mtp = placement.mtp
    params.load_mode = _LOAD_MODE[placement.load_mode]
    params.no_host = placement.no_host
    params.n_gpu_layers = min(placement.gpu_layers, _INT32_MAX)  # ctypes would truncate a larger number silently
    alive: list[Any] = []
    if chosen := names or chosen_over_others():
        handles = (ctypes.c_void_p * (len(chosen) + 1))(*map(handle_of, chosen))  # null ends the list
        params.devices = ctypes.cast(handles, ctypes.c_void_p)
        alive.append(handles)
    if placement.split:
        shares = (ctypes.c_float * lib.llama_max_devices())(*placement.split)
        params.tensor_split = ctypes.cast(shares, ctypes.POINTER(ctypes.c_float))
        alive.append(shares)
    if overrides := placement.overrides:
        listed = (_TensorOverride * (len(overrides) + 1))()  # zeros end the list
        listed[:-1] = [_TensorOverride(pattern.encode(), buffer_type(device)) for pattern, device in overrides]
        params.tensor_buft_overrides = ctypes.cast(listed, ctypes.c_void_p)
        alive.append(listed)
    return params, alive


def kv_type(lib: Any, name: str) -> int:
    """Return the number of a cache type in enum ggml_type."""
    assert name in KV_TYPES, name
    value: int = getattr(lib, "GGML_TYPE_" + name.upper(), _BF16)
    return value


# enum llama_load_mode, include/llama.h
_LOAD_MODE = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap+mlock": 3, "dio": 4}
_FLASH_ATTENTION = {"auto": -1, "on": 1, "off": 0}  # enum llama_flash_attn_type, include/llama.h


_LOADING = threading.Lock()  # two threads that load their first models at once may crash in llama.cpp


def load_model(lib: Any, path: Path, params: Any) -> Any:
    """Return llama.cpp's handle for a model, or null, which :func:`ggufspec.llamacpp.library.complaints` explains.

    Weights of latent attention (MLA) are kept out of AMX buffers: llama.cpp would put them there and then abort because
    the graph multiplies them with non-contiguous tensors (``supports_op``, ggml/src/ggml-cpu/amx/amx.cpp).
    """
    name = os.fsencode(path)
    with _LOADING:
        handle = lib.llama_model_load_from_file(name, params)
        has_amx = params.use_extra_bufts and b"AMX_INT8 = 1" in lib.llama_print_system_info()
        if handle and has_amx and not params.vocab_only:
            rank = f"{architecture_of(lib, handle)}.attention.kv_lora_rank".encode()
            if lib.llama_model_meta_val_str(handle, rank, ctypes.create_string_buffer(16), 16) >= 0:
                lib.llama_model_free(handle)
                params.use_extra_bufts = False
                handle = lib.llama_model_load_from_file(name, params)
        return handle
