"""A plan as settings of other programs. Pure: settings in, command lines and files out.

The layers, the cells of context and the KV types are the plan's own; what a program cannot be told is in the notes.
Sources: llama.cpp common/arg.cpp, common/speculative.cpp and tools/llama-bench/llama-bench.cpp;
Ollama llm/llama_server.go and parser/parser.go; LM Studio's lms, src/subcommands/load.ts.
"""

from __future__ import annotations

import itertools
import math
import shlex
from dataclasses import dataclass

from ggufspec.errors import UsageError
from ggufspec.llamacpp.options import ContextOptions, Placement

_ALL = 999  # Ollama reads a negative number as "choose for me"
_RATIO_STEPS = 10_000
_NOWHERE = Placement()


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A GGUF file: ``name`` is a path, or with ``repo`` its name in that repository of the hub."""

    name: str
    repo: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a plan decided.

    Args:
        target: the target's file.
        placement: its layers.
        context: its context; ``threads`` of it are everyone's.
        draft: the draft's file; None runs target-only.
        draft_placement: its layers.
        draft_context: its context, as long as the target's; None is the target's with an f16 cache.
        draft_max: drafted tokens a round at most.
        blocks: of the target; a program that wants a share of the layers needs it.
        devices: names that layers can be offloaded to, in llama.cpp's order; needed where a draft is on one of several.
        rpc: endpoints of RPC workers, whose devices come first.
    """

    target: ModelFile
    placement: Placement
    context: ContextOptions
    draft: ModelFile | None = None
    draft_placement: Placement = _NOWHERE
    draft_context: ContextOptions | None = None
    draft_max: int = 0
    blocks: int | None = None
    devices: tuple[str, ...] = ()
    rpc: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Export:
    """``text`` is a shell command or a file; ``arguments`` the command word by word, none where it is a file.

    ``notes`` say what the program cannot be told, and what it does besides.
    """

    text: str
    arguments: tuple[str, ...]
    notes: tuple[str, ...]


def llama_server(settings: Settings) -> list[str]:
    """The command of llama.cpp's server: one slot, since every slot more would want its own context."""
    return ["llama-server", *_common(settings), *_no_projector(settings), "-np", "1", *_draft(settings)]


def llama_cli(settings: Settings) -> list[str]:
    """The command of llama.cpp's chat."""
    return ["llama-cli", *_common(settings), *_no_projector(settings), *_draft(settings)]


def llama_speculative_simple(settings: Settings) -> list[str]:
    """The command of llama.cpp's example of speculative decoding; the prompt, ``-p`` and ``-n``, is yet to be added.

    Raises:
        UsageError: there is no draft.
    """
    if settings.draft is None:
        raise UsageError("llama-speculative-simple needs a draft", "--to llama-cli runs target-only")
    return ["llama-speculative-simple", *_common(settings, batch=settings.context.cells), *_draft(settings)]


def llama_bench(settings: Settings) -> list[str]:
    """The command of llama.cpp's benchmark: target-only.

    Raises:
        UsageError: it has no word for the cache's type, or would split the file's name.
    """
    context, placement, target = settings.context, settings.placement, settings.target
    for kind in (context.cache_type_k, context.cache_type_v):
        if kind == "f32":  # ggml_type_from_name in llama-bench.cpp
            raise UsageError("llama-bench has no f32 cache", "-ctk f16 -ctv f16, or another program")
    if "," in target.name:
        raise UsageError(f"llama-bench splits {target.name!r} at the comma", "give the file another name: ln -s")
    arguments = ["llama-bench", *(["-hf", target.repo, "-hff", target.name] if target.repo else ["-m", target.name])]
    arguments += ["-ngl", str(max(placement.gpu_layers, -1))]
    if placement.split:
        arguments += ["-ts", "/".join(_number(share) for share in placement.split)]
    if placement.n_cpu_moe:
        arguments += ["-ncmoe", str(placement.n_cpu_moe)]
    arguments += ["-b", str(settings.context.batch), "-ub", str(settings.context.computed), *_cache(context)]
    arguments += ["-t", str(context.threads)]
    return arguments + (["-rpc", ",".join(settings.rpc)] if settings.rpc else [])


