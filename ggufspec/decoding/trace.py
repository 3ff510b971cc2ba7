"""Trace of an answer: the drafter of every drafted token, both models' probabilities, and the rule's decision.

Tracing reads the rule's own records (:meth:`ggufspec.decoding.rules.base.AcceptanceRule.decisions`) and changes
nothing. It runs after each round, so that it hardly affects the measured times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ggufspec.decoding.loop import Round
from ggufspec.decoding.rules.base import AcceptanceRule
from ggufspec.schema.rounds import TracedRound


def spelled(piece: bytes) -> str:
    r"""Return a token's bytes as text; incomplete characters as ``\xNN``."""
    return piece.decode("utf-8", "backslashreplace")


class Trace:
    """Recorder of an answer's rounds; ``rounds`` holds those of the latest answer.

    Args:
        spell: returns the text of a token; None leaves the texts empty.
        on_round: called with every finished round, before its tokens are yielded.
    """

    def __init__(
        self,
        spell: Callable[[int], str] | None = None,
        on_round: Callable[[TracedRound], None] | None = None,
    ) -> None:
        self.rounds: list[TracedRound] = []
        self._spell = spell or (lambda _: "")
        self._on_round = on_round
        self._rule: AcceptanceRule | None = None

    def begin(self, rule: AcceptanceRule) -> None:
        self.rounds = []
        self._rule = rule
        rule.record(self._spell)

    def add(self, round_: Round) -> None:
        rule = self._rule
        assert rule is not None
        drafted, added = rule.decisions(round_.drafters)
        traced = TracedRound(
            number=len(self.rounds),
            rule=rule.name,
            description=rule.description,
            lossless=rule.lossless,
            temperature=rule.sampling.temperature,
            seed=rule.sampling.seed,
            grammar=rule.has_grammar,
            drafted=drafted,
            added=None if added is None else replace(added, emitted=len(round_.emitted) > round_.accepted),
            accepted=round_.accepted,
            emitted=round_.emitted,
            width=round_.batch_size,
            draft_s=round_.draft_s,
            verify_s=round_.verify_s,
            total_s=round_.total_s,
            penalised=rule.sampling.penalises,
            readings=round_.readings,
        )
        self.rounds.append(traced)
        if self._on_round is not None:
            self._on_round(traced)
