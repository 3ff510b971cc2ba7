"""``ggufspec report`` as a user types it: kept results to tables, plots, a page and Markdown."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from ggufspec.reports.documents import parse_document
from tests.support import kept_results
from tests.support.processes import Cli, plain


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder with one result of each command, as those write them."""
    for number, body in enumerate(kept_results.all_kinds()):
        name = f"{number}-{body['schema'].removeprefix('ggufspec/').removesuffix('@1')}.json"
        (tmp_path / name).write_text(json.dumps(body), encoding="utf-8")
    return tmp_path


def test_results_of_two_machines_are_one_page(cli: Cli, kept: Path, tmp_path: Path):
    page, table = tmp_path / "page.html", tmp_path / "table.md"
    files = [str(kept / "0-bench.json"), str(kept / "3-compare.json")]
    done = cli("report", *files, "--html", str(page), "--export-markdown", str(table))
    assert done.code == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", f"wrote {page}\nwrote {table}\n")
    printed = cli("report", *files)
    assert (printed.code, printed.stderr) == (0, "")
    for text in (printed.stdout, page.read_text(encoding="utf-8"), table.read_text(encoding="utf-8")):
        assert "NVIDIA GeForce RTX 4090" in text
        assert "NVIDIA GeForce RTX 4060 Laptop GPU" in text
        assert "47.2 ± 0.5" in text
        assert "out of memory: CUDA0 could not give 512 MiB" in text
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("columns", [80, 120])
def test_it_keeps_to_the_terminal_and_needs_no_colour(cli: Cli, kept: Path, columns: int):
    done = cli("report", *map(str, sorted(kept.glob("*.json"))), COLUMNS=str(columns), NO_COLOR="1")
    assert done.code == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= columns
    for title in ("Quality of the targets", "VRAM by part", "Acceptance rate by position", "Trials"):
        assert title in done.stdout


def test_without_files_it_is_everything_that_is_kept(cli: Cli, kept: Path):
    (kept / "torn.json").write_text('{"schema": "ggufspec/bench@1", "pair"')
    (kept / "later.json").write_text('{"schema": "ggufspec/compare@9"}')
    (kept / "compare.jsonl").write_text("no result, a run_log")
    before = {path: path.read_bytes() for path in kept.iterdir()}
    done = cli("report", "--results", str(kept))
    assert done.code == 0
    assert "Tuning of llama3-70b" in done.stdout
    reported = plain(done.stderr)
    assert f"left out: {kept / 'torn.json'} is not a complete JSON document" in reported
    assert f"left out: {kept / 'later.json'} has the schema ggufspec/compare@9" in reported
    assert "run_log" not in reported
    assert {path: path.read_bytes() for path in kept.iterdir()} == before


def test_the_users_own_folder_is_the_usual_one(cli: Cli):
    done = cli("report")
    assert done.code == 1
    assert "no results are saved in" in plain(done.stderr)
    folder = Path(cli.environment["HOME"]) / ".local" / "share" / "ggufspec" / "results"
    folder.mkdir(parents=True)
    (folder / "mine.json").write_text(json.dumps(kept_results.as_json(kept_results.sweep())))
    done = cli("report")
    assert done.code == 0, done.stderr
    assert "Sweep of draft length" in done.stdout


def test_json_is_the_documents_themselves(cli: Cli, kept: Path):
    path = str(kept / "1-tune.json")
    done = cli("report", path, path, "--json")
    body = json.loads(done.stdout)
    assert body["schema"] == "ggufspec/report@1"
    assert list(body["results"]) == [path]
    assert parse_document(body["results"][path]) == kept_results.tune()


def test_what_it_gave_as_json_is_a_file_of_results(cli: Cli, kept: Path, tmp_path: Path):
    """One file carries all that is kept on a machine to another one, whose files may have the same names."""
    away = tmp_path / "away.json"
    away.write_text(cli("report", "--results", kept, "--json").stdout)
    path = str(kept / "1-tune.json")
    done = cli("report", path, away, "--json")
    assert done.code == 0, done.stderr
    results = done.document()["results"]
    assert len(results) == 1 + len(kept_results.all_kinds())
    assert results[path] == results[f"{path} in {away}"]


