"""The page in a browser: headless Chromium opens it; skipped where there is none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_trace_page import made

from ggufspec.reports.documents import parse_document
from ggufspec.reports.html.page import page as render_page
from ggufspec.reports.html.page import render
from ggufspec.reports.html.sections import report_section
from ggufspec.reports.trace_page import render_trace
from tests.support import kept_results
from tests.support.browser import MARKS, launched

pytestmark = MARKS

HOSTILE = '</script><script>document.title="taken"</script><img src="http://127.0.0.1:9/x.png" onerror="alert(1)">'
VIEWS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]

# What is drawn of every figure that is shown: (its name, size of its plot, marks with words, marks that are on it).
DRAWN = """() => [...document.querySelectorAll('figure')].map(figure => {
    const plots = [...figure.querySelectorAll('svg.plot')].filter(svg => svg.getBoundingClientRect().width > 0)
    const frame = plots[0].getBoundingClientRect()
    const marks = [...plots[0].querySelectorAll('[role=graphics-symbol][aria-label]:not(g)')].filter(mark => {
        const box = mark.getBoundingClientRect()
        return box.width + box.height > 0 && box.left >= frame.left - 2 && box.right <= frame.right + 2
            && box.top >= frame.top - 2 && box.bottom <= frame.bottom + 2
    })
    return {name: figure.className, plots: plots.length, width: frame.width, height: frame.height,
            reported: marks.map(mark => mark.querySelector('title').textContent),
            colours: marks.map(mark => getComputedStyle(mark)).map(style => style.fill + style.stroke)}
})"""
CUT = """() => [...document.querySelectorAll('svg.plot')].flatMap(svg => {
    const frame = svg.getBoundingClientRect()
    return frame.width == 0 ? [] : [...svg.querySelectorAll('text')].filter(text => {
        const box = text.getBoundingClientRect()
        return box.left < frame.left - 8 || box.right > frame.right + 8
    }).map(text => text.textContent)
})"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A browser with a profile of its own, which nothing is sent for."""
    with launched(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


class Opened:
    """A page, and everything that it said and asked for."""

    def __init__(self, browser: object, path: Path, width: int, scheme: str) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri(), wait_until="load")

    def look(self, script: str) -> object:
        return self.page.evaluate(script)


@pytest.fixture(scope="module")
def documents() -> list[dict]:
    return kept_results.all_kinds()


@pytest.fixture(scope="module")
def file(documents: list[dict], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "results.html"
    path.write_text(render(documents), encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_every_plot_is_drawn_and_nothing_is_asked_for(chromium, file, documents, width, scheme):
    opened = Opened(chromium, file, width, scheme)
    sections = [
        each for machine in report_section([parse_document(body) for body in documents]) for each in machine.sections
    ]
    expected = [figure for each in sections for figure in each.figures]
    drawn = opened.look(DRAWN)
    assert [figure["name"] for figure in drawn] == [figure.name for figure in expected]
    kinds = {figure.name for figure in expected}
    assert kinds == {"speed", "quality", "memory", "acceptance", "plan", "sweep", "search"}
    for seen, figure in zip(drawn, expected, strict=True):
        assert seen["plots"] == 1, figure.title
        assert seen["width"] > 250, figure.title
        assert seen["height"] > 60, figure.title
        reported = Counter(mark.description for mark in figure.marks if mark.kind != "line")
        assert not reported - Counter(seen["reported"]), figure.title
        assert "nonenone" not in seen["colours"], figure.title
    assert opened.said == []
    assert opened.asked == [file.as_uri()]
    opened.context.close()


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_it_fits_and_follows_the_scheme(chromium, file, width, scheme):
    opened = Opened(chromium, file, width, scheme)
    assert opened.look("document.documentElement.scrollWidth") == width
    assert opened.look(CUT) == []
    paper = opened.look("getComputedStyle(document.body).backgroundColor")
    ink = opened.look("getComputedStyle(document.querySelector('svg.plot text')).fill")
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) > 3 * 128 for colour in (paper, ink)]
    assert light == ([True, False] if scheme == "light" else [False, True])
    small = opened.look(
        "Math.min(...[...document.querySelectorAll('svg.plot text')].filter(t => t.getBoundingClientRect().width > 0)"
        ".map(t => parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a || 12))"
    )
    assert small >= 9  # CSS pixels, after the drawing was fitted to the page
    opened.context.close()


def test_on_paper_it_is_light_and_whole(chromium, file):
    opened = Opened(chromium, file, 1280, "dark")
    opened.page.emulate_media(media="print")
    assert opened.look("getComputedStyle(document.documentElement).getPropertyValue('--ink').trim()") == "#1b1f24"
    hidden = "[...document.querySelectorAll('.scroll')].filter(box => box.scrollHeight > box.clientHeight + 2).length"
    assert opened.look(hidden) == 0  # no rows are left behind a scroll bar
    assert opened.page.pdf(format="A4").startswith(b"%PDF")
    opened.context.close()


