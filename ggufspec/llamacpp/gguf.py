"""GGUF headers, read by llama.cpp's own parser from the first bytes of a file.

The parser reads a buffer of limited size, so a header with false lengths cannot make it read beyond the buffer or
allocate more than a few times its size. Untrusted files still need a child process (:mod:`ggufspec.models.headers`).
Source: ggml/include/gguf.h, ggml/src/gguf.cpp.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
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

from ggufspec.errors import ModelError
from ggufspec.files import untrusted
from ggufspec.llamacpp.library import bound, complaints, forget_complaints, load_library

NOT_GGUF = "download the .gguf file itself; this may be a web page or a Git LFS pointer"  # hint if a file is not GGUF

Value = str | int | float | bool | tuple[int, ...] | tuple[float, ...] | tuple[bool, ...]

# ctypes type of each scalar in enum gguf_type; 8 is string, 9 array
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
_VERSION = 3  # GGUF_VERSION, ggml/include/gguf.h
_COUNTS = struct.Struct("<8xQQ")  # numbers of tensors and of keys, after the magic number and the version
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_LONGEST_ARRAY = 4096  # maximum length of an array to read; longer ones (e.g. vocabularies) yield only their length
_LONGEST_TEXT = 65536  # maximum number of characters in a text; chat templates are shorter
_MOST_NUMBERS = 1 << 18  # maximum total length of number arrays; a few keys have one number per block
_MOST_TOKENS = 1 << 21  # maximum number of tokens in a vocabulary; real ones have at most 262,144
_lock = threading.Lock()
_MOST_ENTRIES = 65536  # maximum number of keys, and of tensors; once parsed, each takes 100 times its size in the file

# Messages in ggml/src/gguf.cpp about headers that more bytes would not fix, and ik_llama.cpp's tensor types that ggml
# does not support. The types' numbers start at 133; repacked types have the numbers 202 to 399.
_BAD_ALIGNMENT = re.compile(r"alignment \d+ is not a power of 2")
_TYPE = re.compile(r"tensor '(.*)' (?:has invalid ggml type (\d+)|of type \d+ \((?:TYPE_)?(\S* REMOVED.*)\) has )")
OF_IK_LLAMA = (
    *("Q6_0", "IQ1_BN", "IQ2_BN", "Q8_K64", "IQ2_K", "IQ3_K", "IQ4_K", "IQ5_K", "IQ6_K", "IQ2_TN", "IQ1_TN", "IQ4_KS"),
    *("IQ2_KS", "IQ4_KSS", "Q8_K16", "Q8_K32", "Q8_KR8", "Q8_K128", "Q8_KV", "IQ5_KS", "IQ2_KT", "IQ3_KT", "IQ4_KT"),
    *("IQ3_KS", "IQ2_KL", "IQ1_KT"),
)


class UnusableError(ModelError):
    """Error for a complete header that this llama.cpp cannot use; neither more bytes nor a new download would help."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. ``shape`` is in ggml's order, row length first; ``offset`` counts from the start of the weights."""

    name: str
    type: str
    shape: tuple[int, ...]
    size_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Gguf:
    """A parsed GGUF header."""

    metadata: dict[str, Value]  # scalars and short arrays
    lengths: dict[str, int]  # lengths of all arrays
    tokens_digest: str  # SHA-256 of the token texts, each with its length; empty without a vocabulary
    tensors: tuple[GgufTensor, ...]
    data_offset: int  # position in the file at which the weights begin

    @property
    def end(self) -> int:
        """End of the weights in the file; llama.cpp requires each tensor to begin where the previous one ends."""
        return self.data_offset + max((tensor.offset + tensor.size_bytes for tensor in self.tensors), default=0)


class _Params(ctypes.Structure):
    """struct gguf_init_params."""

    _fields_: ClassVar = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.POINTER(ctypes.c_void_p))]


