"""A finished run whose summary was edited is not read as if it were true."""

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from compared import summary_of
from federations import tiny_values
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import simulations
from fedlgm import Guarantee, Mechanism, ReleasePlan, mechanisms
from fedlgm.errors import FedlgmError, LedgerError, RunError
from fedlgm.mechanisms.method import Method
from fedlgm.privacy.ledger import Ledger
from fedlgm_lab.attacks.runs.target import Target
from fedlgm_lab.audits import Audit
from fedlgm_lab.audits.runs.targets import audit_run
from fedlgm_lab.reports import report
from fedlgm_lab.studies import running
from fedlgm_lab.studies.jobs import Job
from simulations import launch
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.facts import facts_of
from simulations.exports import export
from simulations.runs import protection
from simulations.runs.agreement import check_rows
from simulations.runs.folder import RunFolder
from simulations.summaries.ledgers import ledger_report
from tests.support import example_level


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = tmp_path_factory.mktemp("agreement") / "run"
    launch.simulate(recipes.Recipe.model_validate(tiny_values()), run_dir=run, trackers=[])
    return run


@pytest.fixture
def edited(finished, tmp_path):
    """Maker of a copy of the run with other figures in its summary."""

    def make(**figures):
        run = tmp_path / "run"
        shutil.copytree(finished, run)
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps(result | figures))
        return run

    return make


EDITS = [
    {"epsilon": 0.1},
    {"epsilon": 1.002 * 8},
    {"epsilon": "inf"},
    {"epsilon": "nan"},
    {"claimed_epsilon": 0.1},
    {"delta": 1e-9},
    {"unit": "example"},
    {"mechanism": "uniform"},
    {"variant": "published"},
    {"noise_reproducible": False},
    {"guarantee_status": "conditional"},
    {"guarantee_status": "none"},
    {"rounds": 300},
    {"recipe": "other"},
    {"noise_multiplier": 5.0},
    {"attack": "an attacker who accepts 1 % false alarms finds at most 2 % of the clients"},
    {"attack_rates": {"tpr": {"0.1": 0.1, "0.01": 0.01, "0.001": 0.1}, "advantage": 0, "mu": 0}},
]


@pytest.mark.parametrize("figures", EDITS, ids=str)
def test_an_edited_figure_is_refused(edited, figures):
    run = edited(**figures)
    (name,) = figures
    with pytest.raises(LedgerError, match=f"result.json says {name} = .* ledger of the run say"):
        report.write_report(run)
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("epsilon", [None, True, "0.1", [8.0], {"a": 1}])
def test_an_epsilon_that_is_no_number_is_refused(edited, epsilon):
    with pytest.raises(RunError, match=r"result\.json is damaged \(epsilon: must be a number"):
        report.write_report(edited(epsilon=epsilon))


def test_no_later_row_has_a_smaller_epsilon(finished):
    """Within the tolerance each row could be a little below the one before, round after round."""
    recipe = RunFolder.open(finished).recipe()
    with Ledger(finished / "ledger.sqlite") as ledger:
        first = next(iter(RunFolder.open(finished).metrics))
        falling = [
            first | {"round": i + 1, "epsilon": first["epsilon"] * 0.9992**i} for i in range(3)
        ]
        with pytest.raises(LedgerError, match=r"says epsilon = .* in round 3"):
            check_rows([*falling, first | {"round": 4, "epsilon": 100.0}], recipe, ledger, "rows")


def test_every_reader_refuses(edited):
    run = edited(epsilon=0.1)
    readers = (
        launch.resume,
        ledger_report,
        export.metadata,
        export.load_model,
        lambda run: Target.open(str(run)),
        lambda run: audit_run(run, Audit()),
    )
    for read in readers:
        with pytest.raises(LedgerError, match=r"says epsilon = 0\.1"):
            read(run)


def test_another_accountants_last_digits_are_no_edit(edited, finished):
    epsilon = json.loads((finished / "result.json").read_text())["epsilon"]
    assert launch.resume(edited(epsilon=epsilon * 1.0001))["rounds"] > 0


