"""Acceptance of a pair's drafters, in this session and earlier on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ggufspec.decoding.loop import Round
from ggufspec.decoding.policy.adaptive import Trials
from ggufspec.decoding.policy.estimator import AcceptanceEstimator
from ggufspec.planning import history
from ggufspec.planning.history import Experience


class PairExperience:
    """Acceptance knowledge that starts an answer's policy and is saved when the pair is closed.

    Args:
        folder: the cache; None reads and writes nothing.
        target: the target's fingerprint; if it is empty, nothing is read or written.
        drafters: by name, the fingerprint of a drafter's file, or its name if it has none.

    Attributes:
        estimators: estimators by drafter; answers add to them.
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
        self.trials = Trials(answers=int(bool(self.estimators)))
        self._since: dict[str, Experience] = {}

    def count(self, rounds: Iterable[Round], engaged: Sequence[str]) -> None:
        """Count an answer's rounds, in which the ``engaged`` drafters took part."""
        for round_ in rounds:
            for name in engaged:
                since = self._since.setdefault(name, Experience())
                since.drafted += round_.drafters.count(name)
                since.emitted += len(round_.emitted)
            for position, name in enumerate(round_.drafters[: round_.accepted + 1]):
                self._since.setdefault(name, Experience()).count(position, accepted=position < round_.accepted)

    def save(self) -> None:
        if self._folder is None:
            return
        for name, key in self._drafters.items():
            since = self._since.pop(name, Experience())
            if name in self.estimators and self.estimators[name].known:
                since.estimator = self.estimators[name].state()
            history.add_experience(self._folder, self._target, key, since)
