"""The options that commands share, under llama.cpp's names where it has them.

Precedence: flag, ``GGUFSPEC_*`` variable, profile, default. Hence None stands for "not given".
"""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ggufspec import foreign
from ggufspec.errors import UsageError

if TYPE_CHECKING:
    from ggufspec.models.profile import Pair


MOST_TEXT_BYTES = 16 << 20  # of a prompt: some millions of tokens


def _option(*names: str, help: str, metavar: str | None = None, variable: str | None = None, **more: Any) -> Any:  # noqa: A002
    """An option; ``variable`` may hold its value too, as :func:`epilog` says once for all."""
    envvar = f"GGUFSPEC_{variable}" if variable else None
    return typer.Option(*names, help=help, metavar=metavar, envvar=envvar, show_envvar=False, **more)


def _layer_count(text: str) -> str:
    """``-ngl`` and ``-ngld``: a number, all or auto."""
    wanted = text.strip().lower()
    if wanted not in ("auto", "all") and not re.fullmatch(r"-?\d{1,9}", wanted):
        raise typer.BadParameter(f"{text!r} is not a number of layers: 45, all or auto")
    return wanted


def _shares(text: str) -> str:
    """``-ts``: numbers, one per card."""
    if not re.fullmatch(r"\d{1,9}(\.\d+)?(,\d{1,9}(\.\d+)?)*", text) or not re.search(r"[1-9]", text):
        raise typer.BadParameter(f"{text!r} is not a list of shares: 3,1 gives the first card three quarters")
    return text


class Drafter(StrEnum):
    """Of :data:`ggufspec.decoding.options.DRAFTERS`."""

    DRAFT = "draft"
    LOOKUP = "lookup"
    BOTH = "both"
    NONE = "none"


class Policy(StrEnum):
    """Of :data:`ggufspec.decoding.options.POLICIES`."""

    ADAPTIVE = "adaptive"
    FIXED = "fixed"


def profile_names(incomplete: str) -> list[str]:
    """For a shell that completes PAIR: names of profiles. Where none begins so, the shell offers its files."""
    from ggufspec.models.profile import known_profiles

    return [name for name in known_profiles() if name.startswith(incomplete)]


def own_profile_names(incomplete: str) -> list[str]:
    """The same where only the user's own will do."""
    from ggufspec.models.profile import own_profiles

    return [name for name in own_profiles() if name.startswith(incomplete)]


def _pair(default: str) -> Any:
    """``PAIR`` of a command that takes ``default`` without one."""
    words = f"A profile's name or path; {default} if none."
    return typer.Argument(metavar="PAIR", help=words, autocompletion=profile_names)


