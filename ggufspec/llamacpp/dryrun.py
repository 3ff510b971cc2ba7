"""Dry runs: what llama.cpp itself would allocate, by its own loader and graph builder with ``no_alloc``.

Runs in a child process (:mod:`ggufspec.child`). **Simulated devices** stand in for GPUs that are not installed: an RPC
worker on loopback inside the child, which llama.cpp treats as a GPU and which is never asked for memory
(:mod:`ggufspec.llamacpp.simulated`). They need a llama.cpp with RPC, which no prebuilt one has; without it everything
is allocated on the CPU. A simulated device does not show what a driver adds: its context, scratch for a quantised KV
cache, buffers of fused operations (:func:`ggufspec.planning.memory.f16_scratch_bytes`, ``fused_bytes``).

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
from ggufspec.llamacpp.library import bound, complaints, forget_complaints, load
from ggufspec.llamacpp.options import HOST, ContextOptions, Placement, parse_override
from ggufspec.llamacpp.params import context_params, head_params, load_model, model_params

if TYPE_CHECKING:
    from ggufspec.llamacpp.head import Head
    from ggufspec.llamacpp.model import Context

CANNOT_LOAD = "llama.cpp cannot load it"  # start of an answer's error; other errors are the context's


@dataclass(frozen=True, slots=True)
class Run:
    """One model, placed and with one context; ``path`` may be a metadata-only GGUF (:mod:`ggufspec.llamacpp.gguf`).

    With ``target`` it is a head on that: MTP blocks if ``placement.mtp``, else EAGLE-3. If file and placement are the
    target's own, so are the weights.
    """

    path: Path
    placement: Placement
    context: ContextOptions
    target: Run | None = None


@dataclass(frozen=True, slots=True)
class Spec:
    """The devices: this machine's and those of ``rpc`` workers, or a number of ``simulated_devices``.

    ``real`` loads the weights and allocates everything, to compare dry runs with reality. ``names`` are the device
    names in placements, if they differ from llama.cpp's own.
    """

    rpc: tuple[str, ...] = ()
    simulated_devices: int = 0
    real: bool = False
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """The devices that layers are offloaded to, and why only compute buffers are known, or empty.

    If ``offload`` is empty, although devices were to be simulated, all compute buffers are the CPU's.
    """

    offload: tuple[str, ...]
    limits: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """Dry runs to make; consecutive ones with the same model and placement load it once."""

    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Allocated:
    """Bytes on one device: weights, memory of the context (KV cache, recurrent state), compute buffer."""

    weights: int
    kv: int
    compute: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Bytes of one run by device; ``HOST`` is everything in host memory. ``error`` says why it is refused.

    ``output`` is the logits' buffer in host memory, which llama.cpp's own breakdown leaves out.
    """

    devices: dict[str, Allocated]
    output: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer per run, in order."""

    answers: tuple[Answer, ...]


class Session:
    """A child process for dry runs, started with the first one; ``ready`` is known from then on."""

    def __init__(self, spec: Spec, *, verbose: bool = False) -> None:
        self.ready = Ready(())
        self._spec = spec
        self._session = child.Session(verbose=verbose)

    def ask(self, runs: Sequence[Run]) -> tuple[Answer, ...]:
        """Return one answer per run.

        Raises:
            GgufspecError: an RPC worker does not answer, or llama.cpp died.
        """
        if not self._session.is_open:
            self.ready = self._session.open(__name__, self._spec, Ready)
        return self._session.ask(Request(tuple(runs)), Reply).answers

    def close(self) -> None:
        self._session.close()


def ask(spec: Spec, runs: Sequence[Run]) -> tuple[Answer, ...]:
    """Return one answer per run, from a child process of their own; raises as :meth:`Session.ask` does."""
    with contextlib.closing(Session(spec)) as session:
        return session.ask(runs)


def build() -> str:
    """Identify the installed llama.cpp: its version, and size and time of its library."""
    module = importlib.util.find_spec("llama_cpp")
    folder = Path(module.origin).parent / "lib" if module and module.origin else Path()
    stats = [path.stat() for path in sorted(folder.glob("*llama.*"))]
    return " ".join([importlib.metadata.version("llama-cpp-python"), *(f"{s.st_size} {s.st_mtime_ns}" for s in stats)])


# ---- in the child --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Iterator[_Serving]:
    del emit, stopping
    limits = ""
    if not hasattr(load()._lib, _BREAKDOWN):
        limits = "this build of llama.cpp reports its compute buffers alone"
    devices.add_rpc_workers(spec.rpc)
    if not spec.simulated_devices:
        names = [device.name for device in devices.offloading(devices.devices())]
    elif devices.has_rpc():
        names = simulated.add(spec.simulated_devices)
    else:
        names, limits = [], "llama.cpp was built without RPC, which simulates a card that is not here"
    yield _Serving(spec, Ready(tuple(names), limits))


class _Serving:
    """The child's side of :class:`Session`."""

    def __init__(self, spec: Spec, ready: Ready) -> None:
        self.ready = ready
        self._dry = not spec.real
        self._simulated = ready.offload if spec.simulated_devices else ()  # llama.cpp chooses among real devices itself
        self._on_host = bool(spec.simulated_devices and not ready.offload)
        self._logged = _ComputeBuffers(ready.offload) if ready.limits else None
        self._named = dict(zip(spec.names, ready.offload, strict=False))

    def answer(self, request: Request, emit: child.Emit, stopping: threading.Event) -> Reply:
        """Make the runs; load a model that several consecutive runs share once."""
        del emit, stopping
        answers: list[Answer] = []
        for (path, placement), group in groupby(request.runs, lambda run: (run.path, run.placement)):
            runs = list(group)
            try:
                with self._model(path, placement) as model:
                    answers += [self._answer(model, run) for run in runs]
            except ModelError as error:
                answers += [Answer({}, error=error.message) for _ in runs]
        return Reply(tuple(answers))

    def _answer(self, model: Any, run: Run) -> Answer:
        try:
            return self._context(model, run.context) if run.target is None else self._head(model, run, run.target)
        except ModelError as error:
            return Answer({}, error=error.message)

    @contextlib.contextmanager
    def _model(self, path: Path, placement: Placement) -> Iterator[Any]:
        lib = load()
        placement = Placement(mtp=placement.mtp) if self._on_host else self._here(placement)
        params, _alive = model_params(lib, placement, self._simulated)
        params.no_alloc = self._dry
        params.load_mode = lib.LLAMA_LOAD_MODE_NONE
        if self._dry and not self.ready.offload:  # repacked weights crash a dry run without a device
            params.use_extra_bufts = False
        forget_complaints()
        model = load_model(lib, path, params)
        if not model:
            raise ModelError(f"{CANNOT_LOAD}: {complaints()}")
        try:
            yield model
        finally:
            lib.llama_model_free(model)

    def _here(self, placement: Placement) -> Placement:
        """Return ``placement`` with llama.cpp's names of the devices."""
        pairs = map(parse_override, placement.override_tensor)
        here = tuple(f"{pattern}={self._named.get(device, device)}" for pattern, device in pairs)
        return replace(placement, override_tensor=here)

    def _context(self, model: Any, options: ContextOptions) -> Answer:
        lib = load()
        if self._on_host and options.flash_attn == "auto" and lib.llama_model_is_hybrid(model):
            options = replace(options, flash_attn="off")  # a hybrid that is partly on a GPU may not use it
        return self._allocated(model, context_params(lib, options, model), options.width)

    def _head(self, model: Any, run: Run, on: Run) -> Answer:
        """Make a head's context together with its target's, which it needs."""
        lib = load()
        own = (run.path, run.placement) == (on.path, on.placement)
        with (
            contextlib.nullcontext(model) if own else self._model(on.path, on.placement) as target,
            _made(target, context_params(lib, on.context, target)) as context,
        ):
            if self._logged:
                self._logged.take()
            params = head_params(lib, run.context, context, mtp=run.placement.mtp)
            answer = self._allocated(model, params, run.context.width)
        if own:
            answer = replace(answer, devices={n: replace(one, weights=0) for n, one in answer.devices.items()})
        return answer

    def _allocated(self, model: Any, params: Any, width: int) -> Answer:
        lib = load()
        with _made(model, params) as context:
            vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
            found = self._logged.take() if self._logged else _breakdown(context)
            return Answer(found, output=4 * vocabulary * width)


