"""The drafters: who proposes what the target may say next.

:data:`ggufspec.settings.registry.DRAFTERS` is their registry. A drafter is one module, which has ``make(parts)``, and
one row there; ``scripts/commands.py`` tells the help's pages of it. An example is tests/unit/test_drafter_registry.py.
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
