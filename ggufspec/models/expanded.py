"""Small models expanded to published models' shapes (``expand`` in a profile): same text, at the large model's cost.

An expanded model (:mod:`ggufspec.models.expansion`) is written within seconds on first use and cached. Most of its file
is holes, which take no disk space (:mod:`ggufspec.models.sparse`).
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
from ggufspec.files.cache import cache_folder, writable
from ggufspec.llamacpp.gguf import write_model
from ggufspec.llamacpp.quantize import FILE_TYPES, check_type, to_blocks, type_keys, write_quantised
from ggufspec.models import expansion, sparse
from ggufspec.models.expansion import LlamaShape, Rows
from ggufspec.models.headers import read_prefix
from ggufspec.models.locate import LocalFile
from ggufspec.models.sparse import Piece

# Shapes of published models; lab/expansion.py has more.
SHAPES = {
    "smollm2-360m": LlamaShape(960, 32, 15, 5, 2560, 49152, 64),
    "smollm2-draft": LlamaShape(384, 3, 6, 2, 1024, 49152, 64),  # shape for a draft; no published model has it
}

Content = Callable[[str], list[Rows]]


def parse_expand(expand: str) -> tuple[str, str]:
    """Parse ``SHAPE:TYPE``, such as ``smollm2-360m:F16``; raise UsageError for an unknown shape or type."""
    shape, _, kind = expand.partition(":")
    if shape not in SHAPES:
        raise UsageError(f"expand = {expand!r} does not name a shape: write SHAPE:TYPE", "one of " + ", ".join(SHAPES))
    return shape, check_type(kind)


def expanded_name(stem: str, expand: str) -> str:
    """Return the file name of an expanded model, such as demo-target-as-smollm2-360m-F16.gguf."""
    name, _, kind = stem.rpartition("-")
    return f"{name if kind in FILE_TYPES else stem}-as-{'-'.join(parse_expand(expand))}.gguf"


def place(small: Path, expand: str) -> Path:
    """Return an expanded model's path in the cache, which depends on the source's content; the file may not exist.

    Raises:
        UsageError: as :func:`parse_expand`.
        GgufspecError: ``small`` cannot be read.
    """
    try:
        digest = hashlib.sha256(small.read_bytes() + __version__.encode()).hexdigest()[:12]
    except OSError as error:
        raise GgufspecError(f"{small} cannot be read: {error.strerror}", f"ls -l {small}") from None
    return _folder() / digest / expanded_name(small.stem, expand)


def expanded(small: Path, expand: str, on_event: child.Emit | None = None) -> Path:
    """Return the expanded model's path; if the file does not exist, write it and remove older files with its name.

    Raises:
        UsageError: as :func:`parse_expand`, or the model does not fit into the shape.
        GgufspecError: ``small`` cannot be read, the disk is full, or the cache cannot be written.
    """
    path = place(small, expand)
    if path.is_file():
        return path
    path = writable(_folder()) / path.parent.name / path.name
    path.parent.mkdir(exist_ok=True)
    if path.is_file():  # this process has already written it to its temporary folder
        return path
    shape, kind = parse_expand(expand)
    child.call(__name__, ExpandJob(small, SHAPES[shape], kind, path), ExpandResult, on_event=on_event)
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
class ExpandJob:
    """Llama model to expand, and the file to write; ``type`` is one of ``FILE_TYPES``."""

    small: Path
    shape: LlamaShape
    type: str
    path: Path


@dataclass(frozen=True, slots=True)
class ExpandResult:
    """Empty result, because the job's output is a file."""


def run(spec: ExpandJob, emit: child.Emit, stopping: threading.Event) -> ExpandResult:
    """Write the model as F16 in this process; llama.cpp converts it to other types."""
    small, big = expansion.read_source(spec.small), spec.shape
    content = functools.partial(expansion.content, small, big, expansion.fit_shape(small, big, spec.type))
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
            write_quantised(half, part, spec.type, threads=0, stopping=stopping)
    return ExpandResult()


def pieces(content: Content, kinds: Mapping[str, str], starts: Mapping[str, int]) -> Iterator[Piece]:
    """Yield the pieces to write for all tensors, given their ggml type names and file offsets."""
    for name, kind in kinds.items():
        for rows, numbers in content(name):
            if kind == "f16" and np.abs(numbers).max() > np.finfo(np.float16).max:
                raise ModelError(f"{name} has weights that F16 cannot hold")
            blocks = memoryview(to_blocks(kind, numbers))
            row = len(blocks) // len(numbers)
            for run in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(rows) != 1) + 1):
                place = starts[name] + int(rows[run[0]]) * row
                if len(numbers) == 1:
                    yield from sparse.repeated_bytes(place, bytes(blocks), len(run) * row)
                else:
                    yield place, blocks[run[0] * row : (run[-1] + 1) * row]
