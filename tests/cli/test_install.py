"""The prebuilt llama-cpp-python for a machine, and what to type where this installation is broken."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from ggufspec.hardware import install
from ggufspec.hardware.gpus import GpuSurvey
from ggufspec.hardware.install import InstallFacts, choose_wheels, pip_line, prebuilt_line

LINUX = InstallFacts("Linux", "x86_64", (3, 12))
WINDOWS = InstallFacts("Windows", "AMD64", (3, 12))
MAC = InstallFacts("Darwin", "arm64", (3, 12))
RTX_4090, GTX_1080, RTX_5090 = (8, 9), (6, 1), (12, 0)


@pytest.mark.parametrize(
    ("facts", "index"),
    [
        (replace(LINUX, cuda=(12, 4), capability=RTX_4090), "cu124"),
        (replace(LINUX, cuda=(12, 9), capability=RTX_4090), "cu125"),
        (replace(LINUX, cuda=(13, 0), capability=RTX_4090), "cu130"),
        (replace(LINUX, cuda=(13, 5), capability=RTX_5090), "cu132"),
        (replace(LINUX, cuda=(13, 5), capability=GTX_1080), "cu125"),  # CUDA 13 has no code for it
        (replace(LINUX, cuda=(11, 8), capability=RTX_4090), "cu118"),
        (replace(LINUX, cuda=(12, 0), capability=(9, 0)), "cpu"),  # 11.8 has no code for it, 12.1 is too new
        (replace(LINUX, cuda=(11, 4), capability=RTX_4090), "cpu"),
        (replace(LINUX, cuda=(12, 4), capability=(5, 2)), "cpu"),
        (replace(LINUX, cuda=(12, 4)), "cu124"),  # the card does not tell
        (replace(WINDOWS, cuda=(12, 3), capability=RTX_4090), "cu118"),  # 12.1 to 12.3 are built on Linux alone
        (replace(WINDOWS, cuda=(12, 4), capability=RTX_4090), "cu124"),
        (replace(LINUX, arch="aarch64", cuda=(12, 4), capability=(8, 7)), "cpu"),  # a Jetson
        (replace(LINUX, cuda=(12, 4), capability=RTX_4090, amd=True, rocm=True, vulkan=True), "cu124"),
        (MAC, "metal"),
        (replace(LINUX, amd=True, rocm=True, vulkan=True), "rocm72"),
        (replace(LINUX, amd=True, vulkan=True), "vulkan"),
        (replace(LINUX, amd=True), "cpu"),
        (replace(WINDOWS, amd=True), "hip-radeon"),
        (replace(LINUX, vulkan=True), "vulkan"),
        (replace(WINDOWS, vulkan=True), "vulkan"),
        (LINUX, "cpu"),
        (WINDOWS, "cpu"),
        (replace(LINUX, arch="aarch64"), "cpu"),
        (replace(LINUX, arch="riscv64"), "cpu"),
    ],
)
def test_the_index(facts: InstallFacts, index: str) -> None:
    wheels = choose_wheels(facts)
    assert wheels is not None
    assert wheels.index == f"https://abetlen.github.io/llama-cpp-python/whl/{index}"
    assert "RPC" in wheels.lacks[0]
    assert bool(wheels.runtime) == (wheels.backend == "cuda") == index.startswith("cu")


@pytest.mark.parametrize(
    "facts", [replace(MAC, arch="x86_64"), replace(LINUX, arch="s390x"), InstallFacts("SunOS", "", (3, 12))]
)
def test_machines_that_nobody_builds_for(facts: InstallFacts) -> None:
    assert choose_wheels(facts) is None


def test_what_the_wheels_lack() -> None:
    def lacks(facts: InstallFacts) -> str:
        wheels = choose_wheels(facts)
        assert wheels is not None
        return "; ".join(wheels.lacks)

    cuda = replace(LINUX, cuda=(12, 4), capability=RTX_4090)
    assert "AVX2" in lacks(cuda)
    assert "the CUDA runtime" in lacks(cuda)
    assert "ROCm 7.2 itself" in lacks(replace(LINUX, amd=True, rocm=True))
    assert "ROCm 7.2" not in lacks(replace(WINDOWS, amd=True))
    assert "AVX-512 and AMX" in lacks(LINUX)
    assert "AVX" not in lacks(MAC)
    assert "AVX" not in lacks(replace(LINUX, arch="aarch64"))


def test_the_lines_that_install() -> None:
    wheels = choose_wheels(replace(LINUX, cuda=(12, 4), capability=RTX_4090))
    assert wheels is not None
    assert prebuilt_line(wheels) == (
        "uv tool install . --index https://abetlen.github.io/llama-cpp-python/whl/cu124 "
        "--no-build-package llama-cpp-python --with nvidia-cuda-runtime-cu12 --with nvidia-cublas-cu12"
    )
    newest = choose_wheels(replace(LINUX, python=(3, 14), cuda=(13, 0), capability=RTX_4090))
    assert newest is not None
    uv = prebuilt_line(newest)
    assert uv.startswith("uv tool install . --python 3.12 --index ")
    assert shlex.split(uv)[-1] == "nvidia-cublas==13.*"


def test_python_of_its_own_choice_where_any_will_do() -> None:
    wheels = choose_wheels(replace(LINUX, python=(3, 14)))
    assert wheels is not None
    assert "--python" not in prebuilt_line(wheels)


# this installation


@pytest.mark.parametrize(
    ("pip", "start"), [(True, "{python} -m pip install"), (False, "uv pip install --python {python}")]
)
def test_an_environment_is_mended_by_its_pip_or_by_uv(monkeypatch: pytest.MonkeyPatch, pip: bool, start: str) -> None:
    """Those that pipx makes have pip, those of uv have none; uv knows pip's options."""
    monkeypatch.setattr(install, "IN_CHECKOUT", False)
    monkeypatch.setattr(install.sys, "executable", "/an environment/bin/python")
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: name if pip else None)
    wheels = choose_wheels(LINUX)
    assert wheels is not None
    line = prebuilt_line(wheels)
    assert line == pip_line(wheels)
    assert line.startswith(
        start.format(python="'/an environment/bin/python'") + " --force-reinstall --extra-index-url "
    )
    assert shlex.split(line)[-1] == install.requirement()
    assert shlex.split(line)[-3:-1] == ["--only-binary", "llama-cpp-python"]
    source = install.repair_command("cuda", source=True)  # with RPC, or where there are no wheels
    assert "--no-binary llama-cpp-python" in source
    assert 'cmake.args=-DGGML_RPC=on;-DGGML_CUDA=on"' in source


