"""The page of an endpoint in headless Chromium; skipped where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ggufspec.serve import page as served_page
from tests.support.browser import MARKS, launched
from tests.support.processes import Cli
from tests.support.served import HOSTILE, Endpoint, figures, ready, served
from tests.support.serving import HERMES, Server, serving

pytestmark = MARKS

VIEWS = [(width, scheme) for width in (320, 800, 1280) for scheme in ("light", "dark")]
# What is wider than the window, or cut at its side
WIDE = """() => [...document.querySelectorAll('body *:not(thead *)')].filter(element => {
    const box = element.getBoundingClientRect()
    return box.width > 1 && (box.right > innerWidth + 1 || box.left < -1)
}).map(element => element.outerHTML.slice(0, 80))"""
# The least contrast of any text with what is behind it, as WCAG 2.2 counts it
CONTRAST = """() => {
    const light = (colour) => {
        const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(each => each / 255)
            .map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
    }
    const behind = (element) => {
        for (; element; element = element.parentElement) {
            const colour = getComputedStyle(element).backgroundColor
            if (!/, 0\\)$/.test(colour)) return colour
        }
        return 'rgb(255, 255, 255)'
    }
    return Math.min(...[...document.querySelectorAll('body *')].filter(element => element.getClientRects().length
        && !element.disabled && [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim())
    ).map(element => {
        const both = [light(getComputedStyle(element).color), light(behind(element))].sort((a, b) => b - a)
        return (both[0] + 0.05) / (both[1] + 0.05)
    }))
}"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser with a profile of its own, which nothing is sent for."""
    with launched(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with served(Endpoint(served_page.html("demo", ready()))) as running:
        yield running


class Opened:
    """A page, everything that it said and asked for."""

    def __init__(self, browser: Any, endpoint: Endpoint | Server, width: int = 800, scheme: str = "light") -> None:
        from playwright.sync_api import expect

        self.expect = expect
        self.said: list[str] = []
        self.asked: set[str] = set()
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.add(request.url.removeprefix(endpoint.url)))
        self.page.goto(endpoint.url, wait_until="load")

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def send(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.keyboard.press("Control+Enter")

    def has(self, where: str, text: str) -> None:
        """Wait until an element has this text, no more and no less."""
        self.expect(self.page.locator(where)).to_have_text(text)


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_nothing_is_cut_and_everything_can_be_read(chromium, endpoint, width, scheme):
    endpoint.figures = figures(20)
    endpoint.reasoning = ["Let me ", "think."]
    endpoint.pieces = [f"A {'very ' * 40}l{'o' * 200}ng word\n", "\n    code"]
    with Opened(chromium, endpoint, width, scheme) as opened:
        opened.send("Write.")
        opened.has("#state", "Answer finished, 3 tokens.")
        opened.expect(opened.page.locator("#answers tbody tr")).to_have_count(20)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.page.evaluate(WIDE) == []
        assert opened.page.evaluate(CONTRAST) >= 4.5
        assert opened.said == []
        assert opened.asked == {"/", "/figures", "/v1/chat/completions"}


def test_an_answer_streams_and_its_reasoning_is_apart(chromium, endpoint):
    endpoint.reasoning = ["Let me ", "think."]
    endpoint.open = True
    with Opened(chromium, endpoint) as opened:
        opened.page.fill("#most", "7")
        opened.page.fill("#temperature", "0.5")
        opened.send("Write.")
        opened.has("#answer", "Hello, world.")
        opened.has("#reasoning", "Let me think.")
        opened.has("#state", "Answering …")
        assert opened.page.get_attribute("#answer", "aria-busy") == "true"
        endpoint.open = False
        opened.has("#state", "Answer finished, 3 tokens.")
        assert opened.page.get_attribute("#answer", "aria-busy") == "false"
        (asked,) = endpoint.asked
        assert asked == {
            "path": "/v1/chat/completions",
            "model": "demo",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 7,
            "temperature": 0.5,
            "messages": [{"role": "user", "content": "Write."}],
        }
        endpoint.reasoning = []
        opened.send("Again.")
        opened.expect(opened.page.locator("#reasoning-box")).to_be_hidden()
        opened.has("#state", "Answer finished, 3 tokens.")


def test_a_model_without_a_template_continues_the_text(chromium, endpoint):
    endpoint.html = served_page.html("demo", ready(chat_template=""))
    with Opened(chromium, endpoint) as opened:
        opened.page.fill("#most", "")
        opened.send("def main(")
        opened.has("#answer", "Hello, world.")
    (asked,) = endpoint.asked
    assert (asked["path"], asked["prompt"]) == ("/v1/completions", "def main(")
    assert not {"messages", "max_tokens", "temperature"} & set(asked)


@pytest.mark.parametrize("how", ["escape", "button"])
def test_it_is_stopped(chromium, endpoint, how):
    endpoint.open = True
    with Opened(chromium, endpoint) as opened:
        opened.page.fill("#prompt", "Write.")
        opened.page.focus("#send")
        opened.page.keyboard.press("Enter")
        opened.has("#answer", "Hello, world.")
        opened.expect(opened.page.locator("#stop")).to_be_focused()
        opened.page.keyboard.press("Escape" if how == "escape" else "Enter")
        opened.has("#state", "Stopped.")
        opened.has("#answer", "Hello, world.")
        opened.expect(opened.page.locator("#send")).to_be_focused()
        assert endpoint.left.wait(20)
        assert opened.said == []


def test_a_model_and_figures_cannot_write_html(chromium, endpoint):
    endpoint.html = served_page.html(HOSTILE, ready(notes=(HOSTILE,)))
    endpoint.pieces = endpoint.reasoning = [HOSTILE]
    endpoint.figures = figures(1)
    endpoint.figures["answers"][0]["stop_reason"] = HOSTILE
    with Opened(chromium, endpoint) as opened:
        opened.send(HOSTILE)
        opened.has("#state", "Answer finished, 3 tokens.")
        assert opened.page.text_content("#answer") == HOSTILE
        assert opened.page.text_content("#reasoning") == HOSTILE
        assert opened.page.locator("img").count() == 0
        assert opened.page.title() != "taken"
        assert opened.said == []
        assert opened.asked == {"/", "/figures", "/v1/chat/completions"}


def test_the_policy_stops_what_would_be_injected(chromium, endpoint):
    with Opened(chromium, endpoint) as opened:
        opened.page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'hit = 1'}))")
        assert opened.page.evaluate("typeof hit") == "undefined"
        assert [each for each in opened.said if "Content Security Policy" in each]


