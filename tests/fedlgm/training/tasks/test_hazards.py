"""Discrete-time hazards: loss, targets and concordance against independent computations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import simulations
from fedlgm.errors import ConfigError, DataError
from fedlgm.training import tasks
from fedlgm.training.tasks.hazards import Hazards, concordance
from simulations.exports.predict import predict

BREAKS = [6, 12, 24]
ROWS = np.array([[3, 1], [6, 1], [6, 0], [7, 0], [24, 1], [24, 0], [30, 1], [2, 0]], dtype=float)


def test_targets_follow_the_times_of_events_and_censoring():
    codes = Hazards(BREAKS).targets(ROWS, "training")[..., 0]
    np.testing.assert_array_equal(
        codes,
        [
            [1, -1, -1],
            [1, -1, -1],
            [0, -1, -1],
            [0, -1, -1],
            [0, 0, 1],
            [0, 0, 0],
            [0, 0, 0],  # after the follow-up
            [-1, -1, -1],
        ],
    )


def test_the_loss_is_the_negative_log_likelihood_of_the_hazards():
    task = Hazards(BREAKS)
    logits = torch.randn(len(ROWS), 3, generator=torch.Generator().manual_seed(0))
    targets = torch.from_numpy(task.targets(ROWS, "training"))
    hazard = torch.sigmoid(logits).numpy()
    likelihood = [
        hazard[0, 0],
        hazard[1, 0],
        1 - hazard[2, 0],
        1 - hazard[3, 0],
        (1 - hazard[4, 0]) * (1 - hazard[4, 1]) * hazard[4, 2],
        np.prod(1 - hazard[5]),
        np.prod(1 - hazard[6]),
        1.0,
    ]
    np.testing.assert_allclose(
        task.losses(logits, targets), -np.log(likelihood), rtol=1e-4, atol=1e-6
    )


def test_the_concordance_counts_comparable_pairs():
    task, random = Hazards([1, 2, 3, 4]), np.random.default_rng(0)
    rows = np.stack([random.integers(1, 6, 40), random.integers(0, 2, 40)], 1).astype(float)
    logits = torch.from_numpy(random.normal(size=(40, 4)))
    codes = task.targets(rows, "test")[..., 0]
    survival = np.cumprod(1 - torch.sigmoid(logits).numpy(), axis=1).sum(1)
    events, lasted = (codes == 1).any(1), (codes == 0).sum(1)
    right = count = 0.0
    for i in range(40):
        for j in range(40):
            if (
                events[i]
                and i != j
                and (lasted[i] < lasted[j] or (lasted[i] == lasted[j] and not events[j]))
            ):
                count += 1
                right += (survival[i] < survival[j]) + 0.5 * (survival[i] == survival[j])
    assert concordance(logits, torch.from_numpy(codes[..., None])) == pytest.approx(right / count)


@pytest.mark.parametrize("breaks", [[], [0, 6], [12, 6], "six", [float("nan")]])
def test_breaks_are_positive_and_rising(breaks):
    with pytest.raises(ConfigError, match="breaks must be the rising ends"):
        Hazards(breaks)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (ROWS[:, 0], "needs two numbers per row"),
        (-ROWS, "times of at least 0"),
        (ROWS * 2, "events 0"),
    ],
)
def test_other_targets_are_refused(rows, said):
    with pytest.raises(DataError, match=said):
        Hazards(BREAKS).targets(rows, "training")


@pytest.mark.parametrize("name", ["cox", "CoxPH"])
def test_cox_is_refused_with_the_remedy(name):
    with pytest.raises(
        ConfigError, match=r"compares each patient with all others at risk.*'hazards'"
    ):
        tasks.get(name)


def test_a_run_on_tables_is_proven_and_names_its_coefficients(tmp_path):
    import pandas

    random = np.random.default_rng(0)
    age = random.normal(size=400)
    months = random.exponential(20 * np.exp(-age))
    table = pandas.DataFrame(
        {"age": age, "months": months.clip(max=36), "died": (months < 36).astype(int)}
    )
    result = simulations.simulate(
        "ten-hospitals",
        data={"train": table[:300], "test": table[300:], "target": ["months", "died"]},
        users=np.arange(300) % 5,
        overrides={
            "task.name": "hazards", "task.breaks": [6, 12, 24, 36], "federation.rounds": 20,
            "privacy.delta": 1e-3, "privacy.accountant": "rdp", "run.seed": 1,
        },
        run_dir=tmp_path / "run",
    )  # fmt: skip
    assert result.guarantee.startswith("proven (example-level")
    assert result.metrics["concordance"] > 0.6
    assert result.coefficients().shape == (2, 4)
    assert list(result.coefficients().index) == ["age", "(intercept)"]
    intervals = ["0 to 6", "6 to 12", "12 to 24", "24 to 36"]
    assert list(result.coefficients().columns) == intervals
    table[300:303].to_csv(tmp_path / "rows.csv", index=False)
    result.export(tmp_path / "m.safetensors")
    predicted = predict(tmp_path / "m.safetensors", tmp_path / "rows.csv").frame
    assert list(predicted.columns) == intervals
    weights = result.coefficients().to_numpy()
    np.testing.assert_allclose(predicted, age[300:303, None] * weights[0] + weights[1], rtol=1e-4)
