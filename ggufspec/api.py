r"""From settings to a loaded pair: what the commands call, and the entry points for people who write Python.

Three lines from an installed package to tokens that name their source:

>>> from ggufspec import load_pair
>>> with load_pair("demo", threads=1) as decoder:
...     answer = list(decoder.generate("import os\n\ndef ", max_tokens=24))
>>> {emitted.source for emitted in answer} <= {"draft", "lookup", "target", "bonus"}
True

In order: a pair spec (:func:`spec_of`, :func:`spec_of_files`), its files here (:func:`pair_of_files`,
:func:`files_of`), a plan (:func:`make_plan`), the decoder's options with their placements (:func:`resolve`), the
decoder (:func:`load_pair`). Keywords are the rows of :data:`ggufspec.settings.table.OPTIONS` that Python has. What is
given goes over the profile, the profile over the plan, the plan over the defaults. Nothing is printed; ``on_event``
gets what takes long. A failure is a :class:`ggufspec.errors.GgufspecError`, whose ``hint`` is the next thing to try, in
the command line's words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggufspec.errors import ModelError, UsageError
from ggufspec.files import untrusted
from ggufspec.llamacpp.options import Placement
from ggufspec.schema.text import counted, of_file
from ggufspec.settings.registry import DRAFTERS, Drafter, parse_drafters
from ggufspec.settings.table import DRAFT_MAX, FIXED_DRAFT_MAX, OPTIONS, Settings, names, of_keywords

if TYPE_CHECKING:
    from ggufspec.decoding.decoder import SpeculativeDecoder
    from ggufspec.decoding.options import DecoderOptions
    from ggufspec.decoding.sampling import Sampling
    from ggufspec.models.header import ModelHeader
    from ggufspec.models.headers import Known
    from ggufspec.models.hub.client import HubFile
    from ggufspec.models.profile import Pair, PairSpec, Profile
    from ggufspec.planning.dry_runs import DryRuns
    from ggufspec.planning.plan import Machine, Plan, PlannedRun, PlanRequest
    from ggufspec.schema.plan import PlanDocument

OnEvent = Callable[[dict[str, Any]], None]
# Measures this machine for a plan on a machine, of models with these headers and options, where that is due; whether it
# did
Calibrate = Callable[["Machine | None", Sequence["ModelHeader"], "DecoderOptions", OnEvent | None], bool]
Fetch = Callable[[Sequence["HubFile"], str], Sequence[Path]]  # files of what it names, fetched where they are not here

CONTEXT_GIVEN = "given with -c"
_LOOK_BYTES = 2**16
_PLACEMENT = names(group="placement")


# ---- which pair ------------------------------------------------------------------------------------------------------


def spec_of(pair: str | Path | Profile | PairSpec, on_event: OnEvent | None = None) -> PairSpec:
    """The spec of a profile, of its name or path; its files need not be here.

    Raises:
        ModelError: a file that is not on the hub is not here.
        GgufspecError: there is no such profile, or an expanded model cannot be made.
    """
    from ggufspec.models.profile import PairSpec, Profile, load_profile, sources

    if isinstance(pair, PairSpec):
        return pair
    profile = pair if isinstance(pair, Profile) else load_profile(pair)
    return PairSpec(profile.name, *sources(profile, on_event), profile.placed_settings, profile.bench, profile.note)


def spec_of_files(
    given: Settings, on_event: OnEvent | None = None, *, no_draft: bool = False, need_draft: bool = False
) -> PairSpec:
    """The spec that PAIR, ``-m``, ``-md``, ``-hf`` and ``-hfd`` name.

    Raises:
        UsageError: two of them contradict, or there is no draft and ``need_draft``.
        GgufspecError: as :func:`spec_of`.
    """
    from ggufspec.models.hub.client import hub_file
    from ggufspec.models.profile import PairSpec, load_profile

    _check_sources(given)
    own_draft = not no_draft and (given.model_draft is not None or given.hf_repo_draft is not None)
    is_profile = given.model is None and given.hf_repo is None
    profile = load_profile(given.pair or "demo") if is_profile else None
    usual = profile.settings.drafter if profile and not given.drafter else None
    drafts_alone = usual not in (None, "none") and not _needs_file(usual)  # as its profile has it
    if need_draft and not own_draft and not drafts_alone and (profile is None or profile.draft is None):
        raise UsageError(
            "a bench compares with a draft, and none is given",
            "ggufspec bench -m TARGET -md DRAFT, or --drafter lookup",
        )
    draft: str | Path | HubFile | None = None
    if own_draft:
        draft = hub_file(given.hf_repo_draft, draft=True) if given.hf_repo_draft else given.model_draft
    if profile is None:
        target = hub_file(given.hf_repo) if given.hf_repo else str(given.model)
        spec = PairSpec(Path(given.model or str(given.hf_repo)).stem, target, draft)
    else:
        if no_draft or own_draft:
            profile = profile.model_copy(update={"draft": None})
        spec = spec_of(profile, on_event)
    if own_draft and profile is not None:  # which need not be a head where the profile's own is one
        spec = replace(spec, draft=draft, settings=replace(spec.settings, drafter=None))
    if not no_draft:
        check_drafter(spec, given)
    return spec


def pair_of_files(
    given: Settings,
    fetch: Fetch,
    *,
    no_draft: bool = False,
    need_draft: bool = False,
    on_event: OnEvent | None = None,
) -> Pair:
    """The pair that PAIR, ``-m``, ``-md``, ``-hf`` and ``-hfd`` name, its files here and checked.

    Args:
        given: the command line.
        fetch: is given the models of the hub and what to call them.
        no_draft: leave the draft away.
        need_draft: refuse a pair without one.
        on_event: gets progress of expanded models.

    Raises:
        GgufspecError: a profile or a file is not there or is not a GGUF file, or the user does not want to fetch it.
    """
    spec = spec_of_files(given, on_event, no_draft=no_draft, need_draft=need_draft)
    if given.model is None and given.hf_repo is None:
        return _located(spec, fetch, f"profile {spec.name!r}")
    pair = _located(spec, fetch, "the pair")
    return replace(pair, name=pair.target.stem)


def files_of(pair: str | Path | Profile | Pair, *, download: bool = False, on_event: OnEvent | None = None) -> Pair:
    """The pair with its files here and checked; with ``download`` they are fetched from the hub first.

    Raises:
        UsageError: there is no such profile.
        ModelError: a file is not here, or is not a GGUF file; the hint is the command that fetches it.
        GgufspecError: the hub cannot be reached, or the disk is too small.
    """
    from ggufspec.models.hub import download as hub

    spec = spec_of(pair, on_event)

    def fetch(missing: Sequence[HubFile], name: str) -> list[Path]:
        if not download:
            raise ModelError(f"{missing[0].file} of {name} is not on this machine", f"ggufspec pull {spec.name}")
        hub.fetch(hub.look(missing), on_event)
        return [path for path in map(hub.here, missing) if path is not None]

    return _located(spec, fetch, f"profile {spec.name!r}")


def _located(spec: PairSpec, fetch: Fetch, name: str) -> Pair:
    """The pair with its files here: those of the hub fetched, and all of them checked."""
    from ggufspec.llamacpp.model import check_gguf
    from ggufspec.models.hub.client import HubFile
    from ggufspec.models.profile import Pair

    missing = [source for source in (spec.target, spec.draft) if isinstance(source, HubFile)]
    fetched = dict(zip(missing, fetch(missing, name), strict=True)) if missing else {}

    def here(source: str | Path | HubFile) -> Path:
        path = fetched[source] if isinstance(source, HubFile) else Path(source)
        check_gguf(path)
        return path

    target, draft = here(spec.target), here(spec.draft) if spec.draft is not None else None
    return Pair(spec.name, target, draft, spec.settings, spec.bench, spec.note)


def _check_sources(given: Settings) -> None:
    """Refuse two targets, or two drafts."""
    if given.model is not None and given.hf_repo is not None:
        raise UsageError("both -m (or GGUFSPEC_MODEL) and -hf are given", "give one of them")
    if given.model_draft is not None and given.hf_repo_draft is not None:
        raise UsageError("both -md (or GGUFSPEC_MODEL_DRAFT) and -hfd are given", "give one of them")
    if given.pair is not None and (given.model is not None or given.hf_repo is not None):
        other = "-hf" if given.hf_repo else "-m (or GGUFSPEC_MODEL)"
        raise UsageError(f"both a PAIR and {other} are given", "give one of them")


# ---- settings of the decoder -----------------------------------------------------------------------------------------


def decoder_options(wanted: Settings) -> DecoderOptions:
    """Settings as the decoder takes them, checked before a model is loaded. Everything on the CPU: the plan places it.

    Raises:
        UsageError: options contradict each other, or the corpus cannot be read.
    """
    from ggufspec.decoding.options import DecoderOptions

    if wanted.lookup_corpus is not None:
        _check_text(wanted.lookup_corpus)  # a typo is not to cost the time to load the models
    same = [name for name in DecoderOptions.__dataclass_fields__ if name in OPTIONS]
    options = wanted.given(same)
    if wanted.drafter is not None:
        options["drafters"] = parse_drafters(wanted.drafter)
    if wanted.draft_policy == "fixed":
        options.setdefault("draft_max", FIXED_DRAFT_MAX)
    return DecoderOptions(**options)


def sampling(given: Settings) -> Sampling:
    """How a token is chosen, as the decoder takes it.

    Raises:
        UsageError: a value is out of range.
    """
    from ggufspec.decoding.sampling import Sampling

    values = {name: given.value(name) for name in names(group="sampling")}
    return Sampling(temperature=values.pop("temp"), **values)


def placement_of(wanted: Settings) -> tuple[Placement, frozenset[str]]:
    """The target's placement as it is given, and of :data:`ggufspec.planning.plan.FREE` what the plan may choose."""
    from ggufspec.planning.plan import FREE

    given = {name: getattr(wanted, name) for name in Placement.__dataclass_fields__ if name in OPTIONS}
    given |= {"gpu_layers": layers_of(wanted.gpu_layers), "split": wanted.tensor_split}
    given = {name: value for name, value in given.items() if value is not None}
    return Placement(**given), FREE - given.keys()


