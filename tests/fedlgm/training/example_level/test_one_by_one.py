"""A user's scaling and a user's query see one example at a time, so that no example moves another
one's share."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from fedlgm import Guarantee, ReleasePlan, RunFacts, Sampling, Transcript, mechanisms
from fedlgm.aggregation import BoundedSum
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.extension.testing import _check_scaling
from fedlgm.mechanisms.dp_sgd import DPSGD
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.queries import AuxiliaryQuery, BelowBound
from fedlgm.training.example_level import ExampleGradients, FlatClip, PerLayerClip
from fedlgm.training.example_level.bounding import bound_gradients, scaled_sum
from fedlgm.training.example_level.norms import L1, norm_of
from fedlgm.training.example_level.scaling import one_by_one
from fedlgm.training.example_level.trainer import ExampleTrainer


class Median(PerLayerClip):
    """Cuts to the batch's median norm, though no further than to the bound."""

    def factors(self, norms):
        return (norms.median(dim=0).values.clamp(max=self.clip[0]) / norms.clamp(min=1e-9)).clamp(
            max=1.0
        )

    def factors_of(self, layer, norms):
        return (norms.median().clamp(max=self.clip[layer]) / norms.clamp(min=1e-9)).clamp(max=1.0)


class WholeMedian(Median):
    per_layer = False


@pytest.mark.parametrize("made", [Median, WholeMedian])
def test_one_example_moves_the_sum_by_its_bound_at_most(made):
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2), torch.randn(41, 3), torch.zeros(41, dtype=torch.int64)
    x[:20] *= 1e-3
    table, scaling = LayerTable.from_module(model), made((0.1,))
    gradients = ExampleGradients(model, table)
    moved = gradients.sum(x, y, scaling).total - gradients.sum(x[:-1], y[:-1], scaling).total
    assert float(moved.norm()) <= scaling.bound * (1 + 1e-5)
    rows = torch.randn(41, table.size)
    rows[:20] *= 1e-3
    moved = scaled_sum(rows, scaling, table)[0] - scaled_sum(rows[:-1], scaling, table)[0]
    assert float(moved.norm()) <= scaling.bound * (1 + 1e-9)
    assert len(gradients.sum(x[:0], y[:0], scaling).norms) == 0


def test_the_kit_refuses_a_scaling_that_remembers():
    class Remembers(PerLayerClip):
        def factors(self, norms):
            vars(self)["seen"] = vars(self).get("seen", 0) + len(norms)
            return (0.05 / norms.clamp(min=1e-9)).clamp(max=1.0) * (1 + vars(self)["seen"] % 2) / 2

    mechanism, facts = (
        mechanisms.get("dp-sgd", bound=0.1),
        RunFacts(1.0, Sampling("poisson", 12, 0.5)),
    )
    model = nn.Linear(3, 2)
    table = mechanism.table(LayerTable.from_module(model))
    plan = mechanism.plan(table, facts, Transcript.start(table.flatten(model)))
    with pytest.raises(PrivacyError, match="remembers"):
        _check_scaling("mine", plan, Remembers((0.1,)))
    _check_scaling("bundled", plan, mechanism.scaling(plan))


class Unbounded(PerLayerClip):
    """Leaves examples longer than it says."""

    def factors(self, norms):
        return 100 / norms


class Backwards(PerLayerClip):
    def factors(self, norms):
        return torch.where(norms > 1, -100.0, torch.nan)


@pytest.mark.parametrize("made", [Unbounded, Backwards])
def test_a_scaling_keeps_the_bounds_that_it_states(made):
    norms = torch.tensor([[0.0, 1e-30], [0.5, 4.0], [1e30, 2.0]], dtype=torch.float64)
    lengths = one_by_one(made((0.5, 2.0))).factors(norms) * norms
    assert bool(((lengths >= 0) & (lengths <= torch.tensor([0.5, 2.0]))).all())


class Shrinking(PerLayerClip):
    """Bounds that are large where factors are cut, and small when the plan checks them."""

    def factors(self, norms):
        return 1e6 * torch.ones_like(norms)

    def bounds(self, layers):
        vars(self)["asked"] = vars(self).get("asked", 0) + 1
        return np.array([100.0 if vars(self)["asked"] == 1 else 1.0])


