"""Benchmark of speculative decoding against target-only: interleaved answers, paired ratios, one verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median

from ggufspec.bench import disturbed, divergence, hooked, lengths, trial
from ggufspec.bench.answers import Answers, Budget, Way, asked
from ggufspec.bench.run_log import key_of
from ggufspec.bench.statistics import mean_ratio, paired_ratios, spread, weights_of
from ggufspec.bench.summary import (
    alone,
    by_kind,
    by_part,
    machine,
    machine_and_build,
    notes_of,
    plan_of,
    settings_of,
    summarise,
)
from ggufspec.bench.trials import Progress
from ggufspec.decoding.decoder import Statistics
from ggufspec.decoding.options import STRICT_IMPOSSIBLE, DecoderOptions
from ggufspec.errors import ChildError, GgufspecError
from ggufspec.llamacpp.options import STREAM_WIDTH
from ggufspec.models.profile import Pair
from ggufspec.schema.base import Failure, Portion, Run, SpeculativeRun, Spread
from ggufspec.schema.bench import BenchDocument, Disturbance, Divergence, HookComparison, LengthSpeedup, Verdict
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
_STRICT = 1.6  # maximum slowdown of strict mode, which pads batches of one token
_EXPLAINED = 16  # cost of explaining a divergence, in target-only times of the text: see ggufspec.bench.divergence
_FEWEST_TRIALS = 3
_FEWEST_PROMPTS = 3  # minimum to be a sample of prompts; fewer only stand for themselves
_FEWEST_PASSES = 6  # minimum over fewer prompts before an interval may end the measurement
_POSSIBLE = 0.9  # minimum cost of a round in target-only tokens: one, less noise
_PRECISE = 0.02  # half-width of an interval that needs no more trials, as a share of the speedup
_FARTHEST = 10  # maximum length to extrapolate to, as a multiple of the measured length
_ENDS = ("end", "stop", "grammar")  # stop reasons of answers that were not cut


@dataclass(frozen=True, slots=True)
class Experiment:
    """Comparison to make; ``spec`` is the speculative run.

    The verdict is for answers of the spec's ``max_tokens`` or, with ``own_lengths``, of the median length of the
    answers to the prompts, where an unfinished one counts as ``max_tokens``.

    ``repetitions`` are passes over the prompts; None for as many as the verdict needs within ``budget_s``, the seconds
    for answers. A budget may leave out prompts and, with ``cut``, shorten answers.

    ``alone`` are the options of the best target-only run, in which the draft's memory may hold more of the target. If
    its placement differs from the pair's, target-only is also measured at the pair's.

    The engine ``hook`` also measures llama-cpp-python's ``Llama``, with our draft as its draft model
    (:mod:`ggufspec.decoding.hook`) and without.
    """

    pair: Pair
    spec: trial.Spec
    repetitions: int | None = None
    verbose: bool = False
    alone: DecoderOptions | None = None
    plan: PlanDocument | None = None
    engine: str = "own"
    budget_s: float | None = None
    cut: bool = True
    own_lengths: bool = False

    @property
    def rival(self) -> DecoderOptions:
        return self.alone or self.spec.options

    @property
    def limit_s(self) -> float | None:
        """The budget; the default one if there is no number of repetitions either."""
        return self.budget_s or (None if self.repetitions else BUDGET_S)

    @property
    def ways(self) -> dict[str, Way]:
        """Variant of each mode; the pair's load also answers target-only if the options are the same."""
        spec, own = self.spec, self.spec.options
        rival = alone(replace(spec, options=self.rival))
        same = replace(self.rival, draft=own.draft, draft_max=own.draft_max)
        found = {"target_only": Way(rival, shared="target" if same == own else None)}
        if spec.draft is not None and not own.head:  # a head cannot answer alone
            draft = alone(replace(spec, target=spec.draft, options=replace(own, target=own.draft)))
            found["draft_only"] = Way(draft, shared="draft", aside=True)
        found["speculative"] = Way(spec, shared="")
        if self.rival.target != own.target:
            found[AT_PAIR] = Way(alone(spec), shared="target", aside=True)
        if self.engine == "hook":
            found |= {LLAMA_ALONE: Way(rival, hooked.__name__), LLAMA_HOOK: Way(spec, hooked.__name__)}
        return found

    @property
    def key(self) -> str:
        """Key of the settings and the machine."""
        facts = repr(self.spec), repr(self.rival), self.repetitions, self.engine, self.budget_s, self.own_lengths
        return key_of(*facts, machine())[:8]

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(self.ways)


