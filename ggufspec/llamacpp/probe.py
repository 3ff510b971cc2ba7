"""What the llama.cpp that is installed can do; a job for a child process, since a broken driver may end it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ggufspec import child
from ggufspec.llamacpp import chat_library, staging
from ggufspec.llamacpp.devices import Device, add_rpc_worker, backends, devices
from ggufspec.llamacpp.library import load, system_info


@dataclass(frozen=True, slots=True)
class Spec:
    """The RPC workers whose devices are to be seen too."""

    rpc: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """The backends that are compiled in, the devices that they find, and llama.cpp's own line about its build.

    ``lacks`` has the function that a kind of head would need and this build does not have, by drafter;
    ``without_device`` the backends that are compiled in and absent from ``backends``, since they find no driver;
    ``without_chat`` why llama.cpp's chat library cannot be used.
    """

    backends: tuple[str, ...]
    devices: tuple[Device, ...]
    system: str = ""
    lacks: dict[str, str] = field(default_factory=dict)
    without_device: tuple[str, ...] = ()
    without_chat: str = ""


def run(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Result:
    """Load llama.cpp and ask it."""
    del emit, stopping
    for endpoint in spec.rpc:
        add_rpc_worker(endpoint)
    lacks = {drafter: absent for drafter in staging.NEEDED if (absent := staging.missing(drafter))}
    found = tuple(backends())
    # ggml-vulkan.cpp registers nothing where there is no device
    silent = ("Vulkan",) if "Vulkan" not in found and hasattr(load()._lib, "ggml_backend_vk_reg") else ()
    missing = chat_library.missing()
    without_chat = missing.message if missing else ""
    return Result(found, tuple(devices()), system_info(), lacks, silent, without_chat)


def inspect(rpc: tuple[str, ...] = ()) -> Result:
    """Load llama.cpp in a child process and ask it, with the workers at ``rpc`` (host:port) added.

    Raises:
        GgufspecError: llama-cpp-python cannot be loaded, or a worker does not answer.
        ChildError: llama.cpp ended the child.
    """
    return child.call(__name__, Spec(rpc), Result)
