"""Log of measurements, each written as soon as it is made, so that an interrupted search or comparison can resume.

The file consists of JSON lines. The first names the schema; every other line holds one measurement, under a key made
from the measurement's settings. A last line truncated by a crash is dropped.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import ValidationError

from ggufspec.errors import GgufspecError
from ggufspec.files import untrusted
from ggufspec.files.write import locked
from ggufspec.schema import codec

_MOST_BYTES = 64 << 20  # maximum size to read; a log of hundreds of cells takes 2 MB
_Value = TypeVar("_Value")


def key_of(*facts: Any) -> str:
    """Return a key made from JSON values: equal values give equal keys in any process."""
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def set_aside(path: Path) -> Path:
    """Rename a file to NAME.old, or to NAME.old.2 and so on; return the new path, or raise GgufspecError."""
    endings = itertools.chain((".old",), (f".old.{number}" for number in itertools.count(2)))
    try:
        aside = next(place for ending in endings if not (place := path.with_name(path.name + ending)).exists())
        path.replace(aside)
    except OSError as error:
        raise GgufspecError(
            f"{path} cannot be renamed: {error.strerror}", "name another folder with --results FOLDER"
        ) from None
    return aside


class RunLog:
    """File of measurements, open for reading and appending; locked against other processes.

    A file that is damaged or has another schema is renamed (:func:`set_aside`), which :attr:`notes` reports; with
    ``fresh``, any existing file is renamed. The folder is created if necessary.

    Raises:
        GgufspecError: the file cannot be written, or another process has it open.
    """

    def __init__(self, path: Path, schema: str, *, fresh: bool = False) -> None:
        self.path, self.notes = path, tuple[str, ...]()
        self._values: dict[str, Any] = {}
        with contextlib.ExitStack() as lock:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                lock.enter_context(locked(path))
                self._open(schema, fresh=fresh)
            except TimeoutError:
                raise GgufspecError(
                    f"another process is running the same measurements and saving them in {path}",
                    "wait for it, or save results elsewhere with --results FOLDER",
                ) from None
            except OSError as error:
                raise GgufspecError(
                    f"results cannot be saved in {path}: {error.strerror}", "name another folder with --results FOLDER"
                ) from None
            self._lock = lock.pop_all()

    def _open(self, schema: str, *, fresh: bool) -> None:
        if fresh and self.path.exists():
            set_aside(self.path)
        if self.path.exists() and not self._read(schema):
            aside = set_aside(self.path)
            self.notes = (
                f"{self.path} is damaged or from another version; it was renamed {aside.name}, and measuring restarts",
            )
        self._file = self.path.open("ab")
        if self._file.tell() == 0:
            self._write({"schema": schema})

    def _read(self, schema: str) -> bool:
        """Load the values and drop an incomplete last line; return False if damaged or written with another schema."""
        try:
            content = untrusted.read_bytes(self.path, _MOST_BYTES)
        except GgufspecError:
            return False
        whole = content.rfind(b"\n") + 1
        lines = content[:whole].splitlines()
        if not lines:
            os.truncate(self.path, 0)
            return True
        try:
            entries = [untrusted.parse_json(line.decode(), str(self.path)) for line in lines]
            if entries[0].get("schema") != schema:
                return False
            self._values = {entry["key"]: entry["value"] for entry in entries[1:]}
        except (GgufspecError, ValueError, KeyError, TypeError, AttributeError):
            return False
        if whole < len(content):
            os.truncate(self.path, whole)
        return True

    def get(self, key: str, kind: type[_Value]) -> _Value | None:
        """Return the measurement under a key; None if it is missing or has another type."""
        try:
            return codec.load(kind, self._values[key]) if key in self._values else None
        except ValidationError:
            return None

    def put(self, key: str, value: object) -> None:
        """Write a measurement to disk; raise GgufspecError if that fails, e.g. because the disk is full."""
        self._values[key] = codec.dump(value)
        try:
            self._write({"key": key, "value": self._values[key]})
        except OSError as error:
            raise GgufspecError(
                f"results cannot be saved in {self.path}: {error.strerror}", "free some space and run the command again"
            ) from None

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, ignoring errors: :meth:`put` has already written everything."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
