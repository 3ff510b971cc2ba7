"""llama.cpp's own program for the same job, the fair rival: same kernels, same files, same prompt."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ggufspec.errors import ChildError, GgufspecError

PROGRAM = "llama-speculative-simple"
_TRIES = 5  # its log, written by a thread, is sometimes lost when it exits
_ENCODED, _DECODED = (re.compile(rf"{word}coded\s+(\d+) tokens in\s+([\d.]+) seconds") for word in ("en", "de"))


class NotThereError(GgufspecError):
    """The program is not on this machine."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as the program reports it, without loading; ``seconds`` excludes the prompt, too."""

    tokens: int
    seconds: float
    prompt_s: float
    drafted: int
    accepted: int


def find(folder: Path | None) -> Path:
    """Find the program in ``folder``.

    Raises:
        NotThereError: it is missing.
    """
    path = folder / PROGRAM if folder else None
    if path is None or not path.is_file():
        where = f" in {folder}" if folder else ""
        raise NotThereError(f"{PROGRAM} is not there{where}", "scripts/peers builds it; --peers FOLDER names another")
    return path


def answer(
    program: Path,
    target: Path,
    draft: Path,
    prompt: str,
    *,
    tokens: int,
    draft_max: int,
    threads: int,
    ctx_size: int,
    offload: bool = True,
    rpc: Sequence[str] = (),
    spec_type: str = "draft-simple",
) -> Answer:
    """Run the program for one greedy answer.

    Args:
        program: from :func:`find`.
        target: the target's file.
        draft: the draft's file.
        prompt: the text to continue.
        tokens: tokens of the answer.
        draft_max: drafted tokens per round.
        threads: CPU threads.
        ctx_size: tokens of context.
        offload: True to put all layers of both on the device.
        rpc: workers whose devices are used.
        spec_type: how it drafts; with ``draft-mtp`` the draft may be the target itself.

    Raises:
        ChildError: it failed, or did not report its timings.
    """
    command = [str(program), "-m", str(target), *(("-md", str(draft)) if draft != target else ())]
    command += ["--spec-type", spec_type, "-p", prompt]
    command += ["-n", str(tokens), "--spec-draft-n-max", str(draft_max), "--temp", "0", "-t", str(threads)]
    command += ["-c", str(ctx_size), *(("-ngl", "99", "-ngld", "99") if offload else ())]
    command += ["--rpc", ",".join(rpc)] if rpc else []
    for _ in range(_TRIES):
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise ChildError(f"{program} cannot be run: {error.strerror}", f"ls -l {program}") from None
        said = done.stdout + done.stderr
        encoded, decoded = _ENCODED.search(said), _DECODED.search(said)
        drafted, accepted = (re.search(rf"n_{word}\s*=\s*(\d+)", said) for word in ("drafted", "accept"))
        if done.returncode:
            break
        if encoded and decoded and drafted and accepted:
            return Answer(int(decoded[1]), float(decoded[2]), float(encoded[2]), int(drafted[1]), int(accepted[1]))
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() or "assert" in line.lower()]
    last = (telling or lines or ["it said nothing"])[-1]
    raise ChildError(f"{PROGRAM} ended with status {done.returncode}: {last[:200]}", " ".join(command[:5]))
