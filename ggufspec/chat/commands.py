"""Chat input: messages, commands with arguments, and the settings that switches change. Pure.

Switches for options take names, types, bounds and help from rows with ``chat`` in :mod:`ggufspec.settings.table`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ggufspec.decoding.sampling import Sampling, random_seed
from ggufspec.errors import UsageError
from ggufspec.settings.option import Option
from ggufspec.settings.registry import (
    DRAFTERS,
    RULE_FORMS,
    drafter_text,
    drafters_label,
    is_lossy,
    parse_drafters,
    with_head,
)
from ggufspec.settings.table import DRAFT_MAX, MAX_COUNT, OPTIONS

MODES = {"": "speculative", "target": "target-only", "draft": "draft-only"}  # mode names by ``ChatSwitches.alone``
ROWS = {row.name.replace("_", "-"): row for row in OPTIONS.values() if row.chat}
_SWITCHES = {"--no-draft": "/target", **{flag: f"/{name}" for name, row in ROWS.items() for flag in row.flags}}
_FLAG = re.compile(rf"(?<!\S)({'|'.join(_SWITCHES)})(?![\w-])")
_WORDS: dict[str, Any] = {"on": True, "off": False, "auto": None}
_NEEDS_DRAFT = "start the chat without --no-draft, or with -md DRAFT"


@dataclass(frozen=True, slots=True)
class ChatSwitches:
    """Settings that can be switched while a pair is loaded; those for options have the options' names."""

    has_draft: bool  # True if a draft is loaded
    head: str = ""  # kind of head if the draft is a head, which cannot answer without the target
    draft_most: int = DRAFT_MAX  # maximum draft length that the pair was loaded for
    alone: str = ""  # the only model that answers (a key of ``MODES``); empty: both
    drafter: str = "both"
    draft_policy: str = "adaptive"
    draft_max: int = DRAFT_MAX
    accept: str = "exact"
    sampling: Sampling = field(default_factory=Sampling)
    redraws: bool = False  # draw a new seed for each answer
    predict: int = 512
    chat: bool = True  # use the model's chat template
    cache: bool = True  # retain the context between turns
    debug: bool = False  # show every round in the stream
    tint: bool = False  # colour the stream by the source of each token
    markdown: bool | None = None  # render answers as Markdown; None: if the chat template is used
    system: str = ""  # system prompt; empty for none

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names (:data:`ggufspec.settings.registry.DRAFTERS`) of the drafters in ``drafter`` that are loaded."""
        own = (self.head or "draft") if self.has_draft else ""
        wanted = with_head(parse_drafters(self.drafter), self.head)
        return tuple(name for name in wanted if name == own or not DRAFTERS[name].needs_model)

    @property
    def renders(self) -> bool:
        """True to render answers as Markdown: by default only with the template, because plain text rarely uses it."""
        return self.chat if self.markdown is None else self.markdown

    @property
    def lossy(self) -> bool:
        """True if the acceptance rule may make an answer differ from the target's own."""
        return not self.alone and bool(self.drafters) and is_lossy(self.accept)


class SlashCommand(NamedTuple):
    """Parsed slash command: a name from ``COMMANDS``, and the argument without surrounding spaces."""

    name: str
    argument: str


@dataclass(frozen=True, slots=True)
class CommandHelp:
    """Help text and completions for a command."""

    form: str  # syntax of the argument; empty if it takes no argument
    does: str  # short description
    more: str = ""  # additional sentence for ``/help COMMAND``
    named: tuple[str, ...] = ()  # possible arguments if ``form`` does not list them

    def typed(self, name: str) -> str:
        return f"/{name} {self.form}".strip()

    @property
    def words(self) -> tuple[str, ...]:
        return self.named or tuple(word for word in self.form.split("|") if word.islower())


def _of_option(name: str, row: Option) -> CommandHelp:
    does, _, rest = as_switches(row.help).removesuffix(".").partition(": ")
    named = RULE_FORMS if name == "accept" else row.choices or row.words
    form = "N|max" if name == "draft-max" else "NAME" if row.choices or row.words else row.form
    more = "; ".join(filter(None, (rest, f"one of {', '.join(named)}" if named else "")))
    return CommandHelp(form, does[0].lower() + does[1:], more, named)


def as_switches(text: str) -> str:
    """Replace flags in a text with the names of their switches."""
    return _FLAG.sub(lambda found: _SWITCHES[found[0]], text)


