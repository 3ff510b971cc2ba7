"""What a certificate's answers mean: pure, with answers and probabilities made by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.bench import divergence
from ggufspec.decoding.loop import Round
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.rules import speculative
from ggufspec.decoding.rules.base import AcceptanceResult
from ggufspec.decoding.rules.coupled import CoupledRule
from ggufspec.decoding.rules.distribution import Distribution
from ggufspec.decoding.rules.speculative import Draws, verify_residual
from ggufspec.decoding.sampling import Sampling, token_candidates
from ggufspec.schema.bench import Divergence
from ggufspec.schema.verify import CertificateCheck
from ggufspec.verify import certificate
from ggufspec.verify.certificate import (
    ADAPTIVE,
    DEFAULT,
    EVERY_POLICY,
    STRICT,
    CertificateAnswer,
    CertificateJob,
    CertificateRequest,
)

WARM = Sampling(temperature=0.8, seed=3)
BARE = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
GREEDY = replace(WARM, temperature=0.0)
SPEC = CertificateJob(
    Path("t"), Path("d"), DecoderOptions(), ("draft", "both"), ("exact", "residual"), ("a", "b"), 8, WARM, 3
)


# ---- what is asked


def test_identical_answers_are_greedy_and_of_every_seed():
    asks = certificate.identical_requests(SPEC)
    assert [(ask.prompt, ask.rule, ask.sampling.seed) for ask in asks[:4]] == [
        (0, "greedy", 3),
        (0, "coupled", 3),
        (0, "coupled", 4),
        (0, "coupled", 5),
    ]
    assert len(asks) == len(set(asks)) == 8


def test_drawn_answers_share_no_randomness():
    """With one seed for all prompts the same uniform variables would decide every answer."""
    asks = [ask for leg in range(3) for ask in certificate.sampled_requests(SPEC, leg)]
    assert len({ask.sampling.seed for ask in asks}) == len(asks) == 3 * 2 * 3
    assert [sum(ask.prompt == prompt for ask in asks) for prompt in (0, 1)] == [9, 9]


def test_a_seed_at_the_end_of_its_range_goes_on_at_its_beginning():
    last = replace(SPEC, sampling=replace(WARM, seed=2**64 - 1))
    assert [ask.sampling.seed for ask in certificate.identical_requests(last)[1:4]] == [2**64 - 1, 0, 1]
    assert len({ask.sampling.seed for ask in certificate.sampled_requests(last, 2)}) == 6


def a_round(drafted, drafters, accepted, emitted):
    return Round(drafted, drafters, accepted, emitted, len(drafted) + 1, 0.0, 0.0, 0.0)


def test_what_the_lookup_offered_is_known_up_to_the_first_wrong_token():
    rounds = [
        a_round((7, 8, 9), ("lookup",) * 3, 1, (7, 5)),  # 8 was wrong, and 9 follows a wrong token
        a_round((), (), 0, (6,)),
        a_round((1, 2), ("draft", "lookup"), 2, (1, 2, 3)),
        a_round((4, 4), ("lookup", "lookup"), 2, (4,)),  # the answer ended with the first of them
    ]
    assert certificate.proposed_tokens(rounds) == {0: 7, 1: 8, 4: 2, 6: 4}


# ---- identity


ASKS = (CertificateRequest(0, GREEDY), CertificateRequest(1, GREEDY), CertificateRequest(0, WARM))
ALONE = {ask: (1, 2, 3, number) for number, ask in enumerate(ASKS)}


def given_answers(changes=None, drafted=5):
    changes = changes or {}
    return {
        policy: [CertificateAnswer(ask, changes.get((policy, ask), ALONE[ask]), drafted, drafted - 2) for ask in ASKS]
        for policy in EVERY_POLICY
    }


def test_identical_answers_pass():
    greedy, coupled = certificate.compare_answers(STRICT, "both", ALONE, given_answers())
    assert (greedy.status, greedy.rule, greedy.answers, greedy.tokens) == ("passed", "greedy", 8, 32)
    assert (greedy.drafted, greedy.accepted, greedy.seeds, greedy.differences) == (40, 24, (), ())
    assert (coupled.status, coupled.rule, coupled.answers, coupled.tokens, coupled.seeds) == (
        "passed",
        "coupled",
        4,
        16,
        (3,),
    )
    assert greedy.policies == ("adaptive 15", "fixed 1", "fixed 4", "fixed 15")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [((1, 9, 3, 2), (1, 2, 9)), ((1, 2, 3), (3, 2, None)), ((1, 2, 3, 2, 2), (4, None, 2)), ((), (0, 1, None))],
)
def test_a_difference_in_strict_mode_fails(wrong, said):
    changed = given_answers({(EVERY_POLICY[2], ASKS[2]): wrong})
    greedy, coupled = certificate.compare_answers(STRICT, "draft", ALONE, changed)
    assert (greedy.status, coupled.status) == ("passed", "failed")
    (one,) = coupled.differences
    assert (one.prompt, one.seed, one.policy) == (0, 3, "fixed 4")
    assert (one.position, one.target_only, one.speculative) == said


def test_in_default_mode_a_near_tie_passes_and_a_wrong_token_does_not():
    wrong = (1, 2, 9, 9)
    changed = given_answers({(ADAPTIVE, ASKS[0]): wrong})

    def check(*, explained):
        found = {(ASKS[0], (1, 2, 9)): Divergence(0, 2, 3, 9, 0.5, 0.6, explained)}
        return certificate.compare_answers(DEFAULT, "draft", ALONE, changed, found)[0]

    near, far = check(explained=True), check(explained=False)
    assert (near.status, near.differences[0].margin, near.differences[0].noise) == ("passed", 0.5, 0.6)
    assert (far.status, far.differences[0].explained) == ("failed", False)
    assert certificate.compare_answers(DEFAULT, "draft", ALONE, changed)[0].status == "failed"  # it was not examined


def test_a_policy_that_drafted_nothing_is_not_among_the_claims():
    """The adaptive one, where no draft pays."""
    given = given_answers()
    given[ADAPTIVE] = [replace(answer, drafted=0, accepted=0) for answer in given[ADAPTIVE]]
    greedy, _ = certificate.compare_answers(STRICT, "both", ALONE, given)
    assert (greedy.status, greedy.policies) == ("passed", ("fixed 1", "fixed 4", "fixed 15"))
    assert (greedy.answers, greedy.tokens, greedy.drafted) == (6, 24, 30)
    given[ADAPTIVE][0] = replace(given[ADAPTIVE][0], tokens=(9,))
    greedy, _ = certificate.compare_answers(STRICT, "both", ALONE, given)
    assert (greedy.status, greedy.policies, greedy.answers) == ("failed", tuple(map(str, EVERY_POLICY)), 8)


def test_without_a_drafted_token_nothing_is_claimed():
    idle = given_answers(drafted=0)
    check = certificate.compare_answers(STRICT, "lookup", ALONE, idle)[0]
    assert (check.status, check.reason) == ("not possible", "not one token was drafted")
    wrong = given_answers({(ADAPTIVE, ASKS[0]): (9,)}, drafted=0)
    assert certificate.compare_answers(STRICT, "lookup", ALONE, wrong)[0].status == "failed"


# ---- how far a divergence is from a tie


ROW = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))


def chosen(row, sampling, position):
    return CoupledRule(sampling).verify(row[None], (), position).token


def test_the_margin_of_greedy_tokens_is_the_difference_of_their_logits():
    assert divergence.margin(ROW, (0, 2), GREEDY, range(5)) == pytest.approx(float(ROW[0] - ROW[2]))
    assert divergence.margin(ROW, (2, 0), GREEDY, range(5)) == pytest.approx(float(ROW[0] - ROW[2]))


def test_the_margin_of_penalised_tokens_is_that_of_the_rows_before():
    """Token 0 has 2 after its penalty: they are equal when 1 loses 1, or 0 has 2 more before that."""
    row, text = np.array([4.0, 3.0, -1.0, -1.0], np.float32), [0]
    penalised = replace(GREEDY, repeat_penalty=2.0)
    assert divergence.margin(row, (1, 0), penalised, text) == pytest.approx(1.0, abs=1e-5)
    assert divergence.margin(row, (0, 1), penalised, text) == pytest.approx(1.0, abs=1e-5)
    assert row.tolist() == [4.0, 3.0, -1.0, -1.0]


@pytest.mark.parametrize("sampling", [BARE, replace(BARE, temperature=0.7), replace(BARE, top_p=0.9, min_p=0.05)])
@pytest.mark.parametrize("position", range(12))
def test_the_margin_under_keyed_noise_is_what_tips_the_choice(sampling, position):
    first = chosen(ROW, sampling, position)
    for second in set(range(4)) - {first}:
        margin = divergence.margin(ROW, (first, second), sampling, range(position))
        assert margin == divergence.margin(ROW, (second, first), sampling, range(position))
        if not sampling.truncates:
            raised = ROW.copy()
            raised[second] += margin + 1e-4
            assert chosen(raised, sampling, position) == second
            raised[second] -= 2e-4
            assert chosen(raised, sampling, position) != second


def test_a_token_at_the_border_of_a_truncation_is_near():
    """Token 1 has 0.3 of the best one's probability: min-p 0.301 leaves it out, by a hair."""
    row = np.log(np.array([1.0, 0.3, 1e-4, 1e-4], np.float32))
    out, kept = replace(BARE, min_p=0.301), replace(BARE, min_p=0.299)
    positions = [i for i in range(200) if chosen(row, kept, i) == 1]
    assert positions
    for position in positions:
        assert chosen(row, out, position) == 0
        assert divergence.margin(row, (0, 1), out, range(position)) == pytest.approx(np.log(0.301 / 0.3), abs=1e-3)


