"""llama.cpp's RPC worker on loopback: a device that takes layers, on any machine."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.processes import Cli, rpc_worker

FLAGS = ("-p", "def f(", "-n", "16", "-ngl", "4", "-ngld", "0")


@pytest.fixture
def worker() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """(endpoint, process) of a worker that answers."""
    with rpc_worker() as found:
        yield found


def test_layers_go_to_the_worker(cli: Cli, worker: tuple[str, subprocess.Popen[bytes]]) -> None:
    done = cli("run", *FLAGS, "--rpc", worker[0], "--json")
    assert (done.code, done.stderr) == (0, "")
    statistics = done.document()["statistics"]
    assert (statistics["gpu_layers"], statistics["gpu_layers_draft"]) == (4, 0)
    assert statistics["tokens"] == 16


def test_more_layers_than_there_are_are_all(cli: Cli, worker: tuple[str, subprocess.Popen[bytes]]) -> None:
    flags = ("-n", "4", "-ngl", "99", "-ngld", "99", "-ub", "96", "--rpc", worker[0], "--json")
    statistics = cli("run", "-p", "def f(", *flags).document()["statistics"]
    assert (statistics["gpu_layers"], statistics["gpu_layers_draft"]) == (9, 3)
    bench = cli("bench", "demo", "-p", "def f(", *flags, "-r", "1").document()
    run = bench["runs"]["speculative"]
    assert (run["gpu_layers"], run["gpu_layers_draft"]) == (9, 3)
    assert bench["settings"]["ubatch_size"] == 96


TIMED = """
import sys
from ggufspec import DecoderOptions, Placement, SpeculativeDecoder, demo_pair
from ggufspec.llamacpp.devices import add_rpc_workers

add_rpc_workers(sys.argv[1:])
with SpeculativeDecoder(demo_pair()[0], None, DecoderOptions(Placement(-1), ctx_size=1024, threads=1)) as decoder:
    for _ in range(2):
        list(decoder.generate([7] * 900, max_tokens=4))
print(decoder.statistics.prompt_s, decoder.rounds[0].verify_s)
"""


def test_a_prompt_s_time_is_not_the_first_token_s(worker: tuple[str, subprocess.Popen[bytes]]) -> None:
    """A device works on when llama.cpp has returned: 900 tokens take longer than one, and count as the prompt's."""
    done = subprocess.run([sys.executable, "-c", TIMED, worker[0]], capture_output=True, text=True, check=True)
    prompt_s, first_s = map(float, done.stdout.split())
    assert prompt_s > 5 * first_s


def test_strict_mode_is_kept_or_refused(cli: Cli, worker: tuple[str, subprocess.Popen[bytes]]) -> None:
    drafted = cli("run", *FLAGS, "--rpc", worker[0], "--strict", "--json")
    alone = cli("run", *FLAGS, "--rpc", worker[0], "--strict", "--no-draft", "--json")
    if drafted.code == 0:
        assert drafted.document()["tokens"] == alone.document()["tokens"]
    else:
        assert (drafted.code, alone.code) == (1, 1)
        assert "strict mode is impossible" in drafted.document()["error"]


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


@pytest.mark.parametrize("command", [("run", "-p", "x"), ("plan",)])
def test_nonsense_from_a_peer_names_the_peer(cli: Cli, command: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as peer:
        endpoint = f"127.0.0.1:{peer.getsockname()[1]}"
        threading.Thread(target=lie, args=(peer,), daemon=True).start()
        done = cli(*command, "--rpc", endpoint, "--json")
    assert done.code == 1
    assert "Remote RPC server crashed or returned malformed response" in done.document()["error"]
    assert f"`ggufspec worker` at {endpoint}" in done.document()["hint"]


def lie(peer: socket.socket) -> None:
    """Answer whoever comes with zeros."""
    while True:
        try:
            client = peer.accept()[0]
        except OSError:
            return
        with client, contextlib.suppress(OSError):
            if client.recv(65536):  # none of who only knocks
                client.sendall(bytes(4096))


def test_a_bench_measures_the_rival_at_its_own_placement(cli: Cli, worker: tuple[str, subprocess.Popen[bytes]]) -> None:
    """Four target layers are asked for next to the draft; target-only may have all of them, and has."""
    done = cli("bench", "demo", *FLAGS, "--draft-policy", "fixed", "--rpc", worker[0], "-r", "1", "--json", "-q")
    assert (done.code, done.stderr) == (0, "")
    document = done.document()
    runs = document["runs"]
    planned = document["plan"]["planned"]["options"]["target_only"]["target"]["gpu_layers"]
    assert runs["target_only"]["gpu_layers"] == planned != 4
    assert runs["speculative"]["gpu_layers"] == runs["target_only_at_pair"]["gpu_layers"] == 4
    assert f"its own best placement, {planned}/9 layers against 4/9" in document["verdict"]["why"]
    whole = next(one for one in document["by_length"] if one["tokens"] == document["answer_tokens"])
    assert document["speedup"]["median"] == pytest.approx(whole["target_only_s"] / whole["speculative_s"])
    plan = cli("plan", "demo", "--json").document()
    assert plan["settings"]["acceptance_from"].endswith("tokens measured here")


def test_the_plan_places_a_run_by_itself(cli: Cli, worker: tuple[str, subprocess.Popen[bytes]]) -> None:
    flags = ("--rpc", worker[0], "--json")
    plan = cli("plan", *flags).document()
    assert plan["devices"][0]["name"] == "RPC0"
    pair = plan["options"]["speculative"]
    statistics = cli("run", *FLAGS[:4], *flags).document()["statistics"]
    assert statistics["gpu_layers"] == pair["target"]["gpu_layers"] > 0
    assert statistics["gpu_layers_draft"] == pair["draft"]["gpu_layers"]
    full = cli("run", *FLAGS[:4], "--headroom", "100TiB", *flags).document()["statistics"]
    assert (full["gpu_layers"], full["gpu_layers_draft"]) == (0, 0)  # a card without room is left alone
