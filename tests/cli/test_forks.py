"""A fork is what a started process would be: its streams, environment, folder, exit code and death."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forks
from tests.support.processes import ENDLESS, PATIENCE_S, SCRIPT, Cli, Finished

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="all is started elsewhere")
ASKED = ("run", "demo", "-p", "def f(", "-n", "4", "--strict")


def started(cli: Cli, *arguments: str, stdin: bytes = b"", **more: str) -> Finished:
    """The same command as a process of its own."""
    environment = cli.environment | more
    done = subprocess.run([SCRIPT, *arguments], input=stdin, capture_output=True, env=environment, cwd=cli.folder)
    return Finished(done.returncode, done.stdout.decode(), done.stderr.decode())


def is_fork(process: forks.Popen) -> bool:
    return process._server is not None


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        (("--version",), {}),
        (("plan", "--help"), {"COLUMNS": "80"}),
        (("run", "nonsense"), {}),
        (("run", "demo", "-p", "x", "-t", "many"), {}),
        (("run", "demo", "--json"), {"GGUFSPEC_THREADS": "-3"}),
        (("profiles", "show", "demo"), {"COLUMNS": "120"}),
    ],
)
def test_a_command_says_the_same(cli: Cli, arguments: tuple[str, ...], more: dict[str, str]) -> None:
    assert cli(*arguments, **more) == started(cli, *arguments, **more)


def test_an_answer_is_the_same(cli: Cli) -> None:
    assert cli(*ASKED).stdout == started(cli, *ASKED).stdout
    typed = ("run", "demo", "-p", "-", "-n", "4", "--json")
    forked, real = cli(*typed, stdin="größe = ["), started(cli, *typed, stdin="größe = [".encode())
    assert forked.document()["tokens"] == real.document()["tokens"]


def test_nothing_of_one_fork_is_in_the_next(cli: Cli) -> None:
    (cli.folder / "here.txt").write_text("def f(")
    first = cli("run", "-f", "here.txt", "-n", "2", "--json", GGUFSPEC_DRAFTER="lookup").document()
    second = cli("run", "-f", "here.txt", "-n", "2", "--json").document()
    assert (first["settings"]["drafter"], second["settings"]["drafter"]) == ("lookup", "both")
    elsewhere = Cli(cli.folder / "..", cli.environment)
    assert elsewhere("run", "-f", "here.txt", "-n", "2").code != 0


def test_a_signal_ends_a_fork_and_its_children(cli: Cli) -> None:
    words = [SCRIPT, "run", *ENDLESS]
    with forks.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=cli.environment) as process:
        assert is_fork(process)
        assert process.stdout.read(1)
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert process.stdout.read() is not None  # to its end: nobody holds the other end any more
    assert not Path(f"/proc/{process.pid}").exists()


def test_ctrl_c_reaches_a_fork(cli: Cli) -> None:
    words = [SCRIPT, "run", *ENDLESS]
    with forks.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=cli.environment) as process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert b"interrupted" in process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 130


def test_a_client_that_dies_takes_nobody_along(cli: Cli) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    request = {"words": [str(SCRIPT), "--version"], "environment": {}, "folder": "/", "session": False}
    data = json.dumps(request).encode()
    for said in (b"", struct.pack("!I", len(data)), struct.pack("!I", len(data)) + data):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(forks._address or forks._start())
            if said:
                socket.send_fds(client, [said], [nowhere] * 3)
    os.close(nowhere)
    assert cli("--version").code == 0


@pytest.mark.parametrize("variable", ["PYTHONPATH", "OMP_NUM_THREADS", "LD_LIBRARY_PATH"])
def test_what_an_interpreter_reads_as_it_starts_wants_one(cli: Cli, variable: str) -> None:
    words, quiet = [SCRIPT, "--version"], subprocess.DEVNULL
    with forks.Popen(words, stdout=quiet, env=cli.environment | {variable: "1"}) as process:
        assert not is_fork(process)
    with forks.Popen(words, stdout=quiet, env=cli.environment) as process:
        assert is_fork(process)
    with forks.Popen([sys.executable, "-c", ""], stdout=quiet) as process:
        assert not is_fork(process)
