"""llama-cpp-python's Llama with our draft: its text is that of Llama alone, and its limits are gone or said.

Llama alone decodes a token at a time, and with a draft several, so that kernels round differently (decision 017). The
target is the demo's at Q8_0 with flash attention, where that is nothing; F16 has a test of its own.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import gguf
import numpy as np
import pytest
from llama_cpp import Llama, LlamaRAMCache
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from ggufspec import DraftModel
from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.model import Context
from ggufspec.models.profile import demo_pair
from tests.support import random_weights, shapes

TOKENS, N_CTX, N_BATCH = 24, 1536, 128
PROMPT = "import os\nimport sys\n\n\ndef main("
ROUNDING = 0.05  # logits, by which widths differ at most on the demo's target


@pytest.fixture(scope="module")
def demo():
    return demo_pair()


@pytest.fixture(scope="module")
def pair(tmp_path_factory, demo):
    """(target at Q8_0, draft)."""
    path = tmp_path_factory.mktemp("quantised") / "target-Q8_0.gguf"
    script = Path(__file__).parents[2] / "scripts" / "grow_pair.py"
    subprocess.run([sys.executable, script, demo[0], path, "--type", "Q8_0"], check=True, capture_output=True)
    return path, demo[1]


@pytest.fixture
def made():
    """made(path, **options) -> a Llama of one thread that is closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(path, **options):
            given = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "verbose": False}
            given |= options
            return stack.enter_context(contextlib.closing(Llama(str(path), **given)))

        yield make


def greedy(llama, prompt, count=TOKENS):
    """Ids of an answer of so many tokens; a text that ends is asked to go on, so that every answer is as long."""
    tokens = llama.tokenize(prompt.encode())
    generated = llama.generate(tokens, temp=0.0, repeat_penalty=1.0)
    with contextlib.closing(generated):
        return [next(generated) for _ in range(count)]


def answer(llama, prompt, **options):
    asked = {"max_tokens": TOKENS, "temperature": 0.0, "repeat_penalty": 1.0} | options
    return llama(prompt, **asked)["choices"][0]["text"]


def slowed(llama, draft):
    """Let time go by only while the target decodes, a second each: on a real clock no draft would pay for this pair."""
    now, real = [0.0], llama.eval
    draft._clock = lambda: now[0]

    def evaluate(tokens):
        now[0] += 1.0 + 0.01 * len(tokens)
        real(tokens)

    llama.eval = evaluate


