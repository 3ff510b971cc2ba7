"""Measured values and settings in words. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ggufspec.schema.base import Run, SpeculativeRun, Spread
from ggufspec.schema.text import counted, number
from ggufspec.settings.registry import drafters_label

MODES = {
    "target_only_at_pair": "target at pair",  # target-only with the pair's GPU layers
    "llama_target_only": "Llama alone",
    "llama_hook": "Llama + hook",
}


def mode_name(mode: str) -> str:
    return MODES.get(mode, mode.replace("_", "-"))


def conditions(settings: dict[str, Any], swept: str = "", *, extent: bool = True) -> str:
    """Return a bench's settings in one line, without the ``swept`` key; with ``extent`` also how much was measured."""
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
    """Return the penalties of a document's settings in words; empty without any."""
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


def prompt_figures(run: Run) -> str:
    """Return prompt speed and time to first token; empty if an old result lacks them."""
    if run.time_to_first_token_s is None:
        return ""
    read = [f"{counted(run.prompt_tokens, 'token')} at {number(run.prompt_tokens_per_s)}/s"]
    return ", ".join([*(read if run.prompt_tokens else []), first_token(run.time_to_first_token_s)])


def with_spread(value: Spread, scale: float = 1.0) -> str:
    """Return the median ± the larger half of its interval, times ``scale``; a single trial has no interval."""
    median, half = scale * value.median, scale * max(value.median - value.ci95[0], value.ci95[1] - value.median)
    digits = 0 if median >= 100 else 1 if median >= 10 else 2
    return f"{median:.{digits}f}" if len(value.samples) < 2 else f"{median:.{digits}f} ± {half:.{digits}f}"


def ratio(value: Spread) -> str:
    """Return a ratio without its interval: 1.42×."""
    return f"{value.median:.2f}×"


def times(value: Spread | None) -> str:
    """Return a ratio with its interval: 1.42× (1.39 to 1.45); empty for None."""
    return "" if value is None else ratio(value) + _interval(value)


def over(value: Spread | None, rival: str) -> str:
    """Return a ratio for a sentence: 1.42× target-only (95% interval 1.39 to 1.45); empty for None."""
    return "" if value is None else f"{ratio(value)} {rival}{_interval(value, '95% interval ')}"


def _interval(value: Spread, words: str = "") -> str:
    low, high = value.ci95
    return f" ({words}{low:.2f} to {high:.2f})" if len(value.samples) > 1 else ""


def median(value: Spread) -> float:
    return value.median


def layers(run: Run) -> str:
    """Return the target's GPU layers out of all, and the draft's if there is one."""
    text = f"{run.gpu_layers}/{run.layers + 1}"
    if isinstance(run, SpeculativeRun) and run.draft_layers:
        text += f" + {run.gpu_layers_draft}/{run.draft_layers + 1}"
    return text


def speed(run: Run) -> str:
    """Return a run's tokens/s with spread, marked as lossy if its acceptance rule may change the text."""
    lossy = isinstance(run, SpeculativeRun) and run.lossy
    return with_spread(run.tokens_per_s) + (" (lossy)" if lossy else "")


def accepted(run: Run | None) -> str:
    """Return the share of drafted tokens accepted; a dash, not 0%, if none was drafted."""
    if not isinstance(run, SpeculativeRun):
        return ""
    return f"{run.acceptance_rate:.0%}" if run.drafted else "–"


def acceptance(run: Run | None) -> float | None:
    return run.acceptance_rate if isinstance(run, SpeculativeRun) and run.drafted else None


def tokens_per_round(run: Run | None) -> str:
    return f"{run.tokens_per_round:.2f}" if isinstance(run, SpeculativeRun) else ""


def cards_of(machine: dict[str, Any]) -> list[tuple[str, int]]:
    """Return (name, bytes) of each of a document's GPUs; 0 bytes if unknown."""
    found = machine.get("gpus")
    return [
        (str(card.get("name", "card")), size if isinstance(size := card.get("total_bytes"), int) else 0)
        for card in (found if isinstance(found, (list, tuple)) else ())
        if isinstance(card, dict)
    ]


# ---- names of models ------------------------------------------------------------------------------------------------


def base_name(value: object) -> str:
    """Return the file's name without folder and ``.gguf``."""
    name = str(value or "").replace("\\", "/").rpartition("/")[2]
    return name.removesuffix(".gguf")


def common_stem(names: Sequence[str]) -> str:
    """Return the prefix of whole words that all names share; empty for a single name."""
    split = [re.split(r"(?<=[-/ ])|(?<=\.)(?!\d)", name) for name in dict.fromkeys(names)]
    common = 0
    if len(split) > 1:
        while all(len(words) > common + 1 for words in split) and len({words[common] for words in split}) == 1:
            common += 1
    return "".join(split[0][:common]) if split else ""


def shorter(names: Sequence[str], most: int | None = None) -> dict[str, str]:
    """Return distinct short names: without folder, ending and shared prefix, cut to ``most`` characters if possible."""
    plain = {name: base_name(name) for name in names}
    stem = common_stem(list(plain.values()))
    found = {name: text[len(stem) :] for name, text in plain.items()}
    if len(set(found.values())) < len(found):
        found = {name: name for name in names}
    cut = {name: shortened(text, most) for name, text in found.items()} if most else found
    return cut if len(set(cut.values())) == len(cut) else found


def shortened(text: str, most: int) -> str:
    """Return ``text``, its middle cut out if too long: a file name says most at its ends."""
    tail = most * 3 // 5
    return text if len(text) <= most else f"{text[: max(0, most - tail - 1)]}…{text[-tail:]}"
