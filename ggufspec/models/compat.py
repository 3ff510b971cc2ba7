"""Verdicts on whether a draft is compatible with a target. Pure: headers or vocabularies in, verdict with reasons out.

The rules come from llama.cpp (``common_speculative_are_compatible`` in common/speculative.cpp) and from this project's
own decoding loop, which rolls back rejected tokens in both models (:mod:`ggufspec.llamacpp.rewind`). Token texts are
requested only if they can change the verdict; :mod:`ggufspec.models.vocabulary` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ggufspec.errors import ModelError
from ggufspec.llamacpp.options import REWIND_BY
from ggufspec.llamacpp.rewind import rollback_kind
from ggufspec.models import architecture, heads
from ggufspec.models.header import ModelHeader, Tokenizer

# llama.cpp's SPEC_VOCAB_MAX_SIZE_DIFFERENCE and SPEC_VOCAB_CHECK_START_TOKEN_ID (common/speculative.cpp)
MAX_SIZE_DIFFERENCE = 128
FIRST_TOKEN_COMPARED = 5

# llama.cpp's vocabulary type for each tokenizer model: llama_vocab::impl::load in src/llama-vocab.cpp
_KINDS = {
    "no_vocab": "none",
    "none": "none",
    "llama": "SPM",
    "bert": "WPM",
    "gpt2": "BPE",
    "hybriddna": "BPE",
    "whitespace": "BPE",
    "gemma4": "BPE",
    "t5": "UGM",
    "rwkv": "RWKV",
    "plamo2": "PLAMO2",
}
# Vocabulary types and pre-tokenizers that add a BOS token to prompts by default (llama_vocab::impl::load).
_BOS_BY_KIND = frozenset({"SPM", "WPM"})
_BOS_BY_PRE = frozenset(
    {
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        *("tekken", "chameleon"),
    }
)

# Cost of rolling back a recurrent state after a rejection, by method (ggufspec/llamacpp/rewind.py)
_COSTS = {
    "snapshots": "it keeps a state for each token of a draft, which takes memory",
    "checkpoint": "after a rejection it decodes the accepted tokens again, so only a good draft pays",
}

_DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})
_EMBEDDING = (architecture.NO_MEMORY - _DIFFUSION) | {"t5encoder", "llama-embed"}


@dataclass(frozen=True, slots=True)
class Compatibility:
    """Verdict on a draft and a target, with reasons."""

    answer: Literal["yes", "yes-with-warning", "no"]  # compatible, compatible with a caveat, or incompatible
    reasons: tuple[str, ...] = ()  # objections or warnings as clauses; empty for ``yes``
    runner: str = ""  # another program's command that can run the pair; empty if none can


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Parts of a vocabulary that must agree for token ids to mean the same to both models."""

    kind: str  # type of tokenizer: SPM, BPE, …
    tokens: Sequence[bytes]


Compare = Callable[[], str | None]


def vocabulary_mismatch(target: Vocabulary, draft: Vocabulary) -> str | None:
    """Return why the vocabularies are incompatible, or None if they are compatible."""
    sizes = (len(target.tokens), len(draft.tokens))
    outline = _outline_mismatch((target.kind, draft.kind), sizes)
    return outline or differences(target.tokens, draft.tokens)


def differences(target: Sequence[bytes], draft: Sequence[bytes]) -> str | None:
    """Describe the first differing token and count all that differ; return None if all compared tokens agree."""
    pairs = zip(target[FIRST_TOKEN_COMPARED:], draft[FIRST_TOKEN_COMPARED:], strict=False)
    unlike = [(token, one, other) for token, (one, other) in enumerate(pairs, FIRST_TOKEN_COMPARED) if one != other]
    if not unlike:
        return None
    token, one, other = unlike[0]
    texts = one.decode("utf-8", "replace"), other.decode("utf-8", "replace")
    first = f"token {token} is {texts[0]!r} to the target and {texts[1]!r} to the draft"
    return first if len(unlike) == 1 else f"{first}; {len(unlike):,} tokens differ"


def judge_pair(target: ModelHeader, draft: ModelHeader, compare: Compare, drafter: str = "") -> Compatibility:
    """Judge whether ``draft`` is compatible with ``target``, from their headers.

    ``compare`` compares their token texts; it is called only if the vocabularies' digests differ and nothing else rules
    the pair out. With ``drafter`` ``mtp``, the draft may be the target itself, which then drafts with its MTP blocks.
    """
    head = heads.kind_of_draft(target, draft, drafter)
    if head is not None and not head.drafter:
        program = f"llama-server -m TARGET -md DRAFT --spec-type {head.spec_type}" if head.spec_type else ""
        reason = f"the draft is {head.what}: it drafts from the target's hidden states, not from tokens"
        return Compatibility("no", (reason,), program)
    of_draft = heads.objections(target, draft, head) if head else _unfit(draft, "draft")
    if against := [*_unfit(target, "target"), *of_draft] or [*_other_tokens(target, draft, compare)]:
        return Compatibility("no", tuple(against))
    warnings = () if head else tuple(_warnings(target, draft))
    return Compatibility("yes-with-warning" if warnings else "yes", warnings)


def puts_bos(tokenizer: Tokenizer) -> bool:
    """Return True if llama.cpp adds a BOS token to prompts with this tokenizer."""
    if tokenizer.pre == "gemma4" or tokenizer.model == "gemma4":
        return True
    if tokenizer.adds_bos is not None:
        return tokenizer.adds_bos
    kind = vocabulary_kind(tokenizer)
    return kind in _BOS_BY_KIND or (kind == "BPE" and tokenizer.pre in _BOS_BY_PRE)


