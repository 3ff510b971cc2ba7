"""Models that a profile expands: made once, kept in the cache, and the small ones' own words at another cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from ggufspec import demo_pair, load_profile
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.files import cache as caches
from ggufspec.models import expanded, profile

SMALL = """
name = "mine"
why = "The pair, expanded."
source = "here"
[target]
file = "{target}"
[draft]
file = "{draft}"
expand = "{expand}"
[bench]
prompts = ["code"]
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(expanded, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "expanded"


def written(tmp_path: Path, expand: str = "smollm2-draft:Q8_0") -> profile.Profile:
    target, draft = demo_pair()
    path = tmp_path / "mine.toml"
    path.write_text(SMALL.format(target=target, draft=draft, expand=expand))
    return load_profile(path)


def test_it_is_made_once_and_looking_makes_nothing(cache: Path, tmp_path: Path) -> None:
    mine, events = written(tmp_path), []
    assert not profile.is_made(mine)
    assert not cache.exists()
    pair = profile.local_pair(mine, events.append)
    assert pair.draft is not None
    assert (pair.target, pair.draft.name) == (demo_pair()[0], "demo-draft-as-smollm2-draft-Q8_0.gguf")
    assert pair.draft.is_relative_to(cache)
    assert {event["file"] for event in events} == {pair.draft.name}
    assert profile.is_made(mine)
    before = pair.draft.stat()
    assert profile.local_pair(mine) == pair
    assert profile.header_sources(mine) == (pair.target, pair.draft)
    assert pair.draft.stat() == before
    assert [path for path in cache.rglob("*") if path.is_file()] == [pair.draft]
    assert (pair.bench.prompts, pair.describe()["note"]) == (["code"], "The pair, expanded.")


def test_a_changed_source_is_expanded_anew_and_the_old_one_goes(cache: Path, tmp_path: Path) -> None:
    _, draft = demo_pair()
    own = tmp_path / "own-Q8_0.gguf"
    own.write_bytes(draft.read_bytes())
    first = expanded.expanded(own, "smollm2-draft:Q8_0")
    own.write_bytes(draft.read_bytes() + b"\0")
    second = expanded.expanded(own, "smollm2-draft:Q8_0")
    assert (first != second, first.name) == (True, second.name)
    assert [path for path in cache.rglob("*") if path.is_file()] == [second]
    assert list(cache.iterdir()) == [second.parent]


@pytest.mark.parametrize(
    ("stem", "name"),
    [("demo-target-F16", "demo-target-as-smollm2-360m-Q4_0.gguf"), ("my-model", "my-model-as-smollm2-360m-Q4_0.gguf")],
)
def test_the_name_says_what_it_is(stem: str, name: str) -> None:
    assert expanded.expanded_name(stem, "smollm2-360m:q4_0") == name


@pytest.mark.parametrize(
    ("expand", "words"),
    [("huge:F16", "does not name a shape"), ("smollm2-draft", "file type"), ("smollm2-draft:Q9", "Q9")],
)
def test_what_cannot_be_expanded_is_refused(cache: Path, tmp_path: Path, expand: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        profile.local_pair(written(tmp_path, expand))
    assert refused.value.hint
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(expanded, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(caches, "_warnings", [])
    made = profile.local_pair(written(tmp_path)).draft
    assert made.is_file()
    assert caches.is_temporary(made)
    assert caches.warning().startswith(f"nothing is kept in {tmp_path}/cache/expanded, which cannot be written")
    assert profile.local_pair(written(tmp_path)).draft == made


def test_a_model_of_the_hub_cannot_be_expanded(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "a"\nwhy = "b"\nsource = "c"\n[target]\nrepo = "u/r"\nfile = "m.gguf"\nexpand = "smollm2-draft:F16"\n'
    )
    with pytest.raises(GgufspecError, match="only a file on this machine can be expanded"):
        load_profile(path)


def test_the_pair_that_bench_measures_without_a_pair_says_what_it_is() -> None:
    bundled = load_profile("demo-360m")
    assert "expanded" in bundled.note
    assert (load_profile("demo").note, load_profile("llama3-70b").note) == ("", "")
    for model in (bundled.target, bundled.draft):
        assert model is not None
        assert model.expand is not None
        assert expanded.parse_expand(model.expand)[0].startswith("smollm2-")
