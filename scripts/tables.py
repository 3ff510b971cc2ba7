"""Put the figures of docs/evidence into README.md and docs: whole tables, and the numbers in sentences.

    .venv/bin/python scripts/tables.py        # writes, whatever follows; then look at `git diff`

A table stands between ``<!-- table NAME: scripts/tables.py -->`` and ``<!-- end -->``; TABLES has what makes it. A
sentence has no marks: SENTENCES has its words with ``{}`` for each figure, and only the figures are replaced, so that
who rewrites a sentence changes its words there, too. docs/predictions.md is made whole by tests/evidence/published.py.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import geometric_mean as geometric_mean_of
from statistics import median
from typing import Any
from unittest.mock import patch

from rich.console import Console, RenderableType
from rich.text import Text

from ggufspec.cli import ui
from ggufspec.cli.plan import show_plan
from ggufspec.reports import bench, documents, plan, table, words
from ggufspec.schema.bench import BenchDocument
from ggufspec.schema.plan import PlanDocument
from lab.evidence_pages import index

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "evidence"))  # scripts import each other there
import published
from decoder_prompts import KINDS
from head_speed import HEADS, TARGETS, against
from in_step import Case, fastest, has, modes_run, ratio

sys.path.pop(0)

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
MARKED = re.compile(r"(<!-- table (\S+): scripts/tables\.py -->\n)(.*?)(^<!-- end -->$)", re.DOTALL | re.MULTILINE)
FIGURE = r"\d(?:[\d.,]*\d)?"

Read = Callable[[str], Any]  # the record of a name
Lines = list[str]
Figures = tuple[str, ...]

TABLES: dict[str, Callable[[Read], Lines]] = {}
SENTENCES: list[tuple[str, str, Callable[[Read], Figures]]] = []  # page, words, what makes the figures


def shown(name: str) -> Callable[[Callable[[Read], Lines]], Callable[[Read], Lines]]:
    """Makes a function's lines the table of a name."""
    return lambda made: TABLES.setdefault(name, made)


def said(page: str, words: str) -> Callable[[Callable[[Read], Figures]], Callable[[Read], Figures]]:
    """Puts a function's figures into a sentence of a page, in the place of each ``{}`` of its words."""

    def kept(figures: Callable[[Read], Figures]) -> Callable[[Read], Figures]:
        SENTENCES.append((page, words, figures))
        return figures

    return kept


# ---- Markdown -------------------------------------------------------------------------------------------------------


def rows(head: Sequence[str], body: Sequence[Sequence[str]], *, numbers: bool | str = True) -> Lines:
    """A table; cells behind the first column are at the right, or as ``numbers`` says for each: ``-`` or ``:``."""
    kinds = numbers if isinstance(numbers, str) else "-" + (":" if numbers else "-") * (len(head) - 1)
    rule = [" ---: " if kind == ":" else " --- " for kind in kinds]
    return [f"|{'|'.join(each)}|" for each in (map(_padded, head), rule, *(map(_padded, row) for row in body))]


def _padded(cell: str) -> str:
    return f" {cell} " if cell else " "


def interval(middle: float, ends: Sequence[float]) -> str:
    return f"{middle:.2f} ({ends[0]:.2f} to {ends[1]:.2f})"


def cell(ratios: Sequence[dict[str, Any]]) -> str:
    """The geometric mean, and the worst case."""
    return f"{geometric_mean(ratios):.2f} ({min(one['ratio'] for one in ratios):.2f})" if ratios else ""


def geometric_mean(ratios: Sequence[dict[str, Any]]) -> float:
    return math.exp(sum(math.log(one["ratio"]) for one in ratios) / len(ratios))


def printed(*parts: RenderableType) -> Lines:
    """What a command prints on a terminal of 80 columns, as a block."""
    out = Console(width=80, file=io.StringIO())
    for part in parts:
        out.print(part)
    assert isinstance(out.file, io.StringIO)
    text = "\n".join(line.rstrip() for line in out.file.getvalue().splitlines())
    return ["```text", *re.sub("\n{3,}", "\n\n", text).strip("\n").splitlines(), "```"]


# ---- outputs of commands --------------------------------------------------------------------------------------------


def benches(read: Read, which: str) -> BenchDocument:
    """The bench of the real pair, or the first one without a pair."""
    found = read("first-result")
    document = documents.parse_document(found["real"] if which == "real" else found["measured"][0])
    assert isinstance(document, BenchDocument)
    return document


