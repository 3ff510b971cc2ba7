"""From a conversation to the token ids of a prompt, by the model's chat template or as plain text. Pure.

Two things go beyond the template's text. A message stays text, ``<|im_end|>`` and all. And an answer of the model goes
back as the tokens that it emitted, not as its text would be tokenized, so that a cache which holds them stays valid.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ggufspec.chat.conversation import Conversation
from ggufspec.chat.template import Piece, rendered
from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.chat_template import ChatTemplate

if TYPE_CHECKING:
    from ggufspec.llamacpp.model import Model


@dataclass(frozen=True, slots=True)
class Message:
    """A message, and the tokens that its answer was emitted as, if it is one and they are known."""

    role: str
    content: str
    tokens: tuple[int, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)  # what else the template gets: tool_calls, name, …

    def plain(self) -> dict[str, Any]:
        """What a chat template takes."""
        return {"role": self.role, "content": self.content, **self.more}


@dataclass(frozen=True, slots=True)
class _Given:
    """What a template gets besides messages."""

    tools: tuple[Mapping[str, Any], ...]
    options: dict[str, Any]


class Prompter:
    """Makes prompts of conversations.

    Args:
        model: whose tokens they are of.
        template: its chat template; None where it has none.

    Attributes:
        notes: what a user should know of how the prompts are made.
    """

    def __init__(self, model: Model, template: ChatTemplate | None) -> None:
        self._model, self._template = model, template
        special = sorted((text for text in model.special_texts() if len(text) > 1), key=len, reverse=True)
        starts = "".join(re.escape(each) for each in sorted({text[0] for text in special}))  # most places have none
        self._special = re.compile(f"(?=[{starts}])(?=({'|'.join(map(re.escape, special))}))") if special else None
        self._spaced = b"".join(model.piece(token) for token in model.tokenize("a", start=False)) == b" a"
        self._folds = False  # the system prompt goes into the first question
        self.notes: list[str] = []

    def tokens(self, conversation: Conversation, *, chat: bool = True) -> list[int]:
        """The prompt for the answer to the last question.

        Args:
            conversation: with an open question.
            chat: use the template, if there is one; else the turns are one text after another, and the model goes on.

        Raises:
            UsageError: no question is open; a message is not valid text, or the template changes one so that its
                ``<|…|>`` would mean a token.
            ModelError: the template fails, or refuses the conversation.
        """
        if not conversation.open:
            raise UsageError("there is no question to answer", "ask one")
        messages = _messages(conversation)
        if chat and self._template is not None:
            return self.of_messages(messages)
        _check(messages)
        return self._ids(messages, _plain(messages))

    def of_messages(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), options: Mapping[str, Any] = {}
    ) -> list[int]:
        """The prompt for the next message, by the template.

        Args:
            messages: of any roles, oldest first.
            tools: what the model may call, as the template takes them.
            options: further variables of the template: ``enable_thinking``, …

        Raises:
            UsageError: a message is not valid text, or is one whose ``<|…|>`` would mean a token.
            ModelError: there is no template; it fails, or refuses the messages.
        """
        if self._template is None:
            raise ModelError("the model has no chat template", "give one with --chat-template FILE")
        _check(messages)
        aside = [*tools, *(message.more for message in messages)]
        if found := next(filter(None, map(self._special_in, _texts(aside))), ""):
            raise UsageError(f"{found} in a tool or in a call of one would be a token", "leave it out")
        given = _Given(tuple(tools), dict(options))
        return self._ids(*self._rendered(self._template, list(messages), given))

    def _ids(self, messages: list[Message], pieces: list[Piece]) -> list[int]:
        """The tokens of a prompt's text."""
        ids: list[int] = []
        begun = False
        for segment in self._segments(messages, pieces):
            if isinstance(segment, str):
                ids += self._cut(segment, begun=begun)
            else:
                ids += segment
            begun = begun or bool(segment)
        first = self._model.first_token
        return ids if first is None or ids[:1] == [first] else [first, *ids]

    def _rendered(
        self, template: ChatTemplate, messages: list[Message], given: _Given
    ) -> tuple[list[Message], list[Piece]]:
        """The messages as the template takes them, and its text."""
        if len(messages) < 2 or messages[0].role not in ("system", "developer") or messages[1].role != "user":
            return messages, self._pieces(template, messages, given)
        failure = ModelError("the model's chat template leaves the system prompt out", "/system off")
        if not self._folds:
            try:
                pieces = self._pieces(template, messages, given)
                if not _lost(pieces, messages[0].content):
                    return messages, pieces
            except ModelError as error:
                failure = error
        folded = _folded(messages)
        try:
            pieces = self._pieces(template, folded, given)
        except ModelError:
            raise failure from None
        if not self._folds:
            self._folds = True
            self.notes.append("the chat template takes no system prompt: it is put before the first question")
        return folded, pieces

    def _pieces(self, template: ChatTemplate, messages: list[Message], given: _Given) -> list[Piece]:
        def render(plain: Sequence[Mapping[str, Any]]) -> str:
            return template.render(plain, tools=given.tools, **given.options)

        plain = [message.plain() for message in messages]
        pieces = rendered(render, plain, lambda text: not self._special_in(text))
        if all(piece.message is None for piece in pieces):  # messages are not found in the template's text
            for message in messages:
                if found := self._special_in(message.content):
                    raise UsageError(
                        f"the chat template rewrites messages, so that {found} in one of them would be a token",
                        "leave it out, or /chat off",
                    )
        return pieces

    def _special_in(self, text: str) -> str:
        """The first special token's text in ``text``; empty if there is none."""
        found = self._special.search(text) if self._special else None
        return found[1] if found else ""

    def _segments(self, messages: list[Message], pieces: list[Piece]) -> list[str | list[int]]:
        """The prompt as texts to be cut into tokens one by one, and tokens."""
        segments: list[str | list[int]] = [""]

        def add(text: str) -> None:
            if isinstance(segments[-1], str):
                segments[-1] += text
            else:
                segments.append(text)

        for piece in pieces:
            if piece.message is None:
                add(piece.text)
            elif known := self._known(messages[piece.message].tokens, piece.text):
                segments.append(known)
            else:
                first, *others = self._guarded(piece.text)
                add(first)
                segments += others
        return segments

    def _known(self, tokens: tuple[int, ...], text: str) -> list[int]:
        """The tokens that an answer was emitted as, without its end; none where the template changes its text."""
        answer = [token for token in tokens if not self._model.is_end(token)]
        data = b"".join(map(self._model.piece, answer))
        return answer if data.decode("utf-8", "replace") == text else []

    def _guarded(self, text: str) -> list[str]:
        """A message, in parts in which no special token's text is whole."""
        cuts = [found.start() + 1 for found in self._special.finditer(text)] if self._special else []
        return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]

    def _cut(self, text: str, *, begun: bool) -> list[int]:
        """Token ids of a text; where another goes before it, without the space that some tokenizers begin with."""
        tokenize, piece = self._model.tokenize, self._model.piece
        if not (begun and self._spaced):
            return tokenize(text, special=True, start=False)
        if len(text) > 1 and text[0] == " ":
            return tokenize(text[1:], special=True, start=False)
        ids = tokenize(text, special=True, start=False)
        return ids[1:] if ids and piece(ids[0]) == b" " else ids


