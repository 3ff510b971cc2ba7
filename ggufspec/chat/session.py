"""A pair that stays loaded and answers one question after another; the child's side of :class:`ggufspec.child.Session`.

Events of a request, in this order: ``dropped`` {turns} if the conversation is longer than the context; ``prompt``
{tokens}; then for every round, if the request wants them, ``round`` {round: a TracedRound}, and for every token
``token`` {text, source}. ``text`` may be empty, ``source`` is a drafter's name, ``target`` or ``bonus``.

:class:`LoadedPair` is what this job and that of :mod:`ggufspec.serve.session` have in common.
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
    """What to load."""

    target: Path
    draft: Path | None
    options: DecoderOptions  # ``draft_max`` is the most that a request can ask for; ``parallel`` caches are kept
    rpc: tuple[str, ...] = ()  # endpoints of RPC workers
    chat_template: str = ""  # Jinja; empty: the target's own
    planned: tuple[float, float] | None = None  # as of :class:`~ggufspec.decoding.speed_watch.SpeedWatch`


@dataclass(frozen=True, slots=True)
class Ready:
    """What was loaded: the models as they were placed."""

    target: LoadedModel
    draft: LoadedModel | None
    drafters: tuple[str, ...]  # none if speculation is off
    notes: tuple[str, ...]  # what a user should know of how it runs
    ctx_size: int  # tokens of context of each conversation
    parallel: int  # conversations that are kept
    chat_template: str  # Jinja; empty if there is none


@dataclass(frozen=True, slots=True)
class Request:
    """A question, and how to answer it."""

    conversation: Conversation  # with an open question
    chat: bool = True  # use the chat template; without, the turns are continued as plain text
    alone: str = ""  # ``target`` or ``draft`` lets one model answer; empty: the pair
    options: DecoderOptions | None = None  # its AnswerOptions; None: as the pair was loaded
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 512  # of the answer
    cache: bool = True  # keep what the context holds of the conversation
    trace: bool = False  # emit every round


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer, as far as it came."""

    text: str  # all of it
    tokens: tuple[int, ...] = ()  # ids as they were emitted, the end token included, for the conversation's turn
    statistics: Statistics | None = None  # of this answer; None if the child was ended over it
    dropped: int = 0  # oldest turns that did not fit the context and were left out
    notes: tuple[str, ...] = ()  # each once in a session
    target: TargetSpeed | None = None  # None if the answer did not show it
    stopped: bool = False  # the user ended it

    @property
    def context_used(self) -> int:
        """Tokens of the context that prompt and answer take."""
        return self.statistics.prompt_tokens + self.statistics.tokens if self.statistics else 0


class LoadedPair:
    """A pair that answers requests; ``ready`` is what was loaded."""

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
        """Load the pair in this process, and free it in the end."""
        devices.add_rpc_workers(spec.rpc)
        with SpeculativeDecoder(spec.target, spec.draft, spec.options, cache=cache_folder()) as decoder:
            pair = cls(decoder, spec.chat_template)
            pair._watch.planned = spec.planned
            yield pair

    def idle(self, goes_on: Callable[[], bool]) -> bool:
        """Between two requests: whether there is anything left to do in such a pause."""
        return self._decoder.refresh(goes_on)

    def _new_prompter(self) -> Prompter:
        model, template = self._decoder.target, None
        if self._source:
            template = ChatTemplate.of(model, self._source, **self.of_template)
        return Prompter(model, template)

    def _about(self) -> list[str]:
        """Notes on what was loaded, besides the decoder's."""
        return []

    def _new_notes(self, *more: str) -> tuple[str, ...]:
        found = dict.fromkeys([*self._prompter.notes, *self._decoder.notes, *more])
        new = tuple(note for note in found if note not in self._noted)
        self._noted.update(new)
        return new

    def _target_speed(self, before: Counters, *, alone: str = "") -> TargetSpeed | None:
        """How fast the target was in the answer that has ended; ``before`` are the counters at its beginning."""
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
    """A pair to chat with."""

    def __init__(self, decoder: SpeculativeDecoder, chat_template: str = "") -> None:
        super().__init__(decoder, chat_template)
        self._options = decoder.options
        if self._options.needs_draft and decoder.draft is None:
            self._options = replace(self._options, drafters=(), lookup_corpus=None)

    def _about(self) -> list[str]:
        without = "it continues the conversation as plain text (chat off)"
        return [] if self._source else [f"{self._decoder.target.path.name} has no chat template: {without}"]

    def answer(self, request: Request, emit: child.Emit, stopping: threading.Event) -> Reply:
        """Answer one question, with the events that the module names.

        Raises:
            GgufspecError: a setting that the pair was not loaded for; a message does not fit; the template fails.
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
