"""Results as sections of a report: what was found in a sentence, tables, figures, remarks; by machine. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ggufspec.display import counted, number, of_memory
from ggufspec.reports import bench, compare, plan, sweep, tune, values
from ggufspec.reports.html import figures, figures_compare, figures_runs, figures_tune
from ggufspec.reports.html.figures import Figure, Row
from ggufspec.reports.reading import Result
from ggufspec.reports.table import Table, columns, words
from ggufspec.reports.values import base_name, times, with_spread
from ggufspec.schema.base import Run, SpeculativeRun, Spread
from ggufspec.schema.bench import BenchDocument
from ggufspec.schema.compare import CompareDocument
from ggufspec.schema.plan import PlanDocument
from ggufspec.schema.sweep import SweepDocument
from ggufspec.schema.tune import TuneDocument
from ggufspec.settings import OPTIONS

_FEWEST = 3  # trials that have an interval


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
    """The documents by machine, in their order, plans last: they lend their predictions to measurements."""
    plans = [document for document in documents if isinstance(document, PlanDocument)]
    keys = {str(_card_names(d)): _machine(d)[2] for d in documents if not isinstance(d, PlanDocument)}
    groups: dict[str, tuple[str, tuple[tuple[str, str], ...], list[Section]]] = {}
    for document in sorted(documents, key=lambda document: isinstance(document, PlanDocument)):
        name, facts, key = _machine(document)
        if isinstance(document, PlanDocument):  # for the cards of a machine that is here
            key = keys.get(str(_card_names(document)), key)
        lent = [plan for plan in plans if _lends(plan, document)]
        groups.setdefault(key, (name, facts, []))[2].append(section(document, lent))
    return tuple(Machine(name, facts, tuple(found)) for name, facts, found in groups.values())


def section(document: Result, plans: Sequence[PlanDocument] = ()) -> Section:
    """One document as a section; ``plans`` lend their predictions."""
    found = _section(document, plans)
    return replace(found, figures=tuple(filter(None, map(figures.drawable, found.figures))))


def _section(document: Result, plans: Sequence[PlanDocument]) -> Section:
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
        devices = [f"{d.description or d.name} ({of_memory(d.total_bytes)})" for d in document.devices]
        name = "Planned for " + ", ".join(_card_names(document))
        if name == "Planned for ":
            name = "Planned without a card"
        return name, (("Devices", ", ".join(devices)),), f"plan {devices}"
    machine = document.machine
    shown = [f"{name} ({of_memory(size)})" if size else name for name, size in figures.cards_of(machine)]
    cpu, cores = str(machine.get("cpu") or "an unnamed processor"), machine.get("cores")
    facts = [("Cards", ", ".join(shown) or "none seen")]
    facts.append(("Processor", f"{cpu}, {cores} cores" if cores else cpu))
    if isinstance(machine.get("memory_bytes"), int):
        facts.append(("Memory", of_memory(machine["memory_bytes"])))
    if machine.get("system"):
        facts.append(("System", str(machine["system"])))
    name = " + ".join(_card_names(document)) or cpu
    key = str([shown, cpu, cores, machine.get("memory_bytes"), machine.get("system")])
    return name, tuple(facts), key


def _card_names(document: Result) -> list[str]:
    """Of the cards that it was measured on, or is planned for."""
    if isinstance(document, PlanDocument):
        return [device.description or device.name for device in document.devices if device.name != figures.HOST]
    return [name for name, _ in figures.cards_of(document.machine)]


def _lends(plan: PlanDocument, document: Result) -> bool:
    """Whether a plan may be of the machine of a measurement: not if both name cards, and no card is the same."""
    ours, theirs = _card_names(document), _card_names(plan)
    return not ours or not theirs or any(name in ours for name in theirs)


def _versions(machine: dict[str, Any]) -> list[tuple[str, str]]:
    found = [
        f"{name} {machine[key]}"
        for name, key in (("ggufspec", "ggufspec"), ("llama-cpp-python", "llama_cpp_python"))
        if machine.get(key)
    ]
    return [("Versions", ", ".join(found))] if found else []


_OTHER_SETTINGS = {
    "temperature": "Temperature",
    "prompts": "Prompts",
    "max_tokens": "Tokens an answer",
    "repetitions": "Trials each",
    "space": "Settings to choose from",
    "repeats": "Trials of each finalist",
    "budget_s": "Budget, seconds",
}
_OPTIONS = (
    *("ctx_size", "cache_type_k", "cache_type_v", "flash_attn", "ubatch_size", "threads"),
    *("drafter", "draft_policy", "draft_max", "accept"),
)


def _settings(settings: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    for key, name in ({key: _heading(OPTIONS[key].label) for key in _OPTIONS} | _OTHER_SETTINGS).items():
        value = settings.get(key)
        if value is not None and value != "" and not isinstance(value, (dict, list)):
            shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
            found.append((name, shown))
    if penalised := values.penalties(settings):
        found.append(("Penalties", penalised))
    return found


def _heading(text: str) -> str:
    return text[:1].upper() + text[1:]


# ---- compare, bench, sweep, tune, plan ------------------------------------------------------------------------------


def _compare(document: CompareDocument, plans: Sequence[PlanDocument]) -> Section:
    targets, drafts = compare.names_of(document)
    best = next((cell for cell in compare.ordered(document, compare.Sort.SPEED) if cell.run is not None), None)
    failures = sum(cell.run is None and cell.failure is not None for cell in document.cells)
    title = counted(len(document.targets), "target")
    if document.drafts:
        title += f" × {counted(len(document.drafts), 'draft')}"
    stem = values.common_stem([base_name(name) for name in targets]).rstrip("-_. ")
    if stem:
        title += f" of {stem}"
    if failures:
        title += f", {failures} failed"
    return Section(
        "compare",
        f"Comparison of {title}",
        compare.verdict(document),
        bool(best and _is_gain(best.speedup)),
        (*_models(document), *_settings(document.settings), *_versions(document.machine)),
        (
            compare.results(document, compare.Sort.SPEED, (targets, drafts)),
            *([compare.quality(document, targets)] if compare.has_quality(document) else []),
        ),
        tuple(figures_compare.of_compare(document, plans)),
        (*document.warnings, *_lossy(cell.run for cell in document.cells)),
        _notes(document.notes, document.interrupted),
        with_spread(best.run.tokens_per_s) if best and best.run else "",
        times(best.speedup) if best else "",
    )


def _models(document: CompareDocument) -> list[tuple[str, str]]:
    """The whole names of what has a short one."""
    targets, drafts = compare.names_of(document)
    found = []
    for word, short in (("Targets", targets), ("Drafts", drafts)):
        if short:
            found.append((word, ", ".join(base_name(name) for name in short)))
    return found


def _pair(pair: dict[str, Any]) -> str:
    """Target + draft, after the pair's name if it has one."""
    target, draft = base_name(pair.get("target")), base_name(pair.get("draft"))
    models = f"{target} + {draft}" if draft else target
    name = pair.get("name")
    return f"{name}: {models}" if name and name not in (target, models) else models


