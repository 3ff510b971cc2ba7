"""Evidence from one GPU: measurements that fit the time, the most informative first, saved row by row and resumable.

The measurements are in ``evidence_bytes``, ``evidence_ways``, ``evidence_speed`` and ``evidence_exact``; this module
schedules and saves them. A failure is a row, too. Whatever ends a sitting, finished rows are in their files.
"""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from ggufspec.bench.run_log import key_of
from ggufspec.bench.summary import machine_and_build
from ggufspec.bench.trials import CardWatch
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.files.write import check_writable, write_whole
from ggufspec.planning.speed import MachineProfile
from ggufspec.schema import codec
from ggufspec.schema.text import gib
from lab import evidence_bytes, evidence_exact, evidence_speed, evidence_ways
from lab.evidence_documents import (
    PARTS,
    RUN_FILE,
    SUMMARY_FILE,
    CalibrationFound,
    Card,
    Part,
    Row,
    Run,
    Sitting,
    SpeedFound,
    read_part,
    read_run,
    to_text,
)
from lab.evidence_lab import Lab, Task
from lab.evidence_models import Scale
from lab.evidence_pages import summary
from lab.peers import NotThereError

VALUE = "gadehbcf"  # parts, the most informative first; plans depend on the calibration and the driver's overhead
_OF_PEERS = (
    "llama.cpp's program begins to count when it has handed the prompt over: what a device still computes of it then "
    "is in its time and not in ours"
)
_OF_ZEROS = (
    "beside the small model's numbers these hold zeros, whose sums are the same in any order: widths that agree here "
    "may part with a real model, and texts differ more rarely"
)
_NOTES = {"e": (_OF_PEERS,), "h": (_OF_ZEROS,)}
_MAKE_BYTES_PER_S = {"holes": 2e9, "blocks": 2e8}  # making a model file
_LATEST = 6  # measurements whose guesses are compared with their times
_MOST_WRONG = 4.0
_PATIENCE, _PATIENCE_S = 6.0, 60.0  # a row hangs after so many times the expected seconds, and at least this long
_GRACE_S = 5.0

Clock = Callable[[], float]


class _OverdueError(Exception):
    """A measurement takes too long."""


# ---- which measurements, and when --------------------------------------------------------------------------------


class Budget:
    """Time that is left, and how wrong the guesses have been. Pure except for the clock.

    Args:
        seconds: duration of the whole sitting.
        clock: seconds, monotonic.
    """

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        self._clock, self._until = clock, clock() + seconds
        self._ratios: list[float] = []

    @property
    def left_s(self) -> float:
        """Seconds left; below zero when the time is over."""
        return self._until - self._clock()

    @property
    def factor(self) -> float:
        """Measured ÷ expected time of the latest measurements."""
        if not self._ratios:
            return 1.0
        return min(max(median(self._ratios[-_LATEST:]), 1 / _MOST_WRONG), _MOST_WRONG)

    def fits(self, expected_s: float) -> bool:
        """Return True if there probably is time for it."""
        return expected_s * self.factor <= self.left_s

    def learn(self, expected_s: float, seconds: float) -> None:
        """Learn from the duration of a measurement."""
        self._ratios.append(seconds / max(expected_s, 1e-3))


def ordered(tasks: Sequence[Task], states: Mapping[str, str]) -> list[Task]:
    """Return the open tasks in order: new ones before failed ones, then by rank, then by the part's value.

    Args:
        tasks: all tasks.
        states: states of tasks that were run before, by key.
    """
    left = [task for task in tasks if states.get(key(task)) != "done"]
    return sorted(left, key=lambda task: (states.get(key(task)) == "failed", task.rank, VALUE.index(task.part)))


def key(task: Task) -> str:
    """Return a key that is the same for the same measurement, in any process."""
    return key_of(task.part, task.name, [asdict(file) for file in task.files], task.facts)


def tasks(lab: Lab, letters: str) -> list[Task]:
    """Return all tasks of some parts."""
    makers: dict[str, Callable[[Lab], Iterator[Task]]] = {
        "a": evidence_bytes.bytes_tasks,
        "b": evidence_bytes.largest_tasks,
        "c": evidence_speed.width_tasks,
        "d": evidence_ways.notebook_tasks,
        "e": evidence_ways.offloaded_tasks,
        "f": evidence_ways.hopeless_tasks,
        "g": evidence_speed.speed_tasks,
        "h": evidence_exact.exact_tasks,
    }
    return [task for letter in PARTS if letter in letters for task in makers[letter](lab)]


