"""The drafter that is a model: what it decodes when, which place each row speaks of, and what it makes of a bad row."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.decoding.drafters.base import ShadowEvaluation
from ggufspec.decoding.drafters.model import ModelDrafter
from ggufspec.decoding.options import ROWS
from ggufspec.decoding.rules import make_rule
from ggufspec.decoding.sampling import Sampling, confidence, token_candidates
from tests.support.properties import examples

VOCAB = 5
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
GREEDY = make_rule("exact", Sampling())


def row_after(context, vocab=VOCAB):
    """Logits that are another row for every context, and whose likeliest token is the number of tokens before."""
    row = np.cos(np.arange(vocab) * (1 + sum((i + 1) * token for i, token in enumerate(context)))).astype(np.float32)
    row[len(context) % vocab] = 3
    return row


def sure(length, context, vocab=VOCAB):
    return confidence(row_after(context[:length], vocab))


class Fake:
    """A model that writes down what it is asked; rows are gone with the next call."""

    def __init__(self, vocab=VOCAB, capacity=100, bad=()):
        self.vocab_size, self.capacity = vocab, capacity
        self.bad = dict(bad)  # what is wrong with the row of a context of some length
        self.cache, self.calls = [], []
        self._rows = np.zeros((ROWS, vocab), np.float32)

    floor = 0  # it may go back to any length

    @property
    def length(self):
        return len(self.cache)

    def decode(self, tokens, outputs, batch_size=0):
        assert len(tokens) > 0
        assert 0 <= outputs <= min(ROWS, len(tokens))
        assert all(0 <= token < self.vocab_size for token in tokens)
        self.calls.append((tuple(tokens), outputs, batch_size))
        self.cache += tokens
        assert self.length <= self.capacity
        self._rows.fill(np.nan)
        for i in range(outputs):
            length = self.length - outputs + 1 + i
            self._rows[i] = row_after(self.cache[:length], self.vocab_size)
            if length in self.bad:
                self._rows[i, self.bad[length][0]] = self.bad[length][1]
        return self._rows[:outputs]

    def rewind(self, length):
        """One that drops nothing only says what is certain; a memory that cannot drop anything may need to hear it."""
        assert 0 <= length <= self.length
        self.certain = length
        if length < self.length:
            self.calls.append(length)
        del self.cache[length:]


def read(drafter, prompt, choices=(), same=0):
    """Let it begin with a prompt and read it; what it reports."""
    assert drafter.begin(prompt, choices, same) == []
    return drafter.catch_up(prompt, GREEDY, len(prompt))


def drafter_of(prompt, *, target_vocab=VOCAB, batch_size=lambda count: count, **fake):
    """A drafter that has read a prompt, and a model that has been asked nothing yet."""
    drafter = ModelDrafter(Fake(**fake), target_vocab, batch_size)
    read(drafter, prompt)
    drafter.model.calls.clear()
    return drafter


# Reading a prompt.


def test_it_reads_all_but_the_last_token_of_a_prompt():
    drafter = ModelDrafter(Fake(), VOCAB)
    drafter.model.cache = [4, 4, 4]
    drafter.begin([0, 1, 2])
    assert drafter.model.calls == [0]  # nobody waits for it
    assert drafter.pending(3) == 3
    drafter.catch_up([0, 1, 2], GREEDY, 3)
    assert drafter.model.calls == [0, ((0, 1), 2, 0)]
    assert drafter.pending(3) == 1


@pytest.mark.parametrize("most", [1, 2, 4, 6, 7, 99])
def test_it_may_read_the_end_of_a_prompt_only(most):
    prompt = [1, 1, 1, 1, 2, 3, 4, 0]
    drafter = ModelDrafter(Fake(), VOCAB)
    drafter.begin(prompt, [2, 3, 4])
    seen = drafter.catch_up(prompt, GREEDY, most)
    assert drafter.model.cache == prompt[:-1][-most:]
    assert drafter.pending(len(prompt)) == 1
    assert len(seen) == min(most, 3)  # choices at other places are not known


def test_what_came_behind_the_prompt_is_judged_by_the_text():
    text = [1, 1, 1, 1, 2, 0]
    drafter = ModelDrafter(Fake(), VOCAB)
    drafter.begin(text[:4], [2, 0])  # at places 2 and 3
    reported = drafter.catch_up(text, GREEDY, 99)
    assert [one.agreement for one in reported] == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("choices", [[], [3]])
def test_a_prompt_of_one_token_is_nothing_to_read(choices):
    drafter = ModelDrafter(Fake(), VOCAB)
    drafter.model.cache = [4, 4, 4]
    assert read(drafter, [2], choices) == []
    assert drafter.model.calls == [0]
    assert drafter.model.certain == 0
    assert drafter.pending(1) == 1


def test_a_prompt_is_judged_by_the_choices_for_its_last_places():
    """The row after tokens 0 to p - 1 foretells place p: here token p modulo 5."""
    prompt = [1, 1, 1, 1, 1, 1, 1]
    drafter = ModelDrafter(Fake(), VOCAB)
    reported = read(drafter, prompt, [3, 4, 1, 1])  # places 3, 4, 5 and 6
    assert drafter.model.calls == [(tuple(prompt[:-1]), 6, 0)]
    assert reported == [
        ShadowEvaluation(sure(place, prompt), kept) for place, kept in ((3, 1.0), (4, 1.0), (5, 0.0), (6, 1.0))
    ]


@pytest.mark.parametrize("length", [2, ROWS, ROWS + 1, ROWS + 2, 3 * ROWS])
@pytest.mark.parametrize("count", [1, ROWS - 1, ROWS, ROWS + 5])
def test_never_more_rows_than_a_context_has(length, count):
    prompt = [place * place % VOCAB for place in range(length)]
    places = range(length - count, length)
    drafter = ModelDrafter(Fake(), VOCAB)
    reported = read(drafter, prompt, [place % VOCAB for place in places])  # all right
    assert drafter.model.calls[0][1:] == (min(ROWS, length - 1), 0)
    rows = min(count, ROWS, length - 1)
    assert reported == [ShadowEvaluation(sure(place, prompt), 1.0) for place in range(length - rows, length)]


def test_a_choice_that_the_draft_does_not_have_is_no_agreement():
    """The fifth token is the likeliest to the draft too, and is not the target's."""
    assert [one.agreement for one in read(ModelDrafter(Fake(5), 4), [0] * 5, [4])] == [0.0]
    assert [one.agreement for one in read(ModelDrafter(Fake(5), 5), [0] * 5, [4])] == [1.0]
    assert [one.agreement for one in read(ModelDrafter(Fake(4), 5), [0] * 5, [4])] == [0.0]


