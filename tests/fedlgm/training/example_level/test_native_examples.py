"""Per-example gradients by the compiled kernel: those of the engine, and bounded for every finite
example."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedlgm import mechanisms
from fedlgm.errors import ConfigError, DataError
from fedlgm.papers.inid.laplace_sgd import LaplaceSGD
from fedlgm.planning.clipping import Scaling
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm.training import models, tasks
from fedlgm.training.example_level import native
from fedlgm.training.example_level.engine import ClippedSum, ExampleGradients
from fedlgm.training.example_level.native import NativeExampleGradients
from fedlgm.training.example_level.scaling import PSAC, AutoS, FlatClip, PerLayerClip, Reweighted
from fedlgm.training.example_level.trainer import ExampleTrainer
from fedlgm.training.native import instruction_set, library
from fedlgm.training.tasks import Binary, Regression, Task

SCALINGS: list[Scaling] = [FlatClip(0.3), PerLayerClip((0.1, 0.2, 0.4)), AutoS(1.0), PSAC(0.5)]
FACTS, START = RunFacts(1.0, Sampling("poisson", 23, 0.5), rounds=3), Transcript(0, ())
ROUNDING = 1 + 2.0**-16


@pytest.fixture(autouse=True)
def some_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable kernel where PyTorch does without AVX2; its bits are the same."""
    if instruction_set() is None:
        monkeypatch.setattr(native, "library", lambda: library.build("portable"))


def dense() -> nn.Sequential:
    torch.manual_seed(1)
    parts = nn.Linear(20, 17), nn.Tanh(), nn.Linear(17, 5), nn.Sigmoid(), nn.Linear(5, 3)
    return nn.Sequential(*parts)


def by_kernel(
    module: nn.Module, layers: LayerTable | None = None, task: Task | None = None
) -> NativeExampleGradients:
    table = layers or LayerTable.from_module(module)
    return NativeExampleGradients(module, table, task or tasks.get(), table.flatten(module))


def batch(count: int = 23, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, *(shape or (20,)), generator=generator), torch.arange(count) % 3


def agree(one: ClippedSum, other: ClippedSum) -> None:
    assert torch.allclose(one.norms, other.norms, rtol=1e-4, atol=1e-6)
    assert (one.total - other.total).norm() < 1e-5 * one.total.norm() + 1e-7
    assert one.discarded == other.discarded


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: type(scaling).__name__)
def test_sums_are_those_of_the_engine(scaling: Scaling) -> None:
    module, (x, y) = dense(), batch()
    reference = ExampleGradients(module, LayerTable.from_module(module), exact_sums=True)
    agree(reference.sum(x, y, scaling), by_kernel(module).sum(x, y, scaling))


@pytest.mark.parametrize(
    ("name", "shape"), [("cnn", (1, 28, 28)), ("cnn-small", (3, 20, 20)), ("logistic", (5,))]
)
def test_bundled_models_have_the_sums_of_the_engine(name: str, shape: tuple[int, ...]) -> None:
    module, (x, y) = models.build(name, in_shape=shape, classes=3, seed=1), batch(7, *shape)
    reference = ExampleGradients(module, LayerTable.from_module(module), exact_sums=True)
    agree(reference.sum(x, y, FlatClip(1.0)), by_kernel(module).sum(x, y, FlatClip(1.0)))


def test_layers_of_any_grouping_and_l1_norms_are_measured() -> None:
    module, (x, y) = dense(), batch()
    mechanism = LaplaceSGD("global", bound=0.5)  # an l1 norm
    for group_by in (
        "tensor",
        "all",
        lambda name: str(name.startswith("2") or name.endswith("bias")),
    ):
        layers = LayerTable.from_module(module, group_by=group_by)
        plan = mechanism.plan(mechanism.table(layers), FACTS, START)
        reference, scaling = (
            ExampleGradients(module, plan.layers, exact_sums=True),
            mechanism.scaling(plan),
        )
        agree(reference.sum(x, y, scaling), by_kernel(module, plan.layers).sum(x, y, scaling))


def test_regression_counts_the_mean_over_outputs() -> None:
    module, (x, _), y = (
        dense(),
        batch(),
        torch.randn(23, 3, generator=torch.Generator().manual_seed(2)),
    )
    layers, task = LayerTable.from_module(module), Regression("squared")
    reference = ExampleGradients(module, layers, task, exact_sums=True)
    agree(
        reference.sum(x, y, FlatClip(0.5)), by_kernel(module, layers, task).sum(x, y, FlatClip(0.5))
    )


def test_binary_labels_have_the_sums_of_the_engine() -> None:
    module, (x, _), y = dense(), batch(), (torch.arange(69).view(23, 3) % 4 == 0).float()
    layers, task = LayerTable.from_module(module), Binary()
    reference = ExampleGradients(module, layers, task, exact_sums=True)
    agree(
        reference.sum(x, y, FlatClip(0.1)), by_kernel(module, layers, task).sum(x, y, FlatClip(0.1))
    )


