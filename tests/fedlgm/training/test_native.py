"""The compiled kernel: gradients of autograd, steps of torch's optimizers, equal bits on every
instruction set."""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedlgm.errors import ConfigError, DataError
from fedlgm.planning.layers import LayerTable
from fedlgm.training import (
    ClientTask,
    FedProx,
    LocalTraining,
    NativeTrainer,
    SequentialTrainer,
    models,
)
from fedlgm.training.native import Program, instruction_set, library
from fedlgm.training.native import trainer as module_of_trainer
from fedlgm.training.tasks import Binary, Classification, Ranked, Regression, Task

BUNDLED = [
    ("cnn", (1, 28, 28)),
    ("cifar-cnn", (3, 16, 16)),
    ("cnn-small", (3, 20, 20)),
    ("d-cnn", (3, 8, 8)),
]
BUNDLED += [("mlp", (1, 8, 8)), ("logistic", (5,))]
ACTIVATIONS = (nn.Sigmoid, nn.Tanh, nn.ReLU)

# FEDLGM_TEST_KERNEL names a kernel that was compiled by hand, such as one with sanitizers.
HERE = os.environ.get("FEDLGM_TEST_KERNEL")


@pytest.fixture(autouse=True)
def another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one compiled by hand, or the portable one where PyTorch does without AVX2; its bits are
    the same."""
    if HERE:
        made = ctypes.CDLL(HERE)
        library.declare(made)
        monkeypatch.setattr(module_of_trainer, "library", lambda: made)
    elif instruction_set() is None:
        monkeypatch.setattr(module_of_trainer, "library", lambda: library.build("portable"))


def trainer(
    module: nn.Module, task: Task | None = None, **options: object
) -> tuple[NativeTrainer, Tensor]:
    layers = LayerTable.from_module(module)
    return NativeTrainer(module, layers, LocalTraining(**options), task=task), layers.flatten(
        module
    )  # type: ignore[arg-type]


def by_autograd(module: nn.Module, x: Tensor, y: Tensor, loss: Callable[..., Tensor]) -> Tensor:
    """Gradient in the module's own precision, as float64."""
    found = torch.autograd.grad(loss(module(x), y), list(module.parameters()))
    return torch.cat([gradient.flatten() for gradient in found]).double()


def agree(module: nn.Module, x: Tensor, y: Tensor, task: Task | None = None) -> None:
    native, model = trainer(module, task)
    loss = (task or Classification()).loss
    found, rounded = native.gradient(model, x, y).double(), by_autograd(module, x, y, loss)
    exact = by_autograd(
        module.double(), x.double(), y if y.dtype == torch.int64 else y.double(), loss
    )
    # Sums of some hundred terms in single precision. Errors are larger, those of autograd as well,
    # where a gradient cancels or two values in a pool are nearly equal.
    assert (found - exact).norm() < max(5e-6 * exact.norm(), 2 * (rounded - exact).norm())


