"""The JSON document of ``ggufspec bench``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Amount, Count, Failure, Portion, Run, SpeculativeRun, Spread


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the text with draft leaves the text without.

    ``margin`` is by how much logits have to shift for the other token to be chosen, the difference of both when greedy;
    ``noise`` the largest change that the batch width
    alone makes to the difference between two leading tokens, along the texts that diverged. ``explained`` says that the
    margin is below the noise.
    """

    prompt: Count
    position: Count
    target_only: Count
    speculative: Count
    margin: float
    noise: Amount
    explained: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to the question that the bench was run for; ``why`` is what a round gives and costs, in a sentence."""

    worth_it: bool
    text: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class HookComparison:
    """llama-cpp-python's ``Llama`` with our draft as its draft model: the runs ``llama_target_only``, ``llama_hook``.

    ``speedup`` is over ``Llama`` alone, ``over_own`` over the run ``speculative``. ``identical_output`` compares short
    greedy answers of ``Llama`` with and without the hook; ``divergences`` are those of the measured answers, if greedy.
    """

    speedup: Spread | None
    over_own: Spread | None
    identical_output: bool | None
    identity_check: dict[str, Any]
    divergences: tuple[Divergence, ...]
    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchDocument:
    """``ggufspec/bench@1``. ``interrupted`` says that Ctrl-C ended it: what is there was measured in full.

    ``hook`` is there with ``--engine hook``. ``failures`` has the runs that crashed, with the reason. ``by_kind`` is by
    kind of prompt where there are several, ``by_part`` thinking and answer where the model thinks.
    """

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
    interrupted: bool = False
    hook: HookComparison | None = None
    failures: dict[str, Failure] = field(default_factory=dict)
    by_kind: tuple[Portion, ...] = ()
    by_part: tuple[Portion, ...] = ()
    schema: str = field(default="ggufspec/bench@1")
