"""Every number that the command line takes, far beyond what makes sense: refused or taken, never a traceback."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from ggufspec.cli.app import app, main

NUMBERS = (
    "0",
    "-1",
    "1000000000",
    "9" * 20,
    "9" * 5000,
    "nan",
    "inf",
    "-inf",
    "1e999",
    "-0.0",
    "\uff11",
    "0x10",
    "1_0",
    " ",
)
OF_NUMBERS = ("N", "K", "P", "T", "SIZE", "TIME", "PERCENT", "N|auto|all", "N,N", "N|N-M|N-", "RULE", "HOST:PORT")


def numeric() -> Iterator[tuple[tuple[str, ...], str]]:
    """(command, option) of all that take a number."""
    todo: list[tuple[tuple[str, ...], Any]] = [((), typer.main.get_command(app))]
    while todo:
        path, command = todo.pop()
        command = getattr(command, "whole", command)
        todo += [((*path, name), one) for name, one in getattr(command, "commands", {}).items()]
        for option in command.params:
            if getattr(option, "metavar", None) in OF_NUMBERS:
                yield path, option.opts[0]


TABLE = sorted(numeric())


def test_the_table_has_them() -> None:
    assert len(TABLE) > 150
    assert {command[0] for command, _ in TABLE} >= {"bench", "chat", "compare", "plan", "run", "tune", "worker"}


MODEL = ("-m", "no such file")
BEFORE = {  # what else the command wants
    "quantize": ("no such file",),
    "profiles": ("mine", *MODEL),
    "worker": ("--host", "no such host"),
    "run": (*MODEL, "-p", "x"),
    "trace": (*MODEL, "-p", "x"),
}


@pytest.mark.full
@pytest.mark.parametrize("command", sorted({command for command, _ in TABLE}), ids=" ".join)
def test_no_number_is_a_traceback(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that is not there: what an option says is looked at before, and nothing runs."""
    monkeypatch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
    words = [*command, *BEFORE.get(command[0], MODEL)]
    for option in [option for name, option in TABLE if name == command]:
        for number in NUMBERS:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x\n")))
            code = main([*words, f"{option}={number}"])
            reported = capsys.readouterr()
            assert code in (0, 1, 2), (option, number, reported)
            assert "Traceback" not in reported.err
            if code:  # an export without a card looks at no file
                assert "error: " in reported.err, (option, number)
                assert "next: " in reported.err, (option, number, reported.err)
