"""Names in a hub repository: which files are models, their quantisations, and which model a name refers to."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ggufspec.errors import ModelError
from ggufspec.models.heads import SIDECARS, sidecar
from ggufspec.models.hub import client
from ggufspec.models.hub.client import HubFile

USUAL_QUANT = "Q4_K_M"
_NAME = re.compile(r"([^/:@]+/[^/:@]+)(?:/(.+?)|:(.*?))?(?:@([^@]+)(?<!\.gguf))?", re.DOTALL)
_SPLIT = re.compile(r"-\d{5}(-of-\d{5})$")
_QUANT = re.compile(
    r"(?i)(?<![^-._/])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|I2_S|(?:MX|NV)FP4(?:_[A-Z0-9]+)*|BF16|FP?(?:16|32))"
    r"(?:-[\d.]+BPW)?)(?=$|[-./])"
)
_NO_MODEL = re.compile(r"(?i)mmproj|(?:^|/)(?:imatrix|(?:ggml-)?adapter)[-_.]")
# Pieces made by `split`, to be joined by `cat`: NAME.gguf.part1of2, NAME.gguf-split-a, NAME.gguf.aa
_PIECE = re.compile(r"(.+\.gguf)[-.](?:split-|part[-_]?)?(?:[a-z]{1,2}|\d{1,4})(?:of\d+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubName:
    """Argument of ``-hf``: ``USER/REPO``, ``USER/REPO:QUANT`` or ``USER/REPO/FILE``, optionally with ``@REVISION``."""

    repo: str
    model: str = ""  # quantisation, file or kind of head; empty: the default
    revision: str | None = None  # branch, tag or commit; None: main

    def __str__(self) -> str:
        model, revision = self.model and f":{self.model}", f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{model}{revision}"


def parse_name(text: str) -> HubName:
    """Parse the argument of ``-hf``; raise GgufspecError if it does not name a repository. Pure."""
    match = _NAME.fullmatch(text)
    if match is None:
        raise client.no_repository(text)
    return HubName(match[1], match[2] or match[3] or "", match[4])


def hub_file(name: str, *, draft: bool = False) -> HubFile:
    """Resolve a :class:`HubName` as llama.cpp's ``-hf`` does; a split model resolves to its first part.

    The default is Q4_K_M, or the repository's only model. For a draft, the name may state a kind of head instead of the
    quantisation, optionally followed by the head's own quantisation: ``mtp``, ``eagle3-Q8_0``.

    Raises:
        GgufspecError: the repository does not exist, not exactly one file matches (the message lists the choices), or
            the match is a head although a target is needed, or an unsupported kind of head.
    """
    wanted = parse_name(name)
    repo, file, revision = wanted.repo, wanted.model, wanted.revision
    if not file.endswith(".gguf"):
        file = client.choose_names(repo, revision, lambda files: choose_files(repo, files, file, draft=draft))[0]
        client.check_names(repo, file, revision)
    kind = sidecar(file)
    if kind is not None and not draft:
        raise ModelError(f"{repo}/{file} is {kind.what}, not a target", f"-hf TARGET -hfd {repo}/{file}")
    if kind is not None and not kind.drafter:
        hint = f"llama-server -hf {repo} --spec-type {kind.spec_type} runs it; or choose another draft"
        raise ModelError(f"{repo}/{file} is {kind.what}, which ggufspec cannot run", hint)
    return HubFile(repo, file, revision)


def names_of_models(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the sorted files of each model or head, keyed by file name without extension and part number. Pure."""
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        stem = file.removesuffix(".gguf")
        is_data = "imatrix" in stem.lower() and not quant_of(file)  # a model made with an imatrix names a quantisation
        if stem != file and not is_data and not _NO_MODEL.search(file):
            found.setdefault(_SPLIT.sub(r"\1", stem), []).append(file)
    return found


def quant_of(file: str) -> str:
    """Return the last quantisation in a file's name, such as ``Q4_K_M`` or ``UD-Q4_K_XL``; "" if it has none. Pure."""
    found = _QUANT.findall(_SPLIT.sub("", file.removesuffix(".gguf")))
    return _normal(found[-1]) if found else ""


def _normal(text: str) -> str:
    return re.sub(r"\bFP(?=\d)", "F", text.upper())


