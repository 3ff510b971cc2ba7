"""The commands and the one place where an error becomes text and an exit code."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Annotated

import typer

from ggufspec import __version__
from ggufspec.cli import parameters, ui
from ggufspec.cli.bench import bench
from ggufspec.cli.chat import chat
from ggufspec.cli.compare import compare
from ggufspec.cli.doctor import doctor
from ggufspec.cli.export import export
from ggufspec.cli.plan import plan
from ggufspec.cli.profiles import check, list_profiles, new, remove, show
from ggufspec.cli.pull import pull
from ggufspec.cli.quantize import quantize
from ggufspec.cli.rehearse import rehearse
from ggufspec.cli.report import report
from ggufspec.cli.run import run
from ggufspec.cli.serve import serve
from ggufspec.cli.trace import trace
from ggufspec.cli.tune import tune
from ggufspec.cli.verify import verify
from ggufspec.cli.worker import worker
from ggufspec.errors import GgufspecError, StopError
from ggufspec.settings import Flags, Settings

app = typer.Typer(
    name="ggufspec",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


profiles = typer.Typer(name="profiles", rich_markup_mode=None)


def _register(
    command: Callable[..., int], *examples: str, on: typer.Typer = app, name: str | None = None, confirms: bool = False
) -> None:
    """Add a command; ``examples`` end its help. With ``confirms`` it has ``-y``."""
    command = parameters.command(command, confirms=confirms)

    @functools.wraps(command)
    def interruptible(*args: object, **kwargs: object) -> int:
        ui.hear()
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:  # Typer would make it a bare exit code
            raise StopError("interrupted") from None
        finally:
            _warn_temporary()

    on.command(name, epilog=parameters.epilog(*examples))(interruptible)


def _warn_temporary() -> None:
    """Warn once that the command had only a temporary folder for its cache or its results."""
    cache = sys.modules.get("ggufspec.cache")
    if cache is not None and cache.warning():
        ui.note(cache.warning())


_register(
    bench,
    "ggufspec bench demo",
    "ggufspec bench -m TARGET.gguf -md DRAFT.gguf -ngl 45 -r 10 --export-json result.json",
    "ggufspec bench demo --sweep --draft-policy fixed --draft-max 1,2,4,8",
    confirms=True,
)
_register(
    compare,
    "ggufspec compare -m A-Q4_K_M.gguf,A-Q8_0.gguf -md DRAFT.gguf,lookup --html c.html",
    "ggufspec compare -hf USER/REPO:Q3_K_S,Q4_K_M -hfd USER/SMALL:Q8_0 --sort speed",
    "ggufspec compare llama3-70b llama3.1-8b",
    confirms=True,
)
_register(
    run,
    'ggufspec run demo -p "def main("',
    "ggufspec run -m TARGET.gguf -md DRAFT.gguf -f prompt.txt --temp 0.8 -s 7",
    confirms=True,
)
_register(
    chat,
    "ggufspec chat demo",
    "ggufspec chat -m TARGET.gguf -md DRAFT.gguf --system 'You are terse.' --tint",
    "ggufspec chat --url http://127.0.0.1:8080",
    "printf 'Hello\\n/target\\nHello\\n' | ggufspec chat -m TARGET.gguf --json",
    confirms=True,
)
_register(
    serve,
    "ggufspec serve demo",
    "ggufspec serve qwen3-14b --parallel 2 --port 8080",
    "ggufspec serve -m TARGET.gguf -md DRAFT.gguf --host 0.0.0.0 --api-key-file keys.txt",
    confirms=True,
)
_register(
    trace,
    'ggufspec trace demo -p "def main(" -n 16',
    "ggufspec trace demo -f prompt.txt --temp 0.8 --accept residual --html trace.html",
    "ggufspec trace -m TARGET.gguf -md DRAFT.gguf -f prompt.txt --json | jq .places",
    confirms=True,
)
_register(
    plan,
    "ggufspec plan llama3-70b --gpu 'RTX 4090'",
    "ggufspec plan -m TARGET.gguf -md DRAFT.gguf --vram 24GiB -c 8192 --sweep",
    "ggufspec plan -hf USER/REPO --draft-repo USER/SMALL-REPO",
    "ggufspec plan --search 'qwen3 coder' --gpu 'RTX 4090'",
)
_register(
    pull,
    "ggufspec pull llama3-70b --dry-run",
    "ggufspec pull -hf USER/REPO:Q4_K_M -hfd USER/SMALL-REPO:Q8_0 -y",
    "ggufspec pull -hf USER/REPO --row 3",
    confirms=True,
)
_register(
    rehearse,
    "ggufspec rehearse llama3-70b",
    "ggufspec rehearse -hf USER/TARGET:Q4_K_M -hfd USER/DRAFT:Q8_0 -c 8192",
)
_register(
    quantize,
    "ggufspec quantize MODEL-F16.gguf --types Q8_0,Q4_K_M,Q3_K_L",
    "ggufspec quantize MODEL-F16.gguf --types Q4_0 -o models -t 8 --json",
)
_register(
    tune,
    "ggufspec tune demo --budget 5m",
    "ggufspec tune -m TARGET.gguf -md DRAFT.gguf --allow-kv q8_0 --save my-pair",
    confirms=True,
)
_register(
    report,
    "ggufspec report --html report.html",
    "ggufspec report desktop.json laptop.json --html both.html --export-markdown both.md",
)
_register(
    verify,
    "ggufspec verify demo",
    "ggufspec verify -m TARGET.gguf -md DRAFT.gguf --quick --export-json certificate.json",
    confirms=True,
)
_register(
    worker,
    "ggufspec worker",
    "ggufspec worker --host 0.0.0.0 --port 50052 --device CUDA0",
)
_register(
    doctor,
    "ggufspec doctor",
    "ggufspec doctor --quick --json",
)
_register(
    export,
    "ggufspec export demo --to llama-server",
    "ggufspec export -m TARGET.gguf -md DRAFT.gguf -ngl 45 -c 4096 --to ollama -o Modelfile",
)
_register(
    list_profiles,
    "ggufspec profiles list",
    "ggufspec profiles list --gpu 'RTX 4060 Ti 16GB'",
    "ggufspec profiles list --json",
    on=profiles,
    name="list",
)
_register(
    show,
    "ggufspec profiles show llama3-70b",
    on=profiles,
)
_register(
    new,
    "ggufspec profiles new my-pair",
    "ggufspec profiles new my-pair -hf USER/TARGET-GGUF:Q4_K_M -hfd USER/DRAFT-GGUF:Q8_0",
    on=profiles,
)
_register(
    remove,
    "ggufspec profiles rm my-pair",
    on=profiles,
    name="rm",
    confirms=True,
)
_register(
    check,
    "ggufspec profiles check",
    "ggufspec profiles check llama3-70b qwen3-14b",
    on=profiles,
)


@profiles.callback(
    invoke_without_command=True,
    epilog=parameters.epilog("ggufspec profiles list", "ggufspec profiles show llama3-70b"),
)
def profiles_top(context: typer.Context) -> int:
    """List, show, make, remove and check named pairs."""
    return list_profiles(given=Settings()) if context.invoked_subcommand is None else 0


app.add_typer(profiles)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as version_of

        try:
            beside = f" (llama-cpp-python {version_of('llama-cpp-python')})"
        except PackageNotFoundError:
            beside = ""
        ui.data(f"ggufspec {__version__}{beside}")
        raise typer.Exit


@app.callback(epilog="Example: ggufspec bench demo")
def top(
    version: Annotated[
        bool, typer.Option("-V", "--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding of GGUF models on one consumer GPU: how fast, and was it worth it?"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the only place where an error becomes text and an exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    ui.begin(Flags())
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
        ui.failure(str(error), "")
        return 1


def _message(error: typer.TyperException) -> str:
    """Typer's message, without what pydantic puts before the message of a parser."""
    return error.format_message().replace(": Value error, ", ": ", 1)


def _usage_hint(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    return f"{context.command_path} --help" if context else "ggufspec --help"


def _fail(arguments: Sequence[str], message: str, hint: str, code: int) -> int:
    if "--json" in arguments:
        from ggufspec.schema.base import ErrorDocument, to_line

        ui.data(to_line(ErrorDocument(message, hint)))  # after lines of JSON it is one more
    ui.failure(message, hint)
    return code


def _discard_output() -> None:
    """Send what is still in the buffer of standard output nowhere, or its flush at exit would fail once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _end(number: int, _: FrameType | None) -> None:
    """Leave every block that is open, as Ctrl-C would: the cursor is shown, children end, files in the making go."""
    _at_signals(signal.SIG_IGN)  # once is enough
    raise SystemExit(128 + number)


def _at_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """What is to be done when somebody ends this process, or its terminal; nothing where that is ignored (nohup)."""
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
    """The console script."""
    os.environ["GLIBC_TUNABLES"] = with_huge_pages(os.environ.get("GLIBC_TUNABLES", ""))  # for child processes
    ui.ready()
    _at_signals(_end)
    sys.exit(main())
