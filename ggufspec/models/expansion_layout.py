"""Checks whether a llama model can be expanded to a shape, and places its heads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.gguf import Gguf
from ggufspec.llamacpp.quantize import to_numbers
from ggufspec.models.header import interpret
from ggufspec.models.headers import read_prefix
from ggufspec.models.locate import LocalFile

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of one llama model; ``ffn`` is the width of the gated feed-forward, or of one expert."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_size: int
    tied: bool = True
    experts: int = 0
    experts_used: int = 0

    def parameters(self) -> int:
        """Weights in all, tied embeddings counted once."""
        return sum(map(math.prod, self.tensors().values()))

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor but ``rope_freqs`` in the order of the file, in ggml's order: the row's length first."""
        width, q, kv = self.width, self.heads * self.head_size, self.kv_heads * self.head_size
        block = {
            "attn_norm.weight": (width,),
            "ffn_norm.weight": (width,),
            "attn_q.weight": (width, q),
            "attn_k.weight": (width, kv),
            "attn_v.weight": (width, kv),
            "attn_output.weight": (q, width),
        }
        feed_forward = {"ffn_gate": (width, self.ffn), "ffn_up": (width, self.ffn), "ffn_down": (self.ffn, width)}
        if self.experts:
            block |= {f"{name}_exps.weight": (*shape, self.experts) for name, shape in feed_forward.items()}
            block |= {"ffn_gate_inp.weight": (width, self.experts)}
        else:
            block |= {f"{name}.weight": shape for name, shape in feed_forward.items()}
        tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (width, self.vocab)}
        for i in range(self.layers):
            tensors |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
        tensors |= {"output_norm.weight": (width,)}
        return tensors if self.tied else tensors | {"output.weight": (width, self.vocab)}


@dataclass(frozen=True, slots=True)
class Small:
    """A small model: its header, and the place of its weights."""

    path: Path
    name: str
    shape: Shape
    eps: float
    rope_base: float
    rope_scaling: str
    header: bytes
    parsed: Gguf

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return any(tensor.name == name for tensor in self.parsed.tensors)

    def numbers(self, name: str) -> Floats:
        """One tensor, rows first."""
        tensor = next(tensor for tensor in self.parsed.tensors if tensor.name == name)
        with self.path.open("rb") as file:
            file.seek(self.parsed.data_offset + tensor.offset)
            blocks = file.read(tensor.size_bytes)
        return to_numbers(tensor.type, blocks, tensor.shape[::-1])


@dataclass(frozen=True, slots=True)
class Layout:
    """Where heads go: ``query_at[j]`` is small query head j's place, ``kv_of[i]`` the small head in big KV head i."""

    query_at: tuple[int, ...]
    kv_of: tuple[int, ...]


# ---- the source -----------------------------------------------------------------------------------------------------


