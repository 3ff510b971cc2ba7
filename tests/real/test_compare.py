"""Three quantisations of a expanded target with three of the draft: table, kept results, page; and on an RPC device."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from test_rpc import worker as rpc_worker

from ggufspec.llamacpp import quantize
from tests.support.processes import Cli

worker = rpc_worker
KINDS = ("F16", "Q8_0", "Q4_0")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory, draft: Path) -> list[Path]:
    folder = tmp_path_factory.mktemp("drafts")
    for kind in KINDS:
        quantize.write_quantised(draft, folder / f"draft-{kind}.gguf", kind, 1, requantize=True)
    return [folder / f"draft-{kind}.gguf" for kind in KINDS]


@pytest.fixture
def matrix(expanded: Callable[[str], Path], drafts: list[Path]) -> tuple[str, ...]:
    targets = ",".join(str(expanded(kind)) for kind in KINDS)
    return ("compare", "-m", targets, "-md", ",".join(map(str, drafts)), "-p", "def main(", "-n", "16")


@pytest.mark.full
def test_three_by_three_with_quality_and_page(cli: Cli, matrix: tuple[str, ...], tmp_path: Path) -> None:
    page, result = tmp_path / "page.html", tmp_path / "result.json"
    files = ("--results", str(tmp_path / "kept"), "--export-json", str(result), "--html", str(page))
    done = cli(*matrix, "-r", "2", *files, COLUMNS="80")
    assert done.code == 0, done.stderr
    document = json.loads(result.read_text())
    assert len(document["cells"]) == 12
    assert all(cell["run"] and not cell["failure"] for cell in document["cells"])
    best, middle, worst = (model["quality"] for model in document["targets"])
    assert best["mean_kl"] == 0 < middle["mean_kl"] < worst["mean_kl"]
    assert best["top1_agreement"] == 1 > middle["top1_agreement"] > worst["top1_agreement"] > 0.7
    assert middle["mean_kl_error"] < 0.1 * middle["mean_kl"]
    sizes = [model["size_bytes"] for model in document["targets"]]
    assert sizes == sorted(sizes, reverse=True)
    assert "Fastest: " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    text = page.read_text()
    assert text.lower().startswith("<!doctype html>")
    assert all(f"draft-{kind}" in text for kind in KINDS)
    again = cli(*matrix, "-r", "2", *files, "--json", "-y")
    assert again.document()["cells"] == document["cells"]
    _open(page, len(document["cells"]))


def _open(page: Path, cells: int) -> None:
    """In a browser, where there is one: no complaint, no request, a mark for every cell."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
    said: list[str] = []
    asked: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        view = browser.new_page(viewport={"width": 390, "height": 800})
        view.on("console", lambda message: said.append(message.text))
        view.on("pageerror", lambda error: said.append(str(error)))
        view.on("request", lambda request: asked.append(request.url))
        view.goto(page.as_uri())
        marks = view.evaluate("document.querySelectorAll('svg.plot [role=graphics-symbol][aria-label]:not(g)').length")
        wide = view.evaluate("document.documentElement.scrollWidth")
        browser.close()
    assert said == []
    assert [url for url in asked if url != page.as_uri() and not url.startswith("data:")] == []
    assert marks >= cells
    assert wide <= 390


@pytest.mark.full
def test_cells_are_placed_on_a_device(
    cli: Cli, matrix: tuple[str, ...], worker: tuple[str, subprocess.Popen[bytes]]
) -> None:
    """Each at its own best placement, which the plan's bytes describe."""
    done = cli(*matrix, "-r", "1", "--no-quality", "--rpc", worker[0], "--json")
    assert done.code == 0, done.stderr
    cells = done.document()["cells"]
    assert all(cell["run"] for cell in cells), [cell["failure"] for cell in cells]
    for cell in cells:
        on_card = "RPC0" in cell["bytes"]
        assert on_card == (cell["run"]["gpu_layers"] + cell["run"].get("gpu_layers_draft", 0) > 0)
    assert any(cell["run"]["gpu_layers"] for cell in cells)


def test_a_card_too_small_for_anything_is_left_alone(
    cli: Cli, matrix: tuple[str, ...], worker: tuple[str, subprocess.Popen[bytes]]
) -> None:
    done = cli(
        *matrix[:3], *matrix[5:], "-r", "1", "--no-quality", "--rpc", worker[0], "--headroom", "100TiB", "--json"
    )
    assert done.code == 0, done.stderr
    assert {cell["run"]["gpu_layers"] for cell in done.document()["cells"]} == {0}
