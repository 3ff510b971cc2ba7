"""The JSON document of ``ggufspec bench``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count, Failure, Portion, Run, SpeculativeRun, Spread


@dataclass(frozen=True, slots=True)
class Divergence:
    """First difference between the text with drafts and the text without.

    ``margin`` is how far logits must shift for the other token to be chosen (greedy: the difference between both);
    ``noise`` the largest change that the batch size alone makes to the difference between two leading tokens, along
    the texts that diverged.
    """

    prompt: Count
    position: Count
    target_only: Count
    speculative: Count
    margin: float
    noise: Amount
    explained: bool  # the margin is below the noise


@dataclass(frozen=True, slots=True)
class AnswerTime:
    """Mean time of an answer of n tokens: ``once_s`` + ``token_s`` × (n - 1)."""

    once_s: float  # seconds for the prompt, and those lost in the first rounds relative to the later rate
    token_s: Amount


@dataclass(frozen=True, slots=True)
class LengthSpeedup:
    """Speedup of an answer of so many tokens, its prompt included."""

    tokens: Count
    target_only_s: Amount  # mean time of such an answer
    speculative_s: Amount
    speedup: Spread


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to the question that the bench was run for."""

    worth_it: bool
    text: str
    why: str = ""  # what a round gives and costs, in a sentence


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Use of the CPUs by other programs while speculative and target-only answers were compared, and what counts."""

    busy_share: float  # of the time: other programs used half a CPU or more
    others_cpus: float  # the most CPUs during a segment of an answer
    pairs: int  # of segments, the same part of both answers each
    counting: int
    part: str  # that counts: quiet, similar load, all


@dataclass(frozen=True, slots=True)
class HookComparison:
    """llama-cpp-python's ``Llama`` with our draft model: the runs ``llama_target_only``, ``llama_hook``."""

    speedup: Spread | None  # over ``Llama`` alone
    over_own: Spread | None  # over the run ``speculative``
    identical_output: bool | None  # of short greedy answers of ``Llama`` with and without the hook
    identity_check: dict[str, Any]
    divergences: tuple[Divergence, ...]  # of the measured answers, if greedy
    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchDocument:
    """``ggufspec/bench@1``."""

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
    notes: tuple[str, ...] = ()
    interrupted: bool = False  # by Ctrl-C: what is there was measured in full
    hook: HookComparison | None = None  # with ``--engine hook``
    failures: dict[str, Failure] = field(default_factory=dict)  # of the runs that crashed
    by_kind: tuple[Portion, ...] = ()  # of prompts, if there are several
    disturbance: Disturbance | None = None
    by_part: tuple[Portion, ...] = ()  # thinking and answer, if the model thinks
    answer_tokens: Count = 0  # length of the answers that ``speedup`` and the verdict are for; 0 in old documents
    measured_tokens: Count = 0  # mean length of the answers that were compared; longer ones are extrapolated
    answer_times: dict[str, AnswerTime] = field(default_factory=dict)  # by run
    by_length: tuple[LengthSpeedup, ...] = ()
    next: str = ""  # the command to type
    schema: str = field(default="ggufspec/bench@1")
