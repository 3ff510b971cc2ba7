"""A draft for llama-cpp-python's Llama, asked as Llama.generate asks it; the Llamas are in tests/real."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import replace

import numpy as np
import pytest
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaDraftModel

import ggufspec
from ggufspec import DecoderOptions, SpeculativeDecoder
from ggufspec.decoding import hook
from ggufspec.decoding.hook import DraftModel
from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.model import Context, Model

PROMPT = "import os\nimport sys\n\n\ndef main(arguments):\n    for name in arguments:\n"


@pytest.fixture(scope="module")
def said(draft):
    """(prompt, what the draft itself says behind it) as ids."""
    with SpeculativeDecoder(draft, None, DecoderOptions(threads=1)) as decoder:
        prompt = decoder.target.tokenize(PROMPT)
        return prompt, [emitted.token for emitted in decoder.generate(prompt, max_tokens=64)]


@pytest.fixture
def decoded(monkeypatch):
    """The number of tokens in each batch that any context decodes."""
    counts = []
    real = Context.decode

    def counting(self, tokens, outputs, batch_size=0):
        counts.append(len(tokens))
        return real(self, tokens, outputs, batch_size)

    monkeypatch.setattr(Context, "decode", counting)
    return counts


@pytest.fixture(scope="module")
def llama(target):
    """The target, whose draft they become one after the other."""
    with contextlib.closing(Llama(str(target), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)) as llama:
        yield llama


def fixed(draft, llama, draft_max=4, **more):
    return DraftModel(draft, llama, draft_policy="fixed", draft_max=draft_max, threads=1, **more)


def ids(*tokens):
    return np.array([*tokens], np.intc)


def test_it_proposes_what_it_would_say_itself(llama, draft, said):
    prompt, answer = said
    with fixed(draft, llama) as model:
        assert isinstance(model, LlamaDraftModel)
        drafted = model(ids(*prompt))
        assert drafted.dtype == np.intc
        assert drafted.tolist() == answer[:4]


def test_a_draft_begins_behind_what_stayed(llama, draft, said):
    """All of it, a part of it, nothing of it."""
    prompt, answer = said
    with fixed(draft, llama) as model:
        model(ids(*prompt))
        assert model(ids(*prompt, *answer[:5])).tolist() == answer[5:9]
        text = [*prompt, *answer[:5], *answer[5:7], 17]
        second = model(ids(*text)).tolist()
        third = model(ids(*text, 18)).tolist()
        assert [(one.accepted, one.batch_size, len(one.emitted)) for one in model.rounds] == [
            (4, 5, 5),
            (2, 5, 3),
            (0, 5, 1),
        ]
    with fixed(draft, llama) as other:
        assert other(ids(*text)).tolist() == second
        assert other(ids(*text, 18)).tolist() == third


def test_what_is_in_the_cache_is_not_decoded_again(llama, draft, said, decoded):
    prompt, answer = said
    with fixed(draft, llama) as model:
        decoded.clear()
        model(ids(*prompt))
        assert decoded == [len(prompt), 1, 1, 1]
        decoded.clear()
        model(ids(*prompt, *answer[:5]))  # all kept: the last drafted token and the target's own are new to it
        assert decoded == [2, 1, 1, 1]
        decoded.clear()
        model(ids(*prompt, *answer[:5], 17))  # nothing kept
        assert decoded == [1, 1, 1, 1]


def test_a_new_text_is_read_from_where_it_leaves_the_old_one(llama, draft, said, decoded):
    prompt, answer = said
    more = [*prompt, *answer[:3], *range(20, 40)]
    with fixed(draft, llama) as model:
        model(ids(*prompt))
        assert len(model.rounds) == 0
        decoded.clear()
        followed = model(ids(*more)).tolist()
        assert decoded == [len(more) - len(prompt) - 3, 1, 1, 1]
        decoded.clear()
        model(ids(*prompt[:10]))  # shorter than before
        assert decoded == [1, 1, 1, 1]
    with fixed(draft, llama) as other:
        assert other(ids(*more)).tolist() == followed


def test_beyond_its_context_it_drafts_nothing(llama, draft, said):
    prompt, answer = said
    text = [*prompt, *answer]
    with DraftModel(draft, llama, draft_policy="fixed", ctx_size=len(text) + 2, threads=1) as model:
        assert model(ids(*text)).size == 3  # as far as its context goes
        empty = model(ids(*text, *range(10, 20)))
        assert (empty.dtype, empty.size) == (np.intc, 0)


class Clock:
    """Stands still unless it is told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def answered(model, said, batch_s, rounds):
    """Drafted tokens of each round with a target that says what the draft says and takes so long for a batch."""
    prompt, answer = said
    clock = model._clock = Clock()
    text, lengths = [*prompt, answer[0]], []
    for _ in range(rounds):
        drafted = model(ids(*text)).tolist()
        lengths.append(len(drafted))
        clock.now += batch_s(1 + len(drafted))
        text += answer[len(text) - len(prompt) :][: len(drafted) + 1]
        assert text[len(prompt) :] == answer[: len(text) - len(prompt)]
    return lengths


