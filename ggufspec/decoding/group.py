"""Generation of several answers at once with one pair, each in its own conversation.

A step lets the answers draft, one token of each per batch of the draft model. Then it decodes the next tokens of all
answers and part of one prompt in one target batch. The weights are thus read once for all of them, and a long prompt
does not stall the other answers. Each answer drafts by its own policy, which knows how many tokens the others put into
the batches (:class:`~ggufspec.decoding.policy.base.Load`).

If one batch cannot hold tokens of several sequences (:attr:`ggufspec.llamacpp.model.Context.can_share`), the answers
take turns, round by round. Strict mode works this way, because a text's rounding must not depend on other texts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ggufspec.decoding.answer import AnswerRequest, Emitted, PairAnswer, Steps
from ggufspec.decoding.batch import WITH_PROMPT, Batch, Decoded
from ggufspec.decoding.pair import LoadedPair
from ggufspec.decoding.policy.base import Load
from ggufspec.decoding.policy.pair_latency import PairLatency
from ggufspec.decoding.prompt_cache import PromptCache
from ggufspec.errors import GgufspecError
from ggufspec.llamacpp.model import Context, Logits, SequencePart

_clock = time.perf_counter
_PAUSE_S = 0.75  # desired seconds for decoding part of a prompt while other answers wait
_LEAST_BATCH = 32  # minimum tokens of such a batch; a smaller one would not be much faster
_TILE = 16  # batch sizes to prefer are multiples; with 33 instead of 32 tokens, one CPU took 16 % longer
_STEP = 0.3  # weight of the newest round in an answer's mean load


@dataclass(eq=False, slots=True)
class RunningAnswer:
    """An unfinished answer in a group.

    Attributes:
        sequence: index of the answer's conversation.
        answer: the answer.
        take: called with each token as it is accepted; False ends the answer.
        failure: why the answer ended early; None if nothing failed.
    """

    sequence: int
    answer: PairAnswer
    take: Callable[[Emitted], bool]
    failure: GgufspecError | None = None
    steps: Steps = field(init=False)
    batch: Batch | None = None  # next batch to decode; None before the first step and at the end
    read: int = 0  # number of tokens of a prompt batch that are already decoded
    read_s: float = 0.0  # seconds that decoding these tokens took
    outside_s: float = 0.0  # seconds since the last target batch that the answer spent outside the target
    load: Load = field(default_factory=lambda: Load(1, 1.0))  # load that this answer puts on the others, a decayed mean

    def __post_init__(self) -> None:
        self.steps = self.answer.steps()

    @property
    def decodes(self) -> bool:
        """True if the next batch cannot be decoded in parts, as a prompt can."""
        return self.batch is not None and not self.batch.is_prompt

    @property
    def is_drafting(self) -> bool:
        """True if the next batch is one token of a draft, or a few."""
        return self.decodes and self.batch is not None and self.batch.draft is not None

    @property
    def context(self) -> Context:
        """Context that decodes the next batch."""
        return (self.batch and self.batch.draft) or self.answer.context

    @property
    def left(self) -> int:
        """Number of tokens in the next batch that are not decoded yet; that of a long prompt has some hundreds."""
        return len(self.batch.tokens) - self.read if self.batch is not None else 0

    @property
    def whole(self) -> _Part:
        """The next batch, undivided."""
        assert self.batch is not None
        return _Part(self, self.batch.tokens, self.batch.outputs)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """An answer's tokens in a batch; ``is_last`` is False if more of its prompt follows."""

    one: RunningAnswer
    tokens: Sequence[int]
    outputs: int
    is_last: bool = True


