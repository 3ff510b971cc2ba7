"""Trials: measured answers to prompts from a child process (:mod:`ggufspec.child`) that loads the models once.

- :class:`Spec`: the models to load, their options, and the prompts.
- :class:`Request`: which prompts to answer, with drafts, target-only, or both in turn.
- :class:`Answer`: one prompt's text, tokens and timings; :class:`Result`: all answers to a request, memory and energy.
- :class:`Engine`: loaded models and the functions that decode with them, in our own loop or ``Llama``'s.
- :class:`Serving`: the child's side, which answers requests with an engine; :class:`Ready`: its report after loading.
- :class:`Load`: the parent's side, which starts the child and sends it requests.
- Trial (:func:`measure`): one load, one warm-up, one answer to every prompt; :class:`Attempt`: a trial or its failure.
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
WARM_UP_PROMPT, _WARM_UP_AGAIN = 512, 64  # prompt tokens of a load's first warm-up, and of later ones
_WARM_UP_S = 5.0  # maximum decoding time of a warm-up, after its prompt


@dataclass(frozen=True, slots=True)
class Spec(WithOptions):
    """Models, options and prompts of a run; target-only if there is neither a draft model nor n-gram lookup.

    ``prompts`` are texts made by :mod:`ggufspec.bench.prompting`; reports group them by their ``kinds``. ``templated``:
    a chat template made them. With ``chat`` they are user messages, to which the child applies the target's template,
    with the ``system`` prompt if given. ``depth`` tokens of text are cached before each prompt, unmeasured. ``stream``
    emits an event ``token`` per token, ``trace`` an event ``round`` before the tokens of each round.
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
    """Answer to one prompt; ``parts`` are the statistics of its thinking and of the rest, if the model thinks.

    ``segments`` also have the CPU use of other programs. An answer decoded as a whole is one segment, prompt included.
    ``start`` covers the first ``SEGMENT_TOKENS`` or so, in which drafters read the prompt and the policy learns what
    they gain; None if unknown or not counted.
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
    """Measurements of one request; ``finished`` is False if it was stopped.

    ``peak_rss_bytes`` and ``vram_bytes`` (the rise in use of all GPUs) include everything loaded, even an idle draft.
    Without NVML, the backend counts VRAM; ``unwatched`` are the GPUs that NVML does not have. ``drafters`` are
    the active ones, ``notes`` the decoder's. ``energy_j`` is the energy of all GPUs from the first prompt to the last
    token, if NVML counts it; ``others_cpus`` are the CPUs that other programs kept busy meanwhile. ``system_info`` is
    llama.cpp's line about its build. ``target_only`` are the target-only answers of a request whose answers alternate;
    energy and CPUs then include both.
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
    """Return decoded prompt tokens per second over all answers; cached tokens do not count."""
    statistics = [answer.statistics for answer in answers]
    return sum(s.prompt_read for s in statistics) / max(sum(s.prompt_s for s in statistics), 1e-9)


def loaded(model: Model) -> LoadedModel:
    gpu_layers = model.gpu_layers if devices.has_gpu() else 0
    return LoadedModel(model.description, model.layers, gpu_layers, model.size_bytes)


def loaded_models(decoder: SpeculativeDecoder) -> tuple[LoadedModel, LoadedModel | None]:
    return loaded(decoder.target), loaded(decoder.draft) if decoder.draft else None


def recorder(decoder: SpeculativeDecoder, emit: child.Emit) -> Trace:
    """Return a trace that emits an event ``round`` for each round of an answer."""
    model, names = decoder.target, cache(decoder.target.vocabulary)
    return Trace(
        lambda token: spelled(model.piece(token) or names()[token]),  # special tokens have no bytes
        lambda round_: emit({"event": "round", "round": asdict(round_)}),
    )


@dataclass(frozen=True, slots=True)
class Ready:
    """Report of a loaded pair; ``prompt_tokens`` include the text before each prompt.

    ``alone``: target-only answers are as fast as in a load without a draft, as no states or hidden rows are saved for
    drafts. ``alternates``: requests may ``alternate``.
    """

    load_s: float
    prompt_tokens: tuple[int, ...]
    alone: bool
    alternates: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """Request for answers to the prompts with these indices; None for all.

    ``alone`` is that of :meth:`SpeculativeDecoder.generate`; a ``max_tokens`` of 0 means the spec's. ``warm_up``
    requests a short answer to the beginning of the first prompt, without events. ``alternate`` requests a speculative
    and a target-only answer in turn, and names which begins: ``pair`` or ``target``. ``most`` ends an answer with the
    round that reaches so many tokens, while the policy drafts as for ``max_tokens``; a warm-up then has this length
    too, but ends after a few seconds.
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
    """Loaded models and the functions that answer prompts with them.

    ``answer`` takes a prompt, its tokens and a request; it returns None if stopped before the first token.
    ``alternate`` returns a speculative and a target-only answer; it is None if the engine cannot alternate.
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
    """Raise UsageError if ``longest`` prompt tokens exceed the context; with ``depth``, if they do with the answer."""
    needed = spec.depth + longest + spec.max_tokens
    if spec.options.ctx_size and (needed if spec.depth else longest + 1) > spec.options.ctx_size:
        depth = f"--depth {spec.depth}, " if spec.depth else ""
        raise UsageError(
            f"{depth}a prompt of {counted(longest, 'token')} and answers of {counted(spec.max_tokens, 'token')} need "
            f"{needed:,} tokens of context, and it holds {spec.options.ctx_size:,}",
            f"-c {-(-needed // 256) * 256}",
        )


