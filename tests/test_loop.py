"""The loop on models whose logits are a fixed function of the context and which check their own bookkeeping."""

import random
import zlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufspec.decoding import loop
from ggufspec.decoding.acceptance import ExactRule, Proposal, make_rule
from ggufspec.decoding.loop import ModelDrafter
from ggufspec.decoding.sampling import Sampling

END = 3
VOCAB = 4
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
GREEDY = Sampling()


class BrokenError(Exception):
    """A model was called in a way that llama.cpp would punish, or its cache is not the text."""


def drawn(seed, *what):
    """A number in [0, 2**32) that is a fixed function of its arguments."""
    return random.Random(repr((seed, *what))).getrandbits(32)


@dataclass(frozen=True)
class Table:
    """Logits of every context: small integers, so that ties occur, from the whole context."""

    seed: int
    vocab: int = VOCAB
    end_bonus: int = 0  # added to the end token's logit

    def __call__(self, context):
        bits = zlib.crc32(bytes(context), self.seed)
        row = np.array([(bits >> 3 * token) & 7 for token in range(self.vocab)], np.float32)
        row[END] += self.end_bonus
        return row


@dataclass(frozen=True)
class Draft:
    """Knows ``target``'s logits in ``quality`` of 8 contexts, and makes up its own in the others."""

    target: Table
    quality: int
    vocab: int

    def __call__(self, context):
        own = Table(self.target.seed + 1, self.vocab)(context)
        if drawn(self.target.seed, "knows", *context) % 8 >= self.quality:
            return own
        known = self.target([min(token, self.target.vocab - 1) for token in context])
        shared = min(self.vocab, self.target.vocab)
        own[:shared] = known[:shared] + 8  # tokens that only the draft has do not win here
        return own


@dataclass(frozen=True)
class Line:
    """Always goes on with the same answer, whatever has been said."""

    prompt: int
    answer: tuple

    vocab = VOCAB

    def __call__(self, context):
        row = np.zeros(self.vocab, np.float32)
        row[self.answer[min(len(context) - self.prompt, len(self.answer) - 1)]] = 9
        return row


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self):
        return self.now


class TableModel:
    """A model over a table. ``text`` is what has been said so far, kept by the test."""

    def __init__(self, table, capacity, text, clock, seconds=1.0, *, drafts=False):
        self.table, self.capacity, self.text, self.clock, self.seconds = table, capacity, text, clock, seconds
        self.vocab_size = table.vocab
        self.drafts = drafts
        self.cache = []
        self.decodes = []  # (tokens, outputs) of every call
        self._buffer = np.zeros((capacity + 1, self.vocab_size), np.float32)

    @property
    def length(self):
        return len(self.cache)

    def decode(self, tokens, outputs, width=0):  # noqa: ARG002 - the loop asks for no width
        self.decodes.append((tuple(tokens), outputs))
        self.clock.now += self.seconds
        before, after = len(self.cache), [*self.cache, *tokens]
        said = [token if token < self.vocab_size else 0 for token in self.text]
        if not 0 <= outputs <= len(tokens) or not tokens:
            raise BrokenError(f"{outputs} outputs of {len(tokens)} tokens")
        if len(after) > self.capacity:
            raise BrokenError("beyond the capacity")
        if not all(0 <= token < self.vocab_size for token in tokens):
            raise BrokenError("a token that is not in the vocabulary")
        if after[: len(said)] != said[: len(after)]:
            raise BrokenError("the cache disagrees with the text")
        if outputs == 0 and len(after) != len(said) - 1:
            raise BrokenError("reading must leave the last token of the prompt")
        if outputs and len(after) < len(said):
            raise BrokenError("logits wanted before the whole text was read")
        if outputs and not self.drafts and before != len(said) - 1:
            raise BrokenError("the target must decode the newest token, and it alone was not read before")
        self.cache = after
        self._buffer.fill(np.nan)  # rows are valid until the next call
        for row in range(outputs):
            self._buffer[row] = self.table(after[: len(after) - outputs + row + 1])
        return self._buffer[:outputs]

    def rewind(self, length):
        if not 0 <= length <= len(self.cache):
            raise BrokenError(f"rewind to {length} of {len(self.cache)}")
        del self.cache[length:]


