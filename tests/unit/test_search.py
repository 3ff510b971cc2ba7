"""The search for a placement, with real headers and weights, compute buffers and machines that are made up."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ggufspec.api.plan import plan_request
from ggufspec.api.resolve import with_placement
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import GgufspecError, ModelError, UsageError
from ggufspec.llamacpp import gguf
from ggufspec.llamacpp.options import Placement
from ggufspec.models.header import interpret
from ggufspec.planning import catalogue, search
from ggufspec.planning.memory import HOST, DeviceBytes, MemoryRequest
from ggufspec.planning.plan import OffloadDevice, PlanMachine
from ggufspec.planning.speed import DeviceProfile, LookupRounds, MachineProfile, pass_s
from ggufspec.planning.verdict import why
from ggufspec.settings.table import Settings
from tests.support import shapes
from tests.support.compute_buffers import dry_run
from tests.support.properties import examples

GIB = 2**30
SHAPES = shapes.SHAPES | {
    "qwen35-27b": shapes.qwen35(
        shapes.Label("qwen35-27b", "hybrid", "qwen35", "Q4_0"),
        shapes.Dims(64, 5120, 24, 4, 17408, 248320, 256),
        shapes.Ssm(6144, 128, 48, 16),
        nextn_blocks=1,
    )
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(header, metadata_only) by the shape's name."""
    folder = tmp_path_factory.mktemp("shapes")
    made = {}

    def get(name):
        if name not in made:
            path = shapes.write(folder / f"{name}.gguf", SHAPES[name])
            with path.open("rb") as file:
                data = file.read(16 << 20)
            metadata_only = folder / f"{name}-metadata-only.gguf"
            gguf.write_metadata_only([data], metadata_only)
            made[name] = interpret(path.name, [gguf.parse_header(data)], path.stat().st_size), metadata_only
        return made[name]

    return get


def machine(*gib, host=40e9, card=800e9, headroom=0, overhead=0):
    cards = tuple(
        OffloadDevice(f"GPU{i}", "", int(size * GIB), int(size * GIB), overhead) for i, size in enumerate(gib)
    )
    speeds = {HOST: DeviceProfile(host, 5e11)} | {one.name: DeviceProfile(card, 1e14) for one in cards}
    return PlanMachine(cards, 64 * GIB, headroom, MachineProfile(speeds, 1e-4, 1e-4, 20e9, "made up"))


def ask(model, target="llama3-70b-q3_k_s", draft="llama3-8b-q3_k_l", acceptance=0.7, options=None, **more):
    options = options or DecoderOptions(ctx_size=4096, threads=4)
    return plan_request(model(target), model(draft) if draft else None, options, acceptance, Settings(**more))


def make_plan(asked, machine, run=None):
    return search.search_plan(asked, machine, run or dry_run(*machine.card_names))


def sweep(plan):
    return search.sweep_rows(plan, dry_run(*plan.machine.card_names))


def excess(option, machine):
    return max(
        option.used(card.name).total + card.overhead_bytes - machine.budget_bytes(card) for card in machine.cards
    )


def test_the_plan_fits_and_one_layer_more_does_not(model):
    here = machine(24)
    asked = ask(model)
    plan = make_plan(asked, here)
    for option in (plan.target_only, plan.pair):
        assert excess(option, here) <= 0
        more = replace(option.target, gpu_layers=option.target.gpu_layers + 1)
        subject = asked.target if option.draft else asked.target_only
        (used,) = dry_run(*here.card_names)(
            [MemoryRequest(subject.header, subject.metadata_only, more, option.context)]
        )
        larger = replace(option, target_bytes=used)
        assert excess(larger, here) > 0


@pytest.mark.parametrize(
    ("gib", "pool", "layers"),
    [
        (6, None, range(33, 34)),
        (6, 6, range(33, 34)),
        (3, 6, range(10, 33)),
        (3, 4, [0]),  # read from disk
        (6, 4, [0]),
    ],
)
def test_shared_memory_is_counted_once(model, gib, pool, layers):
    """A model of 4.3 GB on a card and in the host's memory, which may be one."""
    here = machine(gib)
    (card,) = here.cards
    here = replace(here, cards=(replace(card, pool_bytes=pool and pool * GIB),), memory_bytes=(pool or 64) * GIB)
    plan = make_plan(ask(model, target="llama3-8b-q3_k_l", draft=None), here)
    assert plan.target_only.target.gpu_layers in layers
    assert any("read from disk" in note for note in plan.notes) == (layers == [0])
    if layers != [0]:
        both = sum(plan.target_only.used(name).total for name in (HOST, card.name))
        assert both <= (pool or 64) * GIB


