"""A pair that stays loaded and answers HTTP requests; the child's side of :class:`ggufspec.worker.Session`.

The parent's side is :mod:`ggufspec.serve.engine`. Events of a request, in this order:

- ``prompt`` {tokens, cached}: the prompt has so many tokens, of which so many are in the cache already;
- ``round`` {texts, tokens, sources, logprobs}: what one round emitted, of each token its text (which may be empty or
  end an earlier character), its id, who wrote it (a drafter's name, ``target`` or ``bonus``) and, where the request
  wants them, a :class:`TokenLogprob`, else ``logprobs`` is empty.

What a request cannot have is a UsageError. Where the prompt does not fit the context, the event ``refused``
{code: "context_length_exceeded"} comes before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ggufspec.bench.trial import LoadedModel
from ggufspec.decoding.decoder import Statistics
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Spec:
    """What to load."""

    target: Path  # path of the target's GGUF file
    draft: Path | None  # path of the draft's, or None
    options: DecoderOptions  # ``parallel`` conversations are kept
    rpc: tuple[str, ...] = ()  # endpoints of RPC workers
    chat_template: str = ""  # Jinja; empty: the target's own


@dataclass(frozen=True, slots=True)
class Ready:
    """What was loaded."""

    target: LoadedModel
    draft: LoadedModel | None
    drafters: tuple[str, ...]  # who drafts; none where speculation is off
    notes: tuple[str, ...]  # what a user should know of how it runs
    ctx_size: int  # tokens of context of each conversation
    parallel: int  # conversations that are kept
    chat_template: str  # Jinja; empty where there is none
    template_fault: str = ""  # why the template cannot be used


@dataclass(frozen=True, slots=True)
class Request:
    """What to answer, and how: the ``messages`` of a chat, or a ``prompt`` to continue."""

    messages: tuple[dict[str, Any], ...] = ()  # as the chat template takes them: role, content, tool_calls, …
    tools: tuple[dict[str, Any], ...] = ()  # as the chat template takes them
    template_options: dict[str, Any] = field(default_factory=dict)  # further variables: enable_thinking, …
    opening: str = ""  # text, special tokens too, that the answer begins with: of a tool call that must be made
    prompt: str | tuple[int, ...] = ""  # of a completion
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 0  # of the answer at most; 0: as many as the context holds
    stop: tuple[str, ...] = ()
    grammar: str = ""  # GBNF that the answer follows
    special: bool = False  # control tokens are part of the texts (the template's format of tool calls has some)
    logprobs: int | None = None  # likeliest tokens to list beside each; None: no log-probabilities at all


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural log-probability by the target's own distribution, untempered, and the likeliest tokens'."""

    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()  # (id, text, log-probability), likeliest first


@dataclass(frozen=True, slots=True)
class Reply:
    """How the answer ended."""

    statistics: Statistics  # ``stop_reason``: end, stop, length, context, grammar, or empty where it was stopped
    cached: int  # tokens of the prompt that were in the cache
    sequence: int  # which of the kept conversations it was
    target_only_s: float | None  # what the same tokens would have taken target-only, as far as is known
    speculation: bool  # whether drafting was on at the end: it backs off where it does not pay
    accepted_by_drafter: dict[str, tuple[int, int]] = field(default_factory=dict)  # (drafted, accepted) of each
    notes: tuple[str, ...] = ()  # each once in a session
