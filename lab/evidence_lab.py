"""What a measurement of evidence is made with: the device, the models, the planner, and a look at the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ggufspec.api.plan import plan_request
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import GgufspecError
from ggufspec.hardware import backends, cards, gpus, host
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.planning import catalogue, history, machine_profile, plan
from ggufspec.planning.dry_runs import DryRuns
from ggufspec.planning.machine import DEFAULT_HEADROOM_BYTES
from ggufspec.planning.memory import ByDevice, Bytes, Memory, Request, resident
from ggufspec.planning.search import make_plan
from ggufspec.planning.speed import MachineProfile
from ggufspec.schema.text import gib
from lab.evidence_device import RPC, Meter, Site
from lab.evidence_documents import PlacedModel
from lab.evidence_models import File, Pair, Scale, Shelf

Say = Callable[[str], object]

# The notebook's pair and its card: 29 + 4.3 GB of weights and 24 GiB. Where a whole pair would fit, a part of the
# device stands for a card of that proportion.
_NOTEBOOK_SHARE = 0.73
_HEADROOM_SHARE = 0.01
_TYPICAL = "RTX 3090"


@dataclass(frozen=True, slots=True)
class Rates:
    """Rough speeds of a device and its host, from which a measurement's time is guessed.

    ``reading`` is what a token of a prompt costs, of one that is generated.
    """

    start_s: float
    load_bytes_per_s: float
    host_bytes_per_s: float
    card_bytes_per_s: float
    reading: float

    def load_s(self, *files: File) -> float:
        """Seconds to start a process and load files."""
        return self.start_s + sum(file.about_bytes for file in files) / self.load_bytes_per_s

    def token_s(self, file: File, on_card: float = 1.0) -> float:
        """Seconds of a token with that share of the model on the card."""
        return 1e-3 + file.about_bytes * (on_card / self.card_bytes_per_s + (1 - on_card) / self.host_bytes_per_s)


def rates(site: Site, threads: int) -> Rates:
    """What to expect of a device, and of so many threads of the host."""
    host_bytes_per_s = min(4e9 * threads, 1e11)
    if site.card.kind == RPC:
        return Rates(1.5, 3e8, host_bytes_per_s, host_bytes_per_s, 0.3)
    known = cards.recognise(site.card.description, site.card.total_bytes)
    return Rates(4.0, 1.5e9, host_bytes_per_s, 0.5 * (known.bandwidth_bytes_per_s if known else 3e11), 0.04)


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement that may be made.

    Args:
        part: its part's letter.
        name: for people, unlike all others of the part.
        rank: all of rank 0 are made before any of rank 1.
        expected_s: what it will take, the files made.
        run: makes it.
        files: what it needs.
        facts: what the measurement depends on besides the settings of the whole.
    """

    part: str
    name: str
    rank: int
    expected_s: float
    run: Callable[[Lab], Any]
    files: tuple[File, ...] = ()
    facts: tuple[Any, ...] = ()