# Offers.


def test_a_chain_costs_one_token_for_each_offer():
    prompt = [0, 1, 2]
    drafter = drafter_of(prompt)
    text = list(prompt)
    for place in (3, 4, 5):
        assert drafter.pending(len(text)) == 1
        offer = drafter.propose(text, GREEDY)
        assert offer.confidence == sure(place, text)
        assert drafter.pending(len(text)) == 0
        text.append(offer.draw().token)
        assert text[-1] == place % VOCAB
    assert drafter.model.calls == [((2,), 1, 1), ((3,), 1, 1), ((4,), 1, 1)]


def test_a_full_acceptance_costs_one_token_more():
    drafter = drafter_of([0, 1, 2])
    for text in ([0, 1, 2], [0, 1, 2, 3]):
        drafter.propose(text, GREEDY)
    drafter.model.calls.clear()
    drafter.commit(5)  # 3 and 4 were kept, 0 is the target's own: the draft has yet to read the last two
    assert drafter.model.calls == []
    assert drafter.pending(6) == 2
    drafter.propose([0, 1, 2, 3, 4, 0], GREEDY)
    assert drafter.model.calls == [((4, 0), 1, 2)]


def test_a_rejection_rewinds_past_the_first_wrong_token():
    drafter = drafter_of([0, 1, 2])
    for text in ([0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]):
        drafter.propose(text, GREEDY)
    drafter.model.calls.clear()
    drafter.commit(3)  # the target said 1 and not 3
    assert drafter.pending(4) == 1
    drafter.propose([0, 1, 2, 1], GREEDY)
    assert drafter.model.calls == [3, ((1,), 1, 1)]
    drafter.commit(4)
    assert drafter.model.certain == 4
    drafter.commit(9)
    assert drafter.model.calls == [3, ((1,), 1, 1)]
    assert drafter.model.certain == 4


