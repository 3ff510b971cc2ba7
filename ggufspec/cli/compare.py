"""``ggufspec compare``: many targets with many drafts, each at its own best placement, and how good they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ggufspec.cli import console, given, options, planned, pull
from ggufspec.errors import GgufspecError, ModelError, StopError, UsageError
from ggufspec.reports.compare import Sort

if TYPE_CHECKING:
    from ggufspec.bench.compare import Comparison, Contender, Experiment, Subject
    from ggufspec.bench.ledger import ByDevice, Ledger, Place
    from ggufspec.bench.trial import Spec
    from ggufspec.decoding.options import DecoderOptions
    from ggufspec.pairs.profile import Settings
    from ggufspec.pairs.source import Known
    from ggufspec.reports.document import CompareDocument, Failure

Export = Path | None
LOOKUP, NONE = "lookup", "none"
_EXAMPLE = "ggufspec compare -m A-Q4_K_M.gguf,A-Q8_0.gguf -md DRAFT.gguf"


@dataclass(frozen=True, slots=True)
class Room:
    """What cards may be used, and how much of them is left free."""

    headroom: options.Headroom = None
    rpc: options.Rpc = None


def compare(
    *,
    pairs: Annotated[
        list[str] | None,
        typer.Argument(metavar="PAIR…", help="Profiles, each by its name or path.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", metavar="FILE,FILE", help="Targets.", envvar="GGUFSPEC_MODEL", show_envvar=False),
    ] = None,
    model_draft: Annotated[
        str | None,
        typer.Option(
            *("-md", "--model-draft"),
            metavar="FILE,FILE",
            help="Drafts for each target; lookup needs no file, none is the target alone, which is always measured.",
            envvar="GGUFSPEC_MODEL_DRAFT",
            show_envvar=False,
        ),
    ] = None,
    hf_repo: Annotated[
        str | None, typer.Option("-hf", "--hf-repo", metavar="USER/REPO:QUANT,QUANT", help="Targets in the hub.")
    ] = None,
    hf_repo_draft: Annotated[
        str | None, typer.Option("-hfd", "--hf-repo-draft", metavar="USER/REPO:QUANT,QUANT", help="Drafts in the hub.")
    ] = None,
    prompt: options.PromptText = None,
    file: options.PromptFile = None,
    predict: options.MaxTokens = 128,
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", metavar="N", min=1, help="Trials of each cell; leaders get more.")
    ] = 3,
    no_quality: Annotated[bool, typer.Option("--no-quality", help="Do not judge the targets' quality.")] = False,
    sort: Annotated[
        Sort, typer.Option("--sort", metavar="COLUMN", help=f"Order of the rows: {', '.join(Sort)}.")
    ] = Sort.MATRIX,
    room: Room,
    drafting: given.Drafting,
    decoding: given.Decoding,
    choosing: given.Choosing,
    results: Annotated[
        Path | None, typer.Option("--results", metavar="FOLDER", help="Where results are kept.  [your data folder]")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure everything again.")] = False,
    yes: options.Yes = False,
    json: options.Json = False,
    export_json: Annotated[Export, typer.Option(metavar="FILE", help="Write the JSON document to this file.")] = None,
    export_markdown: Annotated[Export, typer.Option(metavar="FILE", help="Write the tables as Markdown.")] = None,
    export_csv: Annotated[Export, typer.Option(metavar="FILE", help="Write one line per trial as CSV.")] = None,
    html: Annotated[Export, typer.Option(metavar="FILE", help="Write a page with plots.")] = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Compare many pairings: speed, speedup, acceptance, memory, energy, and each quantisation's quality.

    Every cell runs at its own best placement, by turns with the others. What fails is a row with its reason. The same
    command goes on where it was stopped. Quality is judged against the largest target.
    """
    from ggufspec.bench.compare import Comparison
    from ggufspec.bench.ledger import Ledger
    from ggufspec.bench.versus import machine
    from ggufspec.hardware.host import results_folder
    from ggufspec.reports.files import check_writable

    own_prompt = options.read_prompt(prompt, file)
    exports = (export_json, export_markdown, export_csv, html)
    for path in exports:
        if path is not None:
            check_writable(path)
    matrix = _matrix(pairs, model, model_draft, hf_repo, hf_repo_draft, yes=yes, quiet=quiet)
    if drafting.drafter in (LOOKUP, NONE):
        raise UsageError(
            f"--drafter {drafting.drafter} uses no draft file", f"-md {drafting.drafter} makes it a cell of its own"
        )
    wanted = _Wanted(room, drafting, decoding, choosing, own_prompt, predict, repetitions, quiet, verbose)
    stem = (results or results_folder()) / f"compare-{_key(matrix, wanted)}"
    if fresh:
        _put_aside(stem.with_suffix(".jsonl"))
    ledger = Ledger(stem.with_suffix(".jsonl"), machine())
    kept = stem.with_suffix(".json")
    check_writable(kept)
    interrupted = False
    try:
        experiment, places = _experiment(matrix, wanted, ledger, None if no_quality else stem.with_suffix(".rows"))
        comparison = Comparison(experiment, ledger)
        try:
            with console.progress(quiet or verbose) as progress:
                comparison.run(progress)
        except KeyboardInterrupt:
            if not any(comparison.trials.values()):
                raise StopError("interrupted before anything was measured") from None
            interrupted = True
        _learn(comparison, places)
    finally:
        ledger.close()
    document = comparison.document(interrupted=interrupted)
    said = f"kept in {kept}"
    if comparison.kept_from_before:
        said += f"; {comparison.kept_from_before} trials are from before, --fresh measures them again"
    return _report(document, sort, json, quiet, (*exports, kept), said)


