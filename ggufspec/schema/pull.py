"""JSON document of ``ggufspec pull``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PulledFile:
    """File on the hub that was downloaded or is to be downloaded."""

    repo: str
    file: str
    revision: str | None
    commit: str
    bytes: int
    sha256: str | None  # the hub's SHA-256 of the file, if the hub provides one
    verified: bool  # True if the bytes were compared with the hub's digest
    path: str | None
    downloaded_bytes: int
    present_bytes: int  # bytes that were already on this machine


@dataclass(frozen=True, slots=True)
class PullDocument:
    """Document ``ggufspec/pull@1``."""

    files: tuple[PulledFile, ...]
    free_bytes: int  # free space on the disk that holds ``folder``
    needed_bytes: int  # bytes to download
    folder: str
    dry_run: bool
    heads: tuple[str, ...] = ()  # draft heads in the target's repository that were not requested
    schema: str = field(default="ggufspec/pull@1")
