"""Atomic writes, scratch folders and locks."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ggufspec.errors import GgufspecError

_MAX_NAME_BYTES = 120  # maximum without a suffix; file systems allow 255 with it
_SCRATCH = "ggufspec-scratch-"
_TRIES = 20  # maximum number of new folders to try, because another process may remove one before it is locked


def as_file_name(text: str) -> str:
    """Convert a name to a safe part of a file name: letters, digits and ``_ - . +``, without a leading dot or dash."""
    safe = re.sub(r"[^\w.+-]+", "-", text).lstrip("-.").encode("utf-8", "ignore")
    return safe[:_MAX_NAME_BYTES].decode("utf-8", "ignore") or "unnamed"


def check_writable(path: Path) -> None:
    """Raise GgufspecError if a result cannot be written to ``path``; call this before an hour-long run."""
    try:
        if _in_place(path):
            if path.is_fifo():  # opening it would wait for a reader
                return
            existed = path.exists()
            path.open("a").close()
            if not existed:
                path.resolve().unlink()  # for a dangling link, the target just created
        else:
            if path.exists():
                path.open("a").close()
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise _not_written(path, error) from None


def write_whole(path: Path, text: str) -> None:
    """Write ``text``, replacing a regular file only when the new one is complete; raise GgufspecError on failure.

    Links, pipes and devices are written in place, because ``/dev/stdout`` may be any of them.
    """
    try:
        if _in_place(path):
            path.write_text(text, encoding="utf-8", errors="replace")
            return
        with replacing(path) as new:
            new.write_text(text, encoding="utf-8", errors="replace")
            if path.exists():
                new.chmod(path.stat().st_mode)
    except OSError as error:
        raise _not_written(path, error) from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes ``path`` if the block succeeds; raise OSError if writing fails."""
    with scratch(path.parent) as folder:
        new = folder / path.name
        yield new
        new.replace(path)


@contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """Create a folder in ``parent`` (default: the temporary folder) and remove it at the end of the block.

    Folders that killed processes left there are removed, too. Raises OSError if ``parent`` cannot be written.
    """
    parent = parent or Path(tempfile.gettempdir())
    for abandoned in parent.glob(f"{_SCRATCH}????????"):
        with contextlib.suppress(OSError):
            if (descriptor := _lock_folder(abandoned)) is not None:
                shutil.rmtree(abandoned, ignore_errors=True)
                os.close(descriptor)
    path, descriptor = _new_scratch(parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def _new_scratch(parent: Path) -> tuple[Path, int | None]:
    refusals = []
    for _ in range(_TRIES):
        path = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=parent))
        try:
            return path, _lock_folder(path)
        except OSError as error:  # another process took the not-yet-locked folder for an abandoned one
            refusals.append(error)
    raise refusals[-1]


def _lock_folder(path: Path) -> int | None:
    """Lock this user's folder until the returned descriptor is closed; return None if locks are unavailable.

    Raises:
        OSError: another process or thread holds the lock, or the folder is gone or belongs to another user.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        folder = os.fstat(descriptor)
        if folder.st_uid != os.getuid():
            raise PermissionError(errno.EACCES, "another user's folder", str(path))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(folder, path.stat()):
            raise FileNotFoundError(errno.ENOENT, "removed meanwhile", str(path))
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, (PermissionError, BlockingIOError, FileNotFoundError)):
            raise
        return None
    return descriptor


@contextmanager
def locked(path: Path, timeout_s: float = 0.0) -> Iterator[None]:
    """Hold this user's lock for ``path``; raise TimeoutError if another process holds it longer than ``timeout_s``.

    The lock file is in the temporary folder, out of sight and on a file system that supports locks. On a system without
    locks the block runs unlocked.
    """
    from filelock import FileLock

    identity = f"{os.path.realpath(path)} {os.path.expanduser('~')}"  # noqa: PTH111  # Path.home() may fail
    name = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    lock = FileLock(Path(tempfile.gettempdir()) / f"ggufspec-{name}.lock")
    try:
        lock.acquire(timeout=timeout_s)
    except TimeoutError:
        raise
    except OSError:
        pass
    try:
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):
                Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()


def _in_place(path: Path) -> bool:
    return path.is_symlink() or (path.exists() and not path.is_file())


def _not_written(path: Path, error: OSError) -> GgufspecError:
    return GgufspecError(f"{path} cannot be written: {error.strerror}", "choose another file, or free some space")
