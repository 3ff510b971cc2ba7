"""Answers to the same prompts by several variants (e.g. with a draft, target-only), interleaved, within a budget."""

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
from ggufspec.schema.text import counted, duration

_RESERVE = 0.15  # share of a budget for the checks after measuring
# (prompts, tokens): minimum length of answers while more than this many prompts are left. Prompts differ more from each
# other than the parts of one answer do, so many short answers say more than a few long ones, but the beginning of an
# answer is not as fast as the rest.
_FEWEST_TOKENS = ((4, 64), (1, 32))
_WARM_UP_TOKENS = 32  # the pair's warm-up, in which the policy times drafts and learns what they gain
_LEAST_TOKENS = 8  # minimum length of an answer, even if only one prompt is left
_ASIDE_PROMPTS, _ASIDE_TOKENS = 3, 32  # maximum of an informational variant


@dataclass(frozen=True, slots=True)
class Way:
    """Variant to measure, with the ``spec`` and the module ``engine`` of its own load.

    ``shared`` is the ``alone`` of requests with which the pair's load answers for it; None if it cannot. ``aside``
    marks an informational variant, which is measured with a few short answers, once.
    """

    spec: trial.Spec
    engine: str = trial.__name__
    shared: str | None = None
    aside: bool = False


_Place = tuple[str, trial.Spec]  # identifies a load: the job's module and its spec


class _SpentError(Exception):
    """The budget is spent."""


