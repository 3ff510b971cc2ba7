"""The table of options: one row each, and everything that a flag, a profile key or a keyword needs comes from it.

A row is a field of :class:`Settings` whose metadata is an :class:`Option`. To add an option, add one field here, and
use ``settings.NAME`` where it counts. What reads the rows:

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

This module imports nothing but the errors, and is cheap to import: the help needs it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ggufspec.errors import UsageError

POLICIES = ("adaptive", "fixed")
DRAFT_MAX = 63  # tokens a round at most, unless given: copies of code run long
FIXED_DRAFT_MAX = 4  # the same with --draft-policy fixed and no plan
MAX_TOP_K = 1000  # of the acceptance rule top-k:N
KV_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
MAX_CONTEXT = 1 << 24  # no model was trained with more than 10 million tokens
MAX_THREADS = 512  # GGML_MAX_N_THREADS, ggml/include/ggml.h
MAX_WIDTH = 256  # tokens whose logits one call may ask for
MAX_MICRO_BATCH = 4096
MAX_COUNT = 2**31 - 1  # llama.cpp's int32_t
MAX_PENALTY = 100.0  # so that no finite logit becomes infinite
MAX_PARALLEL = 64  # conversations
MAX_LIST = 64  # values of a sweep

OLD_NAMES = {  # of profiles and results made before options had llama.cpp's names
    "n_ctx": "ctx_size",
    "type_k": "cache_type_k",
    "type_v": "cache_type_v",
    "flash_attention": "flash_attn",
    "micro_batch": "ubatch_size",
    "cpu_experts": "n_cpu_moe",
    "draft_gpu_layers": "gpu_layers_draft",
}


@dataclass(frozen=True, slots=True)
class Drafter:
    """One row of :data:`DRAFTERS`."""

    module: str  # has ``make``, see :func:`ggufspec.decoding.drafters.make`
    label: str  # what reports and messages call it
    needs_model: bool = False  # whether it drafts with the draft file
    needs_corpus: bool = False  # whether ``--lookup-corpus`` is for it
    is_head: bool = False  # whether its file is a head, which reads the target's hidden rows
    may_be_in_target: bool = False  # whether the target's own file may have it, so that no draft file is needed

    @property
    def needs_file(self) -> bool:
        """Whether it cannot do without a draft file."""
        return self.needs_model and not self.may_be_in_target


# The registry of drafters: a new one is a module and a row here.
DRAFTERS = {
    "draft": Drafter("ggufspec.decoding.drafters.model", "draft model", needs_model=True),
    "mtp": Drafter(
        "ggufspec.decoding.drafters.head", "MTP head", needs_model=True, is_head=True, may_be_in_target=True
    ),
    "eagle3": Drafter("ggufspec.decoding.drafters.head", "EAGLE-3 head", needs_model=True, is_head=True),
    "lookup": Drafter("ggufspec.decoding.drafters.lookup", "n-gram lookup", needs_corpus=True),
}
_ALIASES = {"both": ("draft", "lookup"), "none": ()}


def _top_k(text: str) -> float:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_TOP_K):
        raise ValueError(f"needs a number of tokens: 1 to {MAX_TOP_K}")
    return int(text)


def _epsilon(text: str) -> float:
    reason = "needs a probability: above 0, below 1"
    try:
        value = float(text)
    except ValueError:
        raise ValueError(reason) from None
    if not 0 < value < 1:
        raise ValueError(reason)
    return value


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of :data:`RULES`."""

    form: str  # how ``--accept`` has it: its name, and a number's name where it takes one
    made_by: str  # module and class, see :func:`ggufspec.decoding.rules.make_rule`
    description: str  # when a drafted token is accepted
    lossless: bool = True  # whether the text has the target's distribution
    number: Callable[[str], float] | None = None  # reads the number; raises ValueError with the reason
    usual: str = ""  # the hint for a number that is refused


# The registry of acceptance rules.
RULES = {
    "exact": Rule("exact", "coupled:CoupledRule", "it is the target's own choice, greedy or with shared noise"),
    "residual": Rule("residual", "speculative:SpeculativeRule", "uniform < min(1, p / q)"),
    "top-k": Rule(
        "top-k:N",
        "lossy:TopKRule",
        "it is the target's own choice or one of its N likeliest",
        lossless=False,
        number=_top_k,
        usual="--accept top-k:3",
    ),
    "typical": Rule(
        "typical:EPS",
        "lossy:TypicalRule",
        "it is the target's own choice or likelier than min(EPS, √EPS · exp(−entropy))",
        lossless=False,
        number=_epsilon,
        usual="--accept typical:0.3",
    ),
}
RULE_FORMS = tuple(rule.form for rule in RULES.values())


def parse_rule(text: str) -> tuple[Rule, float | None]:
    """The rule that ``--accept`` names, and its number if it takes one.

    Raises:
        UsageError: there is no such rule, or its number is not in range.
    """
    name, colon, number = text.partition(":")
    rule = RULES.get(name)
    if rule is None or (colon and rule.number is None):
        raise UsageError(f"there is no acceptance rule {text!r}", "--accept is one of " + ", ".join(RULE_FORMS))
    if rule.number is None:
        return rule, None
    try:
        return rule, rule.number(number)
    except ValueError as error:
        raise UsageError(f"{text!r} {error}", rule.usual) from None


