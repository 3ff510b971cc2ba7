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

    The first choice is the conversation with the longest common prefix, if none of its last prompt would be lost (a
    turn is added, or the last one retried); then an empty one; then the one with the longest prefix, if little is lost
    (an edit near its end); then the least recently used one. An empty or replaced one gets a copy of a common prefix.

    Args:
        held: cached tokens of each conversation.
        prompts: number of these tokens that belong to its last prompt; the rest is the answer.
        used: time of last use, in any increasing unit; 0: never used.
        prompt: token ids.
        free: conversations to choose from, at least one; None: all. From any other, only a prefix may be copied.
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
