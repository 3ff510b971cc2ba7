"""The lookup drafter against small texts done by hand, and against a reference that searches the whole text."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.decoding.drafters import lookup
from ggufspec.decoding.drafters.base import ShadowEvaluation
from ggufspec.decoding.drafters.lookup import (
    DOUBT,
    FADE,
    OCCURRENCES,
    ORDERS,
    REACH,
    VOTES,
    LookupDrafter,
    LookupGuess,
    NgramIndex,
)
from ggufspec.decoding.rules import make_rule
from ggufspec.decoding.rules.base import DraftToken
from ggufspec.decoding.sampling import Sampling
from tests.support.properties import examples

RULE = make_rule("exact", Sampling())
A, B, C, D, E, X, Y, Z = range(8)


def ask(text, corpus=None):
    """What an index of ``corpus``, or of the text itself, has for the end of ``text``."""
    return NgramIndex(text if corpus is None else corpus).find(lookup.window_of(text))


def drafter_of(prompt, corpus=()):
    drafter = LookupDrafter(corpus)
    drafter.begin(prompt)
    return drafter


def chain(drafter, text, limit):
    """Tokens of a chain that is drafted without a look at the confidence."""
    tokens = []
    while len(tokens) < limit and (offer := drafter.propose([*text, *tokens], RULE)):
        tokens.append(offer.draw().token)
    return tokens


def state(index):
    return bytes(index._tokens), len(index), [tuple(map(tuple, chains[2:])) for chains in index._chains]


# The reference: no chains and nothing kept, every answer is a walk over the whole text.


def matched(tokens, position, text):
    """How far what stands before ``position`` is the end of ``text``."""
    length = 0
    while length < min(position, len(text), REACH) and tokens[position - 1 - length] == text[-1 - length]:
        length += 1
    return length


def bucket(tokens, position, order, buckets):
    digits = [tokens[i] if i >= 0 else 2**32 - 1 for i in range(position - order, position)]
    return sum(digit << 32 * place for place, digit in enumerate(digits)) % 999_999_937 % buckets


def search(tokens, text, buckets):
    """The guess for the end of ``text`` from the positions in ``tokens``; ``buckets`` as the index has them."""
    if not text:
        return None
    for order in sorted(ORDERS, reverse=True):
        if order > len(text):
            continue
        own = bucket(text, len(text), order, buckets)
        near = [p for p in range(len(tokens) - 1, 0, -1) if bucket(tokens, p, order, buckets) == own][:OCCURRENCES]
        voters = [p for p in near if matched(tokens, p, text) >= order]
        if not voters:
            continue
        votes = {}
        for rank, p in enumerate(voters):
            votes[tokens[p]] = votes.get(tokens[p], 0) + FADE**rank * VOTES[matched(tokens, p, text)]
        token = max(votes, key=lambda token: votes[token])
        length = max(matched(tokens, p, text) for p in voters if tokens[p] == token)
        return LookupGuess(token, length, pytest.approx(votes[token] / (sum(votes.values()) + DOUBT)))
    return None


# By hand.


def test_it_offers_what_followed():
    assert ask([A, B, C, X, A, B]) == (C, 2, pytest.approx(VOTES[2] / (VOTES[2] + DOUBT)))


@pytest.mark.parametrize("text", [[], [A], [A, B], [A, B, C, D], [A, A, B]])
def test_the_end_of_a_text_is_no_match_for_itself(text):
    assert ask(text) is None


def test_a_run_goes_on():
    assert ask([A, A]) == (A, 1, pytest.approx(VOTES[1] / (VOTES[1] + DOUBT)))
    assert ask([A, A, A]).token == A


def test_the_newest_of_equal_matches_wins():
    assert ask([A, B, C, X, A, B, D, Y, A, B]).token == D
    assert ask([A, B, D, X, A, B, C, Y, A, B]).token == C


def test_the_longest_match_wins_over_newer_ones():
    assert ask([X, A, B, C, Y, A, B, D, X, A, B])[:2] == (C, 3)
    long = [A, B, C, D, E, X, Y, Z]  # where eight tokens match, those that match fewer have no vote
    text = [*long, C, *[*long[1:], D] * 6, *long]
    assert ask(text) == (C, 8, pytest.approx(VOTES[8] / (VOTES[8] + DOUBT)))
    assert ask(text[1:])[:2] == (D, 7)


def test_the_true_length_counts_and_not_that_of_the_n_gram():
    shared = [A, B, C, D, E]
    assert ask([X, *shared, Y, Z, *shared, D, X, *shared])[:2] == (Y, 6)
    assert ask([Z, X, *shared, Y, *shared, D, Z, X, *shared])[:2] == (Y, 7)


def test_a_match_is_followed_no_further_than_its_reach():
    once = [random.Random(place).randrange(1000) for place in range(2 * REACH)]
    assert ask([*once, A, *once]) == (A, REACH, pytest.approx(VOTES[REACH] / (VOTES[REACH] + DOUBT)))


def test_occurrences_vote():
    text = [A, B, C, X, A, B, C, Y, A, B, C, Z, A, B, D, E, A, B]
    older = VOTES[2] * (FADE + FADE**2 + FADE**3)
    assert ask(text) == (C, 2, pytest.approx(older / (older + VOTES[2] + DOUBT)))


def test_equal_votes_go_to_the_newest():
    text = [A, B, C, X, A, B, D, Y, A, B]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "FADE", 1.0)
        assert ask(text)[:2] == (D, 2)


def test_old_matches_are_found_in_a_text_that_has_grown():
    rng = random.Random(3)
    index, text = NgramIndex(), [rng.randrange(100_000) for _ in range(20_000)]
    for token in text:
        index.extend([token])
    for place in (40, 1000, 19_000):
        assert index.find(lookup.window_of(text[:place]))[:2] == (text[place], REACH)


def test_only_the_newest_occurrences_vote():
    text = [*[A, C] * 50, *[A, D] * (OCCURRENCES - 1), A, X, Y, A]  # the Y keeps all matches at one token
    faded = [FADE**rank for rank in range(OCCURRENCES)]
    assert ask(text) == (D, 1, pytest.approx(sum(faded[1:]) / (sum(faded) + DOUBT)))


def test_confidence_grows_with_the_match_and_with_those_who_agree():
    def confidence(text):
        sure = ask(text).confidence
        assert 0 < sure < 1
        return sure

    long = list(range(20))
    lengths = [confidence([*long[-n:], 99, 50, *long[-n:]]) for n in (1, 2, 4, 8, 20)]
    assert lengths == sorted(set(lengths))
    assert confidence([A, B, C, X, A, B, C, Y, A, B]) > confidence([A, B, C, Y, A, B])
    assert confidence([A, B, D, X, A, B, C, Y, A, B]) < confidence([A, B, C, Y, A, B])
    assert confidence([A] * 100) > 0.95


def test_a_beginning_is_no_match_for_another_beginning():
    assert ask([A], corpus=[A, B]) == (B, 1, pytest.approx(VOTES[1] / (VOTES[1] + DOUBT)))
    assert ask([A, B], corpus=[A, B, C])[:2] == (C, 2)
    assert ask([C], corpus=[A, B]) is None


def test_every_token_id_is_possible():
    big = 2**31 - 1
    assert ask([0, big, 0, 0, big]) == (0, 2, pytest.approx(VOTES[2] / (VOTES[2] + DOUBT)))


# The drafter.


def test_a_chain_goes_on_through_a_repeat():
    text = [A, B, C, D, E, A, B]
    assert chain(drafter_of(text), text, 9) == [C, D, E, A, B, C, D, E, A]


def test_a_chain_ends_where_nothing_is_known():
    text = [A, B, C, X]
    drafter = drafter_of(text)
    assert chain(drafter, text, 9) == []
    assert drafter.propose([*text, A, Y], RULE) is None
    assert drafter.propose([], RULE) is None


def test_a_lookup_token_was_not_drawn_from_anything():
    offer = drafter_of([A, B, A]).propose([A, B, A], RULE)
    assert isinstance(offer.draw(), DraftToken)
    assert (offer.draw().token, offer.draw().q) == (B, None)
    assert offer.confidence == pytest.approx(VOTES[1] / (VOTES[1] + DOUBT))


def test_a_chain_leaves_no_trace():
    text = [A, B, C, A, B]
    drafter = drafter_of(text)
    before = state(drafter._index)
    assert drafter.propose([*text, D, E, D], RULE) is None
    assert drafter.propose([*text, X, Y, A, B, X], RULE) is None
    assert state(drafter._index) == before


def test_a_rejected_chain_is_forgotten_and_what_came_instead_is_known():
    text = [A, B, C, A, B]
    drafter = drafter_of(text)
    assert chain(drafter, text, 2) == [C, A]
    text += [C, D]  # C was kept, A was not
    drafter.commit(len(text) - 1)
    drafter.catch_up(text, RULE, 99)
    assert chain(drafter, [*text, A, B, C], 1) == [D]


def test_what_is_certain_is_read_from_an_offer_too():
    drafter = drafter_of([A, B, A])
    text = [A, B, A, B, X]
    drafter.commit(len(text))
    assert drafter.propose([*text, Y, X], RULE) is None
    assert state(drafter._index) == state(NgramIndex(text))
    assert [one.agreement for one in drafter.catch_up(text, RULE, 99)] == [1.0, 0.0]


def test_what_is_uncertain_is_not_read_from_an_offer():
    drafter = drafter_of([A, B])
    drafter.commit(3)
    drafter.propose([A, B, C, D, E], RULE)
    assert state(drafter._index) == state(NgramIndex([A, B, C]))
    drafter.commit(2)
    assert state(drafter._index) == state(NgramIndex([A, B]))


def test_nothing_is_ever_pending():
    assert drafter_of([A, B]).pending(100) == 0


def test_hindsight_is_what_would_have_been_offered():
    drafter = drafter_of([A, B, C, A])
    reported = drafter.catch_up([A, B, C, A, B, X, D], RULE, 99)
    one, two = pytest.approx(VOTES[1] / (VOTES[1] + DOUBT)), pytest.approx(VOTES[2] / (VOTES[2] + DOUBT))
    assert reported == [ShadowEvaluation(one, 1.0), ShadowEvaluation(two, 0.0)]  # after X it has no offer
    assert drafter.catch_up([A, B, C, A, B, X, D], RULE, 99) == []


@pytest.mark.parametrize("by_offer", [False, True])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("keep_first", [False, True])
def test_each_place_is_reviewed_once(by_offer, lag, keep_first):
    rng = random.Random(5)
    text = [rng.randrange(3) for _ in range(90)]
    expected = []
    for end in range(30, 90):
        guess = search(text[:end], text[:end], lookup._BUCKETS)
        expected.append(ShadowEvaluation(guess.confidence, float(guess.token == text[end])))
    drafter, reported, end = drafter_of(text[:30]), [], 30
    while end < 90:
        end = min(end + rng.randrange(1, 6), 90)
        if keep_first:
            drafter.commit(end - lag)
        if by_offer:
            drafter.propose([*text[:end], A, B], RULE)
        reported += drafter.catch_up(text[:end], RULE, 99)
        if not keep_first:
            drafter.commit(end - lag)
    assert reported == expected


def test_what_a_cooldown_missed_is_indexed_whole_and_evaluated_at_its_end():
    text = [A, B, C, D, E] * 12
    drafter, each = drafter_of(text[:5]), drafter_of(text[:5])
    missed = drafter.catch_up(text, RULE, 99)
    reported = [one for end in range(6, 61) for one in each.catch_up(text[:end], RULE, 99)]
    assert missed == reported[-lookup.EVALUATED :]
    assert state(drafter._index) == state(NgramIndex(text))


def test_a_prompt_is_text_and_not_a_choice():
    assert LookupDrafter().begin([A, B, A, B, A, B]) == []


def test_a_prompt_is_judged_by_what_the_target_would_have_said():
    prompt = [A, B, A, B, A, B]
    drafter = LookupDrafter()
    reported = drafter.begin(prompt, [X, B, A, X])  # at places 2 to 5; at 2 it has no offer yet, at 5 it has B
    assert [one.agreement for one in reported] == [1.0, 1.0, 0.0]
    assert state(drafter._index) == state(NgramIndex(prompt))
    assert drafter.catch_up(prompt, RULE, 99) == []
    assert LookupDrafter().begin([A, A, A], [A, A, A])[-1].agreement == 1.0
    assert LookupDrafter().begin([A], []) == LookupDrafter().begin([], []) == []


def test_a_new_prompt_starts_a_new_text():
    drafter = drafter_of([A, B, C, A], corpus=[X, Y, Z])
    drafter.catch_up([A, B, C, A, B], RULE, 99)
    assert drafter.begin([C, D, A]) == []
    assert drafter.propose([C, D, A], RULE) is None
    assert chain(drafter, [C, D, X], 3) == [Y, Z]


# Text and corpus.


def test_a_corpus_is_last_where_the_text_has_nothing():
    assert chain(drafter_of([X], corpus=[A, X, Y, Z, B]), [X], 9) == [Y, Z, B]


def test_the_text_wins_a_draw_and_a_longer_match_wins_over_it():
    text = [A, B, C, X, A, B]
    assert chain(drafter_of(text, corpus=[A, B, D]), text, 1) == [C]
    assert chain(drafter_of(text, corpus=[Z, A, B, D]), text, 1) == [C]
    assert chain(drafter_of(text, corpus=[X, A, B, D]), text, 1) == [D]
    assert chain(drafter_of(text, corpus=[B, D]), text, 1) == [C]


def test_a_match_beyond_the_reach_is_a_draw():
    long = list(range(100, 100 + REACH))
    text = [*long, A, X, *long]
    assert chain(drafter_of(text, corpus=[X, *long, B]), text, 1) == [A]


# Against the reference.

words = st.integers(0, 2)
steps = st.lists(
    st.tuples(
        st.lists(words, max_size=6),  # what the target says; the last token is its own
        st.lists(words, max_size=4),  # a chain of which nothing is kept
        st.booleans(),  # whether the round is reviewed
        st.integers(0, 3),  # tokens at its end that turn out to be uncertain, and are taken back
    ),
    max_size=12,
)


def expected_offer(drafter, text, corpus, now):
    """(token, confidence) by search; the number of buckets is the index's own, which shows after an offer."""
    guess, other = (
        search(tokens, now, index._mask + 1) for tokens, index in ((text, drafter._index), (corpus, drafter._corpus))
    )
    best = other if other and (guess is None or other.length > guess.length) else guess
    return best and (best.token, best.confidence)


