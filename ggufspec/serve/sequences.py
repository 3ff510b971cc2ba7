"""Which of the kept conversations a prompt goes on with. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

_MOSTLY = 0.5  # of a conversation that a prompt has in common with it, from which on it is that conversation
_WORTH_COPYING = 64  # tokens: fewer are read as fast


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a prompt is answered."""

    sequence: int
    copy: int | None = None  # the conversation whose beginning it has, copied there first


def choose(held: Sequence[Sequence[int]], used: Sequence[int], prompt: Sequence[int]) -> Choice:
    """The conversation that a prompt goes on with, or one that makes room for it.

    That is the one with the longest common beginning where this is most of what it holds, as when a turn is added,
    retried or edited near its end. Otherwise it is another conversation: an empty one, or the one that was not used for
    the longest time; what it has in common with any (a system prompt, say) is copied.

    Args:
        held: tokens of each conversation that are in the cache.
        used: when each was last used, in any unit that grows; 0: never.
        prompt: token ids.
    """
    shared = [common(text, prompt) for text in held]
    best = max(range(len(held)), key=shared.__getitem__)
    if shared[best] and shared[best] >= _MOSTLY * len(held[best]):
        return Choice(best)
    oldest = min(range(len(held)), key=lambda one: (bool(held[one]), used[one]))
    if oldest == best or shared[best] < _WORTH_COPYING:
        return Choice(oldest)
    return Choice(oldest, best)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