@contextmanager
def _parsed(data: bytes) -> Iterator[int]:
    """Yield the gguf_context of a buffer; raise ModelError with the reason if llama.cpp refuses it."""
    lib = _ggml()
    if len(data) >= _COUNTS.size and (other := _other_version(*_U32.unpack_from(data, 4))):
        raise UnusableError(*other)
    if len(data) >= _COUNTS.size and max(_COUNTS.unpack_from(data)) > _MOST_ENTRIES:
        raise ModelError(f"the header claims more than {_MOST_ENTRIES:,} keys or tensors", "download it again")
    with _lock:  # llama.cpp's error log is process-wide, so only one thread may parse at a time
        forget_complaints()
        handle = lib.gguf_init_from_buffer(data, len(data), _Params(True, None))
        reason = complaints()
    if not handle:
        raise _refusal(reason, data)
    try:
        yield handle
    finally:
        lib.gguf_free(handle)


def _other_version(version: int) -> tuple[str, str] | None:
    """Return (reason, hint) if llama.cpp cannot read a GGUF version; None if it can, or if it is no version number."""
    if version and not version & 0xFFFF:
        return "big-endian, for another kind of CPU", "gguf-convert-endian FILE little (pip install gguf) converts it"
    if version == 1:
        return "GGUF version 1, which only llama.cpp from 2023 reads", "convert the model again, or choose a newer file"
    if _VERSION < version <= 0xFFFF:
        newer = f"GGUF version {version}, but this llama.cpp reads only up to version {_VERSION}"
        return newer, "update llama-cpp-python, or choose another file"
    return None


def _refusal(reason: str, data: bytes) -> ModelError:
    """Return the error for a header that llama.cpp refuses, in llama.cpp's words or clearer ones."""
    if found := _BAD_ALIGNMENT.search(reason):
        return UnusableError(found[0], "convert the model again, or choose another file")
    found = _TYPE.search(reason)
    if found is None or extent(data) is None:  # the last type may be truncated
        return ModelError(f"llama.cpp refuses the header: {reason}", "download it again")
    number = int(found[2] or 0)
    name = dict(enumerate(OF_IK_LLAMA, 133)).get(number, "a type" if 200 <= number < 400 else "")
    what = found[3] or f"{number}, " + (f"{name} of ik_llama.cpp" if name else "which this llama.cpp does not support")
    hint = "run it with ik_llama.cpp, or " if name else "update llama-cpp-python, or " if number else ""
    return UnusableError(f"{found[1]} has the type {what}", f"{hint}choose a file in another type")


def check_file(path: Path) -> os.stat_result:
    """Check that a path is a nonempty, regular file, and return its status.

    Raises:
        ModelError: there is no such file, or it is unreadable; the hint may name a similar file or one in the folder.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        near = untrusted.near(path, "*.gguf")
        hint = f"did you mean {near!r}?" if near else "ggufspec models lists the models on this disk"
        instead = (str(path), str(path.with_name(near))) if near else None
        raise ModelError(f"{path} does not exist", hint, instead) from None
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
    """Return the alignment of a file's tensors, or the default if llama.cpp refuses the file."""
    lib = _ggml()
    handle = lib.gguf_init_from_file(os.fsencode(path), _Params(True, None))
    found = lib.gguf_get_alignment(handle) if handle else ALIGNMENT
    lib.gguf_free(handle)
    return int(found)


def parse_header(data: bytes) -> Gguf:
    """Parse a header from a file's first bytes.

    Raises:
        UnusableError: the header is complete, but this llama.cpp cannot use it.
        ModelError: the header is incomplete, or llama.cpp refuses it.
    """
    lib = _ggml()
    with _parsed(data) as handle:
        metadata: dict[str, Value] = {}
        lengths: dict[str, int] = {}
        left = _MOST_NUMBERS
        for index in range(lib.gguf_get_n_kv(handle)):
            key = _text(lib.gguf_get_key(handle, index))
            if not key:  # llama.cpp accepts empty keys, but never writes them
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


