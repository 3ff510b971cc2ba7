"""Real models: the pair that ships, and targets expanded from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ggufspec.models.profile import demo_pair
from tests.support.texts import source_texts

ROOT = Path(__file__).resolve().parents[2]
GROWN_SHAPE = ("--width", "512", "--layers", "12", "--heads", "8", "--kv-heads", "8", "--ffn", "1536")


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """A hundred texts of up to 1,000 tokens."""
    return source_texts(100)


@pytest.fixture(scope="session")
def pair() -> tuple[Path, Path]:
    return demo_pair()


@pytest.fixture(scope="session")
def expanded(tmp_path_factory: pytest.TempPathFactory, pair: tuple[Path, Path]):
    """expanded(type) -> a target of about 45M parameters that says what the demo target says."""
    folder = tmp_path_factory.mktemp("expanded")

    def make(kind: str) -> Path:
        path = folder / f"expanded-{kind}.gguf"
        if not path.exists():
            grow = [sys.executable, str(ROOT / "scripts" / "grow_pair.py"), str(pair[0]), str(path)]
            subprocess.run([*grow, *GROWN_SHAPE, "--type", kind], check=True, capture_output=True)
        return path

    return make


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1; skips, and says why, where it cannot be had."""
    done = subprocess.run([ROOT / "scripts" / "real-models", "smollm2"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(done.stderr.strip().replace("\n", " "))
    return Path(done.stdout.strip()) / "SmolLM2-135M-Instruct.Q4_1.gguf"
