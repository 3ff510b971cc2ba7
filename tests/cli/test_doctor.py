"""``ggufspec doctor``: what it finds, with cards that are made up (``fake_nvml.c``) and a real llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ggufspec.hardware.gpus import GpuSurvey
from ggufspec.hardware.install import pip_line
from ggufspec.reports.doctor import examine, features, unused
from ggufspec.schema.doctor import (
    CheckRow,
    CheckStep,
    Finding,
    Gpu,
    GpuProcess,
    HostMachine,
    LlamaBuild,
    LlamaCpp,
    LlamaDevice,
    SelfCheck,
)
from tests.support import nvml
from tests.support.processes import Cli, Finished, plain, rest

GIB = 2**30
KEYS = {
    "schema",
    "ggufspec",
    "python",
    "llama_cpp",
    "machine",
    "driver",
    "cards",
    "findings",
    "build",
    "self_check",
    "prebuilt",
}

# what it finds, from facts

CPU = LlamaDevice("CPU", "A CPU", "cpu", 20 * GIB, 32 * GIB)
CUDA = LlamaDevice("CUDA0", "NVIDIA GeForce RTX 4090", "gpu", 23 * GIB, 24 * GIB, "0000:01:00.0")
LLAMA = LlamaCpp("0.3.36", ("RPC", "CPU"), (CPU,))
LLAMA_CUDA = LlamaCpp("0.3.36", ("CUDA", "RPC", "CPU"), (CUDA, CPU))
MACHINE = HostMachine("A CPU", 8, 32 * GIB, 20 * GIB, "/models", 500 * 10**9)
CARD = Gpu(0, "RTX 4090", "GPU-0", 24 * GIB, 23 * GIB, GIB, "575", (8, 9), 4, 16, 4, 16, 0.0, pci_id="0000:01:00.0")
NO_DRIVER = GpuSurvey((), (), None)


def found(
    llama: LlamaCpp = LLAMA_CUDA, machine: HostMachine = MACHINE, cards: tuple[Gpu, ...] = (CARD,)
) -> tuple[Finding, ...]:
    """What is not well."""
    return tuple(f for f in examine(llama, machine, GpuSurvey(cards, (), "575")) if f.level != "ok")


def test_all_is_well() -> None:
    assert found() == ()
    texts = [finding.text for finding in examine(LLAMA_CUDA, MACHINE, GpuSurvey((CARD,), (), "575"))]
    assert texts == ["llama.cpp works (CUDA, RPC, CPU)", "llama.cpp uses NVIDIA GeForce RTX 4090"]


def test_without_a_card_and_a_driver_all_is_well_too() -> None:
    findings = examine(LLAMA, MACHINE, NO_DRIVER)
    assert {finding.level for finding in findings} == {"ok"}
    assert "no GPU: everything runs on the CPU" in findings[1].text


def test_a_card_that_llama_cpp_was_not_built_for() -> None:
    (finding,) = found(LLAMA)
    assert finding.level == "error"
    assert "llama.cpp was built without CUDA and leaves RTX 4090 idle" in finding.text
    assert finding.fix == "scripts/bootstrap --backend cuda"


def test_a_card_that_cuda_does_not_see() -> None:
    (finding,) = found(replace(LLAMA_CUDA, devices=(CPU,)))
    assert finding.level == "error"
    assert "llama.cpp has CUDA but sees no GPU" in finding.text
    assert "CUDA_VISIBLE_DEVICES" in finding.fix


@pytest.mark.parametrize("memory", [(24 * GIB, 23 * GIB, GIB), (None, None, None)])
def test_of_two_alike_cards_the_one_that_cuda_does_not_see_is_named(memory: tuple[int | None, ...]) -> None:
    other = replace(CARD, index=1, pci_id="0000:02:00.0")
    total, free, used = memory
    cards = (other, replace(CARD, total_bytes=total, free_bytes=free, used_bytes=used))
    findings = examine(LLAMA_CUDA, MACHINE, GpuSurvey(cards, (), "575"))
    (finding,) = (finding for finding in findings if "does not see" in finding.text)
    assert "does not see card 1 (RTX 4090): CUDA_VISIBLE_DEVICES" in finding.text
    both = replace(LLAMA_CUDA, devices=(replace(CUDA, device_id="0000:02:00.0"), CUDA, CPU))
    assert not any("does not see" in one.text for one in examine(both, MACHINE, GpuSurvey(cards, (), "575")))


def test_a_card_that_is_used_by_vulkan_is_used() -> None:
    assert found(LlamaCpp("1", ("Vulkan", "RPC", "CPU"), (replace(CUDA, name="Vulkan0"), CPU))) == ()


def test_a_card_without_nvml_says_what_is_not_known() -> None:
    radeon = replace(CUDA, name="Vulkan0", description="AMD Radeon RX 7900 XTX", device_id="0000:02:00.0")
    llama = LlamaCpp("1", ("Vulkan", "RPC", "CPU"), (radeon, CPU))
    texts = [finding.text for finding in examine(llama, MACHINE, GpuSurvey((CARD,), (), "575"))]
    assert "llama.cpp uses AMD Radeon RX 7900 XTX" in texts
    (text,) = (text for text in texts if "NVML" in text)
    assert "for AMD Radeon RX 7900 XTX, memory use is llama.cpp's figure" in text
    assert "energy, clock throttling and other processes are unknown" in text


def test_a_card_of_software_is_none() -> None:
    pretended = replace(CUDA, name="Vulkan0", description="llvmpipe (LLVM 15.0.6, 256 bits)")
    llama = LlamaCpp("1", ("Vulkan", "RPC", "CPU"), (pretended, CPU))
    (finding,) = (f for f in examine(llama, MACHINE, NO_DRIVER) if f.level != "ok")
    assert finding.text == "llvmpipe (LLVM 15.0.6, 256 bits) is software on the CPU, not a GPU: plans ignore it"
    assert any("no GPU" in f.text for f in examine(llama, MACHINE, NO_DRIVER))


def test_vulkan_without_a_device_is_told() -> None:
    llama = LlamaCpp("1", ("RPC", "CPU"), (CPU,), without_device=("Vulkan",))
    (finding,) = (f for f in examine(llama, MACHINE, NO_DRIVER) if f.level != "ok")
    assert finding.text.startswith("llama.cpp has Vulkan but finds no device")
    assert "vulkaninfo --summary" in finding.fix


def test_built_without_rpc() -> None:
    (finding,) = found(replace(LLAMA_CUDA, backends=("CUDA", "CPU")))
    assert (finding.level, finding.fix) == ("warning", "scripts/bootstrap")
    assert "without RPC" in finding.text


def test_a_card_in_others_hands_names_them() -> None:
    processes = (GpuProcess(7, "/usr/bin/game", 11 * GIB), GpuProcess(8, "", None))
    (finding,) = found(cards=(replace(CARD, used_bytes=13 * GIB, processes=processes),))
    assert finding.level == "warning"
    assert "13.0 of 24.0 GiB are in use by game (7, 11.0 GiB), process (8)" in finding.text
    assert found(cards=(replace(CARD, used_bytes=12 * GIB),)) == ()
    (hidden,) = found(cards=(replace(CARD, used_bytes=13 * GIB),))
    assert "by processes that cannot be seen from here" in hidden.text


@pytest.mark.parametrize(
    ("generation", "width", "text"),
    [
        (4, 4, "4.0 ×4 (8 GB/s), but the card supports 4.0 ×16 (32 GB/s)"),
        (3, 16, "3.0 ×16 (16 GB/s), but the card supports 4.0 ×16 (32 GB/s)"),
        (4, 16, None),
        (None, 4, None),
        (4, None, None),
    ],
)
def test_the_slot(generation: int | None, width: int | None, text: str | None) -> None:
    findings = found(cards=(replace(CARD, pcie_generation=generation, pcie_width=width),))
    if text is None:
        assert findings == ()
    else:
        assert [finding.level for finding in findings] == ["warning"]
        assert text in findings[0].text


def test_little_memory_and_little_disk() -> None:
    memory, disk = found(machine=replace(MACHINE, free_memory_bytes=4 * GIB - 1, free_disk_bytes=20 * 10**9 - 1))
    assert (memory.level, disk.level) == ("warning", "warning")
    assert "only 4.0 GiB of memory are available (the machine has 32.0)" in memory.text
    assert "/models" in disk.text
    assert "HF_HOME" in disk.fix
    assert found(machine=replace(MACHINE, free_memory_bytes=4 * GIB, free_disk_bytes=20 * 10**9)) == ()


def test_a_driver_without_a_card() -> None:
    (finding,) = found(LLAMA, cards=())
    assert (finding.level, finding.text) == ("warning", "NVIDIA's driver 575 is loaded but finds no GPU")


def test_what_nvml_says_comes_first() -> None:
    findings = examine(LLAMA_CUDA, MACHINE, GpuSurvey((CARD,), ("card 1 does not answer: GPU is lost",), "575"))
    assert findings[0].level == "error"
    assert "card 1 does not answer: GPU is lost" in findings[0].text


def test_llama_cpp_that_does_not_load_is_the_only_thing_said_of_it() -> None:
    findings = examine(
        LlamaCpp(None, error="it is not there", fix="install it"), MACHINE, GpuSurvey((CARD,), (), "575")
    )
    assert findings == (Finding("error", "it is not there", "install it"),)


# the command


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


AVX512 = ("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl")
SYSTEM = "CUDA : ARCHS = 890 | USE_GRAPHS = 1 | CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | FMA = 1 | F16C = 1 | REPACK = 1"


def test_the_system_line_is_read_by_backend() -> None:
    assert features(SYSTEM) == dict.fromkeys(["SSE3", "AVX", "AVX2", "FMA", "F16C", "REPACK"], "1")
    assert features("CPU : AVX2 = 0 | FMA = 1") == {"FMA": "1"}
    assert features("") == {}
    assert features("something else") == {}


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        (("avx2", "fma", "f16c"), ()),
        (("avx2", *AVX512), ("AVX512",)),
        (("avx2", *AVX512[:-1]), ()),
        ((*AVX512, "amx_int8"), ("AVX512", "AMX_INT8")),
        (("asimd", "asimddp", "i8mm"), ("NEON", "DOTPROD", "MATMUL_INT8")),
        ((), ()),
    ],
)
def test_what_the_library_leaves_unused(flags: tuple[str, ...], missing: tuple[str, ...]) -> None:
    assert unused(SYSTEM, flags) == missing
    assert unused("", flags) == ()


def repair_command(backend: str = "", *, source: bool = False, flags: Sequence[str] = ()) -> str:
    """What is to be typed outside a checkout."""
    return pip_line(None, backend, flags)


def built(
    system: str, flags: tuple[str, ...], build: LlamaBuild | None = None, check: SelfCheck | None = None
) -> list[Finding]:
    llama = replace(LLAMA, system=system)
    return [
        finding
        for finding in examine(llama, replace(MACHINE, cpu_flags=flags), NO_DRIVER, build, check, repair_command)
        if "AVX" in finding.text or "AMX" in finding.text or "--cpu" in finding.text or "self-check" in finding.text
    ]


def test_a_wheel_without_avx2_is_told_with_what_it_costs_and_what_to_type() -> None:
    (one,) = built("CPU : SSE3 = 1 | AVX = 1", ("avx", "avx2", "fma", "f16c"))
    assert one.level == "warning"
    assert "without AVX2, FMA, F16C, which this processor supports" in one.text
    assert "several times slower" in one.text
    assert "--no-binary llama-cpp-python" in one.fix
    assert "-DGGML_RPC=on" in one.fix
    (other,) = built("CPU : AVX = 1", ("avx2",), LlamaBuild("native", "", "-DGGML_AVX2=off"))
    assert other.fix == "CMAKE_ARGS= scripts/bootstrap --cpu auto"


def test_what_bootstrap_left_out_is_told_once_and_why() -> None:
    flags = ("avx2", "fma", "f16c", *AVX512, "amx_int8")
    why = "a self-check failed: Q8_0 crashes"
    (one,) = built(f"{SYSTEM} | AVX512 = 1", flags, LlamaBuild("no-amx", why, ""))
    assert (one.level, "--cpu no-amx" in one.text, why in one.text) == ("warning", True, True)
    assert one.fix.startswith("scripts/bootstrap --cpu auto")
    (one,) = built(
        f"{SYSTEM} | AVX512 = 1 | AMX_INT8 = 1", flags, LlamaBuild("tile-load", "this compiler is wrong", "")
    )
    assert (one.level, one.fix) == ("ok", "")
    assert len(built(SYSTEM, flags, LlamaBuild("no-amx", why, ""))) == 2  # AVX-512 is missing for another reason


def checked(*rows: CheckRow) -> SelfCheck:
    return SelfCheck(rows, 7.4, 0.06)


def test_a_self_check_that_is_passed() -> None:
    rows = [CheckRow(CheckStep(kind, "host", "on", 1), 0.01, "ok") for kind in ("F16", "Q8_0")]
    (one,) = built("", (), None, checked(*rows))
    assert one.level == "ok"
    assert "F16, Q8_0 are computed correctly on the host (" in one.text
    (two,) = built("", (), None, checked(*rows, CheckRow(CheckStep("F16", "device", "on", 1), 0.02, "ok")))
    assert "on the host and on the device (largest error 0.020" in two.text


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            CheckRow(CheckStep("Q8_0", "host", "on", 4), None, "SIGSEGV", "x"),
            "Q8_0, batch size 4, flash attention on: it crashes (SIGSEGV)",
        ),
        (CheckRow(CheckStep("Q8_0", "host", "off", 1), None, "SIGILL"), "it crashes (SIGILL)"),
        (CheckRow(CheckStep("Q8_0", "host", "on", 16), None, "silence"), "it hangs"),
        (CheckRow(CheckStep("Q4_0", "host", "on", 16), 0.5, "wrong"), "wrong numbers (error 0.5, allowed 0.06)"),
        (
            CheckRow(CheckStep("Q4_0"), None, "failed", "the disk is full"),
            "before anything was decoded, Q4_0: the disk is full",
        ),
    ],
)
def test_every_way_to_fail_is_told_apart(row: CheckRow, words: str) -> None:
    (one,) = built("CPU : AMX_INT8 = 1", (), LlamaBuild("native", "", ""), checked(row))
    assert (one.level, one.fix) == ("error", "scripts/bootstrap --check")
    assert words in one.text
    (elsewhere,) = built("CPU : AMX_INT8 = 1", (), None, checked(row))
    assert "-mno-amx-int8" in elsewhere.fix
    assert "pip install --force-reinstall" in elsewhere.fix
    (plain,) = built("CPU : AVX2 = 1", (), None, checked(row))
    assert "-DGGML_NATIVE=off" in plain.fix


def test_failures_alike_are_one_line_and_a_device_is_another() -> None:
    rows = [CheckRow(CheckStep("Q4_0", "host", "on", batch), 0.5, "wrong") for batch in (1, 2, 3, 4, 5)]
    device = CheckRow(CheckStep("Q4_0", "device", "on", 1), 0.7, "wrong")
    one, two = built("", (), LlamaBuild("native", "", ""), checked(*rows, device))
    assert "and 2 more" in one.text
    assert "on the device" in two.text
    assert "--backend cpu" in two.fix


def well(done: Finished) -> None:
    """The exit code says whether there is an error, and nothing is said beside the document."""
    document = done.document()
    assert done.stderr == ""
    assert done.code == any(finding["level"] == "error" for finding in document["findings"])
    assert next(iter(document)) == "schema"
    assert document["schema"] == "ggufspec/doctor@1"
    assert set(document) == KEYS
    for finding in document["findings"]:
        assert set(finding) == {"level", "text", "fix"}
        assert finding["fix"] or finding["level"] == "ok"


def test_document(cli: Cli, library: dict[str, str]) -> None:
    done = cli("doctor", "--quick", "--json", FAKE_NVML="card,busy,15@nvmlDeviceGetMemoryInfo", **library)
    well(done)
    document = done.document()
    llama, machine = document["llama_cpp"], document["machine"]
    assert llama["version"].startswith("0.3.")
    assert {"CPU", "RPC"} <= set(llama["backends"])
    assert "CPU" in [device["name"] for device in llama["devices"]]
    assert 0 < machine["free_memory_bytes"] <= machine["total_memory_bytes"]
    assert machine["cores"] >= 1
    assert machine["model_folder"] == str(Path(cli.environment["HF_HOME"]) / "hub")
    assert machine["hub_is_offline"] is True
    assert [card["used_bytes"] for card in document["cards"]] == [GIB, 21 * GIB]
    assert document["cards"][0]["compute_capability"] == [8, 9]
    assert document["cards"][1]["processes"][0] == {"pid": 4242, "name": "/usr/bin/blender", "used_bytes": 17 * GIB}
    texts = "\n".join(finding["text"] for finding in document["findings"])
    assert "card 2 does not answer: GPU is lost" in texts
    assert "blender (4242, 17.0 GiB)" in texts
    assert "HF_HUB_OFFLINE" in texts
    assert document["driver"] == "575.57.08"


@pytest.mark.parametrize(
    "variables", [{"HF_HUB_CACHE": "/a/b"}, {"HF_HUB_CACHE": "", "HF_HOME": "", "XDG_CACHE_HOME": "/c"}]
)
def test_where_models_are_kept_is_where_the_hub_keeps_them(cli: Cli, variables: dict[str, str]) -> None:
    folder = cli("doctor", "--quick", "--json", HF_HUB_OFFLINE="0", **variables).document()["machine"]
    assert folder["model_folder"] == (variables["HF_HUB_CACHE"] or "/c/huggingface/hub")
    assert folder["hub_is_offline"] is False


def test_llama_cpp_that_cannot_be_loaded(cli: Cli, tmp_path: Path) -> None:
    done = cli("doctor", "--quick", "--json", LLAMA_CPP_LIB_PATH=str(tmp_path))
    well(done)
    assert done.code == 1
    first = done.document()["findings"][0]
    assert (first["level"], first["fix"]) == ("error", "scripts/bootstrap")
    assert "llama-cpp-python cannot be loaded" in first["text"]
    assert done.document()["machine"]["cores"] >= 1


def test_llama_cpp_that_crashes_does_not_take_the_doctor_with_it(cli: Cli, tmp_path: Path) -> None:
    """The library's constructor aborts, as a broken driver makes ggml do."""
    source, library = tmp_path / "abort.c", tmp_path / "libllama.so"
    source.write_text("#include <stdlib.h>\n__attribute__((constructor)) static void end(void) { abort(); }\n")
    nvml.compile_library(source, library)
    done = cli("doctor", "--quick", "--json", LLAMA_CPP_LIB_PATH=str(tmp_path))
    well(done)
    first = done.document()["findings"][0]
    assert (done.code, first["level"], first["fix"]) == (1, "error", "scripts/bootstrap")
    assert "SIGABRT" in first["text"]


