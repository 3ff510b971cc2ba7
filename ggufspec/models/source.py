"""Reads and caches the header of a model from a local file, a URL or the hub.

Only the first megabytes of a remote file are read, by range requests. llama.cpp's parser, which is C++, runs in a child
process of bounded memory (:mod:`ggufspec.worker`). A cached header takes no child: a call of ``stat`` for a local file,
a request for a remote one.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ggufspec import worker
from ggufspec.cache import cache_folder, writable
from ggufspec.errors import GgufspecError, ModelError, StopError, WorkerError
from ggufspec.llamacpp import gguf
from ggufspec.llamacpp.library import load
from ggufspec.models import header_cache
from ggufspec.models.files import MOST_PARTS, File, ModelFiles, Source, locate, locator, plain
from ggufspec.models.header import ModelHeader, interpret
from ggufspec.models.hub import HubFile, UnreachableError
from ggufspec.models.ranges import ChangedError

__all__ = [
    "MOST_HEADER_BYTES",
    "HubFile",
    "Known",
    "Source",
    "cached_header",
    "default_folder",
    "read_headers",
    "read_prefix",
]

MOST_HEADER_BYTES = 64 << 20
"""Limit on the header, of all parts of a split model together. Llama 3 has 8 MB."""

_FIRST_BYTES, _DOUBLED_TO = 1 << 20, 4 << 20
MAX_MEMORY = 4 << 30  # of address space, beyond that of the child with llama.cpp loaded
_COMMIT = re.compile(r"[0-9a-f]{40}")
_AGAIN = "download it again"


@dataclass(frozen=True, slots=True)
class Known:
    """The header of one model, and files that stand in for it without weights.

    Args:
        header: its shape.
        metadata_only: sparse file for the dry run (:func:`ggufspec.llamacpp.gguf.write_metadata_only`).
        sparse: sparse file of the true size with the true header, vocabulary included; of a split model the first part.
        origin: its file for display, without signature and password.
        bytes_read: bytes read now; 0 from the cache.
        from_cache: whether it was cached.
        stale: whether the source could not be reached to check for changes.
    """

    header: ModelHeader
    metadata_only: Path
    sparse: Path
    origin: str
    bytes_read: int
    from_cache: bool
    stale: bool


@dataclass(frozen=True, slots=True)
class Spec:
    """Headers to read into ``folder``."""

    found: tuple[ModelFiles, ...]
    folder: Path


@dataclass(frozen=True, slots=True)
class Read:
    """The key of a header in the cache, and the bytes read for it."""

    key: str
    bytes_read: int


@dataclass(frozen=True, slots=True)
class Result:
    """In the order of the spec."""

    read: tuple[Read, ...]


def default_folder() -> Path:
    """The cache of headers."""
    return cache_folder() / "headers"


def read_headers(
    sources: Sequence[Source], folder: Path | None = None, on_event: worker.Emit | None = None
) -> list[Known]:
    """The headers of models, from the cache or by reading their first bytes.

    Args:
        sources: a path, a URL or a file of the hub, each; of a split model any part.
        folder: the cache; the user's by default.
        on_event: called with progress: ``{"event": "reading", "file": …, "bytes": …}``.

    Raises:
        ModelError: a file is missing, cut short, damaged or no model.
        GgufspecError: there is no network and no cached header, or the folder cannot be written.
        WorkerError: llama.cpp died over a header.
    """
    folder = (folder or writable(default_folder())).absolute()
    known: dict[int, Known] = {}
    missing: dict[int, ModelFiles] = {}
    for index, source in enumerate(sources):
        entry = _kept(source, folder)
        if isinstance(entry, ModelFiles):
            missing[index] = entry
        else:
            known[index] = entry
    if missing:
        try:
            result = worker.call(__name__, Spec(tuple(missing.values()), folder), Result, on_event=on_event)
        except WorkerError as error:
            names = " or ".join(dict.fromkeys(found.origin for found in missing.values()))
            raise WorkerError(f"llama.cpp died over the header of {names}: {error.message}", _AGAIN) from None
        for (index, found), read in zip(missing.items(), result.read, strict=True):
            new = header_cache.load(folder, read.key)
            if new is None:
                raise GgufspecError(f"the cached header of {found.origin} is gone", f"ls {folder}")
            known[index] = _known(new, folder, read.bytes_read, from_cache=False)
    return [known[index] for index in range(len(sources))]


def cached_header(source: Source, folder: Path | None = None) -> Known | None:
    """The last header of a source in the cache, or None; without checking the source for changes."""
    folder = (folder or default_folder()).absolute()
    entry = header_cache.latest(folder, locator(plain(source)))
    return _known(entry, folder, stale=True) if entry else None


def _kept(source: Source, folder: Path) -> Known | ModelFiles:
    """The cached header of a model, or its files."""
    source = plain(source)
    place = locator(source)
    unchanging = isinstance(source, HubFile) and _COMMIT.fullmatch(source.revision or "")
    if unchanging and (entry := header_cache.latest(folder, place)):
        return _known(entry, folder)
    try:
        found = locate(source)
    except UnreachableError:
        if entry := header_cache.latest(folder, place):
            return _known(entry, folder, stale=True)
        raise
    entry = header_cache.load(folder, found.key)
    if entry is None:
        return found
    with contextlib.suppress(OSError):  # a read-only cache is fine
        header_cache.mark_latest(folder, found)
    return _known(entry, folder)


def _known(
    entry: header_cache.Entry, folder: Path, bytes_read: int = 0, *, from_cache: bool = True, stale: bool = False
) -> Known:
    metadata_only, sparse, *_ = entry.files(folder)
    return Known(entry.header, metadata_only, sparse, entry.origin, bytes_read, from_cache, stale)


# ---- in the child -------------------------------------------------------------------------------------------------


def run(spec: Spec, emit: worker.Emit, stopping: threading.Event) -> Result:
    """Read headers in this process, within bounded memory."""
    load()  # first: a CUDA build reserves address space of its own

    def progress(name: str, count: int) -> None:
        if stopping.is_set():
            raise StopError("stopped while reading a header")
        emit({"event": "reading", "file": name, "bytes": count})

    read: dict[str, Read] = {}
    for found in spec.found:
        if found.key in read:
            continue
        try:
            with worker.limited_memory(MAX_MEMORY):
                try:
                    read[found.key] = _read(found, spec.folder, progress)
                except ChangedError:
                    read[found.key] = _read(locate(found.source), spec.folder, progress)
        except MemoryError:
            raise ModelError(f"the header of {found.origin} takes too much memory", _AGAIN) from None
    return Result(tuple(read[found.key] for found in spec.found))


def _read(found: ModelFiles, folder: Path, progress: Callable[[str, int], None]) -> Read:
    parts: list[gguf.Gguf] = []
    prefixes: list[bytes] = []
    read = 0
    for file in found.files:
        left = MOST_HEADER_BYTES - sum(map(len, prefixes))
        part, prefix, count = read_prefix(file, left, functools.partial(progress, file.name))
        parts.append(part)
        prefixes.append(prefix)
        read += count
    name = found.files[0].name
    _check_split(name, parts)
    header = interpret(name, parts, sum(file.size_bytes for file in found.files))
    header_cache.save(folder, found, header, prefixes)
    return Read(found.key, read)


def read_prefix(
    file: File, most: int = MOST_HEADER_BYTES, progress: Callable[[int], None] | None = None
) -> tuple[gguf.Gguf, bytes, int]:
    """Read a file's first bytes until the header is complete: (parsed, its bytes, number of bytes read).

    Raises:
        ModelError: it is not a GGUF file, cut short, damaged, or its header is larger than ``most``.
    """
    data, wanted = b"", _FIRST_BYTES
    while True:
        wanted = min(wanted, file.size_bytes, most)
        data += file.read(len(data), wanted - len(data))
        if progress is not None:
            progress(len(data))
        if not data.startswith(b"GGUF"):
            raise ModelError(f"{file.name} is not a GGUF file{_looks_like(data)}", "choose a file that ends in .gguf")
        try:
            parsed = gguf.parse(data)
            break
        except ModelError as error:
            if wanted == file.size_bytes:
                what = f"{file.name} is cut short within its header, or damaged"
            elif wanted == most:
                what = f"{file.name} has no complete header in its first {most:,} bytes"
            else:
                wanted = wanted * 2 if wanted < _DOUBLED_TO else wanted * 5 // 4
                continue
            raise ModelError(f"{what}: {error.message}", _AGAIN) from None
    # The parser itself holds each tensor to begin where the one before it ends: ggml/src/gguf.cpp.
    end = parsed.data_offset + max((tensor.offset + tensor.size_bytes for tensor in parsed.tensors), default=0)
    if end > file.size_bytes:
        raise ModelError(f"{file.name} is cut short: it has {file.size_bytes:,} of {end:,} bytes", _AGAIN)
    return parsed, data[: parsed.data_offset], len(data)


def _looks_like(data: bytes) -> str:
    start = data[:256].lstrip().lower()
    if not data:
        return ": it is empty"
    if start.startswith(b"version https://git-lfs"):
        return " but a Git LFS pointer: the file itself was not downloaded"
    return " but a web page" if start.startswith((b"<!doctype", b"<html")) else ""


def _check_split(name: str, parts: Sequence[gguf.Gguf]) -> None:
    """Check that parts belong to one model. Source: llama_model_loader in src/llama-model-loader.cpp."""
    again = "download all parts again"
    for index, part in enumerate(parts):
        count, number = part.metadata.get("split.count", 1), part.metadata.get("split.no", 0)
        if len(parts) == 1 and isinstance(count, int) and count > 1:
            names = f"NAME-00001-of-{count:05}.gguf" if count <= MOST_PARTS else "NAME-00001-of-0000N.gguf"
            raise ModelError(f"{name} is one of {count} parts, and not named so", f"give all parts names like {names}")
        if len(parts) > 1 and (count != len(parts) or number != index):
            says = f"part {number + 1} of {count}" if isinstance(number, int) else "no part"
            message = (
                f"part {index + 1} of {len(parts)} of {name} claims to be {says}: the parts are of different models"
            )
            raise ModelError(message, again)
    tensors = [tensor.name for part in parts for tensor in part.tensors]
    if len(set(tensors)) < len(tensors):  # llama.cpp would abort over them: gguf_add_tensor in ggml/src/gguf.cpp
        raise ModelError(f"two parts of {name} have a tensor of the same name", again)
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if len(parts) > 1 and total != len(tensors):
        raise ModelError(f"the parts of {name} have {len(tensors)} of {total} tensors", again)
