"""What llama.cpp itself would allocate, without weights: its own loader and graph builder with ``no_alloc``.

Runs in a child process (:mod:`ggufspec.worker`). Where the card asked about is not here, a **paper card** stands for
it: an RPC worker on loopback inside the child, which llama.cpp treats as a GPU and which is never asked for memory. It
takes a llama.cpp with RPC, which no prebuilt one has. What CUDA adds of its own (its context, scratch for a quantised
KV cache) a paper card does not show.

Source: ``common_get_device_memory_data`` in common/fit.cpp, ``llama_get_memory_breakdown`` in src/llama-ext.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ggufspec import worker
from ggufspec.errors import GgufspecError, ModelError
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.library import complaints, forget_complaints, load
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.llamacpp.params import context_params, model_params

if TYPE_CHECKING:
    from ggufspec.llamacpp.model import Context

HOST = "CPU"
CANNOT_LOAD = "llama.cpp cannot load it"  # begins an answer's error; others are of the context


@dataclass(frozen=True, slots=True)
class Request:
    """One model, placed and with one context; ``path`` may be a metadata-only file (:mod:`ggufspec.llamacpp.gguf`)."""

    path: Path
    placement: Placement
    context: ContextOptions


@dataclass(frozen=True, slots=True)
class Spec:
    """Requests to answer with the devices of this machine and of ``rpc`` workers, or with so many ``paper_cards``.

    ``real`` loads the weights and allocates everything, to hold the dry run to the truth.
    """

    requests: tuple[Request, ...]
    rpc: tuple[str, ...] = ()
    paper_cards: int = 0
    real: bool = False


@dataclass(frozen=True, slots=True)
class Allocated:
    """Bytes on one device: weights, memory of the context (KV cache, recurrent state), compute buffer."""

    weights: int
    kv: int
    compute: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request takes on each device; ``HOST`` is everything in host memory. ``error`` says why it cannot be.

    ``output`` is the logits' buffer in host memory, which llama.cpp's own breakdown leaves out.
    """

    devices: dict[str, Allocated]
    output: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """An answer for each request, in order, and the names of the devices that layers are offloaded to.

    ``unable`` says why this llama.cpp can make no dry run; there are no answers then.
    """

    answers: tuple[Answer, ...]
    offload: tuple[str, ...]
    unable: str = ""


def ask(spec: Spec, *, verbose: bool = False) -> Result:
    """Answer ``spec`` in a child process.

    Raises:
        GgufspecError: an RPC worker does not answer, or llama.cpp died over it.
    """
    return worker.call(__name__, spec, Result, verbose=verbose)


def run(spec: Spec, emit: worker.Emit, stopping: threading.Event) -> Result:
    """Answer ``spec`` in this process."""
    del emit, stopping
    if spec.paper_cards and not devices.has_rpc():
        return Result((), (), "llama.cpp was built without RPC, which stands for a card that is not here")
    if not hasattr(load()._lib, _BREAKDOWN):
        return Result((), (), "this build of llama.cpp does not tell what it would allocate")
    for endpoint in spec.rpc:
        devices.add_rpc_worker(endpoint)
    if spec.paper_cards:
        _add_paper_cards(spec.paper_cards)
    answers = []
    with contextlib.ExitStack() as stack:
        loaded: tuple[Path, Placement, Any] | None = None
        for request in spec.requests:
            try:
                if loaded is None or loaded[:2] != (request.path, request.placement):
                    stack.close()
                    loaded = None
                    model = stack.enter_context(_model(request, dry=not spec.real))
                    loaded = (request.path, request.placement, model)
                answers.append(_answer(loaded[2], request))
            except ModelError as error:
                answers.append(Answer({}, error=error.message))
    return Result(tuple(answers), _offload())


def allocated(context: Context) -> dict[str, Allocated]:
    """What a context and its model's weights really take on each device, by llama.cpp's own count.

    Weights that are mapped from a file count with what lies between them in the file.
    """
    return _breakdown(context._handle)


