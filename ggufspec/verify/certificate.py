"""The certificate that speculation changed nothing: which answers it needs, and how they are judged. Pure.

It has three sections, each compared with target-only. In strict mode every drafter must produce target-only's tokens to
the bit. In default mode an answer may differ only at a near tie (:mod:`ggufspec.bench.divergence`). Answers that the
residual rule sampled cannot be the same, only of the same distribution: the target scores them. How often a token was
the likeliest, the second, another one, one that the draft favours, or the one that the lookup had proposed, is compared
with the target's own probabilities. If the rule is right, such a count is one of independent events of known
probability, so that its p-value is exact, however rare the event.

The job is :mod:`ggufspec.verify.run`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ggufspec.bench.divergence import first_difference
from ggufspec.decoding.loop import Round
from ggufspec.decoding.options import DecoderOptions, WithOptions
from ggufspec.decoding.rules.distribution import Distribution
from ggufspec.decoding.sampling import Logits, Sampling, candidates
from ggufspec.schema.bench import Divergence
from ggufspec.schema.verify import Check, Difference, Place

STRICT, DEFAULT, DISTRIBUTION = "strict", "default", "distribution"
PASSED, FAILED, NOT_POSSIBLE = "passed", "failed", "not possible"
TARGET_ONLY = "target-only"
LOSSLESS = ("exact", "residual")  # rules that promise to change nothing
FALSE_ALARM = 1e-4  # probability that a correct decoder fails any of the distribution checks

Events = Mapping[str, Sequence[tuple[float, bool]]]  # by name: probability and outcome, token by token


@dataclass(frozen=True, slots=True)
class Policy:
    """Draft policy: its name and its ``draft_max``."""

    name: str
    draft_max: int

    def __str__(self) -> str:
        return f"{self.name} {self.draft_max}"


ADAPTIVE = Policy("adaptive", 15)
EVERY_POLICY = (ADAPTIVE, Policy("fixed", 1), Policy("fixed", 4), Policy("fixed", 15))
TWO_POLICIES = (ADAPTIVE, Policy("fixed", 4))


@dataclass(frozen=True, slots=True)
class Spec(WithOptions):
    """The job of a certificate: ``drafters`` under lossless ``rules``, in strict mode with ``policies``.

    Drafter, policy, rule and mode in ``options`` are varied. ``sampling`` is for the answers that are not greedy; its
    seed is the first, and ``seeds`` is the number of answers per prompt, each with its own seed, in every variant.
    """

    target: Path
    draft: Path | None
    options: DecoderOptions
    drafters: tuple[str, ...]
    rules: tuple[str, ...]
    prompts: tuple[str, ...]
    max_tokens: int
    sampling: Sampling
    seeds: int
    policies: tuple[Policy, ...] = EVERY_POLICY
    rpc: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    prompt: int
    sampling: Sampling

    @property
    def rule(self) -> str:
        return "coupled" if self.sampling.temperature else "greedy"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; ``proposed`` has the lookup's proposals for the answer's tokens, by index."""

    request: Request
    tokens: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0
    proposed: Mapping[int, int] = field(default_factory=dict)


Answers = Mapping[Request, tuple[int, ...]]
Divergent = tuple[Request, tuple[int, ...]]  # an answer up to the token that differs from the target's


def identical_requests(spec: Spec) -> list[Request]:
    """Return requests whose answers must be the target's own: greedy, and with every seed."""
    samplings = [replace(spec.sampling, temperature=0.0)]
    samplings += [_seeded(spec.sampling, number) for number in range(spec.seeds)]
    return [Request(prompt, sampling) for prompt in range(len(spec.prompts)) for sampling in samplings]


def sampled_requests(spec: Spec, leg: int) -> list[Request]:
    """Return requests for samples of one distribution, with distinct seeds, because they must be independent."""
    count = len(spec.prompts) * spec.seeds
    return [
        Request(number % len(spec.prompts), _seeded(spec.sampling, leg * count + number)) for number in range(count)
    ]


def _seeded(sampling: Sampling, number: int) -> Sampling:
    return replace(sampling, seed=(sampling.seed + number) % 2**64)


