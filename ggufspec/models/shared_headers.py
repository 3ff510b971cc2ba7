"""Headers of many files of one repository, at a fraction of their bytes.

A header is nearly all vocabulary: 8 of its 8.2 MB with Llama 3's. Files of one repository have the same one, so it is
read once, from the file whose header is known; of each other file only what comes before it and what comes after it is
read, and parsed as if the vocabulary's arrays were not there. That they are there is checked: they begin with the same
bytes, end with the same bytes, and the weights of the file, which lie behind them, end where the file ends, to the
byte. A file that fails a check has its header read whole.

Parsing is llama.cpp's, in a child process of bounded memory, as in :mod:`ggufspec.models.source`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ggufspec import worker
from ggufspec.errors import GgufspecError, StopError, WorkerError
from ggufspec.llamacpp import gguf
from ggufspec.llamacpp.library import load
from ggufspec.models.files import LocalFile, ModelFiles
from ggufspec.models.header import ModelHeader, interpret
from ggufspec.models.ranges import RemoteFile
from ggufspec.models.source import MAX_MEMORY, MOST_HEADER_BYTES, check_split, read_prefix

_FIRST_BYTES = 64 << 10  # what comes before a vocabulary has 2 kB
_SLACK_BYTES = 64 << 10  # by which what comes after it may be longer than the known file's
_MOST_AFTER_BYTES = 8 << 20  # of a mixture of experts with a long chat template: 0.2 MB
_SEAM_BYTES = 4 << 10  # that are compared at either end
_LEAST_BYTES = 64 << 10  # of a value that is worth leaving out
_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Spec:
    """Models of one repository, and a file that begins with the header of another one of it."""

    found: tuple[ModelFiles, ...]
    like: Path


@dataclass(frozen=True, slots=True)
class Read:
    """The header of one model, or why there is none; ``bytes_read`` of all its parts."""

    header: ModelHeader | None = None
    error: str = ""
    hint: str = ""
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """In the order of the spec."""

    read: tuple[Read, ...]


def read_headers(found: Sequence[ModelFiles], like: Path, on_event: worker.Emit | None = None) -> list[Read]:
    """The headers of models; one that cannot be read does not concern the others.

    Args:
        found: the models.
        like: a file that begins with the header of one that is like them.
        on_event: called with progress: ``{"event": "reading", "file": …, "bytes": …}``.
    """
    if not found:
        return []
    try:
        return [*worker.call(__name__, Spec(tuple(found), like), Result, on_event=on_event).read]
    except WorkerError as error:
        if len(found) == 1:
            return [Read(error=f"llama.cpp died over its header: {error.message}", hint=error.hint)]
    return [read for one in found for read in read_headers([one], like, on_event)]  # which one was it?


# ---- in the child -------------------------------------------------------------------------------------------------


def run(spec: Spec, emit: worker.Emit, stopping: threading.Event) -> Result:
    """Read headers in this process, within bounded memory, a few at a time."""
    load()  # first: a CUDA build reserves address space of its own

    def progress(name: str, count: int) -> None:
        if stopping.is_set():
            raise StopError("stopped while reading a header")
        emit({"event": "reading", "file": name, "bytes": count})

    with worker.limited_memory(MAX_MEMORY), ThreadPoolExecutor(_AT_ONCE) as pool:
        shared = _Shared.of(LocalFile.at(spec.like))
        return Result(tuple(pool.map(lambda one: _read(one, shared, progress), spec.found)))


@dataclass(frozen=True, slots=True)
class _Shared:
    """The bytes of a header that others repeat: its large arrays and what is between them.

    ``parsed`` is the whole header, ``keys`` are those in the shared part, ``after`` the bytes behind it.
    """

    data: bytes
    parsed: gguf.Gguf
    keys: frozenset[str]
    after: int

    @classmethod
    def of(cls, file: LocalFile) -> _Shared | None:
        """The shared part of a file's header; None if there is nothing large in it."""
        parsed, data, _ = read_prefix(file)
        extent = gguf.extent(data)
        large = [place for place in extent[0].values() if place[1] - place[0] >= _LEAST_BYTES] if extent else []
        if extent is None or not large:
            return None
        begin, end = min(large)[0], max(large)[1]
        keys = frozenset(key for key, place in extent[0].items() if begin <= place[0] < end)
        return cls(data[begin:end], parsed, keys, extent[1] - end)

    def parse(self, file: LocalFile | RemoteFile, first: bytes) -> tuple[gguf.Gguf | None, int]:
        """(a header that has this part, the bytes read besides its ``first`` ones); None if it has not.

        Raises:
            ModelError: llama.cpp refuses it.
        """
        begin = first.find(self.data[:_SEAM_BYTES])
        seam, wanted = self.data[-_SEAM_BYTES:], _SEAM_BYTES + self.after + _SLACK_BYTES
        start = begin + len(self.data) - _SEAM_BYTES
        if begin < 0:
            return None, 0
        after = b""
        while wanted <= _MOST_AFTER_BYTES and start + len(after) < file.size_bytes:
            after += file.read(start + len(after), min(wanted, file.size_bytes - start) - len(after))
            if not after.startswith(seam):
                break
            cut = first[:begin] + after[_SEAM_BYTES:]
            keys = int.from_bytes(cut[16:24], "little") - len(self.keys)
            if keys < 0:
                break
            cut = cut[:16] + keys.to_bytes(8, "little") + cut[24:]
            if extent := gguf.extent(cut):
                return self._joined(gguf.parse(cut), extent[1] + len(self.data), file), len(after)
            wanted *= 2
        return None, len(after)

    def _joined(self, cut: gguf.Gguf, header_bytes: int, file: LocalFile | RemoteFile) -> gguf.Gguf | None:
        """``cut`` with this part in it, or None if the file is not exactly as long as that makes it."""
        alignment = cut.metadata.get("general.alignment", _ALIGNMENT)
        assert isinstance(alignment, int)  # llama.cpp checks it
        data_offset = header_bytes + -header_bytes % alignment
        end = data_offset + max((tensor.offset + tensor.size_bytes for tensor in cut.tensors), default=0)
        if not end <= file.size_bytes <= end + -end % alignment:
            return None
        own = {key: value for key, value in self.parsed.metadata.items() if key in self.keys}
        lengths = {key: value for key, value in self.parsed.lengths.items() if key in self.keys}
        return replace(
            cut,
            metadata=cut.metadata | own,
            lengths=cut.lengths | lengths,
            tokens_digest=self.parsed.tokens_digest if _TOKENS in self.keys else cut.tokens_digest,
            data_offset=data_offset,
        )


