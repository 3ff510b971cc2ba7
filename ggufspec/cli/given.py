"""What a command line says, in groups: options that several commands share, as one value each.

A command has a group as a parameter; :func:`spread` shows Typer the options in it and gathers what was parsed of them.
A command that sweeps has a parameter of type ``Several | None`` too: then an option may be given a list.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from enum import EnumType
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from ggufspec.cli import options, ui
from ggufspec.display import visible
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.settings import FLAGS, Flags, Option

if TYPE_CHECKING:
    from ggufspec.cli.planned import Chosen
    from ggufspec.decoding.sampling import Sampling
    from ggufspec.models.profile import Pair
    from ggufspec.schema.base import Document


_Document = TypeVar("_Document", bound="Document")


@dataclass(frozen=True, slots=True)
class Files:
    """A pair whose files are here, or will be."""

    pair: options.PairName = None
    model: options.TargetFile = None
    model_draft: options.DraftFile = None
    hf_repo: options.TargetRepo = None
    hf_repo_draft: options.DraftRepo = None

    def choose(self, *, no_draft: bool = False, need_draft: bool = False) -> Pair:
        """The pair, its files here and checked: :func:`ggufspec.cli.options.choose_pair`."""
        return options.choose_pair(
            self.pair,
            self.model,
            self.model_draft,
            self.hf_repo,
            self.hf_repo_draft,
            no_draft=no_draft,
            need_draft=need_draft,
        )


@dataclass(frozen=True, slots=True)
class BenchFiles(Files):
    """The same for a bench, whose demo pair is as heavy as a real one."""

    pair: options.BenchPairName = None


@dataclass(frozen=True, slots=True)
class Sources:
    """A pair whose headers are enough."""

    pair: options.PairName = None
    model: options.TargetSource = None
    model_draft: options.DraftSource = None
    hf_repo: options.TargetRepo = None
    hf_repo_draft: options.DraftRepo = None

    def choose(self) -> Chosen:
        """The pair, wherever its files are: :func:`ggufspec.cli.planned.choose`."""
        from ggufspec.cli import planned

        return planned.choose(self.pair, self.model, self.model_draft, self.hf_repo, self.hf_repo_draft)


@dataclass(frozen=True, slots=True)
class Placing:
    """Where layers go; what is not given is planned."""

    gpu_layers: options.GpuLayers = None
    gpu_layers_draft: options.DraftGpuLayers = None
    tensor_split: options.TensorSplit = None
    n_cpu_moe: options.CpuExperts = None
    headroom: options.Headroom = None
    rpc: options.Rpc = None


@dataclass(frozen=True, slots=True)
class Room:
    """What of the cards may be used; where layers go is planned."""

    headroom: options.Headroom = None
    rpc: options.Rpc = None


@dataclass(frozen=True, slots=True)
class Drafting:
    """Who guesses, how far, and what is kept of it."""

    drafter: options.DrafterName = None
    draft_policy: options.DraftPolicy = None
    draft_max: options.DraftMax = None
    lookup_corpus: options.LookupCorpus = None
    accept: options.Accept = "exact"
    strict: options.Strict = False


@dataclass(frozen=True, slots=True)
class Decoding:
    """Context, threads, KV cache and compute buffers."""

    ctx_size: options.ContextSize = None
    threads: options.Threads = None
    cache_type_k: options.TypeK = None
    cache_type_v: options.TypeV = None
    flash_attn: options.FlashAttention = None
    ubatch_size: options.MicroBatch = None


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and what its answer must be like."""

    prompt: options.PromptText = None
    file: options.PromptFile = None
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text; may be repeated.")
    ] = None
    grammar: options.Grammar = None
    grammar_file: options.GrammarFile = None
    json_schema: options.JsonSchema = None
    json_schema_file: options.JsonSchemaFile = None

    def text(self) -> str:
        """The prompt.

        Raises:
            UsageError: there is none, or it cannot be read.
        """
        text = options.read_prompt(self.prompt, self.file)
        if not text:
            raise UsageError("there is no prompt", 'give one with -p "…", -f FILE, or -p - for standard input')
        return text

    def rules(self) -> str:
        """The grammar, in llama.cpp's GBNF; empty when there is none.

        Raises:
            UsageError: as :func:`ggufspec.cli.options.read_grammar`.
        """
        return options.read_grammar(self.grammar, self.grammar_file, self.json_schema, self.json_schema_file)


