"""ggml's devices, including llama.cpp's RPC workers.

Source: ggml/include/ggml-backend.h and ggml-rpc.h. The functions are in libggml, on which libllama depends, so looking
them up through libllama's handle finds the copy that libllama uses.
"""

from __future__ import annotations

import ctypes
import functools
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ggufspec.errors import GgufspecError, UsageError
from ggufspec.hardware import gpus, install
from ggufspec.llamacpp.library import bound, load_library
from ggufspec.llamacpp.options import is_remote
from ggufspec.schema.doctor import LlamaDevice

_HANDLE, _TEXT, _SIZE = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t


class _Properties(ctypes.Structure):
    """struct ggml_backend_dev_props, with spare space for capabilities that other versions may have."""

    _fields_: ClassVar = [
        ("name", _TEXT),
        ("description", _TEXT),
        ("free_bytes", _SIZE),
        ("total_bytes", _SIZE),
        ("type", ctypes.c_int),
        ("device_id", _TEXT),
        ("capabilities", ctypes.c_bool * 64),
    ]


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_backend_dev_count": (_SIZE, []),
    "ggml_backend_dev_get": (_HANDLE, [_SIZE]),
    "ggml_backend_dev_by_name": (_HANDLE, [_TEXT]),
    "ggml_backend_dev_name": (_TEXT, [_HANDLE]),
    "ggml_backend_dev_get_props": (None, [_HANDLE, ctypes.POINTER(_Properties)]),
    "ggml_backend_dev_buffer_type": (_HANDLE, [_HANDLE]),
    "ggml_backend_dev_backend_reg": (_HANDLE, [_HANDLE]),
    "ggml_backend_reg_count": (_SIZE, []),
    "ggml_backend_reg_get": (_HANDLE, [_SIZE]),
    "ggml_backend_reg_name": (_TEXT, [_HANDLE]),
    "ggml_backend_register": (None, [_HANDLE]),
}
_RPC_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_backend_rpc_start_server": (None, [_TEXT, _TEXT, _SIZE, _SIZE, ctypes.POINTER(_HANDLE)]),
    "ggml_backend_rpc_add_server": (_HANDLE, [_TEXT]),
}
# enum ggml_backend_dev_type
_TYPES = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accelerator", 4: "meta"}


@dataclass(frozen=True, slots=True)
class Device(LlamaDevice):
    """One ggml device. An RPC worker has the kind ``gpu`` and a name such as RPC0."""

    @property
    def shares_memory(self) -> bool:
        """True if the device uses host memory. Apple's devices do, although ggml reports them as ordinary GPUs."""
        return self.kind == "igpu" or self.name.startswith("MTL")

    @property
    def is_remote(self) -> bool:
        return is_remote(self.name)

    @property
    def is_software(self) -> bool:
        return gpus.is_software(self.description)


def devices() -> list[Device]:
    """Return all devices in ggml's order, including added RPC workers."""
    lib = ggml()
    found = []
    for index in range(lib.ggml_backend_dev_count()):
        told = _Properties()
        lib.ggml_backend_dev_get_props(lib.ggml_backend_dev_get(index), ctypes.byref(told))
        found.append(
            Device(
                name=told.name.decode(),
                description=told.description.decode(),
                kind=_TYPES.get(told.type, "unknown"),
                free_bytes=told.free_bytes,
                total_bytes=told.total_bytes,
                device_id=(told.device_id or b"").decode(),
            )
        )
    return found


def handle_of(name: str) -> int:
    """Return ggml's handle for a device; raise UsageError if no device has this name."""
    handle: int | None = ggml().ggml_backend_dev_by_name(name.encode())
    if not handle:
        raise UsageError(f"there is no device {name}", f"available devices: {', '.join(d.name for d in devices())}")
    return handle


def name_of(handle: int) -> str:
    """Return ggml's name for a device; the CPU is called CPU."""
    name: bytes = ggml().ggml_backend_dev_name(handle)
    return name.decode()


def offloading(found: Sequence[Device]) -> list[Device]:
    """Return the devices in ``found`` that layers are offloaded to, in llama.cpp's order: RPC workers, then local GPUs.

    Integrated GPUs count only if there is no discrete GPU, and software GPUs only if there is no other device. If two
    backends report the same GPU, the first one counts. Source: ``llama_prepare_model_devices`` in src/llama.cpp.
    """
    cards = [device for device in found if device.kind in ("gpu", "igpu")]
    remote = [device for device in cards if device.is_remote]
    local = [device for device in cards if not device.is_remote and not device.is_software]
    local = [device for device in local if device.kind == "gpu"] or local
    once = {device.device_id or device.name: device for device in reversed(local)}
    return remote + [*once.values()][::-1] or cards