@pytest.mark.parametrize("gib", [(2,), (4,), (8,), (24,), (6, 12)])
@pytest.mark.parametrize("target", ["llama3-8b-q3_k_l", "qwen3moe-30b-a3b", "gemma3-27b", "lfm2-1.2b"])
def test_what_is_estimated_is_what_is_planned(model, target, gib):
    """Though far fewer placements are looked at."""
    here, asked = (
        machine(*gib),
        ask(model, target=target, draft="llama-1b-q4_0" if "8b" in target and len(gib) == 1 else None),
    )
    plan, estimate = make_plan(asked, here), search.estimate_plan(asked, here, dry_run(*here.card_names))
    assert (plan.confirmed, estimate.confirmed) == (True, False)
    for one, other in ((plan.target_only, estimate.target_only), (plan.pair, estimate.pair)):
        if one is not None:
            assert other.tokens_per_s == pytest.approx(one.tokens_per_s, rel=0.03)
            assert excess(other, here) <= 0


@pytest.mark.parametrize(("target", "gib"), [("llama3-8b-q3_k_l", (8,)), ("gemma3-27b", (24,)), ("qwen3-14b", (8, 8))])
def test_the_largest_context_fits_and_a_longer_one_does_not(model, target, gib):
    here = machine(*gib)
    longest = search.largest_context(ask(model, target=target, draft=None).target, here, dry_run(*here.card_names))
    assert longest is not None

    def layers(context):
        asked = ask(model, target=target, draft=None, options=DecoderOptions(ctx_size=context, threads=4))
        at = make_plan(asked, here).target_only.target
        return 0 if at.n_cpu_ffn else at.gpu_layers

    whole = model(target)[0].layers
    assert layers(longest) == whole
    if longest < model(target)[0].context_length:
        assert layers(int(1.2 * longest)) < whole


@pytest.mark.parametrize(("target", "gib"), [("llama3-8b-q3_k_l", (2,)), ("llama3-8b-q3_k_l", ())])
def test_there_may_be_no_largest_context(model, target, gib):
    here = machine(*gib)
    assert search.largest_context(ask(model, target=target, draft=None).target, here, dry_run(*here.card_names)) is None


def test_the_draft_is_paid_in_target_layers(model):
    plan = make_plan(ask(model), machine(24))
    assert plan.draft_costs_layers == plan.target_only.target.gpu_layers - plan.pair.target.gpu_layers > 0
    assert f"costs {plan.draft_costs_layers} target layers" in why(plan)
    assert f"Fits in part: {plan.chosen.target.gpu_layers}/81 layers on the GPU" in why(plan)


def test_the_choice_turns_at_the_break_even_acceptance(model):
    here = machine(24)
    even = make_plan(ask(model), here).break_even_acceptance
    assert 0 < even < 1
    worse, better = (make_plan(ask(model, acceptance=even + step), here) for step in (-0.03, 0.03))
    assert (worse.choice, better.choice) == ("target-only", "speculative")
    assert worse.chosen is worse.target_only
    assert better.chosen is better.pair


def test_a_hopeless_draft_has_no_break_even(model):
    plan = make_plan(ask(model, target="llama3-8b-q3_k_l", draft="llama3-8b-q3_k_l"), machine(3))
    assert plan.choice == "target-only"
    assert (plan.break_even_acceptance, plan.break_even_length, plan.break_even_share) == (None, 0, None)
    assert "no usual rate would make it pay" in why(plan)
    assert plan.at_pair < plan.default.tokens_per_s == plan.pair.tokens_per_s
    on_host = make_plan(ask(model, target="llama3-8b-q3_k_l", draft="llama3-8b-q3_k_l"), machine())
    assert on_host.default.tokens_per_s == on_host.at_pair > on_host.pair.tokens_per_s
    assert on_host.default.draft_length == 0
    drafting = on_host.pair.tokens_per_s / on_host.target_only.tokens_per_s
    assert f"Leave the draft out: drafting is guessed to be {drafting:.2f}× (" in why(on_host)
    assert why(on_host).endswith("The default would not draft: 1.00×.")