BENCH_PAIR = "demo-360m"  # the demo pair at the cost of a real one
PairName = Annotated[str | None, _pair("the bundled demo pair")]
BenchPairName = Annotated[str | None, _pair(BENCH_PAIR)]
TargetFile = Annotated[
    Path | None, _option("-m", "--model", metavar="FILE", help="The target's GGUF file.", variable="MODEL")
]
DraftFile = Annotated[
    Path | None, _option("-md", "--model-draft", metavar="FILE", help="The draft's GGUF file.", variable="MODEL_DRAFT")
]
TargetSource = Annotated[
    str | None, _option("-m", "--model", metavar="FILE|URL", help="The target's GGUF file or URL.", variable="MODEL")
]
DraftSource = Annotated[
    str | None,
    _option("-md", "--model-draft", metavar="FILE|URL", help="The draft's file or URL.", variable="MODEL_DRAFT"),
]
TargetRepo = Annotated[
    str | None, _option("-hf", "--hf-repo", metavar="USER/REPO:QUANT", help="The target in the Hugging Face hub.")
]
DraftRepo = Annotated[
    str | None, _option("-hfd", "--hf-repo-draft", metavar="USER/REPO:QUANT", help="The draft in the hub.")
]
GpuLayers = Annotated[
    str | None,
    _option(
        "-ngl",
        "--gpu-layers",
        metavar="N|auto|all",
        parser=_layer_count,
        help="Target layers on the GPU; more than it has is all.  [auto]",
        variable="NGL",
    ),
]
DraftGpuLayers = Annotated[
    str | None,
    _option(
        "-ngld",
        "--gpu-layers-draft",
        metavar="N|auto|all",
        parser=_layer_count,
        help="Draft layers there.  [auto]",
        variable="NGLD",
    ),
]
TensorSplit = Annotated[
    str | None,
    _option(
        "-ts",
        "--tensor-split",
        metavar="N,N",
        parser=_shares,
        help="Shares of the target's layers for each card.  [by budget]",
    ),
]
CpuExperts = Annotated[
    int | None,
    _option("--n-cpu-moe", metavar="N", min=0, help="Keep the experts of the first N blocks on the CPU.  [auto]"),
]
Gpu = Annotated[
    list[str] | None, _option("--gpu", metavar="NAME", help="Plan for a card that is not here: --gpu 'RTX 4090'.")
]
Vram = Annotated[list[str] | None, _option("--vram", metavar="SIZE", help="Plan for a card of this memory: 24GiB.")]
Headroom = Annotated[
    str | None, _option("--headroom", metavar="SIZE", help="What to leave free on each card.  [256MiB]")
]
Acceptance = Annotated[
    float | None,
    _option("--acceptance", metavar="P", min=0, max=1, help="Expected share of drafted tokens that are kept."),
]
ContextSize = Annotated[
    int | None, _option("-c", "--ctx-size", metavar="N", help="Tokens of context.  [2048]", variable="CTX_SIZE")
]
LONGEST_DRAFT = "The longest draft of a round, in tokens."
DraftMax = Annotated[
    int | None,
    _option(
        "--draft-max",
        metavar="N",
        help=f"{LONGEST_DRAFT}  [15; if fixed, what the plan finds best, or 4]",
        variable="DRAFT_MAX",
    ),
]
DrafterName = Annotated[
    Drafter | None,
    _option(
        "--drafter",
        metavar="|".join(Drafter),
        help="Who drafts: the draft model, n-grams of the text (which needs no model), both, or none.  [both]",
        variable="DRAFTER",
    ),
]
DraftPolicy = Annotated[
    Policy | None,
    _option(
        "--draft-policy",
        metavar="|".join(Policy),
        help="Draft as far as it pays, which may be not at all, or always --draft-max tokens.  [adaptive]",
    ),
]
LookupCorpus = Annotated[
    Path | None,
    _option("--lookup-corpus", metavar="FILE", help="A text whose n-grams the lookup knows too."),
]
Grammar = Annotated[str | None, _option("--grammar", metavar="GBNF", help="The answer follows this grammar.")]
GrammarFile = Annotated[Path | None, _option("--grammar-file", metavar="FILE", help="The same, from a file.")]
JsonSchema = Annotated[
    str | None, _option("-j", "--json-schema", metavar="SCHEMA", help="The answer is JSON of this schema; {} is any.")
]
JsonSchemaFile = Annotated[
    Path | None, _option("-jf", "--json-schema-file", metavar="FILE", help="The same, from a file.")
]
Threads = Annotated[
    int | None,
    _option(
        "-t",
        "--threads",
        metavar="N",
        help="CPU threads.  [physical cores, fewer beside busy programs]",
        variable="THREADS",
    ),
]
TypeK = Annotated[
    str | None,
    _option("-ctk", "--cache-type-k", metavar="TYPE", help="Key cache type, q8_0 say.  [f16]", variable="CTK"),
]
TypeV = Annotated[
    str | None, _option("-ctv", "--cache-type-v", metavar="TYPE", help="Value cache type.  [f16]", variable="CTV")
]
MicroBatch = Annotated[
    int | None,
    _option(
        "-ub",
        "--ubatch-size",
        metavar="N",
        help="Prompt tokens computed at once; fewer take less memory.  [512]",
        variable="UBATCH_SIZE",
    ),
]
FlashAttention = Annotated[
    str | None, _option("-fa", "--flash-attn", metavar="WHEN", help="auto, on or off.  [auto]", variable="FA")
]
Accept = Annotated[
    str,
    _option("--accept", metavar="RULE", help="exact and residual lose nothing; top-k:N and typical:EPS are lossy."),
]
Strict = Annotated[bool, _option("--strict", help="The same text to the bit with and without draft; may be slower.")]
Temperature = Annotated[float, _option("--temp", metavar="T", help="0 is greedy.")]
TopK = Annotated[int, _option("--top-k", metavar="K", help="Keep the k likeliest tokens; 0 is off.")]
TopP = Annotated[
    float, _option("--top-p", metavar="P", help="Keep the likeliest tokens up to this probability; 1 is off.")
]
MinP = Annotated[
    float, _option("--min-p", metavar="P", help="Keep tokens with this share of the best one's; 0 is off.")
]
Seed = Annotated[
    int,
    _option(
        "-s", "--seed", metavar="N", help="The same seed gives the same text, with and without draft; -1 draws one."
    ),
]
RepeatPenalty = Annotated[
    float, _option("--repeat-penalty", metavar="X", help="Divide the logits of tokens that were there; 1 is off.")
]
RepeatLastN = Annotated[
    int,
    _option(
        "--repeat-last-n",
        metavar="N",
        help="Penalise the last N tokens, the prompt's too; 0 is off, -1 the context.",
    ),
]
PresencePenalty = Annotated[
    float, _option("--presence-penalty", metavar="X", help="Take X from logits of tokens that were there; 0 is off.")
]
FrequencyPenalty = Annotated[
    float, _option("--frequency-penalty", metavar="X", help="Take X once for each time they were; 0 is off.")
]
Rpc = Annotated[
    list[str] | None, _option("--rpc", metavar="HOST:PORT", help="A llama.cpp RPC worker, as a further device.")
]
Results = Annotated[
    Path | None,
    _option("--results", metavar="FOLDER", help="Where measurements are kept.  [the user's data folder]"),
]
Fresh = Annotated[bool, _option("--fresh", help="Start over: measure again what is kept already.")]
MaxTokens = Annotated[int, _option("-n", "--predict", metavar="N", min=1, help="Tokens to emit at most.")]
BenchTokens = Annotated[
    int | None,
    _option("-n", "--predict", metavar="N", min=1, help="Tokens to emit at most.  [the profile's, or 128]"),
]
PromptText = Annotated[
    str | None, _option("-p", "--prompt", metavar="TEXT", help="The prompt; - reads standard input.")
]
PromptFile = Annotated[Path | None, _option("-f", "--file", metavar="FILE", help="Read the prompt from a file.")]


