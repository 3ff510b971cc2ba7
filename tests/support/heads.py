"""Heads for the demo target: MTP blocks in its form as ``mimo2``, and EAGLE-3 heads; of random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from lab.mimo2 import write_mimo2
from tests.support import random_weights, shapes

Array = npt.NDArray[np.float32]

WIDTH, FFN, HEADS, KV_HEADS, HEAD_SIZE, VOCAB = 320, 896, 5, 1, 64, 4096


KINDS = (
    "mtp",
    "mtp chained",
    "mtp sidecar",
    "mtp hybrid",
    "mtp assistant",
    "eagle3",
    "eagle3 shared",
    "eagle3 trimmed",
)


def write_all(target: Path, folder: Path) -> dict[str, tuple[Path, Path]]:
    """(target, head) of each of ``KINDS``."""
    whole = write_mtp(target, folder / "whole.gguf")
    chained = write_mtp(target, folder / "chained.gguf", blocks=2)
    hybrid = write_hybrid(folder / "hybrid.gguf")
    return {
        "mtp": (whole, whole),
        "mtp chained": (chained, chained),
        "mtp sidecar": (
            write_mtp(target, folder / "trunk.gguf", part="trunk"),
            write_mtp(target, folder / "mtp-head.gguf", part="head"),
        ),
        "mtp hybrid": (hybrid, hybrid),
        "mtp assistant": write_gemma4(folder),
        "eagle3": (target, write_eagle3(target, folder / "eagle3.gguf")),
        "eagle3 shared": (target, write_eagle3(target, folder / "shared.gguf", own_output=False)),
        "eagle3 trimmed": (target, write_eagle3(target, folder / "trimmed.gguf", draft_vocab=1000)),
    }


def mtp_block(seed: int, *, noise: float = 0.02) -> dict[str, Array]:
    """A block whose ``eh_proj`` hands the target's row on and whose other matrices are noise: it proposes much of what
    the target says of the token before.
    """
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        return (rng.standard_normal((rows, columns)) * noise / columns**0.5).astype(np.float32)

    def ones() -> Array:
        return np.ones(WIDTH, np.float32)

    identity = np.eye(WIDTH, dtype=np.float32)
    return {
        "attn_norm.weight": ones(),
        "attn_q.weight": matrix(HEADS * HEAD_SIZE, WIDTH),
        "attn_k.weight": matrix(KV_HEADS * HEAD_SIZE, WIDTH),
        "attn_v.weight": matrix(KV_HEADS * HEAD_SIZE, WIDTH),
        "attn_output.weight": matrix(WIDTH, HEADS * HEAD_SIZE),
        "ffn_norm.weight": ones(),
        "ffn_gate.weight": matrix(FFN, WIDTH),
        "ffn_up.weight": matrix(FFN, WIDTH),
        "ffn_down.weight": matrix(WIDTH, FFN),
        "nextn.eh_proj.weight": np.concatenate([identity * 2, identity], axis=1),
        "nextn.enorm.weight": ones(),
        "nextn.hnorm.weight": ones(),
    }


def write_mtp(target: Path, path: Path, blocks: int = 1, part: str = "whole") -> Path:
    """The demo target as mimo2 with so many MTP blocks."""
    return write_mimo2(target, path, [mtp_block(seed) for seed in range(blocks)], part)


def write_eagle3(
    target: Path,
    path: Path,
    *,
    layers: Sequence[int] = (2, 4, 5),
    own_output: bool = True,
    draft_vocab: int = 0,
    width: int = WIDTH,
    target_width: int = WIDTH,
    value_size: int = HEAD_SIZE,
    tokens: int = VOCAB,
) -> Path:
    """An EAGLE-3 head of random weights for the demo target.

    Args:
        target: whose tokens it has.
        path: the file to write.
        layers: of the target, whose input rows it reads.
        own_output: whether it has embeddings and an output of its own.
        draft_vocab: tokens that it knows, the first of the target's; 0: all.
        width: of the head.
        target_width: of the rows that it says it reads.
        tokens: of its vocabulary, the target's and padding that it proposes wherever it can, or fewer.
        value_size: numbers of a value; llama.cpp runs only as many as a key has.
    """
    reader = gguf.GGUFReader(target)
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_name("a head")
    writer.add_context_length(2048)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(value_size)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array("eagle3.target_layers", list(layers))
    writer.add_uint32("eagle3.target_hidden_size", target_width)
    writer.add_uint32("eagle3.vocab_size", tokens)
    for field in reader.fields.values():
        if field.name.startswith("tokenizer."):
            kind, of = field.types[0], field.types[-1] if len(field.types) > 1 else None
            value = field.contents()
            if isinstance(value, list) and len(value) == VOCAB:
                value = value[:tokens] + [
                    f"<pad {i}>" if of == gguf.GGUFValueType.STRING else 1 for i in range(VOCAB, tokens)
                ]
            writer.add_key_value(field.name, value, kind, of)
    vocab = draft_vocab or tokens

    def matrix(name: str, rows: int, columns: int) -> None:
        values = rng.standard_normal((rows, columns)) / columns**0.5
        values[VOCAB:] *= 100
        writer.add_tensor(name, values.astype(np.float16))

    def ones(name: str) -> None:
        writer.add_tensor(name, np.ones(width, np.float32))

    matrix("fc.weight", width, len(layers) * target_width)
    ones("output_norm.weight")
    if own_output:
        matrix("output.weight", vocab, width)
        matrix("token_embd.weight", tokens, width)
    if draft_vocab:
        writer.add_tensor("d2t", np.arange(draft_vocab, dtype=np.int64))
    ones("blk.0.attn_norm.weight")
    ones("blk.0.attn_norm_2.weight")
    matrix("blk.0.attn_q.weight", HEADS * HEAD_SIZE, 2 * width)
    matrix("blk.0.attn_k.weight", KV_HEADS * HEAD_SIZE, 2 * width)
    matrix("blk.0.attn_v.weight", KV_HEADS * value_size, 2 * width)
    matrix("blk.0.attn_output.weight", width, HEADS * HEAD_SIZE)
    ones("blk.0.ffn_norm.weight")
    matrix("blk.0.ffn_gate.weight", FFN, width)
    matrix("blk.0.ffn_up.weight", FFN, width)
    matrix("blk.0.ffn_down.weight", width, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_hybrid(path: Path, blocks: int = 1) -> Path:
    """A tiny hybrid model of random weights, whose state is recurrent, with MTP blocks that say what its embeddings and
    output say by themselves: much of that is right.
    """
    dims, ssm = shapes.Dims(4, 256, 4, 2, 512, 1024, 64), shapes.Ssm(256, 64, 4, 2)
    shape = shapes.qwen35(shapes.Label("hybrid", "hybrid", "qwen35", "Q8_0"), dims, ssm, nextn_blocks=blocks)
    random_weights.write(path, shape, tokenizer=True)
    trunk = _weights(path)
    named = {"embed_tokens": "token_embd", "shared_head_head": "output", "shared_head_norm": "output_norm"}
    changed = {name: values * np.float32(0.004) for name, values in trunk.items() if name.endswith(_INTO_THE_STREAM)}
    for block in range(dims.blocks, dims.blocks + blocks):
        nextn = f"blk.{block}.nextn"
        changed |= {f"{nextn}.{name}.weight": trunk[f"{same}.weight"] for name, same in named.items()}
        changed[f"{nextn}.eh_proj.weight"] = _mostly_token(dims.width, dims.width)
    return _change(path, changed)


def write_gemma4(folder: Path) -> tuple[Path, Path]:
    """A tiny Gemma 4 of random weights, and an assistant that says what its embeddings and output say by themselves."""
    dims, own = shapes.Dims(4, 256, 4, 2, 512, 1024, 64), shapes.Dims(2, 128, 4, 2, 256, 1024, 64)
    target = shapes.gemma4(shapes.Label("gemma4", "swa", "gemma4", "F16"), dims, (True, True, True, False))
    label = shapes.Label("assistant", "swa", "gemma4-assistant", "F16")
    assistant = shapes.gemma4(label, own, (True, False), backbone=dims.width)
    paths = folder / "gemma4.gguf", folder / "gemma4-assistant.gguf"
    for path, shape in zip(paths, (target, assistant), strict=True):
        random_weights.write(path, shape, tokenizer=True)
        weights = _weights(path)
        whole = [
            name for name in weights if name.endswith(("output_norm.weight", "output_scale.weight", "freqs.weight"))
        ]
        small = [name for name in weights if name.endswith(("post_attention_norm.weight", "post_ffw_norm.weight"))]
        changed = dict.fromkeys(whole, 1.0) | dict.fromkeys(small, 0.03)
        _change(path, {name: np.full_like(weights[name], value) for name, value in changed.items()})
    output = np.concatenate([_weights(paths[1])["token_embd.weight"], np.zeros((1024, 128), np.float32)], axis=1)
    _change(paths[0], {"output.weight": output})
    _change(paths[1], {"nextn.pre_projection.weight": _mostly_token(dims.width, own.width)})
    return paths


_INTO_THE_STREAM = ("attn_output.weight", "ssm_out.weight", "ffn_down.weight")


def _mostly_token(width: int, rows: int) -> Array:
    """The matrix (rows, 2 × width) that takes the first numbers of a token's embedding, and a tenth of the row's."""
    identity = np.eye(rows, width, dtype=np.float32)
    return np.concatenate([identity, identity / 10], axis=1)


def _weights(path: Path) -> dict[str, Array]:
    return {one.name: gguf.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(path).tensors}


def _change(path: Path, values: Mapping[str, Array]) -> Path:
    """Put other numbers into some tensors of a file."""
    reader = gguf.GGUFReader(path, "r+")
    for tensor in reader.tensors:
        if tensor.name in values:
            tensor.data[:] = gguf.quantize(values[tensor.name], tensor.tensor_type)
    reader.data.flush()
    return path
