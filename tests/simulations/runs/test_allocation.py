"""Runs with random allocation: one model whatever the engine and the interruptions, and cohorts
that keep the promise of their price."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import pytest
from dp_accounting import dp_event

from fedlgm.errors import ConfigError, FedlgmError, PrivacyError, RunError
from fedlgm.privacy import Ledger, composed_epsilon
from fedlgm.privacy.events import AllocationDpEvent
from simulations import launch
from simulations.config.recipe import load
from simulations.runs.folder import RunFolder
from simulations.summaries.planning import plan_report
from tests.support.interruption import Interrupted, charges, interrupt_at, interrupted

ROUNDS = 8
SAME = ("model_sha256", "accuracy", "epsilon", "noise_multiplier", "guarantee", "ledger_head")


@pytest.fixture
def allocated(tiny):
    def make(seed=3, run=None, privacy=None, mechanism=None, **federation):
        return tiny(
            mechanism=mechanism or {},
            privacy={"accountant": "pld", "epsilon": 2.0, **(privacy or {})},
            run={"seed": seed, "checkpoint_every": 3, "block_size": 10, **(run or {})},
            federation={
                "rounds": ROUNDS,
                "sampling": "allocation",
                "rate": None,
                "participations": 2,
                "block": 4,
                **federation,
            },
        )

    return make


def test_the_ledger_is_charged_by_blocks(allocated, tmp_path):
    result = launch.simulate(allocated(), run_dir=tmp_path / "run")
    with Ledger(RunFolder.open(tmp_path / "run").ledger_file) as ledger:
        events = [(charge.round, charge.event) for charge in ledger.charges()]
        spent = ledger.epsilon(1e-5, through=1)
    charged = {
        round: event for round, event in events if not isinstance(event, dp_event.NoOpDpEvent)
    }
    assert list(charged) == [1, 5]
    assert all(isinstance(event, AllocationDpEvent) for event in charged.values())
    delta = allocated().privacy.delta
    whole = composed_epsilon([(event, 1) for event in charged.values()], delta)
    assert result["epsilon"] == pytest.approx(whole)
    assert spent > 0
    assert "2 of each 4 rounds" in result["guarantee"]


@pytest.mark.parametrize("engine", ["processes", pytest.param("ray", marks=pytest.mark.slow)])
def test_every_engine_gives_one_model(allocated, tmp_path, engine, request):
    if engine == "ray":
        request.getfixturevalue("one_ray")
    recipe = allocated(dropout=0.2)
    first = launch.simulate(recipe, run_dir=tmp_path / "local", engine="local")
    second = launch.simulate(recipe, run_dir=tmp_path / engine, engine=engine)
    assert {name: first[name] for name in SAME} == {name: second[name] for name in SAME}


def test_interruptions_change_no_bit_and_no_cohort(allocated, tmp_path):
    recipe = allocated(seed=None, dropout=0.3)
    folder = interrupted(recipe, tmp_path / "run", 1)
    shutil.copytree(folder.path, tmp_path / "copy")
    for at in (5, 8):
        with pytest.raises(Interrupted):
            launch.resume(folder.path, progress=interrupt_at(at))
    first, second = launch.resume(folder.path), launch.resume(tmp_path / "copy")
    assert {name: first[name] for name in SAME} == {name: second[name] for name in SAME}
    assert charges(folder) == list(range(1, ROUNDS + 1))


def test_a_run_whose_keys_are_lost_is_not_continued(allocated, tmp_path):
    folder = interrupted(allocated(seed=None), tmp_path / "run", 3)
    for file in (folder.path / "private").glob("*keys*"):
        file.unlink()
    with pytest.raises(RunError, match="keys"):
        launch.resume(folder.path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"participations": None}, "needs participations"),
        ({"block": 3}, "rounds = 8 must be a multiple of block = 3"),
        ({"participations": 5}, "participations = 5 is more than the 4 rounds"),
        ({"rate": 0.5}, "in place of rate and cohort"),
        ({"sampling": "poisson", "rate": 0.5}, "are for sampling = 'allocation'"),
        ({"privacy": {"relation": "replace-one"}}, "not for privacy.relation = 'replace-one'"),
        ({"privacy": {"noise": "banded"}}, "is proven for independent noise"),
        (
            {"privacy": {"trust": "local", "max_participations": 2}},
            "federation.sampling = 'allocation' needs privacy.trust",
        ),
        ({"run": {"audit": True}}, "run.audit: canaries"),
        ({"privacy": {"accountant": "rdp"}}, "the rdp accountant cannot account for"),
        (
            {"mechanism": {"name": "laplace-inid", "bounds": [1.0, 1.0]}},
            "rotational symmetry of Gaussian noise",
        ),
    ],
)
def test_what_is_refused(allocated, tmp_path, changes, message):
    with pytest.raises((ConfigError, PrivacyError), match=message):
        launch.simulate(allocated(**changes), run_dir=tmp_path / "run")


def test_a_fixed_multiplier_is_priced_as_the_run_is_charged(allocated):
    recipe = allocated(privacy={"noise_multiplier": 1.7, "epsilon": None})
    event = AllocationDpEvent(dp_event.GaussianDpEvent(1.7), 2, 4)
    expected = composed_epsilon([(event, 2)], recipe.privacy.delta)
    assert recipe.privacy.epsilon == pytest.approx(expected, rel=1e-4)


class TestExamples:
    CHANGES = (
        "federation.sampling=allocation",
        "federation.participations=1",
        "federation.block=4",
        "federation.rounds=8",
        "run.evaluate_every=8",
    )

    def recipe(self, *more):
        return load("dp-sgd-digits", [*self.CHANGES, "training.batch_size=360", *more])

    def test_engines_and_interruptions_give_one_model(self, tmp_path):
        recipe = self.recipe("federation.clients=3")
        first = launch.simulate(recipe, run_dir=tmp_path / "a", engine="local")
        second = launch.simulate(recipe, run_dir=tmp_path / "b", engine="processes")
        folder = interrupted(recipe, tmp_path / "c", 7)
        third = launch.resume(folder.path)
        for other in (second, third):
            assert {name: first[name] for name in SAME} == {name: other[name] for name in SAME}
        assert "every example takes part in 1 of each 4 rounds" in first["guarantee"]
        assert first["epsilon"] <= 4.0

    def test_every_example_is_in_its_steps(self, tmp_path, monkeypatch):
        from fedlgm.training.example_level.trainer import ExampleTrainer

        counts = Counter()
        usual = ExampleTrainer.sum

        def count(self, x, y, rows, plan):
            counts.update(rows.tolist())
            return usual(self, x, y, rows, plan)

        monkeypatch.setattr(ExampleTrainer, "sum", count)
        launch.simulate(self.recipe(), run_dir=tmp_path / "run", engine="local")
        assert len(counts) == 1442
        assert set(counts.values()) == {2}  # one step of each of two blocks

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ("training.batch_size=128", "set training.batch_size = 360"),
            ("privacy.trust=local", "needs privacy.trust = 'central'"),
        ],
    )
    def test_what_is_refused(self, tmp_path, changes, message):
        with pytest.raises(FedlgmError, match=message):
            launch.simulate(self.recipe(changes), run_dir=tmp_path / "run")

    def test_real_nodes_are_refused(self):
        with pytest.raises(ConfigError, match="is for simulations"):
            self.recipe().protects.check_nodes(allocated=True)


def test_the_command_calibrates(capsys):
    from typer.testing import CliRunner

    from simulations.cli import app

    arguments = "calibrate --epsilon 8 --delta 1e-5 --steps 100 --participations 10 --json"
    figures = json.loads(CliRunner().invoke(app, arguments.split()).stdout)
    assert figures["noise_multiplier"] == pytest.approx(0.869, abs=1e-3)
    assert figures["attack_rates"]["tpr"]["0.01"] == pytest.approx(0.212, abs=1e-3)


def test_plans_print_the_price_of_the_run():
    changes = {"federation.sampling": "allocation", "federation.participations": 10}
    report = plan_report(load("digits", changes))
    assert report["epsilons"]["pld"] == pytest.approx(8.0, rel=1e-3)
    assert report["noise_multiplier"] == pytest.approx(0.869, abs=1e-3)
