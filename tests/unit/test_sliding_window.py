"""Sliding windows keep a window and a micro-batch of cells: tokens are taken back across its edge, and none is lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggufspec import SpeculativeDecoder
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import ModelError
from ggufspec.llamacpp.dryrun import allocated
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions
from ggufspec.llamacpp.params import load_model
from ggufspec.models.headers import read_headers
from ggufspec.planning.memory import Placement, resident
from tests.support import random_weights
from tests.support.shapes import POST, SANDWICH, Dims, Experts, Label, transformer

VOCABULARY, WINDOW, CELLS = 1024, 64, 256  # cells of a windowed layer: 64 + 32, padded
ROUNDING = 0.02  # of the logits' range: up to 0.011 was seen, and 0.026 and more where one cell of the window is lost
LONG = 700  # tokens of a text: the windowed layers' cells are written twice and more

DIMS = Dims(6, 256, 4, 2, 512, VOCABULARY, 64)
KEYS = {"attention.sliding_window": WINDOW}
SHAPES = {
    "gemma3": transformer(
        Label("gemma3", "swa", "gemma3", "F16"), DIMS, norms=SANDWICH, tied=True, qk_norm=True, keys=KEYS
    ),
    "gpt-oss": transformer(
        Label("gpt-oss", "swa", "gpt-oss", "F16"),
        DIMS,
        moe=Experts(4, 4, 256, bias=True),
        bias=True,
        norms=POST,
        extra={"attn_sinks.weight": (4,), "attn_output.bias": (256,)},
        keys=KEYS,
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("windowed")
    return {
        name: random_weights.write(folder / f"{name}.gguf", shape, tokenizer=True) for name, shape in SHAPES.items()
    }


def load_plainly(lib: Any, path: Path, params: Any) -> Any:
    params.use_extra_bufts = False
    return load_model(lib, path, params)


@pytest.fixture(scope="module")
def models(files: dict[str, Path]) -> Iterator[dict[str, Model]]:
    with pytest.MonkeyPatch.context() as patch:  # ROUNDING is of kernels that round activations to F16; AMX's do not
        patch.setattr("ggufspec.llamacpp.model.load_model", load_plainly)
        loaded = {name: Model(path) for name, path in files.items()}
    yield loaded
    for model in loaded.values():
        model.close()


def context(model: Model, *, swa_full: bool, cache_type: str = "f16", rewind: int = 15) -> Context:
    types = {"cache_type_k": cache_type, "cache_type_v": cache_type}
    return Context(model, ContextOptions(2048, 16, 1, **types, ubatch_size=32, swa_full=swa_full, rewind=rewind))


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.ptp(expected))


def some(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=count)


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_the_whole_cache(models, name, cache_type):
    """Batches of every width, a part of each taken back, across the edge again and again."""
    text, wrong, draw = some(LONG, 1), some(LONG + 16, 2), random.Random(3)
    small, whole = (context(models[name], swa_full=full, cache_type=cache_type) for full in (False, True))
    with closing(small), closing(whole):
        while small.length < LONG - 16:
            start, batch_size = small.length, draw.randint(1, 16)
            kept = draw.randint(1, batch_size)
            batch = text[start : start + kept] + wrong[start + kept : start + batch_size]
            found, expected = (one.decode(batch, batch_size).copy() for one in (small, whole))
            assert difference(found, expected) < ROUNDING
            for one in (small, whole):
                one.rewind(start + kept)
        assert small.length == whole.length > 2 * CELLS
        kv_bytes = [sum(part.kv for part in allocated(one).values()) for one in (small, whole)]
        assert kv_bytes[0] < 0.6 * kv_bytes[1]


@pytest.mark.parametrize("name", SHAPES)
def test_a_chain_of_batches_goes_back_too(models, name):
    """As a draft's tokens do: one by one, then all of them wrong."""
    text, wrong = some(LONG, 4), some(LONG + 16, 5)
    small, whole = (context(models[name], swa_full=full, rewind=31) for full in (False, True))
    with closing(small), closing(whole):
        for one in (small, whole):
            one.decode(text[:200], 0)
        for start in range(200, 560, 24):
            for place in range(start, start + 31):
                small.decode(wrong[place : place + 1], 1)
            small.rewind(start)
            found, expected = (one.decode(text[start : start + 24], 8).copy() for one in (small, whole))
            assert difference(found, expected) < ROUNDING


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_gone_is_refused(models, name):
    text = some(700, 6)
    small, whole = (context(models[name], swa_full=full) for full in (False, True))
    with closing(small), closing(whole):
        small.decode(text[:90], 0)
        assert small.floor == 0  # nothing was overwritten yet
        small.rewind(3)
        small.decode(text[3:], 0)
        assert 700 - CELLS + WINDOW - 1 <= small.floor <= 700 - 31
        with pytest.raises(ModelError, match=f"cannot go back to token {small.floor - 1}, only to {small.floor}"):
            small.rewind(small.floor - 1)
        kept = small.floor
        small.rewind(kept)  # the furthest that is possible is right
        whole.decode(text[:kept], 0)
        found, expected = (one.decode(text[kept : kept + 8], 8).copy() for one in (small, whole))
        assert difference(found, expected) < ROUNDING
        assert whole.floor == 0
        gone = kept - WINDOW // 2  # llama.cpp goes there all the same, and is wrong
        for one in (small, whole):
            one._lib.llama_memory_seq_rm(one._memory._memory, 0, gone, -1)
            one.length = one._memory.held = gone
        found, expected = (one.decode(text[gone : gone + 8], 8).copy() for one in (small, whole))
        assert difference(found, expected) > 2 * ROUNDING
        small.rewind(0)
        assert small.length == 0