def placement_of_draft(wanted: Settings) -> tuple[Placement, frozenset[str]]:
    """The same of the draft."""
    return placement_of(Settings(gpu_layers=wanted.gpu_layers_draft))


def layers_of(value: int | str | None) -> int | None:
    """A number of layers as the plan takes it: -1 is all, None leaves it to the plan."""
    return max(value, -1) if isinstance(value, int) else None


def _check_text(file: Path) -> None:
    """Whether a text that something else will read is there and begins as one.

    Raises:
        UsageError: it cannot be read, or is no UTF-8.
    """
    import codecs

    beginning = untrusted.read_bytes(file, _LOOK_BYTES, failure=UsageError, cut=True)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning)
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: {error}", "convert it to UTF-8") from None


# ---- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan, and what it was made of. ``headers`` are the target's and the draft's."""

    plan: Plan
    pair: PairSpec
    headers: tuple[Known, ...]
    acceptance_from: str
    context_from: str
    dry_runs: DryRuns

    def described(self) -> dict[str, Any]:
        """The pair for the JSON documents: names of files, and the models' shapes."""
        named: dict[str, Any] = {"name": self.pair.name, "target": str(self.pair.target)}
        shapes = [_shape(known.header) for known in self.headers]
        draft = self.plan.request.draft
        if draft is not None and draft.in_target:
            blocks = counted(draft.header.nextn_blocks, "MTP block")
            return named | {"draft": None, "target_shape": shapes[0], "draft_shape": f"{blocks} of the target's file"}
        named |= {"draft": str(self.pair.draft) if self.pair.draft else None}
        return named | {f"{role}_shape": shape for role, shape in zip(("target", "draft"), shapes, strict=False)}

    def document(self, *, sweep: bool = False, contexts: bool = False) -> PlanDocument:
        """The document of ``plan --json``.

        Args:
            sweep: with both ways over the target's layers: eight steps, the ends and what was chosen.
            contexts: with other contexts beside the plan's, unless that was given.
        """
        from ggufspec.planning import search
        from ggufspec.planning.describe import document

        with self.dry_runs:
            rows = search.sweep(self.plan, self.dry_runs) if sweep else ()
            beside = (
                search.contexts(self.plan, self.dry_runs) if contexts and self.context_from != CONTEXT_GIVEN else ()
            )
        sources = {"acceptance_from": self.acceptance_from, "context_from": self.context_from}
        return document(self.plan, self.described(), sources, rows, beside)


