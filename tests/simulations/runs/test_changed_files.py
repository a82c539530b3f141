"""A run's files after somebody changed them: every reader says which file and why, and prints no
smaller epsilon."""

import json
import shutil
from pathlib import Path

import pytest
from compared import summary_of
from federations import tiny_values
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedlgm.errors import LedgerError, RunError
from fedlgm_lab.audits import Audit
from fedlgm_lab.audits.runs.targets import audit_run
from fedlgm_lab.studies import running
from fedlgm_lab.studies.jobs import Job
from simulations import launch
from simulations.config import recipe as recipes
from simulations.runs.folder import RunFolder
from simulations.runs.row_file import RowFile
from simulations.runs.rows import CanaryRow, PrivateRow, Provenance, RoundRow, RunSummary
from simulations.runs.shapes import misfit

COMMANDS = (
    ["ledger"],
    ["report"],
    ["report", "--private"],
    ["export"],
    ["audit"],
    ["simulate", "--resume"],
)


def run_of(values, path: Path) -> Path:
    launch.simulate(recipes.Recipe.model_validate(values), run_dir=path, trackers=[])
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run_of(tiny_values(), tmp_path_factory.mktemp("changed") / "run")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A run whose readers have a second epsilon."""
    values = tiny_values()
    values["privacy"] |= {"trust": "distributed", "accountant": "rdp", "max_participations": 3}
    values["federation"] |= {"sampling": "fixed", "rate": 1.0}
    values["distributed"] = {"threshold": 14, "colluders": 1}
    values["mechanism"] = {"name": "gaussian"}
    return run_of(values, tmp_path_factory.mktemp("changed") / "shared")


@pytest.fixture
def copied(tmp_path):
    def make(run: Path) -> Path:
        return Path(shutil.copytree(run, tmp_path / "run"))

    return make


def change(file: Path, *keys, value, line: int | None = None) -> None:
    """Set a value in a JSON file, or in a line of it."""
    lines = [file.read_text()] if line is None else file.read_text().splitlines()
    place = line or 0
    record = json.loads(lines[place])
    inner = record
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    lines[place] = json.dumps(record)
    file.write_text("\n".join(lines) + "\n")


CHANGES = [
    ("metrics.jsonl", 0, ("sigma",), 1.5),
    ("metrics.jsonl", 0, ("share", 0), "x"),
    ("metrics.jsonl", -1, ("snr", 0), {"a": 1}),
    ("metrics.jsonl", -1, ("epsilon",), {}),
    ("metrics.jsonl", -1, ("metrics", "loss"), [[1]]),
    ("metrics.jsonl", -1, ("snr",), [1.0]),
    ("metrics.jsonl", -1, ("released_norm",), []),
    ("metrics.jsonl", -1, ("round",), [[1]]),
    ("metrics.jsonl", 0, ("round",), 0),
    ("private/diagnostics.jsonl", 0, ("seconds",), {"a": 1}),
    ("provenance.json", None, ("layers",), 3),
    ("provenance.json", None, ("layers", "fc1"), "nan"),
    ("provenance.json", None, ("layers", "fc1"), 0),
    ("provenance.json", None, ("layers", "fc1"), 10**30),
    ("provenance.json", None, ("versions",), []),
    ("result.json", None, ("metrics",), 1.5),
    ("result.json", None, ("loss",), "x"),
    ("result.json", None, ("headline",), "x"),
    ("result.json", None, ("model_sha256",), None),
]


@pytest.mark.parametrize(("name", "line", "keys", "value"), CHANGES, ids=str)
@pytest.mark.usefixtures("undrawn")
def test_every_command_refuses_in_a_sentence_or_does_not_need_the_file(
    finished, copied, run, name, line, keys, value
):
    folder, refused = copied(finished), 0
    change(folder / name, *keys, value=value, line=line)
    for command in COMMANDS:
        status, _, said = run(*command, folder)
        assert status in (0, 2), (command, said)
        refused += status == 2
        if status:
            assert ("headline" if "headline" in keys else Path(name).name) in said
            assert "Traceback" not in said
    assert refused


@pytest.mark.parametrize("text", ["", "[run]", "x = [", "[federation]\nrounds = 0"])
def test_a_damaged_recipe_of_a_run_is_named(finished, copied, run, text):
    folder = copied(finished)
    (folder / "recipe.toml").write_text(text)
    for command in COMMANDS:
        status, _, said = run(*command, folder)
        assert status == 2
        assert "recipe.toml is not the recipe of a run: " in said.replace("\n", " ")


@pytest.mark.parametrize("name", ["model_sha256", "metrics", "headline", "engine"])
def test_a_summary_without_a_figure_is_refused(finished, copied, name):
    file = copied(finished) / "result.json"
    file.write_text(
        json.dumps(
            {key: value for key, value in json.loads(file.read_text()).items() if key != name}
        )
    )
    with pytest.raises(LedgerError, match=rf"result\.json has no {name}"):
        RunFolder.open(file.parent).verified_result()


@pytest.mark.parametrize("line", [0, -1])
@pytest.mark.parametrize("name", ["sigma", "share", "clip"])
def test_a_row_without_a_figure_is_refused(finished, copied, run, name, line):
    """One changed letter of a name ended `fedlgm report` in a traceback."""
    file = copied(finished) / "metrics.jsonl"
    lines = file.read_text().splitlines()
    lines[line] = lines[line].replace(f'"{name}"', f'"{name[:-1]}"')
    file.write_text("\n".join(lines) + "\n")
    status, _, said = run("report", file.parent)
    assert status == 2
    assert f"has no {name} in round" in " ".join(said.split())


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "provenance.json"])
@pytest.mark.usefixtures("undrawn")
def test_nested_lists_without_end_are_no_traceback(finished, copied, run, name):
    folder, refused = copied(finished), 0
    (folder / name).write_text("[" * 100_000)
    for command in COMMANDS:
        status, _, said = run(*command, folder)
        assert status in (0, 2), (command, said)
        refused += status == 2
        assert "Traceback" not in said
    assert refused


def test_rows_and_files_of_an_unchanged_run_fit(finished, shared):
    for run in (finished, shared):
        folder = RunFolder.open(run)
        assert list(folder.metrics)
        assert list(folder.diagnostics)
        assert folder.provenance.read()
        assert folder.result()


def test_types_are_those_of_the_files():
    assert misfit({}, RunSummary) == misfit({}, Provenance) == ""
    for kind in (RoundRow, PrivateRow, CanaryRow):
        assert "missing" in misfit({}, kind)


def test_a_row_cut_short_by_a_crash_is_no_change(finished, copied):
    run = copied(finished)
    file = run / "metrics.jsonl"
    rows = list(RowFile(file, RoundRow))
    file.write_text(file.read_text() + '{"round": 99, "noi')
    assert list(RowFile(file, RoundRow)) == rows


@pytest.mark.parametrize("line", [0, -1])
def test_an_epsilon_of_a_round_is_at_least_that_of_the_ledger(tmp_path, line):
    """The report draws them over the rounds, and words give the first and the last one."""
    values = tiny_values()
    values["run"]["evaluate_every"] = 1
    run = run_of(values, tmp_path / "run")
    change(run / "metrics.jsonl", "epsilon", value=0.01, line=line)
    with pytest.raises(
        LedgerError, match=r"metrics\.jsonl says epsilon = 0\.01 in round \d+, but by the ledger"
    ):
        RunFolder.open(run).verified_result()


def test_an_epsilon_between_rounds_does_not_fall(tmp_path):
    values = tiny_values()
    values["run"]["evaluate_every"] = 1
    run = run_of(values, tmp_path / "run")
    change(run / "metrics.jsonl", "epsilon", value=0.01, line=1)
    with pytest.raises(LedgerError, match="in round 2, but by the ledger it is at least"):
        RunFolder.open(run).verified_result()


@pytest.mark.parametrize("law", ["discrete-gaussian", "skellam"])
@pytest.mark.parametrize(
    "figures", [{"readers_epsilon": 0.001}, {"noise_multiplier": 99.5}], ids=str
)
def test_a_second_epsilon_follows_from_the_ledger_without_checkpoints(
    shared, copied, tmp_path, law, figures
):
    if law == "skellam":
        values = recipes.load(shared / "recipe.toml").model_dump(exclude_none=True)
        values["distributed"]["noise"] = law
        run = run_of(values, tmp_path / "skellam")
    else:
        run = copied(shared)
    shutil.rmtree(run / "checkpoints")
    RunFolder.open(run).verified_result()
    for name, value in figures.items():
        change(run / "result.json", name, value=value)
    with pytest.raises(LedgerError, match=f"says {min(figures)} = "):
        RunFolder.open(run).verified_result()


@pytest.mark.parametrize("facts", [1.5, "nan", [], {}, {"noise_multiplier": "x"}, [1.5]], ids=str)
def test_a_checkpoint_without_facts_states_no_multiplier(finished, copied, facts):
    run = copied(finished)
    for file in (run / "checkpoints").iterdir():
        with safe_open(file, framework="pt") as stored:
            meta = dict(stored.metadata())
        plan = facts if facts == [1.5] else json.loads(meta["plan"]) | {"facts": facts}
        save_file(load_file(file), file, metadata=meta | {"plan": json.dumps(plan)})
    assert (
        RunFolder.open(run).verified_result()["epsilon"]
        == RunFolder.open(finished).verified_result()["epsilon"]
    )


def test_a_class_may_be_called_nan(tmp_path):
    """Figures that are not finite are stored as such words; the names of classes are names."""
    folder = RunFolder(tmp_path)
    folder.provenance.settle({"labels": ["inf", "nan"]})
    assert folder.provenance.read() == {"labels": ["inf", "nan"]}
    folder.provenance.settle({"labels": ["inf", "nan"]})


@pytest.mark.parametrize("kept", [0, 1])
def test_a_run_without_all_of_its_rows_is_not_audited(finished, copied, kept):
    """Rounds that nobody looks at would pass."""
    run = copied(finished)
    file = run / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:kept]))
    with pytest.raises(
        RunError, match=rf"metrics\.jsonl has rows of {kept} rounds, but the run had 3"
    ):
        audit_run(run, Audit())


def test_a_study_takes_no_run_without_all_of_its_rows(tmp_path):
    """Its noise scale is a sum over the rounds."""
    job = Job("snr-consistent", 0, recipes.Recipe.model_validate(tiny_values()), "run")
    running.run([job], tmp_path)
    (tmp_path / job.folder / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match=r"metrics\.jsonl has rows of 0 rounds, but the run had 3"):
        summary_of([job], tmp_path)
