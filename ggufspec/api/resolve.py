"""Placement of an opened pair as given or as planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from ggufspec.api.options import machine_to_plan_for, placement_of, placement_of_draft, unplaced
from ggufspec.api.pairs import OnEvent, OpenedPair
from ggufspec.api.parallel import check_parallel, default_parallel
from ggufspec.api.plan import Calibrate, make_plan, request_of
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import UsageError
from ggufspec.hardware.host import physical_cores
from ggufspec.llamacpp.options import Placement
from ggufspec.planning.memory import check_overrides
from ggufspec.planning.plan import PlanMachine, PlannedRun
from ggufspec.planning.search import with_load_options
from ggufspec.planning.verdict import why
from ggufspec.schema.plan import PlanDocument


@dataclass(frozen=True, slots=True)
class ResolvedOptions:
    """Options with placements for a pair and for the best target-only run, and the plan they come from.

    ``plan`` is None without a GPU, or if all layers are given and the best target-only run is not requested.
    ``target_s`` is the target speed that the plan predicts (:meth:`ggufspec.planning.plan.Plan.target_s`).
    """

    pair: DecoderOptions
    target_only: DecoderOptions
    cards: tuple[str, ...] = ()
    plan: PlanDocument | None = None
    target_s: tuple[float, float] | None = None


def resolve(
    opened: OpenedPair,
    *,
    serves: bool = False,
    best_target_only: bool = False,
    calibrate: Calibrate | None = None,
    on_event: OnEvent | None = None,
    verbose: bool = False,
) -> ResolvedOptions:
    """Place the layers of a pair, and with ``best_target_only`` also those of the best target-only run.

    Given numbers of layers are used, and ``auto`` is planned. An unused draft model (``--drafter lookup`` or ``none``)
    is not placed. If the pair ``serves`` and no number of answers at once is given, memory decides it. For the other
    arguments, see :func:`ggufspec.api.plan.make_plan`.

    Raises:
        GgufspecError: as for :func:`ggufspec.api.plan.make_plan`; the caches of so many conversations do not fit.
    """
    machine = cache(lambda: machine_to_plan_for(opened.wanted, opened.options.threads or physical_cores()))
    placed = _placed(
        opened,
        machine,
        best_target_only=best_target_only,
        calibrate=calibrate,
        on_event=on_event,
        verbose=verbose,
    )
    asks = serves and opened.wanted.parallel is None
    if not asks and placed.pair.parallel < 2:
        return placed
    if asks:
        planned = {one.name: one.used_bytes for one in placed.plan.devices} if placed.plan else {}
        count = default_parallel(opened, placed.pair, machine(), planned)
        return replace(placed, pair=replace(placed.pair, parallel=count))
    check_parallel(opened, placed.pair, machine())
    return placed


def _placed(
    opened: OpenedPair,
    machine: Callable[[], PlanMachine],
    *,
    best_target_only: bool,
    calibrate: Calibrate | None,
    on_event: OnEvent | None,
    verbose: bool,
) -> ResolvedOptions:
    wanted, options = opened.wanted, opened.options
    (target, free), (draft, draft_free) = placement_of(wanted), placement_of_draft(wanted)
    fixed = replace(options, target=target, draft=draft)
    all_given = "gpu_layers" not in (free | draft_free if opened.draft else free)
    loads = "load_mode" in free and bool(target.gpu_layers) and not wanted.rpc
    if all_given and not (best_target_only or wanted.override_tensor or loads):
        return ResolvedOptions(fixed, fixed)
    where = machine()
    if wanted.override_tensor:
        check_overrides(opened.target.header, wanted.override_tensor, where.card_names)
    if all_given and loads:
        asked = request_of(opened, acceptance=0.0)
        both = ((asked.target, target), *([(asked.draft, draft)] if asked.draft else []))
        target, *rest = with_load_options(where, *both)
        fixed = replace(fixed, target=target, draft=rest[0] if rest else draft)
    if not where.cards or (all_given and not best_target_only):
        return ResolvedOptions(fixed, fixed)
    to_plan = _for_best_target_only(opened) if all_given else opened
    made = make_plan(to_plan, where=where, calibrate=calibrate, on_event=on_event, verbose=verbose)
    document, cards = made.document(), where.card_names
    target_only = with_placement(options, made.plan.target_only, draft_max=options.draft_max)
    if all_given:
        return ResolvedOptions(fixed, target_only, cards, document)
    if opened.draft is not None and made.plan.pair is None:
        raise UsageError(why(made.plan), "--no-draft runs target-only; plan shows what fits")
    option = made.plan.pair or made.plan.target_only
    pair = with_placement(options, option, draft_max=wanted.draft_max)
    return ResolvedOptions(pair, target_only, cards, document, made.plan.target_s(option))


def _for_best_target_only(opened: OpenedPair) -> OpenedPair:
    """Return the pair without its draft, with the placement left to the plan."""
    return replace(
        opened,
        spec=replace(opened.spec, draft=None, settings=unplaced(opened.spec.settings)),
        given=unplaced(opened.given),
        options=replace(opened.options, drafters=(), lookup_corpus=None),
        draft=None,
        warnings=(),
    )


def with_placement(options: DecoderOptions, option: PlannedRun, *, draft_max: int | None = None) -> DecoderOptions:
    """Return the options with a plan's placement and, for a fixed policy, its draft length unless one is given."""
    planned = option.draft_length if options.draft_policy == "fixed" else None
    return replace(
        options,
        target=option.target,
        draft=option.draft or Placement(),
        draft_max=draft_max or planned or min(options.draft_max, option.draft_max or options.draft_max),
        cache_type_k=option.context.cache_type_k,
        cache_type_v=option.context.cache_type_v,
        no_op_offload=not option.context.op_offload,
        op_offload_min_batch=option.context.op_offload_min_batch,
    )
