"""Estimated speeds of unmeasured GPUs and CPUs, from data sheets and public measurements.

A GPU reads weights at a fraction of its bandwidth that depends on its architecture and the weight type, and each block
adds kernel-launch overhead. Both are fitted to about two hundred public measurements; docs/predictions.md lists the
error of predicting each measurement from the others (computed by ``tests/evidence/published.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ggufspec.hardware import host
from ggufspec.hardware.cards import GpuModel
from ggufspec.planning.memory import HOST
from ggufspec.planning.speed import BITS, Attention, BatchLatency, DeviceProfile, MachineProfile
from ggufspec.schema.text import counted


@dataclass(frozen=True, slots=True)
class ArchitectureSpeed:
    """Speed constants of a GPU architecture."""

    efficiency: float  # fraction of the data sheet's bandwidth reached when reading Q4_K weights
    layer_s: float  # fixed seconds per dense block and pass
    batch_latency: Mapping[int, float]  # T(n) / T(1) of reading and computing with weights, by n
    attended: Mapping[str, float]  # K/V elements that attention processes per byte of bandwidth, by cache type
    # Fraction of the data sheet's dense FP16 rate that batches of hundreds of tokens reach: an RTX 3090 processes 3,500
    # prompt tokens/s with 8B models from Q5_0 to Q6_K (llama.cpp pull requests 7676 and 7860)
    flops: float = 0.4


# T(n) / T(1) for 8B Q4_0 on an RTX 3090, from llama.cpp pull request 15802
_CUDA = {1: 1.0, 2: 1.12, 3: 1.20, 4: 1.33, 5: 1.54, 6: 1.73, 8: 2.15}
# Batch sizes 2 and 4: mean of 8B Q2_K and Q3_K on an RX 7900 XTX (llama.cpp pull request 26705). At 7 and 8 only Q2_K
# was measured (2.8 and 3.1), which unpacks more slowly than other types, so the values here are lower guesses
_HIP = {1: 1.0, 2: 1.25, 4: 1.75, 7: 2.5, 8: 2.8}
# 27B Q3_K on an Apple M4: a batch of 8 saves a sixth of the time (github.com/sudoingX/qwen38-mtp); 2, 4: interpolated
_METAL = {1: 1.0, 2: 1.6, 4: 3.1, 8: 6.7}

# From 35B-A3B on an RTX 3090 (125 tokens/s, 86 at 64k cached tokens) and 27B with a q4_0 cache on an RX 7900 XT (14 at
# 75k, where reading only the cache would allow 32). f16 on AMD and all Apple values are guesses: nothing was published
_NVIDIA, _AMD = {"f16": 1.6}, {"f16": 1.6, "q8_0": 0.9, "q4_0": 0.46}
# Factor on the experts' read time by batch size: for 2 or more tokens, CUDA kernels first sort the tokens by expert.
# Measured with GLM-4.5-Air entirely on GPUs: T(2) = 3.0, T(4) = 3.9, T(8) = 5.1
_CUDA_EXPERTS = {1: 1.0, 2: 2.6, 4: 2.0, 8: 1.6, 32: 1.0}

REACHES = {
    "Pascal": ArchitectureSpeed(0.50, 41e-6, _CUDA, _NVIDIA),
    "Volta": ArchitectureSpeed(0.79, 101e-6, _CUDA, _NVIDIA),
    "Turing": ArchitectureSpeed(0.86, 64e-6, _CUDA, _NVIDIA),
    "Ampere": ArchitectureSpeed(0.82, 54e-6, _CUDA, _NVIDIA),
    "GA100": ArchitectureSpeed(0.55, 73e-6, _CUDA, _NVIDIA),
    "Ada": ArchitectureSpeed(0.86, 36e-6, _CUDA, _NVIDIA),
    "Hopper": ArchitectureSpeed(0.57, 54e-6, _CUDA, _NVIDIA, 0.15),  # 70B Q3_K_S prompts on an H100: decision record 45
    "Blackwell": ArchitectureSpeed(0.88, 48e-6, _CUDA, _NVIDIA),
    "RDNA2": ArchitectureSpeed(0.75, 35e-6, _HIP, _AMD),
    "RDNA3": ArchitectureSpeed(0.82, 66e-6, _HIP, _AMD),
    "RDNA4": ArchitectureSpeed(0.87, 34e-6, _HIP, _AMD),
    "Arc": ArchitectureSpeed(0.38, 36e-6, _HIP, _AMD),
    "Apple": ArchitectureSpeed(0.76, 67e-6, _METAL, _AMD),
    "": ArchitectureSpeed(0.75, 50e-6, _CUDA, _NVIDIA),
}
"""Speed constants by architecture name (``hardware.cards``); the empty name is for GPUs outside the catalogue."""

SHARES = {"f16": 1.01, "q8_0": 1.03, "q6_K": 0.96, "q5_K": 0.94, "q4_K": 1.0, "q4_0": 1.17, "q3_K": 0.73, "q2_K": 0.84}
SHARES |= {"iq4_xs": 1.0, "iq3_s": 0.93, "iq2_s": 0.97, "mxfp4": 1.09}
"""Bandwidth reached with each weight type, relative to Q4_K."""

_LINK = 0.8  # achievable fraction of a PCIe link's nominal rate
PASS_S, CROSSING_S = 2e-4, 3e-5
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}

DESKTOP_BYTES_PER_S = 89.6e9
"""Default RAM bandwidth: dual-channel DDR5-5600 (DDR4-3200: 51.2e9)."""
# A CPU reads weights at 0.57 to 0.68 of its RAM bandwidth (1.5B to 14B Q4_K models on dual-channel DDR4-2400:
# github.com/InventiveHQ/speculative-decoding-consumer-gpus), unless the cores take longer to unpack them
_HOST_EFFICIENCY, _HOST_LAYER_S = 0.6, 3e-5
# Flash attention speed of one core in K/V elements per second, by cache type (measured: 6.1e9, 2.7e9, 2.0e9)
_CORE_ATTENTION = {"f16": {64: {1: 6e9}}, "q8_0": {64: {1: 2.7e9}}, "q4_0": {64: {1: 2e9}}}

# Milliseconds per 10^9 bytes of weights on one core by batch size, with weights laid out as in the file, as llama.cpp
# keeps them if there is a GPU (make_cpu_buft_list, src/llama-model.cpp). avx2 was measured on two Zen 3 server cores
# (docs/evidence/host-batches.json), avx512 (with VNNI) on one Xeon core; it lists only types that differ from avx2.
_CORE_BATCH_SIZES = (1, 2, 4, 7, 8, 16, 17, 32, 33, 64)
_CORE_MS: dict[str, dict[str, tuple[int, ...]]] = {
    "avx2": {
        "q4_K": (104, 182, 332, 558, 939, 971, 1619, 1648, 2211, 3049),
        "q3_K": (145, 269, 526, 918, 1408, 1549, 2662, 2662, 3481, 4458),
        "q6_K": (147, 218, 374, 477, 971, 1031, 1407, 1788, 2409, 2409),
        "q8_0": (105, 216, 290, 477, 477, 610, 724, 1154, 1218, 2139),
        "q4_0": (143, 304, 408, 710, 710, 1278, 1472, 2398, 2702, 4594),
        "f16": (96, 113, 145, 178, 192, 319, 344, 532, 541, 1050),
        "q5_K": (152, 265, 516, 664, 841, 875, 1434, 1625, 2314, 3463),
        "q2_K": (215, 273, 499, 880, 1627, 2029, 2638, 3516, 4150, 5735),
        "iq4_xs": (150, 261, 485, 827, 1186, 1206, 2137, 2870, 3483, 3737),
        "iq3_s": (377, 736, 1501, 1647, 1647, 1954, 2782, 2836, 3460, 5702),
        "iq2_s": (279, 547, 1104, 1905, 2797, 3044, 4371, 4930, 5381, 7780),
        "mxfp4": (175, 336, 672, 1145, 1348, 2697, 2789, 5365, 5365, 11727),
    },
}
_CORE_MS["avx512"] = _CORE_MS["avx2"] | {
    "q4_K": (134, 193, 316, 511, 496, 511, 720, 770, 950, 1166),
    "q3_K": (168, 270, 479, 803, 848, 884, 1190, 1240, 1500, 1865),
    "q6_K": (134, 180, 272, 403, 488, 503, 735, 750, 880, 1072),
}
# Milliseconds with repacked weights, which llama.cpp uses if there is no GPU; it does not repack the other types
_REPACKED_MS: dict[str, tuple[int, ...]] = {
    "q4_K": (111, 202, 243, 467, 475, 722, 832, 1527, 1666, 2905),
    "q4_0": (118, 209, 242, 483, 483, 829, 1152, 1610, 1742, 3342),
    "q8_0": (116, 185, 231, 369, 369, 633, 758, 1154, 1356, 2232),
    "mxfp4": (250, 477, 477, 1026, 1026, 1523, 1796, 3164, 3164, 6142),
}
_DESKTOP_CORE = 0.8  # time on a desktop core ÷ time on a server core, which has a lower clock
_SERVERS = ("EPYC", "Xeon")


@dataclass(frozen=True, slots=True)
class CpuCores:
    """Number of cores of a desktop or server CPU and their vector instructions: ``avx2``, or ``avx512`` with VNNI."""

    count: int = 8
    vectors: str = "avx2"
    is_desktop: bool = True

    def __str__(self) -> str:
        return f"{counted(self.count, 'core')} with {self.vectors.upper().replace('AVX512', 'AVX-512')}"


UNKNOWN = GpuModel("unknown", 8 * 2**30, 300e9, 4, 8, 20e12)
"""Data sheet assumed for an unrecognised GPU: a modest model from a few years ago."""


def cores_here(threads: int) -> CpuCores:
    """Return this machine's CPU type with ``threads`` as its number of cores."""
    vectors = "avx512" if "avx512_vnni" in host.cpu_flags() else "avx2"
    return CpuCores(threads, vectors, not any(server in host.cpu_name() for server in _SERVERS))


