"""Table of commands, and the only code that turns an error into text and an exit code.

A command's module is imported only when the command runs or shows its help, which keeps ``ggufspec --help`` fast.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import importlib
import importlib.metadata
import io
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, cast

import typer
import typer.main
from typer.core import TyperCommand

from ggufspec import __version__
from ggufspec.cli.group import CommandGroup
from ggufspec.errors import GgufspecError, UsageError, did_you_mean
from ggufspec.schema.base import ErrorDocument, to_line
from ggufspec.schema.text import in_ascii
from ggufspec.settings.option import bounds

COMMANDS = {  # module in this package: first sentence of the command's help
    "bench": "Measure target-only, draft-only and speculative decoding.",
    "compare": "Compare many pairs by speed, memory, energy and quality.",
    "run": "Stream one answer; the statistics follow on standard error.",
    "chat": "Chat with a pair.",
    "serve": "Serve a pair to editors and agents over OpenAI's HTTP API.",
    "trace": "Show every round of one answer, token by token.",
    "plan": "Show what fits, how fast it is, and whether the draft pays.",
    "models": "List the GGUF models on this disk, with the drafts for each.",
    "pull": "Download a pair's files into the Hugging Face cache.",
    "rehearse": "Measure a pair's speed before it is downloaded.",
    "quantize": "Write one model in several weight types.",
    "tune": "Find the fastest settings for a pair on this machine.",
    "report": "Show saved results.",
    "verify": "Certify that speculation changed nothing.",
    "worker": "Serve this machine's devices to another machine, until Ctrl-C.",
    "doctor": "Show what is installed and what is wrong with it.",
    "export": "Print a pair's placement as settings for another program.",
    "profiles": "List, show, make, remove and check named pairs.",
}

app = typer.Typer(
    name="ggufspec",
    cls=CommandGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


class DeferredCommand(TyperCommand):
    """Command or group that is imported when needed; until then, it has only a name and one sentence of help."""

    @functools.cached_property
    def whole(self) -> Any:
        """Import the command and return it with its parameters."""
        module = importlib.import_module(f"ggufspec.cli.{self.name}")
        from ggufspec.cli import parameters

        return typer.main.get_command(parameters.commands_of(module.__name__))

    def make_context(self, *args: Any, **more: Any) -> Any:
        """Import the command and return its context, which Typer needs to run, complete or document the command."""
        return self.whole.make_context(*args, **more)


for _name, _about in COMMANDS.items():
    app.command(_name, cls=DeferredCommand, help=_about)(lambda: 0)


def _version(wanted: bool) -> None:
    if wanted:
        try:
            library = f" (llama-cpp-python {importlib.metadata.version('llama-cpp-python')})"
        except importlib.metadata.PackageNotFoundError:
            library = ""
        typer.echo(f"ggufspec {__version__}{library}")
        raise typer.Exit


@app.callback(epilog="Example: ggufspec bench demo")
def top(
    version: Annotated[  # noqa: ARG001, handled by its callback
        bool, typer.Option("-V", "--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding of GGUF models on one consumer GPU: how fast, and was it worth it?"""
    if not os.path.isabs(os.path.expanduser("~")):  # noqa: PTH111, PTH117  # Path.home() would raise
        from ggufspec.files import cache

        os.environ["HOME"] = str(cache.temporary_home())  # also for child processes and huggingface_hub
    if endpoint := os.environ.get("HF_ENDPOINT"):  # some values make importing huggingface_hub fail
        from urllib.parse import urlsplit

        try:
            is_address = urlsplit(endpoint).scheme in ("http", "https") and urlsplit(endpoint).port != 0
        except ValueError:
            is_address = False
        if not is_address:
            raise UsageError(f"HF_ENDPOINT={endpoint} is not a server address", "unset HF_ENDPOINT")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; only this function turns an error into text and an exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    elif arguments == ["version"]:
        arguments = ["--version"]
    try:
        try:
            return app(args=arguments or ["--help"], prog_name="ggufspec", standalone_mode=False) or 0
        except typer.Exit as stop:
            return stop.exit_code
        except typer.TyperException as error:
            return _fail(arguments, _message(error), _usage_hint(error), 2)
        except GgufspecError as error:
            return _fail(arguments, error.message, _corrected(arguments, error), error.exit_code)
        except (KeyboardInterrupt, typer.Abort):
            return _fail(arguments, "interrupted", "", 130)
    except SystemExit as stop:  # raised by Typer after a closed pipe (ggufspec … | head), or by _end
        _discard_output()
        return int(stop.code or 0)
    except BrokenPipeError:
        _discard_output()
        return 1
    except OSError as error:  # e.g. standard output's disk is full, or a process cannot be started for lack of memory
        _discard_output()
        return _fail((), str(error), "", 1)


