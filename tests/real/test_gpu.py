"""What is promised of a card, held to a card: bytes, placements, the text. Without one everything here is skipped.

.venv/bin/python -m pytest -m gpu
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ggufspec.errors import GgufspecError
from ggufspec.hardware.host import physical_cores
from lab import evidence_bytes, evidence_exact, evidence_ways
from lab.evidence_device import open_site
from lab.evidence_lab import Lab, Task
from lab.evidence_models import SCALES, Shelf

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The small shapes on the card that is here."""
    models: Path = tmp_path_factory.mktemp("models")
    try:
        with open_site("auto", 1, share=False) as (site, _):
            yield Lab(site, SCALES["small"], Shelf(models, "holes"), physical_cores())
    except GgufspecError as error:
        pytest.skip(f"no card to test on: {error.message} ({error.hint})")


def named(tasks: Iterator[Task], start: str) -> Task:
    return next(task for task in tasks if task.name.startswith(start))


def test_the_planned_bytes_are_not_below_the_truth_and_close_to_it(lab: Lab) -> None:
    """First one model, which tells what the driver takes for itself; then the pair, of which much is promised."""
    if not lab.site.card.driver:
        pytest.skip("nobody counts this card's memory: NVML knows NVIDIA's alone")
    tasks = [task for task in evidence_bytes.bytes_tasks(lab) if task.rank == 0][:2]
    for task in tasks:
        found = task.run(lab)
        assert found.dry == found.allocated
        assert found.estimate.total >= found.allocated.total
    again = tasks[-1].run(lab)  # with the driver's share of a pair known
    assert again.device_bytes is not None
    assert again.device_bytes <= again.planned_bytes + (4 << 20)  # a driver deals in pieces of 2 MiB
    assert again.planned_bytes <= again.device_bytes * 1.03


def test_the_planned_placement_loads_and_is_within_a_layer_of_the_largest(lab: Lab) -> None:
    for task in evidence_bytes.largest_tasks(lab):
        found = task.run(lab)
        assert found.planned <= found.largest <= found.planned + 1


def test_strict_mode_gives_the_target_s_own_text(lab: Lab) -> None:
    found = named(evidence_exact.exact_tasks(lab), "certificate").run(lab)
    assert found.passed, found.text
    assert {check.rule for check in found.checks if check.section == "strict"} == {"greedy", "coupled"}


def test_a_hopeless_draft_costs_little(lab: Lab) -> None:
    found = named(evidence_ways.hopeless_tasks(lab), "small").run(lab)
    alone, pair = (found.results[name] for name in (evidence_ways.TARGET_ONLY, evidence_ways.ADAPTIVE))
    assert pair.accepted < 0.5 * max(pair.drafted, 1)
    assert pair.tokens_per_s > 0.5 * alone.tokens_per_s  # one short answer: the rest is for part f
