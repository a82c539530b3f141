"""Measured attacks beside the bound on all attacks: for the operator, and loud if they exceed it."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest

from fedlgm.errors import RunError
from fedlgm.privacy import AttackRates, attack_rates
from fedlgm_lab.attacks.membership import evaluate_scores
from fedlgm_lab.attacks.runs import results_file
from fedlgm_lab.reports import report
from fedlgm_lab.reports.measured import MeasuredRate, Measurements
from simulations import launch
from simulations.config import recipe as recipes
from simulations.runs.folder import RunFolder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from federations import tiny_values

    values = tiny_values()
    values["run"] = values.get("run", {}) | {"audit": True}
    folder = tmp_path_factory.mktemp("measured") / "run"
    launch.simulate(recipes.Recipe.model_validate(values), run_dir=folder, trackers=[])
    return folder


def scores(shift: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.normal(shift, size=4000), rng.normal(size=4000)


@pytest.mark.usefixtures("undrawn")
def test_results_are_shown_to_the_operator_only(run: Path) -> None:
    folder = RunFolder.open(run)
    weak, strong = evaluate_scores(*scores(0.05)), evaluate_scores(*scores(4.0))
    results_file.keep(folder, "client", {"loss": weak})
    results_file.keep(folder, "example", {"loss": strong})
    assert stat.S_IMODE((run / "private/attacks.json").stat().st_mode) == 0o600
    report.write_report(run)
    report.write_report(run, private=True)
    public = (run / "report.html").read_text()
    private = (run / "private/report.html").read_text()
    assert "loss (clients)" not in public
    assert "No measured attack contradicts the bound: loss (clients)" in private
    assert "The audit shows an epsilon of at least" in private
    assert "Not shown: loss (examples). The bounds are about clients." in private


@pytest.mark.usefixtures("undrawn")
def test_a_rate_above_the_bound_is_said_first(run: Path) -> None:
    folder = RunFolder.open(run)
    results_file.keep(folder, "client", {"loss": evaluate_scores(*scores(5.0))})
    report.write_report(run, private=True)
    assert (
        "Measured attacks find more than the bound allows"
        in (run / "private/report.html").read_text()
    )
    results_file.keep(folder, "client", {"loss": evaluate_scores(*scores(0.05))})
    report.write_report(run, private=True)
    assert "find more than the bound" not in (run / "private/report.html").read_text()


def test_the_best_attack_on_a_gaussian_release_does_not_contradict_its_bound() -> None:
    """Scores of the optimal test lie on the curve; their intervals leave it in few cases."""
    bounds, rng = attack_rates(1.0), np.random.default_rng(2)
    contradictions = 0
    for _ in range(40):
        result = evaluate_scores(rng.normal(1.0, size=3000), rng.normal(size=3000))
        rates = tuple(MeasuredRate("optimal", **vars(rate)) for rate in result.rates)
        contradictions += bool(Measurements("client", rates).excesses(bounds))
    assert contradictions <= 4
    half = evaluate_scores(rng.normal(2.0, size=3000), rng.normal(size=3000))  # half of the noise
    rates = tuple(MeasuredRate("optimal", **vars(rate)) for rate in half.rates)
    assert Measurements("client", rates).excesses(bounds)


def test_the_audits_line_touches_the_exact_curve() -> None:
    """For the exact epsilon at this delta, the line is a tangent of the trade-off curve."""
    from fedlgm.privacy import gaussian_epsilon

    alarms, bounds = np.logspace(-6, 0, 4001), attack_rates(1.0)
    line = Measurements("client", audited=(gaussian_epsilon(1.0, 1e-3), 1e-3)).line(alarms)
    assert line is not None
    curve = np.array([bounds.tpr(float(share)) for share in alarms])
    assert (curve <= line + 1e-6).all()
    assert np.min(line - curve) < 1e-4
    above = Measurements("client", audited=(gaussian_epsilon(1.0, 1e-3) + 0.1, 1e-3)).line(alarms)
    assert above is not None
    inside = above < 1
    assert np.min((above - curve)[inside]) > 1e-5  # a larger epsilon would contradict the curve


def test_a_damaged_file_is_named(run: Path) -> None:
    file = run / "private/attacks.json"
    file.write_text('{"loss": {"unit": "client", "rates": [{"fpr": 0.1}]}}')
    with pytest.raises(RunError, match=r"attacks\.json is damaged"):
        report.write_report(run, private=True)
    file.unlink()


def test_bounds_of_a_budget_alone_take_measurements_too() -> None:
    rate = MeasuredRate("an attack", 0.01, 0.02, 0.01, 0.04, 0.02)
    assert not Measurements("client", (rate,)).excesses(AttackRates.of_budget(1.0, 1e-5))
