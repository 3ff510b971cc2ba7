"""llama.cpp as others built it, for real: without RPC, of another version, without CUDA's runtime."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ggufspec.errors import GgufspecError
from ggufspec.hardware import install
from ggufspec.llamacpp import library
from ggufspec.llamacpp.library import MissingFunctionError
from tests.support import shapes
from tests.support.libraries import compiled, without_rpc
from tests.support.processes import Cli

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="made with the linker's options of Linux")


# without RPC


@pytest.fixture(scope="module")
def no_rpc(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("prebuilt")
    return {"LLAMA_CPP_LIB_PATH": str(without_rpc(folder / "lib")), "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "llama3-70b-q3_k_s.gguf"
    return shapes.write(path, shapes.SHAPES["llama3-70b-q3_k_s"], tokenizer=True)


def test_doctor_sees_that_rpc_is_missing(cli: Cli, no_rpc: dict[str, str]) -> None:
    done = cli("doctor", "--quick", "--json", **no_rpc)
    document = done.document()
    assert (done.code, document["llama_cpp"]["backends"]) == (0, ["CPU"])
    warning = next(finding for finding in document["findings"] if finding["level"] == "warning")
    assert "without RPC" in warning["text"]
    assert warning["fix"] == "scripts/bootstrap"


def test_a_card_that_is_not_here_is_planned_by_the_cpu_s_buffers(cli: Cli, no_rpc: dict[str, str], large: Path) -> None:
    card = ("--gpu", "RTX 4090", "--json")
    estimated = cli("plan", "-m", large, *card, **no_rpc)
    assert estimated.code == 0, estimated.stderr
    shown = cli("plan", "-m", large, "--gpu", "RTX 4090", **no_rpc).stdout
    assert "Bytes are estimates, not llama.cpp's own." in shown
    assert "built without RPC" in shown
    plan, confirmed = estimated.document(), cli("plan", "-m", large, *card).document()
    assert (plan["confirmed"], confirmed["confirmed"]) == (False, True)
    assert any("built without RPC" in note and "ggufspec doctor" in note for note in plan["notes"])
    assert plan["schema"] == confirmed["schema"]
    # A card's compute buffer is taken to be a little larger than the CPU's.
    assert 0 <= confirmed["target"]["gpu_layers"] - plan["target"]["gpu_layers"] <= 1
    assert plan["devices"][0]["used_bytes"] <= plan["devices"][0]["budget_bytes"]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("profiles", "show", "demo"), marks=pytest.mark.full),
        ("plan", "demo"),
        ("run", "demo", "-p", "def f(", "-n", "4"),
    ],
)
def test_what_needs_no_rpc_works_without(cli: Cli, no_rpc: dict[str, str], arguments: tuple[str, ...]) -> None:
    done = cli(*arguments, **no_rpc)
    assert done.code == 0, done.stderr
    assert done.stdout


def test_an_export_for_a_card_that_is_not_here_works_without(cli: Cli, no_rpc: dict[str, str], large: Path) -> None:
    asked = ("export", "-m", large, "--to", "llama-server", "--vram", "24GiB")
    layers = [
        done.stdout.split("--n-gpu-layers", 1)[1].split()[0] if "--n-gpu-layers" in done.stdout else done.stdout
        for done in (cli(*asked), cli(*asked, **no_rpc))
    ]
    assert layers[0] == layers[1]


@pytest.mark.parametrize(
    "arguments", [("worker", "--port", "0"), ("run", "demo", "-p", "a", "--rpc", "127.0.0.1:{port}")]
)
def test_what_needs_rpc_says_so(cli: Cli, no_rpc: dict[str, str], arguments: tuple[str, ...], listening: int) -> None:
    done = cli(*(word.format(port=listening) for word in arguments), **no_rpc)
    assert done.code == 1
    assert "this llama.cpp was built without RPC" in done.stderr
    assert "scripts/bootstrap" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def listening() -> Iterator[int]:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


# of another version


def test_libraries_without_a_function_that_is_needed(cli: Cli, tmp_path: Path) -> None:
    compiled("int nothing;", tmp_path / "libllama.so")
    done = cli("doctor", "--quick", "--json", LLAMA_CPP_LIB_PATH=str(tmp_path))
    first = done.document()["findings"][0]
    assert (done.code, first["level"], first["fix"]) == (1, "error", "scripts/bootstrap")
    assert "llama-cpp-python and its libraries do not match" in first["text"]
    assert "undefined symbol: llama_" in first["text"]
    ran = cli("run", "demo", "-p", "a", LLAMA_CPP_LIB_PATH=str(tmp_path))
    assert (ran.code, ran.stdout) == (1, "")
    assert "do not match" in ran.stderr
    assert "scripts/bootstrap" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_function_that_is_missing_is_a_failure_with_a_hint() -> None:
    lib = library.load_library()
    for whole in (lib, lib._lib):
        assert not hasattr(whole, "llama_of_tomorrow")
        with pytest.raises(MissingFunctionError, match="has no llama_of_tomorrow") as caught:
            whole.llama_of_tomorrow()
        assert isinstance(caught.value, GgufspecError)
        assert caught.value.hint == "scripts/bootstrap"
    assert lib.llama_decode is lib.llama_decode
    assert lib._lib.ggml_backend_reg_count is lib._lib.ggml_backend_reg_count


@pytest.mark.parametrize("version", ["0.3.35", "0.3.4+cu124", "0.2.90", "0.4.0", "1.0"])
def test_a_version_that_ggufspec_is_not_made_for(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed(monkeypatch, version)
    with pytest.raises(GgufspecError, match="is installed, but ggufspec needs llama-cpp-python") as caught:
        library._check_version()
    assert (caught.value.message.count(version), caught.value.hint) == (1, "scripts/bootstrap")


@pytest.mark.parametrize("version", ["0.3.36", "0.3.36+cu124", "0.3.37", "0.3.100", "0.3.36.post1"])
def test_versions_that_it_is_made_for(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed(monkeypatch, version)
    library._check_version()


def installed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == "llama-cpp-python" else real(name)
    )
    monkeypatch.setattr(install, "requirement", lambda: "llama-cpp-python<0.4,>=0.3.36")


# without CUDA's runtime


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A llama.cpp that needs CUDA's runtime as the prebuilt ones do, and a folder of packages that have it.

    cuBLAS needs cuBLASLt and NVRTC of another package, as NVIDIA's does.
    """
    folder = tmp_path_factory.mktemp("cuda")
    packages = folder / "packages"
    abort = "#include <stdlib.h>\n__attribute__((constructor)) static void end(void) { abort(); }"
    compiled(abort, packages / "nvidia/cu13/lib/libcudart.so.13")  # of another version: it is not to be loaded
    cudart = compiled("int cudart(void) { return 1; }", packages / "nvidia/cuda_runtime/lib/libcudart.so.12")
    nvrtc = compiled("int nvrtc(void) { return 2; }", packages / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
    light = compiled(
        "int nvrtc(void); int light(void) { return nvrtc(); }",
        packages / "nvidia/cublas/lib/libcublasLt.so.12",
        needs=(nvrtc,),
    )
    cublas = compiled(
        "int light(void); int cublas(void) { return light(); }",
        packages / "nvidia/cublas/lib/libcublas.so.12",
        needs=(light,),
    )
    source = """
    int cudart(void), cublas(void);
    void *ggml_backend_rpc_reg(void) { return cudart() + cublas() == 3 ? 0 : (void *)1; }
    """
    return SimpleNamespace(lib=without_rpc(folder / "lib", source, (cudart, cublas)), packages=packages)


def test_the_runtime_of_packages_is_found(cli: Cli, cuda: SimpleNamespace) -> None:
    variables = {"LLAMA_CPP_LIB_PATH": str(cuda.lib), "PYTHONPATH": str(cuda.packages)}
    assert cli("doctor", "--quick", "--json", **variables).document()["llama_cpp"]["backends"] == ["CPU"]
    ran = cli("run", "demo", "-p", "def f(", "-n", "4", "--json", **variables)
    assert (ran.code, len(ran.document()["tokens"])) == (0, 4)


def test_without_packages_the_hint_names_them(cli: Cli, cuda: SimpleNamespace) -> None:
    first = cli("doctor", "--quick", "--json", LLAMA_CPP_LIB_PATH=str(cuda.lib)).document()["findings"][0]
    assert first["level"] == "error"
    assert "libcu" in first["text"]
    assert "cannot open shared object file" in first["text"]
    assert first["fix"] == f"{shlex.quote(sys.executable)} -m pip install nvidia-cuda-runtime-cu12 nvidia-cublas-cu12"


def test_packages_that_are_not_needed_stay_unloaded(cli: Cli, cuda: SimpleNamespace) -> None:
    """A llama.cpp that was built here may want another runtime."""
    import subprocess

    program = (
        "import json; from ggufspec.llamacpp.library import load_library; load_library();"
        "print(json.dumps('libcudart' in open('/proc/self/maps').read()))"
    )
    environment = cli.environment | {"PYTHONPATH": str(cuda.packages)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) is False
