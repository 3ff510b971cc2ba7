"""The cells of a comparison: targets paired with drafts, each with its own name, placement, or reason to fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from ggufspec import api, foreign, plain
from ggufspec.bench.compare import ByDevice, Contender, Experiment, Planned, Subject, parts
from ggufspec.bench.prompts import PROMPTS
from ggufspec.bench.run_log import RunLog, key_of
from ggufspec.bench.summary import machine, settings_of
from ggufspec.bench.trial import Spec
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.models.files import LocalFile, locate
from ggufspec.models.profile import PairSpec
from ggufspec.models.source import Known, read_headers
from ggufspec.models.vocabulary import check_pair
from ggufspec.schema.base import Failure
from ggufspec.schema.plan import PlanDocument
from ggufspec.settings import Settings, names

LOOKUP, NONE = "lookup", "none"  # instead of a draft's file
_ONE_OF_THEM = "compare one of them at a time"
_PLACEMENT = ("gpu_layers", "gpu_layers_draft", "n_cpu_moe")


@dataclass(frozen=True, slots=True)
class File:
    """A model on this machine. ``label`` is the path that people know it by: in the hub's cache the repository's."""

    path: Path
    label: PurePath
    name: str = ""


@dataclass(frozen=True, slots=True)
class Pairing:
    """A target and a draft of the matrix; ``draft`` is None for target-only, or :data:`LOOKUP`."""

    target: File
    draft: File | str | None
    settings: Settings


# ---- pairings and their names


def check_twice(files: Sequence[File], role: str) -> None:
    """Refuse a file that is given twice.

    Raises:
        UsageError: one is.
    """
    seen: dict[Path, File] = {}
    for one in files:
        if (before := seen.setdefault(foreign.real(one.path), one)) is not one:
            other = "" if before.path == one.path else f", as {before.path} too"
            raise UsageError(f"the {role} {one.path} is given twice{other}", "name each file once")


def with_draft(one: Pairing, draft: File | str | None) -> Pairing:
    """The same target with another draft, without the profile's placement, which is that of its own pair."""
    return Pairing(one.target, draft, replace(one.settings, **dict.fromkeys(_PLACEMENT)))


def with_target_only(pairings: Iterable[Pairing]) -> list[Pairing]:
    """Target-only of each target, then its pairings; a profile's settings hold for its target-only too.

    Raises:
        UsageError: two profiles are about the same cell, or disagree on the settings of a target.
    """
    rows: dict[Path, list[Pairing]] = {}
    for one in pairings:
        row = rows.setdefault(foreign.real(one.target.path), [with_draft(one, None)])
        for key in names(group="context"):
            if getattr(one.settings, key) != getattr(row[0].settings, key):
                raise UsageError(f"two profiles set another {key} for {one.target.label.name}", _ONE_OF_THEM)
        if one.draft is None:
            continue
        if any(_identity(one.draft) == _identity(other.draft) for other in row):
            raise UsageError(f"two profiles pair {one.target.label.name} with the same draft", _ONE_OF_THEM)
        row.append(one)
    return [one for row in rows.values() for one in row]


def _identity(file: File | str | None) -> str | None:
    return str(foreign.real(file.path)) if isinstance(file, File) else file


def named(pairings: Sequence[Pairing]) -> list[Pairing]:
    """The same with names that are unique among targets and among drafts."""
    targets = unique_names([one.target for one in pairings])
    drafts = unique_names([one.draft for one in pairings if isinstance(one.draft, File)])

    def with_name(file: File, names: dict[Path, str]) -> File:
        return replace(file, name=names[foreign.real(file.path)])

    return [
        replace(
            one,
            target=with_name(one.target, targets),
            draft=with_name(one.draft, drafts) if isinstance(one.draft, File) else one.draft,
        )
        for one in pairings
    ]


def unique_names(files: Sequence[File]) -> dict[Path, str]:
    """Names by file: its own, and where another has the same, the nearest folder that differs."""
    labels = {foreign.real(one.path): one.label for one in files}
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


# ---- cells


@dataclass(frozen=True, slots=True)
class _Subject:
    """A file's size, identity, and its header or why that cannot be read."""

    size_bytes: int
    identity: str
    header: Known | Failure


