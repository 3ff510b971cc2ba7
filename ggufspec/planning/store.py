"""Small JSON files in the cache folder: what was learned once and costs time to learn again.

Whatever is wrong with a file, it is as if it were not there: everything in it can be measured again.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from ggufspec import foreign
from ggufspec.errors import GgufspecError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    try:
        value = foreign.read_json(path)
    except GgufspecError:
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file whole or not at all; a folder that cannot be written costs the memory, not the run."""
    with contextlib.suppress(OSError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(value, file, allow_nan=False)  # which nobody would read again
            Path(name).replace(path)
        except BaseException:  # a full disk
            Path(name).unlink(missing_ok=True)
            raise
