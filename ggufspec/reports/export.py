"""Export of a placed pair as settings for other programs. Pure: settings in, command lines and files out.

Layers, context cells and KV types come from the plan; notes list settings that a program does not support.
Sources: llama.cpp common/arg.cpp, common/preset.cpp, common/speculative.cpp and tools/llama-bench/llama-bench.cpp;
llama-swap config-schema.json and internal/config; Ollama llm/llama_server.go and parser/parser.go; LM Studio's lms,
src/subcommands/load.ts.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import UsageError
from ggufspec.llamacpp.library import min_batch_from_environment
from ggufspec.llamacpp.options import (
    DENSE_FFN,
    EXPERTS,
    HOST,
    OP_OFFLOAD_MIN_BATCH,
    ContextOptions,
    Placement,
    parse_override,
)
from ggufspec.models.locate import part_names
from ggufspec.schema.export import ExportDocument
from ggufspec.settings.table import OPTIONS

_WITH_CHAT = ("llama-server", "llama-cli")
# Programs for benchmarks, which use the pair's placement even if the plan chose target-only
ALWAYS_AS_A_PAIR = ("llama-bench", "llama-speculative-simple")
Options: TypeAlias = Mapping[str, str | int]  # values by flag; True turns a switch on, empty values are omitted
_ALL = 999  # number that means all layers, because for Ollama a negative one means "choose for me"
_RATIO_STEPS = 10_000
_ANOTHER_NAME = "give the file another name: ln -s"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """GGUF file, named by its path or, with ``repo``, by its name in that Hugging Face repository."""

    name: str
    repo: str = ""


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """Settings to export; ``placement`` and ``context`` are the target's."""

    target: ModelFile
    draft: ModelFile | None  # None: target-only
    options: DecoderOptions
    blocks: int = 0  # number of blocks in the target, of which LM Studio offloads a share
    devices: tuple[str, ...] = ()  # offload devices in llama.cpp's order, needed to name the draft's device
    rpc: tuple[str, ...] = ()  # endpoints of RPC workers, whose devices come first
    name: str = "model"  # name of the pair on a server with several models
    why: str = ""  # summary of the plan for comments in the file; empty without a plan
    mmproj: ModelFile | None = None  # image projector for llama-server and llama-cli
    mmproj_offload: bool = True  # True to put the projector on the GPU

    @property
    def placement(self) -> Placement:
        return self.options.target

    @property
    def context(self) -> ContextOptions:
        return self.options.context(with_draft=self.draft is not None)

    @property
    def drafts(self) -> bool:
        """True if there is a draft file or an MTP head in the target's file."""
        return self.draft is not None or self.options.head == "mtp"


def export_for(program: str, settings: ExportSettings) -> ExportDocument:
    """Return ``settings`` as a command or a file for one of :data:`PROGRAMS`.

    Raises:
        UsageError: the program cannot express a setting or a file name that it needs.
    """
    form = _FORMATS[program]
    command = form.command(program, settings) if form.command else []
    notes = tuple(filter(None, (settings.why, _context_note(settings.context), *form.notes(program, settings))))
    comments = [f"{form.comment} {note}" for note in notes] if form.comment else []
    text = "\n".join([*comments, *form.lines(settings), *([shlex.join(command)] if command else [])])
    return ExportDocument(program, text, tuple(command), notes)


def _context_note(context: ContextOptions) -> str:
    if not context.ctx_size or context.cells == context.ctx_size:
        return ""
    given = f"the context of {context.cells} tokens is the plan's {context.ctx_size} plus room for a draft"
    return f"{given}, rounded up as llama.cpp does"


# ---- llama.cpp's programs --------------------------------------------------------------------------------------------


def _given(options: Options) -> list[tuple[str, ...]]:
    """Return (flag, value) for each option that has a value, and (flag,) for each switch that is on."""
    return [(flag,) if value is True else (flag, str(value)) for flag, value in options.items() if value]


