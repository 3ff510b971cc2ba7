"""Small models of this machine expanded to a published shape: what ``expand`` in a profile means.

An expanded model says what the small one says, at the cost of the shape (:mod:`ggufspec.models.expansion_file`). It is
made in seconds when it is first wanted and kept in the cache; most of it is holes, which take no disk.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from ggufspec import __version__, worker
from ggufspec.cache import cache_folder
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.files import replacing
from ggufspec.llamacpp.quantize import FILE_TYPES, check_type
from ggufspec.models.expansion_file import SHAPES, Model, make


def parse(expand: str) -> Model:
    """``SHAPE:TYPE``, ``smollm2-360m:F16`` say.

    Raises:
        UsageError: there is no such shape or type.
    """
    shape, _, kind = expand.partition(":")
    if shape not in SHAPES:
        raise UsageError(f"expand = {expand!r} does not name a shape: write SHAPE:TYPE", "one of " + ", ".join(SHAPES))
    return Model(shape, check_type(kind))


def file_name(stem: str, expand: str) -> str:
    """What the expanded model of a file without its ending is called: demo-target-as-smollm2-360m-F16.gguf.

    Raises:
        UsageError: as :func:`parse`.
    """
    model = parse(expand)
    name, _, kind = stem.rpartition("-")
    return f"{name if kind in FILE_TYPES else stem}-as-{model.shape}-{model.type}.gguf"


def place(small: Path, expand: str) -> Path:
    """Where ``small`` is kept at another shape, or will be; a changed source has another place.

    Raises:
        UsageError: as :func:`parse`.
        GgufspecError: ``small`` cannot be read.
    """
    try:
        digest = hashlib.sha256(small.read_bytes() + __version__.encode()).hexdigest()[:12]
    except OSError as error:
        raise GgufspecError(f"{small} cannot be read: {error.strerror}", f"ls -l {small}") from None
    return _folder() / digest / file_name(small.stem, expand)


def expanded(small: Path, expand: str, on_event: worker.Emit | None = None) -> Path:
    """The expanded model, made where it is not there yet; older ones of its name go.

    Args:
        small: the model that it says the same as.
        expand: ``SHAPE:TYPE``.
        on_event: told how far it is: :func:`ggufspec.models.sparse.fill`.

    Raises:
        UsageError: as :func:`parse`, or the model does not fit into the shape.
        GgufspecError: it cannot be read, the disk has no room, or the cache cannot be written.
    """
    path = place(small, expand)
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:  # another process may write it too
            make(small, parse(expand), new, on_event=on_event)
    except OSError as error:
        raise GgufspecError(f"{path} cannot be written: {error.strerror}", f"df -h {_folder().parent}") from None
    for old in _folder().glob(f"*/{path.name}"):
        if old != path:
            with suppress(OSError):
                old.unlink()
                old.parent.rmdir()
    return path


def _folder() -> Path:
    return cache_folder() / "expanded"