def check_parts(text: str) -> str:
    """Return the letters of ``--only a,d``.

    Raises:
        UsageError: there is no such part.
    """
    asked = [letter.strip() for letter in text.lower().split(",") if letter.strip()]
    unknown = [letter for letter in asked if letter not in PARTS]
    if unknown or not asked:
        known = ", ".join(f"{letter} ({about.name})" for letter, about in PARTS.items())
        raise UsageError(f"there is no part {', '.join(unknown) or repr(text)}", f"the parts are {known}")
    return "".join(dict.fromkeys(asked))


# ---- origin of the figures --------------------------------------------------------------------------------------


def settings(scale: Scale, *, device: str, threads: int, vram_bytes: int | None, fill: str) -> dict[str, Any]:
    """Return the settings that the figures of a folder depend on, besides GPU and versions."""
    asked = {"device": device, "threads": threads, "vram_bytes": vram_bytes, "fill": fill}
    return asked | {"shapes": scale.name, "scale": codec.dump(scale)}


def start(folder: Path, card: Card, asked: dict[str, Any], notes: Sequence[str], command: str) -> Run:
    """Open or create a folder of evidence; it exists when this returns.

    Raises:
        UsageError: it has figures of another GPU, or of other settings or versions.
        GgufspecError: it cannot be written, or is damaged.
    """
    now, here = datetime.now(UTC), machine_and_build()
    versions = {name: here[name] for name in ("ggufspec", "llama_cpp_python")}
    subject = {"card": asdict(replace(card, ceiling_bytes=None)), "cpu": here["cpu"], **versions, **asked}
    digest = key_of(subject)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GgufspecError(f"{folder} cannot be made: {error.strerror}", "--folder FOLDER names another") from None
    check_writable(folder / RUN_FILE)
    sitting = Sitting(now.strftime("%Y-%m-%d %H:%M:%S"), command, 0.0, "running")
    known = read_run(folder)
    if known is None:
        run = Run(now.strftime("%Y-%m-%d"), digest, card, here, asked, (sitting,), tuple(notes))
    else:
        if known.digest != digest:
            raise UsageError(
                f"{folder} has figures of something else: {_differing(known, card, here, asked)}",
                f"--folder {folder}-2 begins anew; the same settings go on",
            )
        ended = tuple(replace(one, ended="killed") if one.ended == "running" else one for one in known.sittings)
        said = tuple(dict.fromkeys((*known.notes, *notes)))
        run = replace(known, sittings=(*ended, sitting), notes=said)
    write_whole(folder / RUN_FILE, to_text(run))
    return run


def _differing(known: Run, card: Card, here: dict[str, Any], asked: dict[str, Any]) -> str:
    """Describe the settings that have changed."""
    before = {"card": known.card.description, "driver": known.card.driver, **known.machine, **known.settings}
    now = {"card": card.description, "driver": card.driver, **here, **asked}
    names = ("card", "driver", "cpu", "ggufspec", "llama_cpp_python", *asked)
    said = [
        f"{name.removesuffix('_bytes')} was {before.get(name)}, is {now.get(name)}"
        for name in names
        if name != "scale" and before.get(name) != now.get(name)
    ]
    return "; ".join(said) or "the same names with other numbers behind them"


# ---- making evidence --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a sitting: numbers of done, failed and open rows in the requested parts."""

    done: int
    failed: int
    left: int


