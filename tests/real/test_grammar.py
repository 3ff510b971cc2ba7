"""Grammars on llama.cpp's own sampler, with the pair that ships; and grammars that must not reach it."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from ggufspec.decoding.rules import make_rule
from ggufspec.decoding.rules.base import DraftToken
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import ChildError, UsageError
from ggufspec.llamacpp.grammar import check_grammar, check_schema, compile_grammar, schema_to_grammar
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions

FUNCTION = 'root ::= "def " [a-z]+ "(" [a-z]? ")" ":" "\\n"'
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["a\\b", 'say "x"', "é\n"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "done": {"type": "boolean"},
    },
    "required": ["name", "kind", "sizes", "done"],
}
SAMPLINGS = [Sampling(), Sampling(0.8, seed=3), Sampling(0.8, top_k=0, top_p=1.0, min_p=0.0, seed=4)]
WIDTH = 8  # of every batch, so that rows are the same to the bit with and without drafted tokens


@pytest.fixture(scope="module")
def model(pair):
    with Model(pair[0]) as model:
        yield model


@pytest.fixture(scope="module")
def context(model):
    context = Context(model, ContextOptions(512, WIDTH, threads=1))
    yield context
    context.close()


def answer(context, constraint, sampling, name="exact", chain=None, prompt="# a test\n", limit=120):
    """(tokens of an answer, tokens that were kept of drafts); ``chain(rule, text)`` proposes."""
    text = context.model.tokenize(prompt)
    start, kept = len(text), 0
    context.rewind(0)
    context.decode(text[:-1], outputs=0)
    rule = make_rule(name, sampling, constraint)
    rule.begin(text)
    while len(text) < start + limit:
        proposals = chain(rule, text) if chain else []
        drafted = [proposal.token for proposal in proposals]
        rows = context.decode([text[-1], *drafted], outputs=len(drafted) + 1, batch_size=WIDTH)
        verdict = rule.verify(rows, proposals, len(text))
        kept += verdict.accepted
        for token in verdict.emitted(drafted):
            text.append(token)
            if context.model.is_end(token):
                return text[start:], kept
        context.rewind(len(text) - 1)
        if verdict.token is None:
            break
    return text[start:], kept


def written(model, tokens):
    return b"".join(model.piece(token) for token in tokens).decode()


def grammars():
    return {"function": FUNCTION, "schema": schema_to_grammar(json.dumps(SCHEMA))}


def conforms(which, text):
    if which == "function":
        return re.fullmatch(r"def [a-z]+\([a-z]?\):\n", text) is not None
    found = json.loads(text)
    return (
        list(found) == SCHEMA["required"]
        and isinstance(found["name"], str)
        and len(found["name"]) <= 12
        and found["kind"] in SCHEMA["properties"]["kind"]["enum"]
        and all(type(size) is int for size in found["sizes"])
        and len(found["sizes"]) <= 3
        and type(found["done"]) is bool
    )


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm", "bare"])
@pytest.mark.parametrize("which", ["function", "schema"])
def test_an_answer_conforms_whatever_was_drafted(model, context, which, sampling):
    constraint = compile_grammar(model, grammars()[which])
    alone, _ = answer(context, constraint, sampling)
    assert conforms(which, written(model, alone[:-1]))
    assert model.is_end(alone[-1])
    chance = np.random.default_rng(0)
    begin = len(model.tokenize("# a test\n"))

    def half_right(_rule, text):
        """The answer itself, wrong in places, and longer than it."""
        right = [*alone[len(text) - begin :], 5, 5][: WIDTH - 1]
        return [
            DraftToken(token if chance.random() < 0.8 else int(chance.integers(model.vocab_size))) for token in right
        ]

    assert answer(context, constraint, sampling, chain=half_right)[0] == alone
    again, kept = answer(
        context,
        constraint,
        sampling,
        chain=lambda _, text: [DraftToken(x) for x in alone[len(text) - begin :][: WIDTH - 1]],
    )
    assert again == alone
    assert kept >= len(alone) * 3 // 4  # drafts were really kept


@pytest.mark.parametrize("name", ["exact", "residual", "top-k:3", "typical:0.3"])
def test_a_draft_model_follows_the_grammar(model, context, pair, name):
    constraint = compile_grammar(model, grammars()["schema"])
    with Model(pair[1]) as draft:
        reader = Context(draft, ContextOptions(512, 2, threads=1))

        def chain(rule, text):
            proposals, known = [], list(text)
            reader.rewind(min(reader.length, len(text) - 1))
            for _ in range(4):
                rule.follow(known)
                logits = reader.decode(known[reader.length :], outputs=1)[0]
                proposals.append(rule.draft_token(logits, len(known)))
                assert rule.permits(proposals[-1].token, len(known))
                known.append(proposals[-1].token)
                if draft.is_end(known[-1]):
                    break
            return proposals

        for sampling in SAMPLINGS[:2]:
            reader.rewind(0)
            tokens, kept = answer(context, constraint, sampling, name, chain)
            assert conforms("schema", written(model, tokens[:-1]))
            assert kept > 0
            if name == "exact":
                assert tokens == answer(context, constraint, sampling)[0]
        reader.close()


def test_a_token_is_checked_alone_in_a_list_and_in_a_mask(model):
    constraint = compile_grammar(model, grammars()["schema"])
    state, seen = constraint.start(), set()
    for token in model.tokenize('{"name": "x y",'):
        mask = constraint.mask(state)
        ids = np.random.default_rng(token).integers(0, model.vocab_size, 50)
        other = constraint.advance(constraint.start(), int(np.flatnonzero(constraint.mask(constraint.start()))[0]))
        assert other is not None
        assert constraint.permitted(state, ids).tolist() == mask[ids].tolist()
        state.mask = None
        assert constraint.permitted(state, ids).tolist() == mask[ids].tolist()
        for one in (token, *ids.tolist()):
            assert constraint.permits(state, one) is bool(mask[one])
            assert (constraint.advance(state, one) is None) is not bool(mask[one])
        seen.add(int(mask.sum()))
        state = constraint.advance(state, token)
        assert state is not None
    assert len(seen) > 3
    assert not constraint.permits(state, model.vocab_size)
    assert not constraint.permits(state, -1)


def test_an_answer_may_end_where_the_grammar_may_and_nothing_follows(model):
    (end,) = [token for token in range(model.vocab_size) if model.is_end(token)]
    constraint = compile_grammar(model, 'root ::= "a"+')
    (a,) = model.tokenize("a")
    first = constraint.start()
    assert not constraint.permits(first, end)
    second = constraint.advance(first, a)
    assert constraint.permits(second, end)
    assert constraint.permits(second, a)
    over = constraint.advance(second, end)
    assert not constraint.mask(over).any()
    assert not constraint.permits(over, end)
    assert constraint.advance(over, a) is None
    assert constraint.advance(first, end) is None


@pytest.mark.parametrize("name", ["exact", "residual", "top-k:3", "typical:0.3"])
def test_a_dead_end_keeps_what_came_before(model, context, name):
    constraint = compile_grammar(model, 'root ::= "return" [z-a]')  # the set is empty
    tokens, _ = answer(context, constraint, Sampling(), name)
    assert written(model, tokens) == "return"
    right = [*model.tokenize("return"), 5, 5]
    again, kept = answer(context, constraint, Sampling(), name, lambda *_: [DraftToken(x) for x in right])
    assert again == tokens or name != "exact"
    assert written(model, again) == "return"
    assert kept or again != right[:-2]


def test_half_a_character_waits_for_the_rest(model):
    """Characters outside the vocabulary are bytes."""
    pieces = {model.piece(token): token for token in range(model.vocab_size)}
    first, second = "é".encode()[:1], "é".encode()[1:]
    constraint = compile_grammar(model, 'root ::= [é] "x"')
    state = constraint.advance(constraint.start(), pieces[first])
    assert [model.piece(int(token)) for token in np.flatnonzero(constraint.mask(state))][:1] == [second]


BAD = {
    "": "no rule named root",
    "   # nothing": "no rule named root",
    'rot ::= "a"': "no rule named root",
    '# root ::= "a"': "no rule named root",
    "root ::= x": "Undefined rule identifier 'x'",
    'root ::= "a" (': "line 1: expecting ')' at the end",
    'root ::= "a"\n)': "line 2: expecting name at ')'",
    'root ::= "a\n': "unexpected end of input",
    'root ::=\n  "a" |\n  *': "expecting preceding item to */+/?/{",
    "root ::= [a-z": "unexpected end of input",
    'root ::= "b"\nx ::= "\\q"': "line 2: unknown escape at",
    'root ::= "a"{': "line 1: expecting an int at the end",
    'root ::= "a"{99999999999999999999}': "more than 2,000",
    'root ::= "a"{2001}': "more than 2,000",
    'root ::= ("a" | "b" "c"){0,1500} ("x"{0,60}){0,60}': "exceeds sane defaults",
    'root ::= "a\0b"': "null",
    'root ::= "\ud800"': "not Unicode",
    "root ::= 'a'": "line 1: expecting newline or end at \"'a'\"",
    "root ::= a ::= b": "line 1: expecting newline or end at '::= b'",
    'root ::= root "a" | "b"': "left recursion",
    'root ::= "x" | root': "left recursion",
    # what llama.cpp's parser does not survive
    'root ::= "a"{3,2}': "{3,2} has a maximum below its minimum",
    f"root ::= {'(' * 20_000}": "nests more than 1,000",
    'root ::= "a" <[5]>': "names a token",
    'root ::= "a" !<think>': "names a token",
    'root ::= "a"' + "|" * 200_000: "more than 100,000 alternatives",
    "root ::= " + "[" * 900_000: "unexpected end of input",
}
LETHAL = [
    'root ::= b root "y" | "x"\nb ::= c\nc ::=',
    'root ::= "a" r\nr ::= ("b"?){2} r "y" | "x"',
    'root ::= a{0,2000}\na ::= | b{0,2000}\nb ::= | c{0,2000}\nc ::= | "x"',
    "root ::= " + "".join(f"r{i}\nr{i} ::= r{i + 1} | " for i in range(40)) + 'r40\nr40 ::= "a"',
]


@pytest.mark.parametrize("text", BAD, ids=lambda text: repr(text[:30]))
def test_what_is_no_grammar_is_refused_with_a_reason(model, capfd, text):
    with pytest.raises(UsageError) as caught:
        compile_grammar(model, text)
    assert BAD[text] in caught.value.message
    assert caught.value.hint
    assert capfd.readouterr() == ("", "")  # llama.cpp's parser prints


@pytest.mark.parametrize("text", [LETHAL[0], *(pytest.param(text, marks=pytest.mark.full) for text in LETHAL[1:])])
def test_what_ends_or_hangs_the_parser_is_refused_by_name(text):
    """In a child, in bounded time and memory."""
    with pytest.raises((UsageError, ChildError), match="the grammar") as caught:
        check_grammar(text)
    assert caught.value.hint


GOOD = [
    'root ::= ("a"*)* ',
    'root ::= "a"{2}* [b-d]{1,3}? ("e"?)+ .{0} "é\\x41\\u00e9\\U0001F600\\n\\"" [^\\]\\-] []',
    "root ::= a |\n  b # a comment\n\n# another\na ::= (\n b\n |\n) b\r\nb ::= [^x]",
    'root ::= "a" root | "b"',
    "root ::= ",
    f"root ::= {'(' * 999}[a-z]{')' * 999}",
    "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(3000)) + 'r3000 ::= "a"',
]


@pytest.mark.parametrize("text", GOOD, ids=lambda text: repr(text[:30]))
def test_what_is_a_grammar_is_read(model, text):
    constraint = compile_grammar(model, text)
    state = constraint.start()
    for _ in range(3):
        found = np.flatnonzero(constraint.mask(state))
        state = constraint.advance(state, int(found[-1]))
        assert state is not None
        if state.handle is None:
            break


def test_the_grammars_that_llama_cpp_python_ships_are_read(model):
    from llama_cpp import llama_grammar

    shipped = [text for name, text in vars(llama_grammar).items() if name.endswith("_GBNF")]
    assert len(shipped) >= 6
    for text in shipped:
        assert compile_grammar(model, text).mask(compile_grammar(model, text).start()).any()


def test_a_grammar_is_checked_without_a_model():
    check_grammar("root ::= r0\n" + "".join(f'r{i} ::= r{i + 1} "b"?\n' for i in range(300)) + 'r300 ::= "a"')


# --- JSON schemas --------------------------------------------------------------------------------------------------


def test_constants_mean_themselves(model):
    for value in ("\\", 'a"b', "a\nb", "\\\\n", "é", "\x07", {"a\\": ["\t"]}):
        constraint = compile_grammar(model, schema_to_grammar(json.dumps({"const": value})))
        state = constraint.start()
        for token in model.tokenize(json.dumps(value, ensure_ascii=False, separators=(",", ":"))):
            state = constraint.advance(state, token)
            assert state is not None, value
        assert any(constraint.permits(state, token) for token in range(model.vocab_size) if model.is_end(token))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("{'a': 1}", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        ("true", "not a JSON object"),
        ('{"type": "text"}', "unrecognized type text"),
        ('{"type": 3}', "cannot be converted to a grammar"),
        ('{"type": "object", "properties": []}', "cannot be converted to a grammar"),
        ('{"$ref": "https://example.com/schema.json"}', "only references into the same document"),
        ('{"$ref": "#/nowhere"}', "cannot resolve $ref #/nowhere"),
        ('{"type": "string", "pattern": "a"}', "not anchored"),
        ('{"enum": 3}', "cannot be converted to a grammar"),
    ],
)
def test_what_is_no_schema_is_refused_with_a_reason(text, reason):
    with pytest.raises(UsageError, match=re.escape(reason)) as caught:
        schema_to_grammar(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "string", "maxLength": 200},
        {
            "type": "array",
            "items": {"$ref": "#/definitions/tree"},
            "definitions": {"tree": {"type": "object", "properties": {"next": {"$ref": "#/definitions/tree"}}}},
        },
        {"anyOf": [{"type": "null"}, {"type": "number"}]},
        {"type": "string", "pattern": "^[a-z]{2,5}-\\d$".replace("\\d", "[0-9]")},
        {
            "type": "object",
            "properties": {'été "x"': {"type": ["integer", "null"]}},
            "additionalProperties": {"type": "string"},
        },
        {"type": "string", "format": "date-time"},
    ],
    ids=lambda schema: json.dumps(schema)[:30],
)
def test_schemas_of_many_kinds_are_grammars(model, schema):
    constraint = compile_grammar(model, schema_to_grammar(json.dumps(schema)))
    assert constraint.mask(constraint.start()).any()


def test_a_schema_beyond_what_llama_cpp_can_read_is_refused(model):
    with pytest.raises(UsageError, match="the schema cannot be used") as caught:
        check_schema('{"type": "array", "items": {"type": "null"}, "maxItems": 5000}')
    assert "maxItems" in caught.value.hint
    text = schema_to_grammar('{"type": "array", "items": {"type": "null"}, "maxItems": 2000}')
    with pytest.raises(UsageError, match="repeated multiplied"):
        compile_grammar(model, text)
