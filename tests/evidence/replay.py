"""The controller on real texts in virtual time: goals B and D of ``decoder.py`` in a minute, without a machine's noise.

    .venv/bin/python tests/evidence/replay.py --collect    # once, half an hour: what the pairs would say, and T(n)
    .venv/bin/python tests/evidence/replay.py              # the controller as it is now

Collected are, of every target and kind of text: the text, of each draft the chain that it would draft at every place,
with its confidences, and the seconds of batches by width. A replay runs the real loop, lookup and controller on them.
Batches take their measured seconds, with some noise, and the controller is given latencies that are some per cent
wrong, as it is in life. Six kinds of text come one behind the other, as in a session: what was learned of one is
carried into the next. Behind a wrong token, where it is not known what a draft would say, it says what it would have
said without it. It is for comparing controllers. Its ratios are no speeds of record.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import MODELS, grown_draft, grown_targets, save
from decoder import DRAFTS, LENGTHS, N_CTX, TARGETS
from decoder_prompts import KINDS

from ggufspec import DecoderOptions, Sampling, SpeculativeDecoder
from ggufspec.decoding.drafters.base import Candidate, Drafter, ShadowEvaluation
from ggufspec.decoding.drafters.lookup import LookupDrafter
from ggufspec.decoding.loop import generate
from ggufspec.decoding.options import ROWS
from ggufspec.decoding.policy.adaptive import Adaptive
from ggufspec.decoding.policy.backoff import BackOff
from ggufspec.decoding.policy.base import Policy
from ggufspec.decoding.policy.estimator import AcceptanceEstimator
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.decoding.rules import make_rule
from ggufspec.decoding.rules.base import AcceptanceResult, DraftToken

FOLDER = MODELS.parent / "replay"
TOKENS = 256
WIDTH = 16  # of the widest batch
CHAIN = 14  # tokens of a collected chain at most,
UNLIKELY = 0.02  # and none behind a chain that is less likely to stay than this
DRAFT_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
TOLD = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)  # widths that the controller has timings of
SWITCH_S = 0.0005  # more for a batch of another width than the last
NOISE, WRONG = 0.03, 0.04  # standard deviations in nats: of a batch's time, of what is believed of a width
PLAIN_S = 90e-6  # of a round outside both models, as measured beside targets of a billion parameters,
DECIDING_S = {"draft": 130e-6, "lookup": 170e-6}  # and more if a drafter is asked
NOTHING = 2**31  # a token that is in no vocabulary

Text = dict[str, Any]


# ---- what the pairs would say -----------------------------------------------------------------------


def chains(decoder: SpeculativeDecoder, text: Text) -> dict[str, Any]:
    """What a decoder's draft says of the prompt's last places, and would draft at every place behind it."""
    drafter, rule = decoder._drafter, make_rule("exact", Sampling(), None)
    assert drafter is not None
    prompt, tokens = text["prompt"], text["tokens"]
    drafter.let_go()
    drafter.begin(prompt, text["choices"])
    first = [[one.confidence, one.agreement] for one in drafter.catch_up(prompt, rule, len(prompt))]
    found: dict[int, list[tuple[int, float]]] = {}
    for place in range(len(prompt), len(tokens)):
        before = found.get(place - 1, [])
        chain = before[1:] if before and before[0][0] == tokens[place - 1] else []
        drafter.commit(place - 1)
        drafted = tokens[:place] + [token for token, _ in chain]
        while len(chain) < CHAIN and math.prod(sure for _, sure in chain) > UNLIKELY:
            offer = drafter.propose(drafted, rule)
            if offer is None:
                break
            chain.append((offer.draw().token, offer.confidence))
            drafted.append(chain[-1][0])
        found[place] = chain
    return {"first": first, "chains": found}


def collect(target: str) -> dict[str, Any]:
    """Of one target: its texts, its drafts' chains, and how long batches take."""
    options = DecoderOptions(ctx_size=N_CTX, drafters=("draft",), draft_policy="fixed")
    path = grown_targets((target,))[target]
    document: dict[str, Any] = {"kinds": {}, "draft_s": {}}
    for draft in DRAFTS:
        with SpeculativeDecoder(path, grown_draft(draft), options) as decoder:
            context = decoder._target
            for kind, prompt in KINDS.items():
                text = document["kinds"].get(kind)
                if text is None:
                    ids = decoder.target.tokenize(prompt)
                    answer = [one.token for one in decoder.generate(ids, max_tokens=TOKENS, alone="target")]
                    context.rewind(0)
                    rows = context.decode(ids[:-1], outputs=ROWS)
                    choices = [int(row.argmax()) for row in rows]
                    text = {"prompt": ids, "tokens": ids + answer, "choices": choices, "drafts": {}}
                    document["kinds"][kind] = text
                text["drafts"][draft] = chains(decoder, text)
                print(f"{target} {draft} {kind}", flush=True)
            document["target_s"] = seconds(context, text["tokens"], range(1, WIDTH + 1), all_rows=True)
            assert decoder._draft is not None
            document["draft_s"][draft] = seconds(decoder._draft, text["tokens"], DRAFT_WIDTHS)
    return document


