"""A comparison as tables: for the terminal, as Markdown, as CSV; and what it comes to, in sentences."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from ggufspec.display import of_file, of_memory
from ggufspec.reports.tables import escaped, layers, speed, with_spread
from ggufspec.schema.base import SpeculativeRun
from ggufspec.schema.compare import Cell, ComparedModel, CompareDocument, Quality, cell_name

if TYPE_CHECKING:
    from rich.table import Table

HOST = "CPU"
ALONE = "–"  # in the column of the draft
_NOT_YET = "not measured"  # interrupted before
_HALF = 1.96  # of a 95 % interval, in standard errors


class Sort(StrEnum):
    """What rows can be ordered by, the best first."""

    MATRIX = "matrix"
    SPEED = "speed"
    SPEEDUP = "speedup"
    ACCEPTED = "accepted"
    MEMORY = "memory"
    LOAD = "load"
    ENERGY = "energy"
    QUALITY = "quality"
    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of cells: how it is shown and what is best in it.

    Args:
        title: its heading.
        text: of a cell that was measured.
        value: to compare by; None where there is none.
        best: ``max`` or ``min``; empty marks nothing.
    """

    title: str
    text: Callable[[Cell], str]
    value: Callable[[Cell], float | None]
    best: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One cell as it is shown: its names, then its columns. ``failed`` is the reason in place of the columns."""

    target: str
    draft: str
    cells: tuple[str, ...]
    best: tuple[bool, ...]
    leads: bool
    failed: str = ""


def columns(document: CompareDocument) -> tuple[Column, ...]:
    """Those that have something to say in this comparison."""
    cells = [cell for cell in document.cells if cell.run is not None]
    where = which_memory(document)
    found = [
        Column("Layers", lambda cell: layers(cell.run) if cell.run else "", lambda _: None),
        Column("Tokens/s", lambda cell: speed(cell.run) if cell.run else "", _speed, "max"),
        Column("Speedup", lambda cell: f"{cell.speedup.median:.2f}×" if cell.speedup else "", _speedup, "max"),
        Column("Accepted", _percent, _accepted, "max"),
        Column(where, lambda cell: of_memory(_memory(cell, where)), lambda cell: _memory(cell, where), "min"),
        Column("Load", lambda cell: f"{cell.run.load_s:.1f} s" if cell.run else "", _load, "min"),
    ]
    if where != "VRAM":
        found.pop(0)  # everything is on the CPU
    if any(cell.energy_j_per_token is not None for cell in cells):
        found.append(Column("J/token", lambda cell: _energy(cell), lambda cell: cell.energy_j_per_token, "min"))
    return tuple(column for column in found if any(column.text(cell) for cell in cells)) if cells else tuple(found)


def vram_bytes(cell: Cell) -> int:
    """What it takes of the cards, as measured; as planned where that cannot be measured, on an RPC worker say."""
    planned = sum(sum(parts.values()) for device, parts in cell.bytes.items() if device != HOST)
    return (cell.run.vram_bytes if cell.run else 0) or planned


def _speed(cell: Cell) -> float | None:
    return cell.run.tokens_per_s.median if cell.run else None


def _speedup(cell: Cell) -> float | None:
    return cell.speedup.median if cell.speedup else None


def _accepted(cell: Cell) -> float | None:
    return cell.run.acceptance_rate if isinstance(cell.run, SpeculativeRun) and cell.run.drafted else None


def which_memory(document: CompareDocument) -> str:
    """Which memory is short: the cards', or the host's where nothing is on a card."""
    return "VRAM" if any(vram_bytes(cell) for cell in document.cells if cell.run) else "Memory"


def _memory(cell: Cell, where: str) -> float | None:
    if cell.run is None:
        return None
    return vram_bytes(cell) if where == "VRAM" else cell.run.peak_rss_bytes


def _load(cell: Cell) -> float | None:
    return cell.run.load_s if cell.run else None


def _percent(cell: Cell) -> str:
    share = _accepted(cell)
    if share is None:
        return "–" if isinstance(cell.run, SpeculativeRun) else ""  # none was drafted, which is not none accepted
    return f"{share:.0%}"


def _energy(cell: Cell) -> str:
    return "" if cell.energy_j_per_token is None else f"{cell.energy_j_per_token:.1f}"


def ordered(document: CompareDocument, sort: Sort) -> list[Cell]:
    """The cells, the best first; what failed, or has nothing to be ordered by, comes last."""
    cells = list(document.cells)
    if sort is Sort.MATRIX:
        return cells
    if sort in (Sort.TARGET, Sort.DRAFT):
        return sorted(cells, key=lambda cell: (cell.target if sort is Sort.TARGET else cell.draft or "").lower())
    where = which_memory(document)
    kl = {model.name: model.quality.mean_kl for model in document.targets if model.quality}
    keys: dict[Sort, tuple[Callable[[Cell], float | None], int]] = {
        Sort.SPEED: (_speed, -1),
        Sort.SPEEDUP: (_speedup, -1),
        Sort.ACCEPTED: (_accepted, -1),
        Sort.MEMORY: (lambda cell: _memory(cell, where), 1),
        Sort.LOAD: (_load, 1),
        Sort.ENERGY: (lambda cell: cell.energy_j_per_token, 1),
        Sort.QUALITY: (lambda cell: kl.get(cell.target), 1),
    }
    value, sign = keys[sort]

    def key(cell: Cell) -> tuple[bool, bool, float]:
        number = value(cell)
        return cell.run is None, number is None, sign * number if number is not None else 0.0

    return sorted(cells, key=key)


def rows(document: CompareDocument, sort: Sort = Sort.MATRIX) -> list[Row]:
    """One row per cell; the best of each column is marked, if there are two to choose from."""
    shown, cells = columns(document), ordered(document, sort)
    best: list[float | None] = []
    for column in shown:
        values = [value for cell in cells if cell.run and (value := column.value(cell)) is not None]
        pick = {"max": max, "min": min}.get(column.best)
        best.append(pick(values) if pick and len(values) > 1 else None)
    return [
        Row(
            cell.target,
            cell.draft or ALONE,
            tuple(column.text(cell) for column in shown),
            tuple(top is not None and column.value(cell) == top for column, top in zip(shown, best, strict=True)),
            cell.leads,
            _failure(cell),
        )
        for cell in cells
    ]


def _failure(cell: Cell) -> str:
    if cell.run is not None:
        return ""
    return cell.failure.error if cell.failure else _NOT_YET


def shorter(names: Sequence[str], room: int) -> dict[str, str]:
    """Names for a narrow table: without the words that all begin with, and without their middles if still too long."""
    split = [re.split(r"(?<=[-_. ])", name) for name in names]
    common = 0
    if len(set(names)) > 1:
        while all(len(words) > common + 1 for words in split) and len({words[common] for words in split}) == 1:
            common += 1
    cut = {name: "".join(words[common:]) for name, words in zip(names, split, strict=True)}
    fitting = {name: _fit(text, room) for name, text in cut.items()}
    return fitting if len(set(fitting.values())) == len(fitting) else cut


def _fit(text: str, room: int) -> str:
    tail = room * 3 // 5  # a quantisation is at the end
    return text if len(text) <= room else f"{text[: room - tail - 1]}…{text[-tail:]}"


def terminal(document: CompareDocument, sort: Sort = Sort.MATRIX, width: int = 100) -> Table:
    """A rich table of the cells; a star marks the best of a column."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown, made = columns(document), rows(document, sort)
    widths = [
        max([len(column.title), *(len(row.cells[i]) + row.best[i] for row in made if not row.failed)])
        for i, column in enumerate(shown)
    ]
    room = max(16, width - sum(widths) - 2 * (len(shown) + 2))  # for both names
    names_of_targets = shorter([model.name for model in document.targets], room // 2)
    drafts = shorter(
        [model.name for model in document.drafts], room - max([len("Target"), *map(len, names_of_targets.values())])
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("Target", no_wrap=True)
    table.add_column("Draft", no_wrap=True)
    for column in shown:
        table.add_column(column.title, justify="right", no_wrap=True)
    previous = ""
    for row in made:
        if sort is Sort.MATRIX and document.drafts and previous and previous != row.target:
            table.add_section()
        target = "" if sort is Sort.MATRIX and previous == row.target else names_of_targets.get(row.target, row.target)
        previous = row.target
        style = "" if not row.failed else "dim" if row.failed == _NOT_YET else "red"
        names = (Text(target), Text(drafts.get(row.draft, row.draft), style=style))
        if row.failed:
            table.add_row(*names, Text(_NOT_YET if row.failed == _NOT_YET else "failed", style=style))
            continue
        cells = [
            Text(f"{text}*" if best else f"{text} " if text and column.best else text, style="green" if best else "")
            for text, best, column in zip(row.cells, row.best, shown, strict=True)
        ]
        table.add_row(*names, *cells, style="bold" if row.leads else None)
    return table


def targets(document: CompareDocument, width: int = 100) -> Table:
    """A rich table of the targets: size and quality."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("Target", no_wrap=True)
    for title in ("Size", "Perplexity", "Mean KL", "Same top token"):
        table.add_column(title, justify="right", no_wrap=True)
    room = max(12, width - 58)
    names = {model.name: _fit(model.name, room) for model in document.targets}
    for model in document.targets:
        table.add_row(Text(names[model.name]), of_file(model.size_bytes), *quality_cells(model))
    return table


def quality_cells(model: ComparedModel) -> tuple[str, str, str]:
    """Perplexity, mean KL and agreement with their 95 % intervals."""
    found = model.quality
    if found is None:
        return ("", "", "unknown") if model.failure else ("", "", "")
    perplexity = f"{found.perplexity:.2f} ± {_HALF * found.perplexity_error:.2f}"
    if found.reference == model.name:
        return perplexity, "reference", ""
    return (
        perplexity,
        f"{found.mean_kl:.4f} ± {_HALF * found.mean_kl_error:.4f}",
        f"{found.top1_agreement:.1%} ± {_HALF * found.top1_agreement_error:.1%}",
    )


def failures(document: CompareDocument) -> list[str]:
    """Why cells have no figures and targets no quality, in words; equal reasons are told once."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for cell in document.cells:
        if cell.run is None and cell.failure is not None:
            by_reason.setdefault((cell.failure.error, cell.failure.hint), []).append(cell_name(cell.target, cell.draft))
    for model in document.targets:
        if model.failure is not None:
            key = (model.failure.error, model.failure.hint)
            by_reason.setdefault(key, []).append(f"quality of {model.name}")
    return [f"{', '.join(names)}: {error}{f' ({hint})' if hint else ''}" for (error, hint), names in by_reason.items()]


def verdict(document: CompareDocument) -> str:
    """Which is fastest, what its draft brings, and what its quantisation costs."""
    measured = [cell for cell in document.cells if cell.run is not None]
    if not measured:
        return "Nothing could be measured."
    best = max(measured, key=lambda cell: _speed(cell) or 0.0)
    assert best.run is not None
    leaders = [cell for cell in measured if cell.leads and cell is not best]
    text = f"Fastest: {cell_name(best.target, best.draft)}, {with_spread(best.run.tokens_per_s)} tokens/s"
    if best.speedup is not None:
        low, high = best.speedup.ci95
        text += f", {best.speedup.median:.2f}× its target alone"
        text += f" (95 % interval {low:.2f} to {high:.2f})" if len(best.speedup.samples) > 1 else ""
    if leaders:
        names = [cell_name(cell.target, cell.draft) for cell in leaders]
        text += f"; not told apart from {names[0] if len(names) == 1 else f'{len(names)} others'}"
    text += "."
    quality = next((model.quality for model in document.targets if model.name == best.target), None)
    if quality is not None:
        text += " " + _price(best.target, quality)
    return text


def _price(target: str, quality: Quality) -> str:
    if quality.reference == target:
        return "It is the reference that the other targets are judged by."
    return (
        f"It says the same likeliest token as {quality.reference} in {quality.top1_agreement:.1%} of places "
        f"(mean KL {quality.mean_kl:.4f} nats a token)."
    )


def markdown(document: CompareDocument, sort: Sort = Sort.MATRIX) -> str:
    """Both tables, the verdict and the warnings."""
    shown = columns(document)
    lines = [
        "| " + " | ".join(("Target", "Draft", *(column.title for column in shown))) + " |",
        "| --- | --- |" + " ---: |" * len(shown),
    ]
    for row in rows(document, sort):
        cells = [
            f"**{escaped(text)}**" if best else escaped(text) for text, best in zip(row.cells, row.best, strict=True)
        ]
        if row.failed:
            reason = row.failed if row.failed == _NOT_YET else f"failed: {row.failed}"
            cells = [escaped(reason), *[""] * (len(shown) - 1)]
        lines.append("| " + " | ".join((escaped(row.target), escaped(row.draft), *cells)) + " |")
    if any(model.quality or model.failure for model in document.targets):
        lines += [
            "",
            "| Target | Size | Perplexity | Mean KL | Same top token |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for model in document.targets:
            cells = [escaped(model.name), of_file(model.size_bytes), *quality_cells(model)]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", escaped(verdict(document))]
    lines += ["", *(f"- Warning: {escaped(text)}" for text in document.warnings)] if document.warnings else []
    return "\n".join(lines) + "\n"


def comma_separated(document: CompareDocument, sort: Sort = Sort.MATRIX) -> str:
    """One line per trial, numbers unrounded; a cell that failed has one line with its reason."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        (
            *("target", "draft", "trial", "tokens_per_s", "gpu_layers", "gpu_layers_draft", "speedup"),
            *("acceptance_rate", "tokens_per_round", "vram_bytes", "peak_rss_bytes", "load_s", "energy_j_per_token"),
            *("mean_kl", "perplexity", "top1_agreement", "prompt_tokens_per_s", "time_to_first_token_s", "failure"),
        )
    )
    qualities = {model.name: model.quality for model in document.targets}
    for cell in ordered(document, sort):
        quality = qualities.get(cell.target)
        judged = (quality.mean_kl, quality.perplexity, quality.top1_agreement) if quality else ("", "", "")
        names = (cell.target, cell.draft or "")
        run = cell.run
        if run is None:
            writer.writerow((*names, *[""] * 11, *judged, "", "", _failure(cell)))
            continue
        extra = (run.acceptance_rate, run.tokens_per_round) if isinstance(run, SpeculativeRun) else ("", "")
        rest = (vram_bytes(cell), run.peak_rss_bytes, run.load_s, _or_empty(cell.energy_j_per_token))
        placed = (run.gpu_layers, run.gpu_layers_draft if isinstance(run, SpeculativeRun) else "")
        for trial, sample in enumerate(run.tokens_per_s.samples, 1):
            speedup = _or_empty(cell.speedup.median if cell.speedup else None)
            prompts = (run.prompt_tokens_per_s, _or_empty(run.time_to_first_token_s))
            writer.writerow((*names, trial, sample, *placed, speedup, *extra, *rest, *judged, *prompts, ""))
    return text.getvalue()


def _or_empty(value: float | None) -> float | str:
    return "" if value is None else value
