"""Cards by name: what people write, what NVML calls them, and what is not known."""

import pytest

from ggufspec.errors import UsageError
from ggufspec.hardware.backends import usual_backend
from ggufspec.hardware.cards import _ALIASES, CARDS, _key, find_card, recognise

GIB = 2**30


@pytest.mark.parametrize(
    "name",
    [
        "4090",
        "rtx4090",
        "RTX 4090",
        "rtx-4090",
        "GeForce RTX 4090",
        "NVIDIA GeForce RTX 4090",
        " nvidia geforce rtx4090 ",
    ],
)
def test_what_a_4090_may_be_called(name):
    card = find_card(name)
    assert (card.name, card.vram_bytes) == ("RTX 4090", 24 * GIB)
    assert card.bandwidth_bytes_per_s == 1008e9
    assert (card.pcie_generation, card.pcie_width) == (4, 16)
    assert card.fp16_flops == 165.2e12


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti Super"),
        ("4070 ti", "RTX 4070 Ti"),
        ("RTX 3080 12GB", "RTX 3080 12GB"),
        ("3080 10 GiB", "RTX 3080 10GB"),
        ("1060", "GTX 1060 6GB"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("rtx pro 6000", "RTX PRO 6000 Blackwell"),
        ("Tesla T4", "T4"),
        ("a100 80gb", "A100 80GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("7900xt", "RX 7900 XT"),
        ("AMD Radeon PRO W7900", "Pro W7900"),
        ("w7900", "Pro W7900"),
        ("Intel(R) Arc(TM) B580 Graphics", "Arc B580"),
        ("a770 16GB", "Arc A770 16GB"),
    ],
)
def test_names(name, found):
    assert find_card(name).name == found


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_card_is_found_by_its_own_name_and_is_plausible(card):
    assert find_card(card.name) is card
    assert find_card(card.name.upper().replace(" ", "")) is card
    assert 4 * GIB <= card.vram_bytes <= 141 * GIB
    assert 60e9 <= card.bandwidth_bytes_per_s <= 4800e9
    assert card.pcie_generation in (3, 4, 5)
    assert card.pcie_width in (8, 16)
    assert 2e12 < card.fp16_flops < 1000e12
    sizes = [word for word in card.name.split() if word.endswith("GB")]
    assert all(int(size.removesuffix("GB")) * GIB == card.vram_bytes for size in sizes)


@pytest.mark.parametrize(
    ("name", "total_bytes", "found"),
    [
        ("NVIDIA GeForce RTX 3080", 12_622_000_000, "RTX 3080 12GB"),  # drivers keep some of it
        ("NVIDIA GeForce RTX 3080", 10_500_000_000, "RTX 3080 10GB"),
        ("NVIDIA GeForce RTX 4090", 1, "RTX 4090"),
        ("NVIDIA H200", 150_754_820_096, "H200"),
        ("NVIDIA H100 80GB HBM3", 85_520_809_984, "H100 SXM"),
        ("NVIDIA A100-SXM4-80GB", 85_899_345_920, "A100 80GB"),
        ("Tesla V100-PCIE-16GB", 16_945_512_448, "V100 16GB"),
        ("Voodoo 2", 12 * 2**20, None),
    ],
)
def test_a_card_as_its_driver_calls_it(name, total_bytes, found):
    card = recognise(name, total_bytes)
    assert (card and card.name) == found


def test_every_other_name_is_that_of_a_card():
    assert set(_ALIASES.values()) <= {card.name for card in CARDS}
    assert all(_key(alias) == alias for alias in _ALIASES)


def test_no_card_is_there_twice():
    assert len({card.name for card in CARDS}) == len(CARDS) >= 45


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("3080", ["RTX 3080 10GB", "RTX 3080 12GB"]),
        ("NVIDIA GeForce RTX 3060", ["RTX 3060 8GB", "RTX 3060 12GB"]),
        ("4060 Ti", ["RTX 4060 Ti 8GB", "RTX 4060 Ti 16GB"]),
        ("A100", ["A100 40GB", "A100 80GB"]),
        ("H100", ["H100 PCIe", "H100 SXM"]),
        ("arc a770", ["Arc A770 8GB", "Arc A770 16GB"]),
    ],
)
def test_a_name_of_several_variants(name, variants):
    with pytest.raises(UsageError) as error:
        find_card(name)
    assert error.value.message == f"there is more than one {name}"
    assert error.value.hint == "say which: " + ", ".join(f'"{variant}"' for variant in variants)


@pytest.mark.parametrize(
    ("name", "near"), [("5095", '"RTX 5090"'), ("RTX 4900", '"RTX 4090"'), ("7900 XTS", '"RX 7900 XT"')]
)
def test_an_unknown_name_names_the_nearest(name, near):
    with pytest.raises(UsageError) as error:
        find_card(name)
    assert error.value.message == f"no GPU called {name!r} is known"
    assert near in error.value.hint
    assert error.value.hint.endswith("give its memory instead: --vram 24GiB")


@pytest.mark.parametrize("name", ["", " ", "gtx", "12GB", "NVIDIA", "Voodoo 2", "RTX 4090 Laptop GPU"])
def test_what_is_no_card(name):
    """A laptop's card has its desktop namesake's name and not its memory."""
    with pytest.raises(UsageError, match="no GPU called"):
        find_card(name)


@pytest.mark.parametrize(
    ("card", "backend"),
    [("RTX 4090", "CUDA"), ("RX 7900 XTX", "ROCm"), ("Arc B580", "SYCL"), ("Apple M4", "MTL")],
)
def test_a_card_has_its_usual_backend(card: str, backend: str) -> None:
    assert usual_backend(find_card(card).architecture) == backend
    assert usual_backend("") == "CUDA"
