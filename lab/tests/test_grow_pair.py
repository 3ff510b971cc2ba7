"""scripts/grow_pair.py: shapes by name and number, and what it says."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import gguf
import pytest

from lab import expansion
from tests.support.tiny_llama import PROMPTS, assert_same_text, write_tiny

ROOT = Path(__file__).resolve().parents[2]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grow_pair", ROOT / "scripts" / "grow_pair.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


grow_pair = _script()


def grow(*arguments: object) -> int:
    code: int = grow_pair.main([str(argument) for argument in arguments])
    return code


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", is_tied=True)


def test_it_grows(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    big = tmp_path / "big.gguf"
    assert grow(tiny, big, "--width", 64, "--vocab", 300, "--layers", 3) == 0
    assert "big.gguf: 0 M parameters, F16, 0 MB" in capsys.readouterr().out
    fields = gguf.GGUFReader(big).fields
    assert fields["general.name"].contents() == "tiny, expanded to width 64, 3 blocks"
    assert fields["llama.context_length"].contents() == 512
    assert fields["llama.vocab_size"].contents() == 300
    tokens, types = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type"))
    assert tokens[-1] == "[PAD299]"
    assert types[-1] == gguf.TokenType.UNUSED
    assert len(tokens) == len(types) == 300
    assert_same_text(tiny, big, PROMPTS, 24, noise=0.01)


def test_every_preset_holds_the_demo_target(target: Path) -> None:
    source = expansion.read_source(target)
    sizes = {}
    for name, numbers in grow_pair.SHAPES.items():
        big = replace(expansion.shape_of(source), **numbers)
        if "draft" in name:
            continue
        expansion.fit(source, replace(big, vocab=max(big.vocab, 5000)), "Q4_K_M")
        sizes[name] = big.parameters()
    millions = {"50m": 50, "150m": 150, "0.3b": 300, "1b": 1000, "3b": 3000, "8b": 7000}
    assert {name: sizes[name] for name in millions} == {
        name: pytest.approx(count * 1e6, rel=0.1) for name, count in millions.items()
    }


REFUSED = {
    "smaller": (["--width", 32], "width 32 < 48"),
    "negative": (["--heads", -1], "heads -1 < 6"),
    "unknown type": (["--type", "Q4_9"], "Q4_9"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_shapes_are_refused(
    arguments: list[object], message: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grow(tiny, tmp_path / "big.gguf", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_bad_files_are_refused(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny.read_bytes())
    assert grow(copy, copy) == 2
    assert copy.read_bytes() == tiny.read_bytes()
    assert grow(tmp_path / "missing.gguf", tmp_path / "big.gguf") == 1
    assert "does not exist" in capsys.readouterr().err
    assert grow(copy, tmp_path / "nowhere" / "big.gguf") == 1
    assert "cannot be written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["copy.gguf"]
