"""Numbers of other types: NumPy's scalars overflow where Python's numbers do not."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event

from fedlgm import privacy
from fedlgm.errors import ConfigError
from fedlgm.privacy.accounting import SMALLEST_MULTIPLIER, calibrate_levels
from fedlgm.privacy.events import (
    gaussian_event,
    laplace_event,
    pure_event,
    repeat_event,
    subsample_event,
)
from fedlgm.privacy.selection import selection_event

INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32)
FLOATS = (np.float16, np.float32, np.float64)

CALLS = {
    "epsilon": (
        privacy.epsilon,
        {"noise_multiplier": 100, "delta": 2**-12, "steps": 100, "sampling_rate": 0.5},
    ),
    "unsampled": (privacy.epsilon, {"noise_multiplier": 100, "delta": 2**-12, "steps": 100}),
    "calibrate": (privacy.calibrate, {"epsilon": 2, "delta": 2**-12, "steps": 100}),
    "gaussian_mu": (privacy.gaussian_mu, {"epsilon": 100, "delta": 2**-12}),
    "gaussian_delta": (privacy.gaussian_delta, {"mu": 100, "epsilon": 100}),
    "gaussian_epsilon": (privacy.gaussian_epsilon, {"mu": 100, "delta": 2**-12}),
    "selection_epsilon": (
        privacy.selection_epsilon,
        {
            "noise_multiplier": 100,
            "sampling_rate": 0.5,
            "steps": 100,
            "delta": 2**-12,
            "expected_runs": 100,
        },
    ),
    "discrete_gaussian_tau": (privacy.discrete_gaussian_tau, {"deviation": 1, "parties": 100}),
    **{
        noise: (
            lambda noise=noise, **options: privacy.distributed_epsilon(noise, **options),
            {
                "deviation": 100,
                "parties": 100,
                "sensitivity": 100,
                "dimension": 100,
                "rounds": 100,
                "delta": 2**-12,
            },
        )
        for noise in ("discrete-gaussian", "skellam")
    },
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [*INTEGERS, *FLOATS])
@pytest.mark.filterwarnings("error")
def test_figures_do_not_depend_on_the_type_of_a_number(name, kind):
    function, arguments = CALLS[name]
    whole = kind in INTEGERS
    other = {key: value if whole and value % 1 else kind(value) for key, value in arguments.items()}
    assert function(**other) == function(**arguments)


@pytest.mark.filterwarnings("error")
def test_a_multiplier_in_half_precision_is_not_free():
    """300 squared is infinite in half precision, and a million such releases cost epsilon 19."""
    assert (
        privacy.epsilon(np.float16(300), 1e-5, steps=10**6)
        == privacy.epsilon(300.0, 1e-5, steps=10**6)
        > 19
    )


@pytest.mark.parametrize("kind", INTEGERS[1:])
@pytest.mark.filterwarnings("error")
def test_no_event_lowers_the_cost_of_another(kind):
    """200 squared is negative in 16 bits, and so was its cost."""
    multiplier = kind(200)
    first, more = gaussian_event(1.0), (dp_event.GaussianDpEvent(multiplier), 10**4)
    plain = (dp_event.GaussianDpEvent(200), 10**4)
    assert privacy.composed_epsilon([(first, 1), more], 1e-5) == privacy.composed_epsilon(
        [(first, 1), plain], 1e-5
    )


@pytest.mark.parametrize("rate", [1.0, 0.01])
def test_numbers_of_releases_do_not_overflow(rate):
    event = repeat_event(gaussian_event(50.0, rate), 200)
    counted = privacy.composed_epsilon([(event, np.int16(200))], 1e-5)
    assert counted == privacy.composed_epsilon([(event, 200)], 1e-5) > 0


def test_levels_of_other_types():
    levels = {np.float16(1): np.int8(100), np.float16(2): np.int8(100)}
    assert calibrate_levels(levels, 2.0, 1e-5) == calibrate_levels({1.0: 100, 2.0: 100}, 2.0, 1e-5)


@pytest.mark.parametrize(
    "made",
    [
        lambda: gaussian_event(-math.inf),
        lambda: gaussian_event(-1.0),
        lambda: gaussian_event(math.nan),
        lambda: gaussian_event(True),
        lambda: gaussian_event("2"),
        lambda: gaussian_event(2.0, 0.0),
        lambda: gaussian_event(2.0, -0.5),
        lambda: gaussian_event(2.0, 1.5),
        lambda: gaussian_event(2.0, math.nan),
        lambda: gaussian_event(math.inf, -1.0),
        lambda: laplace_event(-1.0),
        lambda: laplace_event(math.nan),
        lambda: laplace_event(1.0, -0.5, "replace-one"),
        lambda: laplace_event(1.0, 0.0, "replace-one"),
        lambda: laplace_event(-1.0, 0.5, "replace-one"),
        lambda: pure_event(-1.0),
        lambda: pure_event(-math.inf),
        lambda: pure_event(math.nan),
        lambda: subsample_event(gaussian_event(2.0), 0.0),
        lambda: subsample_event(gaussian_event(2.0), 2.0),
        lambda: repeat_event(gaussian_event(2.0), -1),
        lambda: selection_event(gaussian_event(2.0), math.nan),
    ],
)
def test_impossible_releases_are_refused_where_they_are_stated(made):
    """Some of them were events that cost nothing."""
    with pytest.raises(ConfigError):
        made()


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("rate", [0.1, 1.0])
@pytest.mark.parametrize("multiplier", [5e-324, 1e-170, 1e-161, 1e-158, 1e-154, 1e-150])
def test_hardly_any_noise_is_never_free(multiplier: float, rate: float, accountant: str) -> None:
    release = gaussian_event(multiplier, rate)
    assert privacy.composed_epsilon([(release, 10)], 1e-5, accountant) == math.inf
    assert (
        privacy.epsilon(multiplier, 1e-5, steps=10, sampling_rate=rate, accountant=accountant)
        == math.inf
    )


@pytest.mark.parametrize("budget", [200.0, 400.0, 1e4, 1e9])
def test_no_budget_leads_to_less_than_the_least_noise(budget: float) -> None:
    least = privacy.calibrate(budget, 1e-5, steps=1)
    assert least >= SMALLEST_MULTIPLIER
    assert privacy.epsilon(least, 1e-5, steps=1) <= budget
