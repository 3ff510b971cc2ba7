"""Inputs for commands, built from their options: the pair, its plan, calibration, prompts, the grammar."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ggufspec.api.pairs import OnEvent, OpenedPair, open_pair, pair_of_files, spec_of_files
from ggufspec.api.plan import Calibrate, PlanResult
from ggufspec.api.plan import make_plan as plan_opened
from ggufspec.api.resolve import ResolvedOptions
from ggufspec.api.resolve import resolve as resolve_opened
from ggufspec.bench.prompting import read_prompts
from ggufspec.bench.prompts import BenchPrompt
from ggufspec.cli import models, pull, ui
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import random_seed
from ggufspec.decoding.threads import Threads
from ggufspec.errors import ChildError, MisfitError, ModelError, UsageError
from ggufspec.files import cache, untrusted
from ggufspec.hardware import host
from ggufspec.llamacpp.grammar import check_grammar, check_schema
from ggufspec.models.header import ModelHeader
from ggufspec.models.hub.client import HubFile
from ggufspec.models.profile import Pair, PairSpec
from ggufspec.planning import machine_profile
from ggufspec.planning.machine_profile import DueMeasurement, MachineProfileJob
from ggufspec.planning.plan import PlanMachine
from ggufspec.schema.text import of_file
from ggufspec.settings.table import Settings

MOST_TEXT_BYTES = 16 << 20  # maximum prompt size, a few million tokens


# ---- the pair --------------------------------------------------------------------------------------------------------


def _note_demo(given: Settings) -> None:
    if models.is_missing(given) and not ui.flags().json:
        ui.note("no model is named: using the bundled demo pair, a toy; name yours with -m TARGET.gguf -md DRAFT.gguf")


def pair_spec(given: Settings) -> PairSpec:
    """Return the pair, with files on this machine or the hub (:func:`ggufspec.api.pairs.spec_of_files`)."""
    _note_demo(given)
    with ui.making() as on_event:
        return spec_of_files(given, on_event)


def pair(given: Settings, *, no_draft: bool = False, need_draft: bool = False) -> Pair:
    """Return the pair with local files (:func:`ggufspec.api.pairs.pair_of_files`), downloading missing ones.

    The user is asked before a download unless ``-y`` is given.
    """
    _note_demo(given)

    def fetch(sources: Sequence[HubFile], name: str) -> Sequence[Path]:
        draft_repo = None if no_draft else given.hf_repo_draft
        return pull.have(sources, name, pull.command_line(given.pair, given.hf_repo, draft_repo))

    with ui.making() as on_event:
        return pair_of_files(given, fetch, no_draft=no_draft, need_draft=need_draft, on_event=on_event)


@contextmanager
def planning() -> Iterator[OnEvent]:
    """Yield a callback for events of :func:`ggufspec.api.plan.make_plan` that shows the slow steps."""

    def words(event: dict[str, Any]) -> str:
        if event["event"] == "measuring":
            return f"measuring this machine: {event['type']} on {event['device']}"
        return f"reading the header of {event['file']}: {event['bytes'] / 1e6:.1f} MB"

    with ui.busy() as show:

        def tell(event: dict[str, Any]) -> None:
            if event["event"] == "waiting":
                ui.show_pause(show, event["why"], event["seconds"])
            else:
                show(words(event))

        yield tell


def open_here(spec: PairSpec, given: Settings, options: DecoderOptions | None = None, **more: bool) -> OpenedPair:
    """Open a pair (:func:`ggufspec.api.pairs.open_pair`), with progress shown."""
    with planning() as on_event:
        return _opened(spec, given, options, on_event, **more)


def _opened(
    spec: PairSpec, given: Settings, options: DecoderOptions | None, on_event: OnEvent, **more: bool
) -> OpenedPair:
    """Open a pair. If the draft is incompatible, suggest a compatible one; note a draft larger than its target."""
    try:
        opened = open_pair(spec, given, options, on_event, **more)
    except MisfitError as error:
        raise models.fitting(error, spec.target, spec.draft) from None
    if opened.draft and opened.draft.header.weight_bytes() > opened.target.header.weight_bytes():
        draft, target = (
            f"{one.header.name}, {of_file(one.header.size_bytes)}" for one in (opened.draft, opened.target)
        )
        ui.note(f"the draft ({draft}) is larger than the target ({target}): are they swapped?")
    return opened


def make_plan_shown(opened: OpenedPair, **more: Any) -> PlanResult:
    """Make a plan (:func:`ggufspec.api.plan.make_plan`), with progress shown."""
    with planning() as on_event:
        return plan_opened(opened, on_event=on_event, **more)


def resolve_shown(
    spec: PairSpec, given: Settings, options: DecoderOptions | None = None, *, loads: bool = False, **more: Any
) -> ResolvedOptions:
    """Open and resolve a pair (:func:`ggufspec.api.resolve.resolve`), with progress shown."""
    with planning() as on_event:
        return resolve_opened(_opened(spec, given, options, on_event, loads=loads), on_event=on_event, **more)


# ---- this machine's speed --------------------------------------------------------------------------------------------


def calibrator(given: Settings, *, always: bool = False) -> Calibrate | None:
    """Return a function that measures this machine if needed, or ``always``; None if the options forbid measuring."""
    if (given.no_calibrate or given.ram_bandwidth or given.cpu) and not always:
        return None
    return functools.partial(_calibrate, rpc=given.rpc or (), always=always)


def _calibrate(
    where: PlanMachine | None,
    headers: Sequence[ModelHeader],
    options: DecoderOptions,
    on_event: OnEvent | None,
    *,
    rpc: tuple[str, ...],
    always: bool,
) -> bool:
    """Measure this machine for models with these ``headers`` if that is due; return whether it was measured."""
    if where is not None and where.simulated and not always:
        in_vram = sum(header.weight_bytes() for header in headers) < sum(map(where.budget_bytes, where.cards))
        if in_vram:  # then this machine's speed does not matter
            return False
    spec = MachineProfileJob(
        options.threads or host.physical_cores(), rpc, together_bytes=machine_profile.beyond_cache_bytes()
    )
    if headers:
        kinds = tuple(dict.fromkeys((options.cache_type_k, options.cache_type_v)))
        types, heads = machine_profile.types_of(headers), machine_profile.heads_of(headers)
        spec = replace(spec, types=types, heads=heads, cache_types=kinds)
    due = machine_profile.due(cache.cache_folder(), spec, host.usable_cpus(), host.others_cpus)
    due = DueMeasurement(spec, "", needs=True) if always else due
    if due is None or not (cache.first_today("calibration") or due.needs):
        return False
    if due.why:
        ui.note(f"measuring this machine's speed, 10 to 30 s ({due.why}; --no-calibrate guesses it)")
    left = Threads(options.threads, cores=spec.threads).start()
    try:
        speed = machine_profile.measure_machine(cache.cache_folder(), replace(due.spec, left=left), on_event=on_event)
    except (ModelError, ChildError) as error:
        if always:
            raise
        ui.note(f"this machine's speed could not be measured, and is guessed: {error}")
        return False
    if speed.disturbed and where is None:  # otherwise the plan's notes say so
        again = "measure it again with ggufspec plan --calibrate when it is idle"
        ui.note(f"this machine was measured while {speed.disturbed}: {again}")
    return True


# ---- the prompt and its answer ---------------------------------------------------------------------------------------


def prompt(given: Settings) -> str:
    text = read_prompt(given.prompt, given.file)
    if not text:
        raise UsageError("there is no prompt", 'give one with -p "…", -f FILE, or -p - for standard input')
    return text


def system_prompt(given: Settings) -> str:
    """Return the system prompt from ``--system`` or ``--system-file``; empty without either.

    Raises:
        UsageError: both are given, or one of them with --raw, which leaves no place for it.
    """
    if given.system is not None and given.system_file is not None:
        raise UsageError("both --system and --system-file are given", "give one of them")
    if given.raw and (given.system is not None or given.system_file is not None):
        raise UsageError(
            "--raw sends the prompt as it is, which leaves no place for a system prompt",
            "leave --raw out, or put the text at the beginning of the prompt",
        )
    return read_prompt(given.system, given.system_file) or ""


def read_prompt(text: str | None, file: Path | None) -> str | None:
    """Return the text that ``-p`` or ``-f`` gives; None without either."""
    if text is not None and file is not None:
        raise UsageError("both -p and -f are given", "give one of them")
    if text == "-" or file == Path("-"):
        data = sys.stdin.buffer.read(MOST_TEXT_BYTES + 1)
        if len(data) > MOST_TEXT_BYTES:
            raise UsageError("standard input has more text than any context holds", "use a shorter prompt")
        return utf8(data, "standard input").removeprefix("\ufeff")  # byte order mark
    if file is not None:
        return _read(file)
    return None if text is None else utf8(os.fsencode(text), "the prompt")


def own_prompts(given: Settings) -> tuple[BenchPrompt, ...]:
    """Return the prompts that ``-p``, ``-f`` or ``--prompts`` gives; empty for the bundled ones."""
    text = read_prompt(given.prompt, given.file)
    if given.prompts is not None:
        if text is not None:
            raise UsageError("--prompts is given with -p or -f", "give one of them")
        return read_prompts(given.prompts)
    if text is not None and not text.strip():
        raise UsageError("the prompt is empty", "leave -p and -f out for the bundled prompts")
    return () if text is None else (BenchPrompt("", text),)


def prediction(given: Settings) -> str:
    """Return the text of the ``--prediction`` file; empty if none is given."""
    return _read(given.prediction) if given.prediction else ""


def grammar(given: Settings) -> str:
    """Return the grammar that the options give, in llama.cpp's GBNF; empty without any."""
    names = ("grammar", "grammar_file", "json_schema", "json_schema_file")
    found = given.given(names)
    if len(found) > 1:
        raise UsageError("more than one grammar is given", "give one of --grammar, --grammar-file, -j and -jf")
    for name, value in found.items():
        text = _read(value) if isinstance(value, Path) else value
        return check_schema(text) if name.startswith("json") else check_grammar(text)
    return ""


def with_seed(given: Settings) -> Settings:
    """Replace the seed -1 with a random one, as llama.cpp does, and note it."""
    if given.seed != -1:
        return given
    seed = random_seed()
    ui.note(f"seed {seed}: -s {seed} gives the same text again")
    return replace(given, seed=seed)


def _read(file: Path) -> str:
    return untrusted.read_text(file, MOST_TEXT_BYTES, failure=UsageError)


def utf8(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text: {error}", "convert it to UTF-8") from None
