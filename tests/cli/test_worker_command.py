"""``ggufspec worker``: serves for real, ends quietly, leaves nothing behind."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from ggufspec.llamacpp import probe
from tests.support.processes import Cli, all_end, workers

DEVICE_KEYS = {"name", "description", "free_bytes", "total_bytes"}


@contextmanager
def serving(cli: Cli, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """(process, document) of a worker that answers."""
    command = ("worker", "--port", "0", "--json", *arguments)
    with cli.start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def listen() -> socket.socket:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return taken


def test_another_llama_cpp_sees_the_devices_as_gpus(cli: Cli) -> None:
    with serving(cli, "--device", "CPU") as (_, document):
        found = {device.name: device for device in probe.inspect((document["endpoint"],)).devices}
    assert found["RPC0"].kind == "gpu"
    assert found["RPC0"].total_bytes == document["devices"][0]["total_bytes"]


def test_another_process_puts_layers_on_it_again_and_again(cli: Cli) -> None:
    with serving(cli, "--device", "CPU") as (process, document):
        assert document["schema"] == "ggufspec/worker@1"
        assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d*", document["endpoint"])
        (device,) = document["devices"]
        assert set(device) == DEVICE_KEYS
        assert device["name"] == "CPU"
        assert 0 < device["free_bytes"] <= device["total_bytes"]
        runs = [
            cli("run", "-p", "def f(", "-n", "8", "-ngl", "4", "-ngld", "0", "--rpc", document["endpoint"], "--json")
            for _ in range(2)
        ]
        assert [(done.code, done.stderr) for done in runs] == [(0, "")] * 2
        assert [done.document()["statistics"]["gpu_layers"] for done in runs] == [4, 4]
        assert process.poll() is None


def test_people_read_where_it_serves_and_what_to_type(cli: Cli) -> None:
    command = ("worker", "--port", "0", "--device", "CPU")
    with cli.start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        first, second = process.stderr.readline(), process.stderr.readline()
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
    endpoint = re.search(r"^serving CPU \(.+\) at (127\.0\.0\.1:\d+); Ctrl-C ends it$", first)
    assert endpoint
    assert second == f"  on this machine: ggufspec bench demo --rpc {endpoint[1]}\n"
    assert (process.returncode, stdout, stderr) == (130, "", "")


def test_ctrl_c_ends_it_quietly_with_nothing_left(cli: Cli) -> None:
    with serving(cli) as (process, document):
        running = workers(process.pid)
        assert running
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("", "")
        assert process.returncode == 130
        assert all_end(running)
    host, port = document["endpoint"].split(":")
    with closing(socket.socket()) as knock:
        assert knock.connect_ex((host, int(port))) != 0


def test_ctrl_c_while_a_client_is_there_and_again_at_the_same_port(cli: Cli) -> None:
    with serving(cli) as (process, document):
        host, port = document["endpoint"].split(":")
        with socket.create_connection((host, int(port))):
            process.send_signal(signal.SIGINT)
            assert process.communicate() == ("", "")
        assert process.returncode == 130
    with serving(cli, "--port", port) as (_, again):
        assert again["endpoint"] == document["endpoint"]


def test_ctrl_c_in_a_terminal(cli: Cli) -> None:
    child = cli.terminal("worker", "--port", "0")
    child.expect("--rpc 127.0.0.1:")
    child.sendintr()
    child.expect("\\^C")
    left = child.read()
    child.close()
    assert child.exitstatus == 130
    assert "Traceback" not in left
    assert "error" not in left


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_no_orphan_when_the_parent_is_killed(cli: Cli, how: signal.Signals) -> None:
    with serving(cli) as (process, _):
        running = workers(process.pid)
        assert running
        process.send_signal(how)
        assert process.wait() == (-how if how == signal.SIGKILL else 128 + how)
        assert all_end(running)


@pytest.mark.parametrize("flags", [("--json",), ()])
def test_when_ggml_aborts_the_command_says_so(cli: Cli, flags: tuple[str, ...]) -> None:
    arguments = ("worker", "--port", "0", *flags)
    with cli.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        stream = process.stdout if flags else process.stderr
        assert stream is not None
        assert stream.readline()
        (child,) = workers(process.pid)
        child.send_signal(signal.SIGABRT)
        stdout, stderr = process.communicate()
    assert process.returncode == 1
    assert stdout == ""  # after the one document
    assert "error: the child process that ran llama.cpp was ended by SIGABRT" in stderr
    assert "next: start it again" in stderr
    assert "Traceback" not in stderr


def test_a_port_in_use(cli: Cli) -> None:
    with closing(listen()) as taken:
        port = taken.getsockname()[1]
        done = cli("worker", "--port", str(port), "--json")
    assert done.code == 1
    assert done.document()["error"] == f"port {port} of 127.0.0.1 is in use"
    assert done.document()["hint"] == "--port 0 picks a free one"
    assert "Traceback" not in done.stderr


def test_beyond_loopback_there_is_a_warning(cli: Cli) -> None:
    command = ("worker", "--host", "0.0.0.0", "--port", "0")
    with cli.start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        lines = []
        while not lines or "--rpc" not in lines[-1]:  # what it says last, warning or not
            lines.append(process.stderr.readline())
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
    assert lines[0].startswith("warning: anyone who can reach 0.0.0.0 can use these devices")
    assert "no authentication and no encryption" in lines[0]
    assert " at 0.0.0.0:" in lines[1]
    assert f"on the other machine: ggufspec bench demo --rpc {socket.gethostname()}:" in lines[2]
    assert (process.returncode, stdout, stderr) == (130, "", "")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.2"])
def test_on_loopback_there_is_none(cli: Cli, host: str) -> None:
    with serving(cli, "--host", host) as (process, document):
        assert document["endpoint"].startswith("127.0.0.")
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("", "")


def test_without_names_it_serves_the_gpus_or_else_the_cpu(cli: Cli) -> None:
    here = cli("doctor", "--quick", "--json").document()["llama_cpp"]["devices"]
    best = [device["name"] for device in here if device["kind"] in ("gpu", "igpu")] or ["CPU"]
    with serving(cli) as (_, document):
        assert [device["name"] for device in document["devices"]] == best


def test_devices_by_name(cli: Cli) -> None:
    with serving(cli, "--device", "CPU", "--device", "CPU") as (_, document):
        assert [device["name"] for device in document["devices"]] == ["CPU"]


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (("--device", "CUDA7"), "there is no device CUDA7", "CPU"),
        (("--host", "::1"), "'::1' is not an IPv4 address", "--host 127.0.0.1"),
        (("--host", "a..b"), "'a..b' is not an IPv4 address", "--host 127.0.0.1"),
        (("--host", ""), "'' is not an IPv4 address", "--host 127.0.0.1"),
        (("--host", "192.0.2.1"), "192.0.2.1 is not an address of this machine", "--host 0.0.0.0"),  # RFC 5737
        (("--port", "65536"), "--port", "ggufspec worker --help"),
        (("--port", "-1"), "--port", "ggufspec worker --help"),
        (("-t", "-1"), "--threads -1 is out of range", "one thread per fast core"),
    ],
)
def test_wrong_usage(cli: Cli, arguments: tuple[str, ...], error: str, hint: str) -> None:
    done = cli("worker", "--port", "0", *arguments, "--json")
    assert done.code == 2
    assert error in done.document()["error"]
    assert hint in done.document()["hint"]
    assert "Traceback" not in done.stderr