def test_a_refusal_is_shown(chromium, endpoint):
    endpoint.fault = (400, "the prompt has 9,000 tokens", "shorten it <b>")
    with Opened(chromium, endpoint) as opened:
        opened.send("Write.")
        opened.has("#fault", "No answer: the prompt has 9,000 tokens: shorten it <b>.")
        opened.expect(opened.page.locator("#answer")).to_be_hidden()
        endpoint.fault = None
        opened.send("Write.")
        opened.has("#answer", "Hello, world.")
        opened.has("#fault", "")


def test_an_error_in_the_midst_keeps_what_came(chromium, endpoint):
    endpoint.late_fault = "the child process ended"
    with Opened(chromium, endpoint) as opened:
        opened.send("Write.")
        opened.has("#fault", "The answer broke off: the child process ended.")
        opened.has("#answer", "Hello, world.")


def test_figures_come_by_themselves(chromium, endpoint):
    with Opened(chromium, endpoint) as opened:
        opened.has("#totals", "No answer yet.")
        opened.expect(opened.page.locator("#tiles")).to_be_hidden()
        endpoint.figures = figures(2)
        opened.has("#totals", "2 answers, 7 tokens, 7 of 7 drafted tokens accepted, 7 requests refused, 7 restarts")
        rows = [each.split("\t") for each in opened.page.locator("#answers tbody tr").all_inner_texts()]
        assert rows == [
            ["#2", "20", "22.5", "1.40×", "75%", "4.00", "1,002", "900", "250 ms", "length"],
            ["#1", "10", "21.5", "–", "–", "2.00", "1,001", "900", "250 ms", "end"],
        ]
        tiles = opened.page.locator("#tiles dd").all_inner_texts()
        assert tiles == ["22.5", "1.40×", "75%", "4.00", "250 ms", "on"]
        opened.has("#now", "2 answers running, 1 waiting; 1.75 answers per batch of the target so far.")
        opened.has("#target.warning", "Target without drafts: 22.7 tokens/s, expected 44.0 (a & <b>).")
        endpoint.figures = figures(3)
        opened.has("#answers tbody tr:first-child td:first-child", "#3")


