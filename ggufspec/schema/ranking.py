"""The JSON document of ``ggufspec plan`` for the models of a repository, or of several that a search found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count, Share


@dataclass(frozen=True, slots=True)
class RankedModel:
    """One model, or with ``error`` why it has no more than its name and its size.

    Args:
        number: of the row; ``pull --row`` takes it.
        name: what ``-hf`` takes.
        bytes: of the file, or of all its parts.
        bits_per_weight: of all tensors together.
        divergence: what is published of its quantisation: :data:`ggufspec.planning.ranking.DIVERGENCE_SOURCE`.
        fits: ``whole``, all layers on the cards; ``partly``; or ``no``, more than the cards and the free memory hold.
        gpu_layers: of the target-only run, of ``layers`` blocks and the output.
        largest_context: tokens with all layers on the cards.
        pareto: whether no other row of its repository is as fast and as good, and more of one; of two that have a
            ``divergence`` the lower one is better, otherwise the one of more bits.
    """

    number: Count
    repo: str
    file: str
    name: str
    bytes: Count
    quant: str
    bits_per_weight: Amount | None = None
    divergence: Amount | None = None
    fits: str = ""
    gpu_layers: Count | None = None
    layers: Count | None = None
    n_cpu_moe: Count | None = None
    n_cpu_ffn: Count | None = None
    target_only_tokens_per_s: Amount | None = None
    speculative_tokens_per_s: Amount | None = None
    break_even_acceptance: Share | None = None
    largest_context: Count | None = None
    pareto: bool = False
    error: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class RankedDraft:
    """One draft for the target of the document. ``costs_layers`` are the target's layers that its memory would hold."""

    number: Count
    repo: str
    file: str
    name: str
    bytes: Count
    quant: str
    bits_per_weight: Amount | None = None
    gpu_layers: Count | None = None
    layers: Count | None = None
    tokens_per_s: Amount | None = None
    draft_length: Count | None = None
    costs_layers: Count | None = None
    break_even_acceptance: Share | None = None
    error: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class RankedRepository:
    """A repository: its ``heads`` are files that draft for its models, ``left_out`` models that have no row."""

    repo: str
    commit: str
    heads: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankingDocument:
    """``ggufspec/ranking@1``. ``rows`` are the smallest first, by repository; ``next`` is the command for the best.

    ``draft`` is the one that ``speculative_tokens_per_s`` is of; ``drafts`` are ranked beside ``target``.
    """

    repositories: tuple[RankedRepository, ...]
    devices: dict[str, Any]
    rows: tuple[RankedModel, ...]
    target: str | None
    draft: str | None
    drafts: tuple[RankedDraft, ...]
    next: str
    settings: dict[str, Any]
    speed: str
    bytes_read: Count
    notes: tuple[str, ...] = ()
    schema: str = field(default="ggufspec/ranking@1")
