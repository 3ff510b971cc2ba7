"""What the llama.cpp that is installed can do; a job for a child process, since a broken driver may end it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ggufspec import worker
from ggufspec.llamacpp import devices


@dataclass(frozen=True, slots=True)
class Spec:
    """Nothing to say."""


@dataclass(frozen=True, slots=True)
class Result:
    """The backends that are compiled in, and the devices that they find."""

    backends: tuple[str, ...]
    devices: tuple[devices.Device, ...]


def run(_spec: Spec, _emit: worker.Emit, _stopping: threading.Event) -> Result:
    """Load llama.cpp and ask it."""
    return Result(tuple(devices.backends()), tuple(devices.devices()))


def inspect() -> Result:
    """Load llama.cpp in a child process and ask it.

    Raises:
        GgufspecError: llama-cpp-python cannot be loaded.
        WorkerError: llama.cpp ended the child.
    """
    return worker.call(__name__, Spec(), Result)
