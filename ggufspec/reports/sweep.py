"""Report of a sweep, with a table that has a bar per value, and a summary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ggufspec.reports import table
from ggufspec.reports.table import ReportColumn, ReportTable
from ggufspec.reports.words import accepted_text, layers, over, ratio, speed, tokens_per_round, with_spread
from ggufspec.schema.base import MeasuredRun
from ggufspec.schema.sweep import SweepDocument, SweepPoint
from ggufspec.settings.table import OPTIONS


def flag(document: SweepDocument) -> str:
    option = OPTIONS.get(document.option)
    return option.flags[0] if option else document.option.replace("_", " ")


def label(document: SweepDocument) -> str:
    option = OPTIONS.get(document.option)
    return option.label if option else document.option.replace("_", " ")


def best_point(document: SweepDocument) -> SweepPoint | None:
    """Return the point with the fastest speculative (else target-only) run; None if nothing was measured."""
    drafted = [point for point in document.points if point.speculative is not None]
    measured = [point for point in drafted or document.points if _leading(point)]
    return max(measured, key=_speed, default=None)


def _leading(point: SweepPoint) -> MeasuredRun | None:
    return point.speculative or point.target_only


def _speed(point: SweepPoint) -> float:
    run = _leading(point)
    return run.tokens_per_s.median if run else 0.0


def summary(document: SweepDocument) -> str:
    leader = best_point(document)
    run = _leading(leader) if leader else None
    if leader is None or run is None:
        return "Nothing was measured."
    text = f"Fastest: {flag(document)} {leader.value}, {with_spread(run.tokens_per_s)} tokens/s"
    if leader.speedup is not None:
        text += f", {over(leader.speedup, 'target-only')}"
    elif run is leader.target_only:
        text += " without a draft"
    text += "."
    near = [
        point.value
        for point in document.points
        if point is not leader
        and (other := point.speculative if run is leader.speculative else point.target_only)
        and other.tokens_per_s.ci95[1] >= run.tokens_per_s.ci95[0]
    ]
    if len(run.tokens_per_s.samples) < 2:
        text += " A single trial has no interval; -r 5 gives one."
    elif near:
        others = near[0] if len(near) == 1 else f"{', '.join(near[:-1])} and {near[-1]}"
        text += f" Not shown to be faster than {others}: their intervals overlap."
    baselines = [(point.target_only, point.value) for point in document.points if point.target_only is not None]
    baseline, where = max(baselines, key=lambda one: one[0].tokens_per_s.median, default=(run, ""))
    if baseline.tokens_per_s.median > run.tokens_per_s.median:
        at = f" at {flag(document)} {where}" if len({one.tokens_per_s for one, _ in baselines}) > 1 else ""
        text += f" Target-only is faster{at}: {with_spread(baseline.tokens_per_s)} tokens/s."
    return text


def results(document: SweepDocument, width: int = 80) -> ReportTable:
    """Return a table with a row per value; on a terminal of ``width`` columns, each row has a bar."""
    leader = best_point(document)
    column = min(40, max(8, width - 58)) / (_speed(leader) if leader else 1.0)

    def bar(point: SweepPoint) -> str:
        return "█" * round(_speed(point) * column)

    columns = (
        table.word(flag(document)),
        ReportColumn("Target-only", speed),
        ReportColumn("Speculative", speed),
        ReportColumn("tokens/s", bar, "left", style=lambda _: "cyan", only="terminal"),
        ReportColumn("Speedup", ratio),
        ReportColumn("Accepted", accepted_text),
        ReportColumn("GPU layers", layers),
        ReportColumn("Tokens/round", tokens_per_round),
        ReportColumn("Failure", align="left", wraps=True, only="file"),
    )
    rows: list[tuple[Any, ...]] = []
    for point in document.points:
        pair, run = point.speculative, _leading(point)
        why = point.failure.error if point.failure else None
        measured = (point.target_only, pair, point, point.speedup, pair, run, pair, why)
        rows.append((point.value, *measured) if run else (point.value,))
    failed = {n: f"failed: {point.failure.error}" for n, point in enumerate(document.points) if point.failure}
    leading = [n for n, point in enumerate(document.points) if point is leader]
    return ReportTable("Results", columns, rows, failed, leading)


def failures(document: SweepDocument) -> list[str]:
    return [
        f"{flag(document)} {point.value} failed: {point.failure.error}"
        + (f" (next: {point.failure.hint})" if point.failure.hint else "")
        for point in document.points
        if point.failure is not None
    ]


def markdown(document: SweepDocument) -> str:
    return f"{table.markdown(results(document).filled())}\n\n{table.escaped(summary(document))}\n"


def comma_separated(document: SweepDocument) -> str:
    """Return CSV with a line per trial and per failure."""
    heads = (
        *(document.option, "run", "trial", "gpu_layers", "tokens_per_s", "tokens", "acceptance_rate"),
        *("tokens_per_round", "peak_rss_bytes", "failure"),
    )
    return table.comma_separated([*dict.fromkeys(heads)], _lines(document))


def _lines(document: SweepDocument) -> Iterator[dict[str, Any]]:
    for point in document.points:
        value = {document.option: point.value}
        yield from table.trial_rows(point.target_only, run="target_only", **value)
        yield from table.trial_rows(point.speculative, run="speculative", **value)
        if point.failure is not None:
            yield value | {"failure": point.failure.error}
