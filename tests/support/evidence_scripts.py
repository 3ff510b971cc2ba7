"""The scripts of tests/evidence as modules: they import each other by their bare names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[1] / "evidence"


@contextmanager
def imported(name: str) -> Iterator[ModuleType]:
    """A script of that name, and in the block those that it imports."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
