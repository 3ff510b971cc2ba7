"""Docstrings and help texts keep to the rules of CONTRIBUTING.md that a program can check."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from ggufspec.settings.table import OPTIONS

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = re.compile(r"(Of|What|That of|The same|Whether|Where|How)\b")
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def foreign_beginnings(source: str) -> list[str]:
    """Return the first line of each docstring that begins as no English sentence about a thing does."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    texts = [text for node in nodes if (text := ast.get_docstring(node))]
    return [text.splitlines()[0] for text in texts if FOREIGN.match(text)]


@pytest.mark.parametrize("package", ["ggufspec", "lab"])
def test_docstrings_begin_with_what_a_thing_is_or_does(package: str) -> None:
    found = {str(path): foreign_beginnings(path.read_text()) for path in (ROOT / package).rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_foreign_beginning_is_found() -> None:
    assert foreign_beginnings('def size():\n    """Of a file its bytes."""') == ["Of a file its bytes."]
    assert foreign_beginnings('def size():\n    """Return the bytes of a file."""') == []


# Functions that modules of one kind share, because they are called by the module's name
INTERFACES = {
    "run": "jobs of child processes",
    "opened": "sessions of child processes",
    "make": "drafters",
    "main": "programs",
    **dict.fromkeys(("comma_separated", "failures", "markdown", "results", "terminal"), "reports"),
}


def public_names(source: str) -> list[str]:
    """Return the names of a module's public classes and functions, without commands, which are named by users."""
    defined = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    commands = {node.name for node in defined if any("command" in ast.unparse(one) for one in node.decorator_list)}
    return [node.name for node in defined if not node.name.startswith("_") and node.name not in commands]


def test_no_public_name_is_defined_twice() -> None:
    places = defaultdict(list)
    for path in sorted((ROOT / "ggufspec").rglob("*.py")):
        for name in public_names(path.read_text()):
            places[name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1 and name not in INTERFACES} == {}
    assert {name for name in INTERFACES if len(places[name]) < 2} == set()  # nothing is excused without need


def test_a_public_name_is_found() -> None:
    source = "def load(): ...\nclass _Own: ...\n@command('run')\ndef run(): ...\nclass Spec: ..."
    assert public_names(source) == ["load", "Spec"]


# Words of this project's own where the field has one: CONTRIBUTING.md, Rules
PRIVATE = re.compile(
    r"\b(beside|foretold|foretell|hopeless|lent|mend(s|ed|ing)?|rivals?|supposed|twins?|undrafted)\b", re.IGNORECASE
)
ALLOWED = re.compile(r"honest-rival|lends (its own|this)")  # the name of a picture


def private_words(text: str) -> list[str]:
    """Return the lines of a text that have a private word."""
    return [line.strip() for line in text.splitlines() if PRIVATE.search(ALLOWED.sub("", line))]


def test_no_private_word_is_written() -> None:
    paths = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "ggufspec").rglob("*.py"),
    ]
    found = {str(path.relative_to(ROOT)): private_words(path.read_text()) for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_private_word_is_found() -> None:
    assert private_words("the draft beside it\nnext to it") == ["the draft beside it"]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_help_line_is_short(name: str) -> None:
    text = OPTIONS[name].help.partition("  [")[0]
    assert 10 <= len(text) <= 160, text
