"""Summaries of trials for documents: speeds, table rows, notes, the machine and the settings."""

from __future__ import annotations

import functools
import platform
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import zip_longest
from typing import Any

from ggufspec import __version__
from ggufspec.bench import trial
from ggufspec.bench.statistics import paired_ratios, spread
from ggufspec.decoding.decoder import Statistics
from ggufspec.hardware import gpus, host, install
from ggufspec.hardware.host import BUSY_CPUS
from ggufspec.llamacpp import probe
from ggufspec.schema.base import MeasuredRun, Portion, SpeculativeRun
from ggufspec.settings.registry import is_lossy

_PARTS = ("thinking", "answer")  # in the order of trial.TrialAnswer.parts


def without_draft(spec: trial.TrialJob) -> trial.TrialJob:
    return replace(spec, draft=None, options=replace(spec.options, drafters=(), lookup_corpus=None))


def trial_speed(result: trial.TrialResult) -> float:
    """Return a trial's tokens per second, excluding each answer's first token, which comes from the prompt's batch."""
    return speed_of(result.answers)


def speed_of(answers: Iterable[trial.TrialAnswer]) -> float:
    return _speed(answer.statistics for answer in answers)


def _speed(statistics: Iterable[Statistics]) -> float:
    tokens, seconds = map(sum, zip(*((s.decoded, s.decode_s) for s in statistics), strict=True))
    return tokens / max(seconds, 1e-9)


def by_kind(
    kinds: Sequence[str], target_only: Sequence[trial.TrialResult], drafted: Sequence[trial.TrialResult]
) -> tuple[Portion, ...]:
    """Return the gain from drafting for each kind of prompt, from paired trials; empty if there is only one kind."""

    def chosen(index: int, answer: trial.TrialAnswer, name: str) -> Statistics | None:
        return answer.statistics if kinds[index] == name else None

    return _portions(dict.fromkeys(kinds), chosen, target_only, drafted) if len(set(kinds)) > 1 else ()


def by_part(target_only: Sequence[trial.TrialResult], drafted: Sequence[trial.TrialResult]) -> tuple[Portion, ...]:
    """Return the gain from drafting while thinking and afterwards; empty if the target does not think."""

    def chosen(_: int, answer: trial.TrialAnswer, name: str) -> Statistics | None:
        return answer.parts[_PARTS.index(name)] if answer.parts else None

    return _portions(_PARTS, chosen, target_only, drafted)


def _portions(
    names: Iterable[str],
    chosen: Callable[[int, trial.TrialAnswer, str], Statistics | None],
    target_only: Sequence[trial.TrialResult],
    drafted: Sequence[trial.TrialResult],
) -> tuple[Portion, ...]:
    """Compare the ``chosen`` parts of both runs' answers to the same prompts, by name; omit names without tokens."""
    found = []
    for name in names:
        trials = []
        for pair in zip(target_only, drafted, strict=False):
            answers = enumerate(zip(*(result.answers for result in pair), strict=False))
            both = [(chosen(i, ours, name), chosen(i, theirs, name)) for i, (ours, theirs) in answers]
            if both := [(a, b) for a, b in both if a and b and a.tokens and b.tokens]:
                trials.append(both)
        if not trials:
            continue
        without = [_speed(a for a, _ in both) for both in trials]
        with_draft = [_speed(b for _, b in both) for both in trials]
        found.append(
            Portion(
                name=name,
                tokens=sum(b.tokens for _, b in trials[0]),
                target_only_tokens_per_s=spread(without),
                tokens_per_s=spread(with_draft),
                speedup=paired_ratios(with_draft, without),
                drafted=sum(b.drafted for both in trials for _, b in both),
                accepted=sum(b.accepted for both in trials for _, b in both),
            )
        )
    return tuple(found)


def summarise(results: list[trial.TrialResult], *, lossy: bool = False) -> MeasuredRun | SpeculativeRun:
    """Summarise all trials of one mode in one row; ``lossy`` if the acceptance rule may change the text."""
    first = results[0]
    every = [answer.statistics for result in results for answer in result.answers]
    waits = [s.time_to_first_token_s for s in every if s.time_to_first_token_s is not None]
    base: dict[str, Any] = {
        "gpu_layers": first.target.gpu_layers,
        "layers": first.target.layers,
        "tokens": sum(answer.statistics.tokens for answer in first.answers),
        "tokens_per_s": spread(list(filter(None, map(trial_speed, results))) or [0.0]),
        "prompt_tokens_per_s": trial.prompt_speed(answer for result in results for answer in result.answers),
        "peak_rss_bytes": max(result.peak_rss_bytes for result in results),
        "vram_bytes": max(result.vram_bytes for result in results),
        "load_s": spread([result.load_s for result in results]).median,
        "prompt_tokens": sum(answer.statistics.prompt_read for answer in first.answers),
        "time_to_first_token_s": spread(waits).median if waits else None,
        "prompts": len(first.answers),
        "answers": len(every),
    }
    if not first.drafters:
        return MeasuredRun(**base)
    rounds, drafted, accepted = (
        sum(column) for column in zip(*((s.rounds, s.drafted, s.accepted) for s in every), strict=True)
    )
    at = by_position(s.drafted_by_position for s in every)
    return SpeculativeRun(
        **base,
        gpu_layers_draft=first.draft.gpu_layers if first.draft else 0,
        draft_layers=first.draft.layers if first.draft else 0,
        acceptance_rate=accepted / max(drafted, 1),
        tokens_per_round=sum(s.decoded for s in every) / max(rounds, 1),
        accepted_by_position=tuple(
            kept / drafted
            for kept, drafted in zip(by_position(s.accepted_by_position for s in every), at, strict=True)
            if drafted
        ),
        drafted_by_position=tuple(filter(None, at)),
        drafted=drafted,
        accepted=accepted,
        rounds=rounds,
        draft_s=sum(s.draft_s for s in every) / max(rounds, 1),
        verify_s=sum(s.verify_s for s in every) / max(rounds, 1),
        lossy=lossy,
        plain_rounds=sum(s.plain_rounds for s in every),
        lookup_drafted=sum(s.lookup_drafted for s in every),
        lookup_accepted=sum(s.lookup_accepted for s in every),
    )


