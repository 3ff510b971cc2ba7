"""The public decoder: a target and a draft from GGUF files, text in, text out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from ggufspec.decoding.acceptance import make_rule
from ggufspec.decoding.loop import Drafter, ModelDrafter, Round, generate, read
from ggufspec.decoding.loop import Model as LoopModel
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.text import TextStream
from ggufspec.decoding.widths import lock_widths
from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.model import Context, Model
from ggufspec.pairs.compat import Vocabulary, vocabulary_mismatch

_Owned = TypeVar("_Owned", Model, Context)


@dataclass(frozen=True, slots=True)
class Statistics:
    """What one answer took.

    ``decode_s`` counts from the end of the prompt to the last token; ``draft_s`` and ``verify_s`` are parts of it.
    ``drafted_by_position`` and ``accepted_by_position`` count tokens at each place of the draft.
    ``stop_reason`` is ``end`` (the model's own), ``stop`` (a stop string), ``length``, ``context``, or empty where the
    caller left off.
    """

    prompt_tokens: int
    prompt_s: float
    tokens: int
    decode_s: float
    rounds: int
    drafted: int
    accepted: int
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    draft_s: float
    verify_s: float
    stop_reason: str


@dataclass(frozen=True, slots=True)
class Emitted:
    """One token of the answer. ``text`` is what became certain with it; it may be empty or end an earlier character."""

    token: int
    text: str
    drafted: bool


class SpeculativeDecoder:
    r"""Decodes with a target and, where given, a draft model.

    >>> from ggufspec import SpeculativeDecoder, demo_pair
    >>> target, draft = demo_pair()
    >>> with SpeculativeDecoder(target, draft) as decoder:
    ...     text = "".join(e.text for e in decoder.generate("import os\\n\\ndef ", max_tokens=48))
    ...     alone = "".join(e.text for e in decoder.generate("import os\\n\\ndef ", max_tokens=48, use_draft=False))
    >>> decoder.statistics.tokens
    48

    Not safe for use from several threads at once: a decoder is one conversation with one cache.

    Args:
        target: path of the target's GGUF file.
        draft: path of the draft's, or None.
        options: placement and decoding.

    Raises:
        ModelError: a file is missing or damaged, does not fit, or the draft's vocabulary is another.
    """

    def __init__(self, target: Path, draft: Path | None = None, options: DecoderOptions | None = None) -> None:
        self.options = options = options or DecoderOptions()
        self.statistics: Statistics | None = None
        self._closers: list[Model | Context] = []
        try:
            self.target = self._own(Model(target, options.placement))
            self.draft = self._own(Model(draft, options.draft_placement)) if draft else None
            if self.draft:
                _require_same_vocabulary(self.target, self.draft)
            target_context = self._own(Context(self.target, options.context(with_draft=draft is not None)))
            self._target: LoopModel = lock_widths(target_context) if options.strict else target_context
            self._drafter: Drafter | None = None
            if self.draft:
                draft_context = self._own(Context(self.draft, options.draft_context()))
                for one in (target_context, draft_context):
                    if not one.can_rewind:
                        raise ModelError(
                            f"{one.model.path.name} cannot take tokens back (recurrent memory): it can be in no pair",
                            "run the target alone with --no-draft",
                        )
                self._drafter = ModelDrafter(draft_context, self.target.is_end, self.target.vocab_size)
        except BaseException:
            self.close()
            raise

    def _own(self, thing: _Owned) -> _Owned:
        self._closers.append(thing)
        return thing

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        use_draft: bool = True,
        rounds: list[Round] | None = None,
    ) -> Iterator[Emitted]:
        """Yield the tokens of one answer as they are accepted; ``statistics`` describes it afterwards.

        Args:
            prompt: text, or token ids.
            max_tokens: tokens to emit at most.
            sampling: temperature, truncation and seed; greedy by default.
            stop: strings that end the answer and are not part of it.
            use_draft: False runs the target alone, in the same loop.
            rounds: a list to which every round is appended, for those who want the details.

        Raises:
            UsageError: the prompt or a stop string is empty.
            ModelError: the prompt is longer than the context.
        """
        tokens = self.target.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise UsageError("the prompt is empty", 'give one with -p "…", -f FILE, or - for standard input')
        if len(tokens) > self.options.n_ctx:
            raise ModelError(
                f"the prompt has {len(tokens):,} tokens and the context holds {self.options.n_ctx:,}",
                f"-c {-(-(len(tokens) + max_tokens) // 256) * 256} would hold it",
            )
        if "" in stop:
            raise UsageError("an empty stop string would end every answer at once", "leave it away")
        rule = make_rule(self.options.accept, sampling or Sampling())
        drafter = self._drafter if use_draft else None
        clock = time.perf_counter
        tally = _Tally(self.options.draft_max if drafter else 0, len(tokens))
        stream = TextStream(stop)
        began = clock()
        read(self._target, tokens, drafter)
        tally.prompt_s = clock() - began
        try:
            for round_ in generate(
                self._target,
                tokens,
                rule,
                max_tokens=max_tokens,
                is_end=self.target.is_end,
                drafter=drafter,
                draft_max=self.options.draft_max,
                clock=clock,
            ):
                tally.add(round_)
                if rounds is not None:
                    rounds.append(round_)
                for place, token in enumerate(round_.emitted):
                    tally.tokens += 1
                    text = stream.push(self.target.piece(token))
                    tally.stop_reason = self._stop_reason(
                        token, stream, len(tokens) + tally.tokens, tally.tokens >= max_tokens
                    )
                    yield Emitted(token, text + (stream.finish() if tally.stop_reason else ""), place < round_.accepted)
                    if tally.stop_reason:
                        return
        finally:
            self.statistics = tally.statistics()

    def _stop_reason(self, token: int, stream: TextStream, length: int, enough: bool) -> str:
        """Why the answer ends with this token; empty where it goes on."""
        if stream.stopped:
            return "stop"
        if self.target.is_end(token):
            return "end"
        if enough:
            return "length"
        return "context" if length > self.options.n_ctx else ""

    def close(self) -> None:
        """Free both models and their caches; the decoder is of no use afterwards."""
        while self._closers:
            self._closers.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Tally:
    """Adds rounds up to :class:`Statistics`."""

    def __init__(self, draft_max: int, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.prompt_s = self.decode_s = self.draft_s = self.verify_s = 0.0
        self.tokens = self.rounds = 0
        self.drafted, self.accepted = [0] * draft_max, [0] * draft_max
        self.stop_reason = ""

    def add(self, round_: Round) -> None:
        self.rounds += 1
        self.decode_s += round_.total_s
        self.draft_s += round_.draft_s
        self.verify_s += round_.verify_s
        for place in range(len(round_.drafted)):
            self.drafted[place] += 1
            self.accepted[place] += place < round_.accepted

    def statistics(self) -> Statistics:
        return Statistics(
            prompt_tokens=self.prompt_tokens,
            prompt_s=self.prompt_s,
            tokens=self.tokens,
            decode_s=self.decode_s,
            rounds=self.rounds,
            drafted=sum(self.drafted),
            accepted=sum(self.accepted),
            drafted_by_position=tuple(self.drafted),
            accepted_by_position=tuple(self.accepted),
            draft_s=self.draft_s,
            verify_s=self.verify_s,
            stop_reason=self.stop_reason,
        )


def _require_same_vocabulary(target: Model, draft: Model) -> None:
    reason = vocabulary_mismatch(*(Vocabulary(*model.vocabulary_kind, model.vocabulary()) for model in (target, draft)))
    if reason:
        raise ModelError(
            f"{draft.path.name} cannot draft for {target.path.name}: {reason}",
            "choose a draft of the target's own family, or --no-draft",
        )
