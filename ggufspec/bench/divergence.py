"""Where the text with a draft leaves the text without, and whether rounding explains it.

Both texts are the same up to some token. The shared part is read twice: one token at a time, as target-only did, and
in batches of the verify width. The largest change that the width makes, along the whole text, to the difference between
the two tokens in question's logits is the noise; a divergence is explained when the margin between them is below it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ggufspec.bench import worker
from ggufspec.decoding.decoder import DecoderOptions
from ggufspec.hardware.host import physical_cores
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.model import Context, ContextOptions, Model
from ggufspec.reports.document import Divergence


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
    with Model(spec.target, options.gpu_layers) as model:
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
            found = []
            for case in spec.cases:
                if stopping.is_set():
                    break
                found.append(_measure(context, case, width))
                emit({"event": "divergence", "index": case.index})
            return tuple(found)
        finally:
            context.close()


def _measure(context: Context, case: Case, width: int) -> Divergence:
    at = case.position
    ours, theirs = case.target_only[at], case.speculative[at]
    prompt = context.model.tokenize(case.prompt)
    text = [*prompt, *case.target_only[:at]]
    narrow, wide = (_gaps(context, text, len(prompt), step, ours, theirs) for step in (1, width))
    margin, noise = abs(float(narrow[-1])), float(np.abs(narrow - wide).max())
    return Divergence(case.index, at, ours, theirs, margin, noise, margin <= noise)


def _gaps(context: Context, text: Sequence[int], read: int, step: int, one: int, other: int) -> np.ndarray:
    """Logit differences (n,) between two tokens after each token from the prompt's last one on, ``step`` at a time."""
    context.rewind(0)
    if read > 1:
        context.decode(text[: read - 1], 0)
    gaps = []
    for start in range(read - 1, len(text), step):
        batch = text[start : start + step]
        rows = context.decode(batch, len(batch))
        gaps.append(rows[:, one] - rows[:, other])
    return np.concatenate(gaps)


def explain(spec: Spec, *, verbose: bool = False) -> Result:
    """Measure in a child process."""
    return worker.call(__name__, spec, Result, verbose=verbose) if spec.cases else ()