def epilog(*examples: str) -> str:
    """The end of a command's help."""
    shown = "\n".join(f"  {example}" for example in examples)
    variables = "MODEL, MODEL_DRAFT, NGL, NGLD, CTX_SIZE, UBATCH_SIZE, DRAFTER, DRAFT_MAX, THREADS, CTK, CTV and FA"
    return (
        f"\b\nExamples:\n{shown}\n\nOptions can be set as GGUFSPEC_… variables too, GGUFSPEC_NGL=45 say: {variables}. "
        "A flag overrides a variable, a variable the profile, the profile the default."
    )


def choose_pair(
    name: str | None,
    target: Path | None,
    draft: Path | None,
    repo: str | None = None,
    draft_repo: str | None = None,
    *,
    no_draft: bool = False,
    need_draft: bool = False,
) -> Pair:
    """The pair that PAIR, ``-m``, ``-md``, ``-hf`` and ``-hfd`` mean, its files here and checked.

    What is missing and on the hub is fetched, after asking unless ``-y`` is given.

    Raises:
        GgufspecError: a profile or a file is not there or is no GGUF file, or the user does not want to fetch it.
    """
    from dataclasses import replace

    from ggufspec.cli import pull, ui
    from ggufspec.llamacpp.model import check_gguf
    from ggufspec.models.hub import hub_file
    from ggufspec.models.profile import Pair, load_profile, on_hub, resolve

    if target is not None and repo is not None:
        raise UsageError("both -m (or GGUFSPEC_MODEL) and -hf are given", "give one of them")
    if draft is not None and draft_repo is not None:
        raise UsageError("both -md (or GGUFSPEC_MODEL_DRAFT) and -hfd are given", "give one of them")
    if name is not None and (target is not None or repo is not None):
        raise UsageError(f"both a PAIR and {'-hf' if repo else '-m (or GGUFSPEC_MODEL)'} are given", "give one of them")
    if no_draft:
        draft = draft_repo = None
    again = pull.command(name, repo, draft_repo)
    no_other = draft is None and draft_repo is None
    own_draft = hub_file(draft_repo) if draft_repo else None
    if target is not None or repo is not None:
        if need_draft and no_other:
            raise _lonely()
        wanted = hub_file(repo) if repo else None
        here = [source for source in (wanted, own_draft) if source is not None]
        paths = list(pull.have(here, "the pair", again))
        target = paths.pop(0) if wanted else target
        assert target is not None
        pair = Pair(target.stem, target, paths.pop(0) if own_draft else draft)
    else:
        profile = load_profile(name or "demo")
        if need_draft and no_other and profile.draft is None:
            raise _lonely()
        if no_draft or not no_other:
            profile = profile.model_copy(update={"draft": None})
        models = [on_hub(model) for model in (profile.target, profile.draft) if model]
        paths = list(pull.have([s for s in (*models, own_draft) if s], f"profile {profile.name!r}", again))
        with ui.making() as tell:
            pair = resolve(profile, tell)
        if draft is not None or own_draft is not None:
            pair = replace(pair, draft=paths[-1] if own_draft else draft)
    for file in (pair.target, pair.draft):
        if file is not None:
            check_gguf(file)
    return pair


