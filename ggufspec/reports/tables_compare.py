"""A comparison's tables for people who read a report: its cells, and the quality of its targets. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.display import of_memory
from ggufspec.reports import compare, figures, figures_compare, tables
from ggufspec.reports.figures import Row, Table, times
from ggufspec.reports.tables import with_spread
from ggufspec.schema.base import SpeculativeRun
from ggufspec.schema.compare import CompareDocument

_BEFORE, _AFTER = ("Target", "Draft", "Tokens/s", "Speedup", "Accepted", "GPU layers"), ("Load", "J/token", "Mean KL")


def cells(document: CompareDocument) -> Table:
    """Every cell, the fastest first, without columns that are empty. Memory is what the command shows, as measured."""
    judged = {model.name: model.quality for model in document.targets}
    rows: list[Row] = []
    values: list[list[float | None]] = []
    failed, names = set(), figures_compare.names_of(document)
    memory = "VRAM" if any(compare.vram_bytes(cell) for cell in document.cells if cell.run) else "Memory"
    for number, cell in enumerate(compare.ordered(document, compare.Sort.SPEED)):
        run, kl = cell.run, judged.get(cell.target)
        name = (names.targets[cell.target], names.drafts[cell.draft] if cell.draft else "alone")
        if run is None:
            failed.add(number)
            rows.append((*name, f"failed: {cell.failure.error}" if cell.failure else "not measured"))
            values.append([])
            continue
        used = compare.vram_bytes(cell) if memory == "VRAM" else run.peak_rss_bytes
        energy = cell.energy_j_per_token
        rows.append(
            (
                *name,
                with_spread(run.tokens_per_s),
                times(cell.speedup) if cell.draft else "",
                figures.acceptance_of(run),
                tables.layers(run),
                of_memory(used) if used else "–",
                f"{run.load_s:.1f} s",
                f"{energy:.2f}" if energy is not None else "",
                f"{kl.mean_kl:.4f}" if kl else "",
            )
        )
        acceptance = run.acceptance_rate if isinstance(run, SpeculativeRun) and run.drafted else None
        speedup = cell.speedup.median if cell.speedup and cell.draft else None
        less = [-used if used else None, -run.load_s, -energy if energy is not None else None]
        kls = -kl.mean_kl if kl else None
        values.append([None, None, run.tokens_per_s.median, speedup, acceptance, None, *less, kls])
    columns = (*_BEFORE, memory, *_AFTER)
    best = _best(values, len(columns))
    return _without_empty(Table("Results", columns, tuple(rows), best, frozenset(failed)))


def _best(values: Sequence[Sequence[float | None]], columns: int) -> frozenset[tuple[int, int]]:
    """(row, column) of the largest of each column that has at least two different values."""
    found = set()
    for column in range(columns):
        there = {row: v[column] for row, v in enumerate(values) if len(v) > column and v[column] is not None}
        most = max((value for value in there.values() if value is not None), default=None)
        if most is not None and len(set(there.values())) > 1:
            found |= {(row, column) for row, value in there.items() if value == most}
    return frozenset(found)


def _without_empty(table: Table) -> Table:
    """The table without columns in which no row has anything."""
    kept = [
        index
        for index in range(len(table.columns))
        if index < 3 or any(len(row) > index and row[index] not in ("", "–") for row in table.rows)
    ]
    rows = tuple(
        row if number in table.failed else tuple(row[index] for index in kept) for number, row in enumerate(table.rows)
    )
    best = frozenset((row, kept.index(column)) for row, column in table.best if column in kept)
    return Table(table.title, tuple(table.columns[index] for index in kept), rows, best, table.failed)


def quality(document: CompareDocument) -> Table | None:
    """What is known of each target's quality, or why nothing is; None where none was measured."""
    rows: list[Row] = []
    failed, names = set(), figures_compare.names_of(document)
    known = False
    for model in document.targets:
        name, size = names.targets[model.name], f"{model.size_bytes / 1e9:.2f} GB"
        if model.quality is None:
            if model.failure is not None:
                failed.add(len(rows))
                rows.append((name, size, f"failed: {model.failure.error}"))
            continue
        known = True
        rows.append((name, size, *compare.quality_cells(model)))
    if not known and not failed:
        return None
    columns = ("Target", "Size", "Perplexity", "Mean KL", "Same top token")
    return Table("Quality of the targets, with 95 % intervals", columns, tuple(rows), frozenset(), frozenset(failed))