def read(path: Path) -> Small:
    """Read the source model. llama.cpp's parser reads the header here: call it in a child process.

    Raises:
        ModelError: the file is missing, no GGUF file, damaged, or not a plain llama model.
    """
    parsed, header, _ = read_prefix(LocalFile.at(path))
    values = parsed.metadata
    if (architecture := values.get("general.architecture")) != "llama":
        raise ModelError(
            f"{path} has the architecture {architecture!r}; only llama models can be expanded",
            "scripts/train_demo_pair.py makes one",
        )

    def number(key: str, default: float) -> float:
        value = values.get(f"llama.{key}")
        return float(value) if isinstance(value, int | float) else default

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
    shapes = {tensor.name: tensor.shape for tensor in parsed.tensors}
    if not shape.kv_heads or shape.heads % shape.kv_heads:
        raise ModelError(f"{path} has an impossible shape: {shape}", "only plain llama models can be expanded")
    wanted = shape.tensors() | {"rope_freqs.weight": (shape.head_size // 2,)}
    hint = "only plain llama models can be expanded: no biases, no experts, one head size"
    if missing := wanted.keys() - shapes.keys() - {"rope_freqs.weight"}:
        raise ModelError(f"{path} has no {min(missing)}", hint)
    for name, sizes in shapes.items():
        if sizes != wanted.get(name):
            raise ModelError(f"{path}: cannot expand {name} of shape {sizes}", hint)
    return Small(
        path=path,
        name=str(values.get("general.name") or path.stem),
        shape=shape,
        eps=number("attention.layer_norm_rms_epsilon", 0.0),
        rope_base=number("rope.freq_base", 10_000.0),
        rope_scaling=str(values.get("llama.rope.scaling.type", "none")),
        header=header,
        parsed=parsed,
    )


# ---- the shape ------------------------------------------------------------------------------------------------------


def fit(small: Small, big: Shape, file_type: str) -> Layout:
    """Check that the small model fits into ``big``, and place its heads on the fewest key-value heads.

    Raises:
        UsageError: it does not fit.
    """
    source = small.shape
    sizes = ("width", "layers", "heads", "kv_heads", "ffn", "vocab", "head_size")
    smaller = [
        f"{name} {getattr(big, name)} < {getattr(source, name)}"
        for name in sizes
        if getattr(big, name) < getattr(source, name)
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
    if big.tied and not source.tied:
        raise UsageError("the source has an output matrix of its own", "give the shape one too: tied=False")
    if big.experts and not 0 < big.experts_used <= big.experts:
        raise UsageError(f"{big.experts_used} of {big.experts} experts cannot be used", "use at least one, at most all")
    _check_heads(small, big)
    _check_rows(small, big, file_type)

    small_group, big_group = source.heads // source.kv_heads, big.heads // big.kv_heads
    copies = -(-small_group // big_group)
    if source.kv_heads * copies > big.kv_heads:
        raise UsageError(
            f"{big.heads} heads in {big.kv_heads} groups do not hold the source's {source.heads} in {source.kv_heads}: "
            f"with {big_group} to a group they need {source.kv_heads * copies} key-value heads",
            f"raise --kv-heads to {source.kv_heads * copies} (and --heads to {source.kv_heads * copies * big_group}), "
            "or raise --heads",
        )
    return Layout(
        query_at=tuple(
            (head // small_group * copies + head % small_group // big_group) * big_group
            + head % small_group % big_group
            for head in range(source.heads)
        ),
        kv_of=tuple(kv for kv in range(source.kv_heads) for _ in range(copies)),
    )


def _check_heads(small: Small, big: Shape) -> None:
    if big.head_size % 2:
        raise UsageError(f"a head size of {big.head_size} is odd", "rotary embeddings turn pairs: choose an even one")
    if big.head_size > small.shape.head_size:
        if small.rope_scaling not in ("none", "linear"):
            raise UsageError(
                f"the head size cannot increase under {small.rope_scaling} RoPE scaling", "leave --head-size out"
            )
        if rope_base(small, big) > 1e30:
            raise UsageError(
                f"the RoPE base overflows at a head size of {big.head_size}; the source has {small.shape.head_size}",
                "choose a smaller --head-size",
            )


def _check_rows(small: Small, big: Shape, file_type: str) -> None:
    is_quantised = file_type not in ("F32", "F16", "BF16")
    rows = {"width": big.width, "ffn": big.ffn, "heads x head size": big.heads * big.head_size}
    if is_quantised and (odd := [f"{name} {size}" for name, size in rows.items() if size % 32]):
        raise UsageError(  # llama.cpp would leave such matrices in F16
            f"{file_type} needs rows that are a multiple of 32 wide: {', '.join(odd)}", "round up, or choose --type F16"
        )
    if big.vocab > small.shape.vocab:
        # A quantised block shares one scale: the constant dimension wants one of its own.
        block = 1 if not is_quantised else 256 if big.width % 256 == 0 else 32
        if (big.width - 1) // block * block < small.shape.width:
            raise UsageError(
                f"a larger vocabulary needs a spare dimension, and width {big.width} has none beside the source's "
                f"{small.shape.width}",
                f"choose a --width of at least {-(-small.shape.width // block) * block + block}",
            )
        if 0.75 * small.shape.width * small.eps < 2.0**-28:  # of the constant's square: F16 ends there
            raise UsageError(
                f"the source's RMSNorm epsilon {small.eps:g} is too small to make room for a larger vocabulary",
                "leave --vocab out",
            )


def rope_base(small: Small, big: Shape) -> float:
    """The base at which pair i of a big head rotates like pair i of a small one."""
    exponent = big.head_size / small.shape.head_size
    return float(np.exp(min(exponent * np.log(small.rope_base), 500.0))) if exponent != 1 else small.rope_base
