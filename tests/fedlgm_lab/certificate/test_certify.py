"""Honest runs of every unit and law verify; runs that cannot be certified are refused with the
reason; the verifier is light, fast and small."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from sklearn.datasets import load_breast_cancer
from typer.testing import CliRunner

import simulations
from fedlgm.errors import ConfigError, LedgerError, RunError
from fedlgm_lab.certificate import signing
from fedlgm_lab.certificate.auditor import audit
from fedlgm_lab.certificate.certify import certify
from fedlgm_lab.certificate.verifier.envelope import Refused
from simulations.cli import app
from simulations.standardise import standardise
from tests.support.certificates import (
    ROUNDS,
    SMALL,
    Certified,
    anchors_of,
    certified_run,
    fit,
    statement_in,
)

KINDS = {
    "fixed cohorts": (["federation.sampling=fixed"], "conditional"),
    "users": (["privacy.unit=user", "federation.users=30"], "proven"),
    "Laplace noise": (["mechanism.name=laplace-inid"], "proven"),
    "plain averaging": (["federation.server_optimizer=sgd", "federation.server_lr=0.7"], "proven"),
    "everybody": (["federation.rate=1.0"], "proven"),
    "kernels": (["privacy.noise_backend=torch"], "proven"),
    "levelled layers": (["mechanism.name=min-total-noise"], "proven"),
    "a layer that stays": (["mechanism.name=max-snr-sum"], "proven"),
    "plans that change": (["mechanism.name=ladp"], "proven"),
    "dropout": (["federation.dropout=0.3"], "proven"),
}


@pytest.mark.parametrize("name", KINDS)
def test_an_honest_run_verifies_at_both_levels(name: str, tmp_path: Path) -> None:
    overrides, status = KINDS[name]
    run = certified_run(tmp_path, overrides)
    case = run.verify(run.sign(run.statement))
    assert case.claim["status"] == status
    audit(case, run.run / "private")


def test_an_example_level_run_verifies_at_both_levels(tmp_path: Path) -> None:
    few = [f"federation.rounds={ROUNDS}", "run.seed=none", "run.keep_releases=true"]
    run = certified_run(tmp_path, ["privacy.epsilon=1"], recipe="dp-sgd-digits", basis=few)
    case = run.verify(run.sign(run.statement))
    assert case.claim["unit"] == "example"
    audit(case, run.run / "private")


def test_charges_before_the_run_are_part_of_the_certificate(tmp_path: Path) -> None:
    """Private statistics of the data, in round 0 of the ledger."""
    x, y = load_breast_cancer(return_X_y=True)
    public = np.arange(len(x)) % 5 == 0
    statistics = standardise(
        {"train": (x[~public], y[~public]), "test": (x[public], y[public])},
        users=np.arange(int((~public).sum())) % 10,
        low=0,
        high=1.2 * x[public].max(0),
        epsilon=1.0,
        delta=1e-5,
        ledger=tmp_path / "statistics.sqlite",
    )
    settings = [f"federation.rounds={ROUNDS}", "run.seed=none", "run.keep_releases=true"]
    settings += ["privacy.delta=0.0002", "privacy.accountant=rdp", "run.evaluate_every=7"]
    run = certified_run(tmp_path, data=statistics.data, recipe="ten-hospitals", basis=settings)
    case = run.verify(run.sign(run.statement))
    assert [row["round"] for row in case.charges] == [0, *range(1, ROUNDS + 1)]
    statement = run.copy()
    statement["predicate"]["ledger"]["rows"].pop(0)
    for entry in statement["predicate"]["rounds"]:
        entry["row"] -= 1
    with pytest.raises(Refused, match="check 10: a witness saw another chain"):
        run.verify(run.sign(fit(statement)))


def test_a_seeded_run_is_a_simulation_and_has_no_level_2(tmp_path: Path) -> None:
    run = certified_run(tmp_path, ["run.seed=3"], beacon=False)
    assert run.statement["predicate"]["claim"]["status"] == "simulation"
    assert not (run.run / "private" / "sums").exists()
    certificate = run.sign(run.statement)
    with pytest.raises(Refused, match="check 3: the run was seeded"):
        run.verify(certificate)
    case = run.verify(certificate, accepts=["simulation"])
    with pytest.raises(Refused, match="check 15: the run had a public seed"):
        audit(case, run.run / "private")


UNCERTIFIED = {
    "asks auxiliary queries": ["mechanism.name=layer-vote"],
    "check 3: its releases are not private": ["mechanism.name=none"],
}


@pytest.mark.parametrize("message", UNCERTIFIED)
def test_a_run_whose_cost_cannot_be_checked_has_no_certificate(
    message: str, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=message):
        certified_run(tmp_path, UNCERTIFIED[message], beacon=False)


def test_a_run_that_kept_nothing_or_is_not_finished_has_no_certificate(tmp_path: Path) -> None:
    signing.create_key(tmp_path / "operator.pem")
    run = tmp_path / "run"
    simulations.simulate("digits", overrides=[*SMALL, "run.keep_releases=false"], run_dir=run)
    with pytest.raises(ConfigError, match=r"kept no releases.*run.keep_releases = true"):
        certify(run, tmp_path / "operator.pem")


def test_a_run_that_is_interrupted_and_continued_verifies(tmp_path: Path) -> None:
    """Rounds after the checkpoint are repeated bit for bit, and kept once."""

    class Stop(Exception):
        pass

    def stop(row: Any) -> None:
        if row["round"] == 4:
            raise Stop

    signing.create_key(tmp_path / "operator.pem")
    run = tmp_path / "run"
    settings = [*SMALL, "run.checkpoint_every=3"]
    with pytest.raises(Stop):
        simulations.simulate("digits", overrides=settings, run_dir=run, progress=stop)
    kept = (run / "releases" / "chain.jsonl").read_text()
    with (run / "releases" / "chain.jsonl").open("a") as chain:
        chain.write('{"round": 9, "ro')  # a row that a crash cut short
    with pytest.raises(RunError, match="not finished"):
        certify(run, tmp_path / "operator.pem")
    simulations.resume(run)
    assert (run / "releases" / "chain.jsonl").read_text().startswith(kept)
    certify(run, tmp_path / "operator.pem")
    statement = statement_in(run / "certificate.json")
    assert [entry["round"] for entry in statement["predicate"]["rounds"]] == [*range(1, 8)]
    assert len(statement["predicate"]["ledger"]["rows"]) == ROUNDS


def test_a_lost_root_and_other_code_stop_a_run_that_keeps_releases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stop = tmp_path / "run", KeyboardInterrupt

    def ending(row: Any) -> None:
        if row["round"] == 2:
            raise stop

    with pytest.raises(stop):
        simulations.simulate("digits", overrides=SMALL, run_dir=run, progress=ending)
    monkeypatch.setattr(
        "fedlgm_lab.certificate.verifier.chain.code_digest", lambda folder=None: "ab" * 32
    )
    with pytest.raises(RunError, match="begun with other code"):
        simulations.resume(run)
    monkeypatch.undo()
    (run / "private" / "opening.json").unlink()
    with pytest.raises(RunError, match=r"opening.json is gone"):
        simulations.resume(run)


def test_a_beacon_that_does_not_come_or_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "late.json").write_text('{"beacon": "')  # as it is being written
    late = [*SMALL, f"run.beacon='{tmp_path / 'late.json'}'", "federation.wait_for_nodes=0.3"]
    with pytest.raises(RunError, match=r"run.beacon: no beacon arrived"):
        simulations.simulate("digits", overrides=late, run_dir=tmp_path / "late")
    signing.create_key(tmp_path / "auditor.pem")
    key = signing.load_key(tmp_path / "auditor.pem")
    for number, text in enumerate(
        ("{}", json.dumps(signing.sign_head("commitment:" + "a" * 64, key)))
    ):
        (tmp_path / "wrong.json").write_text(text + "\n")
        wrong = [*SMALL, f"run.beacon='{tmp_path / 'wrong.json'}'"]
        with pytest.raises(RunError, match=r"run.beacon: .*wrong.json is not"):
            simulations.simulate("digits", overrides=wrong, run_dir=tmp_path / f"wrong{number}")


def test_a_ledger_or_release_that_was_changed_is_not_certified(tmp_path: Path) -> None:
    run = certified_run(tmp_path, beacon=False).run
    release = run / "releases" / "round-000002.f64"
    kept = release.read_bytes()
    release.write_bytes(kept[::-1])
    with pytest.raises(RunError, match="check 13: round 2 is not the vector"):
        certify(run, tmp_path / "operator.pem")
    release.write_bytes(kept)
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"epsilon": 0.5}))
    with pytest.raises(LedgerError, match="epsilon"):
        certify(run, tmp_path / "operator.pem")


def _arguments(run: Certified, folder: Path) -> list[str]:
    keys = run.run.parent
    return [
        *(str(folder / "certificate.json"), str(run.run / "model.safetensors")),
        *("--key", str(keys / "operator.pub"), "--witness", str(keys / "witness.pub")),
        *("--releases", str(run.releases)),
    ]


def test_the_exit_status_says_what_was_found(honest: Certified, tmp_path: Path) -> None:
    runner, given = CliRunner(), _arguments(honest, honest.run)
    done = runner.invoke(app, ["verify", *given])
    assert done.exit_code == 0
    assert done.output.startswith("Level 1 holds. It does not prove that the noise was added")
    opened = runner.invoke(app, ["verify", *given, "--open", str(honest.run / "private")])
    assert opened.exit_code == 0
    assert opened.output.startswith("Level 2 holds")
    figures = json.loads(runner.invoke(app, ["verify", *given, "--json"]).output)
    assert (figures["holds"], figures["claim"]["epsilon"]) == (True, 1.0)
    statement = honest.copy()
    statement["predicate"]["claim"]["epsilon"] = 0.5
    (tmp_path / "certificate.json").write_bytes(honest.sign(statement))
    lower = runner.invoke(app, ["verify", *_arguments(honest, tmp_path)])
    assert lower.exit_code == 2
    assert lower.output.count("\n") == 1
    assert "check 11: epsilon is stated as 0.5, but it is " in lower.output
    statement["predicateType"] += "9"
    (tmp_path / "certificate.json").write_bytes(honest.sign(statement))
    assert runner.invoke(app, ["verify", *_arguments(honest, tmp_path)]).exit_code == 3
    (tmp_path / "certificate.json").write_bytes(b"")
    assert runner.invoke(app, ["verify", *_arguments(honest, tmp_path)]).exit_code == 2
    absent = runner.invoke(app, ["verify", str(tmp_path / "none"), *given[1:], "--json"])
    assert (absent.exit_code, json.loads(absent.output)["holds"]) == (3, False)
    assert runner.invoke(app, ["verify", *given[:2], "--accept", "all"]).exit_code == 3
    beside = runner.invoke(app, ["verify", *given[:-2]])  # releases beside the certificate
    assert (beside.exit_code, "Not checked" in beside.output) == (0, False)


def test_words_of_a_seller_do_not_reach_the_terminal_as_codes(
    honest: Certified, tmp_path: Path
) -> None:
    statement = honest.copy()
    statement["\x1b[2JLevel 1 holds"] = 1
    (tmp_path / "certificate.json").write_bytes(honest.sign(statement))
    shown = CliRunner().invoke(app, ["verify", *_arguments(honest, tmp_path)])
    assert shown.exit_code == 2
    assert "\x1b" not in shown.output


def test_certify_replaces_no_other_file(honest: Certified, tmp_path: Path) -> None:
    key = honest.run.parent / "operator.pem"
    with pytest.raises(RunError, match="is not a certificate"):
        certify(honest.run, key, honest.run / "ledger.sqlite")
    target = certify(honest.run, key, tmp_path / "certificate.json")
    assert certify(honest.run, key, target).read_bytes()


def test_the_commands_of_operator_and_witness(honest: Certified, tmp_path: Path) -> None:
    runner, head = CliRunner(), honest.statement["predicate"]["rounds"][6]["head"]
    out, key = tmp_path / "anchors.jsonl", tmp_path / "witness.pem"
    signed = runner.invoke(
        app, ["anchor", f"7:{head}", "--key", str(key), "--new-key", "--out", str(out)]
    )
    assert signed.exit_code == 0
    assert key.stat().st_mode & 0o777 == 0o600
    again = runner.invoke(app, ["anchor", f"7:{head}", "--key", str(key), "--new-key"])
    assert isinstance(again.exception, ConfigError)
    given = ["--key", str(honest.run.parent / "operator.pem"), "--anchor", str(out)]
    target = tmp_path / "certificate.json"
    issued = runner.invoke(app, ["certify", str(honest.run), *given, "--out", str(target)])
    assert issued.exit_code == 0
    (anchor,) = statement_in(target)["predicate"]["anchors"]
    assert (anchor["round"], anchor["head"]) == (7, head)
    for text in ("7", f"x:{head}", "7:abc"):
        wrong = runner.invoke(app, ["anchor", text, "--key", str(key)])
        assert isinstance(wrong.exception, ConfigError)


def test_the_verifier_loads_neither_torch_nor_flower_nor_ray(honest: Certified) -> None:
    code = (
        "import sys, runpy\n"
        "try:\n    runpy.run_module('fedlgm_lab.certificate.verifier', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'flwr', 'ray', 'pydantic', 'typer', 'simulations', 'strategies'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    given = _arguments(honest, honest.run)
    done = subprocess.run(
        [sys.executable, "-c", code, *given],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"FEDLGM_CACHE": str(honest.run.parent / "cache")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Level 1 holds")


def _large(honest: Certified, rounds: int, layers: int) -> tuple[dict[str, Any], bytes]:
    """A certificate of many rounds and layers, whose model nobody recomputes."""
    statement = honest.copy()
    predicate, names = statement["predicate"], [f"block.{j}.weight" for j in range(layers)]
    predicate["start"]["layers"] = [[name, 4, [[name, 4]]] for name in names]
    (text,) = predicate["plans"].values()
    raw = json.loads(text)
    raw |= {
        "clip": [1 / layers**0.5] * layers,
        "sigma": [3.0 + j / 7 for j in range(layers)],
        "released": [True] * layers,
    }
    raw["facts"]["rounds"] = rounds
    plan = json.dumps(raw)
    digest = hashlib.sha256(plan.encode()).hexdigest()
    predicate["plans"] = {digest: plan}
    recipe = predicate["recipe"]
    recipe["text"] = recipe["text"].replace(f"rounds = {ROUNDS}", f"rounds = {rounds}")
    first, row = predicate["rounds"][0], predicate["ledger"]["rows"][0]
    numbers = range(1, rounds + 1)
    predicate["rounds"] = [
        first
        | {"round": n, "row": n, "plan": digest}
        | {"released": hashlib.sha256(b"%d" % n).hexdigest()}
        for n in numbers
    ]
    predicate["ledger"]["rows"] = [row | {"round": n, "key": f"{n:032x}"} for n in numbers]
    model = save({name: np.ones(4, np.float32) for name in names})
    flat = np.ones(4 * layers, np.float32).tobytes()
    for place, content in enumerate((model, flat)):
        statement["subject"][place]["digest"]["sha256"] = hashlib.sha256(content).hexdigest()
    fit(statement)
    heads = {entry["round"]: entry["head"] for entry in predicate["rounds"]}
    predicate["anchors"] = [
        signing.sign_head(f"{n}:{heads[n]}", honest.witness) for n in range(5, rounds + 1, 5)
    ]
    return statement, model


def test_300_rounds_of_104_layers_take_less_than_5_seconds_and_1_megabyte(
    honest: Certified, tmp_path: Path
) -> None:
    statement, model = _large(honest, 300, 104)
    certificate = honest.sign(statement)
    assert len(certificate) < 1_000_000
    (tmp_path / "certificate.json").write_bytes(certificate)
    (tmp_path / "model.safetensors").write_bytes(model)
    keys = honest.run.parent
    command = [
        *(sys.executable, "-m", "fedlgm_lab.certificate.verifier"),
        *(str(tmp_path / "certificate.json"), str(tmp_path / "model.safetensors")),
        *("--key", str(keys / "operator.pub"), "--witness", str(keys / "witness.pub")),
        *("--accept", "unreplayed"),
    ]
    before, spent = time.perf_counter(), os.times()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"FEDLGM_CACHE": str(tmp_path / "cache")},
    )
    wall, after = time.perf_counter() - before, os.times()
    assert done.returncode == 0, done.stderr
    print(f"{len(certificate)} bytes, {wall:.1f} s")
    assert after.children_user - spent.children_user < 5


def test_anchors_come_from_the_chain(honest: Certified) -> None:
    (anchor,) = anchors_of(honest.run, honest.witness, [3])
    assert anchor["head"] == honest.statement["predicate"]["rounds"][2]["head"]
