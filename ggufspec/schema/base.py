"""Parts that all JSON documents share. Keys are a contract: they are added to, never renamed.

Bytes are bytes, times are seconds, speeds are tokens per second.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Annotated, Protocol, TypeAlias

from annotated_types import Ge, Le

from ggufspec.errors import GgufspecError
from ggufspec.schema.text import HARMFUL

# Bounds that are checked when a document is read, not when it is made.
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
    """Measurements of one variant, over all its trials."""

    gpu_layers: Count  # the target's
    layers: Count
    tokens: Count  # answers to one trial's prompts together
    tokens_per_s: Spread  # answers only, without prompts and the first tokens, which the prompts' batches give
    prompt_tokens_per_s: Amount  # including the draft model's reading
    peak_rss_bytes: Count  # the child's, with everything that it had loaded
    vram_bytes: Count  # rise of the use of all GPUs
    load_s: Amount
    prompt_tokens: Count = field(default=0, kw_only=True)  # decoded before one trial's answers, without cached ones
    time_to_first_token_s: Amount | None = field(default=None, kw_only=True)  # with loaded models; median of all
    prompts: Count = field(default=0, kw_only=True)
    answers: Count = field(default=0, kw_only=True)  # to the prompts, over all trials


@dataclass(frozen=True, slots=True)
class SpeculativeRun(Run):
    """A run with drafts."""

    gpu_layers_draft: Count
    draft_layers: Count
    acceptance_rate: Share
    tokens_per_round: Amount
    accepted_by_position: tuple[Share, ...]  # accepted ÷ drafted at each position of the draft
    drafted: Count
    accepted: Count
    rounds: Count
    draft_s: Amount  # seconds, the mean per round, which includes other work
    verify_s: Amount
    lossy: bool = False  # the rule may change the text
    plain_rounds: Count = 0  # without a draft, because it would not have paid
    lookup_drafted: Count = 0  # from the n-gram lookup
    lookup_accepted: Count = 0
    drafted_by_position: tuple[Count, ...] = ()  # tokens drafted at each position; empty in old results


@dataclass(frozen=True, slots=True)
class Portion:
    """Effect of drafts on one kind of prompt, or on a model's thinking: a part of two paired runs."""

    name: str
    tokens: Count  # tokens of one speculative trial
    target_only_tokens_per_s: Spread
    tokens_per_s: Spread
    speedup: Spread
    drafted: Count  # drafted tokens of all speculative trials
    accepted: Count


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a measurement: the reason, and what to do about it."""

    error: str
    hint: str = ""

    @classmethod
    def of(cls, error: GgufspecError) -> Failure:
        return cls(error.message, error.hint)


class Document(Protocol):
    @property
    def schema(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ErrorDocument:
    """``ggufspec/error@1``: a failure and what to do next."""

    error: str
    hint: str
    schema: str = field(default="ggufspec/error@1")


def to_json(document: Document) -> str:
    """Return the document as JSON text, its schema first; terminal control characters are escaped."""
    return _json(document, indent=2)


def to_line(document: Document) -> str:
    """Return the document as one line of JSON."""
    return _json(document, indent=None)


def _json(document: Document, indent: int | None) -> str:
    body = asdict(document)  # type: ignore[call-overload]
    text = json.dumps({"schema": body.pop("schema"), **body}, indent=indent, ensure_ascii=False)
    return HARMFUL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
