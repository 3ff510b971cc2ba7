"""Measured answers: a child process (:mod:`ggufspec.child`) loads a pair once and answers prompts, in several ways.

A trial is one load, a warm-up, and an answer to every prompt.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from ggufspec import child
from ggufspec.bench.prompts import at_depth
from ggufspec.decoding.alternate import SEGMENT_TOKENS, Half, Segment
from ggufspec.decoding.decoder import SpeculativeDecoder, Statistics
from ggufspec.decoding.loop import Round
from ggufspec.decoding.options import DecoderOptions, WithOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.trace import Trace, spelled
from ggufspec.errors import GgufspecError, ModelError, UsageError
from ggufspec.files.cache import cache_folder
from ggufspec.hardware import gpus, host
from ggufspec.hardware.disturbance import Counters
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.library import system_info
from ggufspec.llamacpp.model import Model
from ggufspec.prompting.prompt import chat_prompt
from ggufspec.schema.base import Failure
from ggufspec.schema.text import counted

_THINK = "<think>"
WARM_UP_PROMPT, _WARM_UP_AGAIN = 512, 64  # tokens of the first prompt, the first time in a load and later
_WARM_UP_S = 5.0  # after the prompt, of a warm-up that a request asks for so many tokens of


@dataclass(frozen=True, slots=True)
class Spec(WithOptions):
    """What to run. Without a draft it is a target-only run, unless the options say that the lookup drafts.

    ``prompts`` are texts, as :mod:`ggufspec.bench.prompting` makes them, with the ``kinds`` that reports tell apart;
    ``templated`` ones are a chat template's. With ``chat`` they are users' messages, which the child makes prompts of
    by the target's template, with the ``system`` prompt if there is one.
    ``depth`` tokens of text are in the cache before a prompt; reading them is not measured.
    With ``stream`` there is an event ``token`` for each token, with ``trace`` an event ``round`` before its tokens'.
    """

    target: Path
    draft: Path | None
    options: DecoderOptions
    sampling: Sampling
    prompts: tuple[str, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    stream: bool = False
    trace: bool = False
    rpc: tuple[str, ...] = ()
    grammar: str = ""
    depth: int = 0
    kinds: tuple[str, ...] = ()
    templated: bool = False
    chat: bool = False
    system: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one prompt; ``parts`` are its thinking and what comes after, if the model thinks.

    ``segments`` have what other programs used meanwhile: one if the answer was decoded as a whole, with its prompt.
    ``start`` is the first part of it, some ``SEGMENT_TOKENS``, in which drafters read the prompt and the policy learns
    what they are worth; None if it is not known, or does not count.
    """

    text: str
    tokens: tuple[int, ...]
    statistics: Statistics
    parts: tuple[Statistics, ...] = ()
    segments: tuple[Segment, ...] = ()
    start: Statistics | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    description: str
    layers: int
    gpu_layers: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured. ``finished`` is False after a stop.

    ``vram_bytes`` is what all cards' use rose by; without NVML, as far as the backend counts it. ``unwatched`` are the
    cards then.

    ``peak_rss_bytes`` and ``vram_bytes`` are of all that the child had loaded, a draft that did not draft included.
    ``drafters`` are those that drafted, none in a target-only run; ``notes`` are the decoder's. ``energy_j`` is what
    all cards used from the first prompt to the last token, if NVML counts it, and ``others_cpus`` the CPUs that
    other programs kept busy meanwhile. ``system_info`` is llama.cpp's own line about its build. ``target_only`` are
    the target's own answers to the same prompts if the request has both alternate; these figures are of both then.
    """

    answers: tuple[Answer, ...]
    target: LoadedModel
    draft: LoadedModel | None
    load_s: float
    peak_rss_bytes: int
    vram_bytes: int
    finished: bool
    drafters: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    energy_j: float | None = None
    others_cpus: float = 0.0
    unwatched: tuple[str, ...] = ()
    system_info: str = ""
    target_only: tuple[Answer, ...] = ()


def prompt_speed(answers: Iterable[Answer]) -> float:
    """Σ prompt tokens that were decoded ÷ Σ seconds that took; what a cache held is neither."""
    statistics = [answer.statistics for answer in answers]
    return sum(s.prompt_read for s in statistics) / max(sum(s.prompt_s for s in statistics), 1e-9)


def loaded(model: Model) -> LoadedModel:
    gpu_layers = model.gpu_layers if devices.has_gpu() else 0
    return LoadedModel(model.description, model.layers, gpu_layers, model.size_bytes)


def loaded_models(decoder: SpeculativeDecoder) -> tuple[LoadedModel, LoadedModel | None]:
    return loaded(decoder.target), loaded(decoder.draft) if decoder.draft else None


def recorder(decoder: SpeculativeDecoder, emit: child.Emit) -> Trace:
    """A trace of an answer, whose rounds become events ``round``."""
    model, names = decoder.target, cache(decoder.target.vocabulary)
    return Trace(
        lambda token: spelled(model.piece(token) or names()[token]),  # special tokens have no bytes
        lambda round_: emit({"event": "round", "round": asdict(round_)}),
    )


@dataclass(frozen=True, slots=True)
class Ready:
    """A pair that is loaded: how many tokens its prompts have, with the text before them.

    ``alone`` says whether target-only is as fast as in a load of its own: neither states nor hidden rows are kept for
    drafts. ``alternates`` says whether it can be asked for answers that alternate.
    """

    load_s: float
    prompt_tokens: tuple[int, ...]
    alone: bool
    alternates: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """Answers to the prompts of these indices, all of them by default, in one way.

    ``alone`` is as of :meth:`SpeculativeDecoder.generate`; ``max_tokens`` the spec's if it is 0. With ``warm_up``
    it is a short answer to the beginning of the first of them, of which there are no events. ``alternate`` asks for two
    answers in turn, with the drafters and of the target alone, and names the one that begins: ``pair`` or ``target``.
    ``most`` ends an answer after so many tokens, with their round, while the policy drafts as for ``max_tokens``; a
    warm-up is then as long, for some seconds, and to the whole prompt.
    """

    prompts: tuple[int, ...] | None = None
    max_tokens: int = 0
    alone: str = ""
    warm_up: bool = False
    alternate: str = ""
    most: int = 0


Reply = Result


@dataclass(frozen=True, slots=True)
class Engine:
    """What answers prompts, with its models loaded.

    ``answer`` takes a prompt, its tokens and a request; it gives None if a stop came before the prompt was read.
    ``alternate`` does the same for two answers, with the drafters and of the target alone; None if it cannot.
    """

    target: LoadedModel
    draft: LoadedModel | None
    drafters: tuple[str, ...]
    notes: list[str]
    read: Callable[[str], list[int]]
    answer: Callable[[str, list[int], Request], Answer | None]
    alone: bool = True
    alternate: Callable[[str, list[int], Request], tuple[Answer, Answer] | None] | None = None


def check_room(spec: Spec, longest: int) -> None:
    """Whether the context holds the longest prompt, of so many tokens, and the text before it.

    Raises:
        UsageError: it does not, or with text before a prompt not the whole answer too.
    """
    needed = spec.depth + longest + spec.max_tokens
    if spec.options.ctx_size and (needed if spec.depth else longest + 1) > spec.options.ctx_size:
        depth = f"--depth {spec.depth}, " if spec.depth else ""
        raise UsageError(
            f"{depth}a prompt of {counted(longest, 'token')} and answers of {counted(spec.max_tokens, 'token')} need "
            f"{needed:,} tokens of context, and it holds {spec.options.ctx_size:,}",
            f"-c {-(-needed // 256) * 256}",
        )


def _start(all_rounds: Sequence[Round], whole: Statistics) -> Statistics:
    """Return the statistics of an answer's first rounds, as far as an answer that alternates has its first segment."""
    given, rounds = 0, list[Round]()
    for one in all_rounds:
        if given >= SEGMENT_TOKENS:
            break
        rounds.append(one)
        given += len(one.emitted)
    return _of_rounds(rounds, whole)


