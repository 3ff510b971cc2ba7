"""Ranking of the models in a hub repository or found by a hub search, for one machine (``ggufspec plan -hf REPO``).

Most headers are read only in part (:mod:`ggufspec.models.hub.repository`), and plans are estimates
(:mod:`ggufspec.planning.quantisations`). If a model cannot be read, its row holds the error.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ggufspec.api.options import decoder_options, machine_to_plan_for, with_context
from ggufspec.api.pairs import OnEvent, judged, spec_of_files
from ggufspec.api.plan import Calibrate, plan_request
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import GgufspecError, ModelError, UsageError
from ggufspec.files.cache import cache_folder
from ggufspec.hardware.host import physical_cores
from ggufspec.models import heads
from ggufspec.models.header import ModelHeader
from ggufspec.models.headers import KnownHeader, read_headers
from ggufspec.models.hub import choice, client, repository
from ggufspec.models.hub.choice import hub_file, quant_of
from ggufspec.models.hub.client import HubFile
from ggufspec.models.hub.repository import HubRepository, ReadModel
from ggufspec.planning.dry_runs import DryRuns
from ggufspec.planning.history import expected_acceptance
from ggufspec.planning.memory import DryRun
from ggufspec.planning.plan import Plan, PlanMachine
from ggufspec.planning.quantisations import (
    DIVERGENCE,
    DIVERGENCE_SOURCE,
    TWIN_ORIGIN,
    bits_per_weight,
    fits,
    pareto,
    sharing,
    twin_acceptance,
)
from ggufspec.planning.search import estimate_plan, largest_context
from ggufspec.planning.verdict import unknown_cards
from ggufspec.schema.ranking import RankedDraft, RankedModel, RankedRepository, RankingDocument
from ggufspec.settings.table import Settings

MOST_REPOSITORIES = 5  # maximum number of repositories in a search
_MOST_OF_EACH = 4  # maximum number of models per repository in a search
_MOST_BITS = 8.5  # bits per weight of Q8_0, above which no published measurement shows a gain in quality


@dataclass(frozen=True, slots=True)
class _Subject:
    """Model with its header and a file of the same shape for dry runs, or with the error from reading it."""

    repo: str
    file: str
    name: str
    size_bytes: int
    header: ModelHeader | None = None
    like: KnownHeader | None = None
    error: str = ""
    hint: str = ""

    @property
    def read(self) -> tuple[ModelHeader, Path]:
        """Header and metadata-only file for a plan; raises ModelError if the model could not be read."""
        if self.header is None or self.like is None:
            raise ModelError(self.error, self.hint)
        return self.header, self.like.metadata_only


@dataclass
class _Found:
    """Models to rank, with the repositories they are in."""

    subjects: list[_Subject] = field(default_factory=list)
    repositories: list[RankedRepository] = field(default_factory=list)
    bytes_read: int = 0

    @property
    def readable(self) -> list[_Subject]:
        """Models whose headers could be read."""
        return [one for one in self.subjects if one.header is not None]


def several(repo: str | None) -> HubRepository | None:
    """Return the repository if ``-hf`` names one with several models but chooses none of them; otherwise None.

    Raises:
        GgufspecError: there is no such repository, or it has no GGUF file.
    """
    if repo is None or (name := choice.parse_name(repo)).model:
        return None
    try:
        is_here = bool(client.cached_names(name.repo, name.revision))
        found = repository.list_models(name.repo, name.revision, soon=is_here)
    except client.UnreachableError:  # a downloaded model can still be planned
        return None
    return found if len(found.models) > 1 else None


def rank(
    given: Settings,
    among: HubRepository | None = None,
    *,
    words: str | None = None,
    draft_repo: str | None = None,
    calibrate: Calibrate | None = None,
    on_event: OnEvent | None = None,
) -> RankingDocument:
    """Rank the models in a repository or found by a hub search, or a single model.

    Args:
        given: settings from the command line.
        among: repository whose models to rank, from :func:`several`.
        words: words to search the hub for.
        draft_repo: repository whose drafts to rank for the named or the best target.
        calibrate: function that measures this machine if due; called once there is something to rank.
        on_event: called with progress while headers are read.

    Raises:
        GgufspecError: nothing is found, nothing can be read, or the draft is incompatible with the targets.
    """
    options = decoder_options(given)
    where = machine_to_plan_for(given, options.threads or physical_cores())
    targets = _targets(given, among, words, where, on_event)
    drafts = _of_repository(draft_repo, on_event) if draft_repo else _named_draft(given, on_event)
    if calibrate is not None and calibrate(None, (), options, on_event):
        where = replace(where, speed=machine_to_plan_for(given, options.threads or physical_cores()).speed)
    likes = {one.like.metadata_only: one.like for one in targets.readable + drafts.readable if one.like}
    dry_runs = DryRuns(where.described, simulated=where.simulated, rpc=where.rpc, folder=cache_folder())
    with dry_runs:
        shared = sharing(dry_runs, [(like.header, file) for file, like in likes.items()], where.card_names)
        ranking = _Ranking(given, options, where, shared)
        return ranking.document(targets, drafts, is_list=draft_repo is not None)


# ---- models to rank --------------------------------------------------------------------------------------------------


def _targets(
    given: Settings, among: HubRepository | None, words: str | None, where: PlanMachine, on_event: OnEvent | None
) -> _Found:
    if words is not None:
        names = client.search(words, MOST_REPOSITORIES)
        if not names:
            raise ModelError(f"the hub has no GGUF repository for {words!r}", "try fewer or other words")
        found = _Found()
        for name in names:
            try:
                some = _few(repository.list_models(name), sum(where.budget_bytes(card) for card in where.cards))
                _add(found, some, on_event)
            except client.OfflineError:
                raise
            except GgufspecError as error:
                found.subjects.append(_Subject(name, "", name, 0, error=error.message, hint=error.hint))
        if not found.readable:
            raise ModelError(found.subjects[0].error, found.subjects[0].hint)
        return found
    if among is not None:
        return _add(_Found(), among, on_event)
    spec = spec_of_files(given, on_event, no_draft=True)
    return _of_source(spec.target, given.hf_repo or str(spec.target), on_event)


def _of_repository(repo: str, on_event: OnEvent | None) -> _Found:
    if (name := choice.parse_name(repo)).model:
        raise UsageError(f"{repo!r} is not a repository on the hub", "--draft-repo USER/REPO; -hfd names one draft")
    return _add(_Found(), repository.list_models(name.repo, name.revision), on_event)


def _add(found: _Found, some: HubRepository, on_event: OnEvent | None) -> _Found:
    """Add a repository's models to ``found`` and return it; raise GgufspecError if no target can be read."""
    if not some.models:
        raise ModelError(
            f"{some.repo} has heads and no target: {', '.join(some.heads)}", f"-hf TARGET -hfd {some.repo}"
        )
    models = repository.read_models(some, on_event)
    found.repositories.append(RankedRepository(some.repo, some.commit, some.heads, some.left_out, some.revision))
    found.subjects += [_subject(some, one) for one in models]
    found.bytes_read += sum(one.bytes_read for one in models)
    return found


