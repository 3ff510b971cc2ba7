"""Writes expanded models: the cost of a big model, the text and the acceptance rate of a small one.

The bundled pair, expanded to the shapes of Llama-3-70B and Llama-3-8B, is a pair of 35 GB that is written in seconds
(:mod:`ggufspec.models.expansion`). The model is never in memory, nor written in F16: llama.cpp's dry run gives the type
of each tensor, ggml's quantiser writes the blocks with trained numbers, and the rest is holes, or blocks of random
numbers without effect (:mod:`ggufspec.models.sparse`).
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ggufspec import child
from ggufspec.errors import GgufspecError, ModelError, UsageError
from ggufspec.hardware.host import peak_rss_bytes
from ggufspec.llamacpp.gguf import write_model
from ggufspec.llamacpp.quantize import (
    block_numbers,
    check_type,
    row_bytes,
    tensor_types,
    to_blocks,
    type_keys,
)
from ggufspec.models import expansion, sparse
from ggufspec.models.expansion import Array, Embedded, Equal
from ggufspec.models.expansion_layout import Floats, Shape, fit, read
from ggufspec.models.headers import read_prefix
from ggufspec.models.locate import LocalFile
from ggufspec.models.sparse import Fill, Piece

# The numbers of the published models. The architecture is llama's: Qwen's biases, some kilobytes, are left out.
SHAPES = {
    "llama3-70b": Shape(8192, 80, 64, 8, 28672, 128256, 128, tied=False),
    "llama3-8b": Shape(4096, 32, 32, 8, 14336, 128256, 128, tied=False),
    "llama3.2-1b": Shape(2048, 16, 32, 8, 8192, 128256, 64),
    "qwen2.5-14b": Shape(5120, 48, 40, 8, 13824, 152064, 128, tied=False),
    "qwen2.5-0.5b": Shape(896, 24, 14, 2, 4864, 151936, 64),
    "smollm2-360m": Shape(960, 32, 15, 5, 2560, 49152, 64),
    "mixtral-8x7b": Shape(4096, 32, 32, 8, 14336, 32000, 128, tied=False, experts=8, experts_used=2),
    "smollm2-draft": Shape(384, 3, 6, 2, 1024, 49152, 64),  # of no published model
    # For small machines and tests.
    "small": Shape(1536, 16, 24, 6, 4096, 16384, 64, tied=False),
    "small-draft": Shape(768, 6, 12, 3, 2048, 16384, 64),
    "small-moe": Shape(1024, 12, 16, 4, 1024, 16384, 64, tied=False, experts=8, experts_used=2),
    "tiny": Shape(768, 10, 12, 4, 1024, 5120, 64, tied=False),
    "tiny-draft": Shape(512, 3, 8, 2, 512, 5120, 64),
    "tiny-moe": Shape(768, 9, 12, 4, 1024, 5120, 64, tied=False, experts=8, experts_used=2),
}


@dataclass(frozen=True, slots=True)
class Model:
    """A name in ``SHAPES``, and one of :data:`ggufspec.llamacpp.quantize.FILE_TYPES`."""

    shape: str
    type: str


_CHUNK_NUMBERS = 1 << 21  # built at once
_BESIDE_BYTES = 8192  # of disk for the partial pages at both ends of a run of rows


@dataclass(frozen=True, slots=True)
class Needed:
    """What an expanded model takes.

    Args:
        size_bytes: apparent size; also the RAM that it takes when it runs there, since holes take memory.
        disk_bytes: disk space, rounded up.
        types: the type of each tensor, as ggml spells it.
    """

    size_bytes: int
    disk_bytes: int
    types: dict[str, str]


@dataclass(frozen=True, slots=True)
class Spec:
    """An expanded model to write.

    Args:
        small: the source model, such as one of :func:`ggufspec.models.profile.demo_pair`.
        shape: one of ``SHAPES``, or another that is nowhere smaller than the source.
        type: one of :data:`ggufspec.llamacpp.quantize.FILE_TYPES`.
        path: the file to write or replace; without it only what it would take is computed.
        fill: ``holes`` take no disk space and decode at the same cost as ``blocks`` of random numbers.
        hopeless: give each token another's output row: a confident draft that is never right.
    """

    small: Path
    shape: Shape
    type: str
    path: Path | None = None
    fill: Fill = "holes"
    hopeless: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What it takes, the file, its true disk space, and the peak memory of writing it."""

    needed: Needed
    path: Path | None
    disk_bytes: int
    peak_rss_bytes: int


def expand(spec: Spec, *, on_event: child.Emit | None = None, verbose: bool = False) -> Result:
    """Write an expanded model in a child process; the file appears when it is complete.

    Args:
        spec: the model.
        on_event: called with progress (:func:`ggufspec.models.sparse.fill`).
        verbose: let llama.cpp's log through.

    Raises:
        UsageError: the model does not fit into the shape, there is no such type, or ``path`` is the small model.
        ModelError: it cannot be read, or is no plain llama model.
        GgufspecError: the disk has no room, or cannot be written.
        Interrupted: Ctrl-C.
    """
    return child.call(__name__, spec, Result, on_event=on_event, verbose=verbose)


# ---- in the child ---------------------------------------------------------------------------------------------------


