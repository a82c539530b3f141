"""Runs of objects go on with the same objects only, recognised by what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import simulations
from fedlgm.errors import ConfigError, FedlgmError, Notice, RunError
from fedlgm.training import devices
from simulations import launch
from simulations.exports.export import export
from simulations.runs.folder import RunFolder
from tests.support.own_objects import (
    DATA,
    OBJECTS,
    SMALL,
    Alike,
    Net,
    X,
    Y,
    halves,
    interrupted,
    loss_of,
)


def test_a_run_of_objects_continues_with_the_same_objects_only(tmp_path: Path) -> None:
    whole = simulations.simulate(**OBJECTS, overrides=SMALL, run_dir=tmp_path / "whole")

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt) as stopped:
        simulations.simulate(**OBJECTS, overrides=SMALL, run_dir=run, progress=stop)
    (note,) = stopped.value.__notes__
    assert note.startswith(f"continue the run with simulations.resume({str(run)!r}, model=..., ")
    with pytest.raises(FedlgmError, match="was passed as a Python object"):
        launch.resume(run)
    with pytest.raises(RunError, match="another data"):
        simulations.resume(
            run, **OBJECTS | {"data": {"train": (X + 1, Y), "test": (X[:50], Y[:50])}}
        )
    with pytest.raises(RunError, match="another mechanism"):
        simulations.resume(run, **OBJECTS | {"mechanism": Alike("alike", bound=0.6)})
    assert simulations.resume(run, **OBJECTS)["model_sha256"] == whole["model_sha256"]


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
        "model": Net,
        "data": DATA,
        "task": loss_of(level),
        "partition": shifted,
        "server_optimizer": Slower(lr),
    }


def test_a_run_of_objects_continues_in_another_process(tmp_path: Path) -> None:
    """Objects are recognised by what they are: their addresses, which their texts show, change with
    the process."""
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


def test_a_run_with_users_continues_with_the_same_argument(tmp_path: Path) -> None:
    users = np.arange(len(DATA["train"][1])) % 20
    whole = simulations.simulate(
        model=Net, data=DATA, users=users, overrides=SMALL, run_dir=tmp_path / "run"
    )
    again = simulations.resume(tmp_path / "run", model=Net, data=DATA, users=users)
    assert again["model_sha256"] == whole["model_sha256"]
    with pytest.raises(RunError, match="another division of the data"):
        simulations.resume(tmp_path / "run", model=Net, data=DATA, users=users[::-1])


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
    with pytest.raises(
        ConfigError, match="frozen parameters and buffers of Sequential are not those"
    ):
        export(run, module=fine_tuned(2), out=tmp_path / "wrong.safetensors")
    export(run, module=fine_tuned(1), out=tmp_path / "model.safetensors")
    state = load_file(tmp_path / "model.safetensors")
    assert all(
        torch.equal(state[name], value) for name, value in result.model().state_dict().items()
    )


def test_data_are_recognised_by_whose_they_are_too(tmp_path: Path) -> None:
    by_turns, in_blocks = np.arange(200) % 20, np.arange(200) // 10
    run = interrupted(tmp_path / "run", model=Net, data=DATA | {"users": by_turns})
    with pytest.raises(RunError, match="another division of the data"):
        simulations.resume(run, model=Net, data=DATA | {"users": in_blocks})
    assert simulations.resume(run, model=Net, data=DATA | {"users": by_turns})["rounds"] == 3


OWNERS = np.arange(200) % 20


def held() -> dict[str, Any]:
    """A data set that a recipe names, of the owners that are current."""
    return DATA | {"users": OWNERS.copy()}


def test_data_that_a_recipe_names_are_recognised_by_their_rows_and_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    run = tmp_path / "run"
    named = [f"data.name={__name__}:held", "data.partition=natural"]
    with pytest.raises(KeyboardInterrupt):
        simulations.simulate(overrides=[*SMALL, *named], run_dir=run, progress=stop)
    assert RunFolder(run).provenance.read()["rows"].startswith("hmac-")
    monkeypatch.setitem(globals(), "OWNERS", np.roll(OWNERS, 1))
    with pytest.raises(RunError, match="other examples, or with another division"):
        simulations.resume(run)
    monkeypatch.undo()
    assert simulations.resume(run)["rounds"] == 3


@pytest.mark.parametrize(
    "other",
    [
        {"mechanism": Alike("alike")},
        {"partition": halves},
        {"model": Net()},
        {"task": loss_of(2.0)},
    ],
)
def test_no_object_takes_the_place_of_what_the_recipe_names(
    other: dict[str, Any], tmp_path: Path
) -> None:
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
        digests.append(
            simulations.simulate(**given, overrides=SMALL, run_dir=tmp_path / name)["model_sha256"]
        )
    assert digests[0] == digests[1]
    assert step.velocity == 0.0


def test_an_optimizer_without_a_state_to_restore_is_named_when_a_run_goes_on(
    tmp_path: Path,
) -> None:
    given = {"model": Net, "data": DATA, "server_optimizer": Heavy(0.5)}
    run = interrupted(tmp_path / "run", **given)
    with pytest.warns(Notice, match="server optimizer '<Heavy>' starts afresh"):
        simulations.resume(run, **given)


@pytest.mark.usefixtures("undrawn")
def test_a_finished_run_opens_from_another_directory_and_after_a_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    made = simulations.simulate(overrides={"federation.rounds": 1}, run_dir="my run")
    monkeypatch.chdir(tmp_path / "there")
    for where in (tmp_path / "here" / "my run", tmp_path / "there" / "moved"):
        if not where.exists():
            (tmp_path / "here" / "my run").rename(where)
        found = simulations.resume(where)
        assert found.folder == where
        assert found.report() == where / "report.html"
        assert (len(found.history), found["model_sha256"]) == (2, made["model_sha256"])


def test_a_finished_run_opens_on_a_machine_without_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = simulations.simulate(overrides=SMALL, run_dir=tmp_path / "run")
    monkeypatch.setattr(devices, "available_devices", lambda: ["mps"])
    with pytest.raises(ConfigError, match="'cpu' is not available"):
        devices.resolve("cpu")
    opened = simulations.resume(tmp_path / "run")
    assert opened["model_sha256"] == finished["model_sha256"]
    assert all(torch.isfinite(weights).all() for weights in opened.model().parameters())
