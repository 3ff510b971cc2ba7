"""Function-preserving expansion of a llama model to a larger shape: the content of each tensor.

With small letters for the source and capitals for the result:

- width d -> D: zeros. RMSNorm averages over D now, so its weights get sqrt(d/D) and its epsilon d/D.
- heads: a query head must meet a copy of its own key-value head in the big grouping of H/K queries. A small group of
  h/k queries that is larger than that is split over copies of its key-value head. Spare heads are zeros.
- head size s -> S: zeros. The llama architecture wants RoPE over the whole head (src/models/llama.cpp asserts it), so
  the base becomes base^(S/s): the first s/2 pairs of the big head then turn exactly as the small head's did. Queries
  get sqrt(S/s), since attention divides by sqrt(S); that is exact in F16 where S/s is a power of four.
- feed-forward: zeros. Experts: each has the whole of it, and the weights of those that a router chooses are one
  together; routers are random, so that tokens go to different experts.
- depth: blocks after the source's own whose ``attn_output`` and ``ffn_down`` are zeros; nothing else in them matters.
- vocabulary: unused tokens ``[PADn]`` that are never chosen, at any temperature. The last dimension of the residual
  stream holds a constant c that no block writes to and no block reads; its share c^2 of RMSNorm's sum is taken from
  epsilon, which is what makes it free. Only the output reads it: a padded token's logit is -16384 / (RMS of the
  residual), some hundreds below the real ones. With tied embeddings every real logit moves by the same tiny number.
- tied embeddings stay tied, or are written twice.

What is not rounding is exact: F16 outputs agree with the source's to float noise, and quantised ones differ from it as
any quantised model differs from its F16 original.

Sources: RMSNorm, rotary embeddings and SwiGLU as in Llama (Touvron et al. 2023, arXiv:2302.13971); function-preserving
expansion, Net2Net (Chen et al. 2015, arXiv:1511.05641).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ggufspec.models.expansion_layout import Floats, Layout, Shape, Small, rope_base

Array = npt.NDArray[Any]

_PAD_WEIGHT = -1024.0  # output weight of a padded token on the constant dimension
_PAD_FEATURE = 16.0  # what the output norm makes of that dimension, times the RMS of the residual
_NORMS = ("attn_norm", "ffn_norm")
_WRITE = ("attn_output", "ffn_down")  # to the residual stream


@dataclass(frozen=True, slots=True)
class Embedded:
    """Numbers among zeros: row i of ``make()`` is at ``rows[i]``, its numbers are at ``columns``; both ascend."""

    rows: Array
    columns: Array
    make: Callable[[], Floats]


@dataclass(frozen=True, slots=True)
class Equal:
    """Equal rows from ``start`` to the last: zeros, and ``value`` in the last column."""

    start: int
    value: float


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the big model: its content besides zeros.

    Args:
        name: of the tensor.
        shape: ggml's order. A third number is experts, each of which holds the contents.
        contents: of a vector its one row.
        free: whether it may contain anything, because its output is never read.
    """

    name: str
    shape: tuple[int, ...]
    contents: tuple[Embedded | Equal, ...] = ()
    free: bool = False

    @property
    def whole(self) -> bool:
        """Whether it stays F32 in a file of any type, as norms and routers do."""
        return len(self.shape) == 1 or ".ffn_gate_inp." in self.name


# ---- the header -----------------------------------------------------------------------------------------------------


def _constant(small: Small) -> float:
    """The value of the constant dimension: a power of two, so that F16 holds it, with c^2 <= 3/4 of d * eps."""
    room = 0.75 * small.shape.width * small.eps
    return float(2.0 ** np.floor(np.log2(room) / 2)) if room > 0 else 0.0


def _eps(small: Small, big: Shape) -> float:
    """RMSNorm's epsilon, less the constant dimension's share of the mean square."""
    room = small.shape.width * small.eps
    if big.vocab > small.shape.vocab:
        room -= _constant(small) ** 2
    return room / big.width


def metadata(small: Small, big: Shape) -> dict[str, str | int | float]:
    """The keys of the header in which the big model differs."""
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
        "attention.layer_norm_rms_epsilon": _eps(small, big),
        "rope.freq_base": rope_base(small, big),
    }
    if big.experts:
        own |= {"expert_count": big.experts, "expert_used_count": big.experts_used}
    name = f"{small.name}, expanded to width {big.width}, {big.layers} blocks"
    return {"general.name": name} | {f"llama.{key}": value for key, value in own.items()}


# ---- the tensors ----------------------------------------------------------------------------------------------------