# ---- what is compared


@dataclass(frozen=True, slots=True)
class _File:
    """A model that is here. ``label`` is the path that people know it by: in the hub's cache it is the repository's."""

    path: Path
    label: PurePath
    name: str = ""


@dataclass(frozen=True, slots=True)
class _Pairing:
    """A target and a draft of the matrix; ``draft`` is None for the target alone, or :data:`LOOKUP`."""

    target: _File
    draft: _File | str | None
    settings: Settings
    target_gpu_layers: int | None = None
    draft_gpu_layers: int | None = None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the command line says of how to run."""

    room: Room
    drafting: given.Drafting
    decoding: given.Decoding
    choosing: given.Choosing
    prompt: str | None
    predict: int
    repetitions: int
    quiet: bool
    verbose: bool

    def spec(self, pairing: _Pairing, decoder: DecoderOptions) -> Spec:
        """A trial of a pairing."""
        from ggufspec.bench.prompts import PROMPTS
        from ggufspec.bench.trial import Spec

        return Spec(
            target=pairing.target.path,
            draft=pairing.draft.path if isinstance(pairing.draft, _File) else None,
            options=decoder,
            sampling=self.choosing.sampling(),
            prompts=(self.prompt,) if self.prompt is not None else tuple(p.text for p in PROMPTS),
            max_tokens=self.predict,
            rpc=tuple(self.room.rpc or ()),
        )

    def decoder(self, pairing: _Pairing) -> DecoderOptions:
        """How a pairing is decoded, before it is placed."""
        decoder = planned.decoder(pairing.settings, self.decoding, self.drafting)
        if pairing.draft is None:
            return replace(decoder, drafter=NONE, lookup_corpus=None)
        if pairing.draft == LOOKUP:
            return replace(decoder, drafter=LOOKUP)
        return decoder if decoder.needs_draft else replace(decoder, drafter="both")


def _matrix(
    names: Sequence[str] | None,
    model: str | None,
    draft: str | None,
    repo: str | None,
    draft_repo: str | None,
    *,
    yes: bool,
    quiet: bool,
) -> list[_Pairing]:
    """Every pairing, each target's own first; what is on the hub and not here is fetched.

    Raises:
        GgufspecError: nothing is given, a file is not there or given twice.
    """
    from ggufspec.pairs.profile import Settings

    targets = [*_files(model, "-m"), *_of_hub(repo, yes=yes, quiet=quiet)]
    drafts: list[_File | str] = [*_files(draft, "-md"), *_of_hub(draft_repo, yes=yes, quiet=quiet)]
    words = {word for text in (draft, draft_repo) for word in _split(text) if word in (LOOKUP, NONE)}
    if LOOKUP in words:
        drafts.append(LOOKUP)
    if targets and names:
        raise UsageError("both profiles and targets are given", "give profiles, or -m and -hf")
    given_drafts = bool(drafts or words)
    pairings = list(_of_profiles(names or (), own_drafts=not given_drafts, yes=yes, quiet=quiet))
    _refuse_twice([one for one in drafts if isinstance(one, _File)], "draft")
    if names:
        if given_drafts:
            pairings = [replace(one, draft=draft) for one in pairings for draft in drafts]
    else:
        _refuse_twice(targets, "target")
        pairings = [_Pairing(target, draft, Settings()) for target in targets for draft in drafts]
    if not (targets or names):
        what = "only drafts are given" if given_drafts else "nothing is given to compare"
        raise UsageError(f"{what}: the matrix is empty", _EXAMPLE)
    return _named(_with_alone(targets, pairings))


def _with_alone(targets: Sequence[_File], pairings: Sequence[_Pairing]) -> list[_Pairing]:
    """Each target alone, then its pairings; a profile's own settings hold for its target alone too."""
    from ggufspec.pairs.profile import Settings

    found: dict[Path, list[_Pairing]] = {
        target.path.resolve(): [_Pairing(target, None, Settings())] for target in targets
    }
    for one in pairings:
        alone = _Pairing(one.target, None, one.settings)
        row = found.setdefault(one.target.path.resolve(), [alone])
        if one.draft is None:
            continue
        if any(_same(one.draft, other.draft) for other in row):
            raise UsageError(
                f"two profiles pair {one.target.label.name} with the same draft", "compare one of them at a time"
            )
        row.append(one)
    return [one for row in found.values() for one in row]


