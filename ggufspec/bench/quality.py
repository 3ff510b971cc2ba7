"""How near a quantised target is to the reference: perplexity, KL divergence and top-1 agreement on a bundled text.

One model is loaded at a time, in a child process (:mod:`ggufspec.child`), so that two that do not fit together can be
compared: the reference writes its probabilities to a file, and every other model is compared with that file.
A row of it is the logits less their maximum as float16. They are made a distribution again when they are read, so that
the rounding shifts no probability from the row to nowhere: what it adds to a divergence is below 10⁻⁵ nats.
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

_WIDTH = 32  # rows of logits that one call returns; a card has room for so many next to a model that was planned for 2
_CELLS = 512  # of context; a passage has fewer tokens in every vocabulary that is in use, and is cut otherwise
_DEEPEST = -60000.0  # float16 ends at −65504

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spec(WithOptions):
    """One model to read the text with, each of whose passages is a context of its own.

    ``rows`` is a file in a folder of its own: written by the reference, whose name is ``reference``, and read by the
    others.
    """

    model: Path
    options: DecoderOptions
    rows: Path
    is_reference: bool
    reference: str
    passages: tuple[str, ...] = PASSAGES
    rpc: tuple[str, ...] = ()


Result = Quality


@dataclass(frozen=True, slots=True)
class Judged:
    """Of n tokens, each (n,): −log p of the token that follows, KL(reference ‖ this), same likeliest token."""

    surprise: Floats
    divergence: Floats
    agrees: npt.NDArray[np.bool_]


def run(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Result:  # noqa: ARG001
    """In the child process; a ModelError if its tokens are not the reference's, or the disk is too small."""
    devices.add_rpc_workers(spec.rpc)
    with Model(spec.model, spec.options.target) as model:
        passages = [model.tokenize(passage)[:_CELLS] for passage in spec.passages]
        rows = _create(spec.rows, model.vocab_size, passages) if spec.is_reference else _open(spec, model, passages)
        options = replace(spec.options, ctx_size=_CELLS, drafters=(), lookup_corpus=None, strict=False)
        judged: list[Judged] = []
        done = 0
        with closing(Context(model, replace(options.context(with_draft=False), width=_WIDTH))) as context:
            for logits, following in _read(context, passages):
                kept = rows[done : done + len(logits)]
                if spec.is_reference:
                    kept[:] = compress(logits)
                judged.append(judge(logits, kept, following))
                done += len(logits)
                if stopping.is_set():
                    raise ModelError("stopped while reading the text")
        if spec.is_reference:
            rows.flush()
            _part(spec.rows).replace(spec.rows)
    return estimate(judged, spec.reference, is_reference=spec.is_reference)


def _read(
    context: Context, passages: Sequence[Sequence[int]]
) -> Iterator[tuple[npt.NDArray[np.float32], Sequence[int]]]:
    """(logits (n, vocab) after n tokens, the n tokens that follow) of every passage."""
    for passage in passages:
        context.rewind(0)
        for start in range(0, len(passage) - 1, _WIDTH):
            batch = passage[start : min(start + _WIDTH, len(passage) - 1)]
            yield context.decode(batch, len(batch)), passage[start + 1 : start + 1 + len(batch)]


def compress(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    kept: npt.NDArray[np.float16] = np.maximum(logits - logits.max(axis=1, keepdims=True), _DEEPEST).astype(np.float16)
    return kept


def judge(logits: npt.NDArray[np.float32], kept: npt.NDArray[np.float16], following: Sequence[int]) -> Judged:
    """Hold logits (n, vocab) to the reference's, as :func:`compress` made them, and to the tokens (n,) of the text."""
    ours, theirs = _log_probs(logits), _log_probs(kept)
    divergence = np.sum(np.exp(theirs) * (theirs - ours), axis=1)
    surprise = -ours[np.arange(len(ours)), list(following)]
    return Judged(surprise, np.maximum(divergence, 0), ours.argmax(axis=1) == theirs.argmax(axis=1))


def _log_probs(rows: npt.NDArray[np.floating]) -> Floats:
    shifted = rows.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), np.float64)


def estimate(judged: Sequence[Judged], reference: str, *, is_reference: bool) -> Quality:
    """The means over all tokens and their standard errors, as if tokens were independent of each other."""
    surprise, divergence, agrees = (
        np.concatenate([np.asarray(getattr(one, name), np.float64) for one in judged])
        for name in ("surprise", "divergence", "agrees")
    )
    if is_reference:  # nothing but the rounding of its own file
        divergence, agrees = np.zeros_like(divergence), np.ones_like(agrees)
    perplexity = math.exp(float(surprise.mean()))
    return Quality(
        reference=reference,
        tokens=len(surprise),
        perplexity=perplexity,
        perplexity_error=perplexity * _error(surprise),  # to first order
        mean_kl=float(divergence.mean()),
        mean_kl_error=_error(divergence),
        top1_agreement=float(agrees.mean()),
        top1_agreement_error=_error(agrees),
    )


def _error(values: Floats) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


# ---- the reference's file, and with it the tokens that its rows are of


def _create(
    path: Path, vocabulary: int, passages: Sequence[Sequence[int]]
) -> np.memmap[tuple[int, ...], np.dtype[np.float16]]:
    total = sum(map(len, passages))
    wanted, free = 2 * total * vocabulary, host.free_disk_bytes(path.parent)
    if wanted > free - (64 << 20):
        raise ModelError(
            f"the reference's probabilities take {of_download(wanted)}, and {of_download(free)} of the disk are free",
            "free some space, name another folder with --results, or leave it out with --no-quality",
        )
    np.save(_tokens(path), np.concatenate(passages))
    return np.lib.format.open_memmap(_part(path), mode="w+", dtype=np.float16, shape=(total, vocabulary))


def _open(
    spec: Spec, model: Model, passages: Sequence[Sequence[int]]
) -> np.memmap[tuple[int, ...], np.dtype[np.float16]]:
    rows = np.lib.format.open_memmap(spec.rows, mode="r")
    tokens = np.concatenate(passages)
    if rows.shape != (len(tokens), model.vocab_size) or not np.array_equal(np.load(_tokens(spec.rows)), tokens):
        raise ModelError(
            f"its tokens are not those of {spec.reference}, so that their probabilities cannot be compared",
            "compare quantisations of one model",
        )
    return rows


def _part(path: Path) -> Path:
    return path.with_suffix(".part")


def _tokens(path: Path) -> Path:
    return path.with_suffix(".tokens.npy")


def measure(spec: Spec, *, verbose: bool = False) -> Result:
    """Read the text in a child process.

    Raises:
        GgufspecError: as :func:`run`, or the child died.
        Interrupted: Ctrl-C.
    """
    return child.call(__name__, spec, Result, verbose=verbose)
