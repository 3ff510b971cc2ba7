"""Which pair: from what is given to its files here, and to its headers, read and judged once.

``on_event`` gets what takes long. A failure is a :class:`ggufspec.errors.GgufspecError`, whose ``hint`` is the next
thing to try, in the command line's words.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ggufspec.api.options import decoder_options, with_context
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.model import check_gguf
from ggufspec.models import heads
from ggufspec.models.headers import Known, read_headers
from ggufspec.models.hub import download as hub
from ggufspec.models.hub.choice import hub_file
from ggufspec.models.hub.client import HubFile
from ggufspec.models.locate import is_url
from ggufspec.models.profile import Pair, PairSpec, Profile, load_profile, sources
from ggufspec.models.vocabulary import check_pair
from ggufspec.settings.registry import DRAFTERS, Drafter, parse_drafters
from ggufspec.settings.table import Settings

OnEvent = Callable[[dict[str, Any]], None]
Fetch = Callable[[Sequence[HubFile], str], Sequence[Path]]  # files of what it names, fetched if they are not here


def spec_of(pair: str | Path | Profile | PairSpec, on_event: OnEvent | None = None) -> PairSpec:
    """The spec of a profile, of its name or path; its files need not be here.

    Raises:
        ModelError: a file that is not on the hub is not here.
        GgufspecError: there is no such profile, or an expanded model cannot be made.
    """
    if isinstance(pair, PairSpec):
        return pair
    profile = pair if isinstance(pair, Profile) else load_profile(pair)
    files, tuned = sources(profile, on_event), profile.tuned
    return PairSpec(profile.name, *files, profile.placed_settings, profile.bench, profile.note, tuned)


def spec_of_files(
    given: Settings, on_event: OnEvent | None = None, *, no_draft: bool = False, need_draft: bool = False
) -> PairSpec:
    """The spec that PAIR, ``-m``, ``-md``, ``-hf`` and ``-hfd`` name.

    Raises:
        UsageError: two of them contradict, or there is no draft and ``need_draft``.
        GgufspecError: as :func:`spec_of`.
    """
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
        spec = PairSpec(Path(target.file if isinstance(target, HubFile) else target).stem, target, draft)
    else:
        if no_draft or own_draft:
            profile = profile.model_copy(update={"draft": None, "tuned": None})
        spec = spec_of(profile, on_event)
    if own_draft and profile is not None:  # which need not be a head as the profile's own may be
        spec = replace(spec, draft=draft, settings=replace(spec.settings, drafter=None))
    if not no_draft:
        _check_twice(spec)
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
    """The pair of :func:`spec_of_files`, its files here and checked. ``fetch`` is given the models of the hub and what
    to call them.

    Raises:
        GgufspecError: a profile or a file is not there or is not a GGUF file, or the user does not want to fetch it.
    """
    spec = spec_of_files(given, on_event, no_draft=no_draft, need_draft=need_draft)
    is_profile = given.model is None and given.hf_repo is None
    return _located(spec, fetch, f"profile {spec.name!r}" if is_profile else "the pair")


def files_of(pair: str | Path | Profile | Pair, *, download: bool = False, on_event: OnEvent | None = None) -> Pair:
    """The pair with its files here and checked; with ``download`` they are fetched from the hub first.

    Raises:
        UsageError: there is no such profile.
        ModelError: a file is not here, or is not a GGUF file; the hint is the command that fetches it.
        GgufspecError: the hub cannot be reached, or the disk is too small.
    """
    spec = spec_of(pair, on_event)

    def fetch(missing: Sequence[HubFile], name: str) -> list[Path]:
        if not download:
            raise ModelError(f"{missing[0].file} of {name} is not on this machine", f"ggufspec pull {spec.name}")
        hub.fetch(hub.look(missing), on_event)
        return [path for path in map(hub.here, missing) if path is not None]

    return _located(spec, fetch, f"profile {spec.name!r}")


def _located(spec: PairSpec, fetch: Fetch, name: str) -> Pair:
    """The pair with its files here: those of the hub fetched, and all of them checked."""
    missing = [source for source in (spec.target, spec.draft) if isinstance(source, HubFile)]
    fetched = dict(zip(missing, fetch(missing, name), strict=True)) if missing else {}

    def here(source: str | Path | HubFile) -> Path:
        path = fetched[source] if isinstance(source, HubFile) else Path(source)
        check_gguf(path)
        return path

    target, draft = here(spec.target), here(spec.draft) if spec.draft is not None else None
    if os.fsencode(target) == str(target).encode(errors="replace"):  # no header is kept by a name that is not UTF-8
        read_headers([target])  # llama.cpp aborts over some that it does not refuse
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


def _check_twice(spec: PairSpec) -> None:
    """Refuse a draft that is the target itself."""
    target, draft = spec.target, spec.draft
    if draft is None:
        return
    is_same = target == draft
    with suppress(OSError, ValueError):
        is_same = is_same or Path(str(target)).samefile(str(draft))
    if is_same:
        hint = "a draft is a smaller model of the same family; or --drafter lookup, which needs none"
        raise UsageError(f"{target} is both the target and the draft", hint)


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


# ---- headers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenedPair:
    """A pair whose headers are read and judged; plans and placements are made of it.

    Args:
        spec: its draft is None unless it drafts, and the target's own file if MTP blocks there do.
        given: what goes over the pair's own settings.
        options: how it is decoded, not yet placed: a draft that is a head drafts as one, ``-c max`` is a number.
        read: the target's header, unless the file is here and opening the pair did not need it.
        draft: the draft's.
        warnings: of the draft with the target.
    """

    spec: PairSpec
    given: Settings
    options: DecoderOptions
    read: Known | None = None
    draft: Known | None = None
    warnings: tuple[str, ...] = ()

    @property
    def target(self) -> Known:
        """The target's header. A GgufspecError if it cannot be read."""
        return self.read or read_headers([self.spec.target])[0]

    @property
    def wanted(self) -> Settings:
        """What is given, over the pair's own settings."""
        return self.given.over(self.spec.settings)


