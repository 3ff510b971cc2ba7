"""What is typed in a chat: a message, or a command and its argument; and what switches change. Pure."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import NoReturn

from ggufspec.decoding.options import MAX_TOP_K, RULES, check_rule, is_lossy
from ggufspec.decoding.sampling import Sampling, random_seed
from ggufspec.errors import UsageError
from ggufspec.llamacpp.options import MAX_WIDTH
from ggufspec.reports.tables import penalties

MODES = {"speculative": "", "target": "target", "drafter": "draft"}  # by command: which model answers alone
_PLAIN_MODE = {"speculative": "speculative", "target": "target alone", "drafter": "draft model alone"}
_ON_OFF = ("on", "off")
_NGRAM = ("on", "off", "only")
_MARKDOWN = {"on": True, "off": False, "auto": None}
_MOST_TOKENS = 2**31 - 1
_TEMPERATURE, _TOP_K, _TOP_P = 0.8, 40, 0.95  # of a processor that is named without numbers; llama.cpp's
_WITH_DRAFT = "start the chat without --no-draft, or with -md DRAFT"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be switched while a pair is loaded.

    Args:
        has_draft: whether a draft model is loaded.
        draft_most: drafted tokens a round that the pair was loaded for, at most.
        auto_most: the same where as many are drafted as pays.
        mode: of ``MODES``.
        ngram: whether n-grams of the text draft too (on), not at all (off), or alone (only).
        gamma: drafted tokens every round; None is as far as it pays.
        accept: the acceptance rule.
        sampling: how a token is chosen.
        length: tokens of an answer at most.
        chat: whether the model's chat template is used.
        cache: whether the context keeps what it holds from turn to turn.
        debug: whether every round is shown in the stream.
        tint: whether the stream is coloured by who wrote each token.
        markdown: whether answers are rendered as Markdown; None: with the chat template.
        system: the system prompt, empty for none.
    """

    has_draft: bool
    draft_most: int = 15
    auto_most: int = 15
    mode: str = "speculative"
    ngram: str = "on"
    gamma: int | None = None
    accept: str = "exact"
    sampling: Sampling = Sampling()  # noqa: RUF009 - frozen
    length: int = 512
    chat: bool = True
    cache: bool = True
    debug: bool = False
    tint: bool = False
    markdown: bool | None = None
    system: str = ""

    @property
    def alone(self) -> str:
        """The model that answers alone: ``target``, ``draft``, or empty where both work together."""
        return MODES[self.mode]

    @property
    def drafter(self) -> str:
        """Who guesses, of :data:`ggufspec.decoding.options.DRAFTERS`."""
        if self.ngram == "only":
            return "lookup"
        if not self.has_draft:
            return "lookup" if self.ngram == "on" else "none"
        return "both" if self.ngram == "on" else "draft"

    @property
    def renders(self) -> bool:
        """Whether answers are rendered as Markdown: a text that goes on without the template is none, most likely."""
        return self.chat if self.markdown is None else self.markdown

    @property
    def lossy(self) -> bool:
        """Whether an answer may be another than the target's own because of the acceptance rule."""
        return self.mode == "speculative" and self.drafter != "none" and is_lossy(self.accept)