def _bench(document: BenchDocument, plans: Sequence[PlanDocument]) -> Section:
    run = document.runs.get("speculative")
    gain = times(document.speedup)
    notes, warnings = document.notes, _lossy(document.runs.values())
    if prompts := bench.prompts(document):
        notes += (prompts,)
    checked = document.identity_check.get("note", "checked in strict mode")
    if document.identical_output:
        notes += (f"The same text with and without draft: {checked}.",)
    elif document.identical_output is not None:
        warnings += (f"NOT the same text with and without draft: {checked}.",)
    elif why := document.identity_check.get("note"):
        notes += (f"Not compared in strict mode: {why}.",)
    if document.hook is not None:
        notes += (document.hook.text, *document.hook.notes)
        checked = document.hook.identity_check.get("note", "checked greedily")
        if document.hook.identical_output:
            notes += (f"The same text with and without the hook: {checked}.",)
        elif document.hook.identical_output is not None:
            warnings += (f"NOT the same text with and without the hook: {checked}.",)
    return Section(
        "bench",
        f"Bench of {_pair(document.pair)}",
        f"{document.verdict.text} {document.verdict.why}".strip(),
        document.verdict.worth_it,
        (*_settings(document.settings), *_versions(document.machine)),
        (bench.results(document),),
        tuple(figures_runs.of_bench(document, plans)),
        warnings,
        _notes(notes, document.interrupted),
        with_spread(run.tokens_per_s) if run else "",
        gain,
    )


