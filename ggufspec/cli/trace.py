"""``ggufspec trace``: one answer, every round of it token by token."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ggufspec.cli import ui
from ggufspec.cli.parameters import takes
from ggufspec.cli.results import check_exports
from ggufspec.cli.run import prepare, show_statistics
from ggufspec.errors import StopError
from ggufspec.settings import Settings

if TYPE_CHECKING:
    from ggufspec.bench.trial import Result
    from ggufspec.schema.rounds import TracedRound
    from ggufspec.schema.trace import TraceDocument, Written

_LIKELIEST = 10


def _range(text: str) -> str:
    """``--rounds``: 3, 3-5 or 3-."""
    found = re.fullmatch(r"([1-9]\d{0,8})(-([1-9]\d{0,8})?)?", text.strip())
    if not found or int(found[3] or found[1]) < int(found[1]):
        raise typer.BadParameter(f"{text!r} names no rounds: 3, 3-5, or 3- for all from the third on")
    return text.strip()


def trace(
    *,
    rounds: Annotated[
        str | None,
        typer.Option("--rounds", metavar="N|N-M|N-", parser=_range, help="Print these rounds only.  [all]"),
    ] = None,
    likeliest: Annotated[
        int,
        typer.Option("--likeliest", metavar="N", min=0, max=_LIKELIEST, help="Of a row, list the N likeliest tokens."),
    ] = _LIKELIEST,
    given: Annotated[
        Settings,
        takes(
            *(
                "profile",
                "files",
                "hub",
                "prompt",
                "answer",
                "predict",
                "target-only",
                "placement",
                "devices",
                "drafting",
            ),
            *("context", "sampling"),
            "html",
            predict={"default": 32},
            html={"help": "Write a page: the text by who wrote it, and all rounds, for any browser."},
        ),
    ],
) -> int:
    """Show every round of one answer, token by token. Of each: p and q, what the rule made of them, and why.

    With --json a line for every round, then one for the answer; or the failure.
    """
    from ggufspec import plain
    from ggufspec.bench import trial
    from ggufspec.schema.base import to_line
    from ggufspec.schema.rounds import TracedRound
    from ggufspec.schema.trace import Written
    from ggufspec.worker import Interrupted

    check_exports(given)
    pair, spec = prepare(given)
    seen: list[TracedRound] = []
    tokens: list[Written] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "token":
            tokens.append(Written(event["token"], event["text"], event["source"], len(seen)))
        if event["event"] != "round":
            return
        begin()
        round_ = plain.load(TracedRound, event["round"])
        seen.append(round_)
        if _wanted(round_.number, rounds):
            if ui.flags().json:
                ui.data(to_line(round_))
            else:
                _print(round_, likeliest, first=not any(_wanted(one.number, rounds) for one in seen[:-1]))

    interrupted = False
    try:
        with ui.loading(pair.name) as begin:
            result: Result | None = trial.measure(
                replace(spec, trace=True), on_event=on_event, verbose=ui.flags().verbose
            )
    except Interrupted as stopped:
        result, interrupted = stopped.partial, True
    if result is None or not result.answers:
        raise StopError("interrupted before the answer was there")
    document = _document(pair.describe(), spec, result, tokens, len(seen), interrupted)
    if ui.flags().json:
        ui.data(to_line(document))
    else:
        _print_answer(document)
    if given.html is not None:
        _write(given.html, document, seen)
    if not ui.flags().json:
        show_statistics(document)
    if interrupted:
        ui.failure("interrupted", "")
        return 130
    return 0


def _wanted(number: int, rounds: str | None) -> bool:
    if rounds is None:
        return True
    first, dash, last = rounds.partition("-")
    return int(first) <= number and (number <= int(last or first) if last or not dash else True)


def _print(round_: TracedRound, likeliest: int, *, first: bool) -> None:
    from rich.text import Text

    from ggufspec.reports import trace

    out = ui.out()
    if first:
        out.print(Text(trace.explained(round_), style="dim"))
    out.print()
    for line in trace.terminal(round_, out.width, likeliest):
        out.print(line, soft_wrap=True)


def _print_answer(document: TraceDocument) -> None:
    from rich.text import Text

    from ggufspec.chat.stream import source_styles
    from ggufspec.reports import trace

    out = ui.out()
    out.print()
    out.print(Text("answer:", style="bold"))
    for line in trace.answer(document.tokens, source_styles(out)):
        out.print(line, soft_wrap=True)


def _document(
    pair: dict[str, Any], spec: Any, result: Result, tokens: list[Written], rounds: int, interrupted: bool
) -> TraceDocument:
    from ggufspec.bench.summary import notes_of, settings_of, summarise
    from ggufspec.schema.trace import TraceDocument
    from ggufspec.settings import is_lossy

    answer = result.answers[0]
    return TraceDocument(
        pair=pair,
        settings=settings_of(spec),
        prompt=spec.prompts[0],
        text=answer.text,
        tokens=tuple(tokens),
        rounds=rounds,
        stop_reason=answer.statistics.stop_reason,
        statistics=summarise([result], lossy=is_lossy(spec.options.accept)),
        notes=notes_of([result]),
        interrupted=interrupted,
    )


def _write(file: Path, document: TraceDocument, rounds: list[TracedRound]) -> None:
    from ggufspec.files import write_whole
    from ggufspec.reports.trace_page import render

    write_whole(file, render(document, rounds))
