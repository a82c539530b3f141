"""The test kit passes what is bundled, and rejects what is wrong in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlgm.data import DataSet, Partition, load
from fedlgm.data.text import next_character
from fedlgm.errors import ConfigError, DataError, FedlgmError
from fedlgm.extension.testing import check_data, check_model, check_task
from fedlgm.training import models, tasks

RNG = np.random.default_rng(1)
TEXT = "In the beginning God created the heaven and the earth.\n" * 12


def table(**more: Any) -> dict[str, Any]:
    x = RNG.standard_normal((20, 5)).astype(np.float32)
    return {"train": (x, x.sum(1)), "test": (x, x.sum(1)), **more}


def images(*shape: int, classes: int = 10) -> DataSet:
    """Few of them: they are there from the collection of the tests on."""
    set_ = RNG.standard_normal((40, *shape)).astype(np.float32), np.arange(40) % classes
    return DataSet.from_mapping({"train": set_, "test": set_})


IMAGES = images(1, 12, 12)
SMALL_IMAGES = images(3, 8, 8, classes=3)
PROSE = next_character({"a": TEXT, "b": TEXT.upper()}, length=8, name="prose")
NUMBERS = DataSet.from_mapping(table())


@pytest.mark.parametrize(
    ("name", "data", "options"),
    [
        ("logistic", IMAGES, {}),
        ("mlp", IMAGES, {"hidden": [4]}),
        ("cnn", images(1, 28, 28), {}),
        ("cnn-small", images(3, 16, 16), {}),
        ("cifar-cnn", SMALL_IMAGES, {}),
        ("resnet20", SMALL_IMAGES, {}),
        ("s-cnn", images(1, 28, 28), {}),
        pytest.param("d-cnn", images(3, 32, 32), {}, marks=pytest.mark.slow),
        pytest.param("vgg16", images(3, 32, 32), {}, marks=pytest.mark.slow),
        pytest.param("resnet18", SMALL_IMAGES, {}, marks=pytest.mark.slow),
        pytest.param("resnet152", SMALL_IMAGES, {}, marks=pytest.mark.slow),
    ],
)
def test_bundled_models_pass(name: str, data: DataSet, options: dict[str, Any]) -> None:
    check_model(name, data, **options)


@pytest.mark.parametrize(
    ("name", "task", "data", "options"),
    [
        ("gru", "next-token", PROSE, {"hidden": 6}),
        ("transformer", "next-token", PROSE, {"width": 8}),
        ("mlp", "regression", NUMBERS, {}),
    ],
)
def test_bundled_models_pass_with_other_tasks(
    name: str, task: str, data: DataSet, options: dict[str, Any]
) -> None:
    check_model(name, data, task, **options)


def test_every_bundled_model_is_checked_above() -> None:
    checked = {
        "logistic",
        "mlp",
        "cnn",
        "cnn-small",
        "cifar-cnn",
        "s-cnn",
        "d-cnn",
        "vgg16",
        "resnet20",
        "resnet18",
        "resnet152",
        "gru",
        "transformer",
    }
    assert checked == set(models.names())


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 1)),
        lambda: Net(lambda module, x: nn.functional.dropout(x, 0.5, module.training)),
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 5)),
            nn.GRU(5, 4, num_layers=2, dropout=0.5, batch_first=True),
            Last(),
            nn.Linear(4, 1),
        ),
    ],
)
def test_models_with_dropout_pass(model: Callable[[], nn.Module]) -> None:
    check_model(model, table(), "regression")


def test_bundled_data_pass() -> None:
    check_data("digits")
    check_data("synthetic-30")
    check_data(PROSE, "next-token")
    own = check_data(table(clients=[[0, 1], [2, 3, 4]]), "regression")
    assert own.clients is not None
    check_data(table(clients=[[0, 1], []]), "regression", allow_empty=True)


class Net(nn.Module):
    """A linear model with one flaw."""

    def __init__(self, flaw: Callable[[nn.Module, Tensor], Tensor] = lambda module, x: x) -> None:
        super().__init__()
        self.linear, self.flaw, self.kept = nn.Linear(5, 1), flaw, 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.flaw(self, x))


def remembers(module: Any, x: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        module.kept += 0.1
    return x + module.kept


def hides(module: Any, x: Tensor) -> Tensor:
    """A hidden state that reaches the next batch."""
    module.kept, seen = x.detach().mean(0), module.kept
    return x + seen


class Last(nn.Module):
    """The last outputs of a series."""

    def forward(self, found: tuple[Tensor, Tensor]) -> Tensor:
        return found[0][:, -1]


def numpy_noise(x: Tensor) -> Tensor:
    return torch.from_numpy(RNG.standard_normal(x.shape).astype(np.float32))


class Empty(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(0, 3))


def branches(module: nn.Module, x: Tensor) -> Tensor:
    return x if float(x.sum()) < 1e9 else -x


def differs_under_vmap(module: nn.Module, x: Tensor) -> Tensor:
    batched = torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_gradtrackingtensor(
        x
    )
    return x * 1.05 if batched else x


def unseeded() -> nn.Module:
    module = Net()
    module.linear.weight.data = torch.from_numpy(RNG.standard_normal((1, 5)).astype(np.float32))
    return module


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Net(), None),
        (Net(), None),
        (
            lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
            r"buffer '1.running_mean' .*GroupNorm",
        ),
        (lambda: nn.Flatten(), r"has no trainable parameters"),
        (lambda: "not a model", r"must be an nn.Module, but it is of type str"),
        (3, r"model 'int' is neither an nn.Module nor a class or function"),
        (lambda: Net().double(), r"parameter 'linear.weight' is torch.float64"),
        (
            lambda: Net(lambda module, x: x + torch.rand_like(x)),
            r"different outputs for the same inputs .* draws random numbers in evaluation",
        ),
        (
            lambda: Net(lambda module, x: x - x.mean(0)),
            r"depend on the other examples of its batch",
        ),
        (lambda: Net(remembers), None),  # it is restored for every client
        (lambda: Net(lambda module, x: x * 0 + torch.nan), r"turns NaN or infinite"),
        (lambda: Net(lambda module, x: x[:, :4]), r"does not take a batch of the data 'own'"),
        (
            lambda: nn.Linear(5, 2),
            r"task 'regression' does not fit the model's outputs of shape \(2, 2\)",
        ),
        (
            lambda: Net(hides),
            r"different outputs for the same inputs .* it remembers what it has seen",
        ),
        (
            lambda: Net(lambda module, x: x + numpy_noise(x)),
            r"draws random numbers in .* without PyTorch",
        ),
        (lambda: Empty(), r"parameter 'extra' is empty"),
        (unseeded, r"building it twice gives different weights"),
        (lambda: Net(branches), r"use training.vectorize = 'off'"),
        (lambda: Net(differs_under_vmap), r"many clients at once gives different updates"),
        ("no_such_module:Net", r"module 'no_such_module' cannot be imported: there is no module"),
        (lambda width: Net(), r"missing a required argument: 'width'; its options: width"),
    ],
)
def test_models_are_checked(model: Any, message: str | None) -> None:
    if message is None:
        check_model(model, NUMBERS, "regression")
        return
    with pytest.raises(ConfigError, match=message) as caught:
        check_model(model, NUMBERS, "regression")
    assert "\n" not in str(caught.value)


def test_a_task_that_keeps_the_first_targets_is_restored_for_every_client() -> None:
    class Centred(tasks.Task):
        middle: torch.Tensor | None = None

        def losses(self, outputs, targets):
            if self.middle is None:
                self.middle = targets.mean()
            return (
                (outputs - targets.view_as(outputs) + self.middle).square().flatten(1).mean(dim=1)
            )

    task = Centred()
    check_model(lambda: Net(), NUMBERS, task, vectorized=False)
    assert task.middle is None


def test_a_model_need_not_be_vectorised() -> None:
    check_model(lambda: Net(branches), NUMBERS, "regression", vectorized=False)


def bad_set(**changes: Any) -> DataSet:
    fields = {
        "name": "own",
        **{key: getattr(NUMBERS, key) for key in ("train_x", "train_y", "test_x", "test_y")},
    }
    return DataSet(**(fields | changes))


NAN = NUMBERS.train_y.copy()
NAN[3] = np.nan


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bad_set(train_y=NUMBERS.train_y[:-1]), r"training data: 20 inputs but 19 targets"),
        (
            bad_set(train_x=NUMBERS.train_x * np.float32(np.nan)),
            r"training inputs: 100 values are NaN",
        ),
        (
            bad_set(train_y=NAN),
            r"training targets: 1 values are NaN or infinite, the first at index \(3,\)",
        ),
        (bad_set(test_x=NUMBERS.test_x[:, :3]), r"only their lengths may differ"),
        (
            bad_set(test_x=NUMBERS.test_x[:0], test_y=NUMBERS.test_y[:0]),
            r"at least one test example",
        ),
        (bad_set(train_user=np.zeros(3, np.int64)), r"users must name the user of each"),
        (
            bad_set(clients=Partition(np.array([0, 25], np.int32), np.array([0, 2]))),
            r"names samples outside",
        ),
        (
            bad_set(clients=Partition(np.array([1, 1], np.int32), np.array([0, 1, 2]))),
            r"name each sample once, for one client",
        ),
        (table(clients=[[0, 1], [], [2], []]), r"2 of 4 clients have no examples: 1, 3"),
        (table(clients=[[], []]), r"none of them has an example"),
        (table, r"loading it twice gives different arrays"),
        ({"train": table()["train"]}, r"key 'test' is missing"),
    ],
)
def test_data_are_checked(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        check_data(data, "regression")
    assert "\n" not in str(caught.value)


class Flawed(tasks.Regression):
    def __init__(self, flaw: str) -> None:
        super().__init__()
        self.flaw = flaw

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = super().losses(outputs, targets)
        if self.flaw == "inplace":
            targets.zero_()
        return {"scalar": losses.mean(), "mixed": losses - losses.mean()}.get(self.flaw, losses)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = super().losses(outputs, targets)
        return losses.sum() if self.flaw == "sum" else self.losses(outputs, targets).mean()

    def gradient_operations(self, outputs: Tensor, targets: Tensor, gradient: Tensor) -> Any:
        return (
            []
            if self.flaw == "gradient"
            else super().gradient_operations(outputs, targets, gradient)
        )

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        sums = super().sums(outputs, targets)
        return (
            {name: value / len(targets) for name, value in sums.items()}
            if self.flaw == "means"
            else sums
        )

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        return {} if self.flaw == "metrics" else super().metrics(means)


class Joined(tasks.Regression):
    """Its targets depend on whether there are other rows, which halves of the data do not show."""

    def targets(self, y: np.ndarray, part: str) -> np.ndarray:
        return super().targets(y, part) - (len(y) > 1)


def test_targets_of_a_task_are_prepared_one_row_at_a_time_as_in_a_run() -> None:
    with pytest.raises(
        ConfigError, match=r"prepares an example by means of other training examples"
    ):
        check_data(table(), Joined())
    with pytest.raises(
        ConfigError, match=r"prepares an example by means of other training examples"
    ):
        check_model(nn.Linear(5, 1), table(), Joined())


@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ("", None),
        ("scalar", r"losses must have shape \(4,\), one per example"),
        ("mixed", r"depends on the other examples"),
        ("sum", r"loss must be the mean of losses"),
        ("gradient", r"do not write the gradient"),
        ("metrics", r"need a finite 'loss'"),
        (
            "means",
            r"metric 'loss' is .* over one batch and .* over two batches of the same examples: `sums` must return sums",
        ),
        ("inplace", r"losses change the outputs or targets"),
    ],
)
def test_tasks_are_checked(flaw: str, message: str | None) -> None:
    outputs, targets = torch.arange(4.0), torch.tensor([1.0, 0, 2, 5])
    if message is None:
        check_task(Flawed(flaw), outputs, targets)
        return
    with pytest.raises(ConfigError, match=message):
        check_task(Flawed(flaw), outputs, targets)


def test_the_kit_names_unknown_things() -> None:
    with pytest.raises(FedlgmError, match="unknown data set"):
        check_data("nothing")
    assert load(PROSE).train_x is PROSE.train_x
