"""Differences at neighbouring rates: the rule on made-up curves."""

from __future__ import annotations

import pytest

from fedlgm_lab.studies.tables import neighbouring_rates as rates


@pytest.mark.parametrize(
    ("first", "second", "lower", "expected", "said"),
    [
        ({1: 5, 2: 9, 4: 7}, {1: 4, 2: 8, 4: 6}, False, [1, 1, 1], "holds"),
        ({1: 5, 2: 9, 4: 7}, {1: 6, 2: 8, 4: 6}, False, [-1, 1, 1], "does not hold"),
        ({1: 5, 2: 9, 4: 7}, {0.5: 2, 1: 8, 2: 6}, False, [3, 1, 1], "holds"),
        (
            {1: 5, 2: 9},
            {1: 4, 2: 8},
            False,
            [1, 1, None],
            "not decided: a best rate lies at an edge",
        ),
        ({1: 9, 2: 5, 4: 7}, {1: 8, 2: 4, 4: 8}, True, [1, 1, -1], "does not hold"),
    ],
)
def test_three_differences(
    first: rates.Curve, second: rates.Curve, lower: bool, expected: list[float | None], said: str
) -> None:
    values = rates.three(first, second, lower)
    assert values == expected
    assert rates.verdict(values) == said