COMMANDS: dict[str, CommandHelp] = {
    "speculative": CommandHelp("", "draft and target together"),
    "target": CommandHelp("", "target-only"),
    "draft": CommandHelp("", "draft-only"),
    "compare": CommandHelp(
        "[TEXT]",
        "answer target-only, draft-only and speculatively, and compare",
        "Without TEXT the last message is answered again; the conversation keeps the speculative answer.",
    ),
    **{name: _of_option(name, row) for name, row in ROWS.items()},
    "chat": CommandHelp("on|off", "use the chat template; off: continue plain text"),
    "cache": CommandHelp("on|off", "keep the context cached between turns"),
    "debug": CommandHelp("on|off", "show every round in the stream"),
    "tint": CommandHelp(
        "on|off", "colour the stream by the source of each token", "The text is then streamed without Markdown."
    ),
    "markdown": CommandHelp("on|off|auto", "render Markdown; auto: with the chat template"),
    "system": CommandHelp("TEXT|off", "set the system prompt for the following answers"),
    "save": CommandHelp("FILE", "write the conversation to a file"),
    "load": CommandHelp("FILE", "resume a conversation from a file"),
    "undo": CommandHelp("", "remove the last message and its answer"),
    "retry": CommandHelp("", "answer the last message again"),
    "clear": CommandHelp("", "forget the conversation"),
    "settings": CommandHelp("", "show the current settings"),
    "help": CommandHelp("[COMMAND]", "list the commands, or explain one"),
    "quit": CommandHelp("", "leave; so does Ctrl-D"),
}
# Commands in /help by group, with a line per command (HELP) or per group (HELP_IN_SHORT).
HELP = {
    "Conversation": ("system", "undo", "retry", "clear", "save", "load", "settings", "help", "quit"),
    "Who answers": ("speculative", "target", "draft", "compare"),
}
HELP_IN_SHORT = {
    "Drafting": ("drafter", "draft-policy", "draft-max", "accept"),
    "Answers": ("predict", "markdown", "tint", "debug", "chat", "cache"),
    "Sampling": tuple(name for name, row in ROWS.items() if row.group == "sampling"),
}
_ACTIONS = ("compare", "save", "load", "undo", "retry", "clear", "settings", "help", "quit")
SHOWN = tuple(name for name, about in COMMANDS.items() if about.form and name not in _ACTIONS)  # shown by /settings

# Aliases, mostly for older versions' commands.
ALIASES = {
    "exit": "quit",
    "q": "quit",
    "?": "help N",
    "length": "predict N",
    "gamma": "draft-policy fixed, draft-max N",
    "gamma auto": "draft-policy adaptive, draft-max max",
    "ngram": "drafter",
    "ngram on": "drafter both",
    "ngram off": "drafter draft",
    "ngram only": "drafter lookup",
    "processor": "temp, top-k, top-p, min-p",
    "processor greedy": "temp 0",
    "processor multinomial": "temp T, top-k 0, top-p 1, min-p 0",
    "processor topk": "temp T, top-k K, top-p 1, min-p 0",
    "processor nucleus": "temp T, top-k 0, top-p P, min-p 0",
    "processor topknucleus": "temp T, top-k K, top-p P, min-p 0",
}
# Default arguments of aliases.
_TYPED = {"N": "", "T": "0.8", "K": str(OPTIONS["top_k"].default), "P": str(OPTIONS["top_p"].default)}


def parse_input(typed: str) -> str | tuple[SlashCommand, ...]:
    """Parse input into a message or commands: ``/`` begins a command (or an alias of several), ``//`` escapes a slash.

    Raises:
        UsageError: there is no such command (the hint names the nearest), or the command takes no argument.
    """
    text = typed.strip()
    if not text.startswith("/"):
        return typed.strip("\n")
    if text.startswith("//"):
        return text[1:]
    found = re.match(r"/(\S*)(.*)", text, re.DOTALL)
    assert found is not None
    name, argument = found[1].lower(), found[2].strip()
    if name in ALIASES:
        return _of_alias(name, argument)
    if name not in COMMANDS:
        raise UsageError(f"there is no command /{beginning(found[1])}", _nearest(name, text))
    if argument and not COMMANDS[name].form:
        raise UsageError(f"/{name} takes no argument, but {beginning(argument)!r} was given", f"/{name}")
    return (SlashCommand(name, argument),)


def _of_alias(alias: str, argument: str) -> tuple[SlashCommand, ...]:
    rest = argument.lower().split()
    meaning = ALIASES.get(f"{alias} {rest[0]}") if rest else None
    if meaning:
        del rest[0]
    commands = []
    for one in (meaning or ALIASES[alias]).split(", "):
        name, _, value = one.partition(" ")
        if value in _TYPED:
            value = rest.pop(0) if rest else _TYPED[value]
        commands.append(SlashCommand(name, value if argument else ""))
    if rest:
        known = " and ".join(f"/{one.name}" for one in commands)
        raise UsageError(f"/{alias} {beginning(argument)} is not possible", f"/{alias} is {known} now; /help lists all")
    return tuple(commands)


