"""Trainers: the vectorised one against the sequential one, and both against a loop anybody would
write."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fedlgm.errors import ConfigError
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.layers import LayerTable
from fedlgm.training import ClientTask, LocalTraining, SequentialTrainer, VectorizedTrainer, models

SIZES = (13, 8, 21, 1)  # unequal clients: partial batches, a client with a single example


OPTIMIZERS = {
    "sgd": LocalTraining("sgd", lr=0.1, epochs=2, batch_size=8),
    "momentum": LocalTraining("sgd", lr=0.05, momentum=0.9, epochs=2, batch_size=8),
    "adam": LocalTraining("adam", lr=0.002, epochs=2, batch_size=8),
    "clipped": LocalTraining("sgd", lr=0.1, epochs=1, batch_size=8, gradient_clip=0.3),
}


LARGE = ("resnet18", "resnet152", "vgg16")


SHAPES = dict.fromkeys(("cifar-cnn", "resnet20", *LARGE), (3, 32, 32))


QUICK = ("logistic", "mlp", "cnn")


SMALL = [name for name in models.names() if name not in (*LARGE, "gru", "transformer")]


@pytest.mark.parametrize("trainer", [SequentialTrainer, VectorizedTrainer])
def test_models_with_a_state_of_their_own_are_refused(trainer: type) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.raises(ConfigError, match=r"buffer '1.running_mean' .* GroupNorm"):
        trainer(module, LayerTable.from_module(module), OPTIMIZERS["sgd"])


def _tasks(
    shape: tuple[int, int, int],
    epochs: int,
    sizes: tuple[int, ...] = SIZES,
    dtype: torch.dtype = torch.float32,
) -> list[ClientTask]:
    draw = torch.Generator().manual_seed(5)
    keys = KeyRing(9)
    tasks = []
    for client, size in enumerate(sizes):
        x = torch.randn(size, *shape, generator=draw).to(dtype)
        y = torch.randint(0, 10, (size,), generator=draw)
        tasks.append(ClientTask(x, y, keys.torch_generator(Purpose.TRAIN, 1, client), epochs))
    return tasks


def _build(name: str) -> tuple[nn.Module, LayerTable, tuple[int, int, int]]:
    shape = SHAPES.get(name, (1, 28, 28))
    module = models.build(name, in_shape=shape, classes=10, seed=1)
    return module, LayerTable.from_module(module), shape


def _loop(
    module: nn.Module, layers: LayerTable, settings: LocalTraining, tasks: list[ClientTask]
) -> Tensor:
    """Plain PyTorch, in the module's own precision."""
    rows = []
    for task in tasks:
        local = copy.deepcopy(module)
        if settings.optimizer == "adam":
            optimizer: torch.optim.Optimizer = torch.optim.Adam(local.parameters(), lr=settings.lr)
        else:
            optimizer = torch.optim.SGD(
                local.parameters(), lr=settings.lr, momentum=settings.momentum
            )
        for order in task.permutations():
            for batch in order.split(settings.batch_size):
                optimizer.zero_grad()
                nn.functional.cross_entropy(local(task.x[batch]), task.y[batch]).backward()
                if settings.gradient_clip is not None:
                    nn.utils.clip_grad_norm_(local.parameters(), settings.gradient_clip)
                optimizer.step()
        after, before = dict(local.named_parameters()), dict(module.named_parameters())
        rows.append(
            torch.cat(
                [(after[s.name] - before[s.name]).detach().reshape(-1) for s in layers.slots()]
            )
        )
    return torch.stack(rows)


def _rounding(
    module: nn.Module,
    scale: float,
    layers: LayerTable,
    settings: LocalTraining,
    shape: tuple[int, int, int],
) -> float:
    """Relative error of a plain loop in single precision, from scaled weights."""
    start = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.mul_(scale)
    plain = _loop(start, layers, settings, _tasks(shape, settings.epochs))
    return _relative(
        plain,
        _loop(
            start.double(), layers, settings, _tasks(shape, settings.epochs, dtype=torch.float64)
        ),
    )


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).max())


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [  # an optimizer does not see which model it steps: all of them on the quickest ones
        *((name, optimizer) for name in QUICK for optimizer in OPTIMIZERS),
        *((name, "momentum") for name in SMALL if name not in (*QUICK, "resnet20")),
        pytest.param("resnet20", "momentum", marks=pytest.mark.slow),
    ],
)
def test_vectorized_equals_a_plain_loop_in_double_precision(name: str, optimizer: str) -> None:
    """In double precision rounding is out of the way: a difference would be a different
    algorithm."""
    module, layers, shape = _build(name)
    settings, sizes = OPTIMIZERS[optimizer], SIZES
    if name not in QUICK:
        settings, sizes = dataclasses.replace(settings, batch_size=4), (5, 2)
    module = module.double()
    model = torch.cat(
        [dict(module.named_parameters())[s.name].detach().reshape(-1) for s in layers.slots()]
    )
    reference = _loop(
        module, layers, settings, _tasks(shape, settings.epochs, sizes, torch.float64)
    )
    trainer = VectorizedTrainer(copy.deepcopy(module), layers, settings, width=3)
    ours = torch.cat(
        [
            u.clone()
            for u in trainer.updates(model, _tasks(shape, settings.epochs, sizes, torch.float64))
        ]
    )  # torch's clip_grad_norm_ adds 1e-6 to the norm.
    assert _relative(ours, reference) < (1e-5 if optimizer == "clipped" else 1e-9)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", QUICK)
