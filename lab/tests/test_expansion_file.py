"""Expanded models as files: llama.cpp's own types, the bytes that were reported, little memory, whole or not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ggufspec import DecoderOptions, SpeculativeDecoder
from ggufspec.bench.prompts import PROMPTS
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.llamacpp.gguf import Gguf, parse_header
from ggufspec.llamacpp.quantize import to_numbers, write_quantised
from ggufspec.models import sparse
from lab import expansion
from lab.evidence_models import PAIRS
from tests.support import shapes
from tests.support.processes import eventually, workers

LONG = replace(expansion.SHAPES["llama3-8b"], vocab=4096)  # 3.7 GB at Q3_K_L, with a small vocabulary


def grow(
    small: Path, path: Path, shape: expansion.Shape, kind: str, fill: expansion.Fill = "holes"
) -> expansion.Result:
    """In this process."""
    return expansion.run(expansion.Spec(small, shape, kind, path, fill), lambda event: None, threading.Event())


def needed(
    small: Path,
    shape: expansion.Shape,
    kind: str,
    fill: expansion.Fill = "holes",
) -> expansion.Needed:
    spec = expansion.Spec(small, shape, kind, fill=fill)
    return expansion.run(spec, lambda event: None, threading.Event()).needed


def read(path: Path) -> tuple[Gguf, bytes]:
    data = path.read_bytes()
    return parse_header(data), data


# ---- types and bytes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "kind", "like"),
    [
        ("llama3-70b", "Q3_K_S", "llama3-70b-q3_k_s"),
        ("llama3-8b", "Q3_K_L", "llama3-8b-q3_k_l"),
        ("mixtral-8x7b", "Q4_K_M", "mixtral-8x7b"),
    ],
)
def test_tensors_are_those_of_the_published_model(shape: str, kind: str, like: str, target: Path) -> None:
    """Names, types and sizes, by another way to them (tests/support/shapes.py)."""
    reported = needed(target, expansion.SHAPES[shape], kind)
    published = shapes.SHAPES[like]
    assert reported.types == {tensor.name: gguf_name(tensor.type) for tensor in published.tensors}
    header_bytes = reported.size_bytes - published.nbytes
    assert 0 < header_bytes < 8e6
    assert reported.disk_bytes < published.nbytes / 5


def gguf_name(kind: str) -> str:
    return kind.lower().replace("_k", "_K")


@pytest.mark.parametrize("fill", ["holes", "blocks"])
@pytest.mark.parametrize(
    ("shape", "kind"), [("tiny", "Q3_K_S"), ("tiny", "F16"), ("tiny-draft", "Q3_K_L"), ("tiny-moe", "Q4_K_M")]
)
def test_bytes_are_those_that_were_told(
    shape: str, kind: str, fill: expansion.Fill, target: Path, draft: Path, tmp_path
):
    small = draft if shape == "tiny-draft" else target
    reported = needed(small, expansion.SHAPES[shape], kind, fill)
    made = grow(small, tmp_path / "big.gguf", expansion.SHAPES[shape], kind, fill)
    assert made.needed == reported
    assert (tmp_path / "big.gguf").stat().st_size == reported.size_bytes
    assert made.disk_bytes == pytest.approx((tmp_path / "big.gguf").stat().st_blocks * 512, rel=0.01)
    assert reported.disk_bytes / 2 < made.disk_bytes <= reported.disk_bytes
    parsed, _ = read(tmp_path / "big.gguf")
    assert {tensor.name: tensor.type for tensor in parsed.tensors} == reported.types
    assert {tensor.name: tensor.shape for tensor in parsed.tensors} == expansion.SHAPES[shape].tensors()
    assert parsed.metadata["general.quantization_version"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["big.gguf"]


@pytest.mark.parametrize("kind", ["Q3_K_S", "Q3_K_L", "Q4_0"])
def test_the_file_is_the_one_that_llama_cpp_would_make(kind: str, target: Path, tmp_path: Path) -> None:
    """Written in F16 and quantised by llama.cpp: the same types and the same numbers, tensor by tensor."""
    shape = expansion.SHAPES["tiny"]
    grow(target, tmp_path / "half.gguf", shape, "F16")
    write_quantised(tmp_path / "half.gguf", tmp_path / "other.gguf", kind, threads=1)
    grow(target, tmp_path / "big.gguf", shape, kind)
    (own, data), (other, other_data) = read(tmp_path / "big.gguf"), read(tmp_path / "other.gguf")
    places = {tensor.name: tensor for tensor in other.tensors}
    assert len(places) == len(own.tensors)
    assert own.metadata["general.file_type"] == other.metadata["general.file_type"]
    for tensor in own.tensors:
        there = places[tensor.name]
        assert (tensor.type, tensor.shape) == (there.type, there.shape)
        numbers, wanted = (
            to_numbers(tensor.type, data[start : start + tensor.size_bytes], tensor.shape[::-1])
            for data, start in (
                (data, own.data_offset + tensor.offset),
                (other_data, other.data_offset + there.offset),
            )
        )
        assert np.array_equal(numbers, wanted), tensor.name


def test_a_large_model_takes_little_memory_disk_and_time(target: Path, tmp_path: Path) -> None:
    made = expansion.expand(expansion.Spec(target, LONG, "Q3_K_L", tmp_path / "big.gguf"))
    assert (tmp_path / "big.gguf").stat().st_size == made.needed.size_bytes > 3.5e9
    assert made.disk_bytes < 100e6
    assert made.peak_rss_bytes < 400e6


def test_a_padded_vocabulary_is_told_by_the_header(target: Path, draft: Path, tmp_path: Path) -> None:
    for small, name in ((target, "tiny"), (draft, "tiny-draft")):
        grow(small, tmp_path / f"{name}.gguf", expansion.SHAPES[name], "Q8_0")
    one, other = (read(tmp_path / f"{name}.gguf")[0] for name in ("tiny", "tiny-draft"))
    assert one.tokens_digest == other.tokens_digest
    assert one.lengths["tokenizer.ggml.tokens"] == one.lengths["tokenizer.ggml.token_type"] == 5120
    assert one.metadata["llama.vocab_size"] == 5120


# ---- the pair -------------------------------------------------------------------------------------


def acceptance(target: Path, draft: Path) -> float:
    options = DecoderOptions(ctx_size=512, threads=1, drafters=("draft",), draft_policy="fixed", draft_max=4)
    drafted = accepted = 0
    with SpeculativeDecoder(target, draft, options) as decoder:
        for prompt in PROMPTS[:6]:
            for _ in decoder.generate(prompt.text, max_tokens=64):
                pass
            assert decoder.statistics is not None
            drafted += decoder.statistics.drafted
            accepted += decoder.statistics.accepted
    return accepted / drafted


def test_a_pair_of_three_bits_is_accepted_nearly_as_often(target: Path, draft: Path, tmp_path: Path) -> None:
    events = []
    models = expansion.Model("tiny", "Q3_K_S"), expansion.Model("tiny-draft", "Q3_K_L")
    pair = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    for small, model, path in zip((target, draft), models, pair, strict=True):
        shape = expansion.SHAPES[model.shape]
        expansion.expand(expansion.Spec(small, shape, model.type, path), on_event=events.append)
    assert {event["event"] for event in events} == {"writing"}
    own, small = acceptance(*pair), acceptance(target, draft)
    assert own > 0.6 * small > 0.2


def test_every_pair_is_of_shapes_with_one_vocabulary() -> None:
    for target, draft in PAIRS.values():
        big, small = expansion.SHAPES[target.shape], expansion.SHAPES[draft.shape]
        assert abs(big.vocab - small.vocab) <= 128  # common/speculative.cpp
        assert big.parameters() > 4 * small.parameters()


# ---- what is refused, and what is left ------------------------------------------------------------


def test_bad_input(target: Path, draft: Path, tmp_path: Path) -> None:
    shape = expansion.SHAPES["tiny"]
    with pytest.raises(UsageError, match="'Q9_K'"):
        expansion.expand(expansion.Spec(target, shape, "Q9_K", tmp_path / "big.gguf"))
    with pytest.raises(UsageError, match="width 128 < 320"):
        expansion.expand(expansion.Spec(target, replace(shape, width=128), "F16", tmp_path / "big.gguf"))
    with pytest.raises(GgufspecError, match="cannot be written"):
        expansion.expand(expansion.Spec(target, shape, "F16", tmp_path / "nowhere" / "big.gguf"))
    assert not list(tmp_path.iterdir())
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(draft.read_bytes())
    with pytest.raises(UsageError, match="overwrite"):
        expansion.expand(expansion.Spec(copy, expansion.SHAPES["tiny-draft"], "F16", copy))
    assert copy.read_bytes() == draft.read_bytes()


def test_no_room_is_said_before_anything_is_written(target: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sparse, "free_disk_bytes", lambda path: 10 << 20)
    with pytest.raises(GgufspecError, match=r"big.gguf need [0-9.]+ MB of disk, but .* has [0-9.]+ MB"):
        grow(target, tmp_path / "big.gguf", expansion.SHAPES["tiny"], "Q3_K_S")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(target: Path, tmp_path: Path, monkeypatch) -> None:
    def full(*arguments: object) -> int:
        assert list(tmp_path.iterdir())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sparse, "fill", full)
    with pytest.raises(GgufspecError, match="cannot be written: No space left"):
        grow(target, tmp_path / "big.gguf", expansion.SHAPES["tiny"], "Q3_K_S")
    assert not list(tmp_path.iterdir())


MAKE = """
import signal, sys
from dataclasses import replace
from pathlib import Path
from lab import expansion
signal.signal(signal.SIGINT, signal.default_int_handler)
shape = replace(expansion.SHAPES["llama3-8b"], vocab=4096)
expansion.expand(expansion.Spec(Path(sys.argv[1]), shape, "Q3_K_L", Path(sys.argv[2]), "blocks"))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interruption_leaves_nothing(number: signal.Signals, target: Path, tmp_path: Path) -> None:
    program = [sys.executable, "-c", MAKE, str(target), str(tmp_path / "big.gguf")]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as parent:
        assert eventually(lambda: any(path.stat().st_blocks > 100 for path in tmp_path.glob("*/big.gguf")))
        assert workers(parent.pid)
        os.kill(parent.pid, number)
        _, stderr = parent.communicate()
    assert parent.returncode != 0
    assert ("Interrupted" in stderr) == (number == signal.SIGINT)
    assert eventually(lambda: not list(tmp_path.iterdir()))
