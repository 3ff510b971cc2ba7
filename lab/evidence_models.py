"""The models for evidence: shapes by scale, settings of the measurements, and their files.

All are expansions of the bundled pair (:mod:`lab.expansion`): they cost as much as the shape; their text and their
acceptance are the small pair's as far as the weight types allow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ggufspec import child
from ggufspec.errors import GgufspecError
from ggufspec.hardware import host
from ggufspec.models.headers import KnownHeader, read_headers
from ggufspec.models.profile import demo_pair
from lab import expansion
from lab.expansion import Fill, Model

# (target, draft); the first pair is that of the notebook that started this project.
PAIRS = {
    "70b+8b": (Model("llama3-70b", "Q3_K_S"), Model("llama3-8b", "Q3_K_L")),
    "14b+0.5b": (Model("qwen2.5-14b", "Q4_K_M"), Model("qwen2.5-0.5b", "Q8_0")),
    "8b+1b": (Model("llama3-8b", "Q4_K_M"), Model("llama3.2-1b", "Q8_0")),
    "small": (Model("small", "Q4_K_M"), Model("small-draft", "Q8_0")),
    "tiny": (Model("tiny", "Q3_K_S"), Model("tiny-draft", "Q3_K_L")),
}

TARGET, DRAFT, HOPELESS = "target", "draft", "hopeless"

# Approximate bits per weight of a file type's mixture: exact sizes are known once files are made.
_BITS = {"F16": 16.1, "Q8_0": 8.5, "Q6_K": 6.6, "Q4_K_M": 4.9, "Q4_0": 4.6, "Q3_K_L": 4.3, "Q3_K_S": 3.5}
_ROOM_BYTES = 4 << 30  # RAM to leave free
_SPARE_BYTES = 1 << 30  # disk to leave free


@dataclass(frozen=True, slots=True)
class File:
    """One model file: a shape, a file type, and the model that is expanded to it."""

    model: Model
    role: str = TARGET

    @property
    def name(self) -> str:
        """File name on the disk."""
        ending = f"-{self.role}" if self.role != TARGET else ""
        return f"{self.model.shape}-{self.model.type}{ending}.gguf"

    @property
    def about_bytes(self) -> int:
        """Size before it is made, a few per cent off."""
        return int(expansion.SHAPES[self.model.shape].parameters() * _BITS.get(self.model.type, 6.0) / 8)

    @property
    def holed_bytes(self) -> int:
        """Approximate disk space if untrained weights are holes: mostly the padded vocabulary."""
        shape = expansion.SHAPES[self.model.shape]
        return int(shape.vocab * shape.width * max(_BITS.get(self.model.type, 6.0), _BITS["Q6_K"]) / 8)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft."""

    name: str
    target: File
    draft: File

    @property
    def about_bytes(self) -> int:
        """Size of both files."""
        return self.target.about_bytes + self.draft.about_bytes


