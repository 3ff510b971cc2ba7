"""The JSON documents that commands print. Keys are a contract: they are added to, never renamed.

Bytes are bytes, times are seconds, speeds are tokens per second.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Protocol, TypeAlias

from annotated_types import Ge, Le

from ggufspec.display import HARMFUL

# Of a document that is read, not of one that is made.
Count: TypeAlias = Annotated[int, Ge(0)]
Amount: TypeAlias = Annotated[float, Ge(0)]  # bytes, seconds, speeds, ratios
Share: TypeAlias = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """A measured number: its median, the 95 % interval of the median, and the raw samples."""

    median: Amount
    ci95: tuple[Amount, Amount]
    samples: tuple[Amount, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One way of running, over all its trials.

    Args:
        gpu_layers: of the target.
        layers: that it has.
        tokens: of the answers to one trial's prompts together.
        tokens_per_s: of answers; prompts are not counted.
        prompt_tokens_per_s: tokens of prompts that were decoded ÷ the seconds that took, the draft model's reading
            included.
        peak_rss_bytes: of the child.
        vram_bytes: by which the use of all cards rose.
        load_s: seconds of loading.
        prompt_tokens: that were decoded before the answers of one trial: all but the last one of each prompt, which the
            first round decodes, and those that a cache held.
        time_to_first_token_s: from the request for an answer to its first token, the models being loaded; the median
            of all answers.
    """

    gpu_layers: Count
    layers: Count
    tokens: Count
    tokens_per_s: Spread
    prompt_tokens_per_s: Amount
    peak_rss_bytes: Count
    vram_bytes: Count
    load_s: Amount
    prompt_tokens: Count = field(default=0, kw_only=True)
    time_to_first_token_s: Amount | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class SpeculativeRun(Run):
    """A run with drafts. ``accepted_by_position[i]`` is accepted ÷ drafted at place i of the draft.

    ``draft_s`` and ``verify_s`` are the mean seconds of a round. ``lossy`` says that the rule may change the text.
    ``plain_rounds`` had no draft, for it would not have paid; ``lookup_drafted`` and ``lookup_accepted`` are the tokens
    that came from the n-gram lookup.
    """

    gpu_layers_draft: Count
    draft_layers: Count
    acceptance_rate: Share
    tokens_per_round: Amount
    accepted_by_position: tuple[Share, ...]
    drafted: Count
    accepted: Count
    rounds: Count
    draft_s: Amount
    verify_s: Amount
    lossy: bool = False
    plain_rounds: Count = 0
    lookup_drafted: Count = 0
    lookup_accepted: Count = 0


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

    ``hook`` is there with ``--engine hook``.
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
    schema: str = field(default="ggufspec/bench@1")


@dataclass(frozen=True, slots=True)
class RunDocument:
    """``ggufspec/run@1``: one answer."""

    pair: dict[str, Any]
    settings: dict[str, Any]
    text: str
    tokens: tuple[Count, ...]
    stop_reason: str
    statistics: Run | SpeculativeRun
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default="ggufspec/run@1")


@dataclass(frozen=True, slots=True)
class ChatFigures:
    """What an answer of a chat took.

    Args:
        prompt_tokens: of the conversation, as the model got it.
        prompt_read: those that were decoded for this answer; the others were in the context.
        prompt_s: seconds that they took.
        tokens: of the answer.
        tokens_per_s: of the answer.
        rounds: of drafting and verifying; target tokens, where nobody drafts.
        drafted: drafted tokens that were verified.
        accepted: those that were kept.
        lookup_drafted: those that the n-gram lookup offered.
        lookup_accepted: those of them that were kept.
        lossy: whether the rule may have changed the text.
        prompt_tokens_per_s: of those that were decoded before the answer's first round, which decodes the last one; 0
            where there was no other.
        time_to_first_token_s: from the request to the answer's first token; absent where none came.
    """

    prompt_tokens: Count
    prompt_read: Count
    prompt_s: Amount
    tokens: Count
    tokens_per_s: Amount
    rounds: Count
    drafted: Count
    accepted: Count
    lookup_drafted: Count = 0
    lookup_accepted: Count = 0
    lossy: bool = False
    prompt_tokens_per_s: Amount = 0.0
    time_to_first_token_s: Amount | None = None