def test_a_hostile_name_is_only_text(chromium, tmp_path):
    document = kept_results.as_json(kept_results.compare(prefix=f"{HOSTILE}-"))
    bench = kept_results.as_json(
        kept_results.bench(pair={"name": HOSTILE, "target": f"{HOSTILE}.gguf", "draft": "d.gguf"}, notes=(HOSTILE,))
    )
    path = tmp_path / "hostile.html"
    path.write_text(render([document, bench]), encoding="utf-8")
    opened = Opened(chromium, path, 390, "light")
    assert opened.look("document.scripts.length") == 0
    assert opened.look("document.images.length") == 0
    assert opened.page.title() == "Speculative decoding: results"
    assert HOSTILE in opened.look("document.body.textContent")
    assert opened.look("document.documentElement.scrollWidth") == 390
    assert opened.said == []
    assert opened.asked == [path.as_uri()]
    opened.context.close()


def test_what_it_forbids_is_forbidden(chromium, file, tmp_path):
    """The policy of the page stops a script and a picture that somebody puts into it."""
    path = tmp_path / "changed.html"
    text = file.read_text(encoding="utf-8")
    path.write_text(text.replace("<main>", f"<main>{HOSTILE}", 1), encoding="utf-8")
    opened = Opened(chromium, path, 1280, "light")
    assert opened.page.title() == "Speculative decoding: results"
    assert opened.look("document.scripts.length") == 1
    assert [said for said in opened.said if "Content Security Policy" in said]
    opened.context.close()


def test_one_result_and_no_result_are_pages(chromium, tmp_path):
    for name, documents in (("one", [kept_results.bench()]), ("none", [])):
        path = tmp_path / f"{name}.html"
        path.write_text(render_page(documents), encoding="utf-8")
        opened = Opened(chromium, path, 390, "light")
        assert opened.look("document.querySelectorAll('article').length") == len(documents)
        assert opened.look("document.documentElement.scrollWidth") == 390
        assert opened.said == []
        opened.context.close()


# ---- the page of a trace

COLOURS = """() => Object.fromEntries([...document.querySelectorAll('.answer a')].map(
    token => [token.className, getComputedStyle(token).backgroundColor]))"""
HIDDEN = """() => [...document.querySelectorAll('details table')].filter(
    table => !table.checkVisibility({contentVisibilityAuto: true}) || !table.getBoundingClientRect().height).length"""


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.html"
    path.write_text(render_trace(*made(tokens=80)), encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_a_trace_fits_follows_the_scheme_and_tells_its_writers_apart(chromium, trace_file, width, scheme):
    opened = Opened(chromium, trace_file, width, scheme)
    assert opened.look("document.documentElement.scrollWidth") == width
    colours = opened.look(COLOURS)
    assert set(colours) == {"draft", "target", "bonus"}
    assert len(set(colours.values())) == 3
    paper = opened.look("getComputedStyle(document.body).backgroundColor")
    ink = opened.look("getComputedStyle(document.querySelector('.answer a')).color")
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) > 3 * 128 for colour in (paper, ink)]
    assert light == ([True, False] if scheme == "light" else [False, True])
    for name, colour in colours.items():  # the text on it can be read
        assert name == "target" or contrast(colour, ink) >= 4.5, (name, colour, ink)
    assert opened.look("document.documentElement.scrollWidth") == width
    assert opened.said == []
    assert opened.asked == [trace_file.as_uri()]
    opened.context.close()


def contrast(one: str, other: str) -> float:
    """Of two colours, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_a_token_unfolds_its_round(chromium, trace_file):
    opened = Opened(chromium, trace_file, 390, "light")
    assert opened.look("document.querySelectorAll('details[open]').length") == 0
    token = opened.page.locator(".answer a").nth(30)
    place = token.get_attribute("href")
    token.click()
    assert opened.look("[...document.querySelectorAll('details[open] .scroll')].map(e => '#' + e.id)") == [place]
    assert opened.look("document.documentElement.scrollWidth") == 390
    opened.context.close()


def test_on_paper_every_round_of_a_trace_is_there(chromium, trace_file):
    opened = Opened(chromium, trace_file, 1280, "dark")
    assert opened.look(HIDDEN) > 0
    opened.page.emulate_media(media="print")
    opened.page.wait_for_function(f"({HIDDEN})() === 0")  # what was skipped is laid out with the next frame
    assert opened.look("getComputedStyle(document.documentElement).getPropertyValue('--w-draft').trim()") == "#cfe8d5"
    assert opened.page.pdf(format="A4").startswith(b"%PDF")
    opened.context.close()


def test_what_a_hostile_model_says_is_only_text(chromium, tmp_path):
    path = tmp_path / "hostile-trace.html"
    path.write_text(render_trace(*made(lambda _: HOSTILE, tokens=6, name=HOSTILE)), encoding="utf-8")
    opened = Opened(chromium, path, 390, "light")
    assert opened.look("document.scripts.length + document.images.length") == 0
    assert HOSTILE * 3 in opened.look("document.querySelector('.answer').textContent")
    assert opened.look("document.documentElement.scrollWidth") == 390
    assert opened.said == []
    assert opened.asked == [path.as_uri()]
    opened.context.close()