def test_a_checkout_is_mended_by_its_script() -> None:
    assert install.IN_CHECKOUT  # of the tests' own
    assert install.repair_command() == "scripts/bootstrap"
    assert install.repair_command("vulkan", source=True) == "scripts/bootstrap --backend vulkan"


def test_the_requirement_is_the_project_s() -> None:
    assert install.requirement().startswith("llama-cpp-python")
    assert ">=0.3." in install.requirement()
    assert install.requirement("no-such-package") == "no-such-package"


@pytest.mark.parametrize(
    ("complaint", "line"),
    [
        (
            "Failed to load: libcudart.so.12: cannot open shared object file",
            "nvidia-cuda-runtime-cu12 nvidia-cublas-cu12",
        ),
        ("libcublas.so.13: cannot open", '"nvidia-cuda-runtime==13.*" "nvidia-cublas==13.*"'),
        ("libcublasLt.so.11: cannot open", "nvidia-cuda-runtime-cu11 nvidia-cublas-cu11"),
        ("libcudart.so.99: cannot open", "scripts/bootstrap"),
        ("libgomp.so.1: cannot open", "libgomp1"),
        ("libvulkan.so.1: cannot open", "libvulkan1"),
        ("libamdhip64.so.7: cannot open", "ROCm"),
        ("No module named 'llama_cpp'", "scripts/bootstrap"),
        ("libc.musl-x86_64.so.1: cannot open", "scripts/bootstrap"),
    ],
)
def test_what_is_missing_is_named(complaint: str, line: str) -> None:
    assert line in install.remedy(complaint)


# this machine


def test_what_a_machine_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.platform, "system", lambda: "Linux")
    bare = install.machine_facts(GpuSurvey((), (), None), tmp_path)
    assert (bare.cuda, bare.capability, bare.amd, bare.rocm, bare.vulkan) == (None, None, False, False, False)
    vendor = tmp_path / "sys/class/drm/card0/device/vendor"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("0x1002\n")
    (tmp_path / "opt/rocm-7.2.1/lib").mkdir(parents=True)
    (tmp_path / "opt/rocm-7.2.1/lib/libamdhip64.so.7.2").touch()
    (tmp_path / "dev/dri").mkdir(parents=True)
    (tmp_path / "dev/dri/renderD128").touch()
    monkeypatch.setattr(install, "_loads", lambda *names: names == ("libvulkan.so.1",))
    found = install.machine_facts(GpuSurvey((), (), "575", (12, 9)), tmp_path)
    assert (found.amd, found.rocm, found.vulkan) == (True, True, True)
    assert found.cuda is None  # a driver without a card


def test_the_driver_tells_its_cuda_and_doctor_the_line(cli, tmp_path: Path) -> None:
    from tests.support import nvml

    document = cli("doctor", "--quick", "--json", FAKE_NVML="card", **nvml.build(tmp_path)).document()
    found = document["prebuilt"]
    assert (found["backend"], found["index"].rpartition("/")[2]) == ("cuda", "cu125")
    assert found["command"].startswith("uv tool install . --")
    assert "--with nvidia-cublas-cu12" in found["command"]
    assert json.dumps(found["lacks"]).count("AVX2") == 1
    shown = cli("doctor", "--quick", FAKE_NVML="card", **nvml.build(tmp_path)).stdout
    assert f"\n{found['command']}\n" in shown  # whole, however narrow the terminal: it is to be copied
