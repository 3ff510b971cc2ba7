"""How a pair is to be decoded: what is refused, what follows, and how the command line says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ggufspec.api import options
from ggufspec.api.options import decoder_options, placement_of, placement_of_draft
from ggufspec.cli import inputs
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import UsageError
from ggufspec.llamacpp.options import Placement
from ggufspec.planning import catalogue
from ggufspec.planning.plan import PlanMachine
from ggufspec.settings.registry import DRAFTERS, check_rule, drafter_text, is_lossy, parse_drafters
from ggufspec.settings.table import POLICIES, Settings


@pytest.mark.parametrize(
    ("what", "value", "known"), [("drafters", ("nobody",), DRAFTERS), ("draft_policy", "nobody", POLICIES)]
)
def test_an_unknown_name_is_told_the_known_ones(what: str, value: object, known: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=r"there is no .* 'nobody'") as caught:
        DecoderOptions(**{what: value})  # type: ignore[arg-type]
    assert all(name in caught.value.hint for name in known)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("both", ("draft", "lookup")),
        ("none", ()),
        ("draft", ("draft",)),
        ("draft+lookup", ("draft", "lookup")),
        ("lookup+draft", ("lookup", "draft")),
    ],
)
def test_drafters_are_a_set(text: str, names: tuple[str, ...]) -> None:
    assert parse_drafters(text) == names
    assert set(parse_drafters(drafter_text(names))) == set(names)
    with pytest.raises(UsageError, match="there is no drafter 'me'"):
        parse_drafters("draft+me")


@pytest.mark.parametrize(
    ("drafter", "with_draft", "without", "needs_draft"),
    [
        ("both", True, False, True),
        ("draft", True, False, True),
        ("lookup", True, True, False),
        ("none",) + (False,) * 3,
    ],
)
def test_who_drafts(drafter: str, with_draft: bool, without: bool, needs_draft: bool) -> None:
    made = DecoderOptions(drafters=parse_drafters(drafter))
    assert made.drafts(with_draft=True) is with_draft
    assert made.drafts(with_draft=False) is without
    assert made.needs_draft is needs_draft


@pytest.mark.parametrize("drafter", ["draft", "none"])
def test_a_corpus_is_for_the_lookup(drafter: str) -> None:
    with pytest.raises(UsageError, match="--lookup-corpus needs --drafter lookup"):
        DecoderOptions(drafters=parse_drafters(drafter), lookup_corpus=Path("corpus.txt"))


@pytest.mark.parametrize("drafter", ["both", "lookup"])
def test_a_target_that_is_drafted_for_can_verify_the_longest_draft(drafter: str) -> None:
    made = DecoderOptions(drafters=parse_drafters(drafter), draft_max=40)
    assert made.context(with_draft=True).max_outputs == 41
    assert made.context(with_draft=True).rewind >= 40  # all that was drafted
    assert DecoderOptions().context(with_draft=True).rewind == 15  # a state of a recurrent memory for each is dear
    assert DecoderOptions(drafters=(), draft_max=40).context(with_draft=True).max_outputs < 41


@pytest.mark.parametrize("rule", ["exact", "residual", "top-k:1", "top-k:1000", "typical:0.3", "typical:1e-9"])
def test_rules(rule: str) -> None:
    check_rule(rule)
    assert is_lossy(rule) == rule.startswith(("top-k", "typical"))


@pytest.mark.parametrize(
    "rule",
    [
        *("", "top-k", "top-k:", "top-k:0", "top-k:-1", "top-k:1001", "top-k:²", "top-k:1.5"),
        *("typical", "typical:x", "typical:0", "typical:1", "typical:nan", "typical:inf", "exact:1", "Exact"),
    ],
)
def test_rules_that_are_none(rule: str) -> None:
    with pytest.raises(UsageError):
        check_rule(rule)


@pytest.mark.parametrize(
    ("policy", "flag", "profile", "wanted"),
    [
        ("adaptive", None, None, 63),
        ("fixed", None, None, 4),
        ("adaptive", None, 3, 3),
        ("fixed", None, 3, 3),
        ("adaptive", 7, 3, 7),
        ("fixed", 7, 3, 7),
    ],
)
def test_how_far_is_drafted(policy: str, flag: int | None, profile: int | None, wanted: int) -> None:
    made = decoder_options(Settings(draft_policy=policy, draft_max=flag).over(Settings(draft_max=profile)))
    assert (made.draft_max, made.draft_policy) == (wanted, policy)


def test_both_draft_unless_one_is_named() -> None:
    assert decoder_options(Settings()).drafter == "both"
    named = decoder_options(Settings(drafter="lookup"))
    assert named.drafter == "lookup"


def test_a_schema_becomes_a_grammar_and_no_grammar_none(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "boolean"}')
    assert inputs.grammar(Settings()) == ""
    from_text = inputs.grammar(Settings(json_schema='{"type": "boolean"}'))
    assert from_text == inputs.grammar(Settings(json_schema_file=file))
    assert "root ::=" in from_text
    file.write_text('root ::= "é"', encoding="utf-8")
    assert inputs.grammar(Settings(grammar_file=file)) == inputs.grammar(Settings(grammar='root ::= "é"'))


def test_a_supposed_cpu_has_a_thread_for_each_core() -> None:
    """An export for a machine that is not here has its threads, not this one's."""
    assert decoder_options(Settings(cpu="12xavx512")).threads == 12
    assert decoder_options(Settings(cpu="12xavx512", threads=6)).threads == 6
    assert decoder_options(Settings()).threads == 0


