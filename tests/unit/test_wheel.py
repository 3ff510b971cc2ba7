"""The wheel, installed where there is no checkout, has all that a first run needs."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.full


def finished(*command: str | Path, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "-q", "--disable-pip-version-check")
    finished(sys.executable, "-m", "pip", "wheel", ROOT, *offline, "-w", folder, folder=folder)
    (built,) = folder.glob("ggufspec-*.whl")
    return built


def test_wheel_contains_profiles_demo_pair_and_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "ggufspec/py.typed" in names
    templates = ("base.html", "page.html", "page.css", "trace.html", "trace.css")
    assert {f"ggufspec/reports/html/templates/{name}" for name in templates} <= names
    assert {f"ggufspec/serve/templates/{name}" for name in ("page.html", "page.css", "page.js")} <= names
    for profile in (ROOT / "profiles").glob("*.toml"):
        assert f"ggufspec/profiles/{profile.name}" in names
    for model in (ROOT / "profiles" / "demo").glob("*.gguf"):
        assert f"ggufspec/profiles/demo/{model.name}" in names
    assert [name for name in names if name.endswith(".data/data/share/man/man1/ggufspec.1")]
    assert not [name for name in names if name.startswith(("lab/", "tests/", "scripts/"))]


def test_wheel_runs_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "venv"
    finished(sys.executable, "-m", "venv", "--without-pip", place, folder=tmp_path)
    python = place / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    finished(*pip, "install", "-q", "--no-deps", "--no-index", wheel, folder=tmp_path)
    packages = Path(
        finished(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path).strip()
    )
    # A path in a .pth file is only a place to look: the checkout's own .pth over there is not followed.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    imported = finished(python, "-c", "import ggufspec; print(ggufspec.__file__)", folder=tmp_path)
    assert Path(imported.strip()).is_relative_to(place)
    script = place / "bin" / "ggufspec"
    assert finished(script, "--version", folder=tmp_path).startswith("ggufspec ")
    document: dict[str, Any] = json.loads(
        finished(script, "run", "-p", "def f(", "-n", "4", "-t", "1", "--json", folder=tmp_path)
    )
    assert len(document["tokens"]) == 4
    assert Path(document["pair"]["target"]).is_relative_to(place)


@pytest.mark.full
def test_wheel_installs_beside_a_llama_cpp_that_is_built(wheel: Path, tmp_path: Path) -> None:
    """As a user has it: both wheels and nothing else of the checkout, `plan` and `bench` in an empty folder."""
    built = sorted((ROOT / ".cache" / "wheels").glob("*/llama_cpp_python-*.whl"))
    if not built:
        pytest.skip("scripts/bootstrap has kept no wheel of llama-cpp-python")
    place, home = tmp_path / "venv", tmp_path / "home"
    home.mkdir()
    finished(sys.executable, "-m", "venv", "--without-pip", place, folder=tmp_path)
    python, script = place / "bin" / "python", place / "bin" / "ggufspec"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    finished(*pip, "install", "-q", "--no-deps", "--no-index", wheel, built[-1], folder=tmp_path)
    packages = Path(
        finished(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=home).strip()
    )
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    imported = finished(python, "-c", "import llama_cpp; print(llama_cpp.__file__)", folder=home)
    assert Path(imported.strip()).is_relative_to(place)

    plan = json.loads(finished(script, "plan", "demo", "--json", folder=home))
    assert plan["confirmed"]
    doctor = json.loads(finished(script, "doctor", "--json", folder=home))
    assert f"--python {place} " in doctor["prebuilt"]["command"] or f"{python} -m pip" in doctor["prebuilt"]["command"]
    assert "scripts/bootstrap" not in json.dumps(doctor)
    short = ("-n", "16", "-r", "2", "-t", "1", "--json")
    bench = json.loads(finished(script, "bench", "demo", *short, folder=home))
    assert {"target_only", "speculative"} <= set(bench["runs"])
    assert Path(bench["pair"]["target"]).is_relative_to(place)
    help_text = finished(script, "--help", folder=home)
    assert "scripts/" not in help_text
