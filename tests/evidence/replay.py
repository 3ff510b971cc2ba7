"""The policy on a real pair's answers in virtual time: default ÷ the best of target-only and every fixed length.

    .venv/bin/python tests/evidence/replay.py             # five minutes, whatever runs beside it
    scripts/real-models qwen-coder && .venv/bin/python tests/evidence/replay.py --collect    # new traces: ten minutes

A trace (traces/) has token ids and probabilities: of ten prompts (replay_prompts.py) the target's answer, the chain
that the draft would draft at each place of it with its confidences, what the draft says at the prompt's last places,
and where it would still agree if it had read the end of the prompt only. A replay runs the real loop, lookup and policy
on them: batches take the seconds of measured or assumed latencies with some noise, and the policy is given latencies
that are some per cent wrong, as it is in life. Longer answers are those of several prompts one behind the other; more
tokens of a prompt cost both models their time. The draft's cost is set, as a share of the target's. A draft that never
pays says what the draft says and is always wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
from common import ROOT, save
from replay_prompts import PROMPTS

from ggufspec import DecoderOptions, Sampling, SpeculativeDecoder
from ggufspec.decoding.drafters.base import DraftCandidate, Drafter, ShadowEvaluation
from ggufspec.decoding.drafters.lookup import LookupDrafter
from ggufspec.decoding.loop import rounds
from ggufspec.decoding.options import ROWS
from ggufspec.decoding.policy.adaptive import AdaptivePolicy, ExplorationCosts
from ggufspec.decoding.policy.backoff import BackOff
from ggufspec.decoding.policy.base import DraftPolicy
from ggufspec.decoding.policy.draft_latency import DraftLatency
from ggufspec.decoding.policy.estimator import AcceptanceEstimator
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.decoding.rules import make_rule
from ggufspec.decoding.rules.base import AcceptanceResult, DraftToken
from tests.support.driving import decode_rounds

TRACE = Path(__file__).with_name("traces") / "qwen2.5-coder.json"
MODELS = ROOT / ".cache" / "real-models"
TOKENS = 192  # of a collected answer at most
CHAIN, UNLIKELY = 10, 0.02  # tokens of a collected chain at most, and none behind one that is less likely to stay
WINDOWS = (16, 32, 64, 128)  # tokens of the prompt's end

# Seconds by width. Qwen2.5-Coder-1.5B on two cores of a Cascade Lake; a card whose weights are read once for any width.
TARGETS = {
    "F16": {1: 0.164, 2: 0.18, 3: 0.195, 4: 0.203, 5: 0.21, 6: 0.225, 8: 0.25, 12: 0.31, 16: 0.36},
    "Q4_K_M": {1: 0.083, 2: 0.118, 3: 0.119, 4: 0.12, 5: 0.135, 6: 0.145, 8: 0.165, 12: 0.205, 16: 0.246},
    # 70B with feed-forwards of 36 of 80 blocks on the host, copied to an H100 from two tokens on
    "streamed": {1: 0.272, 2: 0.241, 4: 0.251, 8: 0.278, 16: 0.252},
    "card": {1: 0.02, 2: 0.0205, 3: 0.021, 4: 0.0215, 6: 0.0225, 8: 0.0235, 12: 0.0255, 16: 0.0275},
}
DRAFT = {1: 1.0, 2: 1.1, 3: 1.18, 4: 1.27, 5: 1.38, 8: 1.8, 16: 2.7, 32: 4.6, 64: 8.5}  # relative to one token
RATIOS = (2, 3, 4, 8, 20, 50)  # a target's token ÷ a draft's
LENGTHS = (1, 2, 3, 4, 6, 8)
PROMPT_TOKENS, ANSWER_TOKENS = (0, 400, 4000), (32, 128, 512)  # of the prompt beside its own
IN_LARGE = 0.6  # of a token's time in a batch of sixteen: what it takes in a prompt
TIMED = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)  # widths that the policy has timings of
SWITCH_S = 0.0005  # more for a batch of another width than the last
NOISE, WRONG = 0.03, 0.04  # standard deviations in nats: of a batch's time, of what is believed of a width
PLAIN_S = 90e-6  # of a round outside both models, as measured beside targets of a billion parameters,
DECIDING_S = {"draft": 130e-6, "lookup": 170e-6}  # and more if a drafter is asked
NOTHING = 2**31  # a token that is in no vocabulary


@dataclass(frozen=True)
class Text:
    """A prompt and what follows, and what a draft says of it."""

    prompt: list[int]
    answer: list[int]
    choices: list[int]  # the target's likeliest token at the prompt's last places
    first: list[tuple[float, float]]  # the draft's confidence there, and whether it is the same token
    chains: list[list[tuple[int, float]]]  # that the draft would draft at each place of the answer
    windows: dict[int, list[bool]]  # by tokens of the prompt's end that it has read: whether it says what came

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer

    def then(self, other: Text, most: int) -> Text:
        """This answer with another one behind it, together so many tokens."""
        whole = other.windows[max(other.windows)]
        windows = {size: [*found, *whole][:most] for size, found in self.windows.items()}
        answer, chains = [*self.answer, *other.answer][:most], [*self.chains, *other.chains][:most]
        return Text(self.prompt, answer, self.choices, self.first, chains, windows)


def load(path: Path) -> dict[str, Text]:
    """Traces by prompt."""
    return {
        name: Text(
            prompt=one["prompt"],
            answer=one["answer"],
            choices=one["choices"],
            first=[(confidence, float(agreed)) for confidence, agreed in one["first"]],
            chains=[list(zip(chain[::2], chain[1::2], strict=True)) for chain in one["chains"]],
            windows={int(size): [agreed == "1" for agreed in found] for size, found in one["windows"].items()},
        )
        for name, one in json.loads(path.read_text())["answers"].items()
    }


# ---- what the pair says ----------------------------------------------------------------------------------------------


def collect() -> dict[str, Any]:
    """The traces of Qwen2.5-Coder's pair."""
    names = [f"qwen2.5-coder-{size}-instruct-q4_k_m.gguf" for size in ("1.5b", "0.5b")]
    options = DecoderOptions(ctx_size=2048, drafters=("draft",), draft_policy="fixed")
    answers = {}
    with SpeculativeDecoder(*(MODELS / name for name in names), options) as decoder:
        for name, question in PROMPTS.items():
            prompt = decoder.target.tokenize(
                "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
                f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            )
            answer = [one.token for one in decoder.generate(prompt, max_tokens=TOKENS, alone="target")]
            while answer and decoder.target.is_end(answer[-1]):
                answer.pop()
            answers[name] = {"prompt": prompt, "answer": answer} | _said(decoder, prompt, answer)
            print(name, len(prompt), len(answer), flush=True)
    return {"target": names[0], "draft": names[1], "answers": answers}


