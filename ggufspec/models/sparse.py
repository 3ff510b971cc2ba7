"""Files of a model's size that are mostly holes: room on the disk first, written in pieces, whole or not there.

A hole reads as zeros and takes no disk, a zero block is a block like any other, no kernel looks at the values, and the
page cache gives every page of a hole memory of its own, as it does for a file: what stands on holes decodes at the cost
of the real file. Blocks of random numbers decode no slower (docs/evidence/rehearsal.json).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from ggufspec import worker
from ggufspec.errors import GgufspecError, StopError
from ggufspec.files import replacing
from ggufspec.hardware.host import free_disk_bytes
from ggufspec.llamacpp.quantize import random_blocks

Fill = Literal["holes", "blocks"]
Piece = tuple[int, bytes | memoryview]
"""A place in the file and what is written there."""

_ROOM = 64 << 20  # that must be left on the disk
_WRITE_BYTES = 16 << 20
_PATTERN_NUMBERS = 256 * 1028  # 257 rows of 1024: neighbouring rows of usual lengths differ
_STD = 0.02  # of random weights, a usual initialisation
_TELL_S = 0.1


def check_room(folder: Path, needed_bytes: int, name: str) -> None:
    """Hold what is to be written to what the disk has.

    Raises:
        GgufspecError: there is no room for ``needed_bytes``.
    """
    free = free_disk_bytes(folder)
    if needed_bytes + _ROOM > free:
        raise GgufspecError(
            f"a stand-in for {name} takes {needed_bytes / 1e9:.1f} GB of disk and {folder} has {free / 1e9:.1f}",
            f"df -h {folder}",
        )


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """:func:`ggufspec.files.replacing`, with an error that tells the user what to do.

    Raises:
        GgufspecError: the file cannot be written.
    """
    try:
        with replacing(path) as part:
            yield part
    except OSError as error:
        raise GgufspecError(f"{path} cannot be written: {error.strerror}", f"df -h {path.parent}") from None


def fill(part: Path, name: str, pieces: Iterable[Piece], emit: worker.Emit, stopping: threading.Event) -> int:
    """Write pieces into a file that has its true size already.

    Args:
        part: the file.
        name: as progress is to name it.
        pieces: in order, so that the last one's place tells how far it is.
        emit: told ``{"event": "writing", "file": name, "bytes": …, "of": …}``, ten times a second.
        stopping: ends it early.

    Returns:
        Bytes on the disk.

    Raises:
        StopError: it was stopped.
        OSError: the disk is full, say.
    """
    size, told = part.stat().st_size, 0.0
    with part.open("r+b", buffering=0) as file:
        for place, data in pieces:
            if stopping.is_set():
                raise StopError(f"stopped while writing {name}")
            file.seek(place)
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
            if (now := time.monotonic()) - told > _TELL_S:
                emit({"event": "writing", "file": name, "bytes": place + len(data), "of": size})
                told = now
    return getattr(part.stat(), "st_blocks", part.stat().st_size // 512) * 512  # Windows does not tell


def repeated(place: int, content: bytes, count: int) -> Iterator[Piece]:
    """Pieces of ``count`` bytes from ``place`` on: ``content`` again and again."""
    view = memoryview(content * max(1, min(_WRITE_BYTES, count) // len(content)))
    for done in range(0, count, len(view)):
        yield place + done, view[: count - done]


def pattern(kind: str, seed: int = 0) -> bytes:
    """Some megabytes of random numbers as valid blocks of a tensor type, to be repeated."""
    blocks = random_blocks(kind, _PATTERN_NUMBERS, _STD, seed)
    return blocks * max(1, _WRITE_BYTES // len(blocks))
