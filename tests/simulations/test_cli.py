"""The command line: what it prints, as JSON and for people."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import textwrap
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import typer
from rich.text import Text

from fedlgm import mechanisms
from fedlgm.privacy import attack_rates, calibrate
from fedlgm.privacy.accountants import ACCOUNTANTS
from fedlgm.privacy.events import gaussian_event
from fedlgm.privacy.ledger import Ledger
from simulations.cli import app
from simulations.ending import ending
from simulations.runs import strict_json
from simulations.summaries.planning import plan_report
from tests.support.forked import run_afresh
from tests.support.undrawn import without_drawing


def test_simulate(run, tiny_file, tmp_path):
    status, out, err = run(
        "simulate",
        tiny_file,
        "--engine",
        "local",
        "--rounds",
        2,
        "--seed",
        5,
        "--run-dir",
        tmp_path / "r",
        "--json",
    )
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert {
        "run",
        "engine",
        "rounds",
        "accuracy",
        "loss",
        "epsilon",
        "claimed_epsilon",
        "delta",
        "guarantee",
        "noise_multiplier",
        "model_sha256",
        "seconds_per_round",
    } <= result.keys()
    assert (result["engine"], result["rounds"], result["delta"]) == ("local", 2, 1e-5)
    assert 0 < result["epsilon"] <= 8.0
    assert len(result["model_sha256"]) == 64
    assert 0 <= result["accuracy"] <= 1
    assert result["guarantee"].startswith("proven (client-level, add-remove")
    stored = json.loads((tmp_path / "r" / "result.json").read_text())
    assert stored["model_sha256"] == result["model_sha256"]


def test_simulate_for_people(run, tiny_file, tmp_path):
    status, out, err = run("simulate", tiny_file, "--engine", "local", "--run-dir", tmp_path / "r")
    assert status == 0
    for word in ("epsilon claimed", "epsilon proven", "test accuracy", "guarantee", "model sha256"):
        assert word in out
    assert "Traceback" not in err


@pytest.mark.usefixtures("undrawn")
def test_a_condition_is_not_called_a_proof(run, tiny_file, tmp_path):
    options = ("--engine", "local", "--set", "federation.sampling=fixed")
    _, out, _ = run("simulate", tiny_file, *options, "--run-dir", tmp_path / "r")
    run("report", tmp_path / "r")
    for text in (out, (tmp_path / "r" / "report.html").read_text(encoding="utf-8")):
        assert "epsilon conditional" in text
        assert "epsilon proven" not in text


def test_runs_go_into_a_folder_of_their_own(run, tiny_file):
    for _ in range(2):
        assert run("simulate", tiny_file, "--engine", "local", "--rounds", 1, "--json")[0] == 0
    assert len(list(Path("runs").iterdir())) == 2


def test_a_run_without_privacy_prints_infinity_as_json(run, tiny_file):
    status, out, _ = run(
        "simulate", tiny_file, "--engine", "local", "--set", "mechanism.name=none", "--json"
    )
    assert status == 0
    result = json.loads(out)
    assert result["epsilon"] == "inf"
    assert result["guarantee"].startswith("NOT PRIVATE")


def test_what_is_not_json_is_printed_as_words():
    values = {"loss": math.nan, "epsilon": math.inf, "rows": [-math.inf, 1.5, (2,)]}
    text = strict_json.dumps(values)
    assert json.loads(text) == {"loss": "nan", "epsilon": "inf", "rows": ["-inf", 1.5, [2]]}
    assert strict_json.loads(text)["rows"] == [-math.inf, 1.5, [2]]
    assert strict_json.loads("[Infinity]") == [math.inf]  # as written by earlier versions


def test_an_existing_folder_is_refused_at_once_and_not_offered_for_resuming(
    run, tiny_file, tmp_path
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    status, _, err = run("simulate", tiny_file, "--engine", "local", "--run-dir", tmp_path / "mine")
    assert status == 2
    assert "already exists" in err


def test_published_medclip_prints_claim_and_proof_side_by_side(run, tiny_file):
    overrides = ["--set", "mechanism.clip=med", "--set", "mechanism.variant=published"]
    result = json.loads(run("simulate", tiny_file, "--engine", "local", *overrides, "--json")[1])
    assert result["epsilon"] == "inf"
    assert 7 < result["claimed_epsilon"] <= 8
    assert "MedClip" in result["guarantee"]


def test_plan(run, tiny_file):
    status, out, _ = run("plan", tiny_file, "--json")
    assert status == 0
    report = json.loads(out)
    assert {
        "layers",
        "epsilons",
        "noise_multiplier",
        "guarantee",
    } <= report.keys()
    assert sum(row["share"] for row in report["layers"]) == pytest.approx(1, rel=1e-6)
    assert set(report["epsilons"]) == set(ACCOUNTANTS)
    assert report["epsilons"]["pld"] < report["epsilons"]["rdp"] <= 8
    assert run("plan", tiny_file)[0] == 0


@pytest.mark.parametrize("trust", ["central", "local"])
@pytest.mark.parametrize("name", sorted(set(mechanisms.names()) - {"none"}))
def test_a_plans_epsilon_is_that_of_all_its_rounds(tiny, name, trust):
    """Also where the rounds differ: a schedule's first round is its cheapest."""
    if (name, trust) == ("client-ladp", "central"):
        pytest.skip("clients that choose their layers add their own noise")
    federation = {"rate": 1.0, "rounds": 7}
    local = {"trust": "local", "max_participations": 4} if trust == "local" else {}
    report = plan_report(
        tiny(
            mechanism={"name": name}, federation=federation, privacy={"accountant": "pld", **local}
        )
    )
    assert 8 * (1 - 1e-4) <= report["epsilons"]["pld"] <= 8 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("noise", "sampling", "rate"),
    [
        ("independent", "cyclic", 0.25),
        ("banded", "cyclic", 0.25),
        ("banded", "min-separation", 0.25),
        ("square-root", "min-separation", 0.25),
        *(
            pytest.param(noise, "grouped-poisson", 0.2, marks=pytest.mark.slow)
            for noise in ("independent", "banded")
        ),
    ],
)
def test_a_plan_of_a_run_that_is_one_mechanism(tiny, sampling, rate, noise):
    """Its epsilon is the run's, and its noise is shown over the rounds beside that of independent
    noise."""
    privacy = {"accountant": "pld", "noise": noise, "min_separation": 4}
    report = plan_report(
        tiny(federation={"rate": rate, "rounds": 12, "sampling": sampling}, privacy=privacy)
    )
    assert 8 * (1 - 1e-4) <= report["epsilons"]["pld"] <= 8
    rows, means = report["noise_over_rounds"], report["error_of_the_model"]
    assert [rows[0]["round"], rows[-1]["round"]] == [1, 12]
    assert rows[0]["single"] == pytest.approx(rows[0]["so_far"])
    assert rows[0]["single"] == pytest.approx(report["noise_norm"])
    if noise != "independent":
        assert rows[-1]["single"] > rows[0]["single"]
        if (
            sampling != "grouped-poisson"
        ):  # whose draws are secret: no comparison at the same schema alone
            assert means["this run"] < means["independent, same participation"]
    else:
        assert means["this run"] == pytest.approx(means["independent, same participation"])
    assert "groups take turns" in report["noise_process"] or sampling == "min-separation"


