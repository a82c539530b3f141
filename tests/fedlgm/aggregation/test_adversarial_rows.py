"""No row, client or query moves a sum by more than its bound, whatever it is made of; who bounds is
a type."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedlgm.aggregation import BoundedSum, DeviceSum, bound_update
from fedlgm.aggregation.contributions import BoundedAnswer, BoundedUpdates
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.planning import queries
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import SAFETY, LayerTable
from fedlgm.planning.plan import NoisyQuery, ReleasePlan
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.training import ClientTask
from fedlgm_lab.applications import coordinate_descent as cd
from fedlgm_lab.applications import pca
from fedlgm_lab.applications.federated_descent import CoordinateSums
from fedlgm_lab.applications.federated_pca import CovarianceSums, covariance_table, layer_bounds
from fedlgm_lab.applications.objectives import Lasso
from fedlgm_lab.applications.sums import gram, sum_rows

LAYERS = LayerTable.from_sizes({"a": 3, "b": 2})
FACTS = RunFacts(1.0, Sampling("poisson", 10, 1.0))
GUARANTEE = Guarantee("proven", "a test")


def plan_of(**changes) -> ReleasePlan:
    return replace(
        ReleasePlan(LAYERS, np.array([2.0, 0.5]), np.array([3.0, 3.0]), FACTS, GUARANTEE), **changes
    )


# -- rows that are chosen to make rounding errors add up
# ---------------------------------------------------------------


def adversarial(big: int, small: int, ulps: int, start: float = 0.5) -> np.ndarray:
    """Values in [0, 1] whose sum in order crosses the power of two `big` or not, by the very first
    one.

    After it every value is an odd number of half steps of the coarser grid, so that each addition
    rounds the same way."""
    step = big * 2.0**-53
    return np.concatenate([np.ones(big), [start], np.full(small, ulps * step)])


def tasks_of(x: np.ndarray) -> list[ClientTask]:
    return [
        ClientTask(
            torch.from_numpy(x), -torch.ones(len(x), dtype=torch.float64), torch.Generator(), 1
        )
    ]


def descent_upload(values: np.ndarray, clip: float = 1.0) -> tuple[np.ndarray, float]:
    """What a client uploads for coordinate 0 if its rows' derivatives are `values`, and the bound
    of one row."""
    plan = cd.plan_descent(
        np.ones(2),
        budget=1.0,
        rule="spr",
        clip=clip * math.sqrt(2),
        rate=1.0,
        passes=1,
        rows=10,
        relation="add-remove",
    )
    x = np.stack([values * plan.clip[0], np.zeros_like(values)], axis=1)
    (update,) = CoordinateSums(Lasso(0.0), plan).updates(torch.zeros(2), tasks_of(x))
    return update.values[0].numpy(), update.bounds[0]


def without_first(values: np.ndarray) -> np.ndarray:
    """The neighbour: the first row contributes nothing."""
    other = values.copy()
    other[0] = 0.0
    return other


def moved_by_descent(values: np.ndarray) -> float:
    """By how many of its bounds the first row moves a client's upload."""
    (one, bound), (other, _) = descent_upload(values), descent_upload(without_first(values))
    return float(abs(one[0] - other[0])) / bound


def moved_by_pca(values: np.ndarray, method: str) -> float:
    """The same for second moments: rows along the first axis whose squares (or clipped entries) are
    `values`."""
    plan = pca.covariance_plan(method, 2, 1.0, 0.0 if method.startswith("laplace") else 1e-6)
    entry = 1.0 if plan.entry_clip is None else plan.entry_clip[0]
    uploads = []
    for own in (values, without_first(values)):
        x = np.zeros((len(own), 2))
        x[:, 0] = np.sqrt(own * entry)
        x[own == 1, 0] = 1.0
        (update,) = CovarianceSums(plan).updates(torch.zeros(3), tasks_of(x))
        uploads.append(update.values[0].numpy())
    difference = uploads[0] - uploads[1]
    bounds, _ = layer_bounds(plan)
    order = 2 if plan.family == "gaussian" else 1
    parts = covariance_table(plan).split(torch.from_numpy(difference))
    return max(
        float(np.linalg.norm(part, ord=order)) / bound
        for part, bound in zip(parts, bounds, strict=True)
    )


ATTACKS = st.builds(
    adversarial,
    st.sampled_from([2**14, 2**15, 2**16]),
    st.integers(1, 2**16),
    st.sampled_from([1, 3, 5, 7, 11]),
)
LARGE = st.builds(
    adversarial,
    st.sampled_from([2**19, 2**20]),
    st.integers(2**19, 2 * 2**20),
    st.sampled_from([1, 3, 5, 7, 11]),
)
METHODS = sorted(set(pca.methods()) - {"gaussian-inid-unclipped"})


