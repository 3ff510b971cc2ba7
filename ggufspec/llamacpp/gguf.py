"""GGUF headers through llama.cpp's own parser, from the first bytes of a file.

The parser reads a buffer of limited size, so that a header with false lengths can neither make it read beyond nor
allocate more than a few times that size. Untrusted files still need a child process (:mod:`ggufspec.models.headers`).
Source: ggml/include/gguf.h, ggml/src/gguf.cpp.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import re
import shlex
import stat
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any, ClassVar

from ggufspec.errors import ModelError, nearest
from ggufspec.llamacpp.library import bound, complaints, forget_complaints, load

NOT_GGUF = "download the .gguf file itself; a page or a Git LFS pointer looks like this"  # a hint
_MOST_NEIGHBOURS = 1000  # files of a folder among which a mistyped name is looked for

Value = str | int | float | bool | tuple[int, ...] | tuple[float, ...] | tuple[bool, ...]

# enum gguf_type: ctypes type of a scalar, by number; 8 is string, 9 array
_SCALARS: dict[int, Any] = {
    0: ctypes.c_uint8,
    1: ctypes.c_int8,
    2: ctypes.c_uint16,
    3: ctypes.c_int16,
    4: ctypes.c_uint32,
    5: ctypes.c_int32,
    6: ctypes.c_float,
    7: ctypes.c_bool,
    10: ctypes.c_uint64,
    11: ctypes.c_int64,
    12: ctypes.c_double,
}
_STRING, _ARRAY = 8, 9
ALIGNMENT = 32  # GGUF_DEFAULT_ALIGNMENT, ggml/include/gguf.h
_COUNTS = struct.Struct("<8xQQ")  # tensors and keys, after the magic and the version
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_LONGEST_ARRAY = 4096  # only the lengths of longer arrays (the vocabulary's) are read
_LONGEST_TEXT = 65536  # chat templates are shorter
_MOST_NUMBERS = 1 << 18  # in all arrays together: one per block, in a few keys
_MOST_TOKENS = 1 << 21  # vocabularies have 262,144 at most
_lock = threading.Lock()
_MOST_ENTRIES = 65536  # keys, and tensors: each takes a hundred times its bytes in the file

# What ggml/src/gguf.cpp says about a header that more bytes would not fix, and types that it cannot name: ggml_type 133
# and up of ik_llama.cpp, whose repacked types have 202 to 399.
_BAD_ALIGNMENT = re.compile(r"alignment \d+ is not a power of 2")
_TYPE = re.compile(r"tensor '(.*)' (?:has invalid ggml type (\d+)|of type \d+ \((?:TYPE_)?(\S* REMOVED.*)\) has )")
OF_IK_LLAMA = (
    *("Q6_0", "IQ1_BN", "IQ2_BN", "Q8_K64", "IQ2_K", "IQ3_K", "IQ4_K", "IQ5_K", "IQ6_K", "IQ2_TN", "IQ1_TN", "IQ4_KS"),
    *("IQ2_KS", "IQ4_KSS", "Q8_K16", "Q8_K32", "Q8_KR8", "Q8_K128", "Q8_KV", "IQ5_KS", "IQ2_KT", "IQ3_KT", "IQ4_KT"),
    *("IQ3_KS", "IQ2_KL", "IQ1_KT"),
)


class UnusableError(ModelError):
    """A complete header that this llama.cpp cannot use: more bytes or another download would not help."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the file. ``shape`` has ggml's order: the row's length first. ``offset`` is in the data section."""

    name: str
    type: str
    shape: tuple[int, ...]
    size_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Gguf:
    """A parsed header."""

    metadata: dict[str, Value]  # scalars and short arrays
    lengths: dict[str, int]  # lengths of all arrays
    tokens_digest: str  # SHA-256 of the vocabulary's texts, each with its length; empty without one
    tensors: tuple[Tensor, ...]
    data_offset: int  # start of the weights

    @property
    def end(self) -> int:
        """End of the weights; llama.cpp's parser requires each tensor to begin where the previous one ends."""
        return self.data_offset + max((tensor.offset + tensor.size_bytes for tensor in self.tensors), default=0)


class _Params(ctypes.Structure):
    """struct gguf_init_params."""

    _fields_: ClassVar = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.POINTER(ctypes.c_void_p))]