def _shape(header: ModelHeader) -> str:
    experts = f", {header.experts_used} of {header.experts} experts" if header.experts else ""
    blocks = counted(header.blocks, "block")
    return f"{header.name}  ({header.architecture}, {blocks}{experts}, {of_file(header.weight_bytes())})"


def machine(wanted: Settings, threads: int) -> Machine:
    """The machine to plan for: the cards named, or those that are here.

    Raises:
        UsageError: a size is not one, a card is not known, or cards that are here are mixed with others.
    """
    from ggufspec.files.cache import cache_folder
    from ggufspec.planning import machine

    headroom = machine.DEFAULT_HEADROOM_BYTES
    if wanted.headroom is not None:
        headroom = machine.parse_size(wanted.headroom, "--headroom")
    if not (wanted.gpu or wanted.vram):
        return machine.here(wanted.rpc or (), headroom_bytes=headroom, folder=cache_folder(), threads=threads)
    if wanted.rpc:
        raise UsageError("--rpc is a card that is here, --gpu and --vram are not", "give one or the other")
    sizes = [machine.parse_size(size, "--vram") for size in wanted.vram or ()]
    return machine.simulated_cards(
        wanted.gpu or (), sizes, headroom_bytes=headroom, folder=cache_folder(), threads=threads
    )


