"""Heads of a small target for its function-preserving expansion: the same drafts at the cost of the larger shape.

The expansion (ggufspec/models/expansion.py) appends zeros to every row of the residual stream, and blocks that write
nothing after the source's own. So the rows that a head reads are the small target's plus zeros, and the input of a
layer is the same under the same number. A head is expanded as one block of the target is: zeros around its matrices,
its norms and epsilon scaled for the larger mean. Parts that read several rows side by side (``fc``, ``eh_proj``,
attention over token and row) find each at a multiple of the new width.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from ggufspec.errors import UsageError
from ggufspec.models.expansion import LlamaShape, read_source
from lab.expansion import fit
from lab.mimo2 import read_blocks, write_mimo2

Array = npt.NDArray[np.float32]

_WRITTEN_ANEW = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def expanded_tensors(tensors: Mapping[str, Array], target: Path, big: LlamaShape) -> dict[str, Array]:
    """Return a head's tensors for the shape that its target is expanded to.

    Args:
        tensors: rows first, rotated pairs adjacent; names as in a GGUF file, with or without ``blk.N.``.
        target: the small llama model that the head was made for; the head's block has its shape.
        big: nowhere smaller; tokens and head size are the target's.

    Raises:
        UsageError: the shape changes what must stay, or does not hold the target.
    """
    small = read_source(target)
    source, layout = small.shape, fit(small, big, "F16")
    if (big.vocab, big.head_size) != (source.vocab, source.head_size):
        raise UsageError("a head keeps its target's vocabulary and head size", "leave --vocab and --head-size out")
    inside = np.arange(big.head_size)
    queries, keys, copied = (
        (np.array(heads)[:, None] * big.head_size + inside).ravel()
        for heads in (layout.query_at, range(len(layout.kv_of)), layout.kv_of)
    )
    places = {source.width: np.arange(source.width)}
    rows = {"attn_q": (big.heads * big.head_size, queries)}
    rows |= dict.fromkeys(("attn_k", "attn_v"), (big.kv_heads * big.head_size, keys))
    rows |= dict.fromkeys(("ffn_gate", "ffn_up"), (big.ffn, np.arange(source.ffn)))
    rows |= dict.fromkeys(("fc", "eh_proj", "attn_output", "ffn_down"), (big.width, places[source.width]))

    def one(name: str, values: Array) -> Array:
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if kind == "d2t":
            return values
        if values.ndim == 1:
            norm = np.zeros(big.width, np.float32)
            norm[: source.width] = values * (source.width / big.width) ** 0.5
            return norm
        if kind in ("attn_k", "attn_v"):
            values = values[copied]
        height, own = rows.get(kind, (len(values), np.arange(len(values))))  # the output and the embeddings
        if kind == "attn_output":
            length, columns = rows["attn_q"]
        elif kind == "ffn_down":
            length, columns = rows["ffn_gate"]
        else:
            count = values.shape[1] // source.width  # rows of the residual stream side by side
            length = count * big.width
            columns = (np.arange(count)[:, None] * big.width + np.arange(source.width)).ravel()
        found = np.zeros((height, length), np.float32)
        found[np.ix_(own, columns)] = values
        return found

    return {name: one(name, values) for name, values in tensors.items()}


def expand_eagle3(head: Path, target: Path, big: LlamaShape, path: Path) -> Path:
    """Write an EAGLE-3 head for the expanded target, in F16.

    Args:
        head: head of the small target, in any type; it reads raw rows (no ``norm_before_fc``).
        target: the small target.
        big: shape of the expanded one.
        path: the file to write.
    """
    reader = gguf.GGUFReader(head)
    eps = (
        reader.fields["eagle3.attention.layer_norm_rms_epsilon"].contents()
        * read_source(target).shape.width
        / big.width
    )
    changed = {
        "eagle3.embedding_length": big.width,
        "eagle3.target_hidden_size": big.width,
        "eagle3.feed_forward_length": big.ffn,
        "eagle3.attention.head_count": big.heads,
        "eagle3.attention.head_count_kv": big.kv_heads,
        "eagle3.attention.layer_norm_rms_epsilon": eps,
    }
    writer = gguf.GGUFWriter(path, "eagle3")
    for field in reader.fields.values():
        if not field.name.startswith(_WRITTEN_ANEW):
            kind, of = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, changed.get(field.name, field.contents()), kind, of)
    tensors = {
        tensor.name: tensor.data if tensor.name == "d2t" else gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in reader.tensors
    }
    for name, values in expanded_tensors(tensors, target, big).items():
        kind = values.dtype if name == "d2t" else np.float16 if values.ndim > 1 else np.float32
        writer.add_tensor(name, values.astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def expand_mimo2(small: Path, target: Path, expanded: Path, path: Path) -> Path:
    """Write the expanded target as ``mimo2`` with the MTP blocks of the small one, in F16.

    Args:
        small: MTP blocks of the small target, separate or in it, in any type (:func:`lab.mimo2.write_mimo2`).
        target: the small target as llama.
        expanded: the expanded one as llama, in F16.
        path: the file to write.
    """
    blocks = [expanded_tensors(block, target, read_source(expanded).shape) for block in read_blocks(small)]
    return write_mimo2(expanded, path, blocks)
