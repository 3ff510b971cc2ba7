"""Responses in OpenAI's format: complete answers, and the chunks of streamed ones. Pure.

In addition to OpenAI's keys they contain llama-server's ``timings``, and draft counts in ``usage.speculation``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ggufspec import __version__
from ggufspec.serve import session

Delta = Mapping[str, Any]  # nonempty fields of :class:`ggufspec.llamacpp.chat_library.MessageDelta`
_FINISH = {"end": "stop", "stop": "stop", "grammar": "stop", "length": "length", "context": "length"}


@dataclass(slots=True)
class AnswerWriter:
    """Writer of one answer's JSON."""

    model: str  # model name in the answer
    chat: bool  # True for a chat, False for a completion
    id: str = ""
    created: int = 0
    _text: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    _logprobs: list[Mapping[str, Any]] = field(default_factory=list)
    _offset: int = 0  # number of characters in a completion's tokens so far

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + secrets.token_hex(12)
        self.created = int(time.time())

    # ---- streamed --------------------------------------------------------------------------------------------------

    def first(self) -> dict[str, Any]:
        """Return the first chunk of a chat answer, as llama-server sends it."""
        return self._chunk({"role": "assistant", "content": None})

    def chunks(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the chunks for an event of :mod:`ggufspec.serve.session`."""
        if event["event"] == "progress":
            progress = {name: event[name] for name in ("total", "cache", "processed", "time_ms")}
            return [self._chunk({} if self.chat else "") | {"prompt_progress": progress}]
        if event["event"] != "round":
            return []
        found, logprobs = self._deltas(event), event["logprobs"]
        chunks = [self._chunk(one, logprobs=logprobs if index == 0 else ()) for index, one in enumerate(found)]
        if chunks and event["took"]:
            chunks[-1]["timings"] = timings(**event["took"])
        return chunks

    def _deltas(self, event: Mapping[str, Any]) -> list[Any]:
        deltas, logprobs = event["deltas"], event["logprobs"]
        if not self.chat:
            text = "".join(delta.get("content", "") for delta in deltas)
            return [text] if text or logprobs else []
        found: list[dict[str, Any]] = []
        for delta in deltas:
            if "call" in delta:
                self._calls.setdefault(delta["call"], {})
                found.append({"tool_calls": [_call(delta)]})
            elif "reasoning" in delta:
                found.append({"reasoning_content": delta["reasoning"]})
            else:
                found.append({"content": delta["content"]})
        if logprobs and not found:
            found.append({"content": ""})
        return found

    def last(self, reply: session.ServeReply) -> dict[str, Any]:
        """Return the chunk that ends the answer."""
        return self._chunk({} if self.chat else "", finish=self._finish(reply)) | {"timings": timings_of(reply)}

    def usage_chunk(self, reply: session.ServeReply) -> dict[str, Any]:
        """Return the extra final chunk for clients that request usage."""
        return self._envelope(chunk=True, choices=[]) | {"usage": usage(reply), "timings": timings_of(reply)}

    # ---- complete --------------------------------------------------------------------------------------------------

    def add(self, event: Mapping[str, Any]) -> None:
        """Add the content of a ``round`` event; ignore other events."""
        if event["event"] != "round":
            return
        self._logprobs += event["logprobs"]
        for delta in event["deltas"]:
            self._text.append(delta.get("content", ""))
            self._reasoning.append(delta.get("reasoning", ""))
            if "call" in delta:
                empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                call = self._calls.setdefault(delta["call"], empty)
                call["id"] += delta.get("id", "")
                for name in ("name", "arguments"):
                    call["function"][name] += delta.get(name, "")

    def whole(self, reply: session.ServeReply) -> dict[str, Any]:
        text = "".join(self._text)
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._finish(reply)}
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": text or (None if self._calls else "")}
            if reasoning := "".join(self._reasoning):
                message["reasoning_content"] = reasoning
            if self._calls:
                message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
            choice["message"] = message
        else:
            choice["text"] = text
        choice["logprobs"] = self._spelled(self._logprobs)
        return self._envelope(chunk=False, choices=[choice]) | {"usage": usage(reply), "timings": timings_of(reply)}

    def _finish(self, reply: session.ServeReply) -> str:
        reason = _FINISH.get(reply.statistics.stop_reason, "stop")
        return "tool_calls" if self._calls and reason == "stop" else reason

    def _chunk(
        self, delta: Mapping[str, Any] | str, *, finish: str | None = None, logprobs: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        choice = {"index": 0, ("delta" if self.chat else "text"): delta, "finish_reason": finish}
        choice["logprobs"] = self._spelled(logprobs)
        return self._envelope(chunk=True, choices=[choice])

    def _envelope(self, *, chunk: bool, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"ggufspec-{__version__}",
            "choices": choices,
        }

    def _spelled(self, logprobs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Return log-probabilities in OpenAI's form, which differs for completions."""
        if not logprobs:
            return None
        if self.chat:
            return {
                "content": [_spelled(one) | {"top_logprobs": [_spelled(top) for top in one["top"]]} for one in logprobs]
            }
        offsets = list(accumulate((len(one["text"]) for one in logprobs), initial=self._offset))
        self._offset = offsets[-1]
        return {
            "tokens": [one["text"] for one in logprobs],
            "token_logprobs": [one["logprob"] for one in logprobs],
            "top_logprobs": [{_key(top): top["logprob"] for top in one["top"]} for one in logprobs],
            "text_offset": offsets[:-1],
        }


def together(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge several complete answers to one request, counting its prompt once."""
    found, *more = answers
    for index, one in enumerate(more, 1):
        found["choices"] += [choice | {"index": index} for choice in one["choices"]]
        usage, added = found["usage"], one["usage"]
        for name in ("completion_tokens", "total_tokens"):
            usage[name] += added["completion_tokens"]
        for name in usage["completion_tokens_details"]:
            usage["completion_tokens_details"][name] += added["completion_tokens_details"][name]
    return found


def _spelled(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return a token with its own bytes, because its text may be an incomplete character."""
    return {"token": one["text"], "logprob": one["logprob"], "bytes": one["bytes"]}


def _key(one: Mapping[str, Any]) -> str:
    """Return a token's text, or its bytes if the text is ambiguous (an incomplete character)."""
    text: str = one["text"]
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in one["bytes"]) if "\ufffd" in text else text


def _call(delta: Delta) -> dict[str, Any]:
    function = {"arguments": delta.get("arguments", "")} | ({"name": delta["name"]} if "name" in delta else {})
    begin = {"id": delta["id"], "type": "function"} if "id" in delta else {}
    return {"index": delta["call"], **begin, "function": function}


def usage(reply: session.ServeReply) -> dict[str, Any]:
    """Return token counts; predicted tokens count as accepted if the answer contains them, drafted or not."""
    took = reply.statistics
    return {
        "prompt_tokens": took.prompt_tokens,
        "completion_tokens": took.tokens,
        "total_tokens": took.prompt_tokens + took.tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": took.predicted_appeared,
            "rejected_prediction_tokens": took.predicted - took.predicted_appeared,
        },
        "speculation": {
            "drafted": took.drafted,
            "accepted": took.accepted,
            "rounds": took.rounds,
            "by_drafter": {name: {"drafted": d, "accepted": a} for name, (d, a) in reply.accepted_by_drafter.items()},
            "target_only_s": reply.target_only_s,
        },
    }


def timings_of(reply: session.ServeReply) -> dict[str, Any]:
    took = reply.statistics
    return timings(
        reply.cached, took.prompt_read, took.prompt_s, took.tokens, took.decode_s, took.drafted, took.accepted
    )


def timings(
    cached: int, read: int, prompt_s: float, tokens: int, decode_s: float, drafted: int, accepted: int
) -> dict[str, Any]:
    """Return timings like llama-server's (``result_timings``, server-task.cpp); the prompt's batch yields one token."""
    return {
        "cache_n": cached,
        "prompt_n": read,
        "prompt_ms": 1000 * prompt_s,
        "prompt_per_second": read / prompt_s if prompt_s else 0.0,
        "predicted_n": tokens,
        "predicted_ms": 1000 * decode_s,
        "predicted_per_second": max(0, tokens - 1) / decode_s if decode_s else 0.0,
        "draft_n": drafted,
        "draft_n_accepted": accepted,
    }
