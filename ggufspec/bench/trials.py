"""Several runs in turn: trials, each written to a run log, or answer by answer within a budget of time."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ggufspec import child
from ggufspec.bench import trial
from ggufspec.bench.run_log import RunLog, key_of
from ggufspec.bench.statistics import paired_ratios
from ggufspec.bench.summary import busy_notes, notes_of, speed, summarise, unwatched_notes
from ggufspec.decoding.decoder import Statistics
from ggufspec.errors import ChildError, GgufspecError, UsageError
from ggufspec.hardware import gpus, host
from ggufspec.models.locate import locate
from ggufspec.schema import codec
from ggufspec.schema.base import Failure, Run, SpeculativeRun, Spread
from ggufspec.schema.text import counted, duration
from ggufspec.settings.registry import is_lossy

_BUSY = 0.1  # of a card's time, before the first trial
_RESERVE = 0.15  # of a budget, for what comes after the measuring
_FEWEST_TOKENS = 32  # of an answer; rather than less, prompts are left out
_LEAST_TOKENS = 8  # of an answer to the only prompt
_ASIDE_PROMPTS, _ASIDE_TOKENS = 3, 32  # of a way that only informs

Progress = Callable[[int, int, str], None]
_Item = TypeVar("_Item")


def in_turn(items: Sequence[_Item], repetition: int) -> tuple[_Item, ...]:
    """``items`` with another one first in each repetition, so that a drift of the machine favours none of them."""
    first = repetition % max(len(items), 1)
    return (*items[first:], *items[:first])


def identity(path: Path) -> str:
    """Another one when a file's contents are, of any of the parts of a split model."""
    try:
        return locate(path).key
    except GgufspecError:  # the trial will say why
        return str(path)


class Trials:
    """Trials by run and repetition; a run that failed is not tried again.

    Args:
        log: has the trials of an earlier run of the same measurement, and takes those of this one.
        verbose: show llama.cpp's log.
        attempt: does a trial.

    Attributes:
        results: what was measured, by run and repetition, trials of the log included.
        measured: what was measured by this process.
        failures: why runs failed.
        resumed: trials that the log had.
        watch: what went on on the cards.
    """

    def __init__(
        self, log: RunLog, *, verbose: bool = False, attempt: Callable[..., trial.Attempt] | None = None
    ) -> None:
        self.results: dict[trial.Spec, dict[int, trial.Result]] = defaultdict(dict)
        self.measured: dict[trial.Spec, list[trial.Result]] = defaultdict(list)
        self.failures: dict[trial.Spec, Failure] = {}
        self.resumed = 0
        self.watch = CardWatch()
        self._log, self._verbose, self._attempt = log, verbose, attempt or trial.attempt
        self._keys: dict[trial.Spec, str] = {}

    def measure(self, run: trial.Spec, repetition: int) -> None:
        """Do a trial unless the run has failed, or the trial is in the log.

        Raises:
            GgufspecError: it cannot be written.
            KeyboardInterrupt: Ctrl-C.
        """
        if run in self.failures:
            return
        key = f"{self.key(run)} {repetition}"
        result = self._log.load(key, trial.Result)
        if result is not None:
            self.resumed += 1
        else:
            done = self._attempt(run, on_event=self.watch.see, verbose=self._verbose)
            self.watch.look_for_strangers()
            if done.failure is not None:
                self.failures[run] = done.failure
            if done.result is None:
                return
            result = done.result
            self._log.keep(key, result)
            self.measured[run].append(result)
        self.results[run][repetition] = result

    def key(self, run: trial.Spec) -> str:
        """The same for the same run of the same files, in any process."""
        if run not in self._keys:
            files = [path for path in (run.target, run.draft, run.options.lookup_corpus) if path is not None]
            self._keys[run] = key_of(codec.dump(run), [identity(path) for path in files])
        return self._keys[run]

    def speeds(self, run: trial.Spec) -> dict[int, float]:
        """Tokens/s of a run by repetition."""
        return {repetition: speed(result) for repetition, result in sorted(self.results[run].items())}

    def speedup(self, run: trial.Spec, rival: trial.Spec) -> Spread | None:
        """Over another run, paired by repetition; None where no repetition has both."""
        ours, theirs = self.paired(run, rival)
        return paired_ratios(list(map(speed, ours)), list(map(speed, theirs))) if ours else None

    def paired(self, *runs: trial.Spec) -> list[list[trial.Result]]:
        """The results of each run, of the repetitions that all of them have."""
        common = sorted(set.intersection(*(set(self.results[run]) for run in runs)))
        return [[self.results[run][repetition] for repetition in common] for run in runs]

    def summary(self, run: trial.Spec) -> Run | SpeculativeRun | None:
        """All trials of a run as one row; None where there is none."""
        results = list(self.results[run].values())
        return summarise(results, lossy=is_lossy(run.options.accept)) if results else None

    def notes(self) -> tuple[str, ...]:
        """What the decoders had to say, and whether other programs were at work."""
        results = [result for by_repetition in self.results.values() for result in by_repetition.values()]
        return (*notes_of(results), *busy_notes(results), *unwatched_notes(results))


