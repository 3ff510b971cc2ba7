"""Whether the quick tier finds faults: each is put into a copy of the checkout, one at a time, and the tests run there.

.venv/bin/python tests/evidence/injected_faults.py                # about 10 minutes
.venv/bin/python tests/evidence/injected_faults.py --only leaked  # those whose name has this in it; not saved

A fault is a few characters of one module. The tests of the files that its line names are run, of the quick tier alone,
up to the first that fails; the same tests without a fault come first and must pass.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, save

PATIENCE_S = 600  # of a fault that makes a test wait for ever


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in a file of the package, where it occurs once; ``tests`` are the files that are run."""

    name: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = (
    Fault(
        "a wrong acceptance: a tenth too often at p/q",
        "decoding/rules/speculative.py",
        "return np.minimum(1, p / q)",
        "return np.minimum(1, p * 11 / (q * 10))",
        "test_acceptance test_acceptance_statistics",
    ),
    Fault(
        "a wrong acceptance: after a rejection the target's whole distribution",
        "decoding/rules/speculative.py",
        "excess = np.maximum(p - q, 0)",
        "excess = np.maximum(p, 0)",
        "test_acceptance test_acceptance_statistics",
    ),
    Fault(
        "a wrong bonus token: by the row before the last",
        "decoding/rules/coupled.py",
        "self._choose(self.penalised(rows[len(drafted)], last), last)",
        "self._choose(self.penalised(rows[max(len(drafted) - 1, 0)], last), last)",
        "test_acceptance test_loop real/test_identity",
    ),
    Fault(
        "the noise of another place of the text",
        "decoding/rules/coupled.py",
        "own = self._choose(row, position + i)",
        "own = self._choose(row, position + i + 1)",
        "test_acceptance test_loop real/test_identity",
    ),
    Fault(
        "a rejected token stays in the cache",
        "decoding/answer.py",
        "self._context.rewind(length - 1)",
        "self._context.rewind(length)",
        "test_group real/test_identity",
    ),
    Fault(
        "a lost byte in the planner: of the weights of the host",
        "planning/memory.py",
        "            found[device] += size\n    found",
        "            found[device] += size - (device == 0)\n    found",
        "test_memory test_search real/test_plan_loads",
    ),
    Fault(
        "a lost byte in the planner: every value of the cache",
        "planning/memory.py",
        "// block_v * bytes_v",
        "// block_v * (bytes_v - 1)",
        "test_memory test_search real/test_plan_loads",
    ),
    Fault(
        "a leaked child: one at work is neither ended nor waited for",
        "child/session.py",
        """            if self._reader.is_alive():
                self._process.kill()
            self._process.wait()
            self._reader.join()
            self._stdout.close()
            self._log.close()""",
        """            self._log.close()""",
        "test_child real/test_session test_interrupt",
    ),
    Fault(
        "an orphan: a child at work outlives its parent",
        "child/__main__.py",
        "threading.Thread(target=receive, daemon=True)",
        "threading.Thread(target=_receive, args=(sys.stdin, requests), daemon=True)",
        "test_child test_interrupt",
    ),
    Fault(
        "a bad exit code: 0 of what failed",
        "cli/app.py",
        "return _fail(arguments, error.message, _corrected(arguments, error), error.exit_code)",
        "return _fail(arguments, error.message, _corrected(arguments, error), 0)",
        "test_bad_input test_cli",
    ),
    Fault(
        "a bad exit code: 1 of wrong usage",
        "cli/app.py",
        "_message(error), _usage_hint(error), 2)",
        "_message(error), _usage_hint(error), 1)",
        "test_bad_input test_cli",
    ),
    Fault(
        "a verdict from the median alone",
        "bench/versus.py",
        "return BenchVerdict(enough and least > 1, text, why)",
        "return BenchVerdict(enough and speedup.median > 1, text, why)",
        "test_versus",
    ),
    Fault(
        "an interval that is too narrow",
        "bench/statistics.py",
        "(2.5, 97.5)",
        "(5, 95)",
        "test_stats test_versus",
    ),
    Fault(
        "cached timings of another machine is believed",
        "decoding/policy/latency_cache.py",
        "host.cpu_name(), names",
        "'', names",
        "test_latency_cache",
    ),
    Fault(
        "a damaged download is taken",
        "models/hub/download.py",
        "is_whole = found.hexdigest() == self._item.sha256",
        "is_whole = True",
        "test_pull",
    ),
    Fault(
        "a draft of another vocabulary is taken",
        "models/compat.py",
        "if one.digest != other.digest and (found := compare()):",
        "if one.digest == other.digest and (found := compare()):",
        "test_compat test_bad_input",
    ),
    Fault(
        "a placement of the target's that goes to the draft",
        "api/resolve.py",
        "fixed = replace(options, target=target, draft=draft)",
        "fixed = replace(options, draft=target)",
        "test_shared_options",
    ),
    Fault(
        "a verdict on a pair that is dropped: its warnings",
        "api/pairs.py",
        "options, warnings = judged(target, draft, options)",
        "options, _ = judged(target, draft, options)",
        "test_compat",
    ),
    Fault(
        "a text stays in the prompt's cache after a failure",
        "decoding/answer.py",
        "            self._text.clear()  # the caches are in an unknown state\n",
        "",
        "real/test_answers",
    ),
    Fault(
        "an answer's stop reason: length for one that ends at the last token",
        "decoding/answer.py",
        "        elif ends:\n",
        "        elif ends and self.count < request.max_tokens:\n",
        "real/test_answers",
    ),
    Fault(
        "a catch-up that is not rewound",
        "decoding/drafters/model.py",
        "        self.model.rewind(self.model.length)  # all of these tokens are final\n",
        "",
        "test_drafters test_loop",
    ),
    Fault(
        "a grammar that is not rewound after a rejected draft",
        "decoding/grammar.py",
        "        del self._states[settled + same + 1 :]\n",
        "",
        "unit/test_grammar",
    ),
    Fault(
        "serve: an answer that has ended counts as running",
        "serve/engine.py",
        "answer = self._running.pop(number)",
        "answer = self._running[number]",
        "test_serve_engine",
    ),
    Fault(
        "serve: a conversation that was answered counts as unused",
        "serve/session.py",
        "        self._used[choice.sequence] = self._requests\n",
        "",
        "test_conversations",
    ),
    Fault(
        "a chat's switch that changes another field",
        "chat/commands.py",
        'name = "temperature" if row.name == "temp" else row.name',
        'name = "temperature" if row.name.startswith("t") else row.name',
        "test_chat_commands",
    ),
    Fault(
        "an export without a flag: the type of the draft's value cache",
        "reports/export.py",
        '        "-ctvd": context.cache_type_v,\n',
        "",
        "test_export",
    ),
    Fault(
        "a tune trial whose seconds count twice",
        "tune/run.py",
        "        seconds = self.clock() - began\n",
        "        seconds = self.clock() - began\n        self.spent_s += seconds\n",
        "unit/test_tune",
    ),
    Fault(
        "a budget that forgets all but the last answer",
        "bench/answers.py",
        "self.spent_s += self.clock() - began",
        "self.spent_s = self.clock() - began",
        "test_versus",
    ),
    Fault(
        "a download that resumes at the wrong byte",
        "models/hub/download.py",
        'f"bytes={begin}-{size - 1}"',
        'f"bytes={begin + 1}-{size - 1}"',
        "test_pull",
    ),
    Fault(
        "a download that begins anew behind what was there",
        "models/hub/download.py",
        "                file.truncate(0)\n                begin = 0\n",
        "                begin = 0\n",
        "test_pull",
    ),
    Fault(
        "a run log that keeps a torn line",
        "bench/run_log.py",
        "        if whole < len(content):\n            os.truncate(self.path, whole)\n",
        "",
        "test_run_log",
    ),
    Fault(
        "a card's budget without its headroom",
        "planning/plan.py",
        "max(0, card.free_bytes - self.headroom_bytes)",
        "max(0, card.free_bytes)",
        "test_search",
    ),
    Fault(
        "a report that says another mode",
        "reports/bench.py",
        "for mode, one in document.failures.items()]",
        "for mode, one in zip(document.runs, document.failures.values())]",
        "test_versus",
    ),
)


