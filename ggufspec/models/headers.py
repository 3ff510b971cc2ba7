"""Reading and caching of model headers from local files, URLs and the hub.

Only the first megabytes of a remote file are read, with range requests. llama.cpp's C++ parser runs in a child process
with limited memory (:mod:`ggufspec.child`). A cached header needs no child, only one ``stat`` call for a local file or
one request for a remote one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ggufspec import child
from ggufspec.errors import ChildError, GgufspecError, ModelError, StopError
from ggufspec.files.cache import cache_folder, writable
from ggufspec.llamacpp import gguf
from ggufspec.llamacpp.dryrun import check_loads
from ggufspec.llamacpp.library import load_library
from ggufspec.models import header_cache
from ggufspec.models.compat import writes_text
from ggufspec.models.header import ModelHeader, NoModelError, interpret
from ggufspec.models.hub.client import COMMIT, HubFile, UnreachableError, show_requests_with, warn_stale
from ggufspec.models.hub.ranges import RemoteFile
from ggufspec.models.locate import MOST_PARTS, LocalFile, ModelFiles, Source, locate, locate_soon, locator, plain
from ggufspec.models.shared_headers import FIRST_BYTES, SharedBytes

MOST_HEADER_BYTES = 64 << 20
"""Size limit for a model's header, including all parts of a split model; Llama 3's takes 8 MB."""

_FIRST_BYTES, _DOUBLED_TO = 1 << 20, 4 << 20
_LARGE = 16 << 20  # bytes read after which a header that cannot be parsed is checked for completeness
MAX_MEMORY = 4 << 30  # maximum address space, in bytes, that a child may allocate after it has loaded llama.cpp
_AT_ONCE = 4  # maximum number of headers read in part at the same time
_LEAST_S = 2.0  # minimum time that a child with a deadline has for reading headers
_LARGEST_PADDING = 4096  # maximum number of padding bytes after the last tensor of a part
_AGAIN = "download it again"


@dataclass(frozen=True, slots=True)
class KnownHeader:
    """Header of one model, and files without weights that stand in for it."""

    header: ModelHeader  # interpreted header
    metadata_only: Path  # sparse file for dry runs (:func:`ggufspec.llamacpp.gguf.write_metadata_only`)
    sparse: Path  # sparse file with the real size, header and vocabulary (the first part if the model is split)
    origin: str  # location of the model for display, without signature and password
    bytes_read: int = 0  # bytes read by this call; 0 if the header was cached


@dataclass(frozen=True, slots=True)
class HeaderJob:
    """Headers to read completely and cache in ``folder``, or in part if ``like`` begins with a similar model's header.

    No file is opened after ``until`` (a ``time.time()``, at least two seconds after a child's start). If it is set,
    an unreadable file does not affect others. With ``loads``, llama.cpp must load each model without weights.
    """

    found: tuple[ModelFiles, ...]
    folder: Path | None = None
    like: Path | None = None
    until: float | None = None
    loads: bool = False


@dataclass(frozen=True, slots=True)
class HeaderRead:
    """Number of bytes read from one model's files; with ``until`` or ``like``, also the header or the error.

    Header and error are both absent if the model was not reached in time.
    """

    bytes_read: int
    header: ModelHeader | None = None
    error: str = ""
    hint: str = ""
    is_model: bool = True


@dataclass(frozen=True, slots=True)
class HeaderResult:
    read: tuple[HeaderRead, ...]


def default_folder() -> Path:
    return cache_folder() / "headers"


def read_headers(
    sources: Sequence[Source],
    folder: Path | None = None,
    on_event: child.Emit | None = None,
    *,
    loads: bool = False,
) -> list[KnownHeader]:
    """Return the headers of models from the cache, or else by reading the files' first bytes.

    Args:
        sources: paths, URLs or hub files; for a split model, any of its parts.
        folder: the cache folder; default: the user's.
        on_event: called with progress: ``{"event": "reading", "file": …, "bytes": …}``.
        loads: True to refuse models that llama.cpp cannot load; each new model is loaded without its weights (≤ 1 s).

    Raises:
        ModelError: a file is missing, truncated, damaged or not a model, or llama.cpp cannot load it.
        GgufspecError: there is neither a network nor a cached header, or the folder cannot be written.
        ChildError: llama.cpp crashed on a header.
    """
    folder = (folder or writable(default_folder(), MOST_HEADER_BYTES)).absolute()
    entries = [_kept(source, folder, loads=loads) for source in sources]
    missing = tuple(dict.fromkeys(entry for entry in entries if isinstance(entry, ModelFiles)))
    bytes_read: dict[ModelFiles, int] = {}
    if missing:
        try:
            result = child.call(__name__, HeaderJob(missing, folder, loads=loads), HeaderResult, on_event=on_event)
        except ChildError as error:
            names = " or ".join(found.origin for found in missing)
            raise ChildError(f"llama.cpp crashed on the header of {names}: {error.message}", _AGAIN) from None
        bytes_read = {one: read.bytes_read for one, read in zip(missing, result.read, strict=True)}
    return [
        _known(entry, folder)
        if isinstance(entry, header_cache.HeaderCacheEntry)
        else _new(entry, folder, bytes_read[entry])
        for entry in entries
    ]


def read_in_part(found: Sequence[ModelFiles], like: Path, on_event: child.Emit | None = None) -> list[HeaderRead]:
    """Read the headers of models in one repository without caching them; an unreadable file does not affect others.

    ``like`` is a file that begins with a similar model's header; for ``on_event``, see :func:`read_headers`.
    """
    return _apart(HeaderJob(tuple(found), like=like), on_event)


def read_each(
    sources: Sequence[Source], until: float, folder: Path | None = None, on_event: child.Emit | None = None
) -> list[ModelHeader | GgufspecError | None]:
    """Read and cache the headers of many models; an unreadable header is returned as an error.

    No file is opened after ``until``, a ``time.time()``; headers that are neither cached nor read by then are None.
    """
    folder = (folder or writable(default_folder())).absolute()
    entries: list[header_cache.HeaderCacheEntry | ModelFiles | GgufspecError] = []
    for source in sources:
        try:
            entries.append(_kept(source, folder))
        except GgufspecError as error:
            entries.append(error)
    missing = tuple(dict.fromkeys(entry for entry in entries if isinstance(entry, ModelFiles)))
    reads = dict(zip(missing, _apart(HeaderJob(missing, folder, until=until), on_event), strict=True))

    def read(entry: header_cache.HeaderCacheEntry | ModelFiles | GgufspecError) -> ModelHeader | GgufspecError | None:
        if isinstance(entry, header_cache.HeaderCacheEntry):
            return entry.header
        if isinstance(entry, GgufspecError):
            return entry
        found = reads[entry]
        return ModelError(found.error, found.hint) if found.error else found.header

    return [read(entry) for entry in entries]


def _apart(spec: HeaderJob, on_event: child.Emit | None) -> list[HeaderRead]:
    """Read headers in one child process, or each in a child of its own if llama.cpp crashes on one of them."""
    if not spec.found:
        return []
    if spec.until is not None and time.time() > spec.until:
        return [HeaderRead(0) for _ in spec.found]
    try:
        return [*child.call(__name__, spec, HeaderResult, on_event=on_event).read]
    except ChildError as error:
        if len(spec.found) == 1:
            return [HeaderRead(0, error=f"llama.cpp crashed on its header: {error.message}", hint=error.hint)]
    return [read for one in spec.found for read in _apart(replace(spec, found=(one,)), on_event)]


def cached_header(source: Source, folder: Path | None = None) -> KnownHeader | None:
    """Return a source's cached header without checking whether the source has changed; None if it is not cached."""
    folder = (folder or default_folder()).absolute()
    try:
        entry = header_cache.load_header(folder, locator(plain(source)))
    except GgufspecError:  # the name is not UTF-8, so its header cannot be cached
        return None
    return _known(entry, folder) if entry else None


def _kept(source: Source, folder: Path, *, loads: bool = False) -> header_cache.HeaderCacheEntry | ModelFiles:
    """Return the cached header if it is current or the server does not answer soon; otherwise return the model's files.

    With ``loads``, the header of a model that llama.cpp has never loaded is used only if the files are unreachable.
    """
    source = plain(source)
    entry = header_cache.load_header(folder, locator(source))
    will_do = entry is not None and (entry.loads or not loads)
    if entry and will_do and isinstance(source, HubFile) and COMMIT.fullmatch(source.revision or ""):
        return entry  # the header is current, because a commit cannot change
    try:
        found = locate_soon(source) if entry else locate(source)
    except UnreachableError as error:
        if entry is None:
            raise
        warn_stale(f"using the cached header of {entry.origin}", error)
        return entry
    return entry if entry and will_do and entry.key == found.key else found


def _new(found: ModelFiles, folder: Path, bytes_read: int) -> KnownHeader:
    entry = header_cache.load_header(folder, found.locator)
    if entry is None:
        raise GgufspecError(f"the cached header of {found.origin} is gone", f"ls {folder}")
    return _known(entry, folder, bytes_read)


def _known(entry: header_cache.HeaderCacheEntry, folder: Path, bytes_read: int = 0) -> KnownHeader:
    metadata_only, sparse, *_ = entry.files(folder)
    return KnownHeader(entry.header, metadata_only, sparse, entry.origin, bytes_read)


# ---- in the child -------------------------------------------------------------------------------------------------


def run(spec: HeaderJob, emit: child.Emit, stopping: threading.Event) -> HeaderResult:
    """Read headers in this process with limited memory."""
    load_library()  # load before limiting memory, because a CUDA build reserves address space
    if spec.until is not None:
        spec = replace(spec, until=max(spec.until, time.time() + _LEAST_S))

    def progress(name: str, count: int) -> None:
        if stopping.is_set():
            raise StopError("stopped while reading a header")
        emit({"event": "reading", "file": name, "bytes": count})

    def pausing(why: str, left_s: float) -> None:
        if stopping.is_set():
            raise StopError("stopped while a server was busy")
        emit({"event": "waiting", "why": why, "seconds": left_s})

    show_requests_with(lambda _: nullcontext(pausing))
    with child.limited_memory(MAX_MEMORY), ThreadPoolExecutor(_AT_ONCE) as pool:
        shared = SharedBytes.of(*read_prefix(LocalFile.at(spec.like))[:2]) if spec.like else None
        read = partial(_read, spec=spec, shared=shared, progress=progress)
        return HeaderResult(tuple(pool.map(read, spec.found) if spec.like else map(read, spec.found)))


def _read(
    found: ModelFiles, spec: HeaderJob, shared: SharedBytes | None, progress: Callable[[str, int], None]
) -> HeaderRead:
    """Read a header and cache it in ``spec.folder``; raise failures if every header is needed, else return them."""
    if spec.until is not None and time.time() > spec.until:
        return HeaderRead(0)
    parts: list[gguf.Gguf] = []
    prefixes: list[bytes] = []
    read = 0
    try:
        for file in found.files:
            left = MOST_HEADER_BYTES - sum(map(len, prefixes))
            part, prefix, count = _read_part(file, shared, left, partial(progress, file.name))
            parts.append(part)
            prefixes.append(prefix)
            read += count
        name = found.files[0].name
        check_split(found.files[0], parts)
        header = interpret(name, parts, sum(file.size_bytes for file in found.files))
        if spec.until is not None and spec.folder is not None:
            with suppress(GgufspecError):  # a full disk only prevents caching
                header_cache.save_header(spec.folder, found, header, prefixes)
        elif spec.folder is not None:
            loads = spec.loads and writes_text(header)  # other models are refused later because of their kind
            check = partial(check_loads, name=name) if loads else None
            header_cache.save_header(spec.folder, found, header, prefixes, check)
            return HeaderRead(read)
        return HeaderRead(read, header)
    except MemoryError:
        error: GgufspecError = ModelError(f"the header of {found.origin} takes too much memory", _AGAIN)
    except StopError:
        raise
    except GgufspecError as refused:
        error = refused
    if spec.folder is not None and spec.until is None:
        raise error
    return HeaderRead(read, error=error.message, hint=error.hint, is_model=not isinstance(error, NoModelError))


def _read_part(
    file: LocalFile | RemoteFile, shared: SharedBytes | None, most: int, progress: Callable[[int], None]
) -> tuple[gguf.Gguf, bytes, int]:
    """Read a header like :func:`read_prefix`; if it has the ``shared`` part, skip that part and return no bytes."""
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
    """Read a file's first bytes until the header is complete; return (parsed header, its bytes, number of bytes read).

    ``data`` holds the bytes that were already read.

    Raises:
        ModelError: ``file`` is not GGUF, is truncated or damaged, or has a header larger than ``most``.
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
            parsed = gguf.parse_header(data)
            break
        except gguf.UnusableError as error:
            raise ModelError(f"{file.name}: {error.message}", error.hint) from None
        except ModelError as error:
            if wanted == file.size_bytes:
                what = f"{file.name} is truncated within its header, or damaged"
            elif wanted > _LARGE and gguf.extent(data):
                what = f"the header of {file.name} is complete but invalid"
            elif wanted == most:
                what = f"{file.name} has no complete header in its first {most:,} bytes"
            else:
                wanted = wanted * 2 if wanted < _DOUBLED_TO else wanted * 5 // 4
                continue
            raise ModelError(f"{what}: {error.message}", _AGAIN) from None
    if parsed.end > file.size_bytes:
        raise ModelError(f"{file.name} is truncated: it has {file.size_bytes:,} of {parsed.end:,} bytes", _AGAIN)
    return parsed, data[: parsed.data_offset], len(data)


def _looks_like(data: bytes) -> str:
    start = data[:256].lstrip().lower()
    if not data:
        return ": it is empty"
    if start.startswith(b"version https://git-lfs"):
        return " but a Git LFS pointer: the file itself was not downloaded"
    return " but a web page" if start.startswith((b"<!doctype", b"<html")) else ""


def check_split(first: LocalFile | RemoteFile, parts: Sequence[gguf.Gguf]) -> None:
    """Check that files are the parts of one model. Source: llama_model_loader in src/llama-model-loader.cpp."""
    name, again = first.name, "download all parts again"
    for index, part in enumerate(parts):
        count, number = part.metadata.get("split.count", 1), part.metadata.get("split.no", 0)
        if len(parts) == 1 and isinstance(count, int) and count > 1:
            names = f"NAME-00001-of-{count:05}.gguf" if count <= MOST_PARTS else "NAME-00001-of-0000N.gguf"
            if b"GGUF" in first.read(part.end, min(first.size_bytes - part.end, _LARGEST_PADDING)):
                way = f"-m {names} takes the parts as they are; llama-gguf-split --merge {names} NAME.gguf joins them"
                raise ModelError(f"{name} is {count} parts joined by cat: its header covers only the first", way)
            raise ModelError(f"{name} is one of {count} parts, but not named as one", f"name all parts like {names}")
        if len(parts) > 1 and (count != len(parts) or number != index):
            says = f"part {number + 1} of {count}" if isinstance(number, int) else "no part"
            message = (
                f"part {index + 1} of {len(parts)} of {name} claims to be {says}: the parts belong to different models"
            )
            raise ModelError(message, again)
    tensors = [tensor.name for part in parts for tensor in part.tensors]
    if len(set(tensors)) < len(tensors):  # llama.cpp would abort (gguf_add_tensor in ggml/src/gguf.cpp)
        raise ModelError(f"two parts of {name} have a tensor of the same name", again)
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if len(parts) > 1 and total != len(tensors):
        raise ModelError(f"the parts of {name} have {len(tensors)} of {total} tensors", again)
