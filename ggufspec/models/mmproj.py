"""Image projectors of targets: search by name, and measurement of their memory from headers read in range requests.

llama.cpp parses the header and builds the projector's graph in a child process.
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
from ggufspec.llamacpp.library import load_library
from ggufspec.models.header import ModelHeader
from ggufspec.models.headers import MAX_MEMORY, read_prefix
from ggufspec.models.hub import client
from ggufspec.models.hub.choice import parse_name
from ggufspec.models.locate import ModelFiles, Source, is_url, locate

_USUAL = ("f16", "bf16", "q8_0", "f32")  # types in order of preference, if a repository has several


@dataclass(frozen=True, slots=True)
class MmprojJob:
    """Projector to measure, with its graph on ``device`` or on the CPU. An absent device is simulated."""

    found: ModelFiles
    device: str = ""
    simulated: bool = False
    rpc: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MmprojResult:
    """Memory of a projector on GPU and host in bytes, and the possible widths of its output."""

    name: str
    card_bytes: int
    host_bytes: int
    widths: tuple[int, ...]


def projector_source(text: str) -> Source:
    """Return the file that ``--mmproj`` names: path, URL, ``USER/REPO[@REVISION]`` or ``USER/REPO/FILE[@REVISION]``.

    Raises:
        GgufspecError: the repository does not exist or has no projector.
    """
    count = text.partition("@")[0].count("/")
    if is_url(text) or Path(text).exists() or count not in (1, 2) or text.startswith((".", "/", "~")):
        return text
    name = parse_name(text)
    file = name.model or client.choose_names(name.repo, name.revision, lambda files: choose_projector(name.repo, files))
    return client.HubFile(name.repo, file, name.revision)


def choose_projector(repo: str, files: Sequence[str]) -> str:
    """Choose a repository's projector, preferably in F16; raise ModelError if it has none. Pure."""
    found = sorted(file for file in files if file.endswith(".gguf") and "mmproj" in file.lower())
    if not found:
        raise ModelError(f"{repo} has no mmproj-….gguf", f"see {client.model_page_url(repo)}/tree/main")
    for kind in _USUAL:
        for file in found:
            if kind in file.lower().removesuffix(".gguf").replace(".", "-").split("-"):
                return file
    return found[0]


def measure_projector(
    text: str, device: str = "", *, simulated: bool = False, rpc: tuple[str, ...] = (), verbose: bool = False
) -> MmprojResult:
    """Measure the memory of the projector that ``--mmproj`` names.

    Args:
        text: value of ``--mmproj``.
        device: llama.cpp's name of the device that computes the projector's graph; empty: the CPU.
        simulated: True if the device is not installed.
        rpc: endpoints of RPC workers, one of which may have ``device``.
        verbose: True to show llama.cpp's log.

    Raises:
        ModelError: the file is missing, damaged, or not a projector.
        GgufspecError: there is no network.
    """
    found = locate(projector_source(text))
    try:
        return child.call(__name__, MmprojJob(found, device, simulated, rpc), MmprojResult, verbose=verbose)
    except ChildError as error:
        raise ChildError(f"llama.cpp crashed on {found.origin}: {error.message}", "download it again") from None


def check_projector(projector: MmprojResult, target: ModelHeader) -> None:
    """Raise ModelError if no tensor of the projector has the target's embedding width: it is another model's."""
    if target.embedding not in projector.widths:
        raise ModelError(
            f"{projector.name} is the mmproj of another model: {target.name} has embeddings of size "
            f"{target.embedding}, but its output has size {max(projector.widths, default=0)}",
            "use the mmproj from the target's own repository: --mmproj USER/REPO",
        )


def run(spec: MmprojJob, emit: child.Emit, stopping: threading.Event) -> MmprojResult:
    del emit, stopping
    load_library()
    file = spec.found.files[0]
    with child.limited_memory(MAX_MEMORY):
        part, prefix, _ = read_prefix(file)
    if part.metadata.get("general.architecture") != "clip":
        raise ModelError(f"{file.name} is not an mmproj", "the mmproj is usually next to the model file: mmproj-….gguf")
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
    if spec.device and not device:  # without RPC a GPU cannot be simulated, so use the CPU's figures
        return MmprojResult(file.name, sum(used.values()), 0, _widths(part))
    return MmprojResult(file.name, card, sum(used.values()) - card, _widths(part))


def _widths(part: gguf.Gguf) -> tuple[int, ...]:
    """Return a projector's possible output widths, one of which clip_n_mmproj_embd (tools/mtmd/clip.cpp) returns."""
    keys = (part.metadata.get(f"clip.{kind}.projection_dim") for kind in ("vision", "audio"))
    found = {value for value in keys if isinstance(value, int)}
    for tensor in part.tensors:
        if not tensor.name.startswith(("v.blk.", "a.blk.", "v.patch", "v.position")):
            found |= set(tensor.shape)
    return tuple(sorted(found))
