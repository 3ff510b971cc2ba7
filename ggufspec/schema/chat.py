"""JSON document of ``ggufspec chat``, which is a conversation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count


@dataclass(frozen=True, slots=True)
class ChatFigures:
    """Timings and token counts of one chat answer.

    ``prompt_tokens`` counts the conversation as the model received it; ``prompt_read`` of these tokens were decoded for
    this answer, in ``prompt_s`` seconds. The first token comes from the prompt's batch, so ``tokens_per_s`` and
    ``rounds`` cover only later tokens. ``time_to_first_token_s`` is None if the answer has no tokens.
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
    """Answer by one of the compared variants: ``target-only``, ``draft-only`` or ``speculative``."""

    name: str
    answer: str
    figures: ChatFigures
    differs_at: Count | None = None  # 1-based position of the first token that differs from target-only's
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """Question with its answer, if there is one."""

    user: str
    answer: str | None = None
    stopped: bool = False  # True if the user stopped the answer
    dropped: Count = 0  # number of oldest turns that were omitted to fit this turn into the context
    stop_reason: str = ""
    figures: ChatFigures | None = None
    compared: tuple[ChatRun, ...] = ()  # answers that ``/compare`` produced
    seed: Count | None = None  # random seed of the answer


@dataclass(frozen=True, slots=True)
class ChatDocument:
    """Document ``ggufspec/chat@1``: a conversation as it is saved, loaded and printed by ``chat --json``.

    Loading ignores ``pair`` and ``settings``. ``error`` and ``hint`` explain a failure that ended the conversation.
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
