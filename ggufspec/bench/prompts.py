"""The bundled texts, written for this project: prompts that any language model can continue, passages for quality."""

from __future__ import annotations

from collections.abc import Callable
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

# Short passages of several kinds, on which quantisations are compared.
PASSAGES = (
    """The river came down from the hills in spring with more water than the old bridge had been built for. People \
from both banks stood in the rain and watched the pillars. The miller said that it would hold, as it had held in his \
father's time; the teacher said nothing, but she had moved the school's books to the upper floor the evening before. \
Towards noon a tree came, turning slowly, roots first. It struck the second pillar and stayed there, and behind it \
gathered branches, a door, and half of a rowing boat. Nobody spoke. Then the water found its way around, the tree \
rolled over once like somebody asleep, and it was gone. The bridge stood. In the evening the miller told everybody \
that he had known it all along, and the teacher carried her books down again.
""",
    '''"""Count words in a text."""

import re
import sys
from collections import Counter


def words(text):
    """Return the words of a text in lower case."""
    return re.findall(r"[a-z']+", text.lower())


def main(path, most=10):
    """Print the most common words of a file and how often they occur."""
    with open(path, encoding="utf-8") as file:
        counts = Counter(words(file.read()))
    total = sum(counts.values())
    for word, count in counts.most_common(most):
        print(f"{word:<20} {count:>6} {count / total:7.2%}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: count.py FILE", file=sys.stderr)
        sys.exit(2)
    main(sys.argv[1])
''',
    """Reading and writing files
*************************

The function open() returns a file object, and is most commonly used with two arguments: the name of the file and the \
mode. The mode can be "r" when the file will only be read, "w" for only writing (an existing file with the same name \
will be erased), and "a" opens the file for appending. It is good practice to use the with statement when dealing with \
file objects. The advantage is that the file is properly closed after its block finishes, even if an exception is \
raised at some point. If you are not using the with statement, then you should call close() to close the file and \
immediately free any system resources used by it.
""",
    """Water boils at 100 degrees Celsius at sea level, because there its vapour pressure reaches that of the air \
above it. On a mountain of 3,000 metres the air presses less, and water boils at about 90 degrees. This is why \
potatoes take longer to cook in the mountains: boiling water is as hot as water can get in an open pot, and there it \
is less hot. A pressure cooker does the opposite. Its lid is tight, the steam cannot leave, the pressure rises to \
about twice that of the air, and the water inside boils at 120 degrees. Since most reactions in food run about twice \
as fast for every ten degrees, a stew that takes an hour in an open pot is done in a quarter of that time.
""",
    """Question: A train leaves at 9:40 and arrives at 12:05. On the way it stops three times for five minutes. How \
long does it move?
Answer: From 9:40 to 12:05 are 2 hours and 25 minutes, which is 145 minutes. The stops take 3 times 5 minutes, which \
is 15 minutes. So it moves for 145 - 15 = 130 minutes, or 2 hours and 10 minutes.

Question: A shop sells apples at 3 for 2 euros. What do 12 apples cost?
Answer: 12 apples are 4 times 3 apples, so they cost 4 times 2 euros, which is 8 euros.

Question: Which is heavier, a litre of water or a litre of oil?
Answer: A litre of water. Oil is less dense than water, which is why it floats on top.
""",
    '''class Node:
    """A node of a binary search tree."""

    def __init__(self, key, value):
        self.key = key
        self.value = value
        self.left = None
        self.right = None


class Tree:
    """A sorted mapping."""

    def __init__(self):
        self.root = None
        self.size = 0

    def get(self, key, default=None):
        """Return the value of a key, or the default."""
        node = self.root
        while node is not None:
            if key == node.key:
                return node.value
            node = node.left if key < node.key else node.right
        return default

    def __len__(self):
        return self.size

    def __contains__(self, key):
        missing = object()
        return self.get(key, missing) is not missing
''',
    """{
  "name": "weather",
  "version": "1.4.2",
  "stations": [
    {"id": 1, "city": "Oslo", "latitude": 59.91, "longitude": 10.75, "height": 94},
    {"id": 2, "city": "Lisbon", "latitude": 38.72, "longitude": -9.14, "height": 77},
    {"id": 3, "city": "Quito", "latitude": -0.18, "longitude": -78.47, "height": 2850}
  ],
  "units": {"temperature": "celsius", "wind": "m/s", "rain": "mm"},
  "interval": 600
}
""",
    """Dear Ms Alvarez,

thank you for your letter of 3 March. We are sorry to hear that the lamp arrived broken. Of course we will replace it: \
a new one left our warehouse this morning and should reach you by Thursday. You need not send the old lamp back; \
please take it to a recycling point near you. As the parcel was damaged on the way, we have asked the carrier to look \
into it, and you may get a call from them. If anything else is wrong, please write to us or call the number below, and \
have your order number 58213 at hand.

With kind regards,
Jonas Weber
""",
    """The study of light has swung between two pictures. Newton thought of small bodies that fly in straight lines; \
Huygens thought of waves. For a century Newton's name decided the matter. Then Young let light pass through two narrow \
slits and saw bright and dark bands on the wall, as only waves make them, and Fresnel showed by calculation where each \
band must be. A hundred years later the photoelectric effect brought the small bodies back: weak blue light sets \
electrons free where strong red light does not, which no wave explains. Today we say that light is neither of the two. \
It travels as a wave does and is counted as bodies are, and the question of what it "really" is has turned out to be a \
question about our words.
""",
    """Steps:

1. Preheat the oven to 200 degrees and line a tray with paper.
2. Mix 250 grams of flour, 1 teaspoon of salt and 2 teaspoons of baking powder in a large bowl.
3. Rub in 60 grams of cold butter with your fingers until the mixture looks like crumbs.
4. Add 150 millilitres of milk and stir with a knife until the dough just comes together.
5. Turn it out, pat it flat to about 3 centimetres, and cut out rounds.
6. Bake for 12 to 15 minutes, until risen and golden.

Notes: do not knead the dough, or the scones will be tough. They are best on the day they are made, but can be frozen \
for up to a month.
""",
)


def at_depth(tokenize: Callable[..., list[int]], prompt: str, depth: int) -> list[int]:
    """Token ids of a prompt behind ``depth`` tokens of the bundled passages, over and over.

    Args:
        tokenize: :meth:`ggufspec.llamacpp.model.Model.tokenize`.
        prompt: a text.
        depth: tokens before it.
    """
    if not depth:
        return tokenize(prompt)
    before = tokenize("".join(PASSAGES))
    again = tokenize("".join(PASSAGES), start=False) if depth > len(before) else []
    while len(before) < depth:
        before += again
    return before[:depth] + tokenize(prompt, start=False)
