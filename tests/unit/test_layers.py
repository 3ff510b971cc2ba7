"""The layers of the package and the one direction of imports, read from the source."""

import ast
import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ggufspec

ROOT = Path(ggufspec.__file__).parent
RINGS = (  # top to bottom: faces, what is done with a pair, one pair, the ground
    ("cli", "serve", "chat", "reports"),
    ("tune", "verify", "bench", "prompting"),
    ("api", "decoding", "planning", "models", "llamacpp"),
    ("hardware", "child", "files", "schema", "settings", "errors"),
)
LAYERS = tuple(layer for ring in RINGS for layer in ring)
IMPORTERS = {
    "llama_cpp": ("llamacpp/", "decoding/hook.py"),  # the library, and the class Llama
    "pynvml": "hardware/gpus.py",
    "huggingface_hub": "models/hub/client.py",
    "httpx2": "models/hub/client.py",
    "psutil": "hardware/host.py",
    "vl_convert": "reports/html/charts.py",
    "prompt_toolkit": "chat/console.py",
    "filelock": "files/write.py",
    "starlette": "serve/",
    "uvicorn": "serve/",
    "platformdirs": "files/cache.py",
}
WORLD = {"print", "exit", "quit", "sys.exit", "os._exit", "os.environ", "os.getenv", "os.putenv", "SystemExit"}


def sources():
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}


def imports(path, tree):
    """(dotted name, line) of everything that a module imports, at whatever depth, for type checkers too."""
    package = ["ggufspec", *path.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def direction(path, source):
    """Imports that go up, or into a layer that is not in the list."""
    here = path.split("/")[0].removesuffix(".py")
    for name, line in imports(path, ast.parse(source)):
        parts = name.split(".")
        if parts[0] != "ggufspec" or len(parts) < 2:
            continue
        there = parts[1]
        if there.startswith("__") or there == here:
            continue
        if there not in LAYERS or here not in LAYERS or LAYERS.index(there) < LAYERS.index(here):
            yield f"{path}:{line} imports {name}"


def strangers(path, source):
    """Imports of a foreign system outside its importers: one, or of the HTTP client and of llama.cpp two."""
    for name, line in imports(path, ast.parse(source)):
        found = IMPORTERS.get(name.split(".")[0], ())
        homes = (found,) if isinstance(found, str) else found
        if homes and not any(path == home or (home.endswith("/") and path.startswith(home)) for home in homes):
            yield f"{path}:{line} imports {name}"


def world(path, source):
    """Uses of the terminal, the exit and the environment by library code."""
    if path.startswith("cli/"):
        return
    tree = ast.parse(source)
    if path == "child/__main__.py":  # the child's own main
        tree.body = [node for node in tree.body if not (isinstance(node, ast.FunctionDef) and node.name == "main")]
    for name, line in imports(path, tree):
        if name in WORLD:
            yield f"{path}:{line} imports {name}"
    known = {"os.environ"} if path == "llamacpp/library.py" else set()  # a variable that llama.cpp has no option for
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in WORLD - known:
            yield f"{path}:{node.lineno} uses {ast.unparse(node)}"


# Who parses or reads whole what is its own: made by this process, a child of it, the package or the system.
READERS = {
    "files/untrusted.py",
    "child/session.py",  # a child's messages
    "child/__main__.py",  # the same of its parent
    "child/job.py",  # the system's
    "verify/selfcheck.py",  # its own package
    "hardware/host.py",  # the system's
    "hardware/disturbance.py",  # the same
    "hardware/install.py",  # the same
    "models/expanded.py",  # a model
    "models/profile.py",  # TOML of a bounded file
    "models/headers.py",  # the system's
    "llamacpp/chat_template.py",  # the same
}


SPEEDS = ("cache.read_bytes",)  # no file: bytes that a batch reads


def readers(path, source):
    """What takes in the whole of a file, or parses it, without a bound."""
    if path in READERS:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.endswith((".read_text", ".read_bytes")) and not called.startswith("untrusted."):
                yield f"{path}:{node.lineno} calls {called}"
            if called in ("json.load", "json.loads", "tomllib.load", "tomllib.loads"):
                yield f"{path}:{node.lineno} calls {called}"


def runtime(path, source):
    """Files of the package that a module imports when it runs, at whatever depth; not for type checkers only."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for name, _ in imports(path, tree):
        _, *parts = name.split(".")
        yield from ("/".join(parts) + ".py", "/".join(parts[:-1]) + ".py")


def test_imports_have_no_circle():
    modules = sources()
    graph = {path: (modules.keys() & runtime(path, source)) - {path} for path, source in modules.items()}
    TopologicalSorter(graph).prepare()


def facade(source):
    """The package's own imports of its layers: for type checkers only."""
    tree = ast.parse(source)
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return [name for name, _ in imports("__init__.py", tree) if name.startswith("ggufspec")]


def complaints(check):
    return [
        line
        for path, source in sources().items()
        if path not in ("__init__.py", "__main__.py")
        for line in check(path, source)
    ]


def test_a_layer_imports_only_layers_below_it():
    assert complaints(direction) == []


def test_every_module_is_in_a_layer():
    outside = {path for path in sources() if path.split("/")[0].removesuffix(".py") not in LAYERS}
    assert outside == {"__init__.py", "__main__.py"}


def test_the_package_does_not_know_the_lab():
    """The lab is in no wheel: only its own modules, scripts and tests import it."""
    found = [name for path, source in sources().items() for name, _ in imports(path, ast.parse(source))]
    assert [name for name in found if name.split(".")[0] == "lab"] == []


def test_each_foreign_system_has_one_importer():
    assert complaints(strangers) == []
    found = {name.split(".")[0] for path, source in sources().items() for name, _ in imports(path, ast.parse(source))}
    assert set(IMPORTERS) <= found


def test_library_code_leaves_the_world_alone():
    assert complaints(world) == []
    assert list(world("child/__main__.py", sources()["child/__main__.py"].replace("def main(", "def other("))) != []


def test_files_of_others_are_read_within_bounds():
    found = [line for line in complaints(readers) if not line.endswith(SPEEDS)]
    assert found == []


def test_the_package_loads_its_layers_on_demand():
    assert facade(sources()["__init__.py"]) == []
    promised = {
        (name.rpartition(".")[2], name.rpartition(".")[0])
        for name, _ in imports("__init__.py", ast.parse(sources()["__init__.py"]))
        if name.startswith("ggufspec.")
    }
    homes = {name: module for module, names in ggufspec._NAMES.items() for name in names}
    assert dict(promised) == homes
    assert sorted([*homes, "__version__"]) == sorted(ggufspec.__all__)
    assert all(getattr(ggufspec, name).__name__ == name for name in homes)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ggufspec.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("check", "path", "line"),
    [
        (direction, "hardware/host.py", "import ggufspec.reports.table"),
        (direction, "hardware/host.py", "from ggufspec.reports import table"),
        (direction, "bench/statistics.py", "from ggufspec import reports"),
        (direction, "bench/statistics.py", "from ..reports import table"),
        (direction, "reports/table.py", "from .. import cli"),
        (direction, "llamacpp/model.py", "from ggufspec.models.compat import Vocabulary"),
        (direction, "decoding/loop.py", "def f():\n    from ggufspec.bench import statistics"),
        (direction, "decoding/loop.py", "if TYPE_CHECKING:\n    from ggufspec.cli import ui"),
        (direction, "decoding/loop.py", "from ggufspec.attic import things"),
        (direction, "decoding/loop.py", "from ggufspec import SpeculativeDecoder"),
        (direction, "errors.py", "from ggufspec.hardware import host"),
        (direction, "decoding/hook.py", "from ggufspec.attic import things"),
        (strangers, "decoding/loop.py", "import llama_cpp.llama_cpp as library"),
        (strangers, "hardware/host.py", "from pynvml import nvmlInit"),
        (strangers, "hardware/gpus.py", "import psutil"),
        (strangers, "chat/talk.py", "import httpx2"),
        (strangers, "models/profile.py", "def f():\n    from huggingface_hub import hf_hub_download"),
        (world, "decoding/loop.py", "print('x')"),
        (world, "decoding/loop.py", "def f():\n    sys.exit(1)"),
        (world, "decoding/loop.py", "home = os.environ['HOME']"),
        (world, "decoding/loop.py", "home = os.environ.get('HOME')"),
        (world, "decoding/loop.py", "home = os.getenv('HOME')"),
        (world, "decoding/loop.py", "from os import environ"),
        (world, "decoding/loop.py", "raise SystemExit(1)"),
        (world, "decoding/loop.py", "log = print"),
        (world, "child/__main__.py", "print('x')"),
        (readers, "decoding/loop.py", "text = path.read_text()"),
        (readers, "decoding/loop.py", "value = json.loads(text)"),
    ],
)
def test_a_wrong_line_is_found(check, path, line):
    source = sources()[path]
    assert list(check(path, source)) == []
    assert len(list(check(path, f"{source}\n{line}\n"))) == 1