def _pair(name: str) -> Pair:
    target, draft = PAIRS[name]
    return Pair(name, File(target), File(draft, DRAFT))


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the models and extent of the measurements.

    Args:
        name: ``full``, ``small`` or ``tiny``.
        notebook: pair whose target does not fit the device.
        offloaded: pairs that fit it wholly.
        certified: pair of the certificate.
        moe: a mixture of experts, for its bytes.
        types: file types of part c, in the shape of ``offloaded``'s last target.
        ctx_size: tokens of context.
        depth: tokens in the cache while a batch is timed.
        tokens: tokens of an answer.
        notebook_tokens: tokens of an answer of part d, whose target is slow.
        prompts: indices of the bundled prompts.
        repetitions: for parts d, e and f.
        lengths: fixed draft lengths of part d.
        peer_lengths: draft lengths of part e.
        widths: batch sizes of part c.
        wide: further batch sizes of part c, if time is left.
        rounds: timings per batch size.
        notebook_layers: share of the target's layers that the notebook had on its GPU, without a plan.
        checked: prompts of the certificate.
        checked_tokens: tokens of each of its answers.
        calibration: keywords of :class:`ggufspec.planning.machine_profile.MachineProfileJob` for a shorter calibration.
    """

    name: str
    notebook: Pair
    offloaded: tuple[Pair, ...]
    certified: Pair
    moe: File
    types: tuple[str, ...]
    ctx_size: int
    depth: int
    tokens: int
    notebook_tokens: int
    prompts: tuple[int, ...]
    repetitions: int
    lengths: tuple[int, ...]
    peer_lengths: tuple[int, ...]
    widths: tuple[int, ...]
    wide: tuple[int, ...]
    rounds: int
    checked: int
    checked_tokens: int
    calibration: tuple[tuple[str, object], ...] = ()
    notebook_layers: float = 45 / 81


_EVERY_LENGTH = tuple(range(1, 9))

SCALES = {
    "full": Scale(
        name="full",
        notebook=_pair("70b+8b"),
        offloaded=(_pair("14b+0.5b"), _pair("8b+1b")),
        certified=_pair("8b+1b"),
        moe=File(Model("mixtral-8x7b", "Q3_K_S")),
        types=("Q4_K_M", "Q8_0", "Q3_K_S", "Q4_0", "F16"),
        ctx_size=4096,
        depth=512,
        tokens=128,
        notebook_tokens=32,
        prompts=(1, 3),
        repetitions=5,
        lengths=_EVERY_LENGTH,
        peer_lengths=(2, 3, 4, 6),
        widths=(*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64, 128, 256),
        wide=(),
        rounds=5,
        checked=4,
        checked_tokens=64,
    ),
    "small": Scale(
        name="small",
        notebook=_pair("small"),
        offloaded=(_pair("small"),),
        certified=_pair("tiny"),
        moe=File(Model("small-moe", "Q4_K_M")),
        types=("Q4_K_M", "Q8_0", "Q4_0", "Q3_K_S"),
        ctx_size=1024,
        depth=64,
        tokens=16,
        notebook_tokens=16,
        prompts=(1,),
        repetitions=3,
        lengths=_EVERY_LENGTH,
        peer_lengths=(2, 3, 4, 7),
        widths=(1, 2, 3, 4, 5, 6, 8, 16, 32),
        wide=(7, 10, 12, 14, 20, 24, 28, 40, 48, 56, 64, 128, 256),
        rounds=3,
        checked=1,
        checked_tokens=12,
        calibration=(("types", ("f16", "q4_K", "q8_0")), ("device_s", 4.0), ("model_s", 0.3)),
    ),
    "tiny": Scale(
        name="tiny",
        notebook=_pair("tiny"),
        offloaded=(_pair("tiny"),),
        certified=_pair("tiny"),
        moe=File(Model("tiny-moe", "Q8_0")),
        types=("Q8_0", "Q3_K_S"),
        ctx_size=512,
        depth=32,
        tokens=8,
        notebook_tokens=8,
        prompts=(1,),
        repetitions=2,
        lengths=(1, 4),
        peer_lengths=(4,),
        widths=(1, 2, 4, 8),
        wide=(16,),
        rounds=3,
        checked=1,
        checked_tokens=6,
        calibration=(
            ("types", ("f16", "q8_0")),
            ("batch_sizes", (1, 2, 8)),
            ("wide_bytes", 8 << 20),
            ("rounds", 3),
            ("device_s", 1.0),
            ("model_s", 0.05),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Space:
    """Space for models. ``device_bytes`` is the ceiling; a device ``in_memory`` uses the RAM, too."""

    disk_bytes: int
    memory_bytes: int
    device_bytes: int
    in_memory: bool


def choose_scale(asked: str, space: Space, fill: Fill) -> tuple[Scale, tuple[str, ...]]:
    """Return the requested scale, and why it is not the full one.

    Args:
        asked: ``full``, ``small``, ``tiny`` or ``auto``.
        space: for ``auto``; the disk space of existing models counts as free.
        fill: holes take little disk.

    Raises:
        GgufspecError: the full one is requested and there is not enough space.
    """
    if asked in ("small", "tiny"):
        return SCALES[asked], ()
    if asked == "auto" and space.in_memory:
        return SCALES["small"], (
            "small shapes: the device is this machine's CPU (--shapes full insists on large ones)",
        )
    short = lacking(SCALES["full"], space, fill)
    if not short:
        return SCALES["full"], ()
    if asked == "full":
        raise GgufspecError(
            f"there is no room for the full shapes: {short}", "--shapes auto takes smaller ones in a new --folder"
        )
    return SCALES["small"], (f"small shapes, since there is no room for the full ones: {short}",)


def lacking(scale: Scale, space: Space, fill: Fill) -> str:
    """Describe what is too small for a scale; empty if nothing is."""
    pairs = (scale.notebook, *scale.offloaded, scale.certified)
    in_memory = 2 if space.in_memory else 1
    memory = in_memory * max(*(pair.about_bytes for pair in pairs), scale.moe.about_bytes) + _ROOM_BYTES
    device = max(int(1.15 * pair.about_bytes) for pair in scale.offloaded) + _SPARE_BYTES
    own = scale.offloaded[-1]
    files = {file for pair in pairs for file in (pair.target, pair.draft)}
    files |= {scale.moe, File(own.draft.model, HOPELESS)}
    files |= {File(Model(own.target.model.shape, kind)) for kind in scale.types}
    disk = sum(file.about_bytes if fill == "blocks" else file.holed_bytes for file in files) + _SPARE_BYTES
    said = [
        f"{_gb(have)} of {what}, and {_gb(need)} are needed"
        for what, have, need in (
            ("disk", space.disk_bytes, disk),
            ("memory", space.memory_bytes, memory),
            ("the device's memory", space.device_bytes, device),
        )
        if have < need
    ]
    return "; ".join(said)


def kept_bytes(folder: Path) -> int:
    """Return the disk space of the models in a folder."""
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.gguf"))


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


class Shelf:
    """The model files, made at first use and saved.

    Args:
        folder: their location, with a subfolder for each ``fill``.
        fill: content of untrained weights.
        say: called with the progress of making a file.
        verbose: let llama.cpp's log through.
    """

    def __init__(self, folder: Path, fill: Fill, *, say: Callable[[str], object] = str, verbose: bool = False) -> None:
        self.say = say
        self.folder, self.fill, self._verbose = folder / fill, fill, verbose
        self._known: dict[str, KnownHeader] = {}

    def has(self, file: File) -> bool:
        """Return True if it exists already."""
        return (self.folder / file.name).exists()

    def path(self, file: File) -> Path:
        """Return the file, made if it does not exist.

        Raises:
            GgufspecError: there is not enough space.
            Interrupted: Ctrl-C; no partial file is left.
        """
        path = self.folder / file.name
        if path.exists():
            return path
        free = host.free_memory_bytes()
        if file.about_bytes > free:
            raise GgufspecError(
                f"{file.name} takes {_gb(file.about_bytes)} of memory to run, and {_gb(free)} are free",
                "--shapes small, or end what else runs",
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GgufspecError(f"{self.folder} cannot be made: {error.strerror}", "--models FOLDER") from None
        source = demo_pair()[0 if file.role == TARGET else 1]

        def report(event: child.Event) -> None:
            if event.get("of"):
                self.say(f"making {file.name}: {event['bytes'] / event['of']:.0%}")

        spec = expansion.Spec(
            source,
            expansion.SHAPES[file.model.shape],
            file.model.type,
            path,
            self.fill,
            hopeless=file.role == HOPELESS,
        )
        expansion.expand(spec, on_event=report, verbose=self._verbose)
        return path

    def known(self, file: File) -> KnownHeader:
        """Return its header; the file is made if it does not exist."""
        if file.name not in self._known:
            (self._known[file.name],) = read_headers([self.path(file)], self.folder / "headers")
        return self._known[file.name]

    def named(self, name: str) -> KnownHeader | None:
        """Return the header of a file by its name; None if it no longer exists."""
        path = self.folder / name
        if name not in self._known and path.exists():
            (self._known[name],) = read_headers([path], self.folder / "headers")
        return self._known.get(name)
