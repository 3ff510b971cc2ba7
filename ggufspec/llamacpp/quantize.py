"""Conversion of a GGUF file to another file type with llama.cpp's quantiser, in this process or in a child process.

Source: src/llama-quant.cpp. A file type is a mixture of tensor types: Q4_0 keeps tied embeddings in Q6_K, the K types
give some tensors more bits, and norms stay in F32.
"""

from __future__ import annotations

import ctypes
import difflib
import functools
import logging
import math
import mmap
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ggufspec import child
from ggufspec.errors import ModelError, UsageError
from ggufspec.files.write import replacing
from ggufspec.llamacpp.gguf import ALIGNMENT, alignment, extent, type_number
from ggufspec.llamacpp.library import bound, complaints, forget_complaints, load_library, logger

Floats = npt.NDArray[np.float32]

_VERSION = 2  # GGML_QNT_VERSION, ggml/include/ggml.h

# llama-quantize's names for the file types (llama_ftype) that need no importance matrix.
FILE_TYPES = (
    *("F32", "F16", "BF16"),
    *("Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0"),
    *("Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS"),
    *("Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "Q2_K"),
)


def check_type(type_name: str) -> str:
    """Return ``type_name`` as spelled in ``FILE_TYPES``; if it is unknown, raise UsageError with the nearest names."""
    name = type_name.upper()
    if name not in FILE_TYPES:
        near = " or ".join(difflib.get_close_matches(name, FILE_TYPES, n=2, cutoff=0.4))
        hint = f"did you mean {near}? ggufspec quantize --help lists all" if near else ", ".join(FILE_TYPES)
        raise UsageError(f"{type_name!r} is not a supported file type", hint)
    return name


def write_quantised(
    source: Path,
    target: Path,
    type_name: str,
    threads: int,
    *,
    requantize: bool = False,
    stopping: threading.Event | None = None,
) -> None:
    """Write ``source`` to ``target`` in another file type; ``target`` appears only once it is complete.

    Args:
        source: a GGUF file whose matrices are F32, F16 or BF16.
        target: the file to write or replace.
        type_name: one of ``FILE_TYPES``.
        threads: CPU threads; 0 for all.
        requantize: True to allow a quantised source, which loses quality twice.
        stopping: event after which the partial file is removed, however long llama.cpp continues to write.

    Raises:
        UsageError: the file type is unknown, or source and target are the same file.
        ModelError: the source is missing, the target cannot be written, or llama.cpp refuses the model.
    """
    name = check_type(type_name)
    if not source.is_file():
        raise ModelError(f"{source} does not exist", f"ls {source.parent}")
    if target.exists() and target.samefile(source):
        raise UsageError(f"{target} would overwrite the model it is made from", "give the new file another name")
    try:
        with replacing(target) as part:
            if stopping is not None:
                threading.Thread(target=_remove_after, args=(stopping, part.parent), daemon=True).start()
            _call(source, part, name, threads, requantize=requantize)
    except OSError as error:
        if stopping is None or not stopping.is_set():
            raise ModelError(f"{target} cannot be written: {error.strerror}", f"df -h {target.parent}") from None


def _remove_after(stopping: threading.Event, folder: Path) -> None:
    stopping.wait()
    while True:  # the loop runs until the process ends, because llama.cpp may be about to open its file
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class PredictedFile:
    """Predicted result of a quantisation: ggml's type name for each tensor, and bytes of all tensors and of the file.

    ``unfit`` counts tensors that get another type because their rows are not a multiple of the intended type's block.
    """

    types: dict[str, str]
    tensor_bytes: int
    file_bytes: int
    unfit: int


# Log lines of llama_model_quantize_impl, src/llama-quant.cpp
_TENSOR = re.compile(r"\[ *(\d+)/ *(\d+)\] +(\S+)")
_CHOSEN = re.compile(_TENSOR.pattern + r" +- \[(.*)\], type = +(\S+), size = +[\d.]+ MiB(?: -> .*\((\S+)\))?")


def run_dry(source: Path, type_name: str) -> PredictedFile:
    """Predict what :func:`write_quantised` would write or raise; no weights are read, so the source may be sparse."""
    name, types, sizes, lines = check_type(type_name), dict[str, str](), list[int](), list[str]()
    with listening(lines.append):
        _call(source, source, name, 1, requantize=True, dry=True)
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = extent(data)
    assert found is not None  # llama.cpp would have refused an incomplete header
    own = type_keys(name)
    kept = [end - begin for key, (begin, end) in found[0].items() if not (key in own or key.startswith("split."))]
    header = 24 + sum(kept) + sum(16 + len(key) for key in own)
    for line in lines:
        if tensor := _CHOSEN.search(line):
            shape = [int(length) for length in tensor[4].split(",")]
            kind = types[tensor[3]] = tensor[6] or tensor[5]
            sizes.append(row_bytes(kind, shape[0]) * math.prod(shape[1:]))
            header += 24 + len(tensor[3]) + 8 * max([1, *(axis for axis, length in enumerate(shape, 1) if length > 1)])
    unfit = sum("-> falling back to" in line for line in lines)
    return PredictedFile(types, sum(sizes), sum(size + -size % ALIGNMENT for size in (header, *sizes)), unfit)


def _call(source: Path, target: Path, name: str, threads: int, *, requantize: bool, dry: bool = False) -> None:
    lib = load_library()
    params = lib.llama_model_quantize_default_params()
    params.ftype = type_keys(name)["general.file_type"]
    params.nthread = threads
    params.allow_requantize = requantize
    params.dry_run = dry
    if alignment(source) != ALIGNMENT:  # llama.cpp copies this key but writes with its default alignment
        key = lib.llama_model_kv_override(lib.LLAMA_KV_OVERRIDE_TYPE_INT, b"general.alignment")
        key.value.val_i64 = ALIGNMENT
        params.kv_overrides = (lib.llama_model_kv_override * 2)(key)  # zeros end the list
    forget_complaints()
    if lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)):
        reason = complaints()
        hint = "start from the model's F16 file" if "requantizing" in reason else "check the free disk space"
        raise ModelError(f"{source} cannot be quantised to {name}: {reason}", hint)


