"""What newcomers are told where earlier ones were stopped: each mistake leads to its remedy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from flwr.server import ServerAppComponents, ServerConfig

import simulations
from fedlgm import RunFacts, Sampling, mechanisms, queries
from fedlgm.errors import ConfigError, FedlgmError
from fedlgm.mechanisms.method import Method
from simulations.exports.predict import predict
from strategies import PrivateFedAvg

TABLES = {"train": "sites/*.csv", "test": "test.csv", "target": "benign"}
DATA = {
    part: (np.zeros((40, 3), dtype=np.float32), np.arange(40) % 2) for part in ("train", "test")
}


def method(**facts):
    facts = RunFacts(sampling=Sampling("poisson", 100, 0.1), rounds=10, delta=1e-5, **facts)
    return Method.of(torch.nn.Linear(3, 2), mechanisms.get("dp-sgd"), facts)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        # the Opacus user
        (lambda: mechanisms.get("dp-sgd", max_grad_norm=1.0), "did you mean 'bound'?"),
        (
            lambda: simulations.simulate("dp-sgd-digits", max_grad_norm=1.0),
            "overrides={'mechanism.bound': 1.0}",
        ),
        (
            lambda: simulations.load_recipe("dp-sgd-digits", ["privacy.target_epsilon=8"]),
            "did you mean 'privacy.epsilon'?",
        ),
        (
            lambda: method(noise_multiplier=5.0, epsilon=8.0),
            "noise_multiplier = 5 and epsilon = 8 are both given, but this epsilon needs 0.61",
        ),
        # the hospital statistician
        (
            lambda: simulations.load_recipe("ten-hospitals", ["task.name=cox"]),
            "use the task 'hazards' (discrete time)",
        ),
        (lambda: simulations.simulate(data=TABLES), "there is no file 'test.csv'"),
        # the researcher with a statistic of their own
        (lambda: queries.get("mean-norm", [3]), "fedlgm.queries.register(ITS_CLASS)"),
        # the Flower user
        (
            lambda: PrivateFedAvg(
                torch.nn.Linear(3, 2),
                epsilon=8,
                delta=1e-2,
                clients=10,
                rounds=3,
                ledger="l.sqlite",
                fraction_fit=0.5,
            ),
            "rate is the probability with which a client takes part",
        ),
    ],
)
def test_a_mistake_is_answered_by_its_remedy(call, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedlgmError) as refused:
        call()
    assert said in str(refused.value)


def test_flowers_older_interface_leads_to_start(tmp_path):
    strategy = PrivateFedAvg(
        torch.nn.Linear(3, 2), epsilon=8, delta=1e-2, clients=10, rounds=3,
        ledger=tmp_path / "ledger.sqlite",
    )  # fmt: skip
    ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=1))
    with pytest.raises(ConfigError, match=r"call PrivateFedAvg\(\.\.\.\)\.start\(grid\)"):
        strategy.initialize_parameters(None)


def test_a_noise_multiplier_gives_its_epsilon(run):
    assert simulations.load_recipe(
        "dp-sgd-digits", ["privacy.noise_multiplier=2"]
    ).privacy.epsilon == pytest.approx(3.66, abs=0.01)
    options = "--noise-multiplier 0.60944 --sampling-rate 0.03125 --steps 64 --delta 1e-5"
    status, out, _ = run("calibrate", *options.split())
    assert status == 0
    assert "gives epsilon 6.664700" in " ".join(out.split())


def test_the_history_begins_with_the_metrics_before_training(tmp_path):
    result = simulations.simulate(
        model=torch.nn.Linear(3, 2), data=DATA, run_dir=tmp_path / "run",
        overrides={"federation.clients": 10, "federation.rounds": 1, "privacy.epsilon": 1},
    )  # fmt: skip
    assert [row["round"] for row in result.history] == [0, 1]
    assert 0 <= result.history[0]["accuracy"] <= 1


def test_files_of_hospitals_end_in_named_coefficients_and_predictions(tmp_path, monkeypatch):
    """With a column of text and gaps, which a prediction encodes and fills alike."""
    monkeypatch.chdir(tmp_path)
    Path("sites").mkdir()
    random = np.random.default_rng(0)

    def write(file: str, rows: int) -> None:
        age = random.normal(60, 9, rows).round()
        sex = random.choice(["F", "M"], rows)
        table = pandas.DataFrame({"age": age, "sex": sex, "benign": (age < 60).astype(int)})
        table.loc[0, "age"] = None
        table.to_csv(file, index=False)

    write("test.csv", 40)
    for i in range(3):
        write(f"sites/hospital-{i}.csv", 60)
    encoding = {"categories": {"sex": ["F", "M"]}, "fill": {"age": 60}}
    result = simulations.simulate(
        "ten-hospitals",
        data={**TABLES, **encoding, "standardise": "test"},
        overrides={"federation.rounds": 10, "privacy.accountant": "rdp"},
        run_dir=tmp_path / "run",
    )
    assert list(result.coefficients().index) == ["age", "sex=M", "(intercept)"]
    result.export(tmp_path / "m.safetensors")
    Path("new.csv").write_text("sex,age\nM,50\nF,\nF,70\n")
    predicted = predict(tmp_path / "m.safetensors", "new.csv").frame.iloc[:, 0]
    weights = result.coefficients().iloc[:, 0]
    age = {column["name"]: column for column in result._assembly.data.dataset.columns}["age"]
    rows = np.array([[50, 1], [60, 0], [70, 0]], dtype=float)
    rows[:, 0] = (rows[:, 0] - age["mean"]) / age["deviation"]
    logits = rows @ weights[:2].to_numpy() + weights["(intercept)"]
    np.testing.assert_allclose(predicted, 1 / (1 + np.exp(-logits)), rtol=1e-4)
    Path("new.csv").write_text("sex,age\nX,50\n")
    with pytest.raises(FedlgmError, match="other values of 'sex' than its categories"):
        predict(tmp_path / "m.safetensors", "new.csv")
