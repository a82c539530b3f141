"""`run.audit` and `fedlgm audit` on real runs, and the command's exit status."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from federations import tiny_values
from rich.console import Console
from typer.testing import CliRunner

from fedlgm.errors import ConfigError, FedlgmError, RunError
from fedlgm.noise.run_noise import RunNoise
from fedlgm_lab.audits import Audit, Subject
from fedlgm_lab.audits.runs import targets
from fedlgm_lab.audits.runs.audit_command import table
from simulations import launch
from simulations.cli import app
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.runs import new_folder
from simulations.runs.folder import RunFolder
from simulations.summaries import terminal


@pytest.fixture(scope="module")
def seeded(tmp_path_factory):
    """A finished run without canaries whose noise can be drawn again; nobody changes it."""
    path = tmp_path_factory.mktemp("runs") / "seeded"
    launch.simulate(recipes.Recipe.model_validate(tiny_values()), run_dir=path)
    return path


def test_a_simulation_with_canaries(tiny, tmp_path, capsys):
    run = tmp_path / "run"
    result = launch.simulate(tiny(run={"audit": True}), run_dir=run)
    assert result["audit_passed"]
    assert (
        0
        < result["audited_epsilon"]
        <= result["epsilon"]
        == pytest.approx(result["claimed_epsilon"], rel=1e-3)
    )
    rows = list(RunFolder.open(run).canaries)
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert (run / "private" / "canaries.jsonl").stat().st_mode & 0o077 == 0
    # Canaries see sums before their noise, which nothing bounds: what they say is the operator's,
    # and stays private.
    assert not any("audit" in name for name in RunFolder.open(run).result())
    assert RunFolder.open(run).audit_summary()["audited_epsilon"] == result["audited_epsilon"]
    assert (run / "private" / "audit.json").stat().st_mode & 0o077 == 0
    assert launch.resume(run)["audited_epsilon"] == result["audited_epsilon"]
    Console().print(terminal.summary(result))
    assert "epsilon audited" in capsys.readouterr().out
    audited = targets.audit_run(run, Audit())
    assert audited.passed
    assert audited.epsilon_lower == pytest.approx(result["audited_epsilon"], rel=0.3)
    assert [row.layer for row in audited.layers] == ["fc1", "fc2"]


def test_an_audited_run_of_published_medclip_is_not_as_claimed(tiny, tmp_path):
    recipe = tiny(run={"audit": True}, mechanism={"variant": "published", "clip": "med"})
    result = launch.simulate(recipe, run_dir=tmp_path / "run")
    assert math.isinf(result["epsilon"])
    assert (
        result["audited_epsilon"] < result["claimed_epsilon"]
    )  # its noise is as planned, its plan is not pure
    assert not result["audit_passed"]
    assert not targets.audit_run(tmp_path / "run", Audit()).passed


def test_an_interrupted_audited_run_keeps_what_its_canaries_saw(tiny, tmp_path):
    recipe = tiny(run={"audit": True})
    whole = launch.simulate(recipe, run_dir=tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(row):
        if row["round"] == 2:
            raise Stop

    with pytest.raises(Stop):
        launch.simulate(recipe, run_dir=tmp_path / "cut", progress=stop)
    again = launch.resume(tmp_path / "cut")
    assert again["model_sha256"] == whole["model_sha256"]
    one, other = (list(RunFolder.open(tmp_path / name).canaries) for name in ("whole", "cut"))
    assert [row["layer_aligned"] for row in one] == [row["layer_aligned"] for row in other]


def test_a_damaged_record_is_refused(tiny, tmp_path):
    launch.simulate(tiny(run={"audit": True}), run_dir=tmp_path / "run")
    file = tmp_path / "run" / "private" / "canaries.jsonl"
    file.write_text(file.read_text().replace('"layer_aligned": [[', '"layer_aligned": [["x", '))
    with pytest.raises(RunError, match=r"canaries.jsonl: a damaged row"):
        targets.audit_run(tmp_path / "run", Audit())


def test_a_mechanism_of_ones_own_is_audited_by_its_dotted_name(tmp_path, monkeypatch):
    """The documentation's example."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "docs" / "examples"))
    result = CliRunner().invoke(
        app, ["audit", "own_mechanism:InverseSize", "--seed", "0", "--json"]
    )
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert 0.7 * found["epsilon_reported"] < found["epsilon_lower"] <= found["epsilon_reported"]
    with pytest.raises(ConfigError, match="did you mean 'InverseSize'"):
        targets.audit_mechanism("own_mechanism:Inverse", Audit())
    file = tmp_path / "a:recipe.toml"
    file.write_text("")
    assert targets.kind_of(str(file)) == "recipe"  # paths may have a colon, too


