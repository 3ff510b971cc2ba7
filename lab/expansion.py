"""Expanded models of any shape and type, for evidence: beyond the package's own expansion (ggufspec/models/).

The bundled pair, expanded to the shapes of Llama-3-70B and Llama-3-8B, is a pair of 35 GB that is written in seconds.
The model is never in memory, nor written in F16: llama.cpp's dry run gives the type of each tensor, ggml's quantiser
writes the rows with trained numbers, and the rest is holes, or blocks of random numbers without effect.

In addition to :mod:`ggufspec.models.expansion`, with small letters for the source and capitals for the result:

- head size s -> S: zeros. The llama architecture requires RoPE over the whole head (src/models/llama.cpp asserts it),
  so the base becomes base^(S/s): the first s/2 pairs of the big head then turn exactly as the small head's did. Queries
  get sqrt(S/s), because attention divides by sqrt(S); that is exact in F16 if S/s is a power of four.
- experts: each has the whole feed-forward, and the weights of those that a router chooses sum to one; routers are
  random, so that tokens go to different experts.
"""

from __future__ import annotations

import math
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from ggufspec import child
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.hardware.host import peak_rss_bytes
from ggufspec.llamacpp.gguf import write_model
from ggufspec.llamacpp.quantize import check_type, row_bytes, run_dry, type_keys
from ggufspec.models import expansion, sparse
from ggufspec.models.expanded import pieces
from ggufspec.models.expansion import HeadLayout, Rows, SourceModel, read_source
from ggufspec.models.headers import read_prefix
from ggufspec.models.locate import LocalFile
from ggufspec.models.sparse import Piece

Fill = Literal["holes", "blocks"]
_BESIDE_BYTES = 8192  # disk for the partial pages at both ends of a run of rows
_WRITE = ("attn_output", "ffn_down", "ffn_down_exps")  # they write to the residual stream


@dataclass(frozen=True, slots=True)
class Shape(expansion.LlamaShape):
    """Shape of one llama model; ``ffn`` is the width of the gated feed-forward, or of one expert."""

    experts: int = 0
    experts_used: int = 0

    def parameters(self) -> int:
        """Return the number of weights, tied embeddings counted once."""
        return sum(map(math.prod, self.tensors().values()))

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors except ``rope_freqs``, in file order; ggml's order: row length first."""
        dense = expansion.LlamaShape.tensors(self)
        if not self.experts:
            return dense
        tensors: dict[str, tuple[int, ...]] = {}
        for name, shape in dense.items():
            if ".ffn_" not in name or ".ffn_norm." in name:
                tensors[name] = shape
                continue
            tensors[name.replace(".weight", "_exps.weight")] = (*shape, self.experts)
            if ".ffn_down." in name:
                tensors[name.replace("ffn_down", "ffn_gate_inp")] = (self.width, self.experts)
        return tensors


