"""Drivers of the steps of :mod:`ggufspec.decoding.loop`, for one answer on a target of its own."""

from __future__ import annotations

from collections.abc import Generator
from typing import cast

from ggufspec.decoding.loop import Batch, Decoded, Round, Rounds, drive
from ggufspec.llamacpp.model import Context, Logits


def prefill(target: Context, steps: Generator[Batch, Decoded, Logits]) -> Logits:
    """The rows of a prompt, from ``decode_prompt``."""
    driven = drive(target, steps)
    try:
        next(driven)
    except StopIteration as end:
        return cast(Logits, end.value)
    raise AssertionError("a prompt gives no rounds")


def decode_rounds(target: Context, steps: Rounds) -> Generator[Round]:
    """Rounds, after each of which the target's cache is rewound to the accepted tokens."""
    length = target.length
    for round_ in drive(target, steps):
        length += len(round_.emitted)
        target.rewind(length - 1)
        yield round_