def said_first(document: BenchDocument) -> list[RenderableType]:
    """The verdict, and what it is about."""
    return [document.verdict.text, table.terminal(bench.results(document)), bench.footnote(document)]


@shown("real-result")
def real_result(read: Read) -> Lines:
    document = benches(read, "real")
    more = filter(None, (bench.by_length(document), bench.rests_on(document)))
    return printed(*said_first(document), document.verdict.why, *more)


@shown("first-result-with-settings")
def first_result_with_settings(read: Read) -> Lines:
    document = benches(read, "demo")
    fence, *lines = printed(
        *said_first(document), "…", words.conditions(document.settings, extent=False), document.verdict.why
    )
    return [fence, *lines]


@shown("real-result-whole")
def real_result_whole(read: Read) -> Lines:
    """As with ``-v``."""
    document = benches(read, "real")
    portions = bench.portions(document.by_kind, document.by_part)
    assert portions is not None
    more = [words.conditions(document.settings, extent=False), document.verdict.why, table.terminal(portions)]
    return printed(*said_first(document), *more, *bench.remarks(document))


def first_plan(read: Read) -> PlanDocument:
    document = documents.parse_document(read("honest-rival")["plans"]["fastest"])
    assert isinstance(document, PlanDocument)
    return document


@shown("card-12gb")
def card_12gb(read: Read) -> Lines:
    document = documents.parse_document(read("card-12gb")["plan"])
    assert isinstance(document, PlanDocument)
    command = [f"next: {document.next}"] if document.next else []
    return printed(document.why, *command, table.terminal(plan.options(document)), *plan.explanations(document))


@shown("plan-whole")
def plan_whole(read: Read) -> Lines:
    """As with ``-v`` on a terminal of 80 columns."""
    ui.begin_command(ui.OutputFlags(verbose=True))
    with redirect_stdout(io.StringIO()) as out, patch.dict(os.environ, COLUMNS="80"):
        show_plan(first_plan(read))
    return printed(Text(out.getvalue()))


@shown("links")
def links(read: Read) -> Lines:
    """Of each machine the pair's tokens/s by link, and how many times that is target-only's."""
    body = []
    for (card, host), some in groupby(read("links")["rows"], key=itemgetter("card", "host")):
        own = list(some)
        pairs = [f"{row['pair']:.1f} ({row['pair'] / row['target_only']:.1f}×)" for row in own]
        body.append((card, host, f"{own[0]['target_only']:.1f}", f"{own[0]['as_usual']:.1f}", *pairs))
    names = [f"{link[4]}.0 {link[5:]}" for link in dict.fromkeys(row["link"] for row in read("links")["rows"])]
    return rows(("card", "host", "target-only", "pair as usual", *names), body, numbers="--::::::::")


@shown("plan-of-pair")
def plan_of_pair(read: Read) -> Lines:
    """The last device's bars, which are the pair's on the card, and the options."""
    document = first_plan(read)
    bars = plan.bars(document, 80)
    begin = max(number for number, line in enumerate(bars) if "speculative: " in line.plain)
    return printed(*bars[begin:], table.terminal(plan.options(document)))


# ---- against other programs -----------------------------------------------------------------------------------------


