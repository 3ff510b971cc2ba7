"""Command ``ggufspec rehearse``: measure this machine's speed for a pair before its download, on dummy weights."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from ggufspec.bench import rehearse as rehearsal
from ggufspec.bench.batch_timing import BatchTimingResult, time_batches
from ggufspec.bench.rehearse import RehearsalStage
from ggufspec.cli import inputs, ui
from ggufspec.cli.parameters import FILES_OR_URLS, command, command_option, takes
from ggufspec.cli.results import show_models
from ggufspec.errors import GgufspecError
from ggufspec.files.cache import cache_folder, writable
from ggufspec.files.write import scratch
from ggufspec.hardware.host import physical_cores
from ggufspec.models import dummy_weights
from ggufspec.models.dummy_weights import DummyWeights
from ggufspec.models.headers import KnownHeader
from ggufspec.planning import rehearsed
from ggufspec.planning.plan import Plan
from ggufspec.reports import rehearse as report
from ggufspec.reports import table
from ggufspec.schema.rehearse import RehearseDocument, RehearsedRun
from ggufspec.schema.text import of_file
from ggufspec.settings.table import Settings


@command("ggufspec rehearse llama3-70b", "ggufspec rehearse -hf USER/TARGET:Q4_K_M -hfd USER/DRAFT:Q8_0 -c 8192")
def rehearse(
    *,
    depth: Annotated[int, command_option("--depth N", "Tokens in the cache while batches are timed.", min=1)] = 128,
    keep: Annotated[bool, command_option("--keep", "Keep the dummy files. Prints where they are.")] = False,
    given: Annotated[
        Settings,
        takes(
            *("profile", "files", "hub", "placement", "devices", "drafter", "draft_max", "context", "repetitions"),
            **FILES_OR_URLS,
            repetitions={"default": 9, "help": "Timing rounds; fewer if they take long."},
        ),
    ],
) -> int:
    """Measure a pair's speed before it is downloaded. It runs on dummy weights of the same shape.

    Only headers are downloaded, a few MB. Speed, memory and the cost of verification are real; acceptance, which needs
    real weights, is assumed to be 50 to 90 %. Later plans for the same models use the measurements.
    """
    pair, rpc = inputs.pair_spec(given), given.rpc or ()
    made_plan = inputs.make_plan_shown(inputs.open_here(pair, given))
    plan, headers = made_plan.plan, [made_plan.opened.target]
    if made_plan.opened.draft is not None and plan.request.draft is not None and not plan.request.draft.in_target:
        headers.append(made_plan.opened.draft)
    with made_plan.dry_runs:
        stages = rehearsal.stages(plan, made_plan.dry_runs)
    if error := rehearsal.lacking(plan, stages[0]):
        raise error
    with _dummy_weights(headers, keep=keep) as made:
        runs = [_run(plan, stage, made, depth=depth, rounds=given.value("repetitions"), rpc=rpc) for stage in stages]
    _keep(plan, stages, runs, made_plan.opened.options.threads or physical_cores())
    shown = rehearsal.rehearse_document(
        plan,
        runs,
        pair=made_plan.described(),
        settings=asdict(plan.request.target.context) | {"depth": depth, "draft_max": plan.request.draft_max},
        dummy_weights={
            "bytes_read": sum(known.bytes_read for known in headers),
            "disk_bytes": sum(one.disk_bytes for one in made),
            "files": [str(one.path) for one in made] if keep else [],
        },
        notes=(*plan.notes, *(f"{run.name} was left out: {run.left_out}" for run in runs if run.left_out)),
    )
    ui.result(shown, lambda: _show(shown))
    return 0


@contextmanager
def _dummy_weights(headers: Sequence[KnownHeader], *, keep: bool) -> Iterator[list[DummyWeights]]:
    """Make dummy weights for the pair, each in its own folder, and remove them afterwards unless ``keep``."""
    root = cache_folder() / "dummy_weights"
    root = root if keep else writable(root)
    with ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(dir=root)) if keep else stack.enter_context(scratch(root))
        except OSError as error:
            raise GgufspecError(f"{root} cannot be written: {error.strerror}", f"df -h {root.parent}") from None
        made: list[DummyWeights] = []

        def forget() -> None:
            if len(made) < len(headers):  # stopped before all files were written
                shutil.rmtree(folder, ignore_errors=True)

        stack.callback(forget)
        needed = sum(dummy_weights.needed_bytes(known) for known in headers)
        size = sum(known.header.size_bytes for known in headers)
        ui.note(f"dummy weights for a model of {of_file(size)} take at most {needed / 1e6:.0f} MB of disk")
        with ui.busy() as say:
            for known in headers:
                say(f"writing dummy weights for {known.header.name}")
                own = folder / known.sparse.name.split(".", 1)[0]
                own.mkdir(exist_ok=True)
                made.append(dummy_weights.make_dummy(known, own, verbose=ui.flags().verbose))
        if keep:
            ui.note(f"the dummy files are kept in {folder}")
        yield made


def _run(
    plan: Plan, stage: RehearsalStage, made: list[DummyWeights], *, depth: int, rounds: int, rpc: tuple[str, ...]
) -> RehearsedRun:
    if error := rehearsal.lacking(plan, stage):
        return RehearsedRun(stage.name, None, None, 0, 0, left_out=error.message)
    draft = made[-1].path if plan.request.draft else None
    spec = rehearsal.spec(plan, stage, made[0].path, draft, depth=depth, rounds=rounds, rpc=rpc)
    name = stage.name.replace("_", "-")
    with ui.busy() as say:

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "round":
                say(f"timing {name}: round {event['number']} of {event['of']}")
            else:
                say(f"{event['event']} for {name}")

        result: BatchTimingResult = time_batches(spec, on_event=on_event, verbose=ui.flags().verbose)
    return rehearsal.run_of(stage, result, plan)


def _keep(plan: Plan, stages: list[RehearsalStage], runs: list[RehearsedRun], threads: int) -> None:
    """Save the measurements for later plans."""
    machine, question = rehearsed.devices_identity(plan.machine.cards), plan.request
    for stage, run in zip(stages, runs, strict=True):
        models = ((question.target, run.target, stage.target), (question.draft, run.draft, stage.draft))
        for subject, model, placement in models:
            if subject is None or model is None or placement is None or subject.as_read is not None:
                continue  # a head takes a different time than a model of its shape
            context = stage.context if placement is stage.target else subject.context
            seconds = {width: spread.median for width, spread in model.batch_s.items()}
            offloaded = replace(placement, gpu_layers=placement.offloaded(subject.header.blocks))
            point = rehearsed.RehearsedSpeed(
                placement=offloaded,
                threads=threads,
                depth=model.depth,
                cache_type_k=context.cache_type_k,
                cache_type_v=context.cache_type_v,
                batch_s=seconds,
                machine=machine,
                op_offload_min_batch=context.op_offload_min_batch,
            )
            rehearsed.record(cache_folder(), subject.header, point)


def _show(document: RehearseDocument) -> None:
    out = ui.out()
    show_models({role: document.pair.get(f"{role}_shape") for role in ("target", "draft")})
    out.print(table.terminal(report.runs(document)))
    if document.expected:
        out.print(table.terminal(report.batches(document)))
        out.print(table.terminal(report.expected_rows(document)))
    is_worth_it = document.break_even_acceptance is not None
    out.print(document.why, style="bold green" if is_worth_it else "bold")
    out.print(f"{document.label[0].upper()}{document.label[1:]}.", style="dim")
    if ui.flags().verbose:
        read, disk = document.dummy_weights["bytes_read"], document.dummy_weights["disk_bytes"]
        out.print(f"{read / 1e6:.1f} MB were read, {disk / 1e6:.1f} MB of disk used.", style="dim")
    for note in document.notes:
        out.say(f"Note: {note}.", style="yellow")
