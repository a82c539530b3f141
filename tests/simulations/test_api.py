"""Simulations from Python: users' own objects in every engine, results that show themselves, honest resumption."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import simulations
from fedlgm import Guarantee, Mechanism, ReleasePlan, Task, mechanisms
from fedlgm.audits import Audit
from fedlgm.errors import ConfigError, DataError, FedlgmError, Notice, PrivacyError, RunError
from simulations import launch
from simulations.audits.targets import audit_run
from simulations.config import recipe as recipes
from simulations.config.own import own_of
from simulations.reports.export import export
from simulations.runs.folder import RunFolder

ROOT = Path(__file__).parents[2]
SMALL = [
    "federation.clients=20", "federation.rounds=3", "federation.rate=0.5", "privacy.delta=0.01",
    "privacy.accountant=rdp",
]  # fmt: skip
EXAMPLES = ["training.batch_size=8", "privacy.accountant=rdp", "privacy.delta=0.001"]
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
        ({"task": "regression", "data": {"train": (X, X[:, 0]), "test": (X, X[:, 0])}}, ConfigError, "fit"),
        ({"mechanism": "my.rules:Missing"}, ConfigError, "my"),
        ({"mechanism": object()}, ConfigError, "fedlgm.Mechanism"),
        ({"server_optimizer": object()}, ConfigError, "^federation.server_optimizer '<object>' has no step"),
        ({"partition": object()}, ConfigError, "^data.partition '<object>' is neither"),
        ({"task": 3}, ConfigError, "^task int is neither"),
        ({"model": torch.nn.LazyLinear(2)}, ConfigError, "'weight' has no size before the first forward pass"),
        ({"data": {"train": (X, Y - 1), "test": (X, Y)}}, DataError, "needs targets of at least 0"),
        ({"model": Recurrent}, ConfigError, "^model: the model gives other outputs .* it remembers what it has seen"),
        ({"model": Sly}, ConfigError, "^an update depends on what was trained before"),
        ({"model": Counting}, ConfigError, "^model: the model's buffer 'calls' would follow private data"),
        ({"model": Untrainable}, ConfigError, r"training on 8 test examples fails: RuntimeError: .*inplace"),
        ({"model": lambda: torch.nn.Linear(5, 2, device="meta")}, ConfigError, "is on the device meta"),
        ({"task": Nameless()}, ConfigError, r"^data: task 'custom': KeyError: 'targets' \(test_api.py"),
        ({"mechanism": Alike}, ConfigError, r"made with its name, as in .*; got the class Alike"),
        ({"mechanism": Louder("louder")}, PrivacyError, "round 1 costs 0.25|round 1 costs 4 releases"),
        ({"mechanism": Broken("broken")}, ConfigError, r"^mechanism 'broken': IndexError: .* \(test_api.py, line"),
        ({"server_optimizer": Steps(lambda model, mean: None)}, ConfigError, "a tensor of shape .* it gives NoneType"),
        ({"server_optimizer": Steps(lambda model, mean: model[:3])}, ConfigError, r"it gives \(3,\)"),
        ({"server_optimizer": Steps(lambda model: model)}, ConfigError, "^server optimizer '<Steps>': TypeError"),
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


def interrupted(run: Path, **objects: Any) -> Path:
    """A run that was stopped after its second round."""

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulations.simulate(**objects, overrides=SMALL, run_dir=run, progress=stop)
    return run


def fine_tuned(seed: int, activation: type[torch.nn.Module] = torch.nn.Tanh) -> torch.nn.Module:
    """The same trained head on frozen features of a seed."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), activation(), torch.nn.Linear(4, 2))
    torch.manual_seed(seed)
    torch.nn.init.normal_(net[0].weight.requires_grad_(False))
    return net


def test_models_are_recognised_by_more_than_their_trained_weights(tmp_path: Path) -> None:
    given = {"data": DATA, "model": fine_tuned(1)}
    run = interrupted(tmp_path / "run", **given)
    with pytest.raises(RunError, match="another frozen part of the model"):
        simulations.resume(run, **given | {"model": fine_tuned(2)})
    with pytest.raises(RunError, match="another structure of the model"):
        simulations.resume(run, **given | {"model": fine_tuned(1, torch.nn.ReLU)})
    result = simulations.resume(run, **given)
    with pytest.raises(ConfigError, match="frozen parameters and buffers of Sequential are not those"):
        export(run, module=fine_tuned(2), out=tmp_path / "wrong.safetensors")
    export(run, module=fine_tuned(1), out=tmp_path / "model.safetensors")
    state = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(state[name], value) for name, value in result.model().state_dict().items())