@pytest.mark.slow
def test_canaries_are_part_of_the_bits_and_their_absence_changes_nothing(tiny, tmp_path):
    plain, audited = (
        launch.simulate(tiny(run={"audit": flag}), run_dir=tmp_path / str(flag))
        for flag in (False, True)
    )
    assert plain["model_sha256"] != audited["model_sha256"]
    assert "audited_epsilon" not in plain
    assert not list(RunFolder.open(tmp_path / "False").canaries)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {
                "mechanism": {"name": "laplace-inid"},
                "privacy": {"accountant": "pld", "epsilon": 1.0},
                "federation": {"rate": 1.0},
            },
            "Gaussian noise",
        ),
        ({"mechanism": {"name": "none"}}, "no noise"),
        ({"privacy": {"trust": "local", "max_participations": 2}}, "own upload"),
    ],
)
def test_runs_that_canaries_do_not_fit_are_refused_before_anything_is_written(
    tiny, tmp_path, sections, message
):
    with pytest.raises(ConfigError, match=f"run.audit: .*{message}"):
        launch.simulate(tiny(run={"audit": True}, **sections), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_seeded_run_is_audited_by_its_own_noise(seeded):
    result = targets.audit_run(seeded, Audit(canaries=100, seed=0))
    assert result.passed
    assert 0.3 * result.epsilon_reported < result.epsilon_lower <= result.epsilon_reported
    assert result.epsilon_reported == pytest.approx(8.0, rel=1e-3)
    assert "noise on the ledger" in {check.name for check in result.checks}


def test_an_audit_writes_nothing_to_the_ledger(seeded, tmp_path):
    """An auditor's copy may be read-only; here somebody else holds the ledger for writing."""
    copy = shutil.copytree(seeded, tmp_path / "copy")
    with closing(sqlite3.connect(copy / "ledger.sqlite", isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        assert targets.audit_run(copy, Audit(canaries=100, seed=0)).passed


def test_another_seed_is_not_that_of_the_ledger(seeded, tmp_path):
    copy = shutil.copytree(seeded, tmp_path / "copy")
    text = (copy / "recipe.toml").read_text()
    (copy / "recipe.toml").write_text(text.replace("seed = 3", "seed = 4"))
    with pytest.raises(FedlgmError, match="ledger"):  # it belongs to the recipe as it was
        targets.audit_run(copy, Audit(canaries=100, seed=0))


def test_a_run_with_less_noise_than_it_reports_is_caught(seeded, monkeypatch):
    """As if the run's release had drawn half the noise of its plan."""
    honest = targets.release

    def half(total, plan, keys, round, **options):
        exact = total.clone()
        noisy = honest(total, plan, keys, round, **options)
        return noisy.copy_((noisy + exact) / 2)

    monkeypatch.setattr(targets, "release", half)
    result = targets.audit_run(seeded, Audit(canaries=100, seed=0))
    assert result.exceeded
    assert "noise scale" in [check.name for check in result.checks if not check.passed]


CORRELATED = {"federation": {"sampling": "cyclic", "rounds": 6}, "privacy": {"noise": "banded"}}


@pytest.mark.parametrize("seed", [3, None])
def test_a_simulation_whose_rounds_are_one_mechanism(tiny, tmp_path, seed):
    """Two groups take turns in six rounds of correlated noise: the run is audited as a whole, from
    its own canaries."""
    result = launch.simulate(
        tiny(run={"audit": True, "seed": seed}, **CORRELATED), run_dir=tmp_path / "run"
    )
    assert result["audit_passed"]
    assert (
        0.2 * result["epsilon"]
        < result["audited_epsilon"]
        <= result["epsilon"]
        == pytest.approx(8.0, rel=1e-3)
    )
    assert [row["round"] for row in RunFolder.open(tmp_path / "run").canaries] == [1, 2, 3, 4, 5, 6]
    audited = targets.audit_run(tmp_path / "run", Audit())
    assert audited.passed
    assert [row.layer for row in audited.layers] == ["fc1", "fc2"]


def test_an_interrupted_run_whose_rounds_are_one_mechanism(tiny, tmp_path):
    class Stop(Exception):
        pass

    def stop(row):
        if row["round"] == 3:
            raise Stop

    recipe = tiny(run={"audit": True}, **CORRELATED)
    with pytest.raises(Stop):
        launch.simulate(recipe, run_dir=tmp_path / "cut", progress=stop)
    result = launch.resume(tmp_path / "cut")
    whole = launch.simulate(recipe, run_dir=tmp_path / "whole")
    assert result["model_sha256"] == whole["model_sha256"]
    assert result["audit_passed"]
    # The check of the noise starts again; the bound itself has every round.
    assert result["audited_epsilon"] == pytest.approx(whole["audited_epsilon"], rel=0.05)


def test_recipes_and_seeded_runs_whose_rounds_are_one_mechanism(tiny, tmp_path, monkeypatch):
    overrides = ["federation.rounds=20", "federation.clients=40"]
    found = targets.audit_recipe(
        "correlated-digits", Audit(canaries=1500, seed=0), overrides=overrides
    )
    assert found.passed
    assert 0.6 * found.epsilon_reported < found.epsilon_lower <= found.epsilon_reported
    with pytest.raises(ConfigError, match="one mechanism"):
        targets.audit_recipe(
            "correlated-digits", Audit(method="distinguisher"), overrides=overrides
        )
    run = tmp_path / "run"
    launch.simulate(tiny(**CORRELATED), run_dir=run)
    replayed = targets.audit_run(run, Audit(canaries=300, seed=0))
    assert replayed.passed
    assert "noise on the ledger" in {check.name for check in replayed.checks}
    assert 0.4 * replayed.epsilon_reported < replayed.epsilon_lower <= replayed.epsilon_reported
    honest = targets.release

    def anew(total, plan, keys, round, run_noise, **options):
        """Drawn for this round alone, as if there had been no rounds before it."""
        return honest(
            total,
            dataclasses.replace(plan, position=0),
            keys.derive(bytes([round])),
            1,
            **options,
            run_noise=RunNoise(),
        )

    monkeypatch.setattr(targets, "release", anew)
    caught = targets.audit_run(run, Audit(canaries=300, seed=0))
    assert "noise independence" in [check.name for check in caught.checks if not check.passed]


def test_a_round_that_released_nothing_asked_no_queries_either(tiny):
    """Such a round was taken for one of queries alone, which canaries cannot be put into."""
    recipe = tiny(mechanism={"clip": "med", "norms": "quantile"})
    assembly = Assembly(recipe)
    first = assembly.privacy.method.plan(assembly.privacy.start())
    layers = len(assembly.model.layers)
    row = {"round": 2, "clip": [0.0] * layers, "sigma": [None] * layers}
    assert first.queries
    assert targets._recorded_plan(first, row | {"skipped": True}).size == 0
    whole = {"round": 2, "clip": first.clip.tolist(), "sigma": first.sigma.tolist()}
    assert targets._recorded_plan(first, whole).size == first.size


def test_unseeded_and_unfinished_runs_say_what_to_run_again(tiny, tmp_path):
    launch.simulate(tiny(run={"seed": None}), run_dir=tmp_path / "unseeded")
    with pytest.raises(RunError, match=r"--set run.audit=true .* --seed N"):
        targets.audit_run(tmp_path / "unseeded", Audit())
    assert targets.audit_run(
        tmp_path / "unseeded", Audit(method="probe")
    ).passed  # its recipe's mechanism
    new_folder.create(tmp_path / "unfinished", tiny())
    with pytest.raises(RunError, match="--resume"):
        targets.audit_run(tmp_path / "unfinished", Audit())


@pytest.mark.slow
def test_an_unseeded_run_with_canaries(tiny, tmp_path):
    launch.simulate(tiny(run={"seed": None, "audit": True}), run_dir=tmp_path / "run")
    assert targets.audit_run(tmp_path / "run", Audit()).passed


def test_recipes_are_audited_in_their_own_setting(tiny_file):
    result = targets.audit_recipe(str(tiny_file), Audit(canaries=200, seed=0))
    assert result.passed
    assert result.epsilon_reported == pytest.approx(8.0, rel=0.05)
    assert "tiny" in result.subject
    caught = targets.audit_recipe(
        str(tiny_file),
        Audit(trials=200, seed=0),
        variant="published",
        overrides=["mechanism.clip=med"],
    )
    assert not caught.passed


def test_both_epsilons_of_noise_in_shares_are_printed(capsys):
    found = targets.audit_recipe("distributed-digits", Audit("probe"))
    assert found.passed
    Console(width=120).print(table(found))
    lines = capsys.readouterr().out.splitlines()
    for adversary, nodes, stated in (
        ("the server", "17 nodes", "8"),
        ("readers", "20 nodes", "7.264"),
    ):
        (line,) = [line for line in lines if f" {adversary} " in line and nodes in line]
        assert "at least" in line and f" {stated} " in line  # noqa: PT018


EXAMPLES = [
    "federation.rounds=4",
    "mechanism.error_rates=[0.4,0.2]",
    "run.evaluate_every=4",
    "privacy.accountant=rdp",
]


def test_recipes_and_runs_that_protect_examples(tmp_path):
    audit = Audit(trials=200, canaries=400, seed=0)
    assert targets.audit_recipe("lm-dp-sgd-digits", audit, overrides=EXAMPLES).passed
    run = tmp_path / "sound"
    launch.simulate(recipes.load("lm-dp-sgd-digits", EXAMPLES), run_dir=run)
    found = targets.audit_run(run, audit)
    assert found.passed
    assert "noise on the ledger" in [check.name for check in found.checks]
    assert 0.3 * found.epsilon_reported < found.epsilon_lower


@pytest.mark.slow
def test_a_published_run_that_protects_no_example_is_caught(tmp_path):
    audit = Audit(trials=200, canaries=400, seed=0)
    run = tmp_path / "published"
    changes = [text for text in EXAMPLES if "strengths" not in text]
    result = launch.simulate(
        recipes.load("lm-dp-sgd-digits", [*changes, "mechanism.variant=published"]), run_dir=run
    )
    assert math.isinf(result["epsilon"])
    assert result["claimed_epsilon"] <= 4
    assert "section LM-DP-SGD" in result["guarantee"]
    caught = targets.audit_run(run, audit)
    assert not caught.passed
    assert "plan purity" in [check.name for check in caught.checks if not check.passed]


def test_local_steps_are_not_single_releases_but_those_of_one_client_are_audited():
    """The command in the message audits the client's noise at its cost."""
    with pytest.raises(ConfigError, match="add noise to every local step") as caught:
        targets.audit_recipe("example-level-federation", Audit(method="probe"))
    command = shlex.split(str(caught.value).partition(": fedlgm ")[2])
    assert command[:2] == ["audit", "dp-sgd"]
    done = CliRunner().invoke(app, [*command, "--method", "probe", "--json"])
    assert (done.exit_code, json.loads(done.stdout)["epsilon_reported"]) == (
        0,
        pytest.approx(8.0, abs=1e-3),
    )
    given = dict(zip(command[2::2], command[3::2], strict=True))
    budget = {name: float(given[f"--{name}"]) for name in ("epsilon", "delta", "rate")}
    steps = Subject.of("dp-sgd", "sound", **budget, rounds=int(given["--rounds"])).method.facts
    assert (
        steps.noise_multiplier
        == Assembly(recipes.load("example-level-federation")).privacy.facts.noise_multiplier
    )


def test_the_command_draws_prints_and_exits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = ["--seed", "0", "--canaries", "300", "--trials", "200"]
    done = CliRunner().invoke(app, ["audit", "snr-consistent", *short, "--out", "audit.png"])
    assert done.exit_code == 0
    assert "epsilon audited" in done.stdout
    assert (tmp_path / "audit.png").stat().st_size > 10_000
    done = CliRunner().invoke(app, ["audit", "ladp", "--variant", "published", *short, "--json"])
    assert done.exit_code == 1
    shown = json.loads(done.stdout)
    assert not shown["passed"]
    assert shown["epsilon_lower"] > shown["epsilon_reported"]
    assert {"method", "confidence", "checks", "layers"} <= shown.keys()
    done = CliRunner().invoke(
        app, ["audit", "lm-dp-sgd", "--variant", "published", "--epsilon", "1", *short, "--json"]
    )
    assert done.exit_code == 1
    shown = json.loads(done.stdout)
    assert shown["epsilon_lower"] > shown["epsilon_reported"]
    assert "moves the sum by 10.06" in json.dumps(shown["checks"])
    done = CliRunner().invoke(app, ["audit", "lm-dp-sgd", *short, "--json"])
    assert done.exit_code == 0
    done = CliRunner().invoke(app, ["audit", "none", *short, "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["epsilon_reported"] == "inf"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing-of-that-name"], "neither a mechanism"),
        (["gaussian", "--method", "best"], "known: auto"),
        (["gaussian", "--canaries", "1"], "at least 2"),
        (["gaussian", "--variant", "published"], "no variant"),
        (["laplace-iid", "--epsilon", "1", "--trials", "9"], "at least 32"),
        (["gaussian", "--confidence", "1.5"], "confidence"),
        (["gaussian", "--set", "colour=red"], "colour"),
    ],
)
def test_bad_input_is_refused_with_one_message(arguments, message):
    done = CliRunner().invoke(app, ["audit", *arguments])
    assert isinstance(done.exception, FedlgmError)  # `main` turns it into status 2
    assert message in str(done.exception)


def test_a_finished_run_takes_no_overrides(seeded):
    done = CliRunner().invoke(app, ["audit", str(seeded), "--variant", "sound"])
    assert isinstance(done.exception, ConfigError)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "epsilon"), [("gaussian", 4), ("snr-consistent", 8)])
def test_tightness_in_one_training_run(tmp_path, name, epsilon):
    """A real run of the default recipe: the audited epsilon is at least 0.7 of the proven one."""
    overrides = [f"mechanism.name={name}", f"privacy.epsilon={epsilon}", "run.audit=true"]
    result = launch.simulate(recipes.load("digits", overrides), run_dir=tmp_path / "run")
    assert result["audit_passed"]
    assert 0.7 * result["epsilon"] <= result["audited_epsilon"] <= result["epsilon"]
    assert result["accuracy"] > 0.8


def test_the_plan_of_a_finished_round_comes_from_its_row(seeded):
    folder = RunFolder.open(seeded)
    assembly = Assembly(folder.recipe())
    first = assembly.privacy.method.plan(assembly.privacy.start())
    plan = targets._recorded_plan(first, folder.rows()[1])
    assert plan.clip.tolist() == first.clip.tolist()
    assert np.isfinite(plan.sigma).all()
    assert math.isclose(plan.effective_multiplier, first.effective_multiplier, rel_tol=1e-6)
