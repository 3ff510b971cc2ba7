"""Machines whose speed changes during a session, in virtual time: our policy against the one that knows the speeds.

    .venv/bin/python tests/evidence/lived_in.py              # 500 random machines: ten minutes, whatever else runs
    .venv/bin/python tests/evidence/lived_in.py --machines 40 --no-save

A session is several answers of one loaded pair, replayed as in replay.py: the real loop, lookup and policy on the
answers of a real pair. The time of each model's batches is multiplied by how slow its device is at that moment, which
changes as other programs come and go: in a step, a ramp, or on and off; for the target, the draft, or both. Latencies
are measured at the start as a decoder does, in whatever state the machine is then, and without the system's counters,
as in a container that hides other programs. Drafts pay, never pay, or pay only while the target is disturbed.

Each answer is given three times from the same moment on: by the policy with what it has learned in the session; by the
same policy with latencies that are right at every moment; and target-only. The regret is what the first lacks of the
second. (It can be negative: which rounds a slow spell meets is chance.)
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pool
from statistics import median
from typing import Any

import numpy as np
from common import save
from replay import (
    DECIDING_S,
    DRAFT,
    IN_LARGE,
    NOTHING,
    PLAIN_S,
    SWITCH_S,
    TARGETS,
    TRACE,
    Chains,
    Known,
    Paid,
    Text,
    Time,
    load,
    stitched,
)

from ggufspec.decoding.drafters.base import Drafter
from ggufspec.decoding.drafters.lookup import LookupDrafter
from ggufspec.decoding.loop import rounds
from ggufspec.decoding.policy.adaptive import ExplorationCosts
from ggufspec.decoding.policy.backoff import BackOff
from ggufspec.decoding.policy.base import DraftPolicy
from ggufspec.decoding.policy.draft_latency import DraftLatency
from ggufspec.decoding.policy.estimator import AcceptanceEstimator
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.decoding.policy.pair_latency import DRAFT_BUDGET_S
from ggufspec.decoding.policy.timing import time_batch_sizes
from ggufspec.hardware.disturbance import SystemCounters
from ggufspec.hardware.host import CpuUse
from tests.support.driving import decode_rounds

ANSWERS = 6  # of a session
LENGTHS = (65, 512)  # tokens of an answer
SLOWER = (1.3, 12.0)  # times as slow a device gets
SPELL_S = (5.0, 120.0)  # of a disturbance
_NOTHING_SEEN = lambda: SystemCounters(CpuUse(0.0, 0.0, 0.0), 0)  # noqa: E731 - of the system's counters
KINDS = ("pays", "never pays", "pays while disturbed")
PROCESSES = ("step up", "step down", "ramp up", "ramp down", "on and off")
AFFECTED = ("both", "target", "draft")
GOALS = {"median": 0.03, "worst": 0.10, "target_only": 0.96}

Slow = Callable[[float], float]  # seconds -> how many times as long a batch takes


def process(kind: str, rng: random.Random, length_s: float) -> Slow:
    """How many times as slow a device is at each second of a session of about so long."""
    factor = math.exp(rng.uniform(*map(math.log, SLOWER)))
    when = rng.uniform(0.0, 0.8) * length_s
    takes = rng.uniform(0.05, 0.3) * length_s
    if kind.startswith("step"):
        return lambda now: factor if (now >= when) == (kind == "step up") else 1.0
    if kind.startswith("ramp"):

        def ramp(now: float) -> float:
            share = min(max((now - when) / takes, 0.0), 1.0)
            return factor ** (share if kind == "ramp up" else 1 - share)

        return ramp
    edges, now, spells = [], 0.0, tuple(math.exp(rng.uniform(*map(math.log, SPELL_S))) for _ in range(2))
    begins_on = rng.random() < 0.5
    while now < 20 * length_s and len(edges) < 2000:
        now += rng.expovariate(1 / spells[len(edges) % 2])
        edges.append(now)

    def on_and_off(now: float) -> float:
        is_on = (int(np.searchsorted(edges, now)) % 2 == 0) == begins_on
        return factor if is_on else 1.0

    return on_and_off


class Scaled(Mapping[int, float]):
    """Seconds by batch size at this moment."""

    def __init__(self, seconds: Mapping[int, float], slow: Slow, clock: Time) -> None:
        self._seconds, self._slow, self._clock = seconds, slow, clock

    def __getitem__(self, batch_size: int) -> float:
        return self._seconds[batch_size] * self._slow(self._clock.now)

    def __iter__(self) -> Any:
        return iter(self._seconds)

    def __len__(self) -> int:
        return len(self._seconds)


class Exact(LatencyModel):
    """The latency model of a policy that knows the speeds."""

    def __init__(self, seconds: Mapping[int, float], slow: Slow, clock: Time, **more: Any) -> None:
        super().__init__(dict(seconds), **more)
        self._slow, self._clock = slow, clock

    def observe(self, batch_size: int, seconds: float) -> None:
        """Nothing is to be learned."""

    def move(self, nats: float, spread: float) -> None:
        """Nor from the target."""

    def seconds(self, count: int) -> float:
        return super().seconds(count) * self._slow(self._clock.now)

    def up_to(self, most: int, last: int | None = None) -> list[float]:
        slow = self._slow(self._clock.now)
        return [seconds * slow for seconds in super().up_to(most, last)]


@dataclass
class Machine:
    """A pair on a machine whose devices get slower and faster."""

    number: int
    target: str = field(init=False)
    ratio: float = field(init=False)
    kind: str = field(init=False)
    process: str = field(init=False)
    affected: str = field(init=False)
    same_device: bool = field(init=False)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(f"machine {self.number}")
        self.target, self.kind = rng.choice([*TARGETS]), rng.choice(KINDS)
        self.process, self.affected = rng.choice(PROCESSES), rng.choice(AFFECTED)
        self.ratio = math.exp(rng.uniform(math.log(3), math.log(50)))
        if self.kind == "pays while disturbed":  # a draft of the target's own cost, more or less
            self.affected, self.ratio = "target", rng.uniform(0.7, 1.4)
        points = TARGETS[self.target]
        self.target_s = {
            batch_size: float(np.interp(batch_size, [*points], [*points.values()])) for batch_size in range(1, 17)
        }
        self.draft_s = {batch_size: seconds * self.target_s[1] / self.ratio for batch_size, seconds in DRAFT.items()}
        self.lengths = [round(math.exp(rng.uniform(*map(math.log, LENGTHS)))) for _ in range(ANSWERS)]
        length_s = sum(self.lengths) * self.target_s[1]
        slow = process(self.process, rng, length_s)
        self.slow_target = slow if self.affected != "draft" else lambda _: 1.0
        self.slow_draft = slow if self.affected != "target" else lambda _: 1.0
        # What disturbs only one of two models on one device is its memory: pages that were evicted
        self.same_device = self.affected == "both" or rng.random() < 0.3


class _Timed:
    """What :func:`time_batch_sizes` times: a model whose batches take these seconds."""

    length, capacity, vocab_size = 0, 4096, 100

    def __init__(self, seconds: Mapping[int, float], clock: Time) -> None:
        self.model, self._seconds, self._clock = self, seconds, clock

    def decode(self, tokens: Sequence[int], outputs: int) -> None:  # noqa: ARG002
        known = [*self._seconds]
        self._clock.spend(float(np.interp(len(tokens), known, [self._seconds[batch_size] for batch_size in known])))

    def sample_tokens(self, text: str) -> list[int]:
        return [len(text) % self.vocab_size]

    def mark(self) -> None: ...
    def rewind(self, length: int) -> None: ...


class Session:
    """One pair in one session; ``knows`` the speeds, or measures them."""

    def __init__(self, machine: Machine, *, knows: bool) -> None:
        self.machine = machine
        self.clock = clock = Time(f"machine {machine.number}")
        self.target_s = Scaled(machine.target_s, machine.slow_target, clock)
        self.draft_s = Scaled(machine.draft_s, machine.slow_draft, clock)
        more = {"switch_s": SWITCH_S, "limit": 16}
        self.target: LatencyModel
        if knows:
            self.target = Exact(machine.target_s, machine.slow_target, clock, **more)
            draft: LatencyModel = Exact(machine.draft_s, machine.slow_draft, clock, limit=16)
        else:
            self.target = self._measured(self.target_s, 0.5, switch_s=SWITCH_S)
            draft = self._measured(self.draft_s, DRAFT_BUDGET_S)
        same_device = machine.same_device
        self.draft = (_Known if knows else DraftLatency)(draft, self.target, same_device=same_device)
        self.lasting = dict[str, AcceptanceEstimator](), BackOff(), ExplorationCosts()

    def _measured(self, seconds: Mapping[int, float], budget_s: float, **more: Any) -> LatencyModel:
        """As a decoder measures when the pair is loaded; what disturbs it is seen in the times alone."""
        timed = _Timed(seconds, self.clock)
        found = time_batch_sizes(timed, self.clock, limit=16, budget_s=budget_s, counters=_NOTHING_SEEN)  # type: ignore[arg-type]
        return LatencyModel(found.points, trusted=found.trusted, limit=16, **more)

    def answer(self, text: Text, way: str, at_s: float) -> tuple[float, float]:
        """Tokens/s of an answer that begins at this second, and when it ends."""
        machine, clock = self.machine, self.clock
        clock.now = began = max(at_s, 0.0)
        known = Known([*text.tokens, *[NOTHING] * 64], self.target_s, clock)  # type: ignore[arg-type]
        drafters: list[Drafter] = []
        policy = DraftPolicy()
        if way != "target-only":
            hopeless = machine.kind == "never pays"
            drafters = [Chains(text, self.draft_s, clock, more=0, hopeless=hopeless), LookupDrafter()]  # type: ignore[arg-type]
            policy = Paid(clock, sum(DECIDING_S.values()), self.target, {"draft": self.draft}, *self.lasting)
        clock.now += self.target_s[16] / 16 * IN_LARGE * len(text.prompt)
        for drafter in drafters:
            policy.shadow_evaluated(drafter.name, drafter.begin(text.prompt, text.choices))
        policy.prompt_read(len(text.prompt), clock.now - began)
        steps = rounds(
            text.prompt,
            None,  # type: ignore[arg-type]
            known,  # type: ignore[arg-type]
            capacity=known.capacity,
            max_tokens=len(text.answer),
            is_end=lambda _: False,
            drafters=drafters,
            policy=policy,
            draft_max=15,
            batch_size=self.target.batch_size if drafters else lambda count: count,
            clock=clock,
        )
        for round_ in decode_rounds(known, steps):  # type: ignore[arg-type]
            clock.now += PLAIN_S if round_.batch_size else 0.0
        return len(text.answer) / (clock.now - began), clock.now


class _Known(DraftLatency):
    """Never stale."""

    def seconds(self, count: int) -> float:
        return self.model.seconds(count)

    def spread(self, now_s: float) -> float:  # noqa: ARG002
        return 0.0


def session(number: int) -> dict[str, Any]:
    """The answers of one machine's session."""
    machine, texts = Machine(number), load(TRACE)
    ours, knowing, alone = Session(machine, knows=False), Session(machine, knows=True), Session(machine, knows=True)
    at_s, answers = ours.clock.now, []
    for index, tokens in enumerate(machine.lengths):
        text = stitched(texts, number + 3 * index, tokens)
        own, ends_s = ours.answer(text, "ours", at_s)
        best, _ = knowing.answer(text, "knows", at_s)
        plain, _ = alone.answer(text, "target-only", at_s)
        row = {"tokens": len(text.answer), "at_s": at_s, "tokens_per_s": own, "knows": best, "target_only": plain}
        answers.append(row)
        at_s = ends_s
    about = {name: getattr(machine, name) for name in ("number", "target", "ratio", "kind", "process", "affected")}
    return about | {"answers": answers}


