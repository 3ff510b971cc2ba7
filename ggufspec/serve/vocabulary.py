"""Second, small child process with the target's vocabulary and chat template, but without its weights.

It answers tokenize and template requests, so that they need not wait for a running answer.
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
from ggufspec.llamacpp.chat_template import ChatTemplate, TemplateOptions
from ggufspec.llamacpp.model import Model
from ggufspec.prompting.prompt import Prompter
from ggufspec.prompting.workarounds import TokenizedMessage
from ggufspec.serve.session import ANOTHER_TEMPLATE


@dataclass(frozen=True, slots=True)
class TokenizerJob:
    """Files for the tokenizer process to load."""

    target: Path
    chat_template: str = ""  # Jinja template; empty: the target's own


@dataclass(frozen=True, slots=True)
class TokenizerReady:
    """Texts of the BOS and EOS tokens."""

    bos: str
    eos: str


@dataclass(frozen=True, slots=True)
class TokenizerRequest:
    """Text to tokenize, tokens to detokenize, or messages to turn into a prompt; only the first that is set is used."""

    text: str | None = None
    start: bool = False  # add the BOS token
    special: bool = True  # parse control-token text as special tokens (llama.cpp's parse_special)
    tokens: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] = ()
    wishes: TemplateOptions = field(default_factory=TemplateOptions)


@dataclass(frozen=True, slots=True)
class TokenizerReply:
    """Tokens and their bytes, or a text."""

    tokens: tuple[int, ...] = ()
    pieces: tuple[tuple[int, ...], ...] = ()
    text: str = ""


class TokenizerProcess:
    """Parent-side handle of the tokenizer process, which starts with the first request."""

    def __init__(self, spec: TokenizerJob) -> None:
        self._spec, self._session, self._one = spec, child.Session(), threading.Lock()
        self._ready: TokenizerReady | None = None

    async def ready(self) -> TokenizerReady:
        return await asyncio.to_thread(self._opened)

    async def ask(self, request: TokenizerRequest) -> TokenizerReply:
        """Answer a request without blocking the event loop; see :meth:`answer`."""
        return await asyncio.to_thread(self.answer, request)

    def close(self) -> None:
        self._session.close()

    def _opened(self) -> TokenizerReady:
        with self._one:
            if self._ready is None or not self._session.is_open:
                self._ready = self._session.open(__name__, self._spec, TokenizerReady)
            return self._ready

    def answer(self, request: TokenizerRequest) -> TokenizerReply:
        """Answer a request in the calling thread.

        Raises:
            GgufspecError: the request cannot be answered, or the child ended.
        """
        self._opened()
        with self._one:
            return self._session.ask(request, TokenizerReply)


@contextmanager
def opened(spec: TokenizerJob, emit: child.Emit, stopping: threading.Event) -> Iterator[LoadedTokenizer]:  # noqa: ARG001
    """Load the vocabulary in this process; raise ModelError if the file is damaged."""
    with Model(spec.target, vocab_only=True) as model:
        yield LoadedTokenizer(model, spec.chat_template)


class LoadedTokenizer:
    """Loaded vocabulary that answers requests."""

    def __init__(self, model: Model, chat_template: str) -> None:
        self._model = model
        self.ready = TokenizerReady(*model.token_texts)
        has_template = (chat_template or model.chat_template).strip()
        template = ChatTemplate.of(model, chat_template, hint=ANOTHER_TEMPLATE) if has_template else None
        self._prompter = Prompter(model, template)

    def answer(self, request: TokenizerRequest, emit: child.Emit, stopping: threading.Event) -> TokenizerReply:  # noqa: ARG002
        model = self._model
        if request.text is not None:
            found = model.tokenize(request.text, special=request.special, start=request.start)
            return TokenizerReply(tuple(found), tuple(tuple(model.piece(one, special=True)) for one in found))
        if request.tokens is not None:
            model.check_tokens(request.tokens)
            data = b"".join(model.piece(one, special=True) for one in request.tokens)
            return TokenizerReply(text=data.decode("utf-8", "replace"))
        messages = [TokenizedMessage.of(one) for one in request.messages]
        ids, applied = self._prompter.of_messages(messages, request.wishes)
        return TokenizerReply(tuple(ids), text=applied.prompt)
