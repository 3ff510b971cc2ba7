"""From names on the command line to a plan: what the options say, and what is seen while a plan is made.

The plan itself is made by :mod:`ggufspec.decoding.planned`, whose names are here too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggufspec.bench.learned import learn
from ggufspec.cli import ui
from ggufspec.cli.options import kv_types as parse_kv_types
from ggufspec.decoding import planned as core
from ggufspec.decoding.planned import Asked, Chosen, Made, OnEvent, Placed, of_pair, site
from ggufspec.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from ggufspec.cli.given import Decoding, Drafting, Placing
    from ggufspec.decoding.options import DecoderOptions
    from ggufspec.models.profile import Pair, Settings
    from ggufspec.planning.survey import Site

__all__ = [
    "Asked",
    "Chosen",
    "Made",
    "Placed",
    "asked_of",
    "calibrate",
    "calibrate_if_due",
    "choose",
    "decoder",
    "learn",
    "make",
    "of_pair",
    "place",
    "placement_asked",
    "settle",
    "show_shapes",
    "site",
    "telling",
]


def choose(name: str | None, model: str | None, draft: str | None, repo: str | None, draft_repo: str | None) -> Chosen:
    """The pair that PAIR, ``-m``, ``-md``, ``-hf`` and ``-hfd`` mean; nothing needs to be here.

    Raises:
        GgufspecError: two of them contradict, or a profile is not there.
    """
    from ggufspec.models.hub import hub_file
    from ggufspec.models.profile import Settings, load_profile

    if model is not None and repo is not None:
        raise UsageError("both -m and -hf are given", "give one of them")
    if draft is not None and draft_repo is not None:
        raise UsageError("both -md and -hfd are given", "give one of them")
    own_draft = hub_file(draft_repo) if draft_repo else draft
    if model is not None or repo is not None:
        if name is not None:
            raise UsageError("both a PAIR and a model are given", "give one of them")
        target = hub_file(repo) if repo else str(model)
        return Chosen(Path(str(model or repo)).stem, target, own_draft, Settings())
    with ui.making() as tell:
        chosen = core.of_profile(load_profile(name or "demo"), tell)
    return replace(chosen, draft=own_draft, gpu_layers_draft=None) if own_draft else chosen


def show_shapes(out: Console, pair: dict[str, Any]) -> None:
    """A line for each model of a document's pair."""
    from rich.text import Text

    for role in ("target", "draft"):
        if shape := pair.get(f"{role}_shape"):
            out.print(Text.assemble((f"{role:<6} ", "bold"), str(shape)))


def placement_asked(
    chosen: Chosen | Pair,
    *,
    gpu_layers: str | None,
    gpu_layers_draft: str | None,
    tensor_split: str | None,
    n_cpu_moe: int | None,
    draft_max: int | None,
    headroom: str | None,
    rpc: Sequence[str] | None,
    gpu: Sequence[str] | None = None,
    vram: Sequence[str] | None = None,
    allow_kv: str | None = None,
    acceptance: float | None = None,
) -> Asked:
    """The placement options of a command, as they were typed, over what the profile fixes."""
    return core.asked(
        chosen,
        gpu_layers=gpu_layers,
        gpu_layers_draft=gpu_layers_draft,
        split=[float(share) for share in tensor_split.split(",")] if tensor_split else (),
        n_cpu_moe=n_cpu_moe,
        kv_types=parse_kv_types(allow_kv),
        draft_max=draft_max,
        acceptance=acceptance,
        gpu=gpu or (),
        vram=vram or (),
        headroom=headroom,
        rpc=rpc or (),
    )


@contextmanager
def telling() -> Iterator[OnEvent]:
    """Says on an interactive stderr what is done for a plan: the events of :func:`ggufspec.decoding.planned.make`."""
    with ui.busy() as say:
        yield lambda event: say(f"reading the header of {event['file']}: {event['bytes'] / 1e6:.1f} MB")


def make(
    chosen: Chosen,
    options: DecoderOptions,
    asked: Asked,
    *,
    where: Site | None = None,
) -> Made:
    """:func:`ggufspec.decoding.planned.make`, and what it does is seen."""
    with telling() as tell:
        return core.make(chosen, options, asked, where=where, on_event=tell, verbose=ui.flags().verbose)


def place(
    chosen: Chosen,
    options: DecoderOptions,
    asked: Asked,
    *,
    rival: bool = False,
) -> Placed:
    """:func:`ggufspec.decoding.planned.place`, and what it does is seen."""
    with telling() as tell:
        return core.place(chosen, options, asked, rival=rival, on_event=tell, verbose=ui.flags().verbose)


