"""Metrics of the whole test set: passed to a run, and defined by a task."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from own_objects import DATA, SMALL, Net
from rich.console import Console
from sklearn.metrics import f1_score, roc_auc_score

import simulations
from fedlgm.errors import ConfigError
from fedlgm.extension.testing import check_task
from fedlgm.training import tasks
from simulations.summaries.terminal import summary


def auc(outputs, targets):
    return roc_auc_score(targets, outputs[:, 1] - outputs[:, 0])


def macro_f1(outputs, targets):
    return f1_score(targets, outputs.argmax(dim=1), average="macro")


class Ranked(tasks.Task):
    """Logistic regression that is judged by its ranking."""

    name, headline, better = "ranked", "auc", "higher"

    def losses(self, outputs, targets):
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    def set_metrics(self):
        return {"auc": auc}


@pytest.fixture
def arrays() -> dict:
    return {"model": Net, "data": DATA}


@pytest.mark.parametrize(
    "given", [{"metrics": {"auc": auc, "f1 macro": macro_f1}}, {"task": Ranked()}]
)
def test_it_is_scikit_learns_figure_of_the_released_model(
    given: dict, arrays: dict, tmp_path: Path
) -> None:
    result = simulations.simulate(**arrays, **given, overrides=SMALL, run_dir=tmp_path / "run")
    with torch.no_grad():
        outputs = result.model()(torch.as_tensor(DATA["test"][0], dtype=torch.float32))
    targets = torch.as_tensor(DATA["test"][1])
    assert result.metrics["auc"] == pytest.approx(auc(outputs, targets), abs=1e-6)
    assert "loss" in result.metrics
    assert all("auc" in row["metrics"] for row in result.history if "metrics" in row)
    if "metrics" in given:
        assert result.metrics["f1 macro"] == pytest.approx(macro_f1(outputs, targets), abs=1e-6)
        assert result["headline"] == "accuracy"
    else:
        assert result["headline"] == "auc"
        assert "auc" in repr(result)


def test_every_metric_is_shown_and_shares_in_percent(arrays: dict, tmp_path: Path) -> None:
    metrics = {"auc": auc, "balanced accuracy": lambda outputs, targets: 0.25}
    result = simulations.simulate(
        **arrays, metrics=metrics, overrides=SMALL, run_dir=tmp_path / "run"
    )
    console = Console(width=200, file=io.StringIO())
    console.print(summary(dict(result)))
    for text in (console.file.getvalue(), result._repr_html_()):
        for shown in ("test accuracy", "test auc", "test balanced accuracy", "25.00%"):
            assert shown in text
        assert text.count("test accuracy") == 1
        assert "test loss" not in text


def test_metrics_change_nothing_in_a_run(arrays: dict, tmp_path: Path) -> None:
    plain = simulations.simulate(**arrays, overrides=SMALL, run_dir=tmp_path / "plain")
    measured = simulations.simulate(
        **arrays, overrides=SMALL, metrics={"auc": auc}, run_dir=tmp_path / "measured"
    )
    assert measured["model_sha256"] == plain["model_sha256"]
    again = simulations.resume(tmp_path / "measured", **arrays)  # without them, too
    assert again.metrics == measured.metrics


def test_a_task_with_metrics_of_the_set_passes_the_kit() -> None:
    assert check_task(Ranked(), torch.randn(8, 2), torch.arange(8) % 2).headline == "auc"


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (
            {"auc": lambda outputs, targets: np.nan},
            "metric 'auc' is nan on the test set of 50 examples",
        ),
        ({"auc": lambda outputs, targets: np.inf}, "metric 'auc' is inf"),
        ({"auc": lambda outputs, targets: outputs}, "metric 'auc' must return one number"),
        ({"auc": lambda outputs, targets: 1 / 0}, "metric 'auc': ZeroDivisionError"),
        ({"auc": 0.5}, r"metrics\['auc'\] must be a function"),
        ([auc], "metrics must be a mapping"),
        ({"loss": auc}, "metric 'loss': task 'classification' or the run reports one of that name"),
        (
            {"epsilon": auc},
            "metric 'epsilon': task 'classification' or the run reports one of that name",
        ),
        ({"seed": auc}, "metric 'seed': task 'classification' or the run reports one of that name"),
    ],
)
def test_what_cannot_be_reported_is_refused_before_anything_runs(
    metrics, message, arrays: dict, tmp_path
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulations.simulate(**arrays, metrics=metrics, overrides=SMALL, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_figure_of_the_released_model_cannot_take_the_place_of_epsilon(
    arrays: dict, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match="'claimed_epsilon', which the task or the run also reports"
    ):
        simulations.simulate(
            **arrays,
            evaluate=lambda round, module: {"claimed_epsilon": 0.1},
            overrides=SMALL,
            run_dir=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_figures_of_the_released_model_by_a_function_of_ones_own(
    arrays: dict, tmp_path: Path
) -> None:
    seen = []

    def evaluate(round: int, module: torch.nn.Module) -> dict[str, float]:
        assert not module.training
        seen.append(round)
        weights = torch.nn.utils.parameters_to_vector(module.parameters())
        return {"length": float(weights.norm())}

    plain = simulations.simulate(**arrays, overrides=SMALL, run_dir=tmp_path / "plain")
    result = simulations.simulate(
        **arrays, overrides=SMALL, evaluate=evaluate, run_dir=tmp_path / "run"
    )
    length = torch.nn.utils.parameters_to_vector(result.model().parameters()).detach().norm()
    assert result.metrics["length"] == pytest.approx(float(length))
    assert result.metrics.keys() - plain.metrics.keys() == {"length"}
    assert seen[0] == 0
    assert [*seen] == [row["round"] for row in result.history if "metrics" in row]
    assert [row["metrics"]["length"] for row in result.history if "metrics" in row][
        -1
    ] == result.metrics["length"]


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        (lambda round, module: 1 / 0, "evaluate"),
        (lambda round, module: [1.0], "must return {name: number}"),
        (lambda round, module: {"x": float("nan")}, "finite numbers by name"),
        ("auc", "must be a function|evaluate"),
        (0.5, "must be a function"),
    ],
)
def test_a_function_that_gives_no_figures_is_refused_before_the_run(
    evaluate: object, message: str, arrays: dict, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulations.simulate(**arrays, overrides=SMALL, evaluate=evaluate, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
