"""The last line of ``ggufspec trace --json``; the rounds before it are in :mod:`ggufspec.schema.rounds`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Count, Run, SpeculativeRun


@dataclass(frozen=True, slots=True)
class Written:
    """A token of a traced answer and the text that became certain with it.

    ``source`` is its writer: the drafter whose token was accepted, or for the target ``bonus`` after a fully accepted
    draft and ``target`` otherwise.
    """

    token: int  # -1 if a grammar ended the answer and text was held back
    text: str
    source: str
    round: Count


@dataclass(frozen=True, slots=True)
class TraceDocument:
    """``ggufspec/trace@1``; ``rounds`` is their number, whether they were printed or not."""

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
