"""Group-wise Gaussian and Laplace noise as mechanisms: identities, budgets, accounting, clipping,
noise."""

import math

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from fedlgm import mechanisms
from fedlgm.aggregation import BoundedSum
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.mechanisms import group_noise
from fedlgm.mechanisms.group_noise import calibrate_laplace
from fedlgm.noise.draws import add_noise_
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.noise.release import release
from fedlgm.planning.allocation import allocate
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan, RunFacts, Sampling
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy import accountants, accounting, events
from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.privacy.events import laplace_event, pure_event
from fedlgm_lab.studies.tables.profiles import expected_error
from simulations import launch
from simulations.config import recipe

SIZES = {"conv": 40, "fc": 500, "head": 7}
LAYERS = LayerTable.from_sizes(SIZES)
LAPLACE = [name for name in group_noise.names() if name.startswith("laplace")]
GAUSSIAN = [name for name in group_noise.names() if name.startswith("gaussian")]
bounds = hnp.arrays(np.float64, 3, elements=st.floats(1e-3, 1e3))


def plan_of(name, multiplier=1.5, relation="add-remove", rate=0.1, layers=LAYERS, **options):
    sampling = Sampling("poisson", 100, rate)
    start = Transcript.start(torch.zeros(layers.size))
    return mechanisms.get(name, **options).plan(
        layers, RunFacts(multiplier, sampling, relation), start
    )


# --- plans -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "allocation"),
    [
        ("gaussian-inid", "min-total-noise"),
        ("gaussian-spr", "dimension-adjusted"),
        ("gaussian-iid", "uniform"),
    ],
)
@settings(max_examples=30)
@given(clip=bounds, multiplier=st.floats(0.01, 100))
def test_gaussian_rules_are_allocations_of_the_layer_wise_mechanism(
    name, allocation, clip, multiplier
):
    plan = plan_of(name, multiplier, bounds=clip.tolist())
    assert plan.sigma == pytest.approx(
        allocate(allocation, clip, LAYERS.sizes, multiplier), rel=1e-13
    )
    eq = plan_of(name, multiplier, bound=2.0)
    twin = plan_of(allocation, multiplier, bound=2.0)
    assert eq.clip == pytest.approx(twin.clip, rel=1e-15)
    assert eq.sigma == pytest.approx(twin.sigma, rel=1e-13)


@pytest.mark.parametrize("name", group_noise.names())
@settings(max_examples=30)
@given(clip=bounds, multiplier=st.floats(0.01, 100))
def test_every_rule_spends_the_round_exactly(name, clip, multiplier):
    plan = plan_of(name, multiplier, bounds=clip.tolist())
    assert plan.effective_multiplier == pytest.approx(multiplier, rel=1e-7)
    assert plan.shares.sum() == pytest.approx(1)
    assert (plan.guarantee.status, plan.family) == ("proven", name.partition("-")[0])
    rival = plan_of(f"{plan.family}-inid", multiplier, bounds=clip.tolist())

    def error(p):
        return expected_error(p.family, p.sigma, counts=LAYERS.sizes)

    assert error(rival) <= error(plan) * (1 + 1e-9)


def test_flat_budgets_add_up_to_the_bound_in_the_norm_of_the_noise():
    assert np.linalg.norm(plan_of("gaussian-inid", bound=3.0).clip) == pytest.approx(3)
    assert plan_of("laplace-inid", bound=3.0).clip == pytest.approx([1, 1, 1])


def test_laplace_scales_have_the_closed_form():
    clip = np.array([0.3, 2.0, 1.0])
    plan = plan_of("laplace-inid", 0.5, bounds=clip.tolist())
    total = (clip ** (2 / 3) * LAYERS.sizes ** (1 / 3)).sum()
    assert plan.sigma == pytest.approx((clip / LAYERS.sizes) ** (1 / 3) * total * 0.5)
    assert plan_of("laplace-iid", 0.5, bounds=clip.tolist()).sigma == pytest.approx([1.65] * 3)
    spr = plan_of("laplace-spr", 0.5, bounds=clip.tolist())
    assert spr.shares == pytest.approx(LAYERS.sizes / LAYERS.size)


