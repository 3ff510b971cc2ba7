"""Bundled texts, written for this project: chat requests, prompts that any model can continue, and passages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """Prompt for a model.

    Args:
        kind: kind of text, for reports, e.g. ``edit``; empty if unknown.
        text: the user's message; without a chat template, the text to continue.
        messages: conversation instead of ``text``, as dicts for a chat template: role, content, tool_calls, …
        tools: tools that the model may call, as in OpenAI's requests.
        goes_on: True if the answer continues the last message, which is the assistant's.
        options: further chat-template variables.
        tokens: token ids instead of ``text``, to continue without the chat template.
        origin: source of the prompt, for error messages: ``line 3 of prompts.jsonl``; empty if bundled.
    """

    kind: str
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    goes_on: bool = field(default=False, kw_only=True)
    options: dict[str, Any] = field(default_factory=dict, kw_only=True)
    tokens: tuple[int, ...] = field(default=(), kw_only=True)
    origin: str = field(default="", kw_only=True)


# Typical requests to a chat model, one of each kind. Every second request also makes a good mix; tune uses only these.
REQUESTS = (
    BenchPrompt(
        "edit",
        """Add type hints and a one-line docstring to each method. Leave everything else as it is, and give back the \
whole class.

```python
class Inventory:
    def __init__(self, path):
        self.path = path
        self.items = {}

    def add(self, name, count=1):
        if count < 1:
            raise ValueError("count must be positive")
        self.items[name] = self.items.get(name, 0) + count

    def remove(self, name, count=1):
        left = self.items.get(name, 0) - count
        if left < 0:
            raise KeyError(name)
        if left == 0:
            del self.items[name]
        else:
            self.items[name] = left

    def total(self):
        return sum(self.items.values())
```
""",
    ),
    BenchPrompt(
        "rename",
        """Rename `data` to `readings` and `calc` to `average_by_hour`, in comments too. Change nothing else, and \
give back the whole file.

```js
// calc groups data by the hour and averages each group
export function calc(data) {
  const groups = new Map();
  for (const entry of data) {
    const hour = new Date(entry.time).getHours();
    if (!groups.has(hour)) groups.set(hour, []);
    groups.get(hour).push(entry.value);
  }
  return [...groups].map(([hour, values]) => ({
    hour,
    mean: values.reduce((sum, value) => sum + value, 0) / values.length,
  }));
}

export function hottest(data) {
  return calc(data).sort((a, b) => b.mean - a.mean)[0];
}
```
""",
    ),
    BenchPrompt(
        "port",
        """Port this function from Python to Rust, with the same behaviour for empty and malformed lines.

```python
def parse_hosts(text):
    hosts = {}
    for line in text.splitlines():
        line = line.split("#", 1)[0].strip()
        if not line:
            continue
        address, *names = line.split()
        for name in names:
            hosts.setdefault(name.lower(), []).append(address)
    return hosts
```
""",
    ),
    BenchPrompt(
        "tests",
        """Write pytest tests for this function: the usual cases, the edges, and what it must refuse.

```python
def parse_duration(text):
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    total, number = 0, ""
    for char in text.strip().lower():
        if char.isdigit():
            number += char
        elif char in units and number:
            total += int(number) * units[char]
            number = ""
        else:
            raise ValueError(f"not a duration: {text!r}")
    if number or not text.strip():
        raise ValueError(f"not a duration: {text!r}")
    return total
```
""",
    ),
    BenchPrompt(
        "json",
        """Put these into my calendar, in one go:

- Tuesday 4 March 2025, 9:30, dentist, Mill Lane 12, half an hour
- the day after, 14:00 to 16:00, project review with Aiko and Sam, room B2
- Friday that week, 19:00, dinner at Lucia's, three hours