def _message(error: typer.TyperException) -> str:
    """Return Typer's message, reworded like those of :mod:`ggufspec.settings.option`."""
    given, cause = getattr(error, "param", None), cast(Any, error.__cause__)
    if given is not None and hasattr(cause, "errors"):  # a pydantic error
        problem, info = cause.errors()[0], given.type_descriptor.parameter_info
        flag, value, kind = given.opts[-1], str(problem["input"])[:40], problem["type"]
        if kind in ("greater_than_equal", "less_than_equal"):
            return f"{flag} {value} is out of range: {bounds(info.min, info.max)}"
        if kind.startswith(("int_", "float_")):
            return f"{flag} {value!r} is not a {'whole ' * kind.startswith('int')}number"
    text = error.format_message().replace(": Value error, ", ": ", 1)
    text = re.sub(r"^Invalid value for ([^:]*)'(\S+)': ", r"\2: ", text)  # keep the last of several flag names
    text = re.sub(r"^Got unexpected extra argument\(s\) \((.*)\)$", r"unexpected argument: \1", text)
    return re.sub(r": Input (should be [^,]+)(, unable to parse.*)?", r": it \1", text)


def _corrected(arguments: Sequence[str], error: GgufspecError) -> str:
    """Return the typed command with the wrong file replaced, or the error's hint if that file was not typed."""
    if error.instead is None or not all(word.isprintable() for word in arguments):
        return error.hint
    with contextlib.suppress(OSError):  # the current folder was removed
        wrong, right = (Path(one).absolute() for one in error.instead)
        for typed in (word for word in arguments if Path(word).absolute() == wrong):
            shown = str(Path(typed).with_name(right.name)) if right.parent == wrong.parent else error.instead[1]
            return shlex.join(["ggufspec", *(shown if word == typed else word for word in arguments)])
    return error.hint


def _usage_hint(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    if (found := re.search(r"'(.*)' is not one of (.*)", str(error))) and (
        near := did_you_mean(found[1], re.findall(r"[^\s',.]+", found[2]))
    ):
        return near
    return f"{context.command_path} --help" if context else "ggufspec --help"


def _fail(arguments: Sequence[str], message: str, hint: str, code: int) -> int:
    from ggufspec.cli import ui

    if "--json" in arguments:
        ui.data(to_line(ErrorDocument(message, hint)))  # follows the JSON lines printed so far, if any
    ui.failure(message, hint, stopped=code == 130)
    return code


def _discard_output() -> None:
    """Redirect standard output to the null device, because flushing its buffer at exit would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _ready() -> None:
    """Replace closed standard streams with the null device, and characters that a stream cannot encode with ASCII."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, the closed stream's
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))
    codecs.register_error("ascii", in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="ascii")


def _end(number: int, _: FrameType | None) -> None:
    """Unwind all open blocks, as Ctrl-C would, to show the cursor, end child processes and remove unfinished files."""
    _at_signals(signal.SIG_IGN)  # ignore further signals
    raise SystemExit(128 + number)


def _at_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Set the handler for SIGTERM and SIGHUP, except for a signal that is ignored (as with nohup)."""
    for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def with_huge_pages(tunables: str) -> str:
    """Return ``GLIBC_TUNABLES`` with huge pages for large allocations, unless the user has set that option.

    llama.cpp's repacked weights are such allocations. In scattered 4 KiB pages, they made a virtual machine's CPU wait
    for page tables: a token took 1.4 to 1.5 times as long. Source: malloc/malloc.c in glibc.
    """
    name = "glibc.malloc.hugetlb="
    return tunables if name in tunables else ":".join(filter(None, (tunables, f"{name}1")))


def entry() -> None:
    os.environ["GLIBC_TUNABLES"] = with_huge_pages(os.environ.get("GLIBC_TUNABLES", ""))  # for child processes
    _ready()
    _at_signals(_end)
    sys.exit(main())
