"""What a comparison is of: targets and drafts as the command line has them, paired, each with a name of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from ggufspec import foreign
from ggufspec.cli import pull
from ggufspec.errors import ModelError, UsageError
from ggufspec.settings import Settings
from ggufspec.settings import names as names_of

LOOKUP, NONE = "lookup", "none"  # in the place of a draft's file
_EXAMPLE = "ggufspec compare -m A-Q4_K_M.gguf,A-Q8_0.gguf -md DRAFT.gguf"
_ONE_OF_THEM = "compare one of them at a time"
_OF_THE_TARGET = names_of(group="context")  # settings, draft or not


@dataclass(frozen=True, slots=True)
class File:
    """A model that is here. ``label`` is the path that people know it by: in the hub's cache it is the repository's."""

    path: Path
    label: PurePath
    name: str = ""


@dataclass(frozen=True, slots=True)
class Pairing:
    """A target and a draft of the matrix; ``draft`` is None for target-only, or :data:`LOOKUP`."""

    target: File
    draft: File | str | None
    settings: Settings


def matrix(profiles: Sequence[str] | None, given: Settings) -> list[Pairing]:
    """Every pairing, each target's target-only run first; what is on the hub and not here is fetched.

    Args:
        profiles: their names or paths.
        given: the files and repositories.

    Raises:
        GgufspecError: nothing is given, a file is not there or given twice.
    """
    if profiles and (given.model is not None or given.hf_repo is not None):
        raise UsageError(
            "both profiles and targets are given", "give profiles, or -m (which GGUFSPEC_MODEL may hold) and -hf"
        )
    targets = [*_files(given.model, "-m"), *_of_hub(given.hf_repo, "-hf")]
    drafts: list[File | str] = [*_files(given.model_draft, "-md"), *_of_hub(given.hf_repo_draft, "-hfd")]
    words = {
        word for text in (given.model_draft, given.hf_repo_draft) for word in _split(text) if word in (LOOKUP, NONE)
    }
    given_drafts = bool(drafts or words)
    if not (targets or profiles):
        what = "only drafts are given" if given_drafts else "nothing is given to compare"
        raise UsageError(f"{what}: the matrix is empty", _EXAMPLE)
    _refuse_twice(targets, "target")
    _refuse_twice([one for one in drafts if isinstance(one, File)], "draft")
    if LOOKUP in words:
        drafts.append(LOOKUP)
    every: list[File | str | None] = [None, *drafts]
    if profiles:
        pairings = list(_of_profiles(profiles, own_drafts=not given_drafts))
        if given_drafts:
            pairings = [_planned_anew(one, other) for one in pairings for other in every]
    else:
        pairings = [Pairing(target, other, Settings()) for target in targets for other in every]
    return _named(_with_alone(pairings))


def _with_alone(pairings: Sequence[Pairing]) -> list[Pairing]:
    """Target-only of each target, then its pairings; a profile's settings hold for its target-only too.

    Raises:
        UsageError: two profiles are about the same cell, or give one target's own run different settings.
    """
    rows: dict[Path, list[Pairing]] = {}
    for one in pairings:
        row = rows.setdefault(foreign.real(one.target.path), [_planned_anew(one, None)])
        for key in _OF_THE_TARGET:
            if getattr(one.settings, key) != getattr(row[0].settings, key):
                raise UsageError(f"two profiles set another {key} for {one.target.label.name}", _ONE_OF_THEM)
        if one.draft is None:
            continue
        if any(_same(one.draft, other.draft) for other in row):
            raise UsageError(f"two profiles pair {one.target.label.name} with the same draft", _ONE_OF_THEM)
        row.append(one)
    return [one for row in rows.values() for one in row]


def _planned_anew(one: Pairing, draft: File | str | None) -> Pairing:
    """The same target with another draft, or alone: the placement that a profile has is that of its own pair."""
    return Pairing(one.target, draft, replace(one.settings, gpu_layers=None, gpu_layers_draft=None, n_cpu_moe=None))


def _same(one: File | str | None, other: File | str | None) -> bool:
    if isinstance(one, File) and isinstance(other, File):
        return foreign.real(one.path) == foreign.real(other.path)
    return one == other


def _split(text: str | None) -> list[str]:
    """The parts of a list with commas; a file whose own name has one is taken whole."""
    if text and _is_file(text):
        return [text]
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # a list may be longer than a name can be
        return False


def _files(text: str | None, flag: str) -> list[File]:
    words = (LOOKUP, NONE) if flag == "-md" else ()
    parts = _split(text)
    if text is not None and not parts:
        raise UsageError(f"{flag} names no file: the matrix is empty", _EXAMPLE)
    paths = [_expanded(part) for part in parts if part not in words]
    for path in paths:
        if not path.is_file():
            reason = "is a folder" if path.is_dir() else "does not exist"
            raise ModelError(f"{path} {reason}", f"ls {path if path.is_dir() else path.parent}")
    return [File(path, path.absolute()) for path in paths]


def _expanded(text: str) -> Path:
    """With ``~`` as the shell has it, which sees it at the head of a list only."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # of somebody who is not known here
        return Path(text)