def _command(program: str, options: Options, settings: ExportSettings) -> list[str]:
    variable = _variable(settings)
    return [*(["env", variable] if variable else []), program, *itertools.chain.from_iterable(_given(options))]


def _variable(settings: ExportSettings) -> str:
    """Return ``NAME=VALUE`` for op_offload_min_batch, which llama.cpp has no option for; "" if the default applies."""
    context, usual = settings.context, (None, OP_OFFLOAD_MIN_BATCH)
    is_usual = context.op_offload_min_batch == OP_OFFLOAD_MIN_BATCH and min_batch_from_environment() in usual
    return "" if is_usual or not context.op_offload else "=".join(*context.environment.items())


def _llama(program: str, settings: ExportSettings) -> list[str]:
    return _command(program, _options(program, settings), settings)


def _options(program: str, settings: ExportSettings) -> Options:
    context, placement, projector = settings.context, settings.placement, settings.mmproj
    has_chat = program in _WITH_CHAT
    if not (has_chat or settings.drafts):
        raise UsageError(f"{program} needs a draft", "--to llama-cli runs target-only")
    overrides = _overrides(settings) if placement.override_tensor else ()  # overrides include --n-cpu-moe, --n-cpu-ffn
    return {
        **_file(settings.target),
        "-ngl": _layers(placement),
        "-ts": ",".join(map(_number, placement.split)),
        "--n-cpu-moe": 0 if overrides else placement.n_cpu_moe,
        "--n-cpu-ffn": 0 if overrides else placement.n_cpu_ffn,
        "-c": context.cells,
        "-b": context.batch if has_chat else context.cells,  # llama-speculative-simple decodes the prompt in one batch
        "-ub": context.computed,
        **_cache(context),
        "-t": context.threads,
        "--swa-full": context.swa_full,
        "--no-op-offload": not context.op_offload,
        "--no-host": placement.no_host,
        **_load_mode(placement),
        "--fit": "off",  # because --fit would change options that are not set, such as the split
        "--rpc": ",".join(settings.rpc),
        "-ot": ",".join(overrides),  # must follow --rpc, whose devices it may name
        **(_projector(projector, offloaded=settings.mmproj_offload) if has_chat and projector else {}),
        # Otherwise, llama.cpp with -hf would also download an image model's projector and put it on the GPU
        "--no-mmproj": has_chat and not projector and bool(settings.target.repo),
        "-np": int(program == "llama-server"),  # one slot, because each additional slot needs its own context
        **(_draft(settings) if settings.drafts else {}),
    }


def _projector(file: ModelFile, *, offloaded: bool) -> Options:
    address = f"https://huggingface.co/{file.repo}/resolve/main/{file.name}" if file.repo else file.name
    return {"--mmproj-url" if "://" in address else "--mmproj": address, "--no-mmproj-offload": not offloaded}


def _draft(settings: ExportSettings) -> Options:
    options, context = settings.options, settings.options.draft_context()
    draft = settings.draft or ModelFile("")  # without a name if the head is in the target's file
    return {
        "-hfd": draft.repo,
        "-md": draft.name,
        "-ngld": draft.name and _layers(options.draft_placement),
        "-devd": _only_device(settings) if _splits_differ(settings) else "",
        "-ctkd": context.cache_type_k,
        "-ctvd": context.cache_type_v,
        # Names: common_speculative_type_from_name_map in common/speculative.cpp
        "--spec-type": f"draft-{options.head or 'simple'}",
        "--spec-draft-n-max": options.draft_max,
    }


