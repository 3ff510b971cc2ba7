"""Command ``ggufspec doctor``: show what is installed, what this machine has, and what is wrong with it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

from rich.text import Text

from ggufspec import __version__
from ggufspec.cli import ui
from ggufspec.cli.parameters import command, option
from ggufspec.errors import ChildError, GgufspecError
from ggufspec.hardware import gpus, host, install
from ggufspec.hardware.gpus import Survey
from ggufspec.llamacpp import chat_build, probe
from ggufspec.reports import doctor as report
from ggufspec.reports import table
from ggufspec.schema.doctor import DoctorDocument, LlamaCpp, Machine, Prebuilt, SelfCheck
from ggufspec.schema.text import counted, gib, of_file
from ggufspec.verify import selfcheck

_COLOURS = {"ok": "green", "warning": "yellow", "error": "bold red"}


@command("ggufspec doctor", "ggufspec doctor --quick --json")
def doctor(
    quick: Annotated[
        bool, option("--quick", "Skip the self-check. It computes known models for 5 to 15 seconds.")
    ] = False,
    chat_library: Annotated[
        bool,
        option(
            "--chat-library", "Compile what tools and JSON schemas need. It takes some seconds; nothing else is done."
        ),
    ] = False,
) -> int:
    """Show what is installed and what is wrong with it. The exit code is 1 if something is an error."""
    if chat_library:
        return _compile_chat_library()
    llama, machine, survey, build = _llama_cpp(), _machine(), gpus.survey(), install.built()
    self_check = None if quick or llama.error is not None else _self_check()
    document = DoctorDocument(
        ggufspec=__version__,
        python=platform.python_version(),
        llama_cpp=llama,
        machine=machine,
        driver=survey.driver,
        cards=survey.cards,
        findings=report.examine(llama, machine, survey, build, self_check),
        build=build,
        self_check=self_check,
        prebuilt=_prebuilt(survey),
    )
    ui.result(document, lambda: _show(document))
    return 0 if document.healthy else 1


def _compile_chat_library() -> int:
    with ui.busy("compiling for llama.cpp's chat library"):
        path = chat_build.build(os.environ.get("CXX", ""))
    ui.note(f"llama.cpp's chat library can be used: {path}")
    return 0


def _llama_cpp() -> LlamaCpp:
    try:
        number = version("llama-cpp-python")
    except PackageNotFoundError:
        number = None
    try:
        found = probe.inspect()
    except ChildError as error:
        return LlamaCpp(number, error=error.message, fix=install.mend())
    except GgufspecError as error:
        return LlamaCpp(number, error=error.message, fix=error.hint)
    return LlamaCpp(
        number,
        found.backends,
        found.devices,
        system=found.system,
        lacks=found.lacks,
        without_device=found.without_device,
        without_chat=found.without_chat,
    )


def _self_check() -> SelfCheck:
    with ui.busy() as say:
        return selfcheck.check(on_step=lambda step: say(f"self-check: {step.type}"))


def _prebuilt(survey: Survey) -> Prebuilt | None:
    wheels = install.choose_wheels(install.machine_facts(survey))
    if wheels is None:
        return None
    return Prebuilt(wheels.backend, wheels.index, install.prebuilt_line(wheels), wheels.lacks)


def _machine() -> Machine:
    folder = _model_folder()
    return Machine(
        cpu=host.cpu_name(),
        cores=host.physical_cores(),
        total_memory_bytes=host.total_memory_bytes(),
        free_memory_bytes=host.free_memory_bytes(),
        model_folder=str(folder),
        free_disk_bytes=host.free_disk_bytes(folder),
        others_cpus=host.others_cpus(),
        hub_is_offline=os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
        cpu_flags=host.cpu_flags(),
    )


def _model_folder() -> Path:
    """Return the Hugging Face cache. Source: huggingface_hub/constants.py."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = os.environ.get("HF_HOME") or Path(cache) / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _show(document: DoctorDocument) -> None:
    out, llama, machine = ui.out(), document.llama_cpp, document.machine
    facts = [
        ("ggufspec", f"{document.ggufspec}, Python {document.python}"),
        ("llama.cpp", f"llama-cpp-python {llama.version or 'is not installed'}"),
        ("backends", ", ".join(llama.backends)),
        ("built as", llama.system),
        ("NVIDIA", f"driver {document.driver or 'of unknown version'}" if document.driver is not None else ""),
        ("processor", f"{machine.cpu}, {counted(machine.cores, 'core')} to use"),
        ("memory", f"{gib(machine.free_memory_bytes)} of {gib(machine.total_memory_bytes)} GiB can be had"),
        ("models", f"{machine.model_folder}, {of_file(machine.free_disk_bytes)} free"),
    ]
    out.print(table.pairs((name, value) for name, value in facts if value))
    if llama.devices:
        out.print(table.terminal(report.devices(document)))
    if document.cards:
        out.print(table.terminal(report.cards(document)))
    else:
        out.print()
    lines: list[tuple[str | Text, str | Text]] = []
    for finding in document.findings:
        lines.append((Text(f"{finding.level:<7}", f"not bold {_COLOURS[finding.level]}"), finding.text))
        if finding.fix and len(finding.fix) + len("warning  ") > out.width:  # on one line, to be copied
            out.print(table.pairs(lines))
            out.print(Text.assemble(("  fix    ", "dim"), (finding.fix, "bold")), soft_wrap=True)
            lines = []
        elif finding.fix:
            lines.append((Text("  fix  ", "not bold dim"), Text(finding.fix, "bold")))
    if lines:
        out.print(table.pairs(lines))
    if (prebuilt := document.prebuilt) and any(finding.fix for finding in document.findings):
        out.print()
        names = {"cuda": "CUDA", "rocm": "ROCm", "cpu": "CPU"}
        name = names.get(prebuilt.backend, prebuilt.backend.capitalize())
        out.print(f"Without a compiler: the {name} wheels of llama-cpp-python (this project has not tried them)")
        out.print(prebuilt.command, style="bold", soft_wrap=True)  # to be copied whole
        out.print(f"They lack {'; '.join(prebuilt.lacks)}.", style="dim")