def run(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Result:
    """Expand in this process."""
    file_type = check_type(spec.type)
    if spec.path and spec.path.exists() and spec.small.exists() and spec.path.samefile(spec.small):
        raise UsageError(f"{spec.path} would overwrite the model it is made from", "give the new file another name")
    small = read(spec.small)
    layout = fit(small, spec.shape, file_type)
    tensors = list(expansion.tensors(small, spec.shape, layout, hopeless=spec.hopeless))
    keys = expansion.metadata(small, spec.shape) | type_keys(file_type)

    def write_header(path: Path, types: dict[str, str]) -> None:
        wanted = [(tensor.name, types[tensor.name], tensor.shape) for tensor in tensors]
        write_model(path, keys, wanted, like=small.header, vocabulary=spec.shape.vocab)

    with tempfile.TemporaryDirectory() as folder:
        half = Path(folder) / "f16.gguf"  # one hole
        try:
            write_header(half, {tensor.name: "f32" if tensor.whole else "f16" for tensor in tensors})
        except OSError as error:
            raise GgufspecError(f"{half} cannot be written: {error.strerror}", f"df -h {folder}") from None
        types = tensor_types(half, file_type)
        write_header(half, types)
        size_bytes = half.stat().st_size
    header_bytes = size_bytes - sum(_size_bytes(tensor, types[tensor.name]) for tensor in tensors)
    disk_bytes = header_bytes + sum(_disk_bytes(tensor, types[tensor.name], spec.fill) for tensor in tensors)
    takes = Needed(size_bytes, disk_bytes, types)
    if spec.path is None:
        return Result(takes, None, 0, peak_rss_bytes())

    sparse.check_room(spec.path.parent, disk_bytes, spec.path.name)
    with sparse.appearing(spec.path) as part:
        write_header(part, types)
        parsed, _, _ = read_prefix(LocalFile.at(part))
        starts = {tensor.name: parsed.data_offset + tensor.offset for tensor in parsed.tensors}
        pieces = _pieces(tensors, types, starts, spec)
        written = sparse.fill(part, spec.path.name, pieces, emit, stopping)
    return Result(takes, spec.path, written, peak_rss_bytes())


def _size_bytes(tensor: expansion.Tensor, kind: str) -> int:
    length, rows, copies = (*tensor.shape, 1, 1)[:3]
    return row_bytes(kind, length) * rows * copies


def _disk_bytes(tensor: expansion.Tensor, kind: str, fill: Fill) -> int:
    """Disk space of a tensor, rounded up."""
    length, rows, copies = (*tensor.shape, 1, 1)[:3]
    row = row_bytes(kind, length)
    if tensor.free and fill == "blocks":
        return _size_bytes(tensor, kind) + _BESIDE_BYTES
    counts = [
        (len(content.rows), len(_runs(content.rows))) if isinstance(content, Embedded) else (rows - content.start, 1)
        for content in tensor.contents
    ]
    return copies * sum(row * count + _BESIDE_BYTES * runs for count, runs in counts)


def _runs(rows: Array) -> list[Array]:
    """Ascending numbers as runs in which each follows the one before it."""
    return np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)


def _pieces(
    tensors: list[expansion.Tensor], types: dict[str, str], starts: dict[str, int], spec: Spec
) -> Iterator[Piece]:
    """All pieces in order."""
    patterns: dict[str, bytes] = {}
    for tensor in tensors:
        kind, start = types[tensor.name], starts[tensor.name]
        length, rows, copies = (*tensor.shape, 1, 1)[:3]
        size = row_bytes(kind, length) * rows
        if tensor.free and spec.fill == "blocks":
            if kind not in patterns:
                patterns[kind] = sparse.pattern(kind)
            yield from sparse.repeated(start, patterns[kind], size * copies)
            continue
        for content in tensor.contents:
            made = _embedded(content, tensor, kind) if isinstance(content, Embedded) else _equal(content, tensor, kind)
            if copies == 1:
                yield from ((start + place, data) for place, data in made)
                continue
            once = list(made)  # of a small model's matrix
            yield from ((start + copy * size + place, data) for copy in range(copies) for place, data in once)


def _embedded(content: Embedded, tensor: expansion.Tensor, kind: str) -> Iterator[Piece]:
    length, first = tensor.shape[0], 0
    row, step = row_bytes(kind, length), max(1, _CHUNK_NUMBERS // length)
    numbers = content.make()
    if kind == "f16" and np.abs(numbers).max() > np.finfo(np.float16).max:
        raise ModelError(f"{tensor.name} has weights that F16 cannot hold")
    for rows in _runs(content.rows):
        for done in range(0, len(rows), step):
            chunk = numbers[first : first + min(step, len(rows) - done)]
            yield int(rows[done]) * row, _rows(kind, length, chunk, content.columns)
            first += len(chunk)


def _equal(content: Equal, tensor: expansion.Tensor, kind: str) -> Iterator[Piece]:
    length, rows = tensor.shape[0], tensor.shape[1] - content.start
    one = _rows(kind, length, np.full((1, 1), content.value, np.float32), np.array([length - 1]))
    return sparse.repeated(content.start * len(one), one, rows * len(one))


def _rows(kind: str, length: int, numbers: Floats, columns: Array) -> bytes:
    """Rows of a tensor type with ``numbers`` at ``columns``; other blocks are zero bytes, which decode to zeros."""
    block = block_numbers(kind)
    touched = np.unique(columns // block)
    values = np.zeros((len(numbers), len(touched) * block), np.float32)
    values[:, np.searchsorted(touched, columns // block) * block + columns % block] = numbers
    rows = np.zeros((len(numbers), length // block, row_bytes(kind, block)), np.uint8)
    rows[:, touched] = np.frombuffer(to_blocks(kind, values), np.uint8).reshape(len(numbers), len(touched), -1)
    return rows.tobytes()