def _lonely() -> UsageError:
    return UsageError(
        "bench needs a draft to compare with, and none is given",
        "ggufspec bench -m TARGET -md DRAFT, or --drafter lookup",
    )


def kv_types(allowed: str | None) -> tuple[tuple[str, str], ...]:
    """(cache_type_k, cache_type_v) that ``--allow-kv`` lets the plan choose.

    Raises:
        UsageError: a type is not known.
    """
    from ggufspec.llamacpp.options import check_kv_type

    names = [name.strip() for name in (allowed or "").split(",") if name.strip()]
    for name in names:
        check_kv_type(name)
    return tuple((name, name) for name in names)


def read_prompt(text: str | None, file: Path | None) -> str | None:
    """The prompt that ``-p`` and ``-f`` mean; None when neither is given.

    Raises:
        UsageError: both are given, or the file cannot be read.
    """
    import sys

    if text is not None and file is not None:
        raise UsageError("both -p and -f are given", "give one of them")
    if text == "-" or file == Path("-"):
        data = sys.stdin.buffer.read(MOST_TEXT_BYTES + 1)
        if len(data) > MOST_TEXT_BYTES:
            raise UsageError("standard input has more text than any context holds", "a shorter prompt")
        return _utf8(data, "standard input")
    if file is not None:
        return _read(file)
    return None if text is None else _utf8(os.fsencode(text), "the prompt")


def read_grammar(grammar: str | None, file: Path | None, schema: str | None, schema_file: Path | None) -> str:
    """The grammar that the options mean, in llama.cpp's GBNF; empty when none is given.

    Raises:
        UsageError: more than one is given, a file cannot be read, it is no grammar, or a schema cannot be made one.
    """
    from ggufspec.llamacpp.grammar import check_grammar, schema_to_grammar

    given = [one for one in (grammar, file, schema, schema_file) if one is not None]
    if len(given) > 1:
        raise UsageError("more than one grammar is given", "give one of --grammar, --grammar-file, -j and -jf")
    if not given:
        return ""
    text = _read(Path(given[0])) if isinstance(given[0], Path) else given[0]
    if schema is not None or schema_file is not None:
        text = schema_to_grammar(text)
    check_grammar(text)
    return text


def drawn(seed: int) -> int:
    """The seed; where it is -1 one that is drawn, as llama.cpp has it, and told, so that the text can be had again."""
    if seed != -1:
        return seed
    from ggufspec.cli import ui
    from ggufspec.decoding.sampling import random_seed

    seed = random_seed()
    ui.note(f"seed {seed}: -s {seed} gives the same again")
    return seed


def _read(file: Path) -> str:
    return foreign.read_text(file, MOST_TEXT_BYTES, failure=UsageError)


def _utf8(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text: {error}", "convert it to UTF-8") from None