_ALIGNMENT = 32  # GGUF_DEFAULT_ALIGNMENT, ggml/include/gguf.h
_TOKENS = "tokenizer.ggml.tokens"


def _read(found: ModelFiles, shared: _Shared | None, progress: Callable[[str, int], None]) -> Read:
    read, left = 0, MOST_HEADER_BYTES
    parts: list[gguf.Gguf] = []
    try:
        for file in found.files:
            part, count = _read_part(file, shared, left, functools.partial(progress, file.name))
            parts.append(part)
            read, left = read + count, left - count
        name = found.files[0].name
        check_split(name, parts)
        return Read(interpret(name, parts, sum(file.size_bytes for file in found.files)), bytes_read=read)
    except MemoryError:
        return Read(error="its header takes too much memory", bytes_read=read)
    except GgufspecError as error:
        if isinstance(error, StopError):
            raise
        return Read(error=error.message, hint=error.hint, bytes_read=read)


def _read_part(
    file: LocalFile | RemoteFile, shared: _Shared | None, most: int, progress: Callable[[int], None]
) -> tuple[gguf.Gguf, int]:
    """A part's header and the bytes read of it: in part if that is enough, otherwise whole."""
    first = file.read(0, min(_FIRST_BYTES, file.size_bytes))
    progress(len(first))
    more = 0
    if shared and first.startswith(b"GGUF"):
        found, more = shared.parse(file, first)
        if found is not None:
            return found, len(first) + more
    parsed, _, count = read_prefix(file, most, progress, first)
    return parsed, count + more
