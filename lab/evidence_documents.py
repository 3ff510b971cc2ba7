"""What was measured on one card, as files: a JSON document for each part, and one that says how they came to be.

A folder of evidence has ``run.json`` and the parts' files. A row is one measurement: done, failed with its reason, or
not run yet with what it will take. Bytes are bytes, times are seconds, speeds are tokens per second.
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
from ggufspec.schema.verify import Check

RUN_FILE = "run.json"
SUMMARY_FILE = "README.md"

Found = TypeVar("Found")
State = Literal["done", "failed", "not run"]


@dataclass(frozen=True, slots=True)
class Row(Generic[Found]):
    """One measurement.

    Args:
        key: of its settings and versions; equal keys are the same measurement.
        name: for people.
        state: ``done``, ``failed`` (``error`` and ``hint`` say why) or ``not run`` (``error`` says why, if it is not
            for want of time).
        expected_s: what it was or is expected to take.
        seconds: what it took.
        peak_bytes: the most that the device's memory rose by meanwhile, as NVML counts it, or the worker's resident
            memory; None where neither can be had.
        at: when it was done, UTC.
        error: see ``state``.
        hint: the next thing to do about it.
        found: what was measured. A failed row may have it too: memory over the ceiling, say.
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
    """One model where it ran. ``layers`` are as ``-ngl`` counts them, the output included; ``bytes`` its weights."""

    file: str
    layers: int
    gpu_layers: int
    n_cpu_moe: int = 0
    weights_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes on one device by what they are for."""

    weights: int
    kv: int
    compute: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.compute


@dataclass(frozen=True, slots=True)
class BytesFound:
    """Part a: what a placement takes of the device.

    Args:
        kind: ``dense``, ``moe`` or ``pair``.
        models: as placed; two of a pair, loaded in one process.
        ctx_size: tokens of context.
        cache_type_k: type of the key cache.
        cache_type_v: type of the value cache.
        estimate: by the planner, before that placement is dry-run.
        dry: by llama.cpp without weights, which is what the planner goes by.
        allocated: by llama.cpp with everything loaded.
        overhead_bytes: what the planner adds for the driver's own share.
        device_bytes: what the device's memory really rose by; None where nobody counts it.
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
        """What the planner counts with."""
        return self.dry.total + self.overhead_bytes


@dataclass(frozen=True, slots=True)
class Tried:
    """A placement that was loaded for real and read a prompt; ``why`` it did not fit."""

    gpu_layers: int
    fits: bool
    used_bytes: int | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class LargestFound:
    """Part b: the largest placement that loads under the ceiling, against the planner's.

    Args:
        target: the planner's placement.
        draft: beside which it is; None for target-only.
        ctx_size: tokens of context.
        ceiling_bytes: of the device.
        planned: layers that the planner offloads.
        largest: the most that fit when loaded.
        tried: in the order in which they were loaded.
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
    """Part c: T(n). ``seconds`` are samples by width; ``relative`` is T(n) ÷ T(1), medians."""

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
    """What one way of running took for all prompts of a repetition; all that a speed is made of."""

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
        """Without prompts and loading."""
        return self.tokens / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class WaysFound:
    """Parts d, e, f: one repetition of some ways of running, one after the other with the same models loaded.

    Args:
        pair: a name for target and draft.
        repetition: from 0.
        target: where it was.
        draft: where it was; None in a target-only run.
        ctx_size: tokens of context.
        depth: tokens in the cache, on average.
        results: by way.
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
    """A way of running over all repetitions.

    ``over_target_only`` is the ratio to target-only at its own best placement, and ``over_peer`` to llama.cpp's own
    program at its best length, repetition by repetition; None where there is nothing to hold it against.
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
    """Part g: a placement that was run in another part, and what the planner's model of speed says of it.

    Args:
        part: where it was measured.
        what: the row and the way.
        models: target, and the draft of a speculative run.
        measured: tokens/s.
        predicted: tokens/s from bytes and this machine's calibration. Of a speculative run with the tokens per round
            that were measured: only times are predicted.
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
    """Widths whose logits agree to the bit."""

    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClassesFound:
    """Part h: the width classes of one model at one placement; ``strict`` is empty where strict mode is refused."""

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
    checks: tuple[Check, ...]
    passed: bool
    text: str


@dataclass(frozen=True, slots=True)
class Part(Generic[Found]):
    """One part's document, ``ggufspec/evidence-NAME@1``.

    Args:
        part: its letter.
        title: what it shows.
        digest: of the settings and versions of the folder, see :class:`Run`.
        rows: what was measured and what was not.
        ways: parts d, e and f: over all repetitions.
        notes: what a reader should know.
        complete: whether every row was run, failed ones too.
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
    """The device that is measured. ``kind`` is ``cuda`` or ``rpc``, say; ``ceiling_bytes`` what may be used of it."""

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
    """``ggufspec/evidence@1``: whose figures these are. ``digest`` stands for card, settings and versions."""

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
    """A part: its letter, its file, what it shows and what its rows have."""

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
        """What the file says it is."""
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
    """A part's document; None where there is none.

    Raises:
        GgufspecError: the file is damaged or of another version.
    """
    about = PARTS[letter]
    found: Part[Any] | None = _read(folder / about.file, _part_of(letter), about.schema)
    return found


def _part_of(letter: str) -> Any:
    """The type of a part's document."""
    return Part.__class_getitem__(PARTS[letter].found)  # type: ignore[attr-defined]


def read_run(folder: Path) -> Run | None:
    """Whose figures a folder has; None where there is no ``run.json``.

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
    """A document as JSON for a file."""
    from ggufspec.schema import codec

    kind: Any = Run if isinstance(document, Run) else _part_of(document.part)
    return json.dumps(codec.dump(document, kind), indent=1, ensure_ascii=False) + "\n"


def folders(root: Path) -> Iterator[tuple[Path, Run]]:
    """The folders of evidence under ``root``, by name, with whose they are.

    Raises:
        GgufspecError: one is damaged.
    """
    for path in sorted(root.glob(f"*/{RUN_FILE}")):
        if (run := read_run(path.parent)) is not None:
            yield path.parent, run