def real_speeds(read: Read) -> dict[str, dict[str, dict[str, float]]]:
    """Tokens/s by target, way and task, prompt included, of the tasks that all ways have."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in read("real-pair")["rows"]:
        found.setdefault(row["target"], {}).setdefault(row["way"], {})[row["task"]] = row["tokens"] / row["total_s"]
    for ways in found.values():
        common = set.intersection(*(set(own) for own in ways.values()))
        for way, own in ways.items():
            ways[way] = {task: speed for task, speed in own.items() if task in common}
    return found


@shown("real-pair")
def real_pair(read: Read) -> Lines:
    """Each way by task, the fastest first."""
    found: Lines = []
    for target, ways in real_speeds(read).items():
        means = {way: geometric_mean_of(own.values()) for way, own in ways.items()}
        body = [
            [way, *(f"{speed:.1f}" for speed in ways[way].values()), f"{means[way]:.2f}"]
            for way in sorted(ways, key=lambda way: -means[way])
        ]
        found += ["", *rows([f"target {target}", *next(iter(ways.values())), "mean"], body)]
    return found[1:]


@shown("peers")
def peers(read: Read) -> Lines:
    """The same with tokens/s, and the ratio of those."""
    body = [
        [
            case["target"],
            str(case["draft_max"]),
            *(f"{case['tokens_per_s'][who]:.1f} t/s" for who in ("ours", "theirs")),
            interval(case["ratio_of_sums"], case["ratio_ci95"]),
        ]
        for case in read("against-peers")["cases"]
    ]
    return rows(["target", "draft length", "ours", "theirs", "ratio (95 % interval of the paired ratios)"], body)


def grid(read: Read) -> list[Case]:
    """Cases of default settings against the program, by target and draft."""
    cases = [case for case in read("decoder")["cases"] if case["group"] == "grid" and has(case, "both", "theirs")]
    order = list(dict.fromkeys(case["kind"] for case in cases))
    key = lambda case: (list(reversed(TARGETS)).index(case["target"]), len(case["draft"]), order.index(case["kind"]))  # noqa: E731
    return sorted(cases, key=key)


@shown("default-settings")
def default_settings(read: Read) -> Lines:
    """Geometric means over the kinds of text, a row for each target and draft."""

    def row(cases: Sequence[Case]) -> Lines:
        pairs = (("both", "theirs"), ("both", "target-only"), ("draft", "fixed"))
        return [cell([ratio(case, mode, fastest(case, other)) for case in cases]) for mode, other in pairs]

    cases = grid(read)
    pairs = [(pair, list(own)) for pair, own in groupby(cases, key=lambda case: (case["target"], case["draft"]))]
    body = [[target, draft.upper(), *row(own)] for (target, draft), own in pairs]
    ratios = ["÷ `llama-speculative-simple` at its best length", "÷ target-only"]
    ratios += ["draft model only ÷ our best fixed length"]
    return rows(["target", "draft", *ratios], [*body, [f"all {len(cases)}", "", *row(cases)]], numbers="--:::")


@shown("serving")
def serving(read: Read) -> Lines:
    """``ggufspec serve`` ÷ llama-server: target-only, at the draft length where it is fastest, and at the others."""
    found = read("serving")["kinds"]["Q4_0"]["one_client"]
    speeds = {name: median(samples) for name, samples in found["tokens_per_s"].items()}
    beginning = "llama-server, draft length "
    lengths = {name.removeprefix(beginning): name for name in speeds if name.startswith(beginning)}
    best = max(lengths, key=lambda length: speeds[lengths[length]])
    others = [length for length in lengths if length != best]
    over = found["speed_of_ours_over"]

    def whole(name: str) -> str:
        return interval(over[name]["median"], over[name]["ci95"])

    body = [
        ["target-only", whole("llama-server target-only")],
        [f"draft length {best}, its fastest with this draft", whole(lengths[best])],
        [
            f"draft length {', '.join(others)}",
            ", ".join(f"{over[lengths[length]]['median']:.2f}" for length in others),
        ],
    ]
    return rows(["ggufspec serve ÷ llama-server", "tokens/s"], body, numbers=False)


# ---- drafters -------------------------------------------------------------------------------------------------------


WAYS = {
    "lookup": "n-gram lookup",
    "draft": "draft model, 150M",
    **{
        f"{head}{more}": f"{what}{' + lookup' * bool(more)}" for head, what in HEADS.items() for more in ("", "+lookup")
    },
}


def ways(cases: Sequence[Case]) -> list[str]:
    return [way for way in WAYS if any(way in modes_run(case) for case in cases)]


@shown("drafters")
def drafters(read: Read) -> Lines:
    """Each way to draft ÷ target-only, by text and by type."""
    cases = read("head-speed")["cases"]
    parts = {kind: [case for case in cases if case["kind"] == kind] for kind in KINDS}
    parts |= {f"all, {target}": [case for case in cases if case["target"] == target] for target in reversed(TARGETS)}
    body = [
        [name, *(cell([ratio(one, way, "target-only") for one in own if way in modes_run(one)]) for way in ways(cases))]
        for name, own in (parts | {"all": cases}).items()
        if own
    ]
    return rows(["", *(WAYS[way] for way in ways(cases))], body)


@shown("heads")
def heads(read: Read) -> Lines:
    """Heads ÷ their rivals, over all cases."""
    cases = read("head-speed")["cases"]
    names = ["÷ `llama-speculative-simple`", "the same, with the prompt", "÷ target-only", "÷ our best fixed length"]
    body = []
    for way in (way for way in ways(cases) if way.split("+")[0] in HEADS):
        own = [case for case in cases if way in modes_run(case)]
        theirs, target_only, fixed = against(way.split("+")[0]).values()
        pairs = ((theirs, ""), (theirs, "whole_"), (target_only, ""), (fixed, ""))
        cells = [cell([ratio(case, way, fastest(case, other), part) for case in own]) for other, part in pairs]
        body.append([WAYS[way], accepted(own, way), *cells])
    return rows(["", "accepted", *names], body)


def accepted(cases: Sequence[Case], mode: str) -> str:
    """Accepted ÷ drafted tokens over all runs."""
    runs = [repetition[mode] for case in cases for repetition in case["repetitions"] if mode in repetition]
    drafted = sum(run["drafted"] for run in runs)
    return f"{sum(run['accepted'] for run in runs) / drafted:.0%}" if drafted else "none drafted"


@said("docs/drafters.md", "the two together are {} to {} times as fast as the head alone")
def with_lookup(read: Read) -> Figures:
    cases = read("head-speed")["cases"]
    means = [geometric_mean([ratio(case, f"{head}+lookup", head) for case in cases]) for head in HEADS]
    return two(min(means), max(means))


@said("docs/drafters.md", "takes as long as {} target-only tokens at F16, {} at Q8_0 and {} at Q4_0:")
def rounds_of_three(read: Read) -> Figures:
    return tuple(f"{cost_of_three(read, target):.1f}" for target in ("F16", "Q8_0", "Q4_0"))


def cost_of_three(read: Read, target: str) -> float:
    """A round that verifies four tokens of a head, in tokens of target-only; a shorter one counts as one of those."""
    found = []
    for case in read("head-speed")["cases"]:
        for repetition in case["repetitions"] if case["target"] == target else ():
            token_s = repetition["target-only"]["seconds"] / repetition["target-only"]["tokens"]
            for run in (repetition.get(f"{head} fixed 3") for head in HEADS):
                if run:
                    rounds = run["widths"].get("4", 0)
                    found.append((run["seconds"] / token_s - (run["rounds"] - rounds)) / rounds)
    return median(found)


# ---- figures in sentences -------------------------------------------------------------------------------------------


def two(*figures: float) -> Figures:
    return tuple(f"{figure:.2f}" for figure in figures)


@said(
    "README.md",
    "Predicted target speeds have a median error of {} % over {} published speeds, and of {} % if no "
    "measurement of the card itself was used",
)
def predicted_speeds(read: Read) -> Figures:
    found = read("published")["results"]["summary"]
    every, others = found["speed"], found["speed without the card"]
    return f"{100 * every['median']:.0f}", str(every["rows"]), f"{100 * others['median']:.0f}"


@said(
    "README.md",
    "Of {} published pairs, {} were faster with the draft and {} were not. The prediction was right for {} of them: "
    "{} of the {} that were faster and {} of the {} that were not. The predicted speedup has a median error of {} %",
)
def predicted_verdicts(read: Read) -> Figures:
    rows = read("published")["results"]["verdicts"]
    won, lost = (
        [row["right"] for row in rows if (row["measured"] > published.EVEN) is is_won] for is_won in (True, False)
    )
    off = median(abs(row["predicted"] / row["measured"] - 1) for row in rows if row["predicted"])
    right = sum(won), len(won), sum(lost), len(lost)
    counts = len(rows), len(won), len(lost), sum(won) + sum(lost), *right
    return *map(str, counts), f"{100 * off:.0f}"


@said("README.md", "published {} tokens/s without a draft and {} with this one, at draft length {}")
def measured_on_12gb(read: Read) -> Figures:
    found = read("card-12gb")["published"]
    speeds = (found[f"{what}_tokens_per_s"] for what in ("target_only", "speculative"))
    return *(f"{speed:.1f}" for speed in speeds), str(found["draft_max"])


@said(
    "docs/gpu.md",
    "Llama-3-70B on a 24 GB card: {} tokens/s target-only and {} with a draft at the same {} layers; with all of "
    "the card's memory a predicted {} target-only at {} layers, {} with a draft verified in the usual way, and {} "
    "if the card also verifies with the CPU's weights.",
)
def honest_rival(read: Read) -> Figures:
    found = read("honest-rival")
    published, plans = found["published"], found["plans"]
    usual, planned = plans["fastest as usual"]["options"], plans["fastest"]["options"]
    best = planned["target_only"]
    measured = two(published["target_only_tokens_per_s"], published["speculative_tokens_per_s"])
    pairs = two(usual["speculative"]["tokens_per_s"], planned["speculative"]["tokens_per_s"])
    alone = *two(best["tokens_per_s"]), str(best["target"]["gpu_layers"])
    return *measured, str(published["gpu_layers"]), *alone, *pairs


@said(
    "README.md",
    "the same pair answers at {} tokens/s with `ggufspec serve`, at {} without a draft, and at {} with llama-server at "
    "its best draft length",
)
def real_pair_means(read: Read) -> Figures:
    """The default in a server that has just been started, target-only, and llama-server's best with the draft."""
    ways = real_speeds(read)["F16"]
    means = {way: geometric_mean_of(own.values()) for way, own in ways.items()}
    theirs = max(speed for way, speed in means.items() if way.startswith("llama-server-draft"))
    return tuple(f"{speed:.1f}" for speed in (means["default-1st"], means["target-only"], theirs))


