"""Dummy weights of the same shape: a file that llama.cpp loads and decodes at the cost of a model not downloaded.

It has the model's true header, vocabulary included, and its true size. The weights are holes
(:mod:`ggufspec.models.sparse` explains why that suffices). Only what keeps the residual stream nonzero is written:
norms, the embeddings of the first tokens, and the routers of a mixture of experts, so that tokens choose different
experts. The output is meaningless; :mod:`ggufspec.models.expansion` makes models that output a small model's text.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ggufspec import child
from ggufspec.llamacpp.gguf import Gguf, Tensor
from ggufspec.models import sparse
from ggufspec.models.headers import Known, read_prefix
from ggufspec.models.locate import LocalFile, part_names

TOKENS = 512  # ids below are different tokens to the model; the embeddings of the others may be zeros
_ONES = b"\x00\x00\x80\x3f" * 4096


@dataclass(frozen=True, slots=True)
class Spec:
    """Make a dummy model of the sparse file (the first part of a split model) in ``folder``."""

    sparse: Path
    folder: Path


@dataclass(frozen=True, slots=True)
class Result:
    """The dummy model's first part, and the disk space of all parts."""

    path: Path
    disk_bytes: int


def needed_bytes(known: Known) -> int:
    """Return the disk space of a dummy model, rounded up."""
    vocabulary = 128 * known.header.vocabulary  # the header, generously: Llama 3 has 63 bytes a token
    return sum(_written(tensor) + 4096 for tensor in known.header.tensors if _is_alive(tensor)) + vocabulary


def make(known: Known, folder: Path, *, verbose: bool = False) -> Result:
    """Write a dummy model into an existing folder, in a child process; GgufspecError if the disk has no space."""
    sparse.check_room(folder, needed_bytes(known), known.header.name)
    return child.call(__name__, Spec(known.sparse.absolute(), folder.absolute()), Result, verbose=verbose)


def run(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Result:
    """Write the parts in this process; they appear together, when all are complete."""
    patterns: dict[str, bytes] = {}
    sources = [Path(name) for name in part_names(str(spec.sparse))]
    disk_bytes = 0
    with ExitStack() as whole:
        for source in sources:
            parsed, prefix, _ = read_prefix(LocalFile.at(source))
            part = whole.enter_context(sparse.appearing(spec.folder / source.name))
            with part.open("wb") as file:
                file.write(prefix)
                file.truncate(source.stat().st_size)
            disk_bytes += sparse.fill(part, source.name, _pieces(parsed, patterns), emit, stopping)
    return Result(spec.folder / sources[0].name, disk_bytes)


def _pieces(parsed: Gguf, patterns: dict[str, bytes]) -> Iterator[sparse.Piece]:
    """Yield all written pieces: norms are ones, the rest is random."""
    for tensor in filter(_is_alive, parsed.tensors):
        if not _is_norm(tensor) and tensor.type not in patterns:
            patterns[tensor.type] = sparse.pattern(tensor.type)
        content = _ONES if _is_norm(tensor) else patterns[tensor.type]
        yield from sparse.repeated(parsed.data_offset + tensor.offset, content, _written(tensor))


def _is_alive(tensor: Tensor) -> bool:
    is_input = tensor.name.startswith("token_embd.") or ".ffn_gate_inp." in tensor.name
    return _is_norm(tensor) or (is_input and len(tensor.shape) > 1)


def _is_norm(tensor: Tensor) -> bool:
    return (
        tensor.type == "f32" and len(tensor.shape) == 1 and "_norm" in tensor.name and tensor.name.endswith(".weight")
    )


def _written(tensor: Tensor) -> int:
    """Return the bytes of a tensor that are written: only ``TOKENS`` rows of the embeddings."""
    if tensor.name.startswith("token_embd.") and len(tensor.shape) == 2 and tensor.shape[1] > TOKENS:
        return tensor.size_bytes // tensor.shape[1] * TOKENS
    return tensor.size_bytes
