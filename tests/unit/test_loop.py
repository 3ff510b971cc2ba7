"""The loop on models whose logits are a fixed function of the context and which check their own bookkeeping."""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.decoding import loop
from ggufspec.decoding.batch import decode_all
from ggufspec.decoding.drafters.base import AloneDrafter, DraftCandidate, ShadowEvaluation
from ggufspec.decoding.drafters.lookup import LookupDrafter
from ggufspec.decoding.drafters.model import ModelDrafter
from ggufspec.decoding.options import ROWS
from ggufspec.decoding.policy.adaptive import AdaptivePolicy
from ggufspec.decoding.policy.base import DraftPolicy
from ggufspec.decoding.policy.draft_latency import DraftLatency
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.decoding.rules import make_rule
from ggufspec.decoding.rules.base import DraftToken
from ggufspec.decoding.rules.coupled import CoupledRule
from ggufspec.decoding.sampling import Sampling, confidence
from tests.support import driving
from tests.support.properties import examples

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


@dataclass(frozen=True)
class Damaged:
    """A table some of whose rows, ``eighths`` of them, have a number in them that is none."""

    table: object
    eighths: int
    value: float = np.nan
    whole: bool = False  # the row, or one of its tokens

    @property
    def vocab(self):
        return self.table.vocab

    def __call__(self, context):
        row = self.table(context)
        if drawn(5, "damage", *context) % 8 < self.eighths:
            row[slice(None) if self.whole else drawn(6, *context) % self.vocab] = self.value
        return row


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self):
        return self.now


class TableModel:
    """A model over a table. ``text`` is what has been said so far, kept by the test."""

    def __init__(self, table, capacity, text, clock, seconds=1.0, *, drafts=False, shared=None):
        self.table, self.capacity, self.text, self.clock, self.seconds = table, capacity, text, clock, seconds
        self.vocab_size = table.vocab
        self.shared = shared or table.vocab
        self.drafts = drafts
        self.cache = []
        self.decodes = []  # (tokens, outputs) of every call
        self.batch_sizes = []  # of every call
        self.batch = 512
        self.spoilt = False  # has given a row that cannot be used
        self.timed = False
        self.first = lambda: 0  # a draft may have forgotten the text before this place
        self._buffer = np.zeros((capacity + 1, self.vocab_size), np.float32)

    @property
    def length(self):
        return len(self.cache)

    def decode(self, tokens, outputs, batch_size=0):
        if not self.timed:
            self.decodes.append((tuple(tokens), outputs))
            self.batch_sizes.append(batch_size)
        self.clock.now += self.seconds
        before, after = len(self.cache), [*self.cache, *tokens]
        said = [token if token < self.vocab_size else 0 for token in self.text]
        if not 0 <= outputs <= min(len(tokens), ROWS) or not tokens:
            raise BrokenError(f"{outputs} outputs of {len(tokens)} tokens")
        if batch_size and batch_size < len(tokens):
            raise BrokenError(f"{len(tokens)} tokens in a batch of {batch_size}")
        if len(after) > self.capacity:
            raise BrokenError("beyond the capacity")
        if not all(0 <= token < self.vocab_size for token in tokens):
            raise BrokenError("a token that is not in the vocabulary")
        first = self.first()
        if after[: max(0, len(said) - first)] != said[first : first + len(after)]:
            raise BrokenError("the cache disagrees with the text")
        if self.spoilt:
            raise BrokenError("asked again though it is damaged")
        in_part = before % self.batch == 0 and (len(tokens) == self.batch or len(after) >= len(said) - 1)
        if not self.drafts and before != len(said) - 1 and not (in_part and len(after) <= len(said)):
            raise BrokenError("the target reads the prompt, then the newest token and the drafted")
        if not self.drafts and before == len(said) - 1 and outputs != len(tokens):
            raise BrokenError("the target's row of each token of a round is needed")
        self.cache = after
        self._buffer.fill(np.nan)  # rows are valid until the next call
        for row in range(outputs):
            self._buffer[row] = self.table(after[: len(after) - outputs + row + 1])
        if not self.timed:  # whose rows nobody looks at
            self.spoilt = not np.isfinite(self._buffer[:outputs, : self.shared].max(axis=1)).all()
        return self._buffer[:outputs]

    def rewind(self, length):
        if not 0 <= length <= len(self.cache):
            raise BrokenError(f"rewind to {length} of {len(self.cache)}")
        del self.cache[length:]
        self.timed = False

    def mark(self):
        """Any length can be gone back to."""
        self.timed = True


def prefill(target, prompt, drafters=(), policy=None, **rest):
    """The rows of a prompt that is read from its beginning."""
    target.rewind(0)
    return decode_all(target, loop.decode_prompt(prompt, drafters, policy, batch=target.batch, **rest))


def generate(target, prompt, rows, rule, **rest):
    """The rounds of an answer of its own."""
    return driving.decode_rounds(target, loop.rounds(prompt, rows, rule, capacity=target.capacity, **rest))


class Scripted(AloneDrafter):
    """Offers what it was reported to, round by round; then nothing. What it ``lags`` it has to be asked for."""

    name = "script"

    def __init__(self, script=(), *, lags=0):
        self.script = [tuple(line) for line in script]
        self.lags = lags
        self.kept = []

    def begin(self, _prompt, _choices=(), _same=0):
        return []  # no round before the first token

    def start(self, length):
        """A round follows a text of this length."""
        self.kept.append(length - 1)
        self.length, self.line = length, self.script.pop(0) if self.script else ()

    def guess(self, text, _rule):
        place = len(text) - self.length
        return self.line[place] if place < len(self.line) else None

    def pending(self, _length):
        return self.lags

    def propose(self, text, rule):
        token = self.guess(text, rule)
        return None if token is None else DraftCandidate(0.9, lambda: DraftToken(token))

    def catch_up(self, _text, _rule, _most):
        return []

    def time_token(self, _text, _clock):
        return None

    def commit(self, length):
        self.start(length + 1)


