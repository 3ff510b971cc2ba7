"""The device for evidence: a GPU, or an RPC worker on loopback; and a meter for its memory."""

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
_LOOK_S, _METER_S = 0.1, 0.25  # a meter runs while something is timed
_OTHERS_BYTES = 2 << 30  # others' memory that makes a GPU busy; a driver and a desktop take less
_OTHERS_SHARE = 0.1  # share of a GPU's time
_OWN_BYTES = 96 << 20  # an RPC worker's own memory for its libraries and messages
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
    """Device for layers, in addition to the host."""

    @property
    def card(self) -> Card:
        """Description of the device."""
        ...

    @property
    def slack_bytes(self) -> int:
        """Bytes by which :meth:`used_bytes` may exceed a ceiling before it matters."""
        ...

    def endpoints(self) -> tuple[str, ...]:
        """Return RPC workers to add to a process that uses it; restart one that has died."""
        ...

    def used_bytes(self) -> int | None:
        """Return the memory in use now; None if nobody counts it."""
        ...

    def renew(self) -> None:
        """Make it release memory that it retains after freeing."""
        ...

    def settle(self) -> None:
        """Wait until memory that was just freed is no longer counted."""
        ...

    def close(self) -> None:
        """Release the device."""
        ...


# ---- a GPU -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalCard:
    """A local GPU."""

    card: Card
    slack_bytes: int = 0

    def endpoints(self) -> tuple[str, ...]:
        """Return none: llama.cpp finds it by itself."""
        return ()

    def used_bytes(self) -> int | None:
        """Return NVML's count over all GPUs; None for a GPU that is not NVIDIA's."""
        return gpus.nvml_used_bytes() if self.card.driver else None

    def renew(self) -> None:
        """Do nothing: a GPU retains nothing of a process that has ended."""

    def settle(self) -> None:
        """Wait for the driver, which takes a moment after a process has ended."""
        until, before = time.monotonic() + _SETTLE_S, self.used_bytes()
        while before is not None and time.monotonic() < until:
            time.sleep(_LOOK_S)
            if (used := self.used_bytes()) == before:
                return
            before = used

    def close(self) -> None:
        """Do nothing."""


def find_card(name: str, here: probe.ProbeResult, survey: gpus.GpuSurvey) -> Card:
    """Find the GPU that ``name`` means.

    Args:
        name: ``auto``, ``cuda``, or the start of llama.cpp's device names, e.g. ``vulkan``; ``auto`` excludes programs
            that act as a GPU.
        here: llama.cpp's devices.
        survey: NVML's GPUs.

    Raises:
        GgufspecError: no device has this name, or it cannot be used; says why.
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


def _missing(wanted: str, here: probe.ProbeResult, survey: gpus.GpuSurvey) -> GgufspecError:
    """Return the error that says why there is no such device."""
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
        return GgufspecError(
            f"llama.cpp was built without CUDA and leaves {names} idle", install.repair_command("cuda")
        )
    return GgufspecError(
        f"llama.cpp has CUDA and sees no card, NVIDIA's driver {survey.driver} sees {names}: the driver is older than "
        "the build's CUDA, or CUDA_VISIBLE_DEVICES hides the card",
        "unset CUDA_VISIBLE_DEVICES; nvidia-smi tells which CUDA the driver knows: update it, or build with that",
    )


def others(survey: gpus.GpuSurvey, own: Sequence[int] = ()) -> str:
    """Name other users of the GPUs; empty if none is worth mentioning.

    Args:
        survey: NVML's view before anything of ours runs.
        own: our process ids.
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
    """This machine's CPU as a device: an RPC worker in a separate process, which ends with this one.

    Args:
        threads: threads of the worker.

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
        spec = rpc.RpcWorkerJob("127.0.0.1", 0, self._threads, ("CPU",))
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
                if kind == "event" and said[1]["event"] == "serving":
                    self._endpoint = said[1]["endpoint"]
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
        """Return the worker's address, after restarting it if it died."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        return (self._endpoint,)

    def used_bytes(self) -> int | None:
        """Return the worker's resident memory, without buffer pages that were never touched."""
        return host.resident_bytes(self._process.pid) if self._process else None

    def renew(self) -> None:
        """Start another worker: the C library retains small freed buffers and reuses them."""
        self._start()

    def settle(self) -> None:
        """Do nothing: a worker frees at once."""

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


# ---- device memory ----------------------------------------------------------------------------------------------


@dataclass
class Meter:
    """Samples a device's memory periodically while a block runs.

    Args:
        used_bytes: returns the memory in use; None if nobody counts it.

    Attributes:
        rise_bytes: largest rise since the block began.
    """

    used_bytes: Callable[[], int | None]
    rise_bytes: int | None = None
    _before: int | None = field(default=None, init=False)

    def look(self) -> None:
        """Take another sample."""
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
    """Open the device that ``name`` means; also yield notes about it.

    Args:
        name: ``rpc``, or as for :func:`find_card`.
        threads: threads of an RPC worker.
        share: allow a GPU that others use.

    Raises:
        GgufspecError: no device has this name, or others use it.
    """
    if name == RPC:
        loopback = Loopback(threads)
        try:
            yield loopback, _OF_LOOPBACK
        finally:
            loopback.close()
        return
    survey = gpus.survey()  # before anything of ours is on a GPU
    card = find_card(name, probe.inspect(), survey)
    busy = others(survey) if card.driver else ""
    if busy and not share:
        raise GgufspecError(f"the card is busy with other work: {busy}", "end it, or --busy measures all the same")
    notes = (busy, "" if card.driver else _UNWATCHED)
    yield LocalCard(card), tuple(filter(None, notes))
