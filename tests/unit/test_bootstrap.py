"""scripts/bootstrap as people meet it: in child processes on a copy of the checkout; its decisions as plain calls."""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout with nothing made in it yet, in a folder with a space."""
    root = tmp_path / "a copy"
    shutil.copytree(CHECKOUT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copy(CHECKOUT / "pyproject.toml", root)
    return root


@pytest.fixture
def script(copy: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The copy's bootstrap, as a module."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    return load(copy / "scripts" / "bootstrap")


def load(path: Path) -> ModuleType:
    loader = SourceFileLoader(path.name, str(path))
    spec = importlib.util.spec_from_loader(path.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """The whole PATH of a child: empty, until a test puts programs there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def program(path: Path, body: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def environment(path: Path, **more: str) -> dict[str, str]:
    """A child's environment: PATH is ``path`` alone, and pip knows no index."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "CMAKE_", "CUDA_", "CXX"))}
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(path)}
    return {**kept, **offline, "PATH": str(path), **more}


def start(copy: Path, env: dict[str, str], *args: str) -> subprocess.Popen[str]:
    command: list[str | Path] = [sys.executable, copy / "scripts" / "bootstrap", *args]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(child: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and stderr; nothing may be on stdout, and no failure may be a traceback."""
    out, err = child.communicate(timeout=120)
    assert out == ""
    assert "Traceback" not in err
    return child.returncode, err


def made(copy: Path, script: ModuleType, bin_folder: Path, *args: str) -> dict[str, object]:
    """Make .venv by hand, and return the stamp that a finished bootstrap would leave there."""
    venv.create(copy / ".venv", symlinks=True)
    site = copy / ".venv" / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    (site / "pip").mkdir()
    (site / "pip" / "__init__.py").touch()
    want, _ = script.plan(script.arguments(args), environment(bin_folder))
    return dict(want) | {"check": {"passed": True}}


# -- as a child process ----------------------------------------------------------------------------------------------


def test_no_compiler_is_said_before_anything_is_made(copy: Path, bin_folder: Path) -> None:
    code, err = finish(start(copy, environment(bin_folder)))
    assert code == 1
    assert "no C++ compiler" in err
    assert "Install one: " in err
    assert sorted(path.name for path in copy.iterdir()) == ["pyproject.toml", "scripts"]


ELSEWHERE = """
import platform, runpy, signal, sys
system, script = sys.argv[1:]
platform.system = lambda: system
if system == "Windows":
    for name in ("fcntl", "resource", "termios"):
        sys.modules[name] = None  # its import raises ImportError
    for name in ("SIGHUP", "SIGKILL"):
        delattr(signal, name)
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("system", "message"), [("Darwin", "Install one: xcode-select --install"), ("Windows", "WSL 2: wsl --install")]
)
def test_first_message_of_other_systems(copy: Path, bin_folder: Path, system: str, message: str) -> None:
    command = [sys.executable, "-c", ELSEWHERE, system, str(copy / "scripts" / "bootstrap")]
    env = environment(bin_folder)
    code, err = finish(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    assert code == 1
    assert message in err
    assert sorted(path.name for path in copy.iterdir()) == ["pyproject.toml", "scripts"]


@pytest.mark.skipif(platform.system() == "Darwin", reason="asks xcode-select too")
def test_failed_build_shows_the_reason_and_leaves_nothing_whole(copy: Path, bin_folder: Path) -> None:
    program(bin_folder / "c++")
    code, err = finish(start(copy, environment(bin_folder)))
    assert code == 1
    assert "No matching distribution found for llama-cpp-python==" in err
    assert str(copy / ".cache" / "build.log") in err
    assert "check the network" in err
    assert not (copy / ".venv" / "bootstrap.json").exists()
    assert list((copy / ".cache").glob("wheels/*")) == []


@pytest.mark.skipif(platform.system() == "Darwin", reason="asks xcode-select too")
@pytest.mark.parametrize(("sign", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_while_at_work(copy: Path, bin_folder: Path, sign: signal.Signals, expected: int) -> None:
    program(bin_folder / "c++")
    child = start(copy, environment(bin_folder))
    while not (copy / ".venv" / "bin").exists():  # half-made now
        assert child.poll() is None
    child.send_signal(sign)
    code, _ = finish(child)
    assert code == expected
    assert not (copy / ".venv").exists()


def test_second_call_does_nothing(copy: Path, script: ModuleType, bin_folder: Path) -> None:
    script.STAMP.parent.mkdir()
    script.STAMP.write_text(json.dumps(made(copy, script, bin_folder, "--dev")))
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    assert finish(start(copy, environment(bin_folder))) == (0, "")
    code, err = finish(start(copy, environment(bin_folder), "-v"))
    assert code == 0
    assert "ready" in err
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_changed_project_is_noticed(copy: Path, script: ModuleType, bin_folder: Path) -> None:
    stamp = made(copy, script, bin_folder)
    script.STAMP.write_text(json.dumps(stamp))
    with (copy / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    code, err = finish(start(copy, environment(bin_folder)))
    assert code == 1
    assert "no C++ compiler" in err


@pytest.mark.skipif(platform.system() == "Darwin", reason="asks xcode-select too")
def test_second_of_two_waits_and_finds_the_work_done(copy: Path, script: ModuleType, bin_folder: Path) -> None:
    program(bin_folder / "c++")
    stamp = made(copy, script, bin_folder)
    script.CACHE.mkdir()
    with (script.CACHE / "bootstrap.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        child = start(copy, environment(bin_folder))
        assert child.stderr is not None
        assert "waiting" in child.stderr.readline()
        script.STAMP.write_text(json.dumps(stamp))
    assert finish(child) == (0, "")


def test_bench_runs_from_anywhere(copy: Path, script: ModuleType, bin_folder: Path, tmp_path: Path) -> None:
    script.STAMP.parent.mkdir()
    stamp = made(copy, script, bin_folder)
    script.STAMP.write_text(json.dumps(stamp))
    program(copy / ".venv" / "bin" / "ggufspec", 'pwd; for word in "$@"; do echo "<$word>"; done')
    link = tmp_path / "bench-link"
    link.symlink_to(copy / "scripts" / "bench")
    (bin_folder / "python3").symlink_to(sys.executable)
    env = {**environment(bin_folder), "PATH": f"{bin_folder}:/usr/bin:/bin", "CDPATH": str(copy)}
    done = subprocess.run(
        [link, "-m", "a model.gguf"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [str(tmp_path), "<bench>", "<-m>", "<a model.gguf>"]


# -- an old Python ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bootstrap", "peers", "real-models", "vulkan"])
def test_old_python_can_read_it(name: str) -> None:
    ast.parse((CHECKOUT / "scripts" / name).read_text(), feature_version=(3, 7))


def test_old_python_is_told(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(SystemExit, match=r"3\.11 or newer is needed; this is Python 3\.9"):
        load(Path(script.__file__ or ""))


# -- decisions -------------------------------------------------------------------------------------------------------


def machine(script: ModuleType, **facts: object) -> object:
    none = {"system": "Linux", "arch": "x86_64", "nvcc": None, "nvidia": False, "card": False, "vulkan_lacks": ()}
    return script.Machine(**{**none, "vulkan_headers": 313, **facts})


@pytest.mark.parametrize(
    ("facts", "backend", "note"),
    [
        ({}, "cpu", ""),
        ({"nvcc": "/opt/nvcc", "nvidia": True, "card": True}, "cuda", ""),
        ({"nvcc": "/opt/nvcc"}, "cpu", "no NVIDIA GPU"),
        ({"nvidia": True}, "cpu", "no nvcc"),
        ({"nvidia": True, "card": True}, "vulkan", "no nvcc"),
        ({"card": True}, "vulkan", ""),
        ({"card": True, "vulkan_lacks": ("glslc",), "vulkan_headers": 204}, "cpu", ""),
        (
            {"card": True, "vulkan_headers": 229},
            "cpu",
            "Vulkan headers 1.3.230 or newer, and those here have the number 229",
        ),
        ({"system": "Darwin", "arch": "arm64"}, "metal", ""),
        ({"system": "Darwin"}, "cpu", ""),
    ],
)
def test_backend_that_is_found(script: ModuleType, facts: dict[str, object], backend: str, note: str) -> None:
    choice = script.choose("auto", "", machine(script, **facts))
    assert choice.backend == backend
    assert note in choice.note
    assert bool(note) == bool(choice.note)
    assert choice.cmake_args.startswith("-DGGML_RPC=on")
    assert ("GGML_CUDA" in choice.cmake_args) == (backend == "cuda")


def test_own_options_come_last(script: ModuleType) -> None:
    here = machine(script, nvcc="/opt/cuda 13/nvcc", nvidia=True)
    own = script.choose("cuda", "-DGGML_RPC=off", here).cmake_args
    assert own == "-DGGML_RPC=on -DGGML_CUDA=on -DCMAKE_CUDA_COMPILER='/opt/cuda 13/nvcc' -DGGML_RPC=off"
    assert script.choose("auto", "-DGGML_HIP=on", here).cmake_args == "-DGGML_RPC=on -DGGML_HIP=on"


@pytest.mark.parametrize("backend", ["cuda", "metal"])
def test_forced_backend_that_cannot_be(script: ModuleType, backend: str) -> None:
    with pytest.raises(script.SetupError, match=f"--backend {backend} needs"):
        script.choose(backend, "", machine(script))


@pytest.mark.parametrize("where", ["PATH", "CUDA_HOME", "default"])
def test_nvcc_is_looked_for(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    nvcc = str(program(tmp_path / "cuda" / "bin" / "nvcc"))
    monkeypatch.setattr(script, "CUDA_FOLDERS", (str(tmp_path / "cuda"),) if where == "default" else ())
    env = {"PATH": str(tmp_path / "cuda" / "bin") if where == "PATH" else str(tmp_path)}
    assert script.look(env | ({"CUDA_HOME": str(tmp_path / "cuda")} if where == "CUDA_HOME" else {})).nvcc == nvcc


def test_a_toolkit_is_no_card(script: ModuleType, bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "DEVICES", bin_folder)
    env = {"PATH": str(bin_folder)}
    assert not script.look(env).nvidia
    program(bin_folder / "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert not script.look(env).nvidia
    program(bin_folder / "nvidia-smi", "echo 'GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1)'")
    assert script.look(env).nvidia
    (bin_folder / "nvidia-smi").unlink()
    (bin_folder / "nvidia0").touch()
    assert script.look(env).nvidia


@pytest.fixture
def sdk(tmp_path: Path, bin_folder: Path) -> Callable[[int], Path]:
    """Makes a Vulkan SDK whose headers have that number; the compiler on PATH knows no others."""
    real = shutil.which("c++")
    program(bin_folder / "c++", f'exec "{real}" -nostdinc "-I{bin_folder}" "$@"')  # GCC wants one

    def make(version: int) -> Path:
        root = bin_folder.parent / "vulkan sdk"
        program(root / "bin" / "glslc")
        for name in ("vulkan/vulkan.hpp", "spirv/unified1/spirv.hpp"):
            (root / "include" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "include" / name).touch()
        (root / "include" / "vulkan" / "vulkan_core.h").write_text(f"#define VK_HEADER_VERSION {version}\n")
        return root

    return make


def test_vulkan_wants_a_card_a_shader_compiler_and_headers(
    script: ModuleType, bin_folder: Path, sdk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "DEVICES", bin_folder)
    root = sdk(239)
    env = {"PATH": str(bin_folder), "VULKAN_SDK": str(root)}

    def backend() -> object:
        return script.choose("auto", "", script.look(env)).backend

    assert backend() == "cpu"
    (bin_folder / "dri").mkdir()
    (bin_folder / "dri" / "renderD128").touch()
    assert backend() == "vulkan"
    for part in ("bin/glslc", "include/vulkan/vulkan.hpp", "include/spirv/unified1/spirv.hpp"):
        (root / part).rename(root / "aside")
        assert backend() == "cpu"
        (root / "aside").rename(root / part)
    assert backend() == "vulkan"


def test_what_vulkan_is_built_with_is_looked_for(
    script: ModuleType, bin_folder: Path, sdk: Callable[[int], Path]
) -> None:
    root, env = sdk(239), {"PATH": str(bin_folder)}
    assert script.look_for_vulkan(env) == (("glslc", "the Vulkan headers", "SPIRV-Headers"), 0)
    assert script.look_for_vulkan(env | {"VULKAN_SDK": str(root)}) == ((), 239)
    assert script.look_for_vulkan(env | {"CMAKE_PREFIX_PATH": f"/nowhere:{root}"}) == ((), 239)
    (bin_folder / "c++").unlink()  # nothing is known of headers then, and that is no reason to refuse
    assert script.look_for_vulkan(env) == (("glslc",), 0)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, "--backend vulkan needs glslc, the Vulkan headers, SPIRV-Headers.\nInstall: "),
        (204, "Vulkan headers 1.3.230 or newer, and those here have the number 204.\nInstall the Vulkan SDK"),
    ],
)
def test_what_vulkan_lacks_is_said_before_anything_is_made(
    copy: Path, bin_folder: Path, sdk: Callable[[int], Path], version: int | None, words: str
) -> None:
    env = environment(bin_folder, VULKAN_SDK=str(sdk(version)) if version else "")
    code, err = finish(start(copy, env, "--backend", "vulkan"))
    assert code == 1
    assert words in err
    assert sorted(path.name for path in copy.iterdir()) == ["pyproject.toml", "scripts"]


def test_vulkan_is_not_refused_where_cmake_is_told_where_to_look(script: ModuleType) -> None:
    here = machine(script, vulkan_lacks=("the Vulkan headers",))
    own = "-DVulkan_INCLUDE_DIR=/opt/include"
    assert script.choose("vulkan", own, here).cmake_args == f"-DGGML_RPC=on -DGGML_VULKAN=on {own}"
    with pytest.raises(script.SetupError, match="--backend vulkan needs the Vulkan headers"):
        script.choose("vulkan", "", here)


@pytest.mark.parametrize(
    ("backend", "extra", "version", "is_forced"),
    [
        ("vulkan", "", 230, True),
        ("vulkan", "", 271, True),
        ("vulkan", "", 272, False),
        ("vulkan", "", 0, False),
        ("auto", "-DGGML_VULKAN:BOOL=ON", 239, True),
        ("auto", "-DGGML_VULKAN=off", 239, False),
        ("cpu", "", 239, False),
    ],
)
def test_old_vulkan_headers_get_the_names_they_lack(
    script: ModuleType, backend: str, extra: str, version: int, is_forced: bool
) -> None:
    own = f"-DCMAKE_CXX_FLAGS='-O1 -g' {extra}"
    cmake_args = script.choose(backend, own, machine(script, vulkan_headers=version)).cmake_args
    forced = f' -include "{script.LAYER_SETTINGS}"' if is_forced else ""
    for cpu, more in (("native", ""), ("tile-load", f' -include "{script.TILE_LOAD}"')):
        words = script.shlex.split(script.cpu_options(cmake_args, cpu, "x86_64"))
        last = [word for word in words if word.startswith("-DCMAKE_CXX_FLAGS=")][-1]
        assert last == f"-DCMAKE_CXX_FLAGS=-O1 -g{forced}{more}"


USES_LAYER_SETTINGS = """
#include <vulkan/vulkan.hpp>
#include <cstddef>
struct setting { const char *layer, *name; int type; uint32_t count; const void *values; };  // vulkan_core.h, 1.3.272
struct create_info { VkStructureType type; const void *next; uint32_t count; const vk::LayerSettingEXT *settings; };
static_assert(sizeof(vk::LayerSettingEXT) == sizeof(setting), "");
static_assert(sizeof(vk::LayerSettingsCreateInfoEXT) == sizeof(create_info), "");
int use() {
    uint32_t on = 1;
    std::vector<vk::LayerSettingEXT> settings = {{"layer", "setting", vk::LayerSettingTypeEXT::eBool32, 1, &on}};
    vk::LayerSettingsCreateInfoEXT info(settings);
    const create_info &same = reinterpret_cast<const create_info &>(info);
    return same.type == 1000496000 && !same.next && same.count == 1 && same.settings == settings.data();
}
"""
NEW_VULKAN = """
#define VK_EXT_layer_settings 1
namespace vk {
enum class LayerSettingTypeEXT { eBool32 };
struct LayerSettingEXT { const char *a, *b; LayerSettingTypeEXT c; uint32_t d; const void *e; };
struct LayerSettingsCreateInfoEXT {
    VkStructureType a; const void *b; uint32_t c; const LayerSettingEXT *d;
    LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> &) {}
};
}
"""


@pytest.mark.parametrize("more", ["", NEW_VULKAN], ids=["old", "new"])
def test_the_names_that_old_vulkan_headers_lack(tmp_path: Path, more: str) -> None:
    """As llama.cpp uses them, and laid out as newer headers have them; beside those it has no effect."""
    headers = tmp_path / "vulkan"
    headers.mkdir()
    enum = "#pragma once\n#include <cstdint>\n#include <vector>\nenum VkStructureType { VK_LAST = 0x7FFFFFFF };\n"
    (headers / "vulkan_core.h").write_text(enum + more)
    (headers / "vulkan.hpp").write_text("#include <vulkan/vulkan_core.h>\n")
    main = "int main() { return use() ? 0 : 1; }\n"
    (tmp_path / "use.cpp").write_text(USES_LAYER_SETTINGS + main)
    force = ["-include", CHECKOUT / "scripts" / "vulkan_layer_settings.h"]
    strict = ["-Wall", "-Wextra", "-Werror", "-Wpedantic"]
    flags = ["-std=c++17", "-fno-strict-aliasing", f"-I{tmp_path}", *([] if more else strict)]
    subprocess.run(["c++", *flags, *force, "-o", tmp_path / "use", tmp_path / "use.cpp"], check=True)
    if not more:
        subprocess.run([tmp_path / "use"], check=True)
    (tmp_path / "none.cpp").write_text("int none() { return 0; }\n")  # a file that knows of no Vulkan
    subprocess.run(
        ["c++", "-nostdinc", f"-I{CHECKOUT}", *strict, *force, "-fsyntax-only", tmp_path / "none.cpp"], check=True
    )


def test_what_was_asked_holds(
    copy: Path, script: ModuleType, bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "CUDA_FOLDERS", ())
    nvcc = program(bin_folder / "nvcc")
    with_cuda = environment(bin_folder, CMAKE_ARGS="-DGGML_CUDA_FA=off")
    want, _ = script.plan(script.arguments(["--backend", "cuda", "--dev"]), with_cuda)
    script.STAMP.parent.mkdir()
    script.STAMP.write_text(json.dumps(want))
    nvcc.unlink()  # another shell, without CUDA's PATH and the options
    assert script.plan(script.arguments([]), environment(bin_folder))[0] == want
    monkeypatch.setattr(script, "DEVICES", bin_folder)
    assert script.plan(script.arguments(["--backend", "auto"]), environment(bin_folder))[0]["backend"] == "cpu"


# -- a build that proves itself --------------------------------------------------------------------------------------

AMX = "flags\t\t: fpu avx avx2 avx512f amx_tile amx_int8\n"
NO_AMX = "flags\t\t: fpu avx avx2 avx512f\n"
PIP_AND_DOCTOR = """
case "$*" in
"-I -c "*) echo 3.11 ;;
"-P -m pip wheel"*)
    echo "$CMAKE_ARGS" >> "{root}/builds"
    while [ "$1" != --wheel-dir ]; do shift; done
    mkdir -p "$2"; echo "$CMAKE_ARGS" > "$2/llama.whl" ;;