@pytest.mark.parametrize(("given", "expected"), [(None, 3), (6, 6)])
def test_beside_a_supposed_cpu_cards_have_the_speed_that_was_measured_here(monkeypatch, given, expected) -> None:
    """It was measured with as many threads as this machine has cores."""
    seen = []

    def here(_, *, threads: int, **more: Any) -> PlanMachine:
        seen.append(threads)
        return PlanMachine((), 0, 0, catalogue.from_catalogue([]))

    monkeypatch.setattr(options.machines, "this_machine", here)
    monkeypatch.setattr(options, "physical_cores", lambda: 3)
    wanted = Settings(cpu="12xavx512", threads=given)
    options.machine_to_plan_for(wanted, decoder_options(wanted).threads)
    assert seen == [expected]


def test_a_placement_is_what_is_given_of_it_and_the_rest_is_free() -> None:
    given = Settings(gpu_layers="auto", tensor_split=(3.0, 1.0), n_cpu_moe=2, gpu_layers_draft="all", load_mode="none")
    assert placement_of(given) == (
        Placement(0, (3.0, 1.0), 2, load_mode="none"),
        {"gpu_layers", "n_cpu_ffn", "no_host"},
    )
    assert placement_of_draft(given) == (Placement(-1, load_mode="none"), {"n_cpu_moe", "n_cpu_ffn", "no_host"})
    assert placement_of(Settings()) == (Placement(), {"gpu_layers", "n_cpu_moe", "n_cpu_ffn", "load_mode", "no_host"})


def test_the_environment_s_threshold_holds_unless_another_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decoder_options(Settings()).op_offload_min_batch == 32
    monkeypatch.setenv("GGML_OP_OFFLOAD_MIN_BATCH", "7")
    assert decoder_options(Settings()).op_offload_min_batch == 7
    assert decoder_options(Settings(op_offload_min_batch=2)).op_offload_min_batch == 2


@pytest.mark.parametrize("text", ["", "none", "0", "-2", "2.5", "1e3", "9" * 30])
def test_a_threshold_of_the_environment_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("GGML_OP_OFFLOAD_MIN_BATCH", text)
    with pytest.raises(UsageError, match=r"GGML_OP_OFFLOAD_MIN_BATCH=.* is not a number of tokens") as caught:
        decoder_options(Settings())
    assert caught.value.hint == "unset GGML_OP_OFFLOAD_MIN_BATCH"


def test_strict_mode_refuses_a_threshold_that_divides_its_batches() -> None:
    said = "strict mode, which verify needs, and --op-offload-min-batch 2 cannot be combined"
    with pytest.raises(UsageError, match=said):
        decoder_options(Settings(strict=True, op_offload_min_batch=2))
    assert decoder_options(Settings(strict=True, op_offload_min_batch=64)).strict