def data(examples: int, *shape: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(examples)
    return torch.randn(examples, *shape, generator=generator), torch.arange(examples) % classes


@pytest.mark.parametrize(("name", "shape"), BUNDLED)
def test_bundled_models_have_autograds_gradient(name: str, shape: tuple[int, ...]) -> None:
    agree(models.build(name, in_shape=shape, classes=10, seed=1), *data(7, *shape, classes=10))


@settings(max_examples=40)
@given(
    channels=st.tuples(
        st.integers(1, 4), st.sampled_from([1, 5, 16, 19, 35]), st.sampled_from([2, 16, 33])
    ),
    kernels=st.tuples(*[st.tuples(st.integers(1, 5), st.integers(1, 5))] * 2),
    strides=st.tuples(*[st.tuples(st.integers(1, 2), st.integers(1, 2))] * 2),
    paddings=st.tuples(*[st.tuples(st.integers(0, 2), st.integers(0, 2))] * 2),
    activation=st.sampled_from(ACTIVATIONS),
    bias=st.booleans(),
    pool=st.sampled_from(
        [
            nn.MaxPool2d(2),
            nn.MaxPool2d(2, stride=1),
            nn.MaxPool2d((3, 2), (2, 1), ceil_mode=True),
            nn.AvgPool2d(2),
            nn.AvgPool2d(2, ceil_mode=True),
            nn.AvgPool2d((1, 3), 2, ceil_mode=True),
        ]
    ),
    examples=st.integers(1, 6),
)
def test_any_stack_has_autograds_gradient(
    channels: tuple[int, ...],
    kernels: tuple[tuple[int, int], ...],
    strides: tuple[tuple[int, int], ...],
    paddings: tuple[tuple[int, int], ...],
    activation: type[nn.Module],
    bias: bool,
    pool: nn.Module,
    examples: int,
) -> None:
    convolutions = [
        nn.Conv2d(channels[i], channels[i + 1], kernels[i], strides[i], paddings[i], bias=bias)
        for i in range(2)
    ]
    features = [convolutions[0], nn.Tanh(), pool, convolutions[1], activation(), nn.Flatten()]
    x, y = data(examples, channels[0], 25, 27)
    with torch.no_grad():
        wide = nn.Sequential(*features)(x).shape[1]
    agree(
        nn.Sequential(*features, nn.Linear(wide, 18, bias=bias), activation(), nn.Linear(18, 3)),
        x,
        y,
    )


@pytest.mark.parametrize("stride", [1, 2, (2, 1)])
@pytest.mark.parametrize("channels", [3, 16, 35])
def test_the_first_of_equal_values_in_a_pool_has_the_gradient(channels: int, stride: Any) -> None:
    """Whole numbers, whose sums are exact, so that most windows have several largest values."""
    features = nn.Conv2d(1, channels, 2), nn.MaxPool2d(2, stride=stride)
    x, y = data(5, 1, 8, 9)
    x = x.round()
    with torch.no_grad():
        features[0].weight.copy_(features[0].weight.sign())
        features[0].bias.zero_()
        wide = nn.Sequential(*features)(x)[0].numel()
        inside = features[0](x)
    assert (inside[..., 1:] == inside[..., :-1]).float().mean() > 0.05
    agree(nn.Sequential(*features, nn.Flatten(), nn.Linear(wide, 3)), x, y)


@given(activation=st.sampled_from(ACTIVATIONS), targets=st.integers(1, 20))
@settings(max_examples=10)
def test_squared_losses_have_autograds_gradient(activation: type[nn.Module], targets: int) -> None:
    x = data(5, 6)[0]
    agree(
        nn.Sequential(nn.Linear(6, 7), activation(), nn.Linear(7, targets)),
        x,
        torch.randn(5, targets),
        Regression(),
    )


@given(labels=st.integers(1, 20))
@settings(max_examples=10)
def test_losses_of_binary_labels_have_autograds_gradient(labels: int) -> None:
    x, y = data(5, 6)[0], (torch.arange(5 * labels).view(5, labels) % 3 == 0).float()
    agree(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, labels)), x, y, Binary())
    agree(
        nn.Sequential(nn.Linear(6, labels)), 300 * x, y, Binary()
    )  # most probabilities are 0 or 1
    agree(nn.Sequential(nn.Linear(6, 1)), x, y[:, 0], Ranked())