def test_a_run_is_predicted_to_draft_only_where_that_pays(model):
    for acceptance in (0.1, 0.5, 0.9):
        plan = make_plan(ask(model, acceptance=acceptance), machine(24))
        assert plan.default.tokens_per_s == max(plan.at_pair, plan.pair.tokens_per_s)
        assert plan.default.target == plan.pair.target
    fixed = replace(ask(model), is_adaptive=False)
    assert make_plan(fixed, machine(24)).default is None


def test_the_lookup_counts_as_far_as_it_was_seen(model):
    """Rounds that gain nothing, and ones that gain much; the draft is chosen for what it does alone."""
    plans = [
        make_plan(replace(ask(model), lookup=lookup), machine(24))
        for lookup in (None, LookupRounds(0.0, 0.0, 1.0), LookupRounds(0.3, 8.0, 1.1), LookupRounds(0.3, 2.0, 3.0))
    ]
    speeds = [plan.default.tokens_per_s for plan in plans]
    assert speeds[0] == speeds[1] == speeds[2] < speeds[3]
    assert len({plan.choice for plan in plans}) == 1


def test_the_rates_of_a_verdict_can_be_compared(model):
    """What is expected and from where on the draft pays: accepted ÷ drafted tokens, at one draft length."""
    even = make_plan(ask(model), machine(24)).break_even_acceptance
    for acceptance in (even - 0.05, even + 0.05):
        plan = make_plan(ask(model, acceptance=acceptance), machine(24))
        pays = acceptance > even
        assert (plan.accepted_share > plan.break_even_share) == pays == (plan.choice == "speculative")
        words, chance = why(plan), plan.request.acceptance
        if pays:
            rate = f"{plan.accepted_share:.0%} accepted at draft length {plan.judged_length}"
            assert f"with {rate} (given; it pays above {plan.break_even_share:.0%})" in words
            ratio = plan.default.tokens_per_s / plan.target_only.tokens_per_s
            assert f"Use the draft: guessed {ratio:.2f}× (" in words
        else:  # the headline is about drafting, not about the default
            rate = f"a {chance:.0%} chance of acceptance per token"
            assert f"with {rate} (given; it would pay above {plan.break_even_acceptance:.0%})" in words
            ratio = plan.pair.tokens_per_s / plan.target_only.tokens_per_s
            assert f"Leave the draft out: drafting is guessed to be {ratio:.2f}× (" in words
            assert ratio < 1


def test_the_verdict_says_first_what_fits(model):
    whole, part, host = (why(make_plan(ask(model), machine(*gib))) for gib in ((80,), (24,), ()))
    assert re.match(r"Fits whole: 81/81 layers on the GPU, 3\d\.\d of 80\.0 GiB\. Use the draft", whole)
    assert re.match(r"Fits in part: \d\d/81 layers on the GPU.*, 2\d\.\d of 24\.0 GiB; the rest is in RAM\. ", part)
    assert re.match(r"No GPU found\. Fits into memory, all on the CPU: 3\d\.\d of 64\.0 GiB\. ", host)
    little = replace(machine(), memory_bytes=8 * GIB)
    assert re.match(r"No GPU found\. Does not fit into memory: 3\d\.\d of 8\.0 GiB", why(make_plan(ask(model), little)))
    alone = why(make_plan(ask(model, draft=None), machine(80)))
    assert re.search(r"Without a draft: predicted \d+(\.\d+)? tokens/s\.$", alone)


def test_what_cannot_fit_is_refused_without_a_dry_run(model):
    def never(_):
        raise AssertionError("a dry run")

    search.check_fits(ask(model), machine(24), never)
    with pytest.raises(GgufspecError, match="budget is 0 MiB"):
        search.check_fits(ask(model), replace(machine(0.3, overhead=2**20), headroom_bytes=GIB), dry_run("GPU0"))


def test_all_of_it_fits_a_large_card(model):
    plan = make_plan(ask(model), machine(80))
    assert plan.pair.target == Placement(81)
    assert plan.pair.draft == Placement(33)
    assert plan.draft_costs_layers == 0


def test_without_a_card_everything_is_on_the_host(model):
    plan = make_plan(ask(model), machine())
    assert plan.target_only.target == plan.pair.target == plan.pair.draft == Placement(0)
    assert set(plan.pair.target_bytes) == {HOST}


