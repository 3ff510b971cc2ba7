"""Test of whether rounding explains why the text with a draft diverges from the text without one.

The common prefix of both texts is decoded one token at a time, as in target-only runs, and then in batches of several
sizes at every offset, because rounding depends on the batch size and the position in the batch. This changes the logit
difference between two leading tokens at a position; the noise is the largest such change in all texts that diverge. A
divergence is explained if its margin (:func:`margin`) is at most the noise.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ggufspec import child
from ggufspec.bench.prompts import at_depth
from ggufspec.decoding.options import DecoderOptions, WithOptions
from ggufspec.decoding.rules.coupled import CoupledRule
from ggufspec.decoding.sampling import Sampling
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.model import Context, Logits, Model
from ggufspec.schema.bench import Divergence

LEADING = 8  # number of most likely tokens that are compared at each position
_BATCH_SIZES = (2, 4, 8)  # batch sizes that kernels treat differently; the largest possible size is tested too
_FARTHEST, _HALVINGS = 64.0, 30  # bisection for the margin: upper bound in logits, and number of halvings


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the index of the first token that differs; the shorter text's length if it is a prefix of the other."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@dataclass(frozen=True, slots=True)
class DivergenceCase:
    """Prompt with both answers, whose tokens were sampled under the exact rule."""

    index: int
    prompt: str
    target_only: tuple[int, ...]
    speculative: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)

    @property
    def position(self) -> int:
        return first_difference(self.target_only, self.speculative)


@dataclass(frozen=True, slots=True)
class DivergenceJob(WithOptions):
    target: Path
    options: DecoderOptions
    cases: tuple[DivergenceCase, ...]
    rpc: tuple[str, ...] = ()
    depth: int = 0  # tokens of text before each prompt


DivergenceResult = tuple[Divergence, ...]


def run(spec: DivergenceJob, emit: child.Emit, stopping: threading.Event) -> DivergenceResult:
    """Measure all cases in this process."""
    devices.add_rpc_workers(spec.rpc)
    with Model(spec.target, spec.options.target) as model:
        options = replace(spec.options.context(with_draft=True), rewind_by="checkpoint")  # rewinds over many batches
        context = Context(model, options)
        try:
            measured = []
            for case in spec.cases:
                if stopping.is_set():
                    break
                prompt = at_depth(model.tokenize, case.prompt, spec.depth)
                measured.append((case, *_measure(context, case, prompt)))
                emit({"event": "divergence", "index": case.index})
            noise = max((noise for _, _, noise in measured), default=0.0)
            return tuple(_divergence(case, margin, noise) for case, margin, _ in measured)
        finally:
            context.close()


def _divergence(case: DivergenceCase, margin: float, noise: float) -> Divergence:
    at = case.position
    return Divergence(case.index, at, case.target_only[at], case.speculative[at], margin, noise, margin <= noise)


def _measure(context: Context, case: DivergenceCase, prompt: Sequence[int]) -> tuple[float, float]:
    """Return (margin between the two diverging tokens, decoded one at a time; noise over the common prefix)."""
    at = case.position
    text = [*prompt, *case.target_only[:at]]
    context.rewind(0)
    if len(prompt) > 1:
        context.decode(prompt[:-1], 0)
    narrow = _read(context, text, len(prompt) - 1, 1, 1)
    both = case.target_only[at], case.speculative[at]
    leading = np.argpartition(narrow, -LEADING, axis=1)[:, -LEADING:]
    leading = np.concatenate([leading, np.broadcast_to(both, (len(narrow), 2))], axis=1)
    noise = 0.0
    for batch_size in (
        *(batch_size for batch_size in _BATCH_SIZES if batch_size < context.max_outputs),
        context.max_outputs,
    ):
        for first in range(1, batch_size + 1):
            change = np.take_along_axis(
                _read(context, text, len(prompt) - 1, first, batch_size) - narrow, leading, axis=1
            )
            noise = max(noise, float(np.ptp(change, axis=1).max()))
    return margin(narrow[-1], both, case.sampling, text), noise


def margin(row: Logits, tokens: tuple[int, int], sampling: Sampling, text: Sequence[int]) -> float:
    """Return the smallest shift in logits that makes the exact rule choose the other of two tokens.

    At temperature 0 without penalties this is the difference between their logits. Otherwise the wanted token loses
    because its score plus noise is lower, or because truncation drops it. So three shifts are tried, each by a single
    amount: raise the wanted token; lower all tokens more likely than it; raise all tokens more likely than the current
    choice. Penalties are applied after the shift, because rounding precedes them too.

    ``row`` holds the target's logits, (vocab,); ``text`` holds the ids of the preceding tokens.
    """
    first, second = tokens
    if sampling.temperature == 0 and not sampling.penalises:
        return abs(float(row[first] - row[second]))
    rule, position = CoupledRule(sampling), len(text)
    rule.begin(text)

    def chosen(logits: Logits) -> int | None:
        return rule.verify(logits[None].copy(), (), position).token

    wanted, other = (first, second) if chosen(row) == second else (second, first)
    alone = np.arange(row.size) == wanted
    seen = rule.penalised(row.copy(), position)
    shifts = [
        alone.astype(np.float32),
        -(seen > seen[wanted]).astype(np.float32),
        (seen > seen[other]).astype(np.float32),
    ]
    low, high = 0.0, _FARTHEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        reached = any(chosen(row + np.float32(middle) * shift) == wanted for shift in shifts)
        low, high = (low, middle) if reached else (middle, high)
    return high


def _read(context: Context, text: Sequence[int], start: int, first: int, step: int) -> Logits:
    """Decode from ``start``: ``first`` tokens, then batches of ``step``; return (n, vocab) logits, a row per token."""
    if start >= min(context.floor, context.length):
        context.rewind(start)
    else:  # a sliding window cannot be rewound that far
        context.rewind(0)
        context.decode(text[:start], 0)
    context.mark()
    rows: list[Logits] = []
    while context.length < len(text):
        batch = text[context.length : context.length + (step if rows else first)]
        rows.append(context.decode(batch, len(batch)).copy())
    return np.concatenate(rows)


def explain(spec: DivergenceJob, *, verbose: bool = False) -> DivergenceResult:
    return child.call(__name__, spec, DivergenceResult, verbose=verbose) if spec.cases else ()
