"""Docstrings and help texts keep to the rules of CONTRIBUTING.md that a program can check."""

from __future__ import annotations

import ast
import re
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


@pytest.mark.parametrize("name", OPTIONS)
def test_a_help_line_is_short(name: str) -> None:
    text = OPTIONS[name].help.partition("  [")[0]
    assert 10 <= len(text) <= 160, text
