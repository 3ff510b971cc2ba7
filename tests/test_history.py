"""What runs leave for later plans."""

import pytest

from ggufspec.planning.history import (
    PRIOR_ACCEPTANCE,
    expected_acceptance,
    known_shortfall,
    record_acceptance,
    record_shortfall,
)


def test_the_chance_of_a_token_is_not_accepted_over_drafted(tmp_path):
    """100 rounds of three, each token kept with 0.8: 80, 64, 51 kept."""
    record_acceptance(tmp_path, "t", "d", (80, 64, 51), (100, 100, 100))
    rate, where = expected_acceptance(tmp_path, "t", "d", 0.5)
    assert rate == pytest.approx(195 / 244)
    assert "measured here before on 244 drafted tokens" in where


def test_drafts_that_end_early_count_what_was_reached(tmp_path):
    record_acceptance(tmp_path, "t", "d", (8, 3), (10, 4))
    assert expected_acceptance(tmp_path, "t", "d", None)[0] == pytest.approx(11 / 14)


def test_the_last_run_counts_and_pairs_are_apart(tmp_path):
    record_acceptance(tmp_path, "t", "d", (5,), (10,))
    record_acceptance(tmp_path, "t", "e", (9,), (10,))
    record_acceptance(tmp_path, "t", "d", (7,), (10,))
    assert expected_acceptance(tmp_path, "t", "d", None)[0] == 0.7
    assert expected_acceptance(tmp_path, "t", "e", None)[0] == 0.9


def test_the_profile_then_a_prior(tmp_path):
    assert expected_acceptance(tmp_path, "t", "d", 0.6) == (0.6, "60%, the profile's")
    rate, where = expected_acceptance(tmp_path, "t", "d", None)
    assert rate == PRIOR_ACCEPTANCE
    assert "prior" in where


def test_nothing_drafted_teaches_nothing(tmp_path):
    record_acceptance(tmp_path, "t", "d", (0,), (0,))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"t + d": 3}', '{"t + d": {"accepted": 1}}'])
def test_a_damaged_file_is_as_none(tmp_path, text):
    (tmp_path / "acceptance.json").write_text(text)
    (tmp_path / "formula.json").write_text(text)
    assert expected_acceptance(tmp_path, "t", "d", None)[0] == PRIOR_ACCEPTANCE
    assert known_shortfall(tmp_path, "llama", "a card") == 0


def test_a_shortfall_is_kept_until_it_is_gone(tmp_path):
    record_shortfall(tmp_path, "llama", "a card", -5)
    assert list(tmp_path.iterdir()) == []
    record_shortfall(tmp_path, "llama", "a card", 7)
    assert known_shortfall(tmp_path, "llama", "a card") == 7
    assert known_shortfall(tmp_path, "llama", "another") == 0
    record_shortfall(tmp_path, "llama", "a card", -1)
    assert known_shortfall(tmp_path, "llama", "a card") == 0
