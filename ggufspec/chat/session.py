"""A pair that stays loaded and answers one question after another; the child's side of :class:`worker.Session`.

The parent's side::

    with worker.Session() as child:
        ready = child.open(session.__name__, Spec(…), Ready)
        reply = child.ask(Request(conversation.ask("…")), Reply, on_event=…)
        conversation = conversation.ask("…").reply(reply.text, reply.tokens, stopped=reply.stopped)

Events of a request, in this order: ``dropped`` {turns} where the conversation is longer than
the context; ``prompt`` {tokens}; then for every round, when the request wants them, ``round`` {round: a TracedRound},
and for every token ``token`` {text, source}. ``text`` may be empty, ``source`` is ``draft``, ``lookup``, ``target`` or
``bonus``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ggufspec import worker
from ggufspec.bench.trial import LoadedModel, loaded_models, recorder
from ggufspec.cache import cache_folder
from ggufspec.chat.conversation import Conversation, fit
from ggufspec.chat.prompt import Prompter
from ggufspec.decoding.decoder import SpeculativeDecoder, Statistics
from ggufspec.decoding.options import AnswerOptions, DecoderOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Spec:
    """What to load."""

    target: Path  # path of the target's GGUF file; its chat template is used
    draft: Path | None  # path of the draft's, or None
    options: DecoderOptions  # ``draft_max`` is the most that a request can ask for
    rpc: tuple[str, ...] = ()  # endpoints of RPC workers


@dataclass(frozen=True, slots=True)
class Ready:
    """What was loaded: the models as they were placed, and the decoder's notes.

    Without a template (``has_template``) chat is off.
    """

    target: LoadedModel
    draft: LoadedModel | None
    notes: tuple[str, ...]
    has_template: bool
    ctx_size: int


@dataclass(frozen=True, slots=True)
class Request:
    """A question, and how to answer it."""

    conversation: Conversation  # with an open question
    chat: bool = True  # use the chat template; without, the turns are continued as plain text
    alone: str = ""  # ``target`` or ``draft`` lets one model answer; empty: the pair
    options: DecoderOptions | None = None  # its AnswerOptions; None: as the pair was loaded
    sampling: Sampling = field(default_factory=Sampling)  # temperature, truncation, seed and penalties
    max_tokens: int = 512  # tokens of the answer at most
    cache: bool = True  # keep what the context holds of the conversation
    trace: bool = False  # emit every round


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer, as far as it came."""

    text: str  # all of it
    tokens: tuple[int, ...] = ()  # ids as they were emitted, the end token included, for the conversation's turn
    statistics: Statistics | None = None  # of this answer; None where the child was ended over it
    dropped: int = 0  # oldest turns that did not fit the context and were left out
    notes: tuple[str, ...] = ()  # each once in a session
    stopped: bool = False  # the user ended it

    @property
    def context_used(self) -> int:
        """Tokens of the context that prompt and answer take."""
        return self.statistics.prompt_tokens + self.statistics.tokens if self.statistics else 0


@contextmanager
def opened(spec: Spec, emit: worker.Emit, stopping: threading.Event) -> Iterator[Loaded]:  # noqa: ARG001
    """Load the pair in this process, and free it in the end.

    Raises:
        GgufspecError: what the user can mend.
    """
    for endpoint in spec.rpc:
        devices.add_rpc_worker(endpoint)
    with SpeculativeDecoder(spec.target, spec.draft, spec.options, cache=cache_folder()) as decoder:
        yield Loaded(decoder)


class Loaded:
    """A pair that answers requests; ``ready`` is what was loaded.

    Args:
        decoder: the pair.
    """

    def __init__(self, decoder: SpeculativeDecoder) -> None:
        self._decoder = decoder
        self._options = decoder.options
        if self._options.needs_draft and decoder.draft is None:
            self._options = replace(self._options, drafters=(), lookup_corpus=None)
        self._noted: set[str] = set()
        template, notes, model = None, [*decoder.notes], decoder.target
        if model.chat_template.strip():
            template = ChatTemplate.of(model)
        else:
            without = "it continues the conversation as plain text (chat off)"
            notes.append(f"{model.path.name} has no chat template: {without}")
        self._prompter = Prompter(model, template)
        target, draft = loaded_models(decoder)
        self.ready = Ready(
            target=target,
            draft=draft,
            notes=self._new(notes),
            has_template=template is not None,
            ctx_size=decoder.options.ctx_size,
        )

    def answer(self, request: Request, emit: worker.Emit, stopping: threading.Event) -> Reply:
        """Answer one question, with the events that the module names.

        Raises:
            UsageError: a setting that the pair was not loaded for; a message that does not fit the context.
            ModelError: the chat template fails.
        """
        decoder, options = self._decoder, request.options or self._options
        decoder.configure(**{name: getattr(options, name) for name in AnswerOptions.__annotations__})
        fitted = fit(
            request.conversation,
            lambda part: len(self._prompter.tokens(part, chat=request.chat)),
            self.ready.ctx_size,
            request.max_tokens,
        )
        dropped = len(request.conversation.turns) - len(fitted.turns)
        if dropped:
            emit({"event": "dropped", "turns": dropped})
        prompt, applied = self._prompter.applied(fitted, chat=request.chat)
        emit({"event": "prompt", "tokens": len(prompt)})
        text, tokens = [], []
        for emitted in decoder.generate(
            prompt,
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            stop=applied.stops,
            alone=request.alone,
            cache_prompt=request.cache,
            trace=recorder(decoder, emit) if request.trace else None,
            stopping=stopping.is_set,
        ):
            text.append(emitted.text)
            tokens.append(emitted.token)
            emit({"event": "token", "text": emitted.text, "source": emitted.source})
            if stopping.is_set():
                break
        assert decoder.statistics is not None
        return Reply(
            text="".join(text),
            tokens=tuple(tokens),
            statistics=decoder.statistics,
            dropped=dropped,
            notes=self._new([*self._prompter.notes, *decoder.notes]),
            stopped=stopping.is_set() and not decoder.statistics.stop_reason,
        )

    def _new(self, notes: list[str]) -> tuple[str, ...]:
        """Those that are new in this session."""
        new = tuple(note for note in dict.fromkeys(notes) if note not in self._noted)
        self._noted.update(new)
        return new
