"""Benchmark for Python callers: measure whether a draft is worth it and return a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggufspec.api.pairs import OnEvent, check_drafter, open_pair, with_files
from ggufspec.api.resolve import ResolvedOptions, resolve
from ggufspec.bench import hooked, prompting, trial, versus
from ggufspec.bench.history import learn
from ggufspec.bench.lengths import DEFAULT_TOKENS
from ggufspec.bench.prompts import BenchPrompt
from ggufspec.decoding.options import check_one_of
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import UsageError
from ggufspec.schema.bench import BenchDocument
from ggufspec.settings.table import Settings, of_keywords

if TYPE_CHECKING:
    from ggufspec.models.profile import Pair, Profile


def bench_pair(
    pair: str | Path | Profile | Pair = "demo",
    settings: Settings | None = None,
    *,
    prompts: Sequence[str | BenchPrompt] | None = None,
    raw: bool = False,
    max_tokens: int | None = None,
    repetitions: int | None = None,
    budget_s: float | None = None,
    sampling: Sampling | None = None,
    engine: str = "own",
    depth: int = 0,
    download: bool = False,
    on_event: OnEvent | None = None,
    verbose: bool = False,
    **options: Any,
) -> BenchDocument:
    r"""Measure target-only, draft-only and speculative decoding, and judge whether the draft is worth it.

    Answers are interleaved and come from child processes, so that an abort in llama.cpp raises an error instead of
    ending the program. Target-only runs at its own best placement. The pair's acceptance is cached for later plans.

    >>> from ggufspec import bench_pair
    >>> measured = bench_pair("demo", prompts=["import os\n\ndef "], max_tokens=8, repetitions=1, threads=1)
    >>> measured.runs["target_only"].tokens
    8
    >>> measured.runs["speculative"].tokens_per_s.median > 0
    True
    >>> measured.verdict.worth_it  # never after a single trial
    False

    Args:
        pair: name or path of a profile, the profile itself, or a :class:`~ggufspec.models.profile.Pair` of files.
        settings: statically typed options, which override the profile's.
        prompts: prompts to answer; eight short bundled ones by default. The target's chat template is applied if it has
            one. :func:`ggufspec.bench.prompting.read_prompts` reads prompts from a file.
        raw: send prompts as plain text, without the template.
        max_tokens: answer length that the verdict is for; default 256 or, with ``prompts``, the median length of their
            answers. A budget may shorten the measured answers; the time of the rest is then extrapolated.
        repetitions: number of answers to each prompt; by default as many as the verdict needs.
        budget_s: seconds for answers, excluding load time; default 180, or no limit if ``repetitions`` is given.
        sampling: temperature, truncation, seed and penalties; greedy by default.
        engine: ``hook`` also measures llama-cpp-python's ``Llama``, with :class:`ggufspec.DraftModel` and without.
        depth: tokens of text in the cache before each prompt; must fit in the context.
        download: download missing files from the hub, which may be many GB.
        on_event: called with ``{"event": "progress", "done": …, "total": …, "what": …}``, and with the events of
            :func:`ggufspec.load_pair`.
        verbose: show llama.cpp's log on standard error.
        options: options by keyword, which override ``settings``: ``drafter``, ``ctx_size``, …

    Returns:
        The document of ``ggufspec bench --json``: tokens/s with raw samples, the speedup and its interval, acceptance,
        divergences, the verdict. :func:`ggufspec.schema.base.to_json` converts it to JSON.

    Raises:
        UsageError: a name or an option is invalid, there is no prompt, or speculation is off.
        ModelError: the chat template fails.
        GgufspecError: a file is missing, nothing fits, or a trial failed.
        KeyboardInterrupt: Ctrl-C; the measurements are lost.
    """
    own = tuple(BenchPrompt("", one) if isinstance(one, str) else one for one in prompts or ())
    if prompts is not None and not all([own, *(one.text or one.messages for one in own)]):
        raise UsageError("there is no prompt, or an empty one", "omit prompts to use the bundled ones")
    if (
        (max_tokens or 1) < 1
        or (repetitions is not None and repetitions < 1)
        or (budget_s is not None and budget_s <= 0)
    ):
        raise UsageError(
            "a bench needs at least one answer of at least one token, and time for it",
            "repetitions=5, max_tokens=128, budget_s=180",
        )
    _check_engine(engine, depth)
    given, sampling = of_keywords(options, settings), sampling or Sampling()
    files = with_files(pair, download=download, on_event=on_event)
    check_drafter(files, given)
    opened = open_pair(files, given, on_event=on_event)
    places = resolve(opened, best_target_only=True, on_event=on_event, verbose=verbose)
    if not places.pair.drafts(with_draft=files.draft is not None):
        raise UsageError("a bench measures a draft, but speculation is off", "drafter='lookup' needs no draft model")
    if engine == "hook":
        hooked.check_hook(places.pair, sampling)
        hooked.check_hook(places.target_only, sampling)
    asked = prompting.make_texts(prompting.PromptsJob(files.target, own, raw), verbose=verbose)
    spec = trial.TrialJob(
        target=files.target,
        draft=files.draft if places.pair.needs_draft else None,
        options=places.pair,
        sampling=sampling,
        **asked.trial,
        max_tokens=DEFAULT_TOKENS if max_tokens is None else max_tokens,
        rpc=given.rpc or (),
        depth=depth,
    )
    trial.check_context(spec, max(asked.tokens))
    experiment = versus.BenchExperiment(
        files,
        spec,
        repetitions,
        verbose,
        places.target_only,
        places.plan,
        engine=engine,
        budget_s=budget_s,
        own_lengths=bool(own) and max_tokens is None,
    )
    return _measure(experiment, places, on_event or (lambda _: None))


def _check_engine(engine: str, depth: int) -> None:
    check_one_of(engine, versus.ENGINES, "engine")
    if depth < 0 or (depth and engine == "hook"):
        raise UsageError("depth must be a number of tokens and needs our own loop", "depth=4096, engine='own'")


def _measure(experiment: versus.BenchExperiment, places: ResolvedOptions, on_event: OnEvent) -> BenchDocument:
    run = versus.Bench(experiment)
    run.run(
        lambda done, total, what: on_event({"event": "progress", "done": done, "total": total, "what": what}),
        lambda text: on_event({"event": "note", "text": text}),
    )
    notes, document = learn(places, experiment.spec, run.counting, is_quiet=run.is_quiet), run.document()
    return replace(document, notes=(*document.notes, *notes))
