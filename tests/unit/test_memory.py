"""Bytes of placements: sums that are llama.cpp's to the byte, and estimates of compute buffers that are never below."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from evidence.memory import card_names, compare, families, model_of

from ggufspec.llamacpp import dryrun
from ggufspec.llamacpp.options import KV_TYPES, ContextOptions, Placement
from ggufspec.models.header import ModelHeader
from ggufspec.planning.dry_runs import DryRuns
from ggufspec.planning.memory import (
    HOST,
    ByDevice,
    DeviceBytes,
    DryRun,
    MemoryEstimates,
    MemoryRequest,
    layout,
    resident,
    total,
)
from ggufspec.settings.table import Settings
from tests.support.shapes import SHAPES

RECORD = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "memory.json"
TINY = [name for name in SHAPES if name.startswith("tiny-")]
ONE_OF_EACH = (
    *("llama3-8b-q3_k_l", "gpt2-medium-f16", "llama3.2-1b", "gemma2-9b", "qwen1.5-moe-a2.7b", "gpt-oss-20b"),
    *("glm4.5-air", "deepseek2-lite", "mamba2-1b", "rwkv7-1b", "jamba-mini", "lfm2-1.2b", "falcon-h1-1.5b"),
)
Model = tuple[ModelHeader, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("shapes")
    return {name: model_of(folder, name) for name in SHAPES}


def dry_runs(folder: Path, cards: int = 1) -> DryRuns:
    return DryRuns(dict.fromkeys(card_names(cards), ""), simulated=True, rpc=(), folder=folder)


def check_sums(requests: Sequence[MemoryRequest], folder: Path, cards: int = 1) -> None:
    """Weights, caches and logits, to the byte."""
    with dry_runs(folder, cards) as run:
        for request, truth in zip(requests, run(requests), strict=True):
            assert not isinstance(truth, str), truth
            found = resident(request.header, request.placement, request.context, card_names(cards))
            for device, real in truth.items():
                mine = found[device]
                assert (mine.weights, mine.kv, mine.overhead) == (real.weights, real.kv, real.overhead), request


def test_sums_are_the_dry_run(models: dict[str, Model], tmp_path: Path) -> None:
    contexts = [ContextOptions(600, 9, 1, kv, kv, "on") for kv in KV_TYPES if kv != "bf16"]
    check_sums([MemoryRequest(*models["tiny-llama"], Placement(3), context) for context in contexts], tmp_path)
    windowed = ContextOptions(9000, 9, 1, swa_full=False)
    check_sums([MemoryRequest(*models["tiny-swa"], Placement(n), windowed) for n in (0, 1, 4, 8)], tmp_path)
    context = ContextOptions(600, 9, 1, flash_attn="off")
    placements = [Placement(n, n_cpu_moe=e) for n in (3, 5) for e in (1, 4)]
    check_sums([MemoryRequest(*models["tiny-moe"], placement, context) for placement in placements], tmp_path)


OVERRIDES = {
    "tiny-llama": ("ffn_down=CPU", "blk\\.[12]\\.attn=RPC0", "output.weight=CPU"),
    "tiny-moe": ("_exps=RPC0",),
    "tiny-nextn": ("blk\\.0\\.=CPU,ffn_.*_shexp=CPU",),
    "tiny-tied": ("token_embd=RPC0",),
    "llama3.2-1b": ("rope_freqs=CPU", "attn_[kv]=CPU"),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_sums_of_single_tensors_elsewhere_are_the_dry_run(models: dict[str, Model], tmp_path: Path, name: str) -> None:
    context = ContextOptions(600, 9, 1, flash_attn="on")
    given = Settings(override_tensor=OVERRIDES[name]).override_tensor or ()
    placements = [Placement(n, override_tensor=given, n_cpu_moe=e, n_cpu_ffn=e) for n in (0, 3, 99) for e in (0, 2)]
    check_sums([MemoryRequest(*models[name], placement, context) for placement in placements], tmp_path)


def test_sums_of_feed_forwards_on_the_host_are_the_dry_run(models: dict[str, Model], tmp_path: Path) -> None:
    context = ContextOptions(600, 9, 1)
    placements = [Placement(n, n_cpu_ffn=blocks) for n in (2, 5) for blocks in (1, 3, 99)]
    named = ("tiny-llama", "tiny-nextn", "tiny-swa")
    check_sums([MemoryRequest(*models[name], at, context) for name in named for at in placements], tmp_path)


def test_tensors_of_either_card_are_the_dry_run(models: dict[str, Model], tmp_path: Path) -> None:
    given = ("ffn_up=RPC1", "ffn_gate=RPC0", "ffn=CPU")
    placements = [Placement(n, (1.0, 1.0), override_tensor=given) for n in (0, 3, 5)]
    check_sums(
        [MemoryRequest(*models["tiny-llama"], at, ContextOptions(600, 9, 1)) for at in placements], tmp_path, cards=2
    )


def test_sums_of_two_cards_are_the_dry_run(models: dict[str, Model], tmp_path: Path) -> None:
    placements = [Placement(n, s) for n in (2, 5) for s in ((1.0, 1.0), (3.0, 1.0), (0.0, 1.0))]
    context = ContextOptions(600, 9, 1)
    requests = [MemoryRequest(*models[name], at, context) for name in ("tiny-tied", "tiny-mla") for at in placements]
    check_sums(requests, tmp_path, cards=2)


@pytest.mark.full
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_sums_of_every_kind_are_the_dry_run(models: dict[str, Model], tmp_path: Path, name: str) -> None:
    header, _ = models[name]
    check_sums(
        [
            MemoryRequest(*models[name], Placement(header.blocks // 2), ContextOptions(3000, 5, 1, flash_attn="on")),
            MemoryRequest(*models[name], Placement(-1), ContextOptions(700, 256, 1, flash_attn="off")),
            MemoryRequest(*models[name], Placement(0), ContextOptions(100, 64, 1)),
        ],
        tmp_path,
    )


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-hybrid", pytest.param("gpt-oss-20b", marks=pytest.mark.full)])
def test_estimates_are_never_below(models: dict[str, Model], tmp_path: Path, name: str) -> None:
    for family in families(models[name][0], name):
        with dry_runs(tmp_path, family.cards) as run:
            row, _ = compare(family, models[name], run)
        if "rows" in row:
            assert row["below"] == 0, family
            assert row["above_percent"] < 20, family


def test_the_record_says_the_same() -> None:
    record = json.loads(RECORD.read_text())
    assert {name.split(", ")[0] for name in record["results"]} == set(SHAPES)
    assert record["total"]["below"] == 0
    assert record["total"]["dry_runs"] < record["total"]["rows"] / 2
    assert all(row["real"] == row["dry"] for row in record["loads"])


def test_a_real_load_is_the_dry_run(models: dict[str, Model]) -> None:
    context = ContextOptions(512, 9, 1, flash_attn="on")
    several = replace(context, sequences=3, rewind=8)
    for name in ("tiny-llama", "tiny-mla", "tiny-hybrid"):
        file = models[name][1].with_name(f"{name}.gguf")
        runs = [dryrun.PlacedModel(file, Placement(3), one) for one in (context, several)]
        assert dryrun.ask(dryrun.DryRunJob((), 1), runs) == dryrun.ask(dryrun.DryRunJob((), 1, real=True), runs)


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("tiny-llama", Placement(5, n_cpu_ffn=2)),
        ("tiny-moe", Placement(5, n_cpu_moe=2, override_tensor=("blk\\.3\\.attn=CPU",))),
        ("tiny-llama", Placement(2, override_tensor=("ffn_(up|down)=card", "output=CPU"))),
    ],
)
def test_a_real_load_of_single_tensors_elsewhere_is_the_dry_run(
    models: dict[str, Model], name: str, placement: Placement
) -> None:
    context = ContextOptions(512, 9, 1, flash_attn="on")
    runs = [dryrun.PlacedModel(models[name][1].with_name(f"{name}.gguf"), placement, context)]
    dry, real = (dryrun.ask(dryrun.DryRunJob((), 1, real=real, names=("card",)), runs)[0] for real in (False, True))
    assert dry == real
    found = resident(models[name][0], placement, context, ("card",))
    assert [found["card"].weights, found[HOST].weights] == [real.devices[one].weights for one in ("RPC0", HOST)]


def counting(seen: list[MemoryRequest], compute: int = 7) -> DryRun:
    def run(requests: Sequence[MemoryRequest]) -> list[ByDevice | str]:
        seen.extend(requests)
        return [{name: DeviceBytes(compute=compute) for name in (HOST, "card")} for _ in requests]

    return run


def test_a_dense_model_takes_a_handful_of_dry_runs(models: dict[str, Model]) -> None:
    header, file = models["llama3-70b-q3_k_s"]
    context = ContextOptions(4096, 9, 1)
    requests = [MemoryRequest(header, file, Placement(count), context) for count in range(header.layers + 1)]
    seen: list[MemoryRequest] = []
    memory = MemoryEstimates(("card",), counting(seen))
    found = memory.estimates(requests)
    assert [request.placement.gpu_layers for request in seen] == [0, 1, 2, 3, 4, 78, 79, 80, 81]
    assert {estimate["card"].compute for estimate in found} == {7}
    assert memory.estimates(requests[40:41]) == found[40:41]
    assert len(seen) == 9


def test_blocks_of_different_kinds_are_not_taken_for_alike(models: dict[str, Model]) -> None:
    header, _ = models["jamba-mini"]
    assert len({layout(header, Placement(count), ("card",)) for count in range(header.layers + 1)}) > 10


def test_a_refusal_is_an_estimate_without_compute_buffers(models: dict[str, Model]) -> None:
    memory = MemoryEstimates(("card",), lambda requests: ["no"] * len(requests))
    request = MemoryRequest(*models["tiny-llama"], Placement(3), ContextOptions(512, 9, 1))
    assert memory.estimates([request]) == [memory.resident(request)]


def test_answers_are_read_from_the_cache(
    models: dict[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [MemoryRequest(*models["tiny-llama"], Placement(n), ContextOptions(512, 9, 1)) for n in (0, 3)]
    refused = MemoryRequest(*models["tiny-llama"], Placement(3), ContextOptions(512, 9, 1, "q8_0", "q8_0", "off"))
    with dry_runs(tmp_path) as run:
        found = run([*requests, refused])
    assert isinstance(found[2], str)
    monkeypatch.setattr(dryrun.DryRunSession, "ask", None)
    assert dry_runs(tmp_path)([*requests, refused]) == found
    (file,) = (tmp_path / "dry-runs").iterdir()
    assert file.stem == models["tiny-llama"][0].fingerprint


def test_bytes_add_up() -> None:
    assert DeviceBytes(1, 2, 3, 4).total == 10
    assert DeviceBytes(1, 2, 3, 4) + DeviceBytes(10, 20, 30, 40) == DeviceBytes(11, 22, 33, 44)
    assert total([{HOST: DeviceBytes(1)}, {HOST: DeviceBytes(2), "card": DeviceBytes(kv=3)}]) == {
        HOST: DeviceBytes(3),
        "card": DeviceBytes(kv=3),
    }


def test_every_byte_is_somewhere(models: dict[str, Model]) -> None:
    context = ContextOptions(4096, 1, 1)
    for header, _ in models.values():
        whole = resident(header, Placement(0), context)[HOST]
        for layers in range(header.layers + 1):
            found = resident(header, Placement(layers), context, ("card",))
            copied = sum(device.weights for device in found.values()) - whole.weights
            assert 0 <= copied <= 2 * header.embedding * header.vocabulary * 2, header.name
            assert sum(device.kv for device in found.values()) == whole.kv


def test_importing_it_needs_no_llama_cpp() -> None:
    heavy = "('llama_cpp', 'pydantic', 'numpy')"
    code = f"import sys, ggufspec.planning.memory; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_cuda_s_buffers_have_room_for_whole_steps_of_the_last_rows(models: dict[str, Model]) -> None:
    """Without a dry run an H100's plan was 14,208 bytes below what was allocated."""
    header, _ = models["qwen2-0.5b-q8_0"]  # rows of 896 and 4864 numbers: 128 and 256 short of steps of 512
    context = ContextOptions(4096, 1, 1)
    cuda, other = (resident(header, Placement(-1), context, (name,))[name].weights for name in ("CUDA0", "Vulkan0"))
    quantised = [tensor for tensor in header.tensors if tensor.type == "q8_0"]
    steps = sum(34 * (-tensor.shape[0] % 512) // 32 for tensor in quantised)
    assert steps <= cuda - other <= steps + 128 * len(header.tensors)
