"""Several answers at once: each is what it is by itself, and none waits for another's end or failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggufspec import Sampling, SpeculativeDecoder, demo_pair
from ggufspec.decoding.answer import AnswerRequest, Emitted
from ggufspec.decoding.drafters.lookup import LookupDrafter
from ggufspec.decoding.group import AnswerGroup
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.policy.adaptive import AdaptivePolicy
from ggufspec.decoding.policy.base import Load
from ggufspec.decoding.policy.draft_latency import DraftLatency
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.model import Context, Model, SequencePart
from ggufspec.llamacpp.options import ContextOptions
from tests.support import random_weights
from tests.support.shapes import small_shapes

SHAPES = small_shapes()
TEXTS = [[(7 * i + 13 * n) % 1000 + 3 for i in range(24 + n)] for n in range(5)]
PROMPTS = [
    "import os\n\ndef ",
    "class Reader:\n    def ",
    "for name in names:\n    ",
    "def read_file(path):\n",
    "# 1\n",
]
OPTIONS = DecoderOptions(ctx_size=512, threads=1, drafters=("lookup",), draft_policy="fixed", draft_max=3, parallel=3)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("group")
    return {
        name: random_weights.write(folder / f"{name}.gguf", shape, tokenizer=True) for name, shape in SHAPES.items()
    }


@pytest.fixture
def pair() -> Iterator[SpeculativeDecoder]:
    options = DecoderOptions(ctx_size=512, threads=1, parallel=3, draft_policy="fixed", draft_max=3)
    with SpeculativeDecoder(*demo_pair(), options) as decoder:
        yield decoder


def many(decoder: SpeculativeDecoder, prompts: list[Any], **more: Any) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in prompts]
    for index, emitted in decoder.generate_many(prompts, **more):
        found[index].append(emitted.token)
    return found


def alone(decoder: SpeculativeDecoder, prompts: list[Any], **more: Any) -> list[list[int]]:
    return [[one.token for one in decoder.generate(prompt, **more)] for prompt in prompts]


@pytest.mark.parametrize("drafter", [(), ("lookup",), ("draft", "lookup")])
def test_in_strict_mode_each_is_to_the_bit_as_by_itself(drafter: tuple[str, ...]) -> None:
    options = DecoderOptions(ctx_size=512, threads=1, parallel=3, strict=True, drafters=drafter)
    more = {"max_tokens": 40, "sampling": Sampling(temperature=0.8, seed=3)}
    with SpeculativeDecoder(*demo_pair(), options) as decoder:
        assert not decoder._pair.target.can_share
        assert many(decoder, PROMPTS, **more) == alone(decoder, PROMPTS, **more)


@pytest.mark.parametrize("name", ["mamba", "granite", "gemma3"])
def test_where_no_batch_is_shared_each_is_as_by_itself(files: dict[str, Path], name: str) -> None:
    more = {"max_tokens": 24, "sampling": Sampling(temperature=0.8, seed=11)}
    with SpeculativeDecoder(files[name], None, OPTIONS) as decoder:
        assert not decoder._pair.target.can_share
        assert many(decoder, TEXTS, **more) == alone(decoder, TEXTS, **more)


def test_each_token_of_a_shared_batch_is_likeliest_or_nearly(files: dict[str, Path]) -> None:
    """Rounding depends on the other answers, so that a near tie may fall otherwise; what a text means does not."""
    with SpeculativeDecoder(files["llama"], None, OPTIONS) as decoder:
        assert decoder._pair.target.can_share
        found = many(decoder, TEXTS, max_tokens=40)
    assert all(len(tokens) == 40 for tokens in found)
    with Model(files["llama"]) as model, closing(Context(model, ContextOptions(1024, 1, 1))) as single:
        for prompt, tokens in zip(TEXTS, found, strict=True):
            single.rewind(0)
            row = single.decode(prompt, 1)[0]
            for token in tokens:
                assert row.max() - row[token] < 0.02 * np.ptp(row)
                row = single.decode([token], 1)[0]


def test_a_batch_of_several_sequences_gives_the_rows_of_each(files: dict[str, Path]) -> None:
    parts = [TEXTS[0][:5], TEXTS[1][:1], TEXTS[2][:3]]
    options = ContextOptions(512, 16, 1, sequences=3, shared_cells=True)
    with Model(files["llama"]) as model:
        with closing(Context(model, replace(options, sequences=1))) as single:
            expected = []
            for tokens in parts:
                single.rewind(0)
                expected.append(single.decode(tokens, len(tokens)).copy())
        with closing(Context(model, options)) as context:
            batch = [SequencePart(index, tokens, len(tokens)) for index, tokens in enumerate(parts)]
            for size in (0, 12):  # padded, and once more after a rollback
                for index in range(3):
                    context.use(index)
                    context.rewind(0)
                rows = [one.copy() for one in context.decode_together(batch, size)]
                for one, other in zip(rows, expected, strict=True):
                    assert one.shape == other.shape
                    assert np.abs(one - other).max() < 0.02 * np.ptp(other)
            for index, tokens in enumerate(parts):
                context.use(index)
                assert context.length == len(tokens)
            with pytest.raises(ModelError, match="is full"):
                context.decode_together([SequencePart(0, [5] * 508, 1), SequencePart(1, [5], 1)])
            with pytest.raises(ValueError, match="17 rows"):
                context.decode_together([SequencePart(0, [5] * 16, 16), SequencePart(1, [5], 1)])


def run(group: AnswerGroup) -> None:
    while group.running:
        group.step()


def request(prompt: str | list[int], count: int = 24, **more: Any) -> AnswerRequest:
    return AnswerRequest(prompt, count, **more)


def test_a_short_answer_does_not_wait_for_a_long_one(pair: SpeculativeDecoder) -> None:
    order: list[str] = []
    with pair.group() as group:
        group.begin(0, request(PROMPTS[0], 200), lambda _: not order.append("long"))
        group.begin(1, request(PROMPTS[1], 8), lambda _: not order.append("short"))
        run(group)
    assert order.count("long") == 200
    assert len(order) - order[::-1].index("short") < 60


def test_a_long_prompt_is_read_between_the_rounds_of_others(
    pair: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ggufspec.decoding.group._PAUSE_S", 0.0)
    order: list[str] = []
    with pair.group() as group:
        group.begin(0, request(PROMPTS[0], 100), lambda _: not order.append("first"))
        for _ in range(3):
            group.step()
        before = len(order)
        assert before
        group.begin(1, request("import os\n" * 100, 4), lambda _: not order.append("second"))
        run(group)
    assert order.index("second") > before + 5, "the prompt takes several steps, and each of them a round of the other"
    assert "first" in order[order.index("second") :]


def test_a_draft_batch_holds_a_token_of_each_answer(pair: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is drafted is what the draft proposes alone, near ties aside."""
    pair.configure(drafters=("draft",))
    expected = []
    for prompt in PROMPTS[:3]:
        list(pair.generate(prompt, max_tokens=40))
        expected.append([round_.drafted for round_ in pair.rounds])
    sizes, together = [], Context.decode_together

    def counted(self: Context, parts: Any, *more: Any) -> Any:
        if self is pair._pair.draft:
            sizes.append(len(parts))
        return together(self, parts, *more)

    monkeypatch.setattr(Context, "decode_together", counted)
    with pair.group() as group:
        running = [group.begin(index, request(PROMPTS[index], 40), lambda _: True) for index in range(3)]
        run(group)
    assert max(sizes) == 3
    assert len(sizes) > 20
    found = [[round_.drafted for round_ in one.answer.rounds] for one in running]
    same = sum(one == other for pairs in zip(found, expected, strict=True) for one, other in zip(*pairs, strict=False))
    assert same > 0.8 * sum(map(len, expected))


