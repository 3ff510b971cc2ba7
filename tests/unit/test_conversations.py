"""Several conversations in one context: none changes another, and what a prompt begins with is read once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec import Sampling, SpeculativeDecoder, demo_pair
from ggufspec.decoding.logprobs import logprob
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.text import common
from ggufspec.errors import ModelError
from ggufspec.llamacpp.dryrun import allocated
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions
from ggufspec.models.headers import read_headers
from ggufspec.planning.memory import HOST, Placement, resident
from ggufspec.serve import session
from ggufspec.serve.sequences import SequenceChoice, choose_sequence
from tests.support import random_weights
from tests.support.shapes import small_shapes

SHAPES = small_shapes()
FORGET = {"llama": False, "mamba": True, "granite": True, "lfm2": True, "gemma3": True}
TEXTS = [[(7 * i + 13 * n) % 1000 + 3 for i in range(240 + 40 * n)] for n in range(3)]
SAMPLING = Sampling(temperature=0.8, seed=11)
OPTIONS = DecoderOptions(
    ctx_size=1024, threads=1, ubatch_size=64, drafters=("lookup",), draft_policy="fixed", draft_max=3
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("conversations")
    return {
        name: random_weights.write(folder / f"{name}.gguf", shape, tokenizer=True) for name, shape in SHAPES.items()
    }


@pytest.fixture(params=SHAPES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kept(files: dict[str, Path], name: str) -> Iterator[SpeculativeDecoder]:
    with SpeculativeDecoder(files[name], None, replace(OPTIONS, parallel=3)) as decoder:
        yield decoder


def answer(decoder: SpeculativeDecoder, prompt: list[int], count: int = 24) -> list[int]:
    return [one.token for one in decoder.generate(prompt, max_tokens=count, sampling=SAMPLING, cache_prompt=True)]


def test_conversations_by_turns_are_as_each_by_itself(
    files: dict[str, Path], name: str, kept: SpeculativeDecoder
) -> None:
    """Three turns each, in turns: the same answers, and of a later turn only what is new is read."""
    prompts = [list(text) for text in TEXTS]
    for turn in range(3):
        for index, prompt in enumerate(prompts):
            kept.use(index)
            found = answer(kept, prompt)
            assert kept.statistics is not None
            if turn:
                assert kept.statistics.prompt_read <= 8, "the new tokens, and the last one that was emitted"
            with SpeculativeDecoder(files[name], None, OPTIONS) as alone:
                for before in range(turn):  # the same turns, so that batches are the same
                    length = len(TEXTS[index]) + before * (24 + 5)
                    answer(alone, prompt[:length])
                assert answer(alone, prompt) == found
            prompt += [*found, *[(17 * turn + i) % 900 + 5 for i in range(5)]]


def test_a_retry_goes_back_to_a_saved_state(name: str, kept: SpeculativeDecoder) -> None:
    """Where tokens cannot be taken back, a state near the prompt's end was saved; the answer is the same again."""
    assert kept._pair.target.forgets is FORGET[name]
    assert kept.can_alternate is not FORGET[name]
    first = answer(kept, TEXTS[0])
    other = [*TEXTS[0][:-6], *TEXTS[1][:6]]  # the end of the prompt is another
    changed = answer(kept, other)
    assert kept.statistics is not None
    assert kept.statistics.prompt_read <= 24
    kept.use(1)
    assert answer(kept, other) == changed
    kept.use(0)
    assert answer(kept, TEXTS[0]) == first
    assert kept.statistics.prompt_read <= 24


def test_a_copied_beginning_is_not_read_again(name: str, kept: SpeculativeDecoder) -> None:
    kept.use(0)
    first = answer(kept, TEXTS[0])
    branch = [*TEXTS[0][:200], *TEXTS[1][:40]]
    kept.use(2)
    expected = answer(kept, branch)
    kept.use(1, copy=0)
    found = answer(kept, branch)
    assert kept.statistics is not None
    if name != "granite":  # its cells are shared, so that rounding depends on what is beside
        assert found == expected
    assert kept.statistics.prompt_read == (len(branch) if FORGET[name] else len(branch) - 200)
    kept.use(0)
    assert answer(kept, TEXTS[0]) == first, "the original is as it was"
    if FORGET[name]:
        with pytest.raises(ModelError, match="cannot copy"):
            kept._pair.target.copy(1)