def test_a_draft_that_lags_reads_all_of_it_for_one_offer():
    text = [place % 3 for place in range(40)]
    drafter = drafter_of(text[:2])
    assert drafter.pending(40) == 39
    offer = drafter.propose(text, GREEDY)
    assert drafter.model.calls == [(tuple(text[1:]), 1, 0)]  # far too many for a batch size
    assert offer.confidence == sure(40, text)


@pytest.mark.parametrize(("lag", "batch_size"), [(1, 4), (3, 4), (5, 8), (ROWS - 1, 16), (ROWS, 16), (ROWS + 1, 0)])
def test_an_offer_is_asked_for_at_the_batch_size_for_its_tokens(lag, batch_size):
    text = [0] * (1 + lag)
    drafter = drafter_of(text[:2], batch_size=lambda count: next(wide for wide in (4, 8, 16) if wide >= count))
    drafter.model.cache = [0]
    drafter.propose(text, GREEDY)
    assert [call[2] for call in drafter.model.calls] == [batch_size]


@pytest.mark.parametrize(("capacity", "offered"), [(4, False), (5, True), (6, True)])
def test_it_falls_silent_where_its_context_ends(capacity, offered):
    drafter = drafter_of([0, 1, 2], capacity=capacity)
    text = [0, 1, 2, 3, 4]
    assert (drafter.propose(text, GREEDY) is not None) == offered
    assert len(drafter.model.calls) == offered
    assert drafter.failure == ""


def test_tokens_that_only_the_target_has_are_read_as_another():
    drafter = ModelDrafter(Fake(4), 7)
    read(drafter, [6, 1, 4, 2], [0])
    drafter.propose([6, 1, 4, 5, 3, 6], GREEDY)
    assert [call[0] for call in drafter.model.calls] == [(0, 1, 0), (0, 3, 0)]
    drafter.commit(3)
    drafter.catch_up([6, 1, 4, 5, 3, 6], GREEDY, 99)
    assert drafter.model.calls[-1][0] == (0, 3)


@pytest.mark.parametrize(("target_vocab", "token"), [(4, 0), (5, 4), (9, 4)])
def test_tokens_that_only_the_draft_has_are_not_offered(target_vocab, token):
    """After four tokens the fifth one wins, if the target has it; of the others 0 does."""
    drafter = drafter_of([0, 0, 0], target_vocab=target_vocab)
    offer = drafter.propose([0, 0, 0, 0], GREEDY)
    assert offer.draw().token == token
    assert offer.confidence == confidence(row_after([0] * 4)[:target_vocab])


def test_a_row_of_the_padding_at_the_end_may_be_bad():
    drafter = drafter_of([0, 1], target_vocab=4, bad={2: (4, np.nan)})
    assert drafter.propose([0, 1], GREEDY) is not None
    assert drafter.failure == ""


def test_confidence_is_known_before_the_draw_and_the_draw_is_the_rules():
    residual = make_rule("residual", Sampling(1.0, **OFF, seed=7))
    drafter = drafter_of([0, 1, 2])
    offer = drafter.propose([0, 1, 2], residual)
    q = token_candidates(row_after([0, 1, 2]), residual.sampling)
    for _ in range(20):  # each is drawn anew
        proposal = offer.draw()
        assert proposal.q.probabilities() == pytest.approx(q.probabilities())
    assert offer.confidence == pytest.approx(q.probabilities().max())


# Reviews.


