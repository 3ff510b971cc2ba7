"""Function-preserving expansion of a llama model to a larger shape: which shapes fit, and the content of each tensor.

Lower-case letters are sizes of the source, capitals are sizes of the result:

- width d -> D: new dimensions are zeros. RMSNorm averages over D, so its weights scale by sqrt(d/D) and epsilon by d/D.
- heads: each query head needs a copy of its own key-value head in its group of H/K query heads. If the source's groups
  (of h/k heads) are larger, they are split over several copies of their key-value head. Spare heads are zeros.
- feed-forward: new dimensions are zeros.
- depth: further blocks have zeros in ``attn_output`` and ``ffn_down``, so their other weights do not matter.
- vocabulary: unused tokens ``[PADn]`` are never chosen at any temperature. The last dimension of the residual stream
  holds a constant c that no block writes or reads. RMSNorm's epsilon is reduced to offset c^2 in the sum, so nothing
  else changes. Only the output reads c: a padding token's logit is -16384 / (RMS of the residual), a few hundred
  below the real ones. With tied embeddings, every real logit shifts by the same tiny amount.

Everything is exact except for rounding: F16 outputs equal the source's up to float noise. ``lab/expansion.py`` adds
larger heads and mixtures of experts.

Sources: RMSNorm, rotary embeddings and SwiGLU as in Llama (Touvron et al. 2023, arXiv:2302.13971); function-preserving
expansion, Net2Net (Chen et al. 2015, arXiv:1511.05641).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.gguf import Gguf
from ggufspec.llamacpp.quantize import to_numbers
from ggufspec.models.header import interpret
from ggufspec.models.headers import read_prefix
from ggufspec.models.locate import LocalFile

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Rows = tuple[Array, Floats]
"""Row indices of a tensor in ascending order, and the rows' values; a single row of values applies to every index."""

_PAD_WEIGHT = -1024.0  # output weight of padding tokens for the constant dimension
_PAD_FEATURE = 16.0  # (constant dimension after the output norm) × (RMS of the residual)
_NORMS = ("attn_norm", "ffn_norm")


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Shape of a llama model; ``ffn`` is the width of the gated feed-forward."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_size: int
    tied: bool = True

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors except ``rope_freqs`` in file order; as in ggml, the row length is first."""
        width, q, kv = self.width, self.heads * self.head_size, self.kv_heads * self.head_size
        block = {
            "attn_norm.weight": (width,),
            "ffn_norm.weight": (width,),
            "attn_q.weight": (width, q),
            "attn_k.weight": (width, kv),
            "attn_v.weight": (width, kv),
            "attn_output.weight": (q, width),
            "ffn_gate.weight": (width, self.ffn),
            "ffn_up.weight": (width, self.ffn),
            "ffn_down.weight": (self.ffn, width),
        }
        tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (width, self.vocab)}
        for i in range(self.layers):
            tensors |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
        tensors |= {"output_norm.weight": (width,)}
        return tensors if self.tied else tensors | {"output.weight": (width, self.vocab)}


@dataclass(frozen=True, slots=True)
class SourceModel:
    """Source model: its shape, header and file, from which weights are read."""

    path: Path
    shape: LlamaShape
    eps: float
    header: bytes
    parsed: Gguf

    def numbers(self, name: str) -> Floats:
        """Read a tensor as an array with rows as the first dimension."""
        tensor = next(tensor for tensor in self.parsed.tensors if tensor.name == name)
        with self.path.open("rb") as file:
            file.seek(self.parsed.data_offset + tensor.offset)
            blocks = file.read(tensor.size_bytes)
        return to_numbers(tensor.type, blocks, tensor.shape[::-1])


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Placement of heads: small query head j goes to ``query_at[j]``; big KV head i copies small head ``kv_of[i]``."""

    query_at: tuple[int, ...]
    kv_of: tuple[int, ...]


# ---- what fits ------------------------------------------------------------------------------------------------------


