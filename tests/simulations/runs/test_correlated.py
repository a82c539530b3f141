"""Runs with correlated noise: any interruption gives the same bits, and what cannot go on is
refused."""

from __future__ import annotations

import random
import shutil
import stat
import warnings
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedlgm.errors import RunError
from simulations import launch
from simulations.config.assembly import Assembly
from simulations.runs.folder import RunFolder
from tests.support.interruption import Interrupted, charges, interrupt_at, interrupted

ROUNDS = 8
SAME = (
    "model_sha256",
    "accuracy",
    "epsilon",
    "rounds",
    "noise_multiplier",
    "guarantee",
    "ledger_head",
)
KINDS = {
    "banded": {"noise": "banded"},
    "square-root": {"noise": "square-root", "bands": 3},
    "blt": {"noise": "blt", "buffers": 1},
    "independent": {"noise": "independent"},
}
SCHEMES = {
    "cyclic": {"sampling": "cyclic", "rate": 0.25},
    "min-separation": {"sampling": "min-separation", "rate": None, "cohort": 4},
    "grouped-poisson": {"sampling": "grouped-poisson", "rate": 0.2},
}


@pytest.fixture(scope="module")
def correlated(tiny):
    def make(noise="banded", scheme="cyclic", seed=3, checkpoint_every=3, **privacy):
        kind = {**KINDS[noise], **privacy}
        if scheme == "grouped-poisson":
            kind.setdefault("min_separation", 3)
        return tiny(
            run={"seed": seed, "checkpoint_every": checkpoint_every, "block_size": 10},
            federation={"rounds": ROUNDS, "dropout": 0.2, **SCHEMES[scheme]},
            privacy={"accountant": "rdp", **kind},
        )

    return make


@pytest.fixture(scope="module")
def _cut_once(correlated, tmp_path_factory):
    """Two runs without a seed, which end after five rounds."""
    path, recipe = tmp_path_factory.mktemp("cut"), correlated(seed=None)
    return [interrupted(recipe, path / name, 5).path for name in ("one", "other")]


@pytest.fixture
def cut(_cut_once, tmp_path):
    """Copies of them."""
    return [RunFolder.open(shutil.copytree(path, tmp_path / path.name)) for path in _cut_once]


CASES = [
    ("banded", "grouped-poisson"),
    ("square-root", "min-separation"),
    ("blt", "cyclic"),
    ("independent", "min-separation"),
]


@pytest.mark.parametrize(("noise", "scheme"), CASES)
def test_interruptions_change_no_bit(correlated, tmp_path, noise, scheme):
    recipe = correlated(noise, scheme)
    whole = launch.simulate(recipe, run_dir=tmp_path / "whole")
    assert whole["epsilon"] <= 8.0
    chance = random.Random(f"{noise} {scheme}")
    stops = (
        chance.randint(1, 3),
        chance.randint(7, ROUNDS),
    )  # rounds that were under way are finished first
    folder = interrupted(recipe, tmp_path / "cut", stops[0])
    with pytest.raises(Interrupted):
        launch.resume(folder.path, progress=interrupt_at(stops[1]))
    result = launch.resume(folder.path)
    assert {name: result[name] for name in SAME} == {name: whole[name] for name in SAME}
    assert charges(folder) == list(range(1, ROUNDS + 1))
    assert not (folder.path / "private" / "noise").exists()  # a public seed is its state


@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_a_seed_too(correlated, tmp_path, scheme):
    """A copy of the folder at its start, run through, is the run that was interrupted again and
    again."""
    folder = interrupted(correlated(scheme=scheme, seed=None), tmp_path / "run", 1)
    shutil.copytree(folder.path, tmp_path / "copy")
    for at in (5, 8):
        with pytest.raises(Interrupted):
            launch.resume(folder.path, progress=interrupt_at(at))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = launch.resume(folder.path), launch.resume(tmp_path / "copy")
    assert {name: first[name] for name in SAME} == {name: second[name] for name in SAME}
    assert charges(folder) == list(range(1, ROUNDS + 1))
    assert first["epsilon"] <= 8.0


def test_the_secret_state_is_private_while_it_lasts_and_then_goes(correlated, tmp_path):
    folder = interrupted(correlated(seed=None), tmp_path / "run", 4)
    file = folder.path / "private" / "noise"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    roots = [line.split()[1] for line in file.read_text().splitlines()]
    assert len(roots) >= 4
    for path in folder.path.rglob("*"):
        if path.is_file() and path != file:
            content = path.read_bytes()
            for root in roots:
                assert root.encode() not in content, path
                assert int(root, 16).to_bytes(16, "little") not in content, path
    shutil.copy(
        folder.path / "private" / "keys", folder.path / "private" / ".keys.17.42"
    )  # killed while making it
    launch.resume(folder.path)
    assert not file.exists()
    assert not list(file.parent.glob("*keys*"))
    assert not list(file.parent.glob(".*"))


def test_a_copy_without_its_rights_is_closed_again(correlated, tmp_path):
    """As tools leave it that do not keep modes, on another machine, say."""
    folder = interrupted(correlated(seed=None), tmp_path / "run", 2)
    private = folder.path / "private"
    private.chmod(0o755)
    for path in private.iterdir():
        path.chmod(0o644)
    with pytest.raises(Interrupted):
        launch.resume(folder.path, progress=interrupt_at(5))
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in private.iterdir()} == {0o600}
    assert {"noise", "keys", "diagnostics.jsonl"} <= {path.name for path in private.iterdir()}