def test_the_bounds_that_cut_are_those_that_the_plan_checks():
    model = nn.Linear(4, 2)
    layers, facts = LayerTable.from_module(model, "all"), RunFacts(1.0, Sampling("poisson", 4, 0.5))
    guarantee = Guarantee("proven", "", unit="example")
    plan = ReleasePlan(layers, [1.0], [1.0], facts, guarantee, bounded_by="trainer")
    with pytest.raises(PrivacyError, match="kept the bounds"):
        BoundedSum.empty(plan).add(
            bound_gradients(torch.ones(1, layers.size), Shrinking((1.0,)), plan)
        )

    class Own(DPSGD):
        def scaling(self, plan):
            return Shrinking((1.0,))

    trainer = ExampleTrainer(model, layers, Own("mine"))
    with pytest.raises(PrivacyError, match="kept the bounds"):
        BoundedSum.empty(plan).add(
            trainer.sum(torch.ones(4, 4), torch.tensor([0, 1, 1, 0]), torch.tensor([0]), plan)
        )


class RunningMean(PerLayerClip):
    def factors(self, norms):
        seen = vars(self).setdefault("seen", [])
        seen.append(float(norms.mean()))
        return (np.mean(seen) * 0.1 / norms).clamp(max=1.0)


@dataclass(frozen=True)
class Above(BelowBound):
    """Whether a norm is above the mean of those seen."""

    __module__ = "mypkg.queries"

    def encode(self, norms, clip):
        seen = vars(self).setdefault("seen", [])
        seen.append(norms)
        return (norms > torch.cat(seen).mean(dim=0)).float() - 0.5


def test_what_remembers_examples_is_refused_in_a_run():
    norms, clip = torch.tensor([[1.0], [2.0], [9.0]], dtype=torch.float64), torch.ones(1)
    with pytest.raises(PrivacyError, match="scaling remembers"):
        one_by_one(RunningMean((1.0,))).factors(norms)
    query = Above((3,))
    with pytest.raises(PrivacyError, match="query 'below-bound' remembers"):
        query.contribution(norms, clip)


def test_examples_are_bounded_in_the_norm_of_the_noise():
    facts = RunFacts(1.0, Sampling("poisson", 12, 0.5))
    plan = ReleasePlan(
        LayerTable.from_sizes({"a": 9}),
        [1.0],
        [1.0],
        facts,
        Guarantee("proven", "", unit="example"),
        "laplace",
        bounded_by="trainer",
    )
    with pytest.raises(PrivacyError, match="l2 norm, which laplace noise does not protect"):
        bound_gradients(torch.ones(1, 9), PerLayerClip((1.0,)), plan)


def test_of_a_norm_of_the_users_own_only_the_order_counts():
    class Shortened:
        order, fused = 1, False

        def amounts(self, gradients):
            return gradients.abs().mean(dim=1)

    scaling = PerLayerClip((1.0,))
    object.__setattr__(scaling, "norm", Shortened())
    assert isinstance(norm_of(scaling), L1)


def test_bundled_scalings_see_batches_and_keep_their_bits():
    scaling = FlatClip(0.5)
    assert one_by_one(scaling) is scaling


def test_factors_of_another_shape_are_refused():
    class Short(PerLayerClip):
        def factors(self, norms):
            return norms[:, 0]

    with pytest.raises(ConfigError, match=r"\(1, 2\) for one example, got \(1,\)"):
        one_by_one(Short((1.0, 1.0))).factors(torch.ones(3, 2))


@dataclass(frozen=True)
class AboveMean(AuxiliaryQuery):
    """Whether the first layer's norm is above the batch's mean; spoils its arguments."""

    name, size, bound = "above-mean", 1, 1.0

    def encode(self, norms, clip):
        above = (norms[:, :1] > norms[:, :1].mean()).double() + 0.0 * clip[0]
        norms.add_(1.0)
        clip.mul_(2.0)
        return above

    def decode(self, mean) -> np.ndarray:
        return mean.double().numpy()


def test_a_query_of_the_users_own_cannot_compare_examples():
    norms, clip = torch.arange(1.0, 9.0)[:, None].double(), torch.ones(1, dtype=torch.float64)
    answers = AboveMean((3,)).contribution(norms, clip)
    assert torch.equal(answers, torch.zeros(8, 1))
    assert clip.tolist() == [1.0]
    assert norms[:, 0].tolist() == list(range(1, 9))


def test_a_query_of_this_package_keeps_its_answers():
    class Same(BelowBound):
        pass

    norms, clip = torch.rand(16, 3), torch.full((3,), 0.5)
    assert torch.equal(
        Same((4, 4, 4)).contribution(norms, clip), BelowBound((4, 4, 4)).contribution(norms, clip)
    )
