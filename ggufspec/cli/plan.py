"""``ggufspec plan``: what fits, where each layer goes, how fast it is, and whether the draft is worth its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ggufspec.cli import options, planned, ui

if TYPE_CHECKING:
    from ggufspec.schema.plan import PlanDocument


def plan(
    pair: options.PairName = None,
    model: options.TargetSource = None,
    model_draft: options.DraftSource = None,
    hf_repo: options.TargetRepo = None,
    hf_repo_draft: options.DraftRepo = None,
    gpu: options.Gpu = None,
    vram: options.Vram = None,
    headroom: options.Headroom = None,
    gpu_layers: options.GpuLayers = None,
    gpu_layers_draft: options.DraftGpuLayers = None,
    tensor_split: options.TensorSplit = None,
    n_cpu_moe: options.CpuExperts = None,
    ctx_size: options.ContextSize = None,
    cache_type_k: options.TypeK = None,
    cache_type_v: options.TypeV = None,
    allow_kv: Annotated[
        str | None,
        typer.Option("--allow-kv", metavar="TYPES", help="KV types that the plan may choose: q8_0, or q8_0,q4_0."),
    ] = None,
    flash_attn: options.FlashAttention = None,
    ubatch_size: options.MicroBatch = None,
    draft_max: options.DraftMax = None,
    acceptance: options.Acceptance = None,
    threads: options.Threads = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine's speed first, in 10 to 20 seconds; it is kept.")
    ] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Predicted tokens/s over the target's layers.")] = False,
    rpc: options.Rpc = None,
) -> int:
    """Say what fits, how fast it is, and whether the draft pays. Say where each layer goes, too.

    Needs no download: headers are read from the hub by range, a few MB. Needs no card: --gpu or --vram names one.
    """
    from ggufspec.decoding.planned import decoder_options
    from ggufspec.hardware.host import physical_cores
    from ggufspec.planning.describe import document

    subject = planned.choose(pair, model, model_draft, hf_repo, hf_repo_draft)
    decoder = decoder_options(
        subject.settings,
        ctx_size=ctx_size,
        draft_max=draft_max,
        threads=threads,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        flash_attn=flash_attn,
        ubatch_size=ubatch_size,
    )
    measure, cores = planned.calibrate if calibrate else planned.calibrate_if_due, decoder.threads or physical_cores()
    measure(cores, tuple(rpc or ()), fixed=decoder.threads > 0)
    made = planned.make(
        subject,
        decoder,
        planned.placement_asked(
            subject,
            gpu_layers=gpu_layers,
            gpu_layers_draft=gpu_layers_draft,
            tensor_split=tensor_split,
            n_cpu_moe=n_cpu_moe,
            draft_max=draft_max,
            headroom=headroom,
            rpc=rpc,
            gpu=gpu,
            vram=vram,
            allow_kv=allow_kv,
            acceptance=acceptance,
        ),
    )
    shown = document(made.plan, subject.describe(), made.acceptance_from, made.sweep() if sweep else ())
    if ui.flags().json:
        from ggufspec.schema.base import to_json

        ui.data(to_json(shown))
    else:
        _show(shown)
    return 0


def _show(document: PlanDocument) -> None:
    from rich.text import Text

    from ggufspec.planning.calibration import DEFAULT_OVERHEAD_BYTES
    from ggufspec.reports import plan as report

    out = ui.out()
    planned.show_shapes(out, document.pair)
    for line in report.bars(document, min(out.width, 100)):
        out.print(line)
    out.print(report.table(document))
    if len(document.sweep) > 1:
        out.print(report.sweep(document))
    elif document.sweep:
        out.print(
            "No card is here: nothing is offloaded, whatever -ngl says. --gpu or --vram sweeps over a card's layers."
        )
    out.print(Text(document.why, style="bold green" if document.choice == "speculative" else "bold"))
    source = "llama.cpp's own (its dry run)" if document.confirmed else "by formula, not llama.cpp's own"
    out.print(f"Bytes are {source}. Speeds are predictions, {document.speed}.", style="dim")
    if any(device.overhead_bytes == DEFAULT_OVERHEAD_BYTES for device in document.devices):
        out.print("The driver's overhead is a guess until a bench has run on the card.", style="dim")
    if document.draft is not None or document.options["speculative"] is not None:
        out.print(f"Acceptance: {document.settings['acceptance_from']}.", style="dim")
    for note in document.notes:
        out.print(Text(f"Note: {note}.", style="yellow"))
    if ui.flags().verbose:
        for device in document.devices:
            error = device.formula_error_bytes
            off = f"the formula is {error / 2**20:+,.2f} MiB from llama.cpp's figure"
            out.print(f"{device.name}: {off}.", style="dim")