@contextmanager
def _parsed(data: bytes) -> Iterator[int]:
    """Yield the gguf_context of a buffer; a ModelError has llama.cpp's reason to refuse it."""
    lib = _ggml()
    if len(data) >= _COUNTS.size and max(_COUNTS.unpack_from(data)) > _MOST_ENTRIES:
        raise ModelError(f"the header claims more than {_MOST_ENTRIES:,} keys or tensors", "download it again")
    with _lock:  # complaints are shared by the whole process
        forget_complaints()
        handle = lib.gguf_init_from_buffer(data, len(data), _Params(True, None))
        reason = complaints()
    if not handle:
        raise _refusal(reason, data)
    try:
        yield handle
    finally:
        lib.gguf_free(handle)


def _refusal(reason: str, data: bytes) -> ModelError:
    """Return the error for a header that llama.cpp refuses, in its words or, if they do not help, in ours."""
    if found := _BAD_ALIGNMENT.search(reason):
        return UnusableError(found[0], "convert the model again, or choose another file")
    found = _TYPE.search(reason)
    if found is None or extent(data) is None:  # the last type may be cut off
        return ModelError(f"llama.cpp refuses the header: {reason}", "download it again")
    number = int(found[2] or 0)
    name = dict(enumerate(OF_IK_LLAMA, 133)).get(number, "a type" if 200 <= number < 400 else "")
    what = found[3] or f"{number}, " + (f"{name} of ik_llama.cpp" if name else "which this llama.cpp does not know")
    hint = "run it with ik_llama.cpp, or " if name else "update llama-cpp-python, or " if number else ""
    return UnusableError(f"{found[1]} has the type {what}", f"{hint}choose a file in another type")


def check_file(path: Path) -> os.stat_result:
    """Refuse what cannot be a model's file: one that does not exist or is empty, a folder, a device.

    Raises:
        ModelError: the hint names the nearest file, or a model in the folder.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        neighbours = itertools.islice(path.parent.glob("*.gguf"), _MOST_NEIGHBOURS)
        near = nearest(path.name, [one.name for one in neighbours])
        raise ModelError(f"{path} does not exist", near or f"ls {path.parent}") from None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ModelError(f"{path} cannot be read: {reason}", f"ls {path.parent}") from None
    if stat.S_ISDIR(found.st_mode):
        model = next(path.glob("*.gguf"), None)
        raise ModelError(f"{path} is a folder", f"-m {shlex.quote(str(model))}" if model else f"ls {path}")
    if not stat.S_ISREG(found.st_mode):
        raise ModelError(f"{path} is not a file", f"ls -l {path}")
    if not found.st_size:
        raise ModelError(f"{path} is empty", "download it again")
    return found


def alignment(path: Path) -> int:
    """Return the alignment of a file's tensors; the default if llama.cpp refuses the file."""
    lib = _ggml()
    handle = lib.gguf_init_from_file(os.fsencode(path), _Params(True, None))
    found = lib.gguf_get_alignment(handle) if handle else ALIGNMENT
    lib.gguf_free(handle)
    return int(found)


def parse(data: bytes) -> Gguf:
    """Read a header from a file's first bytes.

    Raises:
        UnusableError: it is complete, and this llama.cpp cannot use it.
        ModelError: it is incomplete, or llama.cpp refuses it.
    """
    lib = _ggml()
    with _parsed(data) as handle:
        metadata: dict[str, Value] = {}
        lengths: dict[str, int] = {}
        left = _MOST_NUMBERS
        for index in range(lib.gguf_get_n_kv(handle)):
            key = _text(lib.gguf_get_key(handle, index))
            if not key:  # llama.cpp reads but never writes these
                raise ModelError("the header has a key without a name", "download it again")
            kind = lib.gguf_get_kv_type(handle, index)
            if kind == _ARRAY:
                lengths[key] = count = lib.gguf_get_arr_n(handle, index)
                item = _SCALARS.get(lib.gguf_get_arr_type(handle, index))
                if item is not None and count <= min(_LONGEST_ARRAY, left):
                    left -= count
                    data = lib.gguf_get_arr_data(handle, index)
                    metadata[key] = tuple((item * count).from_address(data)) if count else ()
            elif kind == _STRING:
                metadata[key] = _text(lib.gguf_get_val_str(handle, index))[:_LONGEST_TEXT]
            else:
                metadata[key] = _SCALARS[kind].from_address(lib.gguf_get_val_data(handle, index)).value
        texts = _tokens(handle)
        if metadata.get("tokenizer.ggml.model") not in ("none", "no_vocab"):
            _check_tokens(texts)
        digest = hashlib.sha256(b"".join(b"%d:%b" % (len(text), text) for text in texts)).hexdigest()
        return Gguf(
            metadata=metadata,
            lengths=lengths,
            tokens_digest=digest if texts else "",
            tensors=tuple(_tensor(handle, index) for index in range(lib.gguf_get_n_tensors(handle))),
            data_offset=lib.gguf_get_data_offset(handle),
        )


