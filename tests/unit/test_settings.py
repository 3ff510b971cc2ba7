"""The table of options."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ggufspec.bench.hooked import TRUNCATIONS
from ggufspec.chat.commands import ChatSwitches, sampled
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import UsageError
from ggufspec.llamacpp import options as llamacpp
from ggufspec.llamacpp import params
from ggufspec.reports.documents import parse_document
from ggufspec.serve.requests import CompletionBody
from ggufspec.settings import table
from ggufspec.settings.table import OPTIONS, Settings
from tests.support import kept_results


def test_values_are_checked_wherever_they_come_from() -> None:
    assert Settings(ctx_size="512", gpu_layers="all", headroom=2**28) == Settings(  # type: ignore[arg-type]
        ctx_size=512, gpu_layers=-1, headroom="268435456"
    )
    assert Settings(tensor_split="3,1").tensor_split == (3.0, 1.0)  # type: ignore[arg-type]
    assert Settings(rpc="host:1").rpc == ("host:1",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "message", "hint"),
    [
        ("ctx_size", -1, "--ctx-size -1 is out of range: 2 to", "-c 8192, or -c max"),
        ("ctx_size", "many", "--ctx-size 'many' is not a number of tokens", "-c 8192, or -c max"),
        ("draft_max", 256, "--draft-max 256 is out of range: 1 to 255", "--draft-max 63"),
        ("top_p", 0, "above 0, at most 1", "1 turns it off"),
        ("temp", math.nan, "--temp nan", "0 is greedy"),
        ("acceptance", 1.5, "--acceptance 1.5 is out of range: 0 to 1", "--acceptance 0.7"),
        ("temp", math.inf, "--temp inf", "0 is greedy"),
        ("drafter", "me", "there is no drafter 'me'", ", ".join(OPTIONS["drafter"].words)),
        ("cache_type_k", "q9", "there is no key cache type 'q9'", "q8_0"),
        ("gpu_layers", "some", "is not a number of layers", "45, all or auto"),
        ("n_cpu_moe", "9" * 5000, "is not a whole number", "--n-cpu-moe 10"),
    ],
)
def test_a_value_that_is_refused(name: str, value: Any, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        Settings(**{name: value})
    assert message in refused.value.message
    assert hint in refused.value.hint
    assert len(refused.value.message) < 200


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("ctx_size", "512, 1024", [512, 1024]),
        ("gpu_layers", "0-16+8,all", [0, 8, 16, -1]),
        ("draft_max", "1-16*2", [1, 2, 4, 8, 16]),
        ("cache_type_k", "f16,q8_0,f16", ["f16", "q8_0"]),
    ],
)
def test_a_list_is_read_by_type(name: str, text: str, values: list[Any]) -> None:
    assert [value for _, value in OPTIONS[name].parse_list(text)] == values


@pytest.mark.parametrize("text", ["1,,2", "8-2", "1-9+0", "0-8*2", "1-200"])
def test_a_list_that_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        OPTIONS["draft_max"].parse_list(text)


def test_what_is_given_goes_over_the_rest() -> None:
    given = Settings(ctx_size=512).over(Settings(ctx_size=1024, threads=2))
    assert given.given() == {"ctx_size": 512, "threads": 2}
    assert (given.value("ctx_size"), given.value("cache_type_k")) == (512, "f16")


def test_keywords_are_checked_by_name() -> None:
    assert table.of_keywords({"ctx_size": 512, "threads": None}) == Settings(ctx_size=512)
    for name, meant in (("ctxsize", "ctx_size"), ("n_ctx", "ctx_size"), ("type_k", "cache_type_k")):
        with pytest.raises(UsageError, match="there is no option") as refused:
            table.of_keywords({name: 1})
        assert meant in refused.value.hint


def test_old_names_are_renamed_at_any_depth() -> None:
    assert table.renamed({"settings": [{"n_ctx": 1, "type_k": "f16", "threads": 2}]}) == {
        "settings": [{"ctx_size": 1, "cache_type_k": "f16", "threads": 2}]
    }
    assert set(table.OLD_NAMES.values()) <= OPTIONS.keys()


def test_the_table_agrees_with_llama_cpp() -> None:
    assert tuple(llamacpp.KV_TYPES) == table.KV_TYPES
    assert set(OPTIONS["flash_attn"].choices) == params._FLASH_ATTENTION.keys()


def test_names_are_llama_cpp_s_long_flags() -> None:
    for name, row in OPTIONS.items():
        assert not row.flags or row.flags[-1] == f"--{name.replace('_', '-')}", name


def test_a_path_stays_one() -> None:
    assert Settings(file="a.txt").file == Path("a.txt")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [kept_results.tune, kept_results.compare, kept_results.sweep])
def test_results_of_older_versions_are_read(kind: Callable[[], Any]) -> None:
    def aged(value: Any) -> Any:
        if isinstance(value, dict):
            return {olds.get(key, key): aged(each) for key, each in value.items()}
        return [aged(each) for each in value] if isinstance(value, list) else value

    olds = {new: old for old, new in table.OLD_NAMES.items()}
    today = kept_results.as_json(kind())
    old = aged(today)
    assert old != today
    assert parse_document(old) == parse_document(today)


def test_a_sweep_of_an_older_version_is_of_today_s_option() -> None:
    body = kept_results.as_json(kept_results.sweep("cache_type_k")) | {"option": "type_k"}
    assert parse_document(body).option == "cache_type_k"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "chance"), [("0.8", 0.8), ("0.26@16", 0.8118), ("0.7@1", 0.7), ("1@8", 1), ("0@8", 0)]
)
def test_an_acceptance_rate_at_a_length_is_the_chance_of_one_token(text: str, chance: float) -> None:
    found = Settings(acceptance=text).acceptance  # type: ignore[arg-type]
    assert found == pytest.approx(chance, abs=1e-3)
    rate, _, length = text.partition("@")
    if length:
        accepted = sum(found**i for i in range(1, int(length) + 1))  # type: ignore[operator]
        assert accepted / int(length) == pytest.approx(float(rate), abs=1e-6)


@pytest.mark.parametrize("text", ["0.3@0", "0.3@many", "0.3@300", "much@4", "1.3@4"])
def test_an_acceptance_rate_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="--acceptance") as refused:
        Settings(acceptance=text)  # type: ignore[arg-type]
    assert "0.26@16" in refused.value.hint


@pytest.mark.parametrize("name", sorted({*table.names(group="sampling")} - {"temp", "seed", "repeat_last_n"}))
def test_an_option_of_sampling_reaches_every_place(name: str) -> None:
    """A server's requests have it; a penalty is known as one, a truncation is named by a chat and known to the hook."""
    row = OPTIONS[name]
    assert name in CompletionBody.model_fields
    sampling = Sampling(temperature=0.8, **{name: row.most * 0.75 if row.most else 7})
    assert getattr(sampling, name) != row.default
    if not sampling.penalises:
        assert row.flags[-1].strip("-") in sampled(ChatSwitches(has_draft=False, sampling=sampling))
        assert name in TRUNCATIONS
