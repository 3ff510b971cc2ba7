"""Workarounds for chat templates that refuse a conversation: rewrite it in forms that more of them accept. Pure.

Each is tried only if the template fails without it: see :meth:`ggufspec.prompting.prompt.Prompter.of_messages`.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

_IDS = string.digits + string.ascii_letters
_ID_LENGTH = 9  # as Mistral's templates require; others take any


@dataclass(frozen=True, slots=True)
class Message:
    """A message, and, if it is an answer whose tokens are known, these tokens."""

    role: str
    content: str
    tokens: tuple[int, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)  # further fields for the template: tool_calls, name, …

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Message:
        """Make a message from OpenAI's API."""
        more = {key: value for key, value in plain.items() if key not in ("role", "content")}
        return cls(plain["role"], plain.get("content") or "", more=more)

    def plain(self) -> dict[str, Any]:
        """Return the message as a chat template takes it."""
        return {"role": self.role, "content": self.content, **self.more}

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        return self.more.get("tool_calls") or ()

    @property
    def instructs(self) -> bool:
        """True for a system prompt, also under its newer name."""
        return self.role in ("system", "developer")

    def joined(self, after: Message) -> Message:
        return replace(self, content=f"{self.content}\n\n{after.content}", tokens=())


Messages = list[Message]


def later_instructions(messages: Messages) -> Messages:
    """Join further system prompts to the first if they follow it, or else to the next question: earlier text stays."""
    found: Messages = []
    waiting: Message | None = None
    for message in messages:
        if message.instructs and found and all(one.instructs for one in found):
            found[-1] = found[-1].joined(message)
        elif message.instructs and found:
            waiting = waiting.joined(message) if waiting else replace(message, role="user")
        elif waiting and message.role == "user":
            found.append(replace(message, content=waiting.joined(message).content))
            waiting = None
        elif waiting and message.role == "assistant":
            found += [waiting, message]
            waiting = None
        else:
            found.append(message)
    return [*found, waiting] if waiting else found


def joined_neighbours(messages: Messages) -> Messages:
    """Join consecutive questions, and consecutive answers."""
    found: Messages = []
    for message in messages:
        joins = bool(found) and found[-1].role == message.role and message.role in ("user", "assistant")
        if joins and not found[-1].calls and not message.calls:
            found[-1] = found[-1].joined(message)
        else:
            found.append(message)
    return found


def one_call_each(messages: Messages) -> Messages:
    """Split an answer with several calls into several answers, each in front of its call's result."""
    found: Messages = []
    waiting: dict[str, Message] = {}
    for message in messages:
        waiting = waiting if message.role == "tool" else {}
        if len(message.calls) > 1:
            first, *others = (
                replace(message, tokens=(), more={**message.more, "tool_calls": [one]}) for one in message.calls
            )
            found.append(first)
            waiting = {str(one.calls[0].get("id")): replace(one, content="") for one in others}
        else:
            if call := waiting.pop(str(message.more.get("tool_call_id")), None):
                found.append(call)
            found.append(message)
    return found


def short_ids(messages: Messages) -> Messages:
    """Replace ids of calls by nine letters and digits, the same one for the same id."""

    def short(id_: Any) -> Any:
        if not isinstance(id_, str) or (len(id_) == _ID_LENGTH and id_.isascii() and id_.isalnum()):
            return id_
        return new_id(int.from_bytes(hashlib.sha256(id_.encode("utf-8", "replace")).digest()[:8], "big"))

    def mended(message: Message) -> Message:
        more = dict(message.more)
        if message.calls:
            more["tool_calls"] = [{**call, "id": short(call.get("id"))} for call in message.calls]
        if "tool_call_id" in more:
            more["tool_call_id"] = short(more["tool_call_id"])
        return message if more == message.more else replace(message, more=more)

    return [mended(message) for message in messages]


def folded(messages: Messages) -> Messages:
    """Put the system prompt in front of the first question."""
    if len(messages) < 2 or not messages[0].instructs or messages[1].role != "user":
        return messages
    return [replace(messages[1], content=messages[0].joined(messages[1]).content), *messages[2:]]


def new_id(number: int) -> str:
    """Return the id of a call, in a form that every template accepts."""
    letters = []
    for _ in range(_ID_LENGTH):
        number, place = divmod(number, len(_IDS))
        letters.append(_IDS[place])
    return "".join(letters)


FOLDED = "the chat template takes no system prompt: it is put before the first question"
# In the order in which they are tried, each on top of the previous ones; with the note for the user
MENDS: tuple[tuple[Callable[[Messages], Messages], str], ...] = (
    (list, ""),
    (short_ids, ""),
    (one_call_each, "the chat template takes one call a message: several are sent one after another"),
    (
        later_instructions,
        "the chat template takes one system prompt, at the beginning: later ones are put before questions",
    ),
    (joined_neighbours, "the chat template takes questions and answers in turn: two in a row are joined"),
    (folded, FOLDED),
)
