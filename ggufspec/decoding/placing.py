"""Between a decoder's options and the planner: options become a question, a plan becomes options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ggufspec.decoding.options import DRAFT_MAX, DecoderOptions
from ggufspec.errors import UsageError
from ggufspec.models.header import ModelHeader
from ggufspec.planning.plan import Option, Question, Subject


@dataclass(frozen=True, slots=True)
class Layers:
    """What was asked for of one model's placement; None leaves it to the plan."""

    gpu_layers: int | None = None
    split: tuple[float, ...] = ()
    n_cpu_moe: int | None = None


def question(
    target: tuple[ModelHeader, Path],
    draft: tuple[ModelHeader, Path] | None,
    options: DecoderOptions,
    acceptance: float,
    *,
    layers: Layers = Layers(),
    draft_layers: Layers = Layers(),
    kv_types: Sequence[tuple[str, str]] = (),
    draft_max: int | None = None,
) -> Question:
    """What to plan for. Beside a draft the target alone is always placed as well as it can be.

    Args:
        target: header and skeleton.
        draft: the same of the draft, or None.
        options: context, KV types, threads and width; their placements are not looked at.
        acceptance: expected share of drafted tokens that are kept, 0 to 1.
        layers: the target's layers where they are fixed.
        draft_layers: the draft's.
        kv_types: (cache_type_k, cache_type_v) that the plan may choose for the target besides those of ``options``.
        draft_max: the longest draft to consider; None is ``DRAFT_MAX``.

    Raises:
        UsageError: experts are asked for where there are none, a number is absurd.
    """
    if not 0 <= acceptance <= 1:
        raise UsageError(f"an acceptance of {acceptance} is not between 0 and 1", "for example 0.7")
    for (header, _), asked in ((target, layers), (draft, draft_layers)) if draft else ((target, layers),):
        if asked.n_cpu_moe and not header.experts:
            raise UsageError(f"{header.name} has no experts to keep on the CPU", "leave --n-cpu-moe out")
    longest = draft_max or DRAFT_MAX
    widest = replace(options, draft_max=longest)

    def subject(model: tuple[ModelHeader, Path], asked: Layers, with_draft: bool) -> Subject:
        return Subject(*model, widest.context(with_draft=with_draft), asked.gpu_layers, asked.split, asked.n_cpu_moe)

    return Question(
        target=subject(target, layers, with_draft=draft is not None),
        alone=subject(target, Layers() if draft else layers, with_draft=False),
        draft=Subject(*draft, options.draft_context(), draft_layers.gpu_layers, draft_layers.split) if draft else None,
        acceptance=acceptance,
        kv_types=tuple(kv_types),
        draft_max=longest,
    )


def placed(options: DecoderOptions, option: Option, *, draft_max: int | None = None) -> DecoderOptions:
    """``options`` at the placement that a plan found. A fixed draft length is the plan's, unless one is given."""
    draft = option.draft
    planned = option.draft_length if options.draft_policy == "fixed" else None
    return replace(
        options,
        gpu_layers=option.target.gpu_layers,
        split=option.target.split,
        n_cpu_moe=option.target.n_cpu_moe,
        gpu_layers_draft=draft.gpu_layers if draft else 0,
        draft_split=draft.split if draft else (),
        draft_max=draft_max or planned or options.draft_max,
        cache_type_k=option.context.cache_type_k,
        cache_type_v=option.context.cache_type_v,
    )
