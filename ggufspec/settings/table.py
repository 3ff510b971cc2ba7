"""The table of options, from which flags, profile keys and Python keywords are made.

A row is a field of :class:`Settings` whose metadata is an :class:`Option`. To add an option, add a field here, use
``settings.NAME``, and run ``scripts/commands.py``. A sampling option also needs a field in ``Sampling``
(:mod:`ggufspec.decoding.sampling`) and in the server's requests (``serve/requests.py``); if it truncates, add it also
to ``sampled`` in ``chat/commands.py`` and to ``bench/hooked.py``. Profiles and keywords cannot set sampling options.

- Command line: :mod:`ggufspec.cli.parameters` makes a command's parameters from the groups that it takes. The help,
  ``docs/commands.md`` and the man page show flags, metavar, help, default and variable; only ``--help-all`` shows
  ``rare`` rows. :mod:`ggufspec.settings.llamacpp` lists llama.cpp's alternative names for flags.
- Profiles: rows with ``profile`` are the keys of ``[settings]`` (:mod:`ggufspec.models.profile`).
- ``bench --sweep``: rows with ``sweep`` take a list (:meth:`Option.parse_list`).
- ``tune``: rows with ``tune`` are searched unless given.
- Chat: rows with ``chat`` can be changed while a pair is loaded, with a switch of the same name: ``/draft-max 4``.
- Python: rows with ``python`` are keywords of ``load_pair``, ``plan_pair`` and ``bench_pair``.

Names follow llama.cpp's long flags, with underscores; :data:`OLD_NAMES` maps names used in older profiles and results.
None means not given. Precedence: flag, ``GGUFSPEC_*`` variable, profile, default.

This package imports only the errors module, because ``--help`` imports it and must be fast.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ggufspec.errors import UsageError
from ggufspec.settings.option import Option, option
from ggufspec.settings.registry import (
    _ALIASES,
    DRAFTERS,
    check_rule,
    drafter_text,
    parse_drafters,
)

POLICIES = ("adaptive", "fixed")
DRAFT_MAX = 63  # default maximum draft length; n-gram lookup copies long runs of code
FIXED_DRAFT_MAX = 4  # default draft length with --draft-policy fixed and no plan
PRIOR_ACCEPTANCE = 0.7  # chat and code with a draft of the same family at temperature 0 reach 0.6 to 0.8
LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")
KV_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
MAX_CONTEXT = 1 << 24  # maximum context in tokens; no model was trained with more than 10 million
MAX_THREADS = 512  # GGML_MAX_N_THREADS, ggml/include/ggml.h
MAX_WIDTH = 256  # maximum batch size with logits for all tokens
MAX_MICRO_BATCH = 4096
MAX_COUNT = 2**31 - 1  # maximum of llama.cpp's int32_t
MAX_PENALTY = 100.0  # maximum penalty, which keeps finite logits finite
MAX_PARALLEL = 64  # maximum conversations at once

OLD_NAMES = {  # name in profiles and results from before options took llama.cpp's names: current name
    "n_ctx": "ctx_size",
    "type_k": "cache_type_k",
    "type_v": "cache_type_v",
    "flash_attention": "flash_attn",
    "micro_batch": "ubatch_size",
    "cpu_experts": "n_cpu_moe",
    "draft_gpu_layers": "gpu_layers_draft",
}


def _drafter(text: str) -> str:
    return drafter_text(parse_drafters(text))


def _acceptance(text: str) -> float:
    """Parse a per-token acceptance probability, or accepted ÷ drafted tokens at a draft length: ``0.26@16``.

    A draft ends at its first rejected token, so with acceptance a, a + a² + … + a^k of k drafted tokens are accepted.
    """
    share, at, length = text.partition("@")
    try:
        wanted, count = float(share), int(length) if at else 1
    except ValueError:
        raise ValueError("is not a number") from None
    if not (at and 0 <= wanted <= 1):
        return wanted
    if not 1 <= count < MAX_WIDTH:
        raise ValueError(f"needs a draft length after the @: 1 to {MAX_WIDTH - 1}")
    low, high = 0.0, 1.0
    for _ in range(50):
        chance = (low + high) / 2
        low, high = (chance, high) if sum(chance**i for i in range(1, count + 1)) < wanted * count else (low, chance)
    return high


def _layers(text: str) -> int | str:
    wanted = text.strip().lower()
    if wanted == "auto":
        return wanted
    if wanted == "all":
        return -1
    if not re.fullmatch(r"-1|\d{1,9}", wanted):
        raise ValueError("is not a number of layers; use a number such as 45, all (same as -1), or auto")
    return int(wanted)


def _tokens(text: str) -> int:
    """Parse a number of tokens; ``max`` means 0, as in llama.cpp."""
    wanted = text.strip().lower()
    if wanted == "max":
        return 0
    if not re.fullmatch(r"-?\d{1,18}", wanted):
        raise ValueError("is not a number of tokens; use a number such as 8192, or max")
    return int(wanted)


def _answer_tokens(text: str) -> int:
    """Parse a number of tokens to generate; -1 means no limit."""
    try:
        count = int(text)
    except ValueError:
        raise ValueError("is not a whole number") from None
    return MAX_COUNT if count == -1 else count


def _on_off(text: str) -> str:
    """Parse a switch, including llama.cpp's synonyms (is_truthy in common/arg.cpp)."""
    word = text.strip().lower()
    others = {"1": "on", "true": "on", "enabled": "on", "0": "off", "false": "off", "disabled": "off", "-1": "auto"}
    return others.get(word, word)


