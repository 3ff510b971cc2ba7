"""Which of the kept conversations a prompt goes on with. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ggufspec.decoding.text import common

_EDITED = 0.25  # of a conversation's prompt that may be lost where it goes on edited
_WORTH_COPYING = 64  # tokens: fewer are read as fast


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a prompt is answered."""

    sequence: int
    copy: int | None = None  # the conversation whose beginning it has, copied there first


def choose(held: Sequence[Sequence[int]], prompts: Sequence[int], used: Sequence[int], prompt: Sequence[int]) -> Choice:
    """The conversation that a prompt goes on with, or one that makes room for it.

    That is the one with the longest common beginning, if nothing of what it was asked is lost: a turn is added, or the
    last one retried. Otherwise it is an empty one; or, if there is none, that one if little is lost (an edit near
    its end), else the one that was not used for the longest time. What is in common (a system prompt, say) is copied.

    Args:
        held: tokens of each conversation that are in the cache.
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
