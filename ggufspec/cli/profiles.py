"""Command ``ggufspec profiles``: list, show, make, remove and check named pairs."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import tomlkit
import typer

from ggufspec.api.options import decoder_options, machine_to_plan_for, with_context
from ggufspec.cli import inputs, ui
from ggufspec.cli.parameters import (
    command,
    command_option,
    commands_of,
    epilog,
    own_profile_names,
    profile_names,
    takes,
)
from ggufspec.cli.results import check_overwrites
from ggufspec.errors import GgufspecError, ModelError, UsageError
from ggufspec.files import untrusted
from ggufspec.files.write import write_whole
from ggufspec.hardware.host import physical_cores
from ggufspec.llamacpp.options import ContextOptions
from ggufspec.models import expanded, heads, locate
from ggufspec.models import profile as stored
from ggufspec.models.compat import Compatibility
from ggufspec.models.headers import KnownHeader, cached_header, read_headers
from ggufspec.models.hub import client
from ggufspec.models.hub.client import HubFile
from ggufspec.models.profile import ModelSource, Profile, load_profile
from ggufspec.models.vocabulary import check_pair, judge_known
from ggufspec.planning import outline
from ggufspec.planning.plan import PlanMachine
from ggufspec.reports import profiles as report
from ggufspec.reports import table
from ggufspec.schema import profiles as schema
from ggufspec.settings.registry import parse_drafters
from ggufspec.settings.table import OPTIONS, Settings, names

_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,99}")
_HELP = "A profile's name."

Name = Annotated[str, typer.Argument(metavar="NAME", help=_HELP, autocompletion=profile_names)]


@commands_of(__name__).callback(
    invoke_without_command=True, epilog=epilog("ggufspec profiles list", "ggufspec profiles show llama3-70b")
)
def profiles(context: typer.Context) -> int:
    """List, show, make, remove and check named pairs."""
    return list_profiles(given=Settings()) if context.invoked_subcommand is None else 0


@command(
    "ggufspec profiles list",
    "ggufspec profiles list --gpu 'RTX 4060 Ti 16GB'",
    "ggufspec profiles list --json",
    name="list",
)
def list_profiles(*, given: Annotated[Settings, takes("simulated")]) -> int:
    """List the profiles, and what fits here or on another GPU.

    Yours are marked with a star. The hub is not contacted: sizes come from headers that plan or check has read, or from
    the profile, which is unchecked. If a pair does not fit whole, the list shows how many target layers fit on the GPUs
    next to the draft.
    """
    machine = _machine(given)
    rows = [_row(stored.find_profile(name), machine) for name in stored.known_profiles()]
    shown = tuple(sorted(rows, key=lambda row: (row.group, row.name)))
    document = schema.ProfilesDocument(shown, str(stored.user_folder()), _budgets(machine) if machine else {})
    out, there = ui.out(), " + ".join((*(given.gpu or ()), *(given.vram or ())))
    ui.result(document, lambda: out.print(table.terminal(report.profile_rows(document, out.width, there))))
    if ui.flags().json:
        return 0
    for row in shown:
        if row.error:
            ui.note(row.error)
    if any(row.fits == "unknown" for row in shown):
        ui.note("? is unknown until its headers are read: ggufspec plan NAME, or ggufspec profiles check NAME")
    if any(model and model.repo and not model.read for row in shown for model in (row.target, row.draft)):
        ui.note("files on the hub are unchecked, and ≈ sizes rounded, until ggufspec profiles check NAME has read them")
    return 0


@command("ggufspec profiles show llama3-70b")
def show(name: Name) -> int:
    """Show one profile, and what is known about it here."""
    path = stored.find_profile(name)
    profile = load_profile(path)
    verdict = _judged(profile, *_known(profile))
    found = (verdict.answer, verdict.reasons) if verdict else (None, ())
    document = schema.ProfileDocument(_row(path, _machine()), _comment(path), *found)
    ui.result(document, lambda: ui.out().print(table.pairs(report.facts(document))))
    return 0


@command(
    "ggufspec profiles new my-pair",
    "ggufspec profiles new my-pair -hf USER/TARGET:Q4_K_M -hfd USER/DRAFT:Q8_0",
    confirms=True,
)
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help=_HELP)],
    *,
    why: Annotated[str | None, command_option("--why TEXT", "What the pair is for.")] = None,
    force: Annotated[bool, command_option("--force", "As -y.", hidden=True)] = False,
    given: Annotated[
        Settings,
        takes(*("files", "hub", "ctx_size", "draft_max"), ctx_size={"default": None}, draft_max={"shown": ""}),
    ],
) -> int:
    """Write a profile of your own. Its models must exist, and its draft must be compatible with the target.

    Asks on a terminal if no target is given. A profile of yours overrides a bundled one of the same name.
    """
    if not _NAME.fullmatch(name) or name.endswith(".toml"):
        raise UsageError(f"{name!r} is not a profile name", "start with a letter or digit, then also . _ + -: my-pair")
    path = stored.user_folder() / f"{name}.toml"
    if path.exists() and not force:
        check_overwrites(path, "-y overwrites it; or choose another name")
    if not given.given(("model", "hf_repo")):
        given = _asked(given)
        why = why or _ask("What is it for? (Enter to skip)")
    spec = inputs.pair_spec(given)
    places = [_place(source) for source in (spec.target, spec.draft) if source]
    with inputs.planning() as tell:
        known = read_headers(places, None, tell)
        warnings = check_pair(known[0], known[1]) if spec.draft else ()
    profile: dict[str, Any] = {
        "name": name,
        "why": (why or "").strip() or "A pair of my own.",
        "source": " with ".join(map(_page, places)),
    }
    for role, place, header in zip(("target", "draft"), places, known, strict=False):
        profile[role] = _table(place, header)
    if settings := given.given(("ctx_size", "draft_max")):
        profile["settings"] = settings
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = f"XDG_CONFIG_HOME=FOLDER ggufspec profiles new {name} …"
        raise GgufspecError(f"{path.parent} cannot be created: {error.strerror}", hint) from None
    write_whole(path, f"# Made with: ggufspec profiles new\n{tomlkit.dumps(profile)}")
    load_profile(path)  # fails now if the profile cannot be read
    for warning in warnings:
        ui.note(f"note: {warning}")
    if (stored.bundled_folder() / path.name).is_file():
        ui.note(f"note: it overrides the bundled profile {name}")
    if ui.flags().json:
        return show(name)
    ui.data(str(path))
    return 0


@command("ggufspec profiles rm my-pair", name="rm", confirms=True)
def remove(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of your profile.", autocompletion=own_profile_names),
    ],
) -> int:
    """Remove a profile of your own; its models stay where they are. Asks first on a terminal."""
    path = stored.own_profile(name)
    if not ui.flags().yes and ui.can_ask() and not ui.confirmed(f"Remove {path}?", default=False):
        raise GgufspecError("nothing was removed", f"ggufspec profiles rm {name} -y")
    try:
        path.unlink()
    except OSError as error:
        raise GgufspecError(f"{path} cannot be removed: {error.strerror}", f"ls -ld {path.parent}") from None
    document = schema.RemovedDocument(name, str(path), (stored.bundled_folder() / path.name).is_file())
    if document.bundled:
        ui.note(f"note: {name} is the bundled profile again")
    ui.result(document, lambda: ui.data(str(path)))
    return 0


@command("ggufspec profiles check", "ggufspec profiles check llama3-70b qwen3-14b")
def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Profiles by name.  [all]", autocompletion=profile_names),
    ] = None,
) -> int:
    """Check that the files of profiles are on the hub. Also check that drafts are compatible with their targets.

    Reads headers, a few MB per model. The exit code is 1 if a profile fails.
    """
    wanted = list(dict.fromkeys(names or stored.known_profiles()))
    found = []
    with ui.progress() as bar:
        for done, name in enumerate(wanted):
            bar(done, len(wanted), name)
            found.append(_check(name))
    document = schema.CheckDocument(tuple(found), all(row.ok for row in found))
    out = ui.out()

    def show() -> None:
        out.print(table.terminal(report.checks(document)))
        for hint in dict.fromkeys(hint for row in found for hint in row.hints if hint):
            out.whole(("next: ", "bold"), hint)

    ui.result(document, show)
    return 0 if document.ok else 1


# ---- facts known offline --------------------------------------------------------------------------------------------


def _machine(given: Settings = Settings()) -> PlanMachine | None:
    """Return this machine, or one with the given GPUs; None if llama.cpp cannot report its devices."""
    try:
        return machine_to_plan_for(given, physical_cores())
    except UsageError:  # there is no such GPU
        raise
    except GgufspecError as error:
        ui.note(f"what fits here is unknown: {error.message}")
        return None


def _budgets(machine: PlanMachine) -> dict[str, int]:
    if not machine.cards:
        return {"CPU": machine.memory_bytes}
    return {card.name: machine.budget_bytes(card) for card in machine.cards}


def _row(path: Path, machine: PlanMachine | None) -> schema.ProfileRow:
    try:
        profile = load_profile(path)
    except GgufspecError as error:
        return schema.ProfileRow(path.stem, str(path), False, "", "", None, None, {}, "unknown", error=error.message)
    target, draft = _known(profile)
    fits = _fits(profile, target, draft, machine)
    return schema.ProfileRow(
        name=path.stem,
        path=str(path),
        mine=path.parent == stored.user_folder(),
        why=profile.why,
        source=profile.source,
        target=_model(profile.target, target),
        draft=_model(profile.draft, draft) if profile.draft else None,
        settings={name: getattr(profile.settings, name) for name in names(profile=True)},
        fits=fits.answer if fits else "unknown",
        fits_layers=fits.layers if fits else None,
        group=profile.group,
    )


def _model(source: ModelSource, known: KnownHeader | None) -> schema.ProfileModel:
    size, layers = (known.header.size_bytes, known.header.layers) if known else (source.size_bytes, source.layers)
    file = expanded.expanded_name(Path(source.file).stem, source.expand) if source.expand else source.file
    given = (source.repo, file, source.revision, source.gpu_layers)
    return schema.ProfileModel(*given, size, layers, known is not None, source.approximate)


def _known(profile: Profile) -> tuple[KnownHeader | None, KnownHeader | None]:
    """Return the headers available offline: cached ones, and those of local files."""
    with suppress(GgufspecError):
        if stored.is_made(profile):
            target, draft = stored.header_sources(profile)
            return _kept_header(target), _kept_header(draft)
    return None, None


def _kept_header(source: Path | HubFile | None) -> KnownHeader | None:
    if not isinstance(source, Path):
        return cached_header(source) if source else None
    with suppress(GgufspecError):
        return read_headers([source])[0]
    return None


def _judged(profile: Profile, target: KnownHeader | None, draft: KnownHeader | None) -> Compatibility | None:
    """Return whether the draft, or the target's own MTP blocks, can draft for the target; None if unknown."""
    own = profile.draft is None and "mtp" in parse_drafters(profile.settings.drafter or "none")
    draft = target if own else draft
    return judge_known(target, draft, "mtp" if own else "") if target and draft else None