@said(
    "README.md",
    "for six pairs: ggufspec {} to {} times, llama-speculative-simple at its best draft length {} to {} times.",
)
def how_fast(read: Read) -> Figures:
    """The lowest and the highest mean over the kinds of text, ours and theirs."""
    pairs = [list(own) for _, own in groupby(grid(read), key=lambda case: (case["target"], case["draft"]))]
    ours, theirs = (
        [geometric_mean([ratio(case, fastest(case, mode), "target-only") for case in own]) for own in pairs]
        for mode in ("both", "theirs")
    )
    return two(min(ours), max(ours), min(theirs), max(theirs))


@said("docs/performance.md", "with `scripts/bench`, two cores of a Xeon with AMX measured {}×")
def without_a_pair(read: Read) -> Figures:
    return (f"{benches(read, 'demo').speedup.median:.1f}",)


@said("README.md", "its loop runs at {} to {} times the speed of llama.cpp's own")
def at_equal_lengths(read: Read) -> Figures:
    ratios = [case["ratio_median"] for case in read("against-peers")["cases"]]
    return two(min(ratios), max(ratios))


@said(
    "docs/performance.md",
    "is {} times as fast as the best of llama-server's settings for each task ({} times in the worst task), and {} "
    "times as fast as its one best setting for all of them",
)
def real_pair_ratios(read: Read) -> Figures:
    goals = read("real-pair")["summary"]["F16"]
    each, one = goals["first ÷ llama-server's best for the task"], goals["first ÷ llama-server's best for all tasks"]
    worst = min(row["ratio"] for row in each["ratios"])
    return two(geometric_mean(each["ratios"]), worst, geometric_mean(one["ratios"]))


