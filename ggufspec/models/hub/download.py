"""Downloads models from the hub into its cache: resumable, and verified before use.

Data is appended to ``ETAG.ggufspec.incomplete`` next to its blob, and becomes the blob when its digest is the hub's, so
that an interrupted download leaves the beginning of the file. huggingface_hub provides the lock, the client and the
cache; its own downloads start over each time (``_download_to_tmp_and_move`` in file_download.py).
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from ggufspec.child import Emit
from ggufspec.errors import GgufspecError, ModelError
from ggufspec.hardware import host
from ggufspec.llamacpp.gguf import NOT_GGUF
from ggufspec.models.hub import client
from ggufspec.models.hub.client import HubFile
from ggufspec.models.locate import cached_parts, part_names
from ggufspec.schema.text import of_download

_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # between tries without progress
_MOST_PAUSE_S = 300.0  # longest wait at the hub's request; its limits are per five minutes
_EVENTS_S = 0.1
_STALL_S, _STALL_BYTES = 60.0, 60_000
_READ_BYTES = 1 << 20
_DIGITS = 20  # maximum digits of a plausible length
_SHA256 = re.compile(r"[0-9a-f]{64}")


class DamagedError(ModelError):
    """The bytes differ from the hub's digest; they were removed."""


@dataclass(frozen=True, slots=True)
class Item:
    """One file, before and after its download."""

    source: HubFile
    commit: str  # commit of ``revision``
    etag: str  # hub's identifier of the contents: the SHA-256 of a large file
    size_bytes: int  # size of the complete file
    url: str = ""  # empty if the hub was not asked
    present_bytes: int = 0  # on this machine before the download
    path: Path | None = None  # set if the file is complete
    verified: bool = False  # its bytes were compared with the hub's digest
    downloaded_bytes: int = 0  # received in this download

    @property
    def sha256(self) -> str | None:
        return self.etag if _SHA256.fullmatch(self.etag) else None

    @property
    def missing_bytes(self) -> int:
        return self.size_bytes - self.present_bytes


@dataclass(frozen=True, slots=True)
class Order:
    """Files to download, by model, with all parts of a split one; the disk of ``folder`` has ``free_bytes``."""

    models: tuple[tuple[Item, ...], ...]
    folder: Path
    free_bytes: int

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(item for model in self.models for item in model)

    @property
    def missing_bytes(self) -> int:
        """Bytes to download; a file that two models share counts once."""
        return sum({(item.source.repo, item.etag): item.missing_bytes for item in self.items}.values())


def here(source: HubFile) -> Path | None:
    """Return the first part of a model, if all parts are cached. No network; fails for names outside the repository."""
    return next(iter(cached_parts(source)), None)


def look(sources: Sequence[HubFile]) -> Order:
    """Ask the hub for versions and sizes, one request per part, and check the cache; nothing is downloaded.

    If the hub is unreachable, a cached model is used as it is.

    Raises:
        UnreachableError: there is no network.
        ModelError: no such file, not for this user, or a name that leaves the cache.
    """
    for source in sources:
        for name in part_names(source.file):
            client.check_names(source.repo, name, source.revision)
    models = tuple(_model(source) for source in sources)
    folder = client.cache_folder()
    return Order(models, folder, host.free_disk_bytes(folder))


def check_room(order: Order) -> None:
    """Check that the disk has enough space.

    Raises:
        GgufspecError: it has not; names the needed and the free space.
    """
    if order.missing_bytes > order.free_bytes:
        raise GgufspecError(
            f"{of_download(order.missing_bytes)} have to be downloaded, and only "
            f"{of_download(order.free_bytes)} are free on the disk of {order.folder}",
            "make room there, or set HF_HOME to a folder on a larger disk",
        )


def fetch(order: Order, on_event: Emit | None = None) -> Order:
    """Download and verify the files of an order, one after the other; return it with every ``path`` set.

    ``on_event`` gets ``{"event": "fetching", "file": …, "bytes": …, "total": …}``, the same with ``checking``, and with
    ``waiting``, which adds ``seconds`` and ``why``.

    Raises:
        UnreachableError: the connection was lost; the next call resumes there.
        DamagedError: bytes differ from the hub's; they are removed.
        GgufspecError: the disk is full or cannot be written, or the hub refuses.
    """
    check_room(order)
    models: list[tuple[Item, ...]] = []
    with _disk(order.folder):
        for items in order.models:
            models.append(tuple(_File(item, on_event).have() for item in items))
            # Only now that all parts are complete; otherwise a complete older version would be lost.
            client.point(items[0].source.repo, items[0].source.revision, items[0].commit)
    return replace(order, models=tuple(models))


