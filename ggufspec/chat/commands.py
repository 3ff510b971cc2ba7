"""What is typed in a chat: a message, or a command and its argument; and what switches change. Pure.

Switches for options are the rows of :mod:`ggufspec.settings` with ``chat``: their types and bounds hold here, too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ggufspec.decoding.sampling import Sampling, random_seed
from ggufspec.errors import UsageError
from ggufspec.settings import DRAFTERS, OPTIONS, RULE_FORMS, Option, check_rule, is_lossy

MODES = {"speculative": "", "target": "target", "drafter": "draft"}  # by command: which model answers alone
_MODE_NAMES = {"speculative": "speculative", "target": "target-only", "drafter": "draft-only"}
_ON_OFF = {"on": True, "off": False}
_WORDS: dict[str, Mapping[str, Any]] = {  # switches with a few values
    "ngram": {"on": "on", "off": "off", "only": "only"},
    **dict.fromkeys(("chat", "cache", "debug", "tint"), _ON_OFF),
    "markdown": {**_ON_OFF, "auto": None},
}
_TEMPERATURE = 0.8  # of a processor that is named without numbers; llama.cpp's
_NEEDS_DRAFT = "start the chat without --no-draft, or with -md DRAFT"


@dataclass(frozen=True, slots=True)
class Switches:
    """Everything that can be switched while a pair is loaded."""

    has_draft: bool  # whether a draft model is loaded
    loaded: tuple[str, ...] = ("draft",)  # the drafters that the chat began with; the lookup is always there
    draft_most: int = 15  # the draft length that the pair was loaded for
    auto_most: int = 15  # the longest draft of the adaptive policy
    mode: str = "speculative"  # of ``MODES``
    ngram: str = "on"  # whether the n-gram lookup drafts too: on, off, or only it
    gamma: int | None = None  # tokens of every draft; None is the adaptive policy
    accept: str = "exact"  # the acceptance rule
    sampling: Sampling = field(default_factory=Sampling)  # how a token is chosen
    length: int = 512  # tokens of an answer at most
    chat: bool = True  # whether the model's chat template is used
    cache: bool = True  # whether the context keeps what it holds from turn to turn
    debug: bool = False  # whether every round is shown in the stream
    tint: bool = False  # whether the stream is coloured by who wrote each token
    markdown: bool | None = None  # whether answers are rendered as Markdown; None: with the chat template
    system: str = ""  # the system prompt, empty for none

    @property
    def alone(self) -> str:
        """The model that answers alone: ``target``, ``draft``, or empty where both work together."""
        return MODES[self.mode]

    @property
    def drafters(self) -> tuple[str, ...]:
        """Who drafts, of :data:`ggufspec.settings.DRAFTERS`."""
        lookup = ("lookup",) if self.ngram != "off" else ()
        if self.ngram == "only":
            return lookup
        others = (name for name in self.loaded if name != "lookup")
        return (*(name for name in others if self.has_draft or not DRAFTERS[name].needs_model), *lookup)

    @property
    def head(self) -> str:
        """What is loaded as the draft, if it is a head; it cannot answer alone."""
        return next((name for name in self.loaded if DRAFTERS[name].is_head), "")

    @property
    def draft_policy(self) -> str:
        """``fixed`` where a draft length is set, else ``adaptive``."""
        return "adaptive" if self.gamma is None else "fixed"

    @property
    def draft_max(self) -> int:
        """The longest draft of a round."""
        return self.auto_most if self.gamma is None else self.gamma

    @property
    def renders(self) -> bool:
        """Whether answers are rendered as Markdown: a text that goes on without the template is none, most likely."""
        return self.chat if self.markdown is None else self.markdown

    @property
    def lossy(self) -> bool:
        """Whether an answer may differ from the target's own because of the acceptance rule."""
        return self.mode == "speculative" and bool(self.drafters) and is_lossy(self.accept)


class Command(NamedTuple):
    """What begins with a slash: a name of ``COMMANDS``, and the rest without spaces around it."""

    name: str
    argument: str


@dataclass(frozen=True, slots=True)
class About:
    """What help and completion know of a command."""

    form: str  # how its argument is written; empty if it has none
    does: str  # in a few words
    choices: Mapping[str, str] = field(default_factory=dict)  # words that its argument begins with
    more: tuple[str, ...] = ()  # what ``/help COMMAND`` adds, in lines
    path: bool = False  # whether the argument is a file

    def typed(self, name: str) -> str:
        """How the command of that name is typed."""
        return f"/{name} {self.form}".strip()


