"""llama.cpp's own quantiser: files, the types it chooses, and blocks of our own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.gguf import parse_header
from ggufspec.llamacpp.quantize import (
    FILE_TYPES,
    block_numbers,
    row_bytes,
    run_dry,
    to_blocks,
    to_numbers,
    write_quantised,
)
from lab import expansion
from tests.support.tiny_llama import TINY, write_tiny

KINDS = ("f32", "f16", "bf16", "q8_0", "q6_K", "q5_K", "q5_0", "q4_K", "q4_0", "q3_K", "q2_K", "iq4_nl", "iq4_xs")
ERRORS = {"f32": 0, "f16": 1e-3, "bf16": 1e-2, "q8_0": 0.01, "q6_K": 0.03, "q5_K": 0.05, "q5_0": 0.06}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", is_tied=True)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    shape = replace(TINY, width=256, heads=32, kv_heads=8, ffn=256)
    expansion.expand(expansion.Spec(tiny, shape, "F16", path))
    return path


def test_every_file_type_is_llama_cpps_and_needs_no_importance_matrix(wide: Path, tmp_path: Path) -> None:
    for name in FILE_TYPES:
        write_quantised(wide, tmp_path / f"{name}.gguf", name, threads=1)
        written = gguf.GGUFReader(tmp_path / f"{name}.gguf").fields["general.file_type"].contents()
        prefix = "ALL_" if name == "F32" else "MOSTLY_"
        assert gguf.LlamaFileType(written).name == prefix + name


@pytest.mark.parametrize("name", FILE_TYPES)
def test_the_dry_run_tells_the_types_and_the_bytes_that_are_written(name: str, wide: Path, tmp_path: Path) -> None:
    write_quantised(wide, tmp_path / "q.gguf", name, threads=1)
    written = {tensor.name: tensor.type for tensor in parse_header((tmp_path / "q.gguf").read_bytes()).tensors}
    chosen = run_dry(wide, name)
    assert chosen.types == written
    assert chosen.file_bytes == (tmp_path / "q.gguf").stat().st_size


def test_the_dry_run_says_what_is_wrong(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Q4_K_X"):
        run_dry(tiny, "Q4_K_X")
    (tmp_path / "text.gguf").write_text("hello, this is no model")
    with pytest.raises(ModelError, match="cannot be quantised"):
        run_dry(tmp_path / "text.gguf", "Q4_0")


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_stand_for_their_numbers(kind: str) -> None:
    values = np.random.default_rng(0).standard_normal((3, 512), np.float32)
    blocks = to_blocks(kind, values)
    assert len(blocks) == 3 * row_bytes(kind, 512)
    assert 512 % block_numbers(kind) == 0
    error = np.sqrt(np.mean((to_numbers(kind, blocks, (3, 512)) - values) ** 2))
    assert error <= ERRORS.get(kind, 0.4)
    assert (to_numbers(kind, bytes(len(blocks)), (3, 512)) == 0).all()  # holes


def test_quantiser_says_what_is_wrong(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    with pytest.raises(UsageError, match="Q4_K_X") as unknown:
        write_quantised(tiny, target, "Q4_K_X", 1)
    assert "Q4_K_M" in unknown.value.hint
    with pytest.raises(UsageError, match="overwrite"):
        write_quantised(tiny, tiny, "F16", 1)
    with pytest.raises(ModelError, match="does not exist"):
        write_quantised(tmp_path / "missing.gguf", target, "F16", 1)
    with pytest.raises(ModelError, match="cannot be written"):
        write_quantised(tiny, tmp_path / "nowhere" / "out.gguf", "F16", 1)
    text = tmp_path / "text.gguf"
    text.write_text("hello, this is no model")
    with pytest.raises(ModelError, match="cannot be quantised"):
        write_quantised(text, target, "F16", 1)
    assert not target.exists()
