"""The Python interface: plans, decoders, benches and profiles; the examples that people copy; threads and memory."""

from __future__ import annotations

import doctest
import gc
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import ggufspec
from ggufspec import (
    GgufspecError,
    ModelError,
    Pair,
    Sampling,
    SpeculativeDecoder,
    UsageError,
    bench_pair,
    load_pair,
    load_profile,
    plan_pair,
)
from ggufspec.hardware.host import resident_bytes
from ggufspec.schema.base import to_json
from tests.support.processes import Cli
from tests.support.server import serving

PROMPT = "import os\n\ndef "
SOURCES = {"draft", "lookup", "target", "bonus"}


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the user's own."""
    for variable in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(variable, str(tmp_path_factory.mktemp("own")))


@pytest.fixture
def files(target: Path, draft: Path) -> Pair:
    return Pair("files", target, draft)


def text_of(decoder: SpeculativeDecoder, tokens: int = 24, **more: Any) -> str:
    return "".join(emitted.text for emitted in decoder.generate(PROMPT, max_tokens=tokens, **more))


# ---- what is promised ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["api.python", "bench.pair", "models.profile"])
def test_the_examples_of_the_docstrings(module: str) -> None:
    __import__(f"ggufspec.{module}")
    result = doctest.testmod(sys.modules[f"ggufspec.{module}"])
    assert result.attempted >= 3
    assert result.failed == 0


def test_every_public_name_is_told_and_none_is_loaded_before_it_is_used() -> None:
    program = "import sys, ggufspec; print(sorted(dir(ggufspec))); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    names, modules = done.stdout.splitlines()
    assert all(f"'{name}'" in names for name in ggufspec.__all__)
    assert not any(f"'{module}'" in modules for module in ("numpy", "pydantic", "llama_cpp", "ggufspec.decoding"))


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    plan_pair("demo", vram="24GiB")
    with load_pair("demo", threads=1, ctx_size=512) as decoder:
        text_of(decoder, 8)
    bench_pair("demo", prompts=[PROMPT], max_tokens=4, repetitions=1, threads=1, ctx_size=512)
    assert capfd.readouterr() == ("", "")


# ---- profiles --------------------------------------------------------------------------------------------------------


def test_a_profile_by_name_by_path_and_as_text(tmp_path: Path) -> None:
    by_name = load_profile("demo")
    path = by_name.folder / "demo.toml"
    assert load_profile(path) == load_profile(str(path)) == by_name
    with pytest.raises(UsageError) as caught:
        load_profile("dmeo")
    assert caught.value.hint == "did you mean 'demo'?"
    with pytest.raises(GgufspecError, match=r"none\.toml"):
        load_profile(tmp_path / "none.toml")


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_the_document_of_the_command(files: Pair) -> None:
    plan = plan_pair(files, gpu="RTX 4090", ctx_size=512, acceptance=0.5, threads=1)
    body = json.loads(to_json(plan))
    assert body["schema"] == "ggufspec/plan@1"
    assert body["predicted"]["acceptance"] == 0.5
    assert body["settings"]["ctx_size"] == 512
    assert plan.devices[0].description == "RTX 4090"
    assert plan.pair["name"] == "files"
    both = plan.options["speculative"]
    assert both is not None
    assert both.draft is not None
    assert set(plan.target.bytes) == {"GPU0", "CPU"}


def test_cards_and_sizes_are_one_or_several(files: Pair) -> None:
    one = plan_pair(files, vram=2**30, ctx_size=512)
    assert one.devices[0].total_bytes == 2**30
    two = plan_pair(files, vram=["1GiB", 2**30], ctx_size=512, headroom=2**20)
    assert [device.name for device in two.devices] == ["GPU0", "GPU1", "CPU"]
    assert two.devices[0].budget_bytes == 2**30 - 2**20


def test_a_plan_keeps_to_what_is_fixed(files: Pair) -> None:
    fixed = plan_pair(files, vram="1GiB", ctx_size=512, gpu_layers=3, gpu_layers_draft="all", draft_max=2)
    both = fixed.options["speculative"]
    assert both is not None
    assert both.draft is not None
    assert (both.target.gpu_layers, both.draft.gpu_layers) == (3, both.draft.layers + 1)
    assert both.draft_length <= 2
    assert plan_pair(files, vram="1GiB", ctx_size=512, gpu_layers="auto").target.gpu_layers == 9


def test_a_plan_with_a_sweep_and_its_events(files: Pair) -> None:
    events: list[dict[str, Any]] = []
    plan = plan_pair(files, vram="1GiB", ctx_size=512, sweep=True, on_event=events.append)
    assert [row.gpu_layers for row in plan.sweep][-1] == 9
    assert {event["event"] for event in events} == {"reading"}