@pytest.mark.parametrize("name", ["mamba", "granite", "lfm2"])
def test_what_lookup_drafts_leaves_no_trace_in_a_state(files: dict[str, Path], name: str) -> None:
    """A text that repeats itself with errors: each token is what a target says that reads one at a time, or nearly."""
    prompt = [token if i % 17 else 5 + i % 29 for i, token in enumerate(TEXTS[0][:60] * 4)]
    with SpeculativeDecoder(files[name], None, replace(OPTIONS, draft_max=8)) as decoder:
        tokens = [one.token for one in decoder.generate(prompt, max_tokens=300)]
        assert decoder.statistics is not None
        assert decoder.statistics.accepted < decoder.statistics.drafted
    with Model(files[name]) as model, closing(Context(model, ContextOptions(1024, 1, 1))) as alone:
        alone.decode(prompt[:-1], 0)
        for before, token in zip([prompt[-1], *tokens], tokens, strict=False):
            row = alone.decode([before], 1)[0]
            assert row.max() - row[token] < 0.02 * np.ptp(row)


def test_the_one_that_waited_longest_makes_room(files: dict[str, Path]) -> None:
    spec = session.ChatJob(files["llama"], None, replace(OPTIONS, parallel=2))
    with session.opened(spec, lambda _: None, threading.Event()) as served:
        found = []
        for number, text in enumerate((TEXTS[0], TEXTS[1], TEXTS[0], TEXTS[2])):
            asked = session.ServeRequest(prompt=tuple(text), max_tokens=4)
            served.begin(number, asked, lambda _: None, threading.Event())
            while not (replies := served.step()):
                pass
            found += [reply.sequence for _, reply in replies if isinstance(reply, session.ServeReply)]
    assert found == [0, 1, 0, 1]


def test_memory_is_planned_for_all_of_them(files: dict[str, Path], name: str) -> None:
    """The caches are as many times as large, to the byte."""
    header = read_headers([files[name]], None, None)[0].header
    for parallel in (1, 2, 5):
        with SpeculativeDecoder(files[name], None, replace(OPTIONS, parallel=parallel)) as decoder:
            context = replace(decoder.options.context(with_draft=False))
            planned = resident(header, Placement(), context)[HOST].kv
            assert allocated(decoder._pair.target)[HOST].kv == planned


def test_a_long_prompt_is_left_off_between_two_batches(kept: SpeculativeDecoder) -> None:
    """Who asks is told there how far it is, and may leave off; the same prompt then goes on, or begins anew."""
    prompt = [(7 * i) % 1000 + 3 for i in range(800)]
    told: list[int] = []
    how: dict[str, Any] = {"max_tokens": 4, "cache_prompt": True, "on_prompt": told.append}
    assert list(kept.generate(prompt, stopping=lambda: True, **how)) == []
    assert kept.statistics is not None
    assert (told, kept.statistics.tokens, kept.statistics.prompt_read) == ([0], 0, 512)
    told.clear()
    answer = [one.token for one in kept.generate(prompt, stopping=lambda: False, **how)]
    assert len(answer) == 4
    assert told[0] in (0, 512)
    assert told in ([0, 512], [512])
    kept.use(1)
    assert [one.token for one in kept.generate(prompt, **how)] == answer


