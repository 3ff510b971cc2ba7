"""The grammar along a text: paths of states, and the rules that follow them. A four-token vocabulary, no model."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_acceptance import FULL, NAMES, SAMPLINGS, Logits, law_of, row

from ggufspec.decoding import grammar
from ggufspec.decoding.grammar import GrammarPath
from ggufspec.decoding.noise import choose_with_noise
from ggufspec.decoding.rules import make_rule, speculative
from ggufspec.decoding.rules.base import AcceptanceResult, DraftToken
from ggufspec.decoding.rules.coupled import CoupledRule
from ggufspec.decoding.rules.speculative import SpeculativeRule
from ggufspec.decoding.sampling import Sampling, token_candidates
from tests.support.properties import examples

END = 0
ENDED = "ended"


class Automaton:
    """A regular language over 4 tokens: ``edges[state][token]`` is the next state; END ends a text in ``final``."""

    def __init__(self, edges, final):
        self.edges = [{**row, END: ENDED} if state in final else row for state, row in enumerate(edges)]
        self.checks = self.masks = 0

    def start(self):
        return 0

    def is_free(self, _):
        return False

    def permits(self, state, token):
        self.checks += 1
        return state != ENDED and token in self.edges[state]

    def permitted(self, state, ids):
        return np.array([state != ENDED and token in self.edges[state] for token in ids], np.bool_)

    def mask(self, state):
        self.masks += 1
        return self.permitted(state, range(4))

    def advance(self, state, token):
        return self.edges[state][token] if self.permits(state, token) else None

    def reads(self, text):
        """The state behind a text, None if it is not in the language."""
        state = 0
        for token in text:
            state = None if state is None else self.advance(state, token)
        return state


PAIRS = Automaton([{1: 1}, {2: 2, 3: 2}, {1: 1}], final={2})  # (1 (2 | 3))+
DEAD = Automaton([{1: 1, 2: 0}, {3: 2}, {}], final=set())  # 2* 1 3, and then nothing


@st.composite
def automata(draw):
    count = draw(st.integers(1, 4))
    edges = [draw(st.dictionaries(st.integers(1, 3), st.integers(0, count - 1), max_size=3)) for _ in range(count)]
    return Automaton(edges, draw(st.sets(st.integers(0, count - 1))))


# --- paths ---------------------------------------------------------------------------------------------------------


@examples(120)
@given(automata(), st.integers(0, 5), st.data())
def test_the_state_is_a_function_of_the_text_however_it_came_about(automaton, start, data):
    path, settled = GrammarPath(automaton), []
    path.begin(start)
    tokens = st.lists(st.integers(0, 3), max_size=5)
    for _ in range(data.draw(st.integers(1, 8))):
        drafted = data.draw(tokens)
        if data.draw(st.booleans()):
            path.settle(start + len(settled), drafted)
            settled += drafted
            drafted = []
        else:
            path.follow(drafted)
        text = settled + drafted
        for length in data.draw(st.permutations(range(len(text) + 1)))[:3]:
            if length < len(text) or data.draw(st.booleans()):
                assert path.state(start + length) == automaton.reads(text[:length])
                token = data.draw(st.integers(0, 3))
                assert path.permits(token, start + length) is (automaton.reads([*text[:length], token]) is not None)


def test_only_recent_states_are_kept():
    path, text = GrammarPath(PAIRS), [1, 2, 1, 3] * 100
    for position in range(0, 400, 4):
        path.settle(position, text[position : position + 4])
    assert len(path._states) <= grammar.RECENT + 1
    assert path.state(400) == 2
    assert path.state(400 - grammar.RECENT) == PAIRS.reads(text[: -grammar.RECENT])
    assert path.state(400 - grammar.RECENT - 1) is None


def test_the_states_of_the_last_round_are_kept_however_long_it_was():
    path, text = GrammarPath(PAIRS), [1, 2, 1, 3] * 100
    path.settle(0, text[:100])
    path.settle(100, text[100:])
    assert [path.state(position) for position in (100, 400)] == [PAIRS.reads(text[:100]), PAIRS.reads(text)]
    assert path.state(99) is None


def test_wrong_positions_are_refused():
    path = GrammarPath(PAIRS)
    path.begin(7)
    path.follow([1])
    with pytest.raises(ValueError, match="ends at 8, before position 9"):
        path.permits(1, 9)
    with pytest.raises(ValueError, match="cannot begin at 8: the settled text ends at 7"):
        path.settle(8, [1])


# --- masked rows ---------------------------------------------------------------------------------------------------


class Half:
    """Half of a large vocabulary may stand anywhere; full masks are counted."""

    def __init__(self, vocab, seed):
        self.allowed, self.masks = np.random.default_rng(seed).random(vocab) < 0.5, 0

    def start(self):
        return 0

    def is_free(self, _):
        return False

    def permitted(self, _, ids):
        return self.allowed[ids]

    def mask(self, _):
        self.masks += 1
        return self.allowed


@pytest.mark.parametrize("best", [0, 1, 5, 40])
@pytest.mark.parametrize("ties", [False, True])
def test_a_masked_row_has_the_best_permitted_tokens(best, ties):
    half = Half(2000, seed=best)
    logits = np.random.default_rng(1).normal(size=1800).astype(np.float32)  # a draft's vocabulary may be shorter
    if ties:
        logits = np.round(logits)
    found = GrammarPath(half).masked(logits, 0, best)
    assert half.masks == (best == 0)
    wanted = np.where(half.allowed[:1800], logits, -np.inf)
    order = np.argsort(-wanted, kind="stable")
    assert np.argsort(-found, kind="stable")[: best or None].tolist() == order[: best or None].tolist()
    assert (found[order[: best or None]] == wanted[order[: best or None]]).all()
    assert found[~half.allowed[:1800]].max() == -np.inf


def test_where_likely_tokens_are_not_permitted_the_whole_row_is_looked_at():
    half, logits = Half(2000, seed=0), np.linspace(1, 2, 2000, dtype=np.float32)
    half.allowed[:] = False
    half.allowed[[3, 5]] = True
    found = GrammarPath(half).masked(logits, 0, best=2)
    assert half.masks == 1
    assert np.flatnonzero(found > -np.inf).tolist() == [3, 5]
    half.allowed[1999] = True  # the likeliest of all
    found = GrammarPath(half).masked(logits, 0, best=2)
    assert half.masks == 2
    assert np.flatnonzero(found > -np.inf).tolist() == [3, 5, 1999]
    logits[[3, 5, 1999]] = -np.inf
    assert GrammarPath(half).masked(logits, 0, best=2) is None  # permitted and impossible


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, seed=1), Sampling(0.9, **FULL), Sampling(0.9, top_k=0)])
def test_rules_look_at_enough_of_a_large_row(sampling):
    half = Half(2000, seed=9)
    half.permits, half.advance = lambda _, token: half.allowed[token], lambda state, _: state
    for position in range(30):
        logits = (np.random.default_rng(position).normal(size=2000) * 3).astype(np.float32)
        wanted = token_candidates(np.where(half.allowed, logits, -np.inf), sampling)
        own = choose_with_noise(wanted.ids, wanted.scores, sampling.seed, position)
        free = make_rule("exact", sampling).verify(logits[None], [], position).token
        rule = make_rule("exact", sampling, half)
        rule.begin(range(position))
        assert rule.draft_token(logits, position).token == (free if half.allowed[free] else own)
        rule = make_rule("residual", sampling, half)
        rule.begin(range(position))
        q = rule.draft_token(logits, position).q
        assert q.ids.tolist() == wanted.ids.tolist()
        assert q.scores.tolist() == wanted.scores.tolist()


# --- rules ---------------------------------------------------------------------------------------------------------


def decode(target, rule, prompt, limit, draft):
    """Texts as the loop makes them; ``draft(rule, text)`` gives a round's chain. The text, and whether it is stuck."""
    text = list(prompt)
    rule.begin(prompt)
    while len(text) < limit:
        chain = draft(rule, text)
        drafted = [proposal.token for proposal in chain]
        rows = np.stack([target((*text, *drafted[:i])) for i in range(len(chain) + 1)])
        verdict = rule.verify(rows, chain, len(text))
        for token in verdict.emitted(drafted):
            text.append(token)
            if token == END:
                return text[:limit], False
        if verdict.token is None:
            return text[:limit], True
    return text[:limit], False


