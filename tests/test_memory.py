"""The memory formula: what llama.cpp's dry run says, pure, and fast enough to rank thousands of placements."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from evidence.memory_formula import COLUMNS, PARTS, Case, answers, card_names, context, header_of
from shapes import SHAPES, write

from ggufspec.llamacpp.options import KV_TYPES, ContextOptions, Placement
from ggufspec.models.header import ModelHeader
from ggufspec.planning.allocator import Graph
from ggufspec.planning.memory import _FOLLOWED, HOST, Bytes, estimate

RECORD = Path(__file__).resolve().parents[1] / "docs" / "evidence" / "memory-formula.json"
DENSE = {"dense", "tied"}
MIB = 1 << 20

ONE_OF_EACH = {
    "llama3-8b-q3_k_l": 32,
    "gpt2-medium-f16": 24,
    "llama3.2-1b": 16,
    "gemma2-9b": 42,
    "qwen1.5-moe-a2.7b": 24,
    "gpt-oss-20b": 24,
    "glm4.5-air": 47,
    "deepseek2-lite": 27,
    "mamba2-1b": 48,
    "rwkv7-1b": 24,
    "jamba-mini": 32,
    "lfm2-1.2b": 16,
    "qwen3next-80b-a3b": 48,
    "falcon-h1-1.5b": 24,
}
CASES = [
    *(Case(m, Placement(n // 2), context(3000, 5, "f16", "on")) for m, n in ONE_OF_EACH.items()),
    *(Case(m, Placement(n + 1), context(700, 256, "f16", "off")) for m, n in ONE_OF_EACH.items()),
    *(Case(m, Placement(-1), context(2048, 1, "q8_0", "on")) for m in ONE_OF_EACH),
    *(Case(m, Placement(0), context(100, 64, "f16", "auto")) for m in ONE_OF_EACH),
    *(Case("tiny-swa", Placement(g), context(9000, 9, "f16", "on", swa_full=False)) for g in (0, 1, 4, 8)),
    *(Case("tiny-llama", Placement(3), ContextOptions(600, 9, 1, kv, kv, "on")) for kv in KV_TYPES if kv != "bf16"),
    *(Case("tiny-moe", Placement(g, n_cpu_moe=e), context(600, 9, "f16", "on")) for g in (3, 5) for e in (1, 4)),
    *(Case("tiny-hybrid", Placement(g), context(1000, 9, "f16", "auto")) for g in range(6)),
    *(Case(m, Placement(g, s), context(600, 9, "f16", "on"), cards=2) for m in ("tiny-tied", "tiny-mla")
      for g in (2, 5) for s in ((1.0, 1.0), (3.0, 1.0), (0.0, 1.0))),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    for shape in SHAPES.values():
        write(folder / f"{shape.name}.gguf", shape)
    return folder


@pytest.fixture(scope="module")
def headers(folder: Path) -> dict[str, ModelHeader]:
    return {name: header_of(folder / f"{name}.gguf") for name in SHAPES}


def test_formula_is_the_dry_run(folder: Path, headers: dict[str, ModelHeader]) -> None:
    wrong = []
    for case, answer in zip(CASES, answers(folder, CASES), strict=True):
        assert not answer.error, (case, answer.error)
        found = estimate(headers[case.model], case.placement, case.context, card_names(case.cards))
        assert list(found) == ["CPU", *card_names(case.cards)]
        assert found[HOST].overhead == answer.output
        for device, truth in answer.devices.items():
            mine = found[device]
            assert (mine.weights, mine.kv) == (truth.weights, truth.kv), (case, device)
            if not bound(SHAPES[case.model].kind, mine.compute, truth.compute):
                wrong.append((case, device, mine.compute, truth.compute))
    assert not wrong


def bound(kind: str, formula: int, truth: int) -> bool:
    """Never below; above by 2 % or a MiB at most, 10 % for what is neither dense nor tied."""
    return truth <= formula <= truth + max(truth // (50 if kind in DENSE else 10), MIB if kind in DENSE else 0)


def test_record_is_what_the_formula_says_today(headers: dict[str, ModelHeader]) -> None:
    record = json.loads(RECORD.read_text())
    assert record["columns"] == ",".join(COLUMNS)
    assert {line.split(",")[0] for line in record["rows"]} == set(SHAPES)
    for line in record["rows"][::7]:
        row = dict(zip(COLUMNS, line.split(","), strict=True))
        split = tuple(map(float, filter(None, row["split"].split("/"))))
        placement = Placement(int(row["gpu_layers"]), split, int(row["n_cpu_moe"]))
        options = ContextOptions(
            int(row["ctx_size"]),
            int(row["width"]),
            1,
            row["cache_type_k"],
            row["cache_type_v"],
            row["flash_attn"],
            swa_full=row["swa_full"] == "True",
        )
        found = estimate(headers[row["model"]], placement, options, card_names(int(row["cards"])))[row["device"]]
        assert [getattr(found, part) for part in PARTS] == [int(row[f"formula_{part}"]) for part in PARTS], line
        truth = {part: int(row[f"llama_cpp_{part}"]) for part in PARTS}
        assert (found.weights, found.kv) == (truth["weights"], truth["kv"]), line
        assert bound(SHAPES[row["model"]].kind, found.compute, truth["compute"]), line
    assert all(row["real"] == row["dry"] for row in record["loads"])


def test_real_load_is_the_dry_run(folder: Path, headers: dict[str, ModelHeader]) -> None:
    wanted = [
        Case(name, Placement(3), context(512, 9, "f16", "on")) for name in ("tiny-llama", "tiny-mla", "tiny-hybrid")
    ]
    for case, real in zip(wanted, answers(folder, wanted, real=True), strict=True):
        found = estimate(headers[case.model], case.placement, case.context, card_names(1))
        for device, truth in real.devices.items():
            mine = found[device]
            assert (mine.weights, mine.kv, mine.compute) == (truth.weights, truth.kv, truth.compute), (case, device)


def test_thousands_of_placements_take_a_moment(headers: dict[str, ModelHeader]) -> None:
    header = headers["llama3-70b-q3_k_s"]
    options = [ContextOptions(ctx_size, 9, 1) for ctx_size in range(1024, 9216, 1024)]
    estimate(header, Placement(1), options[0], ("card",))
    began = time.process_time()
    count = 0
    for option in options:
        for layers in range(header.layers + 1):
            for shift in range(2):
                estimate(header, Placement(layers, (1.0, 0.0)), option, ("card", "other")[: 2 - shift])
                count += 1
    assert (time.process_time() - began) / count < 1e-3


def test_bytes_add_up() -> None:
    assert Bytes(1, 2, 3, 4).total == 10
    assert Bytes(1, 2, 3, 4) + Bytes(10, 20, 30, 40) == Bytes(11, 22, 33, 44)


def test_every_byte_is_somewhere(headers: dict[str, ModelHeader]) -> None:
    for header in headers.values():
        whole = estimate(header, Placement(0), ContextOptions(4096, 1, 1))[HOST]
        for layers in range(header.layers + 1):
            found = estimate(header, Placement(layers), ContextOptions(4096, 1, 1), ("card",))
            copied = sum(device.weights for device in found.values()) - whole.weights
            assert 0 <= copied <= 2 * header.embedding * header.vocabulary * 2, header.name
            assert sum(device.kv for device in found.values()) == whole.kv


def test_a_card_that_works_for_the_host_needs_room_for_its_weights(headers: dict[str, ModelHeader]) -> None:
    header, options = headers["llama3-8b-q3_k_l"], ContextOptions(4096, 9, 1)
    largest = max(tensor.size_bytes for tensor in header.tensors if tensor.name.startswith("blk."))
    for layers, more in ((0, True), (16, True), (33, False)):
        placement = Placement(layers)
        plain, staged = (estimate(header, placement, options, ("card",), staging=on)["card"] for on in (False, True))
        assert (staged.compute >= plain.compute + largest) == more
        assert (staged == plain) == (not more)


def test_architectures_of_the_shapes_have_no_margin() -> None:
    assert {shape.architecture for shape in SHAPES.values()} == _FOLLOWED


def test_importing_the_formula_needs_no_llama_cpp() -> None:
    heavy = "('llama_cpp', 'pydantic', 'numpy')"
    code = f"import sys, ggufspec.planning.memory; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


# ---- the allocator ---------------------------------------------------------------------------------------------------


def test_a_tensor_is_freed_after_its_last_reader() -> None:
    graph = Graph()
    a = graph.input(64)
    b = graph.node(64, a)
    graph.node(64, b)  # where a was
    assert graph.peaks(1) == [128]


def test_an_operation_overwrites_what_nobody_else_reads() -> None:
    graph = Graph()
    a = graph.node(64, graph.input(32))
    graph.node(64, a, over=1)
    assert graph.peaks(1) == [96]
    graph = Graph()
    a = graph.node(64, graph.input(32))
    b = graph.node(64, a, over=1)
    graph.node(32, a, b)
    assert graph.peaks(1) == [160]


def test_holes_that_are_too_small_are_lost() -> None:
    graph = Graph()
    small, kept = graph.input(32), graph.input(32)
    graph.write(small, on=0)
    graph.node(64, kept)
    assert graph.peaks(1) == [128]


def test_what_crosses_to_a_card_is_copied_there() -> None:
    graph = Graph()
    a = graph.node(64, graph.input(32), on=0)
    b = graph.node(96, a, on=1)
    graph.node(96, b, over=1)
    assert graph.peaks(2) == [96, 160]


def test_operations_without_weights_go_where_their_neighbours_on_a_card_are() -> None:
    graph = Graph()
    a = graph.node(64, graph.input(32), on=0)
    b = graph.node(64, a)  # spread upwards from the card
    graph.node(64, b, on=1)
    assert graph.peaks(2) == [96, 128]
