"""Heads: drafters whose file has a few blocks that read the target's hidden rows. Identifies and checks them.

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
class Kind:
    """A kind of head: its description, llama-server's ``--spec-type`` for it, and the drafter that runs it here."""

    what: str
    spec_type: str = ""
    drafter: str = ""


MTP = Kind("a head for multi-token prediction", "draft-mtp", "mtp")
EAGLE3 = Kind("an EAGLE-3 head", "draft-eagle3", "eagle3")
ASSISTANT = Kind("a head for multi-token prediction that reads the target's cache", "draft-mtp", "mtp")
_DFLASH = Kind("a DFlash drafter", "draft-dflash")
_DSPARK = Kind("a DSpark drafter", "draft-dspark")
_MEDUSA = Kind("a set of Medusa heads")  # unsupported by llama.cpp

# By the prefix of their files in a repository: ``mtp-NAME-Q8_0.gguf`` (gguf_filename_is_model, common/download.cpp)
SIDECARS = {"mtp": MTP, "eagle3": EAGLE3, "dflash": _DFLASH, "dspark": _DSPARK}

_BY_ARCHITECTURE = {"eagle3": EAGLE3, "gemma4-assistant": ASSISTANT, "dflash": _DFLASH}


def sidecar(file: str) -> Kind | None:
    """Return the kind of head of a file in a repository, by its name; None for a model."""
    word, dash, _ = file.rpartition("/")[2].partition("-")
    return SIDECARS.get(word) if dash else None


def kind_of(header: ModelHeader) -> Kind | None:
    """Return the kind of head of a file; None for a whole model, with or without MTP blocks."""
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


def kind_of_draft(target: ModelHeader, draft: ModelHeader, drafter: str = "") -> Kind | None:
    """Return the kind of head of a draft; with the drafter ``mtp`` it may be the target, for its own MTP blocks."""
    return MTP if is_own(target, draft, drafter) else kind_of(draft)


def is_own(target: ModelHeader, draft: ModelHeader, drafter: str) -> bool:
    """Return True if the draft is the target itself, for its own MTP blocks."""
    return drafter == MTP.drafter and draft.fingerprint == target.fingerprint


def in_target(target: ModelHeader) -> bool:
    """Return True if the target's own file has MTP blocks that can draft for it."""
    return bool(target.nextn_blocks) and not any(objections(target, target, MTP))


def require(target: ModelHeader, draft: ModelHeader, drafter: str) -> Kind:
    """Return the kind of head of a draft file; ``drafter`` names the kind that it has to be, if any.

    Raises:
        UsageError: it is not such a head; says what it is.
    """
    kind = kind_of_draft(target, draft, drafter)
    if kind is None or (drafter and kind.drafter not in ("", drafter)):
        what, own = (kind.what, kind.drafter) if kind else ("a model of its own", "draft")
        raise UsageError(f"--drafter {drafter} needs such a head, and {draft.name} is {what}", f"--drafter {own}")
    return kind


def sources(head: ModelHeader) -> tuple[int, ...]:
    """Return the target's rows that a head reads, as in ``ContextOptions.hidden``."""
    layers = head.metadata.get("eagle3.target_layers")
    return tuple(map(int, layers)) if head.architecture == "eagle3" and isinstance(layers, tuple) else (LAST_HIDDEN,)