def _overrides(settings: ExportSettings) -> tuple[str, ...]:
    """Return the placement's overrides as ``PATTERN=BUFFER``; names of RPC buffers contain endpoints (ggml-rpc.cpp).

    All overrides are in ``-ot``, because the first match wins and presets would put ``--n-cpu-moe`` before ``-ot``.
    """
    placement = settings.placement
    workers = [device for device in settings.devices if device.startswith("RPC")]
    names = {}
    if len(settings.rpc) == 1:
        names = {device: f"RPC{index}[{settings.rpc[0]}]" for index, device in enumerate(workers)}
    elif len(workers) == len(settings.rpc):
        names = {device: f"RPC0[{endpoint}]" for device, endpoint in zip(workers, settings.rpc, strict=True)}
    blocks = ((EXPERTS, placement.n_cpu_moe), (DENSE_FFN, placement.n_cpu_ffn))
    return (
        *(f"{pattern}={names.get(on, on)}" for pattern, on in map(parse_override, placement.override_tensor)),
        *(rf"blk\.({'|'.join(map(str, range(count)))}){part}={HOST}" for part, count in blocks if count),
    )


def _llama_notes(program: str, settings: ExportSettings) -> Iterator[str]:
    yield from _file_notes(settings)
    if program in _WITH_CHAT:
        yield f"{program} caches old prompts in up to 8 GiB of RAM; --cache-ram 0 turns that off"
    else:
        yield "add a prompt: -p TEXT -n TOKENS"
    if settings.drafts:
        yield "above temperature 0 llama.cpp uses another acceptance rule, so its acceptance rate is not ggufspec's"
        if _splits_differ(settings) and not _only_device(settings):
            yield "its -ts also splits the draft, so the draft's layers are not where the plan puts them"


def _llama_bench(program: str, settings: ExportSettings) -> list[str]:
    context, placement, target = settings.context, settings.placement, settings.target
    if "f32" in (context.cache_type_k, context.cache_type_v):  # ggml_type_from_name in llama-bench.cpp lacks it
        raise UsageError("llama-bench has no f32 cache", "-ctk f16 -ctv f16, or another program")
    if "," in target.name:
        raise UsageError(f"llama-bench splits {target.name!r} at the comma", _ANOTHER_NAME)
    has_overrides = bool(placement.override_tensor or placement.n_cpu_ffn)  # llama-bench has no --n-cpu-ffn
    options: Options = {
        **_file(target),
        "-ngl": str(max(placement.gpu_layers, -1)),
        "-ts": "/".join(map(_number, placement.split)),
        "-rpc": ",".join(settings.rpc),  # must precede -ot, which may name RPC devices
        "-ot": ";".join(_overrides(settings)) if has_overrides else "",
        "-ncmoe": 0 if has_overrides else placement.n_cpu_moe,
        "-b": context.batch,
        "-ub": context.computed,
        **_cache(context),
        "-nopo": int(not context.op_offload),
        "--no-host": int(placement.no_host),
        **_load_mode(placement),
        "-t": context.threads,
    }
    return _command(program, options, settings)


def _bench_notes(_: str, settings: ExportSettings) -> Iterator[str]:
    yield from _file_notes(settings)
    context = settings.context
    yield (
        "its context is only as long as its test, which takes less memory than planned; "
        f"-p 0 -n 128 -d {max(context.cells - 128, 0)} fills the plan's {context.cells} cells first"
    )
    if context.swa_full:
        yield "it has no --swa-full: a layer with a sliding window caches only its window"
    if settings.draft:
        yield "it cannot use a draft: this measures target-only, with the layers planned for the pair"


def _file_notes(settings: ExportSettings) -> Iterator[str]:
    if settings.target.repo or (settings.draft and settings.draft.repo):
        yield "llama.cpp downloads the newest files from the hub, because it cannot name a revision"
    there = {device for _, device in map(parse_override, settings.placement.override_tensor)} - {HOST}
    if unknown := sorted(there - {*settings.devices}):
        yield f"-ot names {', '.join(unknown)}, not found on this machine: use llama.cpp's names, such as CUDA0"


def _file(target: ModelFile) -> Options:
    return {"-hf": target.repo, "-hff" if target.repo else "-m": target.name}


def _load_mode(placement: Placement) -> Options:
    return {"-lm": placement.load_mode} if placement.load_mode != "auto" else {}


