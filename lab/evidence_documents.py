"""Files of measurements on one GPU: a JSON document for each part, and one about their origin.

A folder of evidence has ``run.json`` and the parts' files. A row is one measurement: done, failed with its reason, or
not run yet with its expected time. Bytes are bytes, times are seconds, speeds are tokens per second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from ggufspec.errors import GgufspecError
from ggufspec.files import untrusted
from ggufspec.schema.base import Spread
from ggufspec.schema.verify import CertificateCheck

RUN_FILE = "run.json"
SUMMARY_FILE = "README.md"

Found = TypeVar("Found")
State = Literal["done", "failed", "not run"]


@dataclass(frozen=True, slots=True)
class Row(Generic[Found]):
    """One measurement.

    Args:
        key: key of its settings and versions; equal keys are the same measurement.
        name: for people.
        state: ``done``, ``failed`` (``error`` and ``hint`` say why) or ``not run`` (``error`` says why, unless time was
            lacking).
        expected_s: expected duration.
        seconds: actual duration.
        peak_bytes: largest rise of the device's memory, as NVML counts it, or the worker's resident memory; None if
            neither is available.
        at: when it was done, UTC.
        error: see ``state``.
        hint: what to do about the error.
        found: the measurement. A failed row may have it too, e.g. memory over the ceiling.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    key: str
    name: str
    state: State
    expected_s: float
    seconds: float | None = None
    peak_bytes: int | None = None
    at: str = ""
    error: str = ""
    hint: str = ""
    found: Found | None = None


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """One model as placed. ``layers`` are as ``-ngl`` counts them, the output included; ``bytes`` its weights."""

    file: str
    layers: int
    gpu_layers: int
    n_cpu_moe: int = 0
    weights_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes on one device by purpose."""

    weights: int
    kv: int
    compute: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.kv + self.compute


@dataclass(frozen=True, slots=True)
class BytesFound:
    """Part a: memory of a placement on the device.

    Args:
        kind: ``dense``, ``moe`` or ``pair``.
        models: as placed; two for a pair, loaded in one process.
        ctx_size: tokens of context.
        cache_type_k: type of the key cache.
        cache_type_v: type of the value cache.
        estimate: the planner's, before a dry run of that placement.
        dry: llama.cpp's without weights, which the planner relies on.
        allocated: llama.cpp's with everything loaded.
        overhead_bytes: added by the planner for the driver.
        device_bytes: actual rise of the device's memory; None if nobody counts it.
        tokens_per_s: one token at a time, by model.
        depth: tokens in the cache then.
    """

    kind: str
    models: tuple[PlacedModel, ...]
    ctx_size: int
    cache_type_k: str
    cache_type_v: str
    estimate: Sizes
    dry: Sizes
    allocated: Sizes
    overhead_bytes: int
    device_bytes: int | None
    tokens_per_s: tuple[float, ...]
    depth: int

    @property
    def planned_bytes(self) -> int:
        """Total that the planner counts with."""
        return self.dry.total + self.overhead_bytes


@dataclass(frozen=True, slots=True)
class Tried:
    """A placement that was loaded for real and read a prompt; ``why`` says why it did not fit."""

    gpu_layers: int
    fits: bool
    used_bytes: int | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class LargestFound:
    """Part b: the largest placement that loads under the ceiling, compared with the planner's.

    Args:
        target: the planner's placement.
        draft: the draft next to it; None for target-only.
        ctx_size: tokens of context.
        ceiling_bytes: memory limit of the device.
        planned: layers that the planner offloads.
        largest: most layers that fit when loaded.
        tried: placements in the order of loading.
    """

    target: PlacedModel
    draft: PlacedModel | None
    ctx_size: int
    ceiling_bytes: int
    planned: int
    largest: int
    tried: tuple[Tried, ...]


@dataclass(frozen=True, slots=True)
class WidthsFound:
    """Part c: T(n). ``seconds`` are samples by batch size; ``relative`` is T(n) ÷ T(1), medians."""

    model: PlacedModel
    file_type: str
    ctx_size: int
    depth: int
    threads: int
    load_s: float
    prompt_tokens_per_s: float
    seconds: dict[int, tuple[float, ...]]
    relative: dict[int, float]


@dataclass(frozen=True, slots=True)
class WayResult:
    """Totals of one variant for all prompts of a repetition, from which its speed follows."""

    tokens: int
    seconds: float
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    plain_rounds: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Speed without prompts and loading."""
        return self.tokens / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class WaysFound:
    """Parts d, e, f: one repetition of several variants, one after the other with the same models loaded.

    Args:
        pair: a name for target and draft.
        repetition: from 0.
        target: placed target.
        draft: placed draft; None in a target-only run.
        ctx_size: tokens of context.
        depth: tokens in the cache, on average.
        results: by variant.
        predicted: the planner's tokens/s of this placement, if it made it.
    """

    pair: str
    repetition: int
    target: PlacedModel
    draft: PlacedModel | None
    ctx_size: int
    depth: int
    results: dict[str, WayResult]
    predicted: float | None = None