@pytest.mark.parametrize(
    "cards",
    [
        "card",
        "narrow,hidden",
        *(pytest.param(c, marks=pytest.mark.full) for c in ("", "bare", "1@nvmlDeviceGetHandleByIndex_v2")),
    ],
)
def test_odd_machines(cli: Cli, library: dict[str, str], cards: str) -> None:
    well(cli("doctor", "--quick", "--json", FAKE_NVML=cards, **library))
    shown = cli("doctor", "--quick", FAKE_NVML=cards, **library)
    assert shown.stderr == ""
    assert shown.stdout.count("RTX 4090") >= len([word for word in cards.split(",") if word and "@" not in word])


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.full)])
def test_what_people_see_fits_the_terminal(cli: Cli, library: dict[str, str], columns: int) -> None:
    child = cli.terminal(
        "doctor", "--quick", columns=columns, FAKE_NVML="busy,narrow,15@nvmlDeviceGetMemoryInfo", **library
    )
    raw = rest(child)
    lines = plain(raw).splitlines()
    assert "\x1b[" in raw
    assert max(len(line) for line in lines if " --index " not in line) <= columns  # a line to be copied is whole
    assert any(line.startswith("backends") and "CPU" in line for line in lines)
    assert any("NVIDIA GeForce RTX 4090" in line and "4.0 ×16" in line and "37%" in line for line in lines)
    assert any("blender (4242)" in line and "17.0" in line for line in lines)
    assert any(line.startswith("error") for line in lines)
    assert any(line.startswith("warning") for line in lines)
    assert any(line.strip() == "fix    nvidia-smi" for line in lines)
    assert child.exitstatus == 1


