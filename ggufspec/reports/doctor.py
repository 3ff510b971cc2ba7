"""Findings about the installation and the machine. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Literal

from ggufspec.hardware import install
from ggufspec.hardware.gpus import GpuSurvey, is_software, of_device
from ggufspec.hardware.host import TOLERATED_CPUS
from ggufspec.reports import table
from ggufspec.reports.table import ReportTable
from ggufspec.schema.doctor import (
    CheckRow,
    CheckStep,
    DoctorDocument,
    Finding,
    Gpu,
    GpuProcess,
    HostMachine,
    LlamaBuild,
    LlamaCpp,
    SelfCheck,
)
from ggufspec.schema.text import gib

# Bytes per second per lane after line coding, by PCIe generation. Source: PCI Express base specification.
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_LITTLE_MEMORY_BYTES = 4 * 2**30
_LITTLE_DISK_BYTES = 20 * 10**9
_BUSY_SHARE = 0.5  # share of a GPU's memory in use above which doctor warns


def examine(
    llama: LlamaCpp,
    machine: HostMachine,
    survey: GpuSurvey,
    build: LlamaBuild | None = None,
    self_check: SelfCheck | None = None,
    repair_command: Callable[..., str] = install.repair_command,
) -> tuple[Finding, ...]:
    """Return all findings, errors first; ``repair_command`` is a function that returns the command for a repair."""
    found = [*_llama_cpp(llama, survey, repair_command), *_cards(survey), *_machine(machine)]
    if llama.error is None:
        found += [
            *_self_check(self_check, llama, build, repair_command),
            *_instructions(llama, machine, build, repair_command),
        ]
    order = ("error", "warning", "ok")
    return tuple(sorted(found, key=lambda finding: order.index(finding.level)))


def _llama_cpp(llama: LlamaCpp, survey: GpuSurvey, repair_command: Callable[..., str]) -> Iterator[Finding]:
    if llama.error is not None:
        yield Finding("error", llama.error, llama.fix or repair_command())
        return
    yield Finding("ok", f"llama.cpp works ({', '.join(llama.backends)})")
    for drafter, absent in llama.lacks.items():
        yield Finding("warning", f"llama.cpp has no {absent}: --drafter {drafter} is not possible", repair_command())
    if llama.without_chat:
        text = f"{llama.without_chat}: no tools, no --json-schema, no response_format"
        yield Finding("warning", text, install.CHAT_LIBRARY)
    if "RPC" not in llama.backends:
        text = "llama.cpp was built without RPC: no --rpc, no worker, and `plan --gpu` estimates compute buffers"
        yield Finding("warning", text, repair_command(source=True))
    offered = [device for device in llama.devices if device.kind in ("gpu", "igpu")]
    real = [device for device in offered if not is_software(device.description)]
    gpus = [device.description.strip() for device in real]
    if pretended := [device.description.strip() for device in offered if is_software(device.description)]:
        text = f"{', '.join(pretended)} is software on the CPU, not a GPU: plans ignore it"
        yield Finding("warning", text, "unset GGML_VK_VISIBLE_DEVICES")
    known = [of_device(device.device_id, device.description, survey.cards) for device in real]
    if unwatched := [name for name, card in zip(gpus, known, strict=True) if card is None]:
        yield Finding(
            "ok",
            f"NVML reports only NVIDIA GPUs: for {', '.join(unwatched)}, memory use is llama.cpp's figure; energy, "
            "clock throttling and other processes are unknown",
        )
    names = ", ".join(card.name for card in survey.cards)
    if gpus:
        yield Finding("ok", f"llama.cpp uses {', '.join(gpus)}")
        hidden = [f"card {card.index} ({card.name})" for card in survey.cards if card not in known]
        if hidden and "CUDA" in llama.backends:
            text = f"llama.cpp does not see {', '.join(hidden)}: CUDA_VISIBLE_DEVICES names other cards"
            yield Finding("ok", text, "unset CUDA_VISIBLE_DEVICES; nvidia-smi")
    elif not survey.cards:
        for name in llama.without_device:
            text = f"llama.cpp has {name} but finds no device: no driver can be loaded, or its variables hide the GPU"
            yield Finding("warning", text, "vulkaninfo --summary; unset GGML_VK_VISIBLE_DEVICES VK_ICD_FILENAMES")
        worker_hint = "; `ggufspec worker` on another machine lends its own" if "RPC" in llama.backends else ""
        yield Finding("ok", f"no GPU: everything runs on the CPU{worker_hint}")
    elif "CUDA" in llama.backends:
        yield Finding(
            "error",
            f"llama.cpp has CUDA but sees no GPU, while NVIDIA's driver {survey.driver} sees {names}: "
            "the driver is older than the CUDA toolkit, or CUDA_VISIBLE_DEVICES hides the GPU",
            "unset CUDA_VISIBLE_DEVICES; nvidia-smi",
        )
    else:
        yield Finding(
            "error",
            f"llama.cpp was built without CUDA and leaves {names} idle: everything runs on the CPU",
            repair_command("cuda"),
        )


def _self_check(
    check: SelfCheck | None, llama: LlamaCpp, build: LlamaBuild | None, repair_command: Callable[..., str]
) -> Iterator[Finding]:
    if check is None:
        return
    if not check.failures:
        types = ", ".join(dict.fromkeys(row.step.type for row in check.rows))
        where = " and on the device" if any(row.step.place == "device" for row in check.rows) else ""
        worst = max((row.error or 0.0 for row in check.rows if row.step.place), default=0.0)
        errors = f"largest error {worst:.3f}, allowed {check.limit}; {check.seconds:.0f} s"
        yield Finding("ok", f"self-check: {types} are computed correctly on the host{where} ({errors})")
    alike: dict[tuple[str, str], list[CheckRow]] = {}
    for row in check.failures:
        alike.setdefault((row.outcome, row.step.place), []).append(row)
    for (outcome, place), rows in alike.items():
        error = max(row.error or 0.0 for row in rows)
        wrong = f"wrong numbers (error {error:.2g}, allowed {check.limit})"
        what = {"wrong": wrong, "silence": "it hangs", "failed": rows[0].detail}.get(outcome, f"it crashes ({outcome})")
        cases = dict.fromkeys(_case(row.step) for row in rows)
        more = f" and {len(cases) - 3} more" if len(cases) > 3 else ""
        where = {"host": "on the host", "device": "on the device"}.get(place, "before anything was decoded")
        yield Finding(
            "error",
            f"self-check: llama.cpp {where}, {'; '.join(list(cases)[:3])}{more}: {what}",
            "scripts/bootstrap --backend cpu, or update the driver; until then, -ngl 0 -ngld 0 uses only the CPU"
            if place == "device"
            else "scripts/bootstrap --check"
            if build
            else repair_command(source=True, flags=_plainer(llama)),
        )


def _case(step: CheckStep) -> str:
    flash = f", flash attention {step.flash}" if step.flash else ""
    return f"{step.type}{f', batch size {step.batch}' if step.batch else ''}{flash}"


def _plainer(llama: LlamaCpp) -> tuple[str, ...]:
    """Return CMake options to disable the likeliest cause of a failed self-check: AMX, or else native extensions."""
    if features(llama.system).get("AMX_INT8"):
        return tuple(f"-DCMAKE_{language}_FLAGS='{NO_AMX}'" for language in ("C", "CXX"))
    return ("-DGGML_NATIVE=off",)


# Features of a llama.cpp build (ggml/src/ggml-cpu/ggml-cpu.cpp): (flags in /proc/cpuinfo, cost of a build without it)
_INSTRUCTIONS = {
    "AVX2": (("avx2",), "layers on the CPU, including those of a partial offload, run several times slower"),
    "FMA": (("fma",), "layers on the CPU run slower"),
    "F16C": (("f16c",), "F16 models and the KV cache are several times slower on the CPU"),
    "AVX512": (
        ("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"),
        "prompts and verification on the CPU are slower",
    ),
    "AMX_INT8": (("amx_int8",), "prompts and the verification of several tokens on the CPU are slower"),
    "NEON": (("asimd",), "layers on the CPU run several times slower"),
    "DOTPROD": (("asimddp",), "layers on the CPU run slower"),
    "MATMUL_INT8": (("i8mm",), "prompts and verification on the CPU are slower"),
}
NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
# Features that scripts/bootstrap omits on purpose, by the value of its --cpu option
_LEFT_OUT = {"no-amx": ("AMX_INT8",), "avx2": ("AMX_INT8", "AVX512"), "plain": tuple(_INSTRUCTIONS)}


def features(system: str) -> dict[str, str]:
    """Return the features of llama.cpp's CPU backend from its system info (``CPU : AVX2 = 1 | …``)."""
    found: dict[str, str] = {}
    backend = ""
    for part in system.split("|"):
        head, colon, rest = part.rpartition(" : ")
        backend = head.strip() if colon else backend
        name, equals, value = rest.partition("=")
        if backend == "CPU" and equals and value.strip() != "0":
            found[name.strip()] = value.strip()
    return found


