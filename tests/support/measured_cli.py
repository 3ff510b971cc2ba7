"""The console script in a process that tells at its end what memory it took: itself, not its children.

``python measured_cli.py FILE ARGUMENTS…``; the peak of its resident memory goes to FILE, in KiB.
"""

import re
import sys
from pathlib import Path

from ggufspec.cli.app import entry

reported = Path(sys.argv.pop(1))
sys.argv[0] = "ggufspec"
try:
    entry()
finally:  # not getrusage, which knows the process that this one was before exec
    reported.write_text(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0])
