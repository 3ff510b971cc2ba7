"""Cache of headers as files: LOCATOR.json, KEY.gguf for dry runs, and KEY.header*.gguf with the vocabulary.

KEY is a digest of the model files' identities (:attr:`ggufspec.models.locate.ModelFiles.key`), so a changed file has a
different key. LOCATOR is a digest of the files' location, so the last entry is found even if they are unreachable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
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

_MOST_BYTES = 16 << 20  # maximum size of LOCATOR.json in bytes; a model with a thousand tensors takes 0.2 MB
_SCHEMA = f"ggufspec/header@2 {__version__}"


@dataclass(frozen=True, slots=True)
class HeaderCacheEntry:
    """Content of LOCATOR.json, which is written last: if it exists, so do the entry's other files."""

    made_by: str
    key: str
    origin: str
    header: ModelHeader
    loads: bool = False  # True if llama.cpp has loaded the model, without its weights

    def files(self, folder: Path) -> list[Path]:
        """Return the paths of the metadata-only file and of each part's sparse file."""
        parts = self.header.parts
        sparse = [".header.gguf"] if parts == 1 else part_names(f".header-00001-of-{parts:05}.gguf")
        return [folder / f"{self.key}{ending}" for ending in (".gguf", *sparse)]


def load_header(folder: Path, locator: str) -> HeaderCacheEntry | None:
    """Load the last entry for a locator; return None if it is absent, damaged or from another version of ggufspec."""
    try:
        entry = codec.load_json(HeaderCacheEntry, untrusted.read_bytes(_path(folder, locator), _MOST_BYTES))
    except (GgufspecError, ValidationError):
        return None
    is_whole = entry.made_by == _SCHEMA and all(path.is_file() for path in entry.files(folder))
    return entry if is_whole else None


def save_header(
    folder: Path,
    found: ModelFiles,
    header: ModelHeader,
    prefixes: Sequence[bytes],
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write an entry; each file appears only when complete. ``prefixes`` are the header bytes of each part.

    ``check`` is called with the path of the first sparse file; it raises if the header must not be cached.

    Raises:
        ModelError: llama.cpp refuses the header.
        GgufspecError: the folder cannot be written.
    """
    entry = HeaderCacheEntry(_SCHEMA, found.key, found.origin, header, loads=check is not None)
    metadata_only, *sparse = entry.files(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with scratch(folder) as new:
            gguf.write_metadata_only(prefixes, new / metadata_only.name)
            for path, prefix, file in zip(sparse, prefixes, found.files, strict=True):
                (new / path.name).write_bytes(prefix)
                os.truncate(new / path.name, file.size_bytes)
            if check is not None:
                check(new / sparse[0].name)
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
