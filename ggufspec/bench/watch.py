"""What goes on on the cards while trials run: clocks that are held down, programs that are not ours."""

from __future__ import annotations

from ggufspec import worker
from ggufspec.hardware import gpus

_BUSY = 0.1  # of a card's time, before the first trial


class Watch:
    """Looks at the cards while trials run; nothing where there is none.

    Attributes:
        at_first: what ran on them before the first trial, a sentence each.
        throttled: what has held a card's clocks down since :meth:`clear`.
        strangers: programs that were on a card after a trial since then, and not before the first.
    """

    def __init__(self) -> None:
        self.throttled: tuple[str, ...] = ()
        self.strangers: tuple[str, ...] = ()
        before = gpus.gpus()
        self._cards = bool(before)
        self._known = {process.pid for card in before for process in card.processes}
        self.at_first = tuple(
            f"{card.name} was {card.utilisation:.0%} busy before the first trial: something else runs on it"
            for card in before
            if card.utilisation is not None and card.utilisation > _BUSY
        )

    def clear(self) -> None:
        """Before a trial."""
        self.throttled = self.strangers = ()

    def see(self, event: worker.Event) -> None:
        """At each answer: what holds the clocks down just then."""
        if self._cards and event.get("event") == "answer":
            reasons = (f"{card.name}: {reason}" for card in gpus.gpus() for reason in card.throttled)
            self.throttled = tuple(dict.fromkeys((*self.throttled, *reasons)))

    def look_for_strangers(self) -> None:
        """After a trial, when nothing of ours is on a card. A container may not see whose a process is."""
        if self._cards:
            processes = [process for card in gpus.gpus() for process in card.processes]
            strangers = [
                process.name or f"process {process.pid}" for process in processes if process.pid not in self._known
            ]
            self.strangers = tuple(dict.fromkeys((*self.strangers, *strangers)))

    def words(self) -> tuple[str, ...]:
        """What there is to tell of all that was seen, a sentence each."""
        return (
            *self.at_first,
            *(f"{reason}: the cards were held back" for reason in self.throttled),
            *(f"another program came onto a card meanwhile: {name}" for name in self.strangers),
        )
