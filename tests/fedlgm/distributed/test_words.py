"""Known answers of wrap-around and of the noise over a trusted server's."""

import pytest

from fedlgm.distributed import noise_over_central, wrap_probability
from fedlgm.errors import ConfigError


@pytest.mark.parametrize(
    ("deviation", "dimension", "expected"),
    [(5000, 1, "5.6166e-11"), (6000, 1, "4.7257e-08"), (5000, 10**6, "5.6165e-05"), (6000, 10**6, "4.6158e-02")],
)
def test_probability_of_wrapping_at_sixteen_bits(deviation, dimension, expected):
    assert f"{wrap_probability(16, largest=0, deviation=deviation, dimension=dimension):.4e}" == expected


def test_a_sum_that_fills_the_words_wraps():
    assert wrap_probability(16, largest=2**15, deviation=1, dimension=1) == 1.0


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [((100, 80, 0), 1.1180), ((100, 67, 0), 1.2217), ((100, 67, 10), 1.3245), ((10, 7, 1), 1.2910)],
)
def test_noise_over_central(nodes, expected):
    assert round(noise_over_central(*nodes), 4) == expected


@pytest.mark.parametrize("nodes", [(10, 11, 0), (10, 5, 5), (10, 5, -1)])
def test_thresholds_that_leave_no_honest_node_are_refused(nodes):
    with pytest.raises(ConfigError, match="colluders < threshold <= asked"):
        noise_over_central(*nodes)
