"""Prompts for the decoder's figures: one long text of each of six kinds, and short ones. Written for this project.

The bundled pair is tiny: most of its greedy answers end in one line said over and over, which any drafter guesses. The
long texts were chosen from some dozens, cut at different places, as those whose answers of 256 tokens do so least. The
editing is repetitive on purpose, and of the noise the draft guesses a fifth only.
"""

from __future__ import annotations

from itertools import product

from ggufspec.bench.prompts import PROMPTS

KINDS = {
    "code": '''import threading
import time
from queue import Empty, Queue


class Worker(threading.Thread):
    """A thread that takes jobs from a queue and runs them."""

    def __init__(self, queue, timeout=None):
        super().__init__(daemon=True)
        self.queue = queue
        self.timeout = timeout
        self.error = None
        self._stopped = threading.Event()

    def run(self):
        """Run jobs until the thread is stopped."""
        while not self._stopped.is_set():
            try:
                job, args = self.queue.get(timeout=self.timeout)
            except Empty:
                continue
            try:
                job(*args)
            except Exception as e:''',
    "edit": '''    def get_width(self):
        """Return the width of the window."""
        return self.tk.call(self._w, "width")

    def get_height(self):
        """Return the height of the window."""
        return self.tk.call(self._w, "height")

    def get_title(self):
        """Return the title of the window."""
        return self.tk.call(self._w, "title")

    def get_state(self):
        """Return the state of the window."""
        return self.tk.call(self._w, "state")

    def get_focus(self):
        """Return the focus of the window."""
        return self.tk.call(self._w, "focus")

    def set_width(self, value):
        """Set the width of the window."""
        self.tk.call(self._w, "width", value)''',
    "prose": """Errors and exceptions
*********************

There are two kinds of errors that a program can make. The first kind is found before the program runs, because the \
text is not a program at all: a bracket is missing, or a word is in the wrong place. The second kind is found while \
the program runs. A file may be missing, the disk may be full, or a number may be divided by zero. An error of the \
second kind raises an exception. If nothing handles the exception, the program ends with a message that tells where \
the error occurred. A try statement can be used to handle it. First, the""",
    "list": """Changes in this version:

* The function open() now accepts a path object as its first argument.
* A new method, close(), was added to the class Reader.
* The default encoding is now UTF-8 on all platforms.
* Fixed a crash when the input file is empty.
* The module no longer imports the socket module.
* The keyword argument "mode" was removed. Use "flags" instead.
* Added support for files larger than 2 GB.
* The return value of read() is now a bytes object.
*""",
    "numbers": """import math

VALUES = (
    (0.0, 1.0, 0.0), (0.125, 0.9922, 0.1247), (0.25, 0.9689, 0.2474),
    (0.375, 0.9305, 0.3663), (0.5, 0.8776, 0.4794), (0.625, 0.8110, 0.5851),
    (0.75, 0.7317, 0.6816), (0.875, 0.6410, 0.7675),""",
    "noise": """\
b5Elh 3 5 d2b3qtQm 3X2 qoph 188 :. r8lWdv thistle 37260 -^ 48991 !)| ?}# zephyr 6 , zagRm 0y 42 200550 # 7gdmQ \
rune . ibex 9TTe7w gorse 0 6evgk64 (^@ oxbow 123827 Yelbrg &{] quoin py krill 6ydQRqpoh 10 7udb ~ 7 gnat krill \
*</ ] 884 umber ember 868 33 20857 64982 / zvey87Xmk ochre *@ 1x4aX 1 flax zinc ember 39732 9420 993 jute 295041 \
scree hu 5 zinc ^^ }{ 51""",
}


def short_prompts(count: int) -> list[str]:
    """Different short prompts: pieces of the long ones and of the bundled ones, and made-up beginnings of code."""
    texts = [*KINDS.values(), *(prompt.text for prompt in PROMPTS)]
    pieces = [
        "".join(lines[start : start + 3])
        for lines in (text.splitlines(keepends=True) for text in texts)
        for start in range(0, len(lines), 3)
    ]
    pieces += [text[start : start + 90] for text in texts for start in range(30, len(text) - 90, 120)]
    verbs, nouns = (
        ("get", "set", "read", "write", "find", "count", "sort"),
        ("name", "line", "index", "value", "path", "size"),
    )
    pieces += [f"def {verb}_{noun}(self" for verb, noun in product(verbs, nouns)]
    pieces += [f"class {noun.title()}{verb.title()}er:\n    " for verb, noun in product(verbs, nouns)]
    pieces += [f"To {verb} the {noun} of a file, " for verb, noun in product(verbs, nouns)]
    different = list(dict.fromkeys(piece for piece in pieces if piece.strip()))
    if len(different) < count:
        raise ValueError(f"there are {len(different)} short prompts, not {count}")
    return [different[place * len(different) // count] for place in range(count)]  # spread over all sources