@said(
    "docs/performance.md",
    "There the default is {} (Q4_K_M) and {} times (Q8_0) as fast as the best of llama-server's settings for each "
    "task ({} and {} times in the worst task), and no first answer runs at less than {} and {} of target-only speed.",
)
def real_pair_of_others(read: Read) -> Figures:
    goals = [read("real-pair")["summary"][target] for target in ("Q4_K_M", "Q8_0")]
    best = [one["first ÷ llama-server's best for the task"] for one in goals]
    alone = [one["first ÷ target-only"] for one in goals]
    means = [one["geomean"] for one in best]
    return two(*means, *(one["worst"]["ratio"] for one in (*best, *alone)))


@said(
    "docs/performance.md",
    "Both drafters together ran at {} to {} of the better one's speed, depending on the kind of text ({} to {} in "
    "single cases).",
)
def together(read: Read) -> Figures:
    """Both drafters ÷ the better one: means by kind of text, and single cases."""
    means = [one["geomean"] for name, one in read("decoder")["summary"].items() if name.startswith("D ")]
    cases = [ratio(case, "both", fastest(case, "draft", "lookup"))["ratio"] for case in grid(read)]
    return two(min(means), max(means), min(cases), max(cases))


@said(
    "docs/performance.md",
    "{} of {} runs kept at least {} of target-only speed after the first {} tokens; the lowest kept {}.",
)
def without_gain(read: Read) -> Figures:
    found = read("decoder")["summary"]["C after 64 tokens"]
    ratios, limit = [one["ratio"] for one in found["ratios"]], found["limits"]["worst"]
    return str(sum(one >= limit for one in ratios)), str(len(ratios)), f"{limit:.2f}", "64", f"{min(ratios):.3f}"


