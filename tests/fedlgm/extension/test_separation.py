"""What copies of a user's parts share and could keep state is a condition of the guarantee."""

from __future__ import annotations

import re
import threading
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import simulations
from fedlgm import Guarantee, RunFacts, Sampling, Task
from fedlgm.data import DataSet
from fedlgm.extension.restored import Restored, fresh
from fedlgm.extension.separation import keeps_nothing, shared_state
from fedlgm.privacy.conditions import in_a_run
from fedlgm.training import SequentialTrainer, VectorizedTrainer, kinds, models, tasks
from tests.support.own_objects import DATA, SMALL, Net

seen: list[int] = []


class InAModule(Net):
    """Keeps state in a global of its module."""

    def forward(self, x: Tensor) -> Tensor:
        seen.append(len(x))
        return super().forward(x * min(len(seen), 1))


class Data(Net):
    """Writes a buffer where no version counter shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.add_(0.0)
        return super().forward(x * self.scale)


class Locked(Task):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        with self.lock:
            return cross_entropy(outputs, targets, reduction="none")


class Copying(Net):
    def __deepcopy__(self, memo: Any) -> Copying:
        made = Copying()
        made.load_state_dict(self.state_dict())
        return made


def numpys(outputs: Tensor, targets: Tensor) -> Tensor:
    import numpy as np

    return cross_entropy(outputs, targets, reduction="none") * (1 + 0 * np.random.random())  # noqa: NPY002


HOLDER = SimpleNamespace(count=1)


def holds(outputs: Tensor, targets: Tensor) -> Tensor:
    holder = HOLDER
    holder.count = 1
    return cross_entropy(outputs, targets, reduction="none")


class Named(Net):
    """Writes a name that Python fills in, of a class that its copies share."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = Signs

    def forward(self, x: Tensor) -> Tensor:
        self.kind.__doc__ = str(len(x))
        return super().forward(x)


def annotated(outputs: Tensor, targets: Tensor) -> Tensor:
    annotated.__annotations__["seen"] = len(outputs)
    return cross_entropy(outputs, targets, reduction="none")


class Weakly(Net):
    """Refers to a value that no deep copy copies."""

    def __init__(self) -> None:
        super().__init__()
        self.holder = weakref.ref(by_import)


def by_local_name(outputs: Tensor, targets: Tensor) -> Tensor:
    library = torch
    library.seen_by_tests = len(outputs)  # type: ignore[attr-defined]
    return cross_entropy(outputs, targets, reduction="none")


def by_setting(outputs: Tensor, targets: Tensor) -> Tensor:
    torch.set_printoptions(precision=len(outputs))
    return cross_entropy(outputs, targets, reduction="none")


def by_import(outputs: Tensor, targets: Tensor) -> Tensor:
    from torch import nn as library

    library.seen_by_tests = len(outputs)  # type: ignore[attr-defined]
    return cross_entropy(outputs, targets, reduction="none")


class Keeps:
    """Keeps state when it is made."""

    def __init__(self) -> None:
        seen.append(1)

    @classmethod
    def another(cls) -> Keeps:
        return cls()


class MakesAHeldClass(Net):
    kinds: tuple[Any, ...] = (Keeps,)

    def forward(self, x: Tensor) -> Tensor:
        self.kinds[0]()
        return super().forward(x)


