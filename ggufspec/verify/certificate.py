"""The certificate that speculation changed nothing: what is asked of the models, and what the answers mean. Pure.

Three sections, each against the target alone. In strict mode every drafter must give its tokens to the bit. In default
mode an answer may leave it only at a near tie (:mod:`ggufspec.bench.divergence`). Answers that the residual rule drew
cannot be the same, only of the same distribution: the target reads them, and how often a token was the likeliest, the
second, another one, one that the draft favours, or the one that the lookup had offered, is held against the target's
own probabilities. By the rule's promise such a count is one of independent events of known chance, so that its p-value
is exact, however rare the event.

The job that asks is :mod:`ggufspec.verify.run`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ggufspec.decoding.loop import Round
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.rules.speculative import Distribution
from ggufspec.decoding.sampling import Logits, Sampling, candidates
from ggufspec.schema.bench import Divergence
from ggufspec.schema.verify import Check, Difference, Place

STRICT, DEFAULT, DISTRIBUTION = "strict", "default", "distribution"
PASSED, FAILED, NOT_POSSIBLE = "passed", "failed", "not possible"
TARGET_ONLY = "target-only"
LOSSLESS = ("exact", "residual")  # the rules that promise to change nothing
FALSE_ALARM = 1e-4  # chance that the distributions of a faultless decoder fail, all of them together

Events = Mapping[str, Sequence[tuple[float, bool]]]  # by name: chance and outcome, token by token


@dataclass(frozen=True, slots=True)
class Policy:
    """How far is drafted: a draft policy's name and its ``draft_max``."""

    name: str
    draft_max: int

    def __str__(self) -> str:
        return f"{self.name} {self.draft_max}"


ADAPTIVE = Policy("adaptive", 15)
EVERY_POLICY = (ADAPTIVE, Policy("fixed", 1), Policy("fixed", 4), Policy("fixed", 15))
TWO_POLICIES = (ADAPTIVE, Policy("fixed", 4))


@dataclass(frozen=True, slots=True)
class Spec:
    """What to certify.

    Args:
        target: the target's file.
        draft: the draft's, or None.
        options: placement, context and threads; drafter, policy, rule and mode are varied.
        drafters: names of those to check.
        rules: acceptance rules to check, all lossless.
        prompts: texts to continue.
        max_tokens: tokens of each answer at most.
        sampling: of the answers that are not greedy; its seed is the first.
        seeds: answers to each prompt, each with a seed of its own, in every way of running.
        policies: those of strict mode.
        rpc: workers whose devices are used.
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
class Ask:
    """An answer to ask for: which prompt, and how tokens are chosen."""

    prompt: int
    sampling: Sampling

    @property
    def rule(self) -> str:
        """The exact rule's name for it."""
        return "coupled" if self.sampling.temperature else "greedy"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came; ``offered`` is what the lookup had offered for the answer's tokens, by their index."""

    ask: Ask
    tokens: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0
    offered: Mapping[int, int] = field(default_factory=dict)


Answers = Mapping[Ask, tuple[int, ...]]
Parting = tuple[Ask, tuple[int, ...]]  # an answer up to the token that is not the target's


def identical_asks(spec: Spec) -> list[Ask]:
    """Answers that have to be the target's own: greedy, and with every seed."""
    samplings = [replace(spec.sampling, temperature=0.0)]
    samplings += [_seeded(spec.sampling, number) for number in range(spec.seeds)]
    return [Ask(prompt, sampling) for prompt in range(len(spec.prompts)) for sampling in samplings]


def drawn_asks(spec: Spec, leg: int) -> list[Ask]:
    """Answers of one distribution. No two have a seed in common: with the same randomness they would be no samples."""
    count = len(spec.prompts) * spec.seeds
    return [Ask(number % len(spec.prompts), _seeded(spec.sampling, leg * count + number)) for number in range(count)]


def _seeded(sampling: Sampling, number: int) -> Sampling:
    return replace(sampling, seed=(sampling.seed + number) % 2**64)


def answers_asked(spec: Spec) -> int:
    """How many answers a run asks for."""
    exact, residual = "exact" in spec.rules, "residual" in spec.rules
    identical = len(identical_asks(spec)) * (2 + len(spec.drafters) * (len(spec.policies) + len(TWO_POLICIES)))
    drawn = len(drawn_asks(spec, 0)) * (exact + residual * len(spec.drafters) * len(TWO_POLICIES))
    return exact * identical + drawn


def offered_tokens(rounds: Iterable[Round]) -> dict[int, int]:
    """What the lookup offered for the answer's tokens, where everything before was kept.

    It follows from the text before, as the target's probabilities do; a token that a draft has drawn does not.
    """
    offered, length = {}, 0
    for one in rounds:
        reached = one.drafted[: len(one.emitted)]  # the kept ones, and the one that was not
        for place, (token, name) in enumerate(zip(reached, one.drafters, strict=False)):
            if name == "lookup":
                offered[length + place] = token
        length += len(one.emitted)
    return offered


