"""Report of a comparison, with tables of its cells and targets and with its verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from typing import Any

from ggufspec.llamacpp.options import HOST
from ggufspec.reports import bench, table
from ggufspec.reports.table import ReportColumn, ReportTable
from ggufspec.reports.words import (
    acceptance,
    accepted_text,
    fitted,
    layers,
    median,
    over,
    ratio,
    shorter,
    speed,
    with_spread,
)
from ggufspec.schema.base import Failure, MeasuredRun, SpeculativeRun, Spread
from ggufspec.schema.compare import CompareCell, ComparedModel, CompareDocument, Quality, cell_name
from ggufspec.schema.text import of_file, of_memory

TARGET_ONLY = "–"  # entry in the draft column for target-only
_HALF = 1.96  # half the width of a 95 % interval, in standard errors


class CompareSort(StrEnum):
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


def vram_bytes(cell: CompareCell) -> int:
    """Return the cell's measured VRAM, or the planned VRAM if it cannot be measured (e.g. on an RPC worker)."""
    planned = sum(sum(parts.values()) for device, parts in cell.bytes.items() if device != HOST)
    return (cell.run.vram_bytes if cell.run else 0) or planned


def _on_cards(document: CompareDocument) -> bool:
    """Return whether VRAM is the memory to compare, which is true unless all cells run on the host only."""
    return any(vram_bytes(cell) for cell in document.cells if cell.run)


def _memory(cell: CompareCell, on_cards: bool) -> int | None:
    return None if cell.run is None else vram_bytes(cell) if on_cards else cell.run.peak_rss_bytes


def ordered(document: CompareDocument, sort: CompareSort) -> list[CompareCell]:
    """Return the cells sorted by ``sort``, best first; those without a value and then failed ones come last."""
    cells = list(document.cells)
    if sort is CompareSort.MATRIX:
        return cells
    if sort in (CompareSort.TARGET, CompareSort.DRAFT):
        return sorted(cells, key=lambda cell: (cell.target if sort is CompareSort.TARGET else cell.draft or "").lower())
    on_cards = _on_cards(document)
    kl = {model.name: model.quality.mean_kl for model in document.targets if model.quality}
    keys: dict[CompareSort, tuple[Callable[[CompareCell], float | None], int]] = {
        CompareSort.SPEED: (_speed, -1),
        CompareSort.SPEEDUP: (lambda cell: speedup.median if (speedup := _speedup(cell)) else None, -1),
        CompareSort.ACCEPTED: (lambda cell: acceptance(cell.run), -1),
        CompareSort.MEMORY: (lambda cell: _memory(cell, on_cards), 1),
        CompareSort.LOAD: (lambda cell: cell.run.load_s if cell.run else None, 1),
        CompareSort.ENERGY: (lambda cell: cell.energy_j_per_token, 1),
        CompareSort.QUALITY: (lambda cell: kl.get(cell.target), 1),
    }
    value, sign = keys[sort]

    def key(cell: CompareCell) -> tuple[bool, bool, float]:
        number = value(cell)
        return cell.run is None, number is None, sign * number if number is not None else 0.0

    return sorted(cells, key=key)


def _drafted_nothing(cell: CompareCell) -> bool:
    """Return whether a cell with a draft never drafted, which makes its speedup over target-only mere noise."""
    return _is_idle(cell.run)


def _is_idle(run: MeasuredRun | None) -> bool:
    return isinstance(run, SpeculativeRun) and not run.drafted


def _speedup(cell: CompareCell) -> Spread | None:
    return None if _drafted_nothing(cell) else cell.speedup


def _speed(cell: CompareCell) -> float | None:
    return cell.run.tokens_per_s.median if cell.run else None