# ---- distributions


def test_what_may_be_true_of_a_token():
    events = certificate.token_events([ROW], 1, BARE, proposed=3)
    chances = {name: chance for name, (chance, _) in events.items()}
    assert chances == pytest.approx({"likeliest": 0.5, "second": 0.3, "others": 0.2, "proposed": 0.05})
    assert [name for name, (_, true) in events.items() if true] == ["second"]
    assert [name for name, (_, true) in certificate.token_events([ROW], 3, BARE, 3).items() if true] == [
        "others",
        "proposed",
    ]
    assert "proposed" not in certificate.token_events([ROW], 3, BARE, None)


def test_what_the_draft_favours():
    """It gives tokens 1 and 3 more than the target does; of a longer vocabulary the end is not the target's."""
    draft = np.log(np.array([0.3, 0.5, 0.1, 0.1, 0.1], np.float32))
    favoured = [certificate.token_events([ROW, draft], token, BARE, None)["favoured"] for token in range(4)]
    assert [chance for chance, _ in favoured] == pytest.approx([0.35] * 4)
    assert [true for _, true in favoured] == [False, True, False, True]
    assert certificate.token_events([ROW, draft[:2]], 1, BARE, None)["favoured"] == (pytest.approx(0.3), True)


def test_a_token_that_is_certain():
    events = certificate.token_events([ROW], 0, replace(BARE, top_k=1), proposed=2)
    assert events == {
        "likeliest": (1.0, True),
        "second": (0.0, False),
        "others": (0.0, False),
        "proposed": (0.0, False),
    }
    assert certificate.token_events([ROW], 2, replace(BARE, top_k=1), None)["others"] == (
        0.0,
        True,
    )  # it cannot have been


