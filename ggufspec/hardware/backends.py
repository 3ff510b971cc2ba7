"""The backends of ggml by the names of their devices: what each takes of a card, and what its crashing driver needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend, whose devices ggml calls ``name`` and a number."""

    name: str
    overhead_bytes: int = 240 * 2**20  # of a card, besides what llama.cpp counts: context, cuBLAS, graphs and pools
    large_bytes: int = 640 * 2**20  # the same of one with _LARGE_CARD or more, which has more multiprocessors
    driver_hint: str = "update the card's driver"  # variables are those of ggml/src
    architectures: tuple[str, ...] = ()  # of cards that are usually run with it; all others with CUDA


# Overheads are guesses until they are measured. Of CUDA 113 to 301 MiB were seen (docs/predictions.md), 609 to 626 on
# an H100; of the others nothing: their users reserve 250 to 500. Without NVML free memory is asked of the backend
# itself, which has its context by then, so that there the overhead is without it.
BACKENDS = (
    Backend(
        "CUDA",
        driver_hint="update NVIDIA's driver, or set GGML_CUDA_DISABLE_FUSION=1 or GGML_CUDA_DISABLE_GRAPHS=1",
    ),
    Backend("ROCm", 450 * 2**20, architectures=("RDNA2", "RDNA3", "RDNA4")),
    Backend(
        "Vulkan",
        450 * 2**20,
        driver_hint="update the card's driver, or set GGML_VK_DISABLE_FUSION=1 or GGML_VK_DISABLE_F16=1",
    ),
    Backend(
        "MTL",
        450 * 2**20,
        450 * 2**20,
        "update macOS, or set GGML_METAL_FUSION_DISABLE=1",
        ("Apple",),
    ),
    Backend(
        "SYCL",
        450 * 2**20,
        driver_hint="update the card's driver, or set GGML_SYCL_ENABLE_FUSION=0",
        architectures=("Arc",),
    ),
    Backend("RPC", 0, 0),  # the worker's own, which has it before anything is loaded
)


_LARGE_CARD = 40 * 2**30


def overhead_bytes(device: str, total_bytes: int) -> int:
    """What a process is supposed to take of a card with so much memory; ``device`` is as for :func:`backend_of`."""
    backend = backend_of(device)
    return backend.large_bytes if total_bytes >= _LARGE_CARD else backend.overhead_bytes


def is_guess(size_bytes: int) -> bool:
    """Whether an overhead is one of these guesses."""
    return size_bytes > 0 and any(size_bytes in (one.overhead_bytes, one.large_bytes) for one in BACKENDS)


def backend_of(device: str) -> Backend:
    """That of a device as ggml calls it, CUDA0 say; of an unknown one a guess."""
    name = device.rstrip("0123456789")
    return next((one for one in BACKENDS if one.name == name), Backend(name))


def usual_backend(architecture: str) -> str:
    """What cards of an architecture (:mod:`ggufspec.hardware.cards`) are usually run with."""
    return next((one.name for one in BACKENDS if architecture in one.architectures), "CUDA")