def answers_needed(spec: Spec) -> int:
    exact, residual = "exact" in spec.rules, "residual" in spec.rules
    identical = len(identical_requests(spec)) * (2 + len(spec.drafters) * (len(spec.policies) + len(TWO_POLICIES)))
    drawn = len(sampled_requests(spec, 0)) * (exact + residual * len(spec.drafters) * len(TWO_POLICIES))
    return exact * identical + drawn


def proposed_tokens(rounds: Iterable[Round]) -> dict[int, int]:
    """Return the lookup's proposals for the answer's tokens at positions where everything before was accepted.

    A proposal depends only on the text before it, as the target's probabilities do; a sampled token does not.
    """
    proposed, length = {}, 0
    for one in rounds:
        reached = one.drafted[: len(one.emitted)]  # the accepted tokens, and the rejected one
        for position, (token, name) in enumerate(zip(reached, one.drafters, strict=False)):
            if name == "lookup":
                proposed[length + position] = token
        length += len(one.emitted)
    return proposed


def compare(
    section: str,
    drafter: str,
    alone: Answers,
    given: Mapping[Policy, Sequence[Answer]],
    explained: Mapping[Divergent, Divergence] | None = None,
) -> list[Check]:
    """Make one check of the greedy answers and one of those with coupled sampling.

    A policy that drafted nothing, as the adaptive one does if no draft pays, proves nothing: its answers are compared,
    but not counted. ``explained`` has the measured divergences of the default mode.
    """
    checks = []
    for rule in ("greedy", "coupled"):
        answers = {policy: [one for one in some if one.request.rule == rule] for policy, some in given.items()}
        differences = [
            _difference(policy, one, alone[one.request], explained or {})
            for policy, some in answers.items()
            for one in some
            if one.tokens != alone[one.request]
        ]
        status = FAILED if any(not one.explained for one in differences) else PASSED
        claiming = {
            policy: some
            for policy, some in answers.items()
            if any(one.drafted or one.tokens != alone[one.request] for one in some)
        }
        counted = claiming or answers
        every = [one for some in counted.values() for one in some]
        checks.append(_check(section, drafter, rule, status, tuple(map(str, counted)), every, differences))
    return checks


def _difference(
    policy: Policy, answer: Answer, expected: tuple[int, ...], explained: Mapping[Divergent, Divergence]
) -> Difference:
    at = first_difference(expected, answer.tokens)
    about = explained.get((answer.request, answer.tokens[: at + 1]))
    return Difference(
        prompt=answer.request.prompt,
        seed=answer.request.sampling.seed if answer.request.rule == "coupled" else None,
        policy=str(policy),
        position=at,
        target_only=expected[at] if at < len(expected) else None,
        speculative=answer.tokens[at] if at < len(answer.tokens) else None,
        margin=about.margin if about else None,
        noise=about.noise if about else None,
        explained=about.explained if about else False,
    )


def _check(
    section: str,
    drafter: str,
    rule: str,
    status: str,
    policies: tuple[str, ...],
    answers: Sequence[Answer],
    differences: Sequence[Difference] = (),
) -> Check:
    """Make a check of answers; it proves nothing if no token was drafted."""
    drafted = sum(answer.drafted for answer in answers)
    idle = status == PASSED and not drafted and drafter != TARGET_ONLY
    seeds = {answer.request.sampling.seed for answer in answers if answer.request.rule == "coupled"}
    return Check(
        section=section,
        drafter=drafter,
        rule=rule,
        status=NOT_POSSIBLE if idle else status,
        policies=policies,
        seeds=tuple(sorted(seeds)),
        answers=len(answers),
        tokens=sum(len(answer.tokens) for answer in answers),
        drafted=drafted,
        accepted=sum(answer.accepted for answer in answers),
        differences=tuple(differences),
        reason="not one token was drafted" if idle else "",
    )


