"""Evidence for people: a folder's summary, and the index, match the files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from ggufspec.schema.base import Spread
from ggufspec.schema.verify import AnswerDifference, CertificateCheck
from lab.evidence_documents import (
    PARTS,
    Agreeing,
    BytesFound,
    CalibrationFound,
    Card,
    ChecksFound,
    ClassesFound,
    LargestFound,
    Part,
    PlacedModel,
    Row,
    Run,
    Sitting,
    Sizes,
    SpeedFound,
    Tried,
    Way,
    WayResult,
    WaysFound,
    WidthsFound,
    folders,
    read_part,
    to_text,
)
from lab.evidence_pages import index, summary

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
RUN = Run(
    "2026-11-21",
    "d",
    Card("CUDA0", "NVIDIA Test", "cuda", 24 << 30, 20 << 30, "575"),
    {"cpu": "a processor", "ggufspec": "0", "llama_cpp_python": "0.3.36"},
    {"threads": 8, "shapes": "full"},
    (Sitting("2026-11-21 10:00:00", "scripts/gpu_evidence", 100.0, "time"),),
    ("the card was warm",),
)
HALF = PlacedModel("t.gguf", 81, 41)
SIZES = Sizes(900 * MIB, 80 * MIB, 20 * MIB)


def rows(*found: Any) -> tuple[Row[Any], ...]:
    made = [Row(str(i), f"row {i}", "done", 1.0, 2.0, found=one) for i, one in enumerate(found)]
    return (*made, Row("f", "bad", "failed", 1.0, 2.0, error="GGML_ASSERT"), Row("n", "later", "not run", 30.0))


def parts() -> list[Part[Any]]:
    dense = BytesFound("dense", (HALF,), 4096, "f16", "f16", SIZES, SIZES, SIZES, 450 * MIB, 1500 * MIB, (50.0,), 512)
    off = replace(dense, allocated=Sizes(900 * MIB, 80 * MIB, 21 * MIB), device_bytes=None)
    largest = LargestFound(HALF, None, 4096, 20 << 30, 56, 57, (Tried(56, True, 1), Tried(58, False, 2, "too much")))
    widths = WidthsFound(HALF, "F16", 4096, 512, 8, 1.0, 100.0, {1: (0.01, 0.012, 0.011), 4: (0.03,)}, {1: 1.0, 4: 2.7})
    found = WaysFound(
        "70b+8b", 0, HALF, PlacedModel("d.gguf", 33, 33), 4096, 500, {"target-only": WayResult(10, 5.0)}, 2.5
    )
    spread = Spread(1.25, (1.1, 1.4), (1.1, 1.25, 1.4))
    ways = (
        Way("70b+8b", "target-only", 41, 81, None, spread, None, None, None),
        Way("70b+8b", "speculative, 3 drafted", 41, 81, 33, spread, 0.7, 2.9, spread, spread),
    )
    speed = SpeedFound("a", "row 0", (HALF,), 50.0, 60.0)
    classes = ClassesFound(HALF, "F16", 8, 16, (Agreeing((2, 3, 4, 8)), Agreeing((1,))), (2, 3, 4, 8))
    parting = AnswerDifference(0, None, "fixed 4", 7, 1, 2, 0.01, 0.02, explained=True)
    checks = ChecksFound(
        HALF, HALF, (CertificateCheck("default", "draft", "greedy", "passed", differences=(parting,)),), True, "PASSED."
    )
    made = {
        "a": rows(dense, off),
        "b": rows(largest),
        "c": rows(widths),
        "d": rows(found),
        "e": rows(found),
        "f": rows(found),
        "g": rows(CalibrationFound({"pass_s": 1}), speed),
        "h": rows(classes, replace(classes, strict=(), refusal="no"), checks),
    }
    return [
        Part(letter, about.title, "d", made[letter], ways if letter in "def" else (), ("so",), schema=about.schema)
        for letter, about in PARTS.items()
    ]


def write(folder: Path, run: Run = RUN, some: list[Part[Any]] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(to_text(run))
    for part in parts() if some is None else some:
        (folder / PARTS[part.part].file).write_text(to_text(part))
    return folder


def test_every_document_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = write(tmp_path / "card")
    assert [read_part(folder, letter) for letter in PARTS] == parts()
    assert [(path, run) for path, run in folders(tmp_path)] == [(folder, RUN)]
    assert read_part(tmp_path, "a") is None


def test_a_document_has_no_other_keys(tmp_path: Path) -> None:
    body = json.loads(to_text(parts()[0]))
    kind = Part[BytesFound]
    assert TypeAdapter(kind).validate_python(body) == parts()[0]
    for change in ({"more": 1}, {"rows": [{**body["rows"][0], "more": 1}]}):
        with pytest.raises(ValidationError):
            TypeAdapter(kind).validate_python(body | change)
    del body["rows"][0]["found"]["dry"]
    with pytest.raises(ValidationError):
        TypeAdapter(kind).validate_python(body)


def test_a_summary_has_what_was_measured_what_failed_and_what_was_not_run() -> None:
    text = summary(RUN, parts())
    for said in (
        "# NVIDIA Test, 2026-11-21",
        "24.00 GiB, at most 20.00 GiB of them used, driver 575",
        "Note: the card was warm.",
        "Note: so.",
        "| row 0 | 41/81 | 1,000.0 | 1,000.0 | 1,000.0 | 1,500.0 | 0.967 | 500.0 |",
        "| row 1 | 41/81 | 1,000.0 | 1,000.0 | 1,001.0 | – | – | – |",
        "what its dry run said in 1 of 2 rows",
        "| row 0 | 20.00 GiB | 56/81 | 57/81 | 56: fits; 58: too much |",
        "| row 0 | 11.00 | 2.70 |",
        "| speculative, 3 drafted | 41/81 + 33 | 1.25 (1.1 … 1.4) | 70% | 2.90 | 1.25 (1.1 … 1.4)× |",
        "| row 1 | 41/81 | 50.0 | 60.0 | +20% |",
        "| row 0 | 2–4, 8; 1 | 2–4, 8 |",
        "refused: no",
        "largest margin 0.01, noise 0.02 logits",
        "- failed: bad: GGML_ASSERT",
        "Not run yet, 1 (about 30 s): later.",
    ):
        assert said in text, said
    heads = [line for line in text.splitlines() if line.startswith("## ")]
    assert [line[3] for line in heads] == list(PARTS)
    assert all(len(part.rows) > 1 for part in parts())


def test_a_table_s_rows_are_as_wide_as_its_head() -> None:
    lines = summary(RUN, parts()).splitlines()
    tables = [i for i, line in enumerate(lines) if line.startswith("| ---")]
    assert len(tables) >= 9
    for at in tables:
        width = lines[at - 1].count(" | ")
        for line in lines[at + 1 :]:
            if not line.startswith("|"):
                break
            assert line.count(" | ") == width


def test_the_index_tells_what_is_missing(tmp_path: Path) -> None:
    assert "No GPU has run" in index(tmp_path)
    loopback = replace(RUN, card=replace(RUN.card, kind="rpc", description="a worker", ceiling_bytes=None))
    write(tmp_path / "2026-11-20-worker", loopback)
    assert "No GPU has run" in index(tmp_path)
    assert "| [a worker](2026-11-20-worker/README.md) | 2026-11-20" not in index(tmp_path)  # the date is the run's
    assert "| [a worker](2026-11-20-worker/README.md) | 2026-11-21 | – | full | 2/4 | 1/3 |" in index(tmp_path)
    done = [replace(part, rows=part.rows[:1]) for part in parts()]
    write(tmp_path / "2026-11-21-card", some=[part for part in done if part.part != "d"])
    text = index(tmp_path)
    assert "| [NVIDIA Test](2026-11-21-card/README.md) | 2026-11-21 | 20.00 GiB | full | ✓ | ✓ | ✓ | – |" in text
    assert f"Missing on every GPU: d: {PARTS['d'].title}." in text
    shutil.rmtree(tmp_path / "2026-11-21-card")
    write(tmp_path / "2026-11-21-card", some=done)
    assert "Every part was measured" in index(tmp_path)


def test_every_record_is_in_the_list() -> None:
    evidence = ROOT / "docs" / "evidence"
    page = (evidence / "README.md").read_text(encoding="utf-8")
    for path in evidence.glob("*.json"):
        assert f"`{path.name}`" in page, f"{path.name} is not in docs/evidence/README.md"
