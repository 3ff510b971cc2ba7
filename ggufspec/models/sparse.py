"""Writing of model-sized sparse files, piece by piece.

A hole reads as zeros and takes no disk space. A block of zeros is valid, no kernel's speed depends on the values, and
the page cache gives every page of a hole its own memory. Therefore, a model made of holes takes as long to decode as
the real one. Blocks of random numbers decode no slower (docs/evidence/rehearsal.json).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ggufspec import child
from ggufspec.errors import GgufspecError, StopError
from ggufspec.files.write import replacing
from ggufspec.hardware.host import free_disk_bytes
from ggufspec.llamacpp.quantize import random_blocks
from ggufspec.schema.text import of_download

Piece = tuple[int, bytes | memoryview]
"""Offset in the file, and data to write there."""

_ROOM = 64 << 20  # disk space to leave free, in bytes
_WRITE_BYTES = 16 << 20
_PATTERN_NUMBERS = 256 * 1028  # 257 rows of 1024, so that neighbouring rows of common lengths differ
_STD = 0.02  # standard deviation of random weights, a common value for initialisation
_EVENTS_S = 0.1


def check_room(folder: Path, needed_bytes: int, name: str) -> None:
    """Raise GgufspecError if the disk does not have room for ``needed_bytes``."""
    free, needed_bytes = free_disk_bytes(folder), needed_bytes + _ROOM
    if needed_bytes > free:
        sizes = f"{of_download(needed_bytes)} of disk, but {folder} has {of_download(free)}"
        raise GgufspecError(f"dummy weights for {name} need {sizes}", f"df -h {folder}")


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Wrap :func:`ggufspec.files.write.replacing` and convert an OSError to a GgufspecError with a hint."""
    try:
        with replacing(path) as part:
            yield part
    except OSError as error:
        raise GgufspecError(f"{path} cannot be written: {error.strerror}", f"df -h {path.parent}") from None


def fill(part: Path, name: str, pieces: Iterable[Piece], emit: child.Emit, stopping: threading.Event) -> int:
    """Write pieces to a file that already has its final size; return the disk space that it takes, in bytes.

    Args:
        part: path of the file.
        name: name of the file in progress events.
        pieces: pieces to write, in order of their offsets.
        emit: called with ``{"event": "writing", "file": name, "bytes": …, "of": …}``, at most ten times a second.
        stopping: event that stops the writing early.

    Raises:
        StopError: ``stopping`` was set.
        OSError: the file cannot be written, e.g. because the disk is full.
    """
    size, reported = part.stat().st_size, 0.0
    with part.open("r+b", buffering=0) as file:
        for place, data in pieces:
            if stopping.is_set():
                raise StopError(f"stopped while writing {name}")
            file.seek(place)
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
            if (now := time.monotonic()) - reported > _EVENTS_S:
                emit({"event": "writing", "file": name, "bytes": place + len(data), "of": size})
                reported = now
    return getattr(part.stat(), "st_blocks", part.stat().st_size // 512) * 512  # Windows has no st_blocks


def repeated_bytes(place: int, content: bytes, count: int) -> Iterator[Piece]:
    """Yield pieces that repeat ``content`` for ``count`` bytes, starting at the offset ``place``."""
    view = memoryview(content * max(1, min(_WRITE_BYTES, count) // len(content)))
    for done in range(0, count, len(view)):
        yield place + done, view[: count - done]


def pattern(kind: str) -> bytes:
    """Return several megabytes of random numbers in valid blocks of a tensor type, to be written repeatedly."""
    blocks = random_blocks(kind, _PATTERN_NUMBERS, _STD, seed=0)
    return blocks * max(1, _WRITE_BYTES // len(blocks))
