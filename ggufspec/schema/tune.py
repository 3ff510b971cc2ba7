"""The JSON document of ``ggufspec tune``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count, Failure, Spread


@dataclass(frozen=True, slots=True)
class TunedSetting:
    """One point of the space that tuning searches. ``drafted`` False is target-only."""

    gpu_layers: Count
    gpu_layers_draft: Count
    n_cpu_moe: Count
    drafted: bool
    drafter: str
    draft_policy: str
    draft_max: Count
    cache_type_k: str
    cache_type_v: str
    flash_attn: str
    threads: Count
    ubatch_size: Count
    n_cpu_ffn: Count = 0
    override_tensor: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TuneTrial:
    """One measurement of a tuning, in the order in which they were made.

    ``predicted_tokens_per_s`` is what the model expected before it; ``why`` why it was measured. ``seconds`` is what
    the trial took, its loading included. A setting that was measured again side by side at the end has these samples in
    ``tokens_per_s``, and those of before in ``searched``; a ``failure`` beside a speed is of one of several trials.
    """

    index: Count
    setting: TunedSetting
    predicted_tokens_per_s: Amount
    tokens_per_s: Spread | None
    prompt_tokens_per_s: Amount | None
    seconds: Amount
    why: str
    failure: Failure | None = None
    searched: tuple[Amount, ...] = ()


@dataclass(frozen=True, slots=True)
class TuneDocument:
    """``ggufspec/tune@1``: the search for the fastest setting.

    Args:
        trials: every measurement, those of an earlier, interrupted search too.
        winner: index of the trial whose setting won; None if none succeeded.
        baseline: the same of the planner's first choice.
        target_only: the same of the fastest without a draft.
        gain: winner ÷ baseline, measured interleaved at the end.
        stopped: why the search ended.
        saved: the profile that the winner was written to.
    """

    pair: dict[str, Any]
    machine: dict[str, Any]
    settings: dict[str, Any]
    trials: tuple[TuneTrial, ...]
    winner: Count | None
    baseline: Count | None
    target_only: Count | None
    gain: Spread | None
    stopped: str
    saved: str | None
    explanation: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default="ggufspec/tune@1")
