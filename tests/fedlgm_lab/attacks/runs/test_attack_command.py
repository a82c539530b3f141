"""`fedlgm attack`: figures as JSON, tables, pictures; bad input ends with one message and status
2."""

from __future__ import annotations

import json
import math

import pytest


@pytest.mark.parametrize("pixels", ["none", "[0, 1]"])
def test_inversion_of_a_recipe(run, tiny_file, tmp_path, pixels):
    picture = tmp_path / "found.png"
    status, out, err = run(
        "attack",
        "inversion",
        tiny_file,
        "--victims",
        1,
        "--iterations",
        30,
        "--epsilon",
        8,
        "--picture",
        picture,
        "--json",
        "--set",
        f"data.pixels={pixels}",
    )
    assert (status, err) == (0, "")
    report = json.loads(out)
    raw, noised = report["findings"]
    assert (raw["protection"], noised["protection"]) == (
        "no noise",
        "snr-consistent, sound, epsilon 8",
    )
    assert raw["ssim"] > 0.99
    assert raw["labels_found"] == 1
    assert noised["ssim"] < 0.5
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_inversion_prints_a_table(run, tiny_file):
    status, out, _ = run(
        "attack", "inversion", tiny_file, "--victims", 1, "--iterations", 2, "--per-layer"
    )
    assert status == 0
    assert "no noise" in out
    assert "fc2" in out
    assert "attack-inversion.png" in out