@settings(max_examples=12)
@given(values=ATTACKS)
def test_no_row_moves_a_sum_of_derivatives_by_more_than_its_bound(values):
    assert moved_by_descent(values) <= 1


@settings(max_examples=6)
@given(values=ATTACKS, method=st.sampled_from(METHODS))
def test_no_row_moves_a_sum_of_second_moments_by_more_than_its_bound(values, method):
    assert moved_by_pca(values, method) <= 1


@pytest.mark.slow
@settings(max_examples=15)
@given(values=LARGE)
def test_no_row_of_millions_moves_a_sum_of_derivatives_by_more_than_its_bound(values):
    assert moved_by_descent(values) <= 1


@pytest.mark.slow
@settings(max_examples=12)
@given(values=LARGE, method=st.sampled_from(METHODS))
def test_no_row_of_millions_moves_a_sum_of_second_moments_by_more_than_its_bound(values, method):
    assert moved_by_pca(values, method) <= 1


@pytest.mark.slow
def test_the_rows_are_adversarial():
    """Power: added up in order, or in float32, as the upload once was, the same rows do move it by
    more."""
    values = adversarial(2**20, 2 * 10**6, 3)
    table = np.stack([values, np.zeros_like(values)], axis=1)
    other = np.stack([without_first(values), np.zeros_like(values)], axis=1)
    assert SAFETY * float((table.sum(axis=0) - other.sum(axis=0))[0]) > 1 + 1e-4
    exact = 2**20 + np.linspace(0, 1, 65)  # float32 is twice as coarse above 2^20 as below
    assert max(np.float32(exact) - np.float32(exact - SAFETY)) > 1.05
    assert moved_by_descent(values) <= 1


def test_sums_in_groups_are_near_the_exact_sum():
    values = adversarial(2**18, 2**19, 3)
    table = np.stack([values, -values], axis=1)
    exact = math.fsum(values)
    assert abs(table.sum(axis=0)[0] - exact) > 3e-6  # power: NumPy's own sum in order is not
    assert np.abs(sum_rows(table) - [exact, -exact]).max() < 512 * exact * 2.0**-53
    x = np.sqrt(table[:, :1])
    assert abs(gram(x)[0, 0] - math.fsum((x[:, 0] ** 2).tolist())) < 1100 * exact * 2.0**-53


@pytest.mark.parametrize(
    "shape", [(0, 2), (1, 2), (127, 2), (128, 3), (129, 1), (128**2 + 1, 2), (5,), (300, 2, 2)]
)
def test_sums_in_groups_of_any_shape(shape):
    values = np.random.default_rng(0).standard_normal(shape)
    assert sum_rows(values) == pytest.approx(values.sum(axis=0), abs=1e-9)
    if len(shape) == 2:
        assert gram(values) == pytest.approx(values.T @ values, abs=1e-8)


# -- clients that are chosen to ----------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    update=st.lists(
        st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=5, max_size=5
    ),
    clips=st.lists(st.sampled_from([0.0, 2.0**-36, 1e-3, 1.0, 3e5]), min_size=2, max_size=2),
    kind=st.sampled_from(["cpu", "kernels"]),
)
def test_no_client_exceeds_its_bounds(update, clips, kind):
    plan = plan_of(clip=np.array(clips), sigma=np.ones(2))
    total = (
        BoundedSum.empty(plan) if kind == "cpu" else DeviceSum(plan, torch.device("cpu"), "torch")
    )
    total.add(torch.tensor([update], dtype=torch.float32))
    norms = [float(torch.linalg.vector_norm(part)) for part in total.total.split([3, 2])]
    assert all(norm <= clip for norm, clip in zip(norms, clips, strict=True))
    assert (int(total.discarded) == 1) == (
        not np.isfinite(np.array(update, dtype=np.float32)).all() or overflowed(update)
    )
    assert total.count == 1


def overflowed(update: list[float]) -> bool:
    """Whether a norm in float32 is infinite although the update is finite."""
    return not LAYERS.norms(torch.tensor(update, dtype=torch.float32)).isfinite().all()


