"""Acceptance statistics of a pair's drafters, from this session and earlier ones on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ggufspec.decoding.loop import Round
from ggufspec.decoding.policy.adaptive import ExplorationCosts
from ggufspec.decoding.policy.estimator import AcceptanceEstimator
from ggufspec.planning import history
from ggufspec.planning.history import DraftingHistory


class PairExperience:
    """Acceptance statistics that each answer's policy starts from, saved when the pair is closed.

    Args:
        folder: the cache folder; with None, nothing is read or written.
        target: the target's fingerprint; if it is empty, nothing is read or written.
        drafters: by drafter name, the fingerprint of the drafter's file, or the name again if it has no file.

    Attributes:
        estimators: acceptance estimators by drafter name; every answer updates them.
        trials: cost of exploring drafters.
    """

    def __init__(self, folder: Path | None, target: str, drafters: Mapping[str, str]) -> None:
        self._folder = folder = folder if target else None
        self._target, self._drafters = target, drafters
        self.estimators: dict[str, AcceptanceEstimator] = {}
        for name, key in drafters.items():
            known = history.experience(folder, target, key).estimator if folder else None
            if known is not None and AcceptanceEstimator.fits(known):
                self.estimators[name] = AcceptanceEstimator.restored(known)
        self.trials = ExplorationCosts(answers=int(bool(self.estimators)))
        self._since: dict[str, DraftingHistory] = {}

    def count(self, rounds: Iterable[Round], engaged: Sequence[str]) -> None:
        """Count an answer's rounds, in which the ``engaged`` drafters were active."""
        for round_ in rounds:
            for name in engaged:
                since = self._since.setdefault(name, DraftingHistory())
                since.drafted += round_.drafters.count(name)
                since.emitted += len(round_.emitted)
            for position, name in enumerate(round_.drafters[: round_.accepted + 1]):
                self._since.setdefault(name, DraftingHistory()).count(position, accepted=position < round_.accepted)

    def save(self) -> None:
        if self._folder is None:
            return
        for name, key in self._drafters.items():
            since = self._since.pop(name, DraftingHistory())
            if name in self.estimators and self.estimators[name].known:
                since.estimator = self.estimators[name].state()
            history.add_experience(self._folder, self._target, key, since)
