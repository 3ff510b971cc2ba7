"""What a pair's drafters have shown: in this session, and on this machine before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ggufspec.decoding.loop import Round
from ggufspec.decoding.policy.adaptive import Trials
from ggufspec.decoding.policy.estimator import AcceptanceEstimator
from ggufspec.planning import history
from ggufspec.planning.history import Experience


class PairExperience:
    """What begins an answer's policy, and what is written down when the pair is closed.

    Args:
        folder: the cache; None reads and writes nothing.
        target: the target's fingerprint; empty if it is not known: nothing is read or written then.
        drafters: by name, the fingerprint of a drafter's file, or its name if it has none.

    Attributes:
        estimators: what is known, by drafter; answers add to it.
        trials: what finding out about drafters took.
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

    def count(self, rounds: Iterable[Round]) -> None:
        for round_ in rounds:
            for position, name in enumerate(round_.drafters[: round_.accepted + 1]):
                since = self._since.setdefault(name, Experience())
                since.count(position, accepted=position < round_.accepted)

    def save(self) -> None:
        if self._folder is None:
            return
        for name, key in self._drafters.items():
            since = self._since.pop(name, Experience())
            if name in self.estimators and self.estimators[name].known:
                since.estimator = self.estimators[name].state()
            history.add_experience(self._folder, self._target, key, since)
