"""Cards that NVML does not know: their memory by llama.cpp's count, what a bench learns of it, what is not known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ggufspec.bench import history as bench_history
from ggufspec.bench.summary import unwatched_notes
from ggufspec.hardware.backends import backend_of
from ggufspec.hardware.gpus import GpuSurvey, is_software
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.devices import Device
from ggufspec.planning import machine
from ggufspec.planning.history import known_overhead

GIB, MIB = 2**30, 2**20
VULKAN_BYTES = backend_of("Vulkan0").overhead_bytes
RADEON = Device("Vulkan0", "AMD Radeon RX 7900 XTX", "gpu", 23 * GIB, 24 * GIB)
INTEGRATED = Device("Vulkan1", "Intel UHD", "igpu", 7 * GIB, 8 * GIB)
SOFTWARE = Device("Vulkan2", "llvmpipe (LLVM 15.0.6, 256 bits)", "gpu", 2 * GIB, 2 * GIB)
REMOTE = Device("RPC0", "127.0.0.1:50052", "gpu", 4 * GIB, 8 * GIB)
CPU = Device("CPU", "AMD EPYC", "cpu", 20 * GIB, 24 * GIB)


@pytest.mark.parametrize(
    ("here", "cards"),
    [
        ([REMOTE, RADEON, INTEGRATED, CPU], [RADEON]),
        ([INTEGRATED, CPU], [INTEGRATED]),
        ([SOFTWARE, CPU], []),
        ([REMOTE, CPU], []),
    ],
)
def test_local_cards_are_what_layers_are_offloaded_to(monkeypatch, here: list[Device], cards: list[Device]) -> None:
    monkeypatch.setattr(devices, "devices", lambda: here)
    monkeypatch.setattr(devices.gpus, "gpus", list)
    assert devices.local_cards() == cards
    assert devices.used_bytes() == sum(card.total_bytes - card.free_bytes for card in cards)


@pytest.mark.parametrize(
    ("here", "names"),
    [
        ([RADEON, INTEGRATED, CPU, REMOTE], ["RPC0", "Vulkan0"]),  # workers first, whenever they were added
        ([INTEGRATED, SOFTWARE, CPU], ["Vulkan1"]),
        ([SOFTWARE, CPU, REMOTE], ["RPC0"]),
        ([SOFTWARE, CPU], ["Vulkan2"]),
        ([CPU], []),
    ],
)
def test_layers_go_to_devices_in_llama_cpp_s_order(monkeypatch, here: list[Device], names: list[str]) -> None:
    assert [device.name for device in devices.offloading(here)] == names
    monkeypatch.setattr(devices, "devices", lambda: here)
    left_out = SOFTWARE in here and "Vulkan2" not in names
    assert devices.chosen_over_others() == (tuple(names) if left_out else ())


@pytest.mark.parametrize(("told", "used"), [([5], 5), ([5, 6], 11), ([None], GIB), ([5, None], GIB), ([0], 0)])
def test_nvml_is_asked_where_it_tells(monkeypatch, told: list[int | None], used: int) -> None:
    monkeypatch.setattr(devices, "devices", lambda: [RADEON])
    monkeypatch.setattr(devices.gpus, "gpus", lambda: [SimpleNamespace(used_bytes=size) for size in told])
    assert devices.used_bytes() == used


def test_a_card_of_software_is_none_to_a_plan(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine.probe, "inspect", lambda _: SimpleNamespace(devices=(SOFTWARE, CPU)))
    monkeypatch.setattr(machine.gpus, "gpus", list)
    assert machine.this_machine((), headroom_bytes=0, folder=tmp_path, threads=2).cards == ()
    monkeypatch.setattr(machine.probe, "inspect", lambda _: SimpleNamespace(devices=(RADEON, INTEGRATED, CPU)))
    (card,) = machine.this_machine((), headroom_bytes=0, folder=tmp_path, threads=2).cards
    assert (card.name, card.free_bytes, card.overhead_bytes) == ("Vulkan0", 23 * GIB, VULKAN_BYTES)
    assert not is_software("NVIDIA GeForce RTX 4090")


def measured(rise: int, gpu_layers: int = 33) -> SimpleNamespace:
    models = {"target": SimpleNamespace(gpu_layers=gpu_layers), "draft": SimpleNamespace(gpu_layers=2)}
    return SimpleNamespace(vram_bytes=rise, unwatched=(RADEON.description,), **models)


@pytest.mark.parametrize(
    ("rise", "learned"),
    [(630 * MIB, 130 * MIB), (0, VULKAN_BYTES), (499 * MIB, VULKAN_BYTES)],
    ids=["counted", "not counted", "less than llama.cpp's own bytes"],
)
def test_a_bench_teaches_what_the_driver_takes(monkeypatch, tmp_path: Path, rise: int, learned: int) -> None:
    monkeypatch.setattr(bench_history, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(bench_history, "survey", lambda: GpuSurvey((), (), None))
    models = [SimpleNamespace(gpu_layers=n, bytes={"Vulkan0": {"weights": 250 * MIB}}) for n in (33, 2)]
    plan = SimpleNamespace(
        options={"speculative": SimpleNamespace(target=models[0], draft=models[1])},
        devices=(SimpleNamespace(name="Vulkan0", description=RADEON.description),),
    )
    resolved = SimpleNamespace(plan=plan, cards=("Vulkan0",))
    bench_history.record_run_overhead(resolved, [measured(rise, gpu_layers=9)])  # not as it was planned
    assert known_overhead(tmp_path, RADEON.description, "Vulkan0") == VULKAN_BYTES
    bench_history.record_run_overhead(resolved, [measured(rise)])
    assert known_overhead(tmp_path, RADEON.description, "Vulkan0") == learned


SPILLS = {"rise": 9 * GIB, "tokens_per_s": 4.0}  # of 10 GiB and 30 tokens/s that were planned


@pytest.mark.parametrize(
    ("changed", "kv", "words"),
    [
        ({}, 4 * GIB, "1.0 GiB of 10.0 GiB seem not to be on Vulkan0"),
        ({}, 4 * GIB, "-c 23552 fits"),  # 4 GiB less 1.1 of 1 GiB
        ({}, GIB, "--headroom 1383MiB fits"),  # beside what is kept free: fewer layers
        ({"tokens_per_s": 20.0}, 4 * GIB, ""),  # a slow card and an odd count
        ({"rise": 10 * GIB - 200 * MIB}, 4 * GIB, ""),
        ({"rise": 0}, 4 * GIB, ""),  # the driver counts nothing
        ({"gpu_layers": 9}, 4 * GIB, ""),  # not as it was planned
    ],
)
def test_a_driver_that_moves_a_card_s_memory_to_the_host_is_told(changed, kv: int, words: str) -> None:
    given = {"gpu_layers": 33, **SPILLS, **changed}
    parts = [{"weights": 9 * GIB - kv, "kv": kv, "compute": GIB // 2, "overhead": 0}, {"weights": GIB // 2, "kv": 0}]
    models = [
        SimpleNamespace(gpu_layers=n, bytes={"Vulkan0": part, "CPU": {"weights": GIB}})
        for n, part in zip((33, 2), parts, strict=True)
    ]
    plan = SimpleNamespace(
        options={"speculative": SimpleNamespace(target=models[0], draft=models[1], tokens_per_s=30.0)},
        devices=(SimpleNamespace(name="Vulkan0", free_bytes=12 * GIB, budget_bytes=12 * GIB - 256 * MIB),),
        settings={"ctx_size": 32768},
    )
    result = measured(given["rise"], given["gpu_layers"])
    result.answers = (SimpleNamespace(statistics=SimpleNamespace(decoded=100, decode_s=100 / given["tokens_per_s"])),)
    resolved = SimpleNamespace(plan=plan, cards=("Vulkan0",))
    notes = bench_history.spilled(resolved, "speculative", [result])
    assert notes == () if not words else words in notes[0]
    resolved.plan = None  # all layers were given
    assert bench_history.spilled(resolved, "speculative", [result]) == ()


def test_what_is_not_known_of_a_card_is_noted_where_it_did_the_work() -> None:
    (note,) = unwatched_notes([measured(1), measured(1)])
    assert note.startswith("AMD Radeon RX 7900 XTX: energy, throttled clocks and other programs are unknown")
    assert unwatched_notes([measured(1, gpu_layers=0)]) == ()
