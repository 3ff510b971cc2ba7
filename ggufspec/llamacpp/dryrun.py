"""Dry runs, which report what llama.cpp would allocate by running its own loader and graph builder with ``no_alloc``.

They run in a child process (:mod:`ggufspec.child`). A **simulated device** stands in for a GPU that is not installed:
an RPC worker on loopback inside the child, which llama.cpp treats as a GPU and never asks for memory
(:mod:`ggufspec.llamacpp.simulated`). This needs a llama.cpp with RPC, which prebuilt packages lack; without RPC
everything is allocated on the CPU. A simulated device omits memory that a driver adds: its context, scratch memory for
a quantised KV cache, and buffers for fused operations (``f16_scratch_bytes`` and ``fused_bytes`` in planning.memory).

Source: ``common_get_device_memory_data`` in common/fit.cpp, ``llama_get_memory_breakdown`` in src/llama-ext.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import logging
import math
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ggufspec import child
from ggufspec.errors import ModelError
from ggufspec.llamacpp import devices, library, simulated
from ggufspec.llamacpp.library import bound, complaints, forget_complaints, load_library
from ggufspec.llamacpp.options import HOST, ContextOptions, Placement, load_hint, parse_override
from ggufspec.llamacpp.params import context_params, head_params, load_model, model_params

if TYPE_CHECKING:
    from ggufspec.llamacpp.head import Head
    from ggufspec.llamacpp.model import Context

CANNOT_LOAD = "llama.cpp cannot load it"  # prefix of loading errors; all other errors come from creating the context


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model with a placement and a context; ``path`` may be a metadata-only GGUF (:mod:`ggufspec.llamacpp.gguf`).

    With ``target`` the model is a head: MTP blocks if ``placement.mtp``, otherwise EAGLE-3. It shares the target's
    weights if file and placement are the same.
    """

    path: Path
    placement: Placement
    context: ContextOptions
    target: PlacedModel | None = None


@dataclass(frozen=True, slots=True)
class DryRunJob:
    """Devices for dry runs: this machine's and the ``rpc`` workers', or ``simulated_devices`` simulated devices.

    ``real`` loads the weights and allocates everything, to check dry runs against reality. ``names`` are the device
    names used in placements, if they differ from llama.cpp's.
    """

    rpc: tuple[str, ...] = ()
    simulated_devices: int = 0
    real: bool = False
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DryRunReady:
    """Devices that layers are offloaded to; ``limits`` says why only compute buffers are known, or is empty.

    If ``offload`` is empty although devices should be simulated, all compute buffers are on the CPU.
    """

    offload: tuple[str, ...]
    limits: str = ""


@dataclass(frozen=True, slots=True)
class DryRunRequest:
    """Dry runs to make; consecutive runs with the same model and placement share one load."""

    runs: tuple[PlacedModel, ...]


@dataclass(frozen=True, slots=True)
class AllocatedBytes:
    """Bytes on one device: weights, context memory (KV cache, recurrent state) and compute buffer."""

    weights: int
    kv: int
    compute: int


@dataclass(frozen=True, slots=True)
class DryRunBytes:
    """Memory use of one run, by device (``HOST``: all host memory). ``error`` says why llama.cpp refused the run.

    ``output`` is the logits buffer in host memory, which llama.cpp's own breakdown omits.
    """

    devices: dict[str, AllocatedBytes]
    output: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class DryRunReply:
    """One answer per dry run, in order."""

    answers: tuple[DryRunBytes, ...]


class DryRunSession:
    """A child process for dry runs, started by the first run; until then ``ready`` is empty."""

    def __init__(self, spec: DryRunJob, *, verbose: bool = False) -> None:
        self.ready = DryRunReady(())
        self._spec = spec
        self._session = child.Session(verbose=verbose)

    def ask(self, runs: Sequence[PlacedModel]) -> tuple[DryRunBytes, ...]:
        """Return one answer per dry run.

        Raises:
            GgufspecError: an RPC worker does not answer, or llama.cpp crashed.
        """
        if not self._session.is_open:
            self.ready = self._session.open(__name__, self._spec, DryRunReady)
        return self._session.ask(DryRunRequest(tuple(runs)), DryRunReply).answers

    def close(self) -> None:
        self._session.close()


def ask(spec: DryRunJob, runs: Sequence[PlacedModel]) -> tuple[DryRunBytes, ...]:
    """Return one answer per run, from a new child process; raise as :meth:`DryRunSession.ask` does."""
    with contextlib.closing(DryRunSession(spec)) as session:
        return session.ask(runs)


def llama_build() -> str:
    """Return the installed llama.cpp's version with its libraries' sizes and modification times, which identify it."""
    module = importlib.util.find_spec("llama_cpp")
    folder = Path(module.origin).parent / "lib" if module and module.origin else Path()
    stats = [path.stat() for path in sorted(folder.glob("*llama.*"))]
    return " ".join([importlib.metadata.version("llama-cpp-python"), *(f"{s.st_size} {s.st_mtime_ns}" for s in stats)])


