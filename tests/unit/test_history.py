"""What runs leave for later plans and answers."""

import pytest

from ggufspec.hardware.backends import backend_of, is_guess
from ggufspec.planning.history import (
    PRIOR_ACCEPTANCE,
    DraftingHistory,
    add_experience,
    expected_acceptance,
    known_overhead,
    lookup_rounds,
    record_overhead,
)

CUDA_BYTES, VULKAN_BYTES = (backend_of(device).overhead_bytes for device in ("CUDA0", "Vulkan0"))


def record(folder, target, drafter, accepted, reached):
    add_experience(folder, target, drafter, DraftingHistory([*accepted], [*reached]))


def test_the_chance_of_a_token_is_not_accepted_over_drafted(tmp_path):
    """100 rounds of three, each token kept with 0.8: 80, 64, 51 kept. A profile that says so changes nothing."""
    record(tmp_path, "t", "d", (80, 64, 51), (100, 80, 64))
    rate, where = expected_acceptance(tmp_path, "t", "d", 195 / 244)
    assert rate == pytest.approx(195 / 244)
    assert where == "mostly from its profile, 244 tokens measured here"


def test_tokens_are_counted_by_position():
    one = DraftingHistory()
    for accepted in (2, 0, 1):
        for position in range(min(accepted + 1, 2)):
            one.count(position, accepted=position < accepted)
    assert (one.accepted, one.reached) == ([2, 1], [3, 2])


def test_few_tokens_move_what_many_have_taught_by_little(tmp_path):
    record(tmp_path, "t", "d", (860,), (896,))
    record(tmp_path, "t", "d", (0,), (2,))
    rate, where = expected_acceptance(tmp_path, "t", "d", None)
    assert rate == pytest.approx((0.957 * 897 + 250 * 0.7) / 1147, abs=0.005)
    assert where == "measured here, 897 tokens"


@pytest.mark.parametrize(
    ("accepted", "reached", "least", "most", "where"),
    [
        (2, 2, 0.70, 0.71, "mostly assumed, 2 tokens measured here"),
        (47, 49, 0.70, 0.75, "mostly assumed, 49 tokens measured here"),
        (475, 490, 0.86, 0.89, "measured here, 490 tokens"),
        (4850, 5000, 0.95, 0.97, "measured here, 5,000 tokens"),
    ],
)
def test_a_prior_moves_by_how_much_was_seen(tmp_path, accepted, reached, least, most, where):
    record(tmp_path, "t", "d", (accepted,), (reached,))
    rate, words = expected_acceptance(tmp_path, "t", "d", None)
    assert least <= rate <= most
    assert words == where
    assert expected_acceptance(tmp_path, "t", "d", None) == (rate, words)  # asking teaches nothing


def test_new_tokens_outweigh_old_ones(tmp_path):
    record(tmp_path, "t", "d", (2000,), (2000,))
    record(tmp_path, "t", "d", (1000,), (2000,))
    assert expected_acceptance(tmp_path, "t", "d", 2 / 3)[0] == pytest.approx(2000 / 3000, abs=0.01)
    for _ in range(20):
        record(tmp_path, "t", "d", (1000,), (2000,))
    assert expected_acceptance(tmp_path, "t", "d", 0.5)[0] == pytest.approx(0.5, abs=0.01)


def test_drafters_are_apart(tmp_path):
    record(tmp_path, "t", "d", (5000,), (10000,))
    record(tmp_path, "t", "lookup", (9000,), (10000,))
    assert expected_acceptance(tmp_path, "t", "d", None)[0] == pytest.approx(0.5, abs=0.02)
    assert expected_acceptance(tmp_path, "t", "lookup", None)[0] == pytest.approx(0.9, abs=0.02)


def test_the_profile_then_a_prior(tmp_path):
    assert expected_acceptance(tmp_path, "t", "d", 0.6) == (pytest.approx(0.6), "from its profile")
    assert expected_acceptance(tmp_path, "t", "d", None) == (pytest.approx(PRIOR_ACCEPTANCE), "assumed")