def open_pair(
    spec: PairSpec,
    given: Settings = Settings(),
    options: DecoderOptions | None = None,
    on_event: OnEvent | None = None,
    *,
    finds_head: bool = False,
) -> OpenedPair:
    """Read the headers of a pair and judge whether the draft can serve the target.

    Args:
        spec: whose headers are read.
        given: over the pair's own settings.
        options: context, types, threads and drafters, by default those of ``given``; placements are not looked at.
        on_event: gets headers as they are read: :func:`ggufspec.models.headers.read_headers`.
        finds_head: whether MTP blocks of a target without a draft draft, if nobody said who does.

    Raises:
        UsageError: a head is asked for and the draft is not one; the target does not say what it was trained for.
        GgufspecError: a header cannot be read, the draft cannot serve the target, an option is absurd.
    """
    options = options or decoder_options(given.over(spec.settings))
    if not options.needs_draft:
        spec = replace(spec, draft=None)
    is_here = not isinstance(spec.target, HubFile) and not is_url(str(spec.target))
    if is_here and options.ctx_size and not (spec.draft or finds_head or options.head):  # nothing to judge yet
        return OpenedPair(spec, given, options)
    target, *others = read_headers([source for source in (spec.target, spec.draft) if source], None, on_event)
    options, draft = with_context(options, target.header), next(iter(others), None)
    if finds_head and draft is None and given.drafter is None and heads.in_target(target.header):
        options = options.with_head(heads.MTP.drafter)
    if draft is None and options.head == heads.MTP.drafter:  # in the target's own file
        spec, draft = replace(spec, draft=spec.target), target
    warnings: tuple[str, ...] = ()
    if draft is not None:
        options, warnings = judged(target, draft, options)
    return OpenedPair(spec, given, options, target, draft, warnings)


def judged(target: Known, draft: Known, options: DecoderOptions) -> tuple[DecoderOptions, tuple[str, ...]]:
    """(the options with which a draft drafts for a target: as a head if it is one; the pair's warnings).

    Raises:
        UsageError: a head is asked for, and the draft is not one.
        ModelError: the draft cannot serve the target.
    """
    if options.head or heads.kind_of(draft.header):
        options = options.with_head(heads.require(target.header, draft.header, options.head).drafter)
    return options, check_pair(target, draft, options.head)
