"""JSON document of ``ggufspec compare``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count, Failure, MeasuredRun, Portion, Share, SpeculativeRun, Spread


@dataclass(frozen=True, slots=True)
class Quality:
    """Similarity of a quantised target to the reference (the largest given target), measured on the bundled text.

    Each estimate has a standard error over the tokens in the text. ``mean_kl`` is KL(reference ‖ this target), in nats
    per token; ``top1_agreement`` is the share of positions at which both have the same top token. The reference itself
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
    """Target or draft file in a comparison; ``name`` is unique among all files, and drafts have no ``quality``."""

    name: str
    file: str
    size_bytes: Count
    quality: Quality | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class CompareCell:
    """Target with a draft, or target-only, at its own best placement.

    ``speedup`` is relative to the same target file's best target-only run, paired by repetition; absent for that run.
    ``bytes`` are planned, by device and part: ``target weights``, ``target kv``, ``target compute``, ``draft weights``,
    ``draft kv``, ``draft compute`` and ``overhead``; the host is ``CPU``. ``energy_j_per_token`` is summed over
    all GPUs, if NVML measures energy; it covers complete answers and includes idle power.
    """

    target: str
    draft: str | None
    run: MeasuredRun | SpeculativeRun | None  # absent if the run failed
    speedup: Spread | None
    bytes: dict[str, dict[str, Count]] = field(default_factory=dict)
    energy_j_per_token: Amount | None = None
    leads: bool = False  # True if this cell is the fastest, or its interval overlaps the fastest cell's
    failure: Failure | None = None
    by_kind: tuple[Portion, ...] = ()  # results by kind of prompt, if there are several
    by_part: tuple[Portion, ...] = ()  # results for thinking and for the answer; empty if the target does not think


@dataclass(frozen=True, slots=True)
class CompareDocument:
    """Document ``ggufspec/compare@1``: several targets × several drafts on one machine."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    targets: tuple[ComparedModel, ...]
    drafts: tuple[ComparedModel, ...]
    cells: tuple[CompareCell, ...]
    warnings: tuple[str, ...] = ()  # reasons why the ranking is uncertain, such as overlapping intervals or throttling
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default="ggufspec/compare@1")


def cell_name(target: str, draft: str | None) -> str:
    """Return a cell's name for use in a sentence."""
    return f"{target} + {draft}" if draft else f"{target} (target-only)"