FAR = """
import json
from ggufspec import GgufspecError, load_pair, plan_pair

def reported(function, **options):
    try:
        return function("far", threads=1, ctx_size=256, **options)
    except GgufspecError as error:
        return [type(error).__name__, error.message, error.hint]

events = []
planned = reported(plan_pair, vram="1GiB", on_event=events.append)
print(json.dumps(planned if isinstance(planned, list) else [planned.target.file, planned.target.gpu_layers]))
print(json.dumps(reported(load_pair)))
decoder = reported(load_pair, download=True, on_event=events.append)
if isinstance(decoder, list):
    print(json.dumps(decoder))
else:
    with decoder:
        print(json.dumps([emitted.token for emitted in decoder.generate("def f(", max_tokens=4)]))
    with reported(load_pair) as again:
        print(json.dumps([emitted.token for emitted in again.generate("def f(", max_tokens=4)]))
print(json.dumps(sorted({event["event"] for event in events})))
"""


@pytest.fixture
def far(cli: Cli) -> Cli:
    """A profile of two files of the hub."""
    folder = Path(cli.environment["HOME"]) / ".config" / "ggufspec" / "profiles"
    folder.mkdir(parents=True)
    files = ("demo-target-F16", "demo-draft-Q8_0")
    target, draft = (f'repo = "user/pair-GGUF"\nfile = "{name}.gguf"\n' for name in files)
    about = 'name = "far"\nwhy = "a test"\nsource = "nowhere"\n'
    (folder / "far.toml").write_text(f"{about}[target]\n{target}[draft]\n{draft}")
    return cli


def lines(cli: Cli, program: str, **more: str) -> list[Any]:
    """What a program of a user's prints, line by line."""
    environment = cli.environment | more
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=cli.folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(sys.platform != "linux", reason="the user's folders are elsewhere")
def test_a_pair_of_the_hub_is_planned_by_its_headers_and_fetched_on_demand(far: Cli, target: Path) -> None:
    with serving() as hub:
        hub.add_models("user/pair-GGUF", target.parent)
        online = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        planned, missing, answer, again, events = lines(far, FAR, **online)
    assert planned == ["demo-target-F16.gguf", 9]
    assert missing[0] == "ModelError"
    assert missing[2] == "ggufspec pull far"
    assert len(answer) == 4
    assert answer == again
    assert {"reading", "fetching"} <= set(events)


