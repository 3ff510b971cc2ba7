"""Tables and figures of the pages match docs/evidence: scripts/tables.py would change nothing."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted({*ROOT.glob("docs/*.md")} - {ROOT / "docs" / "predictions.md"})]


@pytest.fixture(scope="module")
def tables() -> Any:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "scripts" / "tables.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_up_to_date(tables: Any) -> None:
    for path, text in tables.pages().items():
        assert text == path.read_text(encoding="utf-8"), f"{path.name}: .venv/bin/python scripts/tables.py"


def test_every_table_is_on_a_page(tables: Any) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (*PAGES, tables.EVIDENCE / "README.md")]
    shown = [found[2] for text in texts for found in tables.MARKED.finditer(text)]
    assert sorted(shown) == sorted(tables.TABLES)
    begun = sum(text.count("<!-- table ") for text in texts)
    assert begun == len(shown), "a table has no end, or its mark is misspelt"


def test_every_record_that_a_page_names_is_what_it_is_made_of(tables: Any) -> None:
    read = set()

    def evidence(name: str) -> Any:
        read.add(name)
        return tables.evidence(name)

    tables.pages(evidence)
    named = {name for page in PAGES for name in re.findall(r"evidence/([\w-]+)\.json", page.read_text("utf-8"))}
    assert named
    assert named <= read, "a page names a record and has its figures by hand"


def test_no_table_beside_a_record_is_made_by_hand(tables: Any) -> None:
    """A section that names a record or its script has no table outside the generated ones."""
    seen = 0
    for page in PAGES:
        for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            if re.search(r"evidence/[\w-]+\.(json|py)", section):
                seen += len(tables.MARKED.findall(section))
                assert "| --- |" not in tables.MARKED.sub("", section), page.name
    assert seen >= 5


def test_a_figure_that_was_copied_wrong_is_put_right(tables: Any) -> None:
    page = "It ran at 0.9 of the old\nspeed, 1,234 times. More."
    words = "at {} of the old speed, {} times."
    assert tables.with_figures(page, words, ("0.85", "99")) == "It ran at 0.85 of the old\nspeed, 99 times. More."
    for other in ("It ran.", f"{page} {page}"):
        with pytest.raises(ValueError, match="not once"):
            tables.with_figures(other, words, ("0.85", "99"))
    with pytest.raises(ValueError, match="zip"):
        tables.with_figures(page, words, ("0.85",))


def test_a_table_is_put_between_its_marks(tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tables.TABLES, "one", lambda read: [read("record"), "| x |"])
    page = "before\n\n<!-- table one: scripts/tables.py -->\nold\n<!-- end -->\nafter\n"
    made = tables.with_tables(page, {"record": "| a |"}.__getitem__)
    assert made == page.replace("old", "| a |\n| x |")
    with pytest.raises(KeyError, match="two"):
        tables.with_tables(page.replace("table one", "table two"), str)


def test_figures_follow_the_record(tables: Any) -> None:
    """Another record makes other pages: nothing is in the script itself."""
    cases = [
        {"target": "F16", "draft_max": 2, "ratio_median": 1.234, "ratio_ci95": [1.1, 1.3], "ratio_of_sums": 1.5}
        | {"tokens_per_s": {"ours": 30.0, "theirs": 20.0}}
    ]
    read = {"against-peers": {"cases": cases}}.__getitem__
    assert tables.peers(read)[-1] == "| F16 | 2 | 30.0 t/s | 20.0 t/s | 1.50 (1.10 to 1.30) |"
    names = ("llama-server target-only", "llama-server, draft length 2", "llama-server, draft length 7")
    over = {name: {"median": 1.5 + place, "ci95": [1.0, 2.0 + place]} for place, name in enumerate(names)}
    speeds = dict(zip(("ggufspec", *names), ([9.0], [8.0], [5.0], [7.0]), strict=True))
    body = {"one_client": {"tokens_per_s": speeds, "speed_of_ours_over": over}}
    assert tables.serving({"serving": {"kinds": {"Q4_0": body}}}.__getitem__)[2:] == [
        "| target-only | 1.50 (1.00 to 2.00) |",
        "| draft length 7, its fastest with this draft | 3.50 (1.00 to 4.00) |",
        "| draft length 2 | 2.50 |",
    ]


def run(tokens_per_s: float, accepted: int = 50, **more: Any) -> dict[str, Any]:
    """A run of 100 tokens whose prompt took a second."""
    seconds = 100 / tokens_per_s
    whole = {"whole_tokens": 100, "whole_seconds": seconds + 1}
    return {"tokens": 100, "seconds": seconds, "drafted": 100, "accepted": accepted, **whole, **more}


def case(kind: str, target: str, runs: dict[str, float]) -> dict[str, Any]:
    made = {mode: run(tokens_per_s) for mode, tokens_per_s in runs.items()}
    return {"kind": kind, "target": target, "draft": "50m", "group": "grid", "repetitions": [made]}


def test_tables_of_heads(tables: Any) -> None:
    first = {"target-only": 10, "lookup": 12, "draft": 11, "mtp": 20, "mtp+lookup": 22, "mtp fixed 2": 16}
    second = {"target-only": 10, "lookup": 10, "draft": 9, "mtp": 10, "mtp+lookup": 9.5, "mtp fixed 1": 8}
    cases = [
        case("code", "F16", first | {"mtp theirs 3": 15, "mtp theirs 2": 16}),
        case("noise", "F16", second | {"mtp theirs 1": 12.5}),
    ]
    read = {"head-speed": {"cases": cases}}.__getitem__
    lines = tables.drafters(read)
    assert lines[:2] == [
        "| | n-gram lookup | draft model, 150M | MTP | MTP + lookup |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    assert "| code | 1.20 (1.20) | 1.10 (1.10) | 2.00 (2.00) | 2.20 (2.20) |" in lines
    assert "| all | 1.10 (1.00) | 0.99 (0.90) | 1.41 (1.00) | 1.45 (0.95) |" in lines
    assert "| MTP | 50% | 1.00 (0.80) | 0.99 (0.82) | 1.41 (1.00) | 1.25 (1.25) |" in tables.heads(read)


def test_a_round_of_three_drafted_tokens_is_counted_in_tokens_of_target_only(tables: Any) -> None:
    """Twenty rounds of four tokens at 1.5 tokens each, and two short ones at one."""
    fixed = run(100 / 3.2, rounds=22, widths={"4": 20, "1": 2})
    cases = [{"target": "F16", "kind": "code", "repetitions": [{"target-only": run(10), "mtp fixed 3": fixed}]}]
    assert tables.cost_of_three({"head-speed": {"cases": cases}}.__getitem__, "F16") == pytest.approx(1.5)


def test_default_settings_have_the_better_rival(tables: Any) -> None:
    speeds = {"both": 30, "target-only": 20, "theirs 3": 15, "theirs 4": 24, "draft": 22, "fixed 3": 20, "fixed 7": 11}
    cases = [case("code", target, speeds) for target in ("Q4_0", "F16")]
    assert tables.default_settings({"decoder": {"cases": cases}}.__getitem__)[1:] == [
        "| --- | --- | ---: | ---: | ---: |",
        "| F16 | 50M | 1.25 (1.25) | 1.50 (1.50) | 1.10 (1.10) |",
        "| Q4_0 | 50M | 1.25 (1.25) | 1.50 (1.50) | 1.10 (1.10) |",
        "| all 2 | | 1.25 (1.25) | 1.50 (1.50) | 1.10 (1.10) |",
    ]
