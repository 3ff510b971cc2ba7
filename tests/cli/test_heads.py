"""Heads on the real target: their rows, their chains, and the same text with them as without."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_rpc import worker  # noqa: F401

from ggufspec import SpeculativeDecoder, load_pair
from ggufspec.api.python import plan_pair
from ggufspec.bench import divergence
from ggufspec.decoding.batch import decode_all
from ggufspec.decoding.drafters.head import HeadDrafter
from ggufspec.decoding.loop import decode_prompt, rounds
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.rules import make_rule
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import ChildError, ModelError, UsageError
from ggufspec.llamacpp import gguf, staging
from ggufspec.llamacpp.dryrun import DryRunJob, PlacedModel, allocated, ask
from ggufspec.llamacpp.head import Head, head_sources
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import LAST_HIDDEN, ContextOptions, Placement
from ggufspec.models.header import ModelHeader, interpret
from ggufspec.models.profile import Pair
from ggufspec.planning.dry_runs import DryRuns
from ggufspec.planning.memory import HOST, MemoryRequest
from lab.mimo2 import write_mimo2
from tests.support import heads
from tests.support.driving import decode_rounds
from tests.support.heads import HEAD_SIZE
from tests.support.processes import Cli

PROMPT = "import os\n\n\ndef main(argv):\n    parser = "
KINDS = heads.KINDS
GOOD = ("hybrid.gguf", "gemma4-assistant.gguf")  # of random weights, and yet right


def options(hidden: tuple[int, ...] = ()) -> ContextOptions:
    return ContextOptions(ctx_size=512, max_outputs=16, threads=1, rewind=15, hidden=hidden)


@pytest.fixture(scope="module")
def files(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """(target, head) of each kind."""
    return heads.write_all(target, tmp_path_factory.mktemp("heads"))


@pytest.fixture(params=KINDS)
def loaded(request: pytest.FixtureRequest, files: dict[str, tuple[Path, Path]]) -> Iterator[tuple[Context, Head]]:
    target_path, head_path = files[request.param]
    with ExitStack() as stack:
        own = head_path == target_path
        model = stack.enter_context(Model(target_path, Placement(mtp=own)))
        head_model = model if own else stack.enter_context(Model(head_path, Placement(mtp=True)))
        context = Context(model, options(head_sources(head_model)))
        stack.callback(context.close)
        head = Head(head_model, context, options())
        stack.callback(head.close)
        yield context, head


def answer(
    context: Context, prompt: list[int], count: int, drafter: HeadDrafter | None, draft_max: int, sampling: Sampling
) -> tuple[list[int], int]:
    """(the tokens of an answer, how many of the drafted tokens were accepted)."""
    rule = make_rule("exact", sampling, None)
    drafters = [drafter] if drafter else []
    context.rewind(0)
    rows = decode_all(context, decode_prompt(prompt, drafters, batch=context.batch, apart=4))
    steps = rounds(
        prompt,
        rows,
        rule,
        capacity=context.capacity,
        max_tokens=count,
        is_end=lambda _: False,
        drafters=drafters,
        draft_max=draft_max,
        batch_size=lambda count: -(-count // 4) * 4,  # one class of sizes, as in strict mode
        clock=lambda: 0.0,
    )
    found, accepted = [], 0
    for one in decode_rounds(context, steps):
        found += one.emitted
        accepted += one.accepted
    return found, accepted


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_the_text_is_the_same_with_a_head(loaded: tuple[Context, Head], sampling: Sampling) -> None:
    context, head = loaded
    prompt = context.model.tokenize(PROMPT)
    name = "eagle3" if head.is_eagle3 else "mtp"
    plain, _ = answer(context, prompt, 40, None, 0, sampling)
    with_head, accepted = answer(context, prompt, 40, HeadDrafter(head, context, name), 3, sampling)
    assert with_head == plain
    assert accepted > 10 or head.model.path.name not in GOOD


def test_the_text_is_the_same_where_states_go_back_by_a_checkpoint(files: dict[str, tuple[Path, Path]]) -> None:
    """What was accepted before a rejection is decoded again, and its hidden rows are taken again."""
    path, _ = files["mtp hybrid"]
    with ExitStack() as stack:
        model = stack.enter_context(Model(path, Placement(mtp=True)))
        wanted = replace(options(head_sources(model)), rewind_by="checkpoint")
        context = stack.enter_context(closing(Context(model, wanted)))
        assert context.rewind_kind == "checkpoint"
        head = stack.enter_context(closing(Head(model, context, options())))
        prompt = model.tokenize(PROMPT)
        plain, _ = answer(context, prompt, 40, None, 0, Sampling())
        with_head, accepted = answer(context, prompt, 40, HeadDrafter(head, context, "mtp"), 3, Sampling())
    assert with_head == plain
    assert accepted > 10


def test_blocks_that_are_alike_draft_in_a_chain_what_one_drafts(target: Path, tmp_path: Path) -> None:
    """Each block reads the whole chain in a cache of its own, and drafts one token of it."""
    block, drafted = heads.mtp_block(0), []
    for count in (1, 3):
        path = write_mimo2(target, tmp_path / f"{count}.gguf", [block] * count)
        chain = DecoderOptions(ctx_size=512, threads=1, drafters=("mtp",), draft_policy="fixed", draft_max=5)
        with SpeculativeDecoder(path, None, replace(chain, draft_max=3 if count == 1 else 5)) as decoder:
            for _ in decoder.generate(PROMPT, max_tokens=40):
                pass
            drafted.append([one.drafted for one in decoder.rounds[1:-3]])  # the last ones are cut short
            assert decoder.statistics is not None
            assert decoder.statistics.drafted_by_position[3:] in ((), (0, 0))  # no longer than there are blocks
    assert drafted[0] == drafted[1]
    assert {len(one) for one in drafted[0]} == {3}


def test_reading_at_once_and_bit_by_bit_gives_the_same_proposals(loaded: tuple[Context, Head]) -> None:
    """What a head proposes depends on the text, not on the batches in which it caught up or on rejected chains."""
    context, head = loaded
    rule = make_rule("exact", Sampling(), None)
    text = context.model.tokenize(PROMPT * 3)
    rule.begin(text)

    def proposals(cuts: list[int], *, chains: bool) -> list[float]:
        drafter = HeadDrafter(head, context, "mtp")
        context.rewind(0)
        found = []
        for number, cut in enumerate(cuts):
            context.decode(text[context.length : cut - 1], outputs=1)
            if number == 0:
                drafter.begin(text[:cut])
            drafter.commit(cut - 1)
            rule.follow(text[:cut])
            candidate = drafter.propose(text[:cut], rule)
            assert candidate is not None
            found.append(candidate.confidence)
            if chains:
                wrong = [*text[:cut], (candidate.draw().token + 7) % head.vocab_size]
                drafter.propose(wrong, rule)
        return found

    cuts = [9, 11, 12, 30, len(text)]
    straight = [proposals([cut], chains=False)[0] for cut in cuts]
    assert proposals(cuts, chains=False) == pytest.approx(straight, abs=2e-3)
    assert proposals(cuts, chains=True) == pytest.approx(straight, abs=2e-3)


def test_hidden_rows_are_those_of_the_newest_decode(target: Path) -> None:
    with Model(target) as model:
        context = Context(model, options((2, 5)))
        try:
            tokens = model.tokenize(PROMPT)
            context.decode(tokens, outputs=1)
            whole = context.hidden(0, len(tokens))
            assert whole.shape == (len(tokens), 2 * model.hidden_size)
            assert np.abs(whole).max() > 0
            context.rewind(4)
            with pytest.raises(ModelError, match="no hidden rows of the tokens 3 to 6"):
                context.hidden(3, 6)
            context.decode(tokens[4:6], outputs=1)
            np.testing.assert_allclose(context.hidden(0, 6), whole[:6], rtol=0.02, atol=0.02)
        finally:
            context.close()


def test_logits_are_the_same_with_hidden_rows(target: Path) -> None:
    """To the bit: strict mode need not know of them on this kind of machine."""
    with Model(target) as model:
        tokens = model.tokenize(PROMPT)
        rows = []
        for hidden in ((), (2, 4, 5)):
            context = Context(model, options(hidden))
            rows.append([context.decode(tokens, outputs=4).copy(), context.decode(tokens[:1], outputs=1).copy()])
            context.close()
    for plain, extracted in zip(*rows, strict=True):
        np.testing.assert_array_equal(plain, extracted)


def test_an_architecture_without_rows_is_refused_before_llama_cpp_aborts(target: Path) -> None:
    with Model(target) as model:
        with pytest.raises(ModelError, match="returns no hidden rows for the architecture 'llama'"):
            Context(model, options((LAST_HIDDEN,)))
        with pytest.raises(ModelError, match="there is no block 8"):
            Context(model, options((2, 8)))


def test_a_missing_function_is_named(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    monkeypatch.setitem(staging._PROTOTYPES, "llama_get_embeddings_layer_inp", (staging._VOID, (staging._BOOL,)))
    staging.function.cache_clear()
    assert staging.missing_function("eagle3") == "llama_get_embeddings_layer_inp"
    assert staging.missing_function("mtp") == ""
    with Model(target) as model, pytest.raises(ModelError, match="has no llama_get_embeddings_layer_inp"):
        Context(model, options((2,)))
    head = target.parent / "demo-eagle3-Q8_0.gguf"
    with pytest.raises(ModelError, match="has no llama_get_embeddings_layer_inp, which an EAGLE-3 head") as refused:
        SpeculativeDecoder(target, head)
    assert "ggufspec doctor" in refused.value.hint
    staging.function.cache_clear()


def test_an_abort_that_no_header_foretold_is_told_in_llama_cpp_s_words(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's dry run aborts, in a child, before anything is loaded here."""
    head = heads.write_eagle3(target, tmp_path / "head.gguf", value_size=HEAD_SIZE // 2)
    with pytest.raises(ModelError, match="its keys have size 64 and its values 32"):
        plan_pair(Pair("x", target, head))
    monkeypatch.setattr("ggufspec.models.heads.objections", lambda *_: iter(()))
    with pytest.raises(ChildError, match=r"SIGABRT: .*eagle3\.cpp.*GGML_ASSERT") as aborted:
        plan_pair(Pair("x", target, head))
    assert "-v shows llama.cpp's log" in aborted.value.hint


@pytest.mark.parametrize("wrong", [4096, -1])
def test_a_head_s_token_that_there_is_not_is_told(target: Path, tmp_path: Path, wrong: int) -> None:
    """llama.cpp would abort at the first draft."""
    head = heads.write_eagle3(target, tmp_path / "head.gguf", draft_vocab=1000)
    data = head.read_bytes()
    head.write_bytes(data.replace(np.int64([998, 999]).tobytes(), np.int64([998, wrong]).tobytes()))
    with pytest.raises(ModelError, match=rf"head.gguf is damaged: d2t names token {wrong}, but .* 4,096") as refused:
        SpeculativeDecoder(target, head)
    assert "download or convert it again" in refused.value.hint


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"target_width": 64}, "made for hidden states of size 64, but the target's have size 320"),
        ({"layers": (2, 4, 99)}, "reads the layers 2, 4, 99, but the target has 8 blocks"),
        ({"width": 160, "own_output": False}, "shares the target's embeddings of size 320, but expects size 160"),
        ({"tokens": 2048}, "the target has 4,096 tokens, the draft 2,048"),
    ],
)
def test_a_head_of_another_target_is_told_with_what_to_do(
    cli: Cli, target: Path, tmp_path: Path, made: dict[str, Any], words: str
) -> None:
    head = heads.write_eagle3(target, tmp_path / "head.gguf", **made)
    for command in (("plan",), ("run", "-p", "x")):
        done = cli(*command, "-m", target, "-md", head, "--json")
        assert done.code == 1
        assert f"head.gguf cannot draft for {target.name}: " in done.document()["error"]
        assert words in done.document()["error"]
        assert done.document()["hint"] == "choose a head that was made for this target, or --drafter none"