def test_a_file_that_went_meanwhile_costs_no_other(cli: Cli, kept: Path):
    (kept / "gone.json").symlink_to(kept / "nowhere")
    done = cli("report", "--results", kept)
    assert done.code == 0
    assert "Tuning of llama3-70b" in done.stdout
    assert f"left out: {kept / 'gone.json'} cannot be read" in plain(done.stderr)


def test_every_sweep_has_its_figures_in_numbers(cli: Cli, kept: Path):
    for name, speed in (("4-sweep", "32.6"), ("5-sweep", "17.1"), ("6-sweep", "31.0")):
        done = cli("report", kept / f"{name}.json")
        assert re.search(rf" {speed} ± \d", plain(done.stdout)), name
        assert "Fastest: " in done.stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"schema": "ggufspec/compare@2"}', "ggufspec/compare@2, but this ggufspec reads ggufspec/compare@1"),
        ('{"schema": "ggufspec/compare@1", "cells": [', "not a complete JSON document"),
        ('{"schema": "ggufspec/compare@1"}', "field required"),
        ("", "is empty"),
    ],
)
def test_a_file_that_is_no_result_is_an_error_that_names_it(cli: Cli, kept: Path, content: str, words: str):
    bad, page = kept / "bad.json", kept / "page.html"
    bad.write_text(content)
    page.write_text("kept from before")
    done = cli("report", str(kept / "0-bench.json"), str(bad), "--html", str(page), "-y")
    assert done.code == 1
    assert str(bad) in plain(done.stderr)
    assert words in plain(done.stderr)
    assert "next: " in plain(done.stderr)
    assert page.read_text() == "kept from before"
    assert bad.read_text() == content


def test_a_file_is_overwritten_only_with_y(cli: Cli, kept: Path):
    page, result = kept / "page.html", kept / "0-bench.json"
    page.write_text("from before")
    done = cli("report", result, "--html", page)
    assert done.code == 2
    assert done.stderr == f"error: {page} exists already\n  next: add -y to overwrite it, or name another file\n"
    assert page.read_text() == "from before"
    assert cli("report", result, "--html", page, "-y").stderr == f"wrote {page}\n"
    assert page.read_text().startswith("<!doctype html>")
    page.write_text("")  # as mktemp leaves it
    assert cli("report", result, "--html", page).code == 0
    device = cli("report", result, "--html", "/dev/stdout")
    assert (device.code, device.stderr) == (0, "")
    assert "</html>" in device.stdout


def test_fresh_is_no_option_of_a_report(cli: Cli):
    assert cli("report", "--fresh").code == 2


def test_a_page_that_cannot_be_written_is_found_first(cli: Cli, kept: Path):
    done = cli("report", str(kept / "0-bench.json"), "--html", str(kept / "none" / "page.html"))
    assert done.code == 1
    assert "page.html cannot be written" in plain(done.stderr)
    assert done.stdout == ""


def test_a_reader_that_goes_away_costs_no_page(cli: Cli, kept: Path):
    page = kept / "page.html"
    child = cli.start("report", *sorted(kept.glob("*.json")), "--html", page, stdout=subprocess.PIPE)
    child.stdout.close()
    child.wait(60)
    assert "</html>" in page.read_text(encoding="utf-8")


def test_a_hostile_name_does_not_reach_the_terminal(cli: Cli, tmp_path: Path):
    path = tmp_path / "hostile.json"
    document = kept_results.bench(pair={"name": "\x1b]0;taken\x07[bold red]x[/]", "target": "t\r\n.gguf", "draft": "d"})
    path.write_text(json.dumps(kept_results.as_json(document)))
    done = cli("report", str(path), NO_COLOR="1")
    assert done.code == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "\x07" not in done.stdout
    assert "[bold red]x[/]" in done.stdout
