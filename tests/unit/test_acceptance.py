"""The acceptance rules: every outcome enumerated with fractions, and known bugs that the enumeration must catch."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.decoding.rules import make_rule, speculative
from ggufspec.decoding.rules.base import AcceptanceResult, DraftToken, log_probabilities
from ggufspec.decoding.rules.coupled import CoupledRule
from ggufspec.decoding.rules.distribution import Distribution
from ggufspec.decoding.rules.lossy import TopKRule, TypicalRule
from ggufspec.decoding.rules.speculative import (
    SpeculativeRule,
    acceptance_probability,
    pick,
    residual,
    verify_residual,
)
from ggufspec.decoding.sampling import Sampling, TokenCandidates
from ggufspec.errors import UsageError
from ggufspec.settings.registry import RULE_FORMS, check_rule, is_lossy
from tests.support.properties import examples

# --- the residual rule: exact enumeration --------------------------------------------------------------------------


class Enumeration:
    """A chance that takes the choices of a script, then the first possible one, and notes what else was possible."""

    def __init__(self, script):
        self.script, self.taken, self.weight, self.others = script, [], Fraction(1), []

    def _decide(self, options):
        options = [(value, p) for value, p in options if p > 0]
        place = len(self.taken)
        if place == len(self.script):
            self.others += [[*self.taken, i] for i in range(1, len(options))]
        i = self.script[place] if place < len(self.script) else 0
        if place >= len(self.script):
            self.script = [*self.script, i]
        self.taken.append(i)
        self.weight *= Fraction(options[i][1])
        return options[i][0]

    def accept(self, probability):
        return self._decide([(True, probability), (False, 1 - probability)])

    def draw(self, probabilities):
        return self._decide(enumerate(probabilities))


def law_of(experiment):
    """Every result of ``experiment(chance)`` with its exact probability."""
    law, scripts = {}, [[]]
    while scripts:
        chance = Enumeration(scripts.pop())
        result = experiment(chance)
        scripts += chance.others
        law[result] = law.get(result, 0) + chance.weight
    assert sum(law.values()) == 1
    return law


class Table:
    """A model: for every prefix a fixed law of fractions over its own few ids of the vocabulary."""

    def __init__(self, seed, vocab, kept):
        self.seed, self.vocab, self.kept, self.laws = seed, vocab, kept, {}

    def __call__(self, prefix):
        if prefix not in self.laws:
            rng = np.random.default_rng([self.seed, len(prefix), *prefix])
            ids = np.sort(rng.choice(self.vocab, size=self.kept, replace=False))
            weights = rng.integers(1, 10, size=self.kept).tolist()
            self.laws[prefix] = law(dict(zip(ids.tolist(), weights, strict=True)))
        return self.laws[prefix]


def law(weights):
    total = sum(Fraction(w) for w in weights.values())
    return Distribution(np.array(list(weights)), np.array([Fraction(w) / total for w in weights.values()]))


class Sampled:
    """A draft model whose tokens are drawn from its law."""

    def __init__(self, model):
        self.model = model

    def draft(self, prefix, chance):
        q = self.model(prefix)
        return int(q.ids[chance.draw(q.probabilities)]), q

    def keeps(self, *_):
        return True


class Lookup(Sampled):
    """Proposes the likeliest token, which it did not draw."""

    def draft(self, prefix, _):
        q = self.model(prefix)
        return int(q.ids[q.probabilities.argmax()]), None


class StopsBefore(Sampled):
    """Drafts no token where its law is flat: known before the token is drawn, so allowed."""

    def draft(self, prefix, chance):
        if self.model(prefix).probabilities.max() < Fraction(1, 2):
            return None
        return super().draft(prefix, chance)


class GreedyAtPOverQ(Lookup):
    """Bug: a greedy token is passed off as drawn from q."""

    def draft(self, prefix, chance):
        return super().draft(prefix, chance)[0], self.model(prefix)


class DropsUnlikely(Sampled):
    """Bug under the residual rule: a token is dropped because of its own probability."""

    def keeps(self, token, q):
        return q.at(np.array([token]))[0] >= Fraction(1, 2)


def one_round(target, drafter, length, chance):
    """The tokens of one round of draft and verification."""
    tokens, drafted = (), []
    for _ in range(length):
        proposal = drafter.draft(tokens, chance)
        if proposal is None or not drafter.keeps(*proposal):
            break
        token, q = proposal
        tokens += (token,)
        drafted.append((token, Distribution.point(token) if q is None else q))
    verdict = verify_residual(lambda i: target(tokens[:i]), drafted, chance)
    return (*tokens[: verdict.accepted], verdict.token)


def joint(target, length):
    """The target's own law of its first tokens."""

    def alone(chance):
        tokens = ()
        for _ in range(length):
            p = target(tokens)
            tokens += (int(p.ids[chance.draw(p.probabilities)]),)
        return tokens

    return law_of(alone)


