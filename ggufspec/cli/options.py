"""The options that commands share, under llama.cpp's names where it has them.

Precedence: flag, ``GGUFSPEC_*`` variable, profile, default. Hence None stands for "not given".
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ggufspec.errors import UsageError

if TYPE_CHECKING:
    from ggufspec.decoding.decoder import DecoderOptions
    from ggufspec.pairs.profile import Pair

PairName = Annotated[
    str | None, typer.Argument(metavar="[PAIR]", help="A profile's name or path; the bundled demo pair if none.")
]
TargetFile = Annotated[
    Path | None, typer.Option("-m", "--model", help="The target's GGUF file.", envvar="GGUFSPEC_MODEL")
]
DraftFile = Annotated[
    Path | None, typer.Option("-md", "--model-draft", help="The draft's GGUF file.", envvar="GGUFSPEC_MODEL_DRAFT")
]
GpuLayers = Annotated[
    int | None,
    typer.Option("-ngl", "--gpu-layers", help="Target layers on the GPU; -1 means all.", envvar="GGUFSPEC_NGL"),
]
DraftGpuLayers = Annotated[
    int | None,
    typer.Option("-ngld", "--gpu-layers-draft", help="Draft layers on the GPU; -1 means all.", envvar="GGUFSPEC_NGLD"),
]
ContextSize = Annotated[
    int | None, typer.Option("-c", "--ctx-size", help="Tokens of context.  [2048]", envvar="GGUFSPEC_CTX_SIZE")
]
DraftMax = Annotated[
    int | None,
    typer.Option("--draft-max", help="Drafted tokens a round at most.  [4]", envvar="GGUFSPEC_DRAFT_MAX"),
]
Threads = Annotated[
    int | None, typer.Option("-t", "--threads", help="CPU threads.  [physical cores]", envvar="GGUFSPEC_THREADS")
]
TypeK = Annotated[
    str | None,
    typer.Option("-ctk", "--cache-type-k", help="Key cache type, q8_0 say.  [f16]", envvar="GGUFSPEC_CTK"),
]
TypeV = Annotated[
    str | None, typer.Option("-ctv", "--cache-type-v", help="Value cache type.  [f16]", envvar="GGUFSPEC_CTV")
]
FlashAttention = Annotated[
    str | None, typer.Option("-fa", "--flash-attn", help="auto, on or off.  [auto]", envvar="GGUFSPEC_FA")
]
Accept = Annotated[str, typer.Option("--accept", help="Acceptance rule: exact or residual; both lose nothing.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="One width class: the same text to the bit with and without draft.")
]
Temperature = Annotated[float, typer.Option("--temp", help="0 is greedy.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 is off.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens up to this probability; 1 is off.")]
MinP = Annotated[float, typer.Option("--min-p", help="Keep tokens with this share of the best one's; 0 is off.")]
Seed = Annotated[int, typer.Option("-s", "--seed", help="The same seed gives the same text, with and without draft.")]
Rpc = Annotated[
    list[str] | None, typer.Option("--rpc", metavar="HOST:PORT", help="A llama.cpp RPC worker, as a further device.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, on failure too.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show llama.cpp's log.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress, no notes.")]
MaxTokens = Annotated[int, typer.Option("-n", "--predict", min=1, help="Tokens to emit at most.")]
PromptText = Annotated[str | None, typer.Option("-p", "--prompt", help="The prompt; - reads standard input.")]
PromptFile = Annotated[Path | None, typer.Option("-f", "--file", help="Read the prompt from a file.")]


def choose_pair(name: str | None, target: Path | None, draft: Path | None) -> Pair:
    """The pair that PAIR, ``-m`` and ``-md`` mean, its files checked.

    Raises:
        GgufspecError: a profile or a file is not there or is no GGUF file.
    """
    from dataclasses import replace

    from ggufspec.llamacpp.model import check_gguf
    from ggufspec.pairs.profile import Pair, find, load_profile, resolve

    if target is not None:
        if name is not None:
            raise UsageError("both a PAIR and -m are given", "give one of them")
        pair = Pair(target.stem, target, draft)
    else:
        path = find(name or "demo")
        pair = resolve(load_profile(path), path.parent)
        if draft is not None:
            pair = replace(pair, draft=draft, draft_gpu_layers=None)
    for file in (pair.target, pair.draft):
        if file is not None:
            check_gguf(file)
    return pair


def decoder_options(
    pair: Pair,
    *,
    gpu_layers: int | None,
    draft_gpu_layers: int | None,
    n_ctx: int | None,
    draft_max: int | None,
    threads: int | None,
    type_k: str | None,
    type_v: str | None,
    flash_attention: str | None,
    accept: str,
    strict: bool,
) -> DecoderOptions:
    """Flags over the profile's settings over the defaults.

    Raises:
        UsageError: a value is out of range.
    """
    from ggufspec.decoding.decoder import DecoderOptions

    given = {
        "gpu_layers": _first(gpu_layers, pair.target_gpu_layers, -1),
        "draft_gpu_layers": _first(draft_gpu_layers, pair.draft_gpu_layers, -1),
        "n_ctx": _first(n_ctx, pair.settings.n_ctx),
        "draft_max": _first(draft_max, pair.settings.draft_max),
        "threads": threads,
        "type_k": _first(type_k, pair.settings.type_k),
        "type_v": _first(type_v, pair.settings.type_v),
        "flash_attention": _first(flash_attention, pair.settings.flash_attention),
    }
    chosen = {key: value for key, value in given.items() if value is not None}
    return DecoderOptions(accept=accept, strict=strict, **chosen)  # type: ignore[arg-type]


def _first(*values: object) -> object:
    return next((value for value in values if value is not None), None)


def read_prompt(text: str | None, file: Path | None) -> str | None:
    """The prompt that ``-p`` and ``-f`` mean; None when neither is given.

    Raises:
        UsageError: both are given, or the file cannot be read.
    """
    import sys

    if text is not None and file is not None:
        raise UsageError("both -p and -f are given", "give one of them")
    if text == "-" or file == Path("-"):
        return sys.stdin.read()
    if file is None:
        return text
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", f"ls {file.parent}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: {error}", "convert it to UTF-8") from None
