"""Experiment for ``tune``, made from options and a plan: given values are fixed, the others are searched."""

from __future__ import annotations

from dataclasses import replace

from ggufspec.api.options import sampling
from ggufspec.api.plan import PlanResult
from ggufspec.api.resolve import with_placement
from ggufspec.bench import prompting
from ggufspec.bench.trial import TrialJob, check_context
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import UsageError
from ggufspec.hardware.host import BUSY_CPUS, others_cpus, physical_cores, usable_cpus
from ggufspec.models.profile import Pair
from ggufspec.settings.registry import DRAFTERS, drafter_text, parse_drafters, with_head
from ggufspec.settings.table import Settings, names
from ggufspec.tune.run import TuneExperiment
from ggufspec.tune.space import FreeValues, nearest_setting, policies, thread_counts, tune_candidates

_TUNED = names(tune=True, profile=True)  # settings to search even if the profile sets them, e.g. to an earlier winner
_CACHE = ("cache_type_k", "cache_type_v")  # settings also searched with --allow-kv
EVERY = 2  # use every second bundled prompt


def without_tuned(pair: Pair, given: Settings) -> Pair:
    """Return the pair without the profile settings that are searched."""
    searched = (*_TUNED, *(_CACHE if given.allow_kv else ()), "gpu_layers", "gpu_layers_draft")
    return replace(pair, settings=replace(pair.settings, **dict.fromkeys(searched)))


def experiment(
    pair: Pair,
    given: Settings,
    planned: PlanResult,
    *,
    asked: prompting.PromptsResult,
    threshold: float,
    budget_s: float | None,
    verbose: bool = False,
) -> TuneExperiment:
    """Return an experiment around a plan; ``given`` settings are fixed, and trials answer the prompts in ``asked``.

    Raises:
        UsageError: nothing is left to search, or a prompt is longer than the context.
    """
    plan, base = planned.plan, planned.opened.options
    free = _free(base, given, with_draft=plan.request.draft is not None)
    with planned.dry_runs:
        space = tune_candidates(plan, base, free, planned.dry_runs)
    if not space:
        raise UsageError("the options leave no setting to try", "give fewer options: given ones are not searched")
    target_only = replace(with_placement(base, plan.target_only), drafters=())
    if plan.pair:
        drafted = with_placement(base, plan.pair, draft_max=given.draft_max)
    else:
        drafted = replace(target_only, drafters=("lookup",))
    first = [nearest_setting(space, drafted, drafted=True), nearest_setting(space, target_only, drafted=False)]
    spec = TrialJob(
        target=pair.target,
        draft=pair.draft,
        options=base,
        sampling=sampling(given),
        **asked.trial,
        max_tokens=given.value("predict"),
        rpc=given.rpc or (),
    )
    check_context(spec, max(asked.tokens))
    return TuneExperiment(
        pair=planned.described(),
        spec=spec,
        space=tuple(space),
        first=tuple(index for index in (first if plan.choice == "speculative" else first[::-1]) if index is not None),
        threshold=threshold,
        budget_s=budget_s,
        repeats=given.value("repetitions"),
        notes=(*asked.notes, *plan.notes, *_busy()),
        verbose=verbose,
    )


def _busy() -> tuple[str, ...]:
    others = others_cpus()
    if others < BUSY_CPUS:
        return ()
    used = f"other programs use {others:.1f} of {usable_cpus()} CPUs"
    return (f"{used}: another setting may win on an idle machine; rerun with --fresh when it is quiet",)


def _free(base: DecoderOptions, given: Settings, *, with_draft: bool) -> FreeValues:
    every: tuple[str, ...] = ("both", "draft", "lookup", "none")
    if base.accept != "exact" or given.drafter is not None:
        every = (str(given.drafter or "both"),)
    sets = (with_head(parse_drafters(text), base.head) for text in every)
    possible = (tuple(name for name in one if with_draft or not DRAFTERS[name].needs_model) for one in sets)
    drafters = tuple(dict.fromkeys(map(drafter_text, possible)))
    lengths = policies(type(base)().draft_max)
    if given.draft_policy is not None:
        lengths = tuple(one for one in lengths if one[0] == given.draft_policy)
    if given.draft_max is not None:
        lengths = tuple(dict.fromkeys((policy, given.draft_max) for policy, _ in lengths))
    return FreeValues(
        threads=(base.threads,) if base.threads else thread_counts(physical_cores()),
        drafters=drafters,
        policies=lengths,
        flash_attn=(base.flash_attn,) if given.flash_attn else ("auto", "off"),
        **({"ubatch_sizes": (base.ubatch_size,)} if given.ubatch_size else {}),
        kv_types=tuple(
            dict.fromkeys(((base.cache_type_k, base.cache_type_v), *((name, name) for name in given.allow_kv or ())))
        ),
        within_budget=given.headroom is not None,
    )