def is_lossless(target, drafter, length):
    """Whether a round, continued by target-only, has the target's law over the first ``length + 1`` tokens.

    By induction over rounds this holds for a text of any length exactly if it holds for one round.
    """

    def text(chance):
        tokens = one_round(target, drafter, length, chance)
        while len(tokens) <= length:
            p = target(tokens)
            tokens += (int(p.ids[chance.draw(p.probabilities)]),)
        return tokens

    return law_of(text) == joint(target, length + 1)


SHAPES = [  # vocabulary, tokens the target keeps, tokens the draft keeps, draft length
    (2, 2, 2, 3),
    (3, 3, 3, 2),
    (3, 2, 2, 3),
    (4, 2, 3, 2),
    (4, 3, 2, 2),
    (4, 2, 2, 3),
    (5, 3, 3, 2),
    (5, 5, 5, 1),
    (5, 2, 4, 1),
    (5, 1, 3, 2),
    (5, 3, 1, 3),
    (5, 1, 1, 3),  # greedy: both rows are one-hot
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("drafter", [Sampled, Lookup, StopsBefore])
def test_the_residual_rule_has_exactly_the_targets_law(shape, drafter):
    vocab, target_keeps, draft_keeps, length = shape
    for seed in range(3):
        target, draft = Table(2 * seed, vocab, target_keeps), Table(2 * seed + 1, vocab, draft_keeps)
        assert is_lossless(target, drafter(draft), length)


def test_the_bugs_below_are_caught_by_a_check_that_the_real_rule_passes():
    assert is_lossless(Table(0, 4, 3), Sampled(Table(1, 4, 3)), 2)


def test_mutant_a_greedy_draft_accepted_at_p_over_q():
    assert not is_lossless(Table(0, 4, 3), GreedyAtPOverQ(Table(1, 4, 3)), 2)


def test_mutant_residual_by_index_over_differently_truncated_lists(monkeypatch):
    by_id = Distribution.at

    def by_index(self, ids):
        return self.probabilities[: ids.size] if ids.size == self.ids.size > 1 else by_id(self, ids)

    monkeypatch.setattr(Distribution, "at", by_index)
    assert not is_lossless(Table(0, 4, 3), Sampled(Table(1, 4, 3)), 2)


def test_mutant_resampling_from_p_after_a_rejection(monkeypatch):
    monkeypatch.setattr(speculative, "residual", lambda p, _: p)
    assert not is_lossless(Table(0, 4, 3), Sampled(Table(1, 4, 3)), 2)


def test_mutant_dropping_a_token_because_of_its_own_probability():
    def target(prefix):
        return law({0: 5, 1: 5})

    def draft(prefix):
        return law({0: 9, 1: 1})

    assert is_lossless(target, Sampled(draft), 1)
    assert not is_lossless(target, DropsUnlikely(draft), 1)
    first = law_of(lambda chance: one_round(target, DropsUnlikely(draft), 1, chance)[0])
    assert first == {0: Fraction(55, 100), 1: Fraction(45, 100)}


# --- the residual rule: its parts ----------------------------------------------------------------------------------


def test_a_law_is_read_by_token_id():
    p = Distribution(np.array([2, 5, 9]), np.array([0.5, 0.3, 0.2]))
    assert p.at(np.array([0, 2, 3, 5, 9, 10])).tolist() == [0, 0.5, 0, 0.3, 0.2, 0]


def test_acceptance_and_residual_of_one_token_and_of_many():
    p, q = np.array([[0.5, 0.5], [0.5, 0.5]]), np.array([[0.9, 0.1], [0.5, 0.5]])
    assert acceptance_probability(p, q).tolist() == [[0.5 / 0.9, 1], [1, 1]]
    assert residual(p, q).tolist() == [[0, 1], [0.5, 0.5]]  # nothing left: p


def test_pick_never_takes_what_has_no_probability():
    p = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    uniform = np.array([0.0, 0.7, 0.8, 1 - 2.0**-53])
    assert pick(p, uniform).tolist() == [3, 3, 1, 1]
    assert pick(np.stack([p, p[::-1]]), np.array([0.5, 0.0])).tolist() == [3, 3]
    assert pick(p, 0.5) == 3


class Uniforms:
    """A generator of given numbers."""

    def __init__(self, *values):
        self.values = list(values)

    def random(self):
        return self.values.pop(0)


def row(probabilities):
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities, np.float32))