class Prophet(Scripted):
    """Knows the target, and is wrong where ``plan`` says so: (tokens it has, place of the wrong one) by length."""

    def __init__(self, table, plan, *, lags=0):
        super().__init__(lags=lags)
        self.table, self.plan = table, plan

    def guess(self, text, rule):
        place, (count, wrong) = len(text) - self.length, self.plan[self.length % len(self.plan)]
        if place >= count:
            return None
        row = self.table(text)
        return (rule.draft_token(row, len(text)).token + (place == wrong)) % self.table.vocab


class Whim:
    """A policy that does what it likes, and minds that it is asked in the order that the protocol promises."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.wanted = []  # tokens to verify, of each round
        self.shadow = self.taken = 0
        self.expected_gain = {}
        self.open, self.cooldown = False, 0

    def begin(self, limit, _remaining, *, may_trim):
        assert not self.open
        assert not self.cooldown
        self.open, self.limit, self.may_trim, self.taken = True, limit, may_trim, 0
        self.keen = self.rng.random()

    def choose(self, offers, pending):
        assert self.open
        assert self.taken < self.limit
        assert not set(offers) & set(pending)
        assert all(count > 0 for count in pending.values())
        names = [*offers, *pending]
        self.waiting = self.rng.choice(names) if names and self.rng.random() < self.keen else None
        return self.waiting

    def proposed(self, name, pending, seconds):
        assert name == self.waiting
        assert pending > 0
        assert seconds >= 0

    def extend(self, name, confidence):
        assert name == self.waiting
        assert 0 <= confidence <= 1
        taken = self.rng.random() < 0.5 + self.keen / 2
        self.taken += taken
        return taken

    def verify_count(self):
        self.wanted.append(self.rng.randint(0, self.taken) if self.may_trim and self.rng.random() < 0.4 else self.taken)
        return self.wanted[-1]

    def target_only_batch_size(self, batch_size):
        assert self.open
        return batch_size

    def observe_round(self, outcome):
        assert self.open
        assert not self.cooldown
        assert outcome.accepted <= self.wanted[-1]
        assert 0 < outcome.verify_s <= outcome.total_s
        self.open, self.taken = False, 0
        self.cooldown = self.rng.choice((0, 0, 0, 1, 3))

    def observe_cooldown(self, batch_size, idle):
        assert not self.open
        assert batch_size > 0
        assert 0 < len(idle) <= self.cooldown
        assert all(0 < verify_s <= total_s for verify_s, total_s in idle)
        self.wanted += [0] * len(idle)
        self.cooldown = 0

    def probe(self, name, pending):
        assert self.open
        assert not self.taken
        assert pending > 0
        self.timed = name if self.rng.random() < 0.1 else ""
        return self.timed

    def probed(self, name, seconds):
        assert name == self.timed
        assert seconds is None or seconds > 0

    def catch_up_count(self, _name, pending):
        assert self.open
        assert not self.taken
        assert pending > 0
        return self.rng.choice((0, 0, 0, 1, 3, 99))

    def shadow_evaluated(self, _name, seen, _seconds=0.0):
        assert not self.taken
        assert all(0 <= one.confidence <= 1 and 0 <= one.agreement <= 1 for one in seen)
        self.shadow += len(seen)


class Automaton:
    """Which tokens may follow, by the number of a state: ``edges[state]`` has the next state of each."""

    def __init__(self, edges, vocab):
        self.edges, self.vocab = edges, vocab

    def start(self):
        return 0

    def is_free(self, _):
        return False

    def permits(self, state, token):
        return token in self.edges[state]

    def permitted(self, state, ids):
        return np.array([token in self.edges[state] for token in ids], bool)

    def mask(self, state):
        return self.permitted(state, range(self.vocab))

    def advance(self, state, token):
        return self.edges[state].get(token)


def as_wide_as_needed(count):
    return count


def padded(*more):
    """Widths with so much padding, by the number of tokens."""
    more = more or (0,)
    return lambda count: count + more[count % len(more)]


def always(policy=None, batch_size=as_wide_as_needed):
    """What a case needs of a policy: how to make one, and the batch size that goes with it."""
    return lambda: (policy, batch_size)


def whim(seed, *more):
    return lambda: (Whim(seed), padded(*more))


def adaptive(points, draft=None, **latency):
    def make():
        target = LatencyModel(points, **latency)
        return AdaptivePolicy(
            target, None if draft is None else {"draft": DraftLatency(LatencyModel(draft), target)}
        ), target.batch_size

    return make


@dataclass
class Case:
    """One generation; ``drafter`` makes a drafter of the draft model, ``others`` make more that are asked first."""

    table: object
    prompt: tuple = (0, 1)
    max_tokens: int = 12
    capacity: int = 64
    draft_max: int = 4
    sampling: Sampling = GREEDY
    draft: object = None
    draft_capacity: int = 64
    drafter: Callable = ModelDrafter
    draft_batch_size: Callable = as_wide_as_needed
    others: tuple = ()
    play: Callable = field(default_factory=always)  # gives (policy, batch size)
    constraint: object = None
    rule: object = None
    accept: str = "exact"
    apart: int = 0
    first: object = None  # the first token
    rounds: list = field(default_factory=list)  # behind it

    def is_end(self, token):
        return token == END

    def run(self, generate=generate):
        """Tokens of the answer; after every round the caches must hold the text and nothing else."""
        text, clock = list(self.prompt), Clock()
        self.target = TableModel(self.table, self.capacity, text, clock, 100.0)
        self.drafters, self.model = [make() for make in self.others], None
        if self.draft:
            shared = min(self.draft.vocab, self.table.vocab)
            self.model = TableModel(self.draft, self.draft_capacity, text, clock, drafts=True, shared=shared)
            self.drafters.append(self.drafter(self.model, self.table.vocab, self.draft_batch_size))
            self.model.first = lambda: self.drafters[-1]._first
        self.policy, as_wide_as = self.play()
        asked = []  # (tokens, the batch size for them): a latency changes its mind

        def batch_size(count):
            asked.append((count, as_wide_as(count)))
            return asked[-1][1]

        rows = prefill(self.target, self.prompt, self.drafters, self.policy, apart=self.apart)
        self.first, self.rounds = None, []
        for round_ in generate(
            self.target,
            self.prompt,
            rows,
            self.rule or make_rule(self.accept, self.sampling, self.constraint),
            max_tokens=self.max_tokens,
            is_end=self.is_end,
            drafters=self.drafters,
            policy=self.policy,
            draft_max=self.draft_max,
            batch_size=batch_size,
            clock=clock,
        ):
            text.extend(round_.emitted)
            assert self.target.cache == text[:-1]
            if self.first is None:
                self.first = round_
                assert (round_.drafted, round_.batch_size, asked) == ((), 0, [])
            else:
                self.rounds.append(round_)
                assert asked[-1:] == [(1 + len(round_.drafted), round_.batch_size)]
                assert self.target.batch_sizes[-1] == round_.batch_size
            if self.model:
                known = [token if token < self.model.vocab_size else 0 for token in text[:-1]]
                first = self.drafters[-1]._first
                assert self.model.cache == known[first:][: self.model.length], "the draft's cache is not the text"
                assert self.model.spoilt == bool(self.drafters[-1].failure), "a damaged draft must say so"
        return text[len(self.prompt) :]

    @property
    def all_rounds(self):
        """With the first token's."""
        return [self.first, *self.rounds] if self.first else []

    def alone(self):
        """The answer token by token, without the loop; ``stuck`` is whether the grammar ended it."""
        text, rule, self.stuck = list(self.prompt), make_rule(self.accept, self.sampling, self.constraint), False
        rule.begin(text)
        while len(text) - len(self.prompt) < self.max_tokens and len(text) <= self.capacity:
            token = rule.verify(self.table(text)[None], (), len(text)).token
            self.stuck = token is None
            if self.stuck:
                break
            text.append(token)
            if token == END:
                break
        return text[len(self.prompt) :]

    def check(self, generate=generate):
        """The answer is target-only's, and the rounds add up to it."""
        answer = self.run(generate)
        assert answer == self.alone()
        rounds = self.all_rounds
        assert [token for round_ in rounds for token in round_.emitted] == answer
        for index, round_ in enumerate(rounds):
            assert 0 <= round_.accepted <= len(round_.drafted) == len(round_.drafters) <= self.draft_max
            kept = round_.emitted[: round_.accepted]
            assert kept == round_.drafted[: len(kept)]
            assert END not in round_.emitted[:-1]
            if END in round_.emitted:
                assert len(round_.emitted) <= round_.accepted + 1
            else:
                assert len(round_.emitted) == round_.accepted + (not round_.dead_end)
            if END in round_.emitted or round_.dead_end:
                assert index == len(rounds) - 1
        if rounds and END not in answer:
            assert rounds[-1].dead_end == self.stuck
        if isinstance(self.policy, Whim) and self.constraint is None:
            assert self.policy.wanted == [len(round_.drafted) for round_ in self.rounds if self.drafters]
        return answer