def by_position(rows: Iterable[tuple[int, ...]]) -> list[int]:
    """Sum counts by position in the draft; rows may differ in length or be empty."""
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def notes_of(results: list[trial.TrialResult]) -> tuple[str, ...]:
    """Return the decoders' notes without duplicates."""
    return tuple(dict.fromkeys(note for result in results for note in result.notes))


def busy_notes(results: Iterable[trial.TrialResult]) -> tuple[str, ...]:
    """Return a note if other programs were busy during at least half of the trials."""
    others = sorted(result.others_cpus for result in results)
    if not others or others[len(others) // 2] < BUSY_CPUS:
        return ()
    used = f"other programs used {others[0]:.1f} to {others[-1]:.1f} of {host.usable_cpus()} CPUs during the trials"
    return (f"{used}: an idle machine would reach more tokens/s; ratios compare interleaved trials",)


def unwatched_notes(results: Iterable[trial.TrialResult]) -> tuple[str, ...]:
    """Return a note for each GPU in use that NVML does not report."""
    cards = {card for result in results if result.target.gpu_layers for card in result.unwatched}
    return tuple(
        f"{card}: energy, throttled clocks and other programs are unknown, because NVML reports only NVIDIA GPUs"
        for card in sorted(cards)
    )


def machine_and_versions() -> dict[str, object]:
    """Return the machine and the versions that measurements depend on."""
    return {
        "cpu": host.cpu_name(),
        "cores": host.physical_cores(),
        "memory_bytes": host.total_memory_bytes(),
        "gpus": [{"name": g.name, "total_bytes": g.total_bytes, "driver": g.driver} for g in gpus.gpus()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "ggufspec": __version__,
        "llama_cpp_python": version("llama-cpp-python"),
    }


def machine_and_build(system_info: str | None = None) -> dict[str, object]:
    """Return :func:`machine_and_versions` and two further facts that affect speed: the processor and llama.cpp's build.

    Saved results are looked up by :func:`machine_and_versions` only. ``system_info`` is llama.cpp's line about its
    build; if None, it is read in a child process, which raises GgufspecError if llama-cpp-python cannot be loaded.
    """
    build = {"system_info": _installed() if system_info is None else system_info}
    if stamp := install.built():
        build |= {"cpu": stamp.cpu, "cmake_args": without_folders(stamp.cmake_args)}
    return machine_and_versions() | {"processor": asdict(host.processor()), "build": build}


@functools.cache
def _installed() -> str:
    return probe.inspect().system


def without_folders(cmake_args: str) -> str:
    """Return CMake's options with paths reduced to file names, so that they do not reveal this machine's folders."""
    words = (re.sub(r"([a-zA-Z]:)?[/\\]((?! -)[^\"'=;])*[/\\]", "", word) for word in shlex.split(cmake_args))
    return shlex.join(words)


def plan_of(results: dict[str, list[trial.TrialResult]]) -> dict[str, object]:
    """Return the models as loaded, with their GPU layers."""
    pair = results["speculative"] or results["target_only"]
    if not pair:
        return {}
    placed = {"target": pair[0].target, "draft": pair[0].draft}
    return {role: asdict(model) if model else None for role, model in placed.items()}


def used_settings(spec: trial.TrialJob) -> dict[str, object]:
    """Return the requested settings, with the threads and micro-batch size in use."""
    corpus = spec.options.lookup_corpus
    options = spec.options.flat() | {
        "threads": spec.options.threads or host.physical_cores(),
        "ubatch_size": spec.options.context(with_draft=spec.draft is not None).computed,
        "drafter": spec.options.drafter,
        "lookup_corpus": str(corpus) if corpus else None,
        "lossy": is_lossy(spec.options.accept),
    }
    return (
        options
        | asdict(spec.sampling)
        | {
            "max_tokens": spec.max_tokens,
            "prompts": len(spec.prompts),
            "prompt_format": "chat template" if spec.templated else "plain text",
            "depth": spec.depth,
        }
    )