class MakesAnother(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Keeps()

    def forward(self, x: Tensor) -> Tensor:
        self.kept.another()
        return super().forward(x)


class MakesAgain(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept = SimpleNamespace(part=self.layers[1])

    def forward(self, x: Tensor) -> Tensor:
        self.kept.__init__(part=self.layers[1])  # type: ignore[misc]
        return super().forward(x)


class Slotted(Task):
    __slots__ = ("kept",)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.kept = outputs.detach()
        return cross_entropy(outputs, targets, reduction="none")


class Again(Task):
    def __init__(self) -> None:
        seen.append(1)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, reduction="none") if type(self)() else outputs


class Vectorised(VectorizedTrainer):
    pass


@torch.library.custom_op("fedlgm_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


doubled.register_autograd(lambda context, gradient: 2 * gradient)
DOUBLED = torch.ops.fedlgm_tests.doubled


class ByOperation(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.fedlgm_tests.doubled(super().forward(x))


class ByNamedOperation(Net):
    def forward(self, x: Tensor) -> Tensor:
        return DOUBLED(super().forward(x))


class ByKnownOperation(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.mul(super().forward(x), 2.0)


class Twice(torch.autograd.Function):
    """An operation with its own rule for vmap, which gets the whole batch."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return 2 * x, dims[0]


class ByRule(Net):
    def forward(self, x: Tensor) -> Tensor:
        return Twice.apply(super().forward(x))


@pytest.fixture(autouse=True)
def _own_trainer() -> None:
    """Each test's own: workers of other tests cannot import this module."""
    kinds.register("tests-own-vectorised", SequentialTrainer, Vectorised)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"model": InAModule}, "all copies share 'seen' of InAModule.forward, a list"),
        ({"model": Data}, r"Data.forward uses .data"),
        ({"model": Copying()}, "Copying has its own __deepcopy__"),
        ({"task": Locked()}, "all copies share lock|lock.* is|cannot be copied"),
        ({"task": holds}, "all copies share 'HOLDER' of holds, a SimpleNamespace"),
        ({"task": Slotted}, "Slotted has slots"),
        ({"model": MakesAHeldClass}, "all copies share 'seen' of Keeps.__init__, a list"),
        ({"model": MakesAnother}, "all copies share 'seen' of Keeps.__init__, a list"),
        ({"model": MakesAgain}, "MakesAgain.forward uses .__init__"),
        ({"model": Named}, "Named.forward uses .__doc__"),
        ({"task": annotated}, "annotated uses .__annotations__"),
        ({"model": Weakly}, "holder is a weak reference"),
        ({"task": by_local_name}, "by_local_name writes an attribute of 'torch'"),
        ({"task": by_setting}, "by_setting uses .set_printoptions"),
        ({"task": by_import}, "by_import writes an attribute of 'torch'"),
        ({"task": Again}, "all copies share 'seen' of Again.__init__, a list"),
        ({"task": numpys}, "numpys uses .random"),
        ({"model": ByOperation}, "ByOperation.forward uses .ops, of which an operation was not"),
        ({"model": ByNamedOperation}, "'DOUBLED' of ByNamedOperation.forward is an operation"),
        (
            {"model": ByRule, "overrides": ["training.vectorize=on"]},
            "Twice has its own rule for vmap, which could join clients",
        ),
        (
            {"trainer": "tests-own-vectorised", "overrides": ["training.vectorize=on"]},
            "'tests-own-vectorised' trains several clients in one call",
        ),
    ],
)
def test_what_cannot_be_restored_is_a_condition_of_the_guarantee(
    given: Any, why: str, tmp_path: Path
) -> None:
    changes = [*SMALL, "federation.rounds=1", *given.pop("overrides", ())]
    given = {"model": Net, "data": DATA, "overrides": changes, "run_dir": tmp_path / "run"} | given
    if isinstance(given.get("trainer"), str):
        given["overrides"] += [f"trainer.name={given.pop('trainer')}"]
    result = simulations.simulate(**given)
    assert result.guarantee.startswith("conditional")
    assert re.search(f"tested on public examples\\): .*({why})", result.guarantee)


@pytest.mark.parametrize("model", [ByKnownOperation, ByRule])
def test_known_operations_and_rules_that_do_not_run_are_no_condition(
    model: type[nn.Module], tmp_path: Path
) -> None:
    run = partial(simulations.simulate, data=DATA, overrides=[*SMALL, "federation.rounds=1"])
    assert run(model=model, run_dir=tmp_path / "run").guarantee.startswith("proven")


class Signs(Task):
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, reduction="none")

    def targets(self, y: Any, part: str) -> Any:
        return 1 - y


class Whole(Signs):
    def prepare(self, data: DataSet) -> DataSet:
        return super().prepare(data)


def test_a_task_that_prepares_the_whole_set_is_a_condition_and_targets_are_made_row_by_row(
    tmp_path: Path,
) -> None:
    run = partial(simulations.simulate, model=Net, data=DATA, overrides=SMALL)
    assert run(task=Signs, run_dir=tmp_path / "rows").guarantee.startswith("proven")
    result = run(task=Whole, run_dir=tmp_path / "whole")
    assert "preparing every example from that example alone (tested" in result.guarantee


def test_hooks_of_all_modules_are_a_condition() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert shared_state(Net()) == "PyTorch has hooks of all modules"
    finally:
        handle.remove()


def test_parts_of_this_package_are_known_by_their_type() -> None:
    for name, shape in (
        ("mlp", (4,)),
        ("cnn-small", (1, 28, 28)),
        ("resnet20", (3, 32, 32)),
        ("transformer", (8,)),
    ):
        module = models.build(name, in_shape=shape, classes=10)
        assert keeps_nothing(module)
        assert Restored.of(module, tasks.get()) is None
    for name in tasks.names():
        options = {"breaks": (1.0, 2.0)} if name == "hazards" else {}
        assert keeps_nothing(tasks.get(name, **options))
    own = nn.Sequential(nn.Linear(2, 2))
    own[0].register_forward_hook(lambda *_: None)
    assert not keeps_nothing(own)
    assert not keeps_nothing(tasks.get(lambda outputs, targets: outputs))
    plain = SimpleNamespace(value=[1])
    assert fresh(plain) is not plain


def test_a_second_condition_is_stated_too() -> None:
    facts = RunFacts(1.0, Sampling("fixed", 100, 0.1), "replace-one")
    first = in_a_run(Guarantee("proven", "bounded"), facts, "gaussian")
    second = first.conditional_on("rows are public")
    assert second.reason.endswith("rows are public")
    assert in_a_run(second, facts, "gaussian") == second == second.conditional_on("rows are public")


def test_a_guarantee_whose_reason_names_the_condition_is_conditional_too() -> None:
    """A mechanism words its own reason, which must not decide about the status."""
    stated = Guarantee("proven", "rows are public, then noised")
    assert stated.conditional_on("rows are public") == replace(stated, status="conditional")


def test_weak_references_of_pytorch_are_no_condition() -> None:
    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(2, 2)
            self.handle = self.gru.register_forward_hook(lambda *_: None)

    assert shared_state(Recurrent()) is None