penalised = st.sampled_from(
    [
        {},
        {"repeat_penalty": 1.7},
        {"repeat_penalty": 1.3, "presence_penalty": 0.6, "repeat_last_n": 3},
        {"frequency_penalty": 0.9, "repeat_last_n": -1},
    ]
)
samplings = st.one_of(
    st.builds(lambda penalties: replace(GREEDY, **penalties), penalised),
    st.builds(
        lambda temperature, seed, cut, penalties: Sampling(temperature, **(OFF | cut), seed=seed, **penalties),
        st.sampled_from([0.3, 1.0, 4.0]),
        st.integers(0, 2**64 - 1),
        st.sampled_from([{}, {"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.2}]),
        penalised,
    ),
)
tables = st.builds(Table, st.integers(0, 2**31), st.integers(END + 1, 7), st.sampled_from([-8, 0, 3]))
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
seconds = st.floats(20, 400)
classes = st.sampled_from([None, (2, 3, 4), (4, 8), (1, 5, 16)])
paddings = st.lists(st.integers(0, 3), min_size=1, max_size=4)
policies = st.one_of(
    st.builds(lambda more: always(DraftPolicy(), padded(*more)), paddings),
    st.builds(lambda more: always(None, padded(*more)), paddings),
    st.builds(lambda seed, more: whim(seed, *more), st.integers(0, 2**31), paddings),
    st.builds(
        lambda points, draft, batch_sizes, switch_s, limit: adaptive(
            points, draft, batch_sizes=batch_sizes, switch_s=switch_s, limit=limit
        ),
        st.dictionaries(st.integers(1, 16), seconds, min_size=1),
        st.one_of(st.none(), st.dictionaries(st.integers(1, 16), st.floats(0.1, 60), min_size=1)),
        classes,
        st.sampled_from([0.0, 5.0, 200.0]),
        st.integers(1, 16),
    ),
)
frame = {
    "table": tables,
    "prompt": prompts,
    "max_tokens": st.integers(0, 24),
    "capacity": st.integers(5, 32),
    "draft_max": st.integers(0, 9),
    "sampling": samplings,
    "play": policies,
}
scripts = st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=12)
plans = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8)


@st.composite
def cases(draw, *, damage=False, wrong=True, **more):
    """A case with any drafters, policy, sampling and batch sizes."""
    made = draw(st.fixed_dictionaries(frame | more))
    table, others = made["table"], []
    if draw(st.booleans()):
        corpus = draw(st.lists(st.integers(0, 3), max_size=20))
        others.append(lambda: LookupDrafter(corpus))
    if wrong and draw(st.booleans()):
        lags = draw(st.integers(0, 2))
        plan, script = draw(plans), draw(st.none() | scripts)
        others.append(lambda: Prophet(table, plan, lags=lags) if script is None else Scripted(script, lags=lags))
    if damage or draw(st.booleans()):
        quality, vocab = draw(st.integers(0, 8)), max(END + 1, table.vocab + draw(st.integers(-2, 3)))
        made["draft"] = Draft(table, quality, vocab)
        made["draft_capacity"] = draw(st.integers(5, 32))
        made["draft_batch_size"] = padded(*draw(paddings))
        if damage:
            value = draw(st.sampled_from([np.nan, np.inf]))
            made["draft"] = Damaged(made["draft"], draw(st.integers(0, 8)), value, draw(st.booleans()))
    return Case(**made, others=tuple(others))


@examples(300)
@given(cases())
def test_any_drafters_any_policy_and_any_batch_size_give_the_text_of_target_only(case):
    case.check()


@examples(200)
@given(st.fixed_dictionaries(frame), scripts, st.integers(0, 2))
def test_any_scripted_drafter_gives_the_text_of_target_only(made, script, lags):
    Case(**made, others=(lambda: Scripted(script, lags=lags),)).check()


@examples(200)
@given(st.fixed_dictionaries(frame), plans)
def test_a_drafter_that_knows_the_text_up_to_some_place_gives_the_text_of_target_only(made, plan):
    """Long acceptances, which random scripts hardly reach, on either side of every border."""
    Case(**made, others=(lambda: Prophet(made["table"], plan),)).check()


@examples(100)
@given(st.fixed_dictionaries(frame))
def test_without_a_drafter_every_round_is_one_token(made):
    case = Case(**made)
    answer = case.check()
    assert [(r.drafted, r.accepted, len(r.emitted)) for r in case.rounds] == [((), 0, 1)] * (len(answer) - 1)


@examples(300)
@given(cases(damage=True))
def test_a_draft_that_is_damaged_changes_no_text_and_is_left_alone(case):
    """Its rows have NaN or infinity anywhere: in the prompt, in an offer, in a review. The model refuses more calls."""
    case.check()


edges = st.lists(st.dictionaries(st.integers(0, 6), st.integers(0, 3), max_size=5), min_size=4, max_size=4)


@examples(300)
@given(cases(), edges)
def test_with_any_grammar_the_text_is_that_of_target_only_with_it(case, edges):
    case.constraint = Automaton(edges, case.table.vocab)
    answer, state = case.check(), 0
    for token in answer:
        assert token in edges[state]
        state = edges[state][token]


@examples(200)
@given(cases(), st.sampled_from(["residual", "top-k:2", "typical:0.3"]))
def test_every_other_rule_keeps_the_books_too(case, accept):
    case.accept = accept
    answer = case.run()  # the models look after their caches
    assert len(answer) == min(case.max_tokens, case.capacity + 1 - len(case.prompt)) or END in answer
    assert END not in answer[:-1]
    assert [token for round_ in case.rounds for token in round_.emitted] == answer[1:]
    if isinstance(case.policy, Whim):
        assert case.policy.wanted == [len(round_.drafted) for round_ in case.rounds if case.drafters]


class Counted(ModelDrafter):
    """Counts the tokens that were drawn from it."""

    drawn = 0

    def propose(self, text, rule):
        offer = super().propose(text, rule)

        def draw():
            self.drawn += 1
            return offer.draw()

        return offer and DraftCandidate(offer.confidence, draw)


def drawn_and_verified(accept, may_trim=None):
    """(tokens drawn from the draft, tokens verified) in many answers with the adaptive policy."""
    drawn = verified = 0
    for seed in range(30):
        table = Table(seed, end_bonus=-8)
        # Cheap at some sizes and dear at others: what is drawn for a long chain is best trimmed where it breaks off.
        play = adaptive({1: 100.0, 2: 140.0, 4: 160.0, 8: 180.0 + 10 * (seed % 5)}, {1: 1.0})
        case = Case(table, max_tokens=30, draft_max=7, draft=Draft(table, 6, VOCAB), drafter=Counted, play=play)
        case.rule = make_rule(accept, Sampling(1.0, **OFF, seed=seed))
        if may_trim is not None:
            case.rule.may_trim = may_trim
        case.run()
        drawn += case.drafters[-1].drawn
        verified += sum(len(round_.drafted) for round_ in case.rounds)
    return drawn, verified


def test_what_was_drawn_under_the_residual_rule_is_verified():
    drawn, verified = drawn_and_verified("residual")
    assert drawn == verified > 300


@pytest.mark.parametrize(("accept", "may_trim"), [("exact", None), ("residual", True)])
def test_what_was_drawn_is_trimmed_where_that_is_harmless(accept, may_trim):
    """The other half of the test above: it would find a policy that trims."""
    drawn, verified = drawn_and_verified(accept, may_trim)
    assert drawn > verified > 300


@pytest.mark.parametrize("draft_max", range(7))
@pytest.mark.parametrize("max_tokens", range(9))
def test_max_tokens_is_exact(max_tokens, draft_max):
    table = Line(2, (0, 1, 2))
    case = Case(table, max_tokens=max_tokens, draft_max=draft_max, draft=table)
    assert len(case.check()) == max_tokens
    assert all(outputs == (len(tokens) if index else 1) for index, (tokens, outputs) in enumerate(case.target.decodes))


@pytest.mark.parametrize("draft_max", range(7))
@pytest.mark.parametrize("capacity", range(3, 12))
def test_both_stop_at_the_same_token_when_the_context_is_full(capacity, draft_max):
    table = Line(3, (0, 1, 2, 1))
    fields = {"prompt": (0, 1, 2), "capacity": capacity, "max_tokens": 99}
    with_draft = Case(table, **fields, draft_max=draft_max, draft=table, draft_capacity=99)
    alone = Case(table, **fields)
    assert with_draft.check() == alone.check()
    assert len(alone.run()) == capacity + 1 - 3  # the last token needs no place in the cache


def test_a_draft_model_with_a_smaller_context_falls_silent():
    table = Line(2, (0, 1, 2))
    case = Case(table, max_tokens=10, draft=table, draft_capacity=6)
    case.check()
    assert [len(round_.drafted) for round_ in case.rounds] == [4, 0, 0, 0, 0]


ANSWER = (2, 0, 1, 2, END, 0, 0, 0)


@pytest.mark.parametrize(
    ("script", "accepted", "emitted"),
    [
        pytest.param([(0, 1, 2, END, 0)], 4, ANSWER[1:5], id="inside a draft that goes on behind it"),
        pytest.param([(0, 1, 2, END, 1)], 4, ANSWER[1:5], id="inside a draft, a wrong token behind it"),
        pytest.param([(0, 1, 2, END)], 4, ANSWER[1:5], id="last of a draft"),
        pytest.param([(0, 1, 2)], 3, ANSWER[1:5], id="as the bonus token"),
        pytest.param([(0, 1, 2, 0)], 3, ANSWER[1:5], id="as the correction"),
    ],
)
def test_the_end_of_the_text(script, accepted, emitted):
    case = Case(Line(2, ANSWER), draft_max=9, others=(lambda: Scripted(script),))
    assert case.check() == list(ANSWER[:5])
    assert len(case.rounds) == 1
    assert (case.rounds[0].accepted, case.rounds[0].emitted) == (accepted, emitted)
    assert case.rounds[0].drafted == script[0][:4]  # nothing behind the end is verified
    assert case.drafters[0].kept == [2, 2 + 5 - 1]


def test_a_draft_that_proposes_the_end_wrongly_does_not_end_the_text():
    script = [(0, END, 2), (2, 2, END)]
    case = Case(Line(2, (2, 0, 1, 2)), max_tokens=7, draft_max=9, others=(lambda: Scripted(script),))
    assert case.check() == [2, 0, 1, 2, 2, 2, 2]
    assert [round_.emitted for round_ in case.rounds] == [(0, 1), (2, 2, 2), (2,)]


@examples(50)
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
    assert case.rounds[0].drafted == ANSWER[1:5]


def test_what_a_full_acceptance_and_a_rejection_cost_the_draft_model():
    answer = (1, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0)
    full = Case(Line(2, answer), max_tokens=11, draft=Line(2, answer))
    full.check()
    assert [len(tokens) for tokens, _ in full.model.decodes] == [3, 1, 1, 1, 2, 1, 1, 1]
    guess = (1, 0, 2, 2, 0, 1, 2, 0, 1, 2, 0)  # wrong at the second place of the first draft
    part = Case(Line(2, answer), max_tokens=11, draft=Line(2, guess))
    part.check()
    assert [round_.accepted for round_ in part.rounds] == [1, 4, 2]
    # After the rejection the correction alone is new to it, after the full acceptance two tokens are.
    assert [len(tokens) for tokens, _ in part.model.decodes] == [3, 1, 1, 1, 1, 1, 1, 1, 2, 1]


@pytest.mark.parametrize("difference", [-2, -1, 1, 2])
def test_a_vocabulary_that_differs_at_the_end(difference):
    shared, accepted, strangers = 7 + min(difference, 0), 0, 0
    for seed in range(24):
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
    assert case.model.decodes[0][0][:3] == (0, 0, 0)


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
    rows = prefill(models[0], text, [ModelDrafter(models[1], VOCAB)])
    assert [model.cache for model in models] == [text, []]  # the draft reads when it is asked
    assert rows.shape == (1, VOCAB)
    assert (rows[0] == models[0].table(text)).all()


def test_the_clock_is_split_into_drafting_and_verifying():
    table = Line(2, (0, 1, 2))
    case = Case(table, max_tokens=7, draft_max=3, draft=table)
    case.check()
    times = [(len(r.drafted), r.draft_s, r.verify_s, r.total_s) for r in (case.first, *case.rounds)]
    assert times == [(0, 0, 0, 0), (3, 3, 100, 103), (1, 1, 100, 101)]


# A drafter that gives up.


def test_a_drafter_that_gives_up_leaves_the_rest_of_the_chain_to_others():
    """It is asked again in the next round."""
    line = Line(2, (2, 0, 1, 2))
    case = Case(line, max_tokens=11, draft=line, others=(lambda: Scripted([(0, 1), (2,), ()]),), draft_max=4)
    case.check()
    names = [round_.drafters for round_ in case.rounds]
    assert names == [("script", "script", "draft", "draft"), ("script", "draft", "draft", "draft")]


@pytest.mark.parametrize("lags", [0, 3])
def test_a_drafter_that_has_nothing_when_asked_is_not_asked_again_in_this_round(lags):
    asked = []

    class Silent(Scripted):
        def propose(self, text, rule):
            asked.append(len(text))
            return super().propose(text, rule)

    line = Line(2, (2, 0, 1, 2))
    case = Case(line, max_tokens=5, draft=line, others=(lambda: Silent([(0,)], lags=lags),), draft_max=3)
    if lags:  # what has to be asked is asked in the order of the names
        case.check()
        assert asked == [3, 4]
    else:  # an offer that costs nothing is looked for at every token
        case.check()
        assert asked == [3, 4, 5]
    assert case.rounds[0].drafters == ("script", "draft", "draft")


def test_a_draft_context_that_is_full_is_no_reason_to_stop_for_others():
    line = Line(2, (2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2))
    case = Case(line, (1, 1), max_tokens=13, draft=line, draft_capacity=7, others=(LookupDrafter,))
    case.check()
    names = [name for round_ in case.rounds for name in round_.drafters]
    assert names.index("lookup") > names.index("draft")
    assert "draft" not in names[6:]
    assert "lookup" in names[6:]
    assert not case.drafters[-1].failure


def test_the_time_of_an_offer_that_did_not_come_is_not_told():
    """A draft's latency would learn that it costs nothing, and be kept like that."""
    reported = []

    class Times(DraftPolicy):
        def proposed(self, name, pending, seconds):
            reported.append((name, pending, seconds))

    line = Line(2, (0, 1, 2))
    case = Case(line, max_tokens=9, draft=line, draft_capacity=5, play=always(Times()))
    case.check()
    assert reported == [("draft", 3, 1.0), ("draft", 1, 1.0), ("draft", 1, 1.0)]


# A draft that is damaged.


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("play", [always(), whim(2), adaptive({1: 100.0, 8: 101.0}, {1: 1.0})])
def test_a_damaged_draft_says_why_and_a_lookup_goes_on(play, value):
    line = Line(2, (0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2))
    case = Case(line, max_tokens=15, draft=Damaged(line, 8, value), others=(LookupDrafter,), play=play)
    case.check()
    assert "logits" in case.drafters[-1].failure
    assert {name for round_ in case.rounds for name in round_.drafters} == {"lookup"}
    assert len(case.model.decodes) == 1


def test_a_draft_that_breaks_in_a_chain_drafts_no_more():
    """What it had drafted before is verified all the same."""

    class Breaks:
        vocab = VOCAB

        def __call__(self, context):
            return Line(2, (2, 0, 1, 2))(context) * (np.nan if len(context) == 6 else 1)

    case = Case(Line(2, (2, 0, 1, 2)), max_tokens=10, draft=Breaks())
    case.check()
    assert [round_.drafted for round_ in case.rounds] == [(0, 1, 2), (), (), (), (), ()]
    assert case.drafters[-1].failure


def test_a_new_text_is_a_new_chance():
    text, clock = [0, 1], Clock()
    model = TableModel(Damaged(Table(1), 8), 9, text, clock, drafts=True)
    drafter = ModelDrafter(model, VOCAB)
    rule = make_rule("exact", GREEDY)
    drafter.begin(text)
    assert drafter.propose(text, rule) is None
    assert drafter.failure
    model.table, model.spoilt = Table(1), False
    drafter.begin(text)
    assert not drafter.failure
    assert drafter.propose(text, rule) is not None


# The prompt as a rehearsal.


class Listening(DraftPolicy):
    """Remembers what it is reported of each drafter."""

    def __init__(self):
        self.reported = {}

    def shadow_evaluated(self, name, seen, _seconds=0.0):
        self.reported.setdefault(name, []).extend(seen)


class Reads(Listening):
    """Has drafters read all that they missed, and asks none for a candidate."""

    def choose(self, _offers, _pending):
        return None

    def catch_up_count(self, _name, pending):
        return pending


@examples(100)
@given(tables, st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 8), st.integers(-2, 2))
def test_drafters_are_judged_on_the_prompt_by_what_the_target_would_have_said(table, prompt, quality, more_vocab):
    draft = Draft(table, quality, max(END + 1, table.vocab + more_vocab))
    shared = min(draft.vocab, table.vocab)
    case = Case(table, tuple(prompt), 2, draft=draft, others=(LookupDrafter,), play=always(Reads()))
    answer = case.check()
    expected = {"draft": [], "lookup": []}
    lookup, rule = LookupDrafter(), make_rule("exact", GREEDY)
    for place in range(max(1, len(prompt) - ROWS + 1), len(prompt) + 1):
        choice = table(prompt[:place]).argmax() if place < len(prompt) else answer[0]
        row = draft(prompt[:place])[:shared]
        expected["draft"].append(ShadowEvaluation(confidence(row), float(row.argmax() == choice)))
        lookup.begin(prompt[:place])
        if (offer := lookup.propose(prompt[:place], rule)) and place < len(prompt):
            expected["lookup"].append(ShadowEvaluation(offer.confidence, float(offer.draw().token == choice)))
    assert case.policy.reported["lookup"][: len(expected["lookup"])] == expected["lookup"]
    goes_on = bool(case.rounds)  # the draft reads behind the first token
    assert case.policy.reported["draft"] == expected["draft"] * goes_on
    assert case.target.decodes[0][1] == min(ROWS, len(prompt))


