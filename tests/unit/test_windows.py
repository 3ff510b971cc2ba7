"""Nothing at the top of a module is POSIX's or Linux's alone, so that the package can be imported on Windows and macOS.
Simulated, on Linux: sys.platform is theirs, and the modules and names that Windows lacks are taken away. That it works
there is not shown by this."""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ggufspec

ROOT = Path(ggufspec.__file__).parent
MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty")
# Of docs.python.org/3.13/library: "Availability: Unix", or names of signal.h that MSVC lacks.
OS = """
chown fchmod fchown fork forkpty getegid geteuid getgid getloadavg getpgid getuid kill killpg lchown mkfifo nice openpty
posix_fallocate pread preadv pwrite sched_getaffinity sched_setaffinity setpgid setsid statvfs sysconf tcsetpgrp uname
wait wait4 WIFEXITED WNOHANG O_CLOEXEC O_NOFOLLOW O_NONBLOCK
"""
SIGNAL = """
SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGTTIN SIGTTOU SIGUSR1 SIGUSR2 SIGWINCH
ITIMER_REAL alarm getitimer setitimer pause pthread_kill pthread_sigmask sigpending sigwait
"""
NAMES = {"os": OS.split(), "signal": SIGNAL.split(), "time": ["tzset", "clock_gettime", "CLOCK_MONOTONIC"]}
# Where such a name is used behind a look whether it is there.
GUARDED = {
    "hardware/host.py": {"os.sched_getaffinity"},
    "files/write.py": {"os.O_NOFOLLOW", "os.getuid"},
}
IMPORTS = """
import importlib, importlib.util, json, os, signal, sys, time

names, modules, extra = json.loads(sys.argv[1])
for name in names:
    importlib.import_module(name)  # what others import is theirs, and is here now
for module in modules:
    sys.modules[module] = None  # its import raises ImportError
for module, missing in extra.items():
    for name in missing:
        if hasattr(sys.modules[module], name):
            delattr(sys.modules[module], name)
wrong = {}
for sys.platform in ("win32", "darwin"):
    for name in names:
        sys.modules.pop(name, None)
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:
            wrong[name] = repr(error)
print(json.dumps(wrong))
"""


def test_every_module_is_imported_without_posix(tmp_path: Path) -> None:
    assert imported(sorted(modules())) == {}
    broken = tmp_path / "broken_posix.py"
    broken.write_text("import fcntl\n")
    assert "ModuleNotFoundError" in imported(["broken_posix"], tmp_path)["broken_posix"]
    broken.write_text("import signal\nSIGNALS = (signal.SIGTERM, signal.SIGKILL)\n")
    assert "SIGKILL" in imported(["broken_posix"], tmp_path)["broken_posix"]
    broken.write_text("import sys\nif sys.platform == 'win32':\n    import nothing_of_this_name\n")
    assert "nothing_of_this_name" in imported(["broken_posix"], tmp_path)["broken_posix"]


def modules() -> list[str]:
    files = (path.relative_to(ROOT.parent).with_suffix("") for path in ROOT.rglob("*.py"))
    dotted = (".".join(file.parts).removesuffix(".__init__") for file in files)
    return [name for name in dotted if name != "ggufspec.__main__"]


def imported(names: list[str], folder: Path = ROOT.parent) -> dict[str, str]:
    """What goes wrong where each module is imported once more, without POSIX."""
    argument = json.dumps([names, MODULES, NAMES])
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, argument], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    wrong: dict[str, str] = json.loads(done.stdout)
    return wrong


def uses(source: str) -> set[str]:
    """Names of POSIX alone that a module uses anywhere."""
    missing = {f"{module}.{name}" for module, names in NAMES.items() for name in names}
    return {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)} & missing


def test_a_name_of_posix_is_used_behind_a_look_alone() -> None:
    found = {path.relative_to(ROOT).as_posix(): uses(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == GUARDED
    assert uses("import os\ndef f():\n    os.killpg(1, 9)") == {"os.killpg"}


@pytest.mark.parametrize("path", GUARDED)
def test_there_is_such_a_look(path: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    looks = ('hasattr(os, "sched_getaffinity")', 'sys.platform == "win32"')
    assert any(look in source for look in looks)


def test_a_child_that_died_on_windows_is_explained() -> None:
    from ggufspec.child.death import died as _died

    assert "illegal instruction" in _died(0xC000001D, "").message
    assert "access violation" in _died(0xC0000005, "").message
    assert "status 7" in _died(7, "").message
    assert "SIGKILL" in _died(-signal.SIGKILL, "").message
