"""Judges whether a draft is compatible with a target. Pure: headers or vocabularies in, a verdict with reasons out.

The rules are llama.cpp's (``common_speculative_are_compatible`` in common/speculative.cpp) and those of this project's
own loop, which takes rejected tokens back out of both memories (:mod:`ggufspec.llamacpp.rewind`). Token texts are
requested only if they can change the answer: :mod:`ggufspec.models.vocabulary` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ggufspec.llamacpp.options import REWIND_BY
from ggufspec.llamacpp.rewind import way_back
from ggufspec.models import architecture, heads
from ggufspec.models.header import ModelHeader, Tokenizer

# common/speculative.cpp: SPEC_VOCAB_MAX_SIZE_DIFFERENCE, SPEC_VOCAB_CHECK_START_TOKEN_ID
MAX_SIZE_DIFFERENCE = 128
FIRST_TOKEN_COMPARED = 5

# The type of vocabulary that llama.cpp makes of a tokenizer's model: llama_vocab::impl::load in src/llama-vocab.cpp
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
# Types and tokenizers that put a BOS token before a prompt by default (the same function).
_BOS_BY_KIND = frozenset({"SPM", "WPM"})
_BOS_BY_PRE = frozenset(
    {
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        *("tekken", "chameleon"),
    }
)

# The cost of rolling a state back after a rejection: ggufspec/llamacpp/rewind.py
_COSTS = {
    "snapshots": "it keeps a state for each token of a draft, which takes memory",
    "checkpoint": "after a rejection it decodes once more what was kept, so that only a good draft pays",
}

_DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})
_ENCODERS = (architecture.NO_MEMORY - _DIFFUSION) | {"t5", "t5encoder", "llama-embed", "clip"}


@dataclass(frozen=True, slots=True)
class Compatibility:
    """Verdict on a draft and a target, with reasons."""

    answer: Literal["yes", "yes-with-warning", "no"]  # ``no``, ``yes``, or ``yes-with-warning``
    reasons: tuple[str, ...] = ()  # objections or warnings, as clauses; none for ``yes``
    runner: str = ""  # command of another program that can run the pair; empty without one


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The parts of a vocabulary that must agree for token ids to mean the same to both models."""

    kind: str  # type of tokenizer: SPM, BPE, …
    adds_bos: bool
    tokens: Sequence[bytes]


Compare = Callable[[], str | None]


def vocabulary_mismatch(target: Vocabulary, draft: Vocabulary) -> str | None:
    """Return why the vocabularies are incompatible, or None."""
    sizes = (len(target.tokens), len(draft.tokens))
    outline = _outline_mismatch((target.kind, draft.kind), (target.adds_bos, draft.adds_bos), sizes)
    return outline or differences(target.tokens, draft.tokens)


def differences(target: Sequence[bytes], draft: Sequence[bytes]) -> str | None:
    """Return the first compared token that differs, and how many do; None if all agree."""
    pairs = zip(target[FIRST_TOKEN_COMPARED:], draft[FIRST_TOKEN_COMPARED:], strict=False)
    unlike = [(token, one, other) for token, (one, other) in enumerate(pairs, FIRST_TOKEN_COMPARED) if one != other]
    if not unlike:
        return None
    token, one, other = unlike[0]
    texts = one.decode("utf-8", "replace"), other.decode("utf-8", "replace")
    first = f"token {token} is {texts[0]!r} to the target and {texts[1]!r} to the draft"
    return first if len(unlike) == 1 else f"{first}; {len(unlike):,} tokens differ"


def judge(target: ModelHeader, draft: ModelHeader, compare: Compare, drafter: str = "") -> Compatibility:
    """Judge whether ``draft`` is compatible with ``target``, by their headers.

    ``compare`` compares the texts of their tokens; it is called only if the digests differ and nothing else rules the
    pair out. With the ``drafter`` ``mtp`` the draft may be the target itself, for its own MTP blocks.
    """
    head = heads.kind_of_draft(target, draft, drafter)
    if head is not None and not head.drafter:
        program = f"llama-server -m TARGET -md DRAFT --spec-type {head.spec_type}" if head.spec_type else ""
        reason = f"the draft is {head.what}: it drafts from the target's hidden states and not from tokens"
        return Compatibility("no", (reason,), program)
    of_draft = heads.objections(target, draft, head) if head else _unfit(draft, "draft")
    if against := [*_unfit(target, "target"), *of_draft] or [*_other_tokens(target, draft, compare)]:
        return Compatibility("no", tuple(against))
    warnings = () if head else tuple(_warnings(target, draft))
    return Compatibility("yes-with-warning" if warnings else "yes", warnings)


