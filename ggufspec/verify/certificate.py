"""Certificate that speculation changed nothing: the answers it needs, and how they are judged. Pure.

It has three sections, each compared with target-only. In strict mode every drafter must produce exactly target-only's
tokens. In default mode an answer may differ only at a near tie (:mod:`ggufspec.bench.divergence`). Answers sampled by
the residual rule need not be identical but must follow the same distribution, so the target scores them. We count how
often a token was the likeliest, the second likeliest, any other, one that the draft favours, or the lookup's proposal,
and compare the counts with the target's own probabilities. If the rule is correct, these events are independent and
have known probabilities, so the p-value of their count is exact, however rare they are.

The job that produces the certificate is :mod:`ggufspec.verify.run`.
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
from ggufspec.decoding.sampling import Logits, Sampling, token_candidates
from ggufspec.schema.bench import Divergence
from ggufspec.schema.verify import AnswerDifference, CertificateCheck, RankCounts

STRICT, DEFAULT, DISTRIBUTION = "strict", "default", "distribution"
PASSED, FAILED, NOT_POSSIBLE = "passed", "failed", "not possible"
TARGET_ONLY = "target-only"
LOSSLESS = ("exact", "residual")  # rules that must not change the output
FALSE_ALARM = 1e-4  # probability that a correct decoder fails any of the distribution checks

Events = Mapping[str, Sequence[tuple[float, bool]]]  # by name: (probability, outcome) for each token


@dataclass(frozen=True, slots=True)
class CertifiedPolicy:
    """Draft policy: its name and its ``draft_max``."""

    name: str
    draft_max: int

    def __str__(self) -> str:
        return f"{self.name} {self.draft_max}"


ADAPTIVE = CertifiedPolicy("adaptive", 15)
EVERY_POLICY = (ADAPTIVE, CertifiedPolicy("fixed", 1), CertifiedPolicy("fixed", 4), CertifiedPolicy("fixed", 15))
TWO_POLICIES = (ADAPTIVE, CertifiedPolicy("fixed", 4))


@dataclass(frozen=True, slots=True)
class CertificateJob(WithOptions):
    """Job that certifies ``drafters`` under lossless ``rules``, in strict mode with ``policies``.

    The job varies the drafter, policy, rule and mode of ``options``. ``sampling`` is for answers that are not greedy;
    its seed is the first. In every variant, each prompt gets ``seeds`` such answers, each with its own seed.
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
    policies: tuple[CertifiedPolicy, ...] = EVERY_POLICY
    rpc: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CertificateRequest:
    prompt: int
    sampling: Sampling

    @property
    def rule(self) -> str:
        return "coupled" if self.sampling.temperature else "greedy"


@dataclass(frozen=True, slots=True)
class CertificateAnswer:
    """Answer to one request; ``proposed`` holds the lookup's proposals for the answer's tokens, by index."""

    request: CertificateRequest
    tokens: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0
    proposed: Mapping[int, int] = field(default_factory=dict)


Answers = Mapping[CertificateRequest, tuple[int, ...]]
Divergent = tuple[CertificateRequest, tuple[int, ...]]  # request, and answer up to and including the divergent token


def identical_requests(spec: CertificateJob) -> list[CertificateRequest]:
    """Return the requests whose answers must equal target-only's: for each prompt, a greedy one and one per seed."""
    samplings = [replace(spec.sampling, temperature=0.0)]
    samplings += [_seeded(spec.sampling, number) for number in range(spec.seeds)]
    return [CertificateRequest(prompt, sampling) for prompt in range(len(spec.prompts)) for sampling in samplings]


def sampled_requests(spec: CertificateJob, leg: int) -> list[CertificateRequest]:
    """Return requests for samples from one distribution; seeds are distinct, because samples must be independent."""
    count = len(spec.prompts) * spec.seeds
    return [
        CertificateRequest(number % len(spec.prompts), _seeded(spec.sampling, leg * count + number))
        for number in range(count)
    ]


def _seeded(sampling: Sampling, number: int) -> Sampling:
    return replace(sampling, seed=(sampling.seed + number) % 2**64)


def answers_needed(spec: CertificateJob) -> int:
    exact, residual = "exact" in spec.rules, "residual" in spec.rules
    identical = len(identical_requests(spec)) * (2 + len(spec.drafters) * (len(spec.policies) + len(TWO_POLICIES)))
    drawn = len(sampled_requests(spec, 0)) * (exact + residual * len(spec.drafters) * len(TWO_POLICIES))
    return exact * identical + drawn


def proposed_tokens(rounds: Iterable[Round]) -> dict[int, int]:
    """Return the lookup's proposals for the answer's tokens, by index, including each round's first rejected token.

    Like the target's probabilities, a proposal depends only on the text before it; a sampled token does not.
    """
    proposed, length = {}, 0
    for one in rounds:
        reached = one.drafted[: len(one.emitted)]  # the accepted tokens, and the first rejected one
        for position, (token, name) in enumerate(zip(reached, one.drafters, strict=False)):
            if name == "lookup":
                proposed[length + position] = token
        length += len(one.emitted)
    return proposed


