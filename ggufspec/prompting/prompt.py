"""From a conversation to the token ids of a prompt, by the model's chat template or as plain text. Pure.

A message stays text, even if it contains ``<|im_end|>``. And a previous answer goes back as the tokens that were
emitted, not as its text would be tokenized, so that a cache of them stays valid.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.chat_library import Applied
from ggufspec.llamacpp.chat_template import ChatTemplate, Wishes
from ggufspec.prompting import mends
from ggufspec.prompting.conversation import Conversation, plain_text
from ggufspec.prompting.marks import Marks
from ggufspec.prompting.mends import Message

if TYPE_CHECKING:
    from ggufspec.llamacpp.model import Model

WITHOUT_TEMPLATE = "--raw sends prompts as plain text, without the template"  # a hint


class Prompter:
    """Makes prompts from conversations.

    Args:
        model: the model whose tokens they use.
        template: its chat template; None if it has none.
        without_template, without_system: hints: how a user goes on without the template, and without a system prompt.

    Attributes:
        notes: what a user should know about how the prompts are made.
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
        starts = "".join(re.escape(each) for each in sorted({text[0] for text in special}))  # most positions match none
        pattern = f"(?=[{starts}])(?=({'|'.join(map(re.escape, special))}))." if special else "(?!)"
        self._special = re.compile(pattern, re.DOTALL)  # first character of a special token's text; its group: all
        self._spaced = b"".join(model.piece(token) for token in model.tokenize("a", start=False)) == b" a"
        self.notes: list[str] = []

    def tokens(self, conversation: Conversation, *, chat: bool = True) -> list[int]:
        """Return the prompt for the answer to the last question; see :meth:`applied`."""
        return self.applied(conversation, chat=chat)[0]

    def applied(self, conversation: Conversation, *, chat: bool = True) -> tuple[list[int], Applied]:
        """Return the prompt for the answer to the last question, and how the answer is read.

        Args:
            conversation: with an open question.
            chat: use the template, if there is one; otherwise the model continues the turns, joined as plain text.

        Raises:
            UsageError: no question is open; a message is not valid text, or the template changes one so that its
                ``<|…|>`` would mean a token.
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
        return self._ids(text, known, marks), Applied(marks.bare(text))

    def of_messages(self, messages: Sequence[Message], wishes: Wishes = Wishes()) -> tuple[list[int], Applied]:
        """Return the prompt for the next message, by the template, and how that message is constrained and read.

        Args:
            messages: messages of any roles, oldest first.
            wishes: template options.

        Raises:
            UsageError: a message is not valid text, or has a ``<|…|>`` that would mean a token; see
                :meth:`ChatTemplate.apply`.
            ModelError: there is no template; it fails, or refuses the messages.
        """
        if self._template is None:
            raise ModelError("the model has no chat template", "give one with --chat-template FILE")
        _check(messages)
        taken, applied = self._accepted(self._template, list(messages), wishes)
        return self._marked_ids(self._template, taken, wishes, applied.prompt), applied

    def _accepted(
        self, template: ChatTemplate, messages: list[Message], wishes: Wishes
    ) -> tuple[list[Message], Applied]:
        """Return the messages in the form that the template accepts, and its result."""
        failure: ModelError | None = None
        notes: list[str] = []
        for mend, note in mends.MENDS:
            mended = mend(messages)
            if failure and mended == messages:
                continue
            messages = mended
            notes.append(note)
            try:
                applied = template.apply([message.plain() for message in messages], wishes)
                if _lost(messages, applied.prompt):
                    raise ModelError("the model's chat template leaves the system prompt out", self._without_system)
            except ModelError as error:
                failure = failure or error
                continue
            self.notes += [note for note in notes if note and note not in self.notes]
            return messages, applied
        assert failure is not None
        raise failure

    def _marked_ids(self, template: ChatTemplate, messages: list[Message], wishes: Wishes, prompt: str) -> list[int]:
        """Tokenize a prompt so that text stays text, and known answers keep their tokens."""
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
                f"the chat template rewrites messages, so that {trap} in one of them would be a token",
                f"leave it out, or {self._without_template}",
            )
        return self._ids(prompt, none_known, marks)

    def _with_emitted(self, messages: Sequence[Message]) -> list[Message]:
        """Keep the tokens only of answers that still match their text, without end tokens."""
        return [replace(one, tokens=self._emitted(one)) for one in messages]

    def _emitted(self, answer: Message) -> tuple[int, ...]:
        tokens = tuple(token for token in answer.tokens if not self._model.is_end(token))
        data = b"".join(map(self._model.piece, tokens))
        return tokens if answer.content.strip() and data.decode("utf-8", "replace") == answer.content else ()

    def _ids(self, text: str, messages: Sequence[Message], marks: Marks) -> list[int]:
        """Tokenize a marked prompt."""
        ids: list[int] = []
        for one in marks.segments(text, [message for message in messages if message.tokens]):
            if isinstance(one, Message):
                ids += one.tokens
                continue
            for part in one.split(marks.cut):
                ids += self._cut(part, begun=bool(ids))
        first = self._model.first_token
        return ids if first is None or ids[:1] == [first] else [first, *ids]

    def _cut(self, text: str, *, begun: bool) -> list[int]:
        """Tokenize a text; after another one, without the space that some tokenizers begin with."""
        tokenize, piece = self._model.tokenize, self._model.piece
        if not (begun and self._spaced):
            return tokenize(text, special=True, start=False)
        if len(text) > 1 and text[0] == " ":
            return tokenize(text[1:], special=True, start=False)
        ids = tokenize(text, special=True, start=False)
        return ids[1:] if ids and piece(ids[0]) == b" " else ids


def chat_prompt(model: Model, text: str, *, system: str = "", notes: list[str] | None = None) -> list[int]:
    """Return the prompt, as token ids, for the answer to a user's message, by the model's chat template.

    Args:
        model: the model that answers: ``decoder.target``.
        text: the message; ``<|…|>`` in it stays text.
        system: the system prompt.
        notes: gets what a user should know of how the prompt was made.

    Raises:
        UsageError: a text is not valid, or the template changes one so that its ``<|…|>`` would mean a token.
        ModelError: there is no template; it fails, or refuses the messages.
    """
    if not model.chat_template.strip():
        raise ModelError(f"{model.path.name} has no chat template", WITHOUT_TEMPLATE)
    template = ChatTemplate.of(model, hint=WITHOUT_TEMPLATE)
    prompter = Prompter(model, template, without_template="--raw", without_system="leave --system out")
    tokens = prompter.tokens(Conversation(system).ask(text))
    if notes is not None:
        notes += prompter.notes
    return tokens


def _check(messages: Sequence[Message]) -> None:
    """Raise UsageError if a message is not valid text."""
    for message in messages:
        try:
            "".join([message.content, *_texts(message.more)]).encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"the {message.role} message is not valid text: it has half a character", "type it again"
            ) from None


def _texts(value: object) -> Iterator[str]:
    """Yield every text in plain data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield str(key)
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def _lost(messages: Sequence[Message], prompt: str) -> bool:
    """Return True if a template has dropped the system prompt, which is the first message."""
    return len(messages) > 1 and messages[0].instructs and messages[0].content.strip() not in prompt
