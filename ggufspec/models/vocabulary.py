"""Judges a pair whose headers are kept; the texts of their tokens are compared in a child process where it matters.

A header came from anywhere, and llama.cpp's parser is C++: hence the child, as in :mod:`ggufspec.models.source`. Its
answer is only what differs, since a vocabulary has megabytes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from ggufspec import worker
from ggufspec.errors import ModelError
from ggufspec.llamacpp import gguf
from ggufspec.llamacpp.library import load
from ggufspec.models.catalogue import drafts_for
from ggufspec.models.compat import Compatibility, Differences, differences, judge
from ggufspec.models.source import MAX_MEMORY, MOST_HEADER_BYTES, Known


@dataclass(frozen=True, slots=True)
class Spec:
    """Two files that begin with a whole header."""

    target: Path
    draft: Path


@dataclass(frozen=True, slots=True)
class Result:
    """What differs between their vocabularies; None is nothing."""

    found: Differences | None


def judge_known(target: Known, draft: Known) -> Compatibility:
    """Whether ``draft`` may serve ``target``, their tokens' texts included.

    Raises:
        ModelError: a kept header cannot be read any more.
        WorkerError: llama.cpp died over one.
    """
    return judge(
        target.header,
        draft.header,
        lambda: worker.call(__name__, Spec(target.sparse, draft.sparse), Result).found,
    )


def check_pair(target: Known, draft: Known) -> tuple[str, ...]:
    """What speaks against a pair that can run, in words.

    Raises:
        ModelError: ``draft`` cannot serve ``target``; the hint names what runs the pair, or drafts that would serve.
        WorkerError: llama.cpp died over one of the headers.
    """
    verdict = judge_known(target, draft)
    if verdict.answer != "no":
        return verdict.reasons
    others = " or ".join(f"-hfd {name}" for name in drafts_for(target.header))
    hint = verdict.runner or others or "choose a draft of the target's own family"
    raise ModelError(
        f"{draft.header.name} cannot draft for {target.header.name}: {'; '.join(verdict.reasons)}",
        f"{hint}, or --no-draft",
    )


def run(spec: Spec, emit: worker.Emit, stopping: threading.Event) -> Result:  # noqa: ARG001
    """Compare two vocabularies in this process, within bounded memory."""
    load()
    with worker.limited_memory(MAX_MEMORY):
        target, draft = (_tokens(path) for path in (spec.target, spec.draft))
        return Result(differences(target, draft))


def _tokens(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            return gguf.tokens(file.read(MOST_HEADER_BYTES))
    except OSError as error:
        raise ModelError(f"the header kept at {path} cannot be read: {error.strerror}", f"rm {path}") from None