def _of_rounds(rounds: Sequence[Round], whole: Statistics) -> Statistics:
    more = {"prompt_tokens": 0, "prompt_s": 0.0, "tokens": sum(len(one.emitted) for one in rounds)}
    return Statistics.of(rounds, len(whole.drafted_by_position), **more, stop_reason=whole.stop_reason)


def _parts(target: Model, prompt: str, all_rounds: Sequence[Round], whole: Statistics) -> tuple[Statistics, ...]:
    """Return the statistics of an answer's thinking and of the rest; empty if the model did not think."""
    texts = (
        b"".join(target.piece(token, special=True) for token in one.emitted).decode("utf-8", "replace")
        for one in all_rounds
    )
    count = thinking_rounds(prompt, texts)
    if not count:
        return ()
    return tuple(_of_rounds(rounds, whole) for rounds in (all_rounds[:count], all_rounds[count:]))


def thinking_rounds(prompt: str, rounds: Iterable[str]) -> int:
    """How many of an answer's rounds, by their texts, are thinking: to ``</think>``, all of them if it does not come.

    The prompt may end with the ``<think>`` that the answer then lacks.
    """
    said = _THINK if prompt.rstrip().endswith(_THINK) else ""
    count = 0
    for text in rounds:
        said = (said + text).lstrip()
        count += 1
        if not said.startswith(_THINK[: len(said)]):
            return 0
        if "</think>" in said:
            break
    return count if said.startswith(_THINK) else 0


