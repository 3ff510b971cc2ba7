"""A draft for llama-cpp-python's ``Llama``: the public entry point is :mod:`ggufspec.hook`.

``Llama.generate`` calls its draft model with the text so far, verifies what it returns in the next batch, and calls
again with what it accepted and one token more. So each call learns from its own input how the draft before it went, and
from the clock how long the verification took; drafting itself is the loop's own (:mod:`ggufspec.decoding.loop`).
"""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ggufspec.decoding import loop
from ggufspec.decoding.decoder import require_same_vocabulary
from ggufspec.decoding.drafters import Drafter, Parts, make
from ggufspec.decoding.drafters.model import ModelDrafter
from ggufspec.decoding.loop import Round
from ggufspec.decoding.options import ROWS, DecoderOptions
from ggufspec.decoding.policy import latency_cache
from ggufspec.decoding.policy.adaptive import Adaptive
from ggufspec.decoding.policy.backoff import BackOff
from ggufspec.decoding.policy.base import Outcome, Policy
from ggufspec.decoding.policy.estimator import AcceptanceEstimator
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.decoding.policy.pair_latency import DRAFT_BUDGET_S
from ggufspec.decoding.rules import make_rule
from ggufspec.decoding.rules.base import DraftToken
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import ModelError, UsageError
from ggufspec.hardware.host import free_memory_bytes
from ggufspec.llamacpp.hook import Borrowed, LlamaDraftModel, close_with, forget_scores, scores_bytes
from ggufspec.llamacpp.model import Context, Model
from ggufspec.settings import FIXED_DRAFT_MAX

__all__ = ["DraftModel", "scores_bytes"]

Ids = npt.NDArray[np.intc]

_TIMED = 3  # rounds without a draft at the very first, which time target-only decoding
_PAUSE = 8.0  # times the seconds of its batch: a round that took longer waited for the reader


