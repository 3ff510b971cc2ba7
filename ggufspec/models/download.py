"""Downloads models from the hub into its cache: resumed, side by side, and verified before they count.

What comes is appended to ``ETAG.ggufspec.incomplete`` beside its blob, so that whatever ends a download leaves the
beginning of the file, and becomes the blob when its digest is the hub's. huggingface_hub has the lock, the client and
the cache; its own downloads start anew each time (``_download_to_tmp_and_move`` in file_download.py), and so serve only
for files that are too large for plain HTTP.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ggufspec.errors import GgufspecError, ModelError, StopError
from ggufspec.hardware import host
from ggufspec.models import hub
from ggufspec.models.files import part_names
from ggufspec.models.hub import HubFile
from ggufspec.models.partial_file import SHA256, Digest, PartialFile
from ggufspec.worker import Emit

_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # between tries that bring nothing
_MOST_PAUSE_S = 300.0  # that the hub may ask for: its limits are per five minutes
_GRACE_S = 2.0  # for threads to end after Ctrl-C; what they leave is sound at any moment
_EVENTS_S = 0.1
_LOOK_S = 0.2
_STALL_S, _STALL_BYTES = 60.0, 60_000
_READ_BYTES = 1 << 20
_DIGITS = 20  # of a length that is one
_COMMIT = re.compile(r"[0-9a-f]{40}")


class DamagedError(ModelError):
    """The bytes are not those that the hub says it has; they were removed."""


@dataclass(frozen=True, slots=True)
class Item:
    """One file to have, of which ``present_bytes`` are here; ``path`` is set where it is whole, verified or not."""

    source: HubFile
    commit: str
    etag: str
    size_bytes: int
    url: str = ""
    present_bytes: int = 0
    path: Path | None = None

    @property
    def missing_bytes(self) -> int:
        """What is to be fetched."""
        return self.size_bytes - self.present_bytes

    @property
    def sha256(self) -> str | None:
        """What the hub says that it has, if it does."""
        return self.etag if SHA256.fullmatch(self.etag) else None


@dataclass(frozen=True, slots=True)
class Order:
    """Files to have, by model; of a split model all parts. On the disk of ``folder``, the cache, are ``free_bytes``."""

    models: tuple[tuple[Item, ...], ...]
    folder: Path
    free_bytes: int

    @property
    def items(self) -> tuple[Item, ...]:
        """All files."""
        return tuple(item for model in self.models for item in model)

    @property
    def missing_bytes(self) -> int:
        """What is to be fetched; what two models share counts once."""
        return sum({(item.source.repo, item.etag): item.missing_bytes for item in self.items}.values())


@dataclass(frozen=True, slots=True)
class Fetched:
    """A file that is here now. ``verified`` says that its bytes were held against the hub's digest of them."""

    source: HubFile
    commit: str
    size_bytes: int
    sha256: str | None
    verified: bool
    path: Path
    downloaded_bytes: int


def here(source: HubFile) -> Path | None:
    """The first part of a model, if all parts are in the cache. No network.

    Raises:
        ModelError: its name leaves the repository.
    """
    paths = [hub.cached_file(source.repo, name, source.revision) for name in part_names(source.file)]
    return paths[0] if all(paths) else None


def look(sources: Sequence[HubFile]) -> Order:
    """Ask the hub for versions and sizes, and the cache for what is there: a request per part, nothing is fetched.

    Without a way to the hub, a model that is here is taken as it is.

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
    """Refuse what the disk cannot hold.

    Raises:
        GgufspecError: says what is needed and what is free.
    """
    if order.missing_bytes > order.free_bytes:
        raise GgufspecError(
            f"{shown_size(order.missing_bytes)} have to be downloaded, and only "
            f"{shown_size(order.free_bytes)} are free on the disk of {order.folder}",
            "make room there, or set HF_HOME to a folder on a larger disk",
        )


def shown_size(size: float) -> str:
    """Bytes for people, in powers of 1000 as disks and downloads are sold."""
    power = 0
    while size >= 999.95 and power < 4:
        size, power = size / 1000, power + 1
    return f"{size:.{min(power, 1)}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def fetch(order: Order, on_event: Emit | None = None) -> tuple[Fetched, ...]:
    """Have the files of an order here and verified, each model in a thread of its own.

    Args:
        order: what :func:`look` found.
        on_event: told of progress, from threads, one at a time: ``{"event": "fetching", "file": …, "bytes": …, "total":
            …}``, the same with ``checking``, and with ``waiting`` which has ``seconds`` and ``why`` too.

    Raises:
        UnreachableError: the hub was lost; what came is kept, and the next call goes on there.
        DamagedError: bytes are not the hub's; they are removed.
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
        for items in order.models:  # not before all parts are there, or an older version that is whole would be lost
            hub.point(items[0].source.repo, items[0].source.revision, items[0].commit)
    return tuple(fetched for index in range(len(order.models)) for fetched in run.done[index])