@pytest.mark.parametrize(
    ("check", "path", "line"),
    [
        (direction, "bench/statistics.py", "from ggufspec import __version__"),
        (direction, "bench/statistics.py", "from . import trial"),
        (direction, "bench/statistics.py", "from ..hardware import host"),
        (direction, "hardware/host.py", "from ggufspec.errors import GgufspecError"),
        (strangers, "llamacpp/model.py", "import llama_cpp"),
        (strangers, "models/hub/client.py", "import httpx2"),
        (world, "cli/ui.py", "print('x')"),
        (world, "decoding/loop.py", "sys.stderr, os.cpu_count(), print_all, exit_code"),
    ],
)
def test_a_good_line_is_not(check, path, line):
    assert list(check(path, f"{sources()[path]}\n{line}\n")) == []


def test_a_package_that_loads_a_layer_is_found():
    assert facade(sources()["__init__.py"] + "\nfrom ggufspec.bench import statistics\n") == [
        "ggufspec.bench.statistics"
    ]


HEAVY = [
    "numpy",
    "pydantic",
    "rich",
    "llama_cpp",
    "huggingface_hub",
    "psutil",
    "prompt_toolkit",
    "jinja2",
    "markdown_it",
]
LOADED = """
import json, sys
{first}
from ggufspec.cli.app import main
code = main(sys.argv[1:])
print(json.dumps([code, sorted({{name.split(".")[0] for name in sys.modules}})]))
"""


def loaded(*arguments, first=""):
    """(exit code, top-level modules that are loaded) after a run of the command line in a process of its own."""
    program = [sys.executable, "-c", LOADED.format(first=first), *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
def test_help_loads_nothing_heavy(arguments):
    code, modules = loaded(*arguments)
    assert code == 0
    assert "ggufspec" in modules
    assert sorted(set(HEAVY) & set(modules)) == []


def test_the_help_of_a_command_loads_what_the_command_imports_and_no_other():
    """Of an installation without llama.cpp's library, too."""
    code, modules = loaded("bench", "--help")
    assert code == 0
    assert sorted({"llama_cpp", "huggingface_hub", "prompt_toolkit", "starlette"} & set(modules)) == []


def test_what_is_loaded_is_seen():
    assert "numpy" in loaded("--help", first="import ggufspec.decoding.loop")[1]