@dataclass(frozen=True, slots=True)
class Exports:
    """Files that the result goes to as well."""

    export_json: Annotated[
        Path | None, typer.Option("--export-json", metavar="FILE", help="Write the JSON document to this file.")
    ] = None
    export_markdown: Annotated[
        Path | None, typer.Option("--export-markdown", metavar="FILE", help="Write the table as Markdown.")
    ] = None
    export_csv: Annotated[
        Path | None, typer.Option("--export-csv", metavar="FILE", help="Write one line per trial as CSV.")
    ] = None
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots, one file for any browser.")
    ] = None

    def check(self) -> None:
        """Find out before the run that one could not be written.

        Raises:
            GgufspecError: a file cannot be written.
        """
        from ggufspec.files import check_writable

        for one in fields(self):
            if (path := getattr(self, one.name)) is not None:
                check_writable(path)

    def write(
        self, document: _Document, *, markdown: Callable[[_Document], str], csv: Callable[[_Document], str]
    ) -> GgufspecError | None:
        """Write those that are asked for. One that fails, on a full disk say, is told and costs no other.

        Args:
            document: the result.
            markdown: makes its table.
            csv: makes its lines.

        Returns:
            the first failure, if there was one.
        """
        from ggufspec.files import write_whole
        from ggufspec.schema.base import to_json

        def page(one: _Document) -> str:
            from ggufspec.reports.page import render

            return render([json.loads(to_json(one))])

        writers: tuple[tuple[Path | None, Callable[[_Document], str]], ...] = (
            (self.export_json, lambda one: to_json(one) + "\n"),
            (self.export_markdown, markdown),
            (self.export_csv, lambda one: visible(csv(one))),
            (self.html, page),
        )
        first: GgufspecError | None = None
        for path, render in writers:
            if path is None:
                continue
            try:
                write_whole(path, render(document))
            except GgufspecError as error:
                first = first or error
                ui.failure(error.message, error.hint)
        return first


@dataclass(frozen=True, slots=True)
class Choosing:
    """How a token is chosen."""

    temp: options.Temperature = 0.0
    top_k: options.TopK = 40
    top_p: options.TopP = 0.95
    min_p: options.MinP = 0.05
    seed: options.Seed = 0
    repeat_penalty: options.RepeatPenalty = 1.0
    repeat_last_n: options.RepeatLastN = 64
    presence_penalty: options.PresencePenalty = 0.0
    frequency_penalty: options.FrequencyPenalty = 0.0

    def drawn(self) -> Choosing:
        """The same with a seed that was drawn, if that is asked for: :func:`ggufspec.cli.options.drawn`."""
        return replace(self, seed=options.drawn(self.seed))

    def sampling(self) -> Sampling:
        """The same as the decoder takes it.

        Raises:
            UsageError: a value is out of range.
        """
        from ggufspec.decoding.sampling import Sampling

        values = asdict(self)
        return Sampling(temperature=values.pop("temp"), **values)


SWEEPABLE = {  # by the options' names here: what their documents call them, and how they are typed
    "gpu_layers": ("gpu_layers", "-ngl"),
    "gpu_layers_draft": ("gpu_layers_draft", "-ngld"),
    "n_cpu_moe": ("n_cpu_moe", "--n-cpu-moe"),
    "drafter": ("drafter", "--drafter"),
    "draft_policy": ("draft_policy", "--draft-policy"),
    "draft_max": ("draft_max", "--draft-max"),
    "accept": ("accept", "--accept"),
    "ctx_size": ("ctx_size", "-c"),
    "threads": ("threads", "-t"),
    "cache_type_k": ("cache_type_k", "-ctk"),
    "cache_type_v": ("cache_type_v", "-ctv"),
    "flash_attn": ("flash_attn", "-fa"),
    "ubatch_size": ("ubatch_size", "-ub"),
}
_MOST_VALUES = 64
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})(?:([+*])(\d{1,9}))?")  # tools/llama-bench/llama-bench.cpp, parse_int_range
_Group = TypeVar("_Group", Placing, Drafting, Decoding)


@dataclass(frozen=True, slots=True)
class Several:
    """The option that has a list, and its values: (as typed, as parsed), each once."""

    name: str
    values: tuple[tuple[str, Any], ...]

    @property
    def key(self) -> str:
        """What documents call the option."""
        return SWEEPABLE[self.name][0]

    @property
    def flag(self) -> str:
        """How it is typed."""
        return SWEEPABLE[self.name][1]

    def put(self, group: _Group, value: Any) -> _Group:
        """The group with one of the values, if the option is in it."""
        return replace(group, **{self.name: value}) if self.name in {one.name for one in fields(group)} else group


class _Listed(tuple[tuple[str, Any], ...]):
    """What an option was parsed to that had more than one value."""

    __slots__ = ()