@contextlib.contextmanager
def _model(request: Request, *, dry: bool) -> Iterator[Any]:
    lib = load()
    params, _alive = model_params(lib, request.placement)
    params.no_alloc = dry
    params.load_mode = lib.LLAMA_LOAD_MODE_NONE
    forget_complaints()
    model = lib.llama_model_load_from_file(os.fsencode(request.path), params)
    if not model:
        raise ModelError(f"{CANNOT_LOAD}: {complaints() or 'it gave no reason'}")
    try:
        yield model
    finally:
        lib.llama_model_free(model)


def _answer(model: Any, request: Request) -> Answer:
    lib = load()
    forget_complaints()
    context = lib.llama_init_from_model(model, context_params(lib, request.context, model))
    if not context:
        raise ModelError(f"llama.cpp makes no context: {complaints() or 'it gave no reason'}")
    try:
        vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        return Answer(_breakdown(context), output=4 * vocabulary * request.context.width)
    finally:
        lib.llama_free(context)


def _add_paper_cards(count: int) -> None:
    """Serve the CPU to ourselves as ``count`` devices; the server's thread ends with the process."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    threading.Thread(target=devices.serve_rpc, args=(endpoint, 1, ("CPU",) * count), daemon=True).start()
    for _ in range(1000):
        with contextlib.suppress(GgufspecError):
            return devices.add_rpc_worker(endpoint)
        time.sleep(0.005)
    raise GgufspecError("the worker of the simulated device does not start", "ggufspec doctor")


def _offload() -> tuple[str, ...]:
    return tuple(device.name for device in devices.devices() if device.kind in ("gpu", "igpu"))


# ---- llama_memory_breakdown: a std::map<buffer type, three sizes> by value ---------------------------------------


class _Map(ctypes.Structure):
    """std::map as it lies in memory, 48 bytes with libstdc++, 24 with libc++: five or fewer words are read."""

    _fields_: ClassVar = [("words", ctypes.c_size_t * 6)]


# Words of a tree node: (left, right, first of the value); libstdc++ bits/stl_tree.h, libc++ __tree
_LEFT, _RIGHT, _VALUE = (0, 1, 4) if sys.platform == "darwin" else (2, 3, 4)
_ROOT, _COUNT = (1, 2) if sys.platform == "darwin" else (2, 5)
_BREAKDOWN = "_Z26llama_get_memory_breakdownPK13llama_context"  # as GCC and Clang name it; MSVC does otherwise


def _breakdown(context: Any) -> dict[str, Allocated]:
    lib = load()._lib
    function = getattr(lib, _BREAKDOWN)
    function.restype, function.argtypes = _Map, [ctypes.c_void_p]
    words = function(context).words
    found: dict[str, Allocated] = {}
    nodes = list(_nodes(words[_ROOT]))
    assert len(nodes) == words[_COUNT], "std::map is laid out otherwise here"
    for buffer_type, *sizes in nodes:
        name = _device_of(buffer_type)
        before = found.get(name, Allocated(0, 0, 0))
        found[name] = Allocated(before.weights + sizes[0], before.kv + sizes[1], before.compute + sizes[2])
    return found


def _device_of(buffer_type: int) -> str:
    """The device of a buffer type; ``HOST`` for anything in host memory, pinned and repacked weights too."""
    lib = load()._lib
    lib.ggml_backend_buft_is_host.restype, lib.ggml_backend_buft_is_host.argtypes = ctypes.c_bool, [ctypes.c_void_p]
    device = lib.ggml_backend_buft_get_device
    device.restype, device.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    if lib.ggml_backend_buft_is_host(buffer_type) or not (owner := device(buffer_type)):
        return HOST
    naming = lib.ggml_backend_dev_name
    naming.restype, naming.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    name: bytes = naming(owner)
    return name.decode()


def _nodes(address: int) -> Iterator[tuple[int, int, int, int]]:
    """(buffer type, weights, context, compute) of every node under ``address``."""
    if not address:
        return
    words = (ctypes.c_size_t * 8).from_address(address)
    yield from _nodes(words[_LEFT])
    yield (words[_VALUE], words[_VALUE + 1], words[_VALUE + 2], words[_VALUE + 3])
    yield from _nodes(words[_RIGHT])
