"""The JSON document of ``ggufspec plan``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """Placement of one model's layers. ``layers`` are its blocks; the output is one more, as ``gpu_layers`` counts.

    ``bytes`` has, by device, ``weights``, ``kv``, ``compute`` and ``overhead``; the host is ``CPU``. Without
    ``op_offload`` a card computes with the weights that it has alone; with it, with the host's in batches of
    ``op_offload_min_batch`` tokens and more. ``load_mode`` and ``no_host`` are how weights come into memory.
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
    """One device and what the plan uses of it."""

    name: str
    description: str
    total_bytes: Count
    free_bytes: Count
    budget_bytes: Count
    used_bytes: Count
    overhead_bytes: Count
    mmproj_bytes: Count = 0  # an image projector's, for which the plan leaves room


@dataclass(frozen=True, slots=True)
class PlannedOption:
    """One way of running and what it is predicted to reach: ``target_only``, ``speculative`` with a fixed draft length,
    or ``default``, which is what a run does.
    """

    target: PlannedModel
    draft: PlannedModel | None
    tokens_per_s: Amount
    draft_length: Count


@dataclass(frozen=True, slots=True)
class SweepRow:
    """Predicted tokens/s with so many target layers offloaded; None if it does not fit the budget."""

    gpu_layers: Count
    target_only_tokens_per_s: Amount | None
    speculative_tokens_per_s: Amount | None


@dataclass(frozen=True, slots=True)
class DraftLengthRow:
    """One draft length at the pair's placement: the speed that is expected, and the acceptance that it takes.

    ``accepted_share`` is accepted ÷ drafted tokens at that length, as programs log it: what is expected.
    ``break_even_accepted_share`` is the same if the pair is as fast as target-only, ``break_even_acceptance`` the
    chance of one token then. Both are None if not even a draft that is always right is worth it.
    """

    draft_length: Count
    tokens_per_s: Amount
    accepted_share: Amount
    break_even_accepted_share: Amount | None
    break_even_acceptance: Amount | None


@dataclass(frozen=True, slots=True)
class ContextRow:
    """The faster option with so many tokens of context, and its predicted tokens/s with none and all of them filled."""

    ctx_size: Count
    fits: bool  # on the cards; if not, or if the host cannot hold it, the rest is None
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
    """``ggufspec/plan@1``."""

    pair: dict[str, Any]
    devices: tuple[PlannedDevice, ...]
    target: PlannedModel  # of the chosen option, and so is the draft
    draft: PlannedModel | None
    options: dict[str, PlannedOption | None]
    predicted: dict[str, Amount | None]  # with ``depth`` tokens in the cache; ``acceptance`` is a chance per token
    choice: str
    why: str
    settings: dict[str, Any]
    draft_costs_layers: Count
    confirmed: bool
    speed: str
    notes: tuple[str, ...]
    guessed: bool = False  # the host's speed was not measured
    sweep: tuple[SweepRow, ...] = ()
    contexts: tuple[ContextRow, ...] = ()  # if no context was asked for
    draft_lengths: tuple[DraftLengthRow, ...] = ()
    assumptions: tuple[str, ...] = ()  # what was neither measured nor named
    tuned: dict[str, Any] | None = None  # what ``tune`` measured here
    next: str = ""  # the command to type
    schema: str = field(default="ggufspec/plan@1")
