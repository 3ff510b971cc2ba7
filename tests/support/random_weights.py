"""Random numbers for the weights of a shape: a model whose state, logits and choices all depend on every token."""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import numpy as np

from ggufspec.llamacpp.quantize import random_blocks
from tests.support import shapes

_STD = 0.08
_PIECE = 256 * 4096  # numbers made at a time; a larger tensor repeats them


def write(path: Path, shape: shapes.Shape, *, tokenizer: bool = False) -> Path:
    """Write ``shape`` with random weights, equal ones for an equal shape; norms are about one, decays negative."""
    shapes.write(path, shape, tokenizer=tokenizer)
    with path.open("r+b") as file:
        offset = path.stat().st_size - shape.nbytes
        for tensor in shape.tensors:
            file.seek(offset)
            file.write(_content(tensor))
            offset += shapes.padded(tensor.nbytes)
    return path


def _content(tensor: shapes.Tensor) -> bytes:
    numbers = math.prod(tensor.ne)
    seed = zlib.crc32(tensor.name.encode())
    if tensor.type == "F32":
        values = np.random.default_rng(seed).standard_normal(numbers, np.float32)
        if tensor.name.endswith("ssm_a"):
            values = -np.abs(values) - np.float32(0.1)
        elif "norm" in tensor.name and tensor.name.endswith(".weight"):
            values = 1 + values * np.float32(0.1)
        elif "ssm_conv1d" not in tensor.name:
            values *= np.float32(0.3)
        return values.tobytes()
    kind = tensor.type.lower()
    kind = kind[:-1] + "K" if kind.endswith("_k") else kind
    blocks = random_blocks(kind, min(_PIECE, -(-numbers // 256) * 256), _STD, seed)
    return (blocks * (tensor.nbytes // len(blocks) + 1))[: tensor.nbytes]
