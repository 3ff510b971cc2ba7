"""Real models: the pair that ships, and targets expanded from it."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ggufspec.models.profile import demo_pair

ROOT = Path(__file__).resolve().parents[2]
GROWN_SHAPE = ("--width", "512", "--layers", "12", "--heads", "8", "--kv-heads", "8", "--ffn", "1536")
MODULES = ("argparse", "ast", "calendar", "csv", "dataclasses", "difflib", "enum", "fractions", "gettext", "heapq")


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """A hundred texts of 10 to about 3,000 characters (to 1,000 tokens), cut from the standard library's source."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for i in range(100):
        source = (library / f"{MODULES[i % len(MODULES)]}.py").read_text(encoding="utf-8")
        length = 10 + i * i * 3 // 10
        start = (i * 7919) % max(1, len(source) - length)
        texts.append(source[start : start + length])
    return texts


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