def test_without_colour_it_says_the_same(cli: Cli, library: dict[str, str]) -> None:
    cards = {"FAKE_NVML": "busy,narrow"}
    colour = rest(cli.terminal("doctor", "--quick", **cards, **library))
    bare = rest(cli.terminal("doctor", "--quick", NO_COLOR="1", **cards, **library))
    assert "\x1b[3" in colour
    assert "\x1b[3" not in bare

    def words(text: str) -> list[str]:
        text = re.sub(r"warning +other programs.*?head *\n", "", plain(text), flags=re.DOTALL)  # comes and goes
        return [line for line in text.splitlines() if not line.startswith(("memory", "models", "CPU"))]

    assert words(bare) == words(colour)


@pytest.mark.full
def test_the_self_check_is_in_the_document_and_shown(cli: Cli) -> None:
    document = cli("doctor", "--json").document()
    check = document["self_check"]
    assert check["seconds"] > 0
    assert {row["outcome"] for row in check["rows"]} == {"ok"}
    assert check["rows"][0]["step"] == {"type": "F16", "place": "", "flash": "", "batch": 0}
    shown = cli.terminal("doctor", columns=80)
    text = plain(rest(shown))
    assert "are computed correctly on the host" in " ".join(text.split())
    assert "self-check: Q4_K_M" in text  # what it is at, while it is
    assert "CPU : " in text