def _tensor(handle: int, index: int) -> Tensor:
    lib = _ggml()
    ne = lib.gguf_get_tensor_ne(handle, index)
    shape = [ne[axis] for axis in range(4)]
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    return Tensor(
        name=_text(lib.gguf_get_tensor_name(handle, index)),
        type=_text(lib.ggml_type_name(lib.gguf_get_tensor_type(handle, index))),
        shape=tuple(shape),
        size_bytes=lib.gguf_get_tensor_size(handle, index),
        offset=lib.gguf_get_tensor_offset(handle, index),
    )


_SIZES = {kind: ctypes.sizeof(scalar) for kind, scalar in _SCALARS.items()}


def extent(data: bytes | mmap) -> tuple[dict[str, tuple[int, int]], int] | None:
    """Return where a header's keys are, and where it ends before its padding; None if ``data`` is incomplete.

    Only lengths are read, in the order of the file: a header that llama.cpp refuses may have an extent.

    Returns:
        (begin, end) of each key with its value, and the end of the last tensor's description.
    """
    found: dict[str, tuple[int, int]] = {}
    try:
        tensors, keys = _COUNTS.unpack_from(data)
        at = _COUNTS.size
        for _ in range(keys):
            begin, after = at, _after_text(data, at)
            at = _after_value(data, after + 4, *_U32.unpack_from(data, after))
            found[data[begin + 8 : after].decode("utf-8", "replace")] = begin, at
        for _ in range(tensors):
            at = _after_text(data, at)
            at += 4 + 8 * _U32.unpack_from(data, at)[0] + 4 + 8  # dimensions, type, offset
    except (struct.error, KeyError, OverflowError):
        return None
    return (found, at) if at <= len(data) else None


def _after_text(data: bytes | mmap, at: int) -> int:
    return at + 8 + int(_U64.unpack_from(data, at)[0])


def _after_value(data: bytes | mmap, at: int, kind: int) -> int:
    if kind == _STRING:
        return _after_text(data, at)
    if kind != _ARRAY:
        return at + _SIZES[kind]
    (item,), (count,) = _U32.unpack_from(data, at), _U64.unpack_from(data, at + 4)
    at += 12
    if item != _STRING:
        return at + int(count) * _SIZES[item]
    for _ in range(count):
        at = _after_text(data, at)
    return at


def tokens(data: bytes) -> list[bytes]:
    """Return the texts of the vocabulary in a header, by id; none without one. Raises as :func:`parse` does."""
    with _parsed(data) as handle:
        return _tokens(handle)


def _tokens(handle: int) -> list[bytes]:
    lib = _ggml()
    index = lib.gguf_find_key(handle, b"tokenizer.ggml.tokens")
    if index < 0 or lib.gguf_get_kv_type(handle, index) != _ARRAY or lib.gguf_get_arr_type(handle, index) != _STRING:
        return []
    text, count = lib.gguf_get_arr_str, lib.gguf_get_arr_n(handle, index)
    if count > _MOST_TOKENS:
        raise ModelError(f"the header has a vocabulary of {count:,} tokens", "download it again")
    return [text(handle, index, i) or b"" for i in range(count)]


def _check_tokens(texts: Sequence[bytes]) -> None:
    """Refuse two tokens with one text, an assertion in ``llama_vocab::impl::load``; empty ones get texts there."""
    ids: dict[bytes, int] = {}
    for token, text in enumerate(texts):
        if (first := ids.setdefault(text or b"[EMPTY_%d]" % token, token)) != token:
            message = f"tokens {first} and {token} have the same text, {_text(text)!r}: llama.cpp aborts over that"
            raise UnusableError(message, "choose another file, or convert the model again with another text for one")