def ollama_modelfile(settings: Settings) -> str:
    """A Modelfile; ``ollama create NAME -f FILE`` takes it.

    ``num_gpu`` counts the output layer: Ollama hands the number to llama-server's ``-ngl`` as it is.

    Raises:
        UsageError: the file's name cannot stand in a Modelfile.
    """
    target, layers = settings.target, settings.placement.gpu_layers
    if not target.name.isprintable():  # the parser drops such characters
        raise UsageError(f"a Modelfile cannot name {target.name!r}", "give the file another name: ln -s")
    parameters = {
        "num_gpu": _ALL if layers < 0 else layers,
        "num_ctx": settings.context.cells,
        "num_batch": settings.context.batch,
        "num_thread": settings.context.threads,
    }
    lines = [f"# {note}" for note in _ollama_notes(settings)]
    lines.append(f"FROM hf.co/{target.repo}:{target.name}" if target.repo else f"FROM {target.name}")
    return "\n".join([*lines, *(f"PARAMETER {name} {value}" for name, value in parameters.items())])


def lms_load(settings: Settings) -> list[str]:
    """The command of LM Studio's ``lms`` that loads the target.

    Raises:
        UsageError: the share of the layers is wanted and the number of blocks is not known.
    """
    name = settings.target.name
    model = f"{settings.target.repo}/{name}" if settings.target.repo else name.rpartition("/")[2]
    return ["lms", "load", model, "--gpu", _share(settings), "--context-length", str(settings.context.cells)]


def lm_studio(settings: Settings) -> str:
    """LM Studio's load settings under the names that its window has, then the command that sets what ``lms`` can.

    Raises:
        UsageError: as :func:`lms_load`.
    """
    context, placement, blocks = settings.context, settings.placement, settings.blocks
    offloaded = "all" if _share(settings) == "max" else f"{max(placement.gpu_layers - 1, 0)} of {blocks or 'all'}"
    rows = {
        "Context Length": f"{settings.context.cells}",
        "GPU Offload": offloaded,
        "CPU Thread Pool Size": f"{context.threads}",
        "Evaluation Batch Size": f"{settings.context.batch}",
        "Offload KV Cache to GPU Memory": "on",
        "Flash Attention": context.flash_attn,
        "K Cache Quantization Type": context.cache_type_k,
        "V Cache Quantization Type": context.cache_type_v,
    }
    if placement.n_cpu_moe:
        rows["Layers with MoE weights forced onto CPU"] = f"{placement.n_cpu_moe}"
    if settings.draft:
        rows["Draft Model (chat sidebar)"] = settings.draft.name.rpartition("/")[2]
        rows["Draft Max (chat sidebar)"] = f"{settings.draft_max}"
    width = max(len(name) for name in rows) + 2
    lines = [f"# {name:<{width}}{value}" for name, value in rows.items()]
    return "\n".join([*lines, shlex.join(lms_load(settings))])


def export(program: str, settings: Settings) -> Export:
    """``settings`` for one of :data:`PROGRAMS`.

    Raises:
        UsageError: the program is not known, or cannot be told something that decides whether it runs.
    """
    if program == "ollama":
        return Export(ollama_modelfile(settings), (), _ollama_notes(settings))
    if program == "lm-studio":
        return Export(lm_studio(settings), tuple(lms_load(settings)), _lm_studio_notes(settings))
    if program not in _COMMANDS:
        raise UsageError(f"there is no export to {program!r}", "one of " + ", ".join(PROGRAMS))
    arguments = _COMMANDS[program](settings)
    notes = _bench_notes(settings) if program == "llama-bench" else _llama_notes(program, settings)
    return Export(shlex.join(arguments), tuple(arguments), notes)


