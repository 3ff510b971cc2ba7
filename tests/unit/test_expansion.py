"""What a expanded model's tensors hold: it computes what the small one did."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab import expansion
from lab.expansion import Shape
from tests.support.tiny_llama import PROMPTS, TINY, assert_same_text, decoder, write_tiny

TEXTS = (
    "def main():\n",
    "class Error(Exception):\n    ",
    "import os\nimport sys\n\n",
    "The with statement is used to",
)
DEMO = Shape(width=320, layers=8, heads=5, kv_heads=1, ffn=896, vocab=4096, head_size=64)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", is_tied=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("untied") / "untied.gguf", is_tied=False, has_rope_freqs=True)


def grow(small: Path, path: Path, shape: Shape, kind: str = "F16", fill: str = "blocks", **more: bool) -> Path:
    """In this process: a child for each would take most of the time."""
    expansion.run(expansion.Spec(small, shape, kind, path, fill, **more), lambda event: None, threading.Event())
    return path


# ---- the function stays ---------------------------------------------------------------------------


CHANGES = {
    "as it is": {},
    "width": {"width": 112},
    "feed-forward": {"ffn": 100},
    "depth": {"layers": 5},
    "heads in larger groups": {"heads": 12},
    "heads in smaller groups": {"heads": 8, "kv_heads": 4},
    "a key-value head for every head": {"heads": 7, "kv_heads": 7},
    "vocabulary": {"vocab": 333, "width": 49},
    "head size, exact": {"head_size": 32},
    "an output of its own": {"tied": False},
    "experts": {"experts": 4, "experts_used": 2},
    "one expert of eight": {"experts": 8, "experts_used": 1, "layers": 3},
    "all": {"width": 112, "layers": 3, "heads": 15, "kv_heads": 5, "ffn": 96, "vocab": 1000, "head_size": 32},
    "all, untied": {"width": 112, "layers": 3, "heads": 15, "kv_heads": 5, "vocab": 1000, "tied": False},
}


@pytest.mark.parametrize("fill", ["holes", "blocks"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", ["tiny", "untied"])
def test_a_random_model_has_the_same_logits(
    kind: str, change: dict[str, int], fill: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    small = request.getfixturevalue(kind)
    shape = replace(TINY, tied=kind == "tiny")
    big = grow(small, tmp_path / "big.gguf", replace(shape, **change), fill=fill)
    assert_same_text(small, big, PROMPTS, 24, noise=0.01)


@pytest.mark.parametrize("size", [10, 16])
def test_other_head_sizes_round_the_queries(size: int, tiny: Path, untied: Path, tmp_path: Path) -> None:
    for small in (tiny, untied):
        shape = replace(TINY, head_size=size, tied=small == tiny)
        assert_same_text(small, grow(small, tmp_path / "big.gguf", shape), PROMPTS, 24, noise=0.03)


TRAINED = {
    "odd": {"width": 416, "layers": 11, "heads": 12, "kv_heads": 4, "ffn": 1000, "vocab": 5001},
    "head size": {"width": 384, "heads": 6, "kv_heads": 2, "head_size": 128},
    "untied": {"width": 768, "layers": 9, "vocab": 5120, "tied": False},
    "experts": {"width": 384, "layers": 9, "experts": 8, "experts_used": 2},
}


@pytest.mark.parametrize("change", TRAINED.values(), ids=TRAINED)
def test_a_trained_model_writes_the_same_text(change: dict[str, int], target: Path, tmp_path: Path) -> None:
    big = grow(target, tmp_path / "big.gguf", replace(DEMO, **change), fill="holes")
    with decoder(target) as model:
        prompts = [model.tokenize(text) for text in TEXTS]
    assert_same_text(target, big, prompts, 64, noise=0.03)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K_M"])
def test_a_quantised_model_decodes(kind: str, tiny: Path, tmp_path: Path) -> None:
    shape = replace(TINY, width=512, layers=4, heads=64, kv_heads=16, ffn=256, vocab=320)
    big = grow(tiny, tmp_path / "big.gguf", shape, kind)
    assert [path.name for path in tmp_path.iterdir()] == ["big.gguf"]
    correlations = []
    with decoder(tiny) as small, decoder(big) as other:
        for prompt in PROMPTS:
            wanted, got = small.follow(prompt), other.follow(prompt)
            assert np.isfinite(got).all()
            assert (got[:, : TINY.vocab].max(1) - got[:, TINY.vocab :].max(1) > 50).all()
            correlations += [np.corrcoef(a, b[: TINY.vocab])[0, 1] for a, b in zip(wanted, got, strict=True)]
    assert np.mean(correlations) > {"Q8_0": 0.999, "Q4_0": 0.9, "Q4_K_M": 0.9}[kind]


AGREE = {"Q8_0": 0.9, "Q4_K_M": 0.7, "Q4_0": 0.6, "Q3_K_L": 0.5, "Q3_K_S": 0.4}


@pytest.mark.parametrize("kind", AGREE)
def test_a_quantised_trained_model_mostly_says_the_same(kind: str, target: Path, tmp_path: Path) -> None:
    big = grow(target, tmp_path / "big.gguf", replace(expansion.SHAPES["tiny"], layers=9), kind, "holes")
    with decoder(target) as small, decoder(big) as other:
        same = []
        for text in TEXTS:
            tokens = small.greedy(small.tokenize(text), 32)
            wanted, got = small.follow(tokens), other.follow(tokens)
            assert np.isfinite(got).all()
            assert (got[:, : DEMO.vocab].min(1) - got[:, DEMO.vocab :].max(1) > 50).all()
            same += list(got.argmax(1) == wanted.argmax(1))
    assert np.mean(same) > AGREE[kind]


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_hopeless_model_is_as_sure_and_wrong(is_tied: bool, target: Path, tmp_path: Path) -> None:
    big = grow(target, tmp_path / "big.gguf", replace(DEMO, tied=is_tied), fill="holes", hopeless=True)

    def confidence(rows: np.ndarray) -> float:
        return float((1 / np.exp(rows - rows.max(1, keepdims=True)).sum(1)).mean())

    with decoder(target) as small, decoder(big) as other:
        tokens = small.greedy(small.tokenize(TEXTS[0]), 64)
        wanted, got = small.follow(tokens), other.follow(tokens)
    assert (got.argmax(1) == wanted.argmax(1)).mean() < 0.1
    assert confidence(got) > confidence(wanted) / 3