class Evidence:
    """A folder of evidence in the making.

    Args:
        folder: see :func:`start`.
        run: origin of the figures.
        lab: device, models and planner.
        letters: parts to make.
        budget: the time there is.
        tell: called with progress, one line each.
        todo: the measurements; by default :func:`tasks`.
        quick: make only the first ones of each part.

    Raises:
        GgufspecError: a file of the folder is damaged.
    """

    def __init__(
        self,
        folder: Path,
        run: Run,
        lab: Lab,
        letters: str,
        budget: Budget,
        tell: Callable[[str], object] = str,
        todo: Sequence[Task] | None = None,
        *,
        quick: bool = False,
    ) -> None:
        self.folder, self.run, self.lab, self.letters = folder, run, lab, letters
        self._budget, self._tell, self._quick = budget, tell, quick
        self._tasks = tasks(lab, letters) if todo is None else list(todo)
        self._began = time.monotonic()
        self._rows: dict[str, dict[str, Row[Any]]] = {}
        self._derived: dict[str, Row[Any]] = {}
        for letter in PARTS:
            part = read_part(folder, letter)
            known = part.rows if part else ()
            self._rows[letter] = {row.key: row for row in known if not _is_derived(row)}
            self._derived |= {row.key: row for row in known if _is_derived(row)}
        for letter in {task.part for task in self._tasks}:
            before = self._rows[letter]
            planned = [task for task in self._tasks if task.part == letter]
            wanted = {key(task): before.get(key(task)) or _not_run(task) for task in planned}
            self._rows[letter] = wanted | {k: row for k, row in before.items() if k not in wanted}

    def make(self) -> Outcome:
        """Measure what fits the time.

        Raises:
            GgufspecError: a file cannot be written.
            KeyboardInterrupt: Ctrl-C; finished rows are saved.
        """
        watch = CardWatch()
        ended = "interrupted"
        try:
            states = {k: row.state for rows in self._rows.values() for k, row in rows.items()}
            for task in ordered(self._tasks, states):
                expected_s = self._expected_s(task)
                if self._quick and task.rank > 0:
                    continue
                if not self._budget.fits(expected_s):
                    self._put(task, replace(_not_run(task), expected_s=expected_s * self._budget.factor))
                    continue
                self._one(task, expected_s)
                watch.look_for_strangers()
            left = [row for letter in self.letters for row in self.rows(letter) if row.state == "not run"]
            ended = "time" if any(not row.hint for row in left) else "done"  # other rows have a hint
            return self.outcome()
        finally:
            self._end(ended, watch)

    def outcome(self) -> Outcome:
        """Return the progress."""
        states = [row.state for letter in self.letters for row in self._rows[letter].values()]
        return Outcome(states.count("done"), states.count("failed"), states.count("not run"))

    def rows(self, letter: str) -> list[Row[Any]]:
        """Return a part's rows."""
        return list(self._rows[letter].values())

    def _expected_s(self, task: Task) -> float:
        missing = [file for file in dict.fromkeys(task.files) if not self.lab.shelf.has(file)]
        return task.expected_s + sum(2 + file.about_bytes / _MAKE_BYTES_PER_S[self.lab.shelf.fill] for file in missing)

    def _one(self, task: Task, expected_s: float) -> None:
        """Make one measurement and save its row, whatever the result."""
        about = f"{task.part}  {task.name}"
        guess_s = expected_s * self._budget.factor
        self._tell(f"{about}: about {guess_s:.0f} s, {max(self._budget.left_s, 0):.0f} s are left")
        self.lab.begin()
        began = time.monotonic()
        patience_s = max(_PATIENCE * guess_s, _PATIENCE_S)
        limit_s = min(patience_s, self._budget.left_s + _GRACE_S)
        error: GgufspecError | None = None
        found: Any = None
        row = replace(_not_run(task), expected_s=expected_s)
        try:
            with _within(limit_s):
                found = task.run(self.lab)
        except _OverdueError:
            seconds = time.monotonic() - began
            if limit_s < patience_s:  # the next sitting has more time for it
                self._put(task, replace(row, expected_s=max(2 * seconds, guess_s), error="the time was up meanwhile"))
                self._tell(f"{about}: the time is up")
                return
            error = GgufspecError(f"it did not end within {seconds:.0f} s", "-v shows llama.cpp's log")
        except NotThereError as missing:
            self._put(task, replace(row, error=missing.message, hint=missing.hint))
            self._tell(f"{about}: not run: {missing.message}")
            return
        except GgufspecError as failure:
            error = failure
        except OSError as failure:  # no memory for a process, no space for its log
            error = GgufspecError(f"it could not be started: {failure.strerror}", "free some memory, or disk")
        except Exception as mistake:  # time on a GPU is expensive: go on with the others
            said = f"a mistake of ggufspec's own: {type(mistake).__name__}: {mistake}"
            error = GgufspecError(said, traceback.format_exc(limit=-3))
        seconds = time.monotonic() - began
        if error is None:
            self._budget.learn(expected_s, seconds)
        if error is None and self.lab.over_bytes is not None:
            error = GgufspecError(
                f"it used {gib(self.lab.peak_bytes or 0)} GiB of the device, over the ceiling of "
                f"{gib(self.lab.over_bytes)} GiB",
                "the planner is wrong here: please report it with this file",
            )
        done = replace(
            row,
            state="failed" if error else "done",
            seconds=seconds,
            peak_bytes=self.lab.peak_bytes,
            at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
            error=error.message if error else "",
            hint=error.hint if error else "",
            found=found,
        )
        self._put(task, done)
        self._tell(f"{about}: " + (f"failed: {error.message}" if error else f"{seconds:.1f} s"))

    # ---- keeping them

    def _put(self, task: Task, row: Row[Any]) -> None:
        before = self._rows[task.part].get(row.key)
        if row.state == "not run" and before is not None and before.state == "failed":
            return  # the earlier failure says more
        self._rows[task.part][row.key] = row
        if row.state != "not run" or row.error:  # the others are written at the end
            self._write(task.part)

    def _write(self, letter: str) -> None:
        write_whole(self.folder / PARTS[letter].file, to_text(self._part(letter)))

    def _part(self, letter: str) -> Part[Any]:
        about = PARTS[letter]
        rows = (*self.rows(letter), *(self._derived.values() if letter == "g" else ()))
        return Part(
            part=letter,
            title=about.title,
            digest=self.run.digest,
            rows=rows,
            ways=evidence_ways.ways(rows) if letter in "def" else (),
            notes=_NOTES.get(letter, ()),
            complete=all(row.state != "not run" for row in rows),
            schema=about.schema,
        )

    def _predict(self) -> None:
        """Make part g's rows from the other parts' measurements; none before the calibration. Old rows of a model that
        no longer exists stay.
        """
        calibrated = next((row.found for row in self.rows("g") if isinstance(row.found, CalibrationFound)), None)
        if calibrated is None:
            return
        speed = codec.load(MachineProfile, calibrated.speed)

        def header(name: str) -> Any:
            with suppress(GgufspecError):  # damaged since
                known = self.lab.shelf.named(name)
                return known.header if known else None
            return None

        parts = [self._part(letter) for letter in PARTS if letter != "g"]
        found = evidence_speed.predictions(parts, speed, self.run.card.name, header)
        for one in found:
            row: Row[Any] = Row(key_of(_DERIVED, one.part, one.what), f"{one.part}: {one.what}", "done", 0.0, 0.0)
            self._derived[row.key] = replace(row, found=one)

    def _end(self, ended: str, watch: CardWatch) -> None:
        """Write everything that is not written yet."""
        touched = set(self.letters) | {letter for letter, rows in self._rows.items() if rows}
        for letter in sorted(touched):
            self._write(letter)
        *before, sitting = self.run.sittings
        sitting = replace(sitting, seconds=time.monotonic() - self._began, ended=ended)
        said = tuple(dict.fromkeys((*self.run.notes, *watch.notes())))
        self.run = replace(self.run, sittings=(*before, sitting), notes=said)
        write_whole(self.folder / RUN_FILE, to_text(self.run))
        if "g" in touched:  # last: a mistake there costs nothing else
            self._predict()
            self._write("g")
        write_whole(self.folder / SUMMARY_FILE, summarise(self.folder))


_DERIVED = "of another part"


def _is_derived(row: Row[Any]) -> bool:
    """Return True if a row of part g derives from other parts; such rows are made again each time."""
    return isinstance(row.found, SpeedFound)


def _not_run(task: Task) -> Row[Any]:
    return Row(key(task), task.name, "not run", task.expected_s)


def summarise(folder: Path) -> str:
    """Return the folder's summary in Markdown, from its files.

    Raises:
        GgufspecError: there is nothing, or a file is damaged.
    """
    run = read_run(folder)
    if run is None:
        raise GgufspecError(f"{folder} has no evidence", "scripts/gpu_evidence makes some")
    return summary(run, [part for letter in PARTS if (part := read_part(folder, letter))])


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise in the block when it takes too long; only in the main thread, which receives signals."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def late(_number: int, _frame: object) -> None:
        raise _OverdueError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def default_folder(root: Path, card: Card, today: str) -> Path:
    """Return the folder for a GPU's figures begun today."""
    slug = "".join(letter if letter.isalnum() else "-" for letter in card.description.lower())
    slug = "-".join(filter(None, slug.split("-")))[:48].strip("-")
    return root / f"{today}-{slug}"
