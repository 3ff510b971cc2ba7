"""The commands and the one place where an error becomes text and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import click
import typer

from ggufspec import __version__
from ggufspec.cli import console
from ggufspec.cli.bench import bench
from ggufspec.cli.run import run
from ggufspec.errors import GgufspecError

app = typer.Typer(
    name="ggufspec",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command()(bench)
app.command()(run)


def _version(wanted: bool) -> None:
    if wanted:
        console.data(f"ggufspec {__version__}")
        raise typer.Exit


@app.callback(epilog="Example: ggufspec bench demo")
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding of GGUF models on one consumer GPU: how fast, and was it worth it?"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the only place where an error becomes text and an exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return app(args=arguments, prog_name="ggufspec", standalone_mode=False) or 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        usage = getattr(error, "ctx", None)
        hint = f"{usage.command_path} --help" if usage else "ggufspec --help"
        return _fail(arguments, error.format_message(), hint, 2)
    except GgufspecError as error:
        return _fail(arguments, error.message, error.hint, error.exit_code)
    except (KeyboardInterrupt, click.exceptions.Abort):
        return _fail(arguments, "interrupted", "", 130)
    except BrokenPipeError:  # the reader of our output has gone: ggufspec … | head
        sys.stderr.close()
        return 1


def _fail(arguments: Sequence[str], message: str, hint: str, code: int) -> int:
    if "--json" in arguments:
        from ggufspec.reports.document import ErrorDocument, to_json

        console.data(to_json(ErrorDocument(message, hint)))
    console.failure(message, hint)
    return code


def entry() -> None:
    """The console script."""
    sys.exit(main())