def test_a_plan_survives_the_wire():
    plan = plan_of("laplace-inid")
    again = ReleasePlan.from_json(LAYERS, plan.to_json())
    assert (again.family, again.event) == ("laplace", plan.event)


# --- domination: a product of Laplace coordinates costs at most the scalar at the summed shift
# ----------------------


def laplace_pld(shift, rate=1.0, interval=1e-3, pessimistic=True):
    return privacy_loss_distribution.from_laplace_mechanism(
        1 / shift,
        sampling_prob=rate,
        value_discretization_interval=interval,
        pessimistic_estimate=pessimistic,
    )


@pytest.mark.parametrize(
    "ratios",
    [
        [0.5, 0.5],
        [1.9, 0.1],
        [0.7, 0.2, 0.1],
        [0.1] * 10,
        [3.0, 2.0, 1.0],
        [0.02] * 100,
        [1.0, *[0.01] * 60],
    ],
    ids=lambda r: f"{len(r)}x{sum(r):.1f}",
)
def test_products_of_laplace_coordinates_are_dominated_by_one_scalar(ratios):
    noise = (
        KeyRing.from_seed(3)
        .numpy_generator(Purpose.PROBE, len(ratios))
        .laplace(size=(50_000, len(ratios)))
    )
    losses, total = (np.abs(noise - ratios) - np.abs(noise)).sum(axis=1), sum(ratios)
    slack = []
    for e in np.linspace(-1.2 * total, 1.2 * total, 25):
        kept = np.maximum(1 - np.exp(e - losses), 0)  # its mean is the product's delta at e
        scalar = 1 - (
            1.0 if e > total else math.exp(e) if e < -total else math.exp((e - total) / 2)
        )
        assert kept.mean() <= scalar + 5 * kept.std() / math.sqrt(len(kept)) + 1e-12
        slack.append(scalar - kept.mean())
    assert max(slack) > 0.01  # the product is strictly better somewhere
    # The summed shift is needed: a scalar at the largest coordinate's shift leaks nothing where the
    # product does.
    assert np.maximum(1 - np.exp(max(ratios) - losses), 0).mean() > 1e-3


@pytest.mark.parametrize("rate", [1.0, 0.3, 0.02])
@pytest.mark.parametrize("ratios", [[0.5, 0.5], [0.3] * 6, [0.05] * 40], ids=len)
def test_domination_holds_under_sampling_and_composition_in_both_directions(ratios, rate):
    """Exact losses of the product on a grid of totals, sampled, composed, against the accountant's
    scalar event."""
    base = None
    for ratio in ratios:
        one = laplace_pld(ratio, pessimistic=False, interval=1e-3)
        base = one if base is None else base.compose(one)
    scalar_event = laplace_event(sum(ratios), rate)
    for e in (0.05, 0.3, 1.0):
        # Hockey-stick divergences of the sampled product follow from the product's own at one other
        # order.
        removed = rate * base.get_delta_for_epsilon(math.log1p(math.expm1(e) / rate))
        weight = 1 - math.exp(e) * (1 - rate)
        added = (
            weight * base.get_delta_for_epsilon(e + math.log(rate / weight)) if weight > 0 else 0.0
        )
        accountant = accountants.PldAccountant().compose(scalar_event)
        assert max(removed, added) <= accountant.get_delta(e) + 1e-9
    if rate == 1.0:  # composed: 20 products against 20 scalars
        product, scalar = base.self_compose(20), laplace_pld(sum(ratios)).self_compose(20)
        for e in (0.5, 2.0, 5.0):
            assert product.get_delta_for_epsilon(e) <= scalar.get_delta_for_epsilon(e) + 1e-9


