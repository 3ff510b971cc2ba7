"""A job for tests of :mod:`ggufspec.child`: it counts, or does what it is told to go wrong."""

from __future__ import annotations

import logging
import os
import sys
import threading
from dataclasses import dataclass

from ggufspec import child
from ggufspec.errors import UsageError


@dataclass(frozen=True)
class Spec:
    count: int
    how: str = ""

    @property
    def environment(self) -> dict[str, str]:
        return {"GGUFSPEC_JOB": self.how} if self.how == "environment" else {}


@dataclass(frozen=True)
class Result:
    counted: int
    pid: int


def run(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Result:
    return count(spec.count, spec.how, emit, stopping)


def count(to: int, how: str, emit: child.Emit, stopping: threading.Event) -> Result:
    if how == "abort":
        sys.stderr.write("GGML_ASSERT(the last word) failed\n")
        os.abort()
    if how == "card":  # ggml_cuda_error in ggml/src/ggml-cuda/ggml-cuda.cu: the reason is in the log, not on stderr
        log = logging.getLogger("ggufspec.llamacpp")
        log.warning("error: a warning is no reason")
        log.error("CUDA error: out of memory")
        log.error("  cudaGetLastError()")
        sys.stderr.write("ggml-cuda.cu:104: CUDA error\n")
        os.abort()
    if how in ("held", "limited"):
        nested: tuple[object, ...] = ()
        for _ in range(64):
            nested = (nested, nested)
        emit({"event": "counted", "number": 0})
        with child.within(0.5 if how == "limited" else 600, "the tuple", "leave it"):
            hash(nested)  # one call of C, for ever
    if how == "kept":
        with child.within(0.5, "the pass", "leave it"):
            pass
        threading.Event().wait(0.7)
    if how == "environment":
        emit({"event": "environment", "job": os.environ["GGUFSPEC_JOB"]})
    if how == "keys":
        emit({"event": "keys", "error": "one", "result": "two", "request": 0})
    if how == "bug":
        raise RuntimeError("a bug of ours")
    if how == "refuse":
        raise UsageError("it cannot be done", "try something else")
    for number in range(to):
        if stopping.is_set() or (how == "patient" and stopping.wait(600)):
            return Result(number, os.getpid())
        emit({"event": "counted", "number": number})
    if how == "deaf":
        threading.Event().wait(600)
    return Result(to, os.getpid())
