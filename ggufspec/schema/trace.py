"""JSON document on the last line of ``ggufspec trace --json``, after the rounds (:mod:`ggufspec.schema.rounds`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Count, MeasuredRun, SpeculativeRun


@dataclass(frozen=True, slots=True)
class WrittenToken:
    """Token in a traced answer, with the text that was output when it was added.

    ``source`` is the drafter whose token was accepted. For the target's own tokens, it is ``bonus`` after a fully
    accepted draft and ``target`` otherwise.
    """

    token: int  # token id; -1 for held-back text that was output when a grammar ended the answer
    text: str
    source: str
    round: Count


@dataclass(frozen=True, slots=True)
class TraceDocument:
    """Document ``ggufspec/trace@1``; ``rounds`` is the number of rounds, whether or not they were printed."""

    pair: dict[str, Any]
    settings: dict[str, Any]
    prompt: str
    text: str
    tokens: tuple[WrittenToken, ...]
    rounds: Count
    stop_reason: str
    statistics: MeasuredRun | SpeculativeRun
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default="ggufspec/trace@1")
