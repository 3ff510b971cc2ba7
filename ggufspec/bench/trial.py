"""One measured run: load, warm up, answer every prompt. Runs in a child process (:mod:`ggufspec.worker`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from ggufspec import worker
from ggufspec.bench.prompts import at_depth
from ggufspec.cache import cache_folder
from ggufspec.decoding.decoder import SpeculativeDecoder, Statistics
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.trace import Trace, spelled
from ggufspec.display import counted
from ggufspec.errors import GgufspecError, ModelError, UsageError
from ggufspec.hardware import gpus, host
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.library import system_info
from ggufspec.llamacpp.model import Model
from ggufspec.schema.base import Failure

WARM_UP_PROMPT, _WARM_UP_TOKENS = 512, 4  # tokens of the first prompt, and of an answer to them that is not counted


@dataclass(frozen=True, slots=True)
class Spec:
    """What to run. Without a draft it is a target-only run, unless the options say that the lookup drafts.

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


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one prompt."""

    text: str
    tokens: tuple[int, ...]
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as it was loaded."""

    description: str
    layers: int
    gpu_layers: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured. ``finished`` is False after a stop.

    ``vram_bytes`` is what all cards' use rose by; without NVML, as far as the backend counts it. ``unwatched`` are the
    cards then.

    ``drafters`` are those that drafted, none in a target-only run; ``notes`` are the decoder's. ``energy_j`` is what
    all cards used from the first prompt to the last token, where NVML counts it, and ``others_cpus`` the CPUs that
    other programs kept busy meanwhile. ``system_info`` is llama.cpp's own line about its build.
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


def prompt_speed(answers: Iterable[Answer]) -> float:
    """Σ prompt tokens that were decoded ÷ Σ seconds that took; what a cache held is neither."""
    statistics = [answer.statistics for answer in answers]
    return sum(s.prompt_read for s in statistics) / max(sum(s.prompt_s for s in statistics), 1e-9)


def loaded_models(decoder: SpeculativeDecoder) -> tuple[LoadedModel, LoadedModel | None]:
    """The models of a decoder as they were loaded."""

    def describe(model: Model) -> LoadedModel:
        gpu_layers = model.gpu_layers if devices.has_gpu() else 0
        return LoadedModel(model.description, model.layers, gpu_layers, model.size_bytes)

    return describe(decoder.target), describe(decoder.draft) if decoder.draft else None


def recorder(decoder: SpeculativeDecoder, emit: worker.Emit) -> Trace:
    """A trace of an answer, whose rounds become events ``round``."""
    model, names = decoder.target, cache(decoder.target.vocabulary)
    return Trace(
        lambda token: spelled(model.piece(token) or names()[token]),  # special tokens have no bytes
        lambda round_: emit({"event": "round", "round": asdict(round_)}),
    )


@dataclass(frozen=True, slots=True)
class Engine:
    """What answers prompts, with its models loaded. An answer is None where a stop came before its prompt was read."""

    target: LoadedModel
    draft: LoadedModel | None
    drafters: tuple[str, ...]
    notes: list[str]
    warm_up: Callable[[], object]
    answer: Callable[[str], Answer | None]


def check_depth(spec: Spec, longest: int) -> None:
    """Whether the context holds the text before a prompt, the prompt (``longest`` tokens together) and the answer.

    Raises:
        UsageError: it does not.
    """
    needed = longest + spec.max_tokens
    if needed > spec.options.ctx_size:
        raise UsageError(
            f"--depth {spec.depth} and answers of {counted(spec.max_tokens, 'token')} need {needed:,} tokens of "
            f"context, and it holds {spec.options.ctx_size:,}",
            f"-c {-(-needed // 256) * 256}",
        )


