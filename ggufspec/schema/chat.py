"""The JSON document of ``ggufspec chat``: a conversation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count


@dataclass(frozen=True, slots=True)
class ChatFigures:
    """What an answer of a chat took.

    Args:
        prompt_tokens: of the conversation, as the model got it.
        prompt_read: those that were decoded for this answer; the others were in the context.
        prompt_s: seconds that they took.
        tokens: of the answer.
        tokens_per_s: of the answer.
        rounds: of drafting and verifying; target tokens, without speculation.
        drafted: drafted tokens that were verified.
        accepted: those that were kept.
        lookup_drafted: those that the n-gram lookup offered.
        lookup_accepted: those of them that were kept.
        lossy: whether the rule may have changed the text.
        prompt_tokens_per_s: of those that were decoded before the answer's first round, which decodes the last one; 0
            where there was no other.
        time_to_first_token_s: from the request to the answer's first token; absent where none came.
    """

    prompt_tokens: Count
    prompt_read: Count
    prompt_s: Amount
    tokens: Count
    tokens_per_s: Amount
    rounds: Count
    drafted: Count
    accepted: Count
    lookup_drafted: Count = 0
    lookup_accepted: Count = 0
    lossy: bool = False
    prompt_tokens_per_s: Amount = 0.0
    time_to_first_token_s: Amount | None = None


@dataclass(frozen=True, slots=True)
class ChatRun:
    """One of several answers to the same question: ``target-only``, ``draft-only`` or ``speculative``.

    ``differs_at`` is the place of the first token, from 1, that is not target-only's; absent where there is none.
    """

    name: str
    answer: str
    figures: ChatFigures
    differs_at: Count | None = None
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A question and its answer. ``stopped``: the user cut it short. ``answer`` is absent where none came.

    ``dropped`` counts the oldest turns that did not fit the context with this one; ``compared`` are the answers of
    ``/compare``.
    """

    user: str
    answer: str | None = None
    stopped: bool = False
    dropped: Count = 0
    stop_reason: str = ""
    figures: ChatFigures | None = None
    compared: tuple[ChatRun, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatDocument:
    """``ggufspec/chat@1``: a conversation, as it is saved and loaded, and as ``chat --json`` prints it.

    ``pair`` and ``settings`` tell with what it was said; loading leaves them alone. ``error`` and ``hint`` are of the
    message or command that ended it, if one did.
    """

    pair: dict[str, Any]
    settings: dict[str, Any]
    system: str
    turns: tuple[ChatTurn, ...]
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    error: str = ""
    hint: str = ""
    schema: str = field(default="ggufspec/chat@1")
