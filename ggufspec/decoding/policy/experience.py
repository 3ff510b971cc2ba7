"""What a pair's drafters have shown, by kind of text: in this session, and on this machine before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path

from ggufspec.decoding.loop import Round
from ggufspec.decoding.policy.adaptive import Trials
from ggufspec.decoding.policy.estimator import AcceptanceEstimator
from ggufspec.planning import history
from ggufspec.planning.history import Experience

Estimators = dict[str, AcceptanceEstimator]  # by drafter


class PairExperience:
    """What begins an answer's policy, and what is written down when the pair is closed.

    Args:
        folder: the cache; None reads and writes nothing.
        target: the target's fingerprint; empty where it is not known: nothing is read or written then.
        drafters: by name, the fingerprint of a drafter's file, or its name where it has none.

    Attributes:
        trials: what finding out about drafters took.
    """

    def __init__(self, folder: Path | None, target: str, drafters: Mapping[str, str]) -> None:
        self.trials = Trials()
        self._folder = folder if target else None
        self._target, self._drafters = target, drafters
        self._before: dict[str, Estimators] = {}  # by kind of text
        known = {name: history.experience(self._folder, target, key) for name, key in drafters.items() if self._folder}
        for name, kinds in known.items():
            for kind, one in kinds.items():
                if one.estimator is not None and AcceptanceEstimator.fits(one.estimator):
                    self._before.setdefault(kind, {})[name] = AcceptanceEstimator.restored(one.estimator)
        self.trials.answers = bool(self._before)
        self._estimators: dict[str, Estimators] = {}  # of this session, by kind
        self._last: Estimators = self._before.get("", {})
        self._since: dict[str, history.Kinds] = {}

    def estimators(self, kind: str) -> Estimators:
        """What is known of the drafters for a kind of text; an answer adds to it."""
        if kind not in self._estimators:
            self._estimators[kind] = deepcopy(self._before.get(kind) or self._last)
        self._last = self._estimators[kind]
        return self._last

    def count(self, kind: str, rounds: Iterable[Round]) -> None:
        """What became of the tokens that were drafted in an answer of this kind."""
        for round_ in rounds:
            for position, name in enumerate(round_.drafters[: round_.accepted + 1]):
                for each in {kind, ""}:
                    since = self._since.setdefault(name, {}).setdefault(each, Experience())
                    since.count(position, accepted=position < round_.accepted)

    def save(self) -> None:
        """Write what this session added."""
        if self._folder is None:
            return
        for name, key in self._drafters.items():
            since = self._since.pop(name, {})
            for kind, estimators in (*self._estimators.items(), ("", self._last)):
                if name in estimators and estimators[name].known:
                    since.setdefault(kind, Experience()).estimator = estimators[name].state()
            history.add_experience(self._folder, self._target, key, since)
