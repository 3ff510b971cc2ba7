"""What is typed in a chat, and what switches change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.chat.commands import (
    COMMANDS,
    SHOWN,
    Command,
    Switches,
    candidates,
    change,
    is_switch,
    processor,
    read,
    shown,
    takes_path,
)
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import UsageError
from ggufspec.settings import OPTIONS

PAIR = Switches(has_draft=True)
ALONE = Switches(has_draft=False, ngram="off")


def changed(line: str, settings: Switches = PAIR) -> Switches:
    command = read(line)
    assert isinstance(command, Command)
    return change(settings, command)


def refused(line: str, settings: Switches = PAIR) -> UsageError:
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
        ("a /gamma 4", "a /gamma 4"),
        ("/gamma 4", Command("gamma", "4")),
        (" /GAMMA   auto ", Command("gamma", "auto")),
        ("/gamma\t4", Command("gamma", "4")),
        ("/gamma", Command("gamma", "")),
        ("/system You are\nterse.", Command("system", "You are\nterse.")),
        ("/compare\ndef f(", Command("compare", "def f(")),
        ("/exit", Command("quit", "")),
        ("/?", Command("help", "")),
    ],
)
def test_what_is_typed(typed: str, read_as: str | Command) -> None:
    assert read(typed) == read_as


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("/gama 4", "/gamma"),
        ("/spec", "/speculative"),
        ("/targe", "/target"),
        ("/tints on", "/tint"),
        ("/exi", "/quit"),
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
        ("/target", "mode", "target"),
        ("/drafter", "mode", "drafter"),
        ("/speculative", "mode", "speculative"),
        ("/gamma 4", "gamma", 4),
        ("/gamma 15", "gamma", 15),
        ("/gamma AUTO", "gamma", None),
        ("/ngram only", "ngram", "only"),
        ("/ngram off", "ngram", "off"),
        ("/length 1,000", "length", 1000),
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
    before = replace(PAIR, mode="target", gamma=9, system="old", markdown=True)
    after = changed(line, before)
    assert getattr(after, field) == value
    assert after == replace(before, **{field: value})


@pytest.mark.parametrize(
    ("line", "sampling"),
    [
        ("greedy", Sampling(0.0, 0, 1.0, 0.0, 7)),
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


def test_the_temperature_alone() -> None:
    before = replace(PAIR, sampling=Sampling(0.5, 20, 0.9, 0.1, 7, repeat_penalty=1.1))
    after = changed("/temp 1.2", before)
    assert after == replace(before, sampling=replace(before.sampling, temperature=1.2))
    assert shown(after, "temp") == "topknucleus 1.2 20 0.9, min-p 0.1"
    assert shown(changed("/temp 0", after), "temp") == "greedy"
    for wrong in ("-1", "warm", "nan", "inf"):
        assert "/temp 0.8; 0 is greedy" in refused(f"/temp {wrong}").hint


def test_every_option_that_says_so_is_a_switch() -> None:
    assert {row.chat for row in OPTIONS.values() if row.chat} <= set(COMMANDS)
    after = changed("/min-p 0.2")
    assert after == replace(PAIR, sampling=replace(PAIR.sampling, min_p=0.2))
    assert shown(after, "min-p") == "0.2"
    assert shown(changed("/seed 18446744073709551615"), "seed") == "18446744073709551615"
    assert "/min-p 0.05; 0 turns it off" in refused("/min-p 1").hint


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
        (Sampling(0.8, 0, 1.0, 0.0), "multinomial 0.8"),
        (Sampling(0.8, 40, 1.0, 0.0), "topk 0.8 40"),
        (Sampling(0.8, 0, 0.9, 0.0), "nucleus 0.8 0.9"),
        (Sampling(0.8, 40, 0.95, 0.05), "topknucleus 0.8 40 0.95, min-p 0.05"),
    ],
)
def test_processors_are_shown_as_they_are_typed(sampling: Sampling, words: str) -> None:
    assert processor(sampling) == words
    typed = words.partition(",")[0]
    again = changed(f"/processor {typed}").sampling
    assert again.temperature == sampling.temperature
    assert sampling.temperature == 0 or (again.top_k, again.top_p) == (sampling.top_k, sampling.top_p)


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("/gamma none", "1 to 15"),
        ("/gamma 0", "1 to 15"),
        ("/gamma -1", "1 to 15"),
        ("/gamma 16", "--draft-max 16"),
        ("/gamma 1e9", "1 to 15"),
        ("/ngram maybe", "on, off or only"),
        ("/length 0", "/length 128"),
        ("/length many", "/length 128"),
        ("/seed -2", "/seed -1 draws one"),
        ("/seed 18446744073709551616", "/seed 7"),
        ("/accept exactly", "exact is the nearest"),
        ("/accept top-k:0", "top-k:N"),
        ("/accept typical:2", "typical:EPS"),
        ("/chat yes", "on or off"),
        ("/markdown yes", "on, off or auto"),
        ("/processor topp", "topk"),
        ("/processor magic", "topknucleus"),
        ("/processor topk 0.8 -1", "topk [T] [K]"),
        ("/processor topk 0.8 2.5", "topk [T] [K]"),
        ("/processor nucleus 0.8 1.5", "up to probability P"),
        ("/processor multinomial -1", "at temperature T"),
        ("/processor multinomial nan", "at temperature T"),
        ("/processor greedy 1", "the likeliest token, always"),
        ("/processor topk 0.8 40 0.95", "topk [T] [K]"),
    ],
)
def test_a_bad_argument_says_what_is_allowed(line: str, allowed: str) -> None:
    error = refused(line)
    assert allowed in error.hint
    assert error.exit_code == 2


def test_what_is_not_loaded_cannot_be_switched_to() -> None:
    assert "no draft model" in refused("/drafter", ALONE).message
    assert "needs a draft model or the n-gram lookup" in refused("/speculative", ALONE).message
    assert changed("/speculative", changed("/ngram on", ALONE)).drafters == ("lookup",)


def test_a_head_cannot_answer_alone() -> None:
    for head, label in (("mtp", "MTP head"), ("eagle3", "EAGLE-3 head")):
        with_head = replace(PAIR, loaded=(head, "lookup"))
        error = refused("/drafter", with_head)
        assert (error.message, error.hint) == (f"an {label} cannot answer alone", "/target, or /speculative")
        assert changed("/ngram off", with_head).drafters == (head,)
        assert changed("/ngram only", with_head).drafters == ("lookup",)


@pytest.mark.parametrize(
    ("settings", "drafters", "alone"),
    [
        (PAIR, ("draft", "lookup"), ""),
        (replace(PAIR, ngram="off"), ("draft",), ""),
        (replace(PAIR, ngram="only"), ("lookup",), ""),
        (replace(PAIR, loaded=()), ("lookup",), ""),
        (replace(PAIR, mode="target"), ("draft", "lookup"), "target"),
        (replace(PAIR, mode="drafter"), ("draft", "lookup"), "draft"),
        (ALONE, (), ""),
        (replace(ALONE, ngram="only"), ("lookup",), ""),
    ],
)
def test_who_drafts_and_who_answers(settings: Switches, drafters: tuple[str, ...], alone: str) -> None:
    assert (settings.drafters, settings.alone) == (drafters, alone)


def test_lossy_only_where_the_rule_judges() -> None:
    lossy = changed("/accept top-k:3")
    assert lossy.lossy
    assert "(lossy)" in shown(lossy, "accept")
    assert not replace(lossy, mode="target").lossy
    assert not replace(lossy, has_draft=False, ngram="off").lossy
    assert not changed("/accept residual").lossy


def test_markdown_follows_the_template_unless_told() -> None:
    assert PAIR.renders
    assert not replace(PAIR, chat=False).renders
    assert replace(PAIR, chat=False, markdown=True).renders
    assert not replace(PAIR, markdown=False).renders


def test_every_switch_shows_its_value() -> None:
    for settings in (PAIR, ALONE, replace(PAIR, gamma=3, markdown=True, system="x")):
        assert all(shown(settings, name) for name in (*SHOWN, "target"))
    assert shown(replace(PAIR, gamma=3), "gamma") == "3, always"
    assert shown(ALONE, "speculative") == "target-only: speculation is off"
    assert all(is_switch(name) for name in SHOWN)
    assert not any(is_switch(name) for name in ("help", "quit", "save", "compare"))


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("/ga", ["/gamma"]),
        ("/s", ["/speculative", "/seed", "/system", "/save", "/settings"]),
        ("/gamma ", ["auto"]),
        ("/gamma x", []),
        ("/ngram o", ["on", "off", "only"]),
        ("/processor top", ["topk", "topknucleus"]),
        ("/processor topk 0", []),
        ("/processor topk ", []),
        ("/accept t", ["top-k:", "typical:"]),
        ("/help ga", ["gamma"]),
        ("/help /ga", ["gamma"]),
        ("hello /ga", []),
        ("//ga", []),
        ("/nothing ", []),
        ("", []),
    ],
)
def test_completion(before: str, words: list[str]) -> None:
    assert [word for word, _ in candidates(before)] == words


def test_all_commands_are_offered_and_files_where_they_are_wanted() -> None:
    assert [word for word, _ in candidates("/")] == [f"/{name}" for name in COMMANDS]
    assert takes_path("/save fo")
    assert not takes_path("/save")
    assert not takes_path("/gamma fo")
    assert not takes_path("save fo")


@given(st.text())
def test_anything_typed_is_a_message_a_command_or_an_error_with_a_hint(typed: str) -> None:
    try:
        found = read(typed)
    except UsageError:
        refused(typed)
        return
    if isinstance(found, str):
        assert found.strip() in typed.strip()
    else:
        assert found.name in COMMANDS


@given(st.sampled_from(sorted(COMMANDS)), st.text(min_size=1).filter(str.strip))
def test_any_argument_is_taken_or_refused(name: str, argument: str) -> None:
    line = f"/{name} {argument}"
    try:
        command = read(line)
        assert isinstance(command, Command)
        if is_switch(command.name) and command.argument:
            assert isinstance(change(PAIR, command), Switches)
    except UsageError:
        refused(line)
