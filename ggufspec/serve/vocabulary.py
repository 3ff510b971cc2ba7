"""The target's vocabulary and chat template without its weights, in a small second child process.

Tokenize and template requests need not wait for a running answer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ggufspec import child
from ggufspec.llamacpp.chat_template import ChatTemplate, Wishes
from ggufspec.llamacpp.model import Model
from ggufspec.prompting.mends import Message
from ggufspec.prompting.prompt import Prompter
from ggufspec.serve.session import ANOTHER_TEMPLATE


@dataclass(frozen=True, slots=True)
class Spec:
    """The files to load."""

    target: Path
    chat_template: str = ""  # Jinja to replace the target's own; empty: none


@dataclass(frozen=True, slots=True)
class Ready:
    """The texts of the tokens that begin and end a text."""

    bos: str
    eos: str


@dataclass(frozen=True, slots=True)
class Request:
    """A text to tokenize, tokens to spell, or messages to make a prompt of; the first that is set counts."""

    text: str | None = None
    start: bool = False  # add the token that begins a text
    special: bool = True  # texts of control tokens are tokens
    tokens: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] = ()
    wishes: Wishes = field(default_factory=Wishes)


@dataclass(frozen=True, slots=True)
class Reply:
    """Tokens and their bytes, or a text."""

    tokens: tuple[int, ...] = ()
    pieces: tuple[tuple[int, ...], ...] = ()
    text: str = ""


class Desk:
    """The tokenizer process, from the parent's side; started with the first request."""

    def __init__(self, spec: Spec) -> None:
        self._spec, self._session, self._one = spec, child.Session(), threading.Lock()
        self._ready: Ready | None = None

    async def ready(self) -> Ready:
        return await asyncio.to_thread(self._opened)

    async def ask(self, request: Request) -> Reply:
        """Answer a request; see :meth:`answer`."""
        return await asyncio.to_thread(self.answer, request)

    def close(self) -> None:
        self._session.close()

    def _opened(self) -> Ready:
        with self._one:
            if self._ready is None or not self._session.is_open:
                self._ready = self._session.open(__name__, self._spec, Ready)
            return self._ready

    def answer(self, request: Request) -> Reply:
        """Answer a request, in the calling thread.

        Raises:
            GgufspecError: the request cannot be answered, or the child ended.
        """
        self._opened()
        with self._one:
            return self._session.ask(request, Reply)


@contextmanager
def opened(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Iterator[Loaded]:  # noqa: ARG001
    """Load the vocabulary in this process; a damaged file is a ModelError."""
    with Model(spec.target, vocab_only=True) as model:
        yield Loaded(model, spec.chat_template)


class Loaded:
    """A loaded vocabulary that answers requests."""

    def __init__(self, model: Model, chat_template: str) -> None:
        self._model = model
        self.ready = Ready(*model.token_texts)
        has_template = (chat_template or model.chat_template).strip()
        template = ChatTemplate.of(model, chat_template, hint=ANOTHER_TEMPLATE) if has_template else None
        self._prompter = Prompter(model, template)

    def answer(self, request: Request, emit: child.Emit, stopping: threading.Event) -> Reply:  # noqa: ARG002
        model = self._model
        if request.text is not None:
            found = model.tokenize(request.text, special=request.special, start=request.start)
            return Reply(tuple(found), tuple(tuple(model.piece(one, special=True)) for one in found))
        if request.tokens is not None:
            model.check_tokens(request.tokens)
            data = b"".join(model.piece(one, special=True) for one in request.tokens)
            return Reply(text=data.decode("utf-8", "replace"))
        messages = [Message.of(one) for one in request.messages]
        ids, applied = self._prompter.of_messages(messages, request.wishes)
        return Reply(tuple(ids), text=applied.prompt)
