"""Self-check that llama.cpp, as built for this machine, computes correctly; a crash ends only a child process.

The bundled target is expanded to row sizes that the K types allow (:mod:`ggufspec.models.expansion`) and written in
common file types. Each file is decoded at batch sizes 1, 4 and 16 with flash attention on and off, by the host's
kernels and, if there is a device, with all layers on it. There are two comparisons, both of logits:

- llama.cpp against plain NumPy on the same file's numbers (:mod:`ggufspec.verify.reference`) finds wrong kernels.
- NumPy on the file's numbers against stored logits of the F16 model (``selfcheck.json``, made with float64 arithmetic
  and another reader, tests/evidence/selfcheck.py) finds wrong files, a wrong quantiser, and faults in NumPy.

The stored logits therefore depend neither on the machine nor on how a version of llama.cpp rounds weights. The error is
the root mean square difference divided by the standard deviation of the correct logits, at the worst position;
docs/decisions/023-a-build-proves-itself.md explains the limits.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from ggufspec import child
from ggufspec.child.death import CHECK_HINT
from ggufspec.errors import ChildError, GgufspecError
from ggufspec.files.write import scratch
from ggufspec.llamacpp.devices import has_gpu
from ggufspec.llamacpp.gguf import parse_header
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.llamacpp.quantize import to_numbers
from ggufspec.models import expanded
from ggufspec.models.expansion import LlamaShape
from ggufspec.models.profile import demo_pair
from ggufspec.schema.doctor import CheckRow, CheckStep, SelfCheck
from ggufspec.verify.reference import Floats, logits

TYPES = ("F16", "Q8_0", "Q4_0", "Q4_K_M", "Q3_K_S")
BATCHES = (1, 4, 16)
FLASH = ("on", "off")
SHAPE = LlamaShape(width=512, layers=8, heads=8, kv_heads=2, ffn=1024, vocab=4096, head_size=64)
KERNEL_ERROR = 0.06  # maximum error of llama.cpp relative to NumPy
WEIGHT_ERROR = 0.4  # maximum error of the quantised file relative to the F16 model
LIMIT_S = 120.0  # seconds for one file type, after which the child is considered hung

# "tokens": all decoded tokens; "ids": every 63rd vocabulary entry, so that each lane of every kernel is used; "logits":
# (positions, ids) after the last tokens
STORED = Path(__file__).with_name("selfcheck.json")


def error_of(found: Floats, right: Floats) -> float:
    """Return the worst row's RMS difference divided by the correct row's standard deviation; offsets are ignored.

    Args:
        found: (rows, ids) logits to check.
        right: (rows, ids) correct logits.

    Returns:
        0 for equal rows, about 1.4 for unrelated ones; a million if a number is not finite.
    """
    if not np.isfinite(found).all():
        return 1e6
    found, right = (rows - rows.mean(-1, keepdims=True) for rows in (np.float64(found), np.float64(right)))
    errors = np.sqrt(((found - right) ** 2).mean(-1)) / right.std(-1)
    return float(min(errors.max(), 1e6))


# ---- in the child ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SelfcheckJob:
    types: tuple[str, ...]
    limit_s: float = LIMIT_S


@dataclass(frozen=True, slots=True)
class SelfcheckResult:
    """Empty result; the measurements are events: ``step`` before each step that may fail, ``row`` for each error."""


def run(spec: SelfcheckJob, emit: child.Emit, stopping: threading.Event) -> SelfcheckResult:
    for type_name in spec.types:
        if stopping.is_set():
            break
        with scratch() as folder, child.within(spec.limit_s, f"the self-check of {type_name}", CHECK_HINT):
            _check_type(CheckStep(type_name), folder, emit)
    return SelfcheckResult()


def make_models(type_name: str, path: Path) -> None:
    """Write the model to check, in one file type, in this process."""
    spec = expanded.ExpandJob(demo_pair()[0], SHAPE, type_name, path)
    expanded.run(spec, lambda _: None, threading.Event())


def _check_type(step: CheckStep, folder: Path, emit: child.Emit) -> None:
    def begin(next_step: CheckStep) -> CheckStep:
        emit({"event": "step"} | asdict(next_step))
        return next_step

    def measured(found: Floats, right: Floats) -> None:
        emit({"event": "row", "off_by": error_of(found, right)} | asdict(step))

    figures = json.loads(STORED.read_text("utf-8"))
    tokens, stored = figures["tokens"], np.array(figures["logits"])
    compared = slice(-len(stored), None), figures["ids"]
    path = folder / f"{step.type}.gguf"
    step = begin(step)
    make_models(step.type, path)
    right = _reference(path, tokens)[compared]
    measured(right, stored)
    for place, layers in (("host", 0), ("device", -1))[: 2 if has_gpu() else 1]:
        step = begin(CheckStep(step.type, place))
        with Model(path, Placement(layers)) as model:
            for flash in FLASH:
                step = begin(CheckStep(step.type, place, flash))
                # One thread, because llama.cpp's threads spin: several would take a minute if another process is busy.
                options = ContextOptions(ctx_size=64, max_outputs=max(BATCHES), threads=1, flash_attn=flash)
                with closing(Context(model, options)) as context:
                    for batch in BATCHES:
                        step = begin(replace(step, batch=batch))
                        measured(_decoded(context, batch, tokens)[compared], right)


def _reference(path: Path, tokens: Sequence[int]) -> Floats:
    """Return (tokens, vocab) logits, computed by NumPy from the file's numbers."""
    data = path.read_bytes()
    file = parse_header(data)
    weights = {}
    for tensor in file.tensors:
        start = file.data_offset + tensor.offset
        weights[tensor.name] = to_numbers(tensor.type, data[start : start + tensor.size_bytes], tensor.shape[::-1])
    return logits(weights, file.metadata, tokens)