def seconds(context: Any, tokens: Sequence[int], widths: Sequence[int], *, all_rows: bool = False) -> dict[int, float]:
    """Median seconds of batches by width, in turns, behind a text."""
    depth, found = len(tokens) // 2, {width: list[float]() for width in widths}
    context.rewind(0)
    context.decode(tokens[:depth], outputs=1)
    for _ in range(7):
        for width, taken in found.items():
            began = time.perf_counter()
            context.decode(tokens[:width], outputs=width if all_rows else 1, width=width if all_rows else 0)
            taken.append(time.perf_counter() - began)
            context.rewind(depth)
    return {width: statistics.median(taken) for width, taken in found.items()}


# ---- virtual time -----------------------------------------------------------------------------------


class Time:
    """A clock that moves when something says how long it took."""

    def __init__(self, seed: str) -> None:
        self.now = 0.0
        self._noise = random.Random(seed)

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds * math.exp(self._noise.gauss(0, NOISE))


NO_ROWS = np.empty((1, 0), np.float32)


class Told:
    """The rule and the target of a text that is known."""

    name, lossless, may_trim = "exact", True, True
    vocab_size, capacity, length = NOTHING + 1, 2**30, 0

    def __init__(self, tokens: Sequence[int], by_width: dict[int, float], clock: Time) -> None:
        self._tokens, self._by_width, self._clock = tokens, by_width, clock
        self._last = 1

    def decode(self, tokens: Sequence[int], outputs: int, width: int = 0) -> Any:  # noqa: ARG002
        """The rows are looked at by nobody."""
        self._clock.spend(self._by_width[width] + (SWITCH_S if width != self._last else 0.0))
        self._last = width

    def verify(self, rows: Any, proposals: Sequence[DraftToken], position: int) -> AcceptanceResult:  # noqa: ARG002
        came = self._tokens[position : position + len(proposals) + 1]
        kept = next((i for i, one in enumerate(proposals) if one.token != came[i]), len(proposals))
        return AcceptanceResult(kept, came[kept])

    def permits(self, token: int, position: int) -> bool:  # noqa: ARG002
        return True

    def begin(self, length: int) -> None: ...
    def follow(self, text: Sequence[int]) -> None: ...
    def rewind(self, length: int) -> None: ...
    def mark(self) -> None: ...


