"""Actions that the chat's commands perform."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from ggufspec.chat import commands as chat_commands
from ggufspec.chat import report, session
from ggufspec.chat.commands import COMMANDS, MODES, SlashCommand
from ggufspec.chat.stream import source_styles
from ggufspec.chat.talk import Talk
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.files import untrusted
from ggufspec.prompting import conversation
from ggufspec.reports.table import pairs
from ggufspec.schema.chat import ChatRun
from ggufspec.schema.text import counted


def take(talk: Talk, typed: str) -> bool:
    """Execute the user's input; return False if the chat should end. After a GgufspecError nothing has changed."""
    read = chat_commands.parse_input(typed)
    if isinstance(read, str):
        if read.strip():
            talk.say(read)
        return True
    name, argument = read[0]
    if name in _ACTIONS:
        _ACTIONS[name](talk, argument)
    elif name != "quit":
        _switch(talk, read)
    return name != "quit"


def _switch(talk: Talk, commands: tuple[SlashCommand, ...]) -> None:
    changed = talk.settings
    for command in commands:
        if command.argument or not COMMANDS[command.name].form:
            changed = chat_commands.change(changed, command)
    if changed.chat and not talk.settings.chat and not talk.ready.chat_template:
        raise UsageError("the model has no usable chat template", "messages are continued as plain text")
    talk.settings = changed
    for name, _ in commands:
        value = chat_commands.shown(changed, name)
        talk.screen.say(f"{name}: {value}" if COMMANDS[name].form else value)
    if changed.tint and commands[0].name == "tint":
        talk.note_tint()
        talk.screen.show(report.legend(source_styles(talk.screen.console), changed.drafters))


def _settings(talk: Talk, _: str) -> None:
    now, about = talk.settings, talk.about
    rows = [("mode", chat_commands.mode(now))]
    rows += [(f"/{name}", chat_commands.shown(now, name)) for name in chat_commands.SHOWN]
    rows.append(("context", talk.context(" of ")))
    rows += [(role, str(about[role])) for role in ("target", "draft") if about.get(role)]
    talk.screen.show(pairs(rows))


def _help(talk: Talk, argument: str) -> None:
    word = argument.lstrip("/").partition(" ")[0]
    if not word:
        talk.screen.show(report.help_table())
        if talk.screen.interactive:
            talk.screen.note(
                "/help COMMAND explains a command; Alt-Enter, or \\ at the end, begins a new line; Ctrl-C stops an "
                "answer; to begin a message with a slash, type two"
            )
        return
    lines: list[tuple[str, str]] = []
    for found in chat_commands.parse_input(f"/{word}"):  # an unknown command is an error that names the nearest
        assert isinstance(found, SlashCommand)
        about = COMMANDS[found.name]
        lines += [(about.typed(found.name), about.does), *[("", about.more)] * bool(about.more)]
        if chat_commands.is_switch(found.name):
            lines.append(("", f"now: {chat_commands.shown(talk.settings, found.name)}"))
    talk.screen.show(pairs(lines))


def _clear(talk: Talk, _: str) -> None:
    talk.start_with(talk.conversation.clear())
    talk.screen.say("the conversation is empty")


def _undo(talk: Talk, _: str) -> None:
    text = _last_question(talk, "undo")
    talk.conversation = talk.conversation.undo()
    talk.screen.say(f"removed: {chat_commands.beginning(text)}")


def _retry(talk: Talk, _: str) -> None:
    text, before = _last_question(talk, "retry"), talk.conversation
    talk.conversation = before.undo()
    answered = False
    try:
        answered = talk.say(text)
    finally:
        if not answered:
            talk.conversation = before


def _last_question(talk: Talk, purpose: str) -> str:
    if not talk.conversation.turns:
        raise UsageError(f"there is nothing to {purpose}", "send a message first")
    return talk.conversation.turns[-1].user


def _save(talk: Talk, argument: str) -> None:
    path = _path("save", argument)
    if path.is_file() and path.stat().st_size:
        try:
            conversation.load_conversation(path)
        except GgufspecError:
            raise UsageError(f"{path} already exists and is not a conversation", "/save ANOTHER-NAME.json") from None
    conversation.save_conversation(path, talk.document())
    talk.screen.say(f"{counted(talk.turns, 'turn')} in {path}")


def _load(talk: Talk, argument: str) -> None:
    talk.resume(_path("load", argument))


def _path(command: str, argument: str) -> Path:
    if not argument:
        raise UsageError(f"/{command} needs the name of a file", f"/{command} conversation.json")
    return untrusted.at_home(argument)


def _compare(talk: Talk, argument: str) -> None:
    """Answer a question in every possible mode (target-only, draft-only, speculative), and compare the answers."""
    now, before = talk.with_seed(), talk.conversation
    if not argument:
        argument, before = _last_question(talk, "compare"), before.undo()
    ways = ["target", *["draft"] * (now.has_draft and not now.head), *[""] * bool(now.drafters)]
    if len(ways) == 1:
        raise UsageError("there is nothing to compare target-only with", "/drafter lookup")
    asked = replace(before, system=now.system).ask(argument)
    found: dict[str, tuple[session.ChatReply, ChatRun]] = {}
    for way in ways:
        if talk.screen.streams:
            talk.screen.note(f"── {MODES[way]} ──")
        settings = replace(now, alone=way)
        answer = talk.ask(asked, settings, cache=False)
        figures = report.figures(answer.statistics, lossy=settings.lossy)
        if figures is None or (answer.stopped and not answer.tokens):
            break
        target = found["target"][0] if found else answer
        differs_at = _differs_at(answer.tokens, target.tokens)
        found[way] = answer, ChatRun(MODES[way], answer.text, figures, differs_at, answer.stopped)
        if talk.stopped:
            break
    if found:
        runs = tuple(run for _, run in found.values())
        talk.screen.show(report.comparison(runs))
        answer, run = found.get("", found["target"])
        talk.keep(asked, answer, run.figures, compared=runs, seed=now.sampling.seed)
    talk.show_notes()


def _differs_at(tokens: tuple[int, ...], reference: tuple[int, ...]) -> int | None:
    """Return the position (from 1) of the first token that differs from the reference; None if all are equal."""
    both = enumerate(zip_longest(tokens, reference), 1)
    return next((number for number, (one, other) in both if one != other), None)


_ACTIONS: dict[str, Callable[[Talk, str], None]] = {
    "compare": _compare,
    "save": _save,
    "load": _load,
    "undo": _undo,
    "retry": _retry,
    "clear": _clear,
    "settings": _settings,
    "help": _help,
}
