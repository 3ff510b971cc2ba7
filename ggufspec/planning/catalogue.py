"""The speed of cards that are not here, from their data sheets and what others measured on cards like them.

A card reads weights at a share of its bandwidth that depends on its architecture and on the weights' type, and each
block costs kernel launches. The shares and launches were fitted to some two hundred public measurements; the table of
errors, each predicted from the others, is docs/predictions.md (``tests/evidence/published.py`` makes it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ggufspec.hardware.cards import Card
from ggufspec.planning.memory import HOST
from ggufspec.planning.speed import DeviceProfile, MachineProfile


@dataclass(frozen=True, slots=True)
class Reach:
    """What an architecture reaches.

    Args:
        efficiency: share of the data sheet's bandwidth that Q4_K weights are read at.
        layer_s: fixed cost of a dense block per pass.
        batch_latency: T(n) / T(1) of weights.
    """

    efficiency: float
    layer_s: float
    batch_latency: Mapping[int, float]


# T(n) / T(1) of 8B Q4_0 on an RTX 3090: llama.cpp pull request 15802
_CUDA = {1: 1.0, 2: 1.12, 3: 1.20, 4: 1.33, 5: 1.54, 6: 1.73, 8: 2.15}
# 8B Q2_K and Q3_K on an RX 7900 XTX, their mean at 2 and 4: llama.cpp pull request 26705; at 7 and 8 Q2_K was seen
# alone (2.8 and 3.1), which unpacks slower, so that less is a guess
_HIP = {1: 1.0, 2: 1.25, 4: 1.75, 7: 2.5, 8: 2.8}
# 27B Q3_K on an Apple M4, whose batch of 8 saves a sixth: github.com/sudoingX/qwen38-mtp; 2 and 4 are interpolated
_METAL = {1: 1.0, 2: 1.6, 4: 3.1, 8: 6.7}

REACHES = {
    "Pascal": Reach(0.50, 41e-6, _CUDA),
    "Volta": Reach(0.79, 101e-6, _CUDA),
    "Turing": Reach(0.86, 64e-6, _CUDA),
    "Ampere": Reach(0.82, 54e-6, _CUDA),
    "GA100": Reach(0.55, 73e-6, _CUDA),
    "Ada": Reach(0.86, 36e-6, _CUDA),
    "Hopper": Reach(0.57, 54e-6, _CUDA),
    "Blackwell": Reach(0.88, 48e-6, _CUDA),
    "RDNA2": Reach(0.75, 35e-6, _HIP),
    "RDNA3": Reach(0.82, 66e-6, _HIP),
    "RDNA4": Reach(0.87, 34e-6, _HIP),
    "Arc": Reach(0.38, 36e-6, _HIP),
    "Apple": Reach(0.76, 67e-6, _METAL),
    "": Reach(0.75, 50e-6, _CUDA),
}
"""By the architectures of ``hardware.cards``; the last is of a card that is not in the catalogue."""

SHARES = {"f16": 1.01, "q8_0": 1.03, "q6_K": 0.96, "q5_K": 0.94, "q4_K": 1.0, "q4_0": 1.17, "q3_K": 0.73, "q2_K": 0.84}
SHARES |= {"iq4_xs": 1.0, "iq3_s": 0.93, "iq2_s": 0.97, "mxfp4": 1.09}
"""Bandwidth by weight type ÷ that of Q4_K."""

_CARD_FLOPS, _LINK = 0.4, 0.8  # shares of the data sheet's rates
PASS_S, CROSSING_S = 2e-4, 3e-5
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}

DESKTOP_BYTES_PER_S = 89.6e9
"""Of two channels of DDR5-5600. DDR4-3200 has 51.2e9, which few look up before they ask what fits."""
# A CPU reads weights at 0.57 to 0.68 of that (Q4_K of 1.5B to 14B on two channels of DDR4-2400:
# github.com/InventiveHQ/speculative-decoding-consumer-gpus). Q3_K is slow to unpack: 0.58 of Q4_0 is what Llama-3-70B
# Q3_K_S at 45 of 80 layers with a 4090 implies at 2.01 t/s.
_HOST_EFFICIENCY, _HOST_FLOPS, _HOST_LAYER_S = 0.6, 0.5e12, 3e-5
_HOST_SHARES = {
    "f16": 1.0,
    "q8_0": 1.0,
    "q4_0": 1.0,
    "q4_K": 1.0,
    "q6_K": 0.9,
    "q3_K": 0.54,
    "iq4_xs": 0.8,
    "iq3_s": 0.5,
}
# Flash attention of six cores like the one measured: 6.1, 2.7 and 2.0 thousand million numbers a second
_HOST_ATTENTION = {"f16": {64: {1: 36e9}}, "q8_0": {64: {1: 16e9}}, "q4_0": {64: {1: 12e9}}}
# Measured on two cores with AVX-512, models of a billion parameters
_HOST_LATENCY = {
    "f16": {1: 1.0, 2: 1.27, 3: 1.38, 4: 1.42, 8: 1.92, 16: 2.94, 32: 4.6},
    "q8_0": {1: 1.0, 2: 1.83, 3: 2.17, 4: 2.53, 8: 3.19, 16: 4.69, 32: 8.06},
    "q4_0": {1: 1.0, 2: 1.74, 3: 2.1, 4: 1.44, 5: 2.26, 8: 1.74, 16: 2.7, 32: 5.33},
    "q4_K": {1: 1.0, 2: 1.8, 4: 2.5, 8: 3.2, 16: 4.7, 32: 8.1},
}


UNKNOWN = Card("unknown", 8 * 2**30, 300e9, 4, 8, 20e12)
"""A modest card of some years ago."""


def guessed_host(memory_bytes_per_s: float = DESKTOP_BYTES_PER_S) -> DeviceProfile:
    """A CPU whose memory has this bandwidth by its data sheet: channels × transfers a second × 8 bytes."""
    reached = memory_bytes_per_s * _HOST_EFFICIENCY
    by_type = {kind: reached * share for kind, share in _HOST_SHARES.items()}
    batch_latencies = {kind: dict(batch_latency) for kind, batch_latency in _HOST_LATENCY.items()}
    return DeviceProfile(reached, _HOST_FLOPS, _HOST_LAYER_S, "guess", by_type, batch_latencies, _HOST_ATTENTION)


def card_profile(card: Card) -> DeviceProfile:
    """What a card reaches."""
    reach = REACHES[card.architecture]
    reached = card.bandwidth_bytes_per_s * reach.efficiency
    return DeviceProfile(
        bandwidth_bytes_per_s=reached,
        flops_per_s=card.fp16_flops * _CARD_FLOPS,
        layer_s=reach.layer_s,
        source="unknown" if card is UNKNOWN else "catalogue",
        by_type={kind: reached * share for kind, share in SHARES.items()},
        batch_latencies={"q4_K": dict(reach.batch_latency)},
    )


def from_catalogue(
    cards: Sequence[Card], names: Sequence[str] = (), here: MachineProfile | None = None
) -> MachineProfile:
    """The speeds of cards that are not here, by their data sheets.

    Args:
        cards: the cards, in llama.cpp's order.
        names: what the devices are called in placements; the cards' own names without them.
        here: the profile of the machine that they would be put into; a usual desktop without it.
    """
    speeds = {HOST: here.device(HOST) if here else guessed_host()}
    speeds |= {name: card_profile(card) for name, card in zip(names or [c.name for c in cards], cards, strict=True)}
    links = [link_bytes_per_s(card.pcie_generation, card.pcie_width) for card in cards]
    host_words = f"the host {here.origin}" if here else "this machine's speed is not measured (plan --calibrate does)"
    origin = f"from the catalogue; {host_words}" if cards or not here else here.origin
    return MachineProfile(
        devices=speeds,
        pass_s=here.pass_s if here else PASS_S,
        crossing_s=CROSSING_S,
        link_bytes_per_s=min(links, default=link_bytes_per_s(4, 16)),
        origin=origin,
        streams=bool(cards),
        memory_bytes=here.memory_bytes if here else None,
    )


def link_bytes_per_s(generation: int | None, lanes: int | None) -> float:
    """What a PCIe link reaches; what a card does not tell is taken for generation 4 and 16 lanes."""
    return _LINK * _LANE_BYTES_PER_S.get(generation or 4, 1.969e9) * (lanes or 16)