def _same(one: _File | str | None, other: _File | str | None) -> bool:
    if isinstance(one, _File) and isinstance(other, _File):
        return one.path.resolve() == other.path.resolve()
    return one == other


def _split(text: str | None) -> list[str]:
    """The parts of a list with commas; a file whose own name has one is taken whole."""
    if text and Path(text).is_file():
        return [text]
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _files(text: str | None, flag: str) -> list[_File]:
    words = (LOOKUP, NONE) if flag == "-md" else ()
    parts = _split(text)
    if text is not None and not parts:
        raise UsageError(f"{flag} names no file: the matrix is empty", _EXAMPLE)
    paths = [Path(part).expanduser() for part in parts if part not in words]
    for path in paths:
        if not path.is_file():
            reason = "is a folder" if path.is_dir() else "does not exist"
            raise ModelError(f"{path} {reason}", f"ls {path if path.is_dir() else path.parent}")
    return [_File(path, path.absolute()) for path in paths]


def _of_hub(text: str | None, *, yes: bool, quiet: bool) -> list[_File]:
    """``USER/REPO:Q3_K_S,Q4_K_M``: a part without a slash is one more quantisation of the repository before it."""
    from ggufspec.pairs.hub import hub_file

    asked, repo = [], ""
    for part in _split(text):
        if part in (LOOKUP, NONE):
            continue
        if "/" in part:
            repo = part.partition(":")[0]
            asked.append(part)
        elif repo:
            asked.append(f"{repo}:{part}")
        else:
            raise UsageError(f"{part!r} names no repository", "-hf USER/REPO:Q3_K_S,Q4_K_M")
    if text is not None and not _split(text):
        raise UsageError("-hf names no repository: the matrix is empty", "-hf USER/REPO:Q3_K_S,Q4_K_M")
    sources = [hub_file(name) for name in asked]
    paths = pull.have(sources, "the comparison", pull.command(None, text, None), yes=yes, quiet=quiet)
    return [_File(path, PurePath("/", source.repo, source.file)) for path, source in zip(paths, sources, strict=True)]