def listed(text: str, *, numbers: bool) -> list[str]:
    """The values of a list, each once.

    Args:
        text: values with commas between them, 0,8,16 say.
        numbers: whether a range may stand for its numbers, as llama-bench has it: 0-80+8 is 0, 8, … 80, and 1-16*2 is
            1, 2, 4, 8, 16.

    Raises:
        BadParameter: a value is missing, a range goes nowhere, there are too many.
    """
    values: dict[str, None] = {}
    for part in text.split(","):
        part = part.strip()
        if not part:
            raise typer.BadParameter(f"{text!r} has an empty value")
        for value in _numbers(part) if numbers else [part]:
            values[value] = None
            if len(values) > _MOST_VALUES:
                raise typer.BadParameter(f"{text!r} has more than {_MOST_VALUES} values")
    return list(values)


def _numbers(part: str) -> Iterator[str]:
    """The numbers of a range, or the one value that is there."""
    found = _RANGE.fullmatch(part)
    if not found:
        yield part
        return
    number, last, by = int(found[1]), int(found[2]), int(found[4] or 1)
    times = found[3] == "*"
    if number > last or by < 1 or (times and (by < 2 or number < 1)):
        raise typer.BadParameter(f"{part!r} is not a range: 0-80+8 goes from 0 to 80 by 8, 1-16*2 doubles")
    while number <= last:
        yield str(number)
        number = number * by if times else number + by


def _may_be_listed(annotation: Any) -> Any:
    """The same option, which takes a list too."""
    kind, about = get_args(annotation)
    about = copy.copy(about)
    plain: Callable[[str], Any] = about.parser or next((one for one in get_args(kind) if one is not type(None)), kind)
    numbers, least = (about.metavar or "").startswith("N"), about.min

    def one(text: str) -> Any:
        try:
            value = plain(text)
        except ValueError:
            known = "one of " + ", ".join(plain) if isinstance(plain, EnumType) else "a whole number"
            raise typer.BadParameter(f"{text!r} is not {known}") from None
        if least is not None and value < least:
            raise typer.BadParameter(f"{text!r} is less than {least}")
        return value

    def parse(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        values = listed(text, numbers=numbers)
        return one(values[0]) if len(values) == 1 else _Listed((value, one(value)) for value in values)

    about.parser, about.min = parse, None
    return Annotated[kind, about]


def _take_list(parsed: dict[str, Any]) -> Several | None:
    """The option with a list; its first value takes the list's place.

    Raises:
        UsageError: more than one has a list.
    """
    found = [Several(name, tuple(value)) for name, value in parsed.items() if isinstance(value, _Listed)]
    if len(found) > 1:
        raise UsageError(
            f"{' and '.join(one.flag for one in found)} have lists",
            "sweep one option at a time: give the others one value",
        )
    for one in found:
        parsed[one.name] = one.values[0][1]
    return found[0] if found else None


def _flag(row: Option) -> inspect.Parameter:
    option = typer.Option(*row.flags, help=row.described)
    return inspect.Parameter(
        row.name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
    )


def spread(command: Callable[..., int], *, asks: bool = False) -> Callable[..., int]:
    """``command`` as Typer shall see it: every parameter that is a group stands for the group's options.

    The name of an option and its place in the help are those in the group. Every command has ``--json``, ``-q`` and
    ``-v``, and with ``asks`` it has ``-y``: :func:`ggufspec.cli.ui.flags` has them while it runs.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Any]] = {
        name: one.annotation
        for name, one in signature.parameters.items()
        if isinstance(one.annotation, type) and is_dataclass(one.annotation)
    }
    several = next((name for name, one in signature.parameters.items() if one.annotation == Several | None), None)
    shown: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name in groups:
            types = get_type_hints(groups[name], include_extras=True)
            if several:
                types |= {name: _may_be_listed(types[name]) for name in SWEEPABLE.keys() & types.keys()}
            shown += (
                inspect.Parameter(one.name, parameter.KEYWORD_ONLY, default=one.default, annotation=types[one.name])
                for one in fields(groups[name])
            )
        elif name != several:
            shown.append(parameter)
    flags = FLAGS.values() if asks else [row for row in FLAGS.values() if row.group != "yes"]
    shown += [_flag(row) for row in flags]

    @functools.wraps(command)
    def gathering(**parsed: Any) -> int:
        ui.begin(Flags(**{row.name: parsed.pop(row.name) for row in flags}))
        gathered: dict[str, Any] = {several: _take_list(parsed)} if several else {}
        gathered |= {
            name: group(**{one.name: parsed.pop(one.name) for one in fields(group)}) for name, group in groups.items()
        }
        return command(**parsed, **gathered)

    gathering.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    gathering.__annotations__ = {}  # the signature has them
    return gathering
