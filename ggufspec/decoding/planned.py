"""From a pair to how it runs: its headers, a plan for a machine, the decoder's options with their placements.

Nothing is shown: who asks hears of what takes long by events. :mod:`ggufspec.cli.planned` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggufspec import foreign
from ggufspec.display import of_file
from ggufspec.errors import UsageError
from ggufspec.settings import parse_drafters

if TYPE_CHECKING:
    from ggufspec.decoding.options import DecoderOptions
    from ggufspec.decoding.placing import Layers
    from ggufspec.models.hub import HubFile
    from ggufspec.models.profile import Pair, Profile, Settings
    from ggufspec.models.source import Known
    from ggufspec.planning.plan import Machine, Plan, Question, Subject
    from ggufspec.planning.survey import Site
    from ggufspec.schema.plan import PlanDocument, SweepRow

OnEvent = Callable[[dict[str, Any]], None]

_LOOK_BYTES = 2**16


@dataclass
class Chosen:
    """A pair by where its files are: here, at a URL or in the hub; and what its profile sets."""

    name: str
    target: str | Path | HubFile
    draft: str | Path | HubFile | None
    settings: Settings
    target_gpu_layers: int | None = None
    gpu_layers_draft: int | None = None
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
    return f"{header.name}  ({header.architecture}, {header.blocks} blocks{experts}, {of_file(header.weight_bytes())})"


def of_profile(profile: Profile, on_event: OnEvent | None = None) -> Chosen:
    """The pair of a profile; its files need not be here.

    Args:
        profile: whose pair it is.
        on_event: told of expanded models that are made: :func:`ggufspec.models.profile.sources`.

    Raises:
        ModelError: a file that is not on the hub is not here.
        GgufspecError: an expanded one cannot be made.
    """
    from ggufspec.models.profile import sources

    target, draft = sources(profile, on_event)
    return Chosen(
        profile.name,
        target,
        draft,
        profile.settings,
        profile.target.gpu_layers,
        profile.draft.gpu_layers if profile.draft else None,
    )


def of_pair(pair: Pair) -> Chosen:
    """The same of a pair whose files are here."""
    return Chosen(pair.name, pair.target, pair.draft, pair.settings, pair.target_gpu_layers, pair.gpu_layers_draft)


# ---- what is asked for, over the profile, over the defaults ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """What is fixed of a placement; the plan is free in the rest."""

    layers: Layers
    draft_layers: Layers
    kv_types: tuple[tuple[str, str], ...] = ()
    draft_max: int | None = None
    acceptance: float | None = None
    gpu: tuple[str, ...] = ()
    vram: tuple[str, ...] = ()
    headroom: str | None = None
    rpc: tuple[str, ...] = ()


def asked(
    chosen: Chosen | Pair,
    *,
    gpu_layers: int | str | None = None,
    gpu_layers_draft: int | str | None = None,
    split: Sequence[float] = (),
    n_cpu_moe: int | None = None,
    kv_types: Sequence[tuple[str, str]] = (),
    draft_max: int | None = None,
    acceptance: float | None = None,
    gpu: Sequence[str] = (),
    vram: Sequence[str] = (),
    headroom: str | None = None,
    rpc: Sequence[str] = (),
) -> Asked:
    """What a caller fixes of a placement, over what the profile fixes; None is not given, ``auto`` is the plan's.

    Args:
        chosen: the pair.
        gpu_layers: layers of the target on the cards: a number (more than it has is all), ``all`` or ``auto``.
        gpu_layers_draft: the same of the draft.
        split: shares of the target's layers for each card.
        n_cpu_moe: the experts of the target's first so many blocks stay on the CPU.
        kv_types: (cache_type_k, cache_type_v) that the plan may choose besides.
        draft_max: the longest draft of a round.
        acceptance: the share of drafted tokens to expect, 0 to 1.
        gpu: cards that are not here, by name.
        vram: cards that are not here, by memory: ``24GiB``.
        headroom: what to leave free on each card: ``512MiB``.
        rpc: endpoints of llama.cpp's RPC workers.

    Raises:
        UsageError: a number of layers is none.
    """
    from ggufspec.decoding.placing import Layers

    experts = chosen.settings.n_cpu_moe if n_cpu_moe is None else n_cpu_moe
    return Asked(
        layers=Layers(layers_asked(gpu_layers, chosen.target_gpu_layers), tuple(split), experts),
        draft_layers=Layers(layers_asked(gpu_layers_draft, chosen.gpu_layers_draft)),
        kv_types=tuple(kv_types),
        draft_max=draft_max or chosen.settings.draft_max,
        acceptance=acceptance,
        gpu=tuple(gpu),
        vram=tuple(vram),
        headroom=headroom,
        rpc=tuple(rpc),
    )


def layers_asked(given: int | str | None, profile: int | None = None) -> int | None:
    """A number of layers, which may be more than there are; -1 is all. None leaves it to the plan.

    Raises:
        UsageError: it is no number, and neither ``all`` nor ``auto``.
    """
    if given is None:
        return profile
    if given in ("auto", "all"):
        return None if given == "auto" else -1
    try:
        return max(int(given), -1)
    except ValueError:
        raise UsageError(f"{given!r} is not a number of layers", "45, all or auto") from None


def decoder_options(
    settings: Settings,
    *,
    ctx_size: int | None = None,
    draft_max: int | None = None,
    threads: int | None = None,
    cache_type_k: str | None = None,
    cache_type_v: str | None = None,
    flash_attn: str | None = None,
    ubatch_size: int | None = None,
    drafter: str | None = None,
    draft_policy: str | None = None,
    lookup_corpus: Path | None = None,
    accept: str = "exact",
    strict: bool = False,
) -> DecoderOptions:
    """What is given over the profile's settings over the defaults, checked before a model is loaded. Everything on the
    CPU: placements are the plan's.

    Raises:
        UsageError: a value is out of range, or a name is not known.
    """
    from ggufspec.decoding.options import FIXED_DRAFT_MAX, DecoderOptions

    if lookup_corpus is not None:
        _check_text(lookup_corpus)  # a typo is not to cost the time to load the models
    policy = draft_policy or settings.draft_policy or "adaptive"
    who = _first(drafter, settings.drafter)
    given = {
        "ctx_size": _first(ctx_size, settings.ctx_size),
        "draft_max": _first(draft_max, settings.draft_max, FIXED_DRAFT_MAX if policy == "fixed" else None),
        "drafters": None if who is None else parse_drafters(str(who)),
        "threads": _first(threads, settings.threads),
        "cache_type_k": _first(cache_type_k, settings.cache_type_k),
        "cache_type_v": _first(cache_type_v, settings.cache_type_v),
        "flash_attn": _first(flash_attn, settings.flash_attn),
        "ubatch_size": _first(ubatch_size, settings.ubatch_size),
    }
    chosen = {key: value for key, value in given.items() if value is not None}
    return DecoderOptions(
        draft_policy=policy,
        lookup_corpus=lookup_corpus,
        accept=accept,
        strict=strict,
        **chosen,  # type: ignore[arg-type]
    )


def _first(*values: object) -> object:
    return next((value for value in values if value is not None), None)


def _check_text(file: Path) -> None:
    """Whether a text that something else will read is there and begins as one.

    Raises:
        UsageError: it cannot be read, or is not UTF-8.
    """
    import codecs

    beginning = foreign.read_bytes(file, _LOOK_BYTES, failure=UsageError, cut=True)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning)
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: {error}", "convert it to UTF-8") from None


# ---- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Made:
    """A plan and what it was made of."""

    plan: Plan
    acceptance_from: str

    def sweep(self) -> list[SweepRow]:
        """Both options over the target's layers: eight steps, the ends and what was chosen."""
        from ggufspec.planning.search import sweep

        return sweep(self.plan)


