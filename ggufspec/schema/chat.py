"""The JSON document of ``ggufspec chat``: a conversation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count


@dataclass(frozen=True, slots=True)
class ChatFigures:
    """Timings and token counts of one chat answer.

    ``prompt_tokens`` are the conversation's, as the model got it; ``prompt_read`` of them were decoded for this answer,
    in ``prompt_s``, at ``prompt_tokens_per_s``. The prompt's batch gives the first token: ``tokens_per_s`` and
    ``rounds`` cover the others. Without tokens there is no ``time_to_first_token_s``.
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
    """One of several answers to the same question: ``target-only``, ``draft-only`` or ``speculative``."""

    name: str
    answer: str
    figures: ChatFigures
    differs_at: Count | None = None  # position, from 1, of the first token that differs from target-only's
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A question and its answer, if one came."""

    user: str
    answer: str | None = None
    stopped: bool = False  # cut short by the user
    dropped: Count = 0  # oldest turns that did not fit into the context with this one
    stop_reason: str = ""
    figures: ChatFigures | None = None
    compared: tuple[ChatRun, ...] = ()  # the answers of ``/compare``
    seed: Count | None = None  # of the answer


@dataclass(frozen=True, slots=True)
class ChatDocument:
    """``ggufspec/chat@1``: a conversation, as it is saved and loaded, and as ``chat --json`` prints it.

    Loading ignores ``pair`` and ``settings``. ``error`` and ``hint`` belong to the message or command that ended it.
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
