"""Row of the option table: names, help, and how a value is parsed and checked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ggufspec.errors import UsageError, did_you_mean

MAX_LIST = 64  # maximum number of values in a sweep
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})(?:([+*])(\d{1,9}))?")  # tools/llama-bench/llama-bench.cpp, parse_int_range


@dataclass(frozen=True, slots=True)
class Option:
    """Row of the option table."""

    flags: tuple[str, ...]  # flags as typed, short ones first; empty for the positional argument
    help: str  # help text, a sentence or two
    group: str  # group of options that commands take together
    metavar: str = ""  # placeholder in the help; derived from the type if empty
    variable: str = ""  # environment variable ``GGUFSPEC_<variable>``, if any
    default: Any = None  # default value; None if decided elsewhere
    shown: str = ""  # text shown in brackets by the help, instead of the default
    least: float | None = None  # inclusive lower bound
    most: float | None = None
    also: float | None = None  # valid value outside the bounds, with a special meaning
    above: float | None = None  # exclusive lower bound
    below: float | None = None
    choices: tuple[str, ...] = ()  # all valid values; empty: any within the bounds
    words: tuple[str, ...] = ()  # words that are valid in addition to numbers; shells complete them
    reader: Callable[[str], Any] | None = None  # parses a value; raises ValueError with the reason
    usual: str = ""  # hint for an invalid value
    label: str = ""  # name in reports and messages; by default the field's name with spaces
    profile: bool = False  # True if allowed in a profile's ``[settings]``
    sweep: bool = False  # True if ``bench --sweep`` takes a list of its values
    tune: bool = False  # True if ``tune`` searches for the best value
    chat: bool = False  # can be changed in chat by a /switch of the same name
    python: bool = False  # keyword of ``load_pair``, ``plan_pair`` and ``bench_pair``
    repeated: bool = False  # True if the flag may be given several times; always so for a tuple without a reader
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
            hint = f"{did_you_mean(str(value), self.choices)} {self.flag} is one of {', '.join(self.choices)}".strip()
            raise UsageError(f"there is no {self.label} {str(value)!r}", hint)
        if isinstance(value, int | float) and not self._is_within(value):
            limits = bounds(self.least, self.most, self.above, self.below)
            raise UsageError(f"{self.flags[-1]} {_shown(value)} is out of range: {limits}", self.usual)
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
                    raise UsageError(f"{self.flag} {text!r} has more than {MAX_LIST} values", "give fewer")
        return list(values.items())


def bounds(
    least: float | None = None, most: float | None = None, above: float | None = None, below: float | None = None
) -> str:
    """Return limits in words: "0 to 1", "at least 1", "above 0, at most 1"."""
    if least is not None and most is not None:
        return f"{_shown(least)} to {_shown(most)}"
    words = (("at least", least), ("above", above), ("at most", most), ("below", below))
    return ", ".join(f"{word} {_shown(bound)}" for word, bound in words if bound is not None) or "a finite number"


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def _numbers(part: str) -> Iterator[str]:
    """Yield the numbers in a range, or the text itself if it is not a range."""
    found = _RANGE.fullmatch(part)
    if not found:
        yield part
        return
    number, last, by = int(found[1]), int(found[2]), int(found[4] or 1)
    times = found[3] == "*"
    if number > last or by < 1 or (times and (by < 2 or number < 1)):
        raise UsageError(f"{part!r} is not a range", "0-80+8 counts from 0 to 80 in steps of 8; 1-16*2 doubles")
    while number <= last:
        yield str(number)
        number = number * by if times else number + by


def option(flags: str, help: str, group: str, *, where: str = "", **more: Any) -> Any:  # noqa: A002
    """Return a field of :class:`Settings`. ``flags`` and ``where`` are separated by spaces; ``where`` names the boolean
    fields of :class:`Option` that are true, and ``more`` holds its other fields.
    """
    switches: dict[str, Any] = dict.fromkeys(where.split(), True)
    return field(default=None, metadata={"option": Option(tuple(flags.split()), help, group, **switches, **more)})