def _help(name: str) -> str:
    """The help of an option, as a phrase."""
    text = OPTIONS[name].help.removesuffix(".")
    return text[0].lower() + text[1:]


def _row(name: str, flag: str) -> Option:
    """The row of an option, whose messages name it as it is typed here."""
    row = OPTIONS[name]
    usual = row.usual
    for each in row.flags:
        usual = re.sub(rf"(?<!\S){each}(?!\S)", flag, usual)
    return replace(row, flags=(flag,), usual=usual, label=flag[1:])


_OWN = ("ngram", "gamma", "accept", "processor")  # switches with an argument of their own form
_ROWS = {row.chat: _row(name, f"/{row.chat}") for name, row in OPTIONS.items() if row.chat and row.chat not in _OWN}
_FIELDS = {"temp": "temperature"}  # of Sampling, where they have another name than the option
PROCESSORS = {  # the options that each takes, and what it does
    "greedy": ((), "the likeliest token, always"),
    "multinomial": (("temp",), "multinomial [T]: all tokens, at temperature T"),
    "topk": (("temp", "top_k"), "topk [T] [K]: the K likeliest"),
    "nucleus": (("temp", "top_p"), "nucleus [T] [P]: the likeliest up to probability P"),
    "topknucleus": (("temp", "top_k", "top_p"), "topknucleus [T] [K] [P]: the K likeliest, of these up to P"),
}

COMMANDS: dict[str, About] = {
    "speculative": About("", "draft and target together"),
    "target": About("", "target-only"),
    "drafter": About("", "draft-only"),
    "compare": About(
        "[TEXT]",
        "answer target-only, draft-only and speculatively, and compare",
        more=("Without TEXT the last message is answered again; the conversation keeps the speculative answer.",),
    ),
    "gamma": About(
        "N|auto",
        "the draft length: N tokens every round, or as far as it pays",
        {"auto": ""},
        ("N is at most what the pair was loaded for: --draft-max.",),
    ),
    "processor": About(
        "NAME [T K P]",
        "how a token is chosen",
        {name: does for name, (_, does) in PROCESSORS.items()},
        (
            *(does for _, does in PROCESSORS.values()),
            f"T is {_TEMPERATURE}, K {OPTIONS['top_k'].default} and P {OPTIONS['top_p'].default} where not given.",
            "K and P look at the probabilities before the temperature, as llama.cpp's do.",
        ),
    ),
    "ngram": About("on|off|only", "whether the n-gram lookup drafts too, not at all, or alone"),
    **{switch: About(row.form, _help(row.name)) for switch, row in _ROWS.items()},
    "accept": About(
        "RULE",
        "the acceptance rule: " + ", ".join(rule.partition(":")[0] for rule in RULE_FORMS),
        {rule.partition(":")[0] + (":" if ":" in rule else ""): "" for rule in RULE_FORMS},
        (_help("accept"), "top-k:N accepts the target's N likeliest tokens, typical:EPS what is typical."),
    ),
    "chat": About("on|off", "use the chat template; off: continue plain text"),
    "cache": About("on|off", "keep the context from turn to turn"),
    "debug": About("on|off", "show every round in the stream"),
    "tint": About(
        "on|off",
        "colour the stream by who wrote each token",
        more=("The text is shown as it comes then, without Markdown.",),
    ),
    "markdown": About("on|off|auto", "render Markdown; auto: with the chat template"),
    "system": About("TEXT|off", "the system prompt, from the next answer on"),
    "save": About("FILE", "write the conversation to a file", path=True),
    "load": About("FILE", "resume a conversation from a file", path=True),
    "undo": About("", "remove the last message and its answer"),
    "retry": About("", "answer the last message again"),
    "clear": About("", "forget the conversation"),
    "settings": About("", "show all of this"),
    "help": About("[COMMAND]", "list the commands, or explain one"),
    "quit": About("", "leave; so does Ctrl-D"),
}
_ALIASES = {"exit": "quit", "q": "quit", "?": "help"}
_ACTIONS = ("compare", "save", "load", "undo", "retry", "clear", "settings", "help", "quit")
SHOWN = tuple(name for name in COMMANDS if name not in (*MODES, *_ACTIONS, "temp"))  # what /settings lists