class Scripted:
    """Proposes what it was told to, round by round; then nothing."""

    def __init__(self, script):
        self.script = [tuple(line) for line in script]
        self.kept = []

    def read(self, prompt):
        self.kept.append(len(prompt) - 1)

    def draft(self, tokens, limit, rule):  # noqa: ARG002
        return [Proposal(token) for token in (self.script.pop(0) if self.script else ())[:limit]]

    def keep(self, length):
        self.kept.append(length)


class Stopping(ModelDrafter):
    """Stops where it is told to: before drafting or, if ``late``, by dropping what was drafted."""

    lengths = ()
    late = False

    def draft(self, tokens, limit, rule):
        wanted = self.lengths[len(tokens) % len(self.lengths)] if self.lengths else limit
        return super().draft(tokens, limit if self.late else min(wanted, limit), rule)[:wanted]


@dataclass
class Case:
    """One generation; ``drafter`` makes a drafter from (draft model, target vocabulary)."""

    table: object
    prompt: tuple = (0, 1)
    max_tokens: int = 12
    capacity: int = 64
    draft_max: int = 4
    sampling: Sampling = GREEDY
    draft: object = None
    draft_capacity: int = 64
    drafter: object = None
    rule: object = None
    rounds: list = field(default_factory=list)

    def is_end(self, token):
        return token == END

    def run(self, generate=loop.generate):
        """Tokens of the answer; after every round the caches must hold the text and nothing else."""
        text, clock = list(self.prompt), Clock()
        self.target = TableModel(self.table, self.capacity, text, clock, 100.0)
        self.model = TableModel(self.draft, self.draft_capacity, text, clock, drafts=True) if self.draft else None
        drafter = self.drafter
        if self.model:
            drafter = (self.drafter or ModelDrafter)(self.model, self.is_end, self.table.vocab)
        loop.read(self.target, self.prompt, drafter)
        self.rounds = []
        for round_ in generate(
            self.target,
            self.prompt,
            self.rule or make_rule("exact", self.sampling),
            max_tokens=self.max_tokens,
            is_end=self.is_end,
            drafter=drafter,
            draft_max=self.draft_max,
            clock=clock,
        ):
            self.rounds.append(round_)
            text.extend(round_.emitted)
            assert self.target.cache == text[:-1]
        return text[len(self.prompt) :]

    def alone(self):
        """The answer token by token, without the loop."""
        text, rule = list(self.prompt), make_rule("exact", self.sampling)
        while len(text) - len(self.prompt) < self.max_tokens and len(text) <= self.capacity:
            text.append(rule.verify(self.table(text)[None], (), len(text)).token)
            if text[-1] == END:
                break
        return text[len(self.prompt) :]

    def check(self, generate=loop.generate):
        """The answer is target-only's, and the rounds add up to it."""
        answer = self.run(generate)
        assert answer == self.alone()
        assert [token for round_ in self.rounds for token in round_.emitted] == answer
        for index, round_ in enumerate(self.rounds):
            assert 0 <= round_.accepted <= len(round_.drafted) <= self.draft_max
            kept = round_.emitted[: round_.accepted]
            assert kept == round_.drafted[: len(kept)]
            if round_.emitted[-1] == END:
                assert index == len(self.rounds) - 1
                assert len(round_.emitted) <= round_.accepted + 1
            else:
                assert len(round_.emitted) == round_.accepted + 1
            assert END not in round_.emitted[:-1]
        return answer


samplings = st.one_of(
    st.just(GREEDY),
    st.builds(
        lambda temperature, seed, cut: Sampling(temperature, **(OFF | cut), seed=seed),
        st.sampled_from([0.3, 1.0, 4.0]),
        st.integers(0, 2**64 - 1),
        st.sampled_from([{}, {"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.2}]),
    ),
)
tables = st.builds(Table, st.integers(0, 2**31), st.integers(END + 1, 7), st.sampled_from([-8, 0, 3]))
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
frame = {
    "table": tables,
    "prompt": prompts,
    "max_tokens": st.integers(0, 24),
    "capacity": st.integers(5, 32),
    "draft_max": st.integers(0, 9),
    "sampling": samplings,
}


@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries(frame),
    st.integers(0, 8),
    st.integers(-2, 3),
    st.integers(5, 32),
    st.lists(st.integers(0, 9), max_size=4),
    st.booleans(),
)
def test_any_draft_model_any_length_any_stopping_gives_the_text_of_target_only(
    made, quality, more_vocab, draft_capacity, lengths, late
):
    def stopping(*args):
        drafter = Stopping(*args)
        drafter.lengths, drafter.late = lengths, late
        return drafter

    vocab = max(END + 1, made["table"].vocab + more_vocab)
    case = Case(**made, draft=Draft(made["table"], quality, vocab), draft_capacity=draft_capacity, drafter=stopping)
    case.check()


@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries(frame),
    st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=12),
)
def test_any_scripted_drafter_gives_the_text_of_target_only(made, script):
    Case(**made, drafter=Scripted(script)).check()


