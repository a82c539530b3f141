"""Attacks on the layers over the emphasis factor: a trial on small files, and what the page says."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from fedlgm_lab.studies.tables import layer_attacks, maker, runs
from fedlgm_lab.studies.tables.store import Kept
from tests.support.data_files import write_cifar10


def test_a_trial_runs_on_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As listed, but for two steps of one seed at the first and the last emphasis."""
    write_cifar10(tmp_path / "data" / "cifar-10-batches-py", n=20)
    short = copy.deepcopy(runs.settings(layer_attacks.NAME))
    short["axes"]["emphasis"]["mechanism.emphasis"] = [1.0, 5.0]
    for group in short["groups"]:
        if "emphasis" in group["axes"]:
            group["axes"]["emphasis"] = "all"
        group["seeds"] = [1]
        group["set"] |= {"federation.rounds": 2, "training.batch_size": 4}
        group["set"] |= {"privacy.accountant": "rdp"}  # its calibrations are quick
    monkeypatch.setattr(runs, "settings", lambda name: short)
    monkeypatch.setattr(layer_attacks, "PRIVATE", 20)
    monkeypatch.setattr(layer_attacks, "PUBLIC", 40)
    settings = {"data": str(tmp_path / "data")}
    pages, complete = maker.make("layer-attacks", tmp_path / "out", settings)
    assert complete
    assert not any(pages["lm-dp-sgd.md"].values())  # one seed shows nothing
    risk, *kept = json.loads((tmp_path / "out" / "layer-attacks.json").read_text())
    assert len(risk["error_rates"]) == 4
    assert [row.get("budget") for row in kept] == [None, 8, 8, 300, 300]
    assert [row["guarantee"] for row in kept] == ["none", *["proven"] * 4]
    for row in kept:
        assert list(row["attacks"]) == risk["layers"]
    assert kept[0]["epsilon"] is None
    assert [row["epsilon"] for row in kept[1:]] == pytest.approx([8, 8, 300, 300], rel=1e-4)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    """Attacks that become less accurate on the last layer, and do not change on the first one."""
    made = Kept(tmp_path / "kept.json")
    for cell in runs.cells(made, layer_attacks.NAME):
        for seed in cell.seeds:
            r = cell.name.get("emphasis", 0.0)
            attacks = {"conv1": 50.0 + seed * (-1) ** r, "fc2": 80.0 - 3 * r + 0.1 * seed * r}
            figures = {"attacks": attacks, "accuracy": 40.0, "accuracy_members": 90.0}
            made.rows.append({**cell.name, "seed": seed, **figures})
    return made


def test_the_page_says_whether_the_paper_is_reproduced(kept: Kept) -> None:
    rows = [line.strip("| ").split(" | ") for line in layer_attacks.changes(kept).splitlines()]
    assert [(row[0], row[1], row[-1]) for row in rows[2:]] == [
        ("8", "conv1", "not decided"),
        ("8", "fc2", "reproduced"),
        ("300", "conv1", "not decided"),
        ("300", "fc2", "reproduced"),
    ]
    table = layer_attacks.attacks(kept).splitlines()
    assert len(table) == 2 + 1 + 3 + 5
    assert table[2].startswith("| no privacy | - | ")