# ---- what is in the cache --------------------------------------------------------------------------------------------


def _model(source: HubFile) -> tuple[Item, ...]:
    kept = [replace(source, file=name) for name in part_names(source.file)]
    if source.revision and client.COMMIT.fullmatch(source.revision) and here(source):
        return tuple(map(_kept, kept))
    try:
        found = client.remote_parts(source.repo, [part.file for part in kept], source.revision)
    except client.UnreachableError:
        if here(source) is None:
            raise
        return tuple(map(_kept, kept))
    if not all(client.COMMIT.fullmatch(part.commit) for part in found):
        raise client.lacks("commit", str(source))
    return tuple(map(_item, kept, found))


def _item(source: HubFile, found: client.Remote) -> Item:
    blob = client.blob_path(source.repo, found.etag)
    size = found.size_bytes
    path = client.cached_file(source.repo, source.file, found.commit) or (blob if blob.is_file() else None)
    present = size if path else min(_size(_partial(blob)), size)
    return Item(source, found.commit, found.etag, size, found.url, present, path)


def _kept(source: HubFile) -> Item:
    """Make an item from the cache alone: a blob is named by its etag."""
    path = client.cached_file(source.repo, source.file, source.revision)
    assert path is not None
    commit = path.parents[len(Path(source.file).parts) - 1].name
    etag = path.readlink().name if path.is_symlink() else ""
    return Item(source, commit, etag, _size(path), present_bytes=_size(path), path=path)


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.ggufspec.incomplete")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# ---- downloading -----------------------------------------------------------------------------------------------------


