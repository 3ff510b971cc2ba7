"""Trials: measured answers to prompts, given by a child process (:mod:`ggufspec.child`) that loads the models once.

- :class:`TrialJob`: the models to load, their options, and the prompts.
- :class:`TrialRequest`: the prompts to answer, with drafts, target-only, or alternating between the two.
- :class:`TrialAnswer`: text, tokens and timings of one answer; :class:`TrialResult`: all answers to a request, with
  memory and energy.
- :class:`Engine`: loaded models and the functions that decode with them, in our own loop or ``Llama``'s.
- :class:`LoadedRun`: the child's side, which answers requests with an engine; :class:`TrialReady`: its report after
  loading.
- :class:`ModelProcess`: the parent's side, which starts the child and sends it requests.
- Trial (:func:`run_trial`): one load, one warm-up, one answer to every prompt; :class:`TrialAttempt`: a trial or its
  failure.
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
from ggufspec.decoding.alternate import SEGMENT_TOKENS, AlternatingAnswer, AnswerSegment
from ggufspec.decoding.decoder import SpeculativeDecoder, Statistics
from ggufspec.decoding.loop import Round
from ggufspec.decoding.options import DecoderOptions, WithOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.trace import Trace, spelled
from ggufspec.errors import GgufspecError, ModelError, UsageError
from ggufspec.files.cache import cache_folder
from ggufspec.hardware import gpus, host
from ggufspec.hardware.disturbance import SystemCounters
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
class TrialJob(WithOptions):
    """Models, options and prompts of a run; target-only if there is neither a draft model nor n-gram lookup.

    ``prompts`` are texts made by :mod:`ggufspec.bench.prompting`, with a chat template if ``templated``; reports group
    them by their ``kinds``. With ``chat`` they are user messages, to which the child applies the target's template,
    with the ``system`` prompt if given. ``prediction`` is the expected answer. ``depth`` tokens of text are cached
    before each prompt, without being measured. ``stream`` emits a ``token`` event for each token; ``trace`` emits a
    ``round`` event before each round's tokens.
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
    prediction: str = ""
    depth: int = 0
    kinds: tuple[str, ...] = ()
    templated: bool = False
    chat: bool = False
    system: str = ""