@said("docs/performance.md", "`--strict` ran at {} of the default speed with drafts (worst {}), and at {} without")
def strict(read: Read) -> Figures:
    """Strict mode ÷ default: with drafts, its worst case, and without."""
    summary = read("decoder")["summary"]
    drafted, plain = (summary[f"E strict ÷ default, {mode}"] for mode in ("both", "target-only"))
    return two(drafted["geomean"], drafted["worst"]["ratio"], plain["geomean"])


@said("docs/exactness.md", "With drafts, strict mode ran at {} of the default speed; without a draft at {}, because")
def strict_means(read: Read) -> Figures:
    drafted, _, plain = strict(read)
    return drafted, plain


@said(
    "docs/performance.md",
    "all of its {} texts, with every drafter, policy and padding, matched target-only token for token",
)
def identity(read: Read) -> Figures:
    found = read("decoder")["summary"]["E identity"]
    assert found["identical"] == found["texts"], "the sentence says: all"
    return (f"{found['texts']:,}",)


@said(
    "docs/performance.md",
    "costs {} µs of Python outside llama.cpp with greedy decoding ({} µs at a vocabulary of {}), and {} µs ({} µs) "
    "at temperature 0.8 with llama.cpp's default truncation",
)
def round_overhead(read: Read) -> Figures:
    """Microseconds a round: greedy and sampled, each at both vocabularies; the second vocabulary behind the greedy."""
    found = {(one["sampling"], one["vocabulary"]): one["median_s"] for one in read("round-overhead")["results"]}
    small, large = sorted({vocabulary for _, vocabulary in found})
    greedy, sampled = (
        [f"{found[name, vocabulary] * 1e6:,.0f}" for vocabulary in (small, large)]
        for name in ("greedy", "temperature 0.8, llama.cpp's default truncation")
    )
    return *greedy, f"{large:,}", *sampled


@said("docs/performance.md", "at Q4_0 ran at {} to {} tokens/s instead of at most {}")
def busy(read: Read) -> Figures:
    """Beside one busy program, there from the start or not: threads that follow, and as many as cores."""
    found = read("busy")["runtimes"]["libgomp"]["medians_tokens_per_s"]
    follows, cores = ([found[load][name] for load in ("one", "comes")] for name in ("follows", "all cores"))
    return tuple(f"{figure:.0f}" for figure in (min(follows), max(follows), max(cores)))


@said(
    "docs/serve.md",
    "the first token arrives after {} s. That is {} to {} of llama-server's time with the draft and {} of its time "
    "without",
)
def second_turn(read: Read) -> Figures:
    found = read("serving")["kinds"]["Q4_0"]["second_turn"]
    over = {name: one["median"] for name, one in found["ours_over"].items()}
    drafted = [figure for name, figure in over.items() if "draft length" in name]
    first_s = median(found["first_token_s"]["ggufspec"])
    return two(first_s, min(drafted), max(drafted), over["llama-server target-only"])


@said("docs/serve.md", "each of the {} later turns decoded at most {} tokens of a prompt of up to {}:")
def by_turns(read: Read) -> Figures:
    later = [turn for turn in read("serving")["kinds"]["Q4_0"]["by_turns"]["turns"] if turn["turn"]]
    most = max(turn["prompt_tokens"] - turn["cached"] for turn in later)
    return str(len(later)), str(most), str(max(turn["prompt_tokens"] for turn in later))


@said(
    "docs/serve.md",
    "add {} ms per token if a core is free for them (`-t 1` here), and {} ms if decoding uses all cores",
)
def added(read: Read) -> Figures:
    found = read("serving")["kinds"]["Q4_0"]
    return tuple(f"{1000 * found[name]['median']:.1g}" for name in ("added_with_a_free_core", "added"))


@said("docs/python.md", "it ran at {} times the speed of `Llama` without a draft and at {} times that of our loop")
def hook(read: Read) -> Figures:
    found = read("hook")["pairs"]["Q4_0"]["hook"]
    return two(found["speedup"]["median"], found["over_own"]["median"])


