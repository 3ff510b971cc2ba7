"""The image projector next to a target: found by name, its header read by range, and its memory.

llama.cpp's parser and its graph of the projector run in a child process.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ggufspec import child
from ggufspec.errors import ChildError, ModelError
from ggufspec.files.write import scratch
from ggufspec.llamacpp import devices, gguf, mmproj, simulated
from ggufspec.llamacpp.library import load
from ggufspec.models.header import ModelHeader
from ggufspec.models.headers import MAX_MEMORY, read_prefix
from ggufspec.models.hub import client
from ggufspec.models.hub.choice import parse
from ggufspec.models.locate import ModelFiles, Source, is_url, locate

_USUAL = ("f16", "bf16", "q8_0", "f32")  # preferred types, if a repository has several


@dataclass(frozen=True, slots=True)
class Spec:
    """A projector; its graph is on ``device``, or on the CPU. A device that does not exist is simulated."""

    found: ModelFiles
    device: str = ""
    simulated: bool = False
    rpc: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """Memory of a projector on the GPU and the host, and the possible widths of its output."""

    name: str
    card_bytes: int
    host_bytes: int
    widths: tuple[int, ...]


def source(text: str) -> Source:
    """Return the file that ``--mmproj`` names: a path, a URL, ``USER/REPO`` or ``USER/REPO/FILE``, with ``@REVISION``.

    Raises:
        GgufspecError: no such repository, or it has no projector.
    """
    count = text.partition("@")[0].count("/")
    if is_url(text) or Path(text).exists() or count not in (1, 2) or text.startswith((".", "/", "~")):
        return text
    name = parse(text)
    file = name.model or client.choose(name.repo, name.revision, lambda files: choose(name.repo, files))
    return client.HubFile(name.repo, file, name.revision)


def choose(repo: str, files: Sequence[str]) -> str:
    """Choose the projector of a repository, preferably F16; ModelError if it has none. Pure."""
    found = sorted(file for file in files if file.endswith(".gguf") and "mmproj" in file.lower())
    if not found:
        raise ModelError(f"{repo} has no mmproj-….gguf", f"see {client.page(repo)}/tree/main")
    for kind in _USUAL:
        for file in found:
            if kind in file.lower().removesuffix(".gguf").replace(".", "-").split("-"):
                return file
    return found[0]


def measure(
    text: str, device: str = "", *, simulated: bool = False, rpc: tuple[str, ...] = (), verbose: bool = False
) -> Result:
    """Measure the memory of the projector that ``--mmproj`` names.

    Args:
        text: as given.
        device: device of its graph, by llama.cpp's name; empty: the CPU.
        simulated: True if the device does not exist.
        rpc: workers, one of whose devices it may be.
        verbose: let llama.cpp's log through.

    Raises:
        ModelError: it is missing, damaged, or no projector.
        GgufspecError: there is no network.
    """
    found = locate(source(text))
    try:
        return child.call(__name__, Spec(found, device, simulated, rpc), Result, verbose=verbose)
    except ChildError as error:
        raise ChildError(f"llama.cpp died over {found.origin}: {error.message}", "download it again") from None


def check(projector: Result, target: ModelHeader) -> None:
    """Refuse another model's projector with a ModelError: no tensor has the width of the target's embeddings."""
    if target.embedding not in projector.widths:
        raise ModelError(
            f"{projector.name} is the mmproj of another model: {target.name} has embeddings of {target.embedding}, and "
            f"it makes {max(projector.widths, default=0)}",
            "take the mmproj from the target's own repository: --mmproj USER/REPO",
        )


def run(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Result:
    del emit, stopping
    load()
    file = spec.found.files[0]
    with child.limited_memory(MAX_MEMORY):
        part, prefix, _ = read_prefix(file)
    if part.metadata.get("general.architecture") != "clip":
        raise ModelError(f"{file.name} is not an mmproj", "an mmproj is a file next to the model's: mmproj-….gguf")
    devices.add_rpc_workers(spec.rpc)
    device = spec.device
    if spec.simulated and device:
        device = next(iter(simulated.add(1)), "") if devices.has_rpc() else ""
    with scratch() as folder:
        path = folder / "mmproj.gguf"
        gguf.write_metadata_only([prefix], path)
        try:
            used = mmproj.memory(path, device)
        except ModelError as error:
            raise ModelError(f"{file.name}: {error.message}", error.hint) from None
    card = used.get(device, 0) if device else 0
    if spec.device and not device:  # no RPC to simulate a GPU with: use the CPU's figures
        return Result(file.name, sum(used.values()), 0, _widths(part))
    return Result(file.name, card, sum(used.values()) - card, _widths(part))


def _widths(part: gguf.Gguf) -> tuple[int, ...]:
    """Return the possible widths of its output: clip_n_mmproj_embd in tools/mtmd/clip.cpp takes it from these."""
    keys = (part.metadata.get(f"clip.{kind}.projection_dim") for kind in ("vision", "audio"))
    found = {value for value in keys if isinstance(value, int)}
    for tensor in part.tensors:
        if not tensor.name.startswith(("v.blk.", "a.blk.", "v.patch", "v.position")):
            found |= set(tensor.shape)
    return tuple(sorted(found))