def _fits(
    profile: Profile, target: KnownHeader | None, draft: KnownHeader | None, machine: PlanMachine | None
) -> outline.PairFit | None:
    """Return how much of the pair fits on this machine; None if unknown."""
    if machine is None:
        return None
    try:
        decoder = decoder_options(profile.settings)
        if not decoder.ctx_size and target is None:
            return None
        decoder = with_context(decoder, target.header) if target else decoder
    except GgufspecError:
        return None

    def part(known: KnownHeader | None, model: ModelSource, context: ContextOptions) -> outline.ModelMemory | None:
        if known:
            return outline.of_header(known.header, context, machine.card_names)
        if model.size_bytes is None or model.layers is None or model.cache_bytes is None:
            return None
        return outline.of_sizes(model.size_bytes, model.layers, model.cache_bytes, context)

    placed = part(target, profile.target, decoder.context(with_draft=profile.draft is not None))
    if target and draft and heads.head_kind(draft.header):  # a head has a few blocks of the target's shape
        draft = replace(draft, header=heads.as_read(target.header, draft.header))
    draft_part = part(draft, profile.draft, decoder.draft_context()) if profile.draft else None
    if placed is None or (draft_part is None) != (profile.draft is None):
        return None
    overhead = sum(card.overhead_bytes for card in machine.cards)
    room = sum(_budgets(machine).values()) - overhead if machine.cards else None
    pools = [card.pool_bytes for card in machine.cards if card.pool_bytes is not None]
    memory = min([machine.memory_bytes, *(max(0, pool - (room or 0)) for pool in pools)])
    return outline.quick_fit(placed, draft_part, room, memory)


