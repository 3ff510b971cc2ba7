"""From names on the command line to a plan: sources, headers, a machine, a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggufspec.cli import console
from ggufspec.cli.options import decoder_options
from ggufspec.cli.options import kv_types as parse_kv_types
from ggufspec.cli.options import layers as parse_layers
from ggufspec.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from ggufspec.bench.trial import Result
    from ggufspec.cli.given import Decoding, Drafting, Placing
    from ggufspec.decoding.options import DecoderOptions
    from ggufspec.decoding.placing import Layers
    from ggufspec.pairs.hub import HubFile
    from ggufspec.pairs.profile import Pair, Settings
    from ggufspec.pairs.source import Known
    from ggufspec.planning.plan import Machine, Plan, Question, Subject
    from ggufspec.planning.survey import Site
    from ggufspec.reports.document import PlanDocument, SweepRow


@dataclass
class Chosen:
    """A pair by where its files are: here, at a URL or in the hub; and what its profile sets."""

    name: str
    target: str | Path | HubFile
    draft: str | Path | HubFile | None
    settings: Settings
    target_gpu_layers: int | None = None
    draft_gpu_layers: int | None = None
    headers: list[Known] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """For the JSON document; the shapes once the headers are read."""
        shapes = {
            f"{role}_shape": _shape(known) for role, known in zip(("target", "draft"), self.headers, strict=False)
        }
        draft = str(self.draft) if self.draft else None
        return {"name": self.name, "target": str(self.target), "draft": draft} | shapes


def _shape(known: Known) -> str:
    header = known.header
    experts = f", {header.experts_used} of {header.experts} experts" if header.experts else ""
    return (
        f"{header.name}  ({header.architecture}, {header.blocks} blocks{experts}, {shown_size(header.weight_bytes())})"
    )


def shown_size(size: int) -> str:
    """Bytes of a file for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def show_shapes(out: Console, pair: dict[str, Any]) -> None:
    """A line for each model of a document's pair."""
    from rich.text import Text

    for role in ("target", "draft"):
        if shape := pair.get(f"{role}_shape"):
            out.print(Text.assemble((f"{role:<6} ", "bold"), str(shape)))


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line fixes; the plan is free in the rest."""

    layers: Layers
    draft_layers: Layers
    kv_types: tuple[tuple[str, str], ...] = ()
    draft_max: int | None = None
    acceptance: float | None = None
    gpu: tuple[str, ...] = ()
    vram: tuple[str, ...] = ()
    headroom: str | None = None
    rpc: tuple[str, ...] = ()


def placement_asked(
    chosen: Chosen | Pair,
    *,
    gpu_layers: str | None,
    gpu_layers_draft: str | None,
    tensor_split: str | None,
    n_cpu_moe: int | None,
    draft_max: int | None,
    headroom: str | None,
    rpc: Sequence[str] | None,
    gpu: Sequence[str] | None = None,
    vram: Sequence[str] | None = None,
    allow_kv: str | None = None,
    acceptance: float | None = None,
) -> Asked:
    """The placement options of a command, over what the profile fixes."""
    experts = chosen.settings.cpu_experts if n_cpu_moe is None else n_cpu_moe
    return Asked(
        layers=parse_layers(gpu_layers, chosen.target_gpu_layers, tensor_split, experts),
        draft_layers=parse_layers(gpu_layers_draft, chosen.draft_gpu_layers),
        kv_types=parse_kv_types(allow_kv),
        draft_max=draft_max or chosen.settings.draft_max,
        acceptance=acceptance,
        gpu=tuple(gpu or ()),
        vram=tuple(vram or ()),
        headroom=headroom,
        rpc=tuple(rpc or ()),
    )


@dataclass(frozen=True, slots=True)
class Made:
    """A plan and what it was made of."""

    plan: Plan
    acceptance_from: str

    def sweep(self) -> list[SweepRow]:
        """Both options over the target's layers, eight steps and the ends."""
        from ggufspec.planning.search import sweep

        return sweep(self.plan.question, self.plan.machine)


