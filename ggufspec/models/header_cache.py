"""The cache of headers: KEY.json, KEY.gguf for dry runs, KEY.header*.gguf with the vocabulary.

KEY is the digest of the files' identities (:attr:`ggufspec.models.files.ModelFiles.key`), so that an entry is never
stale: a changed file has another key. DIGEST.latest has the last key of a locator, for when it cannot be reached.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ValidationError

from ggufspec import __version__, foreign, plain
from ggufspec.errors import GgufspecError, ModelError
from ggufspec.files import replacing, scratch
from ggufspec.llamacpp import gguf
from ggufspec.models.files import ModelFiles, digest, part_names
from ggufspec.models.header import ModelHeader

_MOST_BYTES = 16 << 20  # of JSON; a model of a thousand tensors has 0.2 MB
_MOST_KEY_BYTES = 64
_SCHEMA = f"ggufspec/header@1 {__version__}"


@dataclass(frozen=True, slots=True)
class Entry:
    """KEY.json; written last, so that the entry's other files exist when it does.

    ``sizes`` are those of the other files, by the rest of their names after KEY.
    """

    made_by: str
    key: str
    origin: str
    sizes: dict[str, int]
    header: ModelHeader

    def files(self, folder: Path) -> list[Path]:
        """The metadata-only file, then the sparse file of each part."""
        return [folder / f"{self.key}{ending}" for ending in _endings(self.header.parts)]


def load(folder: Path, key: str) -> Entry | None:
    """The entry, or None if it is absent, damaged or of another version."""
    try:
        entry = plain.load_json(Entry, foreign.read_bytes(folder / f"{key}.json", _MOST_BYTES))
        if (entry.made_by, entry.key) != (_SCHEMA, key):
            return None
        sizes = {path.name.removeprefix(key): path.stat().st_size for path in entry.files(folder)}
    except (OSError, GgufspecError, ValidationError):
        return None
    return entry if sizes == entry.sizes else None


def latest(folder: Path, locator: str) -> Entry | None:
    """The last entry of a locator, or None."""
    key = _last_key(folder, locator)
    return load(folder, key) if re.fullmatch(r"[0-9a-f]{64}", key) else None


def mark_latest(folder: Path, found: ModelFiles) -> None:
    """Make an existing entry the latest of its locator.

    Raises:
        OSError: the folder cannot be written.
    """
    if _last_key(folder, found.locator) == found.key:
        return
    with replacing(folder / f"{digest(found.locator)}.latest") as new:
        new.write_text(found.key, encoding="ascii")


def _last_key(folder: Path, locator: str) -> str:
    try:
        return foreign.read_text(folder / f"{digest(locator)}.latest", _MOST_KEY_BYTES)
    except GgufspecError:
        return ""


def save(folder: Path, found: ModelFiles, header: ModelHeader, prefixes: Sequence[bytes]) -> None:
    """Write an entry; each of its files appears when it is complete.

    Args:
        folder: the cache, created if need be.
        found: the model's files.
        header: the parsed header.
        prefixes: the bytes of the header, by part.

    Raises:
        ModelError: the header is absurdly large, or llama.cpp refuses it.
        GgufspecError: the folder cannot be written.
    """
    endings = _endings(len(prefixes))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with scratch(folder) as new:
            gguf.write_metadata_only(prefixes, new / endings[0])
            for ending, prefix, file in zip(endings[1:], prefixes, found.files, strict=True):
                (new / ending).write_bytes(prefix)
                os.truncate(new / ending, file.size_bytes)
            sizes = {ending: (new / ending).stat().st_size for ending in endings}
            entry = Entry(_SCHEMA, found.key, found.origin, sizes, header)
            text = json.dumps(asdict(entry))  # writes NaN, which pydantic reads but would not write
            if len(text) > _MOST_BYTES:
                raise ModelError(f"the header of {found.origin} is too large", "download it again")
            (new / ".json").write_text(text, encoding="ascii")
            for ending in (*endings, ".json"):
                (new / ending).replace(folder / f"{found.key}{ending}")
        mark_latest(folder, found)
    except OSError as error:
        message = f"the header of {found.origin} cannot be written to {folder}: {error.strerror}"
        raise GgufspecError(message, f"df -h {folder.parent}") from None


def _endings(parts: int) -> list[str]:
    sparse = [".header.gguf"] if parts == 1 else part_names(f".header-00001-of-{parts:05}.gguf")
    return [".gguf", *sparse]