def check_loads(path: Path, name: str) -> None:
    """Load a model in this process, on the CPU and without weights; raise ModelError if llama.cpp cannot load it.

    ``path`` may be a file with only a header; error messages call the model ``name``.
    """
    lib = load_library()
    params = lib.llama_model_default_params()
    none = (ctypes.c_void_p * 1)()  # use no devices, so that no GPU driver starts
    params.devices = ctypes.cast(none, ctypes.c_void_p)
    params.n_gpu_layers, params.load_mtp = 0, False
    params.no_alloc, params.use_extra_bufts = True, False
    params.load_mode = lib.LLAMA_LOAD_MODE_NONE
    try:
        lib.llama_model_free(_load(lib, path, params))
    except ModelError as error:
        raise ModelError(f"{name}: {error.message}", load_hint(error.message)) from None


def _load(lib: Any, path: Path, params: Any) -> Any:
    """Return llama.cpp's handle for a model; raise ModelError with its reason if it cannot load the model."""
    forget_complaints()
    model = load_model(lib, path, params)
    if not model:
        raise ModelError(f"{CANNOT_LOAD}: {complaints()}")
    return model


# ---- in the child --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(spec: DryRunJob, emit: child.Emit, stopping: threading.Event) -> Iterator[_Serving]:
    del emit, stopping
    limits = ""
    if not hasattr(load_library()._lib, _BREAKDOWN):
        limits = "this build of llama.cpp reports only its compute buffers"
    devices.add_rpc_workers(spec.rpc)
    if not spec.simulated_devices:
        names = [device.name for device in devices.offloading(devices.devices())]
    elif devices.has_rpc():
        names = simulated.add(spec.simulated_devices)
    else:
        names, limits = [], "llama.cpp was built without RPC, which simulating a GPU requires"
    yield _Serving(spec, DryRunReady(tuple(names), limits))


class _Serving:
    """The child's side of :class:`DryRunSession`."""

    def __init__(self, spec: DryRunJob, ready: DryRunReady) -> None:
        self.ready = ready
        self._dry = not spec.real
        self._simulated = ready.offload if spec.simulated_devices else ()  # llama.cpp chooses among real devices itself
        self._on_host = bool(spec.simulated_devices and not ready.offload)
        self._logged = _ComputeBuffers(ready.offload) if ready.limits else None
        self._named = dict(zip(spec.names, ready.offload, strict=False))

    def answer(self, request: DryRunRequest, emit: child.Emit, stopping: threading.Event) -> DryRunReply:
        """Make the dry runs; load a model once for consecutive runs that share it."""
        del emit, stopping
        answers: list[DryRunBytes] = []
        for (path, placement), group in groupby(request.runs, lambda run: (run.path, run.placement)):
            runs = list(group)
            try:
                with self._model(path, placement) as model:
                    answers += [self._answer(model, run) for run in runs]
            except ModelError as error:
                answers += [DryRunBytes({}, error=error.message) for _ in runs]
        return DryRunReply(tuple(answers))

    def _answer(self, model: Any, run: PlacedModel) -> DryRunBytes:
        try:
            return self._context(model, run.context) if run.target is None else self._head(model, run, run.target)
        except ModelError as error:
            return DryRunBytes({}, error=error.message)

    @contextlib.contextmanager
    def _model(self, path: Path, placement: Placement) -> Iterator[Any]:
        lib = load_library()
        placement = Placement(mtp=placement.mtp) if self._on_host else self._here(placement)
        params, _alive = model_params(lib, placement, self._simulated)
        params.no_alloc = self._dry
        params.load_mode = lib.LLAMA_LOAD_MODE_NONE
        if self._dry and not self.ready.offload:  # repacked weights crash a dry run without a device
            params.use_extra_bufts = False
        model = _load(lib, path, params)
        try:
            yield model
        finally:
            lib.llama_model_free(model)

    def _here(self, placement: Placement) -> Placement:
        """Return ``placement`` with llama.cpp's device names."""
        pairs = map(parse_override, placement.override_tensor)
        here = tuple(f"{pattern}={self._named.get(device, device)}" for pattern, device in pairs)
        return replace(placement, override_tensor=here)

    def _context(self, model: Any, options: ContextOptions) -> DryRunBytes:
        lib = load_library()
        if self._on_host and options.flash_attn == "auto" and lib.llama_model_is_hybrid(model):
            options = replace(options, flash_attn="off")  # a hybrid model partly on a GPU may not use flash attention
        return self._allocated(model, context_params(lib, options, model), options.max_outputs)

    def _head(self, model: Any, run: PlacedModel, on: PlacedModel) -> DryRunBytes:
        """Return the bytes of a head's context, for which its target's context must be created first."""
        lib = load_library()
        own = (run.path, run.placement) == (on.path, on.placement)
        with (
            contextlib.nullcontext(model) if own else self._model(on.path, on.placement) as target,
            _made(target, context_params(lib, on.context, target)) as context,
        ):
            if self._logged:
                self._logged.take()
            params = head_params(lib, run.context, context, mtp=run.placement.mtp)
            answer = self._allocated(model, params, run.context.max_outputs)
        if own:
            answer = replace(answer, devices={n: replace(one, weights=0) for n, one in answer.devices.items()})
        return answer

    def _allocated(self, model: Any, params: Any, outputs: int) -> DryRunBytes:
        lib = load_library()
        with _made(model, params) as context:
            vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
            found = self._logged.take() if self._logged else _breakdown(context)
            return DryRunBytes(found, output=4 * vocabulary * outputs)