def check_rule(text: str) -> str:
    """The same text if it names an acceptance rule.

    Raises:
        UsageError: it names none.
    """
    parse_rule(text)
    return text


def is_lossy(text: str) -> bool:
    """Whether the text may differ in distribution from the target's own under this rule."""
    return not parse_rule(text)[0].lossless


def parse_drafters(text: str) -> tuple[str, ...]:
    """The drafters that ``--drafter`` names: ``draft``, ``draft+lookup`` or ``both``, ``none``.

    Raises:
        UsageError: one of them is not known.
    """
    if text in _ALIASES:
        return _ALIASES[text]
    names = tuple(dict.fromkeys(text.split("+")))
    check_drafters(names)
    return names


def check_drafters(names: Iterable[str]) -> None:
    """Raise UsageError unless all of them are in :data:`DRAFTERS`."""
    for name in names:
        if name not in DRAFTERS:
            raise UsageError(
                f"there is no drafter {name!r}", "--drafter is one of " + ", ".join((*DRAFTERS, *_ALIASES))
            )


def drafter_text(names: Iterable[str]) -> str:
    """What ``--drafter`` would name these: the inverse of :func:`parse_drafters`."""
    ordered = tuple(sorted(names, key=[*DRAFTERS].index))
    return next((alias for alias, those in _ALIASES.items() if those == ordered), "+".join(ordered))


def with_head(names: Iterable[str], head: str) -> tuple[str, ...]:
    """These drafters where the draft file turns out to be a head of this kind: it drafts in the draft model's place."""
    return tuple(dict.fromkeys(head if head and DRAFTERS[name].needs_model else name for name in names))


def drafters_label(text: str) -> str:
    """``--drafter``'s value for people: "draft model and n-gram lookup"; a later version's drafter is its own label."""
    return " and ".join(DRAFTERS[name].label if name in DRAFTERS else name for name in _named(text)) or "no draft"


def drafts_with_file(text: str) -> bool:
    """Whether one of ``--drafter``'s value drafts with the draft file."""
    return any(DRAFTERS[name].needs_model for name in _named(text) if name in DRAFTERS)


def drafts_with_corpus(text: str) -> bool:
    """Whether one of them takes ``--lookup-corpus``."""
    return any(DRAFTERS[name].needs_corpus for name in _named(text) if name in DRAFTERS)


def _named(text: str) -> tuple[str, ...]:
    return _ALIASES.get(text, tuple(text.split("+")))


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


_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})(?:([+*])(\d{1,9}))?")  # tools/llama-bench/llama-bench.cpp, parse_int_range


