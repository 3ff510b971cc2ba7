"""Command ``ggufspec trace``: show every round of one answer, token by token."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any

import typer

from ggufspec.chat.stream import source_styles
from ggufspec.cli import ui
from ggufspec.cli.parameters import command, option, takes
from ggufspec.cli.results import check_exports, write
from ggufspec.cli.run import GROUPS, answered, described, end, prepare, show_statistics
from ggufspec.reports import trace as report
from ggufspec.reports.trace_page import render
from ggufspec.schema import codec
from ggufspec.schema.base import to_line
from ggufspec.schema.rounds import TracedRound
from ggufspec.schema.trace import TraceDocument, Written
from ggufspec.settings.table import Settings

_LIKELIEST = 10


def _range(text: str) -> str:
    """Check ``--rounds``: 3, 3-5 or 3-."""
    found = re.fullmatch(r"([1-9]\d{0,8})(-([1-9]\d{0,8})?)?", text.strip())
    if not found or int(found[3] or found[1]) < int(found[1]):
        raise typer.BadParameter(f"{text!r} names no rounds: 3, 3-5, or 3- for all from the third on")
    return text.strip()


@command(
    'ggufspec trace demo -p "def main(" -n 16',
    "ggufspec trace demo -f prompt.txt --temp 0.8 --accept residual --html trace.html",
    "ggufspec trace -m TARGET.gguf -md DRAFT.gguf -f prompt.txt --json | jq .places",
    confirms=True,
)
def trace(
    *,
    rounds: Annotated[str | None, option("--rounds N|N-M|N-", "Print only these rounds.  [all]", parser=_range)] = None,
    likeliest: Annotated[
        int, option("--likeliest N", "Most likely candidates to show per token.", min=0, max=_LIKELIEST)
    ] = 3,
    given: Annotated[
        Settings,
        takes(
            *(*GROUPS, "prompt", "raw", "system", "answer", "html"),
            predict={"default": 32},
            html={"help": "Write a page with all rounds. It shows who wrote each token, in any browser."},
        ),
    ],
) -> int:
    """Show every round of one answer, token by token.

    For each token: p and q, what the rule made of them, and why.

    With --json a line for every round, then one for the answer; or the failure.
    """
    check_exports(given)
    pair, spec, resolved = prepare(given)
    seen: list[TracedRound] = []
    tokens: list[Written] = []

    def show(event: dict[str, Any]) -> None:
        if event["event"] == "token":
            tokens.append(Written(event["token"], event["text"], event["source"], len(seen) - 1))
        if event["event"] != "round":
            return
        round_ = codec.load(TracedRound, event["round"])
        seen.append(round_)
        if not _wanted(round_.number, rounds):
            return
        if ui.flags().json:
            ui.data(to_line(round_))
        else:
            _print(round_, likeliest, first=not any(_wanted(one.number, rounds) for one in seen[:-1]))

    result, interrupted = answered(pair, replace(spec, trace=True), show)
    common = described(pair, spec, resolved, result, interrupted)
    document = TraceDocument(**common, prompt=spec.prompts[0], tokens=tuple(tokens), rounds=max(0, len(seen) - 1))
    if ui.flags().json:
        ui.data(to_line(document))
    else:
        _print_answer(document)
    if given.html is not None:
        write(given.html, render(document, seen))
    if not ui.flags().json:
        show_statistics(document)
    return end(interrupted)


def _wanted(number: int, rounds: str | None) -> bool:
    if rounds is None:
        return True
    first, dash, last = rounds.partition("-")
    return int(first) <= number and (bool(dash and not last) or number <= int(last or first))


def _print(round_: TracedRound, likeliest: int, *, first: bool) -> None:
    out = ui.out()
    if first:
        out.print(report.explained(round_), style="dim")
    out.print()
    for line in report.terminal(round_, out.width, likeliest):
        out.print(line, soft_wrap=True)


def _print_answer(document: TraceDocument) -> None:
    out = ui.out()
    out.print()
    out.print("answer:", style="bold")
    for line in report.answer(document.tokens, source_styles(out)):
        out.print(line, soft_wrap=True)