@pytest.mark.usefixtures("undrawn")
def test_membership_of_a_run(run, finished):
    status, out, err = run("attack", "lira", finished, "--shadows", 4, "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert (report["models"], report["results"]["online"]["members"]) == (5, 1442)
    assert report["epsilon"] <= 8.0
    assert report["guarantee_status"] == "proven"
    assert 0.3 < report["results"]["online"]["auc"] < 0.7  # three noisy rounds remember nobody


def test_membership_of_a_recipe(run, tiny_file):
    status, out, err = run(
        "attack", "mia", tiny_file, "--examples", 200, "--set", "mechanism.name=none"
    )  # fmt: skip
    assert status == 0, err
    assert "confidence" in out
    assert "NOT PRIVATE" in out


def test_gan_of_a_recipe(run, tiny_file):
    changes = [
        "data.pixels=[0, 1]",
        "data.partition=isolation",
        "federation.clients=4",
        "federation.rate=1.0",
        "mechanism.name=none",
    ]
    options = [part for change in changes for part in ("--set", change)]
    status, out, err = run("attack", "gan", tiny_file, *options, "--steps", 2, "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert (report["target"], report["guarantee_status"]) == (9, "none")
    assert math.isinf(float(report["epsilon"])) or report["epsilon"] == "Infinity"
    assert report["floor"] < report["nearest_class"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inversion", "nowhere"], "no recipe 'nowhere'"),
        (["inversion", "digits", "--victims", 0], "--victims and --images must be at least 1"),
        (["inversion", "digits", "--images", 5000], "no client holds 5000 images"),
        (["inversion", "digits", "--iterations", 0], "iterations"),
        (["inversion", "digits", "--set", "training.optimizer=adam"], "optimizer 'sgd'"),
        (["inversion", "digits", "--set", "mechanism.name=none", "--epsilon", 8], "has no noise"),
        (["inversion", "digits", "--published"], "published variant"),
        (["lira", "digits", "--shadows", 7], "even number"),
        (["lira", "digits", "--shadows", 4, "--set", "federation.rounds=1"], "at least 6"),
        (["mia", "digits", "--examples", 3], "at least 20"),
        (["inversion", "digits", "--set", "task.name=binary"], "task"),
        (["gan", "digits"], "data.partition = 'isolation'"),
        (["gan", "digits", "--inception", "weights.pth"], "Inception"),
    ],
)
def test_bad_input(run, arguments, message):
    status, out, err = run("attack", *arguments)
    assert (status, out) == (2, "")
    assert message in " ".join(err.split())


@pytest.mark.parametrize("attacks", [(), ("--attacks", "membership")])
def test_a_comparison_measures_inception_distances_of_classes_only(run, tmp_path, attacks):
    (tmp_path / "weights.pth").touch()
    status, _, err = run("compare", "digits", *attacks, "--inception", tmp_path / "weights.pth")
    assert status == 2
    assert "--attacks" in err or "Inception" in err


def test_a_finished_run_is_as_it_is(run, finished):
    for arguments, message in (
        (["mia", finished, "--set", "federation.rounds=1"], "attack"),
        (["mia", finished, "--examples", 50], "its own examples"),
    ):
        status, _, err = run("attack", *arguments)
        assert status == 2
        assert message in err


def test_a_run_without_a_seed_says_what_to_run_again(run, tiny, tmp_path):
    recipe = tmp_path / "secret.toml"
    recipe.write_text(tiny(run={"seed": None}).to_toml(), encoding="utf-8")
    assert (
        run("simulate", recipe, "--engine", "local", "--run-dir", tmp_path / "secret", "--json")[0]
        == 0
    )
    status, _, err = run("attack", "gan", tmp_path / "secret")
    assert status == 2
    assert "recipe.toml" in err
    assert "no seed" in err


def test_a_run_that_has_not_finished(run, finished):
    (finished / "result.json").unlink()
    status, _, err = run("attack", "lira", finished)
    assert status == 2
    assert "--resume" in err


@pytest.mark.slow
def test_compare_with_attacks(run, tiny_file, tmp_path):
    options = [
        "--methods",
        "none,gaussian",
        "--seeds",
        1,
        "--out",
        tmp_path / "set",
        "--attacks",
        "membership,gan:3",
    ]
    changes = ["federation.clients=6", "federation.rate=1.0"]
    changed = [part for change in changes for part in ("--set", change)]
    status, out, err = run("compare", tiny_file, *options, *changed, "--json")
    assert status == 0, err
    bare, noised = json.loads(out)["attacks"]
    assert (bare["method"], noised["method"]) == ("none", "gaussian")
    assert (bare["guarantee_status"], noised["guarantee_status"]) == ("none", "proven")
    assert noised["epsilon"] <= 8.0
    for cell in (bare, noised):
        assert 0.3 < cell["membership_auc"] < 0.7
        assert cell["gan"]["3"]["floor"] < cell["gan"]["3"]["nearest_class"]
    kept = {
        path: path.read_bytes()
        for path in (tmp_path / "set").glob("*/private/compared_attacks.json")
    }
    assert len(kept) == 2
    assert all(
        path.stat().st_mode & 0o077 == 0 for path in kept
    )  # they compare private data with what was released
    status, out, err = run("compare", tiny_file, *options, *changed)
    assert status == 0, err
    assert "NOT PRIVATE" in out
    assert "Reconstruction of classes" in out
    assert {path: path.read_bytes() for path in kept} == kept  # what has been measured is read


@pytest.mark.slow
def test_compare_of_audited_runs_has_the_audited_epsilon_beside_the_proven_one(
    run, tiny_file, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "160")
    options = [
        "--methods",
        "gaussian,none",
        "--seeds",
        1,
        "--out",
        tmp_path / "set",
        "--attacks",
        "membership",
    ]
    options += [
        "--set",
        "gaussian/run.audit=true",
    ]  # a run without noise has nothing that canaries could show
    status, out, err = run("compare", tiny_file, *options, "--json")
    assert status == 0, err
    noised, bare = json.loads(out)["attacks"]
    assert 0 < noised["audited_epsilon"] <= noised["epsilon"]
    assert bare["audited_epsilon"] is None
    status, out, err = run("compare", tiny_file, *options)
    assert status == 0, err
    table = out[out.index("Privacy, utility, attacks") :]
    assert "aud" in table  # headings and names are cut where the terminal is narrow
    shown = next(line for line in table.splitlines() if line.lstrip("│ ").startswith("gaus"))
    assert f"{noised['audited_epsilon']:.4g}" in shown.replace("│", " ").split()


@pytest.mark.parametrize(
    ("attacks", "message"),
    [
        ("phishing", "unknown attack 'phishing'"),
        ("gan", "gan:3:9"),
        ("membership:1", "gan:3:9"),
        (",", "separated by commas"),
    ],
)
def test_compare_refuses_attacks(run, tiny_file, attacks, message):
    status, out, err = run("compare", tiny_file, "--methods", "none", "--attacks", attacks)
    assert (status, out) == (2, "")
    assert message in err
