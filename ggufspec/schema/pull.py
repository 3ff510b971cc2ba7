"""The JSON document of ``ggufspec pull``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PulledFile:
    """A file of the hub."""

    repo: str
    file: str
    revision: str | None
    commit: str
    bytes: int
    sha256: str | None  # digest of the bytes; before the download the hub's, if it has one
    verified: bool  # the bytes were compared with the hub's digest
    path: str | None
    downloaded_bytes: int
    present_bytes: int  # on this machine before


@dataclass(frozen=True, slots=True)
class PullDocument:
    """``ggufspec/pull@1``."""

    files: tuple[PulledFile, ...]
    free_bytes: int  # on the disk of ``folder``
    needed_bytes: int  # to download
    folder: str
    dry_run: bool
    heads: tuple[str, ...] = ()  # files of the target's repository that draft for it and were not requested
    schema: str = field(default="ggufspec/pull@1")