def nothing(_rule, _text):
    return []


@examples(150)
@given(automata(), st.integers(0, 2**32), st.lists(st.integers(0, 3), min_size=1, max_size=3), SAMPLINGS, st.data())
def test_exact_rule_any_drafter_gives_the_text_of_target_only(automaton, seed, prompt, sampling, data):
    target, guesses = Logits(seed, 4), st.lists(st.integers(0, 3).map(DraftToken), max_size=4)
    alone = decode(target, make_rule("exact", sampling, automaton), prompt, 12, nothing)
    assert automaton.reads(alone[0][len(prompt) :]) is not None
    both = decode(target, make_rule("exact", sampling, automaton), prompt, 12, lambda *_: data.draw(guesses))
    assert both[0] == alone[0]
    assert both[1] <= alone[1] or len(alone[0]) == 12  # at the limit target-only does not look ahead

    def model(rule, text, draft=Logits(seed + 1, 4)):
        chain = []
        for _ in range(data.draw(st.integers(0, 4))):
            known = [*text, *(p.token for p in chain)]
            rule.follow(known)
            chain.append(rule.draft_token(draft(known), len(known)))
        return chain[: data.draw(st.integers(0, 4))]  # what was drafted may be dropped

    assert decode(target, make_rule("exact", sampling, automaton), prompt, 12, model)[0] == alone[0]


