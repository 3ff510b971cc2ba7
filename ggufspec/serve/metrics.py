"""Counters of a server's answers, for Prometheus and for the web page of recent answers. Pure: no clock or I/O.

Metrics with the same meaning as in llama-server (llama.cpp's tools/server) have the same names, ``llamacpp:…``, so that
llama-server dashboards work. ``n_decode_total`` is missing, because only rounds are counted, not the prompts' batches.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from ggufspec.decoding.decoder import Statistics
from ggufspec.decoding.speed_watch import TargetSpeed
from ggufspec.serve import session

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LAST = 20  # number of answers whose statistics are stored individually
_SHOWN = (  # totals on the web page
    *("answers", "tokens", "prompt_tokens", "prompt_tokens_cached", "rounds", "plain_rounds"),
    *("drafted", "accepted", "refused", "restarts"),
)
_CUT = "cancelled"  # stop reason of an answer whose client left

Labels = tuple[tuple[str, str], ...]
_TOTALS = (  # name, help text, name of the count
    ("llamacpp:prompt_tokens_total", "Prompt tokens decoded, not counting cached ones.", "prompt_tokens"),
    ("llamacpp:prompt_tokens_cached_total", "Prompt tokens found in the cache.", "prompt_tokens_cached"),
    ("llamacpp:tokens_predicted_total", "Generated tokens.", "tokens"),
    ("ggufspec:restarts_total", "Restarts after the child process ended unexpectedly.", "restarts"),
    ("ggufspec:rounds_total", "Rounds: a draft, if any, and the target's batch.", "rounds"),
    ("ggufspec:plain_rounds_total", "Rounds without a draft.", "plain_rounds"),
)
_BY_LABEL = (
    ("ggufspec:answers_total", "Answers by stop reason.", "answers"),
    ("ggufspec:refused_total", "Requests answered with an error, by HTTP status.", "refused"),
    ("ggufspec:drafted_tokens_total", "Drafted tokens by drafter.", "drafted"),
    ("ggufspec:accepted_tokens_total", "Accepted tokens by drafter.", "accepted"),
    ("ggufspec:drafted_at_total", "Drafted tokens by position in the draft.", "drafted_by_position"),
    ("ggufspec:accepted_at_total", "Accepted tokens by position in the draft.", "accepted_by_position"),
)


class Metrics:
    """Counters since the endpoint started. All methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, Labels]] = Counter()
        self._sums: defaultdict[str, float] = defaultdict(float)  # sums of seconds
        self._last: deque[tuple[Statistics, dict[str, Any]]] = deque(maxlen=_LAST)  # (statistics, page figures)
        self._target: TargetSpeed | None = None  # the target's speed in the last answer that allowed measuring it

    def answered(self, reply: session.ServeReply, *, seconds: float) -> None:
        """Count an answer, complete or cancelled; ``seconds`` are from the request to the last token."""
        took = reply.statistics
        reason = took.stop_reason or _CUT
        with self._lock:
            count, self._target = self._counts, reply.target or self._target
            count["answers", _label(stop_reason=reason)] += 1
            totals = {"prompt_tokens": took.prompt_read, "prompt_tokens_cached": reply.cached, "tokens": took.tokens}
            totals |= {"rounds": took.rounds, "plain_rounds": took.plain_rounds, "batches": reply.batches}
            for name, tokens in totals.items():
                count[name, ()] += tokens
            for drafter, (drafted, accepted) in reply.accepted_by_drafter.items():
                count["drafted", _label(drafter=drafter)] += drafted
                count["accepted", _label(drafter=drafter)] += accepted
            for name in ("drafted_by_position", "accepted_by_position"):
                for position, tokens in enumerate(getattr(took, name), 1):
                    if tokens:
                        count[name, _label(position=str(position))] += tokens
            if took.time_to_first_token_s is not None:
                count["first_tokens", ()] += 1
                self._sums["first_token_s"] += took.time_to_first_token_s
            for name, value in (("prompt_s", took.prompt_s), ("decode_s", took.decode_s), ("answer_s", seconds)):
                self._sums[name] += value
            number = sum(tokens for (name, _), tokens in count.items() if name == "answers")
            self._last.append((took, _figures(number, reply, seconds, reason)))

    def refused(self, status: int) -> None:
        """Count a request that was refused with this HTTP status."""
        with self._lock:
            self._counts["refused", _label(status=str(status))] += 1

    def restarted(self) -> None:
        """Count a restart after the child process ended unexpectedly."""
        with self._lock:
            self._counts["restarts", ()] += 1

    def text(self, *, waiting: int, running: int, kept: int) -> str:
        """Return all metrics in Prometheus's text format 0.0.4 (:data:`MEDIA_TYPE`), including the given numbers of
        waiting and running requests and of cached conversations.
        """
        with self._lock:
            counts, sums, last, target = self._counts.copy(), self._sums.copy(), [*self._last], self._target

        def of(name: str) -> dict[Labels, float]:
            return {labels: value for (each, labels), value in counts.items() if each == name}

        prompt = _ratio(sum(took.prompt_read for took, _ in last), sum(took.prompt_s for took, _ in last))
        speed = _ratio(sum(took.decoded for took, _ in last), sum(took.decode_s for took, _ in last))
        gauges = {
            "llamacpp:prompt_seconds_total": ("Time spent on prompt processing.", sums["prompt_s"]),
            "llamacpp:tokens_predicted_seconds_total": ("Time spent on generation.", sums["decode_s"]),
            "llamacpp:prompt_tokens_seconds": (f"Prompt tokens/s over the last {_LAST} answers.", prompt or 0.0),
            "llamacpp:predicted_tokens_seconds": (f"Generated tokens/s over the last {_LAST} answers.", speed or 0.0),
            "llamacpp:requests_processing": ("Requests being answered.", running),
            "llamacpp:requests_deferred": ("Requests waiting in the queue.", waiting),
            "llamacpp:n_busy_slots_per_decode": (
                "Mean number of answers in a batch of the target.",
                _ratio(counts["rounds", ()], counts["batches", ()]) or 0.0,
            ),
            "ggufspec:conversations_kept": ("Maximum number of cached conversations.", kept),
        }
        if last:
            said = "Whether drafting was on at the end of the last answer: 1 or 0."
            gauges["ggufspec:speculation"] = said, int(last[-1][1]["speculation"])
        if target:
            said = "Target-only tokens/s, from the last answer that allowed measuring them."
            gauges["ggufspec:target_tokens_seconds"] = said, target.tokens_per_s
        if target and target.expected is not None:
            said = "Target-only tokens/s expected from the plan or the first undisturbed answers."
            gauges["ggufspec:target_tokens_seconds_expected"] = said, target.expected
        answers, first = sum(of("answers").values()), counts["first_tokens", ()]
        said_first = "Seconds from the start of processing a request to its first token."
        families = [
            *(_metric(name, about, {(): counts[key, ()]}) for name, about, key in _TOTALS),
            *(_metric(name, about, {(): value}) for name, (about, value) in gauges.items()),
            *(_metric(name, about, of(key)) for name, about, key in _BY_LABEL),
            _summary("ggufspec:answer_seconds", "Seconds from a request to its last token.", sums["answer_s"], answers),
            _summary("ggufspec:first_token_seconds", said_first, sums["first_token_s"], first),
        ]
        return "".join(families)

    def figures(self, *, waiting: int = 0, running: int = 0) -> dict[str, Any]:
        """Return the last answers (newest first), totals, the target's speed (None if unknown), and the given numbers
        of waiting and running requests as plain JSON.
        """
        with self._lock:
            totals = dict.fromkeys(_SHOWN, 0)
            for (name, _), value in self._counts.items():
                if name in totals:
                    totals[name] += value
            target = asdict(self._target) if self._target else None
            shared = _ratio(self._counts["rounds", ()], self._counts["batches", ()])
            now = {"running": running, "waiting": waiting, "answers_per_batch": shared}
            answers = [figures for _, figures in reversed(self._last)]
            return {"answers": answers, "totals": totals, "target": target, "now": now}


