"""Files in the current folder that are called like modules: none runs, whatever command starts a child there."""

from __future__ import annotations

import importlib.metadata
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from ggufspec.cli.app import app
from tests.support.processes import PATIENCE_S, Cli

ANSWER = ("-p", "def f(", "-n", "4")
# What starts a child, or could; what a line ends in is typed into it. Paths are relative to the folder of decoys.
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "bench": (
        ("bench", "demo", *ANSWER, "-r", "1"),
        ("bench", "demo", *ANSWER, "-r", "1", "--sweep", "--draft-max", "1,2"),
    ),
    "chat": (("chat", "demo", "-n", "4"),),
    "compare": (("compare", "-m", "t.gguf", "-md", "d.gguf", *ANSWER, "-r", "1"),),
    "doctor": (("doctor",),),
    "export": (("export", "-m", "t.gguf", "-md", "d.gguf", "--to", "llama-server"),),
    "models": (("models",),),
    "plan": (("plan", "-m", "t.gguf", "-md", "d.gguf", "--calibrate"), ("plan", "demo", "--vram", "1GiB")),
    "profiles": (("profiles", "check", "demo"), ("profiles", "new", "my-pair", "-m", "t.gguf", "-md", "d.gguf")),
    "pull": (("pull", "demo"),),
    "quantize": (("quantize", "t.gguf", "--types", "Q4_0", "-o", "."),),
    "rehearse": (("rehearse", "-m", "t.gguf", "-r", "1", "--depth", "16", "-c", "256"),),
    "report": (("report",),),
    "run": (("run", "demo", *ANSWER),),
    "serve": (("serve", "demo", "--dry-run"),),
    "trace": (("trace", "demo", *ANSWER),),
    "tune": (("tune", "demo", *ANSWER, "-r", "2", "--budget", "20s"),),
    "verify": (("verify", "demo", "--quick"),),
    "worker": (("worker", "--port", "0", "--json"),),
}
DECOY = """\
with open({marker!r}, "a") as marker:
    marker.write({name!r} + "\\n")
"""


def decoys(folder: Path, marker: Path) -> None:
    """A decoy of every module of the standard library and of every package that is installed."""
    installed = {name for name in ("ggufspec", *importlib.metadata.packages_distributions()) if name.isidentifier()}
    assert {"numpy", "llama_cpp", "pydantic"} <= installed
    for name in sys.stdlib_module_names | installed | {"sitecustomize", "usercustomize"}:
        own = folder / name / "__init__.py" if name in installed else folder / f"{name}.py"
        own.parent.mkdir(exist_ok=True)
        own.write_text(DECOY.format(marker=str(marker), name=name))


@pytest.fixture
def marker(cli: Cli, tmp_path: Path, target: Path, draft: Path) -> Path:
    """Where decoys leave their names; they lie in the command line's folder, beside the pair that ships."""
    decoys(cli.folder, tmp_path / "ran")
    (cli.folder / "t.gguf").symlink_to(target)
    (cli.folder / "d.gguf").symlink_to(draft)
    return tmp_path / "ran"


def ran(marker: Path) -> list[str]:
    return sorted(set(marker.read_text().split())) if marker.exists() else []


def finish(cli: Cli, arguments: tuple[str, ...]) -> int:
    """The exit code of a command that was started as a process; ``worker`` is interrupted when it serves."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with cli.start(*arguments, first=lambda: None, **pipes) as process:  # an interpreter of its own
        if arguments[0] == "worker":
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
        _, stderr = process.communicate("def f(\n" if arguments[0] == "chat" else "", timeout=PATIENCE_S)
    assert "Traceback" not in stderr
    return process.returncode


def test_every_command_is_in_the_table() -> None:
    assert set(COMMANDS) == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_no_decoy_runs(cli: Cli, marker: Path) -> None:
    assert finish(cli, ("doctor", "--quick")) == 0
    assert ran(marker) == []


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments", [line for lines in COMMANDS.values() for line in lines], ids=lambda line: " ".join(line[:2])
)
def test_no_decoy_runs_whatever_is_asked(cli: Cli, marker: Path, arguments: tuple[str, ...]) -> None:
    code = finish(cli, arguments)
    assert ran(marker) == []
    assert code == {"report": 1, "worker": 130}.get(arguments[0], 0)  # there is nothing to report yet


@pytest.mark.full
def test_python_m_with_a_safe_path_runs_none_either(cli: Cli, marker: Path) -> None:
    """Without ``-P``, Python itself imports from the current folder before a line of ours runs."""
    command = [sys.executable, "-P", "-m", "ggufspec", "doctor", "--quick"]
    done = subprocess.run(command, cwd=cli.folder, env=cli.environment, stdout=subprocess.DEVNULL, timeout=PATIENCE_S)
    assert ran(marker) == []
    assert done.returncode == 0


def test_what_the_user_puts_on_the_path_is_honoured(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(DECOY.format(marker=str(tmp_path / "ran"), name="mine"))
    here = Cli(cli.folder, cli.environment | {"PYTHONPATH": str(tmp_path)})
    assert finish(here, ("doctor", "--quick")) == 0
    assert (tmp_path / "ran").read_text().split() == ["mine", "mine"]  # of the command, and of its child
