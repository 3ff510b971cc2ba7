"""Conversion of settings to the decoder's options, placements, sampling, and the machine to plan for."""

from __future__ import annotations

import codecs
from dataclasses import replace
from pathlib import Path

from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import UsageError
from ggufspec.files import untrusted
from ggufspec.files.cache import cache_folder
from ggufspec.hardware.host import physical_cores
from ggufspec.llamacpp.options import HOST, Placement
from ggufspec.models.header import ModelHeader
from ggufspec.planning import catalogue
from ggufspec.planning import machine as machines
from ggufspec.planning.plan import FREE, PlanMachine
from ggufspec.settings.registry import parse_drafters
from ggufspec.settings.table import FIXED_DRAFT_MAX, OPTIONS, Settings, names

_LOOK_BYTES = 2**16


def decoder_options(wanted: Settings) -> DecoderOptions:
    """Return checked decoder options before models are loaded; until a plan is made, they place all layers on the CPU.

    Raises:
        UsageError: options contradict each other, or the lookup corpus cannot be read.
    """
    if wanted.lookup_corpus is not None:
        _check_text(wanted.lookup_corpus)  # reports a typo before the models are loaded
    options = wanted.given(name for name in DecoderOptions.__dataclass_fields__ if name in OPTIONS)
    if wanted.drafter is not None:
        options["drafters"] = parse_drafters(wanted.drafter)
    if wanted.draft_policy == "fixed":
        options.setdefault("draft_max", FIXED_DRAFT_MAX)
    if wanted.cpu:
        options.setdefault("threads", _cores(wanted.cpu).count)
    return DecoderOptions(**options)


def with_context(options: DecoderOptions, target: ModelHeader) -> DecoderOptions:
    """Replace ``-c max`` with the target's training context; raise UsageError if its header does not state it."""
    if options.ctx_size or target.context_length:
        return replace(options, ctx_size=options.ctx_size or target.context_length)
    raise UsageError(f"{target.name} does not state its training context", "give a number: -c 8192")


def check_caches(options: DecoderOptions) -> None:
    """Raise UsageError if a cache type needs flash attention, which is off (llama_init_from_model in llama.cpp)."""
    caches = [("-ctv", options.cache_type_v)] + [("-ctvd", options.cache_type_v_draft)] * options.needs_draft
    for flag, kind in caches if options.flash_attn == "off" else ():
        if kind not in ("f16", "bf16", "f32"):
            raise UsageError(f"{flag} {kind} needs flash attention, but -fa is off", f"-fa on, or {flag} f16")


def sampling(given: Settings) -> Sampling:
    """Return the sampling options, which a profile cannot set; raise UsageError if a value is out of range."""
    values = {name: given.value(name) for name in names(group="sampling")}
    return Sampling(temperature=values.pop("temp"), **values)


def layers_of(value: int | str | None) -> int | None:
    """Convert a layer count to the plan's form: -1 for all layers, None for ``auto``."""
    return max(value, -1) if isinstance(value, int) else None


def placement_of(wanted: Settings) -> tuple[Placement, frozenset[str]]:
    """Return the target's given placement, and the fields in :data:`ggufspec.planning.plan.FREE` left to the plan."""
    given = {name: getattr(wanted, name) for name in Placement.__dataclass_fields__ if name in OPTIONS}
    given |= {"gpu_layers": layers_of(wanted.gpu_layers), "split": wanted.tensor_split}
    given = {name: value for name, value in given.items() if value is not None}
    return Placement(**given), FREE - given.keys()


def placement_of_draft(wanted: Settings) -> tuple[Placement, frozenset[str]]:
    """Return the draft's given placement, and the fields left to the plan."""
    return placement_of(replace(unplaced(wanted), gpu_layers=wanted.gpu_layers_draft))


def unplaced(wanted: Settings) -> Settings:
    """Return the settings with the whole placement left to the plan."""
    return replace(wanted, **dict.fromkeys(names(group="placement")))


def machine_to_plan_for(wanted: Settings, threads: int) -> PlanMachine:
    """Return the machine to plan for, with the GPUs named in the settings or, by default, this machine's.

    Raises:
        UsageError: a size is invalid, a GPU is unknown, or RPC workers are combined with GPUs that are not installed.
    """
    headroom = machines.DEFAULT_HEADROOM_BYTES
    if wanted.headroom is not None:
        headroom = machines.parse_size(wanted.headroom, "--headroom")
    folder = cache_folder()
    if wanted.cpu:  # local GPUs were measured with this machine's number of threads
        threads = wanted.threads or physical_cores()
    if wanted.gpu or wanted.vram:
        if wanted.rpc:
            raise UsageError("--rpc cannot be combined with --gpu or --vram", "give one or the other")
        sizes = [machines.parse_size(size, "--vram") for size in wanted.vram or ()]
        found = machines.simulated_cards(
            wanted.gpu or (), sizes, headroom_bytes=headroom, folder=folder, threads=threads
        )
    else:
        found = machines.this_machine(wanted.rpc or (), headroom_bytes=headroom, folder=folder, threads=threads)
    if wanted.ram:
        found = machines.with_memory(found, machines.parse_size(wanted.ram, "--ram"))
    speed, cores = found.speed, catalogue.CpuCores() if found.simulated else catalogue.cores_here(threads)
    if wanted.cpu:
        cores = _cores(wanted.cpu)
    if found.cards:
        speed = replace(speed, repacked=catalogue.repacked(cores))
    if wanted.ram_bandwidth or wanted.cpu:
        memory = 1e9 * wanted.ram_bandwidth if wanted.ram_bandwidth else catalogue.DESKTOP_BYTES_PER_S
        here = catalogue.guessed_host(memory, cores, repacked=not found.cards)
        cards = speed.origin.partition(";")[0] if found.simulated else speed.origin
        cards = cards if found.cards else "from the catalogue"
        origin = f"{cards}; assuming {cores} and memory of {memory / 1e9:g} GB/s"
        speed = replace(speed, devices=speed.devices | {HOST: here}, origin=origin, disturbed="")
    if wanted.link:
        generation, lanes = map(int, wanted.link.removeprefix("pcie").split("x"))
        link_bytes_per_s = catalogue.link_bytes_per_s(generation, lanes)
        speed = replace(speed, link_bytes_per_s=link_bytes_per_s, origin=f"{speed.origin}; assuming {wanted.link}")
    return replace(found, speed=speed)


def _cores(named: str) -> catalogue.CpuCores:
    """Parse a ``--cpu`` value, e.g. 8xavx2."""
    count, _, vectors = named.partition("x")
    return catalogue.CpuCores(int(count), vectors)


def _check_text(file: Path) -> None:
    """Raise UsageError if a text file cannot be read or does not begin with valid UTF-8."""
    beginning = untrusted.read_bytes(file, _LOOK_BYTES, failure=UsageError, cut=True)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning)
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: {error}", "convert it to UTF-8") from None
