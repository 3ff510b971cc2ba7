"""The drafters: who proposes what the target may say next.

:data:`ggufspec.settings.registry.DRAFTERS` is their registry. A drafter is one module, which has ``make(parts)``, and
one row there; then run ``scripts/commands.py``, as the help has the list. tests/unit/test_drafter_registry.py has one.
``tune`` without ``--drafter`` searches those that ``tune/experiment.py`` names.
"""

from __future__ import annotations

from importlib import import_module

from ggufspec.decoding.drafters.base import Drafter, Parts
from ggufspec.settings.registry import DRAFTERS

__all__ = ["Drafter", "Parts", "make"]


def make(name: str, parts: Parts) -> Drafter:
    """The drafter of this name."""
    drafter: Drafter = import_module(DRAFTERS[name].module).make(parts)
    return drafter
