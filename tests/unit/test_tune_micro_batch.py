"""The micro-batch: what is computed at once, what it takes, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import UsageError
from ggufspec.llamacpp.dryrun import DryRunJob, PlacedModel, ask
from ggufspec.llamacpp.options import ContextOptions, Placement


def test_without_one_all_of_a_call_is_computed_at_once() -> None:
    options = ContextOptions(2048, 16, 1)
    assert options.computed == options.batch == 512


def test_a_verification_is_never_divided() -> None:
    assert DecoderOptions(ubatch_size=8, draft_max=40).context(with_draft=True).computed == 41


def test_a_larger_one_makes_calls_larger() -> None:
    options = ContextOptions(4096, 16, 1, ubatch_size=1024)
    assert options.computed == options.batch == 1024


def test_it_is_no_larger_than_the_context() -> None:
    assert ContextOptions(128, 16, 1, ubatch_size=4096).computed == 128 + 64


@pytest.mark.parametrize("tokens", [-1, 5000])
def test_what_is_refused(tokens: int) -> None:
    with pytest.raises(UsageError, match="--ubatch-size"):
        DecoderOptions(ubatch_size=tokens)


def test_a_smaller_micro_batch_takes_less(target: Path) -> None:
    """By llama.cpp's own dry run, with all layers on a card that is not here."""
    contexts = [ContextOptions(2048, 16, 1, flash_attn="on", ubatch_size=tokens) for tokens in (512, 128, 32)]
    answers = ask(DryRunJob(simulated_devices=1), [PlacedModel(target, Placement(-1), context) for context in contexts])
    found = [answer.devices["RPC0"].compute for answer in answers]
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0]


def test_the_answer_is_the_same(target: Path) -> None:
    from ggufspec.decoding.decoder import SpeculativeDecoder
    from ggufspec.decoding.sampling import Sampling

    prompt = "def add(a, b):\n    return a + b\n\n" * 12
    texts = []
    for ubatch_size in (0, 32):
        options = replace(DecoderOptions(threads=1, drafters=()), ubatch_size=ubatch_size)
        with SpeculativeDecoder(target, None, options) as decoder:
            tokens = decoder.generate(prompt, max_tokens=8, sampling=Sampling(temperature=0.0))
            texts.append("".join(token.text for token in tokens))
    assert texts[0] == texts[1] != ""
