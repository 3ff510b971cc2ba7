"""A pair that stays loaded and answers HTTP requests, several at once; the child's side of
:class:`ggufspec.child.Session`.

The parent's side is :mod:`ggufspec.serve.engine`. Events of a request, in this order:

- ``prompt`` {tokens}: number of prompt tokens;
- ``progress`` {total, cache, processed, time_ms}, if requested: prompt progress, in tokens;
- ``round`` {deltas, tokens, sources, logprobs, took}: additions of one round to the answer. Each delta is a
  :class:`~ggufspec.llamacpp.chat_library.MessageDelta`; each emitted token has an id, a source (a drafter's name,
  ``target`` or ``bonus``) and, if requested, {text, bytes, logprob, top}: its natural log-probability under the
  target's own distribution, before temperature, and those of the most likely tokens. ``took``, if requested, holds
  the answer's timings so far. The last round has no tokens, only text that was held back.

A request that cannot be answered raises UsageError. If the prompt does not fit in the context, an event ``refused``
{code, type, n_prompt_tokens, n_ctx} comes first.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from typing import Any, ClassVar, Self

from ggufspec import child
from ggufspec.chat.session import ChatJob, ChatReady, SessionPair
from ggufspec.decoding.answer import AnswerRequest
from ggufspec.decoding.decoder import Emitted, SpeculativeDecoder, Statistics
from ggufspec.decoding.group import AnswerGroup, RunningAnswer
from ggufspec.decoding.loop import Round
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.speed_watch import TargetSpeed
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.hardware.disturbance import SystemCounters
from ggufspec.llamacpp import chat_library
from ggufspec.llamacpp.chat_library import AppliedTemplate, MessageDelta
from ggufspec.llamacpp.chat_template import TemplateOptions
from ggufspec.prompting.workarounds import TokenizedMessage
from ggufspec.serve.reading import AnswerReading
from ggufspec.serve.sequences import SequenceChoice, choose_sequence

__all__ = ["ANOTHER_TEMPLATE", "ChatJob", "ChatReady", "ServePair", "ServeReply", "ServeRequest", "opened"]

ANOTHER_TEMPLATE = "start the server with another one: --chat-template FILE"
_MOST_ANSWERS = 256  # number of answers whose tokens are stored, so that a conversation's next prompt matches the cache


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """One request: the ``messages`` of a chat, or a ``prompt`` to continue, with their options."""

    messages: tuple[dict[str, Any], ...] = ()  # as the chat template expects them: role, content, tool_calls, …
    wishes: TemplateOptions = field(default_factory=TemplateOptions)  # tools, JSON schema and template variables
    prompt: str | tuple[int, ...] = ""  # prompt of a completion
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 0  # maximum answer length; 0: as many as the context holds
    stop: tuple[str, ...] = ()
    grammar: str = ""  # GBNF grammar of the answer; if set, the whole answer is content
    bias: dict[int, float] = field(default_factory=dict)  # logit offsets by token id
    echo: bool = False  # the answer begins with the prompt
    ends: bool = True  # the model may end the answer
    cache: bool = True  # reuse cached prompt tokens, and retain the prompt in the cache
    progress: bool = False  # report prompt progress
    timings: bool = False  # report timings after each round
    logprobs: int | None = None  # number of most likely tokens to list with each token; None: no log-probabilities
    prediction: str = ""  # text that most of the answer is expected to repeat


@dataclass(frozen=True, slots=True)
class ServeReply:
    """Results at the end of an answer."""

    statistics: Statistics  # ``stop_reason``: end, stop, length, context, grammar, or empty if it was cancelled
    cached: int  # prompt tokens that were in the cache
    sequence: int  # index of the answer's conversation
    target_only_s: float | None  # expected target-only seconds for the tokens that took ``decode_s``; None if unknown
    speculation: bool  # True if drafting was on at the end; it pauses while it does not pay off
    accepted_by_drafter: dict[str, tuple[int, int]] = field(default_factory=dict)  # (drafted, accepted) by drafter
    batches: int = 0  # target batches since the last reply; with several answers at once, fewer than their rounds
    notes: tuple[str, ...] = ()  # notes for the user; each appears once per session, except for speed changes
    target: TargetSpeed | None = None  # the target's speed; None if the answer did not allow measuring it


class ServePair(SessionPair):
    of_template: ClassVar[dict[str, str]] = {"hint": ANOTHER_TEMPLATE}

    def __init__(self, decoder: SpeculativeDecoder, chat_template: str = "") -> None:
        super().__init__(decoder, chat_template)
        self._answers: OrderedDict[str, tuple[int, ...]] = OrderedDict()  # answers' tokens by text
        self._used = [0] * decoder.options.parallel  # number of the request that last used each conversation
        self._requests = 0
        self._day = date.today()
        self._answering: dict[RunningAnswer, _Answering] = {}
        self._group: AnswerGroup
        self._group_open = ExitStack()  # closes the answer group

    def _about(self) -> list[str]:
        lacking = chat_library.why_chat_library_is_missing() if self._source else None
        return [f"{lacking.message}: {lacking.hint}"] if lacking else []

    @classmethod
    @contextmanager
    def opened(cls, spec: ChatJob, emit: child.Emit, stopping: threading.Event) -> Iterator[Self]:
        """Load the pair in this process, and free it at the end."""
        with super().opened(spec, emit, stopping) as pair, pair._group_open:
            yield pair

    def begin(self, number: int, request: ServeRequest, emit: child.Emit, stopping: threading.Event) -> None:
        """Begin to answer a request, emitting the events listed in the module's docstring."""
        decoder, ctx_size = self._decoder, self.ready.ctx_size
        prompt, applied = self._prompt(request)
        decoder.target.check_tokens([*request.bias])
        wishes = request.wishes
        reading = AnswerReading(
            None if request.grammar else applied,
            tools=bool(wishes.tools),
            goes_on=wishes.goes_on,
            most_calls=1 if wishes.parallel is False else 0,  # not every template's grammar limits them
        )
        if len(prompt) >= ctx_size:
            # The code is OpenAI's, the type llama-server's.
            named = {"code": "context_length_exceeded", "type": "exceed_context_size_error"}
            emit({"event": "refused", **named, "n_prompt_tokens": len(prompt), "n_ctx": ctx_size})
            larger = -(-(len(prompt) + min(request.max_tokens or 512, 4096)) // 256) * 256
            raise UsageError(
                f"the prompt has {len(prompt):,} tokens, and the context holds {ctx_size:,}, at least one of them for "
                "the answer",
                f"shorten it, or start the server with -c {larger}",
            )
        if not self._answering:
            self._group = self._group_open.enter_context(decoder.group())
        try:
            choice = self._choose(prompt if request.cache else ())
            emitting = _Events(decoder, reading, request, prompt, emit)
            asked = AnswerRequest(
                prompt,
                max_tokens=request.max_tokens or ctx_size,
                sampling=request.sampling,
                stop=(*request.stop, *(applied.stops if applied else ())),
                grammar=request.grammar or applied or "",
                cache_prompt=request.cache,
                stopping=stopping.is_set,
                special=self._control_tokens((*applied.preserved, *request.stop) if applied else request.stop),
                bias=request.bias if request.ends else request.bias | self._never_end,
                logprobs=request.logprobs,
                on_prompt=emitting.read,
                prediction=request.prediction,
            )

            def take(emitted: Emitted) -> bool:
                emitting.add(emitted)
                return not (stopping.is_set() or reading.is_enough)

            running = self._group.begin(choice.sequence, asked, take, choice.copy)
            emitting.rounds = running.answer.rounds
            emit({"event": "prompt", "tokens": len(prompt)})  # the request has begun; later hangs are not blamed on it
            if request.echo:
                emitting.echo()
            self._answering[running] = _Answering(number, reading, emitting, SystemCounters.now())
        finally:
            self._end_group()

    def step(self) -> list[tuple[int, ServeReply | GgufspecError]]:
        """Decode the next tokens of all answers; return the replies of those that have ended, by request number."""
        ended = [(self._answering.pop(one), one) for one in self._group.step()]
        replies = [(asked.number, one.failure or self._reply(one, asked)) for asked, one in ended]
        self._end_group()
        return replies

    def _end_group(self) -> None:
        """Release the decoder if no answer is running, so that a pause can be used for measurements."""
        if not self._answering:
            self._group_open.close()

    def _choose(self, prompt: Sequence[int]) -> SequenceChoice:
        """Choose a conversation without a running answer, and a conversation to copy a prefix from."""
        decoder, running = self._decoder, {one.sequence for one in self._answering}
        held, prompts = zip(*map(decoder.held, range(self.ready.parallel)), strict=True)
        free = [index for index in range(self.ready.parallel) if index not in running]
        choice = choose_sequence(held, prompts, self._used, prompt, free)
        self._requests += 1
        self._used[choice.sequence] = self._requests
        return choice

    def _reply(self, one: RunningAnswer, asked: _Answering) -> ServeReply:
        answer, decoder, reading = one.answer, self._decoder, asked.reading
        asked.emitting.finish()
        self._remember("".join(asked.emitting.text), tuple(asked.emitting.tokens))
        statistics, only_s = answer.statistics, answer.target_only_s
        seconds = None if answer.shared else only_s  # tokens are slower while other answers run
        target = self._target_speed(asked.before, statistics, seconds)
        if reading.is_enough and not statistics.stop_reason:
            statistics = replace(statistics, stop_reason="stop")
        if answer.shared_prompt or decoder.target_only_s is None:
            only_s = None
        batches, self._group.batches = self._group.batches, 0
        return ServeReply(
            statistics=statistics,
            batches=batches,
            cached=statistics.prompt_tokens - statistics.prompt_read,
            sequence=one.sequence,
            target_only_s=None if only_s is None else only_s * statistics.decoded,
            speculation=bool(decoder.drafters) and not decoder.is_backing_off,
            accepted_by_drafter=_by_drafter(answer.rounds),
            notes=(*self._new_notes(), *([target.change] if target and target.change else ())),
            target=target,
        )

    def _prompt(self, request: ServeRequest) -> tuple[list[int], AppliedTemplate | None]:
        """Return the tokens to continue and, in a chat, the applied template, which says how to parse the answer."""
        model = self._decoder.target
        if not request.messages:
            prompt = request.prompt
            ids = model.tokenize(prompt, special=True) if isinstance(prompt, str) else list(prompt)
            model.check_tokens(ids)
            if not ids:
                raise UsageError("the prompt is empty", "send at least one character")
            return ids, None
        if not self.ready.chat_template:
            raise UsageError(f"{model.path.name} has no chat template", ANOTHER_TEMPLATE)
        if date.today() != self._day:  # a template may show the date
            self._day, self._prompter = date.today(), self._new_prompter()
        return self._prompter.of_messages([self._message(one) for one in request.messages], request.wishes)

    def _control_tokens(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of texts that are a single token; such a token appears in an answer's text, or stops it."""
        found = (self._decoder.target.tokenize(text, special=True, start=False) for text in texts)
        return frozenset(ids[0] for ids in found if len(ids) == 1)

    @cached_property
    def _never_end(self) -> dict[int, float]:
        """Logit offsets that prevent the model from ending its answer."""
        target = self._decoder.target
        return {token: -math.inf for token in range(target.vocab_size) if target.is_end(token)}

    def _message(self, message: dict[str, Any]) -> TokenizedMessage:
        found = TokenizedMessage.of(message)
        tokens = self._answers.get(found.content, ()) if found.role == "assistant" and found.content else ()
        return replace(found, tokens=tokens)

    def _remember(self, text: str, tokens: tuple[int, ...]) -> None:
        self._answers[text] = tokens
        self._answers.move_to_end(text)
        while len(self._answers) > _MOST_ANSWERS:
            self._answers.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Answering:
    """A request whose answer is running."""

    number: int
    reading: AnswerReading
    emitting: _Events
    before: SystemCounters  # counters at the start of the answer


class _Events:
    """Emitter of prompt progress and of the answer's tokens, one event per round."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        reading: AnswerReading,
        request: ServeRequest,
        prompt: Sequence[int],
        emit: child.Emit,
    ) -> None:
        self._decoder, self._reading, self._request, self._emit = decoder, reading, request, emit
        self.rounds: Sequence[Round] = ()  # the answer's rounds
        self.text, self.tokens = list[str](), list[int]()  # the answer's text and tokens
        self._waiting: list[Emitted] = []
        self._prompt, self._read = prompt, -1
        self._began_s = time.perf_counter()
        names = ("cached", "read", "prompt_s", "tokens", "decode_s", "drafted", "accepted")
        self._took: dict[str, float] = dict.fromkeys(names, 0)

    def read(self, tokens: int) -> None:
        """Report how many prompt tokens are in the cache."""
        took, is_first = self._took, self._read < 0
        if tokens <= self._read:
            return
        if is_first:
            took["cached"] = tokens
            self._began_s = time.perf_counter()
        self._read, took["read"] = tokens, tokens - took["cached"]
        took["prompt_s"] = 0.0 if is_first else time.perf_counter() - self._began_s
        if self._request.progress:
            progress = {"total": len(self._prompt), "cache": took["cached"], "processed": tokens}
            self._emit({"event": "progress", **progress, "time_ms": round(1000 * took["prompt_s"])})

    def add(self, emitted: Emitted) -> None:
        """Add a token; send all tokens of a round with its last one."""
        self.read(len(self._prompt))
        self.text.append(emitted.text)
        self.tokens += [emitted.token] * (emitted.token >= 0)  # -1: text that was held back, without a token
        self._waiting.append(emitted)
        if not self.rounds or len(self._waiting) >= len(self.rounds[-1].emitted):
            self.flush()

    def echo(self) -> None:
        text = b"".join(map(self._decoder.target.piece, self._prompt)).decode("utf-8", "replace")
        self._send([MessageDelta(text)], [])

    def flush(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            deltas = self._reading.push("".join(one.text for one in waiting))
            self._send(deltas, [one for one in waiting if one.token >= 0])

    def finish(self) -> None:
        """Send the waiting tokens and the text that was held back."""
        self.flush()
        if deltas := self._reading.finish():
            self._send(deltas, [])

    def _send(self, deltas: list[MessageDelta], emitted: list[Emitted]) -> None:
        self._emit(
            {
                "event": "round",
                "deltas": [one.plain() for one in deltas],
                "tokens": [one.token for one in emitted],
                "sources": [one.source for one in emitted],
                "logprobs": [self._logprob(one) for one in emitted if one.logprob is not None],
                "took": self._taken(emitted) if self._request.timings else None,
            }
        )

    def _taken(self, emitted: list[Emitted]) -> dict[str, float]:
        """Return the timings up to and including the round that emitted these tokens."""
        took, rounds = self._took, self.rounds
        took["tokens"] += len(emitted)
        if emitted and rounds[-1].batch_size:  # the first token has no batch of its own
            took["decode_s"] += rounds[-1].total_s
            took["drafted"] += len(rounds[-1].drafted)
            took["accepted"] += rounds[-1].accepted
        return took

    def _logprob(self, emitted: Emitted) -> dict[str, Any]:
        assert emitted.logprob is not None
        top = [self._spelled(token, value) for token, value in emitted.logprob.likeliest]
        return self._spelled(emitted.token, emitted.logprob.own) | {"top": top}

    def _spelled(self, token: int, value: float) -> dict[str, Any]:
        data = self._decoder.target.piece(token, special=True)
        return {"text": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": value}


def _by_drafter(rounds: Iterable[Round]) -> dict[str, tuple[int, int]]:
    """Return (drafted, accepted) tokens by drafter."""
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for one in rounds:
        drafted.update(one.drafters)
        accepted.update(one.drafters[: one.accepted])
    return {name: (drafted[name], accepted[name]) for name in drafted}


opened = ServePair.opened