def read_source(path: Path) -> SourceModel:
    """Read the source model with llama.cpp's parser; only call this in a child: a damaged file may crash the parser.

    Raises:
        ModelError: the file is missing, not GGUF, damaged, or not a plain llama model.
    """
    parsed, header, _ = read_prefix(LocalFile.at(path))
    if (architecture := parsed.metadata.get("general.architecture")) != "llama":
        raise ModelError(
            f"{path} has the architecture {architecture!r}; only llama models can be expanded",
            "scripts/train_demo_pair.py makes one",
        )
    found = interpret(path.name, [parsed], path.stat().st_size)
    shape = LlamaShape(
        width=found.embedding,
        layers=found.blocks,
        heads=found.heads[0],
        kv_heads=found.kv_heads[0],
        ffn=found.feed_forward[0],
        vocab=found.vocabulary,
        head_size=found.key_size,
        tied=found.tied,
    )
    hint = "only plain llama models can be expanded: no biases, no experts, one head size"
    if not shape.kv_heads or shape.heads % shape.kv_heads:
        raise ModelError(f"{path} has an impossible shape: {shape}", hint)
    wanted, shapes = shape.tensors(), {tensor.name: tensor.shape for tensor in parsed.tensors}
    if missing := wanted.keys() - shapes.keys():
        raise ModelError(f"{path} has no {min(missing)}", hint)
    wanted["rope_freqs.weight"] = (shape.head_size // 2,)
    if other := [name for name, sizes in shapes.items() if sizes != wanted.get(name)]:
        raise ModelError(f"{path}: cannot expand {other[0]} of shape {shapes[other[0]]}", hint)
    eps = parsed.metadata.get("llama.attention.layer_norm_rms_epsilon")
    return SourceModel(path, shape, float(eps) if isinstance(eps, int | float) else 0.0, header, parsed)


def fit_shape(small: SourceModel, big: LlamaShape, file_type: str) -> HeadLayout:
    """Fit the small model's heads into ``big`` with the fewest key-value heads; raise UsageError if it does not fit."""
    source = small.shape
    sizes = ("width", "layers", "heads", "kv_heads", "ffn", "vocab", "head_size")
    pairs = [(name, getattr(big, name), getattr(source, name)) for name in sizes]
    if smaller := [f"{name} {new} < {old}".replace("_", " ") for name, new, old in pairs if new < old]:
        raise UsageError(
            f"the shape is smaller than the source: {', '.join(smaller)}",
            "no dimension may be smaller than the source's; choose a larger shape",
        )
    if big.heads % big.kv_heads:
        raise UsageError(
            f"{big.heads} query heads cannot share {big.kv_heads} key-value heads evenly",
            "the query heads must be a multiple of the key-value heads",
        )
    if big.head_size != source.head_size:
        raise UsageError(f"the head size {big.head_size} is not the source's {source.head_size}", "keep the head size")
    if big.tied and not source.tied:
        raise UsageError("the source has an output matrix of its own", "give the shape one too: tied=False")
    if big.vocab > source.vocab:
        _check_padding(small, big, file_type)
    small_group, big_group = source.heads // source.kv_heads, big.heads // big.kv_heads
    copies = -(-small_group // big_group)
    needed = source.kv_heads * copies
    if needed > big.kv_heads:
        raise UsageError(
            f"{big.heads} heads in {big.kv_heads} groups cannot hold the source's {source.heads} in {source.kv_heads}: "
            f"groups of {big_group} need {needed} key-value heads",
            f"use {needed} key-value heads and {needed * big_group} heads, or more heads per group",
        )
    query_at = (
        (head // small_group * copies + head % small_group // big_group) * big_group + head % small_group % big_group
        for head in range(source.heads)
    )
    return HeadLayout(tuple(query_at), tuple(kv for kv in range(source.kv_heads) for _ in range(copies)))


def _check_padding(small: SourceModel, big: LlamaShape, file_type: str) -> None:
    """Check that a larger vocabulary fits: it needs a spare dimension for the constant, and a large enough epsilon."""
    # All weights of a quantised block share a scale, so the constant dimension needs a block of its own.
    block = 1 if file_type in ("F32", "F16", "BF16") else 256 if big.width % 256 == 0 else 32
    width = small.shape.width
    if (big.width - 1) // block * block < width:
        raise UsageError(
            f"a larger vocabulary needs a spare dimension, but width {big.width} has none beyond the source's {width}",
            f"choose a width of at least {-(-width // block) * block + block}",
        )
    if 0.75 * width * small.eps < 2.0**-28:  # the constant must be at least 2^-14, F16's smallest normal number
        raise UsageError(
            f"the source's RMSNorm epsilon {small.eps:g} is too small to make room for a larger vocabulary",
            "keep the source's vocabulary",
        )


# ---- the content ----------------------------------------------------------------------------------------------------


def _constant(small: SourceModel) -> float:
    """Return the constant dimension's value c: a power of two, which is exact in F16, with c^2 <= 3/4 of d * eps."""
    room = 0.75 * small.shape.width * small.eps
    return float(2.0 ** np.floor(np.log2(room) / 2)) if room > 0 else 0.0


def metadata(small: SourceModel, big: LlamaShape) -> dict[str, str | int | float]:
    """Return the header keys whose values differ between the big model and the source."""
    room = small.shape.width * small.eps  # epsilon × width of RMSNorm, minus the constant's square if there is one
    if big.vocab > small.shape.vocab:
        room -= _constant(small) ** 2
    own: dict[str, int | float] = {
        "vocab_size": big.vocab,
        "embedding_length": big.width,
        "block_count": big.layers,
        "feed_forward_length": big.ffn,
        "attention.head_count": big.heads,
        "attention.head_count_kv": big.kv_heads,
        "attention.key_length": big.head_size,
        "attention.value_length": big.head_size,
        "rope.dimension_count": big.head_size,
        "attention.layer_norm_rms_epsilon": room / big.width,
    }
    source = small.parsed.metadata.get("general.name") or small.path.stem
    name = f"{source}, expanded to width {big.width}, {big.layers} blocks"
    return {"general.name": name} | {f"llama.{key}": value for key, value in own.items()}


def tensors(small: SourceModel, big: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in the big model, in file order."""
    has_factors = any(tensor.name == "rope_freqs.weight" for tensor in small.parsed.tensors)
    return big.tensors() | ({"rope_freqs.weight": (big.head_size // 2,)} if has_factors else {})


def content(small: SourceModel, big: LlamaShape, layout: HeadLayout, name: str) -> list[Rows]:
    """Return the nonzero rows of a tensor in the big model; a vector counts as one row."""
    _, number, kind = name.split(".", 2) if name.startswith("blk.") else ("", "-1", name)
    kind = kind.removesuffix(".weight")
    if kind in ("token_embd", "output"):
        return _vocabulary(small, big, name)
    if kind == "output_norm" or (kind in _NORMS and int(number) < small.shape.layers):
        return [(np.arange(1), _norm(small, big, name))]
    if kind in _NORMS:
        return [(np.arange(1), np.ones((1, big.width), np.float32))]
    if kind == "rope_freqs":
        return [(np.arange(1), _wide(small.numbers(name)[None], big.head_size // 2, fill=1.0))]
    if int(number) >= small.shape.layers:
        return []
    return [_matrix(small, big, layout, name, kind)]


def _wide(numbers: Floats, length: int, columns: Array | None = None, fill: float = 0.0) -> Floats:
    """Return rows of ``length`` with ``numbers`` at ``columns`` (default: the first ones) and ``fill`` elsewhere."""
    rows = np.full((len(numbers), length), fill, np.float32)
    rows[:, np.arange(numbers.shape[1]) if columns is None else columns] = numbers
    return rows


def _matrix(small: SourceModel, big: LlamaShape, layout: HeadLayout, name: str, kind: str) -> Rows:
    """Return the rows of a matrix that belongs to a block."""

    def inside(heads: Sequence[int], size: int) -> Array:
        index: Array = (np.array(heads)[:, None] * size + np.arange(small.shape.head_size)).ravel()
        return index

    numbers, queries = small.numbers(name), inside(layout.query_at, big.head_size)
    if kind == "attn_output":
        return np.arange(len(numbers)), _wide(numbers, big.heads * big.head_size, queries)
    if kind == "ffn_down":
        return np.arange(len(numbers)), _wide(numbers, big.ffn)
    rows = np.arange(len(numbers))
    if kind == "attn_q":
        rows = queries
    elif kind in ("attn_k", "attn_v"):
        rows = inside(range(len(layout.kv_of)), big.head_size)
        numbers = numbers[inside(layout.kv_of, small.shape.head_size)]
    return rows, _wide(numbers, big.width)


def _norm(small: SourceModel, big: LlamaShape, name: str) -> Floats:
    """Return a norm's weights for the larger width; the output norm also scales the constant dimension."""
    row = _wide(small.numbers(name)[None], big.width)
    if name == "output_norm.weight" and big.vocab > small.shape.vocab:
        row[0, -1] = _PAD_FEATURE / _constant(small)
    return row * np.float32((small.shape.width / big.width) ** 0.5)


def _vocabulary(small: SourceModel, big: LlamaShape, name: str) -> list[Rows]:
    """Return the embeddings or the output matrix, with the constant dimension if the vocabulary grows.

    The embeddings write the constant for every token; the output reads it only for padding tokens. If both are tied, a
    padding token's row is its output row, because the token never occurs as input.
    """
    is_input = name == "token_embd.weight"
    numbers = _wide(small.numbers("token_embd.weight" if small.shape.tied else name), big.width)
    found = [(np.arange(small.shape.vocab), numbers)]
    if big.vocab > small.shape.vocab:
        if is_input:
            numbers[:, -1] = _constant(small)
        if big.tied or not is_input:
            padded = _wide(np.full((1, 1), _PAD_WEIGHT, np.float32), big.width, np.array([big.width - 1]))
            found.append((np.arange(small.shape.vocab, big.vocab), padded))
    return found
