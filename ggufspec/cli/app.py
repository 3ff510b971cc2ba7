"""The commands by name, and the one place where an error becomes text and an exit code.

The module of a command is imported when the command runs or its own help is asked for, and not before: what this one
imports, ``ggufspec --help`` waits for.
"""

from __future__ import annotations

import codecs
import functools
import importlib
import importlib.metadata
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand

from ggufspec import __version__
from ggufspec.cli.group import Group
from ggufspec.errors import GgufspecError, UsageError, nearest
from ggufspec.schema.base import ErrorDocument, to_line
from ggufspec.schema.text import in_ascii

COMMANDS = {  # each is a module of this package; the first sentence of its help
    "bench": "Measure target-only, draft-only and speculative decoding.",
    "compare": "Compare many pairs by speed, memory, energy and quality.",
    "run": "Stream one answer; the statistics follow on standard error.",
    "chat": "Talk with a pair.",
    "serve": "Serve the pair over HTTP: OpenAI's API, for editors and agents.",
    "trace": "Show every round of one answer, token by token.",
    "plan": "Show what fits, how fast it is, and whether the draft pays.",
    "models": "List the GGUF models on this disk, and what each can draft with.",
    "pull": "Download a pair's files into the Hugging Face cache.",
    "rehearse": "Measure a pair's speed before it is downloaded.",
    "quantize": "Write one model in several weight types.",
    "tune": "Find the fastest setting of a pair on this machine.",
    "report": "Show saved results.",
    "verify": "Certify that speculation changed nothing.",
    "worker": "Serve this machine's devices to another machine, until Ctrl-C.",
    "doctor": "Show what is installed and what is wrong with it.",
    "export": "Print a pair's placement as settings of another program.",
    "profiles": "List, show, make, remove and check named pairs.",
}

app = typer.Typer(
    name="ggufspec",
    cls=Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


class Deferred(TyperCommand):
    """A command, or a group of them, of which only the name and the first sentence of the help are known yet."""

    @functools.cached_property
    def whole(self) -> Any:
        """The command itself, with its parameters."""
        module = importlib.import_module(f"ggufspec.cli.{self.name}")
        from ggufspec.cli import parameters

        return typer.main.get_command(parameters.commands_of(module.__name__))

    def make_context(self, *args: Any, **more: Any) -> Any:
        """Typer makes one before it runs, completes or explains a command."""
        return self.whole.make_context(*args, **more)


for _name, _about in COMMANDS.items():
    app.command(_name, cls=Deferred, help=_about)(lambda: 0)


def _version(wanted: bool) -> None:
    if wanted:
        try:
            beside = f" (llama-cpp-python {importlib.metadata.version('llama-cpp-python')})"
        except importlib.metadata.PackageNotFoundError:
            beside = ""
        typer.echo(f"ggufspec {__version__}{beside}")
        raise typer.Exit


@app.callback(epilog="Example: ggufspec bench demo")
def top(
    version: Annotated[  # noqa: ARG001, its callback has it
        bool, typer.Option("-V", "--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding of GGUF models on one consumer GPU: how fast, and was it worth it?"""
    if endpoint := os.environ.get("HF_ENDPOINT"):  # huggingface_hub cannot even be imported with some
        from urllib.parse import urlsplit

        try:
            is_address = urlsplit(endpoint).scheme in ("http", "https") and urlsplit(endpoint).port != 0
        except ValueError:
            is_address = False
        if not is_address:
            raise UsageError(f"HF_ENDPOINT={endpoint} is no address of a server", "unset HF_ENDPOINT")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the only place where an error becomes text and an exit code."""
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
            return _fail(arguments, error.message, error.hint, error.exit_code)
        except (KeyboardInterrupt, typer.Abort):
            return _fail(arguments, "interrupted", "", 130)
    except SystemExit as stop:  # Typer's answer to a reader that has gone: ggufspec … | head; or _end
        _discard_output()
        return int(stop.code or 0)
    except BrokenPipeError:
        _discard_output()
        return 1
    except OSError as error:  # a full disk behind a redirection, no memory for a process
        _discard_output()
        return _fail((), str(error), "", 1)


def _message(error: typer.TyperException) -> str:
    """Typer's message, without what pydantic puts before the message of a parser or says about its own ways."""
    text = error.format_message().replace(": Value error, ", ": ", 1)
    text = re.sub(r"^Invalid value for ([^:]*)'(\S+)': ", r"\2: ", text)  # the last name of several
    return re.sub(r": Input (should be [^,]+)(, unable to parse.*)?", r": it \1", text)


def _usage_hint(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    if (found := re.search(r"'(.*)' is not one of (.*)", str(error))) and (
        near := nearest(found[1], re.findall(r"[^\s',.]+", found[2]))
    ):
        return near
    return f"{context.command_path} --help" if context else "ggufspec --help"


def _fail(arguments: Sequence[str], message: str, hint: str, code: int) -> int:
    from ggufspec.cli import ui

    if "--json" in arguments:
        ui.data(to_line(ErrorDocument(message, hint)))  # after lines of JSON it is one more
    ui.failure(message, hint, stopped=code == 130)
    return code


def _discard_output() -> None:
    """Send what is still in the buffer of standard output nowhere, or its flush at exit would fail once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _ready() -> None:
    """Make the standard streams fit for use: a closed one is the null device, and output is never refused for a
    character that its encoding lacks.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: its own
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))
    codecs.register_error("ascii", in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="ascii")


def _end(number: int, _: FrameType | None) -> None:
    """Leave every block that is open, as Ctrl-C would: the cursor is shown, children end, files in the making go."""
    _at_signals(signal.SIG_IGN)  # once is enough
    raise SystemExit(128 + number)


def _at_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """What is to be done when somebody ends this process, or its terminal; nothing if that is ignored (nohup)."""
    for name in ("SIGTERM", "SIGHUP"):  # the latter is not on Windows
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def with_huge_pages(tunables: str) -> str:
    """``GLIBC_TUNABLES`` by which large allocations ask Linux for huge pages, unless the user has set that.

    llama.cpp keeps repacked weights in them. Where they lie in scattered pages of 4 KiB, a processor of a virtual
    machine waits for its tables: there a token took 1.4 to 1.5 times as long. Source: malloc/malloc.c of glibc.
    """
    name = "glibc.malloc.hugetlb="
    return tunables if name in tunables else ":".join(filter(None, (tunables, f"{name}1")))


def entry() -> None:
    os.environ["GLIBC_TUNABLES"] = with_huge_pages(os.environ.get("GLIBC_TUNABLES", ""))  # for child processes
    _ready()
    _at_signals(_end)
    sys.exit(main())
