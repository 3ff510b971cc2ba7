"""The bench for people who write Python: was the draft worth it, as a document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggufspec import api
from ggufspec.bench import hooked, prompting, trial, versus
from ggufspec.bench.history import record_overhead, record_speed
from ggufspec.bench.prompts import Prompt
from ggufspec.decoding.options import check_one_of
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import UsageError
from ggufspec.schema.bench import BenchDocument
from ggufspec.settings import Settings, of_keywords

if TYPE_CHECKING:
    from ggufspec.models.profile import Pair, Profile


def bench_pair(
    pair: str | Path | Profile | Pair = "demo",
    settings: Settings | None = None,
    *,
    prompts: Sequence[str | Prompt] | None = None,
    raw: bool = False,
    max_tokens: int = 128,
    repetitions: int = 5,
    sampling: Sampling | None = None,
    engine: str = "own",
    depth: int = 0,
    download: bool = False,
    on_event: api.OnEvent | None = None,
    verbose: bool = False,
    **options: Any,
) -> BenchDocument:
    r"""Measure target-only, draft-only and speculative decoding, and say whether it was worth it.

    Trials are interleaved, each in a child process of its own, so that an abort of llama.cpp is an error and not the
    end of the program. Target-only runs at its own best placement. What was learned of the pair's acceptance is kept in
    the user's cache, for later plans.

    >>> from ggufspec import bench_pair
    >>> measured = bench_pair("demo", prompts=["import os\n\ndef "], max_tokens=8, repetitions=1, threads=1)
    >>> measured.runs["target_only"].tokens
    8
    >>> measured.runs["speculative"].tokens_per_s.median > 0
    True
    >>> measured.verdict.worth_it  # never of a single trial
    False

    Args:
        pair: name or path of a profile, the profile, or a :class:`~ggufspec.models.profile.Pair` of files.
        settings: options that go over the profile's, checked by type checkers, too.
        prompts: what is answered; eight short bundled ones by default. The target's chat template makes requests of
            them, where it has one; :func:`ggufspec.bench.prompting.read_prompts` reads a file of them.
        raw: send them as plain text, without the template.
        max_tokens: of each answer, at most.
        repetitions: trials of each run; an interval takes three.
        sampling: temperature, truncation, seed and penalties; greedy by default.
        engine: ``hook`` measures llama-cpp-python's ``Llama`` too, alone and with :class:`ggufspec.hook.DraftModel`.
        depth: tokens of text in the cache before each prompt; the context holds them.
        download: fetch what is on the hub and not here, which may be many GB.
        on_event: told of progress: ``{"event": "progress", "done": …, "total": …, "what": …}``, and what
            :func:`ggufspec.load_pair` tells.
        verbose: let llama.cpp's log through to standard error.
        options: the same by keyword, which go over ``settings``: ``drafter``, ``ctx_size``, …

    Returns:
        The document of ``ggufspec bench --json``: tokens/s with raw samples, the speedup and its interval, acceptance,
        divergences, the verdict; :func:`ggufspec.schema.base.to_json` makes JSON of it.

    Raises:
        UsageError: a name or an option is none, there is no prompt, or speculation is off.
        ModelError: the chat template fails.
        GgufspecError: a file is not here, nothing fits, or a trial failed.
        KeyboardInterrupt: Ctrl-C; what was measured is lost.
    """
    own = None if prompts is None else tuple(Prompt("", one) if isinstance(one, str) else one for one in prompts)
    if own is not None and not all([own, *(one.text or one.messages for one in own)]):
        raise UsageError("there is no prompt, or an empty one", "leave prompts out for the bundled ones")
    if depth < 0 or (depth and engine == "hook"):
        raise UsageError("depth is a number of tokens, and of our own loop", "depth=4096, engine='own'")
    if repetitions < 1 or max_tokens < 1:
        raise UsageError("a bench takes at least one trial of at least one token", "repetitions=5, max_tokens=128")
    check_one_of(engine, versus.ENGINES, "engine")
    given = of_keywords(options, settings)
    files = api.files_of(pair, download=download, on_event=on_event)
    api.check_drafter(files, given)
    places = api.resolve(files, given, rival=True, on_event=on_event, verbose=verbose)
    if not places.pair.drafts(with_draft=files.draft is not None):
        raise UsageError(
            "a bench compares with a draft, and speculation is off", "drafter='lookup' needs no draft model"
        )
    if engine == "hook":
        hooked.check(places.pair, sampling or Sampling())
        hooked.check(places.alone, sampling or Sampling())
    asked = prompting.prepare(prompting.Spec(files.target, own or (), raw), verbose=verbose)
    spec = trial.Spec(
        target=files.target,
        draft=files.draft if places.pair.needs_draft else None,
        options=places.pair,
        sampling=sampling or Sampling(),
        **asked.trial,
        max_tokens=max_tokens,
        rpc=given.rpc or (),
        depth=depth,
    )
    trial.check_room(spec, max(asked.tokens))
    run = versus.Bench(
        versus.Experiment(files, spec, repetitions, verbose, alone=places.alone, plan=places.plan, engine=engine)
    )

    def progress(done: int, total: int, what: str) -> None:
        if on_event is not None:
            on_event({"event": "progress", "done": done, "total": total, "what": what})

    run.run(progress)
    record_overhead(places, run.results["speculative"])
    record_speed(places, spec, run.results["target_only"])
    return run.document()