def test_strict_mode_keeps_only_what_a_fresh_reading_would_decode_alike() -> None:
    """The same bits with a cache, with other conversations beside, and with and without a draft."""
    target, draft = demo_pair()
    options = DecoderOptions(ctx_size=2048, threads=1, strict=True)
    long = "def walk(path):\n    for name in os.listdir(path):\n        print(name)\n" * 40
    follow = "    return name\n" * 20

    def text(decoder: SpeculativeDecoder, prompt: str | list[int]) -> list[int]:
        return [one.token for one in decoder.generate(prompt, max_tokens=32, sampling=SAMPLING, cache_prompt=True)]

    with SpeculativeDecoder(target, draft, options) as fresh, SpeculativeDecoder(target, None, options) as alone:
        prompt = fresh.target.tokenize(long)
        expected = []
        for one in (prompt, [*prompt, *fresh.target.tokenize(follow, start=False)]):
            for decoder in (fresh, alone):
                decoder._cache.forget()
            expected.append(text(fresh, one))
            assert text(alone, one) == expected[-1]
    with SpeculativeDecoder(target, draft, replace(options, parallel=2)) as decoder:
        assert text(decoder, prompt) == expected[0]
        decoder.use(1)
        text(decoder, "import sys\n" * 30)
        decoder.use(0)
        longer = [*prompt, *decoder.target.tokenize(follow, start=False)]
        assert text(decoder, longer) == expected[1]
        assert decoder.statistics is not None
        assert 0 < len(longer) - decoder.statistics.prompt_read == 512 * ((len(prompt) - 1) // 512)


def test_log_probabilities_are_the_targets_own() -> None:
    """Of every token, whoever wrote it, and the same with and without a draft in strict mode."""
    target, draft = demo_pair()
    found = []
    for beside in (draft, None):
        with SpeculativeDecoder(target, beside, DecoderOptions(ctx_size=512, threads=1, strict=True)) as decoder:
            found.append([(one.token, one.logprob) for one in decoder.generate("def main(", max_tokens=24, logprobs=3)])
    assert found[0] == found[1]
    for token, one in found[0]:
        assert one is not None
        assert len(one.likeliest) == 3
        assert one.likeliest[0] == (token, one.own), "greedy: the likeliest token was emitted"
        assert 0 >= one.likeliest[0][1] >= one.likeliest[1][1] >= one.likeliest[2][1]


def test_a_log_probability_by_hand() -> None:
    import numpy as np

    row = np.log(np.array([0.5, 0.125, 0.125, 0.25], np.float32)) + 3
    found = logprob(row, 2, 2)
    assert found.own == pytest.approx(np.log(0.125), abs=1e-6)
    assert [id_ for id_, _ in found.likeliest] == [0, 3]
    assert logprob(row, 1, 0).likeliest == ()
    assert [id_ for id_, _ in logprob(row, 1, 4).likeliest] == [0, 3, 1, 2]


TOKENS = st.lists(st.integers(0, 3), max_size=200)


@given(st.lists(TOKENS, min_size=1, max_size=4), TOKENS, st.data())
def test_a_choice_is_always_one_that_exists(held: list[list[int]], prompt: list[int], data: st.DataObject) -> None:
    used = data.draw(st.lists(st.integers(0, 9), min_size=len(held), max_size=len(held)))
    prompts = [data.draw(st.integers(0, len(text))) for text in held]
    found = choose_sequence(held, prompts, used, prompt)
    assert found.sequence in range(len(held))
    if found.copy is not None:
        assert found.copy != found.sequence
        assert common(held[found.copy], prompt) == max(common(one, prompt) for one in held)


def test_which_conversation_goes_on() -> None:
    editor, chat = list(range(1000)), list(range(5000, 5600))  # the last 100 of each are an answer
    system = list(range(300))
    cases = [
        ([editor, chat], [1, 2], [*editor, 7, 7], SequenceChoice(0)),  # one more turn
        ([editor, chat, []], [1, 2, 0], [*editor, 7, 7], SequenceChoice(0)),
        ([editor, chat, []], [1, 2, 0], editor[:900], SequenceChoice(0)),  # the last turn once more
        ([editor, chat], [1, 2], [*chat[:450], 7], SequenceChoice(1)),  # edited near its end
        ([editor, chat, []], [1, 2, 0], [*chat[:450], 7], SequenceChoice(2, 1)),  # where there is room, both are kept
        ([editor, chat, []], [1, 2, 0], [9, 9, 9], SequenceChoice(2)),  # a new one, and there is room
        ([editor, chat], [1, 2], [9, 9, 9], SequenceChoice(0)),  # a new one takes the oldest's place
        ([editor, chat], [2, 1], [*system, 9, 9], SequenceChoice(1, 0)),  # the same system prompt: copied
        ([editor, chat], [1, 2], [*system, 9, 9], SequenceChoice(0)),  # there it is already
        ([[], []], [0, 0], [1, 2], SequenceChoice(0)),
    ]
    for held, used, prompt, expected in cases:
        prompts = [max(0, len(text) - 100) for text in held]
        assert choose_sequence(held, prompts, used, prompt) == expected, (prompt[-3:], expected)
