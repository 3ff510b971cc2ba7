"""The lab for measurements of evidence: the device, the models, the planner, and a memory meter."""

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
from ggufspec.planning.memory import ByDevice, DeviceBytes, MemoryEstimates, MemoryRequest, resident
from ggufspec.planning.search import search_plan
from ggufspec.planning.speed import MachineProfile
from ggufspec.schema.text import gib
from lab.evidence_device import RPC, Meter, Site
from lab.evidence_documents import PlacedModel
from lab.evidence_models import File, Pair, Scale, Shelf

Say = Callable[[str], object]

# The notebook's pair and its GPU: 29 + 4.3 GB of weights and 24 GiB. If a whole pair would fit, part of the device
# stands in for a GPU of that proportion.
_NOTEBOOK_SHARE = 0.73
_HEADROOM_SHARE = 0.01
_TYPICAL = "RTX 3090"


@dataclass(frozen=True, slots=True)
class Rates:
    """Rough speeds of a device and its host, for guessing a measurement's time.

    ``reading`` is the cost of a prompt token relative to a generated one.
    """

    start_s: float
    load_bytes_per_s: float
    host_bytes_per_s: float
    card_bytes_per_s: float
    reading: float

    def load_s(self, *files: File) -> float:
        """Return the seconds to start a process and load files."""
        return self.start_s + sum(file.about_bytes for file in files) / self.load_bytes_per_s

    def token_s(self, file: File, on_card: float = 1.0) -> float:
        """Return the seconds per token with that share of the model on the GPU."""
        return 1e-3 + file.about_bytes * (on_card / self.card_bytes_per_s + (1 - on_card) / self.host_bytes_per_s)


def rates(site: Site, threads: int) -> Rates:
    """Return the expected speeds of a device, and of so many threads of the host."""
    host_bytes_per_s = min(4e9 * threads, 1e11)
    if site.card.kind == RPC:
        return Rates(1.5, 3e8, host_bytes_per_s, host_bytes_per_s, 0.3)
    known = cards.recognise(site.card.description, site.card.total_bytes)
    return Rates(4.0, 1.5e9, host_bytes_per_s, 0.5 * (known.bandwidth_bytes_per_s if known else 3e11), 0.04)


