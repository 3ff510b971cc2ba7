"""Child processes for the tests of the command line."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pexpect
import psutil

from tests.support import forks
from tests.support.forks import SCRIPT

PATIENCE_S = 180.0
# What a command says of other programs at work: the tests run beside each other, and on machines that have more to do.
_BUSY = re.compile(r"^(other programs used|the machine was busy while) .*\n", re.MULTILINE)
# Arguments of an answer that does not end by itself
ENDLESS = (
    "-p",
    "def f(",
    "-n",
    "1000000",
    "-c",
    "1000000",
    "--temp",
    "2",
    "--top-k",
    "0",
    "--top-p",
    "1",
    "--min-p",
    "0",
)


@dataclass(frozen=True)
class Finished:
    """A command that has ended. What it said of other programs at work is not in ``stderr``."""

    code: int
    stdout: str
    stderr: str

    def document(self) -> dict[str, Any]:
        """Standard output as one JSON document."""
        parsed: dict[str, Any] = json.loads(self.stdout)
        return parsed


@dataclass(frozen=True)
class Cli:
    """``cli("run", "-p", "x")`` runs the console script to its end; keywords are environment variables.

    It is a fork, and so are its children: as real, and without the seconds that Python takes to start and import (see
    :mod:`forks`).
    """

    folder: Path
    environment: dict[str, str]

    def __call__(self, *arguments: str | Path, stdin: str | bytes = b"", **more: str) -> Finished:
        pipe = subprocess.PIPE
        words, environment = [SCRIPT, *arguments], self.environment | more
        with forks.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd=self.folder) as process:
            try:
                data = stdin.encode() if isinstance(stdin, str) else stdin
                stdout, stderr = process.communicate(data, timeout=PATIENCE_S)
            except BaseException:
                process.kill()
                raise
        return Finished(process.returncode, stdout.decode(), _BUSY.sub("", stderr.decode()))

    def start(
        self, *arguments: str | Path, first: Callable[[], None] | None = None, **pipes: Any
    ) -> subprocess.Popen[str]:
        """Start the console script and leave it running.

        Args:
            arguments: of the command line.
            first: called in the child before the script, which is a process of its own then.
            pipes: keywords of ``Popen``.
        """

        def prepare() -> None:
            _heed_signals()
            if first is not None:
                first()

        words = [SCRIPT, *arguments]
        if first is None and forks.may_fork([str(SCRIPT)], self.environment):
            return forks.Popen(words, env=self.environment, cwd=self.folder, text=True, **pipes)
        return subprocess.Popen(words, env=self.environment, cwd=self.folder, text=True, preexec_fn=prepare, **pipes)

    def terminal(self, *arguments: str, columns: int = 100, **more: str) -> pexpect.spawn[str]:
        """Start the console script in a pseudo-terminal."""
        environment = self.environment | more
        kind = forks.Terminal if forks.may_fork([str(SCRIPT)], environment) else pexpect.spawn
        return kind(
            str(SCRIPT),
            list(arguments),
            env=environment,  # type: ignore[arg-type]
            cwd=str(self.folder),
            dimensions=(40, columns),
            encoding="utf-8",
            timeout=PATIENCE_S,
            preexec_fn=_heed_signals,
        )


def _heed_signals() -> None:
    """In the child: nohup ignores SIGHUP, a shell's background jobs SIGINT, and both are inherited."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def rest(child: pexpect.spawn[str]) -> str:
    """What is left to come from a terminal; its exit code is in ``exitstatus`` then."""
    child.expect(pexpect.EOF)
    child.close()
    return child.before or ""


def plain(text: str) -> str:
    """A terminal's text without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")


def workers(pid: int) -> list[psutil.Process]:
    """The child processes in which ``pid`` runs llama.cpp."""
    return [*psutil.Process(pid).children(recursive=True), *forks.alive(pid)]


def busy_s(process: psutil.Process) -> float:
    """CPU seconds of a process so far; 0 of one that has ended."""
    try:
        return process.cpu_times().user
    except psutil.NoSuchProcess:
        return 0.0


def all_end(processes: list[psutil.Process]) -> bool:
    """Whether all end within a test's patience."""
    return not psutil.wait_procs(processes, timeout=PATIENCE_S)[1]


def eventually(condition: Callable[[], object]) -> bool:
    """Whether ``condition`` comes true within a test's patience."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return False


@contextmanager
def rpc_worker(threads: int = 1, devices: tuple[str, ...] = ("CPU",)) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """(endpoint, process) of an RPC worker on loopback that answers; it ends with the block.

    A card for llama.cpp for each of ``devices``.
    """
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    serve = f"from ggufspec.llamacpp.devices import serve_rpc; serve_rpc('127.0.0.1:{port}', {threads}, {devices!r})"
    process = subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def answers() -> bool:
        with closing(socket.socket()) as knock:
            return knock.connect_ex(("127.0.0.1", port)) == 0

    try:
        assert eventually(answers)
        yield f"127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def read_only_its_beginning(command: str, cli: Cli) -> None:
    """A shell's command whose reader goes away ends without a word about it."""
    done = subprocess.run(
        ["sh", "-c", f"{command} | head -c 10"],
        capture_output=True,
        text=True,
        env=cli.environment,
        timeout=PATIENCE_S,
    )
    assert len(done.stdout) > 0
    for word in ("Traceback", "Exception ignored", "BrokenPipe"):
        assert word not in done.stderr
