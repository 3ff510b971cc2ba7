"""Benchmark of speculative decoding against target-only: interleaved answers, paired ratios, one verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median

from ggufspec.bench import disturbed, divergence, hooked, lengths, trial
from ggufspec.bench.answers import FEWEST, AnswerBudget, InterleavedAnswers, Variant, asked
from ggufspec.bench.run_log import key_of
from ggufspec.bench.statistics import mean_ratio, paired_ratios, spread, weights_of
from ggufspec.bench.summary import (
    by_kind,
    by_part,
    machine_and_build,
    machine_and_versions,
    notes_of,
    plan_of,
    summarise,
    used_settings,
    without_draft,
)
from ggufspec.bench.trials import Progress
from ggufspec.decoding.decoder import Statistics
from ggufspec.decoding.options import STRICT_IMPOSSIBLE, DecoderOptions
from ggufspec.errors import ChildError, GgufspecError
from ggufspec.llamacpp.options import OP_OFFLOAD_MIN_BATCH
from ggufspec.models.profile import Pair
from ggufspec.schema.base import Failure, MeasuredRun, Portion, SpeculativeRun, Spread
from ggufspec.schema.bench import (
    BenchDisturbance,
    BenchDocument,
    BenchVerdict,
    Divergence,
    HookComparison,
    LengthSpeedup,
)
from ggufspec.schema.plan import PlanDocument
from ggufspec.schema.text import counted
from ggufspec.settings.registry import is_lossy
from ggufspec.settings.table import OPTIONS

ENGINES = ("own", "hook")
MODES = ("target_only", "draft_only", "speculative")
AT_PAIR = "target_only_at_pair"
LLAMA_ALONE, LLAMA_HOOK = "llama_target_only", "llama_hook"
BUDGET_S = 180.0
_CHECK_PROMPTS, _CHECK_TOKENS = 3, 32
_STRICT = 1.6  # maximum slowdown of strict mode, which pads one-token batches
_EXPLAINED = 16  # ratio of the time to explain a divergence (ggufspec.bench.divergence) to the text's target-only time
_FEWEST_PASSES = 6  # minimum number of passes before an interval may end the measurement of fewer prompts than FEWEST
_POSSIBLE = 0.9  # minimum time of a round relative to a target-only token: 1, minus a margin for noise
_PRECISE = 0.02  # relative half-width of an interval that needs no more trials
_FARTHEST = 10  # maximum length to extrapolate to, as a multiple of the measured length
_ENDS = ("end", "stop", "grammar")  # stop reasons of answers that were not truncated


@dataclass(frozen=True, slots=True)
class BenchExperiment:
    """Comparison to make; ``spec`` is the speculative run.

    The verdict is for answers of the spec's ``max_tokens``. With ``own_lengths``, it is for the median length of the
    answers to the prompts; an unfinished answer counts as ``max_tokens``.

    ``repetitions`` are passes over the prompts; None for as many as the verdict needs within ``budget_s`` seconds of
    answers. A budget may drop prompts and, with ``cut``, shorten answers.

    ``target_only`` are the options of the best target-only run, which may use the draft's memory for more of the
    target. If its placement differs from the pair's, target-only is also measured at the pair's placement.

    The engine ``hook`` also measures llama-cpp-python's ``Llama``, with our draft as its draft model
    (:mod:`ggufspec.decoding.hook`) and without.
    """

    pair: Pair
    spec: trial.TrialJob
    repetitions: int | None = None
    verbose: bool = False
    target_only: DecoderOptions | None = None
    plan: PlanDocument | None = None
    engine: str = "own"
    budget_s: float | None = None
    cut: bool = True
    own_lengths: bool = False

    @property
    def baseline(self) -> DecoderOptions:
        return self.target_only or self.spec.options

    @property
    def limit_s(self) -> float | None:
        """Budget in seconds; the default if neither a budget nor a number of repetitions is given."""
        return self.budget_s or (None if self.repetitions else BUDGET_S)

    @property
    def variants(self) -> dict[str, Variant]:
        """Variants by mode; the pair's load also answers target-only if the options are the same."""
        spec, own = self.spec, self.spec.options
        baseline = without_draft(replace(spec, options=self.baseline))
        same = replace(self.baseline, draft=own.draft, draft_max=own.draft_max)
        found = {"target_only": Variant(baseline, shared="target" if same == own else None)}
        if spec.draft is not None and not own.head:  # a head cannot answer alone
            draft = without_draft(replace(spec, target=spec.draft, options=replace(own, target=own.draft)))
            found["draft_only"] = Variant(draft, shared="draft", informational=True)
        found["speculative"] = Variant(spec, shared="")
        if self.baseline.target != own.target:
            found[AT_PAIR] = Variant(without_draft(spec), shared="target", informational=True)
        if self.engine == "hook":
            found |= {LLAMA_ALONE: Variant(baseline, hooked.__name__), LLAMA_HOOK: Variant(spec, hooked.__name__)}
        return found

    @property
    def key(self) -> str:
        """Key made from the settings and the machine."""
        facts = (
            trial.key_text(self.spec),
            repr(self.baseline),
            self.repetitions,
            self.engine,
            self.budget_s,
            self.own_lengths,
        )
        return key_of(*facts, machine_and_versions())[:8]

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(self.variants)


