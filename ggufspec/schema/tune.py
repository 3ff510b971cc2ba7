"""JSON document of ``ggufspec tune``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count, Failure, Spread


@dataclass(frozen=True, slots=True)
class TunedSetting:
    """Point in the space of settings that ``tune`` searches."""

    gpu_layers: Count
    gpu_layers_draft: Count
    n_cpu_moe: Count
    drafted: bool  # True with a draft, False for target-only
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
    """Measurements of one setting by ``tune``; settings are in the order of their first measurements."""

    index: Count
    setting: TunedSetting
    predicted_tokens_per_s: Amount  # speed predicted before the measurement
    tokens_per_s: Spread | None  # measured speed; from the final round if the setting took part in it
    prompt_tokens_per_s: Amount | None
    seconds: Amount  # total duration of the setting's trials, including loading
    why: str  # reason for the first measurement
    failure: Failure | None = None  # first failure; if there is also a speed, other trials succeeded
    searched: tuple[Amount, ...] = ()  # earlier samples in tokens/s, if the setting was measured again at the end


@dataclass(frozen=True, slots=True)
class TuneDocument:
    """Document ``ggufspec/tune@1``: the search for the fastest setting."""

    pair: dict[str, Any]
    machine: dict[str, Any]
    settings: dict[str, Any]
    trials: tuple[TuneTrial, ...]  # all measurements, including those from an earlier, interrupted search
    winner: Count | None  # index of the trial whose setting won; None if none succeeded
    baseline: Count | None  # index of the planner's first choice
    target_only: Count | None  # index of the fastest trial without a draft
    gain: Spread | None  # speed of winner ÷ baseline, from interleaved trials at the end
    stopped: str  # reason why the search ended
    saved: str | None  # profile to which the winner was saved
    speedup: Spread | None = None  # speed of winner ÷ target_only, from interleaved trials at the end
    decided: bool = False  # True if the winner was planned, or if it clearly beats baseline and target_only
    close: tuple[Count, ...] = ()  # indices of trials whose speed cannot be distinguished from the winner's
    verdict: str = ""  # verdict in sentences
    advice: str = ""  # next step that may settle the verdict; empty if decided
    explanation: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default="ggufspec/tune@1")
