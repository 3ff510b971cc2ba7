"""The user's folders, and a cache of values that are slow to compute.

Caching is best effort: a damaged or outdated entry counts as absent, an entry that cannot be written is dropped, and if
the folder cannot be written, a temporary one is used until the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from platformdirs import user_cache_path, user_config_path, user_data_path, user_state_path

from ggufspec.errors import GgufspecError
from ggufspec.files import untrusted
from ggufspec.files.write import locked, replacing
from ggufspec.schema import codec
from ggufspec.schema.text import of_download

Value = TypeVar("Value")

_PROBE_BYTES = 1 << 16  # bytes written to test for free space
_LOCK_S = 2.0
_DAY_S, _MOST_DAILY = 24 * 3600.0, 16
_warnings: list[str] = []
_today: set[tuple[Path, str]] = set()  # calls of :func:`first_today` in this process, in case there is no cache


# ---- folders -------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder for headers and measurements, all of which can be computed again."""
    return _of_user(user_cache_path)


def config_folder() -> Path:
    """Return the folder for profiles."""
    return _of_user(user_config_path)


def results_folder() -> Path:
    """Return the folder for result documents, and for the run logs from which commands resume."""
    return _of_user(user_data_path) / "results"


def state_folder() -> Path:
    """Return the private folder for text that the user typed, such as the history of a chat."""
    return _of_user(user_state_path)


def _of_user(find: Callable[[str], Path]) -> Path:
    try:
        return find("ggufspec")
    except RuntimeError:  # there is no home folder
        return temporary_home() / find.__name__


@functools.cache
def writable(folder: Path, room_bytes: int = 0) -> Path:
    """Create and return ``folder``. If it cannot be written, or its disk has less than ``room_bytes`` free, return a
    temporary folder, which :func:`warning` then reports. If that fails, too, raise GgufspecError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
        if (free := shutil.disk_usage(folder).free) < room_bytes:
            raise OSError(errno.ENOSPC, f"{of_download(free)} are free, but {of_download(room_bytes)} may be needed")
    except OSError as error:
        trouble = f"{folder}, which cannot be written: {error.strerror}"
    else:
        return folder
    try:
        place = Path(_temporary().name) / folder.name
        place.mkdir(exist_ok=True)
    except OSError:  # temporary files may be on the same full disk
        raise GgufspecError(f"nothing can be kept in {trouble}", f"df -h {folder.anchor}") from None
    _warnings.append(f"nothing is kept in {trouble}")
    return place


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ggufspec-")


def temporary_home() -> Path:
    """Return a temporary folder, which :func:`warning` then reports, for a user without a home folder."""
    if not _warnings:
        _warnings.append("nothing is kept, because this user has no home folder (HOME)")
    return Path(_temporary().name)


def is_temporary(path: Path) -> bool:
    """Return True if a path is in a folder that is removed when this process ends."""
    return bool(_warnings) and path.is_relative_to(_temporary().name)


def warning() -> str:
    """Return why a temporary folder is used; empty if none is."""
    return next(iter(_warnings), "")


# ---- values --------------------------------------------------------------------------------------------------------


def read_value(path: Path, kind: type[Value]) -> Value | None:
    """Return the value of type ``kind`` in a JSON file; None if the file is absent or damaged."""
    try:
        return _load(kind, untrusted.read_json(path))
    except GgufspecError:
        return None


def write_value(path: Path, value: object) -> None:
    """Write a value as JSON, ignoring failures."""
    _write(path, codec.dump(value))


class JsonTable(Generic[Value]):
    """JSON file that maps keys to values of type ``kind``, latest last; the oldest beyond ``limit`` are dropped."""

    def __init__(self, path: Path, kind: type[Value], limit: int | None = None) -> None:
        self._path, self._kind, self._limit = path, kind, limit

    def get(self, key: str) -> Value | None:
        return _load(self._kind, self._entries().get(key))

    def put(self, key: str, value: Value) -> None:
        self.update(key, lambda _: value)

    def update(self, key: str, change: Callable[[Value | None], Value]) -> None:
        """Replace a value with ``change(value)`` under a lock; do nothing if another process does not release it."""
        with contextlib.suppress(TimeoutError), locked(self._path, _LOCK_S):
            entries = self._entries()
            value = change(_load(self._kind, entries.pop(key, None)))
            entries[key] = codec.dump(value, self._kind)
            _write(self._path, dict(list(entries.items())[-self._limit :] if self._limit else entries))

    def _entries(self) -> dict[str, Any]:
        return read_value(self._path, dict[str, Any]) or {}


def first_today(name: str) -> bool:
    """Return True unless one of the user's processes called this with ``name`` in the last 24 hours."""
    folder, now = cache_folder(), time.time()
    if (folder, name) in _today:
        return False
    _today.add((folder, name))
    moments = JsonTable(folder / "daily.json", float, _MOST_DAILY)
    last = moments.get(name)
    if last is not None and 0 <= now - last < _DAY_S:
        return False
    moments.put(name, now)
    return True


def _load(kind: type[Value], data: Any) -> Value | None:
    from pydantic import ValidationError

    try:
        return None if data is None else codec.load(kind, data)
    except ValidationError:
        return None


def _write(path: Path, data: Any) -> None:
    with contextlib.suppress(OSError, ValueError):
        text = json.dumps(data, allow_nan=False)  # read_json refuses NaN
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.write_text(text, encoding="utf-8")