def test_sampled_laplace_is_accounted_by_pld_only():
    event = laplace_event(0.5, 0.1)
    assert event == dp_event.PoissonSampledDpEvent(0.1, dp_event.LaplaceDpEvent(2.0))
    assert composed_epsilon([(event, 50)], 1e-5) < 50 * math.log1p(0.1 * math.expm1(0.5))
    with pytest.raises(PrivacyError, match="accountant = 'pld'"):
        composed_epsilon([(event, 50)], 1e-5, "rdp")
    assert laplace_event(0.5) == dp_event.LaplaceDpEvent(2.0)
    assert laplace_event(0.0, 0.1) == dp_event.NoOpDpEvent()


def test_replacement_under_sampling_is_bounded_by_pure_amplification():
    """A replaced unit's mixtures ((1-q) R + q P, (1-q) R + q P'), exactly, against the event that
    is charged."""
    shift, q, interval = 0.8, 0.3, 1e-3
    edges = np.concatenate([[-60], np.linspace(-shift, shift, 8001), [60]])

    def cells(centre):
        return np.diff(stats.laplace.cdf(edges, loc=centre))

    ours = (1 - q) * cells(0) + q * cells(-shift)
    theirs = (1 - q) * cells(0) + q * cells(shift)
    levels = np.floor(np.log(ours / theirs) / interval).astype(int)
    exact = privacy_loss_distribution.PrivacyLossDistribution.create_from_rounded_probability(
        dict(zip(*(a.tolist() for a in sums(levels, ours)), strict=True)),
        0.0,
        interval,
        pessimistic_estimate=False,
    )
    event = laplace_event(2 * shift, q, "replace-one")
    assert event == pure_event(math.log1p(q * math.expm1(2 * shift)))
    for count in (1, 5, 30):
        bound = composed_epsilon([(event, count)], 1e-5)
        assert exact.self_compose(count).get_epsilon_for_delta(1e-5) <= bound + 1e-9


def sums(levels, mass):
    keys, where = np.unique(levels, return_inverse=True)
    return keys, np.bincount(where, weights=mass)


@settings(deadline=None, max_examples=30)
@given(st.floats(1e-3, 20))
def test_pure_events(epsilon):
    event = pure_event(epsilon)
    assert events.decode(events.encode(event)) == event
    assert composed_epsilon([(event, 3)], 0.0) == pytest.approx(3 * epsilon, rel=1e-6)
    assert composed_epsilon([(event, 1)], 1e-9) <= epsilon + 2e-4


def test_delta_zero_is_basic_composition_whatever_the_accountant():
    events = [(laplace_event(0.5), 4), (laplace_event(1.0, 0.25), 2)]
    expected = 4 * 0.5 + 2 * math.log1p(0.25 * math.expm1(1.0))
    for accountant in ("pld", "rdp"):  # no Renyi accounting takes part
        assert composed_epsilon(events, 0.0, accountant) == pytest.approx(expected)
        assert (
            composed_epsilon([*events, (dp_event.GaussianDpEvent(50.0), 1)], 0.0, accountant)
            == math.inf
        )
        assert composed_epsilon([(dp_event.NonPrivateDpEvent(), 1)], 0.0, accountant) == math.inf


# --- calibration ---------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=5)
@given(
    st.floats(0.2, 10),
    st.integers(1, 60),
    st.sampled_from([0.02, 0.3, 1.0]),
    st.sampled_from(["add-remove", "replace-one"]),
)
def test_a_calibrated_laplace_run_meets_its_budget_and_hardly_less_noise_would_not(
    epsilon, steps, rate, relation
):
    settings_ = {"steps": steps, "sampling_rate": rate, "relation": relation, "accountant": "pld"}
    facts = RunFacts(
        0.0, Sampling("poisson", 100, rate), relation, rounds=steps, epsilon=epsilon, delta=1e-5
    )
    multiplier = mechanisms.get("laplace-inid").calibrate(facts)
    if 2 / multiplier > 40:
        return  # hardly any noise: more of it than needed is given
    plan = plan_of("laplace-inid", multiplier, relation, rate)
    assert composed_epsilon([(plan.event, steps)], 1e-5) <= epsilon
    pure = calibrate_laplace(epsilon, 0.0, **settings_)
    assert multiplier <= pure * 1.05
    less = plan_of("laplace-inid", multiplier * 0.995, relation, rate)
    assert composed_epsilon([(less.event, steps)], 1e-5) > epsilon


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_pure_calibration(relation, rate):
    multiplier = calibrate_laplace(2.0, 0.0, steps=10, sampling_rate=rate, relation=relation)
    plan = plan_of("laplace-spr", multiplier, relation, rate)
    assert composed_epsilon([(plan.event, 10)], 0.0) == pytest.approx(2.0, rel=1e-7)
    local = RunFacts(multiplier, Sampling("poisson", 100, 0.1), "replace-one", "local")
    start = Transcript.start(torch.zeros(LAYERS.size))
    event = mechanisms.get("laplace-spr").plan(LAYERS, local, start).event
    assert event.noise_multiplier == pytest.approx(
        multiplier / 2
    )  # no amplification; a replacement moves twice as far