def test_layers_that_are_asked_for_are_kept(model):
    here = machine(24)
    plan = make_plan(ask(model, gpu_layers=30, gpu_layers_draft=0), here)
    assert (plan.pair.target.gpu_layers, plan.pair.draft.gpu_layers) == (30, 0)
    assert plan.target_only.target.gpu_layers > 60  # the rival is free


def test_layers_that_do_not_fit_are_refused_with_the_figures(model):
    here = machine(24)
    fits = make_plan(ask(model, draft=None), here).target_only.target.gpu_layers
    needs = r"needs at least 2\d\.\d\d GiB of GPU0, but the budget is 24\.00 GiB"
    for layers in (81, 99):
        with pytest.raises(GgufspecError, match=rf"{needs}; {fits} of 81 layers fit") as error:
            make_plan(ask(model, draft=None, gpu_layers=layers), here)
        assert error.value.exit_code == 1
        assert "-ngl auto" in error.value.hint
    with pytest.raises(GgufspecError, match=r"needs at least 34\.38 GiB of GPU0, .*; \d\d of 81 layers fit"):
        make_plan(ask(model, gpu_layers=99, gpu_layers_draft=99), here)


def test_every_draft_length_says_what_it_needs(model):
    plan = make_plan(ask(model), machine(24))
    assert {1, 2, 3, 4, 8, 16, plan.pair.draft_length} == {row.draft_length for row in plan.draft_lengths}
    for row in plan.draft_lengths:
        chance = row.break_even_acceptance
        accepted = sum(0.7**i for i in range(1, row.draft_length + 1))
        assert row.accepted_share == pytest.approx(accepted / row.draft_length)
        assert (chance is not None and chance < 0.7) == (row.tokens_per_s > plan.target_only.tokens_per_s)
        if chance is not None:
            assert chance >= plan.break_even_acceptance - 1e-9  # which is the best length's
            as_logged = Settings(acceptance=f"{row.break_even_accepted_share!r}@{row.draft_length}").acceptance
            assert as_logged == pytest.approx(chance, abs=1e-6)  # what a log says is read the same way
    best = max(plan.draft_lengths, key=lambda row: row.tokens_per_s)
    assert (best.draft_length, best.tokens_per_s) == (plan.pair.draft_length, pytest.approx(plan.pair.tokens_per_s))
    assert make_plan(ask(model, draft=None), machine(24)).draft_lengths == ()


def test_a_card_too_small_for_anything_is_left_alone(model):
    here = machine(0.3, overhead=200 * 2**20)
    plan = make_plan(ask(model), here)
    assert plan.target_only.target.gpu_layers <= 1
    with pytest.raises(GgufspecError, match="budget is 0 MiB"):
        make_plan(ask(model), replace(here, headroom_bytes=GIB))


def test_more_layers_than_there_are_are_all_of_them(model):
    here, everything = machine(80), 99
    plan = make_plan(ask(model, gpu_layers=everything, gpu_layers_draft=everything), here)
    assert (plan.pair.target.gpu_layers, plan.pair.draft.gpu_layers) == (81, 33)
    assert plan.pair == make_plan(ask(model, gpu_layers=-1, gpu_layers_draft=-1), here).pair


def test_what_is_absurd_is_wrong_usage(model):
    with pytest.raises(UsageError, match="no experts"):
        ask(model, n_cpu_moe=3)


def test_a_smaller_cache_is_chosen_only_where_it_is_allowed_and_faster(model):
    here = machine(24)
    options = DecoderOptions(ctx_size=32768, threads=4)
    plain = make_plan(ask(model, options=options), here)
    allowed = make_plan(ask(model, options=options, allow_kv=("q8_0",)), here)
    assert plain.pair.context.cache_type_k == "f16"
    assert (allowed.pair.context.cache_type_k, allowed.pair.context.cache_type_v) == ("q8_0", "q8_0")
    assert allowed.pair.target.gpu_layers > plain.pair.target.gpu_layers
    assert with_placement(options, allowed.pair).cache_type_v == "q8_0"


def test_experts_go_to_the_cpu_before_attention_does(model):
    plan = make_plan(ask(model, target="qwen3moe-30b-a3b", draft=None), machine(8))
    assert plan.target_only.target.n_cpu_moe > 0
    assert plan.target_only.target.gpu_layers == 49