def _of_hub(text: str | None, flag: str) -> list[File]:
    """``USER/REPO:Q3_K_S,Q4_K_M``: a part without a slash is one more quantisation of the repository before it."""
    from ggufspec.models.hub import hub_file

    example = f"{flag} USER/REPO:Q3_K_S,Q4_K_M"
    if text is not None and not _split(text):
        raise UsageError(f"{flag} names no repository: the matrix is empty", example)
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
            raise UsageError(f"{part!r} names no repository", example)
    sources = [hub_file(name) for name in asked]
    again = " && ".join(pull.command(None, name, None) for name in asked)  # pull knows no lists
    paths = pull.have(sources, "the comparison", again)
    return [File(path, PurePath("/", source.repo, source.file)) for path, source in zip(paths, sources, strict=True)]


def _of_profiles(profiles: Sequence[str], *, own_drafts: bool) -> Iterator[Pairing]:
    from ggufspec.models.profile import load_profile, on_hub, resolve

    for name in profiles:
        profile = load_profile(name)
        if not own_drafts:
            profile = profile.model_copy(update={"draft": None})
        sources = [source for one in (profile.target, profile.draft) if one and (source := on_hub(one))]
        pull.have(sources, f"profile {profile.name!r}", pull.command(name, None, None))
        pair = resolve(profile)
        files = [
            File(file, PurePath("/", one.repo, one.file) if one.repo else file.absolute())
            for file, one in ((pair.target, profile.target), (pair.draft, profile.draft))
            if file is not None and one is not None
        ]
        draft = files[1] if len(files) > 1 else None
        yield Pairing(files[0], draft, pair.settings)


def _refuse_twice(files: Sequence[File], role: str) -> None:
    seen: dict[Path, File] = {}
    for one in files:
        if (before := seen.setdefault(foreign.real(one.path), one)) is not one:
            other = "" if before.path == one.path else f", as {before.path} too"
            raise UsageError(f"the {role} {one.path} is given twice{other}", "name each file once")


def _named(pairings: Sequence[Pairing]) -> list[Pairing]:
    """The same with names that are unique among targets and among drafts."""
    targets = names([one.target for one in pairings])
    drafts = names([one.draft for one in pairings if isinstance(one.draft, File)])

    def named(one: Pairing) -> Pairing:
        draft = one.draft
        if isinstance(draft, File):
            draft = replace(draft, name=drafts[foreign.real(draft.path)])
        return replace(one, target=replace(one.target, name=targets[foreign.real(one.target.path)]), draft=draft)

    return [named(one) for one in pairings]


def names(files: Sequence[File]) -> dict[Path, str]:
    """Names by file: its own, and where another has the same, the nearest folder that tells them apart."""
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
