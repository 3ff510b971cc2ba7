"""Ctrl-C, kills, and readers that go away: what was measured stays, nothing is left running."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic_core import core_schema

from ggufspec.schema.codec import dump, load
from tests.support.processes import (
    ENDLESS,
    SCRIPT,
    Cli,
    all_end,
    busy_s,
    eventually,
    plain,
    read_only_its_beginning,
    rest,
    workers,
)

ENDLESS_BENCH = ("bench", "demo", "-p", "def f(", "-n", "8", "-r", "1000000")


def test_ctrl_c_keeps_what_was_streamed(cli: Cli) -> None:
    cli("run", "demo", "-p", "def", "-n", "1")  # keeps the headers: reading them is shown, too
    child = cli.terminal("run", *ENDLESS)
    child.expect_exact("\x1b[?25h")  # what was said of loading is gone
    seen = "".join(child.read(1) for _ in range(40))
    running = workers(child.pid)
    assert running
    child.sendintr()
    left = plain(rest(child))
    assert child.exitstatus == 130
    assert len(seen) == 40
    assert " tokens/s, " in left
    assert "error: interrupted" not in left
    assert "interrupted" in left
    assert "Traceback" not in left
    assert all_end(running)


def test_ctrl_c_of_a_run_with_json_gives_the_part_that_is_there(cli: Cli) -> None:
    with cli.start("run", *ENDLESS, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert eventually(lambda: any(busy_s(worker) > 2 for worker in workers(parent.pid)))
        running = workers(parent.pid)
        parent.send_signal(signal.SIGINT)
        stdout, stderr = parent.communicate()
    assert parent.returncode == 130
    document = json.loads(stdout)
    assert document["schema"] in ("ggufspec/run@1", "ggufspec/error@1")
    if document["schema"] == "ggufspec/run@1":
        assert document["interrupted"] is True
        assert document["statistics"]["tokens"] == len(document["tokens"]) > 0
    assert "Traceback" not in stderr
    assert all_end(running)


def test_ctrl_c_of_a_bench_before_anything_is_measured(cli: Cli) -> None:
    child = cli.terminal(*ENDLESS_BENCH)
    child.expect("loading")
    child.sendintr()
    left = plain(rest(child))
    assert child.exitstatus == 130
    assert "interrupted before anything was measured" in left
    assert "Traceback" not in left
    assert "tokens/s" not in left


def test_ctrl_c_of_a_bench_shows_the_trials_that_are_done(cli: Cli) -> None:
    child = cli.terminal(*ENDLESS_BENCH, "-n", "64")  # so that few trials are done when the signal comes
    child.expect(r" ([3-9]|1\d)/2000000")  # an answer of each: two, then the draft's own, which is not counted
    child.sendintr()
    left = plain(rest(child))
    assert child.exitstatus == 130
    for row in ("target-only", "draft-only", "speculative"):
        assert row in left
    assert "No verdict" in left
    assert "error: interrupted" not in left
    assert "interrupted; the results so far are shown" in left
    assert "Traceback" not in left


def test_ctrl_c_of_a_bench_with_json(cli: Cli, tmp_path: Path) -> None:
    kept = tmp_path / "part.json"
    arguments = (*ENDLESS_BENCH, "--json", "--export-json", str(kept))
    child = cli.terminal("bench", *arguments[1:])
    child.expect(r" ([3-9]|\d\d+)/2000000")  # as above
    child.sendintr()
    left = plain(rest(child))
    assert child.exitstatus == 130
    assert "Traceback" not in left
    document = json.loads(kept.read_text())
    assert document["schema"] == "ggufspec/bench@1"
    assert document["interrupted"] is True
    assert all(document["runs"].values())


def test_ctrl_c_is_acknowledged_at_once_where_stopping_takes_long(cli: Cli) -> None:
    child = cli.terminal("plan", "demo", "--calibrate")
    child.expect("measuring this machine")
    began = time.monotonic()
    child.sendintr()
    child.expect(["stopping…", "interrupted"])  # the latter if it could stop at once
    assert time.monotonic() - began < 1  # 0.1 s on an idle machine
    left = plain(child.after + rest(child))
    assert child.exitstatus == 130
    assert left.rstrip().splitlines()[-1] == "interrupted"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_no_orphan_when_the_parent_is_killed(cli: Cli, how: signal.Signals) -> None:
    with cli.start("run", *ENDLESS, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        assert parent.stdout.read(1)
        running = workers(parent.pid)
        assert running
        parent.send_signal(how)
        assert parent.wait() == (-how if how == signal.SIGKILL else 128 + how)
    assert all_end(running)


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.full)])
def test_a_signal_leaves_the_terminal_as_it_was(cli: Cli, how: signal.Signals) -> None:
    child = cli.terminal(*ENDLESS_BENCH)
    child.expect(re.escape("\x1b[?25l"))  # the bar hides the cursor
    child.expect("loading")
    running = workers(child.pid)
    child.kill(how)
    left = rest(child)
    assert "\x1b[?25h" in left
    assert "Traceback" not in left
    assert child.exitstatus == 128 + how
    assert all_end(running)


def test_a_chat_at_its_prompt_leaves_the_terminal_as_it_was(cli: Cli) -> None:
    child = cli.terminal("chat", "demo", "-c", "512")
    before = termios.tcgetattr(child.child_fd)
    child.expect("/help lists commands")
    assert eventually(lambda: termios.tcgetattr(child.child_fd) != before)  # keys are read one by one
    running = workers(child.pid)
    child.kill(signal.SIGTERM)
    assert eventually(lambda: termios.tcgetattr(child.child_fd) == before)
    assert "Traceback" not in rest(child)
    assert child.exitstatus == 128 + signal.SIGTERM
    assert all_end(running)


@pytest.mark.full
def test_nohup_is_heeded(cli: Cli) -> None:
    with cli.start(
        "run",
        *ENDLESS,
        first=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.read(1)
        parent.send_signal(signal.SIGHUP)
        assert parent.stdout.read(100)
        assert parent.poll() is None
        parent.terminate()


BESIDE = ("-p", "def f(", "-n", "2000")


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", *BESIDE),
        ("chat", "demo"),
        ("compare", "-m", "t.gguf", "-md", "d.gguf", *BESIDE),
        ("doctor",),
        ("plan", "demo", "--calibrate"),
        ("quantize", "t.gguf", "--types", "Q4_0", "-o", "."),
        ("rehearse", "demo"),
        ("run", *BESIDE),
        ("trace", *BESIDE),
        ("tune", *BESIDE),
        ("verify", "demo"),
        ("worker", "--port", "0"),
    ],
    ids=lambda arguments: str(arguments[0]),
)
def test_no_orphan_of_any_command(cli: Cli, target: Path, draft: Path, arguments: tuple[str, ...]) -> None:
    (cli.folder / "t.gguf").symlink_to(target)
    (cli.folder / "d.gguf").symlink_to(draft)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with cli.start(*arguments, **pipes) as parent:
        assert parent.stdin is not None
        parent.stdin.write("def f(\n")  # for the chat
        parent.stdin.flush()
        assert eventually(lambda: workers(parent.pid))
        running = workers(parent.pid)
        parent.kill()
        assert parent.wait() == -signal.SIGKILL
    assert all_end(running)


@pytest.mark.parametrize("more", [(), pytest.param(("--json", "-n", "8"), marks=pytest.mark.full)])
def test_a_reader_that_goes_away(cli: Cli, more: tuple[str, ...]) -> None:
    command = shlex.join([str(SCRIPT), "run", *ENDLESS, *more])
    read_only_its_beginning(command, cli)


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


@pytest.mark.parametrize("do", [lambda kind: load(kind, 1), lambda kind: dump(1, kind)])
@pytest.mark.parametrize(
    ("number", "handler", "raised"),
    [(signal.SIGINT, signal.default_int_handler, KeyboardInterrupt), (signal.SIGTERM, _leave, SystemExit)],
)
def test_a_signal_waits_for_pydantic_and_is_not_lost(
    do: Callable[[type], object],
    number: int,
    handler: Callable[[int, object], None],
    raised: type[BaseException],
    request: pytest.FixtureRequest,
) -> None:
    """Pydantic-core drops an interrupt that it meets, or makes an error of its own of it."""
    before = signal.signal(number, handler)
    request.addfinalizer(lambda: signal.signal(number, before))
    done = []

    def interrupted(value: int) -> int:
        os.kill(os.getpid(), number)
        done.append(value)
        return value

    class Kind:
        @classmethod
        def __get_pydantic_core_schema__(cls, *_: object) -> core_schema.CoreSchema:
            output = core_schema.plain_serializer_function_ser_schema(interrupted)
            return core_schema.no_info_plain_validator_function(interrupted, serialization=output)

    with pytest.raises(raised):
        do(Kind)
    assert done == [1]
    assert signal.getsignal(number) is handler
