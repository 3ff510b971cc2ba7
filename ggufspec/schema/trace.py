"""The last line of ``ggufspec trace --json``; the rounds before it are in :mod:`ggufspec.schema.rounds`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Count, Run, SpeculativeRun


@dataclass(frozen=True, slots=True)
class Written:
    """A token of a traced answer.

    Args:
        token: its id; -1 where a grammar ended the answer and text was still held back.
        text: what became certain with it; it may be empty or end an earlier character.
        source: who wrote it: a drafter, ``draft`` or ``lookup``, whose token was accepted; or the target, ``bonus``
            after a draft that was accepted whole, ``target`` otherwise.
        round: of the trace, from 1.
    """

    token: int
    text: str
    source: str
    round: Count


@dataclass(frozen=True, slots=True)
class TraceDocument:
    """``ggufspec/trace@1``: the last line of a trace; those before it are its rounds (:mod:`ggufspec.schema.rounds`).

    ``rounds`` is how many there were, whether they were printed or not.
    """

    pair: dict[str, Any]
    settings: dict[str, Any]
    prompt: str
    text: str
    tokens: tuple[Written, ...]
    rounds: Count
    stop_reason: str
    statistics: Run | SpeculativeRun
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default="ggufspec/trace@1")
