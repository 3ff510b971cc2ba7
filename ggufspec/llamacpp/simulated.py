"""Simulated devices that stand in for GPUs that are not installed: RPC workers on loopback, never asked for memory.

llama.cpp treats such a device as a GPU. Two capabilities that a remote device lacks are added to its interface:
computing batches of 32 or more tokens with copies of CPU weights (``op_offload``), and reading CPU weights directly
from host memory, so that the CPU does not repack them. Use them only in processes that make dry runs.

Source: ``struct ggml_backend_device_i`` in ggml/src/ggml-backend-impl.h, ``ggml_backend_cuda_device_offload_op`` in
ggml/src/ggml-cuda/ggml-cuda.cu, ``make_cpu_buft_list`` in src/llama-model.cpp.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
import time
from typing import Any, ClassVar

from ggufspec.errors import GgufspecError
from ggufspec.hardware import install
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.library import bound, load_library
from ggufspec.llamacpp.options import OP_OFFLOAD_MIN_BATCH

# Dimension that counts tokens, by operation with weights; for other operations, the product of all but the first
_NEVER = -1
_TOKENS_IN = {"GET_ROWS": _NEVER, "MUL_MAT": 1, "MUL_MAT_ID": 2, "ROPE": 2, "ROPE_BACK": 2}
_FIRST_OPERATIONS = 80  # number of values in enum ggml_op (ggml/include/ggml.h) to search for these five operations


class _Tensor(ctypes.Structure):
    """Leading fields of struct ggml_tensor."""

    _fields_: ClassVar = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
    ]


_BufferType = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_OffloadOp = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.POINTER(_Tensor))


class _Device(ctypes.Structure):
    """struct ggml_backend_device."""

    _fields_: ClassVar = [
        ("get_name", ctypes.c_void_p),
        ("get_description", ctypes.c_void_p),
        ("get_memory", ctypes.c_void_p),
        ("get_type", ctypes.c_void_p),
        ("get_props", ctypes.c_void_p),
        ("init_backend", ctypes.c_void_p),
        ("get_buffer_type", _BufferType),
        ("get_host_buffer_type", _BufferType),
        ("buffer_from_host_ptr", ctypes.c_void_p),
        ("supports_op", ctypes.c_void_p),
        ("supports_buft", ctypes.c_void_p),
        ("offload_op", _OffloadOp),
        ("event_new", ctypes.c_void_p),
        ("event_free", ctypes.c_void_p),
        ("event_synchronize", ctypes.c_void_p),
        ("reg", ctypes.c_void_p),
    ]


_alive: list[Any] = []  # callbacks to keep alive, because ggml holds only bare pointers


def add(count: int) -> list[str]:
    """Create ``count`` simulated devices and return their names; their server ends with the process.

    Raises:
        GgufspecError: this llama.cpp was built without RPC, or its device struct has an unexpected layout.
    """
    before = {device.name for device in devices.devices()}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    threading.Thread(target=devices.serve_rpc, args=(endpoint, 1, ("CPU",) * count), daemon=True).start()
    for _ in range(1000):
        with contextlib.suppress(GgufspecError):
            devices.add_rpc_workers([endpoint])
            break
        time.sleep(0.005)
    else:
        raise GgufspecError("the RPC worker that simulates a GPU does not start", "ggufspec doctor")
    names = [device.name for device in devices.devices() if device.name not in before]
    for name in names:
        _act_as_a_card(name)
    return names


def _act_as_a_card(name: str) -> None:
    """Add a local GPU's capabilities to an RPC device; raise GgufspecError if its struct has an unexpected layout."""
    handle = devices.handle_of(name)
    device = _Device.from_address(handle)
    registry, buffers = devices.ggml().ggml_backend_dev_backend_reg(handle), devices.buffer_type(name)
    known = device.reg == registry and device.get_buffer_type(handle) == buffers
    if not known or device.get_host_buffer_type or device.offload_op:
        raise GgufspecError(
            "this llama.cpp's device struct has an unexpected layout: no GPU can be simulated", install.repair_command()
        )
    host = _ggml().ggml_backend_cpu_buffer_type
    dimensions = _dimensions()

    def offloads(_device: int, tensor: Any) -> bool:
        one = tensor.contents
        dimension = dimensions.get(one.op)
        if dimension is None:
            return int(one.ne[1] * one.ne[2] * one.ne[3]) >= OP_OFFLOAD_MIN_BATCH
        return dimension != _NEVER and int(one.ne[dimension]) >= OP_OFFLOAD_MIN_BATCH

    device.get_host_buffer_type = keep = _BufferType(lambda _device: host())
    device.offload_op = offload = _OffloadOp(offloads)
    _alive.extend((keep, offload))


def _dimensions() -> dict[int, int]:
    """Return ``_TOKENS_IN`` with ggml's operation numbers as keys."""
    names = {number: _ggml().ggml_op_name(number).decode() for number in range(_FIRST_OPERATIONS)}
    return {number: _TOKENS_IN[name] for number, name in names.items() if name in _TOKENS_IN}


def _ggml() -> Any:
    functions: dict[str, tuple[Any, list[Any]]] = {
        "ggml_backend_cpu_buffer_type": (ctypes.c_void_p, []),
        "ggml_op_name": (ctypes.c_char_p, [ctypes.c_int]),
    }
    return bound(load_library()._lib, functions)
