"""A dry run without llama.cpp: exact sums, and compute buffers of about the right size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ggufspec.planning.memory import HOST, ByDevice, DryRun, MemoryRequest, resident


def dry_run(*cards: str) -> DryRun:
    """On these cards: the larger of logits and one block, as for a dense model (src/llama-graph.cpp)."""

    def run(requests: Sequence[MemoryRequest]) -> list[ByDevice | str]:
        return [_allocated(request, cards) for request in requests]

    return run


def _allocated(request: MemoryRequest, cards: Sequence[str]) -> ByDevice:
    header, context, tokens = request.header, request.context, request.context.computed
    logits = 4 * header.vocabulary * context.max_outputs + 8 * tokens * header.embedding
    block = 2 * tokens * context.cells + 4 * tokens * (3 * max(header.feed_forward) + 4 * header.embedding)
    if context.flash_attn == "off":
        block = 4 * tokens * context.cells * (max(header.heads) + 1)
    compute = max(logits, block)
    used = resident(header, request.placement, context, cards)
    return {name: replace(one, compute=compute if name == HOST or one.total else 0) for name, one in used.items()}
