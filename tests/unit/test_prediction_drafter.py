"""The drafter of a predicted answer: where it stands after differences, and what it drafts there."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.decoding.decoder import SpeculativeDecoder
from ggufspec.decoding.drafters.prediction import Alignment, Place, PredictionDrafter, appeared
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.rules import make_rule
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import UsageError
from tests.support.properties import examples

RULE = make_rule("exact", Sampling())
FILE = list(range(100, 160))  # a prediction without repetitions
PROMPT = [7, 8, 9]


def drafter_after(answer, prediction=FILE):
    drafter = PredictionDrafter(prediction)
    drafter.begin(PROMPT)
    return drafter, [*PROMPT, *answer]


def chain(drafter, text, limit=4):
    tokens = []
    while len(tokens) < limit and (candidate := drafter.propose([*text, *tokens], RULE)):
        tokens.append(candidate.draw().token)
    return tokens


@pytest.mark.parametrize(
    ("answer", "drafted"),
    [
        pytest.param([], [100, 101, 102, 103], id="the beginning"),
        pytest.param(FILE[:10], [110, 111, 112, 113], id="no difference"),
        pytest.param([*FILE[:10], 1], [], id="a difference"),
        pytest.param([*FILE[:10], 1, 111], [112, 113, 114, 115], id="one token replaced"),
        pytest.param([*FILE[:10], 1, 2, 110], [111, 112, 113, 114], id="two inserted"),
        pytest.param([*FILE[:10], 113], [114, 115, 116, 117], id="three left out"),
        pytest.param([*FILE[:10], 1, 2, 3, 113], [114, 115, 116, 117], id="three replaced by as many"),
        pytest.param([1, 2, 3, 4, 100, 101], [102, 103, 104, 105], id="words before the file"),
        pytest.param([*FILE[:10], 150, 151], [152, 153, 154, 155], id="forty left out"),
        pytest.param([*FILE[:20], 103, 104], [105, 106, 107, 108], id="a part once more"),
        pytest.param(FILE, [], id="the end"),
        pytest.param(FILE[:58], [158, 159], id="less than asked for is left"),
    ],
)
def test_it_drafts_what_follows_in_the_prediction(answer, drafted):
    assert chain(*drafter_after(answer)) == drafted


def test_among_equal_places_the_nearest_to_the_expected_one_is_taken():
    line = [1, 2, 3]
    prediction = [*line, 50, *line, 51, *line, 52]
    answer = [*line, 50, 9, *line]  # something is inserted before the second one
    assert chain(*drafter_after(answer, prediction), limit=1) == [51]


def test_one_token_far_away_moves_nothing():
    prediction = [*range(100, 200), 42, *range(200, 220)]
    answer = [*range(100, 110), 42]
    assert chain(*drafter_after(answer, prediction)) == []
    answer += [200]
    assert chain(*drafter_after(answer, prediction), limit=1) == [201]


def test_confidence_grows_with_the_match():
    found = [
        drafter.propose(text, RULE).confidence for drafter, text in (drafter_after(FILE[:n]) for n in (1, 3, 9, 30))
    ]
    assert 0 < found[0] < found[1] < found[2] < found[3] < 1


@given(st.lists(st.integers(0, 5), max_size=40), st.randoms(use_true_random=False))
@examples(60)
def test_rejected_drafts_and_unasked_rounds_leave_no_trace(answer, dice):
    """Whatever was drafted and rejected on the way, the places are those of the answer alone."""
    prediction = [dice.randrange(6) for _ in range(40)]
    drafter, text = drafter_after([], prediction)
    whole = [*PROMPT, *answer]
    while len(text) < len(whole):
        drafted = []
        if dice.random() < 0.7:  # a round that asks; otherwise a cooldown
            drafter.catch_up(text, RULE, 0)
            drafted = chain(drafter, text, limit=dice.randrange(5))
        came = whole[len(text) :]
        accepted = next((n for n, token in enumerate(drafted) if came[n : n + 1] != [token]), len(drafted))
        text = whole[: len(text) + accepted + 1]
        drafter.commit(len(text) - 1)
    fresh, _ = drafter_after([], prediction)
    assert chain(drafter, text) == chain(fresh, text)


def test_every_position_is_evaluated_once():
    drafter, text = drafter_after([*FILE[:3], 1, *FILE[4:6]])
    seen = drafter.catch_up(text, RULE, 0)
    assert [one.agreement for one in seen] == [1, 1, 1, 0, 1]  # nothing is proposed after the difference
    assert drafter.catch_up(text, RULE, 0) == []
    assert len(drafter.catch_up([*text, FILE[6]], RULE, 0)) == 1


def test_what_appears_in_the_answer_is_counted_whoever_wrote_it():
    assert appeared(FILE, FILE) == len(FILE)
    assert appeared(FILE, []) == 0
    assert appeared(FILE, [1, 2, 3] * 20) == 0
    assert appeared(FILE, [*FILE[:20], 1, *FILE[21:]]) == len(FILE) - 1
    assert appeared(FILE, [*FILE[:20], *FILE[:20]]) == 20, "a token appears once, however often it is said"
    assert appeared(FILE, [5, 110, 6, 120, 7]) == 0, "single tokens are anywhere in any text"
    assert appeared([], FILE) == 0


def test_common_tokens_do_not_make_a_long_prediction_slow():
    """Following a token looks at a few of its occurrences, however many there are."""
    alignment = Alignment([1] * 50_000)
    looked = []
    matched = alignment._matched
    alignment._matched = lambda index, before: looked.append(index) or matched(index, before)
    alignment.follow(Place(100, differs=True), [2, 3], 1)
    assert 0 < len(looked) <= 64


def test_an_edited_file_is_found_again_after_each_edit():
    dice = random.Random(7)
    prediction = [dice.randrange(1000) for _ in range(2000)]
    answer = list(prediction)
    for start in range(100, 1900, 100):  # each replaces, inserts or removes a few
        answer[start : start + dice.randrange(4)] = [dice.randrange(1000) for _ in range(dice.randrange(4))]
    drafter, text = drafter_after([], prediction)
    right = 0
    for token in answer:
        candidate = drafter.propose(text, RULE)
        right += candidate is not None and candidate.draw().token == token
        text.append(token)
    assert right > 0.95 * len(answer)


@pytest.mark.parametrize("drafters", [("lookup",), ("draft",), ("draft", "lookup")])
def test_a_decoder_drafts_from_it_whatever_else_drafts(target, draft, drafters):
    options = DecoderOptions(ctx_size=512, drafters=drafters, draft_policy="fixed", draft_max=8, strict=True)
    with SpeculativeDecoder(target, draft, options) as decoder:

        def answer(**more):
            return "".join(emitted.text for emitted in decoder.generate("def main(", max_tokens=60, **more))

        plain = answer()
        assert decoder.statistics.predicted == 0
        assert answer(prediction=plain) == plain
        rounds = decoder.rounds
        assert sum(one.drafters.count("prediction") for one in rounds) > 40
        assert len(rounds) < 20
        assert decoder.statistics.predicted_appeared >= decoder.statistics.predicted - 2
        wrong = "<|im_end|> entirely unrelated words\n" * 200  # and longer than the context
        assert answer(prediction=wrong) == plain
        assert decoder.statistics.predicted == 512
        assert decoder.statistics.predicted_appeared < 10
        assert answer(prediction=decoder.target.tokenize(plain, start=False), alone="target") == plain
        assert decoder.statistics.drafted == 0 < decoder.statistics.predicted_appeared


def test_ids_that_no_token_has_are_refused(target):
    with SpeculativeDecoder(target, options=DecoderOptions(ctx_size=512, drafters=("lookup",))) as decoder:
        for wrong in ([-1], [10**6]):
            with pytest.raises(UsageError, match=str(wrong[0])):
                list(decoder.generate("def", prediction=wrong))
        assert list(decoder.generate("def", max_tokens=2, prediction=""))