@pytest.mark.parametrize("name", ["noise", "keys"])
def test_without_the_secret_state_a_run_does_not_go_on(cut, name):
    folder = cut[0]
    (folder.path / "private" / name).unlink()
    before = charges(folder)
    with pytest.raises(RunError, match=r"restore .*from a backup, or start a new run"):
        launch.resume(folder.path)
    assert charges(folder) == before


def test_damaged_keys_are_refused(cut):
    folder = cut[0]
    (folder.path / "private" / "keys").write_text("nothing of the kind")
    with pytest.raises(
        RunError, match="keys is damaged: restore it from a backup, or start a new run"
    ):
        launch.resume(folder.path)


def test_another_state_is_refused(cut):
    one, other = cut
    shutil.copy(other.path / "private" / "noise", one.path / "private" / "noise")
    with pytest.raises(RunError, match="does not belong to the rounds before the last checkpoint"):
        launch.resume(one.path)


@pytest.mark.parametrize("content", [b"1 xyz\n", b"\xff\n", b"1 2 3\n"])
def test_a_damaged_state_is_refused(cut, content):
    folder = cut[0]
    (folder.path / "private" / "noise").write_bytes(content)
    with pytest.raises(RunError, match="noise is damaged"):
        launch.resume(folder.path)


def test_a_line_cut_short_by_a_crash_is_written_again(cut, tmp_path):
    folder = cut[0]
    file = folder.path / "private" / "noise"
    shutil.copytree(folder.path, tmp_path / "copy")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]) + lines[-1][:9])
    first, second = launch.resume(folder.path), launch.resume(tmp_path / "copy")
    assert first["model_sha256"] == second["model_sha256"]


def test_a_damaged_checkpoint_falls_back_to_the_one_before(correlated, tmp_path):
    folder = interrupted(correlated(seed=None, checkpoint_every=1), tmp_path / "run", 5)
    shutil.copytree(folder.path, tmp_path / "copy")
    newest = sorted((folder.path / "checkpoints").glob("*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:100])
    first, second = launch.resume(folder.path), launch.resume(tmp_path / "copy")
    assert first["model_sha256"] == second["model_sha256"]


def test_other_coefficients_are_refused(correlated, tmp_path, monkeypatch):
    """A machine that computes other last bits would draw other noise than the run's."""
    folder = interrupted(correlated(), tmp_path / "run", 5)
    from fedlgm.noise import correlation

    exact = correlation.get

    def off(name, rounds, **options):
        found = exact(name, rounds, **options)
        return correlation.Correlation(name, rounds, found.coefficients * (1 - 1e-15))

    monkeypatch.setattr(correlation, "get", off)
    with pytest.raises(
        RunError, match="coefficients that differ from those that this machine computes"
    ):
        launch.resume(folder.path)


def test_figures_of_a_round_are_those_of_its_own_noise(correlated, tmp_path):
    recipe = correlated()
    result = launch.simulate(recipe, run_dir=tmp_path / "run")
    std = Assembly(recipe).privacy.facts.noise.noise_std()
    rows = RunFolder(Path(result["run"])).rows()
    sigma = rows[0]["sigma"]
    for row, factor in zip(rows, std, strict=True):
        assert row["sigma"] == sigma  # of z: the same in every round
        assert row["noise_norm"] == pytest.approx(rows[0]["noise_norm"] * factor / std[0])
    assert rows[-1]["noise_norm"] > 1.1 * rows[0]["noise_norm"]


@pytest.mark.parametrize(("noise", "edited"), [("banded", True), ("independent", False)])
def test_the_keys_of_another_run_are_refused(correlated, cut, tmp_path, noise, edited):
    """By other keys clients would be in other groups, and take part sooner than the run's cost
    allows.

    A checkpoint whose name of the keys was removed let them pass.
    """
    one, other = cut
    if noise != "banded":
        recipe = correlated(noise, seed=None)
        one, other = (interrupted(recipe, tmp_path / f"{noise} {i}", 5) for i in range(2))
    before = charges(one)
    shutil.copy(other.path / "private" / "keys", one.path / "private" / "keys")
    for file in one.checkpoints.files() if edited else ():
        with safe_open(file, framework="pt") as stored:
            meta = dict(stored.metadata())
        save_file(
            load_file(file),
            file,
            metadata={key: text for key, text in meta.items() if key != "keys"},
        )
    with pytest.raises(RunError, match="does not belong to the rounds before the last checkpoint"):
        launch.resume(one.path)
    assert charges(one) == before


def test_another_multiplier_is_refused(correlated, tmp_path, monkeypatch):
    """Rounds of one mechanism that are made for different noise compose to neither's cost."""
    folder = interrupted(correlated(), tmp_path / "run", 5)
    from fedlgm.privacy import whole_run

    monkeypatch.setattr(whole_run, "MARGIN", 1e-3)
    with pytest.raises(RunError, match=r"noise multiplier of .* continue it where it was started"):
        launch.resume(folder.path)


@pytest.mark.parametrize(
    ("noise", "scheme"), [("banded", "cyclic"), ("independent", "min-separation")]
)
def test_the_summary_of_a_finished_run_is_written_again_without_its_keys(
    correlated, tmp_path, noise, scheme
):
    """As the message about a damaged summary says: nothing is drawn any more."""
    first = launch.simulate(correlated(noise, scheme, seed=None), run_dir=tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    again = launch.resume(tmp_path / "run")
    assert {name: again[name] for name in SAME} == {name: first[name] for name in SAME}