@examples(120)
@given(automata(), st.integers(0, 2**32), SAMPLINGS)
def test_exact_rule_chooses_freely_where_that_is_permitted_and_among_the_rest_where_not(automaton, seed, sampling):
    target, free = Logits(seed, 4), CoupledRule(sampling)
    text, stuck = decode(target, make_rule("exact", sampling, automaton), [1], 12, nothing)
    for position in range(1, len(text)):
        logits = target(tuple(text[:position]))
        own = free.verify(logits[None], [], position).token
        state = automaton.reads(text[1:position])
        if not automaton.permits(state, own):
            mask = automaton.mask(state)
            own = free.verify(np.where(mask, logits, -np.inf)[None], [], position).token
        assert text[position] == own
    assert not stuck or not automaton.mask(automaton.reads(text[1:])).any()


def test_a_permitted_choice_needs_no_mask():
    automaton = Automaton([{1: 0, 2: 0, 3: 0}], final={0})
    decode(Logits(3, 4), make_rule("exact", Sampling(0.8, seed=5), automaton), [1], 40, nothing)
    assert automaton.masks == 0 < automaton.checks


@pytest.mark.parametrize("name", NAMES)
@examples(60)
@given(automata(), st.integers(0, 2**32), SAMPLINGS, st.data())
def test_every_text_is_in_the_language(name, automaton, seed, sampling, data):
    target, draft = Logits(seed, 4), Logits(seed + 1, 4)

    def mixed(rule, text):
        chain = []
        for drawn in data.draw(st.lists(st.none() | st.integers(0, 3), max_size=4)):
            known = [*text, *(p.token for p in chain)]
            rule.follow(known)
            proposal = rule.draft_token(draft(known), len(known)) if drawn is None else DraftToken(drawn)
            reached = automaton.reads(known[1:])
            permitted = automaton.reads([*known[1:], proposal.token]) is not None
            assert rule.permits(proposal.token, len(known)) is permitted
            if drawn is None and reached not in (None, ENDED) and automaton.mask(reached).any():
                assert permitted  # drafts follow the grammar
            chain.append(proposal)
        return chain

    text, stuck = decode(target, make_rule(name, sampling, automaton), [3], 12, mixed)
    assert automaton.reads(text[1:]) is not None
    assert not stuck or not automaton.mask(automaton.reads(text[1:])).any()