def _comment(path: Path) -> str:
    lines = takewhile(lambda line: line.startswith("#"), stored.toml_of(path).splitlines())
    return " ".join(line.lstrip("#").strip() for line in lines)


# ---- checking -------------------------------------------------------------------------------------------------------


def _check(name: str) -> schema.ProfileCheck:
    """Check a profile and its models; list all errors in the result instead of raising them."""
    failures: list[GgufspecError] = []
    known: list[KnownHeader] = []
    warnings: tuple[str, ...] = ()
    sizes: list[int | None] = [None, None]
    try:
        profile = load_profile(name)
        for index, model in enumerate((profile.target, profile.draft)):
            if model is None:
                continue
            try:
                place = stored.on_hub(model) or stored.model_source(model, profile)
                sizes[index] = None if isinstance(place, Path) else _size_on_hub(place)
                known.append(_header(place, sizes[index]))
                sizes[index] = known[-1].header.size_bytes
            except GgufspecError as error:
                failures.append(error)
        if not failures and (verdict := _judged(profile, known[0], known[1] if len(known) > 1 else None)):
            if verdict.answer == "no":
                failures += [ModelError(reason, verdict.runner) for reason in verdict.reasons]
            else:
                warnings = verdict.reasons
    except GgufspecError as error:
        failures.append(error)
    problems, hints = tuple(error.message for error in failures), tuple(error.hint for error in failures)
    return schema.ProfileCheck(name, not failures, problems, hints, warnings, sizes[0], sizes[1])


