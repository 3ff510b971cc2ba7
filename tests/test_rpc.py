"""llama.cpp's RPC worker on loopback: a device that takes layers, on any machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
from processes import Cli, eventually

FLAGS = ("-p", "def f(", "-n", "16", "-ngl", "4", "-ngld", "0")
SERVE = "from ggufspec.llamacpp.devices import serve_rpc; serve_rpc('127.0.0.1:{port}', 1)"


def answers(port: int) -> bool:
    with closing(socket.socket()) as knock:
        return knock.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def worker() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """(endpoint, process) of a worker that answers."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE.format(port=port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert eventually(lambda: answers(port))
        yield f"127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def test_layers_go_to_the_worker(cli: Cli, worker: tuple[str, subprocess.Popen[bytes]]) -> None:
    done = cli("run", *FLAGS, "--rpc", worker[0], "--json")
    assert (done.code, done.stderr) == (0, "")
    statistics = done.document()["statistics"]
    assert (statistics["gpu_layers"], statistics["draft_gpu_layers"]) == (4, 0)
    assert statistics["tokens"] == 16


def test_strict_mode_is_kept_or_refused(cli: Cli, worker: tuple[str, subprocess.Popen[bytes]]) -> None:
    drafted = cli("run", *FLAGS, "--rpc", worker[0], "--strict", "--json")
    alone = cli("run", *FLAGS, "--rpc", worker[0], "--strict", "--no-draft", "--json")
    if drafted.code == 0:
        assert drafted.document()["tokens"] == alone.document()["tokens"]
    else:
        assert (drafted.code, alone.code) == (1, 1)
        assert "strict mode cannot be kept" in drafted.document()["error"]


def test_a_worker_that_dies_in_the_middle(cli: Cli, worker: tuple[str, subprocess.Popen[bytes]]) -> None:
    endless = ("-n", "100000", "-c", "100000", "--temp", "2", "--top-k", "0", "--top-p", "1", "--min-p", "0")
    arguments = ("run", *FLAGS[:2], *FLAGS[4:], *endless, "--rpc", worker[0])
    with cli.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.read(1)
        worker[1].kill()
        _, stderr = parent.communicate()
    assert parent.returncode == 1
    assert "error: " in stderr
    assert "  next: " in stderr
    assert "Traceback" not in stderr


def test_nobody_answers(cli: Cli) -> None:
    with closing(socket.socket()) as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        done = cli("run", *FLAGS, "--rpc", endpoint, "--json")
    assert done.code == 1
    assert f"no RPC worker answers at {endpoint}" in done.document()["error"]
    assert "ggml-rpc-server" in done.document()["hint"]