def names_of(document: CompareDocument, most: int | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """Return short names by full name, for targets and for drafts; they stay distinct if cut to ``most`` characters."""
    targets = [*(model.name for model in document.targets), *(cell.target for cell in document.cells)]
    drafts = [*(model.name for model in document.drafts), *(cell.draft for cell in document.cells if cell.draft)]
    found = shorter(list(dict.fromkeys(targets))), shorter(list(dict.fromkeys(drafts)))
    if most is None:
        return found
    cut = fitted([*found[0].values(), *found[1].values()], most)
    short_targets, short_drafts = ({name: cut[text] for name, text in names.items()} for names in found)
    return short_targets, short_drafts


def results(
    document: CompareDocument,
    sort: CompareSort = CompareSort.MATRIX,
    names: tuple[dict[str, str], dict[str, str]] | None = None,
    *,
    grouped: bool = False,
) -> ReportTable:
    """Return a table with a row per cell and without empty columns; ``names`` are short names from :func:`names_of`.

    With ``grouped``, only a target's first row names it, unless the cells are sorted.
    """
    targets, drafts = names or ({}, {})
    on_cards, grouped = _on_cards(document), grouped and sort is CompareSort.MATRIX
    kl = {model.name: model.quality.mean_kl for model in document.targets if model.quality}
    columns = (
        table.word("Target"),
        table.word("Draft"),
        ReportColumn("Tokens/s", speed, rank=lambda run: None if _is_idle(run) else median(run.tokens_per_s)),
        ReportColumn("Speedup", ratio, rank=median),
        ReportColumn("Accepted", accepted_text, rank=acceptance),
        ReportColumn("GPU layers", layers),
        ReportColumn("VRAM" if on_cards else "Memory", of_memory, rank=lambda size: -size),
        ReportColumn("Load", lambda seconds: f"{seconds:.1f} s", rank=lambda seconds: -seconds),
        ReportColumn("J/token", lambda energy: f"{energy:.1f}", rank=lambda energy: -energy),
        ReportColumn("Mean KL", lambda value: f"{value:.4f}", rank=lambda value: -value, only="file"),
    )
    rows: list[tuple[Any, ...]] = []
    failed, groups = {}, set()
    previous = ""
    for number, cell in enumerate(cells := ordered(document, sort)):
        if grouped and document.drafts and previous and previous != cell.target:
            groups.add(number)
        target = "" if grouped and previous == cell.target else cell.target
        previous, run = cell.target, cell.run
        named = (targets.get(target, target), drafts.get(cell.draft, cell.draft) if cell.draft else TARGET_ONLY)
        if run is None:
            failed[number] = f"failed: {cell.failure.error}" if cell.failure else "not measured"
            rows.append(named)
            continue
        memory = _memory(cell, on_cards) or None
        measured = (run, _speedup(cell), run, run if on_cards else None, memory)
        rows.append((*named, *measured, run.load_s, cell.energy_j_per_token, kl.get(cell.target)))
    leading = [number for number, cell in enumerate(cells) if cell.leads and not _drafted_nothing(cell)]
    return ReportTable("Results", columns, rows, failed, leading, groups).filled(least=3)


def in_a_line(cell: CompareCell) -> str:
    """Return one line with a measured cell's speed, speedup and acceptance."""
    assert cell.run is not None
    parts = [f"{speed(cell.run)} tokens/s"]
    parts += [f"speedup {ratio(speedup)}"] if (speedup := _speedup(cell)) else []
    parts += ["nothing drafted"] if _drafted_nothing(cell) else []
    parts += [f"{share} accepted"] if not _drafted_nothing(cell) and (share := accepted_text(cell.run)) else []
    return f"{cell_name(cell.target, cell.draft)}: {', '.join(parts)}"


def portions_of_best(
    document: CompareDocument, names: tuple[dict[str, str], dict[str, str]] | None = None
) -> ReportTable | None:
    """Return a table of the fastest drafting cell's acceptance and speedup by kind of prompt; None if not measured."""
    drafted = (
        cell for cell in ordered(document, CompareSort.SPEED) if cell.run and cell.draft and not _drafted_nothing(cell)
    )
    best = next(drafted, None)
    found = bench.portions(best.by_kind, best.by_part) if best else None
    if best is None or best.draft is None or found is None:
        return None
    targets, drafts = names or ({}, {})
    cell = cell_name(targets.get(best.target, best.target), drafts.get(best.draft, best.draft))
    return replace(found, title=f"{found.title}: {cell}")


def quality(document: CompareDocument, names: dict[str, str] | None = None) -> ReportTable:
    """Return a table with a row per target: its size, and its quality or the reason why it is unknown."""
    columns = table.columns("Target", ReportColumn("Size", of_file), "Perplexity", "Mean KL", "Same top token")
    rows = [
        ((names or {}).get(model.name, model.name), model.size_bytes, *_quality_cells(model))
        for model in document.targets
    ]
    failed = {n: f"failed: {model.failure.error}" for n, model in enumerate(document.targets) if model.failure}
    return ReportTable("Quality of the targets, with 95% intervals", columns, rows, failed)


def _quality_cells(model: ComparedModel) -> tuple[str, ...]:
    found = model.quality
    if found is None:
        return ()
    perplexity = f"{found.perplexity:.2f} ± {_HALF * found.perplexity_error:.2f}"
    if found.reference == model.name:
        return perplexity, "reference", ""
    return (
        perplexity,
        f"{found.mean_kl:.4f} ± {_HALF * found.mean_kl_error:.4f}",
        f"{found.top1_agreement:.1%} ± {_HALF * found.top1_agreement_error:.1%}",
    )


def has_quality(document: CompareDocument) -> bool:
    return any(model.quality or model.failure for model in document.targets)


def failures(document: CompareDocument) -> list[str]:
    """Return the reasons why cells and quality measurements failed, each only once."""
    failed = [(cell_name(cell.target, cell.draft), cell.failure) for cell in document.cells if cell.run is None]
    failed += [(f"quality of {model.name}", model.failure) for model in document.targets]
    by_reason: dict[Failure, list[str]] = {}
    for name, failure in failed:
        if failure is not None:
            by_reason.setdefault(failure, []).append(name)
    return [f"{', '.join(names)}: {f.error}{f' ({f.hint})' if f.hint else ''}" for f, names in by_reason.items()]


def verdict(document: CompareDocument) -> str:
    measured = [cell for cell in document.cells if cell.run is not None]
    if not measured:
        return "Nothing could be measured."
    idle = [cell_name(cell.target, cell.draft) for cell in measured if _drafted_nothing(cell)]
    distinct = [cell for cell in measured if not _drafted_nothing(cell)] or measured
    best = max(distinct, key=lambda cell: _speed(cell) or 0.0)
    assert best.run is not None
    reached = f"{cell_name(best.target, best.draft)}, {with_spread(best.run.tokens_per_s)} tokens/s"
    if len(measured) == 1 < len(document.cells):
        text = f"Nothing to compare: only {reached}, was measured"
    else:
        text = f"Fastest: {reached}"
        if (speedup := _speedup(best)) is not None:
            text += f", speedup {over(speedup, 'over target-only')}"
        if names := [cell_name(cell.target, cell.draft) for cell in distinct if cell.leads and cell is not best]:
            text += f"; within the noise of {names[0] if len(names) == 1 else f'{len(names)} others'}"
    text += "."
    looked_up = [cell for cell in measured if isinstance(cell.run, SpeculativeRun) and cell.run.is_only_lookup]
    alone = [cell_name(cell.target, cell.draft) for cell in looked_up]
    said = {
        "drafted nothing and ran as target-only": idle,
        "drafted with the n-gram lookup only, not with the draft": alone,
    }
    for what, names in said.items():
        if names:
            text += f" {names[0] if len(names) == 1 else f'{len(names)} pairs'} {what}."
    found = next((model.quality for model in document.targets if model.name == best.target), None)
    return f"{text} {_price(best.target, found)}" if found else text


def _price(target: str, found: Quality) -> str:
    if found.reference == target:
        return "It is the reference that the other targets are compared with."
    return (
        f"Its likeliest token is the same as that of {found.reference} at {found.top1_agreement:.1%} of positions "
        f"(mean KL {found.mean_kl:.4f} nats per token)."
    )


def markdown(document: CompareDocument, sort: CompareSort = CompareSort.MATRIX) -> str:
    parts = [table.markdown(results(document, sort))]
    if has_quality(document):
        parts.append(table.markdown(quality(document)))
    parts.append(table.escaped(verdict(document)))
    if (found := portions_of_best(document)) is not None:
        parts.append(table.markdown(found))
    if document.warnings:
        parts.append("\n".join(f"- Warning: {table.escaped(text)}" for text in document.warnings))
    return "\n\n".join(parts) + "\n"


def comma_separated(document: CompareDocument, sort: CompareSort = CompareSort.MATRIX) -> str:
    """Return CSV with one line per trial; a failed cell has one line with the reason."""
    heads = (
        *("target", "draft", "trial", "tokens_per_s", "gpu_layers", "gpu_layers_draft", "speedup"),
        *("acceptance_rate", "tokens_per_round", "vram_bytes", "peak_rss_bytes", "load_s", "energy_j_per_token"),
        *("mean_kl", "perplexity", "top1_agreement", "prompt_tokens_per_s", "time_to_first_token_s", "failure"),
    )
    return table.comma_separated(heads, _lines(document, sort))


def _lines(document: CompareDocument, sort: CompareSort) -> Iterator[dict[str, Any]]:
    qualities = {model.name: model.quality for model in document.targets}
    for cell in ordered(document, sort):
        found = qualities.get(cell.target)
        line: dict[str, Any] = {"target": cell.target, "draft": cell.draft}
        if found:
            line |= {key: getattr(found, key) for key in ("mean_kl", "perplexity", "top1_agreement")}
        if cell.run is None:
            yield line | {"failure": cell.failure.error if cell.failure else "not measured"}
        line |= {
            "speedup": speedup.median if (speedup := _speedup(cell)) else None,
            "vram_bytes": vram_bytes(cell),
            "energy_j_per_token": cell.energy_j_per_token,
        }
        yield from table.trial_rows(cell.run, **line)