@given(st.lists(st.fractions(0, 1, max_denominator=10), min_size=1, max_size=7))
def test_the_tail_is_that_of_all_outcomes(chances):
    mass = [Fraction(0)] * (len(chances) + 1)
    for outcome in itertools.product((0, 1), repeat=len(chances)):
        weight = Fraction(1)
        for chance, true in zip(chances, outcome, strict=True):
            weight *= chance if true else 1 - chance
        mass[sum(outcome)] += weight
    for observed in range(len(chances) + 1):
        exact = min(1, 2 * min(sum(mass[: observed + 1]), sum(mass[observed:])))
        assert certificate.tail([float(chance) for chance in chances], observed) == pytest.approx(float(exact))


def test_a_count_that_cannot_be():
    assert certificate.tail([0.0, 0.5], 2) == 0.0
    assert certificate.tail([], 0) == 1.0


class Words:
    """Synthetic target and draft rows: alike, as those of a pair are."""

    def __init__(self, seed, tokens=1000, vocabulary=50):
        rng = np.random.default_rng(seed)
        shape = (tokens, vocabulary)
        self.target = (2.5 * rng.standard_normal(shape)).astype(np.float32)
        self.draft = (self.target + rng.standard_normal(shape)).astype(np.float32)
        self.rng = rng

    def emit(self, bug=None, lookup=False):
        """(both rows, emitted token, offered token or None) with drafts of one token, judged by a rule with a bug."""
        for p_row, q_row in zip(self.target, self.draft, strict=True):
            p, q = Distribution.of(token_candidates(p_row, WARM)), Distribution.of(token_candidates(q_row, WARM))
            chance = Draws(self.rng)
            token = int(q_row.argmax()) if lookup else int(q.ids[chance.draw(q.probabilities)])
            q = Distribution.point(token) if lookup else q
            verdict = (bug or judged)(p, token, q, chance)
            yield [p_row, q_row], token if verdict.accepted else verdict.token, token if lookup else None


def judged(p, token, q, chance):
    return verify_residual(lambda _: p, [(token, q)], chance)


def always_accept(p, token, q, chance):
    return AcceptanceResult(1, 0)


def resample_from_the_target(p, token, q, chance):
    if chance.accept(min(1, float(p.at(np.array([token]))[0] / q.at(np.array([token]))[0]))):
        return AcceptanceResult(1, 0)
    return AcceptanceResult(0, int(p.ids[chance.draw(p.probabilities)]))


