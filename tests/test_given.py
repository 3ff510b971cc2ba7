"""Options in groups: what Typer sees of them, what a command gets, and what a list is."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import pytest
import typer

from ggufspec.cli import given
from ggufspec.cli.app import main


def test_a_group_stands_for_its_options() -> None:
    seen: list[Any] = []

    def command(*, files: given.Files, count: int = 3, decoding: given.Decoding) -> int:
        """Help."""
        seen.extend((files, count, decoding))
        return 7

    shown = given.spread(command)
    names = list(inspect.signature(shown).parameters)
    assert names == ["pair", "model", "model_draft", "hf_repo", "hf_repo_draft", "count", "ctx_size", "threads",
                     "cache_type_k", "cache_type_v", "flash_attn", "ubatch_size"]  # fmt: skip
    assert (shown.__doc__, shown.__name__) == ("Help.", "command")
    told = dict.fromkeys(names) | {"pair": "demo", "count": 4, "threads": 2}
    assert shown(**told) == 7
    assert seen == [given.Files(pair="demo"), 4, given.Decoding(threads=2)]


def test_a_command_without_groups_is_left_as_it_is() -> None:
    def command(count: int = 3) -> int:
        return count

    assert given.spread(command) is command


def sweeping(arguments: dict[str, Any]) -> tuple[given.Placing, given.Several | None]:
    """What a command that sweeps gets for what was typed."""

    def command(*, placing: given.Placing, decoding: given.Decoding, several: given.Several | None) -> int:
        seen.append((placing, several))
        return 0

    seen: list[tuple[given.Placing, given.Several | None]] = []
    shown = given.spread(command)
    parameters = inspect.signature(shown).parameters
    assert "several" not in parameters
    parsed = dict.fromkeys(parameters)
    for name, text in arguments.items():
        parsed[name] = get_args(parameters[name].annotation)[1].parser(text)
    shown(**parsed)
    return seen[0]


def test_one_value_is_no_list() -> None:
    placing, several = sweeping({"gpu_layers": "8", "threads": "2"})
    assert (placing.gpu_layers, several) == ("8", None)


def test_the_option_with_a_list_is_told_apart() -> None:
    placing, several = sweeping({"gpu_layers": "0,4-8+2,all"})
    assert several is not None
    assert (several.name, several.key, several.flag) == ("gpu_layers", "gpu_layers", "-ngl")
    assert several.values == (("0", "0"), ("4", "4"), ("6", "6"), ("8", "8"), ("all", "all"))
    assert placing.gpu_layers == "0"  # until one is put there
    assert several.put(placing, "6").gpu_layers == "6"
    decoding = given.Decoding()
    assert several.put(decoding, "6") is decoding


def test_values_are_of_the_option_s_own_type() -> None:
    _, several = sweeping({"threads": "1-8*2"})
    assert several is not None
    assert several.values == (("1", 1), ("2", 2), ("4", 4), ("8", 8))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("5", ["5"]),
        ("0, 8,16 ", ["0", "8", "16"]),
        ("0-3", ["0", "1", "2", "3"]),
        ("0-80+40,81", ["0", "40", "80", "81"]),
        ("1-20*3", ["1", "3", "9"]),
        ("4,4,2-4+2", ["4", "2"]),
        ("-1", ["-1"]),
    ],
)
def test_lists_of_numbers(text: str, values: list[str]) -> None:
    assert given.listed(text, numbers=True) == values


def test_a_list_of_names_has_no_ranges() -> None:
    assert given.listed("1-3,top-k:3", numbers=False) == ["1-3", "top-k:3"]


@pytest.mark.parametrize("text", ["", ",", "1,", "3-1", "1-9*1", "0-8*2", "1-9+0", "0-99"])
def test_lists_that_are_none(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        given.listed(text, numbers=True)


def test_every_sweepable_option_is_in_one_group() -> None:
    groups = (given.Placing, given.Drafting, given.Decoding)
    for name in given.SWEEPABLE:
        assert sum(name in inspect.signature(group).parameters for group in groups) == 1


def test_flags_are_those_of_the_reports() -> None:
    from ggufspec.reports.sweep import FLAGS

    assert dict(given.SWEEPABLE.values()) == FLAGS


@pytest.mark.parametrize(
    "arguments", [("bench", "--drafter"), ("run", "--draft-policy"), ("verify", "--drafter"), ("export", "--to")]
)
def test_a_name_that_is_not_known(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "nobody"]) == 2
    told = capsys.readouterr().err
    assert "'nobody' is not one of" in told
    assert "Value error" not in told


def test_nobody_is_nothing_to_verify(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "demo", "--drafter", "none"]) == 2
    assert "--drafter none leaves nothing to check" in capsys.readouterr().err
