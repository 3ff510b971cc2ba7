"""A real shared library that plays NVIDIA's NVML (``fake_nvml.c``), for child processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

COMPILER = shutil.which("cc") or shutil.which("c++")


def build(folder: Path) -> dict[str, str]:
    """Compile the library into ``folder``; the environment variables that let a child find it."""
    compile_library(Path(__file__).with_name("fake_nvml.c"), folder / "libnvidia-ml.so.1")
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(paths)}


def compile_library(source: Path, library: Path) -> None:
    """Make a shared library of a C file."""
    assert COMPILER, "llama.cpp needs a compiler, and so does this"
    subprocess.run([COMPILER, "-x", "c", "-shared", "-fPIC", "-Wall", "-o", library, source], check=True)