# -- auxiliary queries -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lying(queries.AuxiliaryQuery):
    """A query whose encoder returns whatever it was told to, and states a bound all the same."""

    name: ClassVar[str] = "lying"
    ANSWER: ClassVar[torch.Tensor] = torch.zeros(1, 2)

    @property
    def size(self) -> int:
        return 2

    @property
    def bound(self) -> float:
        return 0.1

    def encode(self, norms, clip):
        return type(self).ANSWER.expand(len(norms), -1)

    def decode(self, mean):
        return mean.numpy()


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    answer=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=2, max_size=2),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    kind=st.sampled_from(["cpu", "kernels"]),
)
def test_no_query_exceeds_its_bound_whatever_its_encoder_does(answer, dtype, kind):
    """An encoder once gave 1,000 times what the plan counted: a multiplier of 7.07 where 0.005 was
    true."""
    Lying.ANSWER = torch.tensor([answer], dtype=torch.float64).to(dtype)
    plan = plan_of(queries=(NoisyQuery(Lying((3, 2)), 0.5),))
    total = (
        BoundedSum.empty(plan) if kind == "cpu" else DeviceSum(plan, torch.device("cpu"), "torch")
    )
    total.add(torch.ones(1, 5))
    answered = total.total[5:]
    assert torch.isfinite(answered).all()
    assert float(torch.linalg.vector_norm(answered.double())) <= 0.1


def test_a_query_with_one_nan_is_cut_all_the_same():
    """NaN made the length unknown, and the other coordinate went through as it was: 1e9 where the
    bound is 0.1."""
    Lying.ANSWER = torch.tensor([[math.nan, 1e9]])
    assert float(Lying((3, 2)).contribution(torch.ones(1, 2), torch.ones(2)).norm()) <= 0.1


def test_a_query_whose_squares_overflow_keeps_its_direction():
    Lying.ANSWER = torch.tensor([[3e30, 4e30]])
    assert Lying((3, 2)).contribution(torch.ones(1, 2), torch.ones(2))[0].tolist() == pytest.approx(
        [0.06, 0.08], rel=1e-4
    )


def test_a_query_of_another_shape_is_refused():
    Lying.ANSWER = torch.zeros(1, 3)
    with pytest.raises(ConfigError, match="query 'lying' encodes"):
        bound_update(torch.ones(5), plan_of(queries=(NoisyQuery(Lying((3, 2)), 0.5),)))


@pytest.mark.parametrize("kind", [queries.BelowBound, queries.BelowShare, queries.LayerStrength])
@settings(max_examples=60)
@given(norms=st.lists(st.floats(0, 1e300), min_size=2, max_size=2))
def test_the_librarys_own_queries_keep_their_bounds_without_being_cut(kind, norms):
    query = kind((3, 2))
    given_norms = torch.tensor([norms], dtype=torch.float64)
    encoded = query.encode(given_norms, torch.tensor([2.0, 0.5], dtype=torch.float64))
    answer = query.contribution(given_norms, torch.tensor([2.0, 0.5], dtype=torch.float64))
    assert torch.equal(answer, encoded.float())
    assert float(answer.double().norm()) <= query.bound


def test_a_plan_cannot_state_another_bound_than_the_query():
    """What the accountant sees is made of the object's own bound; a message names the query and its
    noise only."""
    plan = plan_of(queries=(NoisyQuery(queries.get("below-bound", (3, 2)), 0.5),))
    assert plan.parts[-1].clip == math.sqrt(2) / 2
    told = plan.to_json()
    assert ReleasePlan.from_json(LAYERS, told).effective_multiplier == plan.effective_multiplier
    with pytest.raises(ConfigError):
        ReleasePlan.from_json(
            LAYERS, told.replace('["below-bound", 0.5]', '["below-bound", 0.5, 0.0001]')
        )
    with pytest.raises(ConfigError, match="unknown auxiliary query"):
        ReleasePlan.from_json(LAYERS, told.replace("below-bound", "anything"))


# -- who bounds --------------------------------------------------------------------------------------------------------

SUMS = [
    lambda plan: BoundedSum.empty(plan),
    lambda plan: DeviceSum(plan, torch.device("cpu"), "torch"),
]


