"""JSON document of ``ggufspec rehearse``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Spread


@dataclass(frozen=True, slots=True)
class RehearsedModel:
    """Measurements of a model. ``batch_s`` is T(n) by batch size n; ``layers`` counts the blocks, without the output.

    ``bytes`` holds llama.cpp's figures for ``weights``, ``kv`` and ``compute`` by device; the host is ``CPU``.
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
    """Models loaded together: ``pair``, ``target_only``, or the target with ``half`` or ``none`` of its GPU layers."""

    name: str
    target: RehearsedModel | None
    draft: RehearsedModel | None
    ram_bytes: int
    vram_bytes: int
    left_out: str = ""  # reason why the models were not loaded
    disturbed: int = 0  # number of samples that do not count because other programs used the CPUs
    others_cpus: float = 0.0  # maximum number of CPUs that other programs used


@dataclass(frozen=True, slots=True)
class ExpectedSpeed:
    """Expected speed of the pair at an ``acceptance`` probability; ``gain`` is relative to the best target-only."""

    acceptance: float
    draft_length: int
    tokens_per_s: float
    gain: float


@dataclass(frozen=True, slots=True)
class RehearseDocument:
    """Document ``ggufspec/rehearse@1``. ``rival_tokens_per_s`` is the best target-only run's speed."""

    pair: dict[str, Any]
    machine: dict[str, Any]
    settings: dict[str, Any]
    dummy_weights: dict[str, Any]
    runs: tuple[RehearsedRun, ...]
    rival_tokens_per_s: Spread
    expected: tuple[ExpectedSpeed, ...]
    break_even_acceptance: float | None
    why: str
    notes: tuple[str, ...] = ()
    label: str = "measured on dummy weights; acceptance assumed"
    schema: str = field(default="ggufspec/rehearse@1")