def make_plan(
    pair: PairSpec,
    given: Settings = Settings(),
    *,
    where: Machine | None = None,
    options: DecoderOptions | None = None,
    calibrate: Calibrate | None = None,
    on_event: OnEvent | None = None,
    verbose: bool = False,
) -> PlanResult:
    """Read the headers and make the plan.

    Args:
        pair: whose headers are read.
        given: over the pair's own settings.
        where: the machine; by default that of ``given``.
        options: context, types and threads, by default those of ``given``; their placements are not looked at.
        calibrate: measures this machine's speed where a plan of these models needs it and it is not known.
        on_event: gets headers as they are read: :func:`ggufspec.models.headers.read_headers`.
        verbose: show llama.cpp's log of the dry runs.

    Raises:
        GgufspecError: a header cannot be read, the draft cannot serve the target, nothing fits, an option is absurd.
    """
    from ggufspec.files.cache import cache_folder
    from ggufspec.hardware.host import physical_cores
    from ggufspec.models.headers import read_headers
    from ggufspec.models.vocabulary import check_pair
    from ggufspec.planning import rehearsed, search
    from ggufspec.planning.dry_runs import DryRuns
    from ggufspec.planning.history import expected_acceptance
    from ggufspec.planning.memory import check_overrides

    wanted = given.over(pair.settings)
    options = options or decoder_options(wanted)
    threads = options.threads or physical_cores()
    where = where or machine(wanted, threads)
    sources = [source for source in (pair.target, pair.draft if options.needs_draft else None) if source]
    read = dict(zip(sources, read_headers(sources, None, on_event), strict=True))
    pair, options = with_head(pair, options, on_event)
    headers = tuple(read[source] for source in (pair.target, pair.draft) if source)
    target, draft = headers[0], headers[1] if pair.draft else None
    warnings = check_pair(target, draft, options.head) if draft else ()
    acceptance, acceptance_from = given.acceptance, f"{given.acceptance or 0:.0%} a token, given with --acceptance"
    if acceptance is None:
        acceptance, acceptance_from = expected_acceptance(
            cache_folder(),
            target.header.fingerprint,
            draft.header.fingerprint if draft else "",
            pair.settings.acceptance,
        )
    check_overrides(target.header, wanted.override_tensor or (), where.card_names)
    if calibrate is not None and calibrate(where, [known.header for known in headers], options, on_event):
        where = replace(where, speed=machine(wanted, threads).speed)
    both = [(known.header, known.metadata_only) for known in headers]
    asked = plan_request(both[0], both[1] if draft else None, options, acceptance, wanted)
    if wanted.mmproj:
        where = beside_mmproj(wanted, where, target.header, verbose=verbose)
    if not where.simulated:
        asked, where = rehearsed.as_rehearsed(asked, where, cache_folder(), threads)
    dry_runs = DryRuns(
        where.described, simulated=where.simulated, rpc=where.rpc, folder=cache_folder(), verbose=verbose
    )
    with dry_runs:
        plan = search.make_plan(asked, where, dry_runs)
    if dry_runs.limits:
        warnings = (*warnings, f"{dry_runs.limits}: bytes are estimates; `ggufspec doctor` says how to build one")
    plan = replace(plan, notes=(*plan.notes, *warnings), confirmed=not dry_runs.limits)
    context_from = (
        CONTEXT_GIVEN if given.ctx_size is not None else "of its profile" if wanted.ctx_size else "the default"
    )
    return PlanResult(plan, pair, headers, acceptance_from, context_from, dry_runs)