def test_a_plan_with_correlated_noise_for_people(run):
    out = run("plan", "correlated-digits")[1]
    for words in (
        "correlated over rounds (banded, 10 bands); 10 groups take turns",
        "independent, secret draws",
    ):
        assert words in " ".join(out.split()) or words.split(",")[0] in out
    assert "(of z)" in out  # the scale beside the layers is not that of a round's noise
    assert "(of z)" not in run("plan", "digits")[1]


@pytest.mark.parametrize("relation", ["add-remove", "replace-one", "zero-out"])
def test_calibrate(run, relation):
    status, out, _ = run(
        "calibrate",
        "--epsilon",
        3,
        "--delta",
        1e-5,
        "--steps",
        20,
        "--sampling-rate",
        0.5,
        "--relation",
        relation,
        "--accountant",
        "rdp",
        "--json",
    )
    assert status == 0
    report = json.loads(out)
    expected = calibrate(3, 1e-5, steps=20, sampling_rate=0.5, relation=relation, accountant="rdp")
    assert report["noise_multiplier"] == pytest.approx(expected)
    assert report["epsilon"] <= 3


@pytest.mark.parametrize(
    ("relation", "accountant"),
    [("add-remove", "pld"), ("replace-one", "pld"), ("zero-out", "pld"), ("replace-one", "rdp")],
)
def test_calibrate_from_noise_is_the_inverse(run, relation, accountant):
    options = ("--delta", "1e-5", "--steps", "20", "--sampling-rate", "0.2", "--json")
    options += ("--relation", relation, "--accountant", accountant)
    status, out, _ = run("calibrate", "--epsilon", "3", *options)
    assert status == 0
    multiplier = json.loads(out)["noise_multiplier"]
    status, again, err = run("calibrate", "--noise-multiplier", str(multiplier), *options)
    assert (status, json.loads(again)) == (0, json.loads(out)), err
    assert json.loads(again)["epsilon"] == pytest.approx(3, rel=1e-5)
    rates = attack_rates(multiplier, steps=20, sampling_rate=0.2, relation=relation)
    assert json.loads(again)["attack_rates"] == rates.figures()