def copied(folder: Path) -> Path:
    """A copy of the checkout's files: those that git knows, and new ones that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, folder / name)
    return folder


def tested(folder: Path, tests: str, patience_s: float) -> tuple[list[str], bool, float]:
    """(tests that failed, whether all passed, seconds) of the copy's quick tier, up to the first failure."""
    files = [str(file) for name in tests.split() for file in folder.glob(f"tests/**/{name}.py")]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tier", "quick", *files]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    began, output = time.monotonic(), ""
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as pytest:
        try:
            output = pytest.communicate(timeout=patience_s)[0]
        except subprocess.TimeoutExpired:
            os.killpg(pytest.pid, signal.SIGKILL)
            return [f"no end within {patience_s} s"], False, time.monotonic() - began
    failed = re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(\S+(?: \S+)*?)(?: - .*)?$", output, re.MULTILINE)
    return failed, pytest.returncode == 0, time.monotonic() - began


def injected(folder: Path, fault: Fault) -> dict[str, Any]:
    """What the tests say of one fault; the copy is whole again afterwards."""
    file = folder / "ggufspec" / fault.file
    whole = file.read_text(encoding="utf-8")
    assert whole.count(fault.old) == 1, f"{fault.file} has not once: {fault.old}"
    file.write_text(whole.replace(fault.old, fault.new), encoding="utf-8")
    try:
        failed, passed, seconds = tested(folder, fault.tests, PATIENCE_S)
    finally:
        file.write_text(whole, encoding="utf-8")
    return {
        "fault": fault.name,
        "file": f"ggufspec/{fault.file}",
        "before": fault.old,
        "after": fault.new,
        "tests": fault.tests.split(),
        "found": not passed,
        "found_by": failed,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Inject, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="those whose name has this in it; nothing is saved")
    only = parser.parse_args().only
    results = []
    with tempfile.TemporaryDirectory() as place:
        folder = copied(Path(place))
        files = {name: None for fault in FAULTS if only in fault.name for name in fault.tests.split()}
        failed, passed, seconds = tested(folder, " ".join(files), 6 * PATIENCE_S)
        print(f"{seconds:4.0f} s  without a fault", flush=True)
        assert passed, f"these fail without a fault: {failed}"
        for fault in FAULTS:
            if only in fault.name:
                results.append(injected(folder, fault))
                found = ", ".join(results[-1]["found_by"]) if results[-1]["found"] else "NOT FOUND"
                print(f"{results[-1]['seconds']:4.0f} s  {fault.name}: {found}", flush=True)
    if not only:
        save("injected-faults", {"found": sum(row["found"] for row in results), "of": len(results), "faults": results})
    if not all(row["found"] for row in results):
        sys.exit("a fault was not found")


if __name__ == "__main__":
    main()