@contextlib.contextmanager
def _made(model: Any, params: Any) -> Iterator[Any]:
    lib = load_library()
    forget_complaints()
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise ModelError(f"llama.cpp cannot create the context: {complaints()}")
    try:
        yield context
    finally:
        lib.llama_free(context)


class _ComputeBuffers(logging.Handler):
    """Log handler that collects compute-buffer sizes, in steps of 0.01 MiB (sched_reserve in src/llama-context.cpp)."""

    def __init__(self, offload: Sequence[str]) -> None:
        super().__init__(logging.INFO)
        self._offload = offload
        self._found: dict[str, int] = {}
        library.logger.addHandler(self)
        library.logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.search(r"(\S+) +compute buffer size = +([\d.]+) MiB", record.getMessage()):
            device = found[1].partition("[")[0]
            name = device if device in self._offload else HOST
            self._found[name] = self._found.get(name, 0) + math.ceil((float(found[2]) + 0.005) * 2**20)

    def take(self) -> dict[str, AllocatedBytes]:
        """Return the compute buffers of the context just created."""
        found, self._found = self._found, {}
        return {name: AllocatedBytes(0, 0, size) for name, size in found.items()}


def allocated(context: Context | Head) -> dict[str, AllocatedBytes]:
    """Return the bytes that a context and its model's weights take on each device, as counted by llama.cpp.

    Weights mapped from a file include the gaps between them in the file.
    """
    return _breakdown(context._handle)


# ---- llama_memory_breakdown: a std::map<buffer type, three sizes> by value ---------------------------------------


class StdMap(ctypes.Structure):
    """Memory layout of std::map, 48 bytes with libstdc++ and 24 with libc++; only the root and the count are read."""

    _fields_: ClassVar = [("words", ctypes.c_size_t * 6)]


# Word offsets in a tree node: left, right, start of the pair (libstdc++ bits/stl_tree.h, libc++ __tree)
_LEFT, _RIGHT, _VALUE = (0, 1, 4) if sys.platform == "darwin" else (2, 3, 4)
_ROOT, _COUNT = (1, 2) if sys.platform == "darwin" else (2, 5)
_BREAKDOWN = "_Z26llama_get_memory_breakdownPK13llama_context"  # GCC's and Clang's mangling; MSVC's differs


def _breakdown(context: Any) -> dict[str, AllocatedBytes]:
    functions: dict[str, tuple[Any, list[Any]]] = {
        _BREAKDOWN: (StdMap, [ctypes.c_void_p]),
        "ggml_backend_buft_is_host": (ctypes.c_bool, [ctypes.c_void_p]),
        "ggml_backend_buft_get_device": (ctypes.c_void_p, [ctypes.c_void_p]),
    }
    lib = bound(load_library()._lib, functions)
    nodes = map_nodes(getattr(lib, _BREAKDOWN)(context), 4)
    found: dict[str, AllocatedBytes] = {}
    for buffer_type, *sizes in nodes:
        # Pinned and repacked weights are in host memory, too
        owner = None if lib.ggml_backend_buft_is_host(buffer_type) else lib.ggml_backend_buft_get_device(buffer_type)
        name = devices.name_of(owner) if owner else HOST
        before = found.get(name, AllocatedBytes(0, 0, 0))
        found[name] = AllocatedBytes(before.weights + sizes[0], before.kv + sizes[1], before.compute + sizes[2])
    return found


def map_nodes(found: StdMap, count: int) -> list[tuple[int, ...]]:
    """Return the first ``count`` words of each (key, value) pair."""
    nodes = list(_nodes(found.words[_ROOT], count))
    assert len(nodes) == found.words[_COUNT], "std::map has an unexpected layout"
    return nodes


def _nodes(address: int, count: int) -> Iterator[tuple[int, ...]]:
    if not address:
        return
    words = (ctypes.c_size_t * (_VALUE + count)).from_address(address)
    yield from _nodes(words[_LEFT], count)
    yield tuple(words[_VALUE : _VALUE + count])
    yield from _nodes(words[_RIGHT], count)
