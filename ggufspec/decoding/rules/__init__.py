"""The acceptance rules by name."""

from __future__ import annotations

import numpy as np

from ggufspec.decoding.grammar import Constraint, Path
from ggufspec.decoding.options import check_rule
from ggufspec.decoding.rules.base import Rule
from ggufspec.decoding.rules.coupled import CoupledRule
from ggufspec.decoding.rules.lossy import TopKRule, TypicalRule
from ggufspec.decoding.rules.speculative import SpeculativeRule
from ggufspec.decoding.sampling import Sampling


def make_rule(name: str, sampling: Sampling, constraint: Constraint | None = None) -> Rule:
    """The rule of this name.

    Args:
        name: one of ``options.RULES``, with a number where it has one.
        sampling: how the target chooses.
        constraint: the grammar of the text, if it has one; ``begin`` and ``follow`` must be called then.

    Raises:
        UsageError: there is no such rule.
    """
    check_rule(name)
    path = None if constraint is None else Path(constraint)
    match name.partition(":")[0]:
        case "top-k":
            return TopKRule(name, sampling, path)
        case "typical":
            return TypicalRule(name, sampling, path)
        case "residual":
            return SpeculativeRule(sampling, np.random.default_rng(sampling.seed), path)
        case _:
            return CoupledRule(sampling, path)
