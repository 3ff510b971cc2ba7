"""Acceptance rules, which decide which drafted tokens are accepted and which token follows them.

:data:`ggufspec.settings.registry.RULES` is their registry: name, description, whether it is lossless, and the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from ggufspec.decoding.grammar import GrammarPath
from ggufspec.decoding.rules.base import AcceptanceRule
from ggufspec.decoding.sampling import Sampling
from ggufspec.llamacpp.grammar import Grammar
from ggufspec.settings.registry import parse_rule

__all__ = ["AcceptanceRule", "make_rule"]


def make_rule(
    name: str, sampling: Sampling, grammar: Grammar | None = None, bias: Mapping[int, float] | None = None
) -> AcceptanceRule:
    """Make the rule that ``--accept`` names. With a grammar, the caller must use the rule's ``begin`` and ``follow``.

    ``bias`` holds logit offsets by token id.

    Raises:
        UsageError: there is no such rule.
    """
    row, number = parse_rule(name)
    module, _, kind = row.made_by.partition(":")
    path = None if grammar is None else GrammarPath(grammar)
    more = {} if number is None else {"number": number}
    rule: AcceptanceRule = getattr(import_module(f"{__name__}.{module}"), kind)(sampling, path=path, **more)
    rule.bias = dict(bias or {})
    return rule