def _said(decoder: SpeculativeDecoder, prompt: list[int], answer: list[int]) -> dict[str, Any]:
    target, draft, drafter = decoder._pair.target, decoder._pair.draft, decoder._cache.now.drafter
    assert draft is not None
    assert drafter is not None
    rule = make_rule("exact", Sampling())
    target.rewind(0)
    choices = [int(row.argmax()) for row in target.decode(prompt, outputs=ROWS)][:-1]
    drafter.let_go()  # type: ignore[union-attr]
    drafter.begin(prompt, choices)
    first = [(one.confidence, one.agreement) for one in drafter.catch_up(prompt, rule, len(prompt))]
    tokens, chains = prompt + answer, list[list[tuple[int, float]]]()
    for place in range(len(prompt), len(tokens)):
        before = chains[-1] if chains else []
        chain = before[1:] if before and before[0][0] == tokens[place - 1] else []
        drafter.commit(place - 1)
        drafted = tokens[:place] + [token for token, _ in chain]
        while len(chain) < CHAIN and math.prod(sure for _, sure in chain) > UNLIKELY:
            candidate = drafter.propose(drafted, rule)
            assert candidate is not None
            chain.append((candidate.draw().token, candidate.confidence))
            drafted.append(chain[-1][0])
        chains.append(chain)
    windows = {}
    for size in (*(size for size in WINDOWS if size < len(prompt)), len(prompt)):
        draft.rewind(0)
        text = tokens[len(prompt) - size :]
        draft.decode(text[: size - 1], outputs=1)
        agreed = ""
        for start in range(size - 1, len(text) - 1, ROWS):
            part = text[start : min(start + ROWS, len(text) - 1)]
            rows = draft.decode(part, outputs=len(part))[:, : drafter.shared_vocab]  # type: ignore[union-attr]
            agreed += "".join(str(int(row.argmax() == text[start + i + 1])) for i, row in enumerate(rows))
        windows[size] = agreed
    drafter.let_go()  # type: ignore[union-attr]
    draft.rewind(0)
    decoder._cache.forget()
    flat = [[part for token, sure in chain for part in (token, round(sure, 3))] for chain in chains]
    return {
        "choices": choices,
        "first": [(round(sure, 3), int(agreed)) for sure, agreed in first],
        "chains": flat,
        "windows": windows,
    }


