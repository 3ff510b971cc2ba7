"""Writes sparse files of a model's size, in pieces.

A hole reads as zeros and takes no disk space, a zero block is a valid block, no kernel depends on the values, and the
page cache gives every page of a hole its own memory: a model of holes decodes at the cost of the real one. Blocks of
random numbers decode no slower (docs/evidence/rehearsal.json).
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
"""An offset in the file and the data to write there."""

_ROOM = 64 << 20  # to leave free on the disk
_WRITE_BYTES = 16 << 20
_PATTERN_NUMBERS = 256 * 1028  # 257 rows of 1024: neighbouring rows of usual lengths differ
_STD = 0.02  # standard deviation of random weights, a usual initialisation
_EVENTS_S = 0.1


def check_room(folder: Path, needed_bytes: int, name: str) -> None:
    """Check that the disk has room for ``needed_bytes``; a GgufspecError if it has not."""
    free, needed_bytes = free_disk_bytes(folder), needed_bytes + _ROOM
    if needed_bytes > free:
        sizes = f"{of_download(needed_bytes)} of disk, and {folder} has {of_download(free)}"
        raise GgufspecError(f"dummy weights for {name} need {sizes}", f"df -h {folder}")


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Run :func:`ggufspec.files.write.replacing`, but turn an OSError into a GgufspecError with a hint."""
    try:
        with replacing(path) as part:
            yield part
    except OSError as error:
        raise GgufspecError(f"{path} cannot be written: {error.strerror}", f"df -h {path.parent}") from None


def fill(part: Path, name: str, pieces: Iterable[Piece], emit: child.Emit, stopping: threading.Event) -> int:
    """Write pieces into a file that has its final size already; return its disk space in bytes.

    Args:
        part: the file.
        name: the file's name in progress events.
        pieces: in order of their offsets.
        emit: called with ``{"event": "writing", "file": name, "bytes": …, "of": …}``, ten times a second.
        stopping: ends it early.

    Raises:
        StopError: it was stopped.
        OSError: e.g. the disk is full.
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
    return getattr(part.stat(), "st_blocks", part.stat().st_size // 512) * 512  # not on Windows


def repeated(place: int, content: bytes, count: int) -> Iterator[Piece]:
    """Yield pieces that repeat ``content`` for ``count`` bytes from ``place`` on."""
    view = memoryview(content * max(1, min(_WRITE_BYTES, count) // len(content)))
    for done in range(0, count, len(view)):
        yield place + done, view[: count - done]


def pattern(kind: str) -> bytes:
    """Return some megabytes of random numbers in valid blocks of a tensor type, for repetition."""
    blocks = random_blocks(kind, _PATTERN_NUMBERS, _STD, seed=0)
    return blocks * max(1, _WRITE_BYTES // len(blocks))