@dataclass(frozen=True, slots=True)
class Task:
    """One possible measurement.

    Args:
        part: its part's letter.
        name: for people, unique in the part.
        rank: all of rank 0 are made before any of rank 1.
        expected_s: expected duration, once the files are made.
        run: makes it.
        files: required files.
        facts: what the measurement depends on besides the common settings.
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
    """The lab that makes measurements.

    Args:
        site: the device.
        scale: sizes of the models.
        shelf: their files.
        threads: threads of the host.
        vram_bytes: requested ceiling.
        peers: folder of llama.cpp's own programs, or None.
        say: called with a measurement's progress.
        verbose: let llama.cpp's log through.

    Attributes:
        peak_bytes: largest rise of the device's memory since :meth:`begin`.
        over_bytes: ceiling that was exceeded, or None.
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
        """True if the device is an RPC worker's."""
        return self.site.card.kind == RPC

    @property
    def ceiling_bytes(self) -> int:
        """Memory that may be used on the device."""
        return self.vram_bytes or self.site.card.total_bytes

    def pair_ceiling(self, pair: Pair) -> int:
        """Return the ceiling for a pair that shall not fit: the device's, or, if it would fit, the notebook's
        proportion plus the driver's overhead.
        """
        known = [self.shelf.known(file).header.weight_bytes() for file in (pair.target, pair.draft)]
        if self.vram_bytes is not None and self.vram_bytes < sum(known):
            return self.vram_bytes
        return min(int(_NOTEBOOK_SHARE * sum(known)) + self.overhead_bytes, self.ceiling_bytes)

    def begin(self) -> None:
        """Reset the memory figures."""
        self.peak_bytes = self.over_bytes = None

    @contextmanager
    def watch(self, ceiling_bytes: int | None = None) -> Iterator[Meter]:
        """Measure the device's memory while the block runs.

        Args:
            ceiling_bytes: limit; None: the device's own ceiling; 0: none.
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
        """Bytes that the planner adds for the driver: measured before, or a guess.

        0 if nobody counts the device's memory: there the ceiling applies to llama.cpp's own bytes.
        """
        card = self.site.card
        counts = card.driver and not self.is_remote
        return history.known_overhead(self.cache, card.description, card.name, card.total_bytes) if counts else 0

    def learn_overhead(self, seen_bytes: int) -> None:
        """Save the driver's largest measured overhead."""
        card = self.site.card
        if not card.driver:
            return
        known = self.overhead_bytes
        if backends.is_guess(known) or seen_bytes > known:
            history.record_overhead(self.cache, card.description, seen_bytes)
            self._plans.clear()

    # ---- plans

    def options(self, **changes: Any) -> DecoderOptions:
        """Return a decoder's options at this scale."""
        return DecoderOptions(**{"ctx_size": self.scale.ctx_size, "threads": self.threads, **changes})

    def speed(self) -> MachineProfile:
        """Return this machine's known speeds: measured, or before that a catalogue's guess."""
        card = self.site.card
        known = None if self.is_remote else cards.recognise(card.description, card.total_bytes)
        return machine_profile.expected_speeds({card.name: known}, folder=self.cache, threads=self.threads)

    def machine(self, ceiling_bytes: int) -> plan.PlanMachine:
        """Return this machine with so much of the device; one that is no GPU counts as one, or no layers would move."""
        card, overhead = self.site.card, self.overhead_bytes
        shown = plan.OffloadDevice(card.name, card.description, ceiling_bytes, ceiling_bytes, overhead)
        headroom = min(DEFAULT_HEADROOM_BYTES, int(_HEADROOM_SHARE * ceiling_bytes))
        as_card = catalogue.from_catalogue([cards.find_card(_TYPICAL)], [card.name])
        is_none = self.is_remote or gpus.is_software(card.description)
        return plan.PlanMachine((shown,), host.free_memory_bytes(), headroom, as_card if is_none else self.speed())

    def dry_run(self, requests: Sequence[MemoryRequest]) -> list[ByDevice | str]:
        """Return what llama.cpp would allocate on this device."""
        cards = {self.site.card.name: self.site.card.description}
        with DryRuns(
            cards, simulated=False, rpc=self.site.endpoints(), folder=self.cache, verbose=self.verbose
        ) as runs:
            return runs(requests)

    def request(self, file: File, placement: Placement, context: ContextOptions) -> MemoryRequest:
        """Return the dry run of a model."""
        known = self.shelf.known(file)
        return MemoryRequest(known.header, known.metadata_only, placement, context)

    def estimate(self, request: MemoryRequest) -> DeviceBytes:
        """Return the planner's estimate for the device before a dry run of that very placement."""
        counts = range(request.header.layers + 1)
        some = [replace(request, placement=replace(request.placement, gpu_layers=count)) for count in counts]
        found = MemoryEstimates((self.site.card.name,), self.dry_run).estimates(some)
        return found[request.placement.offloaded(request.header.blocks)][self.site.card.name]

    def plan(self, pair: Pair, ceiling_bytes: int) -> plan.Plan:
        """Return the plan for a pair under a ceiling, cached until the driver's overhead is known better.

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
            self._plans[key] = search_plan(asked, self.machine(ceiling_bytes), self.dry_run)
        return self._plans[key]

    def placed(self, file: File, placement: Placement) -> PlacedModel:
        """Return a placed model for documents."""
        header = self.shelf.known(file).header
        offloaded = placement.offloaded(header.blocks)
        return PlacedModel(file.name, header.layers, offloaded, placement.n_cpu_moe, header.weight_bytes())

    def fitting(self, pair: Pair) -> None:
        """Check that a pair that shall be wholly on the device fits under the ceiling.

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
        """Check one model against the ceiling before loading, by its minimum: weights and cache.

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