@said(
    "docs/compare-and-tune.md",
    "On {} of {} simulated machines the winner reached at least 97 % of the best setting's speed (at least {} % on the "
    "others), after a median of {} trials",
)
def tuning(read: Read) -> Figures:
    found, shares = read("tuning"), [one["share"] for one in read("tuning")["outcomes"]]
    good = sum(share >= 0.97 for share in shares)
    trials = found["all"]["trials"]["median"]
    return str(good), str(len(shares)), str(math.floor(100 * min(shares))), f"{trials:.0f}"


@said("docs/gpu.md", "Headers are fetched with range requests, about {} MB of a {} GB file")
def header_bytes(read: Read) -> Figures:
    found = read("planning")["results"]
    return f"{found['remote_bytes_read'] / 1e6:.0f}", f"{found['file_bytes'] / 1e9:.0f}"


@said("docs/guide.md", "It reads only their headers: {} MB for {} files of an 8B model")
def repository_bytes(read: Read) -> Figures:
    found = read("repository")["results"]
    return f"{max(found['first_bytes_read']) / 1e6:.0f}", str(found["files"])


@said("docs/reading-the-output.md", "Its target takes {} ms per token;")
def demo_token(read: Read) -> Figures:
    return (f"{1000 / read('demo-bench')['runs']['target_only']['tokens_per_s']['median']:.1f}",)


@said("docs/evidence/README.md", "plan -hf REPO` of {} files")
def repository_files(read: Read) -> Figures:
    return (str(read("repository")["results"]["files"]),)


@said("docs/evidence/README.md", "{} prompts of up to {} tokens, an EAGLE-3 head and MTP blocks")
def identity_of_heads(read: Read) -> Figures:
    found = read("head-identity")
    prompts = max(len(way["answers"]["prompt"]) for way in found["ways"])
    return str(prompts), f"{found['longest_prompt_tokens']:,}"


@said("docs/evidence/README.md", "adaptive: {} answers, every token equal")
def answers_of_heads(read: Read) -> Figures:
    found = read("head-identity")
    assert not found["unequal"], "the sentence says: every token"
    return (f"{found['answers']:,}",)


@said("docs/evidence/README.md", "measures again and does: {} to {} of the former")
def calibrated(read: Read) -> Figures:
    rows = read("calibrating")["repetitions"]
    ratios = [row["idle after beside"]["tokens_per_s"] / row["idle"]["tokens_per_s"] for row in rows]
    return two(min(ratios), max(ratios))


@said("docs/evidence/README.md", "against what others published on {} cards")
def published_cards(read: Read) -> Figures:
    results = read("published")["results"]
    return (str(len({row["card"] for part in published.PARTS for row in results[part]} - {""})),)


@shown("cards")
def cards(_read: Read) -> Lines:
    """What was measured on which card, of the folders beside the records."""
    return index(EVIDENCE).splitlines()


# ---- the pages ------------------------------------------------------------------------------------------------------


def evidence(name: str) -> Any:
    """A record of docs/evidence."""
    return json.loads((EVIDENCE / f"{name}.json").read_text(encoding="utf-8"))


def with_tables(text: str, read: Read) -> str:
    """A page with what belongs between its marks."""
    return MARKED.sub(
        lambda found: "".join([found[1], *(f"{line}\n" for line in TABLES[found[2]](read)), found[4]]), text
    )


def with_figures(text: str, words: str, figures: Sequence[str]) -> str:
    """A page with these figures in the sentence of these words.

    Raises:
        ValueError: the page does not have the sentence, or has it twice.
    """
    parts = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in words.split("{}")]
    found = list(re.finditer("(" + f"){FIGURE}(".join(parts) + ")", text))
    if len(found) != 1:
        raise ValueError(f"{len(found)} times on the page, not once: {words}")
    between = found[0].groups()
    whole = "".join(part for pair in zip(between, (*figures, ""), strict=True) for part in pair)
    return text[: found[0].start()] + whole + text[found[0].end() :]


def pages(read: Read = evidence) -> dict[Path, str]:
    """Every page that has a figure of the evidence, as it should be."""
    made: dict[Path, str] = {}
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), EVIDENCE / "README.md"):
        text = with_tables(path.read_text(encoding="utf-8"), read)
        for page, sentence, figures in SENTENCES:
            if ROOT / page == path:
                text = with_figures(text, sentence, figures(read))
        made[path] = text
    return made | {published.PAGE: published.page(read("published")["results"])}


def main() -> None:
    """Write every page that differs."""
    for path, text in pages().items():
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)} was out of date")


if __name__ == "__main__":
    main()