def test_without_a_policy_nobody_is_judged():
    table = Table(1)
    case = Case(table, (0, 1, 2), 0, draft=table, others=(Scripted,))
    case.check()
    assert [outputs for _, outputs in case.target.decodes] == [1]


@pytest.mark.parametrize(("batch", "rows"), [(19, 2), (20, 1), (21, ROWS), (7, 7)])
def test_the_rows_of_a_prompt_are_of_its_last_batch(batch, rows):
    """So that its batches are the same with a policy and without."""
    prompt = (0, 1, 2) * 7
    target = TableModel(Table(1), 64, list(prompt), Clock())
    target.batch = batch
    prefill(target, prompt, policy=DraftPolicy())
    parts = [prompt[first : first + batch] for first in range(0, len(prompt), batch)]
    assert target.decodes == [*((part, 0) for part in parts[:-1]), (parts[-1], rows)]


@examples(100)
@given(cases(), st.sampled_from([4, 8]))
def test_the_last_token_of_a_prompt_may_have_a_batch_of_its_own(case, batch_size):
    """As in strict mode."""
    case.apart = batch_size
    case.check()
    own = int(len(case.prompt) > 1)
    assert case.target.decodes[own] == (case.prompt[-1:], 1)
    assert case.target.batch_sizes[own] == batch_size