def compare_answers(
    section: str,
    drafter: str,
    alone: Answers,
    given: Mapping[CertifiedPolicy, Sequence[CertificateAnswer]],
    explained: Mapping[Divergent, Divergence] | None = None,
) -> list[CertificateCheck]:
    """Make one check of the greedy answers and one of the answers with coupled sampling.

    A policy that drafted nothing (the adaptive one, if no draft pays off) proves nothing, so its answers are compared
    but not counted. ``explained`` holds the measured divergences in default mode.
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
    policy: CertifiedPolicy,
    answer: CertificateAnswer,
    expected: tuple[int, ...],
    explained: Mapping[Divergent, Divergence],
) -> AnswerDifference:
    at = first_difference(expected, answer.tokens)
    about = explained.get((answer.request, answer.tokens[: at + 1]))
    return AnswerDifference(
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
    answers: Sequence[CertificateAnswer],
    differences: Sequence[AnswerDifference] = (),
) -> CertificateCheck:
    """Make a check of answers; it proves nothing if no token was drafted."""
    drafted = sum(answer.drafted for answer in answers)
    idle = status == PASSED and not drafted and drafter != TARGET_ONLY
    seeds = {answer.request.sampling.seed for answer in answers if answer.request.rule == "coupled"}
    return CertificateCheck(
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


def token_events(
    rows: Sequence[Logits], token: int, sampling: Sampling, proposed: int | None
) -> dict[str, tuple[float, bool]]:
    """Return the events tested for a token, each with its probability under the target and whether it occurred.

    Args:
        rows: (vocab,) penalised logits of the target, and of the draft if there is one.
        token: the emitted token.
        sampling: temperature and truncation.
        proposed: the lookup's proposal for this position, if any.

    Returns:
        ``likeliest``, ``second`` and ``others`` in the target's ranking; ``favoured``, a token with a higher
        probability in the draft than in the target, which reveals most faults; ``proposed``, the lookup's proposal.
    """
    target = Distribution.of(token_candidates(rows[0], sampling))
    order = np.argsort(-target.probabilities, kind="stable")
    ranked, chances = target.ids[order].tolist(), target.probabilities[order].tolist()
    ranks = {"likeliest": slice(0, 1), "second": slice(1, 2), "others": slice(2, None)}
    events = {name: (min(1.0, sum(chances[rank])), token in ranked[rank]) for name, rank in ranks.items()}
    if token not in ranked:
        events["others"] = events["others"][0], True
    if len(rows) > 1:
        draft = Distribution.of(token_candidates(rows[1][: rows[0].size], sampling))
        known = target.at(draft.ids)
        favoured = draft.probabilities > known
        events["favoured"] = min(1.0, float(known[favoured].sum())), token in draft.ids[favoured]
    if proposed is not None:
        events["proposed"] = float(target.at(np.array([proposed]))[0]), token == proposed
    return events


def tail(chances: npt.ArrayLike, observed: int) -> float:
    """Return the two-sided p-value of a count of independent events: twice the smaller tail.

    It is exact: the distribution of the count is built up event by event (Poisson-binomial; Hong 2013, section 2).

    Args:
        chances: (n,) probabilities of the events.
        observed: number of events that occurred.
    """
    each = np.asarray(chances, np.float64)
    mass = np.zeros(each.size + 2)
    mass[0] = 1.0
    for chance in each:
        mass[1:] = mass[1:] * (1 - chance) + mass[:-1] * chance
        mass[0] *= 1 - chance
    return float(min(1.0, 2 * min(mass[: observed + 1].sum(), mass[observed:].sum())))


def judge_distribution(
    drafter: str,
    rule: str,
    policies: tuple[str, ...],
    answers: Sequence[CertificateAnswer],
    events: Events,
    *,
    tests: int,
) -> CertificateCheck:
    """Test whether answers follow the target's distribution, using the ``events`` in them.

    ``tests`` is the total number of distributions that are judged; they share the probability of a false alarm.
    """
    counts = []
    for name, outcomes in events.items():
        chances, observed = [chance for chance, _ in outcomes], sum(true for _, true in outcomes)
        counts.append(RankCounts(name, len(outcomes), observed, sum(chances), tail(chances, observed)))
    p_value = min([1.0, *(len(counts) * place.p_value for place in counts)])
    threshold = FALSE_ALARM / tests
    check = _check(DISTRIBUTION, drafter, rule, PASSED if p_value >= threshold else FAILED, policies, answers)
    return replace(check, places=tuple(counts), p_value=p_value, threshold=threshold)


def certificate_verdict(checks: Sequence[CertificateCheck], *, interrupted: bool = False) -> tuple[bool, str]:
    """Return whether the certificate is granted, and the verdict as a sentence."""
    failed = [check for check in checks if check.status == FAILED]
    passed = [check for check in checks if check.status == PASSED]
    if failed:
        named = "; ".join(f"{check.section}, {check.drafter}, {check.rule}" for check in failed)
        return (
            False,
            f"FAILED: {len(failed)} of {len(checks)} checks ({named}). Speculation changes the output.",
        )
    if interrupted:
        return False, f"No certificate: interrupted after {len(checks)} checks, none of which had failed."
    if not passed:
        return False, "No certificate: nothing could be checked."
    text = (
        f"PASSED: {len(passed)} checks, {sum(check.tokens for check in passed):,} tokens. Speculation changes nothing"
    )
    if any(check.section == STRICT and check.rule == "exact" and check.status == NOT_POSSIBLE for check in checks):
        text += " except at near ties: this device cannot run strict mode, so the certificate rests on default mode"
    elif any(check.differences for check in passed):
        text += " except at near ties in default mode; --strict has none"
    idle = sorted({check.drafter for check in checks if check.status == NOT_POSSIBLE and check.answers})
    if idle:
        text += f". Some checks prove nothing, because no token was drafted: {', '.join(idle)}"
    return True, text + "."
