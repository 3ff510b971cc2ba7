"""The public decoder: a target and a draft from GGUF files, text in, text out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np

from ggufspec.decoding.drafters import Drafter, Parts, make
from ggufspec.decoding.drafters.head import HeadDrafter
from ggufspec.decoding.drafters.model import ModelDrafter
from ggufspec.decoding.logprobs import Logprob, logprob
from ggufspec.decoding.loop import Round, generate, prefill
from ggufspec.decoding.options import ROWS, AnswerOptions, DecoderOptions, check_one_of
from ggufspec.decoding.policy.experience import PairExperience
from ggufspec.decoding.policy.pair_latency import PairLatency
from ggufspec.decoding.rules import make_rule
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.text import TextStream
from ggufspec.decoding.threads import Threads
from ggufspec.decoding.trace import Trace
from ggufspec.errors import ModelError, UsageError
from ggufspec.files import untrusted
from ggufspec.hardware.host import physical_cores
from ggufspec.llamacpp.chat_library import Applied
from ggufspec.llamacpp.gguf import Gguf
from ggufspec.llamacpp.grammar import compile_grammar
from ggufspec.llamacpp.head import Head, head_sources
from ggufspec.llamacpp.model import Context, Logits, Model, check_gguf
from ggufspec.llamacpp.options import beyond_training
from ggufspec.models import heads
from ggufspec.models.compat import Vocabulary, judge, vocabulary_mismatch
from ggufspec.models.header import ModelHeader, interpret
from ggufspec.models.headers import cached_header, read_prefix
from ggufspec.models.locate import LocalFile
from ggufspec.models.vocabulary import accepted
from ggufspec.settings.registry import DRAFTERS, is_lossy

_BEFORE_END = 16  # tokens: a chat template's end of a prompt is rarely longer
_MOST_STATES = 2  # saved for each conversation, as large as a recurrent state or the cells of a window
MOST_CORPUS_BYTES = 16 << 20  # some millions of tokens, and up to 150 bytes of memory for each


@dataclass(frozen=True, slots=True)
class Statistics:
    """What one answer took.

    ``stop_reason`` is ``end`` (the model's own), ``stop`` (a stop string), ``length``, ``context``, ``grammar`` (it
    permits no further token), or empty where the caller left off.
    """

    prompt_tokens: int
    prompt_s: float  # the target's decoding of the tokens read, which gives the first token, too
    tokens: int
    decode_s: float  # of the rounds, which give all tokens but the first; draft_s and verify_s are parts of it
    rounds: int
    drafted: int
    accepted: int
    drafted_by_position: tuple[int, ...]  # of the draft
    accepted_by_position: tuple[int, ...]
    draft_s: float
    verify_s: float
    stop_reason: str
    plain_rounds: int = 0  # without a draft
    lookup_drafted: int = 0
    lookup_accepted: int = 0
    prompt_read: int = 0  # tokens decoded for it: all, unless some were in the cache or the caller left off before
    time_to_first_token_s: float | None = None  # from the request on; None where no token came

    @classmethod
    def of(cls, rounds: Sequence[Round], draft_max: int, **more: Any) -> Statistics:
        """Those of an answer's rounds, none longer than ``draft_max``; ``more`` are the fields that rounds lack."""
        rounds = [one for one in rounds if one.width]  # the first token has none
        names = [(name, place < one.accepted) for one in rounds for place, name in enumerate(one.drafters)]
        found: dict[str, Any] = {
            "rounds": len(rounds),
            "plain_rounds": sum(not one.drafted for one in rounds),
            "drafted": len(names),
            "accepted": sum(one.accepted for one in rounds),
            "drafted_by_position": tuple(sum(len(one.drafted) > i for one in rounds) for i in range(draft_max)),
            "accepted_by_position": tuple(sum(one.accepted > i for one in rounds) for i in range(draft_max)),
            "lookup_drafted": sum(name == "lookup" for name, _ in names),
            "lookup_accepted": sum(name == "lookup" and accepted for name, accepted in names),
            "decode_s": sum(one.total_s for one in rounds),
            "draft_s": sum(one.draft_s for one in rounds),
            "verify_s": sum(one.verify_s for one in rounds),
        }
        return cls(**found | more)

    @property
    def decoded(self) -> int:
        """Tokens that ``decode_s`` and ``rounds`` gave."""
        return max(0, self.tokens - 1)

    @property
    def tokens_per_s(self) -> float:
        """Those by their seconds; 0 where there are none."""
        return self.decoded / self.decode_s if self.decoded and self.decode_s else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Those by their rounds; 0 where there are none."""
        return self.decoded / self.rounds if self.rounds else 0.0


@dataclass(slots=True)
class _Kept:
    """A conversation that is kept."""

    texts: dict[str, list[int]] = field(default_factory=dict)  # that begin with what is in the caches, by model
    drafter: ModelDrafter | HeadDrafter | None = None  # the one with a file
    prompt: int = 0  # tokens that were last read as a prompt, cached ones included
    states: list[tuple[int, Any]] = field(default_factory=list)  # of a memory that forgets, oldest first


@dataclass(frozen=True, slots=True)
class Emitted:
    """One token of the answer."""

    token: int  # -1 where a grammar ended the answer and text was still held back
    text: str  # what became certain with it; it may be empty or end an earlier character
    source: str  # who wrote it, as of :meth:`Round.source`
    logprob: Logprob | None = None  # where it was asked for

    @property
    def drafted(self) -> bool:
        """Whether a drafter wrote it."""
        return self.source not in ("bonus", "target")


class SpeculativeDecoder:
    r"""Decodes with a target and, where given, a draft model.

    >>> from ggufspec import SpeculativeDecoder, demo_pair
    >>> target, draft = demo_pair()
    >>> with SpeculativeDecoder(target, draft) as decoder:
    ...     text = "".join(e.text for e in decoder.generate("import os\\n\\ndef ", max_tokens=48))
    ...     alone = "".join(e.text for e in decoder.generate("import os\\n\\ndef ", max_tokens=48, alone="target"))
    >>> decoder.statistics.tokens
    48

    A decoder is one conversation with one cache, or ``options.parallel`` of them, of which :meth:`use` chooses one: it
    gives one answer at a time. While one is unfinished, another answer
    and :meth:`configure` raise UsageError, from whatever thread they come, and so does :meth:`close` while another
    thread reads a prompt or is in the midst of a round. Different decoders may be used by different threads.

    Args:
        target: path of the target's GGUF file.
        draft: path of the draft's, or None.
        options: placement and decoding. The draft is not loaded where only the lookup drafts.
        cache: folder in which measured latency models are cached; None caches none.

    Attributes:
        notes: what a user should know of how it runs: a measurement that was disturbed, a draft that is of no use.
        statistics: of the last answer.
        rounds: of the last answer, with their details.

    Raises:
        ModelError: a file is missing or damaged, does not fit, or the draft's vocabulary is another.
        UsageError: the lookup's corpus cannot be read.
    """

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | None = None,
        options: DecoderOptions | None = None,
        *,
        cache: Path | None = None,
    ) -> None:
        options = options or DecoderOptions()
        # Flash attention adds up in an order that depends on the number of threads, which strict mode therefore fixes.
        self._threads = Threads(options.threads or (physical_cores() if options.strict else 0))
        self.notes: list[str] = []
        self.statistics: Statistics | None = None
        self.rounds: list[Round] = []
        self._stack = ExitStack()
        own = self._stack.enter_context
        self._answering = threading.Lock()
        self._unfinished: Generator[Emitted] | None = None  # the answer that is being given
        self._closed = False
        self._kept: list[_Kept] = [_Kept() for _ in range(options.parallel)]
        self._sequence = 0
        self._stopping: Callable[[], bool] | None = None  # asked between the batches of a prompt
        self._on_prompt: Callable[[int], None] | None = None  # told then
        if options.needs_draft and (draft or options.head == "mtp"):
            draft = draft or target
            options = _with_head(Path(target), Path(draft), options)
        else:
            draft = None
        drafts = options.drafts(with_draft=draft is not None)
        self._most_drafted = max(options.draft_max, ROWS - 1) if drafts else 0  # drafted tokens of a round at most
        try:
            in_target = draft is not None and Path(draft) == Path(target) and options.head == "mtp"
            self.target = own(Model(Path(target), replace(options.target, mtp=in_target)))
            self.draft = self.target if in_target else None
            if draft and not in_target:
                self.draft = own(Model(Path(draft), options.draft_placement))
                require_same_vocabulary(
                    self.target, self.draft, "choose a draft of the target's own family, or --no-draft"
                )
            ctx_size = options.ctx_size or self.target.context_train
            self.options = options = replace(options, threads=self._threads.start(), ctx_size=ctx_size)
            asked = {"target": options.target.gpu_layers, "draft": options.draft.gpu_layers}
            for role, model in (("target", self.target), ("draft", None if in_target else self.draft)):
                if model is not None:
                    self._note(beyond_training(role, model.path.name, model.context_train, ctx_size))
                    if asked[role] and not model.gpu_layers:
                        self._note("llama.cpp finds no GPU, and runs on the CPU alone; `ggufspec doctor` says why")
            sources = head_sources(self.draft) if self.draft and options.head else ()
            context_options = replace(options.context(with_draft=draft is not None), hidden=sources)
            self._target = own(closing(Context(self.target, context_options)))
            if drafts and self._target.rewind_kind == "snapshots":  # as many as there are states
                self._most_drafted = options.draft_max
            self._draft = self._head = None
            self._head_kind = options.head
            if self.draft and options.head:
                self._head = own(closing(Head(self.draft, self._target, options.draft_context())))
            elif self.draft:
                self._draft = own(closing(Context(self.draft, options.draft_context())))
            for context in filter(None, (self._target, self._draft)):
                context.between = self._between
                if drafts and not context.can_rewind:
                    raise ModelError(
                        f"{context.model.path.name} cannot take tokens back: it cannot be in a pair",
                        "run target-only with --no-draft",
                    )
            self._made: dict[tuple[str, Path | None], Drafter] = {}  # by name, and corpus if it has one
            if self.draft:
                for kept in self._kept:
                    drafter = self._new_drafter(options.head or "draft", None)
                    assert isinstance(drafter, ModelDrafter | HeadDrafter)
                    kept.drafter = drafter
            self._experience = PairExperience(cache, *self._identities(cache))
            self._latency = PairLatency(self._target, self._draft or self._head, options, cache, self._experience)
            self._stack.callback(self._save)
            self._engage(options)
        except BaseException:
            self.close()
            raise

    def _identities(self, cache: Path | None) -> tuple[str, dict[str, str]]:
        """The target's fingerprint, and by drafter its file's, or its name; as far as headers are in the cache."""
        found = []
        for model in (self.target, self.draft):
            known = cached_header(model.path, cache / "headers") if cache and model else None
            found.append(known.header.fingerprint if known else "")
        drafters = {name: name for name, row in DRAFTERS.items() if not row.needs_model}
        return found[0], drafters | ({self._head_kind or "draft": found[1]} if found[1] else {})

    def _engage(self, options: DecoderOptions) -> None:
        """Make the drafters of the options, which hold if that succeeds."""
        engaged = options.drafters if options.drafts(with_draft=self.draft is not None) else ()
        drafters = [self._make(name, options.lookup_corpus) for name in engaged]
        self._latency.configure(options)
        for kept in self._kept:
            if isinstance(kept.drafter, ModelDrafter):
                kept.drafter.width = self._latency.draft_width
        self._note(*self._latency.notes, self._latency.refusal)
        self._engaged = () if self._latency.refusal else tuple(engaged)
        self._drafters = drafters if self._engaged else []
        self.options = options

    def use(self, sequence: int, copy: int | None = None) -> None:
        """Answer in this conversation from now on; the caches of the others stay as they are.

        Args:
            sequence: 0 … ``options.parallel`` - 1.
            copy: a conversation whose caches this one begins with, in place of its own, where they can be copied
                (:attr:`Context.forgets <ggufspec.llamacpp.model.Context>` says that they cannot).

        Raises:
            UsageError: an answer is unfinished, or the decoder is closed.
        """
        if not self._answering.acquire(blocking=False):
            raise _unfinished()
        try:
            if self._closed:
                raise _closed()
            self._sequence = sequence
            for context in (self._target, self._draft, self._head):
                if context is not None:
                    context.use(sequence)
            self._drafters = [self._make(name, self.options.lookup_corpus) for name in self._engaged]
            if copy is not None and copy != sequence and not self._target.forgets:
                self._copy(self._kept[copy], self._kept[sequence], copy)
        finally:
            self._answering.release()

    def _copy(self, source: _Kept, kept: _Kept, sequence: int) -> None:
        self._target.copy(sequence)
        kept.texts.clear()
        if "target" in source.texts:
            kept.texts["target"] = list(source.texts["target"])
        kept.prompt = source.prompt
        if not isinstance(kept.drafter, ModelDrafter) or not isinstance(source.drafter, ModelDrafter):
            return  # a head reads anew
        if self._draft and not self._draft.forgets and "draft" in source.texts:
            self._draft.copy(sequence)
            kept.drafter.follow(source.drafter)
            kept.texts["draft"] = list(source.texts["draft"])

    def held(self, sequence: int) -> tuple[Sequence[int], int]:
        """The text that the target's cache of a conversation begins with, and how many tokens of it were its prompt."""
        kept = self._kept[sequence]
        return kept.texts.get("target", ()), kept.prompt

    def _make(self, name: str, corpus: Path | None) -> Drafter:
        """A drafter of the registry, made when it is needed first; one with a cache is the conversation's own."""
        if DRAFTERS[name].needs_model:
            assert self._drafter is not None
            return self._drafter
        corpus = corpus if DRAFTERS[name].needs_corpus else None
        if (name, corpus) not in self._made:
            self._made[name, corpus] = self._new_drafter(name, corpus)
        return self._made[name, corpus]

    def _new_drafter(self, name: str, corpus: Path | None) -> Drafter:
        tokens = []
        if corpus is not None:
            tokens = self.target.tokenize(untrusted.read_text(corpus, MOST_CORPUS_BYTES, failure=UsageError))
        return make(name, Parts(self.target.vocab_size, self._draft, tokens, self._target, self._head))

    @property
    def _drafter(self) -> ModelDrafter | HeadDrafter | None:
        """The one with a file, which has a cache."""
        return self._kept[self._sequence].drafter

    @property
    def _held(self) -> dict[str, list[int]]:
        """Texts that begin with what is in the caches."""
        return self._kept[self._sequence].texts

    def configure(self, **changes: Unpack[AnswerOptions]) -> None:
        """Draft and judge later answers differently, with the same models loaded.

        Args:
            changes: options of :class:`DecoderOptions`: ``drafter``, ``draft_policy``, ``draft_max``,
                ``lookup_corpus``, ``accept``.

        Raises:
            UsageError: another option, which needs loading; a value out of range; a drafter or a draft length that the
                pair was not loaded for; an answer is unfinished, or the decoder is closed.
        """
        if not self._answering.acquire(blocking=False):
            raise _unfinished()
        try:
            if self._closed:
                raise _closed()
            options = self.options.with_answer(
                changes, has_draft=self.draft is not None, rooms=self._most_drafted, head=self._head_kind
            )
            try:
                self._engage(options)
            except BaseException:
                for kept in self._kept:  # a measurement that broke off left the caches in an unknown state
                    kept.texts.clear()
                raise
        finally:
            self._answering.release()

    def _save(self) -> None:
        """Cache what was learned of the models' speed, for the number of threads that was begun with."""
        if not is_lossy(self.options.accept):  # whose acceptance says nothing about exact drafts
            self._experience.save()
        if not self._threads.changed:
            self._latency.save()

    @property
    def target_runs_alone(self) -> bool:
        """Whether ``alone="target"`` is as fast as a decoder without drafters: nothing is kept aside for drafts."""
        return self._head is None and self._target.rewind_kind == "exact"

    @property
    def drafters(self) -> tuple[str, ...]:
        """Who drafts; none in a target-only decoder."""
        return tuple(drafter.name for drafter in self._drafters)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        grammar: str | Applied = "",
        alone: str = "",
        cache_prompt: bool = False,
        trace: Trace | None = None,
        stopping: Callable[[], bool] | None = None,
        special: Collection[int] = (),
        logprobs: int | None = None,
        bias: Mapping[int, float] | None = None,
        on_prompt: Callable[[int], None] | None = None,
    ) -> Generator[Emitted]:
        """Yield the tokens of one answer as they are accepted; ``statistics`` describes it afterwards.

        Args:
            prompt: text, or token ids.
            max_tokens: tokens to emit at most.
            sampling: temperature, truncation, seed and penalties; greedy by default.
            stop: strings that end the answer and are not part of it.
            grammar: the answer follows this grammar, in llama.cpp's GBNF, or a chat template's; empty for none.
            alone: ``target`` or ``draft`` lets one model answer without the other, in the same loop.
            cache_prompt: decode only what is new of the prompt. What the cache holds of its beginning was computed in
                other batches than a fresh one would be, so that in a near-tie another token may be chosen.
            trace: records what was weighed in every round.
            stopping: asked between the batches of a long prompt; True ends the answer there, without a token. (A caller
                that wants no more tokens just leaves off.)
            special: control tokens that are part of the text, but for those that end it.
            logprobs: how many of the likeliest tokens to list with each; None for no log-probabilities.
            bias: what is added to the logits of tokens, by their ids.
            on_prompt: told, before the prompt is read and between its batches, how many of its tokens the cache has.

        Raises:
            UsageError: the prompt or a stop string is empty, or the grammar is none; there is no draft model to answer
                alone; another answer is unfinished, or the decoder is closed.
            ModelError: the prompt is longer than the context.
        """
        if not self._answering.acquire(blocking=False):
            raise _unfinished()
        try:
            self._unfinished = answer = self._answer(
                prompt,
                max_tokens,
                sampling or Sampling(),
                stop,
                grammar,
                alone,
                cache_prompt,
                trace,
                stopping,
                special,
                logprobs,
                bias,
                on_prompt,
            )
            if self._closed:  # checked after the line above: close() looks at both in the other order
                raise _closed()
            yield from answer
        finally:
            self._unfinished = None
            self._answering.release()

    def _answer(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        stop: Sequence[str],
        grammar: str | Applied,
        alone: str,
        cache_prompt: bool,
        trace: Trace | None,
        stopping: Callable[[], bool] | None,
        special: Collection[int],
        logprobs: int | None,
        bias: Mapping[int, float] | None,
        on_prompt: Callable[[int], None] | None,
    ) -> Generator[Emitted]:
        clock = time.perf_counter
        requested = clock()
        check_one_of(alone, ("", "target", "draft"), "model")
        model, context = self.target, self._target
        if alone == "draft":
            if not (self.draft and self._draft):
                raise UsageError("draft-only needs a draft model", "load one")
            model, context = self.draft, self._draft
        tokens = self.target.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise UsageError("the prompt is empty", 'give one with -p "…", -f FILE, or - for standard input')
        if len(tokens) > self.options.ctx_size:
            raise ModelError(
                f"the prompt has {len(tokens):,} tokens and the context holds {self.options.ctx_size:,}",
                f"-c {-(-(len(tokens) + max_tokens) // 256) * 256} would hold it",
            )
        if "" in stop:
            raise UsageError("an empty stop string would end every answer at once", "leave it out")
        is_constrained = bool(grammar if isinstance(grammar, str) else grammar.grammar)
        constraint = compile_grammar(model, grammar) if is_constrained else None
        rule = make_rule(self.options.accept, sampling, constraint, bias)
        if trace is not None:
            trace.begin(rule)
        drafters = [] if alone else self._drafters
        draft_max = self._latency.draft_max if drafters else 0
        policy = self._latency.policy() if drafters else None
        cached, draft_cached = 0, 0
        kept = self._kept[self._sequence]
        if cache_prompt:
            if self._drafter and (reader := self._draft or self._head):
                draft_cached = self._same("draft", tokens, reader, self._drafter.has_read)
            if alone != "draft":
                cached = self._same("target", tokens, context, context.length)
                if self.options.strict:
                    cached = self._aligned(max(0, min(cached, kept.prompt - 1)))
                elif not cached and context.forgets:
                    cached = self._restored(tokens)
            elif self._drafter and self._drafter.has_read == context.length:  # else it has forgotten the beginning
                cached = draft_cached
        stream, text, rounds = TextStream(stop), list(tokens), list[Round]()
        self.rounds = rounds
        prompt_s, prompt_read, count, stop_reason = 0.0, len(tokens) - cached, 0, ""
        time_to_first_token_s: float | None = None
        try:
            if alone != "draft":
                kept.prompt = len(tokens)
                kept.states = [one for one in kept.states if one[0] <= cached]
            for name in {alone or "target"} | {"draft" for one in drafters if one is self._drafter}:
                self._held[name] = text
            if alone == "draft" and isinstance(self._drafter, ModelDrafter):
                self._drafter.let_go()
            self._threads.resume()
            as_wide = self._latency.width if context is self._target else lambda count: count
            began, self._stopping, self._on_prompt = clock(), stopping, on_prompt
            try:
                if on_prompt is not None:
                    on_prompt(cached)
                begin = self._saved(tokens, cached) if cache_prompt and alone != "draft" else cached
                apart = as_wide(1) if self.options.strict and context is self._target else 0
                first = prefill(context, tokens, drafters, policy, cached=begin, draft_cached=draft_cached, apart=apart)
            except _LeftOff:
                prompt_read = context.length - cached
                if self._drafter in drafters:
                    self._held.pop("draft", None)  # which may not have begun with it
                return
            finally:
                prompt_s, self._stopping, self._on_prompt = clock() - began, None, None
            if policy is not None:
                policy.prompt_read(prompt_read, prompt_s)
            rows: list[Logits] = []  # of the round, where log-probabilities are wanted
            for round_ in generate(
                context,
                tokens,
                first,
                rule,
                max_tokens=max_tokens,
                is_end=model.is_end,
                drafters=drafters,
                policy=policy,
                draft_max=draft_max,
                width=as_wide,
                clock=clock,
                observe=None if logprobs is None else lambda found: rows.__setitem__(slice(None), [found.copy()]),
            ):
                self._follow_threads()
                text += round_.emitted
                rounds.append(round_)
                if trace is not None:
                    trace.add(round_)
                for index, token in enumerate(round_.emitted):
                    count += 1
                    if count == 1:
                        time_to_first_token_s = clock() - requested
                    piece = stream.push(model.piece(token, special=token in special and not model.is_end(token)))
                    dead_end = round_.dead_end and index == len(round_.emitted) - 1
                    stop_reason = self._stop_reason(
                        model.is_end(token), stream, len(tokens) + count, count >= max_tokens, dead_end
                    )
                    text_now = piece + (stream.finish() if stop_reason else "")
                    found = None if logprobs is None else logprob(rows[0][index], token, logprobs)
                    yield Emitted(token, text_now, round_.source(index), found)
                    if stop_reason:
                        return
                if round_.dead_end:
                    stop_reason = "grammar"
                    if held := stream.finish():
                        yield Emitted(-1, held, "target")
        except GeneratorExit:  # the caller left off, between two rounds
            raise
        except BaseException:
            text.clear()  # the caches are in an unknown state
            raise
        finally:
            self.statistics = Statistics.of(
                rounds,
                draft_max,
                prompt_tokens=len(tokens),
                prompt_read=prompt_read,
                prompt_s=prompt_s,
                tokens=count,
                stop_reason=stop_reason,
                time_to_first_token_s=time_to_first_token_s,
            )
            if not is_lossy(self.options.accept):
                self._experience.count(rounds)
            failed = [(drafter.name, drafter.failure) for drafter in self._drafters if drafter.failure]
            self._note(*(f"the {DRAFTERS[name].label}: {failure}; it drafts no more" for name, failure in failed))
            self._note(self._threads.note)
            if stop_reason == "grammar":
                self._note("the answer ends where the grammar permits no further token")

    def _between(self) -> None:
        """Between the batches of a long text, ask whether to go on."""
        self._follow_threads()
        if self._stopping is not None and self._stopping():
            raise _LeftOff
        if self._on_prompt is not None:
            self._on_prompt(self._target.length)

    def _follow_threads(self) -> None:
        """Give llama.cpp as many threads as other programs leave CPUs for."""
        if self._threads.look():
            for context in (self._target, self._draft, self._head):
                if context is not None:
                    context.use_threads(self._threads.count)

    def _same(self, name: str, prompt: Sequence[int], context: Context | Head, has_read: int) -> int:
        """How many of the prompt's tokens, of all but the last, are in a cache and can be kept.

        Args:
            name: whose text to compare with.
            prompt: token ids.
            context: the cache; one that cannot rewind is kept whole or emptied.
            has_read: tokens of the text before that went into it.
        """
        pairs = zip(self._held.get(name, ())[:has_read], prompt[:-1], strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return same if same == has_read or (context.rewind_kind == "exact" and same >= context.floor) else 0

    def _aligned(self, cached: int) -> int:
        """How much strict mode may keep of ``cached`` tokens that were a prompt's but for its last: the whole batches,
        which reading the new prompt from its beginning would have decoded, too, as a token is rounded by its batch.
        """
        return cached // self._target.batch * self._target.batch

    def _saved(self, prompt: Sequence[int], cached: int) -> int:
        """Read a prompt up to where a later one, which differs at its end, may go back to, and save the state there.

        Returns:
            the tokens of the prompt that are in the cache then.
        """
        context, states = self._target, self._kept[self._sequence].states
        last = len(prompt) - _BEFORE_END
        if not context.forgets or last <= cached:
            return cached
        context.rewind(cached)
        context.decode(prompt[cached:last], outputs=0)
        states.append(context.save())
        del states[:-_MOST_STATES]
        return last

    def _restored(self, prompt: Sequence[int]) -> int:
        """Go back to the newest saved state that this prompt begins with; the tokens that are in the cache then."""
        text = self._held.get("target", ())
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, prompt[:-1], strict=False)))
        saved = [one for one in self._kept[self._sequence].states if one[0] <= same]
        if not saved:
            return 0
        self._target.restore(saved[-1])
        return saved[-1][0]

    def _note(self, *notes: str) -> None:
        """Add those that are not empty, each once."""
        self.notes += [note for note in notes if note and note not in self.notes]

    def _stop_reason(self, end: bool, stream: TextStream, length: int, enough: bool, dead_end: bool) -> str:
        """Why the answer ends with a token; empty where it goes on."""
        if stream.stopped:
            return "stop"
        if end:
            return "end"
        if dead_end:
            return "grammar"
        if enough:
            return "length"
        return "context" if length > self.options.ctx_size else ""

    @property
    def target_only_s(self) -> float | None:
        """Seconds of a token without a draft, as they were last observed; None where that was never measured."""
        return self._latency.target_only_s

    @property
    def is_backing_off(self) -> bool:
        """Whether nothing is drafted for the moment, since it did not pay."""
        return self._latency.is_backing_off

    def close(self) -> None:
        """Free both models and their caches, and cache what was learned of their speed. The decoder is closed then.

        An answer that is unfinished ends.

        Raises:
            UsageError: another thread is in the midst of a round, or reads a prompt.
        """
        self._closed = True
        if (answer := self._unfinished) is not None:
            try:
                answer.close()
            except ValueError:  # it is running
                self._closed = False
                raise _unfinished() from None
        else:
            with self._answering:  # configure() in another thread ends first
                pass
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _with_head(target: Path, draft: Path, options: DecoderOptions) -> DecoderOptions:
    """The options for this draft file, which may be a head.

    Raises:
        UsageError: a head is asked for, and it is none.
        ModelError: it is a head of another target, or damaged.
    """
    check_gguf(draft)
    header, parsed = _header(draft)
    if not options.head and heads.kind_of(header) is None:
        return options
    own, _ = _header(target)
    kind = heads.require(own, header, options.head)
    accepted(own, header, judge(own, header, lambda: None, options.head), options.head)  # texts are compared later
    _check_ids(LocalFile.at(draft), parsed, header.tokenizer.size)
    return options.with_head(kind.drafter)


