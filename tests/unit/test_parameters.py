"""From rows of the table to a command's parameters, and back to settings; a new option is one row."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from typer.main import get_command

from ggufspec.cli import parameters
from ggufspec.cli.app import app, main
from ggufspec.cli.parameters import SweptOption, takes
from ggufspec.errors import UsageError
from ggufspec.models.profile import settings_model
from ggufspec.schema.text import as_budget
from ggufspec.settings import table
from ggufspec.settings.option import option
from ggufspec.settings.table import FLAGS, OPTIONS, Settings


def test_a_command_has_the_options_that_it_takes() -> None:
    seen: list[Any] = []

    def command(count: int = 3, *, given: Annotated[Settings, takes("files", "threads", "ctx_size")]) -> int:
        """Help."""
        seen.extend((given, count))
        return 7

    shown = parameters.for_typer(command)
    names = list(inspect.signature(shown).parameters)
    assert names == ["context_", "count", "model", "model_draft", "ctx_size", "threads", "json", "quiet", "verbose"]
    assert (shown.__doc__, shown.__name__) == ("Help.", "command")
    parsed = dict.fromkeys(names) | {"model": "a.gguf", "count": 4, "threads": "2"}
    assert shown(**parsed) == 7
    assert seen == [Settings(model="a.gguf", threads=2), 4]


def test_a_command_that_confirms_has_yes() -> None:
    def command() -> int:
        return 0

    assert "yes" in inspect.signature(parameters.for_typer(command, confirms=True)).parameters


def test_a_default_of_the_command_s_own_is_filled_in_and_others_are_not() -> None:
    rows = takes("sampling", "threads", temp={"default": 0.8}).rows()
    given, _ = parameters.taken_settings(rows, {row.name: None for row in rows})
    assert given.given() == {"temp": 0.8}


def sweeping(**typed: str) -> tuple[Settings, SweptOption | None]:
    rows = takes("placement", "context", "drafting").rows()
    return parameters.taken_settings(rows, {row.name: typed.get(row.name) for row in rows}, sweeps=True)


def test_one_value_is_no_list() -> None:
    given, swept = sweeping(gpu_layers="8", threads="2")
    assert (given.gpu_layers, given.threads, swept) == (8, 2, None)


def test_the_option_with_a_list_is_told_apart() -> None:
    given, swept = sweeping(gpu_layers="0,4-8+2,all")
    assert swept is not None
    assert (swept.option.name, swept.option.flag) == ("gpu_layers", "-ngl")
    assert swept.values == (("0", 0), ("4", 4), ("6", 6), ("8", 8), ("all", -1))
    assert given.gpu_layers == 0  # until one is put there
    assert swept.put(given, 6).gpu_layers == 6


def test_two_lists_are_one_too_many() -> None:
    with pytest.raises(UsageError, match="-ngl and -t have lists"):
        sweeping(gpu_layers="0,4", threads="1,2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "--drafter", "me"), "there is no drafter 'me'"),
        (("run", "--draft-policy", "me"), "there is no draft policy 'me'"),
        (("verify", "--drafter", "me"), "there is no drafter 'me'"),
        (("verify", "demo", "--drafter", "none"), "--drafter none leaves nothing to check"),
        (("export", "--to", "me"), "'me' is not one of"),
        (("plan", "-c", "1"), "--ctx-size 1 is out of range"),
    ],
)
def test_a_value_that_is_refused(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_variable_that_is_refused_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GGUFSPEC_NGL", "some")
    assert main(["plan"]) == 2
    assert "the value comes from the environment: GGUFSPEC_NGL=some" in capsys.readouterr().err


def test_a_list_takes_its_variable_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of every command: a key may have blanks."""
    lists = [
        (name, one.envvar)
        for name, command in get_command(app).commands.items()  # type: ignore[attr-defined]
        for one in getattr(command.whole, "params", ())
        if one.envvar and (getattr(one, "multiple", False) or one.nargs != 1)
    ]
    assert lists == [("serve", "GGUFSPEC_API_KEY")]  # see :func:`ggufspec.cli.parameters.for_typer`
    for value in (" ", "caf\u00e9 key"):
        monkeypatch.setenv("GGUFSPEC_API_KEY", value)
        assert main(["serve", "demo", "--host", "192.0.2.1"]) == 2
        assert "an API key is empty, or not all printable ASCII" in capsys.readouterr().err


