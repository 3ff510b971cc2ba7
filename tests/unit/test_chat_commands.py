"""What is typed in a chat, and what switches change."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ggufspec.chat.commands import (
    ALIASES,
    COMMANDS,
    HELP,
    HELP_IN_SHORT,
    SHOWN,
    ChatSwitches,
    SlashCommand,
    change,
    is_switch,
    parse_input,
    sampled,
    shown,
)
from ggufspec.chat.report import help_table
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import UsageError
from ggufspec.settings.table import OPTIONS

PAIR = ChatSwitches(has_draft=True, draft_most=15, draft_max=15)
ALONE = ChatSwitches(has_draft=False, drafter="none")


def commands(line: str) -> tuple[SlashCommand, ...]:
    found = parse_input(line)
    assert not isinstance(found, str)
    return found


def changed(line: str, settings: ChatSwitches = PAIR) -> ChatSwitches:
    for command in commands(line):
        settings = change(settings, command)
    return settings


def refused(line: str, settings: ChatSwitches = PAIR) -> UsageError:
    with pytest.raises(UsageError) as caught:
        changed(line, settings)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("typed", "read_as"),
    [
        ("hello", "hello"),
        ("  def f(x):\n    return x\n", "  def f(x):\n    return x"),
        ("//text", "/text"),
        ("//", "/"),
        ("a /top-k 4", "a /top-k 4"),
        ("/top-k 4", SlashCommand("top-k", "4")),
        (" /DRAFT-MAX   max ", SlashCommand("draft-max", "max")),
        ("/top-k\t4", SlashCommand("top-k", "4")),
        ("/top-k", SlashCommand("top-k", "")),
        ("/system You are\nterse.", SlashCommand("system", "You are\nterse.")),
        ("/compare\ndef f(", SlashCommand("compare", "def f(")),
        ("/exit", SlashCommand("quit", "")),
        ("/?", SlashCommand("help", "")),
    ],
)
def test_what_is_typed(typed: str, read_as: str | SlashCommand) -> None:
    assert parse_input(typed) == (read_as if isinstance(read_as, str) else (read_as,))


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("/gama 4", "/gamma"),
        ("/drafter-max 4", "/draft-max"),
        ("/spec", "/speculative"),
        ("/targe", "/target"),
        ("/tints on", "/tint"),
        ("/exi", "/exit"),
    ],
)
def test_an_unknown_command_names_the_nearest(typed: str, nearest: str) -> None:
    error = refused(typed)
    assert f"there is no command {typed.split()[0]}" in error.message
    assert f"{nearest} is the nearest" in error.hint


@pytest.mark.parametrize("typed", ["/usr/bin/python", "/", "/ 4", "/§", "/" + "x" * 500])
def test_what_is_no_command_at_all_can_be_sent_as_text(typed: str) -> None:
    error = refused(typed)
    assert "/help" in error.hint
    assert "//" in error.hint
    assert len(error.hint) < 200


def test_a_command_without_argument_takes_none() -> None:
    assert "'now'" in refused("/quit now").message


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("/target", "alone", "target"),
        ("/draft", "alone", "draft"),
        ("/speculative", "alone", ""),
        ("/draft-max 4", "draft_max", 4),
        ("/draft-max 15", "draft_max", 15),
        ("/draft-max MAX", "draft_max", 15),
        ("/draft-policy adaptive", "draft_policy", "adaptive"),
        ("/drafter lookup", "drafter", "lookup"),
        ("/drafter lookup+draft", "drafter", "both"),
        ("/drafter None", "drafter", "none"),
        ("/predict 1,000", "predict", 1000),
        ("/accept residual", "accept", "residual"),
        ("/accept top-k:3", "accept", "top-k:3"),
        ("/accept top-k 3", "accept", "top-k:3"),
        ("/accept typical:0.3", "accept", "typical:0.3"),
        ("/chat off", "chat", False),
        ("/cache OFF", "cache", False),
        ("/debug on", "debug", True),
        ("/tint on", "tint", True),
        ("/markdown off", "markdown", False),
        ("/markdown auto", "markdown", None),
        ("/system You are terse.", "system", "You are terse."),
        ("/system off", "system", ""),
    ],
)
def test_switches(line: str, field: str, value: object) -> None:
    before = replace(PAIR, alone="target", draft_policy="fixed", draft_max=9, system="old", markdown=True)
    after = changed(line, before)
    assert getattr(after, field) == value
    assert after == replace(before, **{field: value})


@pytest.mark.parametrize(
    ("line", "sampling"),
    [
        ("greedy", Sampling(seed=7)),
        ("multinomial", Sampling(0.8, 0, 1.0, 0.0, 7)),
        ("multinomial 1.5", Sampling(1.5, 0, 1.0, 0.0, 7)),
        ("topk 0.7 20", Sampling(0.7, 20, 1.0, 0.0, 7)),
        ("nucleus 0.7 0.9", Sampling(0.7, 0, 0.9, 0.0, 7)),
        ("TopKNucleus 0.8 40 0.95", Sampling(0.8, 40, 0.95, 0.0, 7)),
        ("topknucleus", Sampling(0.8, 40, 0.95, 0.0, 7)),
    ],
)
def test_processors_keep_the_seed(line: str, sampling: Sampling) -> None:
    assert changed(f"/processor {line}", replace(PAIR, sampling=Sampling(seed=7))).sampling == sampling
    assert changed("/seed 18446744073709551615").sampling == Sampling(seed=2**64 - 1)
    assert len({changed("/seed -1").sampling.seed for _ in range(4)}) > 1
    assert "-1 draws one" in refused("/seed -2").hint


def test_a_seed_of_each_answer_until_one_is_given() -> None:
    drawn = changed("/seed -1")
    assert drawn.redraws
    assert shown(drawn, "seed") == f"{drawn.sampling.seed} now, a new one for each answer"
    assert not changed("/seed 7", drawn).redraws
    assert changed("/temp 0.5", drawn).redraws


def test_help_has_every_command_once_in_a_window_of_24_lines() -> None:
    names = [name for group in (*HELP.values(), *HELP_IN_SHORT.values()) for name in group]
    assert sorted(names) == sorted(COMMANDS)
    console = Console(width=80, file=io.StringIO())
    with console.capture() as shown_help:
        console.print(help_table())
    assert len(shown_help.get().splitlines()) <= 24


def test_the_temperature_alone() -> None:
    before = replace(PAIR, sampling=Sampling(0.5, 20, 0.9, 0.1, 7, repeat_penalty=1.1))
    after = changed("/temp 1.2", before)
    assert after == replace(before, sampling=replace(before.sampling, temperature=1.2))
    assert (shown(after, "temp"), sampled(after)) == ("1.2", "temp 1.2, top-k 20, top-p 0.9, min-p 0.1")
    assert sampled(changed("/temp 0", after)) == "greedy"
    for wrong in ("-1", "warm", "nan", "inf"):
        assert "/temp 0.8; 0 is greedy" in refused(f"/temp {wrong}").hint


def test_every_option_that_says_so_is_a_switch() -> None:
    for row in OPTIONS.values():
        if row.chat:
            assert row.flags[-1].removeprefix("--") in COMMANDS
            assert hasattr(PAIR.sampling if row.group == "sampling" else PAIR, row.name) or row.name == "temp"
    after = changed("/min-p 0.2")
    assert after == replace(PAIR, sampling=replace(PAIR.sampling, min_p=0.2))
    assert shown(after, "min-p") == "0.2"
    assert shown(changed("/seed 18446744073709551615"), "seed") == "18446744073709551615"
    assert (shown(changed("/predict -1"), "predict"), shown(changed("/predict 9"), "predict")) == (
        "no limit",
        "9 tokens at most",
    )
    assert "/min-p 0.05; 0 turns it off" in refused("/min-p 2").hint


def test_penalties_are_switches_of_their_own() -> None:
    some = changed("/presence-penalty -0.5", changed("/repeat-penalty 1.1"))
    assert some.sampling == Sampling(repeat_penalty=1.1, presence_penalty=-0.5)
    assert changed("/processor topk 0.8 20", some).sampling.repeat_penalty == 1.1
    assert changed("/repeat-last-n -1", some).sampling.repeat_last_n == -1
    assert shown(some, "repeat-penalty") == "1.1"
    assert "/repeat-penalty 1.1; 1 turns it off" in refused("/repeat-penalty 0").hint
    assert "/repeat-last-n 64" in refused("/repeat-last-n 6.5").hint


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(), "greedy"),
        (Sampling(0.8), "temp 0.8"),
        (Sampling(0.8, 20), "temp 0.8, top-k 20"),
        (Sampling(0.8, 40, 0.9), "temp 0.8, top-p 0.9"),
        (Sampling(0.8, 0, 1.0, 0.0), "temp 0.8, top-k 0, top-p 1, min-p 0"),
    ],
)
def test_what_is_not_usual_is_shown_as_it_is_typed(sampling: Sampling, words: str) -> None:
    assert sampled(replace(PAIR, sampling=sampling)) == words
    if sampling.temperature:
        again = PAIR
        for typed in words.split(", "):
            again = changed(f"/{typed}", again)
        assert again.sampling == sampling


@pytest.mark.parametrize(
    ("line", "today"),
    [
        ("/gamma 4", ("/draft-policy fixed", "/draft-max 4")),
        ("/gamma AUTO", ("/draft-policy adaptive", "/draft-max max")),
        ("/gamma", ("/draft-policy", "/draft-max")),
        ("/ngram", ("/drafter",)),
        ("/ngram on", ("/drafter both",)),
        ("/ngram off", ("/drafter draft",)),
        ("/ngram only", ("/drafter lookup",)),
        ("/length 20", ("/predict 20",)),
        ("/processor", ("/temp", "/top-k", "/top-p", "/min-p")),
        ("/processor topk 0.7", ("/temp 0.7", "/top-k 40", "/top-p 1", "/min-p 0")),
        ("/? gamma", ("/help gamma",)),
        ("/q", ("/quit",)),
    ],
)
def test_words_of_older_versions(line: str, today: tuple[str, ...]) -> None:
    assert commands(line) == tuple(command for each in today for command in commands(each))


def test_every_alias_stands_for_commands() -> None:
    assert not {alias.partition(" ")[0] for alias in ALIASES} & set(COMMANDS)
    for alias in ALIASES:
        assert {command.name for command in commands(f"/{alias}")} <= set(COMMANDS)


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("/draft-max none", "/draft-max 63 is the default; /target runs"),
        ("/draft-max 0", "/draft-max 63 is the default; /target runs"),
        ("/draft-max -1", "/draft-max 63 is the default; /target runs"),
        ("/draft-max 16", "start the chat with --draft-max 16"),
        ("/gamma 1e9", "/draft-max 63 is the default"),
        ("/draft-policy maybe", "/draft-policy is one of adaptive, fixed"),
        ("/drafter maybe", "/drafter is one of draft, mtp"),
        ("/drafter mtp", "/drafter lookup or none"),
        ("/ngram maybe", "/ngram is /drafter now"),
        ("/gamma 4 5", "/gamma is /draft-policy and /draft-max now"),
        ("/predict 0", "/predict 128"),
        ("/predict many", "/predict 128"),
        ("/seed -2", "/seed -1 draws one"),
        ("/seed 18446744073709551616", "/seed 7"),
        ("/accept exactly", "/accept is one of exact, residual, top-k:N, typical:EPS"),
        ("/accept top-k:0", "/accept top-k:3"),
        ("/accept typical:2", "/accept typical:0.3"),
        ("/chat yes", "on|off"),
        ("/markdown yes", "on|off|auto"),
        ("/top-k 2.5", "/top-k 40; 0 turns it off"),
        ("/top-p 1.5", "/top-p 0.95; 1 turns it off"),
        ("/processor magic", "/processor is /temp and /top-k and /top-p and /min-p now"),
        ("/processor topk 0.8 -1", "/top-k 40"),
        ("/processor multinomial nan", "/temp 0.8"),
        ("/processor greedy 1", "/processor is /temp now"),
    ],
)
def test_a_bad_argument_says_what_is_allowed(line: str, allowed: str) -> None:
    error = refused(line)
    assert allowed in error.hint
    assert error.exit_code == 2


def test_what_is_not_loaded_cannot_be_switched_to() -> None:
    for line in ("/draft", "/drafter draft"):
        assert "no draft model is loaded" in refused(line, ALONE).message
    assert "no MTP head is loaded" in refused("/drafter mtp").message
    assert "needs a draft model or the n-gram lookup" in refused("/speculative", ALONE).message
    assert changed("/speculative", changed("/drafter both", ALONE)).drafters == ("lookup",)


def test_a_head_cannot_answer_alone() -> None:
    for head, label in (("mtp", "MTP head"), ("eagle3", "EAGLE-3 head")):
        with_head = replace(PAIR, head=head)
        error = refused("/draft", with_head)
        assert (error.message, error.hint) == (f"an {label} cannot answer alone", "/target, or /speculative")
        assert changed("/drafter draft", with_head).drafters == (head,)
        assert changed("/drafter lookup", with_head).drafters == ("lookup",)


@pytest.mark.parametrize(
    ("settings", "drafters"),
    [
        (PAIR, ("draft", "lookup")),
        (replace(PAIR, drafter="draft"), ("draft",)),
        (replace(PAIR, drafter="lookup"), ("lookup",)),
        (replace(PAIR, drafter="none"), ()),
        (replace(PAIR, drafter="both", head="mtp"), ("mtp", "lookup")),
        (replace(PAIR, drafter="mtp+lookup"), ("lookup",)),
        (ALONE, ()),
        (replace(ALONE, drafter="both"), ("lookup",)),
    ],
)
def test_who_drafts(settings: ChatSwitches, drafters: tuple[str, ...]) -> None:
    assert settings.drafters == drafters


def test_lossy_only_where_the_rule_judges() -> None:
    lossy = changed("/accept top-k:3")
    assert lossy.lossy
    assert "(lossy)" in shown(lossy, "accept")
    assert not replace(lossy, alone="target").lossy
    assert not replace(lossy, drafter="none").lossy
    assert not changed("/accept residual").lossy


def test_markdown_follows_the_template_unless_told() -> None:
    assert PAIR.renders
    assert not replace(PAIR, chat=False).renders
    assert replace(PAIR, chat=False, markdown=True).renders
    assert not replace(PAIR, markdown=False).renders


def test_every_switch_shows_its_value() -> None:
    for settings in (PAIR, ALONE, replace(PAIR, draft_max=3, markdown=True, system="x")):
        assert all(shown(settings, name) for name in (*SHOWN, "target"))
    assert shown(replace(PAIR, draft_policy="fixed", draft_max=3), "draft-max") == "3, always"
    assert shown(PAIR, "draft-max") == "15 at most"
    assert shown(PAIR, "drafter") == "both (draft model and n-gram lookup)"
    assert shown(ALONE, "drafter") == "none (no draft)"
    assert shown(ALONE, "speculative") == "target-only: speculation is off"
    assert all(is_switch(name) for name in SHOWN)
    assert not any(is_switch(name) for name in ("help", "quit", "save", "compare"))


@given(st.text())
def test_anything_typed_is_a_message_a_command_or_an_error_with_a_hint(typed: str) -> None:
    try:
        found = parse_input(typed)
    except UsageError:
        refused(typed)
        return
    if isinstance(found, str):
        assert found.strip() in typed.strip()
    else:
        assert {command.name for command in found} <= set(COMMANDS)


@given(st.sampled_from(sorted([*COMMANDS, *ALIASES])), st.text(min_size=1).filter(str.strip))
def test_any_argument_is_taken_or_refused(name: str, argument: str) -> None:
    line = f"/{name} {argument}"
    try:
        for command in commands(line):
            if is_switch(command.name) and command.argument:
                assert isinstance(change(PAIR, command), ChatSwitches)
    except UsageError:
        refused(line)
