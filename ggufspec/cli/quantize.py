"""Command ``ggufspec quantize``: write one model in several weight types with llama.cpp's quantiser."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ggufspec import child
from ggufspec.bench.summary import machine_and_versions
from ggufspec.cli import ui
from ggufspec.cli.parameters import command, command_option, takes
from ggufspec.cli.results import check_overwrites
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.hardware.host import free_disk_bytes, physical_cores
from ggufspec.llamacpp import quantize as job
from ggufspec.models.header import ModelHeader
from ggufspec.models.headers import read_headers
from ggufspec.reports import table
from ggufspec.reports.quantize import outputs, results
from ggufspec.schema.quantize import QuantisedFile, QuantizeDocument
from ggufspec.schema.text import of_download
from ggufspec.settings.table import Settings

_ROOM = 16 << 20  # bytes to leave free on the disk


@command(
    "ggufspec quantize MODEL-F16.gguf --types Q8_0,Q4_K_M,Q3_K_L",
    "ggufspec quantize MODEL-F16.gguf --types Q4_0 -o models -t 8 --json",
    confirms=True,
)
def quantize(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Model in F32, F16 or BF16.", show_default=False)],
    types: Annotated[str, command_option("--types TYPES", "Types, as listed above: Q8_0,Q4_K_M,Q3_K_L.")],
    folder: Annotated[
        Path | None, command_option("-o --output FOLDER", "Folder to write to.  [the folder of FILE]")
    ] = None,
    force: Annotated[bool, command_option("--force", "As -y.", hidden=True)] = False,
    requantize: Annotated[
        bool, command_option("--requantize", "Accept a FILE that is already quantised. Quality is lost twice.")
    ] = False,
    *,
    given: Annotated[Settings, takes("threads")],
) -> int:
    """Write one model in several weight types. The files, STEM-TYPE.gguf, are a grid for compare.

    Sizes are computed before anything is written, and the disk must have room for all files.

    \b
    The types, without those that need an importance matrix:
      whole   F32, F16, BF16
      8 bits  Q8_0
      6 bits  Q6_K
      5 bits  Q5_K_M, Q5_K_S, Q5_1, Q5_0
      4 bits  Q4_K_M, Q4_K_S, Q4_1, Q4_0, IQ4_NL, IQ4_XS
      3 bits  Q3_K_L, Q3_K_M, Q3_K_S, IQ3_M, IQ3_S
      2 bits  Q2_K
    """  # noqa: D301 - the character tells Typer not to rewrap
    wanted = tuple(dict.fromkeys(job.check_type(name.strip()) for name in types.split(",") if name.strip()))
    if not wanted:
        raise UsageError("no type is given", "--types Q8_0,Q4_K_M")
    count = given.threads or physical_cores()
    header = read_headers([file])[0].header
    quantised = _check_source(file, header, requantize)
    where = (folder or file.parent).absolute()
    if not where.is_dir():
        raise UsageError(f"{where} is not a folder", f"mkdir -p {where}")
    paths = outputs(file, where, wanted)
    for path in paths.values():
        if path.exists() and path.samefile(file):
            raise UsageError(f"{path} is the model itself", "-o FOLDER writes elsewhere")
        if path.exists() and not force:
            check_overwrites(path, "-y overwrites it; -o FOLDER writes elsewhere")
    if quantised:
        ui.note(
            f"warning: {file.name} is quantised already (mostly {quantised}); every type made from it shares that loss"
        )

    chosen = _done(job.QuantizeJob(file.absolute(), wanted, 1)).chosen
    needed, free = sum(one.file_bytes for one in chosen.values()), free_disk_bytes(where)
    if needed + _ROOM > free:
        each = ", ".join(f"{name} {of_download(one.file_bytes)}" for name, one in chosen.items())
        message = f"{each}: {of_download(needed)}, but {where} has only {of_download(free)} free"
        raise GgufspecError(message, f"df -h {where}")
    for name, one in chosen.items():
        if one.unfit:
            share = f"{one.unfit} of {len(one.types)} tensors"
            ui.note(f"{name}: another type for {share}, because their row length is not a multiple of its block size")
    rows: list[QuantisedFile] = []
    numbers = sum(math.prod(tensor.shape) for tensor in header.tensors)
    for name, path in paths.items():
        began = time.monotonic()
        _done(job.QuantizeJob(file.absolute(), (name,), count, path, requantize))
        one, size = chosen[name], path.stat().st_size
        bits = 8 * one.tensor_bytes / numbers
        rows.append(QuantisedFile(name, str(path), one.file_bytes, size, bits, time.monotonic() - began))
    document = QuantizeDocument(str(file), header.size_bytes, numbers, machine_and_versions(), tuple(rows))
    ui.result(document, lambda: ui.out().print(table.terminal(results(document))))
    return 0


def _check_source(file: Path, header: ModelHeader, requantize: bool) -> str:
    """Return the most common quantised type ("" if none); raise UsageError if there is one without ``requantize``."""
    sizes: dict[str, int] = {}
    for tensor in header.tensors:
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.size_bytes
    lossy = {kind: size for kind, size in sizes.items() if kind not in ("f32", "f16", "bf16")}
    kind = max(lossy, key=lambda kind: lossy[kind], default="")
    if kind and not requantize:
        raise UsageError(
            f"{file.name} is quantised already (mostly {kind}): quantising it again would add a second loss",
            "start from the model's F16 file, or accept the loss with --requantize",
        )
    return kind


def _done(spec: job.QuantizeJob) -> job.QuantizeResult:
    """Run the job in a child process with progress shown; a file appears only when complete."""
    with ui.progress() as progress:

        def show(event: dict[str, Any]) -> None:
            progress(event["done"], event["of"], event["name"])

        return child.call(job.__name__, spec, job.QuantizeResult, on_event=show, verbose=ui.flags().verbose)