class AnswerGroup:
    """Answers that a pair generates at once, as the module's docstring explains. Not thread-safe.

    Args:
        pair: the pair, which nothing else may use meanwhile.
        cache: the pair's conversations.
        latency: the pair's latency models.
        begin: returns a new answer to a request in the current conversation, given the unfinished answers in others.
        end: called with each answer when it ends.
    """

    def __init__(
        self,
        pair: LoadedPair,
        cache: PromptCache,
        latency: PairLatency,
        begin: Callable[[AnswerRequest, Sequence[PairAnswer]], PairAnswer],
        end: Callable[[PairAnswer], None],
    ) -> None:
        self.running: list[RunningAnswer] = []
        self._pair, self._cache, self._latency = pair, cache, latency
        self._begin, self._end = begin, end
        self._prompt_rates: dict[Context, float] = {}  # tokens per second in the last batch with part of a prompt
        self.batches = 0  # target batches with the next tokens of one or more answers
        self._drafting = 0.0  # number of answers in a batch of the draft model, a decayed mean
        self._is_stepping = False

    def begin(
        self, sequence: int, request: AnswerRequest, take: Callable[[Emitted], bool], copy: int | None = None
    ) -> RunningAnswer:
        """Begin an answer in a conversation without an unfinished one; decoding starts with the next step.

        ``copy`` is the conversation whose caches to copy first (:meth:`PromptCache.use`).

        Raises:
            UsageError, ModelError: as in :meth:`ggufspec.decoding.decoder.SpeculativeDecoder.generate`.
        """
        if any(one.sequence == sequence for one in self.running):
            raise ValueError(f"the conversation {sequence} has an unfinished answer")
        self._check_between_steps()
        self._cache.use(sequence, copy)
        one = RunningAnswer(sequence, self._begin(request, [other.answer for other in self.running]), take)
        self.running.append(one)
        self._drafting = float(len(self.running))
        return one

    def step(self) -> list[RunningAnswer]:
        """Decode one batch for all answers and part of a prompt; return the answers that have ended."""
        self._check_between_steps()
        before, self._is_stepping = [*self.running], True
        try:
            self._step()
        finally:
            self._is_stepping = False
        return [one for one in before if one not in self.running]

    def _step(self) -> None:
        for one in [*self.running]:
            if not one.decodes and one.answer.is_unwanted:
                self._close(one)
            elif one.batch is None:
                self._advance(one, None)
        target = self._pair.target
        for context in {one.context for one in self.running} - {target}:
            self._decode(context, self._parts(context))
        while drafting := [one for one in self.running if one.is_drafting]:
            self._decode(drafting[0].context, [one.whole for one in drafting])
        self._decode(target, self._parts(target))

    def _parts(self, context: Context) -> list[_Part]:
        """Return the next tokens of all answers that ``context`` decodes, and as the last part of one prompt.

        It is the prompt with the fewest tokens left, so that a short one need not wait for a long one.
        """
        wanting = [one for one in self.running if one.context is context and not one.is_drafting]
        parts = [one.whole for one in wanting if one.decodes]
        reading = min((one for one in wanting if not one.decodes), key=lambda one: one.left, default=None)
        return [*parts, self._prompt_part(reading, sum(len(part.tokens) for part in parts))] if reading else parts

    def _prompt_part(self, one: RunningAnswer, others: int) -> _Part:
        """Return the next part of a prompt for a batch with ``others`` tokens of other answers: all of it if no other
        answer waits, else what takes about ``_PAUSE_S``.
        """
        batch = one.batch
        assert batch is not None
        left = batch.tokens[one.read :]
        rate = self._prompt_rates.get(one.context, 0.0)
        size = min(max(_LEAST_BATCH, round(rate * _PAUSE_S / _TILE) * _TILE), one.context.batch)
        count = max(_TILE, size - others)
        is_waited_for = any(other is not one for other in self.running)
        if self._pair.options.strict or not is_waited_for or count >= len(left):
            return _Part(one, left, batch.outputs)
        count = min(count, len(left) - max(batch.outputs, 1))  # the last part must contain all tokens that need logits
        return _Part(one, left[:count], 0, is_last=False)

    def close(self) -> None:
        """End all answers.

        Raises:
            ValueError: another thread is taking a step.
        """
        self._check_between_steps()
        for one in [*self.running]:
            self._close(one)

    def _check_between_steps(self) -> None:
        if self._is_stepping:
            raise ValueError("a step is being taken")

    def _close(self, one: RunningAnswer) -> None:
        self._cache.use(one.sequence, None)
        one.steps.close()
        self._finish(one)

    # ---- batches ---------------------------------------------------------------------------------------------------

    def _decode(self, context: Context, parts: Sequence[_Part]) -> None:
        """Decode parts of batches, in as few batches of ``context`` as possible."""
        if len(parts) > 1 and context.can_share:
            self._decode_together(context, parts)
        else:
            for part in parts:
                self._decode_alone(part)

    def _decode_together(self, context: Context, parts: Sequence[_Part]) -> None:
        while parts:
            count, outputs, batch = 0, 0, list[SequencePart]()
            for part in parts:
                more, rows = count + len(part.tokens), outputs + part.outputs
                if batch and (rows > context.max_outputs or more > context.batch):
                    break
                count, outputs = more, rows
                batch.append(SequencePart(part.one.sequence, part.tokens, part.outputs))
            now, parts = parts[: len(batch)], parts[len(batch) :]
            if len(now) == 1:
                self._decode_alone(now[0])
                continue
            of_target, is_mixed = context is self._pair.target, any(not part.one.decodes for part in now)
            drafts, size = now[0].one.is_drafting, count
            if not is_mixed and (of_target or drafts):
                size = self._latency.padded(count, context.max_outputs - outputs, of_draft=not of_target)
            self.batches += of_target and any(part.one.decodes for part in now)
            began = _clock()
            with self._failing([part.one for part in now]):
                found = context.decode_together(batch, size)
                seconds = _clock() - began
                if is_mixed:
                    self._prompt_rates[context] = count / seconds
                elif of_target:
                    self._latency.observe(size, seconds)
                elif drafts:
                    self._latency.observe_draft(size, seconds)
                    self._drafting += _STEP * (len(now) - self._drafting)
                for part, logits in zip(now, found, strict=True):
                    share = len(part.tokens) / count if drafts else 1.0
                    self._decoded(part, logits, share * seconds, WITH_PROMPT if is_mixed else size)

    def _decode_alone(self, part: _Part) -> None:
        """Decode an answer's part in a batch of its own."""
        one = part.one
        assert one.batch is not None
        self._cache.use(one.sequence, None)
        if one.is_drafting:
            self._drafting += _STEP * (1 - self._drafting)
        self.batches += one.decodes and one.context is self._pair.target
        began = _clock()
        with self._failing([one]):
            rows = one.context.decode(part.tokens, part.outputs, one.batch.batch_size)
            if not part.outputs:
                one.context.synchronize()
            seconds = _clock() - began
            if not one.decodes:
                self._prompt_rates[one.context] = len(part.tokens) / seconds
            self._decoded(part, rows, seconds, 0)

    def _decoded(self, part: _Part, rows: Logits, seconds: float, size: int) -> None:
        """Pass an answer the logits for its part of a batch, once all parts of the answer's own batch are decoded."""
        one = part.one
        if one.decodes:
            one.outside_s += seconds * one.is_drafting
            self._advance(one, Decoded(rows, seconds, size))
            return
        one.read, one.read_s = one.read + len(part.tokens), one.read_s + seconds
        if part.is_last:
            self._advance(one, Decoded(rows, one.read_s))

    @contextmanager
    def _failing(self, parts: list[RunningAnswer]) -> Iterator[None]:
        """End the answers whose batch fails inside the ``with``, because their caches are then in an unknown state."""
        try:
            yield
        except BaseException as error:
            for one in parts:
                if one in self.running:
                    self._cache.use(one.sequence, None)
                    with suppress(type(error)):
                        one.steps.throw(error)
                    one.failure = error if isinstance(error, GgufspecError) else None
                    self._finish(one)
            if not isinstance(error, GgufspecError):
                raise

    def _advance(self, one: RunningAnswer, decoded: Decoded | None) -> None:
        """Pass an answer its decoded batch, and take its tokens up to its next batch or its end."""
        self._cache.use(one.sequence, None)
        answer, given, batch = one.answer, one.answer.count, one.batch
        answer.load = self._load_next_to(one)
        one.batch, one.read, one.read_s = None, 0, 0.0
        is_round = batch is not None and batch.draft is None and not batch.is_prompt
        began = _clock()
        try:
            step = next(one.steps) if decoded is None else one.steps.send(decoded)
            while not isinstance(step, Batch):
                if not one.take(step):
                    one.steps.close()
                    break
                step = next(one.steps)
            else:
                one.batch = step
        except StopIteration:
            pass
        except GgufspecError as error:
            one.failure = error
            one.steps.close()
        if batch is not None and is_round:
            now, keep = (len(batch.tokens), answer.count - given, one.outside_s), 1 - _STEP
            tokens, gained, seconds = (
                keep * old + _STEP * new
                for old, new in zip((one.load.tokens, one.load.gained, one.load.seconds), now, strict=True)
            )
            one.load, one.outside_s = Load(tokens, gained, seconds), 0.0
        one.outside_s += _clock() - began
        if one.batch is None:
            self._finish(one)

    def _finish(self, one: RunningAnswer) -> None:
        one.batch = None
        self.running.remove(one)
        self._end(one.answer)

    def _load_next_to(self, one: RunningAnswer) -> Load:
        """Return the load from the other answers on each batch."""
        target, draft = self._pair.target, self._pair.draft
        others = [other for other in self.running if other is not one and other.answer.context is target]
        if not (target.can_share and others):
            return Load()
        loads = [other.load for other in others if other.decodes]
        return Load(
            sum(load.tokens for load in loads),
            sum(load.gained for load in loads),
            sum(load.seconds for load in loads),
            prompt=_LEAST_BATCH * any(not other.decodes and other.context is target for other in others),
            drafting=max(0.0, self._drafting - 1) if draft and draft.can_share else 0.0,
            answers=len(loads),
        )