def tensors(small: Small, big: Shape, layout: Layout, *, hopeless: bool = False) -> Iterator[Tensor]:
    """Every tensor of the big model in the order of the file; nothing is read before ``make`` is called.

    Args:
        small: the source model.
        big: the target shape.
        layout: from :func:`fit`.
        hopeless: give each token another's output row: a model as confident as the small one, and never right.
    """
    places = _places(small.shape, big, layout)
    for name, shape in big.tensors().items():
        _, number, kind = name.split(".", 2) if name.startswith("blk.") else ("", "-1", name)
        block, kind = int(number), kind.removesuffix(".weight").removesuffix("_exps")
        if kind in ("token_embd", "output"):
            yield Tensor(name, shape, _vocabulary(small, big, name, hopeless=hopeless))
        elif kind == "output_norm" or (kind in _NORMS and block < small.shape.layers):
            yield Tensor(name, shape, (_norm(small, big, name),))
        elif kind in _NORMS:
            yield Tensor(name, shape, (_vector(np.ones(big.width)),))
        elif kind == "ffn_gate_inp":
            columns = np.arange(small.shape.width)
            yield Tensor(name, shape, (_router(shape, columns, zlib.crc32(name.encode())),))
        elif block < small.shape.layers:
            yield Tensor(name, shape, (_embedded(small, big, layout, f"blk.{block}.{kind}.weight", *places[kind]),))
        else:
            yield Tensor(name, shape, free=kind not in _WRITE)
    if small.has("rope_freqs.weight"):
        factors = np.ones(big.head_size // 2)
        factors[: small.shape.head_size // 2] = small.numbers("rope_freqs.weight")
        yield Tensor("rope_freqs.weight", factors.shape, (_vector(factors),))


def _places(small: Shape, big: Shape, layout: Layout) -> dict[str, tuple[Array, Array]]:
    """Rows and columns of each matrix in the blocks."""
    widths, hidden = np.arange(small.width), np.arange(small.ffn)
    queries = _inside_heads(layout.query_at, big, small)
    kvs = _inside_heads(range(len(layout.kv_of)), big, small)
    return {
        "attn_q": (queries, widths),
        "attn_k": (kvs, widths),
        "attn_v": (kvs, widths),
        "attn_output": (widths, queries),
        "ffn_gate": (hidden, widths),
        "ffn_up": (hidden, widths),
        "ffn_down": (widths, hidden),
    }


def _embedded(small: Small, big: Shape, layout: Layout, name: str, rows: Array, columns: Array) -> Embedded:
    size = small.shape.head_size
    kv_from = (np.array(layout.kv_of)[:, None] * size + np.arange(size)).ravel()
    scale = np.float32((big.head_size / size) ** 0.5)

    def make() -> Floats:
        matrix = small.numbers(name)
        if ".attn_q." in name:
            matrix = matrix * scale
        elif ".attn_k." in name or ".attn_v." in name:
            matrix = matrix[kv_from]
        return matrix

    return Embedded(rows, columns, make)


def _inside_heads(heads: Sequence[int], big: Shape, small: Shape) -> Array:
    """The indices of small heads that start where the given big heads start."""
    index: Array = (np.array(heads)[:, None] * big.head_size + np.arange(small.head_size)).ravel()
    return index


def _vector(values: Array) -> Embedded:
    return Embedded(np.arange(1), np.arange(len(values)), lambda: values.astype(np.float32)[None])


def _router(shape: tuple[int, ...], columns: Array, seed: int) -> Embedded:
    """Random weights that give the experts' logits about a standard normal distribution."""

    def make() -> Floats:
        numbers = np.random.default_rng(seed).standard_normal((shape[1], len(columns)), np.float32)
        return numbers * np.float32(len(columns) ** -0.5)

    return Embedded(np.arange(shape[1]), columns, make)


def _norm(small: Small, big: Shape, name: str) -> Embedded:
    """A norm's weights for the larger width; the output norm makes a feature of the constant dimension."""
    scale = (small.shape.width / big.width) ** 0.5
    has_feature = name == "output_norm.weight" and big.vocab > small.shape.vocab
    columns = np.arange(small.shape.width)

    def make() -> Floats:
        weights = small.numbers(name) * scale
        if has_feature:
            weights = np.append(weights, _PAD_FEATURE / _constant(small) * scale)
        row: Floats = weights.astype(np.float32)[None]
        return row

    return Embedded(np.arange(1), np.append(columns, big.width - 1) if has_feature else columns, make)


def _vocabulary(small: Small, big: Shape, name: str, *, hopeless: bool) -> tuple[Embedded | Equal, ...]:
    """The embeddings or the output matrix, with the constant dimension where the vocabulary grows.

    The embeddings write the constant for every token; the output reads it for the padded ones. Tied embeddings do both:
    a padded token's row is its output row, as it never comes in.
    """
    rows, columns = np.arange(small.shape.vocab), np.arange(small.shape.width)
    is_grown = big.vocab > small.shape.vocab
    is_input, is_output = name == "token_embd.weight", name == "output.weight" or big.tied
    source = "token_embd.weight" if is_input or small.shape.tied else "output.weight"

    def make() -> Floats:
        matrix = small.numbers(source)
        if hopeless and is_output:
            matrix = np.roll(matrix, len(matrix) // 2, axis=0)
        if is_grown and is_input:
            matrix = np.pad(matrix, ((0, 0), (0, 1)), constant_values=_constant(small))
        return matrix

    if is_grown and is_input:
        columns = np.append(columns, big.width - 1)
    real = Embedded(rows, columns, make)
    return (real, Equal(small.shape.vocab, _PAD_WEIGHT)) if is_grown and is_output else (real,)
