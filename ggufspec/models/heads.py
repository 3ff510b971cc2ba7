"""Identification and checks of heads, which are drafters with a few blocks that read the target's hidden states.

Source: ``common_speculative_types_from_gguf`` in common/speculative.cpp, src/models/eagle3.cpp, src/models/mimo2.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ggufspec.errors import UsageError
from ggufspec.llamacpp import staging
from ggufspec.llamacpp.options import LAST_HIDDEN
from ggufspec.models.header import ModelHeader, block_of
from ggufspec.schema.text import counted


@dataclass(frozen=True, slots=True)
class HeadKind:
    """Kind of head, with its description, llama-server's ``--spec-type`` and ggufspec's drafter for it."""

    what: str
    spec_type: str = ""
    drafter: str = ""


MTP = HeadKind("a head for multi-token prediction", "draft-mtp", "mtp")
EAGLE3 = HeadKind("an EAGLE-3 head", "draft-eagle3", "eagle3")
ASSISTANT = HeadKind("a head for multi-token prediction that reads the target's cache", "draft-mtp", "mtp")
_DFLASH = HeadKind("a DFlash drafter", "draft-dflash")
_DSPARK = HeadKind("a DSpark drafter", "draft-dspark")
_MEDUSA = HeadKind("a set of Medusa heads")  # llama.cpp does not support these

# Heads by file name prefix in a repository: ``mtp-NAME-Q8_0.gguf`` (gguf_filename_is_model, common/download.cpp)
SIDECARS = {"mtp": MTP, "eagle3": EAGLE3, "dflash": _DFLASH, "dspark": _DSPARK}

_BY_ARCHITECTURE = {"eagle3": EAGLE3, "gemma4-assistant": ASSISTANT, "dflash": _DFLASH}


def sidecar(file: str) -> HeadKind | None:
    """Return the kind of head that a file's name in a repository indicates; None for a model."""
    word, dash, _ = file.rpartition("/")[2].partition("-")
    return SIDECARS.get(word) if dash else None


def head_kind(header: ModelHeader) -> HeadKind | None:
    """Return the kind of head in a file; None for a complete model, with or without MTP blocks."""
    names = {tensor.name for tensor in header.tensors}
    if header.architecture == "dflash" and "markov_w1.weight" in names:
        return _DSPARK
    if header.architecture in _BY_ARCHITECTURE:
        return _BY_ARCHITECTURE[header.architecture]
    if "medusa" in header.architecture or any(name.startswith("medusa") for name in names):
        return _MEDUSA
    blocks = [block for tensor in header.tensors if (block := block_of(tensor)) is not None]
    first = min(blocks, default=0)
    stated = header.nextn_blocks and first >= header.blocks - header.nextn_blocks
    return MTP if stated or (first and any(".nextn." in name for name in names)) else None


def kind_of_draft(target: ModelHeader, draft: ModelHeader, drafter: str = "") -> HeadKind | None:
    """Return a draft's kind of head, or None; with ``drafter`` ``mtp``, the draft may be the target's MTP blocks."""
    return MTP if is_own(target, draft, drafter) else head_kind(draft)


def is_own(target: ModelHeader, draft: ModelHeader, drafter: str) -> bool:
    """Return True if the draft is the target itself, which then drafts with its own MTP blocks."""
    return drafter == MTP.drafter and draft.fingerprint == target.fingerprint


def in_target(target: ModelHeader) -> bool:
    """Return True if the target's own file has MTP blocks that can draft for it."""
    return bool(target.nextn_blocks) and not any(objections(target, target, MTP))


def require_head(target: ModelHeader, draft: ModelHeader, drafter: str) -> HeadKind:
    """Return a draft's kind of head; ``drafter`` is the required kind, if any.

    Raises:
        UsageError: the draft is not a head of that kind; the message says what it is.
    """
    kind = kind_of_draft(target, draft, drafter)
    if kind is None or (drafter and kind.drafter not in ("", drafter)):
        what, own = (kind.what, kind.drafter) if kind else ("a complete model", "draft")
        raise UsageError(f"--drafter {drafter} needs such a head, but {draft.name} is {what}", f"--drafter {own}")
    return kind


