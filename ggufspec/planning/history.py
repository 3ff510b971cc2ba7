"""What earlier plans and runs on this machine taught: the acceptance of a pair, and where the formula fell short."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ggufspec.planning.store import read_json, write_json

PRIOR_ACCEPTANCE = 0.7  # what chat and code reach with a draft of the same family, temperature 0: 0.6 to 0.8
_FILE, _SHORT = "acceptance.json", "formula.json"


def record_acceptance(folder: Path, target: str, draft: str, accepted: Sequence[int], drafted: Sequence[int]) -> None:
    """Keep what a run measured; the last one counts.

    What is kept is the chance that a drafted token is accepted given that all before it were: that, and not accepted ÷
    drafted, tells what another draft length would give.

    Args:
        folder: the cache folder.
        target: the target's file name.
        draft: the draft's.
        accepted: tokens kept at each place of the draft.
        drafted: tokens drafted at each place.
    """
    reached = [min(before, here) for before, here in zip([*drafted[:1], *accepted], drafted, strict=False)]
    if sum(reached):
        seen = {"accepted": sum(accepted), "reached": sum(reached)}
        write_json(folder / _FILE, read_json(folder / _FILE) | {_key(target, draft): seen})


def expected_acceptance(folder: Path, target: str, draft: str, profile: float | None) -> tuple[float, str]:
    """(chance that a drafted token is kept, where it comes from): measured before, the profile's, or a prior."""
    seen = read_json(folder / _FILE).get(_key(target, draft))
    if isinstance(seen, dict) and seen.get("reached"):
        rate = seen["accepted"] / seen["reached"]
        return rate, f"{rate:.0%}, measured here before on {seen['reached']:,} drafted tokens"
    if profile is not None:
        return profile, f"{profile:.0%}, the profile's"
    return PRIOR_ACCEPTANCE, f"{PRIOR_ACCEPTANCE:.0%}, a prior: nothing is known of this pair (--acceptance sets it)"


def record_shortfall(folder: Path, architecture: str, card: str, bytes_short: int) -> None:
    """Keep by how much llama.cpp took more on a card than the formula said; zero once it no longer does.

    Args:
        folder: the cache folder.
        architecture: of the model.
        card: the card's description; another kind of card has other kernels.
        bytes_short: llama.cpp's bytes less the formula's; below zero counts as nothing.
    """
    key = _key(architecture, card)
    if bytes_short > 0 or key in read_json(folder / _SHORT):
        write_json(folder / _SHORT, read_json(folder / _SHORT) | {key: max(0, bytes_short)})


def known_shortfall(folder: Path, architecture: str, card: str) -> int:
    """What to add to the formula's bytes on a card."""
    kept = read_json(folder / _SHORT).get(_key(architecture, card))
    return kept if isinstance(kept, int) else 0


def _key(target: str, draft: str) -> str:
    return f"{target} + {draft}"