@examples(300)
@given(st.lists(words, max_size=20), st.lists(words, max_size=20), steps, st.sampled_from([2, 8, 1024]))
def test_any_course_of_rounds_equals_a_search(prompt, corpus, rounds, buckets):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "_BUCKETS", buckets)  # few: n-grams share them, and they double often
        drafter, text = drafter_of(prompt, corpus), list(prompt)
        for said, rejected, reviewed, lost in rounds:
            text += said
            drafter.commit(len(text))
            if reviewed:
                drafter.catch_up(text, RULE, 99)
            del text[len(text) - min(lost, len(said)) :]
            drafter.commit(len(text))
            for end in range(len(rejected) + 1):
                now = [*text, *rejected[:end]]
                offer = drafter.propose(now, RULE)
                assert (offer and (offer.draw().token, offer.confidence)) == expected_offer(drafter, text, corpus, now)
            assert bytes(drafter._index._tokens[4 * REACH :]) == b"".join(t.to_bytes(4, "little") for t in text)


@examples(200)
@given(st.lists(words, max_size=60), st.integers(0, 60), st.integers(0, 60), st.sampled_from([2, 1024]))
def test_built_appended_and_taken_back_are_the_same(tokens, built, kept, buckets):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "_BUCKETS", buckets)
        index = NgramIndex(tokens[:built])
        for token in tokens[built:]:
            index.extend([token])
        whole = state(index)
        assert len(index) == len(tokens)
        index.rewind(kept)
        assert len(index) == min(kept, len(tokens))
        for token in tokens[kept:]:
            index.extend([token])
        assert state(index) == whole
        index._build()
        assert state(index) == state(NgramIndex(tokens))


