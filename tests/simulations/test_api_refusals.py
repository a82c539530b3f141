"""Objects that cannot be used end in one sentence, before anything is written."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import simulations
from fedlgm import Task
from fedlgm.errors import ConfigError, DataError, FedlgmError, PrivacyError
from fedlgm.extension.testing import check_model
from fedlgm.training import SequentialTrainer, tasks
from tests.support.own_objects import DATA, SMALL, Alike, Net, X, Y

EXAMPLES = ["training.batch_size=8", "privacy.accountant=rdp", "privacy.delta=0.001"]


class WithBatchNorm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2)

    def forward(self, x):
        return self.out(self.norm(x))


class Recurrent(Net):
    """Its hidden state outlives the batch, and so a client."""

    hidden: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, self.hidden = x + self.hidden, x.detach().mean(0)
        return super().forward(x)


class Sly(Net):
    """Remembers what it is trained on only."""

    seen = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.seen += 0.5
        return super().forward(x + self.seen)


class Standardising(Net):
    """Keeps the mean of the first batch that it sees."""

    mean: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean = x.mean(0)
        return super().forward(x - self.mean)


class Weighing(Task):
    """Weighs classes by the first targets that it sees."""

    weights: torch.Tensor | None = None

    def losses(self, outputs, targets):
        if self.weights is None:
            self.weights = 1 / (1 + torch.bincount(targets, minlength=2))
        return (
            torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
            * self.weights[targets]
        )


class Scaling(Task):
    """Scales targets by all of their part."""

    def losses(self, outputs, targets):
        return (outputs[:, 0] - targets).square()

    def targets(self, y, part):
        return ((y - y.mean()) / y.std()).astype(np.float32)


class Shifting(Scaling):
    """Changes all inputs by the mean of the training inputs."""

    def prepare(self, data):
        mean = data.train_x.mean(axis=0)
        real = {
            "train_y": data.train_y.astype(np.float32),
            "test_y": data.test_y.astype(np.float32),
        }
        return replace(data, train_x=data.train_x - mean, test_x=data.test_x - mean, **real)


class Keeping(Scaling):
    """Keeps the mean of the training targets for its losses."""

    def prepare(self, data):
        self.mean = float(data.train_y.mean())
        return data

    def losses(self, outputs, targets):
        return (outputs[:, 0] - targets + self.mean).square()


class Rounding(Scaling):
    """Makes each target of itself."""

    def targets(self, y, part):
        return np.sign(y - 0.5).astype(np.float32)


class Mixing(SequentialTrainer):
    """Adds to each client's update that of the client before."""

    def updates(self, model, clients):
        made = torch.cat([block.clone() for block in super().updates(model, clients)])
        return iter([made + made.roll(1, 0)])


class Accumulating(SequentialTrainer):
    """Adds the first update of all to every update."""

    first: torch.Tensor | None = None

    def updates(self, model, clients):
        for block in super().updates(model, clients):
            if self.first is None:
                self.first = block.clone()
            yield block + self.first


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return super().forward(x)