def beside_mmproj(wanted: Settings, where: Machine, target: ModelHeader, *, verbose: bool = False) -> Machine:
    """The machine with ``--mmproj`` on the card that llama.cpp puts it on, or on the host.

    That is the first card of this machine in ggml's order, and an RPC worker's only without one: clip_ctx in
    tools/mtmd/clip.cpp.

    Raises:
        GgufspecError: the projector is not there, it is none, or it is another model's.
    """
    from ggufspec.models import mmproj

    assert wanted.mmproj is not None
    local = [name for name in where.card_names if not name.startswith("RPC")]
    card = "" if wanted.no_mmproj_offload else next(iter((*local, *where.card_names)), "")
    used = mmproj.measure(wanted.mmproj, card, simulated=where.simulated, rpc=where.rpc, verbose=verbose)
    mmproj.check(used, target)
    return where.with_mmproj(card, used.card_bytes, used.host_bytes)


def with_head(
    pair: PairSpec, options: DecoderOptions, on_event: OnEvent | None = None
) -> tuple[PairSpec, DecoderOptions]:
    """The pair and the options as they are used: a draft that is a head drafts as one, and none is placed in vain.

    ``-c max`` becomes the target's number.

    Raises:
        UsageError: a head is asked for, and the draft is none; the target does not say what it was trained for.
        GgufspecError: a header cannot be read, or the head cannot serve the target.
    """
    from ggufspec.models import heads
    from ggufspec.models.headers import read_headers

    if not options.ctx_size:
        options = with_context(options, read_headers([pair.target], None, on_event)[0].header)
    if not options.needs_draft:
        return replace(pair, draft=None), options
    if pair.draft is None and options.head == "mtp":  # in the target's own file
        pair = replace(pair, draft=pair.target)
    if pair.draft is None:
        return pair, options
    draft = read_headers([pair.draft], None, on_event)[0]
    if not options.head and heads.kind_of(draft.header) is None:
        return pair, options
    return pair, drafting(read_headers([pair.target], None, on_event)[0], draft, options)


