"""The evidence script of heads: which lengths go on, what the goals are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import evidence_scripts


@pytest.fixture(scope="module")
def head_speed() -> Iterator[Any]:
    with evidence_scripts.imported("head_speed") as script:
        yield script


def run(tokens_per_s: float, accepted: int = 50) -> dict[str, Any]:
    """A run of 100 tokens whose prompt took a second."""
    seconds = 100 / tokens_per_s
    whole = {"whole_tokens": 100, "whole_seconds": seconds + 1}
    return {"tokens": 100, "seconds": seconds, "drafted": 100, "accepted": accepted, **whole}


def case(kind: str, target: str, **speeds: float) -> dict[str, Any]:
    runs = {
        mode.replace("_", " ").replace(" and ", "+").replace("target only", "target-only"): run(speed)
        for mode, speed in speeds.items()
    }
    return {"kind": kind, "target": target, "search": {}, "repetitions": [runs]}


CASES = [
    case(
        "code",
        "F16",
        target_only=10,
        lookup=12,
        draft=11,
        mtp=20,
        mtp_and_lookup=22,
        mtp_fixed_2=16,
        mtp_theirs_3=15,
        mtp_theirs_2=16,
    ),
    case(
        "noise", "F16", target_only=10, lookup=10, draft=9, mtp=10, mtp_and_lookup=9.5, mtp_fixed_1=8, mtp_theirs_1=12.5
    ),
]


def test_slow_lengths_leave(head_speed: Any) -> None:
    speeds = {"mtp": 1.0, "target-only": 0.1, "mtp fixed 1": 5.0, "mtp fixed 2": 9.9, "mtp fixed 3": 10.0}
    assert head_speed.slow_lengths(speeds) == {"mtp fixed 1"}
    assert head_speed.slow_lengths({"eagle3 fixed 1": 5.0, "eagle3 fixed 4": 4.0, "lookup": 9.0}) == {"eagle3 fixed 4"}


def test_goals_are_held_to_the_better_rival(head_speed: Any) -> None:
    found = head_speed.summary(CASES)
    theirs = found["mtp ÷ llama.cpp at its best length, from the end of the prompt"]
    assert theirs["geomean"] == pytest.approx((20 / 16 * 10 / 12.5) ** 0.5)
    assert theirs["worst"]["ratio"] == pytest.approx(0.8)
    assert not theirs["met"]
    assert found["mtp ÷ target-only, from the end of the prompt"]["met"]
    assert not found["mtp+lookup ÷ target-only, from the end of the prompt"]["met"]  # 0.95
    assert found["mtp ÷ our best fixed length, from the end of the prompt"]["met"]
    whole = found["mtp ÷ llama.cpp at its best length, with the prompt"]["worst"]["ratio"]
    assert whole == pytest.approx((100 / 12.5 + 1) / (100 / 10 + 1))
    assert not any(name.startswith("eagle3") for name in found)