def _subject(of: HubRepository, one: ReadModel) -> _Subject:
    model = one.model
    return _Subject(of.repo, model.file, of.named(model), model.size_bytes, one.header, one.like, one.error, one.hint)


def _few(of: HubRepository, budget_bytes: int) -> HubRepository:
    """Keep the models worth reading: the largest ones that are within the GPUs' memory, and the next larger one."""
    below = [model for model in of.models if model.size_bytes <= budget_bytes]
    start = max(0, min(len(below) - _MOST_OF_EACH + 1, len(of.models) - _MOST_OF_EACH))
    return replace(of, models=of.models[start : start + _MOST_OF_EACH])


def _named_draft(given: Settings, on_event: OnEvent | None) -> _Found:
    if given.hf_repo_draft:
        return _of_source(hub_file(given.hf_repo_draft, draft=True), given.hf_repo_draft, on_event)
    return _of_source(given.model_draft, given.model_draft, on_event) if given.model_draft else _Found()


def _of_source(source: str | Path | HubFile, name: str, on_event: OnEvent | None) -> _Found:
    """Return a single model to rank, after reading its complete header."""
    known = read_headers([source], None, on_event)[0]
    file = str(getattr(source, "file", source))
    repo = str(getattr(source, "repo", ""))
    subject = _Subject(repo, file, name, known.header.size_bytes, known.header, known)
    return _Found([subject], bytes_read=known.bytes_read)


# ---- the ranking -----------------------------------------------------------------------------------------------------