class Counted(bytearray):
    """Tokens that count how often they are looked at."""

    looks = 0

    def __getitem__(self, key):
        self.looks += 1
        return super().__getitem__(key)


def looks(count):
    """Most looks at the tokens that one answer and one appended token took, in a text of ``count`` tokens."""
    rng = random.Random(1)
    text = [rng.randrange(4) for _ in range(count)]
    index = NgramIndex(text)
    index._tokens = tokens = Counted(index._tokens)
    asked, appended = 0, 0
    for _ in range(50):
        tokens.looks = 0
        index.find(lookup.window_of(text))
        asked, tokens.looks = max(asked, tokens.looks), 0
        text.append(rng.randrange(4))
        index.extend(text[-1:])
        appended = max(appended, tokens.looks)
    return asked, appended


def test_the_work_does_not_grow_with_the_text():
    most = OCCURRENCES * len(ORDERS)  # an occurrence is one look
    for count in (300, 3000, 30000):
        asked, appended = looks(count)
        assert 0 < asked <= most
        assert appended == 1


def test_memory_is_as_promised():
    for count in (5000, 8191, 8192):
        index = NgramIndex([place * 7919 % 5000 for place in range(count)])
        held = len(index._tokens) + sum(4 * (len(newest) + len(older)) for _, _, newest, older in index._chains)
        assert held <= 52 * count + 200


def test_a_guess_is_not_remembered_for_another_text():
    """As long as the one before, and with the same end."""
    once = [random.Random(place).randrange(1000) for place in range(2 * REACH)]
    drafter = LookupDrafter()
    for other in (C, D):
        text = [*once, other, *once]
        drafter.commit(0)
        drafter.catch_up(text, RULE, 0)
        assert drafter.propose(text, RULE).draw().token == other