def _link(text: str) -> str:
    """Parse a PCIe link given as generation and lanes, e.g. ``pcie4x16``."""
    wanted = text.strip().lower()
    if not re.fullmatch(r"pcie[1-6]x(1|2|4|8|16)", wanted):
        raise ValueError("is not a valid PCIe link; use generation 1 to 6 and 1, 2, 4, 8 or 16 lanes")
    return wanted


def _cpu(text: str) -> str:
    """Parse a CPU given as cores and vector instructions, e.g. ``8xavx2``."""
    wanted = text.strip().lower()
    if not re.fullmatch(r"[1-9]\d{0,2}x(avx2|avx512)", wanted):
        raise ValueError("is not a valid CPU; use 1 to 999 cores with avx2 or avx512 (which includes VNNI)")
    return wanted


def _shares(text: str) -> tuple[float, ...]:
    """Parse each GPU's share of the layers, e.g. ``3,1``."""
    if not re.fullmatch(r"\d{1,9}(\.\d+)?(,\d{1,9}(\.\d+)?)*", text) or not re.search(r"[1-9]", text):
        raise ValueError("is not a list of shares such as 3,1, which puts three quarters on the first GPU")
    return tuple(float(share) for share in text.split(","))


# Python regular expression syntax that is missing from ECMAScript, the syntax that llama.cpp uses (std::regex)
_NOT_ECMASCRIPT = re.compile(r"\(\?(?![:=!])|\\[AZ]|[*+?}]\+")
_MAX_PATTERN = 200


def _overrides(text: str) -> tuple[str, ...]:
    """Parse comma-separated ``PATTERN=DEVICE``, as parse_tensor_buffer_overrides in common/arg.cpp does."""
    found = tuple(one.strip() for one in text.split(","))
    for one in found:
        pattern, _, device = one.partition("=")
        if not pattern or not device or len(pattern) > _MAX_PATTERN:
            raise ValueError("is not PATTERN=DEVICE")
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"is not a valid regular expression: {error}") from None
        if other := _NOT_ECMASCRIPT.search(pattern):
            raise ValueError(f"has {other[0]!r}, which llama.cpp's regular expressions do not support")
    return found


def _types(text: str) -> tuple[str, ...]:
    return tuple(OPTIONS["cache_type_k"].check(name.strip()) for name in text.split(",") if name.strip())