class Untrainable(Net):
    """Writes over what the gradient needs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.exp(super().forward(x))
        hidden += 1
        return hidden


class Nameless(Task):
    def losses(self, outputs, targets):
        return outputs[:, 0] - targets

    def targets(self, y, part):
        return {}["targets"]


class Louder(Alike):
    def plan(self, layers, facts, transcript):
        plan = super().plan(layers, facts, transcript)
        return replace(plan, clip=2 * plan.clip)


class Broken(Alike):
    def plan(self, layers, facts, transcript):
        return [][0]


class Steps:
    def __init__(self, step: Any) -> None:
        self.step = step


@pytest.mark.parametrize(
    ("objects", "kind", "words"),
    [
        ({"model": WithBatchNorm}, ConfigError, "GroupNorm"),
        ({"model": lambda: torch.nn.Tanh()}, ConfigError, "no trainable parameters"),
        ({"model": 3}, ConfigError, "neither an nn.Module"),
        ({"data": {"train": (X, Y[:-1]), "test": (X, Y)}}, DataError, "200 inputs but 199 targets"),
        ({"data": {"train": (X, np.full(200, np.nan)), "test": (X, X[:, 0])}}, DataError, "NaN"),
        ({"model": "nowhere.models:Net"}, ConfigError, "nowhere"),
        (
            {"task": "regression", "data": {"train": (X, X[:, 0]), "test": (X, X[:, 0])}},
            ConfigError,
            "fit",
        ),
        ({"mechanism": "my.rules:Missing"}, ConfigError, "my"),
        ({"mechanism": object()}, ConfigError, "fedlgm.Mechanism"),
        (
            {"server_optimizer": object()},
            ConfigError,
            "^federation.server_optimizer '<object>' has no step",
        ),
        ({"partition": object()}, ConfigError, "^data.partition '<object>' is neither"),
        ({"task": 3}, ConfigError, "^task int is neither"),
        (
            {"model": torch.nn.LazyLinear(2)},
            ConfigError,
            "'weight' has no size before the first forward pass",
        ),
        ({"data": {"train": (X, Y - 1), "test": (X, Y)}}, DataError, "needs targets of at least 0"),
        (
            {"model": Recurrent},
            ConfigError,
            "^model: the model returns different outputs .* it remembers what",
        ),
        (
            {"model": Standardising},
            ConfigError,
            "^model: the model returns different outputs .* it remembers what",
        ),
        (
            {"model": Standardising()},
            ConfigError,
            "^model: the model returns different outputs .* it remembers what",
        ),
        (
            {"model": Counting},
            ConfigError,
            "^model: the model's buffer 'calls' would follow private data",
        ),
        (
            {"model": Untrainable},
            ConfigError,
            r"training on 8 test examples fails: RuntimeError: .*inplace",
        ),
        (
            {"model": lambda: torch.nn.Linear(5, 2, device="meta")},
            ConfigError,
            "is on the device meta",
        ),
        (
            {"task": Nameless()},
            ConfigError,
            r"^data: task 'custom': KeyError: 'targets' \(test_api_refusals.py",
        ),
        ({"mechanism": Alike}, ConfigError, r"made with its name, as in .*; got the class Alike"),
        (
            {"mechanism": Louder("louder")},
            PrivacyError,
            "round 1 costs 0.25|round 1 costs 4 releases",
        ),
        (
            {"mechanism": Broken("broken")},
            ConfigError,
            r"^mechanism 'broken': IndexError: .* \(test_api_.*, line",
        ),
        (
            {"server_optimizer": Steps(lambda model, mean: None)},
            ConfigError,
            "a tensor of shape .* returns NoneType",
        ),
        (
            {"server_optimizer": Steps(lambda model, mean: model[:3])},
            ConfigError,
            r"it returns \(3,\)",
        ),
        (
            {"server_optimizer": Steps(lambda model: model)},
            ConfigError,
            "^server optimizer '<Steps>': TypeError",
        ),
    ],
)
def test_bad_objects_end_in_one_sentence_before_anything_is_written(
    objects: dict[str, Any], kind: type[Exception], words: str, tmp_path: Path
) -> None:
    given = {"model": Net, "data": DATA} | objects
    with pytest.raises(kind, match=words) as caught:
        simulations.simulate(
            **given, overrides=[*SMALL, "data.partition=iid"], run_dir=tmp_path / "run"
        )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "objects",
    [
        {"model": Sly},
        {"task": Weighing},
        {"task": Weighing()},
        {"trainer": Mixing},
        {"trainer": Accumulating},
    ],
)
def test_state_that_a_part_keeps_in_itself_reaches_no_other_client(
    objects: dict[str, Any], tmp_path: Path
) -> None:
    given = {"model": Net, "data": DATA} | objects
    result = simulations.simulate(
        **given, overrides=[*SMALL, "data.partition=iid"], run_dir=tmp_path / "run"
    )
    assert result.guarantee.startswith("proven")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"overrides": "run.seed=1"}, "overrides must be a list of .*, got str: 'run.seed=1'"),
        (
            {"epsilon": 8},
            r"simulate has no argument 'epsilon'; .* overrides=\{'privacy.epsilon': 8\}",
        ),
        ({"fuel": 8}, "simulate has no argument 'fuel'$"),
        ({"overrides": ["data_dir=here"]}, "data_dir: unknown key; did you mean 'data.dir'"),
        ({"overrides": {7: 1}}, "overrides map 'section.key' to a value, got the key 7"),
        ({"overrides": {"run.sede": 1}}, "run.sede: unknown key"),
        ({"overrides": [1]}, "overrides must be a list of .*, got 1 in the list"),
        ({"trackers": "tensorboard"}, "trackers must be a list .*, got the string 'tensorboard'"),
        ({"data": X}, "data set 'ndarray' must be a fedlgm.data.DataSet"),
    ],
)
def test_arguments_of_another_form_are_refused(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(FedlgmError, match=message):
        simulations.simulate(**given, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Centred(Net):
    """One example moves the gradients of all others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