@dataclass(frozen=True, slots=True)
class ChatRun:
    """One of several answers to the same question: ``target-only``, ``draft-only`` or ``speculative``.

    ``differs_at`` is the place of the first token, from 1, that is not target-only's; absent where there is none.
    """

    name: str
    answer: str
    figures: ChatFigures
    differs_at: Count | None = None
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A question and its answer. ``stopped``: the user cut it short. ``answer`` is absent where none came.

    ``dropped`` counts the oldest turns that did not fit the context with this one; ``compared`` are the answers of
    ``/compare``.
    """

    user: str
    answer: str | None
    stopped: bool = False
    dropped: Count = 0
    stop_reason: str = ""
    figures: ChatFigures | None = None
    compared: tuple[ChatRun, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatDocument:
    """``ggufspec/chat@1``: a conversation, as it is saved and loaded, and as ``chat --json`` prints it.

    ``pair`` and ``settings`` tell with what it was said; loading leaves them alone. ``error`` and ``hint`` are of the
    message or command that ended it, if one did.
    """

    pair: dict[str, Any]
    settings: dict[str, Any]
    system: str
    turns: tuple[ChatTurn, ...]
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    error: str = ""
    hint: str = ""
    schema: str = field(default="ggufspec/chat@1")


@dataclass(frozen=True, slots=True)
class Written:
    """A token of a traced answer.

    Args:
        token: its id; -1 where a grammar ended the answer and text was still held back.
        text: what became certain with it; it may be empty or end an earlier character.
        source: who wrote it: ``draft`` or ``lookup`` offered it and the target kept it, ``bonus`` is the target's own
            behind a draft that was kept whole, ``target`` its own otherwise.
        round: of the trace, from 1.
    """

    token: int
    text: str
    source: str
    round: Count


@dataclass(frozen=True, slots=True)
class TraceDocument:
    """``ggufspec/trace@1``: the last line of a trace; those before it are its rounds (:mod:`ggufspec.schema.rounds`).

    ``rounds`` is how many there were, whether they were printed or not.
    """

    pair: dict[str, Any]
    settings: dict[str, Any]
    prompt: str
    text: str
    tokens: tuple[Written, ...]
    rounds: Count
    stop_reason: str
    statistics: Run | SpeculativeRun
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default="ggufspec/trace@1")


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """Where one model's layers go. ``layers`` are its blocks; the output is one more, as ``gpu_layers`` counts.

    ``bytes`` has, by device, ``weights``, ``kv``, ``compute`` and ``overhead``; the host is ``CPU``.
    """

    file: str
    gpu_layers: Count
    layers: Count
    split: tuple[Amount, ...]
    n_cpu_moe: Count
    cache_type_k: str
    cache_type_v: str
    bytes: dict[str, dict[str, Count]]


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """One device and what the plan uses of it; ``formula_error_bytes`` is formula minus llama.cpp."""

    name: str
    description: str
    total_bytes: Count
    free_bytes: Count
    budget_bytes: Count
    used_bytes: Count
    overhead_bytes: Count
    formula_error_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedOption:
    """One way of running and what it is predicted to reach."""

    target: PlannedModel
    draft: PlannedModel | None
    tokens_per_s: Amount
    draft_length: Count


@dataclass(frozen=True, slots=True)
class SweepRow:
    """Predicted tokens/s with so many target layers offloaded; None where it does not fit the budget."""

    gpu_layers: Count
    target_only_tokens_per_s: Amount | None
    speculative_tokens_per_s: Amount | None


@dataclass(frozen=True, slots=True)
class PlanDocument:
    """``ggufspec/plan@1``. ``target`` and ``draft`` are those of the chosen option; ``options`` has both ways."""

    pair: dict[str, Any]
    devices: tuple[PlannedDevice, ...]
    target: PlannedModel
    draft: PlannedModel | None
    options: dict[str, PlannedOption | None]
    predicted: dict[str, Amount | None]
    choice: str
    why: str
    settings: dict[str, Any]
    draft_costs_layers: Count
    confirmed: bool
    speed: str
    notes: tuple[str, ...]
    sweep: tuple[SweepRow, ...] = ()
    schema: str = field(default="ggufspec/plan@1")


class Document(Protocol):
    """Any of the documents: a frozen dataclass with a schema."""

    @property
    def schema(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ErrorDocument:
    """``ggufspec/error@1``: a failure and what to do next."""

    error: str
    hint: str
    schema: str = field(default="ggufspec/error@1")


def to_json(document: Document) -> str:
    """The document as JSON text, its schema first; what a terminal would obey is escaped."""
    return _json(document, indent=2)


def to_line(document: Document) -> str:
    """The same on one line."""
    return _json(document, indent=None)


def _json(document: Document, indent: int | None) -> str:
    body = asdict(document)  # type: ignore[call-overload]
    text = json.dumps({"schema": body.pop("schema"), **body}, indent=indent, ensure_ascii=False)
    return HARMFUL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that is not target-only's: the first token that differs.

    ``margin`` and ``noise`` are :class:`Divergence`'s, and absent where they were not asked for: in strict mode nothing
    excuses a difference. A token is absent where one answer had ended.
    """

    prompt: Count
    seed: Count | None
    policy: str
    position: Count
    target_only: Count | None
    speculative: Count | None
    margin: float | None = None
    noise: Amount | None = None
    explained: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """How often tokens stood at some place of the target's own distribution, and how often they should have."""

    name: str
    tokens: Count
    observed: Count
    expected: Amount
    p_value: Share


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a certificate.

    Args:
        section: ``strict``, ``default`` or ``distribution``.
        drafter: who drafted; ``target-only`` for the control of a distribution.
        rule: ``greedy``, ``keyed`` or ``residual``.
        status: ``passed``, ``failed`` or ``not possible``, which claims nothing.
        policies: how far was drafted, ``adaptive 15`` say.
        seeds: of the answers, each of which has ``prompts`` and ``policies``.
        answers: that were compared.
        tokens: in them.
        drafted: drafted tokens that the target judged for them.
        accepted: those that it kept.
        differences: answers that differ; a passed check of the default mode may have some, all explained.
        places: observed and expected counts of a distribution.
        p_value: of the least likely count, times the number of counts.
        threshold: the p-value from which on the check passes.
        reason: why it was not possible.
    """

    section: str
    drafter: str
    rule: str
    status: str
    policies: tuple[str, ...] = ()
    seeds: tuple[Count, ...] = ()
    answers: Count = 0
    tokens: Count = 0
    drafted: Count = 0
    accepted: Count = 0
    differences: tuple[Difference, ...] = ()
    places: tuple[Place, ...] = ()
    p_value: Share | None = None
    threshold: Share | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class VerifyDocument:
    """``ggufspec/verify@1``: the certificate that speculation changed nothing.

    ``models`` names target and draft by their files' SHA-256. ``passed`` says that every check that could be made was
    passed, and that none is missing.
    """

    pair: dict[str, Any]
    models: dict[str, Any]
    machine: dict[str, Any]
    settings: dict[str, Any]
    checks: tuple[Check, ...]
    passed: bool
    verdict: str
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default="ggufspec/verify@1")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something was not measured, and what to do about it."""

    error: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One value of the option that was swept. A run is absent where it failed; ``failure`` says why."""

    value: str
    target_only: Run | None
    speculative: Run | SpeculativeRun | None
    speedup: Spread | None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class SweepDocument:
    """``ggufspec/sweep@1``: a bench with one option at several values. ``option`` is its name: ``draft_max``, say."""

    pair: dict[str, Any]
    machine: dict[str, Any]
    settings: dict[str, Any]
    option: str
    points: tuple[SweepPoint, ...]
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default="ggufspec/sweep@1")


@dataclass(frozen=True, slots=True)
class Quality:
    """How near a quantised target is to the reference, the largest one given, on the bundled text.

    Each of the estimates has its standard error over the tokens of the text. ``mean_kl`` is KL(reference ‖ this), in
    nats a token; ``top1_agreement`` the share of places where both have the same likeliest token. The reference itself
    has ``mean_kl`` 0 and ``top1_agreement`` 1.
    """

    reference: str
    tokens: Count
    perplexity: Amount
    perplexity_error: Amount
    mean_kl: float
    mean_kl_error: Amount
    top1_agreement: Share
    top1_agreement_error: Amount


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """A target or draft file of a comparison. ``name`` is unique in it; drafts have no quality."""

    name: str
    file: str
    size_bytes: Count
    quality: Quality | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One target with one draft, or alone, at its own best placement.

    Args:
        target: name of a target.
        draft: name of a draft; None is the target alone.
        run: what was measured, absent if it failed.
        speedup: over the best target-only run of the same target file, paired by repetition; absent for that run.
        bytes: by device, the plan's parts ``target weights``, ``target kv``, ``target compute``, ``draft weights``,
            ``draft kv``, ``draft compute`` and ``overhead``; the host is ``CPU``.
        energy_j_per_token: where NVML counts energy: all cards together, the whole answers, idle power included.
        leads: whether it is the fastest of all, or its interval overlaps the fastest one's.
        failure: why there is no run.
    """

    target: str
    draft: str | None
    run: Run | SpeculativeRun | None
    speedup: Spread | None
    bytes: dict[str, dict[str, Count]] = field(default_factory=dict)
    energy_j_per_token: Amount | None = None
    leads: bool = False
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class CompareDocument:
    """``ggufspec/compare@1``: many targets × many drafts on one machine.

    ``warnings`` tell what makes the ranking unsure: leaders that overlap, a machine whose speed drifted.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    targets: tuple[ComparedModel, ...]
    drafts: tuple[ComparedModel, ...]
    cells: tuple[Cell, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default="ggufspec/compare@1")


@dataclass(frozen=True, slots=True)
class TunedSetting:
    """One point of the space that tuning searches. ``drafted`` False is the target alone."""

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
        winner: index of the trial whose setting won; None if none came through.
        baseline: index of the trial of the planner's first choice.
        target_only: index of the fastest trial without a draft.
        gain: winner ÷ baseline, measured interleaved at the end.
        stopped: why the search ended.
        saved: the profile that the winner was written to.
        explanation: sentences for ``--explain``.
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