@pytest.mark.parametrize("every", [33, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("policy", ["adaptive", "fixed"])
def test_answers_are_those_of_llama_alone(pair, prompts, made, policy, every):
    """Prompts of up to a thousand tokens, in batches of 128."""
    alone = made(pair[0], n_ctx=N_CTX, n_batch=N_BATCH)
    both = made(pair[0], n_ctx=N_CTX, n_batch=N_BATCH)
    draft = DraftModel(pair[1], both, threads=1, draft_policy=policy, lookup=policy == "adaptive")
    if policy == "adaptive":
        slowed(both, draft)
    longest = drafted = accepted = 0
    for number, prompt in enumerate(prompts[::every]):
        assert greedy(both, prompt) == greedy(alone, prompt), number
        longest = max(longest, both.n_tokens)
        drafted += sum(len(one.drafted) for one in draft.rounds)
        accepted += sum(one.accepted for one in draft.rounds)
    assert longest > 6 * N_BATCH
    assert 300 / every < accepted < drafted  # the draft was really used, and was really wrong


@pytest.mark.parametrize("every", [33, pytest.param(2, marks=pytest.mark.full)])
def test_at_f16_answers_differ_only_at_ties(demo, prompts, made, every):
    """Where they do, both tokens are as likely to Llama alone as far as rounding goes."""
    options = {"n_ctx": N_CTX, "n_batch": N_BATCH, "flash_attn": False}
    alone, reported = made(demo[0], **options), made(demo[0], logits_all=True, **options)
    both = made(demo[0], **options)
    draft = DraftModel(demo[1], both, threads=1, draft_policy="fixed")
    differing = 0
    for number, prompt in enumerate(prompts[::every]):
        ours, theirs = greedy(both, prompt), greedy(alone, prompt)
        if ours != theirs:
            differing += 1
            at = next(place for place, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
            reported.reset()
            reported.eval([*reported.tokenize(prompt.encode()), *theirs[:at]])
            row = reported.scores[reported.n_tokens - 1]
            assert abs(row[ours[at]] - row[theirs[at]]) < ROUNDING, (number, at)
    assert differing <= 3
    assert sum(one.accepted for one in draft.rounds) > 0


def test_its_context_is_as_large_as_its_llamas(pair, made):
    llama = made(pair[0])
    draft = DraftModel(pair[1], llama, threads=1)
    assert isinstance(llama.scores, np.ndarray)
    assert answer(llama, PROMPT) == answer(made(pair[0]), PROMPT)
    assert draft.options.ctx_size == llama.n_ctx()
    assert len(draft.rounds) > 3


def test_a_stream_is_the_same_too(pair, made):
    llama = made(pair[0])
    DraftModel(pair[1], llama, threads=1)
    pieces = [one["choices"][0]["text"] for one in llama(PROMPT, max_tokens=TOKENS, temperature=0.0, stream=True)]
    assert "".join(pieces) == answer(llama, PROMPT, repeat_penalty=1.0)


def test_the_same_seed_gives_the_same_text(pair, made):
    alone, llama = made(pair[0]), made(pair[0])
    DraftModel(pair[1], llama, threads=1)
    asked = {"temperature": 0.8, "seed": 7, "max_tokens": 48}
    assert answer(llama, PROMPT, **asked) == answer(alone, PROMPT, **asked)


def test_a_llama_gets_its_draft_later(pair, made):
    llama = made(pair[0])
    before = greedy(llama, PROMPT)
    draft = DraftModel(pair[1], llama, threads=1, draft_policy="fixed")
    assert llama.draft_model is draft
    assert greedy(llama, PROMPT) == before
    assert sum(one.accepted for one in draft.rounds) > 0


def test_a_context_beyond_the_batch(pair, made, prompts):
    prompt = next(prompt for prompt in prompts if len(prompt) > 1500)
    llama = made(pair[0], n_ctx=N_CTX, n_batch=N_BATCH)
    DraftModel(pair[1], llama, threads=1)
    assert answer(llama, prompt) == answer(made(pair[0], n_ctx=N_CTX, n_batch=N_BATCH), prompt)


def test_to_the_last_token_of_the_context(pair, made):
    llama = made(pair[0], n_ctx=256, n_batch=64)
    DraftModel(pair[1], llama, threads=1, draft_policy="fixed")
    prompt = llama.tokenize(PROMPT.encode())
    count = 256 - len(prompt) + 1
    assert greedy(llama, PROMPT, count) == greedy(made(pair[0], n_ctx=256, n_batch=64), PROMPT, count)


def test_nothing_is_read_twice(pair, made, monkeypatch):
    """A second turn costs the draft its new text, and a round its new tokens."""
    counts = []
    real = Context.decode
    monkeypatch.setattr(
        Context,
        "decode",
        lambda self, tokens, outputs, batch_size=0: (
            counts.append(len(tokens)),
            real(self, tokens, outputs, batch_size),
        )[1],
    )
    llama = made(pair[0])
    draft = DraftModel(pair[1], llama, threads=1, draft_policy="fixed", draft_max=4)
    first = PROMPT * 8
    counts.clear()
    said = answer(llama, first)
    rounds = len(draft.rounds) + 1
    assert counts[0] == len(llama.tokenize(first.encode())) + 1  # and the answer's first token
    assert sum(counts) < counts[0] + 6 * rounds
    counts.clear()
    more = "\n\n\ndef other(name):\n"
    answer(llama, first + said + more)
    new = len(llama.tokenize(more.encode())) + TOKENS
    assert counts[0] <= new + 8


def test_logits_are_kept_where_they_were_asked_for(pair, made):
    llama = made(pair[0], logits_all=True)
    DraftModel(pair[1], llama, threads=1)
    asked = {"max_tokens": 8, "temperature": 0.0, "logprobs": 2}
    alone = made(pair[0], logits_all=True)(PROMPT, **asked)["choices"][0]["logprobs"]
    found = llama(PROMPT, **asked)["choices"][0]["logprobs"]
    assert found["tokens"] == alone["tokens"]
    assert found["token_logprobs"] == pytest.approx(alone["token_logprobs"], abs=0.01)


def test_logits_that_nobody_asked_for_are_not_kept(pair, made):
    llama = made(pair[0], n_ctx=1024, n_batch=256)
    scores = llama.scores
    DraftModel(pair[1], llama, threads=1)
    assert llama.scores is scores
    with pytest.raises(ValueError, match="logits_all=False"):
        answer(llama, PROMPT, logprobs=1)


def test_of_a_prompt_only_the_last_token_has_logits(pair, made):
    """And all tokens of a batch that verifies."""
    llama, seen = made(pair[0]), []
    set_batch = llama._batch.set_batch

    def watched(batch, n_past, logits_all):
        seen.append((len(batch), logits_all))
        set_batch(batch, n_past, logits_all)

    llama._batch.set_batch = watched
    DraftModel(pair[1], llama, threads=1, draft_policy="fixed", draft_max=4)
    answer(llama, PROMPT * 4)
    assert seen[0][0] > 30
    assert {(count <= 5, wanted) for count, wanted in seen} == {(False, False), (True, True)}


def test_a_llama_that_had_another_draft(pair, made):
    """It was made to keep all logits, and has no room for those of more than a batch."""
    llama = made(pair[0], n_ctx=1024, n_batch=64, draft_model=LlamaPromptLookupDecoding())
    DraftModel(pair[1], llama, threads=1, draft_policy="fixed")
    assert answer(llama, PROMPT * 10) == answer(made(pair[0], n_ctx=1024, n_batch=64), PROMPT * 10)


def test_a_cache_of_states_works(pair, made):
    llama = made(pair[0], n_ctx=1024, n_batch=256)
    DraftModel(pair[1], llama, threads=1)
    llama.set_cache(LlamaRAMCache())
    before = answer(llama, PROMPT)
    answer(llama, "x = 1\n")
    assert answer(llama, PROMPT) == before


def test_another_vocabulary_is_an_error(pair, made, other_token):
    renamed, token, before, now = other_token
    reported = f"token {token} is '{before}' to the target and '{now}' to the draft"
    with pytest.raises(ModelError, match=reported):
        DraftModel(renamed, made(pair[0]), threads=1)


def test_fewer_tokens_are_an_error(pair, made, small_vocabulary):
    with pytest.raises(ModelError, match="cannot draft for"):
        DraftModel(small_vocabulary, made(pair[0]), threads=1)


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_a_damaged_draft_costs_the_speedup_and_not_the_answer(pair, made, tmp_path, policy):
    path = tmp_path / "nan.gguf"
    shutil.copyfile(pair[1], path)
    reader = gguf.GGUFReader(path, "r+")
    next(tensor for tensor in reader.tensors if tensor.name == "output_norm.weight").data[:] = float("nan")
    reader.data.flush()
    llama = made(pair[0])
    before = greedy(llama, PROMPT)
    draft = DraftModel(path, llama, threads=1, draft_policy=policy)
    slowed(llama, draft)
    assert greedy(llama, PROMPT) == before
    assert any("NaN logits; it drafts no more" in note for note in draft.notes)


def test_a_closed_llama_is_not_served(pair, made):
    llama = made(pair[0])
    llama.close()
    with pytest.raises(UsageError, match="this Llama is closed"):
        DraftModel(pair[1], llama, threads=1)


def test_it_is_closed_with_its_llama(pair, made):
    llama = made(pair[0])
    draft = DraftModel(pair[1], llama, threads=1)
    llama.close()
    with pytest.raises(UsageError, match="is closed"):
        draft(np.array([1, 2, 3], np.intc))


def test_it_goes_with_its_llama(pair):
    llama = Llama(str(pair[0]), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
    draft = DraftModel(pair[1], llama, threads=1)
    gone = weakref.ref(llama)
    del llama
    gc.collect()
    assert gone() is None
    with pytest.raises(UsageError, match="is closed"):
        draft(np.array([1, 2, 3], np.intc))


def test_a_llama_whose_draft_is_closed_says_so(pair, made):
    llama = made(pair[0])
    draft = DraftModel(pair[1], llama, threads=1)
    answer(llama, PROMPT, max_tokens=2)
    draft.close()
    with pytest.raises(UsageError, match="is closed"):
        answer(llama, PROMPT)
    llama.draft_model = None
    assert answer(llama, PROMPT) == answer(made(pair[0]), PROMPT)


def test_a_draft_longer_than_a_batch_would_lose_logits(pair, made):
    llama = made(pair[0], n_ctx=256, n_batch=8)
    draft = DraftModel(pair[1], llama, threads=1, draft_policy="fixed", draft_max=15)
    assert answer(llama, PROMPT) == answer(made(pair[0], n_ctx=256, n_batch=8), PROMPT)
    assert max(len(one.drafted) for one in draft.rounds) == 7


def test_a_recurrent_target_is_refused(pair, made, tmp_path):
    """Its memory does not go back, which Llama.generate does not notice."""
    path = random_weights.write(tmp_path / "tiny-mamba.gguf", shapes.SHAPES["tiny-mamba"])
    with pytest.raises(ModelError, match="cannot roll back tokens"):
        DraftModel(pair[1], made(path), threads=1)