@pytest.mark.parametrize("name", NAMES)
def test_what_was_accepted_before_a_dead_end_is_not_lost(name):
    rule = make_rule(name, Sampling(), DEAD)
    rule.begin([0])
    rows = np.stack([row([0, 0, 1, 0]), row([0, 1, 0, 0]), row([0, 0, 0, 1]), row([0.25] * 4), row([np.nan] * 4)])
    assert rule.verify(rows, [DraftToken(2), DraftToken(1), DraftToken(3), DraftToken(2)], 1) == AcceptanceResult(
        3, None
    )
    assert rule.verify(rows, [], 4) == AcceptanceResult(0, None)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_follows_the_end_of_a_text(name):
    rule = make_rule(name, Sampling(), PAIRS)
    rule.begin([])
    rows = np.stack([row([0, 1, 0, 0]), row([0, 0, 1, 0]), row([1, 0, 0, 0]), row([0.25] * 4), row([np.nan] * 4)])
    assert rule.verify(rows, [DraftToken(x) for x in (1, 2, END, 1)], 0) == AcceptanceResult(3, None)


def test_a_draft_with_no_permitted_token_proposes_what_verification_refuses():
    short = row([0.5, 0.5])  # a draft's vocabulary that ends before the tokens that may stand here
    for name in NAMES:
        rule = make_rule(name, Sampling(), PAIRS)
        rule.begin([])
        rule.follow([1])
        proposal = rule.draft_token(short, 1)
        assert proposal.token == 0
        assert not rule.permits(0, 1)
        rows = np.stack([row([0, 1, 0, 0]), row([0.4, 0, 0.3, 0.3]), row([1, 0, 0, 0])])
        assert rule.verify(rows, [DraftToken(1), proposal], 0) == AcceptanceResult(1, 2)


@pytest.mark.parametrize(
    ("name", "kept"), [("top-k:2", [2]), ("top-k:3", [2, 3]), ("typical:0.4", [2]), ("typical:0.2", [2, 3])]
)
def test_lossy_rules_keep_what_is_permitted_and_near_the_target(name, kept):
    logits, behind = row([0.45, 0.1, 0.3, 0.15]), row([0, 1, 0, 0])
    for token in (1, 2, 3):
        rule = make_rule(name, Sampling(), Automaton([{1: 0, 2: 0, 3: 0}], final={0}))
        own = AcceptanceResult(0, END)
        assert rule.verify(np.stack([logits, behind]), [DraftToken(token)], 0) == (
            AcceptanceResult(1, 1) if token in kept else own
        )
    never = Automaton([{1: 0}], final={0})
    assert make_rule(name, Sampling(), never).verify(
        np.stack([logits, behind]), [DraftToken(2)], 0
    ) == AcceptanceResult(0, END)


def test_agreement_is_of_the_state_that_was_there():
    draft = row([0.6, 0, 0.3, 0.1])  # 0 may not stand behind 1: the draft would have said 2
    for name in NAMES:
        rule = make_rule(name, Sampling(), PAIRS)
        rule.begin([])
        for position in range(0, 100, 2):
            rule.verify(np.stack([row([0, 1, 0, 0])] + [row([0, 0, 1, 0])] * 2)[:2], [DraftToken(1)], position)
        assert [rule.agreement(draft, 99, token) for token in range(4)] == [0, 0, 1, 0]
        assert [rule.agreement(draft, 1, token) for token in range(4)] == [1, 0, 0, 0]  # forgotten: without a grammar


# --- the residual rule: exact enumeration --------------------------------------------------------------------------


class Weights:
    """Candidates with exact probabilities: a row of weights, where logits would be."""

    def __init__(self, weights, _sampling):
        self.ids = np.flatnonzero(weights > -np.inf)
        self.total = sum(int(weights[x]) for x in self.ids)
        self.weights = weights

    def probabilities(self):
        return np.array([Fraction(int(self.weights[x]), self.total) for x in self.ids])