@dataclass(frozen=True, slots=True)
class Way:
    """A variant over all repetitions.

    ``over_target_only`` is the ratio to target-only at its own best placement, and ``over_peer`` to llama.cpp's own
    program at its best draft length, repetition by repetition; None without a rival.
    """

    pair: str
    name: str
    gpu_layers: int
    layers: int
    gpu_layers_draft: int | None
    tokens_per_s: Spread
    acceptance_rate: float | None
    tokens_per_round: float | None
    over_target_only: Spread | None
    over_peer: Spread | None = None


@dataclass(frozen=True, slots=True)
class SpeedFound:
    """Part g: a placement that was run in another part, and the prediction of the planner's speed model.

    Args:
        part: part of the measurement.
        what: the row and the variant.
        models: target, and the draft of a speculative run.
        measured: tokens/s.
        predicted: tokens/s from bytes and this machine's calibration. A speculative run's uses the measured tokens per
            round: only times are predicted.
    """

    part: str
    what: str
    models: tuple[PlacedModel, ...]
    measured: float
    predicted: float


@dataclass(frozen=True, slots=True)
class CalibrationFound:
    """Part g's own measurement: bytes/s and fixed costs of host and device, :class:`planning.speed.MachineProfile`."""

    speed: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Agreeing:
    """Batch sizes whose logits agree to the bit."""

    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClassesFound:
    """Part h: the classes of one model at one placement; ``strict`` is empty if strict mode is refused."""

    model: PlacedModel
    file_type: str
    threads: int
    limit: int
    classes: tuple[Agreeing, ...]
    strict: tuple[int, ...]
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class ChecksFound:
    """Part h: the certificate's checks of a pair, :mod:`ggufspec.verify.certificate`."""

    target: PlacedModel
    draft: PlacedModel
    checks: tuple[CertificateCheck, ...]
    passed: bool
    text: str


@dataclass(frozen=True, slots=True)
class Part(Generic[Found]):
    """One part's document, ``ggufspec/evidence-NAME@1``.

    Args:
        part: its letter.
        title: what it shows.
        digest: digest of the folder's settings and versions, see :class:`Run`.
        rows: finished and open measurements.
        ways: parts d, e and f: variants over all repetitions.
        notes: what a reader should know.
        complete: True if every row was run, failed ones included.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    part: str
    title: str
    digest: str
    rows: tuple[Row[Found], ...]
    ways: tuple[Way, ...] = ()
    notes: tuple[str, ...] = ()
    complete: bool = False
    schema: str = ""


@dataclass(frozen=True, slots=True)
class Card:
    """The measured device. ``kind`` is e.g. ``cuda`` or ``rpc``; ``ceiling_bytes`` limits its use."""

    name: str
    description: str
    kind: str
    total_bytes: int
    ceiling_bytes: int | None
    driver: str = ""


@dataclass(frozen=True, slots=True)
class Sitting:
    """One call of the script. ``ended`` is ``done``, ``time`` (not all fitted), ``interrupted`` or ``running``."""

    began: str
    command: str
    seconds: float
    ended: str


@dataclass(frozen=True, slots=True)
class Run:
    """``ggufspec/evidence@1``: origin of the figures. ``digest`` identifies GPU, settings and versions."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    date: str
    digest: str
    card: Card
    machine: dict[str, Any]
    settings: dict[str, Any]
    sittings: tuple[Sitting, ...]
    notes: tuple[str, ...] = ()
    schema: str = field(default="ggufspec/evidence@1")


