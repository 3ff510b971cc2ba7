"""Report of a certificate, with a table per section and details of failed checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ggufspec.reports import table
from ggufspec.reports.table import ReportColumn, ReportTable
from ggufspec.schema.verify import AnswerDifference, CertificateCheck

TITLES = {
    "strict": "Strict mode: the same tokens as target-only, to the bit",
    "default": "Default mode: the same tokens, or a near tie within rounding",
    "distribution": "Distribution: tokens against the target's own probabilities",
}
_MARKS = {"passed": ("PASS", "green"), "failed": ("FAIL", "bold red"), "not possible": ("–", "dim")}
_MOST = 3  # maximum number of differences shown per check


def check_rows(checks: Sequence[CertificateCheck]) -> ReportTable:
    """Return a table with a row per check; ``Accepted`` counts the drafted tokens that became part of answers."""
    columns = (
        ReportColumn("", lambda status: _MARKS[status][0], "left", style=lambda status: _MARKS[status][1]),
        table.word("Drafter"),
        table.word("Rule"),
        *(ReportColumn(label, lambda count: f"{count:,}") for label in ("Answers", "Tokens", "Accepted")),
        table.word(""),
    )
    rows: list[tuple[Any, ...]] = []
    for check in checks:
        counts = [count or None for count in (check.answers, check.tokens, check.accepted)]
        rows.append((check.status, check.drafter, check.rule, *counts, remark(check)))
    return ReportTable("Checks", columns, rows)


def remark(check: CertificateCheck) -> str:
    if check.status == "not possible":
        return "not possible" if check.rule == "exact" else check.reason
    if check.p_value is not None:
        return f"p = {check.p_value:.2g}"
    wrong = sum(not one.explained for one in check.differences)
    if wrong:
        return f"{wrong} wrong"
    ties = len(check.differences)
    return f"{ties} near {'tie' if ties == 1 else 'ties'}" if ties else "identical"


def details(check: CertificateCheck) -> list[str]:
    """Return sentences on why a check failed or was not possible; none if it passed."""
    if check.status == "not possible":
        return [check.reason] if check.rule == "exact" else []
    if check.status == "passed":
        return []
    name = f"{check.drafter}, {check.rule}"
    if check.p_value is not None:
        return [f"{name}: p = {check.p_value:.2g} is below {check.threshold:.2g}"] + [
            f"  {place.name}: {place.observed:,} of {place.tokens:,} tokens, {place.expected:,.1f} expected"
            for place in check.places
        ]
    wrong = [one for one in check.differences if not one.explained]
    lines = [f"{name}: {_difference(one)}" for one in wrong[:_MOST]]
    return lines + ([f"{name}: and {len(wrong) - _MOST} more"] if len(wrong) > _MOST else [])


def _difference(one: AnswerDifference) -> str:
    seed = "" if one.seed is None else f", seed {one.seed}"
    said = ["the end" if token is None else str(token) for token in (one.speculative, one.target_only)]
    why = "" if one.margin is None else f"; margin {one.margin:.3g}, noise {one.noise:.3g}"
    return f"prompt {one.prompt + 1}, {one.policy}{seed}: token {one.position + 1} is {said[0]}, not {said[1]}{why}"
