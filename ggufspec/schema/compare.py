"""The JSON document of ``ggufspec compare``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count, Failure, Portion, Run, Share, SpeculativeRun, Spread


@dataclass(frozen=True, slots=True)
class Quality:
    """Similarity of a quantised target to the reference, the largest one given, on the bundled text.

    Each estimate has its standard error over the tokens of the text. ``mean_kl`` is KL(reference ‖ this), in nats a
    token; ``top1_agreement`` is the share of positions where both have the same likeliest token. The reference itself
    has ``mean_kl`` 0 and ``top1_agreement`` 1.
    """

    reference: str
    tokens: Count
    perplexity: Amount
    perplexity_error: Amount
    mean_kl: float
    mean_kl_error: Amount
    top1_agreement: Share
    top1_agreement_error: Amount


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """A target or draft file of a comparison. ``name`` is unique in it; drafts have no quality."""

    name: str
    file: str
    size_bytes: Count
    quality: Quality | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One target with one draft, or target-only, at its own best placement.

    ``speedup`` is over the best target-only run of the same target file, paired by repetition; absent for that run.
    ``bytes`` has, by device, the plan's parts ``target weights``, ``target kv``, ``target compute``, ``draft weights``,
    ``draft kv``, ``draft compute`` and ``overhead``; the host is ``CPU``. ``energy_j_per_token`` is for all GPUs
    together, if NVML counts energy: complete answers, idle power included.
    """

    target: str
    draft: str | None
    run: Run | SpeculativeRun | None  # absent if it failed
    speedup: Spread | None
    bytes: dict[str, dict[str, Count]] = field(default_factory=dict)
    energy_j_per_token: Amount | None = None
    leads: bool = False  # it is the fastest of all, or its interval overlaps the fastest one's
    failure: Failure | None = None
    by_kind: tuple[Portion, ...] = ()  # by kind of prompt, if there are several
    by_part: tuple[Portion, ...] = ()  # thinking and answer, if the target thinks


@dataclass(frozen=True, slots=True)
class CompareDocument:
    """``ggufspec/compare@1``: many targets × many drafts on one machine."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    targets: tuple[ComparedModel, ...]
    drafts: tuple[ComparedModel, ...]
    cells: tuple[Cell, ...]
    warnings: tuple[str, ...] = ()  # reasons why the ranking is unsure: leaders that overlap, throttled clocks
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default="ggufspec/compare@1")


def cell_name(target: str, draft: str | None) -> str:
    """Return a cell's name for a sentence."""
    return f"{target} + {draft}" if draft else f"{target} (target-only)"
