"""A pair that stays loaded for one question after another; the child's side of :class:`ggufspec.child.Session`.

Events of a request, in this order: ``dropped`` {turns} if the conversation is longer than the context; ``prompt``
{tokens}; then per round, if requested, ``round`` {round: a TracedRound}, and per token ``token`` {text, source}, where
``text`` may be empty and ``source`` is a drafter's name, ``target`` or ``bonus``.

:class:`SessionPair` is shared with :mod:`ggufspec.serve.session`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Self

from ggufspec import child
from ggufspec.bench.trial import LoadedModel, loaded_models, recorder
from ggufspec.decoding.decoder import SpeculativeDecoder, Statistics
from ggufspec.decoding.options import AnswerOptions, DecoderOptions, WithOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.speed_watch import SpeedWatch, TargetSpeed
from ggufspec.files.cache import cache_folder
from ggufspec.hardware import host
from ggufspec.hardware.disturbance import SystemCounters
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.chat_template import ChatTemplate
from ggufspec.prompting.conversation import Conversation, fit_context
from ggufspec.prompting.prompt import Prompter


@dataclass(frozen=True, slots=True)
class ChatJob(WithOptions):
    """Pair to load, with its options."""

    target: Path
    draft: Path | None
    options: DecoderOptions  # requests draft at most ``draft_max`` tokens; ``parallel`` conversations stay cached
    rpc: tuple[str, ...] = ()  # endpoints of RPC workers
    chat_template: str = ""  # Jinja template; empty: the target's own
    planned: tuple[float, float] | None = None  # see :class:`~ggufspec.decoding.speed_watch.SpeedWatch`


@dataclass(frozen=True, slots=True)
class ChatReady:
    """Loaded models with their placement, and what the pair can do."""

    target: LoadedModel
    draft: LoadedModel | None
    drafters: tuple[str, ...]  # active drafters; empty if speculation is off
    notes: tuple[str, ...]  # notes for the user on how the pair runs
    ctx_size: int  # tokens of context per conversation
    parallel: int  # number of conversations that stay cached
    chat_template: str  # Jinja template; empty if the model has no template


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Question, and how to answer it."""

    conversation: Conversation  # conversation that ends with an open question
    chat: bool = True  # use the chat template; otherwise continue the turns as plain text
    alone: str = ""  # ``target`` or ``draft``: only that model answers; empty: the pair
    options: DecoderOptions | None = None  # only its AnswerOptions apply; None: as the pair was loaded
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 512  # maximum answer length
    cache: bool = True  # retain the conversation in the context
    trace: bool = False  # emit an event for every round


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Answer, which may be incomplete."""

    text: str
    tokens: tuple[int, ...] = ()  # emitted ids including the end token, for the conversation's turn
    statistics: Statistics | None = None  # None if the child process was ended during the answer
    dropped: int = 0  # number of oldest turns that were left out because they did not fit in the context
    notes: tuple[str, ...] = ()  # new notes; each appears once per session
    target: TargetSpeed | None = None  # None if the answer did not allow measuring the target's speed
    stopped: bool = False  # True if the user ended the answer

    @property
    def context_used(self) -> int:
        """Number of context tokens that the prompt and the answer take."""
        return self.statistics.prompt_tokens + self.statistics.tokens if self.statistics else 0


class SessionPair:
    """Loaded pair that answers requests; ``ready`` describes it."""

    of_template: ClassVar[dict[str, str]] = {}  # further arguments of :meth:`ChatTemplate.of`

    def __init__(self, decoder: SpeculativeDecoder, chat_template: str = "") -> None:
        self._decoder, self._watch = decoder, SpeedWatch()
        source = chat_template or decoder.target.chat_template
        self._source = source if source.strip() else ""
        self._noted: set[str] = set()
        self._prompter = self._new_prompter()
        target, draft = loaded_models(decoder)
        self.ready = ChatReady(
            target=target,
            draft=draft,
            drafters=decoder.drafters,
            notes=self._new_notes(*self._about()),
            ctx_size=decoder.options.ctx_size,
            parallel=decoder.options.parallel,
            chat_template=self._source,
        )

    @classmethod
    @contextmanager
    def opened(cls, spec: ChatJob, emit: child.Emit, stopping: threading.Event) -> Iterator[Self]:  # noqa: ARG003
        """Load the pair in this process, and free it at the end."""
        devices.add_rpc_workers(spec.rpc)
        with SpeculativeDecoder(spec.target, spec.draft, spec.options, cache=cache_folder()) as decoder:
            pair = cls(decoder, spec.chat_template)
            pair._watch.planned = spec.planned
            yield pair

    def idle(self, goes_on: Callable[[], bool]) -> bool:
        """Use a pause between two requests for pending measurements; return whether any are left."""
        return self._decoder.refresh(goes_on)

    def _new_prompter(self) -> Prompter:
        model, template = self._decoder.target, None
        if self._source:
            template = ChatTemplate.of(model, self._source, **self.of_template)
        return Prompter(model, template)

    def _about(self) -> list[str]:
        """Return notes on what was loaded, in addition to the decoder's."""
        return []

    def _new_notes(self, *more: str) -> tuple[str, ...]:
        found = dict.fromkeys([*self._prompter.notes, *self._decoder.notes, *more])
        new = tuple(note for note in found if note not in self._noted)
        self._noted.update(new)
        return new

    def _target_speed(
        self, before: SystemCounters, took: Statistics, seconds: float | None, *, alone: str = ""
    ) -> TargetSpeed | None:
        """Return the target's speed in an answer with the statistics ``took``; None if unknown.

        ``before`` holds the counters at the answer's start; ``seconds`` is the time per token without a draft.
        """
        decoder, after = self._decoder, SystemCounters.now()
        if not seconds:
            return None

        def reason(*, with_gpus: bool = False) -> str:
            return after.since(before, with_gpus=with_gpus).reason(decoder.cpu_threads, host.usable_cpus())

        return self._watch.observe(
            1 / seconds,
            tokens=took.tokens,
            depth=took.prompt_tokens + took.tokens // 2,
            drafts=bool(decoder.drafters) and not alone,
            disturbed=reason(),
            look=lambda: reason(with_gpus=bool(decoder.target.gpu_layers)),
        )


