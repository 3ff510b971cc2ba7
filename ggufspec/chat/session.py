"""Session of a pair that stays loaded for one question after another: the child of :class:`ggufspec.child.Session`.

Events of a request, in this order: ``dropped`` {turns} if the conversation is longer than the context; ``prompt``
{tokens}; then per round, if requested, ``round`` {round: a TracedRound}, and per token ``token`` {text, source}.
``text`` may be empty, ``source`` is a drafter's name, ``target`` or ``bonus``.

:class:`LoadedPair` is shared with :mod:`ggufspec.serve.session`.
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
from ggufspec.hardware.disturbance import Counters
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.chat_template import ChatTemplate
from ggufspec.prompting.conversation import Conversation, fit
from ggufspec.prompting.prompt import Prompter


@dataclass(frozen=True, slots=True)
class Spec(WithOptions):
    """Pair to load, and how."""

    target: Path
    draft: Path | None
    options: DecoderOptions  # requests draft at most ``draft_max``; ``parallel`` caches are retained
    rpc: tuple[str, ...] = ()  # endpoints of RPC workers
    chat_template: str = ""  # Jinja; empty: the target's own
    planned: tuple[float, float] | None = None  # see :class:`~ggufspec.decoding.speed_watch.SpeedWatch`


@dataclass(frozen=True, slots=True)
class Ready:
    """Loaded models with their placement, and what the pair can do."""

    target: LoadedModel
    draft: LoadedModel | None
    drafters: tuple[str, ...]  # none if speculation is off
    notes: tuple[str, ...]  # for the user, on how it runs
    ctx_size: int  # tokens of context per conversation
    parallel: int  # conversations whose caches are retained
    chat_template: str  # Jinja; empty without a template


@dataclass(frozen=True, slots=True)
class Request:
    """Question, and how to answer it."""

    conversation: Conversation  # ends with an open question
    chat: bool = True  # use the chat template; otherwise continue the turns as plain text
    alone: str = ""  # ``target`` or ``draft``: only that model answers; empty: the pair
    options: DecoderOptions | None = None  # only its AnswerOptions apply; None: as the pair was loaded
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 512  # of the answer
    cache: bool = True  # retain the conversation in the context
    trace: bool = False  # emit every round


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer, which may be incomplete."""

    text: str
    tokens: tuple[int, ...] = ()  # emitted ids with the end token, for the conversation's turn
    statistics: Statistics | None = None  # None if the child process was ended during the answer
    dropped: int = 0  # oldest turns that did not fit the context and were left out
    notes: tuple[str, ...] = ()  # each once per session
    target: TargetSpeed | None = None  # None if the answer did not show its speed
    stopped: bool = False  # True if the user ended it

    @property
    def context_used(self) -> int:
        """Return the tokens of context that prompt and answer take."""
        return self.statistics.prompt_tokens + self.statistics.tokens if self.statistics else 0


class LoadedPair:
    """Loaded pair that answers requests; ``ready`` describes it."""

    of_template: ClassVar[dict[str, str]] = {}  # further arguments of :meth:`ChatTemplate.of`

    def __init__(self, decoder: SpeculativeDecoder, chat_template: str = "") -> None:
        self._decoder, self._watch = decoder, SpeedWatch()
        source = chat_template or decoder.target.chat_template
        self._source = source if source.strip() else ""
        self._noted: set[str] = set()
        self._prompter = self._new_prompter()
        target, draft = loaded_models(decoder)
        self.ready = Ready(
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
    def opened(cls, spec: Spec, emit: child.Emit, stopping: threading.Event) -> Iterator[Self]:  # noqa: ARG003
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

    def _target_speed(self, before: Counters, *, alone: str = "") -> TargetSpeed | None:
        """Return the target's speed in the last answer; ``before`` are the counters at its start."""
        decoder, after = self._decoder, Counters.now()
        took, seconds = decoder.statistics, decoder.answer_target_only_s
        if took is None or not seconds:
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


class Loaded(LoadedPair):
    """Loaded pair to chat with."""

    def __init__(self, decoder: SpeculativeDecoder, chat_template: str = "") -> None:
        super().__init__(decoder, chat_template)
        self._options = decoder.options
        if self._options.needs_draft and decoder.draft is None:
            self._options = replace(self._options, drafters=(), lookup_corpus=None)

    def _about(self) -> list[str]:
        without = "it continues the conversation as plain text (chat off)"
        return [] if self._source else [f"{self._decoder.target.path.name} has no chat template: {without}"]

    def answer(self, request: Request, emit: child.Emit, stopping: threading.Event) -> Reply:
        """Answer one question, with the events in the module's docstring.

        Raises:
            GgufspecError: the pair was not loaded for a setting, a message does not fit, or the template fails.
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
        before, pieces = Counters.now(), []
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
        return Reply(
            text="".join(piece.text for piece in pieces),
            tokens=tuple(piece.token for piece in pieces),
            statistics=decoder.statistics,
            dropped=dropped,
            notes=self._new_notes(),
            target=self._target_speed(before, alone=request.alone),
            stopped=stopping.is_set() and not decoder.statistics.stop_reason,
        )


opened = Loaded.opened