def test_every_command_has_the_flags_and_nothing_of_its_own_in_their_place() -> None:
    for name, one in get_command(app).commands.items():  # type: ignore[attr-defined]
        if name == "profiles":
            continue
        flags = {flag for parameter in one.whole.params for flag in parameter.opts}
        assert {"--json", "-q", "-v"} <= flags, name


def test_the_list_of_commands_has_the_first_sentence_of_each_help() -> None:
    for name, one in get_command(app).commands.items():  # type: ignore[attr-defined]
        assert one.get_short_help_str(100) == one.whole.get_short_help_str(100), name


def test_an_option_has_one_row() -> None:
    """What a command takes by a flag of the table comes from the table, with the table's words."""
    rows = {flag: row for row in (*OPTIONS.values(), *FLAGS.values()) for flag in row.flags}
    own = {("verify", "--drafter"), ("verify", "--accept"), ("quantize", "-o"), ("export", "-o")}
    for name, one in get_command(app).commands.items():  # type: ignore[attr-defined]
        for parameter in one.whole.params:
            for flag in parameter.opts:
                if flag in rows and (name, flag) not in own:
                    assert parameter.name == rows[flag].name, (name, flag)


def test_a_new_option_is_one_row() -> None:
    """A row that is added to a copy of the table is a flag, a profile's key and swept."""

    @dataclass(frozen=True)
    class More:
        n_batch: int | None = option(
            "-b --n-batch", "Prompt tokens of one call.", "context", where="profile sweep", least=1, variable="N_BATCH"
        )

    (row,) = table.table(More).values()
    shown = parameters.parameter(row)
    about = shown.annotation.__metadata__[0]
    assert (about.default, *about.param_decls) == ("-b", "--n-batch")
    assert (about.help, about.metavar) == ("Prompt tokens of one call.", "N")
    assert about.envvar == "GGUFSPEC_N_BATCH"
    assert [one.name for one in takes("context").rows({**OPTIONS, row.name: row})][-1] == "n_batch"
    keys = settings_model([*OPTIONS.values(), row])
    assert keys.model_validate({"n_batch": 64}).n_batch == 64  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="out of range"):
        keys.model_validate({"n_batch": 0})
    assert row.parse_list("64,128-256+128") == [("64", 64), ("128", 128), ("256", 256)]


@pytest.mark.parametrize("command", ["bench", "compare", "tune"])
@pytest.mark.parametrize("number", ["4", "0.5", "90"])
def test_a_budget_without_a_unit_is_asked_for_one(command: str, number: str, capfd: pytest.CaptureFixture[str]) -> None:
    """4 may be meant as minutes or as seconds."""
    assert main([command, "demo", "--budget", number]) == 2
    assert capfd.readouterr().err.splitlines() == [
        f"error: --budget {number} has no unit",
        f"  next: --budget {number}m for minutes, --budget {number}s for seconds",
    ]


@pytest.mark.parametrize(("text", "expected"), [("4s", 4.0), ("4m", 240.0), (" 1.5h ", 5400.0)])
def test_a_budget_with_a_unit_is_taken(text: str, expected: float) -> None:
    assert parameters.parse_seconds(text) == expected


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1s"), (90, "90s"), (90.1, "2m"), (240, "4m"), (240.1, "5m"), (7300, "122m")]
)
def test_a_budget_that_is_suggested_is_one_that_is_taken_and_long_enough(seconds: float, text: str) -> None:
    assert as_budget(seconds) == text
    assert parameters.parse_seconds(text) >= seconds
