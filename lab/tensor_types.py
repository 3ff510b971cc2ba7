"""The type that llama.cpp would give each tensor of a file."""

from __future__ import annotations

import re
from pathlib import Path

from ggufspec.llamacpp.quantize import check_type, listening, run_dry

_CHOSEN = re.compile(r"\[ *\d+/ *\d+\] +(\S+) .*type = +(\S+), size = +[\d.]+ MiB(?: -> +[\d.]+ MiB \((\S+)\))?")


def tensor_types(source: Path, type_name: str) -> dict[str, str]:
    """The type that llama.cpp would give each tensor, as ggml spells it, by its dry run, which reads no weights.

    ``source`` is a file in F16 whose weights may be a hole. Raises as :func:`quantize` does.
    """
    name = check_type(type_name)
    types: dict[str, str] = {}

    def read(line: str) -> None:
        if found := _CHOSEN.search(line):
            types[found[1]] = found[3] or found[2]

    with listening(read):
        run_dry(source, name)
    return types
