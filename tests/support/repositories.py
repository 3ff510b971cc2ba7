"""Repositories of one model in many quantisations, as llama-quantize makes them, for the hub on loopback."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import shapes
from tests.support.shapes import Dims, Label

LLAMA3_8B = Dims(32, 4096, 32, 8, 14336, shapes.LLAMA3_TOKENS)
SMALL = Dims(4, 256, 4, 2, 768, 16384)  # its vocabulary is large enough to be worth reading once
TWENTY = (
    *("IQ1_S", "IQ2_XXS", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "IQ4_XS", "IQ4_NL", "Q4_0", "Q4_1"),
    *("Q4_K_S", "Q4_K_M", "Q5_0", "Q5_1", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16"),
)


def write(folder: Path, name: str, dims: Dims, mixes: Sequence[str], **more: Any) -> list[Path]:
    """One file for each mix; ``more`` are further keys of all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = shapes.bpe(dims.vocabulary)
    return [write_one(folder / f"{name}-{mix}.gguf", dims, mix, vocabulary | more) for mix in mixes]


def write_one(path: Path, dims: Dims, mix: str, more: shapes.Keys, **of_shape: Any) -> Path:
    """One file. The converter writes the file's type before the vocabulary, llama-quantize behind it, with others."""
    shape = shapes.transformer(Label(path.stem, "dense", "llama", mix), dims, **of_shape)
    first = dict(shape.metadata)
    kind = first.pop("general.file_type")
    if mix in ("F16", "BF16"):
        return shapes.write_file(path, first | {"general.file_type": kind} | more, shape.tensors)
    behind = {"tokenizer.chat_template": "{{ messages }}" * 400, "general.quantization_version": 2}
    return shapes.write_file(path, first | more | behind | {"general.file_type": kind}, shape.tensors)
