"""``ggufspec trace`` as a user types it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from tests.support import traced_lines
from tests.support.processes import ENDLESS, Cli, all_end, plain, rest, workers

ASK = ("-p", "import os\n\n\ndef walk(", "-n", "12", "--draft-policy", "fixed", "--draft-max", "4")
ESCAPE = r'root ::= "\x1B[31mred\x07"'


def documents(text: str) -> list[dict[str, Any]]:
    """Each line as a document."""
    return [json.loads(line) for line in text.splitlines()]


# ---- for people


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.full)])
def test_rounds_are_tables_that_keep_to_the_terminal(cli: Cli, columns: int) -> None:
    child = cli.terminal("trace", "demo", *ASK, columns=columns)
    seen = rest(child)
    assert child.exitstatus == 0
    assert "\x1b[1mfirst token: from the prompt's batch" in seen
    assert "\x1b[1mround 1: " in seen
    assert "\x1b[32maccepted" in seen
    text = plain(seen)
    assert max(map(cell_len, text.splitlines())) <= columns
    heads = re.findall(
        r"^round (\d+): (\d+) drafted, (\d+) accepted, draft [\d.]+ ms, verify [\d.]+ ms", text, re.MULTILINE
    )
    assert [int(head[0]) for head in heads] == list(range(1, len(heads) + 1))
    for _, drafted, kept in heads:
        assert 0 <= int(kept) <= int(drafted) <= 4
    assert len(re.findall(r"^ \d draft ", text, re.MULTILINE)) + len(
        re.findall(r"^ \d lookup ", text, re.MULTILINE)
    ) == sum(int(head[1]) for head in heads)
    assert len(re.findall(r"^ \+ target ", text, re.MULTILINE)) > len(heads)
    assert "draft's: " in text
    assert "written by: " in text
    assert re.search(r"12 tokens, [\d.]+ tokens/s, (\d+ of \d+|\d+%) accepted", text)


def test_without_a_terminal_there_is_no_colour_and_the_text_is_run_s(cli: Cli) -> None:
    done = cli("trace", "demo", *ASK, COLUMNS="80")
    assert done.code == 0
    assert "\x1b" not in done.stdout
    assert max(map(cell_len, done.stdout.splitlines())) <= 80
    assert cli("run", "demo", *ASK).stdout.strip() in done.stdout
    assert "tokens/s" in done.stderr
    assert "tokens/s" not in done.stdout


def test_no_colour_can_be_asked_for(cli: Cli) -> None:
    seen = rest(cli.terminal("trace", "demo", *ASK, "-n", "4", NO_COLOR="1"))
    assert not re.search(r"\x1b\[[\d;]*3[0-7]", seen)
    assert " accepted" in seen or " rejected" in seen


def test_only_some_rounds_and_shorter(cli: Cli) -> None:
    done = cli("trace", "demo", *ASK, "--rounds", "2-3", "--likeliest", "0")
    assert re.findall(r"^round (\d+)", done.stdout, re.MULTILINE) == ["2", "3"]
    assert "draft's: " not in done.stdout
    assert "accepted if it is the target's own choice" in done.stdout
    assert "written by: " in done.stdout


@pytest.mark.parametrize(
    ("accept", "words"),
    [
        ("top-k:3", "one of its 3 most likely tokens (lossy)"),
        ("typical:0.3", "its probability exceeds min(0.3, √0.3 · exp(−entropy)) (lossy)"),
        ("residual", "uniform < min(1, p / q)"),
    ],
)
def test_the_rule_is_told(cli: Cli, accept: str, words: str) -> None:
    done = cli("trace", "demo", *ASK, "--accept", accept, "-n", "4", COLUMNS="200")
    assert words in done.stdout


def test_the_target_alone(cli: Cli) -> None:
    done = cli("trace", "demo", *ASK, "-n", "3", "--no-draft")
    assert (
        len(re.findall(r"^round \d: nothing drafted, verify", done.stdout, re.MULTILINE)) == 2
    )  # behind the first token
    assert "written by: target 3" in done.stdout


# ---- for programs


@pytest.mark.parametrize("accept", ["exact", "residual", "top-k:2", "typical:0.3"])
@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_every_line_gives_its_decisions(cli: Cli, accept: str, temperature: str) -> None:
    how = (*ASK, "--accept", accept, "--temp", temperature, "-s", "5", "-n", "24", "--json")
    done = cli("trace", "demo", *how)
    assert (done.code, done.stderr) == (0, "")
    *rounds, last = documents(done.stdout)
    for number, line in enumerate(rounds):
        assert (line["number"], line["rule"], line["temperature"], line["seed"]) == (
            number,
            accept,
            float(temperature),
            5,
        )
        traced_lines.check(line)
        assert all(place["text"] for place in line["drafted"])
    assert last["schema"] == "ggufspec/trace@1"
    assert last["rounds"] == len(rounds) - 1  # without the first token's
    assert "".join(token["text"] for token in last["tokens"]) == last["text"]
    assert [token["token"] for token in last["tokens"]] == [token for line in rounds for token in line["emitted"]]
    assert [token["round"] for token in last["tokens"]] == [line["number"] for line in rounds for _ in line["emitted"]]
    sources = [
        source
        for line in rounds
        for source in (*(place["drafter"] for place in line["drafted"][: line["accepted"]]), line["added"]["source"])
    ]
    assert [token["source"] for token in last["tokens"]] == sources
    assert last["statistics"]["drafted"] == sum(len(line["drafted"]) for line in rounds)
    alone = cli("run", "demo", *how).document()
    assert (last["text"], last["stop_reason"]) == (alone["text"], alone["stop_reason"])


def test_with_a_grammar(cli: Cli) -> None:
    done = cli("trace", "demo", *ASK, "--grammar", 'root ::= [a-c]+ " = " [0-9]+', "--json")
    assert done.code == 0
    *rounds, last = documents(done.stdout)
    assert re.match(r"[a-c]+( (= ?)?)?\d*", last["text"])
    for line in rounds:
        traced_lines.check(line)
        assert line["grammar"]
    rows = [
        row
        for line in rounds
        for row in (line["added"]["target"], *(place["draft"] for place in line["drafted"]))
        if row
    ]
    assert any(not one["permitted"] for row in rows for one in row["likeliest"])


def test_only_some_lines(cli: Cli) -> None:
    *rounds, last = documents(cli("trace", "demo", *ASK, "--rounds", "3-", "--json").stdout)
    assert [line["number"] for line in rounds] == list(range(3, last["rounds"] + 1))


# ---- bad input, and what comes of it


@pytest.mark.parametrize("rounds", ["0", "3-2", "x", "-4", "1,2"])
def test_rounds_that_are_none(cli: Cli, rounds: str) -> None:
    done = cli("trace", "demo", *ASK, f"--rounds={rounds}")
    assert done.code == 2
    assert "does not name rounds" in done.stderr


def test_no_prompt(cli: Cli) -> None:
    done = cli("trace", "demo", "--json")
    assert done.code == 2
    assert documents(done.stdout)[0]["error"] == "there is no prompt"
    assert "-p" in done.stderr


def test_a_failure_is_a_line_of_json(cli: Cli) -> None:
    done = cli("trace", "-m", "missing.gguf", *ASK, "--json")
    assert done.code == 1
    (error,) = documents(done.stdout)
    assert error["schema"] == "ggufspec/error@1"
    assert "missing.gguf" in error["error"]


def test_a_page_that_cannot_be_written_is_told_before_the_run(cli: Cli) -> None:
    done = cli("trace", "demo", *ASK, "--html", "no/such/folder/page.html")
    assert done.code == 1
    assert "cannot be written" in done.stderr
    assert done.stdout == ""


def test_control_characters_reach_no_terminal_and_no_page(cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = cli("trace", "demo", "-p", "x\x1b]0;taken\x07", "-n", "16", "--grammar", ESCAPE, "--html", str(page))
    assert done.code == 0
    assert "\x1b" not in done.stdout + done.stderr
    assert "\x07" not in done.stdout
    assert "␛[31mred␇" in done.stdout
    assert "\\x1b" in done.stdout
    html = page.read_text(encoding="utf-8")
    assert "\x1b" not in html
    assert "␛" in html


def test_a_page(cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = cli("trace", "demo", *ASK, "--html", str(page), "--rounds", "1", "-q")
    assert (done.code, done.stderr) == (0, "")
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert "<script" not in html
    assert 'id="r2"' in html  # all rounds are there, whichever were printed


def test_a_reader_that_leaves(cli: Cli) -> None:
    with cli.start("trace", "demo", *ENDLESS, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        traced_lines.check(json.loads(parent.stdout.readline()))
        running = workers(parent.pid)
        parent.stdout.close()
        parent.wait(60)
        assert "Traceback" not in parent.stderr.read()
    assert parent.returncode == 1
    assert all_end(running)


def test_ctrl_c_keeps_the_rounds_so_far(cli: Cli) -> None:
    child = cli.terminal("trace", "demo", *ENDLESS)
    child.expect("round 3: ")
    running = workers(child.pid)
    child.sendintr()
    left = plain(rest(child))
    assert child.exitstatus == 130
    assert "written by: " in left
    assert "error: interrupted" not in left
    assert "interrupted" in left
    assert "Traceback" not in left
    assert all_end(running)


def test_ctrl_c_with_json_ends_with_the_summary(cli: Cli) -> None:
    with cli.start("trace", "demo", *ENDLESS, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        first = [parent.stdout.readline() for _ in range(3)]
        parent.send_signal(signal.SIGINT)
        stdout, stderr = parent.stdout.read(), parent.stderr.read()  # communicate would lose what was read ahead
    assert parent.returncode == 130
    *rounds, last = documents("".join(first) + stdout)
    for line in rounds:
        traced_lines.check(line)
    assert (last["schema"], last["interrupted"], last["rounds"]) == ("ggufspec/trace@1", True, len(rounds) - 1)
    assert len(rounds) >= 3
    assert "Traceback" not in stderr


def test_a_token_s_two_probabilities_say_why_they_differ(cli: Cli) -> None:
    """p and q are under the sampling settings, the listed percentages before them; greedy, both are before them."""
    flags = ("-p", "def f(", "-n", "3", "--draft-policy", "fixed", "--likeliest", "2")
    text = " ".join(cli("trace", "demo", *flags, "--temp", "0.8").stdout.split())
    assert "under the sampling settings; percentages are before sampling" in text
    assert "draft's before sampling: " in text
    assert "target's before sampling: " in text
    text = " ".join(cli("trace", "demo", *flags).stdout.split())
    assert "probability of it, before sampling" in text
    assert "draft's: " in text
