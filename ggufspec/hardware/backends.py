"""ggml's backends by device name, with the GPU memory overhead of each and a hint for crashes of its driver."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend; ggml names its devices ``name`` plus a number."""

    name: str
    overhead_bytes: int = 240 * 2**20  # VRAM that llama.cpp does not count: context, cuBLAS, graphs and pools
    large_bytes: int = 640 * 2**20  # overhead on a GPU with at least _LARGE_CARD VRAM, which has more multiprocessors
    driver_hint: str = "update the GPU driver"  # hint after a driver crash; ggml/src reads the variables in it
    architectures: tuple[str, ...] = ()  # GPU architectures that usually use this backend; all others use CUDA


# These overheads are guesses, used until a machine's own are measured. CUDA's was 113 to 301 MiB (docs/predictions.md),
# and 609 to 626 MiB on an H100. Other backends have not been measured; their users reserve 250 to 500 MiB. Without
# NVML, a backend reports free memory after creating its context, so the overhead then excludes the context.
BACKENDS = (
    Backend(
        "CUDA",
        driver_hint="update NVIDIA's driver, or set GGML_CUDA_DISABLE_FUSION=1 or GGML_CUDA_DISABLE_GRAPHS=1",
    ),
    Backend("ROCm", 450 * 2**20, architectures=("RDNA2", "RDNA3", "RDNA4")),
    Backend(
        "Vulkan",
        450 * 2**20,
        driver_hint="update the GPU driver, or set GGML_VK_DISABLE_FUSION=1 or GGML_VK_DISABLE_F16=1",
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
        driver_hint="update the GPU driver, or set GGML_SYCL_ENABLE_FUSION=0",
        architectures=("Arc",),
    ),
    Backend("RPC", 0, 0),  # the worker allocates its overhead before anything is loaded
)


_LARGE_CARD = 40 * 2**30


def overhead_bytes(device: str, total_bytes: int) -> int:
    """Return the VRAM overhead assumed for a process on a GPU of this size; ``device`` is as for :func:`backend_of`."""
    backend = backend_of(device)
    return backend.large_bytes if total_bytes >= _LARGE_CARD else backend.overhead_bytes


def is_guess(size_bytes: int) -> bool:
    """Return True if an overhead is one of the guesses in ``BACKENDS``."""
    return size_bytes > 0 and any(size_bytes in (one.overhead_bytes, one.large_bytes) for one in BACKENDS)


def backend_of(device: str) -> Backend:
    """Return the backend of the device that ggml calls ``device``, e.g. CUDA0; default values if it is unknown."""
    name = device.rstrip("0123456789")
    return next((one for one in BACKENDS if one.name == name), Backend(name))


def usual_backend(architecture: str) -> str:
    """Return the backend that GPUs of an architecture (:mod:`ggufspec.hardware.cards`) usually use."""
    return next((one.name for one in BACKENDS if architecture in one.architectures), "CUDA")
