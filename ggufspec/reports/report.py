"""A report for the terminal and as Markdown: the sections of kept results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ggufspec.reports import plots
from ggufspec.reports.figures import Row, Table
from ggufspec.reports.sections import Machine, Section
from ggufspec.reports.tables import escaped

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable

# Columns of words; those of sentences may be broken into lines.
WORDS = frozenset({"Target", "Draft", "Device", "Policy"})
SENTENCES = frozenset({"Setting", "Remarks", "Failure"})
_LISTED = frozenset({"search", "length"})  # figures whose tables say what no other does


def terminal(machines: Sequence[Machine], width: int) -> Iterable[RenderableType]:
    """What is printed, for a console of ``width`` columns."""
    from rich.text import Text

    for machine in machines:
        yield Text(machine.name, style="bold underline")
        yield Text(", ".join(f"{name.lower()}: {value}" for name, value in machine.facts), style="dim")
        for section in machine.sections:
            yield Text()
            yield from _section(section, width)
        yield Text()


def _section(section: Section, width: int) -> Iterable[RenderableType]:
    from rich.text import Text

    yield Text(section.title, style="bold")
    yield Text(section.lead, style="green" if section.good else "")
    for warning in section.warnings:
        yield Text(f"! {warning}", style="yellow")
    for table in section.tables:
        if table.title != "Results":
            yield Text(table.title, style="dim")
        yield from _table(table, width)
    for number, figure in enumerate(section.figures):
        yield Text()
        yield from plots.plot(figure, min(width, 100))
        if figure.name in _LISTED or (number == 0 and not section.tables):
            yield from _table(Table(figure.title, figure.columns, figure.rows), width)
    for note in section.notes:
        yield Text(note, style="dim")


def _table(table: Table, width: int) -> Iterable[RenderableType]:
    """The table, and below it why rows failed, which would be its widest column."""
    from rich.text import Text

    rows = [(number, row) for number, row in enumerate(table.rows) if number not in table.failed]
    shown = _fitting(table.columns, [row for _, row in rows], width)
    made = rich_table(tuple(table.columns[index] for index in shown))
    for number, row in rows:
        cells = [Text(row[index] if index < len(row) else "") for index in shown]
        for place, index in enumerate(shown):
            if (number, index) in table.best:
                cells[place] = Text(f"{row[index]}★", style="bold")
        made.add_row(*cells)
    if rows:
        yield made
    for number in sorted(table.failed):
        *names, why = table.rows[number]
        yield Text(f" {' + '.join(names)}  {why}", style="red")


def _fitting(columns: Row, rows: Sequence[Row], width: int) -> list[int]:
    """The columns that are shown: from the left, as many as fit, those without anything left out."""
    shown, used = [], 0
    for index, column in enumerate(columns):
        cells = [row[index] for row in rows if index < len(row)]
        if not any(cells):
            continue
        widest = max(map(len, (column, *(f"{cell}★" for cell in cells))))
        if column in SENTENCES:
            widest = min(widest, 24)
        if used + widest + 2 > width and index > 1:
            continue
        used += widest + 2
        shown.append(index)
    return shown


def rich_table(columns: Row) -> RichTable:
    """An empty table: words at the left, figures at the right."""
    from rich import box
    from rich.table import Table as RichTable

    made = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for index, column in enumerate(columns):
        words = index == 0 or column in WORDS | SENTENCES
        made.add_column(column, justify="left" if words else "right", no_wrap=column not in SENTENCES)
    return made


# ---- Markdown -------------------------------------------------------------------------------------------------------


def markdown(machines: Sequence[Machine]) -> str:
    """The same as Markdown: plots are their tables."""
    lines: list[str] = []
    for machine in machines:
        lines += [
            f"# {escaped(machine.name)}",
            "",
            *(f"- {escaped(name)}: {escaped(value)}" for name, value in machine.facts),
            "",
        ]
        for section in machine.sections:
            lines += [f"## {escaped(section.title)}", "", f"**{escaped(section.lead)}**", ""]
            lines += [f"> {escaped(warning)}\n" for warning in section.warnings]
            for table in section.tables:
                lines += [f"### {escaped(table.title)}", "", *_markdown_table(table), ""]
            for figure in section.figures:
                table = Table(figure.title, figure.columns, figure.rows)
                lines += [f"### {escaped(figure.title)}", "", *_markdown_table(table), ""]
            lines += [f"- {escaped(note)}" for note in section.notes]
            lines += [""] if section.notes else []
            if section.facts:
                lines += [", ".join(f"{name}: {escaped(value)}" for name, value in section.facts) + ".", ""]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(table: Table) -> list[str]:
    marks = ["---" if index == 0 or c in WORDS | SENTENCES else "---:" for index, c in enumerate(table.columns)]
    lines = ["| " + " | ".join(map(escaped, table.columns)) + " |", "| " + " | ".join(marks) + " |"]
    for number, row in enumerate(table.rows):
        cells = [
            f"**{escaped(cell)}**" if (number, index) in table.best else escaped(cell) for index, cell in enumerate(row)
        ]
        cells += [""] * (len(table.columns) - len(cells))
        lines.append("| " + " | ".join(cells) + " |")
    return lines
