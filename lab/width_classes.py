"""A job that finds which batch sizes of a placed model agree to the bit, and which of them strict mode uses."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ggufspec import child
from ggufspec.decoding.batch_sizes import BatchSizes, classes, strict_batch_sizes
from ggufspec.decoding.options import STRICT_IMPOSSIBLE
from ggufspec.errors import ModelError
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions, Placement


@dataclass(frozen=True, slots=True)
class Spec:
    """A model, its placement, and the largest batch size to compare."""

    target: Path
    placement: Placement
    context: ContextOptions
    limit: int
    rpc: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """The classes, that of the largest size first, and strict mode's sizes; none if it is refused."""

    classes: tuple[BatchSizes, ...]
    strict: BatchSizes
    refusal: str = ""


def run(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Result:
    """Compare in this process; the only progress is the event ``comparing``."""
    devices.add_rpc_workers(spec.rpc)
    with Model(spec.target, spec.placement) as model, closing(Context(model, spec.context)) as context:
        emit({"event": "comparing", "limit": spec.limit})
        found = classes(context, spec.limit)
        if stopping.is_set():
            return Result(found, (), "it was stopped")
        try:
            return Result(found, strict_batch_sizes(context, spec.limit))
        except ModelError as error:
            if STRICT_IMPOSSIBLE not in error.message:
                raise
            return Result(found, (), error.message)


def measure(spec: Spec, *, on_event: child.Emit | None = None, verbose: bool = False) -> Result:
    """Compare in a child process.

    Raises:
        GgufspecError: the model does not load, llama.cpp died.
        Interrupted: Ctrl-C.
    """
    return child.call(__name__, spec, Result, on_event=on_event, verbose=verbose)
