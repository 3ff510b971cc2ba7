"""Results as sections of a report, by machine, each with a finding, tables, figures and remarks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ggufspec.llamacpp.options import HOST
from ggufspec.reports import bench, compare, plan, sweep, tune, words
from ggufspec.reports.documents import ResultDocument
from ggufspec.reports.html import figures
from ggufspec.reports.html.figures import Figure
from ggufspec.reports.table import ReportTable
from ggufspec.reports.words import base_name, ratio_text, with_spread
from ggufspec.schema.base import MeasuredRun, SpeculativeRun, Spread
from ggufspec.schema.bench import BenchDocument
from ggufspec.schema.compare import CompareDocument
from ggufspec.schema.plan import PlanDocument
from ggufspec.schema.sweep import SweepDocument
from ggufspec.schema.text import counted, number, of_memory
from ggufspec.schema.tune import TuneDocument
from ggufspec.settings.table import OPTIONS

_FEWEST = 3  # minimum number of trials for a speedup to count as a gain
# Settings to show in this order, with names for those that are not options
_SETTINGS = {
    **dict.fromkeys(("ctx_size", "cache_type_k", "cache_type_v", "flash_attn", "ubatch_size", "threads")),
    **dict.fromkeys(("drafter", "draft_policy", "draft_max", "accept")),
    "temperature": "Temperature",
    "prompts": "Prompts",
    "prompt_format": "Their format",
    "max_tokens": "Tokens an answer",
    "depth": "Tokens in the cache before",
    "repetitions": "Trials each",
    "space": "Settings to choose from",
    "repeats": "Trials of each finalist",
    "budget_s": "Budget, seconds",
}


@dataclass(frozen=True, slots=True)
class ReportSection:
    """Section of a report about one document."""

    kind: str  # command, such as ``compare``
    title: str
    lead: str  # finding in one or two sentences
    good: bool  # True if the finding is a gain
    facts: tuple[tuple[str, str], ...]  # settings and versions of the measurement
    tables: tuple[ReportTable, ...]
    speed: str  # formatted best tokens/s; empty if there is no speed
    gain: str  # formatted gain over target-only or over the planned setting
    figures: tuple[Figure, ...]
    warnings: tuple[str, ...] = ()  # reasons to doubt the results
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MachineReport:
    name: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[ReportSection, ...]


def report_section(documents: Sequence[ResultDocument]) -> tuple[MachineReport, ...]:
    """Group documents by machine, in order. Plans come last, each under the first machine with the plan's GPUs."""
    found: dict[str, MachineReport] = {}
    for document in sorted(documents, key=lambda document: isinstance(document, PlanDocument)):
        machine = _planned_for(document, found) if isinstance(document, PlanDocument) else _machine(document.machine)
        key = str((machine.name, machine.facts))
        before = found[key].sections if key in found else ()
        found[key] = MachineReport(machine.name, machine.facts, (*before, section(document)))
    return tuple(found.values())


def section(document: ResultDocument) -> ReportSection:
    if isinstance(document, CompareDocument):
        return _compare(document)
    if isinstance(document, BenchDocument):
        return _bench(document)
    if isinstance(document, TuneDocument):
        return _tune(document)
    if isinstance(document, SweepDocument):
        return _sweep(document)
    return _plan(document)


# ---- machines -------------------------------------------------------------------------------------------------------


def _machine(machine: dict[str, Any]) -> MachineReport:
    cards = words.cards_of(machine)
    shown = [f"{name} ({of_memory(size)})" if size else name for name, size in cards]
    cpu, cores = str(machine.get("cpu") or "an unnamed processor"), machine.get("cores")
    facts = [("Cards", ", ".join(shown) or "none seen")]
    facts.append(("Processor", f"{cpu}, {cores} cores" if cores else cpu))
    if isinstance(machine.get("memory_bytes"), int):
        facts.append(("Memory", of_memory(machine["memory_bytes"])))
    if machine.get("system"):
        facts.append(("System", str(machine["system"])))
    return MachineReport(" + ".join(name for name, _ in cards) or cpu, tuple(facts), ())