def unused(system: str, cpu_flags: Collection[str]) -> tuple[str, ...]:
    """Return the processor's instruction sets that llama.cpp was built without; none if either is unknown."""
    built = features(system)
    return tuple(
        name
        for name, (flags, _) in _INSTRUCTIONS.items()
        if built and name not in built and all(flag in cpu_flags for flag in flags)
    )


def _instructions(
    llama: LlamaCpp, machine: HostMachine, build: LlamaBuild | None, repair_command: Callable[..., str]
) -> Iterator[Finding]:
    left_out = _LEFT_OUT.get(build.cpu, ()) if build else ()
    if build and build.cpu != "native":
        level: Literal["ok", "warning"] = "warning" if left_out else "ok"
        again = "scripts/bootstrap --cpu auto, with a newer compiler" if left_out else ""
        yield Finding(level, f"scripts/bootstrap built llama.cpp with --cpu {build.cpu}: {build.why}", again)
    missing = [name for name in unused(llama.system, machine.cpu_flags) if name not in left_out]
    if missing:
        costs = dict.fromkeys(_INSTRUCTIONS[name][1] for name in missing)
        yield Finding(
            "warning",
            f"llama.cpp was built without {', '.join(missing)}, which this processor supports: {'; '.join(costs)}",
            "CMAKE_ARGS= scripts/bootstrap --cpu auto" if build else repair_command(source=True),
        )