def read(typed: str) -> str | Command:
    """What was typed: a command begins with a slash, a message that does so with two.

    Raises:
        UsageError: there is no such command, or it takes no argument; the nearest is named.
    """
    text = typed.strip()
    if not text.startswith("/"):
        return typed.strip("\n")
    if text.startswith("//"):
        return text[1:]
    found = re.match(r"/(\S*)(.*)", text, re.DOTALL)
    assert found is not None
    word, argument = found[1], found[2].strip()
    name = _ALIASES.get(word.lower(), word.lower())
    if name not in COMMANDS:
        raise UsageError(f"there is no command /{shortened(word)}", _nearest(name, text))
    if argument and not COMMANDS[name].form:
        raise UsageError(f"/{name} takes no argument, and {shortened(argument)!r} is one", f"/{name}")
    return Command(name, argument)


def _nearest(name: str, text: str) -> str:
    as_text = f"//{shortened(text[1:], 20)}"
    near = difflib.get_close_matches(name, [*COMMANDS, *_ALIASES], n=1)
    begun = [known for known in COMMANDS if name and known.startswith(name)]
    found = begun[0] if len(begun) == 1 else near[0] if near else ""
    if found:
        return f"/{_ALIASES.get(found, found)} is the nearest; /help lists all, and {as_text} sends it as text"
    return f"/help lists all; a message that begins with a slash has two: {as_text}"


def shortened(text: str, most: int = 40) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def is_switch(name: str) -> bool:
    """Whether a command changes settings, and does nothing else."""
    return name not in _ACTIONS


def change(settings: Switches, command: Command) -> Switches:
    """The settings after a switch that was given an argument, or that needs none.

    Raises:
        UsageError: the argument is not possible; the hint says what is.
    """
    name, argument = command.name, command.argument
    if name in MODES:
        return _with_mode(settings, name)
    if name in _WORDS:
        if argument.lower() not in _WORDS[name]:
            raise _refusal(name, argument, _list([*_WORDS[name]]))
        return replace(settings, **{name: _WORDS[name][argument.lower()]})
    if name in _ROWS:
        row = _ROWS[name]
        value = row.check(argument.replace(",", ""))
        if name == "length":
            return replace(settings, length=value)
        value = random_seed() if name == "seed" and value == -1 else value
        return _with_sampling(settings, {_FIELDS.get(row.name, row.name): value})
    match name:
        case "gamma":
            return _with_gamma(settings, argument)
        case "processor":
            return _with_processor(settings, argument)
        case "accept":
            return _with_rule(settings, argument)
        case _:
            return replace(settings, system="" if argument.lower() == "off" else argument)


def _with_sampling(settings: Switches, changes: Mapping[str, Any]) -> Switches:
    return replace(settings, sampling=replace(settings.sampling, **changes))


def _with_mode(settings: Switches, name: str) -> Switches:
    if name == "drafter" and not settings.has_draft:
        raise UsageError("no draft model is loaded", _NEEDS_DRAFT)
    if name == "drafter" and settings.head:
        raise UsageError(f"an {DRAFTERS[settings.head].label} cannot answer alone", "/target, or /speculative")
    if name == "speculative" and not settings.drafters:
        raise UsageError("speculation needs a draft model or the n-gram lookup", f"/ngram on, or {_NEEDS_DRAFT}")
    return replace(settings, mode=name)


def _with_gamma(settings: Switches, argument: str) -> Switches:
    if argument.lower() == "auto":
        return replace(settings, gamma=None)
    try:
        number = _row("draft_max", "/gamma").check(argument)
    except UsageError:
        allowed = f"1 to {settings.draft_most} drafted tokens a round, or auto; /target drafts none"
        raise _refusal("gamma", argument, allowed) from None
    if number > settings.draft_most:
        loaded = f"this pair was loaded for {settings.draft_most} at most"
        raise _refusal("gamma", argument, f"{loaded}; start the chat with --draft-max {number}")
    return replace(settings, gamma=number)


def _with_processor(settings: Switches, argument: str) -> Switches:
    name, *numbers = argument.lower().split()
    if name not in PROCESSORS:
        raise _unknown("processor", name, PROCESSORS)
    options, form = PROCESSORS[name]
    if len(numbers) > len(options):
        raise _refusal("processor", argument, form)
    values = {"temp": _TEMPERATURE if options else 0.0, "top_k": 0, "top_p": 1.0}
    values |= {option: OPTIONS[option].default for option in options if option != "temp"}
    for option, number in zip(options, numbers, strict=False):
        row = OPTIONS[option]
        values[option] = replace(row, flags=(row.label,), usual=f"/processor {form}").check(number)
    return _with_sampling(
        settings,
        {"temperature": values["temp"], "top_k": values["top_k"], "top_p": values["top_p"], "min_p": 0.0},
    )


