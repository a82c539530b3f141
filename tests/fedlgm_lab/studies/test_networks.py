"""Studies over models: names, objects and classes as values of the grid's key "model"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_objects import DATA, Net
from torch import nn
from transformer_models import bert, gpt2, sentences

import simulations
from fedlgm.errors import ConfigError
from fedlgm_lab.studies import networks
from fedlgm_lab.studies.jobs import Job, grid_jobs
from fedlgm_lab.studies.results import Study
from fedlgm_lab.studies.study import base_of

CHANGES = {
    "federation.clients": 20, "federation.rounds": 2, "federation.rate": 0.5, "privacy.delta": 0.01,
    "privacy.accountant": "rdp", "privacy.epsilon": 1, "run.seed": 7,
}  # fmt: skip


def seeded() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(5, 2)


def planned(models: list[Any], **given: Any) -> list[Job]:
    grid = {"model": models}
    base, own, options = base_of(None, grid, {"data": DATA} | given, CHANGES)
    return grid_jobs(base, grid, range(2), options, own)


def test_models_of_transformers_have_the_default_recipe_of_a_single_run() -> None:
    models = [("small", gpt2()), ("large", gpt2())]
    for grid, optimizer in ((models, "adam"), ([*models, "mlp"], "sgd")):
        given = {"data": sentences(labels=False), "task": "causal-lm"}
        base, own, _ = base_of(None, {"model": grid}, given, CHANGES)
        assert base.training.optimizer == optimizer
        assert own.model is None
        assert base.task.name == "causal-lm"
    jobs = grid_jobs(base, {"model": models}, range(1), {}, own)
    assert [job.own.model for job in jobs] == [model for _, model in models]


def test_names_options_classes_and_objects_are_models() -> None:
    one, other = nn.Linear(5, 2), nn.Linear(5, 2)
    jobs = planned(
        ["logistic", ("wide", "mlp", {"hidden": [9]}), Net, ("one", one), ("other", other)]
    )
    assert [job.point["model"] for job in jobs[::2]] == ["logistic", "wide", "Net", "one", "other"]
    assert [job.recipe.model.name for job in jobs[::2]] == [
        "logistic",
        "mlp",
        "<Net>",
        "<Linear>",
        "<Linear>",
    ]
    assert jobs[2].recipe.model.options == {"hidden": [9]}
    assert [job.own.model for job in jobs[::2]] == [None, None, Net, one, other]
    assert (
        len({job.recipe.run.seed for job in jobs}) == len({job.folder for job in jobs}) == len(jobs)
    )  # own noise
    assert {job.recipe.model.seed for job in jobs[::2]} == {
        jobs[0].recipe.model.seed
    }  # paired starts
    assert jobs[0].recipe.model.seed != jobs[1].recipe.model.seed


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return compared(tmp_path_factory.mktemp("study"))


def compared(folder: Path, **more: Any) -> Study:
    grid = {"model": [Net, ("linear", seeded())], "mechanism": ["uniform", "gaussian"]}
    return simulations.study(
        data=DATA, grid=grid, seeds=2, overrides=CHANGES, folder=folder, progress=False, **more
    )


def test_models_are_compared_by_seed(finished: Study) -> None:
    frame = finished.to_frame()
    assert set(frame["model"]) == {"Net", "linear"}
    assert (frame["status"] == "finished").all()
    found = finished.difference("Net", "linear", by="model")
    assert found.cells["method"].tolist() == ["uniform", "gaussian"]
    pairs = frame[frame["method"] == "uniform"].pivot(
        index="seed", columns="model", values="accuracy"
    )
    assert found.cells["mean"][0] == pytest.approx((pairs["Net"] - pairs["linear"]).mean())
    assert finished.difference("uniform", "gaussian", at={"model": "Net"}).seeds == 2
    assert str(finished.difference("Net", "linear")) == str(
        found
    )  # only one key of the grid has these values
    with pytest.raises(ConfigError, match="no model 'net' in this study; it has Net, linear"):
        finished.difference("net", "linear", by="model")
    with pytest.raises(
        ConfigError, match="by: 'modle' is not a key of this study; it has method, mechanism, model"
    ):
        finished.difference("Net", "linear", by="modle")


def test_a_second_call_in_other_processes_runs_nothing(finished: Study) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.folder.rglob("result.json")}
    again = compared(finished.folder, workers=2)
    assert again.to_frame().equals(finished.to_frame())
    assert {
        path: path.stat().st_mtime_ns for path in finished.folder.rglob("result.json")
    } == before


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([Net, Net], "two models have the label 'Net'"),
        ([7], r"an entry of grid\['model'\] must be a name"),
        ([("a", 7)], r"an entry of grid\['model'\] must be a name"),
        ([("a", "mlp", 7)], r"an entry of grid\['model'\] must be a name"),
        ([("a", Net, {"hidden": [8]})], "a model object takes no further options"),
        ([("a", "mlp", {"hiden": [8]})], "'a': mlp has no option 'hiden'; did you mean 'hidden'"),
        (["mpl"], "unknown model 'mpl'"),
    ],
)
def test_what_is_no_model_is_refused(models: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(models)


def test_a_model_comes_from_the_grid_or_from_an_argument(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give it in the grid or as an argument, not in both"):
        planned(["mlp"], model=Net)
    with pytest.raises(
        ConfigError, match=r"overrides of \[model\]: the models are in grid\['model'\]"
    ):
        simulations.study(
            grid={"model": ["mlp"]}, overrides={"model.hidden": [3]}, folder=tmp_path / "study"
        )


def test_the_models_have_one_task() -> None:
    assert networks.task_of([gpt2(), ("other", gpt2())]) == "causal-lm"
    with pytest.raises(ConfigError, match="different tasks"):
        networks.task_of([gpt2(), bert()])
