"""Heads for an expanded target: they propose what the small target's heads do."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ggufspec import DecoderOptions, SpeculativeDecoder
from ggufspec.errors import UsageError
from ggufspec.llamacpp.head import Head, head_sources
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions, Placement
from lab import expansion
from lab.expanded_heads import expand_eagle3, expand_mimo2, expanded_tensors
from lab.mimo2 import read_blocks, write_mimo2
from tests.support import heads

EAGLE3 = Path(__file__).resolve().parents[2] / "profiles" / "demo" / "demo-eagle3-Q8_0.gguf"
PROMPTS = ("class Error(Exception):\n    ", "def main():\n", "The with statement is used to")  # no near-ties
SHAPES = {
    "wider": {"width": 416, "layers": 11, "heads": 12, "kv_heads": 4, "ffn": 1000},
    "many heads": {"width": 512, "heads": 32, "kv_heads": 8, "layers": 9},  # the query heads are in two groups
}
Pairs = dict[str, tuple[tuple[Path, Path], tuple[Path, Path]]]


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def pairs(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """(target and head, both expanded) of each kind."""
    folder = tmp_path_factory.mktemp("expanded")
    shape = replace(expansion.shape_of(expansion.read_source(target)), **request.param)
    big = folder / "big.gguf"
    expansion.expand(expansion.Spec(target, shape, "F16", big))
    own = {**heads.mtp_block(1, noise=1.0), "nextn.shared_head_norm.weight": np.full(heads.WIDTH, 0.5, np.float32)}
    mtp = write_mimo2(target, folder / "small-mtp.gguf", [own])
    big_mtp = expand_mimo2(mtp, target, big, folder / "big-mtp.gguf")
    half = expand_eagle3(
        EAGLE3, target, expansion.shape_of(expansion.read_source(target)), folder / "small-eagle3.gguf"
    )
    eagle3 = expand_eagle3(EAGLE3, target, shape, folder / "big-eagle3.gguf")
    return {"eagle3": ((target, half), (big, eagle3)), "mtp": ((mtp, mtp), (big_mtp, big_mtp))}


def read_pairs(target: Path, file: Path) -> list[np.ndarray]:
    """Return a head's logits for a text, on the target's rows and then on a row of its own."""
    with ExitStack() as stack:
        model = stack.enter_context(Model(target, Placement(mtp=file == target)))
        own = model if file == target else stack.enter_context(Model(file, Placement()))
        options = ContextOptions(ctx_size=512, max_outputs=16, threads=1, rewind=15)
        context = Context(model, replace(options, hidden=head_sources(own)))
        stack.callback(context.close)
        head = Head(own, context, options)
        stack.callback(head.close)
        tokens = model.tokenize(PROMPTS[0] * 2)[:16]
        logits = [context.decode(tokens, outputs=len(tokens)).copy()]
        rows = head.encode(context.hidden(0, len(tokens) - 1))
        found, gives = head.read(tokens[1:], rows, 1 - head.shift, outputs=True)
        logits.append(found.copy())
        found, _ = head.read(tokens[:1], gives[-1:], len(tokens) - head.shift, outputs=True)
        return [*logits, found.copy()]


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_an_expanded_head_has_the_same_logits(kind: str, pairs: Pairs) -> None:
    small, big = (read_pairs(*files) for files in pairs[kind])
    for wanted, got in zip(small, big, strict=True):
        known = np.isfinite(wanted)
        assert np.array_equal(known, np.isfinite(got))
        assert np.ptp(wanted[known]) > 5  # or this would prove little
        np.testing.assert_allclose(got[known], wanted[known], rtol=0, atol=0.03)


def test_an_expanded_head_is_accepted_as_often(pairs: Pairs) -> None:
    found = []
    options = DecoderOptions(ctx_size=512, threads=1, drafters=("eagle3",), draft_policy="fixed", draft_max=3)
    for target, head in pairs["eagle3"]:
        texts, drafted, accepted = [], 0, 0
        with SpeculativeDecoder(target, head, options) as decoder:
            for prompt in PROMPTS:
                texts.append([one.token for one in decoder.generate(prompt, max_tokens=64)])
                assert decoder.statistics is not None
                drafted += decoder.statistics.drafted
                accepted += decoder.statistics.accepted
        found.append((texts, accepted / drafted))
    (texts, rate), (big_texts, big_rate) = found
    assert big_texts == texts
    assert rate > 0.4
    assert big_rate == pytest.approx(rate, abs=0.01)


def test_blocks_are_read_as_they_were_written(target: Path, tmp_path: Path) -> None:
    block = heads.mtp_block(1, noise=1.0)
    (found,) = read_blocks(write_mimo2(target, tmp_path / "mtp.gguf", [block]))
    assert found.keys() == block.keys()
    for name, values in block.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-3, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("change", [{"vocab": 5000, "width": 512}, {"head_size": 128}])
def test_what_a_head_must_keep(change: dict[str, int], target: Path) -> None:
    shape = replace(expansion.shape_of(expansion.read_source(target)), **change)
    with pytest.raises(UsageError, match="keeps its target's vocabulary and head size"):
        expanded_tensors(heads.mtp_block(1), target, shape)