def as_read(target: ModelHeader, head: ModelHeader) -> ModelHeader:
    """Return what a step of a head reads as a separate model: its blocks, and the output, perhaps the target's.

    Args:
        target: its target.
        head: its file; the target again for the target's own blocks.
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
        lent = "token_embd.weight" if target.tied else "output.weight"
        tensors += [replace(tensor, name="output.weight") for tensor in target.tensors if tensor.name == lent]
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


def objections(target: ModelHeader, head: ModelHeader, kind: Kind) -> Iterator[str]:
    """Yield why a head cannot draft for this target, as clauses, by the headers alone, without vocabularies."""
    if absent := staging.missing(kind.drafter):
        yield f"the installed llama.cpp has no {absent}, which {kind.what} needs"
        return
    if head.key_size != head.value_size:  # an assertion of their graphs: src/models/*.cpp
        yield f"its keys have {head.key_size} numbers and its values {head.value_size}, and llama.cpp runs equal ones"
    yield from _OBJECTIONS[kind](target, head)


def _eagle3_objections(target: ModelHeader, head: ModelHeader) -> Iterator[str]:
    if target.architecture not in staging.LAYER_INPUTS:
        yield f"llama.cpp hands out no hidden rows of the target's architecture ({target.architecture})"
    width = head.metadata.get("eagle3.target_hidden_size", head.embedding)
    if width != target.embedding:
        yield f"the head was made for rows of {width} numbers, and the target's have {target.embedding}"
    layers = head.metadata.get("eagle3.target_layers")
    trunk = target.blocks - target.nextn_blocks
    if not isinstance(layers, tuple) or len(layers) != 3:
        yield "the head does not say which three layers it reads (eagle3.target_layers)"
    elif any(not isinstance(layer, int) or not 0 <= layer < trunk for layer in layers):
        yield f"the head reads the layers {', '.join(map(str, layers))}, and the target has {trunk} blocks"
    if head.blocks != 1:
        yield f"the head has {head.blocks} blocks, and llama.cpp runs EAGLE-3 heads of one"
    tensors = {tensor.name: tensor for tensor in head.tensors}
    own = {"token_embd.weight", "output.weight"} & tensors.keys()
    if len(own) < 2 and head.embedding != target.embedding:
        yield f"the head borrows the target's embeddings, of {target.embedding} numbers, its own has {head.embedding}"
    if (table := tensors.get("token_embd.weight")) and table.shape[-1] != head.tokenizer.size:
        yield f"its embeddings have {table.shape[-1]:,} of {head.tokenizer.size:,} tokens"
    if (ids := tensors.get("d2t")) and ids.type != "i64":
        yield f"its token ids (d2t) are of the type {ids.type}, and llama.cpp reads i64"
    if ids and "output.weight" not in tensors:
        yield "it has token ids of its own (d2t) and no output of its own, which llama.cpp cannot run"


def _mtp_objections(target: ModelHeader, head: ModelHeader) -> Iterator[str]:
    tensors = {tensor.name: tensor for tensor in head.tensors}
    first = head.blocks - head.nextn_blocks
    unsaid = (one.name for one in head.tensors if ".nextn." in one.name and (block_of(one) or 0) < first)
    if name := next(unsaid, ""):
        yield f"it has {name}, and {head.architecture}.nextn_predict_layers is {head.nextn_blocks}"
        return
    if not head.nextn_blocks:
        yield "its file has no MTP blocks"
        return
    if target.architecture not in staging.MTP:
        yield f"llama.cpp runs no MTP blocks of the target's architecture ({target.architecture})"
    if head.architecture != target.architecture:
        yield f"the head is of the architecture {head.architecture}, and the target is {target.architecture}"
    for block in range(first, head.blocks):
        for name in (f"blk.{block}.{part}.weight" for part in (*_MTP_TENSORS, *_MORE.get(head.architecture, ()))):
            if name not in tensors:
                yield f"the file was trimmed: of {counted(head.nextn_blocks, 'MTP block')} it lacks {name}"
                return
    if head.nextn_blocks > 1 and head.architecture not in staging.CHAINED_MTP:
        yield f"it has {head.nextn_blocks} MTP blocks, and llama.cpp runs one of {head.architecture}"
    if head.embedding != target.embedding:
        yield f"the head reads rows of {head.embedding} numbers, and the target's have {target.embedding}"
    rows = tensors["output.weight"].shape[-1] if "output.weight" in tensors else head.tokenizer.size
    if rows != head.tokenizer.size:
        yield f"its output has {rows:,} of {head.tokenizer.size:,} tokens, which llama.cpp cannot load for MTP"


# Asserted by graphs of MTP blocks, though the loader does without: src/models/*.cpp
_MTP_TENSORS = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")
_MORE = {"mimo2": ("attn_qkv", "ffn_gate", "ffn_up", "ffn_down")}


def _assistant_objections(target: ModelHeader, head: ModelHeader) -> Iterator[str]:
    """Check a head that reads the cache of the target's last two blocks, a windowed and a full one, as its own."""
    if target.architecture != "gemma4":
        yield f"the head reads the cache of a gemma4, and the target is {target.architecture}"
        return
    width = head.metadata.get("gemma4-assistant.embedding_length_out", head.embedding)
    if width != target.embedding:
        yield f"the head reads rows of {width} numbers, and the target's have {target.embedding}"
    if head.nextn_blocks != head.blocks:
        has = counted(head.blocks, "block")
        yield f"it has {has}, and gemma4-assistant.nextn_predict_layers is {head.nextn_blocks}"
    if target.blocks < 2 or target.windowed[-2:] != (True, False):
        yield "the target's last two blocks are not one with a sliding window and one without, whose cache it reads"
        return
    for block, windowed in enumerate(head.windowed):
        its, own = target.blocks - 1 - windowed, (head.keys(block), head.values(block))
        if own != (target.keys(its), target.values(its)):
            yield (
                f"its block {block} reads keys and values of {own[0]} and {own[1]} numbers a token, and the target's "
                f"block {its} has {target.keys(its)} and {target.values(its)}"
            )
            return


_OBJECTIONS = {EAGLE3: _eagle3_objections, MTP: _mtp_objections, ASSISTANT: _assistant_objections}