def test_a_key_is_asked_for_and_kept_in_memory_only(chromium, endpoint):
    endpoint.key, endpoint.figures = "sesame", figures(1)
    with Opened(chromium, endpoint) as opened:
        opened.expect(opened.page.locator("#key")).to_be_focused()
        opened.page.keyboard.type("wrong")
        opened.page.keyboard.press("Enter")
        opened.has("#key-fault", "The endpoint does not accept this key.")
        opened.page.keyboard.type("sesame")
        opened.page.keyboard.press("Enter")
        opened.expect(opened.page.locator("#key-form")).to_be_hidden()
        opened.expect(opened.page.locator("#answers tbody tr")).to_have_count(1)
        opened.send("Write.")
        opened.has("#answer", "Hello, world.")
        kept = opened.page.evaluate(
            "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        )
        assert "sesame" not in kept
        assert "sesame" not in opened.page.content()
        assert opened.page.input_value("#key") == ""
        opened.page.reload()
        opened.expect(opened.page.locator("#key")).to_be_focused()


def test_an_endpoint_that_is_gone_is_said(chromium, endpoint):
    with Opened(chromium, endpoint) as opened:
        opened.has("#totals", "No answer yet.")
        opened.context.set_offline(True)
        opened.has("#link", "No statistics: the endpoint does not respond.")
        opened.send("Write.")
        opened.has("#fault", "No answer: the endpoint does not respond.")


def test_the_keyboard_reaches_everything_in_order(chromium, endpoint):
    with Opened(chromium, endpoint) as opened:
        opened.has("#totals", "No answer yet.")
        reached = []
        for _ in range(4):
            opened.page.keyboard.press("Tab")
            reached.append(opened.page.evaluate("document.activeElement.id"))
            assert opened.page.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "3px"
        assert reached == ["prompt", "most", "temperature", "send"]


@pytest.mark.parametrize("template", [HERMES, None], ids=["chat", "completion"])
def test_with_the_server_itself(
    chromium: Any, new_cli: Callable[[], Cli], tmp_path: Path, template: str | None
) -> None:
    arguments = ("-c", "512", "--api-key", "sesame")
    with (
        serving(new_cli(), tmp_path, *arguments, template=template) as server,
        Opened(chromium, server, 320, "dark") as opened,
    ):
        opened.expect(opened.page.locator("#key")).to_be_focused()
        opened.page.keyboard.type("sesame")
        opened.page.keyboard.press("Enter")
        opened.expect(opened.page.locator("#key-form")).to_be_hidden()
        opened.page.fill("#most", "24")
        opened.page.fill("#temperature", "0")
        opened.send("def main(")
        opened.expect(opened.page.locator("#send")).to_be_enabled(timeout=60_000)
        opened.expect(opened.page.locator("#state")).to_contain_text("Answer ")
        assert len(opened.page.text_content("#answer")) > 10
        opened.expect(opened.page.locator("#answers tbody tr")).to_have_count(1)
        opened.expect(opened.page.locator("#totals")).to_contain_text("1 answer, ")
        assert opened.page.evaluate(WIDE) == []
        kinds = {each for each in opened.asked if each.startswith("/v1/")}
        assert kinds == {"/v1/chat/completions" if template else "/v1/completions"}
        assert [each for each in opened.said if "401" not in each] == []
