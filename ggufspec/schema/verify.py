"""JSON document of ``ggufspec verify``, which is the certificate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count, Share


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """First difference between an answer and target-only's answer; a token is absent if its answer had already ended.

    ``margin`` and ``noise`` are as in :class:`Divergence`, but absent in strict mode, which excuses no difference.
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
class RankCounts:
    """Observed and expected counts of an event, such as that a token is the target's likeliest."""

    name: str
    tokens: Count
    observed: Count
    expected: Amount
    p_value: Share


@dataclass(frozen=True, slots=True)
class CertificateCheck:
    """Result of one check in a certificate."""

    section: str  # section of the certificate: ``strict``, ``default`` or ``distribution``
    drafter: str  # drafter's name, or ``target-only`` for the control in a distribution check
    rule: str  # acceptance rule: ``greedy``, ``coupled`` or ``residual``
    status: str  # ``passed``, ``failed``, or ``not possible``, in which case nothing is claimed
    policies: tuple[str, ...] = ()  # draft policies with their lengths, such as ``adaptive 15``
    seeds: tuple[Count, ...] = ()
    answers: Count = 0  # number of compared answers
    tokens: Count = 0  # number of tokens in these answers
    drafted: Count = 0  # number of drafted tokens that the target judged
    accepted: Count = 0
    differences: tuple[AnswerDifference, ...] = ()  # a passed check in default mode may have some, all explained
    places: tuple[RankCounts, ...] = ()  # observed and expected counts in a distribution check
    p_value: Share | None = None  # p-value of the least likely count × number of counts
    threshold: Share | None = None  # minimum p-value for the check to pass
    reason: str = ""  # reason why the check was not possible


@dataclass(frozen=True, slots=True)
class VerifyDocument:
    """Document ``ggufspec/verify@1``: the certificate that speculation changed nothing."""

    pair: dict[str, Any]
    models: dict[str, Any]  # target and draft, identified by the SHA-256 of their files
    machine: dict[str, Any]
    settings: dict[str, Any]
    checks: tuple[CertificateCheck, ...]
    passed: bool  # True if all possible checks passed and none is missing
    verdict: str
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default="ggufspec/verify@1")