def test_the_clock_of_a_review_is_the_drafts():
    class Reviews(Listening):
        def choose(self, _offers, _pending):
            return None

        def catch_up_count(self, _name, pending):
            return 99 * (pending > 2)

    table = Line(2, (0, 1, 2))
    case = Case(table, max_tokens=7, draft_max=3, draft=table, play=always(Reviews()))
    case.check()
    times = [(r.draft_s, r.verify_s, r.total_s) for r in case.rounds]
    assert times == [(1, 100, 101), (0, 100, 100)] * 3
    assert case.policy.reported["draft"] == [ShadowEvaluation(confidence(table((0, 1))), 1.0)] * 6


# The end of what a grammar permits.


def test_what_a_round_has_before_a_dead_end_is_emitted():
    only = Automaton([{2: 1}, {0: 2}, {1: 3}, {2: 4}, {}], VOCAB)
    line = Line(2, (2, 0, 1, 2, 1, 1))
    case = Case(line, max_tokens=9, draft_max=5, others=(lambda: Scripted([(0, 1, 2, 1, 1)]),), constraint=only)
    assert case.check() == [2, 0, 1, 2]
    assert [(r.drafted, r.accepted, r.emitted, r.dead_end) for r in case.rounds] == [((0, 1, 2), 3, (0, 1, 2), True)]


