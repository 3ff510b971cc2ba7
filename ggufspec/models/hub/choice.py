"""Resolves a name in a hub repository: which files are models, in which quantisation, and which one is meant."""

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
# NAME.gguf.part1of2, NAME.gguf-split-a, NAME.gguf.aa: made by `split`, joined by `cat`
_PIECE = re.compile(r"(.+\.gguf)[-.](?:split-|part[-_]?)?(?:[a-z]{1,2}|\d{1,4})(?:of\d+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Name:
    """Argument of ``-hf``: ``USER/REPO``, ``USER/REPO:QUANT`` or ``USER/REPO/FILE``, each also with ``@REVISION``."""

    repo: str
    model: str = ""  # a quantisation, a file or the kind of a head; empty: the usual one
    revision: str | None = None  # a branch, a tag or a commit; None is main

    def __str__(self) -> str:
        model, revision = self.model and f":{self.model}", f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{model}{revision}"


def parse(text: str) -> Name:
    """Parse the argument of ``-hf``; GgufspecError if it names no repository. Pure."""
    match = _NAME.fullmatch(text)
    if match is None:
        raise client.no_repository(text)
    return Name(match[1], match[2] or match[3] or "", match[4])


def hub_file(name: str, *, draft: bool = False) -> HubFile:
    """Resolve a :class:`Name`, as llama.cpp's ``-hf`` does; a split model to its first part.

    The default is Q4_K_M, or the only model of the repository. For a draft, the kind of a head next to a target may
    replace the quantisation, with a quantisation of its own: ``mtp``, ``eagle3-Q8_0``.

    Raises:
        GgufspecError: no such repository, none or several files match (lists the choices), or the match is a head and
            no target, or an unsupported kind of draft.
    """
    wanted = parse(name)
    repo, file, revision = wanted.repo, wanted.model, wanted.revision
    if not file.endswith(".gguf"):
        file = client.choose(repo, revision, lambda files: choose(repo, files, file, draft=draft))[0]
        client.check_names(repo, file, revision)
    kind = sidecar(file)
    if kind is not None and not draft:
        raise ModelError(f"{repo}/{file} is {kind.what} and no target", f"-hf TARGET -hfd {repo}/{file}")
    if kind is not None and not kind.drafter:
        hint = f"llama-server -hf {repo} --spec-type {kind.spec_type} runs it; or another draft"
        raise ModelError(f"{repo}/{file} is {kind.what}, which ggufspec cannot run", hint)
    return HubFile(repo, file, revision)


def models(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the models among a repository's files, heads included: all parts in order, by their common name. Pure."""
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        stem = file.removesuffix(".gguf")
        is_data = "imatrix" in stem.lower() and not quant_of(file)  # not a model that was made with one
        if stem != file and not is_data and not _NO_MODEL.search(file):
            found.setdefault(_SPLIT.sub(r"\1", stem), []).append(file)
    return found


def quant_of(file: str) -> str:
    """Return the last quantisation in a file's name, e.g. ``Q4_K_M`` or ``UD-Q4_K_XL``; empty without one. Pure."""
    found = _QUANT.findall(_SPLIT.sub("", file.removesuffix(".gguf")))
    return _normal(found[-1]) if found else ""


def _normal(text: str) -> str:
    return re.sub(r"\bFP(?=\d)", "F", text.upper())


def no_model(repo: str, files: Iterable[str]) -> ModelError:
    """Return the error for a repository without a model. Pure."""
    others = ", ".join(sorted(file for file in files if file.lower().endswith(".gguf")))
    message = f"{repo} has no GGUF file" + (f" of a model: it has {others}" if others else "")
    page = f"https://huggingface.co/models?search={repo.split('/')[-1]}+gguf"
    return _in_pieces(repo, files) or ModelError(message, page)


def _in_pieces(repo: str, files: Iterable[str], wanted: str = "") -> ModelError | None:
    """Return the error for a model that is there in pieces, if there is one."""
    pieces: dict[str, list[str]] = {}
    for file in sorted(files, key=lambda name: (len(name), name)):  # part10of12 comes after part9of12
        if match := _PIECE.fullmatch(file):
            pieces.setdefault(match[1], []).append(file)
    for whole, parts in pieces.items():
        if len(parts) > 1 and (wanted in ("", whole, *parts) or _normal(wanted) == quant_of(whole)):
            message = f"{repo} has {whole} in {len(parts)} pieces that must be joined"
            some, joined = shlex.join(parts), shlex.quote(whole)
            return ModelError(message, f"hf download {repo} {some} --local-dir . && cat {some} > {joined}")
    return None


def choose(repo: str, files: Sequence[str], quant: str, *, draft: bool = False) -> tuple[str, ...]:
    """Choose the files of a repository that match ``quant``. Pure.

    The quantisation at the end of a name decides (:func:`quant_of`); any other word may be anywhere in the name. Heads
    next to a target (:func:`ggufspec.models.heads.sidecar`) match their names and, for a ``draft``, their kind; without
    either only if the repository has nothing else.

    Raises:
        ModelError: no file matches, or more than one does.
    """
    every = models(files)
    if not every:
        raise no_model(repo, files)
    heads = {stem: parts for stem, parts in every.items() if sidecar(parts[0])}
    left = {stem: parts for stem, parts in every.items() if stem not in heads} or (heads if draft else {})
    if not left:
        there = ", ".join(parts[0] for parts in heads.values())
        raise ModelError(f"{repo} has heads and no target: {there}", f"-hf TARGET -hfd {repo}")
    kind, _, of_kind = quant.partition("-")
    what, usual = "model", USUAL_QUANT if len(left) > 1 else ""
    if draft and kind in SIDECARS:
        left = {stem: parts for stem, parts in heads.items() if sidecar(parts[0]) is SIDECARS[kind]}
        what, usual, quant = f"{kind} head", "", of_kind
        if not left:
            own = "--drafter mtp takes blocks of the target's own file; " if kind == "mtp" else ""
            there = f"; its heads are {', '.join(parts[0] for parts in heads.values())}" if heads else ""
            raise ModelError(f"{repo} has no {kind}-….gguf{there}", f"{own}see {client.page(repo)}/tree/main")
    wanted = quant or usual
    label, labels = _normal(wanted), {stem: quant_of(parts[0]) for stem, parts in left.items()}
    word = re.compile(rf"(?:^|[-._/]){re.escape(label)}(?=$|[-./])")
    found = [parts for stem, parts in left.items() if not wanted or labels[stem] == label]
    if not found and quant_of(label) == label:  # part of a label: Q4_K_XL of UD-Q4_K_XL
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
