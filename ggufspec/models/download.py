"""Downloads models from the hub into its cache: resumable, in parallel, and verified before they are used.

Data is appended to ``ETAG.ggufspec.incomplete`` beside its blob, and becomes the blob when its digest is the hub's, so
that an interrupted download leaves the beginning of the file. huggingface_hub provides the lock, the client and the
cache; its own downloads start again each time (``_download_to_tmp_and_move`` in file_download.py) and serve only files
that are too large for plain HTTP.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ggufspec.errors import GgufspecError, ModelError, StopError
from ggufspec.hardware import host
from ggufspec.models import hub
from ggufspec.models.files import part_names
from ggufspec.models.hub import HubFile
from ggufspec.worker import Emit

_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # between tries without progress
_MOST_PAUSE_S = 300.0  # that the hub may ask for; its limits are per five minutes
_GRACE_S = 2.0  # for threads to end after Ctrl-C; their files are consistent at any moment
_EVENTS_S = 0.1
_LOOK_S = 0.2
_STALL_S, _STALL_BYTES = 60.0, 60_000
_READ_BYTES = 1 << 20
_DIGITS = 20  # of a plausible length
_SHA1 = _COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class DamagedError(ModelError):
    """The bytes differ from the hub's digest; they were removed."""


@dataclass(frozen=True, slots=True)
class Item:
    """One file, before its download and after it.

    Args:
        source: which file.
        commit: the version that ``revision`` means.
        etag: what the hub calls its contents: the SHA-256 of a large file, git's SHA-1 of a small one.
        size_bytes: of the whole.
        url: empty if the hub was not asked.
        present_bytes: on this machine before the download.
        path: set if the file is complete.
        sha256: of its contents, if known.
        verified: whether its bytes were compared with the hub's digest.
        downloaded_bytes: received in this download.
    """

    source: HubFile
    commit: str
    etag: str
    size_bytes: int
    url: str = ""
    present_bytes: int = 0
    path: Path | None = None
    sha256: str | None = None
    verified: bool = False
    downloaded_bytes: int = 0

    @property
    def missing_bytes(self) -> int:
        """Bytes to download."""
        return self.size_bytes - self.present_bytes


@dataclass(frozen=True, slots=True)
class Order:
    """Files to download, by model, with all parts of a split one; the disk of ``folder`` has ``free_bytes``."""

    models: tuple[tuple[Item, ...], ...]
    folder: Path
    free_bytes: int

    @property
    def items(self) -> tuple[Item, ...]:
        """All files."""
        return tuple(item for model in self.models for item in model)

    @property
    def missing_bytes(self) -> int:
        """Bytes to download; a file that two models share counts once."""
        return sum({(item.source.repo, item.etag): item.missing_bytes for item in self.items}.values())


def here(source: HubFile) -> Path | None:
    """The first part of a model, if all parts are in the cache. No network.

    Raises:
        ModelError: its name leaves the repository.
    """
    paths = [hub.cached_file(source.repo, name, source.revision) for name in part_names(source.file)]
    return paths[0] if all(paths) else None


def look(sources: Sequence[HubFile]) -> Order:
    """Ask the hub for versions and sizes, one request per part, and look in the cache; nothing is downloaded.

    If the hub is unreachable, a model in the cache is taken as it is.

    Raises:
        UnreachableError: there is no network.
        ModelError: no such file, not for this user, or a name that leaves the cache.
    """
    names = [(source, name) for source in sources for name in part_names(source.file)]
    for source, name in names:
        hub.check_names(source.repo, name, source.revision)
    models = tuple(_model(source) for source in sources)
    folder = hub.cache_folder()
    return Order(models, folder, host.free_disk_bytes(folder))


def check_room(order: Order) -> None:
    """Check that the disk has room.

    Raises:
        GgufspecError: names what is needed and what is free.
    """
    if order.missing_bytes > order.free_bytes:
        raise GgufspecError(
            f"{shown_size(order.missing_bytes)} have to be downloaded, and only "
            f"{shown_size(order.free_bytes)} are free on the disk of {order.folder}",
            "make room there, or set HF_HOME to a folder on a larger disk",
        )


