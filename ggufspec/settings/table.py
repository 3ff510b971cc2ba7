"""The table of options: one row each, and everything that a flag, a profile key or a keyword needs comes from it.

A row is a field of :class:`Settings` whose metadata is an :class:`Option`. To add an option, add one field here, use
``settings.NAME`` where it counts, and run ``scripts/commands.py``. An option of sampling is used in ``Sampling``
(:mod:`ggufspec.decoding.sampling`), which has a field of its name, as have a server's requests (``serve/requests.py``).
A truncation is named by a chat (``sampled`` in ``chat/commands.py``), and ``bench --engine hook`` passes it on
(``bench/hooked.py``). No profile and no keyword reaches sampling. What reads the rows:

- the command line: :mod:`ggufspec.cli.parameters` makes the parameters of a command from the groups that it takes
- profiles: rows with ``profile`` are the keys of ``[settings]`` (:mod:`ggufspec.models.profile`)
- ``bench --sweep``: rows with ``sweep`` may have a list (:meth:`Option.parse_list`, by the row's type)
- ``tune``: rows with ``tune`` are searched unless they are given
- chat: rows with ``chat`` can be switched while a pair is loaded, by the flag's name: ``/draft-max 4``
- Python: rows with ``python`` are keywords of ``load_pair``, ``plan_pair`` and ``bench_pair``
- reports: ``label`` is what tables and sentences call an option
- the help, ``docs/commands.md`` and the man page: flags, metavar, help, default and :data:`VARIABLES`

Names are those of llama.cpp's long flags, with underscores; :data:`OLD_NAMES` maps what older profiles and results
have. A value of None is one that is not given. Precedence is flag, ``GGUFSPEC_*`` variable, profile, default.

This room imports nothing but the errors, and is cheap to import: the help needs it.
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
DRAFT_MAX = 63  # tokens a round at most, unless given: copies of code run long
FIXED_DRAFT_MAX = 4  # the same with --draft-policy fixed and no plan
LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")
KV_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
MAX_CONTEXT = 1 << 24  # no model was trained with more than 10 million tokens
MAX_THREADS = 512  # GGML_MAX_N_THREADS, ggml/include/ggml.h
MAX_WIDTH = 256  # tokens whose logits one call may ask for
MAX_MICRO_BATCH = 4096
MAX_COUNT = 2**31 - 1  # llama.cpp's int32_t
MAX_PENALTY = 100.0  # so that no finite logit becomes infinite
MAX_PARALLEL = 64  # conversations

OLD_NAMES = {  # of profiles and results made before options had llama.cpp's names
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
    """The chance of one drafted token: as it is, or from accepted ÷ drafted at a draft length, ``0.26@16``.

    A chain ends with its first rejected token: with a chance a, of k drafted tokens a + a² + … + a^k are accepted.
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
    """A number of layers, ``all`` (-1) or ``auto``."""
    wanted = text.strip().lower()
    if wanted == "auto":
        return wanted
    if wanted == "all":
        return -1
    if not re.fullmatch(r"-?\d{1,9}", wanted):
        raise ValueError("is not a number of layers: 45, all or auto")
    return max(int(wanted), -1)


def _tokens(text: str) -> int:
    """A number of tokens; ``max`` is 0, as llama.cpp has it."""
    wanted = text.strip().lower()
    if wanted == "max":
        return 0
    if not re.fullmatch(r"-?\d{1,18}", wanted):
        raise ValueError("is not a number of tokens: 8192, or max")
    return int(wanted)


def _link(text: str) -> str:
    """A PCIe link by generation and lanes."""
    wanted = text.strip().lower()
    if not re.fullmatch(r"pcie[1-6]x(1|2|4|8|16)", wanted):
        raise ValueError("is not a link of PCIe 1 to 6 with 1, 2, 4, 8 or 16 lanes")
    return wanted


def _cpu(text: str) -> str:
    """A CPU by its cores and their vector instructions."""
    wanted = text.strip().lower()
    if not re.fullmatch(r"[1-9]\d{0,2}x(avx2|avx512)", wanted):
        raise ValueError("is not a number of cores with avx2, or with avx512 (which has VNNI): 8xavx2")
    return wanted