@contextmanager
def _decoder(spec: Spec, emit: child.Emit, stopping: Callable[[], bool]) -> Iterator[Engine]:
    with SpeculativeDecoder(spec.target, spec.draft, spec.options, cache=cache_folder()) as decoder:

        def answer(text: str, prompt: list[int], request: Request) -> Answer | None:
            texts, tokens = [], []
            ends_at, ends_s = request.most or math.inf, math.inf
            for emitted in decoder.generate(
                prompt,
                alone=request.alone,
                cache_prompt=bool(spec.depth),
                max_tokens=request.max_tokens,
                sampling=spec.sampling,
                stop=() if request.warm_up else spec.stop,
                grammar="" if request.warm_up else spec.grammar,
                trace=recorder(decoder, emit) if spec.trace and not request.warm_up else None,
                stopping=stopping,
            ):
                texts.append(emitted.text)
                if emitted.token >= 0:
                    tokens.append(emitted.token)
                if spec.stream and not request.warm_up:
                    emit({"event": "token", "token": emitted.token, "text": emitted.text, "source": emitted.source})
                if request.warm_up and ends_s == math.inf:
                    ends_s = time.perf_counter() + _WARM_UP_S
                late = len(tokens) >= ends_at or time.perf_counter() > ends_s
                if stopping() or (late and not emitted.drafted):  # at the end of a round
                    break
            assert decoder.statistics is not None
            if stopping() and not decoder.statistics.tokens:
                return None
            parts = _parts(decoder.target, text, decoder.rounds, decoder.statistics)
            start = _start(decoder.rounds, decoder.statistics)
            return Answer("".join(texts), tuple(tokens), decoder.statistics, parts, start=start)

        def alternate(text: str, prompt: list[int], request: Request) -> tuple[Answer, Answer] | None:
            halves = decoder.alternate(
                prompt,
                target_first=request.alternate == "target",
                max_tokens=request.max_tokens,
                sampling=spec.sampling,
                stop=spec.stop,
                grammar=spec.grammar,
                cache_prompt=bool(spec.depth),
                stopping=stopping,
                most=request.most or math.inf,
            )
            ours, theirs = (_half(decoder.target, text, half) for half in halves)
            return (ours, theirs) if ours and theirs else None

        def read(prompt: str) -> list[int]:
            if spec.chat:
                return chat_prompt(decoder.target, prompt, system=spec.system, notes=decoder.notes)
            return at_depth(decoder.target.tokenize, prompt, spec.depth)

        yield Engine(
            *loaded_models(decoder),
            decoder.drafters,
            decoder.notes,
            read,
            answer,
            decoder.target_runs_alone,
            alternate if decoder.can_alternate else None,
        )


def _half(target: Model, prompt: str, half: Half) -> Answer | None:
    """One of two answers in turn; None if it has no token."""
    if half.answer is None or not half.emitted:
        return None
    whole = half.answer.statistics
    return Answer(
        "".join(one.text for one in half.emitted),
        tuple(one.token for one in half.emitted if one.token >= 0),
        whole,
        _parts(target, prompt, half.answer.rounds, whole),
        tuple(half.segments),
        half.segments[0].statistics,
    )


Opened = Callable[[Spec, child.Emit, Callable[[], bool]], AbstractContextManager[Engine]]


@contextmanager
def opened(
    spec: Spec, emit: child.Emit, stopping: threading.Event, engine: Opened = _decoder, warm_up_tokens: int = 4
) -> Iterator[Serving]:
    """Load in this process; an event ``loaded`` says so."""
    devices.add_rpc_workers(spec.rpc)
    vram_before = devices.used_bytes()
    began = time.perf_counter()
    serving = Serving(spec, stopping, vram_before, warm_up_tokens)
    with engine(spec, emit, lambda: serving.stopping.is_set()) as serving.engine:
        serving.load_s = time.perf_counter() - began
        serving.prompts = [serving.engine.read(prompt) for prompt in spec.prompts]
        emit({"event": "loaded", "seconds": serving.load_s})
        yield serving


