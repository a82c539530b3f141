"""The accuracy to expect, by rehearsals on public examples."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

import simulations
from fedlgm import mechanisms
from fedlgm.errors import ConfigError
from fedlgm.training import NativeTrainer, VectorizedTrainer, native
from fedlgm_lab.recommend import forecast, sweep
from fedlgm_lab.recommend.command import forecast_lines
from fedlgm_lab.recommend.forecast import Rehearsals, interval
from fedlgm_lab.recommend.setting import Setting, setting_of
from simulations.config import decided

LIGHT = [
    "federation.rounds=20",
    "training.epochs=1",
    "federation.rate=1.0",
    "federation.clients=100",
    "privacy.delta=1e-3",
    "data.name=digits/private",
]
GAUSSIAN = mechanisms.get("gaussian")


def _setting(*changes: str) -> Setting:
    return setting_of("digits", None, None, "digits/public", None, [*LIGHT, *changes], None)[0]


@pytest.mark.slow
def test_a_rehearsal_has_the_noise_of_the_run_and_is_the_same_on_every_call() -> None:
    setting = _setting()
    rehearsals = Rehearsals(setting)
    accuracies = [rehearsals.accuracy(GAUSSIAN, replace(setting.facts, noise_multiplier=z)) for z in (0.1, 0.1, 500.0)]
    assert accuracies[0] == accuracies[1] > 0.6
    assert accuracies[2] < 0.3  # nothing is learned through so much noise


@pytest.mark.skipif(native.reason() is not None, reason="no compiled kernel here")
def test_rehearsals_by_the_kernel_and_by_pytorch_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = _setting("federation.rounds=10")
    by_kernel = Rehearsals(setting)
    monkeypatch.setattr(decided, "_refusal", lambda assembly: "switched off")
    by_torch = Rehearsals(setting)
    trainers = [type(rehearsals._trainer) for rehearsals in (by_kernel, by_torch)]
    assert trainers == [NativeTrainer, VectorizedTrainer]
    found = [rehearsals.accuracy(GAUSSIAN, setting.facts) for rehearsals in (by_kernel, by_torch)]
    assert found[0] > 0.5
    assert found[1] == pytest.approx(found[0], abs=0.005)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["privacy.noise=banded", "federation.sampling=cyclic", "federation.rate=0.25"], "independent noise"),
        (["federation.rounds=400", "training.epochs=500"], "passes over an example"),
    ],
)
def test_a_run_that_no_rehearsal_stands_for_has_no_forecast_but_a_reason(changes: list[str], message: str) -> None:
    setting = _setting(*changes)
    rows, reason = forecast.forecasts(setting, "gaussian")
    assert rows == []
    assert message in reason


def test_mechanisms_whose_rounds_differ_are_refused() -> None:
    setting = _setting()
    with pytest.raises(ConfigError, match="not for adaptive"):
        Rehearsals(setting).accuracy(mechanisms.get("adaptive"), setting.facts)


@pytest.mark.slow
def test_recommend_forecasts_the_advised_rule_over_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "EPSILONS", (0.01, 100.0))
    found = simulations.recommend("digits", public="digits/public", overrides=LIGHT)
    low, high = found["forecasts"]
    assert low["accuracy"] < high["accuracy"]
    assert (low["low"], low["high"]) == interval(low["accuracy"])
    assert found["forecast_rule"] in found["advice"]
    assert f"{high['accuracy']:.1%}" in "\n".join(forecast_lines(dict(found)))  # type: ignore[arg-type]
    assert json.loads(json.dumps(dict(found)))["forecasts"] == found["forecasts"]


def test_a_sweep_forecasts_every_setting_from_public_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "EPSILONS", (8.0,))
    monkeypatch.setattr(sweep, "CLIENTS", (100, 1000))
    changes = ["federation.rounds=12", "training.epochs=1", "federation.rate=1.0", "privacy.delta=1e-4"]
    changes.append("data.name=digits/private")
    report = sweep.sweep_report("digits", changes, "digits/public")
    few, many = report["rows"]
    assert report["no_forecast"] == ""
    assert few["accuracy"] < many["accuracy"]  # a tenth of the noise on the mean
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(sweep.sweep_table(report))
    shown = console.export_text()
    assert f"{many['accuracy']:.1%}" in shown
    assert "epsilon 8,  1,000 clients" in shown
    assert "no public examples" in sweep.sweep_report("digits", changes)["no_forecast"]


def test_intervals_stay_within_shares() -> None:
    assert interval(0.02)[0] == 0.0
    assert np.diff(interval(0.5)) == pytest.approx(2 * forecast.ERROR)
