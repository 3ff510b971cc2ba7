"""Interleaved answers to the same prompts from several variants (e.g. with and without a draft), within a budget."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ggufspec.bench import trial
from ggufspec.bench.trials import Progress, in_turn
from ggufspec.decoding.decoder import Statistics
from ggufspec.errors import ChildError, UsageError
from ggufspec.hardware import host
from ggufspec.schema.text import as_budget, counted, duration

FEWEST = 3  # minimum number of prompts for a verdict; with fewer prompts, minimum number of passes over them
_RESERVE = 0.15  # share of the budget reserved for the checks after measuring
# (prompts, tokens): minimum answer length in tokens while more than this many prompts are left. Prompts differ more
# from each other than the parts of one answer do, so many short answers are more informative than a few long ones. But
# an answer's beginning is slower than the rest, so answers must not be too short.
_FEWEST_TOKENS = ((4, 64), (1, 32))
_WARM_UP_TOKENS = 32  # length of the pair's warm-up, in which the policy times drafts and learns how much they gain
_WARM_UPS = 8  # time for a verdict ÷ time of a warm-up: three prompts with and without the draft, plus a check
_LEAST_TOKENS = 8  # minimum answer length, even if only one prompt is left
_ASIDE_PROMPTS, _INFORMATIONAL_TOKENS = 3, 32  # maximum prompts, and tokens per answer, for an informational variant


@dataclass(frozen=True, slots=True)
class Variant:
    """Variant to measure; ``spec`` and the module ``engine`` define its load if it cannot share the pair's.

    ``shared`` is the value of ``alone`` with which the pair's load answers for this variant; None if it cannot.
    ``informational`` variants are measured once, with a few short answers.
    """

    spec: trial.TrialJob
    engine: str = trial.__name__
    shared: str | None = None
    informational: bool = False


_Place = tuple[str, trial.TrialJob]  # identifies a load: the job's module and its spec


class _SpentError(Exception):
    """The budget is spent."""


@dataclass
class AnswerBudget:
    """Time budget for answers, excluding model loads; it estimates the next answer's time from earlier answers.

    ``overhead`` is the wall time of the last alternating answers divided by the time in their statistics; it exceeds 1
    because tokens are decoded again where the two texts differ. A ``limit_s`` of None means no limit.
    """

    limit_s: float | None
    clock: Callable[[], float]
    spent_s: float = 0.0
    overhead: float = 1.0
    _answers: dict[str, list[Statistics]] = field(default_factory=lambda: defaultdict(list))
    _warm_ups: dict[str, list[Statistics]] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds left in the budget."""
        return math.inf if self.limit_s is None else self.limit_s - self.spent_s

    @property
    def measuring_s(self) -> float:
        """Seconds left for measuring, without the reserve for the checks that follow."""
        return math.inf if self.limit_s is None else (1 - _RESERVE) * self.limit_s - self.spent_s

    def ask(self, load: trial.ModelProcess, request: trial.TrialRequest) -> trial.TrialResult:
        """Send a request to a load and charge its time to the budget; stop the request early if the budget runs out."""
        if self.limit_s is None:
            return load.ask(request)
        stop = threading.Timer(max(self.left_s, 0.0), load.stop)
        began = self.clock()
        stop.start()
        try:
            return load.ask(request)
        finally:
            stop.cancel()
            self.spent_s += self.clock() - began

    def learn(self, name: str, result: trial.TrialResult, *, warm_up: bool = False) -> None:
        """Record how fast a variant answered; its warm-up is used only until it has answered a prompt."""
        found = [answer.statistics for answer in result.answers]
        if warm_up:
            self._warm_ups[name] = found
        else:
            self._answers[name] += found

    def read_s(self, name: str) -> float:
        """Return a variant's seconds per prompt token; if it has not been measured, the slowest measured variant's."""
        return self._known(name, lambda s: (s.prompt_s, s.prompt_read))

    def write_s(self, name: str) -> float:
        """Return a variant's seconds per generated token, with the same fallback as :meth:`read_s`."""
        return self._known(name, lambda s: (s.decode_s, s.decoded))

    def _known(self, name: str, part: Callable[[Statistics], tuple[float, int]]) -> float:
        def of(one: str) -> float:
            parts = [part(statistics) for statistics in self._answers[one] or self._warm_ups[one]]
            return sum(seconds for seconds, _ in parts) / max(sum(tokens for _, tokens in parts), 1)

        return (of(name) if name in self._warm_ups else 0.0) or max(map(of, self._warm_ups), default=0.0)