def places(
    rows: Sequence[Logits], token: int, sampling: Sampling, proposed: int | None
) -> dict[str, tuple[float, bool]]:
    """Return events that may be true of a token: their probability by the target's logits, and the outcome.

    Args:
        rows: (vocab,) penalised logits of the target, and of the draft if there is one.
        token: the emitted token.
        sampling: temperature and truncations.
        proposed: the lookup's proposal for it, if any.

    Returns:
        ``likeliest``, ``second`` and ``others``, of the target; ``favoured``, a token with a higher probability in the
        draft than in the target, where most faults show; ``proposed``, the lookup's.
    """
    target = Distribution.of(candidates(rows[0], sampling))
    order = np.argsort(-target.probabilities, kind="stable")
    ranked, chances = target.ids[order].tolist(), target.probabilities[order].tolist()
    ranks = {"likeliest": slice(0, 1), "second": slice(1, 2), "others": slice(2, None)}
    events = {name: (min(1.0, sum(chances[rank])), token in ranked[rank]) for name, rank in ranks.items()}
    if token not in ranked:
        events["others"] = events["others"][0], True
    if len(rows) > 1:
        draft = Distribution.of(candidates(rows[1][: rows[0].size], sampling))
        known = target.at(draft.ids)
        favoured = draft.probabilities > known
        events["favoured"] = min(1.0, float(known[favoured].sum())), token in draft.ids[favoured]
    if proposed is not None:
        events["proposed"] = float(target.at(np.array([proposed]))[0]), token == proposed
    return events


def tail(chances: npt.ArrayLike, observed: int) -> float:
    """Return the two-sided p-value of a count of independent events: twice the smaller tail.

    Exact: the distribution of the count is built up event by event (Poisson-binomial; Hong 2013, section 2).

    Args:
        chances: (n,) probabilities of the events.
        observed: how many came true.
    """
    each = np.asarray(chances, np.float64)
    mass = np.zeros(each.size + 2)
    mass[0] = 1.0
    for chance in each:
        mass[1:] = mass[1:] * (1 - chance) + mass[:-1] * chance
        mass[0] *= 1 - chance
    return float(min(1.0, 2 * min(mass[: observed + 1].sum(), mass[observed:].sum())))


def judge_distribution(
    drafter: str, rule: str, policies: tuple[str, ...], answers: Sequence[Answer], events: Events, *, tests: int
) -> Check:
    """Check whether answers have the target's distribution, by the ``events`` in them.

    ``tests`` is the number of distributions that are judged in total; they share the probability of a false alarm.
    """
    counts = []
    for name, outcomes in events.items():
        chances, observed = [chance for chance, _ in outcomes], sum(true for _, true in outcomes)
        counts.append(Place(name, len(outcomes), observed, sum(chances), tail(chances, observed)))
    p_value = min([1.0, *(len(counts) * place.p_value for place in counts)])
    threshold = FALSE_ALARM / tests
    check = _check(DISTRIBUTION, drafter, rule, PASSED if p_value >= threshold else FAILED, policies, answers)
    return replace(check, places=tuple(counts), p_value=p_value, threshold=threshold)


def judge(checks: Sequence[Check], *, interrupted: bool = False) -> tuple[bool, str]:
    """Return (True if the certificate is given, the sentence that says so)."""
    failed = [check for check in checks if check.status == FAILED]
    passed = [check for check in checks if check.status == PASSED]
    if failed:
        named = "; ".join(f"{check.section}, {check.drafter}, {check.rule}" for check in failed)
        return (
            False,
            f"FAILED: {len(failed)} of {len(checks)} checks ({named}). Speculation changes the output.",
        )
    if interrupted:
        return False, f"No certificate: interrupted after {len(checks)} checks, of which none had failed."
    if not passed:
        return False, "No certificate: nothing could be checked."
    text = (
        f"PASSED: {len(passed)} checks, {sum(check.tokens for check in passed):,} tokens. Speculation changes nothing"
    )
    if any(check.section == STRICT and check.rule == "exact" and check.status == NOT_POSSIBLE for check in checks):
        text += " but near ties: this device cannot keep strict mode, and the certificate rests on the default mode"
    elif any(check.differences for check in passed):
        text += " but near ties in the default mode; --strict has none"
    idle = sorted({check.drafter for check in checks if check.status == NOT_POSSIBLE and check.answers})
    if idle:
        text += f". Some checks prove nothing, since no token was drafted: {', '.join(idle)}"
    return True, text + "."
