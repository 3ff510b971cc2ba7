"""Parts shared by all JSON documents. Keys are a contract: new ones may be added, but none is renamed.

Sizes are in bytes, times in seconds, and speeds in tokens per second.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Annotated, Protocol, TypeAlias

from annotated_types import Ge, Le

from ggufspec.errors import GgufspecError
from ggufspec.schema.text import HARMFUL

# Bounds are checked only when a document is read, not when it is made.
Count: TypeAlias = Annotated[int, Ge(0)]
Amount: TypeAlias = Annotated[float, Ge(0)]  # number of bytes or seconds, speed, or ratio
Share: TypeAlias = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Measured quantity, with its median, the median's 95 % confidence interval, and the samples."""

    median: Amount
    ci95: tuple[Amount, Amount]
    samples: tuple[Amount, ...]


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Measurements of one variant over all its trials."""

    gpu_layers: Count  # target layers on GPUs
    layers: Count
    tokens: Count  # number of tokens in the answers to one trial's prompts
    tokens_per_s: Spread  # decoding speed, without prompts and first tokens, which come from the prompts' batches
    prompt_tokens_per_s: Amount  # prompt processing speed, including the time of the draft model
    peak_rss_bytes: Count  # peak memory use of the child process, including everything it had loaded
    vram_bytes: Count  # increase in GPU memory use, summed over all GPUs
    load_s: Amount
    prompt_tokens: Count = field(default=0, kw_only=True)  # prompt tokens decoded in one trial, without cached ones
    time_to_first_token_s: Amount | None = field(default=None, kw_only=True)  # median, with models already loaded
    prompts: Count = field(default=0, kw_only=True)
    answers: Count = field(default=0, kw_only=True)  # number of answers in all trials


@dataclass(frozen=True, slots=True)
class SpeculativeRun(MeasuredRun):
    """Measurements of a variant with drafts."""

    gpu_layers_draft: Count
    draft_layers: Count
    acceptance_rate: Share
    tokens_per_round: Amount
    accepted_by_position: tuple[Share, ...]  # accepted ÷ drafted tokens at each position in the draft
    drafted: Count
    accepted: Count
    rounds: Count
    draft_s: Amount  # mean seconds per round for all work of the drafters
    verify_s: Amount
    lossy: bool = False  # True if the acceptance rule may change the text
    plain_rounds: Count = 0  # number of rounds without a draft, because drafting would not have paid off
    lookup_drafted: Count = 0  # number of tokens drafted by the n-gram lookup
    lookup_accepted: Count = 0
    drafted_by_position: tuple[Count, ...] = ()  # tokens drafted at each position in the draft; empty in old results

    @property
    def is_only_lookup(self) -> bool:
        """True if the n-gram lookup drafted every token although a draft model was loaded."""
        return self.draft_layers > 0 and 0 < self.drafted == self.lookup_drafted


@dataclass(frozen=True, slots=True)
class Portion:
    """Effect of drafts on a part of two paired runs, such as one kind of prompt or a model's thinking."""

    name: str
    tokens: Count  # number of tokens in one speculative trial
    target_only_tokens_per_s: Spread
    tokens_per_s: Spread
    speedup: Spread
    drafted: Count  # number of drafted tokens in all speculative trials
    accepted: Count


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why a measurement failed, and what to do about it."""

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
    """Document ``ggufspec/error@1``: a failure and what to do next."""

    error: str
    hint: str
    schema: str = field(default="ggufspec/error@1")


def to_json(document: Document) -> str:
    """Return a document as JSON text whose first key is its schema, with terminal control characters escaped."""
    return _json(document, indent=2)


def to_line(document: Document) -> str:
    """Return a document as one line of JSON."""
    return _json(document, indent=None)


def _json(document: Document, indent: int | None) -> str:
    body = asdict(document)  # type: ignore[call-overload]
    text = json.dumps({"schema": body.pop("schema"), **body}, indent=indent, ensure_ascii=False)
    return HARMFUL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
