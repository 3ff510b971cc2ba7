"""Cells of a comparison: targets paired with drafts, each with its name and its placement or failure."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from ggufspec.api.options import decoder_options, sampling
from ggufspec.api.pairs import OnEvent, open_pair
from ggufspec.api.plan import make_plan
from ggufspec.api.resolve import resolve
from ggufspec.bench import prompting
from ggufspec.bench.compare import ByDevice, CompareExperiment, Contender
from ggufspec.bench.prompts import BenchPrompt
from ggufspec.bench.run_log import RunLog, key_of
from ggufspec.bench.summary import machine_and_versions, used_settings
from ggufspec.bench.trial import TrialJob, check_context
from ggufspec.bench.trials import file_identity
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.files import untrusted
from ggufspec.models.headers import KnownHeader, read_headers
from ggufspec.models.locate import locate
from ggufspec.models.profile import PairSpec
from ggufspec.models.vocabulary import check_pair
from ggufspec.schema import codec
from ggufspec.schema.base import Failure
from ggufspec.schema.compare import ComparedModel
from ggufspec.schema.plan import PlannedModel, PlannedOption
from ggufspec.settings.registry import DRAFTERS, parse_drafters, with_head
from ggufspec.settings.table import Settings, names

NONE = "none"
TOKENS = 128  # default answer length
WORDS = (*(name for name, row in DRAFTERS.items() if not row.needs_file), NONE)  # words that replace a draft file
_ONE_OF_THEM = "compare one of them at a time"
_PLACEMENT = names(group="placement")


@dataclass(frozen=True, slots=True)
class LabelledModel:
    """Model on this machine. ``label`` is the path to show, relative to its repository if it is in the hub's cache."""

    path: Path
    label: PurePath


@dataclass(frozen=True, slots=True)
class Pairing:
    """Cell before placement; ``draft`` is a file, one of :data:`WORDS`, or None for target-only."""

    target: LabelledModel
    draft: LabelledModel | str | None
    settings: Settings

    @property
    def draft_path(self) -> Path | None:
        return self.draft.path if isinstance(self.draft, LabelledModel) else None


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """Placement of a cell, planned in the first run of a comparison and reused when it resumes."""

    options: DecoderOptions
    bytes: ByDevice
    predicted_tokens_per_s: float = 0.0  # predicted speed; 0 without a plan or in an earlier version's log


# ---- pairings and their names


def without_file(drafter: str | None) -> str | None:
    """Return the first drafter that needs no file, one of :data:`WORDS`; None if all need a file."""
    drafters = parse_drafters(drafter or NONE)
    return next((word for word in WORDS if word in drafters), None)


def check_twice(files: Sequence[LabelledModel], role: str) -> None:
    """Raise UsageError if a file is given twice."""
    seen: dict[Path, LabelledModel] = {}
    for one in files:
        if (before := seen.setdefault(untrusted.real(one.path), one)) is not one:
            other = "" if before.path == one.path else f", also as {before.path}"
            raise UsageError(f"the {role} {one.path} is given twice{other}", "name each file once")


def with_draft(one: Pairing, draft: LabelledModel | str | None) -> Pairing:
    """Return a pairing with another draft and without the profile's placement, which suits only the profile's pair."""
    return Pairing(one.target, draft, replace(one.settings, **dict.fromkeys(_PLACEMENT)))


def with_target_only(pairings: Iterable[Pairing]) -> list[Pairing]:
    """Return each target's target-only cell, with the profile's settings, followed by the target's pairings.

    Raises:
        UsageError: two profiles define the same cell, or different settings for a target.
    """
    rows: dict[Path, list[Pairing]] = {}
    for one in pairings:
        row = rows.setdefault(untrusted.real(one.target.path), [with_draft(one, None)])
        for key in names(group="context"):
            if getattr(one.settings, key) != getattr(row[0].settings, key):
                raise UsageError(f"two profiles differ in {key} for {one.target.label.name}", _ONE_OF_THEM)
        if one.draft is None:
            continue
        if any(_real(one.draft) == _real(other.draft) for other in row):
            raise UsageError(f"two profiles pair {one.target.label.name} with the same draft", _ONE_OF_THEM)
        row.append(one)
    return [one for row in rows.values() for one in row]


def _real(file: LabelledModel | str | None) -> str | None:
    return str(untrusted.real(file.path)) if isinstance(file, LabelledModel) else file


