"""Taking tokens back: the very logits of a text that was never wrong, for every kind of memory, and what it costs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.decoding.policy.pair_latency import refusal
from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.dryrun import allocated
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import AGAIN_MAX, ContextOptions
from ggufspec.llamacpp.rewind import rollback_kind
from ggufspec.models.architecture import kind_of_state
from lab.rollback import Costs, best, break_even, speedup
from tests.support import random_weights
from tests.support.shapes import (
    Dims,
    Experts,
    Label,
    Ssm,
    falcon_h1,
    hybrid,
    lfm2,
    pure_mamba,
    qwen3next,
    qwen35,
    rwkv7,
    transformer,
)

VOCABULARY = 1024
REWIND = 7


DIMS = Dims(4, 256, 4, 2, 512, VOCABULARY)
# Of these the kernels depend on the batch size, so that weights are taken that do not amplify it.
BY_WIDTH = ("jamba", "rwkv7", "qwen3next")


def named(name: str, kind: str) -> Label:
    return Label(name, kind, name, "F16" if name in BY_WIDTH else "Q8_0")


# fmt: off
RECURRENT = {shape.architecture: shape for shape in (
    pure_mamba(named("mamba", "recurrent"), DIMS, Ssm(512, 16, 32)),
    pure_mamba(named("mamba2", "recurrent"), DIMS, Ssm(512, 64, 8, 1)),
    rwkv7(named("rwkv7", "recurrent"), DIMS, {"w": 32, "a": 32, "v": 32, "g": 32}),
    # All experts are used: which two win a near tie depends on the batch, on some processors.
    hybrid(named("jamba", "hybrid"), DIMS, (1,), Ssm(512, 16, 32), Experts(4, 4, 512), moe_every=2),
    hybrid(named("granitehybrid", "hybrid"), DIMS, (1, 3), Ssm(512, 64, 8, 1)),
    lfm2(named("lfm2", "hybrid"), DIMS, (2,)),
    qwen3next(named("qwen3next", "hybrid"), DIMS._replace(head=64), Ssm(256, 64, 4, 2),
              Experts(4, 4, 256, 256, shared_gate=True)),
    qwen35(named("qwen35", "hybrid"), DIMS._replace(head=64), Ssm(256, 64, 4, 2)),
    falcon_h1(named("falcon-h1", "hybrid"), DIMS, Ssm(512, 64, 8, 1)),
)}
# fmt: on
ATTENTION = transformer(named("llama", "dense"), DIMS)
SNAPSHOTS = ("lfm2", "qwen35")
WAYS = [(name, "checkpoint") for name in RECURRENT] + [(name, "snapshots") for name in SNAPSHOTS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Model]]:
    folder = tmp_path_factory.mktemp("rewind")
    shapes = {**RECURRENT, "llama": ATTENTION}
    loaded = {name: Model(random_weights.write(folder / f"{name}.gguf", shape)) for name, shape in shapes.items()}
    yield loaded
    for model in loaded.values():
        model.close()


def context(model: Model, by: str = "auto", *, rewind: int = REWIND, ctx_size: int = 512, **more: Any) -> Context:
    return Context(model, ContextOptions(ctx_size, 16, 1, rewind=rewind, rewind_by=by, **more))


def some(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=count)


def assert_same(name: str, found: np.ndarray, expected: np.ndarray) -> None:
    """To the bit; where kernels depend on the batch size, much closer than texts that differ in one token."""
    if name in BY_WIDTH:
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.03)
    else:
        np.testing.assert_array_equal(found, expected)


class Counting:
    """llama.cpp with a tally of the calls that read or change its memory, and the size of every batch."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.calls: Counter[str] = Counter()
        self.batches: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("llama_memory_", "llama_state_")):
            self.calls[name] += 1
        if name == "llama_decode":
            return self._decode
        return getattr(self._library, name)

    def _decode(self, handle: Any, batch: Any) -> Any:
        self.batches.append(batch.n_tokens)
        return self._library.llama_decode(handle, batch)