_COMMANDS = {
    "llama-server": llama_server,
    "llama-cli": llama_cli,
    "llama-bench": llama_bench,
    "llama-speculative-simple": llama_speculative_simple,
}
PROGRAMS = (*_COMMANDS, "ollama", "lm-studio")


def _common(settings: Settings, batch: int | None = None) -> list[str]:
    """What the programs with llama.cpp's common options are told of the target."""
    target, placement = settings.target, settings.placement
    arguments = ["-hf", target.repo, "-hff", target.name] if target.repo else ["-m", target.name]
    arguments += ["-ngl", _layers(placement)]
    if placement.split:
        arguments += ["-ts", ",".join(_number(share) for share in placement.split)]
    if placement.n_cpu_moe:
        arguments += ["--n-cpu-moe", str(placement.n_cpu_moe)]
    arguments += [
        "-c",
        str(settings.context.cells),
        "-b",
        str(batch or settings.context.batch),
        "-ub",
        str(settings.context.computed),
    ]
    arguments += [*_cache(settings.context), "-t", str(settings.context.threads)]
    arguments += ["--swa-full"] if settings.context.swa_full else []
    arguments += ["--fit", "off"]  # it would move what is not set, the split say
    return arguments + (["--rpc", ",".join(settings.rpc)] if settings.rpc else [])


def _no_projector(settings: Settings) -> list[str]:
    """With ``-hf`` an image model's projector would be fetched too, and put on the card."""
    return ["--no-mmproj"] if settings.target.repo else []


def _draft(settings: Settings) -> list[str]:
    """What they are told of the draft, whose context is as long as the target's without being told."""
    draft, placement = settings.draft, settings.draft_placement
    if draft is None:
        return []
    arguments = ["-hfd", draft.repo, "-md", draft.name] if draft.repo else ["-md", draft.name]
    arguments += ["-ngld", _layers(placement)]
    device = _only_device(settings)
    if device is not None and _splits_differ(settings):
        arguments += ["-devd", device]
    if placement.n_cpu_moe:
        arguments += ["--spec-draft-n-cpu-moe", str(placement.n_cpu_moe)]
    context = settings.draft_context
    arguments += [
        "-ctkd",
        context.cache_type_k if context else "f16",
        "-ctvd",
        context.cache_type_v if context else "f16",
    ]
    return [*arguments, "--spec-type", "draft-simple", "--spec-draft-n-max", str(settings.draft_max)]


def _cache(context: ContextOptions) -> list[str]:
    return ["-ctk", context.cache_type_k, "-ctv", context.cache_type_v, "-fa", context.flash_attn]


def _layers(placement: Placement) -> str:
    return "all" if placement.gpu_layers < 0 else str(placement.gpu_layers)


def _number(share: float) -> str:
    return f"{share:.9g}"  # nine digits name a float32


def _share(settings: Settings) -> str:
    """LM Studio's share of the blocks; a bit more, so that neither rounding nor cutting off there loses a block."""
    layers, blocks = settings.placement.gpu_layers, settings.blocks
    if layers < 0:
        return "max"
    if layers <= 1:
        return "off"
    if blocks is None:
        raise UsageError("LM Studio wants a share of the layers, and their number is not known", "-ngl -1, or -ngl 0")
    if layers > blocks:
        return "max"
    return f"{((layers - 1) * _RATIO_STEPS // blocks + 1) / _RATIO_STEPS:g}"


def _only_device(settings: Settings) -> str | None:
    """The device that has all of the draft's layers, if its name is known."""
    used = [index for index, share in enumerate(settings.draft_placement.split) if share > 0]
    return settings.devices[used[0]] if len(used) == 1 and used[0] < len(settings.devices) else None


def _splits_differ(settings: Settings) -> bool:
    """Whether llama.cpp, which has one split for both models, would divide the draft in another way."""
    target, draft = settings.placement.split, settings.draft_placement.split
    if settings.draft is None or settings.draft_placement.gpu_layers == 0 or max(len(target), len(draft)) < 2:
        return False
    if not sum(target) or not sum(draft):
        return True
    pairs = itertools.zip_longest(target, draft, fillvalue=0.0)
    return not all(math.isclose(of_target / sum(target), of_draft / sum(draft)) for of_target, of_draft in pairs)