# ---- virtual time ----------------------------------------------------------------------------------------------------


class Time:
    """A clock that moves when something says how long it took."""

    def __init__(self, seed: str) -> None:
        self.now = 0.0
        self._noise = random.Random(seed)

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds * math.exp(self._noise.gauss(0, NOISE))


class Known:
    """The rule and the target of a text that is known."""

    name, lossless, may_trim = "exact", True, True
    vocab_size, capacity, length = NOTHING + 1, 2**30, 0

    def __init__(self, tokens: Sequence[int], by_batch_size: dict[int, float], clock: Time) -> None:
        self._tokens, self._by_batch_size, self._clock = tokens, by_batch_size, clock
        self._last = 1

    def decode(self, tokens: Sequence[int], outputs: int, batch_size: int = 0) -> Any:  # noqa: ARG002
        self._clock.spend(self._by_batch_size[batch_size] + (SWITCH_S if batch_size != self._last else 0.0))
        self._last = batch_size

    def verify(self, rows: Any, proposals: Sequence[DraftToken], position: int) -> AcceptanceResult:  # noqa: ARG002
        came = self._tokens[position : position + len(proposals) + 1]
        kept = next((i for i, one in enumerate(proposals) if one.token != came[i]), len(proposals))
        return AcceptanceResult(kept, came[kept])

    def permits(self, token: int, position: int) -> bool:  # noqa: ARG002
        return True

    def begin(self, length: int) -> None: ...
    def follow(self, text: Sequence[int]) -> None: ...
    def rewind(self, length: int) -> None: ...


class Chains:
    """The drafter that says what the draft would have said, and takes as long."""

    name, failure = "draft", ""

    def __init__(self, text: Text, by_batch_size: dict[int, float], clock: Time, *, more: int, hopeless: bool) -> None:
        self._text, self._tokens, self._prompt = text, text.tokens, len(text.prompt)
        self._batch_sizes, self._clock = by_batch_size, clock
        self._more, self._hopeless = more, hopeless
        self._read = 0
        self._window = self._prompt  # tokens of the prompt that it has read

    def begin(self, prompt: Sequence[int], choices: Sequence[int] = (), same: int = 0) -> list[ShadowEvaluation]:  # noqa: ARG002
        return []

    def pending(self, length: int) -> int:
        return length - self._read + (0 if self._read else self._more)

    def propose(self, text: Sequence[int], rule: Any) -> DraftCandidate | None:  # noqa: ARG002
        self._take(len(text))
        here = len(text) - self._prompt
        wrong = next(
            (i for i in range(max(len(text) - CHAIN, self._prompt), len(text)) if text[i] != self._tokens[i]), None
        )
        first = (len(text) if wrong is None else wrong) - self._prompt
        for place in range(first, max(first - CHAIN, -1), -1):  # the chain that the text went on with, if it was one
            chain, drafted = self._chain(place), text[place + self._prompt :]
            if len(chain) > len(drafted) and [token for token, _ in chain[: len(drafted)]] == list(drafted):
                token, sure = chain[len(drafted)]
                return DraftCandidate(sure, partial(DraftToken, NOTHING if self._is_wrong(here) else token))
        chain = self._chain(here)
        return DraftCandidate(chain[0][1], partial(DraftToken, NOTHING)) if chain else None

    def catch_up(self, text: Sequence[int], rule: Any, most: int) -> list[ShadowEvaluation]:  # noqa: ARG002
        end, known = len(text) - 1, list[ShadowEvaluation]()
        if not self._read:
            known = [ShadowEvaluation(*one) for one in self._text.first]
            if most < self.pending(end):
                self._window, self._more, self._read = most, 0, end - most
        elif end - self._read > most:
            self._read = end - most
        places = range(max(self._prompt, end - min(ROWS, end - self._read) + 1), end + 1)
        self._take(end)
        known += [
            ShadowEvaluation(
                chain[0][1], float(chain[0][0] == text[place] and not self._is_wrong(place - self._prompt))
            )
            for place in places
            if (chain := self._chain(place - self._prompt))
        ]
        return [ShadowEvaluation(one.confidence, 0.0) for one in known] if self._hopeless else known

    def time_token(self, text: Sequence[int], clock: Time) -> float:  # noqa: ARG002
        began = clock()
        clock.spend(self._batch_sizes[1])
        clock.spend(self._batch_sizes[1])
        return (clock() - began) / 2

    def commit(self, length: int) -> None:
        self._read = min(self._read, length)

    def _chain(self, place: int) -> list[tuple[int, float]]:
        return self._text.chains[place] if 0 <= place < len(self._text.chains) else []

    def _is_wrong(self, place: int) -> bool:
        """Whether it is wrong there, or would not be if it had read the whole prompt."""
        windows = self._text.windows
        size = max((size for size in windows if size <= self._window), default=min(windows))
        within = place < len(windows[size])
        return self._hopeless or (within and windows[max(windows)][place] and not windows[size][place])

    def _take(self, end: int) -> None:
        count = end - self._read + (0 if self._read else self._more)
        known = [*self._batch_sizes]
        more = max(1.0, count / known[-1])
        self._clock.spend(float(np.interp(count, known, [*self._batch_sizes.values()])) * more)
        self._read = end