class DraftModel(LlamaDraftModel):  # type: ignore[misc]
    r"""Any small GGUF as the draft of a ``Llama``.

    >>> from llama_cpp import Llama
    >>> from ggufspec import demo_pair
    >>> from ggufspec.hook import DraftModel
    >>> target, draft = demo_pair()
    >>> llama = Llama(model_path=str(target), n_ctx=512, verbose=False)
    >>> model = DraftModel(draft, llama, threads=1)
    >>> llama("import os\n\ndef ", max_tokens=24, temperature=0)["choices"][0]["finish_reason"]
    'length'
    >>> llama.close()

    The text is the target's own: ``Llama`` samples every token itself and accepts a drafted one where it is the same.
    The draft proposes its likeliest token. How far it drafts follows from what it sees: how much of its drafts was
    accepted, its confidence, how long the target takes for so many tokens; where no draft pays, it proposes nothing.

    Its cache is kept from call to call and from answer to answer: what a text shares with the one before is not read
    again. It serves one ``Llama``, gives one answer at a time, like ``Llama`` itself, and is closed with it.

    The ``Llama`` may then fill its whole context: without ``logits_all=True`` its ``scores`` have room for ``n_batch``
    tokens, beyond which it fails with a draft; they keep nothing and take no memory from now on. With it they stay as
    they are, and may take :func:`scores_bytes` of host memory.

    Args:
        path: the draft's GGUF file.
        llama: the ``Llama`` that it serves; its ``draft_model`` is set.
        draft_max: the longest draft of a round, in tokens: 63, or 4 of the fixed policy.
        draft_policy: ``adaptive`` drafts as far as it pays, which may be not at all; ``fixed`` always as far.
        lookup: whether n-grams of the text draft too.
        ctx_size: tokens of its context; 0: as many as the ``Llama`` has. Beyond them it drafts nothing.
        gpu_layers: its layers on the GPU, the output layer included; negative, or more than it has, means all.
        split: shares of these layers for each device; empty leaves it to llama.cpp.
        threads: CPU threads; 0 means the physical cores.
        flash_attn: auto, on or off.
        ubatch_size: tokens of a prompt that are computed at once; 0: 512.
        cache: folder in which the draft's measured speed is cached; None caches nothing.

    Attributes:
        drafters: who drafts.
        notes: sentences for the user.
        rounds: of the answer that is being given, or the last one: those whose outcome is known. The first token of an
            answer and the last round, whose end ``Llama`` does not report, are not among them.
        scores_bytes: host memory that the ``Llama``'s ``scores`` may take.

    Raises:
        ModelError: the file is missing or damaged, does not fit, cannot take tokens back, or has another vocabulary;
            the target cannot take tokens back; the host has too little memory for the logits that the ``Llama`` keeps.
        UsageError: an option is out of range; the ``Llama`` is closed or missing.
    """

    def __init__(
        self,
        path: str | Path,
        llama: Any = None,
        *,
        draft_max: int | None = None,
        draft_policy: str = "adaptive",
        lookup: bool = False,
        ctx_size: int = 0,
        gpu_layers: int = 0,
        split: tuple[float, ...] = (),
        threads: int = 0,
        flash_attn: str = "auto",
        ubatch_size: int = 0,
        cache: Path | None = None,
    ) -> None:
        if llama is None:
            raise UsageError("a DraftModel needs the Llama that it serves", 'DraftModel("small.gguf", llama)')
        self.notes: list[str] = []
        self.rounds: list[Round] = []
        self._stack = ExitStack()
        self._free = weakref.finalize(self, self._stack.close)
        self._busy = threading.Lock()
        self._clock = time.perf_counter
        self._rule = make_rule("exact", Sampling())
        self._estimators: dict[str, AcceptanceEstimator] = {}
        self._back_off = BackOff()
        self._target: LatencyModel | None = None
        self._target_only_s: list[float] = []
        self._forget()
        try:
            target = Borrowed(llama)
            if not target.can_forget:
                raise ModelError(
                    f"{target.path.name} cannot take tokens back (recurrent memory), and Llama does not notice",
                    "ggufspec's own SpeculativeDecoder can draft for it",
                )
            self._room = min(len(llama.input_ids), llama.n_ctx())
            default = FIXED_DRAFT_MAX if draft_policy == "fixed" else ROWS - 1  # Llama's wide batches are not timed
            self.options = DecoderOptions(
                ctx_size=ctx_size or self._room,
                gpu_layers_draft=gpu_layers,
                draft_split=split,
                threads=threads,
                flash_attn=flash_attn,
                ubatch_size=ubatch_size,
                drafters=("draft", "lookup") if lookup else ("draft",),
                draft_policy=draft_policy,
                draft_max=default if draft_max is None else draft_max,
            )
            self.drafters = self.options.drafters
            self._most = min(self.options.draft_max, llama.n_batch - 1)  # a batch that is divided loses logits
            self.model = self._stack.enter_context(Model(Path(path), self.options.draft_placement))
            require_same_vocabulary(target, self.model, "choose a draft of the target's own family")
            self.scores_bytes, free = forget_scores(llama), free_memory_bytes()
            if self.scores_bytes > free:
                raise ModelError(
                    f"this Llama keeps the logits of {len(llama.input_ids):,} tokens, "
                    f"{self.scores_bytes / 1e6:,.0f} MB of host memory, and {free / 1e6:,.0f} MB are free",
                    "make it without logits_all=True: nothing is kept then",
                )
            self._open(target.vocab_size, cache)
        except BaseException:
            self.close()
            raise
        llama.draft_model = self
        close_with(llama, self._free)

    def _forget(self) -> None:
        """Nothing is known of the text."""
        self._text: list[int] = []
        self._chain: list[tuple[str, DraftToken]] = []
        self._held = np.empty(0, np.intc)  # the text, and what was drafted behind it
        self._policy: Policy | None = None
        self._drafting = False
        self._draft_s = self._catch_up_s = self._learning_s = self._returned = 0.0

    def _open(self, target_vocab_size: int, cache: Path | None) -> None:
        """Make the draft's context, time it, and make the drafters."""
        options = self.options.draft_context()
        self._context = context = self._stack.enter_context(closing(Context(self.model, options)))
        if not context.can_rewind:
            raise ModelError(f"{self.model.path.name} cannot take tokens back: it cannot be a draft", "choose another")
        made = [make(name, Parts(target_vocab_size, context)) for name in self.drafters]
        self._drafters: list[Drafter] = made
        self._drafter = next(drafter for drafter in made if isinstance(drafter, ModelDrafter))
        self._latencies: dict[str, LatencyModel] = {}
        if self.options.draft_policy == "adaptive":
            key = latency_cache.key(self.model.path, self.options.draft_placement, options, outputs=1)
            latency, notes = latency_cache.load_or_measure(context, key, cache, self._clock, budget_s=DRAFT_BUDGET_S)
            self._latencies["draft"], self._drafter.width = latency, latency.width
            self.notes += notes

    def __call__(self, input_ids: Ids, /, **kwargs: Any) -> Ids:  # noqa: ARG002 - of the protocol
        """The tokens that may follow ``input_ids``.

        Args:
            input_ids: (n,) the text so far; its last token was chosen by the target.
            kwargs: none are known.

        Returns:
            (k,) token ids, k from 0 to ``draft_max``.

        Raises:
            UsageError: it is closed, or in the midst of another call.
        """
        if not self._busy.acquire(blocking=False):
            raise UsageError("two threads call this draft at once", "a Llama and its draft give one answer at a time")
        try:
            if not self._free.alive:
                raise UsageError("this draft model is closed", "make another DraftModel")
            return self._answer(np.asarray(input_ids, np.intc))
        except BaseException:
            self._forget()
            raise
        finally:
            self._busy.release()

    def _answer(self, ids: Ids) -> Ids:
        began = self._clock()
        same = _same(self._held, ids)
        length = len(self._text)
        if length and length < len(ids) <= min(same, length + len(self._chain)) + 1:  # the round before, and no more
            emitted = tuple(ids[length:].tolist())
            self._text += emitted
            self._observe_round(emitted, began)
        else:
            self._start(ids.tolist(), same)
        policy = self._policy
        self._drafting = policy is not None and not policy.is_backing_off()
        self._chain, self._catch_up_s = [], 0.0
        if policy is not None and self._drafting:
            remaining, reading = max(0, self._room - len(ids)), self._clock()
            limit = min(self._most, remaining)
            policy.begin(limit, remaining, may_trim=self._rule.may_trim)
            told_s, _ = loop.catch_up(self._text, self._drafters, policy, self._rule, self._clock)
            self._catch_up_s = self._clock() - reading
            self._learning_s += self._catch_up_s - told_s
            self._chain = loop.draft(
                self._text, limit, self._drafters, policy, self._rule, self.model.is_end, self._clock
            )
        drafted = np.array([one.token for _, one in self._chain], np.intc)
        self._held = np.concatenate([ids, drafted])
        note = f"the draft model: {self._drafter.failure}; it drafts no more"
        if self._drafter.failure and note not in self.notes:
            self.notes.append(note)
        self._returned = self._clock()
        self._draft_s = self._returned - began
        return drafted

    def _start(self, text: list[int], same: int) -> None:
        """A new text, of which the one before and what was drafted behind it have so many tokens too."""
        read = self._drafter.has_read
        if self._context.rewind_kind != "exact" and same < read:
            same = 0
        self._text, self.rounds = text, []
        self._policy = self._make_policy()
        self._rule.begin(text)
        for drafter in self._drafters:
            drafter.begin(text, (), min(same, read))

    def _make_policy(self) -> Policy | None:
        """None as long as it is not known what the target takes."""
        if self.options.draft_policy == "fixed":
            return Policy()
        if self._target is None:
            return None
        return Adaptive(self._target, self._latencies, self._estimators, self._back_off)

    def _observe_round(self, emitted: tuple[int, ...], now: float) -> None:
        """How the last round went: all emitted tokens but the last one were drafted."""
        width, accepted = 1 + len(self._chain), len(emitted) - 1
        verify_s = now - self._returned
        names = tuple(name for name, _ in self._chain)
        drafted = tuple(one.token for _, one in self._chain)
        total_s = self._draft_s + verify_s
        self.rounds.append(Round(drafted, names, accepted, emitted, width, self._draft_s, verify_s, total_s))
        for drafter in self._drafters:
            drafter.commit(len(self._text) - 1)
        if self._policy is None:
            self._target_only_s.append(verify_s)
            if len(self._target_only_s) == _TIMED:
                points = {1: max(min(self._target_only_s), 1e-9)}
                self._target = LatencyModel(points, trusted=False, limit=self._most + 1, can_pad=False)
                self._policy = self._make_policy()
            return
        if self._target is not None:
            verify_s = min(verify_s, _PAUSE * self._target.seconds(width))
        learning = self._clock()
        total_s = self._draft_s - self._catch_up_s + verify_s
        self._policy.observe_round(Outcome(width, accepted, len(emitted), verify_s, total_s, self._learning_s))
        self._learning_s = self._clock() - learning

    def close(self) -> None:
        """Free the draft and its cache; it can draft no more. Done when its ``Llama`` is closed or it is forgotten.

        Raises:
            UsageError: another thread is in the midst of a call.
        """
        if not self._busy.acquire(blocking=False):
            raise UsageError("this draft is in the midst of a call", "close it when the answer has ended")
        try:
            self._free()
        finally:
            self._busy.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _same(held: Ids, ids: Ids) -> int:
    """Tokens that both begin with."""
    count = min(len(held), len(ids))
    differing = np.flatnonzero(held[:count] != ids[:count])
    return int(differing[0]) if differing.size else count
