"""The JSON document of ``ggufspec export``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ExportDocument:
    """``ggufspec/export@1``: settings for the program ``to``. ``arguments`` is empty if ``text`` is a file."""

    to: str
    text: str
    arguments: tuple[str, ...]
    notes: tuple[str, ...]
    schema: str = field(default="ggufspec/export@1")
