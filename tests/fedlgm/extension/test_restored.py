"""No state of a user's part passes from one client to the next, by construction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import simulations
from clients import ClientData, LocalWork
from clients.cut_vote import CutVotes
from clients.updates import ClientUpdates
from clients.users import UserUpdates
from fedlgm import Guarantee, LayerTable, RunFacts, Sampling, Task, mechanisms
from fedlgm.aggregation.client_release import Asked
from fedlgm.aggregation.contributions import raw_updates
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.extension.restored import Restored
from fedlgm.extension.separation import shared_state
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.training import (
    ClientTask,
    LocalTraining,
    SequentialTrainer,
    VectorizedTrainer,
    kinds,
    tasks,
)
from tests.support.own_objects import DATA, OBJECTS, SMALL, Net

SETTINGS = LocalTraining(lr=0.1, batch_size=16, epochs=2)
LATE = 20


class Std(Net):
    """Divides its inputs by the standard deviation of the first batch of 16 rows or more."""

    std: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.std is None and len(x) >= 16:
            self.std = x.std()
        return super().forward(x if self.std is None else x / self.std)


class Counter(Net):
    """Behaves in another way from its 30th call on."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 if self.calls < 30 else 10.0)


class Pooling(nn.Module):
    """Convolutions, to which the trainer adds hooks of its own, and state."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(1, 4, (3, 1), padding=(1, 0)), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = nn.functional.max_pool2d(self.convolution(x[:, None, :, None]), (2, 1))
        return self.head(hidden.flatten(1)) / self.calls


class Marking(Net):
    """Keeps state in a layer, in a list of its own and in a parameter's attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {"calls": []}
        self.alias = self.kept

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.layers[0]
        first.calls = getattr(first, "calls", 0) + 1
        first.weight.calls = getattr(first.weight, "calls", 0) + 1
        self.alias["calls"].append(1)
        total = first.calls + first.weight.calls + len(self.kept["calls"])
        return super().forward(x) / total


class Weighing(Task):
    """Weighs classes by the first batch of 16 targets or more."""

    weights: Tensor | None = None

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.weights is None and len(targets) >= 16:
            self.weights = 1 / (1 + torch.zeros(2).index_add(0, targets, torch.ones(len(targets))))
        losses = cross_entropy(outputs, targets, reduction="none")
        return losses if self.weights is None else losses * self.weights[targets]


class Recorded(Weighing):
    """Keeps state in the operations that it returns."""

    def gradient_operations(self, outputs: Tensor, targets: Tensor, gradient: Tensor) -> list[Any]:
        calls: list[int] = []

        def write() -> None:
            calls.append(1)
            gradient.copy_(torch.full_like(outputs, 0.01 * len(calls)))

        return [write]


class Drawing(Task):
    """Draws random numbers, whose generator remembers the draws before."""

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, reduction="none") * torch.rand(())