def test_what_the_lookup_writes_is_known_after_some_answers(tmp_path):
    """Of 300 tokens 20 rounds of eight drafted ones, of which three were accepted: 80 came of them."""
    assert lookup_rounds(tmp_path, "t") is None
    lookup = DraftingHistory([20, 20, 20], [20, 20, 20, 20], drafted=160, emitted=240)
    add_experience(tmp_path, "t", "lookup", lookup)
    assert lookup_rounds(tmp_path, "t") is None  # too few tokens
    add_experience(tmp_path, "t", "lookup", DraftingHistory(drafted=0, emitted=60))
    found = lookup_rounds(tmp_path, "t")
    assert (found.share, found.drafted, found.gained) == pytest.approx((80 / 300, 8, 4))
    add_experience(tmp_path, "other", "lookup", DraftingHistory(emitted=300))
    assert lookup_rounds(tmp_path, "other").share == 0


def test_what_an_older_version_counted_in_part_is_left(tmp_path):
    record(tmp_path, "t", "lookup", (90,), (100,))
    add_experience(tmp_path, "t", "lookup", DraftingHistory([10], [20], drafted=40, emitted=300))
    found = lookup_rounds(tmp_path, "t")
    assert (found.share, found.drafted, found.gained) == pytest.approx((30 / 300, 2, 1.5))


def test_nothing_drafted_teaches_nothing(tmp_path):
    add_experience(tmp_path, "t", "d", DraftingHistory())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"t + d": 3}', '{"t + d": {"accepted": "x", "reached": [2]}}'),
        *('{"t + d": {"accepted": [3], "reached": [2]}}', '{"t + d": {"accepted": [-1], "reached": [2]}}'),
        *('{"t + d": {"accepted": [1], "reached": [NaN]}}', '{"t + d": {"reached": [Infinity]}}'),
        *('{"t + d": {"drafted": -1, "reached": [2]}}', '{"t + d": {"emitted": Infinity, "reached": [2]}}'),
        *('{"t + d": {"accepted": 1, "reached": 2}}', '{"t + d": {"": {"reached": [2]}}}'),  # older versions'
    ],
)
def test_a_damaged_file_is_as_none(tmp_path, text):
    (tmp_path / "acceptance.json").write_text(text)
    assert expected_acceptance(tmp_path, "t", "d", None)[0] == pytest.approx(PRIOR_ACCEPTANCE)


def test_overheads_are_kept_by_card(tmp_path):
    assert known_overhead(tmp_path, "RTX 4090", "CUDA0", 24 << 30) == CUDA_BYTES
    assert 626 << 20 < known_overhead(tmp_path, "NVIDIA H100 80GB HBM3", "CUDA0", 80 << 30) < 700 << 20
    record_overhead(tmp_path, "RTX 4090", 300)
    record_overhead(tmp_path, "RTX 3090", -5)
    assert known_overhead(tmp_path, "RTX 4090", "CUDA0") == 300
    assert known_overhead(tmp_path, "RTX 3090", "CUDA1") == 0
    record_overhead(tmp_path, "RTX 4090", 350)
    assert known_overhead(tmp_path, "RTX 4090", "CUDA0") == 350  # the last that was recorded
    (tmp_path / "overheads.json").write_text('{"RTX 4090": [1], "RTX 3090": {"580; 0.3.36": 400}}')
    assert known_overhead(tmp_path, "RTX 4090", "CUDA0") == known_overhead(tmp_path, "RTX 3090", "CUDA1") == CUDA_BYTES


@pytest.mark.parametrize(("device", "size_bytes"), [("Vulkan0", VULKAN_BYTES), ("RPC12", 0), ("new", CUDA_BYTES)])
def test_each_backend_has_its_guess(tmp_path, device, size_bytes):
    assert known_overhead(tmp_path, "a card", device) == size_bytes
    assert is_guess(size_bytes) == (size_bytes > 0)
    record_overhead(tmp_path, "a card", 77)
    assert known_overhead(tmp_path, "a card", device) == 77
    assert not is_guess(77)