def first_difference(expected: Sequence[int], given: Sequence[int]) -> int | None:
    """Index of the first token that differs; None where none does."""
    if expected == given:
        return None
    pairs = zip(expected, given, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(given)))


def compare(
    section: str,
    drafter: str,
    alone: Answers,
    given: Mapping[Policy, Sequence[Answer]],
    explained: Mapping[Parting, Divergence] | None = None,
) -> list[Check]:
    """A check for the greedy answers and one for those with coupled noise.

    A policy that drafted nothing, as the adaptive one does where no draft pays, shows nothing: its answers are compared
    and are not counted among those that the check rests on.

    Args:
        section: ``strict`` or ``default``.
        drafter: its name.
        alone: what the target said.
        given: what came with the drafter.
        explained: for the default mode, what was found out about answers that differ.
    """
    return [_compare(section, drafter, rule, alone, given, explained or {}) for rule in ("greedy", "coupled")]


def _compare(
    section: str,
    drafter: str,
    rule: str,
    alone: Answers,
    given: Mapping[Policy, Sequence[Answer]],
    explained: Mapping[Parting, Divergence],
) -> Check:
    answers = [(policy, answer) for policy, some in given.items() for answer in some if answer.ask.rule == rule]
    differences = []
    for policy, answer in answers:
        expected = alone[answer.ask]
        at = first_difference(expected, answer.tokens)
        if at is None:
            continue
        about = explained.get((answer.ask, answer.tokens[: at + 1]))
        differences.append(
            Difference(
                prompt=answer.ask.prompt,
                seed=answer.ask.sampling.seed if rule == "coupled" else None,
                policy=str(policy),
                position=at,
                target_only=expected[at] if at < len(expected) else None,
                speculative=answer.tokens[at] if at < len(answer.tokens) else None,
                margin=about.margin if about else None,
                noise=about.noise if about else None,
                explained=about.explained if about else False,
            )
        )
    judged = FAILED if any(not one.explained for one in differences) else PASSED
    claiming = {policy for policy, answer in answers if answer.drafted}
    claiming |= {policy for policy in given if any(one.policy == str(policy) for one in differences)}
    counted = [(policy, answer) for policy, answer in answers if policy in claiming or not claiming]
    policies = tuple(str(policy) for policy in given if policy in claiming or not claiming)
    return _check(section, drafter, rule, judged, policies, [answer for _, answer in counted], differences)


def _check(
    section: str,
    drafter: str,
    rule: str,
    status: str,
    policies: tuple[str, ...],
    answers: Sequence[Answer],
    differences: Sequence[Difference] = (),
) -> Check:
    """A check of answers; where no token was drafted there is nothing that it could claim."""
    drafted = sum(answer.drafted for answer in answers)
    idle = status == PASSED and not drafted and drafter != TARGET_ONLY
    seeds = {answer.ask.sampling.seed for answer in answers if answer.ask.rule == "coupled"}
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
    rows: Sequence[Logits], token: int, sampling: Sampling, offered: int | None
) -> dict[str, tuple[float, bool]]:
    """What may be true of a token, the chance of it by the target's logits, and whether it is.

    Args:
        rows: (vocab,) penalised logits of the target, and of the draft where there is one.
        token: what was emitted.
        sampling: temperature and truncations.
        offered: what the lookup had offered before, if it had.

    Returns:
        ``likeliest``, ``second`` and ``others``, of the target; ``favoured``, one of those that the draft thinks more
        likely than the target does: most faults show there; ``offered``, the lookup's.
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
    if offered is not None:
        events["offered"] = float(target.at(np.array([offered]))[0]), token == offered
    return events


def tail(chances: npt.ArrayLike, observed: int) -> float:
    """Two-sided p-value of a count of independent events: twice the smaller tail.

    Exact: the distribution of the count is built up event by event (Poisson-binomial; Hong 2013, section 2).

    Args:
        chances: (n,) of the events.
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
    """Whether answers have the target's distribution.

    Args:
        drafter: who drafted.
        rule: by which the tokens were drawn.
        policies: how far was drafted.
        answers: what came.
        events: by name, (chance, whether it is so) of tokens in these answers.
        tests: distributions that are judged in all; they share the chance of a false alarm.
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
    """Whether the certificate is given, and the sentence that says so."""
    failed = [check for check in checks if check.status == FAILED]
    passed = [check for check in checks if check.status == PASSED]
    if failed:
        named = "; ".join(f"{check.section}, {check.drafter}, {check.rule}" for check in failed)
        return (
            False,
            f"FAILED: {len(failed)} of {len(checks)} checks ({named}). Speculation changes what the target says.",
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
        text += f". Some checks claim nothing, since no token was drafted: {', '.join(idle)}"
    return True, text + "."
