"""Bad input at the command line ends with one message and status 2, and nothing is touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simulations.cli import app


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


SIMULATE = ("simulate", "RECIPE", "--engine", "local", "--run-dir", "new")
BAD = {
    "address": (
        (*SIMULATE, "--ray-address", "127.0.0.1:1"),
        [("a Ray address is for engine 'ray', not 'local'")],
    ),
    "supernodes": (
        (*SIMULATE, "--supernodes", "3"),
        [("SuperNodes is for engine 'flower', not 'local'")],
    ),
    "unknown key": (
        (*SIMULATE, "--set", "federation.round=3"),
        [("federation.round: unknown key"), "rounds"],
    ),
    "wrong type": ((*SIMULATE, "--set", "federation.rounds=many"), ["federation.rounds", "many"]),
    "epsilon zero": ((*SIMULATE, "--set", "privacy.epsilon=0"), ["privacy.epsilon", "above 0"]),
    "epsilon below zero": (
        (*SIMULATE, "--set", "privacy.epsilon=-3"),
        ["privacy.epsilon", "above 0"],
    ),
    "delta": ((*SIMULATE, "--set", "privacy.delta=2"), ["privacy.delta", "below 1"]),
    "rounds": ((*SIMULATE, "--rounds", "0"), ["federation.rounds"]),
    "cohort": (
        (*SIMULATE, "--set", "federation.cohort=21", "--set", "federation.rate=0.5"),
        ["exactly one of rate"],
    ),
    "mechanism": (
        (*SIMULATE, "--set", "mechanism.name=typo"),
        ["unknown mechanism 'typo'", "uniform", "lm-dp-sgd"],
    ),
    "option": (
        (*SIMULATE, "--set", "mechanism.bounds=1"),
        [("no option 'bounds'; did you mean 'bound'?")],
    ),
    "bound": ((*SIMULATE, "--set", "mechanism.bound=-1"), ["bound must be finite and positive"]),
    "norms": (
        (*SIMULATE, "--set", "mechanism.clip=med", "--set", "mechanism.public_norms=[1.0]"),
        ["public_norms has 1 entries for 2 layers"],
    ),
    "model": ((*SIMULATE, "--set", "model.name=typo"), ["typo", "mlp"]),
    "model option": ((*SIMULATE, "--set", "model.depth=3"), ["depth"]),
    "data set": ((*SIMULATE, "--set", "data.name=typo"), ["typo", "digits"]),
    "partition": ((*SIMULATE, "--set", "data.partition=typo"), ["typo", "dirichlet"]),
    "partition option": ((*SIMULATE, "--set", "data.beta=3"), ["beta"]),
    "missing data": (
        (*SIMULATE, "--set", "data.name=mnist", "--set", "data.dir=EMPTY"),
        ["mnist", "EMPTY"],
    ),
    "mechanism, mistyped": (
        (*SIMULATE, "--set", "mechanism.name=unifrm"),
        ["'unifrm'; did you mean 'uniform'?"],
    ),
    "recipe": (
        ("simulate", "nothing", "--engine", "local"),
        ["no recipe 'nothing'", "`fedlgm doctor`", "digits"],
    ),
    "recipe, mistyped": (
        ("plan", "fashon-mnist"),
        [("neither a file nor bundled; did you mean 'fashion-mnist'")],
    ),
    "key, mistyped": (
        (*SIMULATE, "--set", "privacy.epsilo=1"),
        [("unknown key; did you mean 'epsilon'?")],
    ),
    "audit": (("audit", "nonsense"), ["nothing to audit at 'nonsense'", "`fedlgm doctor`"]),
    "audit, mistyped": (
        ("audit", "snr-consistant"),
        ["nothing to audit", "did you mean 'snr-consistent'?"],
    ),
    "engine": (
        ("simulate", "RECIPE", "--engine", "spark"),
        ["unknown engine 'spark'", "local, ray, flower"],
    ),
    "no folder": (("simulate", "--resume", "nowhere"), ["not a run folder"]),
    "report": (("report", "nowhere"), ["not a run folder"]),
    "ledger": (("ledger", "nowhere"), ["not a run folder"]),
    "calibrate epsilon": (
        ("calibrate", "--epsilon", "0", "--delta", "1e-5", "--steps", "5"),
        ["epsilon"],
    ),
    "calibrate delta": (("calibrate", "--epsilon", "1", "--delta", "0", "--steps", "5"), ["delta"]),
    "calibrate steps": (
        ("calibrate", "--epsilon", "1", "--delta", "1e-5", "--steps", "0"),
        ["steps"],
    ),
    "calibrate rate": (
        ("calibrate", "--epsilon", "1", "--delta", "1e-5", "--steps", "5", "--sampling-rate", "2"),
        ["sampling_rate"],
    ),
    "calibrate relation": (
        (
            "calibrate",
            "--epsilon",
            "1",
            "--delta",
            "1e-5",
            "--steps",
            "5",
            "--relation",
            "swap-out",
        ),
        ["swap-out", "replace-one"],
    ),
    "calibrate accountant": (
        ("calibrate", "--epsilon", "1", "--delta", "1e-5", "--steps", "5", "--accountant", "gdp"),
        ["gdp", "pld, rdp"],
    ),
    "bare key": ((*SIMULATE, "--set", "epsilon=3"), ["did you mean 'privacy.epsilon'?"]),
    "section for its name": (
        ("plan", "digits", "--set", "mechanism=uniform"),
        ["did you mean 'mechanism.name'?"],
    ),
    "key without a value": (
        (*SIMULATE, "--set", "privacy.epsilon"),
        ["take section.key=value, got 'privacy.epsilon'"],
    ),
    "key of a key": (
        (*SIMULATE, "--set", "model.adapters.rank=2"),
        ["a table is set as a whole: --set 'model.adapters={rank = VALUE}'"],
    ),
    "value without a key": ((*SIMULATE, "--set", "=3"), ["take section.key=value, got '=3'"]),
    "place of the run": (
        ("simulate", "RECIPE", "--engine", "local", "--run-dir", "/proc/x"),
        ["choose another"],
    ),
    "unit": (
        ("plan", "digits", "--set", "privacy.unit=example"),
        [("set privacy.unit = 'client', or use one")],
    ),
    "trust": (
        ("plan", "digits", "--set", "privacy.trust=locl"),
        [("must be 'central', 'local' or 'distributed'")],
    ),
    "noise": (
        ("plan", "digits", "--set", "privacy.noise=banded"),
        [("set federation.sampling to 'cyclic'")],
    ),
    "no clients drawn": (
        ("plan", "digits", "--set", "federation.rate=0"),
        ["federation.rate: must be above 0, got 0"],
    ),
    "negative rate": (
        ("plan", "digits", "--set", "training.lr=-1"),
        ["training.lr: must be above 0, got -1"],
    ),
    "empty batch": (
        ("plan", "ten-hospitals", "--set", "training.batch_size=0"),
        ["batch_size: must be at least 1"],
    ),
    "model, nearly": (
        ("plan", "digits", "--set", "model.name=resnet"),
        ["did you mean 'resnet20' or 'resnet18'?"],
    ),
    "owners": (
        ("partition", "digits", "--set", "data.partition=natural"),
        ["name the owner of each example (users=)"],
    ),
    "partition's recipe": (("partition", "nothing"), ["no recipe 'nothing'"]),
    "study": (
        ("study", "nothing"),
        [("no study 'nothing'; known: those of `fedlgm study --list`, or a TOML file")],
    ),
    "study's grid": (("study", "digits", "--grid", "mechanism"), ["--grid takes key=value,value"]),
    "study's key": (
        ("study", "digits", "--grid", "epsilon=1,2"),
        ["did you mean 'privacy.epsilon'?"],
    ),
    "study's mechanism": (
        ("study", "digits", "--grid", "mechanism=typo"),
        ["unknown mechanism 'typo'"],
    ),
    "compared mechanism": (
        ("compare", "digits", "--methods", "typo"),
        ["unknown mechanism 'typo'"],
    ),
    "compared seeds": (
        ("compare", "digits", "--methods", "uniform", "--seeds", "0"),
        ["--seeds must be at least 1"],
    ),
    "compared recipe": (("compare", "nothing"), ["no recipe 'nothing'"]),
    "exported run": (
        ("export", "nowhere"),
        [("nowhere is not a run folder (it has no recipe.toml)")],
    ),
    "public data": (("recommend", "digits", "--public", "nowhere"), ["unknown data set 'nowhere'"]),
    "search of nothing": (
        ("tune", "digits"),
        [("give at least one key and its values, such as training.lr=0.1,0.5")],
    ),
    "search without values": (
        ("tune", "digits", "--search", "training.lr"),
        ["--search takes key=value"],
    ),
    "searched key": (("tune", "digits", "--search", "lr=0.1"), ["did you mean 'training.lr'"]),
    "no base to write": (("pretrain", "digits"), ["--out names no file"]),
    "public text": (
        ("pretrain", "text-adapters", "--text", "nowhere.txt"),
        ["cannot be read", "nowhere.txt"],
    ),
    "attacked recipe": (("attack", "inversion", "nothing"), ["no recipe 'nothing'"]),
    "audited run": (
        ("audit", "nowhere/run"),
        [("neither a mechanism, nor a recipe, nor a run's folder")],
    ),
    "risk": (("risk", "nothing"), ["no recipe 'nothing'"]),
    "node": (
        ("node", "status", "nowhere"),
        [("not a node's folder (it has no policy.toml); make one: fedlgm node")],
    ),
    "winners": (
        ("plan", "digits", "--set", "mechanism.name=layer-vote", "--set", "mechanism.winners=9"),
        ["winners = 9 of only 2 layers that compete"],
    ),
}


def test_there_are_many():
    assert len(BAD) >= 60


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD)
def test_bad_input(run, tiny_file, tmp_path, monkeypatch, arguments, words):
    monkeypatch.setenv("FEDLGM_OFFLINE", "1")
    empty = tmp_path / "empty"
    empty.mkdir()
    filled = [a.replace("RECIPE", str(tiny_file)).replace("EMPTY", str(empty)) for a in arguments]
    status, out, err = run(*filled)
    assert status == 2
    assert out == ""
    for word in words:
        assert word.replace("EMPTY", str(empty)) in err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
    assert len(err) < 900
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "--epsilon", "3"), "use --set privacy.epsilon=VALUE."),
        (("simulate", "--max-participations", "3"), "--set privacy.max_participations=VALUE"),
        (("simulate", "--jsno"), "--json"),
        (("plan", "--mechanism", "uniform"), "use --set mechanism.name=VALUE."),
        (("recommend", "--model", "cnn"), "use --set model.name=VALUE."),
        (("compare", "--mechanism", "uniform"), "use --methods."),
    ],
)
def test_an_option_that_is_a_key_of_the_recipe(run, arguments, words):
    status, _, err = run(*arguments)
    assert status == 2
    assert words in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("mechanisms",),
            "No such command 'mechanisms': `fedlgm doctor` lists recipes, mechanisms, models",
        ),
        (("recipes",), "`fedlgm doctor` lists recipes"),
        (("studies",), "`fedlgm study --list` the studies."),
        (("simulat",), "did you mean 'simulate'?"),
        (("resume", "runs/digits"), "No such command 'resume': use simulate --resume."),
        (("run", "digits"), "No such command 'run': use simulate."),
        (("version",), "use --version."),
        (("first",), "known: simulate, new, pretrain"),
        (("node", "stats"), "No such command 'stats': did you mean 'status'?"),
        (("attack", "digits"), "known: mia, lira"),
        (("deploy", "stop", "lab"), "No such command 'stop': use down."),
        (("deploy", "start", "lab"), "No such command 'start': use up."),
    ],
)
def test_an_unknown_command_leads_to_one_that_is_there(run, arguments, words):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    said = " ".join(err.replace("│", " ").split())
    assert words in said
    assert said.lower().count("did you mean") <= 1


def test_a_cohort_larger_than_the_population(run, tiny_file, tmp_path):
    text = tiny_file.read_text().replace("rate = 0.5", "cohort = 21")
    tiny_file.write_text(text)
    status, _, err = run("simulate", tiny_file, "--engine", "local")
    assert status == 2
    assert "federation: cohort = 21 is more than the 20 clients" in err


def test_an_existing_folder(run, finished, tiny_file):
    before = contents(finished)
    status, _, err = run("simulate", tiny_file, "--engine", "local", "--run-dir", finished)
    assert status == 2
    assert "already exists" in err
    assert "--resume" in err
    assert contents(finished) == before


def test_a_damaged_ledger(run, finished):
    (finished / "ledger.sqlite").write_bytes(b"x" * 5000)
    (finished / "result.json").unlink()
    for arguments in (
        ("ledger", finished),
        ("simulate", "--resume", finished, "--engine", "local"),
    ):
        status, out, err = run(*arguments)
        assert (status, out) == (2, "")
        assert "ledger.sqlite cannot be used" in err
        assert "Traceback" not in err


@pytest.mark.parametrize(
    "extra",
    [("--rounds", "9"), ("--seed", "1"), ("--set", "privacy.epsilon=9"), ("--run-dir", "x")],
)
def test_a_resumed_run_takes_no_overrides(run, finished, extra):
    status, _, err = run("simulate", "--resume", finished, "--engine", "local", *extra)
    assert status == 2
    assert "leave out the recipe and every override" in err


def test_a_resumed_run_keeps_its_recipe(run, finished):
    (finished / "result.json").unlink()
    recipe = finished / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("rounds = 3", "rounds = 4"))
    before = contents(finished)
    status, _, err = run("simulate", "--resume", finished, "--engine", "local")
    assert status == 2
    assert "does not belong to the recipe" in err
    assert contents(finished) == before


@pytest.mark.slow
def test_the_process_itself(tmp_path):
    """Status and streams as a shell sees them."""
    command = [
        sys.executable,
        "-m",
        "simulations.cli",
        "simulate",
        "--set",
        "privacy.epsilon=-1",
        "--engine",
        "local",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: privacy.epsilon")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_argument_too_many_names_the_options():
    done = CliRunner().invoke(app, ["compare", "digits", "uniform"])
    assert done.exit_code == 2
    assert "--methods" in done.output
