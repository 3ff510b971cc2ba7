"""Downloads of models from the hub into its cache, which can be resumed and are verified before use.

Data is appended to ``ETAG.ggufspec.incomplete`` in the folder of blobs, so an interrupted download leaves the beginning
of the file. The file becomes a blob when its digest matches the hub's. huggingface_hub provides the lock, client and
cache, but its own downloads start over each time (``_download_to_tmp_and_move`` in file_download.py).
"""

from __future__ import annotations

import functools
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

_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # pauses between attempts without progress
_MOST_PAUSE_S = 300.0  # longest pause that the hub may request, because its rate limits are per five minutes
_EVENTS_S = 0.1
_STALL_S, _STALL_BYTES = 60.0, 60_000
_READ_BYTES = 1 << 20
_DIGITS = 20  # maximum number of digits in a plausible file length
_SHA256 = re.compile(r"[0-9a-f]{64}")


class DamagedError(ModelError):
    """Error for a file whose bytes do not match the hub's digest and were removed."""


@dataclass(frozen=True, slots=True)
class DownloadItem:
    """File before or after its download."""

    source: HubFile
    commit: str  # commit that the source's revision points to
    etag: str  # the hub's identifier of the contents; for a large file, its SHA-256
    size_bytes: int  # size of the complete file
    url: str = ""  # address of the file; empty if the hub was not asked
    present_bytes: int = 0  # bytes on this machine before the download
    path: Path | None = None  # path of the complete file; None if it is not complete
    verified: bool = False  # True if the bytes were compared with the hub's digest
    downloaded_bytes: int = 0  # bytes received in this download

    @property
    def sha256(self) -> str | None:
        return self.etag if _SHA256.fullmatch(self.etag) else None

    @property
    def missing_bytes(self) -> int:
        return self.size_bytes - self.present_bytes


@dataclass(frozen=True, slots=True)
class DownloadOrder:
    """Files to download for each model, including all parts; ``free_bytes`` is the free space on ``folder``'s disk."""

    models: tuple[tuple[DownloadItem, ...], ...]
    folder: Path
    free_bytes: int

    @property
    def items(self) -> tuple[DownloadItem, ...]:
        return tuple(item for model in self.models for item in model)

    @property
    def missing_bytes(self) -> int:
        """Number of bytes to download; a file shared by two models counts once."""
        return sum({(item.source.repo, item.etag): item.missing_bytes for item in self.items}.values())


def cached_model(source: HubFile) -> Path | None:
    """Return a model's first part if all parts are cached. Uses no network; raises ModelError for invalid names."""
    return next(iter(cached_parts(source)), None)


def look_up(sources: Sequence[HubFile]) -> DownloadOrder:
    """Ask the hub for versions and sizes with one request per part, and check the cache, without downloading anything.

    If the hub refuses or does not answer within seconds, a cached model is used as it is, with a warning.

    Raises:
        UnreachableError: there is no network.
        ModelError: there is no such file, this user has no access to it, or its name would leave the cache.
    """
    for source in sources:
        for name in part_names(source.file):
            client.check_names(source.repo, name, source.revision)
    models = tuple(_model(source) for source in sources)
    folder = client.hub_cache_folder()
    return DownloadOrder(models, folder, host.free_disk_bytes(folder))


def check_disk(order: DownloadOrder) -> None:
    """Check that the disk has enough space.

    Raises:
        GgufspecError: the disk is too full; the message states the needed and the free space.
    """
    if order.missing_bytes > order.free_bytes:
        raise GgufspecError(
            f"{of_download(order.missing_bytes)} have to be downloaded, but only "
            f"{of_download(order.free_bytes)} are free on the disk with {order.folder}",
            "make room there, or set HF_HOME to a folder on a larger disk",
        )


