"""The drafters and the acceptance rules, by name: one row each, which the package that has the code completes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ggufspec.errors import UsageError, nearest

MAX_TOP_K = 1000  # of the acceptance rule top-k:N


@dataclass(frozen=True, slots=True)
class Drafter:
    """One row of :data:`DRAFTERS`."""

    module: str  # has ``make``, see :func:`ggufspec.decoding.drafters.make`
    label: str  # what reports and messages call it
    needs_model: bool = False  # whether it drafts with the draft file
    needs_corpus: bool = False  # whether ``--lookup-corpus`` is for it
    is_head: bool = False  # whether its file is a head, which reads the target's hidden rows
    may_be_in_target: bool = False  # whether the target's own file may have it, so that no draft file is needed

    @property
    def needs_file(self) -> bool:
        """Whether it cannot do without a draft file."""
        return self.needs_model and not self.may_be_in_target


# The registry of drafters: a new one is a module and a row here, and a style in chat/stream.py.
DRAFTERS = {
    "draft": Drafter("ggufspec.decoding.drafters.model", "draft model", needs_model=True),
    "mtp": Drafter(
        "ggufspec.decoding.drafters.head", "MTP head", needs_model=True, is_head=True, may_be_in_target=True
    ),
    "eagle3": Drafter("ggufspec.decoding.drafters.head", "EAGLE-3 head", needs_model=True, is_head=True),
    "lookup": Drafter("ggufspec.decoding.drafters.lookup", "n-gram lookup", needs_corpus=True),
}
_ALIASES = {"both": ("draft", "lookup"), "none": ()}


def _top_k(text: str) -> float:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_TOP_K):
        raise ValueError(f"needs a number of tokens: 1 to {MAX_TOP_K}")
    return int(text)


def _epsilon(text: str) -> float:
    reason = "needs a probability: above 0, below 1"
    try:
        value = float(text)
    except ValueError:
        raise ValueError(reason) from None
    if not 0 < value < 1:
        raise ValueError(reason)
    return value


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of :data:`RULES`."""

    form: str  # how ``--accept`` has it: its name, and a number's name if it takes one
    made_by: str  # module and class, see :func:`ggufspec.decoding.rules.make_rule`
    description: str  # when a drafted token is accepted
    lossless: bool = True  # whether the text has the target's distribution
    number: Callable[[str], float] | None = None  # reads the number; raises ValueError with the reason
    usual: str = ""  # the hint for a number that is refused


# The registry of acceptance rules.
RULES = {
    "exact": Rule("exact", "coupled:CoupledRule", "it is the target's own choice, greedy or with shared noise"),
    "residual": Rule("residual", "speculative:SpeculativeRule", "uniform < min(1, p / q)"),
    "top-k": Rule(
        "top-k:N",
        "lossy:TopKRule",
        "it is the target's own choice or one of its N likeliest",
        lossless=False,
        number=_top_k,
        usual="--accept top-k:3",
    ),
    "typical": Rule(
        "typical:EPS",
        "lossy:TypicalRule",
        "it is the target's own choice or likelier than min(EPS, √EPS · exp(−entropy))",
        lossless=False,
        number=_epsilon,
        usual="--accept typical:0.3",
    ),
}
RULE_FORMS = tuple(rule.form for rule in RULES.values())


def parse_rule(text: str) -> tuple[Rule, float | None]:
    """The rule that ``--accept`` names, and its number if it takes one.

    Raises:
        UsageError: there is no such rule, or its number is not in range.
    """
    name, colon, number = text.partition(":")
    rule = RULES.get(name)
    if rule is None or (colon and rule.number is None):
        hint = f"{nearest(name, RULES)} --accept is one of {', '.join(RULE_FORMS)}".strip()
        raise UsageError(f"there is no acceptance rule {text!r}", hint)
    if rule.number is None:
        return rule, None
    try:
        return rule, rule.number(number)
    except ValueError as error:
        raise UsageError(f"{text!r} {error}", rule.usual) from None


def check_rule(text: str) -> str:
    """The same text if it names an acceptance rule.

    Raises:
        UsageError: it names none.
    """
    parse_rule(text)
    return text


def is_lossy(text: str) -> bool:
    """Whether the text may differ in distribution from the target's own under this rule."""
    return not parse_rule(text)[0].lossless


def parse_drafters(text: str) -> tuple[str, ...]:
    """The drafters that ``--drafter`` names: ``draft``, ``draft+lookup`` or ``both``, ``none``.

    Raises:
        UsageError: one of them is not known.
    """
    if text in _ALIASES:
        return _ALIASES[text]
    names = tuple(dict.fromkeys(text.split("+")))
    check_drafters(names)
    return names


def check_drafters(names: Iterable[str]) -> None:
    """Raise UsageError unless all of them are in :data:`DRAFTERS`."""
    for name in names:
        if name not in DRAFTERS:
            known = (*DRAFTERS, *_ALIASES)
            hint = f"{nearest(name, known)} --drafter is one of {', '.join(known)}".strip()
            raise UsageError(f"there is no drafter {name!r}", hint)


def drafter_text(names: Iterable[str]) -> str:
    """What ``--drafter`` would name these: the inverse of :func:`parse_drafters`."""
    ordered = tuple(sorted(names, key=[*DRAFTERS].index))
    return next((alias for alias, those in _ALIASES.items() if those == ordered), "+".join(ordered))


def with_head(names: Iterable[str], head: str) -> tuple[str, ...]:
    """These drafters where the draft file turns out to be a head of this kind: it drafts in the draft model's place."""
    return tuple(dict.fromkeys(head if head and DRAFTERS[name].needs_model else name for name in names))


def drafters_label(text: str) -> str:
    """``--drafter``'s value for people: "draft model and n-gram lookup"; a later version's drafter is its own label."""
    return " and ".join(DRAFTERS[name].label if name in DRAFTERS else name for name in _named(text)) or "no draft"


def drafts_with_file(text: str) -> bool:
    """Whether one of ``--drafter``'s value drafts with the draft file."""
    return any(DRAFTERS[name].needs_model for name in _named(text) if name in DRAFTERS)


def drafts_with_corpus(text: str) -> bool:
    """Whether one of them takes ``--lookup-corpus``."""
    return any(DRAFTERS[name].needs_corpus for name in _named(text) if name in DRAFTERS)


def _named(text: str) -> tuple[str, ...]:
    return _ALIASES.get(text, tuple(text.split("+")))