def _with_rule(settings: Switches, argument: str) -> Switches:
    rule = ":".join(argument.lower().split())  # /accept top-k 3 too
    try:
        check_rule(rule)
    except UsageError as error:
        near = _nearest_of(rule.partition(":")[0], [each.partition(":")[0] for each in RULE_FORMS])
        raise UsageError(error.message, near + f"one of {', '.join(RULE_FORMS)}; {error.hint}") from None
    return replace(settings, accept=rule)


def _refusal(name: str, argument: str, allowed: str) -> UsageError:
    return UsageError(f"/{name} {shortened(argument)} is not possible", f"/{name} {COMMANDS[name].form}: {allowed}")


def _unknown(what: str, name: str, known: Iterable[str]) -> UsageError:
    return UsageError(
        f"there is no {what} {shortened(name)!r}", _nearest_of(name, known) + f"one of {', '.join(known)}"
    )


def _nearest_of(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"{near[0]} is the nearest; " if near else ""


def _list(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def shown(settings: Switches, name: str) -> str:
    """The present value of a switch, in words."""
    match name:
        case "speculative" | "target" | "drafter":
            return mode(settings)
        case "gamma" if settings.gamma is None:
            return f"auto: as far as it pays, {settings.auto_most} at most"
        case "gamma":
            return f"{settings.gamma}, always"
        case "accept":
            return f"{settings.accept} (lossy)" if is_lossy(settings.accept) else settings.accept
        case "processor" | "temp":
            return processor(settings.sampling)
        case "length":
            return f"{settings.length} tokens at most"
        case _ if name in _ROWS:
            value = getattr(settings.sampling, _ROWS[name].name)
            return f"{value:g}" if isinstance(value, float) else str(value)
        case "system":
            return settings.system or "none"
        case "markdown" if settings.markdown is None:
            return f"auto: {_on_off(settings.renders)}, the chat template is {_on_off(settings.chat)}"
        case _:
            value = getattr(settings, name)
            return value if isinstance(value, str) else _on_off(value)


def _on_off(value: bool) -> str:
    return "on" if value else "off"


def mode(settings: Switches) -> str:
    """Who answers, in words."""
    if settings.mode == "speculative" and not settings.drafters:
        return "target-only: speculation is off"
    return _MODE_NAMES[settings.mode]


def processor(sampling: Sampling) -> str:
    """How a token is chosen, as ``/processor`` takes it; min-p, which it cannot set, behind it."""
    if sampling.temperature == 0:
        return "greedy"
    numbers = {"temp": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    if not sampling.top_k:
        del numbers["top_k"]
    if sampling.top_p == 1:
        del numbers["top_p"]
    name = next(name for name, (options, _) in PROCESSORS.items() if options == tuple(numbers))
    min_p = f", min-p {sampling.min_p:g}" if sampling.min_p else ""
    return f"{name} {' '.join(f'{number:g}' for number in numbers.values())}{min_p}"


def candidates(before: str) -> list[tuple[str, str]]:
    """What may be typed in place of the last word of a line: (the word, what it does).

    Args:
        before: the line up to the cursor.
    """
    if not before.startswith("/") or before.startswith("//") or "\n" in before:
        return []
    word, space, argument = before[1:].partition(" ")
    if not space:
        return [(f"/{name}", about.does) for name, about in COMMANDS.items() if name.startswith(word.lower())]
    name = _ALIASES.get(word.lower(), word.lower())
    about = COMMANDS.get(name)
    if about is None or " " in argument.strip() or (argument.strip() and argument.endswith(" ")):
        return []
    begun = argument.strip().lower()
    if name == "help":
        return [(each, one.does) for each, one in COMMANDS.items() if each.startswith(begun.removeprefix("/"))]
    choices = about.choices or dict.fromkeys(_WORDS.get(name, ()), "")
    return [(choice, does) for choice, does in choices.items() if choice.startswith(begun)]


def takes_path(before: str) -> bool:
    """Whether the argument of the line before the cursor is a file."""
    word, space, _ = before[1:].partition(" ")
    return before.startswith("/") and bool(space) and word in COMMANDS and COMMANDS[word].path
