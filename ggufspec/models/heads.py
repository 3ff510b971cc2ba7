"""Heads: drafters whose file is a few blocks that read the target's hidden rows. Which one a header is, and for whom.

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


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of head: what to call it, llama-server's ``--spec-type`` for it, and the drafter that runs it here."""

    what: str
    spec_type: str = ""
    drafter: str = ""


MTP = Kind("a head for multi-token prediction", "draft-mtp", "mtp")
EAGLE3 = Kind("an EAGLE-3 head", "draft-eagle3", "eagle3")
_SHARED = Kind("a head for multi-token prediction that reads the target's cache", "draft-mtp")
_DFLASH = Kind("a DFlash drafter", "draft-dflash")
_DSPARK = Kind("a DSpark drafter", "draft-dspark")
_MEDUSA = Kind("a set of Medusa heads")  # llama.cpp has none

_BY_ARCHITECTURE = {"eagle3": EAGLE3, "gemma4-assistant": _SHARED, "dflash": _DFLASH}


def kind_of(header: ModelHeader) -> Kind | None:
    """What kind of head a file is; None for a whole model, with or without MTP blocks of its own."""
    names = {tensor.name for tensor in header.tensors}
    if header.architecture == "dflash" and "markov_w1.weight" in names:
        return _DSPARK
    if header.architecture in _BY_ARCHITECTURE:
        return _BY_ARCHITECTURE[header.architecture]
    if "medusa" in header.architecture or any(name.startswith("medusa") for name in names):
        return _MEDUSA
    blocks = [block for tensor in header.tensors if (block := block_of(tensor)) is not None]
    if header.nextn_blocks and all(block >= header.blocks - header.nextn_blocks for block in blocks):
        return MTP
    return None


def kind_of_draft(target: ModelHeader, draft: ModelHeader, drafter: str = "") -> Kind | None:
    """What kind of head a draft is; with the drafter ``mtp`` the target itself stands for its own MTP blocks."""
    return MTP if is_own(target, draft, drafter) else kind_of(draft)


def is_own(target: ModelHeader, draft: ModelHeader, drafter: str) -> bool:
    """Whether the draft is the target itself, for its own MTP blocks."""
    return drafter == MTP.drafter and draft.fingerprint == target.fingerprint


def in_target(target: ModelHeader) -> bool:
    """Whether the target's own file has MTP blocks that can draft for it."""
    return bool(target.nextn_blocks) and not any(objections(target, target, MTP))


def require(target: ModelHeader, draft: ModelHeader, drafter: str) -> Kind:
    """The kind of head that a draft file is; ``drafter`` names the kind that it is to be, if any.

    Raises:
        UsageError: it is no such head, with what it is.
    """
    kind = kind_of_draft(target, draft, drafter)
    if kind is None or (drafter and kind.drafter not in ("", drafter)):
        what, own = (kind.what, kind.drafter) if kind else ("a model of its own", "draft")
        raise UsageError(f"--drafter {drafter} needs such a head, and {draft.name} is {what}", f"--drafter {own}")
    return kind


def sources(head: ModelHeader) -> tuple[int, ...]:
    """The target's rows that a head reads, as ``ContextOptions.hidden`` names them."""
    layers = head.metadata.get("eagle3.target_layers")
    return tuple(map(int, layers)) if head.architecture == "eagle3" and isinstance(layers, tuple) else (LAST_HIDDEN,)


def as_read(target: ModelHeader, head: ModelHeader) -> ModelHeader:
    """What a step of a head reads, as a model of its own: its blocks, and the output, which may be the target's.

    Args:
        target: its target.
        head: its file; the target again where the blocks are in the target's own.
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
    if "output.weight" not in names and head is not target:
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
    """Why a head cannot draft for this target, as clauses, by the headers alone; vocabularies aside."""
    if absent := staging.missing(kind.drafter):
        yield f"the installed llama.cpp has no {absent}, which {kind.what} needs"
        return
    if kind is MTP and not head.nextn_blocks:
        yield "its file has no MTP blocks"
        return
    known = staging.LAYER_INPUTS if kind is EAGLE3 else staging.LAST_ROWS
    if target.architecture not in known:
        yield f"llama.cpp hands out no hidden rows of the target's architecture ({target.architecture})"
    if kind is MTP:
        yield from _mtp_objections(target, head)
        return
    width = head.metadata.get("eagle3.target_hidden_size", head.embedding)
    if width != target.embedding:
        yield f"the head was made for rows of {width} numbers, and the target's have {target.embedding}"
    layers = head.metadata.get("eagle3.target_layers")
    trunk = target.blocks - target.nextn_blocks
    if not isinstance(layers, tuple) or len(layers) != 3:
        yield "the head does not say which three layers it reads (eagle3.target_layers)"
    elif any(not 0 <= layer < trunk for layer in layers):
        yield f"the head reads the layers {', '.join(map(str, layers))}, and the target has {trunk} blocks"
    names = {tensor.name for tensor in head.tensors}
    own = {"token_embd.weight", "output.weight"} & names
    if len(own) < 2 and head.embedding != target.embedding:
        yield f"the head borrows the target's embeddings, of {target.embedding} numbers, its own has {head.embedding}"


def _mtp_objections(target: ModelHeader, head: ModelHeader) -> Iterator[str]:
    first = head.blocks - head.nextn_blocks
    shapes = {tensor.name: tensor.shape for tensor in head.tensors}
    if f"blk.{first}.nextn.eh_proj.weight" not in shapes:
        yield f"the file was trimmed: of {head.nextn_blocks} MTP blocks it has no blk.{first}.nextn.eh_proj.weight"
    if head.architecture != target.architecture:
        yield f"the head is of the architecture {head.architecture}, and the target is {target.architecture}"
    if head.embedding != target.embedding:
        yield f"the head reads rows of {head.embedding} numbers, and the target's have {target.embedding}"
    rows = shapes.get("output.weight", (0, head.tokenizer.size))[-1]
    if rows != head.tokenizer.size:
        yield f"its output has {rows:,} of {head.tokenizer.size:,} tokens, which llama.cpp cannot load for MTP"
