"""i.n.i.d. Gaussian and Laplace noise: budgets, optimality, known figures and identities."""

import math
from functools import partial

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedlgm.errors import ConfigError
from fedlgm.mechanisms import inid
from fedlgm.mechanisms.profiles import Profile, as_profile
from fedlgm.noise.draws import draw
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.allocation import allocate
from fedlgm.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu
from fedlgm_lab.studies.tables.profiles import (
    expected_error,
    gaussian_groups,
    gini,
    laplace_groups,
    unit_profile,
)

sensitivities = hnp.arrays(
    np.float64, st.integers(1, 12), elements=st.floats(1e-6, 1e6) | st.just(0.0)
).filter(np.any)
exponents = st.floats(1, 8)


def weights_for(profile, data):
    return data.draw(hnp.arrays(np.float64, profile.shape, elements=st.floats(1e-4, 1e4)))


def db(ratio):
    return 10 * math.log10(ratio)


def mse(family, scales):
    return expected_error(family, scales)


def ratios(profile, scales):
    """Counts of the coordinates, and their sensitivity over noise scale."""
    runs = as_profile(profile)
    scale = np.asarray(scales, dtype=np.float64)
    with np.errstate(divide="ignore"):
        return runs.counts, np.divide(
            runs.values, scale, out=np.zeros_like(scale), where=runs.values > 0
        )


def gaussian_spent(profile, scales):
    """mu of Gaussian noise: sqrt(sum_i (lambda_i / sigma_i)^2)."""
    counts, found = ratios(profile, scales)
    return math.sqrt(float(counts @ found**2))


def laplace_spent(profile, scales):
    """epsilon of Laplace noise: sum_i lambda_i / beta_i."""
    counts, found = ratios(profile, scales)
    return float(counts @ found)


# --- budgets -----------------------------------------------------------------------------------------------------


@given(sensitivities, exponents, st.data())
def test_every_rule_spends_the_gaussian_budget_exactly(profile, p, data):
    weights = weights_for(profile, data)
    scales = inid.gaussian_inid(profile, 1.0, 1e-5, p, weights)
    assert gaussian_spent(profile, scales) == pytest.approx(gaussian_mu(1.0, 1e-5), rel=1e-12)
    assert np.all((scales == 0) == (profile == 0))
    for rule in ("iid", "spr"):
        assert gaussian_spent(
            profile, inid.noise_scales("gaussian", rule, profile, 0.3)
        ) == pytest.approx(0.3, rel=1e-12)


@given(sensitivities, exponents, st.data())
def test_every_rule_spends_the_laplace_budget_exactly(profile, p, data):
    weights = weights_for(profile, data)
    scales = inid.laplace_inid(profile, 1.5, 0.0, p, weights)
    assert laplace_spent(profile, scales) == pytest.approx(1.5, rel=1e-12)
    assert np.all((scales == 0) == (profile == 0))
    for rule in ("iid", "spr"):
        assert laplace_spent(
            profile, inid.noise_scales("laplace", rule, profile, 0.3)
        ) == pytest.approx(0.3, rel=1e-12)


@given(sensitivities.filter(np.all), exponents, st.data())
def test_no_other_scales_of_the_same_budget_do_better(profile, p, data):
    weights = weights_for(profile, data)
    other = data.draw(hnp.arrays(np.float64, profile.shape, elements=st.floats(0.5, 2)))
    for family, best, spent in (
        (
            "gaussian",
            inid.noise_scales("gaussian", "inid", profile, 1.0, p, weights),
            gaussian_spent,
        ),
        ("laplace", inid.noise_scales("laplace", "inid", profile, 1.0, p, weights), laplace_spent),
    ):
        rival = best * other
        rival = rival * spent(profile, rival)  # rescaled to spend 1

        def error(scales, family=family):
            return sum(
                w * expected_error(family, [s], p) for w, s in zip(weights, scales, strict=True)
            )

        assert error(best) <= error(rival) * (1 + 1e-9)