class Signed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Centred, "outputs for an example depend on the other examples"),
        (Signed, "outputs for an example depend on the other examples"),
        (Sly, "PyTorch computes for this example alone: the model or the task remembers"),
        (Untrainable, "training on 8 test examples fails: RuntimeError"),
    ],
)
def test_models_without_gradients_per_example_are_refused_before_anything_is_written(
    model: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulations.simulate(
            "dp-sgd-digits", model=model, data=DATA, overrides=EXAMPLES, run_dir=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("recipe", ["digits", "dp-sgd-digits"])
@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Scaling, "prepares an example by means of other training examples"),
        (Shifting, "prepares an example by means of other training examples"),
        (Keeping, "its losses depend on the training examples that it has prepared"),
        (Rounding, ""),
    ],
)
def test_statistics_of_the_training_examples_in_a_task_are_refused(
    recipe: str, task: type[Task], words: str, tmp_path: Path
) -> None:
    changes = [
        *(EXAMPLES if recipe.startswith("dp") else SMALL),
        "data.partition=iid",
        "federation.rounds=1",
    ]
    for given in (task, task()):
        run = partial(
            simulations.simulate, recipe, model=Net, task=given, data=DATA, overrides=changes
        )
        if not words:
            run(run_dir=tmp_path / type(given).__name__)
            continue
        with pytest.raises(ConfigError, match=words):
            run(run_dir=tmp_path / "run")
        with pytest.raises(ConfigError, match=words):
            check_model(Net, DATA, given, vectorized=False)


def test_a_task_that_weighs_examples_by_the_first_ones_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model or the task remembers what it has seen"):
        simulations.simulate(
            "dp-sgd-digits",
            model=Net,
            task=Weighing(),
            data=DATA,
            overrides=EXAMPLES,
            run_dir=tmp_path / "run",
        )


def test_models_with_gradients_per_example_are_trained(tmp_path: Path) -> None:
    changes = [*EXAMPLES, "federation.rounds=1"]
    result = simulations.simulate(
        "dp-sgd-digits", model=Net, data=DATA, overrides=changes, run_dir=tmp_path / "run"
    )
    assert result["unit"] == "example"


def test_tasks_whose_losses_mix_examples_are_refused_at_both_levels(tmp_path: Path) -> None:
    def relative(outputs, targets):
        losses = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
        return losses / losses.mean()

    given = {"model": Net, "data": DATA, "task": relative}
    for recipe, overrides in (("dp-sgd-digits", EXAMPLES), (None, SMALL)):
        with pytest.raises(
            ConfigError, match=r"the loss of an example depends on the other examples"
        ):
            simulations.simulate(recipe, **given, overrides=overrides, run_dir=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_metrics_that_are_no_means_over_examples_are_refused(tmp_path: Path) -> None:
    class Ranked(tasks.Classification):
        def sums(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
            scores, positive = outputs[:, 1], targets == 1
            auc = (scores[positive, None] > scores[~positive]).float().mean()
            return {**super().sums(outputs, targets), "auc": auc}

        def metrics(self, means: dict[str, float]) -> dict[str, float]:
            return {**super().metrics(means), "auc": means["auc"]}

    with pytest.raises(ConfigError, match=r"metric 'auc' is .* such as AUC, is not such a mean"):
        simulations.simulate(
            model=Net, data=DATA, task=Ranked(), overrides=SMALL, run_dir=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_a_recipe_of_plain_values_is_refused():
    """Its text was looked for as a file's name, which ended in the operating system's error."""
    with pytest.raises(
        ConfigError,
        match=r"the first argument must be a recipe's name or file, got dict: pass this by name",
    ):
        simulations.simulate({"name": "tiny", "federation": {"clients": 20}})