def shown_size(size: float) -> str:
    """Bytes in powers of 1000, as disks and downloads are sold."""
    power = 0
    while size >= 999.95 and power < 4:
        size, power = size / 1000, power + 1
    return f"{size:.{min(power, 1)}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def fetch(order: Order, on_event: Emit | None = None) -> Order:
    """Download and verify the files of an order, each model in a thread of its own.

    Args:
        order: from :func:`look`.
        on_event: called from threads, one at a time, with ``{"event": "fetching", "file": …, "bytes": …, "total": …}``,
            the same with ``checking``, and with ``waiting``, which adds ``seconds`` and ``why``.

    Returns:
        The order with every ``path`` set.

    Raises:
        UnreachableError: the connection was lost; the next call resumes there.
        DamagedError: bytes differ from the hub's; they are removed.
        GgufspecError: the disk is full or cannot be written, or the hub refuses.
    """
    check_room(order)
    run = _Run(on_event)
    threads = [
        threading.Thread(target=run.model, args=(index, items), daemon=True) for index, items in enumerate(order.models)
    ]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not run.stalled():
            for thread in threads:
                thread.join(_LOOK_S)
    except BaseException:  # Ctrl-C
        run.stopping.set()
        until = time.monotonic() + _GRACE_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
        raise
    if run.failures:
        raise run.failures[0]
    with _disk(order.folder):
        for items in order.models:  # only when all parts are complete, or a complete older version would be lost
            hub.point(items[0].source.repo, items[0].source.revision, items[0].commit)
    return replace(order, models=tuple(tuple(run.done[index]) for index in range(len(order.models))))


# ---- what is in the cache --------------------------------------------------------------------------------------------


def _model(source: HubFile) -> tuple[Item, ...]:
    names = part_names(source.file)
    if source.revision and _COMMIT.fullmatch(source.revision) and here(source):
        return tuple(_kept(HubFile(source.repo, name, source.revision)) for name in names)
    items: list[Item] = []
    try:
        revision = source.revision
        for name in names:
            found = hub.remote_file(source.repo, name, revision)
            if not _COMMIT.fullmatch(found.commit):
                raise ModelError(f"the hub gives no commit of {source}", "check HF_ENDPOINT")
            revision = found.commit  # all parts of the first one's
            items.append(_item(HubFile(source.repo, name, source.revision), found))
    except hub.UnreachableError:
        if here(source) is None:
            raise
        return tuple(_kept(HubFile(source.repo, name, source.revision)) for name in names)
    return tuple(items)


def _item(source: HubFile, found: hub.Remote) -> Item:
    blob = hub.blob_path(source.repo, found.etag)
    size = found.size_bytes
    path = hub.cached_file(source.repo, source.file, found.commit) or (blob if blob.is_file() else None)
    present = size if path else min(_size(_partial(blob)), size)
    return _with_digest(Item(source, found.commit, found.etag, size, found.url, present, path))


def _kept(source: HubFile) -> Item:
    """An item from the cache alone: a blob is named by its etag."""
    path = hub.cached_file(source.repo, source.file, source.revision)
    assert path is not None
    commit = path.parents[len(Path(source.file).parts) - 1].name
    etag = path.readlink().name if path.is_symlink() else ""
    return _with_digest(Item(source, commit, etag, _size(path), present_bytes=_size(path), path=path))


