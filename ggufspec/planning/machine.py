"""What there is to plan for: this machine's cards and RPC workers, or cards that are not here."""

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
from ggufspec.planning.plan import ENOUGH_BYTES, Card, Machine
from ggufspec.schema.doctor import Gpu

DEFAULT_HEADROOM_BYTES = 256 * 2**20
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_size(text: str, flag: str) -> int:
    """Bytes of a size as people write it: ``24GiB``, ``24G``, ``512M``; a bare number is bytes.

    Raises:
        UsageError: it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match or float(match[1]) * _UNITS[match[2].lower()] >= 2**50:
        raise UsageError(f"{flag} {text!r} is not a memory size", f"{flag} 24GiB, or 512MiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def simulated_cards(
    names: Sequence[str], vram: Sequence[int], *, headroom_bytes: int, folder: Path, threads: int
) -> Machine:
    """Cards that are not here: ``names`` of the catalogue, with their memory or ``vram``, or cards of that memory.

    Raises:
        UsageError: a card is unknown, or there are more sizes than cards.
    """
    known = [cards.find_card(name) for name in names]
    if known and len(vram) > len(known):
        raise UsageError("more --vram than --gpu are given", "one --vram for each --gpu, or none")
    count = max(len(known), len(vram))
    made = []
    for index in range(count):
        size = vram[index] if index < len(vram) else known[index].vram_bytes
        name = known[index].name if known else "any card"
        backend = usual_backend(known[index].architecture if known else "")
        made.append(Card(f"GPU{index}", name, size, size, known_overhead(folder, name, backend)))
    named = {card.name: known[index] if known else None for index, card in enumerate(made)}
    speed = machine_profile.expected(named, folder=folder, threads=threads)
    return with_memory(Machine(tuple(made), 0, headroom_bytes, speed, simulated=True), ENOUGH_BYTES)


def with_memory(machine: Machine, memory_bytes: int) -> Machine:
    """The same with so much free memory."""
    return replace(machine, memory_bytes=memory_bytes, speed=replace(machine.speed, memory_bytes=memory_bytes))


def here(rpc: Sequence[str], *, headroom_bytes: int, folder: Path, threads: int) -> Machine:
    """This machine's cards, with those of RPC workers, in the order in which llama.cpp takes them.

    Raises:
        GgufspecError: llama-cpp-python cannot be loaded, or a worker does not answer.
    """
    found = offloading(probe.inspect(tuple(rpc)).devices)
    seen = {gpu.name: gpu for gpu in gpus.gpus()}
    made = [_card(device, seen.get(device.description), folder) for device in found if not device.is_software]
    named = {card.name: cards.recognise(card.description, card.total_bytes) for card in made}
    speed = machine_profile.expected(named, folder=folder, threads=threads)
    return Machine(tuple(made), host.free_memory_bytes(), headroom_bytes, speed, rpc=tuple(rpc))


def _card(device: Device, gpu: Gpu | None, folder: Path) -> Card:
    """NVML's figures if it knows the card: asked before this process has anything on it."""
    overhead = 0 if device.is_remote else known_overhead(folder, device.description, device.name)
    if gpu is None:
        return Card(device.name, device.description, device.total_bytes, device.free_bytes, overhead)
    return Card(device.name, gpu.name, gpu.total_bytes, gpu.free_bytes, overhead)
