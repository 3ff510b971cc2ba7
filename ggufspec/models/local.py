"""Search for GGUF models on this disk, including other programs' folders, and for models that can draft for others.

Those folders may be huge, unreadable or broken. Therefore, the search is limited in depth, entries and time, and enters
no folder twice. It skips unusable files and records why. Only the models' headers are read.

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
from ggufspec.files.cache import JsonTable, cache_folder
from ggufspec.models import heads
from ggufspec.models.compat import MAX_SIZE_DIFFERENCE, judge_pair, vocabulary_kind
from ggufspec.models.header import ModelHeader
from ggufspec.models.headers import read_each
from ggufspec.models.hub import choice, client
from ggufspec.models.hub.client import HubFile
from ggufspec.models.profile import known_profiles, load_profile, on_hub
from ggufspec.models.vocabulary import differences_of

HERE, GIVEN = "this folder", "given folder"  # ``program`` of the current folder and of folders from the command line
MOST_MODELS = 200  # maximum number of files whose headers are read
_MOST_ENTRIES = 20_000  # maximum number of directory entries to look at per program
_WALK_S, READ_S = 4.0, 10.0
_MOST_MANIFEST_BYTES = 1 << 20
_PART = re.compile(r"-(\d{5})-of-\d{5}$")
_SMALLER = 0.5  # maximum size of a draft relative to the target, in parameters and bytes per token
_LEAST_BITS = 4.0  # bits per weight below which a draft's tokens are rejected too often
_COMPARED = 1000  # maximum number of cached vocabulary comparisons


@dataclass(frozen=True, slots=True)
class ProgramFolder:
    """Folder in which ``program`` keeps models, and the number of folder levels below it to search."""

    program: str
    folder: Path
    depth: int = 4


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """File of a model (the first part if split); ``name`` is the model's name in its program."""

    name: str
    path: Path
    program: str
    hub: str = ""  # USER/REPO/FILE if ``-hf`` finds the file by that name, else empty
    typed: str = ""  # path as the user would type it, from the current folder or from a folder that the user gave

    @property
    def words(self) -> tuple[str, str]:
        """Return the command-line option and value that name the model as a target."""
        return ("-hf", self.hub) if self.hub else ("-m", self.typed or str(self.path))

    @property
    def draft_words(self) -> tuple[str, str]:
        """Return the command-line option and value that name the model as a draft."""
        return ("-hfd", self.hub) if self.hub else ("-md", self.typed or str(self.path))


@dataclass(frozen=True, slots=True)
class UnlistedFile:
    """Skipped file or folder, with the reason; ``unread``: a limit was reached; ``kind``: label in summaries."""

    path: Path
    why: str
    unread: bool = False
    kind: str = "damaged or unreadable file"


@dataclass(frozen=True)
class LocalModel:
    """Model on this disk, with ``drafts``, the models that can draft for it, best first."""

    file: InstalledModel
    header: ModelHeader
    drafts: tuple[LocalModel, ...] = ()

    @cached_property
    def is_head(self) -> bool:
        """Return whether the model is a head, which can draft but cannot run on its own."""
        return heads.head_kind(self.header) is not None

    @property
    def chats(self) -> bool:
        """Return whether the model has a chat template; a model without one only continues text."""
        return bool(self.header.metadata.get("tokenizer.chat_template"))

    @property
    def parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.header.tensors)

    @property
    def size_label(self) -> str:
        """Return the size in the form used in model names, such as 135M, 1.5B or 8x7B."""
        named = self.header.metadata.get("general.size_label")
        if isinstance(named, str) and re.fullmatch(r"[\w.-]{2,12}", named):
            return named
        count = self.parameters
        return f"{count / 1e6:.0f}M" if count < 0.95e9 else f"{count / 1e9:.{1 if count < 9.95e9 else 0}f}B"

    @cached_property
    def per_token(self) -> tuple[float, float]:
        """Return the parameters and bytes used per token, counting only the experts used in a mixture of experts."""
        share = self.header.experts_used / self.header.experts if self.header.experts else 1.0
        parts = [(share if "_exps." in one.name else 1.0, one) for one in self.header.tensors]
        return sum(part * math.prod(one.shape) for part, one in parts), sum(
            part * one.size_bytes for part, one in parts
        )

    @property
    def quantization(self) -> str:
        """Return the quantisation in the file's name, or else the weight type that accounts for the most bytes."""
        if named := choice.quant_of(self.file.path.name) or choice.quant_of(self.file.name):
            return named
        sizes: Counter[str] = Counter()
        for tensor in self.header.tensors:
            sizes[tensor.type] += tensor.size_bytes
        return sizes.most_common(1)[0][0].upper()