def _of_profiles(names: Sequence[str], *, own_drafts: bool, yes: bool, quiet: bool) -> Iterator[_Pairing]:
    from ggufspec.pairs.profile import find, load_profile, on_hub, resolve

    for name in names:
        path = find(name)
        profile = load_profile(path)
        if not own_drafts:
            profile = profile.model_copy(update={"draft": None})
        sources = [source for one in (profile.target, profile.draft) if one and (source := on_hub(one))]
        pull.have(sources, f"profile {profile.name!r}", pull.command(name, None, None), yes=yes, quiet=quiet)
        pair = resolve(profile, path.parent)
        files = [
            _File(file, PurePath("/", one.repo, one.file) if one.repo else file.absolute())
            for file, one in ((pair.target, profile.target), (pair.draft, profile.draft))
            if file is not None and one is not None
        ]
        draft = files[1] if len(files) > 1 else None
        yield _Pairing(files[0], draft, pair.settings, pair.target_gpu_layers, pair.draft_gpu_layers)


def _refuse_twice(files: Sequence[_File], role: str) -> None:
    seen: dict[Path, _File] = {}
    for one in files:
        if (before := seen.setdefault(one.path.resolve(), one)) is not one:
            other = "" if before.path == one.path else f", as {before.path} too"
            raise UsageError(f"the {role} {one.path} is given twice{other}", "name each file once")


def _named(pairings: Sequence[_Pairing]) -> list[_Pairing]:
    """The same with names that are unique among targets and among drafts."""
    targets = _names([one.target for one in pairings])
    drafts = _names([one.draft for one in pairings if isinstance(one.draft, _File)])

    def named(one: _Pairing) -> _Pairing:
        draft = one.draft
        if isinstance(draft, _File):
            draft = replace(draft, name=drafts[draft.path.resolve()])
        return replace(one, target=replace(one.target, name=targets[one.target.path.resolve()]), draft=draft)

    return [named(one) for one in pairings]


def _names(files: Sequence[_File]) -> dict[Path, str]:
    """Names by file: its own, and where another has the same, the nearest folder that tells them apart."""
    labels = {one.path.resolve(): one.label for one in files}
    found = {}
    for path, label in labels.items():
        stem = label.name.removesuffix(".gguf")
        others = [other.parts[:-1] for at, other in labels.items() if other.name == label.name and at != path]
        folders = label.parts[:-1]
        depth = next(
            (d for d in range(1, len(folders) + 1) if all(folders[-d:] != other[-d:] for other in others)), len(folders)
        )
        found[path] = f"{stem} ({folders[-depth]})" if others else stem
    return found if len(set(found.values())) == len(found) else {path: str(label) for path, label in labels.items()}


def _key(matrix: Sequence[_Pairing], wanted: _Wanted) -> str:
    """A name for the comparison: the same files in the same way are the same one, however often each is tried."""
    from ggufspec.bench.journal import key_of
    from ggufspec.bench.versus import machine

    cells = [
        (
            str(one.target.path.resolve()),
            str(one.draft.path.resolve()) if isinstance(one.draft, _File) else one.draft,
            one.settings.model_dump(mode="json"),
        )
        for one in matrix
    ]
    ways = [asdict(wanted.room), asdict(wanted.drafting), asdict(wanted.decoding), asdict(wanted.choosing)]
    return key_of(cells, ways, wanted.prompt, wanted.predict, machine())[:12]


def _put_aside(path: Path) -> None:
    """Begin a journal anew; what was in it stays beside it."""
    try:
        if path.exists():
            path.replace(path.with_name(path.name + ".before"))
    except OSError as error:
        raise GgufspecError(
            f"{path} cannot be put aside: {error.strerror}", "name another folder with --results FOLDER"
        ) from None


# ---- where it runs