FULL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def test_uniform_variables_are_used_in_the_documented_order():
    rng = Uniforms(0.3, 0.2, 0.6, 0.7)
    rule = SpeculativeRule(Sampling(temperature=1, **FULL), rng)
    proposals = [rule.draft_token(row([0.9, 0.1]), 0)]
    assert (proposals[0].token, len(rng.values)) == (0, 3)
    assert rule.verify(np.stack([row([0.5, 0.5]), row([0.5, 0.5])]), proposals, 0) == AcceptanceResult(1, 0)
    assert rng.values == [0.7]  # one to accept (0.2 < 5/9), one to draw
    rng.values[:] = [0.6, 0.7]
    assert rule.verify(np.stack([row([0.5, 0.5]), row([np.nan, np.nan])]), proposals, 0) == AcceptanceResult(0, 1)
    assert rng.values == []


def test_the_rule_knows_q_as_truncated_and_tempered():
    rule = SpeculativeRule(Sampling(temperature=0.5, top_k=2, top_p=1, min_p=0), Uniforms(0.5))
    proposal = rule.draft_token(row([0.2, 0.1, 0.7]), 0)
    assert proposal.q.ids.tolist() == [0, 2]
    assert proposal.q.probabilities() == pytest.approx([4 / 53, 49 / 53], rel=1e-6)


LOSSLESS = ("exact", "residual")
NAMES = (*LOSSLESS, "top-k:2", "typical:0.3")

# --- all rules ----------------------------------------------------------------------------------------------------


class Logits:
    """A deterministic model: logits (vocab,) for every prefix."""

    def __init__(self, seed, vocab, ties=False):
        self.seed, self.vocab, self.ties = seed, vocab, ties

    def __call__(self, prefix):
        logits = np.random.default_rng([self.seed, len(prefix), *prefix]).normal(size=self.vocab) * 2
        return (np.round(logits) if self.ties else logits).astype(np.float32)


def rows_of(target, prefix, drafted):
    return np.stack([target((*prefix, *drafted[:i])) for i in range(len(drafted) + 1)])


def decode(target, rule, tokens, draft):
    """The first tokens, with ``draft(prefix)`` giving each round's proposals."""
    text = ()
    while len(text) < tokens:
        proposals = draft(text)
        drafted = tuple(proposal.token for proposal in proposals)
        verdict = rule.verify(rows_of(target, text, drafted), proposals, len(text))
        text += (*drafted[: verdict.accepted], verdict.token)
    return text[:tokens]


def target_only(target, rule, tokens):
    return decode(target, rule, tokens, lambda _: [])


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 2.0]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**64 - 1),
)


@examples(150)
@given(st.integers(0, 2**32), st.integers(1, 6), st.booleans(), SAMPLINGS, st.data())
def test_exact_rule_any_drafter_and_any_stop_give_the_text_of_target_only(seed, vocab, ties, sampling, data):
    target, rule = Logits(seed, vocab, ties), CoupledRule(sampling)
    guesses = st.lists(st.integers(0, vocab - 1).map(DraftToken), max_size=4)
    assert decode(target, rule, 12, lambda _: data.draw(guesses)) == target_only(target, rule, 12)


@examples(100)
@given(st.integers(0, 2**32), SAMPLINGS, st.floats(0, 1), st.integers(1, 4))
def test_exact_rule_may_drop_tokens_because_of_their_own_probability(seed, sampling, p_min, length):
    target, draft, rule = Logits(seed, 5), Logits(seed + 1, 5), CoupledRule(sampling)

    def chain(text):
        proposals = []
        for _ in range(length):
            proposal = rule.draft_token(draft((*text, *(p.token for p in proposals))), len(text) + len(proposals))
            if proposal.q is not None and proposal.q.probabilities().max() < p_min:
                break
            if proposal.token * 0.2 > p_min:
                break
            proposals.append(proposal)
        return proposals

    assert decode(target, rule, 12, chain) == target_only(target, rule, 12)


@examples(50)
@given(st.sampled_from(NAMES), st.integers(0, 2**32), st.integers(1, 6), SAMPLINGS)
def test_the_target_as_its_own_draft_is_always_accepted(name, seed, length, sampling):
    target, rule = Logits(seed, 5), make_rule(name, sampling)
    proposals = []
    for i in range(length):
        proposals.append(rule.draft_token(target(tuple(p.token for p in proposals)), i))
    rows = rows_of(target, (), [p.token for p in proposals])
    assert rule.verify(rows, proposals, 0).accepted == length


