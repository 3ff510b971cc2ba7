"""Checks that llama.cpp, as built for this machine, computes correctly; a crash ends only a child.

The bundled target is expanded to rows that the K types allow (:mod:`ggufspec.models.expansion`), written in common file
types, and decoded at batch sizes 1, 4 and 16 with flash attention on and off: on the host's kernels, and with all
layers on the device if there is one. There are two comparisons, both of logits:

- llama.cpp with plain NumPy on the same file's numbers (:mod:`ggufspec.verify.reference`): finds wrong kernels.
- NumPy on the file's numbers with stored figures of the F16 model (``selfcheck.json``, made with float64 arithmetic and
  another reader, tests/evidence/selfcheck.py): finds wrong files, a wrong quantiser, and faults of NumPy.

So the stored figures depend neither on the machine nor on how a version of llama.cpp rounds weights. The measure is the
root mean square of the difference over the spread of the right logits, at the worst position; for these limits see
docs/decisions/023-a-build-proves-itself.md.
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
from ggufspec.llamacpp.gguf import parse
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.llamacpp.quantize import to_numbers
from ggufspec.models import expanded
from ggufspec.models.expansion import Shape
from ggufspec.models.profile import demo_pair
from ggufspec.schema.doctor import CheckRow, CheckStep, SelfCheck
from ggufspec.verify.reference import Floats, logits

TYPES = ("F16", "Q8_0", "Q4_0", "Q4_K_M", "Q3_K_S")
BATCHES = (1, 4, 16)
FLASH = ("on", "off")
SHAPE = Shape(width=512, layers=8, heads=8, kv_heads=2, ffn=1024, vocab=4096, head_size=64)
KERNEL_ERROR = 0.06  # llama.cpp against NumPy
WEIGHT_ERROR = 0.4  # the quantised file against the F16 model
LIMIT_S = 120.0  # seconds for one file type, after which a child counts as hanging

# "tokens": all decoded ones; "ids": every 63rd vocabulary entry, so that no lane of any kernel is left out; "logits":
# (positions, ids) after the last of the tokens
STORED = Path(__file__).with_name("selfcheck.json")


def error_of(found: Floats, right: Floats) -> float:
    """Return the root mean square difference of logits over their spread, of the worst row; constants are ignored.

    Args:
        found: (rows, ids).
        right: (rows, ids), the correct ones.

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
class Spec:
    types: tuple[str, ...]
    limit_s: float = LIMIT_S


@dataclass(frozen=True, slots=True)
class Result:
    """Empty: the results are events, ``step`` before each thing that may fail, ``row`` with a measurement."""


def run(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Result:
    for type_name in spec.types:
        if stopping.is_set():
            break
        with scratch() as folder, child.within(spec.limit_s, f"the self-check of {type_name}", CHECK_HINT):
            _check_type(CheckStep(type_name), folder, emit)
    return Result()


def make(type_name: str, path: Path) -> None:
    """Write the model to check, in one file type, in this process."""
    spec = expanded.Spec(demo_pair()[0], SHAPE, type_name, path)
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
    make(step.type, path)
    right = _reference(path, tokens)[compared]
    measured(right, stored)
    for place, layers in (("host", 0), ("device", -1))[: 2 if has_gpu() else 1]:
        step = begin(CheckStep(step.type, place))
        with Model(path, Placement(layers)) as model:
            for flash in FLASH:
                step = begin(CheckStep(step.type, place, flash))
                # One thread: llama.cpp's threads spin, and a busy neighbour would make this take a minute.
                options = ContextOptions(ctx_size=64, width=max(BATCHES), threads=1, flash_attn=flash)
                with closing(Context(model, options)) as context:
                    for batch in BATCHES:
                        step = begin(replace(step, batch=batch))
                        measured(_decoded(context, batch, tokens)[compared], right)


def _reference(path: Path, tokens: Sequence[int]) -> Floats:
    """Return (tokens, vocab) logits, by NumPy on the file's numbers."""
    data = path.read_bytes()
    file = parse(data)
    weights = {}
    for tensor in file.tensors:
        start = file.data_offset + tensor.offset
        weights[tensor.name] = to_numbers(tensor.type, data[start : start + tensor.size_bytes], tensor.shape[::-1])
    return logits(weights, file.metadata, tokens)


def _decoded(context: Context, batch: int, tokens: Sequence[int]) -> Floats:
    """Return (tokens, vocab) logits, by llama.cpp."""
    context.rewind(0)
    starts = range(0, len(tokens), batch)
    return np.concatenate([context.decode(tokens[i : i + batch], batch).copy() for i in starts])


# ---- in the parent --------------------------------------------------------------------------------------------------


def check(types: Sequence[str] = TYPES, on_step: Callable[[CheckStep], None] = lambda _: None) -> SelfCheck:
    """Check llama.cpp in child processes: one, and another one for the remaining types after each death.

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
            child.call(__name__, Spec(tuple(left), LIMIT_S), Result, on_event=heard)
            left = []
        except GgufspecError as error:
            ended_by = error.ended_by if isinstance(error, ChildError) else ""
            outcome = "silence" if ended_by == "deadline" else ended_by or "failed"
            rows.append(CheckRow(step, None, outcome, error.message))
            left = left[left.index(step.type) + 1 :]
    return SelfCheck(tuple(rows), round(time.monotonic() - began, 2), KERNEL_ERROR)