def choose(name: str | None, model: str | None, draft: str | None, repo: str | None, draft_repo: str | None) -> Chosen:
    """The pair that PAIR, ``-m``, ``-md``, ``-hf`` and ``-hfd`` mean; nothing needs to be here.

    Raises:
        GgufspecError: two of them contradict, or a profile is not there.
    """
    from ggufspec.pairs.hub import hub_file
    from ggufspec.pairs.profile import Settings, find, load_profile
    from ggufspec.pairs.profile import sources as profile_sources

    if model is not None and repo is not None:
        raise UsageError("both -m and -hf are given", "give one of them")
    if draft is not None and draft_repo is not None:
        raise UsageError("both -md and -hfd are given", "give one of them")
    own_draft = hub_file(draft_repo) if draft_repo else draft
    if model is not None or repo is not None:
        if name is not None:
            raise UsageError("both a PAIR and a model are given", "give one of them")
        target = hub_file(repo) if repo else str(model)
        return Chosen(Path(str(model or repo)).stem, target, own_draft, Settings())
    path = find(name or "demo")
    profile = load_profile(path)
    target_source, draft_source = profile_sources(profile, path.parent)
    chosen = Chosen(
        profile.name,
        target_source,
        draft_source,
        profile.settings,
        profile.target.gpu_layers,
        profile.draft.gpu_layers if profile.draft else None,
    )
    return replace(chosen, draft=own_draft, draft_gpu_layers=None) if own_draft else chosen


def of_pair(pair: Pair) -> Chosen:
    """The same of a pair whose files are here."""
    return Chosen(pair.name, pair.target, pair.draft, pair.settings, pair.target_gpu_layers, pair.draft_gpu_layers)


def site(asked: Asked, threads: int) -> Site:
    """The machine to plan for: the cards named, or those that are here."""
    from ggufspec.hardware.host import cache_folder
    from ggufspec.planning import survey

    headroom = (
        survey.DEFAULT_HEADROOM_BYTES if asked.headroom is None else survey.parse_size(asked.headroom, "--headroom")
    )
    if asked.gpu or asked.vram:
        if asked.rpc:
            raise UsageError("--rpc is a card that is here, --gpu and --vram are not", "give one or the other")
        sizes = [survey.parse_size(size, "--vram") for size in asked.vram]
        return survey.imagined(asked.gpu, sizes, headroom_bytes=headroom, folder=cache_folder(), threads=threads)
    return survey.here(asked.rpc, headroom_bytes=headroom, folder=cache_folder(), threads=threads)


def make(
    chosen: Chosen,
    options: DecoderOptions,
    asked: Asked,
    *,
    where: Site | None = None,
    quiet: bool = False,
    verbose: bool = False,
) -> Made:
    """Read the headers and make the plan.

    Raises:
        GgufspecError: a header cannot be read, the draft cannot serve the target, nothing fits, an option is absurd.
    """
    from ggufspec.decoding.placing import question
    from ggufspec.hardware.host import cache_folder, physical_cores
    from ggufspec.pairs.source import read_headers
    from ggufspec.pairs.vocabulary import check_pair
    from ggufspec.planning.confirm import Confirmer
    from ggufspec.planning.history import expected_acceptance, record_shortfall
    from ggufspec.planning.search import make_plan

    where = where or site(asked, options.threads or physical_cores())
    sources: Sequence[Any] = [chosen.target] + ([chosen.draft] if chosen.draft else [])
    with console.busy(quiet or verbose) as say:
        chosen.headers = read_headers(
            sources, None, lambda event: say(f"reading the header of {event['file']}: {event['bytes'] / 1e6:.1f} MB")
        )
    target, draft = chosen.headers[0], chosen.headers[1] if chosen.draft else None
    warnings = check_pair(target, draft) if draft else ()
    acceptance, acceptance_from = asked.acceptance, "given with --acceptance"
    if acceptance is None:
        acceptance, acceptance_from = expected_acceptance(
            cache_folder(),
            target.header.name,
            draft.header.name if draft else "",
            chosen.settings.acceptance,
        )
    asks: Question = question(
        (target.header, target.skeleton),
        (draft.header, draft.skeleton) if draft else None,
        options,
        acceptance,
        layers=asked.layers,
        draft_layers=asked.draft_layers,
        kv_types=asked.kv_types,
        draft_max=asked.draft_max,
    )
    confirm = Confirmer(
        where.machine.card_names, paper=where.paper, rpc=where.rpc, folder=cache_folder(), verbose=verbose
    )
    asks = replace(
        asks,
        target=_corrected(asks.target, where.machine),
        alone=_corrected(asks.alone, where.machine),
        draft=_corrected(asks.draft, where.machine) if asks.draft else None,
    )
    threads = options.threads or physical_cores()
    machine = where.machine
    if not where.paper:
        asks, machine = _paced(asks, machine, threads)
    made = make_plan(asks, machine, confirm)
    made = replace(made, notes=(*made.notes, *warnings))
    for card in where.machine.cards:
        short = made.alone.used(card.name).total - made.alone.formula[card.name].total
        before = asks.alone.shortfall.get(card.name, 0)
        record_shortfall(cache_folder(), target.header.architecture, card.description, short + before)
    return Made(made, acceptance_from)


