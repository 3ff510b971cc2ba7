"""Choice of the cached conversation that a prompt continues. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ggufspec.decoding.text import common

_EDITED = 0.25  # maximum share of a conversation's prompt to discard when continuing it after an edit
_WORTH_COPYING = 64  # minimum number of tokens to copy; decoding fewer is as fast


@dataclass(frozen=True, slots=True)
class SequenceChoice:
    """Choice of the conversation in which to answer a prompt."""

    sequence: int
    copy: int | None = None  # conversation whose common prefix is copied there first


def choose_sequence(
    held: Sequence[Sequence[int]],
    prompts: Sequence[int],
    used: Sequence[int],
    prompt: Sequence[int],
    free: Sequence[int] | None = None,
) -> SequenceChoice:
    """Choose the cached conversation that a prompt continues, or one to replace.

    The conversation with the longest common prefix is continued if its whole last prompt stays (a turn is added, or the
    last turn is retried). Otherwise an empty conversation is used. If none is empty, the one with the longest prefix is
    continued if little is lost (an edit near its end); otherwise the least recently used one is replaced. If another
    conversation has a much longer prefix in common, that prefix is copied first.

    Args:
        held: cached tokens of each conversation.
        prompts: how many of them belong to its last prompt; the rest are its answer.
        used: time of its last use, in any increasing unit; 0 if never used.
        prompt: token ids of the prompt.
        free: conversations to choose from (at least one; None: all); from others, only a prefix may be copied.
    """
    free = range(len(held)) if free is None else free
    shared = [common(text, prompt) for text in held]
    best = max(free, key=shared.__getitem__)
    source = max(range(len(held)), key=shared.__getitem__)
    lost = max(0, min(prompts[best], len(held[best])) - shared[best])
    empty = next((one for one in free if not held[one]), None)
    if shared[best] and (not lost or (empty is None and lost <= _EDITED * prompts[best])):
        found = best
    else:
        found = min(free, key=used.__getitem__) if empty is None else empty
    is_worth = shared[source] - shared[found] * (found == best) >= _WORTH_COPYING
    return SequenceChoice(found, source) if found != source and is_worth else SequenceChoice(found)