def test_gaussian_rules_calibrate_like_every_gaussian():
    expected = accounting.calibrate(
        3.0, 1e-5, steps=20, sampling_rate=0.2, relation="add-remove", accountant="pld"
    )
    facts = RunFacts(0.0, Sampling("poisson", 100, 0.2), rounds=20, epsilon=3.0, delta=1e-5)
    assert {mechanisms.get(name).calibrate(facts) for name in GAUSSIAN} == {expected}


def test_rdp_calibration_works_without_sampling_and_says_why_not_with():
    loose = calibrate_laplace(2.0, 1e-5, steps=20, accountant="rdp")
    assert loose >= calibrate_laplace(2.0, 1e-5, steps=20)
    with pytest.raises(PrivacyError, match="accountant = 'pld'"):
        calibrate_laplace(2.0, 1e-5, steps=20, sampling_rate=0.1, accountant="rdp")


# --- clipping and noise ----------------------------------------------------------------------------------------------


@given(hnp.arrays(np.float32, 8, elements=st.floats(-1e4, 1e4, width=32)), st.floats(0.01, 100))
def test_a_contribution_never_exceeds_its_l1_bounds(values, bound):
    layers = LayerTable.from_sizes({"a": 5, "b": 1, "c": 2})
    plan = plan_of("laplace-inid", bound=bound, layers=layers)
    total = BoundedSum.empty(plan)
    total.add(torch.from_numpy(values))
    moved = layers.norms(total.total, 1).numpy()
    assert np.all(moved <= plan.clip)
    assert (moved / plan.sigma).sum() <= 1 / plan.effective_multiplier


def test_one_client_moves_a_sum_by_its_l1_bound_and_that_is_attained():
    plan, ring = plan_of("laplace-inid", bound=3.0), KeyRing.from_seed(4)
    updates = [
        torch.randn(LAYERS.size, generator=ring.torch_generator(Purpose.PROBE, i)) for i in range(6)
    ]
    sums_ = []
    for members in (updates, updates[1:]):
        total = BoundedSum.empty(plan)
        for update in members:
            total.add(update)
        sums_.append(total.total)
    moved = LAYERS.norms(sums_[0] - sums_[1], 1).numpy()
    assert moved == pytest.approx(plan.clip, rel=1e-4)
    l2 = plan_of(
        "gaussian-inid", bounds=plan.clip.tolist()
    )  # an l2 clip to the same numbers would not be enough
    total = BoundedSum.empty(l2)
    total.add(updates[0])
    assert np.all(LAYERS.norms(total.total, 1).numpy() > 2 * plan.clip)


@pytest.mark.parametrize("name", ["laplace-inid", "gaussian-inid"])
def test_released_noise_has_the_planned_law(name):
    layers = LayerTable.from_sizes({"small": 20_000, "large": 60_000})
    plan = plan_of(name, 2.0, bounds=[0.5, 3.0], layers=layers)
    noisy = release(torch.zeros(plan.size), plan, KeyRing.from_seed(8), 1).double().numpy()
    laws = {"laplace": stats.laplace, "gaussian": stats.norm}
    wrong = laws["gaussian" if plan.family == "laplace" else "laplace"]
    for part, scale in zip(np.split(noisy, [20_000]), plan.sigma, strict=True):
        assert stats.kstest(part, laws[plan.family](scale=scale).cdf).pvalue > 1e-6
        # Power: a scale off by 8 % and the other law of the same variance are both refused.
        assert stats.kstest(part, laws[plan.family](scale=1.08 * scale).cdf).pvalue < 1e-3
        assert stats.kstest(part, wrong(scale=part.std() / wrong.std()).cdf).pvalue < 1e-3


