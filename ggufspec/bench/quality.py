"""Quality of a quantised target on bundled text: perplexity; KL divergence from and top-1 agreement with a reference.

Models are loaded one at a time, in a child process (:mod:`ggufspec.child`), because two may not fit in memory. The
reference model writes its logits to a file, with which every other model is compared. A row holds one token's logits
minus their maximum, as float16, and is normalised after reading. Rounding adds less than 10⁻⁵ nats to a divergence.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ggufspec import child
from ggufspec.bench.prompts import PASSAGES
from ggufspec.decoding.options import DecoderOptions, WithOptions
from ggufspec.errors import ModelError
from ggufspec.hardware import host
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.model import Context, Model
from ggufspec.schema.compare import Quality
from ggufspec.schema.text import of_download

_WIDTH = 32  # batch size; logits for all its tokens fit in the VRAM planned for a batch of 2
_CELLS = 512  # context size in tokens; longer passages are truncated, but none is longer in a common vocabulary
_DEEPEST = -60000.0  # lowest stored value; the minimum of float16 is −65504

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class QualityJob(WithOptions):
    """Model to measure on ``passages``, each decoded in an empty context.

    ``rows`` is a file in its own folder that the reference model (named ``reference``) writes and other models read.
    """

    model: Path
    options: DecoderOptions
    rows: Path
    is_reference: bool
    reference: str
    passages: tuple[str, ...] = PASSAGES
    rpc: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of n tokens, each (n,): −log p of the next token, KL(reference ‖ this), whether the top tokens match."""

    surprise: Floats
    divergence: Floats
    agrees: npt.NDArray[np.bool_]


def run(spec: QualityJob, emit: child.Emit, stopping: threading.Event) -> Quality:  # noqa: ARG001
    """Measure in this process; raise ModelError if tokens differ from the reference's or disk space is too small."""
    devices.add_rpc_workers(spec.rpc)
    with Model(spec.model, spec.options.target) as model:
        passages = [model.tokenize(passage)[:_CELLS] for passage in spec.passages]
        rows = _create(spec.rows, model.vocab_size, passages) if spec.is_reference else _open(spec, model, passages)
        options = replace(spec.options, ctx_size=_CELLS, drafters=(), lookup_corpus=None, strict=False)
        judged: list[TokenScores] = []
        done = 0
        with closing(Context(model, replace(options.context(with_draft=False), max_outputs=_WIDTH))) as context:
            for logits, following in _read(context, passages):
                kept = rows[done : done + len(logits)]
                if spec.is_reference:
                    kept[:] = compress(logits)
                judged.append(score_tokens(logits, kept, following))
                done += len(logits)
                if stopping.is_set():
                    raise ModelError("stopped while decoding the text")
        if spec.is_reference:
            rows.flush()
            _part(spec.rows).replace(spec.rows)
    return estimate_quality(judged, spec.reference, is_reference=spec.is_reference)


def _read(
    context: Context, passages: Sequence[Sequence[int]]
) -> Iterator[tuple[npt.NDArray[np.float32], Sequence[int]]]:
    """Yield (logits (n, vocab) after each of n tokens, the n next tokens), batch by batch, for every passage."""
    for passage in passages:
        context.rewind(0)
        for start in range(0, len(passage) - 1, _WIDTH):
            batch = passage[start : min(start + _WIDTH, len(passage) - 1)]
            yield context.decode(batch, len(batch)), passage[start + 1 : start + 1 + len(batch)]


def compress(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    kept: npt.NDArray[np.float16] = np.maximum(logits - logits.max(axis=1, keepdims=True), _DEEPEST).astype(np.float16)
    return kept


def score_tokens(
    logits: npt.NDArray[np.float32], kept: npt.NDArray[np.float16], following: Sequence[int]
) -> TokenScores:
    """Compare logits (n, vocab) with the reference's, stored by :func:`compress`, and with the (n,) next tokens."""
    ours, theirs = _log_probs(logits), _log_probs(kept)
    divergence = np.sum(np.exp(theirs) * (theirs - ours), axis=1)
    surprise = -ours[np.arange(len(ours)), list(following)]
    return TokenScores(surprise, np.maximum(divergence, 0), ours.argmax(axis=1) == theirs.argmax(axis=1))


def _log_probs(rows: npt.NDArray[np.floating]) -> Floats:
    shifted = rows.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), np.float64)


def estimate_quality(judged: Sequence[TokenScores], reference: str, *, is_reference: bool) -> Quality:
    """Return means over all tokens with standard errors, which assume that tokens are independent."""
    surprise, divergence, agrees = (
        np.concatenate([np.asarray(getattr(one, name), np.float64) for one in judged])
        for name in ("surprise", "divergence", "agrees")
    )
    if is_reference:  # the reference differs from its own file only by rounding
        divergence, agrees = np.zeros_like(divergence), np.ones_like(agrees)
    perplexity = math.exp(float(surprise.mean()))
    return Quality(
        reference=reference,
        tokens=len(surprise),
        perplexity=perplexity,
        perplexity_error=perplexity * _error(surprise),  # error propagation to first order
        mean_kl=float(divergence.mean()),
        mean_kl_error=_error(divergence),
        top1_agreement=float(agrees.mean()),
        top1_agreement_error=_error(agrees),
    )


def _error(values: Floats) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


# ---- the reference's file of logits, with a file of the tokens next to it


def _create(
    path: Path, vocabulary: int, passages: Sequence[Sequence[int]]
) -> np.memmap[tuple[int, ...], np.dtype[np.float16]]:
    total = sum(map(len, passages))
    wanted, free = 2 * total * vocabulary, host.free_disk_bytes(path.parent)
    if wanted > free - (64 << 20):
        raise ModelError(
            f"the reference's probabilities take {of_download(wanted)}, but the disk has {of_download(free)} free",
            "free some space, name another folder with --results, or skip this with --no-quality",
        )
    np.save(_tokens(path), np.concatenate(passages))
    return np.lib.format.open_memmap(_part(path), mode="w+", dtype=np.float16, shape=(total, vocabulary))


def _open(
    spec: QualityJob, model: Model, passages: Sequence[Sequence[int]]
) -> np.memmap[tuple[int, ...], np.dtype[np.float16]]:
    rows = np.lib.format.open_memmap(spec.rows, mode="r")
    tokens = np.concatenate(passages)
    if rows.shape != (len(tokens), model.vocab_size) or not np.array_equal(np.load(_tokens(spec.rows)), tokens):
        raise ModelError(
            f"its tokens differ from those of {spec.reference}, so their probabilities cannot be compared",
            "compare quantisations of the same model",
        )
    return rows


def _part(path: Path) -> Path:
    return path.with_suffix(".part")


def _tokens(path: Path) -> Path:
    return path.with_suffix(".tokens.npy")


def measure_quality(spec: QualityJob, *, verbose: bool = False) -> Quality:
    """Measure a model in a child process.

    Raises:
        GgufspecError: :func:`run` raised it, or the child process died.
        Interrupted: Ctrl-C.
    """
    return child.call(__name__, spec, Quality, verbose=verbose)
