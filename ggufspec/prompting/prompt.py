"""Conversion of a conversation to the token ids of a prompt, by the model's chat template or as plain text. Pure.

A message stays text, even if it contains ``<|im_end|>``. A previous answer is passed as the tokens that were emitted
rather than tokenized again, so that its cached tokens stay valid.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.chat_library import AppliedTemplate
from ggufspec.llamacpp.chat_template import ChatTemplate, TemplateOptions
from ggufspec.prompting import workarounds
from ggufspec.prompting.conversation import Conversation, plain_text
from ggufspec.prompting.marks import Marks
from ggufspec.prompting.workarounds import TokenizedMessage

if TYPE_CHECKING:
    from ggufspec.llamacpp.model import Model

WITHOUT_TEMPLATE = "--raw sends prompts as plain text, without the template"  # hint for templates that fail


class Prompter:
    """Builder of prompts from conversations.

    Args:
        model: the model that the prompts are for.
        template: the model's chat template; None if it has none.
        without_template, without_system: hints on how to continue without the template or without a system prompt.

    Attributes:
        notes: notes for the user on how the prompts were made.
    """

    def __init__(
        self,
        model: Model,
        template: ChatTemplate | None,
        *,
        without_template: str = "/chat off",
        without_system: str = "/system off",
    ) -> None:
        self._model, self._template = model, template
        self._without_template, self._without_system = without_template, without_system
        special = sorted((text for text in model.special_texts() if len(text) > 1), key=len, reverse=True)
        starts = "".join(re.escape(each) for each in sorted({text[0] for text in special}))  # rules out most positions
        pattern = f"(?=[{starts}])(?=({'|'.join(map(re.escape, special))}))." if special else "(?!)"
        self._special = re.compile(pattern, re.DOTALL)  # matches a special token's first character; group 1: its text
        self._spaced = b"".join(model.piece(token) for token in model.tokenize("a", start=False)) == b" a"
        self.notes: list[str] = []

    def tokens(self, conversation: Conversation, *, chat: bool = True) -> list[int]:
        """Return the prompt tokens for the last question; see :meth:`applied`."""
        return self.applied(conversation, chat=chat)[0]

    def applied(self, conversation: Conversation, *, chat: bool = True) -> tuple[list[int], AppliedTemplate]:
        """Return the prompt tokens for the last question, and how to parse the answer.

        Args:
            conversation: a conversation with an unanswered question.
            chat: True to use the template, if there is one; otherwise the model continues the turns as plain text.

        Raises:
            UsageError: there is no unanswered question, a message is not valid text, or the template changes one so
                that its ``<|…|>`` would become a control token.
            ModelError: the template fails, or refuses the conversation.
        """
        if not conversation.open:
            raise UsageError("there is no question to answer", "ask one")
        messages = conversation.messages()
        if chat and self._template is not None:
            return self.of_messages(messages)
        _check(messages)
        known = self._with_emitted(messages)
        marks = Marks([message.content for message in messages], self._special)
        text = plain_text(map(marks.marked, known))
        return self._ids(text, known, marks), AppliedTemplate(marks.bare(text))

    def of_messages(
        self, messages: Sequence[TokenizedMessage], wishes: TemplateOptions = TemplateOptions()
    ) -> tuple[list[int], AppliedTemplate]:
        """Return the template's prompt tokens for the next message, and how to constrain and parse that message.

        Args:
            messages: messages of any roles, oldest first.
            wishes: template options.

        Raises:
            UsageError: a message is not valid text, or has a ``<|…|>`` that would become a control token; see also
                :meth:`ChatTemplate.apply`.
            ModelError: there is no template, or it fails or refuses the messages.
        """
        if self._template is None:
            raise ModelError("the model has no chat template", "give one with --chat-template FILE")
        _check(messages)
        taken, applied = self._accepted(self._template, list(messages), wishes)
        return self._marked_ids(self._template, taken, wishes, applied.prompt), applied

    def _accepted(
        self, template: ChatTemplate, messages: list[TokenizedMessage], wishes: TemplateOptions
    ) -> tuple[list[TokenizedMessage], AppliedTemplate]:
        """Return the messages in a form that the template accepts, and the template's result."""
        failure: ModelError | None = None
        notes: list[str] = []
        for change, note in workarounds.WORKAROUNDS:
            changed = change(messages)
            if failure and changed == messages:
                continue
            messages = changed
            notes.append(note)
            try:
                applied = template.apply([message.plain() for message in messages], wishes)
                if _lost(messages, applied.prompt):
                    raise ModelError("the model's chat template drops the system prompt", self._without_system)
            except ModelError as error:
                failure = failure or error
                continue
            self.notes += [note for note in notes if note and note not in self.notes]
            return messages, applied
        assert failure is not None
        raise failure

    def _marked_ids(
        self, template: ChatTemplate, messages: list[TokenizedMessage], wishes: TemplateOptions, prompt: str
    ) -> list[int]:
        """Tokenize a prompt so that text does not become control tokens, and known answers keep their tokens."""
        known, none_known = self._with_emitted(messages), [replace(one, tokens=()) for one in messages]
        texts = [*_texts([wishes.tools, *([one.content, one.more] for one in messages)])]
        trap = next((found[1] for text in texts for found in self._special.finditer(text)), "")
        marks = Marks([prompt, *texts], self._special)
        for tried in [known] * any(one.tokens for one in known) + [none_known] * bool(trap):
            asked = replace(wishes, tools=tuple(marks.guarded(wishes.tools)), json_schema="")
            try:
                text = template.apply([marks.marked(message).plain() for message in tried], asked).prompt
            except (ModelError, UsageError):
                continue
            text = marks.unescaped(text)
            if marks.bare(text) == prompt:
                return self._ids(text, tried, marks)
        if trap:
            raise UsageError(
                f"the chat template rewrites messages, so that {trap} in one of them would become a control token",
                f"leave it out, or {self._without_template}",
            )
        return self._ids(prompt, none_known, marks)

    def _with_emitted(self, messages: Sequence[TokenizedMessage]) -> list[TokenizedMessage]:
        """Return the messages, with tokens only for answers whose text still matches them; end tokens are removed."""
        return [replace(one, tokens=self._emitted(one)) for one in messages]

    def _emitted(self, answer: TokenizedMessage) -> tuple[int, ...]:
        tokens = tuple(token for token in answer.tokens if token >= 0 and not self._model.is_end(token))
        data = b"".join(map(self._model.piece, tokens))
        return tokens if answer.content.strip() and data.decode("utf-8", "replace") == answer.content else ()

    def _ids(self, text: str, messages: Sequence[TokenizedMessage], marks: Marks) -> list[int]:
        """Tokenize a marked prompt."""
        ids: list[int] = []
        for one in marks.segments(text, [message for message in messages if message.tokens]):
            if isinstance(one, TokenizedMessage):
                ids += one.tokens
                continue
            for part in one.split(marks.cut):
                ids += self._cut(part, begun=bool(ids))
        first = self._model.first_token
        return ids if first is None or ids[:1] == [first] else [first, *ids]

    def _cut(self, text: str, *, begun: bool) -> list[int]:
        """Tokenize a part of a prompt; unless it is the first, drop the space that some tokenizers put in front."""
        tokenize, piece = self._model.tokenize, self._model.piece
        if not (begun and self._spaced):
            return tokenize(text, special=True, start=False)
        if len(text) > 1 and text[0] == " ":
            return tokenize(text[1:], special=True, start=False)
        ids = tokenize(text, special=True, start=False)
        return ids[1:] if ids and piece(ids[0]) == b" " else ids


