"""A conversation: its turns, which of them still fit the context, and the file in which it is saved.

Pure except for :func:`save_conversation` and :func:`load_conversation`. The file's schema is ``ggufspec/chat@1``, as
printed by ``ggufspec chat --json``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ggufspec.errors import GgufspecError, UsageError
from ggufspec.files import untrusted
from ggufspec.files.write import write_whole
from ggufspec.prompting.workarounds import TokenizedMessage
from ggufspec.schema.base import to_json
from ggufspec.schema.chat import ChatDocument, ChatTurn

SCHEMA = "ggufspec/chat@1"
_AFTER = {"system": "\n\n", "user": "", "assistant": "\n"}  # separators after each role's text in plain-text prompts
_RESERVED_SHARE = 4  # at most a quarter of the context is reserved for the answer
_HINT = "/save FILE saves a conversation; ggufspec chat --json prints one"


@dataclass(frozen=True, slots=True)
class Turn(ChatTurn):
    """A question and its answer, as in documents; ``answer`` is None until the model has answered.

    ``tokens`` are the ids of the answer as emitted, including its end token, so that a cache that holds them can be
    reused in the next turn; empty if unknown, e.g. in a conversation from a file.
    """

    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt and turns, oldest first. Only the last turn may be unanswered; the conversation is then open."""

    system: str = ""
    turns: tuple[Turn, ...] = ()

    def ask(self, text: str) -> Conversation:
        """Return the conversation with one more question, which replaces an unanswered last question."""
        return replace(self, turns=(*self.answered, Turn(text)))

    def reply(self, text: str, tokens: tuple[int, ...] = (), **more: Any) -> Conversation:
        """Return the conversation with its last question answered; ``more`` holds other fields of :class:`Turn`."""
        if not self.open:
            raise ValueError("there is no question to answer")
        last = replace(self.turns[-1], answer=text, tokens=tokens, **more)
        return replace(self, turns=(*self.turns[:-1], last))

    def undo(self) -> Conversation:
        """Return the conversation without its last turn, answered or not."""
        return replace(self, turns=self.turns[:-1])

    def clear(self) -> Conversation:
        return replace(self, turns=())

    def without(self, count: int) -> Conversation:
        """Return the conversation without its ``count`` oldest turns; the system prompt stays."""
        return replace(self, turns=self.turns[count:])

    @property
    def open(self) -> bool:
        return bool(self.turns) and self.turns[-1].answer is None

    @property
    def answered(self) -> tuple[Turn, ...]:
        return self.turns[:-1] if self.open else self.turns

    def messages(self) -> list[TokenizedMessage]:
        """Return the system prompt, if any, and every turn as messages."""
        messages = [TokenizedMessage("system", self.system)] if self.system else []
        for turn in self.turns:
            messages.append(TokenizedMessage("user", turn.user))
            if turn.answer is not None:
                messages.append(TokenizedMessage("assistant", turn.answer, turn.tokens))
        return messages


def plain_text(messages: Iterable[TokenizedMessage]) -> str:
    """Join messages into one text for a model to continue."""
    return "".join(message.content + _AFTER[message.role] for message in messages)


def reserved_tokens(ctx_size: int, max_tokens: int) -> int:
    """Return the tokens reserved for the answer: its full length, but at most a quarter of the context."""
    return max(1, min(max_tokens, ctx_size // _RESERVED_SHARE))


def fit_context(
    conversation: Conversation, count: Callable[[Conversation], int], ctx_size: int, max_tokens: int
) -> Conversation:
    """Drop as few of the oldest turns as possible so that the prompt and :func:`reserved_tokens` fit the context.

    ``count`` returns the number of prompt tokens for a conversation.

    Raises:
        UsageError: not even the last question and the system prompt fit; the message gives their token count.
    """
    reserved = reserved_tokens(ctx_size, max_tokens)
    most = ctx_size - reserved
    sizes: dict[int, int] = {}

    def fits(dropped: int) -> bool:
        sizes[dropped] = count(conversation.without(dropped))
        return sizes[dropped] <= most

    if fits(0):
        return conversation
    last = len(conversation.turns) - 1
    if not fits(last):
        message = "the message with the system prompt" if conversation.system else "the message"
        held = f"the context holds {ctx_size:,}, {reserved:,} of them for the answer"
        raise UsageError(
            f"{message} has {sizes[last]:,} tokens; {held}",
            f"-c {_context_for(sizes[last], max_tokens)} would hold it",
        )
    return conversation.without(bisect_left(range(last), True, key=fits))


def _context_for(tokens: int, max_tokens: int) -> int:
    enough = min(tokens + max_tokens, -(-tokens * _RESERVED_SHARE // (_RESERVED_SHARE - 1)))
    return -(-enough // 256) * 256


def chat_document(
    conversation: Conversation, pair: Mapping[str, Any], settings: Mapping[str, Any], **more: Any
) -> ChatDocument:
    """Return the conversation as ``ggufspec/chat@1``, without token ids, which mean nothing to another model.

    ``pair`` and ``settings`` are for information only; ``more`` holds other fields of the document.
    """
    names = [field.name for field in fields(ChatTurn)]
    turns = tuple(ChatTurn(**{name: getattr(turn, name) for name in names}) for turn in conversation.turns)
    return ChatDocument(dict(pair), dict(settings), conversation.system, turns, **more)


def save_conversation(path: Path, document: ChatDocument) -> None:
    """Write a conversation to a file atomically."""
    write_whole(path, to_json(document) + "\n")


def load_conversation(path: Path) -> Conversation:
    """Read the conversation in a file; unknown keys are ignored.

    Raises:
        GgufspecError: the file does not exist, is damaged, or is not a conversation.
    """
    return _parse(untrusted.read_json(path, hint=_HINT), str(path))


def _parse(body: object, name: str) -> Conversation:
    from pydantic import ValidationError

    from ggufspec.schema import codec

    schema = body.get("schema") if isinstance(body, Mapping) else None
    if not isinstance(body, Mapping) or not isinstance(schema, str):
        raise GgufspecError(f"{name} is not a conversation: it has no schema", _HINT)
    if schema != SCHEMA:
        known = schema.rpartition("@")[0] == SCHEMA.rpartition("@")[0]
        hint = "a newer ggufspec wrote it: update" if known else _HINT
        raise GgufspecError(f"{name} has schema {schema!r}, but a conversation has {SCHEMA!r}", hint)
    try:
        file = codec.load(_File, body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise GgufspecError(f"{name} is a damaged conversation: {where}: {first['msg']}", _HINT) from None
    unanswered = [number for number, turn in enumerate(file.turns[:-1], 1) if turn.answer is None]
    if unanswered:
        raise GgufspecError(f"{name} is a damaged conversation: turn {unanswered[0]} has no answer", _HINT)
    everything = [file.system, *(text for turn in file.turns for text in (turn.user, turn.answer or ""))]
    if any("\ud800" <= character <= "\udfff" for text in everything for character in text):
        raise GgufspecError(f"{name} is a damaged conversation: it has half a character (a lone surrogate)", _HINT)
    return Conversation(file.system, tuple(Turn(turn.user, turn.answer, turn.stopped) for turn in file.turns))


@dataclass(frozen=True, slots=True)
class _FileTurn:
    user: str
    answer: str | None = None
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class _File:
    turns: list[_FileTurn]
    system: str = ""
