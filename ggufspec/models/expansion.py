"""Function-preserving expansion of a llama model to a larger shape: what fits, and the content of each tensor.

With small letters for the source and capitals for the result:

- width d -> D: zeros. RMSNorm now averages over D, so its weights get sqrt(d/D) and its epsilon d/D.
- heads: a query head must meet a copy of its own key-value head in the big grouping of H/K queries. A small group of
  h/k queries that is larger than that is split over copies of its key-value head. Spare heads are zeros.
- feed-forward: zeros.
- depth: blocks after the source's own whose ``attn_output`` and ``ffn_down`` are zeros; nothing else in them matters.
- vocabulary: unused tokens ``[PADn]`` that are never chosen, at any temperature. The last dimension of the residual
  stream holds a constant c that no block writes or reads; its share c^2 of RMSNorm's sum is subtracted from epsilon, so
  that it costs nothing. Only the output reads it: a padded token's logit is -16384 / (RMS of the residual), some
  hundreds below the real ones. With tied embeddings every real logit moves by the same tiny number.

Everything is exact except for rounding: F16 outputs agree with the source's to float noise. ``lab/expansion.py`` adds
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
"""Ascending rows of a tensor, and their numbers; one row of numbers for several rows is the same in each."""

_PAD_WEIGHT = -1024.0  # output weight of a padded token on the constant dimension
_PAD_FEATURE = 16.0  # value of that dimension after the output norm, times the RMS of the residual
_NORMS = ("attn_norm", "ffn_norm")


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of one llama model; ``ffn`` is the width of the gated feed-forward."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_size: int
    tied: bool = True

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors except ``rope_freqs``, in file order; ggml's order: row length first."""
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
class Small:
    """The source model: its shape, its header, and where its weights are."""

    path: Path
    shape: Shape
    eps: float
    header: bytes
    parsed: Gguf

    def numbers(self, name: str) -> Floats:
        """Read one tensor, rows first."""
        tensor = next(tensor for tensor in self.parsed.tensors if tensor.name == name)
        with self.path.open("rb") as file:
            file.seek(self.parsed.data_offset + tensor.offset)
            blocks = file.read(tensor.size_bytes)
        return to_numbers(tensor.type, blocks, tensor.shape[::-1])


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of heads: ``query_at[j]`` is small query head j's, ``kv_of[i]`` the small head in big KV head i."""

    query_at: tuple[int, ...]
    kv_of: tuple[int, ...]


# ---- what fits ------------------------------------------------------------------------------------------------------


