"""The backends of ggml by their device names: the overhead of each on a GPU, and what helps if its driver crashes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend, whose devices ggml names ``name`` plus a number."""

    name: str
    overhead_bytes: int = 240 * 2**20  # VRAM besides what llama.cpp counts: context, cuBLAS, graphs and pools
    large_bytes: int = 640 * 2**20  # overhead on a GPU with _LARGE_CARD or more, which has more multiprocessors
    driver_hint: str = "update the card's driver"  # variables from ggml/src
    architectures: tuple[str, ...] = ()  # GPU architectures usually run with it; all others use CUDA


# Overheads are guesses until they are measured. CUDA's was 113 to 301 MiB (docs/predictions.md), 609 to 626 on an H100;
# for the others there are no measurements: their users reserve 250 to 500. Without NVML the backend itself reports free
# memory, after creating its context, so that the overhead there excludes it.
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
    Backend("RPC", 0, 0),  # the worker's own, allocated before anything is loaded
)


_LARGE_CARD = 40 * 2**30


def overhead_bytes(device: str, total_bytes: int) -> int:
    """Return the assumed overhead of a process on a GPU with so much memory; ``device`` as for :func:`backend_of`."""
    backend = backend_of(device)
    return backend.large_bytes if total_bytes >= _LARGE_CARD else backend.overhead_bytes


def is_guess(size_bytes: int) -> bool:
    """Return True if an overhead is one of these guesses."""
    return size_bytes > 0 and any(size_bytes in (one.overhead_bytes, one.large_bytes) for one in BACKENDS)


def backend_of(device: str) -> Backend:
    """Return the backend of a device by ggml's name, e.g. CUDA0; a guess for an unknown one."""
    name = device.rstrip("0123456789")
    return next((one for one in BACKENDS if one.name == name), Backend(name))


def usual_backend(architecture: str) -> str:
    """Return the backend that GPUs of an architecture (:mod:`ggufspec.hardware.cards`) usually run with."""
    return next((one.name for one in BACKENDS if architecture in one.architectures), "CUDA")