def _cache(context: ContextOptions) -> Options:
    return {"-ctk": context.cache_type_k, "-ctv": context.cache_type_v, "-fa": context.flash_attn}


def _layers(placement: Placement) -> str:
    return "all" if placement.gpu_layers < 0 else str(placement.gpu_layers)


def _number(share: float) -> str:
    return f"{share:.9g}"  # nine digits identify a float32


def _only_device(settings: ExportSettings) -> str:
    """Return the only device with draft layers; "" if there are several or its name is unknown."""
    used = [index for index, share in enumerate(settings.options.draft.split) if share > 0]
    return settings.devices[used[0]] if len(used) == 1 and used[0] < len(settings.devices) else ""


def _splits_differ(settings: ExportSettings) -> bool:
    """Return whether llama.cpp would split the draft differently, because it applies one split to both models."""
    target, draft = settings.options.target.split, settings.options.draft.split
    if settings.options.draft.gpu_layers == 0 or max(len(target), len(draft)) < 2:
        return False
    if not sum(target) or not sum(draft):
        return True
    pairs = itertools.zip_longest(target, draft, fillvalue=0.0)
    return not all(math.isclose(of_target / sum(target), of_draft / sum(draft)) for of_target, of_draft in pairs)


# ---- files with llama-server's options ---------------------------------------------------------------------------

# Long names of flags, from common/arg.cpp; flags that are not listed are already long
_LONG = {row.flags[0]: row.flags[-1] for row in OPTIONS.values() if row.flags} | {
    "-hff": "--hf-file",
    "-ngl": "--n-gpu-layers",
    "-b": "--batch-size",
    "-ot": "--ot",
    "-ngld": "--n-gpu-layers-draft",
    "-devd": "--device-draft",
    "-ctkd": "--cache-type-k-draft",
    "-ctvd": "--cache-type-v-draft",
}


def _preset(settings: ExportSettings) -> Iterator[str]:
    """Yield a section of the INI file for ``llama-server --models-preset FILE``.

    A value ends at the first ``;`` or ``#`` and cannot be quoted. A name cannot contain ``]``, and is upper-cased after
    a colon; the name ``*`` means all models. Source: common/preset.cpp.
    """
    if not _is_plain(settings.name) or settings.name == "*" or set(settings.name) & set("]:"):
        raise UsageError(f"a preset cannot be named {settings.name!r}", _ANOTHER_NAME)
    yield f"[{settings.name}]"
    for flag, *value in _given(_options("llama-server", settings)):
        text = value[0] if value else "true"
        if not _is_plain(text) or set(text) & set(";#"):
            raise UsageError(f"a preset cannot contain {text!r}", _ANOTHER_NAME)
        yield f"{_LONG.get(flag, flag)[2:]} = {text}"


def _is_plain(text: str) -> bool:
    return text.isprintable() and text == text.strip()


def _preset_notes(_: str, settings: ExportSettings) -> Iterator[str]:
    yield "llama-server --models-preset FILE; sections for several pairs go into one file"
    yield "the plan gives all memory to one model: --models-max 1 keeps only one loaded"
    if variable := _variable(settings):
        yield f"the plan assumes a server that is started with {variable}"
    yield from _llama_notes("llama-server", settings)


def _swap(settings: ExportSettings) -> Iterator[str]:
    """Yield llama-swap's configuration, which maps the model name used in requests to a llama-server command.

    JSON strings are valid YAML. ``${…}`` is a macro wherever it occurs, and a ``cmd`` line that begins with ``#`` is a
    comment. Source: llama-swap internal/config/macros.go and commands.go.
    """
    options = [shlex.join(option) for option in _given(_options("llama-server", settings))]
    for text in (settings.name, *options):
        if not text.isprintable() or "${" in text:
            raise UsageError(f"llama-swap cannot take {text!r}", _ANOTHER_NAME)
    yield "models:"
    yield f"  {json.dumps(settings.name, ensure_ascii=False)}:"
    yield "    cmd: |"
    yield from (f"      {line}" for line in ("llama-server --port ${PORT}", *options))
    if variable := _variable(settings):
        yield f"    env: [{variable}]"


