"""Prompts of all lengths: pieces of the standard library's source."""

from __future__ import annotations

import sysconfig
from pathlib import Path

MODULES = ("argparse", "ast", "calendar", "csv", "dataclasses", "difflib", "enum", "fractions", "gettext", "heapq")


def source_texts(count: int) -> list[str]:
    """So many texts of 10 to about 3,000 characters (to 1,000 tokens), the longer ones farther apart."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for i in range(count):
        source = (library / f"{MODULES[i % len(MODULES)]}.py").read_text(encoding="utf-8")
        length = 10 + 3000 * i * i // count**2
        start = (i * 7919) % max(1, len(source) - length)
        texts.append(source[start : start + length])
    return texts
