"""``ggufspec plan``: what fits, where each layer goes, how fast it is, and whether the draft is worth its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ggufspec import api
from ggufspec.cli import inputs, ui
from ggufspec.cli.parameters import takes
from ggufspec.cli.results import show_models
from ggufspec.settings import Settings

if TYPE_CHECKING:
    from ggufspec.schema.plan import PlanDocument


def plan(
    *,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine's speed first, in 10 to 20 seconds; it is kept.")
    ] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Predicted tokens/s over the target's layers.")] = False,
    given: Annotated[
        Settings,
        takes(
            *("profile", "files", "hub", "simulated", "placement", "devices", "allow_kv", "acceptance", "draft_max"),
            *("context", "drafter"),
            model={"metavar": "FILE|URL", "help": "The target's GGUF file or URL."},
            model_draft={"metavar": "FILE|URL", "help": "The draft's file or URL."},
        ),
    ],
) -> int:
    """Show what fits, how fast it is, and whether the draft pays.

    Says where each layer goes, too. Needs no download: headers are read from the hub by range, a few MB. Needs no card:
    --gpu or --vram names one.
    """
    from ggufspec.hardware.host import physical_cores

    spec = inputs.pair_spec(given)
    options = api.decoder_options(given.over(spec.settings))
    (measure_machine if calibrate else measure_if_due)(options.threads, physical_cores(), given.rpc or ())
    document = inputs.make_plan(spec, given).document(sweep=sweep, contexts=True)
    ui.result(document, lambda: _show(document))
    return 0


def measure_machine(threads: int, cores: int, rpc: tuple[str, ...]) -> None:
    """Measure this machine for ten to twenty seconds; later plans use it.

    Args:
        threads: of the host; 0 is one for each core, and fewer while other programs use them.
        cores: physical ones.
        rpc: workers that are measured, too.

    Raises:
        GgufspecError: llama.cpp died over it, or an RPC worker does not answer.
    """
    from ggufspec.cache import cache_folder
    from ggufspec.decoding.threads import Threads
    from ggufspec.planning import machine_profile

    left = Threads(threads, cores=threads or cores).start()
    with ui.busy() as show:
        speed = machine_profile.measure(
            cache_folder(),
            machine_profile.Spec(threads or cores, rpc, left),
            on_event=lambda event: show(f"measuring this machine: {event['type']} on {event['device']}"),
            verbose=ui.flags().verbose,
        )
    if speed.disturbed:
        ui.note(
            f"this machine was measured while {speed.disturbed}: an idle one is faster, and a plan on it measures again"
        )


def measure_if_due(threads: int, cores: int, rpc: tuple[str, ...]) -> None:
    """:func:`measure_machine` where this machine was measured while it was busy, and is idle now; it is noted.

    Raises:
        GgufspecError: as :func:`measure_machine`.
    """
    from ggufspec.cache import cache_folder
    from ggufspec.hardware import host
    from ggufspec.planning import machine_profile

    why = machine_profile.is_due(cache_folder(), threads or cores, host.usable_cpus(), host.others_cpus)
    if why:
        ui.note(f"this machine was measured while {why}: it is measured again, which takes 10 to 20 seconds")
        measure_machine(threads, cores, rpc)


def _show(document: PlanDocument) -> None:
    from rich.text import Text

    from ggufspec.planning.history import is_guessed
    from ggufspec.reports import plan as report
    from ggufspec.reports import table

    out = ui.out()
    show_models({role: document.pair.get(f"{role}_shape") for role in ("target", "draft")})
    for line in report.bars(document, min(out.width, 100)):
        out.print(line)
    out.print(table.terminal(report.options(document)))
    if document.draft_lengths:
        out.print(table.terminal(report.draft_lengths(document)))
        out.print(
            "Where a log's accepted ÷ drafted tokens are above the break-even of their draft length, the draft pays.",
            style="dim",
        )
    if document.contexts:
        out.print(table.terminal(report.contexts(document)))
    if len(document.sweep) > 1:
        out.print(table.terminal(report.sweep(document)))
    elif document.sweep:
        out.print(
            "There is no card: nothing is offloaded, whatever -ngl is. --gpu or --vram sweeps over a card's layers."
        )
    out.print(Text(document.why, style="bold green" if document.choice == "speculative" else "bold"))
    source = "llama.cpp's own (its dry run)" if document.confirmed else "estimates, not llama.cpp's own"
    out.print(f"Bytes are {source}. Speeds are predictions, {document.speed}.", style="dim")
    out.print(f"The plan is for {report.context(document)}.", style="dim")
    if any(is_guessed(device.overhead_bytes) for device in document.devices):
        out.print("The driver's overhead is a guess until a bench has run on the card.", style="dim")
    if document.draft is not None or document.options["speculative"] is not None:
        out.print(f"Acceptance: {document.settings['acceptance_from']}.", style="dim")
    for note in document.notes:
        out.print(Text(f"Note: {note}.", style="yellow"))