def _llama_notes(program: str, settings: Settings) -> tuple[str, ...]:
    notes = [*_hub_notes(settings)]
    if program in ("llama-server", "llama-cli"):
        notes.append(f"{program} keeps old prompts in up to 8 GiB of RAM; --cache-ram 0 turns that off")
    else:
        notes.append("a prompt is wanted: add -p TEXT -n TOKENS")
    if settings.draft is None:
        return tuple(notes)
    notes.append("above temperature 0 its acceptance rule is another: more or fewer drafted tokens are kept")
    if _splits_differ(settings) and _only_device(settings) is None:
        notes.append("its -ts divides the draft too: the draft's layers are not where the plan has them")
    return tuple(notes)


def _bench_notes(settings: Settings) -> tuple[str, ...]:
    notes = [*_hub_notes(settings)]
    notes.append(
        "its context is as long as its test, so that it takes less memory than the plan; "
        f"-p 0 -n 128 -d {max(settings.context.cells - 128, 0)} fills the plan's {settings.context.cells} cells first"
    )
    if settings.context.swa_full:
        notes.append("it has no --swa-full: a layer with a sliding window keeps only its window")
    if settings.draft:
        notes.append("it has no draft: this measures target-only, placed as beside the draft")
    return tuple(notes)


def _ollama_notes(settings: Settings) -> tuple[str, ...]:
    context, placement = settings.context, settings.placement
    notes = [
        "num_gpu counts the output layer, as -ngl does; an Ollama from before it ran llama-server counts it last",
        "num_ctx is for one request at a time: OLLAMA_NUM_PARALLEL=1 ollama serve",
    ]
    if settings.draft:
        notes.append("target-only: Ollama drafts with MTP and DFlash heads only, not with a model like the draft")
    if context.cache_type_k != context.cache_type_v:
        notes.append(f"Ollama has one type for both caches, not {context.cache_type_k} and {context.cache_type_v}")
    elif context.cache_type_k != "f16":
        notes.append(f"the cache's type is the server's: OLLAMA_KV_CACHE_TYPE={context.cache_type_k} ollama serve")
    if context.flash_attn != "auto":
        switch = int(context.flash_attn == "on")
        notes.append(f"flash attention is the server's: OLLAMA_FLASH_ATTENTION={switch} ollama serve")
    if context.swa_full:
        notes.append("Ollama has no --swa-full: a layer with a sliding window keeps only its window")
    return (*notes, *_lacks("Ollama", placement, settings, experts=True))


def _lm_studio_notes(settings: Settings) -> tuple[str, ...]:
    notes = [
        "lms sets the context and the GPU offload; the rest is set in the load window of LM Studio",
        "GPU Offload counts blocks without the output layer; LM Studio's log says how many layers it moved",
    ]
    if not settings.target.repo:
        notes.append(f"a file outside LM Studio's folder: {shlex.join(['lms', 'import', settings.target.name])}")
    if settings.draft:
        notes.append("the draft is chosen in the chat sidebar, Speculative Decoding; LM Studio decides where it goes")
    return (*notes, *_lacks("LM Studio", settings.placement, settings, experts=False))


def _lacks(program: str, placement: Placement, settings: Settings, *, experts: bool) -> list[str]:
    """Parts of a placement that a program cannot be told."""
    notes = []
    if placement.split:
        notes.append(f"{program} divides layers over several cards by itself, not by the plan's split")
    if placement.n_cpu_moe and experts:
        notes.append(f"{program} cannot keep the experts of {placement.n_cpu_moe} blocks on the CPU")
    if settings.rpc:
        notes.append(f"{program} has no RPC workers: the layers planned for them have no place")
    return notes


def _hub_notes(settings: Settings) -> list[str]:
    if settings.target.repo or (settings.draft and settings.draft.repo):
        return ["files are taken from the hub as they are there today: llama.cpp names no revision"]
    return []
