"""Registries of drafters and acceptance rules by name; each row names the module that implements it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ggufspec.errors import UsageError, did_you_mean

MAX_TOP_K = 1000  # maximum N of the acceptance rule top-k:N


@dataclass(frozen=True, slots=True)
class DrafterRow:
    """Row of :data:`DRAFTERS`."""

    module: str  # module with ``make``, see :func:`ggufspec.decoding.drafters.make_drafter`
    label: str  # name in reports and messages
    needs_model: bool = False  # True if it drafts with the draft file
    needs_corpus: bool = False  # True if it reads ``--lookup-corpus``
    is_head: bool = False  # True if its file is a head, which reads the target's hidden states
    may_be_in_target: bool = False  # True if the target's file may contain it, so that no draft file is needed

    @property
    def needs_file(self) -> bool:
        """True if a draft file is always required."""
        return self.needs_model and not self.may_be_in_target


# A new drafter needs a module, a row here, and a style in chat/stream.py.
DRAFTERS = {
    "draft": DrafterRow("ggufspec.decoding.drafters.model", "draft model", needs_model=True),
    "mtp": DrafterRow(
        "ggufspec.decoding.drafters.head", "MTP head", needs_model=True, is_head=True, may_be_in_target=True
    ),
    "eagle3": DrafterRow("ggufspec.decoding.drafters.head", "EAGLE-3 head", needs_model=True, is_head=True),
    "lookup": DrafterRow("ggufspec.decoding.drafters.lookup", "n-gram lookup", needs_corpus=True),
}
# Labels for the source of a drafted token: a registered drafter, or the prediction sent with a request.
LABELS = {**{name: row.label for name, row in DRAFTERS.items()}, "prediction": "prediction"}
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
class RuleRow:
    """Row of :data:`RULES`."""

    form: str  # form in ``--accept``: the rule's name and, if it takes a number, a placeholder
    made_by: str  # module and class, see :func:`ggufspec.decoding.rules.make_rule`
    description: str  # condition for accepting a drafted token
    lossless: bool = True  # True if the text follows the target's distribution
    number: Callable[[str], float] | None = None  # parses the number; raises ValueError with the reason
    usual: str = ""  # hint for an invalid number


RULES = {
    "exact": RuleRow("exact", "coupled:CoupledRule", "it is the target's own choice, greedy or with shared noise"),
    "residual": RuleRow("residual", "speculative:SpeculativeRule", "uniform < min(1, p / q)"),
    "top-k": RuleRow(
        "top-k:N",
        "lossy:TopKRule",
        "it is the target's own choice or one of its N most likely tokens",
        lossless=False,
        number=_top_k,
        usual="--accept top-k:3",
    ),
    "typical": RuleRow(
        "typical:EPS",
        "lossy:TypicalRule",
        "it is the target's own choice or its probability exceeds min(EPS, √EPS · exp(−entropy))",
        lossless=False,
        number=_epsilon,
        usual="--accept typical:0.3",
    ),
}
RULE_FORMS = tuple(rule.form for rule in RULES.values())


def parse_rule(text: str) -> tuple[RuleRow, float | None]:
    """Return the rule that ``--accept`` names and its number, if any; raise UsageError if either is invalid."""
    name, colon, number = text.partition(":")
    rule = RULES.get(name)
    if rule is None or (colon and rule.number is None):
        hint = f"{did_you_mean(name, RULES)} --accept is one of {', '.join(RULE_FORMS)}".strip()
        raise UsageError(f"there is no acceptance rule {text!r}", hint)
    if rule.number is None:
        return rule, None
    try:
        return rule, rule.number(number)
    except ValueError as error:
        raise UsageError(f"{text!r} {error}", rule.usual) from None


def check_rule(text: str) -> str:
    """Return ``text``; raise UsageError if it names no acceptance rule."""
    parse_rule(text)
    return text


def is_lossy(text: str) -> bool:
    """Return whether this rule may change the distribution of the text."""
    return not parse_rule(text)[0].lossless


def parse_drafters(text: str) -> tuple[str, ...]:
    """Return the drafters that ``--drafter`` names, e.g. ``draft+lookup`` or ``both``; raise UsageError if unknown."""
    if text in _ALIASES:
        return _ALIASES[text]
    names = tuple(dict.fromkeys(text.split("+")))
    check_drafters(names)
    return names


def check_drafters(names: Iterable[str]) -> None:
    """Raise UsageError unless all ``names`` are in :data:`DRAFTERS`."""
    for name in names:
        if name not in DRAFTERS:
            known = (*DRAFTERS, *_ALIASES)
            hint = f"{did_you_mean(name, known)} --drafter is one of {', '.join(known)}".strip()
            raise UsageError(f"there is no drafter {name!r}", hint)


def drafter_text(names: Iterable[str]) -> str:
    """Return the value of ``--drafter`` for these drafters; the inverse of :func:`parse_drafters`."""
    ordered = tuple(sorted(names, key=[*DRAFTERS].index))
    return next((alias for alias, those in _ALIASES.items() if those == ordered), "+".join(ordered))


def with_head(names: Iterable[str], head: str) -> tuple[str, ...]:
    """Return the drafters; unless ``head`` is empty, it replaces those that use a draft file."""
    return tuple(dict.fromkeys(head if head and DRAFTERS[name].needs_model else name for name in names))


def drafters_label(text: str) -> str:
    """Return a label for ``--drafter``'s value: "draft model and n-gram lookup"; unknown drafters keep their names."""
    return " and ".join(DRAFTERS[name].label if name in DRAFTERS else name for name in _named(text)) or "no draft"


def drafts_with_file(text: str) -> bool:
    """Return whether one of ``--drafter``'s drafters uses the draft file."""
    return any(DRAFTERS[name].needs_model for name in _named(text) if name in DRAFTERS)


def drafts_with_corpus(text: str) -> bool:
    """Return whether one of ``--drafter``'s drafters reads ``--lookup-corpus``."""
    return any(DRAFTERS[name].needs_corpus for name in _named(text) if name in DRAFTERS)


def _named(text: str) -> tuple[str, ...]:
    return _ALIASES.get(text, tuple(text.split("+")))
