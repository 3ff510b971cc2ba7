"""Batches that answers yield, instead of decoding them, and how a driver passes back their results.

An answer is a generator: it yields the batches to decode and receives their results, among other values that it yields.
Its driver owns the contexts: :func:`drive` for one answer, :mod:`ggufspec.decoding.group` for several at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Never, TypeVar, cast

from ggufspec.llamacpp.model import Context, Logits

Clock = Callable[[], float]
# Stands for the size of a batch with part of a prompt; its time says little, because few of its tokens need logits
WITH_PROMPT = -1
_Yield = TypeVar("_Yield")
_Return = TypeVar("_Return")


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens for a context to append to its text and decode; the last ``outputs`` of them need logits."""

    tokens: Sequence[int]
    outputs: int
    batch_size: int = 0  # batch size to pad to, if the context can pad
    is_prompt: bool = False  # may be decoded in parts, between the rounds of other answers
    draft: Context | None = None  # the draft model's context, if it is to decode the batch; None: the answer's own


@dataclass(frozen=True, slots=True)
class Decoded:
    """Result of a batch.

    ``seconds``, set if other answers are running, is the batch's time excluding the wait for it; of a draft's batch it
    is the answer's share. ``batch_size``, set if the batch also held tokens of other answers, is its total size or
    ``WITH_PROMPT``.
    """

    rows: Logits  # (outputs, vocab), valid until the answer is asked for its next batch
    seconds: float | None = None
    batch_size: int = 0


class AnswerClock:
    """Clock of one answer, which stands still while the answer waits for other answers' batches."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.waited_s = 0.0

    def __call__(self) -> float:
        return self._clock() - self.waited_s

    def decode(self, batch: Batch) -> Generator[Batch, Decoded, Decoded]:
        """Yield a batch and return its result."""
        began = self()
        decoded = yield batch
        if decoded.seconds is not None:
            self.waited_s += self() - began - decoded.seconds
        return decoded


def drive(
    context: Context | None, steps: Generator[Batch | _Yield, Decoded, _Return]
) -> Generator[_Yield, None, _Return]:
    """Decode each batch that ``steps`` yields by itself; pass on its other values and its return value.

    Batches without a context of their own are decoded in ``context``.
    """
    decoded: Decoded | None = None
    try:
        while True:
            try:
                step = next(steps) if decoded is None else steps.send(decoded)
            except StopIteration as end:
                return cast(_Return, end.value)
            decoded = None
            if isinstance(step, Batch):
                decodes = step.draft or context
                assert decodes is not None
                try:
                    decoded = Decoded(decodes.decode(step.tokens, outputs=step.outputs, batch_size=step.batch_size))
                except BaseException as error:
                    steps.throw(error)
                    raise
            else:
                yield step
    finally:
        steps.close()


def decode_all(context: Context | None, steps: Generator[Batch, Decoded, _Return]) -> _Return:
    """Decode each batch that ``steps`` yields, and return its return value."""
    driven: Generator[Never, None, _Return] = drive(context, steps)
    try:
        next(driven)
    except StopIteration as end:
        return cast(_Return, end.value)
    raise AssertionError("only batches are expected")
