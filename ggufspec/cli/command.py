"""Command class that accepts llama.cpp's option names and GGUF files in place of a PAIR, and groups its help."""

from __future__ import annotations

import inspect
import re
import shlex
import textwrap
from collections import deque
from collections.abc import Mapping
from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperOption

from ggufspec.errors import UsageError, alike, did_you_mean
from ggufspec.settings import llamacpp
from ggufspec.settings.table import FLAGS, OPTIONS

OWN = "Options"  # heading for options of a single command
_PLACEMENT = "Placement and context"
HEADINGS = {  # headings in the help, by option group
    "profile": "Models",
    "files": "Models",
    "hub": "Models",
    "vision": "Models",
    "prompt": "Prompt",
    "prompts": "Prompt",
    "raw": "Prompt",
    "system": "Prompt",
    "length": "Prompt",
    "answer": "Prompt",
    "reasoning": "Prompt",
    "target-only": "Drafting",
    "drafting": "Drafting",
    "expected": "Drafting",
    "placement": _PLACEMENT,
    "devices": _PLACEMENT,
    "context": _PLACEMENT,
    "parallel": _PLACEMENT,
    "allowed": _PLACEMENT,
    "simulated": "Hardware to plan for",
    "calibration": OWN,
    "sampling": "Sampling",
    "trials": "Results",
    "results": "Results",
    "fresh": "Results",
    "exports": "Results",
    "flags": "Output",
    "yes": "Output",
}
_ORDER = dict.fromkeys(("Arguments", "Models", "Prompt", OWN, *HEADINGS.values()))
RARE = " (rare)"  # heading suffix of options that only --help-all shows
ALL = "ggufspec.help_all"  # key in a context's ``meta``: True if the help shows everything
_NAME_WIDTH = 27  # columns for names in the help; longer names get a line of their own
_FLAGS = {flag for row in (*OPTIONS.values(), *FLAGS.values()) for flag in row.flags}
_ATTACHED = re.compile(r"-?\d+(\.\d+)?")  # value that may follow a short option without a space: -c4096


