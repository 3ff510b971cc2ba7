"""What a comparison keeps in its journal: placements, trials, failures and qualities, each under what it belongs to.

A failure is kept as long as the comparison is not done, so that one that is resumed does not run into it again; the
command after that tries it once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from ggufspec import plain
from ggufspec.bench import quality, trial
from ggufspec.bench.journal import Journal, key_of
from ggufspec.decoding.options import DecoderOptions
from ggufspec.schema.base import Failure
from ggufspec.schema.compare import Quality

SCHEMA = "ggufspec/compare-journal@1"

ByDevice = dict[str, dict[str, int]]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Kept:
    """One trial as it is kept.

    Args:
        result: what was measured, or None.
        failure: why not.
        at: when it ended, in seconds of the epoch.
        throttled: what held a card's clocks down meanwhile.
        strangers: programs that came onto a card since the comparison began.
    """

    result: trial.Result | None
    failure: Failure | None
    at: float
    throttled: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cell runs, as planned when it was first asked for."""

    options: DecoderOptions
    bytes: ByDevice


class Ledger:
    """The journal of one comparison.

    Args:
        path: its file.
        facts: what all measurements depend on: the machine and the versions.
        fresh: put aside what the file has.

    Raises:
        GgufspecError: the file cannot be written, or another process has it open.
    """

    def __init__(self, path: Path, facts: object, *, fresh: bool = False) -> None:
        self._journal = Journal(path, SCHEMA, fresh=fresh)
        self._facts = key_of(facts)
        self._times_done: int = self._journal.get("done") or 0

    @property
    def path(self) -> Path:
        """The file."""
        return self._journal.path

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to say of the file."""
        return self._journal.notes

    def trial_of(self, identity: Sequence[str], spec: trial.Spec, repetition: int) -> Kept | None:
        """What was measured of a cell, or how it failed in this comparison; None if it is to be measured."""
        key = self._trial_key(identity, spec, repetition)
        return self._kept(key, Kept) or self._kept(self._failed(key), Kept)

    def keep_trial(self, identity: Sequence[str], spec: trial.Spec, repetition: int, kept: Kept) -> None:
        """Keep a trial.

        Raises:
            GgufspecError: the disk is full, say.
        """
        key = self._trial_key(identity, spec, repetition)
        key = key if kept.failure is None else self._failed(key)
        self._journal.put(key, plain.dump(kept))

    def place_of(self, identity: Sequence[str], asked: object) -> Place | None:
        """Where a cell was placed when it was asked for in the same words; None if it was not."""
        return self._kept(key_of("place", self._facts, identity, asked), Place)

    def keep_place(self, identity: Sequence[str], asked: object, place: Place) -> None:
        """Keep a placement: another one, because of other free memory say, would be another cell.

        Raises:
            GgufspecError: the disk is full, say.
        """
        key = key_of("place", self._facts, identity, asked)
        self._journal.put(key, plain.dump(place))

    def quality_of(self, identity: Sequence[str], spec: quality.Spec) -> Quality | Failure | None:
        """How good a target was found, or why that could not be told; None if it is to be measured."""
        key = self._quality_key(identity, spec)
        return self._kept(key, Quality) or self._kept(self._failed(key), Failure)

    def keep_quality(self, identity: Sequence[str], spec: quality.Spec, found: Quality | Failure) -> None:
        """Keep a quality.

        Raises:
            GgufspecError: the disk is full, say.
        """
        key = self._quality_key(identity, spec)
        self._journal.put(key if isinstance(found, Quality) else self._failed(key), asdict(found))

    def done(self) -> None:
        """The comparison has come to its end: the next one tries again what failed in this one."""
        self._journal.put("done", self._times_done + 1)

    def close(self) -> None:
        """Let go of the file."""
        self._journal.close()

    def _kept(self, key: str, kind: type[_T]) -> _T | None:
        """What is under a key; None where there is nothing, or something of another shape."""
        value = self._journal.get(key)
        try:
            return None if value is None else plain.load(kind, value)
        except ValidationError:
            return None

    def _trial_key(self, identity: Sequence[str], spec: trial.Spec, repetition: int) -> str:
        return key_of("trial", self._facts, identity, _plain(spec), repetition)

    def _quality_key(self, identity: Sequence[str], spec: quality.Spec) -> str:
        facts = _plain(spec)
        del facts["rows"]
        return key_of("quality", self._facts, identity, facts)

    def _failed(self, key: str) -> str:
        return f"{key} failed {self._times_done}"


def _plain(spec: Any) -> dict[str, Any]:
    """A spec as JSON."""
    facts: dict[str, Any] = plain.dump(spec)
    return facts
