"""Checks the compatibility of a pair; token texts are compared in a child process if necessary.

Headers are untrusted and llama.cpp's parser is C++: hence the child, as in :mod:`ggufspec.models.headers`. It returns
only the differences, because a vocabulary has megabytes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ggufspec import child
from ggufspec.errors import ModelError
from ggufspec.llamacpp import gguf, staging
from ggufspec.llamacpp.library import load
from ggufspec.models import heads
from ggufspec.models.compat import Compatibility, differences, judge
from ggufspec.models.header import ModelHeader, interpret
from ggufspec.models.headers import MAX_MEMORY, MOST_HEADER_BYTES, Known, read_prefix
from ggufspec.models.locate import LocalFile


@dataclass(frozen=True, slots=True)
class Spec:
    """Two files that begin with a complete header."""

    target: Path
    draft: Path


@dataclass(frozen=True, slots=True)
class Result:
    """Differences between two vocabularies; None if they are equal."""

    found: str | None


def judge_known(target: Known, draft: Known, drafter: str = "") -> Compatibility:
    """Judge whether ``draft`` is compatible with ``target``, including token texts; ChildError if llama.cpp dies."""
    return judge(target.header, draft.header, lambda: differences_of(target.sparse, draft.sparse), drafter)


def differences_of(target: Path, draft: Path) -> str | None:
    """Compare the vocabularies of two files: their differences in words, or None; ChildError if llama.cpp dies."""
    return child.call(__name__, Spec(target, draft), Result).found


def check_pair(target: Known, draft: Known, drafter: str = "") -> tuple[str, ...]:
    """Return the warnings of a pair that can run; ``drafter`` as in :func:`ggufspec.models.compat.judge`.

    Raises:
        ModelError: ``draft`` is incompatible; the hint may name a program that runs the pair.
        ChildError: llama.cpp died over one of the headers.
    """
    return accepted(target.header, draft.header, judge_known(target, draft, drafter), drafter)


def accepted(target: ModelHeader, draft: ModelHeader, verdict: Compatibility, drafter: str = "") -> tuple[str, ...]:
    """Return the warnings of a verdict that is not "no"; fails as :func:`check_pair`."""
    if verdict.answer != "no":
        return verdict.reasons
    if heads.is_own(target, draft, drafter):
        raise ModelError(
            f"{target.name} cannot draft for itself: {'; '.join(verdict.reasons)}",
            "where they are in a file of their own: -md mtp-….gguf or -hfd USER/REPO:mtp; or --drafter none",
        )
    hint = verdict.runner or "choose a draft of the target's own family (ggufspec profiles list has pairs)"
    if (head := heads.kind_of_draft(target, draft, drafter)) and head.drafter:
        hint = "choose a head that was made for this target"
        if staging.missing(head.drafter):
            hint = "`ggufspec doctor` says how to build a llama.cpp that has it"
    raise ModelError(
        f"{draft.name} cannot draft for {target.name}: {'; '.join(verdict.reasons)}", f"{hint}, or --drafter none"
    )


def head_of(target: Path, draft: Path, drafter: str = "") -> str:
    """Return the drafter of a draft file that is a head, judged before loading, because a wrong one aborts llama.cpp.

    Args:
        target: its target's file.
        draft: the file; the target's again for its own MTP blocks.
        drafter: the required kind of head, if any.

    Returns:
        ``mtp`` or ``eagle3``; empty for a draft model, which is judged when it is loaded.

    Raises:
        UsageError: a head is required, and the file is not one.
        ModelError: it is a head of another target, or damaged.
    """
    header, parsed = _read(draft)
    if not drafter and heads.kind_of(header) is None:
        return ""
    own, _ = _read(target)
    kind = heads.require(own, header, drafter)
    accepted(own, header, judge(own, header, lambda: None, drafter), drafter)  # texts are compared later
    file = LocalFile.at(draft)
    for tensor in parsed.tensors:
        if tensor.name == "d2t":  # the token of each of its logits
            data = file.read(parsed.data_offset + tensor.offset, tensor.size_bytes)
            ids = np.frombuffer(data, "<i8")
            if len(wrong := ids[(ids < 0) | (ids >= header.tokenizer.size)]):
                raise ModelError(
                    f"{file.name} is damaged: its token ids (d2t) name token {wrong[0]} of {header.tokenizer.size:,}",
                    "download it again, or convert it again: d2t has the target's own ids",
                )
    return kind.drafter


def _read(path: Path) -> tuple[ModelHeader, gguf.Gguf]:
    """Read a file's header without caching it: the file is loaded right after."""
    parsed, _, _ = read_prefix(LocalFile.at(path))
    return interpret(path.name, [parsed], path.stat().st_size), parsed


def run(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Result:  # noqa: ARG001
    """Compare two vocabularies in this process, within limited memory."""
    load()
    with child.limited_memory(MAX_MEMORY):
        target, draft = (_tokens(path) for path in (spec.target, spec.draft))
        return Result(differences(target, draft))


def _tokens(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            return gguf.tokens(file.read(MOST_HEADER_BYTES))
    except OSError as error:
        raise ModelError(f"the cached header {path} cannot be read: {error.strerror}", f"rm {path}") from None