# Numbers of the published models. The architecture is llama's: Qwen's biases, some kilobytes, are left out.
SHAPES = {
    "llama3-70b": Shape(8192, 80, 64, 8, 28672, 128256, 128, tied=False),
    "llama3-8b": Shape(4096, 32, 32, 8, 14336, 128256, 128, tied=False),
    "llama3.2-1b": Shape(2048, 16, 32, 8, 8192, 128256, 64),
    "qwen2.5-14b": Shape(5120, 48, 40, 8, 13824, 152064, 128, tied=False),
    "qwen2.5-0.5b": Shape(896, 24, 14, 2, 4864, 151936, 64),
    "smollm2-360m": Shape(960, 32, 15, 5, 2560, 49152, 64),
    "mixtral-8x7b": Shape(4096, 32, 32, 8, 14336, 32000, 128, tied=False, experts=8, experts_used=2),
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


@dataclass(frozen=True, slots=True)
class Needed:
    """Size of an expanded model.

    Args:
        size_bytes: apparent size; also its RAM when it runs on the CPU, because holes take memory.
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
        path: the file to write or replace; without it only the size is computed.
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
    """The predicted size, the file, its true disk space, and the peak memory of writing it."""

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
        GgufspecError: the disk has no space, or cannot be written.
        Interrupted: Ctrl-C.
    """
    return child.call(__name__, spec, Result, on_event=on_event, verbose=verbose)


# ---- what fits ------------------------------------------------------------------------------------------------------


def shape_of(small: SourceModel) -> Shape:
    """Return the source's own shape."""
    own = small.shape
    return Shape(own.width, own.layers, own.heads, own.kv_heads, own.ffn, own.vocab, own.head_size, own.tied)


def fit(small: SourceModel, big: expansion.LlamaShape, file_type: str) -> HeadLayout:
    """Run :func:`ggufspec.models.expansion.fit_shape`, also for larger heads, experts and rows of any length.

    Raises:
        UsageError: it does not fit.
    """
    size = small.shape.head_size
    layout = expansion.fit_shape(small, replace(big, head_size=size), file_type)
    if isinstance(big, Shape) and big.experts and not 0 < big.experts_used <= big.experts:
        raise UsageError(f"{big.experts_used} of {big.experts} experts cannot be used", "use at least one, at most all")
    if big.head_size < size:
        raise UsageError(f"the shape is smaller than the source: head size {big.head_size} < {size}", "enlarge it")
    if big.head_size % 2:
        raise UsageError(f"a head size of {big.head_size} is odd", "rotary embeddings turn pairs: choose an even one")
    if big.head_size > size:
        scaling = small.parsed.metadata.get("llama.rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise UsageError(f"the head size cannot increase under {scaling} RoPE scaling", "leave --head-size out")
        if rope_base(small, big) > 1e30:
            raise UsageError(
                f"the RoPE base overflows at a head size of {big.head_size}; the source has {size}",
                "choose a smaller --head-size",
            )
    rows = {"width": big.width, "ffn": big.ffn, "heads x head size": big.heads * big.head_size}
    is_quantised = file_type not in ("F32", "F16", "BF16")
    if is_quantised and (odd := [f"{name} {count}" for name, count in rows.items() if count % 32]):
        raise UsageError(  # llama.cpp would leave such matrices in F16
            f"{file_type} needs rows that are a multiple of 32 wide: {', '.join(odd)}", "round up, or choose --type F16"
        )
    return layout


def rope_base(small: SourceModel, big: expansion.LlamaShape) -> float:
    """Return the base at which pair i of a big head rotates like pair i of a small one."""
    value = small.parsed.metadata.get("llama.rope.freq_base")
    base = float(value) if isinstance(value, int | float) else 10_000.0
    exponent = big.head_size / small.shape.head_size
    return float(np.exp(min(exponent * np.log(base), 500.0))) if exponent != 1 else base


# ---- the content ----------------------------------------------------------------------------------------------------


def metadata(small: SourceModel, big: Shape) -> dict[str, str | int | float]:
    """Return the header keys in which the big model differs."""
    keys = expansion.metadata(small, big) | {"llama.rope.freq_base": rope_base(small, big)}
    experts = {"llama.expert_count": big.experts, "llama.expert_used_count": big.experts_used} if big.experts else {}
    return keys | experts


def content(small: SourceModel, big: Shape, layout: HeadLayout, name: str, *, hopeless: bool = False) -> list[Rows]:
    """Return the nonzero content of a tensor of the big model."""
    if ".ffn_gate_inp." in name:
        return [(np.arange(big.experts), _router(small, big, zlib.crc32(name.encode())))]
    found = expansion.content(small, big, layout, name.replace("_exps", ""))
    if "_exps" in name:
        height = big.tensors()[name][1]
        return [
            ((np.arange(big.experts)[:, None] * height + rows).ravel(), np.tile(numbers, (big.experts, 1)))
            for rows, numbers in found
        ]
    if ".attn_q." in name:
        scale = np.float32((big.head_size / small.shape.head_size) ** 0.5)
        return [(rows, numbers * scale) for rows, numbers in found]
    if hopeless and found and (name == "output.weight" or (name == "token_embd.weight" and big.tied)):
        rows, numbers = found[0]
        numbers[:, : small.shape.width] = np.roll(numbers[:, : small.shape.width], len(numbers) // 2, axis=0)
        found[0] = rows, numbers
    return found


def _router(small: SourceModel, big: Shape, seed: int) -> expansion.Floats:
    """Return random weights that make the experts' logits about standard normal."""
    rows = np.zeros((big.experts, big.width), np.float32)
    rows[:, : small.shape.width] = np.random.default_rng(seed).standard_normal(
        (big.experts, small.shape.width), np.float32
    )
    return rows * np.float32(small.shape.width**-0.5)


# ---- in the child ---------------------------------------------------------------------------------------------------


def run(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Result:
    """Expand in this process."""
    file_type = check_type(spec.type)
    if spec.path and spec.path.exists() and spec.small.exists() and spec.path.samefile(spec.small):
        raise UsageError(f"{spec.path} would overwrite the model it is made from", "give the new file another name")
    small, big = read_source(spec.small), spec.shape
    layout = fit(small, big, file_type)
    shapes = expansion.tensors(small, big)
    keys = metadata(small, big) | type_keys(file_type)

    def write_header(path: Path, types: Mapping[str, str]) -> None:
        wanted = [(name, types[name], shape) for name, shape in shapes.items()]
        write_model(path, keys, wanted, like=small.header, vocabulary=big.vocab)

    def contents(name: str) -> list[Rows]:
        return content(small, big, layout, name, hopeless=spec.hopeless)

    with tempfile.TemporaryDirectory() as folder:
        half = Path(folder) / "f16.gguf"  # one hole
        whole = {name for name, shape in shapes.items() if len(shape) == 1 or ".ffn_gate_inp." in name}
        try:
            write_header(half, {name: "f32" if name in whole else "f16" for name in shapes})
        except OSError as error:
            raise GgufspecError(f"{half} cannot be written: {error.strerror}", f"df -h {folder}") from None
        types = run_dry(half, file_type).types
        write_header(half, types)
        size_bytes = half.stat().st_size
    sizes = {name: row_bytes(types[name], shape[0]) * math.prod(shape[1:]) for name, shape in shapes.items()}
    free = {name: sizes[name] for name in sizes if spec.fill == "blocks" and _is_free(name, small)}
    disk_bytes = size_bytes - sum(sizes.values()) + sum(size + _BESIDE_BYTES for size in free.values())
    disk_bytes += sum(_disk_bytes(contents(name), row_bytes(types[name], shapes[name][0])) for name in shapes)
    takes = Needed(size_bytes, disk_bytes, types)
    if spec.path is None:
        return Result(takes, None, 0, peak_rss_bytes())

    sparse.check_room(spec.path.parent, disk_bytes, spec.path.name)
    with sparse.appearing(spec.path) as part:
        write_header(part, types)
        parsed, _, _ = read_prefix(LocalFile.at(part))
        starts = {tensor.name: parsed.data_offset + tensor.offset for tensor in parsed.tensors}
        written = sparse.fill(part, spec.path.name, _pieces(contents, types, starts, free), emit, stopping)
    return Result(takes, spec.path, written, peak_rss_bytes())


def _is_free(name: str, small: SourceModel) -> bool:
    """Return True if a tensor may contain anything, because its output is never read."""
    _, number, kind, *_ = [*name.split("."), ""]
    return (
        number.isdigit()
        and int(number) >= small.shape.layers
        and "norm" not in kind
        and kind not in (*_WRITE, "ffn_gate_inp")
    )


def _disk_bytes(found: list[Rows], row: int) -> int:
    return sum(row * len(rows) + _BESIDE_BYTES * (1 + int((np.diff(rows) != 1).sum())) for rows, _ in found)


def _pieces(
    contents: Callable[[str], list[Rows]],
    types: Mapping[str, str],
    starts: Mapping[str, int],
    free: Mapping[str, int],
) -> Iterator[Piece]:
    yield from pieces(contents, types, starts)
    patterns = {kind: sparse.pattern(kind) for kind in {types[name] for name in free}}
    for name, size in free.items():
        yield from sparse.repeated_bytes(starts[name], patterns[types[name]], size)