def _figures(number: int, reply: session.ServeReply, seconds: float, reason: str) -> dict[str, Any]:
    """Return one answer's statistics as shown on the web page; unknown values are None."""
    took = reply.statistics
    target_only_s = reply.target_only_s if took.drafted else None  # an answer without a draft gains nothing
    return {
        "number": number,  # counted from 1 since the endpoint started
        "tokens": took.tokens,
        "tokens_per_s": _ratio(took.decoded, took.decode_s),
        "prompt_tokens": took.prompt_tokens,
        "cached": reply.cached,  # prompt tokens from the cache
        "time_to_first_token_s": took.time_to_first_token_s,
        "seconds": seconds,  # from the request to the last token
        "drafted": took.drafted,
        "accepted": took.accepted,
        "acceptance_rate": _ratio(took.accepted, took.drafted),
        "rounds": took.rounds,
        "tokens_per_round": _ratio(took.decoded, took.rounds),
        "gain": None if target_only_s is None else _ratio(target_only_s, took.decode_s),
        "stop_reason": reason,
        "speculation": reply.speculation,  # drafting was still on at the end of the answer
    }


def _ratio(one: float, other: float) -> float | None:
    return one / other if other > 0 else None


def _label(**labels: str) -> Labels:
    return tuple(labels.items())


def _metric(name: str, about: str, samples: Mapping[Labels, float]) -> str:
    """Return a metric as text: a counter if ``name`` ends in _total, otherwise a gauge."""
    kind = "counter" if name.endswith("_total") else "gauge"
    return _family(name, kind, about, ((name, labels, samples[labels]) for labels in sorted(samples, key=_order)))


def _summary(name: str, about: str, total: float, count: float) -> str:
    return _family(name, "summary", about, ((f"{name}_sum", (), total), (f"{name}_count", (), count)))


def _order(labels: Labels) -> list[tuple[str, int, str]]:
    """Return a sort key: positions sort by number, everything else by name."""
    return [(key, int(value) if value.isdigit() else 0, value) for key, value in labels]


def _family(name: str, kind: str, about: str, samples: Iterable[tuple[str, Labels, float]]) -> str:
    lines = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    for each, labels, value in samples:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
        lines.append(f"{each}{{{inside}}} {value!r}" if inside else f"{each} {value!r}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