def test_a_head_that_is_cut_short_is_told_before_anything_is_loaded(cli: Cli, target: Path, tmp_path: Path) -> None:
    whole = (target.parent / "demo-eagle3-Q8_0.gguf").read_bytes()
    for cut in (len(whole) - 1, len(whole) // 2, 5000):
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        done = cli("run", "-m", target, "-md", tmp_path / "cut.gguf", "-p", "x", "--json")
        assert done.code == 1
        assert "cut.gguf is truncated" in done.document()["error"]
        assert "download it again" in done.document()["hint"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_a_decoder_drafts_with_a_head(files: dict[str, tuple[Path, Path]], kind: str, policy: str) -> None:
    """Strict where that can be, with the lookup in the same chain, and with a conversation that grows. Otherwise a text
    may leave the other where two tokens are as likely to within rounding.
    """
    target_path, head_path = files[kind]
    name, strict, cases = kind.split()[0], kind != "mtp hybrid", list[divergence.DivergenceCase]()
    options = DecoderOptions(
        ctx_size=512, threads=1, drafters=(name, "lookup"), draft_policy=policy, draft_max=3, strict=strict
    )
    with SpeculativeDecoder(target_path, head_path, options) as decoder:
        assert decoder.drafters == (name, "lookup")
        for prompt in (PROMPT, PROMPT + "argparse"):
            found = list(decoder.generate(prompt, max_tokens=40, cache_prompt=True))
            assert {one.source for one in found} <= {name, "lookup", "target", "bonus"}
            assert decoder.statistics is not None
            if policy == "fixed":
                assert decoder.statistics.drafted > decoder.statistics.lookup_drafted
            plain = [one.token for one in decoder.generate(prompt, max_tokens=40, alone="target")]
            drafted = [one.token for one in found]
            assert drafted == plain or not strict
            if drafted != plain:
                cases.append(divergence.DivergenceCase(len(cases), prompt, tuple(plain), tuple(drafted)))
        with pytest.raises(UsageError, match="draft-only needs a draft model"):
            list(decoder.generate(PROMPT, alone="draft"))
    spec = divergence.DivergenceJob(target_path, options, tuple(cases))
    explained = divergence.run(spec, lambda event: None, threading.Event())
    assert all(one.explained for one in explained), explained


@pytest.mark.parametrize("tokens", [4032, 4160])
def test_a_head_s_vocabulary_may_be_padded_otherwise(target: Path, tmp_path: Path, tokens: int) -> None:
    """Tokens that one of them lacks are neither proposed to the target nor read by the head."""
    head = heads.write_eagle3(target, tmp_path / "head.gguf", tokens=tokens)
    chain = DecoderOptions(
        ctx_size=512, threads=1, drafters=("eagle3",), draft_policy="fixed", draft_max=3, strict=True
    )
    with SpeculativeDecoder(target, head, chain) as decoder:
        prompt = [*decoder.target.tokenize(PROMPT), 4095, 4040]
        plain = [one.token for one in decoder.generate(prompt, max_tokens=24, alone="target")]
        assert [one.token for one in decoder.generate(prompt, max_tokens=24)] == plain
        assert decoder.statistics is not None
        assert decoder.statistics.drafted > 0
        assert all(token < 4096 for one in decoder.rounds for token in one.drafted)
        assert not [note for note in decoder.notes if "drafts no more" in note]


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_by_turns_have_a_head_each(files: dict[str, tuple[Path, Path]], kind: str) -> None:
    """Of two conversations by turns, each is drafted as it is by itself: the same text, and as many tokens accepted."""
    target, head = files[kind]
    name = "eagle3" if kind.startswith("eagle3") else "mtp"
    chain = DecoderOptions(ctx_size=512, threads=1, drafters=(name,), draft_policy="fixed", draft_max=3)
    prompts = (PROMPT, "class Stack:\n    def __init__(self):")

    def turns(decoder: SpeculativeDecoder, sequences: tuple[int, int]) -> list[list[tuple[list[int], int]]]:
        found: list[list[tuple[list[int], int]]] = [[], []]
        texts = [decoder.target.tokenize(one) for one in prompts]
        for _ in range(3):
            for index, text in enumerate(texts):
                decoder.use(sequences[index])
                new = [one.token for one in decoder.generate(text, max_tokens=12, cache_prompt=True)]
                assert decoder.statistics is not None
                found[index].append((new, decoder.statistics.accepted))
                text += [*new, 7 + index]
        return found

    def beside(parallel: int) -> SpeculativeDecoder:
        return SpeculativeDecoder(target, head, replace(chain, parallel=parallel))

    with beside(2) as decoder:
        both = turns(decoder, (0, 1))
    for index in (0, 1):
        with beside(1) as decoder:
            found = []
            text = decoder.target.tokenize(prompts[index])
            for _ in range(3):
                new = [one.token for one in decoder.generate(text, max_tokens=12, cache_prompt=True)]
                assert decoder.statistics is not None
                found.append((new, decoder.statistics.accepted))
                text += [*new, 7 + index]
        assert both[index] == found


def test_two_draft_files_are_one_too_many() -> None:
    with pytest.raises(UsageError, match=r"eagle3.* needs two draft files"):
        DecoderOptions(drafters=("draft", "eagle3"))


def test_the_dry_run_of_a_head_is_what_a_real_load_takes(files: dict[str, tuple[Path, Path]]) -> None:
    """On the host and on a worker's device: nothing, a part and all of it offloaded, however it is decoded; weights in
    the target's own file count once.
    """
    runs = []
    modes = [options(), replace(options(), flash_attn="off"), replace(options(), ubatch_size=64)]
    modes.append(replace(options(), sequences=3))
    quantised = replace(options(), cache_type_k="q8_0", cache_type_v="q8_0")
    cases = [(layers, options(), options()) for layers in (0, 4)] + [(99, mode, mode) for mode in modes]
    for kind, (target_path, head_path) in files.items():
        in_target, mtp = head_path == target_path, kind.startswith("mtp")
        for layers, wanted, own in [*cases, (99, quantised, options())]:  # a head's cache stays f16
            target = PlacedModel(target_path, Placement(layers, mtp=in_target), wanted)
            placement = target.placement if in_target else Placement(layers, mtp=mtp)
            runs += [target, PlacedModel(head_path, placement, own, target)]
    dry, real = (ask(DryRunJob((), 1, real=real), runs) for real in (False, True))
    assert [answer.error for answer in dry] == [""] * len(runs)
    assert dry == real
    shared = dry[runs.index(next(run for run in runs if run.target and run.path == run.target.path))]
    assert sum(one.weights for one in shared.devices.values()) == 0


def test_a_plan_counts_what_is_taken(loaded: tuple[Context, Head], tmp_path: Path) -> None:
    """On the host; of the rows that a target hands out as much as they may take, which is nothing or all of it."""
    context, head = loaded
    own = head.model is context.model
    known = [header(one.model.path) for one in (context, head)]
    wanted = options(head_sources(head.model))
    target = MemoryRequest(known[0], context.model.path, Placement(mtp=own), wanted)
    requests = [target, MemoryRequest(known[1], head.model.path, Placement(mtp=not head.is_eagle3), options(), target)]
    with DryRuns({}, simulated=False, rpc=(), folder=tmp_path) as dry_runs:
        planned = [answer[HOST] for answer in dry_runs(requests) if not isinstance(answer, str)]
    taken = [allocated(one)[HOST] for one in (context, head)]
    assert [one.kv for one in planned] == [one.kv for one in taken]
    rows = 4 * context.model.hidden_size * len(wanted.hidden) * wanted.computed
    assert planned[0].compute - taken[0].compute in (0, rows)
    assert planned[1].compute == taken[1].compute


def header(path: Path) -> ModelHeader:
    return interpret(path.name, [gguf.parse_header(path.read_bytes())], path.stat().st_size)


ON_A_WORKER = ("mtp", "mtp hybrid", "mtp assistant", "eagle3")


@pytest.mark.parametrize("kind", ON_A_WORKER)
def test_a_head_is_planned_and_runs_on_a_worker(
    cli: Cli,
    files: dict[str, tuple[Path, Path]],
    kind: str,
    worker: tuple[str, subprocess.Popen[bytes]],  # noqa: F811
) -> None:
    """Wholly on a device of another process: every byte of the plan is taken, and the text is target-only's."""
    target, head = files[kind]
    pair = ("-m", target, "-md", head) if head != target else ("-m", target, "--drafter", "mtp")
    where = ("--rpc", worker[0], "-ngl", "99", "-ngld", "99", "-c", "512", "--json")
    plan = cli("plan", *pair, *where).document()["options"]["speculative"]
    assert plan["draft"]["gpu_layers"] > 0
    done = cli("run", *pair, *where, "-p", PROMPT, "-n", "24", "--draft-policy", "fixed")
    assert done.code == 0, done.stderr
    alone = cli("run", *pair, *where, "-p", PROMPT, "-n", "24", "--no-draft").document()
    assert done.document()["tokens"] == alone["tokens"]
    statistics = done.document()["statistics"]
    assert statistics["gpu_layers_draft"] > 0
    assert statistics["drafted"] > 0


def test_the_head_that_ships_drafts_well() -> None:
    """Profile demo-eagle3: a head given as a draft is known for one, and half of what it drafts is accepted."""
    with load_pair("demo-eagle3", threads=1, ctx_size=512, draft_policy="fixed", draft_max=3) as decoder:
        assert decoder.drafters == ("eagle3", "lookup")
        found = list(decoder.generate("class Stack:\n    def __init__(self):", max_tokens=64))
    assert {"eagle3", "target"} <= {one.source for one in found}
    assert decoder.statistics is not None
    assert decoder.statistics.accepted > decoder.statistics.drafted / 3
