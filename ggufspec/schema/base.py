"""What all JSON documents have in common. Keys are a contract: they are added to, never renamed.

Bytes are bytes, times are seconds, speeds are tokens per second.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Annotated, Protocol, TypeAlias

from annotated_types import Ge, Le

from ggufspec.schema.text import HARMFUL

# Of a document that is read, not of one that is made.
Count: TypeAlias = Annotated[int, Ge(0)]
Amount: TypeAlias = Annotated[float, Ge(0)]  # bytes, seconds, speeds, ratios
Share: TypeAlias = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """A measured number: its median, the 95 % interval of the median, and the raw samples."""

    median: Amount
    ci95: tuple[Amount, Amount]
    samples: tuple[Amount, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One way of running, over all its trials.

    Args:
        gpu_layers: of the target, which has ``layers``.
        tokens: of the answers to one trial's prompts together.
        tokens_per_s: of answers; prompts, and the first tokens, which their batches give, are not counted.
        prompt_tokens_per_s: with the draft model's reading.
        peak_rss_bytes: of the child, with all that it had loaded.
        vram_bytes: by which the use of all cards rose then.
        prompt_tokens: that were decoded before the answers of one trial: without those that a cache held.
        time_to_first_token_s: of loaded models; the median of all answers.
        prompts: that were answered.
        answers: to them, of all trials together.
    """

    gpu_layers: Count
    layers: Count
    tokens: Count
    tokens_per_s: Spread
    prompt_tokens_per_s: Amount
    peak_rss_bytes: Count
    vram_bytes: Count
    load_s: Amount
    prompt_tokens: Count = field(default=0, kw_only=True)
    time_to_first_token_s: Amount | None = field(default=None, kw_only=True)
    prompts: Count = field(default=0, kw_only=True)
    answers: Count = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class SpeculativeRun(Run):
    """A run with drafts. ``accepted_by_position[i]`` is accepted ÷ drafted at place i of the draft.

    ``draft_s`` and ``verify_s`` are the mean seconds of a round. ``lossy`` says that the rule may change the text.
    ``plain_rounds`` had no draft, for it would not have paid; ``lookup_drafted`` and ``lookup_accepted`` are the tokens
    that came from the n-gram lookup.
    """

    gpu_layers_draft: Count
    draft_layers: Count
    acceptance_rate: Share
    tokens_per_round: Amount
    accepted_by_position: tuple[Share, ...]
    drafted: Count
    accepted: Count
    rounds: Count
    draft_s: Amount
    verify_s: Amount
    lossy: bool = False
    plain_rounds: Count = 0
    lookup_drafted: Count = 0
    lookup_accepted: Count = 0


@dataclass(frozen=True, slots=True)
class Portion:
    """What drafts brought for one kind of prompt, or for the thinking of a model: a part of two paired runs.

    ``tokens`` are one speculative trial's, ``drafted`` and ``accepted`` those of all its trials.
    """

    name: str
    tokens: Count
    target_only_tokens_per_s: Spread
    tokens_per_s: Spread
    speedup: Spread
    drafted: Count
    accepted: Count


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something was not measured, and what to do about it."""

    error: str
    hint: str = ""


class Document(Protocol):
    """A frozen dataclass with a schema."""

    @property
    def schema(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ErrorDocument:
    """``ggufspec/error@1``: a failure and what to do next."""

    error: str
    hint: str
    schema: str = field(default="ggufspec/error@1")


def to_json(document: Document) -> str:
    """The document as JSON text, its schema first; what a terminal would obey is escaped."""
    return _json(document, indent=2)


def to_line(document: Document) -> str:
    """The same on one line."""
    return _json(document, indent=None)


def _json(document: Document, indent: int | None) -> str:
    body = asdict(document)  # type: ignore[call-overload]
    text = json.dumps({"schema": body.pop("schema"), **body}, indent=indent, ensure_ascii=False)
    return HARMFUL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
