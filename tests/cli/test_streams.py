"""Standard streams that are closed, full, gone or not UTF-8: no traceback, and an exit code that means something."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import PATIENCE_S, SCRIPT, Cli

PROMPT = ("-p", "größe = ", "-n", "4")
POSIX = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
# Each with the exit code that it ends with when nothing is wrong with its streams.
COMMANDS = {
    "version": (0, "--version"),
    "help": (0, "run", "--help"),
    "plan": (0, "plan", "demo"),
    "run": (0, "run", *PROMPT),
    "run --json": (0, "run", *PROMPT, "--json"),
    "run -v": (0, "run", *PROMPT, "-v"),
    "trace": (0, "trace", *PROMPT),
    "export": (0, "export", "demo"),
    "chat": (2, "chat", "demo"),
    "a prompt from standard input": (2, "run", "-p", "-"),
    "a question": (2, "profiles", "new", "mine"),
    "a typo": (2, "rnu"),
}
QUICK = ("version", "chat", "a prompt from standard input")
commands = pytest.mark.parametrize(
    "case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in COMMANDS]
)


def closing(*numbers: int) -> Callable[[], None]:
    """Closes streams in the child before the script begins."""

    def close() -> None:
        for number in numbers:
            os.close(number)

    return close


def finished(cli: Cli, case: str, *closed: int, **streams: object) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a command some of whose streams are closed."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    first = closing(*closed) if closed else None
    with cli.start(*map(str, COMMANDS[case][1:]), first=first, encoding="utf-8", **pipes) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    for text in (out or "", err or ""):
        assert "Traceback" not in text
        assert "Exception ignored" not in text
    return process.returncode, out, err


@commands
@pytest.mark.parametrize("closed", [(1,), pytest.param((2,), marks=pytest.mark.full), (0,), (0, 1, 2)])
def test_a_closed_stream_is_the_null_device(cli: Cli, case: str, closed: tuple[int, ...]) -> None:
    code, out, err = finished(cli, case, *closed)
    assert code == COMMANDS[case][0], err
    assert not (out if 1 in closed else "")
    if code == 0 and 1 not in closed:
        assert out
    if code == 2 and 2 not in closed:
        assert err.startswith("error: ")


@pytest.mark.full
@commands
def test_a_full_standard_output_is_told(cli: Cli, case: str) -> None:
    with Path("/dev/full").open("w") as full:
        code, _, err = finished(cli, case, stdout=full)
    assert code == (COMMANDS[case][0] or 1)
    assert "No space left on device" in err or code == 2


@pytest.mark.full
@commands
def test_what_cannot_be_said_on_standard_error_is_no_reason_to_fail(cli: Cli, case: str) -> None:
    with Path("/dev/full").open("w") as full:
        code, out, _ = finished(cli, case, stderr=full)
    assert code == COMMANDS[case][0]
    assert bool(out) == (code == 0)


@pytest.mark.full
def test_a_reader_of_standard_error_that_goes_away_costs_nothing(cli: Cli) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        code, out, _ = finished(cli, "run", stderr=writer)
    finally:
        os.close(writer)
    assert code == 0
    assert out


# ---- encodings ------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_what_an_encoding_lacks_is_replaced(cli: Cli) -> None:
    done = cli("plan", "demo", PYTHONIOENCODING="ascii")
    assert (done.code, done.stderr) == (0, "")
    assert "~ " in done.stdout  # ≈ 103
    assert "? " not in done.stdout
    assert done.stdout.isascii()


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "latin-1"},
        *(pytest.param(one, marks=pytest.mark.full) for one in ({"PYTHONIOENCODING": "ascii"}, POSIX)),
    ],
)
def test_json_is_whole_in_any_encoding(cli: Cli, environment: dict[str, str]) -> None:
    document = cli("trace", *PROMPT, "--json", **environment)
    assert document.code == 0, document.stderr
    last = json.loads(document.stdout.splitlines()[-1])
    assert last["prompt"] == "größe = "


@pytest.mark.full
@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "latin-1"}, {"PYTHONIOENCODING": "ascii"}, POSIX])
def test_no_command_minds_the_encoding(cli: Cli, tmp_path: Path, environment: dict[str, str]) -> None:
    """What is written to files is UTF-8."""
    table, page = tmp_path / "table.md", tmp_path / "page.html"
    bench = ("bench", "demo", "-r", "1", *PROMPT, "--export-markdown", str(table), "--html", str(page))
    lines = [("--help",), ("plan", "demo"), ("run", *PROMPT), ("trace", *PROMPT), bench, ("profiles", "list")]
    for arguments in (*lines, ("doctor", "--quick"), ("export", "demo"), ("rnu",)):
        words, variables = [SCRIPT, *arguments], cli.environment | environment
        done = subprocess.run(words, capture_output=True, env=variables, cwd=cli.folder)
        assert done.returncode == (2 if arguments == ("rnu",) else 0), done.stderr
        assert b"Traceback" not in done.stderr
    assert "×" in page.read_text(encoding="utf-8") + table.read_text(encoding="utf-8")


@pytest.mark.full
def test_a_name_that_is_not_of_the_locale(cli: Cli, draft: Path, tmp_path: Path) -> None:
    """In a locale of ASCII, and of bytes that are no UTF-8: llama.cpp opens the file that is named."""
    for name in ("größe.gguf", os.fsdecode(b"\xff\xe9.gguf")):
        shutil.copyfile(draft, tmp_path / name)
    done = cli("run", "-m", tmp_path / "größe.gguf", *PROMPT, "--json", **POSIX)
    assert done.code == 0, done.stderr
    done = cli("bench", "-m", tmp_path / os.fsdecode(b"\xff\xe9.gguf"), "--drafter", "lookup", "-r", "1", *PROMPT)
    assert done.code == 0, done.stderr
    assert "Traceback" not in done.stderr