@dataclass
class SameText:
    """Results on whether drafts change the text: a short check in strict mode, and divergences of measured answers."""

    identical: bool | None = None
    note: str = ""
    divergences: tuple[Divergence, ...] = ()


class Bench:
    """Experiment with its measurements. :meth:`run` may be interrupted; :meth:`document` returns what is there.

    A mode whose child process crashes is not retried; the others continue.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        opened: Callable[..., trial.Load] = trial.Load,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.experiment = experiment = replace(experiment, spec=_by_kind(experiment.spec))
        self.own, self.hook = SameText(), SameText()
        self._opened = opened
        self.answers = Answers(
            experiment.ways,
            "speculative",
            Budget(experiment.limit_s, clock),
            repetitions=experiment.repetitions,
            cut=experiment.cut,
            verbose=experiment.verbose,
            opened=opened,
        )
        self.results, self.crashes = self.answers.results, self.answers.crashes
        self._cut_off: list[str] = []

    def run(self, progress: Progress, note: Callable[[str], None] = lambda _: None) -> None:
        """Measure, then check identity in strict mode and explain divergences; ``note`` gets a forecast of the time.

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
        progress(1, 1, "identity check")
        self._check_own()
        if hook:
            greedy = replace(spec, sampling=replace(spec.sampling, temperature=0.0))
            self.hook = self._check(greedy, hooked.__name__)
            self.hook.note += ", greedy, of Llama with the hook and without"
        progress(1, 1, "divergences")
        if spec.options.accept == "exact":
            self.own.divergences = self._divergences("target_only", "speculative")
        if spec.sampling.temperature == 0:  # otherwise Llama draws its own random numbers
            self.hook.divergences = self._divergences(LLAMA_ALONE, LLAMA_HOOK)

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
        """Mean length of the compared answers, each pair by its shorter one."""
        found = [min(one.tokens for one in both) for both in self._lengths()]
        return round(fmean(found)) if found else 0

    def _lengths(self) -> list[tuple[Statistics, ...]]:
        """Return both answers' statistics for each prompt of the first pass."""
        first = [self.results[mode][:1] for mode in ("target_only", "speculative")]
        answers = [[one.statistics for result in results for one in result.answers] for results in first]
        return list(zip(*answers, strict=False))

    def _counted(self, mode: str, rival: str) -> disturbed.Counted:
        """Return the parts of both runs' results that count."""
        return disturbed.count(self.results[mode], self.results[rival])

    def _is_clear(self, speedup: Spread | None) -> bool:
        if speedup is None:  # one of them has crashed
            return True
        low, high = speedup.ci95
        few = self.answers.prompts < _FEWEST_PROMPTS and len(self.results["speculative"]) < _FEWEST_PASSES
        return not few and (low > 1 or high < 1 or high - low <= 2 * _PRECISE * speedup.median)

    def _check_own(self) -> None:
        spec = self.experiment.spec
        # Strict mode needs full caches for sliding windows, too, which may not fit with a long context
        longest = max(len(prompt.encode()) for prompt in spec.prompts) + _CHECK_TOKENS
        ctx_size = min(spec.options.ctx_size, max(OPTIONS["ctx_size"].default, longest))
        streams_from = max(spec.options.op_offload_min_batch, STREAM_WIDTH)
        options = replace(
            spec.options, strict=True, accept="exact", ctx_size=ctx_size, op_offload_min_batch=streams_from
        )
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

    def _check(self, spec: trial.Spec, engine: str) -> SameText:
        """Compare short answers with a draft and without, at the same placement."""
        size = self._check_size(spec)
        late = SameText(None, "the budget left no time for it")
        if size is None:
            return late
        short = replace(spec, prompts=spec.prompts[: size[0]], max_tokens=size[1], depth=0)
        found: list[trial.Result] = []
        for one in (short, alone(short)):
            with closing(self._opened(one, engine, verbose=self.experiment.verbose)) as load:
                found.append(self.answers.budget.ask(load, trial.Request()))
                if one.draft is not None and engine == trial.__name__ and load.ready.alone:
                    found.append(self.answers.budget.ask(load, trial.Request(alone="target")))
            if len(found) == 2:
                break
        if not all(result.finished for result in found):
            return late
        drafted, plain = ([answer.tokens for answer in result.answers] for result in found)
        compared = f"{sum(map(len, plain))} tokens of {counted(len(plain), 'answer')} compared"
        return SameText(drafted == plain, compared)

    def _check_size(self, spec: trial.Spec) -> tuple[int, int] | None:
        """Return how many prompts and tokens a check compares; None if the budget has no time for any."""
        most = min(_CHECK_TOKENS, spec.max_tokens)
        both = [mode for mode in ("target_only", "speculative") if self.results[mode]]
        for prompts in range(min(_CHECK_PROMPTS, len(spec.prompts)), 0, -1):
            for tokens in (most, most // 2, most // 4):
                cost_s = sum(_STRICT * self.answers.cost_s(mode, i, tokens) for mode in both for i in range(prompts))
                if tokens and cost_s < self.answers.budget.left_s:
                    return prompts, tokens
        return None

    def _divergences(self, without: str, drafted: str) -> tuple[Divergence, ...]:
        """Return where answers of two modes diverge, as many explained as the budget allows."""
        spec = self.experiment.spec
        if not (self.results.get(without) and self.results.get(drafted)):
            return ()
        answers = zip(self.results[without][0].answers, self.results[drafted][0].answers, strict=False)
        cases = [
            divergence.Case(index, spec.prompts[index], alone.tokens, drafted.tokens, spec.sampling)
            for index, (alone, drafted) in enumerate(answers)
            if any(a != b for a, b in zip(alone.tokens, drafted.tokens, strict=False))  # one may have been cut short
        ]
        left_s, explained = self.answers.budget.left_s, list[divergence.Case]()
        for case in cases:
            left_s -= self.answers.cost_s("target_only", case.index, _EXPLAINED * (case.position + 1))
            if left_s > 0:
                explained.append(case)
        if late := len(cases) - len(explained):
            self._cut_off.append(
                f"{counted(late, 'answer')} with a draft {'differs' if late == 1 else 'differ'} from the one without, "
                "as rounding can make them at near ties; the budget left no time to look for the reason"
            )
        return divergence.explain(
            divergence.Spec(spec.target, spec.options, tuple(explained), spec.rpc, spec.depth),
            verbose=self.experiment.verbose,
        )

    @property
    def counting(self) -> dict[str, list[trial.Result]]:
        """Results by mode, with only the parts that count."""
        return self._chosen(self._counted("speculative", "target_only"))

    @property
    def is_quiet(self) -> bool:
        """True if the parts that count were measured on a quiet machine."""
        return self._counted("speculative", "target_only").is_quiet

    def _chosen(self, counted: disturbed.Counted) -> dict[str, list[trial.Result]]:
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
        means = {mode: lengths.mean_time(lengths.times(one), self._weights) for mode, one in compared.items()}
        times = {mode: one for mode, one in means.items() if one is not None}
        return BenchDocument(
            pair=self.experiment.pair.describe(),
            machine=machine_and_build(next((r.system_info for rs in self.results.values() for r in rs), ""))
            | {"others_cpus": {m: [r.others_cpus for r in rs] for m, rs in self.results.items()}},
            plan=plan_of(self.results) | ({"planned": asdict(self.experiment.plan)} if self.experiment.plan else {}),
            settings=settings_of(spec) | self._extent(),
            runs=runs,
            speedup=speedup,
            identical_output=self.own.identical,
            identity_check={"note": self.own.note},
            divergences=self.own.divergences,
            verdict=judge(
                speedup,
                runs["target_only"],
                runs["speculative"],
                tokens=tokens,
                crashed=bool(self.crashes),
                streams=spec.options.op_offload_min_batch < STREAM_WIDTH,
            ),
            notes=tuple(filter(None, (*notes_of(self.results["speculative"]), *self._cut_off, counted.note))),
            interrupted=interrupted,
            hook=self._hook() if self.experiment.engine == "hook" else None,
            by_kind=tuple(map(self._of_kind, by_kind(spec.kinds, counted.theirs, counted.ours))),
            by_part=by_part(self.results["target_only"], self.results["speculative"]),
            failures={mode: Failure.of(error) for mode, error in self.crashes.items()},
            disturbance=Disturbance(
                counted.busy_share, counted.others_cpus, counted.pairs, counted.counting, counted.part
            ),
            answer_tokens=tokens,
            measured_tokens=measured,
            answer_times=times,
            by_length=tuple(
                LengthSpeedup(
                    one,
                    lengths.seconds(times["target_only"], one),
                    lengths.seconds(times["speculative"], one),
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
            "spent_s": self.answers.budget.spent_s if self.experiment.limit_s else None,
        }

    def _summary(self, mode: str, results: list[trial.Result]) -> Run | SpeculativeRun:
        """Return a mode's row, from the results that count.

        From three prompts on, tokens/s and tokens per round are weighted means over prompts, like the speedup.
        """
        row = summarise(results, lossy=is_lossy(self.experiment.spec.options.accept))
        row = replace(row, tokens=sum(answer.statistics.tokens for answer in self.results[mode][0].answers))
        rows = [
            [s for one in results if i < len(one.answers) for s in [one.answers[i].statistics] if s.decoded]
            for i in range(asked(results))
        ]
        if sum(map(bool, rows)) < _FEWEST_PROMPTS:
            return row
        row = replace(row, tokens_per_s=self._mean([[(_token_s(s), 1.0) for s in found] for found in rows]))
        if not isinstance(row, SpeculativeRun):
            return row
        tokens_per_round = self._mean([[(s.rounds / s.decoded, 1.0) for s in found] for found in rows]).median
        return replace(row, tokens_per_round=tokens_per_round)

    def _speedup(self, mode: str, rival: str, tokens: int = 0) -> Spread | None:
        """Return a mode's speedup over a rival for answers of ``tokens``, the verdict's length by default.

        It is a mean over prompts in which all kinds count equally; with one or two prompts, over passes.
        """
        tokens = tokens or self.answer_tokens
        rows = self._answer_pairs(mode, rival, tokens)
        if sum(map(bool, rows)) >= _FEWEST_PROMPTS:
            found = self._mean([list(row.values()) for row in rows])
        else:
            whole = set.intersection(*map(set, rows)) if rows else set()
            sums = [[sum(one) for one in zip(*(row[turn] for row in rows), strict=True)] for turn in sorted(whole)]
            if not sums:
                return None
            found = paired_ratios([theirs for _, theirs in sums], [ours for ours, _ in sums])
        return lengths.widened(found, tokens, self.measured_tokens)

    def _answer_pairs(self, mode: str, rival: str, tokens: int) -> list[dict[int, tuple[float, float]]]:
        """Return for each prompt, by pass, both modes' seconds for an answer of so many tokens, if both count."""
        counted = self._counted(mode, rival)
        passes = list(zip(lengths.times(counted.ours), lengths.times(counted.theirs), strict=False))
        rows: list[dict[int, tuple[float, float]]] = [
            {} for _ in range(min(asked(counted.ours), asked(counted.theirs)))
        ]
        for turn, both in enumerate(passes):
            for row, (ours, theirs) in zip(rows, zip(*both, strict=False), strict=False):
                if ours and theirs:
                    row[turn] = lengths.seconds(ours, tokens), lengths.seconds(theirs, tokens)
        return rows

    def _of_kind(self, portion: Portion) -> Portion:
        """Return the portion with the speedup of its kind of prompts at the verdict's answer length."""
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
        """Compare ``Llama`` with the hook to ``Llama`` without and to our own loop."""
        over_alone, over_own = self._speedup(LLAMA_HOOK, LLAMA_ALONE), self._speedup(LLAMA_HOOK, "speculative")
        return HookComparison(
            speedup=over_alone,
            over_own=over_own,
            identical_output=self.hook.identical,
            identity_check={"note": self.hook.note},
            divergences=self.hook.divergences,
            text=_hook_text(over_alone, over_own),
            notes=notes_of(self.results[LLAMA_HOOK]),
        )


def _by_kind(spec: trial.Spec) -> trial.Spec:
    """Reorder the prompts so that the first ones are of as many kinds as possible and from all over the list."""
    ranks = [(spec.kinds[:i].count(kind), i % 2, i) for i, kind in enumerate(spec.kinds)]
    order = [i for *_, i in sorted(ranks)]
    if not order:
        return spec
    return replace(spec, prompts=tuple(spec.prompts[i] for i in order), kinds=tuple(spec.kinds[i] for i in order))


def _token_s(statistics: Statistics) -> float:
    return max(statistics.decode_s, 1e-9) / statistics.decoded


def _has_ended(both: tuple[Statistics, ...]) -> bool:
    return any(one.stop_reason in _ENDS for one in both)


def _hook_text(over_alone: Spread | None, over_own: Spread | None) -> str:
    if over_alone is None or over_own is None:
        return "Llama with the hook: interrupted before every run had one trial."

    def ratio(spread: Spread) -> str:
        interval = f" (95% interval {spread.ci95[0]:.2f} to {spread.ci95[1]:.2f})"
        return f"{spread.median:.2f}×{interval if len(spread.samples) >= _FEWEST_TRIALS else ''}"

    return f"Llama with the hook: {ratio(over_alone)} Llama alone, {ratio(over_own)} our own loop with the same draft."


def judge(
    speedup: Spread | None,
    alone: Run | None,
    pair: Run | None,
    *,
    tokens: int,
    crashed: bool = False,
    streams: bool = False,
) -> Verdict:
    """Judge in one sentence whether the draft is worth it for answers of ``tokens``, with the reason in another.

    A round costs at least one target-only token, so a speedup above the tokens per round cannot come from the draft,
    unless target-only has another placement or the GPU ``streams`` (copies) CPU weights for larger batches only.
    """
    if speedup is None or alone is None or pair is None:
        why = (
            "not every run could be measured"
            if crashed
            else "the measurement was interrupted before both runs had one trial"
        )
        return Verdict(False, f"No verdict: {why}.")
    if not isinstance(pair, SpeculativeRun):
        return Verdict(False, "Not worth it: no draft could pay for this target, so speculation was off.")
    low, high = speedup.ci95
    gained, comparable = pair.tokens_per_round, not streams and alone.gpu_layers == pair.gpu_layers
    faster = pair.tokens_per_s.median / max(alone.tokens_per_s.median, 1e-9)
    least = low * min(1.0, gained / faster) if comparable else low  # no draft gains more than the tokens per round
    if comparable and gained < _POSSIBLE * faster:
        why = (
            f"The draft seemed to decode {faster:.2f} times as fast, which is more than the {gained:.2f} tokens that a "
            "round yields. Measure again while other programs are idle, or longer: --budget 6m."
        )
        return Verdict(False, "No verdict: the machine's speed changed during the measurement.", why)
    ratio, interval = f"{speedup.median:.2f}×", f"95% interval {low:.2f} to {high:.2f}"
    length = f"for answers of {counted(tokens, 'token')}"
    as_fast = f"{ratio} as fast as without a draft {length}"
    enough = len(speedup.samples) >= _FEWEST_TRIALS
    if not enough:
        text = f"No verdict from so few trials: {as_fast}, without an interval."
    elif least > 1:
        text = f"Worth it: {as_fast} ({interval})."
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
    if pair.lossy:
        text += " The rule is lossy: the text is not the target's own."
    why = _why(faster, alone, pair)
    if least <= 1 and 2 * pair.plain_rounds > pair.rounds:
        why += f" In {pair.plain_rounds / pair.rounds:.0%} of the rounds no draft would have paid, and none was made."
    return Verdict(enough and least > 1, text, why)


def _why(faster: float, alone: Run, pair: SpeculativeRun) -> str:
    """Return a round's yield and its cost in target-only tokens, and both runs' GPU layers if they differ."""
    cost = pair.tokens_per_round / faster
    cost = 1.0 if _POSSIBLE <= cost < 1 else cost
    round_s = pair.tokens_per_round / pair.tokens_per_s.median
    text = (
        f"A round yields {pair.tokens_per_round:.2f} tokens and costs as much as {cost:.2f} plain ones "
        f"({cost * pair.verify_s / round_s:.2f} verifying, {cost * pair.draft_s / round_s:.2f} drafting)."
    )
    if alone.gpu_layers != pair.gpu_layers:
        text += (
            f" Target-only ran at its own best placement, {alone.gpu_layers}/{alone.layers + 1} layers "
            f"against {pair.gpu_layers}/{pair.layers + 1} beside the draft."
        )
    return text
