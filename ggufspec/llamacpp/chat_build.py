"""Compilation of the wrapper around llama.cpp's chat library (``ggufspec doctor --chat-library``).

The headers come from the source distribution of the installed llama-cpp-python version, which pip fetches.
Compiling needs C++17 and takes a few seconds. ``scripts/bootstrap`` does this for a checkout.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from ggufspec.errors import GgufspecError
from ggufspec.llamacpp import chat_library
from ggufspec.llamacpp.library import imported

_PACKAGE = "llama-cpp-python"
_INCLUDED = ("common", "include", "ggml/include")  # llama.cpp's include folders


def build(compiler: str = "", headers: Path | None = None) -> Path:
    """Compile the wrapper into this environment, and return the path of the library.

    ``compiler`` is a command such as ``clang++ -m64`` (default: the first compiler found). ``headers`` is a folder with
    the source of the installed llama.cpp version (default: fetch it).

    Raises:
        GgufspecError: there is no compiler, or the source is unavailable or does not compile.
    """
    common = chat_library.common_library(imported())
    command = _compiler(compiler)
    path = chat_library.library_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        source, part = headers or _fetched(Path(folder)), Path(folder) / path.name
        options = ["-std=c++17", "-O2", "-fPIC", "-shared", *(f"-I{source / one}" for one in _INCLUDED)]
        undefined = "-Wl,-undefined,dynamic_lookup" if sys.platform == "darwin" else "-Wl,--allow-shlib-undefined"
        # Set no rpath: libllama-common is already loaded, and an rpath could load a second libllama
        _run([*command, *options, str(chat_library.SOURCE), "-o", str(part), str(common), undefined])
        part.replace(path)
    return path


def _compiler(asked: str) -> list[str]:
    found = shlex.split(asked) or next(([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), [])
    if not found or not shutil.which(found[0]):
        raise GgufspecError(
            f"there is no C++ compiler {found[0]}" if found else "there is no C++ compiler",
            "sudo apt install g++ (dnf install gcc-c++; xcode-select --install)",
        )
    return found


def _fetched(folder: Path) -> Path:
    """Fetch llama.cpp's headers from the source distribution."""
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else ["uv", "tool", "run", "pip"]
    version = importlib.metadata.version(_PACKAGE)
    wanted = ["--no-deps", "--no-binary", _PACKAGE, "--dest", str(folder), f"{_PACKAGE}=={version}"]
    _run([*pip, "download", "--no-input", *wanted])
    packed = next(folder.glob("*.tar.gz"))
    with tarfile.open(packed) as files:
        headers = [one for one in files.getmembers() if "/vendor/llama.cpp/" in one.name and one.name.endswith(".h")]
        files.extractall(folder, headers, filter="data")
    return folder / packed.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise GgufspecError(f"{command[0]} cannot be run: {error.strerror}", "install it") from None
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        wrong = next((line for line in said if "error" in line.lower()), said[-1] if said else "no message")
        raise GgufspecError(f"{Path(command[0]).name} fails: {wrong.strip()[:300]}", shlex.join(command))
