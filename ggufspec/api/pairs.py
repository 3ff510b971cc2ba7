"""Finding and opening a pair, which leads from a profile or flags to local files and compatible headers.

``on_event`` is called with progress events during slow steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ggufspec.api.options import check_caches, decoder_options, with_context
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.model import check_gguf
from ggufspec.models import heads
from ggufspec.models.compat import require_language_model
from ggufspec.models.headers import KnownHeader, read_headers
from ggufspec.models.hub import download as hub
from ggufspec.models.hub.choice import hub_file
from ggufspec.models.hub.client import HubFile
from ggufspec.models.locate import Source, first_part, is_url
from ggufspec.models.profile import Pair, PairSpec, Profile, header_sources, load_profile
from ggufspec.models.vocabulary import check_pair
from ggufspec.settings.registry import DRAFTERS, DrafterRow, parse_drafters
from ggufspec.settings.table import Settings

OnEvent = Callable[[dict[str, Any]], None]
Fetch = Callable[[Sequence[HubFile], str], Sequence[Path]]  # downloads hub files; the text is the pair's name


def spec_of(pair: str | Path | Profile | PairSpec, on_event: OnEvent | None = None) -> PairSpec:
    """Return the pair in a profile, which may be given by name or path; hub files need not be downloaded.

    Raises:
        ModelError: a local file is missing.
        GgufspecError: there is no such profile, or an expanded model cannot be written.
    """
    if isinstance(pair, PairSpec):
        return pair
    profile = pair if isinstance(pair, Profile) else load_profile(pair)
    files, tuned = header_sources(profile, on_event), profile.tuned
    return PairSpec(profile.name, *files, profile.placed_settings, profile.bench, profile.note, tuned)


def spec_of_files(
    given: Settings, on_event: OnEvent | None = None, *, no_draft: bool = False, need_draft: bool = False
) -> PairSpec:
    """Return the pair that PAIR, ``-m``, ``-md``, ``-hf`` and ``-hfd`` name.

    Raises:
        UsageError: these options contradict each other, or ``need_draft`` is True and there is no draft.
        GgufspecError: as for :func:`spec_of`.
    """
    _check_sources(given)
    own_draft = not no_draft and (given.model_draft is not None or given.hf_repo_draft is not None)
    is_profile = given.model is None and given.hf_repo is None
    profile = load_profile(given.pair or "demo") if is_profile else None
    usual = profile.settings.drafter if profile and not given.drafter else None
    drafts_alone = usual not in (None, "none") and not _needs_file(usual)  # the profile's drafter needs no draft file
    if need_draft and not own_draft and not drafts_alone and (profile is None or profile.draft is None):
        raise UsageError(
            "a bench compares with a draft, but none is given",
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
    if own_draft and profile is not None:  # the profile's drafter may need a head, which this draft may not be
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
    """Return the pair of :func:`spec_of_files` with local, checked files; ``fetch`` downloads hub files.

    Raises:
        GgufspecError: a profile or a file is missing, a file is not GGUF, or the user declines a download.
    """
    spec = spec_of_files(given, on_event, no_draft=no_draft, need_draft=need_draft)
    is_profile = given.model is None and given.hf_repo is None
    return _located(spec, fetch, f"profile {spec.name!r}" if is_profile else "the pair")


def with_files(pair: str | Path | Profile | Pair, *, download: bool = False, on_event: OnEvent | None = None) -> Pair:
    """Return the pair with local, checked files; with ``download``, missing files are downloaded from the hub.

    Raises:
        UsageError: there is no such profile.
        ModelError: a file is missing (the hint is the command that downloads it) or is not GGUF.
        GgufspecError: the hub cannot be reached, or there is too little disk space.
    """
    spec = spec_of(pair, on_event)

    def fetch(missing: Sequence[HubFile], name: str) -> list[Path]:
        if not download:
            raise ModelError(f"{missing[0].file} of {name} is not on this machine", f"ggufspec pull {spec.name}")
        hub.fetch(hub.look_up(missing), on_event)
        return [path for path in map(hub.cached_model, missing) if path is not None]

    return _located(spec, fetch, f"profile {spec.name!r}")


def _located(spec: PairSpec, fetch: Fetch, name: str) -> Pair:
    missing = [source for source in (spec.target, spec.draft) if isinstance(source, HubFile)]
    fetched = dict(zip(missing, fetch(missing, name), strict=True)) if missing else {}

    def here(source: str | Path | HubFile) -> Path:
        path = fetched[source] if isinstance(source, HubFile) else Path(source)
        check_gguf(path)
        return first_part(path)

    target, draft = here(spec.target), here(spec.draft) if spec.draft is not None else None
    check_target(target)
    return Pair(spec.name, target, draft, spec.settings, spec.bench, spec.note)


def _check_sources(given: Settings) -> None:
    if given.model is not None and given.hf_repo is not None:
        raise UsageError("both -m (or GGUFSPEC_MODEL) and -hf are given", "give one of them")
    if given.model_draft is not None and given.hf_repo_draft is not None:
        raise UsageError("both -md (or GGUFSPEC_MODEL_DRAFT) and -hfd are given", "give one of them")
    if given.pair is not None and (given.model is not None or given.hf_repo is not None):
        other = "-hf" if given.hf_repo else "-m (or GGUFSPEC_MODEL)"
        raise UsageError(f"both a PAIR and {other} are given", "give one of them")


def _check_twice(spec: PairSpec) -> None:
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
    """Raise UsageError if the requested drafter needs a draft file, but the pair has none."""
    if pair.draft is None and (row := _needs_file(given.drafter)):
        article, way = ("an", "-md HEAD or -hfd USER/REPO:eagle3") if row.is_head else ("a", "-md DRAFT")
        message = f"--drafter {given.drafter} needs {article} {row.label}, but none is given"
        raise UsageError(message, f"{way}, or --drafter lookup")


def _needs_file(drafter: str | None) -> DrafterRow | None:
    """Return the first drafter in a ``--drafter`` value that needs a draft file, or None."""
    return next((DRAFTERS[name] for name in parse_drafters(drafter or "none") if DRAFTERS[name].needs_file), None)


# ---- headers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenedPair:
    """Pair with its headers, checked for compatibility, which is the input for plans and placements.

    Args:
        spec: the pair; its draft is None if unused, or the target's own file if MTP blocks in it are the draft.
        given: settings that override the pair's.
        options: decoder options before placement, with the drafter for a head set and ``-c max`` replaced by a number.
        read: header of the target; None for a local file whose header has not been needed yet.
        draft: header of the draft; None without a draft.
        warnings: warnings about the draft's compatibility with the target.
    """

    spec: PairSpec
    given: Settings
    options: DecoderOptions
    read: KnownHeader | None = None
    draft: KnownHeader | None = None
    warnings: tuple[str, ...] = ()

    @property
    def target(self) -> KnownHeader:
        """Header of the target; raises GgufspecError if it cannot be read."""
        return self.read or _read([self.spec.target])[0]

    @property
    def wanted(self) -> Settings:
        """Settings of the pair, overridden by the given ones."""
        return self.given.over(self.spec.settings)


def open_pair(
    spec: PairSpec,
    given: Settings = Settings(),
    options: DecoderOptions | None = None,
    on_event: OnEvent | None = None,
    *,
    finds_head: bool = False,
    loads: bool = False,
) -> OpenedPair:
    """Read the headers of a pair and check that the draft is compatible with the target.

    ``given`` overrides the pair's settings. By default, ``options`` are made from both; placements in them are ignored.
    With ``finds_head``, the target's MTP blocks are the draft if neither a draft nor ``--drafter`` is given. Plans set
    ``loads``, because they load no model: llama.cpp must be able to load each model whose header is new.

    Raises:
        UsageError: a head is requested but the draft is not a head; or ``-c max`` is given but the header does not
            state a training context.
        GgufspecError: a header cannot be read, the draft is incompatible, or an option is out of range.
    """
    options = options or decoder_options(given.over(spec.settings))
    check_caches(options)
    if not options.needs_draft:
        spec = replace(spec, draft=None)
    is_here = not isinstance(spec.target, HubFile) and not is_url(str(spec.target))
    needs_headers = loads or spec.draft or finds_head or options.head or not options.ctx_size
    if is_here and not needs_headers:
        return OpenedPair(spec, given, options)
    target, *others = _read([source for source in (spec.target, spec.draft) if source], on_event, loads=loads)
    options, draft = with_context(options, target.header), next(iter(others), None)
    if finds_head and draft is None and given.drafter is None and heads.in_target(target.header):
        options = options.with_head(heads.MTP.drafter)
    if draft is None and options.head == heads.MTP.drafter:  # draft with the MTP blocks in the target's file
        spec, draft = replace(spec, draft=spec.target), target
    warnings: tuple[str, ...] = ()
    if draft is not None:
        options, warnings = judged(target, draft, options)
    return OpenedPair(spec, given, options, target, draft, warnings)


def check_target(file: Path) -> None:
    """Raise ModelError if a target cannot generate text, or its header is so damaged that llama.cpp would abort."""
    if os.fsencode(file) == str(file).encode(errors="replace"):  # only headers of files with UTF-8 names are cached
        _read([file])


def _read(files: Sequence[Source], on_event: OnEvent | None = None, *, loads: bool = False) -> list[KnownHeader]:
    """Read the headers of a target and its draft, if any; raise ModelError if the target cannot generate text."""
    found = read_headers(files, None, on_event, loads=loads)
    require_language_model(found[0].header)
    return found


def judged(target: KnownHeader, draft: KnownHeader, options: DecoderOptions) -> tuple[DecoderOptions, tuple[str, ...]]:
    """Return the options, with the drafter for a head if the draft is one, and warnings about the pair.

    Raises:
        UsageError: a head is requested, but the draft is not a head.
        ModelError: the draft is incompatible with the target.
    """
    if options.head or heads.head_kind(draft.header):
        options = options.with_head(heads.require_head(target.header, draft.header, options.head).drafter)
    return options, check_pair(target, draft, options.head)
