#!/usr/bin/env python3
"""Writes the reference of every command from its own help: docs/commands.md, and the man page docs/ggufspec.1.

.venv/bin/python scripts/commands.py            # write both
.venv/bin/python scripts/commands.py --check    # exit code 1 where one is not what the help says now
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from ggufspec import __version__
from ggufspec.chat.commands import COMMANDS as SWITCHES
from ggufspec.cli.app import app
from ggufspec.cli.command import ALL, GroupedCommand, variables
from ggufspec.settings.table import OPTIONS

ROOT = Path(__file__).resolve().parent.parent
MARKDOWN, MAN = ROOT / "docs" / "commands.md", ROOT / "docs" / "ggufspec.1"
COMMAND = ".venv/bin/python scripts/commands.py"
WIDTH = 96
EXIT_CODES = (
    ("0", "all went well"),
    ("1", "a failure that can be fixed, or a check that did not pass"),
    ("2", "wrong usage"),
    ("130", "Ctrl-C"),
)
FILES = (
    ("~/.config/ggufspec/profiles", "profiles of your own, which win over the bundled ones"),
    ("~/.cache/ggufspec", "headers and measurements; nothing in it is lost for good"),
    (
        "~/.local/share/ggufspec/results",
        "results of compare, tune and bench --sweep, and the run logs that they resume from",
    ),
)
STREAMS = (
    "Data goes to standard output, everything else to standard error. With `--json` a command prints one document, on "
    "failure too; trace prints a line for every round before it."
)
ENVIRONMENT = variables({f"GGUFSPEC_{row.variable}": row.flag for row in OPTIONS.values() if row.variable}, True)
COMPLETION = (
    "ggufspec --install-completion teaches bash, zsh or fish the commands, their options, the names of profiles and "
    "files; it takes effect in the next shell."
)

Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class Page:
    """The help of one command, in parts. A paragraph that begins with a backspace is kept as it is.

    ``switches`` are what can be typed while it runs.
    """

    name: str
    usage: str
    paragraphs: tuple[str, ...]
    options: Rows
    commands: Rows
    examples: tuple[str, ...]
    switches: Rows
    formatted: str  # usage and options as a terminal of WIDTH columns shows them


def pages() -> Iterator[Page]:
    """Every command in the order of the help, those of a group after it."""
    yield from _pages(get_command(app), "ggufspec", None)


def _pages(command: Any, name: str, parent: typer.Context | None) -> Iterator[Page]:
    settings: dict[str, Any] = {"help_option_names": ["-h", "--help"], "terminal_width": WIDTH}
    context = typer.Context(command, parent=parent, info_name=name, **(settings if parent is None else {}))
    context.meta[ALL] = True
    if isinstance(command, GroupedCommand):
        options = [row for rows in command.sections(context).values() for row in rows]
    else:
        options = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
    children = {key: getattr(child, "whole", child) for key, child in getattr(command, "commands", {}).items()}
    usage = context.make_formatter()
    command.format_usage(context, usage)
    shown = context.make_formatter()
    command.format_usage(context, shown)
    command.format_options(context, shown)
    yield Page(
        name=context.command_path,
        usage=" ".join(usage.getvalue().removeprefix("Usage: ").split()),
        paragraphs=tuple(re.split(r"\n\s*\n", inspect.cleandoc(command.help or ""))),
        options=options,
        commands=[(key, child.get_short_help_str(WIDTH)) for key, child in children.items()],
        examples=_examples(command.epilog or ""),
        switches=[(one.typed(key), one.does) for key, one in SWITCHES.items()] if name == "chat" else [],
        formatted=shown.getvalue().rstrip(),
    )
    for key, child in children.items():
        yield from _pages(child, key, context)


def _examples(epilog: str) -> tuple[str, ...]:
    """The examples at the end of a command's help."""
    lines = [line.strip() for line in epilog.splitlines() if line.strip("\b\n ")]
    return tuple(line.removeprefix("Example: ") for line in lines if line != "Examples:")


# ---- Markdown --------------------------------------------------------------------------------------------------------