def drafting(target: Known, draft: Known, options: DecoderOptions) -> DecoderOptions:
    """The options with which a draft drafts for a target: as a head if it is one.

    Raises:
        UsageError: a head is asked for, and the draft is none.
        ModelError: the draft cannot serve the target.
    """
    from ggufspec.models import heads
    from ggufspec.models.vocabulary import check_pair

    head = options.head
    if head or heads.kind_of(draft.header):
        options = options.with_head(heads.require(target.header, draft.header, head).drafter)
    check_pair(target, draft, head)
    return options


def with_context(options: DecoderOptions, target: ModelHeader) -> DecoderOptions:
    """The options with ``-c max`` as the target's number.

    Raises:
        UsageError: its header has none.
    """
    if options.ctx_size or target.context_length:
        return replace(options, ctx_size=options.ctx_size or target.context_length)
    raise UsageError(f"{target.name} does not say for which context it was trained", "give a number: -c 8192")


def plan_request(
    target: tuple[ModelHeader, Path],
    draft: tuple[ModelHeader, Path] | None,
    options: DecoderOptions,
    acceptance: float,
    wanted: Settings = Settings(),
) -> PlanRequest:
    """What to plan for. Beside a draft, target-only is always placed as well as it can be.

    Args:
        target: its header, and the metadata-only GGUF of it.
        draft: the same of the draft, or None.
        options: context, types, threads and width; their placements are not looked at.
        acceptance: the acceptance rate to expect.
        wanted: layers where they are fixed, cache types that the plan may choose, the longest draft.

    Raises:
        UsageError: ``n_cpu_moe`` for a model without experts, ``n_cpu_ffn`` for one without another feed-forward.
    """
    from ggufspec.models import heads
    from ggufspec.planning.memory import check_part
    from ggufspec.planning.plan import ModelRequest, PlanRequest

    if wanted.n_cpu_moe:
        check_part(target[0], "experts", "--n-cpu-moe")
    if wanted.n_cpu_ffn:
        check_part(target[0], "ffn", "--n-cpu-ffn")
    longest = wanted.draft_max or DRAFT_MAX
    widest = replace(options, draft_max=longest)
    fixed = ModelRequest(*target, widest.context(with_draft=draft is not None), *placement_of(wanted))
    beside = ModelRequest(*draft, options.draft_context(), *placement_of_draft(wanted)) if draft else None
    if draft and beside and options.head:
        in_target, mtp = draft[1] == target[1], options.head == "mtp"
        as_read = heads.as_read(target[0], target[0] if in_target else draft[0])
        beside = replace(beside, as_read=as_read, in_target=in_target, mtp=mtp)
        fixed = replace(fixed, mtp=in_target, context=replace(fixed.context, hidden=heads.sources(draft[0])))
    undrafted = replace(widest, drafters=(), lookup_corpus=None)
    alone = ModelRequest(*target, undrafted.context(with_draft=False))
    if wanted.n_cpu_ffn == 0:
        alone = replace(alone, free=alone.free - {"n_cpu_ffn"})
    return PlanRequest(
        target=fixed,
        target_only=alone if draft else fixed,
        draft=beside,
        acceptance=acceptance,
        kv_types=tuple((name, name) for name in wanted.allow_kv or ()),
        draft_max=longest,
    )


# ---- resolved settings -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resolved:
    """How a pair runs: its options with their placements, those of the best target-only run, and the plan.

    ``plan`` is None where nothing was left to plan: without a card, or with all layers given.
    """

    pair: DecoderOptions
    alone: DecoderOptions
    cards: tuple[str, ...] = ()
    plan: PlanDocument | None = None