def _text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "replace")


@functools.cache
def _ggml() -> Any:
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    integer, count = ctypes.c_int, ctypes.c_int64
    functions: dict[str, tuple[Any, list[Any]]] = {
        "gguf_init_from_buffer": (pointer, [text, size, _Params]),
        "gguf_init_from_file": (pointer, [text, _Params]),
        "gguf_free": (None, [pointer]),
        "gguf_get_n_kv": (count, [pointer]),
        "gguf_find_key": (count, [pointer, text]),
        "gguf_get_key": (text, [pointer, count]),
        "gguf_get_kv_type": (integer, [pointer, count]),
        "gguf_get_arr_type": (integer, [pointer, count]),
        "gguf_get_arr_n": (size, [pointer, count]),
        "gguf_get_arr_data": (pointer, [pointer, count]),
        "gguf_get_arr_str": (text, [pointer, count, size]),
        "gguf_get_val_str": (text, [pointer, count]),
        "gguf_get_val_data": (pointer, [pointer, count]),
        "gguf_get_n_tensors": (count, [pointer]),
        "gguf_get_tensor_name": (text, [pointer, count]),
        "gguf_get_tensor_ne": (ctypes.POINTER(count), [pointer, count]),
        "gguf_get_tensor_type": (integer, [pointer, count]),
        "gguf_get_tensor_size": (size, [pointer, count]),
        "gguf_get_tensor_offset": (size, [pointer, count]),
        "gguf_get_data_offset": (size, [pointer]),
        "gguf_get_alignment": (size, [pointer]),
        "gguf_remove_key": (count, [pointer, text]),
        "gguf_set_val_u32": (None, [pointer, text, ctypes.c_uint32]),
        "gguf_set_val_str": (None, [pointer, text, text]),
        "gguf_add_tensor": (None, [pointer, pointer]),
        "gguf_set_kv": (None, [pointer, pointer]),
        "gguf_set_arr_str": (None, [pointer, text, ctypes.POINTER(text), size]),
        "gguf_set_arr_data": (None, [pointer, text, integer, pointer, size]),
        "gguf_get_meta_size": (size, [pointer]),
        "gguf_write_to_file": (ctypes.c_bool, [pointer, text, ctypes.c_bool]),
        "ggml_free": (None, [pointer]),
        "ggml_type_name": (text, [integer]),
        "gguf_init_empty": (pointer, []),
        "gguf_set_val_f32": (None, [pointer, text, ctypes.c_float]),
        "gguf_set_val_bool": (None, [pointer, text, ctypes.c_bool]),
        "ggml_init": (pointer, [_InitParams]),
        "ggml_tensor_overhead": (size, []),
        "ggml_new_tensor": (pointer, [pointer, integer, integer, ctypes.POINTER(count)]),
        "ggml_set_name": (pointer, [pointer, text]),
    }
    return bound(load()._lib, functions)


# ---- writing models ---------------------------------------------------------------------------------------------


class _InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_: ClassVar = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


@functools.cache
def _type_numbers() -> dict[str, int]:
    name = _ggml().ggml_type_name
    return {_text(name(number)): number for number in range(load().GGML_TYPE_COUNT)}


def type_number(name: str) -> int:
    """Return ggml's number of a tensor type; ValueError if there is no such type."""
    if name not in _type_numbers():
        raise ValueError(f"ggml has no type {name}")
    return _type_numbers()[name]


_OF_THE_FILE = (b"general.alignment", b"general.size_label", b"split.")  # keys of the file, not of the model
_PADDING = ((b"scores", 6, -1e4), (b"token_type", 5, 5))  # (key, gguf_type, value); 5: LLAMA_TOKEN_TYPE_UNUSED


