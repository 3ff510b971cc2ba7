"""Row of the table of options: names, help, and how a value is parsed and checked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ggufspec.errors import UsageError, nearest

MAX_LIST = 64  # maximum values of a sweep
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})(?:([+*])(\d{1,9}))?")  # tools/llama-bench/llama-bench.cpp, parse_int_range


@dataclass(frozen=True, slots=True)
class Option:
    """Row of the table of options."""

    flags: tuple[str, ...]  # flags as typed, the short one first; none for the positional argument
    help: str  # help text, a sentence or two
    group: str  # group of options that commands take together
    metavar: str = ""  # placeholder in the help; by type if empty
    variable: str = ""  # environment variable ``GGUFSPEC_<variable>``, if any
    default: Any = None  # default value; None if it is decided elsewhere
    shown: str = ""  # text that the help shows in brackets instead of the default
    least: float | None = None  # inclusive lower bound
    most: float | None = None
    also: float | None = None  # valid value outside of the bounds, with a special meaning
    above: float | None = None  # exclusive lower bound
    below: float | None = None
    choices: tuple[str, ...] = ()  # the only valid values
    words: tuple[str, ...] = ()  # valid words in addition to numbers, for completion
    reader: Callable[[str], Any] | None = None  # parses a value; raises ValueError with the reason
    usual: str = ""  # hint for an invalid value
    label: str = ""  # name in reports and messages; by default the field's name with spaces
    profile: bool = False  # allowed in a profile's ``[settings]``
    sweep: bool = False  # ``bench --sweep`` takes a list of values
    tune: bool = False  # searched by ``tune``
    chat: bool = False  # can be changed in a chat by a /switch of the flag's name
    python: bool = False  # keyword of ``load_pair``, ``plan_pair`` and ``bench_pair``
    repeated: bool = False  # flag may be given several times; always true for a tuple without a reader
    rare: bool = False  # shown only by ``--help-all``
    # filled in by :func:`table`:
    name: str = ""  # field name
    kind: type = str  # field type without None: ``int``, ``float``, ``str``, ``bool``, ``Path``

    @property
    def flag(self) -> str:
        """The short flag, or the metavar of the positional argument."""
        return self.flags[0] if self.flags else self.metavar

    @property
    def form(self) -> str:
        """Form of the value in the help: ``N``, ``N|auto|all``, ``adaptive|fixed``."""
        if self.metavar or self.kind is bool:
            return self.metavar
        return "|".join(self.choices) or {int: "N", float: "X", Path: "FILE"}.get(self.kind, "TEXT")

    @property
    def described(self) -> str:
        """Help text with the default in brackets."""
        default = f"{self.default:g}" if self.kind is float and self.default is not None else self.default
        shown = self.shown or ("" if default is None or self.kind is bool else str(default))
        return f"{self.help}  [{shown}]" if shown else self.help

    def check(self, value: Any) -> Any:
        """Convert a value, or text as on the command line, to the option's type; raise UsageError if it is invalid."""
        if value is None or self.kind is bool:
            return value
        if self.repeated:
            texts = (str(value),) if isinstance(value, str | int) else tuple(map(str, value))
            return tuple(one for text in texts for one in self._read(text)) if self.reader else texts
        if self.reader is not None and isinstance(value, str):
            value = self._read(value)
        elif self.kind in (str, Path) and self.reader is None:
            value = self.kind(value)
        elif self.kind in (int, float) and value not in self.words:
            value = self._number(value)
        if self.choices and value not in self.choices:
            hint = f"{nearest(str(value), self.choices)} {self.flag} is one of {', '.join(self.choices)}".strip()
            raise UsageError(f"there is no {self.label} {str(value)!r}", hint)
        if isinstance(value, int | float) and not self._is_within(value):
            raise UsageError(f"{self.flags[-1]} {_shown(value)} is out of range: {self._range()}", self.usual)
        return value

    def _read(self, text: str) -> Any:
        assert self.reader is not None
        try:
            return self.reader(text)
        except ValueError as error:
            raise UsageError(f"{self.flags[-1]} {text!r} {error}", self.usual) from None

    def _number(self, value: Any) -> Any:
        try:
            return self.kind(value)
        except (ValueError, TypeError, OverflowError):
            what = "a whole number" if self.kind is int else "a number"
            raise UsageError(f"{self.flags[-1]} {str(value)[:40]!r} is not {what}", self.usual) from None

    def _is_within(self, value: float) -> bool:
        return value == self.also or (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def _range(self) -> str:
        if self.least is not None and self.most is not None:
            return f"{_shown(self.least)} to {_shown(self.most)}"
        words = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        return ", ".join(f"{word} {_shown(bound)}" for word, bound in words if bound is not None) or "a finite number"

    def parse_list(self, text: str) -> list[tuple[str, Any]]:
        """Parse a comma-separated list to (text, value) without duplicates; numbers may be ranges: 0-80+8, 1-16*2.

        Raises:
            UsageError: a value is missing or invalid, a range is empty, or there are too many values.
        """
        values: dict[str, Any] = {}
        for part in text.split(","):
            part = part.strip()
            if not part:
                raise UsageError(f"{self.flag} {text!r} has an empty value", f"{self.flag} VALUE,VALUE")
            for shown in _numbers(part) if self.kind is int else [part]:
                values[shown] = self.check(shown)
                if len(values) > MAX_LIST:
                    raise UsageError(f"{self.flag} {text!r} has more than {MAX_LIST} values", "fewer of them")
        return list(values.items())


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def _numbers(part: str) -> Iterator[str]:
    """Yield the numbers of a range; the text itself if it is not a range."""
    found = _RANGE.fullmatch(part)
    if not found:
        yield part
        return
    number, last, by = int(found[1]), int(found[2]), int(found[4] or 1)
    times = found[3] == "*"
    if number > last or by < 1 or (times and (by < 2 or number < 1)):
        raise UsageError(f"{part!r} is not a range", "0-80+8 goes from 0 to 80 by 8, 1-16*2 doubles")
    while number <= last:
        yield str(number)
        number = number * by if times else number + by


def option(flags: str, help: str, group: str, *, where: str = "", **more: Any) -> Any:  # noqa: A002
    """Return a field of :class:`Settings`. ``flags`` are separated by spaces, and so are the names in ``where``, of
    :class:`Option`'s switches that are on; the other arguments are :class:`Option`'s.
    """
    switches: dict[str, Any] = dict.fromkeys(where.split(), True)
    return field(default=None, metadata={"option": Option(tuple(flags.split()), help, group, **switches, **more)})
