"""Command ``ggufspec trace``: show every round of one answer, token by token."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any

import typer

from ggufspec.chat.stream import source_styles
from ggufspec.cli import ui
from ggufspec.cli.parameters import command, command_option, takes
from ggufspec.cli.results import check_exports, write_export
from ggufspec.cli.run import GROUPS, answered, described, end, prepare_run, show_statistics
from ggufspec.reports import trace as report
from ggufspec.reports.trace_page import render_trace
from ggufspec.schema import codec
from ggufspec.schema.base import to_line
from ggufspec.schema.rounds import TracedRound
from ggufspec.schema.trace import TraceDocument, WrittenToken
from ggufspec.settings.table import Settings

_LIKELIEST = 10


def _range(text: str) -> str:
    """Check the value of ``--rounds``, e.g. 3, 3-5 or 3-."""
    found = re.fullmatch(r"([1-9]\d{0,8})(-([1-9]\d{0,8})?)?", text.strip())
    if not found or int(found[3] or found[1]) < int(found[1]):
        raise typer.BadParameter(f"{text!r} does not name rounds: use 3, 3-5, or 3- for all from the third on")
    return text.strip()


@command(
    'ggufspec trace demo -p "def main(" -n 16',
    "ggufspec trace demo -f prompt.txt --temp 1 --accept residual --html t.html",
    'ggufspec trace -m TARGET.gguf -md DRAFT.gguf -p "Hi" --json | jq .places',
    confirms=True,
)
def trace(
    *,
    rounds: Annotated[
        str | None, command_option("--rounds N|N-M|N-", "Print only these rounds.  [all]", parser=_range)
    ] = None,
    likeliest: Annotated[
        int, command_option("--likeliest N", "Most likely candidates to show per token.", min=0, max=_LIKELIEST)
    ] = 3,
    given: Annotated[
        Settings,
        takes(
            *(*GROUPS, "prompt", "raw", "system", "answer", "html"),
            predict={"default": 32},
            rare=("sampling", "system"),
            html={"help": "Write an HTML page with all rounds. It shows which model wrote each token."},
        ),
    ],
) -> int:
    """Show every round of one answer, token by token.

    For each token, it shows p and q, what the rule decided, and why.

    With --json, it prints a line for every round, then one for the answer or the failure.
    """
    check_exports(given)
    pair, spec, resolved = prepare_run(given)
    seen: list[TracedRound] = []
    tokens: list[WrittenToken] = []

    def show(event: dict[str, Any]) -> None:
        if event["event"] == "token":
            tokens.append(WrittenToken(event["token"], event["text"], event["source"], len(seen) - 1))
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
        write_export(given.html, render_trace(document, seen))
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