def counted(one: Context) -> Counting:
    library = Counting(one._lib)
    one._lib = one._memory._lib = library
    return library


# ---- the same logits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "by"), WAYS)
def test_a_batch_is_taken_back_to_any_place(models, name, by):
    text, wrong, after = some(30, 1), some(8, 2), some(3, 3)
    with closing(context(models[name], by)) as one, closing(context(models[name], rewind=0)) as straight:
        assert one.rewind_kind == by
        for kept in range(by == "snapshots", REWIND + 2):  # what is left of the batch
            one.rewind(0)
            one.decode(text[:20], 0)
            one.decode(text[20 : 20 + kept] + wrong[kept:], 8)
            one.rewind(20 + kept)
            assert one.length == 20 + kept
            found = one.decode(after, 3).copy()
            straight.rewind(0)
            straight.decode(text[: 20 + kept], 0)
            assert_same(name, found, straight.decode(after, 3))


@pytest.mark.parametrize(("name", "by"), WAYS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_target_that_is_corrected_again_and_again(models, name, by, seed):
    chance, text = random.Random(seed), some(400, seed)
    with closing(context(models[name], by)) as one, closing(context(models[name], rewind=0)) as straight:
        one.decode(text[:10], seed)  # with and without logits of the prompt
        straight.decode(text[:10], 0)
        length = 10
        while length < 250:
            drafted = chance.randrange(REWIND + 1)
            kept = chance.randrange(drafted + 1)
            wrong = [(token + 1) % VOCABULARY for token in text[length + 1 + kept : length + 1 + drafted]]
            rows = one.decode(text[length : length + 1 + kept] + wrong, drafted + 1)[: kept + 1].copy()
            for target in sorted({one.length, chance.randint(length + 1 + kept, one.length)}, reverse=True):
                one.rewind(target)  # in more than one step
            one.rewind(length + 1 + kept)
            expected = [straight.decode([token], 1).copy() for token in text[length : length + 1 + kept]]
            assert_same(name, rows, np.concatenate(expected))
            length += 1 + kept


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_draft_that_is_corrected_again_and_again(models, name, seed):
    """It reads what is certain, sometimes with logits of all of it, then adds a chain token by token."""
    chance, text = random.Random(seed), some(400, seed)
    with closing(context(models[name], "checkpoint")) as one, closing(context(models[name], rewind=0)) as straight:
        one.decode(text[:5], 0)
        length = 6  # certain
        while length < 250:
            if chance.random() < 0.3:
                one.decode(text[one.length : length], chance.choice((1, length - one.length)))
                length += 1
            drafted = chance.randrange(1, REWIND + 2)
            kept = chance.randrange(drafted + 1)
            chain = text[length : length + kept]
            chain += [(token + 1) % VOCABULARY for token in text[length + kept : length + drafted]]
            rows = [one.decode(text[one.length : length], 1)[0].copy()]
            rows += [one.decode([token], 1)[0].copy() for token in chain[:-1]]
            straight.decode(text[straight.length : length - 1], 0) if straight.length < length - 1 else None
            expected = [straight.decode(text[straight.length : length], 1)[0].copy()]
            expected += [straight.decode([token], 1)[0].copy() for token in chain[: min(kept, drafted - 1)]]
            assert_same(name, np.array(rows[: len(expected)]), np.array(expected))
            one.rewind(min(one.length, length + kept))
            length += kept + 1


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_padding_leaves_no_trace_in_snapshots(models, name):
    text = some(40, 4)
    with closing(context(models[name])) as one, closing(context(models[name], rewind=0)) as straight:
        library = counted(one)
        one.decode(text[:20], 0)
        straight.decode(text[:20], 0)
        assert one.can_pad
        assert not straight.can_pad
        rows = one.decode([*text[20:22], text[0]], 3, batch_size=8).copy()
        assert one.length == 23
        one.rewind(22)
        assert_same(name, rows[:2], straight.decode(text[20:22], 2))
        assert_same(name, one.decode(text[22:25], 3, batch_size=4), straight.decode(text[22:25], 3))
        one.decode(text[25:27], 2, batch_size=16)  # more than could be taken back
        assert library.batches == [20, 8, 4, 2]


def test_the_batch_size_has_no_effect_where_nothing_can_be_padded(models):
    with closing(context(models["mamba"])) as one:
        library = counted(one)
        one.decode(some(3, 5), 3, batch_size=8)
        assert (one.length, library.batches, one.can_pad) == (3, [3], False)


# ---- what it costs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "by"), [*WAYS, ("llama", "auto")])
def test_a_text_that_only_grows_pays_nothing(models, name, by):
    with closing(context(models[name], by)) as one:
        one.decode(some(20, 6), 0)
        library = counted(one)
        for token in some(20, 7):
            one.decode([token], 1)
            one.rewind(one.length)
        assert not library.calls
        assert library.batches == [1] * 20


@pytest.mark.parametrize("name", RECURRENT)
def test_a_checkpoint_is_two_calls_and_copies_nothing(models, name):
    with closing(context(models[name], "checkpoint")) as one:
        one.decode(some(20, 6), 0)
        library = counted(one)
        one.decode(some(4, 7), 4)
        assert library.calls == {"llama_memory_seq_cp": 1}
        if RECURRENT[name].kind == "hybrid":  # the least of state and attention: no attention cell is held
            assert library._library.llama_memory_seq_pos_max(library._library.llama_get_memory(one._handle), 1) == -1
        one.rewind(22)
        assert library.calls == {"llama_memory_seq_cp": 1}  # nothing is done before it must be
        one.decode(some(1, 8), 1)
        assert library.calls == {"llama_memory_seq_cp": 2, "llama_memory_seq_rm": 1}
        assert library.batches == [4, 3]  # two tokens again, and one


def test_a_chain_takes_one_checkpoint_behind_what_is_certain(models):
    with closing(context(models["mamba"], "checkpoint")) as one:
        one.decode(some(20, 6), 0)
        library = counted(one)
        one.decode(some(2, 7), 1)
        for token in some(5, 8):
            one.decode([token], 1)
        assert library.calls == {"llama_memory_seq_cp": 1}
        assert one.floor == 22
        one.rewind(24)
        one.decode(some(1, 9), 1)
        assert library.batches == [2, 1, 1, 1, 1, 1, 3]


def test_a_prompt_is_certain_with_logits_and_without(models):
    with closing(context(models["mamba"])) as one:
        for outputs in (0, 1, 16):
            one.rewind(0)
            library = counted(one)
            one.decode(some(20, 6), outputs)
            assert not library.calls
            one.decode(some(4, 7), 4)
            assert one.floor == 20
            one.rewind(21)
            one.decode(some(1, 8), 1)
            assert library.batches == [20, 4, 2]


def test_no_batch_is_wider_than_asked_for_where_that_matters(models):
    with closing(context(models["mamba"], again_max=0)) as one:
        one.decode(some(20, 6), 0)
        library = counted(one)
        for kept in (2, 1, 3):
            length = one.length
            one.decode(some(4, kept), 4)
            one.rewind(length + kept)
        assert library.batches == [4, 2, 4, 1, 4]


def test_many_tokens_to_decode_again_get_a_checkpoint_of_their_own(models):
    with closing(context(models["mamba"], "checkpoint")) as one:
        one.decode(some(20, 6), 0)
        library = counted(one)
        for kept, batches in ((2, [8]), (AGAIN_MAX - 1, [10]), (1, [AGAIN_MAX + 1, 8])):
            length = one.length
            library.batches.clear()
            one.decode(some(8, kept), 8)
            one.rewind(length + kept)
            assert library.batches == batches
        assert one.floor == one.length - 1  # the checkpoint was taken where the last batch began


def test_memory(models):
    for name, by in [*WAYS, ("llama", "auto")]:
        plain, one = context(models[name], rewind=0), context(models[name], by)
        with closing(plain), closing(one):
            more = allocated(one)["CPU"].kv - allocated(plain)["CPU"].kv
            assert plain.checkpoint_bytes == 0
            assert (one.checkpoint_bytes == 0) == (more == 0) == (name == "llama")
            states = {"checkpoint": 1, "snapshots": REWIND, "exact": 0}[one.rewind_kind]
            assert more <= one.checkpoint_bytes <= more + states * 2048  # a state in a file has sizes beside it


# ---- what cannot be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECURRENT)
def test_without_the_option_a_recurrent_memory_only_grows(models, name):
    with closing(context(models[name], rewind=0)) as one:
        assert (one.can_rewind, one.rewind_kind) == (False, "none")
        one.decode(some(5, 1), 5)
        one.rewind(5)
        with pytest.raises(ModelError, match="cannot take tokens back"):
            one.rewind(4)
        one.rewind(0)
        one.decode(some(5, 1), 5)
        assert one.length == 5


@pytest.mark.parametrize(("name", "by"), WAYS)
def test_too_far_back(models, name, by):
    with closing(context(models[name], by)) as one:
        assert one.can_rewind
        one.decode(some(20, 1), 0)
        with pytest.raises(ModelError, match="cannot go back to token 12, only to"):
            one.rewind(12)
        one.decode(some(3, 1), 3)
        least = 20 + (by == "snapshots")
        assert one.floor == least
        with pytest.raises(ModelError, match=f"token {least - 1}, only to {least}"):
            one.rewind(least - 1)
        one.rewind(least)
        with pytest.raises(ValueError, match="rewind to 40"):
            one.rewind(40)


def test_llama_cpp_would_go_back_to_a_state_that_it_does_not_have(models):
    """Why a batch's first token stays: if this fails, llama.cpp says no by now."""
    text = some(30, 1)
    with closing(context(models["lfm2"])) as one, closing(context(models["lfm2"], rewind=0)) as straight:
        one.decode(text[:20], 0)
        one.decode(some(3, 2), 3)
        assert one._lib.llama_memory_seq_rm(one._lib.llama_get_memory(one._handle), 0, 20, -1)
        one._memory.held = one.length = 20
        straight.decode(text[:20], 0)
        assert np.abs(one.decode(text[20:], 1) - straight.decode(text[20:], 1)).max() > 0.1


@pytest.mark.parametrize(("name", "by"), [*WAYS, ("llama", "auto")])
def test_all_behind_a_mark_can_be_taken_back(models, name, by):
    text = some(30, 1)
    with closing(context(models[name], by)) as one, closing(context(models[name], rewind=0)) as straight:
        one.decode(text[:19], 0)
        one.decode([*text[19:20], 7, 7], 3)
        one.rewind(20)
        for batch_size in (1, 5, 1):
            one.mark()
            one.decode(some(batch_size, batch_size), batch_size)
            one.rewind(20)
        straight.decode(text[:20], 0)
        assert_same(name, one.decode(text[20:], 1), straight.decode(text[20:], 1))


def test_an_attention_cache_forgets_as_ever(models):
    with closing(context(models["llama"])) as one:
        assert (one.rewind_kind, one.can_rewind, one.can_pad, one.floor) == ("exact", True, True, 0)
        assert one._lib.llama_n_seq_max(one._handle) == 1
        library = counted(one)
        one.decode(some(20, 1), 4)
        one.rewind(3)
        one.rewind(0)
        one.decode(some(2, 1), 2, batch_size=4)
        assert library.calls == {"llama_memory_seq_rm": 3}


def test_what_is_known_before_a_model_is_here(models):
    """Headers are judged by the names of architectures, contexts are made by what llama.cpp says of a loaded model."""
    for name, model in models.items():
        lib, handle = model._lib, model._handle
        said = "recurrent" * lib.llama_model_is_recurrent(handle) + "hybrid" * lib.llama_model_is_hybrid(handle)
        assert kind_of_state(name) == said
        for by in ("auto", "checkpoint"):
            expected = rollback_kind(name, by) if said else "exact"
            with closing(context(model, by)) as one:
                assert one.rewind_kind == expected


def test_an_unknown_way(models):
    with pytest.raises(UsageError, match="'magic' is not a rollback method"):
        context(models["mamba"], "magic")


# ---- how a prompt is read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "outputs", "expected"),
    [
        *((32, outputs, [32]) for outputs in (0, 1, 16)),
        *((33, outputs, [32, 1]) for outputs in (0, 1)),
        *((97, outputs, [32, 32, 32, 1]) for outputs in (0, 1)),
        (90, 16, [32, 32, 26]),
        (97, 16, [32, 32, 17, 16]),  # the rows are of one batch
    ],
)
def test_a_prompt_is_read_in_whole_batches(models, count, outputs, expected):
    with closing(context(models["llama"], n_batch=32)) as one:
        library = counted(one)
        one.decode(some(count, 1), outputs)
        assert library.batches == expected


