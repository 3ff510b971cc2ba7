"""Explanation of where the text with a draft diverges from the text without, and whether rounding is the cause.

Both texts are equal up to some token. This part is decoded one token at a time, as in target-only, and in batches of
several sizes with every offset, because rounding depends on the batch size and the position in the batch. The noise is
the largest change that this makes to the difference between any two of a row's leading tokens, anywhere in the texts
that diverge. A divergence is explained if its margin is at most the noise.
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

LEADING = 8  # likeliest tokens of a row, which are compared
_WIDTHS = (2, 4, 8)  # batch sizes that kernels distinguish, besides the largest
_FARTHEST, _HALVINGS = 64.0, 30  # logits; the search for a margin


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the index of the first token that differs; the shorter one's length if it is a prefix of the other."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@dataclass(frozen=True, slots=True)
class Case:
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
class Spec(WithOptions):
    target: Path
    options: DecoderOptions
    cases: tuple[Case, ...]
    rpc: tuple[str, ...] = ()
    depth: int = 0  # tokens before each prompt


Result = tuple[Divergence, ...]


def run(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Result:
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


def _divergence(case: Case, margin: float, noise: float) -> Divergence:
    at = case.position
    return Divergence(case.index, at, case.target_only[at], case.speculative[at], margin, noise, margin <= noise)


def _measure(context: Context, case: Case, prompt: Sequence[int]) -> tuple[float, float]:
    """Return (margin between the two tokens when decoded as target-only does, noise along the text)."""
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
    for width in (*(width for width in _WIDTHS if width < context.width), context.width):
        for first in range(1, width + 1):
            change = np.take_along_axis(_read(context, text, len(prompt) - 1, first, width) - narrow, leading, axis=1)
            noise = max(noise, float(np.ptp(change, axis=1).max()))
    return margin(narrow[-1], both, case.sampling, text), noise


def margin(row: Logits, tokens: tuple[int, int], sampling: Sampling, text: Sequence[int]) -> float:
    """Return the smallest shift of logits with which the exact rule chooses the other one of two tokens.

    At temperature 0 without penalties this is their difference. Otherwise a token loses because its score plus noise is
    lower, or because truncation drops it. Hence three shifts are tried, each by one amount: the wanted token up; tokens
    likelier than the wanted one down; tokens likelier than the other one up. Penalties are applied after the shift,
    just as they are after rounding.

    ``row`` is (vocab,) the target's logits, ``text`` the ids of the tokens before.
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
    """Return (n, vocab) logits after each token from ``start`` on, decoded first ``first``, then ``step`` at a time."""
    if start >= min(context.floor, context.length):
        context.rewind(start)
    else:  # a sliding window
        context.rewind(0)
        context.decode(text[:start], 0)
    context.mark()
    rows: list[Logits] = []
    while context.length < len(text):
        batch = text[context.length : context.length + (step if rows else first)]
        rows.append(context.decode(batch, len(batch)).copy())
    return np.concatenate(rows)


def explain(spec: Spec, *, verbose: bool = False) -> Result:
    return child.call(__name__, spec, Result, verbose=verbose) if spec.cases else ()
