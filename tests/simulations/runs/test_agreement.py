"""A finished run whose summary was edited is not read as if it were true."""

import json
import shutil

import pytest
from federations import tiny_values

from fedlgm.audits import Audit
from fedlgm.errors import LedgerError
from simulations import launch
from simulations.attacks.target import Target
from simulations.audits.targets import audit_run
from simulations.config import recipe as recipes
from simulations.reports import export, report
from simulations.reports.report import ledger_report


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