def test_the_first_rounds_tell_what_the_target_takes_alone(llama, draft, said):
    with DraftModel(draft, llama, ctx_size=512, threads=1) as model:
        lengths = answered(model, said, lambda batch_size: 1.0, 6)
        assert lengths[:3] == [0, 0, 0]
        assert lengths[3] > 0  # as soon as it is known, the draft reads the prompt
        assert model._target.seconds(1) == pytest.approx(1.0, rel=0.2)


def test_a_slow_target_is_drafted_for_as_far_as_it_goes(llama, draft, said):
    with DraftModel(draft, llama, ctx_size=512, threads=1, draft_max=8) as model:
        lengths = answered(model, said, lambda batch_size: 1.0 + batch_size / 1000, 8)
        assert max(lengths) == 8
        assert [one.accepted for one in model.rounds] == lengths[:-1]


def test_a_target_faster_than_its_draft_is_left_alone(llama, draft, said):
    with DraftModel(draft, llama, ctx_size=512, threads=1) as model:
        assert sum(answered(model, said, lambda batch_size: batch_size * 1e-7, 20)) == 0


def test_a_reader_who_pauses_is_not_a_slow_target(llama, draft, said):
    with DraftModel(draft, llama, ctx_size=512, threads=1, draft_max=4) as model:
        answered(model, said, lambda batch_size: 0.1, 6)
        before = model._target.seconds(1)
        model._clock.now += 3600
        model(ids(*model._held, 17))
        assert model._target.seconds(1) < 4 * before


def test_the_lookup_drafts_too(llama, draft):
    """A text that says the same again, in words that the draft does not expect."""
    odd = [901, 77, 1205, 640, 333, 1508, 92]
    whole, length = odd * 40, len(odd) * 4
    with DraftModel(draft, llama, lookup=True, ctx_size=512, threads=1) as model:
        assert model.drafters == ("draft", "lookup")
        clock = model._clock = Clock()
        for _ in range(8):
            drafted = model(ids(*whole[:length])).tolist()
            clock.now += 1.0
            kept = next((i for i, token in enumerate(drafted) if token != whole[length + i]), len(drafted))
            length += kept + 1
        assert "lookup" in {name for one in model.rounds for name in one.drafters[: one.accepted]}


def test_after_a_failure_it_knows_nothing_of_the_text(llama, draft, said, decoded, monkeypatch):
    prompt, answer = said
    with fixed(draft, llama) as model:
        model(ids(*prompt))
        with monkeypatch.context() as broken:
            broken.setattr(hook.loop, "draft", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(ids(*prompt, *answer[:5]))
        decoded.clear()
        assert model(ids(*prompt, *answer[:6])).tolist() == answer[6:10]
        assert decoded[0] == len(prompt) + 6  # all of it


def test_a_draft_that_is_closed_says_so(llama, draft, said):
    with fixed(draft, llama) as model:
        pass
    with pytest.raises(UsageError, match="is closed"):
        model(ids(*said[0]))
    model.close()  # again


def test_a_draft_that_is_forgotten_is_freed(llama, draft, monkeypatch):
    freed = []
    for kind in (Model, Context):
        real = kind.close
        monkeypatch.setattr(kind, "close", lambda self, real=real: (freed.append(type(self)), real(self)))
    model = fixed(draft, llama)
    model(ids(1, 2, 3))
    assert freed == []
    llama.draft_model = None
    del model
    gc.collect()
    assert freed == [Context, Model]


@pytest.mark.parametrize(
    "wrong",
    [
        {"draft_max": 1000},
        {"draft_max": 0},
        {"draft_policy": "bold"},
        {"flash_attn": "maybe"},
        {"threads": -1},
        {"ctx_size": 1},
    ],
)
def test_options_out_of_range(llama, draft, wrong):
    with pytest.raises(UsageError):
        DraftModel(draft, llama, **wrong)


def test_a_file_that_is_no_model(llama, tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        DraftModel(tmp_path / "none.gguf", llama)


def test_the_package_has_its_name():
    assert ggufspec.DraftModel is DraftModel


def test_a_draft_of_another_capacity_keeps_its_own(llama, draft):
    with DraftModel(draft, llama, ctx_size=300, threads=1) as model:
        assert model.options == replace(model.options, ctx_size=300, drafters=("draft",), draft_max=15)
        assert model._drafter.model.capacity == 300