@dataclass
class Budget:
    """Time for answers, loads not counted, with estimates from earlier answers of how long the next takes.

    ``overhead`` is how many times longer than in their statistics the last alternating answers took: where their texts
    differ, tokens are decoded again. A ``limit_s`` of None is no limit.
    """

    limit_s: float | None
    clock: Callable[[], float]
    spent_s: float = 0.0
    overhead: float = 1.0
    _answers: dict[str, list[Statistics]] = field(default_factory=lambda: defaultdict(list))
    _warm_ups: dict[str, list[Statistics]] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds left in total."""
        return math.inf if self.limit_s is None else self.limit_s - self.spent_s

    @property
    def measuring_s(self) -> float:
        """Seconds left for measuring, without the reserve for the checks that follow."""
        return math.inf if self.limit_s is None else (1 - _RESERVE) * self.limit_s - self.spent_s

    def ask(self, load: trial.Load, request: trial.Request) -> trial.Result:
        """Send a request to a load and count the time; a request that exceeds the budget is stopped, unfinished."""
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

    def learn(self, name: str, result: trial.Result, *, warm_up: bool = False) -> None:
        """Record how fast a variant answered; its warm-up counts only until its first answer."""
        found = [answer.statistics for answer in result.answers]
        if warm_up:
            self._warm_ups[name] = found
        else:
            self._answers[name] += found

    def read_s(self, name: str) -> float:
        """Return the seconds per prompt token of a variant; of the slowest known variant if it has no answer yet."""
        return self._known(name, lambda s: (s.prompt_s, s.prompt_read))

    def write_s(self, name: str) -> float:
        """Return the seconds per generated token, likewise."""
        return self._known(name, lambda s: (s.decode_s, s.decoded))

    def _known(self, name: str, part: Callable[[Statistics], tuple[float, int]]) -> float:
        def of(one: str) -> float:
            parts = [part(statistics) for statistics in self._answers[one] or self._warm_ups[one]]
            return sum(seconds for seconds, _ in parts) / max(sum(tokens for _, tokens in parts), 1)

        return (of(name) if name in self._warm_ups else 0.0) or max(map(of, self._warm_ups), default=0.0)


class Answers:
    """Measurement of the answers of several variants to the same prompts, interleaved prompt by prompt.

    Variants with the same placement share one child, which loads the pair once. If the target's cache can be rewound to
    any length, speculative and target-only answers alternate there, segment by segment. Another placement needs another
    load: at the same time if both run on the CPU and fit in RAM, else one after the other, with a pass over the prompts
    in between. A variant whose child dies is not retried; those that shared its load get loads of their own.

    A budget limits the first pass: each answer gets a share of the time left, by the speed of earlier answers. If that
    would be too few tokens, the last prompts are left out. In a shortened answer the policy drafts as in a full one.

    ``ways`` are variants by name, ``first`` that whose load the others may share. ``repetitions`` are passes over the
    prompts; None for as many as needed. ``cut`` allows answers shorter than the spec's.

    Attributes:
        results: by variant, one result per pass with the answers to the spec's first prompts.
        crashes: why variants were given up.
        prompts: number of prompts in use.
        lengths: maximum answer length for each prompt, in tokens.
    """

    def __init__(
        self,
        ways: Mapping[str, Way],
        first: str,
        budget: Budget,
        *,
        repetitions: int | None,
        cut: bool = True,
        verbose: bool = False,
        opened: Callable[..., trial.Load] = trial.Load,
    ) -> None:
        self.results: dict[str, list[trial.Result]] = {name: [] for name in ways}
        self.crashes: dict[str, ChildError] = {}
        self.lengths: list[int] = []
        self.budget, self.repetitions = budget, repetitions
        self._ways, self._first, self._spec = ways, first, ways[first].spec
        self.prompts = len(self._spec.prompts)
        self._cut = cut and budget.limit_s is not None
        self._verbose, self._opened = verbose, opened
        self._apart: set[str] = {name for name, way in ways.items() if way.shared is None}
        self._open: dict[_Place, trial.Load] = {}
        self._may_alternate = True
        self._side_by_side = True
        self._prompt_tokens: tuple[int, ...] = ()

    @property
    def _working(self) -> list[str]:
        """Variants that did not crash, informational ones last."""
        names = [name for name in self._ways if name not in self.crashes]
        return sorted(names, key=lambda name: self._ways[name].aside)

    @property
    def _compared(self) -> list[str]:
        return [name for name in self._working if not self._ways[name].aside]

    # ---- time

    def cost_s(self, name: str, prompt: int, tokens: int) -> float:
        """Return the expected seconds of an answer."""
        read = self._prompt_tokens[prompt] - self._spec.depth
        return self.budget.overhead * (read * self.budget.read_s(name) + tokens * self.budget.write_s(name))

    def _aside_s(self, prompts: int) -> float:
        """Return the expected seconds of the informational answers that are still to be measured."""
        return sum(
            self.cost_s(name, i, _ASIDE_TOKENS)
            for name in self._working
            if self._ways[name].aside
            for i in range(asked(self.results[name]), min(prompts, _ASIDE_PROMPTS))
        )

    def _share(self, prompts: int) -> int:
        """Return the tokens of the next answer if those to all remaining prompts get equal shares of the time left."""
        done = len(self.lengths)
        left = self.budget.measuring_s - self._aside_s(prompts)
        for name in self._compared:
            left -= sum(self.cost_s(name, i, self.lengths[i]) for i in range(asked(self.results[name]), done))
            left -= sum(self.cost_s(name, i, 0) for i in range(done, prompts))
        each = self.budget.overhead * sum(map(self.budget.write_s, self._compared))
        return int(left / max(each * (prompts - done), 1e-9))

    def _fit(self) -> None:
        """Leave out prompts that the budget has no time for; raise UsageError if it is too short for one."""
        most = self._spec.max_tokens
        least = min(_LEAST_TOKENS, most) if self._cut else most
        for fewest, wanted in _FEWEST_TOKENS if self._cut else ((1, most),):
            while self.prompts > fewest and self._share(self.prompts) < min(wanted, most):
                self.prompts -= 1
        if self._share(self.prompts) < least:
            needed = sum(self.cost_s(name, 0, least) for name in self._compared) + self._aside_s(1)
            needed = math.ceil((self.budget.spent_s + needed) / (1 - _RESERVE) + 1)
            raise UsageError(
                f"a budget of {duration(self.budget.left_s + self.budget.spent_s)} is too short for one answer of "
                f"{counted(least, 'token')} in each way",
                f"--budget {needed}s" + ("" if self._cut else ", or fewer tokens with -n"),
            )

    def _length(self) -> int:
        """Return the length of the answers to the next new prompt."""
        most = self._spec.max_tokens
        return min(most, max(_LEAST_TOKENS, self._share(self.prompts))) if self._cut else most

    def _forecast(self) -> str:
        most, tokens, limit_s = self._spec.max_tokens, self._length(), self.budget.limit_s
        about = f"{counted(self.prompts, 'prompt')} × {'about ' * (tokens < most)}{counted(tokens, 'token')}"
        once = sum(self.cost_s(name, i, tokens) for name in self._compared for i in range(self.prompts))
        all_s = (self.repetitions or 1) * (once + self._aside_s(self.prompts))
        if limit_s is None:
            return f"{about}, {counted(self.repetitions or 1, 'time')}: about {duration(all_s)}"
        if tokens < most or all_s > self.budget.measuring_s:
            return f"{about}: about {duration(limit_s)}"
        return f"{about}: {duration(self.budget.spent_s + all_s)} to {duration(limit_s)}, until the verdict is clear"

    # ---- loads

    def _place(self, name: str) -> _Place:
        way = self._ways[name]
        return (way.engine, way.spec if name in self._apart else self._spec)

    def _request(self, name: str, prompt: int = 0, length: int = 0, *, warm_up: bool = False) -> trial.Request:
        alone = "" if name in self._apart else self._ways[name].shared or ""
        if warm_up and name == self._first:
            prompt, length = self._prompt_tokens.index(min(self._prompt_tokens)), _WARM_UP_TOKENS
        if name != self._first or length >= self._spec.max_tokens:
            return trial.Request((prompt,), length, alone, warm_up)
        return trial.Request((prompt,), self._spec.max_tokens, alone, warm_up, most=length)

    def _load(self, name: str) -> trial.Load | None:
        """Return the load of a variant, warmed up; None if the variant crashed."""
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
                self._apart |= {one for one, way in self._ways.items() if way.shared == "target"}
            for one in [one for one in self._working if self._place(one) == place]:
                try:
                    self._warm_up(one, load)
                except ChildError as error:
                    self._crashed(one, error)
                    break
        return None if name in self.crashes else self._open.get(self._place(name)) or self._load(name)

    def _warm_up(self, name: str, load: trial.Load) -> None:
        request = self._request(name, warm_up=True)
        # The text before the prompts is read now, and that does not count towards the budget
        reply = load.ask(request) if self._spec.depth else self.budget.ask(load, request)
        if not reply.finished:
            raise _SpentError
        self.budget.learn(name, reply, warm_up=True)

    def _crashed(self, name: str, error: ChildError) -> None:
        """Give up a variant and close its load; variants that shared it get their own from now on."""
        self.crashes[name] = error
        place = self._place(name)
        if load := self._open.pop(place, None):
            load.close()
        if place[1] is self._spec:
            self._apart |= set(self._ways)

    def _close(self) -> None:
        for load in self._open.values():
            load.close()
        self._open.clear()

    def _groups(self) -> list[list[str]]:
        """Return the variants of each load, those of open loads first; one group if loads fit side by side."""
        by_place: dict[_Place, list[str]] = {}
        for name in self._working:
            by_place.setdefault(self._place(name), []).append(name)
        self._side_by_side = len(by_place) < 2 or _fit_side_by_side([spec for _, spec in by_place])
        if self._side_by_side:
            return [self._working]
        return [by_place[place] for place in sorted(by_place, key=lambda place: place not in self._open)]

    # ---- measuring

    def measure(self, progress: Progress, note: Callable[[str], None], enough: Callable[[], bool]) -> None:
        """Tell ``note`` how long measuring will take, then measure, calling ``progress`` before each answer.

        ``enough`` is called after each pass unless there is a number of repetitions; True ends the measurement.

        Raises:
            UsageError: the budget is too short for one answer.
            GgufspecError: a load failed, and the user can fix the cause.
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
                self._fit()
            note(self._forecast())
            passes = 0
            while self._pass(passes, progress):
                passes += 1
                if passes == self.repetitions or (self.repetitions is None and enough()):
                    break
        except _SpentError:
            if not any(self.results.values()):
                raise UsageError(
                    f"a budget of {duration(self.budget.spent_s + self.budget.left_s)} is too short for one answer",
                    "--budget 3m is the default",
                ) from None
        finally:
            self._close()

    def _pass(self, repetition: int, progress: Progress) -> bool:
        """Answer every prompt with every variant; return False if the budget allowed only some prompts."""
        count = self._affordable() if repetition else self.prompts
        total = self.prompts * len(self._compared) * (self.repetitions or repetition + 1)
        for group in self._groups():
            main = [name for name in group if not self._ways[name].aside]
            aside = [name for name in group if self._ways[name].aside]
            for prompt in range(count):
                few = prompt < _ASIDE_PROMPTS and (repetition == 0 or self.repetitions is not None)
                turns = [*in_turn(self._turns(main), prompt + repetition), *([name] for name in aside if few)]
                for names in turns:
                    done = sum(len(one.answers) for way in self._compared for one in self.results[way])
                    progress(done, max(total, done), " and ".join(names).replace("_", "-"))
                    self._answer(names, prompt, repetition)
        return count == self.prompts

    def _turns(self, names: Sequence[str]) -> list[list[str]]:
        """Return the turns: one variant each, except that two which alternate share a turn, speculative first."""
        shared = {self._ways[name].shared: name for name in names if self._place(name) == self._place(self._first)}
        load = self._load(self._first) if self._may_alternate and {"", "target"} <= shared.keys() else None
        both = [shared[""], shared["target"]] if load and load.ready.alternates else []
        return [*filter(None, [both]), *([name] for name in names if name not in both)]

    def _affordable(self) -> int:
        """Return how many prompts fit in another pass."""
        left = self.budget.measuring_s
        for prompt in range(self.prompts):
            left -= sum(self.cost_s(name, prompt, self.lengths[prompt]) for name in self._compared)
            if left < 0:
                return prompt
        return self.prompts

    def _answer(self, names: Sequence[str], prompt: int, repetition: int) -> None:
        """Measure an answer of one variant, or of two that alternate, unless they have crashed."""
        name = names[0]
        if name in self.crashes or (load := self._load(name)) is None:
            return
        if prompt == len(self.lengths):
            self.lengths.append(self._length())
        length = min(self.lengths[prompt], _ASIDE_TOKENS) if self._ways[name].aside else self.lengths[prompt]
        request = self._request(name, prompt, length)
        if len(names) == 2:
            request = replace(request, alternate=("pair", "target")[(prompt + repetition) % 2])
        before_s = self.budget.spent_s
        try:
            reply = self.budget.ask(load, request)
        except ChildError as error:
            if len(names) == 2:  # one variant at a time shows which of them crashes
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

    def _keep(self, name: str, reply: trial.Result, repetition: int) -> None:
        self.budget.learn(name, reply)
        kept = self.results[name]
        if len(kept) == repetition:
            kept.append(reply)
        else:
            kept[repetition] = joined(kept[repetition], reply)


def asked(results: Sequence[trial.Result]) -> int:
    """Return how many prompts have an answer."""
    return len(results[0].answers) if results else 0


def _fit_side_by_side(specs: Sequence[trial.Spec]) -> bool:
    """Return whether loads may be open at the same time: none uses a GPU or an RPC worker, and all fit in RAM."""
    if any(spec.options.target.gpu_layers or spec.options.draft.gpu_layers or spec.rpc for spec in specs):
        return False
    files = [path for spec in specs for path in (spec.target, spec.draft) if path is not None]
    try:
        return sum(path.stat().st_size for path in files) < host.obtainable_memory_bytes()
    except OSError:
        return False


def joined(one: trial.Result, more: trial.Result) -> trial.Result:
    """Return the concatenation of two results of one variant."""
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