If you cannot reach the calendar, answer with JSON and nothing else: {"events": [{"title": …, "start": (ISO 8601), \
"minutes": …, "place": …, "people": […]}, …]}
""",
        tools=(
            {
                "type": "function",
                "function": {
                    "name": "create_events",
                    "description": "Add events to the user's calendar.",
                    "parameters": {
                        "type": "object",
                        "properties": {
                            "events": {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "properties": {
                                        "title": {"type": "string"},
                                        "start": {"type": "string", "description": "ISO 8601, local time"},
                                        "minutes": {"type": "integer"},
                                        "place": {"type": "string"},
                                        "people": {"type": "array", "items": {"type": "string"}},
                                    },
                                    "required": ["title", "start", "minutes"],
                                },
                            }
                        },
                        "required": ["events"],
                    },
                },
            },
        ),
    ),
    BenchPrompt(
        "list",
        """We walk from hut to hut in the Alps for five days in September, two adults and a girl of ten. Make a \
packing list: grouped, with numbers, and half a sentence of why wherever it is not obvious.
""",
    ),
    BenchPrompt(
        "chat",
        """My bread tastes good, but it comes out flat and dense, and the dough sticks to everything. I use 500 g of \
strong flour, 400 g of water, 10 g of salt and 100 g of starter, and leave it on the counter overnight, about ten \
hours at 24 degrees. What goes wrong, and what should I change first?
""",
    ),
    BenchPrompt(
        "summary",
        """Summarise this in three sentences for a colleague who was not there, and then name who does what by when.

The weekly call began with the outage of Monday night. Priya had found that the backup job and the index rebuild ran \
at the same hour and filled the disk of the second database host; writes failed for 41 minutes, and nothing was lost. \
Tom asked why no alarm had gone off. The alarm exists, but it looks at the average of both hosts, and the first one \
was nearly empty. It was agreed to move the rebuild to four in the morning, which Priya does today, and to have an \
alarm for each host, which Tom does until Thursday. Lena wants to know what a third host would cost; no one was sure, \
so Omar asks the provider and writes to the list by the end of the month. The release stays on the 14th. Marketing \
would like the new export in the announcement, but it has only been tested with small files; Lena decides on Friday, \
when the load test is done. The next call is a day later than usual because of the holiday.
""",
    ),
)

# Texts that any language model can continue, with or without a chat template.
PROMPTS = (
    BenchPrompt(
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
    BenchPrompt(
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
    BenchPrompt(
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
    BenchPrompt(
        "prose",
        """The with statement
******************

The with statement is used to wrap the execution of a block with methods defined by a context manager. \
This allows common patterns to be encapsulated for convenient reuse. If an exception is raised in the block, \
""",
    ),
    BenchPrompt(
        "prose",
        """A module is a file that contains definitions and statements. When a module is imported for the first time, \
the interpreter searches for it in a list of directories, and then """,
    ),
    BenchPrompt(
        "list",
        """The following methods are available on all sequence objects:

* append(x): add an item to the end of the sequence.
* clear(): remove all items from the sequence.
* copy(): return a copy of the sequence.
* count(x): return the number of times that x appears.
* """,
    ),
    BenchPrompt(
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
    BenchPrompt(
        "noise",
        """zq7 lantern 0x3f -- harbour; {quilt} ~~ 91 maroon? tundra==pivot & |vex| 4.4e-2 oboe \
// saffron 17 glyph <kelp> umbra $$ 6 """,
    ),
)

# Short passages of several kinds, for measuring the quality of quantisations.
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


def at_depth(tokenize: Callable[..., list[int]], prompt: str, depth: int = 0) -> list[int]:
    """Return ``depth`` token ids of the bundled passages, repeated as needed, followed by the prompt's token ids.

    ``tokenize`` is :meth:`ggufspec.llamacpp.model.Model.tokenize`. Control tokens such as ``<|im_start|>`` in the
    prompt are parsed as tokens, as in llama.cpp's completion.
    """
    if not depth:
        return tokenize(prompt, special=True)
    before = tokenize("".join(PASSAGES))
    again = tokenize("".join(PASSAGES), start=False) if depth > len(before) else []
    while len(before) < depth:
        before += again
    return before[:depth] + tokenize(prompt, special=True, start=False)
