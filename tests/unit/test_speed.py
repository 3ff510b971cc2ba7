"""Seconds of a pass in exact arithmetic, draft lengths, and the correction by measured points."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.errors import UsageError
from ggufspec.llamacpp.gguf import GgufTensor, parse_header
from ggufspec.llamacpp.model import ContextOptions, Placement
from ggufspec.models.header import ModelHeader, Tokenizer, interpret
from ggufspec.planning.memory import HOST, layer_devices
from ggufspec.planning.speed import (
    DeviceProfile,
    DraftChoice,
    MachineProfile,
    MeasuredBatches,
    MeasuredToken,
    best_length,
    break_even_acceptance,
    corrected,
    cost,
    expected_tokens,
    interpolate,
    pass_s,
)
from tests.support.shapes import SHAPES, write

BLOCK, TABLE, VOCABULARY, WIDTH = 4000, 256, 16, 8
CARD, OTHER = "GPU0", "GPU1"


def header(
    blocks: int = 4, *, kind: str = "f16", tied: bool = False, experts: tuple[int, int] = (0, 0), nextn: int = 0
) -> ModelHeader:
    """A model whose blocks are one matrix of ``BLOCK`` bytes, half of it experts where there are any."""

    def tensor(name: str, size: int) -> GgufTensor:
        return GgufTensor(name, kind, (WIDTH, size // 2 // WIDTH), size, 0)

    tensors = [GgufTensor("token_embd.weight", kind, (WIDTH, VOCABULARY), TABLE, 0)]
    for block in range(blocks):
        if experts[0]:
            tensors += [tensor(f"blk.{block}.attn_q.weight", BLOCK // 2)]
            tensors += [tensor(f"blk.{block}.ffn_up_exps.weight", BLOCK // 2)]
        else:
            tensors += [tensor(f"blk.{block}.ffn_up.weight", BLOCK)]
    tensors += [] if tied else [GgufTensor("output.weight", kind, (WIDTH, VOCABULARY), TABLE, 0)]
    return ModelHeader(
        name="toy",
        size_bytes=sum(t.size_bytes for t in tensors),
        parts=1,
        architecture="llama",
        blocks=blocks,
        nextn_blocks=nextn,
        embedding=WIDTH,
        heads=(1,) * blocks,
        kv_heads=(1,) * blocks,
        key_size=WIDTH,
        value_size=WIDTH,
        key_size_windowed=WIDTH,
        value_size_windowed=WIDTH,
        feed_forward=(1,) * blocks,
        experts=experts[0],
        experts_used=experts[1],
        sliding_window=0,
        windowed=(False,) * blocks,
        recurrent=(False,) * blocks,
        conv_numbers=0,
        state_numbers=0,
        cached=(True,) * blocks,
        latent=0,
        vocabulary=VOCABULARY,
        context_length=1024,
        tokenizer=Tokenizer("none", "", VOCABULARY, "", None, {}),
        regular=True,
        metadata={},
        tensors=tuple(tensors),
    )


def machine(
    *, host: float = 1000.0, card: float = 4000.0, flops: float = math.inf, layer_s: float = 0.0, **more: object
) -> MachineProfile:
    devices = {HOST: DeviceProfile(host, flops, layer_s)}
    devices |= dict.fromkeys((CARD, OTHER), DeviceProfile(card, flops, layer_s))
    fixed = {"pass_s": 0.0, "crossing_s": 0.0, "link_bytes_per_s": math.inf, "origin": "made up"}
    return MachineProfile(devices, **(fixed | more))  # type: ignore[arg-type]


PINNED = Placement(load_mode="none")
ROW = TABLE / VOCABULARY
KV = 4 * 2 * WIDTH * 2  # bytes that a token reads of the four blocks' caches when it is alone


# ---- one pass


def test_on_the_host_a_token_reads_every_block_the_output_and_one_row_of_the_table():
    assert pass_s(header(), Placement(), machine()) == pytest.approx((4 * BLOCK + TABLE + ROW + KV) / 1000)


def test_offloaded_layers_are_read_at_the_card_s_speed_the_output_first():
    found = cost(header(), Placement(1), machine(), (CARD,)).devices
    assert found == pytest.approx({HOST: (4 * BLOCK + ROW + KV) / 1000, CARD: TABLE / 4000})
    found = cost(header(), Placement(3), machine(), (CARD,)).devices
    assert found == pytest.approx({HOST: (2 * BLOCK + ROW + KV / 2) / 1000, CARD: (2 * BLOCK + TABLE + KV / 2) / 4000})
    found = cost(header(), Placement(-1), machine(), (CARD,)).devices
    assert found == pytest.approx({HOST: ROW / 1000, CARD: (4 * BLOCK + TABLE + KV) / 4000})


def test_without_a_card_nothing_is_offloaded():
    assert pass_s(header(), Placement(-1), machine()) == pass_s(header(), Placement(), machine())


def test_a_tied_output_reads_the_whole_table():
    tied, untied = header(tied=True), header()
    for layers in (0, 2, -1):
        assert pass_s(tied, Placement(layers), machine(), (CARD,)) == pytest.approx(
            pass_s(untied, Placement(layers), machine(), (CARD,))
        )


def test_blocks_that_predict_further_tokens_are_not_run():
    assert pass_s(header(5, nextn=1), Placement(), machine()) == pytest.approx(pass_s(header(), Placement(), machine()))


def test_depth_is_read_by_every_block_in_the_cache_s_type():
    alone, deep = (pass_s(header(), Placement(), machine(), depth=depth) for depth in (0, 99))
    assert deep - alone == pytest.approx(99 * KV / 1000)
    small = ContextOptions(ctx_size=128, max_outputs=1, threads=1, cache_type_k="q8_0", cache_type_v="q8_0")
    deep = pass_s(header(), Placement(), machine(), depth=99, context=small)
    alone = pass_s(header(), Placement(), machine(), context=small)
    assert deep - alone == pytest.approx(99 * KV * 34 / 64 / 1000)


def test_a_wide_batch_is_reading_or_computing_whichever_takes_longer():
    flops = 2 * BLOCK / 2  # of one token in one block
    fast, slow = machine(flops=1e9), machine(flops=flops)
    read_s = pass_s(header(), Placement(), fast)
    per_token = (KV + ROW) / 1000
    assert pass_s(header(), Placement(), fast, tokens=8) == pytest.approx(read_s + 7 * per_token)
    eight = 8 * (4 + TABLE / BLOCK) + 8 * per_token
    assert pass_s(header(), Placement(), slow, tokens=8) == pytest.approx(eight)


def test_experts_are_read_as_far_as_the_tokens_choose_them():
    model = header(experts=(8, 2))
    rest = TABLE + ROW + KV + 4 * BLOCK / 2
    assert pass_s(model, Placement(), machine()) == pytest.approx((rest + 4 * BLOCK / 2 * 2 / 8) / 1000)
    rest += ROW + KV
    two = 2 / 8 + 0.6 * (1 - (1 - 2 / 8) ** 2 - 2 / 8)  # neighbours agree in part
    assert pass_s(model, Placement(), machine(), tokens=2) == pytest.approx((rest + 4 * BLOCK / 2 * two) / 1000)


def test_experts_may_stay_on_the_host():
    found = cost(header(experts=(8, 2)), Placement(-1, n_cpu_moe=1), machine(), (CARD,)).devices
    assert found[HOST] == pytest.approx((BLOCK / 2 / 4 + ROW) / 1000)


def test_every_change_of_device_costs():
    def fixed(placement: Placement, model: ModelHeader | None = None, cards: tuple[str, ...] = (CARD,)) -> float:
        return cost(model or header(), placement, machine(crossing_s=1.0), cards).fixed_s

    assert [fixed(Placement(layers)) for layers in (0, 1, 3, -1)] == [0, 2, 2, 2]
    assert fixed(Placement(-1), cards=(CARD, OTHER)) == 3
    assert fixed(Placement(-1, n_cpu_moe=2), header(experts=(8, 2))) == 6


def test_what_crosses_is_the_stream_and_then_the_logits():
    slow = machine(link_bytes_per_s=1.0)
    assert cost(header(), Placement(2), slow, (CARD,), tokens=3).fixed_s == 3 * 4 * (WIDTH + VOCABULARY)


def test_passes_and_layers_have_fixed_costs():
    assert cost(header(), Placement(2), machine(pass_s=5.0, layer_s=1.0), (CARD,)).fixed_s == 9


def test_bandwidth_and_curve_belong_to_the_weights_type():
    device = DeviceProfile(1000.0, 1e9, by_type={"f16": 500.0}, batch_latencies={"f16": {1: 1.0, 2: 3.0, 4: 2.0}})
    there = MachineProfile({HOST: device}, 0.0, 0.0, math.inf, "made up")
    weights, rest = (4 * BLOCK + TABLE) / 500, (KV + ROW) / 1000
    for tokens, relative in {1: 1.0, 2: 3.0, 3: 2.5, 4: 2.0, 9: 2.0}.items():
        assert pass_s(header(), Placement(), there, tokens=tokens) == pytest.approx(relative * weights + tokens * rest)


def test_past_a_curve_s_end_computing_takes_over():
    device = DeviceProfile(1000.0, 1.0, batch_latencies={"f16": {1: 1.0, 4: 2.0}})
    assert device.weights_s("f16", 1000, flops=100, batch_size=4) == 2
    assert device.weights_s("f16", 1000, flops=100, batch_size=5) == 100


@pytest.mark.parametrize(
    ("kind", "like"), [("q5_K", "q6_K"), ("iq4_xs", "q4_K"), ("q4_1", "q4_0"), ("bf16", "f16"), ("q3_K", "q3_K")]
)
def test_an_unknown_type_is_taken_for_the_one_it_is_most_like(kind: str, like: str):
    by_type = {"f16": 1.0, "q8_0": 2.0, "q4_0": 3.0, "q4_K": 4.0, "q6_K": 5.0, "q3_K": 6.0}
    assert DeviceProfile(9.0, 1.0, by_type=by_type).weights_s(kind, 60, 0) == pytest.approx(60 / by_type[like])


def test_a_measured_curve_replaces_the_shape():
    measured = MeasuredBatches(Placement(2), {1: 1.0, 4: 1.5})
    one = pass_s(header(), Placement(2), machine(), (CARD,), depth=9)
    for tokens, relative in ((1, 1.0), (2, 1 + 0.5 / 3), (4, 1.5)):
        found = pass_s(header(), Placement(2), machine(), (CARD,), tokens=tokens, depth=9, measured=measured)
        assert found == pytest.approx(relative * one)
    assert pass_s(header(), Placement(2), machine(), (CARD,), tokens=9, depth=9, measured=measured) >= 1.5 * one


def test_measured_batches_correct_other_placements_of_a_mixture():
    model, relative = header(experts=(8, 2)), {1: 1.0, 4: 1.5}
    measured, cards = MeasuredBatches(Placement(-1, n_cpu_moe=4), relative), (CARD,)

    def seconds(blocks: int, tokens: int, known: MeasuredBatches | None = None) -> float:
        return pass_s(model, Placement(-1, n_cpu_moe=blocks), machine(), cards, tokens=tokens, measured=known)

    assert seconds(4, 4, measured) == pytest.approx(1.5 * seconds(4, 1))
    wrong = 1.5 * seconds(4, 1) / seconds(4, 4)
    assert wrong < 1  # the router chose fewer experts than chance would
    for blocks in (0, 2):
        assert seconds(blocks, 4, measured) == pytest.approx(seconds(blocks, 4) * wrong)
        assert seconds(blocks, 1, measured) == pytest.approx(seconds(blocks, 1))


def test_the_first_blocks_feed_forward_may_stay_on_the_host():
    found = cost(header(), Placement(-1, n_cpu_ffn=1), machine(), (CARD,))
    assert found.devices[HOST] == pytest.approx((BLOCK + ROW) / 1000)
    assert cost(header(), Placement(-1, n_cpu_ffn=2), machine(crossing_s=1.0), (CARD,)).fixed_s == 6


def test_a_tensor_is_read_where_an_override_puts_it():
    model = header()
    found = cost(model, Placement(override_tensor=(f"blk.[01].ffn={CARD}",)), machine(), (CARD,)).devices
    assert found[CARD] == pytest.approx(2 * BLOCK / 4000)
    whole = Placement(-1, (1.0, 1.0), n_cpu_ffn=4, override_tensor=(f"blk.0.ffn={OTHER}", "output=CPU"))
    found = cost(model, whole, machine(), (CARD, OTHER)).devices
    assert found[HOST] == pytest.approx((3 * BLOCK + TABLE + ROW) / 1000)
    assert found[CARD] + found[OTHER] == pytest.approx((BLOCK + KV) / 4000)


def test_wide_batches_stream_the_host_s_weights_to_a_card():
    there = machine(flops=1.0, streams=True, link_bytes_per_s=1000.0)
    assert set(cost(header(), Placement(), there, (CARD,), tokens=31).devices.values()) > {0.0}
    found = cost(header(), PINNED, machine(streams=True, link_bytes_per_s=1000.0), (CARD,), tokens=32)
    cache = KV * 32  # which goes over the link, too: a card computes attention with what it computed
    assert found.copies_s == pytest.approx((4 * BLOCK + TABLE + cache) / 1000)
    assert found.devices[CARD] == pytest.approx((4 * BLOCK + TABLE + cache) / 4000)
    assert found.total_s == pytest.approx(sum(found.devices.values()) + found.fixed_s + found.copies_s)
    assert found.devices[HOST] == pytest.approx(32 * ROW / 1000)
    assert cost(header(), Placement(), there, (), tokens=32).devices == {HOST: pytest.approx(0, abs=1e9)}


def test_what_is_mapped_from_a_file_is_copied_at_half_of_the_link_s_rate_at_most():
    for link, mapped_rate, host in ((1000.0, 500.0, 1000.0), (50e9, 10e9, 50e9)):
        there = machine(host=host, streams=True, link_bytes_per_s=link)
        pinned, mapped = (cost(header(), at, there, (CARD,), tokens=32).copies_s for at in (PINNED, Placement()))
        assert mapped - pinned == pytest.approx((4 * BLOCK + TABLE) * (1 / mapped_rate - 1 / link))


def test_a_card_copies_no_faster_than_the_memory_gives():
    slow, fast = (
        cost(header(), PINNED, machine(host=host, streams=True, link_bytes_per_s=50e9), (CARD,), tokens=32).copies_s
        for host in (3e9, 300e9)
    )
    copied = 4 * BLOCK + TABLE + KV * 32
    assert slow - fast == pytest.approx(copied * (1 / 4e9 - 1 / 50e9))


@pytest.mark.parametrize(("tokens", "op_offload_min_batch", "op_offload", "streams"), [
    (1, 2, True, False), (2, 2, True, True), (1, 1, True, True), (31, 32, True, False), (512, 2, False, False),
])  # fmt: skip
def test_a_card_computes_with_the_host_s_weights_from_the_threshold_on(
    tokens, op_offload_min_batch, op_offload, streams
):
    context = ContextOptions(1024, 16, 1, op_offload_min_batch=op_offload_min_batch, op_offload=op_offload)
    there = machine(streams=True, link_bytes_per_s=2000.0)
    found = cost(header(), PINNED, there, (CARD,), tokens=tokens, context=context)
    assert (found.devices[CARD] > 0) is (found.copies_s > 0) is streams


def test_repacked_weights_take_the_host_less_time_and_a_card_computes_with_none():
    repacked = {kind: {1: 1.0, 8: 0.5} for kind in ("q4_K", "f16")}
    there = replace(machine(flops=1.0, streams=True), repacked=repacked)
    assert all(weights.type in repacked for weights in header().tensors if len(weights.shape) > 1)
    at, as_file = Placement(1, no_host=True), Placement(1)

    def host_s(placement: Placement, tokens: int) -> float:
        return cost(header(), placement, there, (CARD,), tokens=tokens).devices[HOST]

    assert host_s(at, 1) == pytest.approx(host_s(as_file, 1))
    assert 0.5 < host_s(at, 8) / host_s(as_file, 8) < 0.7
    assert host_s(at, 32) > 0.4 * host_s(at, 8)  # as_file's are computed by the card from there on
    assert host_s(as_file, 32) < 0.1 * host_s(at, 32)
    assert cost(header(), at, there, (CARD,), tokens=32).copies_s == 0


def test_weights_beyond_the_memory_come_from_disk():
    size = 2 * BLOCK + TABLE  # two blocks and the table stay on the host
    for memory, bandwidth in ((size, 1000.0), (size - 1, 10.0)):
        there = machine(memory_bytes=memory, disk_bytes_per_s=10.0)
        assert cost(header(), Placement(3), there, (CARD,)).devices[HOST] == pytest.approx(
            2 * BLOCK / bandwidth + ROW / 1000 + (KV / 2000 if bandwidth == 1000 else 0), rel=0.02
        )


def test_a_card_without_a_speed_is_named():
    with pytest.raises(UsageError, match="RPC7"):
        pass_s(header(), Placement(-1), machine(), ("RPC7",))


@given(
    layers=st.integers(0, 8),
    tokens=st.integers(1, 64),
    depth=st.integers(0, 4096),
    host=st.floats(1e2, 1e6),
    card=st.floats(1.0, 1e3),
)
def test_a_faster_card_and_more_layers_on_it_never_cost_time(
    layers: int, tokens: int, depth: int, host: float, card: float
):
    there = machine(host=host, card=host * card, flops=1e9)
    model = header(8)

    def seconds(count: int) -> float:
        return pass_s(model, Placement(count), there, (CARD,), tokens=tokens, depth=depth)

    assert seconds(layers + 1) <= seconds(layers) * (1 + 1e-12)
    assert pass_s(model, Placement(layers), there, (CARD,), tokens=tokens, depth=depth + 1) >= seconds(layers)
    assert pass_s(model, Placement(layers), there, (CARD,), tokens=tokens + 1, depth=depth) >= seconds(layers)


@pytest.mark.parametrize(
    ("placement", "cards", "expected"),
    [
        (Placement(0), (CARD,), "HHHHH"),
        (Placement(2), (CARD,), "HHH00"),
        (Placement(-1), (CARD, OTHER), "00011"),
        (Placement(4, (3.0, 1.0)), (CARD, OTHER), "H0001"),
        (Placement(-1, (0.0, 1.0)), (CARD, OTHER), "11111"),
        (Placement(-1), (), "HHHHH"),
    ],
)
def test_layers_go_where_llama_cpp_puts_them(placement: Placement, cards: tuple[str, ...], expected: str):
    assert "".join("H01"[device] for device in layer_devices(4, placement, len(cards))) == expected


def test_curves_are_exact_where_measured_linear_between_and_flat_outside():
    batch_latency = {2: 1.0, 4: 2.0, 8: 1.0}
    assert [interpolate(batch_latency, batch_size) for batch_size in (1, 2, 3, 4, 6, 8, 99)] == [
        1,
        1,
        1.5,
        2,
        1.5,
        1,
        1,
    ]


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_every_architecture_has_a_speed(name: str, tmp_path: Path):
    path = write(tmp_path / "model.gguf", SHAPES[name])
    with path.open("rb") as file:
        model = interpret(name, [parse_header(file.read(2**24))], path.stat().st_size)
    there = machine(host=5e10, card=8e11, flops=1e13)
    seconds = [pass_s(model, Placement(n), there, (CARD,), depth=512) for n in (0, model.blocks // 2, model.layers)]
    assert seconds == sorted(seconds, reverse=True)
    assert 0 < seconds[0] <= model.weight_bytes() / 5e10 * 1.5 + 0.01


# ---- speculation


def test_expected_tokens_is_a_geometric_sum():
    assert [expected_tokens(0.5, length) for length in range(4)] == [1, 1.5, 1.75, 1.875]
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens(0.0, 7) == 1
    with pytest.raises(ValueError, match="acceptance"):
        expected_tokens(1.1, 1)


def test_the_best_length_maximises_tokens_per_second():
    flat = best_length(lambda _: 1.0, 0.0, 1.0, most=5)
    assert flat == DraftChoice(5, 6.0)
    assert best_length(lambda _: 1.0, 0.0, 0.0, most=5) == DraftChoice(0, 1.0)  # the shortest of equals
    assert best_length(lambda n: float(n), 0.1, 0.9).length == 0
    assert best_length(lambda n: float(n), 0.1, 0.9, least=1).length == 1
    assert best_length(lambda n: 1.0 if n in (1, 4) else 3.0, 0.1, 0.6).length == 3  # kernels that like four
    until = [lambda n, most=most: 1.0 + (n > most) for most in range(17, 65)]
    long = [best_length(seconds, 0.0, 0.9, most=63).length for seconds in until]
    assert {length + 1 for length in long} == {16, 24, 32, 40, 48, 56, 64}  # batches that are run


TIMES = st.lists(st.floats(0.01, 10.0), min_size=17, max_size=17)


@given(times=TIMES, draft=st.floats(0.0, 1.0), acceptance=st.floats(0.0, 1.0))
def test_no_other_length_is_faster_and_acceptance_never_hurts(times: list[float], draft: float, acceptance: float):
    def target(tokens: int) -> float:
        return times[tokens - 1]

    best = best_length(target, draft, acceptance)
    rates = [expected_tokens(acceptance, k) / (k * draft + target(k + 1)) for k in range(17)]
    assert best.tokens_per_s == pytest.approx(max(rates), rel=1e-12)
    assert best.tokens_per_s >= 1 / times[0] * (1 - 1e-12)
    assert best_length(target, draft, min(1.0, acceptance + 0.1)).tokens_per_s >= best.tokens_per_s * (1 - 1e-12)


@given(times=TIMES, draft=st.floats(0.0, 1.0), rival=st.floats(0.05, 200.0))
def test_break_even_is_where_the_best_length_catches_the_rival(times: list[float], draft: float, rival: float):
    def rate(acceptance: float) -> float:
        return best_length(lambda tokens: times[tokens - 1], draft, acceptance, least=1).tokens_per_s

    even = break_even_acceptance(lambda tokens: times[tokens - 1], draft, rival)
    if even is None:
        assert rate(1.0) < rival
    else:
        assert rate(even) >= rival
        if even > 0:
            assert rate(even - 1e-6 if even > 1e-6 else 0.0) < rival * (1 + 1e-6)


def test_break_even_in_exact_arithmetic():
    # one draft token of no cost, T(2) = T(1): 1 + a catches 1.5 at a half
    assert break_even_acceptance(lambda _: 1.0, 0.0, 1.5, most=1) == pytest.approx(0.5)
    assert break_even_acceptance(lambda _: 1.0, 0.0, 2.01, most=1) is None
    assert break_even_acceptance(lambda _: 1.0, 0.0, 1.0) == 0.0
    # drafting must catch up by itself: 1 + a in 1.25 s against the same target-only
    assert break_even_acceptance(lambda _: 1.0, 0.25, 1.0, most=1) == pytest.approx(0.25)


# ---- from measured points


def times(there: MachineProfile, model: ModelHeader, layers: Iterable[int]) -> list[tuple[int, float]]:
    return [(n, pass_s(model, Placement(n), there, (CARD,), depth=64)) for n in layers]


def measured(rows: Iterable[tuple[int, float]]) -> list[MeasuredToken]:
    return [MeasuredToken(Placement(n), seconds, depth=64) for n, seconds in rows]


def known(host: str, card: str, there: MachineProfile | None = None) -> MachineProfile:
    """A machine whose figures are from these sources."""
    there, sources = there or machine(), {HOST: host, CARD: card, OTHER: card}
    devices = {name: replace(one, source=sources[name]) for name, one in there.devices.items()}
    return replace(there, devices=devices)


def bandwidths(there: MachineProfile) -> tuple[float, float]:
    return there.device(HOST).bandwidth_bytes_per_s, there.device(CARD).bandwidth_bytes_per_s


SPEEDS = {"host": st.floats(300.0, 3000.0), "card": st.floats(1000.0, 20000.0)}


@given(points=st.lists(st.integers(0, 33), min_size=2, max_size=6, unique=True), tied=st.booleans(), **SPEEDS)
def test_placements_are_predicted_from_the_two_ends(points: list[int], tied: bool, host: float, card: float):
    model = header(32, tied=tied)
    truth = times(machine(host=host, card=card), model, range(34))
    found = corrected(measured(truth[n] for n in {0, 33, *points}), model, known("guess", "guess"), (CARD,))
    assert times(found, model, range(34)) == [(n, pytest.approx(seconds, rel=0.02)) for n, seconds in truth]
    assert bandwidths(found) == pytest.approx((host, card), rel=0.02)


@given(point=st.integers(12, 24), host=st.floats(300.0, 3000.0), card=st.floats(1000.0, 5500.0))
def test_one_point_tells_the_device_that_is_known_least(point: int, host: float, card: float):
    model = header(32)
    for sources, true in ((("measured", "unknown"), (1000.0, card)), (("unknown", "measured"), (host, 4000.0))):
        truth = times(machine(host=true[0], card=true[1]), model, range(34))
        found = corrected(measured([truth[point]]), model, known(*sources), (CARD,))
        assert bandwidths(found) == pytest.approx(true, rel=0.15)
        assert times(found, model, range(34)) == [(n, pytest.approx(seconds, rel=0.15)) for n, seconds in truth]
        assert times(found, model, [point]) == [(point, pytest.approx(truth[point][1], rel=0.01))]


@pytest.mark.parametrize("card", [40.0, 300000.0])
def test_a_card_of_which_nothing_is_known_may_be_off_by_any_factor(card: float):
    truth = times(machine(card=card), header(32), range(34))
    found = corrected(measured([truth[16]]), header(32), known("measured", "unknown"), (CARD,))
    assert bandwidths(found)[0] == pytest.approx(1000.0, rel=0.08)
    if card < 1000:  # a fast card's share of the time is too small to be told
        assert bandwidths(found)[1] == pytest.approx(card, rel=0.05)


def test_what_no_point_used_stays():
    there = known("guess", "catalogue")
    truth = times(machine(host=500.0), header(), [0])
    found = corrected(measured(truth), header(), there, (CARD,))
    assert bandwidths(found) == (pytest.approx(500.0, rel=0.01), 4000.0)
    assert corrected([], header(), there, (CARD,)) is there


def test_fixed_costs_are_in_the_sum():
    fixed = {"layer_s": 0.3, "pass_s": 0.5, "crossing_s": 0.2}
    truth = times(machine(host=2000.0, card=9000.0, **fixed), header(), range(6))
    there = known("guess", "guess", machine(host=1000.0, card=1000.0, **fixed))
    found = corrected(measured([truth[0], truth[2], truth[5]]), header(), there, (CARD,))
    assert times(found, header(), range(6)) == [(n, pytest.approx(seconds, rel=0.03)) for n, seconds in truth]


def test_the_experts_on_the_host_and_a_quantised_cache_are_the_point_s_own():
    model = header(experts=(8, 2))
    context = ContextOptions(256, 1, 1, cache_type_k="q8_0", cache_type_v="q8_0")
    at = Placement(-1, n_cpu_moe=4)
    seconds = pass_s(model, at, machine(host=250.0), (CARD,), depth=99, context=context)
    found = corrected([MeasuredToken(at, seconds, 99, context)], model, known("guess", "catalogue"), (CARD,))
    assert bandwidths(found) == pytest.approx((250.0, 4000.0), rel=0.1)


def test_many_points_are_a_compromise():
    truth = times(machine(), header(), range(6))
    noisy = [(n, seconds * factor) for (n, seconds), factor in zip(truth, (1.02, 0.98) * 3, strict=True)]
    found = corrected(measured(noisy), header(), known("guess", "guess"), (CARD,))
    assert times(found, header(), range(6)) == [(n, pytest.approx(seconds, rel=0.04)) for n, seconds in truth]


@pytest.mark.parametrize("rates", [[(0, 1.0), (1, 100.0)], [(3, 1.0), (4, 9.0)], [(0, 1.0), (2, 5.0), (5, 1.0)]])
def test_points_that_contradict_each_other_still_give_speeds(rates: list[tuple[int, float]]):
    found = corrected(measured((n, 1 / rate) for n, rate in rates), header(), known("guess", "guess"), (CARD,))
    between = [1 / rate for _, rate in rates]
    for _, seconds in times(found, header(), [n for n, _ in rates]):
        assert min(between) / 2 < seconds < max(between) * 2


def test_attention_costs_what_it_computes_where_that_is_more_than_reading():
    """Each token's query heads go through the cache by themselves, at the rate of their size and of the batch's; on a
    card reading it once is all.
    """
    slow = machine()
    computing = replace(
        slow.device(HOST), attention={"f16": {8: {1: 50.0, 8: 80.0}, 64: {1: 1.0}}, "q8_0": {8: {1: 25.0}}}
    )
    slow = replace(slow, devices=slow.devices | {HOST: computing})

    def deeper_s(where: MachineProfile, tokens: int, kind: str = "f16") -> float:
        context = ContextOptions(ctx_size=512, max_outputs=8, threads=1, cache_type_k=kind, cache_type_v=kind)
        deep, alone = (
            pass_s(header(), Placement(), where, tokens=tokens, depth=depth, context=context) for depth in (100, 0)
        )
        return deep - alone

    numbers = 4 * 2 * WIDTH * 100  # as many query heads as key-value heads
    assert deeper_s(machine(), 1) == pytest.approx(2 * numbers / 1000)
    assert deeper_s(machine(), 8) == pytest.approx(2 * numbers / 1000)
    assert deeper_s(slow, 1) == pytest.approx(numbers / 50)
    assert deeper_s(slow, 8) == pytest.approx(8 * numbers / 80)
    assert deeper_s(slow, 1, "q4_0") == pytest.approx(numbers / 25)
    twice = slow.device(HOST).scaled(2.0).attention
    assert twice == {"f16": {8: {1: 25.0, 8: 40.0}, 64: {1: 0.5}}, "q8_0": {8: {1: 12.5}}}