def _messages(conversation: Conversation) -> list[Message]:
    """The conversation's messages, in order."""
    tokens = (turn.tokens for turn in conversation.answered)
    return [
        Message(role, content, next(tokens) if role == "assistant" else ())
        for role, content in map(dict.values, conversation.messages())
    ]


def _check(messages: Sequence[Message]) -> None:
    """Refuse what is not valid text.

    Raises:
        UsageError: a message is not.
    """
    for message in messages:
        try:
            "".join([message.content, *_texts(message.more)]).encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"the {message.role} message is not valid text: it has half a character", "type it again"
            ) from None


def _texts(value: object) -> Iterator[str]:
    """Every text in plain data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield str(key)
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def _plain(messages: list[Message]) -> list[Piece]:
    after = {"system": "\n\n", "user": "", "assistant": "\n"}
    return [
        piece
        for index, message in enumerate(messages)
        for piece in (Piece(message.content, index), Piece(after[message.role], None))
    ]


def _folded(messages: list[Message]) -> list[Message]:
    """The system prompt in front of the first question."""
    system, question, *others = messages
    return [Message(question.role, f"{system.content}\n\n{question.content}"), *others]


def _lost(pieces: list[Piece], system: str) -> bool:
    """Whether a template has left the system prompt out, which is the first message."""
    if any(piece.message is not None for piece in pieces):
        return all(piece.message != 0 for piece in pieces)
    return all(system.strip() not in piece.text for piece in pieces)
