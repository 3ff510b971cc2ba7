"""Where the text with a draft leaves the text without, and whether rounding explains it.

Both texts are the same up to some token. The shared part is read one token at a time, as target-only did, and in
batches of the verify width, beginning at every place of the batch: a row's rounding depends on the width and on where
in the batch it stands. The noise is the largest change that this makes, anywhere along the texts that diverge, to the
difference between any two of a row's leading tokens. A divergence is explained when its margin is below the noise.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ggufspec import worker
from ggufspec.decoding.options import DecoderOptions
from ggufspec.hardware.host import physical_cores
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.model import Context, Logits, Model
from ggufspec.llamacpp.options import ContextOptions
from ggufspec.reports.document import Divergence

LEADING = 8  # tokens of a row that may come into question


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt and both its answers."""

    index: int
    prompt: str
    target_only: tuple[int, ...]
    speculative: tuple[int, ...]

    @property
    def position(self) -> int:
        """Index of the first answer token that differs."""
        pairs = zip(self.target_only, self.speculative, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.target_only), len(self.speculative)))


@dataclass(frozen=True, slots=True)
class Spec:
    """Divergences to look into, on the target as it was placed."""

    target: Path
    options: DecoderOptions
    cases: tuple[Case, ...]
    rpc: tuple[str, ...] = ()


Result = tuple[Divergence, ...]


def run(spec: Spec, emit: worker.Emit, stopping: threading.Event) -> Result:
    """Measure margin and noise of each case, in this process."""
    for endpoint in spec.rpc:
        devices.add_rpc_worker(endpoint)
    options = spec.options
    width = options.draft_max + 1
    with Model(spec.target, options.placement) as model:
        context = Context(
            model,
            ContextOptions(
                n_ctx=options.n_ctx,
                width=width,
                threads=options.threads or physical_cores(),
                type_k=options.type_k,
                type_v=options.type_v,
                flash_attention=options.flash_attention,
            ),
        )
        try:
            measured = []
            for case in spec.cases:
                if stopping.is_set():
                    break
                measured.append((case, *_measure(context, case, width)))
                emit({"event": "divergence", "index": case.index})
            noise = max((noise for _, _, noise in measured), default=0.0)
            return tuple(_divergence(case, margin, noise) for case, margin, _ in measured)
        finally:
            context.close()


def _divergence(case: Case, margin: float, noise: float) -> Divergence:
    at = case.position
    return Divergence(case.index, at, case.target_only[at], case.speculative[at], margin, noise, margin <= noise)


def _measure(context: Context, case: Case, width: int) -> tuple[float, float]:
    """(margin between the two tokens in target-only's reading, noise along the text)."""
    at = case.position
    prompt = context.model.tokenize(case.prompt)
    text = [*prompt, *case.target_only[:at]]
    context.rewind(0)
    if len(prompt) > 1:
        context.decode(prompt[:-1], 0)
    narrow = _read(context, text, len(prompt) - 1, 1, 1)
    leading = np.argpartition(narrow, -LEADING, axis=1)[:, -LEADING:]
    noise = 0.0
    for first in range(1, width + 1):
        change = np.take_along_axis(_read(context, text, len(prompt) - 1, first, width) - narrow, leading, axis=1)
        noise = max(noise, float(np.ptp(change, axis=1).max()))
    return abs(float(narrow[-1, case.target_only[at]] - narrow[-1, case.speculative[at]])), noise


def _read(context: Context, text: Sequence[int], start: int, first: int, step: int) -> Logits:
    """(n, vocab) logits after each token from ``start`` on, read ``first`` tokens and then ``step`` at a time."""
    context.rewind(start)
    rows: list[Logits] = []
    while context.length < len(text):
        batch = text[context.length : context.length + (step if rows else first)]
        rows.append(context.decode(batch, len(batch)).copy())
    return np.concatenate(rows)


def explain(spec: Spec, *, verbose: bool = False) -> Result:
    """Measure in a child process."""
    return worker.call(__name__, spec, Result, verbose=verbose) if spec.cases else ()
