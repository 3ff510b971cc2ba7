"""From rows of the table to a command's parameters, and back to settings; a new option is one row."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from typer.main import get_command

from ggufspec.cli import parameters
from ggufspec.cli.app import app, main
from ggufspec.cli.parameters import Swept, takes
from ggufspec.errors import UsageError
from ggufspec.models.profile import settings_model
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
    given, _ = parameters.settings_of(rows, {row.name: None for row in rows})
    assert given.given() == {"temp": 0.8}


def sweeping(**typed: str) -> tuple[Settings, Swept | None]:
    rows = takes("placement", "context", "drafting").rows()
    return parameters.settings_of(rows, {row.name: typed.get(row.name) for row in rows}, sweeps=True)


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
