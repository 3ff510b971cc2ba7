"""Target-only against speculative: interleaved trials, paired ratios, one verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from ggufspec.bench import divergence, hooked, trial
from ggufspec.bench.interleaved import Progress, in_turn
from ggufspec.bench.statistics import paired_ratios
from ggufspec.bench.summary import alone, busy_notes, machine, notes_of, plan_of, settings_of, speed, summarise
from ggufspec.decoding.options import STRICT_IMPOSSIBLE, DecoderOptions
from ggufspec.errors import GgufspecError
from ggufspec.models.profile import Pair
from ggufspec.schema.base import Run, SpeculativeRun, Spread
from ggufspec.schema.bench import BenchDocument, Divergence, HookComparison, Verdict
from ggufspec.schema.plan import PlanDocument
from ggufspec.settings import is_lossy

ENGINES = ("own", "hook")
MODES = ("target_only", "draft_only", "speculative")
AT_PAIR = "target_only_at_pair"
LLAMA_ALONE, LLAMA_HOOK = "llama_target_only", "llama_hook"
_CHECK_PROMPTS, _CHECK_TOKENS = 3, 32
_FEWEST_TRIALS = 3


@dataclass(frozen=True, slots=True)
class Experiment:
    """What to compare: ``spec`` is the speculative run, draft and all; each mode is tried ``repetitions`` times.

    ``alone`` is how the rival runs: target-only at its own best placement, since the draft's memory would hold more of
    the target. Where that differs from the pair's, target-only is measured at the pair's placement too.

    The engine ``hook`` measures llama-cpp-python's ``Llama`` beside our own loop: with our draft as its draft model
    (:mod:`ggufspec.hook`), and alone.
    """

    pair: Pair
    spec: trial.Spec
    repetitions: int
    verbose: bool = False
    alone: DecoderOptions | None = None
    plan: PlanDocument | None = None
    engine: str = "own"

    @property
    def rival(self) -> DecoderOptions:
        """How target-only runs."""
        return self.alone or self.spec.options

    @property
    def modes(self) -> tuple[str, ...]:
        """What is measured."""
        modes = MODES if self.spec.draft is not None else tuple(mode for mode in MODES if mode != "draft_only")
        modes = modes if self.rival.placement == self.spec.options.placement else (*modes, AT_PAIR)
        return (*modes, LLAMA_ALONE, LLAMA_HOOK) if self.engine == "hook" else modes


@dataclass
class Bench:
    """An experiment and what has been measured of it. :meth:`run` may be interrupted; :meth:`document` then has
    what is there.
    """

    experiment: Experiment
    results: dict[str, list[trial.Result]] = field(init=False)
    identical: bool | None = None
    identity_note: str = ""
    divergences: tuple[Divergence, ...] = ()
    hook_identical: bool | None = None
    hook_note: str = ""
    hook_divergences: tuple[Divergence, ...] = ()

    def __post_init__(self) -> None:
        self.results = {mode: [] for mode in self.experiment.modes}

    def run(self, progress: Progress) -> None:
        """Check identity in strict mode (which warms up the files' cache too), then measure.

        Raises:
            GgufspecError: a trial failed in a way that the user can mend.
            KeyboardInterrupt: Ctrl-C.
        """
        modes, hook = self.experiment.modes, self.experiment.engine == "hook"
        done = 4 if hook else 2
        total = done + self.experiment.repetitions * len(modes)
        progress(0, total, "warm-up and identity check")
        self._check_identity(lambda: progress(1, total, "warm-up and identity check"))
        if hook:
            progress(2, total, "identity check of the hook")
            self._check_hook(lambda: progress(3, total, "identity check of the hook"))
        for repetition in range(self.experiment.repetitions):
            for mode in in_turn(modes, repetition):
                progress(done, total, mode.replace("_", "-"))
                measure = hooked.measure if mode in (LLAMA_ALONE, LLAMA_HOOK) else trial.measure
                result = measure(self.spec_of(mode), verbose=self.experiment.verbose)
                self.results[mode].append(result)
                done += 1
        progress(total, total, "divergences")
        self._explain_divergences()

    def spec_of(self, mode: str) -> trial.Spec:
        """The trial of one mode."""
        spec = self.experiment.spec
        if mode in ("speculative", LLAMA_HOOK):
            return spec
        if mode in ("target_only", LLAMA_ALONE):
            return alone(replace(spec, options=self.experiment.rival))
        if mode == AT_PAIR:
            return alone(spec)
        assert spec.draft is not None
        options = replace(
            spec.options, gpu_layers=spec.options.gpu_layers_draft, split=spec.options.draft_split, n_cpu_moe=0
        )
        return alone(replace(spec, target=spec.draft, options=options))

    def _check_identity(self, halfway: Callable[[], None]) -> None:
        spec = self.experiment.spec
        short = replace(
            spec,
            options=replace(spec.options, strict=True, accept="exact"),
            prompts=spec.prompts[:_CHECK_PROMPTS],
            max_tokens=min(_CHECK_TOKENS, spec.max_tokens),
        )
        verbose = self.experiment.verbose
        try:
            with_draft = trial.measure(short, verbose=verbose)
            halfway()
            without = trial.measure(alone(short), verbose=verbose)
        except GgufspecError as error:
            if STRICT_IMPOSSIBLE not in error.message:
                raise
            self.identical, self.identity_note = None, error.message
            return
        self.identical, compared = _compared(with_draft, without)
        self.identity_note = f"{compared} in strict mode"
        if spec.options.accept != "exact":
            self.identity_note += " under the exact rule"

    def _check_hook(self, halfway: Callable[[], None]) -> None:
        """Greedy text of ``Llama`` with the hook and without, placed alike."""
        spec = self.experiment.spec
        short = replace(
            spec,
            sampling=replace(spec.sampling, temperature=0.0),
            prompts=spec.prompts[:_CHECK_PROMPTS],
            max_tokens=min(_CHECK_TOKENS, spec.max_tokens),
        )
        with_hook = hooked.measure(short, verbose=self.experiment.verbose)
        halfway()
        self.hook_identical, compared = _compared(
            with_hook, hooked.measure(alone(short), verbose=self.experiment.verbose)
        )
        self.hook_note = f"{compared}, greedy, of Llama with the hook and without"

    def _explain_divergences(self) -> None:
        if self.experiment.spec.options.accept == "exact":
            self.divergences = self._divergences("target_only", "speculative")
        if self.experiment.spec.sampling.temperature == 0:  # above, Llama's random numbers are its own
            self.hook_divergences = self._divergences(LLAMA_ALONE, LLAMA_HOOK)

    def _divergences(self, without: str, drafted: str) -> tuple[Divergence, ...]:
        """Where the answers of one mode leave those of another, explained."""
        spec = self.experiment.spec
        if not (self.results.get(without) and self.results.get(drafted)):
            return ()
        answers = zip(self.results[without][0].answers, self.results[drafted][0].answers, strict=True)
        cases = tuple(
            divergence.Case(index, spec.prompts[index], alone.tokens, drafted.tokens, spec.sampling)
            for index, (alone, drafted) in enumerate(answers)
            if any(a != b for a, b in zip(alone.tokens, drafted.tokens, strict=False))  # one may have been cut short
        )
        return divergence.explain(
            divergence.Spec(spec.target, spec.options, cases, spec.rpc), verbose=self.experiment.verbose
        )

    def document(self, *, interrupted: bool = False) -> BenchDocument:
        """Everything that has been measured so far."""
        spec = self.experiment.spec
        runs: dict[str, Run | SpeculativeRun | None] = {
            mode: summarise(results, lossy=is_lossy(spec.options.accept)) if results else None
            for mode, results in self.results.items()
        }
        paired = list(zip(self.results["speculative"], self.results["target_only"], strict=False))
        speedup = paired_ratios([speed(a) for a, _ in paired], [speed(b) for _, b in paired]) if paired else None
        return BenchDocument(
            pair=self.experiment.pair.describe(),
            machine=machine() | {"others_cpus": {m: [r.others_cpus for r in rs] for m, rs in self.results.items()}},
            plan=plan_of(self.results) | ({"planned": asdict(self.experiment.plan)} if self.experiment.plan else {}),
            settings=settings_of(spec) | {"repetitions": self.experiment.repetitions},
            runs=runs,
            speedup=speedup,
            identical_output=self.identical,
            identity_check={"note": self.identity_note},
            divergences=self.divergences,
            verdict=judge(speedup, runs["target_only"], runs["speculative"]),
            notes=(
                *notes_of(self.results["speculative"]),
                *busy_notes(result for results in self.results.values() for result in results),
            ),
            interrupted=interrupted,
            hook=self._hook() if self.experiment.engine == "hook" else None,
        )

    def _hook(self) -> HookComparison:
        """``Llama`` with the hook against ``Llama`` alone and against our own loop."""
        hook = self.results[LLAMA_HOOK]
        over_alone, over_own = (
            paired_ratios([speed(a) for a, _ in paired], [speed(b) for _, b in paired]) if paired else None
            for paired in (list(zip(hook, self.results[mode], strict=False)) for mode in (LLAMA_ALONE, "speculative"))
        )
        return HookComparison(
            speedup=over_alone,
            over_own=over_own,
            identical_output=self.hook_identical,
            identity_check={"note": self.hook_note},
            divergences=self.hook_divergences,
            text=_hook_text(over_alone, over_own),
            notes=notes_of(hook),
        )


def _compared(drafted: trial.Result, alone: trial.Result) -> tuple[bool, str]:
    """Whether the answers are the same, and what was compared."""
    pairs = list(zip(drafted.answers, alone.answers, strict=True))
    tokens = sum(len(answer.tokens) for answer in alone.answers)
    text = f"{tokens} tokens of {len(pairs)} answer{'s' * (len(pairs) > 1)} compared"
    return all(a.tokens == b.tokens for a, b in pairs), text


def _hook_text(over_alone: Spread | None, over_own: Spread | None) -> str:
    if over_alone is None or over_own is None:
        return "Llama with the hook: interrupted before every run had one trial."

    def ratio(spread: Spread) -> str:
        interval = f" (95 % interval {spread.ci95[0]:.2f} to {spread.ci95[1]:.2f})"
        return f"{spread.median:.2f}×{interval if len(spread.samples) >= _FEWEST_TRIALS else ''}"

    return f"Llama with the hook: {ratio(over_alone)} Llama alone, {ratio(over_own)} our own loop with the same draft."


def judge(speedup: Spread | None, alone: Run | None, pair: Run | None) -> Verdict:
    """Worth it or not in one sentence, and why in the next."""
    if speedup is None or alone is None or pair is None:
        return Verdict(False, "No verdict: the measurement was interrupted before both runs had one trial.")
    if not isinstance(pair, SpeculativeRun):
        return Verdict(False, "Not worth it: no draft could pay for this target, so speculation was off.")
    low, high = speedup.ci95
    ratio, interval = f"{speedup.median:.2f}× as fast as without a draft", f"95 % interval {low:.2f} to {high:.2f}"
    enough = len(speedup.samples) >= _FEWEST_TRIALS
    if not enough:
        text = f"No verdict from so few trials: {ratio}, without an interval."
    elif low > 1:
        text = f"Worth it: {ratio} ({interval})."
    elif high < 1:
        text = f"Not worth it: {ratio} ({interval})."
    else:
        text = f"Not shown to be worth it: {ratio}, within the noise ({interval})."
    if pair.lossy:
        text += " The rule is lossy: the text is not the target's own."
    why = _why(speedup.median, alone, pair)
    if low <= 1 and 2 * pair.plain_rounds > pair.rounds:
        why += f" In {pair.plain_rounds / pair.rounds:.0%} of the rounds no draft would have paid, and none was made."
    return Verdict(enough and low > 1, text, why)


def _why(ratio: float, alone: Run, pair: SpeculativeRun) -> str:
    """What a round gives and what it costs, in tokens without a draft; and where the rival had more layers."""
    cost = pair.tokens_per_round / ratio
    round_s = pair.tokens_per_round / pair.tokens_per_s.median
    text = (
        f"A round gives {pair.tokens_per_round:.2f} tokens in the time of {cost:.2f} without a draft: "
        f"{cost * pair.verify_s / round_s:.2f} to verify, {cost * pair.draft_s / round_s:.2f} to draft."
    )
    if alone.gpu_layers != pair.gpu_layers:
        text += (
            f" Target-only ran at its own best placement, {alone.gpu_layers}/{alone.layers + 1} layers "
            f"against {pair.gpu_layers}/{pair.layers + 1} beside the draft."
        )
    return text
