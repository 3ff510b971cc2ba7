"""JSON document of ``ggufspec export``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ExportDocument:
    """Document ``ggufspec/export@1``: settings for the program ``to``. Without ``arguments``, ``text`` is a file."""

    to: str
    text: str
    arguments: tuple[str, ...]
    notes: tuple[str, ...]
    schema: str = field(default="ggufspec/export@1")
