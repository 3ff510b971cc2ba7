"""Results to files: checked before the run, written whole or not at all."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from ggufspec.errors import GgufspecError

_MOST_NAME_BYTES = 120  # file systems take 255, and more is to follow


def file_name(text: str) -> str:
    """A pair's or a model's name as part of a file's: letters, digits, and - . _ + behind the first of them."""
    safe = re.sub(r"[^\w.+-]+", "-", text).lstrip("-.").encode("utf-8", "ignore")
    return safe[:_MOST_NAME_BYTES].decode("utf-8", "ignore") or "unnamed"


def check_writable(path: Path) -> None:
    """Find out before an hour's run that its result could not be saved.

    Raises:
        GgufspecError: the file cannot be written.
    """
    try:
        if _in_place(path):
            if path.is_fifo():  # opening it would wait for its reader
                return
            existed = path.exists()
            path.open("a").close()
            if not existed:
                path.resolve().unlink()  # of a link to nothing, what it points to
        else:
            if path.exists():
                path.open("a").close()
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise _failed(path, error) from None


def write_whole(path: Path, text: str) -> None:
    """Write ``text``; a regular file that was there stays as it was until the new one is complete.

    A link, a pipe or a device is written in place: ``/dev/stdout`` may be any of them.

    Raises:
        GgufspecError: the disk is full, say.
    """
    try:
        if _in_place(path):
            path.write_text(text, encoding="utf-8", errors="replace")
            return
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        part = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
            part.chmod(path.stat().st_mode if path.exists() else 0o644)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _failed(path, error) from None


def _in_place(path: Path) -> bool:
    return path.is_symlink() or (path.exists() and not path.is_file())


def _failed(path: Path, error: OSError) -> GgufspecError:
    return GgufspecError(f"{path} cannot be written: {error.strerror}", "name another file, or free some space")
