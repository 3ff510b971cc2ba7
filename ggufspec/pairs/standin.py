"""Same-shape stand-in weights: a file that llama.cpp loads and decodes at the cost of a model that is not here.

It has the model's true header, vocabulary included, and its true size. The weights are holes, which read as zeros and
take no disk: a zero block is a block like any other, no kernel looks at the values, and the page cache gives every page
of a hole memory of its own, as it does for a file. Blocks of random numbers can stand for the weights instead; they
decode no slower (docs/evidence/rehearsal.json). What makes the residual stream alive is written in either case: norms,
the embeddings of the first tokens, and the routers of a mixture of experts, so that tokens choose different experts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from ggufspec import worker
from ggufspec.errors import GgufspecError
from ggufspec.hardware.host import free_disk_bytes
from ggufspec.llamacpp.gguf import Gguf, Tensor
from ggufspec.llamacpp.quantize import random_blocks
from ggufspec.pairs.files import LocalFile, part_names
from ggufspec.pairs.source import Known, read_prefix

Fill = Literal["holes", "blocks"]

TOKENS = 512  # ids below are different tokens to the model; the embeddings of the others may be zeros
_PATTERN_NUMBERS = 256 * 1028  # 257 rows of 1024: neighbouring rows of usual lengths differ
_WRITE_BYTES = 16 << 20
_STD = 0.02
_ROOM = 64 << 20  # that must be left on the disk


@dataclass(frozen=True, slots=True)
class Spec:
    """Make a stand-in of the sparse file (of a split model the first part's) in ``folder``."""

    sparse: Path
    folder: Path
    fill: Fill


@dataclass(frozen=True, slots=True)
class Result:
    """The stand-in's first part, and what all parts take on the disk."""

    path: Path
    disk_bytes: int


def needed_bytes(known: Known, fill: Fill = "holes") -> int:
    """Disk that a stand-in takes, rounded up."""
    header = known.header
    vocabulary = 128 * header.vocabulary  # the header, generously: Llama 3 has 63 bytes a token
    if fill == "blocks":
        return header.weight_bytes() + vocabulary
    return sum(_written(tensor) + 4096 for tensor in header.tensors if _is_alive(tensor)) + vocabulary


def make(
    known: Known,
    folder: Path,
    fill: Fill = "holes",
    *,
    on_event: worker.Emit | None = None,
    verbose: bool = False,
) -> Result:
    """Write a stand-in, in a child process: llama.cpp's parser meets the header there.

    Args:
        known: the model's header.
        folder: where to write; it is there. The caller removes it.
        fill: what stands for the weights.
        on_event: told ``{"event": "writing", "file": …, "bytes": …}``.
        verbose: let llama.cpp's log through.

    Raises:
        GgufspecError: the disk has no room.
        Interrupted: Ctrl-C.
    """
    needed, free = needed_bytes(known, fill), free_disk_bytes(folder)
    if needed + _ROOM > free:
        raise GgufspecError(
            f"a stand-in for {known.header.name} takes {needed / 1e9:.1f} GB of disk and {folder} has {free / 1e9:.1f}",
            f"df -h {folder}",
        )
    spec = Spec(known.sparse.absolute(), folder.absolute(), fill)
    return worker.call(__name__, spec, Result, on_event=on_event, verbose=verbose)


def run(spec: Spec, emit: worker.Emit, stopping: threading.Event) -> Result:
    """Write the parts in this process; a stop leaves what is written so far."""
    patterns: dict[str, bytes] = {}
    parts = [Path(name) for name in part_names(str(spec.sparse))]
    disk_bytes = 0
    for source in parts:
        parsed, prefix, _ = read_prefix(LocalFile.at(source))
        path = spec.folder / source.name
        try:
            with path.open("wb") as file:
                file.write(prefix)
                file.truncate(source.stat().st_size)
                for start, count, tensor in _pieces(parsed, spec.fill):
                    if stopping.is_set():
                        break
                    if tensor.type not in patterns:
                        patterns[tensor.type] = _pattern(tensor.type)
                    file.seek(start)
                    _fill(file, _content(tensor, patterns[tensor.type]), count)
                    emit({"event": "writing", "file": source.name, "bytes": start + count})
            disk_bytes += path.stat().st_blocks * 512
        except OSError as error:
            raise GgufspecError(f"{path} cannot be written: {error.strerror}", f"df -h {spec.folder}") from None
    return Result(spec.folder / parts[0].name, disk_bytes)


def _pieces(parsed: Gguf, fill: Fill) -> Iterator[tuple[int, int, Tensor]]:
    """(place in the file, bytes, tensor) of all that is written."""
    for tensor in parsed.tensors:
        start = parsed.data_offset + tensor.offset
        if fill == "blocks":
            yield start, tensor.size_bytes, tensor
        elif _is_alive(tensor):
            yield start, _written(tensor), tensor


def _is_alive(tensor: Tensor) -> bool:
    return _is_norm(tensor) or tensor.name.startswith("token_embd.") or ".ffn_gate_inp." in tensor.name


def _is_norm(tensor: Tensor) -> bool:
    return (
        tensor.type == "f32" and len(tensor.shape) == 1 and "_norm" in tensor.name and tensor.name.endswith(".weight")
    )


def _written(tensor: Tensor) -> int:
    """Bytes of a tensor that are written beside holes: of the embeddings the rows of ``TOKENS``."""
    if tensor.name.startswith("token_embd.") and len(tensor.shape) == 2 and tensor.shape[1] > TOKENS:
        return tensor.size_bytes // tensor.shape[1] * TOKENS
    return tensor.size_bytes


def _pattern(kind: str) -> bytes:
    """Some megabytes of valid blocks, to be repeated."""
    blocks = random_blocks(kind, _PATTERN_NUMBERS, _STD, seed=0)
    return blocks * max(1, _WRITE_BYTES // len(blocks))


def _content(tensor: Tensor, pattern: bytes) -> bytes:
    """What a tensor is filled with: norms with ones; other vectors, on which signs and ranges depend, with zeros."""
    if _is_norm(tensor):
        return b"\x00\x00\x80\x3f" * 4096
    if len(tensor.shape) == 1 or ".ssm_" in tensor.name:
        return bytes(_WRITE_BYTES)
    return pattern


def _fill(file: BinaryIO, content: bytes, count: int) -> None:
    view = memoryview(content)
    while count:
        count -= file.write(view[: min(count, len(view))])