def test_a_dead_end_at_once_ends_a_text_without_a_token():
    case = Case(Line(2, (0,)), draft=Line(2, (0,)), constraint=Automaton([{}], VOCAB))
    assert case.check() == []
    assert (case.first.emitted, case.first.dead_end, case.rounds) == ((), True, [])


def test_a_dead_end_behind_the_targets_own_token_is_met_in_the_next_round():
    case = Case(Line(2, (1,)), constraint=Automaton([{0: 1}, {}], VOCAB))
    assert case.check() == [0]
    assert [(r.emitted, r.dead_end) for r in (case.first, *case.rounds)] == [((0,), False), ((), True)]


def test_a_token_that_the_grammar_does_not_permit_is_not_verified():
    loops = Automaton([{0: 1}, {1: 0}], VOCAB)
    line = Line(2, (0, 1, 0, 1, 0))
    case = Case(line, max_tokens=5, others=(lambda: Scripted([(1, 0, 2, 1)]),), constraint=loops)
    assert case.check() == [0, 1, 0, 1, 0]
    assert case.rounds[0].drafted == (1, 0)


# What the checks above are worth: each bug, put in from outside, must be found.


class NeverRewound(ModelDrafter):
    """The draft's cache keeps what was rejected."""

    def commit(self, length):
        pass


