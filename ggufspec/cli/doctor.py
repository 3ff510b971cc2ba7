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
from ggufspec.cli.parameters import command, command_option
from ggufspec.errors import ChildError, GgufspecError
from ggufspec.files import untrusted
from ggufspec.hardware import gpus, host, install
from ggufspec.hardware.gpus import GpuSurvey
from ggufspec.llamacpp import chat_build, probe
from ggufspec.reports import doctor as report
from ggufspec.reports import table
from ggufspec.schema.doctor import DoctorDocument, HostMachine, LlamaCpp, Prebuilt, SelfCheck
from ggufspec.schema.text import counted, gib, of_file
from ggufspec.verify import selfcheck

_COLOURS = {"ok": "green", "warning": "yellow", "error": "bold red"}


@command("ggufspec doctor", "ggufspec doctor --quick --json")
def doctor(
    quick: Annotated[
        bool, command_option("--quick", "Skip the self-check. It runs known models for 5 to 15 seconds.")
    ] = False,
    chat_library: Annotated[
        bool,
        command_option("--chat-library", "Only compile what tools and JSON schemas need. It takes a few seconds."),
    ] = False,
) -> int:
    """Show what is installed and what is wrong with it. The exit code is 1 if there is an error."""
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
    ui.note(f"llama.cpp's chat library is ready: {path}")
    return 0


def _llama_cpp() -> LlamaCpp:
    try:
        number = version("llama-cpp-python")
    except PackageNotFoundError:
        number = None
    try:
        found = probe.inspect()
    except ChildError as error:
        return LlamaCpp(number, error=error.message, fix=install.repair_command())
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
        return selfcheck.self_check(on_step=lambda step: say(f"self-check: {step.type}"))


def _prebuilt(survey: GpuSurvey) -> Prebuilt | None:
    wheels = install.choose_wheels(install.machine_facts(survey))
    if wheels is None:
        return None
    return Prebuilt(wheels.backend, wheels.index, install.prebuilt_line(wheels), wheels.lacks)


def _machine() -> HostMachine:
    folder = _model_folder()
    return HostMachine(
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
    """Return the Hugging Face cache folder. Source: huggingface_hub/constants.py."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or Path(cache) / "huggingface"
    return untrusted.at_home(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def _show(document: DoctorDocument) -> None:
    out, llama, machine = ui.out(), document.llama_cpp, document.machine
    facts = [
        ("ggufspec", f"{document.ggufspec}, Python {document.python}"),
        ("llama.cpp", f"llama-cpp-python {llama.version or 'is not installed'}"),
        ("backends", ", ".join(llama.backends)),
        ("built as", llama.system),
        ("NVIDIA", f"driver {document.driver or 'of unknown version'}" if document.driver is not None else ""),
        ("processor", f"{machine.cpu}, {counted(machine.cores, 'core')} to use"),
        ("memory", f"{gib(machine.free_memory_bytes)} of {gib(machine.total_memory_bytes)} GiB available"),
        ("models", f"{machine.model_folder}, {of_file(machine.free_disk_bytes)} free"),
    ]
    out.print(table.pairs((name, value) for name, value in facts if value))
    if llama.devices:
        out.print(table.terminal(report.device_rows(document)))
    if document.cards:
        out.print(table.terminal(report.cards(document)))
    else:
        out.print()
    lines: list[tuple[str | Text, str | Text]] = []
    for finding in document.findings:
        lines.append((Text(f"{finding.level:<7}", f"not bold {_COLOURS[finding.level]}"), finding.text))
        if finding.fix and len(finding.fix) + len("warning  ") > out.width:  # on one line, so that it can be copied
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
        out.print(f"Without a compiler: the {name} wheels of llama-cpp-python (untested by this project)")
        out.print(prebuilt.command, style="bold", soft_wrap=True)  # on one line, so that it can be copied
        out.print(f"They lack {'; '.join(prebuilt.lacks)}.", style="dim")
