"""A GGUF file as the draft model of llama-cpp-python's ``Llama``.

``Llama.generate`` calls its draft model with the text so far, verifies the returned tokens in the next batch, and calls
again with the accepted ones and one more token appended. Each call therefore learns from its input how the previous
draft fared, and from the clock how long its verification took. Drafting uses :mod:`ggufspec.decoding.loop`, which is
faster when it also runs the target: ``ggufspec bench --engine hook`` measures both.

Source: llama_cpp/llama.py in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ggufspec.decoding import loop
from ggufspec.decoding.batch import AnswerClock, decode_all
from ggufspec.decoding.drafters import DrafterParts, make_drafter
from ggufspec.decoding.drafters.model import ModelDrafter
from ggufspec.decoding.options import ROWS, DecoderOptions
from ggufspec.decoding.pair import require_same_vocabulary
from ggufspec.decoding.policy import latency_cache
from ggufspec.decoding.policy.adaptive import AdaptivePolicy
from ggufspec.decoding.policy.backoff import BackOff
from ggufspec.decoding.policy.base import DraftPolicy, RoundOutcome
from ggufspec.decoding.policy.draft_latency import DraftLatency
from ggufspec.decoding.policy.estimator import AcceptanceEstimator
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.decoding.policy.pair_latency import DRAFT_BUDGET_S
from ggufspec.decoding.rules import make_rule
from ggufspec.decoding.rules.base import DraftToken
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.library import imported, load_library
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import Placement
from ggufspec.models.locate import first_part
from ggufspec.settings.table import FIXED_DRAFT_MAX

imported()  # must come first: tells the user what to do if llama_cpp cannot be imported
from llama_cpp import Llama  # noqa: E402
from llama_cpp.llama_speculative import LlamaDraftModel  # noqa: E402

__all__ = ["BorrowedModel", "DraftModel", "Llama"]

Ids = npt.NDArray[np.intc]

_TIMED = 3  # number of initial rounds without a draft, to time target-only decoding
_PAUSE = 8.0  # maximum ratio of verification time to the batch's expected time; beyond it the caller was busy


class BorrowedModel(Model):
    """Model that a ``Llama`` loaded and will free; for inspection, not for decoding."""

    def __init__(self, llama: Llama) -> None:
        self._lib, self._handle, self.path = load_library(), llama.model, Path(llama.model_path)
        if not self._handle:
            raise UsageError("this Llama is closed", "make another Llama")
        self._vocab = self._lib.llama_model_get_vocab(self._handle)
        self._piece_buffer = ctypes.create_string_buffer(256)
        self.vocab_size = self._lib.llama_vocab_n_tokens(self._vocab)
        self.layers = self._lib.llama_model_n_layer(self._handle) + self._lib.llama_model_n_layer_nextn(self._handle)
        self.size_bytes = self._lib.llama_model_size(self._handle)

    def close(self) -> None:
        """Do nothing, because the ``Llama`` owns the model."""


class DraftModel(LlamaDraftModel):  # type: ignore[misc]
    r"""Draft model for a ``Llama``, from any small GGUF file.

    ``DraftModel("small.gguf", Llama("big.gguf"))`` is all it takes; docs/python.md has an example.

    The text is the target's own, because ``Llama`` samples every token itself and accepts a drafted token only if it is
    the same. The draft proposes its likeliest token, for as long as its acceptance, its confidence and the target's
    speed make that pay off. Its cache is retained between calls and answers, so a prefix that a text shares with the
    previous one is not decoded again. It serves one answer at a time and is closed with its ``Llama``.

    Args:
        path: the draft's GGUF file.
        llama: the ``Llama`` to draft for; its ``draft_model`` is set.
        draft_max: maximum draft length, in tokens; by default 15, or 4 with the fixed policy.
        draft_policy: ``adaptive`` drafts while it pays off, ``fixed`` always ``draft_max`` tokens.
        lookup: True to draft from n-grams in the text, too.
        ctx_size: context size of the draft, in tokens; 0: that of the ``Llama``. Longer texts get no drafts.
        cache: folder for the draft's measured speed; None caches nothing.
        gpu_layers, split, threads, flash_attn, ubatch_size: the draft's, as in :class:`ggufspec.DecoderOptions`.

    Attributes:
        notes: sentences for the user.
        rounds: rounds of the latest answer, except its first token and its last round, whose end ``Llama`` does not
            report.

    Raises:
        ModelError: the file is missing or damaged, does not fit, or has another vocabulary; draft or target cannot roll
            back tokens.
        UsageError: an option is out of range; the ``Llama`` is closed.
    """

    def __init__(
        self,
        path: str | Path,
        llama: Llama,
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
        target, lib = BorrowedModel(llama), load_library()
        if lib.llama_model_is_recurrent(llama.model) or lib.llama_model_is_hybrid(llama.model):
            raise ModelError(
                f"{target.path.name} cannot roll back tokens (recurrent memory), which Llama does not notice",
                "ggufspec's own SpeculativeDecoder can draft for it",
            )
        self._room = len(llama.input_ids)
        default = FIXED_DRAFT_MAX if draft_policy == "fixed" else ROWS - 1  # Llama's large batches are not timed
        self.options = DecoderOptions(
            ctx_size=ctx_size or self._room,
            draft=Placement(gpu_layers, split),
            threads=threads,
            flash_attn=flash_attn,
            ubatch_size=ubatch_size,
            drafters=("draft", "lookup") if lookup else ("draft",),
            draft_policy=draft_policy,
            draft_max=default if draft_max is None else draft_max,
        )
        self.drafters = self.options.drafters
        self._longest = min(self.options.draft_max, llama.n_batch - 1)  # logits are lost if Llama splits a batch
        self.notes: list[str] = []
        self.rounds: list[loop.Round] = []
        self._clock = time.perf_counter
        self._back_off = BackOff()
        self._estimators: dict[str, AcceptanceEstimator] = {}
        self._draft: LatencyModel | None = None
        self._drafts: dict[str, DraftLatency] = {}  # empty until the target is timed
        self._target: LatencyModel | None = None
        self._target_only_s: list[float] = []
        self._known = 0  # number of tokens in the text
        self._held = np.empty(0, np.intc)  # the text and the tokens drafted after it
        self._answer = self._rounds([], 0)
        options = self.options.draft_context()
        with ExitStack() as stack:
            self.model = model = stack.enter_context(Model(first_part(Path(path)), self.options.draft_placement))
            require_same_vocabulary(target, model, "choose a draft of the target's own family")
            context = Context(model, options)
            stack.callback(context.close)
            if not context.can_rewind:
                raise ModelError(f"{model.path.name} cannot roll back tokens: it cannot be a draft", "choose another")
            self._drafter = ModelDrafter(context, target.vocab_size)
            self._drafters = (
                self._drafter,
                *(make_drafter(name, DrafterParts(target.vocab_size)) for name in self.drafters[1:]),
            )
            if draft_policy == "adaptive":
                key = latency_cache.latency_key(model.path, self.options.draft_placement, options, outputs=1)
                found = latency_cache.load_or_measure(context, key, cache, self._clock, budget_s=DRAFT_BUDGET_S)
                self._draft, self.notes = found
                self._drafter.batch_size = self._draft.batch_size
            self._free = weakref.finalize(self, stack.pop_all().close)
        llama._stack.callback(self._free)
        # Llama copies all logits to ``scores``, which is large enough only with logits_all=True. If it is not, turn
        # copying off: verified tokens still get logits (set_batch below), and sampling reads llama.cpp's buffer.
        llama._logits_all &= len(llama.scores) >= self._room
        set_batch, batch_size = llama._batch.set_batch, self._longest + 1
        llama._batch.set_batch = lambda batch, n_past, logits_all: set_batch(
            batch, n_past, logits_all or len(batch) <= batch_size
        )
        llama.draft_model = self

    def __call__(self, input_ids: Ids, /, **_: Any) -> Ids:
        """Return (k,) tokens that may follow the text ``input_ids`` (n,), whose last token the target chose."""
        if not self._free.alive:
            raise UsageError("this draft model is closed", "make another DraftModel")
        ids = np.asarray(input_ids, np.intc)
        held, self._held = self._held, self._held[:0]  # _held stays empty if this call fails
        count = min(len(held), len(ids))
        same = int(np.append(held[:count] != ids[:count], True).argmax())
        if 0 < self._known < len(ids) <= same + 1:  # the text continues the last round
            drafted = self._answer.send(tuple(ids[self._known :].tolist()))
        else:
            self._answer = self._rounds(ids.tolist(), same)
            drafted = next(self._answer)
        note = f"the draft model: {self._drafter.failure}; it drafts no more"
        if self._drafter.failure and note not in self.notes:
            self.notes.append(note)
        self._known, self._held = len(ids), np.append(ids, drafted)
        return drafted

    def _rounds(self, text: list[int], same: int) -> Generator[Ids, tuple[int, ...], None]:
        """Draft for one answer: alternately yield a draft and receive its accepted tokens and one from the target.

        ``text`` is the prompt and the first token; its first ``same`` tokens match the previous text and draft.
        """
        clock, drafters, rule = AnswerClock(self._clock), self._drafters, make_rule("exact", Sampling())
        policy = DraftPolicy() if self.options.draft_policy == "fixed" else None  # None until the target is timed
        learning_s, idle = 0.0, list[tuple[float, float]]()
        self.rounds = []
        rule.begin(text)
        for drafter in drafters:
            drafter.begin(text, (), same)
        while True:
            began, told_s, chain = clock(), 0.0, list[tuple[str, DraftToken]]()
            if policy is None and self._target is not None:
                policy = AdaptivePolicy(self._target, self._drafts, self._estimators, self._back_off)
            resting = policy is not None and policy.cooldown > 0
            if policy is not None and not resting:
                remaining = self._room - len(text)
                limit = min(self._longest, remaining)
                policy.begin(limit, remaining, may_trim=rule.may_trim)
                told_s, _ = decode_all(None, loop.catch_up(text, drafters, policy, rule, clock))
                steps = loop.draft(text, limit, drafters, policy, rule, self.model.is_end, clock)
                chain = decode_all(None, steps)
            drafted, batch_size = tuple(token.token for _, token in chain), 1 + len(chain)
            returned = clock()
            emitted = yield np.array(drafted, np.intc)
            draft_s, verify_s = returned - began, clock() - returned
            text += emitted
            for drafter in drafters:
                drafter.commit(len(text) - 1)
            names, accepted = tuple(name for name, _ in chain), len(emitted) - 1
            spent_s = draft_s, verify_s, draft_s + verify_s
            self.rounds.append(loop.Round(drafted, names, accepted, emitted, batch_size, *spent_s))
            if policy is None:
                self._target_only_s.append(max(verify_s, 1e-9))
                if len(self._target_only_s) == _TIMED:
                    points = {1: min(self._target_only_s)}
                    self._target = LatencyModel(points, trusted=False, limit=self._longest + 1, can_pad=False)
                    for seconds in self._target_only_s:
                        self._target.observe(1, seconds)
                    if self._draft is not None:
                        self._drafts["draft"] = DraftLatency(self._draft, self._target)
                continue
            if self._target is not None:
                verify_s = min(verify_s, _PAUSE * self._target.seconds(batch_size))
            ended, total_s = clock(), draft_s - told_s + verify_s
            if resting:
                idle.append((verify_s, total_s))
                if len(idle) == policy.cooldown:
                    policy.observe_cooldown(batch_size, idle)
                    idle.clear()
                continue
            policy.observe_round(RoundOutcome(batch_size, accepted, len(emitted), verify_s, total_s, learning_s))
            learning_s = clock() - ended

    def close(self) -> None:
        """Free the draft and its cache; done automatically when its ``Llama`` is closed or this object is deleted."""
        self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
