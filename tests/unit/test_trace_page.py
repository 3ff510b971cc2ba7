"""The page of a trace, without a browser: what is in it and what cannot be."""

from __future__ import annotations

import html
import re

from test_loop import OFF, Case, Draft, Table
from test_trace import listening

from ggufspec import Sampling
from ggufspec.decoding.trace import Trace
from ggufspec.reports import trace as report
from ggufspec.reports.trace_page import render_trace
from ggufspec.schema.base import MeasuredRun, Spread
from ggufspec.schema.trace import TraceDocument, WrittenToken
from tests.support.pages import Elements

WORDS = (" def", " walk", "(", "\n    ", '"', "<b>", "é", "\t")
SPEED = Spread(12.0, (12.0, 12.0), (12.0,))


def made(spell=lambda token: WORDS[token % len(WORDS)], *, tokens=40, name="demo", accept="residual"):
    """(document, rounds) of an answer of a table model, its tokens spelled by ``spell``."""
    table, trace = Table(5, 7, -8), Trace(spell)
    case = Case(
        table,
        max_tokens=tokens,
        draft=Draft(table, 6, 7),
        sampling=Sampling(temperature=1.0, **OFF, seed=3),
        accept=accept,
    )
    case.run(listening(trace))
    written = tuple(
        WrittenToken(token, spell(token), case.all_rounds[round_.number].source(place), round_.number)
        for round_ in trace.rounds
        for place, token in enumerate(round_.emitted)
    )
    document = TraceDocument(
        pair={"name": name, "target": f"/models/{name}-target.gguf", "draft": f"/models/{name}-draft.gguf"},
        settings={"temperature": 1.0, "seed": 3},
        prompt=spell(0) * 3,
        text="".join(one.text for one in written),
        tokens=written,
        rounds=len(case.rounds),
        stop_reason="length",
        statistics=MeasuredRun(0, 4, len(written), SPEED, 100.0, 2**28, 0, 0.1),
    )
    return document, trace.rounds


def test_every_writer_has_a_colour():
    document, rounds = made()
    page = render_trace(document, rounds)
    for writer in report.WRITERS:
        assert re.search(rf"\.{writer}\b[^{{}}]*{{ *background:", page), writer


def test_every_token_tells_who_wrote_it_and_leads_to_its_round():
    document, rounds = made()
    page = Elements(render_trace(document, rounds))
    links = page.named("a")
    assert [link["class"] for link in links] == [token.source for token in document.tokens]
    assert [link["href"] for link in links] == [f"#r{token.round}" for token in document.tokens]
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    assert {link["href"][1:] for link in links} <= ids
    assert {token.source for token in document.tokens} == {"draft", "target", "bonus"}
    for link, token in zip(links, document.tokens, strict=True):
        assert link["title"].startswith(f"round {token.round}: {token.source}, {report.quoted(token.text)}")
    kept = [link["title"] for link in links if link["class"] == "draft"]
    assert all(
        re.search(r", q [\d.e-]+, p [\d.e-]+, p/q [\d.e+-]+, [\d.]+ < [\d.]+, accepted$", title) for title in kept
    )
    assert document.text in "".join(page.text)


def test_every_round_is_there_with_its_rows():
    document, rounds = made()
    text = render_trace(document, rounds)
    page = Elements(text)
    assert len(page.named("details")) == len(rounds)
    for round_ in rounds:
        assert report.heading(round_) in html.unescape(text)
    rows = [attributes["class"] for attributes in page.named("tr") if "class" in attributes]
    assert [row for row in rows if row != "likely"] == [row.kind for round_ in rounds for row in report.rows(round_)]
    assert report.explained(rounds[0]).split(";")[0].replace("<", "&lt;") in text


def test_a_short_trace_is_unfolded_and_a_long_one_is_not():
    for tokens, unfolded in ((8, True), (60, False)):
        document, rounds = made(tokens=tokens)
        assert (len(rounds) <= 12) == unfolded
        assert all(("open" in one) == unfolded for one in Elements(render_trace(document, rounds)).named("details"))


def test_what_a_model_says_is_only_text():
    hostile = '</pre><script>alert(1)</script>" onmouseover="x\x1b\u202e'
    page = Elements(render_trace(*made(lambda _: hostile, name=hostile)))
    assert page.named("script") == []
    assert not any("onmouseover" in attributes for _, attributes in page.tags)
    assert not {"\x1b", "\u202e"} & set("".join(page.text))
    assert not any({"\x1b", "\u202e"} & set(value or "") for _, each in page.tags for value in each.values())
    policy = next(each["content"] for each in page.named("meta") if each.get("http-equiv"))
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert not any("style" in attributes for _, attributes in page.tags)  # the policy would forbid it


def test_nothing_is_loaded_from_anywhere():
    text = render_trace(*made())
    assert not re.search(r"https?://|url\(", text)
    assert [each["href"] for each in Elements(text).named("link")] == ["data:,"]
