"""The pair that ships is small, and worth drafting for."""

from __future__ import annotations

from ggufspec import DecoderOptions, SpeculativeDecoder
from ggufspec.bench.prompts import PROMPTS


def test_it_is_at_most_24_megabytes(pair):
    assert sum(path.stat().st_size for path in pair) <= 24e6


def test_more_than_half_of_its_drafts_are_kept(pair):
    """Prompts that no corpus has; the held-out documents are in tests/evidence/demo_pair.py, with the cost in time."""
    drafted = accepted = 0
    options = DecoderOptions(drafters=("draft",), draft_policy="fixed", draft_max=4, threads=1)
    with SpeculativeDecoder(*pair, options) as decoder:
        for prompt in PROMPTS:
            for _ in decoder.generate(prompt.text, max_tokens=256):
                pass
            drafted += decoder.statistics.drafted
            accepted += decoder.statistics.accepted
        assert decoder.target.parameters >= 8 * decoder.draft.parameters
    assert accepted / drafted >= 0.55