def fetch(order: DownloadOrder, on_event: Emit | None = None) -> DownloadOrder:
    """Download and verify the files of an order one after another; return the order with every ``path`` set.

    ``on_event`` is called with ``{"event": "fetching", "file": …, "bytes": …, "total": …}``. The event ``checking`` has
    the same keys; ``waiting``, sent every second of a pause, adds ``seconds`` (time left) and ``why``.

    Raises:
        UnreachableError: the connection was lost; the next call resumes the download.
        DamagedError: the bytes do not match the hub's digest; they are removed.
        GgufspecError: the disk is full or cannot be written, or the hub refuses.
    """
    check_disk(order)
    models: list[tuple[DownloadItem, ...]] = []
    with _disk(order.folder):
        for items in order.models:
            models.append(tuple(_File(item, on_event).have() for item in items))
            # Move the revision only when all parts are complete, or else a complete older version would be lost.
            client.point(items[0].source.repo, items[0].source.revision, items[0].commit)
    return replace(order, models=tuple(models))


# ---- what is in the cache --------------------------------------------------------------------------------------------


def _model(source: HubFile) -> tuple[DownloadItem, ...]:
    parts = [replace(source, file=name) for name in part_names(source.file)]

    def ask() -> tuple[DownloadItem, ...]:
        found = client.remote_parts(source.repo, [part.file for part in parts], source.revision)
        if not all(client.COMMIT.fullmatch(part.commit) for part in found):
            raise client.lacks("commit", str(source))
        return tuple(map(_item, parts, found))

    if cached_model(source) is None:
        return ask()
    kept = tuple(map(_kept, parts))
    is_fixed = source.revision is not None and client.COMMIT.fullmatch(source.revision)
    return kept if is_fixed else client.soon_or(kept, ask, source.repo)


def _item(source: HubFile, found: client.HubLocation) -> DownloadItem:
    blob = client.blob_path(source.repo, found.etag)
    size = found.size_bytes
    path = client.cached_file(source.repo, source.file, found.commit) or (blob if blob.is_file() else None)
    present = size if path else min(_size(_partial(blob)), size)
    return DownloadItem(source, found.commit, found.etag, size, found.url, present, path)


def _kept(source: HubFile) -> DownloadItem:
    """Make an item from the cache without network; in the cache, a blob's name is its ETag."""
    path = client.cached_file(source.repo, source.file, source.revision)
    assert path is not None
    commit = path.parents[len(Path(source.file).parts) - 1].name
    etag = path.readlink().name if path.is_symlink() else ""
    return DownloadItem(source, commit, etag, _size(path), present_bytes=_size(path), path=path)


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.ggufspec.incomplete")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# ---- downloading -----------------------------------------------------------------------------------------------------


