"""Finds the GGUF models on this disk, in the folders of other programs too, and which of them can draft for which.

Such folders may be huge, unreadable or broken. The search is bounded in depth, in entries and in time, enters no folder
twice, and leaves out what it cannot use, each with its reason. Of a model only the header is read.

Sources: ``fs_get_cache_directory`` in common/common.cpp (llama.cpp), file_download.py (huggingface_hub), and
``manifest/`` and ``types/model`` in github.com/ollama/ollama.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

from ggufspec import child
from ggufspec.errors import ChildError, GgufspecError
from ggufspec.files import untrusted
from ggufspec.files.cache import Table, cache_folder
from ggufspec.models import heads
from ggufspec.models.compat import MAX_SIZE_DIFFERENCE, judge, kind_of
from ggufspec.models.header import ModelHeader
from ggufspec.models.headers import read_each
from ggufspec.models.hub import choice, client
from ggufspec.models.hub.client import HubFile
from ggufspec.models.profile import known_profiles, load_profile, on_hub
from ggufspec.models.vocabulary import differences_of

HERE = "this folder"  # the program of the current one
MOST_MODELS = 200  # files whose headers are read
_MOST_ENTRIES = 20_000  # of the folders of a program
_WALK_S, READ_S = 4.0, 10.0
_MOST_MANIFEST_BYTES = 1 << 20
_PART = re.compile(r"-(\d{5})-of-\d{5}$")
_SMALLER = 0.5  # a draft has at most this share of the target's parameters, and of its bytes per token
_LEAST_BITS = 4.0  # per weight; below it a draft is wrong too often
_COMPARED = 1000  # pairs of vocabularies whose comparison is cached


@dataclass(frozen=True, slots=True)
class Place:
    """Folder in which ``program`` keeps models, and how many folders deep they are."""

    program: str
    folder: Path
    depth: int = 4


@dataclass(frozen=True, slots=True)
class File:
    """File of a model, or the first of its parts; ``name`` is what its program calls it."""

    name: str
    path: Path
    program: str
    hub: str = ""  # USER/REPO/FILE, if ``-hf`` finds it by that
    typed: str = ""  # from the current folder, if it is in that

    @property
    def words(self) -> tuple[str, str]:
        """Return the option that names it as a target."""
        return ("-hf", self.hub) if self.hub else ("-m", self.typed or str(self.path))

    @property
    def draft_words(self) -> tuple[str, str]:
        """Return the option that names it as a draft."""
        return ("-hfd", self.hub) if self.hub else ("-md", self.typed or str(self.path))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """File or folder that is not listed, and why. ``unread`` ones were not reached in time."""

    path: Path
    why: str
    unread: bool = False


@dataclass(frozen=True)
class LocalModel:
    """Model on this disk. ``drafts`` can draft for it, the best first."""

    file: File
    header: ModelHeader
    drafts: tuple[LocalModel, ...] = ()

    @cached_property
    def is_head(self) -> bool:
        """Return whether it can draft and not answer."""
        return heads.kind_of(self.header) is not None

    @property
    def chats(self) -> bool:
        """Return whether the model has a chat template; otherwise it only continues text."""
        return bool(self.header.metadata.get("tokenizer.chat_template"))

    @property
    def parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.header.tensors)

    @property
    def size_label(self) -> str:
        """Return the size by which the model is named: 135M, 1.5B, 8x7B."""
        named = self.header.metadata.get("general.size_label")
        if isinstance(named, str) and re.fullmatch(r"[\w.-]{2,12}", named):
            return named
        count = self.parameters
        return f"{count / 1e6:.0f}M" if count < 0.95e9 else f"{count / 1e9:.{1 if count < 9.95e9 else 0}f}B"

    @cached_property
    def per_token(self) -> tuple[float, float]:
        """Return the parameters and bytes that a token needs: of a mixture of experts only the experts that it uses."""
        share = self.header.experts_used / self.header.experts if self.header.experts else 1.0
        parts = [(share if "_exps." in one.name else 1.0, one) for one in self.header.tensors]
        return sum(part * math.prod(one.shape) for part, one in parts), sum(
            part * one.size_bytes for part, one in parts
        )

    @property
    def quantization(self) -> str:
        """Return the quantization by the name of the file, else the type of most weights."""
        if named := choice.quant_of(self.file.path.name) or choice.quant_of(self.file.name):
            return named
        sizes: Counter[str] = Counter()
        for tensor in self.header.tensors:
            sizes[tensor.type] += tensor.size_bytes
        return sizes.most_common(1)[0][0].upper()


@dataclass
class Found:
    """Models on this disk, and files and folders that were left out."""

    models: list[LocalModel] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


def places(environment: Mapping[str, str], home: Path) -> list[Place]:
    """Return the folders in which programs keep models, whether they exist or not."""

    def named(variable: str, *usual: Path) -> list[Path]:
        given = environment.get(variable)
        return [Path(os.path.expanduser(given))] if given else [*usual]  # noqa: PTH111  # never raises

    if sys.platform == "darwin":
        caches = home / "Library" / "Caches"
    else:
        (caches,) = named("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", home / ".cache")
    ollama = (home / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models"))
    return [
        Place("Hugging Face", client.cache_folder()),
        *(Place("llama.cpp", folder) for folder in named("LLAMA_CACHE", caches / "llama.cpp")),
        Place("LM Studio", home / ".lmstudio" / "models"),
        Place("LM Studio", home / ".cache" / "lm-studio" / "models"),
        *(Place("Ollama", folder) for folder in named("OLLAMA_MODELS", *ollama)),
    ]


def find(
    where: Sequence[Place], *, seconds: float = READ_S, headers: Path | None = None, on_event: child.Emit | None = None
) -> Found:
    """Find the models in these folders, with the drafts of each; the largest first.

    Args:
        where: searched in this order; a file that several have is the first one's.
        seconds: the time for headers that are not cached yet, and for vocabularies that were not compared yet.
        headers: the cache of headers; the user's by default.
        on_event: gets headers as they are read: :func:`ggufspec.models.headers.read_headers`.
    """
    walk = _Walk(time.monotonic() + _WALK_S)
    walk.inside(cache_folder())  # whose headers are no models: it is entered once
    walk.left_out.clear()
    files: dict[Path, File] = {}
    for place in where:
        walk.entries = 0
        search = {"Hugging Face": _in_hub, "Ollama": _in_ollama}.get(place.program, _in_folder)
        for file in search(place, walk):
            files.setdefault(untrusted.real(file.path), file)
    found = Found(left_out=walk.left_out)
    chosen, others = [*files.values()][:MOST_MODELS], [*files.values()][MOST_MODELS:]
    found.left_out += [LeftOut(one.path, f"{MOST_MODELS} models are read at most", unread=True) for one in others]
    until = time.time() + seconds
    for file, read in zip(chosen, read_each([one.path for one in chosen], until, headers, on_event), strict=True):
        if isinstance(read, ModelHeader) and not (why := _unfit(read)):
            found.models.append(LocalModel(file, read))
        elif isinstance(read, ModelHeader):
            found.left_out.append(LeftOut(file.path, why))
        elif read is None:
            found.left_out.append(LeftOut(file.path, "its header was not read in time", True))
        else:
            found.left_out.append(LeftOut(file.path, read.message))
    compare = _Compared(until)
    with_drafts = [replace(one, drafts=_drafts(one, found.models, compare)) for one in found.models]
    found.models = sorted(with_drafts, key=lambda one: (one.is_head, -one.header.size_bytes, one.file.name))
    return found


def drafts_for(target: Path, header: ModelHeader, found: Found) -> tuple[LocalModel, ...]:
    """Return the models of ``found`` that can draft for a target, the best first."""
    own = File(target.stem, target, "")
    return _drafts(LocalModel(own, header), found.models, _Compared(time.time() + 1))


def best(models: Sequence[LocalModel], room_bytes: int) -> LocalModel | None:
    """Choose the target to begin with, or return None: one that fits into ``room_bytes`` with its draft, and chats.

    A chat template decides before a draft, and a draft before size. If no target fits, it is the smallest.
    """
    targets = [one for one in models if not one.is_head]

    def rank(one: LocalModel) -> tuple[bool, bool, bool, int]:
        size = one.header.size_bytes + (one.drafts[0].header.size_bytes if one.drafts else 0)
        fits = size <= room_bytes
        return fits, fits and one.chats, fits and bool(one.drafts), size if fits else -size

    return max(targets, key=rank, default=None)


def suggested(names: Sequence[str], size_bytes: int) -> HubFile | None:
    """Return the draft that a profile has for a target of this family, by its ``names``; None without one.

    If several profiles have one, the profile decides whose target is nearest in size. A head is made for one target,
    and is not suggested.
    """
    families = {family(name) for name in names} - {""}
    found = [
        (abs(math.log(target_bytes / size_bytes)), place)
        for own, target_bytes, draft_bytes, place in _offers()
        if own in families and draft_bytes <= _SMALLER * size_bytes
    ]
    return min(found, key=lambda pair: pair[0])[1] if found else None


@cache
def _offers() -> list[tuple[str, int, int, HubFile]]:
    """Return the family of the target, the bytes of both models and the draft of each profile with a draft model."""
    found = []
    for name in known_profiles():
        with suppress(GgufspecError):
            profile = load_profile(name)
            target, draft = profile.target, profile.draft
            place = on_hub(draft) if draft and not profile.group and not heads.sidecar(draft.file) else None
            if place and draft and draft.size_bytes and target.size_bytes:
                found.append((family(target.file), target.size_bytes, draft.size_bytes, place))
    return found


def family(name: str) -> str:
    """Return the part of a model's name before its size: ``qwen2.5coder`` of ``Qwen2.5-Coder-7B``; empty without one.

    Llama 3.1, 3.2 and 3.3 have one vocabulary.
    """
    words = re.split(r"[-_ ]+", name.rpartition("/")[2].lower())
    sizes = [index for index, word in enumerate(words) if re.fullmatch(r"[ae]?\d+(\.\d+)?[bm]", word)]
    before = "".join(word for word in words[: sizes[0]] if word != "meta") if sizes else ""
    return re.sub(r"(llama3\.)[123]$", r"\g<1>1", before)


# ---- the folders -----------------------------------------------------------------------------------------------------


@dataclass
class _Walk:
    """Bounded walk through folders: what it has left out, and the folders that it has entered."""

    end: float  # of ``time.monotonic``
    entries: int = 0  # of this place
    entered: set[tuple[int, int]] = field(default_factory=set)
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.entries > _MOST_ENTRIES or time.monotonic() > self.end

    def inside(self, folder: Path) -> list[os.DirEntry[str]]:
        """List a folder in the order of names; nothing if it is absent, unreadable or was entered before."""
        try:
            about = folder.stat()
            if (about.st_dev, about.st_ino) in self.entered:
                return []
            self.entered.add((about.st_dev, about.st_ino))
            found = []
            with os.scandir(folder) as entries:
                for entry in entries:
                    self.entries += 1
                    if self.is_over:
                        why = "it has too many files, or is too slow: the search ended here"
                        self.left_out.append(LeftOut(folder, why, unread=True))
                        break
                    found.append(entry)
            return sorted(found, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            self.left_out.append(LeftOut(folder, f"the folder cannot be read: {why}"))
            return []

    def files(self, folder: Path, depth: int) -> Iterator[Path]:
        """Yield the files in a folder and in those below it, except hidden folders."""
        for entry in self.inside(folder):
            path = Path(entry.path)
            try:
                is_folder = entry.is_dir()
            except OSError:
                continue
            if not is_folder:
                yield path
            elif depth > 0 and not entry.name.startswith(".") and not self.is_over:
                yield from self.files(path, depth - 1)

    def models(self, folder: Path, depth: int) -> Iterator[tuple[Path, str]]:
        """Yield the GGUF files of models, of a split model the first part, with a name for each."""
        for path in self.files(folder, depth):
            if path.suffix.lower() != ".gguf" or not _is_text(path):
                continue
            if not choice.models([path.name.removesuffix(path.suffix) + ".gguf"]):
                self.left_out.append(LeftOut(path, "it is no model by its name: a projector, an adapter or a matrix"))
                continue
            part = _PART.search(path.stem)
            if part and part[1] != "00001":
                first = path.with_name(f"{path.stem[: part.start(1)]}00001{path.stem[part.end(1) :]}{path.suffix}")
                if not os.path.exists(first):  # noqa: PTH110  # never raises
                    self.left_out.append(LeftOut(path, f"its first part is missing: {first.name}"))
                continue
            yield path, path.stem[: part.start()] if part else path.stem


def _is_text(path: Path) -> bool:
    """Return whether a name is UTF-8: the header cache takes no other."""
    return os.fsencode(path) == str(path).encode(errors="replace")


def _in_folder(place: Place, walk: _Walk) -> Iterator[File]:
    for path, name in walk.models(place.folder, place.depth):
        typed = str(path.relative_to(place.folder)) if place.program == HERE else ""
        yield File(name, path.absolute(), place.program, typed=f"./{typed}" if typed.startswith("-") else typed)


def _in_hub(place: Place, walk: _Walk) -> Iterator[File]:
    """Search ``models--USER--REPO/snapshots/COMMIT/FILE``; ``-hf`` finds files of the main branch."""
    for entry in walk.inside(place.folder):
        kind, *names = entry.name.split("--")
        if kind != "models":
            continue
        repo, folder = "/".join(names), Path(entry.path)
        main = client.commit_of(folder / "refs" / "main")
        snapshots = sorted(walk.inside(folder / "snapshots"), key=lambda one: one.name != main)
        for snapshot in snapshots:
            for path, name in walk.models(Path(snapshot.path), place.depth):
                file = path.relative_to(snapshot.path).as_posix()
                by_name = snapshot.name == main and len(names) == 2
                yield File(name, path, place.program, f"{repo}/{file}" if by_name else "")


def _in_ollama(place: Place, walk: _Walk) -> Iterator[File]:
    """Search ``manifests/HOST/USER/NAME/TAG``, JSON that names ``blobs/sha256-DIGEST``."""
    folder = place.folder / "manifests"
    for path in walk.files(folder, place.depth):
        host, *words = path.relative_to(folder).parts
        if len(words) < 2:
            continue
        owner = words[:-2] if host == "registry.ollama.ai" else [host, *words[:-2]]
        name = "/".join([*(word for word in owner if word != "library"), f"{words[-2]}:{words[-1]}"])
        try:
            digest = _model_layer(untrusted.parse_json(untrusted.read_text(path, _MOST_MANIFEST_BYTES), str(path)))
        except GgufspecError as error:
            walk.left_out.append(LeftOut(path, error.message))
            continue
        blob = place.folder / "blobs" / f"sha256-{digest}"
        if not digest:
            walk.left_out.append(LeftOut(path, "it names no model"))
        elif not untrusted.is_file(blob):
            walk.left_out.append(LeftOut(blob, f"it is not there, and {name} is made of it"))
        else:
            yield File(name, blob.absolute(), place.program)


def _model_layer(manifest: object) -> str:
    """Return the digest of the model in an Ollama manifest; empty without one."""
    layers = manifest.get("layers") if isinstance(manifest, dict) else None
    for layer in layers if isinstance(layers, list) else ():
        if isinstance(layer, dict) and layer.get("mediaType") == "application/vnd.ollama.image.model":
            found = re.fullmatch(r"sha256[:-]([0-9a-f]{64})", str(layer.get("digest")))
            return found[1] if found else ""
    return ""


# ---- which drafts for which ------------------------------------------------------------------------------------------


def _unfit(header: ModelHeader) -> str:
    """Explain why a model can be in no pair; empty if it can be in one."""
    kind = heads.kind_of(header)
    if kind is not None:
        return "" if kind.drafter else f"it is {kind.what}, which ggufspec cannot run"
    if any(tensor.name.startswith(("v.", "mm.")) for tensor in header.tensors):
        return "it has an image encoder inside, as Ollama packs them: llama.cpp cannot load it"
    verdict = judge(header, header, lambda: None)
    return "; ".join(verdict.reasons).replace("the target", "it") if verdict.answer == "no" else ""


def _drafts(
    target: LocalModel, models: Sequence[LocalModel], compare: Callable[[LocalModel, LocalModel], str | None]
) -> tuple[LocalModel, ...]:
    """Return those of ``models`` that can draft for a target, the best first."""
    if target.is_head:
        return ()
    found: list[tuple[tuple[object, ...], LocalModel]] = []
    numbers, size = target.per_token
    for one in models:
        if one.file.path == target.file.path or not _alike(target.header, one.header):
            continue
        own, own_size = one.per_token
        if not one.is_head and (own > _SMALLER * numbers or own_size > _SMALLER * size):
            continue
        verdict = judge(target.header, one.header, lambda one=one: compare(target, one))  # type: ignore[misc]
        if verdict.answer == "no":
            continue
        is_coarse = 8 * own_size / own < _LEAST_BITS
        found.append(((verdict.answer != "yes", is_coarse, own, own_size), one))
    return tuple(one for _, one in sorted(found, key=lambda pair: pair[0]))


def _alike(target: ModelHeader, draft: ModelHeader) -> bool:
    """Return whether two models may share a vocabulary: a quick look before :func:`judge`, which takes longer."""
    ours, theirs = target.tokenizer, draft.tokenizer
    return kind_of(ours) == kind_of(theirs) and abs(ours.size - theirs.size) <= MAX_SIZE_DIFFERENCE


class _Compared:
    """Comparison of the texts of two vocabularies, cached by their digests."""

    def __init__(self, until: float) -> None:
        self._until = until
        self._table = Table(cache_folder() / "vocabularies.json", str, _COMPARED)
        self._known: dict[str, str] = {}

    def __call__(self, target: LocalModel, draft: LocalModel) -> str | None:
        """Return the difference in words; None without one."""
        key = " ".join(sorted((target.header.tokenizer.digest, draft.header.tokenizer.digest)))
        if key not in self._known:
            known = self._table.get(key)
            if known is None and time.time() > self._until:
                return "their vocabularies were not compared in time"
            if known is None:
                try:
                    known = differences_of(target.file.path, draft.file.path) or ""
                except ChildError as error:
                    known = error.message
                self._table.put(key, known)
            self._known[key] = known
        return self._known[key] or None