def _decoded(context: Context, batch: int, tokens: Sequence[int]) -> Floats:
    """Return (tokens, vocab) logits, computed by llama.cpp."""
    context.rewind(0)
    starts = range(0, len(tokens), batch)
    return np.concatenate([context.decode(tokens[i : i + batch], batch).copy() for i in starts])


# ---- in the parent --------------------------------------------------------------------------------------------------


def self_check(types: Sequence[str] = TYPES, on_step: Callable[[CheckStep], None] = lambda _: None) -> SelfCheck:
    """Check llama.cpp in a child process; whenever a child dies, another checks the remaining types.

    Args:
        types: some of ``TYPES``.
        on_step: called before each step.

    Returns:
        A row for every measurement, and one for every failure of any kind.

    Raises:
        Interrupted: Ctrl-C.
    """
    began = time.monotonic()
    rows: list[CheckRow] = []
    left, step = list(types), CheckStep(types[0])

    def heard(event: child.Event) -> None:
        nonlocal step
        kind, error = event.pop("event"), event.pop("off_by", None)
        step = CheckStep(**event)
        if kind == "step":
            on_step(step)
        else:
            limit = KERNEL_ERROR if step.place else WEIGHT_ERROR
            rows.append(CheckRow(step, error, "ok" if error <= limit else "wrong"))

    while left:
        step = CheckStep(left[0])
        try:
            child.call(__name__, SelfcheckJob(tuple(left), LIMIT_S), SelfcheckResult, on_event=heard)
            left = []
        except GgufspecError as error:
            ended_by = error.ended_by if isinstance(error, ChildError) else ""
            outcome = "silence" if ended_by == "deadline" else ended_by or "failed"
            rows.append(CheckRow(step, None, outcome, error.message))
            left = left[left.index(step.type) + 1 :]
    return SelfCheck(tuple(rows), round(time.monotonic() - began, 2), KERNEL_ERROR)
