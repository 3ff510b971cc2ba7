"""The drafters: they propose what the target may say next.

:data:`ggufspec.settings.registry.DRAFTERS` is their registry. A drafter is one module with ``make(parts)``, and one row
there; after adding one run ``scripts/commands.py``, because the help lists them. tests/unit/test_drafter_registry.py
adds one. ``tune`` without ``--drafter`` searches those that ``tune/experiment.py`` names.
"""

from __future__ import annotations

from importlib import import_module

from ggufspec.decoding.drafters.base import Drafter, Parts
from ggufspec.settings.registry import DRAFTERS

__all__ = ["Drafter", "Parts", "make"]


def make(name: str, parts: Parts) -> Drafter:
    """Make the drafter of this name."""
    drafter: Drafter = import_module(DRAFTERS[name].module).make(parts)
    return drafter