"-P -m pip install"*) for word; do case "$word" in *.whl) cp "$word" "{root}/installed" ;; esac; done ;;
"-P -m ggufspec doctor --json") echo check >> "{root}/checks"; case "$(cat "{root}/installed")" in
{answers}
    esac ;;
*) echo "nobody asks this: $*"; exit 9 ;;
esac
"""
Answer = tuple[str, dict[str, object]]
GOOD_ROW = {"step": {"type": "F16", "place": "host", "flash": "on", "batch": 1}, "error": 0.01, "outcome": "ok"}


def document(*rows: dict[str, object], error: str | None = None) -> dict[str, object]:
    """What `ggufspec doctor --json` prints, as far as bootstrap reads it."""
    return {"llama_cpp": {"error": error}, "self_check": {"rows": [GOOD_ROW, *rows], "seconds": 7.1, "limit": 0.06}}


def bad(outcome: str, place: str = "host", error: float | None = None) -> dict[str, object]:
    step = {"type": "Q8_0", "place": place, "flash": "on", "batch": 4}
    return {"step": step, "error": error, "outcome": outcome, "detail": "the disk is full"}


class Proving:
    """bootstrap in this process, with a Python of .venv that builds nothing and answers what it is told to.

    ``answers``: for a build whose options match the shell's pattern, the doctor's document; the first that matches.
    """

    def __init__(self, script: ModuleType, root: Path, answers: list[Answer], *, output: str = "") -> None:
        self.script, self.root = script, root
        cases = []
        for number, (pattern, answer) in enumerate(answers):
            (root / f"{number}.json").write_text(json.dumps(answer, indent=1) if answer else output)
            cases.append(f'    {pattern}) cat "{root}/{number}.json"; exit {number % 2} ;;')
        version = script.pinned((root / "pyproject.toml").read_text())
        (root / ".cache" / f"llama_cpp_python-{version}").mkdir(parents=True)
        program(root / ".venv" / "bin" / "python", PIP_AND_DOCTOR.format(root=root, answers="\n".join(cases)))

    def __call__(self, *args: str) -> None:
        self.script.bootstrap(self.script.arguments(args))

    def lines(self, name: str) -> list[str]:
        file = self.root / name
        return file.read_text().splitlines() if file.exists() else []

    @property
    def stamp(self) -> dict[str, object]:
        return dict(json.loads(self.script.STAMP.read_text()))


@pytest.fixture
def here(script: ModuleType, tmp_path: Path, bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the processor and the compiler of this machine."""
    monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(script, "DEVICES", tmp_path / "no devices")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")

    def set_up(flags: str, *, is_wrong: bool = False) -> None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}")
        monkeypatch.setattr(script, "CPU_INFO", tmp_path / "cpuinfo")
        body = '__asm__ volatile ("ldtilecfg %X0" :: "m" (*((const void **)__config)));'
        right = "__builtin_ia32_ldtilecfg (__config);"
        text = f"_tile_loadconfig (const void *__config)\n{{\n  {body if is_wrong else right}\n}}"
        program(bin_folder / "c++", f"cat <<'EOF'\n{text}\nEOF")

    return set_up