@dataclass
class SameText:
    """Results of checks for changed text: a short check in strict mode, and divergences of measured answers."""

    identical: bool | None = None
    note: str = ""
    divergences: tuple[Divergence, ...] = ()
    compared: int = 0  # number of measured answers compared
    different: int = 0  # compared answers that differ, including those that the budget left no time to explain

    def check(self) -> dict[str, object]:
        measured: dict[str, object] = {"compared": self.compared, "different": self.different}
        return {"note": self.note} | (measured if self.compared else {})


class Bench:
    """Experiment with its measurements. :meth:`run` may be interrupted; :meth:`document` returns what was measured.

    A mode whose child process crashes is not retried; the others continue.
    """

    def __init__(
        self,
        experiment: BenchExperiment,
        *,
        opened: Callable[..., trial.ModelProcess] = trial.ModelProcess,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.experiment = experiment = replace(experiment, spec=_by_kind(experiment.spec))
        self.own, self.hook = SameText(), SameText()
        self._opened = opened
        self.answers = InterleavedAnswers(
            experiment.variants,
            "speculative",
            AnswerBudget(experiment.limit_s, clock),
            repetitions=experiment.repetitions,
            cut=experiment.cut,
            verbose=experiment.verbose,
            opened=opened,
        )
        self.results, self.crashes = self.answers.results, self.answers.crashes
        self._cut_off: list[str] = []

    def run(self, progress: Progress, note: Callable[[str], None] = lambda _: None) -> None:
        """Measure, then check identity in strict mode and explain divergences; ``note`` gets a time estimate.

        Raises:
            UsageError: the budget is too short for one answer.
            GgufspecError: a trial failed and the user can fix the cause, or every mode crashed.
            KeyboardInterrupt: Ctrl-C.
        """
        spec, hook = self.experiment.spec, self.experiment.engine == "hook"
        self.answers.measure(progress, note, self._enough)
        if not any(self.results.values()) and self.crashes:
            raise next(iter(self.crashes.values()))
        for result in (*self.results["target_only"][:1], *self.results["speculative"][:1]):
            trial.timed(result)
        progress(1, 1, "checking the text")
        self._check_own()
        if hook:
            greedy = replace(spec, sampling=replace(spec.sampling, temperature=0.0))
            self.hook = self._check(greedy, hooked.__name__)
            self.hook.note += ", greedy, from Llama with and without the hook"
        if spec.options.accept == "exact":
            self._compare(self.own, "target_only", "speculative")
        if spec.sampling.temperature == 0:  # at higher temperatures, Llama draws its own random numbers
            self._compare(self.hook, LLAMA_ALONE, LLAMA_HOOK)

    def _enough(self) -> bool:
        """Return whether every verdict is clear, or precise enough that more answers would not change it."""
        pairs = [("speculative", "target_only")]
        pairs += [(LLAMA_HOOK, LLAMA_ALONE)] if self.experiment.engine == "hook" else []
        return all(self._counted(*pair).is_enough and self._is_clear(self._speedup(*pair)) for pair in pairs)

    @property
    def answer_tokens(self) -> int:
        """Answer length that the verdict is for."""
        most = self.experiment.spec.max_tokens
        if not self.experiment.own_lengths:
            return most
        found = [max(one.tokens for one in both) if _has_ended(both) else most for both in self._lengths()]
        return round(median(found)) if found else most

    @property
    def measured_tokens(self) -> int:
        """Mean length of the compared answers, counting the shorter answer of each pair."""
        found = [min(one.tokens for one in both) for both in self._lengths()]
        return round(fmean(found)) if found else 0

    def _lengths(self) -> list[tuple[Statistics, ...]]:
        """Return (target-only, speculative) statistics for each prompt of the first pass."""
        first = [self.results[mode][:1] for mode in ("target_only", "speculative")]
        answers = [[one.statistics for result in results for one in result.answers] for results in first]
        return list(zip(*answers, strict=False))

    def _counted(self, mode: str, baseline: str) -> disturbed.CountedRuns:
        """Return the parts of both runs' results that count."""
        return disturbed.count(self.results[mode], self.results[baseline])

    def _is_clear(self, speedup: Spread | None) -> bool:
        if speedup is None:  # one of the two runs has crashed
            return True
        low, high = speedup.ci95
        few = self.answers.prompts < FEWEST and len(self.results["speculative"]) < _FEWEST_PASSES
        return not few and (low > 1 or high < 1 or high - low <= 2 * _PRECISE * speedup.median)

    def _check_own(self) -> None:
        spec = self.experiment.spec
        # Strict mode also needs full caches for sliding windows, which may not fit with a long context
        longest = max(len(prompt.encode()) for prompt in spec.prompts) + _CHECK_TOKENS
        ctx_size = min(spec.options.ctx_size, max(OPTIONS["ctx_size"].default, longest))
        min_batch = max(spec.options.op_offload_min_batch, OP_OFFLOAD_MIN_BATCH)
        options = replace(spec.options, strict=True, accept="exact", ctx_size=ctx_size, op_offload_min_batch=min_batch)
        strict = replace(spec, options=options)
        try:
            self.own = self._check(strict, trial.__name__)
        except ChildError as error:
            self.own = SameText(None, error.message)
            return
        except GgufspecError as error:
            if STRICT_IMPOSSIBLE not in error.message:
                raise
            self.own = SameText(None, error.message)
            return
        if self.own.identical is not None:
            self.own.note += " in strict mode" + ("" if spec.options.accept == "exact" else " under the exact rule")

    def _check(self, spec: trial.TrialJob, engine: str) -> SameText:
        """Compare short answers with and without a draft, at the same placement."""
        size = self._check_size(spec)
        late = SameText(None, "the budget left no time for it")
        if size is None:
            return late
        short = replace(spec, prompts=spec.prompts[: size[0]], max_tokens=size[1], depth=0)
        found: list[trial.TrialResult] = []
        for one in (short, without_draft(short)):
            with closing(self._opened(one, engine, verbose=self.experiment.verbose)) as load:
                found.append(self.answers.budget.ask(load, trial.TrialRequest()))
                if one.draft is not None and engine == trial.__name__ and load.ready.alone:
                    found.append(self.answers.budget.ask(load, trial.TrialRequest(alone="target")))
            if len(found) == 2:
                break
        if not all(result.finished for result in found):
            return late
        drafted, plain = ([answer.tokens for answer in result.answers] for result in found)
        compared = f"{sum(map(len, plain))} tokens of {counted(len(plain), 'answer')} compared"
        return SameText(drafted == plain, compared)

    def _check_size(self, spec: trial.TrialJob) -> tuple[int, int] | None:
        """Return how many prompts and tokens a check compares; None if the budget leaves no time for it."""
        most = min(_CHECK_TOKENS, spec.max_tokens)
        both = [mode for mode in ("target_only", "speculative") if self.results[mode]]
        for prompts in range(min(_CHECK_PROMPTS, len(spec.prompts)), 0, -1):
            for tokens in (most, most // 2, most // 4):
                cost_s = sum(_STRICT * self.answers.cost_s(mode, i, tokens) for mode in both for i in range(prompts))
                if tokens and cost_s < self.answers.budget.left_s:
                    return prompts, tokens
        return None

    def _compare(self, found: SameText, without: str, drafted: str) -> None:
        """Record where answers of two modes diverge, and explain as many divergences as the budget allows."""
        spec = self.experiment.spec
        if not (self.results.get(without) and self.results.get(drafted)):
            return
        answers = list(zip(self.results[without][0].answers, self.results[drafted][0].answers, strict=False))
        cases = [
            divergence.DivergenceCase(index, spec.prompts[index], target_only.tokens, drafted.tokens, spec.sampling)
            for index, (target_only, drafted) in enumerate(answers)
            if any(
                a != b for a, b in zip(target_only.tokens, drafted.tokens, strict=False)
            )  # an answer may be truncated
        ]
        found.compared, found.different = len(answers), len(cases)
        left_s, explained = self.answers.budget.left_s, list[divergence.DivergenceCase]()
        for case in cases:
            left_s -= self.answers.cost_s("target_only", case.index, _EXPLAINED * (case.position + 1))
            if left_s > 0:
                explained.append(case)
        if late := len(cases) - len(explained):
            self._cut_off.append(
                f"{counted(late, 'answer')} with a draft {'differs' if late == 1 else 'differ'} from target-only, "
                "which rounding can cause at near ties; the budget left no time to find the reason"
            )
        found.divergences = divergence.explain(
            divergence.DivergenceJob(spec.target, spec.options, tuple(explained), spec.rpc, spec.depth),
            verbose=self.experiment.verbose,
        )

    @property
    def counting(self) -> dict[str, list[trial.TrialResult]]:
        """Results by mode, with only the parts that count."""
        return self._chosen(self._counted("speculative", "target_only"))

    @property
    def is_quiet(self) -> bool:
        """True if the parts that count were measured on a quiet machine."""
        return self._counted("speculative", "target_only").is_quiet

    def _chosen(self, counted: disturbed.CountedRuns) -> dict[str, list[trial.TrialResult]]:
        return self.results | {"speculative": counted.ours, "target_only": counted.theirs}

    def document(self, *, interrupted: bool = False) -> BenchDocument:
        """Return everything measured so far."""
        spec, counted = self.experiment.spec, self._counted("speculative", "target_only")
        runs = {
            mode: self._summary(mode, results) if results else None for mode, results in self._chosen(counted).items()
        }
        tokens, measured = self.answer_tokens, self.measured_tokens
        speedup = self._speedup("speculative", "target_only")
        reported = sorted({tokens, *(one for one in lengths.SHOWN if one <= _FARTHEST * measured)})
        compared = {"target_only": counted.theirs, "speculative": counted.ours}
        means = {mode: lengths.mean_time(lengths.answer_seconds(one), self._weights) for mode, one in compared.items()}
        times = {mode: one for mode, one in means.items() if one is not None}
        return BenchDocument(
            pair=self.experiment.pair.describe(),
            machine=machine_and_build(next((r.system_info for rs in self.results.values() for r in rs), ""))
            | {"others_cpus": {m: [r.others_cpus for r in rs] for m, rs in self.results.items()}},
            plan=plan_of(self.results) | ({"planned": asdict(self.experiment.plan)} if self.experiment.plan else {}),
            settings=used_settings(spec) | self._extent(),
            runs=runs,
            speedup=speedup,
            identical_output=self.own.identical,
            identity_check=self.own.check(),
            divergences=self.own.divergences,
            verdict=bench_verdict(
                speedup,
                runs["target_only"],
                runs["speculative"],
                tokens=tokens,
                crashed=bool(self.crashes),
                streams=spec.options.op_offload_min_batch < OP_OFFLOAD_MIN_BATCH,
            ),
            notes=tuple(filter(None, (*notes_of(self.results["speculative"]), *self._cut_off, counted.note))),
            interrupted=interrupted,
            hook=self._hook() if self.experiment.engine == "hook" else None,
            by_kind=tuple(map(self._of_kind, by_kind(spec.kinds, counted.theirs, counted.ours))),
            by_part=by_part(self.results["target_only"], self.results["speculative"]),
            failures={mode: Failure.of(error) for mode, error in self.crashes.items()},
            disturbance=BenchDisturbance(
                counted.busy_share, counted.others_cpus, counted.pairs, counted.counting, counted.part
            ),
            answer_tokens=tokens,
            measured_tokens=measured,
            answer_times=times,
            by_length=tuple(
                LengthSpeedup(
                    one,
                    lengths.answer_s(times["target_only"], one),
                    lengths.answer_s(times["speculative"], one),
                    found,
                )
                for one in reported
                if (found := self._speedup("speculative", "target_only", one))
            ),
        )

    def _extent(self) -> dict[str, object]:
        """Return how much was measured; for settings that varied, the maximum."""
        passes = max((len(results) for results in self.results.values()), default=0)
        return {
            "repetitions": self.experiment.repetitions or passes,
            "prompts": self.answers.prompts,
            "max_tokens": max(self.answers.lengths, default=self.experiment.spec.max_tokens),
            "budget_s": self.experiment.limit_s,
            "enough_s": self.answers.enough_s or None,
            "spent_s": self.answers.budget.spent_s if self.experiment.limit_s else None,
        }

    def _summary(self, mode: str, results: list[trial.TrialResult]) -> MeasuredRun | SpeculativeRun:
        """Return a mode's row, from the results that count.

        With three or more prompts, tokens/s and tokens per round are weighted means over prompts, like the speedup.
        """
        row = summarise(results, lossy=is_lossy(self.experiment.spec.options.accept))
        row = replace(row, tokens=sum(answer.statistics.tokens for answer in self.results[mode][0].answers))
        rows = [
            [s for one in results if i < len(one.answers) for s in [one.answers[i].statistics] if s.decoded]
            for i in range(asked(results))
        ]
        if sum(map(bool, rows)) < FEWEST:
            return row
        row = replace(row, tokens_per_s=self._mean([[(_token_s(s), 1.0) for s in found] for found in rows]))
        if not isinstance(row, SpeculativeRun):
            return row
        tokens_per_round = self._mean([[(s.rounds / s.decoded, 1.0) for s in found] for found in rows]).median
        return replace(row, tokens_per_round=tokens_per_round)

    def _speedup(self, mode: str, baseline: str, tokens: int = 0) -> Spread | None:
        """Return a mode's speedup over a baseline for answers of ``tokens``, the verdict's length by default.

        It is a mean over prompts in which all kinds count equally; with one or two prompts, the median over passes.
        """
        tokens = tokens or self.answer_tokens
        rows = self._answer_pairs(mode, baseline, tokens)
        if sum(map(bool, rows)) >= FEWEST:
            found = self._mean([list(row.values()) for row in rows])
        else:
            whole = set.intersection(*map(set, rows)) if rows else set()
            sums = [[sum(one) for one in zip(*(row[turn] for row in rows), strict=True)] for turn in sorted(whole)]
            sums = sums or [[*pair] for row in rows for pair in row.values()]  # no pass counts for every prompt
            if not sums:
                return None
            found = paired_ratios([theirs for _, theirs in sums], [ours for ours, _ in sums])
        return lengths.widened(found, tokens, self.measured_tokens)

    def _answer_pairs(self, mode: str, baseline: str, tokens: int) -> list[dict[int, tuple[float, float]]]:
        """Return both modes' seconds for an answer of ``tokens``, by prompt and pass, where both answers count."""
        counted = self._counted(mode, baseline)
        passes = list(zip(lengths.answer_seconds(counted.ours), lengths.answer_seconds(counted.theirs), strict=False))
        rows: list[dict[int, tuple[float, float]]] = [
            {} for _ in range(min(asked(counted.ours), asked(counted.theirs)))
        ]
        for turn, both in enumerate(passes):
            for row, (ours, theirs) in zip(rows, zip(*both, strict=False), strict=False):
                if ours and theirs:
                    row[turn] = lengths.answer_s(ours, tokens), lengths.answer_s(theirs, tokens)
        return rows

    def _of_kind(self, portion: Portion) -> Portion:
        """Return the portion with the speedup for its kind of prompt at the verdict's answer length."""
        rows = zip(self._answer_pairs("speculative", "target_only", self.answer_tokens), self._kinds, strict=False)
        found = [theirs / ours for row, kind in rows if kind == portion.name for ours, theirs in row.values()]
        return replace(portion, speedup=spread(found)) if found else portion

    @property
    def _kinds(self) -> list[str]:
        spec = self.experiment.spec
        return list(spec.kinds) or [str(i) for i in range(len(spec.prompts))]

    @property
    def _weights(self) -> list[float]:
        return weights_of(self._kinds[: self.answers.prompts])

    def _mean(self, rows: list[list[tuple[float, float]]]) -> Spread:
        """Return the mean speedup from (our seconds, their seconds) by prompt; all kinds count equally."""
        found = [(row, kind) for row, kind in zip(rows, self._kinds, strict=False) if row]
        return mean_ratio(
            [[theirs for _, theirs in row] for row, _ in found],
            [[ours for ours, _ in row] for row, _ in found],
            [kind for _, kind in found],
        )

    def _hook(self) -> HookComparison:
        """Compare ``Llama`` with the hook to ``Llama`` without it and to our own loop."""
        over_target_only, over_own = self._speedup(LLAMA_HOOK, LLAMA_ALONE), self._speedup(LLAMA_HOOK, "speculative")
        return HookComparison(
            speedup=over_target_only,
            over_own=over_own,
            identical_output=self.hook.identical,
            identity_check=self.hook.check(),
            divergences=self.hook.divergences,
            text=_hook_text(over_target_only, over_own),
            notes=notes_of(self.results[LLAMA_HOOK]),
        )


def _by_kind(spec: trial.TrialJob) -> trial.TrialJob:
    """Reorder the prompts so that the first ones cover as many kinds as possible and come from all over the list."""
    ranks = [(spec.kinds[:i].count(kind), i % 2, i) for i, kind in enumerate(spec.kinds)]
    order = [i for *_, i in sorted(ranks)]
    if not order:
        return spec
    return replace(spec, prompts=tuple(spec.prompts[i] for i in order), kinds=tuple(spec.kinds[i] for i in order))


def _token_s(statistics: Statistics) -> float:
    return max(statistics.decode_s, 1e-9) / statistics.decoded


def _has_ended(both: tuple[Statistics, ...]) -> bool:
    return any(one.stop_reason in _ENDS for one in both)


def _hook_text(over_target_only: Spread | None, over_own: Spread | None) -> str:
    if over_target_only is None or over_own is None:
        return "Llama with the hook: interrupted before every run had one trial."

    def ratio(spread: Spread) -> str:
        interval = f" (95% interval {spread.ci95[0]:.2f} to {spread.ci95[1]:.2f})"
        return f"{spread.median:.2f}×{interval if len(spread.samples) >= FEWEST else ''}"

    own = f"{ratio(over_own)} our own loop with the same draft"
    return f"Llama with the hook: {ratio(over_target_only)} Llama alone, {own}."


def bench_verdict(
    speedup: Spread | None,
    target_only: MeasuredRun | None,
    pair: MeasuredRun | None,
    *,
    tokens: int,
    crashed: bool = False,
    streams: bool = False,
) -> BenchVerdict:
    """Judge in one sentence whether the draft is worth it for answers of ``tokens``, and give the reason in another.

    A round takes at least as long as one target-only token, so a speedup above the tokens per round cannot come from
    the draft, unless target-only has another placement or the GPU ``streams`` (copies) CPU weights for large batches.
    """
    if speedup is None or target_only is None or pair is None:
        why = (
            "not every run could be measured"
            if crashed
            else "the measurement was interrupted before both runs had one trial"
        )
        return BenchVerdict(False, f"No verdict: {why}.")
    if not isinstance(pair, SpeculativeRun):
        return BenchVerdict(False, "Not worth it: no draft could pay for this target, so speculation was off.")
    low, high = speedup.ci95
    gained, comparable = pair.tokens_per_round, not streams and target_only.gpu_layers == pair.gpu_layers
    faster = pair.tokens_per_s.median / max(target_only.tokens_per_s.median, 1e-9)
    unused = "" if pair.drafted else "the draft was not used" if pair.draft_layers else "nothing was drafted"
    # No draft gains more than the tokens per round, and without drafts there is no gain
    least = min(low * min(1.0, gained / faster), 1.0 if unused else low) if comparable else low
    if comparable and gained < _POSSIBLE * faster:
        text = "No verdict: the machine's speed changed during the measurement."
        text += f" {unused.capitalize()}." if unused else ""
        who = "The speculative run" if unused else "The draft"
        why = (
            f"{who} seemed to decode {faster:.2f} times as fast, which is more than the {gained:.2f} tokens that a "
            "round yields. Measure again while other programs are idle, or for longer."
        )
        return BenchVerdict(False, text, why)
    ratio, interval = f"{speedup.median:.2f}×", f"95% interval {low:.2f} to {high:.2f}"
    length = f"for answers of {counted(tokens, 'token')}"
    as_fast = f"{ratio} as fast as without a draft {length}"
    enough = len(speedup.samples) >= FEWEST
    if not enough:
        text = f"No verdict from so few trials: {as_fast}, without an interval."
    elif least > 1:
        text = f"Worth it: {as_fast} ({interval})."
    elif unused:
        text = f"Not worth it: {unused}; {as_fast} ({interval})."
    elif high < 1:
        text = f"Not worth it: {as_fast} ({interval})."
    elif low > 1:
        text = f"Inconclusive: {as_fast} ({interval}), but a round yields only {gained:.2f} tokens."
    elif high - low <= 2 * _PRECISE * speedup.median:
        text = f"Not worth it: no faster than without a draft {length}, {ratio} ({interval})."
    else:
        text = (
            f"Inconclusive: {ratio} with the draft {length}, but the 95% interval ({low:.2f} to {high:.2f}) includes "
            "1. A larger --budget may settle it."
        )
    if unused and unused not in text:
        text += f" {unused.capitalize()}."
    if pair.is_only_lookup:
        text += " The draft itself was not used, only the n-gram lookup."
    if pair.lossy:
        text += " The rule is lossy: the text is not the target's own."
    why = _why(faster, target_only, pair)
    if least <= 1 and 2 * pair.plain_rounds > pair.rounds:
        why += f" In {pair.plain_rounds / pair.rounds:.0%} of the rounds no draft would have paid, and none was made."
    return BenchVerdict(enough and least > 1, text, why)


def _why(faster: float, target_only: MeasuredRun, pair: SpeculativeRun) -> str:
    """Describe a round's yield and its cost in target-only tokens, and both runs' GPU layers if they differ."""
    cost = pair.tokens_per_round / faster
    cost = 1.0 if _POSSIBLE <= cost < 1 else cost
    round_s = pair.tokens_per_round / pair.tokens_per_s.median
    text = (
        f"A round yields {pair.tokens_per_round:.2f} tokens and costs as much as {cost:.2f} target-only tokens "
        f"({cost * pair.verify_s / round_s:.2f} verifying, {cost * pair.draft_s / round_s:.2f} drafting)."
    )
    if target_only.gpu_layers != pair.gpu_layers:
        text += (
            f" Target-only ran at its own best placement, {target_only.gpu_layers}/{target_only.layers + 1} layers "
            f"against {pair.gpu_layers}/{pair.layers + 1} next to the draft."
        )
    return text