def hidden_sources(head: ModelHeader) -> tuple[int, ...]:
    """Return the target layers whose hidden states a head reads, as ``ContextOptions.hidden`` expects them."""
    layers = head.metadata.get("eagle3.target_layers")
    return tuple(map(int, layers)) if head.architecture == "eagle3" and isinstance(layers, tuple) else (LAST_HIDDEN,)


def as_read(target: ModelHeader, head: ModelHeader) -> ModelHeader:
    """Return a header with the weights that one step of a head reads: its blocks, and its own or the target's output.

    Args:
        target: the head's target.
        head: the head's header, or the target's again if the head is in the target's file.
    """
    first = head.blocks - head.nextn_blocks if head.nextn_blocks else 0
    some = slice(first, head.blocks)
    tensors = []
    for tensor in head.tensors:
        block = block_of(tensor)
        if block is None:
            if head is not target or tensor.name in _OUTPUT or (tensor.name == "token_embd.weight" and head.tied):
                tensors.append(tensor)
        elif block >= first:
            tensors.append(replace(tensor, name=re.sub(r"^blk\.\d+", f"blk.{block - first}", tensor.name)))
    names = {tensor.name for tensor in tensors}
    if "output.weight" not in names and head.architecture == "eagle3":
        borrowed = "token_embd.weight" if target.tied else "output.weight"
        tensors += [replace(tensor, name="output.weight") for tensor in target.tensors if tensor.name == borrowed]
    return replace(
        head,
        blocks=head.blocks - first,
        nextn_blocks=0,
        heads=head.heads[some],
        kv_heads=head.kv_heads[some],
        feed_forward=head.feed_forward[some],
        windowed=head.windowed[some],
        recurrent=(False,) * (head.blocks - first),
        cached=(True,) * (head.blocks - first),
        tensors=tuple(tensors),
    )


_OUTPUT = ("output.weight", "output_norm.weight")


def objections(target: ModelHeader, head: ModelHeader, kind: HeadKind) -> Iterator[str]:
    """Yield clauses that say why a head cannot draft for this target, without comparing vocabularies."""
    if absent := staging.missing_function(kind.drafter):
        yield f"the installed llama.cpp has no {absent}, which {kind.what} needs"
        return
    if head.key_size != head.value_size:  # heads' graphs assert that both are equal: src/models/*.cpp
        yield f"its keys have size {head.key_size} and its values {head.value_size}, but llama.cpp needs equal sizes"
    yield from _OBJECTIONS[kind](target, head)


def _eagle3_objections(target: ModelHeader, head: ModelHeader) -> Iterator[str]:
    if target.architecture not in staging.LAYER_INPUTS:
        yield f"llama.cpp does not expose the hidden states of the target's architecture ({target.architecture})"
    width = head.metadata.get("eagle3.target_hidden_size", head.embedding)
    if width != target.embedding:
        yield f"the head was made for hidden states of size {width}, but the target's have size {target.embedding}"
    layers = head.metadata.get("eagle3.target_layers")
    trunk = target.blocks - target.nextn_blocks
    if not isinstance(layers, tuple) or len(layers) != 3:
        yield "the head does not say which three layers it reads (eagle3.target_layers)"
    elif any(not isinstance(layer, int) or not 0 <= layer < trunk for layer in layers):
        yield f"the head reads the layers {', '.join(map(str, layers))}, but the target has {trunk} blocks"
    if head.blocks != 1:
        yield f"the head has {head.blocks} blocks, but llama.cpp supports only EAGLE-3 heads with one"
    tensors = {tensor.name: tensor for tensor in head.tensors}
    own = {"token_embd.weight", "output.weight"} & tensors.keys()
    if len(own) < 2 and head.embedding != target.embedding:
        yield f"the head shares the target's embeddings of size {target.embedding}, but expects size {head.embedding}"
    if (table := tensors.get("token_embd.weight")) and table.shape[-1] != head.tokenizer.size:
        yield f"its embeddings cover {table.shape[-1]:,} of {head.tokenizer.size:,} tokens"
    if (ids := tensors.get("d2t")) and ids.type != "i64":
        yield f"its token ids (d2t) have type {ids.type}, but llama.cpp needs i64"
    if ids and "output.weight" not in tensors:
        yield "it has token ids of its own (d2t) but no output of its own, which llama.cpp does not support"