@dataclass
class _Ranking:
    """Ranking in progress, which collects ``notes`` and ``acceptances``."""

    given: Settings
    options: DecoderOptions
    machine: PlanMachine
    dry_run: DryRun
    notes: list[str] = field(default_factory=list)
    acceptances: dict[float, str] = field(default_factory=dict)
    _options: dict[tuple[str, str], DecoderOptions] = field(default_factory=dict)

    def document(self, targets: _Found, drafts: _Found, *, is_list: bool) -> RankingDocument:
        """Rank the targets; with ``is_list``, also rank the drafts for the best target and use the fastest."""
        draft = None if is_list or not drafts.subjects else drafts.subjects[0]
        models = self._models(targets, draft)
        target = _best(targets.subjects, models)
        rows: tuple[RankedDraft, ...] = ()
        if is_list:
            rows, draft = self._drafts(target, drafts)
            models = self._models(targets, draft) if draft else models
        cards = {
            card.name: {"description": card.description, "budget_bytes": self.machine.budget_bytes(card)}
            for card in self.machine.cards
        }
        settings = {name: getattr(self.options, name) for name in ("ctx_size", "cache_type_k", "cache_type_v")}
        settings["divergence_from"] = DIVERGENCE_SOURCE
        if self.acceptances:
            settings["acceptance"], settings["acceptance_from"] = next(iter(self.acceptances.items()))
        return RankingDocument(
            repositories=(*targets.repositories, *drafts.repositories),
            devices=cards,
            rows=models,
            target=target.name,
            draft=draft.name if draft else None,
            drafts=rows,
            next=self._next(target, draft),
            settings=settings,
            speed=self.machine.speed.origin,
            bytes_read=targets.bytes_read + drafts.bytes_read,
            notes=tuple(dict.fromkeys([*unknown_cards(self.machine), *self.notes])),
        )

    def _models(self, targets: _Found, draft: _Subject | None) -> tuple[RankedModel, ...]:
        """Return a row for each target; if all targets failed, raise the first failure."""
        rows, first = [], None
        for number, subject in enumerate(targets.subjects, 1):
            row = RankedModel(
                number, subject.repo, subject.file, subject.name, subject.size_bytes, quant_of(subject.file)
            )
            try:
                rows.append(self._model(row, subject, draft))
            except GgufspecError as error:
                first = first or error
                rows.append(replace(row, error=error.message, hint=error.hint))
        if first and all(row.error for row in rows):
            raise first
        best = set[int]()
        for repo in dict.fromkeys(row.repo for row in rows):
            some = [row for row in rows if row.repo == repo and not row.error]
            best |= {
                row.number
                for row, is_best in zip(some, pareto([(*_point(row), row.divergence) for row in some]), strict=True)
                if is_best
            }
        return tuple(replace(row, pareto=row.number in best) for row in rows)

    def _model(self, row: RankedModel, subject: _Subject, draft: _Subject | None) -> RankedModel:
        if subject.header and (kind := heads.head_kind(subject.header)):
            raise ModelError(f"{subject.file} is {kind.what} and no target", f"-hf TARGET -hfd {subject.name}")
        plan = self._plan(subject, draft)
        header, target_only = plan.request.target.header, plan.target_only
        longest = largest_context(plan.request.target_only, self.machine, self.dry_run)
        return replace(
            row,
            bits_per_weight=bits_per_weight(header),
            divergence=DIVERGENCE.get(row.quant),
            fits=fits(plan, longest),
            gpu_layers=target_only.target.offloaded(header.blocks),
            layers=header.blocks,
            n_cpu_moe=target_only.target.n_cpu_moe,
            n_cpu_ffn=target_only.target.n_cpu_ffn,
            target_only_tokens_per_s=target_only.tokens_per_s,
            speculative_tokens_per_s=plan.pair.tokens_per_s if plan.pair else None,
            break_even_acceptance=plan.break_even_acceptance,
            break_even_accepted_share=plan.break_even_share,
            largest_context=longest,
        )

    def _drafts(self, target: _Subject, drafts: _Found) -> tuple[tuple[RankedDraft, ...], _Subject | None]:
        """Return a row for each draft with the target, and the fastest draft (None if no draft can run)."""
        rows = []
        for number, subject in enumerate(drafts.subjects, 1):
            row = RankedDraft(
                number, subject.repo, subject.file, subject.name, subject.size_bytes, quant_of(subject.file)
            )
            try:
                plan = self._plan(target, subject)
                if plan.pair is None or plan.pair.draft is None or plan.request.draft is None:
                    raise ModelError("it does not fit next to the target", "")
                header = plan.request.draft.header
                row = replace(
                    row,
                    bits_per_weight=bits_per_weight(header),
                    gpu_layers=plan.pair.draft.offloaded(header.blocks),
                    layers=header.blocks,
                    tokens_per_s=plan.pair.tokens_per_s,
                    draft_length=plan.pair.draft_length,
                    costs_layers=plan.draft_costs_layers,
                    break_even_acceptance=plan.break_even_acceptance,
                    break_even_accepted_share=plan.break_even_share,
                )
            except GgufspecError as error:
                row = replace(row, error=error.message, hint=error.hint)
            rows.append(row)
        fastest = max(rows, key=lambda row: row.tokens_per_s or 0.0)
        if fastest.tokens_per_s is None:
            self.notes.append(f"no draft in {fastest.repo} works with {target.name}: {fastest.error}")
            return tuple(rows), None
        return tuple(rows), drafts.subjects[fastest.number - 1]

    def _plan(self, subject: _Subject, draft: _Subject | None) -> Plan:
        """Estimate a plan for a target with a draft or its own MTP blocks; raise GgufspecError if it cannot run."""
        target = subject.read
        options = with_context(self.options, target[0])
        draft_read = draft.read if draft else None
        if draft:
            options = replace(self._drafting(subject, draft), ctx_size=options.ctx_size)
        elif self.given.drafter is None and heads.in_target(target[0]):
            options, draft_read = options.with_head("mtp"), target
        acceptance, origin = self.given.acceptance or 0.0, "given with --acceptance"
        if draft_read and self.given.acceptance is None:
            is_twin = draft is not None and draft.repo == subject.repo
            least = twin_acceptance(target[0], draft_read[0], quant_of(draft.file)) if draft and is_twin else None
            known = cache_folder(), target[0].fingerprint, draft_read[0].fingerprint
            acceptance, origin = expected_acceptance(*known, least, TWIN_ORIGIN)
        if draft_read:
            self.acceptances.setdefault(acceptance, origin)
        request = plan_request(target, draft_read, options, acceptance, self.given)
        plan = estimate_plan(request, self.machine, self.dry_run)
        self.notes += [note for note in plan.notes if draft_read and plan.pair is None]
        return plan

    def _drafting(self, subject: _Subject, draft: _Subject) -> DecoderOptions:
        """Check the draft, which may be a head, against the target by their complete headers; return its options."""
        assert subject.like is not None
        assert draft.like is not None
        key = subject.like.origin, draft.like.origin
        if key not in self._options:
            self._options[key] = judged(subject.like, draft.like, self.options)[0]
        return self._options[key]

    def _next(self, target: _Subject, draft: _Subject | None) -> str:
        words = ["ggufspec", "plan", "-hf" if target.repo else "-m", target.name]
        if draft:
            words += ["-hfd" if draft.repo else "-md", draft.name]
        for flag, values in (("--gpu", self.given.gpu), ("--vram", self.given.vram)):
            words += [word for value in values or () for word in (flag, value)]
        for flag, value in (("--cpu", self.given.cpu), ("--ram", self.given.ram), ("--link", self.given.link)):
            words += [flag, value] if value else []
        if self.given.ram_bandwidth:
            words += ["--ram-bandwidth", f"{self.given.ram_bandwidth:g}"]
        return shlex.join(words)


def _point(row: RankedModel) -> tuple[float, float]:
    """Return the tokens/s of the faster option (with or without a draft), and the bits per weight."""
    speeds = (row.target_only_tokens_per_s or 0.0, row.speculative_tokens_per_s or 0.0)
    return max(speeds), row.bits_per_weight or 0.0


def _best(subjects: Sequence[_Subject], rows: Sequence[RankedModel]) -> _Subject:
    """Return the model with the most bits per weight (up to Q8_0) of those that fit whole, or else the fastest."""
    whole = [row for row in rows if row.fits == "whole"]
    fair = whole or [row for row in rows if not row.error]
    fair = [row for row in fair if row.repo == fair[0].repo]  # only those in the most downloaded repository
    if whole:
        found = max(fair, key=lambda row: (min(_point(row)[1], _MOST_BITS), _point(row)[0]))
    else:
        found = max(fair, key=_point)
    return subjects[found.number - 1]
