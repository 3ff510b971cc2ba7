"""Placement of an opened pair, given or planned."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ggufspec.api.options import machine, placement_of, placement_of_draft, unplaced
from ggufspec.api.pairs import OnEvent, OpenedPair
from ggufspec.api.plan import Calibrate, make_plan, request_of
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import UsageError
from ggufspec.hardware.host import physical_cores
from ggufspec.llamacpp.options import Placement
from ggufspec.planning.memory import check_overrides
from ggufspec.planning.plan import PlannedRun
from ggufspec.planning.search import loaded
from ggufspec.planning.verdict import why
from ggufspec.schema.plan import PlanDocument


@dataclass(frozen=True, slots=True)
class Resolved:
    """Options with placements of a pair and of the best target-only run, with the plan.

    ``plan`` is None without a GPU or with all layers given. ``target_s`` is the plan's expectation of the target's
    speed (:meth:`ggufspec.planning.plan.Plan.target_s`).
    """

    pair: DecoderOptions
    alone: DecoderOptions
    cards: tuple[str, ...] = ()
    plan: PlanDocument | None = None
    target_s: tuple[float, float] | None = None


def resolve(
    opened: OpenedPair,
    *,
    rival: bool = False,
    calibrate: Calibrate | None = None,
    on_event: OnEvent | None = None,
    verbose: bool = False,
) -> Resolved:
    """Place the layers of a pair, and with ``rival`` also those of the best target-only run.

    Numbers of layers are used as given, ``auto`` is planned. An unused draft model (``--drafter lookup`` or ``none``)
    is not placed. The other arguments are those of :func:`ggufspec.api.plan.make_plan`.

    Raises:
        GgufspecError: as :func:`ggufspec.api.plan.make_plan`.
    """
    wanted, options = opened.wanted, opened.options
    (target, free), (draft, draft_free) = placement_of(wanted), placement_of_draft(wanted)
    fixed = replace(options, target=target, draft=draft)
    all_given = "gpu_layers" not in (free | draft_free if opened.draft else free)
    loads = "load_mode" in free and bool(target.gpu_layers) and not wanted.rpc
    if all_given and not (rival or wanted.override_tensor or loads):
        return Resolved(fixed, fixed)
    where = machine(wanted, options.threads or physical_cores())
    if wanted.override_tensor:
        check_overrides(opened.target.header, wanted.override_tensor, where.card_names)
    if all_given and loads:
        asked = request_of(opened, acceptance=0.0)
        both = ((asked.target, target), *([(asked.draft, draft)] if asked.draft else []))
        target, *beside = loaded(where, *both)
        fixed = replace(fixed, target=target, draft=beside[0] if beside else draft)
    if not where.cards or (all_given and not rival):
        return Resolved(fixed, fixed)
    to_plan = _of_rival(opened) if all_given else opened
    made = make_plan(to_plan, where=where, calibrate=calibrate, on_event=on_event, verbose=verbose)
    document, cards = made.document(), where.card_names
    alone = with_placement(options, made.plan.target_only, draft_max=options.draft_max)
    if all_given:
        return Resolved(fixed, alone, cards, document)
    if opened.draft is not None and made.plan.pair is None:
        raise UsageError(why(made.plan), "--no-draft runs target-only; plan shows what fits")
    option = made.plan.pair or made.plan.target_only
    pair = with_placement(options, option, draft_max=wanted.draft_max)
    return Resolved(pair, alone, cards, document, made.plan.target_s(option))


def _of_rival(opened: OpenedPair) -> OpenedPair:
    """Return the pair without its draft, and with the placement left to the plan."""
    return replace(
        opened,
        spec=replace(opened.spec, draft=None, settings=unplaced(opened.spec.settings)),
        given=unplaced(opened.given),
        options=replace(opened.options, drafters=(), lookup_corpus=None),
        draft=None,
        warnings=(),
    )


def with_placement(options: DecoderOptions, option: PlannedRun, *, draft_max: int | None = None) -> DecoderOptions:
    """Return the options with a plan's placement and, under a fixed policy, its draft length unless one is given."""
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