def test_the_printed_weighting_rule_overspends_tenfold():
    weights, profile = (
        np.array([0.1, 1.0]),
        np.ones(2),
    )  # weights on the noise, so squared on its square
    mu = gaussian_mu(1.0, 1e-5)
    literal = inid.noise_scales("gaussian", "inid", weights * profile, mu)
    assert gaussian_spent(profile, literal) ** 2 == pytest.approx(10 * mu**2)
    assert gaussian_epsilon(gaussian_spent(profile, literal), 1e-5) == pytest.approx(
        3.619, abs=1e-3
    )
    assert gaussian_delta(gaussian_spent(profile, literal), 1.0) == pytest.approx(0.0770, abs=1e-4)
    sound = inid.noise_scales("gaussian", "inid", profile, mu, weights=weights**2)
    assert sound == pytest.approx(literal / weights)
    laplace = inid.noise_scales("laplace", "inid", profile, 2.0, weights=weights**2)
    assert laplace == pytest.approx(
        inid.noise_scales("laplace", "inid", weights * profile, 2.0) / weights
    )


# --- Laplace with delta > 0 --------------------------------------------------------------------------------------


def laplace_delta(ratios, epsilon):
    total = None
    for ratio in ratios:
        one = privacy_loss_distribution.from_laplace_mechanism(
            1 / ratio, value_discretization_interval=1e-4
        )
        total = one if total is None else total.compose(one)
    return total.get_delta_for_epsilon(epsilon)


def test_corollary_six_is_loose_and_the_tight_budget_is_exact_for_one_coordinate():
    assert 1 - math.exp((1 - 1.3) / 2) == pytest.approx(0.13929, abs=1e-5)
    assert inid.laplace_budget(1.0, 0.25918) == pytest.approx(1.3, abs=1e-4)
    assert inid.laplace_budget(1.0, 0.13929, tight=True) == pytest.approx(1.3, abs=1e-4)
    assert laplace_delta([1.3], 1.0) == pytest.approx(0.13929, abs=1e-4)


@settings(max_examples=25)
@given(
    hnp.arrays(np.float64, st.integers(1, 4), elements=st.floats(0.1, 1)),
    st.floats(0.3, 2),
    st.floats(1e-3, 0.3),
)
def test_the_tight_budget_is_private_for_any_number_of_coordinates(profile, epsilon, delta):
    scales = inid.laplace_inid(profile, epsilon, delta, tight=True)
    assert laplace_spent(profile, scales) == pytest.approx(
        epsilon - 2 * math.log1p(-delta), rel=1e-12
    )
    assert laplace_delta(profile / scales, epsilon) <= delta + 1e-4
    if profile.size == 1:  # no larger budget would do
        assert laplace_delta(1.05 * profile / scales, epsilon) > delta


def test_delta_zero_is_pure():
    assert inid.laplace_budget(0.7) == inid.laplace_budget(0.7, 0.0, tight=True) == 0.7


# --- known answers -----------------------------------------------------------------------------------------------


def test_three_coordinates():
    assert inid.noise_scales("gaussian", "inid", [3, 2, 1], 1.0) ** 2 == pytest.approx([18, 12, 6])
    assert mse("gaussian", inid.noise_scales("gaussian", "inid", [3, 2, 1], 1.0)) == pytest.approx(
        36
    )
    assert inid.laplace_inid([3, 2, 1], 1.0) == pytest.approx(
        [6.731678, 5.880662, 4.667485], abs=1e-6
    )
    assert mse("laplace", inid.laplace_inid([3, 2, 1], 1.0)) == pytest.approx(203.366191, abs=1e-6)


@given(sensitivities, exponents)
def test_equations_nine_and_twelve(profile, p):
    sigma = np.sqrt(profile ** (4 / (p + 2)) * (profile ** (2 * p / (p + 2))).sum()) / 0.4
    assert inid.noise_scales("gaussian", "inid", profile, 0.4, p) == pytest.approx(sigma, rel=1e-9)
    beta = profile ** (1 / (p + 1)) * (profile ** (p / (p + 1))).sum() / 0.4
    assert inid.noise_scales("laplace", "inid", profile, 0.4, p) == pytest.approx(beta, rel=1e-9)


@settings(max_examples=40)
@given(sensitivities.filter(np.all))
def test_table_one(profile):
    k, l1, l2 = profile.size, profile.sum(), math.sqrt((profile**2).sum())
    mu, epsilon = 0.3, 0.7
    assert mse("gaussian", inid.noise_scales("gaussian", "iid", profile, mu)) == pytest.approx(
        k * l2**2 / mu**2
    )
    assert mse("gaussian", inid.noise_scales("gaussian", "spr", profile, mu)) == pytest.approx(
        k * l2**2 / mu**2
    )
    assert mse("gaussian", inid.noise_scales("gaussian", "inid", profile, mu)) == pytest.approx(
        l1**2 / mu**2
    )
    assert mse("laplace", inid.noise_scales("laplace", "iid", profile, epsilon)) == pytest.approx(
        2 * k * l1**2 / epsilon**2
    )
    assert mse("laplace", inid.noise_scales("laplace", "spr", profile, epsilon)) == pytest.approx(
        2 * k**2 * l2**2 / epsilon**2
    )
    best = 2 * (profile ** (2 / 3)).sum() ** 3 / epsilon**2
    assert mse("laplace", inid.noise_scales("laplace", "inid", profile, epsilon)) == pytest.approx(
        best
    )


