"""Early stopping: a public rule ends the run, the ledger holds what was made, and epsilon is that
of all rounds."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import simulations
from fedlgm import Guarantee, Mechanism, ReleasePlan
from fedlgm.errors import ConfigError
from fedlgm.privacy import AttackRates
from fedlgm.privacy.ledger import Ledger
from simulations.runs.folder import RunFolder
from simulations.runs.stopping import Patience
from simulations.summaries.ledgers import ledger_report

X = np.random.default_rng(0).standard_normal((60, 4)).astype("float32")
DATA = {"train": (X, (X[:, 0] > 0).astype(int)), "test": (X, (X[:, 0] > 0).astype(int))}
SHORT = {
    "federation.clients": 6,
    "federation.rounds": 6,
    "privacy.delta": 0.01,
    "privacy.accountant": "rdp",
    "federation.server_lr": 1e-9,
    "run.patience": 2,
    "run.evaluate_every": 1,
    "run.seed": 3,
}


def run(folder, engine="local", progress=None, **changes):
    torch.manual_seed(0)
    overrides = SHORT | {name.replace("__", "."): value for name, value in changes.items()}
    return simulations.simulate(
        model=torch.nn.Linear(4, 2),
        data=DATA,
        overrides=overrides,
        run_dir=folder,
        engine=engine,
        progress=progress,
    )


@pytest.mark.parametrize(
    ("values", "better", "holds"),
    [
        ([0.1, 0.2, 0.3], "higher", False),
        ([0.3, 0.3, 0.3], "higher", True),
        ([0.3, 0.2, 0.1], "lower", False),
        ([0.3, 0.4, 0.5], "lower", True),
        ([0.3, float("nan"), float("nan")], "higher", True),
        ([0.3, 0.2], "higher", False),
    ],
)
def test_the_rule(values, better, holds):
    rows = [{"metrics": {"f": value}} for value in values]
    assert Patience(2, "f", better).holds([rows[0], {"round": 9}, *rows[1:]]) is holds


def test_a_run_that_ends_with_a_round_without_clients_is_read_like_any_other(tmp_path):
    """Under local trust such a round is charged to nobody, so the ledger ends before the run
    does."""
    clients = {
        "federation__sampling": "poisson",
        "federation__rate": 1e-6,
        "privacy__trust": "local",
        "privacy__max_participations": 6,
    }
    result = run(tmp_path / "run", **clients)
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert ledger.rounds() == 0
    assert RunFolder.open(tmp_path / "run").verified_result()["rounds"] == result["rounds"] == 3


def test_a_model_that_does_not_improve_ends_the_run(tmp_path):
    result = run(tmp_path / "run")
    assert result["rounds"] == 3  # the first evaluation is the best one
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert ledger.rounds() == 3
        assert ledger.epsilon(0.01, "rdp") < 7
    assert (
        result.epsilon == 8
    )  # when it ended depends on the releases: the bound is that of all rounds
    bounds = AttackRates.of_budget(8, 0.01).figures()  # those of all rounds, as far as known
    assert result["attack_rates"] == result.attack_rates.figures() == bounds
    assert len(result.history) == 4
    assert result.model()(torch.zeros(1, 4)).shape == (1, 2)
    RunFolder.open(tmp_path / "run").verify()
    assert ledger_report(tmp_path / "run")["notes"][-1].endswith(
        "its epsilon is that of all 6 rounds, 8"
    )
    whole = run(tmp_path / "whole", run__patience=6)
    assert whole["rounds"] == 6
    assert whole.epsilon == 8
    assert whole["attack_rates"]["advantage"] < bounds["advantage"]
    assert not any("early" in note for note in ledger_report(tmp_path / "whole")["notes"])


def test_an_interrupted_run_stops_where_it_would_have_stopped(tmp_path):
    first = run(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    torch.manual_seed(0)
    again = simulations.resume(tmp_path / "run", model=torch.nn.Linear(4, 2), data=DATA)
    assert (again["rounds"], again["model_sha256"], again.epsilon) == (3, first["model_sha256"], 8)


def test_an_edited_epsilon_is_found(tmp_path):
    run(tmp_path / "run")
    file = tmp_path / "run" / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"epsilon": 4.0}))
    with pytest.raises(Exception, match="epsilon"):
        RunFolder.open(tmp_path / "run").verify()


def test_patience_is_at_least_one(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.patience: must be at least 1"):
        run(tmp_path / "run", run__patience=0)


@dataclass(frozen=True)
class Loud(Mechanism):
    """Noise for a larger budget than the recipe's."""

    def calibrate(self, facts):
        return 0.4 * super().calibrate(facts)

    def plan(self, layers, facts, transcript):
        clip, sigma = (
            np.full(len(layers), len(layers) ** -0.5),
            np.full(len(layers), facts.noise_multiplier),
        )
        return ReleasePlan(layers, clip, sigma, facts, Guarantee("proven", "bounded, then noised"))


def test_a_run_that_would_state_less_than_all_its_rounds_cost_is_refused(tmp_path):
    """It ended with "epsilon 8, proven", and all of its planned rounds cost more."""
    model, loud = torch.nn.Linear(4, 2), Loud("loud")
    with pytest.raises(ConfigError, match=r"run\.patience: .* all its rounds, which is 62\.\d+"):
        simulations.simulate(
            model=model, data=DATA, mechanism=loud, overrides=SHORT, run_dir=tmp_path / "run"
        )
    changes = SHORT | {"run.patience": None}
    whole = simulations.simulate(
        model=model, data=DATA, mechanism=loud, overrides=changes, run_dir=tmp_path / "all"
    )
    assert whole.epsilon > 60


def test_a_run_that_released_a_round_twice_is_not_ended(tmp_path):
    """The budget that it would state leaves the second release out."""

    def interrupted(row):
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", run__seed=None, progress=interrupted)
    (tmp_path / "run" / "private" / "keys").unlink()
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="released again"):
        result = simulations.resume(tmp_path / "run", model=torch.nn.Linear(4, 2), data=DATA)
    assert result["rounds"] == 6
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert result.epsilon == pytest.approx(ledger.epsilon(0.01, "rdp"))
    assert result.epsilon > 8