def _with_digest(item: Item) -> Item:
    return replace(item, sha256=item.etag if _SHA256.fullmatch(item.etag) else None)


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.ggufspec.incomplete")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Digest:
    """The digest that the hub has of a file: SHA-256 of a large one, git's SHA-1 of a small one."""

    def __init__(self, etag: str, size_bytes: int) -> None:
        self._etag, self._size_bytes = etag, size_bytes
        self.known = bool(_SHA256.fullmatch(etag) or _SHA1.fullmatch(etag))
        self.restart()

    def restart(self) -> None:
        """Start again at the first byte."""
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(b"blob %d\0" % self._size_bytes, usedforsecurity=False)

    def add(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        self._sha256.update(data)
        if _SHA1.fullmatch(self._etag):
            self._git.update(data)

    def matches(self) -> bool:
        """Whether it is the hub's; True if the etag is not a digest."""
        return not self.known or self._etag in (self._sha256.hexdigest(), self._git.hexdigest())

    def sha256(self) -> str | None:
        """In hex; None if the hub has no digest."""
        return self._sha256.hexdigest() if self.known else None


class PartialFile:
    """The beginning of a file, written in order so that a download can resume at any byte, and its digest."""

    def __init__(self, path: Path, digest: Digest) -> None:
        self.path, self.digest = path, digest
        self.read_bytes = self.came_bytes = 0
        self._file = path.open("a+b", buffering=0)
        self.size_bytes = path.stat().st_size
        self._file.seek(0)

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def reread(self) -> int:
        """Add the next bytes from before to the digest; how many."""
        data = self._file.read(_READ_BYTES)
        self.digest.add(data)
        self.read_bytes += len(data)
        return len(data)

    def add(self, data: bytes) -> None:
        """Append ``data``; when the disk is full, what was written counts."""
        left = memoryview(data)
        while left:
            written = self._file.write(left)
            self.digest.add(left[:written])
            self.size_bytes += written
            self.came_bytes += written
            left = left[written:]

    def restart(self) -> None:
        """Discard the content."""
        self._file.truncate(0)
        self.digest.restart()
        self.size_bytes = 0

    def sync(self) -> None:
        """Flush to the disk, so that the renamed file is complete even after a power failure."""
        os.fsync(self._file.fileno())


# ---- downloading -----------------------------------------------------------------------------------------------------


class _Run:
    """The threads of one :func:`fetch`."""

    def __init__(self, on_event: Emit | None) -> None:
        self.stopping = threading.Event()
        self.failures: list[BaseException] = []
        self.done: dict[int, list[Item]] = {}
        self._on_event = on_event
        self._speaking = threading.Lock()
        self._reported: dict[Item, float] = {}
        self._moved: dict[Item, tuple[float, int]] = {}  # time and bytes of the latest progress

    def stalled(self) -> bool:
        """Whether a download is too slow; then all are stopped. A slow server need not be silent."""
        now = time.monotonic()
        for item, (since, done) in tuple(self._moved.items()):
            if now - since > _STALL_S:
                self.failures.append(
                    hub.BrokenConnectionError(
                        f"{item.source} is too slow: less than {_STALL_BYTES:,} bytes in {_STALL_S:.0f} s",
                        f"the same command resumes at {done:,} of {item.size_bytes:,} bytes",
                    )
                )
                self.stopping.set()
                return True
        return False

    @contextmanager
    def _watched(self, item: Item, done: int) -> Iterator[None]:
        """Watch the progress of a file for :meth:`stalled`."""
        self._moved[item] = time.monotonic(), done
        try:
            yield
        finally:
            self._moved.pop(item, None)

    def model(self, index: int, items: Sequence[Item]) -> None:
        """The work of a thread; a failure stops the others, which can resume."""
        self.done[index] = []
        try:
            for item in items:
                self.done[index].append(self.have(item))
        except BaseException as error:
            if not self.stopping.is_set():
                self.failures.append(error)
            self.stopping.set()

    def have(self, item: Item) -> Item:
        """Download and verify one file."""
        source, path, came, sha256 = item.source, item.path, 0, None
        with _disk(hub.cache_folder()):
            if path is not None:
                sha256 = self._verify(item, path)
            elif item.size_bytes > hub.largest_by_http_bytes():
                path, came = self._fetch_by_hub(item), item.size_bytes
                sha256 = self._verify(item, path)
            else:
                with hub.locked(source.repo, item.etag, lambda: self._wait(item)):
                    came, sha256 = self._fill(item)
            named = hub.cached_file(source.repo, source.file, item.commit)
            path = named or hub.link(source.repo, source.file, item.commit)
            with path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise ModelError(f"{source} is not a GGUF file", "choose a file that ends in .gguf")
        return replace(item, path=path, sha256=sha256, verified=sha256 is not None, downloaded_bytes=came)

    def _fill(self, item: Item) -> tuple[int, str | None]:
        """Complete the blob while the lock is held: (bytes downloaded, its SHA-256 if the hub has a digest)."""
        blob = hub.blob_path(item.source.repo, item.etag)
        if blob.is_file():  # another process downloaded it
            return 0, self._verify(item, blob)
        blob.parent.mkdir(parents=True, exist_ok=True)
        with PartialFile(_partial(blob), Digest(item.etag, item.size_bytes)) as part:
            if part.size_bytes > item.size_bytes:
                part.restart()
            while part.reread():
                self._report("checking", item, part.read_bytes)
            with self._watched(item, part.size_bytes):
                self._stream(item, part)
            part.sync()
            if not part.digest.matches():
                part.path.unlink()
                raise _damaged(item)
            part.path.replace(blob)
            return part.came_bytes, part.digest.sha256()

    def _stream(self, item: Item, part: PartialFile) -> None:
        """Append what is missing; a broken or silent connection is resumed."""
        tries, most = 0, part.size_bytes
        while part.size_bytes < item.size_bytes:
            try:
                self._read(item, part)
            except hub.OfflineError:
                raise
            except hub.UnreachableError as error:
                if part.size_bytes > most:  # a restart that got less far is no progress
                    tries, most = 0, part.size_bytes
                if tries == len(_PAUSES_S):
                    raise
                pause_s = max(_PAUSES_S[tries], error.wait_s if isinstance(error, hub.BusyError) else 0.0)
                if pause_s > _MOST_PAUSE_S:
                    raise
                tries += 1
                self._report("waiting", item, part.size_bytes, seconds=pause_s, why=error.message)
                self.stopping.wait(pause_s)

    def _read(self, item: Item, part: PartialFile) -> None:
        """One request for all missing bytes."""
        begin, size, shown = part.size_bytes, item.size_bytes, str(item.source)
        headers = {"Range": f"bytes={begin}-{size - 1}"} if begin else {}
        with hub.get(item.url, headers, hub=True, shown=shown, patient=True) as reply:
            if reply.status in (408, 429) or reply.status >= 500:
                raise hub.busy(shown, reply.status, reply.headers)
            if reply.status == 416 or (begin and reply.status == 200):  # the server has no ranges: start again
                part.restart()
            elif reply.status == 206 and begin:
                if not reply.headers.get("content-range", "").startswith(f"bytes {begin}-"):
                    raise ModelError(f"the hub sends other bytes of {shown} than requested", "check HF_ENDPOINT")
            elif reply.status != 200:
                hint = f"see {hub.page(item.source.repo)}, and check HF_TOKEN, or: hf auth login"
                raise ModelError(f"the hub refuses {shown} ({reply.status})", hint)
            length = reply.headers.get("content-length", "")
            if reply.status == 200 and length.isdigit() and int(length[:_DIGITS]) != size:
                raise ModelError(
                    f"{shown} has {size:,} bytes, and the hub sends {int(length[:_DIGITS]):,}",
                    "sign in to the network if it asks for that (a hotel's, say), and check HF_ENDPOINT",
                )
            for chunk in reply.chunks if reply.status != 416 else ():
                if part.size_bytes + len(chunk) > size:
                    raise ModelError(f"the hub sends more of {shown} than the {size:,} bytes it has", "try again later")
                part.add(chunk)
                self._report("fetching", item, part.size_bytes)
        if part.size_bytes < size:
            raise hub.BrokenConnectionError(
                f"the connection broke at {part.size_bytes:,} of {size:,} bytes of {shown}", "the same command resumes"
            )

    def _fetch_by_hub(self, item: Item) -> Path:
        came = 0

        def more(count: int) -> None:
            nonlocal came
            came += count
            self._report("fetching", item, came)

        with self._watched(item, 0):
            return hub.download_by_hub(item.source.repo, item.source.file, item.commit, more)

    def _verify(self, item: Item, path: Path) -> str | None:
        """The SHA-256 of a complete file, or None if the hub has no digest to compare."""
        digest, done = Digest(item.etag, item.size_bytes), 0
        if not digest.known:
            if _size(path) == item.size_bytes:
                return None
        else:
            with path.open("rb") as file:
                while chunk := file.read(_READ_BYTES):
                    digest.add(chunk)
                    done += len(chunk)
                    self._report("checking", item, done)
            if digest.matches():
                return digest.sha256()
        _remove(path)
        raise _damaged(item)

    def _wait(self, item: Item) -> None:
        """Another process or thread downloads the file."""
        self._report("fetching", item, _size(_partial(hub.blob_path(item.source.repo, item.etag))))

    def _report(self, event: str, item: Item, done: int, **more: object) -> None:
        """Report progress now and then; stop the thread when it is to stop."""
        if self.stopping.is_set():
            raise StopError("the download was stopped")
        now = time.monotonic()
        if (watched := self._moved.get(item)) and (event != "fetching" or not 0 <= done - watched[1] < _STALL_BYTES):
            self._moved[item] = now + float(str(more.get("seconds", 0))), done  # a pause is not a stall
        seldom = event == "waiting" or done == item.size_bytes or now - self._reported.get(item, 0.0) >= _EVENTS_S
        if self._on_event is not None and seldom:
            self._reported[item] = now
            with self._speaking:
                self._on_event(
                    {"event": event, "file": str(item.source), "bytes": done, "total": item.size_bytes, **more}
                )


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


def _damaged(item: Item) -> DamagedError:
    return DamagedError(
        f"{item.source} is damaged: its bytes are not those of {item.etag} on the hub",
        "it was removed; the same command downloads it again",
    )


def _remove(path: Path) -> None:
    """Remove a file of the cache and the blob it links to."""
    cache = hub.cache_folder().resolve()
    while path.is_symlink():
        target = path.parent / path.readlink()
        path.unlink()
        path = target
    if path.resolve().is_relative_to(cache):
        path.unlink(missing_ok=True)
