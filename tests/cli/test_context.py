"""How many tokens of context: ``-c max``, a context beyond what a model was trained for."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ggufspec import SpeculativeDecoder, bench_pair
from ggufspec.api.options import with_context
from ggufspec.api.pairs import open_pair, spec_of
from ggufspec.api.resolve import resolve
from ggufspec.bench.prompts import at_depth
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import UsageError
from ggufspec.llamacpp.options import ContextOptions
from ggufspec.models.headers import read_headers
from ggufspec.planning.memory import f16_scratch_bytes
from ggufspec.settings.table import Settings
from tests.support import shapes
from tests.support.processes import Cli, plain


@pytest.fixture(scope="module")
def trained(target: Path) -> int:
    return read_headers([target])[0].header.context_length


@pytest.mark.parametrize("typed", ["0", "max", "MAX"])
def test_max_is_what_the_target_was_trained_for(cli: Cli, trained: int, typed: str) -> None:
    plan = cli("plan", "demo", "-c", typed, "--vram", "24GiB", "--json").document()
    assert plan["settings"]["ctx_size"] == trained
    assert not any("trained for" in note for note in plan["notes"])


def test_every_command_takes_it(cli: Cli, trained: int) -> None:
    run = cli("run", "demo", "-c", "max", "-p", "import", "-n", "2", "--json").document()
    assert run["settings"]["ctx_size"] == trained
    assert f"-c {trained + 256} " in cli("export", "demo", "-c", "max", "--to", "llama-server").stdout
    assert Settings(ctx_size="max").ctx_size == 0  # type: ignore[arg-type]  # as Python callers may type it
    resolved = resolve(open_pair(spec_of("demo"), Settings(ctx_size=0)), best_target_only=True)
    assert (resolved.pair.ctx_size, resolved.target_only.ctx_size) == (trained, trained)


def test_a_decoder_takes_it(target: Path, trained: int) -> None:
    with SpeculativeDecoder(target, None, DecoderOptions(ctx_size=0, threads=1)) as decoder:
        assert decoder.options.ctx_size == trained
        assert decoder.notes == []


def test_a_target_that_does_not_say(target: Path) -> None:
    silent = replace(read_headers([target])[0].header, context_length=0)
    with pytest.raises(UsageError, match="does not state") as refused:
        with_context(DecoderOptions(ctx_size=0), silent)
    assert refused.value.hint == "give a number: -c 8192"
    assert with_context(DecoderOptions(ctx_size=512), silent).ctx_size == 512


def test_beyond_the_training_is_a_warning_that_says_what_it_does(cli: Cli, trained: int) -> None:
    plan = cli("plan", "demo", "-c", str(trained + 1), "--vram", "24GiB", "--json").document()
    notes = [note for note in plan["notes"] if "trained for" in note]
    assert len(notes) == 2
    assert f"was trained for {trained:,} tokens of context; beyond that answers get worse" in notes[0]
    assert "fewer of its drafts are accepted" in notes[1]
    done = cli("run", "demo", "--no-draft", "-c", str(trained + 1), "-p", "import", "-n", "2")
    assert done.code == 0
    assert "beyond that answers get worse, because no RoPE scaling is set" in done.stderr


# ---- other contexts beside the plan's --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = "llama3-8b-q3_k_l"
    return shapes.write(tmp_path_factory.mktemp("llama") / f"{name}.gguf", shapes.SHAPES[name], tokenizer=True)


def test_other_contexts_stand_beside_a_plan_without_one(cli: Cli, llama: Path) -> None:
    plan = cli("plan", "-m", llama, "--vram", "8GiB", "--json").document()
    rows = {row["ctx_size"]: row for row in plan["contexts"]}
    assert list(rows) == [2048, 4096, 32768, 131072]
    assert rows[2048]["target_layers"] == plan["target"]["gpu_layers"]
    layers = [row["target_layers"] for row in rows.values()]
    assert layers == sorted(layers, reverse=True)
    assert layers[-1] < layers[0]
    assert all(row["full_tokens_per_s"] < row["empty_tokens_per_s"] for row in rows.values())
    speed = plan["predicted"]["target_only_tokens_per_s"]
    assert rows[2048]["full_tokens_per_s"] < speed < rows[2048]["empty_tokens_per_s"]
    assert plan["predicted"]["depth"] == 1024
    assert plan["settings"]["context_from"] == "the default"
    target_only = cli("plan", "-m", llama, "--vram", "8GiB", "-c", "32768", "--json").document()
    assert target_only["contexts"] == []
    assert target_only["settings"]["context_from"] == "given with -c"
    assert target_only["target"]["gpu_layers"] == rows[32768]["target_layers"]


def test_the_table_of_contexts(cli: Cli, llama: Path) -> None:
    shown = plain(cli("plan", "-m", llama, "--vram", "8GiB", "-v", COLUMNS="80").stdout)
    assert max(len(line) for line in shown.splitlines() if not line.startswith("next: ")) <= 80
    assert re.search(r"32,768 +yes +\d+/33(, \d+ FFN on CPU)? +f16 +[\d.]+ +[\d.]+", shown)
    assert "2,048 tokens of context (the default); speeds are predicted with 1,024" in " ".join(shown.split())


def test_a_context_that_does_not_fit_is_a_row(cli: Cli, llama: Path) -> None:
    plan = cli("plan", "-m", llama, "--vram", "8GiB", "-ngl", "all", "-ctk", "q8_0", "-ctv", "q8_0", "--json")
    rows = {row["ctx_size"]: row for row in plan.document()["contexts"]}
    assert (rows[4096]["fits"], rows[4096]["cache_type_k"]) == (True, "q8_0")
    assert (rows[131072]["fits"], rows[131072]["target_layers"]) == (False, None)


def test_no_context_beyond_the_training_is_shown(cli: Cli, trained: int) -> None:
    rows = cli("plan", "demo", "-c", "max", "--json").document()
    assert rows["contexts"] == []
    assert [row["ctx_size"] for row in cli("plan", "demo", "--json").document()["contexts"]] == [trained]


# ---- a bench at depth ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 7, 5000])
def test_a_prompt_stands_behind_so_many_tokens(depth: int) -> None:
    def tokenize(text: str, *, special: bool = False, start: bool = True) -> list[int]:
        return [-1] * start + [ord(letter) for letter in text]

    tokens = at_depth(tokenize, "def f", depth)
    assert len(tokens) == depth + 5 + (not depth)
    assert tokens[0] == -1
    assert tokens.count(-1) == 1
    assert tokens[-5:] == [*map(ord, "def f")]
    assert at_depth(tokenize, "x", 9000)[:5000] == at_depth(tokenize, "y", 5000)[:5000]


def test_a_bench_at_depth(cli: Cli) -> None:
    kept = cli.folder / "bench.json"
    bench = ("bench", "demo", "-p", "import os\n", "-n", "8", "-r", "1", "--depth", "600")
    shown = plain(cli(*bench, "--export-json", kept, COLUMNS="120").stdout)
    assert "600 tokens deep" in shown
    document = json.loads(kept.read_text())
    assert document["settings"]["depth"] == 600
    assert document["identical_output"]
    assert all(run["tokens"] == 8 for run in document["runs"].values())


def test_a_depth_that_the_context_does_not_hold(cli: Cli) -> None:
    done = cli("bench", "demo", "-p", "import", "-n", "16", "-r", "1", "--depth", "2040", "--json")
    assert done.code == 2
    assert done.document()["error"].startswith("--depth 2040, a prompt of 1 token and answers of 16 tokens need 2,057")
    assert done.document()["hint"] == "-c 2304"
    assert cli("bench", "demo", "--engine", "hook", "--depth", "9", "--json").code == 2
    with pytest.raises(UsageError, match="need 2,057 tokens"):
        bench_pair("demo", prompts=["import"], max_tokens=16, repetitions=1, depth=2040)


def test_a_simulated_card_has_room_for_cuda_s_copy_of_a_quantised_cache(cli: Cli, llama: Path) -> None:
    """2 bytes for each key and value of one block, as ggml-cuda allocates them in the compute buffer."""
    compute = {}
    for kind in ("f16", "q8_0"):
        flags = ("-ctk", kind, "-ctv", kind, "-c", "32768", "--vram", "24GiB", "--json")
        plan = cli("plan", "-m", llama, *flags).document()
        compute[kind] = plan["target"]["bytes"]["GPU0"]["compute"]
    copy = 2 * (1024 + 1024) * (32768 + 256)
    assert compute["q8_0"] - compute["f16"] == pytest.approx(copy, rel=0.1)  # the graphs differ a little, too
    header = read_headers([llama])[0].header
    mixed = ContextOptions(1000, 2, 1, cache_type_k="q8_0")
    devices = [0] * 10 + [1] * 23
    assert f16_scratch_bytes(header, devices, mixed, 2) == [2 * 1024 * 1280] * 2
    assert f16_scratch_bytes(header, devices, replace(mixed, flash_attn="off"), 2) == [0, 0]