def settle(
    chosen: Chosen,
    placing: Placing,
    decoding: Decoding,
    drafting: Drafting,
    *,
    gpu: Sequence[str] | None = None,
    vram: Sequence[str] | None = None,
    rival: bool = False,
) -> Placed:
    """How a pair runs: what the command line says, over the profile, over the plan.

    Args:
        chosen: the pair.
        placing: where layers go, as far as the command line says.
        decoding: context, threads and cache.
        drafting: who guesses.
        gpu: cards that are not here, by name.
        vram: cards that are not here, by memory.
        rival: plan the best target-only run too.

    Raises:
        GgufspecError: a value is out of range, nothing fits, or a header cannot be read.
    """
    options = decoder(chosen.settings, decoding, drafting)
    fixed = asked_of(chosen, placing, drafting, gpu=gpu, vram=vram)
    return place(chosen, options, fixed, rival=rival)


def asked_of(
    chosen: Chosen | Pair,
    placing: Placing,
    drafting: Drafting,
    *,
    gpu: Sequence[str] | None = None,
    vram: Sequence[str] | None = None,
    allow_kv: str | None = None,
) -> Asked:
    """:func:`placement_asked` of groups of options."""
    return placement_asked(
        chosen,
        gpu_layers=placing.gpu_layers,
        gpu_layers_draft=placing.gpu_layers_draft,
        tensor_split=placing.tensor_split,
        n_cpu_moe=placing.n_cpu_moe,
        draft_max=drafting.draft_max,
        headroom=placing.headroom,
        rpc=placing.rpc,
        gpu=gpu,
        vram=vram,
        allow_kv=allow_kv,
    )


def decoder(settings: Settings, decoding: Decoding, drafting: Drafting) -> DecoderOptions:
    """The decoder's options, everything on the CPU still: what the command line says, over the profile.

    Raises:
        UsageError: a value is out of range, or a name is not known.
    """
    return core.decoder_options(
        settings,
        ctx_size=decoding.ctx_size,
        threads=decoding.threads,
        cache_type_k=decoding.cache_type_k,
        cache_type_v=decoding.cache_type_v,
        flash_attn=decoding.flash_attn,
        ubatch_size=decoding.ubatch_size,
        drafter=drafting.drafter,
        draft_policy=drafting.draft_policy,
        draft_max=drafting.draft_max,
        lookup_corpus=drafting.lookup_corpus,
        accept=drafting.accept,
        strict=drafting.strict,
    )


def calibrate(threads: int, rpc: tuple[str, ...], *, fixed: bool) -> None:
    """Measure this machine for ten to twenty seconds; later plans use it.

    Args:
        threads: of the host, as plans have them.
        rpc: workers that are measured, too.
        fixed: whether so many threads are wanted whatever else runs.

    Raises:
        GgufspecError: llama.cpp died over it, or an RPC worker does not answer.
    """
    from ggufspec.cache import cache_folder
    from ggufspec.decoding.threads import Threads
    from ggufspec.planning import calibration

    left = Threads(threads if fixed else 0, cores=threads).start()
    with ui.busy() as say:
        speed = calibration.measure(
            cache_folder(),
            calibration.Spec(threads, rpc, left),
            on_event=lambda event: say(f"measuring this machine: {event['type']} on {event['device']}"),
            verbose=ui.flags().verbose,
        )
    if speed.disturbed == calibration.CONTRADICTS:
        ui.note(f"this measurement is not kept: {speed.disturbed}. Try again when fewer other programs run")
    elif speed.disturbed:
        ui.note(
            f"this machine was measured while {speed.disturbed}: an idle one is faster, and a plan on it measures again"
        )


def calibrate_if_due(threads: int, rpc: tuple[str, ...], *, fixed: bool) -> None:
    """:func:`calibrate` where this machine was measured while it was busy, and is idle now; it is said.

    Raises:
        GgufspecError: as :func:`calibrate`.
    """
    from ggufspec.cache import cache_folder
    from ggufspec.hardware import host
    from ggufspec.planning import calibration

    why = calibration.is_due(cache_folder(), threads, host.usable_cpus(), host.others_cpus)
    if why:
        ui.note(f"this machine was measured while {why}: it is measured again, which takes 10 to 20 seconds")
        calibrate(threads, rpc, fixed=fixed)
