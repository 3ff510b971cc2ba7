"""What is typed: llama.cpp's names, GGUF files as a pair, misspellings; and the help in groups."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.main import get_command

from ggufspec.cli.app import app, main
from ggufspec.cli.command import ALL, GroupedCommand
from ggufspec.cli.group import OTHER_NAMES
from ggufspec.planning.history import PRIOR_ACCEPTANCE
from ggufspec.settings.llamacpp import ADVICE, ALIASES
from ggufspec.settings.table import FLAGS, MAX_COUNT, OPTIONS

NAMES = sorted(get_command(app).commands)  # type: ignore[attr-defined]
ONE_BY_ONE = [name for name in NAMES if name != "profiles"]


def whole(name: str) -> GroupedCommand:
    command = get_command(app).commands[name].whole  # type: ignore[attr-defined]
    assert isinstance(command, GroupedCommand)
    return command


def parsed(name: str, *words: str) -> dict[str, Any]:
    """What a command is called with."""
    context = whole(name).make_context(name, list(words))
    return {key: value for key, value in context.params.items() if value not in (None, False, [], ())}


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


def flags(name: str) -> set[str]:
    shown = [one for one in whole(name).params if not getattr(one, "hidden", False)]
    return {flag for one in shown for flag in (*one.opts, *one.secondary_opts)}


# ---- llama.cpp's names


@pytest.mark.parametrize(("alias", "flag"), ALIASES.items())
def test_a_name_of_llama_cpp_means_our_option(alias: str, flag: str) -> None:
    takers = [name for name in ONE_BY_ONE if flag in flags(name)]
    assert takers
    for name in takers:
        assert parsed(name, alias, "7") == parsed(name, flag, "7"), name


def test_an_alias_is_never_a_flag_of_ours() -> None:
    every = {flag for name in ONE_BY_ONE for flag in flags(name)}
    assert every & {*ALIASES} <= {"-sys"}  # chat has it as an alias


@pytest.mark.parametrize(("name", "advice"), ADVICE.items())
def test_an_option_that_only_llama_cpp_has_names_ours(
    name: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"error: no such option: {name}\n  next: {advice}\n" in refusal(capsys, "run", "demo", name, "1")


def test_underscores_are_dashes_as_in_llama_cpp() -> None:
    assert parsed("run", "--n_gpu_layers=4") == {"gpu_layers": "4"}


@pytest.mark.parametrize("text", ["1", "true", "enabled", "on"])
def test_switches_have_llama_cpps_words(text: str) -> None:
    assert OPTIONS["flash_attn"].check(text) == OPTIONS["reasoning"].check(text) == "on"
    assert OPTIONS["flash_attn"].check("0") == "off"
    assert OPTIONS["flash_attn"].parse_list("0,1,auto") == [("0", "off"), ("1", "on"), ("auto", "auto")]


def test_no_limit_of_an_answer() -> None:
    assert OPTIONS["predict"].check("-1") == MAX_COUNT


@pytest.mark.parametrize("command", ["bench", "compare", "tune", "verify"])
def test_what_is_measured_has_a_length(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--predict -1 is out of range" in refusal(capsys, command, "-n", "-1")


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("-c4096", "-n128"), {"ctx_size": "4096", "predict": "128"}),
        (("-s-1", "-c=max"), {"seed": "-1", "ctx_size": "max"}),
        (("-ngl", "-1", "-ngld=4"), {"gpu_layers": "-1", "gpu_layers_draft": "4"}),
        (("-qv",), {"quiet": True, "verbose": True}),
        (("-p", "-c", "--stop", "-m"), {"prompt": "-c", "stop": ["-m"]}),  # texts
    ],
)
def test_values_next_to_their_options(words: tuple[str, ...], values: dict[str, Any]) -> None:
    assert parsed("run", *words) == values


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        ("-cfoo", "no such option: -cfoo", "did you mean -c foo?"),
        ("-mx.gguf", "no such option: -mx.gguf", "did you mean -m x.gguf?"),
        ("--dratf-max 4", "no such option: --dratf-max", "did you mean '--draft-max'?"),
        ("--nonsense", "no such option: --nonsense", "ggufspec run --help-all"),
        ("--vram 1GiB", "ggufspec run does not take --vram", "ggufspec run --help-all"),
        ("-fa", "-fa needs a value", "-fa auto|on|off"),
        ("-c -n 4", "-c needs a value", "-c 8192, or -c max"),
        ("--json=1", "--json takes no value", "--json"),
        ("-ngl -5", "'-5' is not a number of layers", "-ngl 45, all or auto"),
        ("--drafter loookup", "there is no drafter 'loookup'", "did you mean 'lookup'?"),
        ("-ctk q8", "there is no key cache type 'q8'", "did you mean 'q8_0'?"),
        ("--accept residul", "there is no acceptance rule 'residul'", "did you mean 'residual'?"),
    ],
)
def test_a_mistake_comes_with_the_remedy(words: str, error: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "run", *words.split())
    assert error in said.splitlines()[0]
    assert f"next: {hint}" in said


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (("export", "--to", "lmstudio"), "'lmstudio' is not one of llama-server", "did you mean 'lm-studio'?"),
        (("compare", "--sort", "spede"), "--sort: 'spede' is not one of", "did you mean 'speed'?"),
        (("bench", "--depth", "-1"), "--depth -1 is out of range: at least 0", "ggufspec bench --help"),
        (("serve", "--port", "99999"), "--port 99999 is out of range: 0 to 65535", "ggufspec serve --help"),
        (("serve", "--grace", "soon"), "--grace 'soon' is not a number", "ggufspec serve --help"),
        (("worker", "--port", "1.5"), "--port '1.5' is not a whole number", "ggufspec worker --help"),
        (("serve", "--prot", "1"), "no such option: --prot", "did you mean '--port'?\n"),
        (("bench", "--buget", "3m"), "no such option: --buget", "did you mean '--budget'?\n"),
        (("run", "--buget", "3m"), "no such option: --buget", "--budget is an option of bench, compare and tune; "),
        (("run", "--budget=3m"), "ggufspec run does not take --budget", "--budget is an option of bench, "),
        (("run", "-t", "0"), "--threads 0 is out of range: 1 to 512", "omit -t to use one thread per fast core"),
        (("run", "-t", "-3"), "--threads -3 is out of range: 1 to 512", "omit -t to use one thread per fast core"),
        (("tune", "-ub", "0"), "--ubatch-size 0 is out of range: 1 to 4096", "1 to 4096; 512 is usual"),
        (("doctor", "here"), "unexpected argument: here", "ggufspec doctor --help"),
        (("verify", "--drafter", "lookpu"), "there is no drafter 'lookpu'", "did you mean 'lookup'?"),
    ],
)
def test_a_mistake_in_an_option_of_one_command(
    words: tuple[str, ...], error: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, *words)
    assert error in said
    assert f"next: {hint}" in said


# ---- files


@pytest.mark.parametrize(
    "command", ["bench", "chat", "export", "plan", "rehearse", "run", "serve", "trace", "tune", "verify"]
)
def test_files_are_target_and_draft(command: str) -> None:
    given = parsed(command)
    assert parsed(command, "big.gguf") == {**given, "model": "big.gguf"}
    two = {**given, "model": "big.GGUF", "model_draft": "small.gguf", "ctx_size": "64"}
    assert parsed(command, "big.GGUF", "-c", "64", "small.gguf") == two
    assert parsed(command, "big.gguf", "-md", "a.gguf") == {**given, "model": "big.gguf", "model_draft": "a.gguf"}
    assert parsed(command, "mine") == {**given, "pair": "mine"}
    assert parsed(command, "--", "-odd.gguf") == {**given, "model": "-odd.gguf"}


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (("plan", "a.gguf", "b.gguf", "c.gguf"), "3 models are given", "ggufspec plan TARGET.gguf DRAFT.gguf"),
        (("plan", "-m", "a.gguf", "b.gguf"), "both b.gguf and -m are given", "ggufspec plan -md b.gguf"),
        (("run", "demo", "A poem"), "unexpected argument 'A poem'", "ggufspec run demo -p 'A poem'"),
        (("run", "A poem"), "unexpected argument 'A poem'", "ggufspec run -p 'A poem'"),
        (("run", "a.gguf", "Hi"), "unexpected argument 'Hi'", "ggufspec run a.gguf -p Hi"),
        (("plan", "demo", "more"), "unexpected argument 'more'", "ggufspec plan --help"),
    ],
)
def test_words_that_are_no_pair(
    words: tuple[str, ...], error: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, *words)
    assert error in said
    assert f"next: {hint}" in said or f"; {hint}" in said


# ---- commands


def test_help_and_version_are_commands_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words, same in ((("version",), ("--version",)), (("help",), ("--help",)), (("help", "run"), ("run", "--help"))):
        assert main(words) == 0
        said = capsys.readouterr().out
        assert main(same) == 0
        assert capsys.readouterr().out == said
    assert "Usage: ggufspec profiles new" in (main(["help", "profiles", "new"]), capsys.readouterr().out)[1]
    assert "did you mean 'bench'?" in refusal(capsys, "help", "bnech")


def test_a_command_by_another_name(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("profiles", "remove"), ("profiles", "ls"), ("download",), ("server",)):
        assert main([*words, "--help"]) == 0, words
    assert "did you mean 'list'?" in refusal(capsys, "profiles", "lst")
    assert not {*OTHER_NAMES} & {*NAMES}


# ---- the help


def shown(name: str, *, everything: bool) -> str:
    command = whole(name)
    context = command.make_context(name, [], resilient_parsing=True, terminal_width=78)
    context.meta[ALL] = everything
    return command.get_help(context)


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_the_help_has_groups_and_no_word_of_typer(name: str) -> None:
    for text in (shown(name, everything=False), shown(name, everything=True)):
        assert not re.search(r"<\w|\]\.\.\.|\{[A-Z]|<=x|x>=|default: |str\b", text.partition("Examples:")[0])
        headings = re.findall(r"^(\S.*):$", text, re.MULTILINE)
        assert headings[-1] == "Output"
        assert len(headings) == len(set(headings))
        assert "-h, --help" in text


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_the_help_fits_one_screen_of_eighty_columns(name: str) -> None:
    """Two of the columns stay free; examples are not wrapped by the help, so that they can be copied."""
    lines = shown(name, everything=False).splitlines()
    assert len(lines) <= (45 if name == "run" else 48)
    assert [line for line in lines if len(line) > 80] == []


def test_the_acceptance_in_the_help_is_the_one_that_a_plan_assumes() -> None:
    assert f"[{PRIOR_ACCEPTANCE:g}]" in shown("plan", everything=False)
    assert "0.8" not in OPTIONS["acceptance"].described


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_the_whole_help_has_every_option_and_the_short_one_the_usual(name: str) -> None:
    short, everything = shown(name, everything=False), shown(name, everything=True)
    rare = {row.flags[-1] for row in OPTIONS.values() if row.rare}
    for flag in flags(name):
        if flag.startswith("-"):
            assert re.search(rf"(?<![\w-]){flag}(?![\w-])", everything), flag
    assert bool(rare & flags(name)) <= ("--help-all" in short)
    if name == "run":
        assert not any(re.search(rf"(?<![\w-]){flag}\b", short) for flag in rare - {"--raw"})


def test_every_group_of_options_has_a_heading() -> None:
    from ggufspec.cli.command import HEADINGS

    assert {row.group for row in (*OPTIONS.values(), *FLAGS.values())} == set(HEADINGS)
