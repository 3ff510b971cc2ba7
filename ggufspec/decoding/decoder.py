"""Public decoder, which loads a target and a draft from GGUF files and continues text."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self, Unpack

from ggufspec.decoding.alternate import AlternatingAnswer, alternate
from ggufspec.decoding.answer import AnswerRequest, Emitted, PairAnswer, Statistics
from ggufspec.decoding.drafters import Drafter, DrafterParts, make_drafter
from ggufspec.decoding.drafters.head import HeadDrafter
from ggufspec.decoding.drafters.model import ModelDrafter
from ggufspec.decoding.group import AnswerGroup
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
from ggufspec.llamacpp.chat_library import AppliedTemplate
from ggufspec.planning.history import fingerprint
from ggufspec.settings.registry import DRAFTERS, is_lossy

__all__ = ["MOST_CORPUS_BYTES", "Emitted", "SpeculativeDecoder", "Statistics"]

MOST_CORPUS_BYTES = 16 << 20  # a few million tokens, at up to 150 bytes of memory each


class SpeculativeDecoder:
    r"""Decoder for a target and, optionally, a draft model.

    >>> from ggufspec import SpeculativeDecoder, demo_pair
    >>> target, draft = demo_pair()
    >>> with SpeculativeDecoder(target, draft) as decoder:
    ...     text = "".join(e.text for e in decoder.generate("import os\\n\\ndef ", max_tokens=48))
    ...     alone = "".join(e.text for e in decoder.generate("import os\\n\\ndef ", max_tokens=48, alone="target"))
    >>> decoder.statistics.tokens
    48

    A decoder has ``options.parallel`` conversations, each with its own cache; :meth:`use` selects one. It generates one
    answer at a time, or with :meth:`group` one in each conversation. While an answer is unfinished, starting another
    answer or calling :meth:`configure` raises UsageError in any thread. :meth:`close` raises it only while another
    thread decodes a prompt or is in the middle of a round. Different threads may use different decoders.

    Args:
        target: path of the target's GGUF file.
        draft: path of the draft's GGUF file, or None.
        options: placement and decoding options. The draft is not loaded if they name only drafters without a model.
        cache: folder for measured latency models; None caches nothing.

    Attributes:
        target, draft: the two models.
        notes: sentences for the user about the run, e.g. on a disturbed measurement or a draft that never pays off.
        statistics: token counts and timings of the last answer.
        rounds: rounds of the last answer, in detail.
        answer_target_only_s: seconds per token without a draft in the last answer; None if unknown.

    Raises:
        ModelError: a file is missing or damaged, does not fit, or the draft has a different vocabulary.
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
        self._unfinished: Generator[Emitted] | AnswerGroup | None = None  # the answer or answers in progress
        self._closed = False
        self._stack = ExitStack()
        self._pair = pair = LoadedPair(Path(target), Path(draft) if draft else None, options or DecoderOptions())
        self._stack.callback(pair.close)
        try:
            self._note(*pair.notes)
            self.target, self.draft, self.options = pair.model, pair.draft_model, pair.options
            self._head = self.options.head  # name of the head that is loaded as the draft, if any
            self._made: dict[tuple[str, Path | None], list[Drafter]] = {}  # drafters without a file, by name and corpus
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
        """Return fingerprints of the target and each drafter's file (both need ``cache``); without a file, the name."""
        target, draft = (fingerprint(cache, one.path) if cache and one else "" for one in (self.target, self.draft))
        drafters = {name: name for name, row in DRAFTERS.items() if not row.needs_model}
        return target, drafters | ({self._head or "draft": draft} if draft else {})

    def _engage(self, options: DecoderOptions) -> None:
        """Make the drafters that the options name, and switch to the options if that succeeds."""
        engaged = options.drafters if options.drafts(with_draft=self.draft is not None) else ()
        for name in engaged:
            self._drafter(name, options.lookup_corpus)
        self._latency.configure(options)
        for conversation in self._cache.conversations:
            if isinstance(conversation.drafter, ModelDrafter):
                conversation.drafter.batch_size = self._latency.draft_batch_size
        self._note(*self._latency.notes, self._latency.refusal)
        self._engaged = () if self._latency.refusal else tuple(engaged)
        self.options = options

    def _drafter(self, name: str, corpus: Path | None, in_use: Collection[Drafter] = ()) -> Drafter:
        """Return the current conversation's drafter if ``name`` needs the draft file, otherwise a drafter that is not
        ``in_use``, which is created if necessary.
        """
        row = DRAFTERS[name]
        if row.needs_model:
            assert self._cache.now.drafter is not None
            return self._cache.now.drafter
        corpus = corpus if row.needs_corpus else None
        made = self._made.setdefault((name, corpus), [])
        if (idle := next((one for one in made if one not in in_use), None)) is not None:
            return idle
        tokens = []
        if corpus is not None and not made:
            tokens = self.target.tokenize(untrusted.read_text(corpus, MOST_CORPUS_BYTES, failure=UsageError))
        like = made[0] if made else None
        made.append(make_drafter(name, DrafterParts(self.target.vocab_size, corpus=tokens, like=like)))
        return made[-1]

    def _new_file_drafter(self) -> ModelDrafter | HeadDrafter | None:
        if self.draft is None:
            return None
        pair = self._pair
        parts = DrafterParts(self.target.vocab_size, pair.draft, target=pair.target, head=pair.head)
        drafter = make_drafter(self._head or "draft", parts)
        assert isinstance(drafter, ModelDrafter | HeadDrafter)
        return drafter

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Prevent new answers in the ``with`` block; raise UsageError if one is unfinished or the decoder is closed."""
        if not self._answering.acquire(blocking=False):
            raise _unfinished()
        try:
            if self._closed:
                raise _closed()
            yield
        finally:
            self._answering.release()

    def use(self, sequence: int, copy: int | None = None) -> None:
        """Switch to another conversation; the other conversations' caches stay as they are.

        Args:
            sequence: 0 … ``options.parallel`` - 1.
            copy: conversation whose caches to copy first, if they can be copied (:class:`PromptCache`).

        Raises:
            UsageError: an answer is unfinished, or the decoder is closed.
        """
        with self._idle():
            self._cache.use(sequence, copy)

    def held(self, sequence: int) -> tuple[Sequence[int], int]:
        """Return a conversation's text, which begins with the target's cached tokens, and its last prompt's length."""
        conversation = self._cache.conversations[sequence]
        return conversation.texts.get("target", ()), conversation.prompt

    def configure(self, **changes: Unpack[AnswerOptions]) -> None:
        """Change how later answers are drafted and accepted, with the same models loaded.

        Raises:
            UsageError: an option can only be set at load time, a value is out of range, or the pair was not loaded for
                the drafter or draft length; an answer is unfinished, or the decoder is closed.
        """
        with self._idle():
            options = self.options.with_answer(
                changes,
                has_draft=self.draft is not None,
                max_draft_length=self._pair.max_draft_length,
                head=self._head,
            )
            try:
                self._engage(options)
            except BaseException:
                self._cache.forget()  # an interrupted measurement leaves the caches in an unknown state
                raise

    def _save(self) -> None:
        """Save acceptance statistics, unless lossy, and measured speeds, unless the number of threads changed."""
        if not is_lossy(self.options.accept):  # lossy acceptance says nothing about exact acceptance
            self._experience.save()
        if not self._pair.threads.changed:
            self._latency.save()

    def refresh(self, goes_on: Callable[[], bool] = lambda: True) -> bool:
        """Repeat disturbed measurements in a pause between two answers, if the machine is idle now.

        ``goes_on`` is called before every batch; False stops measuring. Returns True if anything is left to measure.
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
        return self._engaged

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        grammar: str | AppliedTemplate = "",
        alone: str = "",
        cache_prompt: bool = False,
        trace: Trace | None = None,
        stopping: Callable[[], bool] | None = None,
        special: Collection[int] = (),
        logprobs: int | None = None,
        bias: Mapping[int, float] | None = None,
        on_prompt: Callable[[int], None] | None = None,
        prediction: str | Sequence[int] = (),
    ) -> Generator[Emitted]:
        """Yield the tokens of one answer as they are accepted; ``statistics`` describes it afterwards.

        Args:
            prompt: text to continue, or token ids. In a text, ``<|im_start|>`` and the like are control tokens, as in
                llama.cpp's completion; :func:`ggufspec.chat_prompt` makes a prompt by the model's chat template.
            max_tokens: maximum number of tokens to emit.
            sampling: temperature, truncation, seed and penalties; greedy by default.
            stop: strings that end the answer and are not part of it.
            grammar: grammar of the answer, in llama.cpp's GBNF or from a chat template; empty for none.
            alone: ``target`` or ``draft`` to answer with that model only, in the same loop.
            cache_prompt: decode only the new part of the prompt. The cached part may have been decoded in other batch
                sizes than a fresh prompt, so a near tie may resolve to another token.
            trace: records every round's probabilities and decisions.
            stopping: called between the batches of a long prompt; True ends the answer without a token. (To end it
                later, stop iterating.)
            special: control tokens to include in the text; tokens that end the answer are never included.
            logprobs: number of likeliest tokens to list with each token; None for no log-probabilities.
            bias: logit offsets by token id.
            on_prompt: called with the number of prompt tokens in the cache, before prefill and between its batches.
            prediction: text, or token ids, that the answer is expected to repeat for the most part, e.g. the file that
                it edits. It is ignored without active drafters. A wrong one costs time but never changes the text.

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
                prediction,
            )
            self._unfinished = answer = self._answer(request)
            if self._closed:  # checked after the assignment, because close() sets this flag first
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

    def _begun(self, request: AnswerRequest, others: Sequence[PairAnswer] = ()) -> PairAnswer:
        """Begin an answer in the current conversation; ``others`` are unfinished answers in other conversations."""
        if self._closed:
            raise _closed()
        in_use = [drafter for answer in others for drafter in answer.drafters]
        drafters = [self._drafter(name, self.options.lookup_corpus, in_use) for name in self._engaged]
        apart = any(answer.teaches for answer in others)
        parts = self.options, self._pair, self._cache, self._latency, drafters
        answer = PairAnswer(request, *parts, apart=apart, has_others=bool(others))
        self.rounds = answer.rounds
        return answer

    def _ended(self, answer: PairAnswer) -> None:
        """Store an answer's statistics and notes, and count which drafted tokens were accepted."""
        self.statistics, self.answer_target_only_s = answer.statistics, answer.target_only_s
        # Target-only, draft-only and predicted answers say nothing about the drafters in other answers
        if not (answer.alone or self.statistics.predicted or is_lossy(self.options.accept)):
            self._experience.count(answer.rounds, self._engaged)
        failed = [(drafter.name, drafter.failure) for drafter in answer.drafters if drafter.failure]
        self._note(*(f"the {DRAFTERS[name].label}: {failure}; it drafts no more" for name, failure in failed))
        self._note(self._pair.threads.note)
        if self.statistics.stop_reason == "grammar":
            self._note("the answer ends where the grammar permits no further token")

    @contextmanager
    def group(self) -> Iterator[AnswerGroup]:
        """Generate several answers at once inside the ``with``, each in its own conversation (``options.parallel``).

        Raises:
            UsageError: an answer is unfinished, or the decoder is closed.
        """
        with self._idle():
            self._unfinished = group = AnswerGroup(self._pair, self._cache, self._latency, self._begun, self._ended)
            try:
                yield group
            finally:
                self._unfinished = None
                group.close()

    def generate_many(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        grammar: str | AppliedTemplate = "",
        cache_prompt: bool = False,
    ) -> Generator[tuple[int, Emitted]]:
        """Answer several prompts, up to ``options.parallel`` at once; yield (prompt index, token) pairs.

        The arguments are those of :meth:`generate`. Each text depends only on its own prompt and the seed, except at
        near ties; in strict mode there are no exceptions.

        Raises:
            UsageError, ModelError: see :meth:`generate`; an error ends the other answers, too.
        """
        requests = deque(
            AnswerRequest(prompt, max_tokens, sampling or Sampling(), stop, grammar, cache_prompt=cache_prompt)
            for prompt in prompts
        )
        free, given = deque(range(self.options.parallel)), deque[tuple[int, Emitted]]()
        with self.group() as group:
            while requests or group.running:
                if self._closed:
                    raise _closed()
                while requests and free:
                    index = len(prompts) - len(requests)

                    def take(emitted: Emitted, index: int = index) -> bool:
                        given.append((index, emitted))
                        return True

                    group.begin(free.popleft(), requests.popleft(), take)
                for ended in group.step():
                    free.append(ended.sequence)
                    if ended.failure is not None:
                        raise ended.failure
                while given:
                    yield given.popleft()

    @property
    def can_alternate(self) -> bool:
        """True if :meth:`alternate` is possible, i.e. if the target's cache can rewind to any length at no cost."""
        return self.target_runs_alone and not self._pair.target.forgets

    def alternate(
        self,
        prompt: str | Sequence[int],
        *,
        target_first: bool = False,
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        grammar: str | AppliedTemplate = "",
        cache_prompt: bool = False,
        stopping: Callable[[], bool] = lambda: False,
        most: float = math.inf,
    ) -> tuple[AlternatingAnswer, AlternatingAnswer]:
        """Answer a prompt twice, with drafters and target-only, alternating by segment until one answer ends.

        The arguments are those of :meth:`generate`. With ``target_first`` the target-only answer goes first.
        ``stopping`` is also called between rounds. Both answers end with the round that reaches ``most`` tokens, but
        the policy drafts as if they could reach ``max_tokens``.

        Returns:
            the answer with drafters, and the target-only one.

        Raises:
            UsageError, ModelError: see :meth:`generate`; UsageError also if :attr:`can_alternate` is False.
        """
        if not self.can_alternate:
            raise UsageError("this pair's target cannot give two answers in turn", "give them one after the other")
        request = AnswerRequest(
            prompt, max_tokens, sampling or Sampling(), stop, grammar, cache_prompt=cache_prompt, stopping=stopping
        )
        begun: list[PairAnswer] = []

        def begin(alone: str) -> PairAnswer:
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
        """Add the notes that are neither empty nor already listed."""
        self.notes += [note for note in notes if note and note not in self.notes]

    @property
    def target_only_s(self) -> float | None:
        """Seconds per token without a draft, as last observed; None if never measured."""
        return self._latency.target_only_s()

    @property
    def cpu_threads(self) -> int:
        """Threads that the target needs on an idle machine; 1 if all of its weights are on GPUs."""
        placed = self.options.target
        is_split = self.target.gpu_layers <= self.target.layers or placed.n_cpu_moe or placed.n_cpu_ffn
        return self._pair.threads.cores if is_split or placed.override_tensor else 1

    @property
    def is_backing_off(self) -> bool:
        """True while nothing is drafted because drafting did not pay off."""
        return self._latency.is_backing_off

    def close(self) -> None:
        """End an unfinished answer, save acceptance statistics and measured speeds, and free the models and caches.

        Raises:
            UsageError: another thread is in the middle of a round or of prefill.
        """
        self._closed = True
        if (answer := self._unfinished) is not None:
            try:
                answer.close()
            except ValueError:  # its generator is running
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
