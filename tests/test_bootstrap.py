"""scripts/bootstrap as people meet it: in child processes on a copy of the checkout; its decisions as plain calls."""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import venv
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout with nothing made in it yet, in a folder with a space."""
    root = tmp_path / "a copy"
    shutil.copytree(CHECKOUT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copy(CHECKOUT / "pyproject.toml", root)
    return root


@pytest.fixture
def script(copy: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The copy's bootstrap, as a module."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    return load(copy / "scripts" / "bootstrap")


def load(path: Path) -> ModuleType:
    loader = SourceFileLoader(path.name, str(path))
    spec = importlib.util.spec_from_loader(path.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """The whole PATH of a child: empty, until a test puts programs there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def program(path: Path, body: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def environment(path: Path, **more: str) -> dict[str, str]:
    """A child's environment: PATH is ``path`` alone, and pip knows no index."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "CMAKE_", "CUDA_", "CXX"))}
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(path)}
    return {**kept, **offline, "PATH": str(path), **more}


def start(copy: Path, env: dict[str, str], *args: str) -> subprocess.Popen[str]:
    command: list[str | Path] = [sys.executable, copy / "scripts" / "bootstrap", *args]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(child: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and stderr; nothing may be on stdout, and no failure may be a traceback."""
    out, err = child.communicate(timeout=120)
    assert out == ""
    assert "Traceback" not in err
    return child.returncode, err


def made(copy: Path, script: ModuleType, bin_folder: Path, *args: str) -> dict[str, object]:
    """Make .venv by hand, and return the stamp that a finished bootstrap would leave there."""
    venv.create(copy / ".venv", symlinks=True)
    site = copy / ".venv" / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    (site / "pip").mkdir()
    (site / "pip" / "__init__.py").touch()
    want, _ = script.plan(script.arguments(args), environment(bin_folder))
    return dict(want)


# -- as a child process ----------------------------------------------------------------------------------------------


def test_no_compiler_is_said_before_anything_is_made(copy: Path, bin_folder: Path) -> None:
    code, err = finish(start(copy, environment(bin_folder)))
    assert code == 1
    assert "no C++ compiler" in err
    assert "Install one: " in err
    assert sorted(path.name for path in copy.iterdir()) == ["pyproject.toml", "scripts"]


@pytest.mark.skipif(platform.system() == "Darwin", reason="asks xcode-select too")
def test_failed_build_shows_the_reason_and_leaves_nothing_whole(copy: Path, bin_folder: Path) -> None:
    program(bin_folder / "c++")
    code, err = finish(start(copy, environment(bin_folder)))
    assert code == 1
    assert "No matching distribution found for llama-cpp-python==" in err
    assert str(copy / ".cache" / "build.log") in err
    assert "check the network" in err
    assert not (copy / ".venv" / "bootstrap.json").exists()
    assert list((copy / ".cache").glob("wheels/*")) == []


@pytest.mark.skipif(platform.system() == "Darwin", reason="asks xcode-select too")
@pytest.mark.parametrize(("sign", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_while_at_work(copy: Path, bin_folder: Path, sign: signal.Signals, expected: int) -> None:
    program(bin_folder / "c++")
    child = start(copy, environment(bin_folder))
    while not (copy / ".venv" / "bin").exists():  # half-made now
        assert child.poll() is None
    child.send_signal(sign)
    code, _ = finish(child)
    assert code == expected
    assert not (copy / ".venv").exists()


def test_second_call_does_nothing(copy: Path, script: ModuleType, bin_folder: Path) -> None:
    script.STAMP.parent.mkdir()
    script.STAMP.write_text(json.dumps(made(copy, script, bin_folder, "--dev")))
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    assert finish(start(copy, environment(bin_folder))) == (0, "")
    code, err = finish(start(copy, environment(bin_folder), "-v"))
    assert code == 0
    assert "ready" in err
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_changed_project_is_noticed(copy: Path, script: ModuleType, bin_folder: Path) -> None:
    stamp = made(copy, script, bin_folder)
    script.STAMP.write_text(json.dumps(stamp))
    with (copy / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    code, err = finish(start(copy, environment(bin_folder)))
    assert code == 1
    assert "no C++ compiler" in err


@pytest.mark.skipif(platform.system() == "Darwin", reason="asks xcode-select too")
def test_second_of_two_waits_and_finds_the_work_done(copy: Path, script: ModuleType, bin_folder: Path) -> None:
    program(bin_folder / "c++")
    stamp = made(copy, script, bin_folder)
    script.CACHE.mkdir()
    with (script.CACHE / "bootstrap.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        child = start(copy, environment(bin_folder))
        assert child.stderr is not None
        assert "waiting" in child.stderr.readline()
        script.STAMP.write_text(json.dumps(stamp))
    assert finish(child) == (0, "")


def test_bench_runs_from_anywhere(copy: Path, script: ModuleType, bin_folder: Path, tmp_path: Path) -> None:
    script.STAMP.parent.mkdir()
    stamp = made(copy, script, bin_folder)
    script.STAMP.write_text(json.dumps(stamp))
    program(copy / ".venv" / "bin" / "ggufspec", 'pwd; for word in "$@"; do echo "<$word>"; done')
    link = tmp_path / "bench-link"
    link.symlink_to(copy / "scripts" / "bench")
    (bin_folder / "python3").symlink_to(sys.executable)
    env = {**environment(bin_folder), "PATH": f"{bin_folder}:/usr/bin:/bin", "CDPATH": str(copy)}
    done = subprocess.run(
        [link, "-m", "a model.gguf"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [str(tmp_path), "<bench>", "<-m>", "<a model.gguf>"]


# -- an old Python ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bootstrap", "peers"])
def test_old_python_can_read_it(name: str) -> None:
    ast.parse((CHECKOUT / "scripts" / name).read_text(), feature_version=(3, 7))


def test_old_python_is_told(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(SystemExit, match=r"3\.11 or newer is needed; this is Python 3\.9"):
        load(Path(script.__file__ or ""))


# -- decisions -------------------------------------------------------------------------------------------------------


def machine(script: ModuleType, **facts: object) -> object:
    return script.Machine(
        **{"system": "Linux", "arch": "x86_64", "nvcc": None, "nvidia": False, "vulkan": False, **facts}
    )


@pytest.mark.parametrize(
    ("facts", "backend", "note"),
    [
        ({}, "cpu", ""),
        ({"nvcc": "/opt/nvcc", "nvidia": True, "vulkan": True}, "cuda", ""),
        ({"nvcc": "/opt/nvcc"}, "cpu", "no NVIDIA GPU"),
        ({"nvidia": True}, "cpu", "no nvcc"),
        ({"nvidia": True, "vulkan": True}, "vulkan", "no nvcc"),
        ({"system": "Darwin", "arch": "arm64"}, "metal", ""),
        ({"system": "Darwin"}, "cpu", ""),
    ],
)
def test_backend_that_is_found(script: ModuleType, facts: dict[str, object], backend: str, note: str) -> None:
    choice = script.choose("auto", "", machine(script, **facts))
    assert choice.backend == backend
    assert note in choice.note
    assert bool(note) == bool(choice.note)
    assert choice.cmake_args.startswith("-DGGML_RPC=on")
    assert ("GGML_CUDA" in choice.cmake_args) == (backend == "cuda")


def test_own_options_come_last(script: ModuleType) -> None:
    here = machine(script, nvcc="/opt/cuda 13/nvcc", nvidia=True)
    own = script.choose("cuda", "-DGGML_RPC=off", here).cmake_args
    assert own == "-DGGML_RPC=on -DGGML_CUDA=on -DCMAKE_CUDA_COMPILER='/opt/cuda 13/nvcc' -DGGML_RPC=off"
    assert script.choose("auto", "-DGGML_HIP=on", here).cmake_args == "-DGGML_RPC=on -DGGML_HIP=on"


@pytest.mark.parametrize("backend", ["cuda", "metal"])
def test_forced_backend_that_cannot_be(script: ModuleType, backend: str) -> None:
    with pytest.raises(script.SetupError, match=f"--backend {backend} needs"):
        script.choose(backend, "", machine(script))


@pytest.mark.parametrize("where", ["PATH", "CUDA_HOME", "default"])
def test_nvcc_is_looked_for(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    nvcc = str(program(tmp_path / "cuda" / "bin" / "nvcc"))
    monkeypatch.setattr(script, "CUDA_FOLDERS", (str(tmp_path / "cuda"),) if where == "default" else ())
    env = {"PATH": str(tmp_path / "cuda" / "bin") if where == "PATH" else str(tmp_path)}
    assert script.look(env | ({"CUDA_HOME": str(tmp_path / "cuda")} if where == "CUDA_HOME" else {})).nvcc == nvcc


def test_a_toolkit_is_no_card(script: ModuleType, bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "DEVICES", bin_folder)
    env = {"PATH": str(bin_folder)}
    assert not script.look(env).nvidia
    program(bin_folder / "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert not script.look(env).nvidia
    program(bin_folder / "nvidia-smi", "echo 'GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1)'")
    assert script.look(env).nvidia
    (bin_folder / "nvidia-smi").unlink()
    (bin_folder / "nvidia0").touch()
    assert script.look(env).nvidia


def test_vulkan_wants_compiler_headers_and_card(
    script: ModuleType, bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "DEVICES", bin_folder)
    env = {"PATH": str(bin_folder)}
    program(bin_folder / "glslc")
    (bin_folder / "dri").mkdir()
    (bin_folder / "dri" / "renderD128").touch()
    assert not script.look(env).vulkan
    program(bin_folder / "pkg-config")
    assert script.look(env).vulkan
    (bin_folder / "dri" / "renderD128").unlink()
    assert not script.look(env).vulkan


def test_what_was_asked_holds(
    copy: Path, script: ModuleType, bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "CUDA_FOLDERS", ())
    nvcc = program(bin_folder / "nvcc")
    with_cuda = environment(bin_folder, CMAKE_ARGS="-DGGML_CUDA_FA=off")
    want, _ = script.plan(script.arguments(["--backend", "cuda", "--dev"]), with_cuda)
    script.STAMP.parent.mkdir()
    script.STAMP.write_text(json.dumps(want))
    nvcc.unlink()  # another shell, without CUDA's PATH and the options
    assert script.plan(script.arguments([]), environment(bin_folder))[0] == want
    monkeypatch.setattr(script, "DEVICES", bin_folder)
    assert script.plan(script.arguments(["--backend", "auto"]), environment(bin_folder))[0]["backend"] == "cpu"


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ({"ID": "ubuntu", "ID_LIKE": "debian"}, "sudo apt-get install g++"),
        ({"ID": "linuxmint", "ID_LIKE": "ubuntu debian"}, "sudo apt-get install g++"),
        ({"ID": "rocky", "ID_LIKE": "rhel centos fedora"}, "sudo dnf install gcc-c++"),
        ({"ID": "arch"}, "sudo pacman -S gcc"),
        ({"ID": "plan9"}, "your package manager"),
    ],
)
def test_install_command_fits_the_system(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, release: dict[str, str], command: str
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: release)
    with pytest.raises(script.SetupError) as error:
        script.need_compiler({"PATH": ""})
    assert str(error.value).endswith(f"Install one: {command}")


def test_missing_venv_module_is_told(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
    with pytest.raises(script.SetupError, match=r"apt-get install python3\.\d+-venv"):
        script.need_venv()


def test_version_is_the_lower_bound(script: ModuleType) -> None:
    assert script.pinned('[project]\ndependencies = ["numpy>=2", "llama-cpp-python>=0.3.36,<0.4"]') == "0.3.36"
    with pytest.raises(script.SetupError):
        script.pinned("[project]\ndependencies = []")


def test_each_build_has_its_own_wheel_folder(script: ModuleType) -> None:
    builds = [
        ("0.3.36", "-DA=1", "3.11"),
        ("0.3.36", "-DA=2", "3.11"),
        ("0.3.37", "-DA=1", "3.11"),
        ("0.3.36", "-DA=1", "3.12"),
    ]
    assert len({script.wheel_folder(*build) for build in builds}) == len(builds)


def test_the_telling_lines_of_a_log(script: ModuleType) -> None:
    log = "-- Looking for x - failed\n[1/9] cc -Werror=x a.c\na.c:1: error: no\nok\nfatal: stop\nImportError: x.so\n"
    assert script.telling(log) == ["  a.c:1: error: no", "  fatal: stop", "  ImportError: x.so"]
    assert script.telling("one\n\ntwo\nthree\n", limit=2) == ["  two", "  three"]