def _cards(survey: GpuSurvey) -> Iterator[Finding]:
    for problem in survey.problems:
        yield Finding("error", f"NVML: {problem}", "nvidia-smi; sudo dmesg | grep -i -e nvrm -e xid; then reboot")
    if survey.driver is not None and not survey.cards and not survey.problems:
        version = f" {survey.driver}" if survey.driver else ""
        yield Finding("warning", f"NVIDIA's driver{version} is loaded but finds no GPU", "lspci | grep -i nvidia")
    for card in survey.cards:
        if card.total_bytes and card.used_bytes and card.used_bytes / card.total_bytes > _BUSY_SHARE:
            users = ", ".join(_process(process, with_memory=True) for process in card.processes)
            yield Finding(
                "warning",
                f"card {card.index} ({card.name}): {gib(card.used_bytes)} of {gib(card.total_bytes)} GiB are in use"
                + (f" by {users}" if users else ", by processes that cannot be seen from here"),
                "nvidia-smi",
            )
        yield from _slot(card)


def _slot(card: Gpu) -> Iterator[Finding]:
    if card.pcie_generation is None or card.pcie_width is None:
        return
    best_generation = max(card.pcie_generation, card.pcie_max_generation or 0)
    best_width = max(card.pcie_width, card.pcie_max_width or 0)
    if (card.pcie_generation, card.pcie_width) != (best_generation, best_width):
        yield Finding(
            "warning",
            f"card {card.index} ({card.name}): the slot provides PCIe {_speed(card.pcie_generation, card.pcie_width)}, "
            f"but the card supports {_speed(best_generation, best_width)}; prompts are slow if layers stay on the CPU. "
            "Another slot or a BIOS setting may help",
            "nvidia-smi -q | grep -A 12 'GPU Link Info'",
        )


