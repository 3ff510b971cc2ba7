"""Tables of reports for the terminal, as Markdown and as CSV. Rows hold values, which columns format."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from ggufspec.schema.text import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table as RichTable
    from rich.text import Text

    from ggufspec.schema.base import MeasuredRun

_MARKUP = re.compile(r"[\\`*~|\[\]]|(?<![^\W_])_|_(?![^\W_])")  # Markdown characters, except underscores in words
_BEGINS = re.compile(r"^(\s*)(?=[#>+=-](?!\d))|^(\s*\d+)(?=[.)](?:\s|$))")  # start of a heading, quotation or list
_WRAPPED = 24  # maximum number of terminal columns reserved for a column that wraps
_NARROW = 60  # terminal width below which a table that does not fit is shown row by row
BEST = "*"


@dataclass(frozen=True, slots=True)
class ReportColumn:
    """Column of a table, whose label states the unit if the cells do not.

    ``text`` formats a value (None: an empty cell), ``style`` returns its style on the terminal, and the value with the
    highest ``rank`` is the column's best. ``only`` limits the column to the terminal or to files.
    """

    label: str
    text: Callable[[Any], str] = str
    align: Literal["left", "right"] = "right"
    wraps: bool = False
    rank: Callable[[Any], float | None] | None = None
    style: Callable[[Any], str] | None = None
    only: Literal["", "terminal", "file"] = ""


@dataclass(frozen=True, slots=True)
class ReportTable:
    """Table of values.

    A row in ``failed`` holds only values that identify it; the reason is ``failed: …`` or ``not measured``. Rows in
    ``leading`` are bold; each row in ``groups`` begins a group.
    """

    title: str
    columns: Sequence[ReportColumn]
    rows: Sequence[tuple[Any, ...]]
    failed: Mapping[int, str] = field(default_factory=dict)
    leading: Collection[int] = ()
    groups: Collection[int] = ()

    @property
    def cells(self) -> list[tuple[str, ...]]:
        return [
            tuple("" if value is None else column.text(value) for column, value in zip(self.columns, row, strict=False))
            for row in self.rows
        ]

    @property
    def best(self) -> set[tuple[int, int]]:
        """Return (row, column) of the best values in each column that has at least two different values."""
        found: set[tuple[int, int]] = set()
        for index, column in enumerate(self.columns):
            if column.rank is None:
                continue
            values = {number: row[index] for number, row in enumerate(self.rows) if index < len(row)}
            ranks = {number: column.rank(value) for number, value in values.items() if value is not None}
            known = {number: rank for number, rank in ranks.items() if rank is not None}
            if len(set(known.values())) > 1:
                found |= {(number, index) for number, rank in known.items() if rank == max(known.values())}
        return found

    def filled(self, least: int = 1) -> ReportTable:
        """Return the table without empty columns, except that the first ``least`` columns always stay."""
        full = {n for row in self.cells for n, text in enumerate(row) if text not in ("", "–")}
        return self._of([n for n in range(len(self.columns)) if n in full or n < least])

    def seen_in(self, where: str) -> ReportTable:
        """Return the table with only those columns that a ``terminal`` or a ``file`` shows."""
        return self._of([n for n, column in enumerate(self.columns) if column.only in ("", where)])

    def _of(self, kept: Sequence[int]) -> ReportTable:
        rows = [tuple(row[n] for n in kept if n < len(row)) for row in self.rows]
        return replace(self, columns=[self.columns[n] for n in kept], rows=rows)

    def reasons(self) -> list[str]:
        found = {number: why for number, why in self.failed.items() if why.startswith("failed: ")}
        return [f"{' + '.join(filter(None, self.cells[number]))}: {why}" for number, why in found.items()]


def columns(*labels: str | ReportColumn) -> list[ReportColumn]:
    """Return text columns with these labels, of which the first is left-aligned and the others right-aligned."""
    return [
        label if isinstance(label, ReportColumn) else ReportColumn(label, align="right" if index else "left")
        for index, label in enumerate(labels)
    ]


def word(label: str) -> ReportColumn:
    return ReportColumn(label, align="left")


def words(label: str) -> ReportColumn:
    return ReportColumn(label, align="left", wraps=True)


# ---- the terminal ---------------------------------------------------------------------------------------------------


def terminal(table: ReportTable, width: int | None = None) -> RichTable:
    """Return a rich table with each best value starred; columns beyond ``width`` are dropped, except the first two.

    On a narrow terminal, a table that does not fit becomes a block per row, with a line per column.
    """
    from rich import box
    from rich.padding import Padding
    from rich.table import Table as RichTable
    from rich.text import Text

    class Fitting(RichTable):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            needed = sum(_width(column, cells) + 2 for column, *cells in zip(table.columns, *full, strict=True)) - 2
            if options.max_width >= min(needed, _NARROW):
                yield from super().__rich_console__(console, options)
                return
            for number, row in enumerate(marked):
                yield Text(row[0], style="bold")
                rest = zip(table.columns[1:], row[1:], strict=False)
                lines = [(Text(column.label, "not bold dim"), text) for column, text in rest if text]
                why = table.failed.get(number, "").partition(":")[0]
                yield Padding(pairs([*lines, *[(why, "")] * bool(why)]), (0, 0, 0, 2))

    table = table.seen_in("terminal")
    cells, best = table.cells, table.best
    ranked = {column for _, column in best}
    marked = [
        [text + (BEST if (n, i) in best else " " if i in ranked and text else "") for i, text in enumerate(row)]
        for n, row in enumerate(cells)
    ]
    full = [[*row, *[""] * (len(table.columns) - len(row))] for row in marked]
    shown = list(range(len(table.columns))) if width is None else _fitting(table.columns, full, width)
    made = Fitting(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for index in shown:
        column = table.columns[index]
        made.add_column(column.label, justify=column.align, no_wrap=not column.wraps, overflow="fold")
    for number, row in enumerate(marked):
        if number in table.groups:
            made.add_section()
        why = table.failed.get(number, "").partition(":")[0]
        style = "" if not why else "red" if why == "failed" else "dim"
        line = [Text(row[i], style=_style(table, number, i, best)) for i in shown if i < len(row)]
        if why and len(line) < len(shown):
            line.append(Text(why))
        made.add_row(*line, style=style or ("bold" if number in table.leading else None))
    return made


def marks(*tables: ReportTable) -> list[str]:
    """Explain the marks that these tables show on a terminal."""
    shown = [one.seen_in("terminal") for one in tables]
    has_spread = any("±" in text for one in shown for row in one.cells for text in row)
    best = [f"{BEST} is the best of its column"] if any(one.best for one in shown) else []
    return [*best, *["± is the 95% interval"] * has_spread]


def pairs(rows: Iterable[tuple[str | Text, str | Text]]) -> RichTable:
    """Return a grid of names and values; names of type str are bold, and values wrap at the terminal's width."""
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable.grid(padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True, style="bold")
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, Text(value) if isinstance(value, str) else value)
    return made


