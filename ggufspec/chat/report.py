"""A chat for people: what an answer took, a comparison, a round of it, what there is to switch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ggufspec.display import counted, visible
from ggufspec.reports.tables import first_token, shown_speed
from ggufspec.reports.trace import milliseconds, quoted
from ggufspec.schema.chat import ChatFigures, ChatRun

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_STOPS = {"length": "cut at /length", "context": "the context is full", "grammar": "the grammar permits no more"}
WAYS = {"target-only": "target alone", "draft-only": "draft model alone", "speculative": "both together"}


def took(
    figures: ChatFigures, *, rule: str = "", stop_reason: str = "", stopped: bool = False, dropped: int = 0
) -> str:
    """The line under an answer.

    Args:
        figures: of the answer.
        rule: that was lossy; empty if none was.
        stop_reason: why it ended.
        stopped: whether the user ended it.
        dropped: oldest turns that were left out.
    """
    parts = [counted(figures.tokens, "token")]
    if figures.tokens:
        parts.append(f"{shown_speed(figures.tokens_per_s)} tokens/s")
    if figures.drafted:
        parts += [f"{figures.accepted / figures.drafted:.0%} accepted", f"{_per_round(figures):.2f} tokens/round"]
    read = f"{figures.prompt_read:,} of {counted(figures.prompt_tokens, 'prompt token')} read"
    parts.append(read + (f" at {shown_speed(figures.prompt_tokens_per_s)}/s" if figures.prompt_tokens_per_s else ""))
    if figures.time_to_first_token_s is not None:
        parts.append(first_token(figures.time_to_first_token_s))
    if rule:
        parts.append(f"lossy: {rule}")
    if dropped:
        parts.append(f"{counted(dropped, 'oldest turn')} left out")
    if stopped:
        parts.append("stopped")
    elif stop_reason in _STOPS:
        parts.append(_STOPS[stop_reason])
    return ", ".join(parts)


def _per_round(figures: ChatFigures) -> float:
    return figures.tokens / max(figures.rounds, 1)


def comparison(runs: Iterable[ChatRun]) -> Table:
    """The answers of ``/compare``, 80 columns wide at most."""
    table = _table("", "Tokens", "Tokens/s", "Accepted", "Tokens/round", "Text")
    for run in runs:
        figures = run.figures
        table.add_row(
            WAYS[run.name] + (" (lossy)" if figures.lossy else ""),
            str(figures.tokens),
            shown_speed(figures.tokens_per_s),
            f"{figures.accepted / figures.drafted:.0%}" if figures.drafted else "–",
            f"{_per_round(figures):.2f}" if figures.drafted else "–",
            _text(run),
        )
    return table


def _text(run: ChatRun) -> str:
    cut = ", stopped" if run.stopped else ""
    if run.name == "target-only":
        return cut.removeprefix(", ")
    return (f"differs at {run.differs_at}" if run.differs_at else "the same") + cut


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if 0 < index < len(columns) - 1 else "left", no_wrap=True)
    return table


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """Words and what they stand for, in two columns."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for word, meaning in rows:
        table.add_row(Text(word, style="bold"), Text(visible(meaning)))
    return table


def round_line(told: Mapping[str, Any]) -> Text:
    """One round of a trace in a line: what was drafted and kept, and what the target added.

    Args:
        told: a :class:`ggufspec.schema.rounds.TracedRound` as JSON has it.
    """
    from rich.text import Text

    line = Text(f"round {told['number']:>3} ", style="dim")
    for place in told["places"]:
        kept, refused = place["verdict"] == "kept", place["verdict"] == "refused"
        mark = "✓" if kept else "✗" if refused else "·"
        style = "green" if kept else "red" if refused else "dim"
        line.append(f" {mark}{quoted(place['text'])}", style=style)
    if added := told["added"]:
        line.append(f" +{quoted(added['text'])}", style="bold not dim")
    drafting = f"draft {milliseconds(told['draft_s'])}, " if told["places"] else ""
    line.append(f"  {drafting}verify {milliseconds(told['verify_s'])}", style="dim")
    return line