def _machine(machine: HostMachine) -> Iterator[Finding]:
    if machine.free_memory_bytes < _LITTLE_MEMORY_BYTES:
        yield Finding(
            "warning",
            f"only {gib(machine.free_memory_bytes)} GiB of memory are available (the machine has "
            f"{gib(machine.total_memory_bytes)}): layers that stay on the CPU need more",
            "ps -eo rss,comm --sort=-rss | head",
        )
    if machine.others_cpus > TOLERATED_CPUS:
        yield Finding(
            "warning",
            f"other programs keep {machine.others_cpus:.1f} CPUs busy: llama.cpp gets only as many threads as there "
            "are CPUs left, and layers on the CPU run slower than on an idle machine",
            "ps -eo pcpu,comm --sort=-pcpu | head",
        )
    if machine.free_disk_bytes < _LITTLE_DISK_BYTES:
        yield Finding(
            "warning",
            f"only {machine.free_disk_bytes / 1e9:.1f} GB are free at {machine.model_folder}, where models are stored",
            "export HF_HOME=/a/larger/disk",
        )
    if machine.hub_is_offline:
        yield Finding("ok", "HF_HUB_OFFLINE is set: nothing is downloaded", "unset HF_HUB_OFFLINE")


def device_rows(document: DoctorDocument) -> ReportTable:
    rows = [
        (device.name, device.description.strip(), device.kind, gib(device.free_bytes), gib(device.total_bytes))
        for device in document.llama_cpp.devices
    ]
    columns = table.columns("Device", table.words("Description"), table.word("Kind"), "Free GiB", "Total GiB")
    return ReportTable("Devices", columns, rows)


def cards(document: DoctorDocument) -> ReportTable:
    """Return a table with a row per GPU, each followed by rows for the processes that use the GPU's memory."""
    rows: list[tuple[str, ...]] = []
    for card in document.cards:
        capability = ".".join(map(str, card.compute_capability or ()))
        busy = "" if card.utilisation is None else f"{card.utilisation:.0%}"
        sizes = tuple("?" if size is None else gib(size) for size in (card.used_bytes, card.total_bytes))
        link = _link(card.pcie_generation, card.pcie_width)
        rows.append((str(card.index), card.name, capability, link, busy, *sizes))
        for process in card.processes:
            used = "?" if process.used_bytes is None else gib(process.used_bytes)
            rows.append(("", f"  {_process(process)}", "", "", "", used, ""))
    columns = table.columns("Card", table.words("Name"), "CUDA", "PCIe", "Busy", "Used GiB", "Total GiB")
    return ReportTable("Cards", columns, rows)


def _link(generation: int | None, width: int | None) -> str:
    return "" if generation is None or width is None else f"{generation}.0 ×{width}"


def _speed(generation: int, width: int) -> str:
    lane = _LANE_BYTES_PER_S.get(generation)
    return _link(generation, width) + (f" ({lane * width / 1e9:.0f} GB/s)" if lane else "")


def _process(process: GpuProcess, *, with_memory: bool = False) -> str:
    used = f", {gib(process.used_bytes)} GiB" if with_memory and process.used_bytes is not None else ""
    return f"{process.name.rpartition('/')[2] or 'process'} ({process.pid}{used})"