def puts_bos(tokenizer: Tokenizer) -> bool:
    """Return True if llama.cpp puts a BOS token before a prompt."""
    if tokenizer.pre == "gemma4" or tokenizer.model == "gemma4":
        return True
    if tokenizer.adds_bos is not None:
        return tokenizer.adds_bos
    kind = kind_of(tokenizer)
    return kind in _BOS_BY_KIND or (kind == "BPE" and tokenizer.pre in _BOS_BY_PRE)


def kind_of(tokenizer: Tokenizer) -> str:
    """Return the type of vocabulary: SPM, BPE, …; an unknown model's name is returned as it is."""
    return _KINDS.get(tokenizer.model, tokenizer.model or "none")


# ---- incompatible pairs ------------------------------------------------------------------------------------------


def _unfit(header: ModelHeader, role: str) -> Iterator[str]:
    """Yield the reasons why a model cannot be in any pair."""
    own = header.architecture
    if own in _DIFFUSION:
        yield f"the {role} is a diffusion model ({own}): it does not write from left to right"
    elif own in _ENCODERS:
        yield f"the {role} is an encoder ({own}): it predicts no next token"
    elif header.metadata.get(f"{own}.pooling_type") not in (None, 0) or (
        header.metadata.get(f"{own}.attention.causal") is False
    ):
        yield f"the {role} is an embedding model ({header.name}): it predicts no next token"
    elif _way_back(header, role) == "none":
        yield f"the {role} is {architecture.kind_of_state(own)} ({own}): its state cannot take rejected tokens back"


def _way_back(header: ModelHeader, role: str) -> str:
    """Return how a recurrent or hybrid model rolls back rejected tokens; empty for a model with only a KV cache."""
    own = header.architecture
    return way_back(own, REWIND_BY[role]) if architecture.kind_of_state(own) else ""


def _other_tokens(target: ModelHeader, draft: ModelHeader, compare: Compare) -> Iterator[str]:
    one, other = target.tokenizer, draft.tokenizer
    outline = _outline_mismatch(
        (kind_of(one), kind_of(other)), (puts_bos(one), puts_bos(other)), (one.size, other.size)
    )
    if outline:
        yield outline
        return
    ours, theirs = one.special.get("bos"), other.special.get("bos")
    if puts_bos(one) and ours is not None and theirs is not None and ours != theirs:
        yield f"the BOS token is {ours} to the target and {theirs} to the draft"
    if one.digest != other.digest and (found := compare()):
        yield found


def _outline_mismatch(kinds: tuple[str, str], adds_bos: tuple[bool, bool], sizes: tuple[int, int]) -> str | None:
    """Return an incompatibility other than token texts; each argument is (target's, draft's)."""
    if kinds[0] != kinds[1]:
        return f"the target's tokenizer is {kinds[0]}, the draft's is {kinds[1]}"
    if adds_bos[0] != adds_bos[1]:
        wants, other = ("target", "draft") if adds_bos[0] else ("draft", "target")
        return f"the {wants} puts a BOS token before a prompt and the {other} does not"
    if abs(sizes[0] - sizes[1]) > MAX_SIZE_DIFFERENCE:
        return f"the target has {sizes[0]:,} tokens, the draft {sizes[1]:,}"
    return None


# ---- warnings ----------------------------------------------------------------------------------------


def _warnings(target: ModelHeader, draft: ModelHeader) -> Iterator[str]:
    one, other = target.tokenizer, draft.tokenizer
    if kind_of(one) == "none":
        yield "neither header has a vocabulary: what their tokens mean was not compared"
    if kind_of(one) == "BPE" and one.pre != other.pre:
        yield (
            f"the target splits text as {one.pre or 'default'} and the draft was trained on {other.pre or 'default'}: "
            "expect fewer accepted tokens"
        )
    for name in ("eos", "eot"):
        ours, theirs = one.special.get(name), other.special.get(name)
        if ours is not None and theirs is not None and ours != theirs:
            yield f"the {name.upper()} token is {ours} to the target and {theirs} to the draft: ends are not drafted"
    add_eos = [header.metadata.get("tokenizer.ggml.add_eos_token") is True for header in (target, draft)]
    if add_eos[0] != add_eos[1]:
        yield "only one of them puts an EOS token after a prompt: llama.cpp's own programs refuse the pair"
    if target.has_chat_template != draft.has_chat_template:
        yield "only one of them has a chat template: expect fewer accepted tokens in a chat"
    for header, role in ((target, "target"), (draft, "draft")):
        if way := _way_back(header, role):
            own = header.architecture
            yield f"the {role} is {architecture.kind_of_state(own)} ({own}): {_COSTS[way]}"
    if draft.weight_bytes() >= target.weight_bytes():
        yield "the draft is no smaller than the target"
