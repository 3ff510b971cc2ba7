"""Results as sections of a report: what was found in a sentence, tables, figures, remarks; by machine. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ggufspec.reports import figures, figures_compare, figures_runs, figures_tune
from ggufspec.reports.document import (
    BenchDocument,
    Cell,
    CompareDocument,
    PlanDocument,
    SpeculativeRun,
    SweepDocument,
    TuneDocument,
)
from ggufspec.reports.figures import Figure, Row, base_name, rate, times
from ggufspec.reports.plan import gib
from ggufspec.reports.plan import rate as predicted_rate
from ggufspec.reports.reading import Result


@dataclass(frozen=True, slots=True)
class Table:
    """Cells for people. ``best`` are (row, column) of what leads its column; ``failed`` rows end in a reason."""

    title: str
    columns: Row
    rows: tuple[Row, ...]
    best: frozenset[tuple[int, int]] = frozenset()
    failed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Section:
    """One document.

    Args:
        kind: of document: ``compare``, say.
        title: what it is about.
        lead: the finding, in a sentence or two.
        good: whether the finding is a gain.
        facts: what it was measured with, as (name, value).
        tables: the results.
        figures: the plots, each with its own table.
        warnings: what makes the results unsure.
        notes: other remarks.
        speed: the best tokens/s, as a cell; empty where nothing was measured.
        gain: over target-only or the first choice, as a cell.
    """

    kind: str
    title: str
    lead: str
    good: bool
    facts: tuple[tuple[str, str], ...]
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    speed: str
    gain: str


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine and what was found on it."""

    name: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]


def report(documents: Sequence[Result]) -> tuple[Machine, ...]:
    """The documents by machine, in the order in which they came, plans last: they lend their curves to measurements."""
    plans = [document for document in documents if isinstance(document, PlanDocument)]
    keys = {str(_cards(d.machine)): _machine(d)[2] for d in documents if not isinstance(d, PlanDocument)}
    groups: dict[str, tuple[str, tuple[tuple[str, str], ...], list[Section]]] = {}
    for document in sorted(documents, key=lambda document: isinstance(document, PlanDocument)):
        name, facts, key = _machine(document)
        if isinstance(document, PlanDocument):  # for the cards of a machine that is here
            key = keys.get(str([d.description for d in document.devices if d.name != figures.HOST]), key)
        groups.setdefault(key, (name, facts, []))[2].append(section(document, plans))
    return tuple(Machine(name, facts, tuple(found)) for name, facts, found in groups.values())


def section(document: Result, plans: Sequence[PlanDocument] = ()) -> Section:
    """One document as a section."""
    if isinstance(document, CompareDocument):
        return _compare(document, plans)
    if isinstance(document, BenchDocument):
        return _bench(document, plans)
    if isinstance(document, TuneDocument):
        return _tune(document, plans)
    if isinstance(document, SweepDocument):
        return _sweep(document, plans)
    return _plan(document)


# ---- machines -------------------------------------------------------------------------------------------------------


def _machine(document: Result) -> tuple[str, tuple[tuple[str, str], ...], str]:
    """(name, facts, what it is known by)."""
    if isinstance(document, PlanDocument):
        devices = [f"{d.description or d.name} ({gib(d.total_bytes)})" for d in document.devices]
        name = "Planned for " + ", ".join(d.description or d.name for d in document.devices if d.name != figures.HOST)
        if name == "Planned for ":
            name = "Planned without a card"
        return name, (("Devices", ", ".join(devices)),), f"plan {devices}"
    machine = document.machine
    cards = [card for card in machine.get("gpus") or [] if isinstance(card, dict)]
    shown = [
        f"{card.get('name', 'card')} ({gib(card['total_bytes'])})"
        if card.get("total_bytes")
        else str(card.get("name", "card"))
        for card in cards
    ]
    cpu, cores = str(machine.get("cpu") or "an unnamed processor"), machine.get("cores")
    facts = [("Cards", ", ".join(shown) or "none seen")]
    facts.append(("Processor", f"{cpu}, {cores} cores" if cores else cpu))
    if isinstance(machine.get("memory_bytes"), int):
        facts.append(("Memory", gib(machine["memory_bytes"])))
    if machine.get("system"):
        facts.append(("System", str(machine["system"])))
    name = " + ".join(_cards(machine)) or cpu
    key = str([shown, cpu, cores, machine.get("memory_bytes"), machine.get("system"), machine.get("host")])
    return name, tuple(facts), key