def subtract_by_index(p, token, q, chance):
    """Residual over lists that are truncated differently."""
    if chance.accept(min(1, float(p.at(np.array([token]))[0] / q.at(np.array([token]))[0]))):
        return AcceptanceResult(1, 0)
    size = min(p.ids.size, q.ids.size)
    left = speculative.residual(p.probabilities[:size], q.probabilities[:size])
    return AcceptanceResult(0, int(p.ids[:size][chance.draw(left)]))


def accept_without_the_draft(p, token, q, chance):
    """At p instead of p / q."""
    if chance.accept(float(p.at(np.array([token]))[0])):
        return AcceptanceResult(1, 0)
    return AcceptanceResult(0, int(p.ids[chance.draw(speculative.residual(p.probabilities, q.at(p.ids)))]))


def judgement(words, **how):
    events = {}
    for rows, token, offered in words.emit(**how):
        for name, event in certificate.token_events(rows, token, WARM, offered).items():
            events.setdefault(name, []).append(event)
    answers = [CertificateAnswer(CertificateRequest(0, WARM), (0,) * len(events["likeliest"]), drafted=1)]
    return certificate.judge_distribution("draft", "residual", ("fixed 1",), answers, events, tests=4)


@pytest.mark.parametrize("lookup", [False, True])
def test_the_residual_rule_passes(lookup):
    checks = [judgement(Words(seed), lookup=lookup) for seed in range(6)]
    assert {check.status for check in checks} == {"passed"}
    assert min(check.p_value for check in checks) < 1  # it is not that nothing is seen
    assert checks[0].threshold == certificate.FALSE_ALARM / 4
    for place in checks[0].places:
        assert place.observed == pytest.approx(place.expected, abs=5 * place.expected**0.5)


@pytest.mark.parametrize("bug", [always_accept, resample_from_the_target, accept_without_the_draft])
def test_a_known_bug_fails(bug):
    assert {judgement(Words(seed), bug=bug).status for seed in range(3)} == {"failed"}


def test_a_small_bug_needs_more_tokens():
    """It only shows where the lists differ."""
    assert {judgement(Words(seed, tokens=2500), bug=subtract_by_index).status for seed in range(2)} == {"failed"}


@pytest.mark.parametrize("bug", [always_accept, resample_from_the_target])
def test_a_known_bug_fails_with_a_lookup(bug):
    assert {judgement(Words(seed), bug=bug, lookup=True).status for seed in range(3)} == {"failed"}


def test_false_alarms_are_as_rare_as_promised():
    """The chance that the least likely of a check's counts falls under the threshold, over many checks."""
    rng = np.random.default_rng(0)
    p_values = []
    for _ in range(400):
        rows = rng.dirichlet((1.0, 0.5, 0.2), 60)
        tokens = [rng.choice(3, p=row) for row in rows]
        places = [certificate.tail(rows[:, i], sum(token == i for token in tokens)) for i in range(3)]
        p_values.append(min(1.0, 3 * min(places)))
    for level in (0.5, 0.1, 0.02):
        expected = level * len(p_values)
        assert sum(p <= level for p in p_values) <= expected + 4 * expected**0.5


# ---- the verdict


def check(status, section=STRICT, drafter="both", rule="greedy", **more):
    return CertificateCheck(section, drafter, rule, status, tokens=100, answers=more.pop("answers", 2), **more)


def test_the_certificate_is_given():
    passed, text = certificate.certificate_verdict([check("passed"), check("passed", DEFAULT)])
    assert passed
    assert text == "PASSED: 2 checks, 200 tokens. Speculation changes nothing."


def test_one_failure_is_enough():
    passed, text = certificate.certificate_verdict([check("passed"), check("failed", drafter="lookup")])
    assert not passed
    assert text.startswith("FAILED: 1 of 2 checks (strict, lookup, greedy).")
    assert not certificate.certificate_verdict([check("failed")], interrupted=True)[0]


def test_without_strict_mode_the_default_mode_carries_it():
    impossible = CertificateCheck(STRICT, "all", "exact", "not possible", reason="this device")
    passed, text = certificate.certificate_verdict([impossible, check("passed", DEFAULT)])
    assert passed
    assert "this device cannot run strict mode, so the certificate rests on default mode" in text
    assert certificate.certificate_verdict([impossible]) == (False, "No certificate: nothing could be checked.")


def test_what_claims_nothing_is_named():
    passed, text = certificate.certificate_verdict([check("passed"), check("not possible", drafter="lookup")])
    assert passed
    assert text.endswith("Some checks prove nothing, because no token was drafted: lookup.")


def test_an_interrupted_run_gives_none():
    passed, text = certificate.certificate_verdict([check("passed")], interrupted=True)
    assert (passed, text) == (False, "No certificate: interrupted after 1 checks, none of which had failed.")