class Serving:
    """A pair that is loaded in this process, and answers requests; events ``answer`` tell how far it is."""

    engine: Engine
    load_s: float
    prompts: list[list[int]]

    def __init__(self, spec: Spec, stopping: threading.Event, vram_before: int, warm_up_tokens: int) -> None:
        self.stopping = stopping
        self._spec, self._vram_before, self._warm_up_tokens = spec, vram_before, warm_up_tokens
        self._warm = False

    @property
    def ready(self) -> Ready:
        """What there is to say before the first request."""
        engine = self.engine
        return Ready(self.load_s, tuple(map(len, self.prompts)), engine.alone, engine.alternate is not None)

    def answer(self, request: Request, emit: child.Emit, stopping: threading.Event) -> Result:
        self.stopping, engine = stopping, self.engine
        request = replace(request, max_tokens=request.max_tokens or self._spec.max_tokens)
        asked = range(len(self.prompts)) if request.prompts is None else request.prompts
        prompts = [(self._spec.prompts[i], self.prompts[i]) for i in asked]
        if request.warm_up:
            most = self._spec.depth + (_WARM_UP_AGAIN if self._warm and not request.most else WARM_UP_PROMPT)
            prompts, self._warm = [(prompts[0][0], prompts[0][1][:most])], True
            request = replace(request, max_tokens=request.max_tokens if request.most else self._warm_up_tokens)
        answers, target_only = list[Answer](), list[Answer]()
        energy_before, began = gpus.energy_j(), Counters.now()
        for prompt in prompts:
            before = Counters.now()
            if request.alternate and engine.alternate:
                if both := engine.alternate(*prompt, request):
                    answers.append(both[0])
                    target_only.append(both[1])
            elif (answer := engine.answer(*prompt, request)) is not None:
                segment = Segment(answer.statistics, Counters.now().since(before).others_cpus)
                answers.append(replace(answer, segments=(segment,)))
            if answers and not request.warm_up:
                emit({"event": "answer", "index": len(answers) - 1})
            if stopping.is_set():
                break
        energy_after, used = gpus.energy_j(), Counters.now().since(began)
        writes = engine.draft if request.alone == "draft" else engine.target
        assert writes is not None
        return Result(
            answers=tuple(answers),
            target=writes,
            draft=None if request.alone else engine.draft,
            load_s=self.load_s,
            peak_rss_bytes=host.peak_rss_bytes(),
            vram_bytes=max(0, devices.used_bytes() - self._vram_before),
            finished=not stopping.is_set(),
            drafters=() if request.alone else engine.drafters,
            notes=tuple(engine.notes),
            energy_j=None if energy_before is None or energy_after is None else energy_after - energy_before,
            others_cpus=used.others_cpus,
            unwatched=devices.unwatched(),
            system_info=system_info(),
            target_only=tuple(target_only),
        )


class Load:
    """A child process in which a pair is loaded, from the parent's side.

    ``engine`` is the module of the job: this one, or :mod:`ggufspec.bench.hooked`.

    Raises:
        GgufspecError: what the user can mend.
        Interrupted: Ctrl-C.
    """

    def __init__(
        self, spec: Spec, engine: str = __name__, *, on_event: child.Emit | None = None, verbose: bool = False
    ) -> None:
        self._session, self._on_event = child.Session(verbose=verbose), on_event
        self.ready = self._session.open(engine, spec, Ready, on_event=on_event)

    def ask(self, request: Request) -> Result:
        """Answer a request.

        Raises:
            GgufspecError: what the user can mend.
            Interrupted: Ctrl-C; its ``partial`` is the result so far, or None.
        """
        return self._session.ask(request, Result, on_event=self._on_event)

    def stop(self) -> None:
        """Have the request that is being answered end with what it has; any thread may call this."""
        self._session.stop()

    def close(self) -> None:
        self._session.close()


def measure(spec: Spec, *, on_event: child.Emit | None = None, verbose: bool = False) -> Result:
    """Do a trial in a child process of its own.

    Raises:
        GgufspecError: what the user can mend.
        Interrupted: Ctrl-C; its ``partial`` is the result so far, or None.
    """
    with ExitStack() as stack:
        try:
            load = stack.enter_context(closing(Load(spec, on_event=on_event, verbose=verbose)))
            load.ask(Request(warm_up=True))
        except child.Interrupted:  # its result is of the warm-up
            raise child.Interrupted(None) from None
        return load.ask(Request())


class NoSpeedError(ModelError):
    """No answer has a token after its first, which its prompt's batch gives."""


def timed(result: Result) -> Result:
    """The trial, or a NoSpeedError if it has no speed."""
    if not any(answer.statistics.decoded for answer in result.answers):
        raise NoSpeedError("answers of one token have no speed", "-n 64, or a prompt with a longer answer")
    return result


@dataclass(frozen=True, slots=True)
class Attempt:
    """A trial that may have failed: out of memory, an abort of llama.cpp."""

    result: Result | None
    failure: Failure | None = None


def attempt(spec: Spec, *, on_event: child.Emit | None = None, verbose: bool = False) -> Attempt:
    """:func:`measure` of what has a speed, with an error as the outcome.

    Raises:
        Interrupted: Ctrl-C.
    """
    try:
        return Attempt(timed(measure(spec, on_event=on_event, verbose=verbose)))
    except GgufspecError as error:
        return Attempt(None, Failure.of(error))
    except OSError as error:  # no memory for a process, no space for its log
        return Attempt(None, Failure(f"the trial could not be started: {error.strerror}", "free some memory, or disk"))