def test_data_are_recognised_by_whose_they_are_too(tmp_path: Path) -> None:
    by_turns, in_blocks = np.arange(200) % 20, np.arange(200) // 10
    run = interrupted(tmp_path / "run", model=Net, data=DATA | {"users": by_turns})
    with pytest.raises(RunError, match="another division of the data"):
        simulations.resume(run, model=Net, data=DATA | {"users": in_blocks})
    assert simulations.resume(run, model=Net, data=DATA | {"users": by_turns})["rounds"] == 3


@pytest.mark.parametrize(
    "other", [{"mechanism": Alike("alike")}, {"partition": halves}, {"model": Net()}, {"task": loss_of(2.0)}]
)
def test_no_object_takes_the_place_of_what_the_recipe_names(other: dict[str, Any], tmp_path: Path) -> None:
    """The run's recipe would say something else than what ran."""
    run = interrupted(tmp_path / "run", model="mlp", data=DATA)
    with pytest.raises(RunError, match=f"was run with the {next(iter(other))} of its recipe"):
        simulations.resume(run, data=DATA, **other)


class Heavy:
    """Momentum that a checkpoint does not hold."""

    velocity: Any = 0.0

    def __init__(self, decay: float) -> None:
        self.decay = decay

    def step(self, model, mean_update):
        self.velocity = self.decay * self.velocity + mean_update
        mean_update.zero_()
        return model.add_(self.velocity)


def test_an_optimizer_starts_afresh_in_every_run_and_spoils_no_past_model(tmp_path: Path) -> None:
    step, digests = Heavy(0.5), []
    for name in ("one", "other"):
        given = {"model": Net, "data": DATA, "server_optimizer": step}
        digests.append(simulations.simulate(**given, overrides=SMALL, run_dir=tmp_path / name)["model_sha256"])
    assert digests[0] == digests[1]
    assert step.velocity == 0.0


def test_an_optimizer_without_a_state_to_restore_is_named_when_a_run_goes_on(tmp_path: Path) -> None:
    given = {"model": Net, "data": DATA, "server_optimizer": Heavy(0.5)}
    run = interrupted(tmp_path / "run", **given)
    with pytest.warns(Notice, match="server optimizer '<Heavy>' starts afresh"):
        simulations.resume(run, **given)


@pytest.mark.parametrize("given", [{"partition": halves}, {"model": Net}])
def test_what_takes_no_other_data_leaves_the_sets_own_keys(given: dict[str, Any]) -> None:
    raw = recipes.read("fashion-mnist")
    own_of(given).into(raw)
    assert raw["data"]["pixels"] == [0, 1]


def test_other_data_leave_the_keys_of_a_folder_of_images_behind() -> None:
    raw = recipes.read("lm-dp-sgd-celeba")
    own_of({"data": DATA}).into(raw)
    assert raw["data"] == {"name": "<DataSet>", "partition": "iid"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"overrides": "run.seed=1"}, "overrides are a list of .*, got a str: 'run.seed=1'"),
        ({"overrides": {"run.seed": 1}}, "overrides are a list of .*, got a dict"),
        ({"overrides": [1]}, "overrides are a list of .*, got 1 in it"),
        ({"trackers": "tensorboard"}, "trackers are a list .*, got the text 'tensorboard'"),
        ({"data": X}, "data set 'ndarray' must be a fedlgm.data.DataSet"),
    ],
)
def test_arguments_of_another_form_are_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FedlgmError, match=message):
        simulations.simulate(**given, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_epsilon_stands_without_its_guarantee(tmp_path: Path) -> None:
    result = simulations.simulate(**OBJECTS, overrides=(text for text in SMALL), run_dir=tmp_path / "run")
    assert re.search(r"epsilon \d.*, proven \(client-level, add-remove", repr(result))


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
        (Centred, "examples influence each other"),
        (Signed, "outputs for an example depend on the other examples"),
        (Sly, "an update depends on what was trained before"),
        (Untrainable, "training on 8 test examples fails: RuntimeError"),
    ],
)
def test_models_without_gradients_per_example_are_refused_before_anything_is_written(
    model: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulations.simulate("dp-sgd-digits", model=model, data=DATA, overrides=EXAMPLES, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_models_with_gradients_per_example_are_trained(tmp_path: Path) -> None:
    changes = [*EXAMPLES, "federation.rounds=1"]
    result = simulations.simulate("dp-sgd-digits", model=Net, data=DATA, overrides=changes, run_dir=tmp_path / "run")
    assert result["unit"] == "example"


def test_tasks_whose_losses_mix_examples_are_refused_where_examples_are_protected(tmp_path: Path) -> None:
    def relative(outputs, targets):
        losses = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
        return losses / losses.mean()

    given = {"model": Net, "data": DATA, "task": relative}
    with pytest.raises(ConfigError, match=r"the loss of an example depends on the other examples"):
        simulations.simulate("dp-sgd-digits", **given, overrides=EXAMPLES, run_dir=tmp_path / "run")
    assert simulations.simulate(**given, overrides=SMALL, run_dir=tmp_path / "clients")["unit"] == "client"