class CardWatch:
    """Sees throttled clocks and other programs on the cards while trials run; nothing where there is no card."""

    def __init__(self) -> None:
        before = gpus.gpus()
        self._cards = bool(before)
        self._known = {process.pid for card in before for process in card.processes}
        self._notes = [
            f"{card.name} was {card.utilisation:.0%} busy before the first trial: something else runs on it"
            for card in before
            if card.utilisation is not None and card.utilisation > _BUSY
        ]

    def see(self, event: child.Event) -> None:
        """At each answer: what holds the clocks down just then."""
        if self._cards and event.get("event") == "answer":
            self._notes += [
                f"{card.name}: {reason}: the clocks were reduced" for card in gpus.gpus() for reason in card.throttled
            ]

    def look_for_strangers(self) -> None:
        """After a trial, when nothing of ours is on a card. A container may not see whose a process is."""
        if self._cards:
            self._notes += [
                "another program began to use a card meanwhile: " + (process.name or f"process {process.pid}")
                for card in gpus.gpus()
                for process in card.processes
                if process.pid not in self._known
            ]

    def notes(self) -> tuple[str, ...]:
        """A sentence for each thing that was seen."""
        return tuple(dict.fromkeys(self._notes))


# ---- answer by answer ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """One way of answering.

    Args:
        spec: how it is loaded by itself.
        engine: the job's module.
        shared: how the load of the pair answers this way, of :class:`~ggufspec.bench.trial.Request`'s ``alone``; None
            where it cannot.
        aside: it only informs: a few short answers, once.
    """

    spec: trial.Spec
    engine: str = trial.__name__
    shared: str | None = None
    aside: bool = False


_Place = tuple[str, trial.Spec]  # a load: the job's module and what is loaded


@dataclass
class _Pace:
    """How fast one way is: of its answers, of the warm-up until there is one."""

    warm: bool = False
    read: float = 0.0
    read_s: float = 0.0
    written: float = 0.0
    written_s: float = 0.0

    def learn(self, found: Statistics, *, warm: bool) -> None:
        if self.warm and not warm:
            self.read = self.read_s = self.written = self.written_s = 0.0
        self.warm = warm
        self.read += found.prompt_read
        self.read_s += found.prompt_s
        self.written += found.decoded
        self.written_s += found.decode_s


class _SpentError(Exception):
    """The budget is spent."""


class Answers:
    """Answers to the same prompts in several ways, interleaved prompt by prompt within a budget.

    The ways that share a placement are answered by one child, which has loaded the pair once. Another placement takes
    another load: beside the first where the memory is the host's and holds both, else one after the other, so that a
    pass over the prompts is measured before the next load. A way whose child dies is not tried again; those that shared
    its load go on in loads of their own.

    With a budget the first pass over the prompts is made to fit: each answer gets its share of the time that is left,
    as the speed of those before has it. Where that would be too few tokens, the last prompts are left out.

    Args:
        ways: by name, the pair's first load under ``first``.
        first: the way whose load serves those that share it.
        budget_s: seconds of answering, loads not counted; None: no limit.
        repetitions: passes over the prompts; None: until there is enough.
        cut: whether answers may be shorter than the spec says.
        verbose: let llama.cpp's log through.
        opened: opens a load.
        clock: seconds.

    Attributes:
        results: what was measured, by way: a result for each pass, with the answers to the first prompts of the spec.
        crashes: why ways were given up.
        prompts: how many prompts are asked.
        spent_s: seconds of the budget that are gone.
    """

    def __init__(
        self,
        ways: Mapping[str, Way],
        first: str,
        *,
        budget_s: float | None,
        repetitions: int | None,
        cut: bool = True,
        verbose: bool = False,
        opened: Callable[..., trial.Load] = trial.Load,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.results: dict[str, list[trial.Result]] = {name: [] for name in ways}
        self.crashes: dict[str, ChildError] = {}
        self.spent_s = 0.0
        self.lengths: list[int] = []
        self.budget_s, self.repetitions = budget_s, repetitions
        self._ways, self._first, self._spec = ways, first, ways[first].spec
        self.prompts = len(self._spec.prompts)
        self._cut = cut and budget_s is not None
        self._verbose, self._opened, self._clock = verbose, opened, clock
        self._apart: set[str] = {name for name, way in ways.items() if way.shared is None}
        self._open: dict[_Place, trial.Load] = {}
        self._side_by_side = True
        self._prompt_tokens: tuple[int, ...] = ()
        self._paces: dict[str, _Pace] = defaultdict(_Pace)

    # ---- time

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return math.inf if self.budget_s is None else self.budget_s - self.spent_s

    def ask(self, load: trial.Load, request: trial.Request) -> trial.Result:
        """Have a load answer, and count the time; a request that exceeds the budget ends unfinished."""
        if self.budget_s is None:
            return load.ask(request)
        stop = threading.Timer(max(self.left_s, 0.0), load.stop)
        began = self._clock()
        stop.start()
        try:
            return load.ask(request)
        finally:
            stop.cancel()
            self.spent_s += self._clock() - began

    def cost_s(self, name: str, prompt: int, tokens: int) -> float:
        """Seconds that an answer is expected to take."""
        return (self._prompt_tokens[prompt] - self._spec.depth) * self._per_token(name, "read") + (
            tokens * self._per_token(name, "written")
        )

    def _per_token(self, name: str, what: str) -> float:
        """Of that way, or else of the slowest that is known."""

        def of(pace: _Pace) -> float:
            return getattr(pace, f"{what}_s") / getattr(pace, what) if getattr(pace, what) else 0.0

        return of(self._paces[name]) or max((of(self._paces[one]) for one in self._main), default=0.0)

    @property
    def _main(self) -> list[str]:
        """The ways that are compared, as far as they work."""
        return [name for name, way in self._ways.items() if not way.aside and name not in self.crashes]

    @property
    def _aside(self) -> list[str]:
        return [name for name, way in self._ways.items() if way.aside and name not in self.crashes]

    def _aside_s(self, prompts: int) -> float:
        """Seconds of what only informs, as far as it is not measured yet."""
        return sum(
            self.cost_s(name, i, _ASIDE_TOKENS)
            for name in self._aside
            for i in range(asked(self.results[name]), min(prompts, _ASIDE_PROMPTS))
        )

    def _share(self, prompts: int) -> float:
        """Tokens of the next answer, if it and the rest of so many prompts share what is left."""
        assert self.budget_s is not None
        done = len(self.lengths)
        rest = range(done, prompts)
        left = (1 - _RESERVE) * self.budget_s - self.spent_s
        for name in self._main:
            left -= sum(self.cost_s(name, i, self.lengths[i]) for i in range(asked(self.results[name]), done))
            left -= sum(self.cost_s(name, i, 0) for i in rest)
        left -= self._aside_s(prompts)
        each = sum(self._per_token(name, "written") for name in self._main)
        return left / max(each * len(rest), 1e-9)

    def _fit(self) -> None:
        """Leave prompts out if the budget is too short for all of them.

        Raises:
            UsageError: it is too short for one.
        """
        wanted = _FEWEST_TOKENS if self._cut else self._spec.max_tokens
        wanted = min(wanted, self._spec.max_tokens)
        while self.prompts > 1 and self._share(self.prompts) < wanted:
            self.prompts -= 1
        least = min(_LEAST_TOKENS, self._spec.max_tokens) if self._cut else self._spec.max_tokens
        if self._share(self.prompts) < least:
            needed = sum(self.cost_s(name, 0, least) for name in self._main) + self._aside_s(1)
            assert self.budget_s is not None
            needed = math.ceil((self.spent_s + needed) / (1 - _RESERVE) + 1)
            raise UsageError(
                f"a budget of {duration(self.budget_s)} is too short for one answer of {counted(least, 'token')} in "
                "each way",
                f"--budget {needed}s" + ("" if self._cut else ", or fewer tokens with -n"),
            )

    def _length(self, prompt: int) -> int:
        """Tokens of the answers to a prompt."""
        if prompt == len(self.lengths):
            most = self._spec.max_tokens
            share = int(self._share(self.prompts)) if self._cut else most
            self.lengths.append(min(most, max(_LEAST_TOKENS, share)))
        return self.lengths[prompt]

    def _forecast(self) -> str:
        """How long it will take."""
        most = self._spec.max_tokens
        tokens = min(most, max(_LEAST_TOKENS, int(self._share(self.prompts)))) if self._cut else most
        about = f"{counted(self.prompts, 'prompt')} × {'about ' * (tokens < most)}{counted(tokens, 'token')}"
        once = sum(self.cost_s(name, i, tokens) for name in self._main for i in range(self.prompts))
        once += self._aside_s(self.prompts)
        passes = self.repetitions or 1
        if self.budget_s is None:
            return f"{about}, {counted(passes, 'time')}: about {duration(once * passes)}"
        least_s = self.spent_s + passes * once
        if tokens < most or least_s > (1 - _RESERVE) * self.budget_s:
            return f"{about}: about {duration(self.budget_s)}"
        return f"{about}: {duration(least_s)} to {duration(self.budget_s)}, until the verdict is clear"

    # ---- loads

    def _place(self, name: str) -> _Place:
        way = self._ways[name]
        return (way.engine, way.spec if name in self._apart else self._spec)

    def _alone(self, name: str) -> str:
        return "" if name in self._apart else self._ways[name].shared or ""

    def _load(self, name: str) -> trial.Load | None:
        """The load of a way, warmed up; None if it crashed."""
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
            for one in [one for one in (*self._main, *self._aside) if self._place(one) == place]:
                try:
                    self._warm_up(one, load)
                except ChildError as error:
                    self._crashed(one, error)
                    break
        return None if name in self.crashes else self._open.get(self._place(name)) or self._load(name)

    def _warm_up(self, name: str, load: trial.Load) -> None:
        request = trial.Request(warm_up=True, alone=self._alone(name))
        # What is before the prompts is read now, and its time is not measured
        reply = load.ask(request) if self._spec.depth else self.ask(load, request)
        if not reply.finished:
            raise _SpentError
        for answer in reply.answers:
            self._paces[name].learn(answer.statistics, warm=True)

    def _crashed(self, name: str, error: ChildError) -> None:
        """Give up a way, and end its load; those that shared it have their own from now on."""
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
        """The ways of each load, of an open one first; or all of them where loads are side by side."""
        by_place: dict[_Place, list[str]] = {}
        for name in (*self._main, *self._aside):
            by_place.setdefault(self._place(name), []).append(name)
        self._side_by_side = len(by_place) < 2 or _fit_side_by_side([spec for _, spec in by_place])
        if self._side_by_side:
            return [[*self._main, *self._aside]]
        return [by_place[place] for place in sorted(by_place, key=lambda place: place not in self._open)]

    # ---- measuring

    def measure(self, progress: Progress, note: Callable[[str], None], enough: Callable[[], bool]) -> None:
        """Measure, after a forecast of how long it takes.

        Args:
            progress: told of answers.
            note: takes the forecast.
            enough: asked after each pass; without a number of repetitions True ends the measurement.

        Raises:
            UsageError: the budget is too short for one answer.
            GgufspecError: a load failed in a way that the user can mend.
            KeyboardInterrupt: Ctrl-C.
        """
        progress(0, 1, "loading")
        try:
            self._load(self._first)
            self._groups()
            for name in self._main if self._side_by_side else ():
                self._load(name)
            if not self._prompt_tokens and self._main:
                self._load(self._main[0])
            if not self._prompt_tokens:
                return
            if self.budget_s is not None:
                self._fit()
            note(self._forecast())
            repetition = 0
            while repetition < (self.repetitions or math.inf) and (repetition == 0 or self.repetitions or not enough()):
                if not self._pass(repetition, progress):
                    break
                repetition += 1
        except _SpentError:
            if not any(self.results.values()):
                assert self.budget_s is not None
                raise UsageError(
                    f"a budget of {duration(self.budget_s)} is too short for one answer",
                    "--budget 3m is the default",
                ) from None
        finally:
            self._close()

    def _pass(self, repetition: int, progress: Progress) -> bool:
        """Ask every prompt in every way; False where the budget ended it."""
        groups = self._groups()
        count = self._affordable() if repetition and self.budget_s is not None else self.prompts
        each = self.prompts * len(self._main)
        total = each * (self.repetitions or repetition + 1)
        for group in groups:
            main = [name for name in group if not self._ways[name].aside]
            aside = [name for name in group if self._ways[name].aside]
            for prompt in range(count):
                few = prompt < _ASIDE_PROMPTS and (repetition == 0 or self.repetitions is not None)
                for name in (*in_turn(main, prompt + repetition), *(aside if few else ())):
                    done = sum(len(one.answers) for way in self._main for one in self.results[way])
                    progress(done, max(total, done), name.replace("_", "-"))
                    self._answer(name, prompt, repetition)
        return count == self.prompts

    def _affordable(self) -> int:
        """How many prompts another pass has the time for."""
        assert self.budget_s is not None
        left = (1 - _RESERVE) * self.budget_s - self.spent_s
        for prompt in range(self.prompts):
            left -= sum(self.cost_s(name, prompt, self.lengths[prompt]) for name in self._main)
            if left < 0:
                return prompt
        return self.prompts

    def _answer(self, name: str, prompt: int, repetition: int) -> None:
        """One answer, unless its way has crashed."""
        if name in self.crashes or (load := self._load(name)) is None:
            return
        length = self._length(prompt)
        if self._ways[name].aside:
            length = min(length, _ASIDE_TOKENS)
        try:
            reply = self.ask(load, trial.Request((prompt,), length, self._alone(name)))
        except ChildError as error:
            self._crashed(name, error)
            return
        if not reply.finished or not reply.answers:
            raise _SpentError
        self._paces[name].learn(reply.answers[0].statistics, warm=False)
        kept = self.results[name]
        if len(kept) == repetition:
            kept.append(reply)
        else:
            kept[repetition] = joined(kept[repetition], reply)


def asked(results: Sequence[trial.Result]) -> int:
    """How many prompts have an answer."""
    return len(results[0].answers) if results else 0


def _fit_side_by_side(specs: Sequence[trial.Spec]) -> bool:
    """Whether loads may be open at the same time: their memory is the host's, and holds them."""
    if any(spec.options.target.gpu_layers or spec.options.draft.gpu_layers or spec.rpc for spec in specs):
        return False
    files = [path for spec in specs for path in (spec.target, spec.draft) if path is not None]
    try:
        return sum(path.stat().st_size for path in files) < host.obtainable_memory_bytes()
    except OSError:
        return False


def joined(one: trial.Result, more: trial.Result) -> trial.Result:
    """One result of two of the same way, in the order in which they were measured."""
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