@dataclass(frozen=True, slots=True)
class Option:
    """One row."""

    flags: tuple[str, ...]  # as they are typed, the short one first; none for the positional argument
    help: str  # a sentence or two
    group: str  # of the options that commands take together
    metavar: str = ""  # of the help; by the type if empty
    variable: str = ""  # ``GGUFSPEC_<variable>`` holds the value too
    default: Any = None  # what holds where nothing is given; None is decided elsewhere
    shown: str = ""  # what the help shows in brackets instead of the default
    least: float | None = None  # the value is at least this
    most: float | None = None
    also: float | None = None  # a value outside of the bounds that has a meaning of its own
    above: float | None = None  # it is greater than this
    below: float | None = None
    choices: tuple[str, ...] = ()  # the only values
    words: tuple[str, ...] = ()  # values that completion offers beside numbers
    reader: Callable[[str], Any] | None = None  # makes a value of a text; raises ValueError with the reason
    usual: str = ""  # the hint for a value that is refused
    label: str = ""  # what reports and messages call it; by default the name with spaces
    profile: bool = False  # whether profiles have it in ``[settings]``
    sweep: bool = False  # whether ``bench --sweep`` takes a list of it
    tune: bool = False  # whether ``tune`` searches it
    chat: bool = False  # whether a switch of a chat, of the flag's name, changes it
    python: bool = False  # whether it is a keyword of ``load_pair``, ``plan_pair`` and ``bench_pair``
    repeated: bool = False  # whether the flag may be given several times, as that of a tuple without a reader may
    # :func:`table` fills in:
    name: str = ""  # the field's
    kind: type = str  # the field's without None: ``int``, ``float``, ``str``, ``bool``, ``Path``

    @property
    def flag(self) -> str:
        """How it is typed: the short flag."""
        return self.flags[0] if self.flags else self.metavar

    @property
    def form(self) -> str:
        """The value's form, for the help: ``N``, ``N|auto|all``, ``adaptive|fixed``."""
        if self.metavar or self.kind is bool:
            return self.metavar
        return "|".join(self.choices) or {int: "N", float: "X", Path: "FILE"}.get(self.kind, "TEXT")

    @property
    def described(self) -> str:
        """The help with the default in brackets."""
        default = f"{self.default:g}" if self.kind is float and self.default is not None else self.default
        shown = self.shown or ("" if default is None or self.kind is bool else str(default))
        return f"{self.help}  [{shown}]" if shown else self.help

    def check(self, value: Any) -> Any:
        """A value from wherever: one of the right type, within the bounds. Texts are read as on the command line.

        Raises:
            UsageError: it is not; the hint has a usual value.
        """
        if value is None or self.kind is bool:
            return value
        if self.repeated:
            texts = (str(value),) if isinstance(value, str | int) else tuple(map(str, value))
            return tuple(one for text in texts for one in self._read(text)) if self.reader else texts
        if self.reader is not None and isinstance(value, str):
            value = self._read(value)
        elif self.kind in (str, Path) and self.reader is None:
            value = self.kind(value)
        elif self.kind in (int, float) and value not in self.words:
            value = self._number(value)
        if self.choices and value not in self.choices:
            raise UsageError(
                f"there is no {self.label} {str(value)!r}", f"{self.flag} is one of " + ", ".join(self.choices)
            )
        if isinstance(value, int | float) and not self._is_within(value):
            raise UsageError(f"{self.flags[-1]} {_shown(value)} is out of range: {self._range()}", self.usual)
        return value

    def _read(self, text: str) -> Any:
        assert self.reader is not None
        try:
            return self.reader(text)
        except ValueError as error:
            raise UsageError(f"{self.flags[-1]} {text!r} {error}", self.usual) from None

    def _number(self, value: Any) -> Any:
        try:
            return self.kind(value)
        except (ValueError, TypeError, OverflowError):
            what = "a whole number" if self.kind is int else "a number"
            raise UsageError(f"{self.flags[-1]} {str(value)[:40]!r} is not {what}", self.usual) from None

    def _is_within(self, value: float) -> bool:
        return value == self.also or (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def _range(self) -> str:
        if self.least is not None and self.most is not None:
            return f"{_shown(self.least)} to {_shown(self.most)}"
        words = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        return ", ".join(f"{word} {_shown(bound)}" for word, bound in words if bound is not None) or "a finite number"

    def parse_list(self, text: str) -> list[tuple[str, Any]]:
        """(as typed, value) of each in a list with commas, each once; of a number 0-80+8 and 1-16*2 are lists too.

        Raises:
            UsageError: a value is missing or refused, a range goes nowhere, there are too many.
        """
        values: dict[str, Any] = {}
        for part in text.split(","):
            part = part.strip()
            if not part:
                raise UsageError(f"{self.flag} {text!r} has an empty value", f"{self.flag} VALUE,VALUE")
            for shown in _numbers(part) if self.kind is int else [part]:
                values[shown] = self.check(shown)
                if len(values) > MAX_LIST:
                    raise UsageError(f"{self.flag} {text!r} has more than {MAX_LIST} values", "fewer of them")
        return list(values.items())


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def _numbers(part: str) -> Iterator[str]:
    """The numbers of a range, or the one value that is there."""
    found = _RANGE.fullmatch(part)
    if not found:
        yield part
        return
    number, last, by = int(found[1]), int(found[2]), int(found[4] or 1)
    times = found[3] == "*"
    if number > last or by < 1 or (times and (by < 2 or number < 1)):
        raise UsageError(f"{part!r} is not a range", "0-80+8 goes from 0 to 80 by 8, 1-16*2 doubles")
    while number <= last:
        yield str(number)
        number = number * by if times else number + by


def option(flags: str, help: str, group: str, *, where: str = "", **more: Any) -> Any:  # noqa: A002
    """A field of :class:`Settings`. ``where`` has the names of :class:`Option`'s switches that are on, ``flags`` the
    flags, with spaces between them; the other arguments are those of :class:`Option`.
    """
    switches: dict[str, Any] = dict.fromkeys(where.split(), True)
    return field(default=None, metadata={"option": Option(tuple(flags.split()), help, group, **switches, **more)})


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
            raise ValueError(f"is no regular expression: {error}") from None
        if other := _NOT_ECMASCRIPT.search(pattern):
            raise ValueError(f"has {other[0]!r}, which llama.cpp's regular expressions have not")
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
        "-hf --hf-repo", "The target in the Hugging Face hub.", "hub", metavar="USER/REPO:QUANT"
    )
    hf_repo_draft: str | None = option(
        "-hfd --hf-repo-draft",
        "The draft in the hub; mtp and eagle3 in place of QUANT are heads beside a target.",
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
    raw: bool | None = option("--raw", "Send prompts as plain text, without the target's chat template.", "prompts")
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
        where="profile sweep python",
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
    no_calibrate: bool | None = option(
        "--no-calibrate",
        "Guess this machine's speed where it is not known yet, rather than measure it for some ten seconds.",
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
        shown="physical cores, fewer beside busy programs",
        least=0,
        most=MAX_THREADS,
        usual="leave -t out for one per physical core",
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
        below=1,
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
        base: what holds where they have nothing.
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