class _File:
    def __init__(self, item: DownloadItem, on_event: Emit | None) -> None:
        self._item = item
        self._name = str(item.source)
        self._on_event = on_event
        self._reported_s = 0.0
        self._received = 0

    def have(self) -> DownloadItem:
        item, source = self._item, self._item.source
        if item.path is not None:
            self._verify(item.path)
        else:
            if item.size_bytes > client.largest_by_http_bytes():
                raise GgufspecError(
                    f"{self._name} has {of_download(item.size_bytes)}, and the hub serves files of that size only to "
                    "its own downloader",
                    f"hf download {source.repo} {source.file}, then the same command again",
                )
            with client.blob_lock(source.repo, item.etag):
                self._fill()
        wanted = source.repo, source.file, item.commit
        path = client.cached_file(*wanted) or client.link(*wanted)
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{self._name} is not a GGUF file", NOT_GGUF)
        return replace(item, path=path, verified=item.sha256 is not None, downloaded_bytes=self._received)

    def _fill(self) -> None:
        """Complete the blob; the caller holds its lock."""
        blob = client.blob_path(self._item.source.repo, self._item.etag)
        if blob.is_file():  # another process has downloaded the file
            self._verify(blob)
            return
        blob.parent.mkdir(parents=True, exist_ok=True)
        part = _partial(blob)
        with part.open("ab", buffering=0) as file:
            if file.tell() > self._item.size_bytes:
                file.truncate(0)
            self._stream(file)
            os.fsync(file.fileno())  # ensures that the renamed file is complete even after a power failure
        self._verify(part)
        part.replace(blob)

    def _stream(self, file: IO[bytes]) -> None:
        """Append the missing bytes, resuming after a broken or silent connection."""
        tries, most = 0, _length(file)
        while _length(file) < self._item.size_bytes:
            try:
                self._read(file)
            except client.OfflineError:
                raise
            except client.UnreachableError as error:
                if _length(file) > most:  # only a new maximum is progress, because the server may restart the file
                    tries, most = 0, _length(file)
                if tries == len(_PAUSES_S):
                    raise
                pause_s = max(_PAUSES_S[tries], error.wait_s)
                if pause_s > _MOST_PAUSE_S:
                    raise
                tries += 1
                client.pause(pause_s, functools.partial(self._waits, _length(file), error.message))

    def _read(self, file: IO[bytes]) -> None:
        """Request all missing bytes with one request."""
        begin, size = _length(file), self._item.size_bytes
        headers = {"Range": f"bytes={begin}-{size - 1}"} if begin else {}
        with client.get(self._item.url, headers, hub=True, shown=self._name) as reply:
            if reply.status_code in (408, 429) or reply.status_code >= 500:
                raise client.busy_error(self._name, reply.status_code, reply.headers)
            if reply.status_code == 416 or (begin and reply.status_code == 200):  # the server did not serve the range
                file.truncate(0)
                begin = 0
            elif reply.status_code == 206 and begin:
                if not reply.headers.get("content-range", "").startswith(f"bytes {begin}-"):
                    raise ModelError(f"the hub sends the wrong range of {self._name}", "check HF_ENDPOINT")
            elif reply.status_code != 200:
                hint = f"see {client.model_page_url(self._item.source.repo)}, and check HF_TOKEN, or: hf auth login"
                raise ModelError(f"the hub refuses {self._name} ({reply.status_code})", hint)
            length = reply.headers.get("content-length", "")
            if reply.status_code == 200 and length.isdigit() and int(length[:_DIGITS]) != size:
                raise ModelError(
                    f"{self._name} has {size:,} bytes, but the hub sends {int(length[:_DIGITS]):,}",
                    "sign in to the network if it requires that (as in a hotel), and check HF_ENDPOINT",
                )
            done = self._append(file, begin, reply.iter_raw()) if reply.status_code != 416 else 0
        if done < size:
            raise client.BrokenConnectionError(
                f"the connection broke at {done:,} of {size:,} bytes of {self._name}", "the same command resumes"
            )

    def _append(self, file: IO[bytes], done: int, chunks: Iterator[bytes]) -> int:
        """Write incoming chunks and return the file's length; raise an error if the server sends next to nothing."""
        size, since_s, since_bytes = self._item.size_bytes, time.monotonic(), done
        for chunk in chunks:
            if done + len(chunk) > size:
                raise ModelError(f"the hub sends more of {self._name} than its {size:,} bytes", "try again later")
            left = memoryview(chunk)
            while left:  # a nearly full disk may accept only part of a chunk
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
        """Check a complete file's digest, or its size if there is no digest; remove the file if the check fails."""
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
                f"{self._name} is damaged: its bytes do not match {self._item.etag} on the hub",
                "it was removed; the same command downloads it again",
            )

    def _waits(self, done: int, why: str, left_s: float) -> None:
        self._report("waiting", done, seconds=left_s, why=why)

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
    """Convert disk errors to a GgufspecError that explains them."""
    try:
        yield
    except OSError as error:
        raise GgufspecError(
            f"{error.filename or folder} cannot be read or written: {error.strerror or error}",
            f"df -h {folder}; what was downloaded is kept, and the same command resumes",
        ) from None


def _remove(path: Path) -> None:
    """Remove a file from the cache, with the blob it links to."""
    cache = client.hub_cache_folder().resolve()
    while path.is_symlink():
        target = path.parent / path.readlink()
        path.unlink()
        path = target
    if path.resolve().is_relative_to(cache):
        path.unlink(missing_ok=True)
