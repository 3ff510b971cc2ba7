"""How a budget is shared among the cells of a comparison."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.bench.extent import AnswerExtent, CellCosts, fit_extent
from tests.support.properties import examples

MOST = AnswerExtent(8, 128, 3, quality=True)


@pytest.mark.parametrize(
    ("budget_s", "expected"),
    [
        (10_000, (8, 128, 3)),
        (400, (8, 72, 3)),  # answers get shorter
        (200, (8, 51, 2)),  # trials fewer
        (120, (8, 64, 1)),
        (60, (6, 37, 1)),  # prompts fewer
        (1, (1, 8, 1)),
    ],
)
def test_what_is_left_out_first(budget_s: float, expected: tuple[int, int, int]) -> None:
    found = fit_extent(budget_s, [CellCosts(4, 0.5, 0.1), CellCosts(4, 0.5, 0.1)], MOST, cut=True)
    assert (found.prompts, found.max_tokens, found.repetitions) == expected
    assert found.quality


@examples(200)
@given(
    st.floats(1, 10_000),
    st.lists(st.tuples(*[st.floats(0.01, 20)] * 2, st.floats(0.001, 1)), min_size=1, max_size=9),
    st.booleans(),
)
def test_it_fits_or_is_the_least(budget_s: float, cells: list[tuple[float, float, float]], cut: bool) -> None:
    costs = [CellCosts(*one) for one in cells]
    found = fit_extent(budget_s, costs, MOST, cut=cut)
    assert 1 <= found.prompts <= 8
    assert (8 if cut else 128) <= found.max_tokens <= 128
    assert 1 <= found.repetitions <= 3
    takes_s = found.repetitions * sum(one.trial_s(found) for one in costs)
    assert takes_s <= budget_s * 1.001 or (found.prompts, found.repetitions) == (1, 1)