def _swap_notes(_: str, settings: ExportSettings) -> Iterator[str]:
    yield "llama-swap --config FILE; models for several pairs go under one models:"
    yield "a model that takes longer than 120 s to load needs healthCheckTimeout: SECONDS next to models:"
    yield from _llama_notes("llama-server", settings)


# ---- Ollama ----------------------------------------------------------------------------------------------------------


def _modelfile(settings: ExportSettings) -> Iterator[str]:
    """Yield a Modelfile for ``ollama create NAME -f FILE``; Ollama passes ``num_gpu`` to llama-server as ``-ngl``."""
    target, context, layers = settings.target, settings.context, settings.placement.gpu_layers
    if not target.name.isprintable():  # Ollama's parser drops unprintable characters
        raise UsageError(f"a Modelfile cannot name {target.name!r}", _ANOTHER_NAME)
    first, *more = part_names(target.name)
    if more or (target.repo and "/" in target.name):
        what = f"model that is split into {1 + len(more)} files" if more else "file in a folder of a repository"
        way = f"hf download {target.repo} {shlex.join([first, *more])} --local-dir . && " if target.repo else ""
        way += f"llama-gguf-split --merge {shlex.quote(first)} ONE.gguf && " if more else ""
        one = "ONE.gguf" if more else shlex.quote(first)
        raise UsageError(f"Ollama cannot load a {what}: {target.name}", f"{way}ggufspec export -m {one} --to ollama")
    yield f"FROM hf.co/{target.repo}:{target.name}" if target.repo else f"FROM {target.name}"
    yield f"PARAMETER num_gpu {_ALL if layers < 0 else layers}"
    yield f"PARAMETER num_ctx {context.cells}"
    yield f"PARAMETER num_batch {context.batch}"
    yield f"PARAMETER num_thread {context.threads}"


def _ollama_notes(_: str, settings: ExportSettings) -> Iterator[str]:
    context, placement = settings.context, settings.placement
    yield "num_gpu includes the output layer, like -ngl; older versions of Ollama offload that layer last"
    yield "the plan is for one request at a time: OLLAMA_NUM_PARALLEL=1 ollama serve"
    if settings.target.repo:
        yield "Ollama downloads the newest file from the hub, because it cannot name a revision"
    if settings.draft:
        yield "target-only: Ollama cannot use a draft model, only MTP and DFlash heads"
    if context.cache_type_k != context.cache_type_v:
        yield f"Ollama has one type for both caches, not {context.cache_type_k} and {context.cache_type_v}"
    elif context.cache_type_k != "f16":
        yield f"the server sets the cache's type: OLLAMA_KV_CACHE_TYPE={context.cache_type_k} ollama serve"
    if context.flash_attn != "auto":
        switch = int(context.flash_attn == "on")
        yield f"the server sets flash attention: OLLAMA_FLASH_ATTENTION={switch} ollama serve"
    if context.swa_full:
        yield "Ollama has no --swa-full: a layer with a sliding window caches only its window"
    if placement.n_cpu_moe:
        yield f"Ollama cannot keep the experts of {placement.n_cpu_moe} layers on the CPU"
    yield from _lacks("Ollama", settings)


def _lacks(program: str, settings: ExportSettings) -> Iterator[str]:
    """Yield notes about settings that neither Ollama nor LM Studio supports."""
    if count := settings.placement.n_cpu_ffn:
        yield f"{program} cannot keep the feed-forward weights of {count} layers on the CPU"
    if settings.placement.override_tensor:
        yield f"{program} has no -ot: every tensor goes where its layer goes"
    if not settings.context.op_offload:
        yield f"{program} has no --no-op-offload: prompts take more GPU memory than planned"
    if (mode := settings.placement.load_mode) != "auto":
        yield f"{program} has no -lm {mode}: it decides itself how weights are loaded"
    if settings.placement.no_host:
        yield f"{program} has no --no-host: the CPU computes batches more slowly"
    if variable := _variable(settings):
        yield f"the plan assumes that {program} is started with {variable} in its environment"
    if settings.placement.split:
        yield f"{program} divides layers over several GPUs by itself, not by the plan's split"
    if settings.rpc:
        yield f"{program} has no RPC workers, so the layers planned for them have no place"