# ---- whether it can win ------------------------------------------------------------------------------------------


def flat(count: int) -> float:
    return 1.0


def steep(count: int) -> float:
    return float(count)


def test_speedup_where_taking_back_is_free():
    costs = Costs(flat, draft_s=0.125)
    assert speedup(costs, 3, 1.0) == pytest.approx(4 / 1.375)
    assert speedup(costs, 3, 0.5) == pytest.approx(1.875 / 1.375)  # 1 + 1/2 + 1/4 + 1/8
    assert speedup(costs, 3, 0.0) == pytest.approx(1 / 1.375)


@given(st.integers(1, 7), st.floats(0, 1))
def test_the_chain_of_rounds_is_the_mean_of_many_rounds(draft_length, acceptance):
    costs = Costs(lambda n: 1 + n / 8, 0.1, again=True, checkpoint_s=0.05, restore_s=0.02)
    chance = np.random.default_rng(0)
    again, seconds, tokens = 0, 0.0, 0
    for _ in range(4000):
        if again > AGAIN_MAX:
            seconds, again = seconds + costs.batch_s(again), 0
        seconds += costs.checkpoint_s * (not again) + draft_length * costs.draft_s
        seconds += costs.batch_s(again + draft_length + 1)
        kept = next((i for i in range(draft_length) if chance.random() >= acceptance), draft_length)
        tokens += kept + 1
        again = again + kept + 1 if kept < draft_length else 0
        seconds += costs.restore_s * (kept < draft_length)
    assert speedup(costs, draft_length, acceptance) == pytest.approx(tokens * costs.batch_s(1) / seconds, rel=0.05)


