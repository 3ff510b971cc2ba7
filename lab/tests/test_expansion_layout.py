"""Shapes that a small model fits into, places of its heads, and files that cannot be expanded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ggufspec.errors import ModelError, UsageError
from lab import expansion
from lab.expansion import Shape
from tests.support.tiny_llama import TINY, write_tiny

DEMO = Shape(width=320, layers=8, heads=5, kv_heads=1, ffn=896, vocab=4096, head_size=64)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", is_tied=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("untied") / "untied.gguf", is_tied=False, has_rope_freqs=True)


# ---- where things go ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("small", "big", "query_at", "kv_of"),
    [
        ((6, 2), (6, 2), (0, 1, 2, 3, 4, 5), (0, 1)),
        ((6, 2), (8, 2), (0, 1, 2, 4, 5, 6), (0, 1)),
        ((6, 2), (8, 4), (0, 1, 2, 4, 5, 6), (0, 0, 1, 1)),
        ((5, 1), (32, 8), (0, 1, 2, 3, 4), (0, 0)),
        ((4, 4), (8, 4), (0, 2, 4, 6), (0, 1, 2, 3)),
        ((2, 1), (3, 3), (0, 1), (0, 0)),
    ],
)
def test_query_heads_meet_their_own_key_value_head(
    small: tuple[int, int], big: tuple[int, int], query_at: tuple[int, ...], kv_of: tuple[int, ...], tiny: Path
) -> None:
    source = replace(expansion.read_source(tiny), shape=replace(TINY, heads=small[0], kv_heads=small[1]))
    layout = expansion.fit(source, replace(TINY, heads=big[0], kv_heads=big[1]), "F16")
    assert (layout.query_at, layout.kv_of) == (query_at, kv_of)
    for head, place in enumerate(layout.query_at):
        assert layout.kv_of[place // (big[0] // big[1])] == head // (small[0] // small[1])


def test_the_shape_is_read(tiny: Path, untied: Path, target: Path) -> None:
    assert expansion.shape_of(expansion.read_source(tiny)) == TINY
    assert expansion.shape_of(expansion.read_source(untied)) == replace(TINY, tied=False)
    assert expansion.shape_of(expansion.read_source(target)) == DEMO


def test_parameters_are_those_of_the_published_models() -> None:
    billions = {name: shape.parameters() / 1e9 for name, shape in expansion.SHAPES.items()}
    published = {
        "llama3-70b": 70.55,
        "llama3-8b": 8.03,
        "llama3.2-1b": 1.24,
        "qwen2.5-14b": 14.77,
        "qwen2.5-0.5b": 0.494,
        "smollm2-360m": 0.3618,
        "mixtral-8x7b": 46.7,
    }
    assert {name: billions[name] for name in published} == pytest.approx(published, rel=0.005)


# ---- what is refused ------------------------------------------------------------------------------


REFUSED = {
    "smaller": ({"width": 32}, "F16", "width 32 < 48"),
    "smaller in several ways": ({"layers": 1, "ffn": 8}, "F16", "layers 1 < 2, ffn 8 < 80"),
    "uneven groups": ({"heads": 7}, "F16", "7 query heads cannot share 2"),
    "too few key-value heads": ({"kv_heads": 3}, "F16", "need 4 key-value heads"),
    "odd head size": ({"head_size": 9}, "F16", "odd"),
    "RoPE base": ({"head_size": 128}, "F16", "overflows"),
    "no spare dimension": ({"vocab": 300}, "F16", "spare dimension"),
    "a spare dimension in a shared block": ({"vocab": 300, "width": 64, "ffn": 96, "heads": 8}, "Q8_0", "spare dim"),
    "rows that no block divides": ({}, "Q4_0", "multiple of 32 wide: width 48, ffn 80, heads x head size 48"),
    "more experts used than there are": ({"experts": 2, "experts_used": 3}, "F16", "3 of 2 experts"),
    "no experts used": ({"experts": 2}, "F16", "0 of 2 experts"),
}


@pytest.mark.parametrize(("change", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_a_shape_that_does_not_fit(change: dict[str, int], kind: str, message: str, tiny: Path) -> None:
    with pytest.raises(UsageError, match=message):
        expansion.fit(expansion.read_source(tiny), replace(TINY, **change), kind)


def test_an_epsilon_without_room_for_the_constant(tiny: Path) -> None:
    source = expansion.read_source(tiny)
    shape = replace(TINY, vocab=300, width=64)
    assert expansion.fit(source, shape, "F16")
    with pytest.raises(UsageError, match="epsilon 1e-12 is too small"):
        expansion.fit(replace(source, eps=1e-12), shape, "F16")


def test_an_output_matrix_cannot_be_lost(untied: Path) -> None:
    with pytest.raises(UsageError, match="output matrix of its own"):
        expansion.fit(expansion.read_source(untied), TINY, "F16")


def test_bad_files_are_refused(tiny: Path, tmp_path: Path) -> None:
    files = {
        "missing": (tmp_path / "missing.gguf", "does not exist"),
        "folder": (tmp_path, "is a folder"),
        "text": (tmp_path / "text.gguf", "not a GGUF file"),
        "empty": (tmp_path / "empty.gguf", "is empty"),
        "short header": (tmp_path / "header.gguf", "truncated within its header"),
        "short data": (tmp_path / "data.gguf", "truncated"),
        "other architecture": (tmp_path / "qwen.gguf", "'qwen2'"),
        "unknown tensor": (tmp_path / "biased.gguf", "has no blk.0.attn_norm.weight"),
    }
    files["text"][0].write_text("hello")
    files["empty"][0].write_bytes(b"")
    files["short header"][0].write_bytes(tiny.read_bytes()[:1500])
    files["short data"][0].write_bytes(tiny.read_bytes()[:-20_000])
    write_tiny(files["other architecture"][0], is_tied=True, architecture="qwen2")
    files["unknown tensor"][0].write_bytes(
        tiny.read_bytes().replace(b"blk.0.attn_norm.weight", b"blk.0.attn_qkvx.weight")
    )
    for path, message in files.values():
        with pytest.raises(ModelError, match=message):
            expansion.read_source(path)
