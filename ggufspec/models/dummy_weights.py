"""Dummy models with the shape of a real one, which cost llama.cpp as much time and memory but need no download.

The file has the real model's size and header, including the vocabulary. The weights are holes
(:mod:`ggufspec.models.sparse` explains why that suffices). Only weights that keep the residual stream nonzero are
written: the norms, the embeddings of the first tokens, and the routers of a mixture of experts, so that tokens choose
different experts. The output is meaningless; :mod:`ggufspec.models.expansion` makes models that output a small model's
text.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ggufspec import child
from ggufspec.llamacpp.gguf import Gguf, GgufTensor
from ggufspec.models import sparse
from ggufspec.models.headers import KnownHeader, read_prefix
from ggufspec.models.locate import LocalFile, part_names

TOKENS = 512  # tokens with ids below this have nonzero embeddings; the others' embeddings may be zeros
_ONES = b"\x00\x00\x80\x3f" * 4096


@dataclass(frozen=True, slots=True)
class DummyWeightsJob:
    """Sparse file (the first part if the model is split) to turn into a dummy model in ``folder``."""

    sparse: Path
    folder: Path


@dataclass(frozen=True, slots=True)
class DummyWeights:
    """Path of a dummy model's first part, and the disk space that all its parts take."""

    path: Path
    disk_bytes: int


def needed_bytes(known: KnownHeader) -> int:
    """Return an upper bound on the disk space that a dummy model takes."""
    vocabulary = 128 * known.header.vocabulary  # upper bound on the header's bytes; Llama 3's takes 63 bytes per token
    return sum(_written(tensor) + 4096 for tensor in known.header.tensors if _is_alive(tensor)) + vocabulary


def make_dummy(known: KnownHeader, folder: Path, *, verbose: bool = False) -> DummyWeights:
    """Write a dummy model to an existing folder in a child process; raise GgufspecError if the disk is too full."""
    sparse.check_room(folder, needed_bytes(known), known.header.name)
    return child.call(
        __name__, DummyWeightsJob(known.sparse.absolute(), folder.absolute()), DummyWeights, verbose=verbose
    )


def run(spec: DummyWeightsJob, emit: child.Emit, stopping: threading.Event) -> DummyWeights:
    """Write the model's parts in this process; they appear in the folder together once all are complete."""
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
    return DummyWeights(spec.folder / sources[0].name, disk_bytes)


def _pieces(parsed: Gguf, patterns: dict[str, bytes]) -> Iterator[sparse.Piece]:
    """Yield all pieces to write: ones for norms, random numbers for the rest."""
    for tensor in filter(_is_alive, parsed.tensors):
        if not _is_norm(tensor) and tensor.type not in patterns:
            patterns[tensor.type] = sparse.pattern(tensor.type)
        content = _ONES if _is_norm(tensor) else patterns[tensor.type]
        yield from sparse.repeated_bytes(parsed.data_offset + tensor.offset, content, _written(tensor))


def _is_alive(tensor: GgufTensor) -> bool:
    is_input = tensor.name.startswith("token_embd.") or ".ffn_gate_inp." in tensor.name
    return _is_norm(tensor) or (is_input and len(tensor.shape) > 1)


def _is_norm(tensor: GgufTensor) -> bool:
    return (
        tensor.type == "f32" and len(tensor.shape) == 1 and "_norm" in tensor.name and tensor.name.endswith(".weight")
    )


def _written(tensor: GgufTensor) -> int:
    """Return how many bytes of a tensor to write: all, or ``TOKENS`` rows of the token embeddings."""
    if tensor.name.startswith("token_embd.") and len(tensor.shape) == 2 and tensor.shape[1] > TOKENS:
        return tensor.size_bytes // tensor.shape[1] * TOKENS
    return tensor.size_bytes
