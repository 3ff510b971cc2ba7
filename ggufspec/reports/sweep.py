"""One option at several values as a table: for the terminal with bars, as Markdown, as CSV; and what it shows."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from ggufspec.reports.tables import escaped, layers, markdown_table, speed, with_spread
from ggufspec.schema.base import Run, SpeculativeRun
from ggufspec.schema.sweep import SweepDocument, SweepPoint

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

FLAGS = {  # options by what documents call them
    "gpu_layers": "-ngl",
    "gpu_layers_draft": "-ngld",
    "n_cpu_moe": "--n-cpu-moe",
    "drafter": "--drafter",
    "draft_policy": "--draft-policy",
    "draft_max": "--draft-max",
    "accept": "--accept",
    "ctx_size": "-c",
    "threads": "-t",
    "cache_type_k": "-ctk",
    "cache_type_v": "-ctv",
    "flash_attn": "-fa",
    "ubatch_size": "-ub",
}
COLUMNS = ("GPU layers", "Target-only", "Speculative", "Gain", "Accepted", "Tokens/round", "Failure")
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_BAR_COLUMNS = (8, 40)  # the narrowest and the widest
_TICK = "│"


def flag(document: SweepDocument) -> str:
    """The option as it is typed."""
    return FLAGS.get(document.option, document.option.replace("_", " "))


def best(document: SweepDocument) -> SweepPoint | None:
    """The value whose run with a draft is the fastest; without any such run, whose target-only run is. None where
    nothing was measured.
    """
    drafted = [point for point in document.points if point.speculative is not None]
    return max(drafted or document.points, key=_speed, default=None) if _measured(document) else None


def _measured(document: SweepDocument) -> bool:
    return any(_runs(point) for point in document.points)


def _leading(point: SweepPoint) -> Run | None:
    return point.speculative or point.target_only


def _speed(point: SweepPoint) -> float:
    run = _leading(point)
    return run.tokens_per_s.median if run else 0.0


def summary(document: SweepDocument) -> str:
    """What the sweep shows, in a sentence or three."""
    leader = best(document)
    run = _leading(leader) if leader else None
    if leader is None or run is None:
        return "Nothing was measured."
    text = f"Fastest: {flag(document)} {leader.value}, {with_spread(run.tokens_per_s)} tokens/s"
    if leader.speedup is not None:
        low, high = leader.speedup.ci95
        interval = f" (95 % interval {low:.2f} to {high:.2f})" if len(leader.speedup.samples) > 1 else ""
        text += f", {leader.speedup.median:.2f}× target-only{interval}"
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
        text += " One trial each tells nothing of the spread; -r 5 does."
    elif near:
        text += f" Not shown to be faster than {_listed(near)}: their intervals overlap."
    by_itself = [(point.target_only, point.value) for point in document.points if point.target_only is not None]
    alone, where = max(by_itself, key=lambda one: one[0].tokens_per_s.median, default=(run, ""))
    if alone.tokens_per_s.median > run.tokens_per_s.median:
        at = f" at {flag(document)} {where}" if len({one.tokens_per_s for one, _ in by_itself}) > 1 else ""
        text += f" The target alone is faster{at}: {with_spread(alone.tokens_per_s)} tokens/s."
    return text


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def rows(document: SweepDocument) -> list[tuple[str, ...]]:
    """A row of cells per value: the value, then :data:`COLUMNS`."""
    return [_row(point) for point in document.points]


def _row(point: SweepPoint) -> tuple[str, ...]:
    run, by_itself = point.speculative, point.target_only
    shown = run or by_itself
    return (
        point.value,
        layers(shown) if shown else "",
        with_spread(by_itself.tokens_per_s) if by_itself else "",
        speed(run) if run else "",
        f"{point.speedup.median:.2f}×" if point.speedup else "",
        (f"{run.acceptance_rate:.0%}" if run.drafted else "–") if isinstance(run, SpeculativeRun) else "",
        f"{run.tokens_per_round:.2f}" if isinstance(run, SpeculativeRun) else "",
        point.failure.error if point.failure else "",
    )


def terminal(document: SweepDocument, width: int) -> Table:
    """A rich table with a bar per value: the run with a draft, and a tick where the target alone is.

    Args:
        document: what was measured.
        width: columns of the terminal; from 80 on the table fits.
    """
    from rich import box
    from rich.table import Table

    cells, leader = rows(document), best(document)
    with_layers = document.option != "gpu_layers" and len({row[1] for row in cells if row[1]}) > 1
    kept = [0, *([1] if with_layers and width >= 100 else []), 2, 3, 4, 5]
    heads = (flag(document), *COLUMNS)
    taken = sum(max(len(heads[i]), *(len(row[i]) for row in cells)) + 2 for i in kept)
    least, most = _BAR_COLUMNS
    room = min(max(width - taken - 2, least), most)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for place, index in enumerate(kept):
        table.add_column(heads[index], justify="left" if place == 0 else "right", no_wrap=True)
        if index == 3:
            table.add_column("tokens/s", no_wrap=True, style="cyan")
    longest = max((run.tokens_per_s.median for point in document.points for run in _runs(point)), default=1.0)
    for point, row in zip(document.points, cells, strict=True):
        shown: list[str | Text] = []
        for index in kept:
            shown.append(row[index])
            if index == 3:
                shown.append(_bar(point, longest, room))
        table.add_row(*shown, style="bold" if point is leader else None)
    return table


def _runs(point: SweepPoint) -> list[Run]:
    return [run for run in (point.target_only, point.speculative) if run is not None]


def _bar(point: SweepPoint, longest: float, width: int) -> Text:
    """The run with a draft in eighths of a column, the target alone as a tick; a failure in words."""
    from rich.text import Text

    if not _runs(point):
        return Text("failed", style="red")
    length = point.speculative.tokens_per_s.median / longest * width if point.speculative else 0.0
    whole, rest = int(length), _EIGHTHS[int(length % 1 * 8)]
    bar = Text("█" * whole + rest * (whole < width) + " " * (width - whole - 1))
    if point.target_only:
        at = min(round(point.target_only.tokens_per_s.median / longest * width), width - 1)
        bar = Text.assemble(bar[:at], (_TICK, "default"), bar[at + 1 :])
    return bar


def failures(document: SweepDocument) -> list[str]:
    """A line for each value that failed."""
    return [
        f"{flag(document)} {point.value} failed: {point.failure.error}"
        + (f" (next: {point.failure.hint})" if point.failure.hint else "")
        for point in document.points
        if point.failure is not None
    ]


def markdown(document: SweepDocument) -> str:
    """A Markdown table and what it shows."""
    heads: tuple[str, ...] = (f"`{flag(document)}`", *COLUMNS)
    cells = rows(document)
    if not any(row[-1] for row in cells):
        heads, cells = heads[:-1], [row[:-1] for row in cells]
    table = markdown_table(heads, cells)
    return f"{table}\n\n{escaped(summary(document))}\n"


def comma_separated(document: SweepDocument) -> str:
    """One line per trial, numbers unrounded, and one per failure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        (
            document.option,
            "run",
            "trial",
            "gpu_layers",
            "tokens_per_s",
            "tokens",
            "acceptance_rate",
            "tokens_per_round",
            "peak_rss_bytes",
            "failure",
        )
    )
    for point in document.points:
        for name, run in (("target_only", point.target_only), ("speculative", point.speculative)):
            if run is None:
                continue
            extra = (run.acceptance_rate, run.tokens_per_round) if isinstance(run, SpeculativeRun) else ("", "")
            for trial, sample in enumerate(run.tokens_per_s.samples, 1):
                writer.writerow(
                    (point.value, name, trial, run.gpu_layers, sample, run.tokens, *extra, run.peak_rss_bytes, "")
                )
        if point.failure is not None:
            writer.writerow((point.value, *[""] * 8, point.failure.error))
    return text.getvalue()
