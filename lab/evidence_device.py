"""The device that evidence is taken on: found, or an RPC worker on loopback; and a look at its memory meanwhile."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from ggufspec.child.session import COMMAND
from ggufspec.errors import ChildError, GgufspecError, UsageError
from ggufspec.hardware import gpus, host, install
from ggufspec.llamacpp import probe, rpc
from ggufspec.llamacpp.devices import Device
from ggufspec.schema import codec
from ggufspec.schema.text import gib
from lab.evidence_documents import Card

RPC = "rpc"
_LOOK_S, _METER_S = 0.1, 0.25  # a meter looks while something is timed
_OTHERS_BYTES = 2 << 30  # in others' hands, from which on a card is busy; a driver and a desktop take less
_OTHERS_SHARE = 0.1  # of a card's time
_OWN_BYTES = 96 << 20  # that an RPC worker takes for itself, its libraries and its messages
_START_S = 60.0
_SETTLE_S = 3.0
_UNWATCHED = (
    "nobody counts this card's memory, so that no ceiling is watched: NVML, which is asked through nvidia-ml-py, knows "
    "NVIDIA's alone"
)
_OF_LOOPBACK = (
    "the device is an RPC worker on loopback: its speed is this machine's CPU's, and it is planned for as for a card",
    "what the device counts is the worker's resident memory, in which pages are not that were never touched",
)


class Site(Protocol):
    """Where layers go besides the host."""

    @property
    def card(self) -> Card:
        """What it is."""
        ...

    @property
    def slack_bytes(self) -> int:
        """How far over a ceiling :meth:`used_bytes` may be before it means something."""
        ...

    def endpoints(self) -> tuple[str, ...]:
        """RPC workers to be added to a process that uses it; one that has died is started again."""
        ...

    def used_bytes(self) -> int | None:
        """Memory in use now; None where nobody counts it."""
        ...

    def renew(self) -> None:
        """Have it give back what it keeps of what was freed."""
        ...

    def settle(self) -> None:
        """Wait until what was freed just now is not counted any more."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


# ---- a card ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalCard:
    """A card of this machine."""

    card: Card
    slack_bytes: int = 0

    def endpoints(self) -> tuple[str, ...]:
        """None: llama.cpp finds it by itself."""
        return ()

    def used_bytes(self) -> int | None:
        """As NVML counts it, on all cards; None of a card that is not NVIDIA's."""
        return gpus.used_bytes() if self.card.driver else None

    def renew(self) -> None:
        """A card keeps nothing of a process that has ended."""

    def settle(self) -> None:
        """The driver takes a moment after a process has ended."""
        until, before = time.monotonic() + _SETTLE_S, self.used_bytes()
        while before is not None and time.monotonic() < until:
            time.sleep(_LOOK_S)
            if (used := self.used_bytes()) == before:
                return
            before = used

    def close(self) -> None:
        """Nothing is held."""


def find_card(name: str, here: probe.Result, survey: gpus.Survey) -> Card:
    """The card that ``name`` means.

    Args:
        name: ``auto``, ``cuda``, or how llama.cpp's names of devices begin, ``vulkan`` say; a program that acts as a
            card is none for ``auto``.
        here: what llama.cpp sees.
        survey: what NVML sees.

    Raises:
        GgufspecError: there is none, or why it cannot be used.
    """
    wanted = "" if name == "auto" else name.lower()
    seen = [device for device in here.devices if wanted or not device.is_software]
    found = [d for d in seen if d.kind == "gpu"] or [d for d in seen if d.kind == "igpu"]
    matching = [device for device in found if device.name.lower().startswith(wanted)]
    if not matching:
        raise _missing(wanted, here, survey)
    if len(found) > 1:
        names = ", ".join(f"{device.name} ({device.description.strip()})" for device in found)
        raise UsageError(
            f"evidence is of one card, and llama.cpp sees {len(found)}: {names}",
            f"CUDA_VISIBLE_DEVICES=0 scripts/gpu_evidence --device {name}",
        )
    device = matching[0]
    known = gpus.of_device(device.device_id, device.description.strip(), survey.cards)
    return Card(
        name=device.name,
        description=known.name if known else device.description.strip(),
        kind=device.name.rstrip("0123456789").lower(),
        total_bytes=(known and known.total_bytes) or device.total_bytes,
        ceiling_bytes=None,
        driver=known.driver if known else "",
    )


def _missing(wanted: str, here: probe.Result, survey: gpus.Survey) -> GgufspecError:
    """Why there is no such device, as far as can be told."""
    without = "--device rpc measures with a worker on loopback instead"
    if wanted not in ("", "cuda"):
        names = ", ".join(device.name for device in here.devices)
        return UsageError(f"llama.cpp has no device called {wanted}", f"it has {names}, and rpc; {without}")
    if survey.problems:
        return GgufspecError(f"NVML: {'; '.join(survey.problems)}", "nvidia-smi; then reboot, or " + without)
    if survey.driver is None:
        return GgufspecError("there is no NVIDIA driver on this machine", without)
    if not survey.cards:
        return GgufspecError(f"NVIDIA's driver {survey.driver} finds no card", "lspci | grep -i nvidia; or " + without)
    names = ", ".join(card.name for card in survey.cards)
    if "CUDA" not in here.backends:
        return GgufspecError(f"llama.cpp was built without CUDA and leaves {names} idle", install.mend("cuda"))
    return GgufspecError(
        f"llama.cpp has CUDA and sees no card, NVIDIA's driver {survey.driver} sees {names}: the driver is older than "
        "the build's CUDA, or CUDA_VISIBLE_DEVICES hides the card",
        "unset CUDA_VISIBLE_DEVICES; nvidia-smi tells which CUDA the driver knows: update it, or build with that",
    )


