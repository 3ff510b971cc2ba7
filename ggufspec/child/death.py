"""Error for a child process that died: the cause, and what to do about it."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from ggufspec.errors import BlamedError, ChildError

CHECK_HINT = "ggufspec doctor checks how llama.cpp was built; in a checkout scripts/bootstrap --check repairs it"

OnCard = tuple[str, str, str]  # a model, the GPU that holds layers of it, and how to avoid a driver crash
_OF_RPC = re.compile(r"ggml-rpc|\bRPC\b")
# Hints for a child that died, by signal (on Windows, exit status) and by the last line of stderr, in llama.cpp's words
_HINTS = (
    (_OF_RPC, "look at the output of `ggufspec worker`{peers} and start it again, or drop --rpc"),
    (
        re.compile(r"(?i)out of memory|bad_alloc|MemoryError|(failed|unable) to allocate|alloc\w* failed"),
        "lower -c, -ngl or -ngld if memory is short; -v shows llama.cpp's log",
    ),
    (
        re.compile(r"\bsrc/(llama-(arch|hparams|model|vocab)|unicode)|\bgguf\.(cpp|h)|error loading model"),
        "the model's file is damaged or made for another llama.cpp: download it again, or update llama-cpp-python",
    ),
    (re.compile(r"^(SIGSEGV|SIGILL|SIGBUS|SIGFPE|an )"), CHECK_HINT),  # a crash; running out of memory ends differently
    (re.compile(r"^\S"), f"{CHECK_HINT}; -v shows llama.cpp's log"),
    (re.compile(""), "-v shows llama.cpp's log"),
)
_BUILT_IN = re.compile(r"^\S*/vendor/llama\.cpp/")  # folder in which llama-cpp-python was built
_NTSTATUS = {0xC0000005: "an access violation", 0xC000001D: "an illegal instruction"}  # ntstatus.h


def died(
    code: int,
    stderr: str,
    peers: Sequence[str] = (),
    blame: tuple[str, str] | None = None,
    on_cards: Sequence[OnCard] = (),
) -> ChildError:
    """Return the error for a child that ended without an outcome, with the last informative line of its stderr.

    ``peers`` are its RPC workers; ``blame`` is the name of the code that ran under a time limit, and a hint.
    """
    lines = [_BUILT_IN.sub("", line.strip()) for line in stderr.splitlines() if line.strip()]
    telling = [line for line in lines if "GGML_ASSERT" in line or "error" in line.lower() or _OF_RPC.search(line)]
    of_card = [line for line in lines if line.startswith(("CUDA error: ", "ROCm error: "))]  # its abort gives no reason
    last = (of_card or telling or lines or ["it printed nothing"])[-1]
    name = _NTSTATUS.get(code) or (signal.Signals(-code).name if code < 0 else "")
    reason = "out of memory, most likely" if name == "SIGKILL" else last
    if blame:
        return BlamedError(f"{blame[0]} crashed llama.cpp ({name or f'status {code}'}): {reason}", blame[1], name)
    hint = next(hint for pattern, hint in _HINTS if pattern.search(f"{name} {reason}"))
    if on_cards and hint == CHECK_HINT:
        models = " and ".join(dict.fromkeys(model for model, *_ in on_cards))
        card, driver_hint = on_cards[-1][1:]
        text = f"the driver of {card} most likely crashed with {models} loaded: {name}"
        hint = f"{driver_hint}; ggufspec doctor checks the GPU; -ngl 0 -ngld 0 avoids it"
        return ChildError(text + (f", {lines[-1]}" if lines else ""), hint, name)
    hint = hint.format(peers=f" at {', '.join(peers)}" if peers else "")
    if name:
        return ChildError(f"the child process that ran llama.cpp was ended by {name}: {reason}", hint, name)
    return ChildError(f"the child process ended with status {code}: {last}", hint)