def test_a_deleted_summary_is_written_again(edited, finished):
    run = edited(epsilon=0.1)
    (run / "result.json").unlink()
    again = launch.resume(run)
    assert again["epsilon"] == json.loads((finished / "result.json").read_text())["epsilon"]
    assert ledger_report(run)["epsilon"] == pytest.approx(again["epsilon"])


def test_a_run_without_privacy_cannot_be_called_proven(tmp_path):
    values = tiny_values()
    values["mechanism"] = {"name": "none"}
    run = tmp_path / "run"
    launch.simulate(recipes.Recipe.model_validate(values), run_dir=run, trackers=[])
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"guarantee_status": "proven"}))
    with pytest.raises(LedgerError, match=r"says guarantee_status = proven, .* say none"):
        launch.resume(run)


@pytest.mark.usefixtures("undrawn")
def test_an_edited_sentence_has_no_effect(edited, finished):
    """Its words come from the recipe, not from the file: no reader shows the edit."""
    true = json.loads((finished / "result.json").read_text())["guarantee"]
    run = edited(
        guarantee="proven (example-level, zero-out, each client adds its own noise): anything"
    )
    assert launch.resume(run)["guarantee"] == true
    assert ledger_report(run)["guarantee"] == true
    assert export.metadata(run)["guarantee"] == true
    assert report.write_report(run)["guarantee"] == true
    page = (run / "report.html").read_text()
    assert "anything" not in page
    assert "anything" not in (run / "provenance.json").read_text()


def test_no_reader_of_a_comparison_takes_an_edited_summary(tmp_path):
    values = tiny_values()
    job = Job("snr-consistent", 0, recipes.Recipe.model_validate(values), "run")
    running.run([job], tmp_path)
    file = tmp_path / job.folder / "result.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"guarantee": "proven: anything"}))
    assert summary_of([job], tmp_path)["cells"][0]["guarantee"] == kept["guarantee"]
    file.write_text(json.dumps(kept | {"guarantee_status": "conditional"}))
    with pytest.raises(LedgerError, match="says guarantee_status = conditional"):
        summary_of([job], tmp_path)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A finished run of a user's mechanism, whose words no recipe gives."""
    values = tiny_values()
    values["mechanism"] = {"name": "own_mechanism:InverseSize"}
    run = tmp_path_factory.mktemp("own") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[3] / "docs" / "examples"))
        launch.simulate(recipes.Recipe.model_validate(values), run_dir=run, trackers=[])
    return run


def edit_plans(run, section, **values):
    """Change the plan in every checkpoint."""
    for file in (run / "checkpoints").iterdir():
        with safe_open(file, framework="pt") as stored:
            meta = dict(stored.metadata())
        plan = json.loads(meta["plan"])
        plan[section] |= values
        save_file(load_file(file), file, metadata=meta | {"plan": json.dumps(plan)})


def test_the_words_of_a_mechanism_of_ones_own_are_in_its_ledger(own, tmp_path):
    """Plans in checkpoints are plain files, and were the only source of them: both files could be
    edited alike."""
    run = tmp_path / "run"
    shutil.copytree(own, run)
    result = json.loads((run / "result.json").read_text())
    assert result["guarantee_status"] == "proven"
    edit_plans(
        run, "guarantee", status="conditional", relation="zero-out", unit="user", reason="anything"
    )
    (run / "result.json").write_text(json.dumps(result | {"guarantee": "proven: anything"}))
    assert launch.resume(run)["guarantee"] == ledger_report(run)["guarantee"] == result["guarantee"]
    (run / "result.json").write_text(json.dumps(result | {"guarantee_status": "conditional"}))
    with pytest.raises(LedgerError, match="says guarantee_status = conditional"):
        launch.resume(run)
    (run / "result.json").write_text(json.dumps(result))
    shutil.rmtree(run / "checkpoints")
    assert ledger_report(run)["guarantee"] == result["guarantee"]


