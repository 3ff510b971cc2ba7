"""Machines to plan for: this machine's GPUs and RPC workers, or GPUs that are not installed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ggufspec.errors import UsageError
from ggufspec.hardware import cards, gpus, host
from ggufspec.hardware.backends import usual_backend
from ggufspec.llamacpp import probe
from ggufspec.llamacpp.devices import Device, offloading
from ggufspec.planning import machine_profile
from ggufspec.planning.history import known_overhead
from ggufspec.planning.plan import ENOUGH_BYTES, OffloadDevice, PlanMachine
from ggufspec.schema.doctor import Gpu

DEFAULT_HEADROOM_BYTES = 256 * 2**20
_WHOLE = 0.9  # a device below this share of NVML's total is a MIG slice; CUDA reports a few percent less for whole GPUs
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_size(text: str, flag: str) -> int:
    """Parse a size such as ``24GiB``, ``24G`` or ``512M`` into bytes; a number without a unit is in bytes.

    Raises:
        UsageError: the text is not a size, or is a small number without a unit.
    """
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * _UNITS[match[2].lower()] if match else -1.0
    if not 0 <= size < 2**50:
        raise UsageError(f"{flag} {text!r} is not a memory size", f"{flag} 24GiB, or 512MiB")
    if 0 < size < 2**10:
        raise UsageError(f"{flag} {text!r} has no unit, so it would be read as bytes", f"{flag} {text.strip()}GiB")
    return int(size)


def simulated_cards(
    names: Sequence[str], vram: Sequence[int], *, headroom_bytes: int, folder: Path, threads: int
) -> PlanMachine:
    """Return a machine with absent GPUs: models called ``names`` (``vram`` overrides their memory), or unknown models.

    Raises:
        UsageError: a GPU name is unknown, or ``vram`` has more sizes than there are names.
    """
    known = [cards.find_card(name) for name in names]
    if known and len(vram) > len(known):
        raise UsageError("more --vram than --gpu values are given", "give one --vram for each --gpu, or none")
    count = max(len(known), len(vram))
    made = []
    for index in range(count):
        size, free = (vram[index],) * 2 if index < len(vram) else (known[index].vram_bytes, known[index].usable_bytes)
        name = known[index].name if known else "unknown GPU"
        backend = usual_backend(known[index].architecture if known else "")
        pool = size if known and known[index].shares_memory else None
        overhead = known_overhead(folder, name, backend, size)
        made.append(OffloadDevice(f"GPU{index}", name, size, free, overhead, pool_bytes=pool))
    named = {card.name: known[index] if known else None for index, card in enumerate(made)}
    speed = machine_profile.expected_speeds(named, folder=folder, threads=threads, is_here=False)
    vram_bytes = sum(card.pool_bytes or 0 for card in made) or ENOUGH_BYTES
    return with_memory(PlanMachine(tuple(made), 0, headroom_bytes, speed, simulated=True), vram_bytes)


def with_memory(machine: PlanMachine, memory_bytes: int) -> PlanMachine:
    """Return the machine with this much free RAM."""
    return replace(machine, memory_bytes=memory_bytes, speed=replace(machine.speed, memory_bytes=memory_bytes))


def this_machine(rpc: Sequence[str], *, headroom_bytes: int, folder: Path, threads: int) -> PlanMachine:
    """Return this machine with its GPUs and the devices of RPC workers, in llama.cpp's order.

    Raises:
        GgufspecError: llama-cpp-python cannot be loaded, or a worker does not respond.
    """
    found = offloading(probe.inspect(tuple(rpc)).devices)
    seen = gpus.gpus()
    made = [_card(device, seen, folder) for device in found if not device.is_software]
    named = {card.name: cards.recognise(card.description, card.total_bytes) for card in made}
    speed = machine_profile.expected_speeds(named, folder=folder, threads=threads)
    return PlanMachine(tuple(made), host.free_memory_bytes(), headroom_bytes, speed, rpc=tuple(rpc))


def _card(device: Device, seen: Sequence[Gpu], folder: Path) -> OffloadDevice:
    """Return a GPU with the free memory that NVML reported before this process used any (for MIG slices, ggml's value).

    An integrated GPU's memory beyond the RAM that the operating system sees is reserved for the GPU.
    """
    overhead = 0 if device.is_remote else known_overhead(folder, device.description, device.name, device.total_bytes)
    free, gpu = device.free_bytes, gpus.of_device(device.device_id, device.description, seen)
    if gpu and gpu.total_bytes and gpu.free_bytes is not None and device.total_bytes > _WHOLE * gpu.total_bytes:
        free = min(gpu.free_bytes, device.total_bytes)
    pool = None
    if device.shares_memory:
        pool = host.free_memory_bytes() + max(0, device.total_bytes - host.total_memory_bytes())
        free = min(free, pool)
    return OffloadDevice(device.name, device.description, device.total_bytes, free, overhead, pool_bytes=pool)