class Matrix:
    """Pairings, and how all of them run.

    Args:
        pairings: target-only of each target among them.
        given: the options.
        prompt: the user's own; None: the bundled ones.
        verbose: show llama.cpp's log.
    """

    def __init__(
        self, pairings: Sequence[Pairing], given: Settings, prompt: str | None = None, *, verbose: bool = False
    ) -> None:
        self.planned: dict[str, tuple[PairSpec, api.Resolved]] = {}  # of this process, by a cell's name
        self._pairings, self._given, self._prompt = pairings, given, prompt
        self._on_event: api.OnEvent | None = None
        self._verbose = verbose
        self._files: dict[Path, _Subject] = {}

    @property
    def key(self) -> str:
        """Of the comparison: the same for the same files and options, however often each cell is measured."""
        cells = [(_identity(one.target), _identity(one.draft), one.settings.given()) for one in self._pairings]
        groups = ("devices", "drafting", "context", "sampling", "length")
        options = self._given.given(name for group in groups for name in names(group=group))
        return key_of(cells, options, self._prompt, machine())[:12]

    def experiment(self, log: RunLog, rows: Path | None, on_event: api.OnEvent | None = None) -> Experiment:
        """Read headers and place cells; a cell that cannot run has its reason.

        Args:
            log: has the placements of an earlier run of the same comparison.
            rows: as :class:`ggufspec.bench.compare.Experiment` has it.
            on_event: progress of headers that are read, as :func:`ggufspec.api.make_plan` has it.

        Raises:
            UsageError: an option is out of range.
        """
        self._on_event = on_event
        targets: dict[str, Subject] = {}
        drafts: dict[str, Subject] = {}
        contenders = []
        for one in self._pairings:
            for subjects, file in ((targets, one.target), (drafts, one.draft)):
                if isinstance(file, File):
                    seen = self._files[file.path] = self._files.get(file.path) or self._read(file)
                    subjects.setdefault(file.name, Subject(file.name, file.path, seen.size_bytes, seen.identity))
                elif file == LOOKUP:
                    drafts[LOOKUP] = Subject(LOOKUP, None, 0, LOOKUP)
            contender = self._contender(one, log)
            contenders.append(contender)
            if one.draft is None and contender.spec is not None:
                targets[one.target.name] = replace(targets[one.target.name], alone=contender.spec.options)
        first = self._pairings[0]
        sample = self._spec(first, api.decoder_options(self._given.over(first.settings)))
        settings = {k: v for k, v in settings_of(sample).items() if k not in (*_PLACEMENT, "split", "draft_split")}
        rpc, repetitions = self._given.rpc or (), self._given.value("repetitions")
        return Experiment(
            targets=tuple(targets.values()),
            drafts=tuple(drafts.values()),
            contenders=tuple(contenders),
            repetitions=repetitions,
            settings=settings | {"repetitions": repetitions, "rpc": list(rpc)},
            rows=rows,
            rpc=rpc,
            verbose=self._verbose,
        )

    def _read(self, file: File) -> _Subject:
        size_bytes, identity = 0, str(foreign.real(file.path))
        try:
            found = locate(file.path)
            size_bytes, identity = sum(part.size_bytes for part in found.files), found.key
            return _Subject(size_bytes, identity, read_headers([file.path], None, self._on_event)[0])
        except GgufspecError as error:
            return _Subject(size_bytes, identity, Failure(error.message, error.hint))

    def _spec(self, one: Pairing, options: DecoderOptions) -> Spec:
        return Spec(
            target=one.target.path,
            draft=one.draft.path if isinstance(one.draft, File) else None,
            options=options,
            sampling=api.sampling(self._given),
            prompts=(self._prompt,) if self._prompt is not None else tuple(p.text for p in PROMPTS),
            max_tokens=self._given.value("predict"),
            rpc=self._given.rpc or (),
        )

    def _options(self, one: Pairing) -> DecoderOptions:
        """How a pairing is decoded, before it is placed."""
        options = api.decoder_options(self._given.over(one.settings))
        if one.draft is None:
            return replace(options, drafters=(), lookup_corpus=None)
        if one.draft == LOOKUP:
            return replace(options, drafters=("lookup",))
        return options if options.needs_draft else replace(options, drafters=("draft", "lookup"))

    def _contender(self, one: Pairing, log: RunLog) -> Contender:
        """The cell of a pairing, placed as in an earlier run, or now."""
        files = [self._files[file.path] for file in (one.target, one.draft) if isinstance(file, File)]
        options = self._options(one)
        identity = tuple(file.identity for file in files)
        if options.lookup_corpus is not None:
            identity += (LocalFile.at(options.lookup_corpus).identity,)
        draft = one.draft.name if isinstance(one.draft, File) else one.draft
        cell = Contender(one.target.name, draft, identity, None)
        headers = [file.header for file in files if not isinstance(file.header, Failure)]
        if failure := next((file.header for file in files if isinstance(file.header, Failure)), None):
            return replace(cell, failure=failure)
        request = (plain.dump(options), one.settings.given(_PLACEMENT), self._given.given(names(group="devices")))
        key = key_of("placement", identity, request)
        planned = log.load(key, Planned)
        if planned is None:
            try:
                if len(headers) == 2:
                    check_pair(*headers)
                planned = self._place(cell.name, one, options)
            except GgufspecError as error:
                return replace(cell, failure=Failure(error.message, error.hint))
            log.keep(key, planned)
        return replace(cell, spec=self._spec(one, planned.options), bytes=planned.bytes)

    def _place(self, name: str, one: Pairing, options: DecoderOptions) -> Planned:
        """Plan a cell.

        Raises:
            GgufspecError: it does not fit.
        """
        draft = one.draft.path if isinstance(one.draft, File) else None
        pair = PairSpec(one.target.name, one.target.path, draft, one.settings)
        resolved = api.resolve(pair, self._given, options=options, on_event=self._on_event, verbose=self._verbose)
        plan = resolved.plan
        if plan is None:  # nothing was left to plan; its bytes are for the report only
            with contextlib.suppress(GgufspecError):
                plan = api.make_plan(
                    pair, self._given, options=options, on_event=self._on_event, verbose=self._verbose
                ).document()
        self.planned[name] = (pair, resolved)
        return Planned(resolved.pair, _bytes(plan, with_draft=draft is not None))


def _bytes(plan: PlanDocument | None, *, with_draft: bool) -> ByDevice:
    option = plan.options["speculative" if with_draft else "target_only"] if plan else None
    if plan is None or option is None:
        return {}
    return parts(option, {device.name: device.overhead_bytes for device in plan.devices})