def test_words_in_the_ledger_are_chained(own, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(own, run)
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db, db:
        db.execute("UPDATE charges SET guarantee = replace(guarantee, 'bounded', 'anything')")
    with pytest.raises(LedgerError, match="row 1"):
        ledger_report(run)


@dataclass(frozen=True)
class LastProven(Mechanism):
    """Its last round alone is called proven."""

    def plan(self, layers, facts, transcript):
        last = transcript.rounds == facts.rounds - 1
        clip, sigma = np.full((2, len(layers)), (1 / len(layers) ** 0.5, facts.noise_multiplier)).T
        words = Guarantee("proven" if last else "conditional", "an example")
        return ReleasePlan(layers, clip, sigma, facts, words)


def test_a_run_guarantees_what_its_weakest_round_does(tmp_path):
    run = tmp_path / "run"
    simulations.simulate(
        recipes.Recipe.model_validate(tiny_values()),
        mechanism=LastProven("last-proven"),
        run_dir=run,
    )
    assert json.loads((run / "result.json").read_text())["guarantee_status"] == "conditional"
    assert ledger_report(run)["guarantee"].startswith("conditional")


def test_a_noise_multiplier_is_that_of_the_ledger(edited, finished):
    """A second epsilon, towards readers, follows from it."""
    run = edited(noise_multiplier=50.0)
    edit_plans(run, "facts", noise_multiplier=50.0)
    with pytest.raises(
        LedgerError,
        match=r"noise multiplier of 50\. With this multiplier, round 1 would have another cost",
    ):
        launch.resume(run)


def test_words_are_not_taken_from_a_checkpoint_if_the_layers_are_not_known(edited, finished):
    run = edited()
    edit_plans(run, "guarantee", reason="anything")
    provenance = json.loads((run / "provenance.json").read_text())
    (run / "provenance.json").write_text(
        json.dumps({k: v for k, v in provenance.items() if k != "layers"})
    )
    with pytest.raises(LedgerError, match=r"provenance.json does not name the layers"):
        ledger_report(run)


def test_a_summary_without_a_ledger_is_not_read(edited):
    run = edited()
    for name in ("ledger.sqlite", "metrics.jsonl"):
        (run / name).unlink()
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(LedgerError, match=r"no ledger\.sqlite"):
        launch.resume(run)


def sizes_of(assembly):
    return dict(zip(assembly.model.layers.names, assembly.model.layers.sizes.tolist(), strict=True))


def words_of_a_run(assembly, examples=0):
    """What the first plan on the true model says; calibration changes no word of it, and takes its
    time."""
    facts = facts_of(assembly.recipe, examples).with_multiplier(1.7)
    return (
        Method(assembly.model.mechanism, assembly.model.layers, facts)
        .plan(assembly.privacy.start())
        .guarantee
    )


@pytest.mark.parametrize("name", [n for n in mechanisms.names("client") if n != "none"])
def test_the_words_of_every_mechanism_follow_from_its_recipe(name):
    """Of a plan that is made without the model: of its layers' sizes alone."""
    for variant in ("sound", "published"):
        for trust in ("central", "local"):
            values = tiny_values()
            values["mechanism"] = {"name": name, "variant": variant}
            values["privacy"] |= {"trust": trust, "accountant": "pld"}
            try:
                assembly = Assembly(recipes.Recipe.model_validate(values))
                true = words_of_a_run(assembly)
            except FedlgmError:  # no such variant, or not under this trust
                continue
            assert (
                protection.guarantee_of(assembly.recipe, sizes_of(assembly), amplified=False)
                == true
            )


@pytest.mark.parametrize("name", ["dp-sgd", "auto-s", "lm-dp-sgd", "sgd"])
def test_the_words_of_steps_follow_from_their_recipe(name):
    assembly = Assembly(example_level.central(f"mechanism.name={name}"))
    true = words_of_a_run(assembly, int(assembly.data.sizes.sum()))
    assert protection.guarantee_of(assembly.recipe, sizes_of(assembly), amplified=True) == true