@contextmanager
def _decoder(spec: Spec, emit: worker.Emit, stopping: threading.Event) -> Iterator[Engine]:
    """Our own loop."""
    with SpeculativeDecoder(spec.target, spec.draft, spec.options, cache=cache_folder()) as decoder:

        def read(prompt: str) -> list[int]:
            return at_depth(decoder.target.tokenize, prompt, spec.depth)

        if spec.depth:
            check_depth(spec, max(len(read(prompt)) for prompt in spec.prompts))

        def warm_up() -> None:
            beginning = read(spec.prompts[0])[: spec.depth + WARM_UP_PROMPT]
            for _ in decoder.generate(beginning, max_tokens=_WARM_UP_TOKENS, sampling=spec.sampling):
                pass

        def answer(prompt: str) -> Answer | None:
            text, tokens = [], []
            for emitted in decoder.generate(
                read(prompt) if spec.depth else prompt,
                cache_prompt=bool(spec.depth),
                max_tokens=spec.max_tokens,
                sampling=spec.sampling,
                stop=spec.stop,
                grammar=spec.grammar,
                trace=recorder(decoder, emit) if spec.trace else None,
                stopping=stopping.is_set,
            ):
                text.append(emitted.text)
                if emitted.token >= 0:
                    tokens.append(emitted.token)
                if spec.stream:
                    emit({"event": "token", "token": emitted.token, "text": emitted.text, "source": emitted.source})
                if stopping.is_set():
                    break
            assert decoder.statistics is not None
            if stopping.is_set() and not decoder.statistics.tokens:
                return None
            return Answer("".join(text), tuple(tokens), decoder.statistics)

        yield Engine(*loaded_models(decoder), decoder.drafters, decoder.notes, warm_up, answer)


def run(
    spec: Spec,
    emit: worker.Emit,
    stopping: threading.Event,
    opened: Callable[[Spec, worker.Emit, threading.Event], AbstractContextManager[Engine]] = _decoder,
) -> Result:
    """Do the trial in this process; events ``loaded`` and ``answer`` tell how far it is.

    Args:
        spec: what to run.
        emit: takes the events.
        stopping: set when the trial shall end with what it has.
        opened: loads what answers.
    """
    for endpoint in spec.rpc:
        devices.add_rpc_worker(endpoint)
    vram_before = devices.used_bytes()
    began = time.perf_counter()
    with opened(spec, emit, stopping) as engine:
        load_s = time.perf_counter() - began
        emit({"event": "loaded", "seconds": load_s})
        engine.warm_up()
        answers: list[Answer] = []
        energy_before, cpu_before = gpus.energy_j(), host.cpu_use()
        for prompt in spec.prompts:
            if (answer := engine.answer(prompt)) is not None:
                answers.append(answer)
                emit({"event": "answer", "index": len(answers) - 1})
            if stopping.is_set():
                break
        energy_after, cpu_after = gpus.energy_j(), host.cpu_use()
        return Result(
            answers=tuple(answers),
            target=engine.target,
            draft=engine.draft,
            load_s=load_s,
            peak_rss_bytes=host.peak_rss_bytes(),
            vram_bytes=max(0, devices.used_bytes() - vram_before),
            finished=not stopping.is_set(),
            drafters=engine.drafters,
            notes=tuple(engine.notes),
            energy_j=None if energy_before is None or energy_after is None else energy_after - energy_before,
            others_cpus=cpu_after.others_since(cpu_before),
            unwatched=() if gpus.gpus() else tuple(card.description.strip() for card in devices.local_cards()),
            system_info=system_info(),
        )


def measure(spec: Spec, *, on_event: worker.Emit | None = None, verbose: bool = False) -> Result:
    """Do the trial in a child process.

    Raises:
        GgufspecError: what the user can mend.
        Interrupted: Ctrl-C; its ``partial`` is the result so far, or None.
    """
    return worker.call(__name__, spec, Result, on_event=on_event, verbose=verbose)


class NoSpeedError(ModelError):
    """No answer has a token behind its first, which its prompt's batch gives."""


def timed(result: Result) -> Result:
    """A trial that has a speed.

    Raises:
        NoSpeedError: it has none.
    """
    if not any(answer.statistics.decoded for answer in result.answers):
        raise NoSpeedError("answers of one token have no speed", "-n 64, or a prompt with a longer answer")
    return result


@dataclass(frozen=True, slots=True)
class Attempt:
    """A trial that may have failed: out of memory, an abort of llama.cpp."""

    result: Result | None
    failure: Failure | None = None


def attempt(spec: Spec, *, on_event: worker.Emit | None = None, verbose: bool = False) -> Attempt:
    """:func:`measure` of what has a speed, with an error as the outcome.

    Raises:
        Interrupted: Ctrl-C.
    """
    try:
        return Attempt(timed(measure(spec, on_event=on_event, verbose=verbose)))
    except GgufspecError as error:
        return Attempt(None, Failure(error.message, error.hint))
    except OSError as error:  # no memory for a process, no space for its log
        return Attempt(None, Failure(f"the trial could not be started: {error.strerror}", "free some memory, or disk"))
