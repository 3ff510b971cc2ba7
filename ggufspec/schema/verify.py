"""The JSON document of ``ggufspec verify``: the certificate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count, Share


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that differs from target-only's: the first different token, absent if one answer had ended.

    ``margin`` and ``noise`` are :class:`Divergence`'s, and absent in strict mode: nothing excuses a difference there.
    """

    prompt: Count
    seed: Count | None
    policy: str
    position: Count
    target_only: Count | None
    speculative: Count | None
    margin: float | None = None
    noise: Amount | None = None
    explained: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Observed and expected counts of tokens at some rank in the target's own distribution."""

    name: str
    tokens: Count
    observed: Count
    expected: Amount
    p_value: Share


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a certificate."""

    section: str  # ``strict``, ``default`` or ``distribution``
    drafter: str  # drafter, or ``target-only`` for the control of a distribution
    rule: str  # ``greedy``, ``coupled`` or ``residual``
    status: str  # ``passed``, ``failed`` or ``not possible``, which claims nothing
    policies: tuple[str, ...] = ()  # draft policies and lengths: ``adaptive 15``
    seeds: tuple[Count, ...] = ()
    answers: Count = 0  # compared answers
    tokens: Count = 0  # in these answers
    drafted: Count = 0  # drafted tokens that the target judged
    accepted: Count = 0
    differences: tuple[Difference, ...] = ()  # a passed check of the default mode may have some, all explained
    places: tuple[Place, ...] = ()  # observed and expected counts of a distribution
    p_value: Share | None = None  # p-value of the least likely count, times the number of counts
    threshold: Share | None = None  # p-value from which on the check passes
    reason: str = ""  # why it was not possible


@dataclass(frozen=True, slots=True)
class VerifyDocument:
    """``ggufspec/verify@1``: the certificate that speculation changed nothing."""

    pair: dict[str, Any]
    models: dict[str, Any]  # target and draft by their files' SHA-256
    machine: dict[str, Any]
    settings: dict[str, Any]
    checks: tuple[Check, ...]
    passed: bool  # all possible checks passed, and none is missing
    verdict: str
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default="ggufspec/verify@1")
