"""The options that commands share, under llama.cpp's names where it has them.

Precedence: flag, ``GGUFSPEC_*`` variable, profile, default. Hence None stands for "not given".
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ggufspec.errors import UsageError

if TYPE_CHECKING:
    from ggufspec.decoding.decoder import DecoderOptions
    from ggufspec.pairs.profile import Pair


def _option(*names: str, help: str, metavar: str | None = None, variable: str | None = None, **more: Any) -> Any:  # noqa: A002
    """An option; ``variable`` may hold its value too, as :func:`epilog` says once for all."""
    envvar = f"GGUFSPEC_{variable}" if variable else None
    return typer.Option(*names, help=help, metavar=metavar, envvar=envvar, show_envvar=False, **more)


PairName = Annotated[
    str | None, typer.Argument(metavar="PAIR", help="A profile's name or path; the bundled demo pair if none.")
]
TargetFile = Annotated[
    Path | None, _option("-m", "--model", metavar="FILE", help="The target's GGUF file.", variable="MODEL")
]
DraftFile = Annotated[
    Path | None, _option("-md", "--model-draft", metavar="FILE", help="The draft's GGUF file.", variable="MODEL_DRAFT")
]
GpuLayers = Annotated[
    int | None,
    _option("-ngl", "--gpu-layers", metavar="N", help="Target layers on the GPU.  [all]", variable="NGL"),
]
DraftGpuLayers = Annotated[
    int | None,
    _option("-ngld", "--gpu-layers-draft", metavar="N", help="Draft layers on the GPU.  [all]", variable="NGLD"),
]
ContextSize = Annotated[
    int | None, _option("-c", "--ctx-size", metavar="N", help="Tokens of context.  [2048]", variable="CTX_SIZE")
]
DraftMax = Annotated[
    int | None,
    _option("--draft-max", metavar="N", help="Drafted tokens a round at most.  [4]", variable="DRAFT_MAX"),
]
Threads = Annotated[
    int | None, _option("-t", "--threads", metavar="N", help="CPU threads.  [physical cores]", variable="THREADS")
]
TypeK = Annotated[
    str | None,
    _option("-ctk", "--cache-type-k", metavar="TYPE", help="Key cache type, q8_0 say.  [f16]", variable="CTK"),
]
TypeV = Annotated[
    str | None, _option("-ctv", "--cache-type-v", metavar="TYPE", help="Value cache type.  [f16]", variable="CTV")
]
FlashAttention = Annotated[
    str | None, _option("-fa", "--flash-attn", metavar="WHEN", help="auto, on or off.  [auto]", variable="FA")
]
Accept = Annotated[
    str, _option("--accept", metavar="RULE", help="Acceptance rule: exact or residual; both lose nothing.")
]
Strict = Annotated[bool, _option("--strict", help="One width class: the same text to the bit with and without draft.")]
Temperature = Annotated[float, _option("--temp", metavar="T", help="0 is greedy.")]
TopK = Annotated[int, _option("--top-k", metavar="K", help="Keep the k likeliest tokens; 0 is off.")]
TopP = Annotated[
    float, _option("--top-p", metavar="P", help="Keep the likeliest tokens up to this probability; 1 is off.")
]
MinP = Annotated[
    float, _option("--min-p", metavar="P", help="Keep tokens with this share of the best one's; 0 is off.")
]
Seed = Annotated[
    int, _option("-s", "--seed", metavar="N", help="The same seed gives the same text, with and without draft.")
]
Rpc = Annotated[
    list[str] | None, _option("--rpc", metavar="HOST:PORT", help="A llama.cpp RPC worker, as a further device.")
]
Json = Annotated[bool, _option("--json", help="Print one JSON document, on failure too.")]
Verbose = Annotated[bool, _option("-v", "--verbose", help="Show llama.cpp's log.")]
Quiet = Annotated[bool, _option("-q", "--quiet", help="No progress, no notes.")]
MaxTokens = Annotated[int, _option("-n", "--predict", metavar="N", min=1, help="Tokens to emit at most.")]
PromptText = Annotated[
    str | None, _option("-p", "--prompt", metavar="TEXT", help="The prompt; - reads standard input.")
]
PromptFile = Annotated[Path | None, _option("-f", "--file", metavar="FILE", help="Read the prompt from a file.")]
_INT32_MAX = 2**31 - 1


def epilog(*examples: str) -> str:
    """The end of a command's help."""
    shown = "\n".join(f"  {example}" for example in examples)
    variables = "MODEL, MODEL_DRAFT, NGL, NGLD, CTX_SIZE, DRAFT_MAX, THREADS, CTK, CTV and FA"
    return (
        f"\b\nExamples:\n{shown}\n\nOptions can be set as GGUFSPEC_… variables too, GGUFSPEC_NGL=45 say: {variables}. "
        "A flag wins over a variable, a variable over the profile, the profile over the default."
    )


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
            raise UsageError("both a PAIR and -m (or GGUFSPEC_MODEL) are given", "give one of them")
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
    """Flags over the profile's settings over the defaults, checked before a model is loaded.

    Raises:
        UsageError: a value is out of range, or a name is not known.
    """
    from ggufspec.decoding.acceptance import make_rule
    from ggufspec.decoding.decoder import DecoderOptions
    from ggufspec.decoding.sampling import Sampling
    from ggufspec.llamacpp.model import check_flash_attention, check_kv_type

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
    for flag, number in (("-ngl", gpu_layers), ("-ngld", draft_gpu_layers), ("-c", n_ctx)):
        if number is not None and number > _INT32_MAX // 2:
            raise UsageError(f"{flag} {number} is too large", "llama.cpp counts in 32 bits")
    decoder = DecoderOptions(accept=accept, strict=strict, **chosen)  # type: ignore[arg-type]
    for kind in (decoder.type_k, decoder.type_v):
        check_kv_type(kind)
    check_flash_attention(decoder.flash_attention)
    make_rule(accept, Sampling())
    return decoder


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
        return _utf8(sys.stdin.buffer.read(), "standard input")
    if file is None:
        return None if text is None else _utf8(os.fsencode(text), "the prompt")
    try:
        return _utf8(file.read_bytes(), str(file))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", f"ls {file.parent}") from None


def _utf8(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text: {error}", "convert it to UTF-8") from None
