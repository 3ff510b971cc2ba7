"""JSON document of ``ggufspec bench``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count, Failure, MeasuredRun, Portion, SpeculativeRun, Spread


@dataclass(frozen=True, slots=True)
class Divergence:
    """First difference between the texts with and without drafts.

    ``margin`` is how far logits must shift for the other token to be chosen (greedy: the two logits' difference).
    ``noise`` is the largest change in the logit difference between any two leading tokens that the batch size alone
    causes, over all positions in the texts that diverged.
    """

    prompt: Count
    position: Count
    target_only: Count
    speculative: Count
    margin: float
    noise: Amount
    explained: bool  # True if the margin is below the noise


@dataclass(frozen=True, slots=True)
class AnswerTime:
    """Mean time for an answer of n tokens, which is ``once_s`` + ``token_s`` × (n - 1)."""

    once_s: float  # seconds for the prompt, plus seconds lost in the first rounds relative to the later rate
    token_s: Amount


@dataclass(frozen=True, slots=True)
class LengthSpeedup:
    """Speedup for an answer of a given length, including prompt processing."""

    tokens: Count
    target_only_s: Amount  # mean time for such an answer
    speculative_s: Amount
    speedup: Spread


@dataclass(frozen=True, slots=True)
class BenchVerdict:
    """Verdict on whether the draft is worth using."""

    worth_it: bool
    text: str
    why: str = ""  # one sentence on what a round gains and costs


@dataclass(frozen=True, slots=True)
class BenchDisturbance:
    """Other programs' CPU use while speculative and target-only answers were compared, and how many pairs count."""

    busy_share: float  # share of the time during which other programs used half a CPU or more
    others_cpus: float  # maximum number of CPUs that other programs used during a segment of an answer
    pairs: int  # number of segment pairs; a pair is the same part of both answers
    counting: int  # number of pairs that count towards the result
    part: str  # pairs that count: ``quiet``, ``similar load`` or ``all``


@dataclass(frozen=True, slots=True)
class HookComparison:
    """Runs of llama-cpp-python's ``Llama`` with our draft (``llama_hook``) and without it (``llama_target_only``)."""

    speedup: Spread | None  # speedup over ``Llama`` without a draft
    over_own: Spread | None  # speedup over our run ``speculative``
    identical_output: bool | None  # True if short greedy answers from ``Llama`` are the same with and without the hook
    identity_check: dict[str, Any]
    divergences: tuple[Divergence, ...]  # differences in the measured answers, if they are greedy
    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchDocument:
    """Document ``ggufspec/bench@1``."""

    pair: dict[str, Any]
    machine: dict[str, Any]
    plan: dict[str, Any]
    settings: dict[str, Any]
    runs: dict[str, MeasuredRun | SpeculativeRun | None]
    speedup: Spread | None
    identical_output: bool | None
    identity_check: dict[str, Any]
    divergences: tuple[Divergence, ...]
    verdict: BenchVerdict
    notes: tuple[str, ...] = ()
    interrupted: bool = False  # True after Ctrl-C; the results so far are complete
    hook: HookComparison | None = None  # comparison with llama-cpp-python, only with ``--engine hook``
    failures: dict[str, Failure] = field(default_factory=dict)  # reasons for failure by run, if any run crashed
    by_kind: tuple[Portion, ...] = ()  # results by kind of prompt, if there are several
    disturbance: BenchDisturbance | None = None
    by_part: tuple[Portion, ...] = ()  # results for thinking and for the answer, if the model thinks
    answer_tokens: Count = 0  # answer length that ``speedup`` and the verdict refer to; 0 in old documents
    measured_tokens: Count = 0  # mean length of the compared answers; times of longer ones are extrapolated
    answer_times: dict[str, AnswerTime] = field(default_factory=dict)  # answer times by run
    by_length: tuple[LengthSpeedup, ...] = ()
    next: str = ""  # command to try next
    schema: str = field(default="ggufspec/bench@1")
