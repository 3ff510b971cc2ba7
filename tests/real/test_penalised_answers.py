"""Penalties on the pair that ships: the text of target-only, and of llama.cpp's own sampler."""

from __future__ import annotations

from dataclasses import replace

import llama_cpp
import pytest

from ggufspec import DecoderOptions, Sampling, SpeculativeDecoder
from ggufspec.decoding.penalties import Penalties
from ggufspec.settings.registry import parse_drafters

STRICT = DecoderOptions(ctx_size=512, threads=1, strict=True, draft_policy="fixed", draft_max=4)
STRONG = {"repeat_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}
SAMPLINGS = [
    Sampling(**STRONG),
    Sampling(repeat_penalty=1.2, repeat_last_n=-1),
    Sampling(0.8, seed=3, **STRONG),
    Sampling(0.8, top_k=0, top_p=1.0, min_p=0.0, seed=4, repeat_penalty=1.1, repeat_last_n=16),
]
PROMPTS = ["import os\n\ndef ", "x = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,"]
LISTS = 'root ::= "[" [0-9] (", " [0-9])* "]"'


def answer(decoder: SpeculativeDecoder, prompt: str, sampling: Sampling, **more) -> list[int]:
    return [e.token for e in decoder.generate(prompt, max_tokens=24, sampling=sampling, **more)]


@pytest.fixture(scope="module")
def decoder(pair):
    with SpeculativeDecoder(*pair, STRICT) as decoder:
        yield decoder


@pytest.mark.parametrize("drafter", ["draft", "lookup", "both"])
@pytest.mark.parametrize(
    ("accept", "samplings"),
    [
        ("exact", SAMPLINGS),
        pytest.param("residual", SAMPLINGS[:2], marks=pytest.mark.full),
        pytest.param("top-k:1", SAMPLINGS[:2], marks=pytest.mark.full),
    ],
)
def test_every_drafter_gives_the_text_of_target_only(decoder, drafter, accept, samplings):
    """Under the residual rule what is drawn is another text of the same distribution."""
    decoder.configure(drafters=parse_drafters(drafter), accept=accept)
    drafted = 0
    for sampling in samplings:
        for prompt in PROMPTS:
            alone = answer(decoder, prompt, sampling, alone="target")
            assert answer(decoder, prompt, sampling) == alone
            drafted += decoder.statistics.drafted
            assert alone != answer(decoder, prompt, Sampling(sampling.temperature, seed=sampling.seed))
    assert drafted


@pytest.mark.parametrize("sampling", SAMPLINGS[1:3], ids=["greedy", "drawn"])
def test_a_grammar_permits_what_penalties_make_likely(decoder, sampling):
    decoder.configure(drafters=("draft", "lookup"), accept="exact")
    for prompt in PROMPTS:
        alone = answer(decoder, prompt, sampling, alone="target", grammar=LISTS)
        assert answer(decoder, prompt, sampling, grammar=LISTS) == alone
        assert decoder.statistics.accepted


@pytest.mark.full
def test_the_check_can_fail(pair, monkeypatch):
    """A row that is penalised without the drafted tokens before it is seen."""
    apply = Penalties.apply
    monkeypatch.setattr(Penalties, "apply", lambda self, row, position: apply(self, row, min(position, self.settled)))
    follow = Penalties.follow

    def settle(self, position, tokens):
        self.settled = position
        follow(self, position, tokens)

    monkeypatch.setattr(Penalties, "follow", settle)
    with SpeculativeDecoder(*pair, STRICT) as decoder:
        texts = [(answer(decoder, p, SAMPLINGS[0]), answer(decoder, p, SAMPLINGS[0], alone="target")) for p in PROMPTS]
    assert any(both != alone for both, alone in texts)


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["strong", "whole text"])
def test_greedy_text_is_that_of_llama_cpps_sampler(pair, sampling):
    """The prompt's tokens are given to it first, as llama-server does (tools/server, ``init_sampler``)."""
    with SpeculativeDecoder(pair[0], None, replace(STRICT, strict=False)) as decoder:
        for prompt in PROMPTS:
            ours = answer(decoder, prompt, sampling)
            text = decoder.target.tokenize(prompt)
            context = decoder._pair.target
            context.rewind(0)
            last = 512 if sampling.repeat_last_n == -1 else sampling.repeat_last_n
            chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
            penalties = llama_cpp.llama_sampler_init_penalties(
                context.vocab_size,
                last,
                sampling.repeat_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
            llama_cpp.llama_sampler_chain_add(chain, penalties)
            llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
            for token in text:
                llama_cpp.llama_sampler_accept(chain, token)
            context.decode(text[:-1], outputs=1)
            theirs, newest = [], text[-1]
            for _ in ours:
                context.decode([newest], outputs=1)
                newest = llama_cpp.llama_sampler_sample(chain, context._handle, -1)
                theirs.append(newest)
            llama_cpp.llama_sampler_free(chain)
            assert ours == theirs