def test_a_build_that_computes_right_is_checked_once(
    script: ModuleType, copy: Path, here: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    here(NO_AMX)
    prove = Proving(script, copy, [("*", document())])
    prove()
    assert prove.lines("builds") == ["-DGGML_RPC=on"]
    assert prove.stamp["cpu"] == "native"
    assert prove.stamp["check"] == {"passed": True, "seconds": 7.1, "largest_error": 0.01}
    capsys.readouterr()
    prove()
    assert (len(prove.lines("builds")), len(prove.lines("checks"))) == (1, 1)
    assert capsys.readouterr() == ("", "")
    prove("--check")
    assert (len(prove.lines("builds")), len(prove.lines("checks"))) == (1, 2)
    assert "computes right" in capsys.readouterr().err


def test_a_venv_of_before_is_checked_and_not_built_again(
    script: ModuleType, copy: Path, here: Callable[..., None]
) -> None:
    here(NO_AMX)
    prove = Proving(script, copy, [("*", document())])
    (copy / "installed").touch()
    want, _ = script.plan(script.arguments([]), os.environ)
    old = ("root", "pyproject", "python", "dev", "asked", "extra", "backend", "cmake_args")
    script.STAMP.write_text(json.dumps({key: want[key] for key in old}))
    prove()
    prove()
    assert (prove.lines("builds"), len(prove.lines("checks"))) == ([], 1)


def test_a_compiler_that_is_known_to_be_wrong_gets_the_corrected_load_at_once(
    script: ModuleType, copy: Path, here: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    here(AMX, is_wrong=True)
    prove = Proving(script, copy, [("*amx_tile_config.h*", document()), ("*", document(bad("SIGSEGV")))])
    prove()
    (built,) = prove.lines("builds")
    assert script.shlex.split(built)[1:] == [f'-DCMAKE_CXX_FLAGS=-include "{copy}/scripts/amx_tile_config.h"']
    assert prove.stamp["cpu"] == "tile-load"
    assert "8 of the 64 bytes" in str(prove.stamp["why"])
    assert "corrected load of AMX's tile configuration" in capsys.readouterr().err
    prove()
    assert len(prove.lines("builds")) == 1


@pytest.mark.parametrize(
    ("flags", "is_wrong", "row", "good", "expected"),
    [
        (AMX, False, bad("SIGSEGV"), "*-mno-amx-int8*", ["native", "no-amx"]),
        (AMX, True, bad("wrong", error=0.9), "*-mno-amx-int8*", ["tile-load", "no-amx"]),
        (AMX, True, bad("SIGILL"), "*GGML_AVX2=on*", ["tile-load", "no-amx", "avx2"]),
        (NO_AMX, True, bad("SIGILL"), "*GGML_AVX2=on*", ["native", "avx2"]),
        (NO_AMX, False, bad("silence"), "*GGML_AVX2=off*", ["native", "avx2", "plain"]),
        (NO_AMX, False, bad("SIGILL", ""), "*GGML_AVX2=off*", ["native", "avx2", "plain"]),
        ("flags : fpu\n", False, bad("wrong", error=1e6), "*GGML_AVX2=off*", ["native", "plain"]),
        ("", False, bad("SIGABRT"), "*GGML_NATIVE=off*", ["native", "plain"]),
    ],
)
def test_what_fails_is_built_plainer_until_it_computes_right(
    script: ModuleType,
    copy: Path,
    here: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    flags: str,
    is_wrong: bool,
    row: dict[str, object],
    good: str,
    expected: list[str],
) -> None:
    here(flags, is_wrong=is_wrong)
    prove = Proving(script, copy, [(good, document()), ("*", document(row))])
    prove()
    assert prove.lines("builds") == [script.cpu_options("-DGGML_RPC=on", cpu, "x86_64") for cpu in expected]
    stamp = prove.stamp
    assert (stamp["cpu"], stamp["cpu_asked"], stamp["cmake_args"]) == (expected[-1], "auto", prove.lines("builds")[-1])
    assert f"the self-check failed with --cpu {expected[-2]}: Q8_0 on the host" in str(stamp["why"])
    err = capsys.readouterr().err
    assert err.count("the self-check failed: Q8_0 on the host, batch size 4") == len(expected) - 1
    assert f"mended: llama.cpp is built {script.CPUS[expected[-1]]}" in err
    prove()
    prove("--dev")  # another pip install, and a check of what that made
    assert len(prove.lines("builds")) == len(expected)
    assert prove.stamp["cpu"] == expected[-1]


def test_a_library_that_dies_when_it_is_loaded_is_built_plainer_too(
    script: ModuleType, copy: Path, here: Callable[..., None]
) -> None:
    here(NO_AMX)
    dead = document(error="the child process that ran llama.cpp was ended by SIGILL: it said nothing")
    prove = Proving(script, copy, [("*GGML_AVX2=on*", document()), ("*", dead)])
    prove()
    assert prove.stamp["cpu"] == "avx2"


def test_what_nothing_mends_says_what_to_type_and_what_to_report(
    script: ModuleType, copy: Path, here: Callable[..., None]
) -> None:
    here(AMX, is_wrong=True)
    prove = Proving(script, copy, [("*", document(bad("SIGSEGV")))])
    with pytest.raises(script.SetupError) as failed:
        prove()
    text = str(failed.value)
    for cpu in ("tile-load", "no-amx", "avx2", "plain"):
        assert f"--cpu {cpu} (" in text
    assert "Q8_0 on the host, batch size 4, flash attention on: SIGSEGV" in text
    assert "CC=clang CXX=clang++" in text
    assert "Please report it" in text
    assert "ggufspec doctor --json" in text
    assert prove.stamp["check"] != {}
    with pytest.raises(script.SetupError):  # not taken for good by the next call, nor built again
        prove()
    assert len(prove.lines("builds")) == 4


@pytest.mark.parametrize(
    ("answer", "args", "words"),
    [
        (document(bad("SIGSEGV", "device")), (), "--backend cpu"),
        (document(bad("wrong", "device", 0.8)), (), "driver"),
        (document(bad("failed")), (), "the disk is full"),
        (document(bad("wrong", "", 0.8)), (), "wrong numbers"),
        (document(bad("SIGSEGV")), ("--cpu", "native"), "--cpu auto"),
        (document(error="llama-cpp-python cannot be loaded: undefined symbol: llama_x"), (), "undefined symbol"),
    ],
)
def test_what_a_plainer_build_would_not_mend_is_not_built_again(
    script: ModuleType, copy: Path, here: Callable[..., None], answer: dict[str, object], args: tuple[str], words: str
) -> None:
    here(AMX)
    prove = Proving(script, copy, [("*", answer)])
    with pytest.raises(script.SetupError, match=words):
        prove(*args)
    assert len(prove.lines("builds")) == 1


def test_a_doctor_that_does_not_answer(script: ModuleType, copy: Path, here: Callable[..., None]) -> None:
    here(NO_AMX)
    prove = Proving(script, copy, [("*", {})], output="ModuleNotFoundError: No module named 'numpy'\n")
    with pytest.raises(script.SetupError, match="does not answer:\n  ModuleNotFoundError: No module named 'numpy'"):
        prove()


def test_cpu_holds_until_another_is_asked_for(script: ModuleType, copy: Path, here: Callable[..., None]) -> None:
    here(NO_AMX)
    prove = Proving(script, copy, [("*", document())])
    for args, cpu in (((), "native"), (("--cpu", "plain"), "plain"), ((), "plain"), (("--cpu", "auto"), "native")):
        prove(*args)
        assert prove.stamp["cpu"] == cpu
    assert len(prove.lines("builds")) == 2  # wheels are kept


def test_flags_of_ones_own_are_kept(script: ModuleType) -> None:
    own = "-DGGML_RPC=on -DCMAKE_CXX_FLAGS='-O1 -g' -DGGML_BLAS=on"
    for cpu, wanted in (("tile-load", f'-O1 -g -include "{script.TILE_LOAD}"'), ("no-amx", f"-O1 -g {script.NO_AMX}")):
        words = script.shlex.split(script.cpu_options(own, cpu, "x86_64"))
        assert words[:3] == script.shlex.split(own)
        assert words[-1] == f"-DCMAKE_CXX_FLAGS={wanted}"
    assert script.cpu_options(own, "native", "x86_64") == own
    assert script.cpu_options(own, "plain", "aarch64") == f"{own} -DGGML_NATIVE=off"


@pytest.mark.parametrize("header", ["TILE_LOAD", "LAYER_SETTINGS"])
def test_the_wheel_of_a_corrected_build_depends_on_the_correction(script: ModuleType, header: str) -> None:
    old = script.vulkan_options("-DGGML_VULKAN=on", machine(script, vulkan_headers=239))
    cmake_args = script.cpu_options(old, "tile-load", "x86_64")
    before = script.wheel_folder("0.3.36", cmake_args, "3.11")
    getattr(script, header).write_text("// another\n")
    assert script.wheel_folder("0.3.36", cmake_args, "3.11") != before


def test_peers_are_built_with_the_options_of_the_build_that_computes_right(
    script: ModuleType, copy: Path, here: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    here(AMX)
    Proving(script, copy, [("*-mno-amx-int8*", document()), ("*", document(bad("SIGSEGV")))])()
    peers = load(copy / "scripts" / "peers")
    asked: list[str] = []
    monkeypatch.setattr(peers, "build", lambda names, folder, tree, version, cmake_args: asked.append(cmake_args))
    peers.peers(["llama-bench"])
    assert asked == [script.cpu_options("-DGGML_RPC=on", "no-amx", "x86_64")]


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("mmq.cpp:9:1: internal compiler error: Segmentation fault\nPlease submit a full bug report", "CXX=clang++"),
        ("c++: error: unrecognized command line option '-std=gnu++17'", "CXX=g++-12"),
        ('CMake Error: Target "ggml" requires the language dialect "CXX17"', "too old"),
        ("a.cpp:3:10: fatal error: charconv: No such file or directory", "too old"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "CMAKE_BUILD_PARALLEL_LEVEL=1"),
    ],
)
def test_compilers_that_cannot_build_it(
    script: ModuleType, copy: Path, here: Callable[..., None], log: str, words: str
) -> None:
    here(NO_AMX)
    prove = Proving(script, copy, [])
    (copy / "said").write_text(log)
    program(
        copy / ".venv" / "bin" / "python", f'case "$*" in "-I -c "*) echo 3.11;; *) cat "{copy}/said"; exit 1;; esac'
    )
    with pytest.raises(script.SetupError) as failed:
        prove()
    assert words in str(failed.value)
    assert log.splitlines()[0] in str(failed.value)
    assert list((copy / ".cache").glob("wheels/*")) == []


SIXTY_FOUR_BYTES = """
#include <cstdint>
#include <immintrin.h>
struct config { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; };
void load(int rows) {
    config tiles = {};
    tiles.palette = 1;
    for (int i = 0; i < 8; i++) { tiles.rows[i] = rows; tiles.bytes[i] = 64; }
    _tile_loadconfig(&tiles);
}
"""


def test_the_corrected_load_stores_all_64_bytes(tmp_path: Path) -> None:
    """What a compiler stores before ldtilecfg, with the flags that llama.cpp's build has where there is AMX."""
    source, flags = tmp_path / "load.cpp", ["-O3", "-march=sapphirerapids", "-mamx-tile", "-mamx-int8"]
    source.write_text(SIXTY_FOUR_BYTES)

    def assembly(*more: str | Path) -> str:
        done = subprocess.run(["c++", *flags, *more, "-S", "-o", "-", source], capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    if not assembly():
        pytest.skip("this compiler knows no AMX")
    text = assembly("-Wall", "-Wextra", "-Werror", "-include", CHECKOUT / "scripts" / "amx_tile_config.h")
    before = text[: text.index("ldtilecfg")]
    stored = set()
    for name, size, base, place in re.findall(r"\t(\w+)\s+[^\n]*?%?(\w+), (-?\d+)\((%rsp|%rbp)\)", before):
        width = next((w for sign, w in (("zmm", 64), ("ymm", 32), ("xmm", 16)) if sign in size), 0)
        width = width or {"movb": 1, "movw": 2, "movl": 4, "movq": 8}.get(name, 0)
        stored |= {int(base) + offset for offset in range(width)} if place else set()
    found = re.search(r"ldtilecfg\s+(-?\d+)\(%r[sb]p\)", text)
    assert found is not None
    assert set(range(int(found[1]), int(found[1]) + 64)) <= stored


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ({"ID": "ubuntu", "ID_LIKE": "debian"}, "sudo apt-get install g++"),
        ({"ID": "linuxmint", "ID_LIKE": "ubuntu debian"}, "sudo apt-get install g++"),
        ({"ID": "rocky", "ID_LIKE": "rhel centos fedora"}, "sudo dnf install gcc-c++"),
        ({"ID": "arch"}, "sudo pacman -S gcc"),
        ({"ID": "plan9"}, "your package manager"),
    ],
)
def test_install_command_fits_the_system(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, release: dict[str, str], command: str
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: release)
    with pytest.raises(script.SetupError) as error:
        script.need_compiler({"PATH": ""})
    assert str(error.value).endswith(f"Install one: {command}")


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ({"ID": "debian"}, "sudo apt-get install libvulkan-dev glslc spirv-headers"),
        (
            {"ID": "opensuse-tumbleweed", "ID_LIKE": "opensuse suse"},
            "sudo zypper install vulkan-headers vulkan-devel shaderc spirv-headers",
        ),
        ({"ID": "plan9"}, "the Vulkan SDK (https://vulkan.lunarg.com/sdk/home)"),
    ],
)
def test_install_command_of_vulkan_fits_the_system(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, release: dict[str, str], command: str
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: release)
    needs = script.vulkan_needs(machine(script, vulkan_lacks=("glslc", "SPIRV-Headers")))
    assert needs == f"glslc, SPIRV-Headers.\nInstall: {command}"