class Running(SequentialTrainer):
    """Subtracts the mean of earlier updates from its 20th client on."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.count, self.total = 0, torch.zeros_like(self._weights)

    def updates(self, model: Tensor, tasks: Any) -> Any:
        for block in super().updates(model, tasks):
            self.count, self.total = self.count + 1, self.total + block[0]
            yield block - self.total / self.count if self.count >= LATE else block


class Local(SequentialTrainer):
    """Keeps state in a variable of one call, in what it is given, and in random numbers."""

    def updates(self, model: Tensor, tasks: Any) -> Any:
        before: Any = 0.0
        for block in super().updates(model, tasks):
            block = block + before + 0.01 * torch.rand(())
            before = block.clone()
            model.add_(1.0)
            yield block


def clients(count: int = 3) -> list[ClientTask]:
    made = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        size = 20 + 7 * (number % 3)
        x = (1 + number) * torch.randn(size, 5, generator=generator)
        made.append(ClientTask(x, (x[:, 0] > number).long(), torch.Generator(), 2))
    return made


def again(task: ClientTask, seed: int) -> ClientTask:
    return ClientTask(
        task.x, task.y, torch.Generator().manual_seed(seed), task.epochs, task.trained
    )


def trained(make: Any, numbers: Sequence[int], module: nn.Module, task: Task) -> list[Tensor]:
    """Updates of these clients, one after another."""
    layers, all_clients = LayerTable.from_module(module), clients(max(numbers) + 1)
    torch.manual_seed(len(numbers))
    trainer = make(module, layers, SETTINGS, device="cpu", task=task)
    given = [again(all_clients[number], number) for number in numbers]
    start = torch.linspace(-0.5, 0.5, layers.size)
    return [row.clone() for block in trainer.updates(start, given) for row in raw_updates(block)]


ATTRIBUTES: dict[str, tuple[Any, Any, Any]] = {
    "std": (Std, None, SequentialTrainer),
    "counter": (Counter, None, SequentialTrainer),
    "pooling": (Pooling, None, SequentialTrainer),
    "layer and list": (Marking, None, SequentialTrainer),
    "task": (Net, Weighing, SequentialTrainer),
    "task of a stack": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)),
        Weighing,
        SequentialTrainer,
    ),
    "operations": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)),
        Recorded,
        SequentialTrainer,
    ),
    "drawing": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)),
        Drawing,
        SequentialTrainer,
    ),
    "fedprox": (Std, Weighing, kinds.get("fedprox").sequential),
    "bfloat16": (Std, Weighing, kinds.get("bfloat16").sequential),
    "own trainer": (Net, None, kinds.get(Running).sequential),
    "own trainer, own variables": (Net, None, kinds.get(Local).sequential),
    "own trainer and model": (
        Counter,
        Weighing,
        kinds.get(lambda *g, **o: SequentialTrainer(*g, **o)).sequential,
    ),
    "vectorised model": (Counter, None, VectorizedTrainer),
    "vectorised task": (Net, Weighing, VectorizedTrainer),
}


@pytest.mark.parametrize(("model", "task", "make"), ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_a_client_s_update_does_not_depend_on_earlier_clients(
    model: Any, task: Any, make: Any
) -> None:
    options = {"width": 2} if make is VectorizedTrainer else {}

    def maker(*given: Any, **named: Any) -> Any:
        return make(*given, **named, **options)

    def fresh_task() -> Task:
        return tasks.get(None if task is None else task())

    last = LATE + 1
    (alone,) = trained(maker, [last], model(), fresh_task())
    after = trained(maker, list(range(last + 1)), model(), fresh_task())[last]
    assert torch.equal(alone, after)
    assert (
        shared_state(model(), fresh_task(), make if make is not VectorizedTrainer else None) is None
    )


def test_the_object_that_was_passed_keeps_nothing_of_a_client() -> None:
    task = Weighing()
    trained(SequentialTrainer, [0, 1], Net(), task)
    assert task.weights is None


def plan_of(layers: LayerTable, units: int, of: Any = None) -> ReleasePlan:
    facts = RunFacts(1.0, Sampling("poisson", units, 1.0, of=of))
    return ReleasePlan(layers, [1e6], [1e6], facts, Guarantee("proven", "an example"))


@pytest.mark.parametrize("unit", ["client", "user"])
def test_contributions_of_clients_and_users_are_those_of_each_alone(unit: str) -> None:
    module = Std()
    layers, data = LayerTable.from_module(module).as_single_layer(), clients(4)

    def made(units: list[int]) -> Tensor:
        trainer = SequentialTrainer(Std(), layers, SETTINGS)
        work = LocalWork(
            trainer, SETTINGS, lambda number: ClientData(data[number].x, data[number].y)
        )
        each: Any = ClientUpdates(work)
        if unit == "user":
            each = UserUpdates(each, [[0, 1], [2, 3]])
        plan = plan_of(layers, 4 if unit == "client" else 2, None if unit == "client" else "user")
        asked = Asked(plan, layers.flatten(module), 1, units)
        return [
            raw_updates(u).clone()
            for _, u in each.updates(asked, KeyRing.from_seed(1))
            if u is not None
        ][-1]

    assert torch.equal(made([1]), made([0, 1]))


def test_votes_of_a_client_do_not_depend_on_earlier_ones() -> None:
    class Counts(Task):
        calls = 0

        def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.calls += 1
            sign = -1.0 if self.calls > 2 else 1.0
            return sign * cross_entropy(outputs, targets, reduction="none")

    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False))
    mechanism, facts = mechanisms.get("voted-filling"), RunFacts(1.0, Sampling("poisson", 9, 0.5))
    layers, start = mechanism.table(LayerTable.from_module(model)), torch.tensor([1.0, 0.0, 0.0])
    plan = mechanism.plan(layers, facts, Transcript.start(start))
    data, update = (
        ClientData(torch.ones(4, 1), torch.zeros(4, dtype=torch.int64)),
        torch.tensor([[99.0, 1.0, 0.0]]),
    )
    votes = CutVotes(model, layers, Counts()).add_votes(
        update.expand(3, -1), plan, start, [data] * 3
    )
    assert votes.answers["cut-vote"].flatten().tolist() == [0.5, 0.5, 0.5]


def marks_itself(outputs: Tensor, targets: Tensor) -> Tensor:
    this = marks_itself
    this.count = getattr(this, "count", 0) + 1  # type: ignore[attr-defined]
    return cross_entropy(outputs, targets, reduction="none") * this.count  # type: ignore[attr-defined]


class MarksItsClass(Task):
    _count = 0

    @classmethod
    def more(cls) -> int:
        cls._count += 1
        return cls._count

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, reduction="none") * self.more()


CRITERION = nn.CrossEntropyLoss(reduction="none")


def marks_a_layer(outputs: Tensor, targets: Tensor) -> Tensor:
    layer: Any = CRITERION
    layer.count = getattr(layer, "count", 0) + 1
    return CRITERION(outputs, targets) * layer.count


class MarksAHeldClass(Task):
    def __init__(self) -> None:
        self.kind = type("Kind", (), {"count": 0})

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.kind.count += 1
        return cross_entropy(outputs, targets, reduction="none") * self.kind.count


class MarksAHeldFunction(Task):
    def __init__(self) -> None:
        self.parts: list[Any] = [partial(lambda value: value)]

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        function = self.parts[0].func
        function.count = getattr(function, "count", 0) + 1
        return cross_entropy(outputs, targets, reduction="none") * function.count


@pytest.mark.parametrize(
    "task",
    [marks_itself, MarksItsClass, marks_a_layer, MarksAHeldClass, MarksAHeldFunction],
)
def test_a_class_or_function_that_training_changes_is_refused(task: Any, tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match=r"training has changed .*count, which all copies share"):
        trained(SequentialTrainer, [0, 1], Net(), tasks.get(task))
    with pytest.raises(PrivacyError, match=r"training has changed .*count"):
        simulations.simulate(
            model=Net, task=task, data=DATA, overrides=SMALL, run_dir=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_ordinary_parts_are_proven(tmp_path: Path) -> None:
    own = [
        {"model": Std, "task": Weighing},
        {"model": Std(), "task": Weighing(), "trainer": Running},
        {"model": Counter, "overrides": ["training.vectorize=on"]},
    ]
    for number, given in enumerate(own):
        changes = [*SMALL, *given.pop("overrides", ())]  # type: ignore[misc]
        objects: Any = {"model": Net, "data": DATA} | given
        result = simulations.simulate(**objects, overrides=changes, run_dir=tmp_path / f"{number}")
        assert result.guarantee.startswith("proven"), result.guarantee


@pytest.mark.parametrize(
    "given",
    [
        {"engine": "processes", "workers": 2},
        pytest.param({"engine": "ray", "workers": 2}, marks=pytest.mark.slow),
        pytest.param({"engine": "flower", "workers": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_engine_trains_the_same_model_of_parts_with_state(given: Any, tmp_path: Path) -> None:
    """Beside a mechanism, a partition and a server's optimizer, which reach every engine, too."""
    objects: Any = OBJECTS | {"model": Std(), "task": Weighing(), "trainer": Running}
    changes = [*SMALL, "federation.rate=1.0", "run.block_size=3"]
    local = simulations.simulate(**objects, overrides=changes, run_dir=tmp_path / "local")
    other = simulations.simulate(**objects, overrides=changes, run_dir=tmp_path / "other", **given)
    assert other["mechanism"] == local["mechanism"] == "<alike>"
    assert other.metrics == local.metrics
    same = zip(other.model().parameters(), local.model().parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in same)
    assert other.guarantee == local.guarantee


def test_what_may_have_changed_is_told() -> None:
    plain, counter = Net(), Counter()
    for module, changed in ((plain, False), (counter, True)):
        restored = Restored.of(module, tasks.get())
        assert restored is not None
        module.eval()(torch.zeros(2, 5))
        assert restored.restore() is changed
        assert restored.restore() is False


def test_a_trainer_that_yields_another_number_of_updates_is_refused() -> None:
    class None_:
        def __init__(self, *given: Any, **options: Any) -> None: ...

        def updates(self, model: Tensor, tasks: Any) -> Any:
            return iter(())

    with pytest.raises(ConfigError, match="yields 0 updates for one client"):
        trained(kinds.get(None_).sequential, [0], Net(), tasks.get())
