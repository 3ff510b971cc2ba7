"""The trace: it changes nothing, and what it tells gives the decisions that were made."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from test_loop import GREEDY, OFF, Automaton, Case, Draft, Scripted, Table, cases

from ggufspec import DecoderOptions, Sampling, SpeculativeDecoder
from ggufspec.decoding import loop
from ggufspec.decoding.rules.base import likeliest_ids
from ggufspec.decoding.trace import Trace, spelled
from ggufspec.reports import trace as report
from ggufspec.schema.base import to_line
from ggufspec.schema.rounds import AddedToken, JudgedToken, LikelyToken, NoisyScore, OwnChoice, SeenToken, TracedRound
from ggufspec.schema.trace import WrittenToken
from ggufspec.settings.registry import parse_drafters
from tests.support import driving, traced_lines
from tests.support.properties import examples

RULES = ("exact", "residual", "top-k:2", "typical:0.3")
WARM = Sampling(temperature=0.8, seed=7)
BARE = Sampling(temperature=1.3, **OFF, seed=11)
PENALISED = Sampling(temperature=0.8, seed=5, repeat_penalty=1.4, frequency_penalty=0.3, repeat_last_n=16)
JSON_GRAMMAR = 'root ::= "[" [0-9]+ ("," " "? [0-9]+)* "]"'


def listening(trace):
    """The loop with a trace, as the decoder runs it."""

    def generate(target, prompt, rows, rule, **more):
        trace.begin(rule)
        for round_ in driving.decode_rounds(target, loop.rounds(prompt, rows, rule, capacity=target.capacity, **more)):
            trace.add(round_)
            yield round_

    return generate


def lines(trace):
    """What is printed of it, read again."""
    return [json.loads(to_line(round_)) for round_ in trace.rounds]


def run_traced(case):
    """The case with a trace; it must be the same as without one."""
    answer, rounds = case.run(), case.all_rounds
    trace = Trace(str)
    assert case.run(listening(trace)) == answer
    assert case.all_rounds == rounds
    return trace


# ---- it changes nothing, and its numbers give its decisions


@examples(300)
@given(cases(accept=st.sampled_from(RULES)))
def test_the_numbers_of_every_rule_give_its_decisions(case):
    trace = run_traced(case)
    for line, round_ in zip(lines(trace), case.all_rounds, strict=True):
        traced_lines.check(line)
        assert [place["token"] for place in line["drafted"]] == list(round_.drafted)
        assert [place["drafter"] for place in line["drafted"]] == list(round_.drafters)
        assert tuple(line["emitted"]) == round_.emitted
        if not case.sampling.truncates or case.sampling.temperature == 0:
            traced_lines.check_whole(line)


@examples(300)
@given(
    cases(accept=st.sampled_from(RULES)),
    st.lists(st.dictionaries(st.integers(0, 6), st.integers(0, 3), min_size=0, max_size=5), min_size=4, max_size=4),
)
def test_with_any_grammar_too(case, edges):
    case.constraint = Automaton(edges, case.table.vocab)
    state = 0

    def reported(row):
        return {one["token"] for one in row["likeliest"]}

    def permitted(row):
        return {one["token"] for one in row["likeliest"] if one["permitted"]}

    for line in lines(run_traced(case)):
        traced_lines.check(line)
        assert line["grammar"]
        for place in line["drafted"]:
            if place["judged"] is None:
                break
            assert permitted(place["judged"]["target"]) == set(edges[state]) & reported(place["judged"]["target"])
            if place["draft"]:
                assert permitted(place["draft"]) == set(edges[state]) & reported(place["draft"])
            if place["result"] == "accepted":
                state = edges[state][place["token"]]
        if line["added"] is not None:
            assert permitted(line["added"]["target"]) == set(edges[state]) & reported(line["added"]["target"])
            state = edges[state][line["added"]["token"]]


@pytest.mark.parametrize(("accept", "sampling"), list(product(RULES, (GREEDY, WARM, BARE))))
def test_every_kind_of_verdict_comes_about(accept, sampling):
    """The cases above are not all trivial: with a mediocre draft every rule keeps, refuses and adds a bonus."""
    verdicts, sources = set(), set()
    for seed in range(12):
        table = Table(seed, 6, -8)
        case = Case(
            table, max_tokens=40, draft=Draft(table, 5, 6), accept=accept, sampling=replace(sampling, seed=seed)
        )
        for round_ in run_traced(case).rounds:
            verdicts |= {place.result for place in round_.drafted}
            sources.add(round_.added.source)
    assert verdicts == {"accepted", "rejected", "unread"}
    assert sources == {"target", "bonus"}


def test_the_check_finds_a_wrong_number():
    """Every number that decides is looked at: a line in which one is another no longer gives its verdict."""
    table = Table(3, 6, -8)
    found = 0
    for accept, sampling in product(RULES, (GREEDY, BARE)):
        case = Case(table, max_tokens=40, draft=Draft(table, 5, 6), accept=accept, sampling=sampling)
        for line in lines(run_traced(case)):
            judged = [place for place in line["drafted"] if place["result"] == "rejected"]
            if not judged:
                continue
            place = judged[0]["judged"]
            if accept == "residual":
                place["uniform"] = 0.0
                place["p"] = 0.5
            elif accept.startswith("top-k"):
                place["rank"]["rank"] = 1
            elif accept.startswith("typical"):
                place["typical"]["probability"] = 1.0
            else:
                place["sum"] = place["own"]["sum"]
                judged[0]["token"] = -1
            with pytest.raises(AssertionError):
                traced_lines.check(line)
            found += 1
    assert found > 30


def test_a_trace_is_of_the_last_answer_and_tells_each_round_at_once():
    table, reported = Table(5, 5, -8), []
    trace = Trace(on_round=reported.append)
    case = Case(table, max_tokens=9, draft=Draft(table, 6, 5))
    case.run(listening(trace))
    first = trace.rounds
    assert reported == first
    assert [round_.number for round_ in first] == list(range(len(first)))  # the first token's is 0
    assert all(place.text == "" for round_ in first for place in round_.drafted)
    case.run(listening(trace))
    assert trace.rounds is not first
    assert [r.emitted for r in trace.rounds] == [r.emitted for r in first]


def test_rows_are_copied_while_they_are_valid():
    """The table models spoil the rows of one call in the next: what is reported must be of before."""
    table = Table(5, 5, -8)
    case = Case(table, max_tokens=12, draft=Draft(table, 6, 5), sampling=BARE)
    text, seen = list(case.prompt), 0
    for round_ in run_traced(case).rounds:
        for number, place in enumerate(round_.drafted):
            context = [*text, *(one.token for one in round_.drafted[:number])]
            assert place.draft.logit == case.draft(context)[place.token]
            if place.judged:
                assert place.judged.target.logit == table(context)[place.token]
                seen += 1
        text += round_.emitted
    assert seen > 8


def test_a_token_behind_the_end_is_shown_as_dropped():
    class Ends(Table):
        def __call__(self, context):
            return np.array([9 * (len(context) == 2), 0, 0, 5], np.float32)

    case = Case(Ends(5, 4, 0), (0, 1), draft_max=1, others=(lambda: Scripted([(3,)]),))
    _, round_ = run_traced(case).rounds
    assert (round_.emitted, round_.accepted, round_.added.emitted) == ((3,), 1, False)
    assert report.rows(round_)[-1].result == "dropped"


def test_the_likeliest_tokens():
    row = np.array([1, 3, 3, -np.inf, 2, 3], np.float32)
    assert likeliest_ids(row, 3).tolist() == [1, 2, 5]
    assert likeliest_ids(row, 4).tolist() == [1, 2, 5, 4]
    assert likeliest_ids(row).tolist() == [1, 2, 5, 4, 0]
    assert likeliest_ids(np.zeros(50, np.float32)).tolist() == list(range(10))


def test_the_legend_says_where_penalties_come():
    (_, first, *_) = run_traced(Case(Table(5, 4, 0), draft_max=1)).rounds
    assert report.explained(first).endswith("before sampling")
    assert report.explained(replace(first, penalised=True)).endswith("before sampling and after penalties")
    drawn = replace(first, penalised=True, temperature=0.8)
    assert report.explained(drawn).endswith("percentages are before sampling and after penalties")


def test_spelling():
    assert spelled(b" def\n") == " def\n"
    assert spelled("é".encode()[:1]) == "\\xc3"


# ---- the pair that ships


@pytest.fixture(scope="module")
def decoder(target, draft):
    options = DecoderOptions(ctx_size=256, threads=1, draft_policy="fixed", draft_max=4)
    with SpeculativeDecoder(target, draft, options) as decoder:
        yield decoder


@pytest.mark.parametrize("drafter", ["both", "draft", "lookup"])
@pytest.mark.parametrize("accept", RULES)
def test_the_demo_pair_says_the_same_with_a_trace(decoder, accept, drafter):
    decoder.configure(accept=accept, drafters=parse_drafters(drafter))
    for sampling, grammar in product((GREEDY, WARM, BARE, PENALISED), ("", JSON_GRAMMAR)):
        how = {"max_tokens": 16, "sampling": sampling, "grammar": grammar}
        prompt = "numbers = [1, 2, 3, 1, 2, 3]\nvalues = "
        plain = list(decoder.generate(prompt, **how))
        trace = Trace(lambda token: spelled(decoder.target.piece(token)))
        assert list(decoder.generate(prompt, trace=trace, **how)) == plain
        written = [token for round_ in trace.rounds for token in round_.emitted]
        assert written == [one.token for one in plain if one.token >= 0]
        for line in lines(trace):
            traced_lines.check(line)
            assert line["grammar"] == bool(grammar)
            assert line["penalised"] == (sampling is PENALISED)
            for place in line["drafted"]:
                assert place["draft"] is None or len(place["draft"]["likeliest"]) == 10


def test_one_model_alone_is_traced_too(decoder):
    decoder.configure(accept="exact", drafters=("draft", "lookup"))
    for alone in ("target", "draft"):
        trace = Trace()
        tokens = [one.token for one in decoder.generate("def f(", max_tokens=6, alone=alone, trace=trace)]
        assert [round_.emitted for round_ in trace.rounds] == [(token,) for token in tokens]
        assert all(round_.added.source == "target" for round_ in trace.rounds)


# ---- as people see it

SIGNED = re.compile(r"^(?:rank )?(\S+) ([<≥>≤]) (\S+)$")
SHARE = re.compile(r"\d%(?:,| |$)", re.MULTILINE)
HOLDS = {"<": lambda a, b: a < b, "≥": lambda a, b: a >= b, ">": lambda a, b: a > b, "≤": lambda a, b: a <= b}
KEEPS = {"residual": "<", "top-k": "≤", "typical": ">"}


@examples(200)
@given(cases(accept=st.sampled_from(RULES)))
def test_what_is_shown_never_says_another_thing_than_the_verdict(case):
    for round_ in run_traced(case).rounds:
        for row in report.rows(round_):
            if found := SIGNED.match(row.rule):
                assert HOLDS[found[2]](float(found[1]), float(found[3])), row
                kept = row.kind == "accepted"
                assert kept == (found[2] == KEEPS.get(case.accept.partition(":")[0])), row


def judged(uniform=None, ratio=1.0, own=None, sum_=None):
    return JudgedToken(SeenToken(0.0, 0.5, ()), ratio, ratio, False, sum=sum_, own=own, uniform=uniform)


@pytest.mark.parametrize(
    ("one", "shown"),
    [
        (judged(uniform=0.25, ratio=0.75), "0.250 < 0.750"),
        (judged(uniform=0.75, ratio=0.25), "0.750 ≥ 0.250"),
        (judged(uniform=0.5, ratio=0.5), "0.500 ≥ 0.500"),
        (judged(uniform=0.123456, ratio=0.123457), "0.123456 < 0.123457"),
        (judged(uniform=0.9999, ratio=3.0), "0.9999 < 1.0000"),
        (judged(), "nothing permitted"),
        (judged(own=OwnChoice(9, "x", 1.0, NoisyScore(0.0, 2.0))), "cut by sampling"),
        (judged(own=OwnChoice(9, "x", 1.0, NoisyScore(0.0, 2.0)), sum_=NoisyScore(0.0, 2.0)), "equal: lower id"),
        (judged(own=OwnChoice(9, "x", 1.0, NoisyScore(0.0, 2.0)), sum_=NoisyScore(0.0, 1.9999)), "1.9999 < 2.0000"),
        (judged(own=OwnChoice(7, "x", 1.0, NoisyScore(0.0, 2.0))), "2.00, own choice"),
    ],
)
def test_what_was_compared(one, shown):
    assert report.compared(7, one, greedy=False) == shown


def test_what_was_compared_when_greedy():
    own = OwnChoice(9, "x", 1.0, NoisyScore(0.0, 0.0))
    for gap, shown in ((3.25, "3.25"), (0.000123, "0.00012")):
        compared = report.compared(7, judged(own=own, sum_=NoisyScore(-gap, 0.0)), greedy=True)
        assert compared == f"{shown} logits below the target's choice"
    assert report.compared(9, judged(own=own, sum_=NoisyScore(0.0, 0.0)), greedy=True) == "own choice"


@given(st.text())
def test_a_token_is_shown_without_what_a_terminal_obeys(text):
    shown = report.quoted(text)
    assert shown.isprintable()
    assert shown[0] == shown[-1]
    assert shown[0] in "\"'"
    assert shown[1:-1] == text or not text.isprintable()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0.0, "0"),
        (1.0, "1"),
        (0.0004, "4e-04"),
        (1e-300, "1e-300"),
        (12.5, "12.500"),
        (123.4, "123"),
    ],
)
def test_a_probability_in_six_columns(value, shown):
    assert report.probability(value) == shown
    assert len(shown) <= 6


@pytest.mark.parametrize("width", [80, 100, 120])
def test_lines_keep_to_the_terminal(decoder, width):
    decoder.configure(accept="exact", drafters=("draft", "lookup"))
    for sampling in (GREEDY, WARM):
        trace = Trace(lambda token: spelled(decoder.target.piece(token)) or "<special>")
        for _ in decoder.generate("import os\n\n\ndef walk(", max_tokens=24, sampling=sampling, trace=trace):
            pass
        for round_ in trace.rounds:
            texts = [line.plain for line in report.terminal(round_, width, 10)]
            assert max(map(cell_len, texts)) <= width
            assert texts[0] == report.heading(round_)
            numbered = [text for text in texts if re.match(r" [0-9+] ", text)]
            assert len(numbered) == len(round_.drafted) + 1
            listed = len(SHARE.findall("\n".join(texts)))
            wanted = sum(10 * (place.draft is not None) + 10 * (place.result == "rejected") for place in round_.drafted)
            assert listed == wanted + 10 * (round_.added.source == "bonus" or not round_.drafted)
            assert not any(SHARE.search(line.plain) for line in report.terminal(round_, width, 0))


def test_headings():
    own = AddedToken(7, 1, "x", "target", "p", 1.0, 1.0, False, SeenToken(0.0, 0.5, ()))
    round_ = TracedRound(3, "exact", "", True, 0.0, 0, False, (), own, 0, (1,), 1, 0.0, 0.048, 0.05)
    assert report.heading(round_) == "round 3: nothing drafted, verify 48 ms"
    wide = replace(round_, width=4, verify_s=0.0012)
    assert report.heading(wide) == "round 3: nothing drafted, verify 1.2 ms, batch of 4"
    stuck = replace(round_, added=None, emitted=())
    assert report.heading(stuck).endswith(", verify 48 ms, then the grammar permits nothing")
    assert report.rows(stuck) == []


def test_a_token_that_the_grammar_forbids_is_marked():
    assert '✗"a" 50%' in " ".join(report._listed("draft", (LikelyToken(1, "a", 0.5, False),), 80))


def test_the_answer_is_coloured_by_who_wrote_it():
    tokens = [
        WrittenToken(1, "a", "draft", 1),
        WrittenToken(2, "\x1b[31m", "target", 1),
        WrittenToken(3, "c", "bonus", 2),
    ]
    text, legend = report.answer(tokens, {"draft": "green", "bonus": "bold"})
    assert text.plain == "a␛[31mc"
    assert [span.style for span in text.spans] == ["green", "bold"]
    assert legend.plain == "written by: draft 1, bonus 1, target 1"
    assert (
        report.trace_summary(tokens, 2)
        == "3 tokens in 2 rounds: 1 by the draft model, 1 by the target as a bonus, 1 by the target"
    )
