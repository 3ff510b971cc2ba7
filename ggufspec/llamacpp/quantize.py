"""Turns a GGUF file into another tensor type with llama.cpp's own quantiser, here or as a job in a child process.

Source: src/llama-quant.cpp. A file type is a mixture: Q4_0 keeps tied embeddings in Q6_K, the K types give some tensors
more bits, norms stay F32.
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
from ggufspec.llamacpp.library import bound, complaints, forget_complaints, load, logger

Floats = npt.NDArray[np.float32]

_VERSION = 2  # GGML_QNT_VERSION, ggml/include/ggml.h

# llama_ftype by llama-quantize's names, except those that need an importance matrix.
FILE_TYPES = (
    *("F32", "F16", "BF16"),
    *("Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0"),
    *("Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS"),
    *("Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "Q2_K"),
)


def check_type(type_name: str) -> str:
    """Return ``type_name`` as spelled in ``FILE_TYPES``; otherwise a UsageError names the nearest."""
    name = type_name.upper()
    if name not in FILE_TYPES:
        near = " or ".join(difflib.get_close_matches(name, FILE_TYPES, n=2, cutoff=0.4))
        hint = f"did you mean {near}? ggufspec quantize --help lists all" if near else ", ".join(FILE_TYPES)
        raise UsageError(f"{type_name!r} is not a file type that can be written", hint)
    return name


def quantize(
    source: Path,
    target: Path,
    type_name: str,
    threads: int,
    *,
    requantize: bool = False,
    stopping: threading.Event | None = None,
) -> None:
    """Write ``source`` to ``target`` in another file type; ``target`` appears when it is complete.

    Args:
        source: a GGUF file whose matrices are F32, F16 or BF16.
        target: the file to write or replace.
        type_name: one of ``FILE_TYPES``.
        threads: CPU threads; 0 for all.
        requantize: True to allow a quantised source, which loses quality twice.
        stopping: once it is set, no partial file is left, however long llama.cpp continues to write.

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
    while True:  # until the process ends: llama.cpp may be about to open its file
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Prediction of a quantisation: the type of each tensor as ggml spells it, their bytes, and the whole file's.

    ``unfit`` tensors have rows that are no multiple of the type's block, and so another type than the mixture's.
    """

    types: dict[str, str]
    tensor_bytes: int
    file_bytes: int
    unfit: int


# src/llama-quant.cpp, llama_model_quantize_impl
_TENSOR = re.compile(r"\[ *(\d+)/ *(\d+)\] +(\S+)")
_CHOSEN = re.compile(_TENSOR.pattern + r" +- \[(.*)\], type = +(\S+), size = +[\d.]+ MiB(?: -> .*\((\S+)\))?")


def run_dry(source: Path, type_name: str) -> Chosen:
    """Return what llama.cpp would write; it reads no weights, which may be a hole. Raises as :func:`quantize` does."""
    name, types, sizes, lines = check_type(type_name), dict[str, str](), list[int](), list[str]()
    with listening(lines.append):
        _call(source, source, name, 1, requantize=True, dry=True)
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = extent(data)
    assert found is not None  # llama.cpp would have refused it
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
    return Chosen(types, sum(sizes), sum(size + -size % ALIGNMENT for size in (header, *sizes)), unfit)


def _call(source: Path, target: Path, name: str, threads: int, *, requantize: bool, dry: bool = False) -> None:
    lib = load()
    params = lib.llama_model_quantize_default_params()
    params.ftype = type_keys(name)["general.file_type"]
    params.nthread = threads
    params.allow_requantize = requantize
    params.dry_run = dry
    if alignment(source) != ALIGNMENT:  # llama.cpp copies the key from the source, but writes with its own alignment
        key = lib.llama_model_kv_override(lib.LLAMA_KV_OVERRIDE_TYPE_INT, b"general.alignment")
        key.value.val_i64 = ALIGNMENT
        params.kv_overrides = (lib.llama_model_kv_override * 2)(key)  # the last one, zeros, ends the list
    forget_complaints()
    if lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)):
        reason = complaints()
        hint = "start from the model's F16 file" if "requantizing" in reason else "look for free disk space"
        raise ModelError(f"{source} cannot be quantised to {name}: {reason}", hint)


def type_keys(name: str) -> dict[str, int]:
    """Return the metadata keys of a file type, one of ``FILE_TYPES``."""
    number = getattr(load(), "LLAMA_FTYPE_ALL_F32" if name == "F32" else f"LLAMA_FTYPE_MOSTLY_{name}")
    return {"general.file_type": int(number), "general.quantization_version": _VERSION}


# ---- as a job ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spec:
    """Arguments of :func:`quantize`; without ``target`` the job only returns what would be written in each type."""

    source: Path
    types: tuple[str, ...]
    threads: int
    target: Path | None = None
    requantize: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """Predictions by file type; empty if a file was written."""

    chosen: dict[str, Chosen]


def run(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Result:
    """Quantise in this process; ``tensor`` events report progress."""
    if spec.target is None:
        return Result({name: run_dry(spec.source, name) for name in spec.types})

    def read(line: str) -> None:
        if found := _TENSOR.match(line):
            emit({"event": "tensor", "done": int(found[1]), "of": int(found[2]), "name": f"{name} {found[3]}"})

    (name,) = spec.types
    with listening(read):
        quantize(spec.source, spec.target, name, spec.threads, requantize=spec.requantize, stopping=stopping)
    return Result({})


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
    """Return random numbers in a tensor type, by ggml's quantiser, so that all blocks are valid; integers are zeros.

    ``kind`` is spelled as in ggml, e.g. ``q4_K``; ``numbers`` is a multiple of 256, ``std`` their standard deviation.
    """
    if kind.startswith("i") and kind[1:].isdigit():
        return bytes(row_bytes(kind, numbers))
    values = np.random.default_rng(seed).standard_normal(numbers, np.float32) * np.float32(std)
    return to_blocks(kind, values.reshape(-1, 256), np.ones(256, np.float32))


def to_blocks(kind: str, values: Floats, importance: Floats | None = None) -> bytes:
    """Quantise rows of numbers as llama-quantize does; a row is a multiple of the type's block.

    The smallest types need ``importance``: (numbers,) weights of the columns.
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
    """Dequantise blocks of a tensor type to ``shape``, rows first; ModelError if ggml cannot read that type."""
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
    """struct ggml_type_traits, as far as it is needed."""

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
    return bound(load()._lib, functions)
