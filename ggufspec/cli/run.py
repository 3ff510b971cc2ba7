"""Command ``ggufspec run``: stream one answer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from ggufspec.api.options import sampling
from ggufspec.api.resolve import ResolvedOptions
from ggufspec.bench import trial
from ggufspec.bench.history import spilled
from ggufspec.bench.summary import notes_of, summarise, used_settings
from ggufspec.bench.trial import TrialJob, TrialResult
from ggufspec.child import Interrupted
from ggufspec.cli import inputs, ui
from ggufspec.cli.models import draft_line
from ggufspec.cli.parameters import command, takes
from ggufspec.decoding.answer import Statistics
from ggufspec.errors import StopError, UsageError
from ggufspec.models.headers import read_headers
from ggufspec.models.profile import Pair
from ggufspec.prompting.conversation import Conversation, plain_text
from ggufspec.reports.words import accepted_text, prompt_figures
from ggufspec.schema.base import SpeculativeRun
from ggufspec.schema.run import RunDocument
from ggufspec.schema.text import counted, visible
from ggufspec.schema.trace import TraceDocument
from ggufspec.settings.registry import drafts_with_file, is_lossy
from ggufspec.settings.table import Settings

# Option groups for commands that generate answers.
GROUPS = (
    "profile",
    "files",
    "hub",
    "predict",
    "target-only",
    "placement",
    "devices",
    "drafting",
    "context",
    "sampling",
)


@command(
    'ggufspec run -m TARGET.gguf -md DRAFT.gguf -p "A haiku on VRAM" --temp 0.8',
    'ggufspec run -m TARGET.gguf -p "Who are you?" --system "You are a pirate."',
    'ggufspec run demo --raw -p "def main("',
    confirms=True,
)
def run(
    *, given: Annotated[Settings, takes(*GROUPS, "prompt", "raw", "system", "answer", predict={"default": 128})]
) -> int:
    """Stream one answer; the statistics follow on standard error.

    The prompt is a message in the model's chat template; with --raw, or without a template, it is continued as text.
    """
    pair, spec, resolved = prepare_run(given)
    streams = not ui.flags().json
    spec = replace(spec, stream=streams)

    def show(event: dict[str, Any]) -> None:
        if event["event"] == "token":
            _print(event["text"])

    result, interrupted = answered(pair, spec, show if streams else None)
    if streams:
        ui.data("")
    document = RunDocument(**described(pair, spec, resolved, result, interrupted), tokens=result.answers[0].tokens)
    ui.result(document, lambda: show_statistics(document))
    if streams and ui.is_live() and (offer := draft_line("run", given, pair.target)):
        ui.note(offer)
    return end(interrupted)


def answered(pair: Pair, spec: TrialJob, show: Callable[[dict[str, Any]], None] | None) -> tuple[TrialResult, bool]:
    """Return the result of a trial with one answer, and whether Ctrl-C ended it; ``show`` is called with its events."""

    def on_event(event: dict[str, Any]) -> None:
        if show is not None:
            if event["event"] in ("round", "token"):
                begin()
            show(event)

    try:
        with ui.loading(pair.name) as begin:
            result: TrialResult | None = trial.run_trial(spec, on_event=on_event, verbose=ui.flags().verbose)
            interrupted = False
    except Interrupted as stopped:
        result, interrupted = stopped.partial, True
    if result is None or not result.answers:
        raise StopError("interrupted before there was an answer")
    return result, interrupted


def described(
    pair: Pair, spec: TrialJob, resolved: ResolvedOptions, result: TrialResult, interrupted: bool
) -> dict[str, Any]:
    answer, option = result.answers[0], "speculative" if result.draft else "target_only"
    return {
        "pair": pair.describe(),
        "settings": used_settings(spec),
        "text": answer.text,
        "stop_reason": answer.statistics.stop_reason,
        "statistics": summarise([result], lossy=is_lossy(spec.options.accept)),
        "notes": (*notes_of([result]), *_appeared(answer.statistics), *spilled(resolved, option, [result])),
        "interrupted": interrupted,
    }


def _appeared(statistics: Statistics) -> tuple[str, ...]:
    if not statistics.predicted:
        return ()
    return (f"the answer has {statistics.predicted_appeared} of the prediction's {statistics.predicted} tokens",)


def end(interrupted: bool) -> int:
    if interrupted:
        ui.failure("interrupted", "", stopped=True)
    return 130 if interrupted else 0


def prepare_run(given: Settings) -> tuple[Pair, TrialJob, ResolvedOptions]:
    """Return the pair with local files, the trial that gives one answer, and the resolved placement."""
    text, system, predicted = inputs.prompt(given), inputs.system_prompt(given), inputs.prediction(given)
    pair, resolved = prepare_pair(given)
    is_chat = not given.raw and _has_chat_template(pair.target)
    if not (is_chat or given.raw or ui.flags().json):
        ui.note(f"{pair.target.name} has no chat template: it continues the prompt as plain text")
    spec = TrialJob(
        target=pair.target,
        draft=pair.draft,
        options=resolved.pair,
        sampling=sampling(inputs.with_seed(given)),
        prompts=(text if is_chat else plain_text(Conversation(system).ask(text).messages()),),
        max_tokens=given.value("predict"),
        stop=given.stop or (),
        grammar=inputs.grammar(given),
        prediction=predicted,
        stream=True,
        rpc=given.rpc or (),
        templated=is_chat,
        chat=is_chat,
        system=system if is_chat else "",
    )
    return pair, spec, resolved


def _has_chat_template(target: Path) -> bool:
    """Return whether the model has a chat template; False if its path is not UTF-8, which the header cache needs."""
    try:
        str(target).encode()
    except UnicodeEncodeError:
        return False
    return read_headers([target])[0].header.has_chat_template


def prepare_pair(given: Settings, *, serves: bool = False) -> tuple[Pair, ResolvedOptions]:
    """Return the named pair and where its layers go; for ``serves`` see :func:`ggufspec.api.resolve.resolve`."""
    if given.no_draft:
        given = replace(given, drafter="none")
    pair = inputs.pair(given, no_draft=not drafts_with_file(given.drafter or "both"))
    if pair.draft is None and given.drafter is None and given.lookup_corpus is not None:
        raise UsageError("--lookup-corpus needs --drafter lookup: there is no draft model", "--drafter lookup")
    if given.prediction is not None:
        if given.drafter == "none":
            raise UsageError("--prediction needs drafting, which is turned off", "leave one of them out")
        if pair.draft is None and given.drafter is None:
            given = replace(given, drafter="lookup")
    return pair, inputs.resolve_shown(pair, given, serves=serves)


def _print(text: str) -> None:
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def show_statistics(document: RunDocument | TraceDocument) -> None:
    figures = document.statistics
    ui.note(", ".join(filter(None, (f"prompt: {prompt_figures(figures)}", document.settings["prompt_format"]))))
    parts = [counted(figures.tokens, "token")]
    if figures.tokens_per_s.median:
        parts.append(f"{figures.tokens_per_s.median:.1f} tokens/s")
    if isinstance(figures, SpeculativeRun):
        parts.append(f"{accepted_text(figures)} accepted" if figures.drafted else "nothing drafted")
        if figures.rounds:
            parts.append(f"{figures.tokens_per_round:.2f} tokens/round")
        if figures.lossy:
            parts.append("lossy")
    if document.stop_reason == "context":
        parts.append("the context is full")
    ui.note(", ".join(parts))
    for note in document.notes:
        ui.note(note)
