"""Simulations from Python: users' own objects in every engine, results that show themselves, honest resumption."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import simulations
from fedlgm import Guarantee, Mechanism, ReleasePlan, mechanisms
from fedlgm.audits import Audit
from fedlgm.errors import ConfigError, DataError, FedlgmError, RunError
from simulations import launch
from simulations.audits.targets import audit_run
from simulations.config.own import own_of
from simulations.runs.folder import RunFolder

ROOT = Path(__file__).parents[2]
SMALL = [
    "federation.clients=20", "federation.rounds=3", "federation.rate=0.5", "privacy.delta=0.01",
    "privacy.accountant=rdp",
]  # fmt: skip
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(200, 5)), np.arange(200) % 2
DATA = {"train": (X, Y), "test": (X[:50], Y[:50])}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@dataclass(frozen=True)
class Alike(Mechanism):
    """The same noise in every layer."""

    bound: float = 1.0

    def plan(self, layers, facts, transcript):
        clip = np.full(len(layers), self.bound / len(layers) ** 0.5)
        return ReleasePlan(
            layers, clip, np.full(len(layers), facts.noise_multiplier), facts, Guarantee("proven", "test")
        )


class Momentum:
    """A server step without a state of its own."""

    def step(self, model, mean_update):
        return model + 0.5 * mean_update


def halves(data, clients, seed):
    return np.array_split(np.arange(len(data.train_y)), clients)


OBJECTS: dict[str, Any] = {
    "model": Net,
    "data": DATA,
    "mechanism": Alike("alike", bound=0.5),
    "partition": halves,
    "server_optimizer": Momentum(),
}


def readme_code() -> str:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]


def readme_result(engine: str) -> simulations.RunResult:
    names: dict[str, Any] = {}
    torch.manual_seed(0)  # the model's own initial weights are the run's
    exec(readme_code().replace("data=data,", f"data=data, engine={engine!r},"), names)
    return names["result"]


def test_the_readmes_lines_train_ones_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = readme_code()
    assert code == (ROOT / "docs" / "examples" / "own_model.py").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    result = readme_result("local")
    assert 7.9 < result.epsilon <= 8
    assert result.accuracy is not None
    assert result.accuracy > 0.6
    assert len(result.history) == result["rounds"]


def test_users_of_the_data_are_its_clients(tmp_path: Path) -> None:
    """Who says whose each example is must get these users as clients, not a division by label."""
    users = np.array([f"user {i % 25}" for i in range(200)])
    data = DATA | {"users": users}
    result = simulations.simulate(model=Net, data=data, overrides=SMALL[1:], run_dir=tmp_path / "run")
    recipe = RunFolder.open(result.folder).recipe()
    assert (recipe.data.partition, recipe.federation.clients) == ("natural", 25)
    fewer = simulations.simulate(model=Net, data=data, overrides=SMALL, run_dir=tmp_path / "fewer")
    recipe = RunFolder.open(fewer.folder).recipe()
    assert (recipe.data.partition, recipe.federation.clients) == ("natural", 20)


def test_partitions_and_optimizers_may_be_given_by_name(tmp_path: Path) -> None:
    given = {"model": Net, "data": DATA, "partition": "iid", "server_optimizer": "momentum"}
    result = simulations.simulate(**given, overrides=SMALL, run_dir=tmp_path / "run")
    recipe = RunFolder.open(result.folder).recipe()
    assert (recipe.data.partition, recipe.federation.server_optimizer) == ("iid", "momentum")


@pytest.mark.slow
def test_the_readmes_lines_train_alike_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert readme_result("local")["model_sha256"] == readme_result("ray")["model_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_every_object_reaches_every_engine(engine: launch.Engine, tmp_path: Path) -> None:
    one = simulations.simulate(**OBJECTS, overrides=SMALL, run_dir=tmp_path / "local")
    other = simulations.simulate(**OBJECTS, overrides=SMALL, engine=engine, run_dir=tmp_path / engine)
    assert one["model_sha256"] == other["model_sha256"]
    assert one["mechanism"] == "<Alike>"


def test_a_result_shows_itself(tmp_path: Path) -> None:
    result = simulations.simulate(model=Net, data=DATA, overrides=SMALL, run_dir=tmp_path / "run")
    module = result.model()
    accuracy = (module(torch.tensor(X[:50]).float()).argmax(1).numpy() == Y[:50]).mean()
    assert accuracy == pytest.approx(result.accuracy)
    page = result._repr_html_()
    assert result.guarantee.split(":")[0] in page
    assert all(row["layer"] in page for row in result.layers())
    assert "epsilon" in repr(result)


def test_a_run_of_objects_is_audited_with_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = simulations.simulate(**OBJECTS, overrides=[*SMALL, "run.audit=true"], run_dir=run)
    found = result.audit()
    assert found.passed
    assert found.method == "one-run-gaussian"
    assert found.epsilon_lower <= result.epsilon == found.epsilon_reported
    with pytest.raises(RunError, match=r"simulations.resume\(.*\).audit\(\)"):
        audit_run(run, Audit())
    with pytest.raises(RunError, match="another mechanism"):
        audit_run(run, Audit(), own=own_of(OBJECTS | {"mechanism": Alike("other", bound=0.25)}))


def test_a_registered_mechanism_is_written_into_the_recipe(tmp_path: Path) -> None:
    method = mechanisms.get("snr-consistent", bound=0.5)
    result = simulations.simulate(mechanism=method, overrides=[*SMALL, "federation.rounds=1"], run_dir=tmp_path / "run")
    recipe = simulations.load_recipe(tmp_path / "run" / "recipe.toml")
    assert recipe.mechanism.build() == method
    assert result["mechanism"] == "snr-consistent"


def test_a_run_of_objects_continues_with_the_same_objects_only(tmp_path: Path) -> None:
    whole = simulations.simulate(**OBJECTS, overrides=SMALL, run_dir=tmp_path / "whole")

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        simulations.simulate(**OBJECTS, overrides=SMALL, run_dir=run, progress=stop)
    with pytest.raises(FedlgmError, match="was passed as a Python object"):
        launch.resume(run)
    with pytest.raises(RunError, match="another data"):
        simulations.resume(run, **OBJECTS | {"data": {"train": (X + 1, Y), "test": (X[:50], Y[:50])}})
    with pytest.raises(RunError, match="another mechanism"):
        simulations.resume(run, **OBJECTS | {"mechanism": Alike("alike", bound=0.6)})
    assert simulations.resume(run, **OBJECTS)["model_sha256"] == whole["model_sha256"]


class WithBatchNorm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2)

    def forward(self, x):
        return self.out(self.norm(x))


@pytest.mark.parametrize(
    ("objects", "kind", "words"),
    [
        ({"model": WithBatchNorm}, ConfigError, "GroupNorm"),
        ({"model": lambda: torch.nn.Tanh()}, ConfigError, "no trainable parameters"),
        ({"model": 3}, ConfigError, "neither an nn.Module"),
        ({"data": {"train": (X, Y[:-1]), "test": (X, Y)}}, DataError, "200 inputs but 199 targets"),
        ({"data": {"train": (X, np.full(200, np.nan)), "test": (X, X[:, 0])}}, DataError, "NaN"),
        ({"model": "nowhere.models:Net"}, ConfigError, "nowhere"),
        ({"task": "regression", "data": {"train": (X, X[:, 0]), "test": (X, X[:, 0])}}, ConfigError, "fit"),
        ({"mechanism": "my.rules:Missing"}, ConfigError, "my"),
        ({"mechanism": object()}, ConfigError, "fedlgm.Mechanism"),
        ({"server_optimizer": object()}, ConfigError, "^server optimizer '<object>' has no step"),
        ({"partition": object()}, ConfigError, "^data.partition: partition scheme '<object>' is neither"),
        ({"task": 3}, ConfigError, "^task: task int is neither"),
        ({"model": torch.nn.LazyLinear(2)}, ConfigError, "'weight' has no size before the first forward pass"),
        ({"data": {"train": (X, Y - 1), "test": (X, Y)}}, DataError, "needs targets of at least 0"),
    ],
)  # fmt: skip
def test_bad_objects_end_in_one_sentence_before_anything_is_written(
    objects: dict[str, Any], kind: type[Exception], words: str, tmp_path: Path
) -> None:
    given = {"model": Net, "data": DATA} | objects
    with pytest.raises(kind, match=words) as caught:
        simulations.simulate(**given, overrides=[*SMALL, "data.partition=iid"], run_dir=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def loss_of(level: float):
    def tilted(outputs, targets):
        return level * torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    return tilted


class Slower:
    """A server step with a setting of its own and a state that moves."""

    def __init__(self, lr: float) -> None:
        self.lr, self.steps = lr, 0

    def step(self, model, mean_update):
        self.steps += 1
        return model + self.lr * mean_update


def objects_of(level: float = 1.0, lr: float = 0.5, shift: int = 0) -> dict[str, Any]:
    """Objects as another process would make them: equal to others, at addresses of their own."""

    def shifted(data, clients, seed):
        return np.array_split(np.roll(np.arange(len(data.train_y)), shift), clients)

    return {
        "model": Net, "data": DATA, "task": loss_of(level), "partition": shifted, "server_optimizer": Slower(lr),
    }  # fmt: skip


def test_a_run_of_objects_continues_in_another_process(tmp_path: Path) -> None:
    """Objects are recognised by what they are: their addresses, which their texts show, change with the process."""
    whole = simulations.simulate(**objects_of(), overrides=SMALL, run_dir=tmp_path / "whole")

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        simulations.simulate(**objects_of(), overrides=SMALL, run_dir=run, progress=stop)
    others = {"task": {"level": 2.0}, "partition": {"shift": 1}, "server_optimizer": {"lr": 0.6}}
    for what, change in others.items():
        with pytest.raises(RunError, match=f"another {what}"):
            simulations.resume(run, **objects_of(**change))
    assert simulations.resume(run, **objects_of())["model_sha256"] == whole["model_sha256"]
    with pytest.raises(RunError, match="another server_optimizer"):  # of a finished run, too
        simulations.resume(run, **objects_of(lr=0.6))
    assert simulations.resume(run, **objects_of()).model() is not None