def _experiment(
    matrix: Sequence[_Pairing], wanted: _Wanted, ledger: Ledger, rows: Path | None
) -> tuple[Experiment, dict[str, tuple[planned.Chosen, planned.Placed]]]:
    """Headers, placements, cells; a cell that cannot run has its reason. With it what was planned now, by cell."""
    from ggufspec.bench.compare import Experiment, Subject
    from ggufspec.bench.versus import settings_of

    known: dict[Path, Known | Failure] = {}
    subjects: dict[str, dict[str, Subject]] = {"target": {}, "draft": {}}
    contenders: list[Contender] = []
    places: dict[str, tuple[planned.Chosen, planned.Placed]] = {}
    for one in matrix:
        for role, file in (("target", one.target), ("draft", one.draft)):
            if isinstance(file, _File) and file.path not in known:
                known[file.path] = _header(file, wanted)
            if isinstance(file, _File) and file.name not in subjects[role]:
                subjects[role][file.name] = Subject(file.name, file.path, _file_bytes(file), _identity(file))
            elif file == LOOKUP:
                subjects[role][LOOKUP] = Subject(LOOKUP, None, 0, LOOKUP)
        contender = _contender(one, wanted, known, ledger, places)
        contenders.append(contender)
        if one.draft is None and contender.spec is not None:
            alone = replace(subjects["target"][one.target.name], alone=contender.spec.options)
            subjects["target"][one.target.name] = alone
    sample = wanted.spec(matrix[0], planned.decoder(matrix[0].settings, wanted.decoding, wanted.drafting))
    placed = ("gpu_layers", "draft_gpu_layers", "split", "draft_split", "cpu_experts")
    settings = {key: value for key, value in settings_of(sample).items() if key not in placed}
    experiment = Experiment(
        targets=tuple(subjects["target"].values()),
        drafts=tuple(subjects["draft"].values()),
        contenders=tuple(contenders),
        repetitions=wanted.repetitions,
        settings=settings | {"repetitions": wanted.repetitions, "rpc": list(wanted.room.rpc or ())},
        rows=rows,
        rpc=tuple(wanted.room.rpc or ()),
        verbose=wanted.verbose,
    )
    return experiment, places


def _header(file: _File, wanted: _Wanted) -> Known | Failure:
    from ggufspec.pairs.source import read_headers
    from ggufspec.reports.document import Failure

    try:
        with console.busy(wanted.quiet or wanted.verbose) as say:
            say(f"reading the header of {file.name}")
            return read_headers([file.path])[0]
    except GgufspecError as error:
        return Failure(error.message, error.hint)


def _file_bytes(file: _File) -> int:
    from ggufspec.pairs.files import locate

    return sum(part.size_bytes for part in locate(file.path).files)


def _identity(file: _File) -> str:
    from ggufspec.pairs.files import locate

    return locate(file.path).key


def _contender(
    one: _Pairing,
    wanted: _Wanted,
    known: dict[Path, Known | Failure],
    ledger: Ledger,
    places: dict[str, tuple[planned.Chosen, planned.Placed]],
) -> Contender:
    """The cell of a pairing, placed as it was before, or now."""
    from pydantic import TypeAdapter

    from ggufspec.bench.compare import Contender
    from ggufspec.decoding.options import DecoderOptions
    from ggufspec.pairs.vocabulary import check_pair
    from ggufspec.reports.document import Failure

    draft = one.draft.name if isinstance(one.draft, _File) else one.draft
    files = [one.target, *([one.draft] if isinstance(one.draft, _File) else [])]
    identity = tuple(_identity(file) for file in files)
    decoder = wanted.decoder(one)

    def failed(failure: Failure) -> Contender:
        return Contender(one.target.name, draft, identity, None, failure=failure)

    headers = []
    for file in files:
        header = known[file.path]
        if isinstance(header, Failure):
            return failed(header)
        headers.append(header)
    layers = (one.target_gpu_layers, one.draft_gpu_layers)
    asked = (TypeAdapter(DecoderOptions).dump_python(decoder, mode="json"), layers, asdict(wanted.room))
    place = ledger.place_of(identity, asked)
    if place is None:
        try:
            if len(headers) == 2:
                check_pair(*headers)
            place, chosen, placed = _place(one, decoder, wanted)
        except GgufspecError as error:
            return failed(Failure(error.message, error.hint))
        ledger.keep_place(identity, asked, place)
        contender = Contender(one.target.name, draft, identity, wanted.spec(one, place.options), place.bytes)
        places[contender.name] = (chosen, placed)
        return contender
    return Contender(one.target.name, draft, identity, wanted.spec(one, place.options), place.bytes)