def _nearest(name: str, text: str) -> str:
    as_text = f"//{beginning(text[1:], 20)}"
    known = [*COMMANDS, *(alias for alias in ALIASES if " " not in alias)]
    begun = [one for one in known if name and one.startswith(name)]
    found = begun if len(begun) == 1 else difflib.get_close_matches(name, known, n=1)
    if found:
        return f"/{found[0]} is the nearest; /help lists all, and {as_text} sends it as text"
    return f"/help lists all; to begin a message with a slash, type two: {as_text}"


def beginning(text: str, most: int = 40) -> str:
    """Return a text on one line, truncated to ``most`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def is_switch(name: str) -> bool:
    return name not in _ACTIONS


def change(settings: ChatSwitches, command: SlashCommand) -> ChatSwitches:
    """Return the settings after a switch; raise UsageError if its argument is not valid."""
    name, argument = command
    if name in ROWS:
        return _with_option(settings, ROWS[name], argument)
    if name == "system":
        return replace(settings, system="" if argument.lower() == "off" else argument)
    if form := COMMANDS[name].form:
        if argument.lower() not in form.split("|"):
            raise UsageError(f"/{name} {beginning(argument)} is not possible", f"/{name} {form}")
        return replace(settings, **{name: _WORDS[argument.lower()]})
    if name == "draft" and not settings.has_draft:
        raise UsageError("no draft model is loaded", _NEEDS_DRAFT)
    if name == "draft" and settings.head:
        raise UsageError(f"an {DRAFTERS[settings.head].label} cannot answer alone", "/target, or /speculative")
    if name == "speculative" and not settings.drafters:
        raise UsageError("speculation needs a draft model or the n-gram lookup", f"/drafter lookup, or {_NEEDS_DRAFT}")
    return replace(settings, alone="" if name == "speculative" else name)


def _with_option(settings: ChatSwitches, row: Option, argument: str) -> ChatSwitches:
    text = argument.replace(",", "") if row.kind in (int, float) else ":".join(argument.lower().split())
    if row.name == "draft_max" and text.lower() == "max":
        text = str(settings.draft_most)
    try:
        value = row.check(text)
    except UsageError as error:
        raise UsageError(as_switches(error.message), as_switches(error.hint)) from None
    if row.name == "draft_max" and value > settings.draft_most:
        raise UsageError(
            f"/draft-max {value} is not possible: this pair was loaded for at most {settings.draft_most}",
            f"/draft-max max, or start the chat with --draft-max {value}",
        )
    if row.name == "seed":
        redraws, value = value == -1, random_seed() if value == -1 else value
        settings = replace(settings, redraws=redraws)
    if row.group == "sampling":
        name = "temperature" if row.name == "temp" else row.name
        return replace(settings, sampling=replace(settings.sampling, **{name: value}))
    changed = replace(settings, **{row.name: value})
    if row.name == "drafter" and value != "none" and not changed.drafters:
        raise UsageError(f"no {drafters_label(value)} is loaded", f"/drafter lookup or none; {_NEEDS_DRAFT}")
    return changed


def shown(settings: ChatSwitches, name: str) -> str:
    value = _value(settings, name)
    match name:
        case "speculative" | "target" | "draft":
            return mode(settings)
        case "drafter":
            who = drafter_text(settings.drafters)
            return f"{who} ({drafters_label(who)})"
        case "draft-max":
            return f"{value} at most" if settings.draft_policy == "adaptive" else f"{value}, always"
        case "accept" if is_lossy(settings.accept):
            return f"{value} (lossy)"
        case "predict":
            return "no limit" if value == MAX_COUNT else f"{value} tokens at most"
        case "seed" if settings.redraws:
            return f"{value} now, a new one for each answer"
        case "markdown" if value is None:
            return f"auto: {_on_off(settings.renders)}, the chat template is {_on_off(settings.chat)}"
    if isinstance(value, bool):
        return _on_off(value)
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


def _value(settings: ChatSwitches, name: str) -> Any:
    if name in ROWS and ROWS[name].group == "sampling":
        return getattr(settings.sampling, "temperature" if name == "temp" else ROWS[name].name)
    return getattr(settings, name.replace("-", "_"), None)


def _on_off(value: bool) -> str:
    return "on" if value else "off"


def mode(settings: ChatSwitches) -> str:
    """Describe which models answer."""
    if not settings.alone and not settings.drafters:
        return "target-only: speculation is off"
    return MODES[settings.alone]


def sampled(settings: ChatSwitches) -> str:
    """Describe the sampling: the temperature, and truncations that differ from the defaults."""
    if settings.sampling.temperature == 0:
        return "greedy"
    usual = {name: OPTIONS[ROWS[name].name].default for name in ("top-k", "top-p", "min-p")}
    changed = [name for name, value in usual.items() if _value(settings, name) != value]
    return ", ".join(f"{name} {shown(settings, name)}" for name in ("temp", *changed))