def _shares(text: str) -> tuple[float, ...]:
    """Numbers, one for each card."""
    if not re.fullmatch(r"\d{1,9}(\.\d+)?(,\d{1,9}(\.\d+)?)*", text) or not re.search(r"[1-9]", text):
        raise ValueError("is not a list of shares: 3,1 gives the first card three quarters")
    return tuple(float(share) for share in text.split(","))


# Of Python's regular expressions, and not of ECMAScript's, which llama.cpp has (std::regex)
_NOT_ECMASCRIPT = re.compile(r"\(\?(?![:=!])|\\[AZ]|[*+?}]\+")
_MAX_PATTERN = 200


def _overrides(text: str) -> tuple[str, ...]:
    """``PATTERN=DEVICE`` of each, with commas between them: parse_tensor_buffer_overrides in common/arg.cpp."""
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
    """Cache types with commas between them."""
    return tuple(OPTIONS["cache_type_k"].check(name.strip()) for name in text.split(",") if name.strip())


@dataclass(frozen=True, slots=True)
class Settings:
    """What was given: by flags, by a profile or by keywords. None is not given. Values are checked when it is made.

    Raises:
        UsageError: a value is out of range or not known; the hint has a usual one.
    """

    # ---- which models
    pair: str | None = option("", "A profile's name or path; the bundled demo pair if none.", "profile", metavar="PAIR")
    model: str | None = option("-m --model", "The target's GGUF file.", "files", metavar="FILE", variable="MODEL")
    model_draft: str | None = option(
        "-md --model-draft", "The draft's GGUF file.", "files", metavar="FILE", variable="MODEL_DRAFT"
    )
    hf_repo: str | None = option(
        "-hf --hf-repo",
        "The target in the Hugging Face hub; @REV at the end is a branch, a tag or a commit.",
        "hub",
        metavar="USER/REPO:QUANT",
    )
    hf_repo_draft: str | None = option(
        "-hfd --hf-repo-draft",
        "The draft in the hub; mtp and eagle3 in place of QUANT are heads next to a target.",
        "hub",
        metavar="USER/REPO:QUANT",
    )

    # ---- the prompt and its answer
    prompt: str | None = option("-p --prompt", "The prompt; - reads standard input.", "prompt", metavar="TEXT")
    file: Path | None = option("-f --file", "Read the prompt from a file.", "prompt")
    prompts: Path | None = option(
        "--prompts",
        "Prompts of your own, one a line: text, or JSON such as a log of requests to a chat API.",
        "prompts",
    )
    raw: bool | None = option("--raw", "Continue prompts as plain text, without the model's chat template.", "raw")
    system: str | None = option("-sys --system", "The system prompt.", "system", metavar="TEXT")
    system_file: Path | None = option("--system-file", "Read the system prompt from a file.", "system")
    predict: int | None = option(
        "-n --predict", "Tokens to generate at most.", "length", least=1, most=MAX_COUNT, usual="-n 128", where="chat"
    )
    stop: tuple[str, ...] | None = option("--stop", "End before this text; may be repeated.", "answer", metavar="TEXT")
    grammar: str | None = option("--grammar", "The answer follows this grammar.", "answer", metavar="GBNF")
    grammar_file: Path | None = option("--grammar-file", "The same, from a file.", "answer")
    json_schema: str | None = option(
        "-j --json-schema", "The answer is JSON of this schema; {} is any.", "answer", metavar="SCHEMA"
    )
    json_schema_file: Path | None = option("-jf --json-schema-file", "The same, from a file.", "answer")

    # ---- conversations
    parallel: int | None = option(
        "-np --parallel",
        "Conversations whose caches are kept side by side, each of -c tokens; one answer is decoded at a time.",
        "parallel",
        where="python",
        default=1,
        least=1,
        most=MAX_PARALLEL,
        usual="--parallel 2",
        label="kept conversations",
    )

    # ---- placement
    gpu_layers: int | str | None = option(
        "-ngl --gpu-layers",
        "Target layers on the GPU; more than it has is all.",
        "placement",
        where="sweep tune python",
        metavar="N|auto|all",
        variable="NGL",
        shown="auto",
        words=("auto",),
        reader=_layers,
        usual="-ngl 45, all or auto",
        label="target layers",
    )
    gpu_layers_draft: int | str | None = option(
        "-ngld --gpu-layers-draft",
        "Draft layers on the GPU.",
        "placement",
        where="sweep tune python",
        metavar="N|auto|all",
        variable="NGLD",
        shown="auto",
        words=("auto",),
        reader=_layers,
        usual="-ngld 45, all or auto",
        label="draft layers",
    )
    tensor_split: tuple[float, ...] | None = option(
        "-ts --tensor-split",
        "Shares of the target's layers for each card.",
        "placement",
        where="python",
        metavar="N,N",
        shown="by budget",
        reader=_shares,
        usual="-ts 3,1",
    )
    n_cpu_moe: int | None = option(
        "--n-cpu-moe",
        "Keep the experts of the first N blocks on the CPU.",
        "placement",
        where="profile sweep tune python",
        shown="auto",
        least=0,
        usual="--n-cpu-moe 10",
        label="CPU expert blocks",
    )
    n_cpu_ffn: int | None = option(
        "--n-cpu-ffn",
        "Keep the dense feed-forward weights of the first N blocks on the CPU, their attention and cache on the GPU.",
        "placement",
        where="profile sweep tune python",
        shown="auto",
        least=0,
        usual="--n-cpu-ffn 10",
        label="CPU feed-forward blocks",
    )
    override_tensor: tuple[str, ...] | None = option(
        "-ot --override-tensor",
        "Target tensors and the device that they are on, whatever the other options say; may be repeated.",
        "placement",
        where="profile python repeated",
        metavar="PATTERN=DEVICE",
        reader=_overrides,
        usual="-ot 'ffn_.*_exps=CPU'; devices are named as in `ggufspec plan`",
        label="tensors elsewhere",
    )
    load_mode: str | None = option(
        "-lm --load-mode",
        "How weights come into memory. Unless given: none where some stay on the CPU beside a GPU and memory holds "
        "them, as it copies those several times as fast; else auto.",
        "context",
        where="profile python",
        variable="LOAD_MODE",
        choices=LOAD_MODES,
        label="load mode",
    )
    no_host: bool | None = option(
        "--no-host",
        "Repack the CPU's weights beside a GPU too, where their type allows it (Q4_K, Q4_0, Q8_0 and MXFP4 on x86): "
        "the CPU then verifies drafts faster, and the GPU computes with none of these.  [with --no-op-offload, as it "
        "computes with none then]",
        "context",
        where="profile python",
        label="no host buffer",
    )
    mmproj: str | None = option(
        "-mm --mmproj",
        "Leave room for this image projector, which llama-server loads beside the target: a file, a URL, or USER/REPO, "
        "whose mmproj-….gguf it is. ggufspec itself reads no images.",
        "vision",
        where="profile",
        metavar="FILE|REPO",
        usual="--mmproj mmproj-F16.gguf",
    )
    no_mmproj_offload: bool | None = option(
        "--no-mmproj-offload", "The projector stays on the CPU.", "vision", where="profile"
    )
    headroom: str | None = option(
        "--headroom", "Memory to leave free on each card.", "devices", where="python", metavar="SIZE", shown="256MiB"
    )
    rpc: tuple[str, ...] | None = option(
        "--rpc", "A llama.cpp RPC worker, as a further device.", "devices", where="python", metavar="HOST:PORT"
    )
    gpu: tuple[str, ...] | None = option(
        "--gpu", "Plan for a card that is not here: --gpu 'RTX 4090'.", "simulated", metavar="NAME"
    )
    vram: tuple[str, ...] | None = option(
        "--vram", "Plan for a card of this memory: 24GiB.", "simulated", metavar="SIZE"
    )
    ram: str | None = option(
        "--ram",
        "Plan for so much free memory beside the cards; beside those that are not here there is enough otherwise.",
        "simulated",
        metavar="SIZE",
        usual="--ram 64GiB",
    )
    ram_bandwidth: float | None = option(
        "--ram-bandwidth",
        "Plan for memory of this bandwidth, in GB/s: two channels of DDR5-5600 have 89.6, of DDR4-3200 51.2.",
        "simulated",
        metavar="X",
        least=1,
        most=10_000,
        usual="--ram-bandwidth 89.6",
    )
    cpu: str | None = option(
        "--cpu",
        "Plan for a CPU of so many cores with these vector instructions: avx2, or avx512 with VNNI.",
        "simulated",
        metavar="NxSET",
        reader=_cpu,
        usual="--cpu 8xavx2",
    )
    link: str | None = option(
        "--link",
        "Plan for this link to the cards.",
        "simulated",
        metavar="pcieNxN",
        reader=_link,
        usual="--link pcie4x16",
    )
    no_calibrate: bool | None = option(
        "--no-calibrate",
        "Guess this machine's speed if it is not known yet, rather than measure it for some ten seconds.",
        "calibration",
        variable="NO_CALIBRATE",
    )
    allow_kv: tuple[str, ...] | None = option(
        "--allow-kv",
        "Cache types to try besides, which may cost quality: q8_0, or q8_0,q4_0.",
        "allowed",
        metavar="TYPES",
        reader=_types,
        usual="--allow-kv q8_0",
    )
    acceptance: float | None = option(
        "--acceptance",
        "The chance to expect that a drafted token is accepted; 0.26@16 is accepted ÷ drafted tokens at draft length "
        "16, as programs log it.",
        "expected",
        where="profile",
        metavar="P|R@N",
        least=0,
        most=1,
        reader=_acceptance,
        usual="--acceptance 0.7, or --acceptance 0.26@16",
    )

    # ---- drafting
    no_draft: bool | None = option("--no-draft", "Target-only: no draft, no lookup.", "target-only")
    drafter: str | None = option(
        "--drafter",
        "Who drafts: the draft file, a model or a head, n-grams of the text (lookup), both, or none; mtp may be in the "
        "target's own file.",
        "drafting",
        where="profile sweep tune chat python",
        metavar="|".join((*DRAFTERS, *_ALIASES)),
        variable="DRAFTER",
        default="both",
        words=(*DRAFTERS, *_ALIASES),
        reader=_drafter,
    )
    draft_policy: str | None = option(
        "--draft-policy",
        "Draft as far as it pays, which may be not at all, or always --draft-max tokens.",
        "drafting",
        where="profile sweep tune chat python",
        default="adaptive",
        choices=POLICIES,
        label="draft policy",
    )
    draft_max: int | None = option(
        "--draft-max",
        "The longest draft of a round, in tokens.",
        "drafting",
        where="profile sweep tune chat python",
        variable="DRAFT_MAX",
        shown=f"{DRAFT_MAX}; if fixed, what the plan finds best, or {FIXED_DRAFT_MAX}",
        least=1,
        most=MAX_WIDTH - 1,
        usual="--draft-max 4 is usual; --no-draft runs target-only",
        label="draft length",
    )
    lookup_corpus: Path | None = option(
        "--lookup-corpus", "A text whose n-grams the lookup knows too.", "drafting", where="python"
    )
    accept: str | None = option(
        "--accept",
        "exact and residual are lossless; top-k:N and typical:EPS are lossy.",
        "drafting",
        where="sweep chat python",
        metavar="RULE",
        default="exact",
        reader=check_rule,
        label="acceptance rule",
    )
    strict: bool | None = option(
        "--strict", "The same text to the bit with and without draft; may be slower.", "drafting", where="python"
    )

    # ---- context, threads and cache
    ctx_size: int | None = option(
        "-c --ctx-size",
        "Tokens of context; max, or 0, is all that the target was trained for.",
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
        shown="fast cores, fewer next to busy programs",
        least=0,
        most=MAX_THREADS,
        usual="leave -t out for one per fast core",
    )
    cache_type_k: str | None = option(
        "-ctk --cache-type-k",
        "Key cache type, such as q8_0.",
        "context",
        where="profile sweep python",
        metavar="TYPE",
        variable="CTK",
        default="f16",
        choices=KV_TYPES,
        label="key cache type",
    )
    cache_type_v: str | None = option(
        "-ctv --cache-type-v",
        "Value cache type.",
        "context",
        where="profile sweep python",
        metavar="TYPE",
        variable="CTV",
        default="f16",
        choices=KV_TYPES,
        label="value cache type",
    )
    cache_type_k_draft: str | None = option(
        "-ctkd --cache-type-k-draft",
        "Key cache type of the draft or head.",
        "context",
        where="profile python",
        metavar="TYPE",
        default="f16",
        choices=KV_TYPES,
        label="draft key cache type",
    )
    cache_type_v_draft: str | None = option(
        "-ctvd --cache-type-v-draft",
        "Value cache type of the draft or head.",
        "context",
        where="profile python",
        metavar="TYPE",
        default="f16",
        choices=KV_TYPES,
        label="draft value cache type",
    )
    flash_attn: str | None = option(
        "-fa --flash-attn",
        "Flash attention.",
        "context",
        where="profile sweep tune python",
        variable="FA",
        default="auto",
        choices=("auto", "on", "off"),
        label="flash attention",
    )
    ubatch_size: int | None = option(
        "-ub --ubatch-size",
        "Prompt tokens computed at once; fewer take less memory.",
        "context",
        where="profile sweep tune python",
        variable="UBATCH_SIZE",
        shown="512",
        least=0,
        most=MAX_MICRO_BATCH,
        usual=f"1 to {MAX_MICRO_BATCH}; 512 is usual",
        label="micro-batch",
    )
    no_op_offload: bool | None = option(
        "--no-op-offload",
        "Keep the CPU's weights off the GPU while prompts are read: slower, and takes less memory there.",
        "context",
        where="profile python",
        label="no op offload",
    )
    op_offload_min_batch: int | None = option(
        "--op-offload-min-batch",
        "From how many tokens on the GPU computes with the CPU's weights too, which are copied to it: from 2 on it "
        "verifies drafts so.",
        "context",
        where="profile sweep tune python",
        variable="OP_OFFLOAD_MIN_BATCH",
        shown="planned",
        least=1,
        most=MAX_CONTEXT,
        usual="--op-offload-min-batch 2; 32 is llama.cpp's own",
        label="op offload from",
    )

    # ---- chats
    reasoning: str | None = option(
        "-rea --reasoning",
        "Whether a model that can reason does, unless a request says.",
        "reasoning",
        default="auto",
        choices=("on", "off", "auto"),
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
        "Keep the k likeliest tokens; 0 is off.",
        "sampling",
        where="chat",
        metavar="K",
        default=40,
        least=0,
        usual="--top-k 40; 0 turns it off",
        label="top-k",
    )
    top_p: float | None = option(
        "--top-p",
        "Keep the likeliest tokens up to this probability; 1 is off.",
        "sampling",
        where="chat",
        metavar="P",
        default=0.95,
        most=1,
        above=0,
        usual="--top-p 0.95; 1 turns it off",
        label="top-p",
    )
    min_p: float | None = option(
        "--min-p",
        "Keep tokens at least this fraction as likely as the likeliest; 0 is off.",
        "sampling",
        where="chat",
        metavar="P",
        default=0.05,
        least=0,
        most=1,
        usual="--min-p 0.05; 0 turns it off",
        label="min-p",
    )
    seed: int | None = option(
        "-s --seed",
        "The same seed gives the same text, with and without draft; -1 draws one.",
        "sampling",
        where="chat",
        default=0,
        least=-1,
        below=2**64,
        usual="--seed 7; --seed -1 draws one",
    )
    repeat_penalty: float | None = option(
        "--repeat-penalty",
        "Divide the logits of tokens in the text by this; 1 is off.",
        "sampling",
        where="chat",
        default=1.0,
        least=1 / MAX_PENALTY,
        most=MAX_PENALTY,
        usual="--repeat-penalty 1.1; 1 turns it off",
        label="repeat penalty",
    )
    repeat_last_n: int | None = option(
        "--repeat-last-n",
        "Penalise the last N tokens, the prompt's too; 0 is off, -1 the context.",
        "sampling",
        where="chat",
        default=64,
        least=-1,
        usual="--repeat-last-n 64; -1 is the context, 0 turns penalties off",
        label="repeat-last-n",
    )
    presence_penalty: float | None = option(
        "--presence-penalty",
        "Subtract this from the logits of tokens in the text; 0 is off.",
        "sampling",
        where="chat",
        default=0.0,
        least=-MAX_PENALTY,
        most=MAX_PENALTY,
        usual="--presence-penalty 0.5; 0 turns it off",
        label="presence penalty",
    )
    frequency_penalty: float | None = option(
        "--frequency-penalty",
        "Subtract this once for each time a token is in the text; 0 is off.",
        "sampling",
        where="chat",
        default=0.0,
        least=-MAX_PENALTY,
        most=MAX_PENALTY,
        usual="--frequency-penalty 0.5; 0 turns it off",
        label="frequency penalty",
    )

    # ---- what becomes of measurements
    repetitions: int | None = option(
        "-r --repetitions", "Trials of each run.", "trials", least=1, most=MAX_COUNT, usual="-r 5"
    )
    results: Path | None = option(
        "--results", "Where measurements are kept.", "results", metavar="FOLDER", shown="the user's data folder"
    )
    fresh: bool | None = option("--fresh", "Start over: measure again what is kept already.", "results")
    export_json: Path | None = option("--export-json", "Write the JSON document to this file.", "exports")
    export_markdown: Path | None = option("--export-markdown", "Write the table as Markdown.", "exports")
    export_csv: Path | None = option("--export-csv", "Write one line per trial as CSV.", "exports")
    html: Path | None = option("--html", "Write a page with plots, one file for any browser.", "exports")

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if value is not None and (row := OPTIONS.get(one.name)) is not None:
                object.__setattr__(self, one.name, row.check(value))

    def given(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """What is given, by name; of ``names`` if there are some."""
        wanted = [one.name for one in dataclasses.fields(self)] if names is None else names
        return {name: value for name in wanted if (value := getattr(self, name)) is not None}

    def over(self, other: Settings) -> Settings:
        """What is given here, and where nothing is, what ``other`` has."""
        return replace(other, **self.given())

    def value(self, name: str) -> Any:
        """What is given, or else the default."""
        value = getattr(self, name)
        return OPTIONS[name].default if value is None else value


@dataclass(frozen=True, slots=True)
class Flags:
    """How a command talks: of one invocation, for all of it."""

    json: bool = option("--json", "Print one JSON document, on failure too.", "flags")
    quiet: bool = option("-q --quiet", "No progress, no notes.", "flags")
    verbose: bool = option(
        "-v --verbose", "Say all there is to say, with llama.cpp's log of models that are loaded.", "flags"
    )
    yes: bool = option("-y --yes", "Download what is missing, and more, without asking.", "yes")


def table(record: type[Any]) -> dict[str, Option]:
    """The rows of a class like :class:`Settings`, by name."""
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
FLAGS = table(Flags)
VARIABLES = tuple(row.variable for row in OPTIONS.values() if row.variable)


def names(**properties: Any) -> tuple[str, ...]:
    """Names of the rows with these properties: ``names(profile=True)`` are the keys of a profile's settings."""
    return tuple(
        row.name for row in OPTIONS.values() if all(getattr(row, key) == value for key, value in properties.items())
    )


def of_keywords(keywords: Mapping[str, Any], base: Settings | None = None, **more: Any) -> Settings:
    """Settings of a Python caller's keywords; None is not given.

    Args:
        keywords: names and values, of the rows that Python has.
        base: what holds if they have nothing.
        more: the same of rows that are parameters of their own.

    Raises:
        UsageError: a name is not known, the nearest is named; or a value is refused.
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
    """Plain data (what JSON and TOML have) with the names of today in place of :data:`OLD_NAMES`."""
    if isinstance(value, Mapping):
        return {OLD_NAMES.get(key, key): renamed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [renamed(each) for each in value]
    return value