class InterleavedAnswers:
    """Measurement of several variants' answers to the same prompts, interleaved prompt by prompt.

    Variants with the same placement share one load: a child process that loads the pair once. If the target's cache can
    be rewound to any length, speculative and target-only answers alternate in it, segment by segment. Variants with
    another placement need their own load. Loads stay open together if all run on the CPU and fit in RAM; otherwise they
    take turns, one pass over the prompts each. A variant whose child dies is not retried; variants that shared its load
    get their own.

    A budget limits the first pass: each answer gets a share of the time left, converted to tokens at the speed of
    earlier answers. If that share allows too few tokens, the last prompts are dropped. A shortened answer is drafted as
    if it could reach the full length.

    ``variants`` maps names to variants, which may share the load of the variant ``first``. ``repetitions`` is the
    number of passes over the prompts; None for as many as needed. ``cut`` allows answers below ``max_tokens``.

    Attributes:
        results: for each variant, one result per pass, with the answers to the spec's first prompts.
        crashes: errors of the variants that crashed.
        prompts: number of prompts in use.
        lengths: maximum answer length for each prompt, in tokens.
        enough_s: smallest budget that allows a verdict, estimated from the warm-ups' speeds; 0 if unknown.
    """

    def __init__(
        self,
        variants: Mapping[str, Variant],
        first: str,
        budget: AnswerBudget,
        *,
        repetitions: int | None,
        cut: bool = True,
        verbose: bool = False,
        opened: Callable[..., trial.ModelProcess] = trial.ModelProcess,
    ) -> None:
        self.results: dict[str, list[trial.TrialResult]] = {name: [] for name in variants}
        self.crashes: dict[str, ChildError] = {}
        self.lengths: list[int] = []
        self.enough_s = 0.0
        self.budget, self.repetitions = budget, repetitions
        self._variants, self._first, self._spec = variants, first, variants[first].spec
        self.prompts = len(self._spec.prompts)
        self._cut = cut and budget.limit_s is not None
        self._verbose, self._opened = verbose, opened
        self._with_own_load: set[str] = {name for name, variant in variants.items() if variant.shared is None}
        self._open: dict[_Place, trial.ModelProcess] = {}
        self._may_alternate = True
        self._side_by_side = True
        self._prompt_tokens: tuple[int, ...] = ()

    @property
    def _working(self) -> list[str]:
        """Variants that did not crash, informational ones last."""
        names = [name for name in self._variants if name not in self.crashes]
        return sorted(names, key=lambda name: self._variants[name].informational)

    @property
    def _compared(self) -> list[str]:
        return [name for name in self._working if not self._variants[name].informational]

    # ---- time

    def cost_s(self, name: str, prompt: int, tokens: int) -> float:
        """Return the seconds that an answer is expected to take."""
        read = self._prompt_tokens[prompt] - self._spec.depth
        return self.budget.overhead * (read * self.budget.read_s(name) + tokens * self.budget.write_s(name))

    def _informational_s(self, prompts: int) -> float:
        """Return the expected seconds for the informational answers still to be measured."""
        return sum(
            self.cost_s(name, i, _INFORMATIONAL_TOKENS)
            for name in self._working
            if self._variants[name].informational
            for i in range(asked(self.results[name]), min(prompts, _ASIDE_PROMPTS))
        )

    def _share(self, prompts: int) -> int:
        """Return the next answer's length in tokens if all remaining prompts share the time left equally."""
        done = len(self.lengths)
        left = self.budget.measuring_s - self._informational_s(prompts)
        for name in self._compared:
            left -= sum(self.cost_s(name, i, self.lengths[i]) for i in range(asked(self.results[name]), done))
            left -= sum(self.cost_s(name, i, 0) for i in range(done, prompts))
        each = self.budget.overhead * sum(map(self.budget.write_s, self._compared))
        return int(left / max(each * (prompts - done), 1e-9))

    def _fit(self) -> None:
        """Drop prompts that do not fit in the budget; raise UsageError if not even one fits."""
        most = self._spec.max_tokens
        least = min(_LEAST_TOKENS, most) if self._cut else most
        for fewest, wanted in _FEWEST_TOKENS if self._cut else ((1, most),):
            while self.prompts > fewest and self._share(self.prompts) < min(wanted, most):
                self.prompts -= 1
        if self._share(self.prompts) < least:
            raise UsageError(
                f"a budget of {duration(self.budget.left_s + self.budget.spent_s)} is too short for one answer of "
                f"{counted(least, 'token')} with and without the draft",
                self._enough(),
            )

    @property
    def _is_few(self) -> bool:
        """True if there are too few prompts for a sample; each prompt is then answered several times instead."""
        return len(self._spec.prompts) < FEWEST

    def _needed_s(self) -> float:
        most, prompts = self._spec.max_tokens, min(len(self._spec.prompts), FEWEST)
        tokens = min(_FEWEST_TOKENS[-1][1], most) if self._cut and not self._is_few else most
        answers_s = sum(self.cost_s(name, i, tokens) for name in self._compared for i in range(prompts))
        passes_s = (FEWEST if self._is_few else 1) * answers_s
        return (self.budget.spent_s + passes_s + self._informational_s(prompts)) / (1 - _RESERVE) + 1

    def _enough(self) -> str:
        shorter = ", or fewer tokens with -n" if self._is_few or not self._cut else ""
        return f"--budget {as_budget(self.enough_s)}{shorter}"

    def _shortage(self) -> str:
        """Return a sentence with the budget that a verdict needs; empty if the present budget is enough."""
        limit_s = self.budget.limit_s
        if limit_s is None or limit_s >= self.enough_s or (self._is_few and self.repetitions in range(1, FEWEST)):
            return ""
        answers = f"{FEWEST} answers to each prompt" if self._is_few else f"answers to {FEWEST} prompts"
        short = f"{duration(limit_s)} is too short for a verdict"
        return f"{short}, which needs {answers} with and without the draft: {self._enough()}"

    def _length(self) -> int:
        """Return the length of the answers to the next new prompt."""
        most = self._spec.max_tokens
        return min(most, max(_LEAST_TOKENS, self._share(self.prompts))) if self._cut else most

    def _forecast(self) -> str:
        most, tokens, limit_s = self._spec.max_tokens, self._length(), self.budget.limit_s
        about = f"{counted(self.prompts, 'prompt')} × {'about ' * (tokens < most)}{counted(tokens, 'token')}"
        once = sum(self.cost_s(name, i, tokens) for name in self._compared for i in range(self.prompts))
        all_s = (self.repetitions or 1) * (once + self._informational_s(self.prompts))
        if limit_s is None:
            return f"{about}, {counted(self.repetitions or 1, 'time')}: about {duration(all_s)}"
        if tokens < most or all_s > self.budget.measuring_s:
            return f"{about}: about {duration(limit_s)}"
        return f"{about}: {duration(self.budget.spent_s + all_s)} to {duration(limit_s)}, until the verdict is clear"

    # ---- loads

    def _place(self, name: str) -> _Place:
        variant = self._variants[name]
        return (variant.engine, variant.spec if name in self._with_own_load else self._spec)

    def _request(self, name: str, prompt: int = 0, length: int = 0, *, warm_up: bool = False) -> trial.TrialRequest:
        alone = "" if name in self._with_own_load else self._variants[name].shared or ""
        if warm_up and name == self._first:
            prompt, length = self._prompt_tokens.index(min(self._prompt_tokens)), _WARM_UP_TOKENS
        if name != self._first or length >= self._spec.max_tokens:
            return trial.TrialRequest((prompt,), length, alone, warm_up)
        return trial.TrialRequest((prompt,), self._spec.max_tokens, alone, warm_up, most=length)

    def _load(self, name: str) -> trial.ModelProcess | None:
        """Return the load for a variant, warmed up; None if the variant crashed."""
        place = self._place(name)
        if place not in self._open:
            if not self._side_by_side:
                self._close()
            try:
                load = self._open[place] = self._opened(place[1], place[0], verbose=self._verbose)
            except ChildError as error:
                self._crashed(self._first if place == self._place(self._first) else name, error)
                return None if name in self.crashes else self._load(name)
            self._prompt_tokens = self._prompt_tokens or load.ready.prompt_tokens
            if not load.ready.alone:
                self._with_own_load |= {one for one, variant in self._variants.items() if variant.shared == "target"}
            for one in [one for one in self._working if self._place(one) == place]:
                try:
                    self._warm_up(one, load)
                except ChildError as error:
                    self._crashed(one, error)
                    break
        return None if name in self.crashes else self._open.get(self._place(name)) or self._load(name)

    def _warm_up(self, name: str, load: trial.ModelProcess) -> None:
        request = self._request(name, warm_up=True)
        # The text before the prompts is processed now; this does not count towards the budget
        reply = load.ask(request) if self._spec.depth else self.budget.ask(load, request)
        if not reply.finished:
            raise _SpentError
        self.budget.learn(name, reply, warm_up=True)

    def _crashed(self, name: str, error: ChildError) -> None:
        """Give up on a variant and close its load; variants that shared the load get their own from now on."""
        self.crashes[name] = error
        place = self._place(name)
        if load := self._open.pop(place, None):
            load.close()
        if place[1] is self._spec:
            self._with_own_load |= set(self._variants)

    def _close(self) -> None:
        for load in self._open.values():
            load.close()
        self._open.clear()

    def _groups(self) -> list[list[str]]:
        """Return the variants grouped by load, open loads first; a single group if all loads can be open at once."""
        by_place: dict[_Place, list[str]] = {}
        for name in self._working:
            by_place.setdefault(self._place(name), []).append(name)
        self._side_by_side = len(by_place) < 2 or _fit_side_by_side([spec for _, spec in by_place])
        if self._side_by_side:
            return [self._working]
        return [by_place[place] for place in sorted(by_place, key=lambda place: place not in self._open)]

    # ---- measuring

    def measure(self, progress: Progress, note: Callable[[str], None], enough: Callable[[], bool]) -> None:
        """Pass a time estimate to ``note``, then measure, calling ``progress`` before each answer.

        Unless the number of repetitions is fixed, ``enough`` is called after each pass, and True ends the measurement.

        Raises:
            UsageError: the budget is too short for one answer.
            GgufspecError: a load failed for a reason that the user can fix.
            KeyboardInterrupt: Ctrl-C.
        """
        progress(0, 0, "loading and warming up")
        try:
            self._load(self._first)
            self._groups()
            for name in self._compared if self._side_by_side else ():
                self._load(name)
            if not self._prompt_tokens and self._compared:
                self._load(self._compared[0])
            if not self._prompt_tokens:
                return
            if self.budget.limit_s is not None:
                self.enough_s = self._needed_s()
                self._fit()
            note(self._forecast())
            if shortage := self._shortage():
                note(shortage)
            passes = 0
            while self._pass(passes, progress):
                passes += 1
                if passes == self.repetitions or (self.repetitions is None and enough()):
                    break
        except _SpentError:
            if not any(self.results.values()):
                limit_s = self.budget.spent_s + self.budget.left_s
                longer = as_budget(max(self.enough_s, _WARM_UPS * limit_s))
                message = f"a budget of {duration(limit_s)} is too short for one answer"
                raise UsageError(message, f"--budget {longer}") from None
        finally:
            self._close()

    def _pass(self, repetition: int, progress: Progress) -> bool:
        """Answer every prompt with every variant; return False if the budget allowed only some prompts."""
        count = self._affordable() if repetition else self.prompts
        total = self.prompts * len(self._compared) * (self.repetitions or repetition + 1)
        for group in self._groups():
            main = [name for name in group if not self._variants[name].informational]
            informational = [name for name in group if self._variants[name].informational]
            for prompt in range(count):
                few = prompt < _ASIDE_PROMPTS and (repetition == 0 or self.repetitions is not None)
                turns = [*in_turn(self._turns(main), prompt + repetition), *([name] for name in informational if few)]
                for names in turns:
                    done = sum(len(one.answers) for variant in self._compared for one in self.results[variant])
                    progress(done, max(total, done), " and ".join(names).replace("_", "-"))
                    self._answer(names, prompt, repetition)
        return count == self.prompts

    def _turns(self, names: Sequence[str]) -> list[list[str]]:
        """Return the turns, one per variant; two alternating variants share a turn, speculative first."""
        shared = {self._variants[name].shared: name for name in names if self._place(name) == self._place(self._first)}
        load = self._load(self._first) if self._may_alternate and {"", "target"} <= shared.keys() else None
        both = [shared[""], shared["target"]] if load and load.ready.alternates else []
        return [*filter(None, [both]), *([name] for name in names if name not in both)]

    def _affordable(self) -> int:
        """Return how many prompts of another pass fit in the budget."""
        left = self.budget.measuring_s
        for prompt in range(self.prompts):
            left -= sum(self.cost_s(name, prompt, self.lengths[prompt]) for name in self._compared)
            if left < 0:
                return prompt
        return self.prompts

    def _answer(self, names: Sequence[str], prompt: int, repetition: int) -> None:
        """Measure one variant's answer, or two variants' alternating answers; skip a crashed variant."""
        name = names[0]
        if name in self.crashes or (load := self._load(name)) is None:
            return
        if prompt == len(self.lengths):
            self.lengths.append(self._length())
        length = (
            min(self.lengths[prompt], _INFORMATIONAL_TOKENS)
            if self._variants[name].informational
            else self.lengths[prompt]
        )
        request = self._request(name, prompt, length)
        if len(names) == 2:
            request = replace(request, alternate=("pair", "target")[(prompt + repetition) % 2])
        before_s = self.budget.spent_s
        try:
            reply = self.budget.ask(load, request)
        except ChildError as error:
            if len(names) == 2:  # running the variants separately shows which one crashes
                self._may_alternate = False
                self._open.pop(self._place(name)).close()
                for one in names:
                    self._answer([one], prompt, repetition)
                return
            self._crashed(name, error)
            return
        if not reply.finished or not reply.answers:
            raise _SpentError
        self._keep(name, replace(reply, target_only=()), repetition)
        for other in names[1:]:
            all_s = sum(
                s.prompt_s + s.decode_s for one in (reply.answers + reply.target_only) for s in [one.statistics]
            )
            self.budget.overhead = max(1.0, (self.budget.spent_s - before_s) / max(all_s, 1e-9))
            target_only = replace(reply, answers=reply.target_only, target_only=(), draft=None, drafters=())
            self._keep(other, target_only, repetition)

    def _keep(self, name: str, reply: trial.TrialResult, repetition: int) -> None:
        self.budget.learn(name, reply)
        kept = self.results[name]
        if len(kept) == repetition:
            kept.append(reply)
        else:
            kept[repetition] = joined(kept[repetition], reply)


