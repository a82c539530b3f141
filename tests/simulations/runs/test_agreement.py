"""A finished run whose summary was edited is not read as if it were true."""

import json
import shutil
from pathlib import Path

import pytest
from compared import summary_of
from federations import tiny_values

from fedlgm import mechanisms
from fedlgm.audits import Audit
from fedlgm.errors import FedlgmError, LedgerError
from fedlgm.mechanisms.method import Method
from simulations import launch
from simulations.attacks.target import Target
from simulations.audits.targets import audit_run
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.facts import facts_of
from simulations.reports import export, report
from simulations.reports.report import ledger_report
from simulations.runs import protection
from simulations.studies import running
from simulations.studies.jobs import Job
from tests.support import example_level


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = tmp_path_factory.mktemp("agreement") / "run"
    launch.simulate(recipes.validate(tiny_values()), run_dir=run, trackers=[])
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
    {"epsilon": None},
    {"epsilon": True},
    {"epsilon": "0.1"},
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
]


@pytest.mark.parametrize("figures", EDITS, ids=str)
def test_an_edited_figure_is_refused(edited, figures):
    run = edited(**figures)
    (name,) = figures
    with pytest.raises(LedgerError, match=f"result.json says {name} = .* ledger of the run say"):
        report.write_report(run)
    assert not (run / "report.html").exists()


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
    launch.simulate(recipes.validate(values), run_dir=run, trackers=[])
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"guarantee_status": "proven"}))
    with pytest.raises(LedgerError, match=r"says guarantee_status = proven, .* say none"):
        launch.resume(run)


def test_an_edited_sentence_has_no_effect(edited, finished):
    """Its words come from the recipe, not from the file: no reader shows the edit."""
    true = json.loads((finished / "result.json").read_text())["guarantee"]
    run = edited(guarantee="proven (example-level, zero-out, each client adds its own noise): anything")
    assert launch.resume(run)["guarantee"] == true
    assert ledger_report(run)["guarantee"] == true
    assert export.metadata(run)["guarantee"] == true
    assert report.write_report(run)["guarantee"] == true
    page = (run / "report.html").read_text()
    assert "anything" not in page
    assert "anything" not in (run / "provenance.json").read_text()


def test_no_reader_of_a_comparison_takes_an_edited_summary(tmp_path):
    values = tiny_values()
    job = Job("snr-consistent", 8.0, "dirichlet", 0, recipes.validate(values), "run")
    running.run([job], tmp_path)
    file = tmp_path / job.folder / "result.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"guarantee": "proven: anything"}))
    assert summary_of([job], tmp_path)["cells"][0]["guarantee"] == kept["guarantee"]
    file.write_text(json.dumps(kept | {"guarantee_status": "conditional"}))
    with pytest.raises(LedgerError, match="says guarantee_status = conditional"):
        summary_of([job], tmp_path)


def test_a_mechanism_of_ones_own_has_the_words_of_its_last_plan(tmp_path, monkeypatch):
    """What a Python object says of itself is in no recipe: the newest checkpoint holds its last plan."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "docs" / "examples"))
    values = tiny_values()
    values["mechanism"] = {"name": "own_mechanism:InverseSize"}
    run = tmp_path / "run"
    launch.simulate(recipes.validate(values), run_dir=run, trackers=[])
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"guarantee": "proven: anything"}))
    assert launch.resume(run)["guarantee"] == result["guarantee"]
    (run / "result.json").write_text(json.dumps(result | {"guarantee_status": "conditional"}))
    with pytest.raises(LedgerError, match="says guarantee_status = conditional"):
        launch.resume(run)
    (run / "result.json").write_text(json.dumps(result))
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(LedgerError, match="no checkpoint"):
        launch.resume(run)


def test_a_summary_without_a_ledger_is_not_read(edited):
    run = edited()
    for name in ("ledger.sqlite", "metrics.jsonl"):
        (run / name).unlink()
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(LedgerError, match=r"no ledger\.sqlite"):
        launch.resume(run)


def sizes_of(assembly):
    return dict(zip(assembly.layers.names, assembly.layers.sizes.tolist(), strict=True))


def words_of_a_run(assembly, examples=0):
    """What the first plan on the true model says; calibration changes no word of it, and takes its time."""
    facts = facts_of(assembly.recipe, examples).with_multiplier(1.7)
    return Method(assembly.mechanism, assembly.layers, facts).plan(assembly.start()).guarantee


@pytest.mark.parametrize("name", [n for n in mechanisms.names("client") if n != "none"])
def test_the_words_of_every_mechanism_follow_from_its_recipe(name):
    """Of a plan that is made without the model: of its layers' sizes alone."""
    for variant in ("sound", "published"):
        for trust in ("central", "local"):
            values = tiny_values()
            values["mechanism"] = {"name": name, "variant": variant}
            values["privacy"] |= {"trust": trust, "accountant": "pld"}
            try:
                assembly = Assembly(recipes.validate(values))
                true = words_of_a_run(assembly)
            except FedlgmError:  # no such variant, or not under this trust
                continue
            assert protection.guarantee_of(assembly.recipe, sizes_of(assembly), amplified=False) == true


@pytest.mark.parametrize("name", ["dp-sgd", "auto-s", "lm-dp-sgd", "sgd"])
def test_the_words_of_steps_follow_from_their_recipe(name):
    assembly = Assembly(example_level.central(f"mechanism.name={name}"))
    true = words_of_a_run(assembly, int(assembly.sizes.sum()))
    assert protection.guarantee_of(assembly.recipe, sizes_of(assembly), amplified=True) == true
