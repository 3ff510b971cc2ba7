"""Reads and caches the header of a model from a local file, a URL or the hub.

Only the first megabytes of a remote file are read, by range requests. llama.cpp's parser, which is C++, runs in a child
process with limited memory (:mod:`ggufspec.child`). A cached header needs no child: one ``stat`` call for a local file,
one request for a remote one.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ggufspec import child
from ggufspec.errors import ChildError, GgufspecError, ModelError, StopError
from ggufspec.files.cache import cache_folder, writable
from ggufspec.llamacpp import gguf
from ggufspec.llamacpp.library import load
from ggufspec.models import header_cache
from ggufspec.models.header import ModelHeader, NoModelError, interpret
from ggufspec.models.hub.client import COMMIT, HubFile, UnreachableError
from ggufspec.models.hub.ranges import RemoteFile
from ggufspec.models.locate import MOST_PARTS, LocalFile, ModelFiles, Source, locate, locator, plain
from ggufspec.models.shared_headers import FIRST_BYTES, Shared

MOST_HEADER_BYTES = 64 << 20
"""Limit on the header, of all parts of a split model together. Llama 3 has 8 MB."""

_FIRST_BYTES, _DOUBLED_TO = 1 << 20, 4 << 20
_LARGE = 16 << 20  # a header of this size that is still refused may not need more bytes
MAX_MEMORY = 4 << 30  # most address space, in addition to the child with llama.cpp loaded
_AT_ONCE = 4  # headers that are read in part at the same time
_LEAST_S = 2.0  # for headers, once a child of bounded time has started
_LARGEST_PADDING = 4096  # after the last tensor of a part
_AGAIN = "download it again"


@dataclass(frozen=True, slots=True)
class Known:
    """The header of one model, and files that stand in for it without weights."""

    header: ModelHeader  # its shape
    metadata_only: Path  # sparse file for the dry run (:func:`ggufspec.llamacpp.gguf.write_metadata_only`)
    sparse: Path  # sparse file of the true size with the true header and vocabulary; the first part of a split model
    origin: str  # its file for display, without signature and password
    bytes_read: int = 0  # bytes read now; 0 from the cache


@dataclass(frozen=True, slots=True)
class Spec:
    """Headers to read whole, into ``folder``; or in part, with a file ``like`` them that begins with its header.

    With ``until`` an unreadable one does not affect the others, and no file is begun after that ``time.time()``; a
    child that was slow to start reads for a moment all the same.
    """

    found: tuple[ModelFiles, ...]
    folder: Path | None = None
    like: Path | None = None
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes read of one file, and its header or why there is none, if the others do not depend on it.

    Neither is there if the file was not reached in time.
    """

    bytes_read: int
    header: ModelHeader | None = None
    error: str = ""
    hint: str = ""
    is_model: bool = True


@dataclass(frozen=True, slots=True)
class Result:
    read: tuple[Read, ...]


def default_folder() -> Path:
    return cache_folder() / "headers"


def read_headers(
    sources: Sequence[Source], folder: Path | None = None, on_event: child.Emit | None = None
) -> list[Known]:
    """Return the headers of models, from the cache or by reading their first bytes.

    Args:
        sources: paths, URLs or hub files; any part of a split model.
        folder: the cache; the user's by default.
        on_event: called with progress: ``{"event": "reading", "file": …, "bytes": …}``.

    Raises:
        ModelError: a file is missing, cut short, damaged or no model.
        GgufspecError: there is no network and no cached header, or the folder cannot be written.
        ChildError: llama.cpp died over a header.
    """
    folder = (folder or writable(default_folder(), MOST_HEADER_BYTES)).absolute()
    entries = [_kept(source, folder) for source in sources]
    missing = tuple(dict.fromkeys(entry for entry in entries if isinstance(entry, ModelFiles)))
    bytes_read: dict[ModelFiles, int] = {}
    if missing:
        try:
            result = child.call(__name__, Spec(missing, folder), Result, on_event=on_event)
        except ChildError as error:
            names = " or ".join(found.origin for found in missing)
            raise ChildError(f"llama.cpp died over the header of {names}: {error.message}", _AGAIN) from None
        bytes_read = {one: read.bytes_read for one, read in zip(missing, result.read, strict=True)}
    return [
        _known(entry, folder) if isinstance(entry, header_cache.Entry) else _new(entry, folder, bytes_read[entry])
        for entry in entries
    ]


def read_in_part(found: Sequence[ModelFiles], like: Path, on_event: child.Emit | None = None) -> list[Read]:
    """Read headers of models of one repository, uncached; an unreadable one does not affect the others.

    ``like`` is a file that begins with the header of a similar model; ``on_event`` as in :func:`read_headers`.
    """
    return _apart(Spec(tuple(found), like=like), on_event)


