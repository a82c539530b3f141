"""`fedlgm check`: settings as options, files, scripts and runs of fedlgm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedlgm.errors import FedlgmError
from simulations.cli import app

SETTINGS = (
    *("--noise-multiplier", "1", "--batch-size", "100", "--population", "10000", "--epochs", "5"),
    *("--delta", "1e-5", "--set", "clipping=unit", "--set", "denominator=expected"),
)


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["check", *map(str, arguments)])
    if isinstance(done.exception, FedlgmError):  # `ending` makes it status 2
        return 2, str(done.exception)
    return done.exit_code, done.output


@pytest.mark.parametrize(("sampler", "status"), [("poisson", 0), ("shuffle", 1)])
def test_settings_as_options(sampler: str, status: int) -> None:
    options = (*SETTINGS, "--sampler", sampler, "--epsilon", "1.5", "--accounted-as", "poisson")
    code, out = run(*options, "--json")
    report = json.loads(out)
    assert (code, report["status"]) == (status, "broken" if status else "holds")
    assert (report["epsilon_stated"], report["schema"]) == (1.5, 1)
    assert (report["epsilon_proven"] > 1.5) == bool(status)
    assert set(report["attack_rates"]["tpr"]) == {"0.1", "0.01", "0.001"}
    code, out = run(*options)
    assert code == status
    words = " ".join(out.split())
    assert "epsilon stated: 1.5 at delta 1e-05; proven: " in words
    assert "% of the examples" in words


def test_an_option_does_not_replace_what_a_file_states(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "weights = 'uniform'\ndenominator = 'expected'\nrounds = 20\ndelta = 1e-3\npopulation = 100\n"
        "[flower]\nclass = 'DifferentialPrivacyServerSideFixedClipping'\nnoise_multiplier = 5.0\n"
        "clipping_norm = 1.0\nnum_sampled_clients = 50"
    )
    for option, value in (("--rounds", 1), ("--noise-multiplier", 9), ("--population", 10**6)):
        code, out = run(file, option, value)
        assert (code, "leave out the wrong one" in out, len(out.splitlines())) == (2, True, 1)
    assert run(file, "--rounds", "20")[0] == 0
    for option, value in (("--batch-size", 10), ("--sampling-rate", 0.1)):
        code, out = run(file, option, value, "--json")  # the noise stays that for fifty clients
        report = json.loads(out)
        assert (code, report["epsilon_proven"] > 20) == (1, True)
        assert "scaled for the mean of 50 units, and a step has 10" in out


def test_a_script_with_settings(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "raise SystemExit\nengine.make_private(noise_multiplier=1, poisson_sampling=0)"
    )
    code, out = run(script, "--epochs", "5", "--population", "10000", "--json")
    report = json.loads(out)
    assert (code, report["epsilon_proven"], report["settings"]["sampler"]) == (1, None, "shuffle")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give a file, a run's folder"),
        (("--delta", "nan"), "delta must lie in"),
        (("--epsilon", "1e400"), "epsilon must be finite"),
        (("--set", "sampler"), "--set takes NAME=VALUE"),
        (("--set", "sampler=all", "--sampler", "all"), "sampler is given twice"),
        (("--set", "samplr=all"), "did you mean 'sampler'"),
        (("--set", "runs=[[[["), "runs must be a whole number"),
        (("missing.toml",), "cannot be read"),
        ((".", "--delta", "1e-5"), "leave out the options"),
        ((".",), "is not a run folder"),
    ],
)
def test_wrong_input_ends_with_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    code, out = run(*arguments)
    assert (code, words in out, len(out.splitlines())) == (2, True, 1), out


@pytest.mark.parametrize(
    ("options", "status", "proven"),
    [
        ((), 0, True),
        (("--set", "mechanism.variant=published", "--set", "mechanism.clip=med"), 1, False),
    ],
)
def test_a_run_of_fedlgm(
    tmp_path: Path, options: tuple[str, ...], status: int, proven: bool
) -> None:
    folder = tmp_path / "run"
    simulate = ["simulate", "digits", "--engine", "local", "--rounds", "2", "--json"]
    done = CliRunner().invoke(app, [*simulate, "--run-dir", str(folder), *options])
    assert done.exit_code == 0, done.output
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    code, out = run(folder, "--json")
    report = json.loads(out)
    assert code == status, out
    assert (report["epsilon_proven"] == result["epsilon"]) == proven
    assert (report["attack_rates"] is None) == (not proven)
    assert report["verdicts"][0]["why"] in result["guarantee"]
    assert run(folder)[0] == status