def _style(table: ReportTable, row: int, column: int, best: Collection[tuple[int, int]]) -> str:
    style = table.columns[column].style
    return "green" if (row, column) in best else style(table.rows[row][column]) if style else ""


def _fitting(heads: Sequence[ReportColumn], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the indices of the columns that fit, starting at the left and skipping empty columns."""
    shown: list[int] = []
    used = 0
    for index, column in enumerate(heads):
        cells = [row[index] for row in rows]
        if index and not any(cells):
            continue
        widest = _width(column, cells)
        if index < 2 or used + widest + 2 <= width:
            used += widest + 2
            shown.append(index)
    return shown


def _width(column: ReportColumn, cells: Iterable[str]) -> int:
    widest = max(len(line) for cell in (column.label, *cells) for line in cell.split("\n"))
    return min(widest, _WRAPPED) if column.wraps else widest


# ---- Markdown -------------------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """Escape ``text`` as one line of Markdown without markup, because names may come from strangers."""
    line = visible(text.strip().replace("\n", " ")).replace("&", "&amp;").replace("<", "&lt;")
    return _BEGINS.sub(r"\g<0>\\", _MARKUP.sub(r"\\\g<0>", line))


def markdown(table: ReportTable) -> str:
    """Return the table as Markdown, with each column's best value in bold."""
    table = table.seen_in("file")
    best = table.best
    lines = [
        "| " + " | ".join(escaped(column.label) for column in table.columns) + " |",
        "| " + " | ".join("---" if column.align == "left" else "---:" for column in table.columns) + " |",
    ]
    for number, row in enumerate(table.cells):
        cells = [f"**{escaped(text)}**" if (number, n) in best else escaped(text) for n, text in enumerate(row)]
        cells += [escaped(table.failed.get(number, ""))] if len(cells) < len(table.columns) else []
        cells += [""] * (len(table.columns) - len(cells))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


# ---- CSV ------------------------------------------------------------------------------------------------------------


def comma_separated(heads: Sequence[str], lines: Iterable[Mapping[str, Any]]) -> str:
    """Return CSV with unrounded numbers; missing values are empty, and keys without a heading are dropped."""
    text = io.StringIO()
    writer = csv.DictWriter(text, heads, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def trial_rows(run: MeasuredRun | None, /, **more: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for :func:`comma_separated` per trial, with its number and speed; nothing if there is no run."""
    if run is not None:
        facts = {"lossy": False} | {one.name: getattr(run, one.name) for one in fields(run)} | more
        for number, sample in enumerate(run.tokens_per_s.samples, 1):
            yield facts | {"trial": number, "tokens_per_s": sample}