@pytest.mark.parametrize("empty", SUMS)
class TestWhoBounds:
    """The sum refuses what does not fit the plan: a label once switched clipping off."""

    def test_raw_updates_where_the_trainer_was_to_bound(self, empty):
        with pytest.raises(
            PrivacyError, match="needs a trainer that bounds its updates, but this one returns raw"
        ):
            empty(plan_of(bounded_by="trainer")).add(torch.full((1, 5), 1e6))

    def test_bounded_updates_where_clients_are_to_be_bounded(self, empty):
        with pytest.raises(
            PrivacyError,
            match="the plan bounds whole clients, but the trainer has bounded single units",
        ):
            empty(plan_of()).add(BoundedUpdates(torch.full((1, 5), 1e6), (2.0, 0.5)))

    @pytest.mark.parametrize(
        "bounds",
        [(2.1, 0.5), (2.0, 0.6), (2.0,), (), (math.nan, 0.5), (math.inf, 0.5), (2.0, 0.5, 0.1)],
    )
    def test_bounds_above_the_plans(self, empty, bounds):
        with pytest.raises(PrivacyError, match="the trainer kept the bounds"):
            empty(plan_of(bounded_by="trainer")).add(BoundedUpdates(torch.ones(1, 5), bounds))

    def test_what_fits_is_added_as_it_is_in_float64(self, empty):
        total = empty(plan_of(bounded_by="trainer"))
        values = torch.tensor(
            [[1e6 + 2.0**-20, 0, 0, 0, 1.0], [math.nan, 0, 0, 0, 0]], dtype=torch.float64
        )
        total.add(BoundedUpdates(values, (2.0, 0.1)))
        assert total.total.tolist() == values[0].tolist()
        assert (total.count, int(total.discarded)) == (2, 1)

    @pytest.mark.parametrize("words", [{"unit": "example"}, {"unit": "client"}, {"reason": "x"}])
    def test_words_change_nothing(self, empty, words):
        """`unit = "example"` once meant that nobody bounded."""
        total = empty(plan_of(guarantee=replace(GUARANTEE, **words)))
        total.add(torch.full((1, 5), 1e6))
        assert float(total.total.norm()) <= math.hypot(2.0, 0.5)


@pytest.mark.parametrize("empty", SUMS)
class TestAnswersOfTheTrainer:
    """A query beside updates that the trainer bounds is answered by the same trainer, within the
    query's bound."""

    PLAN = plan_of(
        bounded_by="trainer", queries=(NoisyQuery(queries.get("layer-strength", (3, 2)), 0.5),)
    )
    ROWS = torch.ones(2, 5)
    ANSWER = BoundedAnswer(
        "layer-strength", torch.tensor([[0.6, 0.8], [0.0, 3.0]], dtype=torch.float64), 1.0
    )

    def test_what_fits_is_added(self, empty):
        total = empty(self.PLAN)
        total.add(BoundedUpdates(self.ROWS, (2.0, 0.5), (self.ANSWER,)))
        assert total.total.tolist() == [2.0] * 5 + [0.6, 3.8]
        rows = BoundedUpdates(self.ROWS, (2.0, 0.5), (self.ANSWER,))
        one_by_one = empty(self.PLAN)
        for low in range(2):
            one_by_one.add(rows[low : low + 1])
        assert torch.equal(one_by_one.total, total.total)

    def test_a_row_that_is_not_finite_counts_as_zero_with_its_answer(self, empty):
        for rows, answer in (
            (math.nan * self.ROWS, self.ANSWER.values),
            (self.ROWS, math.inf * self.ANSWER.values),
        ):
            total = empty(self.PLAN)
            total.add(
                BoundedUpdates(rows, (2.0, 0.5), (BoundedAnswer("layer-strength", answer, 1.0),))[
                    :1
                ]
            )
            assert (int(total.discarded), total.total.tolist()) == (1, [0.0] * 7)

    @pytest.mark.parametrize(
        ("answers", "message"),
        [
            ((), r"asks for the queries \['layer-strength'\], but the trainer answered \[\]"),
            ((replace(ANSWER, query="below-bound"),), "answered \\['below-bound'\\]"),
            ((ANSWER, ANSWER), "the trainer answered"),
            ((replace(ANSWER, bound=1.1),), "kept the bound 1.1"),
            ((replace(ANSWER, bound=math.nan),), "kept the bound nan"),
            ((replace(ANSWER, values=torch.ones(2, 3)),), r"takes 2 x 2 numbers, got \(2, 3\)"),
            ((replace(ANSWER, values=torch.ones(1, 2)),), r"takes 2 x 2 numbers, got \(1, 2\)"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, empty, answers, message):
        with pytest.raises(PrivacyError, match=message):
            empty(self.PLAN).add(BoundedUpdates(self.ROWS, (2.0, 0.5), answers))

    def test_answers_that_nobody_asked_for_are_refused(self, empty):
        with pytest.raises(PrivacyError, match="asks for the queries"):
            empty(plan_of(bounded_by="trainer")).add(
                BoundedUpdates(self.ROWS, (2.0, 0.5), (self.ANSWER,))
            )
        with pytest.raises(PrivacyError, match="raw updates"):
            empty(self.PLAN).add(self.ROWS)
