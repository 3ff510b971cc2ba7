"""The promise: the same seed gives the same text with and without a draft, and where it cannot, why not."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import Llama

from ggufspec import DecoderOptions, Sampling, SpeculativeDecoder
from ggufspec.bench import divergence
from ggufspec.decoding import answer as answer_module
from ggufspec.hardware.host import physical_cores

ROOT = Path(__file__).resolve().parents[2]
THREADS = min(2, physical_cores())  # of the full tier: they spin at barriers, which on a busy machine takes for ever
OPTIONS = DecoderOptions(ctx_size=1536, threads=1, strict=True, draft_policy="fixed", draft_max=4)
ADAPTIVE = replace(OPTIONS, draft_policy="adaptive", draft_max=15)  # drafts if it pays on this machine
GREEDY, WARM = Sampling(), Sampling(temperature=0.8, seed=7)
BARE = Sampling(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=11)
TOKENS = 24


def tokens(decoder: SpeculativeDecoder, prompt: str, sampling: Sampling, *, alone: str = "") -> list[int]:
    return [e.token for e in decoder.generate(prompt, max_tokens=TOKENS, sampling=sampling, alone=alone)]


@pytest.mark.parametrize(("every", "threads"), [(33, 1), pytest.param(8, THREADS, marks=pytest.mark.full)])
def test_the_demo_pair_in_strict_mode(pair, prompts, every, threads):
    decoders = {k: SpeculativeDecoder(*pair, replace(OPTIONS, draft_max=k, threads=threads)) for k in (1, 4, 8)}
    decoders[15] = SpeculativeDecoder(*pair, replace(ADAPTIVE, threads=threads))
    longest = drafted = 0
    for i, prompt in enumerate([*prompts[::every], max(prompts, key=len)]):
        for sampling in (GREEDY, replace(WARM if i % 2 else BARE, seed=i)):
            alone = tokens(decoders[4], prompt, sampling, alone="target")
            longest = max(longest, decoders[4].statistics.prompt_tokens)
            for k, decoder in decoders.items():
                assert tokens(decoder, prompt, sampling) == alone, (i, k, sampling)
                drafted += decoder.statistics.accepted
    assert longest >= 800
    assert drafted > 1000 / every  # the drafts were really used


@pytest.mark.full
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_grown_targets_in_strict_mode(pair, prompts, expanded, kind):
    options = replace(OPTIONS, threads=THREADS)
    decoders = {k: SpeculativeDecoder(expanded(kind), pair[1], replace(options, draft_max=k)) for k in (1, 4, 8)}
    for i, prompt in enumerate(prompts[::6]):
        k = (1, 4, 8)[i % 3]
        sampling = (GREEDY, replace(WARM, seed=i))[i // 3 % 2]
        alone = tokens(decoders[k], prompt, sampling, alone="target")
        assert tokens(decoders[k], prompt, sampling) == alone, (i, k, sampling)


def test_a_target_alone_gives_the_same_text_as_a_pair_without_its_draft(pair, prompts):
    with SpeculativeDecoder(pair[0], None, OPTIONS) as alone, SpeculativeDecoder(*pair, OPTIONS) as both:
        for prompt in prompts[::25]:
            assert tokens(alone, prompt, GREEDY) == tokens(both, prompt, GREEDY, alone="target")
            assert tokens(alone, prompt, WARM) == tokens(both, prompt, WARM)


@pytest.fixture
def smollm2() -> Path:
    """A chat model, which is fetched."""
    made = subprocess.run([sys.executable, ROOT / "scripts" / "real-models"], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no SmolLM2-135M-Instruct: {made.stderr.strip().splitlines()[-1]}")
    return Path(made.stdout.strip()) / "SmolLM2-135M-Instruct.Q4_1.gguf"


CHATS = [
    f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    for question in (
        "Write a Python function that merges two sorted lists.",
        "Explain how a hash table works, briefly.",
        "List five tips for writing readable code.",
        "Tell me a short story about a lighthouse keeper.",
    )
]


def check_says_what_llama_says(path, texts, count):
    """Our target-only, and llama-cpp-python's own ``Llama`` with the same settings, greedy."""
    options = DecoderOptions(ctx_size=1536, threads=1, flash_attn="off")
    settings = {"n_ctx": 1536, "n_threads": 1, "n_threads_batch": 1, "flash_attn": False, "verbose": False}
    longest = 0
    with (
        SpeculativeDecoder(path, None, options) as decoder,
        contextlib.closing(Llama(str(path), **settings)) as llama,
    ):
        for text in texts:
            ids, expected = decoder.target.tokenize(text, special=True), []
            llama.reset()
            for token in llama.generate(ids, temp=0.0):
                expected.append(token)
                if decoder.target.is_end(token) or len(expected) == count:
                    break
            assert [one.token for one in decoder.generate(ids, max_tokens=count)] == expected, text
            longest = max(longest, len(expected))
    assert longest == count


def test_a_target_alone_says_what_llama_says(pair, prompts):
    check_says_what_llama_says(pair[0], prompts[::25], TOKENS)


@pytest.mark.full
def test_a_real_target_alone_says_what_llama_says(smollm2):
    check_says_what_llama_says(smollm2, CHATS, 96)


def test_the_check_can_fail(pair, prompts, monkeypatch):
    """A rule that keeps one wrong token in ten is caught."""
    real = answer_module.make_rule

    def careless(*arguments):
        rule = real(*arguments)
        verify = rule.verify
        rule.verify = lambda rows, proposals, position: (
            replace(verify(rows, proposals, position), accepted=len(proposals))
            if position % 10 == 0
            else verify(rows, proposals, position)
        )
        return rule

    with SpeculativeDecoder(*pair, OPTIONS) as decoder:
        alone = [tokens(decoder, prompt, GREEDY, alone="target") for prompt in prompts[:10]]
        monkeypatch.setattr(answer_module, "make_rule", careless)
        assert [tokens(decoder, prompt, GREEDY) for prompt in prompts[:10]] != alone


@pytest.mark.full
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_divergences_of_the_default_mode_are_near_ties(pair, prompts, expanded, kind):
    """Without --strict a text may leave target-only's only where the top two are closer than rounding."""
    target = expanded(kind)
    options = replace(OPTIONS, strict=False, threads=THREADS)
    cases = []
    with SpeculativeDecoder(target, pair[1], options) as decoder:
        for i, prompt in enumerate(prompts[::4]):
            alone = tuple(tokens(decoder, prompt, GREEDY, alone="target"))
            with_draft = tuple(tokens(decoder, prompt, GREEDY))
            if alone != with_draft:
                cases.append(divergence.DivergenceCase(i, prompt, alone, with_draft))
    spec = divergence.DivergenceJob(target, options, tuple(cases))
    found = divergence.run(spec, lambda event: None, threading.Event())
    assert len(found) == len(cases) <= 10
    assert all(d.explained and d.margin <= d.noise for d in found), found


def test_a_wrong_token_is_no_near_tie(pair, prompts):
    """The explanation of a divergence refuses a token that the target would never have said."""
    with SpeculativeDecoder(pair[0], None, replace(OPTIONS, strict=False)) as decoder:
        alone = tuple(tokens(decoder, prompts[50], GREEDY))
    wrong = (*alone[:10], (alone[10] + 1) % decoder.target.vocab_size, *alone[11:])
    case = divergence.DivergenceCase(0, prompts[50], alone, wrong)
    found = divergence.run(divergence.DivergenceJob(pair[0], OPTIONS, (case,)), lambda event: None, threading.Event())
    assert found[0].position == 10
    assert not found[0].explained
    assert np.isfinite(found[0].margin)