class LastForgotten(ModelDrafter):
    """Believes that its cache holds the last drafted token after a full acceptance."""

    def to_propose(self, text):
        if self.model.length == len(text) - 2:
            return super().to_propose([*text[:-2], text[-1]])
        return super().to_propose(text)


class RewoundTooLittle(ModelDrafter):
    """Keeps the first wrong token."""

    def commit(self, length):
        super().commit(length + 1)


class Unfazed(ModelDrafter):
    """Asks a damaged model again."""

    failure = property(lambda self: "", lambda self, why: None)


class Narrow(ModelDrafter):
    """Pads a batch to less than it has."""

    def _batch_size(self, count):
        return max(1, count - 1)


class ReviewsTooMuch(ModelDrafter):
    """Reads the newest token too, which an offer has to read."""

    def to_catch_up(self, text, most):
        return super().to_catch_up([*text, 0], most)


class Watched(CoupledRule):
    """Remembers its last verdict, until the next draft."""

    def draft_token(self, logits, position):
        self.verdict = None
        return super().draft_token(logits, position)

    def verify(self, rows, proposals, position):
        self.verdict, self.seen = super().verify(rows, proposals, position), 0
        return self.verdict


def bonus_not_asked(target, prompt, rows, rule, *, is_end, **rest):
    """The end is looked for among the drafted tokens only."""

    def among_drafted(token):
        if rule.verdict is None:
            return is_end(token)
        rule.seen += 1
        return rule.seen <= rule.verdict.accepted and is_end(token)

    return generate(target, prompt, rows, rule, is_end=among_drafted, **rest)


