"""May this draft serve this target? Pure: vocabularies in, a reason out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# llama.cpp common/speculative.cpp: SPEC_VOCAB_MAX_SIZE_DIFFERENCE, SPEC_VOCAB_CHECK_START_TOKEN_ID
_MAX_SIZE_DIFFERENCE = 128
_FIRST_TOKEN_COMPARED = 5


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What must agree for drafted ids to mean the same to both models."""

    kind: str  # tokenizer family: SPM, BPE, …
    adds_bos: bool
    tokens: Sequence[bytes]


def vocabulary_mismatch(target: Vocabulary, draft: Vocabulary) -> str | None:
    """Why ``draft`` cannot serve ``target``, or None where it can."""
    if target.kind != draft.kind:
        return f"the target's tokenizer is {target.kind}, the draft's is {draft.kind}"
    if target.adds_bos != draft.adds_bos:
        wants, other = ("target", "draft") if target.adds_bos else ("draft", "target")
        return f"the {wants} puts a BOS token before a prompt and the {other} does not"
    if abs(len(target.tokens) - len(draft.tokens)) > _MAX_SIZE_DIFFERENCE:
        return f"the target has {len(target.tokens):,} tokens, the draft {len(draft.tokens):,}"
    for token in range(_FIRST_TOKEN_COMPARED, min(len(target.tokens), len(draft.tokens))):
        ours, theirs = target.tokens[token], draft.tokens[token]
        if ours != theirs:
            return f"token {token} is {_shown(ours)} to the target and {_shown(theirs)} to the draft"
    return None


def _shown(token: bytes) -> str:
    return repr(token.decode("utf-8", "replace"))
