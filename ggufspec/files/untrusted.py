"""Reading of untrusted files and JSON. Size, nesting depth and waiting time are limited before anything is parsed.

Malicious files can make parsers use gigabytes, overflow the stack or hang. JSON numbers must fit a double or 64 bits.
"""

from __future__ import annotations

import array
import itertools
import json
import math
import os
import select
import stat
from pathlib import Path
from typing import Any

from ggufspec.errors import GgufspecError, alike

MOST_JSON_BYTES = 8 << 20  # parsed JSON takes up to 50 times as much memory; a comparison of hundreds of cells has 1 MB
MOST_JSON_DEPTH = 64  # maximum nesting; ggufspec's documents reach 8
PATIENCE_S = 5.0  # timeout for a silent pipe or terminal

_MOST_NEIGHBOURS = 1000  # maximum number of files in a folder that are compared with a mistyped name
_DIGITS = 20  # maximum length of a 64-bit number, with the sign
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))


def is_file(path: Path) -> bool:
    """Return True if a path is a regular file; False for an impossible path, e.g. one of 5,000 characters."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def at_home(path: str | Path) -> Path:
    """Expand ``~``; leave the home of an unknown user (``~name``) as it is, without an error."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def real(path: Path) -> Path:
    """Resolve a path as ``Path.resolve`` does, but without an error for a link that points to itself."""
    return Path(os.path.realpath(path))


def near(path: Path, pattern: str = "*") -> str:
    """Return the file name most similar to a mistyped path's name, in the same folder; empty if none is similar."""
    try:
        names = [one.name for one in itertools.islice(path.parent.glob(pattern), _MOST_NEIGHBOURS)]
    except (OSError, ValueError):
        return ""
    return next(iter(alike(path.name, names)), "")


def read_bytes(
    path: Path, most_bytes: int, *, hint: str = "", failure: type[GgufspecError] = GgufspecError, cut: bool = False
) -> bytes:
    """Read a file, or a pipe or device until its end; with ``cut``, at most the first ``most_bytes``.

    Raises:
        GgufspecError, or ``failure``: the file cannot be read, exceeds ``most_bytes``, or sends no data. The hint is
            ``hint`` or, by default, the most similar file name or an ``ls`` command.
    """
    try:
        with open(path, "rb", buffering=0, opener=_at_once) as file:  # Path.open takes no opener
            data = _take(file.fileno(), most_bytes + 1)
    except (OSError, ValueError) as error:  # a null character in the name raises ValueError
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        found = near(path) if isinstance(error, FileNotFoundError) and not hint else ""
        hint = hint or (f"did you mean {found!r}?" if found else f"ls {path.parent}")
        raise failure(f"{path} cannot be read: {why}", hint) from None
    if len(data) > most_bytes and not cut:
        hint = hint or f"ls -l {path}"
        raise failure(f"{path} has more than {_shown(most_bytes)}, too much for a file of this kind", hint)
    return data[:most_bytes]


def read_text(path: Path, most_bytes: int, *, hint: str = "", failure: type[GgufspecError] = GgufspecError) -> str:
    """Read a file as :func:`read_bytes` does, and return its UTF-8 text without a byte order mark."""
    data = read_bytes(path, most_bytes, hint=hint, failure=failure)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise failure(f"{path} is not UTF-8 text: {error}", hint or "convert it to UTF-8") from None


def read_json(path: Path, *, hint: str = "") -> Any:
    """Read the JSON value in a file; raise as :func:`read_text` and :func:`parse_json` do."""
    return parse_json(read_text(path, MOST_JSON_BYTES, hint=hint), str(path), hint=hint)


def parse_json(text: str, name: str, *, hint: str = "") -> Any:
    """Parse JSON text; error messages call it ``name``.

    Raises:
        GgufspecError: the text is not JSON, is nested too deeply, or contains NaN or a number beyond 64 bits.
    """
    if _depth(text) > MOST_JSON_DEPTH:
        raise GgufspecError(f"{name} is nested more than {MOST_JSON_DEPTH} deep", hint)
    try:
        return json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        where = f"is not a complete JSON document (line {error.lineno})" if text.strip() else "is empty"
        raise GgufspecError(f"{name} {where}: was the write interrupted?", hint) from None
    except ValueError as error:
        raise GgufspecError(f"{name} cannot be read as JSON: {error}", hint) from None


def _at_once(path: str, flags: int) -> int:
    """Open a file without waiting for a pipe's writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _take(descriptor: int, most_bytes: int) -> bytes:
    waits = os.name == "posix" and not stat.S_ISREG(os.fstat(descriptor).st_mode)
    data = bytearray()
    while len(data) < most_bytes:
        if waits and not select.select([descriptor], [], [], PATIENCE_S)[0]:
            raise TimeoutError(0, f"no data arrived within {PATIENCE_S:.0f} s")
        some = os.read(descriptor, min(1 << 20, most_bytes - len(data)))
        if not some:
            break
        data += some
    return bytes(data)


def _depth(text: str) -> int:
    """Return the nesting depth of brackets outside strings."""
    outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
    brackets = outside.encode("utf-8", "replace").translate(_STEPS, _NO_BRACKETS)
    return max(itertools.accumulate(array.array("b", brackets)), default=0)


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"it has a number of {len(digits):,} digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _no_number(digits)


def _no_number(digits: str) -> float:
    raise ValueError(f"{digits[:80]} is not an allowed number")


def _shown(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