class Chains:
    """The drafter that says what the draft would have said, and takes as long."""

    name = "draft"

    def __init__(self, text: Text, draft: str, by_width: dict[int, float], clock: Time) -> None:
        self._tokens, self._read, self._prompt = text["tokens"], 0, len(text["prompt"])
        self._first, self._chains = text["drafts"][draft]["first"], text["drafts"][draft]["chains"]
        self._widths, self._clock = by_width, clock

    def begin(self, prompt: Sequence[int], choices: Sequence[int] = (), same: int = 0) -> list[ShadowEvaluation]:  # noqa: ARG002
        return []

    def pending(self, length: int) -> int:
        return length - self._read

    def propose(self, text: Sequence[int], rule: Any) -> Candidate | None:  # noqa: ARG002
        self._take(len(text))
        wrong = next((i for i in range(max(len(text) - WIDTH, 0), len(text)) if text[i] != self._tokens[i]), len(text))
        for place in range(wrong, wrong - CHAIN, -1):  # the chain that the text went on with, if it was one
            chain, drafted = self._chains.get(place, []), text[place:]
            if len(chain) > len(drafted) and [token for token, _ in chain[: len(drafted)]] == list(drafted):
                token, sure = chain[len(drafted)]
                return Candidate(sure, partial(DraftToken, token))
        here = self._chains.get(len(text))
        return Candidate(here[0][1], partial(DraftToken, NOTHING)) if here else None

    def catch_up(self, text: Sequence[int], rule: Any, most: int) -> list[ShadowEvaluation]:  # noqa: ARG002
        end = len(text) - 1
        known = [ShadowEvaluation(*one) for one in self._first if self._read < self._prompt - 1]
        self._read = max(self._read, end - most)
        places = range(max(self._prompt, end - min(ROWS, end - self._read) + 1), end + 1)
        if self._read < end:
            self._take(end)
        return known + [
            ShadowEvaluation(chain[0][1], float(chain[0][0] == text[place]))
            for place in places
            if (chain := self._chains.get(place))
        ]

    def commit(self, length: int) -> None:
        self._read = min(self._read, length)

    def _take(self, end: int) -> None:
        known = [*self._widths]
        count = end - self._read
        more = max(1.0, count / known[-1])
        self._clock.spend(float(np.interp(count, known, [*self._widths.values()])) * more)
        self._read = end


class Paid(Adaptive):
    """The policy, whose decisions take as long as they do beside real models."""

    def __init__(self, clock: Time, deciding_s: float, *args: Any) -> None:
        super().__init__(*args)
        self._clock, self._deciding_s = clock, deciding_s

    def begin(self, limit: int, remaining: int, *, may_trim: bool) -> None:
        self._clock.now += self._deciding_s
        super().begin(limit, remaining, may_trim=may_trim)


def session(document: dict[str, Any], draft: str, mode: str, seed: int) -> Iterator[float]:
    """Tokens/s of every kind of text, one behind the other, of one way to decode."""
    clock = Time(f"{draft} {seed}")
    wrong = random.Random(f"{draft} {seed} latencies")
    target_s, draft_s = document["target_s"], document["draft_s"][draft]

    def believed(by_width: dict[int, float], widths: Sequence[int]) -> dict[int, float]:
        return {width: by_width[width] * math.exp(wrong.gauss(0, WRONG)) for width in widths}

    target = LatencyModel(believed(target_s, TOLD), switch_s=SWITCH_S, limit=WIDTH)
    reading = LatencyModel(believed(draft_s, (1, 2, 4, 8, 16)), limit=WIDTH)
    estimators: dict[str, AcceptanceEstimator] = {}
    back_off = BackOff()
    name, *length = mode.split()
    for text in document["kinds"].values():
        reported = Told([*text["tokens"], *[NOTHING] * WIDTH], target_s, clock)
        drafters: list[Drafter] = []
        if name in ("draft", "both", "fixed"):
            drafters.append(Chains(text, draft, draft_s, clock))
        if name in ("lookup", "both"):
            drafters.append(LookupDrafter())
        policy: Policy = Policy()
        if drafters and not length:
            deciding_s = sum(DECIDING_S[drafter.name] for drafter in drafters)
            drafts = {} if name == "lookup" else {"draft": reading}
            policy = Paid(clock, deciding_s, target, drafts, estimators, back_off)
        for drafter in drafters:
            policy.shadow_evaluated(drafter.name, drafter.begin(text["prompt"], text["choices"]))
        began, tokens = clock(), 0
        count = len(text["tokens"]) - len(text["prompt"])
        for round_ in generate(
            reported,
            text["prompt"],
            NO_ROWS,
            reported,  # type: ignore[arg-type]
            max_tokens=count,
            is_end=lambda _: False,
            drafters=drafters,
            policy=policy,
            draft_max=int(length[0]) if length else WIDTH - 1,
            width=(lambda tokens: tokens) if length else target.width,
            clock=clock,
        ):
            if round_.width:  # the first token is the prompt's
                clock.now += PLAIN_S
                tokens += len(round_.emitted)
        yield tokens / (clock() - began)