# ---- LM Studio -------------------------------------------------------------------------------------------------------


def _lms_load(_: str, settings: ExportSettings) -> list[str]:
    name = settings.target.name
    model = f"{settings.target.repo}/{name}" if settings.target.repo else name.rpartition("/")[2]
    return ["lms", "load", model, "--gpu", _share(settings), "--context-length", str(settings.context.cells)]


def _lm_studio_window(settings: ExportSettings) -> Iterator[str]:
    """Yield the load settings, named as in LM Studio's window."""
    context, placement, draft = settings.context, settings.placement, settings.draft
    blocks = f"{max(placement.gpu_layers - 1, 0)} of {settings.blocks}"
    rows = _given(
        {
            "Context Length": context.cells,
            "GPU Offload": "all" if _share(settings) == "max" else blocks,
            "CPU Thread Pool Size": context.threads,
            "Evaluation Batch Size": context.batch,
            "Offload KV Cache to GPU Memory": "on",
            "Flash Attention": context.flash_attn,
            "K Cache Quantization Type": context.cache_type_k,
            "V Cache Quantization Type": context.cache_type_v,
            "Layers with MoE weights forced onto CPU": placement.n_cpu_moe,
            "Draft Model (chat sidebar)": draft.name.rpartition("/")[2] if draft else "",
            "Draft Max (chat sidebar)": settings.options.draft_max if draft else "",
        }
    )
    width = max(len(name) for name, _ in rows) + 2
    yield from (f"# {name:<{width}}{value}" for name, value in rows)


def _share(settings: ExportSettings) -> str:
    """Return the share of blocks for LM Studio, slightly raised so that LM Studio's rounding does not lose a block."""
    layers, blocks = settings.placement.gpu_layers, settings.blocks
    if layers < 0 or layers > blocks:
        return "max"
    return "off" if layers <= 1 else f"{((layers - 1) * _RATIO_STEPS // blocks + 1) / _RATIO_STEPS:g}"


def _lm_studio_notes(_: str, settings: ExportSettings) -> Iterator[str]:
    yield "lms load sets context and GPU offload; set the rest in LM Studio's load window"
    yield "GPU Offload does not count the output layer; LM Studio's log says how many layers it offloaded"
    if not settings.target.repo:
        yield f"LM Studio sees only its own folder: {shlex.join(['lms', 'import', settings.target.name])}"
    if settings.draft:
        yield "choose the draft in the chat sidebar, Speculative Decoding; LM Studio decides where to put it"
    yield from _lacks("LM Studio", settings)


# ---- the programs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Format:
    """Export format for a program: a command, or lines of a file and the character that begins its comments."""

    notes: Callable[[str, ExportSettings], Iterator[str]]
    command: Callable[[str, ExportSettings], list[str]] | None = None
    lines: Callable[[ExportSettings], Iterable[str]] = lambda _: ()
    comment: str = ""


_FORMATS = {
    **dict.fromkeys(_WITH_CHAT, _Format(_llama_notes, _llama)),
    "models-preset": _Format(_preset_notes, lines=_preset, comment=";"),
    "llama-swap": _Format(_swap_notes, lines=_swap, comment="#"),
    "llama-bench": _Format(_bench_notes, _llama_bench),
    "llama-speculative-simple": _Format(_llama_notes, _llama),
    "ollama": _Format(_ollama_notes, lines=_modelfile, comment="#"),
    "lm-studio": _Format(_lm_studio_notes, _lms_load, _lm_studio_window),
}
PROGRAMS = tuple(_FORMATS)