def resolve(
    pair: PairSpec,
    given: Settings = Settings(),
    *,
    options: DecoderOptions | None = None,
    rival: bool = False,
    calibrate: Calibrate | None = None,
    on_event: OnEvent | None = None,
    verbose: bool = False,
) -> Resolved:
    """Where the layers of a pair go, and with ``rival`` those of the best target-only run.

    Layers that are given by number are taken as they are; what is left to ``auto`` is planned. A draft model that
    is not used (--drafter lookup or none) is not placed.

    Raises:
        GgufspecError: as :func:`make_plan`, whose arguments these are.
    """
    from ggufspec.hardware.host import physical_cores
    from ggufspec.models.headers import read_headers
    from ggufspec.planning.memory import check_overrides

    wanted = given.over(pair.settings)
    pair, options = with_head(pair, options or decoder_options(wanted), on_event)
    (target, free), (draft, draft_free) = placement_of(wanted), placement_of_draft(wanted)
    fixed = replace(options, target=target, draft=draft)
    all_given = "gpu_layers" not in (free | draft_free if pair.draft else free)
    if all_given and not rival and not wanted.override_tensor:
        return Resolved(fixed, fixed)
    where = machine(wanted, options.threads or physical_cores())
    if wanted.override_tensor:
        check_overrides(read_headers([pair.target], None, on_event)[0].header, wanted.override_tensor, where.card_names)
        if all_given and not rival:
            return Resolved(fixed, fixed)
    if not where.cards:
        return Resolved(fixed, fixed)
    if all_given:  # only the rival is left to plan
        pair = replace(pair, draft=None, settings=replace(pair.settings, **dict.fromkeys(_PLACEMENT)))
        given = replace(given, **dict.fromkeys(_PLACEMENT))
    planned = replace(options, drafters=()) if all_given else options
    made = make_plan(pair, given, where=where, options=planned, calibrate=calibrate, on_event=on_event, verbose=verbose)
    document, cards = made.document(), where.card_names
    alone = with_placement(options, made.plan.target_only, draft_max=options.draft_max)
    if all_given:
        return Resolved(fixed, alone, cards, document)
    if pair.draft is not None and made.plan.pair is None:
        raise UsageError(made.plan.why(), "--no-draft runs target-only; plan shows what fits")
    option = made.plan.pair or made.plan.target_only
    return Resolved(with_placement(options, option, draft_max=wanted.draft_max), alone, cards, document)


def with_placement(options: DecoderOptions, option: PlannedRun, *, draft_max: int | None = None) -> DecoderOptions:
    """``options`` at the placement that a plan found. A fixed draft length is the plan's, unless one is given."""
    planned = option.draft_length if options.draft_policy == "fixed" else None
    return replace(
        options,
        target=option.target,
        draft=option.draft or Placement(),
        draft_max=draft_max or planned or options.draft_max,
        cache_type_k=option.context.cache_type_k,
        cache_type_v=option.context.cache_type_v,
        no_op_offload=not option.context.op_offload,
    )


# ---- for people who write Python -------------------------------------------------------------------------------------


def plan_pair(
    pair: str | Path | Profile | Pair = "demo",
    settings: Settings | None = None,
    *,
    gpu: str | Sequence[str] = (),
    vram: int | str | Sequence[int | str] = (),
    acceptance: float | None = None,
    allow_kv: Sequence[str] = (),
    sweep: bool = False,
    on_event: OnEvent | None = None,
    verbose: bool = False,
    **options: Any,
) -> PlanDocument:
    """What fits, where each layer goes, how fast it will be, and whether the draft is worth its memory.

    Needs no download: headers are read from the hub by range, a few MB a model, and kept. Needs no card: ``gpu`` or
    ``vram`` names one; without them this machine's are planned for.

    >>> from ggufspec import plan_pair
    >>> plan = plan_pair("demo", vram="24GiB", ctx_size=512)
    >>> (plan.target.gpu_layers, plan.target.layers)  # the output layer is one more than the blocks
    (9, 8)
    >>> plan.predicted["target_only_tokens_per_s"] > 0
    True
    >>> [device.name for device in plan.devices]
    ['GPU0', 'CPU']

    Args:
        pair: name or path of a profile, the profile, or a :class:`~ggufspec.models.profile.Pair` of files.
        settings: options that go over the profile's, checked by type checkers, too.
        gpu: names of cards that are not here: ``RTX 4090``.
        vram: memory of cards that are not here: bytes, or ``24GiB``.
        acceptance: the acceptance rate to expect, 0 to 1; otherwise what was measured before, or the profile's.
        allow_kv: types of the target's cache that the plan may choose besides the ones given.
        sweep: predict tokens/s over the target's layers too.
        on_event: gets progress: ``{"event": "reading", "file": …, "bytes": …}``.
        verbose: let llama.cpp's log of the dry runs through to standard error.
        options: the same by keyword, which go over ``settings``: ``ctx_size``, ``gpu_layers``, …

    Returns:
        The document of ``ggufspec plan --json``: bytes by device, tokens/s of both ways, the choice and why;
        :func:`ggufspec.schema.base.to_json` makes JSON of it.

    Raises:
        UsageError: a name, an option or a size is not valid.
        GgufspecError: a header cannot be read, the draft cannot serve the target, or nothing fits.
    """
    simulated = {
        "gpu": gpu or None,
        "vram": vram or None,
        "acceptance": acceptance,
        "allow_kv": tuple(allow_kv) or None,
    }
    given = of_keywords(options, settings, **simulated)
    return make_plan(spec_of(pair), given, on_event=on_event, verbose=verbose).document(sweep=sweep, contexts=True)