def test_other_ways_to_stack_have_autograds_gradient() -> None:
    x, y = data(4, 2, 6, 6)
    agree(nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3)), x, y)
    agree(nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(72, 3)), x, y)
    agree(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten()), x, y)
    agree(
        nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(4, 3),
        ),
        x,
        y,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.3},
        {"lr": 0.2, "momentum": 0.9},
        {"optimizer": "adam", "lr": 0.01},
        {"lr": 0.5, "gradient_clip": 0.05},
        {"optimizer": "adam", "lr": 0.01, "gradient_clip": 0.05},
    ],
)
def test_clients_are_trained_as_the_reference_trains_them(options: dict[str, object]) -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3))
    native, model = trainer(module, batch_size=4, **options)
    layers = LayerTable.from_module(module)
    reference = SequentialTrainer(module, layers, LocalTraining(batch_size=4, **options))  # type: ignore[arg-type]
    clients = [data(n, 1, 8, 8) for n in (1, 9, 4)]

    def updates(of: NativeTrainer | SequentialTrainer) -> Tensor:
        tasks = [
            ClientTask(x, y, torch.Generator().manual_seed(i), 3)
            for i, (x, y) in enumerate(clients)
        ]
        return torch.cat([update.clone() for update in of.updates(model, tasks)])

    ours, theirs = updates(native), updates(reference)
    # Adam divides by the size of a gradient, so that rounding of the smallest ones counts a hundred
    # times as much.
    assert (ours - theirs).norm() / theirs.norm() < (
        1e-3 if options.get("optimizer") == "adam" else 1e-5
    )
    assert torch.equal(ours, updates(native))  # also after other clients


def test_every_instruction_set_gives_the_same_bits() -> None:
    """`build` compares each with the known answer; here on other shapes."""
    sets = {"avx512": ("avx2", "avx512"), "avx2": ("portable", "avx2"), None: ("portable",)}[
        instruction_set()
    ]
    module = models.build("cnn", in_shape=(1, 28, 28), classes=10, seed=1)
    layers, (x, y) = LayerTable.from_module(module), data(9, 1, 28, 28, classes=10)
    found = []
    for name in sets:
        made = NativeTrainer(module, layers, LocalTraining(optimizer="adam", lr=0.01, batch_size=4))
        made._library = library.build(name)
        task = ClientTask(x, y, torch.Generator().manual_seed(1), 2)
        found.append(next(made.updates(layers.flatten(module), [task])).clone())
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_inputs_that_are_no_numbers_reach_the_update_as_with_torch(
    value: float, activation: type[nn.Module]
) -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        activation(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 4),
        nn.Linear(4, 3),
    )
    native, model = trainer(module)
    reference = SequentialTrainer(module, LayerTable.from_module(module), LocalTraining())
    x, y = data(4, 1, 6, 6)
    x[1, 0, 2, 3] = value

    def finite(of: NativeTrainer | SequentialTrainer) -> bool:
        return bool(
            next(of.updates(model, [ClientTask(x, y, torch.Generator().manual_seed(1), 1)]))
            .isfinite()
            .all()
        )

    assert finite(native) == finite(reference)
    x[1, 0, 2, 3] = 0.0
    assert finite(native)  # nothing of it stays in the working memory


UNKNOWN = [
    (nn.Sequential(nn.Linear(4, 3), nn.GELU()), (4,), "GELU"),
    (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Sigmoid()), (4,), "two activations in a row"),
    (nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten()), (2, 3, 3), "groups=2"),
    (nn.Sequential(nn.Conv2d(2, 2, 3, padding="same"), nn.Flatten()), (2, 3, 3), "same"),
    (
        nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), nn.Flatten()),
        (2, 3, 3),
        "circular",
    ),
    (nn.Sequential(nn.Conv2d(1, 2, 5), nn.Flatten()), (1, 3, 3), "leave nothing"),
    (nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten()), (1, 3, 3), "outputs are images"),
    (
        nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2, padding=1), nn.Flatten()),
        (1, 3, 3),
        "padding=1",
    ),
    (nn.Sequential(nn.Linear(4, 3)), (5,), "in_features=4"),
    (nn.Sequential(nn.Linear(4, 3)), (2, 4), "inputs of shape"),
    (nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2)), (4,), "Dropout"),
    (nn.Sequential(nn.Sequential(nn.Linear(4, 4))), (4,), "layer '0'"),
    (nn.Sequential(nn.Flatten(), nn.Tanh()), (4,), "other parameters than the layer table"),
    (nn.Linear(4, 3), (4,), "sequences"),
    (nn.Sequential(nn.Linear(4, 3)), ((4,), (3,)), "several inputs"),
]