@dataclass
class Lab:
    """Where measurements are made.

    Args:
        site: the device.
        scale: how large the models are.
        shelf: their files.
        threads: of the host.
        vram_bytes: the ceiling that was asked for.
        peers: the folder of llama.cpp's own programs; None where there is none.
        say: told how far a measurement is.
        verbose: let llama.cpp's log through.

    Attributes:
        peak_bytes: the most that the device's memory rose by since :meth:`begin`.
        over_bytes: the ceiling that this was above; None where it was not.
    """

    site: Site
    scale: Scale
    shelf: Shelf
    threads: int
    vram_bytes: int | None = None
    peers: Path | None = None
    say: Say = str
    verbose: bool = False
    peak_bytes: int | None = field(default=None, init=False)
    over_bytes: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.rates = rates(self.site, self.threads)
        self.cache = self.shelf.folder / "cache"
        self._plans: dict[tuple[str, int], plan.Plan] = {}

    # ---- memory

    @property
    def is_remote(self) -> bool:
        """Whether the device is an RPC worker's."""
        return self.site.card.kind == RPC

    @property
    def ceiling_bytes(self) -> int:
        """What may be used of the device."""
        return self.vram_bytes or self.site.card.total_bytes

    def pair_ceiling(self, pair: Pair) -> int:
        """The ceiling for a pair that does not fit: the device's, or where it would fit the notebook's proportion, with
        what the driver takes on top.
        """
        known = [self.shelf.known(file).header.weight_bytes() for file in (pair.target, pair.draft)]
        if self.vram_bytes is not None and self.vram_bytes < sum(known):
            return self.vram_bytes
        return min(int(_NOTEBOOK_SHARE * sum(known)) + self.overhead_bytes, self.ceiling_bytes)

    def begin(self) -> None:
        """Forget what was seen of the memory."""
        self.peak_bytes = self.over_bytes = None

    @contextmanager
    def watch(self, ceiling_bytes: int | None = None) -> Iterator[Meter]:
        """Look at the device's memory while the block runs.

        Args:
            ceiling_bytes: what is too much; None: the device's own ceiling; 0: nothing is.
        """
        ceiling = self.ceiling_bytes if ceiling_bytes is None else ceiling_bytes
        self.site.settle()
        with Meter(self.site.used_bytes) as meter:
            try:
                yield meter
            finally:
                if meter.rise_bytes is not None:
                    self.peak_bytes = max(self.peak_bytes or 0, meter.rise_bytes)
                    if ceiling and meter.rise_bytes > ceiling + self.site.slack_bytes:
                        self.over_bytes = ceiling

    @property
    def overhead_bytes(self) -> int:
        """What the planner adds for the driver's own share: what was seen before, or a guess.

        Nothing where nobody counts the device's memory: what is held to the ceiling there are llama.cpp's own bytes.
        """
        card = self.site.card
        counts = card.driver and not self.is_remote
        return history.known_overhead(self.cache, card.description, card.name, card.total_bytes) if counts else 0

    def learn_overhead(self, seen_bytes: int) -> None:
        """Keep the most that the driver was seen to take for itself."""
        card = self.site.card
        if not card.driver:
            return
        known = self.overhead_bytes
        if backends.is_guess(known) or seen_bytes > known:
            history.record_overhead(self.cache, card.description, seen_bytes)
            self._plans.clear()

    # ---- plans

    def options(self, **changes: Any) -> DecoderOptions:
        """Options of a decoder at this scale."""
        return DecoderOptions(**{"ctx_size": self.scale.ctx_size, "threads": self.threads, **changes})

    def speed(self) -> MachineProfile:
        """What is known of this machine's speeds: measured, or a catalogue's guess before that."""
        card = self.site.card
        known = None if self.is_remote else cards.recognise(card.description, card.total_bytes)
        return machine_profile.expected({card.name: known}, folder=self.cache, threads=self.threads)

    def machine(self, ceiling_bytes: int) -> plan.Machine:
        """This machine with so much of the device. One that is none is taken for a card, or layers would stay."""
        card, overhead = self.site.card, self.overhead_bytes
        shown = plan.Card(card.name, card.description, ceiling_bytes, ceiling_bytes, overhead)
        headroom = min(DEFAULT_HEADROOM_BYTES, int(_HEADROOM_SHARE * ceiling_bytes))
        as_card = catalogue.from_catalogue([cards.find_card(_TYPICAL)], [card.name])
        is_none = self.is_remote or gpus.is_software(card.description)
        return plan.Machine((shown,), host.free_memory_bytes(), headroom, as_card if is_none else self.speed())

    def dry_run(self, requests: Sequence[Request]) -> list[ByDevice | str]:
        """What llama.cpp would allocate on this device."""
        cards = {self.site.card.name: self.site.card.description}
        with DryRuns(
            cards, simulated=False, rpc=self.site.endpoints(), folder=self.cache, verbose=self.verbose
        ) as runs:
            return runs(requests)

    def request(self, file: File, placement: Placement, context: ContextOptions) -> Request:
        """What to dry-run of a model."""
        known = self.shelf.known(file)
        return Request(known.header, known.metadata_only, placement, context)

    def estimate(self, request: Request) -> Bytes:
        """What the planner estimates for the device before that very placement is dry-run."""
        counts = range(request.header.layers + 1)
        some = [replace(request, placement=replace(request.placement, gpu_layers=count)) for count in counts]
        found = Memory((self.site.card.name,), self.dry_run).estimates(some)
        return found[request.placement.offloaded(request.header.blocks)][self.site.card.name]

    def plan(self, pair: Pair, ceiling_bytes: int) -> plan.Plan:
        """The planner's answer for a pair under a ceiling; the same until more is known of the driver's share.

        Raises:
            GgufspecError: nothing fits.
        """
        key = (pair.name, ceiling_bytes)
        if key not in self._plans:
            target, draft = (self.shelf.known(file) for file in (pair.target, pair.draft))
            asked = plan_request(
                (target.header, target.metadata_only),
                (draft.header, draft.metadata_only),
                self.options(),
                history.PRIOR_ACCEPTANCE,
            )
            self._plans[key] = make_plan(asked, self.machine(ceiling_bytes), self.dry_run)
        return self._plans[key]

    def placed(self, file: File, placement: Placement) -> PlacedModel:
        """A model where it is put, as documents have it."""
        header = self.shelf.known(file).header
        offloaded = placement.offloaded(header.blocks)
        return PlacedModel(file.name, header.layers, offloaded, placement.n_cpu_moe, header.weight_bytes())

    def fitting(self, pair: Pair) -> None:
        """Hold a pair that is to be wholly on the device to the ceiling.

        Raises:
            GgufspecError: it is too large.
        """
        requests = [
            self.request(pair.target, Placement(-1), self.options().context(with_draft=True)),
            self.request(pair.draft, Placement(-1), self.options().draft_context()),
        ]
        used = self.overhead_bytes
        for answer in self.dry_run(requests):
            if isinstance(answer, str):
                raise GgufspecError(f"llama.cpp refuses {pair.name}: {answer}")
            used += answer[self.site.card.name].total
        self._hold(pair.name, used)

    def check_room(self, file: File, placement: Placement, context: ContextOptions) -> None:
        """Hold one model to the ceiling before it is loaded, by the least that it can take: weights and cache.

        Raises:
            GgufspecError: it is too large.
        """
        device = self.site.card.name
        takes = resident(self.shelf.known(file).header, placement, context, (device,))[device]
        self._hold(file.name, takes.weights + takes.kv)

    def _hold(self, name: str, used_bytes: int) -> None:
        if used_bytes > self.ceiling_bytes:
            raise GgufspecError(
                f"{name} takes {gib(used_bytes)} GiB on the device, and {gib(self.ceiling_bytes)} GiB may be used",
                "give more with --vram, or --shapes small",
            )
