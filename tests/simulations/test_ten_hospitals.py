"""Ten hospitals with tables: the bundled recipe, one's own tables, AUC, and a file that runs
without PyTorch."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pandas
import pytest
import torch
from sklearn.metrics import roc_auc_score

import simulations
from fedlgm import data
from fedlgm.errors import ConfigError
from simulations.runs.folder import RunFolder

METRICS = {"auc": lambda outputs, targets: roc_auc_score(targets, outputs)}


def test_the_bundled_table_has_ten_sites_and_is_standardised_by_its_public_part():
    found = data.load("breast-cancer")
    assert (found.train_x.shape, found.test_x.shape, found.classes) == ((456, 30), (113, 30), 2)
    assert np.unique(found.train_user, return_counts=True)[1].min() >= 45
    np.testing.assert_allclose(found.test_x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(found.test_x.std(0), 1, atol=1e-4)


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
def test_auc_at_epsilon_8_is_at_least_97_percent(seed, tmp_path):
    changes = {"run.seed": seed, "privacy.accountant": "rdp"}
    result = simulations.simulate(
        "ten-hospitals", metrics=METRICS, run_dir=tmp_path / "run", overrides=changes
    )
    assert result.metrics["auc"] >= 0.97
    assert result.epsilon <= 8
    assert result.guarantee.startswith("proven (example-level")


@pytest.mark.slow
def test_a_run_of_ones_own_objects_is_exported_without_further_arguments(tmp_path):
    random = np.random.default_rng(0)
    table = pandas.DataFrame(random.standard_normal((200, 3)), columns=["a", "b", "c"])
    table["out"], table["site"] = (
        (table["a"] > 0).astype(int),
        [f"site {i % 3}" for i in range(200)],
    )
    result = simulations.simulate(
        "ten-hospitals", model=torch.nn.Linear(3, 1), users="site", run_dir=tmp_path / "run",
        data={"train": table, "test": table[:40].drop(columns="site"), "target": "out"},
        overrides={"federation.rounds": 2, "privacy.accountant": "rdp"},
    )  # fmt: skip
    result.export(tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    x = table[["a", "b", "c"]].to_numpy("float32")[:7]
    (scores,) = session.run(None, {session.get_inputs()[0].name: x})
    with torch.no_grad():
        np.testing.assert_allclose(
            scores, result.model()(torch.from_numpy(x)), rtol=1e-5, atol=1e-6
        )
    with pytest.raises(ConfigError, match=r"must name a format: \.safetensors, \.pt, \.onnx"):
        result.export(tmp_path / "m.h5")


def test_all_of_few_sites_take_part_unless_the_caller_says_otherwise(tmp_path):
    x, y = np.random.default_rng(0).standard_normal((60, 4)), np.arange(60) % 2
    options = {
        "model": torch.nn.Linear(4, 2),
        "data": {"train": (x, y), "test": (x, y)},
        "users": np.arange(60) % 5,
    }
    short = {"federation.rounds": 1, "privacy.delta": 0.01, "privacy.accountant": "rdp"}
    for name, changes, rate, cohort in (
        ("all", {}, 1.0, None),
        ("two", {"federation.cohort": 2}, None, 2),
    ):
        result = simulations.simulate(**options, overrides=short | changes, run_dir=tmp_path / name)
        federation = RunFolder.open(result.folder).recipe().federation
        assert (federation.clients, federation.rate, federation.cohort) == (5, rate, cohort)