@pytest.mark.parametrize("options", [(), ("--epsilon", "3", "--noise-multiplier", "1")])
def test_calibrate_takes_either_figure(run, options):
    status, _, err = run("calibrate", "--delta", "1e-5", "--steps", "20", *options)
    assert (status, "give either --epsilon or --noise-multiplier" in err) == (2, True), err


def test_partition(run, tiny_file):
    status, out, _ = run("partition", tiny_file, "--out", "picture.png", "--json")
    assert status == 0
    report = json.loads(out)
    assert report["clients"] == len(report["histogram"]) == 20
    assert Path("picture.png").read_bytes().startswith(b"\x89PNG")


def test_report_and_ledger(run, finished):
    status, out, _ = run("report", finished, "--json")
    assert status == 0
    assert json.loads(out)["rounds"] == 3
    page = (finished / "report.html").read_text()
    assert "epsilon proven" in page
    assert "data:image/svg+xml" in page
    status, out, _ = run("ledger", finished, "--json")
    assert status == 0
    report = json.loads(out)
    assert report["epsilon"] <= report["budget"] == 8.0
    assert 0.01 < report["attack_rates"]["tpr"]["0.01"] < 0.2
    assert "of the clients" in report["attack"]
    assert sum(event["count"] for event in report["events"]) == 3
    with without_drawing():
        assert run("ledger", finished)[0] == run("report", finished)[0] == 0
    for options, words in (
        ((finished, "--delta", "1e-5"), "--delta is for a ledger file"),
        ((finished / "ledger.sqlite", "--delta", "1e-5"), "name the run's folder"),
        (("none.sqlite", "--delta", "1e-5"), "there is no ledger file none.sqlite"),
    ):
        status, _, err = run("ledger", *options)
        assert (status, words in err) == (2, True), err


def test_the_cost_of_a_ledger_without_a_run_folder(run):
    with Ledger(Path("app.sqlite"), owner="an app") as ledger:
        for number in (1, 2):
            ledger.charge(
                gaussian_event(2.0), round=number, key=str(number), protects="client, add-remove"
            )
        expected, head = ledger.epsilon(1e-5), str(ledger.head())
    status, out, err = run("ledger", "app.sqlite", "--delta", "1e-5", "--json")
    assert status == 0, err
    report = json.loads(out)
    assert (report["epsilon"], report["ledger_head"], report["protects"]) == (
        expected,
        head,
        "client, add-remove",
    )
    assert [(group["rounds"], group["released"]) for group in report["events"]] == [
        ("1-2", "sum over clients")
    ]
    status, out, _ = run("ledger", "app.sqlite", "--delta", "1e-5")
    assert (status, "epsilon charged 2.943" in out) == (0, True), out
    assert report["attack_rates"]["mu"] == pytest.approx(0.5**0.5, rel=1e-4)
    assert "finds at most 5.3 % of the clients" in " ".join(out.split())
    status, _, err = run("ledger", "app.sqlite")
    assert (status, "add --delta" in err) == (2, True), err
    Path("text").write_text("no ledger")
    assert run("ledger", "text", "--delta", "1e-5")[0] == 2


def test_doctor(run):
    status, out, _ = run("doctor", "--json")
    assert status == 0
    report = json.loads(out)
    assert set(mechanisms.names()) == set(report["mechanisms"])
    assert "digits" in report["data sets here"]
    names = [device.split(" ")[0] for device in report["devices"]]
    assert ("cuda" in names) == torch.cuda.is_available()
    assert names[-1] == "cpu"
    assert report["noise backends"][-1] == "cpu: cpu (fastest on a CPU)"
    assert report["triton"].startswith(("missing", "3."))
    status, out, _ = run("doctor")
    assert status == 0
    assert "noise backends" in out


def test_help_begins_with_the_commands_that_train(run):
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    panels = re.findall(r"^╭─ (.+?) ─", out, re.MULTILINE)
    assert panels == [
        "Options",
        "Train and compare",
        "Plan, without training on private data",
        "Read a run",
        "Check the installation",
        "Measure what leaks",
        "Real nodes",
    ]
    named = re.findall(r"^│ (\w+) ", out, re.MULTILINE)
    assert (named[0], len(named), len(set(named))) == ("simulate", 28, 28)


@pytest.mark.parametrize(
    "command",
    ["simulate", "plan", "calibrate", "partition", "report", "ledger", "predict", "doctor"],
)
def test_help(run, command):
    status, out, _ = run(command, "--help")
    assert status == 0
    assert "--json" in out


def commands(command, words=()):
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*words, name))


def test_no_words_of_help_are_taken_for_markup():
    for words, command in commands(typer.main.get_command(app)):
        for text in filter(None, [command.help, *(getattr(p, "help", "") for p in command.params)]):
            assert Text.from_markup(text).plain == text, words


