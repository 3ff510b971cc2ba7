"""Chat output other than answers: statistics, comparisons, rounds, the command table and the legend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from ggufspec.chat.commands import COMMANDS, HELP, HELP_IN_SHORT
from ggufspec.reports import table
from ggufspec.reports.trace import quoted
from ggufspec.reports.words import first_token, milliseconds, share
from ggufspec.schema.chat import ChatFigures, ChatRun, ChatTurn
from ggufspec.schema.text import counted, number
from ggufspec.settings.registry import LABELS

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text

    from ggufspec.decoding.decoder import Statistics
    from ggufspec.schema.rounds import TracedRound

_RESULTS = {"accepted": ("✓", "green"), "rejected": ("✗", "red"), "unread": ("·", "dim")}
_STOPS = {"length": "cut off at /predict", "context": "the context is full", "grammar": "the grammar allows no more"}


def figures(statistics: Statistics | None, *, lossy: bool) -> ChatFigures | None:
    """Convert an answer's statistics for documents; None stays None."""
    if statistics is None:
        return None
    names = {one.name for one in fields(ChatFigures)} - {"lossy", "prompt_tokens_per_s"}
    speed = statistics.prompt_read / statistics.prompt_s if statistics.prompt_s > 0 else 0.0
    same = {name: getattr(statistics, name) for name in names}
    return ChatFigures(**same, lossy=lossy, prompt_tokens_per_s=speed)


def took(figures: ChatFigures, turn: ChatTurn, rule: str) -> str:
    """Return the line below an answer; ``rule`` is the acceptance rule if it is lossy, otherwise empty."""
    parts = [counted(figures.tokens, "token")]
    if figures.tokens_per_s:
        parts.append(f"{number(figures.tokens_per_s)} tokens/s")
    if figures.drafted:
        parts.append(f"{share(figures.accepted, figures.drafted)} accepted")
    if figures.drafted:
        parts.append(f"{_per_round(figures):.2f} tokens/round")
    read = f"{figures.prompt_read:,} of {counted(figures.prompt_tokens, 'prompt token')} decoded"
    parts.append(read + (f" at {number(figures.prompt_tokens_per_s)}/s" if figures.prompt_tokens_per_s else ""))
    if figures.time_to_first_token_s is not None:
        parts.append(first_token(figures.time_to_first_token_s))
    if rule:
        parts.append(f"lossy: {rule}")
    if turn.dropped:
        parts.append(f"{counted(turn.dropped, 'oldest turn')} left out")
    if turn.stopped:
        parts.append("stopped")
    elif turn.stop_reason in _STOPS:
        parts.append(_STOPS[turn.stop_reason])
    return ", ".join(parts)


def _per_round(figures: ChatFigures) -> float:
    return (figures.tokens - 1) / max(figures.rounds, 1)  # the first token comes from the prompt's batch


def comparison(runs: Iterable[ChatRun]) -> RichTable:
    """Return the table for ``/compare``, at most 80 columns wide."""
    columns = table.columns("", "Tokens", "Tokens/s", "Accepted", "Tokens/round", table.word("Text"))
    return table.terminal(table.ReportTable("", columns, tuple(map(_row, runs))))


def _row(run: ChatRun) -> tuple[str, ...]:
    figures = run.figures
    return (
        run.name + (" (lossy)" if figures.lossy else ""),
        str(figures.tokens),
        number(figures.tokens_per_s) if figures.tokens_per_s else "–",
        share(figures.accepted, figures.drafted),
        f"{_per_round(figures):.2f}" if figures.drafted else "–",
        _text(run),
    )


def _text(run: ChatRun) -> str:
    cut = ", stopped" if run.stopped else ""
    if run.name == "target-only":
        return cut.removeprefix(", ")
    return (f"differs at {run.differs_at}" if run.differs_at else "the same") + cut


def help_table() -> RichTable:
    """Return the table for /help by group: one line per frequent command, and one line for each kind of switch."""
    rows: list[tuple[str, str]] = []
    for title, names in HELP.items():
        rows.append((title, ""))
        rows += [(f"  {COMMANDS[name].typed(name)}", COMMANDS[name].does) for name in names]
    rows += [(title, ", ".join(f"/{name}" for name in names)) for title, names in HELP_IN_SHORT.items()]
    return table.pairs(rows)


def legend(styles: Mapping[str, str], drafters: Sequence[str]) -> Text:
    """Return the legend for a tinted answer's colours; ``drafters`` are those that may have drafted its tokens."""
    from rich.text import Text

    text = Text("written by: ", style="dim")
    for source in (*drafters, "target", "bonus"):
        word = LABELS.get(source, source)
        text.append(word, style=styles.get(source, "none")).append("  ")
    return text


def round_line(traced: TracedRound) -> Text:
    """Return a line about one round: the drafted tokens with their results, and the token that the target added."""
    from rich.text import Text

    line = Text(f"round {traced.number:>3} ", style="dim")
    for drafted in traced.drafted:
        mark, style = _RESULTS[drafted.result]
        line.append(f" {mark}{quoted(drafted.text)}", style=style)
    if traced.added:
        line.append(f" +{quoted(traced.added.text)}", style="bold not dim")
    drafting = f"draft {milliseconds(traced.draft_s)}, " if traced.drafted else ""
    line.append(f"  {drafting}verify {milliseconds(traced.verify_s)}", style="dim")
    return line
