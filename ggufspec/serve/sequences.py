"""Chooses the cached conversation that a prompt continues. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ggufspec.decoding.text import common

_EDITED = 0.25  # share of a conversation's prompt that may be lost when it is continued with an edit
_WORTH_COPYING = 64  # tokens; fewer are decoded as fast


@dataclass(frozen=True, slots=True)
class Choice:
    """Conversation that answers a prompt."""

    sequence: int
    copy: int | None = None  # conversation whose beginning is copied there first


def choose(held: Sequence[Sequence[int]], prompts: Sequence[int], used: Sequence[int], prompt: Sequence[int]) -> Choice:
    """Choose the conversation that a prompt continues, or one to replace.

    It is the one with the longest common prefix, if nothing of its last prompt is lost: a turn is added, or the last
    one retried. Otherwise it is an empty one; or, without any, the one with the longest prefix if little is lost (an
    edit near its end), else the least recently used one. A common prefix (e.g. a system prompt) is copied.

    Args:
        held: cached tokens of each conversation.
        prompts: how many of them were its last prompt; an answer follows.
        used: when each was last used, in any unit that grows; 0: never.
        prompt: token ids.
    """
    shared = [common(text, prompt) for text in held]
    best = max(range(len(held)), key=shared.__getitem__)
    lost = max(0, min(prompts[best], len(held[best])) - shared[best])
    empty = next((one for one, text in enumerate(held) if not text), None)
    if shared[best] and (not lost or (empty is None and lost <= _EDITED * prompts[best])):
        return Choice(best)
    found = min(range(len(held)), key=used.__getitem__) if empty is None else empty
    return Choice(found) if found == best or shared[best] < _WORTH_COPYING else Choice(found, best)