@examples(50)
@given(st.integers(0, 2**32), st.data())
def test_at_temperature_0_lossless_rules_and_the_best_of_one_are_greedy(seed, data):
    target = Logits(seed, 4)
    guesses = st.lists(st.integers(0, 3).map(DraftToken), max_size=4)
    greedy = ()
    for _ in range(10):
        greedy += (int(target(greedy).argmax()),)
    for name in (*LOSSLESS, "top-k:1"):
        assert decode(target, make_rule(name, Sampling()), 10, lambda _: data.draw(guesses)) == greedy


@pytest.mark.parametrize("name", NAMES)
def test_rows_behind_the_first_rejection_are_not_read(name):
    rows = np.stack([row([1, 0]), row([np.nan, np.nan])])
    wrong = DraftToken(1, TokenCandidates(np.array([1]), np.zeros(1)))
    assert make_rule(name, Sampling(temperature=1)).verify(rows, [wrong, wrong], 0) == AcceptanceResult(0, 0)


@pytest.mark.parametrize(("name", "truncation"), list(product(NAMES, [FULL, {"top_k": 3}])))
def test_the_same_seed_gives_the_same_text(name, truncation):
    target = Logits(3, 50)
    texts = [target_only(target, make_rule(name, Sampling(0.9, seed=seed, **truncation)), 20) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", NAMES)
def test_agreement_is_the_chance_of_the_proposal(name, temperature):
    draft, rule = Logits(8, 5), make_rule(name, Sampling(temperature, seed=3, **FULL))
    for position in range(20):
        logits = draft((position,))
        chances = [rule.agreement(logits, position, token) for token in range(5)]
        if name == "residual" and temperature:
            assert chances == pytest.approx(np.exp(log_probabilities(logits, temperature)))
        else:
            assert chances == [float(token == rule.draft_token(logits, position).token) for token in range(5)]


def test_a_verdict_tells_what_stays():
    assert AcceptanceResult(2, 7).emitted((4, 5, 6)) == (4, 5, 7)
    assert AcceptanceResult(1, None).emitted((4, 5, 6)) == (4,)


def test_rules_by_name():
    kinds = {"exact": CoupledRule, "residual": SpeculativeRule, "top-k:2": TopKRule, "typical:0.3": TypicalRule}
    for name, kind in kinds.items():
        rule = make_rule(name, Sampling())
        assert type(rule) is kind
        assert (rule.name, rule.lossless, rule.may_trim) == (name, name in LOSSLESS, name != "residual")
        assert is_lossy(name) is not rule.lossless
    assert [name.partition(":")[0] for name in RULE_FORMS] == [name.partition(":")[0] for name in kinds]
    with pytest.raises(UsageError, match="'magic'") as caught:
        make_rule("magic", Sampling())
    assert "exact, residual, top-k:N, typical:EPS" in caught.value.hint


@pytest.mark.parametrize("name", ["top-k:1", "top-k:1000", "typical:0.001", "typical:.999"])
def test_numbers_of_lossy_rules(name):
    check_rule(name)


BAD = [
    "top-k",
    "top-k:",
    "top-k:N",
    "top-k:0",
    "top-k:-1",
    "top-k:1001",
    "top-k:10000000000000",
    "top-k:1.5",
    "top-k:²",
]
BAD += ["typical", "typical:", "typical:EPS", "typical:0", "typical:1", "typical:nan", "typical:-0.1", "exact:1", ""]


@pytest.mark.parametrize("name", BAD)
def test_wrong_numbers_of_lossy_rules(name):
    with pytest.raises(UsageError) as caught:
        check_rule(name)
    if ":" in name and "exact" not in name:
        assert caught.value.hint.startswith("--accept ")


# --- the lossy rules -----------------------------------------------------------------------------------------------

ROW = row([0.1, 0.4, 0.2, 0.2, 0.1])  # by rank: 1, then 2 and 3, then 0 and 4


def verdicts(name, logits, **sampling):
    """The verdict on each token of the vocabulary, drafted alone."""
    rule = make_rule(name, Sampling(**sampling))
    behind = row(np.eye(logits.size)[-1])
    return [rule.verify(np.stack([logits, behind]), [DraftToken(x)], 0) for x in range(logits.size)]


@pytest.mark.parametrize(
    ("count", "kept"), [(1, {1}), (2, {1, 2}), (3, {1, 2, 3}), (4, {0, 1, 2, 3}), (5, set(range(5)))]
)
def test_top_k_keeps_the_targets_best_and_ties_go_to_the_lower_id(count, kept):
    for x, verdict in enumerate(verdicts(f"top-k:{count}", ROW)):
        assert verdict == (AcceptanceResult(1, 4) if x in kept else AcceptanceResult(0, 1))


def test_top_k_keeps_nothing_impossible():
    assert [v.accepted for v in verdicts("top-k:1000", row([0.5, 0.5, 0, 0]))] == [1, 1, 0, 0]


def test_the_targets_own_choice_is_kept_however_unlikely():
    sampling = {"temperature": 1.0, **FULL}
    own = make_rule("exact", Sampling(**sampling)).verify(row([0.3, 0.29, 0.41])[None], [], 0).token
    for name in ("top-k:1", "typical:0.9"):
        assert verdicts(name, row([0.3, 0.29, 0.41]), **sampling)[own].accepted == 1
    assert own != 2  # or the test would say nothing


@pytest.mark.parametrize(
    ("epsilon", "probabilities", "temperature", "kept"),
    [
        # entropy ln 4: delta exp(-H) is 0.5 / 4, above which all four are
        (0.25, [0.25, 0.25, 0.25, 0.25], 1.0, {0, 1, 2, 3}),
        # entropy 1.0751, its exponential 0.3413: bar 0.1706 with delta 0.5, 0.2730 with delta 0.8, epsilon is higher
        (0.25, [0.5, 0.3, 0.15, 0.05, 0.0], 1.0, {0, 1}),
        (0.64, [0.5, 0.3, 0.15, 0.05, 0.0], 1.0, {0, 1}),
        # epsilon is the lower one: 0.01, against 0.1 exp(-0.1985) = 0.082
        (0.01, [0.96, 0.015, 0.009, 0.016], 1.0, {0, 1, 3}),
        # at temperature 0 the distribution is that at 1
        (0.25, [0.5, 0.3, 0.15, 0.05, 0.0], 0.0, {0, 1}),
        # at 2 it is flatter: 0.37, 0.29, 0.20, 0.14 after tempering 16:9:4:2 or so; entropy 1.31, bar 0.135
        (0.25, [0.5, 0.3, 0.15, 0.05], 2.0, {0, 1, 2}),
    ],
)
def test_typical_acceptance(epsilon, probabilities, temperature, kept):
    logits = row(probabilities)
    p = np.array(probabilities) ** (1 / (temperature or 1))
    p /= p.sum()
    entropy = -sum(x * np.log(x) for x in p if x)
    bar = min(epsilon, epsilon**0.5 * np.exp(-entropy))
    assert set(np.flatnonzero(p > bar)) == kept  # the table is right
    found = verdicts(f"typical:{epsilon}", logits, temperature=temperature, **FULL)
    own = next(v.token for v in verdicts("exact", logits, temperature=temperature, **FULL) if not v.accepted)
    assert {x for x, v in enumerate(found) if v.accepted} == kept | {own}


def test_acceptance_at_one_position_is_of_that_positions_row():
    likely, unlikely = row([0.6, 0.3, 0.1]), row([0.9, 0.1, 0.0])
    chain = [DraftToken(1), DraftToken(2), DraftToken(0)]
    rule = make_rule("top-k:2", Sampling())
    assert rule.verify(np.stack([likely] * 4), chain, 0) == AcceptanceResult(1, 0)
    assert rule.verify(
        np.stack([unlikely, likely, likely, likely]), [DraftToken(1), DraftToken(1)], 0
    ) == AcceptanceResult(2, 0)
    rule = make_rule("typical:0.16", Sampling())  # bars 0.16 and 0.16: 0.3 and not 0.1
    assert rule.verify(np.stack([likely, unlikely, likely]), [DraftToken(1), DraftToken(1)], 0) == AcceptanceResult(
        1, 0
    )


@examples(100)
@given(st.integers(0, 2**32), st.integers(1, 6), SAMPLINGS, st.data())
def test_the_best_of_one_at_temperature_0_is_the_exact_rule(seed, vocab, sampling, data):
    target = Logits(seed, vocab, ties=True)
    drafted = data.draw(st.lists(st.integers(0, vocab - 1), max_size=4))
    rows, proposals = rows_of(target, (), drafted), [DraftToken(x) for x in drafted]
    greedy = Sampling(0.0, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed)
    assert make_rule("top-k:1", greedy).verify(rows, proposals, 0) == CoupledRule(greedy).verify(rows, proposals, 0)
