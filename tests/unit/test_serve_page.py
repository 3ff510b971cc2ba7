"""The page of an endpoint, without a browser: what is in it, and what its policy allows."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ggufspec.bench.trial import LoadedModel
from ggufspec.serve import page
from tests.support.pages import Elements
from tests.support.served import HOSTILE, ready


class Inline(HTMLParser):
    """The text of every style and script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside in ("style", "script"):
            self.found.append((self._inside, data))

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002
        self._inside = ""


@pytest.fixture(scope="module")
def html() -> str:
    return page.html("llama3-70b", ready())


def test_the_policy_allows_this_style_and_this_script_and_nothing_else(html):
    rules = dict(rule.split(" ", 1) for rule in page.CSP.split("; "))
    sources = {
        tag: f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for tag, text in Inline(html).found
    }
    assert rules == {
        "default-src": "'none'",
        "script-src": sources["script"],
        "style-src": sources["style"],
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }


def test_the_policy_is_the_same_for_every_pair(html):
    other = page.html("another", ready(draft=None, drafters=(), chat_template=""))
    assert Inline(html).found == Inline(other).found


def test_nothing_is_loaded_and_nothing_is_an_inline_handler(html):
    elements = Elements(html)
    assert [a.get("href") for _, a in elements.tags if "href" in a] == ["data:,"]
    assert not [a for _, a in elements.tags if "src" in a or "action" in a or "style" in a]
    assert not [name for _, a in elements.tags for name in a if name.startswith("on")]
    assert "url(" not in html
    assert "@import" not in html


def test_the_script_makes_no_html_of_texts():
    script = (Path(page.__file__).parent / "templates" / "page.js").read_text(encoding="utf-8")
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|srcdoc", script)
    assert not re.findall(r"localStorage|sessionStorage|cookie|indexedDB", script)  # the key is kept nowhere


def test_what_is_loaded_is_named(html):
    text = "".join(Elements(html).text)
    for words in (
        "llama 70B Q3_K_S, 64 of 81 layers on the GPU",
        "llama 8B Q4_K_M, 33 of 33 layers on the GPU",
        "draft, lookup",
        "8,192 tokens in each of 2 conversations",
        "no card here",
    ):
        assert words in text


def test_a_model_without_a_gpu_is_on_the_cpu():
    text = "".join(Elements(page.html("demo", ready(target=LoadedModel("llama 1M", 4, 0, 1000)))).text)
    assert "llama 1M, on the CPU" in text


def test_without_a_template_texts_are_continued():
    elements = Elements(page.html("demo", ready(chat_template="")))
    assert elements.named("body") == [{"data-model": "demo", "data-chat": "no"}]
    assert "Text to continue" in "".join(elements.text)
    assert Elements(page.html("demo", ready())).named("body")[0]["data-chat"] == "yes"


def test_target_only_is_said():
    elements = Elements(page.html("demo", ready(draft=None, drafters=(), parallel=1)))
    text = "".join(elements.text)
    assert "none: speculation is off" in text
    assert "Draft" not in elements.text
    assert "conversations" not in text


def test_no_name_and_no_note_is_an_element():
    model = LoadedModel(HOSTILE, 1, 0, 1)
    hostile = ready(target=model, draft=model, notes=(HOSTILE,), drafters=(HOSTILE,))
    html = page.html(HOSTILE, hostile)
    elements = Elements(html)
    assert len(elements.named("script")) == 1
    assert elements.named("img") == []
    assert "\x1b" not in html


def test_every_field_has_a_label_and_every_reference_a_place(html):
    elements = Elements(html)
    places = [a["id"] for _, a in elements.tags if "id" in a]
    assert len(places) == len(set(places))
    labelled = {a["for"] for a in elements.named("label")}
    fields = {a["id"] for name in ("input", "textarea") for a in elements.named(name)}
    assert labelled == fields
    referred = {a[key] for _, a in elements.tags for key in ("aria-labelledby", "aria-describedby") if key in a}
    assert referred <= set(places)
