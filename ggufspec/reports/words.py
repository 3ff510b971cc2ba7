"""Formatting of measured values and settings in words. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ggufspec.schema.base import MeasuredRun, SpeculativeRun, Spread
from ggufspec.schema.text import counted, number
from ggufspec.settings.registry import DRAFTERS, drafters_label

MODES = {
    "target_only_at_pair": "target at pair",  # target-only with as many GPU layers as in the pair
    "llama_target_only": "Llama alone",
    "llama_hook": "Llama + hook",
}
FEW_DRAFTED = 20  # number of drafted tokens below which a percentage would look too precise


def mode_name(mode: str) -> str:
    return MODES.get(mode, mode.replace("_", "-"))


def conditions(settings: dict[str, Any], swept: str = "", *, extent: bool = True) -> str:
    """Return one line with a bench's settings, without the ``swept`` key; ``extent`` adds how much was measured."""
    prompts = counted(settings["prompts"], "prompt")
    if how := settings.get("prompt_format"):
        prompts += f" ({how})"
    parts = [f"{prompts} × {counted(settings['max_tokens'], 'token')}"] if extent else []
    if settings.get("depth"):
        parts.append(f"{settings['depth']:,} tokens deep")
    if swept != "drafter":
        parts.append(drafters_label(settings["drafter"]))
    if swept not in ("draft_policy", "draft_max"):
        most = "at most " if settings["draft_policy"] == "adaptive" else ""
        length = f"{most}{counted(settings['draft_max'], 'token')} a round"
        parts[-1:] = [f"{parts[-1]} ({length})"] if swept != "drafter" else [*parts[-1:], length]
    parts.append("greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']}")
    parts += filter(None, [penalties(settings)])
    if swept != "accept":
        parts.append(f"{settings['accept']}{' (lossy)' if settings['lossy'] else ''}")
    parts += ["strict"] * settings["strict"]
    if swept != "threads":
        parts.append(counted(settings["threads"], "thread"))
    return ", ".join([*parts, *([f"{counted(settings['repetitions'], 'trial')} each"] if extent else [])])


