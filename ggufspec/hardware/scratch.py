"""Folders that last as long as a block; what a process that was killed left of them goes when the next one is made."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "ggufspec-scratch-"


@contextmanager
def folder(parent: Path | None = None) -> Iterator[Path]:
    """A new, empty folder; it is gone after the block, with all that is in it.

    Args:
        parent: where to make it, which is there; the system's folder for temporary files by default.

    Raises:
        OSError: ``parent`` cannot be written.
    """
    parent = parent or Path(tempfile.gettempdir())
    for left in parent.glob(f"{_PREFIX}????????"):
        if (descriptor := _hold(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(descriptor)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True) as name:
        path = Path(name)
        descriptor = _hold(path)
        path.mkdir(exist_ok=True)  # another process may have swept it away before it was held
        try:
            yield path
        finally:
            if descriptor is not None:
                os.close(descriptor)


def _hold(path: Path) -> int | None:
    """A lock of this user's folder, which ends with the process; None where somebody has it or there are none."""
    if not hasattr(os, "getuid"):  # Windows
        return None
    import fcntl

    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
        except OSError:
            pass
        os.close(descriptor)
    return None