@settings(max_examples=200, deadline=None)
@given(st.fixed_dictionaries(frame), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_a_drafter_that_knows_the_text_up_to_some_place_gives_the_text_of_target_only(made, plan):
    """Long acceptances, which random scripts hardly reach, on either side of every border."""
    table, draft_max = made["table"], made["draft_max"]

    class Prophet(Scripted):
        def draft(self, tokens, limit, rule):
            assert 0 < limit <= draft_max
            count, wrong = plan[len(tokens) % len(plan)]
            text = list(tokens)
            for place in range(min(count, limit)):
                token = rule.verify(table(text)[None], (), len(text)).token
                text.append((token + (place == wrong)) % table.vocab)
            return [Proposal(token) for token in text[len(tokens) :]]

    Case(**made, drafter=Prophet(())).check()


@settings(max_examples=100, deadline=None)
@given(st.fixed_dictionaries(frame))
def test_without_a_drafter_every_round_is_one_token(made):
    case = Case(**made)
    answer = case.check()
    assert [(r.drafted, r.accepted, len(r.emitted)) for r in case.rounds] == [((), 0, 1)] * len(answer)


@pytest.mark.parametrize("draft_max", range(7))
@pytest.mark.parametrize("max_tokens", range(9))
def test_max_tokens_is_exact(max_tokens, draft_max):
    table = Line(2, (0, 1, 2))
    case = Case(table, max_tokens=max_tokens, draft_max=draft_max, draft=table)
    assert len(case.check()) == max_tokens
    assert all(len(tokens) == outputs for tokens, outputs in case.target.decodes if outputs)


@pytest.mark.parametrize("draft_max", range(7))
@pytest.mark.parametrize("capacity", range(2, 12))
def test_both_stop_at_the_same_token_when_the_context_is_full(capacity, draft_max):
    table = Line(3, (0, 1, 2, 1))
    fields = {"prompt": (0, 1, 2), "capacity": capacity, "max_tokens": 99}
    with_draft = Case(table, **fields, draft_max=draft_max, draft=table, draft_capacity=99)
    alone = Case(table, **fields)
    assert with_draft.check() == alone.check()
    assert len(alone.run()) == capacity + 1 - 3  # the last token needs no place in the cache


def test_a_draft_model_with_a_smaller_context_falls_silent():
    table = Line(2, (0, 1, 2))
    case = Case(table, max_tokens=10, draft=table, draft_capacity=5)
    case.check()
    assert [len(round_.drafted) for round_ in case.rounds] == [3, 0, 0, 0, 0, 0, 0]


ANSWER = (0, 1, 2, END, 0, 0, 0)


@pytest.mark.parametrize(
    ("script", "accepted", "emitted"),
    [
        pytest.param([(0, 1, 2, END, 0)], 5, ANSWER[:4], id="inside a draft that goes on behind it"),
        pytest.param([(0, 1, 2, END, 1)], 4, ANSWER[:4], id="inside a draft, a wrong token behind it"),
        pytest.param([(0, 1, 2, END)], 4, ANSWER[:4], id="last of a draft"),
        pytest.param([(0, 1, 2)], 3, ANSWER[:4], id="as the bonus token"),
        pytest.param([(0, 1, 2, 0)], 3, ANSWER[:4], id="as the correction"),
    ],
)
def test_the_end_of_the_text(script, accepted, emitted):
    case = Case(Line(2, ANSWER), draft_max=9, drafter=Scripted(script))
    assert case.check() == list(ANSWER[:4])
    assert len(case.rounds) == 1
    assert (case.rounds[0].accepted, case.rounds[0].emitted) == (accepted, emitted)
    assert case.drafter.kept == [1, 2 + 4 - 1]


def test_a_draft_that_proposes_the_end_wrongly_does_not_end_the_text():
    case = Case(Line(2, (0, 1, 2)), max_tokens=6, draft_max=9, drafter=Scripted([(0, END, 2), (2, 2, END)]))
    assert case.check() == [0, 1, 2, 2, 2, 2]
    assert [round_.emitted for round_ in case.rounds] == [(0, 1), (2, 2, 2), (2,)]


@settings(max_examples=50, deadline=None)
@given(tables, prompts, samplings)
def test_a_draft_that_is_the_target_is_always_right(table, prompt, sampling):
    """At any temperature: draft and target meet the same noise at the same position."""
    case = Case(table, prompt, draft=table, sampling=sampling)
    case.check()
    assert all(round_.accepted == len(round_.drafted) for round_ in case.rounds)


def test_a_model_drafter_does_not_draft_behind_the_end():
    table = Line(2, ANSWER)
    case = Case(table, draft_max=9, draft=table)
    case.check()
    assert case.rounds[0].drafted == ANSWER[:4]


def test_what_a_full_acceptance_and_a_rejection_cost_the_draft_model():
    answer = (0, 1, 2, 0, 1, 2, 0, 1, 2, 0)
    full = Case(Line(2, answer), max_tokens=10, draft=Line(2, answer))
    full.check()
    assert [len(tokens) for tokens, _ in full.model.decodes] == [1, 1, 1, 1, 1, 2, 1, 1, 1]
    guess = (0, 2, 2, 0, 1, 2, 0, 1, 2, 0)  # wrong at the second place
    part = Case(Line(2, answer), max_tokens=10, draft=Line(2, guess))
    part.check()
    assert [round_.accepted for round_ in part.rounds] == [1, 4, 2]
    # After the rejection the correction alone is new to it, after the full acceptance two tokens are.
    assert [len(tokens) for tokens, _ in part.model.decodes] == [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 1]


@pytest.mark.parametrize("difference", [-2, -1, 1, 2])
def test_a_vocabulary_that_differs_at_the_end(difference):
    shared, accepted, strangers = 7 + min(difference, 0), 0, 0
    for seed in range(20):
        table = Table(seed, 7, end_bonus=-8)
        case = Case(table, max_tokens=20, draft=Draft(table, 8, 7 + difference))
        answer = case.check()
        assert all(token < shared for round_ in case.rounds for token in round_.drafted)
        accepted += sum(round_.accepted for round_ in case.rounds)
        strangers += sum(token >= shared for token in answer)
    assert accepted > 100
    assert (strangers > 0) == (difference < 0)  # tokens of the answer that the draft model does not have


def test_a_prompt_of_tokens_that_only_the_target_has():
    table = Table(1, 6, end_bonus=-8)
    case = Case(table, prompt=(5, 4, 5), draft=Draft(table, 8, 4))
    case.check()
    assert case.model.decodes[0] == ((0, 0), 0)


def test_a_prompt_of_one_token_is_not_read():
    table = Line(1, (0, 1, 2))
    case = Case(table, prompt=(2,), max_tokens=1, draft=table)
    assert case.check() == [0]
    assert case.target.decodes == [((2,), 1)]
    assert case.model.decodes == []


def test_reading_starts_a_new_text():
    text, clock = [0, 1, 2], Clock()
    models = [TableModel(Table(1), 8, text, clock, drafts=drafts) for drafts in (False, True)]
    for model in models:
        model.cache = [2, 2, 2, 2]
    loop.read(models[0], text, ModelDrafter(models[1], lambda _: False, VOCAB))
    assert [model.cache for model in models] == [[0, 1], [0, 1]]


def test_the_clock_is_split_into_drafting_and_verifying():
    table = Line(2, (0, 1, 2))
    case = Case(table, max_tokens=6, draft_max=3, draft=table)
    case.check()
    times = [(len(r.drafted), r.draft_s, r.verify_s, r.total_s) for r in case.rounds]
    assert times == [(3, 3, 100, 103), (1, 1, 100, 101)]


def test_the_residual_rule_keeps_the_books_too():
    for seed in range(60):
        table = Table(seed)
        case = Case(table, max_tokens=20, draft=Draft(table, 4, VOCAB), sampling=Sampling(1.0, **OFF, seed=seed))
        case.rule = make_rule("residual", case.sampling)
        answer = case.run()  # the models look after their caches
        assert len(answer) == 20 or answer.index(END) == len(answer) - 1


# What the checks above are worth: each bug, put in from outside, must be found.


class NeverRewound(ModelDrafter):
    """The draft's cache keeps what was rejected."""

    def keep(self, length):
        pass


class LastForgotten(ModelDrafter):
    """Believes that its cache holds the last drafted token after a full acceptance."""

    def draft(self, tokens, limit, rule):
        if self.model.length == len(tokens) - 2:
            return super().draft([*tokens[:-2], tokens[-1]], limit, rule)
        return super().draft(tokens, limit, rule)


class RewoundTooLittle(ModelDrafter):
    """Keeps the first wrong token."""

    def keep(self, length):
        super().keep(length + 1)


class Watched(ExactRule):
    """Remembers its last verdict."""

    def verify(self, rows, proposals, position):
        self.verdict, self.seen = super().verify(rows, proposals, position), 0
        return self.verdict


def bonus_not_asked(target, prompt, rule, *, is_end, **rest):
    """The end is looked for among the drafted tokens only."""

    def among_drafted(token):
        rule.seen += 1
        return rule.seen <= rule.verdict.accepted and is_end(token)

    return loop.generate(target, prompt, rule, is_end=among_drafted, **rest)


def bonus_dropped(target, prompt, rule, **rest):
    """A bonus token that ends the text is not emitted."""
    for round_ in loop.generate(target, prompt, rule, **rest):
        ended = round_.emitted[-1] == END and len(round_.emitted) == len(round_.drafted) + 1
        emitted = round_.emitted[:-1] if ended else round_.emitted
        yield loop.Round(round_.drafted, round_.accepted, emitted, 0.0, 0.0, 0.0)


def emits_one_more(target, prompt, rule, *, max_tokens, **rest):
    return loop.generate(target, prompt, rule, max_tokens=max_tokens + 1, **rest)


def check_many(drafter=ModelDrafter, generate=loop.generate):
    for seed in range(40):
        table, sampling = (
            Table(seed, end_bonus=-4 * (seed % 3)),
            Sampling(1.0, **OFF, seed=seed) if seed % 2 else GREEDY,
        )
        made = {"draft": Draft(table, 6, VOCAB), "sampling": sampling, "rule": Watched(sampling)}
        Case(table, max_tokens=16, drafter=drafter, **made).check(generate)


def test_the_check_passes_without_a_bug():
    check_many()


@pytest.mark.parametrize("drafter", [NeverRewound, LastForgotten, RewoundTooLittle])
def test_a_drafter_with_a_bug_is_found(drafter):
    with pytest.raises((BrokenError, ValueError), match=r"cache disagrees with the text|empty"):
        check_many(drafter=drafter)


@pytest.mark.parametrize("generate", [bonus_not_asked, bonus_dropped, emits_one_more])
def test_a_loop_with_a_bug_is_found(generate):
    with pytest.raises(AssertionError):
        check_many(generate=generate)


def test_a_rule_with_a_bug_is_found(monkeypatch):
    """Accepts every drafted token."""

    def gullible(self, rows, proposals, position):
        verdict = ExactRule.verify(self, rows[len(proposals) :], (), position + len(proposals))
        return type(verdict)(len(proposals), verdict.token)

    monkeypatch.setattr(Watched, "verify", gullible)
    with pytest.raises(AssertionError):
        check_many()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.decode((1,), 2), "2 outputs of 1 tokens"),
        (lambda model: model.decode((), 0), "0 outputs of 0 tokens"),
        (lambda model: model.decode((1, 0, 0, 0, 0), 5), "beyond the capacity"),
        (lambda model: model.decode((1, VOCAB), 1), "not in the vocabulary"),
        (lambda model: model.decode((2,), 1), "disagrees with the text"),
        (lambda model: model.rewind(2), "rewind to 2 of 1"),
    ],
)
def test_the_table_model_minds_its_books(call, message):
    model = TableModel(Table(1), 4, [0, 1], Clock())
    model.decode((0,), 0)
    with pytest.raises(BrokenError, match=message):
        call(model)