def summary(sessions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Regret and the share of target-only, over all answers, and by what was disturbed."""
    rows = [(one, answer) for one in sessions for answer in one["answers"] if answer["tokens"] > 64]
    regret = [1 - a["tokens_per_s"] / max(a["knows"], 1e-9) for _, a in rows]
    over = [a["tokens_per_s"] / a["target_only"] for _, a in rows]
    ordered = sorted(regret)
    return {
        "answers": len(rows),
        "regret": {
            "median": median(regret),
            "p90": ordered[int(0.9 * len(ordered))],
            "p99": ordered[int(0.99 * len(ordered))],
            "worst": max(regret),
            "above_worst_goal": sum(one > GOALS["worst"] for one in regret) / len(regret),
        },
        "over_target_only": {
            "worst": min(over),
            "below_goal": sum(one < GOALS["target_only"] for one in over) / len(over),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    with Pool(arguments.jobs) as pool:
        sessions = pool.map(session, range(arguments.machines), chunksize=5)
    whole = summary(sessions)
    print("all", whole)
    groups = {}
    for key, values in (("kind", KINDS), ("process", PROCESSES), ("affected", AFFECTED)):
        for value in values:
            if some := [one for one in sessions if one[key] == value]:
                groups[f"{key}: {value}"] = summary(some)
                found = groups[f"{key}: {value}"]
                print(
                    f"{key}: {value:22} {found['answers']:4} answers  regret median {found['regret']['median']:.3f} "
                    f"p90 {found['regret']['p90']:.3f} worst {found['regret']['worst']:.3f} "
                    f"above 0.10: {found['regret']['above_worst_goal']:.3f}  "
                    f"target-only worst {found['over_target_only']['worst']:.3f}"
                )
    worst = sorted(
        (
            (1 - a["tokens_per_s"] / a["knows"], a["tokens_per_s"] / a["target_only"], one["number"], i)
            for one in sessions
            for i, a in enumerate(one["answers"])
        ),
        reverse=True,
    )[:10]
    print(
        "worst regrets (regret, over target-only, machine, answer):", [tuple(round(x, 3) for x in row) for row in worst]
    )
    if not arguments.no_save:
        save("lived-in", {"goals": GOALS, "summary": whole, "groups": groups, "sessions": sessions})


if __name__ == "__main__":
    main()