@contextlib.contextmanager
def _made(model: Any, params: Any) -> Iterator[Any]:
    lib = load()
    forget_complaints()
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise ModelError(f"llama.cpp makes no context: {complaints()}")
    try:
        yield context
    finally:
        lib.llama_free(context)


class _ComputeBuffers(logging.Handler):
    """Reads compute buffers from llama.cpp's log, which rounds to 0.01 MiB: src/llama-context.cpp, sched_reserve."""

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

    def take(self) -> dict[str, Allocated]:
        """Return the buffers of the context just made."""
        found, self._found = self._found, {}
        return {name: Allocated(0, 0, size) for name, size in found.items()}


def allocated(context: Context | Head) -> dict[str, Allocated]:
    """Return what a context and its model's weights really take on each device, by llama.cpp's own count.

    Weights mapped from a file include the gaps between them in the file.
    """
    return _breakdown(context._handle)


# ---- llama_memory_breakdown: a std::map<buffer type, three sizes> by value ---------------------------------------


class Map(ctypes.Structure):
    """Memory layout of std::map, 48 bytes with libstdc++, 24 with libc++: at most five words are read."""

    _fields_: ClassVar = [("words", ctypes.c_size_t * 6)]


# Words of a tree node: (left, right, first of the value); libstdc++ bits/stl_tree.h, libc++ __tree
_LEFT, _RIGHT, _VALUE = (0, 1, 4) if sys.platform == "darwin" else (2, 3, 4)
_ROOT, _COUNT = (1, 2) if sys.platform == "darwin" else (2, 5)
_BREAKDOWN = "_Z26llama_get_memory_breakdownPK13llama_context"  # GCC's and Clang's mangling; MSVC's differs


