"""Reads a GBNF grammar before llama.cpp does, to refuse what would end, hang or exhaust the process there.

llama.cpp's parser (src/llama-grammar.cpp) finds most mistakes itself, but prints them to stderr, and some it does not
survive: repetitions such as ``{3,2}``, deep nesting, left recursion behind an empty rule, rules that nothing begins,
and tokens by name, which its ``apply`` and ``accept`` disagree about (a C++ exception, which no Python can catch).

A rule is read as llama.cpp rewrites it: groups and repetitions become rules of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ggufspec.errors import UsageError

MAX_REPETITION = 2000  # MAX_REPETITION_THRESHOLD of llama.cpp; it drops a higher maximum without a word
MAX_BYTES = 1 << 20  # of text
MAX_NESTING = 1000  # its parser is recursive: 5,000 pass and 20,000 overflow a stack of 8 MiB
MAX_ELEMENTS = 100_000  # all are copied for every token
MAX_LEFT_PATHS = 10_000_000  # its search for left recursion takes every path of leftmost rules, each time anew

HINT = "the syntax: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md"

_ESCAPE = r"""\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[trn\\"\[\]-])"""
_LEXEMES = re.compile(
    rf"""(?P<space>(?:[ \t]|\#[^\r\n]*)+)
    |(?P<newline>\r\n|\r|\n)
    |(?P<literal>"(?:[^"\\]|{_ESCAPE})*")
    |(?P<set>\[(?:[^\]\\]|{_ESCAPE})*\])
    |(?P<define>::=)
    |(?P<name>[a-zA-Z0-9-]+)
    |(?P<repeat>[*+?]|\{{[ \t]*[0-9]+[ \t]*(?:,[ \t]*[0-9]*[ \t]*)?\}})
    |(?P<mark>[().|])
    |(?P<token>[<!])""",
    re.VERBOSE,
)

_TERMINAL = ""  # a character; every other symbol is a rule's name
Rules = dict[str, list[list[str]]]  # alternatives, each a sequence of symbols


@dataclass(slots=True)
class _Open:
    """A rule or group that is being read."""

    name: str
    place: int
    alternatives: list[list[str]] = field(default_factory=lambda: [[]])
    last: tuple[int, int] | None = None  # where the item begins that a repetition repeats; its elements in llama.cpp


def check_gbnf(text: str) -> None:
    """Refuse a grammar that is none, or that llama.cpp would not survive.

    Raises:
        UsageError: the line and what is wrong there.
    """
    if len(text) > MAX_BYTES:
        raise UsageError(f"the grammar has more than {MAX_BYTES:,} characters", "fewer or shorter rules")
    reader = _Reader(text)
    rules = reader.rules
    if "root" not in rules:
        raise UsageError("the grammar has no rule named root", 'root ::= "yes" | "no"')
    for name, alternatives in rules.items():
        for symbol in (symbol for sequence in alternatives for symbol in sequence):
            if symbol != _TERMINAL and symbol not in rules:
                raise UsageError(f"the grammar has no rule {symbol!r}, which {_shown(name)} needs", HINT)
    _check_left_recursion(rules, reader.copies)


class _Reader:
    """The rules of a text."""

    def __init__(self, text: str) -> None:
        self.rules: Rules = {}
        self.copies: dict[str, int] = {}  # how often llama.cpp writes out a rule that stands for a repetition
        self._text = text
        self._names = 0
        self._elements = 0
        lexemes = list(self._lexemes())
        at = 0
        while at < len(lexemes):
            at = self._rule(lexemes, at)

    def _lexemes(self) -> Iterator[tuple[str, str, int]]:
        """(kind, text, place) of everything but blanks and comments."""
        place = self._text.find("\0")
        if place >= 0:
            raise self._error("is behind a null character", place + 1)
        place = 0
        while place < len(self._text):
            found = _LEXEMES.match(self._text, place)
            if found is None or found.lastgroup is None:
                raise self._error("is no part of a grammar, or does not end", place)
            if found.lastgroup == "token":
                raise self._error("names a token, and only characters can be checked safely", place)
            if found.lastgroup != "space":
                yield found.lastgroup, found[0], place
            place = found.end()

    def _rule(self, lexemes: list[tuple[str, str, int]], at: int) -> int:
        """Read the rule that begins with a lexeme; the lexeme behind it."""
        kind, name, place = lexemes[at]
        if kind == "newline":
            return at + 1
        if kind != "name" or at + 1 == len(lexemes) or lexemes[at + 1][0] != "define":
            raise self._error("begins no rule: name ::= …", place)
        at += 2
        opened, may_break = [_Open(name, place)], True  # a line may break behind ::= and |, and in a group
        while at < len(lexemes):
            kind, word, place = lexemes[at]
            at += 1
            if kind == "newline":
                if may_break or len(opened) > 1:
                    continue
                break
            may_break = word == "|"
            self._element(opened, kind, word, place)
        if len(opened) > 1:
            raise self._error("is not closed", opened[-1].place)
        self.rules[name] = opened[0].alternatives
        return at

    def _element(self, opened: list[_Open], kind: str, word: str, place: int) -> None:
        here = opened[-1]
        if kind == "name":
            self._append(here, word, 1)
        elif kind in ("literal", "set") or word == ".":
            characters = len(word) - 2 if kind != "mark" else 1
            if characters > (word[:2] == "[^"):
                self._append(here, _TERMINAL, characters)
            else:
                here.last = None  # llama.cpp reads nothing
        elif kind == "repeat":
            self._repeat(here, word, place)
        elif word == "|":
            self._count(1)
            here.alternatives.append([])
            here.last = None
        elif word == "(":
            if len(opened) > MAX_NESTING:
                raise self._error(f"nests more than {MAX_NESTING:,} groups", place)
            opened.append(_Open(self._name(here.name), place))
        elif word == ")" and len(opened) > 1:
            opened.pop()
            self.rules[here.name] = here.alternatives
            self._append(opened[-1], here.name, 1)
        else:
            raise self._error("is not expected here", place)

    def _append(self, here: _Open, symbol: str, elements: int) -> None:
        here.last = len(here.alternatives[-1]), elements
        here.alternatives[-1].append(symbol)
        self._count(elements)

    def _repeat(self, here: _Open, word: str, place: int) -> None:
        """``S{m,n}`` as llama.cpp rewrites it, shortened: a third copy of S makes no difference to the checks."""
        if here.last is None:
            raise self._error("repeats nothing", place)
        start, elements = here.last
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(word) or self._bounds(word, place)
        optional = 1 if most is None else most - least
        self._count(max(least - 1, 0) * elements + optional * (elements + 3))
        sequence = here.alternatives[-1]
        item = sequence[start:]
        sequence[start:] = item * min(least, 2)
        if optional:
            again = self._name(here.name)
            sequence.append(again)
            if most is None:
                self.rules[again] = [[*item, again], []]
            else:
                once = self._name(here.name)
                self.rules[once] = [item, []]
                self.rules[again] = [[*item, once], []] if optional > 1 else [item, []]
                self.copies[again] = optional
        here.last = (start, max(least, 1) * elements + 1) if sequence[start:] else None

    def _bounds(self, word: str, place: int) -> tuple[int, int | None]:
        low, comma, high = (part.strip() for part in word[1:-1].partition(","))
        if max(len(low), len(high)) > 9:
            raise self._error(f"repeats more than {MAX_REPETITION:,} times", place)
        least = int(low)
        most = int(high) if high else None if comma else least
        if max(least, most or 0) > MAX_REPETITION:
            raise self._error(f"repeats more than {MAX_REPETITION:,} times", place)
        if most is not None and most < least:
            raise self._error("ends below its beginning", place)
        return least, most

    def _count(self, elements: int) -> None:
        self._elements += elements
        if self._elements > MAX_ELEMENTS:
            raise UsageError(
                f"the grammar has more than {MAX_ELEMENTS:,} elements when its repetitions are written out",
                "smaller repetitions, or * and +",
            )

    def _name(self, base: str) -> str:
        """A name that no user can write."""
        self._names += 1
        return f"{_plain(base)}_{self._names}"

    def _error(self, what: str, place: int) -> UsageError:
        line = len(re.findall(r"\r\n|\r|\n", self._text[:place])) + 1
        shown = re.split(r"[\r\n]", self._text[place:], maxsplit=1)[0][:30]
        return UsageError(f"the grammar's line {line}: {shown!r} {what}", HINT)


def _plain(name: str) -> str:
    return name.partition("_")[0]


def _shown(name: str) -> str:
    return f"rule {_plain(name)!r}"


def _check_left_recursion(rules: Rules, copies: dict[str, int]) -> None:
    """Refuse what keeps llama.cpp's expansion of a stack (``llama_grammar_advance_stack``) from an end.

    A rule that begins with itself behind rules that may be empty, and goes on after itself, makes ever longer stacks.
    A rule that begins with nothing but such rules makes none, which is a failed assertion. Left recursion without
    empty rules llama.cpp refuses itself.
    """
    users: dict[str, set[str]] = {name: set() for name in rules}
    for name, alternatives in rules.items():
        for symbol in (symbol for sequence in alternatives for symbol in sequence if symbol != _TERMINAL):
            users[symbol].add(name)
    empty = _least(rules, users, lambda sequence, found: all(symbol in found for symbol in sequence))

    def starts(sequence: list[str]) -> Iterator[tuple[str, bool]]:
        """The symbols that a sequence may begin with, and whether more follows them."""
        for i, symbol in enumerate(sequence):
            yield symbol, i + 1 < len(sequence)
            if symbol not in empty:
                return

    begun = _least(rules, users, lambda s, found: any(x == _TERMINAL or x in found for x, _ in starts(s)))
    edges = {
        name: {start for sequence in alternatives for start in starts(sequence) if start[0] != _TERMINAL}
        for name, alternatives in rules.items()
    }
    for name in rules:
        if name not in empty and name not in begun:
            raise UsageError(f"the grammar's {_shown(name)} begins with itself and nothing else", HINT)
    order = list(_postorder(rules, lambda name: (there for there, _ in edges[name])))
    component: dict[str, str] = {}
    callers: dict[str, set[str]] = {name: set() for name in rules}
    for name, found in edges.items():
        for there, _ in found:
            callers[there].add(name)
    for name in reversed(order):  # Kosaraju's algorithm: who leads to each other
        if name not in component:
            todo = [name]
            while todo:
                here = todo.pop()
                if here not in component:
                    component[here] = name
                    todo += callers[here]
    paths: dict[str, int] = {}
    total = 0
    for name in order:
        first = rules[name][0]
        times = copies.get(name, 1) if all(symbol in empty for symbol in first) else 1
        paths[name] = times * (1 + sum(paths.get(there, 0) for s in rules[name] for there, _ in starts(s)))
        total += times * paths[name]
        for there, more in edges[name]:
            if more and component[there] == component[name]:
                raise UsageError(f"the grammar's {_shown(name)} begins with itself: left recursion", HINT)
    if total > MAX_LEFT_PATHS:
        raise UsageError("the grammar's rules begin with each other in too many ways", "fewer alternatives")


def _least(rules: Rules, users: dict[str, set[str]], holds: Callable[[list[str], set[str]], bool]) -> set[str]:
    """The rules of which, by induction, some alternative holds."""
    found: set[str] = set()
    todo = list(rules)
    while todo:
        name = todo.pop()
        if name not in found and any(holds(sequence, found) for sequence in rules[name]):
            found.add(name)
            todo += users[name]
    return found


def _postorder(names: Iterable[str], following: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Depth first, without recursion: a name comes after those that it leads to."""
    seen: set[str] = set()
    for root in names:
        if root in seen:
            continue
        seen.add(root)
        todo = [(root, iter(following(root)))]
        while todo:
            name, rest = todo[-1]
            for there in rest:
                if there not in seen:
                    seen.add(there)
                    todo.append((there, iter(following(there))))
                    break
            else:
                todo.pop()
                yield name