class _File:
    def __init__(self, item: Item, on_event: Emit | None) -> None:
        self._item = item
        self._name = str(item.source)
        self._on_event = on_event
        self._reported_s = 0.0
        self._received = 0

    def have(self) -> Item:
        item, source = self._item, self._item.source
        if item.path is not None:
            self._verify(item.path)
        else:
            if item.size_bytes > client.largest_by_http_bytes():
                raise GgufspecError(
                    f"{self._name} has {of_download(item.size_bytes)}, and the hub serves such files to its own "
                    "downloader alone",
                    f"hf download {source.repo} {source.file}, then the same command again",
                )
            with client.locked(source.repo, item.etag):
                self._fill()
        wanted = source.repo, source.file, item.commit
        path = client.cached_file(*wanted) or client.link(*wanted)
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{self._name} is not a GGUF file", NOT_GGUF)
        return replace(item, path=path, verified=item.sha256 is not None, downloaded_bytes=self._received)

    def _fill(self) -> None:
        """Complete the blob while the lock is held."""
        blob = client.blob_path(self._item.source.repo, self._item.etag)
        if blob.is_file():  # another process downloaded it
            self._verify(blob)
            return
        blob.parent.mkdir(parents=True, exist_ok=True)
        part = _partial(blob)
        with part.open("ab", buffering=0) as file:
            if file.tell() > self._item.size_bytes:
                file.truncate(0)
            self._stream(file)
            os.fsync(file.fileno())  # the renamed file is complete even after a power failure
        self._verify(part)
        part.replace(blob)

    def _stream(self, file: IO[bytes]) -> None:
        """Append what is missing; a broken or silent connection is resumed."""
        tries, most = 0, _length(file)
        while _length(file) < self._item.size_bytes:
            try:
                self._read(file)
            except client.OfflineError:
                raise
            except client.UnreachableError as error:
                if _length(file) > most:  # a restart that got less far is no progress
                    tries, most = 0, _length(file)
                if tries == len(_PAUSES_S):
                    raise
                pause_s = max(_PAUSES_S[tries], error.wait_s)
                if pause_s > _MOST_PAUSE_S:
                    raise
                tries += 1
                self._report("waiting", _length(file), seconds=pause_s, why=error.message)
                time.sleep(pause_s)

    def _read(self, file: IO[bytes]) -> None:
        """Request all missing bytes once."""
        begin, size = _length(file), self._item.size_bytes
        headers = {"Range": f"bytes={begin}-{size - 1}"} if begin else {}
        with client.get(self._item.url, headers, hub=True, shown=self._name) as reply:
            if reply.status_code in (408, 429) or reply.status_code >= 500:
                raise client.busy(self._name, reply.status_code, reply.headers)
            if reply.status_code == 416 or (begin and reply.status_code == 200):  # the server does not support ranges
                file.truncate(0)
                begin = 0
            elif reply.status_code == 206 and begin:
                if not reply.headers.get("content-range", "").startswith(f"bytes {begin}-"):
                    raise ModelError(f"the hub sends other bytes of {self._name} than requested", "check HF_ENDPOINT")
            elif reply.status_code != 200:
                hint = f"see {client.page(self._item.source.repo)}, and check HF_TOKEN, or: hf auth login"
                raise ModelError(f"the hub refuses {self._name} ({reply.status_code})", hint)
            length = reply.headers.get("content-length", "")
            if reply.status_code == 200 and length.isdigit() and int(length[:_DIGITS]) != size:
                raise ModelError(
                    f"{self._name} has {size:,} bytes, and the hub sends {int(length[:_DIGITS]):,}",
                    "sign in to the network if it asks for that (a hotel's, say), and check HF_ENDPOINT",
                )
            done = self._append(file, begin, reply.iter_raw()) if reply.status_code != 416 else 0
        if done < size:
            raise client.BrokenConnectionError(
                f"the connection broke at {done:,} of {size:,} bytes of {self._name}", "the same command resumes"
            )

    def _append(self, file: IO[bytes], done: int, chunks: Iterator[bytes]) -> int:
        """Write incoming chunks; return the file's length. Gives up on a server that sends next to nothing."""
        size, since_s, since_bytes = self._item.size_bytes, time.monotonic(), done
        for chunk in chunks:
            if done + len(chunk) > size:
                raise ModelError(f"the hub sends more of {self._name} than its {size:,} bytes", "try again later")
            left = memoryview(chunk)
            while left:  # when the disk is full, what was written counts
                left = left[file.write(left) :]
            done += len(chunk)
            self._received += len(chunk)
            self._report("fetching", done)
            if done - since_bytes >= _STALL_BYTES:
                since_s, since_bytes = time.monotonic(), done
            elif time.monotonic() - since_s > _STALL_S:
                raise GgufspecError(
                    f"{self._name} is too slow: less than {_STALL_BYTES:,} bytes in {_STALL_S:.0f} s",
                    f"the same command resumes at {done:,} of {size:,} bytes",
                )
        return done

    def _verify(self, path: Path) -> None:
        """Compare a complete file with the hub's digest, or its size without one; remove it if it differs."""
        found, done = hashlib.sha256(), 0
        if self._item.sha256 is None:
            is_whole = _size(path) == self._item.size_bytes
        else:
            with path.open("rb") as file:
                while chunk := file.read(_READ_BYTES):
                    found.update(chunk)
                    done += len(chunk)
                    self._report("checking", done)
            is_whole = found.hexdigest() == self._item.sha256
        if not is_whole:
            _remove(path)
            raise DamagedError(
                f"{self._name} is damaged: its bytes are not those of {self._item.etag} on the hub",
                "it was removed; the same command downloads it again",
            )

    def _report(self, event: str, done: int, **more: object) -> None:
        total, now_s = self._item.size_bytes, time.monotonic()
        seldom = event == "waiting" or done == total or now_s - self._reported_s >= _EVENTS_S
        if self._on_event is not None and seldom:
            self._reported_s = now_s
            self._on_event({"event": event, "file": self._name, "bytes": done, "total": total, **more})


def _length(file: IO[bytes]) -> int:
    return file.seek(0, os.SEEK_END)


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Explain errors of the disk."""
    try:
        yield
    except OSError as error:
        raise GgufspecError(
            f"{error.filename or folder} cannot be read or written: {error.strerror or error}",
            f"df -h {folder}; what was downloaded is kept, and the same command resumes",
        ) from None


def _remove(path: Path) -> None:
    """Remove a file of the cache and the blob it links to."""
    cache = client.cache_folder().resolve()
    while path.is_symlink():
        target = path.parent / path.readlink()
        path.unlink()
        path = target
    if path.resolve().is_relative_to(cache):
        path.unlink(missing_ok=True)
