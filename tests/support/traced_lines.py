"""A round of a trace decided again, from nothing but its line of JSON."""

from __future__ import annotations

import math
from typing import Any

Line = dict[str, Any]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(bits: int) -> int:
    """The finaliser of splitmix64."""
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & _MASK
    return bits ^ bits >> 31


def noise(seed: int, position: int, token: int) -> float:
    """Keyed Gumbel noise, as its contract has it."""
    start = mix((mix((seed + _GOLDEN) & _MASK) + _GOLDEN * (position + 1)) & _MASK)

    def exponential(bits: int) -> float:
        return -math.log((bits // 2**12 + 0.5) / 2**52)

    block = mix((start + _GOLDEN * (2 * (token // 1024) + 1)) & _MASK)
    arrival = exponential(block) / 1024
    if block % 1024 != token % 1024:
        arrival += exponential(mix((start + _GOLDEN * (2 * token)) & _MASK))
    return -math.log(arrival)


def stays(line: Line, place: Line) -> bool:
    """Whether a drafted token that was judged stays."""
    kind, _, number = line["rule"].partition(":")
    judged = place["judged"]
    if kind == "residual":
        return judged["uniform"] is not None and judged["uniform"] < min(1, judged["p"] / place["q"])
    own, mine = judged["own"], judged["sum"]
    if own is None:
        return False
    if mine is not None:
        total, highest = mine["score"] + mine["noise"], own["sum"]["score"] + own["sum"]["noise"]
        assert total <= highest, "the target's own choice has the highest sum"
        if total == highest and place["token"] <= own["token"]:
            return True
    if kind == "top-k":
        assert judged["rank"]["most"] == int(number)
        return judged["target"]["logit"] is not None and judged["rank"]["rank"] <= int(number)
    if kind == "typical":
        weighed, epsilon = judged["typical"], float(number)
        bar = min(epsilon, math.sqrt(epsilon) * math.exp(-weighed["entropy"]))
        assert math.isclose(weighed["bar"], bar, rel_tol=1e-12)
        return weighed["probability"] > weighed["bar"]
    assert kind == "exact"
    return False


def check(line: Line) -> None:
    """The line's verdicts, tokens and noise are those that its numbers give.

    Raises:
        AssertionError: they are not.
    """
    assert line["schema"] == "ggufspec/trace-round@2"
    places, added = line["drafted"], line["added"]
    kept = 0
    for number, place in enumerate(places):
        if number > kept:
            assert (place["result"], place["judged"]) == ("unread", None)
        else:
            decided = stays(line, place)
            assert place["result"] == ("accepted" if decided else "rejected"), place
            kept += decided
        assert (place["draft"] is None) == (place["drafter"] != "draft")
        assert place["drafter"] == "draft" or place["q"] == 1
        assert 0 < place["q"] <= 1 + 1e-12
    assert line["accepted"] == kept
    tokens = [place["token"] for place in places[:kept]]
    if added is not None:
        assert added["source"] == ("bonus" if places and kept == len(places) else "target")
        tokens += [added["token"]] * added["emitted"]
    assert line["emitted"] == tokens[: len(line["emitted"])]
    assert added is None or added["emitted"] == (len(line["emitted"]) == kept + 1)
    _check_added(line, kept)
    _check_noise(line)


def _check_added(line: Line, kept: int) -> None:
    added, places = line["added"], line["drafted"]
    if added is None:
        assert line["grammar"]
        return
    if line["rule"] == "residual":
        drawn = added["drawn"]
        assert drawn["before"] < (1 - drawn["uniform"]) * drawn["total"] <= drawn["reached"]
        assert math.isclose(drawn["reached"] - drawn["before"], added["probability"], abs_tol=1e-9)
        assert added["distribution"] == "p" or kept < len(places)
        if added["distribution"] == "residual" and places[kept]["drafter"] != "draft":
            assert added["token"] != places[kept]["token"], "all of q is on the token that was refused"
    else:
        assert (added["distribution"], added["drawn"]) == ("p", None)
        assert added["probability"] == added["p"]
        if kept < len(places):
            own = places[kept]["judged"]["own"]
            assert (own["token"], own["p"], own["sum"]) == (added["token"], added["p"], added["sum"])


def _check_noise(line: Line) -> None:
    if line["rule"] == "residual":
        return
    sums = [
        (place["position"], token, sum_)
        for place in line["drafted"]
        if (judged := place["judged"]) is not None
        for token, sum_ in (
            (place["token"], judged["sum"]),
            *([(judged["own"]["token"], judged["own"]["sum"])] if judged["own"] else []),
        )
        if sum_ is not None
    ]
    if line["added"] is not None:
        sums.append((line["added"]["position"], line["added"]["token"], line["added"]["sum"]))
    for position, token, sum_ in sums:
        expected = noise(line["seed"], position, token) if line["temperature"] else 0.0
        assert math.isclose(sum_["noise"], expected, rel_tol=1e-9, abs_tol=1e-9)


def law(seen: Line, temperature: float) -> dict[int, float]:
    """What an untruncated row of at most ten tokens means at a temperature: the probability of each."""
    if temperature == 0:
        best = max(one["probability"] for one in seen["likeliest"])
        winner = min(one["token"] for one in seen["likeliest"] if one["probability"] == best)
        return {one["token"]: float(one["token"] == winner) for one in seen["likeliest"]}
    weights = {one["token"]: one["probability"] ** (1 / temperature) for one in seen["likeliest"]}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def check_whole(line: Line) -> None:
    """The same from the rows themselves: of a vocabulary of at most ten tokens, not truncated, without a grammar.

    Raises:
        AssertionError: a number is not what the rows give.
    """
    temperature, seed = line["temperature"], line["seed"]

    def near(a: float, b: float) -> bool:
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)

    def own(seen: Line, position: int) -> int:
        if temperature == 0:
            return max(law(seen, 0).items(), key=lambda item: item[1])[0]
        return max(law(seen, temperature).items(), key=lambda item: math.log(item[1]) + noise(seed, position, item[0]))[
            0
        ]

    for place in line["drafted"]:
        q = law(place["draft"], temperature) if place["draft"] else {place["token"]: 1.0}
        assert near(place["q"], q[place["token"]])
        if (judged := place["judged"]) is None:
            continue
        p = law(judged["target"], temperature)
        assert near(judged["p"], p[place["token"]])
        assert near(judged["ratio"], judged["p"] / place["q"])
        if line["rule"] != "residual":
            assert judged["own"]["token"] == own(judged["target"], place["position"])
            assert near(judged["own"]["p"], p[judged["own"]["token"]])
        if "top-k" in line["rule"]:
            ranked = [one["token"] for one in judged["target"]["likeliest"]]
            assert judged["rank"]["rank"] == ranked.index(place["token"]) + 1
        if "typical" in line["rule"]:
            there = law(judged["target"], temperature or 1.0)
            entropy = -sum(x * math.log(x) for x in there.values() if x > 0)
            assert near(judged["typical"]["entropy"], entropy)
            assert near(judged["typical"]["probability"], there[place["token"]])
    added = line["added"]
    p = law(added["target"], temperature)
    assert near(added["p"], p[added["token"]])
    if line["rule"] != "residual":
        assert added["token"] == own(added["target"], added["position"])
        return
    if added["distribution"] == "residual":
        refused = line["drafted"][line["accepted"]]
        q = law(refused["draft"], temperature) if refused["draft"] else {refused["token"]: 1.0}
        excess = {token: max(value - q.get(token, 0.0), 0.0) for token, value in p.items()}
        p = {token: value / sum(excess.values()) for token, value in excess.items()}
    assert math.isclose(added["probability"], p[added["token"]], rel_tol=1e-7, abs_tol=1e-12)
    before = sum(value for token, value in p.items() if token < added["token"])
    assert math.isclose(added["drawn"]["before"], before, rel_tol=1e-7, abs_tol=1e-9)