def markdown(every: list[Page]) -> str:
    """The reference as one page."""
    top, *rest = every
    codes = ", ".join(f"{code} ({what})" for code, what in EXIT_CODES)
    parts = [
        "# Commands",
        f"Written by `{COMMAND}` from the commands' own help; change the help and not this page.",
        _prose(top.paragraphs[0]),
        "\n".join(f"- [{page.name}](#{page.name.replace(' ', '-')}): {_prose(_first(page))}" for page in rest),
        f"{STREAMS} Exit codes: {codes}.",
        _prose(ENVIRONMENT),
        _prose(COMPLETION),
        _block(top.formatted),
    ]
    for page in rest:
        parts.append(f"## {page.name}")
        parts += [_block(text.strip("\b\n")) if text.startswith("\b") else _prose(text) for text in page.paragraphs]
        parts.append(_block(page.formatted))
        if page.switches:
            parts.append("While it runs:")
            parts.append("\n".join(f"- `{form}`: {_prose(does)}" for form, does in page.switches))
        if page.examples:
            parts.append(_block("\n".join(page.examples), "bash"))
    return "\n\n".join(parts) + "\n"


def _first(page: Page) -> str:
    """The first sentence of a command's help."""
    return re.split(r"(?<=\.)\s", " ".join(page.paragraphs[0].split()), maxsplit=1)[0]


def _prose(text: str) -> str:
    """One paragraph: options as code, the rest without Markdown's own characters."""
    text = re.sub(r"([\\*_<>|`\[\]])", r"\\\1", " ".join(text.split()))
    return re.sub(r"(?<![\w-])((?:ggufspec )?--?[a-zA-Z][\w-]*|GGUFSPEC\\_(?:[\w=]|\\_)+)", _code, text)


def _code(found: re.Match[str]) -> str:
    return "`" + found[0].replace("\\", "") + "`"


def _block(text: str, language: str = "") -> str:
    return f"```{language}\n{text}\n```"


# ---- roff ------------------------------------------------------------------------------------------------------------


def roff(every: list[Page]) -> str:
    """The same as a man page. Source: groff_man(7)."""
    top, *rest = every
    about = " ".join(top.paragraphs[0].split())
    lines = [
        f".\\\" Written by {COMMAND} from the commands' own help.",
        f'.TH GGUFSPEC 1 "" "ggufspec {__version__}" "User Commands"',
        ".SH NAME",
        f"ggufspec \\- {_line(about[0].lower() + about[1:])}",
        ".SH SYNOPSIS",
        ".B ggufspec",
        ".RI [ OPTIONS ]",
        ".I COMMAND",
        ".RI [ ARGUMENTS ]",
        ".SH OPTIONS",
        *_items(top.options),
        ".PP",
        _line(COMPLETION),
        ".SH COMMANDS",
    ]
    for page in rest:
        lines += [f".SS {_line(page.name)}", *_synopsis(page.usage)]
        for text in page.paragraphs:
            raw = text.startswith("\b")
            lines += [".PP"] + (_example(text.strip("\b\n").splitlines()) if raw else [_line(" ".join(text.split()))])
        lines += _items(page.options)
        if page.switches:
            lines += [".PP", "While it runs:", *_items(page.switches)]
        if page.examples:
            lines += [".PP", "Examples:", ".PP", *_example(list(page.examples))]
    lines += [".SH ENVIRONMENT", _line(ENVIRONMENT)]
    lines += [".SH FILES", *_items(list(FILES)), ".SH EXIT STATUS", *_items(list(EXIT_CODES))]
    return "\n".join(lines) + "\n"


def _synopsis(usage: str) -> list[str]:
    name, _, rest = usage.partition(" [")
    return [".PP", f".B {_line(name)}", *([_line("[" + rest)] if rest else [])]


def _items(rows: Rows) -> list[str]:
    return [line for names, about in rows for line in (".TP", f".B {_line(names)}", _line(" ".join(about.split())))]


def _example(lines: list[str]) -> list[str]:
    return [".RS 4", ".nf", *map(_line, lines), ".fi", ".RE"]


def _line(text: str) -> str:
    r"""A line of text: no backslash or hyphen is roff's own, and no first character makes it a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text[:1] in (".", "'") else text


def main() -> int:
    """Write both files, or say which is stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a file is stale")
    check = parser.parse_args().check
    every = list(pages())
    stale = []
    for path, text in ((MARKDOWN, markdown(every)), (MAN, roff(every))):
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not check:
            path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{name} is not what the help says now: {COMMAND}" if check else f"wrote {name}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
