"""The JSON document of ``ggufspec plan`` for the models of a repository, or of several that a search found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count, Share


@dataclass(frozen=True, slots=True)
class RankedModel:
    """One model; if ``error`` is set, only with its name and size.

    ``pareto``: no other row of its repository is at least as fast and as good, and better in one of them. Of two that
    have a ``divergence`` the lower one is better, otherwise the one with more bits.
    """

    number: Count  # row number for ``pull --row``
    repo: str
    file: str
    name: str  # argument of ``-hf``
    bytes: Count  # size of the file, or of all its parts
    quant: str
    bits_per_weight: Amount | None = None  # over all tensors
    divergence: Amount | None = None  # published for its quantisation: ggufspec.planning.ranking.DIVERGENCE_SOURCE
    fits: str = ""  # ``whole``: all layers on the GPUs; ``partly``; ``no``: more than GPUs and free RAM hold
    gpu_layers: Count | None = None  # target-only, of ``layers`` blocks and the output
    layers: Count | None = None
    n_cpu_moe: Count | None = None
    n_cpu_ffn: Count | None = None
    target_only_tokens_per_s: Amount | None = None
    speculative_tokens_per_s: Amount | None = None
    break_even_acceptance: Share | None = None  # a chance per token
    break_even_accepted_share: Share | None = None  # the same as accepted ÷ drafted tokens
    largest_context: Count | None = None  # tokens with all layers on the GPUs
    pareto: bool = False
    error: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class RankedDraft:
    """One draft for the target of the document."""

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
    costs_layers: Count | None = None  # target layers that its memory would hold
    break_even_acceptance: Share | None = None  # a chance per token
    break_even_accepted_share: Share | None = None  # the same as accepted ÷ drafted tokens
    error: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class RankedRepository:
    """A repository that was searched."""

    repo: str
    commit: str
    heads: tuple[str, ...] = ()  # files that draft for its models
    left_out: tuple[str, ...] = ()  # models that have no row
    revision: str | None = None  # as requested


@dataclass(frozen=True, slots=True)
class RankingDocument:
    """``ggufspec/ranking@1``."""

    repositories: tuple[RankedRepository, ...]
    devices: dict[str, Any]
    rows: tuple[RankedModel, ...]  # by repository, the smallest first
    target: str | None
    draft: str | None  # draft assumed for ``speculative_tokens_per_s``
    drafts: tuple[RankedDraft, ...]  # for ``target``
    next: str  # the command for the best
    settings: dict[str, Any]
    speed: str
    bytes_read: Count
    notes: tuple[str, ...] = ()
    schema: str = field(default="ggufspec/ranking@1")