def guessed_host(
    memory_bytes_per_s: float = DESKTOP_BYTES_PER_S, cores: CpuCores | None = None, *, repacked: bool = False
) -> DeviceProfile:
    """Estimate a CPU's speed from its cores and its data-sheet RAM bandwidth (channels × transfers/s × 8 bytes).

    ``repacked``: True if there is no GPU, so that weights are repacked for the CPU's vector instructions.
    """
    cores, reached = cores or CpuCores(), memory_bytes_per_s * _HOST_EFFICIENCY
    table = _CORE_MS[cores.vectors] | (_REPACKED_MS if repacked else {})
    core_s = (_DESKTOP_CORE if cores.is_desktop else 1.0) * 1e-12 / cores.count
    seconds = {kind: [max(1 / reached, core_s * ms) for ms in row] for kind, row in table.items()}
    widest, flops = _CORE_BATCH_SIZES[-1], 2 * 8 / BITS["q4_K"]  # FLOPs per weight byte and token
    return DeviceProfile(
        bandwidth_bytes_per_s=reached,
        flops_per_s=widest * flops / seconds["q4_K"][-1],
        layer_s=_HOST_LAYER_S,
        source="guess",
        by_type={kind: 1 / row[0] for kind, row in seconds.items()},
        batch_latencies={
            kind: {width: one / row[0] for width, one in zip(_CORE_BATCH_SIZES, row, strict=True)}
            for kind, row in seconds.items()
        },
        attention={
            kind: {head: {n: cores.count * rate for n, rate in rates.items()} for head, rates in by_head.items()}
            for kind, by_head in _CORE_ATTENTION.items()
        },
    )