@pytest.mark.parametrize(
    ("shape", "gaussian", "factor", "laplace"),
    [
        ("linear", 1.1447, 1.3016, 0.5459),
        ("quadratic", 2.4420, 1.7547, 1.3895),
        ("exponential", 9.6578, 9.2423, 7.6090),
        ("one-hot", 13.0103, 20.0, 10 * math.log10(20)),
    ],
)
def test_gains_in_twenty_dimensions(shape, gaussian, factor, laplace):
    profile = unit_profile(shape, 20)
    gain = mse("gaussian", inid.noise_scales("gaussian", "iid", profile, 1.0)) / mse(
        "gaussian", inid.noise_scales("gaussian", "inid", profile, 1.0)
    )
    assert db(gain) == pytest.approx(gaussian, abs=1e-4)
    assert gain == pytest.approx(factor, abs=1e-4)
    profile = unit_profile(shape, 20, norm=1)
    gain = mse("laplace", inid.noise_scales("laplace", "iid", profile, 1.0)) / mse(
        "laplace", inid.noise_scales("laplace", "inid", profile, 1.0)
    )
    assert db(gain) == pytest.approx(laplace, abs=1e-4)


def test_saturation_of_the_exponential_profile():
    gaussian = mse("gaussian", inid.gaussian_inid(unit_profile("exponential", 500), 0.5, 1e-6))
    assert db(gaussian) == pytest.approx(21.47661, abs=1e-5)
    assert gaussian == pytest.approx(1 / math.tanh(0.5) / gaussian_mu(0.5, 1e-6) ** 2)
    laplace = [
        mse("laplace", inid.laplace_inid(unit_profile("exponential", k, norm=1), 0.5))
        for k in (6, 7, 500)
    ]
    assert [db(x) for x in laplace] == pytest.approx(
        [14.213, 14.317, 14.4322], abs=5e-4
    )  # 14.243 is no K's figure
    one_hot = mse("laplace", inid.laplace_inid(unit_profile("one-hot", 500, norm=1), 0.5))
    assert db(laplace[-1] / one_hot) == pytest.approx(5.4013, abs=1e-4)


def test_gain_from_five_more_dimensions():
    def relative(shape, k):
        return db(
            k / mse("gaussian", inid.noise_scales("gaussian", "inid", unit_profile(shape, k), 1.0))
        )

    assert relative("linear", 25) - relative("linear", 20) == pytest.approx(0.0203, abs=1e-4)
    assert relative("quadratic", 25) - relative("quadratic", 20) == pytest.approx(0.0225, abs=1e-4)


def test_two_dimensions_favour_the_quadratic_profile():
    gains = {
        s: 2 / mse("gaussian", inid.noise_scales("gaussian", "inid", unit_profile(s, 2), 1.0))
        for s in ("quadratic", "exponential")
    }
    assert gains == pytest.approx({"quadratic": 1.3600, "exponential": 1.2136}, abs=5e-4)
    assert gini(as_profile(unit_profile("quadratic", 2))) > gini(
        as_profile(unit_profile("exponential", 2))
    )


def test_laplace_against_gaussian():
    better = {
        shape: [
            mse("laplace", inid.laplace_inid(unit_profile(shape, k), 0.5))
            < mse("gaussian", inid.gaussian_inid(unit_profile(shape, k), 0.5, 1e-6))
            for k in range(1, 60)
        ]
        for shape in ("uniform", "exponential")
    }
    assert better["uniform"].index(False) + 1 == 9
    assert 0.5**2 / (2 * gaussian_mu(0.5, 1e-6) ** 2) == pytest.approx(8.1157, abs=1e-4)
    assert all(better["exponential"])