@pytest.mark.parametrize(("module", "shape", "words"), UNKNOWN)
def test_what_the_kernel_does_not_know_is_refused(
    module: nn.Module, shape: tuple[int, ...], words: str
) -> None:
    layers = (
        LayerTable.from_module(module)
        if list(module.parameters())
        else LayerTable.from_sizes({"a": 1})
    )
    with pytest.raises(ConfigError, match=words):
        Program.of(module, layers, shape, Classification())


def test_other_losses_hooks_and_frozen_parameters_are_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    layers = LayerTable.from_module(module)
    with pytest.raises(ConfigError, match="the loss of task"):
        Program.of(module, layers, (4,), Regression("huber"))
    hook = module[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="have hooks"):
        Program.of(module, layers, (4,), Classification())
    hook.remove()
    module[0].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="or frozen or shared"):
        Program.of(module, LayerTable.from_module(module), (4,), Classification())


@pytest.mark.parametrize(
    ("x", "y", "error"),
    [
        (torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64), ConfigError),  # another shape
        (torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.int64), ConfigError),
        (torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64), ConfigError),
        (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), ConfigError),
        (torch.zeros(3, 4), torch.tensor([0, 1, 2]), DataError),  # two outputs
        (torch.zeros(3, 4), torch.tensor([0, 1, -1]), DataError),
        (torch.zeros(3, 4), torch.zeros(3), DataError),
        (torch.zeros(3, 4), torch.zeros(3, 1, dtype=torch.int64), DataError),
        ((torch.zeros(3, 4),), torch.zeros(3, dtype=torch.int64), ConfigError),
    ],
)
def test_wrong_data_never_reach_the_kernel(x: Tensor, y: Tensor, error: type[Exception]) -> None:
    native, model = trainer(nn.Sequential(nn.Linear(4, 2)))
    with pytest.raises(error):
        native.gradient(model, x, y)
    with pytest.raises(ConfigError, match="has 11 parameters, but its layer table has 10"):
        next(native.updates(torch.zeros(11), []))


def test_slices_and_other_strides_are_read_as_what_they_are() -> None:
    native, model = trainer(nn.Sequential(nn.Linear(4, 2)))
    x, y = data(6, 4, classes=2)
    wide = torch.stack([x, x + 1], dim=-1)
    assert torch.equal(native.gradient(model, wide[..., 0], y), native.gradient(model, x, y))
    assert torch.equal(
        native.gradient(torch.stack([model, model], 1)[:, 0], x, y), native.gradient(model, x, y)
    )


def test_threads_train_side_by_side() -> None:
    """Two trainers share nothing: the kernel keeps no state, and ctypes lets go of the
    interpreter's lock."""
    x, y = data(40, 1, 28, 28, classes=10)
    found: dict[int, Tensor] = {}
    made = [
        trainer(models.build("cnn", in_shape=(1, 28, 28), classes=10, seed=1)) for _ in range(3)
    ]

    def work(i: int) -> None:
        native, model = made[i]
        tasks = [ClientTask(x, y, torch.Generator().manual_seed(1), 2) for _ in range(3)]
        found[i] = torch.cat([update.clone() for update in native.updates(model, tasks)])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[0][:1].expand(3, -1), found[i]) for i in range(3))


def test_only_the_plain_trainer_has_a_native_form() -> None:
    from fedlgm.training import kinds

    assert kinds.get().native is NativeTrainer
    assert kinds.get("fedprox").native is None
    assert kinds.get(FedProx).native is None


def test_other_devices_are_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 2))
    with pytest.raises(ConfigError, match="trains on the CPU"):
        NativeTrainer(module, LayerTable.from_module(module), LocalTraining(), device="meta")