def _place(one: _Pairing, decoder: DecoderOptions, wanted: _Wanted) -> tuple[Place, planned.Chosen, planned.Placed]:
    """Plan a cell.

    Raises:
        GgufspecError: it does not fit.
    """
    import contextlib

    from ggufspec.bench.ledger import Place
    from ggufspec.planning.describe import document

    chosen = planned.Chosen(
        one.target.name,
        one.target.path,
        one.draft.path if isinstance(one.draft, _File) else None,
        one.settings,
        one.target_gpu_layers,
        one.draft_gpu_layers,
    )
    asked = planned.placement_asked(
        chosen,
        gpu_layers=None,
        gpu_layers_draft=None,
        tensor_split=None,
        n_cpu_moe=None,
        draft_max=wanted.drafting.draft_max,
        headroom=wanted.room.headroom,
        rpc=wanted.room.rpc,
    )
    quiet, verbose = wanted.quiet, wanted.verbose
    placed = planned.place(chosen, decoder, asked, quiet=quiet, verbose=verbose)
    plan = placed.plan
    if plan is None:  # nothing was left to plan; its bytes are for the report only
        with contextlib.suppress(GgufspecError):
            made = planned.make(chosen, decoder, asked, quiet=quiet, verbose=verbose)
            plan = document(made.plan, chosen.describe(), made.acceptance_from)
    return Place(placed.pair, _bytes(plan, with_draft=chosen.draft is not None)), chosen, placed


def _bytes(plan: Any, *, with_draft: bool) -> ByDevice:
    from ggufspec.bench.compare import parts

    option = plan and (plan.options["speculative"] if with_draft else plan.options["target_only"])
    return parts(option, {device.name: device.overhead_bytes for device in plan.devices}) if option else {}


def _learn(comparison: Comparison, places: dict[str, tuple[planned.Chosen, planned.Placed]]) -> None:
    """Later plans know what was seen of acceptance."""
    for contender, results in comparison.measured.items():
        if contender.name in places and contender.spec is not None and contender.spec.draft is not None:
            planned.learn(*places[contender.name], results)


# ---- what it says


def _report(
    document: CompareDocument, sort: Sort, json: bool, quiet: bool, files: tuple[Export, ...], said: str
) -> int:
    """Print first, then write the files: a full disk costs a file and not the result."""
    import json as json_text

    from ggufspec.reports import compare as report
    from ggufspec.reports.document import to_json
    from ggufspec.reports.files import write_whole

    def page(one: CompareDocument) -> str:
        from ggufspec.reports.page import render

        return render([json_text.loads(to_json(one))])

    if json:
        console.data(to_json(document))
    else:
        _show(document, sort)
    if not quiet:
        for note in document.notes:
            console.note(note)
        console.note(said)
    writers: tuple[Callable[[CompareDocument], str], ...] = (
        lambda d: to_json(d) + "\n",
        lambda d: report.markdown(d, sort),
        lambda d: report.comma_separated(d, sort),
        page,
        lambda d: to_json(d) + "\n",
    )
    failed: GgufspecError | None = None
    for path, render in zip(files, writers, strict=True):
        if path is not None:
            try:
                write_whole(path, render(document))
            except GgufspecError as error:
                failed = failed or error
                console.failure(error.message, error.hint)
    if document.interrupted:
        console.failure("interrupted; what is shown was measured before", "the same command goes on from here")
        return 130
    if not any(cell.run for cell in document.cells):
        console.failure("no cell could be measured", "the reasons are above")
        return 1
    return failed.exit_code if failed else 0


def _show(document: CompareDocument, sort: Sort) -> None:
    from rich.text import Text

    from ggufspec.reports import compare as report

    out = console.out()
    if any(model.quality or model.failure for model in document.targets):
        out.print(report.targets(document, out.width))
    out.print(report.terminal(document, sort, out.width))
    for reason in report.failures(document):
        out.print(Text.assemble(("failed ", "bold red"), reason))
    out.print(Text(report.verdict(document), style="bold"))
    told = ["* is the best of its column", "± is the 95 % interval"]
    if tokens := next((model.quality.tokens for model in document.targets if model.quality), 0):
        told.append(f"quality by a bundled text of {tokens:,} tokens")
    out.print(f"[dim]{'; '.join(told)}.[/]")
    for warning in document.warnings:
        out.print(Text(f"Warning: {warning}.", style="yellow"))