def read_each(
    sources: Sequence[Source], until: float, folder: Path | None = None, on_event: child.Emit | None = None
) -> list[ModelHeader | GgufspecError | None]:
    """Read the headers of many models, cached as by :func:`read_headers`; an unreadable one is its error.

    No file is begun after ``until``, a ``time.time()``: one that was not reached is None. Cached ones are always there.
    """
    folder = (folder or writable(default_folder())).absolute()
    entries: list[header_cache.Entry | ModelFiles | GgufspecError] = []
    for source in sources:
        try:
            entries.append(_kept(source, folder))
        except GgufspecError as error:
            entries.append(error)
    missing = tuple(dict.fromkeys(entry for entry in entries if isinstance(entry, ModelFiles)))
    reads = dict(zip(missing, _apart(Spec(missing, folder, until=until), on_event), strict=True))

    def read(entry: header_cache.Entry | ModelFiles | GgufspecError) -> ModelHeader | GgufspecError | None:
        if isinstance(entry, header_cache.Entry):
            return entry.header
        if isinstance(entry, GgufspecError):
            return entry
        found = reads[entry]
        return ModelError(found.error, found.hint) if found.error else found.header

    return [read(entry) for entry in entries]


def _apart(spec: Spec, on_event: child.Emit | None) -> list[Read]:
    """Read headers that do not affect each other: if llama.cpp dies over one, read each in a child of its own."""
    if not spec.found:
        return []
    if spec.until is not None and time.time() > spec.until:
        return [Read(0) for _ in spec.found]
    try:
        return [*child.call(__name__, spec, Result, on_event=on_event).read]
    except ChildError as error:
        if len(spec.found) == 1:
            return [Read(0, error=f"llama.cpp died over its header: {error.message}", hint=error.hint)]
    return [read for one in spec.found for read in _apart(replace(spec, found=(one,)), on_event)]


def cached_header(source: Source, folder: Path | None = None) -> Known | None:
    """Return the last header of a source in the cache, or None; without checking the source for changes."""
    folder = (folder or default_folder()).absolute()
    try:
        entry = header_cache.load(folder, locator(plain(source)))
    except GgufspecError:  # a name that is not UTF-8
        return None
    return _known(entry, folder) if entry else None


def _kept(source: Source, folder: Path) -> header_cache.Entry | ModelFiles:
    """Return the cached header of a model, or its files. Without a network the last cached header is used."""
    source = plain(source)
    entry = header_cache.load(folder, locator(source))
    if entry and isinstance(source, HubFile) and COMMIT.fullmatch(source.revision or ""):
        return entry  # a commit cannot change
    try:
        found = locate(source)
    except UnreachableError:
        if entry:
            return entry
        raise
    return entry if entry and entry.key == found.key else found


def _new(found: ModelFiles, folder: Path, bytes_read: int) -> Known:
    entry = header_cache.load(folder, found.locator)
    if entry is None:
        raise GgufspecError(f"the cached header of {found.origin} is gone", f"ls {folder}")
    return _known(entry, folder, bytes_read)


def _known(entry: header_cache.Entry, folder: Path, bytes_read: int = 0) -> Known:
    metadata_only, sparse, *_ = entry.files(folder)
    return Known(entry.header, metadata_only, sparse, entry.origin, bytes_read)


# ---- in the child -------------------------------------------------------------------------------------------------