class ChatPair(SessionPair):
    """Loaded pair to chat with."""

    def __init__(self, decoder: SpeculativeDecoder, chat_template: str = "") -> None:
        super().__init__(decoder, chat_template)
        self._options = decoder.options
        if self._options.needs_draft and decoder.draft is None:
            self._options = replace(self._options, drafters=(), lookup_corpus=None)

    def _about(self) -> list[str]:
        without = "it continues the conversation as plain text (chat off)"
        return [] if self._source else [f"{self._decoder.target.path.name} has no chat template: {without}"]

    def answer(self, request: ChatRequest, emit: child.Emit, stopping: threading.Event) -> ChatReply:
        """Answer one question, emitting the events listed in the module's docstring.

        Raises:
            GgufspecError: the pair was not loaded for a setting, a message does not fit, or the template fails.
        """
        decoder, options = self._decoder, request.options or self._options
        decoder.configure(**{name: getattr(options, name) for name in AnswerOptions.__annotations__})
        fitted = fit_context(
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
        before, pieces = SystemCounters.now(), []
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
            pieces.append(emitted)
            emit({"event": "token", "text": emitted.text, "source": emitted.source})
            if stopping.is_set():
                break
        assert decoder.statistics is not None
        return ChatReply(
            text="".join(piece.text for piece in pieces),
            tokens=tuple(piece.token for piece in pieces if piece.token >= 0),
            statistics=decoder.statistics,
            dropped=dropped,
            notes=self._new_notes(),
            target=self._target_speed(before, decoder.statistics, decoder.answer_target_only_s, alone=request.alone),
            stopped=stopping.is_set() and not decoder.statistics.stop_reason,
        )


opened = ChatPair.opened