# ---- the command ------------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values)


def case(document: dict[str, Any], draft: str, seeds: int) -> dict[str, dict[str, float]]:
    """Tokens/s by kind and mode, geometric means over the seeds."""
    modes = ("target-only", "draft", "lookup", "both", *(f"fixed {length}" for length in LENGTHS))
    runs = {mode: [list(session(document, draft, mode, seed)) for seed in range(seeds)] for mode in modes}
    return {
        kind: {mode: mean([run[place] for run in runs[mode]]) for mode in modes}
        for place, kind in enumerate(document["kinds"])
    }


def known(path: Path) -> dict[str, Any]:
    """A collected target; JSON's names of widths and places are numbers again."""

    def numbers(pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
        return {int(key) if key.isdigit() else key: value for key, value in pairs}

    document: dict[str, Any] = json.loads(path.read_text(), object_pairs_hook=numbers)
    return document


def main() -> int:
    """Collect, or replay, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", action="store_true", help="collect first; nothing else must run")
    parser.add_argument("--targets", type=lambda text: text.split(","), default=list(TARGETS))
    parser.add_argument("--seeds", type=int, default=8, help="replays of each session")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    cases: list[dict[str, Any]] = []
    for target in arguments.targets:
        path = FOLDER / f"{target}.json"
        if arguments.collect:
            path.write_text(json.dumps(collect(target)))
        if not path.exists():
            print(f"{path} is not there: run this with --collect first", file=sys.stderr)
            return 1
        document = known(path)
        for draft in DRAFTS:
            for kind, speeds in case(document, draft, arguments.seeds).items():
                fixed = max(speed for mode, speed in speeds.items() if mode.startswith("fixed"))
                ratios = {
                    "B": speeds["draft"] / fixed,
                    "D": speeds["both"] / max(speeds["draft"], speeds["lookup"]),
                    "both ÷ target-only": speeds["both"] / speeds["target-only"],
                    "draft ÷ target-only": speeds["draft"] / speeds["target-only"],
                }
                cases.append({"target": target, "draft": draft, "kind": kind, "tokens_per_s": speeds, "ratios": ratios})
                print(f"{target:5} {draft:5} {kind:8} {'  '.join(f'{n} {r:.3f}' for n, r in ratios.items())}")
    summary: dict[str, dict[str, float]] = {}
    groups: dict[str, Callable[[dict[str, Any]], bool]] = {"all": lambda _: True}
    groups |= {kind: partial(lambda kind, one: one["kind"] == kind, kind) for kind in KINDS}
    for group, belongs in groups.items():
        own = [one["ratios"] for one in cases if belongs(one)]
        summary[group] = {name: mean([ratios[name] for ratios in own]) for name in own[0]}
        summary[group] |= {f"{name}, worst": min(ratios[name] for ratios in own) for name in ("B", "D")}
        print(f"{group:8} {'  '.join(f'{name} {ratio:.3f}' for name, ratio in summary[group].items())}")
    save("replay", {"seeds": arguments.seeds, "summary": summary, "cases": cases})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
