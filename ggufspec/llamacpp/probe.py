"""Probe of the installed llama.cpp's capabilities, in a child process because a broken driver may crash it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ggufspec import child
from ggufspec.llamacpp import chat_library, staging
from ggufspec.llamacpp.devices import Device, add_rpc_workers, backends, devices
from ggufspec.llamacpp.library import load_library, system_info


@dataclass(frozen=True, slots=True)
class ProbeJob:
    """RPC workers whose devices the probe includes."""

    rpc: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """llama.cpp's capabilities."""

    backends: tuple[str, ...]  # compiled-in backends
    devices: tuple[Device, ...]
    system: str = ""  # llama.cpp's one-line description of its build
    lacks: dict[str, str] = field(default_factory=dict)  # by drafter, a function that it needs but llama.cpp lacks
    without_device: tuple[str, ...] = ()  # compiled-in backends that find no device
    without_chat: str = ""  # why llama.cpp's chat library cannot be used; empty if it can


def run(spec: ProbeJob, emit: child.Emit, stopping: threading.Event) -> ProbeResult:
    del emit, stopping
    add_rpc_workers(spec.rpc)
    lacks = {drafter: absent for drafter in staging.NEEDED if (absent := staging.missing_function(drafter))}
    found = tuple(backends())
    # Without a device ggml-vulkan.cpp does not register its backend
    silent = ("Vulkan",) if "Vulkan" not in found and hasattr(load_library()._lib, "ggml_backend_vk_reg") else ()
    missing = chat_library.why_chat_library_is_missing()
    without_chat = missing.message if missing else ""
    return ProbeResult(found, tuple(devices()), system_info(), lacks, silent, without_chat)


def inspect(rpc: tuple[str, ...] = ()) -> ProbeResult:
    """Probe in a child process, with the workers at ``rpc`` (host:port) added.

    Raises:
        GgufspecError: llama-cpp-python cannot be loaded, or a worker does not answer.
        ChildError: llama.cpp crashed.
    """
    return child.call(__name__, ProbeJob(rpc), ProbeResult)