@dataclass(frozen=True, slots=True)
class TrialAnswer:
    """Answer to one prompt; if the model thinks, ``parts`` are the statistics of its thinking and of the rest.

    ``segments`` also record other programs' CPU use; an answer that does not alternate with another is a single segment
    that includes the prompt. ``start`` covers about the first ``SEGMENT_TOKENS`` tokens, during which drafters process
    the prompt and the policy learns how much drafts gain; None if unknown or not counted.
    """

    text: str
    tokens: tuple[int, ...]
    statistics: Statistics
    parts: tuple[Statistics, ...] = ()
    segments: tuple[AnswerSegment, ...] = ()
    start: Statistics | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    description: str
    layers: int
    gpu_layers: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Measurements of one request; ``finished`` is False if it was stopped.

    ``peak_rss_bytes`` and ``vram_bytes`` (the rise over all GPUs) include everything loaded, even an idle draft.
    Without NVML, the backend counts VRAM; ``unwatched`` are the GPUs that NVML does not report. ``drafters`` are the
    active drafters, ``notes`` the decoder's notes. ``energy_j`` is the energy used by all GPUs from the first prompt to
    the last token, if NVML measures it; ``others_cpus`` is the number of CPUs that other programs used meanwhile.
    ``system_info`` is llama.cpp's line about its build. ``target_only`` are the target-only answers if the answers
    alternate; energy and CPUs then cover both kinds of answers.
    """

    answers: tuple[TrialAnswer, ...]
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
    target_only: tuple[TrialAnswer, ...] = ()


def prompt_speed(answers: Iterable[TrialAnswer]) -> float:
    """Return the prompt tokens decoded per second over all answers; cached tokens do not count."""
    statistics = [answer.statistics for answer in answers]
    return sum(s.prompt_read for s in statistics) / max(sum(s.prompt_s for s in statistics), 1e-9)


def loaded_model(model: Model) -> LoadedModel:
    gpu_layers = model.gpu_layers if devices.has_gpu() else 0
    return LoadedModel(model.description, model.layers, gpu_layers, model.size_bytes)


def loaded_models(decoder: SpeculativeDecoder) -> tuple[LoadedModel, LoadedModel | None]:
    return loaded_model(decoder.target), loaded_model(decoder.draft) if decoder.draft else None


def recorder(decoder: SpeculativeDecoder, emit: child.Emit) -> Trace:
    """Return a trace that emits a ``round`` event for each round of an answer."""
    model, names = decoder.target, cache(decoder.target.vocabulary)
    return Trace(
        lambda token: spelled(model.piece(token) or names()[token]),  # special tokens have no bytes
        lambda round_: emit({"event": "round", "round": asdict(round_)}),
    )


@dataclass(frozen=True, slots=True)
class TrialReady:
    """Report of a loaded pair; ``prompt_tokens`` are the prompts' lengths, including the text before each.

    ``alone`` is True if target-only answers are as fast as in a load without a draft, because no recurrent or hidden
    states are saved for drafts; ``alternates`` is True if requests may set ``alternate``.
    """

    load_s: float
    prompt_tokens: tuple[int, ...]
    alone: bool
    alternates: bool = False


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """Request for answers to the prompts with these indices; None for all.

    ``alone`` is passed to :meth:`SpeculativeDecoder.generate`; a ``max_tokens`` of 0 means the spec's. ``warm_up``
    requests a short answer to the beginning of the first prompt, without events. ``alternate`` requests alternating
    speculative and target-only answers, and says which begins: ``pair`` or ``target``. An answer or warm-up ends with
    the round that reaches ``most`` tokens, but is drafted as if it could reach ``max_tokens``; warm-ups also have a
    time limit.
    """

    prompts: tuple[int, ...] | None = None
    max_tokens: int = 0
    alone: str = ""
    warm_up: bool = False
    alternate: str = ""
    most: int = 0


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
    answer: Callable[[str, list[int], TrialRequest], TrialAnswer | None]
    alone: bool = True
    alternate: Callable[[str, list[int], TrialRequest], tuple[TrialAnswer, TrialAnswer] | None] | None = None


def key_text(spec: TrialJob | None) -> str:
    """Return a run as text for the keys of saved results, where its class still has the old name ``Spec``."""
    return repr(spec).replace("TrialJob(", "Spec(", 1)


def check_context(spec: TrialJob, longest: int) -> None:
    """Raise UsageError if ``longest`` prompt tokens, plus depth and answer if a depth is set, exceed the context."""
    needed = spec.depth + longest + spec.max_tokens
    if spec.options.ctx_size and (needed if spec.depth else longest + 1) > spec.options.ctx_size:
        depth = f"--depth {spec.depth}, " if spec.depth else ""
        raise UsageError(
            f"{depth}a prompt of {counted(longest, 'token')} and answers of {counted(spec.max_tokens, 'token')} need "
            f"{needed:,} tokens of context, but it holds {spec.options.ctx_size:,}",
            f"-c {-(-needed // 256) * 256}",
        )


def _start(all_rounds: Sequence[Round], whole: Statistics) -> Statistics:
    """Return the statistics of an answer's first rounds, up to the length of an alternating answer's first segment."""
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
    """Return how many of an answer's rounds are thinking: those up to ``</think>``, or all if that tag is missing.

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
def _decoder(spec: TrialJob, emit: child.Emit, stopping: Callable[[], bool]) -> Iterator[Engine]:
    with SpeculativeDecoder(spec.target, spec.draft, spec.options, cache=cache_folder()) as decoder:

        def answer(text: str, prompt: list[int], request: TrialRequest) -> TrialAnswer | None:
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
                prediction="" if request.warm_up else spec.prediction,
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
            return TrialAnswer("".join(texts), tuple(tokens), decoder.statistics, parts, start=start)

        def alternate(text: str, prompt: list[int], request: TrialRequest) -> tuple[TrialAnswer, TrialAnswer] | None:
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


def _half(target: Model, prompt: str, half: AlternatingAnswer) -> TrialAnswer | None:
    """Return one of two alternating answers; None if it has no token."""
    if half.answer is None or not half.emitted:
        return None
    whole = half.answer.statistics
    return TrialAnswer(
        "".join(one.text for one in half.emitted),
        tuple(one.token for one in half.emitted if one.token >= 0),
        whole,
        _parts(target, prompt, half.answer.rounds, whole),
        tuple(half.segments),
        half.segments[0].statistics,
    )


Opened = Callable[[TrialJob, child.Emit, Callable[[], bool]], AbstractContextManager[Engine]]


@contextmanager
def opened(
    spec: TrialJob, emit: child.Emit, stopping: threading.Event, engine: Opened = _decoder, warm_up_tokens: int = 4
) -> Iterator[LoadedRun]:
    """Load the models in this process, then emit a ``loaded`` event."""
    devices.add_rpc_workers(spec.rpc)
    vram_before = devices.used_bytes()
    began = time.perf_counter()
    serving = LoadedRun(spec, stopping, vram_before, warm_up_tokens)
    with engine(spec, emit, lambda: serving.stopping.is_set()) as serving.engine:
        serving.load_s = time.perf_counter() - began
        serving.prompts = [serving.engine.read(prompt) for prompt in spec.prompts]
        emit({"event": "loaded", "seconds": serving.load_s})
        yield serving