@dataclass(frozen=True, slots=True)
class About:
    """A part: its letter, its file, what it shows and the type of its rows."""

    letter: str
    name: str
    title: str
    found: Any

    @property
    def file(self) -> str:
        """Its file in the folder."""
        return f"{self.letter}-{self.name}.json"

    @property
    def schema(self) -> str:
        """Schema in the file."""
        return f"ggufspec/evidence-{self.name}@1"


PARTS = {
    about.letter: about
    for about in (
        About("a", "bytes", "bytes predicted against what the device counts", BytesFound),
        About("b", "largest", "the largest placement that loads against the planner's", LargestFound),
        About("c", "widths", "T(n), the time of a batch by its width", WidthsFound),
        About("d", "notebook", "a target that does not fit: was the draft worth it", WaysFound),
        About("e", "offloaded", "wholly offloaded pairs against llama.cpp's own program and target-only", WaysFound),
        About("f", "hopeless", "a draft that knows nothing against target-only", WaysFound),
        About("g", "speed", "tokens/s predicted against measured", SpeedFound | CalibrationFound),
        About(
            "h",
            "exactness",
            "width classes, identity in strict mode, divergences in default mode",
            ClassesFound | ChecksFound,
        ),
    )
}


def read_part(folder: Path, letter: str) -> Part[Any] | None:
    """Read a part's document; None if it does not exist.

    Raises:
        GgufspecError: the file is damaged or of another version.
    """
    about = PARTS[letter]
    found: Part[Any] | None = _read(folder / about.file, _part_of(letter), about.schema)
    return found


def _part_of(letter: str) -> Any:
    """Return the type of a part's document."""
    return Part.__class_getitem__(PARTS[letter].found)  # type: ignore[attr-defined]


def read_run(folder: Path) -> Run | None:
    """Read the origin of a folder's figures; None if there is no ``run.json``.

    Raises:
        GgufspecError: it is damaged or of another version.
    """
    found: Run | None = _read(folder / RUN_FILE, Run, "ggufspec/evidence@1")
    return found


def _read(path: Path, kind: Any, schema: str) -> Any:
    from pydantic import ValidationError

    from ggufspec.schema import codec

    if not path.exists():
        return None
    body = untrusted.read_json(path, hint=f"move it away, or --folder {path.parent}-2")
    said = body.get("schema") if isinstance(body, dict) else None
    if said != schema:
        raise GgufspecError(
            f"{path} is {said!r} and not {schema!r}", f"another version wrote it: --folder {path.parent}-2"
        )
    try:
        return codec.load(kind, body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(place) for place in first["loc"])
        raise GgufspecError(
            f"{path} is damaged: {where}: {first['msg']}", f"move it away, or --folder {path.parent}-2"
        ) from None


def to_text(document: Part[Any] | Run) -> str:
    """Return a document as JSON for a file."""
    from ggufspec.schema import codec

    kind: Any = Run if isinstance(document, Run) else _part_of(document.part)
    return json.dumps(codec.dump(document, kind), indent=1, ensure_ascii=False) + "\n"


def folders(root: Path) -> Iterator[tuple[Path, Run]]:
    """Yield the folders of evidence under ``root``, by name, with the origin of each.

    Raises:
        GgufspecError: one is damaged.
    """
    for path in sorted(root.glob(f"*/{RUN_FILE}")):
        if (run := read_run(path.parent)) is not None:
            yield path.parent, run