def vocabulary_kind(tokenizer: Tokenizer) -> str:
    """Return the vocabulary type (SPM, BPE, …), or the tokenizer model's name if its type is unknown."""
    return _KINDS.get(tokenizer.model, tokenizer.model or "none")


# ---- incompatible pairs ------------------------------------------------------------------------------------------


def _unfit(header: ModelHeader, role: str) -> Iterator[str]:
    """Yield the reasons why a model cannot be part of any pair."""
    own = header.architecture
    if other := _other_kind(header):
        yield f"the {role} is {other}"
    elif _rollback_kind(header, role) == "none":
        yield f"the {role} is {architecture.kind_of_state(own)} ({own}): its state cannot roll back rejected tokens"


def require_language_model(header: ModelHeader) -> None:
    """Raise ModelError for a model that cannot generate text on its own, because llama.cpp would abort on it."""
    if other := _other_kind(header):
        raise ModelError(f"{header.name} is {other}", "choose a model that generates text, such as an Instruct model")
    if head := heads.head_kind(header):
        raise ModelError(f"{header.name} is {head.what}: it cannot run on its own", f"-m TARGET -md {header.name}")


def writes_text(header: ModelHeader) -> bool:
    """Return whether a model predicts the next token, unlike embedding and diffusion models."""
    return not _other_kind(header)


def _other_kind(header: ModelHeader) -> str:
    """Describe a model that does not predict the next token; return "" for a causal language model or a head."""
    own = header.architecture
    if own in _DIFFUSION:
        return f"a diffusion model ({own}): it does not generate from left to right"
    if own == "t5":
        return f"an encoder-decoder model ({own}): it does not continue a text"
    pools = header.metadata.get(f"{own}.pooling_type") not in (None, 0)
    if own in _EMBEDDING or pools or header.metadata.get(f"{own}.attention.causal") is False:
        return f"an embedding model ({own}): it does not predict the next token"
    return ""


def _rollback_kind(header: ModelHeader, role: str) -> str:
    """Return how a recurrent or hybrid model rolls back rejected tokens; "" for a model with only a KV cache."""
    own = header.architecture
    return rollback_kind(own, REWIND_BY[role]) if architecture.kind_of_state(own) else ""


def _other_tokens(target: ModelHeader, draft: ModelHeader, compare: Compare) -> Iterator[str]:
    one, other = target.tokenizer, draft.tokenizer
    outline = _outline_mismatch((vocabulary_kind(one), vocabulary_kind(other)), (one.size, other.size))
    if outline:
        yield outline
        return
    if one.digest != other.digest and (found := compare()):
        yield found


def _outline_mismatch(kinds: tuple[str, str], sizes: tuple[int, int]) -> str | None:
    """Describe a difference in tokenizer type or vocabulary size, or return None; each pair is (target's, draft's)."""
    if kinds[0] != kinds[1]:
        return f"the target's tokenizer is {kinds[0]}, the draft's is {kinds[1]}"
    if abs(sizes[0] - sizes[1]) > MAX_SIZE_DIFFERENCE:
        return f"the target has {sizes[0]:,} tokens, the draft {sizes[1]:,}"
    return None


# ---- warnings ----------------------------------------------------------------------------------------


def _warnings(target: ModelHeader, draft: ModelHeader) -> Iterator[str]:
    one, other = target.tokenizer, draft.tokenizer
    if vocabulary_kind(one) == "none":
        yield "neither header has a vocabulary, so the meanings of their tokens were not compared"
    if vocabulary_kind(one) == "BPE" and one.pre != other.pre:
        yield (
            f"the target splits text as {one.pre or 'default'} and the draft was trained on {other.pre or 'default'}: "
            "expect fewer accepted tokens"
        )
    for name in ("eos", "eot"):
        ours, theirs = one.special.get(name), other.special.get(name)
        if ours is not None and theirs is not None and ours != theirs:
            yield f"the {name.upper()} token is {ours} to the target and {theirs} to the draft, so ends are not drafted"
    ours, theirs = one.special.get("bos"), other.special.get("bos")  # the draft reads the target's prompt tokens
    if puts_bos(one) and ours is not None and theirs is not None and ours != theirs:
        ids = f"the BOS token is {ours} to the target and {theirs} to the draft"
        yield f"{ids}: expect fewer accepted tokens, and llama.cpp's own programs refuse the pair"
    if puts_bos(one) != puts_bos(other):
        yield "only one of them puts a BOS token before a prompt: llama.cpp's own programs refuse the pair"
    add_eos = [header.metadata.get("tokenizer.ggml.add_eos_token") is True for header in (target, draft)]
    if add_eos[0] != add_eos[1]:
        yield "only one of them puts an EOS token after a prompt: llama.cpp's own programs refuse the pair"
    if target.has_chat_template != draft.has_chat_template:
        yield "only one of them has a chat template: expect fewer accepted tokens in a chat"
    for header, role in ((target, "target"), (draft, "draft")):
        if way := _rollback_kind(header, role):
            own = header.architecture
            yield f"the {role} is {architecture.kind_of_state(own)} ({own}): {_COSTS[way]}"
    if draft.weight_bytes() >= target.weight_bytes():
        yield "the draft is no smaller than the target"
