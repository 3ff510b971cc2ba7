"""Commands made from functions: rows of the option table become parameters, whose values become settings.

A command has a parameter ``given: Annotated[Settings, takes("placement", "sampling", ...)]`` with groups or names of
options. :func:`command` shows Typer an option for each, and passes their values as one
:class:`~ggufspec.settings.table.Settings`. If it also has a ``SweptOption | None``, one option may take a list.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer

from ggufspec.cli import ui
from ggufspec.cli.command import HEADINGS, OWN, RARE, GroupedCommand
from ggufspec.cli.group import CommandGroup
from ggufspec.errors import StopError, UsageError, did_you_mean
from ggufspec.files import cache
from ggufspec.models.profile import known_profiles, own_profiles
from ggufspec.settings.option import Option
from ggufspec.settings.table import FLAGS, OPTIONS, OutputFlags, Settings

_Command = TypeVar("_Command", bound=Callable[..., int])


@dataclass(frozen=True, slots=True)
class TakenOptions:
    """Groups or names of the options that a command takes, with changes to some of them."""

    wanted: tuple[str, ...]
    changes: Mapping[str, Mapping[str, Any]]
    rare: tuple[str, ...] = ()  # groups and names that only --help-all shows

    def rows(self, table: Mapping[str, Option] = OPTIONS) -> list[Option]:
        chosen = (row for row in table.values() if row.group in self.wanted or row.name in self.wanted)
        changed = [replace(row, **self.changes.get(row.name, {})) for row in chosen]
        return [replace(row, rare=True) if {row.group, row.name} & {*self.rare} else row for row in changed]


def takes(*wanted: str, rare: tuple[str, ...] = (), **changes: Mapping[str, Any]) -> TakenOptions:
    """Return a command's options: ``takes("sampling", "ctx_size", temp={"default": 0.8}, rare=("context",))``."""
    return TakenOptions(wanted, changes, rare)


FILES_OR_URLS = {
    "model": {"metavar": "FILE", "help": "Target model, a GGUF file or its URL."},
    "model_draft": {"metavar": "FILE", "help": "Draft model, a GGUF file or its URL."},
}
# Overrides for commands that measure answers of a fixed length.
FIXED_LENGTH = {"reader": None, "usual": "-n 128", "help": "Tokens per answer."}


@dataclass(frozen=True, slots=True)
class SweptOption:
    """Option that was given a list, with the distinct values (as typed, as parsed)."""

    option: Option
    values: tuple[tuple[str, Any], ...]

    def put(self, settings: Settings, value: Any) -> Settings:
        return replace(settings, **{self.option.name: value})


