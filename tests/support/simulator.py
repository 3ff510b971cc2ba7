"""Simulated machines to tune on: cards of the catalogue, hosts slow and fast, and a truth that no planner knows.

A machine's true speeds are the planner's model with other constants, and with what that model does not have at all:
kernels whose T(n) dips, threads that get in each other's way, an acceptance that falls along the draft, an adaptive
policy that is not perfect, interactions of options, a driver's memory. Measurements are noisy.
"""

from __future__ import annotations

import functools
import math
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ggufspec.api.plan import plan_request
from ggufspec.api.resolve import with_placement
from ggufspec.decoding.options import DecoderOptions
from ggufspec.hardware.cards import find_card
from ggufspec.llamacpp import gguf
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.models.header import ModelHeader, interpret
from ggufspec.planning import catalogue
from ggufspec.planning.memory import HOST, MemoryRequest
from ggufspec.planning.plan import OffloadDevice, Plan, PlanMachine
from ggufspec.planning.search import search_plan
from ggufspec.planning.speed import DeviceProfile, pass_s
from ggufspec.settings.table import DRAFT_MAX
from ggufspec.tune.search import SearchEnd, TuneSearch
from ggufspec.tune.space import FreeValues, TuneCandidate, nearest_setting, policies, thread_counts, tune_candidates
from tests.support import shapes
from tests.support.compute_buffers import dry_run

GIB = 2**30
PAIRS = (
    ("llama3-70b-q3_k_s", "llama3-8b-q3_k_l"),
    ("llama3-70b-q3_k_s", "llama-1b-q4_0"),
    ("qwen3-14b", "qwen2-0.5b-q8_0"),
    ("gemma3-27b", "gemma-2b"),
    ("qwen2-7b", "qwen2-0.5b-q8_0"),
    ("qwen3moe-30b-a3b", "qwen2-0.5b-q8_0"),
    ("gpt-oss-20b", "llama-1b-q4_0"),
    ("llama3-8b-q3_k_l", "llama-1b-q4_0"),
)
CARDS = (
    "GTX 1060 6GB", "RTX 3050 8GB", "RTX 3060 12GB", "RTX 4060", "RTX 3080 10GB", "RTX 4060 Ti 16GB",
    "RTX 4070", "RTX 5060", "RTX 5070 Ti", "RTX 3090", "RTX 4090", "RTX 5090",
)  # fmt: skip
HOSTS = ((25e9, 4), (45e9, 6), (60e9, 8), (90e9, 16))  # bytes/s, cores
NOISE = 0.015


@functools.cache
def header(name: str) -> tuple[ModelHeader, Path]:
    """(header, path) of a shape; nobody opens the path again."""
    with tempfile.TemporaryDirectory() as folder:
        path = shapes.write(Path(folder) / f"{name}.gguf", shapes.SHAPES[name])
        with path.open("rb") as file:
            data = file.read(16 << 20)
        return interpret(path.name, [gguf.parse_header(data)], path.stat().st_size), path


@dataclass(frozen=True)
class Case:
    """One simulated machine with a pair on it."""

    seed: int
    target: str
    draft: str
    card: str
    pcie: int
    host_bytes_per_s: float
    cores: int


