"""The JSON document of ``ggufspec tune``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count, Failure, Spread


@dataclass(frozen=True, slots=True)
class TunedSetting:
    """One point of the space that tuning searches."""

    gpu_layers: Count
    gpu_layers_draft: Count
    n_cpu_moe: Count
    drafted: bool  # False: target-only
    drafter: str
    draft_policy: str
    draft_max: Count
    cache_type_k: str
    cache_type_v: str
    flash_attn: str
    threads: Count
    ubatch_size: Count
    n_cpu_ffn: Count = 0
    op_offload_min_batch: Count = 32
    override_tensor: tuple[str, ...] = ()
    load_mode: str = "auto"
    no_host: bool = False


@dataclass(frozen=True, slots=True)
class TuneTrial:
    """One measurement of a tuning, in the order of measurement."""

    index: Count
    setting: TunedSetting
    predicted_tokens_per_s: Amount  # prediction before the measurement
    tokens_per_s: Spread | None  # if the setting was measured again side by side at the end, the samples from then
    prompt_tokens_per_s: Amount | None
    seconds: Amount  # including loading
    why: str  # reason for the measurement
    failure: Failure | None = None  # with a speed, the failure of one of several trials
    searched: tuple[Amount, ...] = ()  # samples from before the end, if it was measured again


@dataclass(frozen=True, slots=True)
class TuneDocument:
    """``ggufspec/tune@1``: the search for the fastest setting."""

    pair: dict[str, Any]
    machine: dict[str, Any]
    settings: dict[str, Any]
    trials: tuple[TuneTrial, ...]  # every measurement, including those of an earlier, interrupted search
    winner: Count | None  # index of the trial whose setting won; None if none succeeded
    baseline: Count | None  # index of the planner's first choice
    target_only: Count | None  # index of the fastest trial without a draft
    gain: Spread | None  # winner ÷ baseline, measured interleaved at the end
    stopped: str  # why the search ended
    saved: str | None  # profile that the winner was written to
    speedup: Spread | None = None  # winner ÷ target_only, measured interleaved at the end
    decided: bool = False  # intervals say that the winner is faster than the baseline and target_only, or it is planned
    close: tuple[Count, ...] = ()  # indices of trials that are not told from the winner
    verdict: str = ""  # in sentences
    advice: str = ""  # what may settle it, if it is not decided
    explanation: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default="ggufspec/tune@1")
