"""The cache of headers: LOCATOR.json, KEY.gguf for dry runs, KEY.header*.gguf with the vocabulary.

KEY is the digest of the files' identities (:attr:`ggufspec.models.locate.ModelFiles.key`): a changed file has another
key. LOCATOR is the digest of their location, so that the last entry is found when they are unreachable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ValidationError

from ggufspec import __version__
from ggufspec.errors import GgufspecError, ModelError
from ggufspec.files import untrusted
from ggufspec.files.write import scratch
from ggufspec.llamacpp import gguf
from ggufspec.models.header import ModelHeader
from ggufspec.models.locate import ModelFiles, digest, part_names
from ggufspec.schema import codec

_MOST_BYTES = 16 << 20  # most bytes of JSON; a model of a thousand tensors has 0.2 MB
_SCHEMA = f"ggufspec/header@2 {__version__}"


@dataclass(frozen=True, slots=True)
class Entry:
    """Content of LOCATOR.json; written last, so that the entry's other files exist when it does."""

    made_by: str
    key: str
    origin: str
    header: ModelHeader

    def files(self, folder: Path) -> list[Path]:
        """Return the metadata-only file, then the sparse file of each part."""
        parts = self.header.parts
        sparse = [".header.gguf"] if parts == 1 else part_names(f".header-00001-of-{parts:05}.gguf")
        return [folder / f"{self.key}{ending}" for ending in (".gguf", *sparse)]


def load(folder: Path, locator: str) -> Entry | None:
    """Load the last entry of a locator; None if it is absent, damaged or of another version."""
    try:
        entry = codec.load_json(Entry, untrusted.read_bytes(_path(folder, locator), _MOST_BYTES))
    except (GgufspecError, ValidationError):
        return None
    is_whole = entry.made_by == _SCHEMA and all(path.is_file() for path in entry.files(folder))
    return entry if is_whole else None


def save(folder: Path, found: ModelFiles, header: ModelHeader, prefixes: Sequence[bytes]) -> None:
    """Write an entry; each of its files appears when complete. ``prefixes`` are the header's bytes, by part.

    Raises:
        ModelError: llama.cpp refuses the header.
        GgufspecError: the folder cannot be written.
    """
    entry = Entry(_SCHEMA, found.key, found.origin, header)
    metadata_only, *sparse = entry.files(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with scratch(folder) as new:
            gguf.write_metadata_only(prefixes, new / metadata_only.name)
            for path, prefix, file in zip(sparse, prefixes, found.files, strict=True):
                (new / path.name).write_bytes(prefix)
                os.truncate(new / path.name, file.size_bytes)
            path = _path(folder, found.locator)
            text = json.dumps(asdict(entry))  # writes NaN, which pydantic reads but would not write
            if len(text) > _MOST_BYTES:
                raise ModelError(f"the header of {found.origin} is too large", "download it again")
            (new / path.name).write_text(text, encoding="ascii")
            for each in (metadata_only, *sparse, path):
                (new / each.name).replace(each)
    except OSError as error:
        message = f"the header of {found.origin} cannot be written to {folder}: {error.strerror}"
        raise GgufspecError(message, f"df -h {folder.parent}") from None


def _path(folder: Path, locator: str) -> Path:
    return folder / f"{digest(locator)}.json"