def _sweep(document: SweepDocument, plans: Sequence[PlanDocument]) -> Section:
    name = figures_runs.option_name(document.option)
    best = sweep.best(document)
    run = (best.speculative or best.target_only) if best else None
    alone = max((one.target_only.tokens_per_s.median for one in document.points if one.target_only), default=0.0)
    return Section(
        "sweep",
        f"Sweep of {name}: {_pair(document.pair)}",
        sweep.summary(document),
        bool(best and run and _is_gain(best.speedup) and run.tokens_per_s.median > alone),
        (
            *_settings({k: v for k, v in document.settings.items() if k != document.option}),
            *_versions(document.machine),
        ),
        (sweep.results(document).filled(),),
        tuple(figures_runs.of_sweep(document, plans)),
        _lossy(point.speculative for point in document.points),
        _notes(document.notes, document.interrupted),
        with_spread(run.tokens_per_s) if run else "",
        times(best.speedup) if best else "",
    )


def _tune(document: TuneDocument, plans: Sequence[PlanDocument]) -> Section:
    trials = {trial.index: trial for trial in document.trials}
    winner = trials.get(document.winner) if document.winner is not None else None
    lead, speed, gain = "No trial succeeded.", "", times(document.gain)
    rows: list[Row] = []
    if winner is not None and winner.tokens_per_s is not None:
        speed = with_spread(winner.tokens_per_s)
        lead = f"Fastest: {tune.setting_name(winner.setting)}: {speed} tokens/s"
        lead += f", {values.over(document.gain, figures.FIRST)}." if gain else "."
    for word, index in tune.roles(document):
        trial = trials.get(index) if index is not None else None
        if trial is not None:
            predicted, measured = figures_tune.trial_row(trial, document)[2:4]
            rows.append((word, measured, predicted, tune.setting_name(trial.setting)))  # a phone shows the first
    failed = [trial for trial in document.trials if trial.tokens_per_s is None]
    notes = [f"Stopped: {document.stopped}." if document.stopped else ""]
    notes.append(f"Saved as {document.saved}." if document.saved else "")
    return Section(
        "tune",
        f"Tuning of {_pair(document.pair)}: {counted(len(document.trials), 'setting')}"
        + (f", {len(failed)} failed" if failed else ""),
        lead,
        _is_gain(document.gain),
        (*_settings(_not_searched(document)), *_versions(document.machine)),
        (Table("Results", columns("", "Tokens/s", "Predicted", words("Setting")), tuple(rows)),) if rows else (),
        tuple(figures_tune.of_tune(document, plans)),
        (),
        _notes((*filter(None, notes), *document.explanation, *document.notes), document.interrupted),
        speed,
        gain,
    )


def _not_searched(document: TuneDocument) -> dict[str, Any]:
    """What holds for every trial."""
    settings = document.settings | (asdict(document.trials[0].setting) if document.trials else {})
    varied = tune.varied(document)
    return {key: value for key, value in settings.items() if key not in varied}


def _plan(document: PlanDocument) -> Section:
    chosen = document.options.get(document.choice.replace("-", "_"))
    return Section(
        "plan",
        f"Plan for {_pair(document.pair)}",
        f"{document.choice}: {document.why}",
        document.choice == "speculative",
        tuple(_settings(document.settings)),
        (plan.options(document),),
        tuple(figures_runs.of_plan(document)),
        (),
        _notes(document.notes, False),
        f"≈ {number(chosen.tokens_per_s)}" if chosen else "",
        "",
    )


def _notes(notes: tuple[str, ...], interrupted: bool) -> tuple[str, ...]:
    return (("It was interrupted: what is here was measured before.",) if interrupted else ()) + notes


def _is_gain(ratio: Spread | None) -> bool:
    """Whether it is above 1 for sure."""
    return ratio is not None and len(ratio.samples) >= _FEWEST and ratio.ci95[0] > 1


def _lossy(runs: Iterable[Run | None]) -> tuple[str, ...]:
    lossy = any(isinstance(run, SpeculativeRun) and run.lossy for run in runs)
    return ("The acceptance rule is lossy: the text may not be the target's own.",) if lossy else ()
