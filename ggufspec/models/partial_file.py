"""A file that is written in order while its digest is taken, so that a download can end at any byte and go on there."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_READ_BYTES = 1 << 20


class Digest:
    """The digest of a file's bytes in order as the hub has it: SHA-256 of a large file, git's SHA-1 of a small one."""

    def __init__(self, etag: str, size_bytes: int) -> None:
        self._etag, self._size_bytes = etag, size_bytes
        self.known = bool(SHA256.fullmatch(etag) or _SHA1.fullmatch(etag))
        self.restart()

    def restart(self) -> None:
        """Forget all bytes."""
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(b"blob %d\0" % self._size_bytes, usedforsecurity=False)

    def add(self, data: bytes | memoryview) -> None:
        """The next bytes."""
        self._sha256.update(data)
        if _SHA1.fullmatch(self._etag):
            self._git.update(data)

    def right(self) -> bool:
        """Whether it is the hub's; of an etag that is no digest nothing can be said."""
        return not self.known or self._etag in (self._sha256.hexdigest(), self._git.hexdigest())

    def sha256(self) -> str | None:
        """In hex, once :meth:`right`; None where the hub has no digest."""
        return self._sha256.hexdigest() if self.known else None


class PartialFile:
    """A file that is written in order, so that it is the beginning of the whole at any moment, and its digest."""

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
        """Take the next bytes of what was there before into the digest: how many."""
        data = self._file.read(_READ_BYTES)
        self.digest.add(data)
        self.read_bytes += len(data)
        return len(data)

    def add(self, data: bytes) -> None:
        """Append; of what the disk refuses as much is there as it took."""
        left = memoryview(data)
        while left:
            written = self._file.write(left)
            self.digest.add(left[:written])
            self.size_bytes += written
            self.came_bytes += written
            left = left[written:]

    def restart(self) -> None:
        """Throw away what is there."""
        self._file.truncate(0)
        self.digest.restart()
        self.size_bytes = 0

    def sync(self) -> None:
        """To the disk itself: what is renamed after it is whole even when the power fails."""
        os.fsync(self._file.fileno())