def write_model(
    path: Path,
    metadata: Mapping[str, str | int | float | bool],
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    *,
    like: bytes = b"",
    vocabulary: int = 0,
    tokenizer: bool = True,
) -> None:
    """Write a GGUF file whose weights are a hole: they read as zeros and take no disk space.

    Args:
        path: the file to write.
        metadata: scalars by key; an int is written as u32.
        tensors: (name, type as ggml spells it, shape in ggml's order) of each; a row is a multiple of its type's block.
        like: the header of a model whose other keys are copied.
        vocabulary: number of tokens; unused ones, named ``[PADn]`` by id, are appended.
        tokenizer: True to copy the tokenizer, which is most of a header, and most of the time of a dry run.

    Raises:
        ModelError: the file cannot be written, or such tokens exist already.
        ValueError: there is no such type.
    """
    lib, types, wanted = _ggml(), _type_numbers(), list(tensors)
    if unknown := {kind for _, kind, _ in wanted} - types.keys():
        raise ValueError(f"ggml has no type {', '.join(sorted(unknown))}")
    handle = lib.gguf_init_empty()
    room = lib.ggml_init(_InitParams((len(wanted) + 1) * lib.ggml_tensor_overhead(), None, True))
    try:
        if like:
            with _parsed(like) as other:
                lib.gguf_set_kv(handle, other)
            unwanted = _OF_THE_FILE if tokenizer else (*_OF_THE_FILE, b"tokenizer.")
            for key in [lib.gguf_get_key(handle, index) for index in range(lib.gguf_get_n_kv(handle))]:
                if key.startswith(unwanted):
                    lib.gguf_remove_key(handle, key)
            _pad_vocabulary(handle, vocabulary)
        setters = {str: lib.gguf_set_val_str, int: lib.gguf_set_val_u32, float: lib.gguf_set_val_f32}
        setters[bool] = lib.gguf_set_val_bool
        for name, value in metadata.items():
            setters[type(value)](handle, name.encode(), value.encode() if isinstance(value, str) else value)
        for name, kind, shape in wanted:
            tensor = lib.ggml_new_tensor(room, types[kind], len(shape), (ctypes.c_int64 * len(shape))(*shape))
            lib.ggml_set_name(tensor, name.encode())
            lib.gguf_add_tensor(handle, tensor)
        size = lib.gguf_get_meta_size(handle)
        if wanted:
            alignment, last = lib.gguf_get_alignment(handle), _tensor(handle, len(wanted) - 1)
            size += last.offset + -(-last.size_bytes // alignment) * alignment
        if not lib.gguf_write_to_file(handle, os.fsencode(path), True):
            raise ModelError(f"{path} cannot be written", f"df -h {path.parent}")
    finally:
        lib.ggml_free(room)
        lib.gguf_free(handle)
    with path.open("r+b") as file:
        file.truncate(size)


def write_metadata_only(parts: Sequence[bytes], path: Path) -> None:
    """Write a metadata-only file for dry runs: the model's shape, and only the size of its vocabulary.

    ``parts`` are the first bytes of the file, or of each part of a split file in order; they become one.

    Raises:
        ModelError: llama.cpp refuses a part, or the file cannot be written.
    """
    headers = [parse(part) for part in parts]
    architecture = headers[0].metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError("the header names no architecture", "download it again")
    keys: dict[str, str | int] = {"tokenizer.ggml.model": "none"}
    if vocabulary := headers[0].lengths.get("tokenizer.ggml.tokens"):
        keys[f"{architecture}.vocab_size"] = vocabulary
    tensors = [(tensor.name, tensor.type, tensor.shape) for header in headers for tensor in header.tensors]
    write_model(path, keys, tensors, like=parts[0], tokenizer=False)


def _pad_vocabulary(handle: int, size: int) -> None:
    lib, texts = _ggml(), _tokens(handle)
    padding = [b"[PAD%d]" % token for token in range(len(texts), size)]
    if not texts or not padding:
        return
    if taken := set(texts).intersection(padding):
        first = min(taken).decode()
        raise ModelError(f"the vocabulary already has a token {first}", "leave the vocabulary's size as it is")
    lib.gguf_set_arr_str(handle, b"tokenizer.ggml.tokens", (ctypes.c_char_p * size)(*texts, *padding), size)
    for name, kind, value in _PADDING:
        key = b"tokenizer.ggml." + name
        index = lib.gguf_find_key(handle, key)
        if index < 0 or lib.gguf_get_kv_type(handle, index) != _ARRAY or lib.gguf_get_arr_type(handle, index) != kind:
            continue
        count = lib.gguf_get_arr_n(handle, index)
        own = (_SCALARS[kind] * count).from_address(lib.gguf_get_arr_data(handle, index))
        padded = (_SCALARS[kind] * size)(*own[:size], *[value] * (size - count))
        lib.gguf_set_arr_data(handle, key, kind, padded, size)