def run(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Result:
    """Read headers in this process, within limited memory."""
    load()  # first: a CUDA build reserves address space
    if spec.until is not None:
        spec = replace(spec, until=max(spec.until, time.time() + _LEAST_S))

    def progress(name: str, count: int) -> None:
        if stopping.is_set():
            raise StopError("stopped while reading a header")
        emit({"event": "reading", "file": name, "bytes": count})

    with child.limited_memory(MAX_MEMORY), ThreadPoolExecutor(_AT_ONCE) as pool:
        shared = Shared.of(*read_prefix(LocalFile.at(spec.like))[:2]) if spec.like else None
        read = functools.partial(_read, spec=spec, shared=shared, progress=progress)
        return Result(tuple(pool.map(read, spec.found) if spec.like else map(read, spec.found)))


def _read(found: ModelFiles, spec: Spec, shared: Shared | None, progress: Callable[[str, int], None]) -> Read:
    """Read a header, and cache it in the folder; if others do not depend on it, return a failure as a result."""
    if spec.until is not None and time.time() > spec.until:
        return Read(0)
    parts: list[gguf.Gguf] = []
    prefixes: list[bytes] = []
    read = 0
    try:
        for file in found.files:
            left = MOST_HEADER_BYTES - sum(map(len, prefixes))
            part, prefix, count = _read_part(file, shared, left, functools.partial(progress, file.name))
            parts.append(part)
            prefixes.append(prefix)
            read += count
        name = found.files[0].name
        check_split(found.files[0], parts)
        header = interpret(name, parts, sum(file.size_bytes for file in found.files))
        if spec.until is not None and spec.folder is not None:
            with suppress(GgufspecError):  # a full disk
                header_cache.save(spec.folder, found, header, prefixes)
        elif spec.folder is not None:
            header_cache.save(spec.folder, found, header, prefixes)
            return Read(read)
        return Read(read, header)
    except MemoryError:
        error: GgufspecError = ModelError(f"the header of {found.origin} takes too much memory", _AGAIN)
    except StopError:
        raise
    except GgufspecError as refused:
        error = refused
    if spec.folder is not None and spec.until is None:
        raise error
    return Read(read, error=error.message, hint=error.hint, is_model=not isinstance(error, NoModelError))


def _read_part(
    file: LocalFile | RemoteFile, shared: Shared | None, most: int, progress: Callable[[int], None]
) -> tuple[gguf.Gguf, bytes, int]:
    """Run :func:`read_prefix`, but skip the ``shared`` part of a header that has it; then return no bytes."""
    if shared is None:
        return read_prefix(file, most, progress)
    first = file.read(0, min(FIRST_BYTES, file.size_bytes))
    progress(len(first))
    found, more = shared.parse(file, first) if first.startswith(b"GGUF") else (None, 0)
    if found is not None:
        return found, b"", len(first) + more
    parsed, prefix, count = read_prefix(file, most, progress, first)
    return parsed, prefix, count + more


def read_prefix(
    file: LocalFile | RemoteFile,
    most: int = MOST_HEADER_BYTES,
    progress: Callable[[int], None] | None = None,
    data: bytes = b"",
) -> tuple[gguf.Gguf, bytes, int]:
    """Read a file's first bytes until the header is complete: (parsed, its bytes, number of bytes read).

    ``data`` are bytes that are already read.

    Raises:
        ModelError: it is not a GGUF file, cut short, damaged, or its header is larger than ``most``.
    """
    wanted = _FIRST_BYTES
    while True:
        wanted = min(wanted, file.size_bytes, most)
        data += file.read(len(data), wanted - len(data))
        if progress is not None:
            progress(len(data))
        if not data.startswith(b"GGUF"):
            raise ModelError(f"{file.name} is not a GGUF file{_looks_like(data)}", gguf.NOT_GGUF)
        try:
            parsed = gguf.parse(data)
            break
        except gguf.UnusableError as error:
            raise ModelError(f"{file.name}: {error.message}", error.hint) from None
        except ModelError as error:
            if wanted == file.size_bytes:
                what = f"{file.name} is cut short within its header, or damaged"
            elif wanted > _LARGE and gguf.extent(data):
                what = f"the header of {file.name} is whole and not accepted"
            elif wanted == most:
                what = f"{file.name} has no complete header in its first {most:,} bytes"
            else:
                wanted = wanted * 2 if wanted < _DOUBLED_TO else wanted * 5 // 4
                continue
            raise ModelError(f"{what}: {error.message}", _AGAIN) from None
    if parsed.end > file.size_bytes:
        raise ModelError(f"{file.name} is cut short: it has {file.size_bytes:,} of {parsed.end:,} bytes", _AGAIN)
    return parsed, data[: parsed.data_offset], len(data)


def _looks_like(data: bytes) -> str:
    start = data[:256].lstrip().lower()
    if not data:
        return ": it is empty"
    if start.startswith(b"version https://git-lfs"):
        return " but a Git LFS pointer: the file itself was not downloaded"
    return " but a web page" if start.startswith((b"<!doctype", b"<html")) else ""


def check_split(first: LocalFile | RemoteFile, parts: Sequence[gguf.Gguf]) -> None:
    """Check that parts belong to one model. Source: llama_model_loader in src/llama-model-loader.cpp."""
    name, again = first.name, "download all parts again"
    for index, part in enumerate(parts):
        count, number = part.metadata.get("split.count", 1), part.metadata.get("split.no", 0)
        if len(parts) == 1 and isinstance(count, int) and count > 1:
            names = f"NAME-00001-of-{count:05}.gguf" if count <= MOST_PARTS else "NAME-00001-of-0000N.gguf"
            if b"GGUF" in first.read(part.end, min(first.size_bytes - part.end, _LARGEST_PADDING)):
                way = f"-m {names} takes the parts as they are, llama-gguf-split --merge {names} NAME.gguf joins them"
                raise ModelError(f"{name} is parts joined by cat: the header is of the first of {count} alone", way)
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
