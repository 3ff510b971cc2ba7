"""The public decoder: loads a target and a draft from GGUF files; takes text, yields text."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self, Unpack

from ggufspec.decoding.alternate import Half, alternate
from ggufspec.decoding.answer import Answer, AnswerRequest, Emitted, Statistics
from ggufspec.decoding.drafters import Drafter, Parts, make
from ggufspec.decoding.drafters.head import HeadDrafter
from ggufspec.decoding.drafters.model import ModelDrafter
from ggufspec.decoding.loop import Round
from ggufspec.decoding.options import AnswerOptions, DecoderOptions
from ggufspec.decoding.pair import LoadedPair
from ggufspec.decoding.policy.experience import PairExperience
from ggufspec.decoding.policy.pair_latency import PairLatency
from ggufspec.decoding.prompt_cache import PromptCache
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.trace import Trace
from ggufspec.errors import UsageError
from ggufspec.files import untrusted
from ggufspec.llamacpp.chat_library import Applied
from ggufspec.planning.history import fingerprint
from ggufspec.settings.registry import DRAFTERS, is_lossy

__all__ = ["MOST_CORPUS_BYTES", "Emitted", "SpeculativeDecoder", "Statistics"]

MOST_CORPUS_BYTES = 16 << 20  # some millions of tokens, at up to 150 bytes of memory each


class SpeculativeDecoder:
    r"""Decoder for a target and, optionally, a draft model.

    >>> from ggufspec import SpeculativeDecoder, demo_pair
    >>> target, draft = demo_pair()
    >>> with SpeculativeDecoder(target, draft) as decoder:
    ...     text = "".join(e.text for e in decoder.generate("import os\\n\\ndef ", max_tokens=48))
    ...     alone = "".join(e.text for e in decoder.generate("import os\\n\\ndef ", max_tokens=48, alone="target"))
    >>> decoder.statistics.tokens
    48

    A decoder has one conversation with one cache, or ``options.parallel`` of them, of which :meth:`use` selects one. It
    gives one answer at a time. While an answer is unfinished, another answer and :meth:`configure` raise UsageError in
    any thread, and so does :meth:`close` while another thread reads a prompt or is in the middle of a round. Different
    decoders may be used by different threads.

    Args:
        target: path of the target's GGUF file.
        draft: path of the draft's, or None.
        options: placement and decoding options. The draft is not loaded if only the lookup drafts.
        cache: folder for measured latency models; None caches nothing.

    Attributes:
        target, draft: the two models.
        notes: what a user should know about the run, e.g. a disturbed measurement or a draft that never pays.
        statistics: token counts and timings of the last answer.
        rounds: rounds of the last answer, in detail.
        answer_target_only_s: seconds per token without a draft in the last answer; None if it did not show them.

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
        self.notes: list[str] = []
        self.statistics: Statistics | None = None
        self.rounds: list[Round] = []
        self.answer_target_only_s: float | None = None
        self._answering = threading.Lock()
        self._unfinished: Generator[Emitted] | None = None  # the answer in progress
        self._closed = False
        self._stack = ExitStack()
        self._pair = pair = LoadedPair(Path(target), Path(draft) if draft else None, options or DecoderOptions())
        self._stack.callback(pair.close)
        try:
            self._note(*pair.notes)
            self.target, self.draft, self.options = pair.model, pair.draft_model, pair.options
            self._head = self.options.head  # name of the head that is loaded as the draft, if any
            self._made: dict[tuple[str, Path | None], Drafter] = {}  # by name and corpus
            self._cache = PromptCache(pair, [self._new_file_drafter() for _ in range(self.options.parallel)])
            self._experience = PairExperience(cache, *self._fingerprints(cache))
            self._latency = PairLatency(
                pair.target, pair.draft or pair.head, self.options, cache, self._experience, pair.is_quiet
            )
            self._stack.callback(self._save)
            self._engage(self.options)
        except BaseException:
            self.close()
            raise

    def _fingerprints(self, cache: Path | None) -> tuple[str, dict[str, str]]:
        """Return the target's fingerprint, and each drafter's (its file's, or its name), where headers are cached."""
        target, draft = (fingerprint(cache, one.path) if cache and one else "" for one in (self.target, self.draft))
        drafters = {name: name for name, row in DRAFTERS.items() if not row.needs_model}
        return target, drafters | ({self._head or "draft": draft} if draft else {})

    def _engage(self, options: DecoderOptions) -> None:
        """Make the drafters of the options; switch to the options if that succeeds."""
        engaged = options.drafters if options.drafts(with_draft=self.draft is not None) else ()
        drafters = [self._drafter(name, options.lookup_corpus) for name in engaged]
        self._latency.configure(options)
        for conversation in self._cache.conversations:
            if isinstance(conversation.drafter, ModelDrafter):
                conversation.drafter.width = self._latency.draft_width
        self._note(*self._latency.notes, self._latency.refusal)
        self._engaged = () if self._latency.refusal else tuple(engaged)
        self._drafters = drafters if self._engaged else []
        self.options = options

    def _drafter(self, name: str, corpus: Path | None) -> Drafter:
        """Return a drafter of the registry, made at first use; each conversation has its own drafter with a file."""
        row = DRAFTERS[name]
        if row.needs_model:
            assert self._cache.now.drafter is not None
            return self._cache.now.drafter
        corpus = corpus if row.needs_corpus else None
        if (name, corpus) not in self._made:
            tokens = []
            if corpus is not None:
                tokens = self.target.tokenize(untrusted.read_text(corpus, MOST_CORPUS_BYTES, failure=UsageError))
            self._made[name, corpus] = make(name, Parts(self.target.vocab_size, corpus=tokens))
        return self._made[name, corpus]

    def _new_file_drafter(self) -> ModelDrafter | HeadDrafter | None:
        if self.draft is None:
            return None
        pair = self._pair
        parts = Parts(self.target.vocab_size, pair.draft, target=pair.target, head=pair.head)
        drafter = make(self._head or "draft", parts)
        assert isinstance(drafter, ModelDrafter | HeadDrafter)
        return drafter

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Block answers meanwhile; UsageError if one is unfinished or the decoder is closed."""
        if not self._answering.acquire(blocking=False):
            raise _unfinished()
        try:
            if self._closed:
                raise _closed()
            yield
        finally:
            self._answering.release()

    def use(self, sequence: int, copy: int | None = None) -> None:
        """Answer in another conversation from now on; the other caches stay as they are.

        Args:
            sequence: 0 … ``options.parallel`` - 1.
            copy: start with a copy of that conversation's caches, if they can be copied (:class:`PromptCache`).

        Raises:
            UsageError: an answer is unfinished, or the decoder is closed.
        """
        with self._idle():
            self._cache.use(sequence, copy)
            self._drafters = [self._drafter(name, self.options.lookup_corpus) for name in self._engaged]

    def held(self, sequence: int) -> tuple[Sequence[int], int]:
        """Return the text at the start of a conversation's target cache, and how many tokens of it were the prompt."""
        conversation = self._cache.conversations[sequence]
        return conversation.texts.get("target", ()), conversation.prompt

    def configure(self, **changes: Unpack[AnswerOptions]) -> None:
        """Change how later answers are drafted and accepted, with the same models loaded.

        Raises:
            UsageError: an option that needs loading; a value out of range; a drafter or a draft length that the pair
                was not loaded for; an answer is unfinished, or the decoder is closed.
        """
        with self._idle():
            options = self.options.with_answer(
                changes,
                has_draft=self.draft is not None,
                rooms=self._pair.most_drafted,
                head=self._head,
            )
            try:
                self._engage(options)
            except BaseException:
                self._cache.forget()  # an interrupted measurement leaves the caches in an unknown state
                raise

    def _save(self) -> None:
        """Save acceptance, unless it was lossy, and measured speeds, unless the number of threads changed."""
        if not is_lossy(self.options.accept):  # lossy acceptance says nothing about exact drafts
            self._experience.save()
        if not self._pair.threads.changed:
            self._latency.save()

    def refresh(self, goes_on: Callable[[], bool] = lambda: True) -> bool:
        """Use a pause between two answers to repeat measurements that were disturbed, if the machine is idle now.

        ``goes_on`` is called before every batch; False ends it. Returns True if anything is left to measure.
        """
        with self._idle():
            threads = self._pair.threads
            threads.resume()
            self._pair.follow_threads()
            if self._latency.is_stale and threads.quiet:
                self._latency.refresh(goes_on)
            return self._latency.is_stale

    @property
    def target_runs_alone(self) -> bool:
        """True if target-only answers are as fast as in a decoder without drafters: nothing is reserved for drafts."""
        return self._pair.head is None and self._pair.target.rewind_kind == "exact"

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the active drafters; empty in a target-only decoder."""
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
            prompt: text to continue, or token ids. Control tokens such as ``<|im_start|>`` in a text are tokens, as in
                llama.cpp's completion; :func:`ggufspec.chat_prompt` makes a prompt by the model's chat template.
            max_tokens: tokens to emit at most.
            sampling: temperature, truncation, seed and penalties; greedy by default.
            stop: strings that end the answer and are not part of it.
            grammar: grammar of the answer, in llama.cpp's GBNF or from a chat template; empty for none.
            alone: ``target`` or ``draft`` to answer with that model only, in the same loop.
            cache_prompt: decode only the new part of the prompt. The cached part was computed in other batch sizes than
                a fresh prompt, so that a near-tie may choose another token.
            trace: records every round's probabilities and decisions.
            stopping: called between the batches of a long prompt; True ends the answer without a token. (To end it
                later, stop reading.)
            special: control tokens to include in the text, except those that end it.
            logprobs: how many of the likeliest tokens to list with each token; None for no log-probabilities.
            bias: logit offsets by token id.
            on_prompt: called with the number of cached prompt tokens before the prompt is read and between its batches.

        Raises:
            UsageError: the prompt or a stop string is empty, or the grammar is not valid; there is no draft model for
                ``alone="draft"``; another answer is unfinished, or the decoder is closed.
            ModelError: the prompt is longer than the context.
        """
        if not self._answering.acquire(blocking=False):
            raise _unfinished()
        try:
            request = AnswerRequest(
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
            self._unfinished = answer = self._answer(request)
            if self._closed:  # checked after the line above: close() looks at both in the other order
                raise _closed()
            yield from answer
        finally:
            self._unfinished = None
            self._answering.release()

    def _answer(self, request: AnswerRequest) -> Generator[Emitted]:
        answer = self._begun(request)
        try:
            yield from answer.give()
        finally:
            self._ended(answer)

    def _begun(self, request: AnswerRequest) -> Answer:
        answer = Answer(request, self.options, self._pair, self._cache, self._latency, self._drafters)
        self.rounds = answer.rounds
        return answer

    def _ended(self, answer: Answer) -> None:
        """Save an answer's statistics, experience and notes."""
        self.statistics, self.answer_target_only_s = answer.statistics, answer.target_only_s
        if not is_lossy(self.options.accept):
            self._experience.count(answer.rounds, self._engaged)
        failed = [(drafter.name, drafter.failure) for drafter in self._drafters if drafter.failure]
        self._note(*(f"the {DRAFTERS[name].label}: {failure}; it drafts no more" for name, failure in failed))
        self._note(self._pair.threads.note)
        if self.statistics.stop_reason == "grammar":
            self._note("the answer ends where the grammar permits no further token")

    @property
    def can_alternate(self) -> bool:
        """True if :meth:`alternate` is possible: the target's cache can rewind to any length at no cost."""
        return self.target_runs_alone and not self._pair.target.forgets

    def alternate(
        self,
        prompt: str | Sequence[int],
        *,
        target_first: bool = False,
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        grammar: str | Applied = "",
        cache_prompt: bool = False,
        stopping: Callable[[], bool] = lambda: False,
        most: float = math.inf,
    ) -> tuple[Half, Half]:
        """Answer a prompt with drafters and target-only, in turn segment by segment, until one answer ends.

        The arguments are :meth:`generate`'s. With ``target_first`` the target-only answer begins. ``stopping`` is also
        called between rounds. Both answers end after ``most`` tokens, with a whole round; the policy drafts as for
        ``max_tokens``.

        Returns:
            the answer with drafters, and the target-only one.

        Raises:
            UsageError, ModelError: as :meth:`generate`; or not :attr:`can_alternate`.
        """
        if not self.can_alternate:
            raise UsageError("this pair's target cannot give two answers in turn", "give them one after the other")
        request = AnswerRequest(
            prompt, max_tokens, sampling or Sampling(), stop, grammar, "", cache_prompt, stopping=stopping
        )
        begun: list[Answer] = []

        def begin(alone: str) -> Answer:
            begun.append(self._begun(replace(request, alone=alone)))
            return begun[-1]

        order = ("target", "") if target_first else ("", "target")
        with self._idle():
            try:
                turns = partial(begin, order[0]), partial(begin, order[1])
                first, second = alternate(*turns, stopping, most=most)
            finally:
                for answer in begun:
                    self._ended(answer)
        return (second, first) if target_first else (first, second)

    def _note(self, *notes: str) -> None:
        """Add notes that are neither empty nor already there."""
        self.notes += [note for note in notes if note and note not in self.notes]

    @property
    def target_only_s(self) -> float | None:
        """Seconds per token without a draft, as last observed; None if never measured."""
        return self._latency.target_only_s

    @property
    def cpu_threads(self) -> int:
        """Threads that the target needs on an idle machine; 1 if all of its weights are on GPUs."""
        placed = self.options.target
        is_split = self.target.gpu_layers <= self.target.layers or placed.n_cpu_moe or placed.n_cpu_ffn
        return self._pair.threads.cores if is_split or placed.override_tensor else 1

    @property
    def is_backing_off(self) -> bool:
        """True while nothing is drafted because drafting did not pay."""
        return self._latency.is_backing_off

    def close(self) -> None:
        """Free both models and their caches, save their measured speeds, and end an unfinished answer.

        Raises:
            UsageError: another thread is in the middle of a round, or reads a prompt.
        """
        self._closed = True
        if (answer := self._unfinished) is not None:
            try:
                answer.close()
            except ValueError:  # it is running
                self._closed = False
                raise _unfinished() from None
        else:
            with self._answering:  # wait for configure() in another thread
                pass
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _closed() -> UsageError:
    return UsageError("the decoder is closed", "make another SpeculativeDecoder")


def _unfinished() -> UsageError:
    return UsageError("an answer of this decoder is unfinished", "exhaust or close() its generator first")
