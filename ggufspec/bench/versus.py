"""Target-only against speculative: interleaved trials, paired ratios, one verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from ggufspec.bench import divergence, hooked, trial
from ggufspec.bench.interleaved import Progress, in_turn
from ggufspec.bench.statistics import paired_ratios
from ggufspec.bench.summary import (
    alone,
    busy_notes,
    machine_and_build,
    notes_of,
    plan_of,
    settings_of,
    speed,
    summarise,
)
from ggufspec.decoding.options import STRICT_IMPOSSIBLE, DecoderOptions
from ggufspec.display import counted
from ggufspec.errors import GgufspecError, WorkerError
from ggufspec.models.profile import Pair
from ggufspec.schema.base import Failure, Run, SpeculativeRun, Spread
from ggufspec.schema.bench import BenchDocument, Divergence, HookComparison, Verdict
from ggufspec.schema.plan import PlanDocument
from ggufspec.settings import OPTIONS, is_lossy

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
        writes = self.spec.draft is not None and not self.spec.options.head  # a head writes nothing of its own
        modes = MODES if writes else tuple(mode for mode in MODES if mode != "draft_only")
        modes = modes if self.rival.placement == self.spec.options.placement else (*modes, AT_PAIR)
        return (*modes, LLAMA_ALONE, LLAMA_HOOK) if self.engine == "hook" else modes


@dataclass
class SameText:
    """Whether drafts change the text: by a short check, and where measured answers diverge."""

    identical: bool | None = None
    note: str = ""
    divergences: tuple[Divergence, ...] = ()


@dataclass
class Bench:
    """An experiment and what has been measured of it. :meth:`run` may be interrupted; :meth:`document` then has
    what is there. A mode whose child process crashes, or whose answers have no speed, is not tried again; the others go
    on.
    """

    experiment: Experiment
    results: dict[str, list[trial.Result]] = field(init=False)
    crashes: dict[str, GgufspecError] = field(default_factory=dict)
    own: SameText = field(default_factory=SameText)
    hook: SameText = field(default_factory=SameText)

    def __post_init__(self) -> None:
        self.results = {mode: [] for mode in self.experiment.modes}

    def run(self, progress: Progress) -> None:
        """Check identity in strict mode (which warms up the files' cache too), then measure.

        Raises:
            GgufspecError: a trial failed in a way that the user can mend, or every mode crashed.
            KeyboardInterrupt: Ctrl-C.
        """
        modes, spec, hook = self.experiment.modes, self.experiment.spec, self.experiment.engine == "hook"
        done = 4 if hook else 2
        total = done + self.experiment.repetitions * len(modes)
        self._check_own(lambda half: progress(half, total, "warm-up and identity check"))
        if hook:
            greedy = replace(spec, sampling=replace(spec.sampling, temperature=0.0))
            self.hook = self._check(
                hooked.measure, greedy, lambda half: progress(2 + half, total, "identity check of the hook")
            )
            self.hook.note += ", greedy, of Llama with the hook and without"
        for repetition in range(self.experiment.repetitions):
            for mode in in_turn(modes, repetition):
                progress(done, total, mode.replace("_", "-"))
                self._try(mode)
                done += 1
        if not any(self.results.values()) and self.crashes:
            raise next(iter(self.crashes.values()))
        progress(total, total, "divergences")
        if spec.options.accept == "exact":
            self.own.divergences = self._divergences("target_only", "speculative")
        if spec.sampling.temperature == 0:  # above, Llama's random numbers are its own
            self.hook.divergences = self._divergences(LLAMA_ALONE, LLAMA_HOOK)

    def _try(self, mode: str) -> None:
        """One trial of a mode, unless one of them has crashed."""
        if mode in self.crashes:
            return
        measure = hooked.measure if mode in (LLAMA_ALONE, LLAMA_HOOK) else trial.measure
        try:
            self.results[mode].append(trial.timed(measure(self.spec_of(mode), verbose=self.experiment.verbose)))
        except (WorkerError, trial.NoSpeedError) as error:
            self.crashes[mode] = error

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
            spec.options,
            gpu_layers=spec.options.gpu_layers_draft,
            split=spec.options.draft_split,
            n_cpu_moe=0,
            n_cpu_ffn=0,
            override_tensor=(),
        )
        return alone(replace(spec, target=spec.draft, options=options))

    def _check_own(self, progress: Callable[[int], None]) -> None:
        """Text with a draft and without, in strict mode, placed alike."""
        spec = self.experiment.spec
        # Strict mode keeps whole caches where a model has windows, for which a long context may leave no room
        longest = max(len(prompt.encode()) for prompt in spec.prompts) + _CHECK_TOKENS
        ctx_size = min(spec.options.ctx_size, max(OPTIONS["ctx_size"].default, longest))
        strict = replace(spec, options=replace(spec.options, strict=True, accept="exact", ctx_size=ctx_size))
        try:
            self.own = self._check(trial.measure, strict, progress)
        except WorkerError as error:
            self.own = SameText(None, error.message)
            return
        except GgufspecError as error:
            if STRICT_IMPOSSIBLE not in error.message:
                raise
            self.own = SameText(None, error.message)
            return
        self.own.note += " in strict mode" + ("" if spec.options.accept == "exact" else " under the exact rule")

    def _check(
        self, measure: Callable[..., trial.Result], spec: trial.Spec, progress: Callable[[int], None]
    ) -> SameText:
        """Whether short answers are the same with a draft and without, placed alike."""
        most = min(_CHECK_TOKENS, spec.max_tokens)
        short = replace(spec, prompts=spec.prompts[:_CHECK_PROMPTS], max_tokens=most, depth=0)
        results = []
        for half, one in enumerate((short, alone(short))):
            progress(half)
            results.append(measure(one, verbose=self.experiment.verbose))
        drafted, plain = ([answer.tokens for answer in result.answers] for result in results)
        compared = f"{sum(map(len, plain))} tokens of {counted(len(plain), 'answer')} compared"
        return SameText(drafted == plain, compared)

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
            divergence.Spec(spec.target, spec.options, cases, spec.rpc, spec.depth), verbose=self.experiment.verbose
        )

    def document(self, *, interrupted: bool = False) -> BenchDocument:
        """Everything that has been measured so far."""
        spec = self.experiment.spec
        runs: dict[str, Run | SpeculativeRun | None] = {
            mode: summarise(results, lossy=is_lossy(spec.options.accept)) if results else None
            for mode, results in self.results.items()
        }
        speedup = self._speedup("speculative", "target_only")
        return BenchDocument(
            pair=self.experiment.pair.describe(),
            machine=machine_and_build(next((r.system_info for rs in self.results.values() for r in rs), ""))
            | {"others_cpus": {m: [r.others_cpus for r in rs] for m, rs in self.results.items()}},
            plan=plan_of(self.results) | ({"planned": asdict(self.experiment.plan)} if self.experiment.plan else {}),
            settings=settings_of(spec) | {"repetitions": self.experiment.repetitions},
            runs=runs,
            speedup=speedup,
            identical_output=self.own.identical,
            identity_check={"note": self.own.note},
            divergences=self.own.divergences,
            verdict=judge(speedup, runs["target_only"], runs["speculative"], crashed=bool(self.crashes)),
            notes=(
                *notes_of(self.results["speculative"]),
                *busy_notes(result for results in self.results.values() for result in results),
            ),
            interrupted=interrupted,
            hook=self._hook() if self.experiment.engine == "hook" else None,
            failures={mode: Failure(error.message, error.hint) for mode, error in self.crashes.items()},
        )

    def _speedup(self, mode: str, rival: str) -> Spread | None:
        paired = list(zip(self.results[mode], self.results[rival], strict=False))
        return paired_ratios([speed(a) for a, _ in paired], [speed(b) for _, b in paired]) if paired else None

    def _hook(self) -> HookComparison:
        """``Llama`` with the hook against ``Llama`` alone and against our own loop."""
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


def _hook_text(over_alone: Spread | None, over_own: Spread | None) -> str:
    if over_alone is None or over_own is None:
        return "Llama with the hook: interrupted before every run had one trial."

    def ratio(spread: Spread) -> str:
        interval = f" (95 % interval {spread.ci95[0]:.2f} to {spread.ci95[1]:.2f})"
        return f"{spread.median:.2f}×{interval if len(spread.samples) >= _FEWEST_TRIALS else ''}"

    return f"Llama with the hook: {ratio(over_alone)} Llama alone, {ratio(over_own)} our own loop with the same draft."


def judge(speedup: Spread | None, alone: Run | None, pair: Run | None, *, crashed: bool = False) -> Verdict:
    """Worth it or not in one sentence, and why in the next."""
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