def _header(path: Path) -> tuple[ModelHeader, Gguf]:
    """A file's own, which is not cached: the file is loaded in a moment."""
    parsed, _, _ = read_prefix(LocalFile.at(path))
    return interpret(path.name, [parsed], path.stat().st_size), parsed


def _check_ids(head: LocalFile, parsed: Gguf, tokens: int) -> None:
    """Refuse a head whose ``d2t``, the token of each of its logits, names one that there is not: llama.cpp aborts.

    Raises:
        ModelError: it does, or the file cannot be read.
    """
    for tensor in parsed.tensors:
        if tensor.name == "d2t":
            ids = np.frombuffer(head.read(parsed.data_offset + tensor.offset, tensor.size_bytes), "<i8")
            if len(wrong := ids[(ids < 0) | (ids >= tokens)]):
                raise ModelError(
                    f"{head.name} is damaged: its token ids (d2t) name token {wrong[0]} of {tokens:,}",
                    "download it again, or convert it again: d2t has the target's own ids",
                )


class _LeftOff(Exception):  # noqa: N818 - nothing is wrong
    """The caller does not want the answer any more."""


def _closed() -> UsageError:
    return UsageError("the decoder is closed", "make another SpeculativeDecoder")


def _unfinished() -> UsageError:
    return UsageError("an answer of this decoder is unfinished", "exhaust or close() its generator first")


def require_same_vocabulary(target: Model, draft: Model, hint: str) -> None:
    """Refuse a draft whose tokens are not the target's.

    Raises:
        ModelError: they differ, with the first that does and ``hint``.
    """
    reason = vocabulary_mismatch(*(Vocabulary(*model.vocabulary_kind, model.vocabulary()) for model in (target, draft)))
    if reason:
        raise ModelError(f"{draft.path.name} cannot draft for {target.path.name}: {reason}", hint)