class GroupedCommand(TyperCommand):
    """Command with grouped help; :mod:`ggufspec.cli.parameters` makes its parameters."""

    # ---- parsing

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if ctx.resilient_parsing else self._plain(ctx, args))

    def _plain(self, ctx: Any, args: list[str]) -> list[str]:
        """Return ``args`` with ggufspec's option names, each value after its option, and GGUF files as ``-m``, ``-md``.

        Raises:
            UsageError: an option is unknown or lacks its value, or there are too many files.
        """
        options = self._options(ctx)
        words, plain, others, given = deque(args), list[str](), list[str](), set[str | None]()
        while words:
            word = words.popleft()
            if word == "--":
                others += words
                break
            if word == "-" or not word.startswith("-"):
                others.append(word)
                continue
            names, value = _read(word, options, ctx)
            ctx.meta[ALL] = ctx.meta.get(ALL, False) or "--help-all" in names
            plain += names
            option = options[names[-1]]
            given.add(option.name)
            if option.is_flag:
                if value is not None:
                    raise UsageError(f"{names[-1]} takes no value", names[-1])
                continue
            if value is None:
                is_option = words and option.metavar != "TEXT" and (words[0] in options or words[0] in llamacpp.ALIASES)
                if not words or is_option:
                    row = OPTIONS.get(option.name or "")
                    usual = row.usual if row and row.usual else f"{names[-1]} {option.metavar or 'VALUE'}"
                    raise UsageError(f"{names[-1]} needs a value", usual)
                value = words.popleft()
            plain.append(value)
        if "help" in given:
            return plain
        files, rest = self._files(ctx, others, given)
        return [*plain, *files, *(["--"] if any(word.startswith("-") for word in rest) else []), *rest]

    def _options(self, ctx: Any) -> dict[str, TyperOption]:
        options = (one for one in self.get_params(ctx) if isinstance(one, TyperOption))
        return {flag: one for one in options for flag in (*one.opts, *one.secondary_opts)}

    def _files(self, ctx: Any, others: list[str], given: set[str | None]) -> tuple[list[str], list[str]]:
        """Split ``others`` into GGUF files (as options) and other words; a command without a PAIR takes no files.

        Raises:
            UsageError: there are more than two files, or an unexpected word.
        """
        names = {one.name for one in self.params}
        if not names >= {"pair", "model"}:
            return [], others
        files = [word for word in others if word.lower().endswith(".gguf")]
        rest = [word for word in others if word not in files]
        if len(files) > 2:
            usage = f"{ctx.command_path} TARGET.gguf DRAFT.gguf"
            raise UsageError(f"{len(files)} models are given, but a pair has two", usage)
        stray = rest[0] if rest and (files or " " in rest[0]) else rest[1] if len(rest) > 1 else None
        if stray is not None:
            pair = files or [word for word in rest[:1] if word != stray]
            words = " ".join((ctx.command_path, *map(shlex.quote, pair), "-p", shlex.quote(stray)))
            raise UsageError(f"unexpected argument {stray!r}", words if "prompt" in names else _help(ctx.command_path))
        for file, flag, name in zip(files, ("-m", "-md"), ("model", "model_draft"), strict=False):
            if name in given:
                hint = f"give one of them; {ctx.command_path} -md {shlex.quote(file)}"
                raise UsageError(f"both {file} and {flag} are given", hint)
        return [word for pair in zip(("-m", "-md"), files, strict=False) for word in pair], rest

    # ---- help

    def get_help_option_names(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return ["-h", "--help", "--help-all"]

    @property
    def _has_more(self) -> bool:
        """True if ``--help-all`` shows more than ``--help``."""
        return any((_panel(one) or "").endswith(RARE) for one in self.params) or len(self._variables) > 1

    @property
    def _variables(self) -> dict[str, str]:
        return {str(one.envvar): one.opts[0] for one in self.params if one.envvar}

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return ["[OPTIONS]", *(_argument(one) for one in self.params if isinstance(one, TyperArgument))]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the first paragraph of the help text, or all paragraphs if every option is shown."""
        text = inspect.cleandoc(self.help or "")
        if self._has_more and not ctx.meta.get(ALL):
            text = text.partition("\n\n")[0]
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections = self.sections(ctx)
        names = [name for rows in sections.values() for name, _ in rows]
        width = max(len(name) for name in names if len(name) <= _NAME_WIDTH)
        room = max(formatter.width - width - 4, 20)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:<{width}}", _wrapped(about, room)) for name, about in rows], col_max=width)

    def sections(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """Return (name, description) of the usual options by heading, or of all options if ``ctx`` requests them."""
        found: dict[str, list[tuple[str, str]]] = {heading: [] for heading in _ORDER}
        everything = ctx.meta.get(ALL) or not self._has_more
        for one in self.get_params(ctx):
            if one.name == "help":
                more = ("-h, --help, --help-all", "Show this help, or all options.")
                found["Output"].append(more if self._has_more else ("-h, --help", "Show this help."))
                continue
            if getattr(one, "hidden", False):
                continue
            panel = _panel(one) or (OWN if isinstance(one, TyperOption) else "Arguments")
            if everything or not panel.endswith(RARE):
                record = one.get_help_record(ctx) or ("", "")
                name = _argument(one).strip("[]") if isinstance(one, TyperArgument) else record[0]
                about = _about(one)
                found.setdefault(panel.removesuffix(RARE), []).append((name, about if everything else _short(about)))
        return {heading: rows for heading, rows in found.items() if rows}

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        super().format_epilog(ctx, formatter)
        if note := variables(self._variables, ctx.meta.get(ALL)):
            with formatter.indentation():
                formatter.write_text(note)


def variables(flags: Mapping[str, str], everything: bool | None) -> str:
    """Return the help's note on environment variables; ``flags`` maps their names to flags. "" without variables."""
    if not flags:
        return ""
    if everything:
        every = ", ".join(f"{name} ({flag})" for name, flag in flags.items())
        return f"Variables set options too: {every}. A flag overrides a variable, which overrides the profile."
    name = "GGUFSPEC_NGL" if "GGUFSPEC_NGL" in flags else next(iter(flags))
    rest = "; --help-all lists all." if len(flags) > 1 else "."
    return f"The variable {name} sets {flags[name]}{rest}"


def _read(word: str, options: Mapping[str, TyperOption], context: Any) -> tuple[list[str], str | None]:
    """Return ggufspec's name for an option (or names, if a word joins several flags), and the value in the word."""
    name, equals, value = word.partition("=")
    if name.startswith("--"):
        name = name.replace("_", "-")  # as llama.cpp does
    if name not in options:
        name = llamacpp.ALIASES.get(name, name)
    if name in options:
        return [name], value if equals else None
    short, attached = word[:2], word[2:]
    if short in options and not options[short].is_flag and _ATTACHED.fullmatch(attached):
        return [short], attached
    flags = [f"-{letter}" for letter in word[1:]]
    if all(flag in options and options[flag].is_flag for flag in flags):
        return flags, None
    hint, command = llamacpp.ADVICE.get(name, ""), context.command_path
    if name in _FLAGS and not hint:
        raise UsageError(f"{command} does not take {name}", _help(command))
    same_dashes = [flag for flag in options if flag.startswith("--") == name.startswith("--")]
    hint = hint or did_you_mean(name, same_dashes, 2)
    if not hint and short in options and not name.startswith("--"):
        hint = f"did you mean {short} {attached}?"
    elif not hint:
        others = _others(context)
        if name in others:
            raise UsageError(
                f"{command} does not take {name}", f"{name} is an option of {others[name]}; {_help(command)}"
            )
        hint = "".join(f"{near} is an option of {others[near]}; " for near in alike(name, others)) + _help(command)
    raise UsageError(f"no such option: {name}", hint)


def _others(context: Any) -> dict[str, str]:
    """Return every long option with the commands that take it. Imports all commands, so call it only for errors."""
    found: dict[str, list[str]] = {}
    for name, command in getattr(context.find_root().command, "commands", {}).items():
        for one in getattr(command, "whole", command).params:
            for flag in (flag for flag in one.opts if flag.startswith("--") and not getattr(one, "hidden", False)):
                found.setdefault(flag, []).append(name)
    return {flag: " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) for flag, names in found.items()}


def _help(command: str) -> str:
    return f"{command} --help-all"


def _panel(one: Any) -> str | None:
    panel: str | None = getattr(one, "rich_help_panel", None)
    return panel


def _argument(one: TyperArgument) -> str:
    """Return the argument as in a usage line: ``PAIR``, ``[PAIR]``, ``[NAME...]``."""
    name = (one.metavar or str(one.name).upper()).strip("[].") + "..." * (one.nargs != 1)
    return name if one.required else f"[{name}]"


def _about(one: Any) -> str:
    text, default = one.help or "", one.default
    if text.endswith("]"):
        return text
    if one.required and isinstance(one, TyperOption):
        return f"{text}  [required]"
    if not one.show_default or default in (None, False, "", ()):
        return text
    shown = "on" if default is True else f"{default:g}" if isinstance(default, float) else default
    return f"{text}  [{getattr(shown, 'value', shown)}]"


def _wrapped(text: str, room: int) -> str:
    """Wrap a text without breaking option names, and mark it so that no formatter wraps it again."""
    return "\b\n" + "\n".join(textwrap.wrap(text, room, break_on_hyphens=False))


def _short(about: str) -> str:
    text, _, default = about.partition("  [")
    sentence = re.split(r"(?<=[.!?…])\s+(?=[\w`@-])", text, maxsplit=1)[0]
    return f"{sentence}  [{default.removesuffix(']').partition(';')[0]}]" if default else sentence
