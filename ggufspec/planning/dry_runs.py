"""llama.cpp's dry runs for a machine's GPUs, cached on disk by model."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from ggufspec.files import cache
from ggufspec.llamacpp import dryrun
from ggufspec.planning.memory import (
    HOST,
    ByDevice,
    DeviceBytes,
    MemoryRequest,
    SameHeader,
    copied_cache,
    f16_scratch_bytes,
    fused_bytes,
    hidden_compute_bytes,
    hidden_host_bytes,
    layer_devices,
    output_device,
    streamed_bytes,
    streaming_card,
)

# Upper bounds on GPU ÷ CPU compute buffers: docs/decisions/026; draft heads: tests/unit/test_bytes_without_rpc.py
_DENSE, _EXPERTS, _RECURRENT, _HEAD = 1.0, 1.05, 1.25, 1.1


@dataclass(frozen=True, slots=True)
class _Entry:
    """Cached dry run: bytes by device, or an error; ``limits``: why bytes are only upper bounds, or empty if exact."""

    devices: dict[str, DeviceBytes]
    error: str = ""
    limits: str = ""


class DryRuns:
    """Callable that returns llama.cpp's allocation by device for each request, or its error message.

    If results are only upper bounds, ``limits`` says why. Either this llama.cpp does not report weights and caches, so
    they are calculated, or it cannot simulate an absent GPU, so the CPU's compute buffer plus a margin is used.

    Args:
        cards: each GPU's description by llama.cpp name, in llama.cpp's order; CUDA0 may become another GPU's name.
        simulated: True if the GPUs are not installed.
        rpc: endpoints of RPC workers among the devices.
        folder: the cache folder.
        verbose: True to show llama.cpp's log.
    """

    def __init__(
        self,
        cards: Mapping[str, str],
        *,
        simulated: bool,
        rpc: Sequence[str],
        folder: Path,
        verbose: bool = False,
    ) -> None:
        self.limits = ""
        self._cards = tuple(cards)
        self._simulated = simulated
        self._devices = [dryrun.llama_build(), ["cards", len(cards)] if simulated else list(cards.items()), list(rpc)]
        self._folder = folder / "dry-runs"
        spec = dryrun.DryRunJob(() if simulated else tuple(rpc), len(cards) if simulated else 0, names=self._cards)
        self._session = dryrun.DryRunSession(spec, verbose=verbose)
        self._known: dict[str, dict[str, _Entry]] = {}  # cached answers by model fingerprint

    def __call__(self, requests: Sequence[MemoryRequest]) -> list[ByDevice | str]:
        """Return the results in the order of ``requests``; uncached requests are dry-run together.

        Raises:
            GgufspecError: an RPC worker does not respond, or llama.cpp crashed.
        """
        keys = [(_fingerprint(SameHeader(one.header)), self._key(one)) for one in requests]
        for model, _ in keys:
            if model not in self._known:
                self._known[model] = cache.read_value(self._file(model), dict[str, _Entry]) or {}
        unknown = {key: one for key, one in zip(keys, requests, strict=True) if not self._is_known(*key)}
        if unknown:
            ordered = sorted(unknown.items(), key=lambda item: (str(item[1].file), str(item[1].placement)))
            runs = [_run(one) for _, one in ordered]
            for ((model, key), one), answer in zip(ordered, self._session.ask(runs), strict=True):
                self._known[model][key] = self._entry(one, answer)
            for model in {model for model, _ in unknown}:
                cache.write_value(self._file(model), self._known[model])
        found = [self._known[model][key] for model, key in keys]
        self.limits = next((entry.limits for entry in found if entry.limits), self.limits)
        return [entry.error or self._with_hidden(one, entry) for one, entry in zip(requests, found, strict=True)]

    def _with_hidden(self, request: MemoryRequest, entry: _Entry) -> ByDevice:
        """Add the backends' extra buffers, which a simulated device does not report."""
        if not self._simulated or request.target is not None:
            return entry.devices
        count = len(self._cards) + 1
        devices = layer_devices(request.header.blocks, request.placement, count - 1)
        more = dict.fromkeys(entry.devices, 0)
        for bound in (f16_scratch_bytes, fused_bytes):
            for name, size in zip(self._cards, bound(request.header, devices, request.context, count)[1:], strict=True):
                more[name] += size
        return {name: used + DeviceBytes(compute=more[name]) for name, used in entry.devices.items()}

    def close(self) -> None:
        """End the child process; a later call starts a new one."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_known(self, model: str, key: str) -> bool:
        """Return whether the cache holds a plausible result."""
        entry = self._known[model].get(key)
        if entry is None or entry.error:
            return entry is not None
        sizes = [size for one in entry.devices.values() for size in asdict(one).values()]
        return {HOST, *self._cards} == entry.devices.keys() and min(sizes) >= 0

    def _entry(self, request: MemoryRequest, answer: dryrun.DryRunBytes) -> _Entry:
        limits = self._session.ready.limits
        if answer.error:
            return _Entry({}, answer.error, limits)
        names = {HOST: HOST} | dict(zip(self._session.ready.offload, self._cards, strict=False))
        found: ByDevice = {}
        for device, one in answer.devices.items():
            name = names.get(device, HOST)  # software devices, which plans ignore, use the host's memory
            found[name] = found.get(name, DeviceBytes()) + DeviceBytes(one.weights, one.kv, one.compute)
        if not limits:
            found = {name: found.get(name, DeviceBytes()) for name in (HOST, *self._cards)}
            found[HOST] += DeviceBytes(overhead=answer.output + hidden_host_bytes(request.header, request.context))
            devices = layer_devices(request.header.blocks, request.placement, len(self._cards))
            more = hidden_compute_bytes(request.header, request.context, devices, len(self._cards) + 1)
            return _Entry(
                {name: found[name] + DeviceBytes(compute=size) for name, size in zip(found, more, strict=True)}
            )
        used = request.resident(self._cards)
        if self._session.ready.offload:
            compute = {name: found[name].compute if name in found else 0 for name in used}
        else:
            compute = self._as_on_cpu(request, used, found[HOST].compute)
        return _Entry({name: replace(one, compute=compute[name]) for name, one in used.items()}, limits=limits)

    def _as_on_cpu(self, request: MemoryRequest, used: ByDevice, on_cpu: int) -> dict[str, int]:
        """Return upper bounds on compute buffers, derived from the buffer of a CPU-only run."""
        share = int(_card_share(request) * on_cpu)
        lending_device = output_device(request, request.target, self._cards) if request.target else ""
        copied = copied_cache(request, request.target, self._cards) if request.target else {}
        if streamed := streamed_bytes(request, self._cards):
            card = streaming_card(self._cards)
            copied[card] = copied.get(card, 0) + streamed
        return {
            name: (on_cpu if name == HOST else share if one.total or name == lending_device or name in copied else 0)
            + copied.get(name, 0)
            for name, one in used.items()
        }

    def _key(self, request: MemoryRequest) -> str:
        """Return a hash of everything that the result depends on; the number of threads does not matter."""
        question: list[object] = [self._devices]
        for one in filter(None, (request, request.target)):
            question += [asdict(one.placement), asdict(one.context) | {"threads": 1}]
        if request.target is not None:
            question.append(_fingerprint(SameHeader(request.target.header)))
        return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:32]

    def _file(self, model: str) -> Path:
        return self._folder / f"{model}.json"


def _run(request: MemoryRequest) -> dryrun.PlacedModel:
    on = None if request.target is None else _run(request.target)
    return dryrun.PlacedModel(request.file, request.placement, request.context, on)


def _card_share(request: MemoryRequest) -> float:
    if request.target is not None:
        return _HEAD
    if any(request.header.recurrent):
        return _RECURRENT
    return _EXPERTS if request.header.experts else _DENSE


@functools.lru_cache(maxsize=32)
def _fingerprint(same: SameHeader) -> str:
    return same.header.fingerprint
