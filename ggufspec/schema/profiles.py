"""The JSON documents of ``ggufspec profiles``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ProfileModel:
    """One model of a profile; None means unknown."""

    repo: str | None
    file: str
    revision: str | None
    gpu_layers: int | None
    size_bytes: int | None
    layers: int | None
    read: bool = False  # bytes and layers come from its header; otherwise from the profile
    approximate: bool = False  # the profile's bytes are computed or rounded


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One profile."""

    name: str
    path: str
    mine: bool
    why: str
    source: str
    target: ProfileModel | None
    draft: ProfileModel | None
    settings: dict[str, Any]
    fits: str  # ``whole``, ``partly``, ``no`` (not even with the host's memory) or ``unknown``
    fits_layers: int | None = None  # ``-ngl`` of the target next to the whole draft; None without a GPU
    error: str = ""  # why a file is not a profile
    group: str = ""  # ``reference``: exists for its published figures and not for use


@dataclass(frozen=True, slots=True)
class ProfilesDocument:
    """``ggufspec/profiles@1``. ``budgets`` has the bytes that models may take on each device of this machine."""

    profiles: tuple[ProfileRow, ...]
    folder: str
    budgets: dict[str, int]
    schema: str = field(default="ggufspec/profiles@1")


@dataclass(frozen=True, slots=True)
class ProfileDocument:
    """``ggufspec/profile@1``. ``compatible`` is the verdict on the pair, None until both headers are read."""

    profile: ProfileRow
    comment: str
    compatible: str | None
    reasons: tuple[str, ...]
    schema: str = field(default="ggufspec/profile@1")


@dataclass(frozen=True, slots=True)
class RemovedDocument:
    """``ggufspec/profile-removed@1``. ``bundled`` says that the name now means a bundled profile."""

    name: str
    path: str
    bundled: bool
    schema: str = field(default="ggufspec/profile-removed@1")


@dataclass(frozen=True, slots=True)
class ProfileCheck:
    """Result of checking one profile; it is good without ``problems``."""

    name: str
    ok: bool
    problems: tuple[str, ...]
    hints: tuple[str, ...]
    warnings: tuple[str, ...]
    target_bytes: int | None
    draft_bytes: int | None


@dataclass(frozen=True, slots=True)
class CheckDocument:
    """``ggufspec/profile-check@1``."""

    checks: tuple[ProfileCheck, ...]
    ok: bool
    schema: str = field(default="ggufspec/profile-check@1")