def cases(count: int, seed: int = 0) -> list[Case]:
    """So many different ones: every pair and card, PCIe 3 to 5, hosts slow and fast."""
    chance = random.Random(seed)
    made = []
    for index in range(count):
        target, draft = PAIRS[index % len(PAIRS)]
        card = CARDS[(index * 5 + index // len(CARDS)) % len(CARDS)]
        host, cores = HOSTS[chance.randrange(len(HOSTS))]
        made.append(Case(seed * 1000 + index, target, draft, card, 3 + index % 3, host, cores))
    return made


class Simulated:
    """A machine that can be planned for, and measured."""

    def __init__(self, case: Case) -> None:
        self.case, self.random = case, random.Random(case.seed)
        card = find_card(case.card)
        host = catalogue.guessed_host()
        host = host.scaled(host.bandwidth_bytes_per_s / case.host_bytes_per_s)
        known = catalogue.from_catalogue([card], ["GPU0"])
        link = catalogue.link_bytes_per_s(case.pcie, card.pcie_width)
        known = replace(known, devices=known.devices | {HOST: host}, link_bytes_per_s=link)
        free = card.vram_bytes - int(self.random.uniform(0.3, 0.9) * GIB)
        self.machine = PlanMachine(
            (OffloadDevice("GPU0", card.name, card.vram_bytes, free),), 128 * GIB, GIB // 4, known
        )
        self.options = DecoderOptions(ctx_size=4096, threads=case.cores)
        target, draft = header(case.target), header(case.draft)
        self.dry_run = dry_run(*self.machine.card_names)
        self.plan: Plan = search_plan(
            plan_request(target, draft, self.options, 0.7),
            self.machine,
            self.dry_run,
        )
        self.free = FreeValues(thread_counts(case.cores), ("both", "draft", "lookup", "none"), policies(DRAFT_MAX))
        self.space = tune_candidates(self.plan, self.options, self.free, self.dry_run)
        self._make_truth()

    def _make_truth(self) -> None:
        chance = self.random
        self.speed = replace(
            self.machine.speed,
            devices={name: self._other(speed) for name, speed in self.machine.speed.devices.items()},
            pass_s=self.machine.speed.pass_s * math.exp(chance.gauss(0, 0.5)),
            crossing_s=self.machine.speed.crossing_s * math.exp(chance.gauss(0, 0.5)),
            link_bytes_per_s=self.machine.speed.link_bytes_per_s * math.exp(chance.gauss(-0.1, 0.2)),
        )
        self.acceptance = min(max(0.7 + chance.gauss(0, 0.12), 0.2), 0.95)
        self.falls = chance.uniform(0.9, 1.0)
        self.lookup_acceptance = chance.uniform(0.05, 0.6)
        self.both = chance.uniform(0.99, 1.07)
        self.adaptive = chance.uniform(0.93, 1.0)
        self.knee, self.crowd = chance.uniform(0.4, 1.0), chance.uniform(0, 0.15)
        self.no_flash, self.quantised = math.exp(chance.gauss(-0.03, 0.05)), math.exp(chance.gauss(-0.02, 0.04))
        self.experts = math.exp(chance.gauss(0, 0.15))
        self.memory, self.driver = chance.uniform(0.99, 1.06), int(chance.uniform(0.15, 0.6) * GIB)
        self._passes: dict[object, tuple[float, float]] = {}

    def _other(self, speed: DeviceProfile) -> DeviceProfile:
        """Bandwidth wrong by 10 to 40 %, up or down; the kernels' batch_latencies with dips and bumps of their own."""
        chance = self.random
        factor = math.exp(chance.uniform(0.1, 0.34) * chance.choice((-1, 1)))
        batch_latencies = {
            kind: {n: 1.0 if n == 1 else value * math.exp(chance.gauss(0, 0.12)) for n, value in batch_latency.items()}
            for kind, batch_latency in speed.batch_latencies.items()
        }
        return replace(
            speed.scaled(factor),
            batch_latencies=batch_latencies,
            layer_s=speed.layer_s * math.exp(chance.gauss(0, 0.5)),
        )

    def _wobble(self, spread: float, *facts: object) -> float:
        """A factor that always is the same for the same facts."""
        return math.exp(random.Random(repr((self.case.seed, *facts))).gauss(0, spread))

    def _pass(self, which: ModelHeader, at: Placement, tokens: int, *, context: ContextOptions) -> tuple[float, float]:
        """(seconds, of them the host's)."""
        key = (id(which), at, context.op_offload_min_batch, tokens)
        depth = self.options.ctx_size // 2
        if key not in self._passes:
            names = self.machine.card_names
            seconds = pass_s(which, at, self.speed, names, tokens=tokens, depth=depth, context=context)
            faster = self.speed.devices[HOST].scaled(0.5)
            halved = replace(self.speed, devices=self.speed.devices | {HOST: faster})
            less = pass_s(which, at, halved, names, tokens=tokens, depth=depth, context=context)
            self._passes[key] = seconds, 2 * (seconds - less)
        return self._passes[key]

    def fits(self, one: TuneCandidate) -> bool:
        """Whether a card's true memory holds it."""
        options, asks = one.options, self.plan.request
        context = options.context(with_draft=options.needs_draft)
        requests = [MemoryRequest(asks.target.header, asks.target.metadata_only, options.target, context)]
        if options.needs_draft and asks.draft:
            draft = asks.draft
            requests.append(
                MemoryRequest(draft.header, draft.metadata_only, options.draft_placement, options.draft_context())
            )
        used = sum(one["GPU0"].total for one in self.dry_run(requests) if not isinstance(one, str))
        return not used or used * self.memory + self.driver <= self.machine.cards[0].free_bytes

    def true(self, one: TuneCandidate) -> float:
        """Tokens/s without noise; 0 where it runs out of memory."""
        s = one.setting
        if not self.fits(one):
            return 0.0
        asks, cores = self.plan.request, self.case.cores
        context = replace(self.options, op_offload_min_batch=s.op_offload_min_batch).draft_context()  # f16
        fewer = max(1.0, self.knee * cores / s.threads) * (1 - self.crowd * (s.threads < cores))

        def seconds(which: ModelHeader, at: Placement, tokens: int) -> float:
            whole, host = self._pass(which, at, tokens, context=context)
            host *= self.experts if at.n_cpu_moe else 1.0
            return whole + host * (fewer - 1)

        at, draft_at = one.options.target, one.options.draft_placement
        lengths = [0] if not s.drafted else [s.draft_max] if s.draft_policy == "fixed" else list(range(16))
        token_s = 0.0
        if s.drafted and s.drafter != "lookup" and asks.draft:
            token_s = seconds(asks.draft.header, draft_at, 1)
        rates = []
        for length in lengths:
            round_s = length * token_s + seconds(asks.target.header, at, length + 1)
            rates.append(self._tokens(s.drafter, length) / round_s)
        rate = max(rates)
        rate *= self.adaptive if s.drafted and s.draft_policy == "adaptive" else 1.0
        rate *= self.both if s.drafter == "both" else 1.0
        rate *= self.no_flash if s.flash_attn == "off" else 1.0
        rate *= self.quantised if s.cache_type_k != "f16" else 1.0
        rate *= self._wobble(0.02, s.drafter, s.draft_policy, s.flash_attn)
        return rate * self._wobble(0.015, s.drafter, s.gpu_layers // 4) * self._wobble(0.01, s.draft_max, s.threads)

    def _tokens(self, drafter: str, length: int) -> float:
        accepted = self.lookup_acceptance if drafter == "lookup" else self.acceptance
        total = kept = 1.0
        for place in range(length):
            kept *= accepted * self.falls**place
            total += kept
        return total

    def measure(self, index: int, noise: random.Random) -> float | None:
        """One trial; None where it fails."""
        true = self.true(self.space[index])
        return true * math.exp(noise.gauss(0, NOISE)) if true else None


@dataclass(frozen=True)
class Outcome:
    """What tuning reached on a simulated machine. ``share`` is of the exhaustive best, by true speeds."""

    case: Case
    space: int
    fitting: int
    trials: int
    failed: int
    share: float
    planned_share: float
    target_only_share: float
    winner: str
    stopped: str


def exhaust(machine: Simulated) -> list[float]:
    """True tokens/s of every setting of the space."""
    return [machine.true(one) for one in machine.space]


def tune(machine: Simulated, make: Callable[..., TuneSearch] = TuneSearch, repeats: int = 3) -> Outcome:
    """Search as the command does; every measurement counts as a trial.

    The final is simpler than the command's: so many rounds, and the setting wins that is believed to be the best after
    all trials.
    """
    noise = random.Random(machine.case.seed + 1)
    first = first_choices(machine)
    search = make(machine.space, first)
    failed = 0
    while True:
        asked = search.suggest()
        if isinstance(asked, SearchEnd):
            break
        found = machine.measure(asked.index, noise)
        failed += found is None
        search.observe(asked.index, found)
    trials = search.trials
    finalists = list(dict.fromkeys([*search.leaders(), *first[:1]]))
    for _ in range(repeats):
        for index in finalists:
            trials += 1
            search.observe(index, machine.measure(index, noise))
    winner = search.best()
    assert winner is not None
    truth = exhaust(machine)
    best = max(truth)
    alone = [true for true, one in zip(truth, machine.space, strict=True) if not one.setting.drafted]
    return Outcome(
        machine.case,
        len(truth),
        sum(true > 0 for true in truth),
        trials,
        failed,
        truth[winner] / best,
        truth[first[0]] / best,
        max(alone) / best,
        repr(machine.space[winner].setting),
        asked.why,
    )


def first_choices(machine: Simulated) -> list[int]:
    """The planner's pair and target-only."""
    plan, options = machine.plan, machine.options
    pair = with_placement(options, plan.pair, draft_max=DRAFT_MAX) if plan.pair else None
    alone = replace(with_placement(options, plan.target_only, draft_max=DRAFT_MAX), drafters=())
    found = [
        nearest_setting(machine.space, pair, drafted=True) if pair else None,
        nearest_setting(machine.space, alone, drafted=False),
    ]
    chosen = found if plan.choice == "speculative" else found[::-1]
    return [index for index in chosen if index is not None]