@dataclass(frozen=True, slots=True)
class Settings:
    """Values given by flags, a profile or keywords; None if not given. An invalid value raises UsageError."""

    # ---- models
    pair: str | None = option(
        "",
        "Profile or GGUF files: target, draft. Give a profile by name or path.",
        "profile",
        metavar="PAIR",
        shown="demo",
    )
    model: str | None = option("-m --model", "Target model, a GGUF file.", "files", metavar="FILE", variable="MODEL")
    model_draft: str | None = option(
        "-md --model-draft", "Draft model, a GGUF file.", "files", metavar="FILE", variable="MODEL_DRAFT"
    )
    hf_repo: str | None = option(
        "-hf --hf-repo",
        "Target on Hugging Face, USER/REPO:QUANT. Append @REV to select a branch, tag or commit.",
        "hub",
        metavar="REPO",
    )
    hf_repo_draft: str | None = option(
        "-hfd --hf-repo-draft",
        "Draft on Hugging Face, USER/REPO:QUANT. Use `:mtp` or `:eagle3` as the QUANT to select the head published "
        "with the target.",
        "hub",
        metavar="REPO",
    )

    # ---- the prompt and its answer
    prompt: str | None = option("-p --prompt", "Prompt; - reads standard input.", "prompt", metavar="TEXT")
    file: Path | None = option("-f --file", "Read the prompt from this file.", "prompt")
    prompts: Path | None = option(
        "--prompts",
        "Read prompts from a file, one per line. Each line is text, or JSON such as a logged chat API request.",
        "prompts",
    )
    raw: bool | None = option("--raw", "Continue plain text, without a chat template.", "raw")
    system: str | None = option("-sys --system", "System prompt.", "system", metavar="TEXT")
    system_file: Path | None = option("--system-file", "Read the system prompt from this file.", "system", where="rare")
    predict: int | None = option(
        "-n --predict",
        "Maximum tokens to generate. With -1 the answer ends when the model stops or the context is full.",
        "length",
        least=1,
        most=MAX_COUNT,
        reader=_answer_tokens,
        usual="-n 128, or -1 for no limit",
        where="chat",
    )
    stop: tuple[str, ...] | None = option(
        "--stop", "Stop generating at this text (repeatable).", "answer", where="rare", metavar="TEXT"
    )
    prediction: Path | None = option(
        "--prediction",
        "Draft from an expected answer in this file, such as the file to edit. A poor match does not change the text.",
        "answer",
        where="rare",
    )
    grammar: str | None = option(
        "--grammar", "Constrain the answer to this GBNF grammar.", "answer", where="rare", metavar="GBNF"
    )
    grammar_file: Path | None = option("--grammar-file", "Read the grammar from this file.", "answer", where="rare")
    json_schema: str | None = option(
        "-j --json-schema",
        "Answer in JSON that follows this schema; {} allows any JSON.",
        "answer",
        where="rare",
        metavar="SCHEMA",
    )
    json_schema_file: Path | None = option(
        "-jf --json-schema-file", "Read the schema from this file.", "answer", where="rare"
    )

    # ---- conversations
    parallel: int | None = option(
        "-np --parallel",
        "Answers to generate at once, and conversations to keep cached. Each gets -c tokens.",
        "parallel",
        where="python rare",
        default=1,
        least=1,
        most=MAX_PARALLEL,
        usual="--parallel 2",
        label="kept conversations",
    )

    # ---- placement
    gpu_layers: int | str | None = option(
        "-ngl --gpu-layers",
        "Target layers to offload. 99 or `all` offloads everything.",
        "placement",
        where="sweep tune python",
        metavar="N",
        variable="NGL",
        shown="auto",
        words=("auto",),
        reader=_layers,
        least=-1,
        usual="-ngl 45, all or auto",
        label="target layers",
    )
    gpu_layers_draft: int | str | None = option(
        "-ngld --gpu-layers-draft",
        "Draft layers to offload. 99 or `all` offloads everything.",
        "placement",
        where="sweep tune python",
        metavar="N",
        variable="NGLD",
        shown="auto",
        words=("auto",),
        reader=_layers,
        least=-1,
        usual="-ngld 45, all or auto",
        label="draft layers",
    )
    tensor_split: tuple[float, ...] | None = option(
        "-ts --tensor-split",
        "Share of the target's layers for each GPU: 3,1 puts three quarters on the first.",
        "placement",
        where="python rare",
        metavar="N,N",
        shown="by free memory",
        reader=_shares,
        usual="-ts 3,1",
    )
    n_cpu_moe: int | None = option(
        "--n-cpu-moe",
        "Keep the experts of the first N blocks in RAM.",
        "placement",
        where="profile sweep tune python rare",
        shown="auto",
        least=0,
        usual="--n-cpu-moe 10",
        label="CPU expert blocks",
    )
    n_cpu_ffn: int | None = option(
        "--n-cpu-ffn",
        "Keep the dense feed-forward weights of the first N blocks in RAM. Their attention and KV cache stay on "
        "the GPU.",
        "placement",
        where="profile sweep tune python rare",
        shown="auto",
        least=0,
        usual="--n-cpu-ffn 10",
        label="CPU feed-forward blocks",
    )
    override_tensor: tuple[str, ...] | None = option(
        "-ot --override-tensor",
        "Put target tensors matching PATTERN on DEVICE, overriding all other placement options (repeatable).",
        "placement",
        where="profile python repeated rare",
        metavar="PATTERN=DEVICE",
        reader=_overrides,
        usual="-ot 'ffn_.*_exps=CPU'; devices are named as in `ggufspec plan`",
        label="tensors elsewhere",
    )
    load_mode: str | None = option(
        "-lm --load-mode",
        "How weights are loaded. Default: `none` (plain read) if RAM has room for those that a GPU copies, because "
        "copies are then faster; otherwise `auto`.",
        "context",
        where="profile python rare",
        variable="LOAD_MODE",
        choices=LOAD_MODES,
        label="load mode",
    )
    no_host: bool | None = option(
        "--no-host",
        "Repack weights that stay in RAM, so that the CPU verifies faster. GPUs cannot use repacked weights. On x86: "
        "Q4_K, Q4_0, Q8_0, MXFP4.  [on with --no-op-offload]",
        "context",
        where="profile python rare",
        label="no host buffer",
    )
    mmproj: str | None = option(
        "-mm --mmproj",
        "Leave room for this image projector, which llama-server loads with the target. Give a file, a URL, or "
        "USER/REPO to use its mmproj-….gguf.",
        "vision",
        where="profile rare",
        metavar="FILE|REPO",
        usual="--mmproj mmproj-F16.gguf",
    )
    no_mmproj_offload: bool | None = option(
        "--no-mmproj-offload", "Keep the projector in RAM.", "vision", where="profile rare"
    )
    headroom: str | None = option(
        "--headroom",
        "Memory to leave free on each GPU.",
        "devices",
        where="python rare",
        metavar="SIZE",
        shown="256MiB",
    )
    rpc: tuple[str, ...] | None = option(
        "--rpc",
        "Use the devices of a `ggufspec worker` or another llama.cpp RPC server (repeatable).",
        "devices",
        where="python rare",
        metavar="HOST:PORT",
    )
    gpu: tuple[str, ...] | None = option(
        "--gpu",
        "Plan for this GPU, such as 'RTX 4090'. It need not be installed; repeat for several.",
        "simulated",
        metavar="NAME",
    )
    vram: tuple[str, ...] | None = option(
        "--vram", "Plan for this much GPU memory, such as 24GiB. Repeat for several GPUs.", "simulated", metavar="SIZE"
    )
    ram: str | None = option(
        "--ram",
        "Free system RAM. Default: this machine's; unlimited when planning for a GPU that is not installed.",
        "simulated",
        metavar="SIZE",
        usual="--ram 64GiB",
    )
    ram_bandwidth: float | None = option(
        "--ram-bandwidth",
        "RAM bandwidth in GB/s. Dual-channel DDR5-5600 has 89.6, DDR4-3200 has 51.2.",
        "simulated",
        where="rare",
        metavar="X",
        least=1,
        most=10_000,
        usual="--ram-bandwidth 89.6",
    )
    cpu: str | None = option(
        "--cpu",
        "CPU as cores and vector instructions, such as 8xavx2. avx512 includes VNNI.",
        "simulated",
        where="rare",
        metavar="NxSET",
        reader=_cpu,
        usual="--cpu 8xavx2",
    )
    link: str | None = option(
        "--link",
        "PCIe link to the GPU, such as pcie4x16.",
        "simulated",
        where="rare",
        metavar="pcieNxN",
        reader=_link,
        usual="--link pcie4x16",
    )
    no_calibrate: bool | None = option(
        "--no-calibrate",
        "Estimate this machine's speed instead of measuring it once, which takes about ten seconds.",
        "calibration",
        where="rare",
        variable="NO_CALIBRATE",
    )
    allow_kv: tuple[str, ...] | None = option(
        "--allow-kv",
        "KV cache types the search may also try. For example q8_0,q4_0; they may reduce quality.",
        "allowed",
        metavar="TYPES",
        reader=_types,
        usual="--allow-kv q8_0",
    )
    acceptance: float | None = option(
        "--acceptance",
        "Expected acceptance probability per token. Or accepted ÷ drafted at a draft length, as llama.cpp logs it "
        "(0.26@16).",
        "expected",
        where="profile",
        metavar="P|R@N",
        shown=f"{PRIOR_ACCEPTANCE}; or the profile's, or what was measured here",
        least=0,
        most=1,
        reader=_acceptance,
        usual="--acceptance 0.7, or --acceptance 0.26@16",
    )

    # ---- drafting
    no_draft: bool | None = option("--no-draft", "Target-only: no draft model, no lookup.", "target-only")
    drafter: str | None = option(
        "--drafter",
        "Drafters: draft, lookup, both, none… `draft` is the -md model, `lookup` uses n-grams in the text; heads "
        "are `mtp` (may be in the target's file) and `eagle3`.",
        "drafting",
        where="profile sweep tune chat python",
        metavar="NAME",
        variable="DRAFTER",
        default="both",
        words=(*DRAFTERS, *_ALIASES),
        reader=_drafter,
    )
    draft_policy: str | None = option(
        "--draft-policy",
        "Draft only while it pays off (adaptive), or always --draft-max tokens (fixed).",
        "drafting",
        where="profile sweep tune chat python rare",
        default="adaptive",
        choices=POLICIES,
        label="draft policy",
    )
    draft_max: int | None = option(
        "--draft-max",
        "Maximum tokens to draft per round.",
        "drafting",
        where="profile sweep tune chat python",
        variable="DRAFT_MAX",
        shown=f"{DRAFT_MAX}; with --draft-policy fixed: the planned length, else {FIXED_DRAFT_MAX}",
        least=1,
        most=MAX_WIDTH - 1,
        usual=f"--draft-max {DRAFT_MAX} is the default; --no-draft runs target-only",
        label="draft length",
    )
    lookup_corpus: Path | None = option(
        "--lookup-corpus", "Text file whose n-grams lookup may also draft from.", "drafting", where="python rare"
    )
    accept: str | None = option(
        "--accept",
        "Acceptance rule: exact and residual are lossless, top-k:N and typical:EPS are lossy.",
        "drafting",
        where="sweep chat python rare",
        metavar="RULE",
        default="exact",
        reader=check_rule,
        label="acceptance rule",
    )
    strict: bool | None = option(
        "--strict",
        "Generate exactly the same tokens with and without a draft. May be slower.",
        "drafting",
        where="python rare",
    )

    # ---- context, threads and cache
    ctx_size: int | None = option(
        "-c --ctx-size",
        "Context size in tokens. `max` (or 0) is the size the target was trained with.",
        "context",
        where="profile sweep python",
        metavar="N|max",
        variable="CTX_SIZE",
        default=2048,
        least=2,
        most=MAX_CONTEXT,
        also=0,
        words=("max",),
        reader=_tokens,
        usual="-c 8192, or -c max",
        label="context size",
    )
    threads: int | None = option(
        "-t --threads",
        "CPU threads.",
        "context",
        where="profile sweep tune python",
        variable="THREADS",
        shown="one per fast core; fewer while other programs are busy",
        least=1,
        most=MAX_THREADS,
        usual="omit -t to use one thread per fast core",
    )
    cache_type_k: str | None = option(
        "-ctk --cache-type-k",
        "Type of the KV cache's keys, such as q8_0.",
        "context",
        where="profile sweep python rare",
        metavar="TYPE",
        variable="CTK",
        default="f16",
        choices=KV_TYPES,
        label="key cache type",
    )
    cache_type_v: str | None = option(
        "-ctv --cache-type-v",
        "Type of the KV cache's values.",
        "context",
        where="profile sweep python rare",
        metavar="TYPE",
        variable="CTV",
        default="f16",
        choices=KV_TYPES,
        label="value cache type",
    )
    cache_type_k_draft: str | None = option(
        "-ctkd --cache-type-k-draft",
        "Type of the keys in the KV cache of the draft or head.",
        "context",
        where="profile python rare",
        metavar="TYPE",
        default="f16",
        choices=KV_TYPES,
        label="draft key cache type",
    )
    cache_type_v_draft: str | None = option(
        "-ctvd --cache-type-v-draft",
        "Type of the values in the KV cache of the draft or head.",
        "context",
        where="profile python rare",
        metavar="TYPE",
        default="f16",
        choices=KV_TYPES,
        label="draft value cache type",
    )
    flash_attn: str | None = option(
        "-fa --flash-attn",
        "Use flash attention.",
        "context",
        where="profile sweep tune python rare",
        variable="FA",
        default="auto",
        choices=("auto", "on", "off"),
        reader=_on_off,
        label="flash attention",
    )
    ubatch_size: int | None = option(
        "-ub --ubatch-size",
        "Prompt tokens to compute at once. Fewer need less memory.",
        "context",
        where="profile sweep tune python rare",
        variable="UBATCH_SIZE",
        shown="512",
        least=1,
        most=MAX_MICRO_BATCH,
        usual=f"1 to {MAX_MICRO_BATCH}; 512 is usual",
        label="micro-batch",
    )
    no_op_offload: bool | None = option(
        "--no-op-offload",
        "Do not copy weights kept in RAM to the GPU for prompt processing. Slower, but needs less GPU memory.",
        "context",
        where="profile python rare",
        label="no op offload",
    )
    op_offload_min_batch: int | None = option(
        "--op-offload-min-batch",
        "Smallest batch for which weights in RAM are copied to the GPU and used there. 2 also covers draft "
        "verification; llama.cpp's default is 32.",
        "context",
        where="profile sweep tune python rare",
        variable="OP_OFFLOAD_MIN_BATCH",
        shown="planned",
        least=1,
        most=MAX_CONTEXT,
        usual="--op-offload-min-batch 2; llama.cpp's default is 32",
        label="op offload from",
    )

    # ---- chats
    reasoning: str | None = option(
        "-rea --reasoning",
        "Let reasoning models think first. A request can override it.",
        "reasoning",
        default="auto",
        choices=("on", "off", "auto"),
        reader=_on_off,
    )

    # ---- sampling
    temp: float | None = option(
        "--temp",
        "Temperature; 0 is greedy.",
        "sampling",
        where="chat",
        metavar="T",
        default=0.0,
        least=0,
        usual="--temp 0.8; 0 is greedy",
        label="temperature",
    )
    top_k: int | None = option(
        "--top-k",
        "Keep the K most likely tokens; 0 is off.",
        "sampling",
        where="chat rare",
        metavar="K",
        default=40,
        least=0,
        usual="--top-k 40; 0 turns it off",
        label="top-k",
    )
    top_p: float | None = option(
        "--top-p",
        "Keep the most likely tokens up to this total probability; 1 is off.",
        "sampling",
        where="chat rare",
        metavar="P",
        default=0.95,
        most=1,
        above=0,
        usual="--top-p 0.95; 1 turns it off",
        label="top-p",
    )
    min_p: float | None = option(
        "--min-p",
        "Drop tokens less likely than this fraction of the most likely one; 0 is off.",
        "sampling",
        where="chat rare",
        metavar="P",
        default=0.05,
        least=0,
        most=1,
        usual="--min-p 0.05; 0 turns it off",
        label="min-p",
    )
    seed: int | None = option(
        "-s --seed",
        "Random seed; -1 draws one. The same seed gives the same text, with and without a draft.",
        "sampling",
        where="chat",
        default=0,
        least=-1,
        below=2**64,
        usual="--seed 7; --seed -1 draws one",
    )
    repeat_penalty: float | None = option(
        "--repeat-penalty",
        "Divide the logits of tokens already in the text by this; 1 is off.",
        "sampling",
        where="chat rare",
        default=1.0,
        least=1 / MAX_PENALTY,
        most=MAX_PENALTY,
        usual="--repeat-penalty 1.1; 1 turns it off",
        label="repeat penalty",
    )
    repeat_last_n: int | None = option(
        "--repeat-last-n",
        "Penalize repeats of the last N tokens, prompt included; 0 is off, -1 is the whole context.",
        "sampling",
        where="chat rare",
        default=64,
        least=-1,
        usual="--repeat-last-n 64; -1: the whole context, 0: no penalties",
        label="repeat-last-n",
    )
    presence_penalty: float | None = option(
        "--presence-penalty",
        "Subtract this from the logits of tokens already in the text; 0 is off.",
        "sampling",
        where="chat rare",
        default=0.0,
        least=-MAX_PENALTY,
        most=MAX_PENALTY,
        usual="--presence-penalty 0.5; 0 turns it off",
        label="presence penalty",
    )
    frequency_penalty: float | None = option(
        "--frequency-penalty",
        "Subtract this from a token's logit for each time it is already in the text; 0 is off.",
        "sampling",
        where="chat rare",
        default=0.0,
        least=-MAX_PENALTY,
        most=MAX_PENALTY,
        usual="--frequency-penalty 0.5; 0 turns it off",
        label="frequency penalty",
    )

    # ---- measurements
    repetitions: int | None = option(
        "-r --repetitions", "Repetitions of each measurement.", "trials", least=1, most=MAX_COUNT, usual="-r 5"
    )
    results: Path | None = option(
        "--results",
        "Folder for saved measurements.",
        "results",
        where="rare",
        metavar="FOLDER",
        shown="your data folder",
    )
    fresh: bool | None = option("--fresh", "Measure everything again, even what is saved.", "fresh")
    export_json: Path | None = option("--export-json", "Write the JSON document to this file.", "exports")
    export_markdown: Path | None = option(
        "--export-markdown", "Write the table to this file as Markdown.", "exports", where="rare"
    )
    export_csv: Path | None = option(
        "--export-csv", "Write one line per trial to this file as CSV.", "exports", where="rare"
    )
    html: Path | None = option("--html", "Write a self-contained HTML page with plots.", "exports")

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if value is not None and (row := OPTIONS.get(one.name)) is not None:
                object.__setattr__(self, one.name, row.check(value))

    def given(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the given values by name, of all options or only of those in ``names``."""
        wanted = [one.name for one in dataclasses.fields(self)] if names is None else names
        return {name: value for name in wanted if (value := getattr(self, name)) is not None}

    def over(self, other: Settings) -> Settings:
        """Return ``other``, overridden by the values that these settings give."""
        return replace(other, **self.given())

    def value(self, name: str) -> Any:
        """Return an option's value, or its default if none is given."""
        value = getattr(self, name)
        return OPTIONS[name].default if value is None else value


@dataclass(frozen=True, slots=True)
class OutputFlags:
    """Flags for a command's output and questions."""

    json: bool = option("--json", "Print one JSON document, even on failure.", "flags")
    quiet: bool = option("-q --quiet", "Hide progress and notes.", "flags")
    verbose: bool = option("-v --verbose", "Show more detail, and llama.cpp's log.", "flags")
    yes: bool = option("-y --yes", "Answer yes to questions (download, overwrite).", "yes")


def table(record: type[Any]) -> dict[str, Option]:
    """Return the rows of a class like :class:`Settings`, by name."""
    hints = get_type_hints(record)
    rows = {}
    for one in dataclasses.fields(record):
        row: Option = one.metadata["option"]
        kinds = [kind for kind in get_args(hints[one.name]) or (hints[one.name],) if kind is not type(None)]
        several = getattr(kinds[0], "__origin__", None) is tuple
        rows[one.name] = replace(
            row,
            name=one.name,
            kind=str if several else kinds[0],
            repeated=row.repeated or (several and row.reader is None),
            label=row.label or one.name.replace("_", " "),
        )
    return rows


OPTIONS = table(Settings)
FLAGS = table(OutputFlags)


def names(**properties: Any) -> tuple[str, ...]:
    """Return the names of rows with these properties, e.g. ``names(profile=True)`` for the keys of a profile."""
    return tuple(
        row.name for row in OPTIONS.values() if all(getattr(row, key) == value for key, value in properties.items())
    )


def of_keywords(keywords: Mapping[str, Any], base: Settings | None = None, **more: Any) -> Settings:
    """Return the settings from a Python caller's keywords, which override ``base``.

    ``more`` holds options that are separate parameters of the caller.

    Raises:
        UsageError: a name is unknown (the hint suggests the nearest), or a value is invalid.
    """
    known = names(python=True)
    for name in keywords:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *OLD_NAMES], n=1)
            hint = (
                f"did you mean {OLD_NAMES.get(near[0], near[0])!r}?" if near else "known options: " + ", ".join(known)
            )
            raise UsageError(f"there is no option {name!r}", hint)
    return Settings(**keywords, **more).over(base or Settings())


def renamed(value: Any) -> Any:
    """Return JSON or TOML data with :data:`OLD_NAMES` replaced by current names."""
    if isinstance(value, Mapping):
        return {OLD_NAMES.get(key, key): renamed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [renamed(each) for each in value]
    return value
