"""A sweep over budgets and populations is the plan of each of its settings."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedlgm.errors import ConfigError
from fedlgm_lab.recommend import sweep
from simulations.cli import app
from simulations.config import recipe as recipes
from simulations.summaries.planning import plan_report


@pytest.fixture(autouse=True)
def _one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration is what takes time, once per budget where the rate is fixed."""
    assert (sweep.EPSILONS, sweep.CLIENTS) == ((1, 2, 4, 8), (100, 300, 1000, 3000, 10000))
    monkeypatch.setattr(sweep, "EPSILONS", (8.0,))


def test_an_entry_is_the_plan_of_its_setting() -> None:
    changes = ["federation.rounds=5", "privacy.accountant='rdp'"]
    options = [word for change in changes for word in ("--set", change)]
    result = CliRunner().invoke(app, ["plan", "digits", *options, "--sweep", "--json"])
    report = json.loads(result.stdout)
    assert [row["clients"] for row in report["rows"]] == list(sweep.CLIENTS)
    row = report["rows"][2]
    plan = plan_report(recipes.load("digits", [*changes, "federation.clients=1000"]))
    assert row["delta"] == plan["delta"] == 1e-5
    assert row["noise_multiplier"] == plan["noise_multiplier"]
    assert row["noise_on_mean"] == plan["noise_multiplier"] / (0.1 * 1000)
    assert row["snr"] == {layer["layer"]: layer["snr"] for layer in plan["layers"]}


@pytest.mark.parametrize(
    "changes",
    [["privacy.noise_multiplier=2"], ["privacy.epsilon=none", "privacy.noise_multiplier=2"]],
)
def test_a_fixed_noise_leaves_no_budget_to_vary(changes: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"from which the noise follows: leave out --set privacy.noise_multiplier"
    ):
        sweep.sweep_report("digits", changes)


def test_delta_stays_below_one_over_the_clients() -> None:
    report = sweep.sweep_report(
        "digits", ["federation.rounds=1", "privacy.delta=0.002", "federation.rate=1.0"]
    )
    deltas = {row["clients"]: row["delta"] for row in report["rows"]}
    assert deltas == {
        100: 0.002,
        300: 0.002,
        1000: 0.1 / 1000,
        3000: 0.1 / 3000,
        10000: 0.1 / 10000,
    }
    assert "0.002 where it is below 1/clients" in report["delta"]


def test_a_refused_setting_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "CLIENTS", (100, 300))
    changes = ["federation.rounds=1", "federation.cohort=300"]
    report = sweep.sweep_report("digits", changes)
    refused = [row for row in report["rows"] if "refused" in row]
    assert [row["clients"] for row in refused] == [100]
    assert all("300" in row["refused"] and "snr" not in row for row in refused)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(sweep.sweep_table(report))
    shown = console.export_text()
    assert "refused at epsilon 8, 100 clients: " + refused[0]["refused"] in shown
    assert "SNR fc1" in shown
    assert "delta: the recipe's 1e-05" in shown
    assert "epsilon 8,    300 clients #" in shown


@pytest.mark.parametrize(
    ("recipe", "changes", "noises", "said"),
    [
        (
            "digits",
            [],
            1.0,
            "k = 1 releases' noise in a sum of q N contributions, under central trust",
        ),
        (
            "digits",
            ["privacy.trust='local'", "privacy.max_participations=1"],
            10.0,
            "under local trust",
        ),
        (
            "distributed-digits",
            ["distributed.threshold=60"],
            100 / 57,
            "k = 1.75439 releases' noise",
        ),
    ],
)
def test_the_noise_on_the_mean_counts_the_releases_in_a_sum(
    recipe: str, changes: list[str], noises: float, said: str
) -> None:
    report = sweep.sweep_report(recipe, ["federation.rounds=1", *changes])
    row = report["rows"][0]
    assert row["noises_in_sum"] == pytest.approx(noises)
    assert row["noise_on_mean"] == pytest.approx(
        row["noise_multiplier"] * noises**0.5 / row["expected_cohort"]
    )
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(sweep.sweep_table(report))
    assert said in console.export_text()


@pytest.mark.parametrize(
    ("recipe", "changes", "said"),
    [
        ("digits", ["privacy.epsilon=3"], "varies privacy.epsilon"),
        ("digits", ["federation.clients=70"], "varies federation.clients"),
        ("dp-sgd-digits", [], "protects examples"),
    ],
)
def test_what_a_sweep_cannot_vary_is_refused(recipe: str, changes: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sweep.sweep_report(recipe, changes)


@pytest.mark.parametrize(
    "change", ["model.hidden=[0]", "data.name=nothing", "mechanism.name=nothing"]
)
def test_a_recipe_that_no_setting_permits_is_refused_once(change):
    with pytest.raises(
        ConfigError, match=change.partition("=")[0].replace("mechanism.name", "unknown mechanism")
    ):
        sweep.sweep_report("digits", [change])