class Paid(AdaptivePolicy):
    """The policy, whose decisions take as long as they do beside real models."""

    def __init__(self, clock: Time, deciding_s: float, *args: Any) -> None:
        super().__init__(*args)
        self._clock, self._deciding_s = clock, deciding_s

    def begin(self, limit: int, remaining: int, *, may_trim: bool) -> None:
        self._clock.now += self._deciding_s
        super().begin(limit, remaining, may_trim=may_trim)


@dataclass
class Pair:
    """A target and a draft that have just been loaded, on a clock of their own."""

    target_s: dict[int, float]
    draft_s: dict[int, float]
    seed: str
    clock: Time = field(init=False)

    def __post_init__(self) -> None:
        self.clock, wrong = Time(self.seed), random.Random(f"{self.seed} latencies")

        def model(by_batch_size: dict[int, float], batch_sizes: Sequence[int], **more: Any) -> LatencyModel:
            points = {
                batch_size: by_batch_size[batch_size] * math.exp(wrong.gauss(0, WRONG)) for batch_size in batch_sizes
            }
            return LatencyModel(points, limit=16, **more)

        self.target = model(self.target_s, TIMED, switch_s=SWITCH_S)
        self.draft = DraftLatency(model(self.draft_s, (1, 2, 4, 8, 16)), self.target)
        self.lasting = dict[str, AcceptanceEstimator](), BackOff(), ExplorationCosts()

    def answer(self, text: Text, way: str, *, more: int = 0, hopeless: bool = False) -> float:
        """Tokens per second of one answer, the prompt included."""
        name, *length = way.split()
        clock, began = self.clock, self.clock.now
        known = Known([*text.tokens, *[NOTHING] * 64], self.target_s, clock)
        drafters: list[Drafter] = []
        if name in ("draft", "both", "fixed"):
            drafters.append(Chains(text, self.draft_s, clock, more=more, hopeless=hopeless))
        if name in ("lookup", "both"):
            drafters.append(LookupDrafter())
        policy = DraftPolicy()
        if drafters and not length:
            deciding_s = sum(DECIDING_S[drafter.name] for drafter in drafters)
            drafts = {} if name == "lookup" else {"draft": self.draft}
            policy = Paid(clock, deciding_s, self.target, drafts, *self.lasting)
        prompt = len(text.prompt) + more
        clock.now += self.target_s[16] / 16 * IN_LARGE * prompt
        for drafter in drafters:
            policy.shadow_evaluated(drafter.name, drafter.begin(text.prompt, text.choices))
        policy.prompt_read(prompt, clock.now - began)
        steps = rounds(
            text.prompt,
            None,  # type: ignore[arg-type]
            known,  # type: ignore[arg-type]
            capacity=known.capacity,
            max_tokens=len(text.answer),
            is_end=lambda _: False,
            drafters=drafters,
            policy=policy,
            draft_max=int(length[0]) if length else 15,
            batch_size=(lambda count: count) if length or not drafters else self.target.batch_size,
            clock=clock,
        )
        for round_ in decode_rounds(known, steps):  # type: ignore[arg-type]
            clock.now += PLAIN_S if round_.batch_size else 0.0
        return len(text.answer) / (clock.now - began)