def test_two_cards_are_filled_by_their_budgets(model):
    here = machine(24, 12)
    plan = make_plan(ask(model), here)
    assert excess(plan.pair, here) <= 0
    assert plan.pair.target.gpu_layers > make_plan(ask(model), machine(24)).pair.target.gpu_layers
    first, second = (plan.pair.used(name).weights for name in here.card_names)
    assert 1.2 < first / second < 3


def test_what_the_dry_run_refuses_is_not_planned(model):
    here = machine(24)
    agrees = dry_run("GPU0")

    def refuse(requests):
        return [
            "no" if request.placement.gpu_layers > 40 else answer
            for request, answer in zip(requests, agrees(requests), strict=True)
        ]

    assert make_plan(ask(model, draft=None), here, refuse).target_only.target.gpu_layers == 40


def test_what_always_is_refused_is_an_error(model):
    with pytest.raises(ModelError, match=r"q3_k_s\.gguf: no"):
        make_plan(ask(model, draft=None), machine(24), lambda requests: ["no"] * len(requests))


def test_a_buffer_that_is_smaller_than_those_of_alike_placements_makes_room_for_a_layer(model):
    here = machine(24)
    asked = ask(model, draft=None)
    agrees = dry_run("GPU0")
    usual = make_plan(asked, here, agrees).target_only.target.gpu_layers

    def smaller(requests):
        """Of one layer more than usually fits, which is none of those that are dry-run for an estimate."""
        answers = agrees(requests)
        for request, answer in zip(requests, answers, strict=True):
            if request.placement.gpu_layers == usual + 1:
                over = answer["GPU0"].total - here.budget_bytes(here.cards[0])
                answer["GPU0"] = replace(answer["GPU0"], compute=answer["GPU0"].compute - over)
        return answers

    found = make_plan(asked, here, smaller)
    assert found.target_only.target.gpu_layers in (usual, usual + 1)
    assert excess(found.target_only, here) <= 0


def test_alike_placements_share_their_dry_runs(model):
    here, seen = machine(24), []
    agrees = dry_run("GPU0")

    def counted(requests):
        seen.extend(request.placement for request in requests)
        return agrees(requests)

    make_plan(ask(model), here, counted)
    assert len(set(seen)) < 25


def test_a_slow_worker_gets_no_layers(model):
    plan = make_plan(ask(model), machine(24, card=2e9))
    assert plan.target_only.target.gpu_layers == 0


def test_a_host_that_is_too_small_is_said(model):
    plan = make_plan(ask(model, draft=None), replace(machine(4), memory_bytes=16 * GIB))
    assert any("read from disk" in note for note in plan.notes)


def test_a_context_beyond_the_training_is_said(model):
    options = DecoderOptions(ctx_size=16384, threads=4)
    plan = make_plan(ask(model, draft=None, options=options), machine(24))
    trained = plan.request.target.header.context_length
    assert any("was trained for" in note for note in plan.notes) == (trained < 16384)


def test_the_sweep_ends_where_the_budget_does(model):
    here = machine(24)
    best = make_plan(ask(model), here)
    rows = sweep(best)
    assert [rows[0].gpu_layers, rows[-1].gpu_layers] == [0, 81]
    assert rows[-1].target_only_tokens_per_s is None
    assert rows[0].target_only_tokens_per_s < rows[3].target_only_tokens_per_s
    known = [row.target_only_tokens_per_s for row in rows if row.target_only_tokens_per_s]
    assert max(known) == best.target_only.tokens_per_s


def test_what_was_chosen_is_among_the_rows_of_a_sweep(model):
    plan = make_plan(ask(model), machine(24))
    rows = {row.gpu_layers: row for row in sweep(plan)}
    blocks = plan.request.target.header.blocks
    assert plan.pair is not None
    alone, pair = plan.target_only.target.offloaded(blocks), plan.pair.target.offloaded(blocks)
    assert set(rows) == {0, 10, 20, 30, 40, 51, 61, 71, 81, alone, pair}
    assert rows[alone].target_only_tokens_per_s == plan.target_only.tokens_per_s
    assert rows[pair].speculative_tokens_per_s == plan.pair.tokens_per_s


