"""The JSON document of ``ggufspec verify``: the certificate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count, Share


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that is not target-only's: the first token that differs.

    ``margin`` and ``noise`` are :class:`Divergence`'s, and absent where they were not asked for: in strict mode nothing
    excuses a difference. A token is absent where one answer had ended.
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
    """How often tokens stood at some place of the target's own distribution, and how often they should have."""

    name: str
    tokens: Count
    observed: Count
    expected: Amount
    p_value: Share


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a certificate.

    Args:
        section: ``strict``, ``default`` or ``distribution``.
        drafter: who drafted; ``target-only`` for the control of a distribution.
        rule: ``greedy``, ``coupled`` or ``residual``.
        status: ``passed``, ``failed`` or ``not possible``, which claims nothing.
        policies: how far was drafted, ``adaptive 15`` say.
        answers: that were compared; they have ``tokens``.
        drafted: tokens that the target judged for them, of which it ``accepted`` some.
        differences: answers that differ; a passed check of the default mode may have some, all explained.
        places: observed and expected counts of a distribution.
        p_value: of the least likely count, times the number of counts.
        threshold: the p-value from which on the check passes.
        reason: why it was not possible.
    """

    section: str
    drafter: str
    rule: str
    status: str
    policies: tuple[str, ...] = ()
    seeds: tuple[Count, ...] = ()
    answers: Count = 0
    tokens: Count = 0
    drafted: Count = 0
    accepted: Count = 0
    differences: tuple[Difference, ...] = ()
    places: tuple[Place, ...] = ()
    p_value: Share | None = None
    threshold: Share | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class VerifyDocument:
    """``ggufspec/verify@1``: the certificate that speculation changed nothing.

    ``models`` names target and draft by their files' SHA-256. ``passed`` says that every check that could be made was
    passed, and that none is missing.
    """

    pair: dict[str, Any]
    models: dict[str, Any]
    machine: dict[str, Any]
    settings: dict[str, Any]
    checks: tuple[Check, ...]
    passed: bool
    verdict: str
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default="ggufspec/verify@1")