def _mtp_objections(target: ModelHeader, head: ModelHeader) -> Iterator[str]:
    tensors = {tensor.name: tensor for tensor in head.tensors}
    first = head.blocks - head.nextn_blocks
    unsaid = (one.name for one in head.tensors if ".nextn." in one.name and (block_of(one) or 0) < first)
    if name := next(unsaid, ""):
        yield f"it has {name}, but {head.architecture}.nextn_predict_layers is {head.nextn_blocks}"
        return
    if not head.nextn_blocks:
        yield "its file has no MTP blocks"
        return
    if target.architecture not in staging.MTP:
        yield f"llama.cpp does not support MTP blocks of the target's architecture ({target.architecture})"
    if head.architecture != target.architecture:
        yield f"the head's architecture is {head.architecture}, but the target is {target.architecture}"
    for block in range(first, head.blocks):
        for name in (f"blk.{block}.{part}.weight" for part in (*_MTP_TENSORS, *_MORE.get(head.architecture, ()))):
            if name not in tensors:
                yield f"the file was trimmed: its {counted(head.nextn_blocks, 'MTP block')} should include {name}"
                return
    if head.nextn_blocks > 1 and head.architecture not in staging.CHAINED_MTP:
        yield f"it has {head.nextn_blocks} MTP blocks, but llama.cpp supports only one for {head.architecture}"
    if head.embedding != target.embedding:
        yield f"the head reads hidden states of size {head.embedding}, but the target's have size {target.embedding}"
    rows = tensors["output.weight"].shape[-1] if "output.weight" in tensors else head.tokenizer.size
    if rows != head.tokenizer.size:
        yield f"its output covers {rows:,} of {head.tokenizer.size:,} tokens, which llama.cpp cannot load for MTP"


# Tensors whose presence the graphs of MTP blocks assert, although the loader does not require it: src/models/*.cpp
_MTP_TENSORS = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")
_MORE = {"mimo2": ("attn_qkv", "ffn_gate", "ffn_up", "ffn_down")}


def _assistant_objections(target: ModelHeader, head: ModelHeader) -> Iterator[str]:
    """Check a head that reads the KV cache of the target's last two blocks, one with a sliding window, one without."""
    if target.architecture != "gemma4":
        yield f"the head reads the cache of a gemma4, but the target is {target.architecture}"
        return
    width = head.metadata.get("gemma4-assistant.embedding_length_out", head.embedding)
    if width != target.embedding:
        yield f"the head reads hidden states of size {width}, but the target's have size {target.embedding}"
    if head.nextn_blocks != head.blocks:
        has = counted(head.blocks, "block")
        yield f"it has {has}, but gemma4-assistant.nextn_predict_layers is {head.nextn_blocks}"
    if target.blocks < 2 or target.windowed[-2:] != (True, False):
        yield "the target's last two blocks, whose caches it reads, are not one with a sliding window and one without"
        return
    for block, windowed in enumerate(head.windowed):
        its, own = target.blocks - 1 - windowed, (head.keys(block), head.values(block))
        if own != (target.keys(its), target.values(its)):
            yield (
                f"its block {block} reads keys and values of sizes {own[0]} and {own[1]} per token, but the target's "
                f"block {its} has {target.keys(its)} and {target.values(its)}"
            )
            return


_OBJECTIONS = {EAGLE3: _eagle3_objections, MTP: _mtp_objections, ASSISTANT: _assistant_objections}