@dataclass(frozen=True, slots=True)
class Message:
    """Something for the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """Something for the console.

    Args:
        name: of ``COMMANDS``.
        argument: the rest of what was typed, without spaces around it.
    """

    name: str
    argument: str


@dataclass(frozen=True, slots=True)
class About:
    """What help and completion know of a command.

    Args:
        form: how its argument is written; empty if it has none.
        does: in a few words.
        choices: words that its argument begins with.
        more: what ``/help COMMAND`` adds, in lines.
        path: whether the argument is a file.
    """

    form: str
    does: str
    choices: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    path: bool = False


PENALTIES = {  # what /penalties calls them, the field, and what each does
    "repeat": ("repeat_penalty", "divide the logits of tokens that were there; 1 is off"),
    "last-n": ("repeat_last_n", "among the last N tokens, the prompt's too; 0 is off, -1 the context"),
    "presence": ("presence_penalty", "take so much from logits of tokens that were there; 0 is off"),
    "frequency": ("frequency_penalty", "take so much once for each time they were; 0 is off"),
}
PROCESSORS = {
    "greedy": "the likeliest token, always",
    "multinomial": "multinomial [T]: all tokens, at temperature T",
    "topk": "topk [T] [K]: the K likeliest",
    "nucleus": "nucleus [T] [P]: the likeliest up to probability P",
    "topknucleus": "topknucleus [T] [K] [P]: the K likeliest, of these up to P",
}

COMMANDS: dict[str, About] = {
    "speculative": About("", "draft and target together"),
    "target": About("", "the target alone"),
    "drafter": About("", "the draft model alone"),
    "compare": About(
        "[TEXT]",
        "ask the target, the draft model and both, and compare",
        more=("Without TEXT the last message is asked again; the conversation keeps the answer of both together.",),
    ),
    "gamma": About(
        "N|auto",
        "drafted tokens a round: N, or as far as it pays",
        ("auto",),
        ("N is at most what the pair was loaded for: --draft-max.",),
    ),
    "processor": About(
        "NAME [T K P]",
        "how a token is chosen",
        tuple(PROCESSORS),
        (
            *PROCESSORS.values(),
            f"T is {_TEMPERATURE}, K {_TOP_K} and P {_TOP_P} where not given: /processor topknucleus 0.8 40 0.95",
            "K and P look at the probabilities before the temperature, as llama.cpp's do.",
        ),
    ),
    "temp": About("T", "the temperature; 0 is greedy"),
    "penalties": About(
        "NAME X …|off",
        "make what was said less likely",
        ("off", *PENALTIES),
        (
            *(f"{name}: {does}" for name, (_, does) in PENALTIES.items()),
            "What is not named stays as it is: /penalties repeat 1.1 last-n 256",
        ),
    ),
    "ngram": About(
        "on|off|only",
        "n-grams of the text draft too, not at all, or alone",
        _NGRAM,
    ),
    "length": About("N", "tokens of an answer at most"),
    "seed": About("N", "of all randomness: the same seed, the same answer; -1 draws one"),
    "accept": About(
        "RULE",
        "which drafted tokens stay: " + ", ".join(rule.partition(":")[0] for rule in RULES),
        tuple(rule.partition(":")[0] + (":" if ":" in rule else "") for rule in RULES),
        (
            "exact and residual lose nothing: the text is the target's own.",
            "top-k:N keeps what is among the target's N likeliest, typical:EPS what is typical: both are lossy.",
        ),
    ),
    "chat": About("on|off", "use the chat template; off: the text goes on", _ON_OFF),
    "cache": About("on|off", "keep the context from turn to turn", _ON_OFF),
    "debug": About("on|off", "show every round in the stream", _ON_OFF),
    "tint": About(
        "on|off",
        "colour the stream by who wrote each token",
        _ON_OFF,
        ("The text is shown as it comes then, without Markdown.",),
    ),
    "markdown": About("on|off|auto", "render Markdown; auto: with the chat template", tuple(_MARKDOWN)),
    "system": About("TEXT|off", "the system prompt, from the next answer on"),
    "save": About("FILE", "write the conversation to a file", path=True),
    "load": About("FILE", "go on with a conversation from a file", path=True),
    "undo": About("", "take the last message and its answer back"),
    "retry": About("", "answer the last message again"),
    "clear": About("", "forget the conversation"),
    "settings": About("", "show all of this"),
    "help": About("[COMMAND]", "what there is to type"),
    "quit": About("", "leave; so does Ctrl-D"),
}
_SAME = {"exit": "quit", "q": "quit", "?": "help"}
SHOWN = (  # what /settings lists, in this order
    "gamma",
    "ngram",
    "accept",
    "processor",
    "penalties",
    "seed",
    "length",
    "chat",
    "cache",
    "debug",
    "tint",
    "markdown",
    "system",
)


def read(typed: str) -> Message | Command:
    """What was typed: a command begins with a slash, a message that does so with two.

    Raises:
        UsageError: there is no such command, or it takes no argument; the nearest is named.
    """
    text = typed.strip()
    if not text.startswith("/"):
        return Message(typed.strip("\n"))
    if text.startswith("//"):
        return Message(text[1:])
    found = re.match(r"/(\S*)(.*)", text, re.DOTALL)
    assert found is not None
    word, argument = found[1], found[2].strip()
    name = _SAME.get(word.lower(), word.lower())
    if name not in COMMANDS:
        raise UsageError(f"there is no command /{shortened(word)}", _nearest(name, text))
    if argument and not COMMANDS[name].form:
        raise UsageError(f"/{name} takes no argument, and {shortened(argument)!r} is one", f"/{name}")
    return Command(name, argument)


def _nearest(name: str, text: str) -> str:
    as_text = f"//{shortened(text[1:], 20)}"
    near = difflib.get_close_matches(name, [*COMMANDS, *_SAME], n=1)
    begun = [known for known in COMMANDS if name and known.startswith(name)]
    found = begun[0] if len(begun) == 1 else near[0] if near else ""
    if found:
        return f"/{_SAME.get(found, found)} is the nearest; /help lists all, and {as_text} sends it as text"
    return f"/help lists all; a message that begins with a slash has two: {as_text}"


def shortened(text: str, most: int = 40) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def change(settings: Settings, command: Command) -> Settings:
    """The settings after a switch that was given an argument, or that needs none.

    Raises:
        UsageError: the argument is not possible; the hint says what is.
    """
    return _CHANGES[command.name](settings, command.argument)


def is_switch(name: str) -> bool:
    """Whether a command changes settings, and does nothing else."""
    return name in _CHANGES


def shown(settings: Settings, name: str) -> str:
    """The present value of a switch, in words."""
    match name:
        case "speculative" | "target" | "drafter":
            return mode(settings)
        case "gamma":
            if settings.gamma is None:
                return f"auto: as far as it pays, {settings.auto_most} at most"
            return f"{settings.gamma}, always"
        case "ngram":
            return settings.ngram
        case "accept":
            return f"{settings.accept} (lossy)" if is_lossy(settings.accept) else settings.accept
        case "processor" | "temp":
            return processor(settings.sampling)
        case "penalties":
            return penalties(asdict(settings.sampling)) or "off"
        case "seed":
            return str(settings.sampling.seed)
        case "length":
            return f"{settings.length} tokens at most"
        case "system":
            return settings.system or "none"
        case "markdown":
            if settings.markdown is None:
                return f"auto: {_word(settings.renders)}, the chat template is {_word(settings.chat)}"
            return _word(settings.markdown)
        case _:
            return _word(getattr(settings, name))


def mode(settings: Settings) -> str:
    """Who answers, in words."""
    if settings.mode == "speculative" and settings.drafter == "none":
        return "target alone: nobody drafts"
    return _PLAIN_MODE[settings.mode]


def processor(sampling: Sampling) -> str:
    """How a token is chosen, as ``/processor`` takes it; min-p, which it has no place for, behind it."""
    if sampling.temperature == 0:
        return "greedy"
    parts = [f"{sampling.temperature:g}"]
    k, p = sampling.top_k > 0, sampling.top_p < 1
    parts += [str(sampling.top_k)] * k + [f"{sampling.top_p:g}"] * p
    name = {(False, False): "multinomial", (True, False): "topk", (False, True): "nucleus", (True, True): "topknucleus"}
    behind = f", min-p {sampling.min_p:g}" if sampling.min_p else ""
    return f"{name[k, p]} {' '.join(parts)}{behind}"


def _refuse(name: str, argument: str, allowed: str) -> NoReturn:
    raise UsageError(f"/{name} {shortened(argument)} is not possible", f"/{name} {COMMANDS[name].form}: {allowed}")


def _mode(name: str) -> Callable[[Settings, str], Settings]:
    def to(settings: Settings, _: str) -> Settings:
        if name == "drafter" and not settings.has_draft:
            raise UsageError("there is no draft model to answer alone", _WITH_DRAFT)
        if name == "speculative" and settings.drafter == "none":
            raise UsageError("there is nobody to draft", f"/ngram on, or {_WITH_DRAFT}")
        return replace(settings, mode=name)

    return to


def _gamma(settings: Settings, argument: str) -> Settings:
    if argument.lower() == "auto":
        return replace(settings, gamma=None)
    number = _whole(argument)
    if number is None or not 1 <= number < MAX_WIDTH:
        _refuse("gamma", argument, f"1 to {settings.draft_most} drafted tokens a round, or auto; /target drafts none")
    if number > settings.draft_most:
        _refuse(
            "gamma",
            argument,
            f"this pair was loaded for {settings.draft_most} at most; start the chat with --draft-max {number}",
        )
    return replace(settings, gamma=number)


def _processor(settings: Settings, argument: str) -> Settings:
    name, *numbers = argument.split()
    if name.lower() not in PROCESSORS:
        near = difflib.get_close_matches(name.lower(), PROCESSORS, n=1)
        raise UsageError(
            f"there is no processor {shortened(name)!r}",
            (f"{near[0]} is the nearest; " if near else "") + "one of " + ", ".join(PROCESSORS),
        )
    name = name.lower()
    wanted = {"greedy": "", "multinomial": "T", "topk": "TK", "nucleus": "TP", "topknucleus": "TKP"}[name]
    if len(numbers) > len(wanted):
        _refuse("processor", argument, f"{name} takes {_counted(len(wanted))}: {PROCESSORS[name]}")
    values: dict[str, float] = {"T": _TEMPERATURE, "K": _TOP_K, "P": _TOP_P}
    for letter, text in zip(wanted, numbers, strict=False):
        number = _whole(text) if letter == "K" else _real(text)
        possible = {"T": number is not None and number > 0, "K": number is not None and number >= 1}
        possible["P"] = number is not None and 0 < number <= 1
        if number is None or not possible[letter]:
            said = {
                "T": "T is a temperature above 0; /processor greedy is 0",
                "K": "K is a whole number from 1 up",
                "P": "P is a probability, above 0 and at most 1",
            }
            _refuse("processor", argument, said[letter])
        values[letter] = number
    sampling = replace(
        settings.sampling,
        temperature=values["T"] if wanted else 0.0,
        top_k=int(values["K"]) if "K" in wanted else 0,
        top_p=values["P"] if "P" in wanted else 1.0,
        min_p=0.0,
    )
    return replace(settings, sampling=sampling)


def _temp(settings: Settings, argument: str) -> Settings:
    number = _real(argument)
    if number is None or number < 0:
        _refuse("temp", argument, "a number from 0 up; 0 is greedy")
    return replace(settings, sampling=replace(settings.sampling, temperature=number))


def _penalties(settings: Settings, argument: str) -> Settings:
    words = argument.lower().split()
    if words == ["off"]:
        off = replace(settings.sampling, repeat_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
        return replace(settings, sampling=off)
    changes: dict[str, float] = {}
    for name, text in zip_longest(words[::2], words[1::2], fillvalue=""):
        if name not in PENALTIES:
            near = difflib.get_close_matches(name, PENALTIES, n=1)
            raise UsageError(
                f"there is no penalty {shortened(name)!r}",
                (f"{near[0]} is the nearest; " if near else "") + f"one of {', '.join(PENALTIES)}, or /penalties off",
            )
        number = _signed(text) if name == "last-n" else _real(text)
        if number is None:
            _refuse("penalties", argument, f"{name} is followed by a number: {PENALTIES[name][1]}")
        changes[PENALTIES[name][0]] = number
    try:
        return replace(settings, sampling=replace(settings.sampling, **changes))  # type: ignore[arg-type]
    except UsageError as error:
        raise UsageError(
            error.message, "/penalties repeat 1.1 last-n 64 presence 0 frequency 0, or /penalties off"
        ) from None


def _ngram(settings: Settings, argument: str) -> Settings:
    if argument.lower() not in _NGRAM:
        _refuse("ngram", argument, "on, off or only")
    return replace(settings, ngram=argument.lower())


def _length(settings: Settings, argument: str) -> Settings:
    number = _whole(argument)
    if number is None or not 1 <= number <= _MOST_TOKENS:
        _refuse("length", argument, "a whole number of tokens, from 1 up")
    return replace(settings, length=number)


def _seed(settings: Settings, argument: str) -> Settings:
    number = random_seed() if argument == "-1" else _whole(argument)
    if number is None or not 0 <= number < 2**64:
        _refuse("seed", argument, "a whole number from 0 up, below 2**64; -1 draws one")
    return replace(settings, sampling=replace(settings.sampling, seed=number))


def _accept(settings: Settings, argument: str) -> Settings:
    rule = ":".join(argument.lower().split())  # /accept top-k 3 too
    try:
        check_rule(rule)
    except UsageError as error:
        near = difflib.get_close_matches(rule.partition(":")[0], [each.partition(":")[0] for each in RULES], n=1)
        allowed = f"one of {', '.join(RULES)}; N is 1 to {MAX_TOP_K}, EPS above 0 and below 1"
        raise UsageError(error.message, (f"{near[0]} is the nearest; " if near else "") + allowed) from None
    return replace(settings, accept=rule)


def _flag(name: str) -> Callable[[Settings, str], Settings]:
    def to(settings: Settings, argument: str) -> Settings:
        if argument.lower() not in _ON_OFF:
            _refuse(name, argument, "on or off")
        return replace(settings, **{name: argument.lower() == "on"})  # type: ignore[arg-type]

    return to


def _markdown(settings: Settings, argument: str) -> Settings:
    if argument.lower() not in _MARKDOWN:
        _refuse("markdown", argument, "on, off or auto")
    return replace(settings, markdown=_MARKDOWN[argument.lower()])


def _system(settings: Settings, argument: str) -> Settings:
    return replace(settings, system="" if argument.lower() == "off" else argument)


_CHANGES: dict[str, Callable[[Settings, str], Settings]] = {
    **{name: _mode(name) for name in MODES},
    "gamma": _gamma,
    "processor": _processor,
    "temp": _temp,
    "penalties": _penalties,
    "ngram": _ngram,
    "length": _length,
    "seed": _seed,
    "accept": _accept,
    **{name: _flag(name) for name in ("chat", "cache", "debug", "tint")},
    "markdown": _markdown,
    "system": _system,
}


def _word(value: bool) -> str:
    return "on" if value else "off"


def _whole(text: str) -> int | None:
    digits = text.replace(",", "").replace("_", "")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 20 else None


def _signed(text: str) -> int | None:
    number = _whole(text.removeprefix("-"))
    return -number if number and text.startswith("-") else number


def _real(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _counted(number: int) -> str:
    return {0: "no number", 1: "one number", 2: "two numbers"}.get(number, f"{number} numbers")


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
    about = COMMANDS.get(_SAME.get(word.lower(), word.lower()))
    if about is None or " " in argument.strip() or (argument.strip() and argument.endswith(" ")):
        return []
    begun = argument.strip().lower()
    if about is COMMANDS["help"]:
        return [(name, about.does) for name, about in COMMANDS.items() if name.startswith(begun.removeprefix("/"))]
    known = PROCESSORS if about is COMMANDS["processor"] else dict.fromkeys(about.choices, "")
    return [(choice, does) for choice, does in known.items() if choice.startswith(begun)]


def takes_path(before: str) -> bool:
    """Whether the argument of the line before the cursor is a file."""
    word, space, _ = before[1:].partition(" ")
    return before.startswith("/") and bool(space) and word in COMMANDS and COMMANDS[word].path
