"""Runs whose noise is added in shares: one model everywhere, void rounds, two epsilons, and wrong
recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import simulations
from fedlgm.errors import ConfigError, FedlgmError
from fedlgm.privacy.ledger import Ledger
from fedlgm_lab.audits import Audit
from fedlgm_lab.audits.runs.targets import audit_recipe, audit_run
from simulations.config import recipe as recipes
from simulations.runs.folder import RunFolder
from simulations.summaries.ledgers import ledger_report
from simulations.summaries.planning import plan_report

RECIPE = "distributed-digits"
SHORT = {
    "federation.clients": 10,
    "federation.rounds": 2,
    "distributed.threshold": 7,
    "distributed.colluders": 1,
}


def simulate(path: Path, engine: str = "local", **changes) -> simulations.RunResult:
    return simulations.simulate(
        RECIPE, overrides={**SHORT, **changes}, engine=engine, run_dir=str(path)
    )


def test_the_model_does_not_depend_on_the_order_of_addition(tmp_path):
    """Other blocks of clients add up in another order: integers give the same sum, bit by bit."""
    models = {
        simulate(tmp_path / str(size), **{"run.block_size": size, "training.vectorize": "off"})[
            "model_sha256"
        ]
        for size in (1, 3, 8)
    }
    assert len(models) == 1


def test_skellam_shares_run_on_the_same_grid_at_the_same_budget(tmp_path):
    one, other = (
        simulate(tmp_path / "one"),
        simulate(tmp_path / "other", **{"distributed.noise": "skellam"}),
    )
    assert one["model_sha256"] != other["model_sha256"]
    assert other["guarantee_status"] == "proven"
    assert "colluding nodes, by Skellam noise" in str(other.guarantee)
    assert one.epsilon == pytest.approx(other.epsilon, rel=1e-5)
    assert one["readers_epsilon"] == pytest.approx(other["readers_epsilon"], rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "workers"), [("processes", 2), ("ray", 2), ("flower", 1)])
def test_every_engine_gives_one_model(tmp_path, engine, workers, one_ray):
    one, other = (
        simulate(tmp_path / "local"),
        simulate(tmp_path / engine, engine, **{"run.workers": workers}),
    )
    assert one["model_sha256"] == other["model_sha256"]
    assert one.epsilon == other.epsilon


def test_both_epsilons_are_in_results_and_plans_and_say_whose_they_are(tmp_path):
    result = simulate(tmp_path / "run", **{"privacy.max_participations": 2})
    plan = plan_report(recipes.load(RECIPE, {**SHORT, "privacy.max_participations": 2}))
    assert result["readers_epsilon"] == pytest.approx(plan["readers_epsilon"])
    assert result["readers_epsilon"] < result.epsilon <= 8
    assert f"readers of the released models: epsilon {result['readers_epsilon']:.4g}" in str(
        result.guarantee
    )
    assert ledger_report(tmp_path / "run")["guarantee"] == result["guarantee"], (
        "readers of the folder derive it again"
    )
    for file in tmp_path.glob("run/checkpoints/*"):
        file.unlink()
    assert ledger_report(tmp_path / "run")["guarantee"] == result["guarantee"]
    assert plan["epsilons"]["pld"] == float("inf"), (
        "nothing is proven of the privacy loss distribution"
    )
    assert plan["epsilons"]["rdp"] == pytest.approx(8.0, rel=1e-3)
    shares = plan["shares"]
    assert (shares["asked"], shares["threshold"], shares["colluders"], shares["bits"]) == (
        10,
        7,
        1,
        32,
    )
    assert shares["noise_over_central"] == pytest.approx((10 / 6) ** 0.5)
    assert shares["wrap_probability"] < 1e-9


def test_a_run_that_may_stop_states_the_second_epsilon_of_all_rounds(tmp_path):
    changes = {
        "federation.rounds": 4,
        "privacy.max_participations": 4,
        "federation.server_lr": 1e-12,
    }
    result = simulate(tmp_path / "run", **changes, **{"run.patience": 1, "run.evaluate_every": 1})
    plan = plan_report(recipes.load(RECIPE, SHORT | changes))
    assert result["rounds"] < 4
    assert result["readers_epsilon"] == pytest.approx(plan["readers_epsilon"])
    RunFolder.open(tmp_path / "run").verify()


def test_a_round_with_too_few_answers_moves_nothing_and_costs(tmp_path):
    """Nine of ten nodes drop out of nearly every round: the model stays, the nodes that answered
    are charged."""
    result = simulate(tmp_path / "run", **{"federation.dropout": 0.9})
    untrained = simulations.simulate(
        RECIPE,
        overrides={**SHORT, "federation.rounds": 1, "federation.dropout": 0.9},
        run_dir=str(tmp_path / "one"),
    )
    assert result["model_sha256"] == untrained["model_sha256"]
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert 0 < sum(ledger.participations().values()) < 20
    assert result.epsilon > 0


def test_a_run_that_stops_early_reports_the_epsilons_of_all_its_rounds(tmp_path):
    """The round at which it stops depends on its releases, so nothing smaller was fixed in
    advance."""
    still = {
        "mechanism.bound": 1e-6,
        "run.patience": 1,
        "run.evaluate_every": 1,
    }  # a model that hardly moves
    stopping = {"federation.rounds": 3, "privacy.max_participations": 3, **still}
    result = simulate(tmp_path / "run", **stopping)
    plan = plan_report(recipes.load(RECIPE, {**SHORT, **stopping}))
    assert result["rounds"] < 3
    assert result["readers_epsilon"] == pytest.approx(plan["readers_epsilon"], rel=1e-3)
    assert simulations.resume(tmp_path / "run")["readers_epsilon"] == result["readers_epsilon"]


def test_a_summary_that_states_another_second_epsilon_is_refused(tmp_path):
    simulate(tmp_path / "run")
    file = next(tmp_path.glob("run/**/result.json"))
    stated = json.loads(file.read_text())
    file.write_text(json.dumps(stated | {"readers_epsilon": 0.1}))
    with pytest.raises(FedlgmError, match="readers_epsilon"):
        simulations.resume(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distributed": None}, "needs shares"),
        ({"distributed.threshold": 5}, "threshold must be at least 6"),
        ({"distributed.colluders": 7}, "leaves no honest node"),
        ({"distributed.threshold": 11}, "never met"),
        (
            {"distributed.noise": "binomial"},
            "unknown noise 'binomial'; known: discrete-gaussian, skellam",
        ),
        (
            {"federation.sampling": "poisson", "federation.rate": 0.5},
            "a public number of nodes|replace-one",
        ),
        ({"privacy.accountant": "pld"}, "set privacy.accountant = 'rdp'"),
        (
            {"privacy.trust": "central", "privacy.max_participations": None},
            "for trust 'distributed', not 'central'",
        ),
        ({"privacy.noise": "banded"}, "needs privacy.trust = 'central': under distributed trust"),
        ({"mechanism.name": "none"}, "needs a private plan"),
        ({"mechanism.name": "laplace-inid"}, "the plan has laplace noise"),
        ({"mechanism.name": "time-varying"}, "this mechanism's noise changes over the rounds"),
    ],
)
def test_wrong_recipes_are_one_sentence_before_anything_is_charged(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        simulations.simulate(
            RECIPE, overrides={**SHORT, **changes}, engine="local", run_dir=str(tmp_path / "run")
        )
    assert not list(tmp_path.glob("run/ledger*"))


def test_mechanisms_of_one_multiplier_run_with_their_auxiliary_queries(tmp_path):
    for name, more in (
        ("snr-consistent", {}),
        ("uniform", {"mechanism.clip": "med", "mechanism.norms": "quantile"}),
    ):
        result = simulate(tmp_path / name, **{"mechanism.name": name, **more, "model.hidden": [4]})
        assert result["guarantee_status"] == "proven"


@pytest.mark.slow
def test_an_audit_stays_below_both_epsilons(tmp_path):
    """One release as the server sees it, with the noise of the honest nodes alone."""
    small = {
        **SHORT,
        "federation.rounds": 1,
        "privacy.max_participations": 1,
        "distributed.threshold": 6,
    }
    changes = [f"{key}={json.dumps(value)}" for key, value in small.items()]
    found = audit_recipe(RECIPE, Audit(method="distinguisher", trials=1500), overrides=changes)
    plan = plan_report(recipes.load(RECIPE, small))
    assert found.passed
    assert 0.5 < found.epsilon_lower < plan["readers_epsilon"] < plan["epsilons"]["rdp"]


@pytest.mark.parametrize("noise", ["discrete-gaussian", "skellam"])
def test_the_probe_finds_what_the_plan_states(noise):
    """One node moves the sum by what is accounted for, and Gaussian noise of that multiplier costs
    a little less."""
    changes = [
        f"{key}={json.dumps(value)}" for key, value in {**SHORT, "distributed.noise": noise}.items()
    ]
    found = audit_recipe(
        RECIPE,
        Audit(method="probe"),
        overrides=[*changes, "privacy.max_participations=2", "model.hidden=[64]"],
    )
    assert found.passed
    assert 0.9 * found.epsilon_reported < found.epsilon_lower < found.epsilon_reported


@pytest.mark.parametrize("method", ["one-run-gaussian", "one-run"])
def test_audits_with_canaries_are_refused_in_one_sentence(method):
    changes = [f"{key}={json.dumps(value)}" for key, value in SHORT.items()]
    with pytest.raises(
        ConfigError,
        match=r"under distributed trust .* use `fedlgm audit` with --method distinguisher",
    ):
        audit_recipe(
            RECIPE, Audit(method=method), overrides=[*changes, "privacy.max_participations=2"]
        )


@pytest.mark.slow
def test_finished_runs_are_audited_by_their_recipe_and_hold_no_canaries(tmp_path):
    result = simulate(tmp_path / "run", **{"privacy.max_participations": 2})
    assert audit_run(result.folder, Audit(method="probe")).passed
    with pytest.raises(ConfigError, match="under distributed trust"):
        simulate(tmp_path / "canaries", **{"run.audit": True})