def _cards(machine: dict[str, Any]) -> list[str]:
    """Names of the cards."""
    return [str(card.get("name", "card")) for card in machine.get("gpus") or [] if isinstance(card, dict)]


def _versions(machine: dict[str, Any]) -> list[tuple[str, str]]:
    found = [
        f"{name} {machine[key]}"
        for name, key in (("ggufspec", "ggufspec"), ("llama-cpp-python", "llama_cpp_python"))
        if machine.get(key)
    ]
    return [("Versions", ", ".join(found))] if found else []


_SETTINGS = (
    ("n_ctx", "Context"),
    ("type_k", "K cache"),
    ("type_v", "V cache"),
    ("flash_attention", "Flash attention"),
    ("threads", "Threads"),
    ("drafter", "Drafter"),
    ("draft_policy", "Draft policy"),
    ("draft_max", "Draft length at most"),
    ("accept", "Acceptance rule"),
    ("temperature", "Temperature"),
    ("prompts", "Prompts"),
    ("max_tokens", "Tokens an answer"),
    ("repetitions", "Trials each"),
    ("budget_s", "Budget, seconds"),
)


def _settings(settings: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    for key, name in _SETTINGS:
        value = settings.get(key)
        if value is not None and value != "" and not isinstance(value, (dict, list)):
            shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
            found.append((name, shown))
    return found


# ---- compare --------------------------------------------------------------------------------------------------------

COMPARE_COLUMNS = (
    "Target",
    "Draft",
    "Tokens/s",
    "Speedup",
    "Accepted",
    "GPU layers",
    "VRAM",
    "Load",
    "J/token",
    "Mean KL",
)


def _compare(document: CompareDocument, plans: Sequence[PlanDocument]) -> Section:
    measured = [cell for cell in document.cells if cell.run is not None]
    names = figures_compare.names_of(document)
    leaders = sorted((cell for cell in measured if cell.leads), key=_speed, reverse=True)
    best = max(measured, key=_speed, default=None)
    lead, gain, speed, good = "Nothing was measured.", "", "", False
    if best is not None and best.run is not None:
        speed, gain = rate(best.run.tokens_per_s), times(best.speedup) if best.draft else ""
        good = best.draft is not None
        lead = f"Fastest: {names.cell(best)}, {speed} tokens/s"
        lead += f", {figures.over(best.speedup, 'its target alone')}." if gain else "."
        others = [cell for cell in leaders if cell is not best]
        if others:
            lead += f" Not told apart from it: {', '.join(names.cell(cell) for cell in others)}."
    qualities = _quality_table(document)
    failures = sum(cell.run is None for cell in document.cells)
    title = f"{_count(len(document.targets), 'target')} × {_count(len(document.drafts), 'draft')}"
    stem = figures.common_stem([base_name(name) for name in names.targets]).rstrip("-_. ")
    if stem:
        title += f" of {stem}"
    if failures:
        title += f", {failures} failed"
    return Section(
        "compare",
        f"Comparison of {title}",
        lead,
        good,
        (*_models(document), *_settings(document.settings), *_versions(document.machine)),
        (_cells_table(document), *([qualities] if qualities else [])),
        tuple(figures_compare.of_compare(document, plans)),
        document.warnings,
        _notes(document.notes, document.interrupted),
        speed,
        gain,
    )


def _models(document: CompareDocument) -> list[tuple[str, str]]:
    """The whole names of what has a short one."""
    names = figures_compare.names_of(document)
    found = []
    for word, short in (("Targets", names.targets), ("Drafts", names.drafts)):
        if short:
            found.append((word, ", ".join(base_name(name) for name in short)))
    return found


def _speed(cell: Cell) -> float:
    return cell.run.tokens_per_s.median if cell.run else 0.0


def _cells_table(document: CompareDocument) -> Table:
    quality = {model.name: model.quality for model in document.targets}
    rows: list[Row] = []
    values: list[list[float | None]] = []
    failed, names = set(), figures_compare.names_of(document)
    memory = "VRAM" if figures_compare.on_cards(document) else "Memory"
    for number, cell in enumerate(sorted(document.cells, key=_speed, reverse=True)):
        run, kl = cell.run, quality.get(cell.target)
        name = (names.targets[cell.target], names.drafts[cell.draft] if cell.draft else "alone")
        if run is None:
            failed.add(number)
            why = cell.failure.error if cell.failure else "not measured"
            rows.append((*name, f"failed: {why}"))
            values.append([])
            continue
        used = figures_compare.used_bytes(cell)
        energy = cell.energy_j_per_token
        rows.append(
            (
                *name,
                rate(run.tokens_per_s),
                times(cell.speedup) if cell.draft else "",
                figures.acceptance_of(run),
                figures.layers_of(run),
                gib(used) if used else "–",
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
    columns = tuple(memory if column == "VRAM" else column for column in COMPARE_COLUMNS)
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


def _quality_table(document: CompareDocument) -> Table | None:
    rows: list[Row] = []
    failed, names = set(), figures_compare.names_of(document)
    known = False
    for model in document.targets:
        quality = model.quality
        if quality is None:
            if model.failure is not None:
                failed.add(len(rows))
                rows.append(
                    (names.targets[model.name], f"{model.size_bytes / 1e9:.2f} GB", f"failed: {model.failure.error}")
                )
            continue
        known = True
        rows.append(
            (
                names.targets[model.name] + (" (reference)" if quality.reference == model.name else ""),
                f"{model.size_bytes / 1e9:.2f} GB",
                f"{quality.perplexity:.3f} ± {1.96 * quality.perplexity_error:.3f}",
                f"{quality.mean_kl:.4f} ± {1.96 * quality.mean_kl_error:.4f}",
                f"{quality.top1_agreement:.1%} ± {1.96 * quality.top1_agreement_error:.1%}",
            )
        )
    if not known and not failed:
        return None
    columns = ("Target", "Size", "Perplexity", "Mean KL", "Same top token")
    return Table("Quality of the targets, with 95 % intervals", columns, tuple(rows), frozenset(), frozenset(failed))


# ---- bench, sweep, tune, plan ---------------------------------------------------------------------------------------


def _pair(pair: dict[str, Any]) -> str:
    """Target + draft, after the pair's name if it has one."""
    target, draft = base_name(pair.get("target")), base_name(pair.get("draft"))
    models = f"{target} + {draft}" if draft else target
    name = pair.get("name")
    return f"{name}: {models}" if name and name not in (target, models) else models


def _bench(document: BenchDocument, plans: Sequence[PlanDocument]) -> Section:
    from ggufspec.reports import tables

    run = document.runs.get("speculative")
    gain = times(document.speedup)
    columns, rows = tables.COLUMNS[:-1], tuple(row[: len(tables.COLUMNS) - 1] for row in tables.rows(document))
    notes = list(document.notes)
    if document.identical_output is not None:
        same = "The same text with and without draft" if document.identical_output else "NOT the same text"
        notes.append(f"{same}: {document.identity_check.get('note', 'checked in strict mode')}.")
    return Section(
        "bench",
        f"Bench of {_pair(document.pair)}",
        document.verdict.text,
        document.verdict.worth_it,
        (*_settings(document.settings), *_versions(document.machine)),
        (Table("Results", columns, rows),),
        tuple(figures_runs.of_bench(document, plans)),
        (),
        _notes(tuple(notes), document.interrupted),
        rate(run.tokens_per_s) if run else "",
        gain,
    )


def _sweep(document: SweepDocument, plans: Sequence[PlanDocument]) -> Section:
    name = figures_runs.option_name(document.option)
    found = [
        (run.tokens_per_s, point, kind)
        for point in document.points
        for kind, run in (("speculative", point.speculative), ("target-only", point.target_only))
        if run is not None
    ]
    lead, speed, gain = "Nothing was measured.", "", ""
    if found:
        spread, point, kind = max(found, key=lambda item: item[0].median)
        speed, gain = rate(spread), times(point.speedup) if kind == "speculative" else ""
        lead = f"Fastest: {name} {point.value}, {kind}, {speed} tokens/s" + (
            f", {figures.over(point.speedup, 'target-only')}." if gain else "."
        )
    failures = tuple(
        f"{name} {point.value}: {point.failure.error}" for point in document.points if point.failure is not None
    )
    return Section(
        "sweep",
        f"Sweep of {name}: {_pair(document.pair)}",
        lead,
        bool(gain),
        (
            *_settings({k: v for k, v in document.settings.items() if k != document.option}),
            *_versions(document.machine),
        ),
        (),
        tuple(figures_runs.of_sweep(document, plans)),
        failures,
        _notes(document.notes, document.interrupted),
        speed,
        gain,
    )


def _tune(document: TuneDocument, plans: Sequence[PlanDocument]) -> Section:
    trials = {trial.index: trial for trial in document.trials}
    winner = trials.get(document.winner) if document.winner is not None else None
    lead, speed, gain = "No trial came through.", "", times(document.gain)
    rows: list[Row] = []
    if winner is not None and winner.tokens_per_s is not None:
        speed = rate(winner.tokens_per_s)
        lead = f"Fastest: {figures_tune.setting_name(winner.setting)}: {speed} tokens/s"
        lead += f", {figures.over(document.gain, figures.FIRST)}." if gain else "."
    for word, index in (
        ("winner", document.winner),
        ("planner's first choice", document.baseline),
        ("best without a draft", document.target_only),
    ):
        trial = trials.get(index) if index is not None else None
        if trial is not None:
            rows.append((word, figures_tune.setting_name(trial.setting), *figures_tune.trial_row(trial, document)[2:4]))
    failed = [trial for trial in document.trials if trial.failure is not None]
    notes = [f"Stopped: {document.stopped}." if document.stopped else ""]
    notes.append(f"Saved as {document.saved}." if document.saved else "")
    return Section(
        "tune",
        f"Tuning of {_pair(document.pair)}: {_count(len(document.trials), 'trial')}"
        + (f", {len(failed)} failed" if failed else ""),
        lead,
        bool(document.gain and len(document.gain.samples) > 1 and document.gain.ci95[0] > 1),
        (*_settings(document.settings), *_versions(document.machine)),
        (Table("Results", ("", "Setting", "Predicted", "Tokens/s"), tuple(rows)),) if rows else (),
        tuple(figures_tune.of_tune(document, plans)),
        (),
        _notes((*filter(None, notes), *document.explanation, *document.notes), document.interrupted),
        speed,
        gain,
    )


def _plan(document: PlanDocument) -> Section:
    from ggufspec.reports import plan

    chosen = document.options.get(document.choice.replace("-", "_"))
    table = Table("Both options", plan.COLUMNS, tuple(plan.rows(document)))
    return Section(
        "plan",
        f"Plan for {_pair(document.pair)}",
        f"{document.choice}: {document.why}",
        document.choice == "speculative",
        tuple(_settings(document.settings)),
        (table,),
        tuple(figures_runs.of_plan(document)),
        (),
        _notes(document.notes, False),
        f"≈ {predicted_rate(chosen.tokens_per_s)}" if chosen else "",
        "",
    )


def _notes(notes: tuple[str, ...], interrupted: bool) -> tuple[str, ...]:
    return (("It was interrupted: what is here was measured before.",) if interrupted else ()) + notes


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