def _tensor(handle: int, index: int) -> GgufTensor:
    lib = _ggml()
    ne = lib.gguf_get_tensor_ne(handle, index)
    shape = [ne[axis] for axis in range(4)]
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    return GgufTensor(
        name=_text(lib.gguf_get_tensor_name(handle, index)),
        type=_text(lib.ggml_type_name(lib.gguf_get_tensor_type(handle, index))),
        shape=tuple(shape),
        size_bytes=lib.gguf_get_tensor_size(handle, index),
        offset=lib.gguf_get_tensor_offset(handle, index),
    )


_SIZES = {kind: ctypes.sizeof(scalar) for kind, scalar in _SCALARS.items()}


def extent(data: bytes | mmap) -> tuple[dict[str, tuple[int, int]], int] | None:
    """Return the byte ranges of a header's keys, and its end before padding; None if ``data`` is incomplete.

    Only lengths are read, in file order, so even headers that llama.cpp refuses may have an extent.

    Returns:
        (begin, end) of each key and its value, and the end of the last tensor's description.
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
    """Return a header's token texts by id; empty without a vocabulary. Raise as :func:`parse_header` does."""
    with _parsed(data) as handle:
        return _tokens(handle)


def _tokens(handle: int) -> list[bytes]:
    lib = _ggml()
    index = lib.gguf_find_key(handle, b"tokenizer.ggml.tokens")
    if index < 0 or lib.gguf_get_kv_type(handle, index) != _ARRAY or lib.gguf_get_arr_type(handle, index) != _STRING:
        return []
    text, count = lib.gguf_get_arr_str, lib.gguf_get_arr_n(handle, index)
    if count > _MOST_TOKENS:
        raise ModelError(f"the header claims a vocabulary of {count:,} tokens", "download it again")
    return [text(handle, index, i) or b"" for i in range(count)]


def _check_tokens(texts: Sequence[bytes]) -> None:
    """Check that no two tokens have the same text, as ``llama_vocab::impl::load`` asserts after naming empty tokens."""
    ids: dict[bytes, int] = {}
    for token, text in enumerate(texts):
        if (first := ids.setdefault(text or b"[EMPTY_%d]" % token, token)) != token:
            message = f"tokens {first} and {token} have the same text, {_text(text)!r}, on which llama.cpp aborts"
            raise UnusableError(message, "choose another file, or convert the model again with distinct texts")


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
    return bound(load_library()._lib, functions)


# ---- writing models ---------------------------------------------------------------------------------------------


class _InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_: ClassVar = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


@functools.cache
def _type_numbers() -> dict[str, int]:
    name = _ggml().ggml_type_name
    return {_text(name(number)): number for number in range(load_library().GGML_TYPE_COUNT)}


def type_number(name: str) -> int:
    """Return ggml's number for a tensor type; raise ValueError if there is no such type."""
    if name not in _type_numbers():
        raise ValueError(f"ggml has no type {name}")
    return _type_numbers()[name]


_OF_THE_FILE = (b"general.alignment", b"general.size_label", b"split.")  # keys that describe the file, not the model
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
    """Write a sparse GGUF file, whose weights read as zeros and take no disk space.

    Args:
        path: the file to write.
        metadata: scalars by key; an int is written as u32.
        tensors: (name, ggml's type name, shape in ggml's order); the row length is a multiple of the block size.
        like: header of another model, whose keys are copied unless ``metadata`` has them or they describe the file.
        vocabulary: minimum number of tokens; missing ones are added as unused tokens ``[PADn]``, where n is the id.
        tokenizer: True to copy the tokenizer, which makes up most of a header and of a dry run's time.

    Raises:
        ModelError: the file cannot be written, or the vocabulary already has such a ``[PADn]`` token.
        ValueError: ggml has no such tensor type.
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
    """Write a metadata-only file for dry runs, with the model's shape but only the size of its vocabulary.

    ``parts`` are the first bytes of the file, or of each part of a split file, in order; the result is a single file.

    Raises:
        ModelError: llama.cpp refuses a part, or the file cannot be written.
    """
    headers = [parse_header(part) for part in parts]
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