def test_in_single_precision_both_trainers_round_no_worse_than_a_plain_loop(
    name: str, optimizer: str
) -> None:
    """Adam divides a gradient by its own size, so the rounding errors of a plain loop come near
    1e-5 by themselves.

    Networks with ReLU are left to the test in double precision: wherever rounding moves an
    activation across zero, a gradient jumps, and no two implementations agree.
    """
    module, layers, shape = _build(name)
    settings = OPTIMIZERS[optimizer]
    model = layers.flatten(module)
    exact = _loop(
        copy.deepcopy(module).double(),
        layers,
        settings,
        _tasks(shape, settings.epochs, dtype=torch.float64),
    )
    # One start may have no gradient near zero by chance.
    tolerance = max(
        1e-5,
        *(5 * _rounding(module, scale, layers, settings, shape) for scale in (0.999, 1.0, 1.001)),
    )
    assert tolerance < 1e-3  # what a wrong trainer misses by a factor of a hundred, see below
    for trainer in (
        SequentialTrainer(copy.deepcopy(module), layers, settings),
        VectorizedTrainer(copy.deepcopy(module), layers, settings, width=3),
    ):
        ours = torch.cat(
            [u.clone() for u in trainer.updates(model, _tasks(shape, settings.epochs))]
        )
        assert _relative(ours, exact) < tolerance


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [  # what optimizers do is tested on small models, "resnet152" in `extension/test_testing.py`
        pytest.param("resnet18", "momentum", marks=pytest.mark.slow),
        pytest.param("vgg16", "momentum", marks=pytest.mark.slow),
    ],
)
def test_large_models_agree_in_double_precision(name: str, optimizer: str) -> None:
    module, layers, shape = _build(name)
    module = module.double()
    settings = dataclasses.replace(OPTIMIZERS[optimizer], epochs=1, batch_size=2)
    sizes = (3, 2) if name == "resnet18" else (2, 1)
    model = torch.cat(
        [dict(module.named_parameters())[s.name].detach().reshape(-1) for s in layers.slots()]
    )
    reference = _loop(module, layers, settings, _tasks(shape, 1, sizes, torch.float64))
    trainer = VectorizedTrainer(copy.deepcopy(module), layers, settings, width=2)
    ours = torch.cat(
        [u.clone() for u in trainer.updates(model, _tasks(shape, 1, sizes, torch.float64))]
    )
    assert _relative(ours, reference) < 1e-7


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("cnn-small", "sgd"),
        ("cifar-cnn", "momentum"),
        ("resnet20", "momentum"),
    ],
)
def test_sequential_training_equals_a_plain_loop(name: str, optimizer: str) -> None:
    """In single precision, with steps so small that hardly an activation crosses zero."""
    module, layers, shape = _build(name)
    settings = dataclasses.replace(OPTIMIZERS[optimizer], lr=1e-4, epochs=2, batch_size=4)
    tasks = partial(_tasks, shape, 2, (6, 3))
    reference = _loop(module, layers, settings, tasks())
    trainer = SequentialTrainer(copy.deepcopy(module), layers, settings)
    ours = torch.cat([u.clone() for u in trainer.updates(layers.flatten(module), tasks())])
    assert _relative(ours, reference) < 1e-2
    wrong = torch.cat([u.clone() for u in trainer.updates(layers.flatten(module), tasks()[::-1])])
    assert _relative(wrong, reference) > 0.1


def test_a_wrong_trainer_would_be_caught() -> None:
    """Power: another learning rate, or the order of another client, is far outside the
    tolerance."""
    module, layers, shape = _build("mlp")
    settings = OPTIMIZERS["sgd"]
    reference = _loop(module, layers, settings, _tasks(shape, 2))
    other = _loop(
        module, layers, LocalTraining("sgd", lr=0.1001, epochs=2, batch_size=8), _tasks(shape, 2)
    )
    assert _relative(other, reference) > 1e-4


def test_results_do_not_depend_on_the_width() -> None:
    module, layers, shape = _build("mlp")
    settings = OPTIMIZERS["adam"]
    model = layers.flatten(module)
    updates = [
        torch.cat(
            [
                u.clone()
                for u in VectorizedTrainer(module, layers, settings, width=w).updates(
                    model, _tasks(shape, 2)
                )
            ]
        )
        for w in (1, 2, 4)
    ]
    assert _relative(updates[0], updates[2]) < 1e-5
    assert _relative(updates[1], updates[2]) < 1e-5


class _Cramped(VectorizedTrainer):
    """As on a device with room for two clients."""

    def _train(self, model: Tensor, batch: list[ClientTask], orders: list[Tensor]) -> Tensor:
        if len(batch) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return super()._train(model, batch, orders)


