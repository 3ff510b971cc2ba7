"""The JSON documents that commands print. Keys are a contract: they are added to, never renamed.

Bytes are bytes, times are seconds, speeds are tokens per second.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """A measured number: its median, the 95 % interval of the median, and the raw samples."""

    median: float
    ci95: tuple[float, float]
    samples: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One way of running, over all its trials. ``tokens`` is the sum over one trial's prompts."""

    gpu_layers: int
    layers: int
    tokens: int
    tokens_per_s: Spread
    prompt_tokens_per_s: float
    peak_rss_bytes: int
    vram_bytes: int
    load_s: float


@dataclass(frozen=True, slots=True)
class SpeculativeRun(Run):
    """A run with drafts. ``accepted_by_position[i]`` is accepted ÷ drafted at place i of the draft.

    ``draft_s`` and ``verify_s`` are the mean seconds of a round.
    """

    draft_gpu_layers: int
    draft_layers: int
    acceptance_rate: float
    tokens_per_round: float
    accepted_by_position: tuple[float, ...]
    drafted: int
    accepted: int
    rounds: int
    draft_s: float
    verify_s: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the text with draft leaves the text without.

    ``margin`` is the difference in logits between the two tokens; ``noise`` the largest change that the batch width
    alone makes to the difference between two leading tokens, along the texts that diverged. ``explained`` says that the
    margin is below the noise.
    """

    prompt: int
    position: int
    target_only: int
    speculative: int
    margin: float
    noise: float
    explained: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to the question that the bench was run for."""

    worth_it: bool
    text: str


@dataclass(frozen=True, slots=True)
class BenchDocument:
    """``ggufspec/bench@1``. ``interrupted`` says that Ctrl-C ended it: what is there was measured in full."""

    pair: dict[str, Any]
    machine: dict[str, Any]
    plan: dict[str, Any]
    settings: dict[str, Any]
    runs: dict[str, Run | SpeculativeRun | None]
    speedup: Spread | None
    identical_output: bool | None
    identity_check: dict[str, Any]
    divergences: tuple[Divergence, ...]
    verdict: Verdict
    interrupted: bool = False
    schema: str = field(default="ggufspec/bench@1")


@dataclass(frozen=True, slots=True)
class RunDocument:
    """``ggufspec/run@1``: one answer."""

    pair: dict[str, Any]
    settings: dict[str, Any]
    text: str
    tokens: tuple[int, ...]
    stop_reason: str
    statistics: Run | SpeculativeRun
    interrupted: bool = False
    schema: str = field(default="ggufspec/run@1")


@dataclass(frozen=True, slots=True)
class ErrorDocument:
    """``ggufspec/error@1``: a failure and what to do next."""

    error: str
    hint: str
    schema: str = field(default="ggufspec/error@1")


def to_json(document: BenchDocument | RunDocument | ErrorDocument) -> str:
    """The document as JSON text, its schema first."""
    body = asdict(document)
    return json.dumps({"schema": body.pop("schema"), **body}, indent=2, ensure_ascii=False)