def no_model_in_repository(repo: str, files: Iterable[str]) -> ModelError:
    """Return the error for a repository without a model. Pure."""
    others = ", ".join(sorted(file for file in files if file.lower().endswith(".gguf")))
    message = f"{repo} has no GGUF file" + (f" of a model, only {others}" if others else "")
    page = f"https://huggingface.co/models?search={repo.split('/')[-1]}+gguf"
    return _in_pieces(repo, files) or ModelError(message, page)


def _in_pieces(repo: str, files: Iterable[str], wanted: str = "") -> ModelError | None:
    """Return the error for a model whose file the repository has only in pieces; None if there is no such model."""
    pieces: dict[str, list[str]] = {}
    for file in sorted(files, key=lambda name: (len(name), name)):  # sort part10of12 after part9of12
        if match := _PIECE.fullmatch(file):
            pieces.setdefault(match[1], []).append(file)
    for whole, parts in pieces.items():
        if len(parts) > 1 and (wanted in ("", whole, *parts) or _normal(wanted) == quant_of(whole)):
            message = f"{repo} has {whole} in {len(parts)} pieces that must be joined"
            some, joined = shlex.join(parts), shlex.quote(whole)
            return ModelError(message, f"hf download {repo} {some} --local-dir . && cat {some} > {joined}")
    return None


def choose_files(repo: str, files: Sequence[str], quant: str, *, draft: bool = False) -> tuple[str, ...]:
    """Choose the files of a repository that match ``quant``. Pure.

    A quantisation must be the last one in a file's name (:func:`quant_of`); any other word may be anywhere in it. Heads
    (:func:`ggufspec.models.heads.sidecar`) are chosen only for a ``draft``, if ``quant`` begins with their kind or the
    repository has nothing else.

    Raises:
        ModelError: no file matches, or more than one does.
    """
    every = names_of_models(files)
    if not every:
        raise no_model_in_repository(repo, files)
    heads = {stem: parts for stem, parts in every.items() if sidecar(parts[0])}
    left = {stem: parts for stem, parts in every.items() if stem not in heads} or (heads if draft else {})
    if not left:
        there = ", ".join(parts[0] for parts in heads.values())
        raise ModelError(f"{repo} has heads but no target: {there}", f"-hf TARGET -hfd {repo}")
    kind, _, of_kind = quant.partition("-")
    what, usual = "model", USUAL_QUANT if len(left) > 1 else ""
    if draft and kind in SIDECARS:
        left = {stem: parts for stem, parts in heads.items() if sidecar(parts[0]) is SIDECARS[kind]}
        what, usual, quant = f"{kind} head", "", of_kind
        if not left:
            own = "--drafter mtp uses blocks in the target's own file; " if kind == "mtp" else ""
            there = f"; its heads are {', '.join(parts[0] for parts in heads.values())}" if heads else ""
            raise ModelError(f"{repo} has no {kind}-….gguf{there}", f"{own}see {client.model_page_url(repo)}/tree/main")
    wanted = quant or usual
    label, labels = _normal(wanted), {stem: quant_of(parts[0]) for stem, parts in left.items()}
    word = re.compile(rf"(?:^|[-._/]){re.escape(label)}(?=$|[-./])")
    found = [parts for stem, parts in left.items() if not wanted or labels[stem] == label]
    if not found and quant_of(label) == label:  # part of a label may match, such as Q4_K_XL in UD-Q4_K_XL
        found = [parts for stem, parts in left.items() if label in labels[stem].split("-")]
    elif not found:
        found = [parts for stem, parts in left.items() if word.search(_normal(stem))]
    if len(found) == 1:
        return tuple(found[0])
    in_quant = f" in {wanted}" if wanted else ""
    if found:
        raise ModelError(
            f"{repo} has {len(found)} {what}s{in_quant}: " + ", ".join(parts[0] for parts in found),
            f"name the file: {repo}:{found[0][0]}",
        )
    if in_pieces := _in_pieces(repo, files, wanted):
        raise in_pieces
    quants = sorted(set(labels.values()) - {""})
    near = difflib.get_close_matches(label, quants, n=1) or quants[:1] or [next(iter(left.values()))[0]]
    there = ", ".join(quants or list(left))
    of = f"{kind}-" if what != "model" and quants else ""
    raise ModelError(f"{repo} has no {what}{in_quant}; it has {there}", f"for example {repo}:{of}{near[0]}")
