"""A card of NVML is a device of ggml by its PCI bus id; the memory that fits is the device's, and a shared one once."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ggufspec.hardware.cards import CARDS, find_card
from ggufspec.hardware.gpus import of_device
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.devices import Device
from ggufspec.planning import machine, machine_profile
from ggufspec.planning.catalogue import link_bytes_per_s
from ggufspec.planning.plan import ENOUGH_BYTES, PlanMachine
from ggufspec.schema.doctor import Gpu

GIB = 2**30
CPU = Device("CPU", "a processor", "cpu", 20 * GIB, 24 * GIB)


def device(index: int, bus: int, free: float = 22.5, total: float = 23.6, **more: str) -> Device:
    return replace(
        Device(f"CUDA{index}", "RTX 4090", "gpu", int(free * GIB), int(total * GIB), f"0000:{bus:02x}:00.0"), **more
    )


def gpu(index: int, bus: int, free: int | None = 23, total: int | None = 24, **more: object) -> Gpu:
    card = Gpu(index, "RTX 4090", f"GPU-{index}", total, free, total and free and total - free, "575")
    return replace(card, pci_id=f"0000:{bus:02x}:00.0", **more)


def sized(card: Gpu) -> Gpu:
    return replace(card, **{of: (getattr(card, of) or 0) * GIB or None for of in ("total_bytes", "free_bytes")})


MIG = {"description": "NVIDIA H100 80GB HBM3 MIG 1g.10gb"}


@pytest.mark.parametrize(
    ("seen", "known", "free"),
    [
        # NVML's figure has nothing of this process yet; of two alike cards each has its own, in whatever order
        ([device(0, 1)], [gpu(0, 1)], [23]),
        ([device(0, 2), device(1, 1)], [gpu(0, 1, 3), gpu(1, 2, 20)], [20, 3]),
        # CUDA_VISIBLE_DEVICES=1, or =GPU-1; and more cards in CUDA than in NVML
        ([device(0, 2)], [gpu(0, 1, 3), gpu(1, 2, 20)], [20]),
        ([device(0, 2), device(1, 3)], [gpu(0, 2, 20)], [20, 22.5]),
        ([device(0, 2)], [], [22.5]),
        # CUDA_VISIBLE_DEVICES=MIG-…, and a card that GGML_CUDA_DEVICES divides
        ([device(0, 1, 9, 9.75, **MIG)], [gpu(0, 1, 60, 80)], [9]),
        ([device(0, 1, 11, 11.8, device_id="0000:01:00.0-v0")], [gpu(0, 1)], [11]),
        # more than 90 % of the card is all of it, but not more than CUDA has
        ([device(0, 1, 70, 79.1, description="H100 MIG 7g.80gb")], [gpu(0, 1, 80, 80)], [79.1]),
        # NVML tells no memory
        ([device(0, 1, 100, 119, kind="igpu")], [gpu(0, 1, None, None)], [100]),
        # a worker with a card of the same name
        ([device(0, 1, 5, 24, name="RPC0", device_id="")], [gpu(0, 1)], [5]),
    ],
)
def test_free_memory_is_the_devices(monkeypatch, tmp_path: Path, seen, known, free) -> None:
    monkeypatch.setattr(machine.probe, "inspect", lambda _: SimpleNamespace(devices=(*seen, CPU)))
    monkeypatch.setattr(machine.gpus, "gpus", lambda: [sized(card) for card in known])
    cards = machine.this_machine((), headroom_bytes=0, folder=tmp_path, threads=2).cards
    assert [card.free_bytes for card in cards] == [int(gib * GIB) for gib in free]
    assert [(card.description, card.total_bytes) for card in cards] == [(d.description, d.total_bytes) for d in seen]


def test_a_card_without_an_id_is_told_by_its_name() -> None:
    orin = replace(gpu(0, 1), name="Orin (nvgpu)", pci_id="")
    assert of_device("0000:00:00.0", "Orin", [gpu(0, 2), orin]) is orin
    assert of_device("0000:00:00.0", "Thor", [gpu(0, 2), orin]) is None


def test_a_card_of_two_backends_is_one() -> None:
    twice = replace(device(0, 2), name="Vulkan0")
    without_id = replace(device(0, 0), name="SYCL0", device_id="")
    found = devices.offloading([device(0, 1), device(1, 2), twice, without_id, replace(without_id, name="SYCL1"), CPU])
    assert [one.name for one in found] == ["CUDA0", "CUDA1", "SYCL0", "SYCL1"]


def test_what_ggml_tells_of_a_device(monkeypatch) -> None:
    class Library:
        def ggml_backend_dev_count(self) -> int:
            return 2

        def ggml_backend_dev_get(self, index: int) -> int:
            return index

        def ggml_backend_dev_get_props(self, index: int, told: object) -> None:
            names = ((b"CUDA0", b"a card", 1, 2, 2, b"0000:c1:00.0"), (b"CPU", b"a processor", 3, 4, 0, None))
            ctypes.pointer(told._obj)[0] = devices._Properties(*names[index])  # type: ignore[attr-defined]

    monkeypatch.setattr(devices, "ggml", Library)
    assert devices.devices() == [
        Device("CUDA0", "a card", "igpu", 1, 2, "0000:c1:00.0"),
        Device("CPU", "a processor", "cpu", 3, 4),
    ]


def test_the_link_is_that_of_a_card_that_ggml_sees(monkeypatch) -> None:
    narrow, wide = (gpu(i, i, pcie_generation=4, pcie_width=width) for i, width in enumerate((1, 16)))
    monkeypatch.setattr(machine_profile.gpus, "gpus", lambda: [narrow, wide])
    assert machine_profile._link_here([device(0, 1), CPU]) == link_bytes_per_s(4, 16)
    assert machine_profile._link_here([device(0, 0), device(1, 1)]) == link_bytes_per_s(4, 1)


@pytest.mark.parametrize(
    ("one", "total", "pool"),
    [
        (device(0, 1, 100, 119, kind="igpu"), 119, 90),  # GB10: the container's limit counts
        (Device("MTL0", "Apple M4 Max", "gpu", 36 * GIB, 36 * GIB), 48, 90),
        (Device("Vulkan0", "Radeon 8060S", "igpu", 110 * GIB, 111 * GIB), 31, 170),  # 96 GiB are set aside for it
        (device(0, 1), 119, None),
        (Device("RPC0", "10.0.0.2:50052", "gpu", 8 * GIB, 8 * GIB), 119, None),
    ],
)
def test_memory_that_a_card_shares_is_one_pool(monkeypatch, tmp_path: Path, one, total, pool) -> None:
    monkeypatch.setattr(machine.probe, "inspect", lambda _: SimpleNamespace(devices=(one, CPU)))
    monkeypatch.setattr(machine.gpus, "gpus", list)
    monkeypatch.setattr(machine.host, "free_memory_bytes", lambda: 90 * GIB)
    monkeypatch.setattr(machine.host, "total_memory_bytes", lambda: total * GIB)
    (card,) = machine.this_machine((), headroom_bytes=0, folder=tmp_path, threads=2).cards
    assert card.pool_bytes == (pool and pool * GIB)
    assert card.free_bytes == min(one.free_bytes, card.pool_bytes or one.free_bytes)


def test_cards_of_the_catalogue_that_share_memory(tmp_path: Path) -> None:
    def simulated(*names: str) -> PlanMachine:
        return machine.simulated_cards(names, (), headroom_bytes=0, folder=tmp_path, threads=2)

    shared = simulated("GB10")
    assert (shared.cards[0].pool_bytes, shared.memory_bytes) == (128 * GIB, 128 * GIB)
    apple = simulated("Apple M3 Max").cards[0]
    assert (apple.total_bytes, apple.free_bytes, apple.pool_bytes) == (48 * GIB, int(0.74 * 48 * GIB), 48 * GIB)
    other = simulated("RTX 4090")
    assert (other.cards[0].pool_bytes, other.memory_bytes) == (None, ENOUGH_BYTES)
    names = {card.name for card in CARDS if card.shares_memory and card.architecture != "Apple"}
    assert names == {"GB10", "Radeon 780M", "Radeon 890M", "Radeon 8060S", "Arc 140V"}
    assert find_card("Apple M1").shares_memory
    assert not find_card("Arc B580").shares_memory