@pytest.mark.skipif(sys.platform != "linux", reason="the user's folders are elsewhere")
def test_without_a_network_the_reason_is_told(far: Cli) -> None:
    planned, missing, fetched, events = lines(far, FAR)
    assert "HF_HUB_OFFLINE" in planned[1]
    assert planned[2].startswith("unset HF_HUB_OFFLINE")
    assert missing[2] == "ggufspec pull far"
    assert "HF_HUB_OFFLINE" in fetched[1]
    assert events == []


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"n_cxt": 512}, "there is no option 'n_cxt'", "did you mean 'ctx_size'?"),
        ({"gpu_layers": "many"}, "'many' is not a number of layers", "45, all or auto"),
        ({"ubatch_size": 4097}, "--ubatch-size 4097 is out of range: 1 to 4096", "1 to 4096"),
        ({"cache_type_k": "q9"}, "there is no key cache type 'q9'", "f16"),
        ({"ctx_size": -1}, "--ctx-size -1 is out of range", "-c max"),
        ({"acceptance": 1.5}, "--acceptance 1.5 is out of range: 0 to 1", "0.7"),
        ({"vram": "much"}, "'much' is not a memory size", "24GiB"),
        ({"gpu": "RTX 9999 Ti"}, "RTX 9999 Ti", ""),
        ({"vram": "1GiB", "rpc": ["127.0.0.1:1"]}, "--rpc cannot be combined with --gpu", "one or the other"),
    ],
)
def test_what_cannot_be_planned(files: Pair, options: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(GgufspecError) as caught:
        plan_pair(files, **({"vram": "1GiB"} | options if "gpu" not in options else options))
    assert message in caught.value.message
    assert hint in caught.value.hint


# ---- decoders --------------------------------------------------------------------------------------------------------


def test_a_pair_is_loaded_as_its_profile_and_its_caller_say(files: Pair) -> None:
    with load_pair("demo", threads=1, draft_policy="fixed", strict=True) as decoder:
        options = decoder.options
        assert (options.ctx_size, options.draft_max, options.strict, options.threads) == (2048, 4, True, 1)
        assert decoder.drafters == ("draft", "lookup")
        answer = list(decoder.generate(PROMPT, max_tokens=32))
    assert {emitted.source for emitted in answer} <= SOURCES
    assert any(emitted.drafted for emitted in answer)
    assert all(emitted.drafted == (emitted.source in ("draft", "lookup")) for emitted in answer)
    with load_pair(files, threads=1, drafter="none", strict=True, ctx_size=512) as decoder:
        assert decoder.draft is None
        alone = list(decoder.generate(PROMPT, max_tokens=32))
    assert {emitted.source for emitted in alone} == {"target"}
    assert [emitted.token for emitted in answer] == [emitted.token for emitted in alone]


def test_paths_may_be_text(target: Path, draft: Path) -> None:
    with load_pair(Pair("text", str(target), str(draft)), threads=1, ctx_size=256) as decoder:  # type: ignore[arg-type]
        assert text_of(decoder, 4)


def test_another_setting_without_loading(files: Pair) -> None:
    with load_pair(files, threads=1, ctx_size=512, draft_policy="fixed", strict=True) as decoder:
        loaded = decoder.target
        with_draft = text_of(decoder)
        decoder.configure(drafters=("lookup",), draft_max=2)
        assert text_of(decoder) == with_draft
        assert decoder.target is loaded
        assert decoder.drafters == ("lookup",)
        with pytest.raises(UsageError):
            decoder.configure(ctx_size=1024)


def test_the_second_turn_reads_only_what_is_new(files: Pair) -> None:
    with load_pair(files, threads=1, ctx_size=512) as decoder:
        tokens = decoder.target.tokenize(PROMPT)
        answer = [emitted.token for emitted in decoder.generate(tokens, max_tokens=16, cache_prompt=True)]
        longer = [*tokens, *answer, *decoder.target.tokenize("\n\ndef other(")[-4:]]
        list(decoder.generate(longer, max_tokens=4, cache_prompt=True))
        assert decoder.statistics is not None
        assert decoder.statistics.prompt_tokens == len(longer)
        assert decoder.statistics.prompt_read <= 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "nobody"}, "there is no drafter 'nobody'"),
        ({"accept": "top-k"}, "needs a number of tokens"),
        ({"grammar": "root ::= x"}, "there is no option 'grammar'"),
        ({"lookup_corpus": Path("no such file")}, "cannot be read"),
        ({"lookup_corpus": "no such file"}, "cannot be read"),
    ],
)
def test_what_cannot_be_loaded(files: Pair, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_pair(files, **options)


def test_a_drafter_without_a_draft(target: Path) -> None:
    with pytest.raises(UsageError, match="needs a draft model") as caught:
        load_pair(Pair("alone", target, None), drafter="draft")
    assert "lookup" in caught.value.hint
    with load_pair(Pair("alone", target, None), threads=1, ctx_size=256, drafter="lookup") as decoder:
        assert decoder.drafters == ("lookup",)


def test_files_that_are_no_models(tmp_path: Path, target: Path) -> None:
    with pytest.raises(ModelError):
        load_pair(Pair("gone", target, tmp_path / "gone.gguf"))
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(ModelError):
        bench_pair(Pair("text", target, tmp_path / "text.gguf"))


# ---- threads and memory ----------------------------------------------------------------------------------------------


def test_one_answer_at_a_time(files: Pair) -> None:
    """A second thread is refused while an answer is unfinished, and the answer is not the worse for it."""
    refused: list[BaseException] = []

    def disturb() -> None:
        for again in (lambda: next(iter(decoder.generate(PROMPT))), lambda: decoder.configure(draft_max=1)):
            try:
                again()
            except UsageError as error:
                refused.append(error)

    with load_pair(files, threads=1, ctx_size=512, strict=True) as decoder:
        whole = text_of(decoder)
        answer = decoder.generate(PROMPT, max_tokens=24)
        begun = next(answer).text
        thread = threading.Thread(target=disturb)
        thread.start()
        thread.join()
        assert len(refused) == 2
        assert all("is unfinished" in str(error) for error in refused)
        assert begun + "".join(emitted.text for emitted in answer) == whole
        left = decoder.generate(PROMPT, max_tokens=24)
        next(left)
        left.close()
        assert text_of(decoder) == whole


def test_two_decoders_in_two_threads(files: Pair) -> None:
    texts: dict[int, str] = {}
    sampling = [Sampling(temperature=0.8, seed=seed) for seed in (1, 2)]

    def answer(index: int) -> None:
        with load_pair(files, threads=1, ctx_size=512, strict=True) as decoder:
            texts[index] = text_of(decoder, 48, sampling=sampling[index])

    threads = [threading.Thread(target=answer, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with load_pair(files, threads=1, ctx_size=512, strict=True) as decoder:
        assert texts == {index: text_of(decoder, 48, sampling=one) for index, one in enumerate(sampling)}


def mapped() -> set[str]:
    """Model files that this process has in memory; Linux only."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if line.endswith(".gguf")}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_leaving_the_block_frees_the_models(files: Pair) -> None:
    before = mapped()
    with load_pair(files, threads=1, ctx_size=512) as decoder:
        text_of(decoder, 4)
        assert {str(files.target), str(files.draft)} <= mapped()
    assert mapped() == before


def test_loading_again_and_again_takes_no_more_memory(files: Pair) -> None:
    """The context of 8,192 tokens makes each decoder hold tens of MB: a leak of one would show."""

    def once() -> int:
        with load_pair(files, threads=1, ctx_size=8192) as decoder:
            text_of(decoder, 4)
            held = resident_bytes()
        gc.collect()
        return held - resident_bytes()

    for _ in range(2):
        once()
    before = resident_bytes()
    freed = [once() for _ in range(8)]
    assert min(freed) > 10e6
    assert resident_bytes() - before < min(freed)


# ---- bench -----------------------------------------------------------------------------------------------------------


def test_a_bench_is_the_document_of_the_command(files: Pair) -> None:
    events: list[dict[str, Any]] = []
    measured = bench_pair(
        files,
        prompts=[PROMPT],
        max_tokens=8,
        repetitions=1,
        sampling=Sampling(temperature=0.5, seed=3),
        on_event=events.append,
        threads=1,
        ctx_size=512,
        draft_policy="fixed",
    )
    body = json.loads(to_json(measured))
    assert body["schema"] == "ggufspec/bench@1"
    assert set(body["runs"]) == {"target_only", "draft_only", "speculative"}
    assert body["runs"]["speculative"]["drafted"] > 0
    settings = body["settings"]
    assert (settings["temperature"], settings["max_tokens"], settings["threads"]) == (0.5, 8, 1)
    progress = [(event["done"], event["total"]) for event in events if event["event"] == "progress"]
    assert progress[0] == (0, 0)  # loading: how long is not known
    assert progress[-1] == (1, 1)
    assert (2, 2) in progress  # answers of the two ways that are compared


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "there is no prompt"),
        ({"prompts": ["x", ""]}, "an empty one"),
        ({"repetitions": 0}, "at least one answer"),
        ({"drafter": "none"}, "speculation is off"),
        ({"engine": "other"}, "there is no engine 'other'"),
        ({"engine": "hook", "strict": True}, "Llama chooses its own"),
        ({"stric": True}, "there is no option 'stric'"),
    ],
)
def test_what_cannot_be_measured(files: Pair, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench_pair(files, **options)


def test_a_bench_through_llama(files: Pair) -> None:
    measured = bench_pair(files, prompts=[PROMPT], max_tokens=8, repetitions=1, threads=1, ctx_size=512, engine="hook")
    assert {"target_only", "speculative", "llama_target_only", "llama_hook"} <= set(measured.runs)
    assert all(run is not None and run.tokens == 8 for run in measured.runs.values())


def test_a_target_alone_has_nothing_to_compare_with(target: Path) -> None:
    with pytest.raises(UsageError, match="speculation is off"):
        bench_pair(Pair("alone", target, None))


# ---- types -----------------------------------------------------------------------------------------------------------

TYPED = """
from ggufspec import Settings, bench_pair, load_pair, plan_pair

with load_pair("demo", ctx_size=512, gpu_layers="all") as decoder:
    reveal_type(decoder)
    for emitted in decoder.generate("x", max_tokens=4):
        reveal_type(emitted.source)
reveal_type(plan_pair("demo", vram=["24GiB", 2**30]).target.gpu_layers)
reveal_type(bench_pair("demo", rpc=["127.0.0.1:1"]).verdict.worth_it)
load_pair("demo", Settings(n_cxt=512))
plan_pair("demo", Settings(strict=1.5))
bench_pair("demo", Settings(draft_max="4"))
"""


@pytest.mark.full
def test_a_caller_s_program_is_checked_by_mypy(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(TYPED)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", path],
        cwd=Path(__file__).resolve().parents[2],  # its settings, and what it has kept of the package
        capture_output=True,
        text=True,
        timeout=180,
    )
    said = [line.partition("program.py:")[2] for line in done.stdout.splitlines() if "program.py:" in line]
    revealed = [line.partition('Revealed type is "')[2].rstrip('"') for line in said if "Revealed" in line]
    assert revealed == ["ggufspec.decoding.decoder.SpeculativeDecoder", "str", "int", "bool"], done.stdout
    errors = [line for line in said if "error:" in line]
    assert [int(error.partition(":")[0]) for error in errors] == [10, 11, 12], done.stdout
    assert 'Unexpected keyword argument "n_cxt"' in errors[0]
