"""Predictions against what others published: the catalogue is what was fitted, and the goals are met."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ggufspec.llamacpp.options import Placement
from ggufspec.planning import catalogue, speed
from ggufspec.planning.speed import pass_s
from tests.support import evidence_scripts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def published() -> Iterator[Any]:
    with evidence_scripts.imported("published") as script:
        yield script


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs" / "evidence" / "published.json").read_text())
    return found


def test_the_catalogue_has_what_was_fitted(document: dict[str, Any]) -> None:
    constants = document["results"]["constants"]
    for name, reach in catalogue.REACHES.items():
        if name:
            assert reach.efficiency == constants["efficiency"][name]
            assert reach.layer_s == pytest.approx(constants["layer_us"][name] * 1e-6)
    assert constants["shares"] == catalogue.SHARES
    assert (constants["routing"], constants["recurrence"]) == (speed.ROUTING, speed.RECURRENCE)


def test_the_goals_are_met_or_the_page_says_how_far_they_are(document: dict[str, Any]) -> None:
    goals, found = document["goals"], document["results"]["summary"]
    for name in ("speed", "speed, rows A and B"):
        assert found[name]["median"] <= goals["median"]
        assert found[name]["four of five"] <= goals["four of five"]
    assert found["partial, one point"]["most"] <= goals["partial"]
    assert found["signs"]["right"] >= goals["signs"] * found["signs"]["rows"]
    listed = [row for row in document["results"]["memory"] if row["id"][0] in "ABV"]
    assert max(abs(row["error"]) for row in listed) <= goals["vram_mib"]


def test_the_page_is_made_of_the_figures(published: Any, document: dict[str, Any]) -> None:
    assert published.PAGE.read_text(encoding="utf-8") == published.page(document["results"])


def test_a_published_row_is_predicted_by_the_planner_as_by_the_fit(published: Any, tmp_path: Path) -> None:
    """The fit's sum of bytes and launches is :func:`ggufspec.planning.speed.cost`."""
    header, file = published.published_header("llama3.2-1b", "Q4_K_M", tmp_path)
    empty = {"backend": "CUDA", "file_bytes": 0, "layers": None, "cpu_moe": "", "host": "", "context": 4096}
    row = published.Row(
        **empty,
        id="x",
        card="RTX 4090",
        model="",
        quant="",
        cache="f16",
        source="",
        note="",
        tokens_per_s=1.0,
        vram_mib=None,
        header=header,
        file=file,
    )
    of = published.measured([row])
    reaches = [catalogue.REACHES[name] for name in published.ARCHITECTURES]
    fitted = published.Fitted(
        published.np.array([reach.efficiency for reach in reaches]),
        published.np.array([reach.layer_s for reach in reaches]),
        published.np.array([catalogue.SHARES[kind] for kind in published.TYPES]),
        speed.ROUTING,
        speed.RECURRENCE,
        published.np.zeros(0),
    )
    machine = published.machine_of("RTX 4090", "")
    planned = pass_s(header, Placement(-1), machine, (published.CARD,), depth=published.DEPTH, context=row.options)
    fixed = machine.pass_s + machine.crossing_s * 2
    assert planned - fitted.seconds(of)[0] == pytest.approx(fixed, rel=0.2)