def test_missing_venv_module_is_told(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
    with pytest.raises(script.SetupError, match=r"apt-get install python3\.\d+-venv"):
        script.need_venv()


def test_version_is_the_lower_bound(script: ModuleType) -> None:
    assert script.pinned('[project]\ndependencies = ["numpy>=2", "llama-cpp-python>=0.3.36,<0.4"]') == "0.3.36"
    with pytest.raises(script.SetupError):
        script.pinned("[project]\ndependencies = []")


def test_each_build_has_its_own_wheel_folder(script: ModuleType) -> None:
    builds = [
        ("0.3.36", "-DA=1", "3.11"),
        ("0.3.36", "-DA=2", "3.11"),
        ("0.3.37", "-DA=1", "3.11"),
        ("0.3.36", "-DA=1", "3.12"),
    ]
    assert len({script.wheel_folder(*build) for build in builds}) == len(builds)


def test_the_last_lines_of_a_log(script: ModuleType) -> None:
    log = "-- Looking for x - failed\n[1/9] cc -Werror=x a.c\na.c:1: error: no\nok\nfatal: stop\nImportError: x.so\n"
    assert script.last_lines(log) == ["  a.c:1: error: no", "  fatal: stop", "  ImportError: x.so"]
    assert script.last_lines("one\n\ntwo\nthree\n", limit=2) == ["  two", "  three"]


# -- scripts/vulkan --------------------------------------------------------------------------------------------------

FAKE_CMAKE = """
echo "$*" >> "{root}/cmakes"
[ "$1" = --build ] || exit 0
[ -e "{root}/broken" ] && exit 1
mkdir -p "$2/bin" && cd "$2/bin" && echo built > libggml.so.0 && ln -sf libggml.so.0 libggml.so
"""
FAKE_APT = """
echo "$*" >> "{root}/apts"
case "$*" in *update) exit 100 ;; esac
mkdir -p "{root}/icd.d" && touch "{root}/icd.d/lvp_icd.x86_64.json" && cp "{root}/glslc" "{sdk}/bin/glslc"
"""


class Vulkan:
    """scripts/vulkan in this process: a wheel in .venv, the source, and a cmake that writes down what it is asked."""

    def __init__(self, copy: Path, bin_folder: Path, sdk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(bin_folder))
        monkeypatch.setenv("VULKAN_SDK", str(sdk))
        monkeypatch.setattr(platform, "system", lambda: "Linux")
        monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"ID": "debian"})
        for name in ("mkdir", "ln", "env", "timeout", "touch", "cp", "sh"):
            (bin_folder / name).symlink_to(shutil.which(name, path="/usr/bin:/bin") or "")
        program(bin_folder / "cmake", FAKE_CMAKE.format(root=copy))
        program(bin_folder / "ninja")
        self.root, self.script = copy, load(copy / "scripts" / "vulkan")
        self.bootstrap = self.script.bootstrap
        version = self.bootstrap.pinned((copy / "pyproject.toml").read_text())
        (copy / ".cache" / f"llama_cpp_python-{version}").mkdir(parents=True)
        monkeypatch.setattr(self.script, "DRIVER_FOLDERS", (copy / "none", copy / "icd.d"))
        (copy / "icd.d").mkdir()
        (copy / "icd.d" / "lvp_icd.x86_64.json").touch()
        self.wheel = copy / ".venv" / "lib" / "python3.11" / "site-packages" / "llama_cpp" / "lib"
        self.wheel.mkdir(parents=True)
        for name in ("libllama.so", "libmtmd.so", "libggml.so", "libggml-cuda.so"):
            (self.wheel / name).write_text("of the wheel")
        self.stamp(f"-DGGML_RPC=on -DGGML_CUDA=on '-DCMAKE_CXX_FLAGS=-include \"{self.bootstrap.TILE_LOAD}\"'")

    def stamp(self, cmake_args: str) -> None:
        self.bootstrap.STAMP.write_text(json.dumps({"cmake_args": cmake_args, "python": "3.11"}))

    def lines(self, name: str) -> list[str]:
        return (self.root / name).read_text().splitlines() if (self.root / name).exists() else []