def _planned_for(document: PlanDocument, machines: dict[str, MachineReport]) -> MachineReport:
    cards = [device.description or device.name for device in document.devices if device.name != HOST]
    for machine in machines.values():
        if cards and machine.name == " + ".join(cards):
            return machine
    devices = [f"{d.description or d.name} ({of_memory(d.total_bytes)})" for d in document.devices]
    return MachineReport(f"Planned for {', '.join(cards) or 'no card'}", (("Devices", ", ".join(devices)),), ())


def _facts(settings: dict[str, Any], machine: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    found = []
    for key, name in _SETTINGS.items():
        value = settings.get(key)
        if value not in (None, "") and not isinstance(value, (dict, list)):
            label = name or OPTIONS[key].label[:1].upper() + OPTIONS[key].label[1:]
            found.append((label, f"{value:,}" if isinstance(value, int) else str(value)))
    if penalised := words.penalties(settings):
        found.append(("Penalties", penalised))
    programs = {"ggufspec": "ggufspec", "llama_cpp_python": "llama-cpp-python"}
    if versions := [f"{name} {machine[key]}" for key, name in programs.items() if machine.get(key)]:
        found.append(("Versions", ", ".join(versions)))
    return tuple(found)


# ---- compare, bench, sweep, tune, plan ------------------------------------------------------------------------------


def _compare(document: CompareDocument) -> ReportSection:
    targets, drafts = compare.names_of(document)
    best = next((cell for cell in compare.ordered(document, compare.CompareSort.SPEED) if cell.run is not None), None)
    failures = sum(cell.run is None and cell.failure is not None for cell in document.cells)
    title = f"Comparison of {counted(len(document.targets), 'target')}"
    if document.drafts:
        title += f" × {counted(len(document.drafts), 'draft')}"
    if stem := words.common_stem([base_name(name) for name in targets]).rstrip("-_. "):
        title += f" of {stem}"
    if failures:
        title += f", {failures} failed"
    named = (("Targets", targets), ("Drafts", drafts))
    models = [(word, ", ".join(map(base_name, names))) for word, names in named if names]
    tables = (
        compare.results(document, compare.CompareSort.SPEED, (targets, drafts)),
        compare.portions_of_best(document, (targets, drafts)),
        compare.quality(document, targets) if compare.has_quality(document) else None,
    )
    return ReportSection(
        "compare",
        title,
        compare.verdict(document),
        bool(best and _is_gain(best.speedup)),
        (*models, *_facts(document.settings, document.machine)),
        tuple(filter(None, tables)),
        with_spread(best.run.tokens_per_s) if best and best.run else "",
        ratio_text(best.speedup) if best else "",
        figures.drawable(figures.of_compare(document)),
        (*document.warnings, *_lossy(cell.run for cell in document.cells)),
        _notes(document),
    )


def _pair(pair: dict[str, Any]) -> str:
    target, draft = base_name(pair.get("target")), base_name(pair.get("draft"))
    models = f"{target} + {draft}" if draft else target
    name = pair.get("name")
    return f"{name}: {models}" if name and name not in (target, models) else models


def _bench(document: BenchDocument) -> ReportSection:
    run = document.runs.get("speculative")
    checks = (document.identical_output, document.hook and document.hook.identical_output)
    hook = (document.hook.text, *document.hook.notes) if document.hook else ()
    warnings = ("NOT the same text with and without a draft.",) if False in checks else ()
    return ReportSection(
        "bench",
        f"Bench of {_pair(document.pair)}",
        f"{document.verdict.text} {document.verdict.why}".strip(),
        document.verdict.worth_it,
        _facts(document.settings, document.machine),
        tuple(filter(None, (bench.results(document), bench.portions(document.by_kind, document.by_part)))),
        with_spread(run.tokens_per_s) if run else "",
        ratio_text(document.speedup),
        figures.drawable(figures.of_bench(document)),
        (*_lossy(document.runs.values()), *warnings),
        (*_notes(document), *filter(None, [bench.footnote(document)]), *bench.remarks(document), *hook),
    )


def _sweep(document: SweepDocument) -> ReportSection:
    best = sweep.best_point(document)
    run = (best.speculative or best.target_only) if best else None
    target_only = max((one.target_only.tokens_per_s.median for one in document.points if one.target_only), default=0.0)
    return ReportSection(
        "sweep",
        f"Sweep of {sweep.label(document)}: {_pair(document.pair)}",
        sweep.summary(document),
        bool(best and run and _is_gain(best.speedup) and run.tokens_per_s.median > target_only),
        _facts({k: v for k, v in document.settings.items() if k != document.option}, document.machine),
        (sweep.results(document).filled(),),
        with_spread(run.tokens_per_s) if run else "",
        ratio_text(best.speedup) if best else "",
        figures.drawable(figures.of_sweep(document)),
        _lossy(point.speculative for point in document.points),
        _notes(document),
    )


def _tune(document: TuneDocument) -> ReportSection:
    lead, speed, gain = "No trial succeeded.", "", ratio_text(document.gain)
    winner = next((trial for trial in document.trials if trial.index == document.winner), None)
    if winner is not None and winner.tokens_per_s is not None:
        speed = with_spread(winner.tokens_per_s)
        first = "Fastest" if document.decided or not document.verdict else "Leading"
        lead = f"{first}: {tune.setting_name(document, winner.setting)}: {speed} tokens/s"
        lead += f", {words.over(document.gain, 'what was planned')}." if gain and not document.verdict else "."
        lead = f"{lead} {document.verdict}".rstrip()
    failed = sum(trial.tokens_per_s is None for trial in document.trials)
    notes = [f"Stopped: {document.stopped}."] if document.stopped else []
    notes += [f"Saved as {document.saved}."] if document.saved else []
    settings = document.settings | (asdict(document.trials[0].setting) if document.trials else {})
    varied = tune.varied(document)
    title = f"Tuning of {_pair(document.pair)}: {counted(len(document.trials), 'setting')}"
    return ReportSection(
        "tune",
        title + (f", {failed} failed" if failed else ""),
        lead,
        _is_gain(document.gain),
        _facts({key: value for key, value in settings.items() if key not in varied}, document.machine),
        (tune.trials(document, best=len(document.trials)),),
        speed,
        gain,
        figures.drawable(figures.of_tune(document)),
        (),
        (*notes, *document.explanation, *tune.failures(document), *_notes(document)),
    )


def _plan(document: PlanDocument) -> ReportSection:
    chosen = document.options.get(document.choice.replace("-", "_"))
    return ReportSection(
        "plan",
        f"Plan for {_pair(document.pair)}",
        f"{document.choice}: {document.why}",
        document.choice == "speculative",
        _facts(document.settings, {}),
        (plan.options(document),),
        f"≈ {number(chosen.tokens_per_s)}" if chosen else "",
        "",
        figures.drawable(figures.of_plan(document)),
        (),
        document.notes,
    )


def _notes(document: BenchDocument | CompareDocument | SweepDocument | TuneDocument) -> tuple[str, ...]:
    interrupted = "The run was interrupted: these results were measured before that."
    return (interrupted, *document.notes) if document.interrupted else document.notes


def _is_gain(ratio: Spread | None) -> bool:
    return ratio is not None and len(ratio.samples) >= _FEWEST and ratio.ci95[0] > 1


def _lossy(runs: Iterable[MeasuredRun | None]) -> tuple[str, ...]:
    lossy = any(isinstance(run, SpeculativeRun) and run.lossy for run in runs)
    return ("The acceptance rule is lossy: the text may differ from the target's own.",) if lossy else ()