def others(survey: gpus.Survey, own: Sequence[int] = ()) -> str:
    """Who else is on the cards, by name; empty where nobody is to speak of.

    Args:
        survey: what NVML sees before anything of ours runs.
        own: process ids that are ours.
    """
    said = []
    for card in survey.cards:
        users = [process for process in card.processes if process.pid not in own]
        is_busy = card.utilisation is not None and card.utilisation > _OTHERS_SHARE
        used_bytes = card.used_bytes or 0
        if used_bytes < _OTHERS_BYTES and not is_busy:
            continue
        names = [
            f"{process.name.rpartition('/')[2] or 'process'} ({process.pid}"
            + (f", {gib(process.used_bytes)} GiB)" if process.used_bytes else ")")
            for process in users
        ]
        how = f"{card.name} has {gib(used_bytes)} GiB in use" + (
            f" and is {card.utilisation:.0%} busy" if is_busy else ""
        )
        said.append(f"{how}: {', '.join(names) or 'by processes that cannot be seen from here'}")
    return "; ".join(said)


# ---- a worker on loopback --------------------------------------------------------------------------------------------


class Loopback:
    """This machine's CPU as a device: an RPC worker in a process of its own, which ends with this one.

    Args:
        threads: of the worker.

    Raises:
        GgufspecError: it does not start, or this llama.cpp has no RPC.
    """

    slack_bytes = _OWN_BYTES

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._process: subprocess.Popen[str] | None = None
        self._endpoint = ""
        here = probe.inspect()
        cards = [device for device in here.devices if device.kind in ("gpu", "igpu")]
        if cards:  # llama.cpp would divide the layers over all of them
            raise UsageError(
                f"a worker on loopback is measured alone, and llama.cpp sees {cards[0].description.strip()} too",
                "CUDA_VISIBLE_DEVICES= scripts/gpu_evidence --device rpc hides an NVIDIA card",
            )
        self._start()
        served: list[Device] = list(probe.inspect((self._endpoint,)).devices)
        device = next(device for device in served if device.kind == "gpu")
        self.card = Card(device.name, f"RPC worker on {host.cpu_name()}", RPC, host.total_memory_bytes(), None)

    def _start(self) -> None:
        self.close()
        spec = rpc.Spec("127.0.0.1", 0, self._threads, ("CPU",))
        process = self._process = subprocess.Popen(
            [*COMMAND, rpc.__name__, "-q"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        killer = threading.Timer(_START_S, process.kill)
        killer.start()
        try:
            process.stdin.write(json.dumps({"request": codec.dump(spec)}) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                kind, *said = json.loads(line)
                if kind == "event" and said[0]["event"] == "serving":
                    self._endpoint = said[0]["endpoint"]
                    return
                if kind == "error":
                    raise GgufspecError(*said[1:3])
            raise ChildError("the RPC worker on loopback does not start", "ggufspec worker shows why")
        except BaseException:
            self.close()
            raise
        finally:
            killer.cancel()

    def endpoints(self) -> tuple[str, ...]:
        """The worker's address."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        return (self._endpoint,)

    def used_bytes(self) -> int | None:
        """Resident memory of the worker: pages of a buffer that were never touched are not in it."""
        return host.resident_bytes(self._process.pid) if self._process else None

    def renew(self) -> None:
        """Another worker: the C library keeps small buffers that are freed, and takes them for the next ones."""
        self._start()

    def settle(self) -> None:
        """A worker frees at once."""

    def close(self) -> None:
        """End the worker."""
        if (process := self._process) is not None:
            self._process = None
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()


# ---- its memory ------------------------------------------------------------------------------------------------------


@dataclass
class Meter:
    """Looks at a device's memory from time to time while a block runs.

    Args:
        used_bytes: memory in use now; None where nobody counts it.

    Attributes:
        rise_bytes: the most that it rose by since the block began.
    """

    used_bytes: Callable[[], int | None]
    rise_bytes: int | None = None
    _before: int | None = field(default=None, init=False)

    def look(self) -> None:
        """Look once more."""
        with contextlib.suppress(GgufspecError, OSError):
            used = self.used_bytes()
            if used is not None and self._before is not None:
                self.rise_bytes = max(self.rise_bytes or 0, used - self._before)

    def __enter__(self) -> Self:
        self._before = self.used_bytes()
        self.rise_bytes = None if self._before is None else 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        if self._before is not None:
            self._thread.start()
        return self

    def _run(self) -> None:
        while not self._ended.wait(_METER_S):
            self.look()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()


@contextmanager
def open_site(name: str, threads: int, *, share: bool) -> Iterator[tuple[Site, tuple[str, ...]]]:
    """The device that ``name`` means, and what is to be said of it.

    Args:
        name: ``rpc``, or as :func:`find_card` takes it.
        threads: of an RPC worker.
        share: whether a card may be used that others use.

    Raises:
        GgufspecError: there is none, or others use it.
    """
    if name == RPC:
        loopback = Loopback(threads)
        try:
            yield loopback, _OF_LOOPBACK
        finally:
            loopback.close()
        return
    survey = gpus.survey()  # before anything of ours is on a card
    card = find_card(name, probe.inspect(), survey)
    busy = others(survey) if card.driver else ""
    if busy and not share:
        raise GgufspecError(f"the card is busy with other work: {busy}", "end it, or --busy measures all the same")
    notes = (busy, "" if card.driver else _UNWATCHED)
    yield LocalCard(card), tuple(filter(None, notes))
