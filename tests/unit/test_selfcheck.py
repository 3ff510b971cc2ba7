"""The self-check on this build, and on builds that are spoiled: real signals in real children, and wrong numbers."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from ggufspec.llamacpp.library import load_library
from ggufspec.reports.doctor import features
from ggufspec.schema.doctor import CheckStep, SelfCheck
from ggufspec.verify import selfcheck
from ggufspec.verify.selfcheck import BATCHES, FLASH, TYPES, WEIGHT_ERROR, error_of, self_check
from tests.support.damage import library

spoils = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("cc"), reason="preloads a library that is compiled here"
)


def spoiled(kind: str, folder: Path, patch: pytest.MonkeyPatch, types: tuple[str, ...] = ("Q3_K_S",)) -> SelfCheck:
    with patch.context() as inside:
        inside.setenv("LD_PRELOAD", str(library(kind, folder)))
        return self_check(types)


@pytest.mark.full
def test_this_build_computes_right() -> None:
    steps: list[CheckStep] = []
    found = self_check(on_step=steps.append)
    assert found.failures == ()
    host = [row for row in found.rows if row.step.place == "host"]
    cases = {(row.step.type, row.step.flash, row.step.batch) for row in host}
    assert cases == {(kind, flash, batch) for kind in TYPES for flash in FLASH for batch in BATCHES}
    assert all(row.error is not None and row.error > 0 for row in host)  # it is measured, not assumed
    assert {row.step for row in found.rows} <= set(steps)
    errors = {row.step.type: row.error for row in found.rows if not row.step.place}
    assert errors["F16"] < 0.001 < errors["Q8_0"] < 0.05 < errors["Q4_0"] < errors["Q3_K_S"] < WEIGHT_ERROR


@pytest.mark.full
def test_figures_that_ship_are_those_of_float64_and_another_reader(tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "evidence" / "selfcheck.py"
    spec = importlib.util.spec_from_file_location("evidence_selfcheck", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    module.store(tmp_path / "made.json")
    made, ships = (json.loads(file.read_text()) for file in (tmp_path / "made.json", selfcheck.STORED))
    assert made["tokens"] == ships["tokens"]
    assert made["ids"] == ships["ids"]
    assert np.abs(np.array(made["logits"]) - ships["logits"]).max() < 0.002


@spoils
@pytest.mark.parametrize(("kind", "outcome"), [("crash", "SIGSEGV"), ("illegal", "SIGILL")])
def test_a_crash_is_told_with_where_it_was(
    kind: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = spoiled(kind, tmp_path, monkeypatch).failures
    assert row.outcome == outcome
    assert outcome in row.detail
    assert row.step == CheckStep("Q3_K_S", "host", "on")  # when the context was made, which decodes two tokens
    assert row.error is None


@spoils
@pytest.mark.full
def test_a_hang_is_ended_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "LIMIT_S", 3.0)
    (row,) = spoiled("hang", tmp_path, monkeypatch).failures
    assert (row.outcome, row.step.type, row.step.place) == ("silence", "Q3_K_S", "host")
    assert "the self-check of Q3_K_S takes more than 3 s" in row.detail


@spoils
@pytest.mark.parametrize(
    "kind",
    [
        "Q3_K: every eighth product halved",
        "Q3_K: every product a tenth too large",
        "Q3_K: last block of a row lost",
        "Q6_K: one product in 16 lost",
    ],
)
def test_wrong_products_are_found(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one token and at four: sixteen take another kernel of llama.cpp, which is whole."""
    if kind.startswith("Q6_K") and "AMX_INT8" in features(load_library().llama_print_system_info().decode()):
        pytest.skip("AMX multiplies Q6_K by kernels of its own, which no library replaces")
    found = spoiled(kind, tmp_path, monkeypatch)
    assert len(found.rows) == 1 + len(FLASH) * len(BATCHES)
    assert {row.outcome for row in found.rows if row.step.place and row.step.batch < 16} == {"wrong"}
    assert [row.outcome for row in found.rows if not row.step.place] == ["ok"]  # the file is not at fault
    for row in found.failures:
        assert row.step.type == "Q3_K_S"
        assert row.error is not None
        assert row.error > found.limit


@spoils
@pytest.mark.full
def test_types_after_a_crash_are_checked_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = spoiled("crash", tmp_path, monkeypatch, ("Q3_K_S", "F16"))
    assert {row.step.type for row in found.failures} == {"Q3_K_S"}
    assert {row.step.place for row in found.rows if row.step.type == "F16"} == {"", "host"}


def test_what_is_no_crash_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    found = self_check(("F16", "Q8_0"))
    assert [(row.step.type, row.outcome) for row in found.failures] == [("F16", "failed"), ("Q8_0", "failed")]
    assert "cannot be loaded" in found.failures[0].detail


def test_the_error_is_of_the_worst_row_and_takes_no_notice_of_a_constant() -> None:
    right = np.random.default_rng(0).standard_normal((4, 50))
    assert error_of(right, right) == 0
    assert error_of(right + 7, right) == pytest.approx(0, abs=1e-12)
    worse = right.copy()
    worse[2] *= 1.5
    assert error_of(worse, right) == pytest.approx(0.5)
    assert error_of(np.roll(right, 1, axis=0), right) > 1
    worse[2, 3] = math.nan
    assert error_of(worse, right) == 1e6
    worse[2, 3] = math.inf
    assert error_of(worse, right) == 1e6
