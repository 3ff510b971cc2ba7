"""Expands local models to a published shape, as ``expand`` in a profile asks.

An expanded model computes the function of the small one at the cost of the shape
(:mod:`ggufspec.models.expansion_file`). It is written in seconds on first use and cached; most of it is holes, which
take no disk space.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from ggufspec import __version__, child
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.files.cache import cache_folder
from ggufspec.llamacpp.quantize import FILE_TYPES, check_type
from ggufspec.models import expansion_file
from ggufspec.models.expansion_file import SHAPES, Model


def parse(expand: str) -> Model:
    """Parse ``SHAPE:TYPE``, such as ``smollm2-360m:F16``.

    Raises:
        UsageError: there is no such shape or type.
    """
    shape, _, kind = expand.partition(":")
    if shape not in SHAPES:
        raise UsageError(f"expand = {expand!r} does not name a shape: write SHAPE:TYPE", "one of " + ", ".join(SHAPES))
    return Model(shape, check_type(kind))


def file_name(stem: str, expand: str) -> str:
    """The name of an expanded model: demo-target-as-smollm2-360m-F16.gguf."""
    model = parse(expand)
    name, _, kind = stem.rpartition("-")
    return f"{name if kind in FILE_TYPES else stem}-as-{model.shape}-{model.type}.gguf"


def place(small: Path, expand: str) -> Path:
    """The path of an expanded model in the cache, whether it exists or not; a changed source has another path.

    Raises:
        UsageError: as :func:`parse`.
        GgufspecError: ``small`` cannot be read.
    """
    try:
        digest = hashlib.sha256(small.read_bytes() + __version__.encode()).hexdigest()[:12]
    except OSError as error:
        raise GgufspecError(f"{small} cannot be read: {error.strerror}", f"ls -l {small}") from None
    return _folder() / digest / file_name(small.stem, expand)


def expanded(small: Path, expand: str, on_event: child.Emit | None = None) -> Path:
    """The expanded model, written if it does not exist; older ones of its name are removed.

    Raises:
        UsageError: as :func:`parse`, or the model does not fit into the shape.
        GgufspecError: it cannot be read, the disk has no room, or the cache cannot be written.
    """
    path = place(small, expand)
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GgufspecError(f"{path} cannot be written: {error.strerror}", f"df -h {_folder().parent}") from None
    model = parse(expand)
    spec = expansion_file.Spec(small, SHAPES[model.shape], model.type, path)
    expansion_file.expand(spec, on_event=on_event)
    for old in _folder().glob(f"*/{path.name}"):
        if old != path:
            with suppress(OSError):
                old.unlink()
                old.parent.rmdir()
    return path


def _folder() -> Path:
    return cache_folder() / "expanded"