def _size_on_hub(place: HubFile) -> int:
    """Return the total size of a model's parts on the hub, even if the model was downloaded."""
    parts = locate.part_names(place.file)
    return sum(client.remote_file(place.repo, part, place.revision).size_bytes for part in parts)


def _header(place: Path | HubFile, size_bytes: int | None) -> KnownHeader:
    (known,) = read_headers([place])
    if size_bytes is not None and known.header.size_bytes != size_bytes:
        message = f"{place} has {size_bytes:,} bytes on the hub and {known.header.size_bytes:,} here"
        raise ModelError(message, "the file was changed at its source: ggufspec pull")
    return known


# ---- writing --------------------------------------------------------------------------------------------------------


def _asked(given: Settings) -> Settings:
    """Ask on the terminal for the target and the draft, if they are not given."""
    ways = f"{OPTIONS['hf_repo'].flag} USER/REPO:QUANT, or {OPTIONS['model'].flag} FILE"
    no_target = UsageError("no target is given", ways)
    if not ui.can_ask():
        raise no_target
    place = "a file, or USER/REPO:QUANT on the hub"
    for question, file, repo in (
        (f"The target: {place}", "model", "hf_repo"),
        (f"The draft: {place} (Enter for none)", "model_draft", "hf_repo_draft"),
    ):
        if not given.given((file, repo)) and (typed := _ask(question)):
            is_file = "://" in typed or (typed.endswith(".gguf") and ":" not in typed)
            given = replace(given, **dict[str, Any]({file if is_file else repo: typed}))
        if not given.given(("model", "hf_repo")):
            raise no_target
    return given


def _ask(question: str) -> str:
    return str(typer.prompt(question, default="", show_default=False, prompt_suffix=" ", err=True)).strip()


def _place(source: str | Path | HubFile) -> Path | HubFile:
    """Return a hub file, or the absolute path of a local file."""
    place = locate.plain(source)
    if not isinstance(place, str):
        return place
    if locate.is_url(place):
        raise UsageError(f"a profile names files on this machine or on the hub, not {place}", "download it first")
    return untrusted.at_home(place).absolute()


def _page(place: Path | HubFile) -> str:
    return str(place) if isinstance(place, Path) else client.model_page_url(place.repo)


def _table(place: Path | HubFile, known: KnownHeader) -> dict[str, Any]:
    """Return a model's TOML table; for a hub file it includes the sizes that ``profiles list`` shows."""
    if isinstance(place, Path):
        return {"file": str(place)}
    header = known.header
    numbers = sum(
        header.keys(block) + (0 if header.latent else header.values(block))
        for block in range(header.blocks)
        if header.cached[block] and not header.windowed[block]
    )
    revision = {"revision": place.revision} if place.revision else {}
    sizes = {"size_bytes": header.size_bytes, "layers": header.layers, "cache_bytes": 2 * numbers}
    return {"repo": place.repo, "file": place.file} | revision | sizes
