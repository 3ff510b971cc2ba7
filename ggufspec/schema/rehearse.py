"""The JSON document of ``ggufspec rehearse``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Spread


@dataclass(frozen=True, slots=True)
class RehearsedModel:
    """One model as it ran. ``batch_s`` has T(n) by batch size; ``layers`` are blocks, the output is one more.

    ``bytes`` has, by device, ``weights``, ``kv`` and ``compute`` as llama.cpp counts them; the host is ``CPU``.
    """

    file: str
    layers: int
    gpu_layers: int
    tokens_per_s: Spread
    batch_s: dict[int, Spread]
    prompt_tokens_per_s: float
    depth: int
    load_s: float
    bytes: dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class RehearsedRun:
    """Models loaded together: ``pair``, ``target_only``, ``half`` of its layers or ``none``; or why it was skipped."""

    name: str
    target: RehearsedModel | None
    draft: RehearsedModel | None
    ram_bytes: int
    vram_bytes: int
    left_out: str = ""
    disturbed: int = 0  # samples that do not count, because other programs used the CPUs
    others_cpus: float = 0.0  # maximum CPUs that other programs used


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected speed of the pair at an ``acceptance`` probability; ``gain`` is over the best target-only."""

    acceptance: float
    draft_length: int
    tokens_per_s: float
    gain: float


@dataclass(frozen=True, slots=True)
class RehearseDocument:
    """``ggufspec/rehearse@1``. ``rival_tokens_per_s`` is the best target-only."""

    pair: dict[str, Any]
    machine: dict[str, Any]
    settings: dict[str, Any]
    dummy_weights: dict[str, Any]
    runs: tuple[RehearsedRun, ...]
    rival_tokens_per_s: Spread
    expected: tuple[Expected, ...]
    break_even_acceptance: float | None
    why: str
    notes: tuple[str, ...] = ()
    label: str = "measured on dummy weights; acceptance assumed"
    schema: str = field(default="ggufspec/rehearse@1")
