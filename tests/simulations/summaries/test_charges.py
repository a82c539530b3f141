"""What a ledger says in words: what was released, with what noise and sampling, how often."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.privacy.charge import Charge
from fedlgm.privacy.cost import Cost, multiplier_explained
from fedlgm.privacy.events import gaussian_event, laplace_event, pure_event, repeat_event
from fedlgm_lab.reports.report import write_report
from simulations import launch
from simulations.cli import app
from simulations.config import recipe as recipes
from simulations.summaries.charges import event_group, how_to_read


def group(recipe, event, *charged):
    return event_group(recipe.unit, [Charge(round, client, event, {}) for round, client in charged])


class TestCost:
    def test_of_every_event_that_a_ledger_holds(self):
        assert Cost.of(gaussian_event(0.0)) == Cost("none")
        assert Cost.of(gaussian_event(float("inf"))) == Cost("free")
        assert Cost.of(gaussian_event(2.0)) == Cost("gaussian", 2.0)
        assert Cost.of(repeat_event(gaussian_event(2.0, 0.25), 7)) == Cost("gaussian", 2.0, 0.25, 7)
        laplace, pure = Cost.of(laplace_event(0.4, 0.5)), Cost.of(pure_event(0.3))
        assert (laplace.law, laplace.rate) == ("laplace", 0.5)
        assert laplace.figure == pytest.approx(0.4)
        assert (pure.law, pure.rate) == ("pure", 1.0)
        assert pure.figure == pytest.approx(0.3)

    def test_the_words_suffice_to_compute_epsilon_again(self):
        """Whoever reads multiplier, sampling and number has all that the accountant had."""
        event = repeat_event(gaussian_event(0.9, 0.1), 5)
        cost = Cost.of(event)
        again = [(gaussian_event(cost.figure, cost.rate), cost.steps * 3)]
        assert composed_epsilon(again, 1e-5) == pytest.approx(composed_epsilon([(event, 3)], 1e-5))

    @pytest.mark.parametrize(
        ("relation", "words"),
        [
            ("add-remove", "one example more or less"),
            ("replace-one", "one example replaced by another"),
            ("zero-out", "one example whose contributions become zero"),
        ],
    )
    def test_the_multiplier_is_said_to_be_relative_to_what_the_relation_moves(
        self, relation, words
    ):
        assert words in multiplier_explained("example", relation)


class TestGroups:
    def test_under_central_trust(self):
        recipe = recipes.load("digits")
        row = group(recipe, gaussian_event(0.5, 0.1), (1, -1), (2, -1), (4, -1))
        assert (row["rounds"], row["count"], row["clients"]) == ("1-2, 4", 3, 0)
        assert (row["released"], row["noise"]) == ("sum over clients", "Gaussian, multiplier 0.5")
        assert row["sampling"] == "probability 0.1"
        assert how_to_read(recipe, [row]) == [multiplier_explained("client", "add-remove")]

    def test_under_local_trust_with_steps(self):
        recipe = recipes.load("example-level-federation")
        row = group(recipe, repeat_event(gaussian_event(0.5, 0.1), 5), (1, 0), (1, 3), (2, 3))
        assert (row["rounds"], row["count"], row["clients"], row["steps"]) == ("1-2", 3, 2, 5)
        assert row["released"] == "a client's update, 5 steps"

    def test_rounds_of_one_mechanism_are_not_said_to_have_had_that_noise(self):
        recipe = recipes.load("correlated-digits")
        (note,) = how_to_read(recipe, [group(recipe, gaussian_event(2.0), (1, -1))])
        assert "not the noise that they had" in note

    def test_what_is_not_private_is_called_so(self):
        recipe = recipes.load("ladp-fashion-mnist-published")
        row = group(recipe, gaussian_event(0.0), (1, 5))
        assert (row["noise"], row["sampling"], row["noise_multiplier"]) == (
            "none that protects",
            "-",
            None,
        )
        assert how_to_read(recipe, [row]) == []


@pytest.mark.usefixtures("undrawn")
def test_nobody_reads_the_accountants_own_notation(tiny, tmp_path):
    """The command and the page; --json keeps the event as it was, beside the words."""
    run = tmp_path / "run"
    launch.simulate(tiny(federation={"rounds": 2}), run_dir=run, trackers=[])
    (row,) = json.loads(CliRunner().invoke(app, ["ledger", str(run), "--json"]).stdout)["events"]
    assert row["event"].startswith("PoissonSampledDpEvent(sampling_probability=")
    assert (row["first"], row["last"], row["count"]) == (1, 2, 2)
    assert f"noise_multiplier={row['noise_multiplier']}" in row["event"]
    figures = (f"{row['noise_multiplier']:.4g}", f"probability {row['sampling_rate']:.4g}")
    page = Path(write_report(run)["report"]).read_text()
    for words in (CliRunner().invoke(app, ["ledger", str(run)]).stdout, page):
        assert "DpEvent" not in words
        for said in ("1-2", "sum over clients", *figures):
            assert said in words.replace("–", "-")
