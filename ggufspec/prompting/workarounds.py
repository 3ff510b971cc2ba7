"""Workarounds for chat templates that refuse a conversation: rewrites into forms that more templates accept. Pure.

A workaround is tried only if the template fails without it; see :meth:`ggufspec.prompting.prompt.Prompter.of_messages`.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

_IDS = string.digits + string.ascii_letters
_ID_LENGTH = 9  # as Mistral's templates require; other templates accept any length


@dataclass(frozen=True, slots=True)
class TokenizedMessage:
    """A message, with its token ids if it is an answer for which they are available."""

    role: str
    content: str
    tokens: tuple[int, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)  # other fields for the template, e.g. tool_calls, name

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> TokenizedMessage:
        """Convert a message from the format of OpenAI's API."""
        more = {key: value for key, value in plain.items() if key not in ("role", "content")}
        return cls(plain["role"], plain.get("content") or "", more=more)

    def plain(self) -> dict[str, Any]:
        """Return the message in the form that chat templates expect."""
        return {"role": self.role, "content": self.content, **self.more}

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        return self.more.get("tool_calls") or ()

    @property
    def instructs(self) -> bool:
        """True for a system prompt, including one under the newer role name."""
        return self.role in ("system", "developer")

    def joined(self, after: TokenizedMessage) -> TokenizedMessage:
        return replace(self, content=f"{self.content}\n\n{after.content}", tokens=())


Messages = list[TokenizedMessage]


def later_instructions(messages: Messages) -> Messages:
    """Merge later system prompts into the first if adjacent, else into the next question; earlier text stays as is."""
    found: Messages = []
    waiting: TokenizedMessage | None = None
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
    """Split an answer with several tool calls into one answer per call, each before the result of its call."""
    found: Messages = []
    waiting: dict[str, TokenizedMessage] = {}
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
    """Replace each tool call's id with nine letters and digits; equal ids stay equal."""

    def short(id_: Any) -> Any:
        if not isinstance(id_, str) or (len(id_) == _ID_LENGTH and id_.isascii() and id_.isalnum()):
            return id_
        return new_id(int.from_bytes(hashlib.sha256(id_.encode("utf-8", "replace")).digest()[:8], "big"))

    def with_ids(message: TokenizedMessage) -> TokenizedMessage:
        more = dict(message.more)
        if message.calls:
            more["tool_calls"] = [{**call, "id": short(call.get("id"))} for call in message.calls]
        if "tool_call_id" in more:
            more["tool_call_id"] = short(more["tool_call_id"])
        return message if more == message.more else replace(message, more=more)

    return [with_ids(message) for message in messages]


def folded(messages: Messages) -> Messages:
    """Put the system prompt in front of the first question."""
    if len(messages) < 2 or not messages[0].instructs or messages[1].role != "user":
        return messages
    return [replace(messages[1], content=messages[0].joined(messages[1]).content), *messages[2:]]


def new_id(number: int) -> str:
    """Return a tool-call id in a form that every template accepts."""
    letters = []
    for _ in range(_ID_LENGTH):
        number, place = divmod(number, len(_IDS))
        letters.append(_IDS[place])
    return "".join(letters)


FOLDED = "the chat template does not support a system prompt, so it is put before the first question"
# Workarounds in the order in which they are tried, each added to the previous ones, with a note for the user
WORKAROUNDS: tuple[tuple[Callable[[Messages], Messages], str], ...] = (
    (list, ""),
    (short_ids, ""),
    (one_call_each, "the chat template takes one tool call per message, so several are sent in turn"),
    (
        later_instructions,
        "the chat template takes one system prompt, at the beginning, so later ones are put before questions",
    ),
    (joined_neighbours, "the chat template needs alternating questions and answers, so two in a row are joined"),
    (folded, FOLDED),
)
