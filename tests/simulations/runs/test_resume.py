"""An interrupted run, resumed, is the uninterrupted run."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import time
import warnings
from contextlib import closing

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedlgm.errors import LedgerError, RunError
from fedlgm.privacy import Ledger
from simulations import launch
from simulations.config.assembly import Assembly
from simulations.engines.local import LocalGrid
from simulations.runs.folder import RunFolder
from simulations.runs.server import serve
from strategies import LayerwiseFedAvg
from tests.support.forked import ForkedCommand
from tests.support.interruption import Interrupted, interrupt_at

SAME = (
    "model_sha256",
    "accuracy",
    "loss",
    "epsilon",
    "claimed_epsilon",
    "rounds",
    "noise_multiplier",
    "guarantee",
)
CASES = {
    "sgd": {"federation": {"server_optimizer": "sgd"}},
    "momentum": {"federation": {"server_optimizer": "momentum"}},
    "adam": {"federation": {"server_optimizer": "adam", "server_lr": 0.01}},
    "yogi": {"federation": {"server_optimizer": "yogi", "server_lr": 0.01}},
    "stale": {"mechanism": {"clip": "med", "norms": "stale"}},
    "quantile": {
        "mechanism": {"clip": "med", "norms": "quantile"},
        "federation": {"server_optimizer": "momentum"},
    },
    "ladp": {"mechanism": {"name": "ladp"}},
    "sparse checkpoints": {"run": {"checkpoint_every": 2, "evaluate_every": 2}},
    "capped": {
        "privacy": {"trust": "local", "max_participations": 2},
        "run": {"checkpoint_every": 3},
    },
    "dropouts": {"federation": {"dropout": 0.3, "stragglers": 0.5}, "training": {"epochs": 2}},
}


def five_rounds(tiny, sections):
    merged = {"federation": {"rounds": 5}}
    for section, values in sections.items():
        merged[section] = merged.get(section, {}) | values
    return tiny(**merged)


def figures(folder: RunFolder) -> list[dict]:
    """Rows without wall times, the operator's own figures included."""
    return [
        {name: value for name, value in row.items() if name != "seconds"}
        for row in folder.rows(private=True)
    ]


def assert_same(result, run, reference, whole):
    assert {name: result[name] for name in SAME} == {name: reference[name] for name in SAME}
    assert figures(RunFolder(run)) == figures(RunFolder(whole))
    assert [row["round"] for row in RunFolder(run).rows()] == [1, 2, 3, 4, 5]
    with Ledger(run / "ledger.sqlite") as one, Ledger(whole / "ledger.sqlite") as other:
        assert list(one.charges()) == list(other.charges())


@pytest.mark.parametrize("sections", CASES.values(), ids=CASES)
def test_an_exception_in_a_callback(tiny, tmp_path, sections):
    recipe = five_rounds(tiny, sections)
    reference = launch.simulate(recipe, run_dir=tmp_path / "whole")
    for at in (1, 3):
        cut = tmp_path / f"cut-{at}"
        with pytest.raises(Interrupted):
            launch.simulate(recipe, run_dir=cut, progress=interrupt_at(at))
        assert RunFolder(cut).result() is None
        assert_same(launch.resume(cut), cut, reference, tmp_path / "whole")


def test_several_interruptions(tiny, tmp_path):
    recipe = five_rounds(tiny, CASES["quantile"])
    reference = launch.simulate(recipe, run_dir=tmp_path / "whole")
    with pytest.raises(Interrupted):
        launch.simulate(recipe, run_dir=tmp_path / "cut", progress=interrupt_at(1))
    for at in (4, 5):
        (tmp_path / "cut" / "checkpoints" / "round-000005.safetensors").unlink(missing_ok=True)
        with pytest.raises(Interrupted):
            launch.resume(tmp_path / "cut", progress=interrupt_at(at))
    assert_same(launch.resume(tmp_path / "cut"), tmp_path / "cut", reference, tmp_path / "whole")