def chosen_over_others() -> tuple[str, ...]:
    """Return the names of the devices from :func:`offloading` if llama.cpp would use others, too; otherwise ()."""
    found = devices()
    chosen = offloading(found)
    software = any(device.is_software and device not in chosen for device in found)
    return tuple(device.name for device in chosen) if software else ()


def local_cards() -> list[Device]:
    """Return the local GPUs that layers are offloaded to."""
    return [device for device in offloading(devices()) if not device.is_remote and not device.is_software]


def unwatched() -> tuple[str, ...]:
    """Return the descriptions of local GPUs that NVML does not report."""
    cards, seen = local_cards(), gpus.gpus()
    return tuple(one.description.strip() for one in cards if not gpus.of_device(one.device_id, one.description, seen))


def used_bytes() -> int:
    """Return the bytes in use on local GPUs, as counted by NVML or, without NVML, by each backend.

    Only an increase is meaningful, because some backends see only their own process, and some drivers report a constant
    (e.g. Vulkan without VK_EXT_memory_budget).
    """
    if (used := gpus.nvml_used_bytes()) is not None:
        return used
    return sum(max(0, device.total_bytes - device.free_bytes) for device in local_cards())


def buffer_type(device: str) -> int:
    """Return the handle of a device's buffer type for weights; raise as :func:`handle_of` does.

    Source: parse_tensor_buffer_overrides in common/arg.cpp.
    """
    return int(ggml().ggml_backend_dev_buffer_type(handle_of(device)))


def has_gpu() -> bool:
    """Return True if layers can be offloaded, to a GPU or an RPC worker."""
    return any(device.kind in ("gpu", "igpu") for device in devices())


def backends() -> list[str]:
    """Return the compiled-in backends in ggml's order, e.g. CPU, RPC, CUDA."""
    lib = ggml()
    handles = [lib.ggml_backend_reg_get(index) for index in range(lib.ggml_backend_reg_count())]
    return [lib.ggml_backend_reg_name(handle).decode() for handle in handles]


def has_rpc() -> bool:
    """Return True if RPC is compiled in; prebuilt llama-cpp-python packages lack it."""
    return "RPC" in backends()


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Return the host and port of an RPC worker; raise UsageError if ``endpoint`` is not host:port.

    llama.cpp splits at the first colon and does not support IPv6.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or ":" in host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 2**16:
        raise UsageError(f"{endpoint!r} is not an RPC endpoint", "use host:port, e.g. 127.0.0.1:50052 (no IPv6)")
    return host, int(port)


def add_rpc_workers(endpoints: Iterable[str]) -> None:
    """Add the devices of the RPC workers at these ``host:port`` endpoints, which llama.cpp treats as GPUs.

    Raises:
        UsageError: an endpoint is not host:port.
        GgufspecError: no worker answers there, or this llama.cpp was built without RPC.
    """
    for endpoint in endpoints:
        _add_rpc_worker(endpoint)


def _add_rpc_worker(endpoint: str) -> None:
    address = parse_endpoint(endpoint)
    try:  # ggml aborts the process if no worker answers, so try to connect first
        socket.create_connection(address, timeout=5).close()
    except OSError as error:
        raise GgufspecError(
            f"no RPC worker answers at {endpoint}: {error}",
            "start `ggufspec worker` or ggml-rpc-server there, or drop --rpc",
        ) from error
    registry = _rpc().ggml_backend_rpc_add_server(endpoint.encode())
    if not registry:
        raise GgufspecError(f"the RPC worker at {endpoint} has no device", "see the worker's output")
    ggml().ggml_backend_register(registry)


def serve_rpc(endpoint: str, threads: int, names: Sequence[str] = ("CPU",)) -> None:
    """Serve the devices called ``names`` at ``endpoint`` until the process ends. The protocol has no authentication.

    The function returns only if ggml cannot serve because the port is taken or a device does not start. ``endpoint`` is
    a local IPv4 address and a port, because ggml's server does not resolve names; the CPU device uses ``threads``.

    Raises:
        UsageError: ``endpoint`` is invalid, or a device does not exist.
        GgufspecError: this llama.cpp was built without RPC.
    """
    parse_endpoint(endpoint)
    rpc, handles = _rpc(), (_HANDLE * len(names))(*map(handle_of, names))
    rpc.ggml_backend_rpc_start_server(endpoint.encode(), None, threads, len(handles), handles)


@functools.cache
def ggml() -> Any:
    """Return llama.cpp's C library with the types of its device functions set."""
    return bound(load_library()._lib, _FUNCTIONS)


def _rpc() -> Any:
    try:
        return bound(load_library()._lib, _RPC_FUNCTIONS)
    except AttributeError as error:
        raise GgufspecError("this llama.cpp was built without RPC", install.repair_command(source=True)) from error
