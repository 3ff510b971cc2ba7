"""Compatibility checks for a pair, which compare token texts in a child process if necessary.

The child is needed because headers are untrusted and llama.cpp's parser is C++, as in :mod:`ggufspec.models.headers`.
It returns only the differences, because a vocabulary takes megabytes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ggufspec import child
from ggufspec.errors import MisfitError, ModelError
from ggufspec.llamacpp import gguf, staging
from ggufspec.llamacpp.library import load_library
from ggufspec.models import heads
from ggufspec.models.compat import Compatibility, differences, judge_pair
from ggufspec.models.header import ModelHeader, interpret
from ggufspec.models.headers import MAX_MEMORY, MOST_HEADER_BYTES, KnownHeader, read_prefix
from ggufspec.models.locate import LocalFile, local_parts


@dataclass(frozen=True, slots=True)
class VocabularyJob:
    """Target and draft files whose vocabularies to compare; each begins with a complete header."""

    target: Path
    draft: Path


@dataclass(frozen=True, slots=True)
class VocabularyResult:
    """Differences between two vocabularies in words; None if they agree."""

    found: str | None


def judge_known(target: KnownHeader, draft: KnownHeader, drafter: str = "") -> Compatibility:
    """Judge whether two models are compatible, also by token texts; raise ChildError if llama.cpp crashes."""
    return judge_pair(target.header, draft.header, lambda: differences_of(target.sparse, draft.sparse), drafter)


def differences_of(target: Path, draft: Path) -> str | None:
    """Describe the differences between two vocabularies, or return None; raise ChildError if llama.cpp crashes."""
    return child.call(__name__, VocabularyJob(target, draft), VocabularyResult).found


def check_pair(target: KnownHeader, draft: KnownHeader, drafter: str = "") -> tuple[str, ...]:
    """Return warnings for a pair that can run; for ``drafter``, see :func:`ggufspec.models.compat.judge_pair`.

    Raises:
        ModelError: ``draft`` is incompatible; the hint may name a program that runs the pair.
        ChildError: llama.cpp crashed on one of the headers.
    """
    return require_compatible(target.header, draft.header, judge_known(target, draft, drafter), drafter)


def require_compatible(
    target: ModelHeader, draft: ModelHeader, verdict: Compatibility, drafter: str = ""
) -> tuple[str, ...]:
    """Return a verdict's warnings; if its answer is "no", raise as :func:`check_pair` does."""
    if verdict.answer != "no":
        return verdict.reasons
    if heads.is_own(target, draft, drafter):
        raise ModelError(
            f"{target.name} cannot draft for itself: {'; '.join(verdict.reasons)}",
            "if its MTP blocks are in a separate file, -md mtp-….gguf or -hfd USER/REPO:mtp; otherwise --drafter none",
        )
    hint = verdict.runner or "choose a draft from the target's own family (ggufspec profiles list has pairs)"
    if (head := heads.kind_of_draft(target, draft, drafter)) and head.drafter:
        hint = "choose a head that was made for this target"
        if staging.missing_function(head.drafter):
            hint = "`ggufspec doctor` says how to build a llama.cpp that has it"
    raise MisfitError(
        f"{draft.name} cannot draft for {target.name}: {'; '.join(verdict.reasons)}", f"{hint}, or --drafter none"
    )


def head_of(target: Path, draft: Path, drafter: str = "") -> str:
    """Return the drafter for a draft file; check a head against the target, as a wrong one makes llama.cpp abort.

    Args:
        target: the target's file.
        draft: the draft's file, or the target's again to draft with its own MTP blocks.
        drafter: the required kind of head, if any.

    Returns:
        ``mtp`` or ``eagle3``; empty for an ordinary draft model, which is checked when it is loaded.

    Raises:
        UsageError: ``drafter`` is set, but ``draft`` is not a head of that kind.
        ModelError: the head is damaged, or was made for another target.
    """
    header, parts = _read(draft)
    if not drafter and heads.head_kind(header) is None:
        return ""
    own, _ = _read(target)
    kind = heads.require_head(own, header, drafter)
    require_compatible(own, header, judge_pair(own, header, lambda: None, drafter), drafter)  # texts are compared later
    for file, parsed in parts:
        for tensor in (one for one in parsed.tensors if one.name == "d2t"):  # maps the head's logits to target tokens
            data = file.read(parsed.data_offset + tensor.offset, tensor.size_bytes)
            ids = np.frombuffer(data, "<i8")
            if len(wrong := ids[(ids < 0) | (ids >= header.tokenizer.size)]):
                raise ModelError(
                    f"{file.name} is damaged: d2t names token {wrong[0]}, but there are only {header.tokenizer.size:,}",
                    "download or convert it again: d2t must hold absolute ids of target tokens",
                )
    return kind.drafter


def _read(path: Path) -> tuple[ModelHeader, list[tuple[LocalFile, gguf.Gguf]]]:
    """Return a model's header and its parsed parts, without caching them: the model is loaded right afterwards."""
    parts = [(file, read_prefix(file)[0]) for file in local_parts(path)]
    return interpret(path.name, [parsed for _, parsed in parts], sum(file.size_bytes for file, _ in parts)), parts


def run(spec: VocabularyJob, emit: child.Emit, stopping: threading.Event) -> VocabularyResult:  # noqa: ARG001
    """Compare two vocabularies in this process with limited memory."""
    load_library()
    with child.limited_memory(MAX_MEMORY):
        target, draft = (_tokens(path) for path in (spec.target, spec.draft))
        return VocabularyResult(differences(target, draft))


def _tokens(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            return gguf.tokens(file.read(MOST_HEADER_BYTES))
    except OSError as error:
        raise ModelError(f"the cached header {path} cannot be read: {error.strerror}", f"rm {path}") from None
