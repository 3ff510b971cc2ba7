"""Drivers of the rounds of :mod:`ggufspec.decoding.loop`, for one answer on a target of its own."""

from __future__ import annotations

from collections.abc import Generator

from ggufspec.decoding.batch import drive
from ggufspec.decoding.loop import Round, Rounds
from ggufspec.llamacpp.model import Context


def decode_rounds(target: Context, steps: Rounds) -> Generator[Round]:
    """Rounds, after each of which the target's cache is rewound to the accepted tokens."""
    length = target.length
    for round_ in drive(target, steps):
        length += len(round_.emitted)
        target.rewind(length - 1)
        yield round_