@given(sensitivities.filter(lambda v: v.size > 1), st.data())
def test_more_disparate_profiles_cost_less(profile, data):
    """Theorems 9 and 10: averaging two squares (or two entries) is majorised by them."""
    i, j = data.draw(st.permutations(range(profile.size)))[:2]
    share = data.draw(st.floats(0.05, 0.5))
    for family, power in (("gaussian", 2), ("laplace", 1)):
        scales = partial(inid.noise_scales, family, "inid")
        levelled = profile**power
        levelled[[i, j]] = (
            (1 - share) * levelled[i] + share * levelled[j],
            (1 - share) * levelled[j] + share * levelled[i],
        )
        flatter = mse(family, scales(levelled ** (1 / power), 1.0))
        assert mse(family, scales(profile, 1.0)) <= flatter * (1 + 1e-12)


# --- errors: closed form against sampling
# ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_closed_form_errors_match_sampling(family, p):
    scales = np.array([0.5, 1.0, 3.0])
    noise = draw(
        family, scales, KeyRing.from_seed(7).numpy_generator(Purpose.NOISE, p), size=(200_000, 3)
    )
    errors = (np.abs(noise) ** p).sum(axis=1)
    spread = errors.std() / math.sqrt(len(errors))
    assert abs(errors.mean() - expected_error(family, scales, p)) < 4.5 * spread
    assert (
        abs(errors.mean() - expected_error(family, 1.05 * scales, p)) > 4.5 * spread
    )  # would be noticed


# --- runs of equal coordinates -----------------------------------------------------------------------------------


@given(
    hnp.arrays(
        np.float64, st.integers(1, 20), elements=st.sampled_from([0.0, 0.5, 1.0, 7.0])
    ).filter(np.any)
)
def test_runs_and_vectors_agree(dense):
    starts = np.flatnonzero(np.concatenate(([True], dense[1:] != dense[:-1])))
    runs = Profile(dense[starts], np.diff(np.append(starts, dense.size)))
    for rule in (
        lambda v: inid.gaussian_inid(v, 1.0, 1e-5, 1.5),
        lambda v: inid.laplace_inid(v, 1.0, 1e-5, 1.5),
        lambda v: inid.noise_scales("gaussian", "iid", v, 0.4),
        lambda v: inid.noise_scales("laplace", "iid", v, 0.4),
        lambda v: inid.noise_scales("gaussian", "spr", v, 0.4),
        lambda v: inid.noise_scales("laplace", "spr", v, 0.4),
    ):
        assert np.repeat(rule(runs), runs.counts) == pytest.approx(rule(dense), rel=1e-12)
    assert gini(runs) == pytest.approx(gini(as_profile(dense)), abs=1e-12)
    brute = np.abs(dense[:, None] - dense[None, :]).sum() / (2 * dense.size * dense.sum())
    assert gini(runs) == pytest.approx(brute, abs=1e-12)
    assert runs.norm(2) == pytest.approx(np.linalg.norm(dense))
    error = expected_error("laplace", inid.laplace_inid(runs, 1.0), counts=runs.counts)
    assert error == pytest.approx(mse("laplace", inid.laplace_inid(dense, 1.0)))


def test_a_hundred_million_coordinates_cost_two_numbers():
    model = Profile(np.array([1e-3, 1e-5]), np.array([10**6, 99 * 10**6]))
    scales = inid.gaussian_inid(model, 1.0, 1e-6)
    assert scales.shape == (2,)
    assert gaussian_spent(model, scales) == pytest.approx(gaussian_mu(1.0, 1e-6))


def test_gini_of_the_edge_cases():
    assert gini(as_profile(unit_profile("uniform", 9))) == pytest.approx(0, abs=1e-15)
    assert gini(as_profile(unit_profile("one-hot", 9))) == pytest.approx(8 / 9)
    assert gini(Profile(np.zeros(2), np.array([1, 3]))) == 0


# --- layers ------------------------------------------------------------------------------------------------------

DIMS, CLIP = [4, 100, 2500], [1.0, 2.0, 3.0]


def test_layers_with_gaussian_noise_are_the_min_total_noise_allocation():
    scales = gaussian_groups(CLIP, DIMS, 1.0)
    assert scales**2 == pytest.approx([86, 34.4, 10.32])
    assert scales == pytest.approx(allocate("min-total-noise", CLIP, DIMS, 1.0))
    profile = Profile(np.array(CLIP) / np.sqrt(DIMS), np.array(DIMS))
    assert scales == pytest.approx(inid.noise_scales("gaussian", "inid", profile, 1.0))
    assert expected_error("gaussian", scales, counts=np.array(DIMS)) == pytest.approx(29584)