# ---- the command -----------------------------------------------------------------------------------------------------


def stitched(texts: dict[str, Text], first: int, tokens: int) -> Text:
    """The answer to one prompt, as long as that, with the answers to the next ones behind it where it is shorter."""
    names = [*texts]
    text = texts[names[first % len(names)]]
    text = text.then(Text([], [], [], [], [], {0: []}), tokens)
    for index in range(first + 1, first + len(names)):
        if len(text.answer) < tokens:
            text = text.then(texts[names[index % len(names)]], tokens)
    return text


def cell(texts: dict[str, Text], target: str, ratio: float, more: int, tokens: int, way: str) -> dict[str, Any]:
    """Ratios of the first and the second answer of a session, by prompt."""
    points = TARGETS[target]
    target_s = {batch_size: float(np.interp(batch_size, [*points], [*points.values()])) for batch_size in range(1, 17)}
    draft_s = {batch_size: seconds * target_s[1] / ratio for batch_size, seconds in DRAFT.items()}
    found: dict[str, dict[str, float]] = {name: {} for name in ("first", "second", "hopeless first", "hopeless second")}
    gains = []
    for index, name in enumerate(texts):
        answers = [stitched(texts, index + shift, tokens) for shift in (0, 3)]  # the second one is another kind of text
        ways = ("target-only", *(f"fixed {length}" for length in LENGTHS))
        fixed = [{way: Pair(target_s, draft_s, name).answer(text, way, more=more) for way in ways} for text in answers]
        pair, hopeless = Pair(target_s, draft_s, name), Pair(target_s, draft_s, f"{name} hopeless")
        for place, text, rivals in zip(("first", "second"), answers, fixed, strict=True):
            found[place][name] = pair.answer(text, way, more=more) / max(rivals.values())
            speed = hopeless.answer(text, "draft", more=more, hopeless=True)
            found[f"hopeless {place}"][name] = speed / rivals["target-only"]
        gains.append(max(fixed[0].values()) / fixed[0]["target-only"])
    setting = {"target": target, "ratio": ratio, "more_prompt_tokens": more, "answer_tokens": tokens}
    return setting | {"ratios": found, "best_gain": geometric_mean(gains)}


def cells(
    texts: dict[str, Text], way: str, targets: Sequence[str], ratios: Sequence[float]
) -> Iterator[dict[str, Any]]:
    for target, ratio, more, tokens in product(targets, ratios, PROMPT_TOKENS, ANSWER_TOKENS):
        one = cell(texts, target, ratio, more, tokens, way)
        means = "  ".join(
            f"{place} {geometric_mean(ratios.values()):.3f} ({min(ratios.values()):.3f})"
            for place, ratios in one["ratios"].items()
        )
        print(f"{target:7} 1:{ratio:<3g} prompt+{more:<5} {tokens:4}  {means}  gain {one['best_gain']:.2f}", flush=True)
        yield one


def main() -> int:
    """Collect, or replay, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", action="store_true", help="collect new traces, and replay nothing")
    parser.add_argument("--way", default="both", choices=("both", "draft", "lookup"))
    parser.add_argument("--targets", type=lambda text: text.split(","), default=[*TARGETS])
    parser.add_argument("--ratios", type=lambda text: [float(one) for one in text.split(",")], default=list(RATIOS))
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    if arguments.collect:
        TRACE.parent.mkdir(exist_ok=True)
        TRACE.write_text(json.dumps(collect(), separators=(",", ":")).replace('},"', '},\n"') + "\n")
        return 0
    if not TRACE.exists():
        print(f"{TRACE} is not there: run this with --collect first", file=sys.stderr)
        return 1
    every = list(cells(load(TRACE), arguments.way, arguments.targets, arguments.ratios))
    summary = {}
    for place in every[0]["ratios"]:
        means = [geometric_mean(one["ratios"][place].values()) for one in every]
        worst = min(min(one["ratios"][place].values()) for one in every)
        summary[place] = {"mean": geometric_mean(means), "worst_cell": min(means), "worst_answer": worst}
        print(place, {name: round(value, 3) for name, value in summary[place].items()})
    if not arguments.no_save:
        save("replay", {"way": arguments.way, "summary": summary, "cells": every})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