def bonus_dropped(target, prompt, rows, rule, **rest):
    """A bonus token that ends the text is not emitted."""
    for round_ in generate(target, prompt, rows, rule, **rest):
        ended = round_.emitted[-1] == END and len(round_.emitted) == len(round_.drafted) + 1
        emitted = round_.emitted[:-1] if ended else round_.emitted
        yield replace(round_, emitted=emitted)


def emits_one_more(target, prompt, rows, rule, *, max_tokens, **rest):
    return generate(target, prompt, rows, rule, max_tokens=max_tokens + 1, **rest)


def end_goes_on(target, prompt, rows, rule, *, is_end, **rest):
    """A drafted end is one of the tokens like any other."""
    return generate(target, prompt, rows, rule, is_end=lambda token: False, **rest)


def target_not_rewound(target, prompt, rows, rule, **rest):
    """What was rejected stays in the target's cache."""
    target.rewind = lambda length: None
    return generate(target, prompt, rows, rule, **rest)


def rejected_emitted(target, prompt, rows, rule, **rest):
    """One token more than was accepted."""
    for round_ in generate(target, prompt, rows, rule, **rest):
        more = (*round_.drafted[: round_.accepted + 1], round_.emitted[-1])
        yield replace(round_, emitted=more)


def width_ignored(target, prompt, rows, rule, *, batch_size, **rest):
    return generate(target, prompt, rows, rule, batch_size=as_wide_as_needed, **rest)


def too_narrow(target, prompt, rows, rule, *, batch_size, **rest):
    return generate(target, prompt, rows, rule, batch_size=lambda count: max(1, count - 1), **rest)


def check_many(drafter=ModelDrafter, generate=generate, *, damaged=0):
    for seed in range(40):
        table, sampling = (
            Table(seed, end_bonus=-4 * (seed % 3)),
            Sampling(1.0, **OFF, seed=seed) if seed % 2 else GREEDY,
        )
        draft = Damaged(Draft(table, 6, VOCAB), damaged)
        made = {"draft": draft, "sampling": sampling, "rule": Watched(sampling), "play": PLAYS[seed % len(PLAYS)]}
        Case(table, max_tokens=16, drafter=drafter, draft_batch_size=padded(1, 0), **made).check(generate)


PLAYS = (
    always(batch_size=padded(0, 1)),
    whim(1, 1, 2),
    adaptive({1: 100.0, 8: 120.0}, {1: 1.0}),
    always(DraftPolicy(), padded(2)),
)


@pytest.mark.parametrize("damaged", [0, 1])
def test_the_check_passes_without_a_bug(damaged):
    check_many(damaged=damaged)


@pytest.mark.parametrize("drafter", [NeverRewound, LastForgotten, RewoundTooLittle, ReviewsTooMuch])
def test_a_drafter_with_a_bug_is_found(drafter):
    with pytest.raises(
        (BrokenError, ValueError, AssertionError, IndexError),
        match=r"cache disagrees with the text|cache is not the text|empty|> 0|outputs of 0 tokens|out of range",
    ):
        check_many(drafter=drafter)


def test_a_batch_narrower_than_its_tokens_is_found():
    with pytest.raises(BrokenError, match="tokens in a batch of"):
        check_many(drafter=Narrow)


def test_a_damaged_draft_that_is_asked_again_is_found():
    with pytest.raises((BrokenError, AssertionError), match=r"it is damaged|must say so"):
        check_many(drafter=Unfazed, damaged=1)


@pytest.mark.parametrize(
    "generate",
    [
        bonus_not_asked,
        bonus_dropped,
        emits_one_more,
        end_goes_on,
        target_not_rewound,
        rejected_emitted,
        width_ignored,
        too_narrow,
    ],
)
def test_a_loop_with_a_bug_is_found(generate):
    with pytest.raises((AssertionError, BrokenError)):
        check_many(generate=generate)


def test_a_rule_with_a_bug_is_found(monkeypatch):
    """Accepts every drafted token."""

    def gullible(self, rows, proposals, position):
        verdict = CoupledRule.verify(self, rows[len(proposals) :], (), position + len(proposals))
        return type(verdict)(len(proposals), verdict.token)

    monkeypatch.setattr(Watched, "verify", gullible)
    with pytest.raises(AssertionError):
        check_many()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.decode((1,), 2), "2 outputs of 1 tokens"),
        (lambda model: model.decode((), 0), "0 outputs of 0 tokens"),
        (lambda model: model.decode((1, 0, 0, 0), 4), "beyond the capacity"),
        (lambda model: model.decode((1, VOCAB), 1), "not in the vocabulary"),
        (lambda model: model.decode((2,), 1), "disagrees with the text"),
        (lambda model: model.decode((1, 0, 0), 3, 2), "3 tokens in a batch of 2"),
        (lambda model: model.decode((1, 0), 1), "row of each token"),
        (lambda model: [model.text.append(0), model.rewind(0), model.decode((0,), 1)], "reads the prompt"),
        (lambda model: model.rewind(2), "rewind to 2 of 1"),
    ],
)
def test_the_table_model_minds_its_books(call, message):
    model = TableModel(Table(1), 4, [0, 1], Clock())
    model.decode((0,), 0)
    with pytest.raises(BrokenError, match=message):
        call(model)