class LoadedRun:
    """Pair loaded in this process; it answers requests and emits an ``answer`` event after each answer."""

    engine: Engine
    load_s: float
    prompts: list[list[int]]

    def __init__(self, spec: TrialJob, stopping: threading.Event, vram_before: int, warm_up_tokens: int) -> None:
        self.stopping = stopping
        self._spec, self._vram_before, self._warm_up_tokens = spec, vram_before, warm_up_tokens
        self._warm = False

    @property
    def ready(self) -> TrialReady:
        """Report that the parent receives before the first request."""
        engine = self.engine
        return TrialReady(self.load_s, tuple(map(len, self.prompts)), engine.alone, engine.alternate is not None)

    def answer(self, request: TrialRequest, emit: child.Emit, stopping: threading.Event) -> TrialResult:
        self.stopping, engine = stopping, self.engine
        request = replace(request, max_tokens=request.max_tokens or self._spec.max_tokens)
        asked = range(len(self.prompts)) if request.prompts is None else request.prompts
        prompts = [(self._spec.prompts[i], self.prompts[i]) for i in asked]
        if request.warm_up:
            most = self._spec.depth + (_WARM_UP_AGAIN if self._warm and not request.most else WARM_UP_PROMPT)
            prompts, self._warm = [(prompts[0][0], prompts[0][1][:most])], True
            request = replace(request, max_tokens=request.max_tokens if request.most else self._warm_up_tokens)
        answers, target_only = list[TrialAnswer](), list[TrialAnswer]()
        energy_before, began = gpus.energy_j(), SystemCounters.now()
        for prompt in prompts:
            before = SystemCounters.now()
            if request.alternate and engine.alternate:
                if both := engine.alternate(*prompt, request):
                    answers.append(both[0])
                    target_only.append(both[1])
            elif (answer := engine.answer(*prompt, request)) is not None:
                segment = AnswerSegment(answer.statistics, SystemCounters.now().since(before).others_cpus)
                answers.append(replace(answer, segments=(segment,)))
            if answers and not request.warm_up:
                emit({"event": "answer", "index": len(answers) - 1})
            if stopping.is_set():
                break
        energy_after, used = gpus.energy_j(), SystemCounters.now().since(began)
        writes = engine.draft if request.alone == "draft" else engine.target
        assert writes is not None
        return TrialResult(
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


class ModelProcess:
    """Parent's handle of a child process with a loaded pair; ``engine`` is this module or :mod:`ggufspec.bench.hooked`.

    Raises:
        GgufspecError: loading failed for a reason that the user can fix.
        Interrupted: Ctrl-C.
    """

    def __init__(
        self, spec: TrialJob, engine: str = __name__, *, on_event: child.Emit | None = None, verbose: bool = False
    ) -> None:
        self._session, self._on_event = child.Session(verbose=verbose), on_event
        self.ready = self._session.open(engine, spec, TrialReady, on_event=on_event)

    def ask(self, request: TrialRequest) -> TrialResult:
        """Send a request and return its result.

        Raises:
            GgufspecError: the request failed for a reason that the user can fix.
            Interrupted: Ctrl-C; its ``partial`` is the result so far, or None.
        """
        return self._session.ask(request, TrialResult, on_event=self._on_event)

    def stop(self) -> None:
        """End the current request with the results so far; any thread may call this."""
        self._session.stop()

    def close(self) -> None:
        self._session.close()


def run_trial(spec: TrialJob, *, on_event: child.Emit | None = None, verbose: bool = False) -> TrialResult:
    """Run a trial in its own child process.

    Raises:
        GgufspecError: the trial failed for a reason that the user can fix.
        Interrupted: Ctrl-C; its ``partial`` is the result so far, or None.
    """
    with ExitStack() as stack:
        try:
            load = stack.enter_context(closing(ModelProcess(spec, on_event=on_event, verbose=verbose)))
            load.ask(TrialRequest(warm_up=True))
        except child.Interrupted:  # the partial result would be the warm-up's
            raise child.Interrupted(None) from None
        return load.ask(TrialRequest())


class NoSpeedError(ModelError):
    """No answer has more than its first token, which comes from the prompt's batch."""


def timed(result: TrialResult) -> TrialResult:
    """Return the result; raise NoSpeedError if it has no tokens to compute a speed from."""
    if not any(answer.statistics.decoded for answer in result.answers):
        raise NoSpeedError("one-token answers have no measurable speed", "-n 64, or a prompt with a longer answer")
    return result


@dataclass(frozen=True, slots=True)
class TrialAttempt:
    """Result of a trial, or why it failed, e.g. for lack of memory or because llama.cpp aborted."""

    result: TrialResult | None
    failure: Failure | None = None


def attempt(spec: TrialJob, *, on_event: child.Emit | None = None, verbose: bool = False) -> TrialAttempt:
    """Run :func:`run_trial` and return its result or error; a missing speed is an error. Raises only Interrupted."""
    try:
        return TrialAttempt(timed(run_trial(spec, on_event=on_event, verbose=verbose)))
    except GgufspecError as error:
        return TrialAttempt(None, Failure.of(error))
    except OSError as error:  # not enough memory for the process or disk space for its log
        return TrialAttempt(
            None, Failure(f"the trial could not be started: {error.strerror}", "free some memory or disk space")
        )
