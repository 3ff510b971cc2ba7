"""Expands local models to a published shape, for ``expand`` in a profile: a small model's text at a larger one's cost.

An expanded model (:mod:`ggufspec.models.expansion`) is written in seconds at first use and cached; most of it is holes,
which take no disk space (:mod:`ggufspec.models.sparse`).
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ggufspec import __version__, child
from ggufspec.errors import GgufspecError, ModelError, UsageError
from ggufspec.files.cache import cache_folder
from ggufspec.llamacpp.gguf import write_model
from ggufspec.llamacpp.quantize import FILE_TYPES, check_type, quantize, to_blocks, type_keys
from ggufspec.models import expansion, sparse
from ggufspec.models.expansion import Rows, Shape
from ggufspec.models.headers import read_prefix
from ggufspec.models.locate import LocalFile
from ggufspec.models.sparse import Piece

# Numbers of the published models; lab/expansion.py has more.
SHAPES = {
    "smollm2-360m": Shape(960, 32, 15, 5, 2560, 49152, 64),
    "smollm2-draft": Shape(384, 3, 6, 2, 1024, 49152, 64),  # not a published model
}

Content = Callable[[str], list[Rows]]


def parse(expand: str) -> tuple[str, str]:
    """Parse ``SHAPE:TYPE``, such as ``smollm2-360m:F16``; UsageError if there is no such shape or type."""
    shape, _, kind = expand.partition(":")
    if shape not in SHAPES:
        raise UsageError(f"expand = {expand!r} does not name a shape: write SHAPE:TYPE", "one of " + ", ".join(SHAPES))
    return shape, check_type(kind)


def file_name(stem: str, expand: str) -> str:
    """Return the name of an expanded model: demo-target-as-smollm2-360m-F16.gguf."""
    name, _, kind = stem.rpartition("-")
    return f"{name if kind in FILE_TYPES else stem}-as-{'-'.join(parse(expand))}.gguf"


def place(small: Path, expand: str) -> Path:
    """Return the path of an expanded model in the cache, existing or not; a changed source has another path.

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
    """Return the expanded model, written if it does not exist; older ones of its name are removed.

    Raises:
        UsageError: as :func:`parse`, or the model does not fit into the shape.
        GgufspecError: it cannot be read, the disk has no space, or the cache cannot be written.
    """
    path = place(small, expand)
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GgufspecError(f"{path} cannot be written: {error.strerror}", f"df -h {_folder().parent}") from None
    shape, kind = parse(expand)
    child.call(__name__, Spec(small, SHAPES[shape], kind, path), Result, on_event=on_event)
    for old in _folder().glob(f"*/{path.name}"):
        if old != path:
            with suppress(OSError):
                old.unlink()
                old.parent.rmdir()
    return path


def _folder() -> Path:
    return cache_folder() / "expanded"


# ---- in the child ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spec:
    """A llama model to expand, and the file to write; ``type`` is one of ``FILE_TYPES``."""

    small: Path
    shape: Shape
    type: str
    path: Path


@dataclass(frozen=True, slots=True)
class Result:
    """Empty: the result is the file."""


def run(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Result:
    """Write the model in F16, in this process; llama.cpp converts it to another type."""
    small, big = expansion.read(spec.small), spec.shape
    content = functools.partial(expansion.content, small, big, expansion.fit(small, big, spec.type))
    shapes = expansion.tensors(small, big)
    kinds = {name: "f32" if len(shape) == 1 else "f16" for name, shape in shapes.items()}
    keys = expansion.metadata(small, big) | type_keys("F16")
    written = sum(2 * len(rows) * numbers.shape[1] for name in kinds for rows, numbers in content(name))
    sparse.check_room(spec.path.parent, written, spec.path.name)
    with sparse.appearing(spec.path) as part:
        half = part if spec.type == "F16" else part.with_name("f16.gguf")
        tensors = [(name, kinds[name], shape) for name, shape in shapes.items()]
        write_model(half, keys, tensors, like=small.header, vocabulary=big.vocab)
        parsed, _, _ = read_prefix(LocalFile.at(half))
        starts = {tensor.name: parsed.data_offset + tensor.offset for tensor in parsed.tensors}
        sparse.fill(half, spec.path.name, pieces(content, kinds, starts), emit, stopping)
        if half != part:
            quantize(half, part, spec.type, threads=0, stopping=stopping)
    return Result()


def pieces(content: Content, kinds: Mapping[str, str], starts: Mapping[str, int]) -> Iterator[Piece]:
    """Yield what is written of all tensors, given their types as ggml spells them and their offsets in the file."""
    for name, kind in kinds.items():
        for rows, numbers in content(name):
            if kind == "f16" and np.abs(numbers).max() > np.finfo(np.float16).max:
                raise ModelError(f"{name} has weights that F16 cannot hold")
            blocks = memoryview(to_blocks(kind, numbers))
            row = len(blocks) // len(numbers)
            for run in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(rows) != 1) + 1):
                place = starts[name] + int(rows[run[0]]) * row
                if len(numbers) == 1:
                    yield from sparse.repeated(place, bytes(blocks), len(run) * row)
                else:
                    yield place, blocks[run[0] * row : (run[-1] + 1) * row]