def _start(all_rounds: Sequence[Round], whole: Statistics) -> Statistics:
    """Return the statistics of an answer's first rounds: as many as the first segment of an alternating answer has."""
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
    """Return how many of an answer's rounds are thinking: those up to ``</think>``, or all if it never comes.

    ``rounds`` are the rounds' texts. The opening ``<think>`` may be at the end of the prompt instead.
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
                if stopping() or (late and not emitted.drafted):  # a round ends with a token that was not drafted
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
    """Return one of two alternating answers; None if it has no token."""
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
    """Load the models in this process, then emit an event ``loaded``."""
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
    """Pair loaded in this process that answers requests, with an event ``answer`` after each answer."""

    engine: Engine
    load_s: float
    prompts: list[list[int]]

    def __init__(self, spec: Spec, stopping: threading.Event, vram_before: int, warm_up_tokens: int) -> None:
        self.stopping = stopping
        self._spec, self._vram_before, self._warm_up_tokens = spec, vram_before, warm_up_tokens
        self._warm = False

    @property
    def ready(self) -> Ready:
        """Report to the parent before the first request."""
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
    """Parent's handle of a child process with a loaded pair; ``engine`` is this module or :mod:`ggufspec.bench.hooked`.

    Raises:
        GgufspecError: the user can fix the cause.
        Interrupted: Ctrl-C.
    """

    def __init__(
        self, spec: Spec, engine: str = __name__, *, on_event: child.Emit | None = None, verbose: bool = False
    ) -> None:
        self._session, self._on_event = child.Session(verbose=verbose), on_event
        self.ready = self._session.open(engine, spec, Ready, on_event=on_event)

    def ask(self, request: Request) -> Result:
        """Send a request and return its result.

        Raises:
            GgufspecError: the user can fix the cause.
            Interrupted: Ctrl-C; its ``partial`` is the result so far, or None.
        """
        return self._session.ask(request, Result, on_event=self._on_event)

    def stop(self) -> None:
        """End the current request with the results so far; any thread may call this."""
        self._session.stop()

    def close(self) -> None:
        self._session.close()


def measure(spec: Spec, *, on_event: child.Emit | None = None, verbose: bool = False) -> Result:
    """Run a trial in its own child process.

    Raises:
        GgufspecError: the user can fix the cause.
        Interrupted: Ctrl-C; its ``partial`` is the result so far, or None.
    """
    with ExitStack() as stack:
        try:
            load = stack.enter_context(closing(Load(spec, on_event=on_event, verbose=verbose)))
            load.ask(Request(warm_up=True))
        except child.Interrupted:  # its partial result would be the warm-up's
            raise child.Interrupted(None) from None
        return load.ask(Request())


class NoSpeedError(ModelError):
    """No answer has more than its first token, which comes from the prompt's batch."""


def timed(result: Result) -> Result:
    """Return the result; raise NoSpeedError if it has no tokens to compute a speed from."""
    if not any(answer.statistics.decoded for answer in result.answers):
        raise NoSpeedError("answers of one token have no speed", "-n 64, or a prompt with a longer answer")
    return result


@dataclass(frozen=True, slots=True)
class Attempt:
    """Result of a trial, or why it failed, e.g. out of memory or an abort of llama.cpp."""

    result: Result | None
    failure: Failure | None = None


def attempt(spec: Spec, *, on_event: child.Emit | None = None, verbose: bool = False) -> Attempt:
    """Run :func:`measure` and return its result or error; no speed is an error, too. Raises only Interrupted."""
    try:
        return Attempt(timed(measure(spec, on_event=on_event, verbose=verbose)))
    except GgufspecError as error:
        return Attempt(None, Failure.of(error))
    except OSError as error:  # no memory for a process, no space for its log
        return Attempt(None, Failure(f"the trial could not be started: {error.strerror}", "free some memory, or disk"))