@pytest.fixture(scope="module")
def _cut_once(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("once") / "cut"
    with pytest.raises(Interrupted):
        launch.simulate(five_rounds(tiny, {}), run_dir=path, progress=interrupt_at(2))
    return path


@pytest.fixture
def cut(_cut_once, tmp_path):
    """An interrupted run, the test's own copy."""
    return shutil.copytree(_cut_once, tmp_path / "cut")


@pytest.fixture(scope="module")
def _whole_once(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("once") / "whole"
    launch.simulate(five_rounds(tiny, {}), run_dir=path)
    return path


@pytest.fixture
def whole(_whole_once, tmp_path):
    """The run without an interruption, the test's own copy."""
    return shutil.copytree(_whole_once, tmp_path / "whole")


def contents(folder):
    return {
        path.name: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "tfevents" not in path.name
    }


def test_a_finished_run_gives_its_result(whole):
    result, before = RunFolder(whole).result(), contents(whole)
    kept = json.loads((whole / "result.json").read_text())
    assert launch.resume(whole) == kept | {"run": str(whole)}
    assert launch.resume(whole)["model_sha256"] == result["model_sha256"]
    assert contents(whole) == before


def test_all_rounds_done_but_no_result_yet(whole):
    result = RunFolder(whole).result()
    (whole / "result.json").unlink()
    assert launch.resume(whole)["model_sha256"] == result["model_sha256"]


def test_a_damaged_checkpoint_falls_back_to_the_one_before(cut, whole):
    reference = RunFolder(whole).result()
    newest = sorted((cut / "checkpoints").glob("*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:100])
    assert_same(launch.resume(cut), cut, reference, whole)


def test_no_readable_checkpoint(cut):
    for file in (cut / "checkpoints").glob("*.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(RunError, match="no checkpoint"):
        launch.resume(cut)


def test_a_changed_recipe_is_refused_and_nothing_changes(cut):
    file = cut / "recipe.toml"
    file.write_text(file.read_text().replace("epsilon = 8.0", "epsilon = 1.0"))
    before = contents(cut)
    with pytest.raises(LedgerError, match="does not belong to the recipe"):
        launch.resume(cut)
    assert contents(cut) == before


@pytest.mark.parametrize("damage", ["emptied", "an older copy"])
def test_a_ledger_behind_its_checkpoint_is_not_forgiven(tiny, tmp_path, damage):
    """The rounds that it has forgotten would be reported as free."""
    run = tmp_path / "run"
    recipe = five_rounds(tiny, {"run": {"checkpoint_every": 2}})
    older = tmp_path / "older.sqlite"

    def on_round(row):
        if row["round"] == 1:
            with (
                closing(sqlite3.connect(run / "ledger.sqlite")) as now,
                closing(sqlite3.connect(older)) as copy,
            ):
                now.backup(copy)
            with Ledger(older) as ledger:
                assert ledger.position() >= 1
        if row["round"] == 4:
            raise Interrupted

    with pytest.raises(Interrupted):
        launch.simulate(recipe, run_dir=run, progress=on_round)
    for file in run.glob("ledger.sqlite*"):
        file.unlink()
    (run / "ledger.sqlite").write_bytes(b"" if damage == "emptied" else older.read_bytes())
    before = (run / "metrics.jsonl").read_bytes()
    told = {
        "emptied": "is not a fedlgm ledger: restore",
        "an older copy": r"shows \d releases, but there were [45]",
    }
    with pytest.raises(LedgerError, match=told[damage]):
        launch.resume(run)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_two_processes_cannot_continue_one_run(cut):
    with (cut / "metrics.jsonl").open("a") as file:  # a round that has no checkpoint yet
        file.write(
            json.dumps({"round": 99, "noise_norm": 0.0, "noise_scale": 0.0, "skipped": True}) + "\n"
        )
    before = contents(cut)
    with (
        RunFolder(cut).lock(),
        pytest.raises(RunError, match="another process is working on the run"),
    ):
        launch.resume(cut)
    assert (cut / "metrics.jsonl").read_bytes() == before["metrics.jsonl"]
    assert launch.resume(cut)["rounds"] == 5


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "5"])
def test_a_damaged_result_is_one_message(finished, content):
    (finished / "result.json").write_text(content)
    with pytest.raises(RunError, match=r"result.json is damaged"):
        launch.resume(finished)


@pytest.mark.parametrize("line", [b"\xff\xfe", b"5", b"[1]", b"{}"])
def test_damaged_rows_are_done_again(cut, line):
    with (cut / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n")
    assert launch.resume(cut)["rounds"] == 5
    assert [row["round"] for row in RunFolder(cut).rows()] == [1, 2, 3, 4, 5]


def test_a_lost_ledger_is_not_forgiven(cut):
    """An empty ledger in its place would report the rounds before it as free."""
    for file in cut.glob("ledger.sqlite*"):
        file.unlink()
    with pytest.raises(LedgerError, match="not known"):
        launch.resume(cut)
    assert not (cut / "ledger.sqlite").exists()


def unseeded(tiny):
    return five_rounds(tiny, {"run": {"seed": None, "checkpoint_every": 5}})


def ledger_of(run):
    with Ledger(run / "ledger.sqlite") as ledger:
        return list(ledger.charges())


def test_an_unseeded_run_repeats_rounds_bit_by_bit_while_it_has_its_keys(tiny, tmp_path):
    run = tmp_path / "run"
    seen = []

    def on_round(row):
        seen.append((row["round"], row["loss"], row["epsilon"]))
        if row["round"] == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        launch.simulate(unseeded(tiny), run_dir=run, progress=on_round)
    before, keys = ledger_of(run), (run / "private" / "keys").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = launch.resume(run)
    rows = RunFolder(run).rows()
    assert seen == [(row["round"], row["loss"], row["epsilon"]) for row in rows[: len(seen)]]
    assert ledger_of(run)[: len(before)] == before
    assert len(ledger_of(run)) == 5
    assert 0 < result["epsilon"] <= unseeded(tiny).privacy.epsilon
    assert not result["noise_reproducible"]
    assert not (run / "private" / "keys").exists()  # what is finished is not drawn again
    again = launch.simulate(unseeded(tiny), run_dir=tmp_path / "another")
    assert again["model_sha256"] != result["model_sha256"]
    assert keys.split()[0].decode() not in (run / "result.json").read_text()


def test_an_unseeded_run_pays_for_repeated_rounds_once_its_keys_are_lost(tiny, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        launch.simulate(unseeded(tiny), run_dir=run, progress=interrupt_at(2))
    before = len(ledger_of(run))
    (run / "private" / "keys").unlink()
    with pytest.warns(
        UserWarning, match=r"\d rounds .* cannot be repeated .* will cost more than its budget"
    ):
        result = launch.resume(run)
    assert len(ledger_of(run)) == before + 5
    with Ledger(run / "ledger.sqlite") as ledger:
        first_attempt = ledger.epsilon(1e-5, "rdp", 0, before)
    assert result["epsilon"] > unseeded(tiny).privacy.epsilon
    rows = RunFolder(run).rows()
    assert (
        rows[0]["epsilon"] > first_attempt > 0
    )  # the rounds that were not repeated count from the start
    assert rows[-1]["epsilon"] == result["epsilon"]


def test_the_server_of_an_app_makes_a_finished_run_no_second_time(tiny, tmp_path):
    """`flwr run` on its folder; without its checkpoints it had been released again from the first
    round."""
    run = tmp_path / "run"
    result = launch.simulate(unseeded(tiny), run_dir=run)
    before = ledger_of(run)
    shutil.rmtree(run / "checkpoints")
    folder = RunFolder.open(run)
    again = serve(LocalGrid(None), Assembly(folder.recipe()), folder, "flower")
    assert ledger_of(run) == before
    assert (again["epsilon"], again["model_sha256"]) == (result["epsilon"], result["model_sha256"])


def test_a_run_continues_without_the_folder_of_its_checkpoints(tiny, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        launch.simulate(unseeded(tiny), run_dir=run, progress=interrupt_at(2))
    shutil.rmtree(run / "checkpoints")
    assert launch.resume(run)["epsilon"] <= unseeded(tiny).privacy.epsilon
    assert [file.name for file in RunFolder.open(run).checkpoints.files()] == [
        "round-000005.safetensors"
    ]


def test_not_a_run(tmp_path):
    with pytest.raises(RunError, match="not a run folder"):
        launch.resume(tmp_path)
    (tmp_path / "study" / "uniform-run0").mkdir(parents=True)
    (tmp_path / "study" / "uniform-run0" / "recipe.toml").touch()
    with pytest.raises(RunError, match=r"did you mean .*study/uniform-run0, which is in it\?"):
        launch.resume(tmp_path / "study")


def test_an_existing_folder_is_never_touched(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match="already exists"):
        launch.simulate(tiny(), run_dir=tmp_path / "run")
    assert contents(tmp_path / "run") == {"thesis.txt": b"mine"}
    shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_the_command_is_stopped_and_says_how_to_go_on(tiny, tmp_path, number, status):
    recipe = tiny(data={"partition": "hsu"}, federation={"rounds": 12}, run={"evaluate_every": 12})
    path, run = tmp_path / "slow.toml", tmp_path / "run"
    path.write_text(recipe.to_toml(), encoding="utf-8")

    def slow_down():
        begin = LayerwiseFedAvg.configure_train
        LayerwiseFedAvg.configure_train = lambda *given: time.sleep(0.1) or begin(*given)

    command = ForkedCommand(
        tmp_path / "said", "simulate", path, "--engine", "local", "--run-dir", run, before=slow_down
    )
    rows = run / "metrics.jsonl"
    command.wait_for(lambda: rows.exists() and rows.read_text().count("\n") >= 2)
    command.send(number)
    ended, _, err = command.end()
    assert ended == status
    assert f"continue with: fedlgm simulate --resume {run}" in err
    assert "Traceback" not in err
    assert not (run / "result.json").exists()
    resumed = launch.resume(run)
    assert (
        resumed["model_sha256"]
        == launch.simulate(recipe, run_dir=tmp_path / "whole")["model_sha256"]
    )


@pytest.mark.parametrize("changed", ["recipe", "ledger", "result"])
def test_a_finished_run_is_checked_before_its_summary_is_given_again(tiny, tmp_path, changed):
    """More rounds written into the recipe of a finished run would otherwise seem to have been
    run."""
    run, other = tmp_path / "run", tmp_path / "other"
    launch.simulate(five_rounds(tiny, {"federation": {"rounds": 2}}), run_dir=run)
    if changed == "recipe":
        file = run / "recipe.toml"
        file.write_text(file.read_text().replace("rounds = 2", "rounds = 9"))
    elif changed == "ledger":
        with closing(sqlite3.connect(run / "ledger.sqlite")) as db:
            db.execute("DELETE FROM charges WHERE number = 2")
            db.commit()
    else:
        launch.simulate(
            five_rounds(tiny, {"federation": {"rounds": 2}, "run": {"seed": 9}}), run_dir=other
        )
        shutil.copy(other / "result.json", run / "result.json")
    told = {
        "recipe": "the recipe was changed",
        "ledger": "rows were deleted",
        "result": "are not those that were charged",
    }
    with pytest.raises(LedgerError, match=told[changed]):
        launch.resume(run)


@pytest.mark.parametrize("privacy", [{}, {"trust": "local", "max_participations": 12}])
@pytest.mark.parametrize("lost", ["ledger", "its last rows"])
def test_rounds_that_metrics_show_are_on_the_ledger(tiny, tmp_path, lost, privacy):
    """Also before the first checkpoint: a new ledger would show those rounds as never released."""
    run = tmp_path / "run"
    sections = {"federation": {"rounds": 12}, "run": {"checkpoint_every": 20}, "privacy": privacy}
    with pytest.raises(Interrupted):
        launch.simulate(five_rounds(tiny, sections), run_dir=run, progress=interrupt_at(2))
    assert not list((run / "checkpoints").iterdir())
    before = (run / "metrics.jsonl").read_bytes()
    if lost == "ledger":
        for file in run.glob("ledger.sqlite*"):
            file.unlink()
    else:
        with closing(sqlite3.connect(run / "ledger.sqlite")) as db:
            db.execute("DELETE FROM charges WHERE round > 1")
            db.commit()
    with pytest.raises(LedgerError, match=r"has released rounds but no|no charge for round \d"):
        launch.resume(run)
    assert (run / "metrics.jsonl").read_bytes() == before


def _without(*names):
    return lambda meta, tensors: (
        meta,
        {n: t for n, t in tensors.items() if not n.startswith(names)},
    )


EDITS = {
    "made after 1 rounds": lambda meta, tensors: (meta | {"rounds": "1"}, tensors),
    "made after -1 rounds": lambda meta, tensors: (meta | {"rounds": "-1"}, tensors),
    "no plan or no released mean": lambda meta, tensors: (meta | {"plan": ""}, tensors),
    "not a release plan": lambda meta, tensors: (meta | {"plan": "{"}, tensors),
    "it has no model": _without("models."),
    r"\d rounds leave 3 models, not 2": _without("models.2"),
    "its models differ in size": lambda meta, tensors: (
        meta,
        tensors | {"models.0": tensors["models.0"][:5]},
    ),
    "no plan or no released mean.*": _without("mean"),
}


@pytest.mark.parametrize("problem", EDITS)
def test_an_edited_checkpoint_is_refused(cut, problem):
    """Earlier versions went on from it, or stopped with a traceback."""
    newest = RunFolder(cut).checkpoints.files()[-1]
    with safe_open(newest, framework="pt") as stored:
        meta, tensors = EDITS[problem](dict(stored.metadata()), load_file(newest))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, newest, metadata=meta)
    with pytest.raises(RunError, match=f"{newest.name} is damaged or was edited: .*{problem}"):
        launch.resume(cut)
