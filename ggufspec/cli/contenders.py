"""Where the cells of a comparison run: headers, placements, and the reason where a cell cannot run at all."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ggufspec import api, foreign
from ggufspec.cli import inputs, ui
from ggufspec.cli.matrix import LOOKUP, NONE, File, Pairing
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.settings import Settings, names

if TYPE_CHECKING:
    from ggufspec.bench.compare import ByDevice, Contender, Experiment, Planned
    from ggufspec.bench.run_log import RunLog
    from ggufspec.bench.trial import Spec
    from ggufspec.decoding.options import DecoderOptions
    from ggufspec.models.profile import PairSpec
    from ggufspec.models.source import Known
    from ggufspec.schema.base import Failure
    from ggufspec.schema.plan import PlanDocument

Places = dict[str, tuple["PairSpec", api.Resolved]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line says of how to run."""

    given: Settings
    prompt: str | None

    def check(self) -> None:
        """Find out before anything is fetched that an option cannot be.

        Raises:
            UsageError: a value is out of range, or a name is not known.
        """
        if self.given.drafter in (LOOKUP, NONE):
            raise UsageError(
                f"--drafter {self.given.drafter} uses no draft file",
                f"-md {self.given.drafter} makes it a cell of its own",
            )
        api.sampling(self.given)
        api.decoder_options(self.given)

    def spec(self, pairing: Pairing, decoder: DecoderOptions) -> Spec:
        """A trial of a pairing."""
        from ggufspec.bench.prompts import PROMPTS
        from ggufspec.bench.trial import Spec

        return Spec(
            target=pairing.target.path,
            draft=pairing.draft.path if isinstance(pairing.draft, File) else None,
            options=decoder,
            sampling=api.sampling(self.given),
            prompts=(self.prompt,) if self.prompt is not None else tuple(p.text for p in PROMPTS),
            max_tokens=self.given.value("predict"),
            rpc=self.given.rpc or (),
        )

    def decoder(self, pairing: Pairing) -> DecoderOptions:
        """How a pairing is decoded, before it is placed.

        Raises:
            UsageError: a value is out of range, or a name is not known.
        """
        decoder = api.decoder_options(self.given.over(pairing.settings))
        if pairing.draft is None:
            return replace(decoder, drafters=(), lookup_corpus=None)
        if pairing.draft == LOOKUP:
            return replace(decoder, drafters=("lookup",))
        return decoder if decoder.needs_draft else replace(decoder, drafters=("draft", "lookup"))

    def key(self, pairings: Sequence[Pairing]) -> str:
        """A name for the comparison: the same files in the same way are the same one, however often each is tried."""
        from ggufspec.bench.run_log import key_of
        from ggufspec.bench.summary import machine

        cells = [
            (
                str(foreign.real(one.target.path)),
                str(foreign.real(one.draft.path)) if isinstance(one.draft, File) else one.draft,
                one.settings.given(),
            )
            for one in pairings
        ]
        groups = ("devices", "drafting", "context", "sampling", "length")
        ways = self.given.given(name for group in groups for name in names(group=group))
        return key_of(cells, ways, self.prompt, machine())[:12]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A file that was looked at, its header or why that cannot be read."""

    size_bytes: int
    identity: str
    header: Known | Failure


def experiment(
    pairings: Sequence[Pairing], wanted: Wanted, log: RunLog, rows: Path | None
) -> tuple[Experiment, Places]:
    """Headers, placements, cells; a cell that cannot run has its reason.

    Args:
        pairings: the matrix.
        wanted: how to run.
        log: has the placements of an earlier run of the same comparison.
        rows: as :class:`ggufspec.bench.compare.Experiment` has it.

    Returns:
        the experiment, and by a cell's name what was planned now.

    Raises:
        UsageError: an option is out of range.
    """
    from ggufspec.bench.compare import Experiment, Subject
    from ggufspec.bench.summary import settings_of

    seen: dict[Path, _Seen] = {}
    targets: dict[str, Subject] = {}
    drafts: dict[str, Subject] = {}
    contenders: list[Contender] = []
    places: Places = {}
    for one in pairings:
        for subjects, file in ((targets, one.target), (drafts, one.draft)):
            if isinstance(file, File):
                if file.path not in seen:
                    seen[file.path] = _look(file)
                if file.name not in subjects:
                    looked = seen[file.path]
                    subjects[file.name] = Subject(file.name, file.path, looked.size_bytes, looked.identity)
            elif file == LOOKUP:
                drafts[LOOKUP] = Subject(LOOKUP, None, 0, LOOKUP)
        contender = _contender(one, wanted, seen, log, places)
        contenders.append(contender)
        if one.draft is None and contender.spec is not None:
            targets[one.target.name] = replace(targets[one.target.name], alone=contender.spec.options)
    sample = wanted.spec(pairings[0], api.decoder_options(wanted.given.over(pairings[0].settings)))
    placed = ("gpu_layers", "gpu_layers_draft", "split", "draft_split", "n_cpu_moe")
    settings = {key: value for key, value in settings_of(sample).items() if key not in placed}
    rpc, repetitions = wanted.given.rpc or (), wanted.given.value("repetitions")
    made = Experiment(
        targets=tuple(targets.values()),
        drafts=tuple(drafts.values()),
        contenders=tuple(contenders),
        repetitions=repetitions,
        settings=settings | {"repetitions": repetitions, "rpc": list(rpc)},
        rows=rows,
        rpc=rpc,
        verbose=ui.flags().verbose,
    )
    return made, places


def _look(file: File) -> _Seen:
    from ggufspec.models.files import locate
    from ggufspec.models.source import read_headers
    from ggufspec.schema.base import Failure

    size_bytes, identity = 0, str(foreign.real(file.path))
    try:
        found = locate(file.path)
        size_bytes, identity = sum(part.size_bytes for part in found.files), found.key
        with ui.busy() as say:
            say(f"reading the header of {file.name}")
            return _Seen(size_bytes, identity, read_headers([file.path])[0])
    except GgufspecError as error:
        return _Seen(size_bytes, identity, Failure(error.message, error.hint))


def _contender(one: Pairing, wanted: Wanted, seen: dict[Path, _Seen], log: RunLog, places: Places) -> Contender:
    """The cell of a pairing, placed as it was before, or now."""
    from ggufspec import plain
    from ggufspec.bench.compare import Contender, Planned
    from ggufspec.bench.run_log import key_of
    from ggufspec.models.files import LocalFile
    from ggufspec.models.vocabulary import check_pair
    from ggufspec.schema.base import Failure

    draft = one.draft.name if isinstance(one.draft, File) else one.draft
    files = [seen[file.path] for file in (one.target, one.draft) if isinstance(file, File)]
    decoder = wanted.decoder(one)
    identity = tuple(file.identity for file in files)
    if decoder.lookup_corpus is not None:
        identity += (LocalFile.at(decoder.lookup_corpus).identity,)

    def failed(failure: Failure) -> Contender:
        return Contender(one.target.name, draft, identity, None, failure=failure)

    headers = []
    for file in files:
        if isinstance(file.header, Failure):
            return failed(file.header)
        headers.append(file.header)
    fixed = one.settings.given(("gpu_layers", "gpu_layers_draft", "n_cpu_moe"))
    asked = (plain.dump(decoder), fixed, wanted.given.given(names(group="devices")))
    key = key_of("placement", identity, asked)
    place = log.load(key, Planned)
    if place is not None:
        return Contender(one.target.name, draft, identity, wanted.spec(one, place.options), place.bytes)
    try:
        if len(headers) == 2:
            check_pair(*headers)
        place, pair, resolved = _place(one, decoder, wanted)
    except GgufspecError as error:
        return failed(Failure(error.message, error.hint))
    log.keep(key, place)
    contender = Contender(one.target.name, draft, identity, wanted.spec(one, place.options), place.bytes)
    places[contender.name] = (pair, resolved)
    return contender


def _place(one: Pairing, decoder: DecoderOptions, wanted: Wanted) -> tuple[Planned, PairSpec, api.Resolved]:
    """Plan a cell.

    Raises:
        GgufspecError: it does not fit.
    """
    from ggufspec.bench.compare import Planned
    from ggufspec.models.profile import PairSpec

    draft = one.draft.path if isinstance(one.draft, File) else None
    pair = PairSpec(one.target.name, one.target.path, draft, one.settings)
    resolved = inputs.resolve(pair, wanted.given, options=decoder)
    plan = resolved.plan
    if plan is None:  # nothing was left to plan; its bytes are for the report only
        with contextlib.suppress(GgufspecError):
            plan = inputs.make_plan(pair, wanted.given, options=decoder).document()
    return Planned(resolved.pair, _bytes(plan, with_draft=draft is not None)), pair, resolved


def _bytes(plan: PlanDocument | None, *, with_draft: bool) -> ByDevice:
    from ggufspec.bench.compare import parts

    option = plan.options["speculative" if with_draft else "target_only"] if plan else None
    if plan is None or option is None:
        return {}
    return parts(option, {device.name: device.overhead_bytes for device in plan.devices})
