"""JSON document of ``ggufspec plan`` for the models in one repository, or in several that a search found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count, Share


@dataclass(frozen=True, slots=True)
class RankedModel:
    """Ranked model; if ``error`` is set, only its name and size are known.

    ``pareto``: True if the model is Pareto-optimal in speed and quality within its repository. Quality is compared by
    ``divergence`` (lower is better) if both models have one, otherwise by bits per weight.
    """

    number: Count  # row number for ``pull --row``
    repo: str
    file: str
    name: str  # name of the model as argument of ``-hf``
    bytes: Count  # total size of the file or of all parts
    quant: str
    bits_per_weight: Amount | None = None  # mean bits per weight over all tensors
    divergence: Amount | None = None  # published value for the quantisation (planning.quantisations.DIVERGENCE_SOURCE)
    fits: str = ""  # ``whole``: all layers fit on the GPUs; ``partly``; ``no``: GPUs and free RAM are too small
    gpu_layers: Count | None = None  # offloaded layers for target-only, out of ``layers`` blocks plus the output
    layers: Count | None = None
    n_cpu_moe: Count | None = None
    n_cpu_ffn: Count | None = None
    target_only_tokens_per_s: Amount | None = None
    speculative_tokens_per_s: Amount | None = None
    break_even_acceptance: Share | None = None  # minimum acceptance probability per token for drafting to pay off
    break_even_accepted_share: Share | None = None  # break-even acceptance as accepted ÷ drafted tokens
    largest_context: Count | None = None  # longest context in tokens with all layers on the GPUs
    pareto: bool = False
    error: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class RankedDraft:
    """Ranked draft for the document's target."""

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
    costs_layers: Count | None = None  # number of target layers that would fit in the draft's memory
    break_even_acceptance: Share | None = None  # minimum acceptance probability per token for drafting to pay off
    break_even_accepted_share: Share | None = None  # break-even acceptance as accepted ÷ drafted tokens
    error: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class RankedRepository:
    """Repository whose models are ranked."""

    repo: str
    commit: str
    heads: tuple[str, ...] = ()  # files of heads that draft for the repository's models
    left_out: tuple[str, ...] = ()  # names of models without a row
    revision: str | None = None  # requested branch, tag or commit


@dataclass(frozen=True, slots=True)
class RankingDocument:
    """Document ``ggufspec/ranking@1``."""

    repositories: tuple[RankedRepository, ...]
    devices: dict[str, Any]
    rows: tuple[RankedModel, ...]  # ranked models by repository, smallest first
    target: str | None
    draft: str | None  # draft assumed for ``speculative_tokens_per_s``
    drafts: tuple[RankedDraft, ...]  # ranked drafts for ``target``
    next: str  # command to try next with the best model
    settings: dict[str, Any]
    speed: str
    bytes_read: Count
    notes: tuple[str, ...] = ()
    schema: str = field(default="ggufspec/ranking@1")
