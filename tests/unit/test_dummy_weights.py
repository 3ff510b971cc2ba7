"""Dummy weights: the true header, the true size, little disk, numbers that decode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ggufspec.errors import GgufspecError
from ggufspec.llamacpp.gguf import parse_header
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions
from ggufspec.llamacpp.quantize import random_blocks
from ggufspec.models import dummy_weights, sparse
from ggufspec.models.headers import KnownHeader, read_headers
from tests.support import shapes

TINY = sorted(name for name in shapes.SHAPES if name.startswith("tiny-"))
KINDS = ("f32", "f16", "bf16", "q8_0", "q6_K", "q5_K", "q5_1", "q5_0", "q4_K", "q4_1", "q4_0", "q3_K", "q2_K", "mxfp4")
KINDS += ("iq4_nl", "iq4_xs", "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_s", "iq1_m", "tq1_0", "tq2_0")


def logits(path: Path, widths: tuple[int, ...] = (1, 4)) -> Iterator[np.ndarray]:
    with Model(path) as model, closing(Context(model, ContextOptions(64, max(widths), 1))) as context:
        for width in widths:
            context.rewind(0)
            yield context.decode(list(range(1, width + 1)), width).copy()


@pytest.fixture(scope="module")
def known(tmp_path_factory, target: Path) -> KnownHeader:
    return read_headers([target], tmp_path_factory.mktemp("headers"))[0]


def test_the_header_and_the_size_are_the_models_own(known: KnownHeader, target: Path, tmp_path: Path) -> None:
    made = dummy_weights.make_dummy(known, tmp_path)
    start = parse_header(target.read_bytes()).data_offset
    assert made.path.read_bytes()[:start] == target.read_bytes()[:start]
    assert made.path.stat().st_size == target.stat().st_size
    assert made.disk_bytes <= dummy_weights.needed_bytes(known)
    assert made.disk_bytes < 2e6
    with Model(made.path) as model, Model(target) as real:
        assert model.tokenize("def f(") == real.tokenize("def f(")


@pytest.mark.parametrize("name", TINY)
def test_every_architecture_decodes_without_a_nan(tmp_path: Path, name: str) -> None:
    path = shapes.write(tmp_path / f"{name}.gguf", shapes.SHAPES[name], tokenizer=True)
    (known,) = read_headers([path], tmp_path / "headers")
    (tmp_path / "made").mkdir()
    made = dummy_weights.make_dummy(known, tmp_path / "made")
    assert all(np.isfinite(rows).all() for rows in logits(made.path))


def test_different_tokens_are_different_to_the_routers(tmp_path: Path) -> None:
    """In a model of zeros all tokens would go to the same experts, and T(n) would be too good."""
    path = shapes.write(tmp_path / "moe.gguf", shapes.SHAPES["tiny-moe"], tokenizer=True)
    (known,) = read_headers([path], tmp_path / "headers")
    made = dummy_weights.make_dummy(known, tmp_path)
    with made.path.open("rb") as file:
        data = file.read()
    parsed = parse_header(data)
    embedding = next(t for t in parsed.tensors if t.name == "token_embd.weight")
    rows = np.frombuffer(data, np.uint8, embedding.size_bytes, parsed.data_offset + embedding.offset)
    rows = rows.reshape(embedding.shape[1], -1)[: dummy_weights.TOKENS]
    assert len(np.unique(rows, axis=0)) > 64
    routers = [t for t in parsed.tensors if "ffn_gate_inp" in t.name]
    assert routers
    for tensor in routers:
        assert np.frombuffer(data, np.float32, 8, parsed.data_offset + tensor.offset).any()


def test_a_split_model(tmp_path: Path) -> None:
    parts = shapes.write_split(tmp_path, shapes.SHAPES["tiny-llama"], 3)
    (known,) = read_headers([parts[1]], tmp_path / "headers")
    (tmp_path / "made").mkdir()
    made = dummy_weights.make_dummy(known, tmp_path / "made")
    assert len(list(made.path.parent.iterdir())) == 3
    assert sum(p.stat().st_size for p in made.path.parent.iterdir()) == sum(p.stat().st_size for p in parts)
    assert all(np.isfinite(rows).all() for rows in logits(made.path))


def test_a_large_model_takes_little_disk_and_time(tmp_path: Path) -> None:
    path = shapes.write(tmp_path / "8b.gguf", shapes.SHAPES["llama3-8b-q3_k_l"], tokenizer=True)
    (known,) = read_headers([path], tmp_path / "headers")
    (tmp_path / "made").mkdir()
    made = dummy_weights.make_dummy(known, tmp_path / "made")
    assert made.path.stat().st_size == path.stat().st_size > 4e9
    assert made.disk_bytes <= dummy_weights.needed_bytes(known) < 40e6


def test_no_room_is_said_before_anything_is_written(known: KnownHeader, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sparse, "free_disk_bytes", lambda path: 10 << 20)
    with pytest.raises(GgufspecError, match=r"need 6[\d.]+ MB of disk, but .* has 10.5 MB"):
        dummy_weights.make_dummy(known, tmp_path)
    assert not list(tmp_path.iterdir())


SLOW = ("iq1_s", "iq1_m", "iq2_s", "iq2_xs", "iq2_xxs", "iq3_s", "iq3_xxs")  # llama.cpp makes their grids first


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.full) if k in SLOW else k for k in KINDS])
def test_random_blocks_are_of_their_type(kind: str) -> None:
    blocks = random_blocks(kind, 2048, 0.02, seed=1)
    row, row_bytes = shapes.block_of({"bf16": "BF16"}.get(kind, kind.upper().replace("_k", "_K")))
    assert len(blocks) == 2048 // row * row_bytes
    assert blocks == random_blocks(kind, 2048, 0.02, seed=1)
    assert blocks != random_blocks(kind, 2048, 0.02, seed=2)
    assert any(blocks)
