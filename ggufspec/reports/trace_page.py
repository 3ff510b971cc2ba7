"""HTML page for a trace, with the text coloured by each token's source, and every round; see docs/decisions/016."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby, repeat
from pathlib import PurePath

from ggufspec.reports import trace
from ggufspec.reports.html import page
from ggufspec.reports.trace import TraceRow
from ggufspec.reports.words import penalties
from ggufspec.schema.rounds import TracedRound
from ggufspec.schema.text import counted, visible
from ggufspec.schema.trace import TraceDocument

_OPEN = 12  # maximum number of rounds shown unfolded


def render_trace(document: TraceDocument, rounds: Sequence[TracedRound]) -> str:
    rows = {each.number: trace.rows(each) for each in rounds}
    name = str(document.pair.get("name") or "a pair")
    return page.filled(
        "trace.html",
        ("page.css", "trace.css"),
        title=f"Trace of {visible(name)}",
        lead=trace.trace_summary(document.tokens, document.rounds),
        rule=trace.explained(rounds[0]) if rounds else "",
        facts=_facts(document),
        prompt=visible(document.prompt),
        tokens=_tokens(document, rows),
        writers={who: (count, trace.WRITERS[who]) for who, count in trace.written(document.tokens).items()},
        rounds=rounds,
        rows=rows,
        heading=trace.heading,
        unfolded=len(rounds) <= _OPEN,
        notes=document.notes,
        interrupted=document.interrupted,
        percent=trace.percent,
        quoted=trace.quoted,
    )


def _tokens(document: TraceDocument, rows: Mapping[int, Sequence[TraceRow]]) -> Iterator[tuple[str, str, int, str]]:
    """Yield (text, source, round number, row as a sentence) for each token."""
    for number, written in groupby(document.tokens, lambda one: one.round):
        shown = [row for row in rows.get(number, ()) if row.kind in ("accepted", "added")]
        for one, row in zip(written, chain(shown, repeat(None)), strict=False):
            parts = [f"round {number}: {one.source}"]
            if row is not None:
                numbers = (("q", row.q), ("p", row.p), ("p/q", row.ratio))
                parts += [row.token, *(f"{name} {value}" for name, value in numbers if value != "–")]
                parts += filter(None, (row.rule, row.result))
            if one.text:
                yield visible(one.text), one.source, number, ", ".join(parts)


def _facts(document: TraceDocument) -> list[tuple[str, str]]:
    pair, settings, run = document.pair, document.settings, document.statistics
    files = [(role.capitalize(), visible(PurePath(str(pair[role])).name)) for role in ("target", "draft") if pair[role]]
    return [
        *files,
        ("Temperature", f"{settings['temperature']:g}"),
        ("Seed", str(settings["seed"])),
        *([("Penalties", penalised)] if (penalised := penalties(settings)) else []),
        ("Tokens/s while traced", f"{run.tokens_per_s.median:.1f}"),
        ("Prompt", counted(len(document.prompt), "character")),
        ("Ended by", document.stop_reason or "Ctrl-C"),
    ]
