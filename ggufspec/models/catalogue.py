"""Every profile there is, the broken ones too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ggufspec.errors import GgufspecError
from ggufspec.models.profile import Profile, find, known_profiles, load_profile, user_folder


@dataclass(frozen=True, slots=True)
class Listed:
    """A profile of the catalogue that could be parsed; ``mine`` says that it is the user's own."""

    profile: Profile
    path: Path
    mine: bool


@dataclass(frozen=True, slots=True)
class Broken:
    """A file of the catalogue that is not a profile, and why."""

    path: Path
    error: str
    hint: str


def catalogue() -> list[Listed | Broken]:
    """Every profile there is, by name; the user's own in place of a bundled one of that name."""
    found: list[Listed | Broken] = []
    for name in known_profiles():
        path = find(name)
        try:
            found.append(Listed(load_profile(path), path, path.parent == user_folder()))
        except GgufspecError as error:
            found.append(Broken(path, error.message, error.hint))
    return found