@pytest.fixture
def vulkan(copy: Path, bin_folder: Path, sdk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> Vulkan:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return Vulkan(copy, bin_folder, sdk(239), monkeypatch)


def test_vulkan_is_built_beside_the_wheel_once(
    vulkan: Vulkan, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    vulkan.script.vulkan(may_install=False)
    out, _ = capsys.readouterr()
    folder = Path(out.rstrip("\n"))
    assert {file.name: file.read_text().strip() for file in folder.iterdir()} == {
        "libllama.so": "of the wheel",
        "libmtmd.so": "of the wheel",
        "libggml.so": "built",
        "libggml.so.0": "built",
    }
    assert (folder / "libggml.so").readlink() == Path("libggml.so.0")
    assert [path.name for path in folder.parent.iterdir()] == ["lib"]
    configure, build = vulkan.lines("cmakes")
    assert build.endswith("--target ggml")
    assert "-DGGML_RPC=on -DGGML_CUDA=on " in configure
    assert configure.index("-DGGML_CUDA=off") > configure.index("-DGGML_CUDA=on")
    headers = (vulkan.bootstrap.TILE_LOAD, vulkan.bootstrap.LAYER_SETTINGS)
    assert configure.endswith("-DCMAKE_CXX_FLAGS=" + " ".join(f'-include "{header}"' for header in headers))

    monkeypatch.setattr(vulkan.bootstrap, "alone", lambda lock: pytest.fail("there is nothing to wait for"))
    vulkan.script.vulkan(may_install=True)
    assert capsys.readouterr() == (out, "")
    assert (len(vulkan.lines("cmakes")), vulkan.lines("apts")) == (2, [])


@pytest.mark.parametrize("change", ["options", "header", "headers", "version"])
def test_vulkan_is_built_again_for_another_build(
    vulkan: Vulkan, sdk: Callable[[int], Path], capsys: pytest.CaptureFixture[str], change: str
) -> None:
    vulkan.script.vulkan(may_install=False)
    before = capsys.readouterr().out
    if change == "options":
        vulkan.stamp("-DGGML_RPC=on -DGGML_NATIVE=off")
    elif change == "header":
        vulkan.bootstrap.LAYER_SETTINGS.write_text("// another\n")
    elif change == "headers":
        sdk(313)
    else:
        pyproject = vulkan.root / "pyproject.toml"
        pyproject.write_text(pyproject.read_text().replace("llama-cpp-python>=", "llama-cpp-python>=9."))
        version = vulkan.bootstrap.pinned(pyproject.read_text())
        (vulkan.root / ".cache" / f"llama_cpp_python-{version}").mkdir()
    vulkan.script.vulkan(may_install=False)
    assert capsys.readouterr().out not in ("", before)
    assert len(vulkan.lines("cmakes")) == 4


def test_a_vulkan_build_that_fails_leaves_nothing_whole(vulkan: Vulkan, capsys: pytest.CaptureFixture[str]) -> None:
    (vulkan.root / "broken").touch()
    with pytest.raises(vulkan.bootstrap.SetupError, match="building ggml: failed"):
        vulkan.script.vulkan(may_install=False)
    assert list(vulkan.script.FOLDER.glob("*/lib")) == []
    (vulkan.root / "broken").unlink()
    vulkan.script.vulkan(may_install=False)
    assert Path(capsys.readouterr().out.rstrip("\n"), "libggml.so").exists()


def test_what_vulkan_lacks_is_one_sentence(vulkan: Vulkan, sdk: Callable[[int], Path]) -> None:
    (vulkan.root / "icd.d" / "lvp_icd.x86_64.json").rename(vulkan.root / "icd.d" / "radeon_icd.x86_64.json")
    (sdk(239) / "bin" / "glslc").unlink()
    with pytest.raises(vulkan.bootstrap.SetupError) as failed:
        vulkan.script.vulkan(may_install=False)
    assert str(failed.value) == (
        "glslc, Mesa's software driver: not here; "
        "install: sudo apt-get install libvulkan-dev glslc spirv-headers mesa-vulkan-drivers"
    )
    assert vulkan.lines("cmakes") == []


def test_vulkan_headers_that_are_too_old(vulkan: Vulkan, sdk: Callable[[int], Path]) -> None:
    sdk(204)
    with pytest.raises(vulkan.bootstrap.SetupError, match=r"needs Vulkan headers 1\.3\.230 or newer"):
        vulkan.script.vulkan(may_install=True)


@pytest.mark.parametrize("sudo", ["root", "free", "asks", "none"])
def test_vulkan_installs_what_it_lacks_where_no_password_is_needed(
    vulkan: Vulkan, sdk: Callable[[int], Path], bin_folder: Path, monkeypatch: pytest.MonkeyPatch, sudo: str
) -> None:
    root = sdk(239)
    (vulkan.root / "icd.d" / "lvp_icd.x86_64.json").unlink()
    (root / "bin" / "glslc").rename(vulkan.root / "glslc")
    program(bin_folder / "apt-get", FAKE_APT.format(root=vulkan.root, sdk=root))
    monkeypatch.setattr(os, "geteuid", lambda: 0 if sudo == "root" else 1000)
    if sudo in ("free", "asks"):
        program(bin_folder / "true")
        program(bin_folder / "sudo", '[ "$1" = -n ] && shift && exec "$@"' if sudo == "free" else "exit 1")
    if sudo in ("root", "free"):
        vulkan.script.vulkan(may_install=True)
        update, install = vulkan.lines("apts")
        assert update.endswith(" update")
        packages = "libvulkan-dev glslc spirv-headers mesa-vulkan-drivers"
        assert install.endswith(f" install --yes --no-install-recommends {packages}")
        assert len(vulkan.lines("cmakes")) == 2
    else:
        with pytest.raises(vulkan.bootstrap.SetupError, match="not here; install: sudo apt-get install"):
            vulkan.script.vulkan(may_install=True)
        assert (vulkan.lines("apts"), vulkan.lines("cmakes")) == ([], [])


def test_vulkan_without_a_wheel(copy: Path, bin_folder: Path) -> None:
    command: list[str | Path] = [sys.executable, copy / "scripts" / "vulkan"]
    done = subprocess.run(command, env=environment(bin_folder), capture_output=True, text=True)
    expected = "vulkan: there is no .venv with llama-cpp-python here; make it: scripts/bootstrap --dev\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)