def chat_prompt(model: Model, text: str, *, system: str = "", notes: list[str] | None = None) -> list[int]:
    """Return the token ids of the prompt for a user's message, made with the model's chat template.

    Args:
        model: the model that answers, e.g. ``decoder.target``.
        text: the message; ``<|…|>`` in it stays text.
        system: the system prompt.
        notes: list that receives notes on how the prompt was made.

    Raises:
        UsageError: a text is not valid, or the template changes one so that its ``<|…|>`` becomes a control token.
        ModelError: there is no template, or it fails or refuses the messages.
    """
    if not model.chat_template.strip():
        raise ModelError(f"{model.path.name} has no chat template", WITHOUT_TEMPLATE)
    template = ChatTemplate.of(model, hint=WITHOUT_TEMPLATE)
    prompter = Prompter(model, template, without_template="--raw", without_system="leave --system out")
    tokens = prompter.tokens(Conversation(system).ask(text))
    if notes is not None:
        notes += prompter.notes
    return tokens


def _check(messages: Sequence[TokenizedMessage]) -> None:
    """Raise UsageError if a message is not valid text."""
    for message in messages:
        try:
            "".join([message.content, *_texts(message.more)]).encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"the {message.role} message is not valid text: it contains half a character", "type it again"
            ) from None


def _texts(value: object) -> Iterator[str]:
    """Yield every string in plain data, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield str(key)
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def _lost(messages: Sequence[TokenizedMessage], prompt: str) -> bool:
    """Return True if a template has dropped the system prompt, which is the first message."""
    return len(messages) > 1 and messages[0].instructs and messages[0].content.strip() not in prompt