def type_keys(name: str) -> dict[str, int]:
    """Return the metadata keys of a file type, one of ``FILE_TYPES``."""
    number = getattr(load_library(), "LLAMA_FTYPE_ALL_F32" if name == "F32" else f"LLAMA_FTYPE_MOSTLY_{name}")
    return {"general.file_type": int(number), "general.quantization_version": _VERSION}


# ---- as a job ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """Arguments of :func:`write_quantised`; without ``target`` the job only predicts the file for each type."""

    source: Path
    types: tuple[str, ...]
    threads: int
    target: Path | None = None
    requantize: bool = False


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """Predictions by file type; empty if a file was written."""

    chosen: dict[str, PredictedFile]


def run(spec: QuantizeJob, emit: child.Emit, stopping: threading.Event) -> QuantizeResult:
    """Quantise in this process; ``tensor`` events report progress."""
    if spec.target is None:
        return QuantizeResult({name: run_dry(spec.source, name) for name in spec.types})

    def read(line: str) -> None:
        if found := _TENSOR.match(line):
            emit({"event": "tensor", "done": int(found[1]), "of": int(found[2]), "name": f"{name} {found[3]}"})

    (name,) = spec.types
    with listening(read):
        write_quantised(spec.source, spec.target, name, spec.threads, requantize=spec.requantize, stopping=stopping)
    return QuantizeResult({})


class _Reader(logging.Handler):
    def __init__(self, read: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._read = read

    def emit(self, record: logging.LogRecord) -> None:
        self._read(record.getMessage())


@contextmanager
def listening(read: Callable[[str], None]) -> Iterator[None]:
    """Pass every line of llama.cpp's log to ``read``."""
    reader, before = _Reader(read), logger.level
    logger.addHandler(reader)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(reader)
        logger.setLevel(before)


# ---- blocks ------------------------------------------------------------------------------------------


def random_blocks(kind: str, numbers: int, std: float, seed: int) -> bytes:
    """Return random numbers in a tensor type, quantised by ggml so that all blocks are valid; zeros for integer types.

    ``kind`` is spelled as in ggml, e.g. ``q4_K``; ``numbers`` is a multiple of 256, and ``std`` the standard deviation.
    """
    if kind.startswith("i") and kind[1:].isdigit():
        return bytes(row_bytes(kind, numbers))
    values = np.random.default_rng(seed).standard_normal(numbers, np.float32) * np.float32(std)
    return to_blocks(kind, values.reshape(-1, 256), np.ones(256, np.float32))


def to_blocks(kind: str, values: Floats, importance: Floats | None = None) -> bytes:
    """Quantise rows of numbers as llama-quantize does; the row length is a multiple of the type's block size.

    The smallest types need ``importance``, one weight per column: (row length,).
    """
    pointer = ctypes.c_void_p
    values = np.ascontiguousarray(values, np.float32)
    rows, length = values.shape
    blocks = ctypes.create_string_buffer(rows * row_bytes(kind, length))
    weights = None if importance is None else importance.ctypes.data_as(pointer)
    _quantizer().ggml_quantize_chunk(
        type_number(kind), values.ctypes.data_as(pointer), blocks, 0, rows, length, weights
    )
    return blocks.raw


def to_numbers(kind: str, blocks: bytes, shape: tuple[int, ...]) -> Floats:
    """Dequantise blocks to an array of ``shape``, rows first; raise ModelError if ggml cannot read the type."""
    if kind == "f32":
        return np.frombuffer(blocks, np.float32).reshape(shape)
    traits = _quantizer().ggml_get_type_traits(type_number(kind)).contents
    if not traits.to_float:
        raise ModelError(f"weights of the type {kind} cannot be read", "start from the model's F16 file")
    values = np.empty(shape, np.float32)
    traits.to_float(blocks, values.ctypes.data_as(ctypes.c_void_p), values.size)
    return values


def row_bytes(kind: str, numbers: int) -> int:
    size: int = _quantizer().ggml_row_size(type_number(kind), numbers)
    return size


def block_numbers(kind: str) -> int:
    count: int = _quantizer().ggml_blck_size(type_number(kind))
    return count


class _Traits(ctypes.Structure):
    """Leading fields of struct ggml_type_traits."""

    _fields_: ClassVar = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64)),
    ]


@functools.cache
def _quantizer() -> Any:
    kind, count, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    functions: dict[str, tuple[Any, list[Any]]] = {
        "ggml_row_size": (ctypes.c_size_t, [kind, count]),
        "ggml_blck_size": (count, [kind]),
        "ggml_get_type_traits": (ctypes.POINTER(_Traits), [kind]),
        "ggml_quantize_chunk": (
            ctypes.c_size_t,
            [kind, pointer, ctypes.c_char_p, count, count, count, pointer],
        ),
    }
    return bound(load_library()._lib, functions)
