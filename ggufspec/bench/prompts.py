"""The bundled prompts: short texts of several kinds, written for this project, that any language model can continue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue and the kind of text it is."""

    kind: str
    text: str


PROMPTS = (
    Prompt(
        "code",
        '''import os
import sys


class FileReader:
    """Read lines from a file."""

    def __init__(self, path, encoding="utf-8"):
        self.path = path
        self.encoding = encoding
        self._lines = None

    def read(self):
        """Return all lines of the file."""
        if self._lines is None:
            with open(self.path, encoding=self.encoding) as f:
                self._lines = f.readlines()
        return self._lines

    def __len__(self):
''',
    ),
    Prompt(
        "code",
        '''def merge_sorted(left, right):
    """Merge two sorted lists into one sorted list."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
''',
    ),
    Prompt(
        "edit",
        '''# Before:
def get_name(self):
    return self._name

def get_size(self):
    return self._size

def get_mode(self):
    return self._mode

# After, with a docstring in each function:
def get_name(self):
    """Return the name."""
    return self._name

def get_size(self):
''',
    ),
    Prompt(
        "prose",
        """The with statement
******************

The with statement is used to wrap the execution of a block with methods defined by a context manager. \
This allows common patterns to be encapsulated for convenient reuse. If an exception is raised in the block, \
""",
    ),
    Prompt(
        "prose",
        """A module is a file that contains definitions and statements. When a module is imported for the first time, \
the interpreter searches for it in a list of directories, and then """,
    ),
    Prompt(
        "list",
        """The following methods are available on all sequence objects:

* append(x): add an item to the end of the sequence.
* clear(): remove all items from the sequence.
* copy(): return a copy of the sequence.
* count(x): return the number of times that x appears.
* """,
    ),
    Prompt(
        "numbers",
        """# Squares of the first numbers
SQUARES = {
    1: 1,
    2: 4,
    3: 9,
    4: 16,
    5: 25,
    6: 36,
""",
    ),
    Prompt(
        "noise",
        """zq7 lantern 0x3f -- harbour; {quilt} ~~ 91 maroon? tundra==pivot & |vex| 4.4e-2 oboe \
// saffron 17 glyph <kelp> umbra $$ 6 """,
    ),
)
