"""Generation of one answer: prefill, decoding rounds, conversion of tokens to text, token counts and timings."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, TypeVar, cast

from ggufspec.decoding.batch import WITH_PROMPT, AnswerClock, Batch, Decoded, drive
from ggufspec.decoding.drafters import Drafter
from ggufspec.decoding.drafters.prediction import PredictionDrafter, appeared
from ggufspec.decoding.logprobs import Logprob, logprob
from ggufspec.decoding.loop import Round, decode_prompt, rounds
from ggufspec.decoding.options import DecoderOptions, check_one_of
from ggufspec.decoding.pair import LoadedPair
from ggufspec.decoding.policy.base import Load
from ggufspec.decoding.policy.pair_latency import PairLatency
from ggufspec.decoding.prompt_cache import PromptCache
from ggufspec.decoding.rules import make_rule
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.text import TextStream
from ggufspec.decoding.trace import Trace
from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.chat_library import AppliedTemplate
from ggufspec.llamacpp.grammar import compile_grammar
from ggufspec.llamacpp.model import Context, Logits

_clock = time.perf_counter
Steps = Generator["Batch | Emitted", Decoded, None]
_T = TypeVar("_T")


class _StoppedError(Exception):
    """The caller stopped the answer during prefill."""


_SUMMED = (  # fields of Statistics that are summed over rounds
    *("rounds", "plain_rounds", "drafted", "accepted", "lookup_drafted", "lookup_accepted"),
    *("decode_s", "draft_s", "verify_s"),
)


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """Arguments of one answer; see :meth:`ggufspec.decoding.decoder.SpeculativeDecoder.generate`."""

    prompt: str | Sequence[int]
    max_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    grammar: str | AppliedTemplate = ""
    alone: str = ""
    cache_prompt: bool = False
    trace: Trace | None = None
    stopping: Callable[[], bool] | None = None
    special: Collection[int] = ()
    logprobs: int | None = None
    bias: Mapping[int, float] | None = None
    on_prompt: Callable[[int], None] | None = None
    prediction: str | Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Statistics:
    """Token counts and timings of one answer.

    ``stop_reason`` is ``end`` (the model ended the answer), ``stop`` (a stop string), ``length``, ``context``,
    ``grammar`` (which permits no further token), or empty if the caller stopped reading.
    """

    prompt_tokens: int
    prompt_s: float  # seconds to decode the uncached part of the prompt, whose logits give the first token
    tokens: int
    decode_s: float  # seconds of the rounds, i.e. of all tokens but the first; includes draft_s and verify_s
    rounds: int
    drafted: int
    accepted: int
    drafted_by_position: tuple[int, ...]  # counts of drafted tokens by position in the draft
    accepted_by_position: tuple[int, ...]
    draft_s: float
    verify_s: float
    stop_reason: str
    plain_rounds: int = 0  # rounds without a draft
    lookup_drafted: int = 0
    lookup_accepted: int = 0
    prompt_read: int = 0  # prompt tokens decoded, i.e. not cached; fewer if the caller stopped during prefill
    time_to_first_token_s: float | None = None  # seconds from the request to the first token; None without tokens
    predicted: int = 0  # number of tokens in the prediction
    predicted_appeared: int = 0  # predicted tokens that occur in the answer, drafted or not

    @classmethod
    def of(cls, rounds: Sequence[Round], draft_max: int, **more: Any) -> Statistics:
        """Make statistics from rounds with drafts of at most ``draft_max`` tokens; ``more`` holds the other fields."""
        rounds = [one for one in rounds if one.batch_size]  # without the first token's round
        drafted = [one for one in rounds if one.drafted]
        names = [(name, place < one.accepted) for one in drafted for place, name in enumerate(one.drafters)]
        found: dict[str, Any] = {
            "rounds": len(rounds),
            "plain_rounds": len(rounds) - len(drafted),
            "drafted": len(names),
            "accepted": sum(one.accepted for one in rounds),
            "drafted_by_position": tuple(sum(len(one.drafted) > i for one in drafted) for i in range(draft_max)),
            "accepted_by_position": tuple(sum(one.accepted > i for one in drafted) for i in range(draft_max)),
            "lookup_drafted": sum(name == "lookup" for name, _ in names),
            "lookup_accepted": sum(name == "lookup" and accepted for name, accepted in names),
            "decode_s": sum(one.total_s for one in rounds),
            "draft_s": sum(one.draft_s for one in rounds),
            "verify_s": sum(one.verify_s for one in rounds),
        }
        return cls(**found | more)

    def only(self, parts: Sequence[Statistics]) -> Statistics:
        """Return these statistics restricted to the rounds in ``parts``; no tokens if ``parts`` is empty."""
        sums: dict[str, Any] = {name: sum(getattr(one, name) for one in parts) for name in _SUMMED}
        for name in ("drafted_by_position", "accepted_by_position"):
            sums[name] = tuple(map(sum, zip(*(getattr(one, name) for one in parts), strict=True)))
        return replace(self, tokens=bool(parts) + sum(one.decoded for one in parts), **sums)

    @property
    def decoded(self) -> int:
        """Tokens produced by ``rounds`` in ``decode_s`` (all but the first)."""
        return max(0, self.tokens - 1)

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second; 0 if nothing was decoded."""
        return self.decoded / self.decode_s if self.decoded and self.decode_s else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Decoded tokens per round; 0 if nothing was decoded."""
        return self.decoded / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True)
class Emitted:
    """One token of the answer."""

    token: int  # -1 if a grammar ended the answer while text was still held back
    text: str  # text released with this token; may be empty or complete an earlier token's character
    source: str  # a drafter's name, ``bonus`` or ``target``: see :meth:`Round.source`
    logprob: Logprob | None = None  # None unless requested

    @property
    def drafted(self) -> bool:
        """True if a drafter proposed the token."""
        return self.source not in ("bonus", "target")


class PairAnswer:
    """One answer of a pair. Construction checks the request; :meth:`give` decodes the answer, and :meth:`steps` leaves
    decoding to the caller.

    ``rounds`` and ``statistics`` cover what has been decoded so far. The ``drafters`` draft unless the request is
    target-only or draft-only. ``apart`` is the argument of :meth:`PairLatency.policy`. ``has_others`` is True if
    other answers are running, which must not wait while the use of the CPUs is measured.

    Raises:
        UsageError, ModelError: as in :meth:`ggufspec.decoding.decoder.SpeculativeDecoder.generate`.
    """

    def __init__(
        self,
        request: AnswerRequest,
        options: DecoderOptions,
        pair: LoadedPair,
        cache: PromptCache,
        latency: PairLatency,
        drafters: Sequence[Drafter],
        *,
        apart: bool = False,
        has_others: bool = False,
    ) -> None:
        self._requested = _clock()
        check_one_of(request.alone, ("", "target", "draft"), "model")
        self._request, self._pair, self._cache, self._has_others = request, pair, cache, has_others
        self.alone = request.alone
        self._context = pair.target
        if request.alone == "draft":
            if not pair.draft:
                raise UsageError("draft-only needs a draft model", "load one")
            self._context = pair.draft
        self._model = self._context.model
        self._prompt = self._checked_prompt()
        if "" in request.stop:
            raise UsageError("an empty stop string would end every answer at once", "leave it out")
        grammar = request.grammar
        is_constrained = bool(grammar if isinstance(grammar, str) else grammar.grammar)
        constraint = compile_grammar(self._model, grammar) if is_constrained else None
        self._is_end: Callable[[int], bool] = self._model.is_end
        if isinstance(grammar, str) and grammar:
            self._is_end = partial(self._model.is_end, of_grammar=True)
        self._rule = make_rule(options.accept, request.sampling, constraint, request.bias)
        if request.trace is not None:
            request.trace.begin(self._rule)
        self._prediction = self._tokens_of(request.prediction)
        self._drafters = [] if request.alone else [*drafters]
        if self._drafters and self._prediction:
            self._drafters.insert(0, PredictionDrafter(self._prediction))
        self._draft_max = latency.draft_max if self._drafters else 0
        self._policy = latency.policy(apart=apart) if self._drafters else None
        self.teaches = self._policy is not None and not apart
        self._latency, self._is_adaptive = latency, bool(self._drafters) and options.draft_policy == "adaptive"
        self._target_only_s: list[float | None] = []  # target-only seconds at each round, from the latency model
        # Draft-only batches are not padded
        self._batch_size: Callable[[int], int] = (
            latency.batch_size if self._context is pair.target else lambda count: count
        )
        self._text = list(self._prompt)
        self._stream = TextStream(request.stop)
        self._rows: Logits | None = None  # the last round's logits, if log-probabilities are requested
        self.rounds: list[Round] = []
        self.count = 0  # number of tokens yielded
        self._prefill_clock = AnswerClock(_clock)
        self._prompt_s, self._prompt_read, self._stop_reason = 0.0, len(self._prompt), ""
        self.shared = False  # True if a round's batch also held tokens of other answers
        self.shared_prompt = False  # True if those were prompt tokens
        self._time_to_first_token_s: float | None = None

    @property
    def is_unwanted(self) -> bool:
        """True if the caller no longer wants the answer."""
        return self._request.stopping is not None and self._request.stopping()

    @property
    def drafters(self) -> Sequence[Drafter]:
        return self._drafters

    @property
    def load(self) -> Load:
        """Load from other answers in the next round's batch; setting it affects drafting only."""
        return self._policy.load if self._policy is not None else Load()

    @load.setter
    def load(self, load: Load) -> None:
        if self._policy is not None:
            self._policy.load = load

    @property
    def context(self) -> Context:
        """Context that decodes the answer's batches."""
        return self._context

    def give(self) -> Generator[Emitted]:
        """Yield tokens as they are accepted."""
        yield from drive(self._context, self.steps())

    def steps(self) -> Steps:
        """Yield batches to decode, and tokens as they are accepted.

        The caller decodes each batch in :attr:`context`, in the answer's conversation, and sends back the result.
        Between two batches other answers may use other conversations.
        """
        try:
            first = yield from self._read_prompt()
            if first is not None:
                yield from self._decode(first)
        except GeneratorExit:  # the caller stopped reading between two rounds
            raise
        except BaseException:
            self._text.clear()  # the caches are in an unknown state
            raise

    @property
    def can_pause(self) -> bool:
        """True between two rounds, when another answer may use the target until :meth:`resume`."""
        return not self._stop_reason and len(self._prompt) + self.count == len(self._text)

    def resume(self) -> int:
        """Resume after another answer has used the target; return how many tokens were decoded again."""
        return self._cache.resume(self._text)

    def part(self, rounds: Sequence[Round], tokens: int) -> Statistics:
        """Return statistics on some rounds, which generated ``tokens`` tokens."""
        more = {"prompt_tokens": 0, "prompt_s": 0.0, "tokens": 1 + tokens, "stop_reason": ""}
        return Statistics.of(rounds, self._draft_max, **more)

    @property
    def statistics(self) -> Statistics:
        return Statistics.of(
            self.rounds,
            self._draft_max,
            prompt_tokens=len(self._prompt),
            prompt_read=self._prompt_read,
            prompt_s=self._prompt_s,
            tokens=self.count,
            stop_reason=self._stop_reason,
            time_to_first_token_s=self._time_to_first_token_s,
            predicted=len(self._prediction),
            predicted_appeared=appeared(self._prediction, self._text[len(self._prompt) :]) if self._prediction else 0,
        )

    @property
    def target_only_s(self) -> float | None:
        """Median target-only seconds per token; None with drafts of fixed length and for a draft-only answer."""
        seconds = [seconds for seconds in self._target_only_s if seconds is not None]
        if not self._drafters and self._context is self._pair.target:
            seconds = [one.total_s for one in self.rounds if one.batch_size]
        return median(seconds) if seconds else None

    def _tokens_of(self, prediction: str | Sequence[int]) -> list[int]:
        """Return the prediction's tokens, truncated to the context size; control tokens in it count as plain text."""
        if not prediction:  # a model without a vocabulary cannot tokenize even empty text
            return []
        ids = self._pair.model.tokenize(prediction, start=False) if isinstance(prediction, str) else list(prediction)
        self._pair.model.check_tokens(ids)
        return ids[: self._pair.options.ctx_size]

    def _checked_prompt(self) -> list[int]:
        prompt, ctx_size = self._request.prompt, self._pair.options.ctx_size
        tokens = self._pair.model.tokenize(prompt, special=True) if isinstance(prompt, str) else list(prompt)
        self._pair.model.check_tokens(tokens)
        if not tokens:
            raise UsageError("the prompt is empty", 'give one with -p "…", -f FILE, or - for standard input')
        if len(tokens) > ctx_size:
            raise ModelError(
                f"the prompt has {len(tokens):,} tokens and the context holds {ctx_size:,}",
                f"-c {-(-(len(tokens) + min(self._request.max_tokens, 4096)) // 256) * 256} would hold it",
            )
        return tokens

    def _read_prompt(self) -> Generator[Batch, Decoded, Logits | None]:
        """Decode the prompt; return the logits (1, vocab) after it, or None if the caller stopped."""
        request, pair, cache, prompt = self._request, self._pair, self._cache, self._prompt
        cached, draft_cached = cache.found(prompt, request.alone) if request.cache_prompt else (0, 0)
        self._prompt_read = len(prompt) - cached
        cache.begin(self._text, cached, request.alone, drafting=cache.now.drafter in self._drafters)
        pair.follow_threads() if self._has_others else pair.begin_threads()
        of_target = self._context is pair.target
        clock = self._prefill_clock
        began = clock()
        if request.on_prompt is not None:
            request.on_prompt(cached)
        rows = None
        try:
            kept = cached
            if request.cache_prompt and of_target:
                kept = yield from self._decoded(cache.save_before_end(prompt, cached))
            self._context.rewind(kept)
            rows = yield from self._decoded(
                decode_prompt(
                    prompt,
                    self._drafters,
                    self._policy,
                    batch=self._context.batch,
                    cached=kept,
                    draft_cached=draft_cached,
                    apart=self._batch_size(1) if pair.options.strict and of_target else 0,
                )
            )
        except _StoppedError:
            pass
        finally:
            self._prompt_s = clock() - began
            if rows is None:
                self._prompt_read = self._context.length - cached
            elif cache.now.drafter in self._drafters:
                cache.drafts(self._text)
        if rows is not None and self._policy is not None:
            self._policy.prompt_read(self._prompt_read, self._prompt_s)
        return rows

    def _decoded(self, steps: Generator[Batch, Decoded, _T]) -> Generator[Batch, Decoded, _T]:
        """Yield a prompt's batches; raise _StoppedError between two of them if the caller has stopped the answer."""
        decoded: Decoded | None = None
        while True:
            try:
                batch = next(steps) if decoded is None else steps.send(decoded)
            except StopIteration as end:
                return cast(_T, end.value)
            if decoded is not None and not self._goes_on():
                raise _StoppedError
            decoded = yield from self._prefill_clock.decode(batch)

    def _goes_on(self) -> bool:
        """Report prompt progress between two batches; return False if the caller has stopped the answer."""
        request = self._request
        self._pair.follow_threads()
        if self.is_unwanted:
            return False
        if request.on_prompt is not None:
            request.on_prompt(self._pair.target.length)
        return True

    def _decode(self, first: Logits) -> Steps:
        """Yield the rounds' batches and tokens; the first token is chosen from the logits ``first``."""
        request = self._request
        steps = rounds(
            self._prompt,
            first,
            self._rule,
            capacity=self._context.capacity,
            max_tokens=request.max_tokens,
            is_end=self._is_end,
            drafters=self._drafters,
            policy=self._policy,
            draft_max=self._draft_max,
            batch_size=self._batch_size,
            clock=_clock,
            observe=None if request.logprobs is None else self._keep_rows,
        )
        length, decoded = self._context.length, None
        while True:
            try:
                round_ = next(steps) if decoded is None else steps.send(decoded)
            except StopIteration:
                return
            if isinstance(round_, Batch):
                decoded = yield round_
                if round_.draft is None:
                    self.shared |= bool(decoded.batch_size)
                    self.shared_prompt |= decoded.batch_size == WITH_PROMPT
                continue
            length, decoded = length + len(round_.emitted), None
            self._context.rewind(length - 1)
            self._pair.follow_threads()
            self._text += round_.emitted
            self.rounds.append(round_)
            self._target_only_s.append(self._latency.target_only_s(self.load) if self._is_adaptive else None)
            if request.trace is not None:
                request.trace.add(round_)
            begun = self.count
            try:
                for index in range(len(round_.emitted)):
                    yield self._emitted(round_, index)
                    if self._stop_reason:
                        return
            finally:  # a stop string, or the caller, may end the answer within a round
                self.rounds[-1] = round_.until(self.count - begun)
            if round_.dead_end:
                self._stop_reason = "grammar"
                if held := self._stream.finish():
                    yield Emitted(-1, held, "target")

    def _keep_rows(self, rows: Logits) -> None:
        self._rows = rows.copy()

    def _emitted(self, round_: Round, index: int) -> Emitted:
        """Return a round's token with its text; set the stop reason if the answer ends with it."""
        request, stream, token = self._request, self._stream, round_.emitted[index]
        self.count += 1
        if self.count == 1:
            self._time_to_first_token_s = _clock() - self._requested
        ends = self._is_end(token)
        text = stream.push(b"" if ends else self._model.piece(token, special=token in request.special))
        if stream.stopped:
            self._stop_reason = "stop"
        elif ends:
            self._stop_reason = "end"
        elif round_.dead_end and index == len(round_.emitted) - 1:
            self._stop_reason = "grammar"
        elif self.count >= request.max_tokens:
            self._stop_reason = "length"
        elif len(self._prompt) + self.count > self._pair.options.ctx_size:
            self._stop_reason = "context"
        if self._stop_reason:
            text += stream.finish()
        found = None
        if request.logprobs is not None and self._rows is not None:
            found = logprob(self._rows[index], token, request.logprobs)
        return Emitted(token, text, round_.source(index), found)
