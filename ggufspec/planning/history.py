"""What earlier runs on this machine measured: the acceptance rate of a pair, and what a card's driver takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from ggufspec.cache import Table

PRIOR_ACCEPTANCE = 0.7  # what chat and code reach with a draft of the same family, temperature 0: 0.6 to 0.8
_PRIOR_TOKENS = 16  # drafted tokens that the prior counts as many as
_SURE_TOKENS = 100  # from so many on the prior is not worth a word
_HALVED_BY = 2000  # drafted tokens after which older ones count half


@dataclass(frozen=True, slots=True)
class _Seen:
    """Draft tokens that were accepted, of those whose predecessors were; older ones discounted."""

    accepted: float
    reached: float

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.reached < inf:
            raise ValueError("more accepted than drafted")


def _acceptance(folder: Path) -> Table[_Seen]:
    return Table(folder / "acceptance.json", _Seen)


def record_acceptance(folder: Path, target: str, draft: str, accepted: Sequence[int], drafted: Sequence[int]) -> None:
    """Add what a run measured to what earlier ones did; older tokens count less, the more came after them.

    What is kept is the chance that a drafted token is accepted given that all before it were: that, and not accepted ÷
    drafted, tells what another draft length would give.

    Args:
        folder: the cache folder.
        target: the target's fingerprint (:class:`ggufspec.models.header.ModelHeader`).
        draft: the draft's.
        accepted: tokens kept at each position of the draft.
        drafted: tokens drafted at each position.
    """
    reached = [min(before, here) for before, here in zip([*drafted[:1], *accepted], drafted, strict=False)]
    if new := sum(reached):
        share = 0.5 ** (new / _HALVED_BY)

        def add(seen: _Seen | None) -> _Seen:
            seen = seen or _Seen(0.0, 0.0)
            return _Seen(seen.accepted * share + sum(accepted), seen.reached * share + new)

        _acceptance(folder).update(_key(target, draft), add)


def expected_acceptance(folder: Path, target: str, draft: str, profile: float | None) -> tuple[float, str]:
    """(chance that a drafted token is kept, where it comes from): measured before, the profile's, or a prior.

    A measurement of few tokens moves the profile's or the prior by little.
    """
    seen = _acceptance(folder).get(_key(target, draft))
    if seen and seen.reached:
        prior = PRIOR_ACCEPTANCE if profile is None else profile
        rate = (seen.accepted + _PRIOR_TOKENS * prior) / (seen.reached + _PRIOR_TOKENS)
        few = f", so few that {prior:.0%} was weighed in" if seen.reached < _SURE_TOKENS else ""
        return rate, f"{rate:.0%}, measured here before on {seen.reached:,.0f} drafted tokens{few}"
    if profile is not None:
        return profile, f"{profile:.0%}, the profile's"
    return PRIOR_ACCEPTANCE, f"{PRIOR_ACCEPTANCE:.0%}, a prior: nothing is known of this pair (--acceptance sets it)"


def _key(target: str, draft: str) -> str:
    return f"{target} + {draft}"


# What a backend takes of a card beside what llama.cpp counts: CUDA's context, cuBLAS, graphs and pools. Guesses until
# they are measured. Of CUDA 113 to 301 MiB were seen (docs/predictions.md), of the others nothing: their users reserve
# 250 to 500 MiB. Without NVML free memory is asked of the backend itself, which has its context by then, so that there
# the overhead is without it.
CUDA_OVERHEAD_BYTES = 240 * 2**20
ROCM_OVERHEAD_BYTES = 450 * 2**20
VULKAN_OVERHEAD_BYTES = 450 * 2**20
METAL_OVERHEAD_BYTES = 450 * 2**20
SYCL_OVERHEAD_BYTES = 450 * 2**20
_DEFAULT_OVERHEADS = {
    "CUDA": CUDA_OVERHEAD_BYTES,
    "ROCm": ROCM_OVERHEAD_BYTES,
    "Vulkan": VULKAN_OVERHEAD_BYTES,
    "MTL": METAL_OVERHEAD_BYTES,
    "SYCL": SYCL_OVERHEAD_BYTES,
    "RPC": 0,  # the worker's own, which has it before anything is loaded
}


def record_overhead(folder: Path, card: str, size_bytes: int) -> None:
    """Keep what a process took of a card, by its driver's name, beyond llama.cpp's own breakdown."""
    _overheads(folder).put(card, max(0, size_bytes))


def known_overhead(folder: Path, card: str, device: str) -> int:
    """Bytes that were recorded for a card, or its backend's guess; ``device`` is what ggml calls it, CUDA0 say."""
    known = _overheads(folder).get(card)
    return default_overhead(device) if known is None else known


def default_overhead(device: str) -> int:
    """The guess for a device as ggml calls it: the backend's name and a number."""
    return _DEFAULT_OVERHEADS.get(device.rstrip("0123456789"), CUDA_OVERHEAD_BYTES)


def is_guessed(overhead_bytes: int) -> bool:
    """Whether an overhead is a backend's guess."""
    return overhead_bytes > 0 and overhead_bytes in _DEFAULT_OVERHEADS.values()


def _overheads(folder: Path) -> Table[int]:
    return Table(folder / "overheads.json", int)