@dataclass
class LocalModels:
    """Models on this disk, and the files and folders that were skipped."""

    models: list[LocalModel] = field(default_factory=list)
    left_out: list[UnlistedFile] = field(default_factory=list)


def program_folders(environment: Mapping[str, str], home: Path) -> list[ProgramFolder]:
    """Return the folders in which programs keep models, some of which may not exist."""

    def named(variable: str, *usual: Path) -> list[Path]:
        given = environment.get(variable)
        return [untrusted.at_home(given)] if given else [*usual]

    if sys.platform == "darwin":
        caches = home / "Library" / "Caches"
    else:
        (caches,) = named("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", home / ".cache")
    ollama = (home / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models"))
    return [
        ProgramFolder("Hugging Face", client.hub_cache_folder()),
        *(ProgramFolder("llama.cpp", folder) for folder in named("LLAMA_CACHE", caches / "llama.cpp")),
        ProgramFolder("LM Studio", home / ".lmstudio" / "models"),
        ProgramFolder("LM Studio", home / ".cache" / "lm-studio" / "models"),
        *(ProgramFolder("Ollama", folder) for folder in named("OLLAMA_MODELS", *ollama)),
    ]


def find_models(
    where: Sequence[ProgramFolder],
    *,
    seconds: float = READ_S,
    headers: Path | None = None,
    on_event: child.Emit | None = None,
) -> LocalModels:
    """Find the models in these folders, largest first, each with its drafts.

    Args:
        where: folders in search order; a file found in several of them belongs to the first.
        seconds: time limit for reading uncached headers and for new comparisons of vocabularies.
        headers: folder of the header cache; default: the user's.
        on_event: called with progress as in :func:`ggufspec.models.headers.read_headers`.
    """
    walk = _Walk(time.monotonic() + _WALK_S)
    walk.inside(cache_folder())  # mark our cache as entered, so that cached headers are not mistaken for models
    walk.left_out.clear()
    files: dict[Path, InstalledModel] = {}
    for place in where:
        walk.entries = 0
        search = {"Hugging Face": _in_hub, "Ollama": _in_ollama}.get(place.program, _in_folder)
        for file in search(place, walk):
            files.setdefault(untrusted.real(file.path), file)
    found = LocalModels(left_out=walk.left_out)
    chosen, others = [*files.values()][:MOST_MODELS], [*files.values()][MOST_MODELS:]
    found.left_out += [UnlistedFile(one.path, f"at most {MOST_MODELS} models are read", unread=True) for one in others]
    until = time.time() + seconds
    for file, read in zip(chosen, read_each([one.path for one in chosen], until, headers, on_event), strict=True):
        if isinstance(read, ModelHeader) and not (why := _unfit(read)):
            found.models.append(LocalModel(file, read))
        elif isinstance(read, ModelHeader):
            found.left_out.append(UnlistedFile(file.path, why, kind="unsupported model"))
        elif read is None:
            found.left_out.append(UnlistedFile(file.path, "its header was not read in time", True))
        else:
            left_out = UnlistedFile(file.path, read.message)
            is_vocabulary = read.message.endswith("has no tensors")
            found.left_out.append(replace(left_out, kind="vocabulary-only file") if is_vocabulary else left_out)
    compare = _Compared(until)
    with_drafts = [replace(one, drafts=_drafts(one, found.models, compare)) for one in found.models]
    found.models = sorted(with_drafts, key=lambda one: (one.is_head, -one.header.size_bytes, one.file.name))
    return found


def drafts_for(target: Path, header: ModelHeader, found: LocalModels) -> tuple[LocalModel, ...]:
    """Return the models in ``found`` that can draft for a target, best first."""
    own = InstalledModel(target.stem, target, "")
    return _drafts(LocalModel(own, header), found.models, _Compared(time.time() + 1))


def first_choice(models: Sequence[LocalModel], room_bytes: int) -> LocalModel | None:
    """Choose a target to start with that fits in ``room_bytes`` with its draft; return None if there are no targets.

    Prefer targets with a chat template, then those with a draft, then larger ones. If none fits, choose the smallest.
    """
    targets = [one for one in models if not one.is_head]

    def rank(one: LocalModel) -> tuple[bool, bool, bool, int]:
        size = one.header.size_bytes + (one.drafts[0].header.size_bytes if one.drafts else 0)
        fits = size <= room_bytes
        return fits, fits and one.chats, fits and bool(one.drafts), size if fits else -size

    return max(targets, key=rank, default=None)


def suggested(names: Sequence[str], size_bytes: int) -> HubFile | None:
    """Return the draft model of a profile whose target belongs to the same family as ``names``, or None.

    Prefer the profile whose target is nearest in size. Heads are not suggested, because each is made for one target.
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
    """Return (target family, target bytes, draft bytes, draft) for each profile with a draft model on the hub."""
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
    """Return the part of a model's name before its size, such as ``qwen2.5coder`` for ``Qwen2.5-Coder-7B``, or "".

    Llama 3.1, 3.2 and 3.3 count as one family, because they share a vocabulary.
    """
    words = re.split(r"[-_ ]+", name.rpartition("/")[2].lower())
    sizes = [index for index, word in enumerate(words) if re.fullmatch(r"[ae]?\d+(\.\d+)?[bm]", word)]
    before = "".join(word for word in words[: sizes[0]] if word != "meta") if sizes else ""
    return re.sub(r"(llama3\.)[123]$", r"\g<1>1", before)


# ---- the folders -----------------------------------------------------------------------------------------------------


@dataclass
class _Walk:
    """Bounded walk through folders, which records the entered folders and the skipped files."""

    end: float  # deadline, in ``time.monotonic`` seconds
    entries: int = 0  # entries seen in the current program's folders
    entered: set[tuple[int, int]] = field(default_factory=set)
    left_out: list[UnlistedFile] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.entries > _MOST_ENTRIES or time.monotonic() > self.end

    def inside(self, folder: Path) -> list[os.DirEntry[str]]:
        """Return a folder's entries sorted by name; none if it is absent, unreadable or already entered."""
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
                        self.left_out.append(UnlistedFile(folder, why, unread=True))
                        break
                    found.append(entry)
            return sorted(found, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            self.left_out.append(UnlistedFile(folder, f"the folder cannot be read: {why}", kind="unreadable folder"))
            return []

    def files(self, folder: Path, depth: int) -> Iterator[Path]:
        """Yield the files in a folder and its visible subfolders, down to ``depth`` levels."""
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
        """Yield (path, name) of each GGUF model; for a split model, the path of its first part."""
        for path in self.files(folder, depth):
            if path.suffix.lower() != ".gguf" or not _is_text(path):
                continue
            if not choice.names_of_models([path.name.removesuffix(path.suffix) + ".gguf"]):
                why = "by its name it is not a model but a projector, an adapter or an importance matrix"
                self.left_out.append(UnlistedFile(path, why, kind="projector or adapter"))
                continue
            part = _PART.search(path.stem)
            if part and part[1] != "00001":
                first = path.with_name(f"{path.stem[: part.start(1)]}00001{path.stem[part.end(1) :]}{path.suffix}")
                if not os.path.exists(first):  # noqa: PTH110  # unlike Path.exists, this never raises
                    self.left_out.append(
                        UnlistedFile(path, f"its first part is missing: {first.name}", kind="incomplete model")
                    )
                continue
            yield path, path.stem[: part.start()] if part else path.stem


def _is_text(path: Path) -> bool:
    """Return whether a path is valid UTF-8, which the header cache requires."""
    return os.fsencode(path) == str(path).encode(errors="replace")


def _in_folder(place: ProgramFolder, walk: _Walk) -> Iterator[InstalledModel]:
    for path, name in walk.models(place.folder, place.depth):
        typed = {HERE: str(path.relative_to(place.folder)), GIVEN: str(path)}.get(place.program, "")
        yield InstalledModel(
            name, path.absolute(), place.program, typed=f"./{typed}" if typed.startswith("-") else typed
        )


def _in_hub(place: ProgramFolder, walk: _Walk) -> Iterator[InstalledModel]:
    """Find models in ``models--USER--REPO/snapshots/COMMIT/FILE``; ``-hf`` finds only those on the main branch."""
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
                yield InstalledModel(name, path, place.program, f"{repo}/{file}" if by_name else "")


def _in_ollama(place: ProgramFolder, walk: _Walk) -> Iterator[InstalledModel]:
    """Find models in ``manifests/HOST/USER/NAME/TAG``, which are JSON files that name ``blobs/sha256-DIGEST``."""
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
            walk.left_out.append(UnlistedFile(path, error.message))
            continue
        blob = place.folder / "blobs" / f"sha256-{digest}"
        if not digest:
            walk.left_out.append(UnlistedFile(path, "it names no model", kind="incomplete model"))
        elif not untrusted.is_file(blob):
            walk.left_out.append(UnlistedFile(blob, f"it is missing, but {name} needs it", kind="incomplete model"))
        else:
            yield InstalledModel(name, blob.absolute(), place.program)


def _model_layer(manifest: object) -> str:
    """Return the digest of the model that an Ollama manifest names; "" if it names none."""
    layers = manifest.get("layers") if isinstance(manifest, dict) else None
    for layer in layers if isinstance(layers, list) else ():
        if isinstance(layer, dict) and layer.get("mediaType") == "application/vnd.ollama.image.model":
            found = re.fullmatch(r"sha256[:-]([0-9a-f]{64})", str(layer.get("digest")))
            return found[1] if found else ""
    return ""


# ---- which drafts for which ------------------------------------------------------------------------------------------


def _unfit(header: ModelHeader) -> str:
    """Return the reason why a model cannot be part of any pair; "" if it can."""
    kind = heads.head_kind(header)
    if kind is not None:
        return "" if kind.drafter else f"it is {kind.what}, which ggufspec cannot run"
    if any(tensor.name.startswith(("v.", "mm.")) for tensor in header.tensors):
        return "it contains an image encoder, as Ollama packs them, so llama.cpp cannot load it"
    verdict = judge_pair(header, header, lambda: None)
    return "; ".join(verdict.reasons).replace("the target", "it") if verdict.answer == "no" else ""


def _drafts(
    target: LocalModel, models: Sequence[LocalModel], compare: Callable[[LocalModel, LocalModel], str | None]
) -> tuple[LocalModel, ...]:
    """Return the ``models`` that can draft for a target, best first."""
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
        verdict = judge_pair(target.header, one.header, lambda one=one: compare(target, one))  # type: ignore[misc]
        if verdict.answer == "no":
            continue
        is_coarse = 8 * own_size / own < _LEAST_BITS
        found.append(((verdict.answer != "yes", is_coarse, own, own_size), one))
    return tuple(one for _, one in sorted(found, key=lambda pair: pair[0]))


def _alike(target: ModelHeader, draft: ModelHeader) -> bool:
    """Return whether two models may share a vocabulary, as a quick check before the slower :func:`judge_pair`."""
    ours, theirs = target.tokenizer, draft.tokenizer
    return vocabulary_kind(ours) == vocabulary_kind(theirs) and abs(ours.size - theirs.size) <= MAX_SIZE_DIFFERENCE


class _Compared:
    """Callable that compares the token texts of two vocabularies, with results cached by the vocabularies' digests."""

    def __init__(self, until: float) -> None:
        self._until = until
        self._table = JsonTable(cache_folder() / "vocabularies.json", str, _COMPARED)
        self._known: dict[str, str] = {}

    def __call__(self, target: LocalModel, draft: LocalModel) -> str | None:
        """Describe the difference in words, or say why it is unknown; return None if the vocabularies agree."""
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
