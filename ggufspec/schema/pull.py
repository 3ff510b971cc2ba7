"""The JSON document of ``ggufspec pull``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PulledFile:
    """A file of the hub. ``verified`` says that its bytes were held against the hub's digest.

    ``sha256`` is of the bytes; before they are here it is what the hub names, and null where it names none.
    ``present_bytes`` were here before.
    """

    repo: str
    file: str
    revision: str | None
    commit: str
    bytes: int
    sha256: str | None
    verified: bool
    path: str | None
    downloaded_bytes: int
    present_bytes: int


@dataclass(frozen=True, slots=True)
class PullDocument:
    """``ggufspec/pull@1``. ``needed_bytes`` were to be fetched into ``folder``, with ``free_bytes`` on its disk.

    ``heads`` are files of the target's repository that draft for it and were not asked for.
    """

    files: tuple[PulledFile, ...]
    free_bytes: int
    needed_bytes: int
    folder: str
    dry_run: bool
    heads: tuple[str, ...] = ()
    schema: str = field(default="ggufspec/pull@1")
