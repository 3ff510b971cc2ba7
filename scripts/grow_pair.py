#!/usr/bin/env python3
"""Grow a small llama GGUF to a big shape without changing what it computes.

The grown model gives the small one's text at the big shape's cost, so that speculation can be measured with real
acceptance and real speed where no big model can be downloaded. Grow the target, leave its draft as it is.

    pip install -e '.[dev]'
    scripts/grow_pair.py profiles/demo/demo-target-F16.gguf big-Q4_0.gguf --shape 1b --type Q4_0
    scripts/grow_pair.py profiles/demo/demo-target-F16.gguf odd-F16.gguf --width 512 --layers 12 --vocab 8192

How, with small letters for the source and capitals for the result:

- width d -> D: zeros. RMSNorm averages over D now, so its weights get sqrt(d/D) and its epsilon d/D.
- heads: a query head must meet a copy of its own key-value head in the big grouping of H/K queries. A small group of
  h/k queries that is larger than that is split over copies of its key-value head. Spare heads are zeros.
- head size s -> S: zeros. The llama architecture wants RoPE over the whole head (src/models/llama.cpp asserts it), so
  the base becomes base^(S/s): the first s/2 pairs of the big head then turn exactly as the small head's did. Queries
  get sqrt(S/s), since attention divides by sqrt(S); that is exact in F16 where S/s is a power of four.
- feed-forward: zeros. Depth: blocks after the source's own whose ``attn_output`` and ``ffn_down`` are zeros and whose
  other matrices are small random numbers.
- vocabulary: unused tokens ``[PADn]`` that are never chosen, at any temperature. The last dimension of the residual
  stream holds a constant c that no block writes to and no block reads; its share c^2 of RMSNorm's sum is taken from
  epsilon, which is what makes it free. Only the output reads it: a padded token's logit is -16384 / (RMS of the
  residual), some hundreds below the real ones. With tied embeddings every real logit moves by the same tiny number.

Tied embeddings stay tied. What is not rounding is exact: F16 outputs agree with the source's to float noise, and
quantised ones differ from it as any quantised model differs from its F16 original.

Sources: RMSNorm, rotary embeddings and SwiGLU as in Llama (Touvron et al. 2023, arXiv:2302.13971); growth that keeps
the function, Net2Net (Chen et al. 2015, arXiv:1511.05641).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from ggufspec.errors import GgufspecError, ModelError, UsageError
from ggufspec.llamacpp.quantize import FILE_TYPES, check_type, quantize

Array = npt.NDArray[Any]
Chunks = Callable[[], Iterator[Array]]

CHUNK_ELEMENTS = 1 << 23  # what is built at once: 16 MB of F16
RANDOM_STD = 0.02  # of the extra blocks' weights, a usual initialisation
PAD_WEIGHT = -1024.0  # output weight of a padded token on the constant dimension
PAD_FEATURE = 16.0  # what the output norm makes of that dimension, times the RMS of the residual
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
NORMS = ("attn_norm", "ffn_norm")


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of one llama model; ``ffn`` is the width of the gated feed-forward."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_size: int

    def parameters(self) -> int:
        """Weights in all, tied embeddings counted once."""
        attention = 2 * self.width * self.head_size * (self.heads + self.kv_heads)
        block = attention + 3 * self.width * self.ffn + 2 * self.width
        return self.layers * block + self.vocab * self.width + self.width


# Named by their size with 4096 tokens. Heads of 64 throughout, as the demo pair has: 3b and 8b have Llama's matrices
# and KV bytes with twice as many heads of half the size.
SHAPES = {
    "50m": {"width": 768, "layers": 8, "heads": 12, "kv_heads": 4, "ffn": 2048},
    "150m": {"width": 1024, "layers": 12, "heads": 16, "kv_heads": 4, "ffn": 3072},
    "0.3b": {"width": 1280, "layers": 16, "heads": 20, "kv_heads": 5, "ffn": 4096},
    "1b": {"width": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192},  # Llama-3.2-1B
    "3b": {"width": 3072, "layers": 28, "heads": 48, "kv_heads": 16, "ffn": 8192},  # Llama-3.2-3B
    "8b": {"width": 4096, "layers": 32, "heads": 64, "kv_heads": 16, "ffn": 14336},  # Llama-3.1-8B
}


@dataclass(frozen=True)
class Source:
    """A small model: its shape, and its metadata and tensors as the gguf package reads them."""

    path: Path
    name: str
    shape: Shape
    eps: float
    rope_base: float
    rope_scaling: str
    metadata: dict[str, gguf.ReaderField]
    tensors: dict[str, gguf.ReaderTensor]

    def matrix(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor as F32, rows first."""
        tensor = self.tensors[name]
        return np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where heads go: ``query_at[j]`` is small query head j's place, ``kv_of[i]`` the small head in big KV head i."""

    query_at: tuple[int, ...]
    kv_of: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to be written; ``chunks`` makes it some rows at a time."""

    name: str
    shape: tuple[int, ...]
    dtype: type[np.generic]
    chunks: Chunks


# ---- the source -----------------------------------------------------------------------------------


def read_source(path: Path) -> Source:
    """The model to be grown.

    Raises:
        ModelError: the file is missing, no GGUF file, damaged, or not a plain llama model.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", f"ls -l {path.parent}") from error
    if magic != b"GGUF":
        raise ModelError(f"{path} is no GGUF file", "give the .gguf file of a small llama model")
    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        values = {key: field.contents() for key, field in metadata.items() if key.startswith(("general.", "llama."))}
    except (ValueError, LookupError, OverflowError, TypeError, OSError) as error:
        raise ModelError(f"{path} is damaged: {error}", "download or make it again") from error

    if (architecture := values.get("general.architecture")) != "llama":
        raise ModelError(
            f"{path} has the architecture {architecture!r}; only llama models can be grown",
            "scripts/train_demo_pair.py makes one",
        )

    def number(key: str, default: float | None = None) -> Any:
        value = values.get(f"llama.{key}", default)
        if not isinstance(value, int | float):
            what = "has no" if value is None else "has a list as"
            raise ModelError(f"{path} {what} llama.{key}", "only plain llama models can be grown")
        return value

    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path} has no token_embd.weight", "a split model must be merged first")
    width, heads = number("embedding_length"), number("attention.head_count")
    shape = Shape(
        width=width,
        layers=number("block_count"),
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        ffn=number("feed_forward_length"),
        vocab=len(tensors["token_embd.weight"].data),
        head_size=number("attention.key_length", width // max(heads, 1)),
    )
    source = Source(
        path=path,
        name=str(values.get("general.name") or path.stem),
        shape=shape,
        eps=number("attention.layer_norm_rms_epsilon"),
        rope_base=number("rope.freq_base", 10_000.0),
        rope_scaling=str(values.get("llama.rope.scaling.type", "none")),
        metadata=metadata,
        tensors=tensors,
    )
    check_source(source)
    return source


def check_source(source: Source) -> None:
    """Every tensor must be one that this script knows how to grow, in the shape that the metadata tell.

    Raises:
        ModelError: one is missing, unknown (biases, experts, fused matrices) or of another shape.
    """
    small = source.shape
    if min(small.width, small.layers, small.heads, small.kv_heads, small.ffn) < 1 or small.heads % small.kv_heads:
        raise ModelError(f"{source.path} has an impossible shape: {small}")
    q, kv = small.heads * small.head_size, small.kv_heads * small.head_size
    block = {
        "attn_q": (q, small.width),
        "attn_k": (kv, small.width),
        "attn_v": (kv, small.width),
        "attn_output": (small.width, q),
        "ffn_gate": (small.ffn, small.width),
        "ffn_up": (small.ffn, small.width),
        "ffn_down": (small.width, small.ffn),
        "attn_norm": (small.width,),
        "ffn_norm": (small.width,),
    }
    wanted: dict[str, tuple[int, ...]] = {
        f"blk.{i}.{name}.weight": shape for i in range(small.layers) for name, shape in block.items()
    }
    wanted |= {"token_embd.weight": (small.vocab, small.width), "output_norm.weight": (small.width,)}
    optional = {"output.weight": (small.vocab, small.width), "rope_freqs.weight": (small.head_size // 2,)}
    hint = "only plain llama models can be grown: no biases, no experts, one head size"
    if missing := wanted.keys() - source.tensors.keys():
        raise ModelError(f"{source.path} has no {min(missing)}", hint)
    for name, tensor in source.tensors.items():
        shape = tuple(int(n) for n in reversed(tensor.shape))
        if shape != (wanted | optional).get(name):
            raise ModelError(f"{source.path}: cannot grow {name} of shape {shape}", hint)


# ---- the shape ------------------------------------------------------------------------------------


def fit(source: Source, big: Shape, file_type: str) -> Layout:
    """Check that the source fits into ``big``, and place its heads on the fewest key-value heads.

    Raises:
        UsageError: it does not fit.
    """
    small = source.shape
    smaller = [
        f"{field.name} {getattr(big, field.name)} < {getattr(small, field.name)}"
        for field in fields(Shape)
        if getattr(big, field.name) < getattr(small, field.name)
    ]
    if smaller:
        raise UsageError(
            f"the shape is smaller than the source: {', '.join(smaller).replace('_', ' ')}",
            "every number must be at least the source's; try a larger --shape",
        )
    if big.heads % big.kv_heads:
        raise UsageError(
            f"{big.heads} query heads cannot share {big.kv_heads} key-value heads evenly",
            "--heads must be a multiple of --kv-heads",
        )
    if big.head_size % 2:
        raise UsageError(f"a head size of {big.head_size} is odd", "rotary embeddings turn pairs: choose an even one")
    if big.head_size > small.head_size:
        if source.rope_scaling not in ("none", "linear"):
            raise UsageError(
                f"the head size cannot grow under {source.rope_scaling} RoPE scaling", "leave --head-size out"
            )
        if grown_rope_base(source, big) > 1e30:
            raise UsageError(
                f"the RoPE base overflows at a head size of {big.head_size}; the source has {small.head_size}",
                "choose a smaller --head-size",
            )
    is_quantised = file_type not in ("F32", "F16", "BF16")
    rows = {"width": big.width, "ffn": big.ffn, "heads x head size": big.heads * big.head_size}
    if is_quantised and (odd := [f"{name} {size}" for name, size in rows.items() if size % 32]):
        raise UsageError(  # llama.cpp would leave such matrices in F16
            f"{file_type} needs rows that are a multiple of 32 wide: {', '.join(odd)}", "round up, or choose --type F16"
        )
    if big.vocab > small.vocab:
        # A quantised block shares one scale: the constant dimension wants one of its own.
        block = 1 if not is_quantised else 256 if big.width % 256 == 0 else 32
        if (big.width - 1) // block * block < small.width:
            raise UsageError(
                f"a larger vocabulary needs a spare dimension, and width {big.width} has none beside the source's "
                f"{small.width}",
                f"choose a --width of at least {-(-small.width // block) * block + block}",
            )
        if constant(source) < 2.0**-14:
            raise UsageError(
                f"the source's RMSNorm epsilon {source.eps:g} is too small to make room for a larger vocabulary",
                "leave --vocab out",
            )

    small_group, big_group = small.heads // small.kv_heads, big.heads // big.kv_heads
    copies = -(-small_group // big_group)
    if small.kv_heads * copies > big.kv_heads:
        raise UsageError(
            f"{big.heads} heads in {big.kv_heads} groups do not hold the source's {small.heads} in {small.kv_heads}: "
            f"with {big_group} to a group they need {small.kv_heads * copies} key-value heads",
            f"raise --kv-heads to {small.kv_heads * copies} (and --heads to {small.kv_heads * copies * big_group}), "
            "or raise --heads",
        )
    return Layout(
        query_at=tuple(
            (head // small_group * copies + head % small_group // big_group) * big_group
            + head % small_group % big_group
            for head in range(small.heads)
        ),
        kv_of=tuple(kv for kv in range(small.kv_heads) for _ in range(copies)),
    )


def constant(source: Source) -> float:
    """The value of the constant dimension: a power of two, so that F16 holds it, with c^2 <= 3/4 of d * eps."""
    room = 0.75 * source.shape.width * source.eps
    return float(2.0 ** np.floor(np.log2(room) / 2)) if room > 0 else 0.0


def grown_eps(source: Source, big: Shape) -> float:
    """RMSNorm's epsilon, less the constant dimension's share of the mean square."""
    room = source.shape.width * source.eps
    if big.vocab > source.shape.vocab:
        room -= constant(source) ** 2
    return room / big.width


def grown_rope_base(source: Source, big: Shape) -> float:
    """The base at which pair i of a big head turns like pair i of a small one."""
    exponent = big.head_size / source.shape.head_size
    return float(np.exp(min(exponent * np.log(source.rope_base), 500.0))) if exponent != 1 else source.rope_base


# ---- the tensors ----------------------------------------------------------------------------------


def grown_tensors(source: Source, big: Shape, layout: Layout, seed: int) -> Iterator[Tensor]:
    """Every tensor of the grown model in the order of the file; nothing is computed before ``chunks`` is called."""
    small = source.shape
    widths = np.arange(small.width)
    ffns = np.arange(small.ffn)
    queries = inside_heads(layout.query_at, big, small)
    kvs = inside_heads(range(len(layout.kv_of)), big, small)
    kv_from = (np.array(layout.kv_of)[:, None] * small.head_size + np.arange(small.head_size)).ravel()
    query_scale = (big.head_size / small.head_size) ** 0.5
    q_rows, kv_rows = big.heads * big.head_size, big.kv_heads * big.head_size
    shapes = {
        "attn_q": (q_rows, big.width),
        "attn_k": (kv_rows, big.width),
        "attn_v": (kv_rows, big.width),
        "attn_output": (big.width, q_rows),
        "ffn_gate": (big.ffn, big.width),
        "ffn_up": (big.ffn, big.width),
        "ffn_down": (big.width, big.ffn),
    }
    places: dict[str, tuple[Array, Array]] = {  # rows, columns
        "attn_q": (queries, widths),
        "attn_k": (kvs, widths),
        "attn_v": (kvs, widths),
        "attn_output": (widths, queries),
        "ffn_gate": (ffns, widths),
        "ffn_up": (ffns, widths),
        "ffn_down": (widths, ffns),
    }

    def placed(name: str, kind: str) -> Chunks:
        def chunks() -> Iterator[Array]:
            matrix = source.matrix(name)
            if kind == "attn_q":
                matrix = matrix * query_scale
            if kind in ("attn_k", "attn_v"):
                matrix = matrix[kv_from]
            return place(name, matrix, shapes[kind], *places[kind])

        return chunks

    def norm(name: str, last: float = 0.0) -> Chunks:
        def chunks() -> Iterator[Array]:
            weight = np.zeros(big.width, np.float32)
            weight[-1] = last
            weight[: small.width] = source.matrix(name) * np.sqrt(small.width / big.width)
            yield weight

        return chunks

    def vector(name: str, values: Array) -> Tensor:
        return Tensor(name, values.shape, np.float32, lambda: iter([values.astype(np.float32)]))

    yield vocabulary_tensor(source, big, "token_embd.weight")
    for block in range(big.layers):
        is_extra = block >= small.layers
        for kind in NORMS:
            name = f"blk.{block}.{kind}.weight"
            yield vector(name, np.ones(big.width)) if is_extra else Tensor(name, (big.width,), np.float32, norm(name))
        for kind in MATRICES:
            name = f"blk.{block}.{kind}.weight"
            chunks = extra(name, shapes[kind], seed) if is_extra else placed(name, kind)
            yield Tensor(name, shapes[kind], np.float16, chunks)
    feature = PAD_FEATURE / constant(source) * (small.width / big.width) ** 0.5 if big.vocab > small.vocab else 0.0
    yield Tensor("output_norm.weight", (big.width,), np.float32, norm("output_norm.weight", feature))
    if "output.weight" in source.tensors:
        yield vocabulary_tensor(source, big, "output.weight")
    if "rope_freqs.weight" in source.tensors:
        factors = np.ones(big.head_size // 2)
        factors[: small.head_size // 2] = source.matrix("rope_freqs.weight")
        yield vector("rope_freqs.weight", factors)


def inside_heads(heads: Sequence[int], big: Shape, small: Shape) -> Array:
    """The indices that small heads take up when they begin where the big heads of these numbers begin."""
    index: Array = (np.array(heads)[:, None] * big.head_size + np.arange(small.head_size)).ravel()
    return index


def vocabulary_tensor(source: Source, big: Shape, name: str) -> Tensor:
    """The embeddings or the output matrix, with the constant dimension where the vocabulary grows.

    The embeddings write the constant for every token; the output reads it for the padded ones. Tied embeddings do both:
    a padded token's row is its output row, as it never comes in.
    """
    small = source.shape
    shape = (big.vocab, big.width)

    is_tied = "output.weight" not in source.tensors
    real = constant(source) if name == "token_embd.weight" else 0.0
    padded = PAD_WEIGHT if is_tied or name == "output.weight" else real

    def chunks() -> Iterator[Array]:
        start = 0
        for chunk in place(name, source.matrix(name), shape, np.arange(small.vocab), np.arange(small.width)):
            if big.vocab > small.vocab:
                chunk[:, -1] = np.where(np.arange(start, start + len(chunk)) < small.vocab, real, padded)
            start += len(chunk)
            yield chunk

    return Tensor(name, shape, np.float16, chunks)


def place(name: str, matrix: Array, shape: tuple[int, int], rows: Array, columns: Array) -> Iterator[Array]:
    """A zero matrix of ``shape`` in F16, some rows at a time, with ``matrix`` at ``rows`` (ascending) x ``columns``.

    Raises:
        ModelError: a weight does not fit F16.
    """
    if np.abs(matrix).max() > np.finfo(np.float16).max:
        raise ModelError(f"{name} has weights that F16 cannot hold")
    for start, stop in row_ranges(shape):
        chunk = np.zeros((stop - start, shape[1]), np.float16)
        first, last = np.searchsorted(rows, [start, stop])
        chunk[np.ix_(rows[first:last] - start, columns)] = matrix[first:last]
        yield chunk


def extra(name: str, shape: tuple[int, int], seed: int) -> Chunks:
    """A matrix of an extra block: zeros where it would write to the residual stream, else small random numbers."""
    writes = ".attn_output." in name or ".ffn_down." in name

    def chunks() -> Iterator[Array]:
        rng = np.random.default_rng((seed, zlib.crc32(name.encode())))
        for start, stop in row_ranges(shape):
            size = (stop - start, shape[1])
            if writes:
                yield np.zeros(size, np.float16)
            else:
                yield (rng.standard_normal(size, np.float32) * np.float32(RANDOM_STD)).astype(np.float16)

    return chunks


def row_ranges(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    step = max(1, CHUNK_ELEMENTS // shape[1])
    return ((start, min(start + step, shape[0])) for start in range(0, shape[0], step))


# ---- the file -------------------------------------------------------------------------------------


def grown_metadata(source: Source, big: Shape) -> dict[str, tuple[Any, gguf.GGUFValueType, gguf.GGUFValueType | None]]:
    """The source's metadata as (value, type, item type), with the numbers of the new shape."""
    u32, f32, string, array = (
        gguf.GGUFValueType.UINT32,
        gguf.GGUFValueType.FLOAT32,
        gguf.GGUFValueType.STRING,
        gguf.GGUFValueType.ARRAY,
    )
    dropped = {"general.architecture", "general.alignment", "general.quantization_version", "general.size_label"}
    kept: dict[str, tuple[Any, gguf.GGUFValueType, gguf.GGUFValueType | None]] = {}
    for key, field in source.metadata.items():
        if key in dropped or key.startswith("split.") or (field.types[0] == array and len(field.types) == 1):
            continue
        kept[key] = (field.contents(), field.types[0], field.types[-1] if field.types[0] == array else None)
    size = f"{big.width} wide, {big.layers} blocks"
    kept["general.name"] = (f"{source.name}, grown to {size}", string, None)
    kept["general.file_type"] = (int(gguf.LlamaFileType.MOSTLY_F16), u32, None)
    for key, number in {
        "vocab_size": big.vocab,
        "embedding_length": big.width,
        "block_count": big.layers,
        "feed_forward_length": big.ffn,
        "attention.head_count": big.heads,
        "attention.head_count_kv": big.kv_heads,
        "attention.key_length": big.head_size,
        "attention.value_length": big.head_size,
        "rope.dimension_count": big.head_size,
    }.items():
        kept[f"llama.{key}"] = (number, u32, None)
    kept["llama.attention.layer_norm_rms_epsilon"] = (grown_eps(source, big), f32, None)
    kept["llama.rope.freq_base"] = (grown_rope_base(source, big), f32, None)

    padding = range(source.shape.vocab, big.vocab)
    for key, item in {
        "tokens": lambda i: f"[PAD{i}]",
        "scores": lambda _: -1e4,
        "token_type": lambda _: int(gguf.TokenType.UNUSED),
    }.items():
        if padding and (old := kept.get(f"tokenizer.ggml.{key}")):
            values = [*old[0], *map(item, padding)]
            kept[f"tokenizer.ggml.{key}"] = (values, old[1], old[2])
            if key == "tokens" and len(set(values)) != len(values):
                raise ModelError(f"{source.path} already has tokens named [PADn]", "leave --vocab out")
    return kept


def write_gguf(path: Path, source: Source, big: Shape, layout: Layout, seed: int) -> None:
    """Write the grown model in F16; no more than one chunk of it is in memory, and zeros are left as holes."""
    tensors = list(grown_tensors(source, big, layout, seed))
    writer = gguf.GGUFWriter(path, "llama")
    for key, (value, kind, item_kind) in grown_metadata(source, big).items():
        writer.add_key_value(key, value, kind, item_kind)
    for tensor in tensors:
        dtype = np.dtype(tensor.dtype)
        writer.add_tensor_info(tensor.name, tensor.shape, dtype, int(np.prod(tensor.shape)) * dtype.itemsize)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    alignment = gguf.GGUF_DEFAULT_ALIGNMENT
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        for tensor in tensors:
            file.seek(-file.tell() % alignment, os.SEEK_CUR)
            for chunk in tensor.chunks():
                if chunk.any():
                    file.write(chunk.data)
                else:
                    file.seek(chunk.nbytes, os.SEEK_CUR)
        file.truncate(file.tell() + -file.tell() % alignment)


def grow(source: Source, out: Path, big: Shape, file_type: str, seed: int, threads: int) -> None:
    """Write the grown model to ``out``, which appears only when it is whole.

    Raises:
        UsageError: the source does not fit into the shape, or ``out`` is the source.
        ModelError: the file cannot be written, or llama.cpp cannot quantise it.
    """
    layout = fit(source, big, file_type)
    if out.exists() and out.samefile(source.path):
        raise UsageError(f"{out} would overwrite the model it is grown from", "give the new file another name")
    half, whole = out.with_name(out.name + ".f16.part"), out.with_name(out.name + ".part")
    try:
        if file_type == "F16":
            write_gguf(whole, source, big, layout, seed)
        else:
            write_gguf(half, source, big, layout, seed)
            quantize(half, whole, file_type, threads)
        whole.replace(out)
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {error.strerror}", f"df -h {out.parent}") from error
    finally:
        half.unlink(missing_ok=True)
        whole.unlink(missing_ok=True)


# ---- the command line -----------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Grow a small llama GGUF to a big shape without changing what it computes.",
        epilog="shapes:\n"
        + "\n".join(
            f"  {name:5} " + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in shape.items())
            for name, shape in SHAPES.items()
        )
        + "\n\nexample:\n"
        "  scripts/grow_pair.py profiles/demo/demo-target-F16.gguf big-Q4_0.gguf --shape 1b --type Q4_0",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("small", type=Path, metavar="SMALL.gguf", help="a small llama model, such as the demo target")
    parser.add_argument("out", type=Path, metavar="OUT.gguf", help="the file to write; it appears when it is whole")
    parser.add_argument("--shape", choices=SHAPES, help="a shape by name; the options below change its numbers")
    shape = parser.add_argument_group("shape", "what neither --shape nor an option sets stays as it is in the source")
    for name, text in {
        "width": "width of the residual stream",
        "layers": "blocks",
        "heads": "query heads",
        "kv-heads": "key-value heads",
        "ffn": "width of the feed-forward",
        "vocab": "tokens; those beyond the source's are never chosen",
        "head-size": "size of a head",
    }.items():
        shape.add_argument(f"--{name}", type=int, metavar="N", help=text)
    parser.add_argument("--type", default="F16", metavar="TYPE", help=f"{', '.join(FILE_TYPES)} (default F16)")
    parser.add_argument("--random-seed", type=int, default=0, metavar="N", help="of the extra blocks (default 0)")
    parser.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="for quantising (default: all cores)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Grow one model; returns the exit code."""
    arguments = parse(argv)
    began = time.monotonic()
    try:
        file_type = check_type(arguments.type)
        if arguments.random_seed < 0:
            raise UsageError("--random-seed is negative", "--random-seed 0")
        source = read_source(arguments.small)
        given = {field.name: getattr(arguments, field.name) for field in fields(Shape)}
        chosen = SHAPES.get(arguments.shape, {}) | {name: value for name, value in given.items() if value is not None}
        big = replace(source.shape, **chosen)
        grow(source, arguments.out, big, file_type, arguments.random_seed, arguments.threads)
    except GgufspecError as error:
        print(f"grow_pair: {error.message}" + (f"\n  {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    print(
        f"{arguments.out}: {big.parameters() / 1e6:,.0f} M parameters, {file_type}, "
        f"{arguments.out.stat().st_size / 1e6:,.0f} MB, {time.monotonic() - began:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