def site(asked: Asked, threads: int) -> Site:
    """The machine to plan for: the cards named, or those that are here.

    Raises:
        UsageError: a size is none, a card is not known, or cards that are here are mixed with others.
    """
    from ggufspec.cache import cache_folder
    from ggufspec.planning import survey

    headroom = (
        survey.DEFAULT_HEADROOM_BYTES if asked.headroom is None else survey.parse_size(asked.headroom, "--headroom")
    )
    if asked.gpu or asked.vram:
        if asked.rpc:
            raise UsageError(
                "--rpc is a device that is here; --gpu and --vram describe one that is not", "give one or the other"
            )
        sizes = [survey.parse_size(size, "--vram") for size in asked.vram]
        return survey.imagined(asked.gpu, sizes, headroom_bytes=headroom, folder=cache_folder(), threads=threads)
    return survey.here(asked.rpc, headroom_bytes=headroom, folder=cache_folder(), threads=threads)


def make(
    chosen: Chosen,
    options: DecoderOptions,
    asked: Asked,
    *,
    where: Site | None = None,
    on_event: OnEvent | None = None,
    verbose: bool = False,
) -> Made:
    """Read the headers and make the plan; what a card was seen to take beyond the formula is kept for later ones.

    Args:
        chosen: the pair, which has its headers afterwards.
        options: context, types and threads; their placements are not looked at.
        asked: what is fixed.
        where: the machine; that of ``asked`` by default.
        on_event: told of headers that are read: :func:`ggufspec.models.source.read_headers`.
        verbose: show llama.cpp's log of the dry runs.

    Raises:
        GgufspecError: a header cannot be read, the draft cannot serve the target, nothing fits, an option is absurd.
    """
    from ggufspec.cache import cache_folder
    from ggufspec.decoding.placing import question
    from ggufspec.hardware.host import physical_cores
    from ggufspec.models.source import read_headers
    from ggufspec.models.vocabulary import check_pair
    from ggufspec.planning.confirm import Confirmer, UnconfirmedError
    from ggufspec.planning.history import expected_acceptance, record_shortfall
    from ggufspec.planning.search import make_plan

    where = where or site(asked, options.threads or physical_cores())
    sources: Sequence[Any] = [chosen.target] + ([chosen.draft] if chosen.draft else [])
    chosen.headers = read_headers(sources, None, on_event)
    target, draft = chosen.headers[0], chosen.headers[1] if chosen.draft else None
    warnings = check_pair(target, draft) if draft else ()
    acceptance, acceptance_from = asked.acceptance, "given with --acceptance"
    if acceptance is None:
        acceptance, acceptance_from = expected_acceptance(
            cache_folder(),
            target.header.fingerprint,
            draft.header.fingerprint if draft else "",
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
        where.machine.described, paper=where.paper, rpc=where.rpc, folder=cache_folder(), verbose=verbose
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
    try:
        made = make_plan(asks, machine, confirm)
    except UnconfirmedError as error:
        made = make_plan(asks, machine)
        warnings = (*warnings, f"{error.message}: the formula answered; `ggufspec doctor` says how to build one")
    made = replace(made, notes=(*made.notes, *warnings))
    for card in where.machine.cards:
        short = made.alone.used(card.name).total - made.alone.formula[card.name].total
        before = asks.alone.shortfall.get(card.name, 0)
        record_shortfall(cache_folder(), target.header.architecture, card.description, short + before)
    return Made(made, acceptance_from)


def _paced(asks: Question, machine: Machine, threads: int) -> tuple[Question, Machine]:
    """The models as fast as a rehearsal on this machine found them; the speeds' origin says so."""
    from ggufspec.cache import cache_folder
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
    from ggufspec.cache import cache_folder
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
    on_event: OnEvent | None = None,
    verbose: bool = False,
) -> Placed:
    """Where the layers of a pair go, and with ``rival`` those of the best target-only run.

    Layers that are asked for by number are taken as they are; what is left to ``auto`` is planned. A draft that does
    not draft, since only the lookup does or nobody, is not placed.

    Raises:
        GgufspecError: nothing fits, or a header cannot be read.
    """
    from ggufspec.decoding.placing import placed
    from ggufspec.hardware.host import physical_cores
    from ggufspec.planning.describe import document

    if not options.needs_draft:
        chosen = replace(chosen, draft=None)
    layers, draft_layers = asked.layers, asked.draft_layers
    fixed = replace(
        options,
        gpu_layers=layers.gpu_layers or 0,
        split=layers.split,
        n_cpu_moe=layers.n_cpu_moe or 0,
        gpu_layers_draft=draft_layers.gpu_layers or 0,
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
    made = make(chosen, options, asked, where=where, on_event=on_event, verbose=verbose)
    shown = document(made.plan, chosen.describe(), made.acceptance_from)
    alone = placed(options, made.plan.alone, draft_max=options.draft_max)
    cards = where.machine.card_names
    if as_asked:
        return Placed(fixed, alone, cards, shown)
    if chosen.draft is not None and made.plan.pair is None:
        raise UsageError(made.plan.why(), "--no-draft is target-only; plan shows what fits")
    option = made.plan.pair or made.plan.alone
    return Placed(placed(options, option, draft_max=asked.draft_max), alone, cards, shown)