def _paced(asks: Question, machine: Machine, threads: int) -> tuple[Question, Machine]:
    """The models as fast as a rehearsal on this machine found them; the speeds' origin says so."""
    from ggufspec.hardware.host import cache_folder
    from ggufspec.planning import rehearsed

    identity = rehearsed.identity(machine.cards)
    said = []

    def paced(subject: Subject) -> Subject:
        points = rehearsed.known(cache_folder(), subject.header, threads, identity)
        pace = rehearsed.pace(points, subject.header, machine.speed, machine.card_names)
        if pace is not None:
            said.append(f"{subject.header.name} as rehearsed here on {pace.dates[-1]}")
        return replace(subject, pace=pace)

    target, draft = paced(asks.target), paced(asks.draft) if asks.draft else None
    asks = replace(asks, target=target, alone=replace(asks.alone, pace=target.pace), draft=draft)
    origin = "; ".join([machine.speed.origin, *said])
    return asks, replace(machine, speed=replace(machine.speed, origin=origin))


def _corrected(subject: Subject, machine: Machine) -> Subject:
    """What the formula was seen to miss on such cards before."""
    from ggufspec.hardware.host import cache_folder
    from ggufspec.planning.history import known_shortfall

    architecture = subject.header.architecture
    known = {card.name: known_shortfall(cache_folder(), architecture, card.description) for card in machine.cards}
    return replace(subject, shortfall={name: size for name, size in known.items() if size})


@dataclass(frozen=True, slots=True)
class Placed:
    """A pair's options with their placements, those of the best target-only run, and the plan; None without a card."""

    pair: DecoderOptions
    alone: DecoderOptions
    cards: tuple[str, ...] = ()
    plan: PlanDocument | None = None


