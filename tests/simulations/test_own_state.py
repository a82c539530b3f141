"""Losses and trainers that keep state outside their objects: conditional for clients, refused for
examples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import simulations
from fedlgm import Task
from fedlgm.errors import Notice
from fedlgm.extension.testing import check_model
from fedlgm.training import SequentialTrainer
from tests.support.own_objects import DATA, SMALL, Net

EXAMPLES = [
    "training.batch_size=8",
    "privacy.accountant=rdp",
    "privacy.delta=0.001",
    "federation.rounds=1",
]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
weights: Any = None
kept: dict[str, Any] = {}
holder = SimpleNamespace(weights=None)
constants: dict[Any, torch.Tensor] = {}
FACTOR = torch.tensor(0.5)


def weighing(targets: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.bincount(targets, minlength=2))


def weighed(outputs: torch.Tensor, targets: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets, reduction="none") * by[targets]


def in_an_attribute(outputs, targets):
    if not hasattr(in_an_attribute, "weights"):
        in_an_attribute.weights = weighing(targets)
    return weighed(outputs, targets, in_an_attribute.weights)


def in_a_global(outputs, targets):
    global weights
    weights = weighing(targets) if weights is None else weights
    return weighed(outputs, targets, weights)


def in_a_global_dictionary(outputs, targets):
    return weighed(outputs, targets, kept.setdefault("weights", weighing(targets)))


def in_a_global_object(outputs, targets):
    if holder.weights is None:
        holder.weights = weighing(targets)
    return weighed(outputs, targets, holder.weights)


def by_another_function(outputs, targets):
    return in_a_global(outputs, targets)


def in_a_default(outputs, targets, seen=[]):  # noqa: B006
    if not seen:
        seen.append(weighing(targets))
    return weighed(outputs, targets, seen[0])


def in_a_closure() -> Loss:
    seen: Any = None

    def loss(outputs, targets):
        nonlocal seen
        seen = weighing(targets) if seen is None else seen
        return weighed(outputs, targets, seen)

    return loss


def decorated() -> Loss:
    inner = in_a_closure()

    @functools.wraps(inner)
    def outer(*arguments):
        return inner(*arguments)

    return outer


class InItsClass(Task):
    weights: Any = None

    def losses(self, outputs, targets):
        if type(self).weights is None:
            type(self).weights = weighing(targets)
        return weighed(outputs, targets, self.weights)


class InItsNamedClass(Task):
    weights: Any = None

    def losses(self, outputs, targets):
        if InItsNamedClass.weights is None:
            InItsNamedClass.weights = weighing(targets)
        return weighed(outputs, targets, self.weights)


class InAGlobal(Task):
    def losses(self, outputs, targets):
        return in_a_global(outputs, targets)


STATEFUL: dict[str, Callable[[], Any]] = {
    "attribute": lambda: in_an_attribute,
    "global": lambda: in_a_global,
    "dictionary": lambda: in_a_global_dictionary,
    "object": lambda: in_a_global_object,
    "another function": lambda: by_another_function,
    "default": lambda: in_a_default,
    "closure": in_a_closure,
    "decorated": decorated,
    "partial": lambda: functools.partial(in_a_closure()),
    "class": InItsClass,
    "named class": InItsNamedClass,
    "a task's global": InAGlobal,
}


def constant(outputs, targets):
    """Keeps public numbers, by the size of the batch."""
    if len(targets) not in constants:
        constants[len(targets)] = torch.full((2,), 0.5) * FACTOR
    return weighed(outputs, targets, constants[len(targets)])


class Constant(Task):
    def losses(self, outputs, targets):
        return constant(outputs, targets)


def compiled(outputs, targets):
    """Compiled by the test: to import the compiler takes a second."""
    return cross_entropy(outputs, targets, reduction="none") * FACTOR


def calls_compiled(outputs, targets):
    return compiled(outputs, targets)


@dataclass(frozen=True)
class Derived(Constant):
    """Names its class and its base."""

    factor: float = 2.0

    def losses(self, outputs, targets):
        assert isinstance(self, Derived)
        return self.factor * super().losses(outputs, targets) + super().losses(outputs, targets)


@pytest.fixture(autouse=True)
def nothing_seen():
    global weights
    weights, holder.weights, InItsClass.weights, InItsNamedClass.weights = None, None, None, None
    kept.clear()
    constants.clear()
    vars(in_an_attribute).clear()
    in_a_default.__defaults__[0].clear()


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL)
def test_a_run_of_examples_says_what_its_steps_share(make: Any, tmp_path: Path) -> None:
    changes = [*EXAMPLES, "data.partition=iid", "federation.rounds=1"]
    result = simulations.simulate(
        "dp-sgd-digits",
        model=Net,
        task=make(),
        data=DATA,
        overrides=changes,
        run_dir=tmp_path / "run",
    )
    assert result.guarantee.startswith("conditional")
    assert (
        "conditional on no part of the model or task keeping what it has seen" in result.guarantee
    )


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL)
def test_a_run_of_clients_says_what_they_share(make: Any, tmp_path: Path) -> None:
    changes = [*SMALL, "data.partition=iid", "federation.rounds=1"]
    result = simulations.simulate(
        model=Net, task=make(), data=DATA, overrides=changes, run_dir=tmp_path / "run"
    )
    assert result.guarantee.startswith("conditional")
    assert (
        "training not depending on clients that the same process has trained before (tested on"
        in result.guarantee
    )


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL)
def test_check_model_says_it_too(make: Any) -> None:
    with pytest.warns(Notice, match="guarantee would be conditional: "):
        check_model(Net, DATA, make(), vectorized=False)


class First(SequentialTrainer):
    """Adds the first update of all to every update, wherever it keeps that."""

    first: Any = None

    def updates(self, model, clients):
        for block in super().updates(model, clients):
            if type(self).first is None:
                type(self).first = block.clone()
            yield block + type(self).first


class FirstInAGlobal(SequentialTrainer):
    def updates(self, model, clients):
        for block in super().updates(model, clients):
            yield block + kept.setdefault("first", block.clone())


def trainer_with_a_default(module, layers, settings, *, device, task, seen={}):  # noqa: B006
    trainer = SequentialTrainer(module, layers, settings, device=device, task=task)
    plain = trainer.updates
    trainer.updates = lambda *given: (
        block + seen.setdefault(0, block.clone()) for block in plain(*given)
    )  # type: ignore[method-assign]
    return trainer


@pytest.mark.parametrize(
    "trainer", [First, FirstInAGlobal, trainer_with_a_default, functools.partial(First)]
)
def test_a_trainer_that_keeps_the_first_update_where_copies_share_it(
    trainer: Any, tmp_path: Path
) -> None:
    result = simulations.simulate(
        model=Net,
        trainer=trainer,
        data=DATA,
        overrides=[*SMALL, "data.partition=iid"],
        run_dir=tmp_path / "run",
    )
    assert result.guarantee.startswith("conditional")


@pytest.mark.parametrize("recipe", ["digits", "dp-sgd-digits"])
@pytest.mark.parametrize(
    "task",
    [
        constant,
        Constant,
        Derived(),
        "compiled",
        "calls_compiled",
        functools.partial(cross_entropy, reduction="none"),
    ],
)
def test_a_loss_that_keeps_constants_is_trained(
    recipe: str, task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(task, str):
        names = globals()
        monkeypatch.setitem(names, "compiled", torch.compile(compiled, backend="eager"))
        task = names[task]
    changes = [
        *(EXAMPLES if recipe.startswith("dp") else [*SMALL, "federation.rounds=1"]),
        "data.partition=iid",
    ]
    simulations.simulate(
        recipe, model=Net, task=task, data=DATA, overrides=changes, run_dir=tmp_path / "run"
    )