def _breakdown(context: Any) -> dict[str, Allocated]:
    functions: dict[str, tuple[Any, list[Any]]] = {
        _BREAKDOWN: (Map, [ctypes.c_void_p]),
        "ggml_backend_buft_is_host": (ctypes.c_bool, [ctypes.c_void_p]),
        "ggml_backend_buft_get_device": (ctypes.c_void_p, [ctypes.c_void_p]),
    }
    lib = bound(load()._lib, functions)
    nodes = map_nodes(getattr(lib, _BREAKDOWN)(context), 4)
    found: dict[str, Allocated] = {}
    for buffer_type, *sizes in nodes:
        # Pinned and repacked weights are in host memory, too
        owner = None if lib.ggml_backend_buft_is_host(buffer_type) else lib.ggml_backend_buft_get_device(buffer_type)
        name = devices.name_of(owner) if owner else HOST
        before = found.get(name, Allocated(0, 0, 0))
        found[name] = Allocated(before.weights + sizes[0], before.kv + sizes[1], before.compute + sizes[2])
    return found


def map_nodes(found: Map, count: int) -> list[tuple[int, ...]]:
    """Return the first ``count`` words of every key with its value."""
    nodes = list(_nodes(found.words[_ROOT], count))
    assert len(nodes) == found.words[_COUNT], "std::map is laid out otherwise here"
    return nodes


def _nodes(address: int, count: int) -> Iterator[tuple[int, ...]]:
    if not address:
        return
    words = (ctypes.c_size_t * (_VALUE + count)).from_address(address)
    yield from _nodes(words[_LEFT], count)
    yield tuple(words[_VALUE : _VALUE + count])
    yield from _nodes(words[_RIGHT], count)