def penalties(settings: dict[str, Any]) -> str:
    """Return the penalties in a document's settings in words; "" without penalties."""
    off = {"repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    found = [f"{key.replace('_', ' ')} {settings[key]}" for key, none in off.items() if settings.get(key, none) != none]
    last = settings.get("repeat_last_n", 0)
    if not found or not last:
        return ""
    return f"{', '.join(found)} over {'the context' if last == -1 else counted(last, 'token')}"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"


def first_token(seconds: float) -> str:
    return f"first token after {f'{seconds:.2f} s' if seconds >= 1 else milliseconds(seconds)}"


def prompt_figures(run: MeasuredRun) -> str:
    """Return prompt speed and time to first token in words; "" if an old result lacks them."""
    if run.time_to_first_token_s is None:
        return ""
    read = [f"{counted(run.prompt_tokens, 'token')} at {number(run.prompt_tokens_per_s)}/s"]
    return ", ".join([*(read if run.prompt_tokens else []), first_token(run.time_to_first_token_s)])


def with_spread(value: Spread, scale: float = 1.0) -> str:
    """Format the median ± the larger half of its interval, both times ``scale``; a single trial has no interval."""
    median, half = scale * value.median, scale * max(value.median - value.ci95[0], value.ci95[1] - value.median)
    digits = 0 if median >= 100 else 1 if median >= 10 else 2
    return f"{median:.{digits}f}" if len(value.samples) < 2 else f"{median:.{digits}f} ± {half:.{digits}f}"


def ratio(value: Spread) -> str:
    """Format a ratio without its interval, such as 1.42×."""
    return f"{value.median:.2f}×"


def ratio_text(value: Spread | None) -> str:
    """Format a ratio with its interval, such as 1.42× (1.39 to 1.45); return "" for None."""
    return "" if value is None else ratio(value) + _interval(value)


def over(value: Spread | None, baseline: str) -> str:
    """Format a ratio for a sentence, such as 1.42× target-only (95% interval 1.39 to 1.45); return "" for None."""
    return "" if value is None else f"{ratio(value)} {baseline}{_interval(value, '95% interval ')}"


def _interval(value: Spread, words: str = "") -> str:
    low, high = value.ci95
    return f" ({words}{low:.2f} to {high:.2f})" if len(value.samples) > 1 else ""


def median(value: Spread) -> float:
    return value.median


def layers(run: MeasuredRun) -> str:
    """Format the target's GPU layers out of all its layers, and the draft's if there is one."""
    text = f"{run.gpu_layers}/{run.layers + 1}"
    if isinstance(run, SpeculativeRun) and run.draft_layers:
        text += f" + {run.gpu_layers_draft}/{run.draft_layers + 1}"
    return text


def speed(run: MeasuredRun) -> str:
    """Format a run's tokens/s with spread, marked as lossy if its acceptance rule may change the text."""
    lossy = isinstance(run, SpeculativeRun) and run.lossy
    return with_spread(run.tokens_per_s) + (" (lossy)" if lossy else "")


def share(accepted: int, drafted: int) -> str:
    """Format accepted ÷ drafted tokens in %, as counts if few were drafted (1 of 3), or as a dash if none were."""
    few = f"{accepted} of {drafted}" if drafted else "–"
    return few if drafted < FEW_DRAFTED else f"{accepted / drafted:.0%}"


def accepted_text(run: MeasuredRun | None) -> str:
    return share(run.accepted, run.drafted) if isinstance(run, SpeculativeRun) else ""


def acceptance(run: MeasuredRun | None) -> float | None:
    """Return the acceptance rate; None if too few tokens were drafted to compare it with another run's."""
    return run.acceptance_rate if isinstance(run, SpeculativeRun) and run.drafted >= FEW_DRAFTED else None


def by_drafter(run: MeasuredRun | None, drafter: str) -> str:
    """State how many tokens from each of ``drafter``'s two drafters were accepted; return "" unless both drafted."""
    label, lookup = drafters_label(drafter), DRAFTERS["lookup"].label
    own = label.removesuffix(f" and {lookup}")
    if not isinstance(run, SpeculativeRun) or own == label or not 0 < run.lookup_drafted < run.drafted:
        return ""
    by_lookup = run.lookup_accepted, run.lookup_drafted
    counts = ((own, run.accepted - by_lookup[0], run.drafted - by_lookup[1]), (lookup, *by_lookup))
    parts = (
        f"{name} {kept:,} of {every:,}" + (f" ({share(kept, every)})" if every >= FEW_DRAFTED else "")
        for name, kept, every in counts
    )
    return f"Accepted: {', '.join(parts)}."


def tokens_per_round(run: MeasuredRun | None) -> str:
    return f"{run.tokens_per_round:.2f}" if isinstance(run, SpeculativeRun) else ""


def cards_of(machine: dict[str, Any]) -> list[tuple[str, int]]:
    """Return (name, bytes) of each GPU in a document; 0 bytes if the size is unknown."""
    found = machine.get("gpus")
    return [
        (str(card.get("name", "card")), size if isinstance(size := card.get("total_bytes"), int) else 0)
        for card in (found if isinstance(found, (list, tuple)) else ())
        if isinstance(card, dict)
    ]


# ---- names of models ------------------------------------------------------------------------------------------------


def base_name(value: object) -> str:
    """Return the name of a file without its folder and ``.gguf``."""
    name = str(value or "").replace("\\", "/").rpartition("/")[2]
    return name.removesuffix(".gguf")


def common_stem(names: Sequence[str]) -> str:
    """Return the prefix of whole words that all names share; "" for a single name."""
    split = _split(dict.fromkeys(names))
    common = 0
    if len(split) > 1:
        while all(len(words) > common + 1 for words in split) and len({words[common] for words in split}) == 1:
            common += 1
    return "".join(split[0][:common]) if split else ""


def _split(names: Iterable[str]) -> list[list[str]]:
    return [re.split(r"(?<=[-/ ])|(?<=\.)(?!\d)", name) for name in names]


def shorter(names: Sequence[str], most: int | None = None) -> dict[str, str]:
    """Return distinct names without folder, extension and shared prefix, cut to ``most`` characters if possible."""
    plain = {name: base_name(name) for name in names}
    stem = common_stem(list(plain.values()))
    found = {name: text[len(stem) :] for name, text in plain.items()}
    if len(set(found.values())) < len(found):
        found = {name: name for name in names}
    cut = fitted(found.values(), most) if most else {}
    return {name: cut.get(text, text) for name, text in found.items()}


def fitted(texts: Iterable[str], most: int) -> dict[str, str]:
    """Return each text cut to ``most`` characters, omitting words that it shares with texts that begin alike.

    Texts that would still become equal are not cut.
    """
    every = list(dict.fromkeys(texts))
    split = dict(zip(every, _split(every), strict=True))
    cut = {text: words[0] for text, words in split.items()}
    for fewest in (1, 2):  # first among texts with the same first word, then among those cut to the same form
        alike = defaultdict(list)
        for text, short in cut.items():
            alike[short].append(text)
        for some in (found for found in alike.values() if len(found) >= fewest):
            counts = Counter(word for text in some for word in {*split[text]})
            cut |= {text: _without(counts, split[text], most) for text in some}
    shown = Counter(cut.values())
    return {text: short if shown[short] == 1 else text for text, short in cut.items()}


def _without(counts: Counter[str], words: Sequence[str], most: int) -> str:
    """Omit the words with the highest counts, those in the middle first, until the rest fits ``most`` characters."""
    middle = (len(words) - 1) / 2
    order = sorted(range(len(words)), key=lambda i: (-counts[words[i]], abs(i - middle), -i))
    text = "".join(words)
    for left_out in range(1, len(words)):
        if len(text) <= most:
            break
        text = re.sub("\0+", "…", "".join("\0" if i in order[:left_out] else word for i, word in enumerate(words)))
    return shortened(text, most)


def shortened(text: str, most: int) -> str:
    """Return ``text``, with its middle cut out if it is too long: the ends of a file name say the most."""
    tail = most * 3 // 5
    return text if len(text) <= most else f"{text[: max(0, most - tail - 1)]}…{text[-tail:]}"
