"""A new drafter is one module and one row of the registry."""

# ruff: noqa: ARG002 - the protocol's

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from ggufspec import SpeculativeDecoder
from ggufspec.decoding.drafters.base import DraftCandidate, DrafterParts, FreeDrafter, ShadowEvaluation
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.rules.base import AcceptanceRule, DraftToken
from ggufspec.errors import ModelError
from ggufspec.settings.registry import DRAFTERS, DrafterRow

PROMPT = "import os\n\ndef "


class Parrot(FreeDrafter):
    """Always drafts the token that came last; tells of no position, so that only the fixed policy lets it draft on."""

    name = "parrot"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def begin(self, prompt: Sequence[int], choices: Sequence[int] = (), same: int = 0) -> list[ShadowEvaluation]:
        return []

    def propose(self, text: Sequence[int], rule: AcceptanceRule) -> DraftCandidate | None:
        return DraftCandidate(0.5, lambda: DraftToken(text[-1]))

    def catch_up(self, text: Sequence[int], rule: AcceptanceRule, most: int) -> list[ShadowEvaluation]:
        return []

    def commit(self, length: int) -> None: ...


def make(parts: DrafterParts) -> Parrot:
    return Parrot(parts.target_vocab_size)


@pytest.mark.parametrize("names", [("parrot",), ("parrot", "lookup")])
def test_a_registered_drafter_decodes(monkeypatch: pytest.MonkeyPatch, target: Path, names: tuple[str, ...]) -> None:
    module = ModuleType("parrot")
    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "parrot", module)
    monkeypatch.setitem(DRAFTERS, "parrot", DrafterRow("parrot", "parrot"))
    options = DecoderOptions(ctx_size=256, threads=1, drafters=names, draft_policy="fixed", draft_max=2)
    with SpeculativeDecoder(target, options=options) as decoder:
        assert decoder.drafters == names
        answer = list(decoder.generate(PROMPT, max_tokens=24))
        assert decoder.statistics is not None
        assert decoder.statistics.drafted > 0
        alone = [one.token for one in decoder.generate(PROMPT, max_tokens=24, alone="target")]
        with pytest.raises(ModelError, match="has no hidden rows"):
            decoder._pair.target.hidden(0, 1)
    assert [one.token for one in answer] == alone
    assert {one.source for one in answer} <= {"parrot", "lookup", "target", "bonus"}