def asked(results: Sequence[trial.TrialResult]) -> int:
    """Return how many prompts have an answer."""
    return len(results[0].answers) if results else 0


def _fit_side_by_side(specs: Sequence[trial.TrialJob]) -> bool:
    """Return whether loads may be open at the same time: none uses a GPU or an RPC worker, and all fit in RAM."""
    if any(spec.options.target.gpu_layers or spec.options.draft.gpu_layers or spec.rpc for spec in specs):
        return False
    files = [path for spec in specs for path in (spec.target, spec.draft) if path is not None]
    try:
        return sum(path.stat().st_size for path in files) < host.obtainable_memory_bytes()
    except OSError:
        return False


def joined(one: trial.TrialResult, more: trial.TrialResult) -> trial.TrialResult:
    """Concatenate two results of one variant."""
    answers = (*one.answers, *more.answers)
    energies = (one.energy_j, more.energy_j)
    return replace(
        more,
        answers=answers,
        peak_rss_bytes=max(one.peak_rss_bytes, more.peak_rss_bytes),
        vram_bytes=max(one.vram_bytes, more.vram_bytes),
        energy_j=None if None in energies else sum(filter(None, energies)),
        others_cpus=(one.others_cpus * len(one.answers) + more.others_cpus * len(more.answers)) / max(len(answers), 1),
    )
