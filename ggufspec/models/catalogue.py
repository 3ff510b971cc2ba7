"""Which profiles have a draft for a model, told by the names of their files; no header is read.

A name is a promise and no proof: what is suggested here is judged by :mod:`ggufspec.models.compat` when it is used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ggufspec.errors import GgufspecError
from ggufspec.models.header import ModelHeader
from ggufspec.models.profile import ModelSource, Profile, find, known_profiles, load_profile, user_folder

_MOST_NAMED = 3

# Models that share a vocabulary, by how their files are named; the first that matches. The distilled R1 models have
# BOS and end tokens of their own, and Qwen3.5 has another vocabulary than Qwen3.
_FAMILIES = tuple(
    (family, re.compile(pattern, re.IGNORECASE))
    for family, pattern in (
        ("R1 on Llama", r"r1-distill-llama"),
        ("R1 on Qwen", r"r1-distill-qwen"),
        ("Llama 3", r"llama-?_?3(?:\.[0-3])?(?![.\d])"),
        ("Qwen2.5", r"qwen-?_?2\.5|qwq"),
        ("Qwen3", r"qwen-?_?3(?![.\d])"),
        ("Gemma 3", r"gemma-?_?3(?![n.\d])"),
        ("Gemma", r"gemma-(?:1\.1-)?[27]b"),
        ("Mistral Small 3", r"mistral-small-(?:3|24b)"),
        ("GPT-2", r"gpt-?2"),
    )
)


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


def family(*names: str) -> str:
    """The family that names of a model tell, or empty."""
    return next((family for family, words in _FAMILIES if any(words.search(name) for name in names)), "")


def drafts_for(header: ModelHeader) -> tuple[str, ...]:
    """Drafts that profiles have for models of the same family, as ``-hfd`` takes them, each once."""
    wanted = family(header.name, *_said(header))
    if not wanted:
        return ()
    found: dict[str, None] = {}
    for entry in catalogue():
        if isinstance(entry, Listed) and (draft := entry.profile.draft) and draft.repo:
            names = [name for model in (entry.profile.target, draft) for name in (model.repo, model.file) if name]
            if family(*names) == wanted and not _same(header, draft):
                found[f"{draft.repo}:{draft.file}"] = None
    return tuple(found)[:_MOST_NAMED]


def _same(header: ModelHeader, model: ModelSource) -> bool:
    return Path(model.file).name == header.name


def _said(header: ModelHeader) -> list[str]:
    """What the header itself calls its model."""
    keys = ("general.name", "general.basename")
    return [value for key in keys if isinstance(value := header.metadata.get(key), str)]