def read(path: Path) -> Small:
    """Read the source model, with llama.cpp's parser: call it in a child process.

    Raises:
        ModelError: the file is missing, no GGUF file, damaged, or not a plain llama model.
    """
    parsed, header, _ = read_prefix(LocalFile.at(path))
    if (architecture := parsed.metadata.get("general.architecture")) != "llama":
        raise ModelError(
            f"{path} has the architecture {architecture!r}; only llama models can be expanded",
            "scripts/train_demo_pair.py makes one",
        )
    found = interpret(path.name, [parsed], path.stat().st_size)
    shape = Shape(
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
    return Small(path, shape, float(eps) if isinstance(eps, int | float) else 0.0, header, parsed)


def fit(small: Small, big: Shape, file_type: str) -> Layout:
    """Fit the small model's heads into ``big``, with the fewest key-value heads; UsageError if it does not fit."""
    source = small.shape
    sizes = ("width", "layers", "heads", "kv_heads", "ffn", "vocab", "head_size")
    pairs = [(name, getattr(big, name), getattr(source, name)) for name in sizes]
    if smaller := [f"{name} {new} < {old}".replace("_", " ") for name, new, old in pairs if new < old]:
        raise UsageError(
            f"the shape is smaller than the source: {', '.join(smaller)}",
            "every number must be at least the source's; try a larger shape",
        )
    if big.heads % big.kv_heads:
        raise UsageError(
            f"{big.heads} query heads cannot share {big.kv_heads} key-value heads evenly",
            "the query heads must be a multiple of the key-value heads",
        )
    if big.head_size != source.head_size:
        raise UsageError(f"the heads have {big.head_size} numbers, the source's {source.head_size}", "keep their size")
    if big.tied and not source.tied:
        raise UsageError("the source has an output matrix of its own", "give the shape one too: tied=False")
    if big.vocab > source.vocab:
        _check_padding(small, big, file_type)
    small_group, big_group = source.heads // source.kv_heads, big.heads // big.kv_heads
    copies = -(-small_group // big_group)
    needed = source.kv_heads * copies
    if needed > big.kv_heads:
        raise UsageError(
            f"{big.heads} heads in {big.kv_heads} groups do not hold the source's {source.heads} in {source.kv_heads}: "
            f"with {big_group} to a group they need {needed} key-value heads",
            f"{needed} key-value heads and {needed * big_group} heads hold them, or more heads",
        )
    query_at = (
        (head // small_group * copies + head % small_group // big_group) * big_group + head % small_group % big_group
        for head in range(source.heads)
    )
    return Layout(tuple(query_at), tuple(kv for kv in range(source.kv_heads) for _ in range(copies)))


def _check_padding(small: Small, big: Shape, file_type: str) -> None:
    """Check that there is a dimension for the constant, and a share of epsilon."""
    # A quantised block shares one scale: the constant dimension needs its own block.
    block = 1 if file_type in ("F32", "F16", "BF16") else 256 if big.width % 256 == 0 else 32
    width = small.shape.width
    if (big.width - 1) // block * block < width:
        raise UsageError(
            f"a larger vocabulary needs a spare dimension, and width {big.width} has none beyond the source's {width}",
            f"choose a width of at least {-(-width // block) * block + block}",
        )
    if 0.75 * width * small.eps < 2.0**-28:  # limit of the constant's square: F16 ends there
        raise UsageError(
            f"the source's RMSNorm epsilon {small.eps:g} is too small to make room for a larger vocabulary",
            "keep the source's vocabulary",
        )


# ---- the content ----------------------------------------------------------------------------------------------------


def _constant(small: Small) -> float:
    """Return the value of the constant dimension: a power of two, exact in F16, with c^2 <= 3/4 of d * eps."""
    room = 0.75 * small.shape.width * small.eps
    return float(2.0 ** np.floor(np.log2(room) / 2)) if room > 0 else 0.0


def metadata(small: Small, big: Shape) -> dict[str, str | int | float]:
    """Return the header keys in which the big model differs."""
    room = small.shape.width * small.eps  # RMSNorm's epsilon times width, less the constant's share of the mean square
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


def tensors(small: Small, big: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the big model, in the order of the file."""
    has_factors = any(tensor.name == "rope_freqs.weight" for tensor in small.parsed.tensors)
    return big.tensors() | ({"rope_freqs.weight": (big.head_size // 2,)} if has_factors else {})


def content(small: Small, big: Shape, layout: Layout, name: str) -> list[Rows]:
    """Return the nonzero content of a tensor of the big model; a vector is one row."""
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
    """Return longer rows, with ``numbers`` at ``columns`` or at the beginning."""
    rows = np.full((len(numbers), length), fill, np.float32)
    rows[:, np.arange(numbers.shape[1]) if columns is None else columns] = numbers
    return rows


def _matrix(small: Small, big: Shape, layout: Layout, name: str, kind: str) -> Rows:
    """Return the rows of one of the matrices in the blocks."""

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


def _norm(small: Small, big: Shape, name: str) -> Floats:
    """Return a norm's weights for the larger width; the output norm makes a feature of the constant dimension."""
    row = _wide(small.numbers(name)[None], big.width)
    if name == "output_norm.weight" and big.vocab > small.shape.vocab:
        row[0, -1] = _PAD_FEATURE / _constant(small)
    return row * np.float32((small.shape.width / big.width) ** 0.5)


def _vocabulary(small: Small, big: Shape, name: str) -> list[Rows]:
    """Return the embeddings or the output matrix, with the constant dimension if the vocabulary grows.

    The embeddings write the constant for every token; the output reads it for the padded ones. Tied embeddings do both:
    a padded token's row is its output row, because it never occurs as input.
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
