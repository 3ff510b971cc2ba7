"""Probes what the installed llama.cpp can do, in a child process because a broken driver may end it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ggufspec import child
from ggufspec.llamacpp import chat_library, staging
from ggufspec.llamacpp.devices import Device, add_rpc_workers, backends, devices
from ggufspec.llamacpp.library import load, system_info


@dataclass(frozen=True, slots=True)
class Spec:
    """RPC workers whose devices to include."""

    rpc: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """llama.cpp's capabilities."""

    backends: tuple[str, ...]  # compiled-in backends
    devices: tuple[Device, ...]
    system: str = ""  # llama.cpp's own line about its build
    lacks: dict[str, str] = field(default_factory=dict)  # by drafter, the function that is missing for its heads
    without_device: tuple[str, ...] = ()  # compiled-in backends that find no driver
    without_chat: str = ""  # why its chat library cannot be used


def run(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Result:
    del emit, stopping
    add_rpc_workers(spec.rpc)
    lacks = {drafter: absent for drafter in staging.NEEDED if (absent := staging.missing(drafter))}
    found = tuple(backends())
    # ggml-vulkan.cpp registers nothing without a device
    silent = ("Vulkan",) if "Vulkan" not in found and hasattr(load()._lib, "ggml_backend_vk_reg") else ()
    missing = chat_library.missing()
    without_chat = missing.message if missing else ""
    return Result(found, tuple(devices()), system_info(), lacks, silent, without_chat)


def inspect(rpc: tuple[str, ...] = ()) -> Result:
    """Probe in a child process, with the workers at ``rpc`` (host:port) added.

    Raises:
        GgufspecError: llama-cpp-python cannot be loaded, or a worker does not answer.
        ChildError: llama.cpp ended the child.
    """
    return child.call(__name__, Spec(rpc), Result)