def test_equally_clipped_layers_are_the_snr_consistent_allocation():
    assert gaussian_groups([1, 1, 1], DIMS, 0.5) == pytest.approx(
        allocate("snr-consistent", [1, 1, 1], DIMS, 2.0)
    )


def test_spr_on_layers_is_the_sensitivity_proportional_allocation():
    assert inid.noise_scales("gaussian", "spr", CLIP, 1.0) ** 2 == pytest.approx([3, 12, 27])
    assert inid.noise_scales("gaussian", "spr", CLIP, 0.5) == pytest.approx(
        allocate("sensitivity-proportional", CLIP, DIMS, 2.0)
    )


def test_spr_on_the_coordinates_of_layers_is_the_dimension_adjusted_allocation():
    profile = Profile(np.array(CLIP) / np.sqrt(DIMS), np.array(DIMS))
    assert inid.noise_scales("gaussian", "spr", profile, 1.0) == pytest.approx(
        allocate("dimension-adjusted", CLIP, DIMS, 1.0)
    )


def test_layers_with_laplace_noise():
    clip, dims = np.array(CLIP), np.array(DIMS)
    beta = (clip / dims) ** (1 / 3) * (clip ** (2 / 3) * dims ** (1 / 3)).sum() / 0.5
    assert laplace_groups(CLIP, DIMS, 0.5) == pytest.approx(beta)
    assert (clip / laplace_groups(CLIP, DIMS, 0.5)).sum() == pytest.approx(0.5)


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "profile",
    [[-1, 1], [math.nan, 1], [math.inf, 1], [], [[1, 2]], 3.0, ["a"], [1e300, 1e-300]],
    ids=str,
)
def test_bad_profiles(profile):
    for rule in (lambda v: inid.gaussian_inid(v, 1, 1e-5), lambda v: inid.laplace_inid(v, 1)):
        with pytest.raises(ConfigError, match="sensitivit"):
            rule(profile)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"p": 0.5}, "p must be"),
        ({"p": math.inf}, "p must be"),
        ({"p": math.nan}, "p must be"),
        ({"epsilon": 0}, "epsilon must be"),
        ({"epsilon": -1}, "epsilon must be"),
        ({"epsilon": math.nan}, "epsilon must be"),
        ({"delta": 1}, "delta must lie"),
        ({"delta": -1e-9}, "delta must lie"),
        ({"weights": [1.0, 0.0]}, "weights must be finite"),
        ({"weights": [1.0, -1.0]}, "weights must be finite"),
        ({"weights": [1.0, math.nan]}, "weights must be finite"),
        ({"weights": [1.0]}, "weights must have shape"),
    ],
    ids=str,
)
def test_bad_arguments(changes, message):
    arguments = {"profile": [1.0, 2.0], "epsilon": 1.0, "delta": 1e-5} | changes
    for mechanism in (inid.gaussian_inid, inid.laplace_inid):
        with pytest.raises(ConfigError, match=message):
            mechanism(**arguments)


def test_gaussian_noise_needs_a_delta():
    with pytest.raises(ConfigError, match="delta must lie"):
        inid.gaussian_inid([1.0], 1.0, 0.0)


@pytest.mark.parametrize("counts", [[1], [0, 1], [1.5, 1], [math.nan, 1], [-1, 1]], ids=str)
def test_bad_counts(counts):
    with pytest.raises(ConfigError, match="count"):
        Profile(np.ones(2), np.array(counts))


def test_bad_shapes_and_scales():
    with pytest.raises(ConfigError, match="known: uniform, linear"):
        unit_profile("cubic", 3)
    with pytest.raises(ConfigError, match="dimension"):
        unit_profile("linear", 0)
    with pytest.raises(ConfigError, match="order of the norm"):
        unit_profile("linear", 3, norm=0.5)


def test_an_all_zero_profile_needs_no_noise_and_says_so():
    with pytest.warns(UserWarning, match="zero everywhere"):
        assert not inid.gaussian_inid([0.0, 0.0], 1.0, 1e-5).any()
    with pytest.warns(UserWarning, match="zero everywhere"):
        assert not inid.laplace_inid([0.0, 0.0], 1.0).any()


def test_a_coordinate_without_noise_spends_everything():
    assert gaussian_spent([1.0, 0.0], [0.0, 0.0]) == math.inf
    assert laplace_spent([0.0], [0.0]) == 0
