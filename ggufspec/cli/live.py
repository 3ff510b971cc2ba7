"""Progress line on the terminal: the current step, time elapsed and time left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from ggufspec.cli import ui
from ggufspec.schema.text import duration, visible


class _Left(ProgressColumn):
    def render(self, task: Task) -> Text:
        left_s: float = task.fields["ends_s"] - time.monotonic()
        return Text("" if math.isinf(left_s) else f"left: {duration(left_s)}" if left_s > 0 else "left: a moment")


@dataclass(frozen=True, slots=True)
class ProgressLine:
    """Progress line: call it with the step and the seconds left (infinity if unknown); ``say`` prints above it."""

    update: Callable[[str, float], None]
    say: Callable[[str], None]

    def __call__(self, what: str, left_s: float) -> None:
        self.update(what, left_s)


@contextmanager
def live() -> Iterator[ProgressLine]:
    """Show a progress line if :func:`ggufspec.cli.ui.is_live`; otherwise print nothing."""
    if not ui.is_live():
        yield ProgressLine(lambda *_: None, lambda _: None)
        return
    what = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
    console = ui.err()
    with (
        Progress(
            SpinnerColumn(), what, TimeElapsedColumn(), _Left(), console=console, transient=True, expand=True
        ) as bar,
        ui.above(console),
    ):
        task = bar.add_task("starting", total=None, ends_s=math.inf)

        def update(text: str, left_s: float) -> None:
            bar.update(task, description=visible(text), ends_s=time.monotonic() + left_s)

        yield ProgressLine(update, lambda text: console.print(text, style="dim"))
