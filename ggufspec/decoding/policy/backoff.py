"""When drafting is left off because deciding about it costs more than it brings."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Weariness:
    """What deciding costs, and for how long it is left off.

    Args:
        rest: rounds to come in which nobody is asked.
        plain: width and seconds of the target's batches without a draft, not told to its curve yet.
        plain_s: seconds of a round outside the target if nobody decides.
        learning_s: seconds behind a round otherwise.
        awake: rounds since the last rest.
        gain: tokens that these brought more than the target alone would have in their time; decayed.
        deciding_s: seconds that these took for deciding.
    """

    rest: int = 0
    plain: list[tuple[int, float]] = field(default_factory=list)
    plain_s: float = 0.0
    learning_s: float = 0.0
    awake: int = 0
    gain: float = 0.0
    deciding_s: float = 0.0