def test_a_review_reads_what_an_offer_need_not_and_judges_each_place():
    """All but the newest token is read: the row after it would speak of what is not decided."""
    text = [0, 1, 2, 3, 1, 0]
    drafter = drafter_of(text[:3])
    reported = drafter.catch_up(text, GREEDY, 99)
    assert drafter.model.calls == [((2, 3, 1), 3, 0)]
    assert drafter.model.certain == 5
    # After three tokens it would have said 3, and so it was; after four 4, but 1 came; after five 0, and 0 came.
    assert reported == [
        ShadowEvaluation(sure(3, text), 1.0),
        ShadowEvaluation(sure(4, text), 0.0),
        ShadowEvaluation(sure(5, text), 1.0),
    ]
    assert drafter.pending(len(text)) == 1
    assert drafter.catch_up(text, GREEDY, 99) == []
    assert len(drafter.model.calls) == 1


def test_after_a_review_an_offer_costs_one_token():
    text = [0, 1, 2, 3, 1, 0]
    drafter = drafter_of(text[:2])
    drafter.catch_up(text, GREEDY, 99)
    offer = drafter.propose(text, GREEDY)
    assert [call[0] for call in drafter.model.calls] == [(1, 2, 3, 1), (0,)]
    assert offer.confidence == sure(6, text)


@pytest.mark.parametrize("lag", [1, 2, ROWS, ROWS + 1, ROWS + 2, 3 * ROWS])
def test_a_long_review_judges_the_last_places(lag):
    text = [place % VOCAB for place in range(2 + lag)]  # it is always right
    drafter = drafter_of(text[:2])
    assert drafter.pending(len(text)) == lag + 1
    reported = drafter.catch_up(text, GREEDY, 99)
    rows = min(lag, ROWS)
    assert drafter.model.calls == [(tuple(text[1:-1]), rows, 0)]
    assert reported == [ShadowEvaluation(sure(place, text), 1.0) for place in range(len(text) - rows, len(text))]


@pytest.mark.parametrize(("capacity", "read"), [(3, 0), (4, 1), (6, 3), (8, 5), (9, 5)])
def test_a_review_goes_as_far_as_the_context(capacity, read):
    text = [place % VOCAB for place in range(9)]
    drafter = drafter_of(text[:4], capacity=capacity)
    reported = drafter.catch_up(text, GREEDY, 99)
    assert drafter.model.length == 3 + read
    assert reported == [ShadowEvaluation(sure(place, text), 1.0) for place in range(4, 4 + read)]


def test_a_review_knows_only_the_tokens_that_both_have():
    text = [0, 0, 0, 0, 0, 0]
    reported = drafter_of(text[:4], target_vocab=4).catch_up(
        text, GREEDY, 99
    )  # at place 4 the draft's fifth token would win
    assert reported[0] == ShadowEvaluation(confidence(row_after(text[:4])[:4]), 1.0)


def test_agreement_under_the_residual_rule_is_the_chance_to_propose_what_came():
    text = [0, 1, 2, 3, 1, 0]
    residual = make_rule("residual", Sampling(0.7, **OFF))
    reported = drafter_of(text[:4]).catch_up(text, residual, 99)
    for place, one in zip((4, 5), reported, strict=True):
        scores = row_after(text[:place]).astype(float) / 0.7
        assert one.agreement == pytest.approx(math.exp(scores[text[place]]) / np.exp(scores).sum())


