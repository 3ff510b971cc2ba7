"""A pair that stays loaded and answers HTTP requests; the child's side of :class:`ggufspec.child.Session`.

The parent's side is :mod:`ggufspec.serve.engine`. Events of a request, in this order:

- ``prompt`` {tokens}: number of tokens of the prompt;
- ``progress`` {total, cache, processed, time_ms}, if requested: how much of the prompt is in the cache;
- ``round`` {deltas, tokens, sources, logprobs, took}: what one round adds to the answer (each a
  :class:`~ggufspec.llamacpp.chat_library.Delta`), and for each emitted token its id, its writer (a drafter's name,
  ``target`` or ``bonus``) and, if requested, {text, bytes, logprob, top}, else ``logprobs`` is empty: the natural
  log-probability under the target's own distribution, untempered, and the likeliest tokens'. ``took``, if requested,
  has the answer's timings so far. The last round has no tokens, only text that was held back.

An impossible request is a UsageError. If the prompt does not fit the context, the event ``refused`` {code, type,
n_prompt_tokens, n_ctx} comes first.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from typing import Any, ClassVar

from ggufspec import child
from ggufspec.chat.session import LoadedPair, Ready, Spec
from ggufspec.decoding.decoder import Emitted, SpeculativeDecoder, Statistics
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.speed_watch import TargetSpeed
from ggufspec.errors import UsageError
from ggufspec.hardware.disturbance import Counters
from ggufspec.llamacpp import chat_library
from ggufspec.llamacpp.chat_library import Applied, Delta
from ggufspec.llamacpp.chat_template import Wishes
from ggufspec.prompting.mends import Message
from ggufspec.serve.reading import Reading
from ggufspec.serve.sequences import choose

__all__ = ["ANOTHER_TEMPLATE", "Loaded", "Ready", "Reply", "Request", "Spec", "opened"]

ANOTHER_TEMPLATE = "start the server with another one: --chat-template FILE"
_MOST_ANSWERS = 256  # answers whose tokens are cached, so that a conversation's next prompt matches the cache


@dataclass(frozen=True, slots=True)
class Request:
    """One request: the ``messages`` of a chat, or a ``prompt`` to continue, with their options."""

    messages: tuple[dict[str, Any], ...] = ()  # as the chat template takes them: role, content, tool_calls, …
    wishes: Wishes = field(default_factory=Wishes)  # tools, a JSON schema, variables of the template
    prompt: str | tuple[int, ...] = ""  # prompt of a completion
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 0  # maximum of the answer; 0: as many as the context holds
    stop: tuple[str, ...] = ()
    grammar: str = ""  # GBNF that the answer follows; then all of it is content
    bias: dict[int, float] = field(default_factory=dict)  # logit offsets by token id
    echo: bool = False  # the answer begins with the prompt
    ends: bool = True  # the model may end the answer
    progress: bool = False  # report how far the prompt is read
    timings: bool = False  # report timings round by round
    logprobs: int | None = None  # likeliest tokens to list with each; None: no log-probabilities


@dataclass(frozen=True, slots=True)
class Reply:
    """End of an answer."""

    statistics: Statistics  # ``stop_reason``: end, stop, length, context, grammar, or empty if it was stopped
    cached: int  # tokens of the prompt that were in the cache
    sequence: int  # index of its conversation
    target_only_s: float | None  # expected seconds of the tokens of ``decode_s`` if target-only; None if unknown
    speculation: bool  # drafting was on at the end: it backs off if it does not pay
    accepted_by_drafter: dict[str, tuple[int, int]] = field(default_factory=dict)  # (drafted, accepted) of each
    notes: tuple[str, ...] = ()  # each once in a session, except changes of the target's speed
    target: TargetSpeed | None = None  # None if the answer did not show it


class Loaded(LoadedPair):
    of_template: ClassVar[dict[str, str]] = {"hint": ANOTHER_TEMPLATE}

    def __init__(self, decoder: SpeculativeDecoder, chat_template: str = "") -> None:
        super().__init__(decoder, chat_template)
        self._answers: OrderedDict[str, tuple[int, ...]] = OrderedDict()  # tokens of answers, by their text
        self._used = [0] * decoder.options.parallel  # request that last used each conversation
        self._requests = 0
        self._day = date.today()

    def _about(self) -> list[str]:
        lacking = chat_library.missing() if self._source else None
        return [f"{lacking.message}: {lacking.hint}"] if lacking else []

    def answer(self, request: Request, emit: child.Emit, stopping: threading.Event) -> Reply:
        """Answer one request, with the events listed in the module's docstring."""
        decoder, ctx_size = self._decoder, self.ready.ctx_size
        prompt, applied = self._prompt(request)
        decoder.target.check_tokens([*request.bias])
        wishes = request.wishes
        reading = Reading(
            None if request.grammar else applied,
            tools=bool(wishes.tools),
            goes_on=wishes.goes_on,
            most_calls=1 if wishes.parallel is False else 0,  # not every template's grammar limits them
        )
        if len(prompt) >= ctx_size:
            named = {"code": "context_length_exceeded", "type": "exceed_context_size_error"}  # OpenAI's, llama-server's
            emit({"event": "refused", **named, "n_prompt_tokens": len(prompt), "n_ctx": ctx_size})
            larger = -(-(len(prompt) + min(request.max_tokens or 512, 4096)) // 256) * 256
            raise UsageError(
                f"the prompt has {len(prompt):,} tokens, and the context holds {ctx_size:,}, at least one of them for "
                "the answer",
                f"shorten it, or start the server with -c {larger}",
            )
        emit({"event": "prompt", "tokens": len(prompt)})
        held, prompts = zip(*map(decoder.held, range(self.ready.parallel)), strict=True)
        choice = choose(held, prompts, self._used, prompt)
        self._requests += 1
        self._used[choice.sequence] = self._requests
        decoder.use(choice.sequence, choice.copy)
        before, text, tokens = Counters.now(), [], []
        emitting = _Events(decoder, reading, request, prompt, emit)
        if request.echo:
            emitting.echo()
        for emitted in decoder.generate(
            prompt,
            max_tokens=request.max_tokens or ctx_size,
            sampling=request.sampling,
            stop=(*request.stop, *(applied.stops if applied else ())),
            grammar=request.grammar or applied or "",
            cache_prompt=True,
            stopping=stopping.is_set,
            special=self._control_tokens((*applied.preserved, *request.stop) if applied else request.stop),
            bias=request.bias if request.ends else request.bias | self._never_end,
            logprobs=request.logprobs,
            on_prompt=emitting.read,
        ):
            text.append(emitted.text)
            tokens.append(emitted.token)
            emitting.add(emitted)
            if stopping.is_set() or reading.is_enough:
                break
        emitting.finish()
        self._remember("".join(text), tuple(tokens))
        statistics, alone_s, target = decoder.statistics, decoder.target_only_s, self._target_speed(before)
        assert statistics is not None
        if reading.is_enough and not statistics.stop_reason:
            statistics = replace(statistics, stop_reason="stop")
        return Reply(
            statistics=statistics,
            cached=statistics.prompt_tokens - statistics.prompt_read,
            sequence=choice.sequence,
            target_only_s=None if alone_s is None else alone_s * statistics.decoded,
            speculation=bool(decoder.drafters) and not decoder.is_backing_off,
            accepted_by_drafter=_by_drafter(decoder),
            notes=(*self._new_notes(), *([target.change] if target and target.change else ())),
            target=target,
        )

    def _prompt(self, request: Request) -> tuple[list[int], Applied | None]:
        """Return the tokens to continue; in a chat, also how its answer is read."""
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
        """Return the tokens of texts that are a single token: these appear in an answer's text, or stop it."""
        found = (self._decoder.target.tokenize(text, special=True, start=False) for text in texts)
        return frozenset(ids[0] for ids in found if len(ids) == 1)

    @cached_property
    def _never_end(self) -> dict[int, float]:
        """Bias that prevents the model from ending its answer."""
        target = self._decoder.target
        return {token: -math.inf for token in range(target.vocab_size) if target.is_end(token)}

    def _message(self, message: dict[str, Any]) -> Message:
        found = Message.of(message)
        tokens = self._answers.get(found.content, ()) if found.role == "assistant" and found.content else ()
        return replace(found, tokens=tokens)

    def _remember(self, text: str, tokens: tuple[int, ...]) -> None:
        self._answers[text] = tokens
        self._answers.move_to_end(text)
        while len(self._answers) > _MOST_ANSWERS:
            self._answers.popitem(last=False)


class _Events:
    """Emits how far the prompt is read, and the answer's tokens, one event per round."""

    def __init__(
        self, decoder: SpeculativeDecoder, reading: Reading, request: Request, prompt: Sequence[int], emit: child.Emit
    ) -> None:
        self._decoder, self._reading, self._request, self._emit = decoder, reading, request, emit
        self._waiting: list[Emitted] = []
        self._prompt, self._read = prompt, -1
        self._began_s = time.perf_counter()
        names = ("cached", "read", "prompt_s", "tokens", "decode_s", "drafted", "accepted")
        self._took: dict[str, float] = dict.fromkeys(names, 0)

    def read(self, tokens: int) -> None:
        """Report how many of the prompt's tokens are in the cache."""
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
        self._waiting.append(emitted)
        rounds = self._decoder.rounds
        if not rounds or len(self._waiting) >= len(rounds[-1].emitted):
            self.flush()

    def echo(self) -> None:
        text = b"".join(map(self._decoder.target.piece, self._prompt)).decode("utf-8", "replace")
        self._send([Delta(text)], [])

    def flush(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._send(self._reading.push("".join(one.text for one in waiting)), waiting)

    def finish(self) -> None:
        """Send waiting tokens and text that was held back."""
        self.flush()
        if deltas := self._reading.finish():
            self._send(deltas, [])

    def _send(self, deltas: list[Delta], emitted: list[Emitted]) -> None:
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
        """Return the timings up to the round of these tokens."""
        took, rounds = self._took, self._decoder.rounds
        took["tokens"] += len(emitted)
        if emitted and rounds[-1].width:  # the first token has no batch of its own
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


def _by_drafter(decoder: SpeculativeDecoder) -> dict[str, tuple[int, int]]:
    """Return (drafted, accepted) tokens by drafter in the last answer."""
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for one in decoder.rounds:
        drafted.update(one.drafters)
        accepted.update(one.drafters[: one.accepted])
    return {name: (drafted[name], accepted[name]) for name in drafted}


opened = Loaded.opened