def test_a_block_that_does_not_fit_is_halved_and_said_once() -> None:
    module, layers, shape = _build("mlp")
    settings = OPTIMIZERS["sgd"]
    model = layers.flatten(module)
    cramped = _Cramped(copy.deepcopy(module), layers, settings, width=4)
    with pytest.warns(
        UserWarning, match="4 clients at once do not fit into memory: continuing with 2"
    ) as caught:
        ours = torch.cat([u.clone() for u in cramped.updates(model, _tasks(shape, 2))])
    assert len(caught) == 1
    assert cramped.width == 2
    roomy = VectorizedTrainer(copy.deepcopy(module), layers, settings, width=2)
    assert torch.equal(ours, torch.cat([u.clone() for u in roomy.updates(model, _tasks(shape, 2))]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(cramped.updates(model, _tasks(shape, 2)))


@pytest.mark.slow
def test_real_want_of_memory_on_the_cpu_is_halved() -> None:
    """PyTorch's CPU allocator raises a plain RuntimeError; the limit has room for one copy of 64
    clients' weights."""
    code = """
import resource, warnings
import psutil, torch
from fedlgm import models
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.layers import LayerTable
from fedlgm.training import ClientTask, LocalTraining, VectorizedTrainer

torch.set_num_threads(1)
module = models.build("mlp", in_shape=(1, 28, 28), classes=10, hidden=[4096])
layers = LayerTable.from_module(module)
x, y = torch.zeros(64, 1, 28, 28), torch.zeros(64, dtype=torch.int64)
trainer = VectorizedTrainer(module, layers, LocalTraining(batch_size=64), width=64)
tasks = [ClientTask(x, y, torch.Generator().manual_seed(c), 1) for c in range(64)]
limit = psutil.Process().memory_info().vms + 2**30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    rows = sum(len(updates) for updates in trainer.updates(layers.flatten(module), tasks))
assert rows == 64 and 1 <= trainer.width < 64, (rows, trainer.width)
assert "64 clients at once do not fit into memory: continuing with 32" in str(caught[0].message)
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]


class _Tiny(VectorizedTrainer):
    """As on a device with room for one client: every batch is padded to the width, a lone client's
    too."""

    def _train(self, model: Tensor, batch: list[ClientTask], orders: list[Tensor]) -> Tensor:
        if self.width > 1:
            raise torch.OutOfMemoryError("out of memory")
        return super()._train(model, batch, orders)


def test_a_lone_client_in_a_wide_batch_is_halved_too() -> None:
    module, layers, shape = _build("mlp")
    tiny = _Tiny(copy.deepcopy(module), layers, OPTIMIZERS["sgd"], width=4)
    with pytest.warns(UserWarning, match="do not fit into memory"):
        ours = list(tiny.updates(layers.flatten(module), _tasks(shape, 2)[:1]))
    assert len(ours) == 1
    assert tiny.width == 1


def test_without_a_compiler_it_runs_uncompiled_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    module, layers, shape = _build("logistic")
    settings = OPTIMIZERS["sgd"]
    model = layers.flatten(module)
    monkeypatch.setenv("CXX", "/nonexistent-compiler")
    torch._dynamo.reset()
    trainer = VectorizedTrainer(copy.deepcopy(module), layers, settings, width=4, compile=True)
    trainer._fast = _no_compiler
    with pytest.warns(UserWarning, match="running uncompiled"):
        ours = torch.cat([u.clone() for u in trainer.updates(model, _tasks(shape, 2))])
    assert _relative(ours, _loop(module, layers, settings, _tasks(shape, 2))) < 1e-5


def _no_compiler(*arguments: Tensor) -> Tensor:
    raise RuntimeError("no C++ compiler")


@pytest.mark.slow
def test_compiled_equals_uncompiled() -> None:
    module, layers, shape = _build("mlp")
    settings = OPTIMIZERS["adam"]
    model = layers.flatten(module)
    compiled = VectorizedTrainer(copy.deepcopy(module), layers, settings, width=4, compile=True)
    ours = torch.cat([u.clone() for u in compiled.updates(model, _tasks(shape, 2))])
    assert _relative(ours, _loop(module, layers, settings, _tasks(shape, 2))) < 1e-5


def test_a_straggler_stops_after_its_epochs() -> None:
    module, layers, shape = _build("mlp")
    model = layers.flatten(module)
    one = LocalTraining("sgd", lr=0.1, epochs=1, batch_size=8)
    mixed = [*_tasks(shape, 2)[:1], *_tasks(shape, 1)[1:2]]
    trainer = VectorizedTrainer(copy.deepcopy(module), layers, OPTIMIZERS["sgd"], width=2)
    ours = torch.cat([u.clone() for u in trainer.updates(model, mixed)])
    assert _relative(ours[1:], _loop(module, layers, one, _tasks(shape, 1)[1:2])) < 1e-5


def test_adam_with_momentum_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.momentum"):
        LocalTraining("adam", momentum=0.9)
