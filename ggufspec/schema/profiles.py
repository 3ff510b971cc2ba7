"""JSON documents of ``ggufspec profiles``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ProfileModel:
    """Model in a profile; None means that a value is unknown."""

    repo: str | None
    file: str
    revision: str | None
    gpu_layers: int | None
    size_bytes: int | None
    layers: int | None
    read: bool = False  # True if bytes and layers come from the model's header, False if from the profile
    approximate: bool = False  # True if the size in the profile is computed or rounded


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """Profile, with an estimate of whether it fits this machine."""

    name: str
    path: str
    mine: bool
    why: str
    source: str
    target: ProfileModel | None
    draft: ProfileModel | None
    settings: dict[str, Any]
    fits: str  # ``whole``, ``partly``, ``no`` (GPUs and RAM together are too small) or ``unknown``
    fits_layers: int | None = None  # target layers that fit on the GPUs next to the whole draft; None without a GPU
    error: str = ""  # reason why the file is not a valid profile
    group: str = ""  # ``reference`` if the profile exists for its published figures and not for use


@dataclass(frozen=True, slots=True)
class ProfilesDocument:
    """Document ``ggufspec/profiles@1``. ``budgets`` holds the bytes that models may use on each device."""

    profiles: tuple[ProfileRow, ...]
    folder: str
    budgets: dict[str, int]
    schema: str = field(default="ggufspec/profiles@1")


@dataclass(frozen=True, slots=True)
class ProfileDocument:
    """Document ``ggufspec/profile@1``. ``compatible`` is the verdict on the pair; None until both headers are read."""

    profile: ProfileRow
    comment: str
    compatible: str | None
    reasons: tuple[str, ...]
    schema: str = field(default="ggufspec/profile@1")


@dataclass(frozen=True, slots=True)
class RemovedDocument:
    """Document ``ggufspec/profile-removed@1``. ``bundled``: True if the name now refers to a bundled profile."""

    name: str
    path: str
    bundled: bool
    schema: str = field(default="ggufspec/profile-removed@1")


@dataclass(frozen=True, slots=True)
class ProfileCheck:
    """Result of checking a profile, which is valid if there are no ``problems``."""

    name: str
    ok: bool
    problems: tuple[str, ...]
    hints: tuple[str, ...]
    warnings: tuple[str, ...]
    target_bytes: int | None
    draft_bytes: int | None


@dataclass(frozen=True, slots=True)
class CheckDocument:
    """Document ``ggufspec/profile-check@1``."""

    checks: tuple[ProfileCheck, ...]
    ok: bool
    schema: str = field(default="ggufspec/profile-check@1")