@examples(100)
@given(st.data())
def test_hindsight_is_what_an_offer_would_have_been(data):
    """Whatever was read, offered, kept and reviewed before; at any temperature under the exact rule."""
    temperature = data.draw(st.sampled_from([0.0, 1.0, 3.0]))
    rule = make_rule("exact", Sampling(temperature, **OFF, seed=data.draw(st.integers(0, 9))))
    tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)
    text = data.draw(tokens)
    drafter = drafter_of(text)
    for _ in range(data.draw(st.integers(1, 6))):
        length = drafter.model.length
        text += data.draw(tokens)
        if data.draw(st.booleans()):  # a chain that was all rejected
            for end in range(data.draw(st.integers(0, 3))):
                drafter.propose([*text, *[0] * end], rule)
                length = len(text) - 1
            drafter.commit(len(text) - 1)
        if data.draw(st.booleans()):
            expected = []
            for place in range(max(length + 1, len(text) - ROWS), len(text)):
                offer = drafter_of(text[:place]).propose(text[:place], rule)
                expected.append(ShadowEvaluation(offer.confidence, float(offer.draw().token == text[place])))
            assert drafter.catch_up(text, rule, 99) == expected
        assert drafter.model.cache == text[: drafter.model.length]
        assert 1 <= drafter.pending(len(text)) == len(text) - drafter.model.length


# A draft that is damaged.


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["read", "propose", "catch_up"])
def test_a_bad_row_anywhere_is_the_end_of_it(where, value):
    drafter = ModelDrafter(Fake(bad={3: (1, value)}), VOCAB)
    text = [0, 1, 2, 3, 4, 0]
    if where == "read":
        assert read(drafter, text, [2, 3, 4]) == []
    else:
        drafter.begin(text[:3])
        drafter.model.decode(text[:2], outputs=0)
        assert drafter.failure == ""
        assert not (drafter.propose(text[:3], GREEDY) if where == "propose" else drafter.catch_up(text, GREEDY, 99))
    assert drafter.failure.startswith("the model produced ")
    calls = len(drafter.model.calls)
    assert drafter.propose(text, GREEDY) is None
    assert drafter.catch_up(text, GREEDY, 99) == []
    assert len(drafter.model.calls) == calls
    drafter.commit(2)
    assert drafter.model.length == 2
    drafter.model.bad = {}
    drafter.begin(text)
    assert drafter.failure == ""
    assert drafter.propose(text, GREEDY) is not None


def test_a_token_that_is_ruled_out_is_no_damage():
    drafter = drafter_of([0, 1], bad={2: (1, -np.inf)})
    assert drafter.propose([0, 1], GREEDY) is not None
    assert drafter.failure == ""


# A text that begins as the one before.


@pytest.mark.parametrize("same", [0, 1, 3, 5])
def test_what_it_has_read_of_the_same_text_stays(same):
    drafter = drafter_of([0, 1, 2, 3, 4, 0])
    prompt = [*[0, 1, 2, 3, 4][:same], 4, 4, 4]
    read(drafter, prompt, same=same)
    decoded = [call[0] for call in drafter.model.calls if isinstance(call, tuple)]
    assert decoded == [tuple(prompt[same:-1])]
    assert drafter.model.cache == prompt[:-1]


def test_a_prompt_that_it_has_read_whole_is_nothing_to_read():
    drafter = drafter_of([0, 1, 2, 3])
    assert read(drafter, [0, 1, 2], [1, 1], same=3) == []
    assert drafter.model.cache == [0, 1]


def test_a_beginning_that_it_forgot_is_no_hindrance():
    drafter = ModelDrafter(Fake(capacity=4), VOCAB)
    read(drafter, [0, 1, 2, 3, 4, 0, 1])  # 4 fit: it has forgotten 0 and 1
    assert drafter.model.cache == [2, 3, 4, 0]
    read(drafter, [0, 1, 2, 3, 4, 4], same=5)
    assert drafter.model.cache == [2, 3, 4]
    read(drafter, [0, 1, 2, 3, 4, 4, 4, 4], same=5)  # one more would be too many
    assert drafter.model.cache == [3, 4, 4, 4]
    read(drafter, [0, 4], same=1)  # before what it knows
    assert drafter.model.cache == [0]
    assert drafter.pending(2) == 1


def test_after_another_use_the_cache_begins_with_the_text():
    drafter = ModelDrafter(Fake(capacity=4), VOCAB)
    read(drafter, [0, 1, 2, 3, 4, 0, 1])
    drafter.model.cache = [0, 1]
    drafter.let_go()
    assert drafter.has_read == 2