def parse_seconds(text: str) -> float:
    """Parse the value of ``--budget``, e.g. 90s, 10m or 1.5h."""
    found = re.fullmatch(r"\s*(\d{1,6}(?:\.\d+)?)([smh]?)\s*", text)
    if found is None or not float(found[1]):
        raise typer.BadParameter(f"{text!r} is not a duration such as 90s, 10m or 2h")
    if not found[2]:
        hint = f"--budget {found[1]}m for minutes, --budget {found[1]}s for seconds"
        raise UsageError(f"--budget {found[1]} has no unit", hint)
    return float(found[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[found[2]]


def parameter(row: Option) -> inspect.Parameter:
    """Return an option as Typer's parameter; values stay text, which :func:`taken_settings` parses and checks."""
    kind: Any = bool if row.kind is bool else list[str] if row.repeated else Path if row.kind is Path else str
    about: dict[str, Any] = {"metavar": row.form or None, "help": row.described, "show_default": False}
    about["rich_help_panel"] = HEADINGS.get(row.group, OWN) + RARE * row.rare
    if row.choices or row.words:
        about["autocompletion"] = _completion(row.choices or row.words)
    if not row.flags:
        about["autocompletion"] = profile_names
    if row.variable:
        about |= {"envvar": f"GGUFSPEC_{row.variable}", "show_envvar": False}
    made = typer.Option(*row.flags, **about) if row.flags else typer.Argument(**about)
    default, annotation = (False, kind) if kind is bool else (None, kind | None)
    return inspect.Parameter(
        row.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, made]
    )


def command_option(flags: str, about: str, *, rare: bool = False, **more: Any) -> Any:
    """Return an option of one command: ``command_option("-o FILE", "Write to this file.")``; ``more`` is for Typer."""
    if rare:
        more["rich_help_panel"] = OWN + RARE
    words = flags.split()
    names = [word for word in words if word.startswith("-")]
    return typer.Option(*names, metavar=" ".join(words[len(names) :]) or None, help=about, **more)


def _completion(known: Iterable[str]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [name for name in known if name.startswith(incomplete)]

    return complete


def one_of(known: Sequence[str]) -> dict[str, Any]:
    """Return Typer's arguments to parse and complete an option whose value is one of the ``known`` words."""

    def read(text: str) -> str:
        if text not in known:
            every = ", ".join(known)
            raise UsageError(f"{text!r} is not one of {every}", did_you_mean(text, known) or f"one of {every}")
        return text

    return {"parser": read, "autocompletion": _completion(known)}


def profile_names(incomplete: str) -> list[str]:
    """Complete PAIR with names of profiles; if none matches, the shell offers files."""
    return _completion(known_profiles())(incomplete)


def own_profile_names(incomplete: str) -> list[str]:
    return _completion(own_profiles())(incomplete)


def taken_settings(
    rows: Iterable[Option], parsed: dict[str, Any], *, sweeps: bool = False, context: typer.Context | None = None
) -> tuple[Settings, SweptOption | None]:
    """Remove the options' values from ``parsed``; return them (the first of a list), and the option with a list."""
    values: dict[str, Any] = {}
    swept: list[SweptOption] = []
    for row in rows:
        value = parsed.pop(row.name)
        if value in (None, False, [], ()):
            # A command's own default counts as given.
            value = None if row.default == OPTIONS.get(row.name, row).default else row.default
        try:
            if sweeps and row.sweep and isinstance(value, str):
                found = row.parse_list(value)
                value = found[0][1]
                if len(found) > 1:
                    swept.append(SweptOption(row, tuple(found)))
            values[row.name] = row.check(value)
        except UsageError as error:
            raise _from_environment(row, error, context) from None
    if len(swept) > 1:
        flags = " and ".join(one.option.flag for one in swept)
        raise UsageError(f"{flags} have lists", "sweep one option at a time, with one value for the others")
    return Settings(**values), swept[0] if swept else None


def _from_environment(row: Option, error: UsageError, context: typer.Context | None) -> UsageError:
    source = context.get_parameter_source(row.name) if context else None
    if source is None or source.name != "ENVIRONMENT":
        return error
    name = f"GGUFSPEC_{row.variable}"
    return UsageError(error.message, f"the value comes from the environment: {name}={os.environ.get(name)}")


@functools.cache
def commands_of(module: str) -> typer.Typer:
    """Return the Typer app of a module's commands, which is complete once the module is imported."""
    return typer.Typer(name=module.rpartition(".")[2], cls=CommandGroup, add_completion=False, rich_markup_mode=None)


def command(*examples: str, name: str | None = None, confirms: bool = False) -> Callable[[_Command], _Command]:
    """Register a function as a command of its module; its help ends with ``examples``, and ``confirms`` adds ``-y``."""

    def register(function: _Command) -> _Command:
        made = commands_of(function.__module__).command(name, cls=GroupedCommand, epilog=epilog(*examples))
        made(for_typer(function, confirms=confirms))
        return function

    return register


def for_typer(function: Callable[..., int], *, confirms: bool = False) -> Callable[..., int]:
    """Return ``function`` with its settings parameter replaced by the options that it takes.

    Every command gets ``--json``, ``-q`` and ``-v``; ``confirms`` adds ``-y`` (:func:`ggufspec.cli.ui.flags`).
    """
    signature = inspect.signature(function, eval_str=True)
    flags = [row for row in FLAGS.values() if confirms or row.group != "yes"]
    shown = [inspect.Parameter("context_", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    given, swept, rows = "", "", []
    for name, one in signature.parameters.items():
        if get_origin(one.annotation) is Annotated and isinstance(get_args(one.annotation)[1], TakenOptions):
            given, rows = name, get_args(one.annotation)[1].rows()
            shown += map(parameter, rows)
        elif one.annotation == SweptOption | None:
            swept = name
        else:
            shown.append(one.replace(kind=one.KEYWORD_ONLY))
    shown += map(parameter, flags)

    @functools.wraps(function)
    def gathering(*, context_: typer.Context | None = None, **parsed: Any) -> int:
        ui.begin_command(OutputFlags(**{row.name: parsed.pop(row.name) for row in flags}))
        ui.hear()
        try:
            for one in context_.command.params if context_ else ():
                whole = os.environ.get(str(one.envvar)) if getattr(one, "multiple", False) else None
                source = context_.get_parameter_source(str(one.name)) if context_ else None
                if whole and source and source.name != "COMMANDLINE":  # Typer splits a list's variable at spaces
                    parsed[str(one.name)] = [whole]
            if given:
                parsed[given], found = taken_settings(rows, parsed, sweeps=bool(swept), context=context_)
                if swept:
                    parsed[swept] = found
            return function(**parsed)
        except KeyboardInterrupt:  # Typer would turn it into a bare exit code
            raise StopError("interrupted") from None
        finally:
            if warning := cache.warning():  # says once that a temporary folder is used
                ui.note(warning)

    gathering.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    gathering.__annotations__ = {}  # the signature has the annotations
    return gathering


def epilog(*examples: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {example}" for example in examples)