def weights(seed):
    return lambda prefix: np.random.default_rng([seed, *prefix]).integers(1, 9, 4).astype(np.float32)


def laws(monkeypatch, automaton, length, drafted):
    """The law of texts of ``length`` tokens, a round with so many drafted tokens and then target-only."""
    monkeypatch.setattr(speculative, "token_candidates", Weights)
    target, draft = weights(1), weights(2)

    def text(chance):
        rule = SpeculativeRule(Sampling(1.0, **FULL), None, GrammarPath(automaton))
        rule._draws = chance

        def chain(rule, text):
            proposals = []
            for _ in range(drafted if not text else 0):
                known = [*text, *(p.token for p in proposals)]
                rule.follow(known)
                proposals.append(rule.draft_token(draft(known), len(known)))
                if proposals[-1].token == END or not rule.permits(proposals[-1].token, len(known)):
                    break
            return proposals

        return tuple(decode(target, rule, [], length, chain)[0])

    return law_of(text)


def masked_law(automaton, length):
    """The target's own law, every row renormalised over what may stand there."""
    law, target = {}, weights(1)

    def grow(text, chance):
        mask = automaton.mask(automaton.reads(text))
        if len(text) == length or END in text or not mask.any():
            law[text] = chance
            return
        row = np.where(mask, target(text), 0)
        for token in np.flatnonzero(mask).tolist():
            grow((*text, token), chance * Fraction(int(row[token]), int(row.sum())))

    grow((), Fraction(1))
    return law


LANGUAGES = {
    "pairs": PAIRS,
    "a dead end": DEAD,
    "no limits": Automaton([{1: 0, 2: 0, 3: 0}], final={0}),
    "two ways": Automaton([{1: 1, 2: 2}, {1: 0, 3: 2}, {2: 1, 3: 0}], final={1}),
}


@pytest.mark.parametrize("automaton", LANGUAGES.values(), ids=LANGUAGES)
@pytest.mark.parametrize("drafted", [0, 1, 2, 3])
def test_the_residual_rule_has_exactly_the_law_of_the_masked_target(monkeypatch, automaton, drafted):
    assert laws(monkeypatch, automaton, 4, drafted) == masked_law(automaton, 4)


def test_mutant_p_is_not_masked(monkeypatch):
    real = GrammarPath.masked
    monkeypatch.setattr(GrammarPath, "masked", lambda self, logits, position, best: real(self, logits, 0, best))
    automaton = LANGUAGES["two ways"]
    assert laws(monkeypatch, automaton, 4, 2) != masked_law(automaton, 4)


# --- bugs that must be seen ----------------------------------------------------------------------------------------


def text_of(prompt, chains):
    target, automaton = Logits(11, 4), LANGUAGES["two ways"]
    rounds = iter(chains)
    rule = make_rule("exact", Sampling(0.8, seed=2, **FULL), automaton)
    return decode(target, rule, prompt, 12, lambda *_: [DraftToken(x) for x in next(rounds, [])])[0]


CHAINS = [[2, 2, 1], [1, 1], [3, 3, 3, 3], [2, 3], [1, 3, 2], [2]]


def test_the_bugs_below_are_caught_by_a_check_that_the_real_path_passes():
    assert text_of([1], CHAINS) == text_of([1], [])


def test_mutant_states_are_not_rewound_after_a_rejection(monkeypatch):
    def follow(self, tokens):
        self._tokens += list(tokens)[len(self._tokens) - (self.settled - self._first) :]

    alone = text_of([1], [])
    monkeypatch.setattr(GrammarPath, "follow", follow)
    assert text_of([1], CHAINS) != alone


def test_mutant_the_state_is_that_of_the_rounds_beginning(monkeypatch):
    real = GrammarPath.permits
    monkeypatch.setattr(GrammarPath, "permits", lambda self, token, position: real(self, token, self.settled))
    assert text_of([1], CHAINS) != text_of([1], [])