def repacked(cores: CpuCores) -> dict[str, BatchLatency]:
    """Return (time with repacked weights) ÷ (time in the file's layout), by type and batch size."""
    return {
        kind: {
            width: min(one / other, 1.0)
            for width, one, other in zip(_CORE_BATCH_SIZES, row, as_file[kind], strict=True)
        }
        for as_file in [_CORE_MS[cores.vectors]]
        for kind, row in _REPACKED_MS.items()
    }


def card_profile(card: GpuModel) -> DeviceProfile:
    """Estimate a GPU's speed from its data sheet."""
    reach = REACHES[card.architecture]
    flops_per_s = card.fp16_flops * reach.flops
    reached = card.bandwidth_bytes_per_s * reach.efficiency
    attention: Attention = {}
    for kind, attended in reach.attended.items():
        rate = attended * card.bandwidth_bytes_per_s
        attention[kind] = {128: {1: rate, 16: max(rate, flops_per_s / 2)}}  # 2 operations per K/V element
    return DeviceProfile(
        bandwidth_bytes_per_s=reached,
        flops_per_s=flops_per_s,
        layer_s=reach.layer_s,
        source="unknown" if card is UNKNOWN else "catalogue",
        by_type={kind: reached * share for kind, share in SHARES.items()},
        batch_latencies={"q4_K": dict(reach.batch_latency)},
        attention=attention,
        experts=_CUDA_EXPERTS if reach.batch_latency is _CUDA else {},
    )


def from_catalogue(
    cards: Sequence[GpuModel],
    names: Sequence[str] = (),
    here: MachineProfile | None = None,
    cores: CpuCores | None = None,
) -> MachineProfile:
    """Return a machine's speeds, with GPU speeds estimated from data sheets.

    Args:
        cards: the GPUs, in llama.cpp's order.
        names: the GPUs' device names in placements; default: their model names.
        here: measured profile of the machine with these GPUs; default: a typical desktop.
        cores: the machine's CPU cores.
    """
    speeds = {HOST: here.device(HOST) if here else guessed_host(cores=cores, repacked=not cards)}
    if here and cards and len(here.devices) == 1:  # the host was measured without a GPU, with repacked weights
        as_files = guessed_host(speeds[HOST].bandwidth_bytes_per_s / _HOST_EFFICIENCY, cores)
        speeds[HOST] = replace(speeds[HOST], batch_latencies=as_files.batch_latencies)
    speeds |= {name: card_profile(card) for name, card in zip(names or [c.name for c in cards], cards, strict=True)}
    links = [link_bytes_per_s(card.pcie_generation, card.pcie_width) for card in cards]
    host_words = f"the host {here.origin}" if here else "this machine's speed was not measured (plan --calibrate does)"
    source = "assumed for an unknown GPU" if cards and all(card is UNKNOWN for card in cards) else "from the catalogue"
    origin = f"{source}; {host_words}" if cards or not here else here.origin
    return MachineProfile(
        devices=speeds,
        pass_s=here.pass_s if here else PASS_S,
        crossing_s=CROSSING_S,
        link_bytes_per_s=min(links, default=link_bytes_per_s(4, 16)),
        origin=origin,
        streams=bool(cards),
        memory_bytes=here.memory_bytes if here else None,
        disturbed=here.disturbed if here else "",
    )


def link_bytes_per_s(generation: int | None, lanes: int | None) -> float:
    """Return a PCIe link's achievable rate, assuming generation 4 and 16 lanes if unknown."""
    return _LINK * _LANE_BYTES_PER_S.get(generation or 4, 1.969e9) * (lanes or 16)
