"""Headers of published models, from their public dimensions: metadata-only files for plans of what is not here.

The types of the tensors are those that llama.cpp's own quantiser chooses. Files of other makers ("UD-IQ2_XXS" and the
like) choose them by tensors of their own; of these the size is published, and as many feed-forward tensors as it takes
to reach it get the next larger type.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))
from ggufspec.llamacpp.quantize import run_dry
from ggufspec.models.header import ModelHeader
from ggufspec.models.headers import read_headers
from tests.support.shapes import (
    SANDWICH,
    Dims,
    Experts,
    Label,
    Shape,
    Ssm,
    Tensor,
    block_of,
    gemma4,
    mixture,
    padded,
    qwen35,
    transformer,
    vectors,
    write,
)

HEADER_BYTES = 8_000_000  # of a file is its vocabulary, about


def _dense(architecture: str, dims: Dims, **more: Any) -> Shape:
    return transformer(Label("model", "dense", architecture, "F16"), dims, **more)


def _llama(dims: Dims, **more: Any) -> Shape:
    return _dense("llama", dims, **more)


def _qwen2(dims: Dims, **more: Any) -> Shape:
    return _dense("qwen2", dims, bias=True, **more)


def _qwen3(dims: Dims, **more: Any) -> Shape:
    return _dense("qwen3", dims._replace(vocabulary=151936, head=128), qk_norm=True, **more)


def _gemma(architecture: str, dims: Dims, window: int) -> Shape:
    keys = {"attention.sliding_window": window}
    return _dense(architecture, dims, norms=SANDWICH, qk_norm=architecture != "gemma2", tied=True, keys=keys)


def _qwen35(dims: Dims, ssm: Ssm, moe: Experts | None = None, *, tied: bool = False) -> Shape:
    """Qwen3.5 to 3.8 with their MTP block, which has no embeddings of its own."""
    shape = qwen35(Label("model", "hybrid", "qwen35", "F16"), dims, ssm, nextn_blocks=1)
    own = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
    tensors = [tensor for tensor in shape.tensors if not tensor.name.endswith(own)]
    metadata = shape.metadata
    if tied:
        tensors = [tensor for tensor in tensors if tensor.name != "output.weight"]
    if moe:
        tensors = [tensor for tensor in tensors if ".ffn_" not in tensor.name]
        block = mixture(dims.width, moe) | vectors(dims.width, "ffn_gate_inp_shexp")
        tensors += [
            Tensor(f"blk.{i}.{name}", "F16" if math.prod(ne) > ne[0] else "F32", ne)
            for i in range(dims.blocks + 1)
            for name, ne in block.items()
        ]
        metadata = {key.replace("qwen35.", "qwen35moe."): value for key, value in metadata.items()}
        metadata |= {"general.architecture": "qwen35moe"}
        metadata |= {f"qwen35moe.{key}": value for key, value in moe.keys().items()}
        metadata["qwen35moe.expert_shared_feed_forward_length"] = moe.shared
    architecture = metadata["general.architecture"]
    return replace(shape, architecture=architecture, metadata=metadata, tensors=tuple(tensors))


def _qwen3moe(dims: Dims, moe: Experts) -> Shape:
    label = Label("model", "moe", "qwen3moe", "F16")
    return transformer(label, dims, moe=moe, qk_norm=True)


def _gpt_oss(dims: Dims, moe: Experts) -> Shape:
    extra = {"attn_sinks.weight": (64,), "attn_output.bias": (2880,)}
    label, keys = Label("model", "moe", "gpt-oss", "MXFP4_MOE"), {"attention.sliding_window": 128}
    return transformer(
        label, dims, moe=moe, norms=("attn_norm", "post_attention_norm"), bias=True, extra=extra, keys=keys
    )


# Dimensions: the models' config.json
# fmt: off
SHAPES: dict[str, Shape] = {
    "llama2-7b": _llama(Dims(32, 4096, 32, 32, 11008, 32000)),
    "mistral-7b": _llama(Dims(32, 4096, 32, 8, 14336, 32768)),
    "mistral-small-24b": _llama(Dims(40, 5120, 32, 8, 32768, 131072, 128)),
    "llama3-8b": _llama(Dims(32, 4096, 32, 8, 14336, 128256)),
    "llama3-70b": _llama(Dims(80, 8192, 64, 8, 28672, 128256)),
    "llama3.2-1b": _llama(Dims(16, 2048, 32, 8, 8192, 128256), tied=True),
    "llama3.2-3b": _llama(Dims(28, 3072, 24, 8, 8192, 128256, 128), tied=True),
    "qwen2.5-0.5b": _qwen2(Dims(24, 896, 14, 2, 4864, 151936), tied=True),
    "qwen2.5-1.5b": _qwen2(Dims(28, 1536, 12, 2, 8960, 151936), tied=True),
    "qwen2.5-3b": _qwen2(Dims(36, 2048, 16, 2, 11008, 151936), tied=True),
    "qwen2.5-7b": _qwen2(Dims(28, 3584, 28, 4, 18944, 152064)),
    "qwen2.5-14b": _qwen2(Dims(48, 5120, 40, 8, 13824, 152064)),
    "qwen2.5-32b": _qwen2(Dims(64, 5120, 40, 8, 27648, 152064)),
    "qwen3-0.6b": _qwen3(Dims(28, 1024, 16, 8, 3072, 0), tied=True),
    "qwen3-1.7b": _qwen3(Dims(28, 2048, 16, 8, 6144, 0), tied=True),
    "qwen3-4b": _qwen3(Dims(36, 2560, 32, 8, 9728, 0), tied=True),
    "qwen3-8b": _qwen3(Dims(36, 4096, 32, 8, 12288, 0)),
    "qwen3-14b": _qwen3(Dims(40, 5120, 40, 8, 17408, 0)),
    "qwen3-32b": _qwen3(Dims(64, 5120, 64, 8, 25600, 0)),
    "qwen3-30b-a3b": _qwen3moe(Dims(48, 2048, 32, 4, 6144, 151936, 128), Experts(128, 8, 768)),
    "qwen3.5-0.8b": _qwen35(Dims(24, 1024, 8, 2, 3584, 248320, 256), Ssm(2048, 128, 16, 16), tied=True),
    "qwen3.5-4b": _qwen35(Dims(32, 2560, 16, 4, 9216, 248320, 256), Ssm(4096, 128, 32, 16), tied=True),
    "qwen3.5-9b": _qwen35(Dims(32, 4096, 16, 4, 12288, 248320, 256), Ssm(4096, 128, 32, 16)),
    "qwen3.8-27b": _qwen35(Dims(64, 5120, 24, 4, 17408, 248320, 256), Ssm(6144, 128, 48, 16)),
    "qwen3.6-35b-a3b": _qwen35(Dims(40, 2048, 16, 2, 0, 248320, 256), Ssm(4096, 128, 32, 16),
                               Experts(256, 8, 512, 512)),
    "gemma2-2b": _gemma("gemma2", Dims(26, 2304, 8, 4, 9216, 256000, 256), 4096),
    "gemma3-4b": _gemma("gemma3", Dims(34, 2560, 8, 4, 10240, 262208, 256), 1024),
    "gemma3-12b": _gemma("gemma3", Dims(48, 3840, 16, 8, 15360, 262208, 256), 1024),
    "gemma3-27b": _gemma("gemma3", Dims(62, 5376, 32, 16, 21504, 262208, 128), 1024),
    # The assistant's dimensions are not published: a quarter of the target's width is a guess
    "gemma4-12b": gemma4(Label("model", "swa", "gemma4", "F16"), Dims(48, 3840, 16, 8, 15360, 262144, 256),
                         [i % 6 != 5 for i in range(48)]),
    "gemma4-12b-assistant": gemma4(Label("model", "swa", "gemma4-assistant", "F16"),
                                   Dims(4, 1024, 8, 4, 4096, 262144, 256), [True, True, True, False], backbone=3840),
    "gpt-oss-20b": _gpt_oss(Dims(24, 2880, 64, 8, 2880, 201088, 64), Experts(32, 4, 2880, bias=True)),
    "gpt-oss-120b": _gpt_oss(Dims(36, 2880, 64, 8, 2880, 201088, 64), Experts(128, 4, 2880, bias=True)),
}
# fmt: on

# Of the types that other makers mix: of most feed-forward tensors, of those that are lifted, of the output, of the rest
_MIXES = {
    "UD-IQ2_XXS": ("IQ2_XXS", "IQ3_XXS", "Q4_K", "IQ3_XXS"),
    "UD-Q2_K_XL": ("IQ2_S", "IQ3_S", "Q5_K", "Q4_K"),
    "UD-IQ3_XXS": ("IQ3_XXS", "IQ4_XS", "Q5_K", "Q4_K"),
    "UD-Q3_K_XL": ("IQ3_S", "Q4_K", "Q5_K", "Q5_K"),
    "UD-Q4_K_XL": ("Q4_K", "Q5_K", "Q6_K", "Q5_K"),
    "UD-Q8_K_XL": ("Q8_0", "F16", "Q8_0", "Q8_0"),
    "Q4-XYZ": ("IQ4_XS", "Q4_K", "Q4_K", "Q4_K"),
}
_LIFTED = "Q6_K"  # of a usual type whose file is larger than llama.cpp's own quantiser would make it


def typed(model: str, quant: str, folder: Path, size_bytes: int = 0) -> Shape:
    """The shape of ``model`` with its tensors in the types of ``quant``; ``size_bytes`` is that of the file, if known.

    Raises:
        KeyError: the model or the type is not in the tables.
    """
    shape = SHAPES[model]
    if quant == "MXFP4":
        return shape
    if quant in _MIXES:
        low, lifted, output, rest = _MIXES[quant]
        types = {
            t.name: low if ".ffn_" in t.name or t.name.startswith("token_embd") else rest
            for t in shape.tensors
            if t.type != "F32"
        }
        types["output.weight"] = output
    else:
        types, lifted = run_dry(write(folder / f"{model}-F16.gguf", shape), quant).types, _LIFTED
    usual = [Tensor(t.name, _fitting(types.get(t.name, t.type).upper(), t), t.ne) for t in shape.tensors]
    return replace(shape, tensors=tuple(_grow(usual, lifted, size_bytes)))


def _fitting(kind: str, tensor: Tensor) -> str:
    return kind if tensor.ne[0] % block_of(kind)[0] == 0 else "F16"


def _grow(tensors: list[Tensor], lifted: str, size_bytes: int) -> list[Tensor]:
    """Feed-forward tensors in a larger type, until the file is as large as it was published."""
    found = list(tensors)
    missing = size_bytes - HEADER_BYTES - sum(padded(tensor.nbytes) for tensor in found)
    for index, tensor in enumerate(found):
        larger = Tensor(tensor.name, _fitting(lifted, tensor), tensor.ne)
        if ".ffn_" in tensor.name and tensor.type != "F32" and 0 < larger.nbytes - tensor.nbytes <= missing:
            found[index] = larger
            missing -= larger.nbytes - tensor.nbytes
    return found


def header(model: str, quant: str, folder: Path, size_bytes: int = 0) -> tuple[ModelHeader, Path]:
    """The header of a published file and a metadata-only file of it in ``folder``."""
    name = f"{model}-{quant}" + (f"-{size_bytes}" if size_bytes else "")
    path = folder / f"{name}.gguf"
    if not path.exists():
        write(path, replace(typed(model, quant, folder, size_bytes), name=name))
    known = read_headers([path], None, None)[0]
    return known.header, path