def place(
    chosen: Chosen,
    options: DecoderOptions,
    asked: Asked,
    *,
    rival: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> Placed:
    """Where the layers of a pair go, and with ``rival`` those of the best target-only run.

    Layers that are asked for by number are taken as they are; what is left to ``auto`` is planned.

    Raises:
        GgufspecError: nothing fits, or a header cannot be read.
    """
    from ggufspec.decoding.placing import placed
    from ggufspec.hardware.host import physical_cores
    from ggufspec.planning.describe import document

    layers, draft_layers = asked.layers, asked.draft_layers
    fixed = replace(
        options,
        gpu_layers=layers.gpu_layers or 0,
        split=layers.split,
        cpu_experts=layers.cpu_experts or 0,
        draft_gpu_layers=draft_layers.gpu_layers or 0,
    )
    as_asked = layers.gpu_layers is not None and (draft_layers.gpu_layers is not None or chosen.draft is None)
    if as_asked and not rival:
        return Placed(fixed, fixed)
    where = site(asked, options.threads or physical_cores())
    if not where.machine.cards:
        return Placed(fixed, fixed)
    if as_asked:  # only the rival is left to plan
        chosen = replace(chosen, draft=None)
        asked = replace(asked, layers=type(layers)())
    made = make(chosen, options, asked, where=where, quiet=quiet, verbose=verbose)
    shown = document(made.plan, chosen.describe(), made.acceptance_from)
    alone = placed(options, made.plan.alone, draft_max=options.draft_max)
    cards = where.machine.card_names
    if as_asked:
        return Placed(fixed, alone, cards, shown)
    if chosen.draft is not None and made.plan.pair is None:
        raise UsageError(made.plan.why(), "--no-draft runs the target alone; plan shows what fits")
    option = made.plan.pair or made.plan.alone
    return Placed(placed(options, option, draft_max=asked.draft_max), alone, cards, shown)


def settle(
    chosen: Chosen,
    placing: Placing,
    decoding: Decoding,
    drafting: Drafting,
    *,
    gpu: Sequence[str] | None = None,
    vram: Sequence[str] | None = None,
    rival: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> Placed:
    """How a pair runs: what the command line says, over the profile, over the plan.

    A draft that does not draft, since only the lookup does or nobody, is not placed.

    Args:
        chosen: the pair.
        placing: where layers go, as far as the command line says.
        decoding: context, threads and cache.
        drafting: who guesses.
        gpu: cards that are not here, by name.
        vram: cards that are not here, by memory.
        rival: plan the best target-only run too.
        quiet: show no progress.
        verbose: show llama.cpp's log.

    Raises:
        GgufspecError: a value is out of range, nothing fits, or a header cannot be read.
    """
    options = decoder(chosen.settings, decoding, drafting)
    if not options.needs_draft:
        chosen = replace(chosen, draft=None)
    asked = asked_of(chosen, placing, drafting, gpu=gpu, vram=vram)
    return place(chosen, options, asked, rival=rival, quiet=quiet, verbose=verbose)


def asked_of(
    chosen: Chosen | Pair,
    placing: Placing,
    drafting: Drafting,
    *,
    gpu: Sequence[str] | None = None,
    vram: Sequence[str] | None = None,
    allow_kv: str | None = None,
) -> Asked:
    """:func:`placement_asked` of groups of options."""
    return placement_asked(
        chosen,
        gpu_layers=placing.gpu_layers,
        gpu_layers_draft=placing.gpu_layers_draft,
        tensor_split=placing.tensor_split,
        n_cpu_moe=placing.n_cpu_moe,
        draft_max=drafting.draft_max,
        headroom=placing.headroom,
        rpc=placing.rpc,
        gpu=gpu,
        vram=vram,
        allow_kv=allow_kv,
    )


def decoder(settings: Settings, decoding: Decoding, drafting: Drafting) -> DecoderOptions:
    """The decoder's options, everything on the CPU still: what the command line says, over the profile.

    Raises:
        UsageError: a value is out of range, or a name is not known.
    """
    return decoder_options(
        settings,
        n_ctx=decoding.ctx_size,
        threads=decoding.threads,
        type_k=decoding.cache_type_k,
        type_v=decoding.cache_type_v,
        flash_attention=decoding.flash_attn,
        drafter=drafting.drafter,
        draft_policy=drafting.draft_policy,
        draft_max=drafting.draft_max,
        lookup_corpus=drafting.lookup_corpus,
        accept=drafting.accept,
        strict=drafting.strict,
    )


def learn(chosen: Chosen, places: Placed, results: Sequence[Result]) -> None:
    """Keep what speculative runs showed, for later plans: acceptance, and what a card's driver takes for itself.

    Args:
        chosen: the pair.
        places: where it ran.
        results: what was measured.
    """
    from ggufspec.decoding.options import is_lossy
    from ggufspec.hardware.host import cache_folder
    from ggufspec.planning.history import record_acceptance

    every = [answer.statistics for result in results for answer in result.answers]
    if not every or not chosen.draft or is_lossy(places.pair.accept):
        return
    accepted, drafted = (
        [sum(column) for column in zip(*rows, strict=True)]
        for rows in ([s.accepted_by_position for s in every], [s.drafted_by_position for s in every])
    )
    record_acceptance(cache_folder(), Path(str(chosen.target)).name, Path(str(chosen.draft)).name, accepted, drafted)
    _learn_overhead(places, results[0])


def _learn_overhead(places: Placed, result: Result) -> None:
    from ggufspec.hardware.gpus import survey
    from ggufspec.hardware.host import cache_folder
    from ggufspec.planning import calibration

    seen, option = survey(), places.plan.options["speculative"] if places.plan else None
    if places.plan is None or option is None or option.draft is None or result.draft is None:
        return
    if len(seen.cards) != 1 or len(places.cards) != 1:
        return  # whose memory it is could not be told
    ran_as_planned = (option.target.gpu_layers, option.draft.gpu_layers) == (
        result.target.gpu_layers,
        result.draft.gpu_layers,
    )
    known = sum(sum(model.bytes[places.cards[0]].values()) for model in (option.target, option.draft))
    if ran_as_planned and result.vram_bytes > known:
        calibration.record_overhead(
            cache_folder(),
            seen.cards[0].name,
            seen.driver or "",
            version("llama-cpp-python"),
            result.vram_bytes - known,
        )


def calibrate(threads: int, rpc: tuple[str, ...], *, quiet: bool, verbose: bool) -> None:
    """Measure this machine for a few seconds; later plans use it.

    Raises:
        GgufspecError: llama.cpp died over it, or an RPC worker does not answer.
    """
    from ggufspec.hardware.host import cache_folder
    from ggufspec.planning import calibration

    with console.busy(quiet or verbose) as say:
        calibration.measure(
            cache_folder(),
            calibration.Spec(threads, rpc),
            on_event=lambda event: say(f"measuring this machine: {event['type']} on {event['device']}"),
            verbose=verbose,
        )
