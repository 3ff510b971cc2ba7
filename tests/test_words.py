"""The field's words everywhere: none of the private ones of earlier versions is in code, messages or documents."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HISTORY = ("CHANGELOG.md", "docs/evidence/", "tests/test_words.py")  # what was so then; this list
SUFFIXES = {".py", ".md", ".toml", ".html", ".css", ".1", ".sh", ""}

# (pattern, what to write); patterns know upper case from lower.
WORDS = {
    r"\b[Hh]indsight\b": "shadow evaluation",
    r"\b[Rr](?:eads?|eading) along\b": "catch up",
    r"\b[Ww]eari(?:ness|some)\b|\bweary\b|\bto tire\b|\bresting\b|\basleep\b|\bfell asleep\b|\bawake\b": "back-off",
    r"\bPace\b": "latency model",
    r"\b(?:Verify)?Curve\b|\b_?curves?\b": "latency model, batch latencies",
    r"\bLaw\b|\bChance\b|\bcoins?\b": "distribution, uniform draw",
    r"\bkeyed\b": "coupled",
    r"\b[Tt]arget alone\b|\bdraft (?:model )?alone\b": "target-only, draft-only",
    r"\b[Nn]obody (?:drafts?|guesses|has|knows|asked|was|took|looked)\b": "speculation off",
    r"\bcame through\b": "succeeded",
    r"\bChosen\b|\bAsked\b|\bMade\b(?=[(\]:,|])|\bPlaced\b(?=[(\]:,|])": "PairSpec, PlacementRequest, PlanResult, …",
    r"(?:ggufspec|cli|decoding)[./]planned\b|\bgiven\.py\b|\bcli import given\b": "resolved settings",
    r"\b[Ss]keletons?\b": "metadata-only GGUF",
    r"\b[Ss]tand-?ins?\b": "dummy weights",
    r"\b[Pp]aper[ _]cards?\b": "simulated device",
    r"\b(?:[Gg]rown|[Gg]rew)\b": "expanded",
    r"\b[Ll]edgers?\b|\b[Jj]ournals?\b": "cache, run log",
    r"\bKept\b(?=[(:\]|,])|\bLearned\b|\bRemembered\b": "cache",
    r"\b_?told\b(?= ?[=(:])|\bdef _?(?:tell|says|asks|told)\w*\(": "notes, report, messages",
    r"\bdoors?\b|\b(?:top|same) room\b|\brooms below\b": "layer, entry point",
    r"\btest_house\b|\bthe house\b": "layout",
    r"(?<!there )\bis no (?:list|number|table|text|profile|name|option)\b|\bno number of\b": "is not a …",
    r"\bthat does not draft\b|\bdoes not draft\b": "--lookup-corpus needs --drafter lookup",
    r"\bthe dearer of\b|\bwithout one the\b": "otherwise …",
}

# (path, what may stay there): field names of files that are kept, and other people's words.
ALLOWED: dict[str, str] = {
    "ggufspec/bench/prompts.py": r"asleep|door",  # the text that quality is measured on
}


def files() -> Iterator[Path]:
    """Every text file under version control that people read, but history."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        path = ROOT / name
        if path.suffix in SUFFIXES and path.is_file() and not name.startswith(HISTORY):
            yield path


def found(pattern: str) -> list[str]:
    """``path:line: text`` of every place where a pattern is."""
    places = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            words = {match[0] for match in re.finditer(pattern, line)}
            if words and not (name in ALLOWED and all(re.search(ALLOWED[name], word) for word in words)):
                places.append(f"{name}:{number}: {line.strip()[:120]}")
    return places


@pytest.mark.parametrize("pattern", WORDS, ids=WORDS.get)
def test_the_word_is_gone(pattern: str) -> None:
    places = found(pattern)
    assert not places, f"write {WORDS[pattern]!r}:\n" + "\n".join(places)
