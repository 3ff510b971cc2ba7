"""Drafters, which propose the target's next tokens.

:data:`ggufspec.settings.registry.DRAFTERS` is their registry. A drafter consists of a module with ``make(parts)`` and a
row in the registry; after adding one, run ``scripts/commands.py``, because the help lists all drafters.
tests/unit/test_drafter_registry.py has an example. ``tune`` without ``--drafter`` searches the drafters named in
``tune/experiment.py``.
"""

from __future__ import annotations

from importlib import import_module

from ggufspec.decoding.drafters.base import Drafter, DrafterParts
from ggufspec.settings.registry import DRAFTERS

__all__ = ["Drafter", "DrafterParts", "make_drafter"]


def make_drafter(name: str, parts: DrafterParts) -> Drafter:
    """Make the drafter ``name``."""
    drafter: Drafter = import_module(DRAFTERS[name].module).make(parts)
    return drafter