@pytest.mark.parametrize("name", SHAPES)
def test_an_answer_is_the_targets_own(files, models, name):
    """The model drafts for itself, and n-grams do; each token is what the whole cache says, but for near ties."""
    prompt = some(150, 7) * 2
    options = DecoderOptions(ctx_size=1024, threads=1, ubatch_size=32, draft_policy="fixed", draft_max=7)
    with SpeculativeDecoder(files[name], files[name], options) as pair:
        answer = [emitted.token for emitted in pair.generate(prompt, max_tokens=160)]
        assert pair.statistics is not None
        assert 0 < pair.statistics.accepted < pair.statistics.drafted
        other = [emitted.token for emitted in pair.generate(prompt[:20], max_tokens=8, cache_prompt=True)]
    with closing(context(models[name], swa_full=True)) as whole:
        for text, tokens in ((prompt, answer), (prompt[:20], other)):
            whole.rewind(0)
            whole.decode(text[:-1], 0)
            for place, token in enumerate([text[-1], *tokens][:-1]):
                row = whole.decode([token], 1)[0]
                assert row.max() - row[tokens[place]] < ROUNDING * np.ptp(row)


def test_strict_mode_keeps_whole_caches(files):
    """Which cells of a window a token gets depends on what was drafted, and rounding on the cells."""
    options = DecoderOptions(
        ctx_size=768, threads=1, ubatch_size=32, draft_policy="fixed", draft_max=7, strict=True, drafters=("lookup",)
    )
    assert options.context(with_draft=True).swa_full
    assert not DecoderOptions().context(with_draft=True).swa_full
    prompt = some(150, 7) * 2
    answers = []
    for drafters in (("lookup",), ()):
        with SpeculativeDecoder(files["gpt-oss"], None, replace(options, drafters=drafters)) as decoder:
            answers.append([emitted.token for emitted in decoder.generate(prompt, max_tokens=100)])
    assert answers[0] == answers[1]


def test_the_bytes_of_a_long_context(files: dict[str, Path]) -> None:
    header = read_headers([files["gemma3"]])[0].header
    windowed = sum(header.windowed)
    assert windowed == 5
    small, whole = (
        resident(header, Placement(), ContextOptions(131072, 2, 1, swa_full=full))["CPU"].kv for full in (False, True)
    )
    assert small / whole == pytest.approx((header.blocks - windowed) / header.blocks, rel=0.05)
