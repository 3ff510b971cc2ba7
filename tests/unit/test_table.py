"""The table behind every report: what its three renderers make of the same rows."""

from __future__ import annotations

import csv
import io

import pytest
from rich.console import Console

from ggufspec.reports import table
from ggufspec.reports.table import ReportColumn, ReportTable
from ggufspec.schema.base import MeasuredRun, SpeculativeRun, Spread

SHOWN = ReportTable(
    "Results",
    (
        table.word("Name"),
        ReportColumn("Tokens/s", lambda value: f"{value:.1f}", rank=lambda value: value),
        ReportColumn("Load", lambda value: f"{value:.0f} s", rank=lambda value: -value),
        ReportColumn("Bar", lambda value: "█" * value, "left", only="terminal"),
        ReportColumn("Raw", only="file"),
        table.words("Remarks"),
    ),
    (("a|b", 10.04, 3.0, 2, "x", "some longer words that are broken"), ("c",), ("d", 9.0, 1.0, 1, None, "")),
    failed={1: "failed: no <room>"},
    leading=frozenset({0}),
)


def printed(shown: ReportTable, width: int) -> list[str]:
    out = Console(file=io.StringIO(), width=width)
    out.print(table.terminal(shown, width))
    assert isinstance(out.file, io.StringIO)
    return [line.strip() for line in out.file.getvalue().splitlines() if line.strip()]


def test_cells_are_texts_and_the_best_of_each_column_is_known() -> None:
    assert SHOWN.cells[0] == ("a|b", "10.0", "3 s", "██", "x", "some longer words that are broken")
    assert SHOWN.cells[1:] == [("c",), ("d", "9.0", "1 s", "█", "", "")]
    assert SHOWN.best == {(0, 1), (2, 2)}
    assert SHOWN.reasons() == ["c: failed: no <room>"]


def test_equal_values_have_no_best() -> None:
    column = ReportColumn("Tokens/s", rank=lambda value: value)
    assert ReportTable("", (column,), ((1,), (1,), (None,))).best == frozenset()


def test_the_terminal_has_stars_bars_and_the_word_failed() -> None:
    head, _, first, _, failed, last = printed(SHOWN, 60)
    assert head.split() == ["Name", "Tokens/s", "Load", "Bar", "Remarks"]
    assert first.split()[:5] == ["a|b", "10.0*", "3", "s", "██"]
    assert failed.split() == ["c", "failed"]
    assert last.split() == ["d", "9.0", "1", "s*", "█"]


@pytest.mark.parametrize(("width", "heads"), [(200, 12), (80, 7), (62, 5)])
def test_columns_that_do_not_fit_are_left_out(width: int, heads: int) -> None:
    wide = ReportTable("", table.columns(*(f"column{n:03}" for n in range(12))), (("1",) * 12,))
    assert len(printed(wide, width)[0].split()) == heads


@pytest.mark.parametrize("width", [20, 40])
def test_a_narrow_terminal_shows_row_by_row_and_leaves_nothing_out(width: int) -> None:
    lines = printed(SHOWN, width)
    assert all(len(line) <= width for line in lines)
    assert lines[:4] == ["a|b", "Tokens/s  10.0*", "Load      3 s", "Bar       ██"]
    text = " ".join(" ".join(lines).split())
    assert "Remarks some longer" in text
    assert text.endswith("c failed d Tokens/s 9.0 Load 1 s* Bar █")
    small = ReportTable("", table.columns("a", "b"), (("1", "2"),))
    assert printed(small, width)[0].split() == ["a", "b"]  # it fits


def test_markdown_escapes_and_keeps_what_is_for_files() -> None:
    assert table.markdown(SHOWN).splitlines() == [
        "| Name | Tokens/s | Load | Raw | Remarks |",
        "| --- | ---: | ---: | ---: | --- |",
        "| a\\|b | **10.0** | 3 s | x | some longer words that are broken |",
        "| c | failed: no &lt;room> |  |  |  |",
        "| d | 9.0 | **1 s** |  |  |",
    ]


def test_columns_without_anything_go() -> None:
    shown = ReportTable("", table.columns("a", "b", "c"), (("", "–", "1"), ("", "", "")))
    assert [column.label for column in shown.filled().columns] == ["a", "c"]
    assert [column.label for column in shown.filled(least=2).columns] == ["a", "b", "c"]


def test_csv_has_a_line_per_trial_and_no_rounding() -> None:
    speed = Spread(1.23456, (1.0, 2.0), (1.0, 1.23456))
    run = MeasuredRun(1, 8, 4, speed, 5.0, 0, 0, 0.5)
    pair = SpeculativeRun(1, 8, 4, speed, 5.0, 0, 0, 0.5, 0, 0, 0.5, 1.5, (), 2, 1, 1, 0.1, 0.1)
    lines = [*table.trial_rows(run, name="a"), *table.trial_rows(None), *table.trial_rows(pair, name="b")]
    text = table.comma_separated(("name", "trial", "tokens_per_s", "lossy", "acceptance_rate", "other"), lines)
    assert list(csv.reader(io.StringIO(text)))[1:] == [
        ["a", "1", "1.0", "False", "", ""],
        ["a", "2", "1.23456", "False", "", ""],
        ["b", "1", "1.0", "False", "0.5", ""],
        ["b", "2", "1.23456", "False", "0.5", ""],
    ]