def test_without_a_card_a_sweep_has_one_row(model):
    plan = make_plan(ask(model), machine())
    assert [row.gpu_layers for row in sweep(plan)] == [0]


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    gib=st.floats(1, 40),
    host=st.floats(5e9, 1e11),
    card=st.floats(5e10, 2e12),
    acceptance=st.floats(0, 1),
    ctx_size=st.sampled_from([512, 4096, 16384]),
)
def test_no_placement_that_fits_is_faster(model, gib, host, card, acceptance, ctx_size):
    here = machine(gib, host=host, card=card)
    options = DecoderOptions(ctx_size=ctx_size, threads=4)
    asked = ask(model, target="llama-1b-q4_0", draft=None, acceptance=acceptance, options=options)
    plan = make_plan(asked, here)
    header, context = asked.target_only.header, asked.target_only.context
    speeds = []
    for count in range(header.layers + 1):
        at = Placement(count)
        (used,) = dry_run("GPU0")([MemoryRequest(header, asked.target_only.metadata_only, at, context)])
        if used["GPU0"].total <= here.budget_bytes(here.cards[0]):
            seconds = pass_s(header, at, here.speed, here.card_names, tokens=1, depth=ctx_size // 2, context=context)
            speeds.append(1 / seconds)
    assert plan.target_only.tokens_per_s == pytest.approx(max(speeds))


def test_bytes_add_up():
    assert (DeviceBytes(1, 2, 3, 4) + DeviceBytes(10, 20, 30, 40)).total == 110


def test_a_metadata_only_file_answers_as_the_file_does(model, tmp_path):
    """The dry run of a file with its vocabulary and of its metadata_only, to the byte."""
    from ggufspec.llamacpp import dryrun

    shape = shapes.SHAPES["llama3-8b-q3_k_l"]
    path = shapes.write(tmp_path / "whole.gguf", shape, tokenizer=True)
    context = DecoderOptions(ctx_size=4096, threads=1).context(with_draft=True)
    _, metadata_only = model("llama3-8b-q3_k_l")
    assert Path(path).stat().st_size > 4e9
    for gpu_layers in (0, 17, 33):
        at = Placement(gpu_layers)
        runs = [dryrun.PlacedModel(file, at, context) for file in (path, metadata_only)]
        whole, small = dryrun.ask(dryrun.DryRunJob(simulated_devices=1), runs)
        assert whole == small
        assert not whole.error


# ---- the host's weights, computed with by a card


def streaming(*gib, link=50e9, memory=64, host=40e9):
    here = machine(*gib, host=host)
    return replace(here, memory_bytes=int(memory * GIB), speed=replace(here.speed, streams=True, link_bytes_per_s=link))


def test_drafts_are_verified_on_the_card_with_the_host_s_weights(model):
    """The notebook's pair with 24 GiB."""
    asked, here = ask(model), streaming(24)
    plan, on_cpu = make_plan(asked, here), make_plan(replace(asked, may_stream=False), here)
    assert (plan.pair.context.op_offload_min_batch, plan.pair.target.load_mode) == (2, "none")
    assert on_cpu.pair.context.op_offload_min_batch == 32
    assert plan.pair.tokens_per_s > 1.2 * on_cpu.pair.tokens_per_s
    assert excess(plan.pair, here) <= 0
    run = with_placement(DecoderOptions(), plan.pair)
    assert (run.op_offload_min_batch, run.target.load_mode) == (2, "none")
    speeds = {row.gpu_layers: row.speculative_tokens_per_s for row in sweep(plan)}
    assert max(filter(None, speeds.values())) == pytest.approx(plan.pair.tokens_per_s, rel=0.05)


def test_target_only_computes_there_too_where_the_link_is_faster_than_the_memory(model):
    slow, fast = (make_plan(ask(model, draft=None), streaming(24, host=host)).target_only for host in (20e9, 80e9))
    assert (slow.context.op_offload_min_batch, fast.context.op_offload_min_batch) == (1, 32)


@pytest.mark.parametrize(
    ("more", "here"),
    [
        ({"op_offload_min_batch": 32}, streaming(24)),
        ({"op_offload_min_batch": 8, "no_op_offload": True}, streaming(24)),
        ({}, machine(24)),
        ({}, streaming(64)),
    ],
)
def test_what_is_given_or_cannot_be_is_not_chosen(model, more, here):
    options = DecoderOptions(ctx_size=4096, threads=4, **more)
    plan = make_plan(ask(model, options=options, **more), here)
    assert plan.pair.context.op_offload_min_batch == more.get("op_offload_min_batch", 32)


def test_experts_are_not_copied_for_a_draft(model):
    asked = ask(model, target="qwen3moe-30b-a3b", draft=None)
    assert not asked.may_stream
    assert make_plan(asked, streaming(8)).target_only.context.op_offload_min_batch == 32
    with pytest.raises(UsageError, match="is a mixture of experts"):
        ask(model, "qwen3moe-30b-a3b", None, options=DecoderOptions(op_offload_min_batch=2), op_offload_min_batch=2)


def test_weights_stay_mapped_where_memory_is_short(model):
    needed = make_plan(ask(model, draft=None), streaming(24)).target_only.used(HOST).total / GIB
    plan = make_plan(ask(model, draft=None), streaming(24, memory=0.9 * needed))
    assert (plan.target_only.target.load_mode, plan.target_only.context.op_offload_min_batch) == ("auto", 32)
    assert any("the rest is read from disk for every token" in note for note in plan.notes)
    given = make_plan(ask(model, draft=None, load_mode="mmap"), streaming(24))
    assert given.target_only.target.load_mode == "mmap"


def test_what_a_card_does_not_compute_with_is_repacked_for_the_cpu(model):
    options = DecoderOptions(ctx_size=4096, threads=4, no_op_offload=True)
    here = streaming(24)
    here = replace(here, speed=replace(here.speed, repacked=catalogue.repacked(catalogue.CpuCores())))

    def planned(where=here, **more):
        wanted = Settings(no_op_offload=True, **more)
        asked = plan_request(model("qwen3-14b"), model("qwen2-0.5b-q8_0"), options, 0.7, wanted)
        return make_plan(asked, where).pair

    small = replace(here, cards=(replace(here.cards[0], free_bytes=6 * GIB),))
    repacked, mapped = planned(small), planned(small, load_mode="mmap")
    assert (repacked.target.no_host, repacked.target.load_mode, mapped.target.no_host) == (True, "auto", False)
    assert repacked.target.gpu_layers == mapped.target.gpu_layers
    assert repacked.tokens_per_s > mapped.tokens_per_s
    assert with_placement(options, repacked).target.no_host
    assert not planned().target.no_host  # all of it is on the card
    no_room = replace(small, memory_bytes=GIB)
    assert not planned(no_room).target.no_host


def test_layers_without_a_card_are_told_to_have_no_effect(model):
    found = make_plan(ask(model, draft=None, gpu_layers="4"), machine())
    assert any("-ngl has no effect" in note for note in found.notes)
    assert not make_plan(ask(model, draft=None), machine()).notes


# ---- recurrent targets


def test_a_recurrent_target_has_states_for_the_drafts_that_it_makes(model):
    """Each drafted token that may be taken back takes a state of 150 MiB, in which layers have room."""
    target, draft, here = model("qwen35-27b"), model("llama-1b-q4_0"), machine(16)
    options = DecoderOptions(ctx_size=4096, threads=4)

    def planned(draft_max):
        wanted = Settings(draft_max=draft_max)
        return make_plan(plan_request(target, draft, options, 0.7, wanted), here).pair

    free, given = planned(None), {length: planned(length) for length in (3, 7, 15)}
    assert free.tokens_per_s == max(one.tokens_per_s for one in given.values())
    assert free.draft_max < 15
    assert free.target.gpu_layers > given[15].target.gpu_layers
    assert excess(free, here) <= 0
    run = with_placement(options, free)
    assert run.draft_max == free.draft_max
    assert run.context(with_draft=True).rewind == free.context.rewind


def test_what_a_draft_needs_is_told_of_lengths_that_can_be_taken_back(model):
    asked = ask(model, target="qwen35-27b", draft="llama-1b-q4_0", draft_max=3)
    plan = make_plan(asked, machine(24))
    assert [row.draft_length for row in plan.draft_lengths] == [1, 2, 3]


def test_a_smaller_cache_of_the_draft_leaves_room_for_layers(model):
    options = DecoderOptions(ctx_size=32768, threads=4)
    small = replace(options, cache_type_k_draft="q8_0", cache_type_v_draft="q8_0")
    plain, quantised = (make_plan(ask(model, options=one), machine(24)).pair for one in (options, small))
    assert quantised.draft_bytes["GPU0"].kv == pytest.approx(34 / 64 * plain.draft_bytes["GPU0"].kv, rel=0.01)
    assert quantised.target.gpu_layers > plain.target.gpu_layers