def test_bits_depend_neither_on_blocks_nor_on_the_other_examples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, (x, y) = (
        models.build("cnn", in_shape=(1, 28, 28), classes=3, seed=1),
        batch(23, 1, 28, 28),
    )
    found = []
    for size in (1, 500_000, 4 << 20):
        monkeypatch.setattr(native, "BLOCK_BYTES", size)
        found.append(by_kernel(module).sum(x, y, FlatClip(0.3)))
    assert all(torch.equal(found[0].total, other.total) for other in found)
    engine = by_kernel(module)
    alone = [engine.sum(x[i : i + 1], y[i : i + 1], FlatClip(0.3)).norms for i in range(len(y))]
    assert torch.equal(torch.cat(alone), found[0].norms)


def test_an_empty_batch_sums_to_zero() -> None:
    found = by_kernel(dense()).sum(
        torch.empty(0, 20), torch.empty(0, dtype=torch.int64), FlatClip(1.0)
    )
    assert (float(found.total.norm()), found.norms.shape, found.discarded) == (0.0, (0, 3), 0)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(
        [
            FlatClip(1.0),
            FlatClip(1e-8),
            FlatClip(2.0**-36),
            PerLayerClip((0.5, 0.5, 0.5)),
            AutoS(1.0),
            PSAC(1.0),
            Reweighted(1.0, (0.6, 0.8, 0.0)),
        ]
    ),
    of_x=st.floats(-38, 38) | st.floats(-26, -19),
    of_weights=st.floats(-30, 18),
    of_target=st.floats(-38, 38),
    seed=st.integers(0, 99),
)
def test_no_finite_example_moves_a_step_by_more_than_its_bound(
    kind: Scaling, of_x: float, of_weights: float, of_target: float, seed: int
) -> None:
    """Scales from 1e-38 to 1e38, in a batch with an example that is not finite."""
    generator = torch.Generator().manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))

    def stretched(values: Tensor, exponent: float) -> Tensor:
        return (values.double() * 10.0**exponent).clamp(-3e38, 3e38).float()

    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(
                stretched(torch.randn(parameter.shape, generator=generator), of_weights / 3)
            )
    x = torch.cat(
        [stretched(torch.randn(1, 6, generator=generator), of_x), torch.full((1, 6), math.nan)]
    )
    y = torch.cat([stretched(torch.randn(1, 2, generator=generator), of_target), torch.zeros(1, 2)])
    found = by_kernel(module, task=Regression("squared")).sum(x, y, kind)
    assert float(found.total.norm()) <= kind.bound * ROUNDING
    assert found.total.isfinite().all()
    assert found.discarded >= 1


def test_a_tiny_input_with_a_large_target_counts_as_its_product() -> None:
    """The input's squares vanish in float32, the gradient does not."""
    layer = nn.Linear(600, 2, bias=False)
    nn.init.zeros_(layer.weight)
    module = nn.Sequential(layer)
    x, y = torch.full((1, 600), 1e-22), torch.tensor([[1e18, 0.0]])
    found = by_kernel(module, task=Regression("squared")).sum(x, y, FlatClip(1e-6))
    assert 0.9e-6 < float(found.total.norm()) <= 1e-6 * ROUNDING


def test_what_the_kernel_does_not_know_is_refused() -> None:
    module, (x, y) = dense(), batch()
    engine = by_kernel(module)
    with pytest.raises(ConfigError, match="one float32 array of inputs"):
        engine.sum(x.double(), y, FlatClip(1.0))
    with pytest.raises(ConfigError, match="one float32 array of inputs"):
        engine.sum(x, y[:-1], FlatClip(1.0))
    with pytest.raises(DataError, match="targets range from 1 to 3"):
        engine.sum(x, y + 1, FlatClip(1.0))
    with pytest.raises(ConfigError, match="GELU"):
        by_kernel(nn.Sequential(nn.Linear(20, 3), nn.GELU())).sum(x, y, FlatClip(1.0))
    with pytest.raises(ConfigError, match="on the CPU, not on meta"):
        NativeExampleGradients(
            module, LayerTable.from_module(module), tasks.get(), torch.empty(1, device="meta")
        )


def test_a_trainer_by_the_kernel_follows_its_weights() -> None:
    mechanism, (x, y), rows = mechanisms.get("dp-sgd", bound=0.5), batch(), torch.arange(9)
    found = []
    for by_native in (False, True):
        module = dense()
        layers = mechanism.table(LayerTable.from_module(module))
        trainer = ExampleTrainer(module, layers, mechanism, exact_sums=True, native=by_native)
        plan = mechanism.plan(layers, FACTS, START)
        before = trainer.sum(x, y, rows, plan).values.clone()
        trainer.weights.mul_(0.5)
        found.append((before, trainer.sum(x, y, rows, plan).values))
    (one, one_later), (other, other_later) = found
    assert torch.allclose(one, other, atol=1e-5)
    assert torch.allclose(one_later, other_later, atol=1e-5)
    assert not torch.allclose(one, one_later, atol=1e-2)