# ---- what is there -------------------------------------------------------------------------------------------------


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
    return Item(source, found.commit, found.etag, size, found.url, present, path)


def _kept(source: HubFile) -> Item:
    """What the cache alone knows of a file: a blob is named by its etag."""
    path = hub.cached_file(source.repo, source.file, source.revision)
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


# ---- getting it ----------------------------------------------------------------------------------------------------


class _Run:
    """The threads of one :func:`fetch`."""

    def __init__(self, on_event: Emit | None) -> None:
        self.stopping = threading.Event()
        self.failures: list[BaseException] = []
        self.done: dict[int, list[Fetched]] = {}
        self._on_event = on_event
        self._speaking = threading.Lock()
        self._told: dict[Item, float] = {}
        self._moved: dict[Item, tuple[float, int]] = {}  # since when how many bytes of what is being fetched are here

    def stalled(self) -> bool:
        """End all if too few bytes of a file came for too long: a connection need not be silent for that."""
        now = time.monotonic()
        for item, (since, done) in tuple(self._moved.items()):
            if now - since > _STALL_S:
                self.failures.append(
                    hub.BrokenConnectionError(
                        f"{item.source} comes too slowly: less than {_STALL_BYTES:,} bytes in {_STALL_S:.0f} s",
                        f"the same command resumes at {done:,} of {item.size_bytes:,} bytes",
                    )
                )
                self.stopping.set()
                return True
        return False

    @contextmanager
    def _watched(self, item: Item, done: int) -> Iterator[None]:
        """While bytes of a file are to come."""
        self._moved[item] = time.monotonic(), done
        try:
            yield
        finally:
            self._moved.pop(item, None)

    def model(self, index: int, items: Sequence[Item]) -> None:
        """A thread's work; its failure ends the others, which lose nothing by it."""
        self.done[index] = []
        try:
            for item in items:
                self.done[index].append(self.have(item))
        except BaseException as error:
            if not self.stopping.is_set():
                self.failures.append(error)
            self.stopping.set()

    def have(self, item: Item) -> Fetched:
        """Have one file here, verified."""
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
                    raise ModelError(f"{source} is no GGUF file", "choose a file that ends in .gguf")
        return Fetched(source, item.commit, item.size_bytes, sha256, sha256 is not None, path, came)

    def _fill(self, item: Item) -> tuple[int, str | None]:
        """Make the blob: (bytes that came, its digest where the hub has one). The lock is held."""
        blob = hub.blob_path(item.source.repo, item.etag)
        if blob.is_file():  # another process brought it
            return 0, self._verify(item, blob)
        blob.parent.mkdir(parents=True, exist_ok=True)
        with PartialFile(_partial(blob), Digest(item.etag, item.size_bytes)) as part:
            if part.size_bytes > item.size_bytes:
                part.restart()
            while part.reread():
                self._tell("checking", item, part.read_bytes)
            with self._watched(item, part.size_bytes):
                self._stream(item, part)
            part.sync()
            if not part.digest.right():
                part.path.unlink()
                raise _damaged(item)
            part.path.replace(blob)
            return part.came_bytes, part.digest.sha256()

    def _stream(self, item: Item, part: PartialFile) -> None:
        """Append what is missing. A connection that breaks or falls silent is taken up where it ended."""
        tries, most = 0, part.size_bytes
        while part.size_bytes < item.size_bytes:
            try:
                self._read(item, part)
            except hub.OfflineError:
                raise
            except hub.UnreachableError as error:
                if part.size_bytes > most:  # not after a restart that came less far
                    tries, most = 0, part.size_bytes
                if tries == len(_PAUSES_S):
                    raise
                pause_s = max(_PAUSES_S[tries], error.wait_s if isinstance(error, hub.BusyError) else 0.0)
                if pause_s > _MOST_PAUSE_S:
                    raise
                tries += 1
                self._tell("waiting", item, part.size_bytes, seconds=pause_s, why=error.message)
                self.stopping.wait(pause_s)

    def _read(self, item: Item, part: PartialFile) -> None:
        """One request, for all that is missing."""
        begin, size, shown = part.size_bytes, item.size_bytes, str(item.source)
        headers = {"Range": f"bytes={begin}-{size - 1}"} if begin else {}
        with hub.get(item.url, headers, hub=True, shown=shown, patient=True) as reply:
            if reply.status in (408, 429) or reply.status >= 500:
                raise hub.busy(shown, reply.status, reply.headers)
            if reply.status == 416 or (begin and reply.status == 200):  # no ranges here: from the start
                part.restart()
            elif reply.status == 206 and begin:
                if not reply.headers.get("content-range", "").startswith(f"bytes {begin}-"):
                    raise ModelError(f"asked for {shown} from byte {begin:,} the hub sends others", "check HF_ENDPOINT")
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
                self._tell("fetching", item, part.size_bytes)
        if part.size_bytes < size:
            raise hub.BrokenConnectionError(
                f"{shown} broke off at {part.size_bytes:,} of {size:,} bytes", "the same command resumes"
            )

    def _fetch_by_hub(self, item: Item) -> Path:
        came = 0

        def more(count: int) -> None:
            nonlocal came
            came += count
            self._tell("fetching", item, came)

        with self._watched(item, 0):
            return hub.download_by_hub(item.source.repo, item.source.file, item.commit, more)

    def _verify(self, item: Item, path: Path) -> str | None:
        """The digest of a file that is here, or None where the hub has none to hold it against."""
        digest, done = Digest(item.etag, item.size_bytes), 0
        if not digest.known:
            if _size(path) == item.size_bytes:
                return None
        else:
            with path.open("rb") as file:
                while chunk := file.read(_READ_BYTES):
                    digest.add(chunk)
                    done += len(chunk)
                    self._tell("checking", item, done)
            if digest.right():
                return digest.sha256()
        _remove(path)
        raise _damaged(item)

    def _wait(self, item: Item) -> None:
        """Another process is at it, or another thread."""
        self._tell("fetching", item, _size(_partial(hub.blob_path(item.source.repo, item.etag))))

    def _tell(self, event: str, item: Item, done: int, **more: object) -> None:
        """Tell of progress now and then, and end the thread when it is to end."""
        if self.stopping.is_set():
            raise StopError("stopped while fetching")
        now = time.monotonic()
        if (watched := self._moved.get(item)) and (event != "fetching" or not 0 <= done - watched[1] < _STALL_BYTES):
            self._moved[item] = now + float(str(more.get("seconds", 0))), done  # a pause is no stall
        seldom = event == "waiting" or done == item.size_bytes or now - self._told.get(item, 0.0) >= _EVENTS_S
        if self._on_event is not None and seldom:
            self._told[item] = now
            with self._speaking:
                self._on_event(
                    {"event": event, "file": str(item.source), "bytes": done, "total": item.size_bytes, **more}
                )


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Say what the disk refuses."""
    try:
        yield
    except OSError as error:
        raise GgufspecError(
            f"{error.filename or folder} cannot be read or written: {error.strerror or error}",
            f"df -h {folder}; what was downloaded is kept, and the same command resumes",
        ) from None


def _damaged(item: Item) -> DamagedError:
    return DamagedError(
        f"{item.source} is damaged: its bytes are not those of {item.etag}, which the hub has",
        "it was removed: the same again fetches it",
    )


def _remove(path: Path) -> None:
    """Remove a file of the cache and what it links to there."""
    cache = hub.cache_folder().resolve()
    while path.is_symlink():
        target = path.parent / path.readlink()
        path.unlink()
        path = target
    if path.resolve().is_relative_to(cache):
        path.unlink(missing_ok=True)