def load_pair(
    pair: str | Path | Profile | Pair = "demo",
    settings: Settings | None = None,
    *,
    download: bool = False,
    on_event: OnEvent | None = None,
    **options: Any,
) -> SpeculativeDecoder:
    r"""A decoder of a pair, loaded where the plan for this machine puts its layers.

    >>> from ggufspec import Sampling, load_pair
    >>> with load_pair("demo", threads=1, ctx_size=512) as decoder:
    ...     for emitted in decoder.generate("class ", max_tokens=8, sampling=Sampling(temperature=0.8, seed=7)):
    ...         assert emitted.source in ("draft", "lookup", "target", "bonus")
    >>> decoder.statistics.tokens
    8

    Leaving the ``with`` block, or ``close()``, frees both models and their caches.

    Args:
        pair: name or path of a profile, the profile, or a :class:`~ggufspec.models.profile.Pair` of files.
        settings: options that go over the profile's, checked by type checkers, too.
        download: fetch what is on the hub and not here, which may be many GB; without it such a pair is an error.
        on_event: gets progress: ``{"event": "fetching", "file": …, "bytes": …, "total": …}`` from threads, one at a
            time, and ``{"event": "reading", "file": …, "bytes": …}``.
        options: the same by keyword, which go over ``settings``: ``drafter``, ``ctx_size``, …

    Raises:
        UsageError: a name or an option is not valid, or a drafter needs a draft and there is none.
        ModelError: a file is not here or damaged, or the draft's vocabulary is another.
        GgufspecError: nothing fits, or the hub cannot be reached.
    """
    from ggufspec.decoding.decoder import SpeculativeDecoder
    from ggufspec.files.cache import cache_folder
    from ggufspec.llamacpp import devices

    given = of_keywords(options, settings)
    files = files_of(pair, download=download, on_event=on_event)
    check_drafter(files, given)
    resolved = resolve(files, given, on_event=on_event)
    for endpoint in given.rpc or ():
        devices.add_rpc_worker(endpoint)
    return SpeculativeDecoder(files.target, files.draft, resolved.pair, cache=cache_folder())


def check_drafter(pair: PairSpec, given: Settings) -> None:
    """Refuse a drafter that needs a draft file for a pair without one.

    Raises:
        UsageError: it does.
    """
    if pair.draft is None and (row := _needs_file(given.drafter)):
        article, way = ("an", "-md HEAD or -hfd USER/REPO:eagle3") if row.is_head else ("a", "-md DRAFT")
        message = f"--drafter {given.drafter} needs {article} {row.label}, and none is given"
        raise UsageError(message, f"{way}, or --drafter lookup")


def _needs_file(drafter: str | None) -> Drafter | None:
    """Of the drafters that ``--drafter`` names, the one that cannot do without a draft file."""
    return next((DRAFTERS[name] for name in parse_drafters(drafter or "none") if DRAFTERS[name].needs_file), None)
