"""Reports of saved results for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ggufspec.reports import table
from ggufspec.reports.html.sections import MachineReport, ReportSection
from ggufspec.reports.table import escaped

if TYPE_CHECKING:
    from rich.console import RenderableType


def terminal(machines: Sequence[MachineReport], width: int) -> Iterable[RenderableType]:
    """Yield the sections for the terminal, with tables but without plots, which only the HTML page has."""
    from rich.text import Text

    for machine in machines:
        yield Text(machine.name, style="bold underline")
        yield Text(", ".join(f"{name.lower()}: {value}" for name, value in machine.facts), style="dim")
        for section in machine.sections:
            yield Text()
            yield from _section(section, width)
        yield Text()


def _section(section: ReportSection, width: int) -> Iterable[RenderableType]:
    from rich.text import Text

    yield Text(section.title, style="bold")
    yield Text(section.lead, style="green" if section.good else "")
    for warning in section.warnings:
        yield Text(f"! {warning}", style="yellow")
    for shown in (*section.tables, *(one.table for one in section.figures if one.table)):
        if shown.title != "Results":
            yield Text(shown.title, style="dim")
        yield table.terminal(shown, width)
        for reason in shown.reasons():
            yield Text(reason, style="red")
    for note in section.notes:
        yield Text(note, style="dim")


def markdown(machines: Sequence[MachineReport]) -> str:
    """Return the sections as Markdown, in which plots are tables."""
    lines: list[str] = []
    for machine in machines:
        facts = (f"- {escaped(name)}: {escaped(value)}" for name, value in machine.facts)
        lines += [f"# {escaped(machine.name)}", "", *facts, ""]
        for section in machine.sections:
            lines += [f"## {escaped(section.title)}", "", f"**{escaped(section.lead)}**", ""]
            lines += [f"> {escaped(warning)}\n" for warning in section.warnings]
            for shown in (*section.tables, *(one.table for one in section.figures if one.table)):
                lines += [f"### {escaped(shown.title)}", "", table.markdown(shown), ""]
            lines += [f"- {escaped(note)}" for note in section.notes]
            lines += [""] if section.notes else []
            if section.facts:
                lines += [", ".join(f"{name}: {escaped(value)}" for name, value in section.facts) + ".", ""]
    return "\n".join(lines).rstrip() + "\n"