def test_a_draft_reads_a_long_prompt_between_the_rounds_of_others(
    pair: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ggufspec.decoding.group._PAUSE_S", 0.0)
    parts, decode = [], Context.decode

    def counted(self: Context, tokens: Any, *more: Any, **named: Any) -> Any:
        if self is pair._pair.draft:
            parts.append(len(tokens))
        return decode(self, tokens, *more, **named)

    pair.configure(drafters=("draft",), draft_policy="adaptive")
    monkeypatch.setattr(AdaptivePolicy, "_worth_reading", lambda *_, **__: 300)
    monkeypatch.setattr(Context, "decode", counted)
    order: list[str] = []
    with pair.group() as group:
        group.begin(0, request(PROMPTS[0], 100), lambda _: not order.append("first"))
        for _ in range(3):
            group.step()
        group.begin(1, request("import os\n" * 100, 8), lambda _: not order.append("second"))
        run(group)
    assert parts.count(32) > 5, "the draft reads the prompt in small parts"
    between = order[order.index("second") : len(order) - order[::-1].index("second")]
    assert between.count("first") > 5, "while the other answer goes on"


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_a_prompt_longer_than_a_batch_next_to_another_answer(policy: str) -> None:
    """Of which a draft of fixed length reads all before its first draft."""
    options = DecoderOptions(
        ctx_size=2048, threads=1, parallel=3, drafters=("draft",), draft_policy=policy, draft_max=3
    )
    prompts = [PROMPTS[0], "import os\n" * 300, PROMPTS[2]]
    with SpeculativeDecoder(*demo_pair(), options) as decoder:
        assert len(decoder.target.tokenize(prompts[1])) > decoder._pair.target.batch
        expected = alone(decoder, prompts, max_tokens=24)
        found = many(decoder, prompts, max_tokens=24)
        assert [len(tokens) for tokens in found] == [len(tokens) for tokens in expected]
        assert found[1] == expected[1]


def test_a_copy_of_an_answer_whose_prompt_is_being_read_has_no_draft_of_the_old_text(
    pair: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's cache holds the old text until the prompt is read."""
    monkeypatch.setattr("ggufspec.decoding.group._PAUSE_S", 0.0)
    pair.configure(drafters=("draft",))
    system = "import os\n" * 40
    with pair.group() as group:
        group.begin(0, request("class Reader:\n" * 30, 24, cache_prompt=True), lambda _: True)
        run(group)
        group.begin(2, request(PROMPTS[2], 60), lambda _: True)
        group.step()
        group.begin(0, request(system + "def ", 8, cache_prompt=True), lambda _: True)
        group.step()
        group.begin(1, request(system + "class ", 8, cache_prompt=True), lambda _: True, copy=0)
        assert "target" in pair._cache.conversations[1].texts
        assert "draft" not in pair._cache.conversations[1].texts
        run(group)
        for index in (0, 1):
            conversation = pair._cache.conversations[index]
            assert conversation.texts["draft"] == conversation.texts["target"]


def test_a_short_prompt_does_not_wait_for_a_long_one(pair: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggufspec.decoding.group._PAUSE_S", 0.0)
    order: list[str] = []
    with pair.group() as group:
        group.begin(0, request("import os\n" * 100, 4), lambda _: not order.append("long"))
        group.begin(1, request("import os\n" * 60, 4), lambda _: not order.append("middle"))
        for _ in range(2):
            group.step()
        group.begin(2, request(PROMPTS[1], 4), lambda _: not order.append("short"))
        run(group)
    assert list(dict.fromkeys(order)) == ["short", "middle", "long"]
    assert len(order) == 12


def test_an_answer_cannot_begin_within_a_step(pair: SpeculativeDecoder) -> None:
    with pair.group() as group:
        group.begin(0, request(PROMPTS[0], 8), lambda _: bool(group.begin(1, request(PROMPTS[1]), lambda _: True)))
        with pytest.raises(ValueError, match="a step is being taken"):
            run(group)


def test_a_drafted_token_is_cheaper_in_company() -> None:
    """The draft's weights are read once for all answers, so a draft that is too slow alone may pay."""
    target, draft = LatencyModel({1: 0.1, 32: 0.11}, limit=32), LatencyModel({1: 0.05, 16: 0.051}, limit=16)

    def length(load: Load) -> int:
        policy = AdaptivePolicy(target, {"draft": DraftLatency(draft, target)})
        policy.load = load
        policy.begin(8, 100, may_trim=False)
        while policy.choose({}, {"draft": 1}) == "draft":
            policy.proposed("draft", 0, 0.05 / (1 + load.drafting))
            if not policy.extend("draft", 0.6):
                break
        return policy.verify_count()

    assert length(Load(3, 3.0, drafting=3.0)) > length(Load(3, 3.0))


def test_a_draft_waits_with_a_prompt_while_another_answer_waits_for_its_first_token() -> None:
    target, draft = LatencyModel({1: 0.1, 32: 0.11}, limit=32), LatencyModel({1: 0.001, 16: 0.002}, limit=16)

    def count(load: Load) -> int:
        policy = AdaptivePolicy(target, {"draft": DraftLatency(draft, target)})
        policy.load = load
        policy.begin(8, 100, may_trim=False)
        return policy.catch_up_count("draft", 60)

    assert count(Load(1, 1.0)) == 60
    assert count(Load(1, 1.0, prompt=32)) == 0


def test_one_that_is_given_up_leaves_the_others(pair: SpeculativeDecoder) -> None:
    expected = alone(pair, PROMPTS[:3], max_tokens=24)
    found: list[list[int]] = [[], [], []]

    def take(index: int, most: int) -> Any:
        def add(emitted: Emitted) -> bool:
            found[index].append(emitted.token)
            return len(found[index]) < most

        return add

    with pair.group() as group:
        for index, most in enumerate((24, 5, 24)):
            group.begin(index, request(PROMPTS[index]), take(index, most))
        run(group)
    assert found == [expected[0], expected[1][:5], expected[2]]
    assert alone(pair, PROMPTS[:3], max_tokens=24) == expected


def test_a_batch_that_fails_ends_its_answers_only(pair: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone(pair, PROMPTS[:3], max_tokens=24)

    def failing(*_: Any) -> Any:
        monkeypatch.undo()
        raise ModelError("llama.cpp could not decode it", "")

    found: list[int] = []
    with pair.group() as group:
        bad = [group.begin(index, request(PROMPTS[index]), lambda _: True) for index in range(2)]
        ended = []
        while group.running:
            ended += group.step()
            if len(bad) == 2 and all(one.decodes for one in bad):
                monkeypatch.setattr(Context, "decode_together", failing)
                ended += group.step()
                bad.append(group.begin(2, request(PROMPTS[2]), lambda one: not found.append(one.token)))
    assert [str(one.failure) for one in ended] == ["llama.cpp could not decode it"] * 2 + ["None"]
    assert [pair.held(index)[0] for index in range(2)] == [[], []]
    assert found == expected[2]
    assert alone(pair, PROMPTS[:3], max_tokens=24) == expected


def test_what_nobody_wants_leaves_before_its_prompt_is_read(pair: SpeculativeDecoder) -> None:
    wanted = [True]
    with pair.group() as group:
        group.begin(0, request("import os\n" * 60, 8), lambda _: True)
        left = group.begin(1, request(PROMPTS[1], 8, stopping=lambda: not wanted[0]), lambda _: True)
        wanted[0] = False
        assert group.step() == [left]
        assert (left.answer.count, left.failure) == (0, None)
        run(group)
    assert alone(pair, PROMPTS[1:2], max_tokens=8) == alone(pair, PROMPTS[1:2], max_tokens=8)


def test_a_decoder_can_be_closed_while_its_answers_are_unfinished() -> None:
    with SpeculativeDecoder(*demo_pair(), DecoderOptions(ctx_size=512, threads=1, parallel=2)) as decoder:
        steps = decoder.generate_many(PROMPTS)
        next(steps)
    with pytest.raises(UsageError, match="closed"):
        list(steps)


def test_answers_share_the_index_of_a_corpus(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("import os\nimport sys\n" * 20)
    options = DecoderOptions(ctx_size=512, threads=1, parallel=3, drafters=("lookup",), lookup_corpus=corpus)
    with SpeculativeDecoder(demo_pair()[0], None, options) as decoder:
        expected = alone(decoder, PROMPTS[:3], max_tokens=24)
        corpus.unlink()
        assert many(decoder, PROMPTS[:3], max_tokens=24) == expected
        (made,) = decoder._made.values()
        assert len(made) == 3
        assert len({id(one._corpus) for one in made if isinstance(one, LookupDrafter)}) == 1


def test_what_cannot_be_answered_is_refused_at_its_beginning(pair: SpeculativeDecoder) -> None:
    with pair.group() as group:
        group.begin(0, request(PROMPTS[0], 8), lambda _: True)
        with pytest.raises(ModelError, match="the context holds 512"):
            group.begin(1, request([5] * 600), lambda _: True)
        with pytest.raises(UsageError, match="the prompt is empty"):
            group.begin(1, request(""), lambda _: True)
        with pytest.raises(ValueError, match="conversation 0"):
            group.begin(0, request(PROMPTS[1]), lambda _: True)
        run(group)
    with pytest.raises(ModelError, match="the context holds 512"):
        many(pair, [PROMPTS[0], [5] * 600])
    assert len(alone(pair, PROMPTS[:1], max_tokens=8)[0]) == 8, "the decoder is free again"


def test_a_group_has_the_decoder_to_itself(pair: SpeculativeDecoder) -> None:
    with pair.group():
        with pytest.raises(UsageError, match="unfinished"):
            next(pair.generate("x"))
        with pytest.raises(UsageError, match="unfinished"):
            pair.configure(draft_max=2)
    steps = pair.generate_many(PROMPTS)
    next(steps)
    steps.close()
    assert len(alone(pair, PROMPTS[:1], max_tokens=8)[0]) == 8


def test_experience_is_learnt_by_one_answer_at_a_time(pair: SpeculativeDecoder) -> None:
    pair.configure(draft_policy="adaptive")
    with pair.group() as group:
        running = [group.begin(index, request(PROMPTS[index]), lambda _: True) for index in range(3)]
        assert [one.answer.teaches for one in running] == [True, False, False]
        policies = [one.answer._policy for one in running]
        assert all(isinstance(policy, AdaptivePolicy) for policy in policies)
        estimators = [policy._estimators for policy in policies if isinstance(policy, AdaptivePolicy)]
        assert estimators[0] is pair._experience.estimators
        assert estimators[1] is not estimators[0]
        run(group)


def test_drafts_get_shorter_next_to_other_answers() -> None:
    """Where a batch takes time for each of its tokens, a token that pays alone does not pay next to three answers."""
    seconds = {count: 0.1 * (0.7 + 0.3 * count) for count in range(1, 33)}

    def length(load: Load) -> int:
        policy = AdaptivePolicy(LatencyModel(seconds, limit=32))
        policy.load = load
        policy.begin(16, 100, may_trim=False)
        while policy.choose({"lookup": 0.7}, {}) and policy.extend("lookup", 0.7):
            pass
        return policy.verify_count()

    alone = length(Load())
    assert alone > length(Load(3, 3.0)) >= 0
    assert length(Load(40, 40.0)) == 0
    flat = AdaptivePolicy(LatencyModel({1: 0.1, 32: 0.1001}, limit=32))
    flat.load = Load(3, 3.0)
    flat.begin(16, 100, may_trim=False)
    while flat.choose({"lookup": 0.9}, {}) and flat.extend("lookup", 0.9):
        pass
    assert flat.verify_count() == 16
