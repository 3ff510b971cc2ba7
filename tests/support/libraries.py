"""llama.cpp's libraries as others may have built them: copies of those installed, with one of them replaced."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

from tests.support.nvml import COMPILER

# libggml asks the RPC library for its registration and nothing else; a null pointer is none: ggml-backend-reg.cpp.
NO_RPC = "void *ggml_backend_rpc_reg(void) { return 0; }"


def compiled(source: str, library: Path, *, needs: tuple[Path, ...] = (), soname: str = "") -> Path:
    """A shared library of C code. It finds what it needs in its own folder or where that is loaded already."""
    assert COMPILER, "llama.cpp needs a compiler, and so does this"
    library.parent.mkdir(parents=True, exist_ok=True)
    code = library.with_suffix(".c")
    code.write_text(source)
    flags = ["-shared", "-fPIC", "-Wall", f"-Wl,-soname,{soname or library.name}", "-Wl,-rpath,$ORIGIN"]
    links = ["-Wl,--allow-shlib-undefined", *needs]
    subprocess.run([COMPILER, "-x", "c", code, "-x", "none", *flags, *links, "-o", library], check=True)
    code.unlink()
    return library


def without_rpc(folder: Path, source: str = NO_RPC, needs: tuple[Path, ...] = ()) -> Path:
    """A folder for LLAMA_CPP_LIB_PATH whose llama.cpp has no RPC, as every prebuilt one; ``source`` has its place."""
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    libraries = Path(spec.origin).with_name("lib")
    shutil.copytree(libraries, folder, ignore=shutil.ignore_patterns("libggml-rpc*", "libmtmd*"))
    compiled(source, folder / "libggml-rpc.so.0", needs=needs)
    return folder