def unique_names(files: Iterable[LabelledModel]) -> dict[Path, str]:
    """Return a unique name for each file: with its folder if names repeat, or the whole label if that is not enough."""
    labels = {untrusted.real(one.path): one.label for one in files}
    counts = Counter(label.name for label in labels.values())
    found = {}
    for path, label in labels.items():
        stem = label.name.removesuffix(".gguf")
        found[path] = stem if counts[label.name] == 1 else f"{stem} ({label.parent.name or '/'})"
    return found if len(set(found.values())) == len(found) else {path: str(label) for path, label in labels.items()}


# ---- cells


class Matrix:
    """Pairings, including target-only for each target, with the common options and prompts (default: bundled)."""

    def __init__(
        self,
        pairings: Sequence[Pairing],
        given: Settings,
        prompts: tuple[BenchPrompt, ...] = (),
        *,
        verbose: bool = False,
    ) -> None:
        self._pairings, self._given, self._prompts, self._verbose = pairings, given, prompts, verbose
        self._on_event: OnEvent | None = None
        self._targets = unique_names(one.target for one in pairings)
        self._drafts = unique_names(one.draft for one in pairings if isinstance(one.draft, LabelledModel))
        self._headers: dict[Path, KnownHeader] = {}
        self._asked: dict[Path, prompting.PromptsResult | GgufspecError] = {}  # prompt texts, or the error, by target

    @property
    def key(self) -> str:
        """Key made from the comparison's files and options, but not the number of repetitions."""
        cells = [(_real(one.target), _real(one.draft), one.settings.given()) for one in self._pairings]
        groups = ("devices", "drafting", "context", "sampling", "length")
        options = self._given.given(name for group in groups for name in names(group=group))
        return key_of(
            cells, options, codec.dump(self._prompts, tuple[BenchPrompt, ...]), self._given.raw, machine_and_versions()
        )[:12]

    def experiment(
        self, log: RunLog, on_event: OnEvent | None = None, *, quality: bool, budget_s: float | None = None
    ) -> CompareExperiment:
        """Read headers and place cells, reusing placements from the ``log``; a cell that cannot run records the reason.

        Raises:
            UsageError: an option is out of range.
        """
        self._on_event = on_event
        asked = [self._ask(one.target.path) for one in self._pairings]
        found = [one for one in asked if isinstance(one, prompting.PromptsResult)]
        first = self._pairings[0]
        options = decoder_options(self._given.over(first.settings))
        sample = self._spec(first, options, found[0] if found else prompting.PromptsResult((), (), (), False))
        settings = {k: v for k, v in used_settings(sample).items() if k not in (*_PLACEMENT, "split", "draft_split")}
        if len({one.templated for one in found}) > 1:
            settings["prompt_format"] = "each target's own format"
        repetitions = self._given.value("repetitions")
        drafts = [one.draft for one in self._pairings]
        without_file = (ComparedModel(word, "", 0) for word in WORDS if word in drafts)
        return CompareExperiment(
            targets=_models((one.target for one in self._pairings), self._targets),
            drafts=(*_models((one for one in drafts if isinstance(one, LabelledModel)), self._drafts), *without_file),
            contenders=tuple(self._contender(one, log) for one in self._pairings),
            repetitions=repetitions,
            settings=settings | {"repetitions": repetitions, "rpc": list(self._given.rpc or ())},
            quality=quality,
            verbose=self._verbose,
            notes=tuple(dict.fromkeys(self._format_notes())),
            budget_s=budget_s,
            cut=self._given.predict is None,
        )

    def _ask(self, target: Path) -> prompting.PromptsResult | GgufspecError:
        """Return the prompt texts for a target, or the error; they are made only once."""
        if target not in self._asked:
            try:
                spec = prompting.PromptsJob(target, self._prompts, bool(self._given.raw))
                self._asked[target] = prompting.make_texts(spec, verbose=self._verbose)
            except GgufspecError as error:
                self._asked[target] = error
        return self._asked[target]

    def _format_notes(self) -> Iterator[str]:
        """Yield notes on the texts, e.g. which targets got plain text although others have a chat template."""
        found = {path: one for path, one in self._asked.items() if isinstance(one, prompting.PromptsResult)}
        for path, one in found.items():
            yield from one.notes
            if not one.templated and any(other.templated for other in found.values()):
                yield f"{self._targets[untrusted.real(path)]} has no chat template: its prompts were plain text"

    def _spec(self, one: Pairing, options: DecoderOptions, asked: prompting.PromptsResult) -> TrialJob:
        return TrialJob(
            target=one.target.path,
            draft=one.draft_path,
            options=options,
            sampling=sampling(self._given),
            **asked.trial,
            max_tokens=self._given.predict or TOKENS,
            rpc=self._given.rpc or (),
        )

    def _options(self, one: Pairing) -> DecoderOptions:
        """Return a pairing's decoder options before placement."""
        options = decoder_options(self._given.over(one.settings))
        if one.draft is None:
            return replace(options, drafters=(), lookup_corpus=None)
        if isinstance(one.draft, str):
            head = DRAFTERS[one.draft].is_head
            return replace(options, drafters=with_head(options.drafters, one.draft) if head else (one.draft,))
        return options if options.needs_draft else replace(options, drafters=("draft", "lookup"))

    def _contender(self, one: Pairing, log: RunLog) -> Contender:
        """Return a pairing's cell, with the logged placement or a new one."""
        options = self._options(one)
        draft = self._drafts[untrusted.real(one.draft.path)] if isinstance(one.draft, LabelledModel) else one.draft
        cell = Contender(self._targets[untrusted.real(one.target.path)], draft, None)
        files = [path for path in (one.target.path, one.draft_path) if path is not None]
        request = (codec.dump(options), one.settings.given(_PLACEMENT), self._given.given(names(group="devices")))
        key = key_of("placement", [file_identity(path) for path in files], request)
        asked = self._ask(one.target.path)
        if isinstance(asked, GgufspecError):
            return replace(cell, failure=Failure(asked.message, asked.hint))
        planned = log.get(key, PlannedCell)
        if planned is None:
            try:
                headers = [self._header(path) for path in files]
                if len(headers) == 2:
                    check_pair(headers[0], headers[1])
                planned = self._place(cell.target, one, options)
            except GgufspecError as error:
                return replace(cell, failure=Failure.of(error))
            log.put(key, planned)
        spec = self._spec(one, planned.options, asked)
        try:
            check_context(spec, max(asked.tokens))
        except UsageError as error:
            return replace(cell, failure=Failure.of(error))
        return replace(cell, spec=spec, bytes=planned.bytes, predicted_tokens_per_s=planned.predicted_tokens_per_s)

    def _header(self, path: Path) -> KnownHeader:
        if path not in self._headers:
            (self._headers[path],) = read_headers([path], None, self._on_event)
        return self._headers[path]

    def _place(self, name: str, one: Pairing, options: DecoderOptions) -> PlannedCell:
        pair = PairSpec(name, one.target.path, one.draft_path, one.settings)
        opened = open_pair(pair, self._given, options, self._on_event)
        resolved = resolve(opened, on_event=self._on_event)
        plan = resolved.plan
        if plan is None:  # the whole placement was given; plan anyway, for the bytes in the report
            with contextlib.suppress(GgufspecError):
                plan = make_plan(opened, on_event=self._on_event).document()
        option = plan.options["speculative" if options.needs_draft else "target_only"] if plan else None
        overheads = {device.name: device.overhead_bytes for device in plan.devices} if plan else {}
        if option is None:
            return PlannedCell(resolved.pair, {})
        return PlannedCell(resolved.pair, part_bytes(option, overheads), option.tokens_per_s)


def _models(files: Iterable[LabelledModel], names_: Mapping[Path, str]) -> tuple[ComparedModel, ...]:
    once: dict[str, ComparedModel] = {}
    for file in files:
        name, size_bytes = names_[untrusted.real(file.path)], 0
        with contextlib.suppress(GgufspecError):  # the model's cells report the error
            size_bytes = sum(part.size_bytes for part in locate(file.path).files)
        once.setdefault(name, ComparedModel(name, str(file.path), size_bytes))
    return tuple(once.values())


def part_bytes(option: PlannedOption, overheads: dict[str, int]) -> ByDevice:
    """Return bytes by device and part for a ``CompareCell``; ``overheads`` are the bytes drivers use, by device."""
    found: ByDevice = {}
    models: tuple[tuple[str, PlannedModel | None], ...] = (("target", option.target), ("draft", option.draft))
    for role, model in models:
        for device, used in (model.bytes if model else {}).items():
            row = found.setdefault(device, {})
            for part in ("weights", "kv", "compute"):
                row[f"{role} {part}"] = used[part]
            row["overhead"] = row.get("overhead", overheads.get(device, 0)) + used.get("overhead", 0)
    return {device: row for device, row in found.items() if any(row.values())}
