"""How many answers a server generates at once, and what an error says if so many conversations do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ggufspec import demo_pair
from ggufspec.api.options import machine_to_plan_for
from ggufspec.api.pairs import OpenedPair, open_pair
from ggufspec.api.parallel import DEFAULT_PARALLEL, check_parallel, default_parallel
from ggufspec.api.resolve import resolve
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import UsageError
from ggufspec.models.profile import Pair
from ggufspec.planning.memory import HOST
from ggufspec.planning.plan import PlanMachine
from ggufspec.settings.table import Settings
from tests.support import random_weights
from tests.support.shapes import small_shapes

MIB = 2**20
SHAPES = small_shapes()


def opened(*files: Path, **options: object) -> OpenedPair:
    return open_pair(Pair("pair", *files, *[None] * (2 - len(files))), Settings(), DecoderOptions(**options))  # type: ignore[arg-type]


def machine(free_mib: float) -> PlanMachine:
    return replace(machine_to_plan_for(Settings(), 1), cards=(), memory_bytes=int(free_mib * MIB))


def test_a_server_generates_four_answers_where_memory_is_ample() -> None:
    assert default_parallel(opened(*demo_pair()), DecoderOptions(), machine(1e6)) == DEFAULT_PARALLEL == 4


def test_the_default_takes_a_part_of_what_is_left_only() -> None:
    pair, options = opened(*demo_pair()), DecoderOptions(ctx_size=32768)
    found = [default_parallel(pair, options, machine(free)) for free in (100, 1_000, 4_000, 8_000, 64_000)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1, 4)
    assert len(set(found)) > 2


def test_memory_that_a_plan_uses_beyond_weights_and_caches_is_not_free() -> None:
    pair, options = opened(*demo_pair()), DecoderOptions(ctx_size=32768)
    assert default_parallel(pair, options, machine(8_000)) > 1
    assert default_parallel(pair, options, machine(8_000), {HOST: 7_990 * MIB}) == 1


def test_a_pool_that_would_change_the_rope_factors_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = opened(*demo_pair())
    known = pair.target.header.metadata
    monkeypatch.setitem(known, f"{pair.target.header.architecture}.rope.scaling.original_context_length", 6_000)
    pair = replace(pair, read=pair.target)
    found = {size: default_parallel(pair, DecoderOptions(ctx_size=size), machine(1e6)) for size in (1024, 2048, 8192)}
    assert found == {1024: 4, 2048: 2, 8192: 4}


@pytest.mark.parametrize("more", [{"strict": True}, {"drafters": ("eagle3",)}])
def test_without_shared_batches_more_answers_gain_nothing(more: dict[str, object]) -> None:
    options = DecoderOptions(**more)  # type: ignore[arg-type]
    assert default_parallel(opened(*demo_pair()), options, machine(1e6)) == 1


@pytest.mark.parametrize("name", ["mamba", "gemma3"])
def test_memories_that_share_no_batches_serve_one(tmp_path: Path, name: str) -> None:
    file = random_weights.write(tmp_path / f"{name}.gguf", SHAPES[name], tokenizer=True)
    assert default_parallel(opened(file), DecoderOptions(), machine(1e6)) == 1


def test_an_error_says_how_many_conversations_fit() -> None:
    pair, options = opened(*demo_pair()), DecoderOptions(ctx_size=32768, parallel=64)
    with pytest.raises(UsageError, match=r"64 conversations of 32,768 tokens need .* of RAM, and .* are free") as found:
        check_parallel(pair, options, machine(1_000))
    count = int(str(found.value.hint).removeprefix("--parallel ").removesuffix(" fits"))
    assert 1 < count < 64
    check_parallel(pair, replace(options, parallel=count), machine(1_000))
    with pytest.raises(UsageError):
        check_parallel(pair, replace(options, parallel=count + 1), machine(1_000))
    with pytest.raises(UsageError) as found:
        check_parallel(pair, options, machine(10))
    assert found.value.hint == "a lower -c needs less"


def test_a_given_number_is_used_and_one_answer_is_the_default_elsewhere() -> None:
    target, draft = demo_pair()
    pair = Pair("pair", target, draft)
    for given, serves, expected in ((3, True, 3), (3, False, 3), (None, False, 1), (None, True, 4)):
        found = resolve(open_pair(pair, Settings(parallel=given)), serves=serves)
        assert found.pair.parallel == expected
