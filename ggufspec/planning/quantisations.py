"""Ranking of models that differ only in quantisation, by fit, speed and bits per weight. Pure.

Weights and caches are summed over each model's tensors. Compute buffers depend on weight types only if a GPU copies
CPU weights one at a time, so one model's dry runs plus a bound serve all models with the same tensor shapes
(tests/cli/test_ranking.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from math import prod, sqrt
from pathlib import Path
from typing import Literal

from ggufspec.models.header import ModelHeader, block_of
from ggufspec.planning.memory import (
    HOST,
    ByDevice,
    DeviceBytes,
    DryRun,
    MemoryRequest,
    SameHeader,
    activation_bytes,
    streamed_bytes,
    streaming_card,
)
from ggufspec.planning.plan import Plan

# Mean KL divergence from F16 in nats, from tools/perplexity/README.md in llama.cpp, "LLaMA 3 8b Scoreboard"
# (Wikitext-2), without an importance matrix if the table has such a row, else with one (WT 10m).
DIVERGENCE = {"Q8_0": 0.0014, "Q6_K": 0.0055, "Q5_K_M": 0.0108, "Q5_K_S": 0.0166, "Q5_1": 0.0180, "Q5_0": 0.0222}
DIVERGENCE |= {"Q4_K_M": 0.0313, "Q4_K_S": 0.0431, "Q4_1": 0.0717, "Q4_0": 0.0719, "IQ4_NL": 0.0357, "IQ4_XS": 0.0363}
DIVERGENCE |= {"Q3_K_L": 0.0872, "Q3_K_M": 0.1019, "Q3_K_S": 0.2282, "IQ3_M": 0.1025, "IQ3_S": 0.1113}
DIVERGENCE |= {"IQ3_XS": 0.1387, "IQ3_XXS": 0.1836, "Q2_K": 0.4451, "Q2_K_S": 0.4034, "IQ2_M": 0.3260}
DIVERGENCE |= {"IQ2_S": 0.4392, "IQ2_XS": 0.5463, "IQ2_XXS": 0.8120, "IQ1_M": 1.3931, "IQ1_S": 2.2546}
DIVERGENCE_SOURCE = "mean KL divergence from F16 of Llama 3 8B, in nats: llama.cpp, tools/perplexity/README.md"


def twin_acceptance(target: ModelHeader, draft: ModelHeader, quant: str) -> float | None:
    """Return a lower bound on acceptance with a smaller quantisation of the target as draft; None for other drafts.

    At temperature 1, acceptance is 1 - E[TV] ≥ 1 - √(E[KL] / 2). The caller ensures that both quantise the same model.
    Source: Leviathan et al. 2023, corollary 3.6 (arXiv:2211.17192), and Pinsker's inequality.
    """
    shapes = {(one.architecture, one.blocks, one.embedding, one.vocabulary, one.heads) for one in (target, draft)}
    if len(shapes) > 1 or quant not in DIVERGENCE or draft.size_bytes >= target.size_bytes:
        return None
    return max(0.0, 1 - sqrt(DIVERGENCE[quant] / 2))


TWIN_ORIGIN = "a lower bound from its quantisation's published KL divergence"


def bits_per_weight(header: ModelHeader) -> float:
    """Return the mean bits per weight over all tensors."""
    return 8 * header.weight_bytes() / sum(prod(tensor.shape) for tensor in header.tensors)


def sharing(dry_run: DryRun, shapes: Sequence[tuple[ModelHeader, Path]], cards: Sequence[str]) -> DryRun:
    """Return a dry-run function that reuses one model's dry runs for all models of the same shape.

    Args:
        dry_run: function that is called only for the models in ``shapes``.
        shapes: (header, metadata-only file) of one model per shape; requests for other models of a shape name its file.
        cards: GPU names in llama.cpp's order.
    """
    by_file = {file: header for header, file in shapes}

    def of_shape(one: MemoryRequest) -> MemoryRequest:
        on = of_shape(one.target) if one.target else None
        return replace(one, header=by_file.get(one.file, one.header), target=on)

    def asked(requests: Sequence[MemoryRequest]) -> list[ByDevice | str]:
        like = [of_shape(one) for one in requests]
        return [
            answer if isinstance(answer, str) else _with_weights(answer, one, other.header, cards)
            for one, other, answer in zip(requests, like, dry_run(like), strict=True)
        ]

    return asked


def _with_weights(answer: ByDevice, one: MemoryRequest, like: ModelHeader, cards: Sequence[str]) -> ByDevice:
    """Return ``answer`` (the dry run of ``like``, a model of the same shape) with this model's weight sizes."""
    own = one.resident(cards)
    found = {name: replace(used, weights=own[name].weights) for name, used in answer.items()}
    if one.header is not like and streamed_bytes(one, cards):
        more = _heavier(SameHeader(one.header), SameHeader(like)) + activation_bytes(like, one.context.computed)
        found[streaming_card(cards)] += DeviceBytes(compute=more)
    return found


@functools.lru_cache(maxsize=64)
def _heavier(one: SameHeader, like: SameHeader) -> int:
    """Return the maximum excess in bytes of a block's tensor over the same tensor of ``like``; 0 if none is larger."""
    sizes = {tensor.name: tensor.size_bytes for tensor in like.header.tensors}
    in_blocks = (tensor for tensor in one.header.tensors if block_of(tensor) is not None)
    return max([0, *(tensor.size_bytes - sizes[tensor.name] for tensor in in_blocks)])


def fits(plan: Plan, largest_context: int | None) -> Literal["whole", "partly", "no"]:
    """Return whether all layers fit on the GPUs (without a GPU: in RAM), only some do, or RAM is too small as well.

    ``largest_context`` (:func:`ggufspec.planning.search.largest_context`) decides: a plan may leave VRAM unused.
    """
    if plan.machine.cards and (largest_context or 0) >= plan.request.target_only.context.ctx_size:
        return "whole"
    if plan.target_only.used(HOST).total > plan.machine.memory_bytes:
        return "no"
    return "partly" if plan.machine.cards else "whole"


def pareto(rows: Sequence[tuple[float, float, float | None]]) -> list[bool]:
    """Return for each (tokens/s, bits per weight, divergence) whether it is Pareto-optimal in speed and quality.

    Quality is compared by divergence (lower is better) if both rows have one, otherwise by bits per weight.
    """

    def beats(other: tuple[float, float, float | None], one: tuple[float, float, float | None]) -> bool:
        better = other[1] - one[1] if other[2] is None or one[2] is None else one[2] - other[2]
        return other[0] >= one[0] and better >= 0 and (other[0] > one[0] or better > 0)

    return [not any(beats(other, one) for other in rows) for one in rows]