def test_laplace_layers_never_share_a_stream():
    streams = [
        KeyRing.from_seed(1).torch_generator(Purpose.NOISE, 1, 0, layer) for layer in range(2)
    ]
    noise = add_noise_(torch.zeros(20_000), [(10_000, 1.0)] * 2, streams, "laplace").numpy()
    assert abs(np.corrcoef(noise[:10_000], noise[10_000:])[0, 1]) < 0.05


LOCAL = ["privacy.trust=local", "privacy.max_participations=2"]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gaussian-spr", ["privacy.accountant=rdp"]),
        pytest.param("laplace-iid", [], marks=pytest.mark.slow),
        ("laplace-inid", [*LOCAL, "privacy.epsilon=1"]),
    ],
)
def test_the_federation_runs_every_rule_under_central_and_local_trust(tmp_path, name, more):
    common = [
        "federation.clients=30",
        "federation.rounds=2",
        "federation.rate=0.5",
        "training.epochs=1",
    ]
    chosen = recipe.load("digits", [f"mechanism.name={name}", *common, *more])
    result = launch.simulate(chosen, engine="local", run_dir=tmp_path / name)
    assert result["epsilon"] == pytest.approx(chosen.privacy.epsilon, rel=1e-3)
    assert result["guarantee"].startswith("proven (client-level")


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bound": 0.0}, "bound must be finite and positive"),
        ({"bounds": [1.0, -1.0, 1.0]}, "bounds must be finite and positive"),
        ({"p": 0.5}, "p must be finite and at least 1"),
        ({"bounds": [1.0]}, "1 entries for 3 layers"),
        ({"variant": "published"}, "no variant"),
        ({"budget": 1.0}, "no option 'budget'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gaussian-inid", "laplace-inid"])
def test_bad_options(name, options, message):
    with pytest.raises(ConfigError, match=message):
        plan_of(name, **options)


def test_no_noise_is_no_guarantee():
    with pytest.raises(PrivacyError, match="without noise"):
        plan_of("laplace-inid", 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be"),
        ({"delta": 1.0}, "delta must lie"),
        ({"steps": 0}, "steps must be"),
        ({"sampling_rate": 0.0}, "sampling_rate must lie"),
        ({"relation": "swap-out"}, "known: add-remove, replace-one, zero-out"),
        ({"accountant": "gdp"}, "known: pld, rdp"),
    ],
    ids=str,
)
def test_bad_calibration(changes, message):
    with pytest.raises(ConfigError, match=message):
        calibrate_laplace(**{"epsilon": 1.0, "delta": 1e-5, "steps": 3} | changes)


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
@pytest.mark.parametrize(("epsilon", "delta"), [(1e4, 0.0), (1e300, 1e-5)])
def test_huge_budgets_are_no_overflow(relation, epsilon, delta, monkeypatch):
    """exp(epsilon) is no number from 710 on: such budgets get a little noise, and cost no more than
    they allow."""
    monkeypatch.setattr(group_noise, "_LARGEST_LOSS", 8.0)  # grids grow with it
    multiplier = calibrate_laplace(epsilon, delta, steps=3, sampling_rate=0.1, relation=relation)
    loss = accounting.SENSITIVITY_FACTOR[relation] / multiplier
    assert 0 < loss <= events.LARGEST_PURE
    assert not events.is_private(laplace_event(1e4, 0.1, relation))
    if delta == 0:
        assert composed_epsilon([(laplace_event(loss, 0.1, relation), 3)], delta) <= epsilon