def test_a_checkpoint_is_never_better_than_taking_back_for_nothing():
    for acceptance in (0.2, 0.6, 0.9, 1.0):
        free, again = (best(Costs(lambda n: 3 + n, 0.1, again=again), 15, acceptance)[1] for again in (False, True))
        assert again < free or acceptance == 1.0


def test_break_even():
    costs = Costs(flat, draft_s=0.5)
    assert break_even(costs, 1) == pytest.approx(0.5, abs=1e-4)
    assert break_even(Costs(steep), 15) is None


def test_the_reason_of_a_refusal():
    linear = LatencyModel({n: 1.0 + 1.25 * (n - 1) for n in range(1, 17)})
    assert refusal(linear, 0.0, 15, again=False) == (
        "drafting cannot win here, even if every drafted token is accepted (0.89 times target-only): "
        "a batch of 2 takes 2.2 times as long as one token"
    )
    reason = refusal(linear, 0.5, 15, again=True)
    assert reason.endswith("and what is accepted before a rejection is decoded again")
    assert refusal(LatencyModel({1: 1.0, 16: 1.0}), 0.5, 1, again=True) == ""


@given(st.lists(st.floats(0.1, 9), min_size=4, max_size=4), st.floats(0, 2), st.booleans())
def test_a_refusal_is_where_the_best_draft_length_does_not_win(seconds, draft_s, again):
    latency = LatencyModel(dict(enumerate(seconds, 1)), can_pad=False)
    costs = Costs(lambda n: latency.seconds(min(n, 4)) * max(1.0, n / 4), draft_s, again=again)
    gain = best(costs, 3)[1]
    assert bool(refusal(latency, draft_s, 3, again=again)) == (gain <= 1) or gain == pytest.approx(1)
