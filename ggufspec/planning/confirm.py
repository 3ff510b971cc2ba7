"""Asks llama.cpp's dry run and keeps its answers, so that the same question costs a file read the next time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from ggufspec import cache
from ggufspec.errors import GgufspecError
from ggufspec.hardware import installation
from ggufspec.llamacpp.dryrun import Answer, Request, Spec, ask
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.planning.memory import HOST, Bytes


class UnconfirmedError(GgufspecError):
    """This llama.cpp can make no dry run, so that the formula has the last word."""


def _kept(path: Path) -> Answer | None:
    """The answer in a file; None where there is none, or no such answer."""
    answer = cache.read(path, Answer)
    if answer is None:
        return None
    sizes = [size for allocated in answer.devices.values() for size in asdict(allocated).values()]
    return answer if min(sizes, default=0) >= 0 <= answer.output else None


class Confirmer:
    """Callable: what llama.cpp would allocate for each request, by device; its words where it refuses.

    Args:
        cards: what each card is, by llama.cpp's name and in its order: another card may be CUDA0 tomorrow.
        paper: whether paper cards stand for them, since they are not here.
        rpc: RPC workers to ask, where the cards are real.
        folder: where answers are kept.
        verbose: let llama.cpp's log through.

    Raises:
        UnconfirmedError: the llama.cpp that is installed can make no dry run.
        GgufspecError: an RPC worker does not answer, or llama.cpp died.
    """

    def __init__(
        self, cards: Mapping[str, str], *, paper: bool, rpc: Sequence[str], folder: Path, verbose: bool = False
    ) -> None:
        self._cards = dict(cards)
        self._paper = paper
        self._rpc = tuple(rpc)
        self._folder = folder / "confirmed"
        self._verbose = verbose
        self._known: dict[str, Answer] = {}

    def __call__(self, requests: Sequence[tuple[Path, Placement, ContextOptions]]) -> list[dict[str, Bytes] | str]:
        """Answers in the order of ``requests``; those not known yet are asked together, in one child process."""
        wanted = [Request(*request) for request in requests]
        keys = [self._key(request) for request in wanted]
        for key in keys:
            if key not in self._known and (kept := _kept(self._folder / f"{key}.json")):
                self._known[key] = kept
        unknown = {key: request for key, request in zip(keys, wanted, strict=True) if key not in self._known}
        if unknown:
            ordered = sorted(unknown.items(), key=lambda item: (str(item[1].path), str(item[1].placement)))
            paper_cards = len(self._cards) if self._paper else 0
            spec = Spec(tuple(request for _, request in ordered), () if self._paper else self._rpc, paper_cards)
            result = ask(spec, verbose=self._verbose)
            if result.unable:
                raise UnconfirmedError(result.unable, installation.mend(source=True))
            names = {HOST: HOST} | dict(zip(result.offload, self._cards, strict=False))
            for (key, _), answer in zip(ordered, result.answers, strict=True):
                renamed = Answer({names[n]: a for n, a in answer.devices.items()}, answer.output, answer.error)
                self._known[key] = renamed
                cache.write(self._folder / f"{key}.json", renamed)
        return [self._bytes(self._known[key]) for key in keys]

    def _bytes(self, answer: Answer) -> dict[str, Bytes] | str:
        if answer.error:
            return answer.error
        found = {name: Bytes() for name in (HOST, *self._cards)}
        found |= {name: Bytes(a.weights, a.kv, a.compute) for name, a in answer.devices.items()}
        found[HOST] += Bytes(overhead=answer.output)
        return found

    def _key(self, request: Request) -> str:
        """Where the answer is kept. Threads change nothing; real cards differ, paper ones do not."""
        context = asdict(request.context) | {"threads": 1}
        question = [
            request.path.name,
            asdict(request.placement),
            context,
            len(self._cards) if self._paper else list(self._cards.items()),
            self._rpc,
            version("llama-cpp-python"),
        ]
        return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:32]
