"""JSON document of ``ggufspec plan``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """Placement of one model's layers. ``layers`` counts its blocks; ``gpu_layers`` may also count the output.

    ``bytes`` has ``weights``, ``kv``, ``compute`` and ``overhead`` by device; the host is ``CPU``. With ``op_offload``,
    a GPU also computes with the host's weights, in batches of at least ``op_offload_min_batch`` tokens; otherwise, it
    computes only with its own weights. ``load_mode`` and ``no_host`` say how weights are loaded.
    """

    file: str
    gpu_layers: Count
    layers: Count
    split: tuple[Amount, ...]
    n_cpu_moe: Count
    cache_type_k: str
    cache_type_v: str
    bytes: dict[str, dict[str, Count]]
    n_cpu_ffn: Count = 0
    override_tensor: tuple[str, ...] = ()
    op_offload: bool = True
    op_offload_min_batch: Count = 32
    load_mode: str = "auto"
    no_host: bool = False


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """Device with its memory, and how much of that memory the plan uses."""

    name: str
    description: str
    total_bytes: Count
    free_bytes: Count
    budget_bytes: Count
    used_bytes: Count
    overhead_bytes: Count
    mmproj_bytes: Count = 0  # memory that the plan reserves for an image projector


@dataclass(frozen=True, slots=True)
class PlannedOption:
    """Option with predicted speed: ``target_only``, ``speculative`` (fixed length) or ``default`` (as in ``run``)."""

    target: PlannedModel
    draft: PlannedModel | None
    tokens_per_s: Amount
    draft_length: Count


@dataclass(frozen=True, slots=True)
class SweepRow:
    """Predicted tokens/s with ``gpu_layers`` offloaded target layers; None if they do not fit the budget."""

    gpu_layers: Count
    target_only_tokens_per_s: Amount | None
    speculative_tokens_per_s: Amount | None


@dataclass(frozen=True, slots=True)
class DraftLengthRow:
    """Expected speed of the pair, as placed, at one draft length, and the acceptance needed to break even.

    ``accepted_share`` is the expected ratio of accepted to drafted tokens at that length, which other programs log. The
    pair is as fast as target-only at the ratio ``break_even_accepted_share`` or the acceptance probability per token
    ``break_even_acceptance``. Both are None if even a draft that is always accepted would not pay off.
    """

    draft_length: Count
    tokens_per_s: Amount
    accepted_share: Amount
    break_even_accepted_share: Amount | None
    break_even_acceptance: Amount | None


@dataclass(frozen=True, slots=True)
class ContextRow:
    """Faster option (pair or target-only) at a context size, with predicted tokens/s at an empty and a full context."""

    ctx_size: Count
    fits: bool  # False if GPUs or RAM are too small; if the GPUs are too small, the other fields keep their defaults
    target_layers: Count | None = None
    n_cpu_moe: Count = 0
    n_cpu_ffn: Count = 0
    draft_layers: Count | None = None
    cache_type_k: str = ""
    cache_type_v: str = ""
    host_bytes: Count | None = None
    empty_tokens_per_s: Amount | None = None
    full_tokens_per_s: Amount | None = None


@dataclass(frozen=True, slots=True)
class PlanDocument:
    """Document ``ggufspec/plan@1``."""

    pair: dict[str, Any]
    devices: tuple[PlannedDevice, ...]
    target: PlannedModel  # target as placed in the chosen option; the same holds for ``draft``
    draft: PlannedModel | None
    options: dict[str, PlannedOption | None]
    predicted: dict[str, Amount | None]  # predictions at ``depth`` cached tokens; ``acceptance`` is per token
    choice: str
    why: str
    settings: dict[str, Any]
    draft_costs_layers: Count
    confirmed: bool
    speed: str
    notes: tuple[str, ...]
    guessed: bool = False  # True if the host's speed was not measured
    sweep: tuple[SweepRow, ...] = ()
    contexts: tuple[ContextRow, ...] = ()  # rows for several context sizes; empty if the user gave one
    draft_lengths: tuple[DraftLengthRow, ...] = ()
    assumptions: tuple[str, ...] = ()  # assumed values, which were neither measured nor given
    tuned: dict[str, Any] | None = None  # measurement by ``tune`` on this machine
    next: str = ""  # command to try next
    also: tuple[str, ...] = ()  # further useful commands
    schema: str = field(default="ggufspec/plan@1")