@pytest.mark.skipif(
    version("click") >= "8.5",
    reason="an environment from before click was pinned: typer drops this help there",
)
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan", "Bundled recipe or TOML file"),
        ("audit", "package.module:Class"),
        ("ledger", "Run folder."),
    ],
)
def test_help_says_what_the_argument_is(run, command, words):
    status, out, _ = run(command, "--help")
    assert status == 0
    assert words in out


def test_a_partition_of_other_targets_has_no_columns_by_label(run, tiny_file):
    Path("rows.py").write_text(
        "import numpy as np\nx, y = np.ones((40, 2)), np.ones(40)\nload = {'train': (x, y), "
        "'test': (x, y)}\n"
    )
    settings = ("data.name=rows:load", "data.partition=iid", "task.name=regression")
    options = [word for setting in settings for word in ("--set", setting)]
    status, out, err = run("partition", tiny_file, *options)
    assert status == 0, err
    head = next(line for line in out.splitlines() if "examples" in line)
    assert [word for word in re.split(r"\W+", head) if word] == ["client", "examples"]


def test_a_large_delta_is_warned_of_and_run(run, tiny_file):
    status, out, err = run(
        "simulate", tiny_file, "--engine", "local", "--set", "privacy.delta=0.1", "--json"
    )
    assert status == 0
    assert "warning: privacy.delta = 0.1 is not below 1/20" in err
    assert json.loads(out)["delta"] == 0.1


def test_workers_do_not_import_what_only_the_driver_needs():
    """Every worker would pay for it with a second or two of its start."""
    unneeded = {
        "dp_accounting",
        "scipy.optimize",
        "scipy.stats",
        "flwr_datasets",
        "datasets",
        "torchvision",
        "torch._dynamo",
    }
    # What data sets and partitions need is imported when they are loaded.
    heavy = {"sklearn", "torchvision", "flwr_datasets", "datasets", "scipy", "pandas"}
    program = (
        f"import sys, fedlgm.data; print(sorted({heavy} & set(sys.modules)));"
        f"import simulations.engines.ray; print(sorted({unneeded} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n[]\n"


def test_help_and_the_start_of_a_deployment_do_not_wait_for_torch():
    program = (
        "import sys, simulations.cli, fedlgm_nodes.deploy.processes; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_the_library_needs_neither_flower_nor_ray():
    program = textwrap.dedent(
        """
        import importlib, pkgutil, sys

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("flwr", "ray"):
                    raise ImportError(f"{name} is blocked")

        sys.meta_path.insert(0, Block())
        import fedlgm
        # Triton's kernels need Triton; flwr-datasets does not import flwr.
        names = [m.name for m in pkgutil.walk_packages(fedlgm.__path__, "fedlgm.") if "triton" not in m.name]
        for name in names:
            importlib.import_module(name)
        for name in dir(fedlgm):
            getattr(fedlgm, name)
        print(len(names))
        """
    )
    status, said = run_afresh(program, "flwr", "ray", "flwr_datasets")
    assert status == 0, said
    assert int(said) > 40


def test_messages_and_tables_show_names_as_they_are(run, tiny_file, tmp_path):
    """Rich would make a sign of ":M:", and a style of "[bold]"."""
    (tmp_path / "cwd" / "mine.py").write_text("M = 3\n")
    status, _, err = run(
        "simulate", tiny_file, "--set", "model.name=mine:M", "--set", "task.name=mine:M:"
    )
    assert status == 2
    assert "mine:M:" in err
    name = "a[bold]:M:[red]"
    status, out, _ = run("plan", tiny_file, "--set", f"name={name}")
    assert (status, name in out) == (0, True)
    options = (
        "--engine",
        "local",
        "--set",
        f"name={name}",
        "--set",
        "federation.rounds=1",
        "--run-dir",
        tmp_path / "r",
    )
    status, out, _ = run("simulate", tiny_file, *options)
    assert (status, name in out) == (0, True)


def test_a_warning_is_said_once(monkeypatch, capsys):
    """Of a recipe that is checked at several places, say."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)

    def command():
        warnings.warn("little noise", stacklevel=1)
        warnings.warn("little noise", stacklevel=1)
        warnings.warn("little data", stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with pytest.raises(SystemExit):
            ending(command)
    assert capsys.readouterr().err == "warning: little noise\nwarning: little data\n"


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("fedlgm sim", "simulate"),
        ("fedlgm simulate dig", "digits"),
        ("fedlgm plan --swe", "--sweep"),
    ],
)
def test_the_shell_completes_commands_recipes_and_options(words, completed):
    values = {
        "_FEDLGM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")),
    }  # fmt: skip
    command = [
        sys.executable,
        "-c",
        "import sys; sys.argv = ['fedlgm']; from simulations.cli import main; main()",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **values}
    )
    assert completed in done.stdout.split()


def test_the_help_names_the_completion(run):
    status, out, _ = run("--help")
    assert status == 0
    assert "--install-completion" in out
